//! How often one request may still be sent again, over all nodes that have it.
//!
//! The first time is free; each further one is taken from here before it begins, whether it goes to another node or to the
//! application on this one. A node that a request is sent on to gets a part of what is left, and has no more. Not here: whether
//! the request may be sent again at all (`repeat`, `upstream`).

use std::cell::Cell;

/// How often one request is sent again at most: to other nodes, and on each of them to the application.
pub const RETRIES_MAX: u32 = 8;

/// So much of it a node needs for itself: once a connection was stale, and once the application had ended.
const PART_MAX: u32 = 2;

/// What one request has, and what is left of it.
#[derive(Debug)]
pub struct Retries {
    all: u32,
    left: Cell<u32>,
}

impl Retries {
    /// Of a request that came with so many, or from a client.
    pub fn new(carried: Option<u32>) -> Self {
        let all = carried.unwrap_or(RETRIES_MAX).min(RETRIES_MAX);
        Self { all, left: Cell::new(all) }
    }

    /// One more is about to be made. False: none may be.
    pub fn take(&self) -> bool {
        let left = self.left.get();
        self.left.set(left.saturating_sub(1));
        left > 0
    }

    /// The part for another node: half of what is left at most, since all of it is lost with that node.
    pub fn lend(&self) -> u32 {
        let part = (self.left.get() / 2).min(PART_MAX);
        self.left.set(self.left.get() - part);
        part
    }

    /// Of a part, this was not used.
    pub fn give_back(&self, unused: u32) {
        self.left.set((self.left.get() + unused).min(self.all));
    }

    /// So many are gone.
    pub fn used(&self) -> u32 {
        self.all - self.left.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often a request reaches an application if each node uses all it may and is then lost, and how many nodes there were.
    fn spent(by_client: Option<u32>) -> (u32, u32) {
        let here = Retries::new(by_client);
        let (mut tries, mut nodes) = (0, 0);
        loop {
            let there = Retries::new(Some(here.lend()));
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
        assert!(nodes as usize > crate::place::RELOCATIONS_MAX, "{nodes}");
        // Whoever says that there are more is not believed.
        assert_eq!(spent(Some(u32::MAX)), (tries, nodes));
        assert_eq!(spent(Some(0)), (1, 1));
    }

    #[test]
    fn what_a_node_did_not_use_can_be_used_elsewhere() {
        let here = Retries::new(None);
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
