//! Tenants and sites as an operator changes them, and the file they are kept in.
//!
//! Not here: what a single record may say (unit tests of `records`), how sites are served.

use std::fs;

use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::{Value, json};

pub const SUITE: Suite = Suite {
    name: "sites",
    needs_root: false,
    tests: Tests::Sharing(
        world,
        nagaya_tests::tests![
            a_change_is_live_without_a_reload,
            the_command_line_adds_shows_lists_and_removes,
            one_bad_line_in_100000_changes_nothing,
            exported_sites_can_be_imported,
            the_default_site_takes_what_nobody_else_does,
            records_survive_a_restart,
            a_truncated_store_is_refused_and_left_alone,
            a_store_of_a_newer_version_is_refused_and_left_alone,
            a_store_of_an_older_version_goes_on_as_one_of_this,
            every_mistake_in_the_configuration_is_named,
            two_nodes_do_not_share_a_directory,
        ],
    ),
};

/// Lines of the import that must not be taken.
const LINES: usize = 100_000;

fn world() -> World {
    let world = World::builder().tenant("alice").start();
    world.write("alice", "one/index.html", "one");
    world.write("alice", "two/index.html", "two");
    world
}

fn site(name: &str, host: &str, root: &str) -> Value {
    json!({ "name": name, "tenant": "alice", "hosts": [host], "backend": { "kind": "static", "root": root } })
}

#[track_caller]
fn must_become(world: &World, host: &str, text: &str) {
    wait::until(&format!("{host} says '{text}'"), || world.get(host, "/").text() == text);
}

fn a_change_is_live_without_a_reload(world: &World) {
    world.get("live.test", "/").expect(404);
    world.cli(&[
        "site",
        "add",
        "live",
        "--tenant",
        "alice",
        "--host",
        "live.test",
        "--backend",
        "static",
        "--root",
        "one",
    ]);
    must_become(world, "live.test", "one");
    world.cli(&["site", "set", "live", "--root", "two"]);
    must_become(world, "live.test", "two");
    world.cli(&["site", "set", "live", "--host", "moved.test"]);
    must_become(world, "moved.test", "two");
    world.get("live.test", "/").expect(404);
    // No request after a command meets what was there before it.
    for round in 0..20 {
        let root = ["one", "two"][round % 2];
        world.cli(&["site", "set", "live", "--root", root]);
        assert_eq!(world.get("moved.test", "/").expect(200).text(), root, "round {round}");
    }
    world.cli(&["site", "remove", "live"]);
    world.get("moved.test", "/").expect(404);
    assert_eq!(world.restarts_of("edge"), 0);
}

fn the_command_line_adds_shows_lists_and_removes(world: &World) {
    world.cli(&["tenant", "add", "carol", "--json"]);
    let shown: Value =
        serde_json::from_str(&world.cli(&["tenant", "show", "carol", "--json"])).expect("JSON");
    let uid = find(&shown, "uid").and_then(Value::as_u64).expect("a uid was given to it");
    assert!(uid >= 1000);
    world.cli(&[
        "site",
        "add",
        "carols",
        "--tenant",
        "carol",
        "--host",
        "carol.test",
        "--backend",
        "static",
        "--root",
        "/srv",
    ]);
    let list = world.cli(&["site", "list", "--tenant", "carol", "--json"]);
    assert!(list.contains("carol.test"), "{list}");
    let taken = world.try_cli(&[
        "site",
        "add",
        "other",
        "--tenant",
        "alice",
        "--host",
        "carol.test",
        "--backend",
        "static",
        "--root",
        "one",
    ]);
    assert!(!taken.status.success(), "one host name, two sites");
    assert!(String::from_utf8_lossy(&taken.stderr).contains("carols"), "it says whose it is: {taken:?}");
    assert!(!world.try_cli(&["tenant", "remove", "carol"]).status.success(), "a tenant with sites");
    world.cli(&["site", "remove", "carols"]);
    world.cli(&["tenant", "remove", "carol"]);
    assert!(!world.try_cli(&["tenant", "show", "carol"]).status.success());
}

/// The first value of this key, however deep it lies.
fn find<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    match value {
        Value::Object(map) => map.get(key).or_else(|| map.values().find_map(|value| find(value, key))),
        Value::Array(list) => list.iter().find_map(|value| find(value, key)),
        _ => None,
    }
}

fn one_bad_line_in_100000_changes_nothing(world: &World) {
    const BAD: usize = 77_777;
    let before = world.cli(&["site", "export"]);
    let mut lines = String::new();
    for number in 1..=LINES {
        let record = match number {
            BAD => json!({ "site": site("bad", "not a host", "one") }),
            _ => json!({ "site": site(&format!("bulk-{number}"), &format!("h{number}.bulk.test"), "one") }),
        };
        lines.push_str(&format!("{record}\n"));
    }
    let output = world.try_import(&lines);
    let said = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && said.contains(&format!("line {BAD}")), "{said}");
    assert!(said.contains("NGY0212"), "{said}");
    let after = world.cli(&["site", "export"]);
    assert!(!after.contains("bulk-"), "something of it was stored");
    assert!(
        before.lines().all(|line| after.contains(line) || line.contains("live") || line.contains("carol"))
    );
    world.get("h1.bulk.test", "/").expect(404);
}

fn exported_sites_can_be_imported(world: &World) {
    let other = World::builder().tenant("alice").start();
    other.import(&[site("x", "x.test", "one"), site("y", "*.y.test", "two")]);
    let lines = other.cli(&["site", "export"]);
    other.import(&[site("z", "z.test", "one")]);
    let file = other.path("export.jsonl");
    fs::write(&file, &lines).expect("our own directory");
    other.cli(&["site", "import", "--replace", &file.to_string_lossy()]);
    assert_eq!(other.cli(&["site", "export"]), lines);
    wait::until("what the file does not name is gone", || other.get("z.test", "/").status == 404);
    other.stop();
    assert!(world.try_status().is_some());
}

fn the_default_site_takes_what_nobody_else_does(_: &World) {
    let world = World::builder().tenant("alice").site(site("default", "*", "one")).start();
    world.write("alice", "one/index.html", "the default");
    assert_eq!(world.get("whatever.test", "/").expect(200).text(), "the default");
    world.stop();
}

fn records_survive_a_restart(_: &World) {
    let world = World::builder().tenant("alice").site(site("kept", "kept.test", "one")).start();
    world.write("alice", "one/index.html", "kept");
    nagaya_tests::machine::signal(world.pid(), "TERM");
    assert!(world.wait_for_end().success());
    // Without a node, the command line works on the file itself.
    world.cli(&[
        "site",
        "add",
        "offline",
        "--tenant",
        "alice",
        "--host",
        "offline.test",
        "--backend",
        "static",
        "--root",
        "one",
    ]);
    world.launch();
    assert_eq!(world.get("kept.test", "/").expect(200).text(), "kept");
    assert_eq!(world.get("offline.test", "/").expect(200).text(), "kept");
    // Killed without warning, it comes back with what was acknowledged.
    world.import(&[site("acknowledged", "ack.test", "one")]);
    nagaya_tests::machine::signal(world.pid(), "KILL");
    world.wait_for_end();
    world.launch();
    assert_eq!(world.get("ack.test", "/").expect(200).text(), "kept");
    world.stop();
}

/// A node with records that has ended.
fn ended_with_records() -> World {
    let world = World::builder().tenant("alice").site(site("kept", "kept.test", "one")).start();
    nagaya_tests::machine::signal(world.pid(), "TERM");
    assert!(world.wait_for_end().success());
    world
}

#[track_caller]
fn must_refuse_store(world: &World, code: &str) {
    let path = world.path("state/nagaya.redb");
    let before = fs::read(&path).expect("the store");
    world.spawn();
    let status = world.wait_for_end();
    assert!(!status.success(), "the node runs on a store it cannot know");
    let log = world.log();
    assert!(log.contains(code) && log.contains("nagaya.redb"), "{log}");
    let refused = world.try_cli(&["site", "list"]);
    assert!(!refused.status.success());
    assert!(fs::read(&path).expect("the store") == before, "the file was changed");
    let explained = world.cli(&["error", code]);
    assert!(explained.contains("What to do"), "{explained}");
}

fn a_truncated_store_is_refused_and_left_alone(_: &World) {
    let world = ended_with_records();
    let path = world.path("state/nagaya.redb");
    let whole = fs::read(&path).expect("the store");
    for len in [0, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..len]).expect("our own file");
        must_refuse_store(&world, "NGY0203");
    }
    // With the file back in place, everything is as it was.
    fs::write(&path, &whole).expect("our own file");
    world.launch();
    assert!(world.cli(&["site", "list"]).contains("kept"));
    world.stop();
}

fn a_store_of_a_newer_version_is_refused_and_left_alone(_: &World) {
    let world = ended_with_records();
    let database = redb::Database::open(world.path("state/nagaya.redb")).expect("the store");
    let write = database.begin_write().expect("nobody else has it open");
    let meta = redb::TableDefinition::<&str, u64>::new("meta");
    write.open_table(meta).expect("its table of settings").insert("format", 1_000).expect("room");
    write.commit().expect("room");
    drop(database);
    must_refuse_store(&world, "NGY0204");
}

fn a_store_of_an_older_version_goes_on_as_one_of_this(_: &World) {
    let world = ended_with_records();
    let database = redb::Database::open(world.path("state/nagaya.redb")).expect("the store");
    let write = database.begin_write().expect("nobody else has it open");
    // As the version before there were rules in it left it.
    write.delete_table(redb::TableDefinition::<&str, &str>::new("rules")).expect("it is there");
    let meta = redb::TableDefinition::<&str, u64>::new("meta");
    write.open_table(meta).expect("its table of numbers").insert("format", 1).expect("room");
    write.commit().expect("room");
    drop(database);
    world.launch();
    assert!(world.cli(&["site", "list"]).contains("kept"));
    world.set_rule("new", "answer 404\n");
    assert!(world.cli(&["rule", "list"]).contains("new"));
    world.stop();
}

fn every_mistake_in_the_configuration_is_named(_: &World) {
    let world = World::builder()
        .set("edge", "threds = 2")
        .set("edge.limits", "head_timeout = 5\nhead_bytes = \"1GiB\"")
        .prepare();
    let output = world.try_cli(&["check-config"]);
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(said.contains("did you mean 'threads'?"), "{said}");
    assert!(
        said.contains("head_timeout") && said.contains("\"5s\"") && said.contains("head_bytes"),
        "{said}"
    );
    let named = said.lines().filter(|line| line.contains("nagaya.toml:")).count();
    assert_eq!(named, 3, "each with file and line: {said}");
    world.spawn();
    assert!(!world.wait_for_end().success(), "it starts with mistakes");
}

fn two_nodes_do_not_share_a_directory(world: &World) {
    let second = world.try_cli(&["serve"]);
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(!second.status.success() && said.contains("NGY0503"), "{said}");
    assert!(world.try_status().is_some(), "the first one goes on");
}
