//! The store: one linearizable register for each site's placement, with revisions.
//!
//! It is as etcd looks from outside: what it has agreed to is there for ever, in one order; it may be away, slow, or do what it was
//! asked and lose its answer. Every node's copy is a prefix of its log, so one log serves all of them.
//!
//! Not here: when questions and answers arrive (`world`).

use nagaya_placement::relocation::At;

use crate::wire::{NodeId, SiteId, StoreAsk, StoreSays};

/// One change.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Change {
    pub site: SiteId,
    pub before: Option<NodeId>,
    pub after: At<NodeId>,
    /// Real time, nanoseconds.
    pub at: u64,
}

#[derive(Debug)]
pub(crate) struct Store {
    /// The change of revision `n` is at `n - 1`.
    log: Vec<Change>,
    /// For each site its revisions and placements, the oldest first.
    history: Vec<Vec<(u64, At<NodeId>)>>,
    /// Sites placed on each node, now.
    pub counts: Vec<u32>,
}

impl Store {
    pub fn new(sites: usize, nodes: usize) -> Self {
        Self { log: Vec::new(), history: vec![Vec::new(); sites], counts: vec![0; nodes] }
    }

    pub fn head(&self) -> u64 {
        self.log.len() as u64
    }

    /// The changes after revision `from` up to `to`.
    pub fn changes(&self, from: u64, to: u64) -> &[Change] {
        &self.log[from as usize..(to as usize).max(from as usize)]
    }

    /// The placement as a copy of this revision has it.
    pub fn at(&self, site: SiteId, revision: u64) -> Option<At<NodeId>> {
        self.history[site as usize].iter().rev().find(|(made, _)| *made <= revision).map(|(_, at)| *at)
    }

    /// Which node had the epoch, and when the next one was committed.
    pub fn epoch(&self, site: SiteId, epoch: u64) -> Option<(NodeId, Option<u64>)> {
        let history = &self.history[site as usize];
        let index = history.iter().position(|(_, at)| at.epoch == epoch)?;
        let ended = history.get(index + 1).map(|(revision, _)| self.log[*revision as usize - 1].at);
        Some((history[index].1.node, ended))
    }

    pub fn put(&mut self, now: u64, site: SiteId, node: NodeId) {
        let before = self.at(site, self.head());
        let after = At { node, epoch: before.map_or(1, |before| before.epoch + 1) };
        if let Some(before) = before {
            self.counts[before.node as usize] -= 1;
        }
        self.counts[node as usize] += 1;
        self.log.push(Change { site, before: before.map(|before| before.node), after, at: now });
        let revision = self.head();
        self.history[site as usize].push((revision, after));
    }

    /// Does what it is asked, now.
    pub fn apply(&mut self, now: u64, ask: StoreAsk) -> StoreSays {
        match ask {
            StoreAsk::Renew(id) => StoreSays::Renewed { id, revision: self.head() },
            StoreAsk::Look { site, ask } => {
                StoreSays::Found { site, ask, placement: self.at(site, self.head()) }
            }
            StoreAsk::Commit { site, ask, node, from, expect, before } => {
                let current = self.at(site, self.head());
                let done = if current.map(|at| at.epoch) == expect {
                    self.put(now, site, node);
                    Ok(self.head())
                } else {
                    Err(current)
                };
                StoreSays::Committed { site, ask, from, before, done }
            }
        }
    }
}
