//! A keeper that is killed (`kill -9`) in the middle of something: nothing of what it had under way is left, and the next one
//! serves.
//!
//! Not here: one that is killed while nothing happens (`rest`, `life`, `wake`).

use std::fs;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nagaya_keeper_api::client::{InstanceUse, KeeperCallError, KeeperClient};
use nagaya_records::instance::{InstanceCommand, Tier};
use serde_json::json;
use tokio::task::{JoinHandle, spawn_local, yield_now};

use crate::rest::{SERVER, app, pids, run_of, show, until_at, until_idle};
use crate::wake::until_images;
use crate::world::{World, keepers_processes, site_change, site_name, until_so, wait_dead};
use crate::{Fact, groups};

pub const ROOT: &[Fact] = &[
    ("a keeper may be killed while instances start and wait for their turn", starting),
    ("a keeper may be killed while an instance is let go on", rousing),
];

pub const CRIU: &[Fact] = &[
    ("a keeper may be killed while an image is taken", imaging),
    ("a keeper may be killed while an instance comes back from its image", restoring),
];

/// It does not listen before it may.
const HELD: &str = "import os, sys, time\n\
    if sys.argv[1:] == ['held']:\n\
    \x20   open('begun', 'w').close()\n\
    \x20   while not os.path.exists('go'): pass\n";

/// Times the keeper is killed, each a little later after a request for what is frozen.
const ROUNDS: u32 = 6;

fn ask(keeper: &Rc<KeeperClient>, site: &'static str) -> JoinHandle<Result<InstanceUse, KeeperCallError>> {
    let keeper = Rc::clone(keeper);
    spawn_local(async move { keeper.use_instance(&site_name(site), None).await })
}

/// Returns when there is another keeper, and nothing of the old one: no process, no cell, no mount.
async fn kill(world: &World) {
    let mark = world.mark();
    assert!(!keepers_processes(&mark).is_empty() && !groups::of_keeper(world.keeper_pid()).is_empty());
    let killed = world.kill();
    world.restart();
    until_so(|| keepers_processes(&mark).is_empty() && groups::of_keeper(killed).is_empty()).await;
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let dir = world.dir.path().to_str().unwrap();
    assert!(!mounts.contains(dir), "{mounts}");
}

/// Sockets of instances that are not there any more.
fn nothing_left(world: &World) {
    assert!(world.drain(), "{}", world.log());
    assert_eq!(fs::read_dir(world.dir.path().join("run/apps")).unwrap().count(), 0);
}

fn starting() {
    let mut world = World::new().with(|options| {
        options.instances.image_bytes_max = 0;
        options.instances.wakes_at_once = 1;
    });
    world.script("server.py", &format!("{HELD}{SERVER}"));
    world.site("app", "alice", app("held", json!({})));
    world.site("next", "alice", app("", json!({})));
    let world = world.start();
    let www = world.home("alice").join("www");
    world.run(async |keeper| {
        let first = ask(&keeper, "app");
        until_so(|| www.join("begun").exists()).await;
        let second = ask(&keeper, "next");
        until_so(|| show(&world, "next")["state"] == "queued").await;
        assert_eq!(show(&world, "app")["state"], "starting");
        kill(&world).await;
        world.script("go", "");
        // Who waited is told, or waits for the next keeper.
        for asked in [first, second] {
            drop(asked.await.unwrap());
        }
        let mut runs = Vec::new();
        for site in ["app", "next"] {
            runs.push(run_of(&keeper, site).await);
            assert!(runs.last() == Some(&run_of(&keeper, site).await), "there is one of it");
        }
        assert_ne!(runs[0], runs[1]);
    });
    nothing_left(&world);
}

fn rousing() {
    let mut world = World::new().with(|options| options.instances.image_bytes_max = 0);
    world.script("server.py", SERVER);
    world.site("app", "alice", app("", json!({})));
    let world = world.start();
    world.run(async |keeper| {
        for round in 0..ROUNDS {
            let first = run_of(&keeper, "app").await;
            until_idle(&world, "app").await;
            let all = pids(&world, "app");
            assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Frozen) })["tier"], "frozen");
            let asked = ask(&keeper, "app");
            let later = Instant::now() + Duration::from_micros(100) * round;
            yield_now().await;
            while Instant::now() < later {
                yield_now().await;
            }
            kill(&world).await;
            all.into_iter().for_each(wait_dead);
            drop(asked.await.unwrap());
            assert_ne!(run_of(&keeper, "app").await, first);
        }
    });
    nothing_left(&world);
}

/// CRIU at work for this keeper.
fn criu_runs(world: &World, verb: &str) -> bool {
    let cell = format!("/k{}-", world.keeper_pid());
    let read = |pid: i32, name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let is_one = |pid: i32| {
        let command = read(pid, "cmdline");
        command.split(|byte| *byte == 0).any(|word| word == verb.as_bytes())
            && String::from_utf8_lossy(&read(pid, "cgroup")).contains(&cell)
    };
    let pids = fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).any(is_one)
}

/// Kills the keeper while CRIU does this for a start that each `begin` brings about. It may be over before it is seen.
async fn kill_while(world: &World, verb: &str, keeper: &Rc<KeeperClient>, begin: impl AsyncFn(u32)) {
    for round in 0.. {
        begin(round).await;
        let asked = ask(keeper, "app");
        let mut is_seen = false;
        until_so(|| {
            is_seen = criu_runs(world, verb);
            is_seen || asked.is_finished()
        })
        .await;
        if is_seen {
            kill(world).await;
        }
        drop(asked.await.unwrap());
        if is_seen {
            return;
        }
    }
}

fn with_images() -> World {
    let mut world = World::new();
    world.script("server.py", SERVER);
    world.site("app", "alice", app("", json!({})));
    world.start()
}

fn imaging() {
    let world = with_images();
    world.run(async |keeper| {
        until_images(&world).await;
        kill_while(&world, "dump", &keeper, async |round| {
            world.apply(vec![site_change(
                "app",
                "alice",
                app("", json!({"release": format!("r{round}")})),
                json!({}),
            )]);
        })
        .await;
        until_images(&world).await;
        let work = world.dir.path().join("state/images/work");
        assert_eq!(fs::read_dir(work).unwrap().count(), 0, "what was under way is gone");
        let run = run_of(&keeper, "app").await;
        until_so(|| show(&world, "app")["image"].is_object()).await;
        until_idle(&world, "app").await;
        world.act("app", InstanceCommand::Rest { to: Some(Tier::Image) });
        until_at(&world, "app", "image").await;
        assert_eq!(run_of(&keeper, "app").await, run, "its image is a good one");
    });
    nothing_left(&world);
}

fn restoring() {
    let world = with_images();
    world.run(async |keeper| {
        until_images(&world).await;
        let run = run_of(&keeper, "app").await;
        kill_while(&world, "restore", &keeper, async |_| {
            until_idle(&world, "app").await;
            assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Image) })["tier"], "image");
        })
        .await;
        until_images(&world).await;
        assert_eq!(run_of(&keeper, "app").await, run, "that it did not come back was not its image's fault");
    });
    nothing_left(&world);
}
