//! The edge's side: each verb as an async function, each spawned process as a guard.
//!
//! One `Keeper` per edge thread, on its `LocalSet`. A lost connection fails what was under way with `Gone`
//! and the next call makes a new one. Not here: what the edge does with descriptors and failures (`edge`).

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use nagaya_cmdb::cell::{Boost, CellChange, Confinement, Usage};
use nagaya_cmdb::instance::Wake;
use nagaya_cmdb::{NodeName, SiteName, TenantName};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Mutex, Notify, mpsc, oneshot, watch};
use tokio::task::spawn_local;
use tokio::time::timeout;

use crate::codec::{self, CodecError};
use crate::instances::{ACCEPT_MAX, WAKE_MAX};
use crate::process::START_TIMEOUT;
use crate::protocol::{
    Answer, Ask, BoostId, Exit, Failure, InstanceId, Line, OpenedRoot, PROTOCOL_VERSION, ProcessId, Reply,
    SeatId, Verb,
};
use crate::roll::RollReader;
use crate::server::{
    BOOSTS_PER_CONNECTION_MAX, INSTANCE_USES_PER_CONNECTION_MAX, PROCESSES_PER_CONNECTION_MAX,
    SEATS_PER_CONNECTION_MAX, receive, send,
};
use crate::sys;
use crate::tally::TallyReader;

/// Longest wait for an answer that starts nothing.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest wait for a program to begin. The keeper's own bound on a start that hangs is shorter.
pub const SPAWN_TIMEOUT: Duration = START_TIMEOUT.saturating_add(CALL_TIMEOUT);

/// Longest wait for an instance that has to be woken. The keeper bounds the wait for its turn, a restoration that fails and
/// the start after it; this is more than all of them.
pub const WAKE_TIMEOUT: Duration = WAKE_MAX.saturating_add(CALL_TIMEOUT);

/// Longest wait for a process of an instance to accept a connection: longer than the keeper waits for that.
const SEAT_TIMEOUT: Duration = ACCEPT_MAX.saturating_add(CALL_TIMEOUT);

/// Longest wait for an answer about an image: all of it may have to be read and compared first.
const IMAGE_TIMEOUT: Duration = Duration::from_secs(120);

/// Longest wait for an image to come: 16 GiB at 5 MiB a second.
const FETCH_TIMEOUT: Duration = Duration::from_secs(3600);

/// Guards at once, and questions that may become one.
const FAREWELLS_MAX: usize = PROCESSES_PER_CONNECTION_MAX
    + BOOSTS_PER_CONNECTION_MAX
    + 2 * INSTANCE_USES_PER_CONNECTION_MAX
    + 2 * SEATS_PER_CONNECTION_MAX;

/// Calls of one thread that may wait for answers.
const WAITING_MAX: usize = INSTANCE_USES_PER_CONNECTION_MAX;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// It is not there, or went while it was asked. The next call connects anew.
    #[error("the keeper is not there")]
    Gone,
    #[error("{}: {message}", nagaya_base::Code(*code))]
    Refused { failure: Failure, code: u16, message: String },
    #[error("the keeper did not answer in time")]
    TimedOut,
    /// The site's application is not placed on this node. `node` and `epoch` are of the placement the keeper knows.
    #[error("{}: {message}", crate::authority::ELSEWHERE)]
    Elsewhere { node: Option<NodeName>, epoch: Option<u64>, message: String },
}

/// A running CGI program. Both descriptors are non-blocking pipes.
#[derive(Debug)]
pub struct CgiProcess {
    pub stdin: OwnedFd,
    pub stdout: OwnedFd,
    pub guard: ProcessGuard,
    /// Where it runs, as `nagaya cells` shows it.
    pub cell: Box<str>,
}

/// A running PHP worker: its FastCGI connection, non-blocking.
#[derive(Debug)]
pub struct PhpWorker {
    pub socket: OwnedFd,
    pub guard: ProcessGuard,
    /// Where it waits for its first request.
    pub cell: Box<str>,
}

/// What a keeper still wants of another node's image.
#[derive(Debug)]
pub struct ImageIntake {
    /// Byte of the image from which on it is wanted.
    pub offset: u64,
    /// Bytes of the sealed stream that brings it.
    pub bytes: u64,
    /// Where they are to be written. It is closed at their end.
    pub pipe: OwnedFd,
}

/// What another node is told of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageOffer {
    /// For `fetch_image` there.
    pub offer: Box<str>,
    /// For `send_image` here.
    pub digest: Box<str>,
    /// Of all that is sent.
    pub bytes: u64,
}

/// Ends a process tree when dropped, from any thread and without waiting.
#[derive(Debug)]
pub struct ProcessGuard {
    process: ProcessId,
    /// A place in the connection's queue, taken when the process was made: dropping cannot find it full.
    end: Option<mpsc::OwnedPermit<Farewell>>,
    end_told: watch::Receiver<Option<End>>,
}

/// How a process ended, and what its tree used: all of it for a CGI program, for a worker what came after its last
/// `leave`.
type End = (Exit, Usage);

impl ProcessGuard {
    /// For `enter`, `leave` and `measure`, which any thread's `Keeper` of this process may ask.
    pub fn id(&self) -> ProcessId {
        self.process
    }

    /// Resolves once nothing of the tree is left. `Gone`: the keeper went, and the tree with it.
    pub async fn ended(&self) -> Result<(Exit, Usage), ClientError> {
        let mut end = self.end_told.clone();
        let end = end.wait_for(Option::is_some).await.map_err(|_| ClientError::Gone)?;
        end.ok_or(ClientError::Gone)
    }

    /// Ends the tree now and waits until nothing of it is left.
    pub async fn end(mut self) -> Result<(Exit, Usage), ClientError> {
        self.send_end();
        self.ended().await
    }

    fn send_end(&mut self) {
        if let Some(end) = self.end.take() {
            end.send(Farewell::End(self.process));
        }
    }
}

impl Drop for ProcessGuard {
    fn drop(&mut self) {
        self.send_end();
    }
}

/// A site's instance, awake: one connection to it, and what keeps it awake.
#[derive(Debug)]
pub struct InstanceUse {
    /// Non-blocking; Unix or TCP as its record says.
    pub socket: OwnedFd,
    pub guard: InstanceGuard,
    /// How long it waits for databases, if it may reach any, or any place outside.
    pub tally: Option<TallyReader>,
    /// What this call waited for. None: it ran.
    pub wake: Option<Wake>,
}

/// Keeps an instance from resting until it is dropped, from any thread and without waiting. Connections to the instance
/// are to be closed before: one that rests answers nobody.
#[derive(Debug)]
pub struct InstanceGuard {
    instance: InstanceId,
    /// Number of the connection to the keeper that it was given by.
    connection: u64,
    /// As that of a `ProcessGuard`.
    leave: Option<mpsc::OwnedPermit<Farewell>>,
}

impl InstanceGuard {
    /// For `connect_instance`. Another one than before: it ended meanwhile, and connections to the former are of no use.
    pub fn id(&self) -> InstanceId {
        self.instance
    }
}

impl Drop for InstanceGuard {
    fn drop(&mut self) {
        if let Some(leave) = self.leave.take() {
            leave.send(Farewell::Leave(self.instance));
        }
    }
}

/// Keeps a process in the cell of the request it serves; dropped, from any thread and without waiting, it lets it go back.
#[derive(Debug)]
pub struct SeatGuard {
    seat: SeatId,
    /// As that of a `ProcessGuard`.
    leave: Option<mpsc::OwnedPermit<Farewell>>,
}

impl Drop for SeatGuard {
    fn drop(&mut self) {
        if let Some(leave) = self.leave.take() {
            leave.send(Farewell::LeaveSeat(self.seat));
        }
    }
}

/// Keeps limits of an instance higher for a request, until it is dropped, from any thread and without waiting.
#[derive(Debug)]
pub struct BoostGuard {
    boost: BoostId,
    /// As that of a `ProcessGuard`.
    end: Option<mpsc::OwnedPermit<Farewell>>,
}

impl Drop for BoostGuard {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            end.send(Farewell::EndBoost(self.boost));
        }
    }
}

/// Where the limits of a request in an instance hold.
#[derive(Debug)]
pub enum Entered {
    /// In a cell of its own.
    Seated { guard: SeatGuard, cell: Box<str> },
    /// In the instance's, as for all its other requests. `for_good`: so it is for all of this run.
    Unseated { cell: Box<str>, for_good: bool },
}

/// What guards queue when they are dropped, and what else nobody waits for.
#[derive(Debug, Clone, Copy)]
enum Farewell {
    End(ProcessId),
    Leave(InstanceId),
    LeaveSeat(SeatId),
    EndBoost(BoostId),
    Answered(InstanceId),
    /// The tag of a question nobody waits for any more.
    Forget(u64),
}

/// A question for an instance, or a seat in one, that waits for its answer. Dropped before that, it takes the question back.
struct Asking<'a> {
    connection: &'a Connection,
    tag: u64,
    forget: Option<mpsc::OwnedPermit<Farewell>>,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if self.connection.waiting.borrow_mut().remove(&self.tag).is_some()
            && let Some(forget) = self.forget.take()
        {
            forget.send(Farewell::Forget(self.tag));
        }
    }
}

#[derive(Debug)]
enum Guard {
    Process(ProcessGuard),
    Instance(InstanceGuard),
    Seat(SeatGuard),
    Boost(BoostGuard),
}

/// What a call gets: the reply, its descriptors, and for a spawned process or an instance its guard.
type Got = (Reply, Vec<OwnedFd>, Option<Guard>);

pub struct Keeper {
    path: PathBuf,
    connection: RefCell<Option<Rc<Connection>>>,
    /// Held while connecting, so that many calls make one connection.
    connecting: Mutex<()>,
    /// Connections made so far.
    connections: Cell<u64>,
}

struct Connection {
    number: u64,
    socket: AsyncFd<OwnedFd>,
    /// Which instances are awake. Came with the answer to the greeting.
    roll: OnceCell<RollReader>,
    open: Cell<bool>,
    next_tag: Cell<u64>,
    waiting: RefCell<HashMap<u64, oneshot::Sender<Got>>>,
    processes: RefCell<HashMap<ProcessId, watch::Sender<Option<End>>>>,
    farewells: mpsc::Sender<Farewell>,
    closed: Notify,
}

impl Keeper {
    /// Connects and greets. To be called on a `LocalSet`; all other calls too.
    pub async fn connect(path: &Path) -> Result<Rc<Self>, ClientError> {
        let keeper = Self::later(path);
        keeper.connected().await?;
        Ok(keeper)
    }

    /// As `connect`, but the connection is made by the first call.
    pub fn later(path: &Path) -> Rc<Self> {
        Rc::new(Self {
            path: path.to_owned(),
            connection: RefCell::default(),
            connecting: Mutex::new(()),
            connections: Cell::new(0),
        })
    }

    /// The site's document root, `O_PATH | O_DIRECTORY`.
    pub async fn open_root(&self, site: &SiteName) -> Result<OpenedRoot, ClientError> {
        match self.call(Verb::OpenRoot { site: site.clone() }, CALL_TIMEOUT).await? {
            (Reply::Root { is_remote }, fds, _) => Ok(OpenedRoot { dir: one_of(fds)?, is_remote }),
            _ => Err(ClientError::Gone),
        }
    }

    /// A new connection to the Unix socket of this site's server, not blocking. Refused with `Failure::Busy`: its queue is
    /// full.
    pub async fn connect_server(&self, site: &SiteName) -> Result<OwnedFd, ClientError> {
        one_of(self.call(Verb::ConnectServer { site: site.clone() }, CALL_TIMEOUT).await?.1)
    }

    /// Runs `script`, relative to the document root, with these variables, in a cell of its own that `confinement` says
    /// where to make.
    pub async fn spawn_cgi(
        &self,
        site: &SiteName,
        script: &str,
        env: Vec<(String, String)>,
        confinement: &Confinement,
    ) -> Result<CgiProcess, ClientError> {
        let verb = Verb::SpawnCgi {
            site: site.clone(),
            script: script.to_owned(),
            env,
            confinement: Box::new(confinement.clone()),
        };
        let (reply, fds, guard) = self.call(verb, SPAWN_TIMEOUT).await?;
        match (<[OwnedFd; 2]>::try_from(fds), guard, reply) {
            (Ok([stdin, stdout]), Some(Guard::Process(guard)), Reply::Spawned { cell, .. }) => {
                Ok(CgiProcess { stdin, stdout, guard, cell: cell.into() })
            }
            _ => Err(ClientError::Gone),
        }
    }

    /// A PHP worker of the site's tenant. It takes scripts of this site, until it enters for another one.
    pub async fn spawn_php(&self, site: &SiteName) -> Result<PhpWorker, ClientError> {
        let (reply, fds, guard) = self.call(Verb::SpawnPhp { site: site.clone() }, SPAWN_TIMEOUT).await?;
        match (one_of(fds), guard, reply) {
            (Ok(socket), Some(Guard::Process(guard)), Reply::Spawned { cell, .. }) => {
                Ok(PhpWorker { socket, guard, cell: cell.into() })
            }
            _ => Err(ClientError::Gone),
        }
    }

    /// Moves a PHP worker to where its next request is to run. The answer names its cell. Needless while site and
    /// confinement are those it entered with last.
    pub async fn enter(
        &self,
        process: ProcessId,
        site: &SiteName,
        confinement: &Confinement,
    ) -> Result<Box<str>, ClientError> {
        let verb = Verb::Enter { process, site: site.clone(), confinement: Box::new(confinement.clone()) };
        match self.call(verb, CALL_TIMEOUT).await?.0 {
            Reply::Entered { cell } => Ok(cell.into()),
            _ => Err(ClientError::Gone),
        }
    }

    /// The worker's request has ended: what it used. What the request left running is ended; the worker stays where
    /// it is.
    pub async fn leave(&self, process: ProcessId) -> Result<Usage, ClientError> {
        self.usage(Verb::Leave { process }).await
    }

    /// What a process has used for its present request so far.
    pub async fn measure(&self, process: ProcessId) -> Result<Usage, ClientError> {
        self.usage(Verb::Measure { process }).await
    }

    async fn usage(&self, verb: Verb) -> Result<Usage, ClientError> {
        match self.call(verb, CALL_TIMEOUT).await?.0 {
            Reply::Used { usage } => Ok(usage),
            _ => Err(ClientError::Gone),
        }
    }

    /// Makes, changes and removes named cells of the node, in this order. It stops at the first that fails.
    pub async fn change_cells(&self, changes: Vec<CellChange>) -> Result<(), ClientError> {
        match self.call(Verb::ChangeCells { changes }, CALL_TIMEOUT).await?.0 {
            Reply::Done => Ok(()),
            _ => Err(ClientError::Gone),
        }
    }

    /// What runs for some tenants gives way to others on the processor, for `GIVE_WAY_FOR` from now; for others it does so no more.
    /// At most `TENANTS_MAX` of each.
    pub async fn give_way(
        &self,
        give_way: Vec<TenantName>,
        resume: Vec<TenantName>,
    ) -> Result<(), ClientError> {
        match self.call(Verb::GiveWay { give_way, resume }, CALL_TIMEOUT).await?.0 {
            Reply::Done => Ok(()),
            _ => Err(ClientError::Gone),
        }
    }

    /// Named cells with their limits and use, as a JSON object.
    pub async fn cells(&self) -> Result<String, ClientError> {
        match self.call(Verb::Cells, CALL_TIMEOUT).await?.0 {
            Reply::Cells { json } => Ok(json),
            _ => Err(ClientError::Gone),
        }
    }

    /// The site's instance, woken if need be. The first of a thread's requests that need it asks; the guard is for all of
    /// them, and goes when none needs it any more. `epoch` is of the placement that says it runs here; without a cluster
    /// there is none.
    pub async fn use_instance(
        &self,
        site: &SiteName,
        epoch: Option<u64>,
    ) -> Result<InstanceUse, ClientError> {
        let verb = Verb::UseInstance { site: site.clone(), epoch };
        let (reply, fds, guard) = self.call(verb, WAKE_TIMEOUT).await?;
        let mut fds = fds.into_iter();
        match (fds.next(), guard, reply) {
            (Some(socket), Some(Guard::Instance(guard)), Reply::Using { wake, .. }) => {
                Ok(InstanceUse { socket, guard, tally: fds.next().map(TallyReader::new), wake })
            }
            _ => Err(ClientError::Gone),
        }
    }

    /// One more connection to an instance this thread uses. Refused with `Failure::NotFound`: it ended; `use_instance` wakes
    /// it again.
    pub async fn connect_instance(&self, instance: InstanceId) -> Result<OwnedFd, ClientError> {
        one_of(self.call(Verb::ConnectInstance { instance }, CALL_TIMEOUT).await?.1)
    }

    /// A request that has waited for this instance's wake begins to be answered. Waits for nothing: what is not told ends by
    /// itself soon.
    pub fn answered(&self, instance: InstanceId) {
        if let Some(open) = self.open() {
            let _ = open.farewells.try_send(Farewell::Answered(instance));
        }
    }

    /// A request that is so confined goes over this connection to an instance this thread uses. Waits until the instance has
    /// accepted it, which it may do only once the request is sent.
    pub async fn enter_instance(
        &self,
        instance: InstanceId,
        line: Line,
        confinement: &Confinement,
    ) -> Result<Entered, ClientError> {
        let verb = Verb::EnterInstance { instance, line, confinement: Box::new(confinement.clone()) };
        match self.call(verb, SEAT_TIMEOUT).await? {
            (Reply::Seated { cell, .. }, _, Some(Guard::Seat(guard))) => {
                Ok(Entered::Seated { guard, cell: cell.into() })
            }
            (Reply::Unseated { cell, for_good }, _, _) => {
                Ok(Entered::Unseated { cell: cell.into(), for_good })
            }
            _ => Err(ClientError::Gone),
        }
    }

    /// The request has ended: what it used. Refused with `Failure::NotFound`: that is not known.
    pub async fn leave_seat(&self, mut guard: SeatGuard) -> Result<Usage, ClientError> {
        // Should this be given up, the guard says it once more, which does no harm.
        let used = self.usage(Verb::LeaveSeat { seat: guard.seat }).await;
        if used.is_ok() {
            guard.leave = None;
        }
        used
    }

    /// While the guard lives, an instance this thread uses has these limits, where its record gives less. With how much of that its
    /// records allow.
    pub async fn boost_instance(
        &self,
        instance: InstanceId,
        boost: Boost,
    ) -> Result<(BoostGuard, Boost), ClientError> {
        match self.call(Verb::BoostInstance { instance, boost }, CALL_TIMEOUT).await? {
            (Reply::Boosted { granted, .. }, _, Some(Guard::Boost(guard))) => Ok((guard, granted)),
            _ => Err(ClientError::Gone),
        }
    }

    /// What another node is to be told of the site's image here. None: it has none. Of this and the next three, `order` is the
    /// supervisor's; without it they are refused with `Failure::Forbidden`.
    pub async fn offer_image(&self, site: &SiteName, order: &str) -> Result<Option<ImageOffer>, ClientError> {
        let verb = Verb::OfferImage { site: site.clone(), order: order.to_owned() };
        match self.call(verb, IMAGE_TIMEOUT).await?.0 {
            Reply::Offered { offer, digest, bytes } => {
                Ok(offer.map(|offer| ImageOffer { offer: offer.into(), digest: digest.into(), bytes }))
            }
            _ => Err(ClientError::Gone),
        }
    }

    /// A pipe to read the image from that was offered with this digest, from this byte on, sealed. `NotFound`: it is another now.
    pub async fn send_image(
        &self,
        site: &SiteName,
        order: &str,
        (digest, offset): (&str, u64),
    ) -> Result<OwnedFd, ClientError> {
        let (digest, order) = (digest.to_owned(), order.to_owned());
        let verb = Verb::SendImage { site: site.clone(), order, digest, offset };
        one_of(self.call(verb, IMAGE_TIMEOUT).await?.1)
    }

    /// Begins to take over what another node offers. What does not fit this node is refused.
    pub async fn fetch_image(
        &self,
        site: &SiteName,
        order: &str,
        offer: &str,
    ) -> Result<ImageIntake, ClientError> {
        let (offer, order) = (offer.to_owned(), order.to_owned());
        let verb = Verb::FetchImage { site: site.clone(), order, offer };
        match self.call(verb, IMAGE_TIMEOUT).await? {
            (Reply::Fetching { offset, bytes }, fds, _) => {
                Ok(ImageIntake { offset, bytes, pipe: one_of(fds)? })
            }
            _ => Err(ClientError::Gone),
        }
    }

    /// Returns once the image that is being taken over is there, or with why it is not. What came in part is kept for the
    /// next `fetch_image`.
    pub async fn image_fetched(&self, site: &SiteName, order: &str) -> Result<(), ClientError> {
        let verb = Verb::ImageFetched { site: site.clone(), order: order.to_owned() };
        match self.call(verb, FETCH_TIMEOUT).await?.0 {
            Reply::Done => Ok(()),
            _ => Err(ClientError::Gone),
        }
    }

    /// Whether this guard still keeps its instance awake: a keeper that was started anew knows nothing of it.
    pub fn knows(&self, guard: &InstanceGuard) -> bool {
        self.open().is_some_and(|open| open.number == guard.connection)
    }

    /// Whether the site's instance rests: it gets no CPU time, and a request would be the first to wake it. Asks nobody.
    ///
    /// As the keeper knew it just now. Without a keeper everything rests, because it all ends with its keeper; a new one is
    /// then looked for, so that the next answers are of what it runs. False if the keeper cannot tell.
    pub fn rests(self: &Rc<Self>, site: &SiteName) -> bool {
        if let Some(open) = self.open() {
            return open.roll.get().and_then(|roll| roll.is_awake(site)).is_some_and(|is_awake| !is_awake);
        }
        if self.connecting.try_lock().is_ok() {
            let keeper = Rc::clone(self);
            spawn_local(async move { keeper.connected().await.map(drop) });
        }
        true
    }

    /// Connects now, so that the first answer of `rests` is not given without a keeper.
    pub async fn greet(&self) -> Result<(), ClientError> {
        self.connected().await.map(drop)
    }

    /// Chain and key (PEM) for a name, if there is one.
    pub async fn open_certificate(&self, name: &str) -> Result<Option<OwnedFd>, ClientError> {
        match self.call(Verb::OpenCertificate { name: name.to_owned() }, CALL_TIMEOUT).await {
            Ok((_, fds, _)) => one_of(fds).map(Some),
            Err(ClientError::Refused { failure: Failure::NotFound, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What runs in the keeper, as a JSON object.
    pub async fn status(&self) -> Result<String, ClientError> {
        match self.call(Verb::Status, CALL_TIMEOUT).await?.0 {
            Reply::Status { json } => Ok(json),
            _ => Err(ClientError::Gone),
        }
    }

    async fn call(&self, verb: Verb, within: Duration) -> Result<Got, ClientError> {
        let asked = async { self.connected().await?.ask(verb).await };
        timeout(within, asked).await.unwrap_or(Err(ClientError::TimedOut))
    }

    /// The open connection, or a new one.
    async fn connected(&self) -> Result<Rc<Connection>, ClientError> {
        if let Some(open) = self.open() {
            return Ok(open);
        }
        let _one_at_a_time = self.connecting.lock().await;
        // Another call may have made it while this one waited.
        if let Some(open) = self.open() {
            return Ok(open);
        }
        self.connections.set(self.connections.get() + 1);
        let connection = Connection::open(&self.path, self.connections.get()).map_err(|error| {
            tracing::debug!(%error, "no connection to the keeper at {}", self.path.display());
            ClientError::Gone
        })?;
        let hello = connection.ask(Verb::Hello { version: PROTOCOL_VERSION });
        match timeout(CALL_TIMEOUT, hello).await.unwrap_or(Err(ClientError::TimedOut)) {
            Ok((_, fds, _)) => {
                if let Some(roll) = fds.into_iter().next() {
                    // It is a new connection's: nothing is there yet.
                    let _ = connection.roll.set(RollReader::new(roll));
                }
            }
            Err(error) => {
                connection.close();
                return Err(error);
            }
        }
        *self.connection.borrow_mut() = Some(Rc::clone(&connection));
        Ok(connection)
    }

    fn open(&self) -> Option<Rc<Connection>> {
        self.connection.borrow().as_ref().filter(|connection| connection.open.get()).cloned()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.get_mut().take() {
            connection.close();
        }
    }
}

impl Connection {
    fn open(path: &Path, number: u64) -> io::Result<Rc<Self>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
            // A full queue of connections: the keeper is not taking them, which is as good as not there.
            Err(Errno::AGAIN) => return Err(io::ErrorKind::ConnectionRefused.into()),
            connected => connected?,
        }
        let (farewells, to_say) = mpsc::channel(FAREWELLS_MAX);
        let connection = Rc::new(Self {
            number,
            roll: OnceCell::new(),
            socket: sys::watch(socket, Interest::READABLE | Interest::WRITABLE)?,
            open: Cell::new(true),
            next_tag: Cell::new(1),
            waiting: RefCell::default(),
            processes: RefCell::default(),
            farewells,
            closed: Notify::new(),
        });
        spawn_local(Rc::clone(&connection).read());
        spawn_local(Rc::clone(&connection).write_farewells(to_say));
        Ok(connection)
    }

    async fn ask(&self, verb: Verb) -> Result<Got, ClientError> {
        let tag = self.next_tag.replace(self.next_tag.get() + 1);
        // Of an instance or its processes the answer may take minutes, and who asks may leave long before.
        let is_patient = matches!(verb, Verb::UseInstance { .. } | Verb::EnterInstance { .. });
        let bytes = codec::encode(&Ask { tag, verb }).map_err(|_| ClientError::Refused {
            failure: Failure::Invalid,
            code: crate::fault::PROTOCOL.0,
            message: "what is asked does not fit in one message".into(),
        })?;
        let (answer, answered) = oneshot::channel();
        let full = || ClientError::Refused {
            failure: Failure::Busy,
            code: crate::fault::LIMIT.0,
            message: format!("{WAITING_MAX} calls wait for the keeper already"),
        };
        if self.waiting.borrow().len() >= WAITING_MAX {
            return Err(full());
        }
        let forget = match is_patient {
            true => Some(self.farewells.clone().try_reserve_owned().map_err(|_| full())?),
            false => None,
        };
        self.waiting.borrow_mut().insert(tag, answer);
        let _asking = is_patient.then(|| Asking { connection: self, tag, forget });
        if send(&self.socket, &bytes, &[]).await.is_err() {
            self.close();
        }
        // If this is dropped while it waits, the reader still takes what answer there is, and what came with it is
        // closed and ended by being dropped.
        match answered.await {
            Ok((Reply::Failed { failure, code, message }, _, _)) => {
                Err(ClientError::Refused { failure, code, message })
            }
            Ok((Reply::Elsewhere { node, epoch, message }, _, _)) => {
                Err(ClientError::Elsewhere { node, epoch, message })
            }
            Ok(got) => Ok(got),
            Err(_) => Err(ClientError::Gone),
        }
    }

    async fn read(self: Rc<Self>) {
        let mut buffer = Vec::new();
        loop {
            match receive::<Answer>(&self.socket, &mut buffer).await {
                Ok((Answer::Reply { tag, reply }, fds)) => self.deliver(tag, reply, fds),
                Ok((Answer::Ended { process, exit, usage }, _)) => {
                    if let Some(ended) = self.processes.borrow_mut().remove(&process) {
                        ended.send_replace(Some((exit, usage)));
                    }
                }
                Err(CodecError::Closed) => break,
                Err(error) => {
                    tracing::error!(%error, "the keeper sent what cannot be read; connecting anew");
                    break;
                }
            }
        }
        self.close();
    }

    fn deliver(&self, tag: u64, reply: Reply, fds: Vec<OwnedFd>) {
        let guard = match &reply {
            Reply::Spawned { .. } | Reply::Using { .. } | Reply::Seated { .. } | Reply::Boosted { .. } => {
                match self.farewells.clone().try_reserve_owned() {
                    Ok(place) => self.guard(&reply, place),
                    // The keeper leases no more than there are places; one that does is not ours.
                    Err(_) => return self.close(),
                }
            }
            _ => None,
        };
        if let Some(answer) = self.waiting.borrow_mut().remove(&tag) {
            // Who asked may have left; the guard comes back and is dropped, which ends the process.
            let _ = answer.send((reply, fds, guard));
        }
    }

    fn guard(&self, reply: &Reply, place: mpsc::OwnedPermit<Farewell>) -> Option<Guard> {
        match *reply {
            Reply::Spawned { process, .. } => {
                let (ended, end_told) = watch::channel(None);
                self.processes.borrow_mut().insert(process, ended);
                Some(Guard::Process(ProcessGuard { process, end: Some(place), end_told }))
            }
            Reply::Using { instance, .. } => {
                Some(Guard::Instance(InstanceGuard { instance, connection: self.number, leave: Some(place) }))
            }
            Reply::Seated { seat, .. } => Some(Guard::Seat(SeatGuard { seat, leave: Some(place) })),
            Reply::Boosted { boost, .. } => Some(Guard::Boost(BoostGuard { boost, end: Some(place) })),
            _ => None,
        }
    }

    /// Sends what guards queue, until the connection closes.
    async fn write_farewells(self: Rc<Self>, mut to_say: mpsc::Receiver<Farewell>) {
        loop {
            let farewell = tokio::select! {
                Some(farewell) = to_say.recv() => farewell,
                () = self.closed.notified() => return,
            };
            let verb = match farewell {
                Farewell::End(process) => Verb::End { process },
                Farewell::Leave(instance) => Verb::LeaveInstance { instance },
                Farewell::Answered(instance) => Verb::Answered { instance },
                Farewell::LeaveSeat(seat) => Verb::LeaveSeat { seat },
                Farewell::EndBoost(boost) => Verb::EndBoost { boost },
                Farewell::Forget(tag) => Verb::Forget { tag },
            };
            let message = codec::encode(&Ask { tag: 0, verb }).expect("an id is a few bytes");
            if send(&self.socket, &message, &[]).await.is_err() {
                return self.close();
            }
        }
    }

    /// Fails what is under way and makes the guards void.
    fn close(&self) {
        if self.open.replace(false) {
            self.waiting.borrow_mut().clear();
            self.processes.borrow_mut().clear();
            self.closed.notify_one();
            // The reader wakes by this; a socket that is not connected any more has woken it already.
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        }
    }
}

fn one_of(fds: Vec<OwnedFd>) -> Result<OwnedFd, ClientError> {
    match <[OwnedFd; 1]>::try_from(fds) {
        Ok([fd]) => Ok(fd),
        // A keeper that sends fewer than it says is not one of this version.
        Err(_) => Err(ClientError::Gone),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guard_may_be_dropped_on_another_thread() {
        fn is_send<T: Send + Sync>() {}
        is_send::<ProcessGuard>();
        is_send::<InstanceGuard>();
        is_send::<SeatGuard>();
        is_send::<BoostGuard>();
    }
}
