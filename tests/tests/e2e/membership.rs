//! What changes about a cluster while it serves: nodes that are drained, used again or removed, the authority of their certificates, and
//! members of its store that are lost and come back.
//!
//! Not here: becoming a member and moving sites (`cluster`), the store alone (`nagaya_cmdb`), networks that lose packets (`lab`).

use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nagaya_tests::cluster::{self, Cluster, Etcd};
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::World;
use nagaya_tests::{client, machine, wait};
use serde_json::{Value, json};

use crate::cluster::{
    add, cluster_status, cluster_with, epoch_of, imageless, run_of, sites, tier_of, until_the_store_confirms,
    with_alice,
};
use crate::failures::SmallDisk;

pub const SUITE: Suite = Suite {
    name: "membership",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        an_authority_is_exchanged_and_all_nodes_still_answer_for_each_other,
        a_drained_node_that_is_used_again_gets_sites_and_all_of_it_is_told,
        a_drained_node_can_be_removed_and_one_in_use_cannot,
        a_drained_node_that_is_removed_while_it_is_down_comes_back_like_one_that_joins,
        a_node_that_is_removed_by_force_serves_nothing_more_and_says_so,
        nobody_notices_that_the_store_has_lost_its_leader,
        without_most_of_its_store_a_cluster_serves_what_it_knows_and_moves_nothing,
        with_the_disk_of_its_store_full_a_cluster_serves_what_it_knows_and_says_how_old_that_is,
    ]),
};

/// Nodes look every few seconds, and each waits for all others.
const EXCHANGED_MAX: Duration = Duration::from_secs(60);

/// Visits a site by one node until it is told to stop.
struct Visitor {
    done: Arc<AtomicBool>,
    statuses: JoinHandle<Vec<u16>>,
}

impl Visitor {
    fn begin(node: &World, host: &'static str, target: &'static str) -> Self {
        let (done, address) = (Arc::<AtomicBool>::default(), node.http());
        let is_done = Arc::clone(&done);
        let statuses = std::thread::spawn(move || {
            let mut statuses = Vec::new();
            while !is_done.load(Ordering::Relaxed) {
                statuses.push(client::get(address, host, target).status);
            }
            statuses
        });
        Self { done, statuses }
    }

    #[track_caller]
    fn saw_no_error(self) {
        self.done.store(true, Ordering::Relaxed);
        let statuses = self.statuses.join().expect("it does not panic");
        let failed: Vec<_> = statuses.iter().filter(|status| **status != 200).collect();
        let (count, of) = (failed.len(), statuses.len());
        assert!(failed.is_empty() && of > 0, "{count} of {of} failed, the first with {:?}", failed.first());
    }
}

fn nodes_of(asked: &World) -> Vec<Value> {
    let nodes: Value = serde_json::from_str(&asked.cli(&["nodes", "--json"])).expect("nodes are JSON");
    nodes.as_array().expect("a list").clone()
}

fn state_of(asked: &World, node: &str) -> Option<Value> {
    nodes_of(asked).into_iter().find(|row| row["name"] == node).map(|row| row["state"].clone())
}

/// The latest first.
fn events_of(asked: &World) -> Vec<Value> {
    let events: Value = serde_json::from_str(&asked.cli(&["events", "--json"])).expect("events are JSON");
    events.as_array().expect("a list").clone()
}

fn has_event(asked: &World, event: &str, node: &str) -> bool {
    events_of(asked).iter().any(|told| told["event"] == event && told["node"] == node)
}

/// Ends the node's edge, so that all connections to other nodes are made anew.
fn restart_edge(world: &World) {
    let (edge, restarts) = (world.pid_of("edge"), world.restarts_of("edge"));
    machine::signal(edge, "KILL");
    wait::until("the edge is back", || {
        world.restarts_of("edge") > restarts
            && world.try_status().is_some_and(|status| status["healthy"] == true)
    });
}

fn refused(world: &World, words: &[&str]) -> String {
    let output = world.try_cli(words);
    assert!(!output.status.success(), "{words:?}: {output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn an_authority_is_exchanged_and_all_nodes_still_answer_for_each_other() {
    let cluster = cluster_with(3, imageless);
    let run = run_of(&cluster.nodes[0], "app").text();
    let at = cluster.node_of("app");
    let serials = || -> Vec<u64> {
        nodes_of(&cluster.nodes[0]).iter().filter_map(|node| node["authority"].as_u64()).collect()
    };
    let before = serials();
    assert_eq!(before, [before[0]; 3]);
    let visitors: Vec<_> = (0..3).map(|at| Visitor::begin(&cluster.nodes[at], "app.test", "/run")).collect();
    let said = cluster.nodes[1].cli(&["cluster", "rotate"]);
    assert!(said.contains(&format!("authority {} ", before[0] + 1)), "{said}");
    let are_new = || (serials() == [before[0] + 1; 3]).then_some(());
    assert!(
        wait::within(EXCHANGED_MAX, are_new).is_some(),
        "not every node has a new certificate: {:?}",
        serials()
    );
    let all_answer = || {
        for node in &cluster.nodes {
            wait::until("it passes requests on", || node.get("app.test", "/run").status == 200);
            assert_eq!(run_of(node, "app").text(), run);
        }
    };
    all_answer();
    let said = cluster.nodes[2].cli(&["cluster", "rotate", "--finish"]);
    assert!(said.contains("only authority"), "{said}");
    all_answer();
    visitors.into_iter().for_each(Visitor::saw_no_error);
    // On connections that know nothing of before, to each node and from each.
    for (n, node) in cluster.nodes.iter().enumerate() {
        if n != at {
            restart_edge(node);
        }
    }
    all_answer();
    let to = cluster::name_of((at + 1) % 3);
    cluster.nodes[at].cli(&["cluster", "move", "app", "--to", &to]);
    let run = run_of(&cluster.nodes[at], "app").text();
    assert!(cluster.nodes.iter().all(|node| run_of(node, "app").text() == run));
    let stranger = cluster::node(3).start();
    cluster::join(&stranger, &cluster.nodes[0], &cluster.etcd);
    wait::until("a node that joins has it, too", || serials() == [before[0] + 1; 4]);
    wait::until("and answers for the others", || stranger.get("app.test", "/run").status == 200);
    assert_eq!(run_of(&stranger, "app").text(), run);
    stranger.stop();
    cluster.stop();
}

fn a_drained_node_that_is_used_again_gets_sites_and_all_of_it_is_told() {
    let cluster = cluster_with(2, imageless);
    run_of(&cluster.nodes[0], "app");
    let at = cluster.node_of("app");
    let (node, other) = (&cluster.nodes[at], &cluster.nodes[1 - at]);
    let (name, its) = (cluster::name_of(at), cluster::name_of(1 - at));
    let is_on =
        |at: usize| cluster.placement(1 - at, "app").is_some_and(|row| row["node"] == cluster::name_of(at));
    other.cli(&["cluster", "drain", &name]);
    wait::until("it has none left", || is_on(1 - at) && state_of(other, &name) == Some(json!("drained")));
    // They look once a second: what is over before is not seen.
    let until_seen = |event: &str| {
        for asked in &cluster.nodes {
            wait::until("both have seen it", || has_event(asked, event, &name));
        }
    };
    until_seen("draining");
    // Neither of its own nor in the other's place.
    let nowhere = refused(other, &["cluster", "move", "app"]);
    assert!(nowhere.contains(&format!("{name} is being drained")), "{nowhere}");
    other.cli(&["cluster", "undrain", &name]);
    wait::until("it may have some again", || state_of(other, &name) == Some(json!("up")));
    other.cli(&["cluster", "drain", &its]);
    wait::until("it has it again", || is_on(at) && state_of(node, &its) == Some(json!("drained")));
    assert_eq!(run_of(other, "app").text(), run_of(node, "app").text());
    until_seen("undrained");
    // Why it is there is known where it was decided, and where it is everywhere.
    let explained = other.cli(&["explain", "app"]);
    for words in [
        &*format!("its application is on {name} since "),
        "its node was to be emptied, or has left",
        &format!("app from {its} to {name}, epoch 3"),
        &format!("chosen: {name} for app: "),
        "release ",
    ] {
        assert!(explained.contains(words), "{words} is missing in\n{explained}");
    }
    let explained = node.cli(&["explain", "app"]);
    assert!(explained.contains(&format!("another node than {name} has chosen it")), "{explained}");
    assert!(explained.contains("its last wake on") && explained.contains("boot"), "{explained}");
    let moved = events_of(node).into_iter().find(|event| event["event"] == "moved" && event["epoch"] == 2);
    let moved = moved.expect("it moved its application away itself");
    assert_eq!(
        (&moved["from"], &moved["to"], &moved["why"]),
        (&json!(name), &json!(its), &json!("draining"))
    );
    cluster.stop();
}

fn a_drained_node_can_be_removed_and_one_in_use_cannot() {
    let cluster = cluster_with(2, imageless);
    run_of(&cluster.nodes[0], "app");
    let at = cluster.node_of("app");
    let (node, other, name) = (&cluster.nodes[at], &cluster.nodes[1 - at], cluster::name_of(at));
    let said = refused(other, &["cluster", "remove", &name]);
    assert!(said.contains("NGY0235") && said.contains("app"), "{said}");
    assert!(cluster_status(node)["member"] == true && nodes_of(other).len() == 2);
    other.cli(&["cluster", "drain", &name]);
    // States are told from counts that are a second old: one that has just got its first application may be told to be drained.
    let next = json!(cluster::name_of(1 - at));
    let has_left = || cluster.placement(1 - at, "app").is_some_and(|placement| placement["node"] == next);
    wait::until("its application has left", has_left);
    wait::until("it has none left", || state_of(other, &name) == Some(json!("drained")));
    let run = run_of(other, "app").text();
    other.cli(&["cluster", "remove", &name]);
    assert_eq!(nodes_of(other).len(), 1);
    wait::until("it says so", || cluster_status(node)["member"] == false);
    wait::until("both have seen it", || cluster.nodes.iter().all(|asked| has_event(asked, "removed", &name)));
    assert_eq!(run_of(other, "app").text(), run, "nothing has changed for its application");
    // What needs no placement is served on.
    assert_eq!(node.get("plain.test", "/").expect(200).text(), "plain words");
    // Started anew it is a member like one that has joined.
    machine::signal(node.pid(), "TERM");
    assert!(node.wait_for_end().success());
    node.spawn();
    wait::until("it is a member again", || {
        node.try_status().is_some() && cluster_status(node)["member"] == true
    });
    wait::until("others see it", || state_of(other, &name) == Some(json!("up")));
    wait::until("it passes requests on", || node.get("app.test", "/run").status == 200);
    assert_eq!(run_of(node, "app").text(), run);
    cluster.stop();
}

fn a_drained_node_that_is_removed_while_it_is_down_comes_back_like_one_that_joins() {
    let cluster = cluster_with(2, imageless);
    let [node, other] = [&cluster.nodes[0], &cluster.nodes[1]];
    let name = cluster::name_of(0);
    node.cli(&["cluster", "drain", &name]);
    // What it has on its disk by then is that it is drained: it writes before it asks how far the store is, if it has time.
    let mut age = f64::INFINITY;
    let mut has_asked = || {
        let before = std::mem::replace(&mut age, cluster_status(node)["age_seconds"].as_f64().unwrap_or(0.0));
        age < before
    };
    (0..3).for_each(|_| wait::until("it asks the store", &mut has_asked));
    machine::signal(node.pid(), "KILL");
    node.wait_for_end();
    other.cli(&["cluster", "remove", &name, "--force"]);
    node.spawn();
    wait::until("others see it", || state_of(other, &name) == Some(json!("up")));
    cluster.stop();
}

fn a_node_that_is_removed_by_force_serves_nothing_more_and_says_so() {
    let cluster = cluster_with(2, imageless);
    let first = run_of(&cluster.nodes[0], "app").text();
    let at = cluster.node_of("app");
    let (node, other, name) = (&cluster.nodes[at], &cluster.nodes[1 - at], cluster::name_of(at));
    // It runs and serves, and does not know what is done to it.
    other.cli(&["cluster", "remove", &name, "--force"]);
    wait::until("it says that it is no member", || cluster_status(node)["member"] == false);
    wait::until("it may run nothing", || cluster_status(node)["authority"] == "none");
    let second = run_of(other, "app").text();
    assert_ne!(second, first, "another node runs it");
    let placement = cluster.placement(1 - at, "app").expect("it is placed");
    assert_eq!((&placement["node"], &placement["epoch"]), (&json!(cluster::name_of(1 - at)), &json!(2)));
    // Whatever it answers, it is not what it ran.
    wait::until("what it ran has ended", || {
        let answer = node.get("app.test", "/run");
        assert!(answer.status != 200 || answer.text() == second, "two run: {}", answer.text());
        matches!(tier_of(node, "app").as_deref(), None | Some("cold" | "image"))
    });
    assert_eq!(node.get("plain.test", "/").expect(200).text(), "plain words");
    let log = node.log();
    assert!(log.contains("NGY0520") && log.contains("removed from the cluster"), "{log}");
    wait::until("it tells it", || has_event(node, "removed", &name));
    assert_eq!(run_of(other, "app").text(), second);
    cluster.stop();
}

/// Nodes over three members of a store, with an application that each has served.
fn over_three_members(nodes: usize) -> Cluster {
    let cluster = Cluster::start_over(Etcd::start_members(3), nodes, with_alice, imageless);
    let first = &cluster.nodes[0];
    first.write("alice", "plain/index.html", "plain words");
    first.write_program("alice", "app/app.py", crate::programs::INSTANCE);
    add(first, "app");
    until_the_store_confirms(&cluster);
    for node in &cluster.nodes {
        wait::until("every node knows it", || sites(node).contains(&"app".to_owned()));
        run_of(node, "app");
        wait::until("it could vouch for the others", || cluster_status(node)["vouches"] == true);
    }
    cluster
}

fn nobody_notices_that_the_store_has_lost_its_leader() {
    let mut cluster = over_three_members(2);
    let (run, epoch) = (run_of(&cluster.nodes[0], "app").text(), epoch_of(&cluster));
    let visitors: Vec<_> =
        cluster.nodes.iter().map(|node| Visitor::begin(node, "app.test", "/run")).collect();
    // Twice, as a leader may be the one that a node was asking, or not.
    for _ in 0..2 {
        let leader = cluster.etcd.leader();
        cluster.etcd.kill_member(leader);
        assert_ne!(cluster.etcd.leader(), leader);
        until_the_store_confirms(&cluster);
        cluster.etcd.begin();
    }
    until_the_store_confirms(&cluster);
    visitors.into_iter().for_each(Visitor::saw_no_error);
    assert!(cluster.nodes.iter().all(|node| run_of(node, "app").text() == run));
    assert_eq!(epoch_of(&cluster), epoch, "nothing moved");
    cluster.stop();
}

fn without_most_of_its_store_a_cluster_serves_what_it_knows_and_moves_nothing() {
    let mut cluster = over_three_members(2);
    let (run, epoch) = (run_of(&cluster.nodes[0], "app").text(), epoch_of(&cluster));
    let at = cluster.node_of("app");
    let to = cluster::name_of(1 - at);
    let leader = cluster.etcd.leader();
    cluster.etcd.kill_member(leader);
    cluster.etcd.kill_member((leader + 1) % 3);
    for node in &cluster.nodes {
        wait::until("the other one vouches for it", || {
            let status = cluster_status(node);
            status["in_step"] == false && status["authority"] == "members"
        });
        let age = || cluster_status(node)["age_seconds"].as_f64().expect("it says how old what it knows is");
        let first = age();
        assert!(first > 0.0);
        wait::until("it becomes older", || age() > first);
        assert_eq!(run_of(node, "app").text(), run);
        assert_eq!(node.get("plain.test", "/").expect(200).text(), "plain words");
        // Asked where it runs, and where not; and for all that would have to be written.
        for words in [
            &["cluster", "move", "app", "--to", &to][..],
            &["cluster", "drain", &to],
            &["site", "remove", "plain"],
        ] {
            let said = refused(node, words);
            assert!(said.contains("store") || said.contains("etcd"), "{words:?}: {said}");
        }
        assert_eq!(run_of(node, "app").text(), run, "who was refused has changed nothing");
    }
    cluster.etcd.begin();
    until_the_store_confirms(&cluster);
    assert_eq!(epoch_of(&cluster), epoch, "nothing moved");
    for node in &cluster.nodes {
        assert_eq!(run_of(node, "app").text(), run);
        wait::until("it tells who let it serve", || {
            let held = events_of(node).into_iter().filter(|event| event["event"] == "authority_held");
            let by: Vec<_> = held.map(|event| event["by"].clone()).take(2).collect();
            by == [json!("store"), json!("members")]
        });
    }
    cluster.nodes[1 - at].cli(&["cluster", "move", "app", "--to", &to]);
    let placement = cluster.placement(1 - at, "app").expect("it is placed");
    assert_eq!(
        (&placement["node"], &placement["epoch"]),
        (&json!(to), &json!(epoch.as_u64().map(|epoch| epoch + 1)))
    );
    let moved = run_of(&cluster.nodes[at], "app").text();
    assert!(moved != run && run_of(&cluster.nodes[1 - at], "app").text() == moved);
    cluster.stop();
}

/// A record that takes etcd some pages.
fn bulky(number: usize) -> Value {
    let hosts: Vec<_> = (0..250).map(|n| format!("host-{n}.bulky-{number}.test")).collect();
    json!({ "site": { "name": format!("bulky-{number}"), "tenant": "alice", "hosts": hosts,
        "backend": { "kind": "static", "root": "plain" } } })
}

/// Takes up all that a disk has left.
#[track_caller]
fn fill_up(file: &Path) {
    let mut file = std::fs::File::create(file).expect("its directory");
    for size in [1 << 20, 4096, 1] {
        while file.write_all(&vec![1u8; size]).is_ok() {}
    }
}

fn with_the_disk_of_its_store_full_a_cluster_serves_what_it_knows_and_says_how_old_that_is() {
    let mut disk = None;
    // etcd keeps 128 MiB ready for its log.
    let etcd = Etcd::start_in(|data| disk = Some(SmallDisk::mount(data, "160m")));
    let mut cluster = Cluster::start_over(etcd, 2, with_alice, imageless);
    let first = &cluster.nodes[0];
    first.write("alice", "plain/index.html", "plain words");
    first.write_program("alice", "app/app.py", crate::programs::INSTANCE);
    add(first, "app");
    until_the_store_confirms(&cluster);
    let (run, epoch) = (run_of(first, "app").text(), epoch_of(&cluster));
    for node in &cluster.nodes {
        wait::until("every node knows it", || sites(node).contains(&"app".to_owned()));
        wait::until("it could vouch for the other", || cluster_status(node)["vouches"] == true);
    }
    let filler = cluster.etcd.data(0).join("filler");
    fill_up(&filler);
    let records = first.path("records");
    let import = |number| {
        machine::write(&records, format!("{}\n", bulky(number)));
        first.try_cli(&["site", "import", &records.to_string_lossy()])
    };
    let mut number = 0;
    let said = wait::until_some("a change is refused", || {
        number += 1;
        let changed = import(number);
        (!changed.status.success()).then(|| String::from_utf8_lossy(&changed.stderr).into_owned())
    });
    assert!(said.contains("NGY023"), "{said}");
    wait::until("etcd says why", || cluster.etcd.log(0).contains("no space left on device"));
    for node in &cluster.nodes {
        wait::until("it says that it is not in step", || cluster_status(node)["in_step"] == false);
        let age = || cluster_status(node)["age_seconds"].as_f64().expect("it says how old what it knows is");
        let first = age();
        wait::until("it becomes older", || age() > first);
        // Its disk is why: no change succeeds.
        assert!(!import(0).status.success());
        wait::until("the same instance answers", || {
            let answer = node.get("app.test", "/run");
            answer.status == 200 && answer.text() == run
        });
        assert_eq!(cluster_status(node)["authority"], "members");
        assert_eq!(node.get("plain.test", "/").expect(200).text(), "plain words");
    }
    std::fs::remove_file(&filler).expect("our own file");
    // It ends when its disk is full.
    cluster.etcd.kill();
    cluster.etcd.begin();
    until_the_store_confirms(&cluster);
    let first = &cluster.nodes[0];
    first.cli(&["site", "import", &records.to_string_lossy()]);
    for node in &cluster.nodes {
        wait::until("it has the change", || sites(node).contains(&"bulky-0".to_owned()));
        assert_eq!(run_of(node, "app").text(), run);
    }
    assert_eq!(epoch_of(&cluster), epoch, "nothing moved");
    cluster.etcd.kill();
    drop(disk);
    cluster.stop();
}
