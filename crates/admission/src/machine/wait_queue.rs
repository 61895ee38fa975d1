//! One queue of waiting requests: ordered, with the work ahead of each. Any request may leave at
//! any time.
//!
//! It is a treap: a search tree by position that is also a heap by a scrambled number. So it is
//! balanced whatever the order of arrival. Each node knows the count and the cost of its subtree.
//! So the work ahead of a request takes `O(log n)`, as does every other call.
//!
//! Not here: the meaning of positions beyond their order (`lane`), and the length of a wait
//! (`predict`).

use std::cmp::Ordering;

use slab::Slab;

use crate::RequestKey;
use crate::predict::ClassSlot;

/// A position in the queue. A lesser one is further ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueuePosition {
    pub(crate) rank: QueueRank,
    /// Microseconds: arrival minus the value of its priority, or the beginning of a slot.
    pub(crate) order: i64,
    /// Among equals, the earlier arrival goes first.
    pub(crate) turn: u64,
}

impl QueuePosition {
    /// Behind all others.
    pub(crate) const LAST: Self = Self { rank: QueueRank::Newcomer, order: i64::MAX, turn: u64::MAX };
}

/// Groups that go before each other, whenever their requests came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum QueueRank {
    /// Holders of a ticket whose slot is open.
    Holder,
    /// Requests whose visit goes on: they have waited before.
    Visitor,
    /// Holders whose slot has ended.
    LateHolder,
    Newcomer,
}

/// Work ahead of a position.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct WorkAhead {
    pub(crate) count: u32,
    /// Sum of the costs, as estimated when each request queued.
    pub(crate) cost: f64,
}

#[derive(Debug)]
pub(crate) struct WaitQueue {
    nodes: Slab<QueueNode>,
    root: u32,
}

#[derive(Debug)]
struct QueueNode {
    place: QueuePosition,
    pass: RequestKey,
    slot: ClassSlot,
    cost: f32,
    heat: u32,
    left: u32,
    right: u32,
    /// Sum over the subtree, itself included.
    sum: WorkAhead,
}

/// No node.
const NONE: u32 = u32::MAX;

impl Default for WaitQueue {
    fn default() -> Self {
        Self { nodes: Slab::new(), root: NONE }
    }
}

impl WaitQueue {
    pub(crate) fn len(&self) -> u32 {
        self.sum(self.root).count
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.root == NONE
    }

    /// Returns the number of all requests and their cost.
    pub(crate) fn total(&self) -> WorkAhead {
        self.sum(self.root)
    }

    /// Returns the request that goes next.
    pub(crate) fn first(&self) -> Option<(QueuePosition, RequestKey)> {
        let mut at = self.node(self.root)?;
        while let Some(left) = self.node(at.left) {
            at = left;
        }
        Some((at.place, at.pass))
    }

    /// Returns the work before this position, which need not be taken.
    pub(crate) fn before(&self, place: QueuePosition) -> WorkAhead {
        let mut ahead = WorkAhead::default();
        let mut at = self.root;
        while let Some(node) = self.node(at) {
            if node.place < place {
                let left = self.sum(node.left);
                ahead.count += left.count + 1;
                ahead.cost += left.cost + f64::from(node.cost);
                at = node.right;
            } else {
                at = node.left;
            }
        }
        ahead
    }

    /// Takes this position, which must be free.
    pub(crate) fn insert(&mut self, place: QueuePosition, pass: RequestKey, slot: ClassSlot, cost: f32) {
        let sum = WorkAhead { count: 1, cost: f64::from(cost) };
        let node =
            QueueNode { place, pass, slot, cost, heat: scramble(pass.0), left: NONE, right: NONE, sum };
        let new = u32::try_from(self.nodes.insert(node)).expect("a line's count fits in 32 bits");
        let (before, after) = self.split(self.root, place);
        let front = self.merge(before, new);
        self.root = self.merge(front, after);
    }

    /// Leaves this position.
    pub(crate) fn remove(&mut self, place: QueuePosition) -> Option<RequestKey> {
        let (root, found) = self.without(self.root, place);
        self.root = root;
        found
    }

    /// Returns the kinds of the requests before this position, in order.
    pub(crate) fn kinds_before(&self, place: QueuePosition) -> impl Iterator<Item = ClassSlot> {
        let mut above = Vec::new();
        let mut next = self.root;
        std::iter::from_fn(move || {
            while let Some(node) = self.node(next) {
                above.push(next);
                next = node.left;
            }
            let node = self.node(above.pop()?)?;
            next = node.right;
            Some(node)
        })
        .take_while(move |node| node.place < place)
        .map(|node| node.slot)
    }

    /// Removes and returns all passes, in order.
    pub(crate) fn drain(&mut self) -> Vec<RequestKey> {
        let mut all: Vec<_> = self.nodes.drain().map(|node| (node.place, node.pass)).collect();
        all.sort_unstable();
        self.root = NONE;
        all.into_iter().map(|(_, pass)| pass).collect()
    }

    fn node(&self, at: u32) -> Option<&QueueNode> {
        self.nodes.get(at as usize)
    }

    fn sum(&self, at: u32) -> WorkAhead {
        self.node(at).map_or_else(WorkAhead::default, |node| node.sum)
    }

    fn update(&mut self, at: u32) {
        let left = self.sum(self.nodes[at as usize].left);
        let right = self.sum(self.nodes[at as usize].right);
        let node = &mut self.nodes[at as usize];
        node.sum.count = left.count + right.count + 1;
        node.sum.cost = left.cost + right.cost + f64::from(node.cost);
    }

    /// Returns a subtree without this position, and the request that was there.
    fn without(&mut self, at: u32, place: QueuePosition) -> (u32, Option<RequestKey>) {
        let Some(node) = self.node(at) else { return (NONE, None) };
        let left = node.left;
        let right = node.right;
        let pass = node.pass;
        let found = match place.cmp(&node.place) {
            Ordering::Equal => {
                self.nodes.remove(at as usize);
                return (self.merge(left, right), Some(pass));
            }
            Ordering::Less => {
                let (left, found) = self.without(left, place);
                self.nodes[at as usize].left = left;
                found
            }
            Ordering::Greater => {
                let (right, found) = self.without(right, place);
                self.nodes[at as usize].right = right;
                found
            }
        };
        self.update(at);
        (at, found)
    }

    /// Splits a subtree into the part before a position, and the rest.
    fn split(&mut self, at: u32, place: QueuePosition) -> (u32, u32) {
        if at == NONE {
            return (NONE, NONE);
        }
        let node = &self.nodes[at as usize];
        if node.place < place {
            let (before, after) = self.split(node.right, place);
            self.nodes[at as usize].right = before;
            self.update(at);
            (at, after)
        } else {
            let (before, after) = self.split(node.left, place);
            self.nodes[at as usize].left = after;
            self.update(at);
            (before, at)
        }
    }

    /// Merges two subtrees, all of the first before all of the second.
    fn merge(&mut self, first: u32, second: u32) -> u32 {
        if first == NONE {
            return second;
        }
        if second == NONE {
            return first;
        }
        if self.nodes[first as usize].heat > self.nodes[second as usize].heat {
            let right = self.nodes[first as usize].right;
            self.nodes[first as usize].right = self.merge(right, second);
            self.update(first);
            first
        } else {
            let left = self.nodes[second as usize].left;
            self.nodes[second as usize].left = self.merge(first, left);
            self.update(second);
            second
        }
    }
}

/// Spreads consecutive numbers evenly (the finalizer of splitmix64). It is the same in each run,
/// and no order of arrivals makes the tree deep.
#[expect(clippy::cast_possible_truncation)]
fn scramble(number: u64) -> u32 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ (mixed >> 31)) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slot(turn: u64) -> ClassSlot {
        ClassSlot::from(turn as u8)
    }

    fn place(order: i64, turn: u64) -> QueuePosition {
        QueuePosition { rank: QueueRank::Newcomer, order, turn }
    }

    proptest! {
        /// Against a sorted list.
        #[test]
        fn a_line_is_a_sorted_list(steps in prop::collection::vec((0i64..50, any::<bool>()), 1..300)) {
            let mut line = WaitQueue::default();
            let mut model: Vec<(QueuePosition, RequestKey, f32)> = Vec::new();
            for (turn, (order, leaves)) in (0u64..).zip(steps) {
                if leaves && !model.is_empty() {
                    let (at, pass, _) = model.remove(usize::try_from(order).expect("positive") % model.len());
                    prop_assert_eq!(line.remove(at), Some(pass));
                    prop_assert_eq!(line.remove(at), None);
                } else {
                    let cost = 1.0 + order as f32;
                    line.insert(place(order, turn), RequestKey(turn), slot(turn), cost);
                    model.push((place(order, turn), RequestKey(turn), cost));
                    model.sort_by_key(|(place, ..)| *place);
                }
                prop_assert_eq!(line.first(), model.first().map(|(place, pass, _)| (*place, *pass)));
                prop_assert_eq!(line.len() as usize, model.len());
                prop_assert_eq!(line.is_empty(), model.is_empty());
                let probe = place(order, turn / 2);
                let ahead: Vec<_> = model.iter().filter(|(at, ..)| *at < probe).collect();
                let cost: f64 = ahead.iter().map(|(.., cost)| f64::from(*cost)).sum();
                let found = line.before(probe);
                prop_assert_eq!(found.count as usize, ahead.len());
                prop_assert!((found.cost - cost).abs() < 1e-3);
                let kinds: Vec<ClassSlot> = ahead.iter().map(|(_, pass, _)| slot(pass.0)).collect();
                prop_assert_eq!(line.kinds_before(probe).collect::<Vec<_>>(), kinds);
            }
            let all: Vec<RequestKey> = model.iter().map(|(_, pass, _)| *pass).collect();
            prop_assert_eq!(line.drain(), all);
            prop_assert!(line.is_empty());
        }
    }

    #[test]
    fn holders_stand_before_late_ones_and_those_before_newcomers() {
        let mut line = WaitQueue::default();
        for (turn, rank) in (0u64..).zip([QueueRank::Newcomer, QueueRank::LateHolder, QueueRank::Holder]) {
            line.insert(QueuePosition { rank, order: 0, turn }, RequestKey(turn), slot(turn), 1.0);
        }
        assert_eq!(line.drain(), [RequestKey(2), RequestKey(1), RequestKey(0)]);
    }

    #[test]
    fn a_long_line_stays_shallow() {
        let mut line = WaitQueue::default();
        for turn in 0..100_000u64 {
            line.insert(place(0, turn), RequestKey(turn), slot(turn), 1.0);
        }
        fn depth(line: &WaitQueue, at: u32) -> usize {
            line.node(at).map_or(0, |node| 1 + depth(line, node.left).max(depth(line, node.right)))
        }
        let depth = depth(&line, line.root);
        assert!(depth < 60, "{depth}");
    }
}
