//! The slots of a calendar: a row of adjacent time ranges, with the number of open tickets in each.
//! Finding the first slot with capacity and counting earlier tickets take logarithmic time.
//!
//! Not here: the holders of tickets, and the length of slots (`calendar`).

use std::collections::VecDeque;

use crate::Moment;

/// Slots of a calendar at once. A horizon of a day in slots of a minute is 1,440.
pub(super) const SLOTS_MAX: usize = 4_096;

/// Number of a slot. Numbers rise with time and are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SlotNumber(u64);

#[derive(Debug, Clone, PartialEq)]
pub(super) struct CalendarSlot {
    pub begins: Moment,
    pub ends: Moment,
    /// Its tickets whose holders have not run yet.
    pub out: u32,
    /// Those of `out` whose holders have neither come nor been called.
    pub outside: u32,
    /// Tickets ever given for it, and those whose holders came before its end.
    pub given: u32,
    pub came: u32,
    /// All its tickets were seen from its beginning, so its outcome may be learned from.
    pub is_whole: bool,
}

impl CalendarSlot {
    /// Returns its load with one ticket more, in tickets per microsecond.
    fn load(&self) -> f64 {
        let len = self.ends.0.saturating_sub(self.begins.0).max(1);
        (f64::from(self.out) + 1.0) / len as f64
    }

    /// Returns the part of it that has passed at `until`.
    pub(super) fn passed(&self, until: Moment) -> f64 {
        let len = self.ends.0.saturating_sub(self.begins.0).max(1);
        until.0.saturating_sub(self.begins.0).min(len) as f64 / len as f64
    }
}

#[derive(Debug, Default)]
pub(super) struct SlotTree {
    /// Number of the first slot in the row.
    first: u64,
    row: VecDeque<CalendarSlot>,
    /// A tree in an array of twice a power of two. Node `n` is the parent of `2n` and `2n + 1`. A
    /// slot's leaf is its number modulo the number of leaves, so the row advances without moving
    /// entries.
    tree: Vec<SlotNode>,
}

#[derive(Debug, Clone, Copy)]
struct SlotNode {
    /// Smallest load of the slots below; infinite if there are none.
    lightest: f64,
    out: u32,
}

const NOTHING: SlotNode = SlotNode { lightest: f64::INFINITY, out: 0 };

impl SlotTree {
    pub(super) fn row(&self) -> &VecDeque<CalendarSlot> {
        &self.row
    }

    pub(super) fn get(&self, number: SlotNumber) -> Option<&CalendarSlot> {
        self.row.get(self.position(number)?)
    }

    /// Changes the counts of a slot, if it has not ended.
    pub(super) fn change(&mut self, number: SlotNumber, change: impl FnOnce(&mut CalendarSlot)) {
        let Some(position) = self.position(number) else { return };
        if let Some(slot) = self.row.get_mut(position) {
            change(slot);
            self.weigh(number);
        }
    }

    /// Adds a slot at the end of the row, where the last one ends. `None` if the row is full.
    pub(super) fn push(&mut self, begins: Moment, ends: Moment) -> Option<SlotNumber> {
        debug_assert!(self.row.back().is_none_or(|last| last.ends == begins), "slots leave no gap");
        if self.row.len() >= SLOTS_MAX {
            return None;
        }
        let number = SlotNumber(self.first + self.row.len() as u64);
        self.row.push_back(CalendarSlot {
            begins,
            ends,
            out: 0,
            outside: 0,
            given: 0,
            came: 0,
            is_whole: true,
        });
        if self.row.len() > self.leaves() {
            self.grow();
        }
        self.weigh(number);
        Some(number)
    }

    /// Removes the first slot if it has ended.
    pub(super) fn pop_ended(&mut self, now: Moment) -> Option<CalendarSlot> {
        if self.row.front()?.ends > now {
            return None;
        }
        let number = SlotNumber(self.first);
        let slot = self.row.pop_front()?;
        self.first += 1;
        self.set_leaf(number, NOTHING);
        Some(slot)
    }

    /// Returns the slot that contains a moment.
    pub(super) fn at(&self, moment: Moment) -> Option<SlotNumber> {
        let position = self.row.partition_point(|slot| slot.ends <= moment);
        self.row.get(position).filter(|slot| slot.begins <= moment).map(|_| self.number(position))
    }

    pub(super) fn front(&self) -> Option<SlotNumber> {
        (!self.row.is_empty()).then(|| self.number(0))
    }

    pub(super) fn back(&self) -> Option<SlotNumber> {
        self.row.len().checked_sub(1).map(|position| self.number(position))
    }

    /// Returns the first slot that begins at `from` or later and has capacity for one more. The
    /// rate is in tickets per microsecond.
    pub(super) fn first_with_room(&self, from: Moment, rate: f64) -> Option<SlotNumber> {
        let position = self.row.partition_point(|slot| slot.begins < from);
        let (near, far) = self.leaf_ranges(position, self.row.len());
        let leaf = [near, far].into_iter().find_map(|(from, to)| self.first_leaf(1, from, to, rate))?;
        let distance = leaf.wrapping_sub(self.leaf(SlotNumber(self.first))) & (self.leaves() - 1);
        Some(self.number(distance))
    }

    /// Returns the number of tickets that are out in earlier slots.
    pub(super) fn out_before(&self, number: SlotNumber) -> u32 {
        let Some(position) = self.position(number) else { return 0 };
        let (near, far) = self.leaf_ranges(0, position);
        self.out_in(1, near.0, near.1) + self.out_in(1, far.0, far.1)
    }

    // === The tree ===

    fn number(&self, position: usize) -> SlotNumber {
        SlotNumber(self.first + position as u64)
    }

    fn position(&self, number: SlotNumber) -> Option<usize> {
        usize::try_from(number.0.checked_sub(self.first)?).ok()
    }

    fn leaves(&self) -> usize {
        self.tree.len() / 2
    }

    fn leaf(&self, number: SlotNumber) -> usize {
        number.0 as usize & self.leaves().wrapping_sub(1)
    }

    /// Returns the leaves of the slots at these positions: a range, and its continuation at the
    /// tree's beginning.
    fn leaf_ranges(&self, from: usize, to: usize) -> ((usize, usize), (usize, usize)) {
        if from >= to {
            return ((0, 0), (0, 0));
        }
        let begin = self.leaf(self.number(from));
        let end = begin + (to - from);
        ((begin, end.min(self.leaves())), (0, end.saturating_sub(self.leaves())))
    }

    /// Returns the leaves below a node.
    fn below(&self, node: usize) -> (usize, usize) {
        let level = node.ilog2();
        let width = self.leaves() >> level;
        let from = (node - (1 << level)) * width;
        (from, from + width)
    }

    fn first_leaf(&self, node: usize, from: usize, to: usize, rate: f64) -> Option<usize> {
        if from >= to || self.tree[node].lightest > rate {
            return None;
        }
        let (begin, end) = self.below(node);
        if end <= from || to <= begin {
            return None;
        }
        if end - begin == 1 {
            return Some(begin);
        }
        self.first_leaf(2 * node, from, to, rate).or_else(|| self.first_leaf(2 * node + 1, from, to, rate))
    }

    fn out_in(&self, node: usize, from: usize, to: usize) -> u32 {
        if from >= to || self.tree[node].out == 0 {
            return 0;
        }
        let (begin, end) = self.below(node);
        if end <= from || to <= begin {
            0
        } else if from <= begin && end <= to {
            self.tree[node].out
        } else {
            self.out_in(2 * node, from, to) + self.out_in(2 * node + 1, from, to)
        }
    }

    fn weigh(&mut self, number: SlotNumber) {
        if let Some(slot) = self.get(number) {
            let node = SlotNode { lightest: slot.load(), out: slot.out };
            self.set_leaf(number, node);
        }
    }

    fn set_leaf(&mut self, number: SlotNumber, leaf: SlotNode) {
        let mut node = self.leaves() + self.leaf(number);
        self.tree[node] = leaf;
        while node > 1 {
            node /= 2;
            let left = self.tree[2 * node];
            let right = self.tree[2 * node + 1];
            self.tree[node] =
                SlotNode { lightest: left.lightest.min(right.lightest), out: left.out + right.out };
        }
    }

    fn grow(&mut self) {
        let leaves = (self.leaves() * 2).max(16);
        self.tree = vec![NOTHING; leaves * 2];
        for position in 0..self.row.len() {
            self.weigh(self.number(position));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What the tree says, said by going through the row.
    fn by_walking(slots: &SlotTree, from: Moment, rate: f64) -> Option<Moment> {
        slots.row().iter().find(|slot| slot.begins >= from && slot.load() <= rate).map(|slot| slot.begins)
    }

    proptest! {
        #[test]
        fn the_tree_says_what_walking_through_the_row_says(
            steps in prop::collection::vec((0..4u8, 1..50u64, 0..400u64, 0.0..0.5f64), 1..400),
        ) {
            let mut slots = SlotTree::default();
            let mut end = Moment(0);
            for (step, len, at, rate) in steps {
                match step {
                    0 | 1 => {
                        let begins = slots.row().back().map_or(end, |last| last.ends);
                        end = Moment(begins.0 + len);
                        slots.push(begins, end).expect("the row is short");
                    }
                    2 => {
                        let number = slots.at(Moment(at));
                        number.into_iter().for_each(|number| slots.change(number, |slot| slot.out += 1));
                    }
                    _ => drop(slots.pop_ended(Moment(at / 2))),
                }
                let found = slots.first_with_room(Moment(at), rate);
                let begins = found.and_then(|number| slots.get(number)).map(|slot| slot.begins);
                prop_assert_eq!(begins, by_walking(&slots, Moment(at), rate));
                if let Some(number) = slots.at(Moment(at)) {
                    let before = slots.row().iter().filter(|slot| slot.ends <= Moment(at)).map(|slot| slot.out).sum();
                    prop_assert_eq!(slots.out_before(number), before);
                }
            }
        }
    }

    #[test]
    fn a_row_has_an_end() {
        let mut slots = SlotTree::default();
        for at in 0..SLOTS_MAX as u64 {
            assert!(slots.push(Moment(at), Moment(at + 1)).is_some());
        }
        assert_eq!(slots.push(Moment(SLOTS_MAX as u64), Moment(SLOTS_MAX as u64 + 1)), None);
        assert!(slots.pop_ended(Moment(1)).is_some());
        assert!(slots.push(Moment(SLOTS_MAX as u64), Moment(SLOTS_MAX as u64 + 1)).is_some());
    }
}
