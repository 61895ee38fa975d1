//! A thousand nodes with a hundred thousand sites, of which one node after the other dies.

use std::time::Duration;

use nagaya_sim::{Faults, Flaws, Shape, World};

const NODES: u32 = 1_000;
const SITES: u32 = 100_000;

#[test]
fn a_rolling_failure_of_a_thousand_nodes_loses_no_request() {
    let flaws = Flaws::default();
    let watch_every = Duration::from_millis(50);
    let (seed, copies_max, faults) = (1, 1, Faults::NONE);
    let mut world =
        World::new(Shape { seed, nodes: NODES, sites: SITES, copies_max, faults, watch_every, flaws });
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
    println!("{asked} asked for, {report:?}");
    assert!(report.violations.is_empty(), "{}", report.violations[0]);
    assert!(report.refusals.is_empty(), "{:?}", report.refusals);
    assert_eq!(report.answers + report.abandoned, asked, "the others have no end");
    assert!(asked >= u64::from(SITES) && report.abandoned < asked / 10);
    assert!(report.relocations > u64::from(SITES) / 2);
}
