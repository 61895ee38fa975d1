//! What the cells that requests share have been charged, process-wide: bytes of bodies, and CPU time of short programs.
//!
//! Not here: the rates themselves (`bucket`), what a program used (`stay`).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use foldhash::fast::RandomState;
use nagaya_cmdb::cell::{
    CellChange, CellName, Controller, CpuQuota, Device, IoLimit, Limits, NamedCell, Scope,
};
use nagaya_cmdb::{SiteName, TenantName};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::bucket::Bucket;

/// Cells charged at once. Those that are idle are forgotten first; beyond it the kernel's limits alone hold.
const CELLS_MAX: usize = 16_384;

/// A cell that requests share.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Shared {
    Tenant(TenantName),
    Site(SiteName),
    /// Of the node, or of one tenant.
    Named(Option<TenantName>, CellName),
}

impl Shared {
    /// The named cell as a request of this tenant means it.
    pub fn named(cell: &NamedCell, tenant: &TenantName) -> Self {
        let owner = match cell.scope {
            Scope::Node => None,
            Scope::Tenant => Some(tenant.clone()),
        };
        Self::Named(owner, cell.name.clone())
    }
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// To the client: `read` limits.
    Out,
    /// From the client: `write` limits.
    In,
}

/// The accounts of all shared cells of this process.
#[derive(Debug, Default)]
pub struct Ledger {
    cells: Mutex<HashMap<Shared, Cell, RandomState>>,
    /// Counts when a cell gets a bucket or loses one.
    buckets: AtomicU64,
}

#[derive(Debug, Default)]
struct Cell {
    out: Option<Arc<Bucket>>,
    r#in: Option<Arc<Bucket>>,
    quota: Option<CpuQuota>,
    /// Programs that run in it now.
    running: u32,
    busy: Option<Busy>,
}

/// A time in which a cell always had a program, or was still paying off what one had used.
#[derive(Debug, Clone, Copy)]
struct Busy {
    since: Instant,
    cpu_us: u64,
}

impl Busy {
    /// When all that was charged is paid off at this quota.
    fn paid_at(self, quota: CpuQuota) -> Instant {
        self.since + Duration::from_micros(quota.wall_us(self.cpu_us))
    }
}

impl Cell {
    fn bucket(&mut self, way: Way) -> &mut Option<Arc<Bucket>> {
        match way {
            Way::Out => &mut self.out,
            Way::In => &mut self.r#in,
        }
    }

    /// It can be forgotten: nobody uses it, and remembering it changes nothing.
    fn is_idle(&self) -> bool {
        let idle = |bucket: &Option<Arc<Bucket>>| {
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

    /// What was charged at another quota does not count at this one.
    fn set_quota(&mut self, quota: Option<CpuQuota>) {
        if self.quota != quota {
            self.quota = quota;
            self.busy = None;
        }
    }

    /// A program begins. False: there is no quota to hold it to.
    fn enter(&mut self) -> bool {
        if self.quota.is_none() {
            return false;
        }
        if self.busy.is_none() || self.running == 0 && self.is_paid() {
            self.busy = Some(Busy { since: Instant::now(), cpu_us: 0 });
        }
        self.running += 1;
        true
    }

    fn set_rate(&mut self, way: Way, rate: u64) {
        match self.bucket(way) {
            Some(bucket) => bucket.set_rate(rate),
            none => *none = Some(Arc::new(Bucket::new(rate))),
        }
    }

    /// Takes over what these controllers of the cell were given; on v1 each is set apart from the others.
    fn set(&mut self, controllers: &[Controller], limits: &Limits) {
        if controllers.contains(&Controller::Blkio) {
            for way in [Way::Out, Way::In] {
                match rate(limits, way) {
                    Some(rate) => self.set_rate(way, rate),
                    None => *self.bucket(way) = None,
                }
            }
        }
        if controllers.contains(&Controller::Cpu) {
            self.set_quota(limits.cpu);
        }
    }
}

/// The lowest rate these limits give, over all disks: the edge cannot tell from which one a body comes, or whether from
/// any.
pub fn rate(limits: &Limits, way: Way) -> Option<u64> {
    let of = |limit: &IoLimit| match way {
        Way::Out => limit.read_bps,
        Way::In => limit.write_bps,
    };
    limits.io.iter().filter_map(of).min()
}

impl Ledger {
    /// The bucket of a shared cell, at the rate its limits give now.
    pub fn bucket(&self, cell: Shared, limits: &Limits, way: Way) -> Option<Arc<Bucket>> {
        let rate = rate(limits, way)?;
        self.with(cell, |cell| {
            cell.set_rate(way, rate);
            cell.bucket(way).clone()
        })?
    }

    /// Another number than before means that a cell has got a bucket or lost one.
    pub fn buckets(&self) -> u64 {
        self.buckets.load(Ordering::Acquire)
    }

    /// The bucket of a named cell that this request is attached to: with the limits that it sets, or as others have set them.
    pub fn named_bucket(&self, named: &NamedCell, tenant: &TenantName, way: Way) -> Option<Arc<Bucket>> {
        if !named.controllers.contains(&Controller::Blkio) {
            return None;
        }
        let cell = Shared::named(named, tenant);
        match &named.limits {
            Some(limits) => self.bucket(cell, limits, way),
            None => self.cells.lock().get_mut(&cell)?.bucket(way).clone(),
        }
    }

    /// What a rule did to named cells of the node without attaching to them.
    pub fn note(&self, changes: &[CellChange]) {
        for change in changes {
            let (name, controllers, limits) = match change {
                CellChange::Set { name, controllers, limits } => (name, controllers, limits),
                CellChange::Drop { name, controllers } => (name, controllers, &Limits::default()),
            };
            self.with(Shared::Named(None, name.clone()), |cell| cell.set(controllers, limits));
        }
    }

    /// What of a named cell's limits is known here: its quota and its rates.
    pub fn limits(&self, named: &NamedCell, tenant: &TenantName) -> Limits {
        let cells = self.cells.lock();
        let Some(cell) = cells.get(&Shared::named(named, tenant)) else { return Limits::default() };
        let rate = |bucket: &Option<Arc<Bucket>>| bucket.as_ref().map(|bucket| bucket.rate());
        let (read_bps, write_bps) = (rate(&cell.out), rate(&cell.r#in));
        let io = IoLimit { read_bps, write_bps, ..IoLimit::of(Device::Root) };
        let io = if read_bps.or(write_bps).is_some() { vec![io] } else { Vec::new() };
        Limits { cpu: cell.quota, io, ..Limits::default() }
    }

    /// A program begins to run in these named cells.
    pub fn enter(self: &Arc<Self>, named: &[NamedCell], tenant: &TenantName) -> Vec<Entered> {
        let with_cpu = named.iter().filter(|named| named.controllers.contains(&Controller::Cpu));
        with_cpu
            .filter_map(|named| {
                let cell = Shared::named(named, tenant);
                let quota = named.limits.as_ref().map(|limits| limits.cpu);
                let is_held = self.with(cell.clone(), |cell| {
                    if let Some(quota) = quota {
                        cell.set_quota(quota);
                    }
                    cell.enter()
                })?;
                is_held.then(|| Entered { ledger: Arc::clone(self), cell })
            })
            .collect()
    }

    /// None if there is no room for one more.
    fn with<T>(&self, cell: Shared, act: impl FnOnce(&mut Cell) -> T) -> Option<T> {
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
pub struct Entered {
    ledger: Arc<Ledger>,
    cell: Shared,
}

impl Entered {
    /// Charges what the program used, and says when the cell's quota has paid for it and for all that the cell was charged
    /// since it became busy. What still runs is charged when it ends; until then the kernel alone holds it.
    pub fn charge(&self, cpu_us: u64) -> Option<Instant> {
        let mut cells = self.ledger.cells.lock();
        let cell = cells.get_mut(&self.cell)?;
        let quota = cell.quota?;
        let busy = cell.busy.get_or_insert(Busy { since: Instant::now(), cpu_us: 0 });
        busy.cpu_us = busy.cpu_us.saturating_add(cpu_us);
        Some(busy.paid_at(quota))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(cell) = self.ledger.cells.lock().get_mut(&self.cell) {
            cell.running = cell.running.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests;
