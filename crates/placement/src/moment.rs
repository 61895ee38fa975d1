//! A moment of one machine's own clock.
//!
//! Not here: reading that clock (whoever calls), time of day (nothing here depends on it).

use std::ops::Add;
use std::time::Duration;

/// Nanoseconds of a clock that never goes back and runs on while the machine sleeps (CLOCK_BOOTTIME). Those of two machines have
/// nothing to do with each other; only how fast they run is about the same ([`crate::fence::DRIFT_PPM`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment(pub u64);

impl Moment {
    /// How long ago `earlier` was; nothing if it is yet to come.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// So long ago, as far as this clock has run by then.
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
