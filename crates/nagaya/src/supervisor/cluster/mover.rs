//! Moves sites without a failure. Their node lets running requests end, ends the application, and
//! only then gives the site away. So no request waits for an old lease, and none fails. New
//! requests wait at the edge meanwhile.
//!
//! Not here: sites whose node does not answer (`node_chooser`).

use std::rc::Rc;
use std::time::{Duration, Instant};

use http::StatusCode;
use nagaya_records::feed::FromSupervisor;
use nagaya_records::instance::InstanceCommand;
use nagaya_records::{NodeName, Placement, PlacementReason, SiteName};
use nagaya_store::etcd::{ClusterError, PlacementBasis, PlacementOutcome};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::super::child::ProcessRole;
use super::clock::unix_ms;
use super::codes::NOWHERE;
use super::delegated::DelegatedTasks;
use super::events::{ClusterEvent, EventLog, SiteMove};
use super::node_chooser::{ChosenNode, NodeChooser, next_placement};
use super::takeover_terms::{TakeoverTerms, round_up_ms};
use super::view::ClusterView;
use crate::admin::{AdminNode as _, ProblemReply};

/// Longest time for running requests to end before the site moves without them.
const RELEASE_WITHIN: Duration = Duration::from_secs(20);

/// Tries to write the new placement of a site that was given up. Each time the store has some
/// seconds to answer.
const PLACE_TRIES_MAX: u32 = 60;

/// Tries to record that a site was given up, while others change the same placement.
const CHANGES_MAX: u32 = 16;

/// Sites that leave a node at once.
const LEAVE_AT_ONCE: usize = 4;

/// Interval of checks whether a node must be emptied, and of attempts for sites that could not be
/// given away.
const LOOK_EVERY: Duration = Duration::from_millis(500);

pub struct SiteMover {
    pub view: Rc<ClusterView>,
    pub chooser: Rc<NodeChooser>,
    pub terms: Rc<TakeoverTerms>,
    pub events: Rc<EventLog>,
    pub delegated: Rc<DelegatedTasks>,
}

impl SiteMover {
    /// Gives all sites away while this node's record says that it is draining.
    pub async fn run(self: Rc<Self>) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let record = self.view.records().node(self.view.node.as_str());
            let is_draining = record.is_ok_and(|record| record.is_some_and(|record| record.draining));
            if is_draining {
                self.give_all_away().await;
            }
        }
    }

    async fn give_all_away(self: &Rc<Self>) {
        let mut after: Option<String> = None;
        loop {
            let page = self.view.records().placements(after.as_deref(), nagaya_store::PAGE_LEN_MAX);
            let Ok(page) = page else { return };
            let Some(last) = page.last() else { return };
            after = Some(last.site.to_string());
            let mut leaving = JoinSet::new();
            let runs_here = |placement: &Placement| {
                let site = || self.view.records().site(placement.site.as_str());
                placement.part(&self.view.node).is_some() && site().is_ok_and(|site| site.is_some())
            };
            for placement in page.into_iter().filter(runs_here) {
                while leaving.len() >= LEAVE_AT_ONCE {
                    leaving.join_next().await;
                }
                let mover = Rc::clone(self);
                leaving.spawn_local(async move {
                    let site = placement.site.clone();
                    if let Err(reason) = mover.give_away(placement, None, PlacementReason::Draining).await {
                        tracing::warn!(code = %NOWHERE, %site, "it stays on this node for now: {reason}");
                    }
                });
            }
            while leaving.join_next().await.is_some() {}
        }
    }

    /// Moves a site that runs here. If others have it, too, and no target is given, they keep it
    /// and no other node gets it.
    async fn give_away(
        self: &Rc<Self>,
        placement: Placement,
        to: Option<NodeName>,
        why: PlacementReason,
    ) -> Result<Placement, String> {
        let site = placement.site.clone();
        // This comes before anything is held up: there must be a target.
        let (to, reason) = match to {
            None if !placement.copies.is_empty() => (None, "other nodes have it already".into()),
            None => {
                let chosen = self.chooser.choose(&site, Some(&placement.node), why);
                let ChosenNode { node, reason } = chosen.map_err(|nobody| nobody.reason)?;
                (Some(node), reason)
            }
            to => (to, "that node was requested".into()),
        };
        let fetch_us = match to.as_ref().filter(|_| why != PlacementReason::Draining) {
            Some(to) => self.bring_image_first(&placement, to).await,
            None => 0,
        };
        let begun = Instant::now();
        let moved = self.leave(placement, to.clone(), why).await?;
        let to = to.as_ref().filter(|to| moved.part(to).is_some()).unwrap_or(&moved.node);
        let release_us = micros(begun);
        let from = Some(self.view.node.clone());
        self.events.note(ClusterEvent::Moved(SiteMove {
            fetch_us,
            release_us,
            ..SiteMove::new(&moved, from, to, why, reason)
        }));
        Ok(moved)
    }

    /// Transfers the image to a node that is not the site's fallback and so has none. Requests
    /// continue here meanwhile. Returns how long that took. A node that is being emptied has too
    /// many sites to wait for each.
    async fn bring_image_first(&self, placement: &Placement, to: &NodeName) -> u64 {
        let site = &placement.site;
        let here = self.view.context.node.instance(site.to_string(), InstanceCommand::Inspect).await;
        let here: Value = here.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
        if here["image"].is_null() || self.chooser.has_image_of(placement, to) {
            return 0;
        }
        let begun = Instant::now();
        self.delegated.bring_image(site, to).await;
        micros(begun)
    }

    /// Gives up this node's replica. `to` gets it in its place; with `None` the other nodes keep
    /// theirs.
    pub async fn leave(
        self: &Rc<Self>,
        placement: Placement,
        to: Option<NodeName>,
        why: PlacementReason,
    ) -> Result<Placement, String> {
        let site = placement.site.clone();
        if self.after(&placement, to.as_ref(), why, Duration::ZERO).is_none() {
            return Err("another node has it already, or no node can take it".into());
        }
        // Once its application has ended here, its next place must be recorded.
        if !self.view.lease().is_confirmed() {
            return Err("the cluster's store does not answer now, so it stays where it is".into());
        }
        self.leaving(&site, true);
        let moved = self.release_and_place(placement, to, why).await;
        if moved.is_err() {
            // Otherwise waiting requests continue when the edge learns of the new placement.
            self.leaving(&site, false);
        }
        moved
    }

    /// Writes the placement that follows when this node gives its replica away. For `wait`, nodes
    /// from which this one took it may still serve it.
    fn after(
        &self,
        placement: &Placement,
        to: Option<&NodeName>,
        why: PlacementReason,
        wait: Duration,
    ) -> Option<Placement> {
        match to {
            Some(to) => placement.moved(&self.view.node, to.clone(), unix_ms(), why, round_up_ms(wait)),
            None => placement.without(&self.view.node, unix_ms(), why),
        }
    }

    async fn release_and_place(
        &self,
        placement: Placement,
        to: Option<NodeName>,
        why: PlacementReason,
    ) -> Result<Placement, String> {
        let within_ms = u64::try_from(RELEASE_WITHIN.as_millis()).unwrap_or(u64::MAX);
        let released = self
            .view
            .context
            .node
            .instance(placement.site.to_string(), InstanceCommand::Release { within_ms })
            .await;
        let released: Value =
            released.and_then(|text| serde_json::from_str(&text).ok()).ok_or("the keeper did not answer")?;
        if let Some(error) = released.get("error") {
            return Err(error.as_str().unwrap_or("the keeper did not say why").into());
        }
        let own = placement.part(&self.view.node).map(|part| part.epoch);
        let mut from = placement;
        let mut is_lately = false;
        for _ in 0..CHANGES_MAX {
            let (wait, basis) = self.terms.may_serve_before(from.part(&self.view.node), is_lately);
            let next = self.after(&from, to.as_ref(), why, wait);
            let next = next.unwrap_or_else(|| self.somewhere(&from, why, wait));
            match self.place_released(&next, &from, basis).await {
                // It was written recently, perhaps because of another replica: that of this node
                // may be as new.
                Ok(PlacementOutcome::Otherwise) => is_lately = true,
                Ok(PlacementOutcome::Won) => {
                    tracing::info!(site = %next.site, node = %next.node, epoch = next.epoch, why = why.as_str(), "a site was given away");
                    return Ok(next);
                }
                // An attempt without a reply may have done it.
                Ok(PlacementOutcome::Lost(Some(stored))) if stored == next => return Ok(next),
                // The placement changed otherwise: giving it up must still be recorded.
                Ok(PlacementOutcome::Lost(Some(stored)))
                    if stored.part(&self.view.node).map(|part| part.epoch) == own =>
                {
                    from = stored;
                }
                Ok(PlacementOutcome::Lost(_) | PlacementOutcome::Void) => {
                    return Err("it was placed elsewhere or removed meanwhile".into());
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        Err("others change where it runs all the time".into())
    }

    /// Returns a placement without this node's replica. A new node is chosen if no other has the
    /// site, or if the target has it by now. Under this epoch it would otherwise run nowhere.
    fn somewhere(&self, from: &Placement, why: PlacementReason, wait: Duration) -> Placement {
        let rest = from.without(&self.view.node, unix_ms(), why);
        rest.unwrap_or_else(|| {
            let chosen = self.chooser.choose(&from.site, Some(&self.view.node), why);
            let node = chosen.map_or_else(|_| self.view.node.clone(), |chosen| chosen.node);
            next_placement(&from.site, node, Some(from.epoch), round_up_ms(wait), why)
        })
    }

    /// Writes the placement of a site that was given up. It does not run here again under its
    /// epoch, so a store that does not answer is asked again.
    async fn place_released(
        &self,
        next: &Placement,
        from: &Placement,
        basis: PlacementBasis,
    ) -> Result<PlacementOutcome, ClusterError> {
        let place =
            || self.view.store.place_on(next.clone(), Some(from.epoch), Some(&self.view.node), basis.clone());
        for _ in 1..PLACE_TRIES_MAX {
            match place().await {
                Ok(claim) => return Ok(claim),
                Err(error) => {
                    tracing::warn!(code = %error.code(), site = %next.site, "{error}; it is tried again")
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        place().await
    }

    fn leaving(&self, site: &SiteName, on: bool) {
        if let Some(edge) = self.view.context.node.feed(ProcessRole::Edge) {
            edge.send(FromSupervisor::Leaving { site: site.clone(), on });
        }
    }

    /// Moves a site for an operator: on this node, or on the one that has it.
    pub async fn relocate(self: &Rc<Self>, site: &str, to: Option<&str>) -> Result<Value, Box<ProblemReply>> {
        let to = to.map(|to| self.view.find_member(to)).transpose()?;
        let placement = self.placed(site)?;
        if placement.part(&self.view.node).is_none() {
            return self.delegated.have_moved(&placement, to).await;
        }
        let to = to.as_ref().map(NodeName::as_str);
        let (node, epoch) = self.relocate_from_here(site, to, PlacementReason::Operator).await?;
        Ok(json!({ "site": site, "node": node, "epoch": epoch }))
    }

    /// Moves a site that runs here, for an operator or because of load. Returns its new node and
    /// epoch.
    pub async fn relocate_from_here(
        self: &Rc<Self>,
        site: &str,
        to: Option<&str>,
        why: PlacementReason,
    ) -> Result<(NodeName, u64), Box<ProblemReply>> {
        let to = to.map(|to| self.view.find_member(to)).transpose()?;
        let placement = self.placed(site)?;
        let own = placement.part(&self.view.node).map(|part| part.epoch);
        let own = own.ok_or_else(|| unfit("it does not run here any more".into()))?;
        if to.as_ref() == Some(&self.view.node) {
            return Ok((self.view.node.clone(), own));
        }
        let moved = self.give_away(placement, to, why).await.map_err(unfit)?;
        Ok((moved.node, moved.epoch))
    }

    fn placed(&self, site: &str) -> Result<Placement, Box<ProblemReply>> {
        let name = SiteName::new(site).map_err(|error| unfit(error.to_string()))?;
        let placement = self.view.records().placement(site)?;
        placement.ok_or_else(|| unfit(format!("'{name}' runs nowhere: nobody has asked for it yet")))
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

fn unfit(detail: String) -> Box<ProblemReply> {
    ProblemReply::cluster(StatusCode::CONFLICT, NOWHERE, detail)
}
