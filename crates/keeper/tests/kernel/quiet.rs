//! Quiet instances on a processor that others want, too: what each of them gets of it.
//!
//! Compared are amounts of CPU time, over a fixed one of somebody who is never quiet; so it does not matter what else the
//! machine does. Not here: threads of one instance (`rest`), shares as such (`limits`).

use std::fs;

use nagaya_keeper_api::client::KeeperClient;
use nagaya_records::cell::Confinement;
use nagaya_records::instance::{InstanceCommand, Tier};
use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::json;

use crate::groups::FAIR_AFTER_IDLE;
use crate::php::Php;
use crate::rest::{SERVER, app, get, pids, show, until_idle};
use crate::world::{ALICE, World, site_name, until_so};
use crate::{CellFact, groups};

pub const CELLS: &[CellFact] = &[
    (
        &["cpu", FAIR_AFTER_IDLE],
        "a quiet instance gets next to nothing of a processor that another tenant wants",
        gives_way,
    ),
    (
        &["cpu", FAIR_AFTER_IDLE],
        "an instance that was quiet has its tenant's shares when it is needed",
        has_shares_again,
    ),
    (
        &["cpu", FAIR_AFTER_IDLE],
        "what else a tenant runs has its share while an instance of it is quiet",
        others_keep_theirs,
    ),
    (
        &["cpu", FAIR_AFTER_IDLE],
        "each request to a PHP worker has its share beside a quiet instance",
        php_keeps_its,
    ),
    (
        &["cpu", FAIR_AFTER_IDLE],
        "a quiet instance is frozen, and ends, while others want its processor",
        stops_all_the_same,
    ),
];

/// So much of somebody who always wants it, microseconds: many turns on the processor.
const WORK_US: u64 = 300_000;

/// Sites that compute without a pause: `app` and `other` of alice's, and `victim` of bob's.
fn world() -> World {
    let mut world = World::new().with(|options| options.instances.image_bytes_max = 0);
    world.script("server.py", SERVER);
    world.script_of("bob", "server.py", SERVER);
    world.site("app", "alice", app("busy", json!({})));
    world.site("other", "alice", app("busy", json!({})));
    world.site("victim", "bob", app("busy", json!({})));
    world
}

/// It has answered, and goes first no more.
async fn wake(world: &World, keeper: &KeeperClient, site: &str) -> String {
    let used = keeper.use_instance(&site_name(site), None).await.unwrap();
    let run = get(&used, "/").await.split(' ').next().unwrap().to_owned();
    keeper.answered(used.guard.id());
    let cell = format!("{}/{site}", if site == "victim" { "bob" } else { "alice" });
    until_so(|| world.cell(&cell).unwrap()["limits"]["cpu_shares"].is_null()).await;
    run
}

/// The same, and all its threads run on one processor from now on, the same for all sites.
async fn start(world: &World, keeper: &KeeperClient, site: &str) -> String {
    let run = wake(world, keeper, site).await;
    let mine = sched_getaffinity(None).unwrap();
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|cpu| mine.is_set(*cpu)).unwrap());
    for pid in pids(world, site) {
        for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
            let tid = task.unwrap().file_name().to_str().unwrap().parse().unwrap();
            match sched_setaffinity(Pid::from_raw(tid), &one) {
                // It has answered, and is no more.
                Ok(()) | Err(Errno::SRCH) => {}
                Err(error) => panic!("thread {tid} of {site}: {error}"),
            }
        }
    }
    run
}

fn cpu_us(world: &World, site: &str) -> u64 {
    show(world, site)["cpu_us"].as_u64().unwrap()
}

/// What each of these gets while the victim gets `WORK_US`.
async fn received<const N: usize>(world: &World, sites: [&str; N]) -> [u64; N] {
    let (until, before) = (cpu_us(world, "victim") + WORK_US, sites.map(|site| cpu_us(world, site)));
    until_so(|| cpu_us(world, "victim") >= until).await;
    let after = sites.map(|site| cpu_us(world, site));
    std::array::from_fn(|at| after[at] - before[at])
}

async fn rest(world: &World, site: &str, to: Tier) {
    until_idle(world, site).await;
    let row = world.act(site, InstanceCommand::Rest { to: Some(to) });
    assert_eq!(row["tier"], to.as_str(), "{row}");
}

fn gives_way() {
    let world = world().start();
    world.run(async |keeper| {
        start(&world, &keeper, "app").await;
        start(&world, &keeper, "victim").await;
        let [running] = received(&world, ["app"]).await;
        assert!(running > WORK_US / 3, "{running} us beside an equal one");
        rest(&world, "app", Tier::Quiet).await;
        let [got] = received(&world, ["app"]).await;
        assert!(got < WORK_US / 10, "{got} us");
        // Nobody else wants it.
        world.act("victim", InstanceCommand::Stop);
        let before = cpu_us(&world, "app");
        until_so(|| cpu_us(&world, "app") > before + WORK_US / 3).await;
        assert_eq!(show(&world, "app")["tier"], "quiet");
    });
}

fn has_shares_again() {
    let world = world().start();
    world.run(async |keeper| {
        let first = start(&world, &keeper, "app").await;
        start(&world, &keeper, "victim").await;
        for (tiers, shares) in [(&[Tier::Quiet][..], 4096), (&[Tier::Quiet, Tier::Frozen], 8192)] {
            for tier in tiers {
                rest(&world, "app", *tier).await;
            }
            // What is said meanwhile holds afterwards.
            world.apply(vec![world.tenant_with("alice", json!({"limits": {"cpu_shares": shares}}))]);
            assert_eq!(wake(&world, &keeper, "app").await, first);
            let pid = pids(&world, "app")[0];
            let of = |name| groups::cpu_shares(&groups::above(pid, "cpu", name).unwrap());
            assert_eq!((of("tenant-alice"), of("site-app")), (shares, 1024));
            let [got] = received(&world, ["app"]).await;
            assert!(got > WORK_US * 2, "{got} us beside one with a quarter of its shares");
        }
    });
}

fn others_keep_theirs() {
    let world = world().start();
    world.run(async |keeper| {
        start(&world, &keeper, "app").await;
        start(&world, &keeper, "victim").await;
        rest(&world, "app", Tier::Quiet).await;
        for _ in 0..2 {
            start(&world, &keeper, "other").await;
            let [app, other] = received(&world, ["app", "other"]).await;
            assert!(app < WORK_US / 10 && other > WORK_US / 3, "{app} us beside {other} us");
            rest(&world, "other", Tier::Quiet).await;
            let [app, other] = received(&world, ["app", "other"]).await;
            assert!(app + other < WORK_US / 10, "{app} us beside {other} us");
            world.act("other", InstanceCommand::Stop);
            let [app] = received(&world, ["app"]).await;
            assert!(app < WORK_US / 10, "{app} us");
        }
    });
}

/// Waits for a file, and leaves a program behind.
const WAITING: &str = "<?php touch(__DIR__ . '/begun'); while (!file_exists(__DIR__ . '/go')) { usleep(1000); clearstatcache(); } \
                       unlink(__DIR__ . '/begun'); unlink(__DIR__ . '/go'); exec($_GET['q'] . ' > /dev/null 2>&1 &');";

fn php_keeps_its() {
    let mut world = world();
    let script = world.script("waiting.php", WAITING);
    let www = script.parent().unwrap().to_owned();
    world.own(&www, ALICE);
    world.site("php", "alice", json!({"kind": "php", "root": "www"}));
    let world = world.start();
    world.run(async |keeper| {
        wake(&world, &keeper, "app").await;
        rest(&world, "app", Tier::Quiet).await;
        let pid = pids(&world, "app")[0];
        let tenant = groups::above(pid, "cpu", "tenant-alice").unwrap();
        let is_idle = || groups::read(&tenant, "cpu", "cpu.idle", "cpu.idle") == "1";
        let mut php = Php::start_for(&keeper, "php").await;
        let id = php.guard.id();
        keeper.enter(id, &site_name("php"), &Confinement::default()).await.unwrap();
        for left_behind in ["true", "true", "sleep 600"] {
            let serving = async {
                until_so(|| www.join("begun").exists()).await;
                assert!(!is_idle(), "while the worker serves");
                // At once as a whole: the program removes it when it sees it.
                fs::write(www.join("go"), "").unwrap();
            };
            let query = format!("q={}", left_behind.replace(' ', "%20"));
            tokio::join!(php.ask(&script, &query), serving);
            // Before the end of the request is known, and in the cell that it moves to then.
            until_so(&is_idle).await;
            keeper.leave(id).await.unwrap();
            until_so(&is_idle).await;
        }
    });
}

fn stops_all_the_same() {
    let world = world().start();
    world.run(async |keeper| {
        start(&world, &keeper, "app").await;
        start(&world, &keeper, "victim").await;
        rest(&world, "app", Tier::Quiet).await;
        rest(&world, "app", Tier::Frozen).await;
        assert_eq!(received(&world, ["app"]).await, [0]);
        wake(&world, &keeper, "app").await;
        rest(&world, "app", Tier::Quiet).await;
        assert_eq!(world.act("app", InstanceCommand::Stop)["tier"], "cold");
        // The next one in its cell is not quiet.
        start(&world, &keeper, "app").await;
        let [got] = received(&world, ["app"]).await;
        assert!(got > WORK_US / 3, "{got} us beside an equal one");
    });
}
