//! The facade of admission: offers, releases and queries of the caller, and their effects.
//!
//! Invariant: after each call, no request waits that could run. A call that frees a permit hands it
//! on before it returns. So an offer that finds capacity passes no other request.
//!
//! Not here: the tree of lanes and whose turn it is (`machine::tree`), waits (`machine::waits`),
//! tickets (`machine::promises`), permits in bulk (`machine::lending`).

mod lending;
mod promises;
mod tree;
mod waits;

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Duration;

use slab::Slab;

use self::promises::{HeldTicket, PromiseTable};
use self::waits::{ExpectedWait, micros};
use crate::bound::LimitSample;
use crate::lane::Lane;
use crate::machine::wait_queue::{QueuePosition, QueueRank};
use crate::predict::{ClassSlot, WaitOutcome};
use crate::{
    AdmissionEffect, AdmissionRefusal, AdmissionRequest, CostClass, CpuPressure, Decision, LaneId,
    LaneLimits, LaneLoad, LaneName, LaneReport, Moment, PRIORITY_STEP, RequestKey, ServiceUse,
};

/// Deepest nesting of lanes: the node's, a tenant's, a site's, a rule's.
pub const DEPTH_MAX: usize = 4;

/// Interval at which adaptive bounds are evaluated while something runs.
const AUTO_TICK: Duration = Duration::from_millis(100);

/// Positions in each queue for requests that were admitted before, in addition to those of
/// newcomers.
const VISITORS_WAITING_MAX: u32 = 256;

/// Limits of [`AdmissionRequest::priority`].
const PRIORITY_MOST: i8 = 100;

/// All lanes of a node, their running and waiting requests, and the promises.
#[derive(Debug)]
pub struct Admission {
    lanes: Slab<Lane>,
    root: LaneId,
    /// Number of lanes so far.
    generations: u32,
    requests: HashMap<RequestKey, AdmittedRequest, BuildHasherDefault<PassHasher>>,
    /// Number of requests so far.
    offered: u64,
    effects: Vec<AdmissionEffect>,
    /// Lanes with an adaptive bound in which something runs.
    autos: BTreeSet<u32>,
    promised: PromiseTable,
}

/// A request that waits or runs. It is small: most requests only run, and each is stored and
/// removed once.
#[derive(Debug)]
struct AdmittedRequest {
    lane: u32,
    state: RequestState,
}

#[derive(Debug)]
enum RequestState {
    Waits(Box<WaitingRequest>),
    /// Holds its index among the running requests of its lane.
    Runs(usize),
}

/// A request in the queue.
#[derive(Debug)]
struct WaitingRequest {
    slot: ClassSlot,
    place: QueuePosition,
    since: Moment,
    bytes: u64,
    /// The wait that was expected when it came.
    wait: Option<ExpectedWait>,
    /// How often the pace had changed by then; `None` if the pace was not well known.
    changes: Option<u32>,
    /// The ticket with which it came.
    holding: Option<HeldTicket>,
}

/// A hasher for passes. They are consecutive numbers, so spreading them is enough.
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
    /// Creates a node's admission, with the limits of the node's own lane.
    pub fn new(_now: Moment, node: LaneLimits) -> Self {
        let mut admission = Self {
            lanes: Slab::new(),
            root: LaneId { index: 0, generation: 0 },
            generations: 0,
            requests: HashMap::default(),
            offered: 0,
            effects: Vec::new(),
            autos: BTreeSet::new(),
            promised: PromiseTable::default(),
        };
        admission.root = admission.make_lane(LaneName([0; 16]), None, node);
        admission
    }

    /// Returns the node's own lane.
    pub fn root(&self) -> LaneId {
        self.root
    }

    /// Finds or makes the lane of this name inside another one, and sets its limits. Returns
    /// `inside` itself if lanes would nest deeper than [`DEPTH_MAX`], or if `inside` is gone.
    pub fn lane(&mut self, now: Moment, inside: LaneId, name: LaneName, bounds: LaneLimits) -> LaneId {
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

    /// Changes a lane's limits at once. Waiting requests stay in the queue and running ones
    /// continue. Returns false if the lane is gone.
    pub fn set(&mut self, now: Moment, lane: LaneId, bounds: LaneLimits) -> bool {
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

    /// Removes a lane with those inside it. Its waiting requests are dismissed. Running ones
    /// continue, counted in the lanes around.
    pub fn remove(&mut self, now: Moment, lane: LaneId) {
        let Some(index) = self.find(lane).filter(|index| *index != self.root.index) else { return };
        for index in self.with_inner(index) {
            if self.at(index).lent > 0 {
                self.effects.push(AdmissionEffect::Recall(self.id_of(index)));
            }
            self.stop_promising(index);
            self.detach(index);
        }
        self.dispatch(now);
    }
}

// === Requests ===

impl Admission {
    /// Offers a request that wants to run. A promise in the result is durable once the effects of
    /// this call are carried out.
    pub fn offer(&mut self, now: Moment, lane: LaneId, ask: AdmissionRequest) -> Decision {
        let Some(index) = self.find(lane) else { return Decision::Refused(AdmissionRefusal::NoLane) };
        let path = self.path(index);
        let has_room = self.has_room(&path);
        let slot = self.at_mut(index).learned.slot(now, ask.class);
        if ask.passes {
            return Decision::Run(self.run_at_once(now, index, slot));
        }
        if let Some(ticket) = &ask.ticket
            && let Some(offer) = self.offer_to_holder(now, index, slot, &ask, ticket, has_room)
        {
            return offer;
        }
        if has_room {
            return Decision::Run(self.run_at_once(now, index, slot));
        }
        self.recall(now, path.as_slice());
        if ask.is_visiting && ask.can_wait && self.has_place_for_visitor(index, &ask) {
            let order = order_of(now, ask.priority);
            return self.get_in_line(now, index, slot, &ask, (QueueRank::Visitor, order), None);
        }
        let wait = self.wait_at_end(now, index);
        if ask.can_wait && self.has_place(index, &ask, wait) {
            let order = order_of(now, ask.priority);
            return self.get_in_line(now, index, slot, &ask, (QueueRank::Newcomer, order), None);
        }
        self.turn_away(now, index, &ask, wait)
    }

    /// Cancels a request whose client left while it waited, or between [`Effect::Run`] and the
    /// start.
    pub fn cancel(&mut self, now: Moment, pass: RequestKey) {
        self.end(now, pass, None);
    }

    /// Releases the permit of a request that has ended.
    pub fn release(&mut self, now: Moment, pass: RequestKey, used: ServiceUse) {
        self.end(now, pass, Some(used));
    }

    /// Applies changes that come from time alone: ends of slots and calls, adaptive bounds. Returns
    /// when to call again.
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

    /// Returns the pending effects, in order. Must be called after each call; it is empty if that
    /// call caused nothing.
    pub fn drain_effects(&mut self) -> impl Iterator<Item = AdmissionEffect> {
        self.effects.drain(..)
    }

    /// Learns from a sample of what ran on lent permits.
    pub fn learn(&mut self, now: Moment, lane: LaneId, class: CostClass, used: ServiceUse) {
        let Some(index) = self.find(lane).filter(|_| used.is_whole) else { return };
        let slot = self.at_mut(index).learned.slot(now, class);
        self.learn_from(now, index, slot, used.service);
    }

    /// Records the resource pressure on a lane.
    pub fn observe_pressure(&mut self, now: Moment, lane: LaneId, pressure: CpuPressure) {
        let Some(index) = self.find(lane) else { return };
        if let Some(auto) = &mut self.at_mut(index).auto {
            auto.observe_pressure(now, pressure);
        }
    }

    /// Returns whether the queue has a position for a newcomer.
    fn has_place(&self, index: u32, ask: &AdmissionRequest, wait: Option<ExpectedWait>) -> bool {
        let lane = self.at(index);
        let longest = lane.bounds.wait;
        let is_in_time = wait.is_none_or(|wait| micros(wait.expected) <= longest);
        is_in_time
            && !longest.is_zero()
            && lane.line.len() < lane.bounds.wait_count
            && lane.bytes.saturating_add(ask.bytes) <= lane.bounds.wait_bytes
    }

    /// Returns the same for a request whose visit goes on, whatever the length of the queue. It
    /// goes first. Visitors have positions in addition to those of newcomers.
    fn has_place_for_visitor(&self, index: u32, ask: &AdmissionRequest) -> bool {
        let lane = self.at(index);
        let most = lane.bounds.wait_count.saturating_add(VISITORS_WAITING_MAX);
        lane.line.len() < most && lane.bytes.saturating_add(ask.bytes) <= lane.bounds.wait_bytes
    }

    fn new_pass(&mut self) -> RequestKey {
        self.offered += 1;
        RequestKey(self.offered)
    }

    fn run_at_once(&mut self, now: Moment, index: u32, slot: ClassSlot) -> RequestKey {
        let pass = self.new_pass();
        let seat = self.occupy(now, index, slot);
        self.at_mut(index).counts.admitted += 1;
        self.requests.insert(pass, AdmittedRequest { lane: index, state: RequestState::Runs(seat) });
        pass
    }

    fn get_in_line(
        &mut self,
        now: Moment,
        index: u32,
        slot: ClassSlot,
        ask: &AdmissionRequest,
        (rank, order): (QueueRank, i64),
        holding: Option<HeldTicket>,
    ) -> Decision {
        let pass = self.new_pass();
        let place = QueuePosition { rank, order, turn: pass.0 };
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
        let waiting = WaitingRequest { slot, place, since: now, bytes: ask.bytes, wait, changes, holding };
        let request = AdmittedRequest { lane: index, state: RequestState::Waits(Box::new(waiting)) };
        self.requests.insert(pass, request);
        self.settle(index);
        Decision::Wait(pass, self.describe_wait(index, ahead.count, wait))
    }

    /// Gives the first request in this lane's queue its permit.
    fn run_first(&mut self, now: Moment, index: u32) {
        let lane = self.at_mut(index);
        let Some((place, pass)) = lane.line.first() else { return };
        let Some(AdmittedRequest { state: RequestState::Waits(waiting), .. }) = self.requests.remove(&pass)
        else {
            return;
        };
        let seat = self.occupy(now, index, waiting.slot);
        self.leave_line(now, index, place, &waiting);
        let lane = self.at_mut(index);
        lane.counts.admitted += 1;
        let actual = now.0.saturating_sub(waiting.since.0) as f64;
        match waiting.wait {
            Some(ExpectedWait { reckoned, expected, is_known: true }) => {
                let is_current = waiting.changes == Some(lane.learned.changes);
                lane.learned.record.add(WaitOutcome { reckoned, told: expected, actual }, is_current);
            }
            _ => lane.learned.record.add_untold(actual),
        }
        if let Some(holding) = &waiting.holding {
            self.spend(now, pass, holding);
        }
        self.requests.insert(pass, AdmittedRequest { lane: index, state: RequestState::Runs(seat) });
        self.effects.push(AdmissionEffect::Run(pass));
    }

    /// Accounts for a request that is no longer in the queue.
    fn leave_line(&mut self, now: Moment, index: u32, place: QueuePosition, waiting: &WaitingRequest) {
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

    /// Ends a request. `used` is set if it ran.
    fn end(&mut self, now: Moment, pass: RequestKey, used: Option<ServiceUse>) {
        let Some(AdmittedRequest { lane: index, state }) = self.requests.remove(&pass) else { return };
        match state {
            RequestState::Waits(waiting) => {
                self.leave_line(now, index, waiting.place, &waiting);
                self.at_mut(index).counts.left += 1;
                if let Some(holding) = &waiting.holding {
                    self.come_back(now, holding);
                }
            }
            RequestState::Runs(seat) => {
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
                self.return_permits(index, 1);
                self.dispatch(now);
            }
        }
        self.call_early(now, index);
    }

    /// Learns from a request for its lane and those around it.
    fn learn_from(&mut self, now: Moment, index: u32, slot: ClassSlot, service: Duration) {
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
                // Relative to the average request there: the unit must not change when all requests
                // become slower.
                let usual = self.at(*at).learned.expected_of_any();
                let work = cost.zip(usual).map_or(1.0, |(cost, usual)| cost / usual.max(1.0));
                self.observe(now, *at, Some(service), work);
            }
        }
    }

    /// Passes the present state to an adaptive bound.
    fn observe(&mut self, now: Moment, index: u32, service: Option<Duration>, work: f64) {
        let lane = self.at_mut(index);
        let observed = LimitSample { running: lane.running, waiting: lane.waiting_within, service, work };
        let Some(run) = lane.auto.as_mut().and_then(|auto| auto.observe(now, observed)) else { return };
        lane.run = run;
        self.settle(index);
    }
}

// === For people ===

impl Admission {
    /// Returns the load of each lane directly inside the node's: one for each tenant.
    pub fn crowds(&self) -> impl Iterator<Item = LaneLoad> {
        self.at(self.root.index).inner.values().map(|index| {
            let lane = self.at(*index);
            LaneLoad {
                lane: self.id_of(*index),
                running: lane.running,
                waiting: lane.waiting_within,
                holds_itself: lane.waiting_within > 0 && self.holds_itself(*index),
            }
        })
    }

    /// Returns whether a request in this lane or in one inside it waits for that lane's own limit.
    fn holds_itself(&self, index: u32) -> bool {
        let lane = self.at(index);
        lane.waiting_within > 0
            && (lane.is_full() || lane.inner.values().any(|inner| self.holds_itself(*inner)))
    }

    /// Returns the state of a lane. `None` if it is gone.
    pub fn explain(&self, now: Moment, lane: LaneId) -> Option<LaneReport> {
        let index = self.find(lane)?;
        let lane = self.at(index);
        let path = self.path(index);
        let is_held_around = path.as_slice()[1..].iter().any(|at| self.at(*at).is_full());
        let service = |q| lane.learned.service(q).map(micros);
        Some(LaneReport {
            running: lane.running,
            run: lane.run,
            waiting: lane.line.len(),
            waiting_bytes: lane.bytes,
            promised: self.promised_of(index),
            wait: self.describe_wait(index, 0, self.wait_at_end(now, index)).wait,
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

/// Returns the queue order of a request that comes now, moved ahead by its priority.
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
pub(crate) mod wait_queue;
