//! What this node is entitled to and what it owes others: its own right to serve, by the store or by the vouches of all other
//! members, and its promises not to take sites from nodes that it has vouched for. It knows no socket and no store, only what
//! they said and when.
//!
//! A node that was started anew has promised and moved things it does not know of. It takes no site from another node for the
//! length of a promise, and vouches for nobody until what it may have sent before its end is done or given up by the store.
//! Not here: the argument why this is enough (decision 0014), asking and answering (`authority`), choosing nodes (`placing`).

use std::collections::BTreeSet;
use std::time::Duration;

use nagaya_cmdb::{NodeName, NodeRecord};
use nagaya_placement::Moment;
use nagaya_placement::fence::{Held, Holder, RenewId, RoundId, VOUCH_TERM, Vouch, Voucher};

/// What nobody has confirmed is done or given up by the store after so long: etcd gives up a change after 5 s and two elections,
/// of a second each.
const LEFTOVER_MAX: Duration = Duration::from_secs(10);

/// A node that has no vouches yet asks so often, one that has them every `VOUCHED_PART`th of their term.
const ASK_AGAIN: Duration = Duration::from_millis(100);
const VOUCHED_PART: u32 = 4;

/// By whom a node may serve now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    Store,
    Members,
    Nobody,
}

impl By {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Members => "members",
            Self::Nobody => "none",
        }
    }
}

/// Why a site is not taken from a node now. Each passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotNow {
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

/// What the store said of this node's record.
#[derive(Debug, Clone, Copy)]
pub struct Word {
    pub left_at: u64,
    /// The revision at which this node became a member.
    pub since: u64,
    pub revision: u64,
}

/// A change under way, or that was, which takes a site from a node.
#[derive(Debug)]
struct Taking {
    id: TakingId,
    from: NodeName,
    /// A read of the store sent after this has seen what became of it. None: it is under way.
    over: Option<Moment>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TakingId(u64);

#[derive(Debug)]
pub struct Trust {
    node: NodeName,
    started: Moment,
    term: Duration,
    /// Members are named by their ids: one that has joined anew is another.
    holder: Holder<String>,
    voucher: Voucher<NodeName>,
    members: BTreeSet<String>,
    /// The store's revision up to which all members are known. 0: nothing since the start.
    known_at: u64,
    /// Until when this node may have been told to serve by vouches.
    vouched_until: Moment,
    /// Since when this node has to say anew whom it knows, and from when on it may.
    grown_at: u64,
    say_from: Moment,
    has_said: bool,
    since: Option<u64>,
    can_vouch: bool,
    takings: Vec<Taking>,
    next: u64,
    asked: Option<Moment>,
}

impl Trust {
    pub fn new(now: Moment, node: NodeName, term: Duration) -> Self {
        let mut voucher = Voucher::new(now, term, VOUCH_TERM);
        // What this node takes from itself without having ended it first needs its own promise, too.
        voucher.introduced(node.clone());
        Self {
            node,
            started: now,
            term,
            holder: Holder::new(term, VOUCH_TERM, 0),
            voucher,
            members: BTreeSet::new(),
            known_at: 0,
            vouched_until: Moment::default(),
            grown_at: 0,
            say_from: Moment::default(),
            has_said: false,
            since: None,
            can_vouch: false,
            takings: Vec::new(),
            next: 0,
            asked: None,
        }
    }

    // === The store ===

    pub fn sending(&mut self, now: Moment) -> RenewId {
        self.holder.sending(now)
    }

    pub fn renew_at(&self, sent: Moment) -> Moment {
        self.holder.renew_at(sent)
    }

    /// The read that was sent then has found this node's record.
    pub fn confirmed(&mut self, id: RenewId, sent: Moment, word: Word) {
        self.holder.joined();
        self.holder.confirmed(id, word.left_at);
        self.since = Some(word.since);
        let Self { takings, voucher, .. } = self;
        takings.retain(|taking| {
            let is_over = taking.over.is_some_and(|over| over < sent);
            if is_over {
                // It happened no later than this, if it did.
                voucher.settled(&taking.from, Some(word.revision));
            }
            !is_over
        });
        if self.started + LEFTOVER_MAX < sent {
            self.voucher.synced(word.revision);
            self.can_vouch = true;
        }
    }

    /// It has found none, or another machine's.
    pub fn lost(&mut self) {
        self.holder.lost();
        self.has_said = false;
        self.since = None;
    }

    // === Who there is ===

    /// All that the store held at revision `applied` is known here, and these are the other members.
    pub fn look(&mut self, applied: u64, members: BTreeSet<String>) {
        if applied == 0 {
            return;
        }
        if members != self.members {
            if !members.is_subset(&self.members) {
                // Who is new has not vouched for what was granted before. What was announced cannot be taken back: so it runs out
                // before this node says that it knows them.
                (self.has_said, self.grown_at, self.say_from) = (false, applied, self.vouched_until);
            }
            self.members = members;
            self.holder.members(self.members.clone());
        }
        self.known_at = self.known_at.max(applied);
        self.holder.applied(applied);
        self.note_vouched();
    }

    /// The revision up to which this node may say now that it knows all members, if it has to.
    pub fn to_say(&self, now: Moment) -> Option<u64> {
        (!self.has_said && self.known_at > 0 && self.since.is_some() && now >= self.say_from)
            .then_some(self.known_at)
    }

    /// The members may have been newer than the revision that was looked at before them. So only a later one is sure to be no older than
    /// all of them, and has to be said as well: to a member that became one after what was said, this node would stay one that does not know it.
    pub fn said(&mut self, revision: u64) {
        self.has_said |= revision > self.grown_at;
    }

    // === Vouches for this node ===

    /// A round of questions to all other members, if it is time for one.
    pub fn ask(&mut self, now: Moment) -> Option<RoundId> {
        if self.known_at == 0 || !self.holder.wants_vouches(now) {
            return None;
        }
        let is_vouched = self.until().since(now) > VOUCH_TERM / 2;
        let every = if is_vouched { VOUCH_TERM / VOUCHED_PART } else { ASK_AGAIN };
        if self.asked.is_some_and(|asked| now.since(asked) < every) {
            return None;
        }
        self.asked = Some(now);
        let node = self.node.clone();
        let own = self.voucher.vouch(now, node, self.holder.until_by_store())?;
        let round = (own.moved <= self.known_at).then(|| self.holder.asking(now).0);
        self.note_vouched();
        round
    }

    pub fn vouched(&mut self, round: u64, id: &str, moved: u64) {
        self.holder.vouched(RoundId(round), &id.to_owned(), Vouch { moved });
        self.note_vouched();
    }

    /// What the store has given needs no vouch, however long it lasts.
    fn note_vouched(&mut self) {
        let until = self.holder.until();
        if until > self.holder.until_by_store() {
            self.vouched_until = self.vouched_until.max(until);
        }
    }

    pub fn until(&self) -> Moment {
        self.holder.until()
    }

    pub fn by(&self, now: Moment) -> By {
        if now < self.holder.until_by_store() {
            By::Store
        } else if now < self.until() {
            By::Members
        } else {
            By::Nobody
        }
    }

    // === What this node owes ===

    /// A member asks for a vouch. None: it gets none.
    pub fn vouch(&mut self, now: Moment, node: &NodeName) -> Option<Vouch> {
        self.voucher.vouch(now, node.clone(), self.holder.until_by_store())
    }

    pub fn can_vouch(&self) -> bool {
        self.can_vouch
    }

    /// Whether that node has said that it knows this one, so that this one may take sites from it.
    pub fn is_known_by(&self, record: &NodeRecord) -> bool {
        self.since.is_some_and(|since| record.knows >= since)
    }

    /// A change that takes a site from a node which has not given it up leaves now, if it may. `record`: of that node, as far as it is
    /// still a member.
    pub fn begin(
        &mut self,
        now: Moment,
        from: &NodeName,
        record: Option<&NodeRecord>,
    ) -> Result<TakingId, NotNow> {
        if self.holder.until_by_store().since(now) < self.term / 2 {
            // It would stay open whether it happened, and so would everything that depends on it.
            return Err(NotNow::NoStore);
        }
        let is_own = *from == self.node;
        if !is_own && !record.is_none_or(|record| self.is_known_by(record)) {
            return Err(NotNow::NotIntroduced);
        }
        // An operator who removes a node says that it is gone.
        self.voucher.introduced(from.clone());
        self.voucher.begin(from, now).map_err(|held| match held {
            Held::Promised(until) => NotNow::Promised(until),
            Held::NotIntroduced => NotNow::NotIntroduced,
        })?;
        self.next += 1;
        let id = TakingId(self.next);
        self.takings.push(Taking { id, from: from.clone(), over: None });
        Ok(id)
    }

    /// The store has answered to it, or has not.
    pub fn ended(&mut self, now: Moment, id: TakingId, is_answered: bool) {
        if let Some(taking) = self.takings.iter_mut().find(|taking| taking.id == id) {
            taking.over = Some(if is_answered { now } else { now + LEFTOVER_MAX });
        }
    }
}

#[cfg(test)]
mod tests;
