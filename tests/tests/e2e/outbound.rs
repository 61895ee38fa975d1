//! `outbound`, through the whole program: a node in a network of its own, and what is outside of it in another one.
//!
//! Not here: all that an application can try there (`keeper/tests/kernel`), time in databases (`instances`).

use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::{Value, json};

use crate::resting::{add_site, builder, listed, rest, until_image};

pub const SUITE: Suite = Suite {
    name: "outbound",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            nat_reaches_what_is_outside_and_nothing_of_the_node,
            nat_works_after_a_wake_from_an_image,
        ],
    ),
};

const OUTSIDE: &str = include_str!("../../../crates/keeper/fixtures/outside.py");

/// An application that does with the network what the path of a request says.
const REACHES: &str = concat!(
    include_str!("../../../crates/keeper/fixtures/reaches.py"),
    include_str!("../../../crates/keeper/fixtures/answers.py")
);

/// Starts the node in a network of its own, with a cable to another one and services in both. Its first word is a directory.
const NETWORKS: &str = r#"
ip link set lo up; touch "$0/net"; unshare --net="$0/net" true
ip link add v0 type veth peer name v1; ip link set v1 netns "$0/net"
nsenter --net="$0/net" sh -ec 'ip link set lo up; ip link set v1 up; ip addr add 198.51.100.2/24 dev v1
    ip addr add 203.0.113.77/32 dev lo'
ip link set v0 up; ip addr add 198.51.100.1/24 dev v0; ip route add default via 198.51.100.2
echo nameserver 198.51.100.2 > "$0/resolv.conf"; mount --bind "$0/resolv.conf" /etc/resolv.conf
nsenter --net="$0/net" python3 "$0/outside.py" "$0/outside.log" 203.0.113.77/7000 198.51.100.2/53 &
python3 "$0/outside.py" "$0/node.log" 127.0.0.1/7009 198.51.100.1/7009 &
exec "$@"
"#;

fn world() -> World {
    let builder = builder();
    machine::write(&builder.path("outside.py"), OUTSIDE);
    let dir = builder.path(".").display().to_string();
    let world = builder.before(&["unshare", "--mount", "--net", "sh", "-ec", NETWORKS, &dir]).start();
    world.write("alice", "app/reaches.py", REACHES);
    world.give("alice");
    for log in ["outside.log", "node.log"] {
        wait::until(&format!("{log} says that it is ready"), || logged(&world, log).contains("ready"));
    }
    world
}

fn logged(world: &World, log: &str) -> String {
    std::fs::read_to_string(world.path(log)).unwrap_or_default()
}

/// A site at `NAME.test`.
fn add(world: &World, name: &str, more: Value) {
    let backend = json!({
        "kind": "app", "directory": "app", "command": ["python3", "reaches.py"], "start_seconds": 60,
    });
    add_site(world, name, backend, more);
}

/// What its application says to this path, asked from the node's own network.
#[track_caller]
fn told(world: &World, name: &str, path: &str) -> String {
    let network = format!("--net=/proc/{}/ns/net", world.pid());
    let host = format!("Host: {name}.test");
    let url = format!("http://{}{path}", world.http());
    machine::run("nsenter", &[&network, "curl", "-sS", "-m", "60", "-H", &host, &url])
}

/// What an application is told whose connection is not made, or was closed.
fn is_refused(said: &str) -> bool {
    ["ConnectionResetError", "closed", "BrokenPipeError"].contains(&said)
}

fn nat_reaches_what_is_outside_and_nothing_of_the_node(world: &World) {
    const ANSWER: &str = "203.0.113.77:7000 hello";
    add(world, "reaches", json!({}));
    assert_eq!(told(world, "reaches", "/try/203.0.113.77/7000"), "OSError", "no record says so");
    assert_eq!(told(world, "reaches", "/try/outside.test/7000"), "gaierror");
    world.cli(&["site", "set", "reaches", "--outbound", "nat"]);
    wait::until("it was started with it", || told(world, "reaches", "/try/203.0.113.77/7000") == ANSWER);
    assert_eq!(told(world, "reaches", "/try/outside.test/7000"), ANSWER);
    assert_eq!(told(world, "reaches", "/try/inside.test/7000"), "gaierror");
    // Its loopback is its own, and the node's address is the node.
    assert_eq!(told(world, "reaches", "/try/127.0.0.1/7009"), "ConnectionRefusedError");
    let said = told(world, "reaches", "/try/198.51.100.1/7009");
    assert!(is_refused(&said), "{said}");
    let shown = world.cli(&["instance", "show", "reaches"]);
    assert!(shown.contains("198.51.100.1:7009") && shown.contains("the node itself"), "{shown}");
    let log = logged(world, "node.log");
    assert!(!log.contains("comes"), "{log}");
    // They are there, for whoever may.
    world.cli(&["site", "set", "reaches", "--outbound", "host"]);
    for place in ["127.0.0.1", "198.51.100.1"] {
        wait::until(&format!("it has the node's network, and reaches {place}"), || {
            told(world, "reaches", &format!("/try/{place}/7009")) == format!("{place}:7009 hello")
        });
    }
}

fn nat_works_after_a_wake_from_an_image(world: &World) {
    let more = json!({ "outbound": "nat", "release": "1", "warm_up": ["/hold/outside.test/7000"] });
    add(world, "wakes", more);
    let run = told(world, "wakes", "/who");
    until_image(world, "wakes");
    assert_eq!(told(world, "wakes", "/held"), "203.0.113.77:7000 hello", "the image did not touch it");
    rest(world, "wakes", "image");
    assert_eq!(listed(world, "wakes")["tier"], "image");
    assert_eq!(told(world, "wakes", "/who"), run, "the same run goes on");
    let line = wait::until_some("the request is logged", || {
        world.access_log().into_iter().find(|line| line["woken"]["from"] == "image")
    });
    assert_eq!(line["target"], "/who", "{line}");
    let said = told(world, "wakes", "/held");
    assert!(is_refused(&said) || said == "OSError", "it learns that this is over: {said}");
    for place in ["outside.test", "203.0.113.77"] {
        let said = told(world, "wakes", &format!("/try/{place}/7000"));
        assert_eq!(said, "203.0.113.77:7000 hello", "{place}");
    }
}
