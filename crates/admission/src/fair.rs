//! Chooses the next lane among the lanes inside one lane: start-time fair queueing by weight, in
//! work instead of requests.
//!
//! Each flow (a lane's own queue, or a lane inside it) has a start tag; the least goes first. A
//! granted request moves the flow's tag by its expected service over the weight. A flow that was
//! away starts at the virtual time, where the others are, less a [`BURST`]. It has saved up almost
//! nothing and owes nothing. So each other flow can pass a waiter with one request per turn. A flow
//! that was away can pass it with one burst.
//!
//! Not here: who may go at all, which is a matter of bounds (`machine::tree`), and the order within
//! a line (`machine::wait_queue`).

use std::collections::BTreeMap;

/// Scale of tags: microseconds of service times this, over the weight. It keeps a microsecond
/// visible at the largest weight.
const SCALE_BITS: u32 = 16;
/// Largest cost of one request, in microseconds (12 days), so that the scaled cost fits.
const COST_MAX: f64 = 1e12;

/// The flows inside one lane that can go.
#[derive(Debug, Default)]
pub(crate) struct FairShare {
    virtual_time: u128,
    ready: BTreeMap<Tag, u32>,
    /// Sum of the weights of ready flows.
    weight: u64,
    /// Among equal tags, the flow that was ready first goes first.
    turns: u64,
}

/// Service that a flow has received.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct LaneFlow {
    /// Earliest start of its next request, in virtual time.
    finish: u128,
    /// Distance by which its last request moved `finish`.
    step: u64,
    /// Its position among the ready flows, and its weight there.
    place: Option<(Tag, u32)>,
}

type Tag = (u128, u64);

impl LaneFlow {
    pub(crate) fn is_ready(&self) -> bool {
        self.place.is_some()
    }
}

impl FairShare {
    /// Returns true if no flow can go.
    pub(crate) fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// Returns the part of the total that this flow has, or would have, at present.
    pub(crate) fn share(&self, flow: &LaneFlow, weight: u32) -> f64 {
        let others = self.weight - flow.place.map_or(0, |(_, weight)| u64::from(weight));
        f64::from(weight) / (others as f64 + f64::from(weight))
    }

    /// Returns the flow that is next.
    pub(crate) fn first(&self) -> Option<u32> {
        self.ready.first_key_value().map(|(_, id)| *id)
    }

    /// Returns where a flow starts that was away: where the others are, less a small burst.
    fn start(&self, flow: &LaneFlow) -> u128 {
        flow.finish.max(self.virtual_time.saturating_sub(u128::from(flow.step * BURST)))
    }

    /// Marks this flow as ready.
    pub(crate) fn activate(&mut self, flow: &mut LaneFlow, id: u32, weight: u32) {
        debug_assert!(flow.place.is_none(), "a flow becomes ready once");
        let tag = (self.start(flow), self.turns);
        self.turns += 1;
        self.ready.insert(tag, id);
        self.weight += u64::from(weight);
        flow.place = Some((tag, weight));
    }

    /// Marks this flow as not ready.
    pub(crate) fn deactivate(&mut self, flow: &mut LaneFlow) {
        if let Some((tag, weight)) = flow.place.take() {
            self.ready.remove(&tag);
            self.weight -= u64::from(weight);
        }
    }

    /// Charges a request of this flow that runs, in its turn or because no other can. `cost` is its
    /// expected service in microseconds.
    pub(crate) fn charge(&mut self, flow: &mut LaneFlow, cost: f64, weight: u32) {
        let start = flow.place.map_or_else(|| self.start(flow), |(tag, _)| tag.0);
        self.virtual_time = self.virtual_time.max(start);
        flow.step = step(cost, weight);
        flow.finish = start + u128::from(flow.step);
        if let Some((tag, weight)) = flow.place
            && let Some(id) = self.ready.remove(&tag)
        {
            let tag = (flow.finish, self.turns);
            self.turns += 1;
            self.ready.insert(tag, id);
            flow.place = Some((tag, weight));
        }
    }
}

/// Requests that may come at once in a lane that uses less than its part. The later ones do not
/// wait for the lane's next turn: people's requests come in twos and threes. A lane saves up no
/// more than this while it is away.
const BURST: u64 = 2;

/// Returns how far a cost moves a tag. Never 0, so that turns advance even if requests cost
/// nothing.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn step(cost: f64, weight: u32) -> u64 {
    let scaled = (cost.clamp(1.0, COST_MAX) as u64) << SCALE_BITS;
    (scaled / u64::from(weight.max(1))).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(
        fair: &mut FairShare,
        flows: &mut [LaneFlow],
        costs: &[f64],
        weights: &[u32],
        rounds: usize,
    ) -> Vec<f64> {
        let mut work = vec![0.0; flows.len()];
        for _ in 0..rounds {
            let at = fair.first().expect("some flow is ready") as usize;
            fair.charge(&mut flows[at], costs[at], weights[at]);
            work[at] += costs[at];
        }
        work
    }

    #[test]
    fn work_is_shared_by_weight_whatever_a_request_costs() {
        let mut fair = FairShare::default();
        let mut flows = [LaneFlow::default(); 3];
        for (id, flow) in (0..).zip(flows.iter_mut()) {
            fair.activate(flow, id, 100);
        }
        let work = served(&mut fair, &mut flows, &[1_000.0, 50_000.0, 1_000.0], &[100, 100, 300], 100_000);
        assert!((work[0] / work[1] - 1.0).abs() < 0.01, "{work:?}");
        assert!((work[2] / work[0] - 3.0).abs() < 0.03, "{work:?}");
    }

    #[test]
    fn absent_flow_saves_up_a_burst_and_owes_nothing() {
        let mut fair = FairShare::default();
        let mut flows = [LaneFlow::default(); 2];
        fair.activate(&mut flows[0], 0, 100);
        served(&mut fair, &mut flows, &[1_000.0, 1_000.0], &[100, 100], 1_000);
        fair.activate(&mut flows[1], 1, 100);
        let work = served(&mut fair, &mut flows, &[1_000.0, 1_000.0], &[100, 100], 10);
        assert_eq!(work, [5_000.0, 5_000.0], "nothing before its first request");
        fair.deactivate(&mut flows[1]);
        served(&mut fair, &mut flows, &[1_000.0, 1_000.0], &[100, 100], 1_000);
        fair.activate(&mut flows[1], 1, 100);
        let work = served(&mut fair, &mut flows, &[1_000.0, 1_000.0], &[100, 100], 10);
        assert_eq!(work, [4_000.0, 6_000.0]);
        fair.deactivate(&mut flows[0]);
        assert_eq!((fair.first(), flows[0].is_ready()), (Some(1), false));
        assert!((fair.share(&flows[1], 100) - 1.0).abs() < 1e-9);
        assert!((fair.share(&flows[0], 300) - 0.75).abs() < 1e-9);
    }

    #[test]
    fn equal_tags_go_in_the_order_they_became_ready() {
        let mut fair = FairShare::default();
        let mut flows = [LaneFlow::default(); 3];
        for id in [2usize, 0, 1] {
            fair.activate(&mut flows[id], u32::try_from(id).expect("small"), 100);
        }
        let mut order = Vec::new();
        while let Some(id) = fair.first() {
            order.push(id);
            fair.deactivate(&mut flows[id as usize]);
        }
        assert_eq!(order, [2, 0, 1]);
        assert!(fair.is_empty());
    }
}
