//! The store: one linearizable register for each site's placement, and whether there is the site, with revisions.
//!
//! It is as etcd looks from outside: what it has agreed to is there for ever, in one order; it may be away, slow, or do what it was
//! asked and lose its answer. Every node's copy is a prefix of its log, so one log serves all of them.
//!
//! Not here: when questions and answers arrive (`world`).

use std::collections::BTreeSet;

use nagaya_placement::relocation::At;

use crate::wire::{Instead, NodeId, SiteId, StoreAsk, StoreSays};

/// One change.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Change {
    pub site: SiteId,
    pub what: Happened,
    /// Real time, nanoseconds.
    pub at: u64,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Happened {
    Placed {
        before: Option<NodeId>,
        after: At<NodeId>,
    },
    /// Its placement stays.
    Removed,
    Added,
    /// The placement of a site that was removed is gone, too: epochs of its name begin anew.
    Forgotten,
}

/// A site's placement from a revision on, and how often it was forgotten before.
#[derive(Debug, Clone, Copy)]
struct Entry {
    made: u64,
    life: u32,
    at: Option<At<NodeId>>,
}

#[derive(Debug)]
pub(crate) struct Store {
    /// The change of revision `n` is at `n - 1`.
    log: Vec<Change>,
    /// For each site its placements, the oldest first.
    history: Vec<Vec<Entry>>,
    /// For each site the revisions at which it was removed and added, in turn.
    presence: Vec<Vec<u64>>,
    /// Sites that are removed, now.
    pub removed: BTreeSet<SiteId>,
    /// Sites placed on each node, now.
    pub counts: Vec<u32>,
    pub placed: u64,
    pub forgotten: u64,
}

impl Store {
    pub fn new(sites: usize, nodes: usize) -> Self {
        Self {
            log: Vec::new(),
            history: vec![Vec::new(); sites],
            presence: vec![Vec::new(); sites],
            removed: BTreeSet::new(),
            counts: vec![0; nodes],
            placed: 0,
            forgotten: 0,
        }
    }

    pub fn head(&self) -> u64 {
        self.log.len() as u64
    }

    /// The change that made this revision.
    pub fn change(&self, revision: u64) -> Change {
        self.log[revision as usize - 1]
    }

    /// The placement as a copy of this revision has it.
    pub fn at(&self, site: SiteId, revision: u64) -> Option<At<NodeId>> {
        self.entry(site, revision)?.at
    }

    /// How often the site's placement had been forgotten by then.
    pub fn life(&self, site: SiteId, revision: u64) -> u32 {
        self.entry(site, revision).map_or(0, |entry| entry.life)
    }

    fn entry(&self, site: SiteId, revision: u64) -> Option<&Entry> {
        self.history[site as usize].iter().rev().find(|entry| entry.made <= revision)
    }

    /// The revision at which the site was removed, if a copy of this revision does not have it.
    pub fn removed_at(&self, site: SiteId, revision: u64) -> Option<u64> {
        let changes = &self.presence[site as usize];
        let count = changes.partition_point(|made| *made <= revision);
        (count % 2 == 1).then(|| changes[count - 1])
    }

    /// Which node had the epoch in that life, and when that was over.
    pub fn epoch(&self, site: SiteId, life: u32, epoch: u64) -> Option<(NodeId, Option<u64>)> {
        let history = &self.history[site as usize];
        let is_it = |entry: &Entry| entry.life == life && entry.at.is_some_and(|at| at.epoch == epoch);
        let index = history.iter().position(is_it)?;
        let ended = history.get(index + 1).map(|entry| self.log[entry.made as usize - 1].at);
        Some((history[index].at?.node, ended))
    }

    pub fn put(&mut self, now: u64, site: SiteId, node: NodeId) {
        let before = self.at(site, self.head());
        let after = At { node, epoch: before.map_or(1, |before| before.epoch + 1) };
        self.count(before, Some(after));
        self.placed += 1;
        let life = self.life(site, self.head());
        let made = self.log(now, site, Happened::Placed { before: before.map(|before| before.node), after });
        self.history[site as usize].push(Entry { made, life, at: Some(after) });
    }

    /// An operator removes the site, or adds it again.
    pub fn set_present(&mut self, now: u64, site: SiteId, is_present: bool) {
        if is_present != self.removed.contains(&site) {
            return;
        }
        let what = if is_present { Happened::Added } else { Happened::Removed };
        if is_present {
            self.removed.remove(&site);
        } else {
            self.removed.insert(site);
        }
        let made = self.log(now, site, what);
        self.presence[site as usize].push(made);
    }

    /// What a removed site has left behind goes.
    pub fn forget(&mut self, now: u64, site: SiteId) {
        let head = self.head();
        let Some(before) = self.at(site, head) else { return };
        let life = self.life(site, head) + 1;
        self.count(Some(before), None);
        self.forgotten += 1;
        let made = self.log(now, site, Happened::Forgotten);
        self.history[site as usize].push(Entry { made, life, at: None });
    }

    /// Returns the revision that it makes.
    fn log(&mut self, now: u64, site: SiteId, what: Happened) -> u64 {
        self.log.push(Change { site, what, at: now });
        self.head()
    }

    fn count(&mut self, before: Option<At<NodeId>>, after: Option<At<NodeId>>) {
        if let Some(before) = before {
            self.counts[before.node as usize] -= 1;
        }
        if let Some(after) = after {
            self.counts[after.node as usize] += 1;
        }
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
                let done = if self.removed.contains(&site) {
                    Err(Instead::NoSite)
                } else if current.map(|at| at.epoch) == expect {
                    self.put(now, site, node);
                    Ok(self.head())
                } else {
                    Err(Instead::Placement(current))
                };
                StoreSays::Committed { site, ask, from, before, done }
            }
            StoreAsk::Forget { site, epoch } => {
                let is_same = self.at(site, self.head()).is_some_and(|at| at.epoch == epoch);
                if is_same && self.removed.contains(&site) {
                    self.forget(now, site);
                }
                StoreSays::Forgotten
            }
        }
    }
}
