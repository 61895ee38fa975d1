//! How busy the machine is, for rules: found out again only when what is known is too old, by one thread for all.
//!
//! Not here: who compares it with what (the operator's rules).

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;

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

/// A value that is good for a while.
#[derive(Debug)]
struct Recent<T> {
    began: Instant,
    age_max: Duration,
    /// Microseconds after `began` from which on it is found out anew.
    due_us: AtomicU64,
    last: RwLock<T>,
}

impl<T: Copy + Default> Recent<T> {
    fn new(age_max: Duration) -> Self {
        Self { began: Instant::now(), age_max, due_us: AtomicU64::new(0), last: RwLock::default() }
    }

    fn get(&self, find_out: impl FnOnce() -> T) -> T {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let now = micros(self.began.elapsed());
        let due = self.due_us.load(Ordering::Relaxed);
        if now >= due {
            let next = now + micros(self.age_max);
            // Others go on with what was known.
            if self.due_us.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                *self.last.write() = find_out();
            }
        }
        *self.last.read()
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

    #[test]
    fn a_value_is_found_out_once_while_it_is_good() {
        let kept = Recent::new(Duration::from_secs(3600));
        assert_eq!((kept.get(|| 1), kept.get(|| 2)), (1, 1));
        let never_good = Recent::new(Duration::ZERO);
        assert_eq!((never_good.get(|| 1), never_good.get(|| 2)), (1, 2));
    }
}
