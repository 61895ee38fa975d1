//! The keeper's verbs and their replies: a closed set of requests that an edge can send.
//!
//! One message is one datagram on a Unix `SOCK_SEQPACKET` socket, postcard-encoded, at most
//! `limits::KEEPER_MESSAGE_MAX` bytes, with at most `limits::KEEPER_FDS_MAX` file descriptors. Not
//! here: the doing (`server`), the asking (`client`).

use std::os::fd::OwnedFd;

use nagaya_records::cell::{Boost, CellChange, Confinement, RequestUsage};
use nagaya_records::instance::WakeReport;
use nagaya_records::{NodeName, SiteName, TenantName};
use serde::{Deserialize, Serialize};

use crate::root_changes::{RootMark, RootStamp};

/// Version of the protocol, raised when a message changes its meaning. Both ends ship in one
/// binary. An old edge meets a new keeper only during an upgrade.
pub const PROTOCOL_VERSION: u32 = 14;

/// A message from edge to keeper. `tag` comes back in the reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerbCall {
    pub tag: u64,
    pub verb: Verb,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verb {
    /// First message of a connection. Answer: `Hello` with two descriptors, the `awake_set` of
    /// instances and the `root_changes`, or with none.
    Hello { version: u32 },
    /// Opens the site's document root. Reply: `Root` with one descriptor (`O_PATH | O_DIRECTORY`).
    /// It is a detached read-only mount of its own, in which the keeper can make mounts.
    OpenRoot { site: SiteName },
    /// Opens the end of a link that leads out of its site's document root. The link is the tenant's
    /// own. `path` is relative to that root and ends with the link. The keeper decides whether it
    /// follows the link (`tenant_path`). Reply: `Link` with one descriptor. It is a directory as
    /// that of `OpenRoot`, or a file open for reading. The file is opened with the rights of the
    /// requesting peer. `Failed` with `Failure::NotFound`: the link leads to nothing.
    OpenLink { site: SiteName, path: String },
    /// Connects to the Unix socket that the record of this site names. The server there runs
    /// independently of nagaya. The connection is made with the rights of the requesting peer, and
    /// as its peer (`SO_PEERCRED`). Reply: `Connected` with one descriptor, or `Failed` with
    /// `Failure::Busy` if the server's queue is full.
    ConnectServer { site: SiteName },
    /// Runs a program of the site once, in a cell of its own. `script` is relative to the document
    /// root. Reply: `Spawned` with two descriptors: its standard input (write end) and output (read
    /// end). Its standard error goes to the keeper's log.
    SpawnCgi { site: SiteName, script: String, env: Vec<(String, String)>, confinement: Box<Confinement> },
    /// Starts a PHP worker of this site's tenant, for this connection alone. The site is of kind
    /// php. Reply: `Spawned` with one descriptor, a FastCGI connection. The connection takes only
    /// scripts below this site's root, until the worker enters for another site. The worker waits
    /// for its first request in a cell below its tenant's. Workers with one number `opcache` share
    /// one, if they can. `None`: it shares with nobody, and is made at once.
    SpawnPhp { site: SiteName, opcache: Option<u64> },
    /// A worker begins to serve a request of this site. The keeper moves it to the cell of the
    /// request, unless it is there already, and sets the request's limits. From then on it takes
    /// scripts of this site. Reply: `Entered`.
    Enter { process: ProcessId, site: SiteName, confinement: Box<Confinement> },
    /// The request of a worker has ended. Reply: `Used`, with all use since it entered. Processes
    /// that the request left running are ended. The worker's cell stays as it is until the next
    /// `Enter`. So an unchanged confinement without demotions, of the request or of its site, needs
    /// no `Enter`. `Used` is then the use since the last `Leave`.
    Leave { process: ProcessId },
    /// Measures the use of a spawned process for its present request so far. Reply: `Used`.
    Measure { process: ProcessId },
    /// Changes that rules make to named cells without running in them, in this order. Reply:
    /// `Done`.
    ChangeCells { changes: Vec<CellChange> },
    /// Lists named cells with their limits and use, as JSON, for rules that read them. Reply:
    /// `Cells`.
    Cells,
    /// Lowers the CPU priority of the tenants in `give_way`, for `cells::GIVE_WAY_FOR` from now.
    /// Restores the priority of the tenants in `resume`. Reply: `Done`.
    GiveWay { give_way: Vec<TenantName>, resume: Vec<TenantName> },
    /// A request needs the site's instance. The keeper wakes it if it rests. Reply: `Using` once it
    /// can answer, with one descriptor, a connection to it. A second descriptor, its `tally`,
    /// follows if it has databases or places outside. From then on this connection of the edge
    /// keeps the instance awake. In a cluster the site must be placed here: `epoch` is that of the
    /// placement that the edge read. If the keeper has not read that placement yet, it waits for
    /// it, for a moment. Other replies: `Elsewhere`, or `Failed` with `Failure::Fenced`.
    UseInstance { site: SiteName, epoch: Option<u64> },
    /// Makes one more connection to an instance that this connection of the edge uses. Reply:
    /// `Connected` with one descriptor, or `Failed` with `Failure::NotFound` if the instance has
    /// ended.
    ConnectInstance { instance: InstanceId },
    /// Takes one `Using` back. The instance may rest as soon as all are taken back. No reply.
    LeaveInstance { instance: InstanceId },
    /// The response to a request that waited for the instance's wake begins. Its CPU priority ends.
    /// No reply.
    Answered { instance: InstanceId },
    /// Nobody waits any more for the reply to the `UseInstance` with this tag. Work for it that has
    /// not begun does not begin. No reply. The other verb gets no reply either, unless that is
    /// already on its way.
    Forget { tag: u64 },
    /// A request with limits of its own goes over this connection to an instance in use. The keeper
    /// moves the process that serves it to a cell of the request. This needs a process that can be
    /// determined and serves nothing else meanwhile. Named cells are left out. The keeper waits
    /// until the connection is accepted; the request may be sent before the reply. Reply: `Seated`
    /// or `Unseated`.
    EnterInstance { instance: InstanceId, line: ConnectionId, confinement: Box<Confinement> },
    /// The request has ended, and its process goes back. Reply: `Used`, with all use since the
    /// `Seated`. `Failed` with `Failure::NotFound`: the use is not known for the whole request.
    LeaveSeat { seat: RequestCellId },
    /// Raises limits of an instance in use while a request runs in it, where the record gives less.
    /// Reply: `Boosted`. It ends with `EndBoost`, with the last use of the instance by this
    /// connection, and with the instance.
    BoostInstance { instance: InstanceId, boost: Boost },
    /// The boosted request has ended. No reply.
    EndBoost { boost: BoostId },
    /// Ends the process of a `Spawned` reply, with every process it started. No reply.
    End { process: ProcessId },
    /// Opens the certificate chain and key for a TLS server name. Reply: `Certificate` with one
    /// descriptor (PEM: chain and key) or `Failed` with `Failure::NotFound`.
    OpenCertificate { name: String },
    /// Describes this node's image of the site for another node, or asks whether one has to be
    /// fetched. `order` of this and the next three verbs is the order of a member's supervisor for
    /// this transfer. Without it they are refused (`Failure::Forbidden`). Reply: `Offered`.
    OfferImage { site: SiteName, order: String },
    /// Sends the image that was offered with this digest, from byte `offset` on. It is sealed for
    /// the keeper at the other end of the order. Reply: `Sending` with one descriptor, a pipe to
    /// read it from.
    SendImage { site: SiteName, order: String, digest: String, offset: u64 },
    /// Takes over the image that another node offers. Reply: `Fetching` with one descriptor, a
    /// pipe. The caller writes to it what that node sends, from the byte that the reply names.
    /// Otherwise the reply says why the image is of no use here.
    FetchImage { site: SiteName, order: String, offer: String },
    /// Waits for the image whose fetching was begun. Reply: `Done` once it is here, or why it is
    /// not.
    ImageFetched { site: SiteName, order: String },
    /// Describes what runs now, as JSON for `nagaya status`. Reply: `Status`.
    Status,
}

/// A document root as the edge gets it, or the end of a link out of it.
#[derive(Debug)]
pub struct OpenedRoot {
    /// The directory, or the file that a link leads to.
    pub dir: OwnedFd,
    /// As in `Reply::Root`.
    pub is_remote: bool,
    /// Changes when the path leads to another directory. For the edge; `None` if nobody watches the
    /// path.
    pub stamp: Option<RootStamp>,
}

/// The keeper's number of one spawned process tree. Never a pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessId(pub u64);

/// The keeper's number of one run of an instance, from start or restore to the end of its last
/// process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct InstanceId(pub u64);

/// Number of a request cell that holds the process of an instance that serves the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RequestCellId(pub u64);

/// Number of a boost: limits of an instance that are higher for one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BoostId(pub u64);

/// Names one of the edge's connections to an instance. A wrong one names nobody, or a process of
/// the same instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConnectionId {
    /// Inode number of the edge's end.
    Unix { inode: u32 },
    /// Port of the edge's end, in the sandbox.
    Tcp { port: u16 },
}

/// A message from keeper to edge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeeperMessage {
    Reply {
        tag: u64,
        reply: VerbReply,
    },
    /// A spawned process has ended (by itself or by `End`), and nothing of its tree is left.
    Ended {
        process: ProcessId,
        exit: ProcessExit,
        /// Use since its birth, or for a worker since it last entered or left.
        usage: RequestUsage,
    },
    /// Another run has replaced this run, which the peer uses. It continues only for the requests
    /// that it has.
    Drains {
        instance: InstanceId,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum VerbReply {
    Hello {
        version: u32,
    },
    /// `is_remote`: a network or another process serves its file system, so an access may never
    /// return. `mark`: its change count when it was opened, if the path to it is watched.
    Root {
        is_remote: bool,
        mark: Option<RootMark>,
    },
    /// `is_remote` as in `Root`.
    Link {
        is_remote: bool,
    },
    /// `cell` is its cell, under the name in `nagaya cells`.
    Spawned {
        process: ProcessId,
        cell: String,
    },
    Entered {
        cell: String,
    },
    Used {
        usage: RequestUsage,
    },
    /// `cell` is the request's own.
    Seated {
        seat: RequestCellId,
        cell: String,
    },
    /// Its limits are those of the instance, in this cell. `for_good`: every other request to this
    /// run of the instance will get the same reply, over any connection.
    Unseated {
        cell: String,
        for_good: bool,
    },
    /// `granted`: the part of the boost that its records allow. A value that is missing is not
    /// above its record's.
    Boosted {
        boost: BoostId,
        granted: Boost,
    },
    Done,
    Cells {
        json: String,
    },
    Using {
        instance: InstanceId,
        /// The wake that the caller waited for. `None` if the instance was running.
        wake: Option<WakeReport>,
    },
    /// The site's application is placed on another node, or on none, as far as the keeper knows.
    Elsewhere {
        node: Option<NodeName>,
        epoch: Option<u64>,
        message: String,
    },
    /// `offer` is for the other node's `FetchImage`. `None` if there is no image.
    Offered {
        offer: Option<String>,
        digest: String,
        bytes: u64,
    },
    Sending,
    /// `bytes`: length of the sealed stream that is to be written.
    Fetching {
        offset: u64,
        bytes: u64,
    },
    Connected,
    Certificate,
    Status {
        json: String,
    },
    Failed {
        failure: FailureKind,
        code: u16,
        message: String,
    },
}

/// Reason for a failed verb, coarse enough for the edge to choose a status code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    /// No such site, tenant, script or certificate.
    NotFound,
    /// It exists and may not be used: permissions, outside the root, not executable.
    Forbidden,
    /// A limit is reached. A later call may succeed.
    Busy,
    /// It was started and failed, or took too long to listen.
    Broken,
    /// The message itself was not acceptable, or the site's record does not allow it.
    Invalid,
    /// The node has no lease now: nothing placed on it runs. It may get the lease back in a moment.
    Fenced,
    /// The site's application is placed on another node, or on none.
    Elsewhere,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessExit {
    /// Exit status. `None` if a signal ended it.
    pub status: Option<i32>,
    /// Signal that ended it. `None` if it exited.
    pub signal: Option<i32>,
    /// User and system CPU time of the process and the children it waited for, microseconds.
    pub cpu_us: u64,
    /// The kernel killed it, and had killed something in its cell for lack of memory since its
    /// request began.
    pub out_of_memory: bool,
}
