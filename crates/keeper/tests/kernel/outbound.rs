//! What applications reach outside by the places their records name, in a network of the test's own.
//!
//! Not here: applications without a network, or with the node's (`sandbox`, `rest`).

use std::fs;
use std::path::PathBuf;

use nagaya_keeper_api::client::KeeperClient;
use nagaya_records::instance::{InstanceCommand, Tier, WakeStage};
use serde_json::{Value, json};

use crate::Fact;
use crate::python::{SERVICE, reaching};
use crate::rest::{NEVER, get, pids, show, until_idle};
use crate::wake::until_images;
use crate::world::{World, site_name, until_so, wait_dead};

pub const ROOT: &[Fact] = &[
    ("an application reaches the places its record names, by address and by name", reaches_what_is_named),
    ("an application reaches no place that its record does not name", reaches_nothing_else),
    ("a name that leads to the node itself leads nowhere", no_way_round),
    ("an application has no more connections outside than it may", bounded),
    ("what an application has open outside is closed when it rests without a process", closed_at_rest),
];

pub const CRIU: &[Fact] = &[(
    "a connection outside that was open when its image was taken is closed after the wake",
    closed_after_wake,
)];

/// Where something answers: outside, and on the node.
const SERVED: &str = "203.0.113.77/7000 2001:db8::77/7000 203.0.113.77/7001";
const SERVED_HERE: &str = "127.0.0.1/7002 198.51.100.1/7002";

/// Two networks with a cable between them: the keeper is started in one, and outside is the other. Names mean what this says.
fn world(outbound: Value, more: Value) -> (World, PathBuf) {
    let mut world = World::new();
    let (service, hosts, log) = (
        world.dir.path().join("service.py"),
        world.dir.path().join("hosts"),
        world.dir.path().join("service.log"),
    );
    fs::write(&service, SERVICE).unwrap();
    fs::write(
        &hosts,
        "127.0.0.1 localhost\n203.0.113.77 db.internal\n127.0.0.1 rebound.test\n198.51.100.1 own.test\n",
    )
    .unwrap();
    let dir = world.dir.path().display();
    let (hosts, service, log_path) = (hosts.display(), service.display(), log.display());
    let prelude = format!(
        "ip link set lo up; touch {dir}/net; unshare --net={dir}/net true
         ip link add v0 type veth peer name v1; ip link set v1 netns {dir}/net
         nsenter --net={dir}/net sh -ec 'ip link set lo up; ip link set v1 up; ip addr add 198.51.100.2/24 dev v1
            ip addr add 2001:db8:1::2/64 dev v1 nodad; ip addr add 203.0.113.77/32 dev lo
            ip addr add 2001:db8::77/128 dev lo nodad'
         ip link set v0 up; ip addr add 198.51.100.1/24 dev v0; ip addr add 2001:db8:1::1/64 dev v0 nodad
         ip route add default via 198.51.100.2; ip -6 route add default via 2001:db8:1::2
         mount --bind {hosts} /etc/hosts
         nsenter --net={dir}/net python3 {service} {log_path} {SERVED} &
         python3 {service} {log_path} {SERVED_HERE} &
         true"
    );
    world = world.after(&prelude);
    world.script("program.py", &reaching());
    world.site("app", "alice", record(json!({"outbound": outbound}), more));
    (world.start(), log)
}

/// An application that is `program.py`, with these fields and those.
pub fn record(fields: Value, more: Value) -> Value {
    let mut record = json!({"kind": "app", "command": ["python3", "program.py"], "directory": "www", "start_seconds": 300,
        "idle": NEVER()});
    for fields in [fields, more] {
        record.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    }
    record
}

/// The places of most tests.
fn places() -> Value {
    json!([
        "203.0.113.77:7000",
        "[2001:db8::77]:7000",
        "db.internal:7000",
        "127.0.0.1:7002",
        "rebound.test:7002",
        "own.test:7002"
    ])
}

/// Both of this file's.
async fn until_services(log: &PathBuf) {
    until_so(|| fs::read_to_string(log).is_ok_and(|text| text.matches("ready").count() == 2)).await;
}

pub async fn until_service(log: &PathBuf) {
    until_so(|| fs::read_to_string(log).is_ok_and(|text| text.contains("ready"))).await;
}

pub async fn told(keeper: &KeeperClient, what: &str) -> String {
    told_by(keeper, "app", what).await
}

/// As `told`, of this site's application.
pub async fn told_by(keeper: &KeeperClient, site: &str, what: &str) -> String {
    let used = keeper.use_instance(&site_name(site), None).await.unwrap();
    get(&used, what).await
}

/// What an application is told whose connection is not made outside, or was closed there.
pub fn is_refused(said: &str) -> bool {
    ["ConnectionResetError", "closed", "BrokenPipeError"].contains(&said)
}

fn reaches_what_is_named() {
    let (world, log) = world(places(), json!({}));
    world.run(async |keeper| {
        until_services(&log).await;
        for (path, expected) in [
            ("/try/203.0.113.77/7000", "203.0.113.77:7000 hello"),
            ("/try/2001:db8::77/7000", "2001:db8::77:7000 hello"),
            ("/try/db.internal/7000", "203.0.113.77:7000 hello"),
            ("/try/DB.Internal/7000", "203.0.113.77:7000 hello"),
            ("/try/127.0.0.1/7002", "127.0.0.1:7002 hello"),
        ] {
            assert_eq!(told(&keeper, path).await, expected, "{path}");
        }
        until_so(|| show(&world, "app")["outbound"]["open"] == 0).await;
        let row = show(&world, "app");
        assert_eq!((&row["outbound"]["taken"], &row["outbound"]["failed"]), (&json!(5), &json!(0)), "{row}");
    });
}

fn reaches_nothing_else() {
    let (world, log) = world(places(), json!({}));
    world.run(async |keeper| {
        until_services(&log).await;
        for (path, expected) in [
            // Another port, other addresses, a name that is none.
            ("/try/203.0.113.77/7001", "ConnectionRefusedError"),
            ("/try/127.0.0.1/7001", "ConnectionRefusedError"),
            ("/try/203.0.113.78/7000", "OSError"),
            ("/try/2001:db8::78/7000", "OSError"),
            ("/try/example.org/7000", "gaierror"),
        ] {
            assert_eq!(told(&keeper, path).await, expected, "{path}");
        }
        let come = fs::read_to_string(&log).unwrap().matches("comes").count();
        assert_eq!(come, 0);
    });
}

fn no_way_round() {
    let (world, log) = world(places(), json!({}));
    world.run(async |keeper| {
        until_services(&log).await;
        let said = told(&keeper, "/try/rebound.test/7002").await;
        assert!(is_refused(&said), "{said}");
        let row = show(&world, "app");
        let why = row["outbound"]["last_failure"].as_str().unwrap();
        assert!(why.contains("rebound.test:7002") && why.contains("leads to 127.0.0.1"), "{row}");
        // By an address that others know it by.
        assert!(is_refused(&told(&keeper, "/try/own.test/7002").await));
        let row = show(&world, "app");
        assert!(row["outbound"]["last_failure"].as_str().unwrap().contains("the node itself"), "{row}");
        assert_eq!(fs::read_to_string(&log).unwrap().matches("comes").count(), 0);
    });
}

fn bounded() {
    const MAX: usize = 256;
    let (world, log) = world(json!(["203.0.113.77:7000"]), json!({}));
    world.run(async |keeper| {
        until_services(&log).await;
        for _ in 0..MAX {
            assert_eq!(told(&keeper, "/hold/203.0.113.77/7000").await, "203.0.113.77:7000 hello");
        }
        assert_eq!(show(&world, "app")["outbound"]["open"], MAX);
        let said = told(&keeper, "/try/203.0.113.77/7000").await;
        assert!(is_refused(&said), "{said}");
        assert_eq!(told(&keeper, "/held").await, "203.0.113.77:7000 hello", "those it has go on");
        assert!(
            show(&world, "app")["outbound"]["last_failure"].as_str().unwrap().contains("as one instance may")
        );
    });
}

fn closed_at_rest() {
    let (world, log) = world(places(), json!({}));
    world.run(async |keeper| {
        until_services(&log).await;
        told(&keeper, "/hold/db.internal/7000").await;
        until_idle(&world, "app").await;
        let read = |what: &str| fs::read_to_string(&log).unwrap().matches(what).count();
        assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Frozen) })["ok"], true);
        assert_eq!(
            told(&keeper, "/held").await,
            "203.0.113.77:7000 hello",
            "one that was frozen has it still"
        );
        assert_eq!((read("comes"), read("goes")), (1, 0));
        until_idle(&world, "app").await;
        let all = pids(&world, "app");
        assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Cold) })["ok"], true);
        all.into_iter().for_each(wait_dead);
        until_so(|| read("goes") == 1).await;
        assert!(show(&world, "app")["outbound"].is_null());
        assert_eq!(told(&keeper, "/hold/db.internal/7000").await, "203.0.113.77:7000 hello");
    });
}

fn closed_after_wake() {
    // It connects before its image is taken, as many do at their start.
    let more = json!({"warm_up": ["/hold/db.internal/7000", "/hold/203.0.113.77/7000"]});
    let (world, log) = world(places(), more);
    world.run(async |keeper| {
        until_services(&log).await;
        until_images(&world).await;
        let first = told(&keeper, "/who").await;
        assert!(first.ends_with(" 2"), "{first}");
        assert!(show(&world, "app")["note"].is_null(), "{}", show(&world, "app"));
        assert_eq!(told(&keeper, "/held").await, "203.0.113.77:7000 hello", "the image did not touch it");
        until_idle(&world, "app").await;
        let all = pids(&world, "app");
        assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Image) })["ok"], true);
        all.into_iter().for_each(wait_dead);
        let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
        let stages: Vec<WakeStage> =
            used.wake.clone().unwrap().stages.iter().map(|(stage, _)| *stage).collect();
        assert!(stages.contains(&WakeStage::Restore), "{stages:?}");
        assert_eq!(get(&used, "/who").await, first, "it is the same, with what it had open");
        let said = told(&keeper, "/held").await;
        assert!(is_refused(&said) || said == "OSError", "it learns that this is over: {said}");
        for place in ["db.internal", "203.0.113.77"] {
            assert_eq!(told(&keeper, &format!("/try/{place}/7000")).await, "203.0.113.77:7000 hello");
        }
    });
}
