//! The parent of a tenant's PHP workers: what they share, where they run, and a parent that deceives.
//!
//! Not here: requests to workers (`php`), the pools of the edge (`edge`).

use std::fs;
use std::path::{Path, PathBuf};

use nagaya_keeper_api::client::KeeperClient;
use rustix::process::{Pid, test_kill_process};
use serde_json::{Value, json};

use crate::Fact;
use crate::php::{Php, with_sites};
use crate::scene::TIMEOUT;
use crate::world::{ALICE, BOB, World};

pub const ROOT: &[Fact] = &[
    ("PHP workers of a tenant share one opcache, and nobody else's", workers_share),
    ("a PHP worker has a cell of its own, and its parent ends after it", parent_ends),
    ("a crash of a PHP worker gives later ones another parent", crash_replaces),
    ("a parent of PHP workers passes off no other process as one", deceivers_get_nothing),
    ("PHP workers start without a parent if it cannot be started", starts_alone),
];

/// Says how often scripts were found in the opcache, and which process it is.
const SHARED: &str = "<?php $s = opcache_get_status(false)['opcache_statistics'];
echo json_encode([getmypid(), posix_getppid(), $s['num_cached_scripts'], $s['hits'], getenv('LD_PRELOAD')]);";

/// A script that opcache keeps at once: it leaves out files of the last two seconds.
fn kept_script(world: &World, home: &str, code: &str) -> PathBuf {
    let script = world.home(home).join("www/shared.php");
    fs::create_dir_all(script.parent().unwrap()).unwrap();
    fs::write(&script, code).unwrap();
    let file = fs::File::options().write(true).open(&script).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000))
        .unwrap();
    world.own(&script, if home == "alice" { ALICE } else { BOB });
    script
}

async fn ask(php: &mut Php, script: &Path) -> Vec<Value> {
    serde_json::from_str(&php.ask(script, "").await).unwrap()
}

fn workers_share() {
    let world = World::new();
    let script = kept_script(&world, "alice", SHARED);
    let bobs = kept_script(&world, "bob", SHARED);
    let world = with_sites(world).start();
    world.run(async |keeper| {
        let mut first = Php::start_for(&keeper, "php").await;
        let one = ask(&mut first, &script).await;
        let mut second = Php::start_for(&keeper, "php").await;
        let two = ask(&mut second, &script).await;
        assert_eq!((one[2].as_u64(), one[3].as_u64()), (Some(1), Some(0)), "{one:?}");
        assert_eq!(two[2..], [json!(1), json!(1), json!(false)], "the other worker has compiled it: {two:?}");
        assert!(one[0] != two[0] && one[1] == two[1], "two children of the keeper's: {one:?} {two:?}");
        let mut other = Php::start_for(&keeper, "bobs").await;
        let bobs = ask(&mut other, &bobs).await;
        assert_eq!(bobs[3].as_u64(), Some(0), "{bobs:?}");
        // The edge gives another number when paths lead elsewhere.
        second.guard.end().await.unwrap();
        let mut third = Php::start_with(&keeper, "php", 1).await;
        let three = ask(&mut third, &script).await;
        assert_eq!(three[3].as_u64(), Some(0), "{three:?}");
    });
}

/// The cgroups of a process, in all hierarchies.
fn cells(pid: u64) -> String {
    fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap()
}

async fn running(keeper: &KeeperClient, kind: &str) -> u64 {
    let status: Value = serde_json::from_str(&keeper.status().await.unwrap()).unwrap();
    status["processes"][kind]["running"].as_u64().unwrap()
}

async fn wait_for_parents(keeper: &KeeperClient, count: u64) {
    let reached = async {
        while running(keeper, "php_parent").await != count {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, reached).await.expect("the number of parents is reached");
}

fn parent_ends() {
    let world = World::new();
    let script = kept_script(&world, "alice", SHARED);
    let world = with_sites(world).start();
    world.run(async |keeper| {
        let mut first = Php::start_for(&keeper, "php").await;
        let mut second = Php::start_for(&keeper, "php").await;
        let [one, two] = [ask(&mut first, &script).await, ask(&mut second, &script).await]
            .map(|said| cells(said[0].as_u64().unwrap()));
        assert_ne!(one, two, "each in its own");
        wait_for_parents(&keeper, 1).await;
        first.guard.end().await.unwrap();
        assert_eq!(running(&keeper, "php_parent").await, 1, "the other worker still has it");
        second.guard.end().await.unwrap();
        wait_for_parents(&keeper, 0).await;
    });
}

fn crash_replaces() {
    let world = World::new();
    let script = kept_script(&world, "alice", SHARED);
    let crash = world.script("crash.php", "<?php posix_kill(getmypid(), 11);");
    let end = world.script("end.php", "<?php posix_kill(getmypid(), 9);");
    let world = with_sites(world).start();
    world.run(async |keeper| {
        let mut stays = Php::start_for(&keeper, "php").await;
        ask(&mut stays, &script).await;
        for (last, is_replaced) in [(&end, false), (&crash, true)] {
            let mut php = Php::start_for(&keeper, "php").await;
            assert_eq!(ask(&mut php, &script).await[2].as_u64(), Some(1), "it shares the opcache");
            let params = [("SCRIPT_FILENAME", last.to_str().unwrap().to_owned())];
            assert_eq!(php.say(&params).await, None);
            php.guard.end().await.unwrap();
            let mut next = Php::start_for(&keeper, "php").await;
            let hits = ask(&mut next, &script).await[3].as_u64().unwrap();
            assert_eq!(hits == 0, is_replaced, "{}: {hits}", last.display());
            next.guard.end().await.unwrap();
        }
    });
}

/// A `php-cgi` whose parent deceives in this way, and that is PHP when started by itself.
fn deceiver(way: &str) -> World {
    let world = World::new();
    let program = world.home("alice").join(format!("php-{way}"));
    fs::write(&program, include_str!("../../fixtures/hostile_parent.py")).unwrap();
    fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    world.own(&program, ALICE);
    world.with(move |options| options.php_cgi = program)
}

fn deceivers_get_nothing() {
    for way in ["child", "itself", "two", "none"] {
        let world = deceiver(way);
        let script = kept_script(&world, "alice", SHARED);
        let [number, taken] = ["parent", "taken"].map(|name| world.home("alice").join(name));
        let world = with_sites(world).start();
        world.run(async |keeper| {
            let mut php = Php::start_for(&keeper, "php").await;
            let said = ask(&mut php, &script).await;
            assert_eq!(said[4], false, "{way}: it is PHP, started by itself: {said:?}");
            let parent: i32 = fs::read_to_string(&number).unwrap().parse().unwrap();
            let gone = async {
                while test_kill_process(Pid::from_raw(parent).unwrap()).is_ok() {
                    tokio::task::yield_now().await;
                }
            };
            tokio::time::timeout(TIMEOUT, gone).await.unwrap_or_else(|_| panic!("{way}: it is ended"));
        });
        assert!(!taken.exists(), "{way}: a false worker was let go");
    }
}

fn starts_alone() {
    let world = deceiver("gone");
    let script = kept_script(&world, "alice", SHARED);
    let world = with_sites(world).start();
    world.run(async |keeper| {
        let mut first = Php::start_for(&keeper, "php").await;
        ask(&mut first, &script).await;
        let mut second = Php::start_for(&keeper, "php").await;
        assert_eq!(ask(&mut second, &script).await[3].as_u64(), Some(0), "each has its own opcache");
        assert_eq!(running(&keeper, "php_parent").await, 0);
    });
    assert!(world.home("alice").join("parent").exists(), "it was tried");
}
