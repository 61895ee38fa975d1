//! What a cluster believes of etcd: how it may be reached, what somebody without the cluster's key writes there, and what is read there.
//!
//! Not here: signatures of the store alone (`nagaya_records`), an etcd that wants certificates (`cluster`).

use nagaya_tests::cluster::{self, Cluster, Etcd};
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::{Value, json};

use crate::cluster::{cluster_status, sites, until_the_store_confirms, with_alice};

pub const SUITE: Suite = Suite {
    name: "etcd_trust",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        a_hostile_write_into_etcd_changes_nothing_and_is_told,
        etcd_shows_no_secret_of_a_record,
        clear_text_to_etcd_is_refused_unless_it_is_named,
        a_member_of_an_older_version_is_told_how_to_reach_etcd,
    ]),
};

/// In the environment of an application's record.
const SECRET: &str = "DB_PASS-tell-nobody-in-etcd";

const SITES: &str = "/nagaya/main/v1/sites/";

/// Files and their site `evil`, as an attacker would have `plain` be.
fn evil_record(world: &World) -> Value {
    world.write("alice", "evil/index.html", "evil words");
    let root = world.home("alice").join("evil");
    json!({
        "name": "plain", "tenant": "alice", "hosts": ["plain.test"],
        "backend": { "kind": "static", "root": root },
    })
}

/// Waits until all nodes know what was written to etcd before this.
fn settle(cluster: &Cluster, marker: &str) {
    cluster.nodes[0].cli(&["setting", "set", marker, "v"]);
    for node in &cluster.nodes {
        wait::until("the marker is known", || node.cli(&["setting", "list"]).contains(marker));
    }
}

fn a_hostile_write_into_etcd_changes_nothing_and_is_told() {
    let cluster = Cluster::start(2, with_alice, |builder| builder);
    let [node, other] = [&cluster.nodes[0], &cluster.nodes[1]];
    node.write("alice", "plain/index.html", "plain words");
    until_the_store_confirms(&cluster);
    let key = format!("{SITES}plain");
    let evil = evil_record(node).to_string();
    let signed = cluster.etcd.values().into_iter().find(|(found, _)| *found == key).expect("the site").1;
    assert_eq!(node.metric("nagaya_cluster_values_refused_total", ""), 0.0);
    assert!(node.status()["cluster_store"]["refused"].as_u64().unwrap_or(0) == 0);
    cluster.etcd.put(&key, evil.as_bytes());
    cluster.etcd.put(&format!("{SITES}more"), evil.replace("\"plain\"", "\"more\"").as_bytes());
    // A value of the cluster's own, at another key.
    cluster.etcd.put(&format!("{SITES}moved"), &signed);
    settle(&cluster, "after");
    for world in [node, other] {
        assert_eq!(sites(world), ["plain"]);
        assert_eq!(world.get("plain.test", "/").expect(200).text(), "plain words");
        let status = cluster_status(world);
        assert_eq!(status["records_refused"], 3, "{status}");
        assert_eq!(status["records_signed"], true);
        assert_eq!(world.status()["cluster_store"]["refused"], 3);
        let screen = world.cli(&["status"]);
        assert!(
            screen.contains("REFUSED: 3 values") && screen.contains("sites/plain: it is not signed"),
            "{screen}"
        );
        assert!(world.metric("nagaya_cluster_values_refused_total", "") >= 3.0);
        assert_eq!(world.metric("nagaya_cluster_values_refused", ""), 3.0);
        wait::until("the log says so", || {
            let log = world.log();
            log.contains("NGY0238") && log.contains("sites/more: it is not signed")
        });
    }
    // Its operator has the store repaired from what the node knows.
    node.cli(&["cluster", "repair"]);
    for world in [node, other] {
        wait::until("nothing is refused", || cluster_status(world)["records_refused"] == 0);
        assert_eq!(sites(world), ["plain"]);
    }
    let left: Vec<String> = cluster.etcd.values().into_iter().map(|(key, _)| key).collect();
    assert_eq!(left.iter().filter(|key| key.starts_with(SITES)).collect::<Vec<_>>(), [&key]);
    let late = cluster::node(2).start();
    cluster::join(&late, node, &cluster.etcd);
    assert_eq!(sites(&late), ["plain"]);
    late.stop();
    cluster.stop();
}

fn etcd_shows_no_secret_of_a_record() {
    let cluster = Cluster::start(1, with_alice, |builder| builder);
    let node = &cluster.nodes[0];
    let backend =
        json!({ "kind": "app", "directory": "app", "command": ["./app"], "env": { "DB_PASS": SECRET } });
    node.import(&[json!({ "name": "app", "tenant": "alice", "hosts": ["app.test"], "backend": backend })]);
    wait::until("there are keys for tickets", || cluster_status(node)["ticket_key"].is_u64());
    let values = cluster.etcd.values();
    let text: Vec<(&String, String)> =
        values.iter().map(|(key, value)| (key, String::from_utf8_lossy(value).into_owned())).collect();
    assert!(text.iter().any(|(key, _)| key.ends_with("/sites/app")));
    assert!(text.iter().any(|(key, _)| key.ends_with("/tickets/keys")));
    for (key, value) in &text {
        assert!(!value.contains(SECRET), "{key} shows the secret of a site");
        assert!(!value.contains("\"secret\""), "{key} shows keys of tickets");
    }
    cluster.stop();
}

fn doctor_of_store(world: &World) -> Value {
    let checks: Value = serde_json::from_str(&world.cli(&["doctor", "--json"])).expect("checks are JSON");
    let mut checks = checks.as_array().expect("a list").iter();
    checks.find(|check| check["name"] == "cluster-store").expect("it is a check").clone()
}

fn restart(world: &World) {
    machine::signal(world.pid(), "TERM");
    assert!(world.wait_for_end().success());
    world.spawn();
    wait::until("it serves", || world.try_status().is_some_and(|status| status["healthy"] == true));
}

fn clear_text_to_etcd_is_refused_unless_it_is_named() {
    let etcd = Etcd::start();
    let world = with_alice(cluster::node(0)).start();
    assert_eq!(doctor_of_store(&world)["state"], "ok");
    for endpoint in [etcd.url(), "https://127.0.0.1:9".into()] {
        let refused = world.try_cli(&["cluster", "init", "--etcd", &endpoint]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains("NGY0239"), "{said}");
    }
    assert_eq!(etcd.values(), [], "nothing was written");
    cluster::init(&world, &etcd);
    wait::until("it is in step", || cluster_status(&world)["in_step"] == true);
    let stranger = cluster::node(1).start();
    machine::write(&stranger.path("token"), world.cli(&["cluster", "token"]));
    let path = stranger.path("token");
    let words = ["cluster", "join", "--etcd", &etcd.url(), "--token-file", &path.to_string_lossy()];
    let said = stranger.try_cli(&words).stderr;
    assert!(String::from_utf8_lossy(&said).contains("NGY0239"), "{}", String::from_utf8_lossy(&said));
    stranger.stop();
    // It is said wherever an operator looks, and at each start.
    let told = || world.log().matches("NGY0239").count();
    let before = told();
    assert!(before >= 1, "{}", world.log());
    restart(&world);
    wait::until("the log says it again", || told() > before);
    let doctor = doctor_of_store(&world);
    assert_eq!(doctor["state"], "warn");
    assert!(doctor["value"].as_str().is_some_and(|value| value.contains("clear text")), "{doctor}");
    let screen = world.cli(&["status"]);
    assert!(screen.contains("INSECURE: ") && screen.contains("clear text"), "{screen}");
    assert!(cluster_status(&world)["insecure"].is_string());
    assert_eq!(world.metric("nagaya_cluster_store_insecure", ""), 1.0);
    world.stop();
}

fn edit_member(world: &World, change: impl Fn(&mut Value)) {
    let path = world.path("state/cluster/member.json");
    let text = std::fs::read_to_string(&path).expect("a member has its file");
    let mut member = serde_json::from_str(&text).expect("it is JSON");
    change(&mut member);
    machine::write(&path, member.to_string());
}

fn a_member_of_an_older_version_is_told_how_to_reach_etcd() {
    let etcd = Etcd::start();
    let world = with_alice(cluster::node(0)).start();
    world.write("alice", "plain/index.html", "plain words");
    cluster::init(&world, &etcd);
    wait::until("it is in step", || cluster_status(&world)["in_step"] == true);
    machine::signal(world.pid(), "TERM");
    assert!(world.wait_for_end().success());
    // As a version wrote it that did not ask.
    edit_member(&world, |member| {
        member["etcd"].as_object_mut().expect("how it is reached").remove("insecure");
    });
    world.spawn();
    wait::until("it serves", || world.try_status().is_some_and(|status| status["healthy"] == true));
    wait::until("the log says why it does not follow", || {
        world.log().lines().any(|line| line.contains("NGY0239") && line.contains("nagaya cluster store"))
    });
    let screen = world.cli(&["status"]);
    assert!(screen.contains("INSECURE: ") && screen.contains("does not follow"), "{screen}");
    assert_eq!(world.get("plain.test", "/").expect(200).text(), "plain words", "what it knows is served");
    let refused = world.try_cli(&["cluster", "store", "--etcd", &etcd.url()]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("NGY0239"), "{refused:?}");
    world.cli(&["cluster", "store", "--etcd", &etcd.url(), "--insecure"]);
    wait::until("it is in step", || cluster_status(&world)["in_step"] == true);
    restart(&world);
    wait::until("it is so after a start", || {
        let status = world.try_cli(&["cluster", "status", "--json"]);
        serde_json::from_slice::<Value>(&status.stdout).is_ok_and(|status| status["in_step"] == true)
    });
    world.stop();
}
