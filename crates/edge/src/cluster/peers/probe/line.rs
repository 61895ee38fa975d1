//! Probes one other node: its socket, the open probes with their times, and the requests that
//! wait for the result.
//!
//! Not here: the thread (`probe`), the meaning of an answer (`nagaya_placement::liveness`).

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nagaya_placement::Moment;
use nagaya_placement::liveness::{PeerProbe, PeerState, ProbePlan, ProbeResult};
use nagaya_records::{NodeName, NodeRecord};
use rustix::net::{RecvFlags, SendFlags};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpSocket, UdpSocket};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::sleep;

use crate::cluster::member::LocalMember;
use crate::cluster::node_lease::boottime;
use crate::cluster::peers::probe::datagram::{DatagramKind, LEN_MAX, ProbeDatagram, ProbeNonce, own};
use crate::cluster::peers::probes::ProbeFinding;
use crate::options::ProbeKind;

/// Maximum number of sent datagrams whose answers are recognised, late ones too.
const SENT_MAX: usize = 32;

/// Pause before the next read after an error of the socket without a meaning.
const ERROR_PAUSE: Duration = Duration::from_millis(10);

/// Period for the limit `READ_PER_WINDOW` on a node's datagrams. The rest wait in the socket, or
/// are dropped there. With three per probe, and the next probe after the shortest bound, there
/// are 15.
const WINDOW: Duration = Duration::from_millis(100);
const READ_PER_WINDOW: u32 = 128;

/// Length of the head of an ICMP message: type, code, checksum, identifier, sequence number. Our
/// data follows.
const ICMP_HEAD: usize = 8;

/// Something received from a node.
#[derive(Debug)]
pub struct ProbeEvent {
    pub node: NodeName,
    pub what: HeardAnswer,
}

#[derive(Debug)]
pub enum HeardAnswer {
    Bytes(Vec<u8>),
    /// The host reports that nobody listens there.
    Refused,
    /// A probe by connection was accepted or refused.
    Connected(ProbeNonce),
}

pub struct PeerProber {
    record: Arc<NodeRecord>,
    member: Arc<LocalMember>,
    peer: PeerState,
    wire: ProbeTransport,
    sent: Vec<SentProbe>,
    waiting: Vec<(PeerProbe, oneshot::Sender<ProbeFinding>)>,
    findings: Vec<&'static str>,
    /// The present probe.
    under_way: Option<PeerProbe>,
    /// It has no answer in the usual time, which was not reported yet.
    is_late: bool,
}

struct SentProbe {
    nonce: ProbeNonce,
    probe: PeerProbe,
    at: Moment,
}

/// The way it is probed.
enum ProbeTransport {
    Datagrams { socket: Rc<UdpSocket>, reader: AbortHandle, is_icmp: bool, is_ipv6: bool },
    Connections { address: SocketAddr, events: mpsc::Sender<ProbeEvent> },
}

impl Drop for ProbeTransport {
    fn drop(&mut self) {
        if let Self::Datagrams { reader, .. } = self {
            reader.abort();
        }
    }
}

impl PeerProber {
    pub fn open(
        record: &Arc<NodeRecord>,
        member: &Arc<LocalMember>,
        events: mpsc::Sender<ProbeEvent>,
    ) -> io::Result<Self> {
        let address: SocketAddr = record
            .peer
            .parse()
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "its address is not valid"))?;
        let wire = match member.options.probe {
            ProbeKind::Connect => ProbeTransport::Connections { address, events },
            ProbeKind::Udp => ProbeTransport::datagrams(udp(address)?, &record.name, false, address, events),
            ProbeKind::Icmp => match icmp(address) {
                Ok(socket) => ProbeTransport::datagrams(socket, &record.name, true, address, events),
                Err(error) => {
                    say_once(&error);
                    ProbeTransport::datagrams(udp(address)?, &record.name, false, address, events)
                }
            },
        };
        Ok(Self {
            record: Arc::clone(record),
            member: Arc::clone(member),
            peer: PeerState::new(Duration::from_millis(member.options.probe_ms)),
            wire,
            sent: Vec::with_capacity(SENT_MAX),
            waiting: Vec::new(),
            findings: Vec::new(),
            under_way: None,
            is_late: false,
        })
    }

    /// Returns whether it fits the node's present record and the present credentials.
    pub fn is_of(&self, record: &NodeRecord, member: &Arc<LocalMember>) -> bool {
        self.record.peer == record.peer && self.record.id == record.id && Arc::ptr_eq(&self.member, member)
    }

    /// Returns the time for the next call of [`Self::alarm`].
    pub fn due(&self) -> Option<Moment> {
        self.peer.until().into_iter().chain(self.peer.resend_at()).min()
    }

    /// Adds a request's question. `heard` is the time when a request last heard from the node.
    pub fn ask(&mut self, heard: Option<Moment>, is_anew: bool, found: oneshot::Sender<ProbeFinding>) {
        self.note(heard);
        if is_anew {
            self.peer.forget_findings();
        }
        match self.peer.ask(boottime()) {
            ProbePlan::Fresh => {
                let _ = found.send(self.found(ProbeResult::Answers));
            }
            ProbePlan::Send { probe, .. } => {
                self.under_way = Some(probe);
                self.waiting.push((probe, found));
                self.send(probe);
            }
            ProbePlan::Shared { probe, .. } => self.waiting.push((probe, found)),
        }
        self.settle();
    }

    pub fn take(&mut self, event: ProbeEvent) {
        match event.what {
            HeardAnswer::Bytes(bytes) => self.bytes(&bytes),
            HeardAnswer::Connected(nonce) => self.answered(&nonce),
            HeardAnswer::Refused => {
                if let Some(probe) = self.under_way {
                    self.peer.refused(boottime(), probe);
                }
            }
        }
        self.settle();
    }

    /// Sends again, or ends the probe, if that is due.
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

    /// Sends results to the requests whose probe has ended.
    fn settle(&mut self) {
        if let Some(probe) = self.under_way {
            let verdict = self.peer.verdict(probe);
            if verdict != ProbeResult::Pending {
                self.under_way = None;
                self.findings.push(match verdict {
                    ProbeResult::Silent => "silent",
                    ProbeResult::Refuses => "refuses",
                    _ => "answers",
                });
            }
        }
        let waiting = std::mem::take(&mut self.waiting);
        for (probe, found) in waiting {
            match self.peer.verdict(probe) {
                ProbeResult::Pending => self.waiting.push((probe, found)),
                verdict => {
                    // The request may have its response by now.
                    let _ = found.send(self.found(verdict));
                }
            }
        }
    }

    fn found(&self, verdict: ProbeResult) -> ProbeFinding {
        ProbeFinding { verdict, again: self.peer.again(boottime()) }
    }

    pub fn last_heard(&self) -> Option<Moment> {
        self.peer.last_heard()
    }

    /// Returns once, after a finding against it, whether it is alive after all.
    pub fn take_return(&mut self) -> bool {
        self.peer.take_return()
    }

    /// Returns once per probe whether it has no answer yet and was sent again.
    pub fn take_lateness(&mut self) -> bool {
        std::mem::take(&mut self.is_late)
    }

    pub fn take_findings(&mut self) -> Vec<&'static str> {
        std::mem::take(&mut self.findings)
    }

    /// Returns round trip, bound and false alarms.
    pub fn figures(&self) -> (Duration, Duration, u64) {
        let bound = self.peer.bound(boottime());
        (self.peer.round_trip().unwrap_or_default(), bound, self.peer.false_alarms())
    }

    fn send(&mut self, probe: PeerProbe) {
        let mut nonce = ProbeNonce::default();
        getrandom::fill(&mut nonce).expect("the kernel gives random bytes once it has booted");
        if self.sent.len() >= SENT_MAX {
            self.sent.remove(0);
        }
        self.sent.push(SentProbe { nonce, probe, at: boottime() });
        let result = match &self.wire {
            ProbeTransport::Datagrams { socket, is_icmp: true, is_ipv6, .. } => {
                send(socket, &echo(&nonce, *is_ipv6))
            }
            ProbeTransport::Datagrams { socket, .. } => {
                let question = ProbeDatagram { kind: DatagramKind::Question, nonce, ..own(&self.member) };
                let bytes = question.write(self.member.credentials.probe_keys.own()).unwrap_or_default();
                send(socket, &bytes)
            }
            ProbeTransport::Connections { address, events } => {
                connect(*address, nonce, self.record.name.clone(), events.clone());
                Ok(0)
            }
        };
        // Sending reports errors of earlier datagrams.
        if result.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
            self.peer.refused(boottime(), probe);
        }
    }

    /// Reads the datagrams in the socket.
    fn take_in(&mut self) {
        let ProbeTransport::Datagrams { socket, .. } = &self.wire else { return };
        let socket = Rc::clone(socket);
        let mut buffer = [0; LEN_MAX + 1];
        while let Ok((len, _)) = rustix::net::recv(&*socket, &mut buffer, RecvFlags::DONTWAIT) {
            self.bytes(&buffer[..len]);
        }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        match &self.wire {
            ProbeTransport::Datagrams { is_icmp: true, is_ipv6, .. } => {
                let reply = if *is_ipv6 { 129 } else { 0 };
                if bytes.first() == Some(&reply)
                    && let Some(nonce) =
                        bytes.get(ICMP_HEAD..).and_then(|nonce| ProbeNonce::try_from(nonce).ok())
                {
                    self.answered(&nonce);
                }
            }
            _ => {
                let keys = &self.member.credentials.probe_keys;
                let Some((said, _)) = keys.read(|key| ProbeDatagram::read(bytes, key)) else { return };
                let is_it = said.node == self.record.name.as_str() && said.id == self.record.id;
                if said.kind == DatagramKind::Answer && is_it {
                    self.answered(&said.nonce);
                }
            }
        }
    }

    /// Records the answer to a sent datagram. Each counts once: a datagram repeated by somebody
    /// means nothing.
    fn answered(&mut self, nonce: &ProbeNonce) {
        let Some(at) = self.sent.iter().position(|sent| sent.nonce == *nonce) else { return };
        let SentProbe { probe, at, .. } = self.sent.remove(at);
        self.peer.answered(boottime(), probe, at);
    }
}

impl ProbeTransport {
    fn datagrams(
        socket: UdpSocket,
        node: &NodeName,
        is_icmp: bool,
        address: SocketAddr,
        events: mpsc::Sender<ProbeEvent>,
    ) -> Self {
        let socket = Rc::new(socket);
        let reader = spawn_local(read(Rc::clone(&socket), node.clone(), events)).abort_handle();
        Self::Datagrams { socket, reader, is_icmp, is_ipv6: address.is_ipv6() }
    }
}

/// Sends past the runtime, which sends nothing before it has registered a new socket. The first
/// probe would be lost, and its node taken for silent.
fn send(socket: &UdpSocket, bytes: &[u8]) -> io::Result<usize> {
    Ok(rustix::net::send(socket, bytes, SendFlags::DONTWAIT)?)
}

async fn read(socket: Rc<UdpSocket>, node: NodeName, events: mpsc::Sender<ProbeEvent>) {
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
            Ok(len) => HeardAnswer::Bytes(buffer[..len].to_vec()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => HeardAnswer::Refused,
            Err(_) => {
                sleep(ERROR_PAUSE).await;
                continue;
            }
        };
        if events.send(ProbeEvent { node: node.clone(), what }).await.is_err() {
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

/// Returns an ICMP echo. The kernel fills in the identifier and the checksum.
fn echo(nonce: &ProbeNonce, is_ipv6: bool) -> Vec<u8> {
    let mut message = vec![0; ICMP_HEAD];
    message[0] = if is_ipv6 { 128 } else { 8 };
    message.extend_from_slice(nonce);
    message
}

/// Makes one connection, and resets it at once. A refusal by the host differs from silence.
fn connect(address: SocketAddr, nonce: ProbeNonce, node: NodeName, events: mpsc::Sender<ProbeEvent>) {
    spawn_local(async move {
        let socket = if address.is_ipv6() { TcpSocket::new_v6() } else { TcpSocket::new_v4() };
        let Ok(socket) = socket else { return };
        let _ = socket2::SockRef::from(&socket).set_linger(Some(Duration::ZERO));
        let connecting =
            tokio::time::timeout(nagaya_placement::liveness::BOUND_MAX * 2, socket.connect(address));
        let what = match connecting.await {
            Ok(Ok(_reset_by_being_dropped)) => HeardAnswer::Connected(nonce),
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => HeardAnswer::Refused,
            // No reply: the node is silent when the probe is over.
            Ok(Err(_)) | Err(_) => return,
        };
        let _ = events.send(ProbeEvent { node, what }).await;
    });
}
