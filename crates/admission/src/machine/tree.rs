//! The tree of lanes. A permit counts in a lane and in all around it. A freed permit goes to the
//! lane whose turn it is.
//!
//! Each lane knows which of its flows can go: its own queue, and the lanes inside it. That changes
//! only along the path from a lane to the node's. So every step walks at most [`DEPTH_MAX`] lanes,
//! whatever their number.
//!
//! Not here: offers and decisions (`machine`), and the choice among flows (`fair`).

use super::{Admission, DEPTH_MAX};
use crate::lane::{Lane, OWN_LINE, OWN_WEIGHT};
use crate::predict::ClassSlot;
use crate::{AdmissionEffect, AdmissionRefusal, LaneId, LaneLimits, LaneName, Moment};

/// Service assumed for sharing, in microseconds, while nothing at all is known. It is never shown.
/// It is small, so that the first request owes nothing for it later.
const COST_UNKNOWN: f64 = 1_000.0;

/// A lane and those around it, from the inside out.
#[derive(Debug, Clone, Copy)]
pub(super) struct LanePath {
    lanes: [u32; DEPTH_MAX],
    len: usize,
}

impl LanePath {
    pub(super) fn as_slice(&self) -> &[u32] {
        &self.lanes[..self.len]
    }
}

impl Admission {
    /// Returns a lane that has not been removed.
    pub(super) fn find(&self, lane: LaneId) -> Option<u32> {
        let found = self.lanes.get(lane.index as usize)?;
        (found.generation == lane.generation && !found.is_gone).then_some(lane.index)
    }

    /// Returns a lane, even a removed one if something still runs in it.
    pub(super) fn find_even_gone(&self, lane: LaneId) -> Option<u32> {
        let found = self.lanes.get(lane.index as usize)?;
        (found.generation == lane.generation).then_some(lane.index)
    }

    pub(super) fn at(&self, index: u32) -> &Lane {
        &self.lanes[index as usize]
    }

    pub(super) fn at_mut(&mut self, index: u32) -> &mut Lane {
        &mut self.lanes[index as usize]
    }

    pub(super) fn id_of(&self, index: u32) -> LaneId {
        LaneId { index, generation: self.at(index).generation }
    }

    pub(super) fn path(&self, index: u32) -> LanePath {
        let mut path = LanePath { lanes: [index; DEPTH_MAX], len: 0 };
        let mut next = Some(index);
        while let Some(at) = next {
            path.lanes[path.len] = at;
            path.len += 1;
            next = self.at(at).around;
        }
        path
    }

    /// Returns whether all lanes of a path have a permit left.
    pub(super) fn has_room(&self, path: &LanePath) -> bool {
        path.as_slice().iter().all(|at| !self.at(*at).is_full())
    }

    pub(super) fn make_lane(&mut self, name: LaneName, around: Option<u32>, bounds: LaneLimits) -> LaneId {
        let generation = self.generations;
        self.generations = self.generations.wrapping_add(1);
        let lane = Lane::new(generation, name, around, bounds);
        let index = u32::try_from(self.lanes.insert(lane)).expect("memory ends long before lanes do");
        if let Some(around) = around {
            self.at_mut(around).inner.insert(name, index);
        }
        LaneId { index, generation }
    }

    /// Returns this lane and those inside it, the innermost first.
    pub(super) fn with_inner(&self, index: u32) -> Vec<u32> {
        let mut found = vec![index];
        let mut next = 0;
        while let Some(at) = found.get(next) {
            // Hash maps have their own order in each process, and effects must not.
            let mut inner: Vec<u32> = self.at(*at).inner.values().copied().collect();
            inner.sort_unstable();
            found.extend(inner);
            next += 1;
        }
        found.reverse();
        found
    }

    /// Takes a lane out of the tree. Its running requests stay counted in the lanes around.
    pub(super) fn detach(&mut self, index: u32) {
        let passes = self.at_mut(index).line.drain();
        let count = u32::try_from(passes.len()).expect("a line's count fits in 32 bits");
        for at in self.path(index).as_slice() {
            self.at_mut(*at).waiting_within -= count;
        }
        for pass in passes {
            self.requests.remove(&pass);
            self.effects.push(AdmissionEffect::Dismiss(pass, AdmissionRefusal::NoLane));
        }
        let lane = self.at_mut(index);
        lane.is_gone = true;
        lane.bytes = 0;
        lane.holders = 0;
        lane.queued_since = None;
        let name = lane.name;
        let around = lane.around;
        self.settle(index);
        if let Some(around) = around {
            self.at_mut(around).inner.remove(&name);
        }
        self.forget_if_over(index);
    }

    /// Forgets a removed lane once nothing runs in it.
    fn forget_if_over(&mut self, index: u32) {
        let lane = self.at(index);
        if lane.is_gone && lane.running == 0 {
            debug_assert!(lane.inner.is_empty() && lane.line.is_empty() && !lane.flow.is_ready());
            let around = lane.around;
            self.lanes.remove(index as usize);
            if let Some(around) = around {
                self.at_mut(around).lending.remove(&index);
            }
        }
    }

    /// Moves a lane among the others after its weight has changed.
    pub(super) fn stand_back(&mut self, index: u32) {
        let mut flow = self.at(index).flow;
        let around = self.at(index).around;
        if let Some(around) = around {
            self.at_mut(around).fair.deactivate(&mut flow);
            self.at_mut(index).flow = flow;
        }
    }

    /// Updates which flows can go after a change in this lane and perhaps around it.
    pub(super) fn settle(&mut self, index: u32) {
        let lane = self.at_mut(index);
        if lane.line.is_empty() == lane.own_flow.is_ready() {
            if lane.line.is_empty() {
                lane.fair.deactivate(&mut lane.own_flow);
            } else {
                lane.fair.activate(&mut lane.own_flow, OWN_LINE, OWN_WEIGHT);
            }
        }
        let mut at = index;
        while let Some(around) = self.at(at).around {
            let lane = self.at(at);
            let is_ready = lane.is_ready();
            let mut flow = lane.flow;
            let weight = lane.bounds.weight;
            if is_ready != flow.is_ready() {
                let fair = &mut self.at_mut(around).fair;
                if is_ready {
                    fair.activate(&mut flow, at, weight)
                } else {
                    fair.deactivate(&mut flow)
                }
                self.at_mut(at).flow = flow;
            }
            at = around;
        }
    }

    /// Counts a request that has its permit in its lane and around it, and charges each flow.
    /// Returns its index among the running requests.
    pub(super) fn occupy(&mut self, now: Moment, index: u32, slot: ClassSlot) -> usize {
        let cost = self.cost(index, slot);
        let lane = self.at_mut(index);
        if !lane.line.is_empty() {
            lane.pass_time_in_line(now);
        }
        lane.learned.starts(now, slot);
        let seat = lane.own.insert((slot, now));
        lane.fair.charge(&mut lane.own_flow, cost, OWN_WEIGHT);
        let mut next = Some(index);
        while let Some(at) = next {
            let lane = self.at_mut(at);
            lane.running += 1;
            let mut flow = lane.flow;
            let weight = lane.bounds.weight;
            let has_woken = lane.auto.is_some() && lane.running == 1;
            next = lane.around;
            if let Some(around) = next {
                self.at_mut(around).fair.charge(&mut flow, cost, weight);
                self.at_mut(at).flow = flow;
            }
            if has_woken {
                self.autos.insert(at);
            }
        }
        self.settle(index);
        seat
    }

    /// Takes permits of a lane back.
    pub(super) fn return_permits(&mut self, index: u32, count: u32) {
        let path = self.path(index);
        for at in path.as_slice() {
            let lane = self.at_mut(*at);
            debug_assert!(lane.running >= count, "a permit comes back once");
            lane.running -= count;
        }
        self.settle(index);
        for at in path.as_slice() {
            self.forget_if_over(*at);
        }
    }

    /// Gives free permits to waiting requests. Afterwards no request waits that could run.
    pub(super) fn dispatch(&mut self, now: Moment) {
        let root = self.root.index;
        while self.at(root).is_ready() {
            let mut at = root;
            while let Some(flow) = self.at(at).fair.first().filter(|flow| *flow != OWN_LINE) {
                at = flow;
            }
            self.run_first(now, at);
        }
    }

    /// Returns the expected service of a request in microseconds, for sharing. It is that of its
    /// kind, else of its lane, else of those around.
    pub(super) fn cost(&self, index: u32, slot: ClassSlot) -> f64 {
        self.at(index).learned.expected(slot).unwrap_or_else(|| {
            let known = self.path(index);
            let mut known = known.as_slice().iter().filter_map(|at| self.at(*at).learned.expected_of_any());
            known.next().unwrap_or(COST_UNKNOWN)
        })
    }
}
