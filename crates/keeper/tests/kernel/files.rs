//! Document roots and certificates: opened with whose rights, and never outside.
//!
//! Not here: what the edge reads beneath a root (`edge`).

use std::fs;
use std::os::unix::fs::symlink;

use nagaya_keeper_api::protocol::FailureKind;
use rustix::fs::{Mode, OFlags};
use serde_json::json;

use crate::Fact;
use crate::world::{ALICE, BOB, World, refusal, set_mode, site_name};

pub const ROOT: &[Fact] = &[
    ("a document root inside a closed home is opened for the edge", root_in_closed_home),
    ("a document root that is another tenant's is refused", others_root),
    ("a certificate is opened by name and nothing else is", certificates),
];

fn root_in_closed_home() {
    let mut world = World::new();
    world.site("s", "alice", json!({"kind": "static", "root": "www"}));
    world.site("home", "alice", json!({"kind": "static", "root": ""}));
    world.site("app", "alice", json!({"kind": "app", "command": ["x"], "directory": ""}));
    world.site("gone", "alice", json!({"kind": "static", "root": "not/there"}));
    world.script("index.html", "hello");
    let world = world.start();
    world.run(async |keeper| {
        let root = keeper.open_root(&site_name("s")).await.unwrap().dir;
        let file = rustix::fs::openat(&root, "index.html", OFlags::RDONLY, Mode::empty()).unwrap();
        let mut text = [0; 16];
        assert_eq!(rustix::io::read(file, &mut text).unwrap(), 5);
        assert!(rustix::fs::fcntl_getfl(&root).unwrap().contains(OFlags::PATH));
        keeper.open_root(&site_name("home")).await.unwrap();
        assert_eq!(refusal(keeper.open_root(&site_name("app")).await), (FailureKind::Invalid, 302));
        assert_eq!(refusal(keeper.open_root(&site_name("gone")).await), (FailureKind::NotFound, 303));
        assert_eq!(refusal(keeper.open_root(&site_name("none")).await), (FailureKind::NotFound, 301));
    });
}

fn others_root() {
    let mut world = World::new();
    let bobs = world.home("bob").join("www");
    symlink(&bobs, world.home("alice").join("link")).unwrap();
    symlink("../bob/www", world.home("alice").join("relative")).unwrap();
    for (name, root) in
        [("a", json!("link")), ("b", json!("relative")), ("c", json!(bobs)), ("d", json!("../bob"))]
    {
        world.site(name, "alice", json!({"kind": "static", "root": root}));
    }
    world.site("e", "bob", json!({"kind": "static", "root": bobs}));
    let world = world.start();
    world.run(async |keeper| {
        for name in ["a", "b", "c", "d"] {
            assert_eq!(
                refusal(keeper.open_root(&site_name(name)).await),
                (FailureKind::Forbidden, 303),
                "{name}"
            );
        }
        // The threads that looked with alice's rights look with bob's now.
        for _ in 0..32 {
            keeper.open_root(&site_name("e")).await.unwrap();
            assert_eq!(refusal(keeper.open_root(&site_name("c")).await), (FailureKind::Forbidden, 303));
        }
    });
    assert_ne!(ALICE, BOB);
}

fn certificates() {
    let world = World::new();
    let dir = world.dir.path().join("certificates");
    fs::create_dir(&dir).unwrap();
    set_mode(&dir, 0o700);
    fs::write(dir.join("example.org.pem"), "chain and key").unwrap();
    fs::write(dir.join("_wildcard.example.org.pem"), "wild").unwrap();
    fs::write(world.dir.path().join("outside.pem"), "outside").unwrap();
    symlink("../outside.pem", dir.join("escape.pem")).unwrap();
    symlink("example.org.pem", dir.join("same.org.pem")).unwrap();
    fs::create_dir(dir.join("directory.pem")).unwrap();
    let world = world.with(|options| options.certificates = Some(dir)).start();
    world.run(async |keeper| {
        for name in ["example.org", "same.org", "_wildcard.example.org"] {
            assert!(keeper.open_certificate(name).await.unwrap().is_some(), "{name}");
        }
        assert!(keeper.open_certificate("default").await.unwrap().is_none());
        for name in ["escape", "directory"] {
            assert_eq!(refusal(keeper.open_certificate(name).await), (FailureKind::Forbidden, 312), "{name}");
        }
        for name in ["", "..", "../outside", "a/b", "EXAMPLE.org", "*.example.org", "x\0y"] {
            assert_eq!(refusal(keeper.open_certificate(name).await), (FailureKind::Invalid, 312), "{name}");
        }
    });
}
