//! What a lane learns, fed by hand.

use super::*;

const MS: f64 = 1_000.0;

fn at(ms: u64) -> Moment {
    Moment(1_000_000_000 + ms * 1_000)
}

#[test]
fn nothing_is_known_of_a_lane_in_which_nothing_has_run() {
    let mut learned = LaneStats::default();
    let slot = learned.slot(at(0), CostClass(1));
    learned.starts(at(0), slot);
    learned.waits(slot);
    assert_eq!((learned.work_in_line(), learned.turn(at(50), 1.0, 1.0, 0)), (None, None));
    assert_eq!((learned.expected(slot), learned.ends_per_second()), (None, None));
}

#[test]
fn each_kind_costs_what_it_costs() {
    let mut learned = LaneStats::default();
    let read = learned.slot(at(0), CostClass(1));
    let report = learned.slot(at(0), CostClass(2));
    for step in 0..100 {
        learned.learn(at(step), read, 5.0 * MS, LoadPeriod::Queued);
        if step % 10 == 0 {
            learned.learn(at(step), report, 500.0 * MS, LoadPeriod::Queued);
        }
    }
    for _ in 0..20 {
        learned.waits(read);
    }
    learned.waits(report);
    let work = learned.work_in_line().expect("both kinds are known");
    assert!((work - 600.0 * MS).abs() < MS, "{work}");
    learned.waits_no_more(report);
    let work = learned.work_in_line().expect("both kinds are known");
    assert!((work - 100.0 * MS).abs() < MS, "{work}");
    assert_eq!(learned.expected(read).map(f64::round), Some(5.0 * MS));
}

#[test]
fn elapsed_time_counts_as_done_if_all_take_equally_long() {
    let mut learned = LaneStats::default();
    let slot = learned.slot(at(0), CostClass(1));
    for step in 0..100 {
        learned.learn(at(step), slot, 100.0 * MS, LoadPeriod::Queued);
    }
    learned.starts(at(1_000), slot);
    let turn = |learned: &LaneStats, ms| learned.turn(at(ms), 1.0, 1.0, 0).expect("the kind is known");
    assert!((turn(&learned, 1_060) - 40.0 * MS).abs() < MS);
    // It should have ended: soon, but nobody knows when.
    assert!((turn(&learned, 1_200) - 5.0 * MS).abs() < MS);
    learned.waits(slot);
    learned.waits(slot);
    assert!((turn(&learned, 1_060) - 240.0 * MS).abs() < 5.0 * MS, "{}", turn(&learned, 1_060));
    let played =
        learned.turn_played(at(1_060), [(slot, at(1_000))].into_iter(), 0, 0, [slot, slot].into_iter());
    assert!(played.is_some_and(|turn| (turn - 240.0 * MS).abs() < MS), "{played:?}");
    let half = learned.turn(at(1_060), 0.5, 1.0, 0).expect("the kind is known");
    assert!((half - 140.0 * MS).abs() < 5.0 * MS, "{half}");
}

#[test]
fn a_lent_permit_that_outlasts_quick_requests_is_a_slow_one() {
    let mut learned = LaneStats::default();
    let read = learned.slot(at(0), CostClass(1));
    let report = learned.slot(at(0), CostClass(2));
    for step in 0..100u64 {
        learned.slot(at(step), CostClass(1));
        // A tenth more or less.
        let part = 0.9 + (step % 3) as f64 / 10.0;
        learned.learn(at(step), read, 10.0 * MS * part, LoadPeriod::Queued);
        learned.learn(at(step), report, 1_000.0 * MS * part, LoadPeriod::Queued);
    }
    // Beside the lent one, one that has just begun.
    learned.starts(at(1_000), read);
    learned.lent_are_recalled(at(1_000));
    learned.ends(read, at(1_000));
    let turn = |learned: &LaneStats, ms| {
        let played = learned.turn_played(at(ms), std::iter::empty(), 1, 0, std::iter::empty());
        (played.expect("kinds are known") / MS, learned.turn(at(ms), 1.0, 1.0, 1).expect("likewise") / MS)
    };
    let (played, _) = turn(&learned, 1_001);
    assert!((8.0..10.0).contains(&played), "as most are, a read: {played}");
    let (played, summed) = turn(&learned, 1_100);
    assert!((890.0..910.0).contains(&played) && (700.0..910.0).contains(&summed), "{played} {summed}");
}

#[test]
fn further_kinds_share_a_slot_until_one_is_idle() {
    let mut learned = LaneStats::default();
    let slots: Vec<ClassSlot> = (0..40).map(|class| learned.slot(at(0), CostClass(class))).collect();
    assert_eq!(slots[CLASSES..].iter().filter(|slot| **slot == slots[CLASSES]).count(), 8);
    assert_ne!(slots[0], slots[1]);
    learned.waits(slots[0]);
    let much_later = Moment(at(0).0 + CLASS_IDLE_US + 1);
    assert_eq!(
        learned.slot(much_later, CostClass(100)),
        slots[1],
        "the first idle one, in which nobody waits"
    );
    assert_eq!(learned.slot(much_later, CostClass(0)), slots[0]);
}

#[test]
fn the_rate_is_that_of_the_time_with_a_line() {
    let mut learned = LaneStats::default();
    learned.line_begins(at(0), 10);
    for step in 1..=300 {
        learned.pass_time_in_line(at(step * 10), if step % 2 == 0 { 8 } else { 10 });
        learned.ended_in_line();
    }
    let rate = learned.ends_per_second().expect("three seconds have passed");
    assert!((rate - 100.0).abs() < 2.0, "{rate}");
    assert!((learned.running_in_line() - 9.0).abs() < 0.6, "{}", learned.running_in_line());
    // An hour without a line is no hour without work done.
    learned.line_begins(at(3_600_000), 4);
    assert_eq!(learned.ends_per_second(), None);
    assert!((learned.running_in_line() - 4.0).abs() < 1e-9);
}

#[test]
fn a_line_after_quiet_uses_the_pace_of_the_last_one() {
    let mut learned = LaneStats::default();
    let read = learned.slot(at(0), CostClass(1));
    let report = learned.slot(at(0), CostClass(2));
    for step in 0..50 {
        learned.learn(at(step), read, 10.0 * MS, LoadPeriod::Calm);
        learned.learn(at(step), report, 100.0 * MS, LoadPeriod::Calm);
    }
    learned.waits(report);
    assert!(!learned.is_known(), "nobody knows what a line does to them");
    assert_eq!(learned.expected(report).map(f64::round), Some(100.0 * MS), "a guess to decide by");
    for step in 50..100 {
        learned.learn(at(step), read, 40.0 * MS, LoadPeriod::Queued);
    }
    let expected = learned.expected(report).expect("it is known");
    assert!((expected / (400.0 * MS) - 1.0).abs() < 0.01, "{expected}");
    assert!(learned.is_known());
    // What it has taken in a line says more.
    learned.learn(at(100), report, 300.0 * MS, LoadPeriod::Queued);
    assert_eq!(learned.expected(report).map(f64::round), Some(300.0 * MS));
}

#[test]
fn run_that_outlasts_its_line_counts_for_neither_pace() {
    let mut learned = LaneStats::default();
    learned.line_begins(at(0), 10);
    learned.pass_time_in_line(at(500), 10);
    let times = [(100, true), (500, false), (501, false)]
        .map(|(began, is_queued)| learned.times(at(began), is_queued));
    assert_eq!(times, [LoadPeriod::Queued, LoadPeriod::Between, LoadPeriod::Calm]);
    let slot = learned.slot(at(600), CostClass(1));
    learned.learn(at(600), slot, 70.0 * MS, LoadPeriod::Between);
    assert_eq!(learned.expected(slot).map(f64::round), Some(70.0 * MS), "better than nothing");
    learned.learn(at(600), slot, 10.0 * MS, LoadPeriod::Between);
    assert_eq!(learned.expected(slot).map(f64::round), Some(70.0 * MS));
}

#[test]
fn a_wait_behind_kinds_of_which_nothing_is_known_is_not_told() {
    let mut learned = LaneStats::default();
    let known = learned.slot(at(0), CostClass(1));
    learned.learn(at(0), known, 50.0 * MS, LoadPeriod::Queued);
    for _ in 0..9 {
        learned.waits(known);
    }
    let unknown = learned.slot(at(0), CostClass(2));
    learned.waits(unknown);
    assert!(learned.is_known(), "one of ten");
    learned.waits(unknown);
    assert!(
        !learned.is_known() && learned.work_in_line().is_some(),
        "what is decided by is there all the same"
    );
    // Where all kinds have turned out alike, the next one will too.
    for class in 3..10 {
        assert!(!learned.is_known());
        let slot = learned.slot(at(0), CostClass(class));
        learned.learn(at(0), slot, (45.0 + f64::from(class)) * MS, LoadPeriod::Queued);
    }
    assert!(learned.is_known());
    learned.learn(at(0), known, 5_000.0 * MS, LoadPeriod::Queued);
    assert!(learned.is_known(), "all but one");
    let other = learned.slot(at(0), CostClass(3));
    learned.learn(at(0), other, 5_000.0 * MS, LoadPeriod::Queued);
    assert!(!learned.is_known());
}
