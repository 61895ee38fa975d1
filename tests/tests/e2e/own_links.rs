//! Links beneath a document root that lead out of it to the tenant's own files: `storage:link`, uploads that releases share.
//!
//! Not here: which links the keeper follows (its unit and kernel tests), links to what is another tenant's (`tenants`), a file
//! system that hangs behind a link (`hung_files`).

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use nagaya_tests::client::{self, Response};
use nagaya_tests::http2;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::{OF_ROOT, World};
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "own_links",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            files_behind_a_link_are_served_by_each_kind_of_site,
            programs_behind_a_link_run_as_their_tenant,
            a_program_sends_a_file_behind_a_link,
            a_link_that_is_refused_says_why_to_the_operator_alone,
            a_file_that_is_closed_to_the_edge_is_closed_behind_a_link,
            links_are_switched_off_and_on,
            a_switched_link_is_seen,
            a_release_brings_its_own_links,
        ],
    ),
};

const KINDS: [&str; 3] = ["static", "php", "cgi"];

/// Names a file to be sent where the query does.
const FRONT: &str = r#"#!/bin/sh
[ -z "$QUERY_STRING" ] || printf 'X-Sendfile: %s\r\n' "$QUERY_STRING"
printf 'Content-Type: text/plain\r\n\r\nfront'
"#;

/// One tenant's sites of each kind, with the same tree: `public` and, beside it, `storage`.
fn world() -> World {
    let site = |name: &str, backend: serde_json::Value| json!({ "name": name, "tenant": "alice", "hosts": [format!("{name}.test")], "backend": backend });
    let front =
        |kind: &str, front: &str| json!({ "kind": kind, "root": "app/public", "front_controller": front });
    let world = World::builder()
        .set("tenants", "php_workers = 2")
        .tenant("alice")
        .tenant("bob")
        .site(site("static", json!({ "kind": "static", "root": "app/public", "error_documents": { "404": "storage/404.html" } })))
        .site(site("php", front("php", "index.php")))
        .site(site("cgi", front("cgi", "index.cgi")))
        .site(site("off", json!({ "kind": "static", "root": "app/public" })))
        .site(site("release", json!({ "kind": "static", "root": "deploy/current/public" })))
        .start();
    world.write_program("alice", "app/public/index.cgi", FRONT);
    world.write("alice", "app/public/index.php", "<?php echo 'front';");
    for (name, text) in [
        ("a.txt", "avatar"),
        ("404.html", "nothing here"),
        ("sub/index.html", "index"),
        ("x.php", "<?php echo posix_getuid(), ' ', $_SERVER['SCRIPT_NAME'];"),
    ] {
        world.write("alice", &format!("app/storage/public/{name}"), text);
    }
    world.write_program(
        "alice",
        "app/storage/public/x.cgi",
        "#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\n'\nid -u\n",
    );
    link(&world, "app/public/storage", "../storage/public");
    // As `php artisan storage:link` makes it.
    link(&world, "app/public/absolute", world.home("alice").join("app/storage/public"));
    link(&world, "app/public/one.txt", "../storage/public/a.txt");
    world
}

fn link(world: &World, name: &str, to: impl AsRef<Path>) {
    symlink(to, world.home("alice").join(name)).expect("our own directory");
    world.give("alice");
}

fn host(kind: &str) -> String {
    format!("{kind}.test")
}

fn files_behind_a_link_are_served_by_each_kind_of_site(world: &World) {
    for kind in KINDS {
        let host = host(kind);
        let get = |target: &str| world.get(&host, target);
        let whole = get("/storage/a.txt").expect(200);
        assert_eq!(
            (whole.text().as_str(), whole.header("content-type")),
            ("avatar", Some("text/plain; charset=utf-8"))
        );
        assert_eq!(get("/absolute/a.txt").expect(200).text(), "avatar");
        assert_eq!(get("/one.txt").expect(200).text(), "avatar");
        assert_eq!(get("/storage/sub/").expect(200).text(), "index");
        assert_eq!(get("/storage/sub").expect(301).header("location"), Some("/storage/sub/"));
        let with = |fields: &str| client::get_with(world.http(), &host, "/storage/a.txt", fields);
        assert_eq!(with("Range: bytes=1-2\r\n").expect(206).text(), "va");
        let etag = whole.header("etag").expect("it has one").to_owned();
        with(&format!("If-None-Match: {etag}\r\n")).expect(304);
        let missing = get("/storage/none.txt");
        match kind {
            "static" => {
                assert_eq!(
                    missing.expect(404).text(),
                    "nothing here",
                    "its error document is behind the link"
                );
                assert_eq!(get("/storage").expect(301).header("location"), Some("/storage/"));
            }
            // Also a directory without an index, as beneath the root.
            _ => assert_eq!(
                (missing.expect(200).text(), get("/storage/").text()),
                ("front".into(), "front".into())
            ),
        }
        let fields =
            [(":method", "GET"), (":scheme", "http"), (":authority", &host), (":path", "/storage/a.txt")];
        let answer = http2::ask(world.http(), &fields, None);
        let expected = http2::Answer::Response { status: 200, interim: Vec::new(), body: b"avatar".to_vec() };
        assert_eq!(answer, expected, "{kind}");
    }
}

fn programs_behind_a_link_run_as_their_tenant(world: &World) {
    let uid = world.uid("alice");
    for directory in ["storage", "absolute"] {
        let text = world.get("php.test", &format!("/{directory}/x.php/info")).expect(200).text();
        assert_eq!(text, format!("{uid} /{directory}/x.php"));
        assert_eq!(
            world.get("cgi.test", &format!("/{directory}/x.cgi")).expect(200).text(),
            format!("{uid}\n")
        );
    }
    // Bob's script in its place is not run.
    world.write("bob", "x.php", "<?php echo 'of bob';");
    fs::set_permissions(world.home("bob"), fs::Permissions::from_mode(0o755)).expect("our own directory");
    link(world, "app/public/of-bob", world.home("bob"));
    for target in ["/of-bob/x.php", "/of-bob/none"] {
        let answer = world.get("php.test", target).expect(403);
        assert!(!answer.text().contains("of bob"), "{answer:?}");
    }
}

fn a_program_sends_a_file_behind_a_link(world: &World) {
    let root = world.home("alice").join("app/public");
    for file in ["storage/a.txt".to_owned(), root.join("one.txt").display().to_string()] {
        assert_eq!(
            world.get("cgi.test", &format!("/index.cgi?{file}")).expect(200).text(),
            "avatar",
            "{file}"
        );
    }
}

/// The id that a page names.
fn id_in(answer: &Response) -> String {
    let text = answer.text();
    let id = text.split("request ").nth(1).and_then(|rest| rest.split('<').next());
    id.unwrap_or_else(|| panic!("it has an id: {text}")).to_owned()
}

fn a_link_that_is_refused_says_why_to_the_operator_alone(world: &World) {
    fs::create_dir(world.home("alice").join(".ssh")).expect("our own directory");
    fs::create_dir(world.home("alice").join(OF_ROOT)).expect("our own directory");
    for (name, to, why) in [
        ("keys", "../../.ssh", "'.ssh' is hidden"),
        ("passwd", "/etc/passwd", "out of its tenant's home"),
        ("process", "/proc/self/root", "out of its tenant's home"),
        ("home", "../..", "all of its tenant's home"),
        ("app", "..", "above the document root"),
        ("roots", "../../of-root", "is of user 0"),
    ] {
        link(world, &format!("app/public/{name}"), to);
        let answer = world.get("static.test", &format!("/{name}/x")).expect(403);
        let text = answer.text();
        assert!(text.contains("NGY0358") && text.contains("out of the document root"), "{text}");
        assert!(!text.contains("tenant") && !text.contains(".ssh"), "{text}");
        let told = world.cli(&["explain", &id_in(&answer)]);
        assert!(told.contains(why), "{name}: {told}");
        assert!(world.log().lines().any(|line| line.contains("NGY0358") && line.contains(why)), "{name}");
    }
}

/// The keeper opens one file for the edge, and with the edge's rights.
fn a_file_that_is_closed_to_the_edge_is_closed_behind_a_link(world: &World) {
    let file = world.write("alice", "app/storage/closed.txt", "closed");
    link(world, "app/public/closed.txt", "../storage/closed.txt");
    assert_eq!(world.get("static.test", "/closed.txt").expect(200).text(), "closed");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("our own file");
    wait::until("it is closed", || world.get("static.test", "/closed.txt").status == 403);
}

fn links_are_switched_off_and_on(world: &World) {
    let get = || world.get("off.test", "/storage/a.txt");
    get().expect(200);
    world.cli(&["site", "set", "off", "--links", "none"]);
    wait::until("no link is followed", || get().status == 403);
    world.get("off.test", "/one.txt").expect(403);
    world.get("off.test", "/index.php").expect(200);
    world.cli(&["site", "set", "off", "--links", "own"]);
    wait::until("links are followed", || get().status == 200);
}

fn a_switched_link_is_seen(world: &World) {
    for number in 0..2 {
        world.write("alice", &format!("app/shared/{number}/page.txt"), number.to_string());
    }
    link(world, "app/public/shared", "../shared/0");
    let get = || world.get("static.test", "/shared/page.txt").expect(200).text();
    assert_eq!(get(), "0");
    let public = world.home("alice").join("app/public");
    for number in [1, 0] {
        link(world, "app/public/next", format!("../shared/{number}"));
        fs::rename(public.join("next"), public.join("shared")).expect("it is switched");
        wait::until("the other directory is shown", || get() == number.to_string());
    }
    // A directory in its place is one of the root's own.
    fs::remove_file(public.join("shared")).expect("the link");
    world.write("alice", "app/public/shared/page.txt", "beneath");
    wait::until("the directory is shown", || {
        world.get("static.test", "/shared/page.txt").text() == "beneath"
    });
}

fn a_release_brings_its_own_links(world: &World) {
    for release in 0..2 {
        world.write("alice", &format!("deploy/shared/{release}/page.txt"), release.to_string());
        world.write("alice", &format!("deploy/releases/{release}/public/release.txt"), release.to_string());
        link(
            world,
            &format!("deploy/releases/{release}/public/uploads"),
            format!("../../../shared/{release}"),
        );
    }
    link(world, "deploy/current", "releases/0");
    let deploy = world.home("alice").join("deploy");
    let get = |target: &str| world.get("release.test", target).expect(200).text();
    wait::until("the first release is shown", || world.get("release.test", "/release.txt").status == 200);
    for release in [1, 0, 1] {
        link(world, "deploy/next", format!("releases/{release}"));
        fs::rename(deploy.join("next"), deploy.join("current")).expect("it is switched");
        wait::until("the release is shown", || get("/release.txt") == release.to_string());
        assert_eq!(get("/uploads/page.txt"), release.to_string(), "what the link leads to is of the release");
    }
}
