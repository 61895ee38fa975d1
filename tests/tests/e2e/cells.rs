//! Cells: what runs for a request is held together, limited and counted, and nothing of it stays, whoever dies.
//!
//! Not here: who decides on limits (`rules`), how a receipt is shown (`receipts`), the kernel's side of each limit (the
//! keeper's own suite).

use std::fs;
use std::path::{Path, PathBuf};

use nagaya_tests::client::Connection;
use nagaya_tests::suite::{Suite, Tests, skip};
use nagaya_tests::world::{Builder, World};
use nagaya_tests::{machine, wait};
use serde_json::{Value, json};

pub const SUITE: Suite = Suite {
    name: "cells",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        each_request_has_a_cell_and_what_it_used,
        a_limit_slows_and_refuses_nobody,
        limits_of_records_hold_and_change_while_work_runs,
        tenant_with_a_line_gives_way_until_the_line_is_gone,
        one_request_is_slowed_after_it_used_much,
        a_fork_bomb_is_bounded_and_gone_with_its_request,
        a_tenants_program_cannot_leave_its_cell,
        workers_are_confined_for_each_request,
        a_killed_keeper_leaves_nothing,
        a_killed_edge_leaves_nothing,
        a_named_cell_that_somebody_removed_is_made_again,
        a_group_of_the_same_name_that_is_not_ours_is_left_alone,
        without_writable_cgroups_the_node_serves_and_says_so,
    ]),
};

/// Uses at least a hundredth of a millisecond of CPU time for each of `n`, and says `n`.
const COUNT: &str = "#!/usr/bin/perl\nmy ($n) = $ENV{QUERY_STRING} =~ /n=(\\d+)/;\n\
                     while ((times)[0] + (times)[1] < $n / 1e5) { my $i; $i++ for 1 .. 1000; }\n\
                     print \"Content-Type: text/plain\\n\\n$n\";\n";

/// Uses a twentieth of a second of CPU time.
const SLOW_PHP: &str = "<?php $used = function () { $all = getrusage();
    return ($all['ru_utime.tv_sec'] + $all['ru_stime.tv_sec']) * 1e6 + $all['ru_utime.tv_usec'] + $all['ru_stime.tv_usec']; };
    $end = $used() + 50000; while ($used() < $end); echo getmypid();";

fn builder() -> Builder {
    World::builder().site_of("alice", "a", json!({ "kind": "cgi", "root": "cgi" })).site_of(
        "bob",
        "b",
        json!({ "kind": "cgi", "root": "cgi" }),
    )
}

fn start(builder: Builder) -> World {
    let world = builder.start();
    for tenant in ["alice", "bob"] {
        world.write_program(tenant, "cgi/count.cgi", COUNT);
    }
    world
}

#[track_caller]
fn logged(world: &World, target: &str) -> Value {
    wait::until_some("the request is logged", || {
        world.access_log().into_iter().find(|line| line["target"] == target)
    })
}

#[track_caller]
fn number(line: &Value, name: &str) -> u64 {
    line[name].as_u64().unwrap_or_else(|| panic!("no {name} in {line}"))
}

/// The request took at least so many times its CPU time, as a quota has it: by the kernel's doing, by being held back, or
/// because the machine had no more to give.
#[track_caller]
fn assert_no_faster(line: &Value, times: u64) {
    assert!(number(line, "duration_us") * 20 >= number(line, "cpu_us") * times * 19, "{line}");
}

fn each_request_has_a_cell_and_what_it_used() {
    let world = start(builder());
    world.write_program(
        "alice",
        "cgi/write.cgi",
        "#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\n'\ndd if=/dev/zero of=data bs=64k count=16 oflag=direct 2>&1\n",
    );
    world.give("alice");
    world.get("a.test", "/count.cgi?n=20000").expect(200);
    world.get("b.test", "/count.cgi?n=1").expect(200);
    let busy = logged(&world, "/count.cgi?n=20000");
    let idle = logged(&world, "/count.cgi?n=1");
    assert!(busy["cell"].as_str().is_some_and(|cell| cell.starts_with("alice/a/")), "{busy}");
    assert!(idle["cell"].as_str().is_some_and(|cell| cell.starts_with("bob/b/")), "{idle}");
    assert!(number(&busy, "cpu_us") > number(&idle, "cpu_us"), "{busy}\n{idle}");
    world.get("a.test", "/write.cgi").expect(200);
    let line = logged(&world, "/write.cgi");
    // A home on a file system without a disk of its own is not counted by the kernel.
    if !home_is_on_a_disk(&world) {
        skip("homes lie on no block device here");
    }
    assert!(number(&line, "write_bytes") >= 1 << 20, "{line}");
    assert!(number(&idle, "write_bytes") < 1 << 20, "another request's writes were charged: {idle}");
    world.stop();
}

fn home_is_on_a_disk(world: &World) -> bool {
    let device = rustix::fs::stat(world.home("alice")).expect("our own directory").st_dev;
    let major = rustix::fs::major(device);
    let minor = rustix::fs::minor(device);
    Path::new(&format!("/sys/dev/block/{major}:{minor}")).exists()
}

fn a_limit_slows_and_refuses_nobody() {
    let world = start(builder().rule(
        "one",
        "access_checker",
        "limit cpu: \"20%\"\ncell \"all\", cpu: \"50%\"\n",
        "",
    ));
    let mut asked: Vec<Connection> = (0..8)
        .map(|n| {
            let mut connection = Connection::open(world.http());
            connection.send(format!("GET /count.cgi?n=1000{n} HTTP/1.1\r\nHost: a.test\r\n\r\n"));
            connection
        })
        .collect();
    for (n, connection) in asked.iter_mut().enumerate() {
        assert_eq!(connection.response().expect(200).text(), format!("1000{n}"));
    }
    let lines: Vec<Value> = (0..8).map(|n| logged(&world, &format!("/count.cgi?n=1000{n}"))).collect();
    for line in &lines {
        assert_no_faster(line, 5);
    }
    world.stop();
}

/// A program that runs until it is let go, which its tenant's file does.
fn write_held(world: &World, tenant: &str) {
    world.write_program(
        tenant,
        "cgi/held.cgi",
        "#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\nbegun '\nwhile ! [ -e let-go ]; do :; done\nprintf done\n",
    );
}

fn begin_held(world: &World) -> Connection {
    let mut connection = Connection::open(world.http());
    connection.send("GET /held.cgi HTTP/1.1\r\nHost: a.test\r\n\r\n");
    wait::until("the program runs", || !machine::processes_with(&held(world)).is_empty());
    connection
}

/// What the command line of the held program has, and no other process's.
fn held(world: &World) -> String {
    world.home("alice").join("cgi/held.cgi").to_string_lossy().into_owned()
}

fn cell(world: &World, kind: &str, path: &str) -> Option<Value> {
    world.cells().into_iter().find(|cell| cell["kind"] == kind && cell["path"] == path)
}

fn limits_of_records_hold_and_change_while_work_runs() {
    let world = start(builder());
    write_held(&world, "alice");
    let mut asked = begin_held(&world);
    world.cli(&["tenant", "set", "alice", "--cpu", "30%", "--processes", "77", "--cpu-shares", "512"]);
    let limits = wait::until_some("the tenant's cell has its new limits", || {
        let limits = cell(&world, "tenant", "alice")?["limits"].clone();
        (limits["processes"] == 77).then_some(limits)
    });
    assert_eq!(limits["cpu_shares"], 512, "{limits}");
    let before = cell(&world, "tenant", "alice").expect("it is in use")["usage"]["throttled_us"].clone();
    wait::until("the running program is throttled", || {
        let now = cell(&world, "tenant", "alice").expect("it is in use")["usage"]["throttled_us"].clone();
        now.as_u64() > before.as_u64()
    });
    world.write("alice", "cgi/let-go", "");
    assert_eq!(asked.response().expect(200).text(), "begun done");
    world.stop();
}

fn tenant_with_a_line_gives_way_until_the_line_is_gone() {
    let world = start(builder());
    write_held(&world, "alice");
    world.cli(&["site", "set", "a", "--max-concurrent", "1"]);
    world.cli(&["tenant", "set", "alice", "--cpu-shares", "512"]);
    world.get("b.test", "/count.cgi?n=1").expect(200);
    let mut first = begin_held(&world);
    let shares = |tenant| cell(&world, "tenant", tenant).map(|cell| cell["limits"]["cpu_shares"].clone());
    assert_eq!(shares("alice"), Some(json!(512)));
    let mut second = Connection::open(world.http());
    second.send("GET /held.cgi HTTP/1.1\r\nHost: a.test\r\n\r\n");
    wait::until("it gives way", || shares("alice") == Some(json!(32)));
    assert_eq!(shares("bob"), Some(Value::Null));
    let told = wait::until_some("it is told", || {
        Some(world.cli(&["explain", "a"])).filter(|told| told.contains("gives way"))
    });
    assert!(told.contains("1 wait, 1 of 1 run"), "{told}");
    world.write("alice", "cgi/let-go", "");
    for connection in [&mut first, &mut second] {
        assert_eq!(connection.response().expect(200).text(), "begun done");
    }
    wait::until("it has its shares again", || shares("alice") == Some(json!(512)));
    world.stop();
}

fn one_request_is_slowed_after_it_used_much() {
    let rule = "demote after: \"400ms\", cpu: \"10%\"\n";
    let world = start(builder().rule("one", "access_checker", rule, ""));
    write_held(&world, "alice");
    let mut long = begin_held(&world);
    wait::until("it is slowed down", || {
        let used = |cell: &Value| cell["usage"]["throttled_us"].as_u64().unwrap_or(0);
        world.cells().iter().any(|cell| cell["kind"] == "request" && used(cell) > 0)
    });
    world.write("alice", "cgi/let-go", "");
    assert_eq!(long.response().expect(200).text(), "begun done");
    world.get("a.test", "/count.cgi?n=2").expect(200);
    let long = logged(&world, "/held.cgi");
    let short = logged(&world, "/count.cgi?n=2");
    assert_eq!(number(&long, "demoted"), 1, "{long}");
    assert!(number(&long, "throttled_us") > 0, "{long}");
    assert_eq!(short["demoted"].as_u64().unwrap_or(0), 0, "{short}");
    world.stop();
}

fn a_fork_bomb_is_bounded_and_gone_with_its_request() {
    // Its program ends with its client, which others outlive.
    let brief = json!({ "kind": "cgi", "root": "cgi", "linger_seconds": 0 });
    let builder = World::builder().site_of("alice", "a", brief).site_of(
        "bob",
        "b",
        json!({ "kind": "cgi", "root": "cgi" }),
    );
    let world = start(builder.rule("one", "access_checker", "limit processes: 40\n", ""));
    world.write_program(
        "alice",
        "cgi/bomb.cgi",
        "#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\nlit'\nexec perl -e 'while (1) { fork }' \"$0\"\n",
    );
    let mut bomb = Connection::open(world.http());
    bomb.send("GET /bomb.cgi HTTP/1.1\r\nHost: a.test\r\n\r\n");
    let program = world.home("alice").join("cgi/bomb.cgi").to_string_lossy().into_owned();
    wait::until("the bomb goes off", || machine::processes_with(&program).len() > 10);
    // Meanwhile the other tenant is served.
    world.get("b.test", "/count.cgi?n=10").expect(200);
    assert!(machine::processes_with(&program).len() <= 40);
    drop(bomb);
    machine::wait_until_gone(&program);
    world.get("a.test", "/count.cgi?n=10").expect(200);
    world.stop();
}

fn a_tenants_program_cannot_leave_its_cell() {
    let world = start(builder().rule("one", "access_checker", "limit cpu: \"90%\"\n", ""));
    world.write_program(
        "alice",
        "cgi/leave.cgi",
        "#!/bin/sh\nprintf 'Content-Type: text/plain\\n\\n'\nbefore=$(cat /proc/self/cgroup | sort)\n\
         find /sys/fs/cgroup -maxdepth 2 \\( -name tasks -o -name cgroup.procs \\) 2>/dev/null | while read -r f; do\n\
         (echo $$ >\"$f\") 2>/dev/null && echo \"moved by $f\"\ndone\n\
         find /sys/fs/cgroup -name 'cpu.cfs_quota_us' -o -name cpu.max 2>/dev/null | while read -r f; do\n\
         (echo -1 >\"$f\") 2>/dev/null && echo \"changed $f\"\ndone\n\
         [ \"$before\" = \"$(cat /proc/self/cgroup | sort)\" ] && echo stayed\n",
    );
    assert_eq!(world.get("a.test", "/leave.cgi").expect(200).text(), "stayed\n");
    world.stop();
}

fn workers_are_confined_for_each_request() {
    let rule = "limit cpu: \"50%\" if request.path == \"/slow.php\"\n";
    let world = World::builder()
        .set("tenants", "php_workers = 1")
        .site_of("alice", "one", json!({ "kind": "php", "root": "php" }))
        .site_of("alice", "two", json!({ "kind": "php", "root": "php" }))
        .rule("one", "access_checker", rule, "")
        .start();
    world.write("alice", "php/slow.php", SLOW_PHP);
    world.write("alice", "php/fast.php", "<?php echo getmypid();");
    let first = world.get("one.test", "/slow.php?1").expect(200).text();
    let second = world.get("two.test", "/fast.php?2").expect(200).text();
    let third = world.get("one.test", "/slow.php?3").expect(200).text();
    assert!(first == second && second == third, "one worker serves them all: {first} {second} {third}");
    let [slow, fast, again] =
        ["/slow.php?1", "/fast.php?2", "/slow.php?3"].map(|target| logged(&world, target));
    assert!(slow["cell"].as_str().is_some_and(|cell| cell.starts_with("alice/one/")), "{slow}");
    assert!(fast["cell"].as_str().is_some_and(|cell| cell.starts_with("alice/two/")), "{fast}");
    for line in [&slow, &again] {
        assert!(number(line, "cpu_us") > number(&fast, "cpu_us"), "{line}\n{fast}");
        assert_no_faster(line, 2);
    }
    world.stop();
}

/// Every cgroup directory of the keepers whose process this is.
fn groups_of_keeper(keeper: i32) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![PathBuf::from("/sys/fs/cgroup")];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if entry.file_name().to_string_lossy().starts_with(&format!("k{keeper}-")) {
                    found.push(entry.path());
                }
                open.push(entry.path());
            }
        }
    }
    found
}

fn a_killed_keeper_leaves_nothing() {
    let world =
        start(builder().rule("one", "access_checker", "limit cpu: \"90%\"\ncell \"n\", cpu: \"90%\"\n", ""));
    write_held(&world, "alice");
    let _asked = begin_held(&world);
    let keeper = world.pid_of("keeper");
    assert!(!groups_of_keeper(keeper).is_empty());
    machine::signal(keeper, "KILL");
    wait::until("a new keeper runs", || world.restarts_of("keeper") == 1);
    machine::wait_until_gone(&held(&world));
    wait::until("the dead keeper's cells are gone", || groups_of_keeper(keeper).is_empty());
    wait::until("programs run again", || world.get("a.test", "/count.cgi?n=5").status == 200);
    world.stop();
}

fn a_killed_edge_leaves_nothing() {
    let world = start(builder());
    write_held(&world, "alice");
    let _asked = begin_held(&world);
    let running = || world.cells().iter().filter(|cell| cell["requests"].as_u64() > Some(0)).count();
    assert!(running() > 0);
    machine::signal(world.pid_of("edge"), "KILL");
    machine::wait_until_gone(&held(&world));
    wait::until("no cell has a request any more", || running() == 0);
    wait::until("the node serves again", || {
        world.try_status().is_some_and(|status| status["healthy"] == true)
    });
    world.get("a.test", "/count.cgi?n=5").expect(200);
    world.stop();
}

fn a_named_cell_that_somebody_removed_is_made_again() {
    let world =
        start(builder().rule("one", "access_checker", "cell \"shared\", cpu: \"90%\", of: :node\n", ""));
    world.get("a.test", "/count.cgi?n=1").expect(200);
    let keeper = world.pid_of("keeper");
    let removed =
        groups_of_keeper(keeper).into_iter().flat_map(|dir| remove_beneath(&dir, "named-shared")).count();
    assert!(removed > 0, "there was no such cell: {:?}", groups_of_keeper(keeper));
    for n in 2..6 {
        world.get("a.test", &format!("/count.cgi?n={n}")).expect(200);
    }
    assert!(
        world.cells().iter().any(|cell| cell["path"].as_str().is_some_and(|path| path.contains("shared")))
    );
    world.stop();
}

/// Removes all empty directories at and beneath those whose name begins so, as an administrator might.
fn remove_beneath(dir: &Path, name: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut all = vec![dir.to_path_buf()];
    let mut next = 0;
    while let Some(dir) = all.get(next).cloned() {
        next += 1;
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                all.push(entry.path());
            }
        }
    }
    // Deepest first, as rmdir needs it.
    for dir in all.iter().rev() {
        let is_beneath = dir.components().any(|part| part.as_os_str().to_string_lossy().starts_with(name));
        if is_beneath && fs::remove_dir(dir).is_ok() {
            found.push(dir.clone());
        }
    }
    found
}

fn a_group_of_the_same_name_that_is_not_ours_is_left_alone() {
    let dir = Path::new("/sys/fs/cgroup/cpu/nagaya-e2e-theirs");
    if !Path::new("/sys/fs/cgroup/cpu/cpu.shares").exists() && !Path::new("/sys/fs/cgroup/cpu/tasks").exists()
    {
        skip("there is no v1 cpu hierarchy here");
    }
    fs::create_dir(dir).expect("root may make cgroups");
    let theirs = Guard(dir);
    fs::write(dir.join("cpu.shares"), "333").expect("root may set shares");
    let rule = "c = Cgroup::CPU.new \"nagaya-e2e-theirs\"\nc.shares = 25\nc.create\nc.attach\n";
    let world = start(builder().rule("one", "access_checker", rule, ""));
    world.get("a.test", "/count.cgi?n=1").expect(200);
    assert_eq!(fs::read_to_string(dir.join("cpu.shares")).expect("it is still there").trim(), "333");
    world.stop();
    assert!(dir.exists(), "a group of somebody else was removed");
    drop(theirs);
}

/// Removes the group, also if the test fails.
struct Guard<'a>(&'a Path);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_dir(self.0);
    }
}

fn without_writable_cgroups_the_node_serves_and_says_so() {
    // A mount namespace of its own in which nobody can write to any cgroup. Changing one mount's flags reaches no other
    // namespace, and changing the propagation of all would need a root that is a mount itself, which a chroot is not.
    let read_only = "while read -r _ where kind _; do\ncase $kind in cgroup*) mount -o bind,remount,ro \"$where\" || exit 9;; esac\n\
                     done </proc/mounts\nexec \"$@\"";
    let world = start(
        builder()
            .before(&["unshare", "--mount", "--propagation", "unchanged", "sh", "-c", read_only, "sh"])
            .rule("one", "access_checker", "limit cpu: \"50%\"\n", ""),
    );
    world.get("a.test", "/count.cgi?n=7").expect(200);
    let cells: Value = serde_json::from_str(&world.cli(&["cells", "--json"])).expect("JSON");
    assert!(cells["missing"].as_array().is_some_and(|missing| !missing.is_empty()), "{cells}");
    assert!(world.log().contains("cgroup"), "nothing is said of it:\n{}", world.log());
    world.stop();
}
