//! Values in etcd that do not count or cannot be read. This node keeps the last known value in
//! their place, and reports them.
//!
//! Not here: which values count (`signed`), the log and the metric (`nagaya`'s supervisor).

use std::collections::{BTreeMap, BTreeSet};

use crate::etcd::inner::{ClusterStore, StoreInner};

/// Most refused values that are kept by name.
const STANDING_MAX: usize = 1_000;

/// Most of them that are shown.
const SHOWN_MAX: usize = 20;

/// Longest reason, bytes: some quote the written value.
const REASON_LEN_MAX: usize = 200;

/// The values that this node has refused.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RefusedValues {
    /// Total since this process began.
    pub total: u64,
    /// Refused values in etcd now. At most `STANDING_MAX` are counted.
    pub standing: usize,
    /// The first of them in order of key, each with its reason: at most `SHOWN_MAX`.
    pub shown: Vec<String>,
}

/// Present refused values, by their key.
#[derive(Debug, Default)]
pub(super) struct StandingRefusals {
    total: u64,
    reasons: BTreeMap<String, String>,
}

impl ClusterStore {
    pub fn refusals(&self) -> RefusedValues {
        let state = self.inner.state.lock();
        let StandingRefusals { total, reasons } = &state.refused;
        let shown = reasons.iter().take(SHOWN_MAX).map(|(place, why)| format!("{place}: {why}")).collect();
        RefusedValues { total: *total, standing: reasons.len(), shown }
    }
}

impl StoreInner {
    pub(super) fn refused(&self, place: &str, why: String) {
        let refused = &mut self.state.lock().refused;
        // A repeated read finds the same value again and again.
        if refused.reasons.get(place).is_some_and(|known| *known == why) {
            return;
        }
        refused.total += 1;
        if refused.reasons.len() < STANDING_MAX || refused.reasons.contains_key(place) {
            let end = why.floor_char_boundary(REASON_LEN_MAX);
            refused.reasons.insert(place.into(), why[..end].into());
        }
    }

    /// Notes that a valid value, or none, is there.
    pub(super) fn accepted(&self, key: &[u8]) {
        let refused = &mut self.state.lock().refused;
        if !refused.reasons.is_empty() {
            refused.reasons.remove(&self.keys.label(key));
        }
    }

    /// Notes that everything was checked, and only these are refused.
    pub(super) fn keep_refused(&self, places: &BTreeSet<&str>) {
        self.state.lock().refused.reasons.retain(|place, _| places.contains(&**place));
    }
}
