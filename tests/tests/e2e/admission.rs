//! Who runs, who waits, who is told to come back and when: tickets, the line's figures, what people and programs are shown.
//!
//! Not here: bounds by number (`limits`), the waiting page in a browser (`browser`).

use std::io::Read as _;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};

use nagaya_tests::client::{Connection, Response};
use nagaya_tests::machine;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::{Builder, World};
use serde_json::{Value, json};

use crate::limits::Held;

pub const SUITE: Suite = Suite {
    name: "admission",
    needs_root: false,
    tests: Tests::Alone(nagaya_tests::tests![
        a_held_request_says_how_long_and_its_body_arrives_whole,
        a_full_line_gives_a_ticket_that_is_kept,
        half_closed_or_slow_client_in_line_harms_nobody,
        a_ticket_is_good_for_one_request_here_and_unaltered,
        a_ticket_outlives_a_killed_edge,
        a_wall_clock_that_is_set_moves_no_promise,
        people_get_a_page_and_crawlers_no_ticket,
        a_waiting_page_is_called_when_it_is_time,
        two_pages_of_one_ticket_are_called,
        client_that_asks_again_gets_the_same_ticket,
        a_rule_lets_pass_and_lets_some_go_first,
        streams_of_one_connection_wait_each_for_itself,
        a_ticket_over_http2_is_kept,
        lanes_are_shown_and_explained,
    ]),
};

/// How long the site's requests take as far as the node has learned, milliseconds.
const SERVICE_MS: u64 = 50;

/// What runs while others wait, and was learned from.
pub const RUNNING: &str = "/running";

/// A site of which one request runs at once, none waits if it is predicted to wait, and slots of two seconds are promised. Clients
/// are told apart by the address a proxy names.
fn node(held: &Held) -> World {
    node_of(builder(), held)
}

/// Whoever asks again is answered at once.
pub fn builder() -> Builder {
    World::builder().set("admission", "penalty = \"0ms\"")
}

/// The site, and how long anybody may be predicted to wait there.
pub fn shop(held: &Held, wait: u32) -> Value {
    json!({ "name": "shop", "tenant": "alice", "hosts": ["shop.test"], "max_concurrent": 1,
        "admission": { "wait_seconds": wait, "slot_seconds": 2 },
        "backend": { "kind": "http", "address": held.backend.address.to_string() } })
}

pub fn node_of(builder: Builder, held: &Held) -> World {
    let world = builder.set("edge", "threads = 1\ntrusted_proxies = [\"127.0.0.1\"]").tenant("alice").start();
    world.import(&[shop(held, 60)]);
    // It learns how long a request of this kind takes, and how fast a line goes.
    let mut line: Vec<_> = (0..12).map(|n| ask(&world, RUNNING, n, "")).collect();
    for connection in &mut line {
        // The time an answer takes.
        wait::pause(Duration::from_millis(SERVICE_MS));
        held.let_go(1);
        connection.response().expect(200);
    }
    world.import(&[shop(held, 0)]);
    world
}

/// Sends a request of this client and does not wait for its answer.
pub fn ask(world: &World, target: &str, client: u8, fields: &str) -> Connection {
    let mut connection = Connection::open(world.http());
    let client = Ipv4Addr::new(192, 0, 2, client);
    connection.send(format!(
        "GET {target} HTTP/1.1\r\nHost: shop.test\r\nX-Forwarded-For: {client}\r\n{fields}\r\n"
    ));
    connection
}

/// One request that runs until it is let go.
pub fn occupy(world: &World, held: &Held) -> Connection {
    let before = held.arrived().len();
    let running = ask(world, RUNNING, 250, "");
    wait::until("it runs", || held.arrived().len() > before);
    running
}

pub fn ticket(response: &Response) -> String {
    response.header("nagaya-ticket").expect("a ticket").to_owned()
}

pub fn problem(response: &Response) -> Value {
    assert_eq!(response.header("content-type"), Some("application/problem+json"));
    serde_json::from_str(&response.text()).expect("JSON")
}

fn a_held_request_says_how_long_and_its_body_arrives_whole() {
    let held = Held::start();
    let world = node(&held);
    world.cli(&["site", "set", "shop", "--wait-seconds", "60"]);
    let mut first = occupy(&world, &held);
    let mut second = Connection::open(world.http());
    let body = "x".repeat(40_000);
    second.send(format!(
        "POST /second HTTP/1.1\r\nHost: shop.test\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    ));
    wait::until("it waits", || world.metric("nagaya_requests_waiting", "") == 1.0);
    held.let_go(2);
    first.response().expect(200);
    let answer = second.response().expect(200);
    let timing = answer.header("server-timing").expect("it was held").to_owned();
    assert!(timing.starts_with("queue;dur=") && timing.contains(", predicted;dur="), "{timing}");
    let received = held.backend.received();
    let request = &received[received.find("POST /second").expect("it arrived")..];
    assert!(
        request.contains("\r\nx-request-start: t=") && request.contains("\r\nx-queue-start: t="),
        "{request}"
    );
    assert_eq!(
        request.matches("x").count() - request[..request.find("\r\n\r\n").unwrap()].matches("x").count(),
        40_000
    );
    world.stop();
}

fn half_closed_or_slow_client_in_line_harms_nobody() {
    let held = Held::start();
    let world = node(&held);
    world.cli(&["site", "set", "shop", "--wait-seconds", "60"]);
    let mut first = occupy(&world, &held);
    // It says that nothing more will come, as one does that has gone: its place is free.
    let mut gone = ask(&world, "/gone", 1, "");
    wait::until("it waits", || is_waiting(&world, 1));
    gone.finish();
    wait::until("its place is free", || is_waiting(&world, 0));
    // It announces more than it sends: it has no place in line before it has sent all, and who comes later need not wait for it.
    let mut slow = Connection::open(world.http());
    slow.send("POST /slow HTTP/1.1\r\nHost: shop.test\r\nContent-Length: 10\r\n\r\n12345");
    let mut last = ask(&world, "/last", 2, "");
    wait::until("one waits", || is_waiting(&world, 1));
    held.let_go(2);
    first.response().expect(200);
    last.response().expect(200);
    assert_eq!(held.arrived().last().map(String::as_str), Some("/last"));
    drop(slow);
    world.stop();
}

/// Shows its ticket again and again until its slot has begun: then it stands in line.
pub fn come_in_time(world: &World, target: &str, client: u8, ticket: &str) -> Connection {
    let fields = format!("Nagaya-Ticket: {ticket}\r\n");
    wait::until_some("its slot has begun", || {
        let mut again = ask(world, target, client, &fields);
        wait::until("it waits or was answered", || is_waiting(world, 1) || again.is_answered());
        if again.is_answered() {
            let early = again.response().expect(503);
            assert!(early.text().contains("NGY0451"), "{early:?}");
            assert_eq!(self::ticket(&early), ticket, "its slot stays its own");
            return None;
        }
        Some(again)
    })
}

/// A lane as `nagaya lanes --json` shows it.
pub fn lane(world: &World, name: &str) -> Value {
    let lanes: Value = serde_json::from_str(&world.cli(&["lanes", "--json"])).expect("JSON");
    let lane = lanes.as_array().expect("a list").iter().find(|lane| lane["name"] == name);
    lane.cloned().unwrap_or_else(|| panic!("no lane {name}: {lanes}"))
}

pub fn is_waiting(world: &World, count: usize) -> bool {
    world.metric("nagaya_requests_waiting", "") == count as f64
}

fn a_full_line_gives_a_ticket_that_is_kept() {
    let held = Held::start();
    let world = node(&held);
    let mut first = occupy(&world, &held);
    let refused = ask(&world, "/later", 1, "").response().expect(503);
    assert_eq!(refused.header("cache-control"), Some("no-store"));
    let after: u64 = refused.header("retry-after").expect("a time").parse().expect("seconds");
    assert!((1..=60).contains(&after), "{after}");
    let problem = problem(&refused);
    assert_eq!((&problem["code"], &problem["ticket"]), (&json!("NGY0450"), &json!(ticket(&refused))));
    let mut again = come_in_time(&world, "/later", 1, &ticket(&refused));
    held.let_go(2);
    first.response().expect(200);
    again.response().expect(200);
    assert_eq!(held.arrived().last().map(String::as_str), Some("/later"));
    let lane = lane(&world, "shop");
    assert_eq!((&lane["counts"]["promised"], &lane["counts"]["kept"]), (&json!(1), &json!(1)), "{lane}");
    world.stop();
}

fn a_ticket_is_good_for_one_request_here_and_unaltered() {
    let held = Held::start();
    let world = node(&held);
    let mut first = occupy(&world, &held);
    let ticket = ticket(&ask(&world, "/later", 1, "").response().expect(503));
    let shown = |ticket: &str, host: &str| {
        let mut connection = Connection::open(world.http());
        connection.send(format!("GET /x HTTP/1.1\r\nHost: {host}\r\nNagaya-Ticket: {ticket}\r\n\r\n"));
        connection.response()
    };
    let last = if ticket.ends_with('A') { 'B' } else { 'A' };
    let altered = format!("{}{last}", &ticket[..ticket.len() - 1]);
    for forged in [altered.as_str(), "x", &ticket[..60], &"A".repeat(ticket.len()), &"A".repeat(4000)] {
        let answer = shown(forged, "shop.test").expect(403);
        assert!(answer.text().contains("NGY0452"), "{answer:?}");
    }
    world
        .import(&[json!({ "name": "other", "tenant": "alice", "hosts": ["other.test"], "max_concurrent": 1,
        "backend": { "kind": "http", "address": held.backend.address.to_string() } })]);
    let mut other = Connection::open(world.http());
    other.send("GET /other HTTP/1.1\r\nHost: other.test\r\n\r\n");
    wait::until("the other site is busy", || held.arrived().last().is_some_and(|target| target == "/other"));
    let answer = shown(&ticket, "other.test").expect(403);
    assert!(answer.text().contains("NGY0452"), "a ticket is for its own site: {answer:?}");
    let mut again = come_in_time(&world, "/later", 1, &ticket);
    let replayed = shown(&ticket, "shop.test").expect(409);
    assert!(replayed.text().contains("NGY0453"), "{replayed:?}");
    held.let_go(3);
    for connection in [&mut first, &mut other, &mut again] {
        connection.response().expect(200);
    }
    world.stop();
}

/// Kills the first edge of a node, and waits until another one serves.
fn replace_edge(world: &World) {
    machine::signal(world.pid_of("edge"), "KILL");
    wait::until("another edge serves", || {
        world.try_status().is_some()
            && world.restarts_of("edge") == 1
            && Connection::try_open(world.http()).is_ok()
    });
}

fn a_ticket_outlives_a_killed_edge() {
    let held = Held::start();
    let world = node(&held);
    let first = occupy(&world, &held);
    let ticket = ticket(&ask(&world, "/later", 1, "").response().expect(503));
    replace_edge(&world);
    drop(first);
    held.let_those_go(1);
    let mut busy = occupy(&world, &held);
    let mut again = come_in_time(&world, "/later", 1, &ticket);
    held.let_go(2);
    busy.response().expect(200);
    again.response().expect(200);
    world.stop();
}

/// A wall clock that the node sees and nobody else, which can be set while it runs.
pub struct WallClock(PathBuf);

impl WallClock {
    /// Debian's `libfaketime` in front of the C library; the clock that never jumps is left as it is.
    pub fn of(builder: Builder) -> (Self, Builder) {
        let library = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
        let library = library.map(|dir| dir.path().join("faketime/libfaketimeMT.so.1"));
        let library =
            library.into_iter().find(|path| path.exists()).expect("libfaketime: './dev setup test'");
        // Of its rules' directory the edge sees all.
        let builder = builder.rule("none", "access_checker", "nil\n", "");
        let clock = Self(builder.path("rules/wall-clock"));
        clock.set(0);
        let builder = builder.before(&[
            "env",
            &format!("LD_PRELOAD={}", library.display()),
            &format!("FAKETIME_TIMESTAMP_FILE={}", clock.0.display()),
            "FAKETIME_NO_CACHE=1",
            "FAKETIME_DONT_FAKE_MONOTONIC=1",
            "FAKETIME_DISABLE_SHM=1",
        ]);
        (clock, builder)
    }

    /// So many seconds off from now on. At once: nobody reads half of it.
    pub fn set(&self, off: i64) {
        let new = self.0.with_extension("new");
        machine::write(&new, format!("{off:+}"));
        std::fs::rename(&new, &self.0).expect("our own file");
    }
}

/// How far off a time is that the node tells for something that is to happen within a minute, in seconds.
fn off(told: u64) -> i64 {
    let now = SystemTime::UNIX_EPOCH.elapsed().expect("it is after 1970").as_secs();
    told.cast_signed() - now.cast_signed()
}

fn a_wall_clock_that_is_set_moves_no_promise() {
    for step in [3_600, -3_600] {
        let held = Held::start();
        let (clock, builder) = WallClock::of(builder());
        let world = node_of(builder, &held);
        let is_at = |told: &Value, by: i64| {
            let off = off(told.as_u64().expect("seconds since 1970")) - by;
            assert!((-1..=120).contains(&off), "{off} s from a clock that is {by} s off");
        };
        let later = |client: u8| {
            let refused = ask(&world, "/later", client, "").response().expect(503);
            let after: u64 = refused.header("retry-after").expect("a time").parse().expect("seconds");
            assert!((1..=60).contains(&after), "{after}");
            (ticket(&refused), problem(&refused))
        };
        // Each comes in its slot, whatever the clock says by then.
        let keep = |client: u8, ticket: &str, first: &mut Connection| {
            let mut again = come_in_time(&world, "/later", client, ticket);
            held.let_go(2);
            first.response().expect(200);
            again.response().expect(200);
        };
        let mut first = occupy(&world, &held);
        let (before, problem) = later(1);
        is_at(&problem["not_before"], 0);
        clock.set(step);
        // Whoever comes now is told a time by the clock that is.
        let (after, problem) = later(2);
        is_at(&problem["not_before"], step);
        keep(1, &before, &mut first);
        let mut second = occupy(&world, &held);
        keep(2, &after, &mut second);
        let mut plain = ask(&world, "/plain", 3, "");
        held.let_go(1);
        plain.response().expect(200);
        let received = held.backend.received();
        let (_, came) = received.rsplit_once("x-request-start: t=").expect("backends are told");
        let came: u64 = came.split("\r\n").next().and_then(|it| it.parse().ok()).expect("microseconds");
        assert!((-120..=1).contains(&(off(came / 1_000_000) - step)), "the node sees the clock that was set");
        let lane = lane(&world, "shop");
        assert_eq!((&lane["counts"]["promised"], &lane["counts"]["kept"]), (&json!(2), &json!(2)), "{lane}");

        // An edge that is started anew under the clock as it is now keeps what the one before it has promised.
        let first = occupy(&world, &held);
        let (before, _) = later(4);
        replace_edge(&world);
        drop(first);
        held.let_those_go(1);
        let mut busy = occupy(&world, &held);
        keep(4, &before, &mut busy);
        assert_eq!((world.restarts_of("edge"), world.restarts_of("keeper")), (1, 0));
        assert!(!world.log().contains("panicked"));
        world.stop();
    }
}

fn people_get_a_page_and_crawlers_no_ticket() {
    let held = Held::start();
    let world = node(&held);
    let mut first = occupy(&world, &held);
    let page = ask(&world, "/", 1, "Accept: text/html\r\nAccept-Language: ja\r\n").response().expect(503);
    assert_eq!(page.header("content-type"), Some("text/html; charset=utf-8"));
    assert_eq!(page.header("content-language"), Some("ja"));
    assert!(page.header("content-security-policy").is_some(), "{page:?}");
    let cookie = page.header("set-cookie").expect("the ticket").to_owned();
    assert!(cookie.contains("; HttpOnly") && cookie.contains("; SameSite=Lax"), "{cookie}");
    let text = page.text();
    assert!(text.contains("lang=\"ja\"") && text.contains("/.nagaya/wait/"), "{text}");
    let crawler = "Accept: text/html\r\nUser-Agent: Mozilla/5.0 (compatible; Googlebot/2.1)\r\n";
    let crawler = ask(&world, "/", 2, crawler).response().expect(503);
    assert!(
        crawler.header("nagaya-ticket").is_none() && crawler.header("retry-after").is_some(),
        "{crawler:?}"
    );
    // A page of the site's own.
    let own = world.path("waiting.html");
    std::fs::write(&own, "<p>{{begins_in}} s, {{events}}</p>").expect("written");
    world.cli(&["site", "set", "shop", "--waiting-page", &own.to_string_lossy()]);
    let page = ask(&world, "/", 3, "Accept: text/html\r\n").response().expect(503);
    assert!(page.header("refresh").is_some(), "{page:?}");
    let page = page.text();
    assert!(page.starts_with("<p>") && page.contains(" s, /.nagaya/wait/"), "{page}");
    held.let_go(1);
    first.response().expect(200);
    world.stop();
}

fn a_waiting_page_is_called_when_it_is_time() {
    let held = Held::start();
    let world = node(&held);
    let mut first = occupy(&world, &held);
    let page = ask(&world, "/", 1, "Accept: text/html\r\n").response().expect(503);
    let cookie =
        page.header("set-cookie").and_then(|cookie| cookie.split(';').next()).expect("it is kept").to_owned();
    let text = page.text();
    let events =
        text.split('"').find(|part| part.starts_with("/.nagaya/wait/")).expect("its stream").to_owned();
    let mut stream = ask(&world, &events, 1, &format!("Accept: text/event-stream\r\nCookie: {cookie}\r\n"));
    wait::until("the stream has begun", || stream.is_answered());
    held.let_go(1);
    first.response().expect(200);
    let stream = stream.response().expect(200);
    assert_eq!(stream.header("content-type"), Some("text/event-stream"));
    assert!(stream.text().contains("event: come\n"), "{stream:?}");
    // It comes with its cookie, which is then taken away.
    held.let_go(1);
    let come = ask(&world, "/", 1, &format!("Cookie: {cookie}\r\n")).response().expect(200);
    assert!(come.header("set-cookie").is_some_and(|cookie| cookie.contains("Max-Age=0")), "{come:?}");
    ask(&world, &events, 1, "").response().expect(404);
    world.stop();
}

fn two_pages_of_one_ticket_are_called() {
    let held = Held::start();
    let world = node(&held);
    // So that the slot does not begin before all have asked: it is the free place that calls. The first slot begins when its turn is
    // expected to be, which is soon, and the second half an hour later.
    world.cli(&["site", "set", "shop", "--slot-seconds", "1800"]);
    let mut first = occupy(&world, &held);
    let mut client = 0;
    let page = wait::until_some("a ticket of the second slot", || {
        client += 1;
        let page = ask(&world, "/", client, "Accept: text/html\r\n").response().expect(503);
        let after: u64 = page.header("retry-after").expect("a time").parse().expect("seconds");
        (after > 900).then_some(page)
    });
    let fields = format!("Nagaya-Ticket: {}\r\n", ticket(&page));
    let text = page.text();
    let events = text.split('"').find(|part| part.starts_with("/.nagaya/wait/")).expect("its stream");
    let mut streams: Vec<_> = (0..2).map(|_| ask(&world, events, client, &fields)).collect();
    wait::until("the streams have begun", || streams.iter_mut().all(|stream| stream.is_answered()));
    // Browsers that are told so do not ask for a stream again; their connections are needed for other things.
    ask(&world, events, client, &fields).response().expect(204);
    held.let_go(1);
    first.response().expect(200);
    for stream in &mut streams {
        let said = stream.response().expect(200).text();
        assert_eq!(said.matches("event: come\n").count(), 1, "{said}");
    }
    world.stop();
}

fn client_that_asks_again_gets_the_same_ticket() {
    let held = Held::start();
    let world = node(&held);
    let mut first = occupy(&world, &held);
    let mut tickets = (0..3).map(|_| ticket(&ask(&world, "/", 1, "").response().expect(503)));
    let own = tickets.next().expect("three");
    assert!(tickets.all(|ticket| ticket == own), "one client has one ticket");
    assert_ne!(ticket(&ask(&world, "/", 2, "").response().expect(503)), own);
    held.let_go(1);
    first.response().expect(200);
    world.stop();
}

fn a_rule_lets_pass_and_lets_some_go_first() {
    let held = Held::start();
    let rule = "bypass if request.path == \"/health\"\npriority 50 if request.path == \"/paying\"\n";
    let world = World::builder()
        .set("edge", "threads = 1")
        .rule("rule.rb", "access_checker", rule, "")
        .tenant("alice")
        .start();
    world.import(&[json!({ "name": "shop", "tenant": "alice", "hosts": ["shop.test"], "max_concurrent": 1,
        "backend": { "kind": "http", "address": held.backend.address.to_string() } })]);
    let mut first = occupy(&world, &held);
    let mut second = ask(&world, "/second", 1, "");
    wait::until("it waits", || is_waiting(&world, 1));
    let mut paying = ask(&world, "/paying", 2, "");
    wait::until("it waits too", || is_waiting(&world, 2));
    let mut health = ask(&world, "/health", 3, "");
    wait::until("it runs beside the others", || {
        held.arrived().last().is_some_and(|target| target == "/health")
    });
    held.let_go(4);
    for connection in [&mut first, &mut health, &mut paying, &mut second] {
        connection.response().expect(200);
    }
    assert_eq!(held.arrived(), ["/running", "/health", "/paying", "/second"]);
    world.stop();
}

/// A client that speaks HTTP/2. Ended when dropped.
struct Http2Client(Child);

impl Http2Client {
    /// Asks for these as streams of one connection.
    fn ask(world: &World, targets: &[&str]) -> Self {
        let urls = targets.iter().map(|target| format!("http://{}{target}", world.http()));
        let mut command = Command::new("nghttp");
        command.args(["-nv", "-H", ":authority: shop.test"]).args(urls);
        Self(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("nghttp starts"))
    }

    /// Waits for all its answers and returns what it tells of them.
    fn told(mut self) -> String {
        let mut told = String::new();
        let output = self.0.stdout.as_mut().expect("it is piped");
        output.read_to_string(&mut told).expect("it writes text");
        told
    }
}

impl Drop for Http2Client {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn streams_of_one_connection_wait_each_for_itself() {
    let held = Held::start();
    let world = node(&held);
    world.cli(&["site", "set", "shop", "--wait-seconds", "60"]);
    let mut first = occupy(&world, &held);
    let gone = Http2Client::ask(&world, &["/gone", "/gone-too"]);
    wait::until("both wait", || is_waiting(&world, 2));
    drop(gone);
    wait::until("their places are free", || is_waiting(&world, 0));
    let both = Http2Client::ask(&world, &["/one", "/two"]);
    wait::until("both wait", || is_waiting(&world, 2));
    held.let_go(1);
    first.response().expect(200);
    wait::until("one of them runs", || is_waiting(&world, 1));
    held.let_go(2);
    let told = both.told();
    assert_eq!(told.matches(":status: 200").count(), 2, "{told}");
    assert_eq!(told.matches("Connected").count(), 1, "{told}");
    assert_eq!(told.matches("server-timing: queue;dur=").count(), 2, "each was held: {told}");
    assert!(!held.arrived().iter().any(|target| target.starts_with("/gone")), "nobody was left to answer");
    world.stop();
}

fn a_ticket_over_http2_is_kept() {
    let held = Held::start();
    let world = node(&held);
    let mut first = occupy(&world, &held);
    let curl = |fields: &[&str]| {
        let connect = format!("shop.test:{}:127.0.0.1:{}", world.http().port(), world.http().port());
        let url = format!("http://shop.test:{}/later", world.http().port());
        let mut command = Command::new("curl");
        command.args(["-sSi", "--http2-prior-knowledge", "--connect-to", &connect]).args(fields).arg(url);
        Http2Client(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("curl starts"))
    };
    let refused = curl(&[]).told();
    assert!(refused.starts_with("HTTP/2 503") && refused.contains("\r\nretry-after: "), "{refused}");
    let ticket = refused.split("\r\nnagaya-ticket: ").nth(1).and_then(|rest| rest.lines().next());
    let shown = format!("Nagaya-Ticket: {}", ticket.expect("a ticket"));
    let mut again = wait::until_some("its slot has begun", || {
        let mut again = curl(&["-H", &shown]);
        let is_over = |again: &mut Http2Client| again.0.try_wait().expect("it is ours").is_some();
        wait::until("it waits or was answered", || is_waiting(&world, 1) || is_over(&mut again));
        if is_over(&mut again) {
            let early = again.told();
            assert!(early.starts_with("HTTP/2 503") && early.contains("NGY0451"), "{early}");
            return None;
        }
        Some(again)
    });
    assert!(again.0.try_wait().expect("it is ours").is_none(), "it stands in line");
    held.let_go(2);
    first.response().expect(200);
    let answer = again.told();
    assert!(answer.starts_with("HTTP/2 200") && answer.ends_with("/later"), "{answer}");
    let lane = lane(&world, "shop");
    assert_eq!((&lane["counts"]["promised"], &lane["counts"]["kept"]), (&json!(1), &json!(1)), "{lane}");
    world.stop();
}

fn lanes_are_shown_and_explained() {
    let held = Held::start();
    let world = node(&held);
    world.cli(&["site", "set", "shop", "--wait-seconds", "60"]);
    let mut first = occupy(&world, &held);
    let mut second = ask(&world, "/second", 1, "");
    wait::until("it waits", || is_waiting(&world, 1));
    let table = world.cli(&["lanes"]);
    assert!(table.lines().any(|line| line.starts_with("site shop ")), "{table}");
    let why = world.cli(&["explain", "shop"]);
    assert!(why.contains("1 wait, 1 of 1 run") && why.contains("held by its own bound"), "{why}");
    assert!(world.metric("nagaya_lane_waiting", "lane=\"site shop\"") == 1.0);
    held.let_go(2);
    first.response().expect(200);
    second.response().expect(200);
    assert!(world.cli(&["explain", "shop"]).contains("nobody waits"));
    let unknown = world.try_cli(&["explain", "nosuch"]);
    assert!(!unknown.status.success());
    world.stop();
}
