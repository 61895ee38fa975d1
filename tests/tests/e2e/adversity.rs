//! Admission when something is wrong: no ticket to give, no disk to keep one on, clients that vanish, lanes that go.
//!
//! Not here: lines and tickets as they should be (`admission`), other faults (`failures`), slow clients (`slow_clients`).

use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use nagaya_tests::client::{Connection, Response};
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::{Value, json};

use crate::admission::{
    RUNNING, WallClock, ask, builder, come_in_time, is_waiting, lane, node_of, occupy, problem, shop, ticket,
};
use crate::failures::SmallDisk;
use crate::limits::Held;

pub const SUITE: Suite = Suite {
    name: "adversity",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        client_without_a_ticket_is_told_when_to_try_again,
        client_that_waited_too_long_is_told_and_may_send_again,
        without_a_disk_nothing_is_promised_and_all_is_served,
        client_whose_machine_vanishes_loses_its_place,
        a_site_that_goes_while_its_line_is_full_leaves_nothing,
        a_bound_that_is_lowered_cuts_nobody_off,
        client_that_never_reads_gives_its_permit_back,
        a_ticket_ends_and_one_outlives_a_killed_node,
        client_that_keeps_asking_waits_and_holds_nothing,
    ]),
};

/// What browsers say that they want.
const HTML: &str = "Accept: text/html\r\n";

fn has_no_ticket(answer: &Response) {
    assert!(answer.header("nagaya-ticket").is_none() && answer.header("set-cookie").is_none(), "{answer:?}");
    assert_eq!(answer.header("cache-control"), Some("no-store"), "{answer:?}");
    let after = answer.header("retry-after").and_then(|text| text.parse::<u32>().ok());
    assert!(after.is_some_and(|seconds| seconds >= 1), "{answer:?}");
}

fn client_without_a_ticket_is_told_when_to_try_again() {
    let held = Held::start();
    let world = node_of(builder().set("admission", "tickets_max = 1"), &held);
    let mut first = occupy(&world, &held);
    ticket(&ask(&world, "/later", 1, "").response().expect(503));
    // All tickets there may be are out.
    let program = ask(&world, "/later", 2, "").response().expect(503);
    has_no_ticket(&program);
    let told = problem(&program);
    assert_eq!((&told["code"], &told["position"]), (&json!("NGY0413"), &json!(1)), "{told}");
    assert!(told["predicted_wait_seconds"].is_u64() && told.get("ticket").is_none(), "{told}");
    let person = ask(&world, "/", 3, &format!("{HTML}Accept-Language: ja\r\n")).response().expect(503);
    has_no_ticket(&person);
    assert_eq!(person.header("content-language"), Some("ja"));
    assert!(person.header("content-security-policy").is_some(), "{person:?}");
    let page = person.text();
    assert!(page.contains("http-equiv=\"refresh\"") && page.contains("再試行"), "{page}");
    assert!(!page.contains("/.nagaya/wait/"), "there is nothing to listen for: {page}");
    let english = ask(&world, "/", 3, HTML).response().expect(503).text();
    assert!(english.contains("No turn is reserved for you."), "{english}");
    let crawler = "User-Agent: Mozilla/5.0 (compatible; Googlebot/2.1)\r\n";
    let crawler = ask(&world, "/", 4, &format!("{HTML}{crawler}")).response().expect(503);
    has_no_ticket(&crawler);
    let plain = crawler.text();
    assert!(plain.contains("NGY0413") && !plain.contains("refresh"), "{plain}");
    held.let_go(1);
    first.response().expect(200);
    world.stop();
}

fn client_that_waited_too_long_is_told_and_may_send_again() {
    let held = Held::start();
    let world = World::builder().set("tenants", "wait_timeout = \"300ms\"").tenant("alice").start();
    world.import(&[json!({ "name": "shop", "tenant": "alice", "hosts": ["shop.test"], "max_concurrent": 1,
        "backend": { "kind": "http", "address": held.backend.address.to_string() } })]);
    let mut first = occupy(&world, &held);
    let post = |fields: &str| {
        let mut connection = Connection::open(world.http());
        connection.send(format!(
            "POST /order HTTP/1.1\r\nHost: shop.test\r\nContent-Length: 4\r\n{fields}\r\na=b&"
        ));
        connection
    };
    let mut program = post("");
    let mut person = post(HTML);
    let program = program.response().expect(503);
    has_no_ticket(&program);
    assert_eq!(problem(&program)["code"], "NGY0414");
    let person = person.response().expect(503);
    has_no_ticket(&person);
    assert!(person.header("refresh").is_none(), "what was posted would be lost: {person:?}");
    let page = person.text();
    assert!(page.contains("data-post=\"yes\"") && !page.contains("http-equiv=\"refresh\""), "{page}");
    assert!(page.contains("Nothing you sent has been acted on yet."), "{page}");
    held.let_go(1);
    first.response().expect(200);
    assert!(!held.backend.received().contains("/order"), "neither was carried out");
    world.stop();
}

fn without_a_disk_nothing_is_promised_and_all_is_served() {
    let held = Held::start();
    let builder = builder();
    let tickets = builder.path("state/tickets");
    let disk = SmallDisk::mount(&tickets, "4m");
    let world = node_of(builder, &held);
    let mut first = occupy(&world, &held);
    let before = ticket(&ask(&world, "/before", 1, "").response().expect(503));
    let filler = tickets.join("filler");
    assert!(fs::write(&filler, vec![0; 8 << 20]).is_err(), "the disk is larger than it was meant to be");
    // The file may have had room for some tickets more.
    let mut client = 1;
    let mut refused = || {
        wait::until_some("nothing is promised", || {
            client = client % 200 + 1;
            let answer = ask(&world, "/", client, "").response().expect(503);
            answer.header("nagaya-ticket").is_none().then_some(answer)
        })
    };
    let answer = refused();
    has_no_ticket(&answer);
    assert_eq!(problem(&answer)["code"], "NGY0413");
    wait::until("the node says why", || world.log().contains("NGY0454"));
    // It may become read-only on top.
    let remount = |how: &str| machine::output("mount", &["-o", how, &tickets.to_string_lossy()]);
    wait::until("nobody writes there", || {
        has_no_ticket(&refused());
        remount("remount,ro").status.success()
    });
    has_no_ticket(&refused());
    // All else goes on: also for who was promised something before.
    held.let_go(1);
    first.response().expect(200);
    let mut second = occupy(&world, &held);
    let mut again = come_in_time(&world, "/before", 1, &before);
    held.let_go(2);
    second.response().expect(200);
    again.response().expect(200);
    // And when there is room again, so are promises.
    let mut third = occupy(&world, &held);
    assert!(remount("remount,rw").status.success());
    fs::remove_file(&filler).expect("our own file");
    wait::until("tickets are given again", || {
        ask(&world, "/", 240, "").response().expect(503).header("nagaya-ticket").is_some()
    });
    wait::until("the node says so", || world.log().contains("tickets can be stored again"));
    held.let_go(1);
    third.response().expect(200);
    assert_eq!(world.restarts_of("edge"), 0);
    drop(disk);
    world.stop();
}

/// Nothing of a connection's packets arrives any more, in either direction, until this is dropped: the other machine is gone.
struct Vanished(String);

impl Vanished {
    fn now(client: SocketAddr, server: SocketAddr) -> Self {
        let table = format!("nagaya-e2e-{}-{}", std::process::id(), client.port());
        let client = client.port().to_string();
        let server = server.port().to_string();
        let nft = |words: &[&str]| machine::run("nft", words);
        nft(&["add", "table", "inet", &table]);
        let gone = Self(table);
        let hook = ["{", "type", "filter", "hook", "input", "priority", "0", ";", "}"];
        nft(&[&["add", "chain", "inet", &gone.0, "input"][..], &hook].concat());
        for (from, to) in [(&client, &server), (&server, &client)] {
            nft(&["add", "rule", "inet", &gone.0, "input", "tcp", "sport", from, "tcp", "dport", to, "drop"]);
        }
        gone
    }
}

impl Drop for Vanished {
    fn drop(&mut self) {
        let _ = machine::output("nft", &["delete", "table", "inet", &self.0]);
    }
}

fn client_whose_machine_vanishes_loses_its_place() {
    let held = Held::start();
    let limits = "vanished_timeout = \"2s\"\nidle_body_timeout = \"2s\"";
    let world = node_of(builder().set("edge.limits", limits), &held);
    world.cli(&["site", "set", "shop", "--wait-seconds", "60"]);
    let mut first = occupy(&world, &held);
    let vanishing = ask(&world, "/vanished", 1, "");
    wait::until("it waits", || is_waiting(&world, 1));
    let mut next = ask(&world, "/next", 2, "");
    wait::until("both wait", || is_waiting(&world, 2));
    let address = vanishing.clone_stream().local_addr().expect("a connection has an address");
    let vanished = Vanished::now(address, world.http());
    wait::until("its place is free", || is_waiting(&world, 1));
    held.let_go(2);
    first.response().expect(200);
    next.response().expect(200);
    assert!(!held.arrived().iter().any(|target| target == "/vanished"), "{:?}", held.arrived());
    drop(vanished);
    drop(vanishing);
    world.stop();
}

fn a_site_that_goes_while_its_line_is_full_leaves_nothing() {
    let held = Held::start();
    let world = node_of(builder(), &held);
    world.cli(&["site", "set", "shop", "--wait-seconds", "60"]);
    let mut first = occupy(&world, &held);
    let mut waiting: Vec<_> = (1..=3).map(|client| ask(&world, "/waiting", client, "")).collect();
    wait::until("they wait", || is_waiting(&world, 3));
    world.cli(&["site", "remove", "shop"]);
    for connection in &mut waiting {
        assert!(connection.response().expect(404).text().contains("NGY0402"));
    }
    assert!(is_waiting(&world, 0));
    // What ran is answered, and gives back what it held.
    held.let_go(1);
    first.response().expect(200);
    let lanes =
        || -> Vec<Value> { serde_json::from_str(&world.cli(&["lanes", "--json"])).expect("a list of lanes") };
    wait::until("nothing runs", || lanes().iter().all(|lane| lane["running"] == 0));
    assert!(lanes().iter().all(|lane| lane["name"] != "shop"), "{:?}", lanes());
    // The same name again has a line that is empty.
    world.import(&[shop(&held, 60)]);
    let mut anew = occupy(&world, &held);
    held.let_go(1);
    anew.response().expect(200);
    assert!(!held.arrived().iter().any(|target| target == "/waiting"));
    world.stop();
}

fn a_bound_that_is_lowered_cuts_nobody_off() {
    let held = Held::start();
    let world = node_of(builder(), &held);
    world.cli(&["site", "set", "shop", "--wait-seconds", "60", "--max-concurrent", "3"]);
    let learned = held.arrived().len();
    let mut running: Vec<_> = (1..=3).map(|client| ask(&world, RUNNING, client, "")).collect();
    wait::until("three run", || held.arrived().len() == learned + 3);
    let mut waiting: Vec<_> = (4..=5).map(|client| ask(&world, "/waiting", client, "")).collect();
    wait::until("two wait", || is_waiting(&world, 2));
    world.cli(&["site", "set", "shop", "--max-concurrent", "1"]);
    wait::until("the new bound holds", || lane(&world, "shop")["run"] == 1);
    // Each that ends is one less, and nobody takes its place, until fewer run than may.
    for left in [2, 1] {
        held.let_go(1);
        wait::until("one has been answered", || lane(&world, "shop")["running"] == left);
        assert!(is_waiting(&world, 2));
        assert_eq!(held.arrived().len(), learned + 3);
    }
    held.let_go(1);
    wait::until("the next one runs", || held.arrived().len() == learned + 4);
    assert!(is_waiting(&world, 1));
    assert_eq!(lane(&world, "shop")["running"], 1);
    held.let_go(2);
    for connection in running.iter_mut().chain(&mut waiting) {
        connection.response().expect(200);
    }
    world.stop();
}

fn client_that_never_reads_gives_its_permit_back() {
    let world = World::builder()
        .set("edge.limits", "idle_body_timeout = \"1s\"")
        .tenant("alice")
        .site(json!({ "name": "www", "tenant": "alice", "hosts": ["www.test"], "max_concurrent": 1,
            "backend": { "kind": "static", "root": "www" } }))
        .start();
    world.write("alice", "www/a.txt", "alpha");
    world.write("alice", "www/big.bin", vec![7; 64 << 20]);
    let begin = |target: &str| {
        let mut connection = Connection::open(world.http());
        connection.send(format!("GET {target} HTTP/1.1\r\nHost: www.test\r\n\r\n"));
        connection
    };
    for leaves in [true, false] {
        let mut never_reads = begin("/big.bin");
        never_reads.head().expect(200);
        let never_reads = (!leaves).then_some(never_reads);
        // A file needs nobody but its reader, so the one permit is free.
        let mut next = begin("/a.txt");
        assert_eq!(next.response().expect(200).text(), "alpha");
        assert!(is_waiting(&world, 0));
        drop(never_reads);
    }
    world.stop();
}

fn a_ticket_ends_and_one_outlives_a_killed_node() {
    let held = Held::start();
    let (clock, builder) = WallClock::of(builder());
    let world = node_of(builder, &held);
    let kill = |running: Connection| {
        let processes = [world.pid(), world.pid_of("edge"), world.pid_of("keeper")];
        machine::signal(world.pid(), "KILL");
        world.wait_for_end();
        for id in processes {
            wait::until("nothing of it is left", || !machine::is_running(id));
        }
        drop(running);
        held.let_those_go(1);
    };
    // Long enough that a start on a busy machine does not outlast it.
    world.cli(&["site", "set", "shop", "--slot-seconds", "60"]);
    // All of it at once, and the node starts anew as it would after a power cut.
    let first = occupy(&world, &held);
    let kept = ticket(&ask(&world, "/later", 1, "").response().expect(503));
    kill(first);
    world.launch();
    let mut busy = occupy(&world, &held);
    let mut again = come_in_time(&world, "/later", 1, &kept);
    held.let_go(2);
    busy.response().expect(200);
    again.response().expect(200);
    let shop = lane(&world, "shop");
    assert_eq!((&shop["counts"]["kept"], &shop["counts"]["broken"]), (&json!(1), &json!(0)), "{shop}");

    // One that nobody came for while the node was down for long.
    let second = occupy(&world, &held);
    let told = ask(&world, "/later", 2, "").response().expect(503);
    let ended = ticket(&told);
    let cookie = told.header("set-cookie").and_then(|cookie| cookie.split(';').next()).expect("it is kept");
    kill(second);
    clock.set(7_200);
    world.launch();
    let mut busy = occupy(&world, &held);
    let fields = format!("Nagaya-Ticket: {ended}\r\n");
    let answer = ask(&world, "/later", 2, &fields).response().expect(403);
    assert!(answer.text().contains("NGY0452"), "{answer:?}");
    // A cookie that is left over counts as none: whoever has it is promised something new, by what was learned before the restarts.
    let anew = ask(&world, "/later", 2, &format!("Cookie: {cookie}\r\n")).response().expect(503);
    assert_ne!(ticket(&anew), ended);
    held.let_go(1);
    busy.response().expect(200);
    world.stop();
}

fn client_that_keeps_asking_waits_and_holds_nothing() {
    let held = Held::start();
    // As long as it is if nothing is set.
    let world = node_of(World::builder(), &held);
    world.cli(&["site", "set", "shop", "--slot-seconds", "1800"]);
    let mut first = occupy(&world, &held);
    // The first slot begins when its turn is expected to be, and the second half an hour later.
    let mut client = 0;
    let early = wait::until_some("a ticket of the second slot", || {
        client += 1;
        let told = ask(&world, "/later", client, "").response().expect(503);
        let after: u64 = told.header("retry-after").expect("a time").parse().expect("seconds");
        (after > 900).then(|| ticket(&told))
    });
    let fields = format!("Nagaya-Ticket: {early}\r\n");
    let mut hammering: Vec<_> = (0..5).map(|_| ask(&world, "/later", client, &fields)).collect();
    // The node's one thread serves others before it answers any of them, and the lane counts none of them.
    assert_eq!(world.get("nosuch.test", "/").status, 404);
    assert!(!hammering.iter().any(Connection::is_answered), "they were answered at once");
    let shop = lane(&world, "shop");
    assert_eq!((&shop["running"], &shop["waiting"]), (&json!(1), &json!(0)), "{shop}");
    for connection in &mut hammering {
        let told = problem(&connection.response().expect(503));
        assert_eq!((&told["code"], &told["ticket"]), (&json!("NGY0451"), &json!(early)));
        let id = told["request"].as_str().expect("its id");
        let took = Duration::from_micros(world.logged(id)["duration_us"].as_u64().expect("a time"));
        assert!(took >= Duration::from_secs(3), "{took:?}");
    }
    held.let_go(1);
    first.response().expect(200);
    world.stop();
}
