//! The limits each level should have: from the records of tenants and sites, and from rules for
//! named cells.
//!
//! Not here: directories (`dir`), which of them a request gets (`cell_path`).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use nagaya_records::cell::{
    Boost, CPU_SHARES_DEFAULT, CPU_SHARES_MAX, CPU_SHARES_MIN, CellChange, CellName, CellScope, Confinement,
    CpuQuota, LimitSet,
};
use nagaya_records::{RecordIndex, Site, SiteName, Tenant, TenantName};

use crate::cells::cell_path::{AttachedCell, LevelKind};

use super::codes;
use super::controllers::{ControllerSet, only};
use super::device::DeviceNumber;
use super::error::CellError;
use super::home::CellParent;

/// Maximum number of named cells. Each can have some directories in each hierarchy while requests
/// run in it.
pub const NAMED_MAX: usize = 10_000;

/// Divisor of the CPU shares of a tenant with lowered priority. The edge names tenants, and no
/// number. So no tenant gets less than this against another, and it gets all CPU time that nobody
/// else wants.
const GIVING_WAY_PART: u32 = 16;

/// Factor on the CPU shares of a site with raised priority, and on its tenant's. The tenant's other
/// work keeps its share against others.
const PRECEDENCE: u32 = 8;

#[derive(Debug, Default)]
pub struct DesiredLimits {
    tenants: HashMap<TenantName, CellOwner>,
    sites: HashMap<SiteName, CellOwner>,
    named: HashMap<NamedKey, NamedCellLimits>,
    /// Disks with files of any site.
    roots: Vec<DeviceNumber>,
    /// Processes of a tenant whose record gives no number.
    processes_per_tenant: u32,
    /// Sites with raised CPU priority, their tenants, and until when.
    preceding: HashMap<SiteName, (TenantName, Instant)>,
}

/// `None` for a cell of the node.
type NamedKey = (Option<TenantName>, CellName);

#[derive(Debug, Default)]
struct CellOwner {
    /// As its record says.
    limits: LimitSet,
    /// Replaces the record's, until that changes.
    cpu: Option<CpuQuota>,
    /// Boost of running requests for which a rule wants more.
    boost: Boost,
    /// Disks with its files, as far as requests have reported them.
    roots: Vec<DeviceNumber>,
    /// Time until which its CPU priority is lowered.
    gives_way_until: Option<Instant>,
}

#[derive(Debug, Default)]
struct NamedCellLimits {
    controllers: ControllerSet,
    limits: LimitSet,
}

/// Changed levels, whose directories must follow.
pub type ChangedLevels = Vec<LevelKind>;

/// Error: the cell of this site has no CPU limit, or is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoLimit;

impl DesiredLimits {
    pub fn new(processes_per_tenant: u32) -> Self {
        Self { processes_per_tenant, ..Self::default() }
    }

    /// Returns the limits of this level, before devices have numbers, and the disks that `:root`
    /// means for it.
    pub fn of(&self, what: &LevelKind) -> (LimitSet, &[DeviceNumber]) {
        let none: (LimitSet, &[DeviceNumber]) = (LimitSet::default(), &[]);
        match what {
            LevelKind::Tenant(name) => self.tenants.get(name).map_or(none, |holder| {
                let processes = holder.limits.processes.or(Some(self.processes_per_tenant));
                let precedes = self.preceding.values().any(|(tenant, _)| tenant == name);
                let cpu_shares = first(holder.cpu_shares(), precedes);
                (LimitSet { processes, cpu_shares, ..holder.limits.clone() }, &holder.roots)
            }),
            LevelKind::Site(name) => self.sites.get(name).map_or(none, |holder| {
                let (cpu, cpu_shares) = holder.boosted();
                let cpu_shares = first(cpu_shares, self.preceding.contains_key(name));
                (LimitSet { cpu, cpu_shares, ..holder.limits.clone() }, &holder.roots)
            }),
            LevelKind::Named { name, tenant } => {
                let cell = self.named.get(&(tenant.clone(), name.clone()));
                cell.map_or(none, |cell| (cell.limits.clone(), &self.roots))
            }
        }
    }

    /// Returns the disks that `:root` means for a request of this tenant and site.
    pub fn roots(&self, home: &CellParent) -> Vec<DeviceNumber> {
        match (home.device, &home.site) {
            (Some(device), _) => vec![device],
            (None, Some(site)) => {
                self.sites.get(&site.name).map(|site| site.roots.clone()).unwrap_or_default()
            }
            (None, None) => Vec::new(),
        }
    }

    // === Records ===

    /// Adds the tenant and site of this home. Directories of a forgotten one may still be there.
    pub fn meet(&mut self, home: &CellParent) -> ChangedLevels {
        let mut changed = ChangedLevels::new();
        let CellParent { tenant, site, device } = home;
        let is_new = !self.tenants.contains_key(&tenant.name);
        let holder = self.tenants.entry(tenant.name.clone()).or_insert_with(|| CellOwner::of_tenant(tenant));
        if holder.learn(*device) || is_new {
            changed.push(LevelKind::Tenant(tenant.name.clone()));
        }
        if let Some(site) = site {
            let is_new = !self.sites.contains_key(&site.name);
            let holder = self.sites.entry(site.name.clone()).or_insert_with(|| CellOwner::of_site(site));
            if holder.learn(*device) || is_new {
                changed.push(LevelKind::Site(site.name.clone()));
            }
        }
        if let Some(device) = device.filter(|device| !self.roots.contains(device)) {
            self.roots.push(device);
            changed.extend(self.named.keys().map(what));
        }
        changed
    }

    /// Applies changed records. Owners without a record are forgotten, and their directories keep
    /// their limits: the processes there are about to be ended.
    pub fn apply_records(&mut self, table: &RecordIndex, processes_per_tenant: u32) -> ChangedLevels {
        let mut changed = ChangedLevels::new();
        let all_tenants = self.processes_per_tenant != processes_per_tenant;
        self.processes_per_tenant = processes_per_tenant;
        self.tenants.retain(|name, holder| {
            let Some(tenant) = table.tenant(name.as_str()) else { return false };
            if holder.update(tenant.limits.limits()) || all_tenants {
                changed.push(LevelKind::Tenant(name.clone()));
            }
            true
        });
        self.sites.retain(|name, holder| {
            let Some(site) = table.site(name.as_str()) else { return false };
            if holder.update(site.limits.limits()) {
                changed.push(LevelKind::Site(name.clone()));
            }
            true
        });
        changed
    }

    /// Replaces the CPU limit of a site's record, until that changes. `None` restores the record's.
    /// Fails if there is no limit to change.
    pub fn limit_cpu(&mut self, site: &SiteName, cpu: Option<CpuQuota>) -> Result<ChangedLevels, NoLimit> {
        let holder = self.sites.get_mut(site).filter(|holder| holder.limits.cpu.is_some()).ok_or(NoLimit)?;
        let cpu = cpu.filter(|cpu| Some(*cpu) != holder.limits.cpu);
        let is_changed = std::mem::replace(&mut holder.cpu, cpu) != cpu;
        Ok(if is_changed { vec![LevelKind::Site(site.clone())] } else { ChangedLevels::new() })
    }

    /// Returns a site's CPU limit apart from boosts, and whether it differs from its record's.
    pub fn cpu_limit(&self, site: &SiteName) -> (Option<CpuQuota>, bool) {
        let limit = |holder: &CellOwner| (holder.cpu.or(holder.limits.cpu), holder.cpu.is_some());
        self.sites.get(site).map_or((None, false), limit)
    }

    /// Returns the sites whose CPU limit differs from their record's.
    pub fn changed_cpu_limits(&self) -> impl Iterator<Item = &SiteName> {
        self.sites.iter().filter(|(_, holder)| holder.cpu.is_some()).map(|(name, _)| name)
    }

    /// Sets a site's boost: the least that it gets, where it has a limit.
    pub fn boost(&mut self, site: &SiteName, boost: Boost) -> ChangedLevels {
        let Some(holder) = self.sites.get_mut(site) else { return ChangedLevels::new() };
        let before = std::mem::replace(&mut holder.boost, boost);
        if before == boost { ChangedLevels::new() } else { vec![LevelKind::Site(site.clone())] }
    }

    // === Lowered CPU priority ===

    /// Lowers this tenant's CPU priority until then; `None` restores it. An unknown tenant has no
    /// processes.
    pub fn deprioritize(&mut self, tenant: &TenantName, until: Option<Instant>) -> ChangedLevels {
        let Some(holder) = self.tenants.get_mut(tenant) else { return ChangedLevels::new() };
        let before = std::mem::replace(&mut holder.gives_way_until, until);
        if before.is_some() == until.is_some() {
            ChangedLevels::new()
        } else {
            vec![LevelKind::Tenant(tenant.clone())]
        }
    }

    /// Restores priorities whose time is over. Also returns when the next one ends.
    pub fn end_giving_way(&mut self, now: Instant) -> (ChangedLevels, Option<Instant>) {
        let mut changed = ChangedLevels::new();
        let mut next: Option<Instant> = None;
        for (name, holder) in &mut self.tenants {
            match holder.gives_way_until {
                Some(until) if until <= now => {
                    holder.gives_way_until = None;
                    changed.push(LevelKind::Tenant(name.clone()));
                }
                Some(until) => next = Some(next.map_or(until, |next| next.min(until))),
                None => {}
            }
        }
        (changed, next)
    }

    // === Raised CPU priority ===

    /// Raises this site's CPU priority until then.
    pub fn prioritize_site(&mut self, site: &SiteName, tenant: &TenantName, until: Instant) -> ChangedLevels {
        self.preceding.insert(site.clone(), (tenant.clone(), until));
        vec![LevelKind::Tenant(tenant.clone()), LevelKind::Site(site.clone())]
    }

    /// Ends the raised CPU priority of this site.
    pub fn end_site_priority(&mut self, site: &SiteName) -> ChangedLevels {
        match self.preceding.remove(site) {
            // From the bottom up: the site never weighs more in its tenant than both together do.
            Some((tenant, _)) => vec![LevelKind::Site(site.clone()), LevelKind::Tenant(tenant)],
            None => ChangedLevels::new(),
        }
    }

    /// Ends raised priorities whose time is over. Also returns when the next one ends.
    pub fn end_overdue_precedence(&mut self, now: Instant) -> (ChangedLevels, Option<Instant>) {
        let is_over =
            |(site, (_, until)): (&SiteName, &(TenantName, Instant))| (*until <= now).then(|| site.clone());
        let over: Vec<SiteName> = self.preceding.iter().filter_map(is_over).collect();
        let changed = over.iter().flat_map(|site| self.end_site_priority(site)).collect();
        (changed, self.preceding.values().map(|(_, until)| *until).min())
    }

    /// Returns the number of tenants with lowered CPU priority.
    pub fn giving_way(&self) -> usize {
        self.tenants.values().filter(|holder| holder.gives_way_until.is_some()).count()
    }

    /// Forgets tenants and sites without directories.
    pub fn keep_only(&mut self, tenants: &HashSet<&TenantName>, sites: &HashSet<&SiteName>) {
        self.tenants.retain(|name, _| tenants.contains(name));
        self.sites.retain(|name, _| sites.contains(name));
    }

    // === Named cells ===

    /// Applies the request's changes to named cells, and returns those it runs in. A missing one is
    /// left out.
    pub fn attach(
        &mut self,
        tenant: &TenantName,
        confinement: &Confinement,
    ) -> Result<(Vec<AttachedCell>, ChangedLevels), CellError> {
        let mut changed = ChangedLevels::new();
        let mut attached = Vec::with_capacity(confinement.named.len());
        for cell in &confinement.named {
            let of = (cell.scope == CellScope::Tenant).then(|| tenant.clone());
            let key = (of, cell.name.clone());
            let mut controllers = ControllerSet::of(&cell.controllers);
            match &cell.limits {
                Some(limits) if self.set(&key, controllers, limits)? => changed.push(what(&key)),
                Some(_) => {}
                None => {
                    let there = self.named.get(&key).map_or(ControllerSet::NONE, |cell| cell.controllers);
                    controllers = controllers.and(there);
                }
            }
            if !controllers.is_empty() {
                attached.push(AttachedCell { name: cell.name.clone(), scope: cell.scope, controllers });
            }
        }
        Ok((attached, changed))
    }

    pub fn change(&mut self, change: &CellChange) -> Result<ChangedLevels, CellError> {
        match change {
            CellChange::Set { name, controllers, limits } => {
                let key = (None, name.clone());
                let changed = self.set(&key, ControllerSet::of(controllers), limits)?;
                Ok(if changed { vec![what(&key)] } else { ChangedLevels::new() })
            }
            CellChange::Drop { name, controllers } => {
                let key = (None, name.clone());
                let Some(cell) = self.named.get_mut(&key) else { return Ok(ChangedLevels::new()) };
                cell.controllers = cell.controllers.minus(ControllerSet::of(controllers));
                cell.limits = only(&cell.limits, cell.controllers);
                if cell.controllers.is_empty() {
                    self.named.remove(&key);
                }
                Ok(vec![what(&key)])
            }
        }
    }

    /// Sets the limits of a named cell. With all controllers they replace all of the cell's limits.
    /// With some, as rules of mod_mruby have them, each value is set by itself and the others stay.
    /// Returns true if something changed.
    fn set(
        &mut self,
        key: &NamedKey,
        controllers: ControllerSet,
        limits: &LimitSet,
    ) -> Result<bool, CellError> {
        if !self.named.contains_key(key) && self.named.len() >= NAMED_MAX {
            return Err(CellError {
                code: codes::NAMED_MAX,
                message: format!(
                    "there are {NAMED_MAX} named cells already, '{}' would be one more: use fewer names, or drop cells \
                     that are no longer used",
                    key.1
                ),
            });
        }
        let is_new = !self.named.contains_key(key);
        let cell = self.named.entry(key.clone()).or_default();
        let limits = match controllers == ControllerSet::ALL {
            true => limits.clone(),
            false => cell.limits.overlaid(&only(limits, controllers)),
        };
        let controllers = cell.controllers.or(controllers);
        let is_changed = is_new || cell.limits != limits || cell.controllers != controllers;
        (cell.limits, cell.controllers) = (limits, controllers);
        Ok(is_changed)
    }

    /// Whether all named cells of a cell path still exist.
    pub fn has(&self, tenant: &TenantName, attached: &[AttachedCell]) -> bool {
        attached.iter().all(|one| {
            let of = (one.scope == CellScope::Tenant).then(|| tenant.clone());
            let cell = self.named.get(&(of, one.name.clone()));
            cell.is_some_and(|cell| one.controllers.minus(cell.controllers).is_empty())
        })
    }

    /// Drops the named cells of tenants that are gone.
    pub fn drop_of_absent(&mut self, table: &RecordIndex) {
        self.named.retain(|(tenant, _), _| {
            tenant.as_ref().is_none_or(|name| table.tenant(name.as_str()).is_some())
        });
    }

    /// Returns all named cells: their tenant, name and limits.
    pub fn named(&self) -> impl Iterator<Item = (LevelKind, Option<&TenantName>, &CellName, &LimitSet)> {
        self.named.iter().map(|(key, cell)| (what(key), key.0.as_ref(), &key.1, &cell.limits))
    }
}

impl CellOwner {
    fn of_tenant(tenant: &Arc<Tenant>) -> Self {
        Self { limits: tenant.limits.limits(), ..Self::default() }
    }

    fn of_site(site: &Arc<Site>) -> Self {
        Self { limits: site.limits.limits(), ..Self::default() }
    }

    fn cpu_shares(&self) -> Option<u32> {
        let own = self.limits.cpu_shares;
        match self.gives_way_until {
            Some(_) => Some((own.unwrap_or(CPU_SHARES_DEFAULT) / GIVING_WAY_PART).max(CPU_SHARES_MIN)),
            None => own,
        }
    }

    /// Returns quota and shares of a site: the greater of its own and its boost's.
    fn boosted(&self) -> (Option<CpuQuota>, Option<u32>) {
        let greater = |own: CpuQuota| {
            let boost = self.boost.cpu.filter(|boost| boost.thousandths() > own.thousandths());
            boost.unwrap_or(own)
        };
        let cpu = self.cpu.or(self.limits.cpu).map(greater);
        let own = self.limits.cpu_shares;
        let more = self.boost.cpu_shares.filter(|more| *more > own.unwrap_or(CPU_SHARES_DEFAULT));
        (cpu, more.or(own))
    }

    /// Adds a disk. Returns true if it is new.
    fn learn(&mut self, device: Option<DeviceNumber>) -> bool {
        let new = device.filter(|device| !self.roots.contains(device));
        self.roots.extend(new);
        new.is_some()
    }

    /// Sets the limits. Returns true if they changed.
    fn update(&mut self, limits: LimitSet) -> bool {
        let is_changed = self.limits != limits;
        if self.limits.cpu != limits.cpu {
            self.cpu = None;
        }
        self.limits = limits;
        is_changed
    }
}

fn first(shares: Option<u32>, precedes: bool) -> Option<u32> {
    match precedes {
        true => Some((shares.unwrap_or(CPU_SHARES_DEFAULT) * PRECEDENCE).min(CPU_SHARES_MAX)),
        false => shares,
    }
}

fn what((tenant, name): &NamedKey) -> LevelKind {
    LevelKind::Named { name: name.clone(), tenant: tenant.clone() }
}

#[cfg(test)]
mod tests;
