//! Whether other nodes are there: the one thread of the process that asks them and answers them, and nothing else, so that
//! no busy edge thread makes this node look dead. Nor does a busy machine: the thread runs before all others, and waits for no
//! lock that records are changed under. What others send it can use up is bounded therefore.
//!
//! A request that is on its way to a node and gets no answer at once has the node asked (`watch`). All requests share one
//! question. What the answers, refusals and silences mean is decided by `nagaya_placement::liveness`.
//! The members' vouches for each other go over the same socket (`vouch`).
//! Not here: datagrams (`datagram`), one node's sockets (`line`), what follows from silence (`place`).

pub(crate) mod datagram;
mod line;
pub mod vouch;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;
use nagaya_cmdb::feed::Up;
use nagaya_cmdb::{NodeName, NodeRecord};
use nagaya_placement::Moment;
use nagaya_placement::liveness::{self, Verdict};
use parking_lot::{Mutex, RwLock};
use tokio::net::UdpSocket;
use tokio::sync::{mpsc, oneshot};
use tokio::task::LocalSet;
use tokio::time::sleep;

use crate::cluster::{Member, boottime};
use crate::shared::Shared;
use datagram::{Datagram, Kind, LEN_MAX};
use line::{Event, Line};
use vouch::{Order, Vouching};

/// Questions of other nodes that are looked at in a window; what comes beyond them waits in the socket, or is dropped there. A hundred
/// nodes that each ask three times for a probe every 100th of a second are 30,000 in a second.
const WINDOW: Duration = Duration::from_millis(100);
const ANSWERS_PER_WINDOW: u32 = 4_000;

/// Requests that the thread has not looked at yet, and datagrams: of what is more, requests ask again and nodes answer again.
const ASKS_MAX: usize = 16_384;
const EVENTS_MAX: usize = 4096;

/// Orders of the supervisor about vouching that the thread has not looked at: one round, and an answer for each member.
const ORDERS_MAX: usize = 2048;

/// The thread's name. By it the supervisor has it run before all others.
pub const THREAD: &str = "probes";

/// What keeps a node from being probed is said so often.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);

/// Nodes that are looked after at once.
const LINES_MAX: usize = 1024;

/// Requests' end of it: shared by all threads.
#[derive(Debug, Default)]
pub struct Probes {
    /// When each node was last heard from, CLOCK_BOOTTIME.
    heard: RwLock<HashMap<NodeName, Arc<AtomicU64>, RandomState>>,
    asks: Mutex<Option<mpsc::Sender<Asked>>>,
    orders: Mutex<Option<mpsc::Sender<Order>>>,
}

/// A request wants to know.
struct Asked {
    record: Arc<NodeRecord>,
    /// What was found a short while ago does not do.
    is_anew: bool,
    found: oneshot::Sender<Found>,
}

/// What it is told.
#[derive(Debug, Clone, Copy)]
pub struct Found {
    pub verdict: Verdict,
    /// As long as requests wait, the node is asked again so long after this question.
    pub again: Duration,
}

impl Found {
    /// The node was not asked.
    const NOTHING: Self = Self { verdict: Verdict::Pending, again: liveness::BOUND_MAX };
}

impl Probes {
    /// Something of an answer has come from there.
    pub fn heard(&self, node: &NodeName) {
        self.heard_at(node, boottime());
    }

    fn heard_at(&self, node: &NodeName, at: Moment) {
        if let Some(heard) = self.heard.read().get(node) {
            heard.fetch_max(at.0, Ordering::Relaxed);
            return;
        }
        let mut all = self.heard.write();
        if all.len() >= LINES_MAX {
            all.clear();
        }
        all.entry(node.clone()).or_default().fetch_max(at.0, Ordering::Relaxed);
    }

    /// By a request or a probe.
    pub fn last_heard(&self, node: &NodeName) -> Option<Moment> {
        self.heard.read().get(node).map(|heard| Moment(heard.load(Ordering::Relaxed)))
    }

    /// The supervisor wants other members asked, or answered. What finds no room is as good as lost on the way.
    pub fn vouch(&self, order: Order) {
        if let Some(orders) = &*self.orders.lock() {
            let _ = orders.try_send(order);
        }
    }

    /// It was heard from just now, so it need not be asked.
    pub fn is_fresh(&self, node: &NodeName) -> bool {
        self.last_heard(node).is_some_and(|heard| boottime().since(heard) < liveness::FRESH)
    }

    /// Asks the node, together with all who do so now. `Pending`: it was not asked, because nobody can be, or too many want it.
    pub async fn ask(&self, record: &Arc<NodeRecord>) -> Found {
        self.send(record, false).await
    }

    /// The same, whatever was found against it a short while ago.
    pub async fn ask_anew(&self, record: &Arc<NodeRecord>) -> Found {
        self.send(record, true).await
    }

    async fn send(&self, record: &Arc<NodeRecord>, is_anew: bool) -> Found {
        let (sender, found) = oneshot::channel();
        let asked = Asked { record: Arc::clone(record), is_anew, found: sender };
        let is_asked = self.asks.lock().as_ref().is_some_and(|asks| asks.try_send(asked).is_ok());
        if is_asked { found.await.unwrap_or(Found::NOTHING) } else { Found::NOTHING }
    }
}

/// Starts the thread. It lives as long as the process.
pub fn start(shared: Arc<Shared>, socket: OwnedFd) -> io::Result<()> {
    let (sender, asks) = mpsc::channel(ASKS_MAX);
    let socket = std::net::UdpSocket::from(socket);
    socket.set_nonblocking(true)?;
    *shared.cluster.peers.probes.asks.lock() = Some(sender);
    let (sender, orders) = mpsc::channel(ORDERS_MAX);
    *shared.cluster.peers.probes.orders.lock() = Some(sender);
    let (say, begun) = std::sync::mpsc::channel();
    std::thread::Builder::new().name(THREAD.into()).spawn(move || {
        let _ = say.send(());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let result = runtime.and_then(|runtime| {
            LocalSet::new().block_on(&runtime, async {
                let socket = UdpSocket::from_std(socket)?;
                Prober::new(shared).run(socket, asks, orders).await;
                Ok(())
            })
        });
        if let Err(error) = result {
            tracing::error!(code = "NGY0467", %error, "other nodes are not asked whether they are there, and not answered");
        }
    })?;
    // It has its name now, by which it is found.
    begun.recv().map_err(io::Error::other)
}

/// The thread.
struct Prober {
    shared: Arc<Shared>,
    lines: HashMap<NodeName, Line>,
    events: (mpsc::Sender<Event>, mpsc::Receiver<Event>),
    window: (Instant, u32),
    vouching: Vouching,
    /// When it last said that a node cannot be probed.
    complained: Option<Instant>,
}

impl Prober {
    fn new(shared: Arc<Shared>) -> Self {
        let (lines, events) = (HashMap::new(), mpsc::channel(EVENTS_MAX));
        let window = (Instant::now(), 0);
        Self { shared, lines, events, window, vouching: Vouching::default(), complained: None }
    }

    async fn run(
        mut self,
        socket: UdpSocket,
        mut asks: mpsc::Receiver<Asked>,
        mut orders: mpsc::Receiver<Order>,
    ) {
        // One byte more than the longest, so that a longer one shows.
        let mut buffer = [0; LEN_MAX + 1];
        // A socket that the runtime has heard nothing of yet takes nothing either.
        let _ = socket.writable().await;
        loop {
            let due = self.lines.values().filter_map(Line::due).min().map(|due| due.since(boottime()));
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
                    // An error is one of a datagram that was sent before: there is nothing to do about it.
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

    fn asked(&mut self, asked: Asked) {
        let Some(member) = self.shared.cluster.member() else {
            // Whoever is alone holds nothing against anybody.
            let _ = asked.found.send(Found { verdict: Verdict::Answers, ..Found::NOTHING });
            return;
        };
        let Asked { record, is_anew, found } = asked;
        let is_same = |line: &Line| line.is_of(&record, &member);
        if !self.lines.get(&record.name).is_some_and(is_same) {
            if self.lines.len() >= LINES_MAX {
                self.lines.clear();
            }
            match Line::open(&record, &member, self.events.0.clone()) {
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
        let heard = self.shared.cluster.peers.probes.last_heard(&record.name);
        if let Some(line) = self.lines.get_mut(&record.name) {
            line.ask(heard, is_anew, found);
        }
        self.tell(&record.name);
    }

    fn event(&mut self, event: Event) {
        let node = event.node.clone();
        if let Some(line) = self.lines.get_mut(&node) {
            line.take(event);
        }
        self.tell(&node);
    }

    /// Time has come for some: datagrams that lie in sockets are taken in first.
    fn alarm(&mut self) {
        while let Ok(event) = self.events.1.try_recv() {
            self.event(event);
        }
        let nodes: Vec<_> = self.lines.keys().cloned().collect();
        for node in nodes {
            let heard = self.shared.cluster.peers.probes.last_heard(&node);
            if let Some(line) = self.lines.get_mut(&node)
                && line.due().is_some_and(|due| due <= boottime())
            {
                line.alarm(heard);
                self.tell(&node);
            }
        }
    }

    fn tell(&mut self, node: &NodeName) {
        let tallies = &self.shared.cluster.peers.tallies;
        if let Some(line) = self.lines.get_mut(node) {
            if let Some(heard) = line.last_heard() {
                self.shared.cluster.peers.probes.heard_at(node, heard);
            }
            if line.take_return() {
                self.shared.cluster.desk.say(Up::Heard { node: node.clone() });
            }
            if line.take_lateness() {
                self.shared.cluster.desk.say(Up::Doubt { node: node.clone() });
            }
            for found in line.take_findings() {
                tallies.probed(node, found);
            }
            let (round_trip, bound, false_alarms) = line.figures();
            let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
            tallies.measured(node, us(round_trip), us(bound), false_alarms);
        }
    }

    /// For so long no further question is looked at.
    fn pause(&self) -> Option<Duration> {
        let (begun, count) = self.window;
        let left = WINDOW.saturating_sub(begun.elapsed());
        (count >= ANSWERS_PER_WINDOW && !left.is_zero()).then_some(left)
    }

    /// Another node wants to know whether this one is there.
    fn question(&mut self, socket: &UdpSocket, bytes: &[u8], from: SocketAddr) {
        let (begun, count) = &mut self.window;
        if begun.elapsed() >= WINDOW {
            (*begun, *count) = (Instant::now(), 0);
        }
        *count += 1;
        let Some(member) = self.shared.cluster.member() else { return };
        if vouch::is_one(bytes) {
            if let Some(news) = self.vouching.take(Instant::now(), bytes, from, &member) {
                self.shared.cluster.desk.say(news);
            }
            return;
        }
        let read = |key: &_| Datagram::read(bytes, key).filter(|said| said.kind == Kind::Question);
        let Some((question, key)) = member.credentials.probe_keys.read(read) else { return };
        let answer = Datagram { kind: Kind::Answer, nonce: question.nonce, ..own(&member) };
        if let Some(answer) = answer.write(key) {
            // One that cannot be sent now is as good as lost on the way.
            let _ = socket.try_send_to(&answer, from);
        }
    }

    /// The supervisor's part in vouching.
    fn order(&mut self, socket: &UdpSocket, order: Order) {
        match order {
            Order::Ask { round, members } => {
                self.vouching.begin(Instant::now(), round, &members);
                self.ask_for_vouches(socket);
            }
            Order::Vouch { tag, moved } => {
                let Some(member) = self.shared.cluster.member() else { return };
                if let Some((answer, to)) = self.vouching.vouch(tag, moved, &member) {
                    let _ = socket.try_send_to(&answer, to);
                }
            }
        }
    }

    fn ask_for_vouches(&mut self, socket: &UdpSocket) {
        let Some(member) = self.shared.cluster.member() else {
            self.vouching = Vouching::default();
            return;
        };
        for (question, to) in self.vouching.questions(Instant::now(), &member) {
            // One that cannot be sent now is sent again.
            let _ = socket.try_send_to(&question, to);
        }
    }
}

/// What this node says of itself.
fn own(member: &Member) -> Datagram {
    Datagram {
        kind: Kind::Question,
        nonce: [0; 16],
        node: member.node.as_str().to_owned(),
        id: member.options.id.clone(),
    }
}
