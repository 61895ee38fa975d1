//! Measures the thread's own time on a request, where the request is polled.
//!
//! Polling does not wait. So its duration is CPU time of this thread, unless the kernel ran another
//! thread in between. Asking the kernel for the thread's CPU time would be exact, but cost a system
//! call each time. This costs two readings of a clock that needs no call. A request that never
//! waits shares both with the measurement of its duration. Not here: CPU time of programs
//! (`execution`).

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::Pin;
use std::time::{Duration, Instant, SystemTime};

use nagaya_base::Clock;

thread_local! {
    static TURN: Cell<Option<PollMeter>> = const { Cell::new(None) };
}

/// The part of a request that is polled in `metered`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MeterScope {
    /// Until its response is there. The body is sent elsewhere.
    Answer,
    /// To the end of its response.
    Everything,
}

/// The present poll of a request.
#[derive(Debug, Clone, Copy)]
struct PollMeter {
    since: Instant,
    /// Time spent in earlier polls.
    before: Duration,
    covers: MeterScope,
}

/// Runs the work for one request. Within it `spent` returns this thread's time for it. `None`
/// disables the measurement. The work stays where its caller has it: it is large, and each move
/// copies it.
pub async fn metered<F: Future>(covers: Option<MeterScope>, mut work: Pin<&mut F>) -> F::Output {
    let Some(covers) = covers else { return work.await };
    let mut before = Duration::ZERO;
    poll_fn(|cx| {
        let since = Instant::now();
        let outer = TURN.replace(Some(PollMeter { since, before, covers }));
        let polled = work.as_mut().poll(cx);
        TURN.set(outer);
        if polled.is_pending() {
            before += since.elapsed();
        }
        polled
    })
    .await
}

/// Returns the start of the present poll. It serves as the present time for everything that
/// begins in it.
pub fn now() -> Instant {
    TURN.get().map_or_else(Instant::now, |turn| turn.since)
}

/// A clock by which no time passes within a poll of a request: it is read once for each.
#[derive(Debug, Clone, Copy, Default)]
pub struct PollClock;

impl Clock for PollClock {
    fn now(&self) -> Instant {
        now()
    }

    fn wall(&self) -> SystemTime {
        SystemTime::now()
    }
}

/// Returns the time until now, if the body is sent elsewhere and nobody will know more.
pub fn spent_on_answer() -> Option<Duration> {
    TURN.get().filter(|turn| turn.covers == MeterScope::Answer).map(|turn| turn.before + turn.since.elapsed())
}

/// Returns this thread's time for the polled request until `now`. `None` outside of `metered`.
pub fn spent(now: Instant) -> Option<Duration> {
    TURN.get().map(|turn| turn.before + now.saturating_duration_since(turn.since))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    #[tokio::test]
    async fn only_time_in_polls_is_counted() {
        assert!(spent(Instant::now()).is_none());
        let work = async {
            let start = now();
            while spent(Instant::now()).is_some_and(|spent| spent < Duration::from_millis(2)) {}
            let other = pin!(async { spent_on_answer().unwrap() });
            let other = metered(Some(MeterScope::Answer), other).await;
            assert!(other < Duration::from_millis(2), "another request's time is its own");
            assert!(spent_on_answer().is_none(), "more will be known at the end");
            tokio::task::spawn_blocking(|| {
                let start = Instant::now();
                while start.elapsed() < Duration::from_millis(50) {}
            })
            .await
            .unwrap();
            let now = Instant::now();
            (spent(now).unwrap(), now - start)
        };
        let (spent, took) = metered(Some(MeterScope::Everything), pin!(work)).await;
        assert!(spent >= Duration::from_millis(2), "{spent:?}");
        assert!(spent + Duration::from_millis(40) < took, "{spent:?} of {took:?}");
        assert!(super::spent(Instant::now()).is_none());
    }
}
