//! The filters of system calls of the edge, and of the process that checks rules. They are lists of
//! allowed calls (seccomp, Documentation/userspace-api/seccomp_filter.rst).
//!
//! The edge parses the network. An attacker who controls it can start no program, look into no
//! other process, and reach little of the kernel. A call that is not listed fails with `EPERM`.
//! `clone3` fails with `ENOSYS`: a filter cannot see its flags, and the C library then uses
//! `clone`.
//!
//! Invariant: the filter is on before the edge has a second thread, so every thread has it. Not
//! here: rights (`rights`), the filter of tenants' programs (the keeper's).

use std::collections::BTreeMap;
use std::io;

use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Calls that are allowed with any arguments, ordered by their subject as in syscalls(2).
const ALLOWED: &[libc::c_long] = &[
    // Descriptors and their bytes.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_copy_file_range,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_ioctl,
    libc::SYS_lseek,
    libc::SYS_pipe2,
    // Files.
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_statfs,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_getcwd,
    libc::SYS_fadvise64,
    libc::SYS_readahead,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_flock,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_linkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_memfd_create,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_rm_watch,
    // Sockets. `socket` checks their families.
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_setsockopt,
    libc::SYS_getsockopt,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    // Waiting and time.
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    // Memory.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_mlock,
    libc::SYS_munlock,
    libc::SYS_membarrier,
    libc::SYS_getrandom,
    // Threads.
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_getparam,
    libc::SYS_setpriority,
    libc::SYS_getpriority,
    libc::SYS_getcpu,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_tgkill,
    libc::SYS_restart_syscall,
    // Signals.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    // The process and the machine.
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getrusage,
    libc::SYS_prlimit64,
    libc::SYS_sysinfo,
    libc::SYS_uname,
];

/// Older forms that only this architecture has; the C library still uses some.
#[cfg(target_arch = "x86_64")]
const ALLOWED_OF_ARCHITECTURE: &[libc::c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_mkdir,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_wait,
    libc::SYS_time,
    libc::SYS_arch_prctl,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_OF_ARCHITECTURE: &[libc::c_long] = &[];

/// Unix and internet sockets, and netlink, with which the C library queries the machine's
/// addresses.
const FAMILIES: [libc::c_int; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// Requests of prctl(2): names of threads and of memory, and state of given-up rights.
const PROCESS_REQUESTS: [libc::c_int; 6] = [
    libc::PR_SET_NAME,
    libc::PR_GET_NAME,
    libc::PR_SET_VMA,
    libc::PR_GET_DUMPABLE,
    libc::PR_GET_NO_NEW_PRIVS,
    libc::PR_CAPBSET_READ,
];

/// Calls of a process that only reads a text, compiles it and writes a verdict. Memory and waiting
/// are for the allocator and the watchdog of the compiler. No files, no sockets, no processes, no
/// new threads.
const ALLOWED_FOR_RULE_CHECK: &[libc::c_long] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_getrandom,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_restart_syscall,
    // The watchdog's thread may start only now. Without these the C library aborts.
    libc::SYS_rseq,
    libc::SYS_set_robust_list,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Puts the filter of a rule check on all threads of this process for good. It must have
/// `no_new_privs`.
pub fn install_for_rule_check() -> io::Result<()> {
    let filter = program(rule_check_rules().map_err(io::Error::other)?, FilterAction::Allow)?;
    seccompiler::apply_filter_all_threads(&filter).map_err(io::Error::other)
}

fn rule_check_rules() -> Result<Rules, seccompiler::BackendError> {
    let mut rules: Rules = ALLOWED_FOR_RULE_CHECK.iter().map(|number| (*number, Vec::new())).collect();
    // Memory that is not executable.
    let executable = u64::from(libc::PROT_EXEC.unsigned_abs());
    for number in [libc::SYS_mmap, libc::SYS_mprotect] {
        let plain = SeccompCmpOp::MaskedEq(executable);
        let protection = SeccompCondition::new(2, SeccompCmpArgLen::Dword, plain, 0)?;
        rules.insert(number, vec![SeccompRule::new(vec![protection])?]);
    }
    // The watchdog's signal to this process.
    let own = u64::from(std::process::id());
    rules.insert(libc::SYS_tgkill, vec![first_argument(SeccompCmpOp::Eq, own)?]);
    Ok(rules)
}

/// Puts the filter on this process for good. It must have one thread and `no_new_privs`.
pub fn install() -> io::Result<()> {
    let missing = program(BTreeMap::from([(libc::SYS_clone3, Vec::new())]), FilterAction::Missing)?;
    let allowed = program(allowed_rules().map_err(io::Error::other)?, FilterAction::Allow)?;
    // The list comes last: it does not allow another filter.
    for filter in [missing, allowed] {
        seccompiler::apply_filter(&filter).map_err(io::Error::other)?;
    }
    Ok(())
}

/// Result for the calls of a list. The kernel takes the strictest result of all filters.
enum FilterAction {
    /// All others fail with `EPERM`.
    Allow,
    /// `ENOSYS`. The other filter decides about all others.
    Missing,
}

fn program(rules: Rules, action: FilterAction) -> io::Result<BpfProgram> {
    let errno = |errno: libc::c_int| SeccompAction::Errno(errno.unsigned_abs());
    let (listed, others) = match action {
        FilterAction::Allow => (SeccompAction::Allow, errno(libc::EPERM)),
        FilterAction::Missing => (errno(libc::ENOSYS), SeccompAction::Allow),
    };
    let architecture = std::env::consts::ARCH.try_into().map_err(io::Error::other)?;
    let filter = SeccompFilter::new(rules, others, listed, architecture).map_err(io::Error::other)?;
    filter.try_into().map_err(io::Error::other)
}

fn allowed_rules() -> Result<Rules, seccompiler::BackendError> {
    let calls = ALLOWED.iter().chain(ALLOWED_OF_ARCHITECTURE).chain([&libc::SYS_clone3]);
    let mut rules: Rules = calls.map(|number| (*number, Vec::new())).collect();
    rules.insert(libc::SYS_socket, one_of(&FAMILIES)?);
    rules.insert(libc::SYS_socketpair, one_of(&[libc::AF_UNIX])?);
    rules.insert(libc::SYS_prctl, one_of(&PROCESS_REQUESTS)?);
    // A thread, not a process.
    let thread = u64::from(libc::CLONE_THREAD.unsigned_abs());
    rules.insert(libc::SYS_clone, vec![first_argument(SeccompCmpOp::MaskedEq(thread), thread)?]);
    Ok(rules)
}

/// The first argument is one of these.
fn one_of(values: &[libc::c_int]) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    values.iter().map(|value| first_argument(SeccompCmpOp::Eq, value.unsigned_abs().into())).collect()
}

fn first_argument(operator: SeccompCmpOp, value: u64) -> Result<SeccompRule, seccompiler::BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(0, SeccompCmpArgLen::Dword, operator, value)?])
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::process::Command;
    use std::thread;

    use nix::errno::Errno;
    use nix::sched::{CloneFlags, unshare};
    use rustix::net::{AddressFamily, SocketType};

    use super::*;

    /// Runs in a thread of its own: the filter stays on it until it ends.
    fn behind_filter<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
        let thread = thread::spawn(|| {
            install().unwrap();
            act()
        });
        thread.join().unwrap()
    }

    #[test]
    fn no_program_starts_behind_the_filter() {
        assert!(Command::new("true").status().unwrap().success());
        let error = behind_filter(|| Command::new("true").status().unwrap_err());
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    }

    #[test]
    fn namespaces_signals_and_odd_sockets_are_refused() {
        let own = nix::unistd::getpid();
        behind_filter(move || {
            assert_eq!(unshare(CloneFlags::CLONE_NEWUSER), Err(Errno::EPERM));
            assert_eq!(nix::sys::signal::kill(own, None), Err(Errno::EPERM));
            assert_eq!(nix::unistd::setsid(), Err(Errno::EPERM));
            let packet = rustix::net::socket(AddressFamily::PACKET, SocketType::RAW, None);
            assert_eq!(packet.unwrap_err(), rustix::io::Errno::PERM);
            assert_eq!(nix::sys::prctl::set_dumpable(true), Err(Errno::EPERM));
        });
    }

    /// The filter of a rule check, on one thread that ends with it.
    fn behind_filter_of_rule_check<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
        let thread = thread::spawn(|| {
            rustix::thread::set_no_new_privs(true).unwrap();
            let filter = program(rule_check_rules().unwrap(), FilterAction::Allow).unwrap();
            seccompiler::apply_filter(&filter).unwrap();
            act()
        });
        thread.join().unwrap()
    }

    #[test]
    fn a_rule_check_reaches_no_file_socket_or_process() {
        behind_filter_of_rule_check(|| {
            let denied = Some(libc::EPERM);
            assert_eq!(std::fs::read("/etc/passwd").unwrap_err().raw_os_error(), denied);
            assert_eq!(TcpListener::bind("127.0.0.1:0").unwrap_err().raw_os_error(), denied);
            assert_eq!(Command::new("true").status().unwrap_err().raw_os_error(), denied);
            assert_eq!(thread::Builder::new().spawn(|| ()).unwrap_err().raw_os_error(), denied);
            assert_eq!(nix::sys::signal::kill(nix::unistd::getppid(), None), Err(Errno::EPERM));
            let none = nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_CORE, 0, 0);
            assert_eq!(none, Err(Errno::EPERM));
        });
    }

    #[test]
    fn a_rule_check_compiles_and_is_ended_behind_its_filter() {
        // The watchdog is there before the filter, as in the process.
        nagaya_rules::check(b"", "empty").unwrap();
        let (good, bad, long) = behind_filter_of_rule_check(|| {
            let long = format!("f({}1)", "1,".repeat(24_000));
            let check = |text: &str| nagaya_rules::check(text.as_bytes(), "a.rb").map_err(|fault| fault.kind);
            (check("x = [1, 2].map { |n| n.to_s }"), check("if x =="), check(&long))
        });
        assert_eq!(good, Ok(()));
        assert_eq!(bad, Err(nagaya_rules::FaultKind::Syntax));
        assert_eq!(long, Err(nagaya_rules::FaultKind::Compile));
    }

    #[test]
    fn threads_files_and_connections_go_on() {
        behind_filter(|| {
            assert_eq!(thread::spawn(|| 7).join().unwrap(), 7);
            assert!(std::fs::read_to_string("/proc/thread-self/status").unwrap().contains("Seccomp:\t2"));
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            assert_eq!(listener.accept().unwrap().1, client.local_addr().unwrap());
        });
    }
}
