//! Suspect marks: they shorten the wait for a dead node while it is not yet known to be dead.
//!
//! A probe that has no answer as soon as usual has a **mark** written into the store against the
//! node. A read of the store that finds a mark gives the node no lease. The node takes the mark
//! away first, which is a read, too. So while a mark exists, the node's lease is from a read sent
//! before the mark was written. A taker of a site waits for the lease term from **then**, not from
//! the commit.
//!
//! The commit compares three things. The mark exists. The placement is older than the mark, so that
//! nobody else has a lease for the site. The record by which the node has said that it heeds marks
//! is older, too. The whole argument: decision 0014.
//!
//! Not here: what a lease is (`fence`), when a probe is late (`liveness`), writing and comparing
//! (`nagaya_records`, `nagaya_sim`).

use std::collections::BTreeMap;
use std::time::Duration;

use crate::Moment;
use crate::lease::min_elapsed;

/// Interval at which a silent node is marked: the mark may have been cleared meanwhile.
pub const EVERY: Duration = Duration::from_millis(250);

/// Age up to which a mark is relied on. An older mark saves no more time than the next one would.
pub const KEPT: Duration = Duration::from_secs(5);

/// Most nodes about which something is kept. More members than a cluster has.
const NODES_MAX: usize = 1024;

/// A mark in the store, as far as is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SuspectMark {
    /// Store revision at which it was made. A mark that is cleared and made again has another one.
    pub revision: u64,
    /// It existed by this moment.
    pub since: Moment,
}

impl SuspectMark {
    fn is_kept(&self, now: Moment) -> bool {
        now.since(self.since) < KEPT
    }
}

#[derive(Debug, Clone, Copy)]
struct SuspectState {
    raised: Moment,
    mark: Option<SuspectMark>,
}

/// The marks that this node has made or found. `N` names a node.
#[derive(Debug, Clone)]
pub struct SuspectMarks<N> {
    nodes: BTreeMap<N, SuspectState>,
}

impl<N> Default for SuspectMarks<N> {
    fn default() -> Self {
        Self { nodes: BTreeMap::new() }
    }
}

impl<N: Ord + Clone> SuspectMarks<N> {
    /// Notes that a probe of the node is late. Returns true if the node must be marked now, see
    /// [`Self::marked`].
    pub fn raise(&mut self, now: Moment, node: &N) -> bool {
        if let Some(doubt) = self.nodes.get_mut(node) {
            let is_due = now.since(doubt.raised) >= EVERY;
            if is_due {
                doubt.raised = now;
            }
            return is_due;
        }
        if self.nodes.len() >= NODES_MAX {
            self.nodes.retain(|_, doubt| now.since(doubt.raised) < EVERY);
        }
        let has_room = self.nodes.len() < NODES_MAX;
        if has_room {
            self.nodes.insert(node.clone(), SuspectState { raised: now, mark: None });
        }
        has_room
    }

    /// Notes the store's reply: a mark of this revision exists against the node, made just now or
    /// before.
    pub fn marked(&mut self, now: Moment, node: &N, revision: u64) {
        let Some(doubt) = self.nodes.get_mut(node) else { return };
        let is_known = |mark: SuspectMark| mark.revision == revision && mark.is_kept(now);
        if !doubt.mark.is_some_and(is_known) {
            doubt.mark = Some(SuspectMark { revision, since: now });
        }
    }

    /// Returns the mark that exists against the node, as far as is known.
    pub fn mark_against(&self, now: Moment, node: &N) -> Option<SuspectMark> {
        self.nodes.get(node)?.mark.filter(|mark| mark.is_kept(now))
    }

    /// Forgets the mark: the node was heard from, or a commit did not find it.
    pub fn forget(&mut self, node: &N) {
        if let Some(doubt) = self.nodes.get_mut(node) {
            doubt.mark = None;
        }
    }
}

/// Returns the rest of a wait of `owed` after a commit ([`crate::lease::outlasting`]), at `now` or
/// later. It applies if the commit finds the mark. The wait counts from when the mark was known to
/// exist.
pub fn remaining_wait(mark: Option<SuspectMark>, now: Moment, owed: Duration) -> Duration {
    mark.map_or(owed, |mark| owed.saturating_sub(min_elapsed(now.since(mark.since))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::{TERM, max_elapsed};

    fn at(ms: u64) -> Moment {
        Moment(1_000_000_000_000 + ms * 1_000_000)
    }

    #[test]
    fn a_node_is_marked_once_and_again_after_a_while() {
        let mut doubts = SuspectMarks::default();
        let due: Vec<u64> = (0..600).step_by(10).filter(|ms| doubts.raise(at(*ms), &"b")).collect();
        assert_eq!(due, [0, 250, 500]);
        assert!(doubts.raise(at(500), &"c"), "each for itself");
    }

    #[test]
    fn a_mark_counts_from_when_it_was_first_known() {
        let mut doubts = SuspectMarks::default();
        doubts.marked(at(0), &"b", 7);
        assert_eq!(doubts.mark_against(at(600), &"b"), None, "nobody asked for it");
        doubts.raise(at(0), &"b");
        doubts.marked(at(3), &"b", 7);
        doubts.marked(at(260), &"b", 7);
        assert_eq!(doubts.mark_against(at(600), &"b"), Some(SuspectMark { revision: 7, since: at(3) }));
        doubts.marked(at(520), &"b", 9);
        assert_eq!(
            doubts.mark_against(at(600), &"b"),
            Some(SuspectMark { revision: 9, since: at(520) }),
            "it is another one"
        );
        doubts.forget(&"b");
        assert_eq!(doubts.mark_against(at(600), &"b"), None);
        assert!(!doubts.raise(at(249), &"b"), "it is not marked more often for that");
    }

    #[test]
    fn a_mark_that_stands_long_counts_only_when_read_again() {
        let mut doubts = SuspectMarks::default();
        doubts.raise(at(0), &"b");
        doubts.marked(at(3), &"b", 7);
        let kept = 3 + KEPT.as_millis() as u64;
        assert!(doubts.mark_against(at(kept - 1), &"b").is_some());
        assert_eq!(doubts.mark_against(at(kept), &"b"), None);
        doubts.marked(at(kept + 9), &"b", 7);
        assert_eq!(
            doubts.mark_against(at(kept + 9), &"b"),
            Some(SuspectMark { revision: 7, since: at(kept + 9) })
        );
    }

    #[test]
    fn remaining_wait_outlasts_authority_on_any_clock() {
        for (ago, term) in [(0, 300), (1, 300), (30, 150), (150, 150), (299, 300), (400, 300), (10_000, 150)]
        {
            let term = Duration::from_millis(term);
            let mark = SuspectMark { revision: 1, since: at(0) };
            let left = remaining_wait(Some(mark), at(ago), max_elapsed(term));
            assert!(left <= max_elapsed(term), "{ago}");
            // The clock of who waits runs fast, that of the node slowly.
            let real = |shown: Duration| shown.as_secs_f64() / 1.001;
            let authority_lasts = term.as_secs_f64() / 0.999;
            let waited = real(Duration::from_millis(ago)) + real(left);
            assert!(waited >= authority_lasts, "{ago}: {waited} of {authority_lasts}");
        }
        assert_eq!(remaining_wait(None, at(0), max_elapsed(TERM)), max_elapsed(TERM));
    }

    #[test]
    fn beyond_the_bound_nodes_that_are_silent_now_are_kept() {
        let mut doubts = SuspectMarks::default();
        let many = u32::try_from(NODES_MAX).unwrap();
        assert!((0..many).all(|node| doubts.raise(at(u64::from(node % 10)), &node)));
        assert!(!doubts.raise(at(100), &many), "all of them are");
        assert!(doubts.raise(at(1_000), &many));
    }
}
