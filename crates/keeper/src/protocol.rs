//! The keeper's verbs: what an edge can ask for, and what it gets. A closed set.
//!
//! One message is one datagram on a Unix `SOCK_SEQPACKET` socket, postcard-encoded, at most
//! `limits::KEEPER_MESSAGE_MAX` bytes, with at most `limits::KEEPER_FDS_MAX` file descriptors. Not here: the
//! doing (`server`), the asking (`client`).

use nagaya_cmdb::cell::{CellChange, Confinement, Usage};
use nagaya_cmdb::instance::Wake;
use nagaya_cmdb::{SiteName, TenantName};
use serde::{Deserialize, Serialize};

/// Raised when a message changes meaning. Both ends ship in one binary; an old edge beside a new keeper
/// exists only while an upgrade runs.
pub const PROTOCOL_VERSION: u32 = 5;

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
    /// The site's document root. Answer: `Root` with one descriptor (`O_PATH | O_DIRECTORY`).
    OpenRoot { site: SiteName },
    /// Run a program of the site once. `script` is relative to the document root. Answer: `Spawned` with
    /// two descriptors: its standard input (write end) and output (read end). Its standard error goes to the keeper's log.
    /// It is born in a cell of its own.
    SpawnCgi { site: SiteName, script: String, env: Vec<(String, String)>, confinement: Box<Confinement> },
    /// A PHP worker under this tenant's uid, for this connection alone. Answer: `Spawned` with one
    /// descriptor, the FastCGI connection. It waits for its first request in a cell beneath its tenant's.
    SpawnPhp { tenant: TenantName },
    /// A worker begins to serve a request of this site: it is moved to where the request is to run, if it is not there
    /// already, and gets the request's limits. Answer: `Entered`.
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
    /// A request needs the site's instance, which is woken if it rests. Answer: `Using` with one descriptor, a connection
    /// to it, once it can answer; and a second one where it has databases outside, its `tally`. From then on this connection of the edge keeps it awake.
    UseInstance { site: SiteName },
    /// One more connection to an instance this connection of the edge uses. Answer: `Connected` with one descriptor, or
    /// `Failed` with `Failure::NotFound` where it has ended.
    ConnectInstance { instance: InstanceId },
    /// Takes one `Using` back: as soon as all are, the instance may rest. No answer.
    LeaveInstance { instance: InstanceId },
    /// Nobody waits for the answer to the `UseInstance` with this tag any more: what is not begun for it yet is not begun.
    /// No answer; nor to the other, unless it is on its way.
    Forget { tag: u64 },
    /// End what a `Spawned` answer began, with every process it started. No answer.
    End { process: ProcessId },
    /// Certificate chain and key for a TLS server name. Answer: `Certificate` with one descriptor (PEM: chain and key)
    /// or `Failed` with `Failure::NotFound`.
    OpenCertificate { name: String },
    /// What runs now, as JSON for `nagaya status`. Answer: `Status`.
    Status,
}

/// What the keeper calls one spawned process tree. Never a pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessId(pub u64);

/// What the keeper calls one run of a site's instance, from its start or restoration until it has no process any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct InstanceId(pub u64);

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
    Root,
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
    Done,
    Cells {
        json: String,
    },
    Using {
        instance: InstanceId,
        /// What the one who asked waited for. None: it ran.
        wake: Option<Wake>,
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
