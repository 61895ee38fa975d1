//! Provides the load of the machine to rules. One thread refreshes the values for all, only when
//! they are too old.
//!
//! Not here: the comparisons (the operator's rules).

use std::time::Duration;

use crate::ttl_value::TtlValue;

/// Maximum age of the averages. The kernel itself computes them every 5 seconds
/// (include/linux/sched/loadavg.h).
const AVERAGES_AGE_MAX: Duration = Duration::from_secs(1);

/// Maximum age of the count. It visits all lanes, so it is not done for each request.
const RUNNING_AGE_MAX: Duration = Duration::from_millis(10);

/// Fixed point of `sysinfo(2)`.
const ONE: f64 = 65_536.0;

/// Over 1, 5 and 15 minutes, as in `/proc/loadavg`.
pub type LoadAverages = [f64; 3];

#[derive(Debug)]
pub struct LoadReadings {
    averages: TtlValue<LoadAverages>,
    running: TtlValue<u64>,
}

impl LoadReadings {
    pub fn new() -> Self {
        Self { averages: TtlValue::new(AVERAGES_AGE_MAX), running: TtlValue::new(RUNNING_AGE_MAX) }
    }

    pub fn averages(&self) -> LoadAverages {
        self.averages.get(|| rustix::system::sysinfo().loads.map(|load| load as f64 / ONE))
    }

    /// Returns the number of running requests, as `count` finds them.
    pub fn running(&self, count: impl FnOnce() -> u64) -> u64 {
        self.running.get(count)
    }
}

impl Default for LoadReadings {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_are_what_the_kernel_says() {
        let averages = LoadReadings::new().averages();
        let text = std::fs::read_to_string("/proc/loadavg").unwrap();
        let said: Vec<f64> = text.split(' ').take(3).map(|word| word.parse().unwrap()).collect();
        // The kernel may have computed it anew in between; over 15 minutes that moves it by little.
        assert!((averages[2] - said[2]).abs() < 0.5, "{averages:?} {text}");
    }
}
