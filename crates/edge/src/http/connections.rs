//! Tracks the connections of one thread, for shutdown and for making room.
//!
//! While draining, a connection between two requests ends at once. One with a running request ends
//! after its answer. A connection that makes room ends at once whatever it does, but an idle one
//! may say goodbye first. Not here: the signal to drain (`lib`), which connection makes room
//! (`http::clients::crowd`).

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use slab::Slab;
use tokio::time::Instant;

use crate::http::clients::crowd::{ConnectionGroup, GroupedConnections};
use crate::metrics::ConnectionPhase;

#[derive(Default)]
pub struct OpenConnections {
    draining: Cell<bool>,
    open: RefCell<Slab<Rc<OpenConnection>>>,
    crowd: RefCell<GroupedConnections>,
    /// Number of connections that make room and have not ended yet.
    leaving: Cell<usize>,
}

struct OpenConnection {
    phase: Cell<ConnectionPhase>,
    /// Start of the phase.
    since: Cell<Instant>,
    /// `None` if it is not a client's. Such a connection never makes room.
    group: Cell<Option<ConnectionGroup>>,
    /// Its phase when it was chosen to make room.
    evicted: Cell<Option<ConnectionPhase>>,
    /// Woken when draining begins, or when it is to make room.
    idle: RefCell<Option<Waker>>,
    eviction: RefCell<Option<Waker>>,
}

impl OpenConnections {
    /// Counts a connection while the guard lives. It never makes room for others.
    pub fn enter(self: &Rc<Self>) -> ConnectionGuard {
        self.enter_as(None)
    }

    /// Counts a client's connection while the guard lives.
    pub fn enter_from(self: &Rc<Self>, group: ConnectionGroup) -> ConnectionGuard {
        self.enter_as(Some(group))
    }

    fn enter_as(self: &Rc<Self>, group: Option<ConnectionGroup>) -> ConnectionGuard {
        let open = Rc::new(OpenConnection {
            phase: Cell::new(ConnectionPhase::Idle),
            since: Cell::new(Instant::now()),
            group: Cell::new(group),
            evicted: Cell::new(None),
            idle: RefCell::default(),
            eviction: RefCell::default(),
        });
        let key = self.open.borrow_mut().insert(Rc::clone(&open));
        if let Some(group) = group {
            self.crowd.borrow_mut().join(group, key);
        }
        ConnectionGuard { key, open, all: Rc::clone(self) }
    }

    pub fn len(&self) -> usize {
        self.open.borrow().len()
    }

    /// Returns the number of connections that make room and have not ended yet.
    pub fn leaving(&self) -> usize {
        self.leaving.get()
    }

    /// Returns the number of connections without those that make room.
    pub fn places_taken(&self) -> usize {
        self.len() - self.leaving.get()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn is_draining(&self) -> bool {
        self.draining.get()
    }

    pub fn drain(&self) {
        self.draining.set(true);
        for (_, open) in self.open.borrow().iter() {
            open.wake_idle();
        }
    }

    /// Ends a connection for a newcomer of this group. Returns its phase. `None` if no connection
    /// gives way.
    pub fn make_room(&self, newcomer: ConnectionGroup) -> Option<ConnectionPhase> {
        let open = self.open.borrow();
        let look = |key: usize| (open[key].phase.get(), open[key].since.get());
        let chosen = self.crowd.borrow().choose(newcomer, look)?;
        let evicted = &open[chosen];
        if let Some(group) = evicted.group.take() {
            self.crowd.borrow_mut().leave(group, chosen);
        }
        let phase = evicted.phase.get();
        evicted.evicted.set(Some(phase));
        self.leaving.set(self.leaving.get() + 1);
        evicted.wake_idle();
        if let Some(waker) = evicted.eviction.take() {
            waker.wake();
        }
        Some(phase)
    }
}

impl OpenConnection {
    fn wake_idle(&self) {
        if let Some(waker) = self.idle.take() {
            waker.wake();
        }
    }
}

fn keep_waker(slot: &RefCell<Option<Waker>>, waker: &Waker) {
    let mut slot = slot.borrow_mut();
    if !slot.as_ref().is_some_and(|known| known.will_wake(waker)) {
        *slot = Some(waker.clone());
    }
}

/// One open connection.
pub struct ConnectionGuard {
    all: Rc<OpenConnections>,
    key: usize,
    open: Rc<OpenConnection>,
}

impl ConnectionGuard {
    /// Returns whether it is to end before the next request.
    pub fn is_draining(&self) -> bool {
        self.all.is_draining() || self.open.evicted.get().is_some()
    }

    /// Wakes `waker` when it is to end before the next request.
    pub fn wake_on_drain(&self, waker: &Waker) {
        keep_waker(&self.open.idle, waker);
    }

    /// Starts another phase.
    pub fn begin(&self, phase: ConnectionPhase) {
        self.open.phase.set(phase);
        self.open.since.set(Instant::now());
    }

    pub fn phase(&self) -> ConnectionPhase {
        self.open.phase.get()
    }

    /// Returns a handle for setting the connection's phase.
    pub fn phases(&self) -> PhaseHandle {
        PhaseHandle(Rc::clone(&self.open))
    }

    /// Sets its group, when its client becomes known or turns out to be another one.
    pub fn belongs_to(&self, group: ConnectionGroup) {
        let mut crowd = self.all.crowd.borrow_mut();
        // A connection that makes room is in no group any more.
        if self.open.evicted.get().is_none()
            && let Some(before) = self.open.group.replace(Some(group))
        {
            crowd.leave(before, self.key);
            crowd.join(group, self.key);
        }
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.all.open.borrow_mut().remove(self.key);
        if let Some(group) = self.open.group.take() {
            self.all.crowd.borrow_mut().leave(group, self.key);
        }
        if self.open.evicted.get().is_some() {
            self.all.leaving.set(self.all.leaving.get() - 1);
        }
    }
}

/// Sets the phase of one connection, beside its guard.
#[derive(Clone)]
pub struct PhaseHandle(Rc<OpenConnection>);

impl std::fmt::Debug for PhaseHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("PhaseHandle").field(&self.0.phase.get()).finish()
    }
}

impl PhaseHandle {
    pub fn begin(&self, phase: ConnectionPhase) {
        self.0.phase.set(phase);
        self.0.since.set(Instant::now());
    }

    /// Completes when the connection is to make room. Returns its phase.
    pub async fn evicted(&self) -> ConnectionPhase {
        poll_fn(|cx| match self.0.evicted.get() {
            Some(phase) => Poll::Ready(phase),
            None => {
                keep_waker(&self.0.eviction, cx.waker());
                Poll::Pending
            }
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_evicted_connection_is_told_and_has_no_place() {
        let connections = Rc::<OpenConnections>::default();
        let entered: Vec<_> = (0..3).map(|_| connections.enter_from(ConnectionGroup::Alone(1))).collect();
        let _peer = connections.enter();
        entered[0].begin(ConnectionPhase::Working);
        assert_eq!(connections.make_room(ConnectionGroup::Alone(2)), Some(ConnectionPhase::Idle));
        assert_eq!((connections.len(), connections.places_taken()), (4, 3));
        assert!(!entered[0].is_draining());
        let evicted = entered.iter().position(ConnectionGuard::is_draining).unwrap();
        assert_eq!(entered[evicted].phases().evicted().await, ConnectionPhase::Idle);
        entered[evicted].belongs_to(ConnectionGroup::Alone(3));
        assert!(connections.make_room(ConnectionGroup::Alone(2)).is_some());
        assert_eq!(
            connections.make_room(ConnectionGroup::Alone(2)),
            None,
            "one at work is left, and the peer's"
        );
        drop(entered);
        assert_eq!((connections.len(), connections.places_taken()), (1, 1));
    }

    #[test]
    fn a_connection_changes_its_group_once_its_client_is_known() {
        let connections = Rc::<OpenConnections>::default();
        let first = connections.enter_from(ConnectionGroup::Alone(1));
        let _second = connections.enter_from(ConnectionGroup::Alone(2));
        first.belongs_to(ConnectionGroup::Alone(2));
        let crowd = connections.crowd.borrow();
        assert_eq!((crowd.size(ConnectionGroup::Alone(1)), crowd.size(ConnectionGroup::Alone(2))), (0, 2));
    }
}
