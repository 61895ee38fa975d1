//! Links out of the root that are followed: served as any other file, asked for rarely, and never for long.

use std::os::unix::fs::symlink;

use nagaya_records::record::LinkPolicy;

use super::*;
use crate::backends::files::links::{ASKS_PER_SECOND_MAX, LINKS_PER_LOOK_MAX, LINKS_PER_SITE_MAX};
use crate::backends::files::root::ROOT_AGE_MAX;

/// A root with a link to a directory beside it, as `storage:link` makes it.
fn linked() -> World {
    let world = World::new();
    world.opener.follows.set(true);
    world.clock.stop();
    for (name, content) in [
        ("a.txt", "avatar"),
        ("page.html", "plain"),
        ("page.html.gz", "packed"),
        ("sub/index.html", "index"),
        ("sub/x.php", "<?php"),
        ("list/one.txt", "1"),
    ] {
        let path = world.dir.path().join("storage").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    symlink("../storage", world.path("storage")).unwrap();
    world.write("own.txt", "own");
    world
}

fn asked(world: &World) -> Vec<String> {
    world.opener.asked.take()
}

#[test]
fn files_behind_a_link_are_served_as_others_are() {
    let mut world = linked();
    let answer = world.get("/storage/a.txt");
    assert_eq!((answer.status, answer.text()), (200, "avatar"));
    assert_eq!(answer.header("content-type"), "text/plain; charset=utf-8");
    let etag = answer.header("etag").to_owned();
    assert_eq!(world.get_with("/storage/a.txt", &[("if-none-match", &etag)]).status, 304);
    let part = world.get_with("/storage/a.txt", &[("range", "bytes=2-3")]);
    assert_eq!((part.status, part.text()), (206, "at"));
    let packed = world.get_with("/storage/page.html", &[("accept-encoding", "gzip")]);
    assert_eq!((packed.text(), packed.header("content-encoding")), ("packed", "gzip"));
    assert_eq!(world.get("/storage/sub/").text(), "index");
    for (path, to) in [("/storage", "/storage/"), ("/storage/sub?x", "/storage/sub/?x")] {
        let answer = world.get(path);
        assert_eq!((answer.status, answer.header("location")), (301, to));
    }
    assert!(matches!(world.refusal("/storage/"), Refusal::Forbidden("the directory has no index")));
    world.files.listing = true;
    assert!(world.get("/storage/list/").text().contains("./one.txt"));
    assert_eq!(world.refusal("/storage/none"), Refusal::NotFound);
    assert_eq!(world.refusal("/storage/.git"), Refusal::NotFound);
    world.files.deny = vec!["/storage/sub".into()];
    assert!(matches!(world.refusal("/storage/sub/index.html"), Refusal::Forbidden(_)));
    world.files.error_documents = [("404".to_owned(), "storage/page.html".to_owned())].into();
    let page = now_or_later(world.server.error_document(&world.root, &world.files, StatusCode::NOT_FOUND));
    assert_eq!(collect(page.expect("a document").body), b"plain");
    assert_eq!(asked(&world), ["storage"]);
}

#[test]
fn a_path_without_such_a_link_asks_nobody() {
    let world = linked();
    assert_eq!(world.get("/own.txt").text(), "own");
    assert_eq!(world.refusal("/none/storage"), Refusal::NotFound);
    assert_eq!(asked(&world), [""; 0]);
}

#[test]
fn a_kept_file_behind_a_link_is_looked_at_again() {
    let world = linked();
    world.get("/storage/a.txt");
    world.get("/storage/a.txt");
    assert_eq!(world.server.take_counts().0, 1, "it was kept");
    fs::write(world.dir.path().join("storage/a.txt"), "changed").unwrap();
    assert_eq!(world.get("/storage/a.txt").text(), "changed");
    // The file of the same path beneath the root itself is another one.
    fs::remove_file(world.path("storage")).unwrap();
    world.write("storage/a.txt", "beneath");
    world.clock.pass(ROOT_AGE_MAX);
    assert_eq!(world.get("/storage/a.txt").text(), "beneath");
}

#[test]
fn one_file_that_a_link_leads_to_has_the_links_name() {
    let world = linked();
    symlink("../storage/a.txt", world.path("me.svg")).unwrap();
    symlink("../storage/page.html", world.path("page.html")).unwrap();
    let answer = world.get("/me.svg");
    assert_eq!((answer.text(), answer.header("content-type")), ("avatar", "image/svg+xml"));
    world.get("/me.svg");
    assert_eq!(world.server.take_counts().0, 1, "it was kept");
    fs::write(world.dir.path().join("storage/a.txt"), "changed").unwrap();
    assert_eq!(world.get("/me.svg").text(), "changed");
    assert_eq!(world.refusal("/me.svg/x"), Refusal::NotFound);
    assert_eq!(world.refusal("/me.svg/"), Refusal::NotFound);
    // Its compressed form is beside it, where nobody looks.
    let answer = world.get_with("/page.html", &[("accept-encoding", "gzip")]);
    assert_eq!((answer.text(), answer.header("content-encoding")), ("plain", ""));
}

#[test]
fn old_link_target_is_asked_for_again() {
    let world = linked();
    world.get("/storage/a.txt");
    fs::create_dir(world.dir.path().join("next")).unwrap();
    fs::write(world.dir.path().join("next/a.txt"), "next").unwrap();
    fs::remove_file(world.path("storage")).unwrap();
    symlink("../next", world.path("storage")).unwrap();
    world.clock.pass(ROOT_AGE_MAX);
    assert_eq!(world.get("/storage/a.txt").text(), "next");
    assert_eq!(asked(&world), ["storage", "storage"]);
    world.clock.pass(IDLE_MAX);
    world.server.drop_idle(world.clock.now());
    assert_eq!(world.server.links.len(), 0);
}

#[test]
fn link_target_belongs_to_the_root_it_was_found_beneath() {
    let mut world = linked();
    world.get("/storage/a.txt");
    let next = world.dir.path().join("release");
    fs::create_dir_all(next.join("public")).unwrap();
    fs::create_dir(next.join("storage")).unwrap();
    fs::write(next.join("storage/a.txt"), "of the release").unwrap();
    symlink("../storage", next.join("public/storage")).unwrap();
    let links = Rc::clone(world.root.links());
    world.root = DocumentRoot::new(open_dir(&next.join("public")), world.clock.now(), links).unwrap();
    fs::remove_dir_all(world.path("")).unwrap();
    symlink(next.join("public"), world.dir.path().join("root")).unwrap();
    assert_eq!(world.get("/storage/a.txt").text(), "of the release");
    assert_eq!(asked(&world), ["storage", "storage"]);
}

#[test]
fn a_refusal_and_nothing_are_remembered_for_a_second() {
    let mut world = linked();
    world.opener.follows.set(false);
    let refusal = world.refusal("/storage/a.txt");
    assert_eq!(refusal, Refusal::LinkRefused("NGY0358: a secret reason".into()));
    let page = collect(refusal.into_response(RequestId(1)).body);
    assert!(!String::from_utf8(page).unwrap().contains("secret"), "visitors learn no reason");
    assert_eq!(world.refusal("/storage/b.txt").row().status, 403);
    assert_eq!(asked(&world), ["storage"]);
    world.opener.follows.set(true);
    world.clock.pass(ROOT_AGE_MAX);
    assert_eq!(world.get("/storage/a.txt").status, 200);
    symlink("../gone", world.path("gone")).unwrap();
    assert_eq!(world.refusal("/gone"), Refusal::NotFound);
    assert_eq!(world.refusal("/gone/x"), Refusal::NotFound);
    assert_eq!(asked(&world), ["storage", "gone"]);
    world.programs = ProgramKind::Php;
    world.write("index.php", "<?php");
    world.files.front_controller = Some("index.php".into());
    let find = |target: &str| {
        let path = SitePath::parse(target).unwrap();
        let rel = path.below_of_any("/").unwrap();
        let found = world.server.find_program(&world.root, rel, &world.files, world.programs);
        now_or_later(found).unwrap().map(|program| program.script)
    };
    assert_eq!(find("/gone/x"), Some("index.php".into()));
    assert_eq!(find("/storage/none"), Some("index.php".into()));
    assert_eq!(find("/storage/a.txt"), None);
    assert_eq!(find("/storage/sub/x.php/info"), Some("storage/sub/x.php".into()));
}

#[test]
fn links_that_are_switched_off_ask_nobody() {
    let mut world = linked();
    world.get("/storage/a.txt");
    world.files.links = LinkPolicy::None;
    assert_eq!(world.refusal("/storage/a.txt"), Refusal::Forbidden("it leads out of the document root"));
    assert_eq!(asked(&world), ["storage"]);
}

#[test]
fn a_look_goes_through_a_few_links() {
    let world = linked();
    let mut path = String::new();
    for number in 0..=LINKS_PER_LOOK_MAX {
        let directory = world.dir.path().join(format!("d{number}"));
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("x"), number.to_string()).unwrap();
        let next = format!("../d{}", number + 1);
        symlink(next, directory.join("n")).unwrap();
        path.push_str("/n");
    }
    symlink("../d0", world.path("n")).unwrap();
    for number in 0..LINKS_PER_LOOK_MAX {
        let target = format!("{}/x", &path[..2 * (number + 1)]);
        assert_eq!(world.get(&target).text(), number.to_string());
    }
    // A known part of the way is not gone again.
    assert_eq!(asked(&world).len(), LINKS_PER_LOOK_MAX);
    world.clock.pass(ROOT_AGE_MAX);
    assert!(matches!(world.refusal(&format!("{path}/x")), Refusal::Forbidden(_)));
}

#[test]
fn a_site_with_many_links_is_bounded_and_served() {
    let world = linked();
    let count = LINKS_PER_SITE_MAX + 10;
    for number in 0..count {
        symlink("../storage", world.path(&format!("l{number}"))).unwrap();
        assert_eq!(world.get(&format!("/l{number}/a.txt")).text(), "avatar");
    }
    assert_eq!((asked(&world).len(), world.server.links.len()), (count, LINKS_PER_SITE_MAX));
    // One more than are kept is asked for each time, so often a second.
    let target = format!("/l{}/a.txt", count - 1);
    let many = ASKS_PER_SECOND_MAX as usize * 2;
    let served = (0..many).filter(|_| world.ask(Method::GET, &target, &[]).is_ok()).count();
    assert!(served < many, "the keeper was asked {served} times");
    assert!(matches!(world.refusal(&target), Refusal::Overloaded(_)));
    assert_eq!(world.get("/l0/a.txt").text(), "avatar", "what is kept is served all the same");
    assert_eq!(world.get("/own.txt").text(), "own");
    world.clock.pass(ROOT_AGE_MAX);
    assert_eq!(world.get(&target).text(), "avatar");
}
