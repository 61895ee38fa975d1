//! Lent permits as their user counts them: taken while there are any and nobody wants them back.
//!
//! Not here: how threads do it together (`edge`).

use nagaya_admission::{Admission, LaneId, Moment};

/// Permits asked for at once.
const COUNT: u32 = 16;

#[derive(Debug, Default, Clone, Copy)]
pub struct Lender {
    lent: u32,
    used: u32,
    is_recalled: bool,
}

impl Lender {
    /// A permit, if there is one or more are lent.
    pub fn enter(&mut self, now: Moment, admission: &mut Admission, lane: LaneId) -> bool {
        if self.is_recalled || self.used == self.lent {
            let count = admission.lend(now, lane, COUNT);
            if count == 0 {
                return false;
            }
            self.lent += count;
            self.is_recalled = false;
        }
        self.used += 1;
        true
    }

    pub fn leave(&mut self, now: Moment, admission: &mut Admission, lane: LaneId) {
        self.used -= 1;
        if self.is_recalled {
            self.lent -= 1;
            admission.give_back(now, lane, 1);
        }
    }

    /// They are wanted back: those not in use go at once.
    pub fn recall(&mut self, now: Moment, admission: &mut Admission, lane: LaneId) {
        self.is_recalled = true;
        admission.give_back(now, lane, self.lent - self.used);
        self.lent = self.used;
    }
}
