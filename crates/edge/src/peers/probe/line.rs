//! The thread's line to one other node: its socket, what was asked and when, and who waits for the answer.
//!
//! Not here: the thread (`probe`), what an answer means (`nagaya_placement::liveness`).

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nagaya_cmdb::{NodeName, NodeRecord};
use nagaya_placement::Moment;
use nagaya_placement::liveness::{Ask, Peer, Probe, Verdict};
use rustix::net::{RecvFlags, SendFlags};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpSocket, UdpSocket};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::sleep;

use super::datagram::{Datagram, Kind, LEN_MAX, Nonce};
use super::{Found, own};
use crate::cluster::{Member, boottime};
use crate::options::ProbeKind;

/// Datagrams of the last probes whose answers are still known, late ones too.
const SENT_MAX: usize = 32;

/// After an error of the socket that says nothing, it is read again after this.
const ERROR_PAUSE: Duration = Duration::from_millis(10);

/// Datagrams of a node that are looked at in a window; the rest wait in the socket, or are dropped there. Three to a probe, and the
/// next probe after the shortest bound, are 15.
const WINDOW: Duration = Duration::from_millis(100);
const READ_PER_WINDOW: u32 = 128;

/// An ICMP message: type, code, checksum, identifier, sequence number; then ours.
const ICMP_HEAD: usize = 8;

/// What a line has heard.
#[derive(Debug)]
pub struct Event {
    pub node: NodeName,
    pub what: Heard,
}

#[derive(Debug)]
pub enum Heard {
    Bytes(Vec<u8>),
    /// The host says that nobody listens there.
    Refused,
    /// Of a connection that was made, or refused, as a probe.
    Connected(Nonce),
}

pub struct Line {
    record: Arc<NodeRecord>,
    member: Arc<Member>,
    peer: Peer,
    wire: Wire,
    sent: Vec<Sent>,
    waiting: Vec<(Probe, oneshot::Sender<Found>)>,
    findings: Vec<&'static str>,
    /// The probe under way.
    under_way: Option<Probe>,
    /// It has no answer as soon as usual, and nobody was told yet.
    is_late: bool,
}

struct Sent {
    nonce: Nonce,
    probe: Probe,
    at: Moment,
}

/// How it is asked.
enum Wire {
    Datagrams { socket: Rc<UdpSocket>, reader: AbortHandle, is_icmp: bool, is_ipv6: bool },
    Connections { address: SocketAddr, events: mpsc::Sender<Event> },
}

impl Drop for Wire {
    fn drop(&mut self) {
        if let Self::Datagrams { reader, .. } = self {
            reader.abort();
        }
    }
}

impl Line {
    pub fn open(
        record: &Arc<NodeRecord>,
        member: &Arc<Member>,
        events: mpsc::Sender<Event>,
    ) -> io::Result<Self> {
        let address: SocketAddr = record
            .peer
            .parse()
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "its address is none"))?;
        let wire = match member.options.probe {
            ProbeKind::Connect => Wire::Connections { address, events },
            ProbeKind::Udp => Wire::datagrams(udp(address)?, &record.name, false, address, events),
            ProbeKind::Icmp => match icmp(address) {
                Ok(socket) => Wire::datagrams(socket, &record.name, true, address, events),
                Err(error) => {
                    say_once(&error);
                    Wire::datagrams(udp(address)?, &record.name, false, address, events)
                }
            },
        };
        Ok(Self {
            record: Arc::clone(record),
            member: Arc::clone(member),
            peer: Peer::new(Duration::from_millis(member.options.probe_ms)),
            wire,
            sent: Vec::with_capacity(SENT_MAX),
            waiting: Vec::new(),
            findings: Vec::new(),
            under_way: None,
            is_late: false,
        })
    }

    /// It is to this node as its record says now, with the credentials of now.
    pub fn is_of(&self, record: &NodeRecord, member: &Arc<Member>) -> bool {
        self.record.peer == record.peer && self.record.id == record.id && Arc::ptr_eq(&self.member, member)
    }

    /// When [`Self::alarm`] is to be called.
    pub fn due(&self) -> Option<Moment> {
        self.peer.until().into_iter().chain(self.peer.resend_at()).min()
    }

    /// A request wants to know. `heard`: when a request last heard from the node.
    pub fn ask(&mut self, heard: Option<Moment>, is_anew: bool, found: oneshot::Sender<Found>) {
        self.note(heard);
        if is_anew {
            self.peer.forget_findings();
        }
        match self.peer.ask(boottime()) {
            Ask::Fresh => {
                let _ = found.send(self.found(Verdict::Answers));
            }
            Ask::Send { probe, .. } => {
                self.under_way = Some(probe);
                self.waiting.push((probe, found));
                self.send(probe);
            }
            Ask::Shared { probe, .. } => self.waiting.push((probe, found)),
        }
        self.settle();
    }

    pub fn take(&mut self, event: Event) {
        match event.what {
            Heard::Bytes(bytes) => self.bytes(&bytes),
            Heard::Connected(nonce) => self.answered(&nonce),
            Heard::Refused => {
                if let Some(probe) = self.under_way {
                    self.peer.refused(boottime(), probe);
                }
            }
        }
        self.settle();
    }

    /// Time to send once more, or to end.
    pub fn alarm(&mut self, heard: Option<Moment>) {
        self.take_in();
        self.note(heard);
        let now = boottime();
        if let Some(probe) = self.under_way
            && self.peer.resend_at().is_some_and(|at| at <= now)
        {
            self.send(probe);
            self.peer.resent(now);
            self.is_late = true;
        }
        self.peer.expired(now);
        self.settle();
    }

    fn note(&mut self, heard: Option<Moment>) {
        if let Some(heard) = heard
            && self.peer.last_heard().is_none_or(|known| known < heard)
        {
            self.peer.heard(heard);
        }
    }

    /// Tells those who wait for a probe that has ended.
    fn settle(&mut self) {
        if let Some(probe) = self.under_way {
            let verdict = self.peer.verdict(probe);
            if verdict != Verdict::Pending {
                self.under_way = None;
                self.findings.push(match verdict {
                    Verdict::Silent => "silent",
                    Verdict::Refuses => "refuses",
                    _ => "answers",
                });
            }
        }
        let waiting = std::mem::take(&mut self.waiting);
        for (probe, found) in waiting {
            match self.peer.verdict(probe) {
                Verdict::Pending => self.waiting.push((probe, found)),
                verdict => {
                    // The request may have its answer by now.
                    let _ = found.send(self.found(verdict));
                }
            }
        }
    }

    fn found(&self, verdict: Verdict) -> Found {
        Found { verdict, again: self.peer.again(boottime()) }
    }

    pub fn last_heard(&self) -> Option<Moment> {
        self.peer.last_heard()
    }

    /// Whether it is there after all, once for each time that something was found against it.
    pub fn take_return(&mut self) -> bool {
        self.peer.take_return()
    }

    /// Whether a probe has no answer yet and was sent again, once for each time.
    pub fn take_lateness(&mut self) -> bool {
        std::mem::take(&mut self.is_late)
    }

    pub fn take_findings(&mut self) -> Vec<&'static str> {
        std::mem::take(&mut self.findings)
    }

    /// Round trip, bound, false alarms.
    pub fn figures(&self) -> (Duration, Duration, u64) {
        let bound = self.peer.bound(boottime());
        (self.peer.round_trip().unwrap_or_default(), bound, self.peer.false_alarms())
    }

    fn send(&mut self, probe: Probe) {
        let mut nonce = Nonce::default();
        getrandom::fill(&mut nonce).expect("the kernel gives random bytes once it has booted");
        if self.sent.len() >= SENT_MAX {
            self.sent.remove(0);
        }
        self.sent.push(Sent { nonce, probe, at: boottime() });
        let result = match &self.wire {
            Wire::Datagrams { socket, is_icmp: true, is_ipv6, .. } => send(socket, &echo(&nonce, *is_ipv6)),
            Wire::Datagrams { socket, .. } => {
                let question = Datagram { kind: Kind::Question, nonce, ..own(&self.member) };
                let bytes = question.write(self.member.credentials.probe_keys.own()).unwrap_or_default();
                send(socket, &bytes)
            }
            Wire::Connections { address, events } => {
                connect(*address, nonce, self.record.name.clone(), events.clone());
                Ok(0)
            }
        };
        // Sending tells of what was sent before.
        if result.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
            self.peer.refused(boottime(), probe);
        }
    }

    /// What lies in the socket.
    fn take_in(&mut self) {
        let Wire::Datagrams { socket, .. } = &self.wire else { return };
        let socket = Rc::clone(socket);
        let mut buffer = [0; LEN_MAX + 1];
        while let Ok((len, _)) = rustix::net::recv(&*socket, &mut buffer, RecvFlags::DONTWAIT) {
            self.bytes(&buffer[..len]);
        }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        match &self.wire {
            Wire::Datagrams { is_icmp: true, is_ipv6, .. } => {
                let reply = if *is_ipv6 { 129 } else { 0 };
                if bytes.first() == Some(&reply)
                    && let Some(nonce) = bytes.get(ICMP_HEAD..).and_then(|nonce| Nonce::try_from(nonce).ok())
                {
                    self.answered(&nonce);
                }
            }
            _ => {
                let keys = &self.member.credentials.probe_keys;
                let Some((said, _)) = keys.read(|key| Datagram::read(bytes, key)) else { return };
                let is_it = said.node == self.record.name.as_str() && said.id == self.record.id;
                if said.kind == Kind::Answer && is_it {
                    self.answered(&said.nonce);
                }
            }
        }
    }

    /// One that was sent before, and once only: a datagram that is sent again by somebody says nothing.
    fn answered(&mut self, nonce: &Nonce) {
        let Some(at) = self.sent.iter().position(|sent| sent.nonce == *nonce) else { return };
        let Sent { probe, at, .. } = self.sent.remove(at);
        self.peer.answered(boottime(), probe, at);
    }
}

impl Wire {
    fn datagrams(
        socket: UdpSocket,
        node: &NodeName,
        is_icmp: bool,
        address: SocketAddr,
        events: mpsc::Sender<Event>,
    ) -> Self {
        let socket = Rc::new(socket);
        let reader = spawn_local(read(Rc::clone(&socket), node.clone(), events)).abort_handle();
        Self::Datagrams { socket, reader, is_icmp, is_ipv6: address.is_ipv6() }
    }
}

/// Past the runtime, which lets nothing be sent before it has heard of a new socket: the first question would be lost, and its
/// node taken for silent.
fn send(socket: &UdpSocket, bytes: &[u8]) -> io::Result<usize> {
    Ok(rustix::net::send(socket, bytes, SendFlags::DONTWAIT)?)
}

async fn read(socket: Rc<UdpSocket>, node: NodeName, events: mpsc::Sender<Event>) {
    let mut buffer = [0; LEN_MAX + 1];
    let mut window = (Instant::now(), 0);
    loop {
        let (begun, count) = &mut window;
        if begun.elapsed() >= WINDOW {
            (*begun, *count) = (Instant::now(), 0);
        } else if *count >= READ_PER_WINDOW {
            sleep(WINDOW.saturating_sub(begun.elapsed())).await;
            continue;
        }
        *count += 1;
        let what = match socket.recv(&mut buffer).await {
            Ok(len) => Heard::Bytes(buffer[..len].to_vec()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Heard::Refused,
            Err(_) => {
                sleep(ERROR_PAUSE).await;
                continue;
            }
        };
        if events.send(Event { node: node.clone(), what }).await.is_err() {
            return;
        }
    }
}

fn udp(address: SocketAddr) -> io::Result<UdpSocket> {
    let any: SocketAddr = if address.is_ipv6() { ([0u16; 8], 0).into() } else { ([0u8; 4], 0).into() };
    let socket = std::net::UdpSocket::bind(any)?;
    socket.set_nonblocking(true)?;
    // Connected, so that the host's refusal comes back as an error.
    socket.connect(address)?;
    UdpSocket::from_std(socket)
}

fn icmp(address: SocketAddr) -> io::Result<UdpSocket> {
    let protocol = if address.is_ipv6() { Protocol::ICMPV6 } else { Protocol::ICMPV4 };
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(protocol))?;
    socket.set_nonblocking(true)?;
    socket.connect(&SocketAddr::new(address.ip(), 0).into())?;
    UdpSocket::from_std(socket.into())
}

fn say_once(error: &io::Error) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        tracing::warn!(code = "NGY0467", %error, "ICMP probes are not allowed by net.ipv4.ping_group_range; datagrams to the edge are used");
    }
}

/// The kernel fills in the identifier and the checksum.
fn echo(nonce: &Nonce, is_ipv6: bool) -> Vec<u8> {
    let mut message = vec![0; ICMP_HEAD];
    message[0] = if is_ipv6 { 128 } else { 8 };
    message.extend_from_slice(nonce);
    message
}

/// One connection, reset as soon as it is there. A host that refuses it is told apart from one that is silent.
fn connect(address: SocketAddr, nonce: Nonce, node: NodeName, events: mpsc::Sender<Event>) {
    spawn_local(async move {
        let socket = if address.is_ipv6() { TcpSocket::new_v6() } else { TcpSocket::new_v4() };
        let Ok(socket) = socket else { return };
        let _ = socket2::SockRef::from(&socket).set_linger(Some(Duration::ZERO));
        let connecting =
            tokio::time::timeout(nagaya_placement::liveness::BOUND_MAX * 2, socket.connect(address));
        let what = match connecting.await {
            Ok(Ok(_reset_by_being_dropped)) => Heard::Connected(nonce),
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => Heard::Refused,
            // Nothing came: it is silent when the probe is over.
            Ok(Err(_)) | Err(_) => return,
        };
        let _ = events.send(Event { node, what }).await;
    });
}
