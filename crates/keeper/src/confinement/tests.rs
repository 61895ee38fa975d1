//! What may be asked of cells, and each way in which it may not.
//!
//! Not here: that the kernel takes what is accepted (`tests/kernel/limits.rs`).

use nagaya_keeper_api::codec::encode;
use nagaya_keeper_api::protocol::{ProcessId, Verb, VerbCall};
use nagaya_records::SiteName;
use nagaya_records::cell::CellName;
use proptest::prelude::*;
use serde_json::json;

use crate::fuzzing::messages::read_ask;

use super::*;

fn limits(set: impl FnOnce(&mut LimitSet)) -> LimitSet {
    let mut limits = LimitSet::default();
    set(&mut limits);
    limits
}

fn disk(minor: u32) -> IoLimit {
    IoLimit::of(Device::Number { major: 8, minor })
}

fn named(name: &str, controllers: &[CgroupController]) -> NamedCell {
    let name = CellName::parse(name).unwrap();
    NamedCell { name, scope: CellScope::Node, controllers: controllers.to_vec(), limits: None }
}

fn refused(confinement: &Confinement, why: &str) {
    let fault = check(confinement).expect_err(why);
    assert_eq!((fault.failure, fault.code), (FailureKind::Invalid, fault::CONFINEMENT), "{why}");
    assert!(fault.message.contains(why), "'{}' does not say '{why}'", fault.message);
}

#[test]
fn usual_limits_of_rules_are_accepted() {
    let own = limits(|l| {
        l.cpu = Some(CpuQuota::of_core(500));
        l.cpu_shares = Some(25);
        l.io = vec![IoLimit { read_bps: Some(1), ..IoLimit::of(Device::Root) }, disk(0)];
        l.processes = Some(1);
        l.cpus = Some("0-1,3".into());
        l.mems = Some("0".into());
    });
    let mut joined = named("httpd-limited", &[CgroupController::Blkio, CgroupController::Memory]);
    joined.limits = Some(limits(|l| l.memory = Some(MEMORY_MIN)));
    let demotions = [1, 2, 3].map(|after_cpu_us| Demotion { after_cpu_us, limits: own.clone() });
    let confinement = Confinement {
        limits: own,
        named: vec![joined, named("httpd-limiterd", &[CgroupController::Cpu])],
        demotions: demotions.to_vec(),
        boost: Boost { cpu: Some(CpuQuota::of_core(2_000)), cpu_shares: Some(10_000) },
    };
    assert_eq!(check(&confinement), Ok(()));
    assert_eq!(check(&Confinement::default()), Ok(()));
    let of_tenant = NamedCell { scope: CellScope::Tenant, ..named("all", &CgroupController::ALL) };
    assert_eq!(check(&Confinement { named: vec![of_tenant], ..Confinement::default() }), Ok(()));
}

#[test]
fn numbers_out_of_range_are_refused() {
    let quota = |quota_us, period_us| limits(|l| l.cpu = Some(CpuQuota { quota_us, period_us }));
    let list = |text: &str| limits(|l| l.cpus = Some(text.into()));
    let io = |io| limits(|l| l.io = io);
    let device = |major, minor| io(vec![IoLimit::of(Device::Number { major, minor })]);
    for (limits, why) in [
        (quota(0, 10_000), "quota"),
        (quota(u64::MAX, 10_000), "quota"),
        (quota(10_000, 0), "period"),
        (quota(10_000, u32::MAX), "period"),
        (limits(|l| l.cpu_shares = Some(1)), "shares"),
        (limits(|l| l.cpu_shares = Some(10_001)), "shares"),
        (limits(|l| l.processes = Some(0)), "processes"),
        (limits(|l| l.processes = Some(u32::MAX)), "processes"),
        (limits(|l| l.memory = Some(1 << 30)), "memory"),
        (io(vec![disk(1), disk(1)]), "twice"),
        (io((0..17).map(disk).collect()), "devices"),
        (io(vec![IoLimit { read_bps: Some(0), ..disk(0) }]), "bytes per second"),
        (io(vec![IoLimit { write_iops: Some(1 << 32), ..disk(0) }]), "operations per second"),
        (device(4096, 0), "4096:0"),
        (device(8, 1 << 20), "8:1048576"),
        (list(""), "CPUs"),
        (list("0-"), "CPUs"),
        (list("3-1"), "CPUs"),
        (list("+1"), "CPUs"),
        (list("0\n1"), "CPUs"),
        (list("9999"), "CPUs"),
        (list(&"0,".repeat(200)), "CPUs"),
        (limits(|l| l.mems = Some("all".into())), "memory nodes"),
    ] {
        let demotion = Demotion { after_cpu_us: 1, limits: limits.clone() };
        refused(&Confinement { demotions: vec![demotion], ..Confinement::default() }, why);
        let boost = Boost { cpu: limits.cpu, cpu_shares: limits.cpu_shares };
        if !boost.is_empty() {
            refused(&Confinement { boost, ..Confinement::default() }, why);
        }
        refused(&Confinement { limits, ..Confinement::default() }, why);
    }
}

#[test]
fn named_cells_must_be_few_and_each_controller_in_one_of_them() {
    let all = |named| Confinement { named, ..Confinement::default() };
    let one = named("a", &[CgroupController::Cpu]);
    refused(&all(vec![one.clone(); 7]), "7 named cells");
    refused(&all(vec![one.clone(), named("b", &[CgroupController::Cpu])]), "cpu is named twice");
    refused(&all(vec![named("a", &[CgroupController::Pids, CgroupController::Pids])]), "pids is named twice");
    refused(&all(vec![named("a", &[])]), "without a controller");
    refused(&all(vec![NamedCell { scope: CellScope::Tenant, ..one.clone() }]), "not with all");
    let lost = limits(|l| l.memory = Some(MEMORY_MIN));
    refused(&all(vec![NamedCell { limits: Some(lost), ..one.clone() }]), "without memory");
    let small = limits(|l| l.memory = Some(MEMORY_MIN - 1));
    let with_memory = named("a", &[CgroupController::Memory]);
    refused(&all(vec![NamedCell { limits: Some(small), ..with_memory }]), "memory in bytes");
}

#[test]
fn demotions_must_be_few_and_rising() {
    let at = |times: &[u64]| Confinement {
        demotions: times
            .iter()
            .map(|us| Demotion { after_cpu_us: *us, limits: LimitSet::default() })
            .collect(),
        ..Confinement::default()
    };
    assert_eq!(check(&at(&[0, 5])), Ok(()));
    refused(&at(&[5, 5]), "rising");
    refused(&at(&[1, 2, 3, 4, 5]), "5 demotions");
}

#[test]
fn changes_of_cells_are_bounded_and_checked() {
    let name = CellName::parse("a").unwrap();
    let set =
        |limits| CellChange::Set { name: name.clone(), controllers: vec![CgroupController::Cpu], limits };
    let good = set(limits(|l| l.cpu_shares = Some(2)));
    assert_eq!(check_changes(&vec![good.clone(); CHANGES_MAX]), Ok(()));
    assert!(check_changes(&vec![good; CHANGES_MAX + 1]).is_err());
    assert!(check_changes(&[set(limits(|l| l.cpu_shares = Some(1)))]).is_err());
    assert!(check_changes(&[set(limits(|l| l.processes = Some(1)))]).is_err());
    assert!(check_changes(&[CellChange::Drop { name: name.clone(), controllers: vec![] }]).is_err());
}

#[test]
fn limits_asked_for_a_request_overlay_its_sites_record() {
    let site: Site = serde_json::from_value(json!({
        "name": "s", "tenant": "t", "hosts": ["s.test"], "backend": {"kind": "cgi", "root": "www"},
        "request_limits": {"cpu": "50%", "processes": 8},
        "demotions": [{"after_cpu": "1s", "limits": {"cpu": "10%"}}],
    }))
    .unwrap();
    let by_record = of_site(&site, &Confinement::default());
    assert_eq!(by_record.limits.cpu, Some(CpuQuota::of_core(500)));
    assert_eq!(by_record.demotions[0].after_cpu_us, 1_000_000);
    let own = Demotion { after_cpu_us: 7, limits: LimitSet::default() };
    let asked = Confinement {
        limits: limits(|l| l.processes = Some(2)),
        demotions: vec![own.clone()],
        ..Confinement::default()
    };
    let both = of_site(&site, &asked);
    assert_eq!((both.limits.cpu, both.limits.processes), (Some(CpuQuota::of_core(500)), Some(2)));
    assert_eq!(both.demotions, [own]);
}

#[test]
fn no_more_tenants_are_named_than_fit() {
    let names = |count: usize| vec![TenantName::new("demo").unwrap(); count];
    assert_eq!(check_giving_way(&names(TENANTS_MAX), &names(TENANTS_MAX)), Ok(()));
    assert!(check_giving_way(&names(TENANTS_MAX + 1), &[]).is_err());
    assert!(check_giving_way(&[], &names(TENANTS_MAX + 1)).is_err());
}

fn any_limits() -> impl Strategy<Value = LimitSet> {
    let cpu = prop::option::of(
        any::<(u64, u32)>().prop_map(|(quota_us, period_us)| CpuQuota { quota_us, period_us }),
    );
    let io = any::<(u32, u32, Option<u64>)>().prop_map(|(major, minor, read_bps)| IoLimit {
        read_bps,
        ..IoLimit::of(Device::Number { major, minor })
    });
    let list = prop::option::of(".{0,9}".prop_map(String::into_boxed_str));
    (cpu, proptest::collection::vec(io, 0..3), any::<(Option<u32>, Option<u64>)>(), list).prop_map(
        |(cpu, io, (processes, memory), cpus)| LimitSet {
            cpu,
            io,
            processes,
            memory,
            cpus,
            ..LimitSet::default()
        },
    )
}

proptest! {
    #[test]
    fn a_damaged_message_is_checked_without_a_panic(
        limits in any_limits(),
        lowered in any_limits(),
        at: prop::sample::Index,
        with: u8,
        cut: prop::sample::Index,
    ) {
        let cell = named("a", &CgroupController::ALL);
        let demotions = vec![Demotion { after_cpu_us: 1, limits: lowered }];
        let confinement = Confinement { limits, named: vec![cell], demotions, ..Confinement::default() };
        let site = SiteName::new("a").unwrap();
        let verb = Verb::Enter { process: ProcessId(1), site, confinement: Box::new(confinement) };
        let mut bytes = encode(&VerbCall { tag: 9, verb }).unwrap();
        let at = at.index(bytes.len());
        bytes[at] = with;
        bytes.truncate(cut.index(bytes.len()) + 1);
        read_ask(&bytes);
    }
}
