//! How much may be promised: by the rate at which work is done, by how many of those who hold tickets come, and by what was
//! promised before capacity shrank.
//!
//! Not here: which slot that makes (`calendar`).

use std::time::Duration;

use super::slots::{SLOTS_MAX, Slots};
use super::{after, micros};
use crate::{Moment, Next};

/// Lowest share of holders that is reckoned with to come.
pub(super) const SHOW_RATE_MIN: f64 = 0.5;

/// Part of a slot's capacity up to which reckoning with those who will not come may fill it. What is left is for a rate that
/// was a little too hopeful.
pub(super) const BOOKED_MAX: f64 = 0.95;

/// A slot is no shorter. It is a matter of seconds or minutes; this only keeps it from being nothing.
const SLOT_MIN: Duration = Duration::from_millis(1);

/// How often the slots are gone through for what they have promised beyond their capacity.
const BACKLOG_EVERY: Duration = Duration::from_millis(100);

/// Beyond any server's, and small enough to reckon with.
const RATE_MAX_PER_SECOND: f64 = 1e9;

/// What is smaller, as a part, is an error of rounding.
const ROUNDING: f64 = 1e-9;

/// How many of those who hold tickets come.
#[derive(Debug, Default)]
pub(super) struct Shows {
    came: f64,
    given: f64,
}

impl Shows {
    /// So many holders are taken to have come before anything is known, so that one slot alone says little.
    const BELIEVED: f64 = 16.0;
    /// When more than so many are known, what is older counts half.
    const REMEMBERED: f64 = 512.0;

    /// A slot has ended.
    pub(super) fn learn(&mut self, came: u32, given: u32) {
        self.came += f64::from(came.min(given));
        self.given += f64::from(given);
        while self.given > Self::REMEMBERED {
            self.came /= 2.0;
            self.given /= 2.0;
        }
    }

    pub(super) fn rate(&self) -> f64 {
        ((self.came + Self::BELIEVED) / (self.given + Self::BELIEVED)).clamp(SHOW_RATE_MIN, 1.0)
    }

    /// Tickets per microsecond that are promised at most, with those reckoned in who will not come. `per_second` is the rate at
    /// which requests end. `None`: it is no rate.
    pub(super) fn booked_rate(&self, share: f32, per_second: f64) -> Option<f64> {
        if per_second.is_nan() || per_second <= 0.0 {
            return None;
        }
        // As it was written: 0.7 of 60 are 42, not a little less.
        let share = (f64::from(share) * 1e6).round() / 1e6;
        let share = share.clamp(0.0, 1.0);
        let booked = (share / self.rate()).min(share.max(BOOKED_MAX)) * (1.0 + ROUNDING);
        let rate = per_second.min(RATE_MAX_PER_SECOND) * booked / 1e6;
        (rate > 0.0).then_some(rate)
    }
}

/// How long new slots are, in microseconds: long enough for one ticket at this rate, and so few that the row reaches to the
/// horizon. `None`: one ticket alone would take longer than up to there.
pub(super) fn slot_len(next: &Next, rate: f64) -> Option<u64> {
    let horizon = micros(next.horizon);
    let for_one = (1.0 / rate).ceil();
    if for_one > horizon.max(micros(next.window)) as f64 {
        return None;
    }
    let by_count = (horizon / (SLOTS_MAX as u64 / 2)).saturating_add(1);
    Some(micros(next.window).max(micros(SLOT_MIN)).max(for_one as u64).max(by_count))
}

/// What was promised beyond the capacity there is now.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    /// Until then the slots are busy with it.
    ends: Moment,
    looked: Option<Moment>,
}

impl Backlog {
    /// Until when the slots are busy with what they have promised already, at this rate in tickets per microsecond. Who is in line
    /// now, of slots that have begun, is in the caller's reckoning of the earliest moment.
    pub(super) fn ends(&mut self, now: Moment, rate: f64, slots: &Slots) -> Moment {
        if self.looked.is_some_and(|looked| now < after(looked, BACKLOG_EVERY)) {
            return self.ends;
        }
        self.looked = Some(now);
        self.ends = Moment(0);
        let mut behind = 0.0;
        for slot in slots.row().iter().filter(|slot| slot.begins > now) {
            let had = behind;
            let room = rate * (slot.ends.0 - slot.begins.0) as f64 * (1.0 + ROUNDING);
            behind = (had + f64::from(slot.out) - room).max(0.0);
            if had > 0.0 || behind > 0.0 {
                // The last slot's goes on after it.
                self.ends = Moment(slot.ends.0.saturating_add((behind / rate) as u64));
            }
        }
        self.ends
    }
}
