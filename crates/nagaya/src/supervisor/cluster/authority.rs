//! This node's right to run what is placed on it: a word from the store every quarter of the fence's term, or while the store is
//! down for everybody the vouches of all other members, told to edge and keeper as the moment until which it holds.
//!
//! The word follows the records on the same feed, so whoever reads it has read all that the store knew when it gave it. Not here:
//! what the right is worth (`nagaya_placement::fence`), what this node is owed and owes (`trust`), the datagrams between members,
//! holding requests (`nagaya_edge`), freezing (`nagaya_keeper`).

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::NodeRecord;
use nagaya_cmdb::feed::Down;
use nagaya_cmdb::store::etcd::Confirmed;
use nagaya_placement::Moment;
use rustix::time::{ClockId, clock_gettime};

use super::super::child::Role;
use super::super::feed::Feed;
use super::events::What;
use super::membership::{Membership, log_no_authority};
use super::trust::{By, Word};

/// A read of the store that has not answered after this part of the term is of no use any more.
const PATIENCE_PART: u32 = 2;

/// This machine's clock that runs on while it sleeps.
pub fn now() -> Moment {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Moment(seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0))
}

impl Membership {
    pub fn has_authority(&self) -> bool {
        now().0 < self.authority_until.get()
    }

    /// Asks the store for as long as this node is a member, and the other members when it does not answer. A read that is late
    /// does not hold up the next.
    pub(super) async fn keep_authority(self: Rc<Self>) {
        self.listed.notified().await;
        let mut was = By::Nobody;
        loop {
            let sent = now();
            tokio::task::spawn_local(Rc::clone(&self).confirm(sent));
            let next = self.trust.borrow().renew_at(sent);
            tokio::time::sleep(Duration::from_nanos(next.0.saturating_sub(now().0))).await;
            let others = self.look();
            self.introduce_others();
            self.ask_for_vouches(others);
            self.announce();
            was = self.tell_authority(was);
        }
    }

    /// Tells who lets this node serve, if that has changed. What was given before holds until it has run out.
    fn tell_authority(&self, was: By) -> By {
        let by = self.trust.borrow().by(now());
        if by == was || by == By::Nobody && self.has_authority() {
            return was;
        }
        match by {
            By::Nobody => {
                log_no_authority(match self.is_member() {
                    true => "the cluster's store has not confirmed in time that this node may run them",
                    false => "it was removed from the cluster",
                });
                self.note(What::AuthorityLost);
            }
            By::Members => {
                tracing::warn!("the cluster's store does not answer: the other members vouch for this node");
                self.note(What::AuthorityHeld { by: by.as_str() });
            }
            By::Store => self.note(What::AuthorityHeld { by: by.as_str() }),
        }
        by
    }

    async fn confirm(self: Rc<Self>, sent: Moment) {
        let id = self.trust.borrow_mut().sending(sent);
        let patience = self.context.fence() / PATIENCE_PART;
        match self.store.confirm(&self.node, &self.id, patience).await {
            Ok(Confirmed::Ours { left_at, since, revision, .. }) => {
                self.trust.borrow_mut().confirmed(id, sent, Word { left_at, since, revision });
                self.ages.borrow_mut().read(now(), revision);
                self.look();
                self.introduce_others();
                self.announce();
            }
            Ok(Confirmed::Gone | Confirmed::Anothers) => self.trust.borrow_mut().lost(),
            // Nothing was heard: what was given before runs out by itself.
            Err(error) => tracing::debug!("the store did not confirm: {error}"),
        }
    }

    /// Takes in how far this node's copy of the records is, and who the other members are.
    fn look(&self) -> Vec<NodeRecord> {
        // Before the records are read: they are no older then.
        let applied = self.store.applied();
        let mut others = match self.records().nodes() {
            Ok(nodes) => nodes,
            Err(error) => {
                tracing::debug!("the members cannot be read: {error}");
                return Vec::new();
            }
        };
        others.retain(|node| node.id != self.id);
        let ids = others.iter().map(|node| node.id.clone()).collect();
        self.trust.borrow_mut().look(applied, ids);
        others
    }

    /// Says in this node's record that it knows all members: from then on they may take sites from it.
    fn introduce_others(self: &Rc<Self>) {
        let Some(revision) = self.trust.borrow().to_say(now()) else { return };
        if self.introducing.replace(true) {
            return;
        }
        let membership = Rc::clone(self);
        tokio::task::spawn_local(async move {
            match membership.store.knows(&membership.node, &membership.id, revision).await {
                Ok(()) => membership.trust.borrow_mut().said(revision),
                Err(error) => {
                    tracing::warn!(code = %error.code(), "new members cannot take over from this node yet: {error}");
                }
            }
            membership.introducing.set(false);
        });
    }

    fn announce(&self) {
        let until = self.trust.borrow().until();
        if until.0 > self.authority_until.get() {
            self.authority_until.set(until.0);
            self.context.node.send_all(&Down::Authority { until_ns: until.0 });
        }
    }

    // === Vouches ===

    fn ask_for_vouches(&self, members: Vec<NodeRecord>) {
        let Some(round) = self.trust.borrow_mut().ask(now()) else { return };
        if !members.is_empty()
            && let Some(edge) = self.context.node.feed(Role::Edge)
        {
            edge.send(Down::Vouch { round: round.0, members });
        }
    }

    /// A member vouches for this node.
    pub fn vouched(&self, round: u64, id: &str, moved: u64) {
        self.trust.borrow_mut().vouched(round, id, moved);
        self.announce();
    }

    /// A member asks this node to vouch for it. Of one that is in no record nothing is known, so it gets no answer.
    pub fn vouch(&self, tag: u64, id: &str, edge: &Arc<Feed>) {
        let Ok(nodes) = self.records().nodes() else { return };
        let Some(node) = nodes.iter().find(|node| node.id == id) else { return };
        if let Some(vouch) = self.trust.borrow_mut().vouch(now(), &node.name) {
            edge.send(Down::VouchAnswer { tag, moved: vouch.moved });
        }
    }
}
