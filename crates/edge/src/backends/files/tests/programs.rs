//! Which program answers a path, and that none is sent as a file.

use super::*;

fn php() -> World {
    let mut world = World::new();
    world.programs = ProgramKind::Php;
    for path in
        ["index.php", "doku.php", "lib/exe/css.php", "lib/index.html", "folder.php/a.php", "data/x.php"]
    {
        world.write(path, "<?php");
    }
    world.write("style.css", "b{}");
    world.write("empty/x", "");
    world.write(".hidden.php", "<?php");
    world.files.deny = vec!["/data".into()];
    world
}

fn find(world: &World, target: &str) -> Result<Option<(String, String)>, Refusal> {
    let path = SitePath::parse(target)?;
    let rel = path.below_of_any("/").expect("a path of this site");
    let found = now_or_later(world.server.find_program(&world.root, rel, &world.files, world.programs))?;
    Ok(found.map(|program| (program.script, program.path_info.escape_ascii().to_string())))
}

#[test]
fn the_first_part_that_is_a_program_splits_the_path() {
    let world = php();
    for (target, expected) in [
        ("/doku.php", Some(("doku.php", ""))),
        ("/doku.php/", Some(("doku.php", "/"))),
        ("/doku.php/wiki/start", Some(("doku.php", "/wiki/start"))),
        ("/doku.php/a%20b/", Some(("doku.php", "/a b/"))),
        ("/doku.php/data/.x/y.php", Some(("doku.php", "/data/.x/y.php"))),
        ("/lib/exe/css.php", Some(("lib/exe/css.php", ""))),
        ("/folder.php/a.php/x", Some(("folder.php/a.php", "/x"))),
        ("/", Some(("index.php", ""))),
        // Files, directories without their slash, and what is not there, are `serve`'s.
        ("/style.css", None),
        ("/lib/", None),
        ("/lib", None),
        ("/empty/", None),
        ("/none.php", None),
        ("/none", None),
        ("/style.css/x.php", None),
    ] {
        let expected = expected.map(|(script, info)| (script.to_owned(), info.to_owned()));
        assert_eq!(find(&world, target), Ok(expected), "{target}");
    }
    assert!(matches!(find(&world, "/data/x.php"), Err(Refusal::Forbidden(_))));
    assert!(matches!(find(&world, "/data/"), Err(Refusal::Forbidden(_))));
    assert_eq!(find(&world, "/.hidden.php"), Err(Refusal::NotFound));
}

#[test]
fn a_front_controller_gets_what_has_no_file() {
    let mut world = php();
    world.files.front_controller = Some("/index.php".into());
    let front = Some(("index.php".to_owned(), String::new()));
    for target in ["/2024/05/hello/", "/none.php", "/none.html", "/style.css/", "/empty/"] {
        assert_eq!(find(&world, target), Ok(front.clone()), "{target}");
    }
    for target in ["/style.css", "/lib/", "/lib"] {
        assert_eq!(find(&world, target), Ok(None), "{target}");
    }
    // No file is served for these, and nobody is told whether there is one.
    world.write(".git/config", "secret");
    let long = format!("/{}", "x/".repeat(2000));
    for target in [
        "/.git/config",
        "/.hidden.php",
        "/.hidden.php/x",
        "/a%2Fb",
        "/a%5Cb",
        "/a\\b",
        "/caf%E9",
        "/%FF/",
        "/a%0Ab",
        "/a//b",
        &long,
        "/style.css%00x",
        "/..%2fx",
        "/%zz",
    ] {
        let is_refused = ["%00", "..%2f", "%zz"].iter().any(|part| target.contains(part));
        match find(&world, target) {
            Err(Refusal::BadRequest(_)) => assert!(is_refused, "{target}"),
            found => assert_eq!(found, Ok(front.clone()), "{target}"),
        }
    }
    // Of another program it is the rest of the path, as it was sent.
    for (target, info) in
        [("/doku.php/a%2Fb", "/a%2Fb"), ("/doku.php/%FF/", "/\\xff/"), ("/index.php/caf%E9", "/caf\\xe9")]
    {
        let script = target.split('/').nth(1).expect("a name").to_owned();
        assert_eq!(find(&world, target), Ok(Some((script, info.to_owned()))), "{target}");
    }
    for target in ["/data/%FF", "/data/.x", "/data/a%2Fb"] {
        assert!(matches!(find(&world, target), Err(Refusal::Forbidden(_))), "{target}");
    }
}

#[test]
fn without_a_front_controller_such_paths_are_not_found() {
    let world = php();
    for target in ["/.git/config", "/a%2Fb", "/a%5Cb", "/caf%E9", "/x%2Fdoku.php"] {
        assert_eq!(find(&world, target), Err(Refusal::NotFound), "{target}");
    }
    assert_eq!(find(&world, "/doku.php/caf%E9"), Ok(Some(("doku.php".to_owned(), "/caf\\xe9".to_owned()))));
}

#[test]
fn a_front_controller_of_cgi_gets_the_path_as_path_info() {
    let mut world = World::new();
    world.programs = ProgramKind::Cgi;
    world.write("app", "#!/bin/sh");
    world.write("page.html", "");
    world.files.front_controller = Some("app".into());
    for (target, path_info) in [
        ("/", "/"),
        ("/a/b", "/a/b"),
        ("/a/b/", "/a/b/"),
        ("/a%20b", "/a b"),
        ("/a%2Fb", "/a%2Fb"),
        ("/caf%E9/", "/caf\\xe9/"),
        ("/.git", "/.git"),
        // The program itself is no file to be sent, whatever its name is.
        ("/app", ""),
        ("/app/c", "/c"),
    ] {
        assert_eq!(find(&world, target), Ok(Some(("app".to_owned(), path_info.to_owned()))), "{target}");
    }
    assert_eq!(find(&world, "/page.html"), Ok(None));
}

#[test]
fn php_runs_further_endings_that_the_record_names() {
    let mut world = php();
    world.write("a.phtml", "<?php");
    assert_eq!(find(&world, "/a.phtml"), Ok(None));
    world.files.extensions = vec![".phtml".into()];
    let script = |name: &str| Ok(Some((name.to_owned(), String::new())));
    assert_eq!(
        (find(&world, "/a.phtml"), find(&world, "/doku.php")),
        (script("a.phtml"), script("doku.php"))
    );
}

#[test]
fn sources_and_copies_of_programs_are_not_sent() {
    let mut world = php();
    for name in ["a.phtml", "db.inc", "config.php~", "config.php.bak", "Old.PHP5", "x.phar", "db.inc.orig"] {
        world.write(name, "<?php");
        assert_eq!(world.refusal(&format!("/{name}")), Refusal::NotFound, "{name}");
    }
    for name in ["a.txt", "notes~", "php.html", "a.bak", "inc", "php.txt"] {
        world.write(name, "text");
        assert_eq!(world.get(&format!("/{name}")).text(), "text", "{name}");
    }
    world.programs = ProgramKind::Cgi;
    world.write("a.cgi.bak", "#!/bin/sh");
    assert_eq!(world.refusal("/a.cgi.bak"), Refusal::NotFound);
    assert_eq!(world.get("/db.inc").text(), "<?php", "of CGI programs it may be anything");
}

#[test]
fn a_program_is_never_sent_as_a_file() {
    let mut world = php();
    world.write("Config.PHP", "<?php");
    for target in ["/doku.php", "/Config.PHP", "/lib/exe/css.php"] {
        assert_eq!(world.refusal(target), Refusal::NotFound, "{target}");
    }
    // `index.php` is passed over as an index: `find_program` would have run it.
    assert!(matches!(world.refusal("/"), Refusal::Forbidden(_)));
    world.programs = ProgramKind::None;
    assert_eq!(world.get("/doku.php").text(), "<?php");
}

#[test]
fn the_endings_of_a_cgi_site_are_its_own() {
    let mut world = World::new();
    world.programs = ProgramKind::Cgi;
    world.write("a.cgi", "#!/bin/sh");
    world.write("a.pl", "#!/usr/bin/perl");
    let script = |name: &str| Ok(Some((name.to_owned(), String::new())));
    assert_eq!(find(&world, "/a.cgi"), script("a.cgi"));
    assert_eq!(find(&world, "/a.pl"), Ok(None));
    world.files.extensions = vec![".pl".into()];
    assert_eq!(find(&world, "/a.pl"), script("a.pl"));
    assert_eq!(find(&world, "/a.cgi"), Ok(None));
    world.programs = ProgramKind::None;
    assert_eq!(find(&world, "/a.pl"), Ok(None));
}

#[test]
fn an_applications_scripts_end_as_its_record_says() {
    let mut world = php();
    world.programs = ProgramKind::FastCgi;
    let script = |name: &str| Ok(Some((name.to_owned(), String::new())));
    assert_eq!((find(&world, "/doku.php"), find(&world, "/")), (script("doku.php"), script("index.php")));
    world.write("run.fcgi", "");
    assert_eq!(find(&world, "/run.fcgi"), Ok(None), "a file");
    world.files.extensions = vec![".fcgi".into()];
    assert_eq!((find(&world, "/run.fcgi"), find(&world, "/doku.php")), (script("run.fcgi"), Ok(None)));
}
