//! Written limits as numbers, and back as what was written.
//!
//! Not here: which limits a record may have (`check::tests`).

use proptest::prelude::*;

use super::*;

fn read(json: &str) -> CellLimits {
    serde_json::from_str(json).expect(json)
}

#[test]
fn every_field_becomes_its_number() {
    let json = r#"{"cpu":"50%","cpu_shares":512,"read":"5M","write":1000,"read_iops":100,"write_iops":"unlimited","processes":64,"memory":"512M","devices":{"8:0":{"read":"1.5K"}}}"#;
    let written = read(json);
    assert_eq!(serde_json::to_string(&written).unwrap(), json);
    let root = IoLimit {
        read_bps: Some(5 << 20),
        write_bps: Some(1000),
        read_iops: Some(100),
        ..IoLimit::of(Device::Root)
    };
    let other = IoLimit { read_bps: Some(1536), ..IoLimit::of(Device::Number { major: 8, minor: 0 }) };
    let expected = LimitSet {
        cpu: Some(CpuQuota { quota_us: 5_000, period_us: 10_000 }),
        cpu_shares: Some(512),
        io: vec![root, other],
        processes: Some(64),
        memory: Some(512 << 20),
        cpus: None,
        mems: None,
    };
    assert_eq!(written.limits(), expected);
}

#[test]
fn unlimited_everywhere_is_no_limit_at_all() {
    let json = r#"{"cpu":"unlimited","read":"unlimited","write":"unlimited","read_iops":"unlimited","write_iops":"unlimited","processes":"unlimited","memory":"unlimited","devices":{"8:0":{"read":"unlimited"}}}"#;
    assert!(read(json).limits().is_empty());
    assert!(!read(json).is_empty() && read("{}").is_empty());
}

#[test]
fn amounts_have_units_and_ranges() {
    for (text, thousandths) in
        [("0.1%", 1), ("1%", 10), ("12.5%", 125), ("150%", 1500), ("102400%", 1_024_000)]
    {
        assert_eq!(WrittenAmount::new(text).cpu(), Ok(Some(thousandths)), "{text}");
    }
    for bad in [
        "",
        "%",
        "50",
        "0%",
        "0.0%",
        "102400.1%",
        "-1%",
        "+1%",
        "1.%",
        ".5%",
        "1.25%",
        "5 %",
        "1e2%",
        "99999999999999999999%",
    ] {
        assert!(WrittenAmount::new(bad).cpu().is_err(), "{bad}");
    }
    for (text, bytes) in
        [("1", 1), ("4K", 4096), ("5M", 5 << 20), ("1.5G", 3 << 29), ("2T", 2 << 40), ("4KiB", 4096)]
    {
        assert_eq!(WrittenAmount::new(text).rate(), Ok(Some(bytes)), "{text}");
    }
    for bad in ["", "0", "K", "5m", "5KB", "-1", "5M/s", "1e9", "99999999T"] {
        assert!(WrittenAmount::new(bad).rate().is_err(), "{bad}");
    }
    assert_eq!(WrittenAmount::new("1M").memory(), Ok(Some(MEMORY_MIN)));
    assert!(WrittenAmount::new("1023K").memory().is_err());
    assert_eq!(WrittenAmount::new("4194304").processes(), Ok(Some(PROCESSES_MAX)));
    for bad in ["0", "4194305", "5K", "-1", "+1", "", "1.5"] {
        assert!(WrittenAmount::new(bad).processes().is_err(), "{bad}");
    }
    assert_eq!(WrittenAmount::new("4294967295").iops(), Ok(Some(IOPS_MAX)));
    assert!(WrittenAmount::new("4294967296").iops().is_err());
}

#[test]
fn a_shape_that_is_none_is_refused() {
    for json in
        [r#"{"cpu":true}"#, r#"{"cpu":-5}"#, r#"{"read":1.5}"#, r#"{"cpu":["50%"]}"#, r#"{"colour":1}"#]
    {
        assert!(serde_json::from_str::<CellLimits>(json).is_err(), "{json}");
    }
    let long = format!(r#"{{"cpu":"{}"}}"#, "5".repeat(100));
    assert!(serde_json::from_str::<CellLimits>(&long).is_err());
}

#[test]
fn a_demotion_says_after_how_much_cpu_time() {
    let step = |after: &str| WrittenDemotion { after_cpu: after.into(), limits: read(r#"{"cpu":"10%"}"#) };
    let read = step("1.5s").demotion().unwrap();
    assert_eq!((read.after_cpu_us, read.limits.cpu), (1_500_000, Some(CpuQuota::of_core(100))));
    for bad in ["", "5", "0s", "0.5ms", "x", "-1s"] {
        assert_eq!(step(bad).demotion(), None, "{bad}");
    }
}

fn any_amount() -> impl Strategy<Value = WrittenAmount> {
    prop_oneof![
        any::<u64>().prop_map(WrittenAmount::from),
        "[0-9]{1,4}(\\.[0-9])?[KMGT%]?".prop_map(|text| WrittenAmount::new(&text)),
        Just(WrittenAmount::new(UNLIMITED)),
        "[ -~]{0,12}".prop_map(|text| WrittenAmount::new(&text)),
    ]
}

prop_compose! {
    fn any_device()(read in proptest::option::of(any_amount()), write in proptest::option::of(any_amount()),
        read_iops in proptest::option::of(any_amount()), write_iops in proptest::option::of(any_amount()))
        -> DeviceLimits { DeviceLimits { read, write, read_iops, write_iops } }
}

prop_compose! {
    fn any_limits()(cpu in proptest::option::of(any_amount()), cpu_shares in any::<Option<u32>>(),
        root in any_device(), processes in proptest::option::of(any_amount()),
        memory in proptest::option::of(any_amount()),
        devices in proptest::collection::btree_map("[0-9:]{1,5}", any_device(), 0..3)) -> CellLimits {
        let DeviceLimits { read, write, read_iops, write_iops } = root;
        CellLimits { cpu, cpu_shares, read, write, read_iops, write_iops, processes, memory, devices }
    }
}

proptest! {
    #[test]
    fn whatever_is_written_is_read_as_it_was(limits in any_limits()) {
        let json = serde_json::to_string(&limits).unwrap();
        prop_assert_eq!(serde_json::from_str::<CellLimits>(&json).unwrap(), limits);
    }

    #[test]
    fn numbers_that_come_of_it_are_ones_the_kernel_takes(limits in any_limits()) {
        let numbers = limits.limits();
        if let Some(cpu) = numbers.cpu {
            prop_assert!(cpu.quota_us >= crate::cell::CPU_QUOTA_MIN_US);
        }
        prop_assert!(numbers.processes.is_none_or(|n| (1..=PROCESSES_MAX).contains(&n)));
        prop_assert!(numbers.memory.is_none_or(|n| n >= MEMORY_MIN));
        for io in &numbers.io {
            prop_assert!(*io != IoLimit::of(io.device));
        }
    }
}
