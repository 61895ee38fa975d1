//! Splits a transaction that is too long for etcd into parts. Pure.
//!
//! The state after each part is valid: sites have their tenants and distinct places, and tenants
//! have distinct uids.
//!
//! The order is as follows. First come records that give up something for another record. Then come
//! tenants, with their earlier or later homes, and then sites. Then come tenants that lose their
//! home or go, and last settings and rules. A site that gives its place to another goes in the
//! first part. It returns with its new place in a later one, so it is gone for a moment. Tenants
//! cannot go for a moment, because they have sites. So those that exchange uids go together.
//!
//! A removed site leaves its placement behind (`members` says why, and which node deletes it). Not
//! here: whether the whole is allowed (`plan`), sending it (`write`).

use std::collections::{BTreeMap, HashMap, HashSet};

use super::error::ClusterError;
use super::keys::{self, KeySpace};
use super::wire::{RequestKind, RequestOp};
use crate::RecordKind;
use crate::plan::{ChangePlan, RecordStep};
use nagaya_records::names::{SiteName, TenantName};
use nagaya_records::record::{RecordChange, Site, Tenant};

/// Operations of one part. etcd takes 128 (`--max-txn-ops`), and the part's own revision is one of
/// them.
pub(super) const OPERATIONS_MAX: usize = 120;

/// Keys and values of one part, in bytes. etcd takes 1.5 MiB (`--max-request-bytes`), overhead
/// included.
const PART_LEN_MAX: usize = 1 << 20;

const _: () = assert!(2 * crate::RECORD_LEN_MAX < PART_LEN_MAX);

/// A set of operations that is committed at once.
#[derive(Debug, Default)]
pub(super) struct TransactionPart {
    pub operations: Vec<RequestOp>,
    /// The changes reported to the caller, without states that last only until a later part.
    pub changes: Vec<RecordChange>,
    len: usize,
}

pub(super) fn split(keys: &KeySpace, plan: ChangePlan) -> Result<Vec<TransactionPart>, ClusterError> {
    if plan.is_empty() {
        return Ok(Vec::new());
    }
    let early = early_drops(&plan);
    let groups = uid_groups(&plan.tenants);
    let kept_homes: Vec<Tenant> = plan.tenants.values().filter_map(with_its_home).collect();
    let changes = plan.into_changes();
    let mut whole = TransactionPart::default();
    for change in &changes {
        whole.put(keys, change);
    }
    if whole.fits() {
        whole.changes = changes;
        return Ok(vec![whole]);
    }
    let mut packer = PartPacker { keys, parts: vec![TransactionPart::default()] };
    for group in staged(changes, early, &groups, kept_homes) {
        packer.add(group)?;
    }
    Ok(packer.parts)
}

/// One step, and whether it is reported to the caller.
struct PlannedStep {
    change: RecordChange,
    told: bool,
}

/// Returns the moves in order; those of one group belong in one part.
fn staged(
    changes: Vec<RecordChange>,
    early: EarlySteps,
    groups: &[Vec<TenantName>],
    kept_homes: Vec<Tenant>,
) -> Vec<Vec<PlannedStep>> {
    let mut kept_homes: HashMap<TenantName, Tenant> =
        kept_homes.into_iter().map(|tenant| (tenant.name.clone(), tenant)).collect();
    let mut tenants: HashMap<TenantName, PlannedStep> = HashMap::new();
    let alone = |change| vec![PlannedStep { change, told: true }];
    let mut first = Vec::new();
    let mut sites = Vec::new();
    let mut late = Vec::new();
    let mut drops = Vec::new();
    let mut settings = Vec::new();
    for change in changes {
        match change {
            RecordChange::PutTenant(tenant) => {
                let name = tenant.name.clone();
                let now = match kept_homes.remove(&name) {
                    Some(kept) => {
                        late.push(alone(RecordChange::PutTenant(tenant)));
                        PlannedStep { change: RecordChange::PutTenant(Box::new(kept)), told: false }
                    }
                    None => PlannedStep { change: RecordChange::PutTenant(tenant), told: true },
                };
                tenants.insert(name, now);
            }
            RecordChange::DropTenant(name) if early.tenants.contains(&name) => {
                drops.push(alone(RecordChange::DropTenant(name)));
            }
            RecordChange::DropTenant(_) => late.push(alone(change)),
            RecordChange::DropSite(_) => first.push(alone(change)),
            RecordChange::PutSite(_) => sites.push(alone(change)),
            RecordChange::DropSetting(_) | RecordChange::DropRule(_) => settings.insert(0, alone(change)),
            _ => settings.push(alone(change)),
        }
    }
    first.extend(
        early
            .sites
            .into_iter()
            .map(|name| vec![PlannedStep { change: RecordChange::DropSite(name), told: false }]),
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

/// Records that must go before anything comes.
#[derive(Default)]
struct EarlySteps {
    /// They return later.
    sites: Vec<SiteName>,
    tenants: HashSet<TenantName>,
}

fn early_drops(plan: &ChangePlan) -> EarlySteps {
    let mut places: HashMap<(&str, &str), &SiteName> = HashMap::new();
    for site in plan.sites.values().filter_map(|step| step.before.as_ref()) {
        places.extend(site.hosts.iter().map(|host| ((host.as_str(), site.path.as_str()), &site.name)));
    }
    let mut early = EarlySteps::default();
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

/// A tenant that loses its home keeps it until its sites are no longer below it.
fn with_its_home(step: &RecordStep<Tenant>) -> Option<Tenant> {
    let before = step.before.as_ref()?;
    let after = step.after.as_ref()?;
    let loses = before.home.is_some() && after.home.is_none();
    loses.then(|| Tenant { home: before.home.clone(), ..after.clone() })
}

/// Returns the tenants that are put, so that a tenant that gives up a uid comes before its taker.
/// Those of a circle come together.
fn uid_groups(tenants: &BTreeMap<TenantName, RecordStep<Tenant>>) -> Vec<Vec<TenantName>> {
    let stays = |step: &&RecordStep<Tenant>| step.after.is_some();
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
        // Each takes from at most one other. So the path to the first is a line, or ends in a
        // circle.
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

struct PartPacker<'a> {
    keys: &'a KeySpace,
    parts: Vec<TransactionPart>,
}

impl PartPacker<'_> {
    fn add(&mut self, group: Vec<PlannedStep>) -> Result<(), ClusterError> {
        let tenants = group.len();
        let mut own = TransactionPart::default();
        for PlannedStep { change, told } in group {
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

impl TransactionPart {
    fn put(&mut self, keys: &KeySpace, change: &RecordChange) {
        match change {
            RecordChange::PutTenant(tenant) => {
                self.set(&keys.record(RecordKind::Tenant, tenant.name.as_str()), keys::json(tenant));
            }
            RecordChange::PutSite(site) => {
                self.set(&keys.record(RecordKind::Site, site.name.as_str()), keys::json(site))
            }
            RecordChange::PutSetting(setting) => {
                self.set(&keys.record(RecordKind::Setting, &setting.key), keys::json(setting));
            }
            RecordChange::PutRule(rule) => {
                self.set(&keys.record(RecordKind::Rule, rule.name.as_str()), keys::json(rule));
            }
            RecordChange::DropTenant(name) => self.drop(&keys.record(RecordKind::Tenant, name.as_str())),
            RecordChange::DropSite(name) => self.drop(&keys.record(RecordKind::Site, name.as_str())),
            RecordChange::DropSetting(key) => self.drop(&keys.record(RecordKind::Setting, key)),
            RecordChange::DropRule(name) => self.drop(&keys.record(RecordKind::Rule, name.as_str())),
            // `plan` refuses them in a transaction.
            RecordChange::PutNode(_)
            | RecordChange::DropNode(_)
            | RecordChange::PutPlacement(_)
            | RecordChange::DropPlacement(_)
            | RecordChange::PutTicketKeys(_)
            | RecordChange::DropTicketKeys => {}
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

    /// Returns whether the other part fits into this one. etcd takes no key twice in one part.
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

fn key_of(operation: &RequestOp) -> &[u8] {
    match &operation.request {
        Some(RequestKind::Put(put)) => &put.key,
        Some(RequestKind::Delete(delete)) => &delete.key,
        Some(RequestKind::Range(_)) | None => &[],
    }
}
