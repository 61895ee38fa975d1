//! Values in etcd that do not count or cannot be read: this node has what it knew before in their place, and says so.
//!
//! Not here: which values count (`signed`), the log and the metric (`nagaya`'s supervisor).

use std::collections::{BTreeMap, BTreeSet};

use super::{ClusterStore, Inner};

/// Most refused values that are kept by name.
const STANDING_MAX: usize = 1_000;

/// Most of them that are shown.
const SHOWN_MAX: usize = 20;

/// Longest reason, bytes: some quote what was written.
const REASON_LEN_MAX: usize = 200;

/// What this node has refused.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refusals {
    /// Since this process began.
    pub total: u64,
    /// Values that stand in etcd now. At most `STANDING_MAX` are counted.
    pub standing: usize,
    /// The first of them in order of key, each with why: at most `SHOWN_MAX`.
    pub shown: Vec<String>,
}

/// Those that stand in etcd, by their key.
#[derive(Debug, Default)]
pub(super) struct Standing {
    total: u64,
    reasons: BTreeMap<String, String>,
}

impl ClusterStore {
    pub fn refusals(&self) -> Refusals {
        let state = self.inner.state.lock();
        let Standing { total, reasons } = &state.refused;
        let shown = reasons.iter().take(SHOWN_MAX).map(|(place, why)| format!("{place}: {why}")).collect();
        Refusals { total: *total, standing: reasons.len(), shown }
    }
}

impl Inner {
    pub(super) fn refused(&self, place: &str, why: String) {
        let refused = &mut self.state.lock().refused;
        // A read that is repeated finds the same again and again.
        if refused.reasons.get(place).is_some_and(|known| *known == why) {
            return;
        }
        refused.total += 1;
        if refused.reasons.len() < STANDING_MAX || refused.reasons.contains_key(place) {
            let end = why.floor_char_boundary(REASON_LEN_MAX);
            refused.reasons.insert(place.into(), why[..end].into());
        }
    }

    /// A value stands there that counts, or none.
    pub(super) fn accepted(&self, key: &[u8]) {
        let refused = &mut self.state.lock().refused;
        if !refused.reasons.is_empty() {
            refused.reasons.remove(&self.keys.label(key));
        }
    }

    /// Everything was looked at, and nothing is refused but these.
    pub(super) fn keep_refused(&self, places: &BTreeSet<&str>) {
        self.state.lock().refused.reasons.retain(|place, _| places.contains(&**place));
    }
}
