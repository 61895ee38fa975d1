//! What the edge gets to open things beneath or to speak over: a document root from which nothing else is reached, and
//! connections to servers' sockets that it cannot name.
//!
//! Not here: with whose rights a root is opened (`files`, `links`).

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use nagaya_keeper_api::protocol::FailureKind;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use serde_json::{Value, json};

use crate::Fact;
use crate::world::{ALICE, World, refusal, set_mode, site_name};

pub const CLOSED_OFF: &[Fact] = &[
    ("no path leads up from a document root, and nothing is written through it", nothing_above),
    ("a document root that is asked for again is the same mount", same_mount),
    ("what is mounted beneath a document root is found, also later", mounted_later),
    ("a server's socket is connected to as the one who asks", servers),
    ("a link of a tenant's leads to no other server", linked_servers),
    ("a server that is not there, is no socket, or takes nobody is told as such", absent_servers),
];

fn open(root: &OwnedFd, path: &str) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(root, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

fn inode_and_mount(root: &OwnedFd, path: &str) -> (u64, u64) {
    let mask = StatxFlags::INO | StatxFlags::MNT_ID;
    let found = rustix::fs::statx(root, path, AtFlags::empty(), mask).unwrap();
    (found.stx_ino, found.stx_mnt_id)
}

fn with_root() -> World {
    let mut world = World::new();
    world.site("s", "alice", json!({"kind": "static", "root": "www"}));
    world.script("index.html", "hello");
    world
}

fn nothing_above() {
    let world = with_root();
    // Open to all: neither modes nor the tenant's home stand in the way.
    for path in [world.home("alice"), world.home("alice").join("www"), world.dir.path().to_path_buf()] {
        set_mode(&path, 0o777);
    }
    fs::write(world.home("alice").join("beside"), "").unwrap();
    let world = world.start();
    world.run(async |keeper| {
        let root = keeper.open_root(&site_name("s")).await.unwrap().dir;
        open(&root, "index.html").unwrap();
        for path in
            ["../beside", "../../etc/passwd", "../../../../../../../../etc/passwd", "../../../../proc/self"]
        {
            assert_eq!(open(&root, path).unwrap_err(), Errno::NOENT, "{path}");
        }
        assert_eq!(inode_and_mount(&root, ".."), inode_and_mount(&root, "."));
        let create = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        let planted = rustix::fs::openat(&root, "planted", create, Mode::from_raw_mode(0o644));
        assert_eq!(planted.unwrap_err(), Errno::ROFS);
        assert_eq!(rustix::fs::unlinkat(&root, "index.html", AtFlags::empty()).unwrap_err(), Errno::ROFS);
    });
}

fn same_mount() {
    let world = with_root();
    let world = world.start();
    world.run(async |keeper| {
        let ask = async || inode_and_mount(&keeper.open_root(&site_name("s")).await.unwrap().dir, ".");
        let first = ask().await;
        for _ in 0..8 {
            assert_eq!(ask().await, first);
        }
        // Another directory in its place is another mount.
        let www = world.home("alice").join("www");
        fs::rename(&www, world.home("alice").join("old")).unwrap();
        fs::create_dir(&www).unwrap();
        chown(&www, Some(ALICE), Some(ALICE)).unwrap();
        assert_ne!(ask().await.0, first.0);
    });
}

/// A mount of the node's, as long as a test runs.
struct Mounted(PathBuf);

impl Mounted {
    fn memory(at: PathBuf) -> Self {
        fs::create_dir_all(&at).unwrap();
        let mounted = Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&at).status().unwrap();
        assert!(mounted.success());
        fs::write(at.join("file"), "mounted").unwrap();
        Self(at)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn mounted_later() {
    let world = with_root();
    let www = world.home("alice").join("www");
    let first = Mounted::memory(www.join("first"));
    let world = world.start();
    world.run(async |keeper| {
        let root = async || keeper.open_root(&site_name("s")).await.unwrap().dir;
        let before = root().await;
        open(&before, "first/file").unwrap();
        assert_eq!(inode_and_mount(&before, "first/.."), inode_and_mount(&before, "."));
        let second = Mounted::memory(www.join("second"));
        open(&root().await, "second/file").unwrap();
        // Elsewhere: that concerns nobody.
        let now = inode_and_mount(&root().await, ".");
        let elsewhere = Mounted::memory(world.dir.path().join("elsewhere"));
        assert_eq!(inode_and_mount(&root().await, "."), now);
        drop((second, elsewhere));
        assert_eq!(open(&root().await, "second/file").unwrap_err(), Errno::NOENT);
    });
    drop(first);
}

// === Servers ===

fn http(path: &Path) -> Value {
    json!({"kind": "http", "address": format!("unix:{}", path.display())})
}

fn listen(path: &Path) -> UnixListener {
    let listener = UnixListener::bind(path).unwrap();
    set_mode(path, 0o666);
    listener
}

fn servers() {
    let mut world = World::new();
    let (outside, inside) = (world.dir.path().join("one.sock"), world.home("alice").join("two.sock"));
    world.site("outside", "alice", http(&outside));
    world.site("inside", "alice", http(&inside));
    world.site("tcp", "alice", json!({"kind": "http", "address": "127.0.0.1:1"}));
    world.site("s", "alice", json!({"kind": "static", "root": "www"}));
    let world = world.start();
    world.run(async |keeper| {
        for (site, path) in [("outside", &outside), ("inside", &inside)] {
            let listener = listen(path);
            let ours = keeper.connect_server(&site_name(site)).await.unwrap();
            let (theirs, _) = listener.accept().unwrap();
            let peer = rustix::net::sockopt::socket_peercred(&theirs).unwrap();
            assert_eq!(peer.uid, rustix::process::geteuid());
            rustix::io::write(&ours, b"x").unwrap();
            let mut byte = [0];
            assert_eq!(rustix::io::read(&theirs, &mut byte).unwrap(), 1);
            assert!(rustix::fs::fcntl_getfl(&ours).unwrap().contains(OFlags::NONBLOCK));
        }
        for site in ["tcp", "s"] {
            assert_eq!(
                refusal(keeper.connect_server(&site_name(site)).await),
                (FailureKind::Invalid, 302),
                "{site}"
            );
        }
        assert_eq!(refusal(keeper.connect_server(&site_name("none")).await), (FailureKind::NotFound, 301));
    });
}

fn linked_servers() {
    let mut world = World::new();
    let other = world.dir.path().join("other.sock");
    let (link, through) = (world.home("alice").join("link.sock"), world.home("alice").join("run/other.sock"));
    // Outside of the home, in a directory of alice's.
    let spot = world.dir.path().join("spot");
    fs::create_dir(&spot).unwrap();
    symlink(&other, spot.join("link.sock")).unwrap();
    for path in [&spot, &spot.join("link.sock")] {
        std::os::unix::fs::lchown(path, Some(ALICE), Some(ALICE)).unwrap();
    }
    symlink(&other, &link).unwrap();
    symlink(world.dir.path(), world.home("alice").join("run")).unwrap();
    // Where only root can put one.
    let roots = world.dir.path().join("roots.sock");
    symlink("other.sock", &roots).unwrap();
    let sites =
        [("link", &link), ("through", &through), ("spot", &spot.join("link.sock")), ("roots", &roots)];
    for (name, path) in sites {
        world.site(name, "alice", http(path));
    }
    let world = world.start();
    let _listener = listen(&other);
    world.run(async |keeper| {
        for site in ["link", "through", "spot"] {
            assert_eq!(
                refusal(keeper.connect_server(&site_name(site)).await),
                (FailureKind::Forbidden, 328),
                "{site}"
            );
        }
        keeper.connect_server(&site_name("roots")).await.unwrap();
    });
}

fn absent_servers() {
    let mut world = World::new();
    let at = |name: &str| world.dir.path().join(name);
    let (gone, dead, file, full) = (at("gone"), at("dead"), at("file"), at("full"));
    for (name, path) in [("gone", &gone), ("dead", &dead), ("file", &file), ("full", &full)] {
        world.site(name, "alice", http(path));
    }
    drop(listen(&dead));
    fs::write(&file, "").unwrap();
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(&full).unwrap()).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let world = world.start();
    world.run(async |keeper| {
        let first = keeper.connect_server(&site_name("full")).await.unwrap();
        for (site, failure) in [
            ("gone", FailureKind::NotFound),
            ("dead", FailureKind::Broken),
            ("file", FailureKind::Broken),
            ("full", FailureKind::Busy),
        ] {
            assert_eq!(refusal(keeper.connect_server(&site_name(site)).await), (failure, 328), "{site}");
        }
        drop(first);
    });
}
