//! Holds this node's lease: the time until which it may run its placements.
//!
//! Not here: how it is earned (the supervisor), what stops without it (`placement`, the keeper).

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nagaya_placement::Moment;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::watch;
use tokio::time::timeout;

/// The end of the lease, on the clock that goes on while the machine is suspended.
#[derive(Debug, Default)]
pub struct NodeLease {
    until_ns: AtomicU64,
    extended: watch::Sender<u64>,
}

impl NodeLease {
    /// Extends the lease. It never becomes shorter.
    pub fn extend(&self, until_ns: u64) {
        self.until_ns.fetch_max(until_ns, Ordering::AcqRel);
        self.extended.send_replace(until_ns);
    }

    pub fn holds(&self) -> bool {
        boottime_ns() < self.until_ns.load(Ordering::Acquire)
    }

    /// Returns the rest of the lease.
    pub fn left(&self) -> Duration {
        Duration::from_nanos(self.until_ns.load(Ordering::Acquire).saturating_sub(boottime_ns()))
    }

    /// Waits until the node holds the lease. Returns false if it does not within `patience`.
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
        // Checks a last time after the timeout, because the lease may have come just now.
        timeout(patience, holds).await.is_ok() || self.holds()
    }
}

/// Returns the time in the form of the pure state machines.
pub fn boottime() -> Moment {
    Moment(boottime_ns())
}

/// Returns CLOCK_BOOTTIME. It is the same in all processes of the node, and does not stop while
/// the machine sleeps.
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
        let lease = NodeLease::default();
        assert!(!lease.holds());
        assert_eq!(lease.left(), Duration::ZERO);
    }

    #[test]
    fn it_never_becomes_less() {
        let lease = NodeLease::default();
        lease.extend(boottime_ns() + 60_000_000_000);
        lease.extend(1);
        assert!(lease.holds() && lease.left() > SOON);
    }

    #[tokio::test]
    async fn waiter_continues_when_authority_comes_and_not_before() {
        let lease = std::sync::Arc::new(NodeLease::default());
        assert!(!lease.regained(Duration::from_millis(5)).await);
        let waiting = tokio::spawn({
            let lease = std::sync::Arc::clone(&lease);
            async move { lease.regained(SOON).await }
        });
        tokio::task::yield_now().await;
        // One that has passed already is none.
        lease.extend(1);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        lease.extend(boottime_ns() + 60_000_000_000);
        assert!(waiting.await.unwrap());
    }
}
