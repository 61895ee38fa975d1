//! The store: one linearizable register for each site's placement, and whether there is the site, with revisions.
//!
//! It is as etcd looks from outside: what it has agreed to is there for ever, in one order; it may be away, slow, or do what it was
//! asked and lose its answer. Every node's copy is a prefix of its log, so one log serves all of them.
//!
//! Not here: when questions and answers arrive (`world`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::wire::{Instead, NodeId, Parts, SiteId, StoreAsk, StoreSays};
use crate::world::Flaws;

/// One change.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub site: SiteId,
    pub what: Happened,
    /// Real time, nanoseconds.
    pub at: u64,
}

#[derive(Debug, Clone)]
pub(crate) enum Happened {
    Placed {
        before: Option<Parts>,
        after: Parts,
    },
    /// Its placement stays.
    Removed,
    Added,
    /// The placement of a site that was removed is gone, too: epochs of its name begin anew.
    Forgotten,
}

/// A site's placement from a revision on, and how often it was forgotten before.
#[derive(Debug, Clone)]
struct Entry {
    made: u64,
    life: u32,
    at: Option<Parts>,
}

/// What a node has said of itself.
#[derive(Debug)]
struct Record {
    /// How often it had been started.
    life: u32,
    heeds_marks: bool,
    /// The number of the first mark that is newer.
    before: u64,
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
    /// How many nodes may have one site.
    copies_max: usize,
    /// Sites placed on each node, now.
    pub counts: Vec<u32>,
    /// For how long others may serve a site from when it got this epoch, in this life of it.
    waits: BTreeMap<(SiteId, u32, u64), Duration>,
    /// The marks that stand against nodes: the number of each, and the revision after which it was made.
    marks: BTreeMap<NodeId, (u64, u64)>,
    records: BTreeMap<NodeId, Record>,
    marks_made: u64,
    /// Placements that counted on one.
    pub marked: u64,
    pub placed: u64,
    pub copied: u64,
    pub forgotten: u64,
}

impl Store {
    pub fn new(sites: usize, nodes: usize, copies_max: u32) -> Self {
        Self {
            log: Vec::new(),
            history: vec![Vec::new(); sites],
            presence: vec![Vec::new(); sites],
            removed: BTreeSet::new(),
            copies_max: copies_max as usize,
            counts: vec![0; nodes],
            waits: BTreeMap::new(),
            marks: BTreeMap::new(),
            records: BTreeMap::new(),
            marks_made: 0,
            marked: 0,
            placed: 0,
            copied: 0,
            forgotten: 0,
        }
    }

    pub fn head(&self) -> u64 {
        self.log.len() as u64
    }

    /// The change that made this revision.
    pub fn change(&self, revision: u64) -> &Change {
        &self.log[revision as usize - 1]
    }

    /// The placement as a copy of this revision has it.
    pub fn at(&self, site: SiteId, revision: u64) -> Option<&Parts> {
        self.entry(site, revision)?.at.as_ref()
    }

    /// The newest placement of this epoch.
    pub fn whole(&self, site: SiteId, epoch: u64) -> Option<&Parts> {
        let all = self.history[site as usize].iter().rev().filter_map(|entry| entry.at.as_ref());
        all.into_iter().find(|parts| parts.epoch == epoch)
    }

    /// What the newest placement of this epoch says that this node has to wait for.
    pub fn owed_to(&self, site: SiteId, epoch: u64, node: NodeId) -> Duration {
        let history = self.history[site as usize].iter().rev();
        let mut parts = history.filter_map(|entry| Some((entry.life, entry.at.as_ref()?)));
        let found = parts.find(|(_, parts)| parts.epoch == epoch);
        let part = found.and_then(|(life, parts)| Some((life, parts.of(node)?)));
        part.map_or(Duration::ZERO, |(life, part)| self.wait(site, life, part))
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
        let node_in = |entry: &Entry| {
            let parts = entry.at.as_ref().filter(|_| entry.life == life)?;
            parts.all.iter().find(|part| part.epoch == epoch).map(|part| part.node)
        };
        let index = history.iter().position(|entry| node_in(entry).is_some())?;
        let after = history[index..].iter().find(|entry| node_in(entry).is_none());
        let ended = after.map(|entry| self.log[entry.made as usize - 1].at);
        Some((node_in(&history[index])?, ended))
    }

    /// What the part of this epoch has to wait for, from its commit on.
    pub fn wait(&self, site: SiteId, life: u32, epoch: u64) -> Duration {
        self.waits.get(&(site, life, epoch)).copied().unwrap_or_default()
    }

    /// `wait`: of the part that is new in it, if one is.
    pub fn put(&mut self, now: u64, site: SiteId, after: Parts, wait: Duration) {
        let before = self.at(site, self.head()).cloned();
        self.count(before.as_ref(), Some(&after));
        self.placed += 1;
        let life = self.life(site, self.head());
        if !wait.is_zero() && after.all.iter().any(|part| part.epoch == after.epoch) {
            self.waits.insert((site, life, after.epoch), wait);
        }
        let made = self.log(now, site, Happened::Placed { before, after: after.clone() });
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
        let Some(before) = self.at(site, head).cloned() else { return };
        let life = self.life(site, head) + 1;
        self.count(Some(&before), None);
        self.forgotten += 1;
        let made = self.log(now, site, Happened::Forgotten);
        self.history[site as usize].push(Entry { made, life, at: None });
    }

    /// Returns the revision that it makes.
    fn log(&mut self, now: u64, site: SiteId, what: Happened) -> u64 {
        self.log.push(Change { site, what, at: now });
        self.head()
    }

    fn count(&mut self, before: Option<&Parts>, after: Option<&Parts>) {
        before.iter().flat_map(|parts| &parts.all).for_each(|part| self.counts[part.node as usize] -= 1);
        after.iter().flat_map(|parts| &parts.all).for_each(|part| self.counts[part.node as usize] += 1);
    }

    /// What a node writes in the place of this placement, so that `node` has the site and `from` does not.
    fn following(current: Option<&Parts>, node: NodeId, from: Option<NodeId>) -> Option<Parts> {
        match (current, from) {
            (Some(parts), Some(from)) if parts.of(node).is_some() => parts.without(from),
            (Some(parts), Some(from)) => Some(parts.moved(from, node)),
            (Some(parts), None) => Some(Parts::one(node, parts.epoch + 1)),
            (None, _) => Some(Parts::one(node, 1)),
        }
    }

    /// A change of a placement that is still as it was seen.
    fn change_parts(
        &mut self,
        now: u64,
        site: SiteId,
        (expect, wait): (u64, Duration),
        next: impl FnOnce(&Parts) -> Option<Parts>,
    ) {
        let current = self.at(site, self.head()).filter(|parts| parts.epoch == expect);
        if let Some(next) = current.and_then(next) {
            self.copied += 1;
            self.put(now, site, next, wait);
        }
    }

    /// Whether the mark stands against the node, and neither the site's placement nor the node's record is newer.
    fn is_marked(&self, site: SiteId, node: NodeId, mark: u64, flaws: Flaws) -> bool {
        let is_it = |(number, after): &(u64, u64)| {
            *number == mark && (self.is_written_by(site, *after) || flaws.placements_newer_than_marks)
        };
        let is_older = |record: &Record| record.before <= mark || flaws.records_newer_than_marks;
        self.marks.get(&node).is_some_and(is_it) && self.records.get(&node).is_some_and(is_older)
    }

    fn is_written_by(&self, site: SiteId, revision: u64) -> bool {
        self.entry(site, self.head()).is_none_or(|entry| entry.made <= revision)
    }

    /// Marks the node, if it heeds that. The number of the mark that stands then.
    fn doubt(&mut self, node: NodeId) -> Option<u64> {
        if !self.records.get(&node).is_some_and(|record| record.heeds_marks) {
            return None;
        }
        let head = self.head();
        let Self { marks, marks_made, .. } = self;
        let (number, _) = *marks.entry(node).or_insert_with(|| {
            *marks_made += 1;
            (*marks_made, head)
        });
        Some(number)
    }

    fn commit(&mut self, now: u64, ask: &StoreAsk, flaws: Flaws) -> Result<u64, Instead> {
        let StoreAsk::Commit { site, node, from, expect, wait, mark, written_by, .. } = *ask else {
            unreachable!("it is a commit");
        };
        let current = self.at(site, self.head());
        let next = Self::following(current, node, from);
        let is_same = current.map(|parts| parts.epoch) == expect;
        let is_unmarked = from.zip(mark).is_some_and(|(from, mark)| !self.is_marked(site, from, mark, flaws));
        let is_newer = written_by.is_some_and(|revision| !self.is_written_by(site, revision));
        match next.filter(|_| is_same) {
            _ if self.removed.contains(&site) => Err(Instead::NoSite),
            Some(_) if is_unmarked || is_newer => Err(Instead::Otherwise),
            Some(next) => {
                self.marked += u64::from(mark.is_some());
                self.put(now, site, next, wait);
                Ok(self.head())
            }
            None => Err(Instead::Placement(current.cloned())),
        }
    }

    /// Does what it is asked by a node, now.
    pub fn apply(&mut self, now: u64, by: NodeId, ask: StoreAsk, flaws: Flaws) -> StoreSays {
        match ask {
            StoreAsk::Renew { id, mark } => {
                if mark.is_some() && self.marks.get(&by).map(|(number, _)| *number) == mark {
                    self.marks.remove(&by);
                }
                let mark = self.marks.get(&by).map(|(number, _)| *number);
                StoreSays::Renewed { id, revision: self.head(), mark }
            }
            StoreAsk::List { life, heeds_marks } => {
                if self.records.get(&by).is_none_or(|record| record.life < life) {
                    let before = self.marks_made + 1;
                    self.records.insert(by, Record { life, heeds_marks, before });
                }
                StoreSays::Listed
            }
            StoreAsk::Doubt(node) => match self.doubt(node) {
                Some(revision) => StoreSays::Marked { node, revision },
                None => StoreSays::Heard,
            },
            StoreAsk::Look { site, ask } => {
                StoreSays::Found { site, ask, placement: self.at(site, self.head()).cloned() }
            }
            StoreAsk::Commit { site, ask: id, from, wait, .. } => {
                let done = self.commit(now, &ask, flaws);
                StoreSays::Committed { site, ask: id, from, wait, done }
            }
            StoreAsk::Copy { site, node, expect, wait, written_by } => {
                let copies_max = self.copies_max;
                let is_there = !self.removed.contains(&site)
                    && written_by.is_none_or(|revision| self.is_written_by(site, revision));
                let fits = |parts: &Parts| parts.all.len() < copies_max && parts.of(node).is_none();
                let next = |parts: &Parts| (is_there && fits(parts)).then(|| parts.with(node));
                self.change_parts(now, site, (expect, wait), next);
                StoreSays::Heard
            }
            StoreAsk::Leave { site, node, expect, is_removed } => {
                let fits = self.removed.contains(&site) == is_removed;
                let next = |parts: &Parts| if fits { parts.without(node) } else { None };
                self.change_parts(now, site, (expect, Duration::ZERO), next);
                StoreSays::Heard
            }
            StoreAsk::Forget { site, epoch } => {
                let is_same = self.at(site, self.head()).is_some_and(|at| at.epoch == epoch);
                if is_same && self.removed.contains(&site) {
                    self.forget(now, site);
                }
                StoreSays::Heard
            }
        }
    }
}
