//! When instances of this node are to be looked at next, and since when they are idle.
//!
//! Not here: the order of times (`decide::alarms`), what is done at one (`run::clock`).

use std::cell::RefCell;
use std::time::Instant;

use tokio::sync::Notify;

use crate::instances::decide::alarms::AlarmQueue;
use crate::instances::decide::wake_queue::InstanceKey;

#[derive(Default)]
pub struct Deadlines {
    alarms: RefCell<AlarmQueue>,
    /// Instances without users, by the time since when.
    idle: RefCell<AlarmQueue>,
    pub first_changed: Notify,
}

impl Deadlines {
    /// Sets both times of one instance. `None`: it needs no look, or is not idle.
    pub fn set(&self, key: InstanceKey, deadline: Option<Instant>, idle_since: Option<Instant>) {
        if self.alarms.borrow_mut().set(key, deadline) {
            self.first_changed.notify_one();
        }
        self.idle.borrow_mut().set(key, idle_since);
    }

    pub fn first(&self) -> Option<Instant> {
        self.alarms.borrow().first()
    }

    /// Takes the first out whose time has come.
    pub fn take_due(&self, now: Instant) -> Option<InstanceKey> {
        self.alarms.borrow_mut().due(now)
    }

    /// So many that are idle longest.
    pub fn longest_idle(&self, count: usize) -> Vec<InstanceKey> {
        self.idle.borrow().earliest(count)
    }
}
