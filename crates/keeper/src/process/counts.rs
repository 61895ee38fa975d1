//! How many process trees there are: of each kind and tenant, and of the node.
//!
//! Invariant: the total is the sum of all counts. Not here: starting and ending trees (`process`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use nagaya_records::TenantName;
use tokio::sync::Notify;

use crate::metrics::KeeperMetrics;

use super::kind::ProcessKind;

/// Whose tree it is.
type CountKey = (ProcessKind, TenantName);

pub struct ProcessCounts {
    counts: RefCell<HashMap<CountKey, u32>>,
    total: Cell<u32>,
    total_max: Cell<u32>,
    one_less: Notify,
    metrics: KeeperMetrics,
}

/// Counts one tree until it is dropped.
pub struct ProcessCountGuard {
    counts: Rc<ProcessCounts>,
    key: CountKey,
}

impl ProcessCounts {
    pub fn new(metrics: KeeperMetrics, total_max: u32) -> Rc<Self> {
        Rc::new(Self {
            counts: RefCell::default(),
            total: Cell::new(0),
            total_max: Cell::new(total_max),
            one_less: Notify::new(),
            metrics,
        })
    }

    pub fn set_total_max(&self, total_max: u32) {
        self.total_max.set(total_max);
    }

    /// How many of this kind there are.
    pub fn of_kind(&self, kind: ProcessKind) -> u32 {
        let counts = self.counts.borrow();
        counts.iter().filter(|((of, _), _)| *of == kind).map(|(_, count)| count).sum()
    }

    /// Counts one more, or says in words why there may be none.
    pub fn take(all: &Rc<Self>, key: CountKey, per_tenant_max: u32) -> Result<ProcessCountGuard, String> {
        if all.total.get() >= all.total_max.get() {
            return Err(format!("{} processes run already, as many as this node allows", all.total.get()));
        }
        let mut counts = all.counts.borrow_mut();
        let count = counts.get(&key).copied().unwrap_or(0);
        if count >= per_tenant_max {
            let (kind, tenant) = (key.0.as_str(), &key.1);
            return Err(format!("tenant '{tenant}' has {count} {kind} processes, as many as it may have"));
        }
        counts.insert(key.clone(), count + 1);
        all.total.set(all.total.get() + 1);
        all.metrics.processes.add(1);
        Ok(ProcessCountGuard { counts: Rc::clone(all), key })
    }

    /// Returns when there are none.
    pub async fn wait_until_none(&self) {
        loop {
            let one_less = self.one_less.notified();
            if self.total.get() == 0 {
                return;
            }
            one_less.await;
        }
    }
}

impl Drop for ProcessCountGuard {
    fn drop(&mut self) {
        let all = &self.counts;
        all.total.set(all.total.get() - 1);
        all.metrics.processes.add(-1);
        {
            let mut counts = all.counts.borrow_mut();
            if let Some(count) = counts.get_mut(&self.key) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(&self.key);
                }
            }
        }
        all.one_less.notify_waiters();
    }
}
