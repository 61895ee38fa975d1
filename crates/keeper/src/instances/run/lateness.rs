//! Finds starts that are so slow that the next one makes better use of their wake slot.
//!
//! A place is for work on the processor. A start that sleeps, or that stands still because its own
//! limit is used up, does little of that; one that works for very long competes by its tenant's
//! weight, as all that runs does. Not here: places (`wake_queue`).

use std::fs;
use std::time::Duration;

use rustix::process::Pid;
use tokio::time::{Instant, sleep};

use crate::cells::CpuProgress;
use crate::context::KeeperContext;
use crate::instances::state::instance::SiteInstance;

/// Time between two checks of one start.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum time with a slot.
const PLACE_MAX: Duration = Duration::from_secs(10);

/// A start that used fewer hundredths of one CPU than this has slept, or has waited for a busy CPU.
const BUSY_MIN_PERCENT: u128 = 10;

/// A start that was asleep in this many checks in a row is idle.
const IDLE_LOOKS: u32 = 5;

/// Maximum number of threads that are checked for sleep. A start with more threads is assumed to
/// work.
const THREADS_MAX: usize = 256;

/// A start that was throttled for more of the time than this is slowed by its own limit alone.
const THROTTLED_MAX_PERCENT: u128 = 50;

/// Returns once the start, which has begun now, is late.
pub async fn wait_until_late(context: &KeeperContext, instance: &SiteInstance) {
    let began = Instant::now();
    let (mut last, mut looked, mut idle) = (None, began, 0);
    while began.elapsed() < PLACE_MAX {
        sleep(LOOK_INTERVAL).await;
        let (site, tenant) = (instance.site().name.clone(), instance.tenant().name.clone());
        let cells = context.cells().clone();
        let look = move || {
            let progress = cells.progress(&site, &tenant);
            let within = looked.elapsed();
            let pace = last.map_or(StartPace::Working, |last| StartPace::of(last, progress, within));
            let waits = pace == StartPace::Idle && wants_processor(&cells.pids_of(&site));
            Ok((progress, if waits { StartPace::Working } else { pace }))
        };
        // If no worker is free, that says nothing about the start.
        let Ok((progress, pace)) = context.on_worker(look).await else { continue };
        let now = Instant::now();
        match pace {
            StartPace::Throttled => return,
            StartPace::Idle => idle += 1,
            StartPace::Working => idle = 0,
        }
        if idle == IDLE_LOOKS {
            return;
        }
        (last, looked) = (Some(progress), now);
    }
}

/// Activity of a start between two checks.
#[derive(Debug, PartialEq, Eq)]
enum StartPace {
    Working,
    Idle,
    /// It was throttled for most of the time by its own limit, or its tenant's.
    Throttled,
}

impl StartPace {
    fn of(last: CpuProgress, now: CpuProgress, within: Duration) -> Self {
        let percent = |us: u64| u128::from(us) * 100 / within.as_micros().max(1);
        let worked = now.cpu_us.zip(last.cpu_us).map(|(now, last)| now.saturating_sub(last));
        if percent(now.throttled_us.saturating_sub(last.throttled_us)) > THROTTLED_MAX_PERCENT {
            Self::Throttled
        } else if worked.is_some_and(|worked| percent(worked) < BUSY_MIN_PERCENT) {
            Self::Idle
        } else {
            Self::Working
        }
    }
}

/// Whether a thread of these processes runs or could run: the state `R` of proc_pid_stat(5).
fn wants_processor(pids: &[Pid]) -> bool {
    let threads = pids.iter().flat_map(|pid| {
        let threads = fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero()));
        threads.into_iter().flatten().flatten()
    });
    let mut count = 0;
    threads.map(|thread| fs::read_to_string(thread.path().join("stat")).unwrap_or_default()).any(|stat| {
        count += 1;
        // The name before it may contain anything.
        let state = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        state.starts_with('R') || count > THREADS_MAX
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_tells_idle_throttled_and_working_apart() {
        let at = |cpu_us, throttled_us| CpuProgress { cpu_us, throttled_us };
        let window = Duration::from_millis(100);
        for (cpu_us, throttled_us, expected) in [
            (Some(0), 0, StartPace::Idle),
            (Some(9_000), 0, StartPace::Idle),
            (Some(11_000), 0, StartPace::Working),
            (Some(100_000), 0, StartPace::Working),
            (Some(20_000), 60_000, StartPace::Throttled),
            (Some(60_000), 40_000, StartPace::Working),
            (None, 0, StartPace::Working),
            (None, 80_000, StartPace::Throttled),
        ] {
            let began = at(cpu_us.map(|_| 5_000), 70_000);
            let now = at(cpu_us.map(|us| us + 5_000), throttled_us + 70_000);
            assert_eq!(StartPace::of(began, now, window), expected, "{cpu_us:?} {throttled_us}");
        }
        // Its cells were made anew.
        assert_eq!(StartPace::of(at(Some(500), 500), at(Some(0), 0), window), StartPace::Idle);
    }
}
