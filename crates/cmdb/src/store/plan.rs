//! What a list of changes comes to: the state before and after for each record it names, and every
//! mistake of the state it leads to. Pure: it asks the store through `View` and writes nothing.
//!
//! Not here: rules of one record alone (`check`), writing (`redb`).

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::{Mode, RECORD_LEN_MAX, StoreError, TransactionError, UID_KEPT_MAX};
use crate::check::{self, Findings, Mistake};
use crate::names::{NodeName, RuleName, SiteName, TenantName};
use crate::record::{
    Backend, Change, NodeRecord, Placement, RULES_MAX, Rule, SETTINGS_MAX, Setting, Site, Tenant, TicketKeys,
};

/// What planning asks of a store, all in one transaction's eyes.
pub(super) trait View {
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
    fn rule(&self, name: &str) -> Result<Option<Rule>, StoreError>;
    fn rule_names(&self) -> Result<Vec<RuleName>, StoreError>;
    fn node(&self, name: &str) -> Result<Option<NodeRecord>, StoreError>;
    fn placement(&self, site: &str) -> Result<Option<Placement>, StoreError>;
    fn ticket_keys(&self) -> Result<Option<TicketKeys>, StoreError>;
}

/// One record's way. `index` is where in the list its last change stood; none for what `Mode::Replace` drops.
#[derive(Debug)]
pub(super) struct Step<T> {
    pub before: Option<T>,
    pub after: Option<T>,
    index: Option<usize>,
}

/// Steps in order of name. Steps that change nothing are left out.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub tenants: BTreeMap<TenantName, Step<Tenant>>,
    pub sites: BTreeMap<SiteName, Step<Site>>,
    pub settings: BTreeMap<Box<str>, Step<Setting>>,
    pub rules: BTreeMap<RuleName, Step<Rule>>,
    /// These are only ever `told`: no list of changes names them.
    pub nodes: BTreeMap<NodeName, Step<NodeRecord>>,
    pub placements: BTreeMap<SiteName, Step<Placement>>,
    pub ticket_keys: Option<Step<TicketKeys>>,
}

/// The record a change is about.
#[derive(Debug)]
enum Named {
    Tenant(TenantName),
    Site(SiteName),
    Setting(Box<str>),
    Rule(RuleName),
}

impl Plan {
    pub fn make(changes: Vec<Change>, mode: Mode, view: &impl View) -> Result<Self, TransactionError> {
        let mut plan = Self::default();
        let mut mistakes = plan.collect(changes, view)?;
        if mode == Mode::Replace {
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

    /// What another store, which has checked it, says its records are now: dropping what is not there is no mistake, and
    /// what is the same already is left out. A record this store cannot have, because it breaks a rule, stays as it was and
    /// is named; that comes only of somebody writing into the other store by hand, or of another version's rules.
    pub fn told(changes: Vec<Change>, view: &impl View) -> Result<(Self, Vec<String>), StoreError> {
        let mut plan = Self::default();
        let (mut records, mut names) = (Vec::new(), Vec::new());
        for change in changes {
            let name = match &change {
                Change::PutTenant(tenant) => Named::Tenant(tenant.name.clone()),
                Change::DropTenant(name) => Named::Tenant(name.clone()),
                Change::PutSite(site) => Named::Site(site.name.clone()),
                Change::DropSite(name) => Named::Site(name.clone()),
                Change::PutSetting(setting) => Named::Setting(setting.key.clone()),
                Change::DropSetting(key) => Named::Setting(key.as_str().into()),
                Change::PutRule(rule) => Named::Rule(rule.name.clone()),
                Change::DropRule(name) => Named::Rule(name.clone()),
                Change::PutNode(_)
                | Change::DropNode(_)
                | Change::PutPlacement(_)
                | Change::DropPlacement(_)
                | Change::PutTicketKeys(_)
                | Change::DropTicketKeys => {
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

    fn tell_of_cluster(&mut self, change: Change, view: &impl View) -> Result<(), StoreError> {
        let (node, placement) = match change {
            Change::PutNode(node) => (Some((node.name.clone(), Some(*node))), None),
            Change::DropNode(name) => (Some((name, None)), None),
            Change::PutPlacement(placement) => (None, Some((placement.site.clone(), Some(placement)))),
            Change::DropPlacement(site) => (None, Some((site, None))),
            Change::PutTicketKeys(keys) => return self.tell_of_ticket_keys(Some(keys), view),
            Change::DropTicketKeys => return self.tell_of_ticket_keys(None, view),
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

    fn tell_of_ticket_keys(&mut self, after: Option<TicketKeys>, view: &impl View) -> Result<(), StoreError> {
        let before = match self.ticket_keys.take() {
            Some(step) => step.before,
            None => view.ticket_keys()?,
        };
        self.ticket_keys = Some(Step { before, after, index: None });
        Ok(())
    }

    /// New keys for tickets, and nothing else.
    pub fn of_ticket_keys(before: Option<TicketKeys>, after: TicketKeys) -> Self {
        let step = Step { before, after: Some(after), index: None };
        let mut plan = Self { ticket_keys: Some(step), ..Self::default() };
        plan.leave_out_what_stays();
        plan
    }

    /// Takes the steps out that lead to mistakes. `names` has the record of each index.
    fn leave_out_mistakes(&mut self, names: &[Named], view: &impl View) -> Result<Vec<String>, StoreError> {
        let mut left_out = Vec::new();
        // A step taken out may leave another without what it needs. Each round takes at least one out, so it ends.
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
                    Some(Named::Tenant(name)) => drop(self.tenants.remove(name)),
                    Some(Named::Site(name)) => drop(self.sites.remove(name)),
                    Some(Named::Setting(key)) => drop(self.settings.remove(key)),
                    Some(Named::Rule(name)) => drop(self.rules.remove(name)),
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

    /// The largest uid that its tenant does not keep: one that must not be allocated again. Those beyond `UID_KEPT_MAX` are left
    /// out, because nothing would be left to allocate after them.
    pub fn left_uid(&self) -> Option<u32> {
        let kept = |step: &Step<Tenant>| step.after.as_ref().map(|tenant| tenant.uid);
        let left = |step: &Step<Tenant>| {
            step.before.as_ref().map(|tenant| tenant.uid).filter(|uid| kept(step) != Some(*uid))
        };
        self.tenants.values().filter_map(left).filter(|uid| *uid <= UID_KEPT_MAX).max()
    }

    /// In an order in which every intermediate state has each site's tenant, and each placement its node.
    pub fn into_changes(self) -> Vec<Change> {
        let mut changes = Vec::with_capacity(self.tenants.len() + self.sites.len() + self.settings.len());
        let mut tenants_to_drop = Vec::new();
        let mut nodes_to_drop = Vec::new();
        for (name, step) in self.nodes {
            match step.after {
                Some(node) => changes.push(Change::PutNode(Box::new(node))),
                None => nodes_to_drop.push(Change::DropNode(name)),
            }
        }
        for (name, step) in self.tenants {
            match step.after {
                Some(tenant) => changes.push(Change::PutTenant(Box::new(tenant))),
                None => tenants_to_drop.push(Change::DropTenant(name)),
            }
        }
        changes.extend(self.sites.into_iter().map(|(name, step)| match step.after {
            Some(site) => Change::PutSite(Box::new(site)),
            None => Change::DropSite(name),
        }));
        changes.extend(self.placements.into_iter().map(|(site, step)| match step.after {
            Some(placement) => Change::PutPlacement(placement),
            None => Change::DropPlacement(site),
        }));
        changes.extend(tenants_to_drop);
        changes.extend(nodes_to_drop);
        changes.extend(self.settings.into_iter().map(|(key, step)| match step.after {
            Some(setting) => Change::PutSetting(setting),
            None => Change::DropSetting(key.into()),
        }));
        changes.extend(self.rules.into_iter().map(|(name, step)| match step.after {
            Some(rule) => Change::PutRule(rule),
            None => Change::DropRule(name),
        }));
        changes.extend(self.ticket_keys.map(|step| match step.after {
            Some(keys) => Change::PutTicketKeys(keys),
            None => Change::DropTicketKeys,
        }));
        changes
    }

    /// Folds the list into one step for each record.
    fn collect(&mut self, changes: Vec<Change>, view: &impl View) -> Result<Vec<Mistake>, StoreError> {
        let mut mistakes = Vec::new();
        for (index, change) in changes.into_iter().enumerate() {
            let index = Some(index);
            let unknown = match change {
                Change::PutTenant(tenant) => {
                    let step = self.tenant_step(&tenant.name, index, view)?;
                    step.after = Some(*tenant);
                    None
                }
                Change::PutSite(site) => {
                    let step = self.site_step(&site.name, index, view)?;
                    step.after = Some(*site);
                    None
                }
                Change::PutSetting(setting) => {
                    let step = self.setting_step(&setting.key, index, view)?;
                    step.after = Some(setting);
                    None
                }
                Change::PutRule(rule) => {
                    let step = self.rule_step(&rule.name, index, view)?;
                    step.after = Some(rule);
                    None
                }
                Change::DropTenant(name) => {
                    let known = self.tenant_step(&name, index, view)?.after.take().is_some();
                    (!known)
                        .then(|| unknown(Findings::of_tenant(&name, index), "name", name.as_str(), "tenant"))
                }
                Change::DropSite(name) => {
                    let known = self.site_step(&name, index, view)?.after.take().is_some();
                    (!known).then(|| unknown(Findings::of_site(&name, index), "name", name.as_str(), "site"))
                }
                Change::DropSetting(key) => {
                    let known = self.setting_step(&key, index, view)?.after.take().is_some();
                    (!known).then(|| unknown(Findings::of_setting(&key, index), "key", &key, "setting"))
                }
                Change::DropRule(name) => {
                    let known = self.rule_step(&name, index, view)?.after.take().is_some();
                    (!known).then(|| unknown(Findings::of_rule(&name, index), "name", name.as_str(), "rule"))
                }
                Change::PutNode(_)
                | Change::DropNode(_)
                | Change::PutPlacement(_)
                | Change::DropPlacement(_)
                | Change::PutTicketKeys(_)
                | Change::DropTicketKeys => {
                    let mut findings = Findings::of_cluster(index);
                    findings.add("kind", "", "is changed by `nagaya cluster` and by the cluster itself only");
                    Some(findings.mistakes)
                }
            };
            mistakes.extend(unknown.into_iter().flatten());
        }
        Ok(mistakes)
    }

    fn drop_unnamed(&mut self, view: &impl View) -> Result<(), StoreError> {
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

    fn mistakes_of_tenants(&self, view: &impl View) -> Result<Vec<Mistake>, StoreError> {
        let mut mistakes = Vec::new();
        let mut uids: HashMap<u32, &TenantName> = HashMap::new();
        for (name, step) in &self.tenants {
            let mut to = Findings::of_tenant(name, step.index);
            let Some(tenant) = &step.after else {
                self.check_unused(name, &mut to, view)?;
                mistakes.extend(to.mistakes);
                continue;
            };
            check::tenant(tenant, &mut to);
            check_len(tenant, &mut to);
            let owner = match uids.insert(tenant.uid, name) {
                Some(other) => Some(other.clone()),
                // An owner this list also changes has its new uid in `uids`, now or when its turn comes.
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

    /// A tenant that goes must have no site left; those this list moves or drops do not count.
    fn check_unused(&self, name: &TenantName, to: &mut Findings, view: &impl View) -> Result<(), StoreError> {
        let mut left = view.sites_of(name.as_str())?;
        left.retain(|site| !self.sites.contains_key(site));
        if let Some(first) = left.first() {
            let hint = format!("still has {} sites, such as '{first}': remove them first", left.len());
            to.add("name", name, hint);
        }
        Ok(())
    }

    /// A tenant that loses its home must have no site beneath it; sites of this list are checked for themselves.
    fn check_homeless(
        &self,
        name: &TenantName,
        to: &mut Findings,
        view: &impl View,
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

    fn mistakes_of_sites(&self, view: &impl View) -> Result<Vec<Mistake>, StoreError> {
        let mut mistakes = Vec::new();
        let mut places: HashMap<(&str, &str), &SiteName> = HashMap::new();
        // Many sites share a tenant; what is asked of it is asked once.
        let mut tenants_with_home: HashMap<&str, Option<bool>> = HashMap::new();
        for (name, step) in &self.sites {
            let Some(site) = &step.after else { continue };
            let mut to = Findings::of_site(name, step.index);
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
                // The same host twice in one site is reported by `check`.
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

    fn mistakes_of_settings(&self, view: &impl View) -> Result<Vec<Mistake>, StoreError> {
        let mut mistakes = Vec::new();
        let (mut more, mut less) = (0, 0);
        let mut last_new = None;
        for (key, step) in &self.settings {
            match (&step.before, &step.after) {
                (None, Some(_)) => (more, last_new) = (more + 1, Some((key, step.index))),
                (Some(_), None) => less += 1,
                _ => {}
            }
            if let Some(setting) = &step.after {
                let mut to = Findings::of_setting(key, step.index);
                check::setting(setting, &mut to);
                mistakes.extend(to.mistakes);
            }
        }
        if let Some((key, index)) = last_new {
            let count = view.setting_count()? + more - less;
            if count > SETTINGS_MAX {
                let mut to = Findings::of_setting(key, index);
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

    fn mistakes_of_rules(&self, view: &impl View) -> Result<Vec<Mistake>, StoreError> {
        let mut mistakes = Vec::new();
        let (mut more, mut less) = (0, 0);
        let mut last_new = None;
        for (name, step) in &self.rules {
            match (&step.before, &step.after) {
                (None, Some(_)) => (more, last_new) = (more + 1, Some((name, step.index))),
                (Some(_), None) => less += 1,
                _ => {}
            }
            if let Some(rule) = &step.after {
                let mut to = Findings::of_rule(name, step.index);
                check::rule(rule, &mut to);
                check_len(rule, &mut to);
                mistakes.extend(to.mistakes);
            }
        }
        if let Some((name, index)) = last_new {
            let count = view.rule_names()?.len() as u64 + more - less;
            if count > RULES_MAX {
                let mut to = Findings::of_rule(name, index);
                let hint = format!("would make {count} rules: a store holds {RULES_MAX} at most");
                to.add("name", "", hint);
                mistakes.extend(to.mistakes);
            }
        }
        Ok(mistakes)
    }

    fn tenant_after(&self, name: &str, view: &impl View) -> Result<Option<Tenant>, StoreError> {
        match self.tenants.get(name) {
            Some(step) => Ok(step.after.clone()),
            None => view.tenant(name),
        }
    }

    fn tenant_step(
        &mut self,
        name: &TenantName,
        index: Option<usize>,
        view: &impl View,
    ) -> Result<&mut Step<Tenant>, StoreError> {
        step(&mut self.tenants, name, index, || view.tenant(name.as_str()))
    }

    fn site_step(
        &mut self,
        name: &SiteName,
        index: Option<usize>,
        view: &impl View,
    ) -> Result<&mut Step<Site>, StoreError> {
        step(&mut self.sites, name, index, || view.site(name.as_str()))
    }

    fn setting_step(
        &mut self,
        key: &str,
        index: Option<usize>,
        view: &impl View,
    ) -> Result<&mut Step<Setting>, StoreError> {
        step(&mut self.settings, &Box::from(key), index, || view.setting(key))
    }

    fn rule_step(
        &mut self,
        name: &RuleName,
        index: Option<usize>,
        view: &impl View,
    ) -> Result<&mut Step<Rule>, StoreError> {
        step(&mut self.rules, name, index, || view.rule(name.as_str()))
    }
}

/// The step of a record, begun with what the store has where the list names it for the first time.
fn step<'a, K: Ord + Clone, T: Clone>(
    steps: &'a mut BTreeMap<K, Step<T>>,
    name: &K,
    index: Option<usize>,
    stored: impl FnOnce() -> Result<Option<T>, StoreError>,
) -> Result<&'a mut Step<T>, StoreError> {
    if !steps.contains_key(name) {
        let before = stored()?;
        steps.insert(name.clone(), Step { after: before.clone(), before, index });
    }
    let step = steps.get_mut(name).expect("it was just put there");
    step.index = index;
    Ok(step)
}

fn unknown(mut to: Findings, field: &str, name: &str, kind: &str) -> Vec<Mistake> {
    to.add(field, name, format!("does not exist: see `nagaya {kind} list`"));
    to.mistakes
}

/// The first field whose path is beneath the tenant's home, if there is one.
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

fn check_len(record: &impl Serialize, to: &mut Findings) {
    // Only the length is wanted; the bytes go nowhere.
    let mut len = Counter(0);
    match serde_json::to_writer(&mut len, record) {
        Ok(()) if len.0 <= RECORD_LEN_MAX => {}
        Ok(()) => {
            to.add("record", format!("{} bytes", len.0), format!("is too long: at most {RECORD_LEN_MAX}"));
        }
        Err(_) => to.add("record", "", "has a path that is not UTF-8: rename the directory"),
    }
}

struct Counter(usize);

impl std::io::Write for Counter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
