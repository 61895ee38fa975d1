//! Counts events of each other node, for `/metrics` and `nagaya status`.
//!
//! Not here: metrics with fixed labels (`metrics`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use nagaya_records::NodeName;
use nagaya_telemetry::MetricPage;
use parking_lot::RwLock;
use serde_json::{Value, json};

/// Outcomes of a request that was forwarded to another node.
const OUTCOMES: [&str; 7] = ["answered", "silent", "refused", "fenced", "not_there", "broken", "failed"];

/// Outcomes of a probe.
const FOUND: [&str; 3] = ["answers", "refuses", "silent"];

/// Maximum number of nodes counted by name: as many as a cluster has, and those that have left
/// it.
const NODES_MAX: usize = 1024;

#[derive(Debug, Default)]
pub struct PeerCounterTable(RwLock<BTreeMap<NodeName, Arc<PeerCounters>>>);

#[derive(Debug, Default)]
struct PeerCounters {
    forwarded: [AtomicU64; OUTCOMES.len()],
    probes: [AtomicU64; FOUND.len()],
    false_alarms: AtomicU64,
    round_trip_us: AtomicU64,
    bound_us: AtomicU64,
    connections: AtomicI64,
}

impl PeerCounterTable {
    pub fn forwarded(&self, node: &NodeName, outcome: &str) {
        self.add(node, |tally| &tally.forwarded, &OUTCOMES, outcome);
    }

    pub fn probed(&self, node: &NodeName, found: &str) {
        self.add(node, |tally| &tally.probes, &FOUND, found);
    }

    /// Sets the measurements of the path to a node.
    pub fn measured(&self, node: &NodeName, round_trip_us: u64, bound_us: u64, false_alarms: u64) {
        self.with(node, |tally| {
            tally.round_trip_us.store(round_trip_us, Ordering::Relaxed);
            tally.bound_us.store(bound_us, Ordering::Relaxed);
            tally.false_alarms.store(false_alarms, Ordering::Relaxed);
        });
    }

    /// Adds this number of connections of a thread. It may be negative.
    pub fn connected(&self, node: &NodeName, more: i64) {
        self.with(node, |tally| {
            tally.connections.fetch_add(more, Ordering::Relaxed);
        });
    }

    fn add<const N: usize>(
        &self,
        node: &NodeName,
        of: fn(&PeerCounters) -> &[AtomicU64; N],
        names: &[&str; N],
        name: &str,
    ) {
        let Some(at) = names.iter().position(|known| *known == name) else { return };
        self.with(node, |tally| {
            of(tally)[at].fetch_add(1, Ordering::Relaxed);
        });
    }

    fn with(&self, node: &NodeName, count: impl FnOnce(&PeerCounters)) {
        if let Some(tally) = self.0.read().get(node) {
            return count(tally);
        }
        let mut tallies = self.0.write();
        if tallies.len() < NODES_MAX {
            count(tallies.entry(node.clone()).or_default());
        }
    }

    /// Adds the families, each with the samples of each node. It adds none if there are no other
    /// nodes.
    pub fn expose(&self, page: &mut MetricPage) {
        let tallies = self.0.read();
        if tallies.is_empty() {
            return;
        }
        let requests =
            page.counters("nagaya_peer_requests_total", "Requests sent to another node, by result");
        for (node, tally) in &*tallies {
            for (outcome, count) in OUTCOMES.iter().zip(&tally.forwarded) {
                let labels = [("node", node.as_str()), ("outcome", outcome)];
                requests.add(labels, count.load(Ordering::Relaxed));
            }
        }
        let probes = page.counters("nagaya_peer_probes_total", "Probes of another node, by result");
        for (node, tally) in &*tallies {
            for (found, count) in FOUND.iter().zip(&tally.probes) {
                probes.add([("node", node.as_str()), ("found", found)], count.load(Ordering::Relaxed));
            }
        }
        let false_alarms = page.counters(
            "nagaya_peer_false_alarms_total",
            "Probes that found silence where an answer came after all",
        );
        for (node, tally) in &*tallies {
            false_alarms.add([("node", node.as_str())], tally.false_alarms.load(Ordering::Relaxed));
        }
        let connections = page.gauges("nagaya_peer_connections", "Connections to another node");
        for (node, tally) in &*tallies {
            connections.add([("node", node.as_str())], tally.connections.load(Ordering::Relaxed));
        }
        let round_trips = page
            .gauges("nagaya_peer_round_trip_seconds", "Smoothed time of a probe to another node and back");
        for (node, tally) in &*tallies {
            round_trips.add([("node", node.as_str())], seconds(&tally.round_trip_us));
        }
    }

    /// Returns rows for `nagaya status`.
    pub fn status(&self) -> Vec<Value> {
        let row = |(node, tally): (&NodeName, &Arc<PeerCounters>)| {
            let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
            let named = |names: &[&str], counts: &[AtomicU64]| -> serde_json::Map<String, Value> {
                names
                    .iter()
                    .zip(counts)
                    .map(|(name, count)| ((*name).to_owned(), read(count).into()))
                    .collect()
            };
            json!({
                "node": node,
                "requests": named(&OUTCOMES, &tally.forwarded),
                "probes": named(&FOUND, &tally.probes),
                "false_alarms": read(&tally.false_alarms),
                "round_trip_us": read(&tally.round_trip_us),
                "bound_us": read(&tally.bound_us),
                "connections": tally.connections.load(Ordering::Relaxed),
            })
        };
        self.0.read().iter().map(row).collect()
    }
}

fn seconds(us: &AtomicU64) -> f64 {
    us.load(Ordering::Relaxed) as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(tallies: &PeerCounterTable) -> String {
        let mut page = MetricPage::default();
        tallies.expose(&mut page);
        page.encode()
    }

    #[test]
    fn a_node_is_counted_under_its_name() {
        let (tallies, node) = (PeerCounterTable::default(), NodeName::new("b").unwrap());
        assert_eq!(text(&tallies), "");
        tallies.forwarded(&node, "answered");
        tallies.forwarded(&node, "answered");
        tallies.probed(&node, "silent");
        tallies.measured(&node, 250, 20_000, 1);
        tallies.connected(&node, 2);
        tallies.connected(&node, -1);
        let text = text(&tallies);
        for line in [
            "# TYPE nagaya_peer_requests_total counter",
            r#"nagaya_peer_requests_total{node="b",outcome="answered"} 2"#,
            r#"nagaya_peer_requests_total{node="b",outcome="silent"} 0"#,
            r#"nagaya_peer_probes_total{node="b",found="silent"} 1"#,
            r#"nagaya_peer_false_alarms_total{node="b"} 1"#,
            "# HELP nagaya_peer_connections Connections to another node",
            "# TYPE nagaya_peer_connections gauge",
            r#"nagaya_peer_connections{node="b"} 1"#,
            r#"nagaya_peer_round_trip_seconds{node="b"} 0.00025"#,
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
        }
        assert_eq!(tallies.status()[0]["requests"]["answered"], 2);
    }
}
