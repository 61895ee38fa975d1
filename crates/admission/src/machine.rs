//! The facade: what a caller offers, releases and asks, and what follows from it.
//!
//! After each call nobody waits who could run: whatever frees a permit hands it on before it returns. So an offer that finds
//! room passes nobody.
//!
//! Not here: the tree of lanes and whose turn it is (`machine::tree`), waits (`machine::waits`), tickets (`machine::promises`),
//! permits in bulk (`machine::lending`).

mod lending;
pub(crate) mod line;
mod promises;
mod tree;
mod waits;

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Duration;

use slab::Slab;

use self::line::{Place, Rank};
use self::promises::{Holding, Promised};
use self::waits::{Wait, micros};
use crate::bound::Observed;
use crate::lane::Lane;
use crate::predict::{Outcome, Slot};
use crate::{
    Ask, Bounds, Class, Crowd, Effect, Explained, LaneId, LaneName, Moment, Offer, PRIORITY_STEP, Pass,
    Pressure, Refused, Used,
};

/// Lanes nest so deep: the node's, a tenant's, a site's, a rule's.
pub const DEPTH_MAX: usize = 4;

/// Bounds that are found by measuring look at the clock this often while something runs.
const AUTO_TICK: Duration = Duration::from_millis(100);

/// Limits of [`Ask::priority`].
const PRIORITY_MOST: i8 = 100;

/// All lanes of a node, who runs and waits in them, and who is promised what.
#[derive(Debug)]
pub struct Admission {
    lanes: Slab<Lane>,
    root: LaneId,
    /// Lanes that there have been.
    generations: u32,
    requests: HashMap<Pass, Request, BuildHasherDefault<PassHasher>>,
    /// Requests that there have been.
    offered: u64,
    effects: Vec<Effect>,
    /// Lanes with a bound that is found by measuring, in which something runs.
    autos: BTreeSet<u32>,
    promised: Promised,
}

/// A request that waits or runs. Small, as most only run, and each is put down and taken up once.
#[derive(Debug)]
struct Request {
    lane: u32,
    state: State,
}

#[derive(Debug)]
enum State {
    Waits(Box<Waiting>),
    /// With its seat among those that run in its lane.
    Runs(usize),
}

/// One in line.
#[derive(Debug)]
struct Waiting {
    slot: Slot,
    place: Place,
    since: Moment,
    bytes: u64,
    /// The wait that was expected when it came.
    wait: Option<Wait>,
    /// How often the pace had changed then; `None`: it was not well known.
    changes: Option<u32>,
    /// The ticket on which it came.
    holding: Option<Holding>,
}

/// Passes are consecutive numbers: spreading them is all that is needed.
#[derive(Debug, Default, Clone, Copy)]
struct PassHasher(u64);

impl Hasher for PassHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        let mixed = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

// === Lanes ===

impl Admission {
    /// A node's admission, with the bounds of the node's own lane.
    pub fn new(_now: Moment, node: Bounds) -> Self {
        let mut admission = Self {
            lanes: Slab::new(),
            root: LaneId { index: 0, generation: 0 },
            generations: 0,
            requests: HashMap::default(),
            offered: 0,
            effects: Vec::new(),
            autos: BTreeSet::new(),
            promised: Promised::default(),
        };
        admission.root = admission.make_lane(LaneName([0; 16]), None, node);
        admission
    }

    /// The node's own lane.
    pub fn root(&self) -> LaneId {
        self.root
    }

    /// The lane of this name inside another one: made, or found and set. Where lanes would nest deeper than [`DEPTH_MAX`], and inside
    /// a lane that is gone, none is made, and the answer is the lane `inside` itself.
    pub fn lane(&mut self, now: Moment, inside: LaneId, name: LaneName, bounds: Bounds) -> LaneId {
        let Some(around) = self.find(inside) else { return inside };
        if let Some(found) = self.at(around).inner.get(&name) {
            let found = self.id_of(*found);
            self.set(now, found, bounds);
            return found;
        }
        if self.path(around).as_slice().len() >= DEPTH_MAX {
            return inside;
        }
        let lane = self.make_lane(name, Some(around), bounds);
        self.set_promising(now, lane.index);
        lane
    }

    /// Changes a lane's bounds, at once. Who waits stays in line, who runs runs on. False: the lane is gone.
    pub fn set(&mut self, now: Moment, lane: LaneId, bounds: Bounds) -> bool {
        let Some(index) = self.find(lane) else { return false };
        let lane = self.at_mut(index);
        if lane.bounds == bounds {
            return true;
        }
        let has_moved = lane.bounds.weight != bounds.weight;
        lane.set(bounds);
        if has_moved {
            self.stand_back(index);
        }
        if self.at(index).auto.is_some() && self.at(index).running > 0 {
            self.autos.insert(index);
        }
        self.set_promising(now, index);
        self.settle(index);
        self.dispatch(now);
        true
    }

    /// Removes a lane with those inside it. Who waits there is dismissed; who runs runs on, counted in the lanes around.
    pub fn remove(&mut self, now: Moment, lane: LaneId) {
        let Some(index) = self.find(lane).filter(|index| *index != self.root.index) else { return };
        for index in self.with_inner(index) {
            if self.at(index).lent > 0 {
                self.effects.push(Effect::Recall(self.id_of(index)));
            }
            self.stop_promising(index);
            self.detach(index);
        }
        self.dispatch(now);
    }
}

// === Requests ===

impl Admission {
    /// A request wants to run. What the answer promises is durable once the effects of this call are carried out.
    pub fn offer(&mut self, now: Moment, lane: LaneId, ask: Ask) -> Offer {
        let Some(index) = self.find(lane) else { return Offer::Refused(Refused::NoLane) };
        let path = self.path(index);
        let has_room = self.has_room(&path);
        let slot = self.at_mut(index).learned.slot(now, ask.class);
        if ask.passes {
            return Offer::Run(self.run_at_once(now, index, slot));
        }
        if let Some(ticket) = &ask.ticket
            && let Some(offer) = self.offer_to_holder(now, index, slot, &ask, ticket, has_room)
        {
            return offer;
        }
        if has_room {
            return Offer::Run(self.run_at_once(now, index, slot));
        }
        self.recall(now, path.as_slice());
        let wait = self.wait_at_end(now, index);
        if ask.can_wait && self.has_place(index, &ask, wait) {
            let order = order_of(now, ask.priority);
            return self.get_in_line(now, index, slot, &ask, (Rank::Newcomer, order), None);
        }
        self.turn_away(now, index, &ask, wait)
    }

    /// The client left while it waited, or between [`Effect::Run`] and the start.
    pub fn cancel(&mut self, now: Moment, pass: Pass) {
        self.end(now, pass, None);
    }

    /// A request that ran has ended.
    pub fn release(&mut self, now: Moment, pass: Pass, used: Used) {
        self.end(now, pass, Some(used));
    }

    /// What time alone changes: slots and calls that end, bounds that are found by measuring. Says when to come again.
    pub fn tick(&mut self, now: Moment) -> Option<Moment> {
        let autos: Vec<u32> = self.autos.iter().copied().collect();
        for index in autos {
            let is_busy =
                self.lanes.get(index as usize).is_some_and(|lane| lane.auto.is_some() && lane.running > 0);
            if is_busy {
                self.observe(now, index, None, 1.0);
            } else {
                self.autos.remove(&index);
            }
        }
        self.dispatch(now);
        let promises = self.tick_promises(now);
        let auto = (!self.autos.is_empty()).then(|| later(now, AUTO_TICK));
        [promises, auto].into_iter().flatten().min()
    }

    /// What is to be done, in order. To be called after each call; empty if that one caused nothing.
    pub fn drain_effects(&mut self) -> impl Iterator<Item = Effect> {
        self.effects.drain(..)
    }

    /// A sample of what ran on lent permits.
    pub fn learn(&mut self, now: Moment, lane: LaneId, class: Class, used: Used) {
        let Some(index) = self.find(lane).filter(|_| used.is_whole) else { return };
        let slot = self.at_mut(index).learned.slot(now, class);
        self.learn_from(now, index, slot, used.service);
    }

    /// How hard it is for what runs in a lane.
    pub fn feel(&mut self, now: Moment, lane: LaneId, pressure: Pressure) {
        let Some(index) = self.find(lane) else { return };
        if let Some(auto) = &mut self.at_mut(index).auto {
            auto.feel(now, pressure);
        }
    }

    /// There is a place in line for a newcomer.
    fn has_place(&self, index: u32, ask: &Ask, wait: Option<Wait>) -> bool {
        let lane = self.at(index);
        let longest = lane.bounds.wait;
        let is_in_time = wait.is_none_or(|wait| micros(wait.expected) <= longest);
        is_in_time
            && !longest.is_zero()
            && lane.line.len() < lane.bounds.wait_count
            && lane.bytes.saturating_add(ask.bytes) <= lane.bounds.wait_bytes
    }

    fn new_pass(&mut self) -> Pass {
        self.offered += 1;
        Pass(self.offered)
    }

    fn run_at_once(&mut self, now: Moment, index: u32, slot: Slot) -> Pass {
        let pass = self.new_pass();
        let seat = self.occupy(now, index, slot);
        self.at_mut(index).counts.admitted += 1;
        self.requests.insert(pass, Request { lane: index, state: State::Runs(seat) });
        pass
    }

    fn get_in_line(
        &mut self,
        now: Moment,
        index: u32,
        slot: Slot,
        ask: &Ask,
        (rank, order): (Rank, i64),
        holding: Option<Holding>,
    ) -> Offer {
        let pass = self.new_pass();
        let place = Place { rank, order, turn: pass.0 };
        let cost = self.cost(index, slot);
        let ahead = self.at(index).line.before(place);
        let wait = self.wait_behind(now, index, place, ahead);
        let lane = self.at_mut(index);
        if lane.line.is_empty() {
            lane.queued_since = Some(now);
            lane.learned.line_begins(now, lane.running_own());
        }
        lane.line.insert(place, pass, slot, cost as f32);
        lane.bytes += ask.bytes;
        lane.holders += u32::from(holding.is_some());
        lane.counts.waited += 1;
        lane.learned.waits(slot);
        let is_sure = wait.is_some_and(|wait| wait.is_known) && lane.learned.is_sure();
        let changes = is_sure.then_some(lane.learned.changes);
        for at in self.path(index).as_slice() {
            self.at_mut(*at).waiting_within += 1;
        }
        let waiting = Waiting { slot, place, since: now, bytes: ask.bytes, wait, changes, holding };
        let request = Request { lane: index, state: State::Waits(Box::new(waiting)) };
        self.requests.insert(pass, request);
        self.settle(index);
        Offer::Wait(pass, self.told(index, ahead.count, wait))
    }

    /// The first in this lane's line gets its permit.
    fn run_first(&mut self, now: Moment, index: u32) {
        let lane = self.at_mut(index);
        let Some((place, pass)) = lane.line.first() else { return };
        let Some(Request { state: State::Waits(waiting), .. }) = self.requests.remove(&pass) else { return };
        let seat = self.occupy(now, index, waiting.slot);
        self.leave_line(now, index, place, &waiting);
        let lane = self.at_mut(index);
        lane.counts.admitted += 1;
        let actual = now.0.saturating_sub(waiting.since.0) as f64;
        match waiting.wait {
            Some(Wait { reckoned, expected, is_known: true }) => {
                let is_current = waiting.changes == Some(lane.learned.changes);
                lane.learned.record.add(Outcome { reckoned, told: expected, actual }, is_current);
            }
            _ => lane.learned.record.add_untold(actual),
        }
        if let Some(holding) = &waiting.holding {
            self.spend(now, pass, holding);
        }
        self.requests.insert(pass, Request { lane: index, state: State::Runs(seat) });
        self.effects.push(Effect::Run(pass));
    }

    /// One in line is in it no more.
    fn leave_line(&mut self, now: Moment, index: u32, place: Place, waiting: &Waiting) {
        let lane = self.at_mut(index);
        lane.pass_time_in_line(now);
        lane.line.remove(place);
        lane.bytes -= waiting.bytes;
        lane.holders -= u32::from(waiting.holding.is_some());
        lane.learned.waits_no_more(waiting.slot);
        if lane.line.is_empty() {
            lane.queued_since = None;
        }
        for at in self.path(index).as_slice() {
            self.at_mut(*at).waiting_within -= 1;
        }
        self.settle(index);
    }

    /// A request is over. `used`: it ran, and so.
    fn end(&mut self, now: Moment, pass: Pass, used: Option<Used>) {
        let Some(Request { lane: index, state }) = self.requests.remove(&pass) else { return };
        match state {
            State::Waits(waiting) => {
                self.leave_line(now, index, waiting.place, &waiting);
                self.at_mut(index).counts.left += 1;
                if let Some(holding) = &waiting.holding {
                    self.come_back(now, holding);
                }
            }
            State::Runs(seat) => {
                let (slot, since) = self.at(index).own[seat];
                if let Some(used) = used.filter(|used| used.is_whole) {
                    self.learn_from(now, index, slot, used.service);
                }
                let lane = self.at_mut(index);
                if !lane.line.is_empty() {
                    lane.pass_time_in_line(now);
                    lane.learned.ended_in_line();
                }
                lane.learned.ends(slot, since);
                lane.own.remove(seat);
                self.has_spent(pass);
                self.vacate(index, 1);
                self.dispatch(now);
            }
        }
        self.call_early(now, index);
    }

    /// What a request took teaches its lane and those around it.
    fn learn_from(&mut self, now: Moment, index: u32, slot: Slot, service: Duration) {
        let took = service.as_secs_f64() * 1e6;
        let path = self.path(index);
        let is_queued = !self.at(index).line.is_empty() || !self.has_room(&path);
        let cost = self.at(index).learned.expected(slot);
        let began = Moment(now.0.saturating_sub(micros_of(service)));
        let learned = &mut self.at_mut(index).learned;
        learned.learn(now, slot, took, learned.times(began, is_queued));
        for at in &path.as_slice()[1..] {
            let learned = &mut self.at_mut(*at).learned;
            learned.learn_of_inner(now, took, learned.times(began, is_queued));
        }
        for at in path.as_slice() {
            if self.at(*at).auto.is_some() {
                // Against the average request there: the unit must stay the same when all become slower.
                let usual = self.at(*at).learned.expected_of_any();
                let work = cost.zip(usual).map_or(1.0, |(cost, usual)| cost / usual.max(1.0));
                self.observe(now, *at, Some(service), work);
            }
        }
    }

    /// A bound that is found by measuring sees what is.
    fn observe(&mut self, now: Moment, index: u32, service: Option<Duration>, work: f64) {
        let lane = self.at_mut(index);
        let observed = Observed { running: lane.running, waiting: lane.waiting_within, service, work };
        let Some(run) = lane.auto.as_mut().and_then(|auto| auto.observe(now, observed)) else { return };
        lane.run = run;
        self.settle(index);
    }
}

// === For people ===

impl Admission {
    /// What runs and waits in each lane right inside the node's: of each tenant.
    pub fn crowds(&self) -> impl Iterator<Item = Crowd> {
        self.at(self.root.index).inner.values().map(|index| {
            let lane = self.at(*index);
            Crowd {
                lane: self.id_of(*index),
                running: lane.running,
                waiting: lane.waiting_within,
                holds_itself: lane.waiting_within > 0 && self.holds_itself(*index),
            }
        })
    }

    /// Somebody waits in this lane or in one inside it for its own bound.
    fn holds_itself(&self, index: u32) -> bool {
        let lane = self.at(index);
        lane.waiting_within > 0
            && (lane.is_full() || lane.inner.values().any(|inner| self.holds_itself(*inner)))
    }

    /// A lane as it is now. `None`: it is gone.
    pub fn explain(&self, now: Moment, lane: LaneId) -> Option<Explained> {
        let index = self.find(lane)?;
        let lane = self.at(index);
        let path = self.path(index);
        let is_held_around = path.as_slice()[1..].iter().any(|at| self.at(*at).is_full());
        let service = |q| lane.learned.service(q).map(micros);
        Some(Explained {
            running: lane.running,
            run: lane.run,
            waiting: lane.line.len(),
            waiting_bytes: lane.bytes,
            promised: self.promised_of(index),
            wait: self.told(index, 0, self.wait_at_end(now, index)).wait,
            queued_since: lane.queued_since,
            held_by: match (lane.is_full(), is_held_around) {
                (true, _) => "own",
                (false, true) => "around",
                (false, false) => "",
            },
            drain_per_second: lane.learned.ends_per_second(),
            service_p50: service(0.5),
            service_p90: service(0.9),
            counts: self.tally_of(index, lane.counts),
            calibration: lane.learned.record.published(),
        })
    }
}

/// The place of one who came now: earlier by what its priority is worth.
fn order_of(now: Moment, priority: i8) -> i64 {
    let priority = i64::from(priority.clamp(-PRIORITY_MOST, PRIORITY_MOST));
    let step = i64::try_from(PRIORITY_STEP.as_micros()).expect("a step is a matter of seconds");
    i64::try_from(now.0).unwrap_or(i64::MAX).saturating_sub(priority * step)
}

fn later(now: Moment, by: Duration) -> Moment {
    Moment(now.0.saturating_add(micros_of(by)))
}

fn micros_of(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
