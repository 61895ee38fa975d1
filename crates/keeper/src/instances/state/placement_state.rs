//! State that a cluster sets for this node's instances: whether they may run, and where they are.
//!
//! Not here: acting on it (`placed`), stopping them in time (`authority`).

use std::cell::Cell;

use tokio::sync::Notify;

pub struct PlacementState {
    /// The state that all instances were last notified of. True at the start on a node of a
    /// cluster.
    is_fenced: Cell<bool>,
    /// Notified when that state, or the placements in the table, may have changed.
    pub changed: Notify,
}

impl Default for PlacementState {
    fn default() -> Self {
        Self { is_fenced: Cell::new(true), changed: Notify::new() }
    }
}

impl PlacementState {
    pub fn is_fenced(&self) -> bool {
        self.is_fenced.get()
    }

    pub fn set_fenced(&self, is_fenced: bool) {
        self.is_fenced.set(is_fenced);
    }
}
