//! Counts the traffic through the open places of one instance.
//!
//! Not here: time that waits for databases took (`watched`).

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Counters of the connections of one instance.
#[derive(Debug, Default)]
pub struct RelayCounts {
    pub open: AtomicU64,
    pub taken: AtomicU64,
    pub failed: AtomicU64,
    pub last_failure: Mutex<Option<String>>,
    pub waited_us: AtomicU64,
    pub queries: AtomicU64,
}

/// Values of these counters, for display.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct EgressTraffic {
    pub open: u64,
    pub taken: u64,
    pub failed: u64,
    pub last_failure: Option<String>,
    /// Time with an open database query, microseconds.
    pub database_us: u64,
    pub queries: u64,
}

impl RelayCounts {
    pub fn failed(&self, why: String) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        *self.last_failure.lock() = Some(why);
    }
}
