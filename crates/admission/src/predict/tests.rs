//! What a lane learns, fed by hand.

use super::*;

const MS: f64 = 1_000.0;

fn at(ms: u64) -> Moment {
    Moment(1_000_000_000 + ms * 1_000)
}

#[test]
fn nothing_is_known_of_a_lane_in_which_nothing_has_run() {
    let mut learned = Learned::default();
    let slot = learned.slot(at(0), Class(1));
    learned.starts(at(0), slot);
    learned.waits(slot);
    assert_eq!((learned.work_in_line(), learned.turn(at(50), 1.0, 1.0, 0)), (None, None));
    assert_eq!((learned.expected(slot), learned.ends_per_second()), (None, None));
}

#[test]
fn each_kind_costs_what_it_costs() {
    let mut learned = Learned::default();
    let (read, report) = (learned.slot(at(0), Class(1)), learned.slot(at(0), Class(2)));
    for step in 0..100 {
        learned.learn(at(step), read, 5.0 * MS, true);
        if step % 10 == 0 {
            learned.learn(at(step), report, 500.0 * MS, true);
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
fn what_has_run_is_done_if_all_take_equally_long() {
    let mut learned = Learned::default();
    let slot = learned.slot(at(0), Class(1));
    for step in 0..100 {
        learned.learn(at(step), slot, 100.0 * MS, true);
    }
    learned.starts(at(1_000), slot);
    let turn = |learned: &Learned, ms| learned.turn(at(ms), 1.0, 1.0, 0).expect("the kind is known");
    assert!((turn(&learned, 1_060) - 40.0 * MS).abs() < MS);
    // It should have ended: soon, but nobody knows when.
    assert!((turn(&learned, 1_200) - 5.0 * MS).abs() < MS);
    learned.waits(slot);
    learned.waits(slot);
    assert!((turn(&learned, 1_060) - 240.0 * MS).abs() < 5.0 * MS, "{}", turn(&learned, 1_060));
    let played = learned.turn_played(at(1_060), [(slot, at(1_000))].into_iter(), 0, [slot, slot].into_iter());
    assert!(played.is_some_and(|turn| (turn - 240.0 * MS).abs() < MS), "{played:?}");
    let half = learned.turn(at(1_060), 0.5, 1.0, 0).expect("the kind is known");
    assert!((half - 140.0 * MS).abs() < 5.0 * MS, "{half}");
}

#[test]
fn further_kinds_share_a_slot_until_one_is_idle() {
    let mut learned = Learned::default();
    let slots: Vec<Slot> = (0..40).map(|class| learned.slot(at(0), Class(class))).collect();
    assert_eq!(slots[CLASSES..].iter().filter(|slot| **slot == slots[CLASSES]).count(), 8);
    assert_ne!(slots[0], slots[1]);
    learned.waits(slots[0]);
    let much_later = Moment(at(0).0 + CLASS_IDLE_US + 1);
    assert_eq!(learned.slot(much_later, Class(100)), slots[1], "the first idle one, in which nobody waits");
    assert_eq!(learned.slot(much_later, Class(0)), slots[0]);
}

#[test]
fn the_rate_is_that_of_the_time_with_a_line() {
    let mut learned = Learned::default();
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
