//! What limits do to real programs, by the kernel's own numbers, and what requests are told they used.
//!
//! Nothing here depends on how long anything takes: a machine that is busy with something else makes these tests
//! slower and not wrong. Not here: where requests run (`cells`).

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use nagaya_keeper_api::client::KeeperClient;
use nagaya_keeper_api::protocol::{FailureKind, ProcessId};
use nagaya_records::RecordChange;
use nagaya_records::cell::{
    CgroupController, Confinement, CpuQuota, Demotion, Device, IoLimit, LimitSet, RequestUsage,
};
use serde_json::{Value, json};

use crate::CellFact;
use crate::cells::in_named;
use crate::groups;
use crate::php::Php;
use crate::world::{
    World, cgi, read_all, refusal, run_and_pid, run_in, site_change, site_name, tenant_name, until_so,
};

pub const CELLS: &[CellFact] = &[
    (
        &["cpu", "cpuacct"],
        "a quota stops a busy program for a while, and its request learns of it",
        quota_bites,
    ),
    (&["cpu", "cpuacct"], "shares of two named cells divide a core that both want", shares_divide),
    (
        &["cpu", "cpuacct"],
        "a tenant that gives way lets another have the processor, and nobody asks it to for long",
        gives_way,
    ),
    (&["pids"], "a request cannot have more processes than its limit", processes_end),
    (&["blkio"], "limits of disks are held by the kernel, and what is no disk is reported", disks_limited),
    (&["memory"], "who takes more memory than its tenant has is ended, and no other tenant", memory_ends),
    (
        &["cpu", "pids", "memory"],
        "limits of tenants and sites follow their records while work runs",
        records_change,
    ),
    (&["cpu"], "a running request gets the limits that its site's record says now", requests_follow),
    (&["cpu", "cpuacct"], "a request that used much is slowed down, and its sibling is not", demotion),
    (
        &["cpu", "cpuacct"],
        "a worker that was slowed down serves its next request at full speed",
        demotion_ends,
    ),
    (
        &["cpuacct"],
        "each request is told what it used, with all it started and without its siblings",
        usage_is_own,
    ),
    (&["blkio"], "bytes from and to a disk are told", bytes_told),
];

/// Uses this much CPU time, by the program's own count, and ends.
fn burn(milliseconds: u32) -> String {
    format!(
        "perl -e 'my $n; do {{ $n++ for 1..10000; my @t = times; $u = $t[0] + $t[1] }} while $u < {milliseconds} / 1000'"
    )
}

fn own(limits: LimitSet) -> Confinement {
    Confinement { limits, ..Confinement::default() }
}

fn cpu(thousandths: u32) -> LimitSet {
    LimitSet { cpu: Some(CpuQuota::of_core(thousandths)), ..LimitSet::default() }
}

fn quota_of(thousandths: u32) -> Option<(u64, u64)> {
    let CpuQuota { quota_us, period_us } = CpuQuota::of_core(thousandths);
    Some((quota_us, period_us.into()))
}

fn gives_way() {
    const LOOP: &str = "echo $$; exec taskset -c 0 sh -c 'while :; do :; done'";
    let mut world = World::new().with_cgi(LOOP);
    world.site("bobs", "bob", cgi());
    world.script_of("bob", "x.cgi", &format!("#!/bin/sh\n{LOOP}\n"));
    let world = world.start();
    world.run(async |keeper| {
        let (alice, bob) = (tenant_name("alice"), tenant_name("bob"));
        let (pid, flood) = run_and_pid(&keeper, "cgi", &Confinement::default()).await;
        let (other, victim) = run_and_pid(&keeper, "bobs", &Confinement::default()).await;
        let group = |pid, tenant| groups::above(pid, "cpu", tenant).unwrap();
        let shares = || {
            (groups::cpu_shares(&group(pid, "tenant-alice")), groups::cpu_shares(&group(other, "tenant-bob")))
        };
        assert_eq!(shares(), (1024, 1024));
        keeper.give_way(vec![alice.clone()], Vec::new()).await.unwrap();
        assert_eq!(shares(), (64, 1024));
        assert_eq!(world.cell("alice").unwrap()["limits"]["cpu_shares"], 64);
        assert_eq!(world.metric("nagaya_keeper_tenants_giving_way"), 1);
        let (flood, victim) = (flood.guard.id(), victim.guard.id());
        let before = (measure(&keeper, flood).await, measure(&keeper, victim).await);
        // One of both is asked for again and again: it is not ended while that is so.
        let renewed = async {
            let mut interval = tokio::time::interval(Duration::from_millis(300));
            loop {
                interval.tick().await;
                keeper.give_way(vec![alice.clone()], Vec::new()).await.unwrap();
            }
        };
        tokio::select! {
            () = renewed => {}
            () = until(&keeper, victim, |usage| usage.cpu_us > before.1 + 600_000) => {}
        }
        let used = (measure(&keeper, flood).await - before.0, measure(&keeper, victim).await - before.1);
        assert!(used.0 * 5 < used.1, "a sixteenth against one: {used:?}");
        // Another one asked for and taken back at once; the first is over by itself.
        let three = vec![alice.clone(), bob.clone(), tenant_name("nobody")];
        keeper.give_way(three, Vec::new()).await.unwrap();
        assert_eq!(shares(), (64, 64));
        keeper.give_way(Vec::new(), vec![bob]).await.unwrap();
        assert_eq!(shares(), (64, 1024));
        until_so(|| shares() == (1024, 1024)).await;
        assert_eq!(world.metric("nagaya_keeper_tenants_giving_way"), 0);
        let many = vec![alice; nagaya_keeper_api::limits::TENANTS_MAX + 1];
        assert_eq!(refusal(keeper.give_way(many, Vec::new()).await), (FailureKind::Invalid, 318));
    });
}

/// Asks what a process used until it is enough.
async fn until(keeper: &KeeperClient, id: ProcessId, mut enough: impl FnMut(RequestUsage) -> bool) {
    let mut interval = tokio::time::interval(Duration::from_millis(5));
    loop {
        interval.tick().await;
        if enough(keeper.measure(id).await.unwrap()) {
            return;
        }
    }
}

fn quota_bites() {
    let world = World::new().with_cgi(&burn(150)).start();
    world.run(async |keeper| {
        let mut used = Vec::new();
        for confinement in [Confinement::default(), own(cpu(100))] {
            let process = run_in(&keeper, "cgi", &confinement).await;
            used.push(process.guard.ended().await.unwrap().1);
        }
        let [free, limited] = used[..] else { panic!() };
        assert!((150_000..1_500_000).contains(&free.cpu_us), "{free:?}");
        assert!((150_000..1_500_000).contains(&limited.cpu_us), "{limited:?}");
        assert_eq!(free.throttled_us, 0, "{free:?}");
        // A tenth of a core for 150 ms of work: it stands still for most of 1.5 s, unless others take the core anyway.
        assert!(limited.throttled_us > 10_000, "{limited:?}");
    });
}

fn shares_divide() {
    let world = World::new().with_cgi("echo $$; exec taskset -c 0 sh -c 'while :; do :; done'").start();
    world.run(async |keeper| {
        let shares = |cpu_shares| Some(LimitSet { cpu_shares: Some(cpu_shares), ..LimitSet::default() });
        let small = in_named("small", &[CgroupController::Cpu], shares(25));
        let large = in_named("large", &[CgroupController::Cpu], shares(75));
        let (pid, small) = run_and_pid(&keeper, "cgi", &small).await;
        let (_, large) = run_and_pid(&keeper, "cgi", &large).await;
        assert_eq!(groups::cpu_shares(&groups::above(pid, "cpu", "named-small").unwrap()), 25);
        let (small, large) = (small.guard.id(), large.guard.id());
        // Both run by now; what one had before the other began does not count.
        let (before_small, before_large) = (measure(&keeper, small).await, measure(&keeper, large).await);
        until(&keeper, large, |usage| usage.cpu_us > before_large + 600_000).await;
        let small = measure(&keeper, small).await - before_small;
        let large = measure(&keeper, large).await - before_large;
        #[expect(clippy::cast_precision_loss, reason = "microseconds of less than a minute")]
        let ratio = large as f64 / small as f64;
        assert!((2.2..4.2).contains(&ratio), "{large} / {small} = {ratio}");
    });
}

async fn measure(keeper: &KeeperClient, id: ProcessId) -> u64 {
    keeper.measure(id).await.unwrap().cpu_us
}

fn processes_end() {
    // `sh` gives up at the first fork that fails; perl counts.
    let script = r"exec perl -e '$| = 1; my $n = 0; for (1..30) { my $pid = fork; last unless defined $pid; if (!$pid) { sleep 1000; exit } $n++ } print $n'";
    let world = World::new().with_cgi(script).start();
    world.run(async |keeper| {
        let limited = LimitSet { processes: Some(10), ..LimitSet::default() };
        let process = run_in(&keeper, "cgi", &own(limited)).await;
        let mut out = crate::world::pipe(process.stdout);
        let mut said = [0; 8];
        let len = tokio::io::AsyncReadExt::read(&mut out, &mut said).await.unwrap();
        assert_eq!(&said[..len], b"9", "itself and nine more");
        process.guard.end().await.unwrap();
    });
}

/// The disk of a directory, by the number `lsblk` shows. None: it is on none.
pub fn disk_of(path: &Path) -> Option<String> {
    let device = rustix::fs::stat(path).unwrap().st_dev;
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let dir = std::fs::canonicalize(format!("/sys/dev/block/{number}")).ok()?;
    if !dir.join("partition").exists() {
        return Some(number);
    }
    Some(std::fs::read_to_string(dir.parent()?.join("dev")).unwrap().trim().to_owned())
}

/// Any disk of this machine.
pub fn some_disk() -> Option<String> {
    let disks = std::fs::read_dir("/sys/block").ok()?;
    disks
        .flatten()
        .find_map(|disk| Some(std::fs::read_to_string(disk.path().join("dev")).ok()?.trim().to_owned()))
}

fn disks_limited() {
    let world = World::new().with_cgi("echo $$; read wait").start();
    world.run(async |keeper| {
        let limit = |device, bps| {
            let io = vec![IoLimit { read_bps: Some(bps), ..IoLimit::of(device) }];
            own(LimitSet { io, ..LimitSet::default() })
        };
        if let Some(disk) = some_disk() {
            let (pid, _running) = run_and_pid(&keeper, "cgi", &limit(disk.parse().unwrap(), 5_000_000)).await;
            assert_eq!(groups::read_bps(&groups::of(pid, "blkio"), &disk), Some(5_000_000), "{disk}");
        }
        let (pid, _running) = run_and_pid(&keeper, "cgi", &limit(Device::Root, 7_000_000)).await;
        match disk_of(world.dir.path()) {
            Some(disk) => {
                assert_eq!(groups::read_bps(&groups::of(pid, "blkio"), &disk), Some(7_000_000), "{disk}");
            }
            None => assert!(world.log().contains("NGY0344"), "{}", world.log()),
        }
        // A limit of a disk that is not there stops nothing.
        let nowhere = Device::Number { major: 4000, minor: 77 };
        let (_, _running) = run_and_pid(&keeper, "cgi", &limit(nowhere, 1)).await;
        assert!(world.log().contains("4000:77"), "it is reported: {}", world.log());
    });
}

fn memory_ends() {
    let hog = "#!/bin/sh\nexec perl -e '$| = 1; my $x = \"x\" x (256 << 20); print length $x'\n";
    let mut world = World::new().with_cgi("echo $$; read wait; exec perl hog.pl");
    world.script_of("bob", "x.cgi", hog);
    world.script("hog.cgi", hog);
    world.site("bobs", "bob", cgi());
    let world = world.start();
    world.apply(vec![world.tenant_with("alice", json!({"limits": {"memory": "64M"}}))]);
    world.run(async |keeper| {
        let none = Confinement::default();
        let process = keeper.spawn_cgi(&site_name("cgi"), "hog.cgi", Vec::new(), &none).await.unwrap();
        assert_eq!(read_all(process.stdout).await, "");
        assert_eq!(process.guard.ended().await.unwrap().0.signal, Some(9));
        let process = run_in(&keeper, "bobs", &none).await;
        assert_eq!(read_all(process.stdout).await, (256 << 20).to_string());
        // Alice's other programs run on.
        let (pid, running) = run_and_pid(&keeper, "cgi", &none).await;
        assert_eq!(groups::memory(&groups::above(pid, "memory", "tenant-alice").unwrap()), Some(64 << 20));
        running.guard.end().await.unwrap();
    });
}

fn records_change() {
    let world = World::new().with_cgi("echo $$; read wait; echo done").start();
    world.run(async |keeper| {
        let (pid, running) = run_and_pid(&keeper, "cgi", &Confinement::default()).await;
        let of = |controller: &str, name: &str| groups::above(pid, controller, name).unwrap();
        let limits = |cpu: &str, processes: u64, memory: u64| {
            json!({"limits": {"cpu": cpu, "cpu_shares": 300 + processes, "processes": processes, "memory": memory}})
        };
        for (thousandths, processes, memory) in [(500, 100, 1 << 30), (250, 50, 1 << 29), (900, 200, 1 << 31)] {
            let more = limits(&format!("{}%", thousandths / 10), processes, memory);
            let site = |more: Value| site_change("cgi", "alice", cgi(), more);
            let smaller = limits(&format!("{}%", thousandths / 20), processes - 1, memory / 2);
            world.apply(vec![world.tenant_with("alice", more), site(smaller)]);
            for (end, thousandths, processes, memory) in [
                ("tenant-alice", thousandths, processes, memory),
                ("site-cgi", thousandths / 20 * 10, processes - 1, memory / 2),
            ] {
                assert_eq!(groups::cpu_quota(&of("cpu", end)), quota_of(thousandths), "{end}");
                assert_eq!(groups::cpu_shares(&of("cpu", end)), 300 + processes, "{end}");
                assert_eq!(groups::processes(&of("pids", end)), Some(processes), "{end}");
                assert_eq!(groups::memory(&of("memory", end)), Some(memory), "{end}");
            }
        }
        // What a record says no longer holds no longer; a tenant's number of processes is always bounded.
        world.apply(vec![world.tenant_with("alice", json!({})), site_change("cgi", "alice", cgi(), json!({}))]);
        for end in ["tenant-alice", "site-cgi"] {
            assert_eq!(groups::cpu_quota(&of("cpu", end)), None, "{end}");
            assert_eq!(groups::memory(&of("memory", end)), None, "{end}");
        }
        assert_eq!(groups::processes(&of("pids", "tenant-alice")), Some(1024));
        assert_eq!(groups::processes(&of("pids", "site-cgi")), None);
        drop(running.stdin);
        let mut out = running.out;
        assert_eq!(crate::world::read_line(&mut out).await, "done", "it ran through all of it");
    });
}

/// A site of alice's with these limits for each request.
fn with_requests(kind: &str, more: Value) -> RecordChange {
    site_change("cgi", "alice", json!({"kind": kind, "root": "www"}), more)
}

fn requests_follow() {
    let world = World::new().with_cgi("echo $$; read wait").start();
    world.apply(vec![with_requests("cgi", json!({"request_limits": {"cpu": "50%", "cpu_shares": 30}}))]);
    world.run(async |keeper| {
        let asked = own(LimitSet { cpu_shares: Some(99), ..LimitSet::default() });
        let (pid, _running) = run_and_pid(&keeper, "cgi", &asked).await;
        let group = groups::of(pid, "cpu");
        assert_eq!(groups::cpu_quota(&group), quota_of(500));
        assert_eq!(groups::cpu_shares(&group), 99, "what was asked for it is laid over its site's");
        world.apply(vec![with_requests("cgi", json!({"request_limits": {"cpu": "20%", "cpu_shares": 30}}))]);
        until_so(|| groups::cpu_quota(&group) == quota_of(200)).await;
        assert_eq!(groups::cpu_shares(&group), 99);
        world.apply(vec![with_requests("cgi", json!({}))]);
        until_so(|| groups::cpu_quota(&group).is_none()).await;
    });
}

fn demotion() {
    let script = format!("echo $$; read how; if [ \"$how\" = burn ]; then {}; fi; read wait", burn(1200));
    let world = World::new().with_cgi(&script).start();
    world.run(async |keeper| {
        let step = |ms: u64, thousandths| Demotion { after_cpu_us: ms * 1000, limits: cpu(thousandths) };
        let confinement = Confinement { demotions: vec![step(500, 800), step(800, 600)], ..own(cpu(2000)) };
        let (quick_pid, quick) = run_and_pid(&keeper, "cgi", &confinement).await;
        let (slow_pid, slow) = run_and_pid(&keeper, "cgi", &confinement).await;
        rustix::io::write(&slow.stdin, b"burn\n").unwrap();
        until(&keeper, slow.guard.id(), |usage| usage.demoted == 2).await;
        assert_eq!(groups::cpu_quota(&groups::of(slow_pid, "cpu")), quota_of(600));
        assert_eq!(groups::cpu_quota(&groups::of(quick_pid, "cpu")), quota_of(2000));
        drop((slow.stdin, quick.stdin));
        let (_, slow) = slow.guard.ended().await.unwrap();
        let (_, quick) = quick.guard.ended().await.unwrap();
        assert_eq!((slow.demoted, quick.demoted, quick.throttled_us), (2, 0, 0), "{slow:?} {quick:?}");
        assert!(slow.cpu_us > 1_200_000, "it was slowed down and went on: {slow:?}");
        assert_eq!(world.metric("nagaya_keeper_demotions_total"), 2);
    });
}

/// A PHP script that uses as many milliseconds of CPU time as it is asked for, and says its pid and the microseconds
/// that its process used in all its life.
fn php_burner(world: &World) -> PathBuf {
    let script = "<?php $us = 1000 * (int) $_GET['ms'];
        $used = function () { $r = getrusage(); return ($r['ru_utime.tv_sec'] + $r['ru_stime.tv_sec']) * 1000000 + $r['ru_utime.tv_usec'] + $r['ru_stime.tv_usec']; };
        $end = $used() + $us; while ($used() < $end) { for ($i = 0; $i < 1000; $i++); } echo getmypid(), ' ', $used();";
    world.script("burn.php", script)
}

/// Its pid, and the microseconds its process has used so far.
async fn burn_php(php: &mut Php, script: &Path, ms: u64) -> (i32, u64) {
    let said = php.ask(script, &format!("ms={ms}")).await;
    let (pid, used) = said.split_once(' ').unwrap();
    (pid.parse().unwrap(), used.parse().unwrap())
}

fn demotion_ends() {
    let world = World::new();
    let script = php_burner(&world);
    let world = world.start();
    let steps = json!([{"after_cpu": "500ms", "limits": {"cpu": "40%"}}]);
    world.apply(vec![with_requests("php", json!({"request_limits": {"cpu": "100%"}, "demotions": steps}))]);
    world.run(async |keeper: Rc<KeeperClient>| {
        let mut php = Php::start_for(&keeper, "cgi").await;
        let id = php.guard.id();
        for (ms, demoted) in [(900, 1), (0, 0), (900, 1)] {
            keeper.enter(id, &site_name("cgi"), &Confinement::default()).await.unwrap();
            let (pid, _) = burn_php(&mut php, &script, ms).await;
            let used = keeper.leave(id).await.unwrap();
            assert_eq!(used.demoted, demoted, "{used:?}");
            assert!(used.cpu_us >= ms * 1000, "{used:?}");
            let group = groups::of(pid, "cpu");
            assert_eq!(groups::cpu_quota(&group), quota_of(1000), "the next one begins at full speed");
        }
    });
}

fn usage_is_own() {
    // A child that it waits for, itself, and one that it does not wait for, whose end it learns by a closed pipe.
    let script = format!("{0} & {0}; ( setsid {0} & ) | cat; wait", burn(40));
    let mut world = World::new().with_cgi(&script);
    let php = php_burner(&world);
    world.site("php", "alice", json!({"kind": "php", "root": "www"}));
    let world = world.start();
    world.run(async |keeper| {
        let mut worker = Php::start_for(&keeper, "php").await;
        let id = worker.guard.id();
        keeper.enter(id, &site_name("php"), &Confinement::default()).await.unwrap();
        let (_, mut before) = burn_php(&mut worker, &php, 0).await;
        worker.leave(&keeper).await;
        for ms in [80, 0, 80] {
            let beside = run_in(&keeper, "cgi", &Confinement::default()).await;
            let (_, after) = burn_php(&mut worker, &php, ms).await;
            let used = worker.leave(&keeper).await;
            // What its process counts itself; what comes after the script's last line counts for one or the next.
            let counted = after - std::mem::replace(&mut before, after);
            assert!(used.cpu_us >= ms * 1000, "{ms}: {used:?}");
            assert!(used.cpu_us.abs_diff(counted) < 20_000 + counted / 10, "{ms}: {used:?} {counted}");
            let (exit, used) = beside.guard.ended().await.unwrap();
            assert!(used.cpu_us >= 120_000, "{used:?}");
            assert!(
                exit.cpu_us < used.cpu_us - 30_000,
                "the program itself knows of less: {exit:?} {used:?}"
            );
        }
    });
}

fn bytes_told() {
    const LEN: u64 = 4 << 20;
    let script = "dd if=/dev/zero of=data bs=1M count=4 oflag=direct conv=fsync 2>&1; dd if=data of=/dev/null bs=1M iflag=direct 2>&1";
    let world = World::new().with_cgi(script).start();
    if disk_of(world.dir.path()).is_none() {
        // Of files in memory nothing is read or written; that is all there is to see here.
        return;
    }
    world.run(async |keeper| {
        let process = run_in(&keeper, "cgi", &Confinement::default()).await;
        let said = read_all(process.stdout).await;
        let (_, used) = process.guard.ended().await.unwrap();
        assert!((LEN..2 * LEN).contains(&used.read_bytes), "{used:?} {said}");
        assert!((LEN..4 * LEN).contains(&used.write_bytes), "{used:?} {said}");
        let process = run_in(&keeper, "cgi", &Confinement::default()).await;
        let other = process.guard.end().await.unwrap().1;
        assert!(other.read_bytes < 2 * LEN, "its own alone: {other:?}");
    });
}
