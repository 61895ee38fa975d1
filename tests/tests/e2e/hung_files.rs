//! A file system that stops answering stops the requests for its own files, and no others.
//!
//! Not here: what applications do otherwise (`instances`), files that are only slow.

use std::os::unix::fs::symlink;

use nagaya_tests::client::{self, Connection};
use nagaya_tests::fuse::HangingMount;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::json;

use crate::programs;

pub const SUITE: Suite = Suite {
    name: "hung_files",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            a_file_system_that_hangs_stops_only_its_own_files,
            a_link_to_one_that_hangs_stops_only_what_is_behind_it,
            an_application_on_it_keeps_no_other_from_a_new_start,
        ],
    ),
};

/// Sent by the kernel, where it may be.
static LARGE: [u8; 700_000] = [b'L'; 700_000];

/// One thread serves all, so that what stops it stops all.
fn world() -> World {
    let world = World::builder()
        .set("edge", "threads = 1")
        .site_of("bob", "local", json!({ "kind": "static", "root": "www" }))
        .site_of("carol", "cgi", json!({ "kind": "cgi", "root": "cgi" }))
        .site_of("alice", "home", json!({ "kind": "static", "root": "www" }))
        .tenant("dave")
        .tenant("erin")
        .start();
    world.write("alice", "www/a.txt", "alice");
    world.write("bob", "www/a.txt", "bob");
    for n in 0..30 {
        world.write("bob", &format!("www/{n}.txt"), n.to_string());
    }
    world.write_program(
        "carol",
        "cgi/a.cgi",
        "#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\ncarol'\n",
    );
    world
}

fn a_file_system_that_hangs_stops_only_its_own_files(world: &World) {
    let files: &[(&str, &[u8])] =
        &[("kept.txt", b"kept"), ("cold.txt", b"cold"), ("large.bin", &LARGE), ("index.html", b"index")];
    let mount = HangingMount::new(&world.home("alice").join("remote"), files);
    world.import(&[json!({ "name": "remote", "tenant": "alice", "hosts": ["remote.test"],
        "backend": { "kind": "static", "root": "remote" } })]);
    for _ in 0..3 {
        assert_eq!(world.get("remote.test", "/kept.txt").expect(200).text(), "kept");
        assert_eq!(world.get("remote.test", "/").expect(200).text(), "index");
    }
    assert!(world.get("remote.test", "/large.bin").expect(200).body == LARGE);
    let partial = client::get_with(world.http(), "remote.test", "/large.bin", "Range: bytes=5-9\r\n");
    assert_eq!(partial.expect(206).text(), "LLLLL");
    world.get("remote.test", "/missing").expect(404);

    mount.hang();
    let waiting: Vec<_> = ["/kept.txt", "/cold.txt", "/large.bin", "/", "/missing"]
        .iter()
        .cycle()
        .take(40)
        .map(|target| {
            let mut connection = Connection::open(world.http());
            connection.send(format!("GET {target} HTTP/1.1\r\nHost: remote.test\r\n\r\n"));
            connection
        })
        .collect();
    wait::until("the node waits for the file system", || mount.unanswered() > 0);
    for n in 0..30 {
        // Kept and not yet seen ones, of others and of the same tenant, and programs.
        assert_eq!(world.get("local.test", "/a.txt").expect(200).text(), "bob");
        assert_eq!(world.get("local.test", &format!("/{n}.txt")).expect(200).text(), n.to_string());
        assert_eq!(world.get("home.test", "/a.txt").expect(200).text(), "alice");
        assert_eq!(world.get("cgi.test", "/a.cgi").expect(200).text(), "carol");
    }
    drop(mount);
    drop(waiting);
}

fn a_link_to_one_that_hangs_stops_only_what_is_behind_it(world: &World) {
    let files: &[(&str, &[u8])] = &[("kept.txt", b"kept"), ("large.bin", &LARGE)];
    let mount = HangingMount::of(&world.home("alice").join("far"), files, world.uid("alice"));
    symlink("../far", world.home("alice").join("www/far")).expect("our own directory");
    for _ in 0..3 {
        assert_eq!(world.get("home.test", "/far/kept.txt").expect(200).text(), "kept");
    }
    assert!(world.get("home.test", "/far/large.bin").expect(200).body == LARGE);
    mount.hang();
    let waiting: Vec<_> = ["/far/kept.txt", "/far/large.bin", "/far/missing", "/far"]
        .iter()
        .cycle()
        .take(40)
        .map(|target| {
            let mut connection = Connection::open(world.http());
            connection.send(format!("GET {target} HTTP/1.1\r\nHost: home.test\r\n\r\n"));
            connection
        })
        .collect();
    wait::until("the node waits for the file system", || mount.unanswered() > 0);
    for n in 0..30 {
        assert_eq!(world.get("local.test", "/a.txt").expect(200).text(), "bob");
        assert_eq!(world.get("local.test", &format!("/{n}.txt")).expect(200).text(), n.to_string());
        assert_eq!(world.get("home.test", "/a.txt").expect(200).text(), "alice");
        assert_eq!(world.get("cgi.test", "/a.cgi").expect(200).text(), "carol");
    }
    drop(mount);
    drop(waiting);
}

/// Whether its tenant has touched `tmp/restart.txt` is looked at once a second, for all that run.
fn an_application_on_it_keeps_no_other_from_a_new_start(world: &World) {
    let program = programs::ONE_ANSWER_PER_CONNECTION;
    let mount = HangingMount::new(&world.home("dave").join("remote"), &[("app.pl", program.as_bytes())]);
    world.write_program("erin", "app/app.pl", program);
    for (tenant, directory) in [("dave", "remote"), ("erin", "app")] {
        let backend = json!({ "kind": "app", "directory": directory, "command": ["/usr/bin/perl", "app.pl"],
            "start_seconds": 20, "idle": { "frozen": "never" } });
        world.import(&[
            json!({ "name": tenant, "tenant": tenant, "hosts": [format!("{tenant}.test")], "backend": backend }),
        ]);
        world.get(&format!("{tenant}.test"), "/").expect(200);
    }
    mount.hang();
    wait::until("the node waits for the file system", || mount.unanswered() > 0);
    world.write("erin", "app/tmp/restart.txt", "");
    wait::until("the other one is started anew", || {
        world.log().lines().any(|line| line.contains("restart.txt was touched") && line.contains("erin"))
    });
    world.get("erin.test", "/").expect(200);
    drop(mount);
}
