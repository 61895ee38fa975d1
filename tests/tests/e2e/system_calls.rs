//! Work of the kernel for a request: which system calls it costs, and no more. Calls that wait for the next event are not
//! counted, because their number is chance.
//!
//! Not here: how long a request takes (`./dev experiment front`).

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::time::{SystemTime, UNIX_EPOCH};

use nagaya_tests::backend::Backend;
use nagaya_tests::calls::count_calls;
use nagaya_tests::client::Connection;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "system_calls",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        a_kept_file_costs_two_system_calls_and_a_shared_look,
        a_proxied_answer_costs_four_system_calls,
        a_script_costs_the_system_calls_that_are_named,
    ]),
};

const REQUESTS: usize = 400;

/// Names of calls that wait, or that wake another thread that waits. And of one that Rust's library makes before it
/// closes a descriptor, in programs built for tests alone.
const NOT_COUNTED: [&str; 5] = ["epoll_wait", "epoll_pwait", "futex", "restart_syscall", "fcntl"];

/// What is done beside requests: clocks that tick, a log that is written.
const ASIDE_MAX: usize = REQUESTS / 4;

/// Rounds until one has no interruption.
const ROUNDS_MAX: usize = 20;

/// A kept connection to one page.
struct Asking {
    connection: Connection,
    request: String,
}

impl Asking {
    /// After this, everything that can be kept is kept.
    fn new(world: &World, host: &str, path: &str) -> Self {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n");
        let mut asking = Self { connection: Connection::open(world.http()), request };
        (0..20).for_each(|_| asking.ask());
        asking
    }

    fn ask(&mut self) {
        self.connection.send(&self.request);
        assert_eq!(self.connection.response().expect(200).text(), "counted");
    }
}

/// Calls of a process of the node for each request: exactly these.
#[track_caller]
fn check(world: &World, process: &str, asking: &mut Asking, expected: &[(&str, usize)]) {
    let calls = count(world, process, asking);
    let problem = compare(&calls, expected);
    assert!(problem.is_none(), "{process}: {}: {calls:?}", problem.unwrap_or_default());
}

fn count(world: &World, process: &str, asking: &mut Asking) -> BTreeMap<String, usize> {
    count_calls(world.pid_of(process), &world.path("calls"), || {
        (0..REQUESTS).for_each(|_| asking.ask());
    })
}

/// How these calls differ from the expected ones.
fn compare(calls: &BTreeMap<String, usize>, expected: &[(&str, usize)]) -> Option<String> {
    let expected: BTreeMap<&str, usize> = expected.iter().copied().collect();
    for (name, count) in calls.iter().filter(|(name, _)| !NOT_COUNTED.contains(&name.as_str())) {
        let due = REQUESTS * expected.get(name.as_str()).unwrap_or(&0);
        if !(due..=due + ASIDE_MAX).contains(count) {
            return Some(format!("{count} of {name} for {REQUESTS}"));
        }
    }
    expected.keys().find(|name| !calls.contains_key(**name)).map(|name| format!("none of {name}"))
}

fn a_kept_file_costs_two_system_calls_and_a_shared_look() {
    let site = json!({ "name": "www", "tenant": "alice", "hosts": ["www.test"], "backend": { "kind": "static", "root": "www" } });
    let world = World::builder().tenant("alice").site(site).start();
    let file = world.write("alice", "www/counted.txt", "counted");
    // A file that changed a moment ago may change again with the same time, and is not kept.
    let changed = || fs::metadata(&file).expect("it is there").ctime();
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    wait::until("the file is old enough", || now() > u64::try_from(changed()).expect("after 1970") + 3);
    let mut asking = Asking::new(&world, "www.test", "/counted.txt");
    // Requests that come together share the look at the file. This client sends one at a time.
    check(&world, "edge", &mut asking, &[("recvfrom", 1), ("statx", 1), ("sendto", 1)]);
    check(&world, "keeper", &mut asking, &[]);
    world.stop();
}

fn a_proxied_answer_costs_four_system_calls() {
    let backend = Backend::answering(|peer, _| {
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\ncounted");
        true
    });
    let site = json!({ "name": "app", "tenant": "alice", "hosts": ["app.test"],
        "backend": { "kind": "http", "address": backend.address.to_string() } });
    let world = World::builder().tenant("alice").site(site).start();
    let mut asking = Asking::new(&world, "app.test", "/");
    check(&world, "edge", &mut asking, &[("recvfrom", 2), ("sendto", 2)]);
    check(&world, "keeper", &mut asking, &[]);
    world.stop();
}

fn a_script_costs_the_system_calls_that_are_named() {
    let site = json!({ "name": "php", "tenant": "alice", "hosts": ["php.test"], "backend": { "kind": "php", "root": "php" } });
    let world = World::builder().set("tenants", "php_workers = 1").tenant("alice").site(site).start();
    world.write("alice", "php/counted.php", "<?php echo 'counted';");
    let mut asking = Asking::new(&world, "php.test", "/counted.php");
    // It is looked up, sent to its worker, and its answer to the client.
    let of_edge =
        [("openat2", 1), ("statx", 1), ("close", 1), ("recvfrom", 2), ("sendmsg", 1), ("sendto", 1)];
    check(&world, "edge", &mut asking, &of_edge);
    // The gate passes both on, sees that the worker is alone in its cell, and reads the clock of its CPU time. It reads
    // the counters of the cell after a request that took long, as on a busy machine.
    let of_gate = [("recvfrom", 2), ("sendmsg", 2), ("pread64", 1), ("clock_gettime", 1)];
    let mut calls = BTreeMap::new();
    let is_as_expected = |_| {
        calls = count(&world, "keeper", &mut asking);
        compare(&calls, &of_gate).is_none()
    };
    assert!((0..ROUNDS_MAX).any(is_as_expected), "keeper: {:?}: {calls:?}", compare(&calls, &of_gate));
    world.stop();
}
