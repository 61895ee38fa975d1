//! What named cells, tenants and sites are limited to after rules and records said this and that.
//!
//! Not here: the directories that follow (`tests/kernel`).

use nagaya_records::RecordChange;
use nagaya_records::cell::CgroupController::{self, Blkio, Cpu};
use nagaya_records::cell::{Device, IoLimit, NamedCell};
use serde_json::json;

use super::*;

fn shares(count: u32) -> LimitSet {
    LimitSet { cpu_shares: Some(count), ..LimitSet::default() }
}

fn name(text: &str) -> CellName {
    CellName::parse(text).unwrap()
}

fn tenant(more: serde_json::Value) -> Tenant {
    let mut record = json!({"name": "demo", "uid": 1001, "gid": 1001});
    record.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    serde_json::from_value(record).unwrap()
}

fn home() -> CellParent {
    CellParent { tenant: Arc::new(tenant(json!({}))), site: None, device: None }
}

fn set(text: &str, controllers: &[CgroupController], limits: LimitSet) -> CellChange {
    CellChange::Set { name: name(text), controllers: controllers.to_vec(), limits }
}

fn node_cell(text: &str) -> LevelKind {
    LevelKind::Named { name: name(text), tenant: None }
}

fn attach(
    desired: &mut DesiredLimits,
    cells: &[(&str, CellScope, &[CgroupController], Option<LimitSet>)],
) -> (Vec<String>, usize) {
    let named = cells.iter().map(|(text, scope, controllers, limits)| NamedCell {
        name: name(text),
        scope: *scope,
        controllers: controllers.to_vec(),
        limits: limits.clone(),
    });
    let confinement = Confinement { named: named.collect(), ..Confinement::default() };
    let (attached, changed) = desired.attach(&TenantName::new("demo").unwrap(), &confinement).unwrap();
    (attached.iter().map(|one| format!("{}:{}", one.name, one.controllers)).collect(), changed.len())
}

#[test]
fn a_cell_that_is_not_there_is_joined_only_if_it_is_made() {
    let mut desired = DesiredLimits::new(9);
    let joined = attach(&mut desired, &[("x", CellScope::Node, &[Cpu], None)]);
    assert_eq!(joined, (vec![], 0));
    let joined = attach(&mut desired, &[("x", CellScope::Node, &[Cpu], Some(shares(25)))]);
    assert_eq!(joined, (vec!["x:cpu".to_owned()], 1));
    // The same again changes nothing; by a controller it does not have it is not joined.
    let joined = attach(&mut desired, &[("x", CellScope::Node, &[Cpu], Some(shares(25)))]);
    assert_eq!(joined, (vec!["x:cpu".to_owned()], 0));
    let joined = attach(&mut desired, &[("x", CellScope::Node, &[Cpu, Blkio], None)]);
    assert_eq!(joined, (vec!["x:cpu".to_owned()], 0));
    // One of a tenant is another one.
    let joined = attach(&mut desired, &[("x", CellScope::Tenant, &CgroupController::ALL, None)]);
    assert_eq!(joined, (vec![], 0));
}

#[test]
fn values_are_set_one_by_one_and_cells_as_a_whole() {
    let mut desired = DesiredLimits::new(9);
    let io = vec![IoLimit { read_bps: Some(5), ..IoLimit::of(Device::Root) }];
    desired.change(&set("x", &[Blkio], LimitSet { io: io.clone(), ..LimitSet::default() })).unwrap();
    desired.change(&set("x", &[Cpu], shares(25))).unwrap();
    // Of other controllers than are named, nothing is taken.
    desired.change(&set("x", &[Cpu], LimitSet { processes: Some(1), ..shares(30) })).unwrap();
    let (limits, _) = desired.of(&node_cell("x"));
    assert_eq!(limits, LimitSet { io, ..shares(30) });
    desired.change(&set("x", &CgroupController::ALL, shares(7))).unwrap();
    assert_eq!(desired.of(&node_cell("x")).0, shares(7));
}

#[test]
fn a_cell_is_gone_when_its_last_controller_is_dropped() {
    let mut desired = DesiredLimits::new(9);
    let drop_it = |controllers: &[CgroupController]| CellChange::Drop {
        name: name("x"),
        controllers: controllers.to_vec(),
    };
    desired.change(&set("x", &[Cpu, Blkio], shares(25))).unwrap();
    let attached =
        [AttachedCell { name: name("x"), scope: CellScope::Node, controllers: ControllerSet::of(&[Cpu]) }];
    let demo = TenantName::new("demo").unwrap();
    assert!(desired.has(&demo, &attached));
    assert_eq!(desired.change(&drop_it(&[Cpu])).unwrap(), [node_cell("x")]);
    assert!(!desired.has(&demo, &attached));
    assert_eq!((desired.of(&node_cell("x")).0, desired.named().count()), (LimitSet::default(), 1));
    desired.change(&drop_it(&[Blkio])).unwrap();
    assert_eq!(desired.named().count(), 0);
    assert_eq!(desired.change(&drop_it(&[Blkio])).unwrap(), []);
}

#[test]
fn there_is_an_end_to_named_cells() {
    let mut desired = DesiredLimits::new(9);
    for number in 0..NAMED_MAX {
        desired.change(&set(&format!("c{number}"), &[Cpu], shares(25))).unwrap();
    }
    let error = desired.change(&set("more", &[Cpu], shares(25))).unwrap_err();
    assert_eq!(error.code, codes::NAMED_MAX);
    // Those that are there can be changed, and a dropped one makes room.
    desired.change(&set("c7", &[Cpu], shares(26))).unwrap();
    desired.change(&CellChange::Drop { name: name("c8"), controllers: vec![Cpu] }).unwrap();
    desired.change(&set("more", &[Cpu], shares(25))).unwrap();
}

#[test]
fn process_limit_of_a_tenant_comes_from_its_record_or_node() {
    let mut desired = DesiredLimits::new(9);
    let what = LevelKind::Tenant(TenantName::new("demo").unwrap());
    assert_eq!(desired.of(&what).0, LimitSet::default(), "nobody has asked for it yet");
    desired.meet(&home());
    assert_eq!(desired.of(&what).0.processes, Some(9));
    let mut table = RecordIndex::new();
    table.apply(RecordChange::PutTenant(Box::new(tenant(json!({"limits": {"processes": 5}}))))).unwrap();
    assert_eq!(desired.apply_records(&table, 9), std::slice::from_ref(&what));
    assert_eq!(desired.of(&what).0.processes, Some(5));
    assert_eq!(desired.apply_records(&table, 9), []);
    table.apply(RecordChange::PutTenant(Box::new(tenant(json!({}))))).unwrap();
    assert_eq!(desired.apply_records(&table, 12), std::slice::from_ref(&what));
    assert_eq!(desired.of(&what).0.processes, Some(12));
    // What runs for one whose record is gone keeps its limits, until another one has its name.
    assert_eq!(desired.apply_records(&RecordIndex::new(), 12), []);
    assert_eq!(desired.meet(&home()), [what]);
}

#[test]
fn limits_of_the_disk_follow_when_a_disk_becomes_known() {
    let mut desired = DesiredLimits::new(9);
    desired.change(&set("x", &[Blkio], LimitSet::default())).unwrap();
    desired.meet(&home());
    assert_eq!(desired.meet(&home()), []);
    let on_disk = CellParent { device: Some((8, 1)), ..home() };
    let changed = desired.meet(&on_disk);
    assert_eq!(changed, [LevelKind::Tenant(on_disk.tenant.name.clone()), node_cell("x")]);
    assert_eq!(desired.meet(&on_disk), [], "once");
    assert_eq!((desired.of(&changed[0]).1, desired.of(&changed[1]).1), (&[(8, 1)][..], &[(8, 1)][..]));
}

#[test]
fn tenants_that_are_gone_leave_no_named_cells() {
    let mut desired = DesiredLimits::new(9);
    attach(&mut desired, &[("x", CellScope::Tenant, &CgroupController::ALL, Some(shares(2)))]);
    desired.change(&set("x", &[Cpu], shares(3))).unwrap();
    desired.drop_of_absent(&RecordIndex::new());
    let left: Vec<LevelKind> = desired.named().map(|(what, ..)| what).collect();
    assert_eq!(left, [node_cell("x")]);
}

#[test]
fn tenant_gives_way_for_a_while_down_to_a_sixteenth() {
    let mut desired = DesiredLimits::new(9);
    let (demo, other) = (TenantName::new("demo").unwrap(), TenantName::new("other").unwrap());
    let what = LevelKind::Tenant(demo.clone());
    let cpu_shares = |desired: &DesiredLimits| desired.of(&what).0.cpu_shares;
    let now = Instant::now();
    let later = now + std::time::Duration::from_secs(3);
    assert!(desired.deprioritize(&demo, Some(later)).is_empty(), "nothing runs for it");
    desired.meet(&home());
    assert_eq!(
        (desired.deprioritize(&demo, Some(now)), cpu_shares(&desired)),
        (vec![what.clone()], Some(64))
    );
    assert!(desired.deprioritize(&demo, Some(later)).is_empty(), "it does already");
    assert!(desired.deprioritize(&other, None).is_empty());
    assert_eq!(desired.end_giving_way(now), (vec![], Some(later)));
    assert_eq!((desired.giving_way(), desired.of(&what).0.processes), (1, Some(9)));
    assert_eq!(desired.end_giving_way(later), (vec![what.clone()], None));
    assert_eq!((desired.giving_way(), cpu_shares(&desired)), (0, None));
    // Of what its record says, and never nothing.
    let table = |shares: u32| {
        let mut table = RecordIndex::new();
        let limits = json!({"limits": {"cpu_shares": shares}});
        table.apply(RecordChange::PutTenant(Box::new(tenant(limits)))).unwrap();
        table
    };
    for (own, left) in [(512, 32), (20, 2)] {
        desired.apply_records(&table(own), 9);
        desired.deprioritize(&demo, Some(later));
        assert_eq!(cpu_shares(&desired), Some(left));
        assert_eq!(
            (desired.deprioritize(&demo, None), cpu_shares(&desired)),
            (vec![what.clone()], Some(own))
        );
    }
}

#[test]
fn preceding_site_raises_its_tenant_until_precedence_ends() {
    let mut desired = DesiredLimits::new(100);
    let record = json!({"name": "wiki", "tenant": "demo", "hosts": ["w.test"], "backend": {"kind": "cgi", "root": "w"}});
    let wiki: Site = serde_json::from_value(record).unwrap();
    desired.meet(&CellParent { site: Some(Arc::new(wiki)), ..home() });
    let (now, tenant) = (Instant::now(), TenantName::new("demo").unwrap());
    let (site, other) = (SiteName::new("wiki").unwrap(), SiteName::new("blog").unwrap());
    let shares = |desired: &DesiredLimits| {
        [LevelKind::Tenant(tenant.clone()), LevelKind::Site(site.clone())]
            .map(|what| desired.of(&what).0.cpu_shares)
    };
    let before = shares(&desired);
    let second = std::time::Duration::from_secs(1);
    let later = now + second;
    desired.prioritize_site(&site, &tenant, later);
    assert_eq!(shares(&desired), [Some(8192); 2]);
    desired.prioritize_site(&other, &tenant, later + second);
    assert_eq!(desired.end_overdue_precedence(now), (vec![], Some(later)));
    let (changed, next) = desired.end_overdue_precedence(later);
    assert_eq!(changed, [LevelKind::Site(site.clone()), LevelKind::Tenant(tenant.clone())]);
    assert_eq!(next, Some(later + second));
    assert_eq!(shares(&desired), [Some(8192), before[1]], "the other one still does");
    desired.end_site_priority(&other);
    assert_eq!(shares(&desired), before);
    assert_eq!(desired.end_site_priority(&other), vec![]);
}

#[test]
fn a_site_has_the_greater_of_its_own_limits_and_its_boost() {
    let record = |limits| {
        let backend = json!({ "kind": "app", "command": ["x"], "directory": "d" });
        let site = json!({ "name": "wiki", "tenant": "demo", "hosts": ["w.test"], "backend": backend, "limits": limits });
        serde_json::from_value::<Site>(site).unwrap()
    };
    let cpu = |percent: u32| Some(CpuQuota::of_core(percent * 10));
    let limits = json!({ "cpu": "50%", "cpu_shares": 512 });
    let (site, mut desired) = (SiteName::new("wiki").unwrap(), DesiredLimits::new(100));
    assert_eq!(
        desired.boost(&site, Boost { cpu: cpu(100), cpu_shares: None }),
        vec![],
        "nothing of it is here"
    );
    desired.meet(&CellParent { site: Some(Arc::new(record(limits))), ..home() });
    let holds = |desired: &DesiredLimits| {
        let (limits, _) = desired.of(&LevelKind::Site(site.clone()));
        (limits.cpu, limits.cpu_shares)
    };
    assert_eq!(holds(&desired), (cpu(50), Some(512)));
    let all = Boost { cpu: cpu(100), cpu_shares: Some(2048) };
    assert_eq!(desired.boost(&site, all), [LevelKind::Site(site.clone())]);
    assert_eq!(desired.boost(&site, all), vec![], "it is so already");
    assert_eq!(holds(&desired), (cpu(100), Some(2048)));
    assert_eq!(desired.cpu_limit(&site), (cpu(50), false), "who balances load goes by what it has without");
    // Raised for want of CPU beside it: the greater holds, and each goes by itself.
    desired.limit_cpu(&site, cpu(200)).unwrap();
    assert_eq!((holds(&desired).0, desired.cpu_limit(&site)), (cpu(200), (cpu(200), true)));
    desired.limit_cpu(&site, None).unwrap();
    assert_eq!(holds(&desired), (cpu(100), Some(2048)));
    let lower = Boost { cpu: cpu(20), cpu_shares: Some(100) };
    desired.boost(&site, lower);
    assert_eq!(holds(&desired), (cpu(50), Some(512)), "it never lowers anything");
    desired.boost(&site, Boost::default());
    assert_eq!(holds(&desired), (cpu(50), Some(512)));

    let mut free = DesiredLimits::new(100);
    free.meet(&CellParent { site: Some(Arc::new(record(json!({})))), ..home() });
    free.boost(&site, Boost { cpu: cpu(100), cpu_shares: Some(100) });
    assert_eq!(holds(&free), (None, None), "where there is no limit, none is made");
}
