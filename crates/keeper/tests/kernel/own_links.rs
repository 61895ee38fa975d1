//! Links beneath a document root that lead out of it: which of a tenant's are followed, and what the edge gets for them.
//!
//! Not here: each way by one user (unit tests of `tenant_path::links`), what visitors get (e2e `own_links`).

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nagaya_keeper_api::client::{KeeperCallError, KeeperClient};
use nagaya_keeper_api::protocol::{FailureKind, OpenedRoot};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use serde_json::json;

use crate::Fact;
use crate::world::{ALICE, BOB, World, refusal, set_mode, site_name};

pub const ROOT: &[Fact] = &[
    ("a link out of a document root leads to the tenant's own files, with nothing above", own_files),
    ("a link out of a document root leads to nothing of anybody else's", others_files),
    ("a link that changes while it is looked up leads to what is the tenant's own", swapped_links),
    (
        "links of one tenant without number keep few descriptors, and no other tenant from its root",
        many_links,
    ),
    ("a file that a link leads to is opened with the rights of who asks", closed_files),
];

/// Alice's site `s`, and `storage` beside its root.
fn with_storage() -> World {
    let mut world = World::new();
    world.site("s", "alice", json!({"kind": "static", "root": "www"}));
    world.site("none", "alice", json!({"kind": "static", "root": "www", "links": "none"}));
    world.site("bobs", "bob", json!({"kind": "static", "root": "www"}));
    make_directory(&world, "alice", "storage");
    fs::write(world.home("alice").join("storage/a.txt"), "avatar").unwrap();
    world.own(&world.home("alice").join("storage/a.txt"), ALICE);
    world
}

fn make_directory(world: &World, tenant: &str, name: &str) -> PathBuf {
    let path = world.home(tenant).join(name);
    fs::create_dir_all(&path).unwrap();
    world.own(&path, if tenant == "alice" { ALICE } else { BOB });
    path
}

/// A link beneath alice's root.
fn link(world: &World, name: &str, to: impl AsRef<Path>, owner: u32) {
    let at = world.home("alice").join("www").join(name);
    symlink(to, &at).unwrap();
    lchown(at, Some(owner), Some(owner)).unwrap();
}

async fn open(keeper: &KeeperClient, path: &str) -> Result<OpenedRoot, KeeperCallError> {
    keeper.open_link(&site_name("s"), path).await
}

fn inode(file: &OwnedFd) -> u64 {
    rustix::fs::fstat(file).unwrap().st_ino
}

fn own_files() {
    let world = with_storage();
    let storage = world.home("alice").join("storage");
    // Open to all: modes do not stand in the way.
    for path in [&world.home("alice"), &storage] {
        set_mode(path, 0o777);
    }
    link(&world, "relative", "../storage", ALICE);
    link(&world, "absolute", &storage, ALICE);
    link(&world, "roots", "../storage", 0);
    link(&world, "file", "../storage/a.txt", ALICE);
    let world = world.start();
    world.run(async |keeper| {
        for name in ["relative", "absolute", "roots"] {
            let dir = open(&keeper, name).await.unwrap().dir;
            assert_eq!(inode(&dir), fs::metadata(&storage).unwrap().ino(), "{name}");
            for path in ["../www", "../../etc/passwd", "../../../../../../proc/self"] {
                let found = rustix::fs::openat(&dir, path, OFlags::RDONLY, Mode::empty());
                assert_eq!(found.unwrap_err(), Errno::NOENT, "{path}");
            }
            let create = OFlags::CREATE | OFlags::WRONLY;
            let planted = rustix::fs::openat(&dir, "planted", create, Mode::from_raw_mode(0o644));
            assert_eq!(planted.unwrap_err(), Errno::ROFS);
        }
        let file = open(&keeper, "file").await.unwrap().dir;
        let mut text = [0; 16];
        assert_eq!(rustix::io::read(&file, &mut text), Ok(6));
        assert_eq!(rustix::io::write(&file, b"x"), Err(Errno::BADF));
        assert_eq!(refusal(open(&keeper, "relative/none").await), (FailureKind::NotFound, 358));
        for path in ["", "/relative", "relative/..", "../storage", "./relative", "x\0y"] {
            assert_eq!(refusal(open(&keeper, path).await), (FailureKind::Invalid, 358), "{path:?}");
        }
        let off = keeper.open_link(&site_name("none"), "relative").await;
        assert_eq!(refusal(off), (FailureKind::Forbidden, 358));
        assert_eq!(refusal(keeper.open_link(&site_name("gone"), "x").await), (FailureKind::NotFound, 301));
    });
}

/// Files of others, and those of alice's that no link is to show.
fn others_files() {
    let world = with_storage();
    let (alice, bob) = (world.home("alice"), world.home("bob"));
    // Open to all that only the keeper's own rules are in the way.
    for home in [&alice, &bob] {
        set_mode(home, 0o777);
        set_mode(&home.join("www"), 0o777);
    }
    fs::write(bob.join("www/page"), "bob's").unwrap();
    chown(bob.join("www/page"), Some(BOB), Some(ALICE)).unwrap();
    set_mode(&bob.join("www/page"), 0o640);
    // In her home, and not hers.
    for (name, owner) in [("of-root", 0), ("of-bob", BOB)] {
        let path = make_directory(&world, "alice", name);
        chown(path, Some(owner), Some(owner)).unwrap();
    }
    fs::hard_link(bob.join("www/page"), alice.join("hard")).unwrap();
    make_directory(&world, "alice", ".ssh");
    make_directory(&world, "alice", "of-bob/hers");
    for (name, to) in [
        ("home-of-bob", bob.join("www")),
        ("page-of-bob", bob.join("www/page")),
        ("passwd", "/etc/passwd".into()),
        ("proc", "/proc/self/root".into()),
        ("descriptor", format!("/proc/{}/fd/3", std::process::id()).into()),
        ("up", "../../bob/www".into()),
        ("above", alice.join("../bob/www")),
        ("home", "..".into()),
        ("keys", "../.ssh".into()),
        ("of-root", "../of-root".into()),
        ("of-bob", "../of-bob".into()),
        ("hard", "../hard".into()),
    ] {
        link(&world, name, to, ALICE);
    }
    link(&world, "by-bob", "../storage", BOB);
    // Her own again, behind what is not hers.
    symlink("../storage", alice.join("of-bob/back")).unwrap();
    lchown(alice.join("of-bob/back"), Some(BOB), Some(BOB)).unwrap();
    link(&world, "back", "../of-bob/back", ALICE);
    let world = world.start();
    let names = [
        "home-of-bob",
        "page-of-bob",
        "passwd",
        "proc",
        "descriptor",
        "up",
        "above",
        "home",
        "keys",
        "of-root",
        "of-bob",
        "hard",
        "by-bob",
        "back",
    ];
    world.run(async |keeper| {
        for name in names {
            assert_eq!(refusal(open(&keeper, name).await), (FailureKind::Forbidden, 358), "{name}");
        }
        // A question for another site gets nothing of hers.
        let bobs = keeper.open_link(&site_name("bobs"), "by-bob").await;
        assert_eq!(refusal(bobs), (FailureKind::NotFound, 358));
    });
}

/// Ends what is done meanwhile, also when a test fails.
struct EndOfWork<'a>(&'a AtomicBool);

impl Drop for EndOfWork<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn swapped_links() {
    let world = with_storage();
    let (storage, bobs) = (world.home("alice").join("storage"), world.home("bob").join("www"));
    for path in [&world.home("bob"), &bobs] {
        set_mode(path, 0o777);
    }
    make_directory(&world, "alice", ".keys");
    link(&world, "swapped", "../storage", ALICE);
    let www = world.home("alice").join("www");
    let world = world.start();
    let is_over = AtomicBool::new(false);
    let right = fs::metadata(&storage).unwrap().ino();
    thread::scope(|scope| {
        let _end = EndOfWork(&is_over);
        scope.spawn(|| {
            let targets =
                [Path::new("../storage"), &bobs, Path::new("/etc"), Path::new("../.keys"), &storage];
            for to in targets.iter().cycle() {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                symlink(to, www.join("next")).unwrap();
                lchown(www.join("next"), Some(ALICE), Some(ALICE)).unwrap();
                fs::rename(www.join("next"), www.join("swapped")).unwrap();
            }
        });
        world.run(async |keeper| {
            let (mut followed, mut refused) = (0, 0);
            while followed < 100 || refused < 100 {
                match open(&keeper, "swapped").await {
                    Ok(opened) => {
                        assert_eq!(inode(&opened.dir), right);
                        followed += 1;
                    }
                    answer => {
                        assert_eq!(refusal(answer), (FailureKind::Forbidden, 358));
                        refused += 1;
                    }
                }
            }
        });
    });
}

fn many_links() {
    const LINKS: usize = 600;
    let world = with_storage();
    for number in 0..LINKS {
        make_directory(&world, "alice", &format!("storage/{number}"));
        link(&world, &format!("l{number}"), format!("../storage/{number}"), ALICE);
    }
    let world = world.start();
    let descriptors = || fs::read_dir(format!("/proc/{}/fd", world.keeper_pid())).unwrap().count();
    world.run(async |keeper| {
        let bobs = async || {
            let root = keeper.open_root(&site_name("bobs")).await.unwrap().dir;
            rustix::fs::statx(&root, "", AtFlags::EMPTY_PATH, rustix::fs::StatxFlags::MNT_ID)
                .unwrap()
                .stx_mnt_id
        };
        let (mount, before) = (bobs().await, descriptors());
        for number in 0..LINKS {
            open(&keeper, &format!("l{number}")).await.unwrap();
        }
        let more = descriptors().saturating_sub(before);
        assert!(more < 300, "{LINKS} links keep {more} descriptors open");
        assert_eq!(bobs().await, mount, "the mount of bob's root is still kept");
    });
}

/// The one who asks is root here; visitors' edge is not (e2e).
fn closed_files() {
    let world = with_storage();
    let file = world.home("alice").join("storage/a.txt");
    link(&world, "file", "../storage/a.txt", ALICE);
    let world = world.start();
    world.run(async |keeper| {
        open(&keeper, "file").await.unwrap();
        // Its tenant must be able to read it, whoever asks.
        set_mode(&file, 0o000);
        assert_eq!(refusal(open(&keeper, "file").await), (FailureKind::Forbidden, 358));
    });
}
