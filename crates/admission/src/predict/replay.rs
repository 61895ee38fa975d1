//! When it is the turn of who stands last in a short line: played through, request by request.
//!
//! Where a few slow requests are among many quick ones, it matters which permit holds what and since when, and where in line
//! the slow ones stand. So the line is handed out to permits as they are expected to come back. The sum over kinds
//! (`predict::outlook`) is as good for long lines, where chance evens out, and better for requests that vary at random.
//!
//! Not here: what a kind of request takes (`predict::pace`).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Requests, running or ahead in line, that are played through at most: a few microseconds of reckoning.
pub(crate) const REPLAY_MAX: usize = 256;

/// Permits by when they come back, in microseconds from now.
#[derive(Debug)]
pub(super) struct Replay {
    ends: BinaryHeap<Reverse<u64>>,
}

impl Replay {
    pub(super) fn new() -> Self {
        Self { ends: BinaryHeap::with_capacity(REPLAY_MAX) }
    }

    /// One that runs, with what is left of it on average.
    pub(super) fn runs(&mut self, rest: f64) {
        self.ends.push(Reverse(whole(rest)));
    }

    /// More run than may: so many of those that end first free nothing.
    pub(super) fn take_away(&mut self, count: usize) {
        for _ in 0..count {
            self.ends.pop();
        }
    }

    /// The next in line.
    pub(super) fn waits(&mut self, service: f64) {
        if let Some(Reverse(begins)) = self.ends.pop() {
            self.ends.push(Reverse(begins.saturating_add(whole(service))));
        }
    }

    /// When the next one has its turn. `None`: never.
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
        let mut replay = Replay::new();
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
