//! Numbers of request cells and boosts, and what this kernel tells of connections.
//!
//! Not here: the cells (`request_cells`), the boosts (`decide::boosts`).

use std::cell::Cell;

use nagaya_keeper_api::protocol::{BoostId, RequestCellId};

#[derive(Default)]
pub struct LimitState {
    last_cell: Cell<u64>,
    last_boost: Cell<u64>,
    /// Whether the kernel tells who is connected to whom over Unix sockets. `None` if nobody needed
    /// to know yet.
    pub unix_diag: Cell<Option<bool>>,
}

impl LimitState {
    /// A number that no request cell has had.
    pub fn take_cell_id(&self) -> RequestCellId {
        self.last_cell.set(self.last_cell.get() + 1);
        RequestCellId(self.last_cell.get())
    }

    /// A number that no boost has had.
    pub fn take_boost_id(&self) -> BoostId {
        self.last_boost.set(self.last_boost.get() + 1);
        BoostId(self.last_boost.get())
    }
}
