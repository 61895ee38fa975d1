//! Members of etcd that are killed, cut off from their history, or full.
//!
//! Not here: that placements stay in order meanwhile (`history`).

use std::time::{Duration, Instant};

use super::rig::{Etcd, Node, PATIENCE, until};
use super::*;

/// Within which a write that cannot succeed must have failed: twice what it says it waits.
const BOUND: Duration = Duration::from_secs(12);

#[test]
fn with_etcd_down_reads_go_on_and_the_age_grows_until_it_is_back() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let (a, b) = (etcd.node(&cluster), etcd.node(&cluster));
    with_sites(&a, &["one"]);
    b.in_step(&etcd);
    assert!(b.store.age().unwrap() < PATIENCE);
    etcd.kill(0);
    b.until("it is noticed", |store| store.trouble().is_some());
    let age = b.store.age().unwrap();
    until("it grows", || b.store.age().unwrap() > age + Duration::from_secs(1));
    assert_eq!((b.store.site("one").unwrap().is_some(), b.store.counts().unwrap().sites), (true, 1));
    let began = Instant::now();
    let error = b.store.transaction(vec![setting("k", "v")], Mode::Merge).unwrap_err();
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
    a.store.transaction(vec![setting("k", "v")], Mode::Merge).unwrap();
    b.until("the change", |store| store.setting("k").unwrap().is_some());
    a.is_fed();
    assert_eq!(a.fed.lock().batches, [1], "what it knew was not told again");
    b.is_fed();
}

#[test]
fn a_node_that_missed_what_was_compacted_away_is_told_the_difference() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let (a, b) = (etcd.node(&cluster), etcd.node(&cluster));
    with_sites(&a, &["one", "two", "three"]);
    b.in_step(&etcd);
    b.is_fed();
    let told = b.fed.lock().batches.len();
    // Another etcd is what the watch cannot reach; the writes and the compaction go to the same one while it is away.
    etcd.kill(0);
    b.until("it is noticed", |store| store.trouble().is_some());
    drop(a);
    let keys = Keys::new(&cluster);
    etcd.revive(0);
    etcd.write(vec![
        keys::deleting(&keys.record(crate::store::Kind::Site, "one")),
        keys::putting(&keys.record(crate::store::Kind::Setting, "k"), r#"{"key":"k","value":"v"}"#),
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
fn a_quorum_goes_on_without_a_member_and_without_a_quorum_writes_fail_in_time() {
    let etcd = Etcd::start(3);
    let cluster = etcd.cluster();
    let node = etcd.node(&cluster);
    with_sites(&node, &["one"]);
    etcd.runtime.block_on(node.store.join(record("a", "1"))).unwrap();
    etcd.kill(0);
    for n in 0..5 {
        node.store.transaction(vec![setting("k", &n.to_string())], Mode::Merge).unwrap();
    }
    let claim = etcd.runtime.block_on(node.store.place(placement("one", "a", 1), None, None)).unwrap();
    assert_eq!(claim, Claim::Won);
    node.until("the placement", |store| store.placement("one").unwrap().is_some());
    etcd.kill(1);
    let began = Instant::now();
    let error = node.store.transaction(vec![setting("k", "x")], Mode::Merge).unwrap_err();
    assert!(began.elapsed() < BOUND && error.code().0 == 230, "{error} after {:?}", began.elapsed());
    let began = Instant::now();
    let error = etcd.runtime.block_on(node.store.place(placement("one", "a", 2), Some(1), None)).unwrap_err();
    assert!(began.elapsed() < BOUND && error.code().0 == 230, "{error} after {:?}", began.elapsed());
    let wait = Duration::from_millis(200);
    assert!(etcd.runtime.block_on(node.store.confirm(&name("a"), "1", wait)).is_err());
    assert!(node.store.setting("k").unwrap().is_some() && node.store.placement("one").unwrap().is_some());
    etcd.revive(0);
    node.in_step(&etcd);
    node.store.transaction(vec![setting("k", "y")], Mode::Merge).unwrap();
    // What was given up without an answer may have been done, and is known by its epoch.
    let seen = etcd.runtime.block_on(node.store.place(placement("one", "a", 9), Some(1), None)).unwrap();
    assert!([Claim::Won, Claim::Lost(Some(placement("one", "a", 2)))].contains(&seen), "{seen:?}");
    let confirmed = etcd.runtime.block_on(node.store.confirm(&name("a"), "1", PATIENCE)).unwrap();
    assert!(matches!(confirmed, Confirmed::Ours { draining: false, left_at: 0, .. }), "{confirmed:?}");
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
            if node.store.transaction(changes, Mode::Merge).is_ok() {
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

#[test]
fn an_etcd_without_space_says_so_and_is_still_followed() {
    let etcd = Etcd::start_with(1, &["--quota-backend-bytes", "2097152"]);
    let cluster = etcd.cluster();
    let node = etcd.node(&cluster);
    with_sites(&node, &["one"]);
    let full = etcd.runtime.block_on(async {
        for n in 0..200 {
            match node.store.put_if(&format!("v{n}"), vec![n; 60_000], None).await {
                Ok(_) => {}
                Err(error) => return error,
            }
        }
        panic!("12 MB went into 2");
    });
    assert!(matches!(full, ClusterError::Full { .. }) && full.code().0 == 231, "{full}");
    let error = node.store.transaction(vec![setting("k", "v")], Mode::Merge).unwrap_err();
    assert_eq!(error.code().0, 231, "{error}");
    node.in_step(&etcd);
    assert_eq!(node.store.counts().unwrap().sites, 1);
}

#[test]
fn whoever_removes_the_clusters_keys_does_not_take_the_nodes_records() {
    let etcd = Etcd::start(1);
    let cluster = etcd.cluster();
    let node = etcd.node(&cluster);
    with_sites(&node, &["one"]);
    let keys = Keys::new(&cluster);
    etcd.write(vec![keys::deleting_all(&keys.all())]);
    node.until("it says so", |store| matches!(store.trouble(), Some(ClusterError::NotInitialised { .. })));
    assert_eq!(node.store.counts().unwrap().sites, 1);
    // From a node's own copy the cluster is made again.
    etcd.runtime.block_on(seed(&etcd.options(&cluster), &*node.store.inner.replica)).unwrap();
    node.in_step(&etcd);
    node.store.transaction(vec![setting("k", "v")], Mode::Merge).unwrap();
    node.is_fed();
    assert_eq!((node.store.counts().unwrap().sites, node.fed.lock().batches.len()), (1, 2));
}
