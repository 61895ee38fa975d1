//! The old run of an instance, while its requests finish beside the run in its place.
//!
//! Not here: when a run drains (`decide::lifecycle`), waiting for its requests (`draining`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tokio::sync::{Notify, watch};

use crate::instances::decide::lifecycle::{OpId, RunId};
use crate::instances::decide::stop_mode::{EndRequest, StopMode};

/// Number of an operation that no lifecycle waits for.
const NO_OP: OpId = OpId(0);

/// A run that lets its requests finish.
#[derive(Debug)]
pub struct DrainingRun {
    run: RunId,
    users: Cell<u32>,
    left: Notify,
    end_wanted: watch::Sender<EndRequest>,
}

impl DrainingRun {
    pub fn users(&self) -> u32 {
        self.users.get()
    }

    /// Returns when nobody uses it any more.
    pub async fn wait_until_unused(&self) {
        while self.users.get() > 0 {
            self.left.notified().await;
        }
    }
}

/// The draining run of one instance, if there is one.
#[derive(Debug, Default)]
pub struct DrainSlot {
    drain: RefCell<Option<Rc<DrainingRun>>>,
    gone: Notify,
}

impl DrainSlot {
    pub fn users(&self) -> Option<u32> {
        self.drain.borrow().as_ref().map(|drain| drain.users.get())
    }

    pub fn current(&self) -> Option<Rc<DrainingRun>> {
        self.drain.borrow().clone()
    }

    /// From now on this run drains. `end_wanted` tells its task when it is to end.
    pub fn begin(&self, run: RunId, users: u32, end_wanted: watch::Sender<EndRequest>) {
        let drain = Rc::new(DrainingRun { run, users: Cell::new(users), left: Notify::new(), end_wanted });
        self.drain.replace(Some(Rc::clone(&drain)));
        drain.end_wanted.send_replace(Some((NO_OP, StopMode::Drain)));
    }

    /// One user of this run needs it no more.
    pub fn leave(&self, run: RunId) {
        let drain = self.drain.borrow();
        if let Some(drain) = drain.as_ref().filter(|drain| drain.run == run) {
            drain.users.set(drain.users.get().saturating_sub(1));
            drain.left.notify_one();
        }
    }

    /// Returns when no run drains.
    pub async fn wait_until_gone(&self) {
        loop {
            let gone = self.gone.notified();
            if self.drain.borrow().is_none() {
                return;
            }
            gone.await;
        }
    }

    /// The draining run is to end now.
    pub fn end(&self, mode: StopMode) {
        if let Some(drain) = &*self.drain.borrow() {
            drain.end_wanted.send_replace(Some((NO_OP, mode)));
        }
    }

    /// Nothing of this run is left.
    pub fn forget(&self, run: RunId) {
        self.drain.borrow_mut().take_if(|drain| drain.run == run);
        self.gone.notify_waiters();
    }
}
