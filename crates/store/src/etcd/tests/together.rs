//! Members that come and go together with other values of the store, and values that end by themselves.
//!
//! Not here: what these values are (`nagaya`'s keys of members).

use std::time::Duration;

use super::rig::{Etcd, Node};
use super::*;

fn put(key: &str, value: &[u8], at: u64) -> PkiChange {
    PkiChange::Put { key: key.into(), value: value.to_vec(), at }
}

fn take(key: &str, at: u64) -> PkiChange {
    PkiChange::Take { key: key.into(), at }
}

fn value(etcd: &Etcd, node: &Node, key: &str) -> Option<VersionedValue> {
    etcd.runtime.block_on(node.store.get(key)).unwrap()
}

/// A node of an empty cluster.
fn node_of(etcd: &Etcd) -> Node {
    let node = etcd.node(&etcd.cluster());
    with_sites(&node, &[]);
    node
}

#[test]
fn a_machine_joins_and_takes_a_value_away_or_does_neither() {
    let etcd = Etcd::start(1);
    let node = node_of(&etcd);
    etcd.runtime.block_on(async {
        let store = &node.store;
        assert!(store.put_if("tokens/1", b"once".to_vec(), None).await.unwrap());
        assert!(store.put_if("list", b"a".to_vec(), None).await.unwrap());
        let token = store.get("tokens/1").await.unwrap().unwrap().revision;
        let list = store.get("list").await.unwrap().unwrap().revision;
        let changes = vec![take("tokens/1", token), put("list", b"a b", list)];
        // Somebody else has changed what it counts on.
        let stale = vec![take("tokens/1", token), put("list", b"c", list + 1)];
        assert_eq!(store.admit(record("b", "1"), stale).await.unwrap(), JoinResult::Changed);
        assert!(store.read_node(&name("b")).await.unwrap().is_none());
        assert_eq!(store.admit(record("b", "1"), changes.clone()).await.unwrap(), JoinResult::Joined);
        assert_eq!(store.get("list").await.unwrap().unwrap().value, b"a b");
        assert!(store.get("tokens/1").await.unwrap().is_none());
        // The same once more, by another machine of another name, or of the same.
        assert_eq!(store.admit(record("c", "2"), changes.clone()).await.unwrap(), JoinResult::Changed);
        let taken = store.admit(record("b", "2"), changes).await.unwrap_err();
        assert!(matches!(taken, ClusterError::NameTaken { .. }), "{taken}");
    });
}

#[test]
fn of_machines_that_join_by_one_value_one_does() {
    const AT_ONCE: usize = 8;
    let etcd = Etcd::start(1);
    let node = node_of(&etcd);
    etcd.runtime.block_on(node.store.put_if("tokens/1", b"once".to_vec(), None)).unwrap();
    let at = value(&etcd, &node, "tokens/1").unwrap().revision;
    let joins: Vec<_> = (0..AT_ONCE)
        .map(|n| {
            let store = node.store.clone();
            let record = record(&format!("n{n}"), &n.to_string());
            etcd.runtime.spawn(async move { store.admit(record, vec![take("tokens/1", at)]).await })
        })
        .collect();
    let joined = joins.into_iter().map(|join| etcd.runtime.block_on(join).unwrap().unwrap());
    assert_eq!(joined.filter(|admission| *admission == JoinResult::Joined).count(), 1);
}

#[test]
fn a_removed_node_goes_with_its_value_and_stays_away() {
    let etcd = Etcd::start(1);
    let node = node_of(&etcd);
    etcd.runtime.block_on(async {
        let store = &node.store;
        store.join(record("b", "1")).await.unwrap();
        assert!(store.put_if("list", b"a b".to_vec(), None).await.unwrap());
        let at = store.get("list").await.unwrap().unwrap().revision;
        let stale = vec![put("list", b"a", at + 1), PkiChange::Drop { key: "tokens/1".into() }];
        assert!(!store.remove_with(&name("b"), false, stale).await.unwrap());
        assert!(matches!(store.read_node(&name("b")).await.unwrap(), Some(SeenNode::Member(_))));
        let changes = vec![put("list", b"a", at), PkiChange::Drop { key: "tokens/1".into() }];
        assert!(store.remove_with(&name("b"), false, changes).await.unwrap());
        assert_eq!(store.get("list").await.unwrap().unwrap().value, b"a");
        let refused = store.refresh(record("b", "1")).await.unwrap_err();
        assert!(matches!(refused, ClusterError::NoNode { .. }), "{refused}");
        assert!(matches!(store.read_node(&name("b")).await.unwrap(), Some(SeenNode::Removed { .. })));
    });
}

#[test]
fn a_value_for_a_time_ends_by_itself() {
    let etcd = Etcd::start(1);
    let node = node_of(&etcd);
    let put_for = |key: &str, ttl| {
        etcd.runtime.block_on(node.store.put_for(key, b"v".to_vec(), Duration::from_secs(ttl)))
    };
    put_for("tokens/1", 1).unwrap();
    put_for("tokens/2", 3_600).unwrap();
    assert!(put_for("tokens/2", 1).is_err(), "there is one already");
    node.until("the first has ended", |_| value(&etcd, &node, "tokens/1").is_none());
    let listed = etcd.runtime.block_on(node.store.list("tokens/")).unwrap();
    let names: Vec<_> = listed.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["2"]);
}

#[test]
fn too_many_or_too_long_values_are_refused_before_they_are_sent() {
    let etcd = Etcd::start(1);
    let node = node_of(&etcd);
    let refused = |changes| etcd.runtime.block_on(node.store.change_pki(changes)).unwrap_err();
    let many = (0..=PKI_CHANGES_MAX).map(|n| PkiChange::Drop { key: format!("k{n}") }).collect();
    let long = vec![put("k", &vec![0; PKI_VALUE_LEN_MAX + 1], 0)];
    for error in [refused(many), refused(long)] {
        assert!(matches!(error, ClusterError::Refused { .. }), "{error}");
    }
}
