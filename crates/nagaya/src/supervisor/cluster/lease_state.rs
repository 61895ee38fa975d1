//! The lease of this node as its tasks share it: its source, and the end that edge and keeper know.
//!
//! Not here: the rules (`lease_manager`), renewing it (`lease_renewer`).

use std::cell::{Cell, RefCell};

use nagaya_records::NodeRecord;

use super::clock::now;
use super::lease_manager::{LeaseManager, LeaseSource};

pub struct LeaseState {
    trust: RefCell<LeaseManager>,
    /// The moment that edge and keeper were told last, `CLOCK_BOOTTIME` in nanoseconds.
    announced_until: Cell<u64>,
}

impl LeaseState {
    pub fn new(trust: LeaseManager) -> Self {
        Self { trust: RefCell::new(trust), announced_until: Cell::new(0) }
    }

    /// Gives access to the rules. The renewer and takeovers change them; nobody else does.
    pub fn trust(&self) -> &RefCell<LeaseManager> {
        &self.trust
    }

    /// Reports whether this node may run what is placed on it.
    pub fn is_valid(&self) -> bool {
        now().0 < self.announced_until.get()
    }

    /// Reports whether the store has just confirmed this node, so that the store answers.
    pub fn is_confirmed(&self) -> bool {
        self.granted_by() == LeaseSource::Store
    }

    /// Returns who lets this node serve now.
    pub fn granted_by(&self) -> LeaseSource {
        self.trust.borrow().granted_by(now())
    }

    pub fn can_vouch(&self) -> bool {
        self.trust.borrow().can_vouch()
    }

    pub fn is_known_by(&self, record: &NodeRecord) -> bool {
        self.trust.borrow().is_known_by(record)
    }

    /// Returns the end of the lease if it is later than the one announced before, and counts it as
    /// announced.
    pub fn extend_announced(&self) -> Option<u64> {
        let until = self.trust.borrow().lease_end().0;
        if until <= self.announced_until.get() {
            return None;
        }
        self.announced_until.set(until);
        Some(until)
    }
}
