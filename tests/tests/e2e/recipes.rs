//! The commands of `docs/instances.md`, run from the very text of the page, and its recipes with real servers behind them.
//!
//! Each recipe is served, rests as an image and comes back from it. What stands in for the applications themselves (WordPress, Django,
//! Rails) is a few lines. Not here: the real ones (`./dev demo --check`), instances as such (`instances`).

use std::path::Path;
use std::process::Command;

use nagaya_tests::client::{self, Response};
use nagaya_tests::suite::{Suite, Tests, skip};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::Value;

use crate::resting::{builder, has, listed, rest, until_image, woken_from};

pub const SUITE: Suite = Suite {
    name: "recipes",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        each_command_of_the_page_is_understood_and_makes_its_record,
        the_generic_recipe_serves_and_wakes_from_its_image,
        the_node_recipe_serves_and_wakes_from_its_image,
        a_node_application_keeps_sessions_until_it_is_an_image,
        the_django_recipe_serves_and_wakes_from_its_image,
        the_rails_recipe_serves_and_wakes_from_its_image,
        the_wordpress_recipe_serves_and_wakes_from_its_image,
        the_php_fpm_recipe_serves_and_wakes_from_its_image,
    ]),
};

/// Alice's home, as the page has it.
const HOME: &str = "/srv/alice";

// === The page ===

pub fn page(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name);
    std::fs::read_to_string(path).expect("the page is there")
}

/// The recipe with this heading.
fn recipe(heading: &str) -> String {
    let page = page("instances.md");
    let (_, recipes) = page.split_once("\n## Recipes\n").expect("the page has recipes");
    let recipes = recipes.split("\n## ").next().expect("a first part");
    let beginning = format!("{heading}\n");
    let section = recipes.split("\n### ").find(|section| section.starts_with(&beginning));
    section.unwrap_or_else(|| panic!("docs/instances.md has no recipe '{heading}'")).to_owned()
}

/// All code in this language, block by block.
pub fn code<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let mark = format!("\n```{language}\n");
    text.split(&mark).skip(1).map(|rest| rest.split("```").next().expect("a first part")).collect()
}

/// The commands in a text, line by line.
pub fn lines(text: &str) -> Vec<String> {
    let blocks = code(text, "sh").into_iter().map(|block| block.replace("\\\n", " "));
    blocks.flat_map(|block| block.lines().map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// The commands of nagaya's in a text, each as its words without `nagaya` itself.
pub fn commands(text: &str) -> Vec<Vec<String>> {
    lines(text).iter().filter_map(|line| line.strip_prefix("sudo nagaya ")).map(words).collect()
}

/// The words of a line as a shell has them: parts in quotes as they are, and no comment.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = None::<String>;
    let mut quote = None;
    for c in line.chars() {
        match c {
            '\'' | '"' if quote.is_none() => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            c if quote == Some(c) => quote = None,
            ' ' if quote.is_none() => words.extend(word.take()),
            '#' if quote.is_none() && word.is_none() => break,
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// The values of an option of `site add NAME`, where each option on the page has one. Words behind `--` are those of `--command`.
fn values<'a>(command: &'a [String], option: &str) -> Vec<&'a str> {
    let end = command.iter().position(|word| word == "--");
    let given = command[3..end.unwrap_or(command.len())].chunks(2).filter(|pair| pair[0] == option);
    let behind = end.filter(|_| option == "--command").map_or(&[][..], |end| &command[end + 1..]);
    given.map(|pair| &pair[1]).chain(behind).map(String::as_str).collect()
}

fn texts(value: &Value) -> Vec<&str> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// What the page says of a site that is added is in its record.
#[track_caller]
fn check_record(world: &World, command: &[String]) {
    let name = &command[2];
    let site: Value = serde_json::from_str(&world.cli(&["site", "show", name, "--json"])).expect("JSON");
    let backend = &site["backend"];
    assert_eq!(site["tenant"], "alice", "{site}");
    assert_eq!(texts(&site["hosts"]), values(command, "--host"), "{site}");
    assert_eq!(vec![backend["kind"].as_str().expect("a kind")], values(command, "--backend"), "{site}");
    for (option, field) in [("--command", "command"), ("--writable", "writable"), ("--warm-up", "warm_up")] {
        assert_eq!(texts(&backend[field]), values(command, option), "{option}: {site}");
    }
    for (option, field) in [("--directory", "directory"), ("--listen", "listen"), ("--release", "release")] {
        let shown: Vec<&str> = backend[field].as_str().into_iter().collect();
        let given = values(command, option);
        assert!(shown == given || given.is_empty(), "{option}: {site}");
    }
}

/// Without a node: what needs one says so, and has understood its words before.
fn each_command_of_the_page_is_understood_and_makes_its_record() {
    let (added, others) = understand_each(&page("instances.md"));
    assert!(added >= 8 && others >= 20, "the scan for commands finds almost none: {added}, {others}");
}

/// How many sites were added, and how many other commands there are.
#[track_caller]
pub fn understand_each(page: &str) -> (usize, usize) {
    let world = World::builder().prepare();
    let mut added = 0;
    let mut others = 0;
    for command in commands(page) {
        let line = command.join(" ");
        let run = |words: &[&str]| world.try_cli(words);
        let words: Vec<&str> = command.iter().map(String::as_str).collect();
        match words[..] {
            ["tenant", ..] => drop(world.cli(&words)),
            ["site", "add", name, ..] => {
                // Two recipes have the same name.
                run(&["site", "remove", name]);
                world.cli(&words);
                check_record(&world, &command);
                added += 1;
            }
            ["site", "set", name, ..] => {
                if !run(&["site", "show", name]).status.success() {
                    let host = format!("{name}.localhost");
                    let of_app =
                        ["--tenant", "alice", "--backend", "app", "--directory", name, "--command", "x"];
                    world.cli(&[&["site", "add", name, "--host", &host][..], &of_app].concat());
                }
                world.cli(&words);
                others += 1;
            }
            _ => {
                let said = run(&words);
                let told = String::from_utf8_lossy(&said.stderr).into_owned();
                assert!(told.contains("no node runs here"), "nagaya {line}: {told}");
                others += 1;
            }
        }
    }
    (added, others)
}

// === Recipes ===

/// With all its programs; where one is missing, the test ends here.
fn world_with(programs: &[&str]) -> World {
    if !programs.iter().all(|program| Path::new(program).exists()) {
        skip("a program of this recipe is not installed");
    }
    builder().start()
}

/// As the page has it, with alice's home where it is here.
pub fn here(world: &World, text: &str) -> String {
    text.replace(HOME, &world.home("alice").to_string_lossy())
}

/// Adds the sites of a recipe.
pub fn add(world: &World, recipe: &str) {
    let commands = commands(recipe);
    assert!(!commands.is_empty(), "it has a command");
    for command in commands {
        let command: Vec<String> = command.iter().map(|word| here(world, word)).collect();
        let words: Vec<&str> = command.iter().map(String::as_str).collect();
        world.cli(&words);
        check_record(world, &command);
    }
}

fn get(world: &World, site: &str, target: &str) -> Response {
    client::get(world.http(), &format!("{site}.localhost"), target)
}

/// It answers, and does so when it has come back from its image.
#[track_caller]
fn serves_and_wakes(world: &World, site: &str, target: &str, answer: &str) {
    assert_eq!(get(world, site, target).expect(200).text(), answer);
    until_image(world, site);
    rest(world, site, "image");
    wait::until("it is an image", || listed(world, site)["tier"] == "image");
    let again = get(world, site, target).expect(200);
    assert_eq!((again.text().as_str(), woken_from(&again).as_str()), (answer, "image"));
}

/// What listens at a path that is its second argument.
const GENERIC: &str = r#"#!/usr/bin/python3
import http.server, os, socketserver, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def address_string(self): return "-"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"tool\n")
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
assert sys.argv[1] == "--listen" and sys.argv[2] == os.environ["NAGAYA_SOCKET"]
Server(sys.argv[2], Handler).serve_forever(poll_interval=3600)
"#;

fn the_generic_recipe_serves_and_wakes_from_its_image() {
    let world = world_with(&["/usr/bin/python3"]);
    world.write_program("alice", "tool/server", GENERIC);
    add(&world, &recipe("generic"));
    serves_and_wakes(&world, "tool", "/", "tool\n");
    world.stop();
}

fn the_node_recipe_serves_and_wakes_from_its_image() {
    let world = world_with(&["/usr/bin/node"]);
    let recipe = recipe("node");
    world.write("alice", "chat/server.js", code(&recipe, "js")[0]);
    add(&world, &recipe);
    serves_and_wakes(&world, "chat", "/", "hello\n");
    world.stop();
}

/// An application with sessions in its memory, a timer, a worker thread, WebAssembly and files that it reads, as real ones have.
const SESSIONS: &str = r#"
const http = require("http"), fs = require("fs"), zlib = require("zlib"), { Worker } = require("worker_threads");
const run = require("crypto").randomBytes(8).toString("hex"), sessions = new Map();
let ticks = 0, doubled;
setInterval(() => ticks++, 5);
const worker = new Worker("require('worker_threads').parentPort.on('message', (n, port) => require('worker_threads').parentPort.postMessage(n * 2))", { eval: true });
worker.on("message", (number) => { const told = doubled; doubled = undefined; told(number); });
const add = new WebAssembly.Instance(new WebAssembly.Module(new Uint8Array([
  0, 97, 115, 109, 1, 0, 0, 0, 1, 7, 1, 96, 2, 127, 127, 1, 127, 3, 2, 1, 0, 7, 7, 1, 3, 97, 100, 100, 0, 0, 10, 9, 1, 7, 0, 32, 0, 32, 1, 106, 11,
]))).exports.add;
function hot(rounds) { let sum = 0; for (let n = 0; n < rounds; n++) sum = (sum + n * n) % 65521; return sum; }
const server = http.createServer((request, response) => {
  const { pathname, searchParams } = new URL(request.url, "http://chat");
  const id = (/sid=(\w+)/.exec(request.headers.cookie || "") || [])[1];
  const say = (text) => response.end(String(text));
  switch (pathname) {
    case "/run": return say(run);
    case "/login":
      const sid = (sessions.size + 1).toString();
      sessions.set(sid, { name: searchParams.get("name"), seen: 0 });
      response.setHeader("Set-Cookie", "sid=" + sid);
      return say("welcome");
    case "/who":
      const session = sessions.get(id);
      return say(session ? session.name + " " + ++session.seen : "nobody");
    case "/ticks":
      const before = ticks;
      return setTimeout(() => say(ticks > before), 50);
    case "/work":
      return fs.readFile(__filename, (error, text) => zlib.gzip(text, (error, packed) => {
        doubled = (number) => say([add(2, 3), number, hot(200000), packed.length > 100].join(" "));
        worker.postMessage(21);
      }));
  }
  response.statusCode = 404;
  say("?");
});
server.listen(process.env.NAGAYA_SOCKET, () => console.log("it listens"));
"#;

fn a_node_application_keeps_sessions_until_it_is_an_image() {
    let world = world_with(&["/usr/bin/node"]);
    world.write("alice", "chat/server.js", SESSIONS);
    add(&world, &recipe("node"));
    let text = |target: &str| get(&world, "chat", target).expect(200).text();
    let run = text("/run");
    until_image(&world, "chat");
    let works = || {
        assert_eq!(text("/work"), text("/work"));
        assert!(text("/work").starts_with("5 42 ") && text("/work").ends_with(" true"), "{}", text("/work"));
        assert_eq!(text("/ticks"), "true", "its timers fire");
    };
    works();
    let login = get(&world, "chat", "/login?name=hanako").expect(200);
    let cookie = format!("Cookie: {}\r\n", login.header("set-cookie").expect("a session"));
    let who = || client::get_with(world.http(), "chat.localhost", "/who", &cookie).expect(200);
    assert_eq!(who().text(), "hanako 1");
    let mut seen = 1;
    for tier in ["quiet", "frozen", "reclaimed"] {
        if tier == "reclaimed" && !has(&world, "swap") {
            continue;
        }
        rest(&world, "chat", tier);
        seen += 1;
        assert_eq!(who().text(), format!("hanako {seen}"), "{tier}");
    }
    // Twice: what came back can do so again.
    for _ in 0..2 {
        rest(&world, "chat", "image");
        wait::until("it is an image", || listed(&world, "chat")["tier"] == "image");
        let answer = who();
        assert_eq!((answer.text().as_str(), woken_from(&answer).as_str()), ("nobody", "image"));
        assert_eq!(text("/run"), run, "it is where it was after its start");
        works();
        let login = get(&world, "chat", "/login?name=jiro").expect(200);
        assert_eq!(login.text(), "welcome");
        assert_eq!(who().text(), "jiro 1");
    }
    assert!(world.cli(&["instance", "logs", "chat"]).contains("it listens"));
    world.stop();
}

/// What gunicorn is to find as `blog.wsgi`.
const WSGI: &str = "import os\n\
    secret = os.environ['DJANGO_SECRET_KEY']\n\
    def application(environ, start_response):\n\
    \x20   start_response('200 OK', [('Content-Type', 'text/plain')])\n\
    \x20   return [('blog ' + environ['PATH_INFO'] + ' ' + secret).encode()]\n";

fn the_django_recipe_serves_and_wakes_from_its_image() {
    let world = world_with(&["/usr/bin/gunicorn"]);
    world.write("alice", "blog/blog/__init__.py", "");
    world.write("alice", "blog/blog/wsgi.py", WSGI);
    world.write("alice", "blog/secret-key", "hunter2\n");
    world.write("alice", "blog/static/style.css", "body {}\n");
    add(&world, &recipe("django"));
    assert_eq!(get(&world, "blog", "/static/style.css").expect(200).text(), "body {}\n");
    assert!(listed(&world, "blog").is_null(), "they wake nothing");
    serves_and_wakes(&world, "blog", "/page", "blog /page hunter2");
    world.stop();
}

const RACKUP: &str =
    "run ->(env) { [200, {}, [ENV['RAILS_ENV'], ' ', env['PATH_INFO'], ' ', ENV['SECRET_KEY_BASE']]] }\n";

fn the_rails_recipe_serves_and_wakes_from_its_image() {
    let world = world_with(&["/usr/bin/bundle", "/usr/bin/puma"]);
    world.write("alice", "shop/config.ru", RACKUP);
    world.write("alice", "shop/secret-key-base", "hunter2\n");
    for dir in ["tmp", "log", "storage", "db"] {
        world.write("alice", &format!("shop/{dir}/.keep"), "");
    }
    let gemfile = world.write("alice", "shop/Gemfile", "gem 'puma'\n");
    let dir = gemfile.parent().expect("a file in a directory");
    let locked = Command::new("bundle").args(["lock", "--local"]).current_dir(dir).output();
    let locked = locked.expect("bundler runs");
    assert!(locked.status.success(), "{}", String::from_utf8_lossy(&locked.stderr));
    world.give("alice");
    add(&world, &recipe("rails"));
    serves_and_wakes(&world, "shop", "/page", "production /page hunter2");
    world.stop();
}

/// A page in WordPress' place: it can write where WordPress does, and to nothing else.
fn write_pages(world: &World) {
    let text = "<?php $may = fn($at) => @file_put_contents($at, 'x') ? 'yes' : 'no';\n\
        echo 'front ', $may('wp-content/cache'), ' ', $may('index.php');";
    world.write("alice", "wp/html/index.php", text);
    world.write("alice", "wp/html/wp-login.php", "<?php echo 'who?';");
    world.write("alice", "wp/html/wp-content/style.css", "body {}\n");
}

fn the_wordpress_recipe_serves_and_wakes_from_its_image() {
    let world = world_with(&["/usr/sbin/apache2", "/usr/lib/apache2/modules/libphp8.2.so"]);
    let recipe = recipe("wordpress");
    write_pages(&world);
    world.write("alice", "wp/apache.conf", here(&world, code(&recipe, "apache")[0]));
    add(&world, &recipe);
    serves_and_wakes(&world, "wp", "/", "front yes no");
    world.stop();
}

fn the_php_fpm_recipe_serves_and_wakes_from_its_image() {
    let world = world_with(&["/usr/sbin/php-fpm8.2"]);
    let recipe = recipe("wordpress on php-fpm");
    write_pages(&world);
    world.write("alice", "wp/php-fpm.conf", code(&recipe, "ini")[0]);
    add(&world, &recipe);
    assert_eq!(get(&world, "wp", "/wp-content/style.css").expect(200).text(), "body {}\n");
    assert!(listed(&world, "wp").is_null(), "that wakes nothing");
    serves_and_wakes(&world, "wp", "/a/page", "front yes no");
    world.stop();
}
