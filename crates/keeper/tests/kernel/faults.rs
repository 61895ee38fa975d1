//! Instances when the node runs short: of disk for images, of memory in a cell, of turns to wake.
//!
//! Not here: applications that misbehave (`instances`, `rest`), images that are wrong (`image`, `wake`).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;

use nagaya_keeper_api::client::KeeperClient;
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::feed::FeedQuery;
use nagaya_records::instance::{InstanceCommand, Tier};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::php::{self, Php};
use crate::rest::{NEVER, SERVER, app, get, pids, run_of, show, until_idle};
use crate::wake::until_images;
use crate::world::{ALICE, World, refusal, site_name, until_so, wait_dead};
use crate::{CellFact, Fact};

pub const ROOT: &[Fact] = &[
    ("many that are asked for at once start so many at a time, and none fails", many_at_once),
    ("those that wait for their turn get it in the order in which they came", in_order),
];

pub const CRIU: &[Fact] = &[
    ("an instance goes on without an image while the disk is full, and gets one later", no_room),
    ("a disk that runs full while an image is taken harms nobody", runs_full),
];

pub const CELLS: &[CellFact] = &[
    (&["memory"], "an instance that runs out of memory ends alone, and says why", out_of_memory),
    (&["memory"], "a start that runs out of memory says so", out_of_memory_at_start),
    (&["memory"], "want of memory is said of a worker whose end was asked for, too", out_of_memory_and_ended),
];

/// The least that answers, so that hundreds of them start in seconds.
const LITTLE_SERVER: &str = r#"
use Socket;
socket(S, PF_UNIX, SOCK_STREAM, 0) or die;
bind(S, sockaddr_un($ENV{NAGAYA_SOCKET})) or die "bind: $!";
listen(S, 64) or die;
$SIG{PIPE} = 'IGNORE';
$| = 1; print "listens\n";
while (accept(C, S)) { sysread(C, my $asked, 4096); syswrite(C, "HTTP/1.0 200 OK\r\n\r\n$ENV{NAME}"); close C; }
"#;

/// As many as keep a loaded machine busy for some seconds. The experiment `wake-parallel` asks for 500.
const MANY: usize = 100;
const FEW: usize = 12;

fn little(count: usize, at_once: u32) -> (World, Vec<String>) {
    let mut world = World::new().with(|options| {
        options.instances.image_bytes_max = 0;
        options.instances.wakes_at_once = at_once;
    });
    world.script("little.pl", LITTLE_SERVER);
    let names: Vec<String> = (0..count).map(|number| format!("site{number:03}")).collect();
    for name in &names {
        let record = json!({"kind": "app", "command": ["perl", "little.pl"], "directory": "www", "start_seconds": 300,
            "env": {"NAME": name}, "idle": NEVER()});
        world.site(name, "alice", record);
    }
    (world.start(), names)
}

async fn ask(keeper: Rc<KeeperClient>, name: String) -> String {
    let used = keeper.use_instance(&site_name(&name), None).await.unwrap();
    get(&used, "/").await
}

fn ask_all(keeper: &Rc<KeeperClient>, names: &[String]) -> Vec<tokio::task::JoinHandle<String>> {
    names.iter().map(|name| tokio::task::spawn_local(ask(Rc::clone(keeper), name.clone()))).collect()
}

fn many_at_once() {
    let (world, names) = little(MANY, 2);
    world.run(async |keeper| {
        let asking = ask_all(&keeper, &names);
        let mut most = 0;
        until_so(|| {
            let list: Value = serde_json::from_str(&world.ask(FeedQuery::Instances)).unwrap();
            let rows = list["instances"].as_array().unwrap();
            most = most.max(rows.iter().filter(|row| row["state"] == "starting").count());
            asking.iter().all(tokio::task::JoinHandle::is_finished)
        })
        .await;
        for (name, one) in names.iter().zip(asking) {
            assert_eq!(one.await.unwrap(), *name);
        }
        assert_eq!(most, 2, "as many as may, and no more");
    });
    assert_eq!(world.metric("nagaya_keeper_wakes_total{from=\"cold\",end=\"woke\"}"), MANY as u64);
}

fn in_order() {
    let (world, names) = little(FEW, 1);
    world.run(async |keeper| {
        for one in ask_all(&keeper, &names) {
            one.await.unwrap();
        }
        // What they wrote comes to the log by itself.
        until_so(|| world.log().matches("listens").count() == FEW).await;
    });
    let log = world.log();
    let begun: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("listens"))
        .filter_map(|line| names.iter().find(|name| line.contains(name.as_str())))
        .map(String::as_str)
        .collect();
    assert_eq!(begun, names);
}

// === Disk ===

/// A file system in memory, gone with this.
struct Mounted(PathBuf);

impl Mounted {
    fn new(at: &Path, size: &str) -> Self {
        std::fs::create_dir_all(at).unwrap();
        let options = format!("size={size}");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "none"]).arg(at).status();
        assert!(mounted.unwrap().success());
        Self(at.into())
    }

    fn resize(&self, size: &str) {
        let options = format!("remount,size={size}");
        assert!(Command::new("mount").args(["-o", &options]).arg(&self.0).status().unwrap().success());
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A world whose images are on a small disk, and an application that holds so much of random memory.
fn on_small_disk(size: &str, holds_mib: usize) -> (World, Mounted) {
    let mut world = World::new();
    let mounted = Mounted::new(&world.dir.path().join("state/images"), size);
    world.script("server.py", &format!("import os\nheld = os.urandom({holds_mib} << 20)\n{SERVER}"));
    world.site("app", "alice", app("", json!({})));
    (world.start(), mounted)
}

/// Ends its processes, as a long rest would.
async fn end(world: &World) {
    until_idle(world, "app").await;
    let all = pids(world, "app");
    assert_eq!(world.act("app", InstanceCommand::Rest { to: Some(Tier::Image) })["ok"], true);
    all.into_iter().for_each(wait_dead);
}

/// It serves without an image as long as the disk is full, says why, and has one after the first start with room.
fn goes_on_without(world: &World, mounted: &Mounted, why: &str) {
    world.run(async |keeper| {
        until_images(world).await;
        let first = run_of(&keeper, "app").await;
        assert_eq!(run_of(&keeper, "app").await, first, "it goes on");
        let row = show(world, "app");
        assert!(row["image"].is_null(), "{row}");
        let note = row["note"].as_str().unwrap();
        assert!(
            note.starts_with("it has no image: no space is left for images") && note.contains(why),
            "{note}"
        );
        end(world).await;
        assert_eq!(show(world, "app")["tier"], "cold");
        assert_ne!(run_of(&keeper, "app").await, first, "and is started anew after a long rest");
        assert_eq!(world.metric("nagaya_keeper_images_total{event=\"not_taken\"}"), 2, "it was tried again");
        mounted.resize("1500m");
        end(world).await;
        let last = run_of(&keeper, "app").await;
        let row = show(world, "app");
        assert!(row["image"]["bytes"].as_u64().unwrap() > 1 << 20 && row["note"].is_null(), "{row}");
        end(world).await;
        assert_eq!(run_of(&keeper, "app").await, last, "it comes back from it");
    });
    assert!(world.log().contains("no image of it is taken: NGY0337"), "{}", world.log());
    assert_eq!(std::fs::read_dir(mounted.0.join("work")).unwrap().count(), 0, "nothing half done stays");
    assert_eq!(std::fs::read_dir(mounted.0.join("refused")).unwrap().count(), 0);
}

fn no_room() {
    let (world, mounted) = on_small_disk("64m", 1);
    goes_on_without(&world, &mounted, "stay free");
}

fn runs_full() {
    // There is room at first, and not for all of it.
    let (world, mounted) = on_small_disk("300m", 400);
    goes_on_without(&world, &mounted, "(CRIU: ");
}

// === Memory ===

const HUNGRY: &str = "import sys, http.server as h\nheld = []\n\
    def eat(self, go=h.BaseHTTPRequestHandler.handle_one_request):\n\
    \x20   go(self)\n\
    \x20   if getattr(self, 'path', '') == '/eat':\n\
    \x20       while True: held.append(bytes(1 << 20) + b'x')\n\
    h.BaseHTTPRequestHandler.handle_one_request = eat\n";

fn out_of_memory() {
    let mut world = World::new().with(|options| options.instances.image_bytes_max = 0);
    world.script("server.py", &format!("{HUNGRY}{SERVER}"));
    let limits = json!({"limits": {"memory": "64M"}});
    world.site_with("app", "alice", app("", json!({})), limits.clone());
    world.site_with("other", "alice", app("", json!({})), limits);
    let world = world.start();
    world.run(async |keeper| {
        let (first, other) = (run_of(&keeper, "app").await, run_of(&keeper, "other").await);
        let before = pids(&world, "app");
        let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
        get(&used, "/eat").await;
        before.into_iter().for_each(wait_dead);
        until_so(|| show(&world, "app")["tier"] == "cold").await;
        let row = show(&world, "app");
        let note = row["note"].as_str().unwrap();
        assert!(note.contains("out of memory") && note.contains("NGY0324"), "{row}");
        assert_eq!(run_of(&keeper, "other").await, other, "another of the same tenant goes on");
        assert!(show(&world, "other")["last_end"].is_null());
        assert_ne!(run_of(&keeper, "app").await, first, "it is there again for the next request");
        let row = show(&world, "app");
        assert!(row["note"].is_null(), "{row}");
        assert!(row["last_end"].as_str().unwrap().contains("out of memory"), "{row}");
    });
    assert!(world.log().contains("ended by itself: out of memory"), "{}", world.log());
}

fn out_of_memory_and_ended() {
    let hungry = "perl -e 'push @a, qq(x) x (1 << 20) while 1'";
    let world = World::new();
    let code = format!(r#"<?php passthru("{hungry}"); touch(__DIR__ . '/killed'); sleep(600);"#);
    let script = world.script("hungry.php", &code);
    let www = script.parent().unwrap().to_owned();
    world.own(&www, ALICE);
    let world = php::with_sites(world).start();
    world.apply(vec![world.tenant_with("alice", json!({"limits": {"memory": "64M"}}))]);
    world.run(async |keeper| {
        let Php { mut stream, guard, .. } = Php::start_for(&keeper, "php").await;
        let params = [
            ("SCRIPT_FILENAME", script.to_str().unwrap()),
            ("REQUEST_METHOD", "GET"),
            ("REDIRECT_STATUS", "200"),
        ];
        stream.write_all(&php::opening(&params)).await.unwrap();
        until_so(|| www.join("killed").exists()).await;
        let (exit, _) = guard.end().await.unwrap();
        assert!(exit.out_of_memory, "{exit:?}");
    });
    let log = world.log();
    assert!(log.contains("out of memory: the kernel killed a php process"), "{log}");
}

fn out_of_memory_at_start() {
    let mut world = World::new().with(|options| options.instances.image_bytes_max = 0);
    world.script("server.py", &format!("held = b'x' * (256 << 20)\n{SERVER}"));
    world.site_with("app", "alice", app("", json!({})), json!({"limits": {"memory": "64M"}}));
    let world = world.start();
    world.run(async |keeper| {
        assert_eq!(refusal(keeper.use_instance(&site_name("app"), None).await), (FailureKind::Broken, 324));
        let note = show(&world, "app")["note"].as_str().unwrap().to_owned();
        assert!(note.contains("out of memory"), "{note}");
    });
}
