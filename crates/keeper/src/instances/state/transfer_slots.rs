//! Images that are on their way from or to this node.
//!
//! Not here: sending and receiving them (`transfer`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use nagaya_records::SiteName;
use tokio::sync::watch;

use crate::fault::Fault;

/// How a fetch has ended. `None` while it goes on.
pub type FetchStatus = watch::Receiver<Option<Result<(), Fault>>>;

#[derive(Default)]
pub struct ImageTransfers {
    /// Images that come from other nodes, or that came and were not requested since.
    fetches: RefCell<HashMap<SiteName, FetchStatus>>,
    /// From and to other nodes.
    count: Cell<usize>,
}

impl ImageTransfers {
    /// The fetch of this site's image.
    pub fn fetch_of(&self, name: &SiteName) -> Option<FetchStatus> {
        self.fetches.borrow().get(name).cloned()
    }

    pub fn begin_fetch(&self, name: &SiteName, fetch: FetchStatus) {
        self.fetches.borrow_mut().insert(name.clone(), fetch);
    }

    /// Nothing has come of it.
    pub fn drop_fetch(&self, name: &SiteName) {
        self.fetches.borrow_mut().remove(name);
    }

    /// Its end was told.
    pub fn forget_ended(&self, name: &SiteName) {
        self.fetches.borrow_mut().retain(|of, fetch| of != name || fetch.borrow().is_none());
    }

    pub fn count(&self) -> usize {
        self.count.get()
    }

    pub fn add(&self) {
        self.count.set(self.count.get() + 1);
    }

    pub fn subtract(&self) {
        self.count.set(self.count.get() - 1);
    }
}
