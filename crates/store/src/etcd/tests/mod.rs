//! The cluster's store against a real etcd: the suite of all stores, and several nodes at once.
//!
//! Not here: older formats (`raise::tests`), members that fail (`faults`), values that others write (`forged`), certificates and logins (`secured`), a recorded history of placements (`history`).

mod faults;
mod forged;
mod history;
pub(super) mod rig;
mod secured;
mod together;

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use self::rig::{Etcd, Node, PATIENCE, replica, until};
use super::*;
use crate::import::import;
use crate::suite::{self, text};
use nagaya_records::names::{SiteName, TenantName};

fn name(text: &str) -> NodeName {
    NodeName::new(text).unwrap()
}

fn record(node: &str, id: &str) -> NodeRecord {
    NodeRecord {
        name: name(node),
        id: id.into(),
        peer: "127.0.0.1:1".into(),
        draining: false,
        cpus: 2,
        memory_bytes: 1 << 30,
        version: "0.1.0".into(),
        knows: 0,
        fence_ms: 300,
        heeds_marks: true,
    }
}

fn placement(site: &str, node: &str, epoch: u64) -> Placement {
    let json = format!(r#"{{"site":"{site}","node":"{node}","epoch":{epoch},"since_ms":1,"why":"first"}}"#);
    serde_json::from_str(&json).unwrap()
}

fn setting(key: &str, value: &str) -> RecordChange {
    RecordChange::PutSetting(Setting {
        key: key.into(),
        value: nagaya_records::SettingValue::Text(value.into()),
    })
}

fn rule(name: &str, text: &str) -> RecordChange {
    RecordChange::PutRule(RuleRecord {
        name: nagaya_records::RuleName::new(name).unwrap(),
        text: text.into(),
    })
}

fn put_tenant(name: &str, uid: u32) -> RecordChange {
    let json = format!(r#"{{"name":"{name}","uid":{uid},"gid":{uid},"home":"/srv/{name}"}}"#);
    RecordChange::PutTenant(serde_json::from_str(&json).unwrap())
}

fn put_site(name: &str, tenant: &str, host: &str) -> RecordChange {
    let json = format!(
        r#"{{"name":"{name}","tenant":"{tenant}","hosts":["{host}"],"backend":{{"kind":"static","root":"w"}}}}"#
    );
    RecordChange::PutSite(serde_json::from_str(&json).unwrap())
}

/// One tenant and these sites.
fn with_sites(node: &Node, sites: &[&str]) {
    let mut changes = vec![put_tenant("t", 9)];
    changes.extend(sites.iter().map(|site| put_site(site, "t", &format!("{site}.test"))));
    node.store.transaction(changes, ChangeMode::Merge).unwrap();
}

#[test]
fn the_clusters_store_passes_the_suite() {
    let etcd = Etcd::start(1);
    let fresh = || etcd.node(&etcd.cluster());
    suite::run(&fresh, &|node: &Node| &*node.store);
}

#[test]
fn two_nodes_see_what_the_other_changed() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let a = etcd.node(&cluster);
    let b = etcd.node(&cluster);
    with_sites(&a, &["one"]);
    b.until("the site", |store| store.site("one").unwrap().is_some());
    // Planned upon what the other did just now, though nobody waited for it.
    for n in 0..20 {
        let (one, other) = if n % 2 == 0 { (&a, &b) } else { (&b, &a) };
        one.store
            .transaction(vec![put_site("moving", "t", &format!("{n}.test"))], ChangeMode::Merge)
            .unwrap();
        let refused =
            other.store.transaction(vec![put_site("x", "t", &format!("{n}.test"))], ChangeMode::Merge);
        assert!(matches!(refused, Err(TransactionError::Refused(_))), "{refused:?}");
    }
    a.in_step(&etcd);
    assert_eq!(text(&*a.store), text(&*b.store));
    a.is_fed();
    b.is_fed();
}

#[test]
fn two_nodes_that_change_records_at_once_both_succeed() {
    const EACH: usize = 25;
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let nodes = [etcd.node(&cluster), etcd.node(&cluster), etcd.node(&cluster)];
    std::thread::scope(|scope| {
        for (at, node) in nodes.iter().enumerate() {
            scope.spawn(move || {
                for n in 0..EACH {
                    let changes = vec![setting(&format!("{at}-{n}"), "v")];
                    let done = node.store.transaction(changes.clone(), ChangeMode::Merge).unwrap();
                    assert_eq!(done.changes, changes);
                    assert!(node.store.setting(&format!("{at}-{n}")).unwrap().is_some());
                }
            });
        }
    });
    for node in &nodes {
        node.in_step(&etcd);
        assert_eq!(node.store.counts().unwrap().settings, 3 * EACH as u64);
        node.is_fed();
    }
    let reached = nodes[0].store.inner.replica.reached().unwrap();
    assert_eq!(reached.count, 3 * EACH as u64, "each change is counted once");
}

#[test]
fn a_uid_is_allocated_to_one_of_two_nodes() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let nodes = [etcd.node(&cluster), etcd.node(&cluster)];
    let mut uids: Vec<u32> = std::thread::scope(|scope| {
        let take = |node: &Node| (0..10).map(|_| node.store.allocate_uid(700).unwrap()).collect::<Vec<_>>();
        let taking: Vec<_> = nodes.iter().map(|node| scope.spawn(move || take(node))).collect();
        taking.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    uids.sort_unstable();
    assert_eq!(uids, (700..720).collect::<Vec<_>>());
}

// === Keys of tickets ===

#[test]
fn keys_of_tickets_are_made_by_one_of_two_and_known_to_both() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let nodes = [etcd.node(&cluster), etcd.node(&cluster)];
    let keys_of = |id: usize| -> TicketKeys {
        let secret = format!("{id}").repeat(64);
        let key = format!(r#"{{"id":{id},"secret":"{secret}","made_ms":1}}"#);
        serde_json::from_str(&format!(r#"{{"signs":{id},"keys":[{key}]}}"#)).unwrap()
    };
    let made: Vec<bool> = std::thread::scope(|scope| {
        let make =
            |(id, node): (usize, &Node)| node.store.put_ticket_keys(keys_of(id), None).unwrap().is_some();
        let making: Vec<_> = nodes.iter().enumerate().map(|one| scope.spawn(move || make(one))).collect();
        making.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(made.iter().filter(|made| **made).count(), 1);
    let stand = keys_of(made.iter().position(|made| *made).unwrap());
    for node in &nodes {
        node.until("the keys", |store| store.ticket_keys().unwrap().as_ref() == Some(&stand));
        node.is_fed();
    }
    // What cannot be read changes nothing, and is not shown.
    let key = nodes[0].store.inner.keys.record(crate::RecordKind::TicketKeys, keys::TICKET_KEYS);
    etcd.write(vec![keys::putting(&key, r#"{"signs":"a secret"}"#)]);
    nodes[0].until("it is told", |store| !store.refusals().shown.is_empty());
    let shown = nodes[0].store.refusals().shown;
    assert!(!shown[0].contains("secret"), "{shown:?}");
    assert_eq!(nodes[0].store.ticket_keys().unwrap(), Some(stand));
    etcd.write(vec![keys::deleting(&key)]);
    for node in &nodes {
        node.until("they are gone", |store| store.ticket_keys().unwrap().is_none());
        node.is_fed();
    }
}

// === Placements ===

#[test]
fn of_many_placements_at_once_one_wins_and_others_learn_it() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let nodes = [etcd.node(&cluster), etcd.node(&cluster)];
    with_sites(&nodes[0], &["one"]);
    let names: Vec<String> = (0..8).map(|n| format!("n{n}")).collect();
    etcd.runtime.block_on(async {
        for node in &names {
            nodes[0].store.join(record(node, node)).await.unwrap();
        }
    });
    for epoch in 1..=10 {
        let seen = (epoch > 1).then(|| epoch - 1);
        let claims: Vec<PlacementOutcome> = etcd.runtime.block_on(async {
            let mut racing = Vec::new();
            for (n, node) in names.iter().enumerate() {
                let store = nodes[n % 2].store.clone();
                let wanted = placement("one", node, epoch);
                racing.push(tokio::spawn(async move { store.place(wanted, seen, None).await.unwrap() }));
            }
            let mut claims = Vec::new();
            for race in racing {
                claims.push(race.await.unwrap());
            }
            claims
        });
        let winners: Vec<usize> = (0..claims.len()).filter(|n| claims[*n] == PlacementOutcome::Won).collect();
        assert_eq!(winners.len(), 1, "{claims:?}");
        let stands = placement("one", &names[winners[0]], epoch);
        let lost =
            claims.iter().filter(|claim| **claim == PlacementOutcome::Lost(Some(stands.clone()))).count();
        assert_eq!(lost, claims.len() - 1, "{claims:?}");
        for node in &nodes {
            node.until("the placement", |store| store.placement("one").unwrap().as_ref() == Some(&stands));
        }
    }
    nodes.iter().for_each(Node::is_fed);
}

#[test]
fn only_the_epoch_that_was_seen_decides_whether_a_site_moves() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let node = etcd.node(&cluster);
    with_sites(&node, &["one"]);
    let place = |wanted: &Placement, seen| {
        etcd.runtime.block_on(node.store.place(wanted.clone(), seen, None)).unwrap()
    };
    let first = placement("one", "a", 1);
    assert_eq!(place(&first, None), PlacementOutcome::Void, "no such node");
    etcd.runtime.block_on(node.store.join(record("a", "1"))).unwrap();
    assert_eq!(place(&placement("none", "a", 1), None), PlacementOutcome::Void, "no such site");
    assert_eq!(place(&first, Some(1)), PlacementOutcome::Lost(None));
    assert_eq!(place(&first, None), PlacementOutcome::Won);
    assert_eq!(place(&first, None), PlacementOutcome::Lost(Some(first.clone())));
    // Epochs whose decimal forms begin alike are not taken for each other.
    let tenth = placement("one", "a", 10);
    assert_eq!(place(&tenth, Some(1)), PlacementOutcome::Won);
    for seen in [0, 1, 9, 11, 100, u64::MAX] {
        assert_eq!(
            place(&placement("one", "a", 7), Some(seen)),
            PlacementOutcome::Lost(Some(tenth.clone())),
            "{seen}"
        );
    }
    let hundredth = placement("one", "a", 100);
    assert_eq!(place(&hundredth, Some(10)), PlacementOutcome::Won);
    assert_eq!(place(&tenth, Some(10)), PlacementOutcome::Lost(Some(hundredth)));
}

/// With sites `one` and `two`, members `a` and `b`, and `one` placed on `a`, then on `b`.
fn with_one_moved(etcd: &Etcd, node: &Node) {
    with_sites(node, &["one", "two"]);
    let store = &node.store;
    let a = name("a");
    etcd.runtime.block_on(async {
        store.join(record("a", "1")).await.unwrap();
        store.join(record("b", "2")).await.unwrap();
        assert_eq!(store.place(placement("one", "a", 1), None, None).await.unwrap(), PlacementOutcome::Won);
        assert_eq!(
            store.place(placement("one", "b", 2), Some(1), Some(&a)).await.unwrap(),
            PlacementOutcome::Won
        );
    });
    node.until("the placement", |store| store.placement("one").unwrap().is_some_and(|it| it.epoch == 2));
}

fn drop_site(node: &Node, site: &str) {
    node.store
        .transaction(vec![RecordChange::DropSite(SiteName::new(site).unwrap())], ChangeMode::Merge)
        .unwrap();
}

#[test]
fn a_site_removed_and_added_again_goes_on_from_its_epoch() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let node = etcd.node(&cluster);
    let other = etcd.node(&cluster);
    with_one_moved(&etcd, &node);
    let left_by_b = || match etcd.runtime.block_on(node.store.confirm(&name("b"), "2", PATIENCE)).unwrap() {
        RecordOwner::Ours { left_at, .. } => left_at,
        confirmed => panic!("{confirmed:?}"),
    };
    assert_eq!(left_by_b(), 0);
    drop_site(&node, "one");
    other.until("the removal", |store| store.site("one").unwrap().is_none());
    other.in_step(&etcd);
    let second = placement("one", "b", 2);
    for node in [&node, &other] {
        assert_eq!(node.store.placement("one").unwrap().as_ref(), Some(&second));
        node.is_fed();
    }
    let place = |wanted: &Placement, seen, from: Option<&NodeName>| {
        etcd.runtime.block_on(other.store.place(wanted.clone(), seen, from)).unwrap()
    };
    assert_eq!(
        place(&placement("one", "a", 3), Some(2), None),
        PlacementOutcome::Void,
        "there is no such site"
    );
    node.store.transaction(vec![put_site("one", "t", "again.test")], ChangeMode::Merge).unwrap();
    // As if it were the first: then `b`, which may be cut off and serve on, would lose it without a word.
    assert_eq!(place(&placement("one", "a", 1), None, None), PlacementOutcome::Lost(Some(second)));
    assert_eq!(left_by_b(), 0);
    let third = placement("one", "a", 3);
    assert_eq!(place(&third, Some(2), Some(&name("b"))), PlacementOutcome::Won);
    // From now on `b` serves only with a copy that is as new as its loss.
    assert!(left_by_b() > 0);
    node.until("the placement", |store| store.placement("one").unwrap().as_ref() == Some(&third));
    node.is_fed();
}

#[test]
fn a_tombstone_is_forgotten_by_epoch_and_without_its_site() {
    let etcd = Etcd::start(1);
    let node = etcd.node(&etcd.cluster());
    with_one_moved(&etcd, &node);
    let first = placement("one", "a", 1);
    let second = placement("one", "b", 2);
    let forget = |placement: &Placement| etcd.runtime.block_on(node.store.forget(placement)).unwrap();
    assert!(!forget(&second), "the site is there");
    drop_site(&node, "one");
    assert!(!forget(&first), "of an epoch that is over");
    assert!(forget(&second));
    assert!(!forget(&second), "it is gone");
    node.until("it is gone", |store| store.placement("one").unwrap().is_none());
    node.is_fed();
    node.store.transaction(vec![put_site("one", "t", "again.test")], ChangeMode::Merge).unwrap();
    let placed = etcd.runtime.block_on(node.store.place(first, None, None)).unwrap();
    assert_eq!(placed, PlacementOutcome::Won, "nothing is left of the name");
}

#[test]
fn a_dead_nodes_tombstone_goes_to_another_node_with_care() {
    let etcd = Etcd::start(1);
    let node = etcd.node(&etcd.cluster());
    with_one_moved(&etcd, &node);
    let a = name("a");
    let b = name("b");
    let c = name("c");
    let third = placement("one", "a", 3);
    etcd.runtime.block_on(async {
        let store = &node.store;
        assert!(!store.inherit(third.clone(), &b, &a).await.unwrap(), "the site is there");
        store
            .transaction(vec![RecordChange::DropSite(SiteName::new("one").unwrap())], ChangeMode::Merge)
            .unwrap();
        assert!(!store.inherit(placement("one", "a", 2), &b, &a).await.unwrap(), "the epoch before is over");
        assert!(!store.inherit(placement("one", "c", 3), &b, &c).await.unwrap(), "no such node");
        assert!(store.inherit(third.clone(), &b, &a).await.unwrap());
        assert!(!store.inherit(third.clone(), &b, &a).await.unwrap(), "once");
        let confirmed = store.confirm(&b, "2", PATIENCE).await.unwrap();
        assert!(matches!(confirmed, RecordOwner::Ours { left_at: 1.., .. }), "{confirmed:?}");
        // It keeps nobody from leaving.
        node.until("it", |store| store.placement("one").unwrap().as_ref() == Some(&third));
        store.remove(&a, false).await.unwrap();
        assert!(store.forget(&third).await.unwrap());
    });
    node.until("it is gone", |store| store.placement("one").unwrap().is_none());
    node.is_fed();
}

#[test]
fn copies_are_compared_and_set_and_keep_their_nodes() {
    let etcd = Etcd::start(1);
    let node = etcd.node(&etcd.cluster());
    with_one_moved(&etcd, &node);
    let a = name("a");
    let b = name("b");
    let second = placement("one", "b", 2);
    let both = second.with_copy(a.clone(), 7, 303);
    let place = |next: &Placement, seen, from| {
        etcd.runtime.block_on(node.store.place(next.clone(), Some(seen), from)).unwrap()
    };
    let left = |node_: &NodeName, id| match etcd.runtime.block_on(node.store.confirm(node_, id, PATIENCE)) {
        Ok(RecordOwner::Ours { left_at, .. }) => left_at,
        other => panic!("{other:?}"),
    };
    let before = (left(&a, "1"), left(&b, "2"));
    assert_eq!(place(&both, 2, None), PlacementOutcome::Won);
    assert_eq!((left(&a, "1"), left(&b, "2")), before, "nobody has lost anything");
    // Who has not heard of the copy cannot write over it.
    assert_eq!(
        place(&second.with_copy(a.clone(), 8, 0), 2, None),
        PlacementOutcome::Lost(Some(both.clone()))
    );
    let now = || etcd.runtime.block_on(node.store.placement_now(&both.site)).unwrap();
    assert_eq!(now().as_ref(), Some(&both));
    node.until("it", |store| store.placement("one").unwrap().as_ref() == Some(&both));
    let refused = etcd.runtime.block_on(node.store.remove(&a, false)).unwrap_err();
    assert!(matches!(refused, ClusterError::NodeInUse { count: 1, .. }), "{refused}");
    let promoted = both.without(&b, 9, nagaya_records::PlacementReason::Silent).unwrap();
    assert_eq!(place(&promoted, 3, Some(&b)), PlacementOutcome::Won);
    assert!(left(&b, "2") > before.1 && left(&a, "1") == before.0, "who has lost it must know");
    node.until("it", |store| store.placement("one").unwrap().as_ref() == Some(&promoted));
    node.is_fed();
}

// === Nodes ===

#[test]
fn of_two_machines_that_claim_one_name_the_second_is_told() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let nodes = [etcd.node(&cluster), etcd.node(&cluster)];
    let store = &nodes[0].store;
    etcd.runtime.block_on(async {
        store.join(record("a", "first")).await.unwrap();
        let error = nodes[1].store.join(record("a", "second")).await.unwrap_err();
        assert!(matches!(error, ClusterError::NameTaken { .. }), "{error}");
        assert_eq!(error.code().0, 235);
        // The first one comes back with a new version, and is still being drained.
        store.set_draining(&name("a"), true).await.unwrap();
        store.join(NodeRecord { version: "0.2.0".into(), ..record("a", "first") }).await.unwrap();
        let a = name("a");
        let ours = store.confirm(&a, "first", PATIENCE).await.unwrap();
        let RecordOwner::Ours { draining: true, left_at: 0, since, revision } = ours else {
            panic!("{ours:?}");
        };
        assert!(0 < since && since < revision, "{ours:?}");
        // What it has said holds when it comes back, and is never less.
        store.knows(&a, "first", 7).await.unwrap();
        store.knows(&a, "first", 5).await.unwrap();
        store.join(record("a", "first")).await.unwrap();
        assert!(matches!(store.knows(&a, "second", 9).await, Err(ClusterError::NameTaken { .. })));
        let again = store.confirm(&a, "first", PATIENCE).await.unwrap();
        assert!(matches!(again, RecordOwner::Ours { since: same, .. } if same == since), "{again:?}");
        assert_eq!(store.confirm(&a, "second", PATIENCE).await.unwrap(), RecordOwner::Anothers);
    });
    nodes[1].until("the node", |store| {
        store
            .node("a")
            .unwrap()
            .is_some_and(|node| node.draining && node.version == "0.1.0" && node.knows == 7)
    });
}

#[test]
fn a_node_that_loses_a_site_is_told_since_when() {
    let etcd = Etcd::start(1);
    let node = etcd.node(&etcd.cluster());
    let store = &node.store;
    with_sites(&node, &["one"]);
    let a = name("a");
    etcd.runtime.block_on(async {
        store.join(record("a", "1")).await.unwrap();
        store.join(record("b", "2")).await.unwrap();
        store.place(placement("one", "a", 1), None, None).await.unwrap();
        let before = store.confirm(&a, "1", PATIENCE).await.unwrap();
        assert!(matches!(before, RecordOwner::Ours { draining: false, left_at: 0, .. }), "{before:?}");
        store.place(placement("one", "b", 2), Some(1), Some(&a)).await.unwrap();
        let RecordOwner::Ours { left_at, .. } = store.confirm(&a, "1", PATIENCE).await.unwrap() else {
            panic!("the record is still a's");
        };
        assert!(left_at > 0);
        let now = store.placement_now(&SiteName::new("one").unwrap()).await.unwrap().unwrap();
        assert_eq!((now.node, now.epoch), (name("b"), 2));
        // Who has applied that revision knows that the site is elsewhere.
        node.until("it is applied", |store| store.applied() >= left_at);
        assert_eq!(store.placement("one").unwrap().unwrap().epoch, 2);
    });
}

fn by_mark(mark: u64) -> PlacementBasis {
    PlacementBasis { mark: Some(mark), ..PlacementBasis::default() }
}

/// A placement that relies on a mark is written only as long as the node has not looked since, and only over one that is older.
#[test]
fn a_mark_stands_until_its_node_looks_at_older_placements() {
    let etcd = Etcd::start(1);
    let node = etcd.node(&etcd.cluster());
    let store = &node.store;
    with_sites(&node, &["one", "two"]);
    let a = name("a");
    let b = name("b");
    let c = name("c");
    let a_record = record("a", "1");
    let b_record = record("b", "2");
    let take = async |site, from, mark| {
        store.place_on(placement(site, "b", 2), Some(1), Some(from), by_mark(mark)).await.unwrap()
    };
    etcd.runtime.block_on(async {
        assert_eq!(store.mark_suspect(&a_record, &b).await.unwrap(), None, "no such node");
        store.join(a_record.clone()).await.unwrap();
        store.join(b_record.clone()).await.unwrap();
        store.place(placement("one", "a", 1), None, None).await.unwrap();
        let first = store.mark_suspect(&a_record, &b).await.unwrap().unwrap();
        assert_eq!(store.mark_suspect(&a_record, &c).await.unwrap(), Some(first), "it stands");
        assert_eq!(store.confirm(&a, "another machine", PATIENCE).await.unwrap(), RecordOwner::Anothers);
        let again = store.mark_suspect(&a_record, &b).await.unwrap();
        assert_eq!(again, Some(first), "who is not it does not take it away");

        store.place(placement("two", "a", 1), None, None).await.unwrap();
        assert_eq!(take("two", &a, first).await, PlacementOutcome::Otherwise, "it has got it since");
        assert_eq!(take("one", &b, first).await, PlacementOutcome::Otherwise, "it is of another node");

        let before = store.confirm(&a, "1", PATIENCE).await.unwrap();
        let RecordOwner::Ours { revision, .. } = before else { panic!("{before:?}") };
        assert!(revision > first, "what it knows by that is newer than the mark");
        assert_eq!(take("one", &a, first).await, PlacementOutcome::Otherwise, "it has looked");

        let second = store.mark_suspect(&a_record, &b).await.unwrap().unwrap();
        assert!(second > first);
        for site in ["one", "two"] {
            assert_eq!(take(site, &a, second).await, PlacementOutcome::Won, "{site}");
        }
        let after = store.confirm(&a, "1", PATIENCE).await.unwrap();
        assert!(matches!(after, RecordOwner::Ours { left_at, .. } if left_at > second), "{after:?}");

        store.mark_suspect(&a_record, &b).await.unwrap();
        store.remove(&a, true).await.unwrap();
        store.join(record("a", "3")).await.unwrap();
        assert_eq!(
            store.mark_suspect(&a_record, &b).await.unwrap(),
            None,
            "that machine is no member any more"
        );
        let third = store.mark_suspect(&record("a", "3"), &b).await.unwrap().unwrap();
        assert!(third > second, "a mark goes with its node");
    });
    node.in_step(&etcd);
    node.is_fed();
}

/// What a program makes of a mark, its node's record says: so a mark counts only for what was running when it was made.
#[test]
fn a_mark_ends_when_its_node_writes_its_record_anew() {
    let etcd = Etcd::start(1);
    let node = etcd.node(&etcd.cluster());
    let store = &node.store;
    with_sites(&node, &["one"]);
    let a = name("a");
    let b = name("b");
    let older = NodeRecord { heeds_marks: false, fence_ms: 0, ..record("a", "1") };
    etcd.runtime.block_on(async {
        store.join(record("a", "1")).await.unwrap();
        store.join(record("b", "2")).await.unwrap();
        store.place(placement("one", "a", 1), None, None).await.unwrap();
        let mark = store.mark_suspect(&record("a", "1"), &b).await.unwrap().unwrap();
        // It is started anew, the same as it was. The mark stands, and who has an older copy is told so.
        assert_eq!(store.join(record("a", "1")).await.unwrap(), record("a", "1"));
        assert_eq!(store.mark_suspect(&record("a", "1"), &b).await.unwrap(), Some(mark));
        let taken = store.place_on(placement("one", "b", 2), Some(1), Some(&a), by_mark(mark)).await.unwrap();
        assert_eq!(taken, PlacementOutcome::Otherwise);
        store.confirm(&a, "1", PATIENCE).await.unwrap();
        store.join(older).await.unwrap();
        assert_eq!(
            store.mark_suspect(&record("a", "1"), &b).await.unwrap(),
            None,
            "it says something else by now"
        );
    });
    node.in_step(&etcd);
    node.is_fed();
}

/// A node is waited for as long as it says, so that is compared, and a node that shortens it says so when it has passed.
#[test]
fn a_site_is_taken_only_from_a_node_that_is_as_it_was_seen() {
    let etcd = Etcd::start(1);
    let node = etcd.node(&etcd.cluster());
    let store = &node.store;
    with_sites(&node, &["one"]);
    let a = name("a");
    let with_fence = |fence_ms| NodeRecord { fence_ms, ..record("a", "1") };
    let as_seen = |seen: SeenNode| PlacementBasis { from: Some(seen), ..PlacementBasis::default() };
    let take =
        async |basis| store.place_on(placement("one", "b", 2), Some(1), Some(&a), basis).await.unwrap();
    etcd.runtime.block_on(async {
        store.join(with_fence(300)).await.unwrap();
        store.join(record("b", "2")).await.unwrap();
        store.place(placement("one", "a", 1), None, None).await.unwrap();
        let before = SeenNode::Member(Box::new(with_fence(300)));
        assert_eq!(store.read_node(&a).await.unwrap(), Some(before.clone()));
        assert_eq!(store.join(with_fence(900)).await.unwrap(), with_fence(900), "longer: at once");
        assert_eq!(take(as_seen(before)).await, PlacementOutcome::Otherwise);
        assert_eq!(store.join(with_fence(100)).await.unwrap(), with_fence(900), "shorter: later");
        store.set_fence(&a, "1", 100).await.unwrap();
        assert!(matches!(store.set_fence(&a, "2", 100).await, Err(ClusterError::NameTaken { .. })));
        assert_eq!(store.join(with_fence(100)).await.unwrap(), with_fence(100));

        store.remove(&a, true).await.unwrap();
        let removed = SeenNode::Removed { fence_ms: 100 };
        assert_eq!(store.read_node(&a).await.unwrap(), Some(removed.clone()), "it may not know yet");
        let other = as_seen(SeenNode::Removed { fence_ms: 300 });
        assert_eq!(take(other).await, PlacementOutcome::Otherwise);
        store.join(record("a", "3")).await.unwrap();
        assert_eq!(
            take(as_seen(removed.clone())).await,
            PlacementOutcome::Otherwise,
            "there is one of this name again"
        );
        store.remove(&a, true).await.unwrap();
        store.join(with_fence(100)).await.unwrap();
        store.remove(&a, true).await.unwrap();
        assert_eq!(take(as_seen(removed)).await, PlacementOutcome::Won);
        assert_eq!(store.read_node(&name("nobody")).await.unwrap(), None);
    });
    node.in_step(&etcd);
    node.is_fed();
}

#[test]
fn a_placement_expected_old_is_not_followed_once_rewritten() {
    let etcd = Etcd::start(1);
    let node = etcd.node(&etcd.cluster());
    let store = &node.store;
    with_sites(&node, &["one"]);
    let a = name("a");
    etcd.runtime.block_on(async {
        store.join(record("a", "1")).await.unwrap();
        store.join(record("b", "2")).await.unwrap();
        let RecordOwner::Ours { revision: early, .. } = store.confirm(&a, "1", PATIENCE).await.unwrap()
        else {
            panic!("the record is a's");
        };
        store.place(placement("one", "a", 1), None, None).await.unwrap();
        let by = |revision| PlacementBasis { written_by: Some(revision), ..PlacementBasis::default() };
        let next = placement("one", "b", 2);
        let placed = store.place_on(next.clone(), Some(1), None, by(early)).await.unwrap();
        assert_eq!(placed, PlacementOutcome::Otherwise);
        let placed = store.place_on(next.clone(), Some(1), None, by(early + 1)).await.unwrap();
        assert_eq!(placed, PlacementOutcome::Won);
        let late = store.place_on(placement("one", "a", 2), Some(1), None, by(early)).await.unwrap();
        assert_eq!(late, PlacementOutcome::Lost(Some(next)), "that comes first");
    });
    node.in_step(&etcd);
    node.is_fed();
}

#[test]
fn a_node_leaves_only_when_no_application_is_on_it_or_by_force() {
    let etcd = Etcd::start(1);
    let node = etcd.node(&etcd.cluster());
    let store = &node.store;
    with_sites(&node, &["one", "two"]);
    let a = name("a");
    etcd.runtime.block_on(async {
        assert_eq!(store.remove(&a, false).await, Err(ClusterError::NoNode { name: "a".into() }));
        assert_eq!(store.set_draining(&a, true).await, Err(ClusterError::NoNode { name: "a".into() }));
        store.join(record("a", "1")).await.unwrap();
        store.join(record("b", "2")).await.unwrap();
        assert_eq!(store.place(placement("one", "a", 1), None, None).await.unwrap(), PlacementOutcome::Won);
        let refused = store.remove(&a, false).await.unwrap_err();
        let used = ClusterError::NodeInUse { name: "a".into(), count: 1, first: "one".into() };
        assert_eq!(refused, used);
        assert_eq!(
            store.place(placement("one", "b", 2), Some(1), None).await.unwrap(),
            PlacementOutcome::Won
        );
        store.remove(&a, false).await.unwrap();
        assert_eq!(store.confirm(&a, "1", PATIENCE).await.unwrap(), RecordOwner::Gone);
        assert_eq!(store.place(placement("two", "a", 1), None, None).await.unwrap(), PlacementOutcome::Void);
        store.remove(&name("b"), true).await.unwrap();
    });
    node.until("both are gone", |store| store.nodes().unwrap().is_empty());
    assert_eq!(store.placement("one").unwrap(), Some(placement("one", "b", 2)));
    node.is_fed();
}

#[test]
fn a_node_is_seen_with_its_load_until_its_lease_ends() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let a = etcd.node(&cluster);
    let b = etcd.node(&cluster);
    let seen = |node: &Node| -> Vec<(String, String)> {
        node.store.presences().into_iter().map(|it| (it.node.to_string(), it.json)).collect()
    };
    let ttl = Duration::from_secs(2);
    a.store.present(&name("a"), r#"{"load":1}"#.into(), ttl).unwrap();
    b.store.present(&name("b"), "{}".into(), ttl).unwrap();
    until("both are seen", || seen(&b).len() == 2 && seen(&a) == seen(&b));
    a.store.present(&name("a"), r#"{"load":2}"#.into(), ttl).unwrap();
    until("the new load", || seen(&b)[0].1 == r#"{"load":2}"#);
    // Renewed for longer than it lasts by itself.
    let since = std::time::Instant::now();
    until("some terms of the lease", || {
        assert_eq!(seen(&b).len(), 2, "a lease was not renewed");
        since.elapsed() > 3 * ttl
    });
    b.store.absent();
    until("one is gone at once", || seen(&a).len() == 1);
    drop(a.close());
    until("the other's lease has run out", || seen(&b).is_empty());
    let long = "x".repeat(PRESENCE_LEN_MAX + 1);
    assert!(b.store.present(&name("b"), long, ttl).is_err());
}

// === Small values ===

#[test]
fn a_value_is_replaced_only_by_who_has_seen_it() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let a = etcd.node(&cluster);
    let b = etcd.node(&cluster);
    b.in_step(&etcd);
    let mut changes = b.store.pki_changes();
    etcd.runtime.block_on(async {
        assert_eq!(a.store.get("ca/cert").await.unwrap(), None);
        assert!(a.store.put_if("ca/cert", b"1".to_vec(), None).await.unwrap());
        assert!(!b.store.put_if("ca/cert", b"2".to_vec(), None).await.unwrap());
        tokio::time::timeout(PATIENCE, changes.changed()).await.unwrap().unwrap();
        let found = b.store.get("ca/cert").await.unwrap().unwrap();
        assert_eq!((found.value.as_slice(), found.revision), (&b"1"[..], *changes.borrow_and_update()));
        assert!(b.store.put_if("ca/cert", b"2".to_vec(), Some(found.revision)).await.unwrap());
        assert!(!a.store.put_if("ca/cert", b"3".to_vec(), Some(found.revision)).await.unwrap());
        let long = vec![0; PKI_VALUE_LEN_MAX + 1];
        assert_eq!(a.store.put_if("long", long, None).await.unwrap_err().code().0, 232);
    });
}

// === Formats and seeding ===

fn lines(sites: usize) -> String {
    let mut text = r#"{"tenant":{"name":"t","uid":9,"gid":9,"home":"/srv/t"}}"#.to_owned();
    for n in 0..sites {
        text.push_str(&format!(
            "\n{{\"site\":{{\"name\":\"s{n}\",\"tenant\":\"t\",\"hosts\":[\"s{n}.test\"],\"backend\":{{\"kind\":\"static\",\"root\":\"s{n}\"}}}}}}"
        ));
    }
    text.push_str("\n{\"setting\":{\"key\":\"a/b c\",\"value\":\"v\"}}");
    text
}

#[test]
fn an_embedded_store_moves_into_an_empty_cluster_only() {
    let etcd = Etcd::start(1);
    let (from, _directory) = replica();
    import(&from, lines(1000).as_bytes(), ChangeMode::Merge).unwrap();
    let uid = from.allocate_uid(5000).unwrap();
    let options = etcd.options("moved");
    let initialised = || etcd.runtime.block_on(is_initialised(&options)).unwrap();
    assert!(!initialised());
    // A node that is there before the cluster serves what it has, and takes nothing away.
    let (early, directory) = replica();
    import(&early, lines(1).as_bytes(), ChangeMode::Merge).unwrap();
    let early = Node::open_with(&options, early, directory);
    early.until("it says what is missing", |store| {
        matches!(store.trouble(), Some(ClusterError::NotInitialised { .. }))
    });
    let error = early.store.transaction(vec![setting("a", "b")], ChangeMode::Merge).unwrap_err();
    assert_eq!(error.code().0, 234, "{error}");
    assert_eq!(early.store.counts().unwrap().sites, 1);
    etcd.runtime.block_on(seed(&options, &rig::record_keys(), &[], &from)).unwrap();
    assert!(initialised());
    early.until("the records", |store| store.counts().unwrap().sites == 1000);
    early.in_step(&etcd);
    assert!(text(&*early.store) == text(&from), "they differ");
    assert_eq!(early.store.allocate_uid(5000).unwrap(), uid + 1, "what was given out stays so");
    early.is_fed();
    let error = etcd.runtime.block_on(seed(&options, &rig::record_keys(), &[], &from)).unwrap_err();
    assert!(matches!(error, StoreError::Cluster(ClusterError::NotEmpty { .. })), "{error}");
    assert_eq!(error.code().0, 234);
}

#[test]
fn an_interrupted_seeding_restarts_and_is_no_cluster_yet() {
    let etcd = Etcd::start(1);
    let (from, _directory) = replica();
    import(&from, lines(2000).as_bytes(), ChangeMode::Merge).unwrap();
    let options = etcd.options("half");
    let keys = KeySpace::new("half");
    let there = || -> usize {
        let all = wire::RangeRequest {
            key: keys.all().into(),
            range_end: keys::after_all(&keys.all()),
            ..Default::default()
        };
        etcd.runtime.block_on(async {
            let client = EtcdClient::new(&options).unwrap();
            client.ask::<_, wire::RangeResponse>(client::RANGE, all, PATIENCE).await.unwrap().value.kvs.len()
        })
    };
    // Given up as soon as some of it is there, as when the process is killed.
    etcd.runtime.block_on(async {
        let record_keys = rig::record_keys();
        let filling = seed(&options, &record_keys, &[], &from);
        let some_is_there = async {
            let client = EtcdClient::new(&options).unwrap();
            loop {
                let site = keys::get(&keys.record(crate::RecordKind::Site, "s1000"));
                let found: wire::RangeResponse =
                    client.ask(client::RANGE, site, PATIENCE).await.unwrap().value;
                if !found.kvs.is_empty() {
                    break;
                }
            }
        };
        tokio::select! {
            biased;
            () = some_is_there => {}
            done = filling => panic!("it was not interrupted: {done:?}"),
        }
    });
    assert!((100..2003).contains(&there()), "{}", there());
    assert!(!etcd.runtime.block_on(is_initialised(&options)).unwrap());
    let node = etcd.node("half");
    node.until("it says so", |store| matches!(store.trouble(), Some(ClusterError::BeingFilled { .. })));
    assert_eq!(node.store.counts().unwrap().sites, 0);
    // Meanwhile the embedded store has lost a site that was there already.
    from.transaction(vec![RecordChange::DropSite(SiteName::new("s1000").unwrap())], ChangeMode::Merge)
        .unwrap();
    etcd.runtime.block_on(seed(&options, &rig::record_keys(), &[], &from)).unwrap();
    node.until("all of it", |store| store.counts().unwrap().sites == 1999);
    assert_eq!(text(&*node.store), text(&from));
    node.is_fed();
}

#[test]
fn a_newer_format_is_refused_and_nothing_is_touched() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let node = etcd.node(&cluster);
    with_sites(&node, &["one"]);
    let keys = KeySpace::new(&cluster);
    // As another version's migration would leave it, under the eyes of a node of this one.
    etcd.write(vec![
        keys::putting(&keys.format(), (keys::FORMAT + 1).to_string()),
        keys::deleting_all(&keys.records(crate::RecordKind::Site)),
    ]);
    let knows = |store: &ClusterStore| matches!(store.trouble(), Some(ClusterError::Version { .. }));
    node.until("it says so", knows);
    let before = etcd.write(Vec::new());
    let error = node.store.transaction(vec![setting("a", "b")], ChangeMode::Merge).unwrap_err();
    assert_eq!(error.code().0, 233, "{error}");
    assert_eq!(node.store.counts().unwrap().sites, 1, "what was known is still served");
    let late = etcd.node(&cluster);
    late.until("it says so too", knows);
    let (from, _directory) = replica();
    let options = etcd.options(&cluster);
    assert_eq!(
        etcd.runtime.block_on(seed(&options, &rig::record_keys(), &[], &from)).unwrap_err().code().0,
        233
    );
    assert_eq!(etcd.runtime.block_on(is_initialised(&options)).unwrap_err().code().0, 233);
    assert_eq!(etcd.write(Vec::new()), before, "somebody wrote");
}

// === Differences ===

/// One of few records, so that histories meet.
fn any_change() -> impl Strategy<Value = RecordChange> {
    let site = 0..6_u8;
    let tenant = 0..3_u8;
    prop_oneof![
        4 => (site.clone(), tenant.clone(), 0..6_u8)
            .prop_map(|(s, t, h)| put_site(&format!("s{s}"), &format!("t{t}"), &format!("h{h}.test"))),
        2 => site.prop_map(|s| RecordChange::DropSite(SiteName::new(&format!("s{s}")).unwrap())),
        2 => (tenant.clone(), 1..5_u32).prop_map(|(t, uid)| put_tenant(&format!("t{t}"), uid)),
        1 => tenant.prop_map(|t| RecordChange::DropTenant(TenantName::new(&format!("t{t}")).unwrap())),
        2 => (0..4_u8, 0..3_u8).prop_map(|(k, v)| setting(&format!("k{k}"), &format!("{v}"))),
        1 => (0..2_u8, 0..3_u8).prop_map(|(r, v)| rule(&format!("r{r}"), &format!("{v}"))),
    ]
}

/// What the changes that are allowed have made, by their text.
fn model(store: &dyn Store) -> BTreeMap<String, String> {
    text(store).lines().map(|line| (line.split(['"', ',']).take(7).collect(), line.to_owned())).collect()
}

#[test]
fn after_any_history_missed_a_node_is_told_only_what_differs() {
    let etcd = Etcd::start(1);
    let strategy = (
        proptest::collection::vec(any_change(), 1..30),
        proptest::collection::vec(any_change(), 0..30),
        any::<bool>(),
    );
    let mut runner = TestRunner::new(ProptestConfig::with_cases(24));
    let seen = |node: &Node, changes: &[RecordChange]| {
        for change in changes {
            // Many are refused; those are part of no history.
            let _ = node.store.transaction(vec![change.clone()], ChangeMode::Merge);
        }
    };
    runner
        .run(&strategy, |(first, missed, compacted)| {
            let cluster = etcd.cluster();
            let writer = etcd.node(&cluster);
            let reader = etcd.node(&cluster);
            seen(&writer, &first);
            reader.in_step(&etcd);
            reader.is_fed();
            let before = model(&*reader.store);
            let (file, directory) = reader.close();
            seen(&writer, &missed);
            if compacted {
                etcd.compact();
            }
            let reader = Node::open_with(&etcd.options(&cluster), file, directory);
            reader.in_step(&etcd);
            let after = model(&*writer.store);
            prop_assert_eq!(&model(&*reader.store), &after);
            reader.is_fed();
            let differs = |key: &&String| before.get(*key) != after.get(*key);
            let mut keys: Vec<&String> = before.keys().chain(after.keys()).filter(differs).collect();
            keys.sort_unstable();
            keys.dedup();
            prop_assert_eq!(reader.fed.lock().batches.iter().sum::<usize>(), keys.len());
            prop_assert!(reader.fed.lock().batches.len() <= 1);
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_record_that_cannot_be_read_stays_as_it_was_and_is_named() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let node = etcd.node(&cluster);
    with_sites(&node, &["one", "two"]);
    let keys = KeySpace::new(&cluster);
    let site = |name: &str| keys.record(crate::RecordKind::Site, name);
    let stolen = String::from_utf8(keys::json(&node.store.site("one").unwrap()))
        .unwrap()
        .replace("\"one\"", "\"two\"");
    etcd.write(vec![
        keys::putting(&site("one"), "{"),
        keys::putting(&site("two"), stolen),
        keys::putting(&site("A b"), "{}"),
    ]);
    etcd.write(vec![keys::putting(
        &keys.record(crate::RecordKind::Setting, "k"),
        r#"{"key":"k","value":"v"}"#,
    )]);
    node.until("what can be read", |store| store.setting("k").unwrap().is_some());
    assert_eq!(node.store.counts().unwrap().sites, 2);
    assert_eq!(node.store.site("two").unwrap().unwrap().hosts[0].as_str(), "two.test");
    assert_eq!(node.store.refusals().standing, 3, "{:?}", node.store.refusals());
    assert_eq!(node.store.trouble(), None);
    node.is_fed();
}
