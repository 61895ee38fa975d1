//! State that the rules of all threads share: files, facts about the node, and messages already
//! logged.
//!
//! Not here: one thread's engine (`rules`).

use std::collections::BTreeSet;
use std::sync::Arc;

use nagaya_rules::RuleSet;
use parking_lot::Mutex;

use crate::admission::lanes::LaneSet;
use crate::metrics::EdgeMetrics;
use crate::options::CurrentOptions;
use crate::record_table::RecordTable;
use crate::rules::cells::NamedCells;
use crate::rules::load::LoadReadings;
use crate::shaping::shared_buckets::SharedBuckets;

/// Maximum number of left-out kinds that are remembered as logged.
const TOLD_MAX: usize = 256;

/// State that the rules of all threads share.
pub struct SharedRules {
    /// The operator's rules, as they are on disk.
    pub set: Arc<RuleSet>,
    /// Named cells, as rules see them.
    pub named: NamedCells,
    pub load: LoadReadings,
    /// Messages about rules that were logged already.
    pub told: LogOnce,
    /// Charges to the cells that requests share.
    pub ledger: Arc<SharedBuckets>,
    pub lanes: Arc<LaneSet>,
    pub metrics: Arc<EdgeMetrics>,
    pub table: Arc<RecordTable>,
    pub options: Arc<CurrentOptions>,
}

/// Messages that were logged already, by all threads.
#[derive(Debug, Default)]
pub struct LogOnce(Mutex<BTreeSet<String>>);

impl LogOnce {
    /// Returns true the first time.
    pub fn first(&self, what: &str) -> bool {
        let mut told = self.0.lock();
        told.len() < TOLD_MAX && !told.contains(what) && told.insert(what.to_owned())
    }

    pub fn forget(&self) {
        self.0.lock().clear();
    }
}
