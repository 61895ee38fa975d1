//! The keeper's own life: its peers, its end, its death, and the feed.
//!
//! Not here: what it starts for tenants (`programs`, `php`, `apps`).

use std::os::unix::process::CommandExt;
use std::process::Command;

use nagaya_keeper::CellMechanism;
use nagaya_keeper_api::client::{KeeperCallError, KeeperClient};
use nagaya_keeper_api::codec;
use nagaya_keeper_api::protocol::{FailureKind, KeeperMessage, Verb, VerbCall, VerbReply};
use nagaya_records::feed::FeedQuery;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::Fact;
use crate::groups;
use crate::programs::{expect_gone, sleeper};
use crate::world::{BOB, World, is_alive, pipe, read_line, run_cgi, site_name};

pub const ANYONE: &[Fact] = &[
    ("a peer that sends rubbish loses its connection and nobody else does", rubbish),
    ("verbs before the greeting are refused", greeting_first),
    ("closing a connection ends everything leased to it", connection_closes),
    ("draining ends everything", drain_ends_everything),
    ("the feed answers with status and metrics", feed_answers),
    ("without a cgroup the keeper says so and still ends process groups", process_groups),
];

pub const ROOT: &[Fact] = &[
    ("a peer of another uid is refused", wrong_uid),
    ("after kill -9 children die, leftovers are cleaned and clients come back on cgroup v2", || {
        killed(CellMechanism::CgroupV2);
    }),
    ("after kill -9 children die, leftovers are cleaned and clients come back on cgroup v1", || {
        killed(CellMechanism::CgroupV1);
    }),
    ("a client that has not seen its keeper's end reaches the next keeper", unseen_end),
];

const SLEEPER: &str = "echo $$; exec sleep 1000";

fn raw_connection(world: &World) -> std::os::fd::OwnedFd {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let socket = socket.unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(world.socket()).unwrap()).unwrap();
    socket
}

/// Blocks until there is an answer or the end.
fn raw_answer(socket: &std::os::fd::OwnedFd) -> Result<KeeperMessage, codec::CodecError> {
    poll(&mut [PollFd::new(socket, PollFlags::IN)], None).unwrap();
    codec::receive::<KeeperMessage>(socket, &mut Vec::new()).map(|(answer, _)| answer)
}

fn rubbish() {
    let world = World::new().with_cgi(SLEEPER).start();
    world.run(async |keeper| {
        let (pid, guard) = sleeper(&keeper).await;
        let mut longer = codec::encode(&VerbCall { tag: 1, verb: Verb::Status }).unwrap();
        longer.push(0);
        for bytes in [&b"\xff\xff\xff\xff\xff\xff"[..], b"GET / HTTP/1.1\r\n\r\n", &[7; 150_000], &longer] {
            let socket = raw_connection(&world);
            rustix::net::sockopt::set_socket_send_buffer_size(&socket, 1 << 20).unwrap();
            rustix::net::send(&socket, bytes, SendFlags::empty()).unwrap();
            assert!(matches!(raw_answer(&socket), Err(codec::CodecError::Closed)), "{}", bytes.len());
        }
        assert!(is_alive(pid), "another connection's process is untouched");
        guard.end().await.unwrap();
    });
}

fn greeting_first() {
    let world = World::new().start();
    for verb in [Verb::Status, Verb::Hello { version: 999 }, Verb::OpenRoot { site: site_name("x") }] {
        let socket = raw_connection(&world);
        codec::send(&socket, &codec::encode(&VerbCall { tag: 4, verb }).unwrap(), &[]).unwrap();
        match raw_answer(&socket).unwrap() {
            KeeperMessage::Reply {
                tag: 4,
                reply: VerbReply::Failed { failure: FailureKind::Invalid, code: 313, .. },
            } => {}
            other => panic!("{other:?}"),
        }
    }
}

fn connection_closes() {
    let world = World::new().with_cgi(SLEEPER).start();
    let pids = world.run(async |keeper| {
        let other = KeeperClient::connect(&world.socket()).await.unwrap();
        let (kept, kept_guard) = sleeper(&other).await;
        let (first, guard) = sleeper(&keeper).await;
        let (second, another) = sleeper(&keeper).await;
        drop(keeper);
        // Guards of a lost connection are void, and say so.
        assert_eq!(guard.ended().await, Err(KeeperCallError::Gone));
        assert_eq!(another.end().await, Err(KeeperCallError::Gone));
        expect_gone(first);
        expect_gone(second);
        assert!(is_alive(kept), "another connection's process is untouched");
        kept_guard.end().await.unwrap();
        [first, second, kept]
    });
    assert!(pids.iter().all(|pid| !is_alive(*pid)));
}

fn drain_ends_everything() {
    let world = World::new().with_cgi(SLEEPER).start();
    let dirs = groups::of_keeper(world.keeper_pid());
    let (pid, _guard) = world.run(async |keeper| sleeper(&keeper).await);
    assert!(world.drain(), "{}", world.log());
    assert!(!is_alive(pid));
    assert!(dirs.iter().all(|dir| !dir.exists()), "{dirs:?}");
    assert!(!world.log().contains("NGY0315"), "{}", world.log());
}

fn feed_answers() {
    let world = World::new().with_cgi("exit 0").start();
    world.run(async |keeper| {
        let process = run_cgi(&keeper).await;
        process.guard.ended().await.unwrap();
    });
    let status: serde_json::Value = serde_json::from_str(&world.ask(FeedQuery::Status)).unwrap();
    assert_eq!(status["processes"]["cgi"], serde_json::json!({"running": 0, "started": 1, "failed": 0}));
    assert_eq!(status["revision"], 7);
    let metrics = world.ask(FeedQuery::Metrics);
    let started: Vec<_> = metrics.lines().filter(|line| line.starts_with("nagaya_keeper_started")).collect();
    assert!(started.contains(&"nagaya_keeper_started_total{kind=\"cgi\"} 1"), "{started:?}");
}

fn process_groups() {
    let world = World::new()
        .fenced(CellMechanism::ProcessGroup)
        .with_cgi("sleep 1000 & echo $!; exec sleep 1000")
        .start();
    world.run(async |keeper| {
        assert!(keeper.status().await.unwrap().contains("\"fence\":\"process-group\""));
        let (pid, guard) = sleeper(&keeper).await;
        guard.end().await.unwrap();
        expect_gone(pid);
    });
    assert!(world.log().contains("NGY0316"), "{}", world.log());
}

fn wrong_uid() {
    let world = World::new().start();
    // A whole connection as bob: it may connect, and is hung up on without an answer.
    let script = r#"use Socket; socket(S, PF_UNIX, SOCK_SEQPACKET, 0) or die; connect(S, sockaddr_un($ARGV[0])) or die "connect: $!";
        syswrite(S, "\x01\x00\x01"); my $n = sysread(S, my $got, 100); print defined $n ? "got $n" : "got nothing";"#;
    let said =
        Command::new("perl").args(["-e", script]).arg(world.socket()).uid(BOB).gid(BOB).output().unwrap();
    let words = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(["got 0", "got nothing"].contains(&words.as_str()), "{said:?}");
    assert!(world.log().contains("another uid"), "{}", world.log());
    world.run(async |keeper| keeper.status().await.unwrap());
}

fn unseen_end() {
    let world = World::new().start();
    world.run(async |keeper| {
        keeper.status().await.unwrap();
        // Nothing here waits, so the client's reader gets no turn in between.
        world.kill();
        world.restart();
        keeper.status().await.unwrap();
    });
}

fn killed(fence: CellMechanism) {
    let daemon = r"setsid sh -c 'echo $$; exec sleep 1000 >/dev/null 2>&1' & echo $$; exec sleep 1000";
    let world = World::new().fenced(fence).with_cgi(daemon).start();
    world.run(async |keeper| {
        let process = run_cgi(&keeper).await;
        let mut out = pipe(process.stdout);
        let pids: [i32; 2] =
            [read_line(&mut out).await.parse().unwrap(), read_line(&mut out).await.parse().unwrap()];
        let dirs = groups::of_keeper(world.keeper_pid());
        assert!(!dirs.is_empty());
        world.kill();
        assert_eq!(process.guard.ended().await, Err(KeeperCallError::Gone));
        world.restart();
        for pid in pids {
            expect_gone(pid);
        }
        assert!(dirs.iter().all(|dir| !dir.exists()), "{dirs:?}");
        // The same client works on.
        let process = run_cgi(&keeper).await;
        process.guard.end().await.unwrap();
    });
}
