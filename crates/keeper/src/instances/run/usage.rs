//! Usage of an instance's processes, read from `/proc`. It blocks, briefly.
//!
//! Not here: the counters of cells (`cells`), the readers of the figures (`admin`).

use std::fs;

use crate::cells::Leaf;

/// The present use of one instance's processes.
#[derive(Debug, Clone, Copy, Default)]
pub struct InstanceUsage {
    pub memory_bytes: u64,
    pub cpu_us: u64,
    /// Time for which its threads ran or waited for a CPU, together: their time in the run queue.
    /// `None` if it was not read.
    pub queued_us: Option<u64>,
    pub processes: usize,
}

/// Reads resident memory, where shared memory counts for each of its processes: one short file for
/// each process.
pub fn measure(leaf: &Leaf) -> InstanceUsage {
    sum(leaf, resident)
}

/// Returns the bytes of memory of a process, including shared memory.
pub fn resident(pid: i32) -> Option<u64> {
    let statm = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// Reads resident memory, where shared memory counts in parts: the kernel walks through all memory
/// for it.
pub fn measure_exactly(leaf: &Leaf) -> InstanceUsage {
    sum(leaf, |pid| {
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
        let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
        Some(line.split_ascii_whitespace().next()?.parse::<u64>().ok()? * 1024)
    })
}

fn sum(leaf: &Leaf, memory: impl Fn(i32) -> Option<u64>) -> InstanceUsage {
    let pids = leaf.pids().unwrap_or_default();
    // A process that ends meanwhile has no memory.
    let bytes = pids.iter().filter_map(|pid| memory(pid.as_raw_nonzero().get()));
    let (memory_bytes, cpu_us) = (bytes.sum(), leaf.usage().cpu_us);
    InstanceUsage { memory_bytes, cpu_us, queued_us: None, processes: pids.len() }
}

/// Reads the time of its threads in the run queue: one short file for each thread.
pub fn queued_us(leaf: &Leaf) -> u64 {
    let pids = leaf.pids().unwrap_or_default();
    pids.iter().map(|pid| of_threads(pid.as_raw_nonzero().get())).sum()
}

/// Returns the time of a process's threads in the run queue (`schedstat`,
/// Documentation/scheduler/sched-stats.rst): on a CPU, and waiting for one.
fn of_threads(pid: i32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let queued_ns = threads.filter_map(|thread| {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        let mut numbers = text.split_ascii_whitespace().map(str::parse::<u64>);
        Some(numbers.next()?.ok()? + numbers.next()?.ok()?)
    });
    queued_ns.sum::<u64>() / 1_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_runs_is_in_the_run_queue() {
        let own = std::process::id().cast_signed();
        let begun = of_threads(own);
        while of_threads(own) < begun + 1_000 {}
        assert_eq!(of_threads(i32::MAX), 0, "a process that is gone has no threads");
    }
}
