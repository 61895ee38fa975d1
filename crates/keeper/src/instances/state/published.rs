//! Facts about instances that edges get without asking: which ones are awake, and which runs drain.
//!
//! Not here: the connection of an edge (`server`), the memory that is shared (`keeper-api`).

use std::cell::RefCell;
use std::os::fd::OwnedFd;

use nagaya_keeper_api::awake_set::AwakeSet;
use nagaya_keeper_api::protocol::InstanceId;
use nagaya_records::SiteName;
use tokio::sync::broadcast;

/// Maximum number of replaced runs of which some edges are not notified yet. An edge that misses
/// one learns of it when the old run ends.
const DRAINED_MAX: usize = 1024;

pub struct PublishedState {
    /// `None` if there is no memory for it.
    awake: RefCell<Option<AwakeSet>>,
    /// Runs that were replaced, for edges that use them.
    drained: broadcast::Sender<InstanceId>,
}

impl PublishedState {
    pub fn new() -> Self {
        Self { awake: RefCell::new(awake_set()), drained: broadcast::Sender::new(DRAINED_MAX) }
    }

    /// Notes for edges whether this site's instance is awake.
    pub fn publish_awake(&self, name: &SiteName, is_awake: bool) {
        if let Some(awake) = &mut *self.awake.borrow_mut()
            && let Err(error) = awake.set(name, is_awake)
        {
            tracing::warn!(site = %name, %error, "rules see it as resting, but it is awake");
        }
    }

    /// Returns the descriptor from which an edge reads which instances are awake.
    pub fn awake_reader(&self) -> Option<OwnedFd> {
        let reader = self.awake.borrow().as_ref()?.reader();
        if let Err(error) = &reader {
            tracing::warn!(%error, "the edge does not learn which applications are awake");
        }
        reader.ok()
    }

    /// This run has another in its place from now on.
    pub fn tell_drained(&self, run: InstanceId) {
        // There may be no receiver.
        let _ = self.drained.send(run);
    }

    /// Returns a receiver of the runs that are replaced from now on.
    pub fn watch_drained(&self) -> broadcast::Receiver<InstanceId> {
        self.drained.subscribe()
    }
}

fn awake_set() -> Option<AwakeSet> {
    let awake = AwakeSet::new();
    if let Err(error) = &awake {
        tracing::warn!(%error, "rules see every application as awake: the list of awake applications cannot be made");
    }
    awake.ok()
}
