//! The table against a model that keeps decoded records in a list and compares every pattern.
//!
//! Not here: the frames that carry changes (`feed`).

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::names::{HostPattern, NodeName, SiteName, TenantName};
use crate::record::{Backend, FileRoot, PlacementReason, SettingScalar, SettingValue};

fn tenant(name: &str) -> Tenant {
    Tenant {
        name: TenantName::new(name).unwrap(),
        uid: 1,
        gid: 1,
        home: None,
        max_concurrent: None,
        php_workers: None,
        weight: None,
        limits: Default::default(),
        network: None,
        mail_per_hour: None,
    }
}

fn site(name: &str, tenant: &str, hosts: &[&str], path: &str) -> Site {
    Site {
        name: SiteName::new(name).unwrap(),
        tenant: TenantName::new(tenant).unwrap(),
        hosts: hosts.iter().map(|host| HostPattern::new(host).unwrap()).collect(),
        path: path.into(),
        backend: Backend::Static(FileRoot { root: name.into(), ..FileRoot::default() }),
        max_concurrent: None,
        stream_seconds: None,
        admission: Default::default(),
        limits: Default::default(),
        request_limits: Default::default(),
        demotions: Vec::new(),
    }
}

fn table(sites: &[Site]) -> RecordIndex {
    let mut table = RecordIndex::new();
    table.apply(RecordChange::PutTenant(Box::new(tenant("t")))).unwrap();
    for site in sites {
        table.apply(RecordChange::PutSite(Box::new(site.clone()))).unwrap();
    }
    table
}

fn names(table: &RecordIndex, host: &str) -> Vec<String> {
    table.routes(host).iter().map(|route| route.site.name.to_string()).collect()
}

#[test]
fn the_most_specific_pattern_wins_entirely() {
    let table = table(&[
        site("exact", "t", &["a.example.org"], "/"),
        site("blog", "t", &["a.example.org"], "/blog"),
        site("near", "t", &["*.example.org"], "/"),
        site("far", "t", &["*.org"], "/deep/path"),
        site("rest", "t", &["*"], "/"),
        site("six", "t", &["[::1]"], "/"),
    ]);
    for (host, expected) in [
        ("a.example.org", &["blog", "exact"][..]),
        ("A.Example.ORG", &["blog", "exact"]),
        ("b.example.org", &["near"]),
        ("c.b.example.org", &["near"]),
        ("example.org", &["far"]),
        ("org", &["rest"]),
        (".org", &["rest"]),
        ("", &["rest"]),
        ("[::1]", &["six"]),
        ("[::2]", &["rest"]),
        (&format!("{}.example.org", "a".repeat(HOST_LEN_MAX)), &["rest"]),
    ] {
        assert_eq!(names(&table, host), expected, "{host}");
    }
}

#[test]
fn a_route_carries_the_owner_of_its_site() {
    let mut table = table(&[site("a", "t", &["a.test"], "/")]);
    let changed = Tenant { uid: 77, ..tenant("t") };
    table.apply(RecordChange::PutTenant(Box::new(changed.clone()))).unwrap();
    assert_eq!(*table.routes("a.test")[0].tenant, changed);
    assert_eq!(table.drop_tenant("t"), Err(TableError::TenantInUse { tenant: "t".into(), sites: 1 }));
}

#[test]
fn a_change_out_of_step_is_refused_and_changes_nothing() {
    let mut table = table(&[]);
    let orphan = site("a", "nobody", &["a.test"], "/");
    assert!(matches!(table.put_site(&orphan), Err(TableError::NoTenant { .. })));
    assert_eq!(table.drop_site("a"), Err(TableError::UnknownSite("a".into())));
    assert_eq!(table.drop_tenant("nobody"), Err(TableError::UnknownTenant("nobody".into())));
    assert_eq!((table.tenant_count(), table.site_count()), (1, 0));
    assert!(table.routes("a.test").is_empty());
}

#[test]
fn dropped_site_gives_its_memory_to_the_next() {
    let mut table = table(&[]);
    let mut sizes = Vec::new();
    for round in 0..4 {
        for n in 0..1000 {
            let name = format!("s{round}{n:03}");
            table.put_site(&site(&name, "t", &[&format!("{name}.test")], "/")).unwrap();
        }
        sizes.push(table.heap_bytes());
        for n in 0..1000 {
            table.drop_site(&format!("s{round}{n:03}")).unwrap();
        }
    }
    // The free list is the one thing that did not exist in the first round.
    assert!(sizes[3] <= sizes[0] + 1024 * size_of::<u32>(), "{sizes:?}");
    assert_eq!(sizes[3], sizes[2]);
}

// === The model ===

#[derive(Debug, Default)]
struct Model {
    tenants: BTreeMap<String, Tenant>,
    sites: BTreeMap<String, Site>,
    settings: BTreeMap<Box<str>, Setting>,
    nodes: BTreeMap<String, NodeRecord>,
    placements: BTreeMap<String, Placement>,
}

impl Model {
    fn apply(&mut self, change: RecordChange) -> bool {
        match change {
            RecordChange::PutTenant(tenant) => {
                self.tenants.insert(tenant.name.to_string(), *tenant);
                true
            }
            RecordChange::PutSite(site) => {
                let known = self.tenants.contains_key(site.tenant.as_str());
                if known {
                    self.sites.insert(site.name.to_string(), *site);
                }
                known
            }
            RecordChange::DropTenant(name) => {
                !self.sites.values().any(|site| site.tenant == name)
                    && self.tenants.remove(name.as_str()).is_some()
            }
            RecordChange::DropSite(name) => self.sites.remove(name.as_str()).is_some(),
            RecordChange::PutSetting(setting) => {
                self.settings.insert(setting.key.clone(), setting);
                true
            }
            RecordChange::DropSetting(key) => self.settings.remove(&*key).is_some(),
            // No part of a table.
            RecordChange::PutRule(_) | RecordChange::DropRule(_) => true,
            RecordChange::PutNode(node) => {
                self.nodes.insert(node.name.to_string(), *node);
                true
            }
            RecordChange::DropNode(name) => self.nodes.remove(name.as_str()).is_some(),
            RecordChange::PutPlacement(placement) => {
                self.placements.insert(placement.site.to_string(), placement);
                true
            }
            RecordChange::DropPlacement(site) => self.placements.remove(site.as_str()).is_some(),
            RecordChange::PutTicketKeys(_) | RecordChange::DropTicketKeys => true,
        }
    }

    fn routes(&self, host: &str) -> Vec<SiteMatch> {
        // How much of the host a pattern names; the exact name more than any wildcard.
        let rank = |pattern: &str| match pattern.strip_prefix('*') {
            None => (pattern == host).then_some(usize::MAX),
            Some("") => Some(0),
            Some(rest) => (host.len() > rest.len() && host.ends_with(rest)).then_some(rest.len()),
        };
        let best = |site: &Site| site.hosts.iter().filter_map(|host| rank(host.as_str())).max();
        let winner = self.sites.values().filter_map(best).max();
        let mut sites: Vec<&Site> =
            self.sites.values().filter(|site| winner.is_some() && best(site) == winner).collect();
        sites.sort_by_key(|site| std::cmp::Reverse(site.path.len()));
        sites
            .into_iter()
            .map(|site| SiteMatch {
                site: Arc::new(site.clone()),
                tenant: Arc::new(self.tenants[site.tenant.as_str()].clone()),
            })
            .collect()
    }
}

/// Some have copies.
fn placement(site: SiteName, node: NodeName, epoch: u64) -> Placement {
    let epoch = epoch.max(1);
    let (node_epoch, copies) = Default::default();
    let one = Placement {
        site,
        node,
        epoch,
        since_ms: 0,
        why: PlacementReason::First,
        wait_ms: 9,
        node_epoch,
        copies,
    };
    match epoch % 3 {
        0 if epoch < u64::MAX => one.with_copy(NodeName::new("other").unwrap(), 7, 303),
        _ => one,
    }
}

fn any_host() -> impl Strategy<Value = String> {
    proptest::collection::vec(prop_oneof!["a", "b", "c"], 1..4).prop_map(|labels| labels.join("."))
}

fn any_pattern() -> impl Strategy<Value = String> {
    prop_oneof![4 => any_host(), 3 => any_host().prop_map(|host| format!("*.{host}")), 1 => Just("*".into())]
}

fn any_value() -> impl Strategy<Value = SettingValue> {
    let fields = proptest::collection::btree_map("[a-c]", any::<i32>(), 0..3);
    prop_oneof![
        "[a-z]{0,9}".prop_map(|text| SettingValue::Text(text.into())),
        fields.prop_map(|fields| {
            let fields =
                fields.into_iter().map(|(name, value)| (name.into(), SettingScalar::Number(value.into())));
            SettingValue::Fields(fields.collect())
        }),
    ]
}

fn any_change() -> impl Strategy<Value = RecordChange> {
    let tenants = || "t[0-2]".prop_map(|name| TenantName::new(&name).unwrap());
    let sites = || "s[0-7]".prop_map(|name| SiteName::new(&name).unwrap());
    let nodes = || "n[0-2]".prop_map(|name| NodeName::new(&name).unwrap());
    let paths = prop_oneof!["/", "/a", "/a/b"];
    prop_oneof![
        2 => (tenants(), 1..9_u32).prop_map(|(name, uid)| {
            RecordChange::PutTenant(Box::new(Tenant { uid, ..tenant(name.as_str()) }))
        }),
        1 => tenants().prop_map(RecordChange::DropTenant),
        6 => (sites(), tenants(), proptest::collection::vec(any_pattern(), 1..4), paths).prop_map(
            |(name, tenant, hosts, path)| {
                let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
                RecordChange::PutSite(Box::new(site(name.as_str(), tenant.as_str(), &hosts, &path)))
            }
        ),
        2 => sites().prop_map(RecordChange::DropSite),
        2 => ("k[0-3]", any_value()).prop_map(|(key, value)| {
            RecordChange::PutSetting(Setting { key: key.into(), value })
        }),
        1 => "k[0-3]".prop_map(RecordChange::DropSetting),
        2 => (nodes(), 1..99_u32).prop_map(|(name, cpus)| RecordChange::PutNode(Box::new(NodeRecord {
            name, id: String::new(), peer: "a:1".into(), draining: false, cpus, memory_bytes: 1, version: String::new(), knows: 0, fence_ms: 0,
            heeds_marks: false,
        }))),
        1 => nodes().prop_map(RecordChange::DropNode),
        4 => (sites(), nodes(), any::<u64>()).prop_map(|(site, node, epoch)| {
            RecordChange::PutPlacement(placement(site, node, epoch))
        }),
        1 => sites().prop_map(RecordChange::DropPlacement),
    ]
}

proptest! {
    #[test]
    fn any_history_answers_as_the_model(
        changes in proptest::collection::vec(any_change(), 0..60),
        hosts in proptest::collection::vec(any_host(), 1..20),
    ) {
        let mut table = RecordIndex::new();
        let mut model = Model::default();
        for change in changes {
            prop_assert_eq!(table.apply(change.clone()).is_ok(), model.apply(change));
        }
        prop_assert_eq!(table.site_count(), model.sites.len());
        prop_assert_eq!(table.tenant_count(), model.tenants.len());
        for name in (0..8).map(|n| format!("s{n}")) {
            let found = table.site(&name);
            prop_assert_eq!(found.as_deref(), model.sites.get(&name));
            let placement = model.placements.get(&name);
            prop_assert_eq!(table.placement(&name), placement.cloned());
            for node in ["n0", "n1", "n2", "other"].map(|name| NodeName::new(name).unwrap()) {
                prop_assert_eq!(table.standing(&name, &node), placement.map(|placement| placement.standing(&node)));
            }
        }
        prop_assert_eq!(table.placements().count(), model.placements.len());
        prop_assert_eq!(table.placement_count(), model.placements.len());
        for name in (0..3).map(|n| format!("n{n}")) {
            let found = table.node(&name);
            prop_assert_eq!(found.as_deref(), model.nodes.get(&name));
        }
        prop_assert_eq!(table.nodes().len(), model.nodes.len());
        prop_assert_eq!(table.setting_count(), model.settings.len());
        for key in (0..4).map(|n| format!("k{n}")) {
            let found = table.setting(&key);
            prop_assert_eq!(found.as_deref(), model.settings.get(&*key));
        }
        for host in hosts {
            prop_assert_eq!(table.routes(&host), model.routes(&host));
        }
    }
}

#[test]
fn names_of_a_tenants_sites_are_found() {
    let table =
        table(&[site("b", "t", &["b.test", "*.b.test"], "/"), site("a", "t", &["a.test", "b.test"], "/x")]);
    assert_eq!(table.hosts_of_tenant("t", "b", 9), ["b.test", "a.test"]);
    assert_eq!(table.hosts_of_tenant("t", "a", 1), ["a.test"]);
    assert!(table.hosts_of_tenant("nobody", "a", 9).is_empty());
}
