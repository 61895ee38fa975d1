//! Crowds in nested lanes, with everything that may happen at any time: bursts, cancels, lanes that change, go and come back,
//! permits that are lent and wanted back. Each step is checked by the model.
//!
//! Not here: tickets (`promises`), how fair and how well predicted it was (`fairness`, `prediction`).

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use nagaya_admission::{AdmissionRefusal, Decision, Moment, RequestKey, RunLimit};

use crate::chance::Chance;
use crate::model::{Model, ask, bounds, used};
use crate::{times, with_seeds};

/// Arrivals of one crowd.
const ARRIVALS: u64 = 300_000;

/// A lane that is there, under whatever number, except for moments.
struct Place {
    name: u8,
    /// The place around it.
    around: usize,
    lane: usize,
}

struct Crowd {
    model: Model,
    chance: Chance,
    now: u64,
    /// When who runs ends, and what it took.
    ends: BinaryHeap<Reverse<(u64, RequestKey, u64)>>,
    /// The node's lane first, each one after the one around it.
    places: Vec<Place>,
    waiting: BTreeSet<RequestKey>,
    running: BTreeSet<RequestKey>,
    lent: Vec<usize>,
    ended: u64,
}

impl Crowd {
    fn new(seed: u64) -> Self {
        let now = 1_700_000_000_000_000;
        let model = Model::new(Moment(now), bounds(40, 5_000, 100));
        let mut crowd = Self {
            model,
            chance: Chance::new(seed),
            now,
            ends: BinaryHeap::new(),
            places: vec![Place { name: 0, around: 0, lane: 0 }],
            waiting: BTreeSet::new(),
            running: BTreeSet::new(),
            lent: Vec::new(),
            ended: 0,
        };
        for tenant in 1..=6u8 {
            let tenant_place = crowd.open(0, tenant, 20);
            for site in 1..=3u8 {
                let site_place = crowd.open(tenant_place, tenant * 10 + site, 10);
                if site == 1 {
                    crowd.open(site_place, tenant * 10 + 9, 3);
                }
            }
        }
        crowd
    }

    /// Makes a lane for good.
    fn open(&mut self, around: usize, name: u8, run: u64) -> usize {
        let weight = [50, 100, 400][usize::from(name % 3)];
        let bounds = bounds(1 + self.chance.below(run) as u32, 2_000, weight);
        let lane = self.model.lane(self.now(), self.places[around].lane, name, bounds);
        self.places.push(Place { name, around, lane });
        self.places.len() - 1
    }

    fn any_lane(&mut self) -> usize {
        self.places[self.chance.below(self.places.len() as u64) as usize].lane
    }

    fn now(&self) -> Moment {
        Moment(self.now)
    }

    /// Who got a permit by the last call starts, unless his client has left in between.
    fn start(&mut self) {
        for pass in std::mem::take(&mut self.model.started) {
            assert!(self.waiting.remove(&pass), "who starts waited");
            if self.chance.percent(3) {
                self.model.cancel(self.now(), pass);
                self.ended += 1;
                self.start();
            } else {
                self.run(pass);
            }
        }
    }

    fn run(&mut self, pass: RequestKey) {
        let service = self.chance.lognormal(20_000.0, 1.0) as u64 + 1;
        self.ends.push(Reverse((self.now + service, pass, service)));
        assert!(self.running.insert(pass));
    }

    fn arrive(&mut self) {
        let lane = self.any_lane();
        let mut ask = ask(self.chance.below(40) as u32, self.chance.below(1_000));
        ask.bytes = self.chance.below(5_000);
        ask.can_wait = !self.chance.percent(5);
        ask.passes = self.chance.percent(1);
        ask.priority = [0, 0, 0, 0, 5, -3, 100, -100][self.chance.below(8) as usize];
        match self.model.offer(self.now(), lane, ask) {
            Decision::Run(pass) => self.run(pass),
            Decision::Wait(pass, _) => assert!(self.waiting.insert(pass)),
            Decision::Refused(_) => self.ended += 1,
            other => panic!("nothing is promised here: {other:?}"),
        }
        self.start();
        self.give_back();
    }

    /// The next thing that happens by itself: until `until`, who ran ends.
    fn pass_time(&mut self, until: u64) {
        while let Some(Reverse((end, pass, service))) =
            self.ends.peek().copied().filter(|end| end.0.0 <= until)
        {
            self.ends.pop();
            self.now = end;
            assert!(self.running.remove(&pass));
            let mut used = used(service);
            used.is_whole = !self.chance.percent(2);
            self.model.release(self.now(), pass, used);
            self.ended += 1;
            self.start();
        }
        self.now = until;
    }

    fn meddle(&mut self) {
        match self.chance.below(100) {
            0..60 => self.cancel_one(),
            60..75 => self.lend(),
            75..95 => {
                let lane = self.any_lane();
                let mut bounds = self.model.lanes[lane].bounds.clone();
                // A site may be closed altogether; the node is not.
                let (least, most) = if lane == 0 { (10, 60) } else { (0, 20) };
                bounds.run = RunLimit::Fixed(least + self.chance.below(most) as u32);
                bounds.weight = 1 + self.chance.below(500) as u32;
                self.model.set(self.now(), lane, bounds);
            }
            95..97 => self.remove_one(),
            _ => {
                self.model.tick(self.now());
            }
        }
        self.start();
        self.give_back();
    }

    fn cancel_one(&mut self) {
        let from = RequestKey(self.chance.below(1 + self.waiting.last().map_or(0, |pass| pass.0)));
        if let Some(pass) = self.waiting.range(from..).next().copied() {
            self.waiting.remove(&pass);
            self.model.cancel(self.now(), pass);
            self.ended += 1;
        }
    }

    fn lend(&mut self) {
        let lane = self.any_lane();
        let count = 1 + self.chance.below(5) as u32;
        if self.model.lend(self.now(), lane, count) > 0 {
            self.lent.push(lane);
        }
    }

    /// What is wanted back comes back.
    fn give_back(&mut self) {
        while let Some(lane) = self.model.recalled.pop() {
            let count = self.model.lent(lane);
            assert!(self.lent.contains(&lane), "only what was lent is wanted back");
            if count > 0 {
                self.model.give_back(self.now(), lane, count);
                self.start();
            }
        }
    }

    /// A lane goes with those inside it, and others of the same names take their places.
    fn remove_one(&mut self) {
        let at = 1 + self.chance.below(self.places.len() as u64 - 1) as usize;
        let lane = self.places[at].lane;
        self.model.remove(self.now(), lane);
        for pass in std::mem::take(&mut self.model.dismissed) {
            assert!(self.waiting.remove(&pass), "who is dismissed waited");
            self.ended += 1;
        }
        self.start();
        let offer = self.model.offer(self.now(), lane, ask(0, 0));
        assert_eq!(offer, Decision::Refused(AdmissionRefusal::NoLane));
        for at in at..self.places.len() {
            let Place { name, around, lane } = self.places[at];
            if self.model.lanes[lane].is_gone {
                let bounds = self.model.lanes[lane].bounds.clone();
                self.places[at].lane = self.model.lane(self.now(), self.places[around].lane, name, bounds);
            }
        }
    }

    fn finish(mut self) {
        let lanes = self.lent.clone();
        for lane in lanes {
            let count = self.model.lent(lane);
            self.model.give_back(self.now(), lane, count);
            self.start();
        }
        // A lane that was closed meanwhile lets nobody in; those in its line are let go.
        for pass in std::mem::take(&mut self.waiting) {
            self.model.cancel(self.now(), pass);
            self.ended += 1;
        }
        self.pass_time(u64::MAX / 4);
        self.model.check_empty(self.now());
    }
}

fn simulate(seed: u64) {
    let mut crowd = Crowd::new(seed);
    let arrivals = ARRIVALS * times();
    for arrival in 0..arrivals {
        // From quiet to five times what can be served, and back.
        let busy = 1.0 + 4.0 * (arrival as f64 / 3_000.0).sin().max(-0.2);
        let pause = if crowd.chance.percent(30) { 0.0 } else { crowd.chance.exponential(1_500.0 / busy) };
        crowd.pass_time(crowd.now + pause as u64);
        crowd.arrive();
        if crowd.chance.percent(10) {
            crowd.meddle();
        }
    }
    let tally = crowd.model.tally.clone();
    for kind in ["run", "wait", "refused"] {
        assert!(tally[kind] > arrivals / 50, "the crowd met all of it: {tally:?}");
    }
    assert!(!crowd.lent.is_empty());
    crowd.finish();
}

#[test]
fn a_crowd_is_served_as_agreed() {
    with_seeds([1, 20_260_101], simulate);
}
