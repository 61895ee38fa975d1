//! Computes how much may be promised. It uses the rate of completed work, the part of holders that
//! come, and promises from before capacity shrank.
//!
//! Not here: the slot that results (`calendar`).

use std::time::Duration;

use crate::calendar::slots::{SLOTS_MAX, SlotTree};
use crate::calendar::{after, micros};
use crate::{Moment, TicketPolicy};

/// Lowest share of holders that is assumed to come.
pub(super) const SHOW_RATE_MIN: f64 = 0.5;

/// Largest part of a slot's capacity that overbooking may fill. The rest covers a rate that was
/// slightly too high.
pub(super) const BOOKED_MAX: f64 = 0.95;

/// Shortest slot. Real slots take seconds or minutes; this only prevents an empty one.
const SLOT_MIN: Duration = Duration::from_millis(1);

/// Interval at which the slots are scanned for promises beyond their capacity.
const BACKLOG_EVERY: Duration = Duration::from_millis(100);

/// Above any server's rate, and small enough for exact arithmetic.
const RATE_MAX_PER_SECOND: f64 = 1e9;

/// Relative differences below this are rounding errors.
const ROUNDING: f64 = 1e-9;

/// Estimates the part of ticket holders that come.
#[derive(Debug, Default)]
pub(super) struct ShowRate {
    came: f64,
    given: f64,
}

impl ShowRate {
    /// Holders assumed to have come before anything is known, so that one slot alone says little.
    const BELIEVED: f64 = 16.0;
    /// Holders above which older ones count half.
    const REMEMBERED: f64 = 512.0;

    /// Learns from a slot that has ended.
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

    /// Returns the highest rate of promised tickets per microsecond, overbooking included.
    /// `per_second` is the rate at which requests end. `None` if that is not a valid rate.
    pub(super) fn booked_rate(&self, share: f32, per_second: f64) -> Option<f64> {
        if per_second.is_nan() || per_second <= 0.0 {
            return None;
        }
        // As it was written: 0.7 of 60 are 42, not slightly less.
        let share = (f64::from(share) * 1e6).round() / 1e6;
        let share = share.clamp(0.0, 1.0);
        let booked = (share / self.rate()).min(share.max(BOOKED_MAX)) * (1.0 + ROUNDING);
        let rate = per_second.min(RATE_MAX_PER_SECOND) * booked / 1e6;
        (rate > 0.0).then_some(rate)
    }
}

/// Returns the length of new slots in microseconds. It holds one ticket at this rate, and the row
/// reaches to the horizon. `None` if a single ticket would take longer than the horizon.
pub(super) fn slot_len(next: &TicketPolicy, rate: f64) -> Option<u64> {
    let horizon = micros(next.horizon);
    let for_one = (1.0 / rate).ceil();
    if for_one > horizon.max(micros(next.window)) as f64 {
        return None;
    }
    let by_count = (horizon / (SLOTS_MAX as u64 / 2)).saturating_add(1);
    Some(micros(next.window).max(micros(SLOT_MIN)).max(for_one as u64).max(by_count))
}

/// Promises beyond the present capacity.
#[derive(Debug, Default)]
pub(super) struct SlotBacklog {
    /// The slots are occupied with it until then.
    ends: Moment,
    looked: Option<Moment>,
}

impl SlotBacklog {
    /// Returns until when the slots are occupied with existing promises, at this rate in tickets
    /// per microsecond. Queued holders of slots that have begun are part of the caller's earliest
    /// moment.
    pub(super) fn ends(&mut self, now: Moment, rate: f64, slots: &SlotTree) -> Moment {
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
                // The backlog of the last slot continues after it.
                self.ends = Moment(slot.ends.0.saturating_add((behind / rate) as u64));
            }
        }
        self.ends
    }
}
