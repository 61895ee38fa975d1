//! One edge thread's connection: its verbs are begun here, and what was leased to it ends with it.
//!
//! Invariant: the peer is root, the edge's uid or the keeper's own. Not here: what the verbs do
//! (`verbs`, `instances`), bytes and descriptors (`keeper_api::codec`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::pending;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use nagaya_keeper_api::codec::{self, CodecError, MessageSocket};
use nagaya_keeper_api::limits::{
    BOOSTS_PER_CONNECTION_MAX, INSTANCE_USES_PER_CONNECTION_MAX, PROCESSES_PER_CONNECTION_MAX,
    SEATS_PER_CONNECTION_MAX,
};
use nagaya_keeper_api::protocol::{
    BoostId, ConnectionId, FailureKind, InstanceId, KeeperMessage, OpenedRoot, PROTOCOL_VERSION, ProcessId,
    RequestCellId, Verb, VerbCall, VerbReply,
};
use nagaya_records::SiteName;
use nagaya_records::cell::{Boost, Confinement};
use rustix::net::SocketFlags;
use tokio::io::unix::AsyncFd;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Notify, mpsc};
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::sleep;

use crate::fault::{self, Fault};
use crate::image::TransferEnd;
use crate::instances::{self, BoostRef, EnterOutcome, ReadyInstance, RequestCellRef, RunRef};
use crate::process::ProcessRef;
use crate::sandbox::UnixIdentity;
use crate::verbs::Verbs;

/// Maximum number of connections. An edge has one per thread, and two edges overlap during an
/// upgrade.
const CONNECTIONS_MAX: i64 = 64;

/// Maximum number of verbs of one connection in flight.
const IN_FLIGHT_MAX: usize = 1024;

/// Maximum number of replies that wait for a peer to read them. Each verb, process, use, boost and
/// request cell has at most one. A request cell that was left has one more.
const ANSWERS_MAX: usize = IN_FLIGHT_MAX
    + PROCESSES_PER_CONNECTION_MAX
    + 2 * INSTANCE_USES_PER_CONNECTION_MAX
    + BOOSTS_PER_CONNECTION_MAX
    + 2 * SEATS_PER_CONNECTION_MAX;

/// Pause after an accept that failed for lack of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Takes connections, for ever.
pub async fn accept(verbs: &Rc<Verbs>, listener: &AsyncFd<OwnedFd>) {
    loop {
        let Ok(mut ready) = listener.readable().await else { return pending().await };
        let accepted = ready.try_io(|listener| {
            Ok(rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?)
        });
        match accepted {
            Ok(Ok(socket)) => admit(verbs, socket),
            Ok(Err(error)) => {
                tracing::error!(%error, "the keeper cannot take a connection; is the limit on open files reached?");
                sleep(ACCEPT_PAUSE).await;
            }
            Err(_not_ready) => {}
        }
    }
}

/// Takes a connection, if it comes from the edge or root and there is room.
fn admit(verbs: &Rc<Verbs>, socket: OwnedFd) {
    let peer = match rustix::net::sockopt::socket_peercred(&socket) {
        Ok(peer) => peer,
        Err(error) => {
            tracing::warn!(%error, "a connection whose peer is not known is refused");
            return;
        }
    };
    let uid = peer.uid.as_raw();
    let own = rustix::process::geteuid().as_raw();
    if ![verbs.context.options().ids.edge_uid, 0, own].contains(&uid) {
        tracing::warn!(
            uid,
            pid = peer.pid.as_raw_nonzero(),
            "a connection of another uid than the edge's is refused"
        );
        return;
    }
    if verbs.context.metrics.connections.get() >= CONNECTIONS_MAX {
        tracing::warn!("{CONNECTIONS_MAX} connections are open already; another one is refused");
        return;
    }
    match MessageSocket::new(socket) {
        Ok(socket) => {
            verbs.context.metrics.connections.add(1);
            let peer = UnixIdentity { uid, gid: peer.gid.as_raw() };
            spawn_local(converse(Rc::clone(verbs), socket, peer));
        }
        Err(error) => tracing::error!(%error, "a connection cannot be watched and is closed"),
    }
}

/// The connection of one edge thread.
struct EdgeConnection {
    verbs: Rc<Verbs>,
    /// Identity of the peer, as reported by the kernel.
    peer: UnixIdentity,
    answers: mpsc::Sender<(Vec<u8>, Vec<OwnedFd>)>,
    held: PeerRefs,
    calls: PeerCalls,
    greeted: Cell<bool>,
    closed: Cell<bool>,
    /// Notified when the peer does not read its replies, or broke the protocol.
    hang_up: Notify,
}

/// Resources kept for the peer, until it gives them back or leaves.
#[derive(Default)]
struct PeerRefs {
    leased: RefCell<HashMap<ProcessId, ProcessRef>>,
    /// Uses that keep instances awake for this peer, one for each reply it got.
    uses: RefCell<HashMap<InstanceId, Vec<RunRef>>>,
    /// Request cells that hold processes of instances for requests of this peer. A dropped one
    /// moves its processes back.
    request_cells: RefCell<HashMap<RequestCellId, RequestCellRef>>,
    /// Boosts of instances for requests of this peer.
    boosts: RefCell<HashMap<BoostId, BoostRef>>,
}

/// Verbs of the peer that are under way.
#[derive(Default)]
struct PeerCalls {
    /// Those that wait for an instance or a request cell, by their tags.
    asking: RefCell<HashMap<u64, AbortHandle>>,
    /// How many request cells are asked for.
    entering: Cell<usize>,
    /// How many others there are.
    in_flight: Cell<usize>,
}

/// Notifies the peer of runs it uses that were replaced. Never returns.
async fn tell_drained(connection: Rc<EdgeConnection>) {
    let mut drained = connection.verbs.instances.published.watch_drained();
    loop {
        match drained.recv().await {
            Ok(instance) if connection.held.uses.borrow().contains_key(&instance) => {
                connection.queue(&KeeperMessage::Drains { instance }, Vec::new());
            }
            Ok(_) | Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return,
        }
    }
}

async fn converse(verbs: Rc<Verbs>, socket: MessageSocket, peer: UnixIdentity) {
    let socket = Rc::new(socket);
    let (answers, outgoing) = mpsc::channel(ANSWERS_MAX);
    let connection = Rc::new(EdgeConnection {
        verbs: Rc::clone(&verbs),
        peer,
        answers,
        held: PeerRefs::default(),
        calls: PeerCalls::default(),
        greeted: Cell::new(false),
        closed: Cell::new(false),
        hang_up: Notify::new(),
    });
    let writer = spawn_local(write_answers(Rc::clone(&socket), outgoing));
    let teller = spawn_local(tell_drained(Rc::clone(&connection)));
    let end = tokio::select! {
        end = read_asks(&connection, &socket) => end,
        () = connection.hang_up.notified() => CodecError::Closed,
    };
    match end {
        CodecError::Closed => tracing::debug!("a connection of the edge ended"),
        error => tracing::warn!("{}: a connection is closed: {error}", fault::PROTOCOL),
    }
    writer.abort();
    teller.abort();
    connection.closed.set(true);
    // Each dropped handle ends its tree, each dropped use its hold on an instance. Nobody waits for
    // replies any more.
    connection.held.leased.borrow_mut().clear();
    drop(connection.held.request_cells.take());
    drop(connection.held.boosts.take());
    drop(connection.held.uses.take());
    connection.calls.asking.take().into_values().for_each(|task| task.abort());
    verbs.context.metrics.connections.add(-1);
}

async fn read_asks(connection: &Rc<EdgeConnection>, socket: &MessageSocket) -> CodecError {
    let mut buffer = Vec::new();
    loop {
        match socket.receive::<VerbCall>(&mut buffer).await {
            // No verb takes descriptors, so any that came along are closed here.
            Ok((ask, fds)) => {
                drop(fds);
                take(connection, ask);
            }
            Err(error) => return error,
        }
    }
}

async fn write_answers(socket: Rc<MessageSocket>, mut outgoing: mpsc::Receiver<(Vec<u8>, Vec<OwnedFd>)>) {
    while let Some((bytes, fds)) = outgoing.recv().await {
        if socket.send(&bytes, &fds).await.is_err() {
            // The reader learns the same from the socket, and closes.
            return;
        }
    }
}

/// Begins one verb.
fn take(connection: &Rc<EdgeConnection>, ask: VerbCall) {
    let VerbCall { tag, verb } = ask;
    let refuse = |failure, code, message: &str| {
        connection.reply(tag, Fault::new(failure, code, message).into_reply(), Vec::new());
    };
    match verb {
        Verb::Hello { version } if version == PROTOCOL_VERSION => {
            connection.greeted.set(true);
            let verbs = &connection.verbs;
            let lists = verbs.instances.published.awake_reader().zip(verbs.root_watch().reader());
            let lists = lists.map_or_else(Vec::new, |(roll, changes)| vec![roll, changes]);
            connection.reply(tag, VerbReply::Hello { version }, lists);
        }
        _ if !connection.greeted.get() => {
            refuse(FailureKind::Invalid, fault::PROTOCOL, "the first message must be Hello of this version");
        }
        Verb::End { process } => {
            connection.held.leased.borrow_mut().remove(&process);
        }
        Verb::LeaveInstance { instance } => connection.leave(instance),
        Verb::Answered { instance } => instances::note_answered(&connection.verbs.instances, instance),
        Verb::Forget { tag } => {
            if let Some(task) = connection.calls.asking.borrow_mut().remove(&tag) {
                task.abort();
            }
        }
        Verb::UseInstance { site, epoch } => connection.use_instance(tag, site, epoch),
        Verb::EnterInstance { instance, line, confinement } => {
            connection.enter_instance(tag, instance, line, *confinement);
        }
        Verb::LeaveSeat { seat } => connection.leave_seat(tag, seat),
        Verb::BoostInstance { instance, boost } => connection.boost(tag, instance, boost),
        Verb::EndBoost { boost } => drop(connection.held.boosts.borrow_mut().remove(&boost)),
        _ if connection.calls.in_flight.get() >= IN_FLIGHT_MAX => {
            refuse(FailureKind::Busy, fault::LIMIT, "too many requests at once; wait for replies");
        }
        verb => {
            connection.calls.in_flight.set(connection.calls.in_flight.get() + 1);
            let connection = Rc::clone(connection);
            spawn_local(async move {
                match answer(&connection, verb).await {
                    Ok((reply, fds)) => connection.reply(tag, reply, fds),
                    Err(fault) => {
                        tracing::debug!("{fault}");
                        connection.reply(tag, fault.into_reply(), Vec::new());
                    }
                }
                connection.calls.in_flight.set(connection.calls.in_flight.get() - 1);
            });
        }
    }
}

/// Carries out one verb.
async fn answer(connection: &Rc<EdgeConnection>, verb: Verb) -> Result<(VerbReply, Vec<OwnedFd>), Fault> {
    let verbs = &connection.verbs;
    match verb {
        Verb::OpenRoot { .. }
        | Verb::OpenLink { .. }
        | Verb::ConnectServer { .. }
        | Verb::OpenCertificate { .. }
        | Verb::ConnectInstance { .. } => open(connection, verb).await,
        Verb::SpawnCgi { site, script, env, confinement } => {
            connection.room_for_process()?;
            let (handle, fds) = verbs.spawn_cgi(&site, script, env, *confinement).await?;
            Ok((connection.lease(handle), fds))
        }
        Verb::SpawnPhp { site, opcache } => {
            connection.room_for_process()?;
            let (handle, fds) = verbs.spawn_php(&site, opcache).await?;
            Ok((connection.lease(handle), fds))
        }
        Verb::Enter { process, site, confinement } => {
            let cell = verbs.enter(process, &site, *confinement).await?;
            Ok((VerbReply::Entered { cell }, Vec::new()))
        }
        Verb::Leave { process } => Ok((VerbReply::Used { usage: verbs.leave(process).await? }, Vec::new())),
        Verb::Measure { process } => Ok((VerbReply::Used { usage: verbs.measure(process)? }, Vec::new())),
        Verb::ChangeCells { changes } => {
            verbs.change_cells(&changes)?;
            Ok((VerbReply::Done, Vec::new()))
        }
        Verb::Cells => Ok((VerbReply::Cells { json: verbs.named_cells().await? }, Vec::new())),
        Verb::GiveWay { give_way, resume } => {
            verbs.context.deprioritize(&give_way, &resume)?;
            Ok((VerbReply::Done, Vec::new()))
        }
        Verb::OfferImage { site, order } => Ok((verbs.offer_image(&site, &order).await?, Vec::new())),
        Verb::SendImage { site, order, digest, offset } => {
            let order = verbs.verify_order(&site, &order, TransferEnd::Giver)?;
            let pipe = instances::send_image(&verbs.instances, &site, order, (&digest, offset)).await?;
            Ok((VerbReply::Sending, vec![pipe]))
        }
        Verb::FetchImage { site, order, offer } => {
            let order = verbs.verify_order(&site, &order, TransferEnd::Taker)?;
            let (offset, bytes, pipe) =
                instances::fetch_image(&verbs.instances, &site, order, &offer).await?;
            Ok((VerbReply::Fetching { offset, bytes }, vec![pipe]))
        }
        Verb::ImageFetched { site, order } => {
            verbs.verify_order(&site, &order, TransferEnd::Taker)?;
            instances::image_fetched(&verbs.instances, &site).await?;
            Ok((VerbReply::Done, Vec::new()))
        }
        Verb::Status => Ok((VerbReply::Status { json: verbs.status() }, Vec::new())),
        Verb::Hello { .. } => {
            Err(Fault::new(FailureKind::Invalid, fault::PROTOCOL, "a greeting of another version"))
        }
        Verb::End { .. }
        | Verb::UseInstance { .. }
        | Verb::LeaveInstance { .. }
        | Verb::Answered { .. }
        | Verb::EnterInstance { .. }
        | Verb::LeaveSeat { .. }
        | Verb::BoostInstance { .. }
        | Verb::EndBoost { .. }
        | Verb::Forget { .. } => unreachable!("`take` has done these"),
    }
}

/// Carries out a verb whose reply has an open descriptor.
async fn open(connection: &Rc<EdgeConnection>, verb: Verb) -> Result<(VerbReply, Vec<OwnedFd>), Fault> {
    let verbs = &connection.verbs;
    let (reply, opened) = match verb {
        Verb::OpenRoot { site } => {
            let (OpenedRoot { dir, is_remote, .. }, mark) = verbs.open_root(&site).await?;
            (VerbReply::Root { is_remote, mark }, dir)
        }
        Verb::OpenLink { site, path } => {
            let OpenedRoot { dir, is_remote, .. } = verbs.open_link(&site, path, connection.peer).await?;
            (VerbReply::Link { is_remote }, dir)
        }
        Verb::ConnectServer { site } => {
            (VerbReply::Connected, verbs.connect_server(&site, connection.peer).await?)
        }
        Verb::OpenCertificate { name } => (VerbReply::Certificate, verbs.open_certificate(name).await?),
        Verb::ConnectInstance { instance } => {
            (VerbReply::Connected, instances::connect(&verbs.instances, instance).await?)
        }
        _ => unreachable!("`answer` gives it these"),
    };
    Ok((reply, vec![opened]))
}

fn not_in_use(instance: InstanceId) -> Fault {
    Fault::new(FailureKind::NotFound, fault::UNKNOWN, format!("instance {} is not in use", instance.0))
}

/// Counts a request cell that is pending, until it is made or cannot be.
struct EnteringCount(Rc<EdgeConnection>);

impl EnteringCount {
    fn new(connection: &Rc<EdgeConnection>) -> Self {
        connection.calls.entering.set(connection.calls.entering.get() + 1);
        Self(Rc::clone(connection))
    }
}

impl Drop for EnteringCount {
    fn drop(&mut self) {
        self.0.calls.entering.set(self.0.calls.entering.get() - 1);
    }
}

impl EdgeConnection {
    fn room_for_process(&self) -> Result<(), Fault> {
        // A verb in flight may become a process, too.
        if self.held.leased.borrow().len() + self.calls.in_flight.get() > PROCESSES_PER_CONNECTION_MAX {
            let message = format!("{PROCESSES_PER_CONNECTION_MAX} processes are leased to one connection");
            return Err(Fault::new(FailureKind::Busy, fault::LIMIT, message));
        }
        Ok(())
    }

    /// Waits for an instance without a time limit, beside the verbs in flight.
    fn use_instance(self: &Rc<Self>, tag: u64, site: SiteName, epoch: Option<u64>) {
        let uses: usize = self.held.uses.borrow().values().map(Vec::len).sum();
        if uses + self.calls.asking.borrow().len() >= INSTANCE_USES_PER_CONNECTION_MAX {
            let message =
                format!("{INSTANCE_USES_PER_CONNECTION_MAX} instances are in use by one connection");
            let fault = Fault::new(FailureKind::Busy, fault::LIMIT, message);
            return self.reply(tag, fault.into_reply(), Vec::new());
        }
        let connection = Rc::clone(self);
        let task = spawn_local(async move {
            let verbs = &connection.verbs;
            let used = instances::use_site(&verbs.instances, &site, epoch).await;
            connection.calls.asking.borrow_mut().remove(&tag);
            match used {
                Ok(ReadyInstance { id, socket, tally, wake, instance_ref }) => {
                    connection.held.uses.borrow_mut().entry(id).or_default().push(instance_ref);
                    connection.reply(
                        tag,
                        VerbReply::Using { instance: id, wake },
                        [socket].into_iter().chain(tally).collect(),
                    );
                }
                Err(fault) => {
                    tracing::debug!("{fault}");
                    let reply = match fault.failure {
                        FailureKind::Elsewhere => verbs.elsewhere(&site, fault.message),
                        _ => fault.into_reply(),
                    };
                    connection.reply(tag, reply, Vec::new());
                }
            }
        });
        // The task begins only after this.
        self.calls.asking.borrow_mut().insert(tag, task.abort_handle());
    }

    /// Waits for a process that serves the request, beside the verbs in flight.
    fn enter_instance(
        self: &Rc<Self>,
        tag: u64,
        instance: InstanceId,
        line: ConnectionId,
        asked: Confinement,
    ) {
        let refuse = |failure, code, message: String| {
            self.reply(tag, Fault::new(failure, code, message).into_reply(), Vec::new());
        };
        // A connection without a use of the instance cannot have a request in it.
        if !self.held.uses.borrow().contains_key(&instance) {
            return self.reply(tag, not_in_use(instance).into_reply(), Vec::new());
        }
        if self.held.request_cells.borrow().len() + self.calls.entering.get() >= SEATS_PER_CONNECTION_MAX {
            let message =
                format!("{SEATS_PER_CONNECTION_MAX} requests of one connection have seats in instances");
            return refuse(FailureKind::Busy, fault::LIMIT, message);
        }
        let counted = EnteringCount::new(self);
        let connection = Rc::clone(self);
        let task = spawn_local(async move {
            let verbs = &connection.verbs;
            let placed = instances::enter_cell(&verbs.instances, instance, line, asked).await;
            connection.calls.asking.borrow_mut().remove(&tag);
            drop(counted);
            let reply = match placed {
                Ok(EnterOutcome::OwnCell { cell_ref, cell }) => {
                    let seat = cell_ref.id();
                    connection.held.request_cells.borrow_mut().insert(seat, cell_ref);
                    VerbReply::Seated { seat, cell }
                }
                Ok(EnterOutcome::Shared { cell, for_good }) => VerbReply::Unseated { cell, for_good },
                Err(fault) => {
                    tracing::debug!("{fault}");
                    fault.into_reply()
                }
            };
            connection.reply(tag, reply, Vec::new());
        });
        // The task begins only after this.
        self.calls.asking.borrow_mut().insert(tag, task.abort_handle());
    }

    fn leave_seat(self: &Rc<Self>, tag: u64, seat: RequestCellId) {
        let unknown =
            move || Fault::new(FailureKind::NotFound, fault::UNKNOWN, format!("there is no seat {}", seat.0));
        let Some(lease) = self.held.request_cells.borrow_mut().remove(&seat) else {
            return self.reply(tag, unknown().into_reply(), Vec::new());
        };
        let left = lease.leave().map(|usage| VerbReply::Used { usage });
        self.reply(tag, left.unwrap_or_else(|| unknown().into_reply()), Vec::new());
    }

    fn boost(&self, tag: u64, instance: InstanceId, asked: Boost) {
        let boosted = if !self.held.uses.borrow().contains_key(&instance) {
            Err(not_in_use(instance))
        } else if self.held.boosts.borrow().len() >= BOOSTS_PER_CONNECTION_MAX {
            let message = format!("{BOOSTS_PER_CONNECTION_MAX} requests of one connection have boosts");
            Err(Fault::new(FailureKind::Busy, fault::LIMIT, message))
        } else {
            instances::begin_boost(&self.verbs.instances, instance, asked)
        };
        let reply = match boosted {
            Ok(lease) => {
                let reply = VerbReply::Boosted { boost: lease.id(), granted: lease.granted() };
                self.held.boosts.borrow_mut().insert(lease.id(), lease);
                reply
            }
            Err(fault) => {
                tracing::debug!("{fault}");
                fault.into_reply()
            }
        };
        self.reply(tag, reply, Vec::new());
    }

    fn leave(&self, instance: InstanceId) {
        let lease = {
            let mut uses = self.held.uses.borrow_mut();
            let of = uses.get_mut(&instance);
            let lease = of.and_then(Vec::pop);
            if uses.get(&instance).is_some_and(Vec::is_empty) {
                uses.remove(&instance);
                // A connection without a use of the instance has no request in it.
                self.held.boosts.borrow_mut().retain(|_, boost| boost.instance() != instance);
            }
            lease
        };
        drop(lease);
    }

    /// Keeps the tree for the peer, and notifies it when the tree has ended.
    fn lease(self: &Rc<Self>, handle: ProcessRef) -> VerbReply {
        let (process, cell) = (handle.id(), handle.cell());
        let ended = handle.ended();
        // A peer that left meanwhile gets nothing: the dropped handle ends the tree.
        if !self.closed.get() {
            self.held.leased.borrow_mut().insert(process, handle);
            let connection = Rc::clone(self);
            // Queued behind the reply of this verb, which is sent before another task runs.
            spawn_local(async move {
                let (exit, usage) = ended.await;
                connection.held.leased.borrow_mut().remove(&process);
                connection.queue(&KeeperMessage::Ended { process, exit, usage }, Vec::new());
            });
        }
        VerbReply::Spawned { process, cell }
    }

    fn reply(&self, tag: u64, reply: VerbReply, fds: Vec<OwnedFd>) {
        self.queue(&KeeperMessage::Reply { tag, reply }, fds);
    }

    fn queue(&self, answer: &KeeperMessage, fds: Vec<OwnedFd>) {
        let queued = match codec::encode(answer) {
            Ok(bytes) => self.answers.try_send((bytes, fds)).is_ok(),
            Err(error) => {
                tracing::error!(%error, "an answer cannot be encoded");
                false
            }
        };
        if !queued {
            self.hang_up.notify_one();
        }
    }
}
