//! Events of instances that were not acted on yet.
//!
//! Invariant: one event is acted on at a time; later events wait in order. Not here: acting
//! (`run::driver`).

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use crate::instances::decide::lifecycle::LifecycleEvent;
use crate::instances::state::instance::SiteInstance;

#[derive(Default)]
pub struct EventQueue {
    waiting: RefCell<VecDeque<(Rc<SiteInstance>, LifecycleEvent)>>,
    is_acting: Cell<bool>,
}

impl EventQueue {
    /// Adds an event behind all others. Returns whether the caller is to act on what waits.
    pub fn add(&self, instance: &Rc<SiteInstance>, event: LifecycleEvent) -> bool {
        self.waiting.borrow_mut().push_back((Rc::clone(instance), event));
        !self.is_acting.replace(true)
    }

    /// Adds an event before all others.
    pub fn add_first(&self, instance: &Rc<SiteInstance>, event: LifecycleEvent) {
        self.waiting.borrow_mut().push_front((Rc::clone(instance), event));
    }

    /// Returns the next event to act on. `None` if there is none; then the next `add` begins again.
    pub fn take(&self) -> Option<(Rc<SiteInstance>, LifecycleEvent)> {
        let next = self.waiting.borrow_mut().pop_front();
        if next.is_none() {
            self.is_acting.set(false);
        }
        next
    }
}
