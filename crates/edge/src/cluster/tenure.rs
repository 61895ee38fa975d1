//! This node's authority: until when it may run what is placed on it.
//!
//! Not here: how it is earned (the supervisor), what stops without it (`place`, the keeper).

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nagaya_placement::Moment;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::watch;
use tokio::time::timeout;

/// The end of the authority, on the clock that goes on while the machine is suspended.
#[derive(Debug, Default)]
pub struct Tenure {
    until_ns: AtomicU64,
    extended: watch::Sender<u64>,
}

impl Tenure {
    /// It never becomes less.
    pub fn extend(&self, until_ns: u64) {
        self.until_ns.fetch_max(until_ns, Ordering::AcqRel);
        self.extended.send_replace(until_ns);
    }

    pub fn holds(&self) -> bool {
        boottime_ns() < self.until_ns.load(Ordering::Acquire)
    }

    /// What is left of it.
    pub fn left(&self) -> Duration {
        Duration::from_nanos(self.until_ns.load(Ordering::Acquire).saturating_sub(boottime_ns()))
    }

    /// Waits until there is authority. False: there was none for so long.
    pub async fn regained(&self, patience: Duration) -> bool {
        if self.holds() {
            return true;
        }
        let mut extended = self.extended.subscribe();
        let holds = async {
            while !self.holds() {
                if extended.changed().await.is_err() {
                    return;
                }
            }
        };
        // Whoever ran out of patience looks a last time: it may have come just now.
        timeout(patience, holds).await.is_ok() || self.holds()
    }
}

/// The same as the pure state machines count it.
pub fn boottime() -> Moment {
    Moment(boottime_ns())
}

/// CLOCK_BOOTTIME: all processes of the node read the same, and it does not stop while the machine sleeps.
fn boottime_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn authority_that_was_never_given_does_not_hold() {
        let tenure = Tenure::default();
        assert!(!tenure.holds());
        assert_eq!(tenure.left(), Duration::ZERO);
    }

    #[test]
    fn it_never_becomes_less() {
        let tenure = Tenure::default();
        tenure.extend(boottime_ns() + 60_000_000_000);
        tenure.extend(1);
        assert!(tenure.holds() && tenure.left() > SOON);
    }

    #[tokio::test]
    async fn who_waits_for_it_goes_on_when_it_comes_and_not_before() {
        let tenure = std::sync::Arc::new(Tenure::default());
        assert!(!tenure.regained(Duration::from_millis(5)).await);
        let waiting = tokio::spawn({
            let tenure = std::sync::Arc::clone(&tenure);
            async move { tenure.regained(SOON).await }
        });
        tokio::task::yield_now().await;
        // One that has passed already is none.
        tenure.extend(1);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        tenure.extend(boottime_ns() + 60_000_000_000);
        assert!(waiting.await.unwrap());
    }
}
