//! The kernel calls of sandboxes that no safe wrapper has. These are forks of a process with one
//! thread, seccomp, mount attributes and kernel programs.
//!
//! Not here: their use (`birth`, `init`, `program`), calls of the keeper's own process
//! (`crate::sys`).
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::time::Duration;

use nagaya_keeper_api::protocol::ProcessExit;
use nix::libc;
use rustix::mount::MountAttrFlags;

use crate::sys::{CLONE_INTO_CGROUP, CloneArgs, block_signals, restore_signals};

/// Exit status of a child whose code panicked.
const EXIT_PANICKED: i32 = 101;

/// Namespaces that a sandbox has before it has a process (`namespaces`).
pub const NAMESPACES: u64 =
    (libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS)
        as u64;

/// Flags of its init: process numbers, and the parent that is notified of its end. Its cgroup
/// namespace begins in its cell.
pub const INIT: u64 = (libc::CLONE_NEWPID | libc::CLONE_PARENT) as u64;

/// Proof that this process has one thread, so that a fork of it is a whole process. No lock is held
/// by a thread that the child does not have. The processes that hold one never start a thread.
#[derive(Debug)]
pub struct SingleThreaded(PhantomData<*const ()>);

/// Options of a fork.
#[derive(Debug, Default)]
pub struct ForkOptions<'a> {
    /// `CLONE_*`.
    pub flags: u64,
    /// Its number in its innermost pid namespace. `None`: the next free one.
    pub pid: Option<i32>,
    /// The cgroup v2 directory it is born in.
    pub cgroup: Option<BorrowedFd<'a>>,
}

impl SingleThreaded {
    /// Returns `None` if the process has several threads.
    pub fn check() -> io::Result<Option<Self>> {
        let threads = std::fs::read_dir("/proc/self/task")?.count();
        Ok((threads == 1).then_some(Self(PhantomData)))
    }

    /// Runs `child` in a copy of this process, which ends with the returned status.
    pub fn fork(&self, how: &ForkOptions<'_>, child: impl FnOnce(&Self) -> u8) -> io::Result<(i32, OwnedFd)> {
        let mut pidfd: RawFd = -1;
        let pids = [how.pid.unwrap_or(0)];
        let mut args = CloneArgs {
            flags: how.flags | libc::CLONE_PIDFD as u64,
            pidfd: &raw mut pidfd as u64,
            exit_signal: libc::SIGCHLD as u64,
            ..CloneArgs::default()
        };
        if how.pid.is_some() {
            (args.set_tid, args.set_tid_size) = (pids.as_ptr() as u64, 1);
        }
        if let Some(cgroup) = how.cgroup {
            args.flags |= CLONE_INTO_CGROUP;
            args.cgroup = cgroup.as_raw_fd() as u64;
        }
        // SAFETY: without CLONE_VM and without a stack this is a fork: the child continues here
        // with a copy of all memory. This process has one thread (`SingleThreaded`), so nothing in
        // that memory is in use by another.
        let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) };
        match pid {
            ..0 => Err(io::Error::last_os_error()),
            0 => {
                // It must not return into the frames of its parent, not even by a panic.
                let status = catch_unwind(AssertUnwindSafe(|| child(self))).map_or(EXIT_PANICKED, i32::from);
                end(status)
            }
            // SAFETY: clone3 succeeded with CLONE_PIDFD, so it stored a new descriptor that nobody
            // else owns.
            _ => Ok((i32::try_from(pid).unwrap_or(i32::MAX), unsafe { OwnedFd::from_raw_fd(pidfd) })),
        }
    }

    /// Continues as another process, which takes over all memory as it is, and ends this one.
    /// Nothing is copied: a fork would copy memory that its parent then discards. Descriptors are
    /// the same, and nothing is dropped. After an error this is still the same process.
    ///
    /// `flags`: `CLONE_*`, with `CLONE_PARENT` among them, or nobody would be notified of its end.
    /// `cgroup`: as for a fork.
    pub fn go_on_as(&self, flags: u64, cgroup: Option<BorrowedFd<'_>>) -> io::Result<()> {
        // With CLONE_PARENT the child takes over this process' own signal for its end.
        let mut args = CloneArgs { flags: flags | libc::CLONE_VM as u64, ..CloneArgs::default() };
        if let Some(cgroup) = cgroup {
            args.flags |= CLONE_INTO_CGROUP;
            args.cgroup = cgroup.as_raw_fd() as u64;
        }
        let signals = block_signals();
        // SAFETY: `args` lives. This process has one thread (`SingleThreaded`), and all signals are
        // blocked, so that no handler runs on the stack that both have for a moment.
        let failed = unsafe { replace(&args) };
        restore_signals(&signals);
        if failed < 0 {
            Err(io::Error::from_raw_os_error(i32::try_from(-failed).unwrap_or(libc::EIO)))
        } else {
            Ok(())
        }
    }
}

/// `clone3` from which only the child returns, with 0. If it fails, the caller returns with a
/// negated errno.
///
/// # Safety
/// No other thread, and no handler of a signal, may run in this memory until it returns.
#[cfg(target_arch = "x86_64")]
unsafe fn replace(args: &CloneArgs) -> i64 {
    let result: i64;
    // SAFETY: the child shares memory and stack with the parent, which after the call only makes
    // one more, out of registers: it reads and writes no memory, and ends. So no two processes ever
    // use it. The kernel keeps all registers but rax, rcx and r11, and gives the child a copy of
    // them and the same thread-local storage.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jle 2f",
            "xor edi, edi",
            "mov eax, {exit_group}",
            "syscall",
            "ud2",
            "2:",
            exit_group = const libc::SYS_exit_group,
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") args,
            in("rsi") size_of::<CloneArgs>(),
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

/// # Safety
/// See the version for x86-64.
#[cfg(target_arch = "aarch64")]
unsafe fn replace(args: &CloneArgs) -> i64 {
    let result: i64;
    // SAFETY: as on x86-64; the kernel keeps all registers but x0.
    unsafe {
        std::arch::asm!(
            "svc #0",
            "cmp x0, #0",
            "b.le 2f",
            "mov x0, #0",
            "mov x8, #{exit_group}",
            "svc #0",
            "brk #1",
            "2:",
            exit_group = const libc::SYS_exit_group,
            inlateout("x0") args => result,
            in("x1") size_of::<CloneArgs>(),
            in("x8") libc::SYS_clone3,
        );
    }
    result
}

/// Gives this process real-time priority: it runs before all others without one, as soon as it can.
pub fn run_first() -> io::Result<()> {
    // 1 is the edge's thread that answers other nodes: what it is sent must not keep applications
    // from being frozen.
    let param = libc::sched_param { sched_priority: 2 };
    // SAFETY: `param` outlives the call.
    check(i64::from(unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const param) })).map(drop)
}

/// Locks the present memory of this process, and memory that it touches later. Untouched memory is
/// not loaded: see [`bring_in`].
pub fn stay_in_memory() -> io::Result<()> {
    // SAFETY: takes a number.
    let locked = unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) };
    check(i64::from(locked)).map(drop)
}

/// Loads this part of this process' memory, from disk or swap if it is there, and locks it.
pub fn bring_in((start, len): (usize, usize)) -> io::Result<()> {
    // SAFETY: the kernel takes a range of addresses, and changes nothing of what can be read there.
    check(i64::from(unsafe { libc::mlock(ptr::without_provenance(start), len) })).map(drop)
}

/// Ends this process at once, without exit handlers that its parent has registered.
pub fn end(status: i32) -> ! {
    // SAFETY: takes a number and does not return.
    unsafe { libc::_exit(status) }
}

/// Closes every descriptor but these. The owner of another descriptor must not use or drop it any
/// more. So it is only for a fresh child, which never returns to them.
pub fn close_all_but(keep: &mut [RawFd]) -> io::Result<()> {
    keep.sort_unstable();
    let mut first: libc::c_uint = 0;
    for fd in keep {
        let kept = libc::c_uint::try_from(*fd).unwrap_or(0);
        if kept > first {
            close_range(first, kept - 1)?;
        }
        first = kept + 1;
    }
    close_range(first, libc::c_uint::MAX)
}

fn close_range(first: libc::c_uint, last: libc::c_uint) -> io::Result<()> {
    // SAFETY: takes numbers; see the caller for who may call it.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) }).map(drop)
}

/// Makes `to` another name of `from`, which stays open over `execve`.
pub fn place(from: BorrowedFd<'_>, to: RawFd) -> io::Result<()> {
    // SAFETY: takes numbers. Any descriptor open at `to` is closed; see `close_all_but` for who may
    // do that.
    let placed = unsafe {
        match from.as_raw_fd() == to {
            true => libc::fcntl(to, libc::F_SETFD, 0),
            false => libc::dup2(from.as_raw_fd(), to),
        }
    };
    check(i64::from(placed)).map(drop)
}

/// Returns the descriptor of this number, which must be open while the process runs.
pub fn descriptor(number: RawFd) -> BorrowedFd<'static> {
    assert!(number >= 0, "a number of a descriptor");
    // SAFETY: the caller has just put it in place, in a process that is about to become another
    // program.
    unsafe { BorrowedFd::borrow_raw(number) }
}

/// Resets signals and all handlers to the state that a program expects.
pub fn default_signals() {
    /// Highest signal number on Linux.
    const SIGNAL_MAX: libc::c_int = 64;
    for signal in 1..=SIGNAL_MAX {
        // SAFETY: setting the default action runs none of our code. KILL and STOP cannot be set,
        // and have no handler.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// Ignores signals that end or stop a service, and lets the kernel reap children. Only for a
/// process that watches its children by other means.
pub fn ignore_signals(signals: &[libc::c_int]) {
    for signal in signals {
        // SAFETY: ignoring a signal runs none of our code.
        unsafe { libc::signal(*signal, libc::SIG_IGN) };
    }
}

/// Reaps a child that has ended. `None` if there is none at the moment.
pub fn reap_any() -> io::Result<Option<(u32, ProcessExit)>> {
    // SAFETY: all zero is a valid value of both plain structures, and the kernel writes into them.
    let (mut info, mut usage): (libc::siginfo_t, libc::rusage) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    let flags = libc::WEXITED | libc::WNOHANG | libc::__WALL;
    // SAFETY: both pointers are to live values of the right types.
    let result =
        unsafe { libc::syscall(libc::SYS_waitid, libc::P_ALL, 0, &raw mut info, flags, &raw mut usage) };
    match check(result) {
        Err(error) if error.raw_os_error() == Some(libc::ECHILD) => return Ok(None),
        result => result?,
    };
    // SAFETY: waitid fills the fields of SIGCHLD, or leaves the pid 0 where nothing ended.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    let exited = info.si_code == libc::CLD_EXITED;
    let micros = |time: libc::timeval| {
        u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000 + u64::try_from(time.tv_usec).unwrap_or(0)
    };
    let exit = ProcessExit {
        status: exited.then_some(status),
        signal: (!exited).then_some(status),
        cpu_us: micros(usage.ru_utime) + micros(usage.ru_stime),
        out_of_memory: false,
    };
    Ok(u32::try_from(pid).ok().filter(|pid| *pid > 0).map(|pid| (pid, exit)))
}

/// `struct mount_attr` of `mount_setattr(2)`.
#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    userns_fd: u64,
}

/// Adds attributes to a mount and takes it out of all propagation.
pub fn set_mount_attributes(mount: impl AsFd, attributes: MountAttrFlags) -> io::Result<()> {
    set_attributes(mount, attributes, libc::AT_EMPTY_PATH)
}

/// As `set_mount_attributes`, for a mount and all below it.
pub fn set_tree_attributes(mount: impl AsFd, attributes: MountAttrFlags) -> io::Result<()> {
    set_attributes(mount, attributes, libc::AT_EMPTY_PATH | libc::AT_RECURSIVE)
}

fn set_attributes(mount: impl AsFd, attributes: MountAttrFlags, flags: libc::c_int) -> io::Result<()> {
    let set = u64::from(attributes.bits());
    let attr = MountAttr { set, clear: 0, propagation: libc::MS_PRIVATE, userns_fd: 0 };
    // SAFETY: an open descriptor, a C text and a live structure of the given size.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attr,
            size_of::<MountAttr>(),
        )
    };
    check(result).map(drop)
}

/// Makes a cgroup namespace whose root is the cgroup of this process.
pub fn new_cgroup_namespace() -> io::Result<()> {
    // SAFETY: the flag changes which cgroups this process sees, and none of its descriptors.
    Ok(unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWCGROUP) }?)
}

/// Brings the loopback device of this network namespace up.
pub fn raise_loopback() -> io::Result<()> {
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?;
    // SAFETY: all zero is a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(*b"lo") {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: this request reads one `ifreq`, which lives.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) };
    check(i64::from(result)).map(drop)
}

/// Removes every capability from the bounding set: no program gets one back.
pub fn drop_bounding_capabilities() -> io::Result<()> {
    for capability in 0..64_u64 {
        // SAFETY: prctl with plain numbers.
        let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        match check(i64::from(result)) {
            // The first number that this kernel has no capability for.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
            result => result?,
        };
    }
    Ok(())
}

/// Drops the capabilities of this thread.
pub fn drop_capabilities() -> io::Result<()> {
    let none = rustix::thread::CapabilitySet::empty();
    let sets = rustix::thread::CapabilitySets { effective: none, permitted: none, inheritable: none };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

// === seccomp ===

/// One instruction of a filter.
pub type FilterInstruction = libc::sock_filter;

/// Sets a filter on this process for good. It needs `no_new_privs` or the capability.
pub fn install_filter(program: &[FilterInstruction]) -> io::Result<()> {
    seccomp(program, 0).map(drop)
}

/// As `install_filter`, for a filter that holds calls. They are answered through the returned
/// descriptor.
pub fn install_asking_filter(program: &[FilterInstruction]) -> io::Result<OwnedFd> {
    let fd = seccomp(program, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER)?;
    // SAFETY: with this flag a success is a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(RawFd::try_from(fd).unwrap_or(-1)) })
}

fn seccomp(program: &[FilterInstruction], flags: libc::c_ulong) -> io::Result<i64> {
    let len = libc::c_ushort::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    // SAFETY: the kernel copies the program, which lives, and changes nothing in it.
    check(unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program)
    })
}

/// A held system call, which waits for an answer.
#[derive(Debug, Clone, Copy)]
pub struct SeccompNotification {
    id: u64,
    /// Number of its caller.
    pub pid: i32,
    number: i32,
    pub args: [u64; 6],
}

impl SeccompNotification {
    /// Whether it is this request of `ptrace(2)`. Only the lower half counts, as in the kernel.
    pub fn is_ptrace(&self, request: u32) -> bool {
        i64::from(self.number) == libc::SYS_ptrace && self.args[0] & u64::from(u32::MAX) == u64::from(request)
    }
}

/// Returns the next held system call. `None` if its caller was killed meanwhile.
pub fn next_question(listener: &OwnedFd) -> io::Result<Option<SeccompNotification>> {
    // SAFETY: all zero is a valid value of the structure, and the kernel requires it.
    let mut question: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: this request fills one such structure, which lives.
    let result = unsafe {
        libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV as libc::Ioctl, &raw mut question)
    };
    match check(i64::from(result)) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
        result => result?,
    };
    let pid = i32::try_from(question.pid).unwrap_or(0);
    let (number, args) = (question.data.nr, question.data.args);
    Ok(Some(SeccompNotification { id: question.id, pid, number, args }))
}

/// Result of a held call.
#[derive(Debug, Clone, Copy)]
pub enum NotificationReply {
    Value(i64),
    Error(libc::c_int),
    /// The kernel's own result.
    GoOn,
}

/// Answers the next held call with the result of `decide`.
pub fn answer_next(
    listener: &OwnedFd,
    decide: impl FnOnce(&SeccompNotification) -> NotificationReply,
) -> io::Result<()> {
    let Some(question) = next_question(listener)? else { return Ok(()) };
    let decided = decide(&question);
    answer(listener, question, decided)
}

/// Answers a call, unless its caller was killed meanwhile.
pub fn answer(
    listener: &OwnedFd,
    question: SeccompNotification,
    answer: NotificationReply,
) -> io::Result<()> {
    match answer_question(listener, question, answer) {
        // Its caller was killed meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        answered => answered,
    }
}

/// Answers a call.
fn answer_question(
    listener: &OwnedFd,
    question: SeccompNotification,
    answer: NotificationReply,
) -> io::Result<()> {
    let (val, error, flags) = match answer {
        NotificationReply::Value(value) => (value, 0, 0),
        NotificationReply::Error(errno) => (0, -errno, 0),
        NotificationReply::GoOn => (0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
    };
    let mut response = libc::seccomp_notif_resp { id: question.id, val, error, flags };
    // SAFETY: this request reads one such structure, which lives.
    let result = unsafe {
        libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND as libc::Ioctl, &raw mut response)
    };
    check(i64::from(result)).map(drop)
}

/// Writes into another process' memory.
pub fn write_memory(pid: i32, address: u64, bytes: &[u8]) -> io::Result<()> {
    let ours = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let theirs = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: bytes.len() };
    // SAFETY: the kernel reads our bytes, which live, and writes to the other process only.
    let written = unsafe { libc::process_vm_writev(pid, &raw const ours, 1, &raw const theirs, 1, 0) };
    match usize::try_from(written) {
        Ok(len) if len == bytes.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Returns the bytes of a filter in the format of `ptrace`.
pub fn filter_bytes(program: &[FilterInstruction]) -> Vec<u8> {
    let bytes = |one: &FilterInstruction| {
        let mut bytes = [0; 8];
        bytes[..2].copy_from_slice(&one.code.to_ne_bytes());
        (bytes[2], bytes[3]) = (one.jt, one.jf);
        bytes[4..].copy_from_slice(&one.k.to_ne_bytes());
        bytes
    };
    program.iter().flat_map(bytes).collect()
}

// === bpf ===

/// Commands, kinds and places of `bpf(2)` (`linux/bpf.h`).
const BPF_MAP_CREATE: libc::c_long = 0;
const BPF_MAP_UPDATE_ELEM: libc::c_long = 2;
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_MAP_TYPE_SOCKMAP: u32 = 15;
const BPF_PROG_TYPE_SK_LOOKUP: u32 = 30;
const BPF_SK_LOOKUP: u32 = 36;

/// The attributes of these commands, as far as they are used: the kernel takes the rest for 0.
#[repr(C)]
struct MapCreate {
    kind: u32,
    key_len: u32,
    value_len: u32,
    entries: u32,
}

#[repr(C)]
struct MapUpdate {
    map: u64,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Default)]
struct ProgramLoad {
    kind: u32,
    count: u32,
    instructions: u64,
    licence: u64,
    log: [u64; 2],
    version_and_flags: u64,
    name: [u64; 2],
    device: u32,
    attaches_as: u32,
}

#[repr(C)]
struct LinkCreate {
    program: u32,
    target: u32,
    attaches_as: u32,
    flags: u32,
}

fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<i64> {
    // SAFETY: the kernel reads this many bytes of the attributes; the memory they point to lives as
    // long as they do.
    check(unsafe { libc::syscall(libc::SYS_bpf, command, ptr::from_ref(attributes), size_of::<T>()) })
}

fn new_fd(fd: i64) -> OwnedFd {
    // SAFETY: these commands return a new descriptor that nobody else owns.
    unsafe { OwnedFd::from_raw_fd(RawFd::try_from(fd).unwrap_or(-1)) }
}

fn number_of(fd: impl AsFd) -> u32 {
    u32::try_from(fd.as_fd().as_raw_fd()).expect("an open descriptor")
}

/// Makes a map of sockets for kernel programs, with this one in it.
pub fn socket_map(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let create = MapCreate { kind: BPF_MAP_TYPE_SOCKMAP, key_len: 4, value_len: 8, entries: 1 };
    let map = new_fd(bpf(BPF_MAP_CREATE, &create)?);
    let (key, value) = (0_u32, u64::from(number_of(socket)));
    let mut number = [0; 8];
    number[..4].copy_from_slice(&number_of(&map).to_ne_bytes());
    let (key, value) = (&raw const key as u64, &raw const value as u64);
    bpf(BPF_MAP_UPDATE_ELEM, &MapUpdate { map: u64::from_ne_bytes(number), key, value, flags: 0 })?;
    Ok(map)
}

/// Loads a program that chooses the socket of a new connection, checked by the kernel.
pub fn lookup_program(instructions: &[u64]) -> io::Result<OwnedFd> {
    let load = ProgramLoad {
        kind: BPF_PROG_TYPE_SK_LOOKUP,
        count: u32::try_from(instructions.len()).unwrap_or(u32::MAX),
        instructions: instructions.as_ptr() as u64,
        licence: c"Apache-2.0".as_ptr() as u64,
        attaches_as: BPF_SK_LOOKUP,
        ..ProgramLoad::default()
    };
    bpf(BPF_PROG_LOAD, &load).map(new_fd)
}

/// Attaches it to a network, while the descriptor is open.
pub fn attach_lookup(program: BorrowedFd<'_>, network: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let (program, target) = (number_of(program), number_of(network));
    bpf(BPF_LINK_CREATE, &LinkCreate { program, target, attaches_as: BPF_SK_LOOKUP, flags: 0 }).map(new_fd)
}

/// Converts a time for `poll`.
pub fn timespec(time: Duration) -> rustix::event::Timespec {
    let tv_sec = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    rustix::event::Timespec { tv_sec, tv_nsec: time.subsec_nanos().into() }
}

fn check(result: i64) -> io::Result<i64> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
