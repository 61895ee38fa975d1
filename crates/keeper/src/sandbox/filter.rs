//! The system calls that tenants' programs may make, in a sandbox and as CGI or PHP. These are the
//! filters and their assembly.
//!
//! The list is Docker's default profile (moby, `profiles/seccomp/default.json`), as facts, for a
//! process without any capability. It leaves out calls that an image could not carry (asynchronous
//! I/O of both kinds, MPTCP, secret memory) and calls that reach into other processes. CGI programs
//! and PHP workers are never in an image, and may do asynchronous I/O of the older kind. Not here:
//! setting it (`kernel`, `sys`), the processes that get it (`program`, `spawn`), memory mapped from
//! an image's file (`mapped_memory_filter`).

use std::sync::LazyLock;

use nix::libc;

use super::kernel::FilterInstruction;

/// Treatment of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallAction {
    Allow,
    /// `EPERM`.
    Refuse,
    /// `ENOSYS`: programs that can do without then do.
    Missing,
    /// Only without a new namespace among its flags.
    Clone,
    /// Only of families that end in the sandbox.
    Socket,
    /// As `Socket`, without MPTCP, which no image can carry. Go listens by it where it can, and by
    /// TCP where it cannot.
    SocketInImage,
    /// Only those of plain Linux.
    Personality,
}

/// Numbers from here on are newer than this list.
const FIRST_UNKNOWN: u32 = 463;

pub const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
pub const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
pub const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
pub const IF_AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
pub const IF_ANY_BIT: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;

/// Offsets in `struct seccomp_data`: the number, the architecture, the lower half of an argument
/// (little endian).
pub const NUMBER: u32 = 0;
pub const ARCHITECTURE: u32 = 4;
pub const fn argument(index: u32) -> u32 {
    16 + 8 * index
}

/// `AUDIT_ARCH_*` of `linux/audit.h`.
#[cfg(target_arch = "x86_64")]
pub const OURS: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
pub const OURS: u32 = 0xC000_00B7;

/// All `CLONE_NEW*` that `clone` takes.
const NEW_NAMESPACES: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32;

const FAMILIES: [libc::c_int; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// As in Docker's list: Linux, 32-bit Linux, each with `UNAME26`, and the query of the present one.
const PERSONALITIES: [u32; 5] = [0, 0x8, 0x20000, 0x20008, u32::MAX];

/// Returns the filter of tenants' programs in sandboxes.
pub fn of_tenants() -> Vec<FilterInstruction> {
    of_list(&[], of, errno)
}

/// Returns the filter of CGI programs and PHP workers, assembled once for all.
pub fn of_programs() -> &'static [FilterInstruction] {
    static FILTER: LazyLock<Vec<FilterInstruction>> = LazyLock::new(|| of_list(&[], of_program, errno));
    &FILTER
}

/// Assembles the list into a filter. `refuse` gives the treatment of forbidden calls, by their
/// error. `before` comes first and finds the number loaded.
fn of_list(
    before: &[FilterInstruction],
    list: fn(libc::c_long) -> CallAction,
    refuse: fn(libc::c_int) -> FilterInstruction,
) -> Vec<FilterInstruction> {
    let mut program = vec![
        op(LOAD, ARCHITECTURE),
        jump(IF_EQUAL, OURS, 1, 0),
        op(RETURN, libc::SECCOMP_RET_KILL_PROCESS),
        op(LOAD, NUMBER),
    ];
    program.extend_from_slice(before);
    program.extend(search(&boundaries(list), refuse));
    program
}

/// Allows everything, and holds three calls of `ptrace` that the kernel reserves for root of the
/// node. They read filters and their metadata, and suspend them. It also holds the call that
/// releases a process. At that call all of them are still stopped.
pub fn of_checkpoints() -> Vec<FilterInstruction> {
    let ptrace = u32::try_from(libc::SYS_ptrace).unwrap_or(0);
    vec![
        op(LOAD, NUMBER),
        jump(IF_EQUAL, ptrace, 0, 7),
        op(LOAD, argument(0)),
        jump(IF_EQUAL, PTRACE_SECCOMP_GET_FILTER, 6, 0),
        jump(IF_EQUAL, PTRACE_SECCOMP_GET_METADATA, 5, 0),
        jump(IF_EQUAL, PTRACE_DETACH, 4, 0),
        jump(IF_EQUAL, PTRACE_SETOPTIONS, 0, 2),
        op(LOAD, argument(3)),
        jump(IF_ANY_BIT, PTRACE_O_SUSPEND_SECCOMP, 1, 0),
        op(RETURN, libc::SECCOMP_RET_ALLOW),
        op(RETURN, libc::SECCOMP_RET_USER_NOTIF),
    ]
}

/// Allows the calls that the filter of tenants allows, and holds everything else. A tool that
/// restores processes works behind it, and they inherit it: see `restoring`. When nobody answers
/// any more, the kernel refuses held calls (`ENOSYS`).
///
/// It holds the requests of `ptrace` that begin or end tracing. All others fail without a traced
/// process (`ESRCH`, ptrace(2)). So only the tool gains anything from them, which makes a few dozen
/// for each thread.
pub fn of_restores() -> Vec<FilterInstruction> {
    let ptrace = u32::try_from(libc::SYS_ptrace).unwrap_or(0);
    let ask = op(RETURN, libc::SECCOMP_RET_USER_NOTIF);
    let about_ptrace = [
        jump(IF_EQUAL, ptrace, 0, 7),
        op(LOAD, argument(0)),
        jump(IF_EQUAL, PTRACE_TRACEME, 4, 0),
        jump(IF_EQUAL, PTRACE_ATTACH, 3, 0),
        jump(IF_EQUAL, PTRACE_SEIZE, 2, 0),
        jump(IF_EQUAL, PTRACE_DETACH, 1, 0),
        op(RETURN, libc::SECCOMP_RET_ALLOW),
        ask,
    ];
    of_list(&about_ptrace, of, |_| op(RETURN, libc::SECCOMP_RET_USER_NOTIF))
}

/// Requests of `ptrace(2)`.
pub const PTRACE_TRACEME: u32 = 0;
pub const PTRACE_ATTACH: u32 = 16;
pub const PTRACE_DETACH: u32 = 17;
pub const PTRACE_SETOPTIONS: u32 = 0x4200;
pub const PTRACE_SEIZE: u32 = 0x4206;
pub const PTRACE_SECCOMP_GET_FILTER: u32 = 0x420C;
pub const PTRACE_SECCOMP_GET_METADATA: u32 = 0x420D;
pub const PTRACE_O_SUSPEND_SECCOMP: u32 = 1 << 21;

pub const fn op(code: u16, k: u32) -> FilterInstruction {
    FilterInstruction { code, jt: 0, jf: 0, k }
}

/// Makes a jump. Offsets count from the next instruction.
pub const fn jump(code: u16, k: u32, jt: u8, jf: u8) -> FilterInstruction {
    FilterInstruction { code, jt, jf, k }
}

fn errno(errno: libc::c_int) -> FilterInstruction {
    op(RETURN, libc::SECCOMP_RET_ERRNO | errno.unsigned_abs())
}

/// Returns the first number of each run of numbers with one action. The first run begins at 0.
fn boundaries(list: fn(libc::c_long) -> CallAction) -> Vec<(u32, CallAction)> {
    let mut all: Vec<(u32, CallAction)> = Vec::new();
    for number in 0..=FIRST_UNKNOWN {
        let action = if number == FIRST_UNKNOWN { CallAction::Missing } else { list(number.into()) };
        if all.last().is_none_or(|(_, before)| *before != action) {
            all.push((number, action));
        }
    }
    all
}

fn of(number: libc::c_long) -> CallAction {
    match number {
        libc::SYS_clone => CallAction::Clone,
        libc::SYS_socket => CallAction::SocketInImage,
        libc::SYS_personality => CallAction::Personality,
        _ if MISSING.contains(&number) || ASYNC_IO.contains(&number) => CallAction::Missing,
        _ if ALLOWED.contains(&number) || ALLOWED_OF_ARCHITECTURE.contains(&number) => CallAction::Allow,
        _ => CallAction::Refuse,
    }
}

/// Returns the action for a program that is never in an image.
fn of_program(number: libc::c_long) -> CallAction {
    match number {
        libc::SYS_socket => CallAction::Socket,
        _ if ASYNC_IO.contains(&number) => CallAction::Allow,
        _ => of(number),
    }
}

/// Assembles a binary search over the runs. The number is loaded.
fn search(
    runs: &[(u32, CallAction)],
    refuse: fn(libc::c_int) -> FilterInstruction,
) -> Vec<FilterInstruction> {
    if let [(_, action)] = runs {
        return decide(*action, refuse);
    }
    let (below, from) = runs.split_at(runs.len() / 2);
    let (left, right) = (search(below, refuse), search(from, refuse));
    let over = u8::try_from(left.len()).expect("a half of the list is shorter than a jump is far");
    [vec![jump(IF_AT_LEAST, from[0].0, over, 0)], left, right].concat()
}

fn decide(action: CallAction, refuse: fn(libc::c_int) -> FilterInstruction) -> Vec<FilterInstruction> {
    let allow = op(RETURN, libc::SECCOMP_RET_ALLOW);
    let one_of = |values: &[u32], otherwise: FilterInstruction| {
        let count = u8::try_from(values.len()).expect("both lists are short");
        let mut program = vec![op(LOAD, argument(0))];
        program.extend((0..count).zip(values).map(|(at, value)| jump(IF_EQUAL, *value, count - at, 0)));
        program.extend([otherwise, allow]);
        program
    };
    match action {
        CallAction::Allow => vec![allow],
        CallAction::Refuse => vec![refuse(libc::EPERM)],
        CallAction::Missing => vec![refuse(libc::ENOSYS)],
        CallAction::Clone => {
            vec![op(LOAD, argument(0)), jump(IF_ANY_BIT, NEW_NAMESPACES, 0, 1), refuse(libc::EPERM), allow]
        }
        CallAction::Socket => one_of(&FAMILIES.map(libc::c_int::unsigned_abs), refuse(libc::EAFNOSUPPORT)),
        CallAction::SocketInImage => {
            let mptcp = libc::IPPROTO_MPTCP.unsigned_abs();
            let mut program =
                vec![op(LOAD, argument(2)), jump(IF_EQUAL, mptcp, 0, 1), refuse(libc::EPROTONOSUPPORT)];
            program.extend(decide(CallAction::Socket, refuse));
            program
        }
        CallAction::Personality => one_of(&PERSONALITIES, refuse(libc::EPERM)),
    }
}

/// Not in the C library's list.
const IO_PGETEVENTS: libc::c_long = if cfg!(target_arch = "x86_64") { 333 } else { 292 };

/// `clone3` among them: a filter cannot see its flags, and the C library then uses `clone`.
const MISSING: &[libc::c_long] =
    &[libc::SYS_clone3, libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];

/// Asynchronous I/O (io_setup(2)), which CRIU cannot carry.
const ASYNC_IO: &[libc::c_long] = &[
    libc::SYS_io_setup,
    libc::SYS_io_destroy,
    libc::SYS_io_getevents,
    libc::SYS_io_submit,
    libc::SYS_io_cancel,
    IO_PGETEVENTS,
];

/// Calls that every architecture has.
#[rustfmt::skip]
const ALLOWED: &[libc::c_long] = &[
    libc::SYS_accept, libc::SYS_accept4, libc::SYS_adjtimex, libc::SYS_bind, libc::SYS_brk,
    libc::SYS_capget, libc::SYS_capset, libc::SYS_chdir, libc::SYS_clock_adjtime,
    libc::SYS_clock_getres, libc::SYS_clock_gettime, libc::SYS_clock_nanosleep, libc::SYS_close,
    libc::SYS_close_range, libc::SYS_connect, libc::SYS_copy_file_range, libc::SYS_dup, libc::SYS_dup3,
    libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2, libc::SYS_execve, libc::SYS_execveat, libc::SYS_exit, libc::SYS_exit_group,
    libc::SYS_faccessat, libc::SYS_faccessat2, libc::SYS_fadvise64, libc::SYS_fallocate, libc::SYS_fchdir,
    libc::SYS_fchmod, libc::SYS_fchmodat, libc::SYS_fchown, libc::SYS_fchownat,
    libc::SYS_fcntl, libc::SYS_fdatasync, libc::SYS_fgetxattr, libc::SYS_flistxattr, libc::SYS_flock,
    libc::SYS_fremovexattr, libc::SYS_fsetxattr, libc::SYS_fstat, libc::SYS_fstatfs, libc::SYS_fsync,
    libc::SYS_ftruncate, libc::SYS_futex, libc::SYS_futex_waitv, libc::SYS_get_robust_list,
    libc::SYS_getcpu, libc::SYS_getcwd, libc::SYS_getdents64, libc::SYS_getegid, libc::SYS_geteuid,
    libc::SYS_getgid, libc::SYS_getgroups, libc::SYS_getitimer, libc::SYS_getpeername, libc::SYS_getpgid,
    libc::SYS_getpid, libc::SYS_getppid, libc::SYS_getpriority, libc::SYS_getrandom, libc::SYS_getresgid,
    libc::SYS_getresuid, libc::SYS_getrusage, libc::SYS_getsid, libc::SYS_getsockname,
    libc::SYS_getsockopt, libc::SYS_gettid, libc::SYS_gettimeofday, libc::SYS_getuid, libc::SYS_getxattr,
    libc::SYS_inotify_add_watch, libc::SYS_inotify_init1, libc::SYS_inotify_rm_watch, libc::SYS_ioctl,
    libc::SYS_ioprio_get, libc::SYS_ioprio_set, libc::SYS_kill, libc::SYS_landlock_add_rule,
    libc::SYS_landlock_create_ruleset, libc::SYS_landlock_restrict_self, libc::SYS_lgetxattr,
    libc::SYS_linkat, libc::SYS_listen, libc::SYS_listxattr, libc::SYS_llistxattr, libc::SYS_lremovexattr,
    libc::SYS_lseek, libc::SYS_lsetxattr, libc::SYS_madvise, libc::SYS_membarrier, libc::SYS_memfd_create,
    libc::SYS_mincore, libc::SYS_mkdirat, libc::SYS_mknodat, libc::SYS_mlock, libc::SYS_mlock2,
    libc::SYS_mlockall, libc::SYS_mmap, libc::SYS_mprotect, libc::SYS_mq_getsetattr, libc::SYS_mq_notify,
    libc::SYS_mq_open, libc::SYS_mq_timedreceive, libc::SYS_mq_timedsend, libc::SYS_mq_unlink,
    libc::SYS_mremap, libc::SYS_msgctl, libc::SYS_msgget, libc::SYS_msgrcv, libc::SYS_msgsnd,
    libc::SYS_msync, libc::SYS_munlock, libc::SYS_munlockall, libc::SYS_munmap, libc::SYS_name_to_handle_at,
    libc::SYS_nanosleep, libc::SYS_newfstatat, libc::SYS_openat, libc::SYS_openat2, libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal, libc::SYS_pipe2, libc::SYS_pkey_alloc, libc::SYS_pkey_free,
    libc::SYS_pkey_mprotect, libc::SYS_ppoll, libc::SYS_prctl, libc::SYS_pread64, libc::SYS_preadv,
    libc::SYS_preadv2, libc::SYS_prlimit64, libc::SYS_process_mrelease, libc::SYS_pselect6,
    libc::SYS_pwrite64, libc::SYS_pwritev, libc::SYS_pwritev2, libc::SYS_read, libc::SYS_readahead,
    libc::SYS_readlinkat, libc::SYS_readv, libc::SYS_recvfrom, libc::SYS_recvmmsg, libc::SYS_recvmsg,
    libc::SYS_remap_file_pages, libc::SYS_removexattr, libc::SYS_renameat2, libc::SYS_restart_syscall,
    libc::SYS_rseq, libc::SYS_rt_sigaction, libc::SYS_rt_sigpending, libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigqueueinfo, libc::SYS_rt_sigreturn, libc::SYS_rt_sigsuspend, libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_tgsigqueueinfo, libc::SYS_sched_get_priority_max, libc::SYS_sched_get_priority_min,
    libc::SYS_sched_getaffinity, libc::SYS_sched_getattr, libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler, libc::SYS_sched_rr_get_interval, libc::SYS_sched_setaffinity,
    libc::SYS_sched_setattr, libc::SYS_sched_setparam, libc::SYS_sched_setscheduler, libc::SYS_sched_yield,
    libc::SYS_seccomp, libc::SYS_semctl, libc::SYS_semget, libc::SYS_semop, libc::SYS_semtimedop,
    libc::SYS_sendfile, libc::SYS_sendmmsg, libc::SYS_sendmsg, libc::SYS_sendto, libc::SYS_set_robust_list,
    libc::SYS_set_tid_address, libc::SYS_setfsgid, libc::SYS_setfsuid, libc::SYS_setgid,
    libc::SYS_setgroups, libc::SYS_setitimer, libc::SYS_setpgid, libc::SYS_setpriority, libc::SYS_setregid,
    libc::SYS_setresgid, libc::SYS_setresuid, libc::SYS_setreuid, libc::SYS_setsid,
    libc::SYS_setsockopt, libc::SYS_setuid, libc::SYS_setxattr, libc::SYS_shmat, libc::SYS_shmctl,
    libc::SYS_shmdt, libc::SYS_shmget, libc::SYS_shutdown, libc::SYS_sigaltstack, libc::SYS_signalfd4,
    libc::SYS_socketpair, libc::SYS_splice, libc::SYS_statfs, libc::SYS_statx, libc::SYS_symlinkat,
    libc::SYS_sync, libc::SYS_syncfs, libc::SYS_sysinfo, libc::SYS_tee,
    libc::SYS_tgkill, libc::SYS_timer_create, libc::SYS_timer_delete, libc::SYS_timer_getoverrun,
    libc::SYS_timer_gettime, libc::SYS_timer_settime, libc::SYS_timerfd_create, libc::SYS_timerfd_gettime,
    libc::SYS_timerfd_settime, libc::SYS_times, libc::SYS_tkill, libc::SYS_truncate, libc::SYS_umask,
    libc::SYS_uname, libc::SYS_unlinkat, libc::SYS_utimensat, libc::SYS_vmsplice, libc::SYS_wait4,
    libc::SYS_waitid, libc::SYS_write, libc::SYS_writev,
    // Not yet in the C library's list, the same numbers everywhere: `cachestat`, `fchmodat2`,
    // `map_shadow_stack`, `futex_wake`, `futex_wait`, `futex_requeue`, `mseal`.
    451, 452, 453, 454, 455, 456, 462,
];

/// Older forms of some of them, and calls that this architecture needs to run threads.
#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
const ALLOWED_OF_ARCHITECTURE: &[libc::c_long] = &[
    libc::SYS_access, libc::SYS_alarm, libc::SYS_arch_prctl, libc::SYS_chmod, libc::SYS_chown,
    libc::SYS_creat, libc::SYS_dup2, libc::SYS_epoll_create, libc::SYS_epoll_ctl_old, libc::SYS_epoll_wait,
    libc::SYS_epoll_wait_old, libc::SYS_eventfd, libc::SYS_fork, libc::SYS_futimesat,
    libc::SYS_get_thread_area, libc::SYS_getdents, libc::SYS_getpgrp, libc::SYS_getrlimit, libc::SYS_setrlimit, libc::SYS_sync_file_range, libc::SYS_inotify_init,
    libc::SYS_lchown, libc::SYS_link, libc::SYS_lstat, libc::SYS_mkdir, libc::SYS_mknod,
    libc::SYS_modify_ldt, libc::SYS_open, libc::SYS_pause, libc::SYS_pipe, libc::SYS_poll,
    libc::SYS_readlink, libc::SYS_rename, libc::SYS_renameat, libc::SYS_rmdir, libc::SYS_select,
    libc::SYS_set_thread_area, libc::SYS_signalfd, libc::SYS_stat, libc::SYS_symlink, libc::SYS_time,
    libc::SYS_unlink, libc::SYS_utime, libc::SYS_utimes, libc::SYS_vfork,
];
/// `sync_file_range`, `getrlimit` and `setrlimit` by number: the C library's list leaves them out.
#[cfg(target_arch = "aarch64")]
const ALLOWED_OF_ARCHITECTURE: &[libc::c_long] = &[libc::SYS_renameat, 84, 163, 164];

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel would make of a call: the few instructions these filters use.
    fn run(program: &[FilterInstruction], architecture: u32, number: i64, args: [u64; 6]) -> u32 {
        let word = |offset: u32| match offset {
            NUMBER => u32::try_from(number).unwrap(),
            ARCHITECTURE => architecture,
            _ => {
                let (index, half) = ((offset - 16) / 8, (offset - 16) % 8);
                assert_eq!(half, 0);
                (args[index as usize] & 0xFFFF_FFFF) as u32
            }
        };
        let (mut at, mut loaded) = (0, 0);
        loop {
            let FilterInstruction { code, jt, jf, k } = program[at];
            let holds = match code {
                LOAD => {
                    loaded = word(k);
                    at += 1;
                    continue;
                }
                RETURN => return k,
                IF_EQUAL => loaded == k,
                IF_AT_LEAST => loaded >= k,
                IF_ANY_BIT => loaded & k != 0,
                _ => panic!("{code:#x}"),
            };
            at += 1 + usize::from(if holds { jt } else { jf });
        }
    }

    fn tenant(number: i64, first: u64) -> u32 {
        run(&of_tenants(), OURS, number, [first, 0, 0, 0, 0, 0])
    }

    const EPERM: u32 = libc::SECCOMP_RET_ERRNO | 1;
    const ENOSYS: u32 = libc::SECCOMP_RET_ERRNO | 38;

    #[test]
    fn each_call_gets_the_action_of_the_list() {
        for number in 0..600 {
            let expected = match of(number) {
                _ if number >= i64::from(FIRST_UNKNOWN) => ENOSYS,
                CallAction::Allow | CallAction::Clone | CallAction::Personality => libc::SECCOMP_RET_ALLOW,
                CallAction::Refuse => EPERM,
                CallAction::Missing => ENOSYS,
                CallAction::Socket | CallAction::SocketInImage => {
                    libc::SECCOMP_RET_ERRNO | libc::EAFNOSUPPORT.unsigned_abs()
                }
            };
            assert_eq!(tenant(number, 0), expected, "{number}");
        }
    }

    #[test]
    fn system_calls_that_leave_a_sandbox_are_refused() {
        // `process_madvise` would be a way around `mapped_memory_filter`.
        let calls = [libc::SYS_mount, libc::SYS_unshare, libc::SYS_setns, libc::SYS_ptrace, libc::SYS_bpf];
        for number in calls.into_iter().chain([libc::SYS_process_madvise]) {
            assert_eq!(tenant(number, 0), EPERM, "{number}");
        }
        for number in [libc::SYS_io_uring_setup, libc::SYS_io_setup, libc::SYS_clone3, 100_000] {
            assert_eq!(tenant(number, 0), ENOSYS, "{number}");
        }
        assert_eq!(tenant(libc::SYS_clone, libc::CLONE_NEWUSER as u64), EPERM);
        assert_eq!(tenant(libc::SYS_clone, libc::SIGCHLD as u64), libc::SECCOMP_RET_ALLOW);
        assert_eq!(tenant(libc::SYS_socket, libc::AF_INET6 as u64), libc::SECCOMP_RET_ALLOW);
        assert_ne!(tenant(libc::SYS_socket, libc::AF_VSOCK as u64), libc::SECCOMP_RET_ALLOW);
        let mptcp = [libc::AF_INET as u64, libc::SOCK_STREAM as u64, libc::IPPROTO_MPTCP as u64, 0, 0, 0];
        let unsupported = libc::SECCOMP_RET_ERRNO | libc::EPROTONOSUPPORT.unsigned_abs();
        assert_eq!(run(&of_tenants(), OURS, libc::SYS_socket, mptcp), unsupported);
        assert_eq!(run(of_programs(), OURS, libc::SYS_socket, mptcp), libc::SECCOMP_RET_ALLOW);
        assert_eq!(tenant(libc::SYS_personality, 0x0040_0000), EPERM);
        let other = run(&of_tenants(), 0x4000_0003, 1, [0; 6]);
        assert_eq!(other, libc::SECCOMP_RET_KILL_PROCESS);
    }

    #[test]
    fn programs_may_do_what_tenants_may_and_asynchronous_io() {
        for number in 0..600 {
            for first in [0, libc::CLONE_NEWUSER as u64, libc::AF_VSOCK as u64, u64::MAX] {
                let action = run(of_programs(), OURS, number, [first; 6]);
                let is_async = ASYNC_IO.contains(&number);
                let expected = if is_async { libc::SECCOMP_RET_ALLOW } else { tenant(number, first) };
                assert_eq!(action, expected, "{number} {first:#x}");
            }
        }
        // Of x32 (`__X32_SYSCALL_BIT`) and of 32 bits.
        assert_eq!(run(of_programs(), OURS, 0x4000_0000, [0; 6]), ENOSYS);
        assert_eq!(run(of_programs(), 0x4000_0003, 1, [0; 6]), libc::SECCOMP_RET_KILL_PROCESS);
    }

    #[test]
    fn a_checkpoint_asks_about_filters_and_its_end_only() {
        let ptrace = |request: u32, data: u32| {
            run(&of_checkpoints(), OURS, libc::SYS_ptrace, [request.into(), 1, 0, data.into(), 0, 0])
        };
        let (ask, allow) = (libc::SECCOMP_RET_USER_NOTIF, libc::SECCOMP_RET_ALLOW);
        assert_eq!(ptrace(PTRACE_SECCOMP_GET_FILTER, 0), ask);
        assert_eq!(ptrace(PTRACE_SECCOMP_GET_METADATA, 0), ask);
        assert_eq!(ptrace(PTRACE_SETOPTIONS, PTRACE_O_SUSPEND_SECCOMP), ask);
        assert_eq!(ptrace(PTRACE_DETACH, 0), ask);
        assert_eq!(ptrace(PTRACE_SETOPTIONS, 1), allow);
        assert_eq!(ptrace(16, 0), allow);
        assert_eq!(run(&of_checkpoints(), OURS, 0, [PTRACE_SECCOMP_GET_FILTER.into(); 6]), allow);
    }

    #[test]
    fn restore_asks_about_exactly_the_calls_tenants_are_refused() {
        let (tenants, restores) = (of_tenants(), of_restores());
        // Arguments that make a difference somewhere: flags, a socket's family, a personality.
        let arguments =
            [0, 1, 2, 16, 17, 0x4206, 0x4207, 0x8, NEW_NAMESPACES.into(), u64::from(u32::MAX), u64::MAX];
        for number in 0..=i64::from(FIRST_UNKNOWN) + 10 {
            for first in arguments {
                let call = [first, 1, 0, 0, 0, 0];
                let begins_or_ends = [PTRACE_TRACEME, PTRACE_ATTACH, PTRACE_DETACH, PTRACE_SEIZE];
                // As the kernel, by the lower half.
                let begins_or_ends =
                    begins_or_ends.iter().any(|request| u64::from(*request) == first & 0xFFFF_FFFF);
                let expected = match run(&tenants, OURS, number, call) {
                    libc::SECCOMP_RET_ALLOW => libc::SECCOMP_RET_ALLOW,
                    _ if number == libc::SYS_ptrace && !begins_or_ends => libc::SECCOMP_RET_ALLOW,
                    _ => libc::SECCOMP_RET_USER_NOTIF,
                };
                assert_eq!(run(&restores, OURS, number, call), expected, "{number} {first:#x}");
            }
        }
        let other = run(&restores, OURS ^ 1, libc::SYS_read, [0; 6]);
        assert_eq!(other, libc::SECCOMP_RET_KILL_PROCESS, "calls of another architecture");
    }
}
