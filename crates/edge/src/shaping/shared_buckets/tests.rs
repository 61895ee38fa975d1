//! Tests of the ledger: shared rates, and CPU time that a cell pays for over its busy time.

use super::*;

fn tenant() -> TenantName {
    TenantName::try_from("demo".to_owned()).unwrap()
}

fn reading(rate: u64) -> LimitSet {
    LimitSet {
        io: vec![IoLimit { read_bps: Some(rate), ..IoLimit::of(Device::Root) }],
        ..LimitSet::default()
    }
}

fn named(limits: Option<LimitSet>) -> NamedCell {
    let controllers = vec![CgroupController::Cpu, CgroupController::Blkio];
    NamedCell { name: CellName::parse("slow").unwrap(), scope: CellScope::Node, controllers, limits }
}

fn half() -> LimitSet {
    LimitSet { cpu: Some(CpuQuota::of_core(500)), ..LimitSet::default() }
}

#[tokio::test(start_paused = true)]
async fn requests_of_a_cell_share_its_rate_under_the_newest_limit() {
    let ledger = SharedBuckets::default();
    let bucket =
        |rate| ledger.bucket(SharedCell::Tenant(tenant()), &reading(rate), BodyDirection::Out).unwrap();
    let first = bucket(1000);
    first.take(1000);
    let second = bucket(500);
    assert_eq!(second.take(1) - Instant::now(), Duration::from_secs(1), "behind the first one's bytes");
    assert_eq!(first.rate(), 500);
    assert!(
        ledger.bucket(SharedCell::Tenant(tenant()), &reading(1), BodyDirection::In).is_none(),
        "no write limit"
    );
}

#[test]
fn the_lowest_rate_of_all_disks_holds() {
    let disk = |minor, read_bps| IoLimit { read_bps, ..IoLimit::of(Device::Number { major: 8, minor }) };
    let limits =
        LimitSet { io: vec![disk(0, Some(7)), disk(1, Some(3)), disk(2, None)], ..LimitSet::default() };
    assert_eq!((rate(&limits, BodyDirection::Out), rate(&limits, BodyDirection::In)), (Some(3), None));
}

#[tokio::test(start_paused = true)]
async fn a_named_cell_joined_as_it_is_has_the_limits_others_gave_it() {
    let ledger = SharedBuckets::default();
    assert!(ledger.named_bucket(&named(None), &tenant(), BodyDirection::Out).is_none(), "nobody set any");
    ledger.named_bucket(&named(Some(reading(10))), &tenant(), BodyDirection::Out).unwrap();
    assert_eq!(ledger.named_bucket(&named(None), &tenant(), BodyDirection::Out).unwrap().rate(), 10);
    let name = CellName::parse("slow").unwrap();
    let controllers = vec![CgroupController::Blkio];
    ledger.note(&[CellChange::Set {
        name: name.clone(),
        controllers: controllers.clone(),
        limits: reading(20),
    }]);
    assert_eq!(ledger.named_bucket(&named(None), &tenant(), BodyDirection::Out).unwrap().rate(), 20);
    let cpu =
        CellChange::Set { name: name.clone(), controllers: vec![CgroupController::Cpu], limits: half() };
    ledger.note(&[cpu]);
    assert_eq!(
        ledger.named_bucket(&named(None), &tenant(), BodyDirection::Out).unwrap().rate(),
        20,
        "that is apart"
    );
    let known = ledger.limits(&named(None), &tenant());
    assert_eq!(known, LimitSet { io: reading(20).io, ..half() });
    ledger.note(&[CellChange::Drop { name, controllers }]);
    assert_eq!(Arc::new(ledger).enter(&[named(None)], &tenant()).len(), 1, "its quota is still there");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_cell_limits_nothing() {
    let ledger = SharedBuckets::default();
    ledger.named_bucket(&named(Some(reading(10))), &tenant(), BodyDirection::Out).unwrap();
    let (name, controllers) = (CellName::parse("slow").unwrap(), CgroupController::ALL.to_vec());
    ledger.note(&[CellChange::Drop { name, controllers }]);
    assert!(ledger.named_bucket(&named(None), &tenant(), BodyDirection::Out).is_none());
    let only_cpu = NamedCell { controllers: vec![CgroupController::Cpu], ..named(Some(reading(10))) };
    assert!(
        ledger.named_bucket(&only_cpu, &tenant(), BodyDirection::Out).is_none(),
        "not joined for its disk limits"
    );
}

#[tokio::test(start_paused = true)]
async fn short_programs_of_a_cell_pay_one_after_the_other() {
    let ledger = Arc::new(SharedBuckets::default());
    let start = Instant::now();
    let enter = || ledger.enter(&[named(Some(half()))], &tenant()).pop().expect("it has a quota");
    let (first, second) = (enter(), enter());
    let at = |entered: &CellCharge| entered.charge(1000).unwrap() - start;
    assert_eq!(at(&first), Duration::from_millis(2));
    assert_eq!(at(&second), Duration::from_millis(4), "together they may use half a core");
    drop((first, second));
    assert_eq!(at(&enter()), Duration::from_millis(6), "the cell is still paying");
    tokio::time::advance(Duration::from_secs(1)).await;
    let start = Instant::now();
    assert_eq!(enter().charge(1000).unwrap() - start, Duration::from_millis(2), "an idle time is no credit");
}

#[tokio::test(start_paused = true)]
async fn long_program_is_not_charged_on_top_of_its_own_time() {
    let ledger = Arc::new(SharedBuckets::default());
    let start = Instant::now();
    let enter = || ledger.enter(&[named(Some(half()))], &tenant()).pop().expect("it has a quota");
    let long = enter();
    tokio::time::advance(Duration::from_millis(100)).await;
    enter().charge(5_000);
    tokio::time::advance(Duration::from_millis(900)).await;
    assert_eq!(long.charge(500_000).unwrap() - start, Duration::from_millis(1010));
}

#[tokio::test(start_paused = true)]
async fn without_a_quota_nothing_is_charged() {
    let ledger = Arc::new(SharedBuckets::default());
    assert!(ledger.enter(&[named(None)], &tenant()).is_empty());
    assert!(ledger.enter(&[named(Some(reading(1)))], &tenant()).is_empty());
    assert!(ledger.enter(&[], &tenant()).is_empty());
}

#[tokio::test(start_paused = true)]
async fn idle_cells_make_room_for_others() {
    let ledger = SharedBuckets::default();
    let cell = |n: usize| SharedCell::Named(None, CellName::parse(&format!("c{n}")).unwrap());
    let kept = ledger.bucket(cell(0), &reading(1), BodyDirection::Out).unwrap();
    for n in 1..CELLS_MAX {
        ledger.bucket(cell(n), &reading(1), BodyDirection::Out).unwrap();
    }
    assert!(
        ledger.bucket(cell(CELLS_MAX), &reading(1), BodyDirection::Out).is_none(),
        "all were used just now"
    );
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(ledger.bucket(cell(CELLS_MAX), &reading(1), BodyDirection::Out).is_some());
    kept.take(5);
    let again = ledger.bucket(cell(0), &reading(1), BodyDirection::Out).unwrap();
    assert!(Arc::ptr_eq(&kept, &again), "one in use is not forgotten");
    assert_eq!(ledger.cells.lock().len(), 2);
}
