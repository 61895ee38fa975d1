//! State that rules keep from one request to the next, for all threads of the process: caches,
//! values and locks.
//!
//! The rules belong to one owner, and so does this state. A rule sets in one request what it reads
//! in another, whatever their tenants. Each cache entry counts for the tenant whose request set it
//! last. So clients of one tenant fill that tenant's part only. A [`RuleSet`](crate::RuleSet) has
//! one `SharedState`, and no way to another's. All of it is in memory: it belongs to one node and
//! ends with the process. Not here: the Ruby classes (`api::state`), when a run begins and ends
//! (`engine`).
//!
//! Against hostile rules and clients, entries, keys, values and names are bounded in bytes and
//! number. A lock ends with the run that took it, however that ends. A thread waits for locks for
//! at most [`WAIT_MAX`] at once and a twentieth of its time.

mod cache;
mod locks;
mod values;

use std::cell::RefCell;
use std::time::Duration;

use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::facts::{FactSource, TextFact};
use crate::phase::RulePhase;

use self::cache::CacheTable;
pub use self::cache::{CacheFull, CacheUsage, NAME_LEN_MAX};
use self::locks::LockTable;
pub use self::locks::{WAIT_MAX, WaitAllowance};
use self::values::ValueTable;
pub use self::values::{KeptFull, StoredValue, VALUE_ELEMENTS_MAX};

/// Locks that one run may hold.
pub const LOCKS_PER_RUN_MAX: usize = 16;

/// Entries that `clear` removes before others get a turn.
const CLEARED_AT_ONCE: usize = 1024;

/// The shared state of one owner.
#[derive(Debug, Default)]
pub struct SharedState {
    caches: Mutex<CacheTable>,
    values: Mutex<ValueTable>,
    locks: LockTable,
}

/// The shared state, as one evaluation can use it. Dropping it releases its locks.
pub struct StateRun<'a> {
    state: &'a SharedState,
    patience: &'a WaitAllowance,
    facts: &'a dyn FactSource,
    /// False if another run of the same file has set everything: this one then changes nothing.
    may_change: bool,
    /// There is no request: values that it sets count for the owner of the rules.
    is_init: bool,
    held: RefCell<SmallVec<[Box<str>; 1]>>,
}

/// Result of a request for a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockResult {
    Yes,
    /// Another run has it, and the wait is over.
    No,
    /// This run has it already.
    Mine,
    /// This run holds the maximum number of locks.
    TooMany,
}

// === impl Run ===

impl<'a> StateRun<'a> {
    pub fn new(
        state: &'a SharedState,
        patience: &'a WaitAllowance,
        facts: &'a dyn FactSource,
        phase: RulePhase,
    ) -> Self {
        let is_init = phase == RulePhase::Init;
        Self { state, patience, facts, may_change: true, is_init, held: RefCell::default() }
    }

    /// Returns a run whose changes have no effect.
    pub fn without_changes(mut self) -> Self {
        self.may_change = false;
        self
    }

    pub fn cached(&self, space: &str, key: &[u8]) -> Option<Vec<u8>> {
        self.state.caches.lock().get(space, key).map(<[u8]>::to_vec)
    }

    pub fn cache(&self, space: &str, key: &[u8], value: &[u8]) -> Result<(), CacheFull> {
        if !self.may_change {
            return Ok(());
        }
        let tenant = if self.is_init { None } else { self.facts.text(TextFact::Tenant) };
        self.state.caches.lock().set(space, key, value, tenant.as_deref().unwrap_or_default())
    }

    /// Forgets an entry. Returns whether it existed.
    pub fn forget(&self, space: &str, key: &[u8]) -> bool {
        self.may_change && self.state.caches.lock().remove(space, key)
    }

    /// Forgets the entries that are in the cache when this begins.
    pub fn clear(&self, space: &str) {
        if !self.may_change {
            return;
        }
        let before = self.state.caches.lock().next();
        // The lock is released in between: other threads wait for it.
        while self.state.caches.lock().clear(space, before, CLEARED_AT_ONCE) {}
    }

    pub fn cached_in(&self, space: &str) -> usize {
        self.state.caches.lock().len(space)
    }

    pub fn usage(&self) -> CacheUsage {
        self.state.caches.lock().usage()
    }

    pub fn value(&self, bag: &str, name: &str) -> Option<StoredValue> {
        self.state.values.lock().get(bag, name).cloned()
    }

    pub fn set_value(&self, bag: &str, name: &str, value: StoredValue) -> Result<(), KeptFull> {
        if self.may_change { self.state.values.lock().set(bag, name, value) } else { Ok(()) }
    }

    /// Takes the lock, if it is free within this time and within the thread's remaining wait.
    pub fn lock(&self, name: &str, within: Duration) -> LockResult {
        let mut held = self.held.borrow_mut();
        if held.iter().any(|have| **have == *name) {
            return LockResult::Mine;
        }
        if held.len() >= LOCKS_PER_RUN_MAX {
            return LockResult::TooMany;
        }
        if self.state.locks.take(name, within, self.patience) {
            held.push(name.into());
            return LockResult::Yes;
        }
        LockResult::No
    }

    /// Releases the lock. Returns false if this run does not have it, in which case nothing
    /// happens.
    pub fn unlock(&self, name: &str) -> bool {
        let mut held = self.held.borrow_mut();
        let Some(at) = held.iter().position(|have| **have == *name) else { return false };
        held.swap_remove(at);
        self.state.locks.give_back(name);
        true
    }
}

impl Drop for StateRun<'_> {
    fn drop(&mut self) {
        for name in self.held.get_mut().drain(..) {
            self.state.locks.give_back(&name);
        }
    }
}

#[cfg(test)]
mod tests;
