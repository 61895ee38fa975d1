//! The thread's own time on a request, measured where the request is polled.
//!
//! Polling does not wait, so the time between its begin and its end is CPU time of this thread, as long as the kernel
//! did not let another thread run in between. Asking the kernel for the thread's CPU time would be exact and cost
//! a system call each time; this costs two readings of a clock that needs none, and a request that never waits shares
//! both with the measurement of how long it took. Not here: CPU time of programs (`stay`).

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::pin;
use std::time::{Duration, Instant};

thread_local! {
    static TURN: Cell<Option<Turn>> = const { Cell::new(None) };
}

/// How much of a request is polled in `metered`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Covers {
    /// Until its answer is there; the body is sent elsewhere.
    Answer,
    /// To the end of its response.
    Everything,
}

/// One poll of a request that is going on now.
#[derive(Debug, Clone, Copy)]
struct Turn {
    since: Instant,
    /// Spent in earlier polls.
    before: Duration,
    covers: Covers,
}

/// Runs the work for one request; within it `spent` knows how much of this thread's time it has taken. `None`: nobody
/// wants to know.
pub async fn metered<F: Future>(covers: Option<Covers>, work: F) -> F::Output {
    let Some(covers) = covers else { return work.await };
    let mut work = pin!(work);
    let mut before = Duration::ZERO;
    poll_fn(|cx| {
        let since = Instant::now();
        let outer = TURN.replace(Some(Turn { since, before, covers }));
        let polled = work.as_mut().poll(cx);
        TURN.set(outer);
        if polled.is_pending() {
            before += since.elapsed();
        }
        polled
    })
    .await
}

/// When the poll that goes on now began, which is as good as the present for whatever begins in it.
pub fn now() -> Instant {
    TURN.get().map_or_else(Instant::now, |turn| turn.since)
}

/// Time until now, if nobody will know more: where the body is sent elsewhere.
pub fn spent_on_answer() -> Option<Duration> {
    TURN.get().filter(|turn| turn.covers == Covers::Answer).map(|turn| turn.before + turn.since.elapsed())
}

/// Time of this thread that the request being polled has taken until `now`. None outside of `metered`.
pub fn spent(now: Instant) -> Option<Duration> {
    TURN.get().map(|turn| turn.before + now.saturating_duration_since(turn.since))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_time_in_polls_is_counted() {
        assert!(spent(Instant::now()).is_none());
        let work = async {
            let start = now();
            while spent(Instant::now()).is_some_and(|spent| spent < Duration::from_millis(2)) {}
            let other = metered(Some(Covers::Answer), async { spent_on_answer().unwrap() }).await;
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
        let (spent, took) = metered(Some(Covers::Everything), work).await;
        assert!(spent >= Duration::from_millis(2), "{spent:?}");
        assert!(spent + Duration::from_millis(40) < took, "{spent:?} of {took:?}");
        assert!(super::spent(Instant::now()).is_none());
    }
}
