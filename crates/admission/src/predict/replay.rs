//! Simulates a short queue, request by request, to find when its last request runs.
//!
//! With a few slow requests among many quick ones, details matter. They are the request and its age
//! on each permit, and the positions of slow ones in the queue. So the queue is assigned to permits
//! as they are expected to come back. The sum over kinds (`predict::outlook`) is as good for long
//! queues, where chance evens out. It is better for requests that vary at random.
//!
//! Not here: service times of a kind (`predict::pace`).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Most requests, running or queued, that are simulated: a few microseconds of computation.
pub(crate) const REPLAY_MAX: usize = 256;

/// Permits by when they come back, in microseconds from now.
#[derive(Debug)]
pub(super) struct PermitReplay {
    ends: BinaryHeap<Reverse<u64>>,
}

impl PermitReplay {
    pub(super) fn new() -> Self {
        Self { ends: BinaryHeap::with_capacity(REPLAY_MAX) }
    }

    /// Adds a running request, with its average remaining service.
    pub(super) fn runs(&mut self, rest: f64) {
        self.ends.push(Reverse(whole(rest)));
    }

    /// Takes permits away, because more run than may: the first to end free nothing.
    pub(super) fn take_away(&mut self, count: usize) {
        for _ in 0..count {
            self.ends.pop();
        }
    }

    /// Adds the next queued request.
    pub(super) fn waits(&mut self, service: f64) {
        if let Some(Reverse(begins)) = self.ends.pop() {
            self.ends.push(Reverse(begins.saturating_add(whole(service))));
        }
    }

    /// Returns when the next request runs. `None` if never.
    pub(super) fn turn(&self) -> Option<f64> {
        self.ends.peek().map(|Reverse(end)| *end as f64)
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole(micros: f64) -> u64 {
    micros.max(0.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_handed_out_as_permits_come_back() {
        let mut replay = PermitReplay::new();
        assert_eq!(replay.turn(), None);
        replay.runs(500.0);
        replay.runs(30.0);
        assert_eq!(replay.turn(), Some(30.0));
        // The slow one takes the first permit for long, the quick ones share the other.
        for service in [1_000.0, 5.0, 5.0] {
            replay.waits(service);
        }
        assert_eq!(replay.turn(), Some(510.0));
        replay.take_away(1);
        assert_eq!(replay.turn(), Some(1_030.0));
    }
}
