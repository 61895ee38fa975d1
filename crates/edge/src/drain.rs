//! The connections of one thread, and how they are told that the node is shutting down.
//!
//! A connection between two requests ends at once; one with a request running ends after its answer. Not here: the
//! signal itself (`lib`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::Waker;

use slab::Slab;

#[derive(Default)]
pub struct Connections {
    draining: Cell<bool>,
    idle: RefCell<Slab<Option<Waker>>>,
}

impl Connections {
    /// Counts a connection in for as long as the guard lives.
    pub fn enter(self: &Rc<Self>) -> Entered {
        Entered { key: self.idle.borrow_mut().insert(None), all: Rc::clone(self) }
    }

    pub fn len(&self) -> usize {
        self.idle.borrow().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn is_draining(&self) -> bool {
        self.draining.get()
    }

    pub fn drain(&self) {
        self.draining.set(true);
        for (_, waker) in self.idle.borrow_mut().iter_mut() {
            if let Some(waker) = waker.take() {
                waker.wake();
            }
        }
    }
}

/// One open connection.
pub struct Entered {
    all: Rc<Connections>,
    key: usize,
}

impl Entered {
    pub fn is_draining(&self) -> bool {
        self.all.is_draining()
    }

    /// Has `waker` woken when draining begins.
    pub fn wake_on_drain(&self, waker: &Waker) {
        let mut idle = self.all.idle.borrow_mut();
        let slot = &mut idle[self.key];
        if !slot.as_ref().is_some_and(|known| known.will_wake(waker)) {
            *slot = Some(waker.clone());
        }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.all.idle.borrow_mut().remove(self.key);
    }
}
