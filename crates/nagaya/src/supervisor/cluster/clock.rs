//! The two clocks of the cluster's thread. One counts while the machine sleeps. The other is Unix
//! time for records and events.

use std::time::SystemTime;

use nagaya_placement::Moment;
use rustix::time::{ClockId, clock_gettime};

/// Returns the time since the machine was started, which includes its sleep (`CLOCK_BOOTTIME`).
pub fn now() -> Moment {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Moment(seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// Returns Unix time in milliseconds.
pub fn unix_ms() -> u64 {
    u64::try_from(SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}
