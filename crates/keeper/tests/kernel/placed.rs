//! What a cluster asks of a keeper: nothing runs that is not placed here, nor without authority, however busy or stopped the
//! keeper is.
//!
//! The test is the supervisor: it says where sites are and until when the node may run them. Programs write down the time
//! every millisecond; when they were stopped is the last they wrote. Not here: instances of a node that is alone (`rest`).

use std::fs;
use std::path::PathBuf;
use std::pin::pin;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nagaya_keeper_api::client::{KeeperCallError, KeeperClient};
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::feed::{FeedQuery, FromSupervisor, ToSupervisor};
use nagaya_records::instance::{InstanceCommand, Tier};
use nagaya_records::record::{NodeRecord, Placement, PlacementReason};
use nagaya_records::{NodeName, RecordChange};
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use crate::CellFact;
use crate::rest::{app, pids, run_of, show, until_idle};
use crate::world::{World, is_alive, refusal, site_name, until_so, wait_dead};

pub const CELLS: &[CellFact] = &[
    (&[], "an instance runs only where it is placed, and who asks is told where that is", only_where_placed),
    (&[], "who knows of a later placement than the keeper is waited for, but not for long", later_epoch),
    (&[], "nothing runs before the first authority", nothing_before_authority),
    (&[], "what is placed here stops when authority ends, and goes on when it returns", stops_in_time),
    (&[], "what is placed here stops in time while the keeper itself is stopped", stops_without_the_keeper),
    (&[], "fifty instances stop within a few milliseconds", fifty_stop),
    (&[], "what rests stays at rest when authority returns", rests_stay),
    (&[], "an instance that moves away is killed at once, frozen or fenced or in use", moves_away),
    (
        &[],
        "what has moved away does not go on by an authority that is read after it",
        authority_behind_a_move,
    ),
    (&[], "a start that is fenced is answered, and goes on or is given up", fenced_start),
    (
        &[],
        "an instance beside which another node gets one goes on, and one that is a copy ends as any",
        copies,
    ),
    (&[], "an instance that is given up lets its uses end, and does not run again under its epoch", given_up),
    (&[], "a site that always runs does so only where it is placed", kept_where_placed),
    (
        &[],
        "what a node runs ends when it is removed from its cluster, wherever placements say it is",
        removed_node,
    ),
    (&[], "a warden sleeps while all is stopped, whatever time it is told", warden_sleeps),
    (&[], "a keeper whose warden was killed ends, and all instances with it", killed_warden),
    (&[], "nothing that is fenced outlives a killed keeper", killed_keeper),
];

/// How late a program may be stopped here. Other tests run at the same time on the same processors; what was measured is
/// printed, and stands in docs/instances.md.
const LATE_MAX: Duration = Duration::from_millis(100);

const MS: u64 = 1_000_000;

/// Of an authority that is over soon.
const SHORT_MS: u64 = 3000;

/// More than a test takes.
const LONG_NS: u64 = 3600 * 1000 * MS;

/// Writes the time down every millisecond, and answers every connection.
const CLOCK: &str = r#"
import os, socket, sys, threading, time
name = sys.argv[1]
if os.path.exists(name + '.late'): time.sleep(float(open(name + '.late').read()))
out = os.open(name + '.clock', os.O_RDWR | os.O_CREAT, 0o644)
def tick():
    while True:
        os.pwrite(out, b'%020d' % time.clock_gettime_ns(time.CLOCK_BOOTTIME), 0)
        time.sleep(0.001)
threading.Thread(target=tick, daemon=True).start()
server = socket.socket(socket.AF_UNIX)
server.bind(os.environ['NAGAYA_SOCKET'])
server.listen(64)
run = os.urandom(8).hex().encode()
while True:
    peer = server.accept()[0]
    try:
        peer.recv(4096)
        peer.sendall(b'HTTP/1.0 200 OK\r\n\r\n' + run + b' 1')
    except OSError: pass
    peer.close()
"#;

fn boottime_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    u64::try_from(now.tv_sec).unwrap() * 1000 * MS + u64::try_from(now.tv_nsec).unwrap()
}

/// Node `a` of a cluster, with applications of these names that are placed nowhere. It has no authority.
fn world(sites: &[&str]) -> World {
    let mut world = World::new().with(|options| {
        options.instances.image_bytes_max = 0;
        options.node = Some("a".into());
        options.instances.wakes_at_once = 4;
    });
    world.script("clock.py", CLOCK);
    for site in sites {
        world.site(site, "alice", clock(site, json!({})));
    }
    world.start()
}

fn clock(site: &str, more: Value) -> Value {
    let mut record = app("", json!({"command": ["python3", "-S", "clock.py", site]}));
    record.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    record
}

fn placement(site: &str, node: &str, epoch: u64) -> RecordChange {
    RecordChange::PutPlacement(Placement {
        site: site_name(site),
        node: NodeName::new(node).unwrap(),
        epoch,
        since_ms: 0,
        why: PlacementReason::First,
        wait_ms: 0,
        node_epoch: 0,
        copies: Vec::new(),
    })
}

fn place(world: &World, site: &str, node: &str, epoch: u64) {
    world.apply(vec![placement(site, node, epoch)]);
}

/// For so long from now. Returns until when.
fn authority(world: &World, for_ms: u64) -> u64 {
    let until_ns = boottime_ns() + for_ms * MS;
    world.tell(&FromSupervisor::Authority { until_ns });
    until_ns
}

fn authority_for_long(world: &World) {
    authority_that_holds(world, LONG_NS / MS);
}

/// For so long from when the keeper has it: on a busy machine its warden may be slow to begin, and who asks before that is refused.
fn authority_that_holds(world: &World, for_ms: u64) {
    loop {
        authority(world, for_ms);
        if status(world)["fenced"] == false {
            return;
        }
    }
}

/// Gives authority until this is done, however long that takes: an emulated machine that has other tests to run, too, may need
/// longer for a start than any authority that a test could wait the end of.
async fn renewed<T>(world: &World, start: impl Future<Output = T>) -> T {
    authority_that_holds(world, SHORT_MS);
    renewing(world, SHORT_MS, start).await.0
}

/// Renews the authority until this is done, as a supervisor does. Returns until when the last one is, too.
async fn renewing<T>(world: &World, for_ms: u64, start: impl Future<Output = T>) -> (T, u64) {
    let mut start = pin!(start);
    loop {
        let until_ns = authority(world, for_ms);
        if let Ok(done) = tokio::time::timeout(Duration::from_millis(100), start.as_mut()).await {
            return (done, until_ns);
        }
    }
}

fn status(world: &World) -> Value {
    let status: Value = serde_json::from_str(&world.ask(FeedQuery::Status)).unwrap();
    status["cluster"].clone()
}

async fn until_fenced(world: &World, is_fenced: bool) {
    until_so(|| status(world)["fenced"] == is_fenced).await;
}

fn clock_path(world: &World, site: &str) -> PathBuf {
    world.home("alice").join("www").join(format!("{site}.clock"))
}

/// When it was last written down that it runs; None: it never was.
fn last_tick(world: &World, site: &str) -> Option<u64> {
    fs::read_to_string(clock_path(world, site)).ok()?.trim().parse().ok()
}

/// Waits until it ticks at a time after this one.
async fn until_ticks_after(world: &World, site: &str, then: u64) {
    until_so(|| last_tick(world, site).is_some_and(|tick| tick > then)).await;
}

/// Waits until it is this time.
async fn until_time(then: u64) {
    until_so(|| boottime_ns() >= then).await;
}

async fn use_once(keeper: &KeeperClient, site: &str) -> String {
    run_of(keeper, site).await
}

async fn refused_elsewhere(
    keeper: &KeeperClient,
    site: &str,
    epoch: Option<u64>,
) -> (Option<String>, Option<u64>) {
    match keeper.use_instance(&site_name(site), epoch).await {
        Err(KeeperCallError::Elsewhere { node, epoch, message }) => {
            assert!(message.contains(site), "{message}");
            (node.map(|node| node.to_string()), epoch)
        }
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("it runs here"),
    }
}

fn only_where_placed() {
    let world = world(&["app"]);
    authority_for_long(&world);
    world.run(async |keeper| {
        assert_eq!(refused_elsewhere(&keeper, "app", None).await, (None, None), "it is placed nowhere");
        place(&world, "app", "b", 3);
        assert_eq!(refused_elsewhere(&keeper, "app", Some(3)).await, (Some("b".into()), Some(3)));
        for act in [InstanceCommand::Wake, InstanceCommand::Image] {
            let row = world.act("app", act);
            assert!(row["error"].is_string(), "{row}");
        }
        assert!(last_tick(&world, "app").is_none(), "nothing of it ever ran");
        place(&world, "app", "a", 4);
        use_once(&keeper, "app").await;
        world.apply(vec![RecordChange::DropPlacement(site_name("app"))]);
        assert_eq!(refused_elsewhere(&keeper, "app", None).await, (None, None));
    });
}

fn later_epoch() {
    let world = world(&["app"]);
    authority_for_long(&world);
    place(&world, "app", "b", 1);
    world.run(async |keeper| {
        let asking = Rc::clone(&keeper);
        let asking = tokio::task::spawn_local(async move {
            asking.use_instance(&site_name("app"), Some(2)).await.map(drop)
        });
        tokio::task::yield_now().await;
        place(&world, "app", "a", 2);
        asking.await.unwrap().unwrap();
        let began = Instant::now();
        let known = refused_elsewhere(&keeper, "app", Some(9)).await;
        assert_eq!(known, (Some("a".into()), Some(2)));
        assert!(began.elapsed() >= Duration::from_millis(400), "it was waited for");
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    });
}

fn nothing_before_authority() {
    let mut world = World::new().with(|options| {
        options.instances.image_bytes_max = 0;
        options.node = Some("a".into());
    });
    world.script("clock.py", CLOCK);
    world.site("app", "alice", clock("app", json!({"min": 1})));
    let world = world.start();
    place(&world, "app", "a", 1);
    world.run(async |keeper| {
        let refused = refusal(keeper.use_instance(&site_name("app"), Some(1)).await);
        assert_eq!(refused, (FailureKind::Fenced, 361));
        assert!(last_tick(&world, "app").is_none(), "nothing of it ever ran");
        // One that has passed already is none.
        world.tell(&FromSupervisor::Authority { until_ns: boottime_ns() - MS });
        assert_eq!(refusal(keeper.use_instance(&site_name("app"), None).await), (FailureKind::Fenced, 361));
        authority_for_long(&world);
        until_so(|| last_tick(&world, "app").is_some()).await;
    });
}

/// How long after this time the site was stopped, once it is certain that it is.
async fn stopped_after(world: &World, site: &str, until_ns: u64) -> Duration {
    until_time(until_ns + 300 * MS).await;
    let last = last_tick(world, site).unwrap();
    until_time(until_ns + 500 * MS).await;
    assert_eq!(last_tick(world, site), Some(last), "it runs on");
    Duration::from_nanos(last.saturating_sub(until_ns))
}

fn stops_in_time() {
    let world = world(&["app"]);
    place(&world, "app", "a", 1);
    world.run(async |keeper| {
        let run = renewed(&world, use_once(&keeper, "app")).await;
        for _ in 0..3 {
            let until_ns = fence_soon(&world).await;
            let late = stopped_after(&world, "app", until_ns).await;
            println!("stopped {late:?} after its time");
            assert!(late < LATE_MAX, "{late:?}");
            until_fenced(&world, true).await;
            assert_eq!(
                refusal(keeper.use_instance(&site_name("app"), None).await),
                (FailureKind::Fenced, 361)
            );
            let now = boottime_ns();
            authority_that_holds(&world, SHORT_MS);
            until_ticks_after(&world, "app", now).await;
            assert_eq!(use_once(&keeper, "app").await, run, "the same run goes on");
        }
        assert!(status(&world)["fences"].as_u64().unwrap() >= 3);
    });
}

/// Waits for the end of the authority there is, and says when that was.
async fn fence_soon(world: &World) -> u64 {
    until_fenced(world, true).await;
    let until_ns = authority(world, 400);
    until_ticks_after(world, "app", until_ns - 300 * MS).await;
    until_ns
}

fn stops_without_the_keeper() {
    let world = world(&["app"]);
    place(&world, "app", "a", 1);
    world.run(async |keeper| {
        let run = renewed(&world, use_once(&keeper, "app")).await;
        until_fenced(&world, true).await;
        let until_ns = fence_soon(&world).await;
        let pid = Pid::from_raw(i32::try_from(world.keeper_pid()).unwrap()).unwrap();
        kill_process(pid, Signal::STOP).unwrap();
        let late = stopped_after(&world, "app", until_ns).await;
        kill_process(pid, Signal::CONT).unwrap();
        println!("stopped {late:?} after its time, the keeper not running");
        assert!(late < LATE_MAX, "{late:?}");
        until_fenced(&world, true).await;
        authority_for_long(&world);
        assert_eq!(use_once(&keeper, "app").await, run);
    });
}

fn fifty_stop() {
    let names: Vec<String> = (0..50).map(|number| format!("app-{number}")).collect();
    let sites: Vec<&str> = names.iter().map(String::as_str).collect();
    let world = world(&sites);
    authority(&world, 1);
    world.apply(sites.iter().map(|site| placement(site, "a", 1)).collect());
    world.run(async |keeper| {
        let started: Vec<_> = names
            .iter()
            .map(|site| {
                let (keeper, site) = (Rc::clone(&keeper), site_name(site));
                tokio::task::spawn_local(async move {
                    while let Err(error) = keeper.use_instance(&site, None).await {
                        assert!(
                            matches!(error, KeeperCallError::Refused { failure: FailureKind::Fenced, .. }),
                            "{error:?}"
                        );
                    }
                })
            })
            .collect();
        let all = async {
            for one in started {
                one.await.unwrap();
            }
        };
        let ((), until_ns) = renewing(&world, 1000, all).await;
        until_time(until_ns + 500 * MS).await;
        let ticks: Vec<u64> = sites.iter().map(|site| last_tick(&world, site).unwrap()).collect();
        until_time(until_ns + 700 * MS).await;
        for (site, last) in sites.iter().zip(&ticks) {
            assert_eq!(last_tick(&world, site), Some(*last), "{site} runs on");
        }
        let late = Duration::from_nanos(ticks.iter().max().unwrap().saturating_sub(until_ns));
        let cluster = status(&world);
        println!("fifty stopped {late:?} after their time; {cluster}");
        assert_eq!(cluster["last_fence"]["instances"], 50);
        assert!(late < LATE_MAX, "{late:?}");
    });
}

fn rests_stay() {
    let world = world(&["app"]);
    authority_for_long(&world);
    place(&world, "app", "a", 1);
    world.run(async |keeper| {
        let run = use_once(&keeper, "app").await;
        until_idle(&world, "app").await;
        assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Frozen) })["tier"], "frozen");
        let last = last_tick(&world, "app");
        assert!(last.is_some());
        // It never becomes less: so another keeper's life is needed for a fence. Here the run itself is looked at.
        world.tell(&FromSupervisor::Authority { until_ns: 1 });
        assert_eq!(last_tick(&world, "app"), last);
        assert_eq!(use_once(&keeper, "app").await, run);
    });
    let world = self::world(&["app"]);
    place(&world, "app", "a", 1);
    world.run(async |keeper| {
        let run = renewed(&world, use_once(&keeper, "app")).await;
        until_idle(&world, "app").await;
        assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Frozen) })["tier"], "frozen");
        until_fenced(&world, true).await;
        let last = last_tick(&world, "app");
        authority_for_long(&world);
        until_fenced(&world, false).await;
        assert_eq!(show(&world, "app")["tier"], "frozen");
        assert_eq!(last_tick(&world, "app"), last, "it was not let go on");
        assert_eq!(use_once(&keeper, "app").await, run);
    });
}

fn moves_away() {
    let world = world(&["app", "other"]);
    world.apply(vec![placement("app", "a", 1), placement("other", "a", 1)]);
    world.run(async |keeper| {
        // In use.
        let used = renewed(&world, keeper.use_instance(&site_name("app"), Some(1))).await.unwrap();
        let all = pids(&world, "app");
        place(&world, "app", "b", 2);
        all.iter().copied().for_each(wait_dead);
        let lost = keeper.connect_instance(used.guard.id()).await;
        assert_eq!(refusal(lost).0, FailureKind::NotFound);
        assert_eq!(refused_elsewhere(&keeper, "app", None).await, (Some("b".into()), Some(2)));
        // Back again, and frozen.
        place(&world, "app", "a", 3);
        renewed(&world, use_once(&keeper, "app")).await;
        drop(used);
        until_idle(&world, "app").await;
        assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Frozen) })["tier"], "frozen");
        let all = pids(&world, "app");
        place(&world, "app", "b", 4);
        all.into_iter().for_each(wait_dead);
        // Fenced.
        renewed(&world, use_once(&keeper, "other")).await;
        until_fenced(&world, true).await;
        let all = pids(&world, "other");
        assert!(all.iter().any(|pid| is_alive(*pid)));
        place(&world, "other", "b", 2);
        all.into_iter().for_each(wait_dead);
        authority_for_long(&world);
        assert_eq!(refused_elsewhere(&keeper, "other", None).await, (Some("b".into()), Some(2)));
    });
}

fn authority_behind_a_move() {
    let world = world(&["app"]);
    place(&world, "app", "a", 1);
    world.run(async |keeper| {
        renewed(&world, use_once(&keeper, "app")).await;
        until_fenced(&world, true).await;
        let last = last_tick(&world, "app").unwrap();
        let all = pids(&world, "app");
        // The move is read, and holds only with the commit, which does not come yet.
        world.tell(&FromSupervisor::Apply(vec![placement("app", "b", 2)]));
        authority_for_long(&world);
        until_fenced(&world, false).await;
        let now = boottime_ns();
        until_time(now + 100 * MS).await;
        assert_eq!(last_tick(&world, "app"), Some(last), "it went on");
        assert!(all.iter().any(|pid| is_alive(*pid)));
        world.apply(Vec::new());
        all.into_iter().for_each(wait_dead);
        place(&world, "app", "a", 3);
        use_once(&keeper, "app").await;
        until_ticks_after(&world, "app", now).await;
    });
}

fn fenced_start() {
    let world = world(&["app"]);
    let late = |seconds: &str| fs::write(world.home("alice").join("www/app.late"), seconds).unwrap();
    late("1.5");
    place(&world, "app", "a", 1);
    authority_that_holds(&world, 1000);
    world.run(async |keeper| {
        // It stands still for a moment and goes on.
        assert_eq!(refusal(keeper.use_instance(&site_name("app"), None).await), (FailureKind::Fenced, 361));
        authority(&world, 1);
        let state = show(&world, "app")["state"].clone();
        assert!(["queued", "starting"].contains(&state.as_str().unwrap_or_default()), "{state}");
        authority_for_long(&world);
        use_once(&keeper, "app").await;
        assert_eq!(show(&world, "app")["failures"], 0);
    });
    let world = self::world(&["app"]);
    fs::write(world.home("alice").join("www/app.late"), "30").unwrap();
    place(&world, "app", "a", 1);
    authority_that_holds(&world, 1500);
    world.run(async |keeper| {
        assert_eq!(refusal(keeper.use_instance(&site_name("app"), None).await), (FailureKind::Fenced, 361));
        // For so long that it is given up.
        until_so(|| show(&world, "app")["state"] == "idle").await;
        assert!(pids(&world, "app").is_empty());
        fs::remove_file(world.home("alice").join("www/app.late")).unwrap();
        authority_for_long(&world);
        use_once(&keeper, "app").await;
        assert_eq!(show(&world, "app")["failures"], 0, "it was not the program's fault");
    });
}

fn copies() {
    let world = world(&["app"]);
    authority_for_long(&world);
    let RecordChange::PutPlacement(alone) = placement("app", "a", 1) else { unreachable!() };
    let name = |name: &str| NodeName::new(name).unwrap();
    let put = |placement: &Placement| world.apply(vec![RecordChange::PutPlacement(placement.clone())]);
    put(&alone);
    world.run(async |keeper| {
        let run = use_once(&keeper, "app").await;
        let both = alone.with_copy(name("b"), 0, 0);
        put(&both);
        assert_eq!(use_once(&keeper, "app").await, run, "what another node gets changes nothing here");
        let ready = both.with_ready(&name("b")).unwrap();
        put(&ready);
        assert!(keeper.use_instance(&site_name("app"), Some(1)).await.is_ok(), "its epoch is its own");
        assert_eq!(use_once(&keeper, "app").await, run);
        // The other one is left alone with it.
        let all = pids(&world, "app");
        let lost = ready.without(&name("a"), 0, PlacementReason::Silent).unwrap();
        put(&lost);
        all.into_iter().for_each(wait_dead);
        assert_eq!(refused_elsewhere(&keeper, "app", None).await, (Some("b".into()), Some(4)));
        // As a copy it is here under an epoch of its own, whatever becomes of the other part.
        let back = lost.with_copy(name("a"), 0, 0);
        put(&back);
        drop(keeper.use_instance(&site_name("app"), Some(5)).await.unwrap());
        let run = use_once(&keeper, "app").await;
        let moved = back.moved(&name("b"), name("c"), 0, PlacementReason::Load, 0).unwrap();
        put(&moved);
        assert_eq!(use_once(&keeper, "app").await, run);
        let all = pids(&world, "app");
        put(&moved.without(&name("a"), 0, PlacementReason::Load).unwrap());
        all.into_iter().for_each(wait_dead);
        assert_eq!(refused_elsewhere(&keeper, "app", None).await, (Some("c".into()), Some(7)));
    });
}

fn given_up() {
    let world = world(&["app", "idle"]);
    authority_for_long(&world);
    world.apply(vec![placement("app", "a", 1), placement("idle", "a", 1)]);
    world.run(async |keeper| {
        let never_ran = world.act("idle", InstanceCommand::Release { within_ms: 0 });
        assert_eq!(never_ran, json!({"ok": true, "epoch": 1, "cut": 0}));
        // Who uses it may end that.
        let used = keeper.use_instance(&site_name("app"), Some(1)).await.unwrap();
        let all = pids(&world, "app");
        let question =
            FeedQuery::Instance { site: "app".into(), act: InstanceCommand::Release { within_ms: 60_000 } };
        world.tell(&FromSupervisor::Ask { tag: 9, question });
        // Nobody else gets it meanwhile, as soon as the question is there.
        until_asked(&keeper, "app").await;
        assert!(all.iter().all(|pid| is_alive(*pid)));
        crate::rest::get(&used, "/").await;
        drop(used);
        until_so(|| !all.iter().any(|pid| is_alive(*pid))).await;
        match world.hear() {
            ToSupervisor::Answer { tag: 9, text } => assert_eq!(text, r#"{"cut":0,"epoch":1,"ok":true}"#),
            other => panic!("{other:?}"),
        }
        assert_eq!(refused_elsewhere(&keeper, "app", Some(1)).await, (Some("a".into()), Some(1)));
        world.apply(Vec::new());
        assert_eq!(refused_elsewhere(&keeper, "app", Some(1)).await, (Some("a".into()), Some(1)));
        // Only a new placement brings it back; then who does not end is cut.
        place(&world, "app", "a", 2);
        let used = keeper.use_instance(&site_name("app"), Some(2)).await.unwrap();
        let all = pids(&world, "app");
        assert_eq!(
            world.act("app", InstanceCommand::Release { within_ms: 100 }),
            json!({"ok": true, "epoch": 2, "cut": 1})
        );
        assert!(!all.iter().any(|pid| is_alive(*pid)));
        drop(used);
        // Given to another node, it comes straight back.
        place(&world, "app", "b", 3);
        assert_eq!(refused_elsewhere(&keeper, "app", Some(3)).await, (Some("b".into()), Some(3)));
        place(&world, "app", "a", 4);
        keeper.use_instance(&site_name("app"), Some(4)).await.unwrap();
    });
}

/// Returns once nobody gets it any more.
async fn until_asked(keeper: &KeeperClient, site: &str) {
    while keeper.use_instance(&site_name(site), None).await.is_ok() {
        tokio::task::yield_now().await;
    }
}

fn kept_where_placed() {
    let mut world = World::new().with(|options| {
        options.instances.image_bytes_max = 0;
        options.node = Some("a".into());
    });
    world.script("clock.py", CLOCK);
    for site in ["app", "other"] {
        world.site(site, "alice", clock(site, json!({"min": 1})));
    }
    let world = world.start();
    authority_for_long(&world);
    world.apply(vec![placement("app", "a", 1), placement("other", "b", 1)]);
    world.run(async |_keeper| {
        until_so(|| last_tick(&world, "app").is_some()).await;
        assert!(pids(&world, "other").is_empty());
        let all = pids(&world, "app");
        world.apply(vec![placement("app", "b", 2), placement("other", "a", 2)]);
        all.into_iter().for_each(wait_dead);
        until_so(|| last_tick(&world, "other").is_some()).await;
        assert!(pids(&world, "app").is_empty(), "nor does it start again");
    });
}

/// Where its sites went is signed with keys that it never gets.
fn removed_node() {
    let world = world(&["app"]);
    let record = json!({"name": "a", "id": "1", "peer": "10.0.0.1:7443", "cpus": 1, "memory_bytes": 1, "version": "1"});
    let record: NodeRecord = serde_json::from_value(record).unwrap();
    world.apply(vec![RecordChange::PutNode(Box::new(record.clone())), placement("app", "a", 1)]);
    authority_for_long(&world);
    world.run(async |keeper| {
        let lease = keeper.use_instance(&site_name("app"), Some(1)).await.unwrap();
        until_so(|| last_tick(&world, "app").is_some()).await;
        let all = pids(&world, "app");
        world.apply(vec![RecordChange::DropNode(record.name.clone())]);
        all.into_iter().for_each(wait_dead);
        drop(lease);
        assert_eq!(refused_elsewhere(&keeper, "app", Some(1)).await.0, None, "it does not know where");
        // It joins again.
        world.apply(vec![RecordChange::PutNode(Box::new(record)), placement("app", "a", 3)]);
        keeper.use_instance(&site_name("app"), Some(3)).await.unwrap();
    });
}

/// Children of this keeper's launcher with this name.
fn warden_of(keeper: u32) -> i32 {
    let parent_of = |pid: i32| -> Option<i32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    };
    let keeper = i32::try_from(keeper).unwrap();
    let all = fs::read_dir("/proc").unwrap().flatten();
    let all = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_its = |pid: &i32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name.trim() == "nagaya-warden" && parent_of(*pid).and_then(parent_of) == Some(keeper)
    };
    all.into_iter().find(is_its).expect("a node of a cluster has a warden")
}

/// One that did not would take a processor before everything else of the machine.
fn warden_sleeps() {
    let world = world(&["app"]);
    let warden = warden_of(world.keeper_pid());
    let sleeps = || {
        let stat = fs::read_to_string(format!("/proc/{warden}/stat")).unwrap();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
    };
    world.run(async |_| {
        // A time that has passed, one that passes soon, and both again once there was authority.
        for _ in 0..2 {
            world.tell(&FromSupervisor::Authority { until_ns: boottime_ns() - MS });
            assert_eq!(status(&world)["fenced"], true);
            until_so(sleeps).await;
            authority_that_holds(&world, 200);
            until_fenced(&world, true).await;
            until_so(sleeps).await;
        }
    });
}

fn killed_warden() {
    let world = world(&["app"]);
    authority_for_long(&world);
    place(&world, "app", "a", 1);
    world.run(async |keeper| {
        use_once(&keeper, "app").await;
        let all = pids(&world, "app");
        let warden = Pid::from_raw(warden_of(world.keeper_pid())).unwrap();
        kill_process(warden, Signal::KILL).unwrap();
        all.into_iter().for_each(wait_dead);
    });
    assert!(!world.drain(), "it says that something is wrong");
    assert!(world.log().contains("NGY0362"), "{}", world.log());
}

fn killed_keeper() {
    let world = world(&["app"]);
    place(&world, "app", "a", 1);
    world.run(async |keeper| {
        renewed(&world, use_once(&keeper, "app")).await;
        until_fenced(&world, true).await;
        let last = last_tick(&world, "app");
        let all = pids(&world, "app");
        let warden = warden_of(world.keeper_pid());
        world.kill();
        wait_dead(warden);
        // On v1 what stands still dies when the next keeper has cleared away.
        world.restart();
        all.into_iter().for_each(wait_dead);
        assert_eq!(last_tick(&world, "app"), last, "and did not run on the way");
    });
}
