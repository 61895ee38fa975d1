//! How the node's permits are shared when one lane wants all of them.
//!
//! Not here: real tenants on real processors (`./dev experiment admission-fair`).

use std::collections::HashMap;
use std::time::Duration;

use nagaya_admission::{
    Admission, AdmissionEffect, Decision, LaneId, LaneName, Moment, RequestKey, ServiceUse,
};

use crate::chance::Chance;
use crate::model::{ask, bounds};
use crate::server::Server;
use crate::{times, with_seeds};

/// Permits of the node.
const RUN: u32 = 10;
/// Work of a request, the same for all unless said.
const WORK_US: f64 = 20_000.0;
/// Ordinary lanes. Each wants this part of the node's capacity.
const ORDINARY: usize = 9;
const DEMAND: f64 = 0.05;
/// The flood, in ordinary lanes' demands.
const FLOOD: f64 = 50.0;
const SECONDS: u64 = 60;

struct Node {
    admission: Admission,
    server: Server,
    lanes: Vec<LaneId>,
    /// One for each lane, so that its clients come when they come, whatever the others do.
    chances: Vec<Chance>,
    now: u64,
    /// By lane: arrivals in a microsecond, and when the next one comes.
    rates: Vec<f64>,
    next: Vec<u64>,
    /// Work of each lane's requests.
    work: Vec<f64>,
    /// Its lane, when it came, and its work.
    parties: HashMap<RequestKey, (usize, u64, f64)>,
    /// From arrival to end, in microseconds.
    responses: Vec<Vec<f64>>,
    served: Vec<f64>,
}

impl Node {
    fn new(rates: &[f64], weights: &[u32], work: &[f64], seed: u64) -> Self {
        let now = 1_700_000_000_000_000;
        let mut wide = bounds(RUN, 2_000, 100);
        wide.wait_count = 100_000;
        wide.wait_bytes = u64::MAX;
        let mut admission = Admission::new(Moment(now), wide.clone());
        let root = admission.root();
        let mut lane = |(name, weight): (u8, &u32)| {
            wide.weight = *weight;
            admission.lane(Moment(now), root, LaneName([name; 16]), wide.clone())
        };
        let lanes: Vec<LaneId> = (1..).zip(weights).map(&mut lane).collect();
        let chance = |lane| Chance::new((lane << 32) + seed);
        let mut chances: Vec<Chance> = (0..rates.len() as u64).map(chance).collect();
        let next = rates.iter().zip(&mut chances);
        let next = next.map(|(rate, chance)| now + chance.exponential(1.0 / rate) as u64).collect();
        Self {
            admission,
            server: Server::new(f64::INFINITY),
            lanes,
            chances,
            now,
            rates: rates.to_vec(),
            next,
            work: work.to_vec(),
            parties: HashMap::new(),
            responses: vec![Vec::new(); rates.len()],
            served: vec![0.0; rates.len()],
        }
    }

    fn run(mut self, seconds: u64) -> Self {
        let end = self.now + seconds * times() * 1_000_000;
        while self.now < end {
            let arrival = self.next.iter().copied().min().expect("there are lanes");
            let served = self.server.next_end().unwrap_or(u64::MAX);
            self.now = arrival.min(served);
            if served <= arrival {
                self.end_one();
            } else {
                let lane = self.next.iter().position(|next| *next == arrival).expect("one comes now");
                self.next[lane] = arrival + 1 + self.chances[lane].exponential(1.0 / self.rates[lane]) as u64;
                self.arrive(lane);
            }
        }
        self
    }

    fn arrive(&mut self, lane: usize) {
        // About as much above the mean as below.
        let work = self.chances[lane].lognormal(self.work[lane] * 0.95, 0.3);
        match self.admission.offer(Moment(self.now), self.lanes[lane], ask(1, self.now)) {
            Decision::Run(pass) => {
                self.parties.insert(pass, (lane, self.now, work));
                self.start(pass);
            }
            Decision::Wait(pass, _) => drop(self.parties.insert(pass, (lane, self.now, work))),
            _ => {}
        }
    }

    fn start(&mut self, pass: RequestKey) {
        let (_, _, work) = self.parties[&pass];
        self.server.start(Moment(self.now), pass, work);
    }

    fn end_one(&mut self) {
        let now = Moment(self.now);
        let (pass, took) = self.server.end(now).expect("something ends now");
        let (lane, since, work) = self.parties.remove(&pass).expect("it was started");
        self.responses[lane].push((self.now - since) as f64);
        self.served[lane] += work;
        self.admission.release(
            now,
            pass,
            ServiceUse { service: Duration::from_micros(took), is_whole: true },
        );
        let effects: Vec<AdmissionEffect> = self.admission.drain_effects().collect();
        for effect in effects {
            if let AdmissionEffect::Run(pass) = effect {
                self.start(pass);
            }
        }
    }

    fn p99_ms(&mut self, lanes: std::ops::Range<usize>) -> f64 {
        let mut responses: Vec<f64> = self.responses[lanes].concat();
        responses.sort_by(f64::total_cmp);
        responses[responses.len() * 99 / 100] / 1_000.0
    }
}

fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    sum * sum / (shares.len() as f64 * squares)
}

fn capacity() -> f64 {
    f64::from(RUN) / WORK_US
}

#[test]
fn a_flood_takes_nothing_from_ordinary_lanes() {
    with_seeds([0], flood);
}

fn flood(seed: u64) {
    let mut rates = vec![DEMAND * capacity(); ORDINARY];
    let mut alone = Node::new(&rates, &[100; ORDINARY], &[WORK_US; ORDINARY], seed).run(SECONDS);
    rates.push(FLOOD * DEMAND * capacity());
    let mut flooded = Node::new(&rates, &[100; ORDINARY + 1], &[WORK_US; ORDINARY + 1], seed).run(SECONDS);

    // Each got what it asked for, up to an equal part of what there is.
    let fair: Vec<f64> =
        flooded.served[..ORDINARY].iter().zip(&alone.served).map(|(with, without)| with / without).collect();
    let index = jain(&fair);
    let p99_alone = alone.p99_ms(0..ORDINARY);
    let p99 = flooded.p99_ms(0..ORDINARY);
    println!(
        "ordinary lanes: Jain {index:.4}, p99 {p99:.1} ms beside the flood, {p99_alone:.1} ms without; flood served {:.2} of the node",
        flooded.served[ORDINARY] / (SECONDS * times()) as f64 / 1e6 / f64::from(RUN)
    );
    assert!(index > 0.995, "{fair:?}");
    assert!(fair.iter().all(|part| *part > 0.98), "{fair:?}");
    assert!(p99 < 1.3 * p99_alone, "{p99} ms, {p99_alone} ms alone");
    // What the others leave is not left idle.
    let total: f64 = flooded.served.iter().sum::<f64>() / (SECONDS * times()) as f64 / 1e6;
    assert!(total > 0.98 * f64::from(RUN), "{total}");
}

#[test]
fn lanes_that_want_all_get_it_by_weight_in_work() {
    with_seeds([0], all_want_all);
}

fn all_want_all(seed: u64) {
    let weights = [100, 100, 200, 400];
    // The second lane's requests are ten times as long, so there are fewer of them.
    let work = [WORK_US, 10.0 * WORK_US, WORK_US, WORK_US / 4.0];
    let rates: Vec<f64> = work.iter().map(|work| 3.0 * f64::from(RUN) / work).collect();
    let node = Node::new(&rates, &weights, &work, seed).run(SECONDS);
    let shares: Vec<f64> =
        node.served.iter().zip(weights).map(|(served, weight)| served / f64::from(weight)).collect();
    let index = jain(&shares);
    println!("by weight: Jain {index:.4} of {shares:?}");
    assert!(index > 0.99, "{shares:?}");
}

#[test]
fn nobody_is_passed_by_more_than_one_request_of_each_other_lane() {
    let mut wide = bounds(1, 60_000, 100);
    wide.wait_count = 100_000;
    let now = Moment(1_700_000_000_000_000);
    let mut admission = Admission::new(now, wide.clone());
    let lanes: Vec<LaneId> = (1..=20u8)
        .map(|name| admission.lane(now, admission.root(), LaneName([name; 16]), wide.clone()))
        .collect();
    let Decision::Run(mut running) = admission.offer(now, lanes[0], ask(1, 0)) else {
        panic!("there is room")
    };
    let mut lane_of = HashMap::new();
    // Lane after lane gets all its waiting requests before the next one has any.
    for (at, lane) in lanes.iter().enumerate() {
        for client in 0..50 {
            let Decision::Wait(pass, _) = admission.offer(now, *lane, ask(1, client)) else {
                panic!("it is full")
            };
            lane_of.insert(pass, at);
        }
    }
    let mut turns = Vec::new();
    for _ in 0..20 * 50 {
        admission.release(now, running, ServiceUse { service: Duration::from_millis(10), is_whole: true });
        let Some(AdmissionEffect::Run(pass)) = admission.drain_effects().next() else {
            panic!("somebody waits")
        };
        turns.push(lane_of[&pass]);
        running = pass;
    }
    for lane in 0..lanes.len() {
        let own: Vec<usize> = (0..turns.len()).filter(|at| turns[*at] == lane).collect();
        for pair in own.windows(2) {
            let between = &turns[pair[0] + 1..pair[1]];
            let most =
                (0..lanes.len()).map(|other| between.iter().filter(|turn| **turn == other).count()).max();
            assert!(most <= Some(1), "lane {lane}: {between:?}");
        }
    }
}
