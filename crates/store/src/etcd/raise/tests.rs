//! A cluster of format 1 against a real etcd: nodes of this version are in it beside older ones, which know nothing newer.
//!
//! Not here: newer formats than this program's (`etcd::tests`).

use super::*;
use crate::etcd::RecordSigning;
use crate::etcd::tests::rig::{Etcd, Node, PATIENCE, record_keys, until};
use crate::{ChangeMode, Store, TransactionError, suite};
use nagaya_records::record::{RecordChange, RuleRecord, Setting};
use nagaya_records::{RuleName, SettingValue};

/// How long a node is there after its last word.
const TTL: Duration = Duration::from_secs(5);

/// The records of [`suite`] and these members, as the program that knew only format 1 wrote them.
fn format_1(etcd: &Etcd, members: &[&str]) -> String {
    let cluster = etcd.cluster();
    let keys = keys::KeySpace::new(&cluster);
    let record = |kind, (name, json): (&str, &str)| keys::putting(&keys.record(kind, name), json);
    let mut operations = vec![
        keys::putting(&keys.format(), "1"),
        keys::putting(&keys.revision(), r#"{"count":1,"by":"0123456789abcdef"}"#),
        record(RecordKind::Tenant, suite::OLD_TENANT),
        record(RecordKind::Site, suite::OLD_SITE),
        record(RecordKind::Setting, suite::OLD_SETTING),
    ];
    operations.extend(members.iter().map(|member| record(RecordKind::Node, (member, &node_json(member)))));
    etcd.write_raw(operations);
    cluster
}

fn node_json(name: &str) -> String {
    format!(
        r#"{{"name":"{name}","id":"{name}","peer":"127.0.0.1:1","cpus":2,"memory_bytes":9,"version":"0.1.0"}}"#
    )
}

/// A node of this version, which has the key to sign with.
fn open(etcd: &Etcd, cluster: &str) -> Node {
    Node::open_signing(&etcd.options(cluster), RecordSigning::Optional(record_keys()))
}

/// A node of this version that is there.
fn present(etcd: &Etcd, cluster: &str, name: &str) -> Node {
    let node = open(etcd, cluster);
    node.store.present(&NodeName::new(name).unwrap(), "{}".into(), TTL).unwrap();
    node
}

fn remove(etcd: &Etcd, cluster: &str, member: &str) {
    let keys = keys::KeySpace::new(cluster);
    etcd.write_raw(vec![keys::deleting(&keys.record(RecordKind::Node, member))]);
}

fn rule(name: &str) -> RecordChange {
    RecordChange::PutRule(RuleRecord { name: RuleName::new(name).unwrap(), text: "1".into() })
}

fn setting(key: &str) -> RecordChange {
    RecordChange::PutSetting(Setting { key: key.into(), value: SettingValue::Text("v".into()) })
}

fn put(node: &Node, change: RecordChange) -> Result<(), TransactionError> {
    node.store.transaction(vec![change], ChangeMode::Merge).map(drop)
}

fn waits_for(node: &Node, members: &[&str]) {
    node.until("what holds the format back", |store| {
        let FormatState { holds, behind, .. } = store.format();
        holds == 1 && behind == members
    });
}

fn is_raised(node: &Node) {
    node.until("the newest format", |store| {
        store.format() == FormatState { holds: FORMAT, known: FORMAT, behind: Vec::new() }
    });
}

#[test]
fn a_cluster_of_format_1_passes_the_suite_of_older_stores() {
    let etcd = Etcd::start(1);
    let old = || {
        let node = present(&etcd, &format_1(&etcd, &["a"]), "a");
        is_raised(&node);
        node.in_step(&etcd);
        node
    };
    suite::run_on_old(&old, &|node: &Node| &*node.store);
}

#[test]
fn while_a_member_is_older_the_cluster_keeps_its_format() {
    let etcd = Etcd::start(1);
    let cluster = format_1(&etcd, &["a", "b", "c"]);
    let keys = keys::KeySpace::new(&cluster);
    let a = present(&etcd, &cluster, "a");
    let b = present(&etcd, &cluster, "b");
    // An older program says that it is there, and nothing of formats.
    etcd.write_raw(vec![keys::putting(&keys.present(&NodeName::new("c").unwrap()), "{}")]);
    waits_for(&a, &["c"]);
    waits_for(&b, &["c"]);
    put(&a, setting("new")).unwrap();
    b.until("the setting", |store| store.setting("new").unwrap().is_some());
    let error = put(&b, rule("r")).unwrap_err();
    assert_eq!(error.code().0, 237, "{error}");
    assert!(error.to_string().contains("update nagaya on c,"), "{error}");
    assert_eq!(a.store.rules().unwrap(), []);
    // A member that is not there, too, may come back as it was.
    drop(a);
    waits_for(&b, &["a", "c"]);
    let _c = present(&etcd, &cluster, "c");
    waits_for(&b, &["a"]);
    let a = present(&etcd, &cluster, "a");
    is_raised(&a);
    is_raised(&b);
    put(&a, rule("r")).unwrap();
    b.until("the rule", |store| store.rule("r").unwrap().is_some());
    b.is_fed();
}

#[test]
fn a_rule_may_be_kept_as_soon_as_the_last_member_is_new_enough() {
    let etcd = Etcd::start(1);
    let cluster = format_1(&etcd, &["a", "b"]);
    let a = present(&etcd, &cluster, "a");
    waits_for(&a, &["b"]);
    remove(&etcd, &cluster, "b");
    put(&a, rule("r")).unwrap();
    is_raised(&a);
}

#[test]
fn format_that_signs_waits_for_a_node_with_the_key() {
    let etcd = Etcd::start(1);
    let cluster = format_1(&etcd, &["a"]);
    let a = Node::open_signing(&etcd.options(&cluster), RecordSigning::Unsigned);
    a.store.present(&NodeName::new("a").unwrap(), "{}".into(), TTL).unwrap();
    put(&a, rule("r")).unwrap();
    let raised = etcd.runtime.block_on({
        let inner = a.store.inner.clone();
        async move { raise(&inner).await }
    });
    assert_eq!(raised, Ok(HAS_SIGNATURES - 1));
    a.store.set_record_keys(&record_keys());
    is_raised(&a);
    put(&a, setting("signed")).unwrap();
    let keys = keys::KeySpace::new(&cluster);
    let value = etcd.read_raw(&keys.record(RecordKind::Setting, "signed")).unwrap().value;
    assert!(!value.starts_with(b"{"), "it is sealed");
}

#[test]
fn nothing_is_raised_for_a_cluster_without_members() {
    let etcd = Etcd::start(1);
    // Whoever made it has not become a member yet, and may know no newer format.
    let node = present(&etcd, &format_1(&etcd, &[]), "a");
    node.in_step(&etcd);
    let raised = etcd.runtime.block_on({
        let inner = node.store.inner.clone();
        async move { raise(&inner).await }
    });
    assert_eq!(raised, Ok(1));
}

#[test]
fn a_member_that_joins_during_a_look_is_not_missed() {
    let etcd = Etcd::start(1);
    let cluster = format_1(&etcd, &["a", "b"]);
    let keys = keys::KeySpace::new(&cluster);
    let a = present(&etcd, &cluster, "a");
    waits_for(&a, &["b"]);
    let inner = a.store.inner.clone();
    let mut looked = etcd.runtime.block_on(look(&inner)).unwrap();
    looked.members.retain(|member| member.name != "b");
    remove(&etcd, &cluster, "b");
    etcd.write_raw(vec![keys::putting(&keys.record(RecordKind::Node, "c"), node_json("c"))]);
    assert_eq!(etcd.runtime.block_on(raise_upon(&inner, looked)), Ok(1));
    waits_for(&a, &["c"]);
}

#[test]
fn interrupted_raise_is_finished_by_the_next_node() {
    let etcd = Etcd::start(1);
    let cluster = format_1(&etcd, &["a", "b"]);
    let a = present(&etcd, &cluster, "a");
    waits_for(&a, &["b"]);
    // It would raise the format now, and dies: before, in the midst of it or after.
    remove(&etcd, &cluster, "b");
    etcd.kill(0);
    let (file, directory) = a.close();
    assert_eq!(file.site("one").unwrap().unwrap().name.as_str(), "one");
    etcd.revive(0);
    let signing = RecordSigning::Optional(record_keys());
    let again = Node::open_all(&etcd.options(&cluster), signing, file, directory);
    again.store.present(&NodeName::new("a").unwrap(), "{}".into(), TTL).unwrap();
    is_raised(&again);
    put(&again, rule("r")).unwrap();
    // And it is done once, however many try.
    let others: Vec<Node> = (0..3).map(|_| open(&etcd, &cluster)).collect();
    for other in &others {
        is_raised(other);
        until("the rule", || other.store.rule("r").unwrap().is_some());
    }
    etcd.runtime.block_on(others[0].store.in_step(PATIENCE)).unwrap();
    assert_eq!(others[0].store.setting("k").unwrap().unwrap().key.as_ref(), "k");
}
