//! The logs of applications: bounded, moved on, in files that outlast the keeper, and gone with their site.
//!
//! Not here: the bounds one by one (unit tests of `log`), what is in the keeper's own log (`programs`).

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use nagaya_keeper_api::client::{KeeperCallError, KeeperClient};
use nagaya_records::RecordChange;
use nagaya_records::instance::InstanceCommand;
use serde_json::{Value, json};

use crate::Fact;
use crate::world::{World, read_socket, site_change, site_name, until_so};

pub const ROOT: &[Fact] = &[
    ("a flood of an application's lines is bounded, rotated, and counted", flood),
    ("what an application wrote is shown after its keeper was killed", outlasts_the_keeper),
    ("a log is for root alone, and goes with its site", goes_with_its_site),
    ("an application whose log cannot be written goes on, and its last lines are shown", cannot_be_written),
];

/// Says what it is told to, this often, and then that it listens; answers everyone with its pid.
const SERVER: &str = r#"
use Socket;
my ($word, $times) = @ARGV;
print "$word $_\n" for 1..$times;
socket(S, PF_UNIX, SOCK_STREAM, 0) or die;
bind(S, sockaddr_un($ENV{NAGAYA_SOCKET})) or die "bind: $!";
listen(S, 64) or die;
$SIG{PIPE} = 'IGNORE';
$| = 1; print "listening as $$\n";
while (accept(C, S)) { syswrite(C, "$$"); close C; }
"#;

/// Lines of a flood, some megabytes.
const MANY: usize = 300_000;

const FILE_BYTES_MAX: u64 = 64 << 10;

fn app(word: &str, times: usize) -> Value {
    json!({"kind": "app", "command": ["perl", "www/server.pl", word, times.to_string()], "directory": ""})
}

fn world() -> World {
    let mut world = World::new().with(|options| {
        options.instances.image_bytes_max = 0;
        options.instances.log_bytes_max = FILE_BYTES_MAX;
        options.instances.log_files_max = 4;
    });
    world.script("server.pl", SERVER);
    world.site("app", "alice", app("word", 2));
    world
}

fn dir(world: &World) -> PathBuf {
    world.dir.path().join("state/instance-logs/alice")
}

fn read(dir: &Path, name: &str) -> String {
    fs::read_to_string(dir.join(name)).unwrap_or_default()
}

pub fn lines(world: &World, site: &str) -> Vec<String> {
    let answer = world.act(site, InstanceCommand::Logs);
    let lines = answer["lines"].as_array().unwrap_or_else(|| panic!("{answer}"));
    lines.iter().map(|line| line.as_str().unwrap().to_owned()).collect()
}

async fn answer(keeper: &KeeperClient, site: &str) -> String {
    loop {
        match keeper.use_instance(&site_name(site), None).await {
            Ok(used) => return read_socket(used.socket).await,
            // The connection to a keeper that was killed; the next is to its successor.
            Err(KeeperCallError::Gone) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn flood() {
    let mut world = world();
    world.site("flood", "alice", app("flood", MANY));
    let world = world.start();
    let dir = dir(&world);
    world.run(async |keeper| {
        let flooding = {
            let keeper = Rc::clone(&keeper);
            tokio::task::spawn_local(async move { answer(&keeper, "flood").await })
        };
        until_so(|| dir.join("flood.log").exists()).await;
        answer(&keeper, "app").await;
        assert!(!flooding.await.unwrap().is_empty(), "it comes to its end with it");
        world.act("flood", InstanceCommand::Stop);
        until_so(|| lines(&world, "flood").last().is_some_and(|line| line.contains("dropped here: "))).await;
        let shown = lines(&world, "flood");
        assert!(shown[shown.len() - 2].starts_with("nagaya: more than 128KiB in 60 s"), "{shown:?}");
        let last = shown.last().unwrap();
        let dropped: usize = last.rsplit(' ').next().unwrap().parse().unwrap();
        // It was written before it was told here, or is a moment later.
        until_so(|| read(&dir, "flood.log").contains(last.as_str())).await;
        let mut names: Vec<_> = fs::read_dir(&dir)
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["app.log", "flood.log", "flood.log.1", "flood.log.2"]);
        let all: Vec<String> = names[1..].iter().map(|name| read(&dir, name)).collect();
        assert!(all.iter().all(|text| text.len() as u64 <= FILE_BYTES_MAX), "{names:?}");
        let kept = all.iter().flat_map(|text| text.lines()).filter(|line| line.contains("Z flood ")).count();
        assert!(kept > 1_000, "{kept}");
        // And the one that it listens.
        assert_eq!(kept + dropped, MANY + 1);
        let counted =
            |result: &str| world.metric(&format!("nagaya_instance_log_lines_total{{result=\"{result}\"}}"));
        assert_eq!((counted("dropped"), counted("lost")), (dropped as u64, 0));
    });
}

fn outlasts_the_keeper() {
    let world = world().start();
    let dir = dir(&world);
    world.run(async |keeper| {
        let first = answer(&keeper, "app").await;
        let said = ["word 1".to_owned(), "word 2".to_owned(), format!("listening as {first}")];
        until_so(|| read(&dir, "app.log").contains(&said[2])).await;
        assert_eq!(lines(&world, "app"), said);
        world.kill();
        world.restart();
        assert_eq!(lines(&world, "app"), said, "nobody has asked for it since");
        let second = answer(&keeper, "app").await;
        until_so(|| lines(&world, "app").len() == 6).await;
        let both = lines(&world, "app");
        assert_eq!((&both[..3], &both[5]), (&said[..], &format!("listening as {second}")));
        until_so(|| read(&dir, "app.log").contains(&both[5])).await;
        assert!(world.drain(), "{}", world.log());
        world.restart();
        answer(&keeper, "app").await;
        until_so(|| lines(&world, "app").len() == 9).await;
        assert_eq!(lines(&world, "app")[..6], both);
    });
}

fn goes_with_its_site() {
    let world = world().start();
    let (dir, file) = (dir(&world), dir(&world).join("app.log"));
    let of_record = || site_change("app", "alice", app("word", 2), json!({}));
    let drop_site = || world.apply(vec![RecordChange::DropSite(site_name("app"))]);
    world.run(async |keeper| {
        answer(&keeper, "app").await;
        until_so(|| file.exists()).await;
        for (path, mode) in [(&*file, 0o600), (&*dir, 0o700), (dir.parent().unwrap(), 0o700)] {
            let found = fs::metadata(path).unwrap();
            assert_eq!((found.permissions().mode() & 0o777, found.uid()), (mode, 0), "{}", path.display());
        }
        // While it runs.
        drop_site();
        until_so(|| !dir.exists()).await;
        world.apply(vec![of_record()]);
        assert!(lines(&world, "app").is_empty());
        answer(&keeper, "app").await;
        until_so(|| file.exists()).await;
        // Of an earlier keeper.
        world.kill();
        world.restart();
        drop_site();
        until_so(|| !dir.exists()).await;
        world.apply(vec![of_record()]);
        answer(&keeper, "app").await;
        until_so(|| file.exists()).await;
        // While no keeper ran.
        world.kill();
        fs::rename(&file, dir.join("gone.log")).unwrap();
        world.restart();
        until_so(|| !dir.exists()).await;
        // Another tenant's site of the same name begins with an empty log.
        answer(&keeper, "app").await;
        until_so(|| file.exists()).await;
        let backend = json!({"kind": "app", "command": ["perl", world.home("alice").join("www/server.pl"), "x", "1"], "directory": ""});
        let bob = world.tenant_with("bob", json!({}));
        world.apply(vec![bob, site_change("app", "bob", backend, json!({}))]);
        assert!(lines(&world, "app").is_empty());
    });
}

fn cannot_be_written() {
    let world = world();
    fs::create_dir_all(world.dir.path().join("state")).unwrap();
    fs::write(world.dir.path().join("state/instance-logs"), "in the way").unwrap();
    let world = world.start();
    world.run(async |keeper| {
        answer(&keeper, "app").await;
        let lost = || world.metric("nagaya_instance_log_lines_total{result=\"lost\"}");
        until_so(|| (lines(&world, "app").len(), lost()) == (3, 3)).await;
        world.act("app", InstanceCommand::Stop);
        answer(&keeper, "app").await;
        until_so(|| (lines(&world, "app").len(), lost()) == (6, 6)).await;
    });
    assert_eq!(world.log().matches("NGY0338").count(), 1, "{}", world.log());
    assert!(world.drain(), "{}", world.log());
}
