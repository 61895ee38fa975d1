//! The store: one linearizable register for each site's placement, and whether the site exists,
//! with revisions.
//!
//! It looks like etcd from outside. Its agreements last for ever, in one order. It may be down or
//! slow, or do an action and lose its reply. Every node's copy is a prefix of its log, so one log
//! serves all of them.
//!
//! Not here: when queries and replies arrive (`world`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::wire::{FoundInstead, NodeId, SiteId, SiteParts, StoreAsk, StoreSays};
use crate::world::PlantedFlaws;

/// One change.
#[derive(Debug, Clone)]
pub(crate) struct StoreChange {
    pub site: SiteId,
    pub what: ChangeResult,
    /// Real time, nanoseconds.
    pub at: u64,
}

#[derive(Debug, Clone)]
pub(crate) enum ChangeResult {
    Placed {
        before: Option<SiteParts>,
        after: SiteParts,
    },
    /// Its placement stays.
    Removed,
    Added,
    /// The placement of a removed site is gone, too: epochs of its name start over.
    Forgotten,
}

/// A site's placement from a revision on, and how often it was forgotten before.
#[derive(Debug, Clone)]
struct SiteEntry {
    made: u64,
    life: u32,
    at: Option<SiteParts>,
}

/// A node's statement about itself.
#[derive(Debug)]
struct SimRecord {
    /// How often it had been started.
    life: u32,
    heeds_marks: bool,
    /// The number of the first mark that is newer.
    before: u64,
}

#[derive(Debug)]
pub(crate) struct SimStore {
    /// The change of revision `n` is at `n - 1`.
    log: Vec<StoreChange>,
    /// For each site its placements, the oldest first.
    history: Vec<Vec<SiteEntry>>,
    /// For each site the revisions at which it was removed and added, in turn.
    presence: Vec<Vec<u64>>,
    /// Sites that are removed now.
    pub removed: BTreeSet<SiteId>,
    /// Most nodes of one site.
    copies_max: usize,
    /// Sites placed on each node now.
    pub counts: Vec<u32>,
    /// How long others may serve a site from when it got this epoch, in this life of it.
    waits: BTreeMap<(SiteId, u32, u64), Duration>,
    /// The present marks against nodes: the number of each, and the revision after which it was
    /// made.
    marks: BTreeMap<NodeId, (u64, u64)>,
    records: BTreeMap<NodeId, SimRecord>,
    marks_made: u64,
    /// Placements that relied on one.
    pub marked: u64,
    pub placed: u64,
    pub copied: u64,
    pub forgotten: u64,
}

impl SimStore {
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

    /// Returns the change that made this revision.
    pub fn change(&self, revision: u64) -> &StoreChange {
        &self.log[revision as usize - 1]
    }

    /// Returns the placement in a copy of this revision.
    pub fn at(&self, site: SiteId, revision: u64) -> Option<&SiteParts> {
        self.entry(site, revision)?.at.as_ref()
    }

    /// Returns the newest placement of this epoch.
    pub fn whole(&self, site: SiteId, epoch: u64) -> Option<&SiteParts> {
        let all = self.history[site as usize].iter().rev().filter_map(|entry| entry.at.as_ref());
        all.into_iter().find(|parts| parts.epoch == epoch)
    }

    /// Returns how long this node has to wait by the newest placement of this epoch.
    pub fn owed_to(&self, site: SiteId, epoch: u64, node: NodeId) -> Duration {
        let history = self.history[site as usize].iter().rev();
        let mut parts = history.filter_map(|entry| Some((entry.life, entry.at.as_ref()?)));
        let found = parts.find(|(_, parts)| parts.epoch == epoch);
        let part = found.and_then(|(life, parts)| Some((life, parts.of(node)?)));
        part.map_or(Duration::ZERO, |(life, part)| self.wait(site, life, part))
    }

    /// Returns how often the site's placement had been forgotten by then.
    pub fn life(&self, site: SiteId, revision: u64) -> u32 {
        self.entry(site, revision).map_or(0, |entry| entry.life)
    }

    fn entry(&self, site: SiteId, revision: u64) -> Option<&SiteEntry> {
        self.history[site as usize].iter().rev().find(|entry| entry.made <= revision)
    }

    /// Returns the revision at which the site was removed, if a copy of this revision does not have
    /// it.
    pub fn removed_at(&self, site: SiteId, revision: u64) -> Option<u64> {
        let changes = &self.presence[site as usize];
        let count = changes.partition_point(|made| *made <= revision);
        (count % 2 == 1).then(|| changes[count - 1])
    }

    /// Returns which node had the epoch in that life, and when that ended.
    pub fn epoch(&self, site: SiteId, life: u32, epoch: u64) -> Option<(NodeId, Option<u64>)> {
        let history = &self.history[site as usize];
        let node_in = |entry: &SiteEntry| {
            let parts = entry.at.as_ref().filter(|_| entry.life == life)?;
            parts.all.iter().find(|part| part.epoch == epoch).map(|part| part.node)
        };
        let index = history.iter().position(|entry| node_in(entry).is_some())?;
        let after = history[index..].iter().find(|entry| node_in(entry).is_none());
        let ended = after.map(|entry| self.log[entry.made as usize - 1].at);
        Some((node_in(&history[index])?, ended))
    }

    /// Returns how long the part of this epoch has to wait, from its commit on.
    pub fn wait(&self, site: SiteId, life: u32, epoch: u64) -> Duration {
        self.waits.get(&(site, life, epoch)).copied().unwrap_or_default()
    }

    /// Writes a placement. `wait` is for its new part, if there is one.
    pub fn put(&mut self, now: u64, site: SiteId, after: SiteParts, wait: Duration) {
        let before = self.at(site, self.head()).cloned();
        self.count(before.as_ref(), Some(&after));
        self.placed += 1;
        let life = self.life(site, self.head());
        if !wait.is_zero() && after.all.iter().any(|part| part.epoch == after.epoch) {
            self.waits.insert((site, life, after.epoch), wait);
        }
        let made = self.log(now, site, ChangeResult::Placed { before, after: after.clone() });
        self.history[site as usize].push(SiteEntry { made, life, at: Some(after) });
    }

    /// Removes the site, or adds it again, as an operator would.
    pub fn set_present(&mut self, now: u64, site: SiteId, is_present: bool) {
        if is_present != self.removed.contains(&site) {
            return;
        }
        let what = if is_present { ChangeResult::Added } else { ChangeResult::Removed };
        if is_present {
            self.removed.remove(&site);
        } else {
            self.removed.insert(site);
        }
        let made = self.log(now, site, what);
        self.presence[site as usize].push(made);
    }

    /// Deletes the tombstone of a removed site.
    pub fn forget(&mut self, now: u64, site: SiteId) {
        let head = self.head();
        let Some(before) = self.at(site, head).cloned() else { return };
        let life = self.life(site, head) + 1;
        self.count(Some(&before), None);
        self.forgotten += 1;
        let made = self.log(now, site, ChangeResult::Forgotten);
        self.history[site as usize].push(SiteEntry { made, life, at: None });
    }

    /// Appends a change. Returns its revision.
    fn log(&mut self, now: u64, site: SiteId, what: ChangeResult) -> u64 {
        self.log.push(StoreChange { site, what, at: now });
        self.head()
    }

    fn count(&mut self, before: Option<&SiteParts>, after: Option<&SiteParts>) {
        before.iter().flat_map(|parts| &parts.all).for_each(|part| self.counts[part.node as usize] -= 1);
        after.iter().flat_map(|parts| &parts.all).for_each(|part| self.counts[part.node as usize] += 1);
    }

    /// Returns the placement that a node writes in place of this one: `node` has the site and
    /// `from` does not.
    fn following(current: Option<&SiteParts>, node: NodeId, from: Option<NodeId>) -> Option<SiteParts> {
        match (current, from) {
            (Some(parts), Some(from)) if parts.of(node).is_some() => parts.without(from),
            (Some(parts), Some(from)) => Some(parts.moved(from, node)),
            (Some(parts), None) => Some(SiteParts::one(node, parts.epoch + 1)),
            (None, _) => Some(SiteParts::one(node, 1)),
        }
    }

    /// Changes a placement that is unchanged since it was seen.
    fn change_parts(
        &mut self,
        now: u64,
        site: SiteId,
        (expect, wait): (u64, Duration),
        next: impl FnOnce(&SiteParts) -> Option<SiteParts>,
    ) {
        let current = self.at(site, self.head()).filter(|parts| parts.epoch == expect);
        if let Some(next) = current.and_then(next) {
            self.copied += 1;
            self.put(now, site, next, wait);
        }
    }

    /// Returns whether the mark exists against the node, and neither the site's placement nor the
    /// node's record is newer.
    fn is_marked(&self, site: SiteId, node: NodeId, mark: u64, flaws: PlantedFlaws) -> bool {
        let is_it = |(number, after): &(u64, u64)| {
            *number == mark && (self.is_written_by(site, *after) || flaws.placements_newer_than_marks)
        };
        let is_older = |record: &SimRecord| record.before <= mark || flaws.records_newer_than_marks;
        self.marks.get(&node).is_some_and(is_it) && self.records.get(&node).is_some_and(is_older)
    }

    fn is_written_by(&self, site: SiteId, revision: u64) -> bool {
        self.entry(site, self.head()).is_none_or(|entry| entry.made <= revision)
    }

    /// Marks the node, if it honors marks. Returns the number of the present mark.
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

    fn commit(&mut self, now: u64, ask: &StoreAsk, flaws: PlantedFlaws) -> Result<u64, FoundInstead> {
        let StoreAsk::Commit { site, node, from, expect, wait, mark, written_by, .. } = *ask else {
            unreachable!("it is a commit");
        };
        let current = self.at(site, self.head());
        let next = Self::following(current, node, from);
        let is_same = current.map(|parts| parts.epoch) == expect;
        let is_unmarked = from.zip(mark).is_some_and(|(from, mark)| !self.is_marked(site, from, mark, flaws));
        let is_newer = written_by.is_some_and(|revision| !self.is_written_by(site, revision));
        match next.filter(|_| is_same) {
            _ if self.removed.contains(&site) => Err(FoundInstead::NoSite),
            Some(_) if is_unmarked || is_newer => Err(FoundInstead::Otherwise),
            Some(next) => {
                self.marked += u64::from(mark.is_some());
                self.put(now, site, next, wait);
                Ok(self.head())
            }
            None => Err(FoundInstead::Placement(current.cloned())),
        }
    }

    /// Carries out a node's request now.
    pub fn apply(&mut self, now: u64, by: NodeId, ask: StoreAsk, flaws: PlantedFlaws) -> StoreSays {
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
                    self.records.insert(by, SimRecord { life, heeds_marks, before });
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
                let fits = |parts: &SiteParts| parts.all.len() < copies_max && parts.of(node).is_none();
                let next = |parts: &SiteParts| (is_there && fits(parts)).then(|| parts.with(node));
                self.change_parts(now, site, (expect, wait), next);
                StoreSays::Heard
            }
            StoreAsk::Leave { site, node, expect, is_removed } => {
                let fits = self.removed.contains(&site) == is_removed;
                let next = |parts: &SiteParts| if fits { parts.without(node) } else { None };
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
