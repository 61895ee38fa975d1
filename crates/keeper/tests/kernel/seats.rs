//! Requests to an application that have a cell of their own in it: which process gets one, what holds there, and that it is
//! back in time.
//!
//! Not here: cells of programs that serve one request (`cells`), what limits do (`limits`), what the edge asks for.

use std::collections::BTreeSet;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use nagaya_keeper_api::client::{EnterResult, InstanceUse, KeeperCallError, KeeperClient, RequestCellGuard};
use nagaya_keeper_api::protocol::{ConnectionId, FailureKind, InstanceId};
use nagaya_records::cell::{
    Boost, CellName, CellScope, CgroupController, Confinement, CpuQuota, Demotion, LimitSet, NamedCell,
};
use nagaya_records::instance::{InstanceCommand, Tier};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::rest::{pids, until_at};
use crate::world::{World, refusal, site_name, until_so};
use crate::{CellFact, groups};

pub const CELLS: &[CellFact] = &[
    (
        &["cpu", "cpuacct", "pids"],
        "a worker is in the cell of the request it serves, slowed there alone, and back when that has ended",
        one_worker,
    ),
    (&["cpu", "pids"], "a worker that accepts connections to a port is known as well", on_a_port),
    (
        &["cpu", "pids"],
        "a process that serves several requests at once stays where its instance is",
        several_at_once,
    ),
    (
        &["cpu", "cpuacct"],
        "a request in an instance that has used much is slowed down, and its worker's next one is not",
        demoted,
    ),
    (
        &["cpu", "pids"],
        "a worker whose connection is accepted late is found then, and one that serves somebody new is not left behind",
        late,
    ),
    (
        &["cpu", "pids"],
        "an instance that rests, and one whose edge is gone, has all its processes with it",
        back_in_time,
    ),
    (&["cpu"], "a request's own limit above its site's holds while that is raised", beneath_a_boost),
    (&["cpu", "pids"], "no connection of another instance, and no invented one, moves a process", hostile),
];

/// As prefork servers do it: each worker accepts for itself and serves one connection after the other. Says its number in the
/// sandbox after each line it is told: `burn N` takes N milliseconds of CPU time before, `fork` starts a child that stays.
const WORKERS: &str = r#"
use Socket;
if ($ENV{PORT}) {
    socket(S, PF_INET, SOCK_STREAM, 0) or die;
    bind(S, sockaddr_in($ENV{PORT}, INADDR_LOOPBACK)) or die "bind: $!";
} else {
    socket(S, PF_UNIX, SOCK_STREAM, 0) or die;
    bind(S, sockaddr_un($ENV{NAGAYA_SOCKET})) or die "bind: $!";
}
listen(S, 64) or die;
$SIG{PIPE} = 'IGNORE';
for (1 .. $ENV{WORKERS}) {
    next if fork;
    while (accept(C, S)) {
        while (defined(my $line = readline(C))) {
            if ($line =~ /^burn (\d+)/) {
                my $end = $1 / 1000 + (times)[0] + (times)[1];
                my $n;
                do { $n++ for 1 .. 10000 } while (times)[0] + (times)[1] < $end;
            }
            if ($line =~ /^fork/ && !fork) { close C; close S; sleep 1000; exit }
            syswrite(C, "$$\n");
        }
        close C;
    }
    exit;
}
sleep 1000 while 1;
"#;

/// One process and one thread for all connections.
const LOOP: &str = r#"
import os, selectors, socket
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.environ["NAGAYA_SOCKET"])
listener.listen(64)
wait = selectors.DefaultSelector()
wait.register(listener, selectors.EVENT_READ)
while True:
    for key, _ in wait.select():
        if key.fileobj is listener:
            wait.register(listener.accept()[0], selectors.EVENT_READ)
        elif line := key.fileobj.recv(100):
            key.fileobj.send(line)
        else:
            wait.unregister(key.fileobj)
            key.fileobj.close()
"#;

/// A thread for each connection.
const THREADS: &str = r#"
import os, socketserver
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line)
server = socketserver.ThreadingUnixStreamServer(os.environ["NAGAYA_SOCKET"], Echo)
server.serve_forever()
"#;

fn world(workers: u32, listen: &str) -> World {
    let mut world = World::new().with(|options| options.instances.image_bytes_max = 0);
    world.script("server.pl", WORKERS);
    world.script("loop.py", LOOP);
    world.script("threads.py", THREADS);
    let app = |command: &[&str], listen: &str| {
        json!({"kind": "app", "command": command, "directory": "www", "listen": listen,
            "env": {"WORKERS": workers.to_string()}, "idle": {"quiet": 3600}})
    };
    world.site("app", "alice", app(&["perl", "server.pl"], listen));
    world.site("loop", "alice", app(&["python3", "loop.py"], "socket"));
    world.site("threads", "alice", app(&["python3", "threads.py"], "socket"));
    world.start()
}

fn cpu(thousandths: u32) -> Confinement {
    let cpu = Some(CpuQuota::of_core(thousandths));
    Confinement {
        limits: LimitSet { cpu, processes: Some(20), ..LimitSet::default() },
        ..Confinement::default()
    }
}

/// A connection, as the edge knows it.
fn line(socket: &OwnedFd) -> ConnectionId {
    match rustix::net::sockopt::socket_domain(socket).unwrap() {
        rustix::net::AddressFamily::UNIX => {
            ConnectionId::Unix { inode: u32::try_from(rustix::fs::fstat(socket).unwrap().st_ino).unwrap() }
        }
        _ => ConnectionId::Tcp {
            port: TcpStream::from(socket.try_clone().unwrap()).local_addr().unwrap().port(),
        },
    }
}

/// What is told is answered to with a line.
async fn tell(socket: &OwnedFd, what: &str) -> String {
    let copy = socket.as_fd().try_clone_to_owned().unwrap();
    let stream = std::os::unix::net::UnixStream::from(copy);
    // The runtime does not care what kind of stream it is.
    let mut stream = tokio::net::UnixStream::from_std(stream).unwrap();
    stream.write_all(format!("{what}\n").as_bytes()).await.unwrap();
    let mut said = Vec::new();
    while said.last() != Some(&b'\n') {
        said.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(said).unwrap().trim_end().to_owned()
}

async fn awake(keeper: &KeeperClient, site: &str) -> InstanceUse {
    keeper.use_instance(&site_name(site), None).await.unwrap()
}

async fn seated(
    keeper: &KeeperClient,
    id: InstanceId,
    socket: &OwnedFd,
    asked: &Confinement,
) -> (RequestCellGuard, String) {
    match keeper.enter_instance(id, line(socket), asked).await.unwrap() {
        EnterResult::Seated { guard, cell } => (guard, cell.into()),
        other => panic!("{other:?}"),
    }
}

/// The cells of requests beneath alice's site: their names, and how many processes are in each.
fn cells(world: &World, site: &str) -> Vec<(String, u64)> {
    let all = world.cells();
    let of_site = |cell: &&Value| cell["kind"] == "request" && cell["site"] == site;
    let cell = |cell: &Value| {
        (cell["path"].as_str().unwrap().to_owned(), cell["usage"]["processes"].as_u64().unwrap())
    };
    all["cells"].as_array().unwrap().iter().filter(of_site).map(cell).collect()
}

/// Returns once all of a site's processes are in one cell.
async fn until_together(world: &World, site: &str) {
    until_so(|| cells(world, site).len() == 1).await;
}

fn one_worker() {
    let world = world(2, "socket");
    world.run(async |keeper| {
        let used = awake(&keeper, "app").await;
        let (id, limited) = (used.guard.id(), used.socket);
        let other = keeper.connect_instance(id).await.unwrap();
        until_so(|| pids(&world, "app").len() == 4).await;
        let before: BTreeSet<i32> = pids(&world, "app").into_iter().collect();
        let [(home, 4)] = &cells(&world, "app")[..] else { panic!("{:?}", cells(&world, "app")) };

        let (guard, cell) = seated(&keeper, id, &limited, &cpu(100)).await;
        assert_ne!(cell, *home);
        assert!(cell.starts_with("alice/app/"), "{cell}");
        let now = cells(&world, "app");
        assert!(now.contains(&(cell.clone(), 1)) && now.contains(&(home.clone(), 3)), "{now:?}");
        let inside = world.cell(&cell).unwrap();
        assert_eq!(inside["limits"]["cpu"]["quota_us"], 1_000);
        // Where it really is, in the kernel's words.
        let here = groups::of(*before.first().unwrap(), "cpu");
        let away: Vec<i32> = before.iter().copied().filter(|pid| groups::of(*pid, "cpu") != here).collect();
        let [worker] = away[..] else { panic!("{away:?}") };
        assert_eq!(groups::cpu_quota(&groups::of(worker, "cpu")), Some((1_000, 10_000)));
        assert_eq!(groups::of(worker, "cpu").parent(), here.parent(), "beside its instance's");
        assert_eq!(groups::processes(&groups::of(worker, "pids")), Some(20));
        assert_ne!(groups::of(worker, "fence"), groups::of(*before.first().unwrap(), "fence"));

        tell(&limited, "burn 60").await;
        tell(&other, "burn 60").await;
        let throttled = world.cell(home).unwrap()["usage"]["throttled_us"].as_u64().unwrap();
        let usage = keeper.leave_seat(guard).await.unwrap();
        assert!(usage.throttled_us > 0 && usage.cpu_us >= 50_000, "{usage:?}");
        assert!(throttled == 0, "the other one stood still for {throttled} us");
        until_together(&world, "app").await;
        assert_eq!(cells(&world, "app"), [(home.clone(), 4)]);
        assert!(before.iter().all(|pid| groups::of(*pid, "pids") == groups::of(worker, "pids")));

        // The same connection's next request, and what it starts: all of it is back, and none of it ended.
        let (guard, cell) = seated(&keeper, id, &limited, &cpu(500)).await;
        tell(&limited, "fork").await;
        until_so(|| cells(&world, "app").contains(&(cell.clone(), 2))).await;
        keeper.leave_seat(guard).await.unwrap();
        until_so(|| cells(&world, "app") == [(home.clone(), 5)]).await;

        // What it had started before it was found belongs to the request as well, and goes back with it.
        let (guard, cell) = seated(&keeper, id, &limited, &cpu(500)).await;
        assert!(cells(&world, "app").contains(&(cell, 2)), "{:?}", cells(&world, "app"));
        keeper.leave_seat(guard).await.unwrap();
        until_so(|| cells(&world, "app") == [(home.clone(), 5)]).await;
    });
}

fn on_a_port() {
    let world = world(2, "port");
    world.run(async |keeper| {
        let used = awake(&keeper, "app").await;
        let (id, limited) = (used.guard.id(), used.socket);
        let other = keeper.connect_instance(id).await.unwrap();
        let (guard, cell) = seated(&keeper, id, &limited, &cpu(100)).await;
        let (second, another) = seated(&keeper, id, &other, &cpu(100)).await;
        assert_ne!(cell, another);
        assert!(cells(&world, "app").contains(&(cell, 1)), "{:?}", cells(&world, "app"));
        keeper.leave_seat(guard).await.unwrap();
        keeper.leave_seat(second).await.unwrap();
        until_together(&world, "app").await;
    });
}

fn several_at_once() {
    let world = world(1, "socket");
    world.run(async |keeper| {
        let stays = async |used: &InstanceUse, site: &str| {
            let entered =
                keeper.enter_instance(used.guard.id(), line(&used.socket), &cpu(100)).await.unwrap();
            let EnterResult::Unseated { cell, for_good: true } = entered else {
                panic!("{site}: {entered:?}")
            };
            assert_eq!(cells(&world, site).iter().map(|(name, _)| name).collect::<Vec<_>>(), [&*cell]);
        };
        let used = awake(&keeper, "threads").await;
        tell(&used.socket, "it has its thread").await;
        stays(&used, "threads").await;

        // Alone it cannot be told from one that serves one after the other, until it is seen to serve another.
        let used = awake(&keeper, "loop").await;
        let (guard, _) = seated(&keeper, used.guard.id(), &used.socket, &cpu(100)).await;
        let other = keeper.connect_instance(used.guard.id()).await.unwrap();
        tell(&other, "it is accepted").await;
        until_together(&world, "loop").await;
        assert_eq!(
            refusal(keeper.leave_seat(guard).await).0,
            FailureKind::NotFound,
            "nobody can say what it used"
        );
        drop(other);
        stays(&used, "loop").await;
    });
}

fn demoted() {
    let world = world(1, "socket");
    let step = Demotion { after_cpu_us: 20_000, limits: cpu(50).limits };
    let asked = Confinement { demotions: vec![step], ..Confinement::default() };
    world.run(async |keeper| {
        let used = awake(&keeper, "app").await;
        let (guard, cell) = seated(&keeper, used.guard.id(), &used.socket, &asked).await;
        assert!(world.cell(&cell).unwrap()["limits"]["cpu"].is_null());
        tell(&used.socket, "burn 80").await;
        assert_eq!(world.cell(&cell).unwrap()["limits"]["cpu"]["quota_us"], 1_000);
        let usage = keeper.leave_seat(guard).await.unwrap();
        assert_eq!(usage.demoted, 1);
        let (guard, cell) = seated(&keeper, used.guard.id(), &used.socket, &asked).await;
        assert!(world.cell(&cell).unwrap()["limits"]["cpu"].is_null());
        assert_eq!(keeper.leave_seat(guard).await.unwrap().demoted, 0);
    });
}

fn late() {
    let world = world(1, "socket");
    world.run(async |keeper| {
        let used = awake(&keeper, "app").await;
        let id = used.guard.id();
        tell(&used.socket, "it is accepted").await;
        // The only worker is busy: this one waits in its queue.
        let waits = keeper.connect_instance(id).await.unwrap();
        let (guard, first) = seated(&keeper, id, &used.socket, &cpu(100)).await;
        let entering = {
            let (keeper, line) = (Rc::clone(&keeper), line(&waits));
            tokio::task::spawn_local(async move { keeper.enter_instance(id, line, &cpu(200)).await.unwrap() })
        };
        // Its connection ends before the edge says so: the worker takes the next one, which is in no other's cell.
        drop(used.socket);
        let EnterResult::Seated { guard: next, cell } = entering.await.unwrap() else {
            panic!("it is not seated")
        };
        assert_eq!(world.cell(&cell).unwrap()["limits"]["cpu"]["quota_us"], 2_000);
        assert!(cells(&world, "app").contains(&(cell.to_string(), 1)), "{first}: {:?}", cells(&world, "app"));
        keeper.leave_seat(guard).await.unwrap();
        assert!(
            cells(&world, "app").contains(&(cell.to_string(), 1)),
            "the end of the first is not the second's"
        );
        keeper.leave_seat(next).await.unwrap();
        until_together(&world, "app").await;

        // One that is given up while it waits leaves nothing.
        tell(&waits, "it is accepted").await;
        let third = keeper.connect_instance(id).await.unwrap();
        let given_up = {
            let (keeper, line) = (Rc::clone(&keeper), line(&third));
            tokio::task::spawn_local(
                async move { keeper.enter_instance(id, line, &cpu(200)).await.map(drop) },
            )
        };
        tokio::task::yield_now().await;
        given_up.abort();
        drop(waits);
        tell(&third, "it is accepted").await;
        until_together(&world, "app").await;
    });
}

fn back_in_time() {
    let world = world(2, "socket");
    world.run(async |keeper| {
        let InstanceUse { socket, guard, .. } = awake(&keeper, "app").await;
        let (seat, _) = seated(&keeper, guard.id(), &socket, &cpu(100)).await;
        assert_eq!(cells(&world, "app").len(), 2);
        // An edge that gives the instance back before the seat.
        drop(guard);
        crate::rest::until_idle(&world, "app").await;
        assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Frozen) })["ok"], true);
        until_at(&world, "app", "frozen").await;
        assert_eq!(cells(&world, "app").len(), 1, "what is frozen is all of it");
        keeper.leave_seat(seat).await.unwrap();

        let again = KeeperClient::connect(&world.socket()).await.unwrap();
        let used = awake(&again, "app").await;
        let seat = seated(&again, used.guard.id(), &used.socket, &cpu(100)).await;
        assert_eq!(cells(&world, "app").len(), 2);
        drop(again);
        until_together(&world, "app").await;
        // Both workers are free again.
        drop((socket, used, seat));

        // What ends while a request is in it leaves no cell.
        let used = awake(&keeper, "app").await;
        let _seat = seated(&keeper, used.guard.id(), &used.socket, &cpu(100)).await;
        world.act("app", InstanceCommand::Stop);
        until_so(|| cells(&world, "app").iter().all(|(_, processes)| *processes == 0)).await;
        drop(_seat);
        until_so(|| cells(&world, "app").is_empty()).await;
    });
    assert!(world.drain(), "{}", world.log());
}

fn beneath_a_boost() {
    let mut world = World::new().with(|options| options.instances.image_bytes_max = 0);
    world.script("server.pl", WORKERS);
    let app = json!({"kind": "app", "command": ["perl", "server.pl"], "directory": "www", "env": {"WORKERS": "2"}, "start_seconds": 300});
    world.site_with("app", "alice", app, json!({"limits": {"cpu": "50%"}}));
    let world = world.start();
    world.run(async |keeper| {
        let used = awake(&keeper, "app").await;
        let id = used.guard.id();
        let (seat, _) = seated(&keeper, id, &used.socket, &cpu(800)).await;
        let running = pids(&world, "app");
        let first = *running.iter().min().unwrap();
        let home = groups::of(first, "cpu");
        let cell = running.iter().map(|pid| groups::of(*pid, "cpu")).find(|group| *group != home).unwrap();
        let site = groups::above(first, "cpu", "site-app").unwrap();
        // On v1 a quota above that of the cell over it is not written.
        let beneath = groups::cpu_quota(&cell);
        assert_eq!(beneath, groups::is_v2("cpu").then_some((8_000, 10_000)));
        let more = Boost { cpu: Some(CpuQuota::of_core(1_500)), cpu_shares: None };
        let (boost, granted) = keeper.boost_instance(id, more).await.unwrap();
        assert_eq!(granted, more);
        assert_eq!(groups::cpu_quota(&site), Some((15_000, 10_000)));
        assert_eq!(groups::cpu_quota(&cell), Some((8_000, 10_000)));
        drop(boost);
        until_so(|| groups::cpu_quota(&site) == Some((5_000, 10_000))).await;
        assert_eq!(groups::cpu_quota(&cell), beneath);
        keeper.leave_seat(seat).await.unwrap();
    });
}

fn hostile() {
    let mut world = World::new().with(|options| options.instances.image_bytes_max = 0);
    let app = || {
        json!({"kind": "app", "command": ["perl", "www/server.pl"], "directory": "", "env": {"WORKERS": "2"},
            "idle": {"quiet": 3600}})
    };
    for (name, tenant) in [("app", "alice"), ("bobs", "bob")] {
        world.script_of(tenant, "server.pl", WORKERS);
        world.site(name, tenant, app());
    }
    let world = world.start();
    world.run(async |keeper| {
        let (used, bobs) = (awake(&keeper, "app").await, awake(&keeper, "bobs").await);
        tell(&bobs.socket, "it is accepted").await;
        let enter = async |id, line| keeper.enter_instance(id, line, &cpu(100)).await;
        let is_nobodys = |entered: Result<EnterResult, KeeperCallError>| match entered {
            Ok(EnterResult::Unseated { cell, .. }) => assert!(cell.starts_with("alice/app/"), "{cell}"),
            other => panic!("{other:?}"),
        };
        // Another tenant's connection, none at all, and one of the other kind.
        is_nobodys(enter(used.guard.id(), line(&bobs.socket)).await);
        is_nobodys(enter(used.guard.id(), ConnectionId::Unix { inode: 1 }).await);
        is_nobodys(enter(used.guard.id(), ConnectionId::Tcp { port: 80 }).await);
        assert_eq!((cells(&world, "app").len(), cells(&world, "bobs").len()), (1, 1));
        // An instance that this edge does not use, and limits that nobody may have.
        let other = KeeperClient::connect(&world.socket()).await.unwrap();
        let foreign = other.enter_instance(used.guard.id(), line(&used.socket), &cpu(100)).await;
        assert_eq!(refusal(foreign), (FailureKind::NotFound, 301));
        let odd = Confinement {
            limits: LimitSet { cpu_shares: Some(1), ..LimitSet::default() },
            ..Confinement::default()
        };
        let asked = keeper.enter_instance(used.guard.id(), line(&used.socket), &odd).await;
        assert_eq!(refusal(asked), (FailureKind::Invalid, 318));
        // It stays beneath its site, whatever cell is named: what must stop with the site is there.
        let named = NamedCell {
            name: CellName::parse("elsewhere").unwrap(),
            scope: CellScope::Node,
            controllers: CgroupController::ALL.to_vec(),
            limits: Some(LimitSet::default()),
        };
        let asked = Confinement { named: vec![named], ..cpu(100) };
        let (_seat, cell) = seated(&keeper, used.guard.id(), &used.socket, &asked).await;
        assert!(cell.starts_with("alice/app/"), "{cell}");
    });
}
