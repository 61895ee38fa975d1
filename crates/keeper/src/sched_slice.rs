//! Short scheduler slices for threads that others wait for. Such a thread runs soon after it is
//! woken, even beside programs that only compute.
//!
//! The keeper's own thread and the init of each sandbox have it: their work is short. Without it, a
//! program that was just started or woken would often make them wait for a whole slice. A slice is
//! 2 to 4 ms. Not here: the threads that must run before all others (`sandbox::kernel::run_first`),
//! and how tenants share the CPUs (`cells`).
#![allow(unsafe_code)]

use nix::libc;

/// Wanted length of a slice, nanoseconds: the kernel's minimum (`sched_setattr`, linux/syscalls.c).
const SHORT_NS: u64 = 100_000;

/// Requests a short scheduler slice for this thread. Its child threads and processes do not inherit
/// it.
///
/// Linux 6.12 or newer runs such a thread before one with longer slices (`PREEMPT_SHORT`). An older
/// kernel has no slices of a chosen length, and ignores it. Needs no rights.
pub fn request_short_slice() {
    let attributes = libc::sched_attr {
        size: const { size_of::<libc::sched_attr>() as u32 },
        sched_policy: libc::SCHED_OTHER.unsigned_abs(),
        sched_flags: u64::from(libc::SCHED_FLAG_RESET_ON_FORK.unsigned_abs()),
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: SHORT_NS,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the kernel reads `attributes`, which is as long as it says and outlives the call; the
    // rest are numbers.
    let done = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if done < 0 {
        let error = std::io::Error::last_os_error();
        tracing::debug!(%error, "a thread keeps the usual time slice");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Flags and turns of this thread, as the kernel has them.
    fn own() -> (u64, u64) {
        // SAFETY: all zero is a valid value of the plain structure; the kernel writes no more into
        // it than the length it is given.
        let attributes = unsafe {
            let mut attributes: libc::sched_attr = std::mem::zeroed();
            let len = size_of::<libc::sched_attr>();
            assert_eq!(libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, len, 0), 0);
            attributes
        };
        (attributes.sched_flags, attributes.sched_runtime)
    }

    #[test]
    fn a_threads_turns_are_short_and_not_those_of_what_it_starts() {
        let (flags, turns, child) = std::thread::spawn(|| {
            request_short_slice();
            let (flags, turns) = own();
            (flags, turns, std::thread::spawn(own).join().unwrap())
        })
        .join()
        .unwrap();
        assert_eq!(flags, u64::from(libc::SCHED_FLAG_RESET_ON_FORK.unsigned_abs()), "the call has failed");
        // 0: a kernel that does not tell them, before 6.12.
        assert!([SHORT_NS, 0].contains(&turns), "{turns} ns");
        assert_eq!(child.0, 0);
        assert_ne!(child.1, SHORT_NS);
    }
}
