//! The two kernel calls of resting that no safe wrapper has: a thread's scheduling class, and
//! moving another process's memory out.
//!
//! Not here: the choice of threads and memory (`rest`).
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::libc;

/// Maximum number of memory areas in one call: the kernel's own limit (`UIO_MAXIOV`).
pub const AREAS_MAX: usize = 1024;

/// A thread's scheduling policy, as the kernel numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedPolicy(libc::c_int);

impl SchedPolicy {
    pub const IDLE: Self = Self(libc::SCHED_IDLE);
    pub const OTHER: Self = Self(libc::SCHED_OTHER);
    pub const BATCH: Self = Self(libc::SCHED_BATCH);
}

/// Returns the policy of this thread.
pub fn policy(tid: i32) -> io::Result<SchedPolicy> {
    // SAFETY: a number in, a number out.
    let policy = unsafe { libc::sched_getscheduler(tid) };
    // The flag `SCHED_RESET_ON_FORK` is no part of the policy.
    if policy < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(SchedPolicy(policy & !libc::SCHED_RESET_ON_FORK))
    }
}

/// Sets a policy without priorities for this thread.
pub fn set_policy(tid: i32, policy: SchedPolicy) -> io::Result<()> {
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: `param` outlives the call.
    if unsafe { libc::sched_setscheduler(tid, policy.0, &raw const param) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Moves these areas of a process, start and length, out to swap. Returns for how many bytes of
/// them, from the first on, the kernel tried it.
pub fn page_out(pidfd: BorrowedFd<'_>, areas: &[(usize, usize)]) -> io::Result<usize> {
    let areas: Vec<libc::iovec> = areas
        .iter()
        .take(AREAS_MAX)
        .map(|(start, len)| libc::iovec { iov_base: std::ptr::without_provenance_mut(*start), iov_len: *len })
        .collect();
    // SAFETY: the vector outlives the call. Its addresses are in another process, and nothing is
    // read or written at them. Paging out keeps the contents of memory and only moves them.
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
