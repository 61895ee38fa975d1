//! Plans a list of changes: the state before and after for each named record, and the final state's
//! mistakes. Pure: it queries the store through `StoreView` and writes nothing.
//!
//! Not here: rules of one record alone (`check`), writing (`redb`).

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::{ChangeMode, RECORD_LEN_MAX, StoreError, TransactionError, UID_KEPT_MAX};
use nagaya_records::check::{self, RecordFindings, RecordMistake};
use nagaya_records::names::{NodeName, RuleName, SiteName, TenantName};
use nagaya_records::record::{
    Backend, NodeRecord, Placement, RULES_MAX, RecordChange, RuleRecord, SETTINGS_MAX, Setting, Site, Tenant,
    TicketKeys,
};

/// A store's state that planning needs, all within one transaction.
pub(super) trait StoreView {
    fn tenant(&self, name: &str) -> Result<Option<Tenant>, StoreError>;
    fn site(&self, name: &str) -> Result<Option<Site>, StoreError>;
    fn tenant_of_uid(&self, uid: u32) -> Result<Option<TenantName>, StoreError>;
    fn site_at(&self, host: &str, path: &str) -> Result<Option<SiteName>, StoreError>;
    fn sites_of(&self, tenant: &str) -> Result<Vec<SiteName>, StoreError>;
    fn tenant_names(&self) -> Result<Vec<TenantName>, StoreError>;
    fn site_names(&self) -> Result<Vec<SiteName>, StoreError>;
    fn setting(&self, key: &str) -> Result<Option<Setting>, StoreError>;
    fn setting_keys(&self) -> Result<Vec<Box<str>>, StoreError>;
    fn setting_count(&self) -> Result<u64, StoreError>;
    fn rule(&self, name: &str) -> Result<Option<RuleRecord>, StoreError>;
    fn rule_names(&self) -> Result<Vec<RuleName>, StoreError>;
    fn node(&self, name: &str) -> Result<Option<NodeRecord>, StoreError>;
    fn placement(&self, site: &str) -> Result<Option<Placement>, StoreError>;
    fn ticket_keys(&self) -> Result<Option<TicketKeys>, StoreError>;
}

/// The change of one record. `index` is the position of its last change in the list; `None` for
/// records that `Mode::Replace` drops.
#[derive(Debug)]
pub(super) struct RecordStep<T> {
    pub before: Option<T>,
    pub after: Option<T>,
    index: Option<usize>,
}

/// Steps in order of name. Steps that change nothing are left out.
#[derive(Debug, Default)]
pub(super) struct ChangePlan {
    pub tenants: BTreeMap<TenantName, RecordStep<Tenant>>,
    pub sites: BTreeMap<SiteName, RecordStep<Site>>,
    pub settings: BTreeMap<Box<str>, RecordStep<Setting>>,
    pub rules: BTreeMap<RuleName, RecordStep<RuleRecord>>,
    /// These are only ever read by `from_replica`: no list of changes names them.
    pub nodes: BTreeMap<NodeName, RecordStep<NodeRecord>>,
    pub placements: BTreeMap<SiteName, RecordStep<Placement>>,
    pub ticket_keys: Option<RecordStep<TicketKeys>>,
}

/// The record of a change.
#[derive(Debug)]
enum NamedRecord {
    Tenant(TenantName),
    Site(SiteName),
    Setting(Box<str>),
    Rule(RuleName),
}

impl ChangePlan {
    pub fn make(
        changes: Vec<RecordChange>,
        mode: ChangeMode,
        view: &impl StoreView,
    ) -> Result<Self, TransactionError> {
        let mut plan = Self::default();
        let mut mistakes = plan.collect(changes, view)?;
        if mode == ChangeMode::Replace {
            plan.drop_unnamed(view)?;
        }
        mistakes.extend(plan.mistakes_of_tenants(view)?);
        mistakes.extend(plan.mistakes_of_sites(view)?);
        mistakes.extend(plan.mistakes_of_settings(view)?);
        mistakes.extend(plan.mistakes_of_rules(view)?);
        if !mistakes.is_empty() {
            mistakes.sort_by_key(|mistake| mistake.index);
            return Err(TransactionError::Refused(mistakes));
        }
        plan.leave_out_what_stays();
        Ok(plan)
    }

    /// Plans the present records of another store, which has checked them. Dropping an absent
    /// record is no mistake, and unchanged records are left out. A record that breaks a rule of
    /// this store stays as it was and is named. That happens only if somebody writes into the other
    /// store by hand, or with another version's rules.
    pub fn from_replica(
        changes: Vec<RecordChange>,
        view: &impl StoreView,
    ) -> Result<(Self, Vec<String>), StoreError> {
        let mut plan = Self::default();
        let mut records = Vec::new();
        let mut names = Vec::new();
        for change in changes {
            let name = match &change {
                RecordChange::PutTenant(tenant) => NamedRecord::Tenant(tenant.name.clone()),
                RecordChange::DropTenant(name) => NamedRecord::Tenant(name.clone()),
                RecordChange::PutSite(site) => NamedRecord::Site(site.name.clone()),
                RecordChange::DropSite(name) => NamedRecord::Site(name.clone()),
                RecordChange::PutSetting(setting) => NamedRecord::Setting(setting.key.clone()),
                RecordChange::DropSetting(key) => NamedRecord::Setting(key.as_str().into()),
                RecordChange::PutRule(rule) => NamedRecord::Rule(rule.name.clone()),
                RecordChange::DropRule(name) => NamedRecord::Rule(name.clone()),
                RecordChange::PutNode(_)
                | RecordChange::DropNode(_)
                | RecordChange::PutPlacement(_)
                | RecordChange::DropPlacement(_)
                | RecordChange::PutTicketKeys(_)
                | RecordChange::DropTicketKeys => {
                    plan.tell_of_cluster(change, view)?;
                    continue;
                }
            };
            names.push(name);
            records.push(change);
        }
        plan.collect(records, view)?;
        let left_out = plan.leave_out_mistakes(&names, view)?;
        plan.leave_out_what_stays();
        Ok((plan, left_out))
    }

    fn tell_of_cluster(&mut self, change: RecordChange, view: &impl StoreView) -> Result<(), StoreError> {
        let (node, placement) = match change {
            RecordChange::PutNode(node) => (Some((node.name.clone(), Some(*node))), None),
            RecordChange::DropNode(name) => (Some((name, None)), None),
            RecordChange::PutPlacement(placement) => (None, Some((placement.site.clone(), Some(placement)))),
            RecordChange::DropPlacement(site) => (None, Some((site, None))),
            RecordChange::PutTicketKeys(keys) => return self.tell_of_ticket_keys(Some(keys), view),
            RecordChange::DropTicketKeys => return self.tell_of_ticket_keys(None, view),
            _ => (None, None),
        };
        if let Some((name, after)) = node {
            step(&mut self.nodes, &name, None, || view.node(name.as_str()))?.after = after;
        }
        if let Some((site, after)) = placement {
            step(&mut self.placements, &site, None, || view.placement(site.as_str()))?.after = after;
        }
        Ok(())
    }

    fn tell_of_ticket_keys(
        &mut self,
        after: Option<TicketKeys>,
        view: &impl StoreView,
    ) -> Result<(), StoreError> {
        let before = match self.ticket_keys.take() {
            Some(step) => step.before,
            None => view.ticket_keys()?,
        };
        self.ticket_keys = Some(RecordStep { before, after, index: None });
        Ok(())
    }

    /// Plans new ticket keys, and nothing else.
    pub fn of_ticket_keys(before: Option<TicketKeys>, after: TicketKeys) -> Self {
        let step = RecordStep { before, after: Some(after), index: None };
        let mut plan = Self { ticket_keys: Some(step), ..Self::default() };
        plan.leave_out_what_stays();
        plan
    }

    /// Removes the steps that lead to mistakes. `names` has the record of each index.
    fn leave_out_mistakes(
        &mut self,
        names: &[NamedRecord],
        view: &impl StoreView,
    ) -> Result<Vec<String>, StoreError> {
        let mut left_out = Vec::new();
        // A removed step may leave another without what it needs. Each round removes at least one,
        // so it ends.
        loop {
            let mut mistakes = self.mistakes_of_tenants(view)?;
            mistakes.extend(self.mistakes_of_sites(view)?);
            mistakes.extend(self.mistakes_of_settings(view)?);
            mistakes.extend(self.mistakes_of_rules(view)?);
            if mistakes.is_empty() {
                return Ok(left_out);
            }
            for mistake in mistakes {
                match mistake.index.map(|index| &names[index]) {
                    Some(NamedRecord::Tenant(name)) => drop(self.tenants.remove(name)),
                    Some(NamedRecord::Site(name)) => drop(self.sites.remove(name)),
                    Some(NamedRecord::Setting(key)) => drop(self.settings.remove(key)),
                    Some(NamedRecord::Rule(name)) => drop(self.rules.remove(name)),
                    None => {}
                }
                left_out.push(mistake.to_string());
            }
        }
    }

    fn leave_out_what_stays(&mut self) {
        self.tenants.retain(|_, step| step.before != step.after);
        self.sites.retain(|_, step| step.before != step.after);
        self.settings.retain(|_, step| step.before != step.after);
        self.rules.retain(|_, step| step.before != step.after);
        self.nodes.retain(|_, step| step.before != step.after);
        self.placements.retain(|_, step| step.before != step.after);
        self.ticket_keys.take_if(|step| step.before == step.after);
    }

    pub fn is_empty(&self) -> bool {
        self.tenants.is_empty()
            && self.sites.is_empty()
            && self.settings.is_empty()
            && self.rules.is_empty()
            && self.nodes.is_empty()
            && self.placements.is_empty()
            && self.ticket_keys.is_none()
    }

    /// Returns the largest uid that its tenant does not keep, and that must not be allocated again.
    /// Those beyond `UID_KEPT_MAX` are left out, because nothing would be left to allocate after
    /// them.
    pub fn left_uid(&self) -> Option<u32> {
        let kept = |step: &RecordStep<Tenant>| step.after.as_ref().map(|tenant| tenant.uid);
        let left = |step: &RecordStep<Tenant>| {
            step.before.as_ref().map(|tenant| tenant.uid).filter(|uid| kept(step) != Some(*uid))
        };
        self.tenants.values().filter_map(left).filter(|uid| *uid <= UID_KEPT_MAX).max()
    }

    /// Returns the changes in an order in which every intermediate state has each site's tenant,
    /// and each placement its node.
    pub fn into_changes(self) -> Vec<RecordChange> {
        let mut changes = Vec::with_capacity(self.tenants.len() + self.sites.len() + self.settings.len());
        let mut tenants_to_drop = Vec::new();
        let mut nodes_to_drop = Vec::new();
        for (name, step) in self.nodes {
            match step.after {
                Some(node) => changes.push(RecordChange::PutNode(Box::new(node))),
                None => nodes_to_drop.push(RecordChange::DropNode(name)),
            }
        }
        for (name, step) in self.tenants {
            match step.after {
                Some(tenant) => changes.push(RecordChange::PutTenant(Box::new(tenant))),
                None => tenants_to_drop.push(RecordChange::DropTenant(name)),
            }
        }
        changes.extend(self.sites.into_iter().map(|(name, step)| match step.after {
            Some(site) => RecordChange::PutSite(Box::new(site)),
            None => RecordChange::DropSite(name),
        }));
        changes.extend(self.placements.into_iter().map(|(site, step)| match step.after {
            Some(placement) => RecordChange::PutPlacement(placement),
            None => RecordChange::DropPlacement(site),
        }));
        changes.extend(tenants_to_drop);
        changes.extend(nodes_to_drop);
        changes.extend(self.settings.into_iter().map(|(key, step)| match step.after {
            Some(setting) => RecordChange::PutSetting(setting),
            None => RecordChange::DropSetting(key.into()),
        }));
        changes.extend(self.rules.into_iter().map(|(name, step)| match step.after {
            Some(rule) => RecordChange::PutRule(rule),
            None => RecordChange::DropRule(name),
        }));
        changes.extend(self.ticket_keys.map(|step| match step.after {
            Some(keys) => RecordChange::PutTicketKeys(keys),
            None => RecordChange::DropTicketKeys,
        }));
        changes
    }

    /// Folds the list into one step for each record.
    fn collect(
        &mut self,
        changes: Vec<RecordChange>,
        view: &impl StoreView,
    ) -> Result<Vec<RecordMistake>, StoreError> {
        let mut mistakes = Vec::new();
        for (index, change) in changes.into_iter().enumerate() {
            let index = Some(index);
            let unknown = match change {
                RecordChange::PutTenant(tenant) => {
                    let step = self.tenant_step(&tenant.name, index, view)?;
                    step.after = Some(*tenant);
                    None
                }
                RecordChange::PutSite(site) => {
                    let step = self.site_step(&site.name, index, view)?;
                    step.after = Some(*site);
                    None
                }
                RecordChange::PutSetting(setting) => {
                    let step = self.setting_step(&setting.key, index, view)?;
                    step.after = Some(setting);
                    None
                }
                RecordChange::PutRule(rule) => {
                    let step = self.rule_step(&rule.name, index, view)?;
                    step.after = Some(rule);
                    None
                }
                RecordChange::DropTenant(name) => {
                    let known = self.tenant_step(&name, index, view)?.after.take().is_some();
                    (!known).then(|| {
                        unknown(RecordFindings::of_tenant(&name, index), "name", name.as_str(), "tenant")
                    })
                }
                RecordChange::DropSite(name) => {
                    let known = self.site_step(&name, index, view)?.after.take().is_some();
                    (!known).then(|| {
                        unknown(RecordFindings::of_site(&name, index), "name", name.as_str(), "site")
                    })
                }
                RecordChange::DropSetting(key) => {
                    let known = self.setting_step(&key, index, view)?.after.take().is_some();
                    (!known).then(|| unknown(RecordFindings::of_setting(&key, index), "key", &key, "setting"))
                }
                RecordChange::DropRule(name) => {
                    let known = self.rule_step(&name, index, view)?.after.take().is_some();
                    (!known).then(|| {
                        unknown(RecordFindings::of_rule(&name, index), "name", name.as_str(), "rule")
                    })
                }
                RecordChange::PutNode(_)
                | RecordChange::DropNode(_)
                | RecordChange::PutPlacement(_)
                | RecordChange::DropPlacement(_)
                | RecordChange::PutTicketKeys(_)
                | RecordChange::DropTicketKeys => {
                    let mut findings = RecordFindings::of_cluster(index);
                    findings.add("kind", "", "is changed by `nagaya cluster` and by the cluster itself only");
                    Some(findings.mistakes)
                }
            };
            mistakes.extend(unknown.into_iter().flatten());
        }
        Ok(mistakes)
    }

    fn drop_unnamed(&mut self, view: &impl StoreView) -> Result<(), StoreError> {
        for name in view.tenant_names()? {
            if !self.tenants.contains_key(&name) {
                self.tenant_step(&name, None, view)?.after = None;
            }
        }
        for name in view.site_names()? {
            if !self.sites.contains_key(&name) {
                self.site_step(&name, None, view)?.after = None;
            }
        }
        for key in view.setting_keys()? {
            if !self.settings.contains_key(&key) {
                self.setting_step(&key, None, view)?.after = None;
            }
        }
        for name in view.rule_names()? {
            if !self.rules.contains_key(&name) {
                self.rule_step(&name, None, view)?.after = None;
            }
        }
        Ok(())
    }

    fn mistakes_of_tenants(&self, view: &impl StoreView) -> Result<Vec<RecordMistake>, StoreError> {
        let mut mistakes = Vec::new();
        let mut uids: HashMap<u32, &TenantName> = HashMap::new();
        for (name, step) in &self.tenants {
            let mut to = RecordFindings::of_tenant(name, step.index);
            let Some(tenant) = &step.after else {
                self.check_unused(name, &mut to, view)?;
                mistakes.extend(to.mistakes);
                continue;
            };
            check::tenant(tenant, &mut to);
            check_len(tenant, &mut to);
            let owner = match uids.insert(tenant.uid, name) {
                Some(other) => Some(other.clone()),
                // An owner that this list also changes has its new uid in `uids`, now or when its
                // turn comes.
                None => view.tenant_of_uid(tenant.uid)?.filter(|owner| !self.tenants.contains_key(owner)),
            };
            if let Some(owner) = owner {
                to.add("uid", tenant.uid, format!("belongs to tenant '{owner}': choose another"));
            }
            if tenant.home.is_none() && step.before.as_ref().is_some_and(|before| before.home.is_some()) {
                self.check_homeless(name, &mut to, view)?;
            }
            mistakes.extend(to.mistakes);
        }
        Ok(mistakes)
    }

    /// Checks that a removed tenant has no site left; those that this list moves or drops do not
    /// count.
    fn check_unused(
        &self,
        name: &TenantName,
        to: &mut RecordFindings,
        view: &impl StoreView,
    ) -> Result<(), StoreError> {
        let mut left = view.sites_of(name.as_str())?;
        left.retain(|site| !self.sites.contains_key(site));
        if let Some(first) = left.first() {
            let hint = format!("still has {} sites, such as '{first}': remove them first", left.len());
            to.add("name", name, hint);
        }
        Ok(())
    }

    /// Checks that a tenant that loses its home has no site below it. Sites of this list are
    /// checked for themselves.
    fn check_homeless(
        &self,
        name: &TenantName,
        to: &mut RecordFindings,
        view: &impl StoreView,
    ) -> Result<(), StoreError> {
        for other in view.sites_of(name.as_str())? {
            if !self.sites.contains_key(&other)
                && view.site(other.as_str())?.is_some_and(|site| field_beneath_home(&site).is_some())
            {
                to.add("home", "", format!("is needed by site '{other}', whose directory is relative"));
                return Ok(());
            }
        }
        Ok(())
    }

    fn mistakes_of_sites(&self, view: &impl StoreView) -> Result<Vec<RecordMistake>, StoreError> {
        let mut mistakes = Vec::new();
        let mut places: HashMap<(&str, &str), &SiteName> = HashMap::new();
        // Many sites share a tenant, so each query about it is made once.
        let mut tenants_with_home: HashMap<&str, Option<bool>> = HashMap::new();
        for (name, step) in &self.sites {
            let Some(site) = &step.after else { continue };
            let mut to = RecordFindings::of_site(name, step.index);
            check::site(site, &mut to);
            check_len(site, &mut to);
            let tenant = site.tenant.as_str();
            let has_home = match tenants_with_home.get(tenant) {
                Some(known) => *known,
                None => {
                    let found = self.tenant_after(tenant, view)?.map(|tenant| tenant.home.is_some());
                    tenants_with_home.insert(tenant, found);
                    found
                }
            };
            match has_home {
                None => to.add("tenant", tenant, "does not exist: add it first with `nagaya tenant add`"),
                Some(true) => {}
                Some(false) => {
                    if let Some(field) = field_beneath_home(site) {
                        let hint =
                            format!("is relative, but tenant '{tenant}' has no home: use an absolute path");
                        to.add(field, "", hint);
                    }
                }
            }
            for host in &site.hosts {
                let owner = match places.insert((host.as_str(), &site.path), name) {
                    Some(other) => Some(other.clone()),
                    None => view
                        .site_at(host.as_str(), &site.path)?
                        .filter(|owner| owner != name && !self.sites.contains_key(owner)),
                };
                // `check` reports the same host twice in one site.
                if let Some(owner) = owner.filter(|owner| owner != name) {
                    let place = if site.path == "/" { "" } else { site.path.as_str() };
                    let hint = format!("belongs to site '{owner}': remove it there or choose another path");
                    to.add("hosts", format!("{host}{place}"), hint);
                }
            }
            mistakes.extend(to.mistakes);
        }
        Ok(mistakes)
    }

    fn mistakes_of_settings(&self, view: &impl StoreView) -> Result<Vec<RecordMistake>, StoreError> {
        let mut mistakes = Vec::new();
        let mut more = 0;
        let mut less = 0;
        let mut last_new = None;
        for (key, step) in &self.settings {
            match (&step.before, &step.after) {
                (None, Some(_)) => (more, last_new) = (more + 1, Some((key, step.index))),
                (Some(_), None) => less += 1,
                _ => {}
            }
            if let Some(setting) = &step.after {
                let mut to = RecordFindings::of_setting(key, step.index);
                check::setting(setting, &mut to);
                mistakes.extend(to.mistakes);
            }
        }
        if let Some((key, index)) = last_new {
            let count = view.setting_count()? + more - less;
            if count > SETTINGS_MAX {
                let mut to = RecordFindings::of_setting(key, index);
                to.add(
                    "key",
                    "",
                    format!("would make {count} settings: a store holds {SETTINGS_MAX} at most"),
                );
                mistakes.extend(to.mistakes);
            }
        }
        Ok(mistakes)
    }

    fn mistakes_of_rules(&self, view: &impl StoreView) -> Result<Vec<RecordMistake>, StoreError> {
        let mut mistakes = Vec::new();
        let mut more = 0;
        let mut less = 0;
        let mut last_new = None;
        for (name, step) in &self.rules {
            match (&step.before, &step.after) {
                (None, Some(_)) => (more, last_new) = (more + 1, Some((name, step.index))),
                (Some(_), None) => less += 1,
                _ => {}
            }
            if let Some(rule) = &step.after {
                let mut to = RecordFindings::of_rule(name, step.index);
                check::rule(rule, &mut to);
                check_len(rule, &mut to);
                mistakes.extend(to.mistakes);
            }
        }
        if let Some((name, index)) = last_new {
            let count = view.rule_names()?.len() as u64 + more - less;
            if count > RULES_MAX {
                let mut to = RecordFindings::of_rule(name, index);
                let hint = format!("would make {count} rules: a store holds {RULES_MAX} at most");
                to.add("name", "", hint);
                mistakes.extend(to.mistakes);
            }
        }
        Ok(mistakes)
    }

    fn tenant_after(&self, name: &str, view: &impl StoreView) -> Result<Option<Tenant>, StoreError> {
        match self.tenants.get(name) {
            Some(step) => Ok(step.after.clone()),
            None => view.tenant(name),
        }
    }

    fn tenant_step(
        &mut self,
        name: &TenantName,
        index: Option<usize>,
        view: &impl StoreView,
    ) -> Result<&mut RecordStep<Tenant>, StoreError> {
        step(&mut self.tenants, name, index, || view.tenant(name.as_str()))
    }

    fn site_step(
        &mut self,
        name: &SiteName,
        index: Option<usize>,
        view: &impl StoreView,
    ) -> Result<&mut RecordStep<Site>, StoreError> {
        step(&mut self.sites, name, index, || view.site(name.as_str()))
    }

    fn setting_step(
        &mut self,
        key: &str,
        index: Option<usize>,
        view: &impl StoreView,
    ) -> Result<&mut RecordStep<Setting>, StoreError> {
        step(&mut self.settings, &Box::from(key), index, || view.setting(key))
    }

    fn rule_step(
        &mut self,
        name: &RuleName,
        index: Option<usize>,
        view: &impl StoreView,
    ) -> Result<&mut RecordStep<RuleRecord>, StoreError> {
        step(&mut self.rules, name, index, || view.rule(name.as_str()))
    }
}

/// Returns the step of a record. The first time the list names the record, the step begins with the
/// store's state.
fn step<'a, K: Ord + Clone, T: Clone>(
    steps: &'a mut BTreeMap<K, RecordStep<T>>,
    name: &K,
    index: Option<usize>,
    stored: impl FnOnce() -> Result<Option<T>, StoreError>,
) -> Result<&'a mut RecordStep<T>, StoreError> {
    if !steps.contains_key(name) {
        let before = stored()?;
        steps.insert(name.clone(), RecordStep { after: before.clone(), before, index });
    }
    let step = steps.get_mut(name).expect("it was just put there");
    step.index = index;
    Ok(step)
}

fn unknown(mut to: RecordFindings, field: &str, name: &str, kind: &str) -> Vec<RecordMistake> {
    to.add(field, name, format!("does not exist: see `nagaya {kind} list`"));
    to.mistakes
}

/// Returns the first field whose path is below the tenant's home, if there is one.
fn field_beneath_home(site: &Site) -> Option<&'static str> {
    match &site.backend {
        Backend::Static(files) | Backend::Cgi(files) | Backend::Php(files) => {
            files.root.is_relative().then_some("root")
        }
        Backend::App(app) if app.directory.is_relative() => Some("directory"),
        Backend::App(app) if app.writable.iter().any(|path| path.is_relative()) => Some("writable"),
        Backend::App(app) if app.secrets.values().any(|path| path.is_relative()) => Some("secrets"),
        Backend::App(app) if app.files.as_ref().is_some_and(|files| files.root.is_relative()) => Some("root"),
        Backend::App(_) | Backend::Http(_) => None,
    }
}

fn check_len(record: &impl Serialize, to: &mut RecordFindings) {
    // Only the length is needed; the bytes are discarded.
    let mut len = RecordCounter(0);
    match serde_json::to_writer(&mut len, record) {
        Ok(()) if len.0 <= RECORD_LEN_MAX => {}
        Ok(()) => {
            to.add("record", format!("{} bytes", len.0), format!("is too long: at most {RECORD_LEN_MAX}"));
        }
        Err(_) => to.add("record", "", "has a path that is not UTF-8: rename the directory"),
    }
}

struct RecordCounter(usize);

impl std::io::Write for RecordCounter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
