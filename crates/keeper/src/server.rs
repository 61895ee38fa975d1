//! The keeper's process: its start, its connections, its end.
//!
//! One thread runs everything but what blocks. Each connection is one edge thread; what was leased to it
//! ends with it. Not here: what the verbs do (`engine`), bytes and descriptors (`codec`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::pending;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_cmdb::cell::{Boost, Confinement};
use nagaya_cmdb::feed::Question;
use nagaya_cmdb::{SiteName, Table};
use parking_lot::RwLock;
use rustix::net::SocketFlags;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, mpsc};
use tokio::task::{AbortHandle, LocalSet, spawn_local};
use tokio::time::sleep;

use crate::authority::{Authority, NO_WARDEN};
use crate::cells;
use crate::codec::{self, CodecError};
use crate::engine::{Engine, EngineError};
use crate::fault::{self, Fault};
use crate::feed::{self, Answerer, Event, FeedError};
use crate::image::TransferEnd;
use crate::instances::{BoostLease, Lease, Placed, SeatLease, Using};
use crate::options::Options;
use crate::process::Handle;
use crate::protocol::{
    Answer, Ask, BoostId, Failure, InstanceId, Line, OpenedRoot, PROTOCOL_VERSION, ProcessId, Reply, SeatId,
    Verb,
};
use crate::sandbox::{Identity, Launcher};
use crate::{slice, sys};

/// Connections at once: an edge has one per thread, and two edges overlap during an upgrade.
const CONNECTIONS_MAX: i64 = 64;

/// Verbs of one connection that may be under way.
const IN_FLIGHT_MAX: usize = 1024;

/// Process trees leased to one connection.
pub const PROCESSES_PER_CONNECTION_MAX: usize = 4096;

/// Uses of instances one connection may have at once: an edge thread has one for each site it serves.
pub const INSTANCE_USES_PER_CONNECTION_MAX: usize = 16_384;

/// Seats of requests in instances one connection may have at once, asked for or taken.
pub const SEATS_PER_CONNECTION_MAX: usize = 4096;

/// Boosts for requests in instances one connection may have at once.
pub const BOOSTS_PER_CONNECTION_MAX: usize = 4096;

/// Answers that may wait for a peer to read them: each verb, each process, each use, each boost and each seat has at most one, and
/// a seat that is left another.
const ANSWERS_MAX: usize = IN_FLIGHT_MAX
    + PROCESSES_PER_CONNECTION_MAX
    + INSTANCE_USES_PER_CONNECTION_MAX
    + BOOSTS_PER_CONNECTION_MAX
    + 2 * SEATS_PER_CONNECTION_MAX;

/// Messages of the feed that may wait.
const EVENTS_MAX: usize = 64;

/// How long everything that runs may take to end when the keeper ends.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Time between two looks for cells nobody uses any more.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Pause after an accept failed for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What the supervisor hands to the keeper's process.
#[derive(Debug)]
pub struct Start {
    /// A bound and listening Unix socket of type `SOCK_SEQPACKET`.
    pub listener: OwnedFd,
    /// The feed from the supervisor (`cmdb::feed`).
    pub feed: UnixStream,
    /// This process was started without transparent huge pages, for its launcher. It may have them itself, and what it starts.
    pub small_pages: bool,
}

#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("cannot set up the keeper's process: {0}")]
    Setup(#[from] io::Error),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Feed(#[from] FeedError),
    #[error("the supervisor ended before it sent settings and records")]
    NoStart,
    #[error("the launcher of sandboxes has ended, and all applications with it")]
    NoLauncher,
    #[error("the warden of what is placed here has ended: nothing could be stopped in time any more")]
    NoWarden,
}

/// The main function of `nagaya keeper`. Returns when the feed says so or ends, or on `SIGTERM`, once
/// everything it started has ended.
pub fn run(start: Start) -> ExitCode {
    match serve(start) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}: the keeper ends: {error}", fault::START);
            ExitCode::FAILURE
        }
    }
}

fn serve(start: Start) -> Result<(), ServeError> {
    // Away from the terminal the node may have been started at: programs of tenants share this session, and a
    // controlling terminal could be typed into. Fails only if this is a session's first process already.
    let _ = rustix::process::setsid();
    // Before anything starts a thread.
    let launcher = start_launcher();
    if start.small_pages {
        rustix::thread::disable_transparent_huge_pages(false).map_err(io::Error::from)?;
    }
    slice::shorten();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let table = Arc::new(RwLock::new(Table::new()));
    let (events, mut incoming) = mpsc::channel(EVENTS_MAX);
    let authority = Authority::default();
    feed::start(start.feed, Arc::clone(&table), authority.clone(), events)?;
    rustix::io::ioctl_fionbio(&start.listener, true).map_err(io::Error::from)?;
    LocalSet::new().block_on(&runtime, async {
        let mut terminate = signal(SignalKind::terminate())?;
        // A terminal's Ctrl-C reaches the whole process group; the supervisor alone acts on it. Having a
        // handler is what keeps these two from ending the process.
        let _ignored = (signal(SignalKind::interrupt())?, signal(SignalKind::hangup())?);
        let Some(engine) = begin(&mut incoming, (table, authority), launcher.clone()).await? else {
            return Err(ServeError::NoStart);
        };
        let listener = sys::watch(start.listener, Interest::READABLE)?;
        let trying = Rc::clone(&engine);
        spawn_local(async move { trying.try_sandbox().await });
        let result = tokio::select! {
            result = follow(&engine, &mut incoming) => result,
            () = accept(&engine, &listener) => Ok(()),
            () = sweep(&engine) => Ok(()),
            () = engine.mind_the_way() => Ok(()),
            () = engine.instances.keep_time(&engine) => Ok(()),
            () = engine.instances.watch_restarts(&engine) => Ok(()),
            () = outlive(launcher) => Err(ServeError::NoLauncher),
            () = engine.instances.follow_authority(&engine) => Err(ServeError::NoWarden),
            () = engine.instances.watch_pressure(&engine) => Ok(()),
            () = engine.instances.keep_images(&engine) => Ok(()),
            _ = terminate.recv() => Ok(()),
        };
        if !engine.processes.close(CLOSE_TIMEOUT).await {
            tracing::error!("{}: some processes survived SIGKILL for {CLOSE_TIMEOUT:?}", fault::UNKILLABLE);
        }
        engine.instances.settle_logs();
        result
    })
}

/// Waits for settings and the first complete set of records.
async fn begin(
    incoming: &mut mpsc::Receiver<Event>,
    (table, authority): (Arc<RwLock<Table>>, Authority),
    launcher: Option<Arc<Launcher>>,
) -> Result<Option<Rc<Engine>>, ServeError> {
    let mut engine: Option<Rc<Engine>> = None;
    while let Some(event) = incoming.recv().await {
        match (event, &engine) {
            (Event::Options(options), None) => {
                let known = (Arc::clone(&table), authority.clone());
                engine = Some(start_engine(*options, known, launcher.clone())?);
            }
            (Event::Options(options), Some(engine)) => engine.set_options(*options),
            (Event::Committed { done, kept, .. }, Some(begun)) => {
                begun.instances.set_kept(kept.unwrap_or_default());
                begun.records_changed();
                let _ = done.send(());
                return Ok(engine);
            }
            (Event::Ask { question, answer }, Some(engine)) => {
                answer_to(engine, question, answer);
            }
            // Its connection is closed, which says as much.
            (Event::Exec { .. }, _) => {}
            (Event::Committed { .. } | Event::Ask { .. } | Event::Drain, _) => return Ok(None),
            (Event::Broken(error), _) => return Err(error.into()),
        }
    }
    Ok(None)
}

/// None without root, or where it cannot be: then no application runs, and all else does.
fn start_launcher() -> Option<Arc<Launcher>> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    match Launcher::start() {
        Ok(launcher) => Some(Arc::new(launcher)),
        Err(error) => {
            tracing::error!("{}: {error}", error.code());
            None
        }
    }
}

/// Returns once the launcher has ended, and with it all it made. Only a new keeper can start another.
async fn outlive(launcher: Option<Arc<Launcher>>) {
    if let Some(launcher) = &launcher
        && let Ok(watched) = sys::watch(launcher.pidfd(), Interest::READABLE)
        && watched.readable().await.is_ok()
    {
        return;
    }
    pending().await
}

fn start_engine(
    options: Options,
    (table, authority): (Arc<RwLock<Table>>, Authority),
    launcher: Option<Arc<Launcher>>,
) -> Result<Rc<Engine>, ServeError> {
    if let Err(error) = authority.begin(launcher.as_deref()) {
        tracing::error!("{NO_WARDEN}: no application of the cluster runs on this node: {error}");
    }
    let engine = Engine::new(options, table, launcher, authority)?;
    engine.instances.await_images();
    if engine.is_root() {
        sys::forbid_dumping()?;
    } else {
        tracing::warn!(
            "the keeper is not root: all sites run under its own uid and can reach each other's files"
        );
    }
    let fence = engine.cells().fence();
    tracing::info!(fence = fence.as_str(), "the keeper starts");
    if fence == cells::Kind::ProcessGroup {
        tracing::warn!(
            "{}: no cgroup can be used: a program that detaches itself outlives its request",
            fault::NO_FENCE
        );
    }
    Ok(engine)
}

/// Acts on the feed until it says or means the end.
async fn follow(engine: &Rc<Engine>, incoming: &mut mpsc::Receiver<Event>) -> Result<(), ServeError> {
    while let Some(event) = incoming.recv().await {
        match event {
            Event::Options(options) => engine.set_options(*options),
            Event::Committed { done, kept, gone } => {
                if let Some(kept) = kept {
                    engine.instances.set_kept(kept);
                }
                engine.records_changed();
                if gone {
                    // Also of those that were never awake here: their images came from another node, or are an earlier keeper's.
                    engine.instances.collect(engine);
                    engine.instances.collect_logs(engine);
                }
                let _ = done.send(());
            }
            Event::Ask { question, answer } => {
                answer_to(engine, question, answer);
            }
            Event::Exec { exec, connection } => {
                let engine = Rc::clone(engine);
                spawn_local(async move { engine.instances.exec(&engine, exec, connection).await });
            }
            Event::Drain => return Ok(()),
            Event::Broken(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Answers at once, or as soon as it is known or done.
fn answer_to(engine: &Rc<Engine>, question: Question, answer: Answerer) {
    let text = match question {
        Question::Metrics => engine.encode_metrics(),
        Question::Status => engine.status(),
        Question::Cells => {
            let engine = Rc::clone(engine);
            spawn_local(async move { answer.send(engine.show_cells().await) });
            return;
        }
        Question::Instances => {
            let engine = Rc::clone(engine);
            spawn_local(async move { answer.send(engine.instances.list(&engine).await.to_string()) });
            return;
        }
        Question::Load => {
            let engine = Rc::clone(engine);
            spawn_local(async move { answer.send(engine.instances.load(&engine).await) });
            return;
        }
        Question::Busy => engine.instances.busy(),
        Question::Instance { site, act } => {
            let engine = Rc::clone(engine);
            spawn_local(async move {
                answer.send(engine.instances.do_act(&engine, &site, act).await.to_string());
            });
            return;
        }
        // Requests are the edge's.
        Question::Explain { .. } | Question::FetchImage { .. } | Question::Requests => "null".into(),
    };
    answer.send(text);
}

/// Removes cells nobody uses any more, from time to time.
async fn sweep(engine: &Engine) {
    sleep(SWEEP_INTERVAL).await;
    // One that was killed just before this one began may not have been gone then. Should no worker be free, the next keeper does it.
    let _ = engine.on_worker(|| Ok(cells::Cells::clean_up_after_others())).await;
    loop {
        sleep(SWEEP_INTERVAL).await;
        engine.cells().sweep();
        let root_mounts = Arc::clone(engine.root_mounts());
        // Should no worker be free, the next round does it.
        let drop_idle = move || {
            root_mounts.drop_idle(Instant::now());
            Ok(())
        };
        let _ = engine.on_worker(drop_idle).await;
    }
}

async fn accept(engine: &Rc<Engine>, listener: &AsyncFd<OwnedFd>) {
    loop {
        let Ok(mut ready) = listener.readable().await else { return pending().await };
        let accepted = ready.try_io(|listener| {
            Ok(rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?)
        });
        match accepted {
            Ok(Ok(socket)) => admit(engine, socket),
            Ok(Err(error)) => {
                tracing::error!(%error, "the keeper cannot take a connection; is the limit on open files reached?");
                sleep(ACCEPT_PAUSE).await;
            }
            Err(_not_ready) => {}
        }
    }
}

/// Takes a connection, if it is the edge's or root's and there is room.
fn admit(engine: &Rc<Engine>, socket: OwnedFd) {
    let peer = match rustix::net::sockopt::socket_peercred(&socket) {
        Ok(peer) => peer,
        Err(error) => {
            tracing::warn!(%error, "a connection whose peer is not known is refused");
            return;
        }
    };
    let uid = peer.uid.as_raw();
    let own = rustix::process::geteuid().as_raw();
    if ![engine.options().ids.edge_uid, 0, own].contains(&uid) {
        tracing::warn!(
            uid,
            pid = peer.pid.as_raw_nonzero(),
            "a connection of another uid than the edge's is refused"
        );
        return;
    }
    if engine.metrics.connections.get() >= CONNECTIONS_MAX {
        tracing::warn!("{CONNECTIONS_MAX} connections are open already; another one is refused");
        return;
    }
    match sys::watch(socket, Interest::READABLE | Interest::WRITABLE) {
        Ok(socket) => {
            engine.metrics.connections.add(1);
            let peer = Identity { uid, gid: peer.gid.as_raw() };
            spawn_local(converse(Rc::clone(engine), socket, peer));
        }
        Err(error) => tracing::error!(%error, "a connection cannot be watched and is closed"),
    }
}

/// One edge thread's connection.
struct Connection {
    engine: Rc<Engine>,
    /// Whose connection it is, by the kernel's word.
    peer: Identity,
    answers: mpsc::Sender<(Vec<u8>, Vec<OwnedFd>)>,
    leased: RefCell<HashMap<ProcessId, Handle>>,
    /// What keeps instances awake for this peer, one for each answer it got.
    uses: RefCell<HashMap<InstanceId, Vec<Lease>>>,
    /// What moves processes of instances for requests of this peer, and back when it is dropped.
    seats: RefCell<HashMap<SeatId, SeatLease>>,
    /// What gives instances more for requests of this peer.
    boosts: RefCell<HashMap<BoostId, BoostLease>>,
    /// How many seats are asked for.
    seating: Cell<usize>,
    /// Those that wait for an instance or a seat, by their tags.
    asking: RefCell<HashMap<u64, AbortHandle>>,
    in_flight: Cell<usize>,
    greeted: Cell<bool>,
    closed: Cell<bool>,
    /// The peer does not read what it asked for, or broke the protocol.
    hang_up: Notify,
}

async fn converse(engine: Rc<Engine>, socket: AsyncFd<OwnedFd>, peer: Identity) {
    let socket = Rc::new(socket);
    let (answers, outgoing) = mpsc::channel(ANSWERS_MAX);
    let connection = Rc::new(Connection {
        engine: Rc::clone(&engine),
        peer,
        answers,
        leased: RefCell::default(),
        uses: RefCell::default(),
        seats: RefCell::default(),
        boosts: RefCell::default(),
        seating: Cell::new(0),
        asking: RefCell::default(),
        in_flight: Cell::new(0),
        greeted: Cell::new(false),
        closed: Cell::new(false),
        hang_up: Notify::new(),
    });
    let writer = spawn_local(write_answers(Rc::clone(&socket), outgoing));
    let end = tokio::select! {
        end = read_asks(&connection, &socket) => end,
        () = connection.hang_up.notified() => CodecError::Closed,
    };
    match end {
        CodecError::Closed => tracing::debug!("a connection of the edge ended"),
        error => tracing::warn!("{}: a connection is closed: {error}", fault::PROTOCOL),
    }
    writer.abort();
    connection.closed.set(true);
    // Each handle that is dropped ends its tree, each use its hold on an instance; nobody waits for answers any more.
    connection.leased.borrow_mut().clear();
    drop(connection.seats.take());
    drop(connection.boosts.take());
    drop(connection.uses.take());
    connection.asking.take().into_values().for_each(|task| task.abort());
    engine.metrics.connections.add(-1);
}

async fn read_asks(connection: &Rc<Connection>, socket: &AsyncFd<OwnedFd>) -> CodecError {
    let mut buffer = Vec::new();
    loop {
        match receive::<Ask>(socket, &mut buffer).await {
            // No verb takes descriptors: whatever came along is closed here.
            Ok((ask, fds)) => {
                drop(fds);
                take(connection, ask);
            }
            Err(error) => return error,
        }
    }
}

/// The next message, however long it takes.
pub(crate) async fn receive<T: serde::de::DeserializeOwned>(
    socket: &AsyncFd<OwnedFd>,
    buffer: &mut Vec<u8>,
) -> Result<(T, Vec<OwnedFd>), CodecError> {
    loop {
        let mut ready = socket.readable().await.map_err(|_| CodecError::Closed)?;
        match codec::receive(socket, buffer) {
            Err(CodecError::NotReady) => ready.clear_ready(),
            received => return received,
        }
    }
}

/// Sends one message, however long it takes.
pub(crate) async fn send(socket: &AsyncFd<OwnedFd>, bytes: &[u8], fds: &[OwnedFd]) -> Result<(), CodecError> {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    loop {
        let mut ready = socket.writable().await.map_err(|_| CodecError::Closed)?;
        match codec::send(socket, bytes, &fds) {
            Err(CodecError::NotReady) => ready.clear_ready(),
            sent => return sent,
        }
    }
}

async fn write_answers(socket: Rc<AsyncFd<OwnedFd>>, mut outgoing: mpsc::Receiver<(Vec<u8>, Vec<OwnedFd>)>) {
    while let Some((bytes, fds)) = outgoing.recv().await {
        if send(&socket, &bytes, &fds).await.is_err() {
            // The reader learns the same from the socket, and closes.
            return;
        }
    }
}

/// Begins one verb.
fn take(connection: &Rc<Connection>, ask: Ask) {
    let Ask { tag, verb } = ask;
    let refuse = |failure, code, message: &str| {
        connection.reply(tag, Fault::new(failure, code, message).into_reply(), Vec::new());
    };
    match verb {
        Verb::Hello { version } if version == PROTOCOL_VERSION => {
            connection.greeted.set(true);
            let roll = connection.engine.instances.roll();
            connection.reply(tag, Reply::Hello { version }, roll.into_iter().collect());
        }
        _ if !connection.greeted.get() => {
            refuse(Failure::Invalid, fault::PROTOCOL, "the first message must be Hello of this version");
        }
        Verb::End { process } => {
            connection.leased.borrow_mut().remove(&process);
        }
        Verb::LeaveInstance { instance } => connection.leave(instance),
        Verb::Answered { instance } => connection.engine.instances.answered(&connection.engine, instance),
        Verb::Forget { tag } => {
            if let Some(task) = connection.asking.borrow_mut().remove(&tag) {
                task.abort();
            }
        }
        Verb::UseInstance { site, epoch } => connection.use_instance(tag, site, epoch),
        Verb::EnterInstance { instance, line, confinement } => {
            connection.enter_instance(tag, instance, line, *confinement);
        }
        Verb::LeaveSeat { seat } => connection.leave_seat(tag, seat),
        Verb::BoostInstance { instance, boost } => connection.boost(tag, instance, boost),
        Verb::EndBoost { boost } => drop(connection.boosts.borrow_mut().remove(&boost)),
        _ if connection.in_flight.get() >= IN_FLIGHT_MAX => {
            refuse(Failure::Busy, fault::LIMIT, "too much is asked for at once; wait for answers");
        }
        verb => {
            connection.in_flight.set(connection.in_flight.get() + 1);
            let connection = Rc::clone(connection);
            spawn_local(async move {
                match answer(&connection, verb).await {
                    Ok((reply, fds)) => connection.reply(tag, reply, fds),
                    Err(fault) => {
                        tracing::debug!("{fault}");
                        connection.reply(tag, fault.into_reply(), Vec::new());
                    }
                }
                connection.in_flight.set(connection.in_flight.get() - 1);
            });
        }
    }
}

/// Does one verb.
async fn answer(connection: &Rc<Connection>, verb: Verb) -> Result<(Reply, Vec<OwnedFd>), Fault> {
    let engine = &connection.engine;
    match verb {
        Verb::OpenRoot { .. }
        | Verb::ConnectServer { .. }
        | Verb::OpenCertificate { .. }
        | Verb::ConnectInstance { .. } => open(connection, verb).await,
        Verb::SpawnCgi { site, script, env, confinement } => {
            connection.room_for_process()?;
            let (handle, fds) = engine.spawn_cgi(&site, script, env, *confinement).await?;
            Ok((connection.lease(handle), fds))
        }
        Verb::SpawnPhp { site } => {
            connection.room_for_process()?;
            let (handle, fds) = engine.spawn_php(&site).await?;
            Ok((connection.lease(handle), fds))
        }
        Verb::Enter { process, site, confinement } => {
            let cell = engine.enter(process, &site, *confinement).await?;
            Ok((Reply::Entered { cell }, Vec::new()))
        }
        Verb::Leave { process } => Ok((Reply::Used { usage: engine.leave(process).await? }, Vec::new())),
        Verb::Measure { process } => Ok((Reply::Used { usage: engine.measure(process)? }, Vec::new())),
        Verb::ChangeCells { changes } => {
            engine.change_cells(&changes)?;
            Ok((Reply::Done, Vec::new()))
        }
        Verb::Cells => Ok((Reply::Cells { json: engine.named_cells().await? }, Vec::new())),
        Verb::GiveWay { give_way, resume } => {
            engine.give_way(&give_way, &resume)?;
            Ok((Reply::Done, Vec::new()))
        }
        Verb::OfferImage { site, order } => Ok((engine.offer_image(&site, &order).await?, Vec::new())),
        Verb::SendImage { site, order, digest, offset } => {
            let order = engine.verify_order(&site, &order, TransferEnd::Giver)?;
            let pipe = engine.instances.send_image(engine, &site, order, (&digest, offset)).await?;
            Ok((Reply::Sending, vec![pipe]))
        }
        Verb::FetchImage { site, order, offer } => {
            let order = engine.verify_order(&site, &order, TransferEnd::Taker)?;
            let (offset, bytes, pipe) = engine.instances.fetch_image(engine, &site, order, &offer).await?;
            Ok((Reply::Fetching { offset, bytes }, vec![pipe]))
        }
        Verb::ImageFetched { site, order } => {
            engine.verify_order(&site, &order, TransferEnd::Taker)?;
            engine.instances.image_fetched(&site).await?;
            Ok((Reply::Done, Vec::new()))
        }
        Verb::Status => Ok((Reply::Status { json: engine.status() }, Vec::new())),
        Verb::Hello { .. } => {
            Err(Fault::new(Failure::Invalid, fault::PROTOCOL, "a greeting of another version"))
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

/// Does a verb that is answered by something open.
async fn open(connection: &Rc<Connection>, verb: Verb) -> Result<(Reply, Vec<OwnedFd>), Fault> {
    let engine = &connection.engine;
    let (reply, opened) = match verb {
        Verb::OpenRoot { site } => {
            let OpenedRoot { dir, is_remote } = engine.open_root(&site).await?;
            (Reply::Root { is_remote }, dir)
        }
        Verb::ConnectServer { site } => {
            (Reply::Connected, engine.connect_server(&site, connection.peer).await?)
        }
        Verb::OpenCertificate { name } => (Reply::Certificate, engine.open_certificate(name).await?),
        Verb::ConnectInstance { instance } => (Reply::Connected, engine.instances.connect(instance).await?),
        _ => unreachable!("`answer` gives it these"),
    };
    Ok((reply, vec![opened]))
}

fn not_in_use(instance: InstanceId) -> Fault {
    Fault::new(Failure::NotFound, fault::UNKNOWN, format!("instance {} is not in use", instance.0))
}

/// Counts a seat that is asked for until it is there or will not be.
struct Seating(Rc<Connection>);

impl Seating {
    fn new(connection: &Rc<Connection>) -> Self {
        connection.seating.set(connection.seating.get() + 1);
        Self(Rc::clone(connection))
    }
}

impl Drop for Seating {
    fn drop(&mut self) {
        self.0.seating.set(self.0.seating.get() - 1);
    }
}

impl Connection {
    fn room_for_process(&self) -> Result<(), Fault> {
        // What is under way may become a process too.
        if self.leased.borrow().len() + self.in_flight.get() > PROCESSES_PER_CONNECTION_MAX {
            let message = format!("{PROCESSES_PER_CONNECTION_MAX} processes are leased to one connection");
            return Err(Fault::new(Failure::Busy, fault::LIMIT, message));
        }
        Ok(())
    }

    /// Waits for an instance as long as it takes, beside what is in flight.
    fn use_instance(self: &Rc<Self>, tag: u64, site: SiteName, epoch: Option<u64>) {
        let uses: usize = self.uses.borrow().values().map(Vec::len).sum();
        if uses + self.asking.borrow().len() >= INSTANCE_USES_PER_CONNECTION_MAX {
            let message =
                format!("{INSTANCE_USES_PER_CONNECTION_MAX} instances are in use by one connection");
            let fault = Fault::new(Failure::Busy, fault::LIMIT, message);
            return self.reply(tag, fault.into_reply(), Vec::new());
        }
        let connection = Rc::clone(self);
        let task = spawn_local(async move {
            let engine = &connection.engine;
            let used = engine.instances.use_site(engine, &site, epoch).await;
            connection.asking.borrow_mut().remove(&tag);
            match used {
                Ok(Using { id, socket, tally, wake, lease }) => {
                    connection.uses.borrow_mut().entry(id).or_default().push(lease);
                    connection.reply(
                        tag,
                        Reply::Using { instance: id, wake },
                        [socket].into_iter().chain(tally).collect(),
                    );
                }
                Err(fault) => {
                    tracing::debug!("{fault}");
                    let reply = match fault.failure {
                        Failure::Elsewhere => engine.elsewhere(&site, fault.message),
                        _ => fault.into_reply(),
                    };
                    connection.reply(tag, reply, Vec::new());
                }
            }
        });
        // The task begins only after this.
        self.asking.borrow_mut().insert(tag, task.abort_handle());
    }

    /// Waits for a process that serves the request, beside what is in flight.
    fn enter_instance(self: &Rc<Self>, tag: u64, instance: InstanceId, line: Line, asked: Confinement) {
        let refuse = |failure, code, message: String| {
            self.reply(tag, Fault::new(failure, code, message).into_reply(), Vec::new());
        };
        // Who does not use it cannot have a request in it.
        if !self.uses.borrow().contains_key(&instance) {
            return self.reply(tag, not_in_use(instance).into_reply(), Vec::new());
        }
        if self.seats.borrow().len() + self.seating.get() >= SEATS_PER_CONNECTION_MAX {
            let message =
                format!("{SEATS_PER_CONNECTION_MAX} requests of one connection have seats in instances");
            return refuse(Failure::Busy, fault::LIMIT, message);
        }
        let counted = Seating::new(self);
        let connection = Rc::clone(self);
        let task = spawn_local(async move {
            let engine = &connection.engine;
            let placed = engine.instances.enter(engine, instance, line, asked).await;
            connection.asking.borrow_mut().remove(&tag);
            drop(counted);
            let reply = match placed {
                Ok(Placed::Seated { lease, cell }) => {
                    let seat = lease.id();
                    connection.seats.borrow_mut().insert(seat, lease);
                    Reply::Seated { seat, cell }
                }
                Ok(Placed::Unseated { cell, for_good }) => Reply::Unseated { cell, for_good },
                Err(fault) => {
                    tracing::debug!("{fault}");
                    fault.into_reply()
                }
            };
            connection.reply(tag, reply, Vec::new());
        });
        // The task begins only after this.
        self.asking.borrow_mut().insert(tag, task.abort_handle());
    }

    fn leave_seat(self: &Rc<Self>, tag: u64, seat: SeatId) {
        let unknown =
            move || Fault::new(Failure::NotFound, fault::UNKNOWN, format!("there is no seat {}", seat.0));
        let Some(lease) = self.seats.borrow_mut().remove(&seat) else {
            return self.reply(tag, unknown().into_reply(), Vec::new());
        };
        let left = lease.leave().map(|usage| Reply::Used { usage });
        self.reply(tag, left.unwrap_or_else(|| unknown().into_reply()), Vec::new());
    }

    fn boost(&self, tag: u64, instance: InstanceId, asked: Boost) {
        let boosted = if !self.uses.borrow().contains_key(&instance) {
            Err(not_in_use(instance))
        } else if self.boosts.borrow().len() >= BOOSTS_PER_CONNECTION_MAX {
            let message = format!("{BOOSTS_PER_CONNECTION_MAX} requests of one connection have boosts");
            Err(Fault::new(Failure::Busy, fault::LIMIT, message))
        } else {
            self.engine.instances.boost(&self.engine, instance, asked)
        };
        let reply = match boosted {
            Ok(lease) => {
                let reply = Reply::Boosted { boost: lease.id(), granted: lease.granted() };
                self.boosts.borrow_mut().insert(lease.id(), lease);
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
            let mut uses = self.uses.borrow_mut();
            let of = uses.get_mut(&instance);
            let lease = of.and_then(Vec::pop);
            if uses.get(&instance).is_some_and(Vec::is_empty) {
                uses.remove(&instance);
                // Who does not use it has no request in it.
                self.boosts.borrow_mut().retain(|_, boost| boost.instance() != instance);
            }
            lease
        };
        drop(lease);
    }

    /// Keeps the tree for the peer, and tells it when the tree has ended.
    fn lease(self: &Rc<Self>, handle: Handle) -> Reply {
        let (process, cell) = (handle.id(), handle.cell());
        let ended = handle.ended();
        // A peer that left meanwhile gets nothing: dropping the handle ends the tree.
        if !self.closed.get() {
            self.leased.borrow_mut().insert(process, handle);
            let connection = Rc::clone(self);
            // Queued behind this one's reply, which is sent before another task runs.
            spawn_local(async move {
                let (exit, usage) = ended.await;
                connection.leased.borrow_mut().remove(&process);
                connection.queue(&Answer::Ended { process, exit, usage }, Vec::new());
            });
        }
        Reply::Spawned { process, cell }
    }

    fn reply(&self, tag: u64, reply: Reply, fds: Vec<OwnedFd>) {
        self.queue(&Answer::Reply { tag, reply }, fds);
    }

    fn queue(&self, answer: &Answer, fds: Vec<OwnedFd>) {
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
