//! How busy the machine is, for rules: found out again only when what is known is too old, by one thread for all.
//!
//! Not here: who compares it with what (the operator's rules).

use std::time::Duration;

use crate::recent::Recent;

/// The kernel itself computes its averages anew every 5 seconds (include/linux/sched/loadavg.h).
const AVERAGES_AGE_MAX: Duration = Duration::from_secs(1);

/// Counting goes through all gates, so it is not done for each request.
const RUNNING_AGE_MAX: Duration = Duration::from_millis(10);

/// Fixed point of `sysinfo(2)`.
const ONE: f64 = 65_536.0;

/// Over 1, 5 and 15 minutes, as in `/proc/loadavg`.
pub type Averages = [f64; 3];

#[derive(Debug)]
pub struct Load {
    averages: Recent<Averages>,
    running: Recent<u64>,
}

impl Load {
    pub fn new() -> Self {
        Self { averages: Recent::new(AVERAGES_AGE_MAX), running: Recent::new(RUNNING_AGE_MAX) }
    }

    pub fn averages(&self) -> Averages {
        self.averages.get(|| rustix::system::sysinfo().loads.map(|load| load as f64 / ONE))
    }

    /// Requests that run now, as `count` finds them.
    pub fn running(&self, count: impl FnOnce() -> u64) -> u64 {
        self.running.get(count)
    }
}

impl Default for Load {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_are_what_the_kernel_says() {
        let averages = Load::new().averages();
        let text = std::fs::read_to_string("/proc/loadavg").unwrap();
        let said: Vec<f64> = text.split(' ').take(3).map(|word| word.parse().unwrap()).collect();
        // The kernel may have computed it anew in between; over 15 minutes that moves it by little.
        assert!((averages[2] - said[2]).abs() < 0.5, "{averages:?} {text}");
    }
}
