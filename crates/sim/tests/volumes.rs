//! Random walks of one volume: without a fault of the protocol nothing is lost, and each rule that is left out is found.
//!
//! `NAGAYA_SIM_SEED=N cargo test -p nagaya-sim --test volumes` walks with one seed alone; `N..M` walks with those from N up to, not
//! including, M.

use std::ops::Range;

use nagaya_sim::volumes::{MissingRule, VolumeReport, VolumeViolation, VolumeWorld};

const SEEDS: u64 = 2_000;
const STEPS: u64 = 2_000;

fn walk(seed: u64, missing: Option<MissingRule>) -> VolumeReport {
    let copies = 2 + (seed % 3) as usize;
    VolumeWorld::new(seed, copies, missing).run(STEPS).clone()
}

fn seeds() -> Range<u64> {
    let number = |text: &str| text.parse().expect("a seed is a number");
    match std::env::var("NAGAYA_SIM_SEED") {
        Err(_) => 0..SEEDS,
        Ok(text) => match text.split_once("..") {
            Some((first, end)) => number(first)..number(end),
            None => number(&text)..number(&text) + 1,
        },
    }
}

#[test]
fn no_acknowledged_commit_is_lost_and_no_read_is_stale() {
    let seeds = seeds();
    let count = seeds.end - seeds.start;
    let (mut acknowledged, mut promotions, mut reads) = (0, 0, 0);
    for seed in seeds {
        let report = walk(seed, None);
        assert_eq!(report.violation, None, "seed {seed}");
        acknowledged += report.acknowledged;
        promotions += report.promotions;
        reads += report.reads;
    }
    println!("{acknowledged} commits, {promotions} promotions, {reads} reads");
    // Nothing was proved if nothing went on. Of one seed alone that is no matter.
    if count > 1 {
        assert!(acknowledged > 10 * count && promotions > count && reads > count, "nothing was proved");
    }
}

#[test]
fn each_rule_that_is_left_out_is_found() {
    for rule in MissingRule::ALL {
        let found: Vec<VolumeViolation> =
            seeds().filter_map(|seed| walk(seed, Some(rule)).violation).collect();
        let stale = found.iter().filter(|kind| matches!(kind, VolumeViolation::Stale { .. })).count();
        println!(
            "without {rule:?}: {} of {} walks, {stale} of them by a stale read",
            found.len(),
            seeds().count()
        );
        assert!(!found.is_empty(), "without {rule:?} nothing is wrong");
        assert!(rule != MissingRule::ReadLease || stale == found.len(), "a lease guards reads alone");
    }
}
