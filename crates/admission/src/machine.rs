//! The facade: what a caller offers, releases and asks.
//!
//! Not here: how service times are learned (`predict`), slots (`calendar`), signatures (`ticket`).

use std::collections::{BTreeMap, HashMap, VecDeque};

use slab::Slab;

use crate::{
    Ask, Bounds, Calibration, Class, Counts, Effect, Explained, LaneId, LaneName, Moment, Nonce, Offer, Pass,
    Prediction, Pressure, Record, Refused, Run, Standing, Used,
};

/// Lanes nest so deep: the node's, a tenant's, a site's, a rule's.
pub const DEPTH_MAX: usize = 4;

/// All lanes of a node, and who runs and waits in them.
#[derive(Debug)]
pub struct Admission {
    lanes: Slab<Lane>,
    root: LaneId,
    generation: u32,
    passes: BTreeMap<Pass, Standpoint>,
    last: u64,
    effects: Vec<Effect>,
    names: HashMap<(u32, LaneName), LaneId>,
}

#[derive(Debug)]
struct Lane {
    generation: u32,
    around: Option<LaneId>,
    bounds: Bounds,
    running: u32,
    waiting: VecDeque<Pass>,
    bytes: u64,
    counts: Counts,
}

#[derive(Debug)]
struct Standpoint {
    lane: LaneId,
    runs: bool,
    bytes: u64,
}

impl Admission {
    /// A node's admission, with the root lane's bounds.
    pub fn new(_now: Moment, node: Bounds) -> Self {
        let mut lanes = Slab::new();
        let lane = Lane::new(0, None, node);
        let index = as_index(lanes.insert(lane));
        let root = LaneId { index, generation: 0 };
        Self {
            lanes,
            root,
            generation: 0,
            passes: BTreeMap::new(),
            last: 0,
            effects: Vec::new(),
            names: HashMap::new(),
        }
    }

    /// The node's own lane.
    pub fn root(&self) -> LaneId {
        self.root
    }

    /// The lane of this name inside another one: made, or found and set.
    pub fn lane(&mut self, now: Moment, inside: LaneId, name: LaneName, bounds: Bounds) -> LaneId {
        if let Some(found) = self.names.get(&(inside.index, name)).copied() {
            self.set(now, found, bounds);
            return found;
        }
        self.generation += 1;
        let generation = self.generation;
        let index = as_index(self.lanes.insert(Lane::new(generation, Some(inside), bounds)));
        let id = LaneId { index, generation };
        self.names.insert((inside.index, name), id);
        id
    }

    /// Changes a lane's bounds. False: it is gone.
    pub fn set(&mut self, _now: Moment, lane: LaneId, bounds: Bounds) -> bool {
        let Some(found) = self.get_mut(lane) else { return false };
        found.bounds = bounds;
        self.start_waiting();
        true
    }

    /// Removes a lane with its inner ones. Who waits there is dismissed; who runs runs on.
    pub fn remove(&mut self, _now: Moment, lane: LaneId) {
        if lane == self.root || self.get(lane).is_none() {
            return;
        }
        let gone: Vec<LaneId> =
            self.names.values().copied().filter(|each| self.path(*each).contains(&lane)).collect();
        for id in gone {
            self.names.retain(|_, named| *named != id);
            let removed = self.lanes.remove(id.index as usize);
            for pass in removed.waiting {
                self.passes.remove(&pass);
                self.effects.push(Effect::Dismiss(pass, Refused::NoLane));
            }
        }
        self.start_waiting();
    }

    /// A request wants to run.
    pub fn offer(&mut self, _now: Moment, lane: LaneId, ask: Ask) -> Offer {
        if self.get(lane).is_none() {
            return Offer::Refused(Refused::NoLane);
        }
        self.last += 1;
        let pass = Pass(self.last);
        let is_first = self.get(lane).is_some_and(|lane| lane.waiting.is_empty());
        if ask.passes || (is_first && self.has_room(lane)) {
            self.passes.insert(pass, Standpoint { lane, runs: true, bytes: 0 });
            self.count(lane, 1);
            return Offer::Run(pass);
        }
        let Some(found) = self.get_mut(lane) else { return Offer::Refused(Refused::NoLane) };
        let prediction = Prediction {
            ahead: u32::try_from(found.waiting.len()).unwrap_or(u32::MAX),
            wait: None,
            at_most: None,
        };
        let is_full =
            prediction.ahead >= found.bounds.wait_count || found.bytes + ask.bytes > found.bounds.wait_bytes;
        if !ask.can_wait || is_full {
            found.counts.refused += 1;
            return Offer::Refused(Refused::Full(prediction));
        }
        found.waiting.push_back(pass);
        found.bytes += ask.bytes;
        found.counts.waited += 1;
        self.passes.insert(pass, Standpoint { lane, runs: false, bytes: ask.bytes });
        Offer::Wait(pass, prediction)
    }

    /// The client left: while it waited, or between [`Effect::Run`] and the start.
    pub fn cancel(&mut self, _now: Moment, pass: Pass) {
        self.end(pass);
    }

    /// A request that ran has ended.
    pub fn release(&mut self, _now: Moment, pass: Pass, _used: Used) {
        self.end(pass);
    }

    /// What time alone changes. Says when to come again.
    pub fn tick(&mut self, _now: Moment) -> Option<Moment> {
        None
    }

    /// What is to be done, in order. Empty afterwards.
    pub fn drain_effects(&mut self) -> impl Iterator<Item = Effect> {
        self.effects.drain(..)
    }

    /// Permits in bulk, for a caller that counts them itself, while nobody waits anywhere near.
    pub fn lend(&mut self, _now: Moment, _lane: LaneId, _count: u32) -> u32 {
        0
    }

    /// Lent permits come back.
    pub fn give_back(&mut self, _now: Moment, _lane: LaneId, _count: u32) {}

    /// A sample of what ran on lent permits.
    pub fn learn(&mut self, _now: Moment, _lane: LaneId, _class: Class, _used: Used) {}

    /// How hard it is for what runs in a lane.
    pub fn feel(&mut self, _now: Moment, _lane: LaneId, _pressure: Pressure) {}

    /// How the ticket with this number stands.
    pub fn standing(&self, _now: Moment, _nonce: Nonce) -> Standing {
        Standing::Unknown
    }

    /// What is known now of the wait of one in line. `None`: it does not wait.
    pub fn prediction(&self, _now: Moment, pass: Pass) -> Option<Prediction> {
        let lane = self.get(self.passes.get(&pass)?.lane)?;
        let ahead = lane.waiting.iter().position(|each| *each == pass)?;
        Some(Prediction { ahead: u32::try_from(ahead).unwrap_or(u32::MAX), wait: None, at_most: None })
    }

    /// What was stored before a restart, told before anybody is served.
    pub fn restore(&mut self, _now: Moment, _lane: LaneId, _record: Record) {}

    /// A lane as it is now, for people. `None`: it is gone.
    pub fn explain(&self, _now: Moment, lane: LaneId) -> Option<Explained> {
        let found = self.get(lane)?;
        Some(Explained {
            running: found.running,
            run: found.run(),
            waiting: u32::try_from(found.waiting.len()).unwrap_or(u32::MAX),
            waiting_bytes: found.bytes,
            promised: 0,
            wait: None,
            queued_since: None,
            held_by: match (found.waiting.is_empty(), found.running < found.run()) {
                (true, _) => "",
                (false, true) => "around",
                (false, false) => "own",
            },
            drain_per_second: None,
            service_p50: None,
            service_p90: None,
            counts: found.counts,
            calibration: Calibration::default(),
        })
    }

    fn get(&self, lane: LaneId) -> Option<&Lane> {
        self.lanes.get(lane.index as usize).filter(|found| found.generation == lane.generation)
    }

    fn get_mut(&mut self, lane: LaneId) -> Option<&mut Lane> {
        self.lanes.get_mut(lane.index as usize).filter(|found| found.generation == lane.generation)
    }

    /// The lane and those around it.
    fn path(&self, lane: LaneId) -> Vec<LaneId> {
        std::iter::successors(Some(lane), |at| self.get(*at)?.around).take(DEPTH_MAX).collect()
    }

    fn has_room(&self, lane: LaneId) -> bool {
        self.path(lane).iter().filter_map(|at| self.get(*at)).all(|lane| lane.running < lane.run())
    }

    fn count(&mut self, lane: LaneId, change: i64) {
        for at in self.path(lane) {
            if let Some(lane) = self.get_mut(at) {
                lane.running = u32::try_from(i64::from(lane.running) + change).unwrap_or(0);
                lane.counts.admitted += u64::from(change > 0);
            }
        }
    }

    fn end(&mut self, pass: Pass) {
        let Some(at) = self.passes.remove(&pass) else { return };
        if at.runs {
            self.count(at.lane, -1);
            self.start_waiting();
        } else if let Some(lane) = self.get_mut(at.lane) {
            lane.waiting.retain(|each| *each != pass);
            lane.bytes -= at.bytes;
            lane.counts.left += 1;
        }
    }

    /// Who waits longest and can run, runs.
    fn start_waiting(&mut self) {
        loop {
            let heads = self.lanes.iter().filter_map(|(index, lane)| {
                let id = LaneId { index: as_index(index), generation: lane.generation };
                lane.waiting.front().map(|pass| (*pass, id))
            });
            let Some((pass, lane)) =
                heads.filter(|(_, lane)| self.has_room(*lane)).min_by_key(|(pass, _)| *pass)
            else {
                return;
            };
            self.count(lane, 1);
            let bytes = self.passes.get_mut(&pass).map_or(0, |at| {
                at.runs = true;
                at.bytes
            });
            if let Some(lane) = self.get_mut(lane) {
                lane.waiting.pop_front();
                lane.bytes -= bytes;
            }
            self.effects.push(Effect::Run(pass));
        }
    }
}

impl Lane {
    fn new(generation: u32, around: Option<LaneId>, bounds: Bounds) -> Self {
        Self {
            generation,
            around,
            bounds,
            running: 0,
            waiting: VecDeque::new(),
            bytes: 0,
            counts: Counts::default(),
        }
    }

    fn run(&self) -> u32 {
        match self.bounds.run {
            Run::Fixed(count) => count,
            Run::Auto { max, .. } => max,
        }
    }
}

fn as_index(index: usize) -> u32 {
    u32::try_from(index).expect("a node has fewer than four thousand million lanes")
}
