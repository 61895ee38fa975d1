//! `Cgroup`: what its objects answer, what they leave in the verdict, and what is logged and not raised.

use nagaya_records::cell::{
    CellChange, CellName, CellScope, CgroupController, CpuQuota, Device, IoLimit, LimitSet, NamedCell,
};
use nagaya_rules::{LogLevel, NumberFact, Verdict};

use crate::world::{World, warnings};

fn world() -> World {
    World::get("http://www.example.com/")
}

fn name(name: &str) -> CellName {
    CellName::parse(name).unwrap()
}

fn named(verdict: &Verdict) -> Vec<(&str, &[CgroupController], Option<&LimitSet>)> {
    let cells = verdict.confinement.named.iter();
    cells.map(|cell| (cell.name.as_str(), cell.controllers.as_slice(), cell.limits.as_ref())).collect()
}

#[test]
fn a_group_that_is_made_and_not_attached_is_a_change() {
    let verdict = world().decide("c = Cgroup::CPU.new('batch'); c.shares = 30; c.create");
    let limits = LimitSet { cpu_shares: Some(30), ..LimitSet::default() };
    let set = CellChange::Set { name: name("batch"), controllers: vec![CgroupController::Cpu], limits };
    assert_eq!(verdict.changes, [set]);
    assert_eq!(named(&verdict), []);
}

#[test]
fn attach_takes_the_limits_that_were_saved_and_no_others() {
    let verdict = world().decide(
        "c = Cgroup::CPU.new('/batch')
         c.shares = 30
         c.modify
         c.shares = 40
         c.attach",
    );
    let limits = LimitSet { cpu_shares: Some(30), ..LimitSet::default() };
    assert_eq!(named(&verdict), [("batch", &[CgroupController::Cpu][..], Some(&limits))]);
    assert_eq!(verdict.changes, []);
}

#[test]
fn a_group_that_was_not_saved_is_joined_as_it_is() {
    let verdict = world().decide("Cgroup::BLKIO.new('batch').attach");
    assert_eq!(named(&verdict), [("batch", &[CgroupController::Blkio][..], None)]);
}

#[test]
fn saving_after_attaching_holds_for_the_request_too() {
    let verdict = world().decide("c = Cgroup::CPU.new('batch'); c.attach; c.shares = 9; c.modify; c.attach");
    let limits = LimitSet { cpu_shares: Some(9), ..LimitSet::default() };
    assert_eq!(named(&verdict), [("batch", &[CgroupController::Cpu][..], Some(&limits))]);
    assert_eq!(verdict.changes, []);
}

#[test]
fn the_last_group_of_a_controller_is_the_one() {
    let verdict = world().decide(
        "Cgroup::CPU.new('a').attach
         Cgroup::BLKIO.new('a').attach
         Cgroup::CPU.new('b').attach",
    );
    let mut cells = named(&verdict);
    cells.sort_by_key(|(name, _, _)| *name);
    assert_eq!(
        cells,
        [("a", &[CgroupController::Blkio][..], None), ("b", &[CgroupController::Cpu][..], None)]
    );
}

#[test]
fn a_request_can_leave_its_groups_again() {
    let left = [
        "c.detach",
        "Cgroup::CPU.new('/').attach",
        "c.root_attach(Cgroup::CPU.new('/'))",
        "c.delete",
        "c.close",
    ];
    for leave in left {
        let verdict = world().decide(&format!("c = Cgroup::CPU.new('a'); c.create; c.attach; {leave}"));
        assert_eq!(verdict.confinement.named, [], "{leave}");
    }
    assert!(
        world()
            .fault("Cgroup::CPU.new('/').root_attach(Cgroup::CPU.new('gone'))")
            .message
            .contains("root group not found")
    );
}

#[test]
fn delete_drops_the_group_and_what_was_to_be_set() {
    for delete in ["delete", "close"] {
        let verdict = world().decide(&format!("c = Cgroup::PIDS.new('a'); c.max = 5; c.create; c.{delete}"));
        let drop = CellChange::Drop { name: name("a"), controllers: vec![CgroupController::Pids] };
        assert_eq!(verdict.changes, [drop], "{delete}");
    }
}

#[test]
fn methods_give_back_the_object_and_setters_their_value() {
    let world = world();
    for method in ["create", "modify", "open", "delete", "close", "attach", "detach"] {
        assert_eq!(
            world.value(&format!("c = Cgroup::CPU.new('a'); c.{method}.equal?(c)")),
            "true",
            "{method}"
        );
    }
    assert_eq!(world.value("c = Cgroup::CPU.new('a'); c.shares = 25"), "25");
    assert_eq!(world.value("c = Cgroup::CPU.new('a'); c.send(:shares=, 25).equal?(c)"), "true");
    assert_eq!(world.value("Cgroup::CPU.new('/a').group_name"), "\"/a\"");
    assert_eq!(world.value("Cgroup::CPU.new('a').is_a?(Cgroup)"), "true");
}

#[test]
fn a_group_exists_if_any_controller_has_it_or_this_rule_made_it() {
    let world = world().cell(CgroupController::Memory, "there", "", "");
    assert_eq!(world.value("Cgroup::CPU.new('there').exist?"), "true");
    assert_eq!(world.value("Cgroup::CPU.new('not').exist?"), "false");
    assert_eq!(world.value("c = Cgroup::CPU.new('new'); c.create; c.exist?"), "true");
    assert_eq!(world.value("Cgroup::CPU.new('new').create; Cgroup::BLKIO.new('new').exist?"), "true");
    // What `exist?` says is from when the object was made.
    assert_eq!(world.value("b = Cgroup::BLKIO.new('new'); Cgroup::CPU.new('new').create; b.exist?"), "false");
}

#[test]
fn values_are_read_back_or_come_from_the_group_or_are_nil() {
    let world = world()
        .cell(CgroupController::Cpu, "a", "cpu.shares", "512\n")
        .cell(CgroupController::Cpu, "a", "cpu.stat", "nr_periods 1")
        .cell(CgroupController::Cpuset, "a", "cpuset.cpus", "")
        .cell(CgroupController::Cpuacct, "a", "cpuacct.usage", "123456789")
        .cell(CgroupController::Pids, "a", "pids.current", "3");
    for (expression, value) in [
        ("Cgroup::CPU.new('a').shares", "512"),
        ("Cgroup::CPU.new('b').shares", "nil"),
        ("c = Cgroup::CPU.new('a'); c.shares = 7; c.shares", "7"),
        ("Cgroup::CPU.new('a').stat", "\"nr_periods 1\""),
        ("Cgroup::CPUSET.new('a').cpus", "nil"),
        ("Cgroup::CPUACCT.new('a').usage", "123456789"),
        ("Cgroup::CPU.new('a').cpuacct.usage", "123456789"),
        ("c = Cgroup::CPU.new('a'); c.cpuacct.equal?(c.cpuacct)", "true"),
        ("Cgroup::PIDS.new('a').current", "3"),
        ("Cgroup::PIDS.new('a').max", "nil"),
        (
            "b = Cgroup::BLKIO.new('a'); b.throttle_read_bps_device = '8:0 1'; b.throttle_read_bps_device",
            "\"8:0 1\"",
        ),
        ("m = Cgroup::MEMORY.new('a'); m.oom_control = true; m.oom_control", "true"),
        ("c = Cgroup::CPU.new('a'); c.shares = 25.9; c.shares", "25"),
    ] {
        assert_eq!(world.value(expression), value, "{expression}");
    }
}

#[test]
fn every_kind_of_limit_reaches_the_verdict() {
    let verdict = world().decide(
        "cpu = Cgroup::CPU.new('a')
         cpu.cfs_quota_us = 50000
         cpu.create
         set = Cgroup::CPUSET.new('a')
         set.cpus = '0-1'
         set.mems = '0'
         set.create
         io = Cgroup::BLKIO.new('a')
         io.throttle_read_bps_device = ':root 1000'
         io.throttle_write_bps_device = '254:0 2000'
         io.throttle_read_iops_device = '254:0 30'
         io.throttle_write_iops_device = ':root 40'
         io.create
         memory = Cgroup::MEMORY.new('a')
         memory.limit_in_bytes = 64 * 1024 * 1024
         memory.create
         pids = Cgroup::PIDS.new('a')
         pids.max = 12
         pids.create
         [cpu, set, io, memory, pids].each { |group| group.attach }",
    );
    let mut limits = LimitSet::default();
    for cell in &verdict.confinement.named {
        assert_eq!((cell.scope, cell.controllers.len()), (CellScope::Node, 1));
        limits = limits.overlaid(cell.limits.as_ref().unwrap());
    }
    let disk = Device::Number { major: 254, minor: 0 };
    let root = IoLimit { read_bps: Some(1000), write_iops: Some(40), ..IoLimit::of(Device::Root) };
    let other = IoLimit { write_bps: Some(2000), read_iops: Some(30), ..IoLimit::of(disk) };
    let expected = LimitSet {
        // The same share in the shorter period.
        cpu: Some(CpuQuota { quota_us: 5_000, period_us: 10_000 }),
        cpu_shares: None,
        io: vec![root, other],
        processes: Some(12),
        memory: Some(64 << 20),
        cpus: Some("0-1".into()),
        mems: Some("0".into()),
    };
    assert_eq!(limits, expected);
    assert_eq!(verdict.log, []);
}

#[test]
fn quotas_are_the_share_that_was_written() {
    let quota = |rule: &str| {
        let verdict = world().decide(&format!("c = Cgroup::CPU.new('a'); {rule}; c.create; c.attach"));
        let [NamedCell { limits: Some(limits), .. }] = &verdict.confinement.named[..] else {
            panic!("{rule}")
        };
        limits.cpu.map(|cpu| (cpu.quota_us, cpu.period_us))
    };
    assert_eq!(quota("c.cfs_quota_us = 200000"), Some((20_000, 10_000)));
    // Too small, or not whole, for the shorter period.
    assert_eq!(quota("c.cfs_quota_us = 1000"), Some((1_000, 100_000)));
    assert_eq!(quota("c.cfs_quota_us = 10001"), Some((10_001, 100_000)));
    assert_eq!(quota("c.cfs_quota_us = 10000; c.cfs_period_us = 50000"), Some((10_000, 50_000)));
    assert_eq!(quota("c.cfs_quota_us = -1; c.cfs_period_us = 50000"), None);
    assert_eq!(quota("c.cfs_period_us = 50000"), None);
}

#[test]
fn refused_cell_setting_is_logged_and_the_rule_goes_on() {
    for (rule, logged) in [
        ("Cgroup::CPU.new('a/b').create", "'a/b' is not the name of a cell"),
        ("Cgroup::CPU.new('../a').attach", "'../a' is not the name of a cell"),
        ("c = Cgroup::CPU.new('..'); c.shares = 5; c.modify; c.attach; c.delete", "'..' is not the name"),
        ("c = Cgroup::CPU.new('a'); c.shares = 1", "shares 1 are set as 2"),
        ("c = Cgroup::CPU.new('a'); c.shares = 262144", "shares 262144 are set as 10000"),
        ("c = Cgroup::CPU.new('a'); c.cfs_quota_us = 5; c.create; c.attach", "cfs_quota_us is 1000 or more"),
        (
            "c = Cgroup::CPU.new('a'); c.cfs_quota_us = 5000; c.cfs_period_us = 5; c.create",
            "cfs_period_us is 1000",
        ),
        ("c = Cgroup::CPU.new('a'); c.rt_runtime_us = 5", "cpu.rt_runtime_us is not set"),
        ("Cgroup::CPUACCT.new('a').usage = 0", "cpuacct.usage is not set"),
        ("Cgroup::CPUSET.new('a').cpus = 'all'", "'all' is not a list"),
        ("Cgroup::BLKIO.new('a').throttle_read_bps_device = '8:0'", "'8:0' is not a device and a number"),
        ("Cgroup::BLKIO.new('a').throttle_read_bps_device = 'sda 100'", "'sda' is not a device"),
        ("Cgroup::BLKIO.new('a').throttle_read_bps_device = '8:0 fast'", "does not end in a number"),
        ("Cgroup::BLKIO.new('a').throttle_write_iops_device = '8:0 -1'", "does not end in a number"),
        ("Cgroup::MEMORY.new('a').memsw_limit_in_bytes = 1", "nagaya sets no limits of swap"),
        ("Cgroup::MEMORY.new('a').oom_control = true", "memory.oom_control is not set"),
        ("Cgroup::MEMORY.new('a').cgroup_event_control = 'x'", "cgroup.event_control is not set"),
        ("Cgroup::PIDS.new('a').max = 0", "max 0 is not set"),
        ("Cgroup::CPU.new('a').attach(4711)", "moves no other process"),
        ("c = Cgroup::CPU.new('/'); c.shares = 5; c.modify", "is the whole node"),
    ] {
        let verdict = world().decide(&format!("{rule}; Apache.rputs 'done'"));
        let warnings = warnings(&verdict);
        assert!(warnings.len() == 1 && warnings[0].contains(logged), "{rule}: {:?}", verdict.log);
        assert_eq!(
            verdict.answer.as_ref().map(|answer| answer.body.as_slice()),
            Some(&b"done"[..]),
            "{rule}"
        );
    }
}

#[test]
fn the_same_complaint_is_not_logged_with_every_request() {
    let logged = |at_s: i64| {
        let world = world().number(NumberFact::ArrivedUs, at_s * 1_000_000);
        world.decide("Cgroup::CPU.new('x/y').attach").log.len()
    };
    assert_eq!([logged(1), logged(2), logged(60), logged(61)], [1, 0, 0, 1]);
}

#[test]
fn a_name_that_cannot_be_decides_nothing() {
    let verdict =
        world().decide("c = Cgroup::CPU.new('a/../../b'); c.shares = 5; c.create; c.attach; c.delete");
    assert_eq!((verdict.confinement.named.len(), verdict.changes.len(), verdict.log.len()), (0, 0, 1));
    assert_eq!(verdict.log[0].0, LogLevel::Warning);
}

#[test]
fn wrong_types_are_type_errors() {
    for rule in [
        "Cgroup::CPU.new(1)",
        "Cgroup::CPU.new(nil)",
        "Cgroup::CPU.new('a').shares = '25'",
        "Cgroup::CPU.new('a').shares = nil",
        "Cgroup::CPU.new('a').cfs_quota_us = :x",
        "Cgroup::BLKIO.new('a').throttle_read_iops_device = 10",
        "Cgroup::CPUSET.new('a').cpus = 0",
        "Cgroup::PIDS.new('a').max = 'max'",
        "Cgroup::MEMORY.new('a').limit_in_bytes = '1G'",
        "Cgroup::CPU.new('a').attach('4711')",
    ] {
        let written =
            world().written(&format!("begin; {rule}; rescue TypeError => e; Apache.rputs e.class; end"));
        assert_eq!(written, "TypeError", "{rule}");
        let fault = world().fault(rule);
        assert_eq!(fault.line, Some(1), "{rule}: {fault}");
    }
    assert!(world().fault("Cgroup::CPU.new").message.contains("wrong number of arguments"));
    assert!(world().fault("Cgroup::CPUSET.new('a').cpus = \"0\\0\"").message.contains("null byte"));
}

#[test]
fn upstream_names_of_errors_are_kept_where_there_is_no_room() {
    let rule = "20.times { |i| Cgroup::CPU.new(\"a#{i}\").create }";
    assert!(world().fault(rule).message.contains("cgroup_create failed"), "{}", world().fault(rule));
}
