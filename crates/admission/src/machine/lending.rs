//! Lends permits in bulk to the caller, for lanes where nothing waits. The caller counts them
//! itself and comes back only when they are recalled.
//!
//! Lent permits count as used. They are lent only where more than half of every limit on the path
//! is free. They are recalled as soon as a request has to wait for one of those limits. Their use
//! is not recorded, so a wait behind them is hard to predict. So none are lent shortly after a
//! queue, as the next one may be near.
//!
//! Not here: single permits (`machine`).

use super::Admission;
use crate::{AdmissionEffect, LaneId, Moment};

/// Time after a lane's last queue during which nothing is lent, in microseconds.
const LINE_AGO_US: u64 = 60_000_000;

impl Admission {
    /// Lends up to `count` permits of a lane: as many as leave half of each limit on its path free.
    /// Returns 0 if half is in use, or if a request on the path waits or holds a ticket. It also
    /// returns 0 shortly after a queue.
    pub fn lend(&mut self, now: Moment, lane: LaneId, count: u32) -> u32 {
        let Some(index) = self.find(lane) else { return 0 };
        if self.at(index).learned.had_line_since(Moment(now.0.saturating_sub(LINE_AGO_US))) {
            return 0;
        }
        let path = self.path(index);
        let lanes = || path.as_slice().iter().map(|at| (*at, self.at(*at)));
        let is_calm = lanes().all(|(at, lane)| lane.line.is_empty() && self.promised_of(at) == 0);
        let free = lanes().map(|(_, lane)| (lane.run / 2).saturating_sub(lane.running)).min().unwrap_or(0);
        let count = if is_calm { count.min(free) } else { 0 };
        if count > 0 {
            self.at_mut(index).lent += count;
            let mut inner = index;
            for at in path.as_slice() {
                let lane = self.at_mut(*at);
                lane.running += count;
                lane.lending.insert(inner);
                inner = *at;
            }
            self.settle(index);
        }
        count
    }

    /// Takes lent permits back, at most as many as were lent.
    pub fn give_back(&mut self, now: Moment, lane: LaneId, count: u32) {
        let Some(index) = self.find_even_gone(lane) else { return };
        let lane = self.at_mut(index);
        let count = count.min(lane.lent);
        lane.lent -= count;
        if count > 0 {
            self.return_permits(index, count);
            self.dispatch(now);
        }
    }

    /// Recalls permits lent out of the full lanes of this path, because a request has to wait.
    pub(super) fn recall(&mut self, now: Moment, path: &[u32]) {
        let mut wanted: Vec<u32> = path.iter().copied().filter(|at| self.at(*at).is_full()).collect();
        while let Some(at) = wanted.pop() {
            if self.at(at).lending.is_empty() {
                continue;
            }
            // Each is asked once; it counts as lending again when it borrows again.
            for inner in std::mem::take(&mut self.at_mut(at).lending) {
                if inner != at {
                    wanted.push(inner);
                } else if self.at(at).lent > 0 {
                    self.at_mut(at).learned.lent_are_recalled(now);
                    self.effects.push(AdmissionEffect::Recall(self.id_of(at)));
                }
            }
        }
    }
}
