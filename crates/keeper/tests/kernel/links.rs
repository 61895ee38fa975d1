//! Links that a tenant puts where the keeper opens something for it: they lead nowhere, least of all to what the keeper has open.
//!
//! Not here: paths by themselves (unit tests of `tenant_path`), what a program does with links of its own (`sandbox`).

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use nagaya_keeper_api::client::{InstanceUse, KeeperCallError, KeeperClient};
use nagaya_keeper_api::protocol::{FailureKind, OpenedRoot};
use rustix::fs::{Mode, OFlags};
use serde_json::{Value, json};

use crate::Fact;
use crate::layers::{Layer, Writer, architecture};
use crate::rest::NEVER;
use crate::world::{ALICE, World, read_socket, refusal, set_mode, site_change, site_name};

pub const ROOT: &[Fact] = &[
    ("a link of /proc in place of a document root leads to nothing the keeper has open", roots),
    ("a link in place of a document root leads nowhere else", roots_elsewhere),
    ("a document root that its tenant may not list is refused", unlisted_roots),
    ("a link of /proc in place of a secret leads to nothing the keeper has open", secrets),
    ("a link of /proc in place of a layout leads to nothing the keeper has open", layouts),
    ("a link in place of an application's directory or base shows it nothing of the node", directories),
    ("a link in place of what an application writes to shows it nothing of the node", writables),
    ("an application is shown no socket but those of its databases", sockets),
    ("homes beside the tenant's own are out of its sight", homes_beside),
    ("links of root's and links beneath the home are followed", good_links),
];

/// Says which of the files that it is given it sees.
const SERVER: &str = r#"
use Socket;
socket(S, PF_UNIX, SOCK_STREAM, 0) or die;
bind(S, sockaddr_un($ENV{NAGAYA_SOCKET})) or die "bind: $!";
listen(S, 64) or die;
$SIG{PIPE} = 'IGNORE';
while (accept(C, S)) { syswrite(C, "serves " . join(' ', map { -e $_ ? 'there' : 'absent' } @ARGV)); close C; }
"#;

/// What bob has for all to read, behind the door of his home.
const BEHIND: &str = "open to all behind a closed door";

fn app(more: &Value) -> Value {
    let mut record = json!({"kind": "app", "command": ["perl", "/usr/share/nagaya-test/none.pl"], "directory": "www",
        "start_seconds": 60, "idle": NEVER()});
    record.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    record
}

/// An application of this tenant's that serves whatever its surroundings are.
fn serving(world: &World, tenant: &str, more: &Value) -> Value {
    let program = world.script_of(tenant, "server.pl", SERVER);
    let mut record = app(more);
    record["command"] = json!(["perl", program]);
    record
}

/// Bob's application, which runs for as long as the test, and his files.
fn with_bob() -> World {
    let mut world = World::new();
    let backend = serving(&world, "bob", &json!({}));
    world.site("bobs", "bob", backend);
    let file = world.home("bob").join("www/file");
    fs::write(&file, BEHIND).unwrap();
    set_mode(&file, 0o644);
    set_mode(&world.home("bob").join("www"), 0o755);
    world
}

/// Asks for an application with this record that never failed before, so that it is tried now.
async fn ask_anew(
    world: &World,
    keeper: &KeeperClient,
    tenant: &str,
    backend: Value,
) -> Result<InstanceUse, KeeperCallError> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let name = format!("app{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    world.apply(vec![site_change(&name, tenant, backend, json!({}))]);
    keeper.use_instance(&site_name(&name), None).await
}

async fn run_bobs(keeper: &KeeperClient) {
    let used = keeper.use_instance(&site_name("bobs"), None).await.unwrap();
    assert_eq!(read_socket(used.socket).await, "serves ");
}

/// Paths through all that the keeper has open, of which the root of bob's sandbox is one.
fn through_the_keeper(world: &World) -> Vec<PathBuf> {
    let open = fs::read_dir(format!("/proc/{}/fd", world.keeper_pid())).unwrap().flatten();
    let roots = open.filter(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == Path::new("/")));
    let paths: Vec<_> = roots.map(|fd| Path::new("/proc/self/fd").join(fd.file_name())).collect();
    assert!(!paths.is_empty(), "it has the root of bob's sandbox open");
    paths
}

/// Puts a link of alice's in the place of something.
fn put_link(to: impl AsRef<Path>, at: &Path) {
    match fs::symlink_metadata(at) {
        Ok(stat) if stat.is_dir() => fs::remove_dir_all(at).unwrap(),
        Ok(_) => fs::remove_file(at).unwrap(),
        Err(_) => {}
    }
    symlink(to, at).unwrap();
    std::os::unix::fs::lchown(at, Some(ALICE), Some(ALICE)).unwrap();
}

fn file_in(root: &OwnedFd, path: &Path) -> bool {
    rustix::fs::openat(root, path, OFlags::RDONLY, Mode::empty()).is_ok()
}

/// Both ways to name the root: from the home, and from `/`.
fn with_roots(world: &mut World) {
    let www = world.home("alice").join("www");
    world.site("relative", "alice", json!({"kind": "static", "root": "www"}));
    world.site("absolute", "alice", json!({"kind": "static", "root": www}));
}

#[track_caller]
fn assert_no_root(opened: Result<OpenedRoot, KeeperCallError>, what: &str) {
    match opened {
        Ok(root) => {
            panic!("{what} was opened; it has an etc/passwd: {}", file_in(&root.dir, Path::new("etc/passwd")))
        }
        refused => assert_eq!(refusal(refused), (FailureKind::Forbidden, 303), "{what}"),
    }
}

fn roots() {
    let mut world = with_bob();
    with_roots(&mut world);
    let world = world.start();
    world.run(async |keeper| {
        run_bobs(&keeper).await;
        let www = world.home("alice").join("www");
        for through in through_the_keeper(&world) {
            for to in
                [through.clone(), through.join(world.home("bob").strip_prefix("/").unwrap()).join("www")]
            {
                put_link(&to, &www);
                for site in ["relative", "absolute"] {
                    assert_no_root(
                        keeper.open_root(&site_name(site)).await,
                        &format!("{site}: {}", to.display()),
                    );
                }
            }
        }
    });
}

fn roots_elsewhere() {
    let mut world = World::new();
    with_roots(&mut world);
    let logs = world.dir.path().join("logs");
    fs::create_dir(&logs).unwrap();
    let world = world.start();
    world.run(async |keeper| {
        let www = world.home("alice").join("www");
        let targets = [
            "/",
            "/etc",
            "/usr/share",
            "/tmp",
            "/proc",
            "/proc/1",
            "/proc/self/cwd",
            "/sys/kernel",
            "/dev",
            "/run",
        ];
        for to in targets.iter().map(Path::new).chain([logs.as_path(), &world.home("bob")]) {
            put_link(to, &www);
            for site in ["relative", "absolute"] {
                assert_no_root(
                    keeper.open_root(&site_name(site)).await,
                    &format!("{site}: {}", to.display()),
                );
            }
        }
    });
}

/// A record of the operator's, and what the tenant's own rights say of it.
fn unlisted_roots() {
    let mut world = World::new();
    let dir = world.dir.path().join("of-root");
    fs::create_dir(&dir).unwrap();
    world.site("absolute", "alice", json!({"kind": "static", "root": dir}));
    for (name, path) in
        [("proc", "/proc"), ("sys", "/sys/kernel"), ("dev", "/dev"), ("descriptors", "/proc/self/fd")]
    {
        world.site(name, "alice", json!({"kind": "static", "root": path}));
    }
    let world = world.start();
    world.run(async |keeper| {
        for (mode, group, is_served) in [
            (0o700, 0, false),
            (0o750, 0, false),
            (0o711, 0, false),
            (0o710, ALICE, false),
            (0o755, 0, true),
            (0o750, ALICE, true),
        ] {
            chown(&dir, Some(0), Some(group)).unwrap();
            set_mode(&dir, mode);
            let opened = keeper.open_root(&site_name("absolute")).await;
            assert_eq!(opened.is_ok(), is_served, "{mode:o} of group {group}");
            if !is_served {
                assert_eq!(refusal(opened), (FailureKind::Forbidden, 303));
            }
        }
        for site in ["proc", "sys", "dev", "descriptors"] {
            assert_no_root(keeper.open_root(&site_name(site)).await, site);
        }
    });
}

fn secrets() {
    let world = with_bob().start();
    world.run(async |keeper| {
        run_bobs(&keeper).await;
        let key = world.home("alice").join("www/key");
        let backends = [json!("www/key"), json!(key)]
            .map(|secret| serving(&world, "alice", &json!({"secrets": {"KEY": secret}})));
        let file = world.home("bob").join("www/file");
        let through = through_the_keeper(&world);
        let through = through.iter().map(|root| root.join(file.strip_prefix("/").unwrap()));
        let others =
            [file.as_path(), "/etc/passwd".as_ref(), "/proc/self/environ".as_ref(), "/proc/version".as_ref()];
        for to in through.chain(others.map(Path::to_path_buf)) {
            put_link(&to, &key);
            for backend in &backends {
                let asked = ask_anew(&world, &keeper, "alice", backend.clone()).await;
                assert_eq!(refusal(asked), (FailureKind::Forbidden, 319), "{}", to.display());
            }
        }
        fs::remove_file(&key).unwrap();
        world.script("key", "hers");
        for backend in backends {
            ask_anew(&world, &keeper, "alice", backend).await.unwrap();
        }
    });
}

fn layouts() {
    let world = with_bob();
    let bobs = world.home("bob").join("www/layout");
    let mut writer = Writer::new(&bobs);
    let layer = writer.plain(Layer::new().file("etc/greeting", BEHIND));
    writer.image("v1", architecture(), &[layer]);
    let layout = world.home("alice").join("www/layout");
    let backend = serving(&world, "alice", &json!({"base": format!("oci:{}:v1", layout.display())}));
    let world = world.start();
    world.run(async |keeper| {
        run_bobs(&keeper).await;
        let through = through_the_keeper(&world);
        for to in through.iter().map(|root| root.join(bobs.strip_prefix("/").unwrap())).chain([bobs.clone()])
        {
            put_link(&to, &layout);
            let asked = ask_anew(&world, &keeper, "alice", backend.clone()).await;
            assert_eq!(refusal(asked), (FailureKind::Broken, 326), "{}", to.display());
            // The same with the blobs of a layout that is her own.
            fs::remove_file(&layout).unwrap();
            fs::create_dir(&layout).unwrap();
            put_link(to.join("blobs"), &layout.join("blobs"));
            for name in ["oci-layout", "index.json"] {
                fs::copy(bobs.join(name), layout.join(name)).unwrap();
            }
            let asked = ask_anew(&world, &keeper, "alice", backend.clone()).await;
            assert_eq!(refusal(asked), (FailureKind::Broken, 326), "blobs of {}", to.display());
        }
    });
    assert!(!world.dir.path().join("state/bases").exists(), "nothing was unpacked");
}

/// Where a tenant would like to look, or to write.
fn elsewhere(world: &World) -> Vec<PathBuf> {
    let own = [world.dir.path().to_owned(), world.home("bob"), world.dir.path().join("state")];
    let node = [
        "/proc",
        "/run",
        "/tmp",
        "/",
        "/home",
        "/dev",
        "/sys/fs/cgroup",
        "/sys/kernel",
        "/proc/self/fd",
        "/proc/1/root",
    ];
    node.iter().map(PathBuf::from).chain(own).collect()
}

/// None of these links is what an application gets, whether its record names them from the home or from `/`.
fn no_link_is_bound(expected: (FailureKind, u16), more: impl Fn(&Path) -> Value) {
    let world = World::new();
    let data = world.home("alice").join("data");
    fs::create_dir(&data).unwrap();
    fs::create_dir(world.dir.path().join("state")).unwrap();
    let backends = [Path::new("data"), &data].map(|named| serving(&world, "alice", &more(named)));
    let world = world.start();
    world.run(async |keeper| {
        for to in elsewhere(&world) {
            put_link(&to, &data);
            for backend in &backends {
                let asked = ask_anew(&world, &keeper, "alice", backend.clone()).await;
                assert_eq!(refusal(asked), expected, "{}", to.display());
            }
        }
    });
}

fn directories() {
    no_link_is_bound((FailureKind::Broken, 331), |named| json!({"directory": named, "writable": ["www"]}));
    no_link_is_bound((FailureKind::Forbidden, 310), |named| json!({"base": named}));
}

fn writables() {
    no_link_is_bound((FailureKind::Broken, 331), |named| json!({"writable": [named]}));
}

fn sockets() {
    let mut world = World::new();
    let dir = world.home("alice").join("www");
    let _listener = UnixListener::bind(dir.join("node.sock")).unwrap();
    set_mode(&dir.join("node.sock"), 0o777);
    let backend = serving(&world, "alice", &json!({"writable": ["www/node.sock"]}));
    world.site("app", "alice", backend);
    let world = world.start();
    world.run(async |keeper| {
        let asked = keeper.use_instance(&site_name("app"), None).await;
        assert_eq!(refusal(asked), (FailureKind::Broken, 331));
    });
    assert!(world.log().contains("name it in the record's databases"), "{}", world.log());
}

/// Where all of `/var` is in sight.
fn homes_beside() {
    let homes = tempfile::Builder::new().prefix("customers-").tempdir_in("/var").unwrap();
    set_mode(homes.path(), 0o755);
    let mut world = World::new();
    let file = |name: &str| homes.path().join(name).join("www/server.pl");
    for (name, uid) in [("carol", 61_003), ("dave", 61_004)] {
        let home = homes.path().join(name);
        fs::create_dir_all(home.join("www")).unwrap();
        fs::write(file(name), SERVER).unwrap();
        for path in [file(name), home.join("www"), home.clone()] {
            set_mode(&path, 0o755);
            chown(&path, Some(uid), Some(uid)).unwrap();
        }
        world.tenant(json!({"name": name, "uid": uid, "gid": uid, "home": home}));
    }
    let mut backend = app(&json!({}));
    backend["command"] = json!(["perl", file("carol"), file("carol"), file("dave"), homes.path()]);
    world.site("app", "carol", backend);
    let world = world.start();
    world.run(async |keeper| {
        let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
        assert_eq!(read_socket(used.socket).await, "serves there absent there");
    });
}

fn good_links() {
    let mut world = World::new();
    let home = world.home("alice");
    fs::create_dir_all(home.join("releases/2")).unwrap();
    put_link("releases/2", &home.join("current"));
    put_link("releases/2", &home.join("data"));
    // Where only root can put one.
    let link = world.dir.path().join("homes");
    symlink(world.dir.path(), &link).unwrap();
    world.site("beneath", "alice", json!({"kind": "static", "root": "current"}));
    world.site("absolute", "alice", json!({"kind": "static", "root": home.join("current")}));
    world.site("of-root", "bob", json!({"kind": "static", "root": link.join("bob/www")}));
    let backend = serving(&world, "alice", &json!({"directory": "www", "writable": ["data"]}));
    world.site("app", "alice", backend);
    let world = world.start();
    world.run(async |keeper| {
        for site in ["beneath", "absolute", "of-root"] {
            keeper.open_root(&site_name(site)).await.unwrap_or_else(|error| panic!("{site}: {error}"));
        }
        let used = keeper.use_instance(&site_name("app"), None).await.unwrap();
        assert_eq!(read_socket(used.socket).await, "serves ");
    });
}
