//! Health of the cluster's store: how it is reached, and which of its values do not count.
//!
//! Not here: deciding either (`nagaya_records`).

use std::sync::{Arc, Weak};

use nagaya_store::ClusterStore;
use nagaya_store::etcd::RefusedValues;
use nagaya_telemetry::MetricPage;
use parking_lot::Mutex;
use serde_json::{Value, json};

/// Shared by the cluster's thread and queries about the node.
#[derive(Default)]
pub struct StoreHealth {
    state: Mutex<HealthState>,
}

#[derive(Default)]
struct HealthState {
    /// Why others can reach the store. `None` if they cannot, or if there is none.
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

    fn refusals(&self) -> RefusedValues {
        let store = self.state.lock().store.upgrade();
        store.map(|store| store.refusals()).unwrap_or_default()
    }

    /// Returns the status; `null` while there is nothing to report.
    pub fn status(&self) -> Value {
        let weakness = self.state.lock().weakness.clone();
        let refusals = self.refusals();
        if weakness.is_none() && refusals == RefusedValues::default() {
            return Value::Null;
        }
        json!({
            "insecure": weakness,
            "refused": refusals.standing,
            "refused_total": refusals.total,
            "refused_values": refusals.shown,
        })
    }

    pub fn expose(&self, page: &mut MetricPage) {
        let refusals = self.refusals();
        let refused = page.counters(
            "nagaya_cluster_values_refused_total",
            "Values of the cluster's store that did not count: unsigned, forged, put back, or unreadable.",
        );
        refused.add([], refusals.total);
        let standing =
            page.gauges("nagaya_cluster_values_refused", "Such values that are in the cluster's store now.");
        standing.add([], refusals.standing as u64);
        let insecure = page.gauges(
            "nagaya_cluster_store_insecure",
            "Whether the cluster's store is reached in clear text or without a login.",
        );
        insecure.add([], u64::from(self.state.lock().weakness.is_some()));
    }
}
