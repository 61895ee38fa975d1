//! Decides whether a node may serve its placed sites, and from when on another node may.
//!
//! A node serves placed sites only while it has a *lease*. Each linearizable read of the store
//! renews it for [`TERM`]. The term counts from when the node **sent** the read. It counts only
//! once the node's own copy of the records is as new as the read. A node may take a site from a
//! node that has not given it up. It then waits for [`TERM`] and a little more after its commit. A
//! read sent after the commit has seen it. The lease of a read sent before has run out by then.
//! Clocks need not agree; they only have to run about equally fast. Nodes may have different terms.
//! The wait is for the term of the node that loses the site, and for the rest of its predecessor's.
//!
//! While the store is down for all, members vouch for each other. All others promise not to move a
//! node's sites for [`VOUCH_TERM`]. Decision 0014 has the whole argument.
//!
//! Not here: the store and the messages (`nagaya`), holding requests (`nagaya-edge`), freezing
//! instances (`nagaya-keeper`).

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::Moment;

/// Lease from one read of the store. No node serves the sites of a dead node for this time, so it
/// is short. A leader change of the store takes longer, and vouching covers that.
pub const TERM: Duration = Duration::from_millis(300);

/// Longest lease term that a node may be given. If a node's term is unknown, the wait is this long.
pub const TERM_MAX: Duration = Duration::from_secs(10);

/// Returns the term of a node whose record says this many milliseconds. 0 means that the record
/// does not say.
pub const fn lease_term(fence_ms: u32) -> Duration {
    if fence_ms == 0 { TERM_MAX } else { Duration::from_millis(fence_ms as u64) }
}

/// Reads of the store in one term: three may be late or lost.
pub const RENEWALS_PER_TERM: u32 = 4;

/// Lease from one round of vouches, and how long each voucher keeps its promise.
pub const VOUCH_TERM: Duration = Duration::from_secs(2);

/// Largest drift of a node's clock against real time, in millionths. NTP slews by at most 500,
/// quartz is off by 100.
pub const DRIFT_PPM: u32 = 1_000;

/// Added to each wait: a check and the action after it are not one instant.
pub const MARGIN: Duration = Duration::from_millis(2);

/// Interval between reads whose age is kept.
const AGES_EVERY: Duration = Duration::from_millis(250);

/// Reads of the store that may be in flight. Beyond that, the oldest is forgotten.
const RENEWALS_MAX: usize = 16;

/// Returns how long to wait here until `term` has certainly passed on another machine. Assumes that
/// each clock drifts by at most `DRIFT_PPM`, and adds `MARGIN`.
pub const fn max_elapsed(term: Duration) -> Duration {
    // (1 + d) / (1 - d) is less than 1 + 3 d for the drifts that are allowed.
    let nanos = term.as_nanos() as u64;
    Duration::from_nanos(nanos + nanos / 1_000_000 * 3 * DRIFT_PPM as u64 + MARGIN.as_nanos() as u64)
}

/// Returns the time that has certainly passed on any clock when one clock shows `ago`.
pub(crate) const fn min_elapsed(ago: Duration) -> Duration {
    ago.saturating_sub(max_elapsed(ago).saturating_sub(ago))
}

/// Records from when on this node may serve the sites placed on it, by its own clock. The node that
/// runs a site waits. A node that forwards to it may have learned of the placement sooner.
#[derive(Debug, Clone)]
pub struct ServeFrom<S> {
    sites: BTreeMap<S, (u64, Moment)>,
}

impl<S> Default for ServeFrom<S> {
    fn default() -> Self {
        Self { sites: BTreeMap::new() }
    }
}

impl<S: Ord + Clone> ServeFrom<S> {
    /// Notes at `now` that the site is placed here. Other nodes may serve it for `wait` from the
    /// commit on ([`RevisionAges::remaining_wait`]). The commit was no later than `now`, and `ago`
    /// earlier if the committing node said so. Later calls can only shorten the wait.
    pub fn placed(&mut self, now: Moment, site: S, epoch: u64, wait: Duration, ago: Duration) {
        // The clock of the committing node may have run fast.
        let from = (now + wait).before(min_elapsed(ago));
        match self.sites.get_mut(&site) {
            Some((known, earlier)) if *known == epoch => *earlier = from.min(*earlier),
            Some((known, _)) if *known > epoch => {}
            _ => {
                self.sites.insert(site, (epoch, from));
            }
        }
    }

    /// Notes that the site is placed elsewhere now, or nowhere.
    pub fn left(&mut self, site: &S) {
        self.sites.remove(site);
    }

    /// Returns from when on the site may be served here under this epoch. `None` if never, as far
    /// as is known.
    pub fn from(&self, site: &S, epoch: u64) -> Option<Moment> {
        self.sites.get(site).filter(|(known, _)| *known == epoch).map(|(_, from)| *from)
    }
}

/// Ages of store revisions, by when this node read them. A record written by then is at least as
/// old.
#[derive(Debug, Clone, Default)]
pub struct RevisionAges {
    read: VecDeque<(Moment, u64)>,
}

impl RevisionAges {
    /// Notes that a read answered by `now` saw the store at this revision.
    pub fn note_revision(&mut self, now: Moment, revision: u64) {
        if self.read.back().is_some_and(|(at, _)| now.since(*at) < AGES_EVERY) {
            return;
        }
        self.read.push_back((now, revision));
        // One read that is old enough for everything is sufficient.
        while self.read.get(1).is_some_and(|(at, _)| min_elapsed(now.since(*at)) >= max_elapsed(TERM_MAX)) {
            self.read.pop_front();
        }
    }

    /// Returns how long, after this takeover commits, earlier owners may still serve the site.
    ///
    /// `term` is the lease term of the node that loses the site, or `None` if that node gave it up.
    /// `earlier` is the wait that the current placement recorded for the owners before that node.
    /// That wait began at an older commit, so the longer of both waits is sufficient. If the
    /// current placement is older than `earlier`, only the loser's own term remains. In that case
    /// the second value is a store revision. The commit must fail if the current placement was
    /// written after that revision.
    pub fn remaining_wait(
        &self,
        now: Moment,
        term: Option<Duration>,
        earlier: Duration,
    ) -> (Duration, Option<u64>) {
        let own = term.map_or(Duration::ZERO, max_elapsed);
        if earlier <= own {
            return (own, None);
        }
        self.before(now, earlier).map_or((earlier, None), |revision| (own, Some(revision)))
    }

    /// Returns the latest revision that is certainly older than `ago` on any clock, as far as is
    /// known.
    fn before(&self, now: Moment, ago: Duration) -> Option<u64> {
        let is_old = |(at, _): &&(Moment, u64)| min_elapsed(now.since(*at)) >= ago;
        self.read.iter().rev().find(is_old).map(|(_, revision)| *revision)
    }
}

/// A read of the store that is in flight. Numbers are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RenewId(pub u64);

/// A round of requests for vouches to all other members.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RoundId(pub u64);

/// A voucher's reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vouch {
    /// Revision of the last move away from the asking node that this member committed. A node that
    /// does not know of it cannot know which sites it still has.
    pub moved: u64,
}

/// A node's own lease. `N` names a member.
#[derive(Debug, Clone)]
pub struct LeaseHolder<N> {
    term: Duration,
    vouch_term: Duration,
    next: u64,
    sent: VecDeque<(RenewId, Moment)>,
    /// Reads that saw more of the store than this node's copy has: the revision, and the end of
    /// their lease.
    ahead: Vec<(u64, Moment)>,
    applied: u64,
    by_store: Moment,
    by_vouches: Moment,
    members: BTreeSet<N>,
    round: Option<VouchRound<N>>,
    is_member: bool,
}

#[derive(Debug, Clone)]
struct VouchRound<N> {
    id: RoundId,
    sent: Moment,
    missing: BTreeSet<N>,
    /// Highest revision of a move that a voucher reported.
    moved: u64,
}

impl<N: Ord + Clone> LeaseHolder<N> {
    /// Creates a holder without a lease, whose copy of the records is at revision `applied`.
    pub fn new(term: Duration, vouch_term: Duration, applied: u64) -> Self {
        Self {
            term,
            vouch_term,
            next: 1,
            sent: VecDeque::new(),
            ahead: Vec::new(),
            applied,
            by_store: Moment::default(),
            by_vouches: Moment::default(),
            members: BTreeSet::new(),
            round: None,
            is_member: true,
        }
    }

    /// Notes that a linearizable read of this node's own record is sent now.
    pub fn begin_read(&mut self, now: Moment) -> RenewId {
        let id = RenewId(self.next);
        self.next += 1;
        if self.sent.len() == RENEWALS_MAX {
            self.sent.pop_front();
        }
        self.sent.push_back((id, now));
        id
    }

    /// Notes that the read found this node's own record and id, at this revision of the store.
    pub fn note_confirmed(&mut self, id: RenewId, revision: u64) {
        let Some(at) = self.sent.iter().position(|(sent, _)| *sent == id) else { return };
        let (_, sent_at) = self.sent.remove(at).expect("the position was just found");
        self.ahead.push((revision, sent_at + self.term));
        self.catch_up();
        // Of the pending reads, only the last ones can still matter.
        if self.ahead.len() > RENEWALS_MAX {
            self.ahead.remove(0);
        }
    }

    /// Notes that the read found no record, or another machine's. There is no lease until
    /// [`Self::note_joined`], whatever else is in flight.
    pub fn note_lost(&mut self) {
        self.is_member = false;
        self.sent.clear();
        self.ahead.clear();
        self.by_store = Moment::default();
        self.by_vouches = Moment::default();
        self.round = None;
    }

    /// Notes that the node's record exists (again). The next read gives a lease.
    pub fn note_joined(&mut self) {
        self.is_member = true;
    }

    /// Notes that this node's copy of the records, and all processes that act on it, are at this
    /// revision.
    pub fn applied(&mut self, revision: u64) {
        self.applied = self.applied.max(revision);
        self.catch_up();
        self.close_round();
    }

    /// Sets the other members as of the applied records. A new member has not vouched. It may move
    /// sites as soon as it knows that this node knows it. So it learns that only after this call.
    pub fn members(&mut self, members: BTreeSet<N>) {
        if !members.is_subset(&self.members) {
            self.by_vouches = Moment::default();
            self.round = None;
        }
        self.members = members;
    }

    /// Returns true if the store has not confirmed for half a term: it is time to ask for vouches.
    pub fn wants_vouches(&self, now: Moment) -> bool {
        self.is_member && self.by_store.since(now) < self.term / 2
    }

    /// Begins a round and returns all other members, which must be asked to vouch. An incomplete
    /// round ends.
    pub fn begin_round(&mut self, now: Moment) -> (RoundId, BTreeSet<N>) {
        let id = RoundId(self.next);
        self.next += 1;
        if self.is_member {
            self.round = Some(VouchRound { id, sent: now, missing: self.members.clone(), moved: 0 });
            // Without another member, no node could move anything.
            self.close_round();
        }
        (id, self.members.clone())
    }

    /// Notes a member's vouch. The lease comes only when all have vouched.
    pub fn add_vouch(&mut self, id: RoundId, member: &N, vouch: Vouch) {
        let Some(round) = self.round.as_mut().filter(|round| round.id == id) else { return };
        round.missing.remove(member);
        round.moved = round.moved.max(vouch.moved);
        self.close_round();
    }

    /// Returns until when this node may serve its placed sites. It is in the past if there is no
    /// lease.
    pub fn lease_end(&self) -> Moment {
        self.by_store.max(self.by_vouches)
    }

    /// Returns the end of the lease by the store alone.
    pub fn until_by_store(&self) -> Moment {
        self.by_store
    }

    pub fn may_serve(&self, now: Moment) -> bool {
        now < self.lease_end()
    }

    /// Returns when the next read must be sent, if the last one was sent at `sent`.
    pub fn renew_at(&self, sent: Moment) -> Moment {
        sent + self.term / RENEWALS_PER_TERM
    }

    fn catch_up(&mut self) {
        let Self { ahead, applied, by_store, .. } = self;
        ahead.retain(|(revision, until)| {
            let is_known = revision <= applied;
            if is_known {
                *by_store = (*by_store).max(*until);
            }
            !is_known
        });
    }

    fn close_round(&mut self) {
        let is_complete =
            self.round.as_ref().is_some_and(|round| round.missing.is_empty() && round.moved <= self.applied);
        if let Some(round) = self.round.take_if(|_| is_complete) {
            self.by_vouches = self.by_vouches.max(round.sent + self.vouch_term);
        }
    }
}

/// Why a node may not move another node's sites now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveBlocked {
    /// It has promised until then, or may have promised before it was restarted.
    Promised(Moment),
    /// That node has never said that it knows this one. So it may be running on the vouches of all
    /// others.
    NotIntroduced,
}

/// A member's promises to others, and its own moves. Every commit that takes a site from another
/// node passes through here.
#[derive(Debug, Clone)]
pub struct VouchPromises<N> {
    term: Duration,
    vouch_term: Duration,
    /// No promises are made until then, because promises and moves from before the start are
    /// unknown.
    quiet_until: Moment,
    /// Store revision of the first linearizable read sent since the start. Earlier moves are
    /// unknown, so an asking node must know everything up to this revision.
    synced: Option<u64>,
    promised: BTreeMap<N, Moment>,
    introduced: BTreeSet<N>,
    /// Commits in flight that take a site from a node, and the revision of the last that succeeded.
    moving: BTreeMap<N, u32>,
    moved: BTreeMap<N, u64>,
}

impl<N: Ord + Clone> VouchPromises<N> {
    pub fn new(started_at: Moment, term: Duration, vouch_term: Duration) -> Self {
        Self {
            term,
            vouch_term,
            quiet_until: started_at + max_elapsed(vouch_term),
            synced: None,
            promised: BTreeMap::new(),
            introduced: BTreeSet::new(),
            moving: BTreeMap::new(),
            moved: BTreeMap::new(),
        }
    }

    /// Notes that a linearizable read sent since the start found the store at this revision. The
    /// first one counts.
    pub fn note_synced(&mut self, revision: u64) {
        self.synced.get_or_insert(revision);
    }

    /// Notes that `node` has this member in its records.
    pub fn note_introduced(&mut self, node: N) {
        self.introduced.insert(node);
    }

    /// Handles a request of `node` for a vouch. `by_store` is this member's own
    /// [`LeaseHolder::until_by_store`]. A member that reaches the store does not vouch, because
    /// then the store decides. `None` means no promise.
    pub fn vouch(&mut self, now: Moment, node: N, by_store: Moment) -> Option<Vouch> {
        let store_is_there = by_store.since(now) >= self.term / 2;
        let is_moving = self.moving.contains_key(&node);
        if store_is_there || is_moving || now < self.quiet_until {
            return None;
        }
        let moved = self.synced?.max(self.moved.get(&node).copied().unwrap_or(0));
        self.promised.insert(node, now + max_elapsed(self.vouch_term));
        Some(Vouch { moved })
    }

    /// Returns whether a commit that takes a site from `node` may be sent.
    pub fn may_move_from(&self, node: &N, now: Moment) -> Result<(), MoveBlocked> {
        if !self.introduced.contains(node) {
            return Err(MoveBlocked::NotIntroduced);
        }
        let promised = self.promised.get(node).copied().unwrap_or_default().max(self.quiet_until);
        if now < promised { Err(MoveBlocked::Promised(promised)) } else { Ok(()) }
    }

    /// Does the same and notes that the commit is sent now. Until [`Self::note_settled`], nothing
    /// is promised to that node.
    pub fn begin(&mut self, node: &N, now: Moment) -> Result<(), MoveBlocked> {
        self.may_move_from(node, now)?;
        *self.moving.entry(node.clone()).or_default() += 1;
        Ok(())
    }

    /// Notes the outcome of a commit: it happened at this revision, or never will. If a commit got
    /// no reply, a higher epoch of the site in the store settles it.
    pub fn note_settled(&mut self, node: &N, committed: Option<u64>) {
        if let Some(count) = self.moving.get_mut(node) {
            *count -= 1;
            if *count == 0 {
                self.moving.remove(node);
            }
        }
        if let Some(revision) = committed {
            let moved = self.moved.entry(node.clone()).or_default();
            *moved = revision.max(*moved);
        }
    }
}
