//! Several nodes as one: a node becomes a cluster, others join, every node answers for every site, and a site whose node does
//! not answer moves within the request that found out.
//!
//! Not here: networks that lose packets, long storms (`./dev cluster`, experiments), the store alone (`nagaya_records`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nagaya_tests::client::{self, Connection, Response};
use nagaya_tests::cluster::{self, Cluster, Etcd, Frozen};
use nagaya_tests::suite::{Suite, Tests, skip};
use nagaya_tests::world::{Builder, World, cgroups_of};
use nagaya_tests::{machine, wait};
use serde_json::{Value, json};

use crate::programs;
use crate::resting::{has, with_criu};

pub const SUITE: Suite = Suite {
    name: "cluster",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        a_node_becomes_a_cluster_while_it_serves,
        a_second_node_takes_over_the_records_and_both_change_them,
        a_rule_that_is_set_at_one_node_holds_at_all,
        refused_join_changes_nothing,
        every_node_answers_for_an_application_that_runs_on_one,
        a_silent_nodes_application_moves_within_the_request,
        how_long_a_move_will_take_is_known_after_the_first,
        the_fence_of_a_silent_node_begins_while_it_is_probed,
        images_are_at_the_fallback_before_their_application_moves,
        a_killed_node_comes_back_without_its_application,
        a_drained_node_gives_its_applications_away_without_an_error,
        a_slow_node_is_waited_for_where_no_other_may_take_over,
        a_post_to_a_silent_node_is_not_done_twice,
        without_its_store_a_cluster_serves_what_it_knows,
        without_store_and_one_node_no_application_is_served,
        a_node_name_belongs_to_one_machine,
        a_site_that_is_removed_and_added_again_goes_on_where_it_was,
        a_node_with_an_old_disk_serves_nothing_that_it_has_lost,
        a_node_whose_clock_is_wrong_is_a_node_like_any_other,
        an_etcd_that_wants_certificates_and_a_password_gets_them,
        only_the_peer_thread_runs_with_real_time_priority,
        the_fencing_process_is_small_and_locked_in_memory,
        an_application_is_moved_by_a_command_on_any_node,
        nothing_is_left_of_an_application_on_a_node_that_lost_it,
        a_long_response_survives_a_pause_and_ends_with_a_lost_node,
    ]),
};

/// Until nothing is left of a removed site: its node waits for 40 s, and the machine may be slow.
const CLEARED_MAX: Duration = Duration::from_secs(120);

pub fn with_alice(builder: Builder) -> Builder {
    builder.tenant("alice").site_of("alice", "plain", json!({ "kind": "static", "root": "plain" }))
}

/// Without images, so that each start is another run.
pub fn imageless(builder: Builder) -> Builder {
    with_criu(builder).set("instances", "image_bytes = \"0B\"")
}

/// A cluster whose first node has an application at `app.test`, and files at `plain.test`.
fn cluster_of(count: usize) -> Cluster {
    cluster_with(count, with_criu)
}

pub fn cluster_with(count: usize, each: impl Fn(Builder) -> Builder) -> Cluster {
    let cluster = Cluster::start(count, with_alice, each);
    let first = &cluster.nodes[0];
    first.write("alice", "plain/index.html", "plain words");
    first.write_program("alice", "app/app.py", programs::INSTANCE);
    add(first, "app");
    // A node that has no authority yet hands on what is placed on it.
    until_the_store_confirms(&cluster);
    for node in &cluster.nodes {
        wait::until("every node knows the application", || sites(node).contains(&"app".to_owned()));
    }
    cluster
}

pub fn add(world: &World, name: &str) {
    let backend = json!({
        "kind": "app", "directory": "app", "command": ["./app.py", machine::mark("cluster", name)], "start_seconds": 20,
        "env": { "NAME": name },
    });
    world.import(&[
        json!({ "name": name, "tenant": "alice", "hosts": [format!("{name}.test")], "backend": backend }),
    ]);
}

pub fn sites(world: &World) -> Vec<String> {
    let text = world.cli(&["site", "list", "--json"]);
    let sites: Value = serde_json::from_str(&text).expect("sites are JSON");
    let names = sites.as_array().expect("a list").iter().filter_map(|site| site["name"].as_str());
    names.map(ToOwned::to_owned).collect()
}

pub fn cluster_status(world: &World) -> Value {
    serde_json::from_str(&world.cli(&["cluster", "status", "--json"])).expect("a status is JSON")
}

#[track_caller]
pub fn until_the_store_confirms(cluster: &Cluster) {
    for node in &cluster.nodes {
        wait::until("it is in step and may serve by the store's word", || {
            let status = cluster_status(node);
            status["in_step"] == true && status["authority"] == "store"
        });
    }
}

#[track_caller]
pub fn run_of(world: &World, site: &str) -> Response {
    world.get(&format!("{site}.test"), "/run").expect(200)
}

fn a_node_becomes_a_cluster_while_it_serves() {
    let etcd = Etcd::start();
    let world = with_alice(cluster::node(0)).start();
    world.write("alice", "plain/index.html", "plain words");
    let done = Arc::new(AtomicBool::new(false));
    let failed = Arc::new(AtomicU32::new(0));
    let visitor = {
        let done = Arc::clone(&done);
        let failed = Arc::clone(&failed);
        let address = world.http();
        std::thread::spawn(move || {
            let mut visits = 0;
            while !done.load(Ordering::Relaxed) {
                let answer = client::get(address, "plain.test", "/");
                failed.fetch_add(u32::from(answer.status != 200), Ordering::Relaxed);
                visits += 1;
            }
            visits
        })
    };
    let before = (world.pid_of("edge"), world.pid_of("keeper"));
    let made = world.cli(&["cluster", "init", "--etcd", &etcd.url(), "--insecure", "--json"]);
    let made: Value = serde_json::from_str(&made).expect("it is JSON");
    assert_eq!((made["node"].as_str(), made["sites"].as_u64()), (Some("a"), Some(1)));
    wait::until("it is in step and may serve", || {
        let status = cluster_status(&world);
        status["in_step"] == true && status["authority"] == "store"
    });
    done.store(true, Ordering::Relaxed);
    assert!(visitor.join().expect("it does not panic") > 0);
    assert_eq!(failed.load(Ordering::Relaxed), 0);
    assert_eq!((world.pid_of("edge"), world.pid_of("keeper")), before, "no process was started anew");
    assert_eq!(sites(&world), ["plain"]);
    let again = world.try_cli(&["cluster", "init", "--etcd", &etcd.url(), "--insecure"]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("NGY0242"), "{again:?}");
    world.stop();
}

fn a_second_node_takes_over_the_records_and_both_change_them() {
    let cluster = Cluster::start(2, with_alice, with_criu);
    let [a, b] = &cluster.nodes[..] else { unreachable!("two were asked for") };
    a.write("alice", "plain/index.html", "plain words");
    assert_eq!(
        b.get("plain.test", "/").expect(200).text(),
        "plain words",
        "it was known when join had returned"
    );
    let more = |name: &str| {
        json!({ "name": name, "tenant": "alice", "hosts": [format!("{name}.test")],
                "backend": { "kind": "static", "root": "plain" } })
    };
    b.import(&[more("from-b")]);
    assert_eq!(b.get("from-b.test", "/").expect(200).text(), "plain words");
    wait::until("the other node serves it too", || a.get("from-b.test", "/").status == 200);
    a.cli(&["site", "remove", "from-b"]);
    wait::until("the other node serves it no more", || b.get("from-b.test", "/").status == 404);
    let nodes: Value = serde_json::from_str(&a.cli(&["nodes", "--json"])).expect("it is JSON");
    let names: Vec<_> =
        nodes.as_array().expect("a list").iter().filter_map(|node| node["name"].as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    cluster.stop();
}

fn a_rule_that_is_set_at_one_node_holds_at_all() {
    let etcd = Etcd::start();
    let named = |builder: Builder| builder.stored_rule("gate", "access_checker", "");
    let a = with_alice(named(cluster::node(0))).start();
    a.write("alice", "plain/index.html", "plain words");
    let status = |world: &World| world.get("plain.test", "/").status;
    // What a node alone has goes with it into its cluster, and to whoever joins.
    a.set_rule("gate", "answer 403\n");
    cluster::init(&a, &etcd);
    let b = named(cluster::node(1)).start();
    cluster::join(&b, &a, &etcd);
    assert_eq!((status(&a), status(&b)), (403, 403));
    wait::until("records are signed", || cluster_status(&b)["format"] == 3);
    for (at, other, answer) in [(&b, &a, 404), (&a, &b, 410)] {
        at.set_rule("gate", &format!("answer {answer}\n"));
        assert_eq!(status(at), answer, "it was told as done");
        wait::until("the other node has it, too", || status(other) == answer);
    }
    assert_eq!(a.cli(&["rule", "show", "gate"]), b.cli(&["rule", "show", "gate"]));
    b.cli(&["rule", "remove", "gate"]);
    assert_eq!(status(&b), 200);
    wait::until("it is gone at the other node", || status(&a) == 200);
    a.stop();
    b.stop();
}

fn refused_join_changes_nothing() {
    let cluster = Cluster::start(1, with_alice, with_criu);
    let stranger = cluster::node(1).tenant("carol").start();
    let try_join = |token: &str, more: &[&str]| {
        machine::write(&stranger.path("token"), token);
        let url = cluster.etcd.url();
        let path = stranger.path("token");
        let mut words = vec!["cluster", "join", "--etcd", &url, "--insecure", "--token-file"];
        let path = path.to_string_lossy();
        words.push(&path);
        words.extend(more);
        let output = stranger.try_cli(&words);
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let right = cluster.nodes[0].cli(&["cluster", "token"]);
    let wrong = format!("nagaya-{}", "0".repeat(64));
    let (joined, said) = try_join(&wrong, &["--discard"]);
    assert!(!joined && said.contains("NGY0243") && said.contains("token"), "{said}");
    let (joined, said) = try_join("rubbish", &["--discard"]);
    assert!(!joined && said.contains("nagaya-"), "{said}");
    let (joined, said) = try_join(&right, &[]);
    assert!(!joined && said.contains("--discard") && said.contains("1 tenants"), "{said}");
    assert!(stranger.cli(&["tenant", "list"]).contains("carol"), "its records are as they were");
    let (joined, said) = try_join(&right, &["--discard"]);
    assert!(joined, "{said}");
    let tenants = stranger.cli(&["tenant", "list"]);
    assert!(tenants.contains("alice") && !tenants.contains("carol"), "{tenants}");
    stranger.stop();
    cluster.stop();
}

fn every_node_answers_for_an_application_that_runs_on_one() {
    let cluster = cluster_of(3);
    let runs: Vec<_> = cluster.nodes.iter().map(|node| run_of(node, "app").text()).collect();
    assert!(runs.iter().all(|run| *run == runs[0]), "one instance answers all: {runs:?}");
    let placement = cluster.placement(0, "app").expect("it was asked for");
    assert_eq!((placement["epoch"].as_u64(), placement["why"].as_str()), (Some(1), Some("first")));
    let at = cluster.node_of("app");
    let other = &cluster.nodes[(at + 1) % 3];
    let answer = run_of(other, "app");
    let id = answer.header("x-request-id").map(ToOwned::to_owned);
    // The node that runs it sees the visitor, not the node that passed it on.
    let id = id.unwrap_or_default();
    if !id.is_empty() {
        assert_eq!(cluster.nodes[at].logged(&id)["client"], "127.0.0.1");
    }
    let status = other.status();
    assert_eq!(status["healthy"], true);
    cluster.stop();
}

fn a_silent_nodes_application_moves_within_the_request() {
    let cluster = cluster_with(2, imageless);
    let first = run_of(&cluster.nodes[0], "app").text();
    let at = cluster.node_of("app");
    let other = &cluster.nodes[1 - at];
    assert_eq!(run_of(other, "app").text(), first);
    let frozen = Frozen::stop(&cluster.nodes[at]);
    let second = run_of(other, "app").text();
    assert_ne!(second, first, "it was started anew on the other node");
    let moved: Value = serde_json::from_str(&other.cli(&["placements", "--json"])).expect("it is JSON");
    assert_eq!((moved[0]["epoch"].as_u64(), moved[0]["why"].as_str()), (Some(2), Some("silent")));
    drop(frozen);
    // The node that comes back passes requests on, and its own instance is gone.
    wait::until("the old node passes it on", || {
        let answer = cluster.nodes[at].get("app.test", "/run");
        answer.status == 200 && answer.text() == second
    });
    wait::until("the old instance is gone", || {
        let list = cluster.nodes[at].cli(&["instance", "list", "--json"]);
        let list: Value = serde_json::from_str(&list).expect("it is JSON");
        list.as_array()
            .is_some_and(|list| list.iter().all(|one| one["tier"] == "cold" || one["tier"] == "image"))
    });
    cluster.stop();
}

fn how_long_a_move_will_take_is_known_after_the_first() {
    let cluster = cluster_with(2, imageless);
    run_of(&cluster.nodes[0], "app");
    let at = cluster.node_of("app");
    let node = &cluster.nodes[at];
    let other = &cluster.nodes[1 - at];
    let move_by_silence = || {
        let frozen = Frozen::stop(node);
        let answer = run_of(other, "app");
        drop(frozen);
        let timing = answer.header("server-timing").expect("this client is told").to_owned();
        assert!(timing.contains("relocate-detect"), "{timing}");
        let id = answer.header("x-request-id").expect("it is told").to_owned();
        let told = other.logged(&id)["place"]["relocated"][0]["predicted_us"].clone();
        (timing.contains("relocate-predicted;dur="), told.as_u64())
    };
    let (is_in_answer, told) = move_by_silence();
    assert_eq!(is_in_answer, told.is_some(), "a node knows it that has waited for its first place");
    wait::until("the old node is back", || run_of_any(node, "app"));
    let moved = other.try_cli(&["cluster", "move", "app", "--to", &cluster::name_of(at)]);
    assert!(moved.status.success(), "{moved:?}");
    wait::until("it has come back", || cluster.node_of("app") == at && run_of_any(other, "app"));
    let (is_in_answer, told) = move_by_silence();
    assert!(is_in_answer && told > Some(0), "{told:?}");
    cluster.stop();
}

/// Where the store has heard that its answer is late before it is asked for the move, as it mostly has.
fn the_fence_of_a_silent_node_begins_while_it_is_probed() {
    const WHOLE_MS: u64 = 1000;
    let cluster = cluster_with(2, imageless);
    run_of(&cluster.nodes[0], "app");
    let mut waits = Vec::new();
    while waits.len() < 10 && !waits.iter().any(|wait| *wait < WHOLE_MS) {
        let at = cluster.node_of("app");
        let frozen = Frozen::stop(&cluster.nodes[at]);
        let run = run_of(&cluster.nodes[1 - at], "app").text();
        let placement = cluster.placement(1 - at, "app").expect("it is placed");
        assert_eq!(
            (&placement["node"], &placement["why"]),
            (&json!(cluster::name_of(1 - at)), &json!("silent"))
        );
        waits.push(placement["wait_ms"].as_u64().unwrap_or(0));
        drop(frozen);
        wait::until("the old node passes it on", || {
            let answer = cluster.nodes[at].get("app.test", "/run");
            answer.status == 200 && answer.text() == run
        });
    }
    assert!(waits.iter().any(|wait| *wait < WHOLE_MS), "no move has counted from before: {waits:?} ms");
    cluster.stop();
}

fn images_are_at_the_fallback_before_their_application_moves() {
    let cluster = cluster_of(2);
    if !has(&cluster.nodes[0], "criu") {
        cluster.stop();
        skip("there is no CRIU here that works");
    }
    let run = run_of(&cluster.nodes[0], "app").text();
    let at = cluster.node_of("app");
    let other = &cluster.nodes[1 - at];
    wait::until("its image is on the other node", || {
        let placement = cluster.placement(1 - at, "app").expect("it is placed");
        placement["fallback"] == cluster::name_of(1 - at) && placement["image_here"] == true
    });
    let status = cluster_status(other);
    assert_eq!((status["images_here"].as_u64(), status["images_wanted"].as_u64()), (Some(1), Some(1)));
    let placement = cluster.placement(at, "app").expect("it is placed");
    assert_eq!(placement["image_here"], false, "the node that runs it is not its own fallback");
    assert!(other.metric("nagaya_image_transfer_bytes_total", "direction=\"in\"") > 0.0);
    let frozen = Frozen::stop(&cluster.nodes[at]);
    let answer = run_of(other, "app");
    assert_eq!(answer.text(), run, "the same run goes on, from its image");
    let receipt = answer.header("nagaya-receipt").expect("this client gets receipts");
    assert!(receipt.contains(";restore=") && !receipt.contains(";boot="), "{receipt}");
    let moved = cluster.placement(1 - at, "app").expect("it is placed");
    assert_eq!(
        (moved["node"].as_str(), moved["why"].as_str()),
        (Some(&*cluster::name_of(1 - at)), Some("silent"))
    );
    drop(frozen);
    cluster.stop();
}

fn a_killed_node_comes_back_without_its_application() {
    let cluster = cluster_of(2);
    run_of(&cluster.nodes[0], "app");
    let at = cluster.node_of("app");
    let dead = &cluster.nodes[at];
    let other = &cluster.nodes[1 - at];
    machine::signal(dead.pid(), "KILL");
    dead.wait_for_end();
    let second = run_of(other, "app").text();
    dead.spawn();
    wait::until("the node is back", || dead.try_status().is_some_and(|status| status["healthy"] == true));
    wait::until("it passes requests on", || {
        let answer = dead.get("app.test", "/run");
        answer.status == 200 && answer.text() == second
    });
    cluster.stop();
}

fn a_drained_node_gives_its_applications_away_without_an_error() {
    let cluster = cluster_of(2);
    let names: Vec<String> = (0..4).map(|n| format!("app{n}")).collect();
    for name in &names {
        add(&cluster.nodes[0], name);
    }
    for name in &names {
        wait::until("both nodes know it", || sites(&cluster.nodes[1]).contains(name));
        run_of(&cluster.nodes[0], name);
    }
    let done = Arc::new(AtomicBool::new(false));
    let visitors: Vec<_> = names
        .iter()
        .map(|name| {
            let done = Arc::clone(&done);
            let address = cluster.nodes[0].http();
            let host = format!("{name}.test");
            std::thread::spawn(move || {
                let mut statuses = Vec::new();
                while !done.load(Ordering::Relaxed) {
                    statuses.push(client::get(address, &host, "/run").status);
                }
                statuses
            })
        })
        .collect();
    let at = cluster.node_of("app0");
    let name = cluster::name_of(at);
    let other = &cluster.nodes[1 - at];
    other.cli(&["cluster", "drain", &name]);
    wait::until("it has none left", || {
        let placements = other.cli(&["placements", "--node", &name, "--json"]);
        serde_json::from_str::<Value>(&placements)
            .is_ok_and(|rows| rows.as_array().is_some_and(Vec::is_empty))
    });
    done.store(true, Ordering::Relaxed);
    for visitor in visitors {
        let statuses = visitor.join().expect("it does not panic");
        assert!(!statuses.is_empty() && statuses.iter().all(|status| *status == 200), "{statuses:?}");
    }
    let why = |name: &String| cluster.placement(0, name).expect("it is placed")["why"].clone();
    assert!(
        names.iter().any(|name| why(name) == "draining"),
        "{:?}",
        names.iter().map(why).collect::<Vec<_>>()
    );
    cluster.stop();
}

fn a_slow_node_is_waited_for_where_no_other_may_take_over() {
    let cluster = cluster_with(2, imageless);
    let first = run_of(&cluster.nodes[0], "app").text();
    let at = cluster.node_of("app");
    let slow = &cluster.nodes[at];
    let other = &cluster.nodes[1 - at];
    // It answers for the application, and takes none.
    other.cli(&["cluster", "drain", &cluster::name_of(1 - at)]);
    assert_eq!(run_of(other, "app").text(), first);
    let before = cluster.placement(1 - at, "app").expect("it is placed");
    let node = cluster::name_of(at);
    let silent = || other.metric("nagaya_peer_probes_total", &format!("node=\"{node}\",found=\"silent\""));
    let silent_before = silent();
    let frozen = Frozen::stop(slow);
    let answered = Arc::<AtomicBool>::default();
    let address = other.http();
    let visitor = std::thread::spawn({
        let answered = Arc::clone(&answered);
        move || {
            let answer = client::get(address, "app.test", "/run");
            answered.store(true, Ordering::Relaxed);
            answer
        }
    });
    wait::until("it counts as silent", || silent() > silent_before);
    assert!(!answered.load(Ordering::Relaxed), "nobody was there to answer");
    drop(frozen);
    let answer = visitor.join().expect("it does not panic");
    assert_eq!((answer.status, answer.text()), (200, first));
    let after = cluster.placement(1 - at, "app").expect("it is placed");
    assert_eq!((&after["node"], &after["epoch"]), (&before["node"], &before["epoch"]));
    cluster.stop();
}

fn a_post_to_a_silent_node_is_not_done_twice() {
    let cluster = cluster_of(2);
    run_of(&cluster.nodes[0], "app");
    let at = cluster.node_of("app");
    let other = &cluster.nodes[1 - at];
    let frozen = Frozen::stop(&cluster.nodes[at]);
    // It is done on the new node, which ends the program; or nobody knows whether it was done, and it is not tried again.
    let answer = client::post(other.http(), "app.test", "/note-and-exit", "x");
    assert_eq!(answer.status, 502, "{answer:?}");
    drop(frozen);
    wait::until("the site is served", || other.get("app.test", "/run").status == 200);
    let notes = cluster.nodes[0].home("alice").join("app/app.notes");
    let noted = std::fs::read_to_string(notes).unwrap_or_default();
    assert!(noted.lines().count() <= 1, "{noted}");
    cluster.stop();
}

pub fn epoch_of(cluster: &Cluster) -> Value {
    cluster.placement(0, "app").expect("it is placed")["epoch"].clone()
}

fn without_its_store_a_cluster_serves_what_it_knows() {
    let mut cluster = cluster_of(2);
    let run = run_of(&cluster.nodes[0], "app").text();
    let epoch = epoch_of(&cluster);
    for node in &cluster.nodes {
        wait::until("it could vouch for the other", || cluster_status(node)["vouches"] == true);
    }
    cluster.etcd.kill();
    for node in &cluster.nodes {
        wait::until("the other one vouches for it", || cluster_status(node)["authority"] == "members");
    }
    for node in &cluster.nodes {
        wait::until("the same instance answers while the store is down", || {
            let answer = node.get("app.test", "/run");
            answer.status == 200 && answer.text() == run
        });
    }
    for node in &cluster.nodes {
        wait::until("it says that it is not in step", || cluster_status(node)["in_step"] == false);
        // Longer than a promise lasts: it was given again.
        assert_eq!(cluster_status(node)["authority"], "members");
        assert_eq!(run_of(node, "app").text(), run);
        assert_eq!(node.get("plain.test", "/").expect(200).text(), "plain words");
        let change = node.try_cli(&["site", "remove", "plain"]);
        assert!(String::from_utf8_lossy(&change.stderr).contains("NGY023"), "{change:?}");
    }
    cluster.etcd.begin();
    for node in &cluster.nodes {
        wait::until("the same instance answers again", || {
            let answer = node.get("app.test", "/run");
            answer.status == 200 && answer.text() == run
        });
        wait::until("the store confirms again", || cluster_status(node)["authority"] == "store");
    }
    assert_eq!(epoch_of(&cluster), epoch, "nothing moved");
    cluster.stop();
}

fn without_store_and_one_node_no_application_is_served() {
    let mut cluster = cluster_of(2);
    run_of(&cluster.nodes[0], "app");
    let epoch = epoch_of(&cluster);
    for node in &cluster.nodes {
        wait::until("it could vouch for the other", || cluster_status(node)["vouches"] == true);
    }
    let at = cluster.node_of("app");
    cluster.etcd.kill();
    wait::until("the other one vouches for it", || {
        cluster_status(&cluster.nodes[at])["authority"] == "members"
    });
    let frozen = Frozen::stop(&cluster.nodes[1 - at]);
    let node = &cluster.nodes[at];
    wait::until("nobody vouches for it", || cluster_status(node)["authority"] == "none");
    assert_eq!(node.get("app.test", "/run").status, 503);
    assert_eq!(node.get("plain.test", "/").expect(200).text(), "plain words");
    drop(frozen);
    wait::until("the other one vouches for it again", || cluster_status(node)["authority"] == "members");
    wait::until("it serves the application", || node.get("app.test", "/run").status == 200);
    assert_eq!(epoch_of(&cluster), epoch, "nothing moved");
    cluster.etcd.begin();
    cluster.stop();
}

fn a_node_name_belongs_to_one_machine() {
    let cluster = Cluster::start(1, with_alice, with_criu);
    let twin = cluster::node(0).start();
    machine::write(&twin.path("token"), cluster.nodes[0].cli(&["cluster", "token"]));
    let path = twin.path("token");
    let url = cluster.etcd.url();
    let path = path.to_string_lossy();
    let words = ["cluster", "join", "--etcd", &url, "--insecure", "--token-file", &path];
    let refused = twin.try_cli(&words);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("NGY0235"), "{said}");
    let status = twin.try_cli(&["cluster", "status"]);
    assert!(String::from_utf8_lossy(&status.stderr).contains("NGY0241"), "it is in no cluster");
    twin.stop();
    cluster.stop();
}

fn a_site_that_is_removed_and_added_again_goes_on_where_it_was() {
    let cluster = cluster_with(2, imageless);
    add(&cluster.nodes[0], "gone");
    wait::until("both know it", || cluster.nodes.iter().all(|node| sites(node).contains(&"gone".into())));
    let first = run_of(&cluster.nodes[0], "app").text();
    run_of(&cluster.nodes[0], "gone");
    let at = cluster.node_of("app");
    let node = &cluster.nodes[at];
    let other = &cluster.nodes[1 - at];
    // As nodes count them, with those that are not shown.
    let counted = || -> u64 {
        let nodes: Value = serde_json::from_str(&other.cli(&["nodes", "--json"])).expect("nodes are JSON");
        let nodes = nodes.as_array().expect("a list").iter();
        nodes.map(|node| node["placements"].as_u64().expect("a count")).sum()
    };
    wait::until("both are counted", || counted() == 2);
    let removed = Instant::now();
    for site in ["app", "gone"] {
        other.cli(&["site", "remove", site]);
        wait::until("it is gone everywhere", || {
            cluster.nodes.iter().all(|node| node.get(&format!("{site}.test"), "/run").status == 404)
        });
        assert!(cluster.placement(0, site).is_none(), "what does not run is not shown");
    }
    add(other, "app");
    wait::until("both know it again", || {
        cluster.nodes.iter().all(|node| sites(node).contains(&"app".into()))
    });
    let second = run_of(other, "app").text();
    assert_ne!(second, first, "it is another application");
    let placement = cluster.placement(1 - at, "app").expect("it is placed");
    assert_eq!((placement["epoch"].as_u64(), cluster.node_of("app")), (Some(1), at), "{placement}");
    // It is taken from the node that had it before as any other is: with the next epoch, and a wait.
    let frozen = Frozen::stop(node);
    assert_ne!(run_of(other, "app").text(), second);
    let placement = cluster.placement(1 - at, "app").expect("it is placed");
    assert_eq!(placement["epoch"], 2, "{placement}");
    assert!(placement["wait_ms"].as_u64().is_some_and(|wait| wait > 0), "{placement}");
    drop(frozen);
    // Of the other one nothing stays when nothing can run any more.
    let left = wait::within(CLEARED_MAX, || (counted() == 1).then_some(()));
    assert!(left.is_some(), "{:?} after the removal {} placements are counted", removed.elapsed(), counted());
    cluster.stop();
}

fn a_node_with_an_old_disk_serves_nothing_that_it_has_lost() {
    let cluster = cluster_with(2, imageless);
    run_of(&cluster.nodes[0], "app");
    let at = cluster.node_of("app");
    let node = &cluster.nodes[at];
    let other = &cluster.nodes[1 - at];
    let state = node.path("state");
    let old = node.path("state.old");
    let state = state.to_string_lossy();
    let old = old.to_string_lossy();
    let end = || {
        machine::signal(node.pid(), "TERM");
        assert!(node.wait_for_end().success());
    };
    let begin = || {
        node.spawn();
        wait::until("the node is back", || node.try_status().is_some_and(|status| status["healthy"] == true));
    };
    end();
    machine::run("cp", &["-a", &state, &old]);
    begin();
    wait::until("it is the one that runs it", || node.get("app.test", "/run").status == 200);
    node.cli(&["cluster", "move", "app", "--to", &cluster::name_of(1 - at)]);
    other.cli(&["site", "remove", "plain"]);
    let run = run_of(other, "app").text();
    wait::until("it knows", || {
        node.get("app.test", "/run").text() == run && !sites(node).contains(&"plain".into())
    });
    end();
    machine::run("rm", &["-r", &state]);
    machine::run("mv", &[&old, &state]);
    begin();
    // What its disk says is that the application runs here. Whatever it answers, it is never one of its own.
    wait::until("it passes requests on", || {
        let answer = node.get("app.test", "/run");
        assert!(answer.status != 200 || answer.text() == run, "a second one runs: {}", answer.text());
        answer.status == 200
    });
    wait::until("the removed site is gone", || !sites(node).contains(&"plain".into()));
    assert_eq!(run_of(other, "app").text(), run);
    assert_eq!(cluster.placement(at, "app").expect("it is placed")["epoch"], 2, "nothing moved");
    cluster.stop();
}

fn a_node_whose_clock_is_wrong_is_a_node_like_any_other() {
    const HOURS: i64 = 3600;
    let is_second = AtomicBool::new(false);
    let cluster = cluster_with(2, |builder| {
        // Certificates are made for clocks that are a day behind.
        let hours = if is_second.fetch_or(true, Ordering::Relaxed) { 20 } else { -2 };
        let Some(words) = cluster::clock_ahead(&builder, hours * HOURS) else {
            skip("there is no C compiler to make a wrong clock with")
        };
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        imageless(builder).before(&words)
    });
    let mut run = run_of(&cluster.nodes[0], "app").text();
    for node in &cluster.nodes {
        assert_eq!(run_of(node, "app").text(), run, "each asks the other");
    }
    let since = |at: usize| {
        let placement = cluster.placement(0, "app").expect("it is placed");
        assert_eq!(placement["node"], cluster::name_of(at), "{placement}");
        i64::try_from(placement["since_ms"].as_u64().expect("a time")).expect("a time") / 1000
    };
    let mut times = Vec::new();
    // Away from each node once: it moves after the same wait whichever clock counts it.
    for _ in 0..2 {
        let at = cluster.node_of("app");
        let node = &cluster.nodes[at];
        let other = &cluster.nodes[1 - at];
        let frozen = Frozen::stop(node);
        let next = wait::until_some("it runs on the other node", || {
            let answer = other.get("app.test", "/run");
            (answer.status == 200).then(|| answer.text())
        });
        assert_ne!(next, run);
        run = next;
        drop(frozen);
        wait::until("the node that had it passes it on", || {
            let answer = node.get("app.test", "/run");
            assert!(answer.status != 200 || answer.text() == run, "two run");
            answer.status == 200
        });
        times.push(since(1 - at));
    }
    assert!((times[0] - times[1]).abs() > 20 * HOURS, "the clocks are not wrong: {times:?}");
    cluster.stop();
}

fn an_etcd_that_wants_certificates_and_a_password_gets_them() {
    let mut cluster = Cluster::start_over(Etcd::start_secured(), 2, with_alice, imageless);
    let node = &cluster.nodes[0];
    let other = &cluster.nodes[1];
    node.write_program("alice", "app/app.py", programs::INSTANCE);
    add(node, "app");
    wait::until("both know it", || cluster.nodes.iter().all(|node| sites(node).contains(&"app".into())));
    let run = run_of(node, "app").text();
    assert_eq!(run_of(other, "app").text(), run);
    // Whoever was logged in is not any more.
    cluster.etcd.kill();
    cluster.etcd.begin();
    for node in &cluster.nodes {
        wait::until("it may serve again", || {
            let status = cluster_status(node);
            status["in_step"] == true && status["authority"] == "store"
        });
        assert_eq!(run_of(node, "app").text(), run);
    }
    cluster.nodes[1].cli(&["site", "remove", "plain"]);
    let stranger = cluster::node(2).start();
    let words = ["cluster", "init", "--name", "other", "--etcd", &cluster.etcd.url(), "--insecure"];
    let refused = stranger.try_cli(&words);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("NGY0232") && said.contains("ca"), "{said}");
    stranger.stop();
    cluster.stop();
}

fn only_the_peer_thread_runs_with_real_time_priority() {
    let cluster = Cluster::start(1, with_alice, with_criu);
    let edge = cluster.nodes[0].pid_of("edge");
    let read = |path: String| std::fs::read_to_string(path).unwrap_or_default();
    let tasks = std::fs::read_dir(format!("/proc/{edge}/task")).expect("it runs").flatten();
    let mut first = Vec::new();
    for task in tasks {
        let stat = read(format!("/proc/{edge}/task/{}/stat", task.file_name().to_string_lossy()));
        let Some((name, rest)) = stat.rsplit_once(") ") else { continue };
        // proc(5): nice is the 19th field, rt_priority the 40th, policy the 41st; the state is the third.
        let fields: Vec<i32> =
            rest.split(' ').skip(1).map(|field| field.trim().parse().unwrap_or(0)).collect();
        let nice = fields[15];
        let priority = fields[36];
        let policy = fields[37];
        if (policy, priority) == (1, 1) || nice == -20 {
            first.push(name.rsplit_once('(').map_or("", |(_, name)| name).to_owned());
        } else {
            assert_eq!((priority, policy), (0, 0), "{name}");
        }
    }
    assert_eq!(first, ["probes"]);
    let limits = read(format!("/proc/{edge}/limits"));
    for name in ["Max nice priority", "Max realtime priority"] {
        let line = limits.lines().find_map(|line| line.strip_prefix(name)).expect("the kernel says it");
        assert_eq!(line.split_whitespace().take(2).collect::<Vec<_>>(), ["0", "0"], "{name}");
    }
    cluster.stop();
}

fn the_fencing_process_is_small_and_locked_in_memory() {
    let cluster = Cluster::start(1, with_alice, imageless);
    let keeper = cluster.nodes[0].pid_of("keeper").to_string();
    // The keeper's command line is also that of what it forked.
    let parent = |id: i32| machine::status_field(id, "PPid").unwrap_or_default();
    let is_its = |id: &i32| {
        let name = machine::status_field(*id, "Name");
        name.as_deref() == Some("nagaya-warden") && parent(parent(*id).parse().unwrap_or(0)) == keeper
    };
    let warden =
        wait::until_some("it is there", || machine::processes_with("keeper").into_iter().find(is_its));
    let smaps = || std::fs::read_to_string(format!("/proc/{warden}/smaps")).expect("it runs");
    // Each mapping's line is followed by lines `name: value`.
    let programs = |smaps: &str| -> Vec<(u64, u64)> {
        let of = |lines: &[&str], name: &str| {
            let value = lines.iter().find_map(|line| line.strip_prefix(name)).expect("the kernel says it");
            value.split_whitespace().next().and_then(|kib| kib.parse().ok()).expect("a number")
        };
        let lines: Vec<&str> = smaps.lines().collect();
        let programs =
            lines.iter().enumerate().filter(|(_, line)| line.contains(" r-xp ") && line.contains('/'));
        programs.map(|(at, _)| (of(&lines[at..], "Size:"), of(&lines[at..], "Rss:"))).collect()
    };
    wait::until("all that it can run is in memory", || {
        let programs = programs(&smaps());
        !programs.is_empty() && programs.iter().all(|(size, rss)| size == rss)
    });
    let resident = machine::status_field(warden, "VmRSS").expect("it runs");
    let kib: u64 = resident.split_whitespace().next().and_then(|kib| kib.parse().ok()).expect("a number");
    assert!(kib < 256 << 10, "{kib} KiB: what the allocator only reserves is not to be there");
    cluster.stop();
}

fn an_application_is_moved_by_a_command_on_any_node() {
    let cluster = cluster_with(3, imageless);
    run_of(&cluster.nodes[0], "app");
    let at = cluster.node_of("app");
    let asked = (at + 1) % 3;
    let to = (at + 2) % 3;
    let move_to =
        |asked: usize, to: &str| cluster.nodes[asked].try_cli(&["cluster", "move", "app", "--to", to]);
    let is_on = |node: usize| {
        cluster.placement(asked, "app").is_some_and(|placement| placement["node"] == cluster::name_of(node))
    };
    // Given where it is not, to one where it is not.
    let moved = move_to(asked, &cluster::name_of(to));
    let said = String::from_utf8_lossy(&moved.stdout).into_owned();
    assert!(
        moved.status.success() && said.contains(&format!("runs on '{}'", cluster::name_of(to))),
        "{moved:?}"
    );
    wait::until("the node that was asked knows where it is", || is_on(to));
    let placement = cluster.placement(asked, "app").expect("it is placed");
    assert_eq!((&placement["epoch"], &placement["why"]), (&json!(2), &json!("operator")));
    let run = run_of(&cluster.nodes[to], "app").text();
    assert!(cluster.nodes.iter().all(|node| run_of(node, "app").text() == run), "one instance answers all");
    // Here, where it is not yet.
    let moved = move_to(asked, &cluster::name_of(asked));
    assert!(moved.status.success(), "{moved:?}");
    wait::until("it has come", || is_on(asked));
    // Why it does not move is told where it was asked for.
    for (to, why) in [("nobody", "nobody"), ("c", "is not there")] {
        let frozen = (to == "c").then(|| Frozen::stop(&cluster.nodes[asked]));
        let refused = move_to((asked + 1) % 3, to);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains(why), "{refused:?}");
        drop(frozen);
    }
    wait::until("the node is back", || run_of_any(&cluster.nodes[asked], "app"));
    cluster.stop();
}

fn run_of_any(world: &World, site: &str) -> bool {
    world.get(&format!("{site}.test"), "/run").status == 200
}

/// Processes of all nodes that run a site's program.
fn running(site: &str) -> usize {
    machine::processes_with(&machine::mark("cluster", site)).len()
}

/// A node's instance of a site: how deep it rests. None: there is none.
pub fn tier_of(world: &World, site: &str) -> Option<String> {
    let list: Value = serde_json::from_str(&world.cli(&["instance", "list", "--json"])).expect("it is JSON");
    let row = list.as_array().expect("a list").iter().find(|row| row["site"] == site)?.clone();
    row["tier"].as_str().map(ToOwned::to_owned)
}

/// A node's cells of a site, of programs that run.
fn cells_of(world: &World, site: &str) -> Vec<Value> {
    let path = format!("alice/{site}");
    world
        .cells()
        .into_iter()
        .filter(|cell| cell["path"].as_str().is_some_and(|of| of.starts_with(&path)))
        .collect()
}

fn nothing_is_left_of_an_application_on_a_node_that_lost_it() {
    let cluster = cluster_of(2);
    // Others may run the same tests on this machine.
    let app = &*format!("app-{}", std::process::id());
    add(&cluster.nodes[0], app);
    wait::until("both know it", || cluster.nodes.iter().all(|node| sites(node).contains(&app.to_owned())));
    run_of(&cluster.nodes[0], app);
    let at = cluster.node_of(app);
    let node = &cluster.nodes[at];
    let other = &cluster.nodes[1 - at];
    assert!(!cells_of(node, app).is_empty(), "it has a cell");
    let one = running(app);
    assert!(one > 0);
    node.cli(&["cluster", "move", app, "--to", &cluster::name_of(1 - at)]);
    run_of(node, app);
    until_nothing_runs(node, app, one);
    // The node that has it dies, and what it had goes with it or with its successor.
    let keeper = other.pid_of("keeper");
    machine::signal(other.pid(), "KILL");
    other.wait_for_end();
    run_of(node, app);
    other.spawn();
    wait::until("the node is back", || other.try_status().is_some_and(|status| status["healthy"] == true));
    until_nothing_runs(other, app, one);
    wait::until("its control groups are gone", || cgroups_of(keeper).is_empty());
    wait::until("it passes requests on", || run_of_any(other, app));
    // Images of it are on both by now, or come; with its record they go.
    node.cli(&["site", "remove", app]);
    for node in &cluster.nodes {
        wait::until("no image of it is left", || images(node).is_empty());
    }
    // Its empty cells go after a minute, as those of any site do: the keeper's own tests wait for that.
    wait::until("no process of it is left", || running(app) == 0);
    cluster.stop();
}

/// Nothing of the application runs on this node, and all that runs of it are so many processes.
#[track_caller]
fn until_nothing_runs(world: &World, app: &str, processes: usize) {
    let found = || (tier_of(world, app), cells_of(world, app), running(app));
    let is_clear = wait::within(wait::SOON, || {
        let (tier, cells, running) = found();
        let rests = matches!(tier.as_deref(), None | Some("cold" | "image"));
        let is_empty = cells.iter().all(|cell| cell["usage"]["processes"] == 0);
        (rests && is_empty && running == processes).then_some(())
    });
    assert!(is_clear.is_some(), "{:?}, and {processes} processes are elsewhere", found());
}

/// What a node keeps of images of applications, also of those that come.
fn images(world: &World) -> Vec<std::path::PathBuf> {
    let dirs = ["state/images/images", "state/images/incoming"].map(|dir| world.path(dir));
    let entries = dirs.into_iter().filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

fn a_long_response_survives_a_pause_and_ends_with_a_lost_node() {
    let cluster = cluster_with(2, imageless);
    run_of(&cluster.nodes[0], "app");
    let at = cluster.node_of("app");
    let node = &cluster.nodes[at];
    let other = &cluster.nodes[1 - at];
    let told = cluster.nodes[0].home("alice").join("app/app.told");
    let begin = || {
        let mut visitor = Connection::open(other.http());
        visitor.send("GET /long HTTP/1.1\r\nHost: app.test\r\n\r\n");
        // Its beginning is more than is held back.
        wait::until("the answer is on its way", || visitor.is_answered());
        visitor
    };
    let mut visitor = begin();
    drop(Frozen::stop(node));
    cluster.nodes[0].write("alice", "app/app.told", "");
    let answer = visitor.response().expect(200);
    assert!(answer.body.len() == 0x30003 && answer.body.ends_with(b"end"), "{answer:?}");
    machine::run("rm", &[&told.to_string_lossy()]);
    let mut visitor = begin();
    let frozen = Frozen::stop(node);
    let answer = visitor.try_response();
    assert!(answer.is_err(), "it must not look whole: {answer:?}");
    let lost = |line: &Value| line["refusal"] == "answer_lost";
    wait::until("the log says why", || other.access_log().iter().any(lost));
    assert_eq!(other.metric("nagaya_http_refusals_total", "reason=\"answer_lost\""), 1.0);
    drop(frozen);
    wait::until("the application is served", || run_of_any(other, "app"));
    cluster.stop();
}
