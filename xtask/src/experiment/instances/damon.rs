//! The kernel's own look at who uses which memory (DAMON, `Documentation/admin-guide/mm/damon`), where a machine has it on.
//!
//! A virtual machine's host may have switched it on in its guests, to get back memory that rests. Then a thread of the kernel
//! looks at all that is mapped, some times a second, and takes a processor for that; the more is mapped, the longer. Not here: whose pages
//! it delays (`rest_cost`).

use std::fs;
use std::path::{Path, PathBuf};

/// What the names of its threads begin with: `kdamond.0` and so on.
const NAME: &str = "kdamond";

/// Its threads, by their directories in `/proc`.
#[derive(Debug)]
pub struct Damon {
    threads: Vec<PathBuf>,
}

impl Damon {
    pub fn find() -> Self {
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path());
        let is_one =
            |path: &PathBuf| fs::read_to_string(path.join("comm")).is_ok_and(|name| name.starts_with(NAME));
        Self { threads: processes.filter(is_one).collect() }
    }

    pub fn is_there(&self) -> bool {
        !self.threads.is_empty()
    }

    /// Nanoseconds that it has run, since its start.
    pub fn ran_ns(&self) -> u64 {
        self.threads.iter().filter_map(|thread| ran_ns(thread)).sum()
    }

    /// The same, or none while it runs: what is counted of a thread is brought up to date when it gives its processor up and
    /// at ticks, and what lies wholly between two of these would not be seen.
    pub fn ran_ns_at_rest(&self) -> Option<u64> {
        (!self.threads.iter().any(|thread| is_running(thread))).then(|| self.ran_ns())
    }
}

/// Whether a thread has a processor or waits for one: the state after its name, proc(5).
fn is_running(thread: &Path) -> bool {
    let stat = fs::read_to_string(thread.join("stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('R'))
}

/// Nanoseconds that a thread has run, from its directory in `/proc`.
pub fn ran_ns(thread: &Path) -> Option<u64> {
    fs::read_to_string(thread.join("schedstat")).ok()?.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_runs_is_not_at_rest() {
        let own = Damon { threads: vec![PathBuf::from("/proc/thread-self")] };
        assert_eq!(own.ran_ns_at_rest(), None);
        let none = Damon { threads: Vec::new() };
        assert_eq!(none.ran_ns_at_rest(), Some(0));
    }

    #[test]
    fn who_waits_is_at_rest() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let waiting = Damon { threads: vec![PathBuf::from(format!("/proc/{}", child.id()))] };
        while waiting.ran_ns_at_rest().is_none() {
            std::thread::yield_now();
        }
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }
}
