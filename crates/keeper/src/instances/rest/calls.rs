//! The two kernel calls of resting that no safe wrapper has: a thread's scheduling class, and moving another process's
//! memory out.
//!
//! Not here: which threads and which memory (`rest`).
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::libc;

/// Areas of memory in one call, the kernel's own limit (`UIO_MAXIOV`).
pub const AREAS_MAX: usize = 1024;

/// A thread's scheduling policy, as the kernel numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy(libc::c_int);

impl Policy {
    pub const IDLE: Self = Self(libc::SCHED_IDLE);
    pub const OTHER: Self = Self(libc::SCHED_OTHER);
    pub const BATCH: Self = Self(libc::SCHED_BATCH);
}

/// The policy of this thread.
pub fn policy(tid: i32) -> io::Result<Policy> {
    // SAFETY: a number in, a number out.
    let policy = unsafe { libc::sched_getscheduler(tid) };
    // The flag of threads whose children do not inherit is no part of the policy.
    if policy < 0 { Err(io::Error::last_os_error()) } else { Ok(Policy(policy & !libc::SCHED_RESET_ON_FORK)) }
}

/// Gives this thread a policy that knows no priorities.
pub fn set_policy(tid: i32, policy: Policy) -> io::Result<()> {
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: `param` outlives the call.
    if unsafe { libc::sched_setscheduler(tid, policy.0, &raw const param) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Moves what is in these areas of a process, start and length, out to swap. Returns for how many bytes of them, from the
/// first on, that was tried.
pub fn page_out(pidfd: BorrowedFd<'_>, areas: &[(usize, usize)]) -> io::Result<usize> {
    let areas: Vec<libc::iovec> = areas
        .iter()
        .take(AREAS_MAX)
        .map(|(start, len)| libc::iovec { iov_base: std::ptr::without_provenance_mut(*start), iov_len: *len })
        .collect();
    // SAFETY: the vector outlives the call. The addresses in it are of another process, and nothing is read or written at
    // them: paging out keeps what is in memory, and only changes where it is.
    let done = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            pidfd.as_raw_fd(),
            areas.as_ptr(),
            areas.len(),
            libc::MADV_PAGEOUT,
            0,
        )
    };
    usize::try_from(done).map_err(|_| io::Error::last_os_error())
}
