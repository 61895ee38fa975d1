//! Members of etcd that are killed, cut off from their history, or full.
//!
//! Not here: that placements stay in order meanwhile (`history`).

use std::time::{Duration, Instant};

use super::rig::{Etcd, Node, PATIENCE, record_keys, until};
use super::*;

/// Within which a write that cannot succeed must have failed: twice what it says it waits.
const BOUND: Duration = Duration::from_secs(12);

#[test]
fn with_etcd_down_reads_go_on_and_the_age_grows() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let a = etcd.node(&cluster);
    let b = etcd.node(&cluster);
    with_sites(&a, &["one"]);
    b.in_step(&etcd);
    assert!(b.store.age().unwrap() < PATIENCE);
    etcd.kill(0);
    b.until("it is noticed", |store| store.trouble().is_some());
    let age = b.store.age().unwrap();
    until("it grows", || b.store.age().unwrap() > age + Duration::from_secs(1));
    assert_eq!((b.store.site("one").unwrap().is_some(), b.store.counts().unwrap().sites), (true, 1));
    let began = Instant::now();
    let error = b.store.transaction(vec![setting("k", "v")], ChangeMode::Merge).unwrap_err();
    assert!(began.elapsed() < BOUND && error.code().0 == 230, "{error} after {:?}", began.elapsed());
    assert!(b.store.allocate_uid(1).is_err());
    let began = Instant::now();
    let wait = Duration::from_millis(200);
    let confirmed = etcd.runtime.block_on(b.store.confirm(&name("a"), "1", wait));
    assert!(confirmed.is_err() && began.elapsed() < 10 * wait, "{confirmed:?} after {:?}", began.elapsed());
    // A node that starts meanwhile serves what its file has, at once.
    let (file, directory) = a.close();
    let a = Node::open_with(&etcd.options(&cluster), file, directory);
    assert_eq!((a.store.counts().unwrap().sites, a.store.age()), (1, None));
    etcd.revive(0);
    for node in [&a, &b] {
        node.in_step(&etcd);
        assert_eq!(node.store.trouble(), None);
    }
    a.store.transaction(vec![setting("k", "v")], ChangeMode::Merge).unwrap();
    b.until("the change", |store| store.setting("k").unwrap().is_some());
    a.is_fed();
    assert_eq!(a.fed.lock().batches, [1], "what it knew was not told again");
    b.is_fed();
}

#[test]
fn a_node_that_missed_compacted_changes_gets_the_difference() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let a = etcd.node(&cluster);
    let b = etcd.node(&cluster);
    with_sites(&a, &["one", "two", "three"]);
    b.in_step(&etcd);
    b.is_fed();
    let told = b.fed.lock().batches.len();
    // Another etcd is what the watch cannot reach; the writes and the compaction go to the same one while it is away.
    etcd.kill(0);
    b.until("it is noticed", |store| store.trouble().is_some());
    drop(a);
    let keys = KeySpace::new(&cluster);
    etcd.revive(0);
    etcd.write(vec![
        keys::deleting(&keys.record(crate::RecordKind::Site, "one")),
        keys::putting(&keys.record(crate::RecordKind::Setting, "k"), r#"{"key":"k","value":"v"}"#),
    ]);
    etcd.compact();
    b.in_step(&etcd);
    b.until("the difference", |store| store.counts().unwrap().sites == 2);
    assert!(b.store.setting("k").unwrap().is_some());
    b.is_fed();
    let batches = b.fed.lock().batches.clone();
    assert_eq!(batches[told..].iter().sum::<usize>(), 2, "{batches:?}, {told}");
}

#[test]
fn writes_need_a_quorum_and_fail_in_time_without_one() {
    let etcd = Etcd::start(3);
    let cluster = etcd.cluster();
    let node = etcd.node(&cluster);
    with_sites(&node, &["one"]);
    etcd.runtime.block_on(node.store.join(record("a", "1"))).unwrap();
    etcd.kill(0);
    for n in 0..5 {
        node.store.transaction(vec![setting("k", &n.to_string())], ChangeMode::Merge).unwrap();
    }
    let claim = etcd.runtime.block_on(node.store.place(placement("one", "a", 1), None, None)).unwrap();
    assert_eq!(claim, PlacementOutcome::Won);
    node.until("the placement", |store| store.placement("one").unwrap().is_some());
    etcd.kill(1);
    let began = Instant::now();
    let error = node.store.transaction(vec![setting("k", "x")], ChangeMode::Merge).unwrap_err();
    assert!(began.elapsed() < BOUND && error.code().0 == 230, "{error} after {:?}", began.elapsed());
    let began = Instant::now();
    let error = etcd.runtime.block_on(node.store.place(placement("one", "a", 2), Some(1), None)).unwrap_err();
    assert!(began.elapsed() < BOUND && error.code().0 == 230, "{error} after {:?}", began.elapsed());
    let wait = Duration::from_millis(200);
    assert!(etcd.runtime.block_on(node.store.confirm(&name("a"), "1", wait)).is_err());
    assert!(node.store.setting("k").unwrap().is_some() && node.store.placement("one").unwrap().is_some());
    etcd.revive(0);
    node.in_step(&etcd);
    node.store.transaction(vec![setting("k", "y")], ChangeMode::Merge).unwrap();
    // What was given up without an answer may have been done, and is known by its epoch.
    let seen = etcd.runtime.block_on(node.store.place(placement("one", "a", 9), Some(1), None)).unwrap();
    assert!(
        [PlacementOutcome::Won, PlacementOutcome::Lost(Some(placement("one", "a", 2)))].contains(&seen),
        "{seen:?}"
    );
    let confirmed = etcd.runtime.block_on(node.store.confirm(&name("a"), "1", PATIENCE)).unwrap();
    assert!(matches!(confirmed, RecordOwner::Ours { draining: false, left_at: 0, .. }), "{confirmed:?}");
    etcd.revive(1);
    node.in_step(&etcd);
    node.is_fed();
}

#[test]
fn a_leader_that_is_killed_again_and_again_loses_no_change() {
    let etcd = Etcd::start(3);
    let cluster = etcd.cluster();
    let nodes = [etcd.node(&cluster), etcd.node(&cluster)];
    let mut done = 0;
    for round in 0..4 {
        etcd.kill(round % 3);
        for n in 0..6 {
            let node = &nodes[n % 2];
            let key = format!("{round}-{n}");
            let changes = vec![setting(&key, "v")];
            // One that says it failed may be done or not; one that says it succeeded is.
            if node.store.transaction(changes, ChangeMode::Merge).is_ok() {
                done += 1;
                assert!(node.store.setting(&key).unwrap().is_some(), "{key}");
            }
        }
        etcd.revive(round % 3);
    }
    assert!(done > 12, "{done}");
    nodes.iter().for_each(|node| node.in_step(&etcd));
    assert_eq!(text(&*nodes[0].store), text(&*nodes[1].store));
    assert!(nodes[0].store.counts().unwrap().settings >= done);
    nodes.iter().for_each(Node::is_fed);
}

/// Writes until there is no more space. What did not fit is told.
fn fill(etcd: &Etcd, node: &Node) -> ClusterError {
    etcd.runtime.block_on(async {
        for n in 0..200 {
            match node.store.put_if(&format!("v{n}"), vec![n; 60_000], None).await {
                Ok(_) => {}
                Err(error) => return error,
            }
        }
        panic!("12 MB went into 2");
    })
}

/// As the page of this error says.
fn make_space(etcd: &Etcd, cluster: &str) {
    etcd.write(vec![keys::deleting_all(&KeySpace::new(cluster).pki(""))]);
    etcd.compact();
    let alarm = "/etcdserverpb.Maintenance/Alarm";
    let _: wire::EmptyResponse = etcd.ask("/etcdserverpb.Maintenance/Defragment", Nothing {});
    let raised: Alarms = etcd.ask(alarm, Alarm::default());
    assert_eq!(raised.all.len(), 1);
    for raised in raised.all {
        let over = Alarm { action: 2, member: raised.member, alarm: raised.alarm };
        let _: wire::EmptyResponse = etcd.ask(alarm, over);
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct Nothing {}

#[derive(Clone, PartialEq, prost::Message)]
struct Alarm {
    /// 0: they are asked for; 2: it is over.
    #[prost(int32, tag = "1")]
    action: i32,
    #[prost(uint64, tag = "2")]
    member: u64,
    #[prost(int32, tag = "3")]
    alarm: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Alarms {
    #[prost(message, repeated, tag = "2")]
    all: Vec<Raised>,
}

impl wire::HeaderOnly for Alarms {
    fn header(&self) -> Option<&wire::ResponseHeader> {
        None
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct Raised {
    #[prost(uint64, tag = "1")]
    member: u64,
    #[prost(int32, tag = "2")]
    alarm: i32,
}

#[test]
fn an_etcd_without_space_is_followed_and_recovers() {
    let mut etcd = Etcd::start_with(1, &["--quota-backend-bytes", "2097152"]);
    let cluster = etcd.cluster();
    let node = etcd.node(&cluster);
    with_sites(&node, &["one"]);
    let a = name("a");
    let ttl = Duration::from_secs(2);
    etcd.runtime.block_on(node.store.join(record("a", "1"))).unwrap();
    node.store.present(&a, "{}".into(), ttl).unwrap();
    node.until("it is seen", |store| store.presences().len() == 1);
    let full = fill(&etcd, &node);
    assert!(matches!(full, ClusterError::Full { .. }) && full.code().0 == 231, "{full}");
    // Less space than there is in use, as after a change of the quota: then etcd refuses whatever is a transaction.
    for quota in ["2097152", "1048576"] {
        etcd.extra = vec!["--quota-backend-bytes".into(), quota.into()];
        etcd.kill(0);
        node.until("it is noticed", |store| store.trouble().is_some());
        etcd.revive(0);
        node.in_step(&etcd);
        let error = node.store.transaction(vec![setting("k", "v")], ChangeMode::Merge).unwrap_err();
        assert_eq!(error.code().0, 231, "{error}");
        let first = placement("one", "a", 1);
        let placed = etcd.runtime.block_on(node.store.place(first, None, None)).unwrap_err();
        assert_eq!(placed.code().0, 231, "{placed}");
        // Who runs what is placed already may go on.
        let confirmed = etcd.runtime.block_on(node.store.confirm(&a, "1", PATIENCE)).unwrap();
        assert!(matches!(confirmed, RecordOwner::Ours { .. }), "{confirmed:?}");
        assert_eq!(node.store.counts().unwrap().sites, 1);
    }
    etcd.extra = vec!["--quota-backend-bytes".into(), "2097152".into()];
    etcd.kill(0);
    etcd.revive(0);
    make_space(&etcd, &cluster);
    node.in_step(&etcd);
    node.store.transaction(vec![setting("k", "v")], ChangeMode::Merge).unwrap();
    let placed = etcd.runtime.block_on(node.store.place(placement("one", "a", 1), None, None)).unwrap();
    assert_eq!(placed, PlacementOutcome::Won);
    node.in_step(&etcd);
    node.is_fed();
}

#[test]
fn with_etcd_full_a_node_is_still_seen() {
    let etcd = Etcd::start_with(1, &["--quota-backend-bytes", "2097152"]);
    let cluster = etcd.cluster();
    let node = etcd.node(&cluster);
    let other = etcd.node(&cluster);
    let a = name("a");
    let ttl = Duration::from_secs(2);
    node.store.present(&a, "0".into(), ttl).unwrap();
    other.until("it is seen", |store| store.presences().len() == 1);
    fill(&etcd, &node);
    let since = Instant::now();
    let mut load = 0;
    until("some terms of the lease", || {
        load += 1;
        node.store.present(&a, load.to_string(), ttl).unwrap();
        assert_eq!(other.store.presences().len(), 1, "it was taken for gone after {:?}", since.elapsed());
        since.elapsed() > 4 * ttl
    });
    make_space(&etcd, &cluster);
    node.store.present(&a, "last".into(), ttl).unwrap();
    other.until("its load", |store| store.presences().iter().any(|it| it.json == "last"));
}

#[test]
fn a_node_with_an_old_disk_is_behind_until_it_has_the_rest() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let node = etcd.node(&cluster);
    let other = etcd.node(&cluster);
    with_sites(&node, &["one", "two"]);
    let a = name("a");
    let b = name("b");
    etcd.runtime.block_on(async {
        other.store.join(record("a", "1")).await.unwrap();
        other.store.join(record("b", "2")).await.unwrap();
        assert_eq!(
            other.store.place(placement("one", "a", 1), None, None).await.unwrap(),
            PlacementOutcome::Won
        );
    });
    node.until("the placement", |store| store.placement("one").unwrap().is_some());
    let (file, directory) = node.close();
    drop(file);
    let disk = directory.path().join("store.redb");
    let old = std::fs::read(&disk).unwrap();
    // It was there meanwhile, lost its site and learned of it; then its disk is as it was before.
    let node = Node::open_with(&etcd.options(&cluster), RedbStore::open(&disk).unwrap(), directory);
    etcd.runtime.block_on(async {
        let moved = other.store.place(placement("one", "b", 2), Some(1), Some(&a)).await.unwrap();
        assert_eq!(moved, PlacementOutcome::Won);
    });
    other
        .store
        .transaction(vec![RecordChange::DropSite(SiteName::new("two").unwrap())], ChangeMode::Merge)
        .unwrap();
    node.until("the loss", |store| store.placement("one").unwrap().is_some_and(|it| it.node == b));
    let (file, directory) = node.close();
    drop(file);
    std::fs::write(&disk, old).unwrap();
    etcd.kill(0);
    let node = Node::open_with(&etcd.options(&cluster), RedbStore::open(&disk).unwrap(), directory);
    assert_eq!(node.store.placement("one").unwrap().unwrap().node, a, "so its disk says");
    assert_eq!((node.store.applied(), node.store.age()), (0, None), "which is worth nothing");
    etcd.revive(0);
    let confirmed = etcd.runtime.block_on(node.store.confirm(&a, "1", PATIENCE)).unwrap();
    let RecordOwner::Ours { left_at: lost @ 1.., .. } = confirmed else { panic!("{confirmed:?}") };
    node.until("it has caught up with its loss", |store| store.applied() >= lost);
    assert_eq!(node.store.placement("one").unwrap().unwrap().node, b);
    assert!(node.store.site("two").unwrap().is_none());
    node.in_step(&etcd);
    node.is_fed();
}

#[test]
fn removing_the_clusters_keys_keeps_the_nodes_records() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let node = etcd.node(&cluster);
    with_sites(&node, &["one"]);
    let keys = KeySpace::new(&cluster);
    etcd.write(vec![keys::deleting_all(&keys.all())]);
    node.until("it says so", |store| matches!(store.trouble(), Some(ClusterError::NotInitialised { .. })));
    assert_eq!(node.store.counts().unwrap().sites, 1);
    // From a node's own copy the cluster is made again.
    etcd.runtime
        .block_on(seed(&etcd.options(&cluster), &record_keys(), &[], &*node.store.inner.replica))
        .unwrap();
    node.in_step(&etcd);
    node.store.transaction(vec![setting("k", "v")], ChangeMode::Merge).unwrap();
    node.is_fed();
    assert_eq!((node.store.counts().unwrap().sites, node.fed.lock().batches.len()), (1, 2));
}
