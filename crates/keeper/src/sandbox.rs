//! Sandboxes: a tenant's processes in namespaces of their own, on a read-only base, with nothing
//! else in sight.
//!
//! A sandbox has its own user, pid, mount, IPC, UTS, network and cgroup namespaces. Its first
//! process (`init`) is root of it and nobody on the node. Programs run under the tenant's uid
//! without any capability, behind a filter of system calls. Their only network is loopback. It ends
//! as a whole when its `Sandbox` is dropped, and with the keeper.
//!
//! Sandboxes are made by the **launcher** (`launcher`), a copy of the keeper's process from before
//! it had threads. Only a process with one thread can be forked into namespaces. A few are begun
//! before they are ordered (`birth`). All calls here block: make them from `workers`.
//!
//! Not here: limits (`cells`; a sandbox is born in the cell it is given), the programs and their
//! times (`instances`), images (`image`).

mod birth;
mod capture;
mod cgroup;
mod channel;
mod checkpoint;
mod ending;
mod failure;
mod filling;
mod filter;
mod ids;
mod init;
mod kernel;
mod launcher;
mod mapped_memory_filter;
mod namespaces;
mod network;
pub(crate) mod order;
mod outlet;
mod program;
mod restoring;
mod rights;
mod session;
pub(crate) mod shm;
mod terminal;
mod tree;
mod trial;
mod warden;

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nagaya_base::Code;
use nagaya_keeper_api::protocol::ProcessExit;
use parking_lot::Mutex;
use rustix::process::{Signal, pidfd_send_signal};

use ending::EndingQueue;
use ids::ROOT_ID_BIT;
use kernel::{ForkOptions, SingleThreaded};
use launcher::AHEAD_MAX;
use order::{BirthBind, InitReply, InitRequest, LauncherCommand, ProcessRole, RunRequest, SandboxBirth};

pub use crate::sys::{CellEntrance, UnixIdentity};
pub(crate) use capture::capture as capture_here;
pub use capture::{NetworkCapture, RESOLVER};
pub(crate) use channel::{receive, send};
pub use filter::of_programs as filter_of_programs;
pub(crate) use ids::root_id;
pub use kernel::FilterInstruction;
pub(crate) use kernel::{raise_loopback, timespec};
pub use network::SandboxAddress;
pub use order::ChildStep;
pub(crate) use order::{FreezerVersion, MemoryFill, WardenCommand, WardenReport};
pub(crate) use outlet::listen as listen_here;
pub(crate) use shm::{DEPTH_MAX as SHM_DEPTH_MAX, ENTRIES_MAX as SHM_ENTRIES_MAX, FILE as SHM_FILE};
pub(crate) use tree::{attach_to, detached, own_proc};
pub use tree::{detached_tree, lock, memory};
pub use trial::{CAPABILITIES, NOBODY, explain, missing_capabilities, try_sandbox};

/// No sandbox can be made at all.
pub const LAUNCHER: Code = Code(330);
/// A sandbox cannot be made.
pub const CREATE: Code = Code(331);
/// A program cannot be started in a sandbox.
pub const RUN: Code = Code(332);
/// A sandbox has ended.
pub const ENDED: Code = Code(333);

/// Number of an application's first process in its sandbox. An image restores its processes under
/// their own numbers, so those must be free. Only the init exists before.
pub const ROOT_PID: u32 = 10;

/// Maximum time to make a sandbox. A source on a file system that does not respond never comes. A
/// cell may be short of CPU time.
const CREATE_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time to start a program, for the same reasons. A sandbox that does not respond is ended.
const RUN_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum length of a host name (`__NEW_UTS_LEN`).
const HOSTNAME_LEN_MAX: usize = 64;

/// Maximum number of sources that are bound into one sandbox.
const BINDS_MAX: usize = 256;

/// Why there is no sandbox, or no program in it.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    #[error("the launcher of sandboxes cannot be started: {0}")]
    Start(#[source] io::Error),
    #[error("the launcher of sandboxes has ended: restart nagaya; its log says why it ended ({0})")]
    Launcher(#[source] io::Error),
    #[error("{0}")]
    Spec(String),
    #[error("a sandbox cannot {step}: {error}")]
    Create { step: String, error: io::Error },
    #[error("a program cannot be started in its sandbox ({step:?}): {error}")]
    Run { step: ChildStep, error: io::Error },
    #[error("the sandbox has ended: {0}")]
    Ended(#[source] io::Error),
}

impl SandboxError {
    pub fn code(&self) -> Code {
        match self {
            Self::Start(_) | Self::Launcher(_) => LAUNCHER,
            Self::Spec(_) | Self::Create { .. } => CREATE,
            Self::Run { .. } => RUN,
            Self::Ended(_) => ENDED,
        }
    }
}

/// A file or directory of the node that a sandbox shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxBind {
    pub source: PathBuf,
    /// Absolute path in the sandbox. It is made if it is missing in a place for mount points. Such
    /// places are `/home`, `/root`, `/srv`, `/mnt`, `/media`, `/run`, `/tmp`, the top, and
    /// directories of `hide`. Elsewhere it must be in the base.
    pub target: PathBuf,
    pub writable: bool,
    /// Look the source up with the tenant's rights, as a directory or a file (`tenant_path`). False
    /// only for paths of the keeper's own, none of which a tenant can change.
    pub as_tenant: bool,
    /// Leave it out if the base has no such path. Nothing is made for it then.
    pub is_optional: bool,
}

/// Description of a sandbox to be made.
#[derive(Debug, Clone)]
pub struct SandboxSpec {
    /// Uids and gids are below 2^31 and not 0.
    pub identity: UnixIdentity,
    /// The tenant's home, which no link of its own leads out of.
    pub home: Option<PathBuf>,
    /// At most 64 bytes.
    pub hostname: String,
    /// Its root, read-only. Of the node's `/` it shows the parts that programs need, without homes,
    /// mail, logs and other file systems.
    pub base: PathBuf,
    /// Look the base up with the tenant's rights. False only for the keeper's own.
    pub base_as_tenant: bool,
    /// In this order. Later ones may lie in earlier ones.
    pub binds: Vec<SandboxBind>,
    /// Directories of the node's root that look empty.
    pub hide: Vec<PathBuf>,
    /// Directory on disk for its `/tmp`, owned by the tenant. `None`: 64 MiB of memory, which no
    /// image carries.
    pub tmp: Option<PathBuf>,
    /// As `tmp`, for its `/run`.
    pub run: Option<PathBuf>,
    /// Size of `/dev/shm`, bytes.
    pub shm_bytes_max: u64,
    /// It has the node's network instead of one of its own, loopback and abstract Unix sockets
    /// included.
    pub host_network: bool,
    /// Entrance of the cell in which all of it is born.
    pub entrance: CellEntrance,
}

/// A program to run in a sandbox under the tenant's uid.
#[derive(Debug)]
pub struct SandboxProgram<'a> {
    /// A name without `/` is looked up in `PATH` of `env`.
    pub argv: Vec<OsString>,
    pub env: Vec<(OsString, OsString)>,
    /// Path in the sandbox.
    pub directory: PathBuf,
    /// `None`: `/dev/null` of the sandbox, which, unlike the node's, an image can carry.
    pub stdin: Option<BorrowedFd<'a>>,
    pub stdout: Option<BorrowedFd<'a>>,
    pub stderr: Option<BorrowedFd<'a>>,
    /// Descriptor 3, announced by `LISTEN_FDS` and `LISTEN_PID` (sd_listen_fds(3)).
    pub listener: Option<BorrowedFd<'a>>,
    /// Its number in the sandbox. `None`: the next free one.
    pub pid: Option<u32>,
    pub open_files_max: u64,
    /// `stdin` is a terminal, and becomes that of its session.
    pub has_terminal: bool,
}

/// A tool of the keeper's, run as root of the sandbox with an empty environment and outside of the
/// filter.
#[derive(Debug)]
pub(crate) struct SandboxTool<'a> {
    pub program: BorrowedFd<'a>,
    pub argv: Vec<OsString>,
    pub env: Vec<(OsString, OsString)>,
    /// Numbers from 4 to 63, or 1 and 2 for its output.
    pub fds: Vec<(i32, BorrowedFd<'a>)>,
    pub pid: u32,
    /// It takes a checkpoint into this directory, with a number of `fds`. The contents of
    /// `/dev/shm` go there, too (`kept`).
    pub takes_into: Option<i32>,
    /// It restores an image's processes, whose rights are compared before they run (`restored`).
    pub brings_back: bool,
    /// It restores processes with memory in these ranges, mapped from a file.
    pub shown: Vec<(u64, u64)>,
    /// Memory that is written while it runs, and before it releases anything (`restored`), with
    /// numbers of `fds`.
    pub fills: Vec<MemoryFill>,
    /// File from which the files in `/dev/shm` are made before it starts, likewise.
    pub shm: Option<i32>,
}

/// The descriptor that a tool's program gets.
const TOOL_FD: i32 = 3;

/// Details of a failed restore.
#[derive(Debug)]
pub(crate) struct FailedRestore {
    /// Result for the memory that was to be written meanwhile.
    pub filled: io::Result<()>,
    /// Describes a thread that would have had other rights than the sandbox gives. All of it was
    /// killed before it ran.
    pub wrong_rights: Option<String>,
}

/// A process in a sandbox.
#[derive(Debug)]
pub struct SandboxTask {
    /// Its number in the sandbox.
    pub pid: u32,
    pub pidfd: OwnedFd,
    end: OwnedFd,
}

impl SandboxTask {
    /// Returns a descriptor that is readable once the process has ended and is reaped, or its
    /// sandbox has ended.
    pub fn end(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }

    /// Returns how it ended. `None` while it runs. If its sandbox ended first, it counts as killed.
    pub fn try_exit(&self) -> io::Result<Option<ProcessExit>> {
        let mut bytes = [0; 64];
        match rustix::io::read(&self.end, &mut bytes) {
            Ok(0) => Ok(Some(ProcessExit {
                status: None,
                signal: Some(Signal::KILL.as_raw()),
                cpu_us: 0,
                out_of_memory: false,
            })),
            Ok(len) => {
                let exit = postcard::from_bytes(&bytes[..len]);
                exit.map(Some).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
            }
            Err(rustix::io::Errno::AGAIN) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits for its end.
    pub fn wait(&self, within: Duration) -> io::Result<ProcessExit> {
        channel::wait_readable(&self.end, within)?;
        self.try_exit()?.ok_or_else(|| io::ErrorKind::TimedOut.into())
    }

    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(pidfd_send_signal(&self.pidfd, signal)?)
    }
}

// === impl Launcher ===

/// The keeper's end of the launcher. There is one in a process. It ends when this is dropped.
#[derive(Debug)]
pub struct Launcher {
    orders: OwnedFd,
    pid: i32,
    pidfd: OwnedFd,
    /// Whether it is in the keeper's own cgroup.
    settled: OnceLock<()>,
    /// Connections with births that wait for their orders, the oldest first.
    ahead: Mutex<VecDeque<OwnedFd>>,
    endings: EndingQueue,
}

impl Launcher {
    /// Makes the launcher. The process must be root's and have one thread: call it before anything
    /// starts another.
    pub fn start() -> Result<Self, SandboxError> {
        let start = || -> io::Result<Self> {
            if !rustix::process::geteuid().is_root() {
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it needs root"));
            }
            let Some(alone) = SingleThreaded::check()? else {
                let why = "this process has several threads already: start it earlier";
                return Err(io::Error::other(why));
            };
            let (ours, theirs) = channel::pair()?;
            let keeper = rustix::process::getpid().as_raw_nonzero().get();
            let (pid, pidfd) =
                alone.fork(&ForkOptions::default(), |alone| launcher::run(alone, &theirs, keeper))?;
            Ok(Self {
                orders: ours,
                pid,
                pidfd,
                settled: OnceLock::new(),
                ahead: Mutex::default(),
                endings: EndingQueue::default(),
            })
        };
        start().map_err(SandboxError::Start)
    }

    /// Returns a descriptor that is readable once the launcher has ended, and all sandboxes with
    /// it.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Makes the warden, and returns the keeper's end of its connection. It ends when that is
    /// closed.
    pub(crate) fn warden(&self) -> Result<OwnedFd, SandboxError> {
        let (ours, theirs) = channel::pair().map_err(SandboxError::Launcher)?;
        channel::send(&self.orders, &LauncherCommand::Warden, &[theirs.as_fd()])
            .map_err(SandboxError::Launcher)?;
        Ok(ours)
    }

    /// Makes an empty sandbox: its init runs, and nothing else.
    pub fn create(&self, spec: &SandboxSpec) -> Result<Sandbox, SandboxError> {
        let made = self.create_one(spec);
        self.think_ahead();
        made
    }

    /// Makes one and begins no others.
    fn create_one(&self, spec: &SandboxSpec) -> Result<Sandbox, SandboxError> {
        check(spec)?;
        // A keeper moves to another cgroup at its start, if at all. Sandboxes must be born from
        // there (`cells::birth`).
        self.settled.get_or_init(|| {
            if let Err(error) = cgroup::share(self.pid) {
                tracing::warn!(%error, "the launcher of sandboxes stays in another cgroup than the keeper");
            }
        });
        let init = self.order(spec)?;
        self.made(init, spec)
    }

    fn made(&self, init: OwnedFd, spec: &SandboxSpec) -> Result<Sandbox, SandboxError> {
        let failed = |error: io::Error| SandboxError::Create { step: "be made".into(), error };
        match channel::receive_within::<InitReply>(&init, CREATE_TIMEOUT).map_err(failed)? {
            Some((InitReply::Ready, fds)) => {
                let mut fds = fds.into_iter();
                let (Some(pidfd), Some(root), Some(mount_namespace)) = (fds.next(), fds.next(), fds.next())
                else {
                    return Err(failed(io::ErrorKind::InvalidData.into()));
                };
                Ok(Sandbox {
                    init: Mutex::new(init),
                    pidfd,
                    root,
                    mount_namespace: Some(mount_namespace),
                    identity: spec.identity,
                    is_of_image: AtomicBool::new(false),
                    endings: self.endings.clone(),
                })
            }
            Some((InitReply::Failed { step, errno }, _)) => {
                Err(SandboxError::Create { step, error: io::Error::from_raw_os_error(errno) })
            }
            Some(_) => Err(failed(io::ErrorKind::InvalidData.into())),
            None => Err(failed(io::Error::new(io::ErrorKind::BrokenPipe, "its first process was killed"))),
        }
    }

    /// Gives the order to a birth that waits for one, or else to a new one.
    fn order(&self, spec: &SandboxSpec) -> Result<OwnedFd, SandboxError> {
        let birth = birth_of(spec);
        let fds: Vec<_> = spec.entrance.born.iter().chain(&spec.entrance.tasks).map(AsFd::as_fd).collect();
        loop {
            let waiting = self.ahead.lock().pop_front();
            let is_new = waiting.is_none();
            let init = waiting.map_or_else(|| self.begin(), Ok).map_err(SandboxError::Launcher)?;
            match channel::send(&init, &birth, &fds) {
                Ok(()) => return Ok(init),
                // It was killed while it waited, for example for lack of memory.
                Err(error) if !is_new && error.kind() == io::ErrorKind::BrokenPipe => {}
                Err(error) => return Err(SandboxError::Create { step: "be ordered".into(), error }),
            }
        }
    }

    /// Begins a birth, and returns the connection with it.
    fn begin(&self) -> io::Result<OwnedFd> {
        let (ours, theirs) = channel::pair()?;
        channel::send(&self.orders, &LauncherCommand::Sandbox, &[theirs.as_fd()])?;
        Ok(ours)
    }

    /// Begins births until enough wait.
    fn think_ahead(&self) {
        let mut ahead = self.ahead.lock();
        while ahead.len() < AHEAD_MAX {
            // A birth that cannot be begun ahead is begun when it is ordered, and its failure is
            // reported then.
            let Ok(init) = self.begin() else { return };
            ahead.push_back(init);
        }
    }
}

fn check(spec: &SandboxSpec) -> Result<(), SandboxError> {
    let refuse = |why: String| Err(SandboxError::Spec(why));
    let UnixIdentity { uid, gid } = spec.identity;
    if [uid, gid].iter().any(|id| *id == 0 || *id >= ROOT_ID_BIT) {
        return refuse(format!("uid {uid} and gid {gid} of a sandbox must be from 1 to {}", ROOT_ID_BIT - 1));
    }
    if spec.hostname.is_empty() || spec.hostname.len() > HOSTNAME_LEN_MAX {
        return refuse(format!("'{}' is no host name: 1 to {HOSTNAME_LEN_MAX} bytes", spec.hostname));
    }
    if spec.binds.len() > BINDS_MAX {
        return refuse(format!(
            "{} files are bound into one sandbox; at most {BINDS_MAX} are allowed",
            spec.binds.len()
        ));
    }
    let is_odd = |path: &Path| !path.is_absolute() || path.components().any(|part| part.as_os_str() == "..");
    match spec.binds.iter().find(|bind| is_odd(&bind.target) || bind.target == Path::new("/")) {
        Some(bind) => refuse(format!(
            "'{}' cannot be bound into a sandbox: give an absolute path below / without '..'",
            bind.target.display()
        )),
        None => Ok(()),
    }
}

fn birth_of(spec: &SandboxSpec) -> SandboxBirth {
    let bound = |bind: &SandboxBind| BirthBind {
        source: bind.source.clone(),
        target: bind.target.clone(),
        writable: bind.writable,
        as_tenant: bind.as_tenant,
        is_optional: bind.is_optional,
    };
    SandboxBirth {
        uid: spec.identity.uid,
        gid: spec.identity.gid,
        home: spec.home.clone(),
        hostname: spec.hostname.clone(),
        base: spec.base.clone(),
        base_as_tenant: spec.base_as_tenant,
        binds: spec.binds.iter().map(bound).collect(),
        hide: spec.hide.clone(),
        tmp: spec.tmp.clone(),
        run: spec.run.clone(),
        shm_bytes_max: spec.shm_bytes_max,
        host_network: spec.host_network,
        has_cgroup: spec.entrance.born.is_some(),
    }
}

// === impl Sandbox ===

/// A live sandbox. Dropping it ends all of it.
#[derive(Debug)]
pub struct Sandbox {
    /// One request at a time; each is answered before the next.
    init: Mutex<OwnedFd>,
    pidfd: OwnedFd,
    root: OwnedFd,
    /// `None` once the sandbox is dropped.
    mount_namespace: Option<OwnedFd>,
    identity: UnixIdentity,
    /// Its processes come from an image, and are behind a filter that only a tool sets. Files are
    /// mapped as their memory, or it was written while they were restored.
    is_of_image: AtomicBool,
    endings: EndingQueue,
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.end();
        if let (Some(mount_namespace), Ok(init)) = (self.mount_namespace.take(), self.pidfd.try_clone()) {
            self.endings.release_later(init, mount_namespace);
        }
    }
}

impl Sandbox {
    /// Returns the pidfd of its first process. Readable once the sandbox has ended.
    pub fn init_pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Whether its processes come from an image, in a way that another image could not describe.
    pub fn is_of_image(&self) -> bool {
        self.is_of_image.load(Ordering::Relaxed)
    }

    /// Returns its owner.
    pub fn identity(&self) -> UnixIdentity {
        self.identity
    }

    /// Kills everything in it. Returns at once. `init_pidfd` shows when it is done.
    pub fn end(&self) -> io::Result<()> {
        Ok(pidfd_send_signal(&self.pidfd, Signal::KILL)?)
    }

    /// Starts a program and returns when it runs. Not for a frozen sandbox: its init, which starts
    /// programs, is frozen, too.
    pub fn run(&self, program: &SandboxProgram<'_>) -> Result<SandboxTask, SandboxError> {
        let standard = [(0, program.stdin), (1, program.stdout), (2, program.stderr), (3, program.listener)];
        let fds = standard.into_iter().filter_map(|(number, fd)| Some((number, fd?)));
        let (numbers, fds): (Vec<i32>, Vec<BorrowedFd<'_>>) = fds.unzip();
        let run = RunRequest {
            argv: bytes(&program.argv),
            env: variables(&program.env),
            directory: program.directory.clone(),
            fds: numbers,
            listeners: u32::from(program.listener.is_some()),
            pid: program.pid.map(u32::cast_signed),
            open_files_max: program.open_files_max,
            small_pages: has_small_pages(),
            has_terminal: program.has_terminal,
            role: ProcessRole::Tenant,
        };
        self.ask(&InitRequest::Run(run), &fds)
    }

    /// Starts a tool of the keeper's.
    pub(crate) fn run_tool(&self, tool: &SandboxTool<'_>) -> Result<SandboxTask, SandboxError> {
        let is_of_image = !tool.shown.is_empty() || !tool.fills.is_empty();
        self.is_of_image.fetch_or(is_of_image, Ordering::Relaxed);
        let with_program = [(TOOL_FD, tool.program)].into_iter().chain(tool.fds.iter().copied());
        let (numbers, fds): (Vec<i32>, Vec<BorrowedFd<'_>>) = with_program.unzip();
        let run = RunRequest {
            argv: bytes(&tool.argv),
            env: variables(&tool.env),
            directory: "/".into(),
            fds: numbers,
            listeners: 0,
            pid: Some(tool.pid.cast_signed()),
            open_files_max: 0,
            small_pages: has_small_pages(),
            has_terminal: false,
            role: ProcessRole::Tool {
                program: TOOL_FD,
                takes_into: tool.takes_into,
                brings_back: tool.brings_back,
                shown: tool.shown.clone(),
                fills: tool.fills.clone(),
                shm: tool.shm,
            },
        };
        self.ask(&InitRequest::Run(run), &fds)
    }

    /// Returns a process in it that was not started by `run`: one that was restored from an image.
    pub fn adopt(&self, pid: u32) -> Result<SandboxTask, SandboxError> {
        self.ask(&InitRequest::Adopt { pid }, &[])
    }

    /// Returns the result of a restore whose tool has ended since.
    pub(crate) fn restored(&self) -> Result<FailedRestore, SandboxError> {
        match self.tell(&InitRequest::Restored, &[])? {
            (InitReply::Restored { errno, wrong_rights }, _) => {
                let filled = errno.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)));
                Ok(FailedRestore { filled, wrong_rights })
            }
            _ => Err(SandboxError::Ended(io::ErrorKind::InvalidData.into())),
        }
    }

    /// Returns the result of keeping the files in its `/dev/shm`, once the tool for it has ended.
    pub(crate) fn kept(&self) -> Result<io::Result<()>, SandboxError> {
        match self.tell(&InitRequest::Kept, &[])? {
            (InitReply::Kept { errno }, _) => {
                Ok(errno.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno))))
            }
            _ => Err(SandboxError::Ended(io::ErrorKind::InvalidData.into())),
        }
    }

    fn ask(&self, ask: &InitRequest, fds: &[BorrowedFd<'_>]) -> Result<SandboxTask, SandboxError> {
        match self.tell(ask, fds)? {
            (InitReply::Runs { pid }, fds) => {
                let mut fds = fds.into_iter();
                match (fds.next(), fds.next()) {
                    (Some(pidfd), Some(end)) => Ok(SandboxTask { pid, pidfd, end }),
                    _ => Err(SandboxError::Ended(io::ErrorKind::InvalidData.into())),
                }
            }
            (InitReply::NotRun { step, errno }, _) => {
                Err(SandboxError::Run { step, error: io::Error::from_raw_os_error(errno) })
            }
            _ => Err(SandboxError::Ended(io::ErrorKind::InvalidData.into())),
        }
    }

    fn tell(
        &self,
        ask: &InitRequest,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(InitReply, Vec<OwnedFd>), SandboxError> {
        let init = self.init.lock();
        let answered = channel::send(&*init, ask, fds)
            .and_then(|()| channel::receive_within::<InitReply>(&*init, RUN_TIMEOUT));
        drop(init);
        match answered {
            Ok(Some(told)) => Ok(told),
            Ok(None) => Err(SandboxError::Ended(io::ErrorKind::BrokenPipe.into())),
            // A late answer would be taken for the answer to the next request.
            Err(error) => {
                let _ = self.end();
                Err(SandboxError::Ended(error))
            }
        }
    }

    /// Its root directory.
    pub(crate) fn root(&self) -> &OwnedFd {
        &self.root
    }

    /// Makes a pipe for the output of a program in it: its end to read, and its end to write. It
    /// belongs to the tenant. So programs can open it again as `/dev/stdout`, and CRIU can give it
    /// to restored processes.
    pub fn pipe(&self) -> io::Result<(OwnedFd, OwnedFd)> {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        self.give(&write)?;
        Ok((read, write))
    }

    /// Makes a pipe for the input of a program in it: its end to read, and its end to write.
    pub fn pipe_in(&self) -> io::Result<(OwnedFd, OwnedFd)> {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        self.give(&read)?;
        Ok((read, write))
    }

    /// Makes a terminal of its own: its end for a client, and its end for a program.
    pub fn terminal(&self) -> io::Result<(OwnedFd, OwnedFd)> {
        let (ours, theirs) = terminal::open(self.root.as_fd())?;
        self.give(&theirs)?;
        Ok((ours, theirs))
    }

    /// Makes it the tenant's.
    fn give(&self, fd: &OwnedFd) -> io::Result<()> {
        let UnixIdentity { uid, gid } = self.identity;
        let (uid, gid) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
        Ok(rustix::fs::fchown(fd, Some(uid), Some(gid))?)
    }

    /// Kills all processes of the session that this one began, whether or not it still lives.
    pub fn end_session(&self, pid: u32) -> Result<(), SandboxError> {
        match self.tell(&InitRequest::EndSession { pid }, &[])? {
            (InitReply::SessionEnded, _) => Ok(()),
            _ => Err(SandboxError::Ended(io::ErrorKind::InvalidData.into())),
        }
    }

    /// Makes a socket in its network that a program can be given to listen on. It is bound to
    /// `path` on the node, at most 107 bytes long. The sandbox must not see that path. Connections
    /// there are queued, whether or not the program runs.
    pub fn listener(&self, path: &Path) -> io::Result<OwnedFd> {
        network::listener(self.pidfd.as_fd(), path)
    }

    /// As `listener`, on a port of its loopback. 0: a free one.
    pub fn port_listener(&self, port: u16) -> io::Result<OwnedFd> {
        network::port_listener(self.pidfd.as_fd(), port)
    }

    /// Makes non-blocking sockets that listen in its network at these addresses. A connection from
    /// the sandbox to such an address always arrives there, even if the address belongs to another
    /// host.
    pub fn outlets(&self, addresses: &[SocketAddr]) -> io::Result<Vec<OwnedFd>> {
        network::outlets(self.pidfd.as_fd(), addresses)
    }

    /// Captures every connection that a program in it makes to an address outside of its loopback.
    pub fn capture(&self) -> io::Result<NetworkCapture> {
        network::capture(self.pidfd.as_fd())
    }

    /// Connects to a listener in it, non-blocking. `WouldBlock`: its queue is full.
    pub fn connect(&self, address: &SandboxAddress) -> io::Result<OwnedFd> {
        network::connect(self.pidfd.as_fd(), self.root.as_fd(), self.identity.uid, address)
    }
}

/// Whether this process has no transparent huge pages, and so its programs have none.
fn has_small_pages() -> bool {
    rustix::thread::transparent_huge_pages_are_disabled().unwrap_or(false)
}

fn bytes(texts: &[OsString]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

fn variables(env: &[(OsString, OsString)]) -> Vec<Vec<u8>> {
    env.iter().map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat()).collect()
}
