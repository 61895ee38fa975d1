//! The kernel's own monitor of memory use (DAMON, `Documentation/admin-guide/mm/damon`), if a
//! machine has it enabled.
//!
//! A virtual machine's host may have enabled it in its guests, to reclaim idle memory. Then a
//! kernel thread scans all mapped memory several times a second, and takes a CPU for that. The more
//! is mapped, the longer it takes. Not here: the delayed pages (`rest_cost`).

use std::fs;
use std::path::{Path, PathBuf};

/// Prefix of its threads' names: `kdamond.0` and so on.
const NAME: &str = "kdamond";

/// Its threads, by their directories in `/proc`.
#[derive(Debug)]
pub struct DamonProbe {
    threads: Vec<PathBuf>,
}

impl DamonProbe {
    pub fn find() -> Self {
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path());
        let is_one =
            |path: &PathBuf| fs::read_to_string(path.join("comm")).is_ok_and(|name| name.starts_with(NAME));
        Self { threads: processes.filter(is_one).collect() }
    }

    pub fn is_there(&self) -> bool {
        !self.threads.is_empty()
    }

    /// Returns the nanoseconds that it has run, since its start.
    pub fn ran_ns(&self) -> u64 {
        self.threads.iter().filter_map(|thread| ran_ns(thread)).sum()
    }

    /// Returns the same, or `None` while it runs. A thread's counters are updated when it gives up
    /// its CPU and at ticks. A run wholly between two of these would not be seen.
    pub fn ran_ns_at_rest(&self) -> Option<u64> {
        (!self.threads.iter().any(|thread| is_running(thread))).then(|| self.ran_ns())
    }
}

/// Returns whether a thread has a CPU or waits for one: the state after its name, proc(5).
fn is_running(thread: &Path) -> bool {
    let stat = fs::read_to_string(thread.join("stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('R'))
}

/// Returns the nanoseconds that a thread has run, from its directory in `/proc`.
pub fn ran_ns(thread: &Path) -> Option<u64> {
    fs::read_to_string(thread.join("schedstat")).ok()?.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_thread_is_not_at_rest() {
        let own = DamonProbe { threads: vec![PathBuf::from("/proc/thread-self")] };
        assert_eq!(own.ran_ns_at_rest(), None);
        let none = DamonProbe { threads: Vec::new() };
        assert_eq!(none.ran_ns_at_rest(), Some(0));
    }

    #[test]
    fn waiting_thread_is_at_rest() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let waiting = DamonProbe { threads: vec![PathBuf::from(format!("/proc/{}", child.id()))] };
        while waiting.ran_ns_at_rest().is_none() {
            std::thread::yield_now();
        }
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }
}
