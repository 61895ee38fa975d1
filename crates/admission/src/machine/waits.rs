//! Predicts how long a queued request will wait.
//!
//! The wait is the work ahead over the rate at which it drains. If a lane is held back by its own
//! limit, both are well known. It drains as many microseconds of service in a microsecond as it has
//! permits. If a lane around it holds it back, the rate is the recent one. Its fair share counts if
//! that is more.
//!
//! Not here: service times (`predict`), and the systematic error of the sum
//! (`predict::calibration`).

use std::time::Duration;

use super::{Admission, RequestState};
use crate::lane::OWN_WEIGHT;
use crate::machine::wait_queue::{QueuePosition, QueueRank, WorkAhead};
use crate::predict::REPLAY_MAX;
use crate::{Moment, Prediction, RequestKey};

/// A wait, in microseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpectedWait {
    /// Wait computed from the work ahead.
    pub(super) reckoned: f64,
    /// Wait corrected by the usual error of such sums. Decisions are based on it.
    pub(super) expected: f64,
    /// Enough is known of the requests ahead to show the wait.
    pub(super) is_known: bool,
}

impl Admission {
    /// Returns the wait of a request at this position of this lane's queue, with `ahead` before it.
    /// `None` if nothing at all is known.
    pub(super) fn wait_behind(
        &self,
        now: Moment,
        index: u32,
        place: QueuePosition,
        ahead: WorkAhead,
    ) -> Option<ExpectedWait> {
        let lane = self.at(index);
        let total = lane.line.total();
        // The costs from the time of arrival only divide the present estimate of the total cost.
        let part = if ahead.count >= total.count { 1.0 } else { ahead.cost / total.cost.max(1.0) };
        let reckoned = if lane.is_full() && lane.running_own() + lane.lent > 0 {
            self.wait_for_own(now, index, place, ahead.count, part)?
        } else {
            self.wait_for_around(index, lane.learned.work_in_line()? * part)?
        };
        let is_last = place.rank == QueueRank::Newcomer && ahead.count >= total.count;
        let reckoned = if is_last { self.with_due(now, index, reckoned) } else { reckoned };
        let expected = reckoned * lane.learned.record.factor();
        Some(ExpectedWait { reckoned, expected, is_known: lane.learned.is_known() })
    }

    /// Returns the wait of the last request in the queue. It includes holders of tickets that will
    /// still come and go first. A longer wait brings more of them. The result is the time at which
    /// all of them have had their turn.
    fn with_due(&self, now: Moment, index: u32, wait: f64) -> f64 {
        if self.promised_of(index) == 0 {
            return wait;
        }
        let Some(rate) = self.requests_per_second(index) else { return wait };
        let with_due = |turn: f64| wait + self.due(now, index, turn) / rate.max(RATE_LEAST) * 1e6;
        let mut early = wait;
        let mut late = with_due(FOREVER_US);
        for _ in 0..DUE_HALVINGS {
            let middle = (early + late) / 2.0;
            if with_due(middle) > middle { early = middle } else { late = middle }
        }
        late
    }

    /// Returns the wait if the lane's own limit holds it back. `ahead` requests are before this
    /// position; they are this part of the queue.
    fn wait_for_own(
        &self,
        now: Moment,
        index: u32,
        place: QueuePosition,
        ahead: u32,
        part: f64,
    ) -> Option<f64> {
        let lane = self.at(index);
        let permits = self.permits_in_line(index);
        let count = ahead as usize + lane.own.len() + lane.lent as usize;
        let is_short = count <= REPLAY_MAX && lane.own.capacity() <= 4 * REPLAY_MAX;
        let all_own = lane.running_own() + lane.lent == lane.running && permits == f64::from(lane.run);
        if is_short && all_own && lane.learned.is_mixed() {
            let running = lane.own.iter().map(|(_, running)| *running);
            let surplus = (lane.running - lane.run) as usize;
            return lane.learned.turn_played(now, running, lane.lent, surplus, lane.line.kinds_before(place));
        }
        lane.learned.turn(now, part, permits, lane.lent)
    }

    /// Returns the wait if a lane around holds it back, whose permits it shares with others.
    fn wait_for_around(&self, index: u32, work: f64) -> Option<f64> {
        let path = self.path(index);
        let around = path.as_slice().iter().map(|at| self.at(*at)).find(|lane| lane.is_full());
        let Some(around) = around else { return Some(0.0) };
        let rate = self.permits_in_line(index);
        let any = around.learned.expected_of_any()?;
        if rate <= 0.0 || around.running == 0 {
            return None;
        }
        // The next permit that frees there is for the first request here.
        Some(any / f64::from(around.running) + work / rate)
    }

    /// Returns the permits that the lane's own queue has while there is one.
    pub(super) fn permits_in_line(&self, index: u32) -> f64 {
        let lane = self.at(index);
        let is_alone = lane.running_own() + lane.lent == lane.running && lane.auto.is_none();
        let is_free = self.path(index).as_slice()[1..].iter().all(|at| !self.at(*at).is_full());
        if lane.is_full() && is_alone && is_free {
            return f64::from(lane.run);
        }
        lane.learned.running_in_line().max(self.share(index)).min(f64::from(lane.run))
    }

    /// Returns the fair share of the lane's own queue in the permits around it.
    fn share(&self, index: u32) -> f64 {
        let path = self.path(index);
        let mut rate = f64::from(self.at(self.root.index).run);
        for pair in path.as_slice().windows(2).rev() {
            let lane = self.at(pair[0]);
            let around = self.at(pair[1]);
            rate = (rate * around.fair.share(&lane.flow, lane.bounds.weight)).min(f64::from(lane.run));
        }
        let lane = self.at(index);
        rate * lane.fair.share(&lane.own_flow, OWN_WEIGHT)
    }

    /// Returns the wait of a newcomer.
    pub(super) fn wait_at_end(&self, now: Moment, index: u32) -> Option<ExpectedWait> {
        if self.has_room(&self.path(index)) {
            return Some(ExpectedWait { reckoned: 0.0, expected: 0.0, is_known: true });
        }
        self.wait_behind(now, index, QueuePosition::LAST, self.at(index).line.total())
    }

    /// Converts a wait to the prediction that people and programs see.
    pub(super) fn describe_wait(&self, index: u32, ahead: u32, wait: Option<ExpectedWait>) -> Prediction {
        let guess = wait.map(|wait| micros(wait.expected));
        let told = wait.filter(|wait| wait.is_known).map(|wait| wait.expected);
        let most = self.at(index).learned.record.at_most();
        let at_most = told.zip(most).map(|(wait, most)| micros(wait * most));
        Prediction { ahead, wait: told.map(micros), at_most, guess }
    }

    /// Returns the present prediction for a queued request. `None` if it does not wait.
    pub fn prediction(&self, now: Moment, pass: RequestKey) -> Option<Prediction> {
        let request = self.requests.get(&pass)?;
        let RequestState::Waits(waiting) = &request.state else { return None };
        let place = waiting.place;
        let ahead = self.at(request.lane).line.before(place);
        Some(self.describe_wait(request.lane, ahead.count, self.wait_behind(now, request.lane, place, ahead)))
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub(super) fn micros(micros: f64) -> Duration {
    Duration::from_micros(micros.clamp(0.0, FOREVER_US).round() as u64)
}

/// Halvings of the time in which holders may come: down to a thousandth.
const DUE_HALVINGS: usize = 14;

/// Lowest useful rate, in requests per second.
const RATE_LEAST: f64 = 1e-6;

/// A wait that never ends in practice: ten years.
const FOREVER_US: f64 = 315_360_000e6;
