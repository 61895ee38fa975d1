//! The waiting page as people meet it: in a real browser, with a real program behind it.
//!
//! What a person does there is in `tests/browser/waiting.mjs`, which drives Debian's Chromium; here is the site, its load, and
//! what must have become of it all. Not in the virtual machine of `./dev guest`, which has no browser. Not here: tickets and
//! the line without a browser (`admission`).

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;
use std::{env, fs};

use nagaya_tests::client::Connection;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::{Value, json};

pub const SUITE: Suite = Suite {
    name: "browser",
    needs_root: true,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            a_person_gets_in_by_itself_when_called,
            a_person_comes_once_when_the_slot_begins,
            without_scripts_a_person_gets_in_when_the_slot_begins,
            form_of_a_person_arrives_once_and_whole,
            the_page_is_accessible_and_needs_nothing_else,
            ten_tabs_share_one_ticket,
        ],
    ),
};

/// Each has a site of its own, so that the load of one test is not that of another.
const TENANTS: [&str; 6] = ["called", "begins", "scriptless", "sends", "looks", "tabs"];

/// Longer than anything that is waited for: whoever has a ticket for later than this and gets in was called.
const LONG_WAIT_SECONDS: u64 = 30;

/// Enough to look around on the page before the slot begins.
const SHORT_WAIT_SECONDS: u64 = 4;

/// More requests in line make no longer wait than this.
const LINE_MAX: usize = 200;

/// Longest time between two steps of a person. It has deadlines of its own, which say more.
const STEP_MAX: Duration = Duration::from_secs(60);

/// A shop of one page: its form, what is posted to it, and requests that take long.
const SHOP: &str = r#"#!/bin/sh
printf 'Content-Type: text/html; charset=utf-8\r\n'
page() {
    printf '\r\n<!doctype html><html lang="en"><meta charset="utf-8"><title>Shop</title>'
    printf '<link rel="icon" href="data:,"><h1>%s</h1>' "$1"
}
case "$REQUEST_METHOD $QUERY_STRING" in
"GET long")
    while [ -e ../hold ]; do sleep 0.05; done
    [ ! -e ../slow ] || sleep 0.5
    page done
    ;;
POST*)
    { printf '%s\n' "$HTTP_COOKIE" && cat; } >"$(mktemp ../posted.XXXXXX)"
    page 'Thank you'
    ;;
*)
    [ ! -e ../late ] || sleep 2
    printf 'Set-Cookie: session=of-the-shop; Path=/; HttpOnly\r\n'
    page 'The shop'
    echo '<form method="post" action="/app.cgi"><label>Order <textarea name="order"></textarea></label>'
    echo '<label>Number <input name="number"></label><button>Order</button></form>'
    ;;
esac
"#;

fn world() -> World {
    // Browsers ask for a page that several tabs want at once for one tab after the other.
    let builder = World::builder().set("admission", "penalty = \"100ms\"");
    TENANTS.iter().fold(builder, |builder, tenant| builder.tenant(tenant)).start()
}

/// A site of which one request runs at once.
struct Site<'a> {
    world: &'a World,
    name: &'static str,
}

/// A line so long that whoever comes now is given a ticket.
struct Line<'a> {
    site: &'a Site<'a>,
    held: Vec<Connection>,
}

impl<'a> Site<'a> {
    fn new(world: &'a World, name: &'static str) -> Self {
        world.write_program(name, "cgi/app.cgi", SHOP);
        let site = Self { world, name };
        site.set_wait(2 * LONG_WAIT_SECONDS);
        site
    }

    /// Whoever would wait longer than so many seconds gets a ticket.
    fn set_wait(&self, seconds: u64) {
        let name = self.name;
        self.world.import(&[json!({ "name": name, "tenant": name, "hosts": [format!("{name}.test")],
            "max_concurrent": 1, "admission": { "wait_seconds": seconds, "slot_seconds": 10 },
            "backend": { "kind": "cgi", "root": "cgi" } })]);
    }

    /// Sends a request that takes long, and does not wait for its answer.
    fn ask(&self) -> Connection {
        let mut connection = Connection::open(self.world.http());
        connection.send(format!("GET /app.cgi?long HTTP/1.1\r\nHost: {}.test\r\n\r\n", self.name));
        connection
    }

    /// Fills the line, so that whoever comes now would wait so many seconds, and gets a ticket.
    fn fill(&self, wait_seconds: u64) -> Line<'_> {
        // The node learns how long they take; of those that had to wait it learns surely.
        let slow = self.world.write(self.name, "slow", "");
        let mut learned: Vec<_> = (0..3).map(|_| self.ask()).collect();
        for connection in &mut learned {
            connection.response().expect(200);
        }
        fs::remove_file(slow).expect("it is there");
        self.world.write(self.name, "hold", "");
        let mut held = vec![self.ask()];
        wait::until("it runs", || self.metric("running") == 1.0);
        while self.metric("predicted_wait_seconds") < wait_seconds as f64 {
            assert!(held.len() < LINE_MAX, "the wait never gets so long: {}", self.lane());
            held.push(self.ask());
            wait::until("it waits", || self.metric("waiting") == (held.len() - 1) as f64);
        }
        self.set_wait(0);
        Line { site: self, held }
    }

    /// A figure of its lane.
    fn metric(&self, what: &str) -> f64 {
        self.world.metric(&format!("nagaya_lane_{what}"), &format!("\"site {}\"", self.name))
    }

    /// Its lane as `nagaya lanes --json` has it.
    fn lane(&self) -> Value {
        let lanes: Value = serde_json::from_str(&self.world.cli(&["lanes", "--json"])).expect("JSON");
        let lane = lanes.as_array().expect("a list").iter().find(|lane| lane["name"] == self.name);
        lane.expect("its lane").clone()
    }

    /// What has become of its promises.
    #[track_caller]
    fn expect_counts(&self, promised: u64, called_early: u64, kept: u64) {
        let counts = &self.lane()["counts"];
        let found = ["promised", "called_early", "kept"].map(|name| counts[name].as_u64());
        assert_eq!(found, [promised, called_early, kept].map(Some), "{counts}");
    }

    /// What was posted: the cookies, and the body.
    fn posted(&self) -> Vec<(String, String)> {
        let files = fs::read_dir(self.world.home(self.name)).expect("its home").flatten();
        let posted = files.filter(|file| file.file_name().to_string_lossy().starts_with("posted."));
        let texts = posted.map(|file| fs::read_to_string(file.path()).expect("text"));
        texts.filter_map(|text| text.split_once('\n').map(|(a, b)| (a.into(), b.into()))).collect()
    }

    fn visit(&self) -> Person {
        Person::start(self)
    }
}

impl Line<'_> {
    /// Waits until the holder of a ticket stands in line too: nobody else does while it is full.
    fn expect_holder(&self) {
        wait::until("it has come again", || self.site.metric("waiting") == self.held.len() as f64);
    }

    /// Lets all who wait be served.
    fn empty(self) {
        let hold = self.site.world.home(self.site.name).join("hold");
        fs::remove_file(hold).expect("it is there");
        for mut connection in self.held {
            connection.response().expect(200);
        }
    }
}

/// Somebody at a browser.
struct Person {
    script: Child,
    /// Closed, it ends the script.
    input: Option<ChildStdin>,
    steps: Receiver<Value>,
}

impl Person {
    fn start(site: &Site<'_>) -> Self {
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("browser");
        let needed = scripts.join("node_modules/playwright-core");
        assert!(needed.is_dir(), "there is no {}: 'sudo ./dev setup test' installs it", needed.display());
        let address = site.world.http();
        let mut script = Command::new(installed("node"))
            .arg(scripts.join("waiting.mjs"))
            .args([Path::new(site.name), &installed("chromium")])
            .args([format!("{}.test", site.name), address.port().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("node can be run");
        let output = BufReader::new(script.stdout.take().expect("it is piped"));
        let (step, steps) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // Nobody listens any more to a test that has failed.
                let _ = step.send(serde_json::from_str(&line).unwrap_or(Value::String(line)));
            }
        });
        Self { input: script.stdin.take(), script, steps }
    }

    /// Waits until it has come to this step, and says what it has seen there.
    #[track_caller]
    fn comes_to(&self, step: &str) -> Value {
        let seen = self.steps.recv_timeout(STEP_MAX);
        let seen = seen.unwrap_or_else(|_| panic!("the person did not come to '{step}': see above why"));
        assert_eq!(seen["step"], step, "{seen}");
        seen
    }

    fn goes_on(&mut self) {
        let input = self.input.as_mut().expect("not closed yet");
        // A script that has failed does not read it, and says why itself.
        let _ = input.write_all(b"\n").and_then(|()| input.flush());
    }

    /// Waits until it has seen everything.
    #[track_caller]
    fn leaves(mut self) {
        let ended = wait::within(STEP_MAX, || self.script.try_wait().expect("our own child"));
        assert!(ended.is_some_and(|status| status.success()), "the person saw what is wrong: see above");
    }
}

impl Drop for Person {
    fn drop(&mut self) {
        drop(self.input.take());
        if wait::within(wait::SOON, || self.script.try_wait().ok().flatten()).is_none() {
            let _ = self.script.kill();
            let _ = self.script.wait();
        }
    }
}

/// A program of the machine's.
pub fn installed(name: &str) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file());
    found.unwrap_or_else(|| panic!("no {name} is installed: 'sudo ./dev setup test' installs it"))
}

/// The first number of a text.
fn number(text: &Value) -> u64 {
    let text = text.as_str().expect("text");
    let digits = text.split(|c: char| !c.is_ascii_digit()).find(|part| !part.is_empty());
    digits.and_then(|digits| digits.parse().ok()).unwrap_or_else(|| panic!("no number in '{text}'"))
}

fn a_person_gets_in_by_itself_when_called(world: &World) {
    let site = Site::new(world, "called");
    let line = site.fill(LONG_WAIT_SECONDS);
    let mut person = site.visit();
    let seen = person.comes_to("waiting");
    assert_eq!((&seen["lang"], &seen["heading"]), (&json!("ja"), &json!("順番をお待ちください")), "{seen}");
    assert!((1..line.held.len() as u64).contains(&number(&seen["place"])), "they wait before it: {seen}");
    assert!(number(&seen["later"]) < number(&seen["clock"]), "{seen}");
    assert!(seen["begins_in"].as_u64() > Some(wait::SOON.as_secs()), "only a call lets it in: {seen}");
    line.empty();
    person.goes_on();
    person.leaves();
    site.expect_counts(1, 1, 1);
}

fn a_person_comes_once_when_the_slot_begins(world: &World) {
    let site = Site::new(world, "begins");
    let line = site.fill(SHORT_WAIT_SECONDS);
    let mut person = site.visit();
    person.comes_to("waiting");
    line.expect_holder();
    // Whatever the page does meanwhile, it does not ask again: its ticket is used up by then.
    world.write("begins", "late", "");
    line.empty();
    person.goes_on();
    person.leaves();
    site.expect_counts(1, 0, 1);
    let asked = || {
        let log = world.access_log().into_iter();
        let own = log.filter(|line| line["host"] == "begins.test" && line["target"] == "/app.cgi");
        own.map(|line| line["status"].clone()).collect::<Vec<_>>()
    };
    wait::until("what it was given is logged", || asked().contains(&json!(200)));
    assert_eq!(asked(), [503, 200]);
}

fn without_scripts_a_person_gets_in_when_the_slot_begins(world: &World) {
    let site = Site::new(world, "scriptless");
    let line = site.fill(SHORT_WAIT_SECONDS);
    let mut person = site.visit();
    let seen = person.comes_to("waiting");
    assert_eq!((&seen["lang"], &seen["without"]), (&json!("en"), &json!(true)), "{seen}");
    line.expect_holder();
    line.empty();
    person.goes_on();
    person.leaves();
    site.expect_counts(1, 0, 1);
}

fn form_of_a_person_arrives_once_and_whole(world: &World) {
    let site = Site::new(world, "sends");
    let mut person = site.visit();
    person.comes_to("filled in");
    let line = site.fill(LONG_WAIT_SECONDS);
    person.goes_on();
    let seen = person.comes_to("waiting");
    assert!(seen["begins_in"].as_u64() > Some(wait::SOON.as_secs()), "only a call lets it in: {seen}");
    person.goes_on();
    line.empty();
    person.comes_to("called");
    assert_eq!(site.posted(), [], "nothing is sent before the person says so");
    person.goes_on();
    person.leaves();
    let posted = site.posted();
    let [(cookies, body)] = posted.as_slice() else { panic!("not once: {posted:?}") };
    assert!(cookies.contains("session=of-the-shop"), "{cookies}");
    assert_eq!(
        body, "order=%E4%BA%8C%E3%81%A4+%26+more%0D%0Athan+%2B+two+%3D+100%25&number=7",
        "as the form's encoding has it"
    );
    site.expect_counts(1, 1, 1);
}

fn the_page_is_accessible_and_needs_nothing_else(world: &World) {
    let site = Site::new(world, "looks");
    let mut person = site.visit();
    person.comes_to("has the form");
    let line = site.fill(LONG_WAIT_SECONDS);
    person.goes_on();
    person.comes_to("has looked");
    line.empty();
    person.goes_on();
    person.leaves();
    // Browsers also ask for what no page names, such as an icon; nothing of that may use up a ticket.
    let asked = world.access_log();
    let asked =
        asked.iter().filter(|line| line["host"] == "looks.test").filter_map(|line| line["target"].as_str());
    let others: Vec<_> =
        asked.filter(|path| !path.starts_with("/app.cgi") && !path.starts_with("/.nagaya/wait/")).collect();
    assert!(others.is_empty(), "{others:?}");
}

fn ten_tabs_share_one_ticket(world: &World) {
    let site = Site::new(world, "tabs");
    let line = site.fill(LONG_WAIT_SECONDS);
    let mut person = site.visit();
    let seen = person.comes_to("waiting");
    let tickets = seen["tickets"].as_array().expect("a list");
    assert!(tickets.iter().all(|ticket| ticket.is_string() && *ticket == tickets[0]), "{seen}");
    site.expect_counts(1, 0, 0);
    line.empty();
    person.goes_on();
    person.leaves();
    assert_eq!(world.restarts_of("edge"), 0);
    assert!(!world.log().contains("panicked"), "{}", world.log());
}
