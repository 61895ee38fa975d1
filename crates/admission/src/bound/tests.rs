//! The bound that adapts, against simulated servers: as good as the best fixed bound, quick, steady, never starving.
//!
//! Not here: the servers themselves (`server`).

mod server;

use std::time::Duration;

use proptest::prelude::*;

use super::{AdaptiveLimit, LimitSample};
use crate::{CpuPressure, Moment};
use server::{Kind, Load, Machine, Outcome, Policy, TWO_CORES, World};

const SEEDS: [u64; 4] = [1, 3, 5, 7];
const CLIENTS: Load = Load::Closed(150);
const AUTO: Policy = Policy::Auto { min: 1, max: 256, feels: true };
const UNFEELING: Policy = Policy::Auto { min: 1, max: 256, feels: false };
const CPU: &[Kind] = &[kind(1.0, 10.0, 0.0)];
const SLEEP: &[Kind] = &[kind(1.0, 1.0, 50.0)];
const BOTH: &[Kind] = &[kind(1.0, 5.0, 10.0)];
const THRASH: &[Kind] = &[kind(1.0, 2.0, 30.0)];
const BIMODAL: &[Kind] = &[kind(0.9, 1.0, 0.0), kind(0.1, 500.0, 0.0)];
const BIMODAL_SLEEP: &[Kind] = &[kind(0.9, 1.0, 0.0), kind(0.1, 1.0, 500.0)];
const SHORT_OF_MEMORY: Machine = Machine { memory: 20, ..TWO_CORES };

const fn kind(part: f64, cpu_ms: f64, sleep_ms: f64) -> Kind {
    Kind { part, cpu_ms, sleep_ms }
}

fn world(load: Load, kinds: &[Kind], noise: f64, machine: Machine, seed: u64) -> World {
    let kinds = kinds.to_vec();
    let step = None;
    let are_told_apart = true;
    World { load, kinds, are_told_apart, noise, machine, step, seconds: 80.0, warm: 20.0, seed }
}

/// Throughput and 99th percentile of the total time under `policy`, means of all seeds.
fn measure(policy: Policy, world_of: impl Fn(u64) -> World) -> (f64, f64) {
    let outcomes = SEEDS.map(|seed| world_of(seed).run(policy));
    let mean = |of: fn(&Outcome) -> f64| outcomes.iter().map(of).sum::<f64>() / SEEDS.len() as f64;
    (mean(Outcome::throughput), mean(|outcome| outcome.quantile(0.99)))
}

/// Fails unless `policy` has 0.97 of the throughput of the best fixed bound, and no more than `p99` times the total time of the
/// fixed bound that is best at that among those with as much throughput.
fn is_as_good_as_fixed(policy: Policy, fixed: &[u32], p99: f64, world_of: impl Fn(u64) -> World) {
    let all: Vec<_> = fixed.iter().map(|&bound| measure(Policy::Fixed(bound), &world_of)).collect();
    let most = all.iter().map(|(throughput, _)| *throughput).fold(0.0, f64::max);
    let good = all.iter().filter(|(throughput, _)| *throughput >= 0.97 * most);
    let shortest = good.map(|(_, p99)| *p99).fold(f64::INFINITY, f64::min);
    let auto = measure(policy, &world_of);
    let ratios = (auto.0 / most, auto.1 / shortest);
    println!("throughput {:.3}, p99 {:.3} of the best fixed bound's", ratios.0, ratios.1);
    assert!(ratios.0 >= 0.97 && ratios.1 <= p99, "{ratios:?}");
}

#[test]
fn few_run_where_the_cpu_is_short() {
    for noise in [0.2, 1.0] {
        is_as_good_as_fixed(AUTO, &[1, 2, 3, 4, 8], 1.15, |seed| world(CLIENTS, CPU, noise, TWO_CORES, seed));
        let calm = Load::Open(160.0);
        is_as_good_as_fixed(AUTO, &[2, 3, 4, 8], 1.25, |seed| world(calm, CPU, noise, TWO_CORES, seed));
    }
}

#[test]
fn many_run_where_they_sleep() {
    for noise in [0.2, 1.0] {
        let fixed = &[64, 100, 128, 150];
        is_as_good_as_fixed(AUTO, fixed, 1.15, |seed| world(CLIENTS, SLEEP, noise, TWO_CORES, seed));
        let calm = Load::Open(1600.0);
        is_as_good_as_fixed(AUTO, fixed, 1.15, |seed| world(calm, SLEEP, noise, TWO_CORES, seed));
    }
}

#[test]
fn as_many_run_as_both_need() {
    for noise in [0.2, 1.0] {
        let fixed = &[4, 6, 8, 12, 16, 24];
        is_as_good_as_fixed(AUTO, fixed, 1.15, |seed| world(CLIENTS, BOTH, noise, TWO_CORES, seed));
        is_as_good_as_fixed(UNFEELING, fixed, 1.15, |seed| world(CLIENTS, BOTH, noise, TWO_CORES, seed));
        let calm = Load::Open(320.0);
        is_as_good_as_fixed(AUTO, fixed, 1.15, |seed| world(calm, BOTH, noise, TWO_CORES, seed));
    }
}

#[test]
fn no_more_run_than_memory_bears() {
    for noise in [0.2, 1.0] {
        let fixed = &[12, 16, 20, 22, 24, 28, 32];
        is_as_good_as_fixed(AUTO, fixed, 1.15, |seed| world(CLIENTS, THRASH, noise, SHORT_OF_MEMORY, seed));
        let calm = Load::Open(460.0);
        is_as_good_as_fixed(AUTO, fixed, 1.15, |seed| world(calm, THRASH, noise, SHORT_OF_MEMORY, seed));
    }
}

#[test]
fn fast_and_slow_requests_mixed_are_served_as_well() {
    for noise in [0.2, 1.0] {
        is_as_good_as_fixed(AUTO, &[2, 3, 4, 6, 8], 1.15, |seed| {
            world(CLIENTS, BIMODAL, noise, TWO_CORES, seed)
        });
        is_as_good_as_fixed(AUTO, &[2, 3, 4, 6, 8], 1.25, |seed| {
            world(Load::Open(32.0), BIMODAL, noise, TWO_CORES, seed)
        });
    }
    // Half a second each: what shows that more would do good takes its time to be seen.
    is_as_good_as_fixed(AUTO, &[64, 100, 150], 1.15, |seed| World {
        seconds: 120.0,
        warm: 60.0,
        ..world(CLIENTS, BIMODAL_SLEEP, 0.2, TWO_CORES, seed)
    });
}

/// Throughput of the best fixed bound on a machine, and under [`Policy::AdaptiveLimit`] from `after` seconds after the machine became
/// this one, for a second.
fn after_step(kinds: &[Kind], before: Machine, machine: Machine, after: f64) -> f64 {
    let fixed = [1, 2, 4, 8, 16, 24, 32, 48, 64, 100, 150].map(|bound| {
        let world = World { seconds: 12.0, warm: 2.0, ..world(CLIENTS, kinds, 0.2, machine, 1) };
        world.run(Policy::Fixed(bound)).between(2.0, 12.0)
    });
    let best = fixed.into_iter().fold(0.0, f64::max);
    let seen: f64 = (1..=25)
        .map(|seed| {
            let step = Some((15.0, machine));
            let world = World { step, seconds: 20.0, ..world(CLIENTS, kinds, 0.2, before, seed) };
            world.run(AUTO).between(15.0 + after, 16.0 + after)
        })
        .sum();
    seen / 25.0 / best
}

#[test]
fn a_step_in_capacity_is_followed_within_a_second() {
    let one_core = Machine { cores: 1.0, ..TWO_CORES };
    let many_cores = Machine { cores: 8.0, ..TWO_CORES };
    let remote = &[kind(1.0, 1.0, 40.0)];
    let sleepy = Machine { speed: 10.0, sleep: 50.0, ..TWO_CORES };
    let steps: &[(&str, &[Kind], Machine, Machine)] = &[
        ("the CPU quota halves", CPU, TWO_CORES, one_core),
        ("the CPU quota doubles", CPU, one_core, TWO_CORES),
        ("four times the cores", CPU, TWO_CORES, many_cores),
        ("a quarter of the cores", CPU, many_cores, TWO_CORES),
        ("a backend four times as fast", remote, TWO_CORES, Machine { sleep: 0.25, ..TWO_CORES }),
        ("a backend four times as slow", remote, Machine { sleep: 0.25, ..TWO_CORES }, TWO_CORES),
        ("cores four times as fast", BOTH, TWO_CORES, Machine { speed: 4.0, ..TWO_CORES }),
        ("40 at once are needed", &[kind(1.0, 2.0, 1.0)], TWO_CORES, Machine { sleep: 38.0, ..TWO_CORES }),
        ("150 at once are needed", &[kind(1.0, 5.0, 1.0)], TWO_CORES, sleepy),
        ("half the memory", &[kind(1.0, 1.0, 30.0)], Machine { memory: 40, ..TWO_CORES }, SHORT_OF_MEMORY),
    ];
    for (name, kinds, before, after) in steps {
        let part = after_step(kinds, *before, *after, 1.0);
        println!("{name}: {part:.3} of the best fixed bound's throughput in the second second");
        assert!(part >= 0.95, "{name}: {part}");
    }
}

/// Limits of what trials may do: the standard deviation is three tenths of the mean or less, and the bound is never below half
/// of the mean or above two and a half times the mean.
#[test]
fn the_bound_does_not_oscillate() {
    let cases: &[(&[Kind], Machine)] =
        &[(BIMODAL, TWO_CORES), (CPU, TWO_CORES), (SLEEP, TWO_CORES), (THRASH, SHORT_OF_MEMORY)];
    for (kinds, machine) in cases {
        for seed in SEEDS {
            let outcome = world(CLIENTS, kinds, 0.2, *machine, seed).run(AUTO);
            let (mean, deviation) = outcome.bound();
            let least = outcome.bounds.iter().min().copied().map_or(0.0, f64::from);
            let most = outcome.bounds.iter().max().copied().map_or(0.0, f64::from);
            println!("mean {mean:.1}, standard deviation {deviation:.1}, between {least} and {most}");
            assert!(deviation <= 0.3 * mean && least >= 0.5 * mean && most <= 2.5 * mean);
        }
    }
}

/// Whether one in 500, which takes a hundred times as long, can be told from the others beforehand or not. Fixed bounds above these
/// let the others pass by those, which then never end within a run.
#[test]
fn rare_requests_that_take_a_hundred_times_as_long_cost_little() {
    // Part of the requests answered under the best fixed bound.
    let cases: [(&str, &[Kind], f64); 3] = [
        ("all compute", &[kind(0.998, 10.0, 0.0), kind(0.002, 1000.0, 0.0)], 0.97),
        ("slow ones compute", &[kind(0.998, 5.0, 10.0), kind(0.002, 1500.0, 10.0)], 0.97),
        ("slow ones sleep", &[kind(0.998, 5.0, 10.0), kind(0.002, 5.0, 1500.0)], 0.92),
    ];
    for (name, kinds, least) in cases {
        let run = |policy, are_told_apart| {
            SEEDS.map(|seed| {
                World { are_told_apart, ..world(CLIENTS, kinds, 0.2, TWO_CORES, seed) }.run(policy)
            })
        };
        let answered =
            |outcomes: &[Outcome]| outcomes.iter().map(|outcome| outcome.totals.len()).sum::<usize>();
        let most = [2, 4, 8, 12, 16, 24, 32].map(|bound| answered(&run(Policy::Fixed(bound), true)));
        let most = most.into_iter().max().expect("there are some") as f64;
        for are_told_apart in [true, false] {
            let outcomes = run(AUTO, are_told_apart);
            let part = answered(&outcomes) as f64 / most;
            println!("{name}, told apart: {are_told_apart}: {part:.3} of the best fixed bound's");
            assert!(part >= least, "{name}: {part}");
            for outcome in &outcomes {
                let (mean, deviation) = outcome.bound();
                println!("    mean {mean:.1}, standard deviation {deviation:.1}");
                assert!(deviation <= 0.75 * mean, "{mean} {deviation}");
            }
        }
    }
}

#[test]
fn without_a_line_the_bound_stays() {
    let mut auto = AdaptiveLimit::new(2, 100);
    let bound = auto.run();
    for second in 1..1000 {
        let service = Some(Duration::from_millis(second % 50));
        let observed = LimitSample { running: bound, waiting: 0, service, work: 0.01 };
        assert_eq!(auto.observe(Moment(second * 1_000_000), observed), None);
    }
    assert_eq!(auto.run(), bound);
}

#[test]
fn new_limits_hold_at_once() {
    let mut auto = AdaptiveLimit::new(1, 100);
    auto.set(30, 40);
    assert_eq!(auto.run(), 30);
    auto.set(2, 3);
    assert_eq!(auto.run(), 3);
    auto.set(0, 0);
    assert_eq!(auto.run(), 1, "somebody may run");
}

proptest! {
    #[test]
    fn whatever_is_observed_the_bound_is_within_its_limits(
        min in 0u32..50, more in 0u32..300,
        seen in prop::collection::vec(
            (0u64..3_000_000, 0u32..400, 0u32..400, prop::option::of(0u64..10_000_000), any::<f64>(), any::<f32>()),
            1..400,
        ),
    ) {
        let mut auto = AdaptiveLimit::new(min, min + more);
        let mut now = 0;
        for (passed, running, waiting, service, work, felt) in seen {
            now += passed;
            let was = auto.run();
            let service = service.map(Duration::from_micros);
            auto.observe_pressure(Moment(now), CpuPressure { busy: felt, starved: felt });
            let changed = auto.observe(Moment(now), LimitSample { running, waiting, service, work });
            prop_assert_eq!(changed, (auto.run() != was).then_some(auto.run()));
            prop_assert!(auto.run() >= min.max(1) && auto.run() <= (min + more).max(1));
        }
    }
}
