//! Probes other nodes and answers their probes, on a thread of its own. So no busy edge thread
//! makes this node look dead. A busy machine does not either: the thread runs before all others.
//! It waits for no lock under which records are changed. So the work that others can cause here
//! is limited.
//!
//! If a request gets no answer from a node at once, the node is asked (`watch`). All requests share
//! one question. `nagaya_placement::liveness` decides about the meaning of answers, refusals and
//! silences. The members' vouches for each other go over the same socket (`vouch`). Not here:
//! datagrams (`datagram`), one node's sockets (`line`), what follows from silence (`placement`).

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_placement::liveness::ProbeResult;
use nagaya_records::NodeName;
use nagaya_records::feed::ToSupervisor;
use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::task::LocalSet;
use tokio::time::sleep;

use crate::cluster::membership::EdgeCluster;
use crate::cluster::node_lease::boottime;
use crate::cluster::peers::probe::datagram::{DatagramKind, LEN_MAX, ProbeDatagram, own};
use crate::cluster::peers::probe::line::{PeerProber, ProbeEvent};
use crate::cluster::peers::probe::vouch::{VouchOrder, VouchState};
use crate::cluster::peers::probes::{LINES_MAX, ProbeFinding, ProbeRequest};

pub(crate) mod datagram;
pub mod line;
pub mod vouch;

/// Period for the limit `ANSWERS_PER_WINDOW` on probes of other nodes. Further ones wait in the
/// socket, or are dropped there. A hundred nodes with three datagrams per probe, each 100th of a
/// second, send 30,000 in a second.
const WINDOW: Duration = Duration::from_millis(100);
const ANSWERS_PER_WINDOW: u32 = 4_000;

/// Maximum number of unread requests and datagrams. Beyond it they are dropped: requests ask
/// again and nodes answer again.
const ASKS_MAX: usize = 16_384;
const EVENTS_MAX: usize = 4096;

/// Maximum number of unread orders about vouching: one round, and an answer for each member.
const ORDERS_MAX: usize = 2048;

/// Name of the thread. The supervisor finds it by this name and lets it run before all others.
pub const THREAD: &str = "probes";

/// Interval of the log line about a node that cannot be probed.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);

/// Starts the thread. It lives as long as the process.
pub fn start(cluster: Arc<EdgeCluster>, socket: OwnedFd) -> io::Result<()> {
    let (sender, asks) = mpsc::channel(ASKS_MAX);
    let socket = std::net::UdpSocket::from(socket);
    socket.set_nonblocking(true)?;
    let (order_sender, orders) = mpsc::channel(ORDERS_MAX);
    cluster.peers.probes.open(sender, order_sender);
    let (say, begun) = std::sync::mpsc::channel();
    std::thread::Builder::new().name(THREAD.into()).spawn(move || {
        let _ = say.send(());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let result = runtime.and_then(|runtime| {
            LocalSet::new().block_on(&runtime, async {
                let socket = UdpSocket::from_std(socket)?;
                ProbeThread::new(cluster).run(socket, asks, orders).await;
                Ok(())
            })
        });
        if let Err(error) = result {
            tracing::error!(code = "NGY0467", %error, "other nodes are neither probed nor answered");
        }
    })?;
    // It has its name now, by which it is found.
    begun.recv().map_err(io::Error::other)
}

/// State of the thread.
struct ProbeThread {
    cluster: Arc<EdgeCluster>,
    lines: HashMap<NodeName, PeerProber>,
    events: (mpsc::Sender<ProbeEvent>, mpsc::Receiver<ProbeEvent>),
    window: (Instant, u32),
    vouching: VouchState,
    /// Last log line about a node that cannot be probed.
    complained: Option<Instant>,
}

impl ProbeThread {
    fn new(cluster: Arc<EdgeCluster>) -> Self {
        let (lines, events) = (HashMap::new(), mpsc::channel(EVENTS_MAX));
        let window = (Instant::now(), 0);
        Self { cluster, lines, events, window, vouching: VouchState::default(), complained: None }
    }

    async fn run(
        mut self,
        socket: UdpSocket,
        mut asks: mpsc::Receiver<ProbeRequest>,
        mut orders: mpsc::Receiver<VouchOrder>,
    ) {
        // One byte more than the longest datagram, so that a longer one shows.
        let mut buffer = [0; LEN_MAX + 1];
        // A new socket that the runtime has not registered yet accepts nothing either.
        let _ = socket.writable().await;
        loop {
            let due = self.lines.values().filter_map(PeerProber::due).min().map(|due| due.since(boottime()));
            let resend = self.vouching.due().map(|due| due.saturating_duration_since(Instant::now()));
            let alarm = async {
                match due.into_iter().chain(resend).min() {
                    Some(left) => sleep(left).await,
                    None => std::future::pending().await,
                }
            };
            let pause = self.pause();
            let question = async {
                if let Some(left) = pause {
                    sleep(left).await;
                }
                socket.recv_from(&mut buffer).await
            };
            tokio::select! {
                asked = asks.recv() => match asked {
                    Some(asked) => self.asked(asked),
                    None => return,
                },
                Some(event) = self.events.1.recv() => self.event(event),
                Some(order) = orders.recv() => self.order(&socket, order),
                received = question => {
                    // An error belongs to an earlier datagram, and needs no action.
                    if let Ok((len, from)) = received {
                        self.question(&socket, &buffer[..len], from);
                    }
                }
                () = alarm => {
                    self.alarm();
                    self.ask_for_vouches(&socket);
                }
            }
        }
    }

    fn asked(&mut self, asked: ProbeRequest) {
        let Some(member) = self.cluster.member() else {
            // A node without a cluster has no finding against anybody.
            let _ = asked.found.send(ProbeFinding { verdict: ProbeResult::Answers, ..ProbeFinding::NOTHING });
            return;
        };
        let ProbeRequest { record, is_anew, found } = asked;
        let is_same = |line: &PeerProber| line.is_of(&record, &member);
        if !self.lines.get(&record.name).is_some_and(is_same) {
            if self.lines.len() >= LINES_MAX {
                self.lines.clear();
            }
            match PeerProber::open(&record, &member, self.events.0.clone()) {
                Ok(line) => {
                    self.lines.insert(record.name.clone(), line);
                }
                Err(error) => {
                    if self.complained.is_none_or(|last| last.elapsed() >= COMPLAIN_EVERY) {
                        self.complained = Some(Instant::now());
                        tracing::warn!(code = "NGY0467", node = %record.name, %error, "another node cannot be probed");
                    }
                    return;
                }
            }
        }
        let heard = self.cluster.peers.probes.last_heard(&record.name);
        if let Some(line) = self.lines.get_mut(&record.name) {
            line.ask(heard, is_anew, found);
        }
        self.tell(&record.name);
    }

    fn event(&mut self, event: ProbeEvent) {
        let node = event.node.clone();
        if let Some(line) = self.lines.get_mut(&node) {
            line.take(event);
        }
        self.tell(&node);
    }

    /// Handles timeouts. Datagrams in the sockets are read first.
    fn alarm(&mut self) {
        while let Ok(event) = self.events.1.try_recv() {
            self.event(event);
        }
        let nodes: Vec<_> = self.lines.keys().cloned().collect();
        for node in nodes {
            let heard = self.cluster.peers.probes.last_heard(&node);
            if let Some(line) = self.lines.get_mut(&node)
                && line.due().is_some_and(|due| due <= boottime())
            {
                line.alarm(heard);
                self.tell(&node);
            }
        }
    }

    fn tell(&mut self, node: &NodeName) {
        let tallies = &self.cluster.peers.tallies;
        if let Some(line) = self.lines.get_mut(node) {
            if let Some(heard) = line.last_heard() {
                self.cluster.peers.probes.heard_at(node, heard);
            }
            if line.take_return() {
                self.cluster.placement_client.say(ToSupervisor::Heard { node: node.clone() });
            }
            if line.take_lateness() {
                self.cluster.placement_client.say(ToSupervisor::Doubt { node: node.clone() });
            }
            for found in line.take_findings() {
                tallies.probed(node, found);
            }
            let (round_trip, bound, false_alarms) = line.figures();
            let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
            tallies.measured(node, us(round_trip), us(bound), false_alarms);
        }
    }

    /// Returns the time for which no further probe is read.
    fn pause(&self) -> Option<Duration> {
        let (begun, count) = self.window;
        let left = WINDOW.saturating_sub(begun.elapsed());
        (count >= ANSWERS_PER_WINDOW && !left.is_zero()).then_some(left)
    }

    /// Answers the probe of another node.
    fn question(&mut self, socket: &UdpSocket, bytes: &[u8], from: SocketAddr) {
        let (begun, count) = &mut self.window;
        if begun.elapsed() >= WINDOW {
            (*begun, *count) = (Instant::now(), 0);
        }
        *count += 1;
        let Some(member) = self.cluster.member() else { return };
        if vouch::is_one(bytes) {
            if let Some(news) = self.vouching.take(Instant::now(), bytes, from, &member) {
                self.cluster.placement_client.say(news);
            }
            return;
        }
        let read =
            |key: &_| ProbeDatagram::read(bytes, key).filter(|said| said.kind == DatagramKind::Question);
        let Some((question, key)) = member.credentials.probe_keys.read(read) else { return };
        let answer = ProbeDatagram { kind: DatagramKind::Answer, nonce: question.nonce, ..own(&member) };
        if let Some(answer) = answer.write(key) {
            // If it cannot be sent now, it counts as lost on the way.
            let _ = socket.try_send_to(&answer, from);
        }
    }

    /// Handles the supervisor's part in vouching.
    fn order(&mut self, socket: &UdpSocket, order: VouchOrder) {
        match order {
            VouchOrder::Ask { round, members } => {
                self.vouching.begin(Instant::now(), round, &members);
                self.ask_for_vouches(socket);
            }
            VouchOrder::Vouch { tag, moved } => {
                let Some(member) = self.cluster.member() else { return };
                if let Some((answer, to)) = self.vouching.vouch(tag, moved, &member) {
                    let _ = socket.try_send_to(&answer, to);
                }
            }
        }
    }

    fn ask_for_vouches(&mut self, socket: &UdpSocket) {
        let Some(member) = self.cluster.member() else {
            self.vouching = VouchState::default();
            return;
        };
        for (question, to) in self.vouching.questions(Instant::now(), &member) {
            // If it cannot be sent now, it is sent again.
            let _ = socket.try_send_to(&question, to);
        }
    }
}
