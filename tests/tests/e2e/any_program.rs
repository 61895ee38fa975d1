//! The recipes of `docs/recipes.md`, run from the very text of the page: programs in Node, Go, Java, PHP, Python and Ruby with their usual servers. Each
//! is served, rests as an image and comes back from it.
//!
//! Not here: the recipes of `docs/instances.md` (`recipes`), large applications (`./dev experiment wake-field --full`).

use std::path::Path;
use std::process::Command;

use nagaya_tests::client::{self, Response};
use nagaya_tests::suite::{Suite, Tests, skip};
use nagaya_tests::wait;
use nagaya_tests::world::World;

use crate::recipes::{add, code, here, lines, page, understand_each};
use crate::resting::{builder, has, listed, rest, until_image, woken_from};

pub const SUITE: Suite = Suite {
    name: "any_program",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            each_command_of_the_page_makes_its_record,
            express_serves_and_wakes_from_its_image,
            go_serves_and_wakes_from_its_image,
            java_serves_and_wakes_from_its_image,
            php_keeps_its_sessions_in_files,
            gunicorns_workers_serve_and_wake_from_their_image,
            uwsgis_workers_serve_and_wake_from_their_image,
            pumas_cluster_serves_and_wakes_from_its_image,
        ],
    ),
};

fn world() -> World {
    builder().start()
}

/// The part of the page with this heading.
fn section(heading: &str) -> String {
    let page = page("recipes.md");
    let beginning = format!("{heading}\n");
    let found = page.split("\n## ").find(|section| section.starts_with(&beginning));
    found.unwrap_or_else(|| panic!("docs/recipes.md has no recipe '{heading}'")).to_owned()
}

/// Where one of these is missing, the test ends here.
fn need(paths: &[&str]) {
    if !paths.iter().all(|path| Path::new(path).exists()) {
        skip("a program of this recipe is not installed");
    }
}

/// Runs the commands of a recipe that are not nagaya's, in the application's directory.
#[track_caller]
fn build(world: &World, recipe: &str, dir: &Path) {
    let own = lines(recipe).into_iter().filter(|line| !line.is_empty() && !line.starts_with("sudo nagaya "));
    let path = std::env::var("PATH").unwrap_or_default();
    for line in own {
        let built = Command::new("sh")
            .args(["-c", &line])
            .current_dir(dir)
            .env("PATH", format!("{path}:/usr/local/go/bin"))
            .env("HOME", world.path("home-of-builds"))
            .env("GOCACHE", world.path("go-cache-of-recipes"))
            .output()
            .expect("a shell runs");
        assert!(built.status.success(), "{line}: {}", String::from_utf8_lossy(&built.stderr));
    }
    world.give("alice");
}

fn get(world: &World, site: &str, target: &str) -> Response {
    client::get(world.http(), &format!("{site}.localhost"), target)
}

#[track_caller]
fn until_at_image(world: &World, site: &str) {
    rest(world, site, "image");
    wait::until("it is an image", || listed(world, site)["tier"] == "image");
}

/// Where no image can be taken, this ends here. `of_rest`: its image is taken when it goes to rest.
#[track_caller]
fn serves_and_wakes(world: &World, site: &str, answer: &str, of_rest: bool) {
    assert_eq!(get(world, site, "/").expect(200).text(), answer);
    if !has(world, "criu") {
        skip("there is no CRIU here that works");
    }
    if !of_rest {
        until_image(world, site);
    }
    for _ in 0..2 {
        until_at_image(world, site);
        let again = get(world, site, "/").expect(200);
        assert_eq!((again.text().as_str(), woken_from(&again).as_str()), (answer, "image"));
    }
}

fn each_command_of_the_page_makes_its_record(_world: &World) {
    let (added, others) = understand_each(&page("recipes.md"));
    assert_eq!((added, others), (7, 0), "sites and other commands of the page");
}

fn express_serves_and_wakes_from_its_image(world: &World) {
    need(&["/usr/bin/node", "/usr/share/nodejs/express/index.js"]);
    let recipe = section("node");
    world.write("alice", "notes/server.js", code(&recipe, "js")[0]);
    add(world, &recipe);
    serves_and_wakes(world, "notes", "hello from Express\n", false);
}

fn go_serves_and_wakes_from_its_image(world: &World) {
    if !["/usr/local/go/bin/go", "/usr/bin/go"].iter().any(|path| Path::new(path).exists()) {
        skip("there is no go here");
    }
    let recipe = section("go");
    let source = world.write("alice", "hello/main.go", code(&recipe, "go")[0]);
    build(world, &recipe, source.parent().expect("a file in a directory"));
    add(world, &recipe);
    serves_and_wakes(world, "hello", "hello from Go\n", false);
}

fn java_serves_and_wakes_from_its_image(world: &World) {
    need(&["/usr/bin/java", "/usr/bin/javac", "/usr/bin/jar"]);
    let recipe = section("java");
    let source = world.write("alice", "orders/Orders.java", code(&recipe, "java")[0]);
    build(world, &recipe, source.parent().expect("a file in a directory"));
    add(world, &recipe);
    serves_and_wakes(world, "orders", "hello from Java\n", true);
}

const COUNT_PHP: &str = "<?php session_start(); echo 'visit ', ++$_SESSION['visits'], ' ', \
    file_put_contents('../data/upload', 'x') ? 'kept' : 'lost', ' ', @file_put_contents('index.php', 'x') ? 'changed' : 'safe';";

fn php_keeps_its_sessions_in_files(world: &World) {
    need(&["/usr/sbin/php-fpm8.2", "/var/lib/php/sessions"]);
    let recipe = section("php");
    world.write("alice", "forum/html/index.php", COUNT_PHP);
    world.write("alice", "forum/data/.keep", "");
    world.write("alice", "forum/php-fpm.conf", here(world, code(&recipe, "ini")[0]));
    add(world, &recipe);
    let first = get(world, "forum", "/any/page").expect(200);
    assert_eq!(first.text(), "visit 1 kept safe");
    let cookie = first.header("set-cookie").expect("a session").split(';').next().expect("a pair").to_owned();
    let again = || {
        client::get_with(world.http(), "forum.localhost", "/", &format!("Cookie: {cookie}\r\n")).expect(200)
    };
    assert_eq!(again().text(), "visit 2 kept safe");
    until_image(world, "forum");
    for visit in 3..5 {
        until_at_image(world, "forum");
        let answer = again();
        assert_eq!(woken_from(&answer), "image");
        assert_eq!(answer.text(), format!("visit {visit} kept safe"));
    }
}

const WSGI: &str = "def application(environ, start_response):\n\
    \x20   start_response('200 OK', [('Content-Type', 'text/plain')])\n\
    \x20   return [b'hello from Python\\n']\n";

fn add_python(world: &World, site: &str) {
    world.write("alice", &format!("{site}/app.py"), WSGI);
    let recipe = section("python");
    let command = format!("sudo nagaya site add {site} ");
    let line = lines(&recipe).into_iter().find(|line| line.starts_with(&command)).expect("a command adds it");
    add(world, &format!("\n```sh\n{line}\n```\n"));
}

fn gunicorns_workers_serve_and_wake_from_their_image(world: &World) {
    need(&["/usr/bin/gunicorn"]);
    add_python(world, "shop4");
    serves_and_wakes(world, "shop4", "hello from Python\n", false);
}

fn uwsgis_workers_serve_and_wake_from_their_image(world: &World) {
    need(&["/usr/bin/uwsgi-core", "/usr/lib/uwsgi/plugins/python3_plugin.so"]);
    add_python(world, "shop2");
    serves_and_wakes(world, "shop2", "hello from Python\n", false);
}

fn pumas_cluster_serves_and_wakes_from_its_image(world: &World) {
    need(&["/usr/bin/puma"]);
    let recipe = section("ruby");
    let app = "run ->(env) { [200, {}, [ENV['RACK_ENV'], ' ', env['PATH_INFO']]] }\n";
    world.write("alice", "board/config.ru", app);
    world.write("alice", "board/puma.rb", code(&recipe, "ruby")[0]);
    add(world, &recipe);
    serves_and_wakes(world, "board", "production /", false);
}
