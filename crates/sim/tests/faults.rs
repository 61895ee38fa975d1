//! Small clusters under all faults at once, from many seeds, and mistakes that must be found.
//!
//! `NAGAYA_SIM_SEED=N cargo test -p nagaya-sim` runs one seed alone, e.g. the one that a failure has printed; `N..M` runs those from N
//! up to, not including, M.

use std::time::Duration;

use nagaya_sim::{FaultKinds, PlantedFlaws, SafetyViolation, SimWorld, WorldReport, WorldShape};

const SEEDS: u64 = 60;
/// A mistake has to be found within so many seeds.
const SEEDS_TO_FIND: u64 = 400;

fn shape(seed: u64, copies_max: u32, flaws: PlantedFlaws) -> WorldShape {
    let nodes = 3 + (seed % 4) as u32;
    // From a bad minute to a bad quarter of an hour.
    let every = Duration::from_millis(150 + 350 * (seed % 3));
    let faults = FaultKinds { every, ..FaultKinds::ALL };
    WorldShape { seed, nodes, sites: 12, copies_max, faults, watch_every: Duration::from_millis(5), flaws }
}

/// A spell of requests under faults, then peace, in which all has to be as it should be.
fn run(seed: u64, flaws: PlantedFlaws) -> WorldReport {
    run_several(seed, 1, flaws)
}

/// Where so many nodes may have one site.
fn run_several(seed: u64, copies_max: u32, flaws: PlantedFlaws) -> WorldReport {
    let mut world = SimWorld::new(shape(seed, copies_max, flaws));
    world.run(Duration::from_secs(3));
    world.faults(true);
    for _ in 0..4_000 {
        world.request_any();
        world.run(Duration::from_millis(5));
        if !world.violations().is_empty() {
            return world.report();
        }
    }
    world.heal_and_check();
    world.report()
}

fn seeds(count: u64) -> Vec<u64> {
    let Ok(wanted) = std::env::var("NAGAYA_SIM_SEED") else { return (1..=count).collect() };
    let number = |text: &str| text.parse().expect("NAGAYA_SIM_SEED is a number, or two with .. between");
    match wanted.split_once("..") {
        Some((first, end)) => (number(first)..number(end)).collect(),
        None => vec![number(&wanted)],
    }
}

#[track_caller]
fn without_violations(seed: u64, report: &WorldReport) {
    if let Some(first) = report.violations.first() {
        panic!("{first}\nthis seed again: NAGAYA_SIM_SEED={seed} cargo test -p nagaya-sim");
    }
}

#[test]
fn one_epoch_serves_and_every_request_ends_whatever_fails() {
    let mut answers = 0;
    let mut refusals = 0;
    let mut relocations = 0;
    let mut vouched = 0;
    let mut forgotten = 0;
    let mut marked = 0;
    let mut latest = Duration::ZERO;
    let seeds = seeds(SEEDS);
    for seed in seeds.iter().copied() {
        let report = run(seed, PlantedFlaws::default());
        without_violations(seed, &report);
        answers += report.answers;
        refusals += report.refusals.values().sum::<u64>();
        relocations += report.relocations;
        vouched += report.vouched;
        forgotten += report.forgotten;
        marked += report.marked;
        latest = latest.max(report.latest);
    }
    println!(
        "{answers} answers, {refusals} refusals, {relocations} relocations, {marked} by a mark, {vouched} vouched, {forgotten} removed for good, latest {latest:?}"
    );
    // Nothing was proved if nothing went on. Of one seed alone that is no matter.
    if seeds.len() > 1 {
        assert!(answers > refusals * 3, "{answers} answers, {refusals} refusals");
        assert!(forgotten > 0, "no removed site was away for long");
        assert!(
            marked * 10 > relocations,
            "{marked} of {relocations} relocations waited less because of a mark"
        );
    }
}

#[test]
fn of_several_nodes_that_have_a_site_no_more_serve_than_may() {
    let mut answers = 0;
    let mut refusals = 0;
    let mut copied = 0;
    let mut relocations = 0;
    let seeds = seeds(SEEDS);
    for seed in seeds.iter().copied() {
        let report = run_several(seed, 2 + (seed % 2) as u32, PlantedFlaws::default());
        without_violations(seed, &report);
        answers += report.answers;
        refusals += report.refusals.values().sum::<u64>();
        copied += report.copied;
        relocations += report.relocations;
    }
    println!("{answers} answers, {refusals} refusals, {copied} times more or fewer, {relocations} changes");
    if seeds.len() > 1 {
        assert!(answers > refusals * 3, "{answers} answers, {refusals} refusals");
        assert!(copied > 0 && relocations > copied, "nothing was proved");
    }
}

#[test]
fn a_copy_that_is_served_without_the_wait_is_found_out() {
    let flaws = PlantedFlaws { no_wait: true, ..PlantedFlaws::default() };
    let is_found = |seed| {
        let report = run_several(seed, 2, flaws);
        report.violations.iter().any(|violation| matches!(violation, SafetyViolation::TooMany { .. }))
    };
    // Seldom: one of some 700 seeds shows it.
    let seeds = SEEDS_TO_FIND * 5;
    assert!((1..=seeds).any(is_found), "not noticed with {seeds} seeds");
}

/// The first seed of so many that finds what this mistake leads to, and what that is.
fn found(flaws: PlantedFlaws, seeds: u64) -> Option<(u64, String)> {
    (1..=seeds).find_map(|seed| {
        let report = run(seed, flaws);
        let violation = report
            .violations
            .iter()
            .find(|violation| !matches!(violation, SafetyViolation::NotServed { .. }))?;
        Some((seed, violation.to_string()))
    })
}

fn must_be_found(flaws: PlantedFlaws) {
    must_be_found_within(SEEDS_TO_FIND, flaws);
}

fn must_be_found_within(seeds: u64, flaws: PlantedFlaws) {
    let found = found(flaws, seeds);
    println!("{found:?}");
    assert!(found.is_some(), "{flaws:?} was not noticed with {seeds} seeds");
}

#[test]
fn authority_from_the_receipt_of_a_read_is_found_out() {
    must_be_found(PlantedFlaws { authority_from_receipt: true, ..PlantedFlaws::default() });
}

#[test]
fn serving_without_the_wait_is_found_out() {
    must_be_found(PlantedFlaws { no_wait: true, ..PlantedFlaws::default() });
}

#[test]
fn ignored_promises_are_found_out() {
    must_be_found(PlantedFlaws { promises_ignored: true, ..PlantedFlaws::default() });
}

#[test]
fn authority_for_an_old_copy_is_found_out() {
    must_be_found(PlantedFlaws { copy_may_lag: true, ..PlantedFlaws::default() });
}

#[test]
fn vouches_of_half_the_members_are_found_out() {
    must_be_found(PlantedFlaws { half_may_vouch: true, ..PlantedFlaws::default() });
}

#[test]
fn promises_forgotten_by_a_restart_are_found_out() {
    must_be_found(PlantedFlaws { promises_forgotten: true, ..PlantedFlaws::default() });
}

#[test]
fn placements_that_go_with_their_sites_are_found_out() {
    must_be_found(PlantedFlaws { placements_go_with_sites: true, ..PlantedFlaws::default() });
}

#[test]
fn authority_in_spite_of_a_mark_is_found_out() {
    must_be_found(PlantedFlaws { marks_ignored: true, ..PlantedFlaws::default() });
}

#[test]
fn marks_that_are_older_than_placements_are_found_out() {
    // Seldom: most of what a node gets in the meantime it has had to wait for itself.
    must_be_found_within(
        SEEDS_TO_FIND * 10,
        PlantedFlaws { placements_newer_than_marks: true, ..PlantedFlaws::default() },
    );
}

#[test]
fn a_fence_of_whoever_takes_a_site_is_found_out() {
    must_be_found(PlantedFlaws { own_fence_waited: true, ..PlantedFlaws::default() });
}

#[test]
fn waiting_for_only_one_predecessor_is_found_out() {
    must_be_found(PlantedFlaws { earlier_ones_forgotten: true, ..PlantedFlaws::default() });
}

/// Nodes that come back as a build that does not know of marks are no mistake, as long as it is looked at.
#[test]
fn marks_older_than_their_nodes_own_record_are_found_out() {
    let flaws = PlantedFlaws { older_builds: true, ..PlantedFlaws::default() };
    for seed in seeds(SEEDS) {
        without_violations(seed, &run(seed, flaws));
    }
    must_be_found(PlantedFlaws { records_newer_than_marks: true, ..flaws });
}
