//! The keeper's verbs: what an edge can ask for, and what it gets. A closed set.
//!
//! One message is one datagram on a Unix `SOCK_SEQPACKET` socket, postcard-encoded, at most
//! `limits::KEEPER_MESSAGE_MAX` bytes, with at most `limits::KEEPER_FDS_MAX` file descriptors. Not here: the
//! doing (`server`), the asking (`client`).

use std::os::fd::OwnedFd;

use nagaya_cmdb::cell::{Boost, CellChange, Confinement, Usage};
use nagaya_cmdb::instance::Wake;
use nagaya_cmdb::{NodeName, SiteName, TenantName};
use serde::{Deserialize, Serialize};

/// Raised when a message changes meaning. Both ends ship in one binary; an old edge beside a new keeper
/// exists only while an upgrade runs.
pub const PROTOCOL_VERSION: u32 = 11;

/// From edge to keeper. `tag` comes back in the answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    pub tag: u64,
    pub verb: Verb,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verb {
    /// First message of a connection. Answer: `Hello` with one descriptor, the `roll` of instances that are awake.
    Hello { version: u32 },
    /// The site's document root. Answer: `Root` with one descriptor (`O_PATH | O_DIRECTORY`). It is a read-only mount of its
    /// own, attached nowhere, where the keeper can make mounts.
    OpenRoot { site: SiteName },
    /// A connection to the Unix socket that the record of this site names: the server there runs by itself. It is made with
    /// the rights of the peer that asks, and as its peer (`SO_PEERCRED`). Answer: `Connected` with one descriptor, or `Failed` with `Failure::Busy` where
    /// the server's queue is full.
    ConnectServer { site: SiteName },
    /// Run a program of the site once. `script` is relative to the document root. Answer: `Spawned` with
    /// two descriptors: its standard input (write end) and output (read end). Its standard error goes to the keeper's log.
    /// It is born in a cell of its own.
    SpawnCgi { site: SiteName, script: String, env: Vec<(String, String)>, confinement: Box<Confinement> },
    /// A PHP worker of this site's tenant, for this connection alone. The site is of kind php. Answer: `Spawned` with one
    /// descriptor, a FastCGI connection that takes scripts beneath this site's root only, until it enters for another
    /// site. It waits for its first request in a cell beneath its tenant's.
    SpawnPhp { site: SiteName },
    /// A worker begins to serve a request of this site: it is moved to where the request is to run, if it is not there
    /// already, and gets the request's limits. From then on it takes scripts of this site. Answer: `Entered`.
    Enter { process: ProcessId, site: SiteName, confinement: Box<Confinement> },
    /// The request a worker serves has ended. Answer: `Used`, all since it entered. What the request left running is ended.
    /// The worker's cell stays as it is until the next `Enter`, so an unchanged confinement without demotions, its own or
    /// its site's, needs none: then `Used` is what it used since the last `Leave`.
    Leave { process: ProcessId },
    /// What a spawned process has used for its present request so far. Answer: `Used`.
    Measure { process: ProcessId },
    /// What rules do to named cells without running in them, in this order. Answer: `Done`.
    ChangeCells { changes: Vec<CellChange> },
    /// Named cells with their limits and use, as JSON, for rules that ask. Answer: `Cells`.
    Cells,
    /// What runs for the tenants in `give_way` gives way to other tenants on the processor, for `cells::GIVE_WAY_FOR` from now;
    /// for those in `resume` it does so no more. Answer: `Done`.
    GiveWay { give_way: Vec<TenantName>, resume: Vec<TenantName> },
    /// A request needs the site's instance, which is woken if it rests. Answer: `Using` with one descriptor, a connection
    /// to it, once it can answer; and a second one where it has databases or places outside, its `tally`. From then on this connection of the edge keeps it awake.
    /// In a cluster it must be placed here: `epoch` is of the placement that the edge goes by. One that the keeper has not
    /// heard of yet is waited for, for a moment. Answer: `Elsewhere`, or `Failed` with `Failure::Fenced`.
    UseInstance { site: SiteName, epoch: Option<u64> },
    /// One more connection to an instance this connection of the edge uses. Answer: `Connected` with one descriptor, or
    /// `Failed` with `Failure::NotFound` where it has ended.
    ConnectInstance { instance: InstanceId },
    /// Takes one `Using` back: as soon as all are, the instance may rest. No answer.
    LeaveInstance { instance: InstanceId },
    /// A request that has waited for the instance's wake begins to be answered: it goes first on the processor no more. No answer.
    Answered { instance: InstanceId },
    /// Nobody waits for the answer to the `UseInstance` with this tag any more: what is not begun for it yet is not begun.
    /// No answer; nor to the other, unless it is on its way.
    Forget { tag: u64 },
    /// A request with limits of its own goes over this connection to an instance in use: the process that serves it is moved
    /// to a cell of the request's, if that can be known and serves nothing else meanwhile. Named cells are left out. It waits
    /// until the connection is taken; the request may be sent before the answer. Answer: `Seated` or `Unseated`.
    EnterInstance { instance: InstanceId, line: Line, confinement: Box<Confinement> },
    /// That request has ended: its process goes back. Answer: `Used`, all since the `Seated`; or `Failed` with
    /// `Failure::NotFound` if it is not known for the whole of the request.
    LeaveSeat { seat: SeatId },
    /// While a request runs in an instance in use, the instance is to have these limits, where its record gives less. Answer:
    /// `Boosted`. It ends with `EndBoost`, with the last use of the instance by this connection, and with the instance.
    BoostInstance { instance: InstanceId, boost: Boost },
    /// That request has ended. No answer.
    EndBoost { boost: BoostId },
    /// End what a `Spawned` answer began, with every process it started. No answer.
    End { process: ProcessId },
    /// Certificate chain and key for a TLS server name. Answer: `Certificate` with one descriptor (PEM: chain and key)
    /// or `Failed` with `Failure::NotFound`.
    OpenCertificate { name: String },
    /// What another node is to be told of the site's image here, or whether one has to be fetched. `order` of this and the next
    /// three: by which the supervisor of a member has ordered this transfer; without it they are refused (`Failure::Forbidden`).
    /// Answer: `Offered`.
    OfferImage { site: SiteName, order: String },
    /// The image that was offered with this digest, from this byte on, sealed for the keeper at the order's other end. Answer:
    /// `Sending` with one descriptor, a pipe to read it from.
    SendImage { site: SiteName, order: String, digest: String, offset: u64 },
    /// Take over the image that another node offers. Answer: `Fetching` with one descriptor, a pipe to write to what that node
    /// sends from the byte on that the answer says; or why it is of no use here.
    FetchImage { site: SiteName, order: String, offer: String },
    /// Answer: `Done` once the image whose fetching was begun is there, or why it is not.
    ImageFetched { site: SiteName, order: String },
    /// What runs now, as JSON for `nagaya status`. Answer: `Status`.
    Status,
}

/// A document root as the edge gets it.
#[derive(Debug)]
pub struct OpenedRoot {
    pub dir: OwnedFd,
    /// As `Reply::Root` has it.
    pub is_remote: bool,
}

/// What the keeper calls one spawned process tree. Never a pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessId(pub u64);

/// What the keeper calls one run of a site's instance, from its start or restoration until it has no process any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct InstanceId(pub u64);

/// A process of an instance in the cell of the request that it serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SeatId(pub u64);

/// Limits of an instance that are higher for one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BoostId(pub u64);

/// Which of its connections to an instance the edge means. A wrong one names nobody, or a process of the same instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Line {
    /// Number of the inode of the edge's end.
    Unix { inode: u32 },
    /// Port of the edge's end, in the sandbox.
    Tcp { port: u16 },
}

/// From keeper to edge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    Reply {
        tag: u64,
        reply: Reply,
    },
    /// A spawned process has ended (by itself or by `End`), and nothing of its tree is left.
    Ended {
        process: ProcessId,
        exit: Exit,
        /// Since it was born, or for a worker since it last entered or left.
        usage: Usage,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    Hello {
        version: u32,
    },
    /// `is_remote`: a network or another process answers for its file system, and no look into it is sure to return.
    Root {
        is_remote: bool,
    },
    /// `cell` is where it runs, as `nagaya cells` shows it.
    Spawned {
        process: ProcessId,
        cell: String,
    },
    Entered {
        cell: String,
    },
    Used {
        usage: Usage,
    },
    /// `cell` is the request's own.
    Seated {
        seat: SeatId,
        cell: String,
    },
    /// Its limits are those of the instance, in this cell. `for_good`: no request over any connection to this run of the
    /// instance will get another answer.
    Unseated {
        cell: String,
        for_good: bool,
    },
    /// `granted`: how much of what was asked for its records allow. What is not there is not above its record's.
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
        /// What the one who asked waited for. None: it ran.
        wake: Option<Wake>,
    },
    /// The site's application is placed on another node, or on none: as the keeper knows it.
    Elsewhere {
        node: Option<NodeName>,
        epoch: Option<u64>,
        message: String,
    },
    /// `offer` is for the other node's `FetchImage`; None: there is no image.
    Offered {
        offer: Option<String>,
        digest: String,
        bytes: u64,
    },
    Sending,
    /// `bytes`: of the sealed stream that is to be written.
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
        failure: Failure,
        code: u16,
        message: String,
    },
}

/// Why a verb failed, coarse enough for the edge to choose a status code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// No such site, tenant, script or certificate.
    NotFound,
    /// It exists and may not be used: permissions, outside the root, not executable.
    Forbidden,
    /// A limit is reached; asking later may help.
    Busy,
    /// It was started and failed, or took too long to listen.
    Broken,
    /// The message itself was not acceptable.
    Invalid,
    /// The node has no authority now: nothing placed on it runs. It may be over in a moment.
    Fenced,
    /// The site's application is placed on another node, or on none.
    Elsewhere,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Exit status, if it exited.
    pub status: Option<i32>,
    /// Signal, if one ended it.
    pub signal: Option<i32>,
    /// User and system CPU time of the process and the children it waited for, microseconds.
    pub cpu_us: u64,
}
