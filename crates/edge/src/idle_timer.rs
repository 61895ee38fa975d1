//! Limits waiting, at no cost while there is no waiting.
//!
//! One timer serves a connection for life. It is set again only when it fires too early. Entering
//! and removing a timer for each request would cost more than parsing one. Not here: the event
//! that is awaited.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

/// A timer that ends a given time after its last start.
pub struct IdleTimer {
    timer: Pin<Box<Sleep>>,
    until: Instant,
}

impl IdleTimer {
    /// Starts now.
    pub fn new(patience: Duration) -> Self {
        Self { timer: Box::pin(sleep(patience)), until: Instant::now() + patience }
    }

    /// Starts again, with this duration.
    pub fn begin(&mut self, patience: Duration) {
        self.until = Instant::now() + patience;
        if self.timer.deadline() > self.until {
            self.timer.as_mut().reset(self.until);
        }
    }

    /// Ready when it is over. Wakes the task then. Poll it again if it is not over yet.
    pub fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.timer.as_mut().poll(cx).is_ready() {
            if self.until <= Instant::now() {
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(self.until);
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn silence_ends_with_the_last_patience_set() {
        let second = Duration::from_secs(1);
        let start = Instant::now();
        let mut silence = IdleTimer::new(second * 10);
        silence.begin(second * 3);
        poll_fn(|cx| silence.poll_over(cx)).await;
        assert_eq!(start.elapsed().as_secs(), 3);
        silence.begin(second * 20);
        poll_fn(|cx| silence.poll_over(cx)).await;
        assert_eq!(start.elapsed().as_secs(), 23);
    }
}
