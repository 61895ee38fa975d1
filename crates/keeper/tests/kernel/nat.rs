//! Applications that reach all that is outside of the node: what that is, what it is not, and how names are found.
//!
//! The node is a network of the test's own here, and outside is another one, with a cable between them. Not here: places that
//! records name (`outbound`).

use std::fs;
use std::path::PathBuf;

use nagaya_records::instance::{InstanceCommand, Tier, WakeStage};
use serde_json::{Value, json};

use crate::Fact;
use crate::outbound::{is_refused, record, told, until_service};
use crate::python::{SERVICE, reaching};
use crate::rest::{get, pids, show, until_idle};
use crate::wake::until_images;
use crate::world::{World, site_name, wait_dead};

pub const ROOT: &[Fact] = &[
    ("an application whose record says nat reaches what is outside, by address and by name", reaches_outside),
    (
        "an application whose record says nat reaches neither the node nor link-local addresses",
        reaches_no_node,
    ),
    ("an application whose record says nat reaches neither metadata nor its cluster", reaches_no_cluster),
    ("a name in a record leads to no place that only an address may name", names_lead_elsewhere),
    ("an application whose record says nat has its own loopback to itself", has_its_loopback),
];

pub const CRIU: &[Fact] = &[(
    "a connection of an application whose record says nat is closed after the wake, and it makes others",
    comes_back,
)];

const OUTSIDE: [&str; 9] = [
    "203.0.113.77/7000",
    "2001:db8::77/7000",
    "198.51.100.2/53",
    "169.254.169.254/80",
    "203.0.113.77/8080",
    // A cloud's, the store of the cluster, and another node of it.
    "168.63.129.16/80",
    "203.0.113.77/2379",
    "203.0.113.88/7443",
    "203.0.113.88/7000",
];

/// On the node: where it is known to others, where only it is, and a port of a program inside.
const NODE: [&str; 4] = ["198.51.100.1/7009", "2001:db8:1::1/7009", "127.0.0.1/7009", "198.51.100.9/7009"];

/// Its words are separated by spaces: no path of a test's has one. As on nodes that share an address, what is bound to need not
/// be there.
fn prelude(dir: &str) -> String {
    let (outside, node) = (OUTSIDE.join(" "), NODE.join(" "));
    format!(
        "ip link set lo up; echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind; touch {dir}/net; unshare --net={dir}/net true
         ip link add v0 type veth peer name v1; ip link set v1 netns {dir}/net
         nsenter --net={dir}/net sh -ec 'ip link set lo up; ip link set v1 up; ip addr add 198.51.100.2/24 dev v1
            ip addr add 2001:db8:1::2/64 dev v1 nodad; ip addr add 203.0.113.77/32 dev lo
            ip addr add 2001:db8::77/128 dev lo nodad; ip addr add 169.254.169.254/32 dev lo
            ip addr add 203.0.113.88/32 dev lo; ip addr add 168.63.129.16/32 dev lo'
         ip link set v0 up; ip addr add 198.51.100.1/24 dev v0; ip addr add 198.51.100.9/24 dev v0
         ip addr add 2001:db8:1::1/64 dev v0 nodad
         ip route add default via 198.51.100.2; ip -6 route add default via 2001:db8:1::2
         echo nameserver 198.51.100.2 > {dir}/resolv.conf; mount --bind {dir}/resolv.conf /etc/resolv.conf
         nsenter --net={dir}/net python3 {dir}/service.py {dir}/outside.log {outside} &
         python3 {dir}/service.py {dir}/node.log {node} &
         true"
    )
}

/// Returns with it the logs of what is outside, and of the node's own services.
fn world(more: Value) -> (World, PathBuf, PathBuf) {
    world_of(json!("nat"), more)
}

fn world_of(outbound: Value, more: Value) -> (World, PathBuf, PathBuf) {
    let mut world = World::new();
    let dir = world.dir.path().to_owned();
    fs::write(dir.join("service.py"), SERVICE).unwrap();
    world = world.after(&prelude(dir.to_str().unwrap()));
    world = world.with(|options| options.etcd = vec!["outside.test:2379".into()]);
    world.node("other", "203.0.113.88:7443");
    world.script("program.py", &reaching());
    world.site("app", "alice", record(json!({"outbound": outbound}), more));
    (world.start(), dir.join("outside.log"), dir.join("node.log"))
}

fn reaches_outside() {
    let (world, outside, _) = world(json!({}));
    world.run(async |keeper| {
        until_service(&outside).await;
        for (path, expected) in [
            ("/try/203.0.113.77/7000", "203.0.113.77:7000 hello"),
            ("/try/2001:db8::77/7000", "2001:db8::77:7000 hello"),
            ("/try/outside.test/7000", "203.0.113.77:7000 hello"),
            ("/try/inside.test/7000", "gaierror"),
            // Its resolver, for what is too long for a datagram.
            ("/try/127.77.1.53/53", "198.51.100.2:53 hello"),
            // Only TCP goes out.
            ("/udp/198.51.100.2/53", "ConnectionRefusedError"),
        ] {
            assert_eq!(told(&keeper, path).await, expected, "{path}");
        }
        let row = show(&world, "app");
        assert_eq!((&row["outbound"]["taken"], &row["outbound"]["failed"]), (&json!(4), &json!(0)), "{row}");
        // Nobody is there: it learns that.
        assert!(is_refused(&told(&keeper, "/try/203.0.113.77/7001").await));
        let why = show(&world, "app")["outbound"]["last_failure"].as_str().unwrap().to_owned();
        assert!(why.contains("203.0.113.77:7001") && why.contains("refused"), "{why}");
    });
}

fn reaches_no_node() {
    let (world, outside, node) = world(json!({}));
    world.run(async |keeper| {
        until_service(&outside).await;
        until_service(&node).await;
        for place in ["198.51.100.1/7009", "198.51.100.9/7009", "2001:db8:1::1/7009"] {
            let said = told(&keeper, &format!("/try/{place}")).await;
            assert!(is_refused(&said), "{place}: {said}");
            let why = show(&world, "app")["outbound"]["last_failure"].as_str().unwrap().to_owned();
            assert!(why.contains("the node itself"), "{place}: {why}");
        }
        for place in ["169.254.169.254/80", "0.0.0.1/7009"] {
            assert!(is_refused(&told(&keeper, &format!("/try/{place}")).await), "{place}");
        }
        assert_eq!(told(&keeper, "/try/127.0.0.1/7009").await, "ConnectionRefusedError");
        // By the socket that takes all others.
        assert!(is_refused(&told(&keeper, "/try/127.0.0.1/1").await));
        for log in [&outside, &node] {
            let text = fs::read_to_string(log).unwrap();
            assert!(!text.contains("comes"), "{text}");
        }
    });
}

fn reaches_no_cluster() {
    let (world, outside, _) = world(json!({}));
    world.run(async |keeper| {
        until_service(&outside).await;
        for (place, what) in [
            ("168.63.129.16/80", "service of metadata"),
            ("64:ff9b::168.63.129.16/80", "service of metadata"),
            ("203.0.113.77/2379", "the store of its cluster"),
            ("outside.test/2379", "the store of its cluster"),
            ("203.0.113.88/7443", "a node of its cluster"),
            ("203.0.113.88/7000", "a node of its cluster"),
            ("64:ff9b::198.51.100.1/7009", "the node itself"),
        ] {
            let said = told(&keeper, &format!("/try/{place}")).await;
            assert!(is_refused(&said), "{place}: {said}");
            let why = show(&world, "app")["outbound"]["last_failure"].as_str().unwrap().to_owned();
            assert!(why.contains(what), "{place}: {why}");
        }
        let text = fs::read_to_string(&outside).unwrap();
        assert!(!text.contains("comes"), "{text}");
        assert_eq!(told(&keeper, "/try/203.0.113.77/7000").await, "203.0.113.77:7000 hello");
    });
}

fn names_lead_elsewhere() {
    let (world, outside, _) = world_of(json!(["outside.test:7000", "outside.test:2379"]), json!({}));
    world.run(async |keeper| {
        until_service(&outside).await;
        assert!(told(&keeper, "/try/outside.test/7000").await.ends_with(":7000 hello"));
        assert!(is_refused(&told(&keeper, "/try/outside.test/2379").await));
        let why = show(&world, "app")["outbound"]["last_failure"].as_str().unwrap().to_owned();
        assert!(why.contains("leads to 203.0.113.77") && why.contains("the store of its cluster"), "{why}");
    });
}

fn has_its_loopback() {
    // It listens on a port of all addresses, and reaches the same port of another.
    let listens = "import socket\nown = socket.create_server(('0.0.0.0', 8080))\nown6 = socket.create_server(('::1', 8081), family=socket.AF_INET6)\n";
    let (world, outside, _) = world(json!({}));
    world.script("program.py", &format!("{listens}{}", reaching()));
    world.run(async |keeper| {
        until_service(&outside).await;
        assert_eq!(told(&keeper, "/hold/203.0.113.77/8080").await, "203.0.113.77:8080 hello");
        for place in ["127.0.0.1/8080", "::1/8081"] {
            // Its own: nobody there answers.
            assert_eq!(told(&keeper, &format!("/connect/{place}")).await, "connected", "{place}");
        }
        assert_eq!(show(&world, "app")["outbound"]["taken"], 1);
    });
}

fn comes_back() {
    let (world, outside, _) = world(json!({"warm_up": ["/hold/outside.test/7000"]}));
    world.run(async |keeper| {
        until_service(&outside).await;
        until_images(&world).await;
        let first = told(&keeper, "/who").await;
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
        assert_eq!(get(&used, "/who").await, first);
        let said = told(&keeper, "/held").await;
        assert!(is_refused(&said) || said == "OSError", "{said}");
        for place in ["outside.test", "2001:db8::77"] {
            assert!(told(&keeper, &format!("/try/{place}/7000")).await.ends_with(":7000 hello"), "{place}");
        }
    });
}
