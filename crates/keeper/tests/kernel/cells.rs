//! Where requests run: born in a cell, moved to one, out of it again, and nothing left behind whoever dies.
//!
//! Not here: what limits do (`limits`), which numbers are accepted (beside `confinement`).

use std::fs;
use std::time::Instant;

use nagaya_keeper_api::client::{KeeperCallError, KeeperClient};
use nagaya_keeper_api::fastcgi::UsageReport;
use nagaya_keeper_api::protocol::{FailureKind, ProcessId};
use nagaya_records::cell::{
    CellChange, CellName, CellScope, CgroupController, Confinement, LimitSet, NamedCell,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::CellFact;
use crate::groups;
use crate::php::Php;
use crate::scene::TIMEOUT;
use crate::world::{
    Running, World, cgi, is_alive, pipe, read_line, refusal, run_and_pid, run_cgi, run_in, site_name,
    until_so, wait_dead,
};

pub const CELLS: &[CellFact] = &[
    (&["fence"], "a request is born in a cell of its own, which is another's when it has ended", own_cells),
    (&["fence"], "a worker is moved where its request's site is, and stays where it may", worker_moves),
    (&["fence"], "only a tenant's worker enters and leaves, by any connection of the edge", worker_enters),
    (&["fence"], "what a script of PHP leaves running is ended when its request has ended", left_running),
    (
        &["fence"],
        "a worker that died on its way into a cell is reported and nothing of it is left",
        dead_worker,
    ),
    (&["fence"], "an edge that dies between enter and leave leaves no worker and no request", edge_dies),
    (
        &["fence"],
        "a keeper killed between enter and leave leaves nothing its successor does not remove",
        keeper_dies,
    ),
    (&["pids"], "a fork bomb reaches its tenant's limit and no other tenant", fork_bomb),
    (&["fence"], "a program cannot leave its cell or change it", cannot_leave),
    (&["cpu"], "programs of all tenants together have one share of the processor", one_share),
    (&["cpu"], "a rule's named cell is one for each controller it is joined with", named_by_controller),
    (
        &["cpu"],
        "a named cell that is removed while a request runs in it lets the request go on",
        dropped_while_used,
    ),
    (&["cpu"], "a group of the same name that is another's is left alone", foreign_group),
    (&["cpu"], "ten thousand named cells are made, shown as far as they fit, and removed", many_named),
];

fn none() -> Confinement {
    Confinement::default()
}

/// Attaches with these controllers and limits.
pub fn in_named(name: &str, controllers: &[CgroupController], limits: Option<LimitSet>) -> Confinement {
    let name = CellName::parse(name).unwrap();
    let named = NamedCell { name, scope: CellScope::Node, controllers: controllers.to_vec(), limits };
    Confinement { named: vec![named], ..Confinement::default() }
}

fn own_cells() {
    let world = World::new().with_cgi("echo $$; read wait").start();
    world.run(async |keeper| {
        let (first, one) = run_and_pid(&keeper, "cgi", &none()).await;
        let (second, two) = run_and_pid(&keeper, "cgi", &none()).await;
        assert_ne!(one.cell, two.cell);
        for (pid, cell) in [(first, &one.cell), (second, &two.cell)] {
            assert!(cell.starts_with("alice/cgi/r"), "{cell}");
            expect_in(pid, cell);
        }
        assert_eq!(world.cell("alice/cgi").unwrap()["requests"], 2, "{}", world.cells());
        drop(one.stdin);
        one.guard.ended().await.unwrap();
        let (_, three) = run_and_pid(&keeper, "cgi", &none()).await;
        assert_eq!(three.cell, one.cell, "a cell that was left by all is used again");
    });
}

/// Every request is kept together, weighed and counted in directories of its own, with its cell's number.
#[track_caller]
fn expect_in(pid: i32, cell: &str) {
    let [tenant, site, number] = cell.split('/').collect::<Vec<_>>()[..] else { panic!("{cell}") };
    let dir = format!("tenant-{tenant}/site-{site}/{number}");
    for controller in
        ["fence", "cpu", "cpuacct"].into_iter().filter(|name| groups::available()[*name].is_ok())
    {
        let group = groups::of(pid, controller);
        assert!(group.ends_with(&dir), "{controller}: {} for {cell}", group.display());
    }
}

/// A world with two PHP sites of alice's, and a script that runs what it is asked to.
fn with_php() -> World {
    let mut world = World::new();
    for site in ["a", "b"] {
        world.site(site, "alice", json!({"kind": "php", "root": "www"}));
    }
    world
}

/// As much as the processes of the node itself, edge and keeper among them.
fn one_share() {
    let world = World::new().with_cgi("echo $$; read wait").start();
    world.run(async |keeper| {
        let (pid, _running) = run_and_pid(&keeper, "cgi", &none()).await;
        let group = groups::of(pid, "cpu");
        let of_tenants = group.ancestors().find(|dir| dir.ends_with("nagaya")).expect("all are below it");
        // What a fresh group has, as the node's own group on v2 (`main`), and as one process in the root group.
        let expected = if groups::is_v2("cpu") { 100 } else { 1024 };
        assert_eq!(groups::cpu_shares(of_tenants), expected, "{}", of_tenants.display());
    });
}

fn worker_moves() {
    let world = with_php();
    let script = world.script("x.php", "<?php echo getmypid();");
    let world = world.start();
    world.run(async |keeper| {
        let mut php = Php::start_for(&keeper, "a").await;
        assert!(php.cell.starts_with("alice/r"), "{}", php.cell);
        let pid: i32 = php.ask(&script, "").await.parse().unwrap();
        let id = php.guard.id();
        let mut cells = Vec::new();
        for site in ["a", "a", "b", "a"] {
            let cell = keeper.enter(id, &site_name(site), &none()).await.unwrap();
            assert!(cell.starts_with(&format!("alice/{site}/r")), "{cell}");
            expect_in(pid, &cell);
            php.ask(&script, "").await;
            php.leave(&keeper).await;
            cells.push(cell);
        }
        assert_eq!(cells[0], cells[1]);
        assert_eq!(world.metric("nagaya_keeper_cell_enters_total"), 4);
        assert_eq!(world.metric("nagaya_keeper_cell_moves_total"), 3);
    });
}

fn worker_enters() {
    let mut world = with_php().with_cgi("echo $$; read wait");
    world.site("bobs", "bob", json!({"kind": "php", "root": "www"}));
    let world = world.start();
    world.run(async |keeper| {
        let php = Php::start_for(&keeper, "a").await;
        let id = php.guard.id();
        let (_, program) = run_and_pid(&keeper, "cgi", &none()).await;
        let enter = async |id, site| refusal(keeper.enter(id, &site_name(site), &none()).await);
        assert_eq!(enter(id, "bobs").await, (FailureKind::Forbidden, 301));
        assert_eq!(enter(id, "nowhere").await, (FailureKind::NotFound, 301));
        assert_eq!(enter(id, "cgi").await, (FailureKind::Invalid, 302));
        assert_eq!(enter(program.guard.id(), "a").await, (FailureKind::Invalid, 302));
        assert_eq!(enter(ProcessId(999), "a").await, (FailureKind::NotFound, 301));
        assert_eq!(refusal(keeper.leave(program.guard.id()).await), (FailureKind::Invalid, 302));
        assert_eq!(refusal(keeper.leave(ProcessId(999)).await), (FailureKind::NotFound, 301));
        assert_eq!(refusal(keeper.measure(ProcessId(999)).await), (FailureKind::NotFound, 301));
        let beyond =
            Confinement { limits: LimitSet { cpu_shares: Some(1), ..LimitSet::default() }, ..none() };
        assert_eq!(refusal(keeper.enter(id, &site_name("a"), &beyond).await), (FailureKind::Invalid, 318));
        let spawned = keeper.spawn_cgi(&site_name("cgi"), "x.cgi", Vec::new(), &beyond).await;
        assert_eq!(refusal(spawned), (FailureKind::Invalid, 318));
        // A worker is shared by the threads of an edge.
        let other = KeeperClient::connect(&world.socket()).await.unwrap();
        other.enter(id, &site_name("a"), &none()).await.unwrap();
        other.measure(program.guard.id()).await.unwrap();
        other.leave(id).await.unwrap();
        drop(other);
        keeper.measure(id).await.unwrap();
    });
}

fn left_running() {
    let world = with_php();
    let script = world.script(
        "x.php",
        "<?php echo getmypid(), ' ', trim(shell_exec('setsid sh -c \"trap : TERM; sleep 1000 & wait\" >/dev/null 2>&1 & echo $!'));",
    );
    let world = world.start();
    world.run(async |keeper| {
        let mut php = Php::start_for(&keeper, "a").await;
        let id = php.guard.id();
        let mut workers = Vec::new();
        for _ in 0..2 {
            keeper.enter(id, &site_name("a"), &none()).await.unwrap();
            let said = php.ask(&script, "").await;
            let (worker, child) = said.split_once(' ').unwrap();
            let child: i32 = child.parse().unwrap();
            assert!(is_alive(child));
            assert_eq!(php.report, UsageReport::Ask, "it left something behind");
            keeper.leave(id).await.unwrap();
            // Killed, and on v1 perhaps a moment from gone; else it would sleep on.
            wait_dead(child);
            workers.push(worker.to_owned());
        }
        assert_eq!(workers[0], workers[1], "the worker itself goes on");
        // Also without another enter: the cell is the same.
        let said = php.ask(&script, "").await;
        let child = said.split_once(' ').unwrap().1.parse().unwrap();
        assert_eq!(php.report, UsageReport::Ask);
        keeper.leave(id).await.unwrap();
        wait_dead(child);
        php.guard.end().await.unwrap();
    });
    wait_until_free(&world);
}

/// Waits until nothing is in any cell. A PHP worker's parent ends just after it.
fn wait_until_free(world: &World) {
    let until = Instant::now() + TIMEOUT;
    while requests(world) > 0 {
        assert!(Instant::now() < until, "{}", world.cells());
    }
}

/// How many requests the tree shows.
fn requests(world: &World) -> u64 {
    let shown = world.cells();
    let of = |cell: &Value| cell["requests"].as_u64().unwrap();
    shown["cells"].as_array().unwrap().iter().filter(|cell| cell["kind"] == "tenant").map(of).sum()
}

fn dead_worker() {
    let world = with_php();
    let script = world.script("x.php", "<?php echo getmypid();");
    let world = world.start();
    world.run(async |keeper| {
        for _ in 0..20 {
            let mut php = Php::start_for(&keeper, "a").await;
            let pid: i32 = php.ask(&script, "").await.parse().unwrap();
            kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
            // The keeper learns of the death while it moves the worker, or before, or after.
            match keeper.enter(php.guard.id(), &site_name("a"), &none()).await {
                Ok(_) | Err(KeeperCallError::Refused { .. }) => {}
                Err(other) => panic!("{other:?}"),
            }
            php.guard.ended().await.unwrap();
        }
    });
    wait_until_free(&world);
}

fn edge_dies() {
    let world = with_php();
    let script = world.script("x.php", "<?php echo getmypid();");
    let world = world.start();
    let pid = world.run(async |keeper| {
        let mut php = Php::start_for(&keeper, "a").await;
        let pid: i32 = php.ask(&script, "").await.parse().unwrap();
        keeper.enter(php.guard.id(), &site_name("a"), &none()).await.unwrap();
        // The connection closes with the runtime: nobody sends an end.
        std::mem::forget(php.guard);
        pid
    });
    wait_dead(pid);
    let emptied = world.run(async |keeper| {
        until_so(|| requests(&world) == 0).await;
        Php::start_for(&keeper, "a").await.guard.end().await
    });
    assert!(emptied.is_ok());
}

fn keeper_dies() {
    let world = with_php();
    let script = world.script("x.php", "<?php echo getmypid();");
    let world = world.start();
    world.run(async |keeper| {
        let mut php = Php::start_for(&keeper, "a").await;
        let pid: i32 = php.ask(&script, "").await.parse().unwrap();
        let named = in_named("shared", &CgroupController::ALL, Some(LimitSet::default()));
        keeper.enter(php.guard.id(), &site_name("a"), &named).await.unwrap();
        let before = groups::of_keeper(world.keeper_pid());
        assert!(!before.is_empty());
        world.kill();
        world.restart();
        wait_dead(pid);
        // By whichever keeper of this machine started first: another test's does it, too.
        for dir in before {
            assert!(!dir.exists(), "{}", dir.display());
        }
        assert_eq!(php.guard.ended().await, Err(KeeperCallError::Gone));
        let php = Php::start_for(&keeper, "a").await;
        keeper.enter(php.guard.id(), &site_name("a"), &none()).await.unwrap();
    });
    let last = groups::of_keeper(world.keeper_pid());
    assert!(world.drain(), "{}", world.log());
    assert!(last.iter().all(|dir| !dir.exists()), "{last:?}");
}

fn fork_bomb() {
    // Each shell starts two more and waits for them; the first one waits for its end.
    let script = r"echo $$; f() { f | f; }; exec 2>/dev/null; f & read wait";
    let mut world = World::new().with(|options| options.processes_per_tenant = 40).with_cgi(script);
    world.script_of("bob", "x.cgi", "#!/bin/sh\necho $$; exec sleep 1000\n");
    world.site("bobs", "bob", cgi());
    let world = world.start();
    world.run(async |keeper| {
        let (bomb, running) = run_and_pid(&keeper, "cgi", &none()).await;
        let tenant = groups::above(bomb, "pids", "tenant-alice").unwrap();
        assert_eq!(groups::processes(&tenant), Some(40));
        // How often a fork was refused: older kernels and v1 count it where the process is, others where the limit is.
        let counted = [tenant.clone(), groups::of(bomb, "pids")];
        let is_refused = |group| groups::read(group, "pids", "pids.events", "pids.events") != "max 0";
        until_so(|| counted.iter().any(|group| is_refused(group))).await;
        let count: u64 = groups::read(&tenant, "pids", "pids.current", "pids.current").parse().unwrap();
        assert!(count <= 40, "{count}");
        let (pid, bobs) = run_and_pid(&keeper, "bobs", &none()).await;
        assert!(is_alive(pid));
        bobs.guard.end().await.unwrap();
        running.guard.end().await.unwrap();
        // Nothing of it is left, once the machine's first process has reaped what lost its parent.
        until_so(|| groups::read(&tenant, "pids", "pids.current", "pids.current") == "0").await;
    });
}

fn cannot_leave() {
    let script = r#"
before=$(cat /proc/self/cgroup)
for dir in /sys/fs/cgroup /sys/fs/cgroup/*; do
    for file in $(find $dir -maxdepth 6 \( -name cgroup.procs -o -name tasks -o -name cgroup.threads -o -name 'cpu.*' -o -name 'pids.max' \) 2>/dev/null); do
        (echo $$ > $file) 2>/dev/null && echo "wrote $file"
    done
    mkdir $dir/nagaya-escape 2>/dev/null && echo "made $dir/nagaya-escape"
done
grep -q / /proc/self/cgroup && [ "$before" = "$(cat /proc/self/cgroup)" ] && echo same
"#;
    let world = World::new().with_cgi(script).start();
    world.run(async |keeper| {
        let process = run_cgi(&keeper).await;
        assert_eq!(crate::world::read_all(process.stdout).await, "same\n");
        process.guard.ended().await.unwrap();
    });
}

fn named_by_controller() {
    let world = World::new().with_cgi("echo $$; read wait").start();
    world.run(async |keeper| {
        let shares = LimitSet { cpu_shares: Some(77), ..LimitSet::default() };
        let confinement = in_named("slow", &[CgroupController::Cpu], Some(shares));
        let (pid, running) = run_and_pid(&keeper, "cgi", &confinement).await;
        let named = groups::above(pid, "cpu", "named-slow").unwrap_or_else(|| panic!("{}", running.cell));
        assert_eq!(groups::cpu_shares(&named), 77);
        if groups::available()["pids"].is_ok() && !groups::is_v2("pids") {
            // By the other controllers it is where it would be otherwise.
            assert_eq!(groups::above(pid, "pids", "named-slow"), None);
            assert!(groups::above(pid, "pids", "tenant-alice").is_some());
        }
        let shown = world.cell("named/slow").unwrap_or_else(|| panic!("{}", world.cells()));
        assert_eq!((&shown["kind"], &shown["limits"]["cpu_shares"]), (&json!("named"), &json!(77)));
        // Joined as it is by a request that brings no limits, and not made where it is not there.
        let (other, _running) =
            run_and_pid(&keeper, "cgi", &in_named("slow", &[CgroupController::Cpu], None)).await;
        assert!(groups::of(other, "cpu").starts_with(&named));
        let (third, _running) =
            run_and_pid(&keeper, "cgi", &in_named("none", &[CgroupController::Cpu], None)).await;
        assert!(groups::above(third, "cpu", "site-cgi").is_some());
        assert_eq!(world.cell("named/none"), None);
        let listed: Value = serde_json::from_str(&keeper.cells().await.unwrap()).unwrap();
        assert_eq!(listed["cells"].as_array().unwrap().len(), 1, "{listed}");
    });
}

fn dropped_while_used() {
    let world = World::new().with_cgi("echo $$; read wait; echo done").start();
    world.run(async |keeper| {
        let confinement = in_named("brief", &[CgroupController::Cpu], Some(LimitSet::default()));
        let (pid, running) = run_and_pid(&keeper, "cgi", &confinement).await;
        let name = CellName::parse("brief").unwrap();
        let drop_it = CellChange::Drop { name, controllers: vec![CgroupController::Cpu] };
        keeper.change_cells(vec![drop_it.clone()]).await.unwrap();
        assert_eq!(world.cell("named/brief"), None, "nobody else joins it");
        let group = groups::of(pid, "cpu");
        let Running { stdin, mut out, guard, .. } = running;
        drop(stdin);
        assert_eq!(read_line(&mut out).await, "done");
        let (exit, _) = guard.ended().await.unwrap();
        assert_eq!(exit.status, Some(0));
        // Twice is as good as once, and a new one of this name is a new one.
        keeper.change_cells(vec![drop_it]).await.unwrap();
        let process = run_in(&keeper, "cgi", &confinement).await;
        assert!(world.cell("named/brief").is_some(), "{}", group.display());
        drop(process.stdin);
        read_line(&mut pipe(process.stdout)).await;
    });
}

fn foreign_group() {
    // As another tool would make it: at the top of the hierarchy.
    let name = format!("nagaya-test-{}", std::process::id());
    let foreign = groups::mount("cpu").join(&name);
    fs::create_dir(&foreign).unwrap();
    let before = groups::peek(&foreign, "cpu", "cpu.shares", "cpu.weight");
    let world = World::new().with_cgi("echo $$; read wait").start();
    world.run(async |keeper| {
        let shares = LimitSet { cpu_shares: Some(9), ..LimitSet::default() };
        let (pid, running) =
            run_and_pid(&keeper, "cgi", &in_named(&name, &[CgroupController::Cpu], Some(shares))).await;
        assert!(!groups::of(pid, "cpu").starts_with(&foreign));
        running.guard.end().await.unwrap();
        let name = CellName::parse(&name).unwrap();
        keeper
            .change_cells(vec![CellChange::Drop { name, controllers: vec![CgroupController::Cpu] }])
            .await
            .unwrap();
    });
    assert_eq!(groups::peek(&foreign, "cpu", "cpu.shares", "cpu.weight"), before);
    fs::remove_dir(&foreign).unwrap();
}

fn many_named() {
    const COUNT: usize = 10_000;
    let world = World::new().with_cgi("echo $$; read wait").start();
    let name = |n: usize| CellName::parse(&format!("cell-{n}")).unwrap();
    let controllers = vec![CgroupController::Cpu];
    world.run(async |keeper| {
        for from in (0..COUNT).step_by(200) {
            let set = |n| CellChange::Set {
                name: name(n),
                controllers: controllers.clone(),
                limits: LimitSet { cpu_shares: Some(100), ..LimitSet::default() },
            };
            keeper.change_cells((from..from + 200).map(set).collect()).await.unwrap();
        }
        let shown = world.cells();
        let listed = shown["cells"].as_array().unwrap().len();
        let left_out = usize::try_from(shown["left_out"].as_u64().unwrap()).unwrap();
        assert!(listed <= 2000 && listed + left_out >= COUNT, "{listed} {left_out}");
        assert!(keeper.cells().await.unwrap().len() < 128 * 1024);
        let (pid, running) =
            run_and_pid(&keeper, "cgi", &in_named("cell-9999", &[CgroupController::Cpu], None)).await;
        assert!(groups::above(pid, "cpu", "named-cell-9999").is_some());
        running.guard.end().await.unwrap();
        for from in (0..COUNT).step_by(200) {
            let drop = |n| CellChange::Drop { name: name(n), controllers: controllers.clone() };
            keeper.change_cells((from..from + 200).map(drop).collect()).await.unwrap();
        }
        let listed: Value = serde_json::from_str(&keeper.cells().await.unwrap()).unwrap();
        assert_eq!(listed["cells"], json!([]));
    });
    let last = groups::of_keeper(world.keeper_pid());
    assert!(world.drain(), "{}", world.log());
    assert!(last.iter().all(|dir| !dir.exists()), "{last:?}");
}
