//! A thousand nodes with a hundred thousand sites, of which one node after the other dies.
//!
//! `NAGAYA_SIM_SEED=N cargo test -p nagaya-sim` runs it with that seed, e.g. the one that a failure has printed; of `N..M` the first.

use std::time::{Duration, Instant};

use nagaya_sim::{FaultKinds, PlantedFlaws, SimWorld, WorldShape};

const NODES: u32 = 1_000;
const SITES: u32 = 100_000;

fn seed() -> u64 {
    let Ok(wanted) = std::env::var("NAGAYA_SIM_SEED") else { return 1 };
    let first = wanted.split_once("..").map_or(&*wanted, |(first, _)| first);
    first.parse().expect("NAGAYA_SIM_SEED is a number, or two with .. between")
}

#[test]
fn a_rolling_failure_of_a_thousand_nodes_loses_no_request() {
    let flaws = PlantedFlaws::default();
    let watch_every = Duration::from_millis(50);
    let began = Instant::now();
    let seed = seed();
    let copies_max = 1;
    let faults = FaultKinds::NONE;
    let mut world = SimWorld::new(WorldShape {
        seed,
        nodes: NODES,
        sites: SITES,
        copies_max,
        faults,
        watch_every,
        flaws,
    });
    // Also where it fails before its end.
    println!("this seed again: NAGAYA_SIM_SEED={seed} cargo test -p nagaya-sim --test scale");
    world.run(Duration::from_secs(3));
    let mut asked = 0;
    for node in 0..NODES {
        let sites = world.placed_on(node);
        world.kill(node, Duration::from_secs(2));
        for site in sites {
            world.request(site, site % NODES);
            asked += 1;
        }
        world.run(Duration::from_millis(20));
    }
    world.run(Duration::from_secs(6));
    let report = world.report();
    println!("{asked} asked for in {:?} with seed {seed}, {report:?}", began.elapsed());
    assert!(report.violations.is_empty(), "{}", report.violations[0]);
    assert!(report.refusals.is_empty(), "{:?}", report.refusals);
    assert_eq!(report.answers + report.abandoned, asked, "the others have no end");
    assert!(asked >= u64::from(SITES) && report.abandoned < asked / 10);
    assert!(report.relocations > u64::from(SITES) / 2);
}
