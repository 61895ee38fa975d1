//! Images that show the present, with a real CRIU: files that a program has read are part of what its image is of.
//!
//! Not here: what else an image is bound to (`wake`, `image`), how stamps are compared (beside the code).

use std::fs;
use std::os::unix::fs::symlink;
use std::time::{Duration, SystemTime};

use nagaya_keeper_api::client::KeeperClient;
use nagaya_records::instance::{InstanceCommand, Tier, WakeStage};
use serde_json::{Value, json};

use crate::Fact;
use crate::rest::{app, get, pids, show, until_idle};
use crate::wake::until_images;
use crate::world::{ALICE, World, site_name, until_so, wait_dead};

pub const CRIU: &[Fact] = &[
    ("a changed program is served at its next wake, and has an image again", changed_program),
    ("an image ends with each file that its program has read, in whatever way that changes", each_change),
    ("files that a program writes itself do not end its image", own_files),
    ("a file that the record names ends the image also where the program writes it", named_files),
    ("a source file counts also where the program has read its compiled form", compiled_source),
    ("a link that is switched to another release ends the image", switched_link),
    ("a touched tmp/restart.txt starts an application anew, wherever it rests", restart_file),
    ("an operator starts an application anew, and its image is not used again", restarted),
    ("an image of the moment at which it rests has what is in memory, each time", at_rest),
    ("an application is told after a wake, before it gets a request", told_after_wake),
    ("a connection that was not accepted yet spoils one try, and none that follow", not_accepted_yet),
    ("files that a program removes at its end cost two images, and then none is taken", removed_at_end),
    ("three thousand files that a program has read are all looked at", many_files),
];

/// Reads its settings, a module and a template when it starts, and tells what it has read; opens a log and a database, and has
/// written a cache that it reads.
const READER: &str = r#"
import http.server, os, socket, socketserver, sqlite3
import settings
template = open('template.html').read().strip()
log = open('own.log', 'a')
open('own.cache', 'w').write('x'); open('own.cache').read()
base = sqlite3.connect('own.db', check_same_thread=False)
base.execute('create table if not exists visits(at text)')
base.commit()
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *what): pass
    def do_GET(self):
        print(self.path, file=log, flush=True)
        if self.path == '/visit':
            base.execute('insert into visits values(1)'); base.commit()
            open('own.cache', 'w').write('y')
        body = f'{settings.TITLE} {template} {os.getpid()}'.encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128
server = Server('/nowhere', Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=3)
server.serve_forever()
"#;

/// With the application, whose record says more.
fn start(mut world: World, more: Value) -> World {
    let mut record = json!({"listen": "fd"});
    record.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    world.site("app", "alice", app("", record));
    world.start()
}

fn world(more: Value) -> World {
    let world = World::new();
    world.script("server.py", READER);
    write(&world, "settings.py", "TITLE = 'one'\n");
    write(&world, "template.html", "page\n");
    start(world, more)
}

/// Of the application, beneath its directory. Texts that differ have other lengths: Python looks at no more than those, and seconds.
fn write(world: &World, name: &str, text: &str) {
    let path = world.home("alice").join("www").join(name);
    let above = path.parent().unwrap();
    if !above.exists() {
        fs::create_dir_all(above).unwrap();
        world.own(above, ALICE);
    }
    fs::write(&path, text).unwrap();
    world.own(&path, ALICE);
}

fn path(world: &World, name: &str) -> std::path::PathBuf {
    world.home("alice").join("www").join(name)
}

/// What it says, where it was woken from, and by which stages.
async fn wake(keeper: &KeeperClient, at: &str) -> (String, Tier, Vec<WakeStage>) {
    let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
    let said = get(&used, at).await;
    let wake = used.wake.clone().expect("it was woken");
    (said, wake.from, wake.stages.iter().map(|(stage, _)| *stage).collect())
}

async fn rest(world: &World) {
    until_idle(world, "app").await;
    let all = pids(world, "app");
    let row = world.act("app", InstanceCommand::Rest { to: Some(Tier::Image) });
    assert_eq!((&row["ok"], &row["tier"]), (&json!(true), &json!("image")), "{row}");
    all.into_iter().for_each(wait_dead);
}

/// It came back from its image.
async fn assert_restored(keeper: &KeeperClient, at: &str) -> String {
    let (said, from, stages) = wake(keeper, at).await;
    assert!(from == Tier::Image && !stages.contains(&WakeStage::Boot), "{said}: {stages:?}");
    said
}

/// It was started, because its image was of the past, and has another image now.
async fn assert_started(keeper: &KeeperClient) -> String {
    let (said, _, stages) = wake(keeper, "/").await;
    assert!(stages.contains(&WakeStage::Boot) && stages.contains(&WakeStage::Image), "{said}: {stages:?}");
    said
}

fn changed_program() {
    let world = world(json!({}));
    world.run(async |keeper| {
        until_images(&world).await;
        assert!(assert_started(&keeper).await.starts_with("one page"));
        rest(&world).await;
        let row = show(&world, "app");
        assert!(row["image"]["files"].as_u64().unwrap() >= 3, "{row}");
        assert!(row["image"]["of"].as_str().unwrap().contains("start"), "{row}");
        assert!(row["image"]["ends_when"].as_str().unwrap().contains("restart.txt"), "{row}");
        assert_eq!(row["image"]["not_watched"], Value::Null, "{row}");
        assert!(assert_restored(&keeper, "/").await.starts_with("one page"));
        rest(&world).await;
        write(&world, "settings.py", "TITLE = 'second'\n");
        assert!(assert_started(&keeper).await.starts_with("second page"));
        let why = show(&world, "app")["image_end"].as_str().unwrap().to_owned();
        assert!(why.contains("settings.py was changed"), "{why}");
        rest(&world).await;
        assert!(assert_restored(&keeper, "/").await.starts_with("second page"), "the new image is used");
    });
    // A new keeper compares all files of an image, the list of what it depends on among them.
    assert!(world.drain());
    world.restart();
    world.run(async |keeper| {
        until_images(&world).await;
        let (said, _, stages) = wake(&keeper, "/").await;
        assert!(
            said.starts_with("second page") && stages.contains(&WakeStage::Restore),
            "{said}: {stages:?}"
        );
        rest(&world).await;
        write(&world, "settings.py", "TITLE = 'the third'\n");
        assert!(assert_started(&keeper).await.starts_with("the third"));
    });
    assert!(world.log().contains("settings.py was changed"), "{}", world.log());
    assert_eq!(world.metric("nagaya_keeper_images_total{event=\"quarantined\"}"), 0);
}

fn each_change() {
    let world = world(json!({}));
    let (template, aside) = (path(&world, "template.html"), path(&world, "new.html"));
    let changes: [(&str, &dyn Fn()); 3] = [
        ("template.html was changed", &|| write(&world, "template.html", "other\n")),
        ("template.html was replaced", &|| {
            write(&world, "new.html", "third\n");
            fs::rename(&aside, &template).unwrap();
        }),
        ("server.py was changed", &|| {
            let touched = SystemTime::now() - Duration::from_secs(3600);
            fs::File::options()
                .write(true)
                .open(path(&world, "server.py"))
                .unwrap()
                .set_modified(touched)
                .unwrap();
        }),
    ];
    world.run(async |keeper| {
        until_images(&world).await;
        assert_started(&keeper).await;
        for (why, change) in changes {
            rest(&world).await;
            change();
            assert_started(&keeper).await;
            let told = show(&world, "app")["image_end"].as_str().unwrap().to_owned();
            assert!(told.contains(why), "{told}");
        }
        rest(&world).await;
        assert!(assert_restored(&keeper, "/").await.contains(" third "));
    });
}

fn own_files() {
    let world = world(json!({}));
    world.run(async |keeper| {
        until_images(&world).await;
        assert_started(&keeper).await;
        for _ in 0..2 {
            rest(&world).await;
            // It writes all of them after its image was taken.
            assert_restored(&keeper, "/visit").await;
        }
    });
    assert!(fs::read_to_string(path(&world, "own.log")).unwrap().lines().count() >= 2);
}

fn named_files() {
    let world = world(json!({"image_watch": ["own.db", ".env.local", "plugins"]}));
    write(&world, "plugins/one.py", "");
    world.run(async |keeper| {
        until_images(&world).await;
        assert_started(&keeper).await;
        rest(&world).await;
        assert_restored(&keeper, "/visit").await;
        rest(&world).await;
        assert_started(&keeper).await;
        let told = || show(&world, "app")["image_end"].as_str().unwrap().to_owned();
        assert!(told().contains("own.db was changed"), "{}", told());
        rest(&world).await;
        write(&world, ".env.local", "A=b\n");
        assert_started(&keeper).await;
        assert!(told().contains(".env.local is there now"), "{}", told());
        rest(&world).await;
        write(&world, "plugins/one.py", "x = 1\n");
        assert_started(&keeper).await;
        assert!(told().contains("plugins/one.py was changed"), "{}", told());
        rest(&world).await;
        assert_restored(&keeper, "/").await;
    });
}

fn compiled_source() {
    let world = world(json!({}));
    world.run(async |keeper| {
        until_images(&world).await;
        // The first start compiles the module; the second one reads what was compiled.
        assert_started(&keeper).await;
        rest(&world).await;
        write(&world, "template.html", "other\n");
        assert_started(&keeper).await;
        rest(&world).await;
        assert_restored(&keeper, "/").await;
        rest(&world).await;
        write(&world, "settings.py", "TITLE = 'second'\n");
        assert!(assert_started(&keeper).await.starts_with("second"));
    });
}

fn switched_link() {
    let world = world(json!({}));
    for release in ["1", "2"] {
        write(&world, &format!("releases/{release}/settings.py"), &format!("TITLE = 'release{release}'\n"));
    }
    let link = path(&world, "current");
    let switch = |release: &str| {
        let draft = path(&world, "draft");
        symlink(format!("releases/{release}"), &draft).unwrap();
        fs::rename(&draft, &link).unwrap();
    };
    switch("1");
    fs::remove_file(path(&world, "settings.py")).unwrap();
    world.script("server.py", &format!("import sys; sys.path.insert(0, 'current')\n{READER}"));
    world.run(async |keeper| {
        until_images(&world).await;
        assert!(assert_started(&keeper).await.starts_with("release1"));
        rest(&world).await;
        assert!(assert_restored(&keeper, "/").await.starts_with("release1"));
        rest(&world).await;
        switch("2");
        assert!(assert_started(&keeper).await.starts_with("release2"));
    });
}

fn restart_file() {
    let world = world(json!({}));
    world.run(async |keeper| {
        until_images(&world).await;
        assert_started(&keeper).await;
        // While it rests as an image.
        rest(&world).await;
        write(&world, "tmp/restart.txt", "");
        assert_started(&keeper).await;
        rest(&world).await;
        assert_restored(&keeper, "/").await;
        // While it is frozen.
        until_idle(&world, "app").await;
        assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Frozen) })["tier"], "frozen");
        write(&world, "settings.py", "TITLE = 'second'\n");
        write(&world, "tmp/restart.txt", "again");
        assert!(assert_started(&keeper).await.starts_with("second"));
        // While it runs, and nobody asks.
        until_idle(&world, "app").await;
        let before = pids(&world, "app");
        write(&world, "settings.py", "TITLE = 'three'\n");
        write(&world, "tmp/restart.txt", "once more");
        before.into_iter().for_each(wait_dead);
        until_so(|| show(&world, "app")["state"] == "idle").await;
        let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
        assert!(get(&used, "/").await.starts_with("three"));
        drop(used);
        rest(&world).await;
        assert!(assert_restored(&keeper, "/").await.starts_with("three"));
    });
}

fn restarted() {
    let world = world(json!({}));
    world.run(async |keeper| {
        until_images(&world).await;
        assert_started(&keeper).await;
        until_idle(&world, "app").await;
        let before = pids(&world, "app");
        let row = world.act("app", InstanceCommand::Restart);
        assert_eq!((&row["ok"], &row["tier"]), (&json!(true), &json!("running")), "{row}");
        before.into_iter().for_each(wait_dead);
        rest(&world).await;
        assert_restored(&keeper, "/").await;
        // One that rests stays at rest, and its next start is a start.
        rest(&world).await;
        let row = world.act("app", InstanceCommand::Restart);
        assert_eq!((&row["ok"], &row["tier"]), (&json!(true), &json!("cold")), "{row}");
        assert_eq!(fs::read_dir(world.dir.path().join("state/images/images")).unwrap().count(), 0);
        assert_started(&keeper).await;
    });
}

/// Files that the program of this test reads.
const MANY: usize = 3000;

fn many_files() {
    let world = world(json!({}));
    for number in 0..MANY {
        write(&world, &format!("lib/{}/{number}.txt", number % 60), "x");
    }
    let read = "import glob\nfor name in glob.glob('lib/*/*.txt'): open(name).read()\n";
    world.script("server.py", &format!("{read}{READER}"));
    world.run(async |keeper| {
        until_images(&world).await;
        assert_started(&keeper).await;
        rest(&world).await;
        let row = show(&world, "app");
        assert!(row["image"]["files"].as_u64().unwrap() > MANY as u64, "{row}");
        assert_eq!(row["image"]["not_watched"], Value::Null, "{row}");
        let (_, _, stages) = wake(&keeper, "/").await;
        assert!(stages.contains(&WakeStage::Restore), "{stages:?}");
        let wake = show(&world, "app")["last_wake"].clone();
        eprintln!("a wake that looks at {MANY} files: {wake}");
        rest(&world).await;
        write(&world, "lib/7/7.txt", "y");
        assert_started(&keeper).await;
    });
}

/// Keeps a number in memory that each visit to `/add` makes more, and counts what it is told after a wake.
const MEMORY: &str = r#"
import http.server, signal, socket, socketserver
seen = {'visits': 0, 'reloads': 0, 'signals': 0}
def count(name): seen[name] += 1
signal.signal(signal.SIGHUP, lambda *what: count('signals'))
import memory_settings
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *what): pass
    def do_GET(self):
        if self.path == '/add': count('visits')
        if self.path == '/reload': count('reloads')
        body = f"{memory_settings.TITLE} {seen['visits']} {seen['reloads']} {seen['signals']}".encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128
server = Server('/nowhere', Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=3)
server.serve_forever()
"#;

fn memory_world(more: Value) -> World {
    let world = World::new();
    world.script("server.py", MEMORY);
    write(&world, "memory_settings.py", "TITLE = 'one'\n");
    start(world, more)
}

async fn visit(keeper: &KeeperClient, at: &str) -> String {
    get(&keeper.use_instance(&site_name("app"), None).await.unwrap(), at).await
}

fn at_rest() {
    let world = memory_world(json!({"image_when": "rest"}));
    world.run(async |keeper| {
        until_images(&world).await;
        let (said, _, stages) = wake(&keeper, "/add").await;
        assert!(said.starts_with("one 1 ") && !stages.contains(&WakeStage::Image), "{said}: {stages:?}");
        for visits in 2..5 {
            rest(&world).await;
            let row = show(&world, "app");
            assert!(row["image"]["of"].as_str().unwrap().contains("went to rest"), "{row}");
            assert!(row["image"]["files"].as_u64().unwrap() >= 2, "{row}");
            let said = assert_restored(&keeper, "/add").await;
            assert!(said.starts_with(&format!("one {visits} ")), "{said}");
        }
        // From where it is frozen, too.
        until_idle(&world, "app").await;
        assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Frozen) })["tier"], "frozen");
        rest(&world).await;
        assert!(assert_restored(&keeper, "/").await.starts_with("one 4 "));
        // What it read before its first image still counts.
        rest(&world).await;
        write(&world, "memory_settings.py", "TITLE = 'second'\n");
        let (said, _, stages) = wake(&keeper, "/").await;
        assert!(said.starts_with("second 0 ") && stages.contains(&WakeStage::Boot), "{said}: {stages:?}");
    });
}

fn told_after_wake() {
    let world = memory_world(json!({"after_wake": ["SIGHUP", "/reload"]}));
    world.run(async |keeper| {
        until_images(&world).await;
        assert_eq!(visit(&keeper, "/").await, "one 0 0 0", "a start is no wake");
        for _ in 0..2 {
            rest(&world).await;
            let said = assert_restored(&keeper, "/").await;
            assert_eq!(said, "one 0 1 1", "once after each wake");
        }
    });
}

/// Listens at once, and accepts nothing before a file is there.
const LATE: &str = r#"
import http.server, os, socketserver, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *what): pass
    def do_GET(self):
        self.send_response(200)
        self.send_header('Content-Length', '2')
        self.end_headers()
        self.wfile.write(b'ok')
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128
server = Server(os.environ['NAGAYA_SOCKET'], Handler)
while not os.path.exists('go'): time.sleep(0.01)
server.serve_forever()
"#;

fn not_accepted_yet() {
    let mut world = World::new();
    world.script("server.py", LATE);
    world.site("app", "alice", app("", json!({"listen": "socket"})));
    let world = world.start();
    world.run(async |keeper| {
        until_images(&world).await;
        let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
        let why = show(&world, "app")["note"].as_str().unwrap().to_owned();
        assert!(why.contains("another try may find none"), "{why}");
        write(&world, "go", "");
        assert_eq!(get(&used, "/").await, "ok");
        drop(used);
        until_idle(&world, "app").await;
        let all = pids(&world, "app");
        assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Cold) })["ok"], true);
        all.into_iter().for_each(wait_dead);
        assert_started(&keeper).await;
        rest(&world).await;
        assert_eq!(assert_restored(&keeper, "/").await, "ok");
    });
}

/// Before the server: a database whose write-ahead log goes when the program ends well.
const WAL: &str = "import sqlite3, signal, sys\n\
    held = sqlite3.connect('held.db', check_same_thread=False)\n\
    held.execute('pragma journal_mode=wal'); held.execute('create table if not exists t(x)')\n\
    held.execute('insert into t values(1)'); held.commit()\n\
    signal.signal(signal.SIGTERM, lambda *what: (held.close(), sys.exit(0)))\n";

fn removed_at_end() {
    let world = memory_world(json!({}));
    world.script("server.py", &format!("{WAL}{MEMORY}"));
    let taken = || world.metric("nagaya_keeper_images_total{event=\"taken\"}");
    world.run(async |keeper| {
        until_images(&world).await;
        for _ in 0..4 {
            assert_eq!(visit(&keeper, "/").await, "one 0 0 0", "it is served, whatever becomes of its image");
            until_idle(&world, "app").await;
            let all = pids(&world, "app");
            world.act("app", InstanceCommand::Rest { to: Some(Tier::Image) });
            all.into_iter().for_each(wait_dead);
        }
        assert_eq!(visit(&keeper, "/").await, "one 0 0 0");
        let note = show(&world, "app")["note"].as_str().unwrap_or_default().to_owned();
        assert!(note.contains("cannot be brought back") && note.contains("held.db-wal"), "{note}");
        assert_eq!(taken(), 2, "two failures are enough");
    });
}
