//! Short turns on the processor for threads that others wait for: such a thread runs soon after it is woken, also beside
//! programs that only compute.
//!
//! The keeper's own and the init of each sandbox have it: what they do is short, and a program that was started or woken a moment
//! before would else keep them waiting for a whole turn, 2 to 4 ms, as often as not. Not here: the threads that must run
//! before all others (`sandbox::kernel::run_first`), and how tenants share the processors (`cells`).
#![allow(unsafe_code)]

use nix::libc;

/// How long a thread wants to run at a time, nanoseconds: the least that the kernel takes (`sched_setattr`, linux/syscalls.c).
const SHORT_NS: u64 = 100_000;

/// Has this thread's turns be short. What it starts, a thread or a process, has turns as all others.
///
/// Linux 6.12 or newer lets such a thread in before one whose turns are longer (`PREEMPT_SHORT`). An older kernel knows no turns of
/// a length of its own, and ignores it. Needs no rights.
pub fn shorten() {
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
    // SAFETY: the kernel reads `attributes`, which is as long as it says and outlives the call; the rest are numbers.
    let done = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if done < 0 {
        let error = std::io::Error::last_os_error();
        tracing::debug!(%error, "a thread's turns on the processor stay as long as all others'");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Flags and turns of this thread, as the kernel has them.
    fn own() -> (u64, u64) {
        // SAFETY: all zero is a valid value of the plain structure; the kernel writes no more into it than the length it is given.
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
            shorten();
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
