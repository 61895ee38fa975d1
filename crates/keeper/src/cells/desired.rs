//! What each level is to be limited to: by the records of tenants and sites, and by rules for named cells.
//!
//! Not here: directories (`dir`), which of them a request gets (`place`).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use nagaya_cmdb::cell::{
    Boost, CPU_SHARES_DEFAULT, CPU_SHARES_MAX, CPU_SHARES_MIN, CellChange, CellName, Confinement, CpuQuota,
    Limits, Scope,
};
use nagaya_cmdb::{Site, SiteName, Table, Tenant, TenantName};

use super::controllers::{Controllers, only};
use super::device::Number;
use super::place::{Attached, What};
use super::{CellError, Home, codes};

/// Most named cells. Each can have some directories in each hierarchy while requests run in it.
pub const NAMED_MAX: usize = 10_000;

/// Who gives way has this part of its shares of the processor. The edge says who, and no number: whatever it asks for, no tenant has
/// less than this against another, and all of what nobody else wants.
const GIVING_WAY_PART: u32 = 16;

/// What goes first has so many times its shares, and its tenant with it: what else the tenant runs keeps its share against others.
const PRECEDENCE: u32 = 8;

#[derive(Debug, Default)]
pub struct Desired {
    tenants: HashMap<TenantName, Holder>,
    sites: HashMap<SiteName, Holder>,
    named: HashMap<NamedKey, NamedCell>,
    /// Disks that files of any site are on.
    roots: Vec<Number>,
    /// Processes of a tenant whose record gives no number.
    processes_per_tenant: u32,
    /// Sites that go first on the processor, whose they are, and until when.
    preceding: HashMap<SiteName, (TenantName, Instant)>,
}

/// None: of the node.
type NamedKey = (Option<TenantName>, CellName);

#[derive(Debug, Default)]
struct Holder {
    /// As its record says.
    limits: Limits,
    /// In the place of the record's, until that is another one.
    cpu: Option<CpuQuota>,
    /// While requests run for which a rule wants more.
    boost: Boost,
    /// Disks its files are on, as far as requests have told.
    roots: Vec<Number>,
    /// It gives way to others on the processor until then.
    gives_way_until: Option<Instant>,
}

#[derive(Debug, Default)]
struct NamedCell {
    controllers: Controllers,
    limits: Limits,
}

/// What changed, so that directories follow.
pub type Changed = Vec<What>;

/// The cell of this site has no CPU limit, or is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoLimit;

impl Desired {
    pub fn new(processes_per_tenant: u32) -> Self {
        Self { processes_per_tenant, ..Self::default() }
    }

    /// What this level is limited to, before devices have numbers, and the disks that `:root` means for it.
    pub fn of(&self, what: &What) -> (Limits, &[Number]) {
        let none: (Limits, &[Number]) = (Limits::default(), &[]);
        match what {
            What::Tenant(name) => self.tenants.get(name).map_or(none, |holder| {
                let processes = holder.limits.processes.or(Some(self.processes_per_tenant));
                let precedes = self.preceding.values().any(|(tenant, _)| tenant == name);
                let cpu_shares = first(holder.cpu_shares(), precedes);
                (Limits { processes, cpu_shares, ..holder.limits.clone() }, &holder.roots)
            }),
            What::Site(name) => self.sites.get(name).map_or(none, |holder| {
                let (cpu, cpu_shares) = holder.boosted();
                let cpu_shares = first(cpu_shares, self.preceding.contains_key(name));
                (Limits { cpu, cpu_shares, ..holder.limits.clone() }, &holder.roots)
            }),
            What::Named { name, tenant } => {
                let cell = self.named.get(&(tenant.clone(), name.clone()));
                cell.map_or(none, |cell| (cell.limits.clone(), &self.roots))
            }
        }
    }

    /// The disks that `:root` means for a request of this home.
    pub fn roots(&self, home: &Home) -> Vec<Number> {
        match (home.device, &home.site) {
            (Some(device), _) => vec![device],
            (None, Some(site)) => {
                self.sites.get(&site.name).map(|site| site.roots.clone()).unwrap_or_default()
            }
            (None, None) => Vec::new(),
        }
    }

    // === Records ===

    /// Gets to know who this home is of. Directories of one that was forgotten may still be there.
    pub fn meet(&mut self, home: &Home) -> Changed {
        let mut changed = Changed::new();
        let Home { tenant, site, device } = home;
        let is_new = !self.tenants.contains_key(&tenant.name);
        let holder = self.tenants.entry(tenant.name.clone()).or_insert_with(|| Holder::of_tenant(tenant));
        if holder.learn(*device) || is_new {
            changed.push(What::Tenant(tenant.name.clone()));
        }
        if let Some(site) = site {
            let is_new = !self.sites.contains_key(&site.name);
            let holder = self.sites.entry(site.name.clone()).or_insert_with(|| Holder::of_site(site));
            if holder.learn(*device) || is_new {
                changed.push(What::Site(site.name.clone()));
            }
        }
        if let Some(device) = device.filter(|device| !self.roots.contains(device)) {
            self.roots.push(device);
            changed.extend(self.named.keys().map(what));
        }
        changed
    }

    /// Takes changed records over. Whose record is gone is forgotten, and its directories keep their limits: what still
    /// runs there is about to be ended.
    pub fn apply_records(&mut self, table: &Table, processes_per_tenant: u32) -> Changed {
        let mut changed = Changed::new();
        let all_tenants = self.processes_per_tenant != processes_per_tenant;
        self.processes_per_tenant = processes_per_tenant;
        self.tenants.retain(|name, holder| {
            let Some(tenant) = table.tenant(name.as_str()) else { return false };
            if holder.update(tenant.limits.limits()) || all_tenants {
                changed.push(What::Tenant(name.clone()));
            }
            true
        });
        self.sites.retain(|name, holder| {
            let Some(site) = table.site(name.as_str()) else { return false };
            if holder.update(site.limits.limits()) {
                changed.push(What::Site(name.clone()));
            }
            true
        });
        changed
    }

    /// Puts this CPU limit in the place of the one of a site's record, until that is changed. None: the record's again. An error
    /// where there is none to change.
    pub fn limit_cpu(&mut self, site: &SiteName, cpu: Option<CpuQuota>) -> Result<Changed, NoLimit> {
        let holder = self.sites.get_mut(site).filter(|holder| holder.limits.cpu.is_some()).ok_or(NoLimit)?;
        let cpu = cpu.filter(|cpu| Some(*cpu) != holder.limits.cpu);
        let is_changed = std::mem::replace(&mut holder.cpu, cpu) != cpu;
        Ok(if is_changed { vec![What::Site(site.clone())] } else { Changed::new() })
    }

    /// A site's CPU limit apart from boosts, and whether it is another than its record's.
    pub fn cpu_limit(&self, site: &SiteName) -> (Option<CpuQuota>, bool) {
        let limit = |holder: &Holder| (holder.cpu.or(holder.limits.cpu), holder.cpu.is_some());
        self.sites.get(site).map_or((None, false), limit)
    }

    /// The sites whose CPU limit is another than their record's.
    pub fn changed_cpu_limits(&self) -> impl Iterator<Item = &SiteName> {
        self.sites.iter().filter(|(_, holder)| holder.cpu.is_some()).map(|(name, _)| name)
    }

    /// From now on a site has at least so much, where it has a limit.
    pub fn boost(&mut self, site: &SiteName, boost: Boost) -> Changed {
        let Some(holder) = self.sites.get_mut(site) else { return Changed::new() };
        let before = std::mem::replace(&mut holder.boost, boost);
        if before == boost { Changed::new() } else { vec![What::Site(site.clone())] }
    }

    // === Giving way ===

    /// Until then this tenant gives way; `None`: no more. One that is not known here has nothing that could.
    pub fn give_way(&mut self, tenant: &TenantName, until: Option<Instant>) -> Changed {
        let Some(holder) = self.tenants.get_mut(tenant) else { return Changed::new() };
        let before = std::mem::replace(&mut holder.gives_way_until, until);
        if before.is_some() == until.is_some() { Changed::new() } else { vec![What::Tenant(tenant.clone())] }
    }

    /// Ends it where its time has passed. With the time at which the next one's does.
    pub fn end_giving_way(&mut self, now: Instant) -> (Changed, Option<Instant>) {
        let mut changed = Changed::new();
        let mut next: Option<Instant> = None;
        for (name, holder) in &mut self.tenants {
            match holder.gives_way_until {
                Some(until) if until <= now => {
                    holder.gives_way_until = None;
                    changed.push(What::Tenant(name.clone()));
                }
                Some(until) => next = Some(next.map_or(until, |next| next.min(until))),
                None => {}
            }
        }
        (changed, next)
    }

    // === Going first ===

    /// Until then this site goes first.
    pub fn precede(&mut self, site: &SiteName, tenant: &TenantName, until: Instant) -> Changed {
        self.preceding.insert(site.clone(), (tenant.clone(), until));
        vec![What::Tenant(tenant.clone()), What::Site(site.clone())]
    }

    /// It does so no more.
    pub fn end_preceding(&mut self, site: &SiteName) -> Changed {
        match self.preceding.remove(site) {
            // From the bottom up: it never weighs more in its tenant than both together do.
            Some((tenant, _)) => vec![What::Site(site.clone()), What::Tenant(tenant)],
            None => Changed::new(),
        }
    }

    /// Ends it where its time has passed. With the time at which the next one's does.
    pub fn end_overdue_precedence(&mut self, now: Instant) -> (Changed, Option<Instant>) {
        let is_over =
            |(site, (_, until)): (&SiteName, &(TenantName, Instant))| (*until <= now).then(|| site.clone());
        let over: Vec<SiteName> = self.preceding.iter().filter_map(is_over).collect();
        let changed = over.iter().flat_map(|site| self.end_preceding(site)).collect();
        (changed, self.preceding.values().map(|(_, until)| *until).min())
    }

    /// How many do.
    pub fn giving_way(&self) -> usize {
        self.tenants.values().filter(|holder| holder.gives_way_until.is_some()).count()
    }

    /// Forgets tenants and sites that have no place any more.
    pub fn keep_only(&mut self, tenants: &HashSet<&TenantName>, sites: &HashSet<&SiteName>) {
        self.tenants.retain(|name, _| tenants.contains(name));
        self.sites.retain(|name, _| sites.contains(name));
    }

    // === Named cells ===

    /// Sets what the request says of named cells, and returns those it runs in: one that is not there is left out.
    pub fn attach(
        &mut self,
        tenant: &TenantName,
        confinement: &Confinement,
    ) -> Result<(Vec<Attached>, Changed), CellError> {
        let mut changed = Changed::new();
        let mut attached = Vec::with_capacity(confinement.named.len());
        for cell in &confinement.named {
            let of = (cell.scope == Scope::Tenant).then(|| tenant.clone());
            let key = (of, cell.name.clone());
            let mut controllers = Controllers::of(&cell.controllers);
            match &cell.limits {
                Some(limits) if self.set(&key, controllers, limits)? => changed.push(what(&key)),
                Some(_) => {}
                None => {
                    let there = self.named.get(&key).map_or(Controllers::NONE, |cell| cell.controllers);
                    controllers = controllers.and(there);
                }
            }
            if !controllers.is_empty() {
                attached.push(Attached { name: cell.name.clone(), scope: cell.scope, controllers });
            }
        }
        Ok((attached, changed))
    }

    pub fn change(&mut self, change: &CellChange) -> Result<Changed, CellError> {
        match change {
            CellChange::Set { name, controllers, limits } => {
                let key = (None, name.clone());
                let changed = self.set(&key, Controllers::of(controllers), limits)?;
                Ok(if changed { vec![what(&key)] } else { Changed::new() })
            }
            CellChange::Drop { name, controllers } => {
                let key = (None, name.clone());
                let Some(cell) = self.named.get_mut(&key) else { return Ok(Changed::new()) };
                cell.controllers = cell.controllers.minus(Controllers::of(controllers));
                cell.limits = only(&cell.limits, cell.controllers);
                if cell.controllers.is_empty() {
                    self.named.remove(&key);
                }
                Ok(vec![what(&key)])
            }
        }
    }

    /// With all controllers the limits are the whole of what the cell has. With some, as rules of mod_mruby have them,
    /// each value is set by itself and the others stay. True: something is different now.
    fn set(&mut self, key: &NamedKey, controllers: Controllers, limits: &Limits) -> Result<bool, CellError> {
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
        let limits = match controllers == Controllers::ALL {
            true => limits.clone(),
            false => cell.limits.overlaid(&only(limits, controllers)),
        };
        let controllers = cell.controllers.or(controllers);
        let is_changed = is_new || cell.limits != limits || cell.controllers != controllers;
        (cell.limits, cell.controllers) = (limits, controllers);
        Ok(is_changed)
    }

    /// Whether there still are all the cells a place is in.
    pub fn has(&self, tenant: &TenantName, attached: &[Attached]) -> bool {
        attached.iter().all(|one| {
            let of = (one.scope == Scope::Tenant).then(|| tenant.clone());
            let cell = self.named.get(&(of, one.name.clone()));
            cell.is_some_and(|cell| one.controllers.minus(cell.controllers).is_empty())
        })
    }

    /// Drops the named cells of tenants that are gone.
    pub fn drop_of_absent(&mut self, table: &Table) {
        self.named.retain(|(tenant, _), _| {
            tenant.as_ref().is_none_or(|name| table.tenant(name.as_str()).is_some())
        });
    }

    /// All named cells: of which tenant, the name, the limits.
    pub fn named(&self) -> impl Iterator<Item = (What, Option<&TenantName>, &CellName, &Limits)> {
        self.named.iter().map(|(key, cell)| (what(key), key.0.as_ref(), &key.1, &cell.limits))
    }
}

impl Holder {
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

    /// Quota and shares of a site: the greater of its own and its boost's.
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

    /// True: this disk is a new one.
    fn learn(&mut self, device: Option<Number>) -> bool {
        let new = device.filter(|device| !self.roots.contains(device));
        self.roots.extend(new);
        new.is_some()
    }

    /// True: the limits are others now.
    fn update(&mut self, limits: Limits) -> bool {
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

fn what((tenant, name): &NamedKey) -> What {
    What::Named { name: name.clone(), tenant: tenant.clone() }
}

#[cfg(test)]
mod tests;
