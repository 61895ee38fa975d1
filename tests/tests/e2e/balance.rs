//! Load: an application that is short of CPU gets more while it runs, and gives it back; on a busy node it moves to a better one,
//! and nobody sees an error.
//!
//! Not here: what is decided when (`nagaya_placement`, in tables), nodes that do not answer (`cluster`).

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nagaya_tests::client::{self, Connection};
use nagaya_tests::cluster::{Cluster, Frozen};
use nagaya_tests::suite::{Suite, Tests, skip};
use nagaya_tests::wait;
use nagaya_tests::world::{Builder, World};
use serde_json::{Value, json};

pub const SUITE: Suite = Suite {
    name: "balance",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        a_busy_application_gets_more_cpu_and_gives_it_back,
        nobody_gets_more_than_its_record_and_its_tenant_allow,
        a_busy_application_moves_to_a_better_node_without_an_error,
        a_busy_application_gets_a_second_node_and_gives_it_back,
        a_second_node_is_given_up_without_an_error,
    ]),
};

/// Until a machine that is full of other tests has time for this one.
const PATIENCE: Duration = Duration::from_secs(120);

/// How often a node may be silent without being meant to.
const SILENCES_MAX: usize = 5;

/// So little that a machine which has much else to do has more to give.
const LITTLE: &str = "4%";

/// Works for each request: a little, or until a file is there.
const WORKER: &str = r#"#!/usr/bin/python3
import http.server, os, secrets, socket, socketserver, threading, time

run = secrets.token_hex(8)

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def do_GET(self):
        if self.path == "/work":
            end = time.thread_time() + 0.03
            while time.thread_time() < end:
                pass
        while self.path == "/work-until-told" and not os.path.exists("told"):
            for _ in range(10000):
                pass
        self.send_response(200)
        self.send_header("Content-Length", str(len(run)))
        # In one piece: an answer that has begun is not asked for again.
        self._headers_buffer.append(b"\r\n" + run.encode())
        self.flush_headers()

class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True

server = Server(("", 0), Handler, bind_and_activate=False)
server.socket.close()
server.socket = socket.socket(socket.AF_UNIX)
server.socket.bind(os.environ["NAGAYA_SOCKET"])
server.socket.listen(128)
server.serve_forever(poll_interval=3600)
"#;

/// Decides soon, on a machine that may be busy with something else.
fn hasty(builder: Builder) -> Builder {
    builder
        .set("balance", "every = \"200ms\"\nbusy = 100\nlower_after = \"1s\"")
        .set("instances", "image_bytes = \"0B\"")
}

fn add(world: &World, name: &str, tenant: &str, cpu: &str, more: Value) {
    world.write_program(tenant, &format!("{name}/app.py"), WORKER);
    world.give(tenant);
    let mut backend = json!({ "kind": "app", "directory": name, "command": ["./app.py"], "start_seconds": 60, "timeout_seconds": 600 });
    for (key, value) in more.as_object().expect("an object") {
        backend[key] = value.clone();
    }
    world.import(&[
        json!({ "name": name, "tenant": tenant, "hosts": [format!("{name}.test")], "backend": backend,
        "limits": { "cpu": cpu } }),
    ]);
}

fn begin_work(world: &World, host: &str) -> Connection {
    let mut connection = Connection::open(world.http());
    connection.send(format!("GET /work-until-told HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    connection
}

/// The CPU limit of a site's cell, in percent of one core.
fn limit(world: &World, path: &str) -> Option<u64> {
    let cells = world.cells();
    let cpu = &cells.iter().find(|cell| cell["path"] == path)?["limits"]["cpu"];
    Some(cpu["quota_us"].as_u64()? * 100 / cpu["period_us"].as_u64()?)
}

#[track_caller]
fn until_limit(world: &World, path: &str, percent: u64) {
    let reached = wait::within(PATIENCE, || (limit(world, path) == Some(percent)).then_some(()));
    assert!(reached.is_some(), "{path} has {:?} and not {percent}%", limit(world, path));
}

fn cpu_us(world: &World, site: &str) -> u64 {
    let list: Value = serde_json::from_str(&world.cli(&["instance", "list", "--json"])).expect("JSON");
    let row = list.as_array().and_then(|rows| rows.iter().find(|row| row["site"] == site));
    row.and_then(|row| row["cpu_us"].as_u64()).unwrap_or_default()
}

fn balance(world: &World, site: &str) -> Value {
    let told: Value = serde_json::from_str(&world.cli(&["explain", site, "--json"])).expect("JSON");
    told["balance"].clone()
}

fn has_cpu_cells(world: &World) -> bool {
    let status: Value = serde_json::from_str(&world.admin("/v1/cells").expect("it answers")).expect("JSON");
    !status["controllers"]["cpu"].is_null()
}

fn a_busy_application_gets_more_cpu_and_gives_it_back() {
    let world = hasty(World::builder().tenant("alice")).start();
    if !has_cpu_cells(&world) {
        skip("no cell can limit CPU time here");
    }
    add(&world, "app", "alice", LITTLE, json!({}));
    let run = world.get("app.test", "/run").expect(200).text();
    // A start that took long was work, too.
    until_limit(&world, "alice/app", 4);
    let mut working = begin_work(&world, "app.test");
    until_limit(&world, "alice/app", 16);
    let mut since = (Instant::now(), cpu_us(&world, "app"));
    let more = wait::within(PATIENCE, || {
        let took = since.0.elapsed();
        let used = cpu_us(&world, "app").saturating_sub(since.1);
        let is_more = used as f64 > took.as_micros() as f64 * 0.04 * 1.5;
        if took < Duration::from_secs(1) {
            return None;
        }
        // The machine may have had no more to give in this second.
        since = (Instant::now(), cpu_us(&world, "app"));
        is_more.then_some(())
    });
    assert!(more.is_some(), "it uses no more than its record allows: {}", balance(&world, "app"));
    let why = world.cli(&["explain", "app"]);
    assert!(why.contains("of the time at a limit of 0.08 CPUs") && why.contains("raised to 0.16"), "{why}");
    assert!(why.contains("(its record: 0.04, at most 0.16)"), "{why}");
    world.write("alice", "app/told", "");
    assert_eq!(working.response().expect(200).text(), run, "it was not started anew");
    until_limit(&world, "alice/app", 4);
    assert!(world.cli(&["explain", "app"]).contains("the limit is lowered to 0.04"));
    for step in ["raise", "lower"] {
        assert!(
            world.metric("nagaya_balance_decisions_total", &format!("step=\"{step}\",end=\"done\"")) >= 2.0
        );
    }
    assert_eq!(world.get("app.test", "/run").expect(200).text(), run);
    world.stop();
}

fn nobody_gets_more_than_its_record_and_its_tenant_allow() {
    let world = hasty(World::builder().tenant("alice").tenant("bob")).start();
    if !has_cpu_cells(&world) {
        skip("no cell can limit CPU time here");
    }
    world.cli(&["tenant", "set", "bob", "--cpu", "6%"]);
    add(&world, "said", "alice", LITTLE, json!({ "cpu_max": "10%" }));
    add(&world, "never", "alice", LITTLE, json!({ "cpu_max": "4%" }));
    add(&world, "poor", "bob", LITTLE, json!({}));
    let sites = [("said", "alice", 10), ("poor", "bob", 6), ("never", "alice", 4)];
    let mut working = Vec::new();
    for (name, tenant, most) in sites {
        working.push(begin_work(&world, &format!("{name}.test")));
        until_limit(&world, &format!("{tenant}/{name}"), most);
        let held = wait::within(PATIENCE, || {
            let now = balance(&world, name)["now"].clone();
            let held = now["held"].as_str()?.contains("all that it may have here");
            (held && now["limit_max"].as_f64()? < most as f64 / 100.0 + 0.001).then_some(())
        });
        assert!(held.is_some(), "{name}: {}", balance(&world, name));
        assert_eq!(limit(&world, &format!("{tenant}/{name}")), Some(most));
    }
    // What an operator says holds at once, whatever was decided before.
    world.cli(&["site", "set", "said", "--cpu", "40%", "--cpu-max", "40%"]);
    until_limit(&world, "alice/said", 40);
    for (name, tenant, _) in sites {
        world.write(tenant, &format!("{name}/told"), "");
    }
    working.iter_mut().for_each(|connection| drop(connection.response().expect(200)));
    world.stop();
}

/// A control group in which a node has half a processor for itself, as a container would, so that one can be busy and the other
/// not, whatever this machine does beside. Its periods are short: a node that stands still for a tenth of a second is a silent one.
struct Allotment {
    /// In one hierarchy of v2, or in those of v1 that bound and count CPU time.
    dirs: Vec<PathBuf>,
}

impl Allotment {
    /// None: none can be made here.
    fn make() -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("nagaya-test-{}-{number}", std::process::id());
        let v1 = ["cpu", "cpuacct"].map(|controller| Path::new("/sys/fs/cgroup").join(controller));
        if v1.iter().all(|mount| mount.join("cgroup.procs").exists()) {
            let made = Self { dirs: v1.iter().map(|mount| mount.join(&name)).collect() };
            made.dirs.iter().try_for_each(fs::create_dir).ok()?;
            fs::write(made.dirs[0].join("cpu.cfs_period_us"), "10000").ok()?;
            fs::write(made.dirs[0].join("cpu.cfs_quota_us"), "5000").ok()?;
            return Some(made);
        }
        let root = Path::new("/sys/fs/cgroup");
        fs::write(root.join("cgroup.subtree_control"), "+cpu").ok()?;
        let made = Self { dirs: vec![root.join(&name)] };
        fs::create_dir(&made.dirs[0]).ok()?;
        fs::write(made.dirs[0].join("cpu.max"), "5000 10000").ok()?;
        Some(made)
    }

    /// What ends in it ends soon.
    fn lift(&self) {
        // On either version the first directory has the quota.
        for (file, none) in [("cpu.cfs_quota_us", "-1"), ("cpu.max", "max")] {
            let file = self.dirs[0].join(file);
            if file.exists() {
                fs::write(file, none).expect("our own directory");
            }
        }
    }

    /// The words by which a shell enters it, before it becomes what follows.
    fn enter(&self) -> [String; 4] {
        let files = self.dirs.iter().map(|dir| format!("echo $$ > {}/cgroup.procs && ", dir.display()));
        ["sh".into(), "-c".into(), format!("{}exec \"$@\"", files.collect::<String>()), "sh".into()]
    }
}

impl Drop for Allotment {
    fn drop(&mut self) {
        for dir in &self.dirs {
            // The last process in it may be on its way out.
            wait::within(PATIENCE, || fs::remove_dir(dir).ok());
        }
    }
}

/// Uses up what a control group has, until it is dropped.
struct Hog(Child);

impl Hog {
    #[track_caller]
    fn within(allotment: &Allotment) -> Self {
        let enter = allotment.enter();
        let mut command = Command::new(&enter[0]);
        let busy = ["nice", "-n", "19", "sh", "-c", "while :; do :; done"];
        command.args(&enter[1..]).args(busy).stdin(Stdio::null());
        Self(command.spawn().expect("a shell"))
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The same settings of their balance for all nodes, each in one of these.
fn cluster_within(allotments: &[Allotment], settings: &[&str]) -> Cluster {
    let next = Cell::new(0);
    let alice = |builder: Builder| builder.tenant("alice");
    Cluster::start(allotments.len(), alice, |builder| {
        let enter = allotments[next.replace(next.get() + 1)].enter();
        let builder = builder
            .before(&enter.each_ref().map(String::as_str))
            .set("instances", "image_bytes = \"0B\"")
            .set("balance", "every = \"200ms\"\nraise_max = 1\nmove_after = \"1s\"\ntarget = 100");
        settings.iter().fold(builder, |builder, setting| builder.set("balance", setting))
    })
}

/// An application that all nodes know: which one it runs on, and the name of its run.
fn with_app(cluster: &Cluster, cpu: &str, more: Value) -> (usize, String) {
    let first = &cluster.nodes[0];
    if !has_cpu_cells(first) {
        skip("no cell can limit CPU time here");
    }
    add(first, "app", "alice", cpu, more);
    for node in &cluster.nodes {
        wait::until("every node knows the application", || {
            node.try_cli(&["site", "show", "app"]).status.success()
        });
    }
    let run = run_of(first);
    (cluster.node_of("app"), run)
}

/// Visitors without a pause, each counted as answered or not.
struct Visitors {
    done: Arc<AtomicBool>,
    failed: Arc<AtomicU32>,
    threads: Vec<std::thread::JoinHandle<u32>>,
}

impl Visitors {
    fn come(world: &World, count: usize) -> Self {
        let done = Arc::<AtomicBool>::default();
        let failed = Arc::<AtomicU32>::default();
        let threads = (0..count).map(|_| {
            let done = Arc::clone(&done);
            let failed = Arc::clone(&failed);
            let address = world.http();
            std::thread::spawn(move || {
                let mut answered = 0;
                // A test that has failed does not tell them to go.
                let begun = Instant::now();
                while !done.load(Ordering::Relaxed) && begun.elapsed() < PATIENCE * 2 {
                    match client::get(address, "app.test", "/work").status {
                        200 => answered += 1,
                        _ => drop(failed.fetch_add(1, Ordering::Relaxed)),
                    }
                }
                answered
            })
        });
        let threads = threads.collect();
        Self { done, failed, threads }
    }

    /// How many were answered, and how many were not.
    fn leave(self) -> (u32, u32) {
        self.done.store(true, Ordering::Relaxed);
        let answered = self.threads.into_iter().map(|thread| thread.join().expect("it does not panic")).sum();
        (answered, self.failed.load(Ordering::Relaxed))
    }
}

fn a_busy_application_moves_to_a_better_node_without_an_error() {
    let (Some(one), Some(other)) = (Allotment::make(), Allotment::make()) else {
        skip("no control group can be made here");
    };
    let allotments = [one, other];
    let settings = ["busy = 60", "move_anyway_after = \"2s\"", "better_by = 10"];
    let cluster = cluster_within(&allotments, &settings);
    let (at, run) = with_app(&cluster, "20%", json!({}));
    let busy = &cluster.nodes[at];
    let other = &cluster.nodes[1 - at];
    let hog = Hog::within(&allotments[at]);
    let visitors = Visitors::come(busy, 2);
    let before = cluster.placement(at, "app").expect("it is placed");
    let moves = || busy.metric("nagaya_balance_decisions_total", "step=\"move\",end=\"done\"");
    let moved = wait::within(PATIENCE, || (moves() == 1.0).then_some(()));
    let why = busy.cli(&["explain", "app"]);
    assert!(moved.is_some(), "it stays on a busy node: {why}");
    assert!(
        why.contains("short of CPU for ") && why.contains("moved to ") && !why.contains("not done"),
        "{why}"
    );
    let after = cluster.placement(at, "app").expect("it is placed");
    assert!(after["epoch"].as_u64() > before["epoch"].as_u64(), "{before} {after}");
    let now = run_of(busy);
    assert_ne!(now, run, "it was started on the other node");
    assert_eq!(run_of(other), now);
    let (answered, failed) = visitors.leave();
    assert!(answered > 0 && failed == 0, "{answered} were answered, {failed} were not");
    drop(hog);
    allotments.iter().for_each(Allotment::lift);
    cluster.stop();
}

/// The nodes that have an application and are awake, by name.
fn awake_on(cluster: &Cluster, asked: usize) -> Vec<String> {
    let placement = cluster.placement(asked, "app").expect("it is placed");
    let copies = placement["copies"].as_array().into_iter().flatten();
    let ready = copies.filter(|copy| copy["ready"] == true).map(|copy| &copy["node"]);
    let all = std::iter::once(&placement["node"]).chain(ready);
    all.map(|node| node.as_str().expect("a name").to_owned()).collect()
}

#[track_caller]
fn until_awake_on(cluster: &Cluster, asked: usize, count: usize) -> Vec<String> {
    let reached = wait::within(PATIENCE, || Some(awake_on(cluster, asked)).filter(|on| on.len() == count));
    let why = || cluster.nodes[asked].cli(&["explain", "app"]);
    reached.unwrap_or_else(|| panic!("{:?}: {}", awake_on(cluster, asked), why()))
}

/// Until the second node has given it up for want of load. A node with half a processor may be silent for a moment before, when this
/// machine has much else to do, and be taken out for that: then there is load once more.
#[track_caller]
fn until_little_for_one(cluster: &Cluster, at: usize) -> String {
    for _ in 0..SILENCES_MAX {
        until_awake_on(cluster, at, 1);
        let why = cluster.nodes[1 - at].cli(&["explain", "app"]);
        if why.contains("little for 1") {
            return why;
        }
        let visitors = Visitors::come(&cluster.nodes[at], 4);
        until_awake_on(cluster, at, 2);
        visitors.leave();
    }
    cluster.nodes[1 - at].cli(&["explain", "app"])
}

fn run_of(node: &World) -> String {
    node.get("app.test", "/run").expect(200).text()
}

fn a_busy_application_gets_a_second_node_and_gives_it_back() {
    let (Some(one), Some(other)) = (Allotment::make(), Allotment::make()) else {
        skip("no control group can be made here");
    };
    let allotments = [one, other];
    // No node is ever the better one for all of it.
    let settings =
        ["better_by = 100", "lower_after = \"1s\"", "site_rests = \"2s\"", "moves_per_minute = 100"];
    let cluster = cluster_within(&allotments, &settings);
    let (at, run) = with_app(&cluster, "10%", json!({ "max": 2 }));
    let busy = &cluster.nodes[at];
    let other = &cluster.nodes[1 - at];
    let epoch = cluster.placement(at, "app").expect("it is placed")["epoch"].clone();

    // Load: one more.
    let visitors = Visitors::come(busy, 4);
    until_awake_on(&cluster, at, 2);
    let why = busy.cli(&["explain", "app"]);
    assert!(why.contains("gets one, too (2 of 2)") && why.contains("it runs on 2 of the 2 nodes"), "{why}");
    let shared = cluster.placement(at, "app").expect("it is placed");
    assert_eq!(shared["node_epoch"], epoch, "the first is left alone: {shared}");
    let on_other = wait::within(PATIENCE, || Some(run_of(other)).filter(|on_other| *on_other != run));
    let on_other = on_other.expect("the other node answers for itself");
    let name = cluster.placement(at, "app").expect("it is placed")["copies"][0]["node"].clone();
    let outcome = format!("node={name},outcome=\"answered\"");
    wait::until("some of the load goes there", || busy.metric("nagaya_peer_requests_total", &outcome) > 3.0);
    let (answered, failed) = visitors.leave();
    assert!(answered > 0 && failed == 0, "{answered} were answered, {failed} were not");

    // No load: one fewer, and the first is the one that it was.
    let why = until_little_for_one(&cluster, at);
    assert!(why.contains("little for 1") && !why.contains("not done"), "{why}");
    assert_eq!((run_of(busy), run_of(other)), (run.clone(), run.clone()));

    // The first node falls silent under load: whoever asks the other one sees nothing of it.
    let visitors = Visitors::come(busy, 4);
    until_awake_on(&cluster, at, 2);
    visitors.leave();
    // An odd number of them: with an even one, two more are always under way here than there, and the next goes there.
    let visitors = Visitors::come(other, 5);
    let second = wait::within(PATIENCE, || Some(run_of(other)).filter(|second| *second != run));
    let second = second.expect("the other node answers for itself");
    assert_ne!(second, on_other, "it was started anew");
    let frozen = Frozen::stop(busy);
    let alone = wait::within(PATIENCE, || {
        let placement = cluster.placement(1 - at, "app")?;
        (placement["node"] == name && placement["copies"].is_null()).then_some(placement)
    });
    let alone = alone.expect("it has taken the silent one out");
    assert_eq!((run_of(other), &alone["why"]), (second, &json!("silent")));
    let (answered, failed) = visitors.leave();
    assert!(answered > 0 && failed == 0, "{answered} were answered, {failed} were not");
    drop(frozen);
    allotments.iter().for_each(Allotment::lift);
    cluster.stop();
}

fn a_second_node_is_given_up_without_an_error() {
    let (Some(one), Some(other)) = (Allotment::make(), Allotment::make()) else {
        skip("no control group can be made here");
    };
    let allotments = [one, other];
    // What load has called for stays for as long as this test takes.
    let settings =
        ["better_by = 100", "lower_after = \"1h\"", "site_rests = \"1s\"", "moves_per_minute = 100"];
    let cluster = cluster_within(&allotments, &settings);
    let (at, run) = with_app(&cluster, "10%", json!({ "max": 2 }));
    let busy = &cluster.nodes[at];
    let visitors = Visitors::come(busy, 4);
    let name = until_awake_on(&cluster, at, 2)[1].clone();

    busy.cli(&["site", "set", "app", "--max", "1"]);
    until_awake_on(&cluster, at, 1);
    assert_eq!(run_of(busy), run, "the first is the one that it was");

    busy.cli(&["site", "set", "app", "--max", "2"]);
    until_awake_on(&cluster, at, 2);
    busy.cli(&["cluster", "drain", &name]);
    until_awake_on(&cluster, at, 1);
    assert_eq!(run_of(busy), run, "the first is the one that it was");
    let (answered, failed) = visitors.leave();
    assert!(answered > 0 && failed == 0, "{answered} were answered, {failed} were not");
    allotments.iter().for_each(Allotment::lift);
    cluster.stop();
}
