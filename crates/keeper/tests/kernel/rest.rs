//! Instances at rest: an HTTP program that goes down the ladder, and what a request finds at each tier.
//!
//! Not here: starting and ending them (`instances`), sandboxes and images by themselves (`sandbox`, `image`).

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use nagaya_keeper::CellMechanism;
use nagaya_keeper_api::client::{InstanceUse, KeeperClient};
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::feed::{FeedQuery, FromSupervisor, ToSupervisor};
use nagaya_records::instance::{InstanceCommand, Tier, WakeStage};
use nagaya_records::record::RecordChange;
use rustix::io::Errno;
use rustix::process::Pid;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::Fact;
use crate::world::{World, is_alive, refusal, site_name, until_so, wait_dead};

pub const ROOT: &[Fact] = &[
    ("an instance answers from each tier it rests at, and is the same", answers_from_each_tier),
    ("what coming back from a tier takes, and what is held there, is measured and shown", costs_are_measured),
    ("the edge knows without asking whether an instance rests", rests_is_known),
    ("threads of a quiet instance are the least urgent, and their timers may be late", quiet_threads),
    ("a frozen instance uses no CPU time", frozen_uses_nothing),
    ("an idle instance goes down by itself until nothing of it is left", goes_down_alone),
    ("an instance that is used does not rest", used_does_not_rest),
    ("an instance that dies at rest is another for the next request", dies_at_rest),
    ("who leaves before its turn starts nothing", leaves_before_its_turn),
    ("many that are asked for at once start in turn, and all answer", in_turn),
    ("starts that sleep, or stand still by their own limits, hold up their own tenant alone", late_starts),
    ("a site that always runs begins without a request, and again after its end", always_runs),
    ("an application that answers nothing is not ready", never_ready),
    ("an application that listens late is waited for", listens_late),
    ("an application that ignores SIGTERM ends all the same", ignores_sigterm),
    ("an application gets a socket to listen on, and secrets from files", socket_and_secrets),
    ("a secret that its tenant may not read is not told", foreign_secret),
    ("an application reaches the node's network only if its record says so", reaches_the_network),
    ("nothing of an instance outlives a killed keeper", killed_keeper),
    ("a keeper whose launcher of sandboxes was killed ends, and all instances with it", killed_launcher),
    ("what waits to become a sandbox is bounded, can be killed, and ends with its killed keeper", births),
    ("an instance is frozen, and ends with its killed keeper, on cgroup v1", frozen_on_v1),
    ("what is frozen is no hindrance to a keeper that ends", || frozen_at_the_end(CellMechanism::Auto)),
    ("what is frozen is no hindrance to a keeper that ends on cgroup v1", || {
        frozen_at_the_end(CellMechanism::CgroupV1)
    }),
];

pub const ANYONE: &[Fact] = &[
    ("an instance answers and rests as far as the keeper's rights allow", with_any_rights),
    ("an act that takes long does not hold up other questions", acts_take_their_time),
];

/// An HTTP server that tells which run of it this is, and how many requests that has answered.
pub const SERVER: &str = r#"
import http.server, os, socket, socketserver, sys, threading, time
mode = sys.argv[1] if len(sys.argv) > 1 else ''
run = os.urandom(8).hex()
count = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *what): print('asked', self.path, flush=True)
    def do_GET(self):
        global count
        if self.path == '/hang': time.sleep(1000)
        count += 1
        body = f'{run} {count} {os.environ.get("KEY", "")}'.encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128
if mode == 'busy':
    def burn():
        while True: pass
    threading.Thread(target=burn, daemon=True).start()
if mode == 'late': time.sleep(0.5)
if mode == 'never': time.sleep(1000)
if mode == 'long':
    while time.process_time() < 0.5: pass
if mode == 'stubborn':
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('it is here', flush=True)
if os.environ.get('LISTEN_FDS'):
    assert int(os.environ['LISTEN_PID']) == os.getpid()
    server = Server('/nowhere', Handler, bind_and_activate=False)
    server.socket = socket.socket(fileno=3)
else:
    server = Server(os.environ['NAGAYA_SOCKET'], Handler)
server.serve_forever()
"#;

pub const NEVER: fn() -> Value =
    || json!({"quiet": "never", "frozen": "never", "reclaimed": "never", "image": "never", "cold": "never"});

pub fn app(mode: &str, more: Value) -> Value {
    // An emulated machine needs half a minute for what takes others a tenth of a second.
    let mut record = json!({"kind": "app", "command": ["python3", "server.py", mode], "directory": "www", "start_seconds": 300, "idle": NEVER()});
    record.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    record
}

/// A world with one site `app` of alice's, and without images.
fn world(mode: &str, more: Value) -> World {
    let mut world = World::new().with(|options| options.instances.image_bytes_max = 0);
    world.script("server.py", SERVER);
    world.site("app", "alice", app(mode, more));
    world
}

pub async fn get(used: &InstanceUse, path: &str) -> String {
    let socket = used.socket.try_clone().unwrap();
    let mut stream = tokio::net::UnixStream::from_std(socket.into()).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
    assert!(head.starts_with("HTTP/1.0 200 "), "{head}");
    body.to_owned()
}

/// Which run of the program answers.
pub async fn run_of(keeper: &KeeperClient, site: &str) -> String {
    let used = keeper.use_instance(&site_name(site), None).await.unwrap();
    get(&used, "/").await.split(' ').next().unwrap().to_owned()
}

pub fn show(world: &World, site: &str) -> Value {
    world.act(site, InstanceCommand::Inspect)
}

pub fn pids(world: &World, site: &str) -> Vec<i32> {
    serde_json::from_value(show(world, site)["pids"].clone()).unwrap()
}

/// Looks until it is at this tier and nothing is done to it.
pub async fn until_at(world: &World, site: &str, tier: &str) {
    until_so(|| {
        let row = show(world, site);
        row["tier"] == tier && row["state"] == "idle"
    })
    .await;
}

/// Nobody needs it any more, as far as the keeper knows.
pub async fn until_idle(world: &World, site: &str) {
    until_so(|| show(world, site)["uses"] == 0).await;
}

fn rest(world: &World, to: Tier) -> Value {
    world.act("app", InstanceCommand::Rest { to: Some(to) })
}

pub fn has_swap() -> bool {
    fs::read_to_string("/proc/swaps").unwrap().lines().count() > 1
}

fn answers_from_each_tier() {
    let _swap = crate::swap::stays();
    let world = world("", json!({})).start();
    world.run(async |keeper| {
        let first = run_of(&keeper, "app").await;
        for tier in [Tier::Quiet, Tier::Frozen, Tier::Reclaimed] {
            until_idle(&world, "app").await;
            let row = rest(&world, tier);
            let expected = if tier == Tier::Reclaimed && !has_swap() { Tier::Frozen } else { tier };
            assert_eq!(row["tier"], expected.as_str(), "{row}");
            assert_eq!(row["note"].is_string(), expected != tier, "what is not possible is said: {row}");
            let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
            let wake = used.wake.clone().unwrap();
            assert_eq!(wake.from, expected);
            assert!(wake.stages.iter().any(|(stage, _)| *stage == WakeStage::Thaw), "{wake:?}");
            assert!(get(&used, "/").await.starts_with(&first), "the same run");
            assert_eq!(show(&world, "app")["tier"], "running");
            // Awake it is nobody's wait.
            assert_eq!(keeper.use_instance(&site_name("app"), None).await.unwrap().wake, None);
        }
        assert_eq!(show(&world, "app")["wakes"], 4);
    });
    let thawed = "nagaya_keeper_wakes_total{from=\"frozen\",end=\"woke\"}";
    assert!(world.metric(thawed) >= 1);
    assert_eq!(world.metric("nagaya_keeper_instances_running"), 1);
}

fn costs_are_measured() {
    let _swap = crate::swap::stays();
    let mut world = world("", json!({}));
    world.site("next", "alice", app("", json!({})));
    let world = world.start();
    let cost = |site: &str, tier: &str| {
        let row = show(&world, site);
        let costs = row["costs"].as_array().unwrap_or_else(|| panic!("{row}"));
        costs.iter().find(|cost| cost["tier"] == tier).unwrap().clone()
    };
    world.run(async |keeper| {
        // Who does not say when its answer began has measured no start.
        run_of(&keeper, "app").await;
        until_idle(&world, "app").await;
        let start = cost("app", "cold");
        assert_eq!((&start["return_of"], &start["holds_bytes"]), (&json!("assumed"), &json!(0)));
        rest(&world, Tier::Frozen);
        until_so(|| cost("app", "frozen")["holds_of"] == "own").await;
        assert!(cost("app", "frozen")["holds_bytes"].as_u64().unwrap() > 1 << 20);
        assert_eq!(cost("app", "frozen")["return_of"], "assumed");
        run_of(&keeper, "app").await;
        until_idle(&world, "app").await;
        let back = cost("app", "frozen");
        assert_eq!((&back["return_of"], &back["return_samples"]), (&json!("own"), &json!(1)));
        assert_eq!(cost("next", "frozen")["return_us"], back["return_us"], "another's stands in");
        assert_eq!(cost("next", "frozen")["return_of"], "node");
        rest(&world, Tier::Cold);
        let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
        get(&used, "/").await;
        keeper.answered(used.guard.id());
        until_so(|| cost("app", "cold")["return_of"] == "own").await;
        let waits = used.wake.unwrap().stages.into_iter();
        let own = waits.filter(|(stage, _)| !matches!(stage, WakeStage::Queue | WakeStage::Connect));
        let (own, start): (u64, _) = (own.map(|(_, us)| us).sum(), cost("app", "cold")["return_us"].as_u64());
        assert!(start.is_some_and(|start| start > own), "{own} and the answer: {start:?}");
    });
    for tier in ["frozen", "cold"] {
        assert!(world.metric(&format!("nagaya_keeper_return_us_{tier}")) > 0, "{tier}");
    }
    assert!(world.metric("nagaya_keeper_held_bytes_frozen") > 1 << 20);
    assert_eq!(world.metric("nagaya_keeper_held_bytes_cold"), 0);
}

fn rests_is_known() {
    let mut world = world("", json!({}));
    world.site("late", "alice", app("late", json!({})));
    let world = world.start();
    world.run(async |keeper| {
        let rests = |site: &str| keeper.rests(&site_name(site));
        assert!(rests("app") && rests("nobody"));
        run_of(&keeper, "app").await;
        for (tier, expected) in [(Tier::Quiet, false), (Tier::Frozen, true), (Tier::Cold, true)] {
            assert!(!rests("app"));
            until_idle(&world, "app").await;
            rest(&world, tier);
            assert_eq!(rests("app"), expected, "{tier}");
            run_of(&keeper, "app").await;
        }
        // A wake that has begun is nobody's doing who comes now.
        let waking = Rc::clone(&keeper);
        let waking = tokio::task::spawn_local(async move { run_of(&waking, "late").await });
        until_so(|| show(&world, "late")["state"] == "starting").await;
        assert!(!rests("late"));
        waking.await.unwrap();
        world.apply(vec![RecordChange::DropSite(site_name("app"))]);
        assert!(rests("app") && !rests("late"));
        world.kill();
        until_so(|| rests("late")).await;
        world.restart();
        run_of(&keeper, "late").await;
        assert!(!rests("late"), "of the new keeper");
    });
}

/// The scheduling policies and nice values of all threads, fields 41 and 19 of proc_pid_stat(5), and how late their timers may be,
/// nanoseconds.
fn scheduling(pids: &[i32]) -> BTreeSet<(u32, i32, u64)> {
    let mut seen = BTreeSet::new();
    for pid in pids {
        for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
            let tid = task.unwrap().file_name().into_string().unwrap();
            match scheduling_of(*pid, &tid) {
                Ok(found) => _ = seen.insert(found),
                // It has answered, and is no more.
                Err(error)
                    if matches!(
                        error.raw_os_error().map(Errno::from_raw_os_error),
                        Some(Errno::NOENT | Errno::SRCH)
                    ) => {}
                Err(error) => panic!("thread {tid} of {pid}: {error}"),
            }
        }
    }
    seen
}

fn scheduling_of(pid: i32, tid: &str) -> io::Result<(u32, i32, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat"))?;
    let slack = fs::read_to_string(format!("/proc/{tid}/timerslack_ns"))?;
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let (policy, nice) = (fields[41 - 3].parse().unwrap(), fields[19 - 3].parse().unwrap());
    Ok((policy, nice, slack.trim_end().parse().unwrap()))
}

fn quiet_threads() {
    let world = world("busy", json!({})).start();
    world.run(async |keeper| {
        run_of(&keeper, "app").await;
        until_idle(&world, "app").await;
        let all = pids(&world, "app");
        let normal = scheduling(&all);
        let is_plain = |(policy, _, slack): &(u32, i32, u64)| (*policy, *slack) == (0, 50_000);
        assert!(normal.iter().all(is_plain), "{normal:?}");
        rest(&world, Tier::Quiet);
        let least = BTreeSet::from([(5, 19, 50_000_000)]);
        assert_eq!(scheduling(&all), least, "SCHED_IDLE, least urgent, timers together");
        run_of(&keeper, "app").await;
        assert_eq!(scheduling(&all), normal);
    });
}

fn frozen_uses_nothing() {
    let world = world("busy", json!({})).start();
    world.run(async |keeper| {
        run_of(&keeper, "app").await;
        until_idle(&world, "app").await;
        let cpu = || show(&world, "app")["cpu_us"].as_u64().unwrap();
        let before = cpu();
        until_so(|| cpu() > before).await;
        assert_eq!(rest(&world, Tier::Frozen)["tier"], "frozen");
        let frozen = cpu();
        for _ in 0..50 {
            assert_eq!(cpu(), frozen);
        }
        run_of(&keeper, "app").await;
        until_so(|| cpu() > frozen).await;
    });
}

fn goes_down_alone() {
    let idle = json!({"quiet": 0, "frozen": 0, "reclaimed": "never", "image": "never", "cold": 1});
    let world = world("", json!({"idle": idle})).start();
    world.run(async |keeper| {
        run_of(&keeper, "app").await;
        let all = pids(&world, "app");
        until_at(&world, "app", "frozen").await;
        until_at(&world, "app", "cold").await;
        all.into_iter().for_each(wait_dead);
        assert!(pids(&world, "app").is_empty());
        let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
        let wake = used.wake.clone().unwrap();
        let stages: Vec<WakeStage> = wake.stages.iter().map(|(stage, _)| *stage).collect();
        assert_eq!(wake.from, Tier::Cold);
        assert!(stages.contains(&WakeStage::Boot) && stages.contains(&WakeStage::Sandbox), "{wake:?}");
    });
}

fn used_does_not_rest() {
    let idle = json!({"quiet": 0, "frozen": 0, "reclaimed": 0, "image": 0, "cold": 0});
    let world = world("", json!({"idle": idle})).start();
    world.run(async |keeper| {
        let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
        let refused = rest(&world, Tier::Cold);
        assert!(refused["error"].is_string(), "{refused}");
        assert_eq!(show(&world, "app")["tier"], "running");
        let more = keeper.connect_instance(used.guard.id()).await.unwrap();
        let second = InstanceUse { socket: more, ..used };
        get(&second, "/").await;
        drop(second);
        until_at(&world, "app", "cold").await;
        // A connection of the edge that goes takes its uses along.
        let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
        assert_eq!(show(&world, "app")["uses"], 1);
        drop(keeper);
        until_at(&world, "app", "cold").await;
        drop(used);
    });
}

fn dies_at_rest() {
    let world = world("", json!({})).start();
    world.run(async |keeper| {
        let first = run_of(&keeper, "app").await;
        for tier in [Tier::Quiet, Tier::Frozen] {
            until_idle(&world, "app").await;
            world.act("app", InstanceCommand::Stop);
            let before = run_of(&keeper, "app").await;
            until_idle(&world, "app").await;
            rest(&world, tier);
            let pid = *pids(&world, "app").last().unwrap();
            rustix::process::kill_process(Pid::from_raw(pid).unwrap(), rustix::process::Signal::KILL)
                .unwrap();
            if tier == Tier::Quiet {
                wait_dead(pid);
            }
            let after = answer_of_living(&keeper).await;
            assert_ne!(before, after, "{tier}");
            assert_ne!(first, after);
            // Two deaths in a minute are a pause: a new record forgets them.
            world.apply(vec![crate::world::site_change(
                "app",
                "alice",
                app("", json!({"env": {"TIER": tier.as_str()}})),
                json!({}),
            )]);
        }
    });
}

/// The death may become known only while a request is under way, which the edge then asks for again.
async fn answer_of_living(keeper: &Rc<KeeperClient>) -> String {
    loop {
        let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
        let socket = used.socket.try_clone().unwrap();
        let mut stream = tokio::net::UnixStream::from_std(socket.into()).unwrap();
        let mut answer = String::new();
        if stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await.is_ok()
            && stream.read_to_string(&mut answer).await.is_ok()
            && let Some((_, body)) = answer.split_once("\r\n\r\n")
        {
            return body.split(' ').next().unwrap().to_owned();
        }
    }
}

fn leaves_before_its_turn() {
    let mut world = world("long", json!({})).with(|options| options.instances.wakes_at_once = 1);
    world.site("next", "alice", app("", json!({})));
    let world = world.start();
    world.run(async |keeper| {
        let first = {
            let keeper = Rc::clone(&keeper);
            tokio::task::spawn_local(
                async move { keeper.use_instance(&site_name("app"), None).await.unwrap() },
            )
        };
        until_so(|| show(&world, "app")["state"] == "starting").await;
        let second = {
            let keeper = Rc::clone(&keeper);
            tokio::task::spawn_local(async move { keeper.use_instance(&site_name("next"), None).await })
        };
        until_so(|| show(&world, "next")["state"] == "queued").await;
        assert!(show(&world, "next")["predicted_wait_seconds"].is_number());
        second.abort();
        until_so(|| show(&world, "next")["state"] == "idle").await;
        get(&first.await.unwrap(), "/").await;
        let next = show(&world, "next");
        assert_eq!((&next["tier"], &next["wakes"], &next["pids"]), (&json!("cold"), &json!(0), &json!([])));
    });
    assert!(!world.log().contains("app next"), "it has said nothing");
}

fn in_turn() {
    let mut world = world("", json!({})).with(|options| options.instances.wakes_at_once = 2);
    let names: Vec<String> = (0..6).map(|number| format!("site{number}")).collect();
    for name in &names {
        world.site(name, "alice", app("", json!({})));
    }
    let world = world.start();
    world.run(async |keeper| {
        let asking: Vec<_> = names
            .iter()
            .map(|name| {
                let (keeper, name) = (Rc::clone(&keeper), name.clone());
                tokio::task::spawn_local(async move {
                    let used = keeper.use_instance(&site_name(&name), None).await.unwrap();
                    (get(&used, "/").await, used.wake.unwrap())
                })
            })
            .collect();
        let mut most = 0;
        until_so(|| {
            let list: Value = serde_json::from_str(&world.ask(FeedQuery::Instances)).unwrap();
            let rows = list["instances"].as_array().unwrap();
            let starting = rows.iter().filter(|row| row["state"] == "starting").count();
            most = most.max(starting);
            asking.iter().all(tokio::task::JoinHandle::is_finished)
        })
        .await;
        assert_eq!(most, 2, "as many as may, and no more");
        let (mut runs, mut predicted) = (BTreeSet::new(), 0);
        for one in asking {
            let (answer, wake) = one.await.unwrap();
            runs.insert(answer.split(' ').next().unwrap().to_owned());
            let has_waited = wake.stages.iter().any(|(stage, us)| *stage == WakeStage::Queue && *us > 5_000);
            assert!(!has_waited || wake.predicted_us.is_some(), "{wake:?}");
            predicted += usize::from(wake.predicted_us.is_some());
        }
        assert_eq!(runs.len(), names.len());
        assert!(predicted > 0, "two at a time, so some wait for their turn");
    });
}

fn late_starts() {
    let mut world = world("", json!({})).with(|options| options.instances.wakes_at_once = 1);
    let sleeping: Vec<String> = (0..6).map(|number| format!("sleeping{number}")).collect();
    sleeping.iter().for_each(|site| world.site(site, "bob", app("never", json!({}))));
    world.script_of("bob", "server.py", SERVER);
    world.site_with("slowed", "alice", app("long", json!({})), json!({"limits": {"cpu": "1%"}}));
    let world = world.start();
    world.run(async |keeper| {
        let ask = |site: &str| {
            let (keeper, site) = (Rc::clone(&keeper), site_name(site));
            tokio::task::spawn_local(async move { keeper.use_instance(&site, None).await.is_ok() })
        };
        let asked: Vec<_> = sleeping.iter().map(|site| ask(site)).collect();
        let states = || {
            let of =
                |state: &str| sleeping.iter().filter(|site| show(&world, site)["state"] == state).count();
            (of("starting"), of("queued"))
        };
        until_so(|| states() == (4, 2)).await;
        let slowed = ask("slowed");
        until_so(|| show(&world, "slowed")["state"] == "starting").await;
        run_of(&keeper, "app").await;
        assert_eq!(states(), (4, 2), "as many as one tenant may have");
        assert_eq!(show(&world, "slowed")["state"], "starting", "it was passed, and goes on");
        // One that ends makes room for the next of its tenant.
        let is_starting = |site: &&String| show(&world, site)["state"] == "starting";
        let first = sleeping.iter().find(is_starting).unwrap();
        world.act(first, InstanceCommand::Stop);
        until_so(|| states() == (4, 1)).await;
        asked.iter().chain([&slowed]).for_each(|task| task.abort());
    });
}

fn always_runs() {
    let world = world("", json!({"min": 1})).start();
    world.run(async |keeper| {
        until_at(&world, "app", "running").await;
        let first = run_of(&keeper, "app").await;
        until_idle(&world, "app").await;
        assert!(rest(&world, Tier::Cold)["error"].as_str().unwrap().contains("min = 1"));
        world.act("app", InstanceCommand::Stop);
        until_at(&world, "app", "running").await;
        assert_ne!(run_of(&keeper, "app").await, first);
        world.apply(vec![crate::world::site_change("app", "alice", app("", json!({})), json!({}))]);
        until_idle(&world, "app").await;
        assert_eq!(rest(&world, Tier::Cold)["tier"], "cold", "its record wants it no more");
    });
}

fn never_ready() {
    let world = world("", json!({"ready": {"path": "/hang", "within_seconds": 1}})).start();
    world.run(async |keeper| {
        let asked = keeper.use_instance(&site_name("app"), None).await;
        assert_eq!(refusal(asked), (FailureKind::Broken, 320));
        assert!(pids(&world, "app").is_empty(), "nothing of it is left");
        let again = keeper.use_instance(&site_name("app"), None).await;
        assert_eq!(refusal(again), (FailureKind::Busy, 311));
        let row = show(&world, "app");
        assert_eq!((&row["failures"], &row["state"]), (&json!(1), &json!("failed")), "{row}");
        assert!(row["note"].as_str().unwrap().contains("/hang"), "{row}");
    });
}

fn listens_late() {
    let world = world("late", json!({"ready": {"path": "/"}})).start();
    world.run(async |keeper| {
        let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
        let wake = used.wake.clone().unwrap();
        let boot = wake.stages.iter().find(|(stage, _)| *stage == WakeStage::Boot).unwrap().1;
        assert!(boot >= 500_000, "{wake:?}");
        assert!(get(&used, "/").await.split(' ').nth(1) == Some("2"), "the first was nagaya's own");
    });
}

fn ignores_sigterm() {
    let world = world("stubborn", json!({})).start();
    world.run(async |keeper| {
        run_of(&keeper, "app").await;
        let all = pids(&world, "app");
        let row = world.act("app", InstanceCommand::Stop);
        assert_eq!((&row["ok"], &row["tier"]), (&json!(true), &json!("cold")), "{row}");
        all.into_iter().for_each(wait_dead);
        let lines = world.act("app", InstanceCommand::Logs)["lines"].clone();
        assert_eq!(lines, json!(["it is here", "asked /"]), "what it wrote is kept");
    });
}

fn socket_and_secrets() {
    let more = json!({"listen": "fd", "secrets": {"KEY": "www/key.txt"}});
    let world = world("", more);
    world.script("key.txt", "s3cret\n");
    let world = world.start();
    world.run(async |keeper| {
        let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
        let said = get(&used, "/").await;
        assert!(said.ends_with(" s3cret"), "{said}");
    });
    assert!(!world.log().contains("s3cret"));
}

fn foreign_secret() {
    let world = world("", json!({"secrets": {"KEY": "key.txt"}}));
    let path = world.home("alice").join("key.txt");
    fs::write(&path, "root's").unwrap();
    crate::world::set_mode(&path, 0o600);
    let world = world.start();
    world.run(async |keeper| {
        let asked = keeper.use_instance(&site_name("app"), None).await;
        assert_eq!(refusal(asked), (FailureKind::Forbidden, 319));
    });
}

fn reaches_the_network() {
    let service = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = service.local_addr().unwrap().port();
    let tries = format!(
        "import os, socket\ntry:\n    socket.create_connection(('127.0.0.1', {port}), 5)\n    os.environ['KEY'] = 'reached'\n\
         except OSError: os.environ['KEY'] = 'refused'\n"
    );
    for (outbound, expected) in [("none", "refused"), ("host", "reached")] {
        let world = world("", json!({"outbound": outbound}));
        world.script("server.py", &format!("{tries}{SERVER}"));
        let world = world.start();
        world.run(async |keeper| {
            let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
            let said = get(&used, "/").await;
            assert!(said.ends_with(expected), "{outbound}: {said}");
        });
    }
}

fn killed_keeper() {
    outlived_by_nothing(&world("", json!({})).start());
}

fn killed_launcher() {
    let world = world("", json!({})).start();
    let all = world.run(async |keeper| {
        run_of(&keeper, "app").await;
        pids(&world, "app")
    });
    let launcher = launcher(&world);
    kill(launcher);
    wait_dead(world.keeper_pid().try_into().unwrap());
    all.into_iter().for_each(wait_dead);
    world.kill();
    world.restart();
    world.run(async |keeper| run_of(&keeper, "app").await);
    assert!(world.log().contains("NGY0317"), "{}", world.log());
}

/// Births that may wait for their orders (`AHEAD_MAX`).
const AHEAD: usize = 4;

fn births() {
    let world = world("", json!({})).start();
    let all_wait = async || {
        until_so(|| waiting(&world).len() == AHEAD).await;
        waiting(&world)
    };
    let last = world.run(async |keeper| {
        let mut first = run_of(&keeper, "app").await;
        for _ in 0..3 {
            let births = all_wait().await;
            world.act("app", InstanceCommand::Stop);
            // All but the one that is next; the start after that finds out, and begins another.
            births.iter().skip(1).copied().for_each(kill);
            births.iter().skip(1).copied().for_each(wait_dead);
            let another = run_of(&keeper, "app").await;
            assert_ne!(another, first);
            first = another;
            world.act("app", InstanceCommand::Stop);
            run_of(&keeper, "app").await;
        }
        all_wait().await
    });
    world.kill();
    last.into_iter().for_each(wait_dead);
}

/// Processes that will be sandboxes.
fn waiting(world: &World) -> Vec<i32> {
    let name = |pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    children(launcher(world)).into_iter().filter(|pid| name(pid) == "nagaya-birth\n").collect()
}

fn launcher(world: &World) -> i32 {
    *children(world.keeper_pid().try_into().unwrap()).first().expect("the first thing it starts")
}

fn children(pid: i32) -> Vec<i32> {
    let pids = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    pids.split_ascii_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

fn kill(pid: i32) {
    rustix::process::kill_process(Pid::from_raw(pid).unwrap(), rustix::process::Signal::KILL).unwrap();
}

fn frozen_on_v1() {
    let world = world("busy", json!({})).fenced(CellMechanism::CgroupV1).start();
    world.run(async |keeper| {
        let first = run_of(&keeper, "app").await;
        until_idle(&world, "app").await;
        let row = rest(&world, Tier::Frozen);
        assert_eq!(row["tier"], "frozen", "{row}");
        let cpu = || show(&world, "app")["cpu_us"].as_u64().unwrap();
        let frozen = cpu();
        for _ in 0..20 {
            assert_eq!(cpu(), frozen);
        }
        assert_eq!(run_of(&keeper, "app").await, first);
        until_idle(&world, "app").await;
        rest(&world, Tier::Frozen);
        assert_eq!(
            world.act("app", InstanceCommand::Stop)["tier"],
            "cold",
            "what is frozen ends like others"
        );
    });
    outlived_by_nothing(&world);
}

fn frozen_at_the_end(back_end: CellMechanism) {
    let world = world("busy", json!({})).fenced(back_end).start();
    let all = world.run(async |keeper| {
        run_of(&keeper, "app").await;
        until_idle(&world, "app").await;
        assert_eq!(rest(&world, Tier::Frozen)["tier"], "frozen");
        pids(&world, "app")
    });
    assert!(world.drain());
    assert!(!all.is_empty() && all.into_iter().all(|pid| !is_alive(pid)));
    assert!(!world.log().contains("NGY0315"), "{}", world.log());
}

fn with_any_rights() {
    for listen in ["socket", "fd"] {
        let world = world("", json!({"listen": listen, "secrets": {"KEY": "www/key.txt"}}));
        world.script("key.txt", "s3cret");
        let world = world.start();
        world.run(async |keeper| {
            let first = run_of(&keeper, "app").await;
            for tier in [Tier::Quiet, Tier::Frozen] {
                until_idle(&world, "app").await;
                let row = rest(&world, tier);
                let reached: Tier = serde_json::from_value(row["tier"].clone()).unwrap();
                assert!(reached == tier || row["note"].is_string(), "{row}");
                assert!(run_of(&keeper, "app").await == first, "{row}");
            }
            until_idle(&world, "app").await;
            assert_eq!(rest(&world, Tier::Cold)["tier"], "cold");
            let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
            assert!(get(&used, "/").await.ends_with(" s3cret"));
        });
    }
}

fn acts_take_their_time() {
    let world = world("late", json!({})).start();
    let act = FeedQuery::Instance { site: "app".into(), act: InstanceCommand::Wake };
    world.tell(&FromSupervisor::Ask { tag: 9, question: act });
    // Its answer would be the next to be heard, and not the one that is waited for.
    let state = show(&world, "app")["state"].clone();
    assert!(["queued", "starting"].contains(&state.as_str().unwrap_or_default()), "{state}");
    let ToSupervisor::Answer { tag: 9, text } = world.hear() else { panic!("another answer") };
    let row: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&row["ok"], &row["tier"]), (&json!(true), &json!("running")), "{row}");
    assert_eq!(world.act("nobody", InstanceCommand::Wake), Value::Null);
    world.run(async |_| until_idle(&world, "app").await);
}

fn outlived_by_nothing(world: &World) {
    let all = world.run(async |keeper| {
        run_of(&keeper, "app").await;
        until_idle(world, "app").await;
        rest(world, Tier::Frozen);
        pids(world, "app")
    });
    assert!(!all.is_empty());
    world.kill();
    world.restart();
    all.into_iter().for_each(wait_dead);
    world.run(async |keeper| {
        // The new keeper starts another.
        tokio::time::timeout(Duration::from_secs(30), run_of(&keeper, "app")).await.unwrap();
    });
}
