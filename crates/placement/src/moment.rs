//! A moment of one machine's own clock.
//!
//! Not here: reading that clock (the callers), time of day (nothing here depends on it).

use std::ops::Add;
use std::time::Duration;

/// Nanoseconds of a clock that never goes back and continues while the machine sleeps
/// (`CLOCK_BOOTTIME`). The clocks of two machines are unrelated, except that they run about equally
/// fast ([`crate::lease::DRIFT_PPM`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment(pub u64);

impl Moment {
    /// Returns how long ago `earlier` was; zero if it is in the future.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Returns the moment that long ago, at the earliest the clock's start.
    pub fn before(self, time: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, time: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_neither_wraps_nor_goes_back() {
        assert_eq!(Moment(5) + Duration::from_nanos(3), Moment(8));
        assert_eq!(Moment(5) + Duration::MAX, Moment(u64::MAX));
        assert_eq!(Moment(8).since(Moment(5)), Duration::from_nanos(3));
        assert_eq!(Moment(5).since(Moment(8)), Duration::ZERO);
        assert_eq!(Moment(5).before(Duration::from_nanos(3)), Moment(2));
        assert_eq!(Moment(5).before(Duration::MAX), Moment(0));
    }
}
