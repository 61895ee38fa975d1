//! This node's lease on its placed sites. The store confirms it every quarter of the lease term.
//! While the store is down for all, the vouches of all other members renew it. Edge and keeper get
//! the moment at which it ends.
//!
//! The end of the lease follows the records on the same feed. So its reader has read all that the
//! store knew when it granted the lease.
//!
//! Not here: the worth of a lease (`nagaya_placement::lease`), the promises to and by this node
//! (`lease_manager`), the datagrams between members, holding requests (`nagaya_edge`), freezing
//! (`nagaya_keeper`).

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_placement::Moment;
use nagaya_records::NodeRecord;
use nagaya_records::feed::FromSupervisor;
use nagaya_store::etcd::RecordOwner;
use tokio::sync::Notify;

use super::super::child::ProcessRole;
use super::super::feed::ProcessFeed;
use super::clock::now;
use super::codes::NO_AUTHORITY;
use super::events::{ClusterEvent, EventLog};
use super::lease_manager::{LeaseSource, StoreReply};
use super::lease_state::LeaseState;
use super::takeover_terms::TakeoverTerms;
use super::view::ClusterView;

/// Part of the term after which an unanswered read of the store is useless.
const PATIENCE_PART: u32 = 2;

pub struct LeaseRenewer {
    pub view: Rc<ClusterView>,
    pub lease: Rc<LeaseState>,
    pub terms: Rc<TakeoverTerms>,
    pub events: Rc<EventLog>,
    /// Notified once this node's record is written: it says how long the lease is.
    pub listed: Rc<Notify>,
    /// This node is saying in its record that it knows all members.
    pub introducing: Cell<bool>,
}

impl LeaseRenewer {
    /// Asks the store while this node is a member, and the other members when it does not answer. A
    /// late read does not delay the next.
    pub async fn run(self: Rc<Self>) {
        self.listed.notified().await;
        let mut was = LeaseSource::Nobody;
        loop {
            let sent = now();
            tokio::task::spawn_local(Rc::clone(&self).confirm(sent));
            let next = self.lease.trust().borrow().renew_at(sent);
            tokio::time::sleep(Duration::from_nanos(next.0.saturating_sub(now().0))).await;
            let others = self.look();
            self.introduce_others();
            self.ask_for_vouches(others);
            self.announce();
            was = self.tell_authority(was);
        }
    }

    /// Logs the source of the node's lease, if that has changed. An earlier lease holds until it
    /// has run out.
    fn tell_authority(&self, was: LeaseSource) -> LeaseSource {
        let by = self.lease.granted_by();
        if by == was || by == LeaseSource::Nobody && self.lease.is_valid() {
            return was;
        }
        match by {
            LeaseSource::Nobody => {
                self.log_lost();
                self.events.note(ClusterEvent::AuthorityLost);
            }
            LeaseSource::Members => {
                tracing::warn!("the cluster's store does not answer: the other members vouch for this node");
                self.events.note(ClusterEvent::AuthorityHeld { by: by.as_str() });
            }
            LeaseSource::Store => self.events.note(ClusterEvent::AuthorityHeld { by: by.as_str() }),
        }
        by
    }

    fn log_lost(&self) {
        let why = if self.view.is_member() {
            "the cluster's store has not confirmed in time that this node may run them"
        } else {
            "it was removed from the cluster"
        };
        tracing::warn!(code = %NO_AUTHORITY, "applications placed on this node are frozen, and their requests wait: {why}");
    }

    async fn confirm(self: Rc<Self>, sent: Moment) {
        let id = self.lease.trust().borrow_mut().begin_read(sent);
        let patience = self.view.context.fence() / PATIENCE_PART;
        match self.view.store.confirm(&self.view.node, &self.view.id, patience).await {
            Ok(RecordOwner::Ours { left_at, since, revision, .. }) => {
                self.lease.trust().borrow_mut().note_confirmed(
                    id,
                    sent,
                    StoreReply { left_at, since, revision },
                );
                self.terms.note_revision(revision);
                self.look();
                self.introduce_others();
                self.announce();
            }
            Ok(RecordOwner::Gone | RecordOwner::Anothers) => self.lease.trust().borrow_mut().note_removed(),
            // There was no reply, so an earlier lease runs out by itself.
            Err(error) => tracing::debug!("the store did not confirm: {error}"),
        }
    }

    /// Notes the state of this node's copy of the records, and the other members.
    fn look(&self) -> Vec<NodeRecord> {
        // It is read before the records, which are then no older.
        let applied = self.view.store.applied();
        let mut others = match self.view.records().nodes() {
            Ok(nodes) => nodes,
            Err(error) => {
                tracing::debug!("the members cannot be read: {error}");
                return Vec::new();
            }
        };
        others.retain(|node| node.id != self.view.id);
        let ids = others.iter().map(|node| node.id.clone()).collect();
        self.lease.trust().borrow_mut().update_members(applied, ids);
        others
    }

    /// Says in this node's record that it knows all members: from then on they may take sites from
    /// it.
    fn introduce_others(self: &Rc<Self>) {
        let Some(revision) = self.lease.trust().borrow().revision_to_introduce(now()) else { return };
        if self.introducing.replace(true) {
            return;
        }
        let renewer = Rc::clone(self);
        tokio::task::spawn_local(async move {
            match renewer.view.store.knows(&renewer.view.node, &renewer.view.id, revision).await {
                Ok(()) => renewer.lease.trust().borrow_mut().note_introduced(revision),
                Err(error) => {
                    tracing::warn!(code = %error.code(), "new members cannot take over from this node yet: {error}");
                }
            }
            renewer.introducing.set(false);
        });
    }

    fn announce(&self) {
        if let Some(until_ns) = self.lease.extend_announced() {
            self.view.context.node.send_all(&FromSupervisor::Authority { until_ns });
        }
    }

    // === Vouches ===

    fn ask_for_vouches(&self, members: Vec<NodeRecord>) {
        let Some(round) = self.lease.trust().borrow_mut().begin_vouch_round(now()) else { return };
        if !members.is_empty()
            && let Some(edge) = self.view.context.node.feed(ProcessRole::Edge)
        {
            edge.send(FromSupervisor::Vouch { round: round.0, members });
        }
    }

    /// A member vouches for this node.
    pub fn add_vouch(&self, round: u64, id: &str, moved: u64) {
        self.lease.trust().borrow_mut().add_vouch(round, id, moved);
        self.announce();
    }

    /// Handles a member's request for a vouch. A member without a record is unknown, so it gets no
    /// reply.
    pub fn answer_vouch(&self, tag: u64, id: &str, edge: &Arc<ProcessFeed>) {
        let Ok(nodes) = self.view.records().nodes() else { return };
        let Some(node) = nodes.iter().find(|node| node.id == id) else { return };
        if let Some(vouch) = self.lease.trust().borrow_mut().vouch(now(), &node.name) {
            edge.send(FromSupervisor::VouchAnswer { tag, moved: vouch.moved });
        }
    }
}
