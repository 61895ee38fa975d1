//! How leaves are given out, used again and let go of, without any cgroup.
//!
//! Not here: what the kernel does with them (`tests/kernel`).

use nagaya_records::cell::{CellName, CellScope, NamedCell};
use serde_json::json;

use super::*;

fn cells() -> KeeperCells {
    KeeperCells::open(CellMechanism::ProcessGroup, 64)
}

fn home(site: &str) -> CellParent {
    let tenant = serde_json::from_value(json!({"name": "demo", "uid": 1001, "gid": 1001})).unwrap();
    let backend = json!({"kind": "static", "root": "www"});
    let site = json!({"name": site, "tenant": "demo", "hosts": ["x.test"], "backend": backend});
    CellParent {
        tenant: Arc::new(tenant),
        site: Some(Arc::new(serde_json::from_value(site).unwrap())),
        device: None,
    }
}

fn named(name: &str) -> Confinement {
    let name = CellName::parse(name).unwrap();
    let controllers = vec![CgroupController::Cpu];
    let limits = Some(LimitSet::default());
    Confinement {
        named: vec![NamedCell { name, scope: CellScope::Node, controllers, limits }],
        ..Confinement::default()
    }
}

#[test]
fn without_cgroups_everything_is_missing_and_leaves_have_names() {
    let cells = cells();
    let shown = cells.show();
    assert_eq!(shown["missing"].as_array().unwrap().len(), 7, "{shown}");
    assert!(shown["controllers"].as_object().unwrap().values().all(serde_json::Value::is_null), "{shown}");
    assert_eq!(cells.fence(), ProcessTracking::ProcessGroup);
    let leaf = cells.leaf(&home("wiki"), &Confinement::default()).unwrap();
    assert_eq!(leaf.name(), "demo/wiki/r1");
    assert!(leaf.entrance().born.is_none() && leaf.entrance().tasks.is_empty());
    let of_tenant = CellParent { site: None, ..home("wiki") };
    assert_eq!(cells.leaf(&of_tenant, &Confinement::default()).unwrap().name(), "demo/r2");
}

#[test]
fn leaf_is_reused_in_its_place_only_after_release() {
    let cells = cells();
    let first = cells.leaf(&home("wiki"), &Confinement::default()).unwrap();
    let second = cells.leaf(&home("wiki"), &Confinement::default()).unwrap();
    assert_ne!(first.name(), second.name());
    assert!(first.release().unwrap());
    assert!(first.release().unwrap(), "twice is as good as once");
    assert_eq!(cells.leaf(&home("blog"), &Confinement::default()).unwrap().name(), "demo/blog/r3");
    assert_eq!(cells.leaf(&home("wiki"), &Confinement::default()).unwrap().name(), first.name());
}

#[test]
fn no_more_leaves_are_kept_than_are_allowed() {
    let cells = cells();
    let most = 64.min(cells.shared.free_max);
    let many: Vec<_> =
        (0..most + 10).map(|_| cells.leaf(&home("wiki"), &Confinement::default()).unwrap()).collect();
    assert!(many.iter().all(|leaf| leaf.release().unwrap()));
    assert_eq!(cells.numbers().free, most);
}

#[test]
fn a_worker_stays_where_its_next_request_belongs() {
    let cells = cells();
    let leaf = cells.leaf(&home("wiki"), &Confinement::default()).unwrap();
    let limits = LimitSet { cpu_shares: Some(25), ..LimitSet::default() };
    let slower = Confinement { limits: limits.clone(), ..Confinement::default() };
    assert!(cells.refit(&leaf, &home("wiki"), &slower).unwrap());
    assert_eq!(leaf.limits(), limits);
    assert!(!cells.refit(&leaf, &home("blog"), &slower).unwrap());
    assert!(!cells.refit(&leaf, &home("wiki"), &named("slow")).unwrap());
    assert!(leaf.release().unwrap());
    assert!(!cells.refit(&leaf, &home("wiki"), &slower).unwrap(), "it is another's by now");
}

#[test]
fn leaves_of_a_dropped_cell_are_not_used_again() {
    let cells = cells();
    let used = cells.leaf(&home("wiki"), &named("slow")).unwrap();
    assert_eq!(used.name(), "named/slow/demo/r1");
    let free = cells.leaf(&home("wiki"), &named("slow")).unwrap();
    assert!(free.release().unwrap());
    assert_eq!(cells.numbers().free, 1);
    let name = CellName::parse("slow").unwrap();
    cells.change(&CellChange::Drop { name, controllers: vec![CgroupController::Cpu] }).unwrap();
    assert_eq!((cells.numbers().free, cells.numbers().named), (0, 0));
    assert!(used.release().unwrap());
    assert_eq!(cells.numbers().free, 0);
    // Made again, it is as good as before.
    let again = cells.leaf(&home("wiki"), &named("slow")).unwrap();
    assert!(again.release().unwrap());
    assert_eq!(cells.numbers().free, 1);
}

#[test]
fn sweep_removes_empty_cells_and_keeps_the_rest() {
    let cells = cells();
    let used = cells.leaf(&home("wiki"), &Confinement::default()).unwrap();
    let free = cells.leaf(&home("blog"), &Confinement::default()).unwrap();
    assert!(free.release().unwrap());
    drop(free);
    cells.sweep();
    assert_eq!(cells.state.lock().branches.len(), 2, "it was used a moment ago");
    cells.state.lock().sweep(&cells.shared, Duration::ZERO);
    assert_eq!(cells.state.lock().branches.len(), 1);
    assert_eq!((cells.numbers().free, cells.numbers().requests), (0, 1));
    assert!(used.release().unwrap());
}
