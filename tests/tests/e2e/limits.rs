//! How many requests run at once: then a line, first come first served, then a refusal that says when to come back.
//!
//! Not here: limits on single messages (`http1`), on time (`slow_clients`).

use std::sync::{Arc, Condvar, Mutex};

use nagaya_tests::backend::Backend;
use nagaya_tests::client::Connection;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "limits",
    needs_root: false,
    tests: Tests::Alone(nagaya_tests::tests![
        beyond_its_limit_a_site_waits_in_order_and_then_refuses,
        client_that_leaves_the_line_frees_its_place,
        client_that_waits_too_long_is_told_when_to_come_back,
        a_tenants_limit_holds_for_all_its_sites_and_for_nobody_else,
        a_raised_limit_lets_the_line_in,
    ]),
};

const WAITING_MAX: usize = 2;

/// Each test has a node of its own: the number of those that wait is the whole node's.
fn node() -> World {
    // One thread, so that its line is the only one and its order is exact.
    World::builder()
        .set("edge", "threads = 1")
        .set("tenants", &format!("max_waiting = {WAITING_MAX}"))
        .set("admission", "tickets = false")
        .tenant("alice")
        .tenant("bob")
        .start()
}

/// A backend whose answers wait until they are let go, each request being noted as it comes.
pub struct Held {
    pub backend: Backend,
    gate: Arc<(Mutex<usize>, Condvar)>,
}

impl Held {
    pub fn start() -> Self {
        let gate = Arc::new((Mutex::new(0), Condvar::new()));
        let theirs = Arc::clone(&gate);
        let backend = Backend::answering(move |peer, request| {
            let (free, changed) = &*theirs;
            let free = free.lock().expect("no holder panics");
            let mut free = changed.wait_while(free, |free| *free == 0).expect("no holder panics");
            *free -= 1;
            drop(free);
            peer.answer("200 OK", request.target())
        });
        Self { backend, gate }
    }

    /// Lets this many requests be answered.
    pub fn let_go(&self, count: usize) {
        *self.gate.0.lock().expect("no holder panics") += count;
        self.gate.1.notify_all();
    }

    /// The same for those that have arrived, and for none that arrives while they are let go.
    pub fn let_those_go(&self, count: usize) {
        self.let_go(count);
        wait::until("they are let go", || *self.gate.0.lock().expect("no holder panics") == 0);
    }

    /// Targets in the order in which they arrived.
    pub fn arrived(&self) -> Vec<String> {
        let received = self.backend.received();
        let lines = received.lines().filter(|line| line.starts_with("GET "));
        lines.filter_map(|line| line.split(' ').nth(1)).map(str::to_owned).collect()
    }
}

fn add(world: &World, name: &str, tenant: &str, held: &Held, limit: Option<u32>) {
    let mut site = json!({ "name": name, "tenant": tenant, "hosts": [format!("{name}.test")],
        "backend": { "kind": "http", "address": held.backend.address.to_string() } });
    if let Some(limit) = limit {
        site["max_concurrent"] = limit.into();
    }
    world.import(&[site]);
}

/// Sends a request and does not wait for its answer.
fn ask(world: &World, host: &str, target: &str) -> Connection {
    let mut connection = Connection::open(world.http());
    connection.send(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    connection
}

/// Waits until this many requests of the whole node wait in a line.
fn wait_until_waiting(world: &World, count: usize) {
    wait::until(&format!("{count} requests wait"), || {
        world.metric("nagaya_requests_waiting", "") == count as f64
    });
}

fn refused_with_time(connection: &mut Connection, code: &str) {
    let refused = connection.response().expect(503);
    let after = refused.header("retry-after").and_then(|text| text.parse::<u32>().ok());
    assert!(after.is_some_and(|seconds| seconds >= 1), "{refused:?}");
    assert!(refused.text().contains(code), "{refused:?}");
}

fn beyond_its_limit_a_site_waits_in_order_and_then_refuses() {
    let world = node();
    let held = Held::start();
    add(&world, "one", "alice", &held, Some(1));
    let mut first = ask(&world, "one.test", "/1");
    wait::until("the first one runs", || held.arrived() == ["/1"]);
    let mut second = ask(&world, "one.test", "/2");
    wait_until_waiting(&world, 1);
    let mut third = ask(&world, "one.test", "/3");
    wait_until_waiting(&world, 2);
    refused_with_time(&mut ask(&world, "one.test", "/4"), "NGY0413");
    held.let_go(3);
    for (connection, target) in [(&mut first, "/1"), (&mut second, "/2"), (&mut third, "/3")] {
        assert_eq!(connection.response().expect(200).text(), target);
    }
    assert_eq!(held.arrived(), ["/1", "/2", "/3"]);
    world.stop();
}

fn client_that_leaves_the_line_frees_its_place() {
    let world = node();
    let held = Held::start();
    add(&world, "one", "alice", &held, Some(1));
    let mut first = ask(&world, "one.test", "/1");
    wait::until("the first one runs", || held.arrived() == ["/1"]);
    for leaving in ["/2", "/3", "/4", "/5"] {
        let connection = ask(&world, "one.test", leaving);
        wait_until_waiting(&world, 1);
        drop(connection);
        wait_until_waiting(&world, 0);
    }
    let mut last = ask(&world, "one.test", "/last");
    wait_until_waiting(&world, 1);
    held.let_go(2);
    first.response().expect(200);
    last.response().expect(200);
    assert_eq!(held.arrived(), ["/1", "/last"], "who left is not asked for");
    // Leaving while it runs gives the right to run back too.
    let running = ask(&world, "one.test", "/running");
    wait::until("it runs", || held.arrived().len() == 3);
    drop(running);
    let mut next = ask(&world, "one.test", "/next");
    wait::until("the next one runs", || held.arrived().len() == 4);
    held.let_go(2);
    next.response().expect(200);
    world.stop();
}

fn client_that_waits_too_long_is_told_when_to_come_back() {
    let world = World::builder().set("tenants", "wait_timeout = \"300ms\"").tenant("alice").start();
    let held = Held::start();
    add(&world, "one", "alice", &held, Some(1));
    let mut first = ask(&world, "one.test", "/1");
    wait::until("the first one runs", || held.arrived() == ["/1"]);
    refused_with_time(&mut ask(&world, "one.test", "/2"), "NGY0414");
    held.let_go(1);
    first.response().expect(200);
    world.stop();
}

fn a_tenants_limit_holds_for_all_its_sites_and_for_nobody_else() {
    let world = node();
    let held = Held::start();
    for (name, tenant) in [("a1", "alice"), ("a2", "alice"), ("b1", "bob")] {
        add(&world, name, tenant, &held, None);
    }
    world.cli(&["tenant", "set", "alice", "--max-concurrent", "1"]);
    let mut first = ask(&world, "a1.test", "/first");
    wait::until("it runs", || held.arrived() == ["/first"]);
    let mut second = ask(&world, "a2.test", "/second");
    wait_until_waiting(&world, 1);
    let mut others = ask(&world, "b1.test", "/others");
    wait::until("the other tenant's runs", || held.arrived() == ["/first", "/others"]);
    held.let_go(3);
    for connection in [&mut first, &mut second, &mut others] {
        connection.response().expect(200);
    }
    world.stop();
}

fn a_raised_limit_lets_the_line_in() {
    let world = node();
    let held = Held::start();
    add(&world, "one", "alice", &held, Some(1));
    let mut first = ask(&world, "one.test", "/1");
    wait::until("the first one runs", || held.arrived() == ["/1"]);
    let mut second = ask(&world, "one.test", "/2");
    wait_until_waiting(&world, 1);
    world.cli(&["site", "set", "one", "--max-concurrent", "2"]);
    wait::until("two run", || held.arrived().len() == 2);
    held.let_go(2);
    for connection in [&mut first, &mut second] {
        connection.response().expect(200);
    }
    world.stop();
}
