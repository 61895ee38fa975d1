//! How many placements each node has, and how many of them came lately because of load.
//!
//! Not here: counting them again when records change (`placement_counter`).

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use nagaya_records::{NodeName, Placement, PlacementReason};
use nagaya_store::{PAGE_LEN_MAX, Store, StoreError};

use super::clock::unix_ms;
use super::records::NodeRecords;

/// The minute in which a node takes part in few moves because of load.
const ARRIVED_LATELY_MS: u64 = 60_000;

/// The last count. Only `placement_counter` replaces it.
#[derive(Debug, Default)]
pub struct PlacementCounts {
    last: RefCell<PlacementTotals>,
}

/// Placements of each node, as of a short time ago.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PlacementTotals {
    pub all: HashMap<NodeName, u32>,
    /// Of these, those that came within the last minute because of their load.
    pub arrivals: HashMap<NodeName, u32>,
}

/// One pass over all placements.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CountedPlacements {
    pub totals: PlacementTotals,
    /// Sites that this node shares with others.
    pub shared: Vec<Placement>,
}

impl PlacementCounts {
    pub fn replace(&self, totals: PlacementTotals) {
        *self.last.borrow_mut() = totals;
    }

    pub fn placements_on(&self, node: &NodeName) -> u32 {
        self.last.borrow().all.get(node).copied().unwrap_or(0)
    }

    /// Returns how many sites came to the node within the last minute because of their load.
    pub fn arrivals_on(&self, node: &NodeName) -> u32 {
        self.last.borrow().arrivals.get(node).copied().unwrap_or(0)
    }

    pub fn has_arrivals(&self) -> bool {
        !self.last.borrow().arrivals.is_empty()
    }

    pub fn total(&self) -> u32 {
        self.last.borrow().all.values().sum()
    }
}

impl CountedPlacements {
    fn add(&mut self, placement: Placement, now_ms: u64, own: &NodeName) {
        for part in placement.parts() {
            // A clock that is ahead of this one wrote it just now.
            let age_ms = now_ms.saturating_sub(part.since_ms);
            if part.why == PlacementReason::Load && age_ms < ARRIVED_LATELY_MS {
                *self.totals.arrivals.entry(part.node.clone()).or_default() += 1;
            }
            *self.totals.all.entry(part.node.clone()).or_default() += 1;
        }
        if !placement.copies.is_empty() && placement.part(own).is_some() {
            self.shared.push(placement);
        }
    }
}

/// Counts placements on a thread that may block. `None` if the records could not be read.
pub async fn count_placements(records: &Arc<NodeRecords>, own: &NodeName) -> Option<CountedPlacements> {
    let records = Arc::clone(records);
    let own = own.clone();
    tokio::task::spawn_blocking(move || count_stored(&*records, &own)).await.ok()?.ok()
}

fn count_stored(records: &dyn Store, own: &NodeName) -> Result<CountedPlacements, StoreError> {
    let mut counted = CountedPlacements::default();
    let now_ms = unix_ms();
    let mut after: Option<String> = None;
    loop {
        let page = records.placements(after.as_deref(), PAGE_LEN_MAX)?;
        let Some(last) = page.last() else { return Ok(counted) };
        after = Some(last.site.to_string());
        page.into_iter().for_each(|placement| counted.add(placement, now_ms, own));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn recent_arrivals_by_load_are_counted_beside_all() {
        let mut counted = CountedPlacements::default();
        for (node, why, since) in [
            ("a", PlacementReason::Load, 600_000),
            ("a", PlacementReason::Load, 599_999),
            ("a", PlacementReason::Load, 540_000),
            ("a", PlacementReason::Load, 700_000),
            ("b", PlacementReason::First, 600_000),
        ] {
            let placement = json!({ "site": "s", "node": node, "epoch": 1, "since_ms": since, "why": why });
            counted.add(serde_json::from_value(placement).unwrap(), 600_000, &NodeName::new("a").unwrap());
        }
        assert_eq!(counted.shared, []);
        let shared = json!({ "site": "s", "node": "a", "epoch": 2, "since_ms": 1, "why": "first", "node_epoch": 1,
            "copies": [{ "node": "b", "epoch": 2, "since_ms": 599_000 }] });
        counted.add(serde_json::from_value(shared).unwrap(), 600_000, &NodeName::new("a").unwrap());
        assert_eq!(counted.shared.len(), 1);
        let named = |count: &HashMap<NodeName, u32>| -> Vec<u32> {
            ["a", "b"].iter().map(|name| count.get(*name).copied().unwrap_or(0)).collect()
        };
        assert_eq!((named(&counted.totals.all), named(&counted.totals.arrivals)), (vec![5, 2], vec![3, 1]));
    }
}
