//! Permits in bulk, for lanes where nothing waits: the caller counts them itself and comes back only when they are wanted.
//!
//! Lent permits count as used. They are lent only where more than half of every bound on the path is free, and wanted back as
//! soon as somebody has to wait for one of those bounds. Nobody notes what runs on them and since when, and a wait behind it
//! cannot be told well: so none are lent where there has just been a line, since the next one may be near.
//!
//! Not here: single permits (`machine`).

use super::Admission;
use crate::{Effect, LaneId, Moment};

/// Nothing is lent to a lane whose last line ended less than so long ago, in microseconds.
const LINE_AGO_US: u64 = 60_000_000;

impl Admission {
    /// Lends up to so many permits of a lane: as many as leave half of each bound on its path free. 0: somebody waits on the path
    /// or holds a ticket, half is in use, or the lane has just had a line.
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

    /// Lent permits come back; more than were lent do not.
    pub fn give_back(&mut self, now: Moment, lane: LaneId, count: u32) {
        let Some(index) = self.find_even_gone(lane) else { return };
        let lane = self.at_mut(index);
        let count = count.min(lane.lent);
        lane.lent -= count;
        if count > 0 {
            self.vacate(index, count);
            self.dispatch(now);
        }
    }

    /// Somebody has to wait: what is lent out of the full lanes of this path is wanted back.
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
                    self.effects.push(Effect::Recall(self.id_of(at)));
                }
            }
        }
    }
}
