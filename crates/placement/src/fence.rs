//! Whether a node may serve what is placed on it, and from when on another one may.
//!
//! A node serves placed sites only while it has *authority*. It gets it for [`TERM`] from each linearizable read of the store, counted
//! from when it **sent** the read, and only once its own copy of the records is as new as what the read saw. Whoever takes a site
//! from a node that has not itself given it up waits for [`TERM`] and a little more after its commit. A read that was sent after the
//! commit has seen it; one that was sent before has run out by then. No two clocks need to agree, they only have to run about equally
//! fast. Nodes may have different terms: it is the term of the node that loses the site which is waited for, and what its own
//! predecessor was still owed.
//!
//! While the store is down for everybody, members vouch for each other: all others promise not to move a node's sites for
//! [`VOUCH_TERM`]. The whole argument: decision 0014.
//!
//! Not here: the store and the messages (`nagaya`), holding requests (`nagaya-edge`), freezing instances (`nagaya-keeper`).

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::Moment;

/// Authority from one read of the store. Also the time for which a site of a node that has died is served by nobody, so it is short;
/// a leader change of the store takes longer, which is what vouching is for.
pub const TERM: Duration = Duration::from_millis(300);

/// The longest term that a node may be given in place of that: of one whose term is not known it is waited for.
pub const TERM_MAX: Duration = Duration::from_secs(10);

/// The term of a node whose record says so many milliseconds. 0: it does not say.
pub const fn term_of(fence_ms: u32) -> Duration {
    if fence_ms == 0 { TERM_MAX } else { Duration::from_millis(fence_ms as u64) }
}

/// Reads of the store in one term: three may be late or lost.
pub const RENEWALS_PER_TERM: u32 = 4;

/// Authority from one round of vouches, and how long each voucher keeps its promise.
pub const VOUCH_TERM: Duration = Duration::from_secs(2);

/// How much faster or slower than real time a node's clock may run, in millionths. NTP slews by at most 500, quartz is off by 100.
pub const DRIFT_PPM: u32 = 1_000;

/// Added to what is waited for: a check and what follows from it are not one instant.
pub const MARGIN: Duration = Duration::from_millis(2);

/// Reads whose age is kept are so far apart.
const AGES_EVERY: Duration = Duration::from_millis(250);

/// Reads of the store that may be under way; of more, the oldest is forgotten.
const RENEWALS_MAX: usize = 16;

/// What is waited for by whoever must be sure that `term` is over on another machine: this clock may run fast while that one runs slowly.
pub const fn outlasting(term: Duration) -> Duration {
    // (1 + d) / (1 - d) is less than 1 + 3 d for the drifts that are allowed.
    let nanos = term.as_nanos() as u64;
    Duration::from_nanos(nanos + nanos / 1_000_000 * 3 * DRIFT_PPM as u64 + MARGIN.as_nanos() as u64)
}

/// What has passed on any clock when one shows that so much has.
pub(crate) const fn surely(ago: Duration) -> Duration {
    ago.saturating_sub(outlasting(ago).saturating_sub(ago))
}

/// From when on the sites that were placed on this node may be served here, by its own clock. The node that runs a site is the one
/// that waits: whoever forwards to it may have learned of the placement sooner.
#[derive(Debug, Clone)]
pub struct Arrivals<S> {
    sites: BTreeMap<S, (u64, Moment)>,
}

impl<S> Default for Arrivals<S> {
    fn default() -> Self {
        Self { sites: BTreeMap::new() }
    }
}

impl<S: Ord + Clone> Arrivals<S> {
    /// This node knows since `now` that the site is placed here, and that others may serve it for `wait` from the commit on ([`Ages::owed`]).
    /// It was committed no later; `ago` earlier, if whoever committed it has said so. What is said later can only make the wait shorter.
    pub fn placed(&mut self, now: Moment, site: S, epoch: u64, wait: Duration, ago: Duration) {
        // The clock of whoever committed may have run fast.
        let from = (now + wait).before(surely(ago));
        match self.sites.get_mut(&site) {
            Some((known, earlier)) if *known == epoch => *earlier = from.min(*earlier),
            Some((known, _)) if *known > epoch => {}
            _ => {
                self.sites.insert(site, (epoch, from));
            }
        }
    }

    /// It is placed elsewhere now, or nowhere.
    pub fn left(&mut self, site: &S) {
        self.sites.remove(site);
    }

    /// From when on the site may be served here under this epoch; `None`: never, as far as is known.
    pub fn from(&self, site: &S, epoch: u64) -> Option<Moment> {
        self.sites.get(site).filter(|(known, _)| *known == epoch).map(|(_, from)| *from)
    }
}

/// How old this node knows the store's revisions to be, by when it read them: what was written by then is at least as old.
#[derive(Debug, Clone, Default)]
pub struct Ages {
    read: VecDeque<(Moment, u64)>,
}

impl Ages {
    /// A read that has been answered by `now` saw the store at this revision.
    pub fn read(&mut self, now: Moment, revision: u64) {
        if self.read.back().is_some_and(|(at, _)| now.since(*at) < AGES_EVERY) {
            return;
        }
        self.read.push_back((now, revision));
        // One that is old enough for everything is enough.
        while self.read.get(1).is_some_and(|(at, _)| surely(now.since(*at)) >= outlasting(TERM_MAX)) {
            self.read.pop_front();
        }
    }

    /// For how long from the commit on others may serve a site that is taken from a node now, and the revision after which the
    /// placement must not have been written for that.
    ///
    /// `term`: of that node; nothing, if it has given the site up. `earlier`: what the placement that it had said in its turn of those
    /// before it. That counted from a commit before this one, so the longer of both is enough, and of a placement that is older than
    /// `earlier` nothing is left to wait.
    pub fn owed(&self, now: Moment, term: Option<Duration>, earlier: Duration) -> (Duration, Option<u64>) {
        let own = term.map_or(Duration::ZERO, outlasting);
        if earlier <= own {
            return (own, None);
        }
        self.before(now, earlier).map_or((earlier, None), |revision| (own, Some(revision)))
    }

    /// The latest revision that stood there so long ago on any clock, as far as is known.
    fn before(&self, now: Moment, ago: Duration) -> Option<u64> {
        let is_old = |(at, _): &&(Moment, u64)| surely(now.since(*at)) >= ago;
        self.read.iter().rev().find(is_old).map(|(_, revision)| *revision)
    }
}

/// A read of the store that is under way. Numbers are not used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RenewId(pub u64);

/// A round of asking all other members to vouch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RoundId(pub u64);

/// What a voucher answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vouch {
    /// Revision of the last move away from the asking node that this member committed. Who does not know of it yet cannot know
    /// which sites it still has.
    pub moved: u64,
}

/// A node's own authority. `N` is how members are named.
#[derive(Debug, Clone)]
pub struct Holder<N> {
    term: Duration,
    vouch_term: Duration,
    next: u64,
    sent: VecDeque<(RenewId, Moment)>,
    /// Reads that saw more of the store than this node's copy has: revision, and until when they give authority.
    ahead: Vec<(u64, Moment)>,
    applied: u64,
    by_store: Moment,
    by_vouches: Moment,
    members: BTreeSet<N>,
    round: Option<Round<N>>,
    is_member: bool,
}

#[derive(Debug, Clone)]
struct Round<N> {
    id: RoundId,
    sent: Moment,
    missing: BTreeSet<N>,
    /// Highest revision of a move that a voucher told of.
    moved: u64,
}

impl<N: Ord + Clone> Holder<N> {
    /// One without authority, whose copy of the records is as of revision `applied`.
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

    /// A linearizable read of this node's own record leaves now.
    pub fn sending(&mut self, now: Moment) -> RenewId {
        let id = RenewId(self.next);
        self.next += 1;
        if self.sent.len() == RENEWALS_MAX {
            self.sent.pop_front();
        }
        self.sent.push_back((id, now));
        id
    }

    /// The read has found this node's own record, with its own id in it, at this revision of the store.
    pub fn confirmed(&mut self, id: RenewId, revision: u64) {
        let Some(at) = self.sent.iter().position(|(sent, _)| *sent == id) else { return };
        let (_, sent_at) = self.sent.remove(at).expect("the position was just found");
        self.ahead.push((revision, sent_at + self.term));
        self.catch_up();
        // Of those that are waited for, only the last ones can still matter.
        if self.ahead.len() > RENEWALS_MAX {
            self.ahead.remove(0);
        }
    }

    /// The read has found no record, or another machine's. There is no authority until [`Self::joined`], whatever else is under way.
    pub fn lost(&mut self) {
        self.is_member = false;
        self.sent.clear();
        self.ahead.clear();
        self.by_store = Moment::default();
        self.by_vouches = Moment::default();
        self.round = None;
    }

    /// Its record is there (again). Authority comes with the next read.
    pub fn joined(&mut self) {
        self.is_member = true;
    }

    /// This node's copy of the records, and all processes that act on it, are as of this revision.
    pub fn applied(&mut self, revision: u64) {
        self.applied = self.applied.max(revision);
        self.catch_up();
        self.close_round();
    }

    /// The other members as of the records applied. A member that is new has not vouched, and may move sites as soon as it knows that
    /// this node knows it: so it is told only after this call.
    pub fn members(&mut self, members: BTreeSet<N>) {
        if !members.is_subset(&self.members) {
            self.by_vouches = Moment::default();
            self.round = None;
        }
        self.members = members;
    }

    /// The store has not confirmed for half a term: time to ask for vouches.
    pub fn wants_vouches(&self, now: Moment) -> bool {
        self.is_member && self.by_store.since(now) < self.term / 2
    }

    /// Asks all other members, who are returned, to vouch. A round that is not complete ends.
    pub fn asking(&mut self, now: Moment) -> (RoundId, BTreeSet<N>) {
        let id = RoundId(self.next);
        self.next += 1;
        if self.is_member {
            self.round = Some(Round { id, sent: now, missing: self.members.clone(), moved: 0 });
            // Without any other member there is nobody who could move anything.
            self.close_round();
        }
        (id, self.members.clone())
    }

    /// A member vouches. Only when all have is there authority.
    pub fn vouched(&mut self, id: RoundId, member: &N, vouch: Vouch) {
        let Some(round) = self.round.as_mut().filter(|round| round.id == id) else { return };
        round.missing.remove(member);
        round.moved = round.moved.max(vouch.moved);
        self.close_round();
    }

    /// Until when this node may serve what is placed on it. It has passed if there is no authority.
    pub fn until(&self) -> Moment {
        self.by_store.max(self.by_vouches)
    }

    /// Until when by the store alone.
    pub fn until_by_store(&self) -> Moment {
        self.by_store
    }

    pub fn may_serve(&self, now: Moment) -> bool {
        now < self.until()
    }

    /// When the next read is to be sent, if the last one was sent at `sent`.
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

/// Why a node may not move another one's sites now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// It has promised, or may have before it was started anew: until then.
    Promised(Moment),
    /// That node has never said that it knows this one, so it may be running on the vouches of all others.
    NotIntroduced,
}

/// What a member has promised others, and what it moves. Every commit that takes a site from another node passes through here.
#[derive(Debug, Clone)]
pub struct Voucher<N> {
    term: Duration,
    vouch_term: Duration,
    /// What was promised or moved before the start is not known, so until then nothing is.
    quiet_until: Moment,
    /// Revision of the store at a linearizable read that was sent since the start. What was moved before it is not known any more,
    /// so whoever asks has to know all up to it.
    synced: Option<u64>,
    promised: BTreeMap<N, Moment>,
    introduced: BTreeSet<N>,
    /// Commits under way that take a site from a node, and the revision of the last that succeeded.
    moving: BTreeMap<N, u32>,
    moved: BTreeMap<N, u64>,
}

impl<N: Ord + Clone> Voucher<N> {
    pub fn new(started_at: Moment, term: Duration, vouch_term: Duration) -> Self {
        Self {
            term,
            vouch_term,
            quiet_until: started_at + outlasting(vouch_term),
            synced: None,
            promised: BTreeMap::new(),
            introduced: BTreeSet::new(),
            moving: BTreeMap::new(),
            moved: BTreeMap::new(),
        }
    }

    /// A linearizable read that was sent since the start has found the store at this revision. The first one counts.
    pub fn synced(&mut self, revision: u64) {
        self.synced.get_or_insert(revision);
    }

    /// `node` has said that this member is in its records.
    pub fn introduced(&mut self, node: N) {
        self.introduced.insert(node);
    }

    /// `node` asks for a vouch. `by_store` is this member's own [`Holder::until_by_store`]: who reaches the store does not vouch, for
    /// then the store decides. `None`: no promise.
    pub fn vouch(&mut self, now: Moment, node: N, by_store: Moment) -> Option<Vouch> {
        let store_is_there = by_store.since(now) >= self.term / 2;
        let is_moving = self.moving.contains_key(&node);
        if store_is_there || is_moving || now < self.quiet_until {
            return None;
        }
        let moved = self.synced?.max(self.moved.get(&node).copied().unwrap_or(0));
        self.promised.insert(node, now + outlasting(self.vouch_term));
        Some(Vouch { moved })
    }

    /// Whether a commit that takes a site from `node` may be sent.
    pub fn may_move_from(&self, node: &N, now: Moment) -> Result<(), Held> {
        if !self.introduced.contains(node) {
            return Err(Held::NotIntroduced);
        }
        let promised = self.promised.get(node).copied().unwrap_or_default().max(self.quiet_until);
        if now < promised { Err(Held::Promised(promised)) } else { Ok(()) }
    }

    /// The same, and the commit leaves now: until [`Self::settled`] nothing is promised to that node.
    pub fn begin(&mut self, node: &N, now: Moment) -> Result<(), Held> {
        self.may_move_from(node, now)?;
        *self.moving.entry(node.clone()).or_default() += 1;
        Ok(())
    }

    /// It is known what became of a commit: it happened at this revision, or never will. Of one that was not answered that is
    /// known when the store shows a higher epoch of the site.
    pub fn settled(&mut self, node: &N, committed: Option<u64>) {
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
