//! The figures of the paper, run as they are.

use std::path::Path;

use nagaya_records::cell::{
    CellName, CellScope, CgroupController, Confinement, CpuQuota, Device, IoLimit, LimitSet, NamedCell,
};
use nagaya_rules::{RulePhase, Verdict};

use crate::world::World;

fn decide(world: &World, figure: &str) -> Verdict {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(figure);
    let mut verdict = Verdict::default();
    world.evaluate_file(RulePhase::AccessChecker, &path, &mut verdict).unwrap();
    verdict
}

fn named(name: &str, controller: CgroupController, limits: LimitSet) -> NamedCell {
    NamedCell {
        name: CellName::parse(name).unwrap(),
        scope: CellScope::Node,
        controllers: vec![controller],
        limits: Some(limits),
    }
}

fn shares(shares: u32) -> LimitSet {
    LimitSet { cpu_shares: Some(shares), ..LimitSet::default() }
}

fn disk(bps: u64) -> LimitSet {
    let device = Device::Number { major: 8, minor: 0 };
    let limit = IoLimit { read_bps: Some(bps), write_bps: Some(bps), ..IoLimit::of(device) };
    LimitSet { io: vec![limit], ..LimitSet::default() }
}

fn confined_to(named: [NamedCell; 2]) -> Confinement {
    Confinement { named: named.into(), ..Confinement::default() }
}

/// The names differ: `httpd-limiterd` for the CPU, `httpd-limited` for the disk.
fn of_targets() -> Confinement {
    confined_to([
        named("httpd-limiterd", CgroupController::Cpu, shares(25)),
        named("httpd-limited", CgroupController::Blkio, disk(30_000_000)),
    ])
}

fn of_others() -> Confinement {
    confined_to([
        named("httpd", CgroupController::Cpu, shares(75)),
        named("httpd", CgroupController::Blkio, disk(100_000_000)),
    ])
}

#[test]
fn figure_4_confines_each_target_to_the_limited_groups() {
    for host in 1..=4 {
        let verdict = decide(&World::get(&format!("http://target{host}.example.com/")), "figure4.rb");
        assert_eq!(*verdict.confinement, of_targets(), "target{host}");
        assert_eq!((verdict.answer, verdict.changes, verdict.lane), (None, Vec::new(), None));
        assert_eq!(verdict.log, []);
    }
}

#[test]
fn figure_4_confines_all_others_to_the_common_group() {
    for host in ["www.example.com", "target5.example.com", "target1.example.com.example.org"] {
        let verdict = decide(&World::get(&format!("http://{host}/")), "figure4.rb");
        assert_eq!(*verdict.confinement, of_others(), "{host}");
        assert_eq!((verdict.answer, verdict.changes, verdict.lane), (None, Vec::new(), None));
        assert_eq!(verdict.log, []);
    }
}

#[test]
fn figure_4_says_the_same_whether_the_groups_are_there_or_not() {
    let target = World::get("http://target1.example.com/")
        .cell(CgroupController::Cpu, "httpd-limiterd", "cpu.shares", "512")
        .cell(CgroupController::Blkio, "httpd-limited", "", "");
    assert_eq!(*decide(&target, "figure4.rb").confinement, of_targets());
    let other =
        World::get("http://www.example.com/").cell(CgroupController::Cpu, "httpd", "cpu.shares", "75");
    assert_eq!(*decide(&other, "figure4.rb").confinement, of_others());
}

#[test]
fn figure_3_gives_cpu_cgi_a_tenth_of_a_core() {
    let verdict = decide(&World::get("http://www.example.com/cgi/cpu.cgi?n=1"), "figure3.rb");
    let quota = CpuQuota { quota_us: 10_000, period_us: 100_000 };
    let limits = LimitSet { cpu: Some(quota), ..LimitSet::default() };
    let confinement = Confinement {
        named: vec![named("cpu-cgi", CgroupController::Cpu, limits)],
        ..Confinement::default()
    };
    assert_eq!(*verdict.confinement, confinement);
    assert!(decide(&World::get("http://www.example.com/other.cgi"), "figure3.rb").is_silent());
}
