//! Whether an idle instance computes, by the CPU time of its cell. Pure.
//!
//! Not here: reading that time, and what follows (`run::work`).

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::instances::decide::lifecycle::RunId;

/// An instance computes if it has used more than this share of one CPU since the last check. Timers
/// and collectors of idle programs use less than one percent.
const BUSY_PERCENT: u32 = 5;

/// CPU use of its cell at the last check in this idle time.
#[derive(Debug, Clone, Copy)]
struct CpuMark {
    run: RunId,
    idle_since: Instant,
    at: Instant,
    cpu_us: u64,
}

/// The last check of one instance.
#[derive(Debug, Default)]
pub struct WorkMeter(Cell<Option<CpuMark>>);

impl WorkMeter {
    /// Sets the time since when it is idle, if it is. Reads the CPU use when that has changed.
    pub fn follow(&self, run: RunId, idle_since: Option<Instant>, cpu_us: impl FnOnce() -> Option<u64>) {
        let Some(idle_since) = idle_since else { return };
        if self.0.get().is_some_and(|mark| (mark.run, mark.idle_since) == (run, idle_since)) {
            return;
        }
        self.0.set(cpu_us().map(|cpu_us| CpuMark { run, idle_since, at: Instant::now(), cpu_us }));
    }

    /// Whether it has computed since the last check. False without a check, or without CPU
    /// counting.
    pub fn has_computed(&self, run: RunId, now: Instant, cpu_us: Option<u64>) -> bool {
        let Some((mark, cpu_us)) = self.0.get().zip(cpu_us) else { return false };
        self.0.set(Some(CpuMark { at: now, cpu_us, ..mark }));
        let used = Duration::from_micros(cpu_us.saturating_sub(mark.cpu_us));
        let passed = now.saturating_duration_since(mark.at);
        mark.run == run && used * 100 > passed * BUSY_PERCENT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_computes_if_it_uses_more_than_a_share() {
        let (meter, now) = (WorkMeter::default(), Instant::now());
        let later = |ms| now + Duration::from_millis(ms);
        assert!(!meter.has_computed(RunId(1), now, Some(9)), "nothing was noted");
        meter.follow(RunId(1), Some(now), || Some(1_000_000));
        meter.follow(RunId(1), Some(now), || panic!("it is noted already"));
        let mark = meter.0.get().unwrap();
        meter.0.set(Some(CpuMark { at: now, ..mark }));
        assert!(!meter.has_computed(RunId(1), later(1000), Some(1_050_000)), "five percent");
        assert!(meter.has_computed(RunId(1), later(2000), Some(1_101_000)), "since the last look");
        assert!(!meter.has_computed(RunId(1), later(3000), Some(1_101_000)));
        assert!(!meter.has_computed(RunId(1), later(4000), None), "nobody counts");
        assert!(!meter.has_computed(RunId(2), later(5000), Some(9_000_000)), "another run");
    }
}
