//! Questions put to a node through the store while it is not yet known whether it is dead, so that less is left to wait when it is.
//!
//! A probe that has no answer as soon as usual has a **mark** written into the store against the node. A read of the store that
//! finds a mark gives the node no authority: it takes the mark away first, which is a read, too. So as long as a mark stands, the
//! node's authority is from a read that was sent before it was written, and whoever takes a site from the node waits for the
//! authority's term from **then**, not from the commit. The commit compares: the mark stands, the placement is older than
//! it, so that nobody else has authority for the site, and so is the record by which the node has said that it heeds marks. The
//! whole argument: decision 0029.
//!
//! Not here: what authority is (`fence`), when a probe is late (`liveness`), writing and comparing (`nagaya_cmdb`, `nagaya_sim`).

use std::collections::BTreeMap;
use std::time::Duration;

use crate::Moment;
use crate::fence::surely;

/// A node that stays silent is marked so often: the mark may have been taken away meanwhile.
pub const EVERY: Duration = Duration::from_millis(250);

/// A mark that was first known so long ago is relied on no more. One that stands for longer has outlived what it was made for: it
/// saves nothing any more that would not be saved by the next.
pub const KEPT: Duration = Duration::from_secs(5);

/// Nodes that something is kept about. More members than a cluster has.
const NODES_MAX: usize = 1024;

/// A mark that stands in the store, as far as is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// The store's revision at which it was made: one that is taken away and made anew is another.
    pub revision: u64,
    /// It stood there by then.
    pub since: Moment,
}

impl Mark {
    fn is_kept(&self, now: Moment) -> bool {
        now.since(self.since) < KEPT
    }
}

#[derive(Debug, Clone, Copy)]
struct Doubt {
    raised: Moment,
    mark: Option<Mark>,
}

/// The marks that this node has made or found. `N` is how nodes are named.
#[derive(Debug, Clone)]
pub struct Doubts<N> {
    nodes: BTreeMap<N, Doubt>,
}

impl<N> Default for Doubts<N> {
    fn default() -> Self {
        Self { nodes: BTreeMap::new() }
    }
}

impl<N: Ord + Clone> Doubts<N> {
    /// A probe of the node is late. True: it is to be marked now, see [`Self::marked`].
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
            self.nodes.insert(node.clone(), Doubt { raised: now, mark: None });
        }
        has_room
    }

    /// The store has answered that a mark of this revision stands against the node, made just now or before.
    pub fn marked(&mut self, now: Moment, node: &N, revision: u64) {
        let Some(doubt) = self.nodes.get_mut(node) else { return };
        let is_known = |mark: Mark| mark.revision == revision && mark.is_kept(now);
        if !doubt.mark.is_some_and(is_known) {
            doubt.mark = Some(Mark { revision, since: now });
        }
    }

    /// The mark that stands against it, as far as is known.
    pub fn against(&self, now: Moment, node: &N) -> Option<Mark> {
        self.nodes.get(node)?.mark.filter(|mark| mark.is_kept(now))
    }

    /// The node was heard from, or a commit did not find the mark.
    pub fn forget(&mut self, node: &N) {
        if let Some(doubt) = self.nodes.get_mut(node) {
            doubt.mark = None;
        }
    }
}

/// What is left to wait at `now`, or later, of what would be `owed` from a commit on ([`crate::fence::outlasting`]), if the commit finds
/// the mark: it counts from when that was known to stand.
pub fn left(mark: Option<Mark>, now: Moment, owed: Duration) -> Duration {
    mark.map_or(owed, |mark| owed.saturating_sub(surely(now.since(mark.since))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fence::{TERM, outlasting};

    fn at(ms: u64) -> Moment {
        Moment(1_000_000_000_000 + ms * 1_000_000)
    }

    #[test]
    fn a_node_is_marked_once_and_again_after_a_while() {
        let mut doubts = Doubts::default();
        let due: Vec<u64> = (0..600).step_by(10).filter(|ms| doubts.raise(at(*ms), &"b")).collect();
        assert_eq!(due, [0, 250, 500]);
        assert!(doubts.raise(at(500), &"c"), "each for itself");
    }

    #[test]
    fn a_mark_counts_from_when_it_was_first_known() {
        let mut doubts = Doubts::default();
        doubts.marked(at(0), &"b", 7);
        assert_eq!(doubts.against(at(600), &"b"), None, "nobody asked for it");
        doubts.raise(at(0), &"b");
        doubts.marked(at(3), &"b", 7);
        doubts.marked(at(260), &"b", 7);
        assert_eq!(doubts.against(at(600), &"b"), Some(Mark { revision: 7, since: at(3) }));
        doubts.marked(at(520), &"b", 9);
        assert_eq!(
            doubts.against(at(600), &"b"),
            Some(Mark { revision: 9, since: at(520) }),
            "it is another one"
        );
        doubts.forget(&"b");
        assert_eq!(doubts.against(at(600), &"b"), None);
        assert!(!doubts.raise(at(249), &"b"), "it is not marked more often for that");
    }

    #[test]
    fn a_mark_that_stands_for_long_is_relied_on_no_more_until_it_is_known_anew() {
        let mut doubts = Doubts::default();
        doubts.raise(at(0), &"b");
        doubts.marked(at(3), &"b", 7);
        let kept = 3 + KEPT.as_millis() as u64;
        assert!(doubts.against(at(kept - 1), &"b").is_some());
        assert_eq!(doubts.against(at(kept), &"b"), None);
        doubts.marked(at(kept + 9), &"b", 7);
        assert_eq!(doubts.against(at(kept + 9), &"b"), Some(Mark { revision: 7, since: at(kept + 9) }));
    }

    #[test]
    fn what_is_left_to_wait_lasts_no_shorter_on_any_clock() {
        for (ago, term) in [(0, 300), (1, 300), (30, 150), (150, 150), (299, 300), (400, 300), (10_000, 150)]
        {
            let term = Duration::from_millis(term);
            let mark = Mark { revision: 1, since: at(0) };
            let left = left(Some(mark), at(ago), outlasting(term));
            assert!(left <= outlasting(term), "{ago}");
            // The clock of who waits runs fast, that of the node slowly.
            let real = |shown: Duration| shown.as_secs_f64() / 1.001;
            let authority_lasts = term.as_secs_f64() / 0.999;
            let waited = real(Duration::from_millis(ago)) + real(left);
            assert!(waited >= authority_lasts, "{ago}: {waited} of {authority_lasts}");
        }
        assert_eq!(left(None, at(0), outlasting(TERM)), outlasting(TERM));
    }

    #[test]
    fn of_more_nodes_than_there_can_be_those_that_are_silent_now_are_kept() {
        let mut doubts = Doubts::default();
        let many = u32::try_from(NODES_MAX).unwrap();
        assert!((0..many).all(|node| doubts.raise(at(u64::from(node % 10)), &node)));
        assert!(!doubts.raise(at(100), &many), "all of them are");
        assert!(doubts.raise(at(1_000), &many));
    }
}
