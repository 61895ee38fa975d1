//! Nothing outside the root, nothing hidden and nothing that is not a file is ever sent.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;

use proptest::prelude::*;
use rustix::fs::{CWD, FileType, Mode};

use super::*;

const SECRET: &str = "another tenant's";

/// A secret beside the root, and every way to it a tenant could make.
fn surrounded() -> World {
    let world = World::new();
    // Older than the secret, which would be taken for its compressed form.
    world.write("a/c.html", "plain");
    let outside = world.dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), SECRET).unwrap();
    fs::write(outside.join("index.html"), SECRET).unwrap();
    world.write("a/b.txt", "inside");
    symlink(outside.join("secret"), world.path("absolute")).unwrap();
    symlink("../outside/secret", world.path("relative")).unwrap();
    symlink("../outside", world.path("dir")).unwrap();
    symlink("a/../../outside/secret", world.path("detour")).unwrap();
    symlink("relative", world.path("chain")).unwrap();
    symlink(outside.join("secret"), world.path("a/c.html.gz")).unwrap();
    world
}

#[test]
fn links_out_of_the_root_are_refused() {
    let world = surrounded();
    for target in ["/absolute", "/relative", "/dir/secret", "/dir/", "/dir", "/detour", "/chain"] {
        assert!(matches!(world.refusal(target), Refusal::LinkRefused(_)), "{target}");
    }
}

#[test]
fn links_within_the_root_are_followed() {
    let world = surrounded();
    symlink("a/b.txt", world.path("file")).unwrap();
    symlink("a", world.path("folder")).unwrap();
    symlink("../a/b.txt", world.path("a/up")).unwrap();
    for target in ["/file", "/folder/b.txt", "/a/up"] {
        assert_eq!(world.get(target).text(), "inside", "{target}");
    }
}

#[test]
fn a_link_to_itself_and_a_link_to_proc_are_refused() {
    let world = World::new();
    symlink("loop", world.path("loop")).unwrap();
    symlink("/proc/self/root/etc/passwd", world.path("magic")).unwrap();
    assert!(matches!(world.refusal("/loop"), Refusal::Forbidden(_)));
    assert!(matches!(world.refusal("/magic"), Refusal::LinkRefused(_)));
}

#[test]
fn a_sibling_that_leads_outside_is_not_used() {
    let world = surrounded();
    let answer = world.get_with("/a/c.html", &[("accept-encoding", "gzip")]);
    assert_eq!((answer.text(), answer.header("content-encoding")), ("plain", ""));
}

#[test]
fn a_kept_file_is_not_served_through_a_link_put_in_its_place() {
    let world = surrounded();
    assert_eq!(world.get("/a/b.txt").text(), "inside");
    assert_eq!(world.kept(), 1);
    fs::write(world.dir.path().join("outside/b.txt"), SECRET).unwrap();
    fs::rename(world.path("a"), world.path("gone")).unwrap();
    symlink("../outside", world.path("a")).unwrap();
    assert!(matches!(world.refusal("/a/b.txt"), Refusal::LinkRefused(_)));
}

#[test]
fn fifo_and_socket_are_refused_without_blocking() {
    let world = World::new();
    rustix::fs::mknodat(CWD, world.path("fifo"), FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap();
    let _listener = UnixListener::bind(world.path("socket")).unwrap();
    assert!(matches!(world.refusal("/fifo"), Refusal::Forbidden(_)));
    assert!(matches!(world.refusal("/socket"), Refusal::Forbidden(_)));
}

#[test]
fn hidden_files_do_not_exist_except_well_known() {
    let world = World::new();
    for path in [".git/config", ".htaccess", "a/.env", "a/.well-known/x", ".well-known/acme/token"] {
        world.write(path, "x");
    }
    for target in ["/.git/config", "/.git/", "/.htaccess", "/a/.env", "/%2egit/config", "/a/.well-known/x"] {
        assert_eq!(world.refusal(target), Refusal::NotFound, "{target}");
    }
    assert_eq!(world.get("/.well-known/acme/token").status, 200);
}

#[test]
fn denied_paths_are_refused_however_they_are_written() {
    let mut world = World::new();
    world.write("data/pages/x.txt", "private");
    world.write("database.txt", "public");
    world.files.deny = vec!["/data".into(), "/index.html".into()];
    world.write("index.html", "private");
    for target in ["/data/pages/x.txt", "/data", "//data//", "/a/../data/", "/%64ata/pages/x.txt", "/"] {
        assert!(matches!(world.refusal(target), Refusal::Forbidden(_)), "{target}");
    }
    assert_eq!(world.get("/database.txt").status, 200);
}

#[test]
fn unreadable_file_is_forbidden_even_if_it_was_cached() {
    std::thread::spawn(|| {
        // This thread alone meets the file system as nobody; root would be let in everywhere.
        nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65534));
        let world = World::new();
        let path = world.write("page.html", "x");
        let folder = world.write("private/page.html", "x");
        assert_eq!(world.get("/page.html").status, 200);
        assert_eq!(world.get("/private/page.html").status, 200);
        assert_eq!(world.kept(), 2);
        fs::set_permissions(path, fs::Permissions::from_mode(0o000)).unwrap();
        fs::set_permissions(folder.parent().unwrap(), fs::Permissions::from_mode(0o600)).unwrap();
        assert!(matches!(world.refusal("/page.html"), Refusal::Forbidden(_)));
        assert!(matches!(world.refusal("/private/page.html"), Refusal::Forbidden(_)));
        fs::set_permissions(folder.parent().unwrap(), fs::Permissions::from_mode(0o700)).unwrap();
    })
    .join()
    .unwrap();
}

#[test]
fn a_name_that_is_too_long_is_not_found() {
    let world = World::new();
    assert_eq!(world.refusal(&format!("/{}", "x".repeat(300))), Refusal::NotFound);
    assert_eq!(world.refusal(&format!("/{}", "x".repeat(4000))), Refusal::TargetTooLong);
}

fn hostile_path() -> impl Strategy<Value = String> {
    let pieces = [
        "/",
        "/",
        "/",
        "..",
        ".",
        "%2e%2e",
        "a",
        "b.txt",
        "dir",
        "secret",
        "outside",
        "root",
        "absolute",
        "chain",
        "%2f",
        "%5c",
        "%00",
        "index.html",
        ".git",
        "//",
        "c.html.gz",
        "%",
        "\\",
    ];
    prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..12)
        .prop_map(|pieces| format!("/{}", pieces.concat()))
}

#[test]
fn no_path_reaches_a_secret() {
    let mut world = surrounded();
    world.files.listing = true;
    let cases = ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(cases);
    runner
        .run(&hostile_path(), |target| {
            if let Ok(answer) = world.ask(Method::GET, &target, &[("accept-encoding", "gzip")]) {
                let sent = String::from_utf8_lossy(&answer.body);
                prop_assert!(!sent.contains(SECRET), "{target}: {sent}");
            }
            Ok(())
        })
        .unwrap();
}
