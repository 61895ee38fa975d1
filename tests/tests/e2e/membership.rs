//! What changes about a cluster while it serves: nodes that are drained, used again or removed, the authority of their certificates, and
//! members of its store that are lost and come back.
//!
//! Not here: becoming a member and moving sites (`cluster`), the store alone (`nagaya_records`), networks that lose packets (`lab`).

use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nagaya_tests::cluster::{self, Cluster, Etcd, FENCE};
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
        nodes_answer_each_other_throughout_an_exchange_of_keys,
        a_join_token_is_good_once_and_for_its_time,
        a_removed_node_keeps_nothing_that_counts,
        the_keys_of_a_stolen_node_end_at_once,
        an_undrained_node_gets_sites_again_and_events_say_so,
        a_drained_node_can_be_removed_and_one_in_use_cannot,
        a_drained_node_that_is_removed_while_it_is_down_stays_out,
        a_node_removed_by_force_stops_serving_and_says_so,
        nobody_notices_that_the_store_has_lost_its_leader,
        without_a_quorum_a_cluster_serves_and_moves_nothing,
        with_a_full_store_disk_a_cluster_serves_and_says_its_age,
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
        let done = Arc::<AtomicBool>::default();
        let address = node.http();
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
        let count = failed.len();
        let of = statuses.len();
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
    let edge = world.pid_of("edge");
    let restarts = world.restarts_of("edge");
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

fn nodes_answer_each_other_throughout_an_exchange_of_keys() {
    // Nothing is to move, however long the store's disk takes on a busy machine.
    let cluster = cluster_with(3, |node| imageless(node).reset("cluster", FENCE, "fence = \"10s\""));
    let run = run_of(&cluster.nodes[0], "app").text();
    let at = cluster.node_of("app");
    let serials = || -> Vec<u64> {
        nodes_of(&cluster.nodes[0]).iter().filter_map(|node| node["authority"].as_u64()).collect()
    };
    let before = serials();
    assert_eq!(before, [before[0]; 3]);
    let old = kept(&cluster.nodes[0]);
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
    // The old one ends by itself; whoever says so as well changes nothing.
    until_one_authority(&cluster.nodes);
    let said = cluster.nodes[2].cli(&["cluster", "rotate", "--finish"]);
    assert!(said.contains("only authority"), "{said}");
    all_answer();
    visitors.into_iter().for_each(Visitor::saw_no_error);
    shares_no_key(&old, &cluster.nodes);
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

/// What a node keeps of its membership, as who reads its disk has it.
fn kept(node: &World) -> Value {
    let text = std::fs::read(node.path("state/cluster/member.json")).expect("it is a member");
    serde_json::from_slice(&text).expect("what it keeps is JSON")
}

/// All of them believe one authority, the same, and none has keys of probes or records beside the newest.
fn until_one_authority(nodes: &[World]) {
    let are_alone = || {
        let all: Vec<_> = nodes.iter().map(kept).collect();
        let is_alone = |one: &Value| {
            let authorities = one["authorities"].as_str().expect("PEM").matches("BEGIN CERTIFICATE").count();
            let is_newest = one["records"]["older"].is_null() && one["records"] == all[0]["records"];
            let is_alone = one["probe_keys_also"].is_null() && one["probe_key"] == all[0]["probe_key"];
            let has_one_key = one["image_keys"].as_array().is_some_and(|keys| keys.len() == 1);
            authorities == 1 && is_alone && is_newest && has_one_key
        };
        all.iter().all(is_alone)
    };
    assert!(
        wait::within(EXCHANGED_MAX, || are_alone().then_some(())).is_some(),
        "the old authority ends: {:?}",
        nodes.iter().map(cluster_status).collect::<Vec<_>>()
    );
}

/// Of what somebody kept of before, nothing counts with these nodes: neither certificates nor keys.
fn shares_no_key(old: &Value, nodes: &[World]) {
    for node in nodes {
        let now = kept(node);
        assert_ne!(now["probe_key"], old["probe_key"], "its probes are somebody else's");
        assert_ne!(now["known"], old["known"]);
        let images = |kept: &Value| kept["image_keys"].as_array().expect("a list").clone();
        assert!(!images(&now).contains(&images(old)[0]), "it takes images by a key of before");
        assert_ne!(now["records"]["current"], old["records"]["current"], "it signs records with another key");
        let certificate = node.path("old.pem");
        let authorities = node.path("believed.pem");
        machine::write(&certificate, old["credentials"]["certificate"].as_str().expect("PEM"));
        machine::write(&authorities, now["authorities"].as_str().expect("PEM"));
        let verify = |authorities: &Path, certificate: &Path| {
            let authorities = authorities.to_string_lossy();
            let certificate = certificate.to_string_lossy();
            machine::output("openssl", &["verify", "-CAfile", &authorities, &certificate]).status.success()
        };
        assert!(!verify(&authorities, &certificate), "a certificate of the old authority is believed");
        machine::write(&certificate, now["credentials"]["certificate"].as_str().expect("PEM"));
        assert!(verify(&authorities, &certificate), "its own is believed");
    }
}

/// What a join by this token is told.
fn join_by(stranger: &World, etcd: &Etcd, token: &str) -> Result<(), String> {
    machine::write(&stranger.path("token"), token);
    let url = etcd.url();
    let path = stranger.path("token");
    let output = stranger.try_cli(&[
        "cluster",
        "join",
        "--etcd",
        &url,
        "--insecure",
        "--token-file",
        &path.to_string_lossy(),
    ]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(said) }
}

fn a_join_token_is_good_once_and_for_its_time() {
    let cluster = cluster_with(1, imageless);
    let first = &cluster.nodes[0];
    let [second, third] = [cluster::node(1).start(), cluster::node(2).start()];
    let tokens = || -> Vec<Value> {
        serde_json::from_str(&first.cli(&["cluster", "token", "--list", "--json"])).expect("tokens are JSON")
    };
    let make = |ttl: &str| first.cli(&["cluster", "token", "--ttl", ttl]);
    let is_refused = |token: &str| {
        let said = join_by(&third, &cluster.etcd, token).expect_err("nobody joins by it");
        assert!(said.contains("NGY0243") && said.contains("prints a new one"), "{said}");
        assert_eq!(nodes_of(first).len(), 2);
    };
    let used = make("1h");
    assert_eq!((tokens().len(), tokens()[0]["by"].as_str()), (1, Some("a")));
    assert!(!tokens()[0].to_string().contains("secret"));
    assert_eq!(join_by(&second, &cluster.etcd, &used), Ok(()));
    assert!(tokens().is_empty(), "it is gone with the join");
    is_refused(&used);
    let expired = make("1s");
    wait::until("its time is over", || tokens().is_empty());
    is_refused(&expired);
    let revoked = make("10m");
    let id = tokens()[0]["id"].as_str().expect("an id").to_owned();
    first.cli(&["cluster", "token", "--revoke", &id]);
    is_refused(&revoked);
    let before = make("10m");
    second.cli(&["cluster", "rotate"]);
    assert!(tokens().is_empty(), "what it opens is old");
    is_refused(&before);
    assert_eq!(join_by(&third, &cluster.etcd, &make("10m")), Ok(()));
    wait::until("they know each other", || nodes_of(&second).len() == 3);
    for node in [second, third] {
        node.stop();
    }
    cluster.stop();
}

fn a_removed_node_keeps_nothing_that_counts() {
    let mut cluster = cluster_with(3, imageless);
    let run = run_of(&cluster.nodes[0], "app").text();
    let out = (cluster.node_of("app") + 1) % 3;
    let name = cluster::name_of(out);
    let removed = cluster.nodes.remove(out);
    let old = kept(&removed);
    let visitors: Vec<_> =
        cluster.nodes.iter().map(|node| Visitor::begin(node, "app.test", "/run")).collect();
    cluster.nodes[0].cli(&["cluster", "remove", &name, "--force"]);
    // By then what it has in its memory is all that it ever gets.
    wait::until("it may run nothing", || cluster_status(&removed)["authority"] == "none");
    until_one_authority(&cluster.nodes);
    visitors.into_iter().for_each(Visitor::saw_no_error);
    shares_no_key(&old, &cluster.nodes);
    assert!(cluster.nodes.iter().all(|node| run_of(node, "app").text() == run), "nothing has changed for it");
    assert_eq!(kept(&removed)["known"], old["known"], "it has not got the new keys");
    let stored = cluster.etcd.value("/nagaya/main/v1/pki/authority");
    let stored: Value = serde_json::from_str(&stored).expect("it is JSON");
    let members: Vec<_> = stored["members"].as_object().expect("by name").keys().collect();
    assert!(members.len() == 2 && !members.contains(&&name), "nothing is wrapped for it: {members:?}");
    // With its disk and another name's place it comes back as nobody.
    machine::signal(removed.pid(), "KILL");
    removed.wait_for_end();
    removed.spawn();
    wait::until("it says why", || removed.log().contains("no member of the cluster any more"));
    assert_eq!(nodes_of(&cluster.nodes[0]).len(), 2);
    removed.stop();
    cluster.stop();
}

fn the_keys_of_a_stolen_node_end_at_once() {
    let mut cluster = cluster_with(3, imageless);
    let run = run_of(&cluster.nodes[0], "app").text();
    let out = (cluster.node_of("app") + 1) % 3;
    let stolen = cluster.nodes.remove(out);
    let old = kept(&stolen);
    let said = cluster.nodes[0].cli(&["cluster", "remove", &cluster::name_of(out), "--stolen"]);
    assert!(said.contains("count no more"), "{said}");
    // The node that was told has ended them when it answers; nobody waits for the others.
    shares_no_key(&old, &cluster.nodes[..1]);
    assert_eq!(cluster_status(&cluster.nodes[0])["certificate_authorities"], 1);
    until_one_authority(&cluster.nodes);
    shares_no_key(&old, &cluster.nodes);
    for node in &cluster.nodes {
        wait::until("they answer for each other", || node.get("app.test", "/run").status == 200);
    }
    assert!(cluster.nodes.iter().all(|node| !run_of(node, "app").text().is_empty()), "was {run}");
    stolen.stop();
    cluster.stop();
}

fn an_undrained_node_gets_sites_again_and_events_say_so() {
    let cluster = cluster_with(2, imageless);
    run_of(&cluster.nodes[0], "app");
    let at = cluster.node_of("app");
    let node = &cluster.nodes[at];
    let other = &cluster.nodes[1 - at];
    let name = cluster::name_of(at);
    let its = cluster::name_of(1 - at);
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
    let node = &cluster.nodes[at];
    let other = &cluster.nodes[1 - at];
    let name = cluster::name_of(at);
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
    // Started anew it is none either; with a token it is a member like any that has joined.
    machine::signal(node.pid(), "TERM");
    assert!(node.wait_for_end().success());
    node.spawn();
    wait::until("it says why", || node.log().contains("no member of the cluster any more"));
    wait::until("it says so, too", || node.try_status().is_some() && cluster_status(node)["member"] == false);
    assert_eq!(nodes_of(other).len(), 1);
    cluster::join(node, other, &cluster.etcd);
    assert_eq!(cluster_status(node)["member"], true);
    wait::until("others see it", || state_of(other, &name) == Some(json!("up")));
    wait::until("it passes requests on", || node.get("app.test", "/run").status == 200);
    assert_eq!(run_of(node, "app").text(), run);
    cluster.stop();
}

fn a_drained_node_that_is_removed_while_it_is_down_stays_out() {
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
    wait::until("it says why", || node.log().contains("no member of the cluster any more"));
    assert_eq!(nodes_of(other).len(), 1);
    // It is not drained any more then.
    cluster::join(node, other, &cluster.etcd);
    wait::until("others see it", || state_of(other, &name) == Some(json!("up")));
    cluster.stop();
}

fn a_node_removed_by_force_stops_serving_and_says_so() {
    let cluster = cluster_with(2, imageless);
    let first = run_of(&cluster.nodes[0], "app").text();
    let at = cluster.node_of("app");
    let node = &cluster.nodes[at];
    let other = &cluster.nodes[1 - at];
    let name = cluster::name_of(at);
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
    let run = run_of(&cluster.nodes[0], "app").text();
    let epoch = epoch_of(&cluster);
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

fn without_a_quorum_a_cluster_serves_and_moves_nothing() {
    let mut cluster = over_three_members(2);
    let run = run_of(&cluster.nodes[0], "app").text();
    let epoch = epoch_of(&cluster);
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

fn with_a_full_store_disk_a_cluster_serves_and_says_its_age() {
    let mut disk = None;
    // etcd keeps 128 MiB ready for its log.
    let etcd = Etcd::start_in(|data| disk = Some(SmallDisk::mount(data, "160m")));
    let mut cluster = Cluster::start_over(etcd, 2, with_alice, imageless);
    let first = &cluster.nodes[0];
    first.write("alice", "plain/index.html", "plain words");
    first.write_program("alice", "app/app.py", crate::programs::INSTANCE);
    add(first, "app");
    until_the_store_confirms(&cluster);
    let run = run_of(first, "app").text();
    let epoch = epoch_of(&cluster);
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
