//! Limits how often one request may be sent again, over all nodes that have it.
//!
//! The first attempt is free. Each further one is taken from this budget before it begins. That
//! holds for other nodes and for the application on this one. A node that gets a forwarded request
//! gets a part of the rest, and has no more. Not here: whether the request may be sent again at all
//! (`idempotence`, `upstream`).

use std::cell::Cell;

/// Maximum number of further attempts of one request: to other nodes, and on each of them to the
/// application.
pub const RETRIES_MAX: u32 = 8;

/// Part of the budget that a node needs itself: once for a stale connection, once for an ended
/// application.
const PART_MAX: u32 = 2;

/// Budget of one request, and the rest of it.
#[derive(Debug)]
pub struct RetryBudget {
    all: u32,
    left: Cell<u32>,
}

impl RetryBudget {
    /// Returns the budget of a request that came with this number, or from a client.
    pub fn new(carried: Option<u32>) -> Self {
        let all = carried.unwrap_or(RETRIES_MAX).min(RETRIES_MAX);
        Self { all, left: Cell::new(all) }
    }

    /// Takes one attempt. Returns false if none is left.
    pub fn take(&self) -> bool {
        let left = self.left.get();
        self.left.set(left.saturating_sub(1));
        left > 0
    }

    /// Takes the part for another node. It is at most half of the rest, because a lost node loses
    /// all of it.
    pub fn lend(&self) -> u32 {
        let part = (self.left.get() / 2).min(PART_MAX);
        self.left.set(self.left.get() - part);
        part
    }

    /// Gives back the unused rest of a part.
    pub fn give_back(&self, unused: u32) {
        self.left.set((self.left.get() + unused).min(self.all));
    }

    /// Returns the number of used attempts.
    pub fn used(&self) -> u32 {
        self.all - self.left.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often a request reaches an application if each node uses all it may and is then lost, and how many nodes there were.
    fn spent(by_client: Option<u32>) -> (u32, u32) {
        let here = RetryBudget::new(by_client);
        let (mut tries, mut nodes) = (0, 0);
        loop {
            let there = RetryBudget::new(Some(here.lend()));
            (tries, nodes) = (tries + 1, nodes + 1);
            while there.take() {
                tries += 1;
            }
            if !here.take() {
                return (tries, nodes);
            }
        }
    }

    #[test]
    fn over_all_nodes_it_is_sent_again_so_often_and_not_once_more() {
        let (tries, nodes) = spent(None);
        assert_eq!(tries, 1 + RETRIES_MAX);
        // Each of them may have found it a new place.
        assert!(nodes as usize > crate::request::placement::search::ASKS_AT_ONCE, "{nodes}");
        // Whoever says that there are more is not believed.
        assert_eq!(spent(Some(u32::MAX)), (tries, nodes));
        assert_eq!(spent(Some(0)), (1, 1));
    }

    #[test]
    fn retries_a_node_did_not_use_can_be_used_elsewhere() {
        let here = RetryBudget::new(None);
        for _ in 0..100 {
            let part = here.lend();
            assert_eq!(part, PART_MAX);
            here.give_back(part);
        }
        assert_eq!(here.used(), 0);
        assert!(here.take());
        assert_eq!(here.used(), 1);
    }
}
