//! Enforces the minimum rate at which a client must send, as Apache's mod_reqtimeout does.
//!
//! A head or a body has a first allowance of time. Each `rate` bytes that arrive make it one second
//! longer, up to a bound. Only time that this server waited for the client counts. Neither a limit
//! of ours nor a slow program takes any of it. Not here: silence (`idle_timer`), the readers (`h1`,
//! `h2`), the settings (`options`).

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

use crate::options::EdgeLimits;

/// Time limits for arriving data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArrivalLimits {
    /// Time for the first byte and all others.
    pub first: Duration,
    /// Number of bytes that add a second. With 0, none do.
    pub rate: u64,
    /// Maximum total time.
    pub most: Duration,
    /// Longest silence.
    pub silence: Duration,
}

impl ArrivalLimits {
    pub fn of_head(limits: &EdgeLimits) -> Self {
        let pace = &limits.pace;
        let first = Duration::from_millis(limits.head_ms);
        let most = first.max(Duration::from_millis(pace.head_max_ms));
        Self { first, rate: pace.head_rate, most, silence: most }
    }

    pub fn of_body(limits: &EdgeLimits) -> Self {
        let pace = &limits.pace;
        let silence = Duration::from_millis(limits.idle_body_ms);
        if pace.body_ms == 0 {
            return Self { first: Duration::MAX, rate: 0, most: Duration::MAX, silence };
        }
        let first = Duration::from_millis(pace.body_ms);
        Self { first, rate: pace.body_rate, most: Duration::MAX, silence }
    }

    /// Returns the allowance for data that a client still sends after its response. It may be
    /// silent for `first`.
    pub fn of_linger(first: Duration, rate: u64, most: Duration) -> Self {
        Self { first, rate, most, silence: first }
    }

    /// Returns the time that `bytes` may take.
    pub fn time(&self, bytes: u64) -> Duration {
        let earned = match self.rate {
            0 => Duration::ZERO,
            // Whole seconds and the rest are separate, so that no product overflows.
            rate => {
                let rest = u128::from(bytes % rate) * 1_000_000_000 / u128::from(rate);
                Duration::from_secs(bytes / rate) + Duration::from_nanos(u64::try_from(rest).unwrap_or(0))
            }
        };
        self.first.saturating_add(earned).min(self.most)
    }
}

/// One head or body that arrives.
#[derive(Debug)]
pub struct ArrivalTimer {
    allowance: ArrivalLimits,
    received: u64,
    /// Time spent waiting for the client, without the present wait.
    waited: Duration,
    /// Start of the present wait.
    since: Option<Instant>,
    /// Created at the first wait.
    timer: Option<Pin<Box<Sleep>>>,
}

impl ArrivalTimer {
    pub fn new(allowance: ArrivalLimits) -> Self {
        Self { allowance, received: 0, waited: Duration::ZERO, since: None, timer: None }
    }

    /// Records that `bytes` bytes arrived.
    pub fn received(&mut self, bytes: usize) {
        self.received = self.received.saturating_add(bytes as u64);
        if let Some(since) = self.since.take() {
            self.waited += since.elapsed();
        }
    }

    /// Waits for the client when no data is there. Ready when it has been too slow, or silent for
    /// too long.
    pub fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let since = *self.since.get_or_insert_with(Instant::now);
        let left = self.allowance.time(self.received).saturating_sub(self.waited).min(self.allowance.silence);
        let Some(due) = since.checked_add(left) else { return Poll::Pending };
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
        if timer.deadline() != due {
            timer.as_mut().reset(due);
        }
        timer.as_mut().poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::{advance, timeout};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// `header=20-40,MinRate=500` of Apache.
    const HEAD: ArrivalLimits = ArrivalLimits {
        first: Duration::from_secs(20),
        rate: 500,
        most: Duration::from_secs(40),
        silence: Duration::from_secs(40),
    };

    /// `body=20,MinRate=500` of Apache.
    const BODY: ArrivalLimits = ArrivalLimits {
        first: Duration::from_secs(20),
        rate: 500,
        most: Duration::MAX,
        silence: Duration::from_secs(30),
    };

    #[test]
    fn each_rate_of_bytes_adds_a_second() {
        for (bytes, seconds) in
            [(0, 20.0), (250, 20.5), (500, 21.0), (5_000, 30.0), (10_000, 40.0), (1 << 40, 40.0)]
        {
            assert_eq!(HEAD.time(bytes).as_secs_f64(), seconds, "{bytes} bytes of a head");
        }
        assert_eq!(BODY.time(1_000_000).as_secs(), 2_020);
        assert_eq!(ArrivalLimits { rate: 0, ..BODY }.time(u64::MAX), BODY.first);
        assert_eq!(ArrivalLimits { first: Duration::MAX, ..BODY }.time(5), Duration::MAX);
        assert_eq!(ArrivalLimits { rate: u64::MAX, ..BODY }.time(u64::MAX - 1).as_secs(), 20);
    }

    /// When a client that sends `bytes` every `pause` is given up; none: it is not, within an hour.
    async fn given_up(allowance: ArrivalLimits, bytes: usize, pause: Duration) -> Option<u64> {
        let (begin, mut arrival) = (Instant::now(), ArrivalTimer::new(allowance));
        while begin.elapsed() < Duration::from_secs(3600) {
            let late = poll_fn(|cx| arrival.poll_late(cx));
            if timeout(pause, late).await.is_ok() {
                return Some(begin.elapsed().as_secs());
            }
            arrival.received(bytes);
        }
        None
    }

    #[tokio::test(start_paused = true)]
    async fn dripping_client_is_given_up_and_a_slow_one_is_not() {
        // A byte every five seconds: 20 s and what four bytes are worth.
        assert_eq!(given_up(BODY, 1, 5 * SECOND).await, Some(20));
        assert_eq!(given_up(BODY, 1, SECOND).await, Some(20));
        // 400 of 500 bytes a second: each second of waiting earns 0.8.
        assert!(matches!(given_up(BODY, 400, SECOND).await, Some(95..=100)));
        assert_eq!(given_up(BODY, 500, SECOND).await, None);
        assert_eq!(given_up(BODY, 5_000, 10 * SECOND).await, None);
        assert_eq!(given_up(HEAD, 500, SECOND).await, Some(40), "a head has an end whatever its rate");
    }

    #[tokio::test(start_paused = true)]
    async fn silence_ends_it_whatever_was_sent_before() {
        let mut arrival = ArrivalTimer::new(BODY);
        arrival.received(1 << 20);
        let begin = Instant::now();
        poll_fn(|cx| arrival.poll_late(cx)).await;
        assert_eq!(begin.elapsed(), BODY.silence);
        let none = ArrivalLimits { first: Duration::MAX, rate: 0, ..BODY };
        assert_eq!(given_up(none, 1, 29 * SECOND).await, None, "without a rate only silence counts");
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_nobody_waits_for_the_client_does_not_count() {
        let mut arrival = ArrivalTimer::new(BODY);
        for _ in 0..100 {
            // It is there at once, and then held back by a limit of ours.
            arrival.received(1);
            advance(5 * SECOND).await;
        }
        assert!(timeout(19 * SECOND, poll_fn(|cx| arrival.poll_late(cx))).await.is_err());
    }
}
