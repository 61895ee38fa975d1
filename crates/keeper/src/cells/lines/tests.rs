//! Tables: limits and what is written for them on both versions, changes and the writes they need.
//!
//! Not here: whether the kernel takes them (`tests/kernel`).

use nagaya_records::cell::CpuQuota;

use super::*;

fn limits() -> LimitSet {
    let disk = Device::Number { major: 8, minor: 16 };
    LimitSet {
        cpu: Some(CpuQuota { quota_us: 5_000, period_us: 10_000 }),
        cpu_shares: Some(25),
        io: vec![IoLimit { read_bps: Some(30_000_000), write_iops: Some(u64::MAX), ..IoLimit::of(disk) }],
        processes: Some(64),
        memory: Some(1 << 29),
        cpus: Some("0-1,3".into()),
        mems: None,
    }
}

/// Of a directory that is not idle.
fn plain(version: CgroupVersion, controllers: ControllerSet, limits: &LimitSet) -> Vec<CgroupWrite> {
    lines(version, controllers, limits, CpuWeight::OfLimits)
}

fn told(lines: &[CgroupWrite]) -> Vec<String> {
    lines.iter().map(|line| format!("{} {}", line.file, line.text())).collect()
}

#[test]
fn limits_become_these_lines() {
    assert_eq!(
        told(&plain(CgroupVersion::V1, ControllerSet::ALL, &limits())),
        [
            "cpu.shares 25",
            "cpu.cfs_period_us 10000",
            "cpu.cfs_quota_us 5000",
            "cpuset.cpus 0-1,3",
            "blkio.throttle.read_bps_device 8:16 30000000",
            "blkio.throttle.write_iops_device 8:16 4294967295",
            "memory.limit_in_bytes 536870912",
            "pids.max 64",
        ]
    );
    assert_eq!(
        told(&plain(CgroupVersion::V2, ControllerSet::ALL, &limits())),
        [
            "cpu.weight 25",
            "cpu.max 5000 10000",
            "cpuset.cpus 0-1,3",
            "io.max 8:16 rbps=30000000 wbps=max riops=max wiops=4294967295",
            "memory.max 536870912",
            "pids.max 64",
        ]
    );
}

#[test]
fn a_directory_holds_only_what_its_controllers_keep() {
    let pids = ControllerSet::only(CgroupController::Pids);
    assert_eq!(told(&plain(CgroupVersion::V1, pids, &limits())), ["pids.max 64"]);
    assert_eq!(plain(CgroupVersion::V1, ControllerSet::only(CgroupController::Cpuacct), &limits()), []);
}

#[test]
fn siblings_without_shares_weigh_the_same_on_both_versions() {
    let none = LimitSet::default();
    assert_eq!(told(&plain(CgroupVersion::V1, ControllerSet::ALL, &none)), ["cpu.shares 1024"]);
    assert_eq!(told(&plain(CgroupVersion::V2, ControllerSet::ALL, &none)), ["cpu.weight 1024"]);
    // A fresh directory of v1 has them already, one of v2 has 100.
    for (version, count) in [(CgroupVersion::V1, 0), (CgroupVersion::V2, 1)] {
        let wanted = plain(version, ControllerSet::ALL, &none);
        assert_eq!(writes(&fresh(version, ControllerSet::ALL), &wanted).len(), count, "{version:?}");
    }
}

#[test]
fn nothing_is_written_twice() {
    for version in [CgroupVersion::V1, CgroupVersion::V2] {
        let wanted = plain(version, ControllerSet::ALL, &limits());
        let mut written = fresh(version, ControllerSet::ALL);
        for line in writes(&written.clone(), &wanted) {
            remember(&mut written, line);
        }
        assert_eq!(writes(&written, &wanted), [], "{version:?}");
    }
}

#[test]
fn limit_no_longer_wanted_is_lifted_once() {
    let cases = [
        (
            CgroupVersion::V1,
            vec![
                "cpu.cfs_quota_us -1",
                "cpuset.cpus ",
                "blkio.throttle.read_bps_device 8:16 0",
                "blkio.throttle.write_iops_device 8:16 0",
                "memory.limit_in_bytes -1",
                "pids.max max",
                "cpu.shares 1024",
            ],
        ),
        (
            CgroupVersion::V2,
            vec![
                "cpu.max max",
                "cpuset.cpus ",
                "io.max 8:16 rbps=max wbps=max riops=max wiops=max",
                "memory.max max",
                "pids.max max",
                "cpu.weight 1024",
            ],
        ),
    ];
    for (version, expected) in cases {
        let written = plain(version, ControllerSet::ALL, &limits());
        let wanted = plain(version, ControllerSet::ALL, &LimitSet::default());
        assert_eq!(told(&writes(&written, &wanted)), expected);
        // Once lifted, it is not lifted again.
        let mut after = written.clone();
        writes(&written, &wanted).into_iter().for_each(|line| remember(&mut after, line));
        assert_eq!(writes(&after, &wanted), []);
    }
}

#[test]
fn a_period_changes_only_without_a_quota() {
    let quota = |quota_us, period_us| {
        let cpu = Some(CpuQuota { quota_us, period_us });
        plain(
            CgroupVersion::V1,
            ControllerSet::only(CgroupController::Cpu),
            &LimitSet { cpu, ..LimitSet::default() },
        )
    };
    let none = plain(CgroupVersion::V1, ControllerSet::only(CgroupController::Cpu), &LimitSet::default());
    let cases: [(Vec<CgroupWrite>, Vec<CgroupWrite>, &[&str]); 4] = [
        (none.clone(), quota(5_000, 10_000), &["cpu.cfs_period_us 10000", "cpu.cfs_quota_us 5000"]),
        (quota(5_000, 10_000), quota(2_000, 10_000), &["cpu.cfs_quota_us 2000"]),
        (
            quota(5_000, 10_000),
            quota(1_000, 20_000),
            &["cpu.cfs_quota_us -1", "cpu.cfs_period_us 20000", "cpu.cfs_quota_us 1000"],
        ),
        (
            quota(5_000, 10_000),
            quota(5_000, 20_000),
            &["cpu.cfs_quota_us -1", "cpu.cfs_period_us 20000", "cpu.cfs_quota_us 5000"],
        ),
    ];
    for (from, to, expected) in cases {
        assert_eq!(told(&writes(&from, &to)), expected);
    }
}

#[test]
fn a_directory_found_full_is_emptied() {
    let wanted = plain(CgroupVersion::V1, ControllerSet::ALL, &LimitSet::default());
    let writes = writes(&unknown(CgroupVersion::V1, ControllerSet::ALL), &wanted);
    assert_eq!(
        told(&writes),
        ["cpu.cfs_quota_us -1", "pids.max max", "memory.limit_in_bytes -1", "cpu.shares 1024"]
    );
}

#[test]
fn cell_that_stops_being_idle_gets_its_weight_back() {
    let cpu = ControllerSet::only(CgroupController::Cpu);
    let limits = LimitSet { cpu: None, ..limits() };
    let cases: [(CgroupVersion, &[&str], &[&str]); 2] = [
        (CgroupVersion::V1, &["cpu.idle 1"], &["cpu.idle 0", "cpu.shares 25"]),
        (CgroupVersion::V2, &["cpu.idle 1"], &["cpu.idle 0", "cpu.weight 25"]),
    ];
    let weight = CpuWeight::Idle;
    for (version, to, back) in cases {
        let mut written = plain(version, cpu, &limits);
        // Other shares meanwhile are no other writes: an idle directory takes none.
        let more = LimitSet { cpu_shares: Some(200), ..limits.clone() };
        for (limits, weight, expected) in [
            (&limits, weight, to),
            (&more, weight, &[]),
            (&limits, CpuWeight::OfLimits, back),
            (&limits, CpuWeight::OfLimits, &[]),
        ] {
            let writes = writes(&written, &lines(version, cpu, limits, weight));
            assert_eq!(told(&writes), expected, "{version:?} {weight:?}");
            writes.into_iter().for_each(|line| remember(&mut written, line));
        }
    }
}
