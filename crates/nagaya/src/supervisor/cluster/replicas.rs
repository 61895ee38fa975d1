//! Replicas of a site's application. One more node gets it, wakes it before requests are sent
//! there, and gives it up again.
//!
//! A node adds others to the nodes of its site. It takes out only itself, or a node that is no
//! longer a member.
//!
//! Not here: load as the reason (`nagaya_placement::balance`), a replica that does not answer
//! (`relocator`), sending requests there (`nagaya_edge`).

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::time::Duration;

use nagaya_placement::lease::{TERM_MAX, max_elapsed};
use nagaya_records::instance::InstanceCommand;
use nagaya_records::{Placement, PlacementReason, SiteName};
use nagaya_store::etcd::{PlacementBasis, PlacementOutcome};
use serde_json::Value;

use super::clock::unix_ms;
use super::codes::NOWHERE;
use super::delegated::IMAGE_WITHIN;
use super::image_fetcher::ImageFetcher;
use super::mover::SiteMover;
use super::relocator::SiteRelocator;
use super::takeover_terms::{TakeoverTerms, round_up_ms};
use super::view::ClusterView;
use crate::admin::AdminNode as _;

/// Tries to record that a replica is awake, while others change the same placement.
const CHANGES_MAX: u32 = 16;

/// Shared sites of this node that are changed at the same time.
const AT_ONCE: usize = 16;

pub struct ReplicaManager {
    pub view: Rc<ClusterView>,
    pub terms: Rc<TakeoverTerms>,
    pub relocator: Rc<SiteRelocator>,
    pub mover: Rc<SiteMover>,
    pub images: Rc<ImageFetcher>,
    /// Shared sites of which a change is in progress.
    pub shifting: RefCell<HashSet<SiteName>>,
}

impl ReplicaManager {
    /// Gives the site to that node, too. This one has it.
    pub async fn copy(&self, site: &SiteName, to: &str) -> Result<(), String> {
        let to = self.view.find_member(to).map_err(|problem| problem.detail.clone())?;
        let (placement, max) = self.shared_now(site)?;
        if placement.part(&self.view.node).is_none() {
            return Err("it does not run here any more".into());
        }
        if placement.part(&to).is_some() {
            return Err(format!("'{to}' has it already"));
        }
        if placement.parts().count() >= max as usize {
            return Err(format!("its record allows {max} replicas"));
        }
        // Nodes that had it a moment ago and did not report giving it up may still serve it. The
        // wait keeps their number within the record's limit.
        let (wait, basis) = match placement.epoch {
            1 => (Duration::ZERO, PlacementBasis::default()),
            _ => self.terms.may_serve_at_all(),
        };
        let mut next = placement.with_copy(to, unix_ms(), round_up_ms(wait));
        let mut claim = self.view.store.place_on(next.clone(), Some(placement.epoch), None, basis).await;
        if matches!(claim, Ok(PlacementOutcome::Otherwise)) {
            next.copies.last_mut().expect("it was just added").wait_ms = round_up_ms(max_elapsed(TERM_MAX));
            claim = self.view.store.place(next.clone(), Some(placement.epoch), None).await;
        }
        match claim {
            Ok(PlacementOutcome::Won) => {
                tracing::info!(%site, node = %next.copies.last().expect("it was just added").node, epoch = next.epoch, "a site runs on one more node");
                Ok(())
            }
            Ok(PlacementOutcome::Lost(Some(stored))) if stored == next => Ok(()),
            Ok(PlacementOutcome::Lost(_) | PlacementOutcome::Void | PlacementOutcome::Otherwise) => {
                Err("others have changed where it runs meanwhile".into())
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Gives up this node's replica; other nodes keep theirs.
    pub async fn uncopy(self: &Rc<Self>, site: &SiteName, why: PlacementReason) -> Result<(), String> {
        let (placement, _) = self.shared_now(site)?;
        self.mover.leave(placement, None, why).await.map(drop)
    }

    fn shared_now(&self, site: &SiteName) -> Result<(Placement, u32), String> {
        let record = self.view.records().site(site.as_str()).map_err(|error| error.to_string())?;
        let placement = self.view.records().placement(site.as_str()).map_err(|error| error.to_string())?;
        let both = record.zip(placement).ok_or("it is gone, or runs nowhere")?;
        Ok((both.1, both.0.instances_max()))
    }

    /// Maintains all sites that this node shares with others.
    pub fn look_after(self: &Rc<Self>, shared: &[Placement]) {
        let sites = shared.iter().map(|placement| placement.site.clone());
        self.view.context.node.balance.shared.keep(sites);
        for placement in shared {
            if self.shifting.borrow().len() >= AT_ONCE || self.shifting.borrow().contains(&placement.site) {
                continue;
            }
            let Some(due) = self.due(placement) else { continue };
            self.shifting.borrow_mut().insert(placement.site.clone());
            let manager = Rc::clone(self);
            let placement = placement.clone();
            tokio::task::spawn_local(async move {
                manager.carry_out_due(&placement, due).await;
                manager.shifting.borrow_mut().remove(&placement.site);
            });
        }
    }

    fn due(&self, placement: &Placement) -> Option<ReplicaAction> {
        let is_member = |node| matches!(self.view.records().node(node), Ok(Some(_)));
        let mut members = placement.parts().filter(|part| is_member(part.node.as_str()));
        let is_first = members.next().is_some_and(|part| *part.node == self.view.node);
        let max = self.view.records().site(placement.site.as_str()).ok()??.instances_max();
        let own = placement.parts().position(|part| *part.node == self.view.node)?;
        if own >= max as usize {
            return Some(ReplicaAction::Leave);
        }
        if own > 0 && !placement.copies[own - 1].ready {
            return Some(ReplicaAction::Begin);
        }
        // It was read as no member, and not because the records failed.
        let is_gone = |node: &str| matches!(self.view.records().node(node), Ok(None));
        let gone = placement.parts().find(|part| is_gone(part.node.as_str()));
        gone.filter(|_| is_first).map(|part| ReplicaAction::TakeOut(part.node.clone()))
    }

    async fn carry_out_due(self: &Rc<Self>, placement: &Placement, due: ReplicaAction) {
        let site = &placement.site;
        match due {
            ReplicaAction::Leave => {
                if let Err(reason) = self.uncopy(site, PlacementReason::Operator).await {
                    tracing::warn!(code = %NOWHERE, %site, "its record allows fewer, and it stays here for now: {reason}");
                }
            }
            ReplicaAction::TakeOut(node) => {
                self.relocator
                    .place(site, Some(placement.epoch), PlacementReason::Draining, Some(node), 0)
                    .await;
            }
            ReplicaAction::Begin => {
                if let Err(reason) = self.begin_copy(placement).await {
                    tracing::warn!(code = %NOWHERE, %site, "it was to run here, too, and does not: {reason}");
                    if let Err(reason) = self.uncopy(site, PlacementReason::Load).await {
                        tracing::debug!(%site, "it was not removed here: {reason}");
                    }
                }
            }
        }
    }

    /// Wakes a new replica here, and reports that it is awake.
    async fn begin_copy(self: &Rc<Self>, placement: &Placement) -> Result<(), String> {
        let site = &placement.site;
        let own = placement.part(&self.view.node).map(|part| part.epoch);
        // No request goes into it before that has passed, so none must be sent to it.
        let wait = placement.part(&self.view.node).map_or(0, |part| part.wait_ms);
        let may_serve = tokio::time::Instant::now() + Duration::from_millis(wait.into());
        // A failure is logged. The replica is then only slower, and no request waits for either.
        let _ = tokio::time::timeout(IMAGE_WITHIN, self.images.fetch(site, &placement.node)).await;
        let woken = self.view.context.node.instance(site.to_string(), InstanceCommand::Wake).await;
        let woken: Value =
            woken.and_then(|text| serde_json::from_str(&text).ok()).ok_or("the keeper did not answer")?;
        if woken["ok"] != true {
            return Err(woken["error"].as_str().unwrap_or("it was not woken").into());
        }
        tokio::time::sleep_until(may_serve).await;
        let (mut newest, _) = self.shared_now(site)?;
        for _ in 0..CHANGES_MAX {
            if newest.part(&self.view.node).map(|part| part.epoch) != own {
                return Ok(());
            }
            let Some(next) = newest.with_ready(&self.view.node) else { return Ok(()) };
            match self.view.store.place(next.clone(), Some(newest.epoch), None).await {
                Ok(PlacementOutcome::Won) => {
                    tracing::info!(%site, epoch = next.epoch, "it is awake here, too, and gets requests");
                    return Ok(());
                }
                // Possibly this node wrote it, and its copy of the records comes later.
                Ok(PlacementOutcome::Lost(Some(stored))) => newest = stored,
                Ok(PlacementOutcome::Lost(None) | PlacementOutcome::Void | PlacementOutcome::Otherwise) => {
                    return Err("it was removed meanwhile".into());
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        Err("others change where it runs all the time".into())
    }
}

/// Action for a site that several nodes have.
enum ReplicaAction {
    /// Its record allows fewer.
    Leave,
    /// It is new here.
    Begin,
    /// That node is no longer a member.
    TakeOut(nagaya_records::NodeName),
}
