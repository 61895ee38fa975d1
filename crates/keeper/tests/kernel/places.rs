//! Which directories requests get on cgroup v1 and v2, and that the limits of each level hold on both.
//!
//! Not here: the life of a request in its cell (`cells`), what limits do to programs (`limits`).

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nagaya_records::cell::{
    CellName, CellScope, CgroupController, Confinement, CpuQuota, Device, IoLimit, LimitSet, NamedCell,
};
use serde_json::json;

use crate::CellFact;
use crate::groups;
use crate::limits::some_disk;
use crate::world::{World, read_all, run_and_pid, run_in, site_change};

pub const CELLS: &[CellFact] = &[
    (&["cpu", "blkio"], "two names of one rule are two groups on v1 and one branch on v2", two_names),
    (&["cpu"], "a named cell of a tenant is beneath its tenant and another's is another one", of_tenant),
    (&["blkio"], "a tenant's limit of a disk is shared by its requests", shared_disk),
    (&["blkio"], "bytes are told also of requests that share a limit of the disk", bytes_of_sharers),
    (&["cpu"], "a larger quota beneath a smaller one holds once it is the smaller one", quotas_above),
    (&["cpu"], "directories that somebody removed are made again with their limits", removed),
    (&["cpuset"], "CPUs are given by a rule, and those that are not there are reported", cpus),
    (&["fence"], "on v2 a keeper whose cgroup was once killed has children that live", once_killed),
    (&["cpu"], "on v2 the keeper's own processes make room for cells", room),
    (&["cpu"], "on v2 processes of others are never moved, and what they prevent is told", no_room),
];

fn none() -> Confinement {
    Confinement::default()
}

fn own(limits: LimitSet) -> Confinement {
    Confinement { limits, ..none() }
}

fn named(name: &str, controllers: &[CgroupController], limits: LimitSet) -> NamedCell {
    let name = CellName::parse(name).unwrap();
    NamedCell { name, scope: CellScope::Node, controllers: controllers.to_vec(), limits: Some(limits) }
}

fn quota(thousandths: u32) -> LimitSet {
    LimitSet { cpu: Some(CpuQuota::of_core(thousandths)), ..LimitSet::default() }
}

fn world() -> World {
    World::new().with_cgi("echo $$; read wait; echo done").start()
}

/// As in paper 000, Figure 4: the CPU's and the disk's group have different names.
fn two_names() {
    let Some(disk) = some_disk() else { return };
    let world = world();
    let device: Device = disk.parse().unwrap();
    let pair = |cpu: &str, shares: u32, io: &str, bps: u64| {
        let io_limit = IoLimit { read_bps: Some(bps), ..IoLimit::of(device) };
        let of_cpu = LimitSet { cpu_shares: Some(shares), ..LimitSet::default() };
        let of_disk = LimitSet { io: vec![io_limit], ..LimitSet::default() };
        let cells = vec![
            named(cpu, &[CgroupController::Cpu], of_cpu),
            named(io, &[CgroupController::Blkio], of_disk),
        ];
        Confinement { named: cells, ..none() }
    };
    world.run(async |keeper| {
        let limited = pair("httpd-limiterd", 25, "httpd-limited", 30_000_000);
        let (slow, one) = run_and_pid(&keeper, "cgi", &limited).await;
        assert_eq!(&*one.cell, "named/httpd-limiterd+httpd-limited/alice/r1");
        let (fast, _two) = run_and_pid(&keeper, "cgi", &pair("httpd", 75, "httpd", 100_000_000)).await;
        for (pid, cpu, shares, io, bps) in [
            (slow, "named-httpd-limiterd", 25, "named-httpd-limited", 30_000_000),
            (fast, "named-httpd", 75, "named-httpd", 100_000_000),
        ] {
            // On v2 the same name has a directory for each controller; the disk's is the inner one.
            let cpu = if groups::is_v2("cpu") { format!("{cpu}.cpu") } else { cpu.to_owned() };
            assert_eq!(groups::cpu_shares(&groups::above(pid, "cpu", &cpu).unwrap()), shares);
            let group = groups::above(pid, "blkio", io).unwrap();
            assert_eq!(groups::read_bps(&group, &disk), Some(bps), "{}", group.display());
            let (cpu, blkio) = (groups::of(pid, "cpu"), groups::of(pid, "blkio"));
            assert_eq!(cpu == blkio, groups::is_v2("cpu"), "{} {}", cpu.display(), blkio.display());
        }
        assert!(!world.log().contains("NGY0346"), "{}", world.log());
        // One disk's name with another CPU's: on v2 that is a second directory.
        let (_, _three) = run_and_pid(&keeper, "cgi", &pair("httpd", 75, "httpd-limited", 30_000_000)).await;
        assert_eq!(world.log().contains("NGY0346"), groups::is_v2("blkio"), "{}", world.log());
    });
}

fn of_tenant() {
    let mut world = World::new().with_cgi("echo $$; read wait");
    world.script_of("bob", "x.cgi", "#!/bin/sh\necho $$; read wait\n");
    world.site("bobs", "bob", crate::world::cgi());
    let world = world.start();
    world.run(async |keeper| {
        let reports = |shares| Confinement {
            named: vec![NamedCell {
                scope: CellScope::Tenant,
                ..named(
                    "reports",
                    &CgroupController::ALL,
                    LimitSet { cpu_shares: Some(shares), ..LimitSet::default() },
                )
            }],
            ..none()
        };
        let (alices, one) = run_and_pid(&keeper, "cgi", &reports(40)).await;
        let (bobs, two) = run_and_pid(&keeper, "bobs", &reports(50)).await;
        assert_eq!((&*one.cell, &*two.cell), ("alice/named/reports/r1", "bob/named/reports/r2"));
        for (pid, tenant, shares) in [(alices, "tenant-alice", 40), (bobs, "tenant-bob", 50)] {
            let group = groups::above(pid, "cpu", "named-reports").unwrap();
            assert!(group.parent().unwrap().ends_with(tenant), "{}", group.display());
            assert_eq!(groups::cpu_shares(&group), shares);
        }
        assert_eq!(world.cell("bob/named/reports").unwrap()["requests"], 1, "{}", world.cells());
    });
}

fn shared_disk() {
    let Some(disk) = some_disk() else { return };
    let world = world();
    let device: Device = disk.parse().unwrap();
    let limits = json!({"limits": {"devices": {&disk: {"read": 6_000_000}}}});
    world.apply(vec![world.tenant_with("alice", limits)]);
    world.run(async |keeper| {
        let (one, _one) = run_and_pid(&keeper, "cgi", &none()).await;
        let (two, _two) = run_and_pid(&keeper, "cgi", &none()).await;
        let tenant = groups::above(one, "blkio", "tenant-alice").unwrap();
        assert_eq!(groups::read_bps(&tenant, &disk), Some(6_000_000));
        let (one, two) = (groups::of(one, "blkio"), groups::of(two, "blkio"));
        if groups::is_v2("blkio") {
            assert!(one != two && one.starts_with(&tenant) && two.starts_with(&tenant));
        } else {
            // There a limit holds for the one group a process is in: so they are in the one that has it.
            assert_eq!((&one, &two), (&tenant, &tenant));
        }
        // With a limit of its own a request keeps to the smaller of both.
        for (wanted, expected) in [(2_000_000, 2_000_000), (9_000_000, 6_000_000)] {
            let io = vec![IoLimit { read_bps: Some(wanted), ..IoLimit::of(device) }];
            let (pid, _running) =
                run_and_pid(&keeper, "cgi", &own(LimitSet { io, ..LimitSet::default() })).await;
            let group = groups::of(pid, "blkio");
            assert!(group != tenant && group.starts_with(&tenant), "{}", group.display());
            let expected = if groups::is_v2("blkio") { wanted } else { expected };
            assert_eq!(groups::read_bps(&group, &disk), Some(expected));
        }
        assert_eq!(world.log().contains("NGY0347"), !groups::is_v2("blkio"), "{}", world.log());
    });
}

fn bytes_of_sharers() {
    const LEN: u64 = 4 << 20;
    let script = "dd if=/dev/zero of=data bs=1M count=4 oflag=direct 2>&1; dd if=data of=/dev/null bs=1M iflag=direct 2>&1";
    let world = World::new().with_cgi(script).start();
    let Some(disk) = crate::limits::disk_of(world.dir.path()) else { return };
    world.apply(vec![
        world.tenant_with("alice", json!({"limits": {"devices": {&disk: {"read": 500_000_000}}}})),
    ]);
    world.run(async |keeper| {
        let process = run_in(&keeper, "cgi", &none()).await;
        let said = read_all(process.stdout).await;
        let (_, used) = process.guard.ended().await.unwrap();
        assert!((LEN..2 * LEN).contains(&used.read_bytes), "{used:?} {said}");
        assert!((LEN..2 * LEN).contains(&used.write_bytes), "{used:?} {said}");
    });
}

fn quotas_above() {
    let world = world();
    world.apply(vec![world.tenant_with("alice", json!({"limits": {"cpu": "20%"}}))]);
    world.run(async |keeper| {
        let (pid, running) = run_and_pid(&keeper, "cgi", &own(quota(500))).await;
        let group = groups::of(pid, "cpu");
        let tenant = groups::above(pid, "cpu", "tenant-alice").unwrap();
        let half = Some((5_000, 10_000));
        for (of_tenant, percent) in [
            (Some((2_000, 10_000)), "20%"),
            (Some((9_000, 10_000)), "90%"),
            (None, ""),
            (Some((1_000, 10_000)), "10%"),
        ] {
            let limits = if percent.is_empty() { json!({}) } else { json!({"limits": {"cpu": percent}}) };
            world.apply(vec![world.tenant_with("alice", limits)]);
            assert_eq!(groups::cpu_quota(&tenant), of_tenant);
            // v1 refuses a quota above that of the group over it; v2 lets the smaller one win.
            let is_held = groups::is_v2("cpu") || of_tenant.is_none_or(|(quota, _)| quota >= 5_000);
            assert_eq!(groups::cpu_quota(&group), if is_held { half } else { None }, "{percent}");
        }
        assert!(!world.log().contains("NGY0342"), "{}", world.log());
        drop(running.stdin);
        let mut out = running.out;
        assert_eq!(crate::world::read_line(&mut out).await, "done");
    });
}

/// All directories beneath this one, the innermost first.
fn beneath(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().unwrap().is_dir() {
            found.extend(beneath(&entry.path()));
            found.push(entry.path());
        }
    }
    found
}

fn removed() {
    let world = world();
    world.apply(vec![site_change(
        "cgi",
        "alice",
        crate::world::cgi(),
        json!({"limits": {"cpu_shares": 77}}),
    )]);
    world.run(async |keeper| {
        let (_, running) = run_and_pid(&keeper, "cgi", &none()).await;
        let first = running.cell.clone();
        running.guard.end().await.unwrap();
        let dirs: Vec<_> =
            groups::of_keeper(world.keeper_pid()).iter().flat_map(|dir| beneath(dir)).collect();
        assert!(dirs.iter().any(|dir| dir.ends_with("site-cgi")), "{dirs:?}");
        dirs.iter().for_each(|dir| fs::remove_dir(dir).unwrap());
        // Neither the free leaf nor the directories above it are there any more.
        let (pid, running) = run_and_pid(&keeper, "cgi", &own(quota(500))).await;
        assert_ne!(running.cell, first);
        assert_eq!(groups::cpu_quota(&groups::of(pid, "cpu")), Some((5_000, 10_000)));
        assert_eq!(groups::cpu_shares(&groups::above(pid, "cpu", "site-cgi").unwrap()), 77);
        assert!(groups::above(pid, "cpu", "tenant-alice").is_some());
        assert!(world.log().contains("NGY0350"), "{}", world.log());
        running.guard.end().await.unwrap();
        let (_, running) = run_and_pid(&keeper, "cgi", &none()).await;
        running.guard.end().await.unwrap();
    });
}

fn cpus() {
    let world = world();
    world.run(async |keeper| {
        let allowed = |pid: i32| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            line.unwrap().trim().to_owned()
        };
        let (pid, _running) = run_and_pid(&keeper, "cgi", &none()).await;
        let all = allowed(pid);
        let on = |cpus: &str| LimitSet { cpus: Some(cpus.into()), ..LimitSet::default() };
        let (pid, _running) = run_and_pid(&keeper, "cgi", &own(on("0"))).await;
        assert_eq!(allowed(pid), "0");
        let bound =
            Confinement { named: vec![named("bound", &[CgroupController::Cpuset], on("0"))], ..none() };
        let (pid, _running) = run_and_pid(&keeper, "cgi", &bound).await;
        assert_eq!(allowed(pid), "0");
        // No machine has that one, and the request runs all the same.
        let (pid, _running) = run_and_pid(&keeper, "cgi", &own(on("8191"))).await;
        assert_eq!(allowed(pid), all);
        assert!(world.log().contains("NGY0342"), "{}", world.log());
    });
}

/// A cgroup v2 directory of the test's own, for a keeper to be started in.
struct Group(PathBuf);

impl Group {
    /// With controllers, as a service manager would give it.
    fn new(name: &str) -> Self {
        let top = groups::mount("cpu");
        for controller in ["cpu", "io", "memory", "pids"] {
            fs::write(top.join("cgroup.subtree_control"), format!("+{controller}")).unwrap();
        }
        Self::beneath(&top, name)
    }

    fn beneath(top: &Path, name: &str) -> Self {
        let dir = top.join(format!("nagaya-test-{name}-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The keeper has ended; where it was itself goes with the group.
        beneath(&self.0).iter().for_each(|dir| remove(dir));
        remove(&self.0);
    }
}

/// What the keeper leaves behind, its launcher of sandboxes, ends a moment after it.
fn remove(dir: &Path) {
    let until = Instant::now() + Duration::from_secs(10);
    while let Err(error) = fs::remove_dir(dir) {
        assert!(error.kind() == ErrorKind::ResourceBusy && Instant::now() < until, "{error}");
        std::thread::yield_now();
    }
}

fn once_killed() {
    if !groups::is_v2("fence") {
        return;
    }
    let group = Group::beneath(&groups::mount("fence"), "killed");
    fs::write(group.0.join("cgroup.kill"), "1").unwrap();
    let world = World::new().with_cgi("echo $$; read wait; echo done").inside(&group.0).start();
    world.run(async |keeper| {
        for _ in 0..3 {
            let (pid, running) = run_and_pid(&keeper, "cgi", &none()).await;
            assert!(groups::of(pid, "fence").starts_with(&group.0));
            drop(running.stdin);
            let mut out = running.out;
            assert_eq!(crate::world::read_line(&mut out).await, "done");
        }
    });
    assert!(world.drain(), "{}", world.log());
}

fn room() {
    if !groups::is_v2("cpu") {
        return;
    }
    let group = Group::new("room");
    let world = World::new().with_cgi("echo $$; read wait").inside(&group.0).start();
    world.run(async |keeper| {
        let (pid, running) = run_and_pid(&keeper, "cgi", &own(quota(500))).await;
        let own = groups::of(pid, "cpu");
        assert!(own.starts_with(&group.0), "{}", own.display());
        assert_eq!(groups::cpu_quota(&own), Some((5_000, 10_000)));
        let keepers = groups::of(i32::try_from(world.keeper_pid()).unwrap(), "cpu");
        assert_eq!(keepers, group.0.join("nagaya/main"));
        running.guard.end().await.unwrap();
    });
    // The next one is started by who was moved along, and finds the same place.
    world.kill();
    let world = world.inside(&group.0.join("nagaya/main")).start();
    world.run(async |keeper| {
        let (pid, running) = run_and_pid(&keeper, "cgi", &none()).await;
        assert!(groups::of(pid, "cpu").starts_with(group.0.join("nagaya")));
        assert!(!groups::of(pid, "cpu").starts_with(group.0.join("nagaya/main")));
        running.guard.end().await.unwrap();
    });
    assert!(world.drain(), "{}", world.log());
}

fn no_room() {
    if !groups::is_v2("cpu") {
        return;
    }
    let group = Group::new("no-room");
    let mut stranger = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    fs::write(group.0.join("cgroup.procs"), stranger.id().to_string()).unwrap();
    let world = World::new().with_cgi("echo $$; read wait").inside(&group.0).start();
    world.run(async |keeper| {
        let (pid, running) = run_and_pid(&keeper, "cgi", &own(quota(500))).await;
        // It is fenced there, and not limited.
        assert!(groups::of(pid, "fence").starts_with(group.0.join("nagaya")));
        running.guard.end().await.unwrap();
    });
    let shown = world.cells();
    let missing =
        shown["missing"].as_array().unwrap().iter().find(|one| one["controller"] == "memory").unwrap();
    assert_eq!(missing["code"], "NGY0348", "{missing}");
    assert!(missing["why"].as_str().unwrap().contains(&stranger.id().to_string()), "{missing}");
    let strangers = groups::of(i32::try_from(stranger.id()).unwrap(), "cpu");
    assert_eq!(strangers, group.0);
    assert!(world.drain(), "{}", world.log());
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}
