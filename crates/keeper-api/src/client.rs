//! The edge's side of the protocol: each verb as an async function, each spawned process as a
//! guard.
//!
//! One `KeeperClient` per edge thread, on its `LocalSet`. A lost connection fails what was under
//! way with `Gone`. The next call makes a new one, as does a call that could not be sent. Not here:
//! what the edge does with descriptors and failures (`edge`).

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_records::cell::{Boost, CellChange, Confinement, RequestUsage};
use nagaya_records::instance::WakeReport;
use nagaya_records::{NodeName, SiteName, TenantName};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::sync::{Mutex, Notify, mpsc, oneshot, watch};
use tokio::task::spawn_local;
use tokio::time::timeout;

use crate::awake_set::AwakeSetReader;
use crate::codec::{self, CodecError, MessageSocket};
use crate::database_waits::DatabaseWaitsReader;
use crate::limits::{
    ACCEPT_MAX, BOOSTS_PER_CONNECTION_MAX, INSTANCE_USES_PER_CONNECTION_MAX, PROCESSES_PER_CONNECTION_MAX,
    SEATS_PER_CONNECTION_MAX, START_TIMEOUT, WAKE_MAX,
};
use crate::protocol::{
    BoostId, ConnectionId, FailureKind, InstanceId, KeeperMessage, OpenedRoot, PROTOCOL_VERSION, ProcessExit,
    ProcessId, RequestCellId, Verb, VerbCall, VerbReply,
};
use crate::root_changes::{RootChangesReader, RootStamp};

/// Maximum wait for a reply that starts nothing.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum wait for a program to begin. The keeper's own limit on a start that hangs is shorter.
pub const SPAWN_TIMEOUT: Duration = START_TIMEOUT.saturating_add(CALL_TIMEOUT);

/// Maximum wait for an instance that has to be woken. The keeper limits the wait for its turn, a
/// failed restore and the start after it. This is more than their sum.
pub const WAKE_TIMEOUT: Duration = WAKE_MAX.saturating_add(CALL_TIMEOUT);

/// Maximum wait for a process of an instance to accept a connection. It is longer than the keeper's
/// own wait.
const SEAT_TIMEOUT: Duration = ACCEPT_MAX.saturating_add(CALL_TIMEOUT);

/// Maximum wait for a reply about an image: the whole image may have to be read and compared first.
const IMAGE_TIMEOUT: Duration = Duration::from_secs(120);

/// Maximum wait for an image to arrive: 16 GiB at 5 MiB a second.
const FETCH_TIMEOUT: Duration = Duration::from_secs(3600);

/// Maximum number of guards, and of pending calls that may become one.
const FAREWELLS_MAX: usize = PROCESSES_PER_CONNECTION_MAX
    + BOOSTS_PER_CONNECTION_MAX
    + 2 * INSTANCE_USES_PER_CONNECTION_MAX
    + 2 * SEATS_PER_CONNECTION_MAX;

/// Maximum number of calls of one thread that wait for replies.
const WAITING_MAX: usize = INSTANCE_USES_PER_CONNECTION_MAX;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeeperCallError {
    /// The keeper is not there, or went away during the call. The next call connects again.
    #[error("the keeper is not there")]
    Gone,
    #[error("{}: {message}", nagaya_base::Code(*code))]
    Refused { failure: FailureKind, code: u16, message: String },
    #[error("the keeper did not answer in time")]
    TimedOut,
    /// The site's application is not placed on this node. `node` and `epoch` are those of the
    /// placement that the keeper knows.
    #[error("{}: {message}", crate::codes::ELSEWHERE)]
    Elsewhere { node: Option<NodeName>, epoch: Option<u64>, message: String },
}

/// A running CGI program. Both descriptors are non-blocking pipes.
#[derive(Debug)]
pub struct CgiProcess {
    pub stdin: OwnedFd,
    pub stdout: OwnedFd,
    pub guard: ProcessGuard,
    /// Its cell, under the name in `nagaya cells`.
    pub cell: Box<str>,
}

/// A running PHP worker: its FastCGI connection, non-blocking.
#[derive(Debug)]
pub struct PhpWorker {
    pub socket: OwnedFd,
    pub guard: ProcessGuard,
    /// The cell in which it waits for its first request.
    pub cell: Box<str>,
}

/// The part of another node's image that a keeper still needs.
#[derive(Debug)]
pub struct ImageIntake {
    /// Byte of the image from which on it is needed.
    pub offset: u64,
    /// Length of the sealed stream that brings it, bytes.
    pub bytes: u64,
    /// Pipe to write the stream to. It is closed at the end of the stream.
    pub pipe: OwnedFd,
}

/// Description of an image for another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageOffer {
    /// For `fetch_image` on that node.
    pub offer: Box<str>,
    /// For `send_image` on this node.
    pub digest: Box<str>,
    /// Length of all that is sent, bytes.
    pub bytes: u64,
}

/// Ends a process tree when dropped, from any thread and without waiting.
#[derive(Debug)]
pub struct ProcessGuard {
    process: ProcessId,
    /// A slot in the connection's queue, taken when the process was made. So a drop never finds the
    /// queue full.
    end: Option<mpsc::OwnedPermit<DeferredVerb>>,
    end_told: watch::Receiver<Option<ProcessEnd>>,
}

/// How a process ended, and the use of its tree. For a CGI program this is all its use, for a
/// worker the use since its last `leave`.
type ProcessEnd = (ProcessExit, RequestUsage);

impl ProcessGuard {
    /// Returns the id for `enter`, `leave` and `measure`. The `KeeperClient` of any thread of this
    /// process may call them.
    pub fn id(&self) -> ProcessId {
        self.process
    }

    /// Resolves once nothing of the tree is left. `Gone`: the keeper went away, and the tree with
    /// it.
    pub async fn ended(&self) -> Result<(ProcessExit, RequestUsage), KeeperCallError> {
        let mut end = self.end_told.clone();
        let end = end.wait_for(Option::is_some).await.map_err(|_| KeeperCallError::Gone)?;
        end.ok_or(KeeperCallError::Gone)
    }

    /// Ends the tree now and waits until nothing of it is left.
    pub async fn end(mut self) -> Result<(ProcessExit, RequestUsage), KeeperCallError> {
        self.send_end();
        self.ended().await
    }

    fn send_end(&mut self) {
        if let Some(end) = self.end.take() {
            end.send(DeferredVerb::End(self.process));
        }
    }
}

impl Drop for ProcessGuard {
    fn drop(&mut self) {
        self.send_end();
    }
}

/// A site's instance, awake: one connection to it, and the guard that keeps it awake.
#[derive(Debug)]
pub struct InstanceUse {
    /// Non-blocking; Unix or TCP as its record says.
    pub socket: OwnedFd,
    pub guard: InstanceGuard,
    /// Reads how long it waits for databases. `None` if it may reach neither databases nor places
    /// outside.
    pub tally: Option<DatabaseWaitsReader>,
    /// The wake that this call waited for. `None` if the instance was running.
    pub wake: Option<WakeReport>,
}

/// Keeps an instance from resting until it is dropped, from any thread and without waiting.
/// Connections to the instance must be closed before, because an instance at rest does not respond.
#[derive(Debug)]
pub struct InstanceGuard {
    instance: InstanceId,
    /// Number of the keeper connection that gave this guard.
    connection: u64,
    /// As in `ProcessGuard`.
    leave: Option<mpsc::OwnedPermit<DeferredVerb>>,
}

impl InstanceGuard {
    /// Returns the id for `connect_instance`. If it differs from an earlier one, the instance ended
    /// meanwhile. Connections to the earlier run are then useless.
    pub fn id(&self) -> InstanceId {
        self.instance
    }
}

impl Drop for InstanceGuard {
    fn drop(&mut self) {
        if let Some(leave) = self.leave.take() {
            leave.send(DeferredVerb::Leave(self.instance));
        }
    }
}

/// Keeps a process in the cell of the request it serves. When dropped, from any thread and without
/// waiting, it lets the process go back.
#[derive(Debug)]
pub struct RequestCellGuard {
    seat: RequestCellId,
    /// As in `ProcessGuard`.
    leave: Option<mpsc::OwnedPermit<DeferredVerb>>,
}

impl Drop for RequestCellGuard {
    fn drop(&mut self) {
        if let Some(leave) = self.leave.take() {
            leave.send(DeferredVerb::LeaveSeat(self.seat));
        }
    }
}

/// Keeps limits of an instance higher for a request until it is dropped, from any thread and
/// without waiting.
#[derive(Debug)]
pub struct BoostGuard {
    boost: BoostId,
    /// As in `ProcessGuard`.
    end: Option<mpsc::OwnedPermit<DeferredVerb>>,
}

impl Drop for BoostGuard {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            end.send(DeferredVerb::EndBoost(self.boost));
        }
    }
}

/// Cell in which the limits of a request in an instance hold.
#[derive(Debug)]
pub enum EnterResult {
    /// A cell of its own.
    Seated { guard: RequestCellGuard, cell: Box<str> },
    /// The instance's cell, as for all its other requests. `for_good`: this holds for the whole
    /// run.
    Unseated { cell: Box<str>, for_good: bool },
}

/// Verbs that guards queue when they are dropped, and other verbs without a reply.
#[derive(Debug, Clone, Copy)]
enum DeferredVerb {
    End(ProcessId),
    Leave(InstanceId),
    LeaveSeat(RequestCellId),
    EndBoost(BoostId),
    Answered(InstanceId),
    /// The tag of a call whose reply nobody waits for any more.
    Forget(u64),
}

/// A pending call for an instance or a request cell. It takes the call back if it is dropped before
/// the reply.
struct PendingCall<'a> {
    connection: &'a KeeperConnection,
    tag: u64,
    forget: Option<mpsc::OwnedPermit<DeferredVerb>>,
}

impl Drop for PendingCall<'_> {
    fn drop(&mut self) {
        if self.connection.waiting.borrow_mut().remove(&self.tag).is_some()
            && let Some(forget) = self.forget.take()
        {
            forget.send(DeferredVerb::Forget(self.tag));
        }
    }
}

#[derive(Debug)]
enum CallGuard {
    Process(ProcessGuard),
    Instance(InstanceGuard),
    Seat(RequestCellGuard),
    Boost(BoostGuard),
}

/// Result of a call: the reply, its descriptors, and a guard for a spawned process or an instance.
type CallResult = (VerbReply, Vec<OwnedFd>, Option<CallGuard>);

pub struct KeeperClient {
    path: PathBuf,
    connection: RefCell<Option<Rc<KeeperConnection>>>,
    /// Held while connecting, so that many calls make one connection.
    connecting: Mutex<()>,
    /// Number of connections made so far.
    connections: Cell<u64>,
}

struct KeeperConnection {
    number: u64,
    socket: MessageSocket,
    /// Reads which instances are awake. It came with the reply to `Hello`.
    roll: OnceCell<AwakeSetReader>,
    /// Reads how often the paths to document roots have changed. It came with the reply to `Hello`.
    changes: OnceCell<Arc<RootChangesReader>>,
    open: Cell<bool>,
    next_tag: Cell<u64>,
    waiting: RefCell<HashMap<u64, oneshot::Sender<CallResult>>>,
    processes: RefCell<HashMap<ProcessId, watch::Sender<Option<ProcessEnd>>>>,
    farewells: mpsc::Sender<DeferredVerb>,
    closed: Notify,
    /// Runs that drain, while this thread uses them.
    drained: RefCell<HashSet<InstanceId>>,
}

impl KeeperClient {
    /// Connects and sends `Hello`. Must be called on a `LocalSet`, as all other calls.
    pub async fn connect(path: &Path) -> Result<Rc<Self>, KeeperCallError> {
        let keeper = Self::later(path);
        keeper.connected().await?;
        Ok(keeper)
    }

    /// As `connect`, but the first call makes the connection.
    pub fn later(path: &Path) -> Rc<Self> {
        Rc::new(Self {
            path: path.to_owned(),
            connection: RefCell::default(),
            connecting: Mutex::new(()),
            connections: Cell::new(0),
        })
    }

    /// Opens the site's document root, `O_PATH | O_DIRECTORY`.
    pub async fn open_root(&self, site: &SiteName) -> Result<OpenedRoot, KeeperCallError> {
        match self.call(Verb::OpenRoot { site: site.clone() }, CALL_TIMEOUT).await? {
            (VerbReply::Root { is_remote, mark }, fds, _) => {
                // The counts of another connection's keeper say nothing. Its roots expire by age.
                let changes = self.open().and_then(|open| open.changes.get().cloned());
                let stamp = mark.zip(changes).map(|(mark, changes)| RootStamp::new(changes, mark));
                Ok(OpenedRoot { dir: one_of(fds)?, is_remote, stamp })
            }
            _ => Err(KeeperCallError::Gone),
        }
    }

    /// Opens the end of a link out of the site's document root. It is a directory like a root, or a
    /// file open for reading. `path` is relative to the root.
    pub async fn open_link(&self, site: &SiteName, path: &str) -> Result<OpenedRoot, KeeperCallError> {
        let verb = Verb::OpenLink { site: site.clone(), path: path.to_owned() };
        match self.call(verb, CALL_TIMEOUT).await? {
            (VerbReply::Link { is_remote }, fds, _) => {
                Ok(OpenedRoot { dir: one_of(fds)?, is_remote, stamp: None })
            }
            _ => Err(KeeperCallError::Gone),
        }
    }

    /// Makes a new, non-blocking connection to the Unix socket of this site's server. Refused with
    /// `Failure::Busy` if its queue is full.
    pub async fn connect_server(&self, site: &SiteName) -> Result<OwnedFd, KeeperCallError> {
        one_of(self.call(Verb::ConnectServer { site: site.clone() }, CALL_TIMEOUT).await?.1)
    }

    /// Runs `script`, relative to the document root, with these variables. It runs in a cell of its
    /// own, at the place that `confinement` defines.
    pub async fn spawn_cgi(
        &self,
        site: &SiteName,
        script: &str,
        env: Vec<(String, String)>,
        confinement: &Confinement,
    ) -> Result<CgiProcess, KeeperCallError> {
        let verb = Verb::SpawnCgi {
            site: site.clone(),
            script: script.to_owned(),
            env,
            confinement: Box::new(confinement.clone()),
        };
        let (reply, fds, guard) = self.call(verb, SPAWN_TIMEOUT).await?;
        match (<[OwnedFd; 2]>::try_from(fds), guard, reply) {
            (Ok([stdin, stdout]), Some(CallGuard::Process(guard)), VerbReply::Spawned { cell, .. }) => {
                Ok(CgiProcess { stdin, stdout, guard, cell: cell.into() })
            }
            _ => Err(KeeperCallError::Gone),
        }
    }

    /// Starts a PHP worker of the site's tenant. It takes scripts of this site until it enters for
    /// another one. It shares its opcache with the tenant's workers of the same number. With `None`
    /// it shares with nobody.
    pub async fn spawn_php(
        &self,
        site: &SiteName,
        opcache: Option<u64>,
    ) -> Result<PhpWorker, KeeperCallError> {
        let verb = Verb::SpawnPhp { site: site.clone(), opcache };
        let (reply, fds, guard) = self.call(verb, SPAWN_TIMEOUT).await?;
        match (one_of(fds), guard, reply) {
            (Ok(socket), Some(CallGuard::Process(guard)), VerbReply::Spawned { cell, .. }) => {
                Ok(PhpWorker { socket, guard, cell: cell.into() })
            }
            _ => Err(KeeperCallError::Gone),
        }
    }

    /// Moves a PHP worker to the cell of its next request. Returns the name of its cell. Not needed
    /// while site and confinement are the same as at its last `enter`.
    pub async fn enter(
        &self,
        process: ProcessId,
        site: &SiteName,
        confinement: &Confinement,
    ) -> Result<Box<str>, KeeperCallError> {
        let verb = Verb::Enter { process, site: site.clone(), confinement: Box::new(confinement.clone()) };
        match self.call(verb, CALL_TIMEOUT).await?.0 {
            VerbReply::Entered { cell } => Ok(cell.into()),
            _ => Err(KeeperCallError::Gone),
        }
    }

    /// Ends the worker's request and returns its use. Processes that the request left running are
    /// ended. The worker stays where it is.
    pub async fn leave(&self, process: ProcessId) -> Result<RequestUsage, KeeperCallError> {
        self.usage(Verb::Leave { process }).await
    }

    /// Measures the use of a process for its present request so far.
    pub async fn measure(&self, process: ProcessId) -> Result<RequestUsage, KeeperCallError> {
        self.usage(Verb::Measure { process }).await
    }

    async fn usage(&self, verb: Verb) -> Result<RequestUsage, KeeperCallError> {
        match self.call(verb, CALL_TIMEOUT).await?.0 {
            VerbReply::Used { usage } => Ok(usage),
            _ => Err(KeeperCallError::Gone),
        }
    }

    /// Makes, changes and removes named cells of the node, in this order. Stops at the first that
    /// fails.
    pub async fn change_cells(&self, changes: Vec<CellChange>) -> Result<(), KeeperCallError> {
        match self.call(Verb::ChangeCells { changes }, CALL_TIMEOUT).await?.0 {
            VerbReply::Done => Ok(()),
            _ => Err(KeeperCallError::Gone),
        }
    }

    /// Lowers the CPU priority of some tenants for `GIVE_WAY_FOR` from now, and restores that of
    /// others. At most `TENANTS_MAX` of each.
    pub async fn give_way(
        &self,
        give_way: Vec<TenantName>,
        resume: Vec<TenantName>,
    ) -> Result<(), KeeperCallError> {
        match self.call(Verb::GiveWay { give_way, resume }, CALL_TIMEOUT).await?.0 {
            VerbReply::Done => Ok(()),
            _ => Err(KeeperCallError::Gone),
        }
    }

    /// Lists named cells with their limits and use, as a JSON object.
    pub async fn cells(&self) -> Result<String, KeeperCallError> {
        match self.call(Verb::Cells, CALL_TIMEOUT).await?.0 {
            VerbReply::Cells { json } => Ok(json),
            _ => Err(KeeperCallError::Gone),
        }
    }

    /// Returns the site's instance, and wakes it if needed. The first request of a thread that
    /// needs it calls this. The guard serves all of them, and is dropped when none needs it any
    /// more. `epoch` is that of the placement on this node. `None` without a cluster.
    pub async fn use_instance(
        &self,
        site: &SiteName,
        epoch: Option<u64>,
    ) -> Result<InstanceUse, KeeperCallError> {
        let verb = Verb::UseInstance { site: site.clone(), epoch };
        let (reply, fds, guard) = self.call(verb, WAKE_TIMEOUT).await?;
        let mut fds = fds.into_iter();
        match (fds.next(), guard, reply) {
            (Some(socket), Some(CallGuard::Instance(guard)), VerbReply::Using { wake, .. }) => {
                Ok(InstanceUse { socket, guard, tally: fds.next().map(DatabaseWaitsReader::new), wake })
            }
            _ => Err(KeeperCallError::Gone),
        }
    }

    /// Makes one more connection to an instance that this thread uses. Refused with
    /// `Failure::NotFound` if it ended: `use_instance` wakes it again.
    pub async fn connect_instance(&self, instance: InstanceId) -> Result<OwnedFd, KeeperCallError> {
        one_of(self.call(Verb::ConnectInstance { instance }, CALL_TIMEOUT).await?.1)
    }

    /// Notifies the keeper that the response to a request that waited for this instance's wake
    /// begins. Never waits. Without the notice, the priority of the wake soon ends by itself.
    pub fn answered(&self, instance: InstanceId) {
        if let Some(open) = self.open() {
            let _ = open.farewells.try_send(DeferredVerb::Answered(instance));
        }
    }

    /// Announces that a request with this confinement goes over this connection to an instance that
    /// this thread uses. Waits until the instance has accepted the connection. It may do so only
    /// once the request is sent.
    pub async fn enter_instance(
        &self,
        instance: InstanceId,
        line: ConnectionId,
        confinement: &Confinement,
    ) -> Result<EnterResult, KeeperCallError> {
        let verb = Verb::EnterInstance { instance, line, confinement: Box::new(confinement.clone()) };
        match self.call(verb, SEAT_TIMEOUT).await? {
            (VerbReply::Seated { cell, .. }, _, Some(CallGuard::Seat(guard))) => {
                Ok(EnterResult::Seated { guard, cell: cell.into() })
            }
            (VerbReply::Unseated { cell, for_good }, _, _) => {
                Ok(EnterResult::Unseated { cell: cell.into(), for_good })
            }
            _ => Err(KeeperCallError::Gone),
        }
    }

    /// Ends the request and returns its use. Refused with `Failure::NotFound` if the use is not
    /// known.
    pub async fn leave_seat(&self, mut guard: RequestCellGuard) -> Result<RequestUsage, KeeperCallError> {
        // If this call is cancelled, the guard sends the verb once more, which does no harm.
        let used = self.usage(Verb::LeaveSeat { seat: guard.seat }).await;
        if used.is_ok() {
            guard.leave = None;
        }
        used
    }

    /// Raises limits of an instance that this thread uses while the guard lives, where its record
    /// gives less. Also returns how much of that its records allow.
    pub async fn boost_instance(
        &self,
        instance: InstanceId,
        boost: Boost,
    ) -> Result<(BoostGuard, Boost), KeeperCallError> {
        match self.call(Verb::BoostInstance { instance, boost }, CALL_TIMEOUT).await? {
            (VerbReply::Boosted { granted, .. }, _, Some(CallGuard::Boost(guard))) => Ok((guard, granted)),
            _ => Err(KeeperCallError::Gone),
        }
    }

    /// Describes this node's image of the site for another node. `None` if it has none. `order` of
    /// this and the next three calls comes from the supervisor. Without it they are refused with
    /// `Failure::Forbidden`.
    pub async fn offer_image(
        &self,
        site: &SiteName,
        order: &str,
    ) -> Result<Option<ImageOffer>, KeeperCallError> {
        let verb = Verb::OfferImage { site: site.clone(), order: order.to_owned() };
        match self.call(verb, IMAGE_TIMEOUT).await?.0 {
            VerbReply::Offered { offer, digest, bytes } => {
                Ok(offer.map(|offer| ImageOffer { offer: offer.into(), digest: digest.into(), bytes }))
            }
            _ => Err(KeeperCallError::Gone),
        }
    }

    /// Returns a pipe to read the sealed image that was offered with this digest, from byte
    /// `offset` on. `NotFound`: there is another image now.
    pub async fn send_image(
        &self,
        site: &SiteName,
        order: &str,
        (digest, offset): (&str, u64),
    ) -> Result<OwnedFd, KeeperCallError> {
        let (digest, order) = (digest.to_owned(), order.to_owned());
        let verb = Verb::SendImage { site: site.clone(), order, digest, offset };
        one_of(self.call(verb, IMAGE_TIMEOUT).await?.1)
    }

    /// Begins to take over the image that another node offers. An image that does not fit this node
    /// is refused.
    pub async fn fetch_image(
        &self,
        site: &SiteName,
        order: &str,
        offer: &str,
    ) -> Result<ImageIntake, KeeperCallError> {
        let (offer, order) = (offer.to_owned(), order.to_owned());
        let verb = Verb::FetchImage { site: site.clone(), order, offer };
        match self.call(verb, IMAGE_TIMEOUT).await? {
            (VerbReply::Fetching { offset, bytes }, fds, _) => {
                Ok(ImageIntake { offset, bytes, pipe: one_of(fds)? })
            }
            _ => Err(KeeperCallError::Gone),
        }
    }

    /// Returns once the image that is being taken over is here, or with the reason why not. A part
    /// that arrived is kept for the next `fetch_image`.
    pub async fn image_fetched(&self, site: &SiteName, order: &str) -> Result<(), KeeperCallError> {
        let verb = Verb::ImageFetched { site: site.clone(), order: order.to_owned() };
        match self.call(verb, FETCH_TIMEOUT).await?.0 {
            VerbReply::Done => Ok(()),
            _ => Err(KeeperCallError::Gone),
        }
    }

    /// Whether this guard still keeps the present run of its instance awake. A restarted keeper
    /// does not know the guard. A run that drains serves only the requests that it has.
    pub fn knows(&self, guard: &InstanceGuard) -> bool {
        self.open().is_some_and(|open| {
            open.number == guard.connection && !open.drained.borrow().contains(&guard.instance)
        })
    }

    /// Whether the site's instance rests: it gets no CPU time, and a request would be the first to
    /// wake it. Sends no verb.
    ///
    /// The answer is the keeper's view of a moment ago. Without a keeper everything rests, because
    /// all instances end with their keeper. The call then looks for a new keeper, so that later
    /// answers reflect what that one runs. False if the keeper cannot tell.
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
    pub async fn greet(&self) -> Result<(), KeeperCallError> {
        self.connected().await.map(drop)
    }

    /// Opens chain and key (PEM) for a name, if there is one.
    pub async fn open_certificate(&self, name: &str) -> Result<Option<OwnedFd>, KeeperCallError> {
        match self.call(Verb::OpenCertificate { name: name.to_owned() }, CALL_TIMEOUT).await {
            Ok((_, fds, _)) => one_of(fds).map(Some),
            Err(KeeperCallError::Refused { failure: FailureKind::NotFound, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Describes what runs in the keeper, as a JSON object.
    pub async fn status(&self) -> Result<String, KeeperCallError> {
        match self.call(Verb::Status, CALL_TIMEOUT).await?.0 {
            VerbReply::Status { json } => Ok(json),
            _ => Err(KeeperCallError::Gone),
        }
    }

    async fn call(&self, verb: Verb, within: Duration) -> Result<CallResult, KeeperCallError> {
        let asked = async {
            match self.connected().await?.ask(verb).await {
                // The keeper ended, and nothing has read that from the socket yet. Its successor
                // gets the call.
                Err(AskFailure::Unsent(verb)) => Ok(self.connected().await?.ask(verb).await?),
                asked => Ok(asked?),
            }
        };
        timeout(within, asked).await.unwrap_or(Err(KeeperCallError::TimedOut))
    }

    /// Returns the open connection, or a new one.
    async fn connected(&self) -> Result<Rc<KeeperConnection>, KeeperCallError> {
        if let Some(open) = self.open() {
            return Ok(open);
        }
        let _one_at_a_time = self.connecting.lock().await;
        // Another call may have connected while this one waited.
        if let Some(open) = self.open() {
            return Ok(open);
        }
        self.connections.set(self.connections.get() + 1);
        let connection = KeeperConnection::open(&self.path, self.connections.get()).map_err(|error| {
            tracing::debug!(%error, "no connection to the keeper at {}", self.path.display());
            KeeperCallError::Gone
        })?;
        let hello = connection.ask(Verb::Hello { version: PROTOCOL_VERSION });
        let greeted =
            timeout(CALL_TIMEOUT, hello).await.map(|greeted| greeted.map_err(KeeperCallError::from));
        match greeted.unwrap_or(Err(KeeperCallError::TimedOut)) {
            Ok((_, fds, _)) => {
                if let Ok([roll, changes]) = <[OwnedFd; 2]>::try_from(fds) {
                    // The connection is new, so nothing is set yet.
                    let _ = connection.roll.set(AwakeSetReader::new(roll));
                    match RootChangesReader::new(changes) {
                        Ok(changes) => drop(connection.changes.set(Arc::new(changes))),
                        Err(error) => {
                            tracing::warn!(%error, "switched document roots are seen within a second")
                        }
                    }
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

    fn open(&self) -> Option<Rc<KeeperConnection>> {
        self.connection.borrow().as_ref().filter(|connection| connection.open.get()).cloned()
    }
}

impl Drop for KeeperClient {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.get_mut().take() {
            connection.close();
        }
    }
}

/// Failure of a call over one connection.
enum AskFailure {
    /// No keeper has it: a message on a `SOCK_SEQPACKET` socket is sent whole or not at all.
    Unsent(Verb),
    Failed(KeeperCallError),
}

impl From<KeeperCallError> for AskFailure {
    fn from(error: KeeperCallError) -> Self {
        Self::Failed(error)
    }
}

impl From<AskFailure> for KeeperCallError {
    fn from(failure: AskFailure) -> Self {
        match failure {
            AskFailure::Unsent(_) => Self::Gone,
            AskFailure::Failed(error) => error,
        }
    }
}

impl KeeperConnection {
    fn open(path: &Path, number: u64) -> io::Result<Rc<Self>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
            // The queue of connections is full: the keeper does not accept them, which is as good
            // as absent.
            Err(Errno::AGAIN) => return Err(io::ErrorKind::ConnectionRefused.into()),
            connected => connected?,
        }
        let (farewells, to_say) = mpsc::channel(FAREWELLS_MAX);
        let connection = Rc::new(Self {
            number,
            roll: OnceCell::new(),
            changes: OnceCell::new(),
            socket: MessageSocket::new(socket)?,
            open: Cell::new(true),
            next_tag: Cell::new(1),
            waiting: RefCell::default(),
            processes: RefCell::default(),
            farewells,
            closed: Notify::new(),
            drained: RefCell::default(),
        });
        spawn_local(Rc::clone(&connection).read());
        spawn_local(Rc::clone(&connection).write_farewells(to_say));
        Ok(connection)
    }

    async fn ask(&self, verb: Verb) -> Result<CallResult, AskFailure> {
        let tag = self.next_tag.replace(self.next_tag.get() + 1);
        // The reply about an instance or its processes may take minutes, and the caller may leave
        // long before.
        let is_patient = matches!(verb, Verb::UseInstance { .. } | Verb::EnterInstance { .. });
        let call = VerbCall { tag, verb };
        let bytes = codec::encode(&call).map_err(|_| KeeperCallError::Refused {
            failure: FailureKind::Invalid,
            code: crate::codes::PROTOCOL.0,
            message: "the call does not fit in one message".into(),
        })?;
        let (answer, answered) = oneshot::channel();
        let full = || KeeperCallError::Refused {
            failure: FailureKind::Busy,
            code: crate::codes::LIMIT.0,
            message: format!("{WAITING_MAX} calls wait for the keeper already"),
        };
        if self.waiting.borrow().len() >= WAITING_MAX {
            return Err(full().into());
        }
        let forget = match is_patient {
            true => Some(self.farewells.clone().try_reserve_owned().map_err(|_| full())?),
            false => None,
        };
        self.waiting.borrow_mut().insert(tag, answer);
        let _asking = is_patient.then(|| PendingCall { connection: self, tag, forget });
        if self.socket.send(&bytes, &[]).await.is_err() {
            self.close();
            return Err(AskFailure::Unsent(call.verb));
        }
        // If this future is dropped while it waits, the reader still takes the reply. Dropping the
        // reply closes and ends what came with it.
        match answered.await {
            Ok((VerbReply::Failed { failure, code, message }, _, _)) => {
                Err(KeeperCallError::Refused { failure, code, message }.into())
            }
            Ok((VerbReply::Elsewhere { node, epoch, message }, _, _)) => {
                Err(KeeperCallError::Elsewhere { node, epoch, message }.into())
            }
            Ok(got) => Ok(got),
            Err(_) => Err(KeeperCallError::Gone.into()),
        }
    }

    async fn read(self: Rc<Self>) {
        let mut buffer = Vec::new();
        loop {
            match self.socket.receive::<KeeperMessage>(&mut buffer).await {
                Ok((KeeperMessage::Reply { tag, reply }, fds)) => self.deliver(tag, reply, fds),
                Ok((KeeperMessage::Ended { process, exit, usage }, _)) => {
                    if let Some(ended) = self.processes.borrow_mut().remove(&process) {
                        ended.send_replace(Some((exit, usage)));
                    }
                }
                Ok((KeeperMessage::Drains { instance }, _)) => {
                    self.drained.borrow_mut().insert(instance);
                }
                Err(CodecError::Closed) => break,
                Err(error) => {
                    tracing::error!(%error, "a message of the keeper cannot be read; connecting again");
                    break;
                }
            }
        }
        self.close();
    }

    fn deliver(&self, tag: u64, reply: VerbReply, fds: Vec<OwnedFd>) {
        let guard = match &reply {
            VerbReply::Spawned { .. }
            | VerbReply::Using { .. }
            | VerbReply::Seated { .. }
            | VerbReply::Boosted { .. } => {
                match self.farewells.clone().try_reserve_owned() {
                    Ok(place) => self.guard(&reply, place),
                    // The keeper leases no more than there are slots. One that leases more is not
                    // ours.
                    Err(_) => return self.close(),
                }
            }
            _ => None,
        };
        if let Some(answer) = self.waiting.borrow_mut().remove(&tag) {
            // The caller may have left. The guard comes back and is dropped, which ends the
            // process.
            let _ = answer.send((reply, fds, guard));
        }
    }

    fn guard(&self, reply: &VerbReply, place: mpsc::OwnedPermit<DeferredVerb>) -> Option<CallGuard> {
        match *reply {
            VerbReply::Spawned { process, .. } => {
                let (ended, end_told) = watch::channel(None);
                self.processes.borrow_mut().insert(process, ended);
                Some(CallGuard::Process(ProcessGuard { process, end: Some(place), end_told }))
            }
            VerbReply::Using { instance, .. } => Some(CallGuard::Instance(InstanceGuard {
                instance,
                connection: self.number,
                leave: Some(place),
            })),
            VerbReply::Seated { seat, .. } => {
                Some(CallGuard::Seat(RequestCellGuard { seat, leave: Some(place) }))
            }
            VerbReply::Boosted { boost, .. } => {
                Some(CallGuard::Boost(BoostGuard { boost, end: Some(place) }))
            }
            _ => None,
        }
    }

    /// Sends the verbs that guards queue, until the connection closes.
    async fn write_farewells(self: Rc<Self>, mut to_say: mpsc::Receiver<DeferredVerb>) {
        loop {
            let farewell = tokio::select! {
                Some(farewell) = to_say.recv() => farewell,
                () = self.closed.notified() => return,
            };
            let verb = match farewell {
                DeferredVerb::End(process) => Verb::End { process },
                DeferredVerb::Leave(instance) => {
                    self.drained.borrow_mut().remove(&instance);
                    Verb::LeaveInstance { instance }
                }
                DeferredVerb::Answered(instance) => Verb::Answered { instance },
                DeferredVerb::LeaveSeat(seat) => Verb::LeaveSeat { seat },
                DeferredVerb::EndBoost(boost) => Verb::EndBoost { boost },
                DeferredVerb::Forget(tag) => Verb::Forget { tag },
            };
            let message = codec::encode(&VerbCall { tag: 0, verb }).expect("an id is a few bytes");
            if self.socket.send(&message, &[]).await.is_err() {
                return self.close();
            }
        }
    }

    /// Fails the calls in flight and makes the guards void.
    fn close(&self) {
        if self.open.replace(false) {
            self.waiting.borrow_mut().clear();
            self.processes.borrow_mut().clear();
            self.closed.notify_one();
            // This wakes the reader. A socket that is no longer connected has woken it already.
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        }
    }
}

fn one_of(fds: Vec<OwnedFd>) -> Result<OwnedFd, KeeperCallError> {
    match <[OwnedFd; 1]>::try_from(fds) {
        Ok([fd]) => Ok(fd),
        // A keeper that sends fewer descriptors than it says is not of this version.
        Err(_) => Err(KeeperCallError::Gone),
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
        is_send::<RequestCellGuard>();
        is_send::<BoostGuard>();
    }
}
