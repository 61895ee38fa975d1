//! Charges the cells that requests share, for the whole process: bytes of bodies, and CPU time of
//! short programs.
//!
//! Not here: the rates themselves (`bucket`), what a program used (`execution`).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use foldhash::fast::RandomState;
use nagaya_records::cell::{
    CellChange, CellName, CellScope, CgroupController, CpuQuota, Device, IoLimit, LimitSet, NamedCell,
};
use nagaya_records::{SiteName, TenantName};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::http::throttle::bucket::RateBucket;

/// Maximum number of charged cells. Idle ones are dropped first. Beyond it only the kernel's
/// limits hold.
const CELLS_MAX: usize = 16_384;

/// A cell that requests share.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SharedCell {
    Tenant(TenantName),
    Site(SiteName),
    /// Of the node, or of one tenant.
    Named(Option<TenantName>, CellName),
}

impl SharedCell {
    /// Returns the named cell that a request of this tenant refers to.
    pub fn named(cell: &NamedCell, tenant: &TenantName) -> Self {
        let owner = match cell.scope {
            CellScope::Node => None,
            CellScope::Tenant => Some(tenant.clone()),
        };
        Self::Named(owner, cell.name.clone())
    }
}

/// Direction of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyDirection {
    /// To the client: `read` limits.
    Out,
    /// From the client: `write` limits.
    In,
}

/// The accounts of all shared cells of this process.
#[derive(Debug, Default)]
pub struct SharedBuckets {
    cells: Mutex<HashMap<SharedCell, CellAccount, RandomState>>,
    /// Grows when a cell gets a bucket or loses one.
    buckets: AtomicU64,
}

#[derive(Debug, Default)]
struct CellAccount {
    out: Option<Arc<RateBucket>>,
    r#in: Option<Arc<RateBucket>>,
    quota: Option<CpuQuota>,
    /// Number of programs that run in it now.
    running: u32,
    busy: Option<BusySpell>,
}

/// A period in which a cell always had a program, or still paid for one.
#[derive(Debug, Clone, Copy)]
struct BusySpell {
    since: Instant,
    cpu_us: u64,
}

impl BusySpell {
    /// Returns the time when all charges are paid at this quota.
    fn paid_at(self, quota: CpuQuota) -> Instant {
        self.since + Duration::from_micros(quota.wall_us(self.cpu_us))
    }
}

impl CellAccount {
    fn bucket(&mut self, way: BodyDirection) -> &mut Option<Arc<RateBucket>> {
        match way {
            BodyDirection::Out => &mut self.out,
            BodyDirection::In => &mut self.r#in,
        }
    }

    /// Returns whether it can be dropped: it has no user, and no effect.
    fn is_idle(&self) -> bool {
        let idle = |bucket: &Option<Arc<RateBucket>>| {
            bucket.as_ref().is_none_or(|bucket| Arc::strong_count(bucket) == 1 && bucket.is_idle())
        };
        self.running == 0 && idle(&self.out) && idle(&self.r#in) && self.is_paid()
    }

    fn is_paid(&self) -> bool {
        match (self.busy, self.quota) {
            (Some(busy), Some(quota)) => busy.paid_at(quota) <= Instant::now(),
            _ => true,
        }
    }

    /// Sets the quota. Charges at another quota are dropped.
    fn set_quota(&mut self, quota: Option<CpuQuota>) {
        if self.quota != quota {
            self.quota = quota;
            self.busy = None;
        }
    }

    /// Counts a program that begins. Returns false if there is no quota for it.
    fn enter(&mut self) -> bool {
        if self.quota.is_none() {
            return false;
        }
        if self.busy.is_none() || self.running == 0 && self.is_paid() {
            self.busy = Some(BusySpell { since: Instant::now(), cpu_us: 0 });
        }
        self.running += 1;
        true
    }

    fn set_rate(&mut self, way: BodyDirection, rate: u64) {
        match self.bucket(way) {
            Some(bucket) => bucket.set_rate(rate),
            none => *none = Some(Arc::new(RateBucket::new(rate))),
        }
    }

    /// Takes over the limits of these controllers of the cell. On v1 each one is set separately.
    fn set(&mut self, controllers: &[CgroupController], limits: &LimitSet) {
        if controllers.contains(&CgroupController::Blkio) {
            for way in [BodyDirection::Out, BodyDirection::In] {
                match rate(limits, way) {
                    Some(rate) => self.set_rate(way, rate),
                    None => *self.bucket(way) = None,
                }
            }
        }
        if controllers.contains(&CgroupController::Cpu) {
            self.set_quota(limits.cpu);
        }
    }
}

/// Returns the lowest rate of these limits, over all disks. The edge cannot know from which disk
/// a body comes, or whether from any.
pub fn rate(limits: &LimitSet, way: BodyDirection) -> Option<u64> {
    let of = |limit: &IoLimit| match way {
        BodyDirection::Out => limit.read_bps,
        BodyDirection::In => limit.write_bps,
    };
    limits.io.iter().filter_map(of).min()
}

impl SharedBuckets {
    /// Returns the bucket of a shared cell, at the present rate of its limits.
    pub fn bucket(&self, cell: SharedCell, limits: &LimitSet, way: BodyDirection) -> Option<Arc<RateBucket>> {
        let rate = rate(limits, way)?;
        self.with(cell, |cell| {
            cell.set_rate(way, rate);
            cell.bucket(way).clone()
        })?
    }

    /// Returns a number that changes when a cell gets a bucket or loses one.
    pub fn buckets(&self) -> u64 {
        self.buckets.load(Ordering::Acquire)
    }

    /// Returns the bucket of a named cell of this request. Its limits are those of the request,
    /// or else those that others have set.
    pub fn named_bucket(
        &self,
        named: &NamedCell,
        tenant: &TenantName,
        way: BodyDirection,
    ) -> Option<Arc<RateBucket>> {
        if !named.controllers.contains(&CgroupController::Blkio) {
            return None;
        }
        let cell = SharedCell::named(named, tenant);
        match &named.limits {
            Some(limits) => self.bucket(cell, limits, way),
            None => self.cells.lock().get_mut(&cell)?.bucket(way).clone(),
        }
    }

    /// Records the changes of a rule to named cells of the node that it does not attach to.
    pub fn note(&self, changes: &[CellChange]) {
        for change in changes {
            let (name, controllers, limits) = match change {
                CellChange::Set { name, controllers, limits } => (name, controllers, limits),
                CellChange::Drop { name, controllers } => (name, controllers, &LimitSet::default()),
            };
            self.with(SharedCell::Named(None, name.clone()), |cell| cell.set(controllers, limits));
        }
    }

    /// Returns the known limits of a named cell: its quota and its rates.
    pub fn limits(&self, named: &NamedCell, tenant: &TenantName) -> LimitSet {
        let cells = self.cells.lock();
        let Some(cell) = cells.get(&SharedCell::named(named, tenant)) else { return LimitSet::default() };
        let rate = |bucket: &Option<Arc<RateBucket>>| bucket.as_ref().map(|bucket| bucket.rate());
        let (read_bps, write_bps) = (rate(&cell.out), rate(&cell.r#in));
        let io = IoLimit { read_bps, write_bps, ..IoLimit::of(Device::Root) };
        let io = if read_bps.or(write_bps).is_some() { vec![io] } else { Vec::new() };
        LimitSet { cpu: cell.quota, io, ..LimitSet::default() }
    }

    /// Counts a program that begins to run in these named cells.
    pub fn enter(self: &Arc<Self>, named: &[NamedCell], tenant: &TenantName) -> Vec<CellCharge> {
        let with_cpu = named.iter().filter(|named| named.controllers.contains(&CgroupController::Cpu));
        with_cpu
            .filter_map(|named| {
                let cell = SharedCell::named(named, tenant);
                let quota = named.limits.as_ref().map(|limits| limits.cpu);
                let is_held = self.with(cell.clone(), |cell| {
                    if let Some(quota) = quota {
                        cell.set_quota(quota);
                    }
                    cell.enter()
                })?;
                is_held.then(|| CellCharge { ledger: Arc::clone(self), cell })
            })
            .collect()
    }

    /// Returns `None` if there is no space for one more cell.
    fn with<T>(&self, cell: SharedCell, act: impl FnOnce(&mut CellAccount) -> T) -> Option<T> {
        let mut cells = self.cells.lock();
        if cells.len() >= CELLS_MAX && !cells.contains_key(&cell) {
            cells.retain(|_, cell| !cell.is_idle());
            if cells.len() >= CELLS_MAX {
                return None;
            }
        }
        let cell = cells.entry(cell).or_default();
        let before = (cell.out.is_some(), cell.r#in.is_some());
        let done = act(cell);
        if before != (cell.out.is_some(), cell.r#in.is_some()) {
            self.buckets.fetch_add(1, Ordering::Release);
        }
        Some(done)
    }
}

/// A program runs in a named cell that has a CPU quota.
#[derive(Debug)]
pub struct CellCharge {
    ledger: Arc<SharedBuckets>,
    cell: SharedCell,
}

impl CellCharge {
    /// Charges the program's usage. Returns when the cell's quota has paid for it and for all
    /// charges since the cell became busy. A running program is charged when it ends. Until then
    /// only the kernel limits it.
    pub fn charge(&self, cpu_us: u64) -> Option<Instant> {
        let mut cells = self.ledger.cells.lock();
        let cell = cells.get_mut(&self.cell)?;
        let quota = cell.quota?;
        let busy = cell.busy.get_or_insert(BusySpell { since: Instant::now(), cpu_us: 0 });
        busy.cpu_us = busy.cpu_us.saturating_add(cpu_us);
        Some(busy.paid_at(quota))
    }
}

impl Drop for CellCharge {
    fn drop(&mut self) {
        if let Some(cell) = self.ledger.cells.lock().get_mut(&self.cell) {
            cell.running = cell.running.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests;
