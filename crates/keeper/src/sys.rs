//! The kernel calls no safe wrapper has: acting as a tenant on one thread, starting a program,
//! reaping it.
//!
//! Not here: the programs and their owners (`spawn`), the cells that hold them (`cells`).
//!
//! Programs are started by `clone3` with `CLONE_VM | CLONE_VFORK`. Measured with the same calls
//! from C, on 2 busy cores, median of 400 starts of `/bin/true`: with 100 MB of touched heap the
//! call takes 0.07 ms against 0.9 ms for `fork`, which copies the page tables, and each page
//! written afterwards faults; with 5 MB 0.07 ms against 0.10 ms. `posix_spawn` does the same and
//! can neither drop rights nor join a cgroup.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use nagaya_keeper_api::protocol::ProcessExit;
use nix::libc;

/// Stack of a child between `clone3` and `execve`, in bytes. It runs one function of shallow calls.
const CHILD_STACK_LEN: usize = 64 * 1024;

/// Highest signal number on Linux.
const SIGNAL_MAX: libc::c_int = 64;

/// The kernel's `struct sigaction` of the default action: no handler, no flags, an empty mask.
static DEFAULT: [u64; 4] = [0; 4];

/// Exit status of a child that could not become its program. The shell uses it for "command not
/// found".
const EXIT_NOT_STARTED: libc::c_int = 127;

/// Uid and gid of a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UnixIdentity {
    pub uid: u32,
    pub gid: u32,
}

/// How a child enters its cell. Both ways apply where some controllers are of cgroup v1. Without
/// any, it has only its own process group.
#[derive(Debug, Clone, Default)]
pub struct CellEntrance {
    /// It is born in this cgroup v2 directory.
    pub born: Option<Arc<OwnedFd>>,
    /// It writes itself into these cgroup v1 `tasks` files before anything else.
    pub tasks: Vec<Arc<OwnedFd>>,
}

/// Everything that a child needs. It is made before the child exists, which may not allocate
/// between `clone3` and `execve`.
#[derive(Debug)]
pub struct ExecPlan<'a> {
    /// Tried in this order until one exists.
    pub programs: &'a [CString],
    pub args: &'a [CString],
    pub env: &'a [CString],
    pub directory: &'a CStr,
    /// `None`: keep the keeper's own uid, which is not root then.
    pub identity: Option<UnixIdentity>,
    pub stdio: [BorrowedFd<'a>; 3],
    /// A socket to listen on, which it gets as descriptor 3. Not among the standard three.
    pub listener: Option<BorrowedFd<'a>>,
    pub entrance: CellEntrance,
    /// Entered in this order, before its rights are given up.
    pub namespaces: &'a [BorrowedFd<'a>],
    pub open_files_max: u64,
    /// Decides about each system call from its first instruction on. Empty for no filter.
    pub filter: &'a [libc::sock_filter],
}

/// A program that was started.
#[derive(Debug)]
pub struct SpawnedChild {
    pub pid: rustix::process::Pid,
    pub pidfd: OwnedFd,
}

impl SpawnedChild {
    /// Kills it and waits until it has ended. For a child that nobody else reaps.
    pub fn end(&self) {
        // A process that has ended already is as good.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, rustix::process::Signal::KILL);
        let _ = reap(self.pidfd.as_raw_fd(), 0);
    }
}

/// The step on the way to the program at which a child failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpawnStep {
    Clone,
    Fence,
    Descriptors,
    Limits,
    Identity,
    Directory,
    Program,
    Namespaces,
    Filter,
}

#[derive(Debug, thiserror::Error)]
#[error("{step:?}: {error}")]
pub struct SpawnError {
    pub step: SpawnStep,
    pub error: io::Error,
}

/// Memory that the child reads and, if it fails, writes. The child shares the keeper's memory while
/// the thread that made it is stopped.
struct ChildShared<'a> {
    image: &'a ExecPlan<'a>,
    programs: Vec<*const libc::c_char>,
    args: Vec<*const libc::c_char>,
    env: Vec<*const libc::c_char>,
    parent: libc::pid_t,
    step: AtomicI32,
    errno: AtomicI32,
}

/// Starts a program and returns when it runs. Blocks the thread until then. The thread must outlive
/// the program, because a child is killed when the thread that made it ends.
pub fn spawn(image: &ExecPlan<'_>) -> Result<SpawnedChild, SpawnError> {
    let pointers = |list: &[CString]| {
        list.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect::<Vec<*const libc::c_char>>()
    };
    let shared = ChildShared {
        image,
        programs: pointers(image.programs),
        args: pointers(image.args),
        env: pointers(image.env),
        // SAFETY: getpid has no preconditions.
        parent: unsafe { libc::getpid() },
        step: AtomicI32::new(-1),
        errno: AtomicI32::new(0),
    };
    let signals = block_signals();
    let cloned = clone_child(&shared);
    restore_signals(&signals);
    let child = cloned.map_err(|error| SpawnError { step: SpawnStep::Clone, error })?;
    let step = shared.step.load(Ordering::Relaxed);
    if step < 0 {
        return Ok(child);
    }
    // It has exited already. Reaping it here leaves only one error to report. Its status says
    // nothing new.
    let _ = reap(child.pidfd.as_raw_fd(), 0);
    Err(SpawnError {
        step: STEPS[usize::try_from(step).expect("checked above")],
        error: io::Error::from_raw_os_error(shared.errno.load(Ordering::Relaxed)),
    })
}

const STEPS: [SpawnStep; 8] = [
    SpawnStep::Fence,
    SpawnStep::Descriptors,
    SpawnStep::Limits,
    SpawnStep::Identity,
    SpawnStep::Directory,
    SpawnStep::Program,
    SpawnStep::Namespaces,
    SpawnStep::Filter,
];

/// `struct clone_args` of `clone3(2)`, up to the field of Linux 5.7.
#[repr(C)]
#[derive(Default)]
pub(crate) struct CloneArgs {
    pub flags: u64,
    pub pidfd: u64,
    pub child_tid: u64,
    pub parent_tid: u64,
    pub exit_signal: u64,
    pub stack: u64,
    pub stack_size: u64,
    pub tls: u64,
    pub set_tid: u64,
    pub set_tid_size: u64,
    pub cgroup: u64,
}

pub(crate) const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

fn clone_child(shared: &ChildShared<'_>) -> io::Result<SpawnedChild> {
    // Left uninitialised on purpose: touching 64 KiB for each child would cost more than the
    // stack's use.
    let mut stack = Vec::<u8>::with_capacity(CHILD_STACK_LEN);
    let base = (stack.as_mut_ptr() as usize).next_multiple_of(16);
    let mut pidfd: RawFd = -1;
    let mut args = CloneArgs {
        flags: (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD) as u64,
        pidfd: &raw mut pidfd as u64,
        exit_signal: libc::SIGCHLD as u64,
        stack: base as u64,
        stack_size: (CHILD_STACK_LEN - 16) as u64,
        ..CloneArgs::default()
    };
    if let Some(cgroup) = &shared.image.entrance.born {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: `args` is a valid clone_args with a stack that lives until the child has left it:
    // with CLONE_VFORK this thread resumes only after the child exec'd or exited. `become_program`
    // never returns, reads `shared` (alive for the same reason) and writes only its atomics.
    let pid = unsafe { clone3(&args, shared) };
    if pid < 0 {
        return Err(io::Error::from_raw_os_error(i32::try_from(-pid).unwrap_or(libc::EIO)));
    }
    // SAFETY: clone3 succeeded with CLONE_PIDFD, so it stored a new descriptor that nobody else
    // owns.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    Ok(SpawnedChild { pid: pid.expect("the kernel numbers processes from 1"), pidfd })
}

/// The system call itself. In the parent it returns the child's pid or a negated errno. The child
/// begins on its own stack and never comes back. No C library wraps `clone3`. A wrapped `syscall()`
/// cannot be used, because the child has no frame to return to on a new stack.
///
/// # Safety
/// As for `clone3` with `CLONE_VM`: `args` names a stack that outlives the child's use of it,
/// `shared` outlives the child's use of it.
#[cfg(target_arch = "x86_64")]
unsafe fn clone3(args: &CloneArgs, shared: &ChildShared<'_>) -> i64 {
    let result: i64;
    // SAFETY: the kernel keeps all registers but rax, rcx and r11. The child has rax = 0, a stack
    // aligned to 16 bytes as a call needs it, and calls a function that does not return.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") args,
            in("rsi") size_of::<CloneArgs>(),
            in("r12") shared,
            in("r13") become_program as unsafe extern "C" fn(&ChildShared<'_>) -> !,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

/// # Safety
/// See the version for x86-64.
#[cfg(target_arch = "aarch64")]
unsafe fn clone3(args: &CloneArgs, shared: &ChildShared<'_>) -> i64 {
    let result: i64;
    // SAFETY: the kernel keeps all registers but x0. The child has x0 = 0 and calls a function that
    // does not return.
    unsafe {
        std::arch::asm!(
            "svc #0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x0, x9",
            "blr x10",
            "brk #1",
            "2:",
            inlateout("x0") args => result,
            in("x1") size_of::<CloneArgs>(),
            in("x8") libc::SYS_clone3,
            in("x9") shared,
            in("x10") become_program as unsafe extern "C" fn(&ChildShared<'_>) -> !,
            lateout("x30") _,
        );
    }
    result
}

/// The child, from its first instruction to its program. Only system calls: it shares memory, and
/// so every lock another thread of the keeper may hold.
///
/// While it shares memory it already runs under the tenant's uid for some microseconds. The kernel
/// makes a process that changed its uid non-dumpable, so no other process of the tenant can look
/// into it, and all signals stay blocked until none has a handler left.
///
/// # Safety
/// Only `clone3` may enter it: it ends the calling process.
unsafe extern "C" fn become_program(shared: &ChildShared<'_>) -> ! {
    // SAFETY: each call has valid arguments made before the clone; none allocates or locks.
    unsafe {
        let failed = run_steps(shared);
        shared.errno.store(*libc::__errno_location(), Ordering::Relaxed);
        shared.step.store(failed, Ordering::Relaxed);
        libc::_exit(EXIT_NOT_STARTED)
    }
}

/// Returns the index in `STEPS` of the step that failed. A success does not return.
///
/// # Safety
/// In a fresh child only: it gives up descriptors and rights.
unsafe fn run_steps(shared: &ChildShared<'_>) -> libc::c_int {
    let image = shared.image;
    // SAFETY: plain system calls on values that outlive them; see `become_program`.
    unsafe {
        // The kernel's own call: the C library's refuses the two signals that it reserves.
        for signal in 1..=SIGNAL_MAX {
            // KILL and STOP cannot be set, and have no handler either.
            libc::syscall(libc::SYS_rt_sigaction, signal, &raw const DEFAULT, ptr::null_mut::<u8>(), 8usize);
        }
        for tasks in &image.entrance.tasks {
            if libc::write(tasks.as_raw_fd(), b"0".as_ptr().cast(), 1) != 1 {
                return 0;
            }
        }
        for namespace in image.namespaces {
            if libc::setns(namespace.as_raw_fd(), 0) < 0 {
                return 6;
            }
        }
        // Its own process group, in the keeper's session. With a session of its own, the
        // scheduler's autogroups would give each worker the share of a whole login (sched(7)). The
        // edge would starve between them.
        libc::setpgid(0, 0);
        for (target, source) in (0..).zip(&image.stdio) {
            if libc::dup2(source.as_raw_fd(), target) < 0 {
                return 1;
            }
        }
        if let Some(listener) = &image.listener
            && !move_to(listener.as_raw_fd(), 3)
        {
            return 1;
        }
        let first = if image.listener.is_some() { 4u32 } else { 3u32 };
        if libc::syscall(libc::SYS_close_range, first, u32::MAX, 0u32) < 0 {
            return 1;
        }
        libc::syscall(libc::SYS_umask, 0o022);
        if !set_limit(libc::RLIMIT_CORE, 0) || !set_limit(libc::RLIMIT_NOFILE, image.open_files_max) {
            return 2;
        }
        if !take_identity(image.identity, shared.parent) {
            return 3;
        }
        if libc::chdir(image.directory.as_ptr()) < 0 {
            return 4;
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
        // Last, because a program may not do all of the earlier steps.
        if !put_on_filter(image.filter) {
            return 7;
        }
        for program in &shared.programs[..image.programs.len()] {
            libc::execve(*program, shared.args.as_ptr(), shared.env.as_ptr());
            if *libc::__errno_location() != libc::ENOENT {
                break;
            }
        }
        5
    }
}

/// Gives a descriptor this number, for the program to keep.
///
/// # Safety
/// In a fresh child only: it closes the descriptor that has the number now.
unsafe fn move_to(fd: RawFd, number: RawFd) -> bool {
    // SAFETY: plain system calls on numbers.
    unsafe {
        // A descriptor that is moved to itself would keep its close-on-exec flag.
        if fd == number { libc::fcntl(fd, libc::F_SETFD, 0) == 0 } else { libc::dup2(fd, number) == number }
    }
}

/// # Safety
/// In a fresh child only.
unsafe fn set_limit(resource: libc::__rlimit_resource_t, most: u64) -> bool {
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: `limit` outlives the call.
    unsafe { libc::syscall(libc::SYS_setrlimit, resource, &raw const limit) == 0 }
}

/// Uses the raw calls, not the C library's: its wrappers change every thread they find in the
/// shared memory.
///
/// # Safety
/// In a fresh child only.
unsafe fn take_identity(identity: Option<UnixIdentity>, parent: libc::pid_t) -> bool {
    // SAFETY: plain system calls without pointers.
    unsafe {
        if let Some(UnixIdentity { uid, gid }) = identity
            && (libc::syscall(libc::SYS_setgroups, 0, ptr::null::<u32>()) < 0
                || libc::syscall(libc::SYS_setresgid, gid, gid, gid) < 0
                || libc::syscall(libc::SYS_setresuid, uid, uid, uid) < 0)
        {
            return false;
        }
        // After the change of uid, which clears it.
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) == 0
            // If the keeper died before that line, there is no one left to send the signal.
            && libc::getppid() == parent
    }
}

/// After `no_new_privs`, without which it takes a capability (seccomp(2)). Takes the kernel about
/// 0.1 ms for the list of `sandbox::filter`, which it compiles.
///
/// # Safety
/// In a fresh child only: the filter stays for good.
unsafe fn put_on_filter(filter: &[libc::sock_filter]) -> bool {
    let Ok(len) = libc::c_ushort::try_from(filter.len()) else { return false };
    if len == 0 {
        return true;
    }
    let program = libc::sock_fprog { len, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the kernel copies the program, which outlives the call, and changes nothing in it.
    unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) == 0 }
}

pub(crate) fn block_signals() -> libc::sigset_t {
    // SAFETY: both sets live on this stack and are written before they are read.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    }
}

pub(crate) fn restore_signals(before: &libc::sigset_t) {
    // SAFETY: `before` is the set `block_signals` returned.
    unsafe {
        libc::pthread_sigmask(libc::SIG_SETMASK, before, ptr::null_mut());
    }
}

/// Returns how an ended child ended, and its use. Blocks unless `WNOHANG` is among the flags.
/// `None` while it runs.
fn reap(pidfd: RawFd, flags: libc::c_int) -> io::Result<Option<ProcessExit>> {
    // SAFETY: all zero is a valid value of both plain structures, and the kernel writes into them.
    let (mut info, mut usage): (libc::siginfo_t, libc::rusage) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // The C library's waitid has no parameter for the usage. SAFETY: both pointers are to live
    // values of the right types.
    let result = unsafe {
        libc::syscall(
            libc::SYS_waitid,
            libc::P_PIDFD,
            pidfd,
            &raw mut info,
            libc::WEXITED | flags,
            &raw mut usage,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: waitid fills the fields of SIGCHLD, or leaves the pid 0 where nothing ended.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    if pid == 0 {
        return Ok(None);
    }
    let exited = info.si_code == libc::CLD_EXITED;
    Ok(Some(ProcessExit {
        status: exited.then_some(status),
        signal: (!exited).then_some(status),
        cpu_us: micros(usage.ru_utime) + micros(usage.ru_stime),
        out_of_memory: false,
    }))
}

/// Returns how the child behind this descriptor ended. `None` while it runs.
pub fn try_reap(pidfd: BorrowedFd<'_>) -> io::Result<Option<ProcessExit>> {
    reap(pidfd.as_raw_fd(), libc::WNOHANG)
}

fn micros(time: libc::timeval) -> u64 {
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000 + u64::try_from(time.tv_usec).unwrap_or(0)
}

/// Runs `look` with the tenant's rights on files, on this thread alone, and returns to the
/// keeper's.
///
/// # Panics
/// Never. A thread that cannot return to the keeper's rights ends the process: it would act with
/// one tenant's rights for another.
pub fn as_tenant<R>(identity: Option<UnixIdentity>, look: impl FnOnce() -> R) -> io::Result<R> {
    let Some(UnixIdentity { uid, gid }) = identity else { return Ok(look()) };
    let groups = own_groups()?;
    let back = RightsRestore { groups };
    // SAFETY: no pointers but a null one for an empty list. The raw call changes this thread alone.
    if unsafe { libc::syscall(libc::SYS_setgroups, 0, ptr::null::<u32>()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: these calls take numbers, change this thread alone, and show their success only when
    // the value is read back.
    let taken = unsafe {
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsuid, uid);
        libc::syscall(libc::SYS_setfsgid, u32::MAX) == i64::from(gid)
            && libc::syscall(libc::SYS_setfsuid, u32::MAX) == i64::from(uid)
    };
    if !taken {
        return Err(io::Error::from_raw_os_error(libc::EPERM));
    }
    let result = look();
    drop(back);
    Ok(result)
}

/// Restores the keeper's own rights, also when `look` panics.
struct RightsRestore {
    groups: Vec<u32>,
}

impl Drop for RightsRestore {
    fn drop(&mut self) {
        // SAFETY: numbers, and a list that outlives the call.
        let back = unsafe {
            let (uid, gid) = (libc::geteuid(), libc::getegid());
            libc::syscall(libc::SYS_setfsuid, uid);
            libc::syscall(libc::SYS_setfsgid, gid);
            libc::syscall(libc::SYS_setgroups, self.groups.len(), self.groups.as_ptr()) == 0
                && libc::syscall(libc::SYS_setfsuid, u32::MAX) == i64::from(uid)
                && libc::syscall(libc::SYS_setfsgid, u32::MAX) == i64::from(gid)
        };
        if !back {
            std::process::abort();
        }
    }
}

fn own_groups() -> io::Result<Vec<u32>> {
    let groups = nix::unistd::getgroups().map_err(io::Error::from)?;
    Ok(groups.into_iter().map(nix::unistd::Gid::as_raw).collect())
}

/// Keeps other processes, above all tenants', from reading the keeper's memory.
pub fn forbid_dumping() -> io::Result<()> {
    // SAFETY: prctl with plain numbers.
    if unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Parses a line of `/proc/<pid>/maps`, `start-end perms offset device inode path` (proc(5)).
/// Returns start and length of the mapping, and the rest of the line.
pub fn mapping(line: &str) -> Option<((usize, usize), &str)> {
    let (area, rest) = line.split_once(' ')?;
    let (start, end) = area.split_once('-')?;
    let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    Some(((start, end.checked_sub(start)?), rest))
}

/// A right on a file or directory that is checked before it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessRight {
    Read,
    /// Of a directory: to go through it. Of a file: to execute it.
    Search,
    /// Of a directory: to read the names in it, and to go through it.
    List,
}

impl AccessRight {
    fn mode(self) -> libc::c_int {
        match self {
            Self::Read => libc::R_OK,
            Self::Search => libc::X_OK,
            Self::List => libc::R_OK | libc::X_OK,
        }
    }
}

/// Whether this thread, with its present rights on files, has this right on this file. The wrappers
/// of the C library and others check the real uid's rights if it equals the effective one. Here
/// that is root's.
pub fn check_access(file: BorrowedFd<'_>, access: AccessRight) -> io::Result<()> {
    let flags = libc::AT_EACCESS | libc::AT_EMPTY_PATH;
    // SAFETY: an open descriptor, a C text that outlives the call, and numbers.
    let result =
        unsafe { libc::syscall(libc::SYS_faccessat2, file.as_raw_fd(), c"".as_ptr(), access.mode(), flags) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// `linux/sockios.h` of Linux: for a Unix stream socket, the sent bytes that the other end has not
/// read. The kernel's own cost of them is included.
const SIOCOUTQ: libc::c_ulong = 0x5411;

/// Whether the other end of a Unix stream socket has read all that was sent, or is closed. If it
/// was closed with something unread, the socket's error is `ECONNRESET` before this is true
/// (`unix_release_sock`).
pub fn is_all_read(socket: &impl AsRawFd) -> io::Result<bool> {
    let mut queued: libc::c_int = 0;
    // SAFETY: SIOCOUTQ writes one C int, which outlives the call.
    if unsafe { libc::ioctl(socket.as_raw_fd(), SIOCOUTQ, &raw mut queued) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // While the kernel wakes the sender, it still counts one byte of the data that was read
    // (`sock_wfree`). Each piece in the queue costs hundreds.
    Ok(queued <= 1)
}
