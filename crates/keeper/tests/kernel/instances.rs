//! Kept applications: started once, restarted with pauses, ended with their record.
//!
//! Not here: HTTP to them (`edge`).

use std::os::fd::OwnedFd;
use std::time::Duration;

use nagaya_keeper_api::client::{KeeperCallError, KeeperClient};
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::RecordChange;
use nagaya_records::feed::FeedQuery;
use nagaya_records::instance::{InstanceCommand, RunUsage, Tier};
use rustix::process::Pid;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

use crate::rest::{NEVER, pids};
use crate::world::{
    ALICE, World, is_alive, read_socket, refusal, site_change, site_name, until_so, wait_dead,
};
use crate::{CellFact, Fact, groups};

pub const ROOT: &[Fact] = &[
    ("many who need an application at once start it once, under its tenant's uid", started_once),
    ("an application may listen on a port it is given", on_a_port),
    ("an application that ends early is reported, logged, and not restarted at once", ends_early),
    ("an application that never listens is given up", never_listens),
    ("an application that crashed is started again, the second time after a pause", restarted_after_crash),
    ("an application ends when its record changes and when the keeper does", ends_with_record),
    ("an application cannot lead the keeper to another's socket", no_foreign_socket),
];

pub const CELLS: &[CellFact] = &[
    (
        &["cpu", "pids"],
        "limits of an application's site hold for it while it runs, as soon as its record says so",
        limits_follow,
    ),
    (
        &["cpu"],
        "an application's CPU limit is raised while it runs, until its record says otherwise",
        cpu_raised,
    ),
    (
        &["cpu"],
        "an application that is woken for somebody goes first on the processor, until it answers or for a moment",
        goes_first,
    ),
    (&["cpu"], "what an application used, and how long it was held up by its limit, is told", load_told),
];

/// Says its uid, pid and directory to everyone who connects.
const SERVER: &str = r#"
use Socket;
my $name = $ENV{NAGAYA_SOCKET};
die "no socket" unless $ARGV[0] eq $name;
socket(S, PF_UNIX, SOCK_STREAM, 0) or die;
bind(S, sockaddr_un($name)) or die "bind: $!";
listen(S, 64) or die;
# Who looks whether it listens does not stay for an answer.
$SIG{PIPE} = 'IGNORE';
$| = 1; print "listening\n";
my $run = time . rand;
while (accept(C, S)) { syswrite(C, "$> $run $ENV{MODE}"); close C; }
"#;

const PORT_SERVER: &str = r#"
use Socket;
die "no port" unless $ARGV[0] == $ENV{PORT};
socket(S, PF_INET, SOCK_STREAM, 0) or die;
bind(S, sockaddr_in($ENV{PORT}, INADDR_LOOPBACK)) or die "bind: $!";
listen(S, 64) or die;
$SIG{PIPE} = 'IGNORE';
while (accept(C, S)) { syswrite(C, "$> port"); close C; }
"#;

/// A connection to a site's instance, which may rest again at once.
async fn connect(keeper: &KeeperClient, site: &str) -> Result<OwnedFd, KeeperCallError> {
    keeper.use_instance(&site_name(site), None).await.map(|instance| instance.socket)
}

fn app(mode: &str) -> Value {
    json!({"kind": "app", "command": ["perl", "www/server.pl", "{socket}"], "directory": "", "env": {"MODE": mode}})
}

fn shell(script: &str) -> Value {
    json!({"kind": "app", "command": ["sh", "-c", script], "directory": "www", "start_seconds": 1})
}

/// What ends by itself is started anew then, whether or not there is a CRIU.
fn without_images() -> World {
    World::new().with(|options| options.instances.image_bytes_max = 0)
}

fn with_server() -> World {
    let mut world = without_images();
    world.script("server.pl", SERVER);
    world.site("app", "alice", app("one"));
    world
}

/// What a server says that tells this run of it from any other.
fn run_of(said: &str) -> String {
    said.split(' ').nth(1).unwrap().to_owned()
}

/// The processes of a site's instance, by their numbers on the node. The first is the sandbox's own, where there is one.
fn started_once() {
    let world = with_server().start();
    world.run(async |keeper| {
        let calls: Vec<_> = (0..20)
            .map(|_| {
                let keeper = keeper.clone();
                tokio::task::spawn_local(async move { connect(&keeper, "app").await.unwrap() })
            })
            .collect();
        let mut said = Vec::new();
        for call in calls {
            said.push(read_socket(call.await.unwrap()).await);
        }
        assert!(said[0].starts_with(&format!("{ALICE} ")) && said[0].ends_with(" one"), "{said:?}");
        assert!(said.iter().all(|text| *text == said[0]), "{said:?}");
        // Its output comes to the log by itself.
        until_so(|| world.log().contains("listening")).await;
    });
}

fn on_a_port() {
    let mut world = without_images();
    world.script("server.pl", PORT_SERVER);
    let record = json!({"kind": "app", "command": ["/usr/bin/perl", "server.pl", "{port}"], "directory": "www", "listen": "port"});
    world.site("app", "alice", record);
    let world = world.start();
    world.run(async |keeper| {
        let socket = connect(&keeper, "app").await.unwrap();
        let mut stream = tokio::net::TcpStream::from_std(std::net::TcpStream::from(socket)).unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).await.unwrap();
        assert_eq!(said, format!("{ALICE} port"));
    });
}

fn ends_early() {
    let mut world = without_images();
    world.site("app", "alice", shell("echo its last words >&2; exit 4"));
    world.site("lost", "alice", json!({"kind": "app", "command": ["no-such-program"], "directory": ""}));
    let world = world.start();
    world.run(async |keeper| {
        assert_eq!(refusal(connect(&keeper, "app").await), (FailureKind::Broken, 310));
        assert_eq!(refusal(connect(&keeper, "app").await), (FailureKind::Busy, 311));
        assert_eq!(refusal(connect(&keeper, "lost").await), (FailureKind::Broken, 332));
    });
    assert!(world.log().contains("its last words"), "{}", world.log());
}

fn never_listens() {
    let mut world = without_images();
    world.site("app", "alice", shell("exec sleep 1000"));
    let world = world.start();
    world.run(async |keeper| {
        assert_eq!(refusal(connect(&keeper, "app").await), (FailureKind::Broken, 310));
    });
    assert!(pids(&world, "app").is_empty(), "nothing of it is left");
}

/// Kills the application, as a bug in it would.
fn crash(world: &World) {
    let pid = *pids(world, "app").last().unwrap();
    rustix::process::kill_process(Pid::from_raw(pid).unwrap(), rustix::process::Signal::KILL).unwrap();
    wait_dead(pid);
}

fn restarted_after_crash() {
    let world = with_server().start();
    world.run(async |keeper| {
        let first = run_of(&read_socket(connect(&keeper, "app").await.unwrap()).await);
        crash(&world);
        // The keeper may notice the death a moment after this test has.
        let second = loop {
            let said = read_socket(connect(&keeper, "app").await.unwrap()).await;
            if !said.is_empty() {
                break run_of(&said);
            }
        };
        assert_ne!(first, second, "one crash is no reason to wait");
        crash(&world);
        // Asking is the only way to see the pause end; each answer until then must say that it lasts.
        let mut interval = tokio::time::interval(Duration::from_millis(50));
        let mut paused = 0;
        let third = loop {
            interval.tick().await;
            match connect(&keeper, "app").await {
                Ok(socket) => match read_socket(socket).await {
                    said if said.is_empty() => {}
                    said => break run_of(&said),
                },
                Err(error) => {
                    assert_eq!(refusal::<()>(Err(error)), (FailureKind::Busy, 311));
                    paused += 1;
                }
            }
        };
        assert!(paused > 0, "it was restarted without a pause");
        assert_ne!(third, second);
    });
}

fn ends_with_record() {
    let world = with_server().start();
    let changed = |mode: &str| {
        let record = json!({"name": "app", "tenant": "alice", "hosts": ["app.test"], "backend": app(mode)});
        RecordChange::PutSite(Box::new(serde_json::from_value(record).unwrap()))
    };
    let last = world.run(async |keeper| {
        let first = read_socket(connect(&keeper, "app").await.unwrap()).await;
        let pid = *pids(&world, "app").last().unwrap();
        // The same record again is no change.
        world.apply(vec![changed("one")]);
        assert_eq!(read_socket(connect(&keeper, "app").await.unwrap()).await, first);
        world.apply(vec![changed("two")]);
        wait_dead(pid);
        let second = read_socket(connect(&keeper, "app").await.unwrap()).await;
        assert!(second.ends_with(" two"), "{second}");
        *pids(&world, "app").last().unwrap()
    });
    assert!(is_alive(last));
    let dirs = groups::of_keeper(world.keeper_pid());
    assert!(world.drain(), "{}", world.log());
    assert!(!is_alive(last));
    assert!(dirs.iter().all(|dir| !dir.exists()), "{dirs:?}");
    assert_eq!(std::fs::read_dir(world.dir.path().join("run/apps")).unwrap().count(), 0);
}

fn limits_follow() {
    let world = with_server().start();
    world.run(async |keeper| {
        let first = read_socket(connect(&keeper, "app").await.unwrap()).await;
        let pid = pids(&world, "app")[0];
        let of = |controller: &str| groups::above(pid, controller, "site-app").unwrap();
        for (percent, processes) in [(50, 40), (20, 30), (90, 50)] {
            let limits = json!({"limits": {"cpu": format!("{percent}%"), "processes": processes}});
            world.apply(vec![site_change("app", "alice", app("one"), limits)]);
            let (quota, period) = groups::cpu_quota(&of("cpu")).unwrap();
            assert_eq!(quota * 100 / period, percent);
            assert_eq!(groups::processes(&of("pids")), Some(processes));
        }
        let last = read_socket(connect(&keeper, "app").await.unwrap()).await;
        assert_eq!((first, pid), (last, pids(&world, "app")[0]), "it ran through all of it");
    });
}

/// Of the site's cell, in percent of one core.
fn cpu_percent(world: &World) -> u64 {
    let group = groups::above(pids(world, "app")[0], "cpu", "site-app").unwrap();
    let (quota, period) = groups::cpu_quota(&group).unwrap();
    quota * 100 / period
}

fn cpu_raised() {
    let world = with_server().start();
    let limited = |cpu: &str| {
        let limits = json!({"limits": {"cpu": cpu}});
        world.apply(vec![site_change("app", "alice", app("one"), limits)]);
    };
    let raise = |thousandths| world.act("app", InstanceCommand::LimitCpu { thousandths });
    world.run(async |keeper| {
        let first = read_socket(connect(&keeper, "app").await.unwrap()).await;
        assert!(raise(Some(500))["error"].is_string(), "there is none to raise");
        limited("20%");
        assert_eq!(raise(Some(500))["ok"], true);
        assert_eq!(cpu_percent(&world), 50);
        assert_eq!(world.cell("alice/app").unwrap()["limits"]["cpu"]["quota_us"], 5_000);
        assert_eq!(raise(Some(800))["ok"], true);
        assert_eq!(cpu_percent(&world), 80);
        assert_eq!(raise(None)["ok"], true);
        assert_eq!(cpu_percent(&world), 20);
        raise(Some(500));
        // Another limit of its record changes nothing about this one.
        let limits = json!({"limits": {"cpu": "20%", "cpu_shares": 512}});
        world.apply(vec![site_change("app", "alice", app("one"), limits)]);
        assert_eq!(cpu_percent(&world), 50);
        limited("30%");
        assert_eq!(cpu_percent(&world), 30);
        let last = read_socket(connect(&keeper, "app").await.unwrap()).await;
        assert_eq!(first, last, "it ran through all of it");
    });
}

fn goes_first() {
    let mut world = without_images();
    world.script("server.pl", SERVER);
    let slow = "while [ ! -e go ]; do sleep 0.01; done; exec perl server.pl $NAGAYA_SOCKET";
    let mut backend = shell(slow);
    backend["start_seconds"] = json!(60);
    world.site("app", "alice", backend);
    world.site("other", "alice", app("one"));
    let world = world.start();
    let shares = |cell: &str| world.cell(cell).map(|cell| cell["limits"]["cpu_shares"].clone());
    let both = || [shares("alice"), shares("alice/app")];
    let as_others = [Some(Value::Null), Some(Value::Null)];
    let first = [Some(json!(8192)), Some(json!(8192))];
    world.run(async |keeper| {
        let waits = {
            let keeper = keeper.clone();
            tokio::task::spawn_local(
                async move { keeper.use_instance(&site_name("app"), None).await.unwrap() },
            )
        };
        until_so(|| both() == first).await;
        // It takes too long.
        until_so(|| both() == as_others).await;
        world.script("go", "");
        let used = waits.await.unwrap();
        assert_eq!(both(), as_others);
        drop(used);
        world.act("app", InstanceCommand::Stop);
        let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
        keeper.answered(used.guard.id());
        until_so(|| both() == as_others).await;
        let pid = pids(&world, "app")[0];
        let of = |name| groups::cpu_shares(&groups::above(pid, "cpu", name).unwrap());
        assert_eq!((of("tenant-alice"), of("site-app")), (1024, 1024));
    });
}

/// Listens, and works without a pause.
const BUSY: &str = r#"
use Socket;
socket(S, PF_UNIX, SOCK_STREAM, 0) or die;
bind(S, sockaddr_un($ENV{NAGAYA_SOCKET})) or die "bind: $!";
listen(S, 64) or die;
if (!fork) { 1 while 1 }
while (accept(C, S)) { close C; }
"#;

fn load_told() {
    let mut world = without_images();
    world.script("busy.pl", BUSY);
    // It is looked at for as long as that takes, with no connection to keep it awake.
    let backend =
        json!({"kind": "app", "command": ["perl", "www/busy.pl"], "directory": "", "idle": NEVER()});
    world.site("app", "alice", backend.clone());
    let world = world.start();
    let told = || {
        let told: Vec<RunUsage> = serde_json::from_str(&world.ask(FeedQuery::Load)).unwrap();
        told.into_iter().find(|used| used.site.as_str() == "app")
    };
    world.run(async |keeper| {
        assert_eq!(told(), None, "it never ran");
        // Its start takes longer than it may where it has little of a busy machine.
        connect(&keeper, "app").await.unwrap();
        world.apply(vec![site_change("app", "alice", backend, json!({"limits": {"cpu": "2%"}}))]);
        let first = told().expect("it runs");
        assert_eq!((first.tier, first.is_limit_changed), (Tier::Running, false));
        assert_eq!(first.limit.map(|limit| limit.quota_us * 100 / u64::from(limit.period_us)), Some(2));
        assert!(first.memory_bytes > 0, "{first:?}");
        let mut last = first.clone();
        until_so(|| {
            last = told().expect("it runs");
            // Where others leave it little time, its limit takes less of that.
            last.cpu_us > first.cpu_us && last.throttled_us > first.throttled_us
        })
        .await;
        assert!(last.run == first.run && last.at_us > first.at_us, "{last:?}");
        world.act("app", InstanceCommand::LimitCpu { thousandths: Some(400) });
        let raised = told().expect("it runs");
        assert!(raised.is_limit_changed && raised.limit != first.limit, "{raised:?}");
    });
}

fn no_foreign_socket() {
    let mut world = without_images();
    // The socket of somebody who would take the keeper for root.
    let foreign = world.dir.path().join("foreign.sock");
    let listener = std::os::unix::net::UnixListener::bind(&foreign).unwrap();
    listener.set_nonblocking(true).unwrap();
    world.site(
        "link",
        "alice",
        shell(&format!("ln -s {} $NAGAYA_SOCKET; exec sleep 1000", foreign.display())),
    );
    let world = world.start();
    world.run(async |keeper| {
        assert_eq!(refusal(connect(&keeper, "link").await), (FailureKind::Broken, 310));
    });
    let nobody = listener.accept().unwrap_err();
    assert_eq!(nobody.kind(), std::io::ErrorKind::WouldBlock);
}
