//! This node's lease, and its promises. The lease comes from the store or from the vouches of all
//! other members. The promises are not to take sites from nodes for which it has vouched. It knows
//! no socket and no store, only their messages and times.
//!
//! After a restart, a node does not know its earlier promises and moves. It takes no site from
//! another node for the length of a promise. It also vouches for nobody at first. It waits until
//! the store has done or given up everything that it may have sent before its end.
//!
//! Not here: the argument why this is enough (decision 0014), asking and answering
//! (`lease_renewer`), choosing nodes (`node_chooser`).

use std::collections::BTreeSet;
use std::time::Duration;

use nagaya_placement::Moment;
use nagaya_placement::lease::{LeaseHolder, MoveBlocked, RenewId, RoundId, VOUCH_TERM, Vouch, VouchPromises};
use nagaya_records::{NodeName, NodeRecord};

/// Time after which the store has done or given up any unconfirmed change. A change is given up by
/// etcd after 5 s and two elections, of a second each.
const LEFTOVER_MAX: Duration = Duration::from_secs(10);

/// Interval of requests of a node without vouches; with vouches it is a `VOUCHED_PART`th of their
/// term.
const ASK_AGAIN: Duration = Duration::from_millis(100);
const VOUCHED_PART: u32 = 4;

/// Source of a node's present lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseSource {
    Store,
    Members,
    Nobody,
}

impl LeaseSource {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Members => "members",
            Self::Nobody => "none",
        }
    }
}

/// Why a site is not taken from a node now. Each reason passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TakeoverError {
    #[error("the cluster's store does not answer, and without it no site moves")]
    NoStore,
    #[error("this node has promised not to move its sites, or may have before it was started, for up to 2 s")]
    /// Until then.
    Promised(Moment),
    #[error(
        "that node has not said that it knows this one: ask another node, or remove that one if it is gone"
    )]
    NotIntroduced,
}

/// The store's reply about this node's record.
#[derive(Debug, Clone, Copy)]
pub struct StoreReply {
    pub left_at: u64,
    /// The revision at which this node became a member.
    pub since: u64,
    pub revision: u64,
}

/// A present or past change that takes a site from a node.
#[derive(Debug)]
struct PendingTakeover {
    id: TakeoverId,
    from: NodeName,
    /// A read of the store sent after this has seen the outcome. `None` while it is in progress.
    over: Option<Moment>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TakeoverId(u64);

/// This node's statement in its record about the members that it knows.
#[derive(Debug, Default)]
struct IntroductionState {
    /// The store's revision since which this node has to say again whom it knows.
    grown_at: u64,
    /// The moment from which it may say so.
    say_from: Moment,
    has_said: bool,
}

#[derive(Debug)]
pub struct LeaseManager {
    node: NodeName,
    started: Moment,
    term: Duration,
    /// Ids name members: one that has joined again is another.
    holder: LeaseHolder<String>,
    voucher: VouchPromises<NodeName>,
    members: BTreeSet<String>,
    /// Store revision up to which all members are known. 0 if nothing was since the start.
    known_at: u64,
    /// Latest time until which vouches may have given this node a lease.
    vouched_until: Moment,
    introduction: IntroductionState,
    since: Option<u64>,
    can_vouch: bool,
    takings: Vec<PendingTakeover>,
    next: u64,
    asked: Option<Moment>,
}

impl LeaseManager {
    pub fn new(now: Moment, node: NodeName, term: Duration) -> Self {
        let mut voucher = VouchPromises::new(now, term, VOUCH_TERM);
        // To take sites from itself without ending them first, it needs its own promise, too.
        voucher.note_introduced(node.clone());
        Self {
            node,
            started: now,
            term,
            holder: LeaseHolder::new(term, VOUCH_TERM, 0),
            voucher,
            members: BTreeSet::new(),
            known_at: 0,
            vouched_until: Moment::default(),
            introduction: IntroductionState::default(),
            since: None,
            can_vouch: false,
            takings: Vec::new(),
            next: 0,
            asked: None,
        }
    }

    // === The store ===

    pub fn begin_read(&mut self, now: Moment) -> RenewId {
        self.holder.begin_read(now)
    }

    pub fn renew_at(&self, sent: Moment) -> Moment {
        self.holder.renew_at(sent)
    }

    /// Notes that the read sent then has found this node's record.
    pub fn note_confirmed(&mut self, id: RenewId, sent: Moment, word: StoreReply) {
        self.holder.note_joined();
        self.holder.note_confirmed(id, word.left_at);
        self.since = Some(word.since);
        let Self { takings, voucher, .. } = self;
        takings.retain(|taking| {
            let is_over = taking.over.is_some_and(|over| over < sent);
            if is_over {
                // It happened no later than this, if it did.
                voucher.note_settled(&taking.from, Some(word.revision));
            }
            !is_over
        });
        if self.started + LEFTOVER_MAX < sent {
            self.voucher.note_synced(word.revision);
            self.can_vouch = true;
        }
    }

    /// Notes that the read has found none, or another machine's.
    pub fn note_removed(&mut self) {
        self.holder.note_lost();
        self.introduction.has_said = false;
        self.since = None;
    }

    // === Who there is ===

    /// Notes that the store's content at revision `applied` is known here, with these other
    /// members.
    pub fn update_members(&mut self, applied: u64, members: BTreeSet<String>) {
        if applied == 0 {
            return;
        }
        if members != self.members {
            if !members.is_subset(&self.members) {
                // A new member has not vouched for the earlier lease, which cannot be taken back.
                // So it runs out before this node reports that it knows the new member.
                self.introduction.has_said = false;
                self.introduction.grown_at = applied;
                self.introduction.say_from = self.vouched_until;
            }
            self.members = members;
            self.holder.members(self.members.clone());
        }
        self.known_at = self.known_at.max(applied);
        self.holder.applied(applied);
        self.note_vouched();
    }

    /// Returns the revision up to which this node may now report that it knows all members, if it
    /// must.
    pub fn revision_to_introduce(&self, now: Moment) -> Option<u64> {
        (!self.introduction.has_said
            && self.known_at > 0
            && self.since.is_some()
            && now >= self.introduction.say_from)
            .then_some(self.known_at)
    }

    /// Notes a report. The members may be newer than the revision that was read before them. So
    /// only a later revision is certainly no older than all of them, and must be reported as well.
    /// Otherwise this node would stay unknown to a member that joined after the report.
    pub fn note_introduced(&mut self, revision: u64) {
        self.introduction.has_said |= revision > self.introduction.grown_at;
    }

    // === Vouches for this node ===

    /// Returns a round of requests to all other members, if it is time for one.
    pub fn begin_vouch_round(&mut self, now: Moment) -> Option<RoundId> {
        if self.known_at == 0 || !self.holder.wants_vouches(now) {
            return None;
        }
        let is_vouched = self.lease_end().since(now) > VOUCH_TERM / 2;
        let every = if is_vouched { VOUCH_TERM / VOUCHED_PART } else { ASK_AGAIN };
        if self.asked.is_some_and(|asked| now.since(asked) < every) {
            return None;
        }
        self.asked = Some(now);
        let node = self.node.clone();
        let own = self.voucher.vouch(now, node, self.holder.until_by_store())?;
        let round = (own.moved <= self.known_at).then(|| self.holder.begin_round(now).0);
        self.note_vouched();
        round
    }

    pub fn add_vouch(&mut self, round: u64, id: &str, moved: u64) {
        self.holder.add_vouch(RoundId(round), &id.to_owned(), Vouch { moved });
        self.note_vouched();
    }

    /// The store's lease needs no vouch, however long it lasts.
    fn note_vouched(&mut self) {
        let until = self.holder.lease_end();
        if until > self.holder.until_by_store() {
            self.vouched_until = self.vouched_until.max(until);
        }
    }

    pub fn lease_end(&self) -> Moment {
        self.holder.lease_end()
    }

    pub fn granted_by(&self, now: Moment) -> LeaseSource {
        if now < self.holder.until_by_store() {
            LeaseSource::Store
        } else if now < self.lease_end() {
            LeaseSource::Members
        } else {
            LeaseSource::Nobody
        }
    }

    // === What this node owes ===

    /// Handles a member's request for a vouch. `None` if it gets none.
    pub fn vouch(&mut self, now: Moment, node: &NodeName) -> Option<Vouch> {
        self.voucher.vouch(now, node.clone(), self.holder.until_by_store())
    }

    pub fn can_vouch(&self) -> bool {
        self.can_vouch
    }

    /// Returns whether that node has reported that it knows this one, so that this one may take
    /// sites from it.
    pub fn is_known_by(&self, record: &NodeRecord) -> bool {
        self.since.is_some_and(|since| record.knows >= since)
    }

    /// Begins a change that takes a site from a node which has not given it up, if it is allowed.
    /// The change is sent now. `record` is that node's, if it is still a member.
    pub fn begin_takeover(
        &mut self,
        now: Moment,
        from: &NodeName,
        record: Option<&NodeRecord>,
    ) -> Result<TakeoverId, TakeoverError> {
        if self.holder.until_by_store().since(now) < self.term / 2 {
            // Its outcome would stay unknown, and so would everything that depends on it.
            return Err(TakeoverError::NoStore);
        }
        let is_own = *from == self.node;
        if !is_own && !record.is_none_or(|record| self.is_known_by(record)) {
            return Err(TakeoverError::NotIntroduced);
        }
        // An operator who removes a node asserts that it is gone.
        self.voucher.note_introduced(from.clone());
        self.voucher.begin(from, now).map_err(|held| match held {
            MoveBlocked::Promised(until) => TakeoverError::Promised(until),
            MoveBlocked::NotIntroduced => TakeoverError::NotIntroduced,
        })?;
        self.next += 1;
        let id = TakeoverId(self.next);
        self.takings.push(PendingTakeover { id, from: from.clone(), over: None });
        Ok(id)
    }

    /// Notes whether the store has answered it.
    pub fn end_takeover(&mut self, now: Moment, id: TakeoverId, is_answered: bool) {
        if let Some(taking) = self.takings.iter_mut().find(|taking| taking.id == id) {
            taking.over = Some(if is_answered { now } else { now + LEFTOVER_MAX });
        }
    }
}

#[cfg(test)]
mod tests;
