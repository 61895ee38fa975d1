//! Counts of the scheduler: of processes, of the machine, and its run queue over a time.
//!
//! The load average is the mean number of tasks that run or wait to run. So the sum of both times
//! of all tasks, by the second, predicts what they add to it. Not here: who runs (`bare`, `busy`).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};

use crate::clients::to_float;

/// Pause between two readings of the run queue.
const SAMPLE_EVERY: Duration = Duration::from_millis(10);

/// Times and switches of one thread, from proc(5).
#[derive(Debug, Clone, Copy, Default)]
struct ThreadTimes {
    run_ns: f64,
    wait_ns: f64,
    switches: f64,
    is_runnable: bool,
}

impl ThreadTimes {
    fn of(task: &Path) -> Option<Self> {
        let schedstat = fs::read_to_string(task.join("schedstat")).ok()?;
        let mut numbers = schedstat.split_ascii_whitespace().map(|word| word.parse::<f64>().ok());
        let (run_ns, wait_ns) = (numbers.next()??, numbers.next()??);
        let status = fs::read_to_string(task.join("status")).ok()?;
        let value = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let count = |name: &str| value(name).and_then(|text| text.parse::<f64>().ok());
        let switches = count("voluntary_ctxt_switches:")? + count("nonvoluntary_ctxt_switches:")?;
        let is_runnable = value("State:").is_some_and(|state| state.starts_with('R'));
        Some(Self { run_ns, wait_ns, switches, is_runnable })
    }
}

/// Times of all threads of some processes.
#[derive(Debug, Clone, Default)]
pub struct ProcessTimes {
    threads: BTreeMap<String, ThreadTimes>,
}

/// Differences of two such readings.
#[derive(Debug, Clone, Copy, Default)]
pub struct SpentTimes {
    pub run_seconds: f64,
    pub wait_seconds: f64,
    pub switches: f64,
    /// Threads that waited all the time. The kernel counts a wait when it has ended.
    pub starved: f64,
}

impl ProcessTimes {
    pub fn of(pids: &[u32]) -> Self {
        let mut threads = BTreeMap::new();
        for pid in pids {
            for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
                // A thread may end between listing and reading.
                if let Some(times) = ThreadTimes::of(&task.path()) {
                    threads.insert(task.path().to_string_lossy().into_owned(), times);
                }
            }
        }
        Self { threads }
    }

    pub fn since(&self, before: &Self) -> SpentTimes {
        let mut spent = SpentTimes::default();
        for (thread, now) in &self.threads {
            let before = before.threads.get(thread).copied().unwrap_or_default();
            spent.run_seconds += (now.run_ns - before.run_ns) / 1e9;
            spent.wait_seconds += (now.wait_ns - before.wait_ns) / 1e9;
            spent.switches += now.switches - before.switches;
            if now.is_runnable && before.is_runnable && now.run_ns <= before.run_ns {
                spent.starved += 1.0;
            }
        }
        spent
    }
}

/// Returns the number of all switches of the machine since it started.
pub fn machine_switches() -> Result<f64> {
    let text = fs::read_to_string("/proc/stat").context("reading /proc/stat")?;
    let line = text.lines().find_map(|line| line.strip_prefix("ctxt "));
    line.and_then(|count| count.trim().parse().ok()).context("/proc/stat has no switches")
}

/// Reads the machine's run queue (the fourth field of `/proc/loadavg`) until it is stopped.
pub struct RunQueueWatch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<f64>,
}

impl RunQueueWatch {
    pub fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let watched = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            // It must run in time where tasks wait. Without the right to it, it reads less often.
            let _ = rustix::process::setpriority_process(None, -20);
            let (mut sum, mut count) = (0.0, 0_usize);
            while !watched.load(Ordering::Relaxed) {
                if let Some(running) = running_tasks() {
                    sum += running;
                    count += 1;
                }
                std::thread::sleep(SAMPLE_EVERY);
            }
            sum / to_float(count.max(1))
        });
        Self { stop, thread }
    }

    /// Returns the mean number of tasks that ran or waited.
    pub fn stop(self) -> Result<f64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the watch of the run queue panicked"))
    }
}

/// Returns the number of tasks that run or wait now, without the reader.
fn running_tasks() -> Option<f64> {
    let text = fs::read_to_string("/proc/loadavg").ok()?;
    let running: f64 = text.split_ascii_whitespace().nth(3)?.split('/').next()?.parse().ok()?;
    Some(running - 1.0)
}

/// Switch of the kernel that puts each session in a scheduling group of its own.
const AUTOGROUP: &str = "/proc/sys/kernel/sched_autogroup_enabled";

/// Keeps autogroup off. With it, all bare machines are one group, and their nice values say nothing
/// to others. Restores the switch when dropped.
#[derive(Debug)]
pub struct NoAutogroup {
    before: Option<String>,
}

impl NoAutogroup {
    pub fn set() -> Self {
        let before = fs::read_to_string(AUTOGROUP).ok().map(|text| text.trim().to_owned());
        let is_set = before.is_some() && fs::write(AUTOGROUP, "0").is_ok();
        Self { before: before.filter(|_| is_set) }
    }
}

impl Drop for NoAutogroup {
    fn drop(&mut self) {
        if let Some(word) = &self.before
            && let Err(error) = fs::write(AUTOGROUP, word)
        {
            eprintln!("{AUTOGROUP} could not be made '{word}' again: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_times_grow_and_nothing_starves() {
        let pids = [std::process::id()];
        let before = ProcessTimes::of(&pids);
        let mut sum = 0_u64;
        for number in 0..20_000_000_u64 {
            sum = std::hint::black_box(sum.wrapping_add(number));
        }
        let spent = ProcessTimes::of(&pids).since(&before);
        assert!(spent.run_seconds > 0.0 && spent.starved == 0.0, "{spent:?}");
    }

    #[test]
    fn machine_is_counted() {
        assert!(machine_switches().unwrap() > 0.0);
        assert!(running_tasks().unwrap() >= 0.0);
    }
}
