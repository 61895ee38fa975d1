//! Whoever reaches etcd writes there: unsigned values, values of other keys, old ones; and reads what is there.
//!
//! Not here: signatures for themselves (`signed`), the running program (end-to-end tests).

use std::time::Duration;

use serde_json::json;

use super::rig::{Etcd, Node, RAW_SECRET, record_keys, sign, until};
use super::*;
use crate::RecordKind;
use nagaya_records::record::{TicketKey, TicketSecret};

/// A site whose record has a secret.
fn put_secret_site(site: &str, secret: &str) -> RecordChange {
    let site = json!({
        "name": site, "tenant": "t", "hosts": [format!("{site}.test")],
        "backend": { "kind": "app", "directory": "app", "command": ["./run"], "env": { "DB_PASS": secret } },
    });
    RecordChange::PutSite(serde_json::from_value(site).unwrap())
}

/// What an attacker would have the site be.
fn evil_site(site: &str) -> Vec<u8> {
    let RecordChange::PutSite(site) = put_site(site, "t", "evil.test") else { unreachable!("it is a site") };
    keys::json(&site)
}

fn host_of(node: &Node, site: &str) -> String {
    node.store.site(site).unwrap().unwrap().hosts[0].as_str().to_owned()
}

/// Until all that was written before is known.
fn settle(etcd: &Etcd, nodes: &[&Node], marker: &str) {
    nodes[0].store.transaction(vec![setting(marker, "v")], ChangeMode::Merge).unwrap();
    for node in nodes {
        node.until("the marker", |store| store.setting(marker).unwrap().is_some());
        node.in_step(etcd);
    }
}

#[test]
fn value_without_the_clusters_signature_changes_nothing() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let a = etcd.node(&cluster);
    let b = etcd.node(&cluster);
    with_sites(&a, &["one", "two"]);
    settle(&etcd, &[&a, &b], "before");
    let keys = KeySpace::new(&cluster);
    let one = keys.record(RecordKind::Site, "one");
    let other_cluster = "/nagaya/other/v1/sites/one";
    let wrong_key = {
        let keys = RecordKeys { current: (1, [9; RECORD_SECRET_LEN]), older: Vec::new() };
        let signer = ValueSigner::new(KeySpace::new(&cluster), RecordSigning::Required(keys));
        signer.sign(one.as_bytes(), evil_site("one"), 1).unwrap()
    };
    let two = etcd.read_raw(&keys.record(RecordKind::Site, "two")).unwrap().value;
    let attempts = [
        ("not signed", evil_site("one")),
        ("signature is wrong", wrong_key),
        ("signature is wrong", two),
        ("signature is wrong", sign(other_cluster.as_bytes(), &evil_site("one"), 1)),
        ("not signed", b"{".to_vec()),
        ("not signed", Vec::new()),
    ];
    for (n, (why, value)) in attempts.into_iter().enumerate() {
        etcd.write_raw(vec![keys::putting(&one, value)]);
        settle(&etcd, &[&a, &b], &format!("after-{n}"));
        for node in [&a, &b] {
            assert_eq!(host_of(node, "one"), "one.test", "attempt {n}");
            let refusals = node.store.refusals();
            assert_eq!(refusals.standing, 1, "{refusals:?}");
            assert!(
                refusals.shown[0].starts_with("sites/one: ") && refusals.shown[0].contains(why),
                "{refusals:?}"
            );
            assert!(refusals.total > 0);
        }
    }
    a.is_fed();
    // One that comes later knows nothing of the site, and nothing false.
    let late = etcd.node(&cluster);
    late.in_step(&etcd);
    assert!(late.store.site("one").unwrap().is_none());
    assert_eq!(host_of(&late, "two"), "two.test");
    assert_eq!(late.store.refusals().standing, 1);
    // A change by the cluster's own hand stands again.
    a.store.transaction(vec![put_site("one", "t", "new.test")], ChangeMode::Merge).unwrap();
    late.until("the site", |store| store.site("one").unwrap().is_some());
    for node in [&a, &b, &late] {
        node.until("nothing is refused", |store| store.refusals().standing == 0);
        assert_eq!(host_of(node, "one"), "new.test");
    }
}

#[test]
fn old_value_that_is_put_back_changes_nothing() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let a = etcd.node(&cluster);
    let b = etcd.node(&cluster);
    with_sites(&a, &["one"]);
    let key = KeySpace::new(&cluster).record(RecordKind::Site, "one");
    let old = etcd.read_raw(&key).unwrap().value;
    a.store.transaction(vec![put_site("one", "t", "new.test")], ChangeMode::Merge).unwrap();
    settle(&etcd, &[&a, &b], "changed");
    etcd.write_raw(vec![keys::putting(&key, old)]);
    settle(&etcd, &[&a, &b], "put-back");
    for node in [&a, &b] {
        assert_eq!(host_of(node, "one"), "new.test");
        assert!(node.store.refusals().shown[0].contains("old value"), "{:?}", node.store.refusals());
    }
    // A record that was removed does not come back either.
    a.store.transaction(vec![put_site("one", "t", "third.test")], ChangeMode::Merge).unwrap();
    settle(&etcd, &[&a, &b], "third");
    let last = etcd.read_raw(&key).unwrap().value;
    a.store
        .transaction(vec![RecordChange::DropSite(SiteName::new("one").unwrap())], ChangeMode::Merge)
        .unwrap();
    settle(&etcd, &[&a, &b], "removed");
    etcd.write_raw(vec![keys::putting(&key, last)]);
    settle(&etcd, &[&a, &b], "removed-put-back");
    for node in [&a, &b] {
        assert!(node.store.site("one").unwrap().is_none());
        assert_eq!(node.store.refusals().standing, 1);
    }
}

#[test]
fn format_before_signatures_is_not_gone_back_to() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let node = etcd.node(&cluster);
    with_sites(&node, &["one"]);
    let keys = KeySpace::new(&cluster);
    etcd.write_raw(vec![
        keys::putting(&keys.format(), "2"),
        keys::putting(&keys.record(RecordKind::Site, "one"), evil_site("one")),
        keys::putting(&keys.revision(), r#"{"count":9,"by":"0123456789abcdef"}"#),
    ]);
    let late = etcd.node(&cluster);
    for node in [&node, &late] {
        node.until("it says so", |store| matches!(store.trouble(), Some(ClusterError::Forged { .. })));
        assert_eq!(node.store.trouble().unwrap().code().0, 238);
    }
    assert_eq!(host_of(&node, "one"), "one.test");
    assert!(late.store.site("one").unwrap().is_none());
    let error = node.store.transaction(vec![setting("a", "b")], ChangeMode::Merge).unwrap_err();
    assert_eq!(error.code().0, 238, "{error}");
}

#[test]
fn etcd_shows_no_secret_to_its_readers() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let node = etcd.node(&cluster);
    with_sites(&node, &["one"]);
    let changes = vec![put_secret_site("app", RAW_SECRET), rule("r", RAW_SECRET), setting("k", RAW_SECRET)];
    node.store.transaction(changes, ChangeMode::Merge).unwrap();
    let key = TicketKey { id: 1, secret: TicketSecret([0x5e; 32]), made_ms: 1, ended_ms: None };
    let tickets = TicketKeys::next(None, 1, key).unwrap();
    let told = keys::json(&tickets);
    node.store.put_ticket_keys(tickets, None).unwrap().unwrap();
    let values = etcd.read_all_raw(&cluster);
    assert!(values.len() > 6, "{}", values.len());
    let digits = "5e".repeat(32);
    assert!(String::from_utf8_lossy(&told).contains(&digits), "the record has it in clear: {told:?}");
    for kv in &values {
        let key = String::from_utf8_lossy(&kv.key);
        let value = String::from_utf8_lossy(&kv.value);
        for secret in [RAW_SECRET, &digits, "DB_PASS"] {
            assert!(!value.contains(secret), "{key} shows {secret}");
        }
    }
    // Members read all of it.
    let other = etcd.node(&cluster);
    other.in_step(&etcd);
    assert_eq!(text(&*other.store), text(&*node.store));
    assert!(text(&*other.store).contains(RAW_SECRET));
    assert_eq!(other.store.ticket_keys().unwrap(), node.store.ticket_keys().unwrap());
}

#[test]
fn forged_members_and_placements_decide_nothing() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let node = etcd.node(&cluster);
    with_sites(&node, &["one"]);
    let keys = KeySpace::new(&cluster);
    let wait = Duration::from_secs(20);
    let site = SiteName::new("one").unwrap();
    etcd.runtime.block_on(async {
        node.store.join(record("a", "id-a")).await.unwrap();
        node.store.join(record("b", "id-b")).await.unwrap();
        assert_eq!(
            node.store.place(placement("one", "a", 1), None, None).await.unwrap(),
            PlacementOutcome::Won
        );
        node.store.in_step(wait).await.unwrap();
    });
    etcd.write_raw(vec![
        keys::putting(
            &keys.record(RecordKind::Placement, "one"),
            keys::placement_value(&placement("one", "b", 7)),
        ),
        keys::putting(&keys.record(RecordKind::Node, "a"), keys::json(&record("a", "id-evil"))),
        keys::putting(&keys.record(RecordKind::Node, "evil"), keys::json(&record("evil", "id-evil"))),
        keys::putting(&keys.removed(&name("c")), "1"),
        keys::putting(&keys.next_uid(), "1"),
        keys::putting(&keys.present(&name("b")), r#"{"cpu_used":0.0}"#),
    ]);
    settle(&etcd, &[&node], "after");
    assert_eq!(node.store.placement("one").unwrap().unwrap().node, name("a"));
    assert_eq!(node.store.node("a").unwrap().unwrap().id, "id-a");
    assert!(node.store.node("evil").unwrap().is_none());
    assert_eq!(node.store.presences(), []);
    etcd.runtime.block_on(async {
        let errors = [
            node.store.placement_now(&site).await.unwrap_err(),
            node.store.place(placement("one", "b", 2), Some(1), None).await.unwrap_err(),
            node.store.confirm(&name("a"), "id-evil", wait).await.unwrap_err(),
            node.store.read_node(&name("a")).await.unwrap_err(),
            node.store.read_node(&name("c")).await.unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.code().0, 238, "{error}");
        }
    });
    assert_eq!(node.store.allocate_uid(10).unwrap_err().code().0, 238);
    // What this node knows is put in its place.
    let done = etcd.runtime.block_on(node.store.repair()).unwrap();
    assert_eq!((done.repaired, done.refused), (5, 0), "{done:?}");
    let late = etcd.node(&cluster);
    late.in_step(&etcd);
    assert_eq!(late.store.placement("one").unwrap().unwrap().node, name("a"));
    assert_eq!(late.store.node("a").unwrap().unwrap().id, "id-a");
    assert!(late.store.node("evil").unwrap().is_none());
    let uid = late.store.allocate_uid(10).unwrap();
    assert!(uid >= 10, "{uid}");
    node.until("only the load of a node that is not there", |store| store.refusals().standing <= 1);
    etcd.runtime.block_on(async {
        let moved = node.store.place(placement("one", "b", 2), Some(1), None).await.unwrap();
        assert_eq!(moved, PlacementOutcome::Won);
    });
}

/// As a version that signs nothing left it, with a member `a`.
fn unsigned_cluster(etcd: &Etcd) -> String {
    let cluster = etcd.cluster();
    let keys = KeySpace::new(&cluster);
    let signer = ValueSigner::new(keys.clone(), RecordSigning::Required(record_keys()));
    let node = etcd.node(&cluster);
    let late = etcd.node(&cluster);
    with_sites(&node, &["one", "two"]);
    node.store.transaction(vec![put_secret_site("app", RAW_SECRET)], ChangeMode::Merge).unwrap();
    etcd.runtime.block_on(node.store.join(record("a", "id-a"))).unwrap();
    drop((node, late));
    let bare = |kv: wire::KeyValue| {
        let opened = signer.open(&kv.key, &kv.value, keys::unsigned(kv.mod_revision)).unwrap();
        keys::putting(str::from_utf8(&kv.key).unwrap(), opened.body)
    };
    let mut operations: Vec<_> = etcd.read_all_raw(&cluster).into_iter().map(bare).collect();
    operations.retain(|operation| {
        !matches!(&operation.request, Some(wire::RequestKind::Put(put)) if put.key == keys.format().as_bytes())
    });
    operations.push(keys::putting(&keys.format(), "2"));
    etcd.write_raw(operations);
    cluster
}

#[test]
fn cluster_of_an_older_version_is_signed_while_it_serves() {
    let etcd = Etcd::start(1);
    let cluster = unsigned_cluster(&etcd);
    let options = etcd.options(&cluster);
    let a = Node::open_signing(&options, RecordSigning::Unsigned);
    a.until("its records", |store| store.counts().unwrap().sites == 3);
    // Unsigned as before, until all members can read what is signed.
    a.store.transaction(vec![setting("old", "v")], ChangeMode::Merge).unwrap();
    let b = Node::open_signing(&options, RecordSigning::Optional(record_keys()));
    b.until("the setting", |store| store.setting("old").unwrap().is_some());
    a.store.set_record_keys(&record_keys());
    a.store.present(&name("a"), "{}".into(), Duration::from_secs(5)).unwrap();
    a.until("the format is raised", |store| store.format().holds == keys::FORMAT);
    b.until("both know it", |store| store.format().holds == keys::FORMAT);
    b.store.transaction(vec![setting("new", "v")], ChangeMode::Merge).unwrap();
    a.until("what was signed", |store| store.setting("new").unwrap().is_some());
    until("all is signed", || etcd.runtime.block_on(a.store.resign_all()).unwrap().is_complete());
    for node in [&a, &b] {
        node.store.require_signatures();
    }
    settle(&etcd, &[&a, &b], "required");
    for node in [&a, &b] {
        // Its own load a node tells anew.
        node.until("nothing is refused", |store| store.refusals().standing == 0);
    }
    let late = etcd.node(&cluster);
    late.in_step(&etcd);
    assert_eq!(text(&*late.store), text(&*a.store));
    for kv in etcd.read_all_raw(&cluster) {
        assert!(!String::from_utf8_lossy(&kv.value).contains(RAW_SECRET));
    }
    // From then on the old form does not count any more.
    etcd.write_raw(vec![keys::putting(
        &KeySpace::new(&cluster).record(RecordKind::Site, "one"),
        evil_site("one"),
    )]);
    settle(&etcd, &[&a, &b], "after");
    assert_eq!(host_of(&b, "one"), "one.test");
    assert_eq!(b.store.refusals().standing, 1);
}

#[test]
fn records_go_over_to_a_new_key_while_nodes_have_both() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let a = etcd.node(&cluster);
    let b = etcd.node(&cluster);
    let sites: Vec<String> = (0..250).map(|n| format!("s{n}")).collect();
    with_sites(&a, &sites.iter().map(String::as_str).collect::<Vec<_>>());
    let new = (2, [8; RECORD_SECRET_LEN]);
    let both = RecordKeys { current: new, older: vec![record_keys().current] };
    // Who has not heard of the new key goes by the old one alone, and catches up.
    a.store.set_record_keys(&both);
    a.store.transaction(vec![setting("by-new", "v")], ChangeMode::Merge).unwrap();
    b.store.set_record_keys(&both);
    b.until("what the new key signed", |store| store.setting("by-new").unwrap().is_some());
    let first = etcd.runtime.block_on(a.store.resign_all()).unwrap();
    assert!(first.written >= 250, "{first:?}");
    until("nothing of the old key", || etcd.runtime.block_on(a.store.resign_all()).unwrap().is_complete());
    let alone = RecordKeys { current: new, older: Vec::new() };
    let late = Node::open_signing(&etcd.options(&cluster), RecordSigning::Required(alone.clone()));
    late.in_step(&etcd);
    assert_eq!(text(&*late.store), text(&*a.store));
    b.store.set_record_keys(&alone);
    settle(&etcd, &[&a, &b], "alone");
    assert_eq!(b.store.refusals().standing, 0, "{:?}", b.store.refusals());
    b.is_fed();
    // What the old key signs does not count any more.
    let key = KeySpace::new(&cluster).record(RecordKind::Site, "s1");
    let known = etcd.write_raw(Vec::new());
    etcd.write_raw(vec![keys::putting(&key, sign(key.as_bytes(), &evil_site("s1"), known))]);
    settle(&etcd, &[&a, &b], "old-key");
    assert_eq!(host_of(&b, "s1"), "s1.test");
}

#[test]
fn store_that_others_reach_is_refused_unless_it_is_named() {
    let options = |endpoint: &str, login: bool, insecure: bool| EtcdOptions {
        endpoints: vec![endpoint.into()],
        cluster: "c".into(),
        ca: None,
        identity: None,
        login: login.then(|| ("user".into(), "password".into())),
        insecure,
    };
    for (endpoint, login, parts) in [
        ("http://127.0.0.1:1", false, &["clear text", "without a client certificate"][..]),
        ("http://10.0.0.9:1", true, &["clear text"][..]),
        ("https://10.0.0.9:1", false, &["without a client certificate"][..]),
    ] {
        let (replica, _directory) = replica();
        let refused = options(endpoint, login, false);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        // As the supervisor does, within a runtime of its own.
        let opened = runtime.block_on(async {
            ClusterStore::open(&refused, RecordSigning::Unsigned, Arc::new(replica), Arc::new(|_, _| {}))
        });
        let error = opened.err().unwrap();
        assert_eq!(error.code().0, 239, "{error}");
        for part in parts {
            assert!(error.to_string().contains(part), "{error}");
        }
        assert!(options(endpoint, login, true).check_access().is_ok());
        assert!(options(endpoint, login, true).weakness().is_some(), "it is said all the same");
    }
    assert_eq!(options("https://10.0.0.9:1", true, false).weakness(), None);
}
