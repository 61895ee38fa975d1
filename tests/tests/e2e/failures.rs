//! What goes wrong on a machine: processes are killed, disks fill up, descriptors run out, operators make mistakes.
//! The node goes on, and says so.
//!
//! Each test has a node of its own. Not here: what backends do wrong (`proxy`, `cgi`, `php`, `app`).

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use nagaya_tests::backend::Backend;
use nagaya_tests::client::{self, Connection};
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::{Builder, World};
use nagaya_tests::{machine, wait};
use serde_json::json;

use crate::resting::{check, has};

pub const SUITE: Suite = Suite {
    name: "failures",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        a_killed_edge_refuses_no_connection,
        programs_of_a_killed_edge_end,
        a_killed_keeper_is_replaced_and_its_programs_end,
        a_full_disk_stops_the_log_and_no_request,
        running_out_of_descriptors_passes,
        a_stop_lets_running_requests_finish,
        a_stop_waits_no_longer_than_it_should,
        a_reload_takes_new_settings,
        a_reload_gives_php_other_workers,
        workers_that_are_replaced_all_the_time_refuse_nobody,
        a_reload_with_mistakes_keeps_the_old_settings,
        logs_are_opened_anew_on_a_signal,
        a_log_that_could_not_be_opened_is_opened_on_a_signal,
        without_root_it_serves_and_says_what_is_off,
        a_node_that_can_make_no_sandbox_says_why,
    ]),
};

fn builder() -> Builder {
    World::builder()
        .tenant("alice")
        .site(json!({ "name": "www", "tenant": "alice", "hosts": ["www.test"],
            "backend": { "kind": "static", "root": "www" } }))
        .site(json!({ "name": "cgi", "tenant": "alice", "hosts": ["cgi.test"],
            "backend": { "kind": "cgi", "root": "cgi" } }))
}

fn a_node_that_can_make_no_sandbox_says_why() {
    let world = builder().before(&["setpriv", "--bounding-set=-mknod", "--"]).start();
    let said = wait::until_some("the node has tried a sandbox", || {
        world.status()["keeper"]["sandbox"].as_str().map(str::to_owned)
    });
    assert!(said.starts_with("NGY0331: a sandbox cannot make its root file system"), "{said}");
    // A container may lack others besides.
    assert!(said.contains("give nagaya ") && said.contains("CAP_MKNOD ("), "{said}");
    assert!(world.log().contains("no application can run on this node"), "{}", world.log());
    // Doctor has rights that the node has not, and says both.
    assert!(has(&world, "sandbox"));
    let row = check(&world, "node-sandbox");
    assert!(row["state"] == "off" && row["value"] == said.as_str(), "{row}");
    world.stop();
}

fn fill(world: &World) {
    world.write("alice", "www/a.txt", "alpha");
    let program = |name: &str, body: &str| {
        let text = format!("#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\n'\n{body}\n");
        world.write_program("alice", &format!("cgi/{name}.cgi"), &text);
    };
    program("quick", "echo quick");
    program("forever", "echo begun; while :; do sleep 1; done");
    program("gated", "echo begun; until [ -e gate ]; do sleep 0.02; done; echo finished");
}

fn start() -> World {
    let world = builder().start();
    fill(&world);
    world
}

/// A request for a program that does not end, its answer begun.
fn running_forever(world: &World) -> Connection {
    let mut connection = Connection::open(world.http());
    connection.send("GET /forever.cgi HTTP/1.1\r\nHost: cgi.test\r\n\r\n");
    connection.head().expect(200);
    assert!(!machine::processes_with(&forever(world)).is_empty());
    connection
}

fn forever(world: &World) -> String {
    world.home("alice").join("cgi/forever.cgi").to_string_lossy().into_owned()
}

fn a_killed_edge_refuses_no_connection() {
    let world = start();
    let address = world.http();
    let stop = Arc::new(AtomicBool::new(false));
    let answered = Arc::new(AtomicUsize::new(0));
    let broken = Arc::new(AtomicUsize::new(0));
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let stop = Arc::clone(&stop);
            let answered = Arc::clone(&answered);
            let broken = Arc::clone(&broken);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    // This is the claim: whoever comes is let in. What was in flight may break off.
                    let mut connection = Connection::try_open(address).expect("no connection is refused");
                    let sent = connection
                        .try_send("GET /a.txt HTTP/1.1\r\nHost: www.test\r\nConnection: close\r\n\r\n");
                    match sent.and_then(|()| connection.try_response()) {
                        Ok(answer) => {
                            assert_eq!(answer.text(), "alpha");
                            answered.fetch_add(1, Ordering::Relaxed)
                        }
                        Err(_) => broken.fetch_add(1, Ordering::Relaxed),
                    };
                }
            })
        })
        .collect();
    for kill in 1..=3 {
        let before = answered.load(Ordering::Relaxed);
        wait::until("requests are answered", || answered.load(Ordering::Relaxed) > before + 20);
        let edge = world.pid_of("edge");
        machine::signal(edge, "KILL");
        wait::until("another edge runs", || world.pid_of("edge") != edge);
        assert_eq!(world.restarts_of("edge"), kill);
    }
    let before = answered.load(Ordering::Relaxed);
    wait::until("requests are answered again", || answered.load(Ordering::Relaxed) > before + 20);
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.join().expect("every connection was let in");
    }
    world.stop();
}

fn programs_of_a_killed_edge_end() {
    let world = start();
    let mut connection = running_forever(&world);
    machine::signal(world.pid_of("edge"), "KILL");
    machine::wait_until_gone(&forever(&world));
    assert!(connection.try_response().is_err(), "the answer passes for complete");
    wait::until("programs run again", || world.pid_of("edge") > 0);
    assert_eq!(world.get("cgi.test", "/quick.cgi").expect(200).text(), "quick\n");
    world.stop();
}

fn a_killed_keeper_is_replaced_and_its_programs_end() {
    let world = start();
    let _connection = running_forever(&world);
    let keeper = world.pid_of("keeper");
    machine::signal(keeper, "KILL");
    machine::wait_until_gone(&forever(&world));
    wait::until("another keeper runs", || world.pid_of("keeper") != keeper);
    wait::until("programs run again", || {
        let answer = world.get("cgi.test", "/quick.cgi");
        assert!(matches!(answer.status, 200 | 502 | 503), "{answer:?}");
        answer.status == 200
    });
    assert_eq!(world.get("www.test", "/a.txt").expect(200).text(), "alpha");
    assert_eq!(world.restarts_of("edge"), 0);
    world.stop();
}

/// A small file system of its own at a path, gone with this value.
pub struct SmallDisk(String);

impl SmallDisk {
    /// `size` as the kernel reads it.
    pub fn mount(at: &std::path::Path, size: &str) -> Self {
        fs::create_dir_all(at).expect("our own directory");
        let at = at.to_string_lossy().into_owned();
        machine::run("mount", &["-t", "tmpfs", "-o", &format!("size={size},mode=0755"), "tmpfs", &at]);
        Self(at)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: the node may still have its log open.
        let _ = machine::output("umount", &["-l", &self.0]);
    }
}

fn a_full_disk_stops_the_log_and_no_request() {
    let builder = builder();
    let disk = SmallDisk::mount(&builder.path("log"), "1m");
    let world = builder.start();
    fill(&world);
    let filler = world.path("log/filler");
    let full = fs::write(&filler, vec![0; 2 << 20]);
    assert!(full.is_err(), "the disk is larger than it was meant to be");
    let dropped = |world: &World| world.metric("nagaya_access_log_lines_total", "dropped");
    wait::until("lines are lost", || {
        // The disk's last page may have had room for some lines.
        (0..50).for_each(|_| assert_eq!(world.get("www.test", "/a.txt").expect(200).text(), "alpha"));
        dropped(&world) > 0.0
    });
    wait::until("the loss is reported", || world.log().contains("NGY0440"));
    // With room again, lines are written again.
    fs::remove_file(&filler).expect("our own file");
    let before = world.access_log().len();
    wait::until("lines are written again", || {
        world.get("www.test", "/a.txt").expect(200);
        world.access_log().len() > before
    });
    drop(disk);
    world.stop();
}

fn running_out_of_descriptors_passes() {
    let world = builder().before(&["prlimit", "--nofile=96:96"]).start();
    fill(&world);
    let mut running = Connection::open(world.http());
    running.send("GET /gated.cgi HTTP/1.1\r\nHost: cgi.test\r\nConnection: close\r\n\r\n");
    // More clients than it has room for; the kernel takes them in.
    let mut crowd: Vec<_> = (0..200).map(|_| Connection::open(world.http())).collect();
    for connection in &mut crowd {
        connection.send("GET /a.txt HTTP/1.1\r\nHost: www.test\r\n\r\n");
    }
    wait::until("it says so", || world.log().contains("NGY0422"));
    // Who is in is served to the end.
    world.write("alice", "cgi/gate", "open");
    assert_eq!(running.response().expect(200).text(), "begun\nfinished\n");
    // Those that wait get their turn when others leave.
    let mut last = crowd.pop().expect("two hundred");
    drop(crowd);
    assert_eq!(last.response().expect(200).text(), "alpha");
    assert_eq!(world.get("cgi.test", "/quick.cgi").expect(200).text(), "quick\n");
    assert_eq!(world.restarts_of("edge"), 0);
    world.stop();
}

fn a_stop_lets_running_requests_finish() {
    let world = start();
    let address = world.http();
    let mut running = Connection::open(address);
    running.send("GET /gated.cgi HTTP/1.1\r\nHost: cgi.test\r\n\r\n");
    running.head().expect(200);
    let mut idle = Connection::open(address);
    idle.send("GET /a.txt HTTP/1.1\r\nHost: www.test\r\n\r\n").response().expect(200);
    machine::signal(world.pid(), "TERM");
    assert!(idle.is_closed(), "an idle connection need not be waited for");
    wait::until("nobody is let in any more", || Connection::try_open(address).is_err());
    world.write("alice", "cgi/gate", "open");
    let whole = String::from_utf8_lossy(&running.until_end()).into_owned();
    assert!(
        whole.contains("begun") && whole.contains("finished") && whole.ends_with("0\r\n\r\n"),
        "{whole:?}"
    );
    assert!(world.wait_for_end().success());
    machine::wait_until_gone(&world.path("").to_string_lossy());
}

fn a_stop_waits_no_longer_than_it_should() {
    let world = builder().set("edge.limits", "drain_timeout = \"300ms\"").start();
    fill(&world);
    let mut connection = running_forever(&world);
    machine::signal(world.pid(), "TERM");
    assert!(world.wait_for_end().success());
    assert!(connection.try_response().is_err(), "the answer passes for complete");
    machine::wait_until_gone(&forever(&world));
}

/// Rewrites a line of the configuration.
fn configure(world: &World, from: &str, to: &str) {
    let path = world.path("nagaya.toml");
    let text = fs::read_to_string(&path).expect("our own file");
    assert!(text.contains(from), "{text}");
    fs::write(&path, text.replace(from, to)).expect("our own file");
}

fn is_kept(world: &World) -> bool {
    let answer =
        Connection::open(world.http()).send("GET /a.txt HTTP/1.1\r\nHost: www.test\r\n\r\n").response();
    answer.expect(200).header("connection") != Some("close")
}

fn a_reload_takes_new_settings() {
    let world = builder().set("edge.limits", "keep_alive_requests = 10").start();
    fill(&world);
    assert!(is_kept(&world));
    configure(&world, "keep_alive_requests = 10", "keep_alive_requests = 1");
    machine::signal(world.pid(), "HUP");
    wait::until("the new setting holds", || !is_kept(&world));
    assert_eq!(world.restarts_of("edge"), 0);
    assert!((world.metric("nagaya_config_reloads_total", "accepted") - 1.0).abs() < 0.5);
    world.stop();
}

/// As after a change of `php.ini`.
fn a_reload_gives_php_other_workers() {
    let world = builder()
        .site(json!({ "name": "php", "tenant": "alice", "hosts": ["php.test"],
            "backend": { "kind": "php", "root": "php" } }))
        .start();
    world.write("alice", "php/pid.php", "<?php echo getmypid();");
    world.give("alice");
    let pid = || world.get("php.test", "/pid.php").expect(200).text();
    let before = pid();
    assert_eq!(pid(), before);
    machine::signal(world.pid(), "HUP");
    wait::until("another worker serves", || pid() != before);
    assert_eq!(world.restarts_of("edge"), 0);
    world.stop();
}

/// A worker that ends counts until nothing is left of it, so its successor may have to wait.
fn workers_that_are_replaced_all_the_time_refuse_nobody() {
    let world = builder()
        .set("tenants", "php_workers = 2\nphp_requests = 1")
        .site(json!({ "name": "php", "tenant": "alice", "hosts": ["php.test"],
            "backend": { "kind": "php", "root": "php" } }))
        .start();
    world.write("alice", "php/pid.php", "<?php echo getmypid();");
    world.give("alice");
    let address = world.http();
    let ask = move || -> Vec<u16> {
        (0..40).map(|_| client::get(address, "php.test", "/pid.php").status).collect()
    };
    let clients: Vec<_> = (0..8).map(|_| std::thread::spawn(ask)).collect();
    for client in clients {
        let statuses = client.join().expect("it does not panic");
        assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
    }
    world.stop();
}

fn a_reload_with_mistakes_keeps_the_old_settings() {
    let world = builder().set("edge.limits", "keep_alive_requests = 10").start();
    fill(&world);
    configure(&world, "keep_alive_requests = 10", "keep_alive_requests = 1\nno_such_key = 1");
    machine::signal(world.pid(), "HUP");
    wait::until("the mistake is named", || world.log().contains("no_such_key"));
    wait::until("the refusal is counted", || world.metric("nagaya_config_reloads_total", "refused") > 0.0);
    assert!(is_kept(&world), "half of a wrong file is in force");
    world.stop();
}

fn logs_are_opened_anew_on_a_signal() {
    let world = start();
    world.get("www.test", "/a.txt?before").expect(200);
    wait::until("it is logged", || world.access_log().iter().any(|line| line["target"] == "/a.txt?before"));
    fs::rename(world.path("log/access.log"), world.path("log/access.log.1")).expect("our own file");
    machine::signal(world.pid(), "USR1");
    wait::until("there is a new file", || world.path("log/access.log").exists());
    wait::until("new requests are in it", || {
        world.get("www.test", "/a.txt?after").expect(200);
        world.access_log().iter().any(|line| line["target"] == "/a.txt?after")
    });
    assert!(fs::read_to_string(world.path("log/access.log.1")).expect("the old file").contains("?before"));
    world.stop();
}

fn a_log_that_could_not_be_opened_is_opened_on_a_signal() {
    use std::os::unix::fs::PermissionsExt as _;
    let builder = builder();
    let log = builder.path("log/access.log");
    machine::write(&log, "somebody else's\n");
    fs::set_permissions(&log, fs::Permissions::from_mode(0o600)).expect("our own file");
    let world = builder.start();
    fill(&world);
    world.get("www.test", "/a.txt").expect(200);
    assert!(world.log().contains("NGY0424"), "requests are not logged, and nobody is told");
    fs::remove_file(&log).expect("our own file");
    machine::signal(world.pid(), "USR1");
    wait::until("requests are logged", || {
        world.get("www.test", "/a.txt").expect(200);
        !world.access_log().is_empty()
    });
    world.stop();
}

fn without_root_it_serves_and_says_what_is_off() {
    const NOBODY: u32 = 65_534;
    let backend = Backend::answering(|peer, _| peer.answer("200 OK", "behind"));
    let world = World::builder()
        .user(NOBODY)
        .site_of("alice", "www", json!({ "kind": "static", "root": "www" }))
        .site_of("alice", "cgi", json!({ "kind": "cgi", "root": "cgi" }))
        .site_of("alice", "http", json!({ "kind": "http", "address": backend.address.to_string() }))
        .start();
    fill(&world);
    assert_eq!(world.get("www.test", "/a.txt").expect(200).text(), "alpha");
    assert_eq!(world.get("cgi.test", "/quick.cgi").expect(200).text(), "quick\n");
    assert_eq!(world.get("http.test", "/").expect(200).text(), "behind");
    let status = world.status();
    let rows = status["protections"].as_array().expect("a list");
    let is_on = |name: &str| rows.iter().find(|row| row["name"] == name).map(|row| row["on"] == true);
    assert_eq!((is_on("tenant-uids"), is_on("edge-uid")), (Some(false), Some(false)));
    assert_eq!(is_on("no-new-privileges"), Some(true));
    for name in ["tenant-uids", "edge-uid"] {
        let line = world.log().lines().find(|line| line.contains(name)).map(str::to_owned);
        assert!(line.is_some_and(|line| line.contains("NGY0508")), "{name} is off without a word");
    }
    world.stop();
}
