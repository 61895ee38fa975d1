//! The keeper's metrics, all declared here.
//!
//! Not here: counting and text (`telemetry`), the numbers of `nagaya status` (`engine`).

use std::sync::Arc;

use nagaya_telemetry::{Counter, Counters, Dimension, Gauge, Registry};

/// In the order of `process::KINDS`.
const KIND: Dimension = Dimension { label: "kind", values: &["cgi", "php", "app"] };

#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    pub started: Counters<1>,
    pub failed: Counters<1>,
    pub processes: Gauge,
    pub connections: Gauge,
    pub enters: Counter,
    pub moves: Counter,
    pub demotions: Counter,
}

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::new();
        Self {
            started: registry.counters("keeper_started", "Process trees started", [KIND]),
            failed: registry.counters("keeper_start_failures", "Process trees that failed to start", [KIND]),
            processes: registry.gauge("keeper_processes", "Process trees that run now"),
            connections: registry.gauge("keeper_connections", "Connections of edge threads"),
            enters: registry
                .counter("keeper_cell_enters", "Times a worker began to serve a request in a cell"),
            moves: registry.counter("keeper_cell_moves", "Times a worker was moved to another cell"),
            demotions: registry
                .counter("keeper_demotions", "Steps in which running requests were slowed down"),
            registry: Arc::new(registry),
        }
    }

    pub fn encode(&self) -> String {
        self.registry.encode()
    }
}
