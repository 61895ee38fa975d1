//! A bound on waiting that costs nothing while there is no waiting.
//!
//! One timer serves a connection for life: it is set anew only when it goes off too early, since entering and
//! removing a timer for each request would cost more than parsing one. Not here: what is waited for.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

/// So long after it began it is over.
pub struct Silence {
    timer: Pin<Box<Sleep>>,
    until: Instant,
}

impl Silence {
    /// Begins now.
    pub fn new(patience: Duration) -> Self {
        Self { timer: Box::pin(sleep(patience)), until: Instant::now() + patience }
    }

    /// Begins anew, with this much patience.
    pub fn begin(&mut self, patience: Duration) {
        self.until = Instant::now() + patience;
        if self.timer.deadline() > self.until {
            self.timer.as_mut().reset(self.until);
        }
    }

    /// Ready when it is over. Wakes the task then, so it is polled again when it is not over yet.
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
    async fn it_ends_when_the_last_patience_is_over_whatever_the_timer_was_set_to() {
        let second = Duration::from_secs(1);
        let start = Instant::now();
        let mut silence = Silence::new(second * 10);
        silence.begin(second * 3);
        poll_fn(|cx| silence.poll_over(cx)).await;
        assert_eq!(start.elapsed().as_secs(), 3);
        silence.begin(second * 20);
        poll_fn(|cx| silence.poll_over(cx)).await;
        assert_eq!(start.elapsed().as_secs(), 23);
    }
}
