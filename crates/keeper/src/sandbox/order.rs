//! What the keeper, the launcher and the init of a sandbox tell each other.
//!
//! Not here: how it travels (`channel`). Both ends are always of one build: the launcher and every init are copies of
//! the keeper's own process.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// To the launcher.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Make a sandbox of what comes over the connection that comes with it: one `Birth`, and with that the cgroup v2
    /// directory if there is one, and as many `tasks` files of cgroup v1. What there is to know of the sandbox' is told
    /// over the same connection.
    Sandbox,
    /// Make the warden. With it comes its end of its connection with the keeper.
    Warden,
}

/// To the warden, which acts on them in this order.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum Ward {
    /// What it guards may run until then, CLOCK_BOOTTIME in nanoseconds.
    Until(u64),
    /// Guards one more tree of processes. With it comes the file that stops this tree alone and, on v1, one that stops
    /// all of them. Answered by `Warded::Added`.
    Add { number: u64, version: Freezing },
    /// Stops this one for good, whatever comes.
    Hold { number: u64 },
    /// Nothing of it is left.
    Remove { number: u64 },
}

/// Which interface of freezers a file is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Freezing {
    /// `freezer.state` of cgroup v1.
    V1,
    /// `cgroup.freeze` of cgroup v2.
    V2,
}

/// From the warden.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum Warded {
    /// From here on it is stopped when the others are; where they are stopped now, it is.
    Added { number: u64 },
    /// All are stopped, and were so long after their time.
    Fenced { after_ns: u64, count: u32 },
    /// They go on.
    Freed,
    /// The kernel did not stop this one.
    Failed { number: u64, errno: i32 },
}

/// What a sandbox is made of.
#[derive(Debug, Serialize, Deserialize)]
pub struct Birth {
    pub uid: u32,
    pub gid: u32,
    pub hostname: String,
    pub base: PathBuf,
    pub binds: Vec<Bound>,
    pub hide: Vec<PathBuf>,
    pub tmp: Option<PathBuf>,
    pub run: Option<PathBuf>,
    pub shm_bytes_max: u64,
    pub host_network: bool,
    pub has_cgroup: bool,
}

/// A file or directory of the node to be seen in the sandbox.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Bound {
    pub source: PathBuf,
    pub target: PathBuf,
    pub writable: bool,
    /// Looked for with the tenant's rights: no link of its own leads it to what it could not reach anyway.
    pub as_tenant: bool,
}

/// To an init.
#[derive(Debug, Serialize, Deserialize)]
pub enum Ask {
    /// With it come the descriptors, in the order of `fds`.
    Run(Run),
    /// Tell about the end of a process it has not started itself.
    Adopt { pid: u32 },
    /// Kill all processes of the session that this one began.
    EndSession { pid: u32 },
    /// What came of the memory that was to be written while the tool ran that has ended last.
    Filled,
    /// What came of the files in `/dev/shm` at the end of the checkpoint that ran last.
    Kept,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Run {
    pub argv: Vec<Vec<u8>>,
    /// `NAME=value`.
    pub env: Vec<Vec<u8>>,
    pub directory: PathBuf,
    /// The numbers the descriptors get.
    pub fds: Vec<i32>,
    /// How many of them, from number 3 on, are sockets to listen on.
    pub listeners: u32,
    pub pid: Option<i32>,
    pub open_files_max: u64,
    /// It has no transparent huge pages, as the keeper has none.
    pub small_pages: bool,
    /// Its standard input is a terminal, and becomes that of its session.
    pub has_terminal: bool,
    pub role: Role,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// The tenant's program: its uid, no rights, behind the filter of system calls.
    Tenant,
    /// A tool of the keeper's: root of the sandbox. Numbers are those of descriptors.
    Tool {
        program: i32,
        /// It takes a checkpoint into this directory: it must read the filters of the others, and the files in `/dev/shm` are
        /// written there, too, before it lets go of the first process.
        takes_into: Option<i32>,
        /// What it brings back has memory in these ranges that a file shows,
        shown: Vec<(u64, u64)>,
        /// memory that is written meanwhile,
        fills: Vec<Fill>,
        /// and files in `/dev/shm` that are made from this one before. The tool does not get it.
        shm: Option<i32>,
    },
}

/// A file of memory that is written while a tool runs, and before it lets go of what it brings back. Numbers are those of descriptors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fill {
    pub memory: i32,
    /// One part after the other. The tool does not get it.
    pub contents: i32,
    /// Where in the memory, from the first byte to the one behind the last.
    pub parts: Vec<(u64, u64)>,
}

/// From an init.
#[derive(Debug, Serialize, Deserialize)]
pub enum Told {
    /// It is ready. With it come descriptors: of its process, its root directory and its mount namespace.
    Ready,
    /// There will be no sandbox.
    Failed {
        step: String,
        errno: i32,
    },
    /// With it come the descriptor of the process and the pipe its end is told through.
    Runs {
        pid: u32,
    },
    NotRun {
        step: Step,
        errno: i32,
    },
    /// All of the session is killed. What the kernel has not ended yet, it is about to.
    SessionEnded,
    /// None: it is written, or nobody knows of a reason why not.
    Filled {
        errno: Option<i32>,
    },
    Kept {
        errno: Option<i32>,
    },
}

/// Where on its way to the program a child failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    Fork,
    Descriptors,
    Rights,
    Directory,
    Memory,
    /// Those in `/dev/shm`.
    Files,
    Program,
}
