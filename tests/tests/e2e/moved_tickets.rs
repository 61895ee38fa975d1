//! Tickets in a cluster: what one node has promised is kept by the node that its site has come to.
//!
//! Not here: tickets of one node (`admission`), how sites move (`cluster`), all ways to be early and late (`nagaya_admission`).

use nagaya_tests::client::{Connection, Response};
use nagaya_tests::cluster::{self, Cluster};
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::{Builder, World};
use nagaya_tests::{machine, wait};
use serde_json::{Value, json};

use crate::programs;
use crate::resting::with_criu;

pub const SUITE: Suite = Suite {
    name: "moved_tickets",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        a_ticket_is_kept_where_its_site_was_moved_to,
        a_ticket_is_kept_on_the_new_node_after_its_node_was_killed,
    ]),
};

/// RFC 4648, section 5.
const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// Two nodes, and an application of which one request runs at once and none waits in line without a ticket. A slot is longer than any
/// move takes.
fn shop() -> Cluster {
    let each = |builder: Builder| {
        with_criu(builder).set("instances", "image_bytes = \"0B\"").set("admission", "penalty = \"0ms\"")
    };
    let cluster = Cluster::start(2, |builder| builder.tenant("alice"), each);
    let first = &cluster.nodes[0];
    first.write_program("alice", "app/app.py", programs::INSTANCE);
    first.import(&[json!({ "name": "shop", "tenant": "alice", "hosts": ["shop.test"], "max_concurrent": 1,
        "admission": { "wait_seconds": 0, "slot_seconds": 600 },
        "backend": { "kind": "app", "directory": "app", "command": ["./app.py", "shop"], "start_seconds": 20,
                     "env": { "NAME": "shop" } } })]);
    let knows = |node: &World| node.cli(&["site", "list", "--json"]).contains("shop.test");
    wait::until("both nodes know it", || cluster.nodes.iter().all(knows));
    cluster
}

fn ticket_key(world: &World) -> Option<u64> {
    let status: Value =
        serde_json::from_str(&world.cli(&["cluster", "status", "--json"])).expect("it is JSON");
    status["ticket_key"].as_u64()
}

/// The number of the key that has signed a ticket: it stands between the version's byte and the lane.
fn signed_with(ticket: &str) -> u64 {
    let value = |char: u8| BASE64.iter().position(|known| *known == char).expect("it is base64") as u64;
    let six_bytes = ticket.bytes().take(8).fold(0, |bits, char| bits << 6 | value(char));
    six_bytes >> 8 & 0xffff_ffff
}

fn told(cluster: &Cluster) -> std::path::PathBuf {
    cluster.nodes[0].home("alice").join("app/shop.told")
}

/// A request that runs until the application is told.
fn occupy(world: &World) -> Connection {
    let mut running = Connection::open(world.http());
    running.send("GET /long HTTP/1.1\r\nHost: shop.test\r\n\r\n");
    wait::until("it runs", || running.is_answered());
    running
}

/// The application is told to end what runs, and forgets it.
#[track_caller]
fn let_go(cluster: &Cluster, running: Vec<Connection>) {
    machine::write(&told(cluster), "");
    for mut connection in running {
        connection.response().expect(200);
    }
    machine::run("rm", &[&told(cluster).to_string_lossy()]);
}

fn show(world: &World, path: &str, ticket: &str) -> Connection {
    let mut connection = Connection::open(world.http());
    connection.send(format!("GET {path} HTTP/1.1\r\nHost: shop.test\r\nNagaya-Ticket: {ticket}\r\n\r\n"));
    connection
}

#[track_caller]
fn is_refused(answer: Response, status: u16, code: &str) {
    let answer = answer.expect(status);
    assert!(answer.text().contains(code), "{answer:?}");
}

/// A ticket that the site's node has given, signed so that the other one can know it. Nothing runs when this returns.
fn promised(cluster: &Cluster, at: usize) -> String {
    let key = wait::until_some("both nodes have the same key", || {
        ticket_key(&cluster.nodes[0]).filter(|key| ticket_key(&cluster.nodes[1]) == Some(*key))
    });
    let running = occupy(&cluster.nodes[at]);
    let ticket = wait::until_some("its edge signs with it", || {
        let refused = cluster.nodes[at].get("shop.test", "/run").expect(503);
        let ticket = refused.header("nagaya-ticket")?.to_owned();
        (signed_with(&ticket) == key).then_some(ticket)
    });
    let_go(cluster, vec![running]);
    ticket
}

/// The site runs on this node now, which knows nothing of the ticket.
fn is_kept(cluster: &Cluster, node: &World, ticket: &str) {
    let running = occupy(node);
    // Nothing has ended here yet, so that nothing can be promised here.
    is_refused(node.get("shop.test", "/run"), 503, "NGY0413");
    let last = if ticket.ends_with('A') { 'B' } else { 'A' };
    let altered = format!("{}{last}", &ticket[..ticket.len() - 1]);
    is_refused(show(node, "/run", &altered).response(), 403, "NGY0452");
    let is_waiting = || node.metric("nagaya_requests_waiting", "") == 1.0;
    let holder = wait::until_some("its slot has begun", || {
        let mut shown = show(node, "/run", ticket);
        wait::until("it waits, as nobody else may, or was answered", || is_waiting() || shown.is_answered());
        if shown.is_answered() {
            is_refused(shown.response(), 503, "NGY0451");
            return None;
        }
        Some(shown)
    });
    is_refused(show(node, "/run", ticket).response(), 409, "NGY0453");
    let_go(cluster, vec![running, holder]);
    let running = occupy(node);
    is_refused(show(node, "/run", ticket).response(), 409, "NGY0453");
    let_go(cluster, vec![running]);
    let lanes: Value = serde_json::from_str(&node.cli(&["lanes", "--json"])).expect("it is JSON");
    let lane =
        lanes.as_array().expect("a list").iter().find(|lane| lane["name"] == "shop").expect("its lane");
    assert_eq!((&lane["counts"]["adopted"], &lane["counts"]["kept"]), (&json!(1), &json!(1)), "{lane}");
}

fn a_ticket_is_kept_where_its_site_was_moved_to() {
    let cluster = shop();
    cluster.nodes[0].get("shop.test", "/run").expect(200);
    let at = cluster.node_of("shop");
    let ticket = promised(&cluster, at);
    cluster.nodes[at].cli(&["cluster", "move", "shop", "--to", &cluster::name_of(1 - at)]);
    is_kept(&cluster, &cluster.nodes[1 - at], &ticket);
    cluster.stop();
}

fn a_ticket_is_kept_on_the_new_node_after_its_node_was_killed() {
    let cluster = shop();
    cluster.nodes[0].get("shop.test", "/run").expect(200);
    let at = cluster.node_of("shop");
    let ticket = promised(&cluster, at);
    let dead = &cluster.nodes[at];
    machine::signal(dead.pid(), "KILL");
    dead.wait_for_end();
    is_kept(&cluster, &cluster.nodes[1 - at], &ticket);
    dead.spawn();
    wait::until("the node is back", || dead.try_status().is_some_and(|status| status["healthy"] == true));
    cluster.stop();
}
