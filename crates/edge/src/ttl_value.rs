//! Caches a value for a fixed time. One thread refreshes it, and the others keep reading the old
//! one.
//!
//! Not here: computing the value.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;

/// A value that is valid for a while.
#[derive(Debug)]
pub struct TtlValue<T> {
    began: Instant,
    age_max: Duration,
    /// Microseconds after `began` from which it is refreshed.
    due_us: AtomicU64,
    last: RwLock<T>,
}

impl<T: Copy + Default> TtlValue<T> {
    pub fn new(age_max: Duration) -> Self {
        Self { began: Instant::now(), age_max, due_us: AtomicU64::new(0), last: RwLock::default() }
    }

    pub fn get(&self, find_out: impl FnOnce() -> T) -> T {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let now = micros(self.began.elapsed());
        let due = self.due_us.load(Ordering::Relaxed);
        if now >= due {
            let next = now + micros(self.age_max);
            // Others go on with the old value.
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
    fn a_value_is_found_out_once_while_it_is_good() {
        let kept = TtlValue::new(Duration::from_secs(3600));
        assert_eq!((kept.get(|| 1), kept.get(|| 2)), (1, 1));
        let never_good = TtlValue::new(Duration::ZERO);
        assert_eq!((never_good.get(|| 1), never_good.get(|| 2)), (1, 2));
    }
}
