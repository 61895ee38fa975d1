//! Tests of the ledger: shared rates, and CPU time that a cell pays for over its busy time.

use super::*;

fn tenant() -> TenantName {
    TenantName::try_from("demo".to_owned()).unwrap()
}

fn reading(rate: u64) -> Limits {
    Limits { io: vec![IoLimit { read_bps: Some(rate), ..IoLimit::of(Device::Root) }], ..Limits::default() }
}

fn named(limits: Option<Limits>) -> NamedCell {
    let controllers = vec![Controller::Cpu, Controller::Blkio];
    NamedCell { name: CellName::parse("slow").unwrap(), scope: Scope::Node, controllers, limits }
}

fn half() -> Limits {
    Limits { cpu: Some(CpuQuota::of_core(500)), ..Limits::default() }
}

#[tokio::test(start_paused = true)]
async fn requests_of_one_cell_share_its_rate_and_the_newest_limit_holds() {
    let ledger = Ledger::default();
    let bucket = |rate| ledger.bucket(Shared::Tenant(tenant()), &reading(rate), Way::Out).unwrap();
    let first = bucket(1000);
    first.take(1000);
    let second = bucket(500);
    assert_eq!(second.take(1) - Instant::now(), Duration::from_secs(1), "behind the first one's bytes");
    assert_eq!(first.rate(), 500);
    assert!(ledger.bucket(Shared::Tenant(tenant()), &reading(1), Way::In).is_none(), "no write limit");
}

#[test]
fn the_lowest_rate_of_all_disks_holds() {
    let disk = |minor, read_bps| IoLimit { read_bps, ..IoLimit::of(Device::Number { major: 8, minor }) };
    let limits = Limits { io: vec![disk(0, Some(7)), disk(1, Some(3)), disk(2, None)], ..Limits::default() };
    assert_eq!((rate(&limits, Way::Out), rate(&limits, Way::In)), (Some(3), None));
}

#[tokio::test(start_paused = true)]
async fn a_named_cell_joined_as_it_is_has_the_limits_others_gave_it() {
    let ledger = Ledger::default();
    assert!(ledger.named_bucket(&named(None), &tenant(), Way::Out).is_none(), "nobody set any");
    ledger.named_bucket(&named(Some(reading(10))), &tenant(), Way::Out).unwrap();
    assert_eq!(ledger.named_bucket(&named(None), &tenant(), Way::Out).unwrap().rate(), 10);
    let name = CellName::parse("slow").unwrap();
    let controllers = vec![Controller::Blkio];
    ledger.note(&[CellChange::Set {
        name: name.clone(),
        controllers: controllers.clone(),
        limits: reading(20),
    }]);
    assert_eq!(ledger.named_bucket(&named(None), &tenant(), Way::Out).unwrap().rate(), 20);
    let cpu = CellChange::Set { name: name.clone(), controllers: vec![Controller::Cpu], limits: half() };
    ledger.note(&[cpu]);
    assert_eq!(ledger.named_bucket(&named(None), &tenant(), Way::Out).unwrap().rate(), 20, "that is apart");
    let known = ledger.limits(&named(None), &tenant());
    assert_eq!(known, Limits { io: reading(20).io, ..half() });
    ledger.note(&[CellChange::Drop { name, controllers }]);
    assert_eq!(Arc::new(ledger).enter(&[named(None)], &tenant()).len(), 1, "its quota is still there");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_cell_limits_nothing() {
    let ledger = Ledger::default();
    ledger.named_bucket(&named(Some(reading(10))), &tenant(), Way::Out).unwrap();
    let (name, controllers) = (CellName::parse("slow").unwrap(), Controller::ALL.to_vec());
    ledger.note(&[CellChange::Drop { name, controllers }]);
    assert!(ledger.named_bucket(&named(None), &tenant(), Way::Out).is_none());
    let only_cpu = NamedCell { controllers: vec![Controller::Cpu], ..named(Some(reading(10))) };
    assert!(ledger.named_bucket(&only_cpu, &tenant(), Way::Out).is_none(), "not joined for its disk limits");
}

#[tokio::test(start_paused = true)]
async fn short_programs_of_a_cell_pay_one_after_the_other() {
    let ledger = Arc::new(Ledger::default());
    let start = Instant::now();
    let enter = || ledger.enter(&[named(Some(half()))], &tenant()).pop().expect("it has a quota");
    let (first, second) = (enter(), enter());
    let at = |entered: &Entered| entered.charge(1000).unwrap() - start;
    assert_eq!(at(&first), Duration::from_millis(2));
    assert_eq!(at(&second), Duration::from_millis(4), "together they may use half a core");
    drop((first, second));
    assert_eq!(at(&enter()), Duration::from_millis(6), "the cell is still paying");
    tokio::time::advance(Duration::from_secs(1)).await;
    let start = Instant::now();
    assert_eq!(enter().charge(1000).unwrap() - start, Duration::from_millis(2), "an idle time is no credit");
}

#[tokio::test(start_paused = true)]
async fn what_a_long_program_used_is_not_charged_on_top_of_its_own_time() {
    let ledger = Arc::new(Ledger::default());
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
    let ledger = Arc::new(Ledger::default());
    assert!(ledger.enter(&[named(None)], &tenant()).is_empty());
    assert!(ledger.enter(&[named(Some(reading(1)))], &tenant()).is_empty());
    assert!(ledger.enter(&[], &tenant()).is_empty());
}

#[tokio::test(start_paused = true)]
async fn idle_cells_make_room_for_others() {
    let ledger = Ledger::default();
    let cell = |n: usize| Shared::Named(None, CellName::parse(&format!("c{n}")).unwrap());
    let kept = ledger.bucket(cell(0), &reading(1), Way::Out).unwrap();
    for n in 1..CELLS_MAX {
        ledger.bucket(cell(n), &reading(1), Way::Out).unwrap();
    }
    assert!(ledger.bucket(cell(CELLS_MAX), &reading(1), Way::Out).is_none(), "all were used just now");
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(ledger.bucket(cell(CELLS_MAX), &reading(1), Way::Out).is_some());
    kept.take(5);
    let again = ledger.bucket(cell(0), &reading(1), Way::Out).unwrap();
    assert!(Arc::ptr_eq(&kept, &again), "one in use is not forgotten");
    assert_eq!(ledger.cells.lock().len(), 2);
}
