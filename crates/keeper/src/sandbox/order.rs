//! Messages between the keeper, the launcher and the init of a sandbox.
//!
//! Not here: how it travels (`channel`). Both ends are always of one build: the launcher and every
//! init are copies of the keeper's own process.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A message to the launcher.
#[derive(Debug, Serialize, Deserialize)]
pub enum LauncherCommand {
    /// Make a sandbox from the message on the connection that comes with it. That is one
    /// `SandboxBirth`, the cgroup v2 directory if there is one, and as many `tasks` files of cgroup
    /// v1. Replies about the sandbox go over the same connection.
    Sandbox,
    /// Make the warden. With it comes its end of its connection with the keeper.
    Warden,
}

/// A message to the warden, which acts on them in this order.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum WardenCommand {
    /// The guarded trees may run until then, CLOCK_BOOTTIME in nanoseconds.
    Until(u64),
    /// Guard one more tree of processes. With it comes the file that freezes this tree alone and,
    /// on v1, one that freezes all of them. Answered by `WardenReport::Added`.
    Add { number: u64, version: FreezerVersion },
    /// Freeze this one for good, whatever comes.
    Hold { number: u64 },
    /// Nothing of it is left.
    Remove { number: u64 },
}

/// The interface of a freezer file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FreezerVersion {
    /// `freezer.state` of cgroup v1.
    V1,
    /// `cgroup.freeze` of cgroup v2.
    V2,
}

/// A message from the warden.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum WardenReport {
    /// From here on it is frozen together with the others. If they are frozen now, it is frozen.
    Added { number: u64 },
    /// All are frozen, this long after their time.
    Fenced { after_ns: u64, count: u32 },
    /// They continue.
    Freed,
    /// The kernel did not freeze this one.
    Failed { number: u64, errno: i32 },
}

/// Description of a sandbox to be made.
#[derive(Debug, Serialize, Deserialize)]
pub struct SandboxBirth {
    pub uid: u32,
    pub gid: u32,
    /// No link of the tenant's leads out of it.
    pub home: Option<PathBuf>,
    pub hostname: String,
    pub base: PathBuf,
    /// Looked up with the tenant's rights.
    pub base_as_tenant: bool,
    pub binds: Vec<BirthBind>,
    pub hide: Vec<PathBuf>,
    pub tmp: Option<PathBuf>,
    pub run: Option<PathBuf>,
    pub shm_bytes_max: u64,
    pub host_network: bool,
    pub has_cgroup: bool,
}

/// A file or directory of the node that the sandbox shows.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BirthBind {
    pub source: PathBuf,
    pub target: PathBuf,
    pub writable: bool,
    /// Looked up with the tenant's rights: no link of its own leads it to an otherwise unreachable
    /// place.
    pub as_tenant: bool,
    /// Left out where the base has no such path.
    pub is_optional: bool,
}

/// A message to an init.
#[derive(Debug, Serialize, Deserialize)]
pub enum InitRequest {
    /// With it come the descriptors, in the order of `fds`.
    Run(RunRequest),
    /// Report the end of a process that it has not started itself.
    Adopt { pid: u32 },
    /// Kill all processes of the session that this one began.
    EndSession { pid: u32 },
    /// Report the result of the restore whose tool has ended last.
    Restored,
    /// Report the result for the files in `/dev/shm` at the end of the last checkpoint.
    Kept,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct RunRequest {
    pub argv: Vec<Vec<u8>>,
    /// `NAME=value`.
    pub env: Vec<Vec<u8>>,
    pub directory: PathBuf,
    /// The numbers the descriptors get.
    pub fds: Vec<i32>,
    /// Number of them, from descriptor 3 on, that are sockets to listen on.
    pub listeners: u32,
    pub pid: Option<i32>,
    pub open_files_max: u64,
    /// It has no transparent huge pages, because the keeper has none.
    pub small_pages: bool,
    /// Its standard input is a terminal, and becomes that of its session.
    pub has_terminal: bool,
    pub role: ProcessRole,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProcessRole {
    /// The tenant's program: its uid, no rights, behind the filter of system calls.
    Tenant,
    /// A tool of the keeper's: root of the sandbox. Numbers are those of descriptors.
    Tool {
        program: i32,
        /// It takes a checkpoint into this directory. It must read the filters of the others. The
        /// files in `/dev/shm` are written there, too, before it releases the first process.
        takes_into: Option<i32>,
        /// It restores an image's processes, whose rights are compared before they run.
        brings_back: bool,
        /// Ranges in which restored processes have memory mapped from a file.
        shown: Vec<(u64, u64)>,
        /// Memory that is written meanwhile.
        fills: Vec<MemoryFill>,
        /// File from which the files in `/dev/shm` are made before. The tool does not get it.
        shm: Option<i32>,
    },
}

/// A file of memory that is written while a tool runs, and before it releases the restored
/// processes. Numbers are those of descriptors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryFill {
    pub memory: i32,
    /// One part after the other. The tool does not get it.
    pub contents: i32,
    /// Ranges of the memory, from the first byte to the one behind the last.
    pub parts: Vec<(u64, u64)>,
}

/// A message from an init.
#[derive(Debug, Serialize, Deserialize)]
pub enum InitReply {
    /// It is ready. With it come descriptors: of its process, its root directory and its mount
    /// namespace.
    Ready,
    /// There will be no sandbox.
    Failed {
        step: String,
        errno: i32,
    },
    /// With it come the descriptor of the process and the pipe that reports its end.
    Runs {
        pid: u32,
    },
    NotRun {
        step: ChildStep,
        errno: i32,
    },
    /// All of the session is killed. Processes that the kernel has not ended yet are about to end.
    SessionEnded,
    /// `errno`: why memory was not written. `None` if it was, or no reason is known.
    /// `wrong_rights`: the thread that would have had other rights than the sandbox gives.
    Restored {
        errno: Option<i32>,
        wrong_rights: Option<String>,
    },
    Kept {
        errno: Option<i32>,
    },
}

/// The step on the way to the program at which a child failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChildStep {
    Fork,
    Descriptors,
    Rights,
    Directory,
    Memory,
    /// Files in `/dev/shm`.
    Files,
    Program,
}
