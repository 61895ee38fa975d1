//! What an application does when nobody needs it: its work keeps it from rest, its end has a time, and its own watchdogs see no hang.
//!
//! Not here: tiers of rest by themselves (`rest`), images (`wake`).

use std::fs;

use nagaya_keeper_api::client::{InstanceUse, KeeperClient};
use nagaya_records::instance::{InstanceCommand, Tier};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::Fact;
use crate::rest::{NEVER, app, pids, run_of, show, until_at, until_idle};
use crate::world::{World, site_name, until_so, wait_dead};

pub const ROOT: &[Fact] = &[
    ("an application that computes rests when it has done", rests_after_work),
    ("an application that computes for too long rests, and that is said", rests_at_its_bound),
    ("an application has the time of its record to end", has_time_to_end),
    ("an application that does not end in its time is said to be killed", is_said_to_be_killed),
    ("a restart serves newcomers at once, and lets requests of the old run finish", restarts_beside),
    ("an application of which only one can run is restarted when the old one has ended", restarts_alone),
    ("a restart ends what another one had left to finish", drains_once),
    ("parents of an application go on from a freeze after their children", parents_go_on_last),
    ("workers that a watchdog kills after a rest are named", watchdogs_are_named),
];

/// An application whose program is this text of Python, after some lines that let it serve.
fn world(program: &str, more: Value) -> World {
    let mut world = World::new().with(|options| options.instances.image_bytes_max = 0);
    let text = format!("{SERVING}\n{program}");
    world.script("work.py", &text);
    let mut record = app("", json!({"command": ["python3", "work.py"]}));
    record.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    world.site("app", "alice", record);
    world.start()
}

const SERVING: &str = r#"
import mmap, os, signal, socket, struct, sys, threading, time
def listen():
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.environ['NAGAYA_SOCKET'])
    listener.listen(64)
    return listener
def talk(connection):
    # Who only looks whether it listens says nothing.
    try:
        if connection.recv(65536): connection.sendall(b'HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nrun')
    except OSError: pass
    connection.close()
def answer(connection):
    threading.Thread(target=talk, args=(connection,), daemon=True).start()
"#;

const WORKS: &str = r#"
def work():
    while not os.path.exists('done'): pass
threading.Thread(target=work, daemon=True).start()
listener = listen()
while True: answer(listener.accept()[0])
"#;

fn frozen_after(seconds: u32) -> Value {
    let mut idle = NEVER();
    idle["frozen"] = json!(seconds);
    idle
}

fn rests_after_work() {
    let world = world(WORKS, json!({"idle": frozen_after(1)}));
    world.run(async |keeper| {
        run_of(&keeper, "app").await;
        until_idle(&world, "app").await;
        let before = show(&world, "app")["cpu_us"].as_u64().unwrap();
        // What is frozen uses none.
        until_so(|| show(&world, "app")["cpu_us"].as_u64().unwrap() > before + 4_000_000).await;
        assert_eq!(show(&world, "app")["tier"], "running");
        fs::write(world.home("alice").join("www/done"), "").unwrap();
        until_at(&world, "app", "frozen").await;
        assert!(show(&world, "app")["note"].is_null(), "nothing was cut");
    });
}

fn rests_at_its_bound() {
    let world = world(WORKS, json!({"idle": frozen_after(1), "linger_seconds": 3}));
    world.run(async |keeper| {
        run_of(&keeper, "app").await;
        until_at(&world, "app", "frozen").await;
        let note = show(&world, "app")["note"].as_str().unwrap_or_default().to_owned();
        assert!(note.contains("although it computes") && note.contains("NGY0352"), "{note}");
        assert!(world.log().contains("NGY0352"));
    });
}

/// Ends by itself, some seconds after it is told to.
const ENDS_LATE: &str = r#"
def end(*_):
    time.sleep(4)
    open('ended', 'w').close()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
listener = listen()
while True: answer(listener.accept()[0])
"#;

fn has_time_to_end() {
    let world = world(ENDS_LATE, json!({"stop_seconds": 300}));
    world.run(async |keeper| {
        run_of(&keeper, "app").await;
        until_idle(&world, "app").await;
        let row = world.act("app", InstanceCommand::Stop);
        assert_eq!((&row["ok"], &row["last_end"]), (&json!(true), &Value::Null), "{row}");
        assert!(world.home("alice").join("www/ended").exists());
    });
}

fn is_said_to_be_killed() {
    let world = world(ENDS_LATE, json!({"stop_seconds": 0}));
    world.run(async |keeper| {
        run_of(&keeper, "app").await;
        until_idle(&world, "app").await;
        let all = pids(&world, "app");
        let row = world.act("app", InstanceCommand::Stop);
        let end = row["last_end"].as_str().unwrap_or_default();
        assert!(end.contains("had not ended 0 s after SIGTERM") && end.contains("NGY0353"), "{row}");
        all.into_iter().for_each(wait_dead);
        assert!(!world.home("alice").join("www/ended").exists());
        assert!(world.log().contains("NGY0353"));
    });
}

/// A worker that gives a sign of life each 10 ms, and its parent, which notes when the last one was long ago.
const WATCHED: &str = r#"
listener = listen()
life = mmap.mmap(-1, 8)
def beat(): life[:8] = struct.pack('d', time.monotonic())
beat()
if os.fork() == 0:
    listener.settimeout(0.01)
    while True:
        beat()
        try: answer(listener.accept()[0])
        except TimeoutError: pass
while True:
    if time.monotonic() - struct.unpack('d', life[:8])[0] > 0.3: open('hang', 'w').close()
    time.sleep(0.01)
"#;

/// Frozen for longer than a moment.
async fn freeze(world: &World) {
    until_idle(world, "app").await;
    assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Frozen) })["tier"], "frozen");
    until_so(|| show(world, "app")["since_seconds"].as_u64().unwrap() >= 1).await;
}

fn parents_go_on_last() {
    let world = world(WATCHED, json!({}));
    world.run(async |keeper| {
        run_of(&keeper, "app").await;
        let hang = world.home("alice").join("www/hang");
        // A start on a busy node is none.
        let _ = fs::remove_file(&hang);
        for round in 0..8 {
            freeze(&world).await;
            let _ = fs::remove_file(&hang);
            assert_eq!(run_of(&keeper, "app").await, "run");
            assert!(!hang.exists(), "round {round}: the parent ran first");
        }
    });
}

/// A parent that replaces its worker whenever it has stood still.
const KILLS: &str = r#"
listener = listen()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def serve():
    child = os.fork()
    if child == 0:
        while True: answer(listener.accept()[0])
    return child
child, last = serve(), time.monotonic()
while True:
    if time.monotonic() - last > 0.5:
        os.kill(child, signal.SIGKILL)
        child = serve()
    last = time.monotonic()
    time.sleep(0.01)
"#;

fn watchdogs_are_named() {
    let world = world(KILLS, json!({}));
    world.run(async |keeper| {
        run_of(&keeper, "app").await;
        freeze(&world).await;
        assert_eq!(world.act("app", InstanceCommand::Wake)["ok"], true);
        until_so(|| {
            let note = show(&world, "app")["note"].as_str().unwrap_or_default().to_owned();
            note.contains("ended right after a rest") && note.contains("NGY0354")
        })
        .await;
        assert!(world.log().contains("NGY0354"));
    });
}

/// Each run says its own number, and one that is told to goes on when it is asked on the same connection.
const NUMBERED: &str = r#"
number = os.urandom(8).hex().encode()
def serve(connection):
    try:
        while connection.recv(65536):
            connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n' + number)
    except OSError: pass
listener = listen()
while True: threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"#;

/// What the run behind this connection says.
async fn number(stream: &mut UnixStream) -> Option<String> {
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.ok()?;
    let mut answer = vec![0; 39 + 16];
    stream.read_exact(&mut answer).await.ok()?;
    Some(String::from_utf8_lossy(&answer[39..]).into_owned())
}

fn stream(used: &InstanceUse) -> UnixStream {
    UnixStream::from_std(used.socket.try_clone().unwrap().into()).unwrap()
}

async fn use_app(keeper: &KeeperClient) -> InstanceUse {
    keeper.use_instance(&site_name("app"), None).await.unwrap()
}

fn restarts_beside() {
    let world = world(NUMBERED, json!({}));
    world.run(async |keeper| {
        let first = use_app(&keeper).await;
        let mut old = stream(&first);
        let before = number(&mut old).await.unwrap();
        assert!(keeper.knows(&first.guard));
        let row = world.act("app", InstanceCommand::Restart);
        assert_eq!((&row["ok"], &row["draining"]), (&json!(true), &json!(1)), "{row}");
        let second = use_app(&keeper).await;
        assert_ne!(number(&mut stream(&second)).await.unwrap(), before, "a newcomer has the new one");
        assert_eq!(number(&mut old).await.unwrap(), before, "a request of the old one goes on");
        assert!(!keeper.knows(&first.guard) && keeper.knows(&second.guard), "the edge is told");
        drop(first);
        until_so(|| show(&world, "app")["draining"].is_null()).await;
        assert_eq!(number(&mut old).await, None, "the old one has ended");
        assert!(number(&mut stream(&second)).await.is_some());
    });
}

fn drains_once() {
    let world = world(NUMBERED, json!({}));
    world.run(async |keeper| {
        let (first, second);
        first = use_app(&keeper).await;
        let mut oldest = stream(&first);
        assert!(number(&mut oldest).await.is_some());
        assert_eq!(world.act("app", InstanceCommand::Restart)["ok"], true);
        second = use_app(&keeper).await;
        assert_eq!(world.act("app", InstanceCommand::Restart)["ok"], true);
        until_so(|| world.act("app", InstanceCommand::Inspect)["draining"] == 1).await;
        let mut end = [0];
        assert!(!matches!(oldest.read(&mut end).await, Ok(1..)), "the oldest is killed");
        assert!(number(&mut stream(&second)).await.is_some(), "the one after it lets its requests finish");
    });
}

fn restarts_alone() {
    let lock = "import fcntl\nlock = open('lock', 'w')\nfcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n";
    let world = world(&format!("{lock}{NUMBERED}"), json!({}));
    world.run(async |keeper| {
        let first = use_app(&keeper).await;
        let before = number(&mut stream(&first)).await.unwrap();
        let row = world.act("app", InstanceCommand::Restart);
        assert_eq!((&row["ok"], &row["draining"]), (&json!(true), &Value::Null), "{row}");
        let second = use_app(&keeper).await;
        assert_ne!(number(&mut stream(&second)).await.unwrap(), before);
    });
}
