//! The first seconds after the machine has become slower or faster: quick kinds that always come, and slow reports that come in bursts.
//!
//! Not here: how well waits are told once all kinds have been seen again (`prediction`).

use super::*;

const QUICK_AND_REPORTS: &[Kind] = &[
    Kind::new(1, 60, 6_000.0, 0.2),
    Kind::new(2, 30, 10_000.0, 0.3),
    Kind::new(3, 10, 20_000.0, 0.3),
    Kind::new(9, 0, 200_000.0, 0.2),
];
/// Some of which come about once in a second.
const MANY_AND_REPORTS: &[Kind] = &[
    Kind::new(1, 30, 6_000.0, 0.2),
    Kind::new(2, 20, 7_000.0, 0.3),
    Kind::new(3, 20, 10_000.0, 0.3),
    Kind::new(4, 15, 8_000.0, 0.3),
    Kind::new(5, 10, 12_000.0, 0.3),
    Kind::new(6, 4, 20_000.0, 0.3),
    Kind::new(7, 1, 100_000.0, 0.3),
    Kind::new(9, 0, 200_000.0, 0.2),
];
const VARIED_AND_REPORTS: &[Kind] = &[
    Kind::new(1, 60, 6_000.0, 0.8),
    Kind::new(2, 30, 10_000.0, 0.8),
    Kind::new(3, 10, 20_000.0, 0.8),
    Kind::new(9, 0, 200_000.0, 0.5),
];
/// Reports wait for another machine: the more of them run, the fewer of the others share the processors.
const QUICK_AND_REMOTE_REPORTS: &[Kind] = &[
    Kind::new(1, 60, 6_000.0, 0.2),
    Kind::new(2, 30, 10_000.0, 0.3),
    Kind::new(3, 10, 20_000.0, 0.3),
    Kind { sleep_us: 1_000_000.0, ..Kind::new(9, 0, 2_000.0, 0.2) },
];

/// When the step comes: every kind has been seen often by then.
const STEP: u64 = 97;
/// Seconds from the step on that are looked at: two bursts of reports.
const AFTER: u64 = 20;

fn mixed(kinds: &'static [Kind], speed: f64, class: Option<u32>) -> Scenario {
    let crowd = Crowd::ClosedAndBursts { clients: 100, pause_us: 1_000.0, count: 8, every_us: 10e6 };
    let step = Some(Step { second: STEP, speed, class });
    // So that nobody is still in line who came in the time that is looked at.
    Scenario { step, ..shared("", kinds, crowd).seconds(STEP + AFTER + 15) }
}

/// Fails unless nine of ten waits that began right after the step were told within this error.
fn first_seconds(name: &str, scenario: &Scenario, p90: f64) {
    with_seeds([SEED], |seed| {
        let mut after = Vec::new();
        for at in 0..TOGETHER {
            let world = World::new(scenario.clone(), TOGETHER * seed + at).run();
            let until = world.begin + (STEP + AFTER) * 1_000_000;
            after.extend(world.outcomes_from(STEP).into_iter().filter(|outcome| outcome.at < until));
        }
        let errors = Errors::of(name, after.iter());
        assert!(errors.count > 500 && errors.p90 < p90, "error p90 {}", errors.p90);
    });
}

#[test]
fn reports_go_along_with_a_step_before_one_of_them_has_ended() {
    first_seconds("quick ones and reports, slower", &mixed(QUICK_AND_REPORTS, 0.5, None), 14.0);
    first_seconds("quick ones and reports, faster", &mixed(QUICK_AND_REPORTS, 2.0, None), 9.0);
    first_seconds("many kinds and reports, slower", &mixed(MANY_AND_REPORTS, 0.5, None), 20.0);
    first_seconds("many kinds and reports, faster", &mixed(MANY_AND_REPORTS, 2.0, None), 13.0);
}

#[test]
fn requests_that_vary_make_no_step_worse_than_it_is() {
    first_seconds("varied ones and reports, slower", &mixed(VARIED_AND_REPORTS, 0.5, None), 38.0);
    first_seconds("varied ones and reports, faster", &mixed(VARIED_AND_REPORTS, 2.0, None), 36.0);
    first_seconds("varied ones and reports, as before", &mixed(VARIED_AND_REPORTS, 1.0, None), 26.0);
}

#[test]
fn a_kind_that_becomes_slower_alone_takes_no_other_with_it() {
    first_seconds("reads alone, slower", &mixed(QUICK_AND_REPORTS, 0.5, Some(1)), 14.0);
    first_seconds("reads alone, faster", &mixed(QUICK_AND_REPORTS, 2.0, Some(1)), 14.0);
}

#[test]
fn quick_requests_among_sleepers_say_little_of_these() {
    first_seconds("remote reports, as before", &mixed(QUICK_AND_REMOTE_REPORTS, 1.0, None), 50.0);
    first_seconds("remote reports, slower", &mixed(QUICK_AND_REMOTE_REPORTS, 0.5, None), 75.0);
}
