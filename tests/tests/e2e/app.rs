//! Applications that nagaya starts and keeps: on demand, anew when they end, under their tenant's uid.
//!
//! Not here: what is proxied to them (`proxy`), ambiguous requests (`smuggling`).

use std::sync::mpsc;

use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::json;

use crate::programs;

pub const SUITE: Suite = Suite {
    name: "app",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            an_application_is_started_by_its_first_request,
            many_first_requests_start_one_application,
            an_application_that_ended_is_started_anew,
            an_application_that_never_listens_is_refused_in_time,
            an_application_that_ends_at_once_is_refused,
            an_application_may_listen_on_a_port,
            an_application_ends_with_its_site,
            what_an_application_writes_is_logged,
        ],
    ),
};

fn world() -> World {
    let world = World::builder().tenant("alice").start();
    world.write_program("alice", "app/app.pl", programs::ONE_ANSWER_PER_CONNECTION);
    world
}

/// A site whose application has its name on its command line, so that its processes can be told from others.
fn add(world: &World, name: &str, command: &[&str], more: serde_json::Value) {
    let mut command: Vec<_> = command.iter().map(|word| (*word).to_owned()).collect();
    command.push(machine::mark("app", name));
    let mut backend = json!({ "kind": "app", "directory": "app", "command": command, "start_seconds": 10 });
    for (key, value) in more.as_object().expect("an object") {
        backend[key] = value.clone();
    }
    world.import(&[
        json!({ "name": name, "tenant": "alice", "hosts": [format!("{name}.test")], "backend": backend }),
    ]);
}

fn running(name: &str) -> Vec<i32> {
    machine::processes_with(&machine::mark("app", name))
}

fn an_application_is_started_by_its_first_request(world: &World) {
    add(world, "demand", &["./app.pl"], json!({}));
    assert!(running("demand").is_empty());
    let text = world.get("demand.test", "/").expect(200).text();
    assert!(text.ends_with(&format!("uid {}", world.uid("alice"))), "{text}");
    assert_eq!(running("demand").len(), 1);
    assert_eq!(world.get("demand.test", "/").expect(200).text(), text, "the same one answers again");
}

fn many_first_requests_start_one_application(world: &World) {
    add(world, "many", &["./app.pl"], json!({}));
    let address = world.http();
    let (tell, told) = mpsc::channel();
    for _ in 0..16 {
        let tell = tell.clone();
        std::thread::spawn(move || {
            tell.send(nagaya_tests::client::get(address, "many.test", "/").expect(200).text())
        });
    }
    drop(tell);
    let mut answers: Vec<_> = told.iter().collect();
    assert_eq!(answers.len(), 16);
    answers.dedup();
    assert_eq!(answers.len(), 1, "{answers:?}");
}

fn an_application_that_ended_is_started_anew(world: &World) {
    add(world, "crash", &["./app.pl"], json!({}));
    for way in ["/crash", "/exit"] {
        world.get("crash.test", "/").expect(200);
        let before = running("crash");
        world.get("crash.test", way).expect(502);
        // Its number may soon be another process'.
        wait::until("the old one is gone", || running("crash").iter().all(|id| !before.contains(id)));
        // Between two starts there may be a pause, in which it says when to come back.
        wait::until("it answers again", || {
            let answer = world.get("crash.test", "/");
            assert!(matches!(answer.status, 200 | 502 | 503), "{answer:?}");
            answer.status == 200
        });
        let after = running("crash");
        assert!(!after.is_empty() && after.iter().all(|id| !before.contains(id)), "{before:?} {after:?}");
    }
}

fn an_application_that_never_listens_is_refused_in_time(world: &World) {
    add(world, "deaf", &["/bin/sh", "-c", "while :; do sleep 1; done"], json!({ "start_seconds": 1 }));
    let answer = world.get("deaf.test", "/");
    assert!(matches!(answer.status, 502 | 504), "{answer:?}");
    machine::wait_until_gone(&machine::mark("app", "deaf"));
}

fn an_application_that_ends_at_once_is_refused(world: &World) {
    add(world, "brief", &["/bin/false"], json!({}));
    for _ in 0..3 {
        let answer = world.get("brief.test", "/");
        assert!(matches!(answer.status, 502 | 503), "{answer:?}");
    }
}

fn an_application_may_listen_on_a_port(world: &World) {
    add(world, "port", &["./app.pl"], json!({ "listen": "port" }));
    world.get("port.test", "/").expect(200);
}

fn an_application_ends_with_its_site(world: &World) {
    add(world, "removed", &["./app.pl"], json!({}));
    world.get("removed.test", "/").expect(200);
    assert_eq!(running("removed").len(), 1);
    world.cli(&["site", "remove", "removed"]);
    machine::wait_until_gone(&machine::mark("app", "removed"));
}

fn what_an_application_writes_is_logged(world: &World) {
    add(world, "chatty", &["./app.pl"], json!({}));
    world.get("chatty.test", "/").expect(200);
    wait::until("its words are logged", || {
        world.log().lines().any(|line| line.contains("the application listens") && line.contains("chatty"))
    });
}
