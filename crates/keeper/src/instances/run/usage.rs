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
    InstanceUsage { memory_bytes: bytes.sum(), cpu_us: leaf.usage().cpu_us, processes: pids.len() }
}
