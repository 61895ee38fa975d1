//! Who starts so slowly that its place in the line of wakes is better used by the next one.
//!
//! A place is for work on the processor. A start that sleeps, or that stands still because its own limit is used up, does
//! little of that; one that works for very long competes by its tenant's weight, as all that runs does.
//! Not here: places (`wakes`).

use std::fs;
use std::rc::Rc;
use std::time::Duration;

use rustix::process::Pid;
use tokio::time::{Instant, sleep};

use super::Instance;
use crate::cells::Progress;
use crate::engine::Engine;

/// Between two looks at one start.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Longest time with a place.
const PLACE_MAX: Duration = Duration::from_secs(10);

/// A start that used less of one processor than this many hundredths has slept, or has waited for a busy one.
const BUSY_MIN_PERCENT: u128 = 10;

/// A start that was seen asleep so often in a row is idle.
const IDLE_LOOKS: u32 = 5;

/// Threads that are asked whether they sleep. A start that has more of them is taken to work.
const THREADS_MAX: usize = 256;

/// A start that stood still by its own limit for more of the time than this is slowed by that, and by nobody else.
const THROTTLED_MAX_PERCENT: u128 = 50;

/// Returns once the start, which has begun now, is late.
pub async fn until_late(engine: &Rc<Engine>, instance: &Instance) {
    let began = Instant::now();
    let (mut last, mut looked, mut idle) = (None, began, 0);
    while began.elapsed() < PLACE_MAX {
        sleep(LOOK_INTERVAL).await;
        let (site, tenant) = (instance.site().name.clone(), instance.tenant().name.clone());
        let cells = engine.cells().clone();
        let look = move || {
            let progress = cells.progress(&site, &tenant);
            let within = looked.elapsed();
            let pace = last.map_or(Pace::Working, |last| Pace::of(last, progress, within));
            let waits = pace == Pace::Idle && wants_processor(&cells.pids_of(&site));
            Ok((progress, if waits { Pace::Working } else { pace }))
        };
        // A worker that has no time says nothing of the start.
        let Ok((progress, pace)) = engine.on_worker(look).await else { continue };
        let now = Instant::now();
        match pace {
            Pace::Throttled => return,
            Pace::Idle => idle += 1,
            Pace::Working => idle = 0,
        }
        if idle == IDLE_LOOKS {
            return;
        }
        (last, looked) = (Some(progress), now);
    }
}

/// What a start did between two looks.
#[derive(Debug, PartialEq, Eq)]
enum Pace {
    Working,
    Idle,
    /// It stood still for most of the time by its own limit, or its tenant's.
    Throttled,
}

impl Pace {
    fn of(last: Progress, now: Progress, within: Duration) -> Self {
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
        // The name before it may hold anything.
        let state = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        state.starts_with('R') || count > THREADS_MAX
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_sleeps_and_who_is_throttled_is_told_from_who_works() {
        let at = |cpu_us, throttled_us| Progress { cpu_us, throttled_us };
        let window = Duration::from_millis(100);
        for (cpu_us, throttled_us, expected) in [
            (Some(0), 0, Pace::Idle),
            (Some(9_000), 0, Pace::Idle),
            (Some(11_000), 0, Pace::Working),
            (Some(100_000), 0, Pace::Working),
            (Some(20_000), 60_000, Pace::Throttled),
            (Some(60_000), 40_000, Pace::Working),
            (None, 0, Pace::Working),
            (None, 80_000, Pace::Throttled),
        ] {
            let began = at(cpu_us.map(|_| 5_000), 70_000);
            let now = at(cpu_us.map(|us| us + 5_000), throttled_us + 70_000);
            assert_eq!(Pace::of(began, now, window), expected, "{cpu_us:?} {throttled_us}");
        }
        // Its cells were made anew.
        assert_eq!(Pace::of(at(Some(500), 500), at(Some(0), 0), window), Pace::Idle);
    }
}
