//! Whether the cluster's store can be trusted: how it is reached, and what in it does not count.
//!
//! Not here: deciding either (`nagaya_cmdb`).

use std::sync::{Arc, Weak};

use nagaya_cmdb::store::ClusterStore;
use nagaya_cmdb::store::etcd::Refusals;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::supervisor::exposition::Page;

/// Shared by the cluster's thread and those who ask about the node.
#[derive(Default)]
pub struct StoreHealth {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Why others can reach the store. `None`: they cannot, or there is none.
    weakness: Option<String>,
    store: Weak<ClusterStore>,
}

impl StoreHealth {
    pub fn set_weakness(&self, weakness: Option<String>) {
        self.state.lock().weakness = weakness;
    }

    pub fn follow(&self, store: &Arc<ClusterStore>) {
        self.state.lock().store = Arc::downgrade(store);
    }

    fn refusals(&self) -> Refusals {
        let store = self.state.lock().store.upgrade();
        store.map(|store| store.refusals()).unwrap_or_default()
    }

    /// `null` while there is nothing to say.
    pub fn status(&self) -> Value {
        let weakness = self.state.lock().weakness.clone();
        let refusals = self.refusals();
        if weakness.is_none() && refusals == Refusals::default() {
            return Value::Null;
        }
        json!({
            "insecure": weakness,
            "refused": refusals.standing,
            "refused_total": refusals.total,
            "refused_values": refusals.shown,
        })
    }

    pub fn expose(&self, page: &mut Page) {
        let one = |value| [(String::new(), value)];
        let refusals = self.refusals();
        page.family(
            "nagaya_cluster_values_refused_total",
            "counter",
            "Values of the cluster's store that did not count: unsigned, forged, put back, or unreadable.",
            &one(refusals.total),
        );
        page.family(
            "nagaya_cluster_values_refused",
            "gauge",
            "Such values that stand in the cluster's store now.",
            &one(refusals.standing as u64),
        );
        page.family(
            "nagaya_cluster_store_insecure",
            "gauge",
            "Whether the cluster's store is reached in clear text or without a login.",
            &one(u64::from(self.state.lock().weakness.is_some())),
        );
    }
}
