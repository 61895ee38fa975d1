//! A release that is switched under the server: a link that leads elsewhere, or a directory in the place of another.
//!
//! Connections of all edge threads ask. Once one of them has seen the new release, no other shows the one before.
//! Not here: when the kernel tells of it (`keeper/root_watch`), images of applications (`fresh`).

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use nagaya_tests::client::Connection;
use nagaya_tests::suite::{Suite, Tests, skip};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "releases",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            a_switched_link_is_seen_by_all_at_once,
            php_serves_the_release_that_files_are_of,
            a_directory_put_in_anothers_place_is_seen_by_all_at_once,
            tenants_with_changing_names_hide_no_release_of_others,
            an_application_is_started_anew_in_its_new_release,
        ],
    ),
};

/// Connections at once: more than threads, so that each thread has some.
const CONNECTIONS: usize = 16;

/// Age of scripts, counted from 1970.
const AN_AGE: Duration = Duration::from_secs(1_000_000_000);

/// So often a release is switched.
const SWITCHES: usize = 8;

fn world() -> World {
    let world = World::builder()
        .set("edge", "threads = 2")
        .set("tenants", "php_workers = 2")
        .site_of("alice", "web", json!({ "kind": "static", "root": "web/current/public" }))
        .site_of("bob", "php", json!({ "kind": "php", "root": "php/current/public" }))
        .site_of("carol", "moved", json!({ "kind": "static", "root": "moved/site" }))
        .site_of("erin", "calm", json!({ "kind": "static", "root": "calm/current/public" }))
        .site_of("dave", "busy", json!({ "kind": "static", "root": "site" }))
        .start();
    for (tenant, of) in [("alice", "web"), ("bob", "php"), ("erin", "calm")] {
        for release in 0..SWITCHES {
            let at = format!("{of}/releases/{release}/public");
            world.write(tenant, &format!("{at}/page.txt"), release.to_string());
            world.write(
                tenant,
                &format!("{at}/page.php"),
                format!("<?php include 'part.php'; echo '{release}';"),
            );
            world.write(tenant, &format!("{at}/part.php"), format!("<?php echo '{release} ';"));
            for script in ["page.php", "part.php"] {
                // PHP's opcache keeps no file of the last two seconds.
                let file = File::options().write(true).open(world.home(tenant).join(&at).join(script));
                file.and_then(|file| file.set_modified(SystemTime::UNIX_EPOCH + AN_AGE)).expect("our file");
            }
        }
        symlink("releases/0", world.home(tenant).join(of).join("current")).expect("a link");
        world.give(tenant);
    }
    world.write("carol", "moved/site/page.txt", "0");
    world.write("dave", "site/page.txt", "here");
    for release in 0..SWITCHES {
        world.write("dave", &format!("next-{release}/page.txt"), format!("release {release}"));
    }
    world
}

/// As a deployment does it: the name always leads somewhere.
fn switch(directory: &Path, release: usize) {
    // Absolute, as some tools make it; the first one is relative.
    symlink(directory.join(format!("releases/{release}")), directory.join("next")).expect("a link");
    fs::rename(directory.join("next"), directory.join("current")).expect("it is switched");
}

fn connections(world: &World) -> Vec<Connection> {
    (0..CONNECTIONS).map(|_| Connection::open(world.http())).collect()
}

fn ask(connection: &mut Connection, host: &str, target: &str) -> String {
    connection.send(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    connection.response().expect(200).text()
}

/// Asks over the first until it shows this, and then all others once.
#[track_caller]
fn all_show(connections: &mut [Connection], host: &str, target: &str, text: &str) {
    let (first, others) = connections.split_first_mut().expect("there are some");
    wait::until("the new release is shown", || ask(first, host, target) == text);
    for (n, other) in others.iter_mut().enumerate() {
        assert_eq!(ask(other, host, target), text, "connection {n}");
    }
}

fn a_switched_link_is_seen_by_all_at_once(world: &World) {
    let mut connections = connections(world);
    for release in (0..SWITCHES).chain([0]) {
        switch(&world.home("alice").join("web"), release);
        all_show(&mut connections, "web.test", "/page.txt", &release.to_string());
    }
}

fn php_serves_the_release_that_files_are_of(world: &World) {
    let mut connections = connections(world);
    for release in (0..SWITCHES).chain([0]) {
        switch(&world.home("bob").join("php"), release);
        all_show(&mut connections, "php.test", "/page.txt", &release.to_string());
        for connection in &mut connections {
            assert_eq!(ask(connection, "php.test", "/page.php"), format!("{release} {release}"));
        }
    }
}

fn a_directory_put_in_anothers_place_is_seen_by_all_at_once(world: &World) {
    let mut connections = connections(world);
    let at = |name: &str| world.home("carol").join("moved").join(name);
    assert_eq!(ask(&mut connections[0], "moved.test", "/page.txt"), "0");
    for release in 1..SWITCHES {
        world.write("carol", "moved/next/page.txt", release.to_string());
        fs::rename(at("site"), at(&format!("before-{release}"))).expect("it is moved away");
        fs::rename(at("next"), at("site")).expect("it is put in its place");
        all_show(&mut connections, "moved.test", "/page.txt", &release.to_string());
    }
}

fn tenants_with_changing_names_hide_no_release_of_others(world: &World) {
    let is_over = AtomicBool::new(false);
    let busy = world.home("dave");
    let mut connections = connections(world);
    assert_eq!(ask(&mut connections[0], "busy.test", "/page.txt"), "here");
    thread::scope(|scope| {
        // Also when this test fails.
        let _end = EndOfWork(&is_over);
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                fs::write(busy.join("name"), "").expect("it is made");
                fs::remove_file(busy.join("name")).expect("it is removed");
            }
        });
        for release in (0..SWITCHES).rev() {
            switch(&world.home("erin").join("calm"), release);
            all_show(&mut connections, "calm.test", "/page.txt", &release.to_string());
            // His own release is seen as well.
            fs::rename(busy.join("site"), busy.join(format!("before-{release}"))).expect("it is moved away");
            fs::rename(busy.join(format!("next-{release}")), busy.join("site"))
                .expect("it is put in its place");
            let shows = format!("release {release}");
            wait::until("his release is shown", || {
                let answer = world.get("busy.test", "/page.txt");
                answer.status == 200 && answer.text() == shows
            });
        }
    });
}

struct EndOfWork<'a>(&'a AtomicBool);

impl Drop for EndOfWork<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

const SERVER_JS: &str = "const text = require('fs').readFileSync('text', 'utf8');\n\
    require('http').createServer((asked, answer) => answer.end(text)).listen(process.env.NAGAYA_SOCKET);\n";

fn an_application_is_started_anew_in_its_new_release(world: &World) {
    if !Path::new("/usr/bin/node").exists() {
        skip("node is not installed here");
    }
    for release in 0..2 {
        let at = format!("app/releases/{release}");
        world.write("alice", &format!("{at}/server.js"), SERVER_JS);
        world.write("alice", &format!("{at}/text"), release.to_string());
    }
    let app = world.home("alice").join("app");
    symlink("releases/0", app.join("current")).expect("a link");
    world.give("alice");
    world.import(&[json!({ "name": "js", "tenant": "alice", "hosts": ["js.test"], "backend": {
        "kind": "app", "directory": "app/current", "command": ["/usr/bin/node", "server.js"], "start_seconds": 60 } })]);
    for release in ["0", "1", "0"] {
        switch(&app, release.parse().expect("a number"));
        wait::until("the new release is shown", || world.get("js.test", "/").expect(200).text() == release);
    }
}
