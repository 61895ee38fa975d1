//! The observer: it sees all nodes at once, and checks the invariants.
//!
//! Not here: the nodes' knowledge of each other; no node gets anything from here.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use nagaya_placement::lease;

use crate::node::term;
use crate::store::SimStore;
use crate::wire::{NodeId, RequestId, SiteId};

/// A response that must not have been sent, or one that never was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SafetyViolation {
    /// Too many nodes served a site at one time: one did so under an epoch that others had
    /// replaced.
    TooMany { site: u32, epoch: u64, others: Vec<u64>, node: u32, at_ns: u64 },
    /// A node served under an epoch that the store gave to another one, or to none.
    NotItsEpoch { site: u32, epoch: u64, node: u32, at_ns: u64 },
    /// A node served after its successor was committed for longer than the lease allows.
    TooLong { site: u32, epoch: u64, node: u32, late: Duration },
    /// A commit that was acknowledged is not in the store.
    LostCommit { site: u32, epoch: u64, node: u32 },
    /// A request had neither response nor refusal in time.
    NoEnd { request: u32, waited: Duration },
    /// With all faults long over, a request got no response.
    NotServed { site: u32 },
}

impl fmt::Display for SafetyViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooMany { site, epoch, others, node, at_ns } => {
                write!(
                    f,
                    "at {at_ns} ns node {node} served site {site} under {epoch}, while it was served under {others:?}"
                )
            }
            Self::NotItsEpoch { site, epoch, node, at_ns } => {
                write!(f, "at {at_ns} ns node {node} served site {site} under {epoch}, which was not its own")
            }
            Self::TooLong { site, epoch, node, late } => {
                write!(
                    f,
                    "node {node} served site {site} under {epoch} {late:?} after the next one was committed"
                )
            }
            Self::LostCommit { site, epoch, node } => {
                write!(
                    f,
                    "site {site} was committed to node {node} under {epoch}, and the store does not have it"
                )
            }
            Self::NoEnd { request, waited } => write!(f, "request {request} had no end after {waited:?}"),
            Self::NotServed { site } => write!(f, "site {site} was not served although all faults were over"),
        }
    }
}

/// An epoch of a site. When nothing is left of a removed one, epochs of its name start over. The
/// count of that comes first.
pub(crate) type Served = (u32, u64);

/// From the first to the last response under one epoch.
#[derive(Debug, Clone, Copy)]
struct EpochSpan {
    under: Served,
    first: u64,
    last: u64,
}

/// Longer than any late event of an old epoch.
const SPANS_FOR: Duration = Duration::from_secs(30);

/// Counts and violations.
#[derive(Debug, Default)]
pub struct WorldObserver {
    /// For each site, when it was served under which epoch.
    served: Vec<Vec<EpochSpan>>,
    /// Most nodes of one site.
    copies_max: usize,
    pub violations: Vec<SafetyViolation>,
    pub answers: u64,
    pub refusals: BTreeMap<String, u64>,
    /// Requests whose own node ended, so that no node was left to respond.
    pub abandoned: u64,
    /// Longest time for which a node served after its successor was committed.
    pub latest: Duration,
    /// Longest wait of a request for its response.
    pub slowest: Duration,
    /// Responses by nodes whose lease came from vouches alone.
    pub vouched: u64,
}

/// Violations that are kept; one is enough to fail.
const VIOLATIONS_MAX: usize = 16;

impl WorldObserver {
    pub(crate) fn new(sites: usize, copies_max: u32) -> Self {
        Self { served: vec![Vec::new(); sites], copies_max: copies_max as usize, ..Self::default() }
    }

    /// Notes that a response leaves a node.
    pub(crate) fn serves(&mut self, now: u64, store: &SimStore, site: SiteId, under: Served, node: NodeId) {
        let (life, epoch) = under;
        if let Some(others) = self.too_many(now, store, site, under) {
            self.wrong(SafetyViolation::TooMany { site, epoch, others, node, at_ns: now });
        }
        match store.epoch(site, life, epoch) {
            Some((owner, ended)) if owner == node => {
                let late = Duration::from_nanos(ended.map_or(0, |ended| now.saturating_sub(ended)));
                self.latest = self.latest.max(late);
                if late > lease::max_elapsed(term(node)) {
                    self.wrong(SafetyViolation::TooLong { site, epoch, node, late });
                }
            }
            _ => self.wrong(SafetyViolation::NotItsEpoch { site, epoch, node, at_ns: now }),
        }
    }

    /// Returns the other epochs under which the site was served since its last service under this
    /// one. `None` if those were not too many. An epoch that nothing has replaced yet counts as
    /// served all the time.
    fn too_many(&mut self, now: u64, store: &SimStore, site: SiteId, under: Served) -> Option<Vec<u64>> {
        let spans = &mut self.served[site as usize];
        let is_over = |span: &EpochSpan| {
            let (life, epoch) = span.under;
            store.epoch(site, life, epoch).is_none_or(|(_, ended)| ended.is_some())
        };
        let known = spans.iter_mut().find(|span| span.under == under);
        let before = known.as_ref().map_or(now, |span| span.last);
        match known {
            Some(span) => span.last = now,
            None => spans.push(EpochSpan { under, first: now, last: now }),
        }
        spans.retain_mut(|span| {
            let is_over = is_over(span);
            if !is_over {
                span.last = now;
            }
            !is_over || now - span.last < SPANS_FOR.as_nanos() as u64
        });
        let begun = spans.iter().map(|span| span.first).filter(|first| *first > before);
        begun.chain([now]).find_map(|moment| {
            let at_once = spans.iter().filter(|span| span.first <= moment && moment <= span.last);
            let others: Vec<_> = at_once.map(|span| span.under).filter(|other| *other != under).collect();
            (others.len() >= self.copies_max).then(|| others.into_iter().map(|(_, epoch)| epoch).collect())
        })
    }

    /// Notes that a node learned that its commit has happened.
    pub(crate) fn committed(&mut self, store: &SimStore, site: SiteId, under: Served, node: NodeId) {
        let (life, epoch) = under;
        if store.epoch(site, life, epoch).is_none_or(|(owner, _)| owner != node) {
            self.wrong(SafetyViolation::LostCommit { site, epoch, node });
        }
    }

    pub(crate) fn answered(&mut self, waited: Duration) {
        self.answers += 1;
        self.slowest = self.slowest.max(waited);
    }

    pub(crate) fn refused(&mut self, why: &str) {
        *self.refusals.entry(why.to_owned()).or_default() += 1;
    }

    pub(crate) fn no_end(&mut self, request: RequestId, waited: Duration) {
        self.wrong(SafetyViolation::NoEnd { request, waited });
    }

    pub(crate) fn wrong(&mut self, violation: SafetyViolation) {
        if self.violations.len() < VIOLATIONS_MAX {
            self.violations.push(violation);
        }
    }
}
