//! Splitting a transaction that is longer than etcd takes into parts, so that the state after each part is one that the rules
//! allow: every site has its tenant, no two sites have one place and no two tenants one uid. Pure.
//!
//! The order is: what gives up something that another record takes; tenants, with the homes they have before or after; sites;
//! tenants that lose their home or go; settings and rules. A site that gives its place to another goes in the first part and comes back
//! with its new place in a later one, so that it is gone for a moment. Tenants cannot go for a moment, because they have sites,
//! so those that exchange uids go together.
//!
//! A site that goes leaves its placement behind (`members` says why, and who takes it away).
//! Not here: whether the whole is allowed (`plan`), sending it (`write`).

use std::collections::{BTreeMap, HashMap, HashSet};

use super::error::ClusterError;
use super::keys::{self, Keys};
use super::wire::{Operation, Request};
use crate::names::{SiteName, TenantName};
use crate::record::{Change, Site, Tenant};
use crate::store::Kind;
use crate::store::plan::{Plan, Step};

/// Operations of one part. etcd takes 128 (`--max-txn-ops`), and the part's own revision is one of them.
pub(super) const OPERATIONS_MAX: usize = 120;

/// Keys and values of one part, in bytes. etcd takes 1.5 MiB (`--max-request-bytes`), with what is around them.
const PART_LEN_MAX: usize = 1 << 20;

const _: () = assert!(2 * crate::store::RECORD_LEN_MAX < PART_LEN_MAX);

/// What is committed at once.
#[derive(Debug, Default)]
pub(super) struct Part {
    pub operations: Vec<Operation>,
    /// What the caller is told of it; without what lasts only until a later part.
    pub changes: Vec<Change>,
    len: usize,
}

pub(super) fn split(keys: &Keys, plan: Plan) -> Result<Vec<Part>, ClusterError> {
    if plan.is_empty() {
        return Ok(Vec::new());
    }
    let early = early_drops(&plan);
    let groups = uid_groups(&plan.tenants);
    let kept_homes: Vec<Tenant> = plan.tenants.values().filter_map(with_its_home).collect();
    let changes = plan.into_changes();
    let mut whole = Part::default();
    for change in &changes {
        whole.put(keys, change);
    }
    if whole.fits() {
        whole.changes = changes;
        return Ok(vec![whole]);
    }
    let mut packer = Packer { keys, parts: vec![Part::default()] };
    for group in staged(changes, early, &groups, kept_homes) {
        packer.add(group)?;
    }
    Ok(packer.parts)
}

/// One step, and whether the caller is to be told of it.
struct Move {
    change: Change,
    told: bool,
}

/// The moves in order; those of one group belong into one part.
fn staged(
    changes: Vec<Change>,
    early: Early,
    groups: &[Vec<TenantName>],
    kept_homes: Vec<Tenant>,
) -> Vec<Vec<Move>> {
    let mut kept_homes: HashMap<TenantName, Tenant> =
        kept_homes.into_iter().map(|tenant| (tenant.name.clone(), tenant)).collect();
    let mut tenants: HashMap<TenantName, Move> = HashMap::new();
    let alone = |change| vec![Move { change, told: true }];
    let (mut first, mut sites, mut late) = (Vec::new(), Vec::new(), Vec::new());
    let (mut drops, mut settings) = (Vec::new(), Vec::new());
    for change in changes {
        match change {
            Change::PutTenant(tenant) => {
                let name = tenant.name.clone();
                let now = match kept_homes.remove(&name) {
                    Some(kept) => {
                        late.push(alone(Change::PutTenant(tenant)));
                        Move { change: Change::PutTenant(Box::new(kept)), told: false }
                    }
                    None => Move { change: Change::PutTenant(tenant), told: true },
                };
                tenants.insert(name, now);
            }
            Change::DropTenant(name) if early.tenants.contains(&name) => {
                drops.push(alone(Change::DropTenant(name)));
            }
            Change::DropTenant(_) => late.push(alone(change)),
            Change::DropSite(_) => first.push(alone(change)),
            Change::PutSite(_) => sites.push(alone(change)),
            Change::DropSetting(_) | Change::DropRule(_) => settings.insert(0, alone(change)),
            _ => settings.push(alone(change)),
        }
    }
    first.extend(
        early.sites.into_iter().map(|name| vec![Move { change: Change::DropSite(name), told: false }]),
    );
    first.extend(drops);
    for group in groups {
        first.push(group.iter().filter_map(|name| tenants.remove(name)).collect());
    }
    first.extend(sites);
    first.extend(late);
    first.extend(settings);
    first
}

/// What must go before anything comes.
#[derive(Default)]
struct Early {
    /// They come back.
    sites: Vec<SiteName>,
    tenants: HashSet<TenantName>,
}

fn early_drops(plan: &Plan) -> Early {
    let mut places: HashMap<(&str, &str), &SiteName> = HashMap::new();
    for site in plan.sites.values().filter_map(|step| step.before.as_ref()) {
        places.extend(site.hosts.iter().map(|host| ((host.as_str(), site.path.as_str()), &site.name)));
    }
    let mut early = Early::default();
    let mut sites = HashSet::new();
    for site in plan.sites.values().filter_map(|step| step.after.as_ref()) {
        for host in &site.hosts {
            sites.extend(places.get(&(host.as_str(), &*site.path)).filter(|owner| **owner != &site.name));
        }
    }
    let uids: HashSet<u32> =
        plan.tenants.values().filter_map(|step| step.after.as_ref()).map(|tenant| tenant.uid).collect();
    for (name, step) in &plan.tenants {
        let gives_up = step.before.as_ref().is_some_and(|before| uids.contains(&before.uid));
        if step.after.is_none() && gives_up {
            early.tenants.insert(name.clone());
        }
    }
    let of_early = |site: &&Site| early.tenants.contains(&site.tenant);
    sites.extend(
        plan.sites.values().filter_map(|step| step.before.as_ref()).filter(of_early).map(|site| &site.name),
    );
    let comes_back = |name: &&&SiteName| plan.sites.get(**name).is_some_and(|step| step.after.is_some());
    early.sites = sites.iter().filter(comes_back).map(|name| (*name).clone()).collect();
    early.sites.sort_unstable();
    early
}

/// A tenant that loses its home keeps it until its sites no longer lie beneath it.
fn with_its_home(step: &Step<Tenant>) -> Option<Tenant> {
    let (before, after) = (step.before.as_ref()?, step.after.as_ref()?);
    let loses = before.home.is_some() && after.home.is_none();
    loses.then(|| Tenant { home: before.home.clone(), ..after.clone() })
}

/// The tenants that are put, in an order in which whoever gives up a uid comes before whoever takes it; those of a circle
/// together.
fn uid_groups(tenants: &BTreeMap<TenantName, Step<Tenant>>) -> Vec<Vec<TenantName>> {
    let stays = |step: &&Step<Tenant>| step.after.is_some();
    let owners: HashMap<u32, &TenantName> = tenants
        .values()
        .filter(stays)
        .filter_map(|step| step.before.as_ref())
        .map(|tenant| (tenant.uid, &tenant.name))
        .collect();
    let giver = |name: &TenantName| {
        let uid = tenants[name].after.as_ref()?.uid;
        owners.get(&uid).copied().filter(|owner| *owner != name)
    };
    let mut groups = Vec::new();
    let mut placed: HashSet<&TenantName> = HashSet::new();
    for (name, _) in tenants.iter().filter(|(_, step)| step.after.is_some()) {
        // Each takes from one other at most, so that the way to who must go first is a line, or ends in a circle.
        let mut way = vec![name];
        while let Some(next) = giver(way[way.len() - 1]).filter(|next| !placed.contains(next)) {
            if way.contains(&next) {
                break;
            }
            way.push(next);
        }
        let circle = giver(way[way.len() - 1]).and_then(|next| way.iter().position(|name| *name == next));
        if let Some(begin) = circle {
            let members = way.split_off(begin);
            placed.extend(&members);
            groups.push(members.into_iter().cloned().collect());
        }
        for name in way.into_iter().rev().filter(|name| !placed.contains(name)).collect::<Vec<_>>() {
            placed.insert(name);
            groups.push(vec![name.clone()]);
        }
    }
    groups
}

// === Packing ===

struct Packer<'a> {
    keys: &'a Keys,
    parts: Vec<Part>,
}

impl Packer<'_> {
    fn add(&mut self, group: Vec<Move>) -> Result<(), ClusterError> {
        let tenants = group.len();
        let mut own = Part::default();
        for Move { change, told } in group {
            own.put(self.keys, &change);
            own.changes.extend(told.then_some(change));
        }
        if !own.fits() {
            return Err(ClusterError::Entangled { tenants, max: OPERATIONS_MAX });
        }
        match self.parts.last_mut() {
            Some(last) if last.takes(&own) => last.append(own),
            _ => self.parts.push(own),
        }
        Ok(())
    }
}

impl Part {
    fn put(&mut self, keys: &Keys, change: &Change) {
        match change {
            Change::PutTenant(tenant) => {
                self.set(&keys.record(Kind::Tenant, tenant.name.as_str()), keys::json(tenant));
            }
            Change::PutSite(site) => self.set(&keys.record(Kind::Site, site.name.as_str()), keys::json(site)),
            Change::PutSetting(setting) => {
                self.set(&keys.record(Kind::Setting, &setting.key), keys::json(setting));
            }
            Change::PutRule(rule) => {
                self.set(&keys.record(Kind::Rule, rule.name.as_str()), keys::json(rule));
            }
            Change::DropTenant(name) => self.drop(&keys.record(Kind::Tenant, name.as_str())),
            Change::DropSite(name) => self.drop(&keys.record(Kind::Site, name.as_str())),
            Change::DropSetting(key) => self.drop(&keys.record(Kind::Setting, key)),
            Change::DropRule(name) => self.drop(&keys.record(Kind::Rule, name.as_str())),
            // `plan` refuses them in a transaction.
            Change::PutNode(_)
            | Change::DropNode(_)
            | Change::PutPlacement(_)
            | Change::DropPlacement(_)
            | Change::PutTicketKeys(_)
            | Change::DropTicketKeys => {}
        }
    }

    fn set(&mut self, key: &str, value: Vec<u8>) {
        self.len += key.len() + value.len();
        self.operations.push(keys::putting(key, value));
    }

    fn drop(&mut self, key: &str) {
        self.len += key.len();
        self.operations.push(keys::deleting(key));
    }

    fn fits(&self) -> bool {
        self.operations.len() <= OPERATIONS_MAX && self.len <= PART_LEN_MAX
    }

    /// etcd takes no key twice in one part.
    fn takes(&self, other: &Self) -> bool {
        self.operations.len() + other.operations.len() <= OPERATIONS_MAX
            && self.len + other.len <= PART_LEN_MAX
            && !other
                .operations
                .iter()
                .any(|new| self.operations.iter().any(|old| key_of(old) == key_of(new)))
    }

    fn append(&mut self, other: Self) {
        self.operations.extend(other.operations);
        self.changes.extend(other.changes);
        self.len += other.len;
    }
}

fn key_of(operation: &Operation) -> &[u8] {
    match &operation.request {
        Some(Request::Put(put)) => &put.key,
        Some(Request::Delete(delete)) => &delete.key,
        Some(Request::Range(_)) | None => &[],
    }
}
