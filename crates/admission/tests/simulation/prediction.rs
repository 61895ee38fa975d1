//! How well waits are predicted: simulated servers of several kinds, with what was told at arrival held against what came.
//!
//! Not here: the same with real servers (`./dev experiment admission-prediction`).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Duration;

use nagaya_admission::{Admission, Effect, LaneId, LaneName, Moment, Offer, Pass, Used};

use crate::chance::Chance;
use crate::model::{ask, bounds};
use crate::server::Server;
use crate::times;

/// A kind of request: its share of all, in percent, and its work.
#[derive(Clone, Copy)]
struct Kind {
    percent: u64,
    median_us: f64,
    spread: f64,
}

/// Who comes.
#[derive(Clone, Copy)]
enum Crowd {
    /// So many clients, each of whom comes again as soon as it was served, after a pause of this mean.
    Closed { clients: u32, pause_us: f64 },
    /// Arrivals at random, so many times what can be served: swinging between the two.
    Open { from: f64, to: f64 },
}

#[derive(Clone)]
struct Scenario {
    name: &'static str,
    run: u32,
    cores: f64,
    kinds: &'static [Kind],
    crowd: Crowd,
    /// Of those who wait, so many percent leave before their turn.
    leaving: u64,
    /// From this second on, the server is so many times as fast.
    step: Option<(u64, f64)>,
    /// Lanes that share the node's permits with equal weights; all alike.
    lanes: u8,
    seconds: u64,
}

const HOMOGENEOUS: &[Kind] = &[Kind { percent: 100, median_us: 50_000.0, spread: 0.3 }];
const VARIED: &[Kind] = &[Kind { percent: 100, median_us: 40_000.0, spread: 1.0 }];
const MIXED: &[Kind] = &[
    Kind { percent: 95, median_us: 5_000.0, spread: 0.2 },
    Kind { percent: 5, median_us: 500_000.0, spread: 0.2 },
];

impl Scenario {
    fn new(name: &'static str, kinds: &'static [Kind], crowd: Crowd) -> Self {
        let infinite = f64::INFINITY;
        Self { name, run: 10, cores: infinite, kinds, crowd, leaving: 0, step: None, lanes: 1, seconds: 120 }
    }

    /// Mean work of a request in microseconds.
    fn mean(&self) -> f64 {
        let mean = |kind: &Kind| kind.median_us * (kind.spread * kind.spread / 2.0).exp();
        self.kinds.iter().map(|kind| kind.percent as f64 / 100.0 * mean(kind)).sum()
    }

    /// Requests that can be served in a microsecond.
    fn capacity(&self) -> f64 {
        f64::from(self.run).min(self.cores) / self.mean()
    }
}

enum Event {
    Arrival(u8),
    Leave(Pass),
}

/// A prediction and what came.
struct Outcome {
    at: u64,
    told: f64,
    actual: f64,
}

struct World {
    scenario: Scenario,
    chance: Chance,
    admission: Admission,
    server: Server,
    lanes: Vec<LaneId>,
    events: BinaryHeap<Reverse<(u64, u64)>>,
    happenings: HashMap<u64, Event>,
    number: u64,
    now: u64,
    begin: u64,
    /// Work, lane, kind, and since when and with what prediction, if any, it waits.
    parties: HashMap<Pass, (f64, u8, u32, u64, Option<f64>)>,
    outcomes: Vec<Outcome>,
    unknown: u64,
    refused: u64,
}

impl World {
    fn new(scenario: Scenario, seed: u64) -> Self {
        let begin = 1_700_000_000_000_000;
        let mut node = bounds(scenario.run, 600_000, 100);
        (node.wait_count, node.wait_bytes) = (1_000_000, u64::MAX);
        let mut admission = Admission::new(Moment(begin), node.clone());
        let lanes = match scenario.lanes {
            1 => vec![admission.root()],
            many => (1..=many)
                .map(|name| {
                    admission.lane(Moment(begin), admission.root(), LaneName([name; 16]), node.clone())
                })
                .collect(),
        };
        Self {
            server: Server::new(scenario.cores),
            scenario,
            chance: Chance::new(seed),
            admission,
            lanes,
            events: BinaryHeap::new(),
            happenings: HashMap::new(),
            number: 0,
            now: begin,
            begin,
            parties: HashMap::new(),
            outcomes: Vec::new(),
            unknown: 0,
            refused: 0,
        }
    }

    fn plan(&mut self, at: f64, event: Event) {
        self.number += 1;
        self.events.push(Reverse((self.now + at.max(1.0) as u64, self.number)));
        self.happenings.insert(self.number, event);
    }

    fn run(mut self) -> Self {
        match self.scenario.crowd {
            Crowd::Closed { clients, .. } => {
                for client in 0..clients {
                    self.plan(f64::from(client) * 100.0, Event::Arrival(client as u8 % self.scenario.lanes));
                }
            }
            Crowd::Open { .. } => {
                for lane in 0..self.scenario.lanes {
                    self.plan(1.0, Event::Arrival(lane));
                }
            }
        }
        let end = self.begin + self.scenario.seconds * times() * 1_000_000;
        let mut step = self.scenario.step.map(|(second, speed)| (self.begin + second * 1_000_000, speed));
        while self.now < end {
            let next = self.events.peek().map_or(end, |Reverse((at, _))| *at);
            let served = self.server.next_end().unwrap_or(u64::MAX).max(self.now);
            let stepped = step.map_or(u64::MAX, |(at, _)| at);
            self.now = next.min(served).min(stepped);
            if let Some((_, speed)) = step.take_if(|_| stepped == self.now) {
                self.server.set_speed(Moment(self.now), speed);
            } else if served == self.now {
                self.served();
            } else if let Some(Reverse((_, number))) = self.events.pop() {
                match self.happenings.remove(&number).expect("each event happens once") {
                    Event::Arrival(lane) => self.arrive(lane),
                    Event::Leave(pass) => self.leave(pass),
                }
            }
        }
        self
    }

    fn arrive(&mut self, lane: u8) {
        let mut kind = 0;
        let mut draw = self.chance.below(100);
        while draw >= self.scenario.kinds[kind].percent {
            draw -= self.scenario.kinds[kind].percent;
            kind += 1;
        }
        let Kind { median_us, spread, .. } = self.scenario.kinds[kind];
        let work = self.chance.lognormal(median_us, spread);
        if let Crowd::Open { from, to } = self.scenario.crowd {
            let phase = (self.now - self.begin) as f64 / 20e6 * std::f64::consts::TAU;
            let load = from + (to - from) * (0.5 - 0.5 * phase.cos());
            let rate = load * self.scenario.capacity() / f64::from(self.scenario.lanes);
            let pause = self.chance.exponential(1.0 / rate);
            self.plan(pause, Event::Arrival(lane));
        }
        let offer =
            self.admission.offer(Moment(self.now), self.lanes[usize::from(lane)], ask(kind as u32, self.now));
        match offer {
            Offer::Run(pass) => {
                self.parties.insert(pass, (work, lane, kind as u32, self.now, None));
                self.server.start(Moment(self.now), pass, work);
            }
            Offer::Wait(pass, prediction) => {
                self.unknown += u64::from(prediction.wait.is_none());
                let told = prediction.wait.map(|wait| wait.as_secs_f64() * 1e6);
                self.parties.insert(pass, (work, lane, kind as u32, self.now, told));
                if self.chance.percent(self.scenario.leaving) {
                    let patience = self.chance.part() * told.unwrap_or(1e6);
                    self.plan(patience, Event::Leave(pass));
                }
            }
            _ => self.refused += 1,
        }
    }

    fn leave(&mut self, pass: Pass) {
        if self.admission.prediction(Moment(self.now), pass).is_some() {
            self.parties.remove(&pass);
            self.admission.cancel(Moment(self.now), pass);
        }
    }

    fn served(&mut self) {
        let now = Moment(self.now);
        let (pass, took) = self.server.end(now).expect("something ends now");
        let (_, lane, ..) = self.parties.remove(&pass).expect("it was served");
        self.admission.release(now, pass, Used { service: Duration::from_micros(took), is_whole: true });
        let effects: Vec<Effect> = self.admission.drain_effects().collect();
        for effect in effects {
            let Effect::Run(pass) = effect else { panic!("nothing else is to be done here: {effect:?}") };
            let (work, _, _, since, told) = self.parties[&pass];
            self.server.start(now, pass, work);
            if let Some(told) = told {
                self.outcomes.push(Outcome { at: since, told, actual: (self.now - since) as f64 });
            }
        }
        if let Crowd::Closed { pause_us, .. } = self.scenario.crowd {
            let pause = self.chance.exponential(pause_us);
            self.plan(pause, Event::Arrival(lane));
        }
    }

    /// Of the predictions made from a second on: their number, errors p50 and p90 and bias, in percent.
    fn errors(&self, from: u64) -> Errors {
        let from = self.begin + from * 1_000_000;
        let counted =
            self.outcomes.iter().filter(|outcome| outcome.at >= from && outcome.actual >= 100_000.0);
        let mut errors: Vec<f64> = counted
            .clone()
            .map(|outcome| (outcome.told - outcome.actual).abs() / outcome.actual * 100.0)
            .collect();
        errors.sort_by(f64::total_cmp);
        let at = |part: f64| errors.get((errors.len() as f64 * part) as usize).copied().unwrap_or(f64::NAN);
        let told: f64 = counted.clone().map(|outcome| outcome.told).sum();
        let actual: f64 = counted.clone().map(|outcome| outcome.actual).sum();
        let mean_wait_ms = actual / errors.len() as f64 / 1_000.0;
        let found = Errors {
            count: errors.len(),
            p50: at(0.5),
            p90: at(0.9),
            bias: (told - actual) / actual * 100.0,
        };
        println!(
            "{:42} {:7} waits, {:6.0} ms on average: error p50 {:5.1} %, p90 {:5.1} %, bias {:+5.1} %; {} unknown, {} refused",
            self.scenario.name,
            found.count,
            mean_wait_ms,
            found.p50,
            found.p90,
            found.bias,
            self.unknown,
            self.refused
        );
        found
    }
}

struct Errors {
    count: usize,
    p50: f64,
    p90: f64,
    bias: f64,
}

fn measure(scenario: Scenario, from: u64) -> Errors {
    World::new(scenario, 7).run().errors(from)
}

const OPEN: Crowd = Crowd::Open { from: 0.5, to: 1.6 };

fn closed(clients: u32) -> Crowd {
    Crowd::Closed { clients, pause_us: 1_000.0 }
}

/// Two processors for ten permits.
fn shared(name: &'static str, kinds: &'static [Kind], crowd: Crowd) -> Scenario {
    Scenario { cores: 2.0, ..Scenario::new(name, kinds, crowd) }
}

fn check(errors: &Errors, p90: f64) {
    assert!(errors.count > 1_000, "there was a line: {}", errors.count);
    assert!(errors.p90 < p90 && errors.p50 < p90 / 2.0, "error p50 {} p90 {}", errors.p50, errors.p90);
    assert!(errors.bias.abs() < 5.0, "bias {}", errors.bias);
}

#[test]
fn waits_of_requests_alike_are_told_within_a_fifth() {
    for clients in [50, 100, 150] {
        check(&measure(shared("closed, shared processors", HOMOGENEOUS, closed(clients)), 5), 12.0);
        check(&measure(Scenario::new("closed, M/G/c", HOMOGENEOUS, closed(clients)), 5), 12.0);
    }
    check(&measure(Scenario::new("open, M/G/c", HOMOGENEOUS, OPEN), 5), 10.0);
    check(&measure(Scenario { run: 1, ..Scenario::new("open, M/G/1", HOMOGENEOUS, OPEN) }, 5), 12.0);
    check(&measure(shared("open, shared processors", HOMOGENEOUS, OPEN), 5), 10.0);
}

#[test]
fn waits_among_requests_that_vary_are_told_without_bias() {
    check(&measure(Scenario::new("open, varied, M/G/c", VARIED, OPEN), 5), 20.0);
    // Fewer than forty in a second: chance does not even out.
    check(&measure(shared("open, varied, shared processors", VARIED, OPEN), 5), 35.0);
}

#[test]
fn quick_reads_and_slow_reports_in_one_lane_are_told_apart() {
    check(&measure(Scenario::new("open, mixed, M/G/c", MIXED, OPEN), 5), 10.0);
    check(&measure(shared("open, mixed, shared processors", MIXED, OPEN), 5), 25.0);
    // Waits shorter than one report takes. Who knew each kind's service, and when each one began, would be wrong by 28 and 27 %.
    check(&measure(Scenario::new("closed 100, mixed, M/G/c", MIXED, closed(100)), 5), 32.0);
    check(&measure(shared("closed 100, mixed, shared processors", MIXED, closed(100)), 5), 32.0);
}

#[test]
fn waits_are_right_though_three_of_ten_leave() {
    check(
        &measure(Scenario { leaving: 30, ..Scenario::new("open, three of ten leave", HOMOGENEOUS, OPEN) }, 5),
        15.0,
    );
}

#[test]
fn waits_are_right_in_lanes_that_share_a_full_node() {
    check(&measure(Scenario { lanes: 5, ..Scenario::new("open, five lanes", HOMOGENEOUS, OPEN) }, 5), 12.0);
    check(
        &measure(
            Scenario { lanes: 5, ..Scenario::new("closed 150, five lanes", HOMOGENEOUS, closed(150)) },
            5,
        ),
        12.0,
    );
}

#[test]
fn a_step_in_speed_is_followed_within_ten_seconds() {
    for (name, speed) in
        [("closed 150, three times slower", 1.0 / 3.0), ("closed 150, three times faster", 3.0)]
    {
        let scenario = Scenario {
            step: Some((30, speed)),
            seconds: 60,
            ..Scenario::new(name, HOMOGENEOUS, closed(150))
        };
        check(&World::new(scenario, 7).run().errors(40), 10.0);
    }
}

#[test]
fn what_is_published_of_errors_is_what_they_were() {
    let world = World::new(Scenario::new("closed 100, M/G/c", HOMOGENEOUS, closed(100)), 7).run();
    // What is published fades; nothing changes here, so lately is as always.
    let measured = world.errors(5);
    let explained = world.admission.explain(Moment(world.now), world.lanes[0]).expect("the lane is there");
    let published = explained.calibration;
    assert!(published.predictions as usize >= measured.count, "{published:?}");
    assert!(published.error_p50_pct.is_some_and(|p50| (p50 - measured.p50).abs() < 1.5), "{published:?}");
    assert!(published.error_p90_pct.is_some_and(|p90| (p90 - measured.p90).abs() < 3.0), "{published:?}");
    assert!(published.bias_pct.is_some_and(|bias| (bias - measured.bias).abs() < 2.0), "{published:?}");
    // Ten permits of 52 ms.
    assert!(explained.drain_per_second.is_some_and(|rate| (rate / 191.0 - 1.0).abs() < 0.1), "{explained:?}");
    assert!(
        explained.service_p50.is_some_and(|p50| (p50.as_secs_f64() / 0.050 - 1.0).abs() < 0.1),
        "{explained:?}"
    );
    assert_eq!((explained.running, explained.run, explained.held_by), (10, 10, "own"));
}
