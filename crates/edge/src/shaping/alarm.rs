//! Sleeps to a fraction of a millisecond.
//!
//! The runtime's timers count whole milliseconds and round up. That is too coarse for a program
//! that ran for one. Not here: the sleepers and their reasons (`quota_debt`).

use std::io;
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use tokio::io::Interest;
use tokio::time::{Instant, sleep_until};

use crate::sys;

/// Time that is left to the kernel's timer, because the runtime's may be late by this much.
const FINE: Duration = Duration::from_millis(2);

/// Time below which no timer is set: setting it would take about as long.
const NEGLIGIBLE: Duration = Duration::from_micros(20);

/// Completes at `until`, about 60 microseconds late.
pub async fn sleep_precisely(until: Instant) {
    if let Some(coarse) = until.checked_sub(FINE)
        && coarse > Instant::now()
    {
        sleep_until(coarse).await;
    }
    let left = until.saturating_duration_since(Instant::now());
    if left <= NEGLIGIBLE {
        return;
    }
    // Without a descriptor for the timer a millisecond's error is better than no wait.
    if kernel_timer(left).await.is_err() {
        sleep_until(until).await;
    }
}

async fn kernel_timer(time: Duration) -> io::Result<()> {
    let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
    let once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let value = Timespec::try_from(time).map_err(io::Error::other)?;
    timerfd_settime(&timer, TimerfdTimerFlags::empty(), &Itimerspec { it_interval: once, it_value: value })?;
    let _due = sys::watch(timer, Interest::READABLE)?.readable().await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_never_ends_early() {
        for us in [0, 5, 300, 1700, 3400] {
            let until = Instant::now() + Duration::from_micros(us);
            sleep_precisely(until).await;
            assert!(Instant::now() + NEGLIGIBLE >= until, "{us}");
        }
    }
}
