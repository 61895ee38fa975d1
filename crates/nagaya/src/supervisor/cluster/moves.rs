//! Moving sites that nothing has failed: their node lets running requests end, ends the application, and only then gives the site
//! away, so that nobody waits for a fence and nobody sees an error. New requests wait meanwhile, at the edge.
//!
//! Not here: sites whose node does not answer (`placing`).

use std::rc::Rc;
use std::time::{Duration, Instant};

use http::StatusCode;
use nagaya_cmdb::feed::Down;
use nagaya_cmdb::instance::Act;
use nagaya_cmdb::store::etcd::{Basis, Claim, ClusterError};
use nagaya_cmdb::{NodeName, Placement, SiteName, Why};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::doubting::whole_ms;
use super::events::{Move, What};
use super::membership::{Membership, unix_ms};
use super::placing::Chosen;
use super::{super::child::Role, NOWHERE};
use crate::admin::{Node as _, Problem};

/// How long requests that run may take to end before the site moves without them.
const RELEASE_WITHIN: Duration = Duration::from_secs(20);

/// How often a site that was given up is written to its new place: each time the store has some seconds to answer.
const PLACE_TRIES_MAX: u32 = 60;

/// How often it is told again that a site was given up, while others change what else is said of it.
const CHANGES_MAX: u32 = 16;

/// Sites that leave a node at once.
const LEAVE_AT_ONCE: usize = 4;

/// How often a node looks whether it is to be emptied, and between attempts for sites that could not be given away.
const LOOK_EVERY: Duration = Duration::from_millis(500);

impl Membership {
    /// Gives all sites away for as long as this node's record says that it is drained.
    pub(super) async fn empty_when_draining(self: Rc<Self>) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let record = self.records().node(self.node.as_str());
            let is_draining = record.is_ok_and(|record| record.is_some_and(|record| record.draining));
            if is_draining {
                self.give_all_away().await;
            }
        }
    }

    async fn give_all_away(self: &Rc<Self>) {
        let mut after: Option<String> = None;
        loop {
            let page = self.records().placements(after.as_deref(), nagaya_cmdb::store::PAGE_LEN_MAX);
            let Ok(page) = page else { return };
            let Some(last) = page.last() else { return };
            after = Some(last.site.to_string());
            let mut leaving = JoinSet::new();
            let runs_here = |placement: &Placement| {
                let site = || self.records().site(placement.site.as_str());
                placement.part(&self.node).is_some() && site().is_ok_and(|site| site.is_some())
            };
            for placement in page.into_iter().filter(runs_here) {
                while leaving.len() >= LEAVE_AT_ONCE {
                    leaving.join_next().await;
                }
                let membership = Rc::clone(self);
                leaving.spawn_local(async move {
                    let site = placement.site.clone();
                    if let Err(reason) = membership.give_away(placement, None, Why::Draining).await {
                        tracing::warn!(code = %NOWHERE, %site, "it stays on this node for now: {reason}");
                    }
                });
            }
            while leaving.join_next().await.is_some() {}
        }
    }

    /// Moves a site that runs here. Where others have it, too, and nobody says where to, they go on and no other node gets it.
    async fn give_away(
        self: &Rc<Self>,
        placement: Placement,
        to: Option<NodeName>,
        why: Why,
    ) -> Result<Placement, String> {
        let site = placement.site.clone();
        // Before anything is held up: is there anywhere it could go?
        let (to, reason) = match to {
            None if !placement.copies.is_empty() => (None, "other nodes have it already".into()),
            None => {
                let chosen = self.choose(&site, Some(&placement.node), why);
                let Chosen { node, reason } = chosen.map_err(|nobody| nobody.reason)?;
                (Some(node), reason)
            }
            to => (to, "that node was asked for".into()),
        };
        let fetch_us = match to.as_ref().filter(|_| why != Why::Draining) {
            Some(to) => self.bring_image_first(&placement, to).await,
            None => 0,
        };
        let begun = Instant::now();
        let moved = self.leave(placement, to.clone(), why).await?;
        let to = to.as_ref().filter(|to| moved.part(to).is_some()).unwrap_or(&moved.node);
        let release_us = micros(begun);
        let from = Some(self.node.clone());
        self.note(What::Moved(Move { fetch_us, release_us, ..Move::new(&moved, from, to, why, reason) }));
        Ok(moved)
    }

    /// A node that is not the site's fallback has no image of it: it gets the one that is here, while requests go on here. How long that
    /// took. A node that is being emptied has too many sites to wait for each.
    async fn bring_image_first(&self, placement: &Placement, to: &NodeName) -> u64 {
        let site = &placement.site;
        let here = self.context.node.instance(site.to_string(), Act::Inspect).await;
        let here: Value = here.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
        if here["image"].is_null() || self.has_image_of(placement, to) {
            return 0;
        }
        let begun = Instant::now();
        self.bring_image(site, to).await;
        micros(begun)
    }

    /// This node has the site no more. `to` has it in its place; None: the others do without.
    pub(super) async fn leave(
        self: &Rc<Self>,
        placement: Placement,
        to: Option<NodeName>,
        why: Why,
    ) -> Result<Placement, String> {
        let site = placement.site.clone();
        if self.after(&placement, to.as_ref(), why, Duration::ZERO).is_none() {
            return Err("another node has it already, or none would have it".into());
        }
        // Once its application has ended here it has to be written down where it is next.
        if !self.is_confirmed() {
            return Err("the cluster's store does not answer now, so it stays where it is".into());
        }
        self.leaving(&site, true);
        let moved = self.release_and_place(placement, to, why).await;
        if moved.is_err() {
            // Else those who wait go on when the edge learns of the new placement.
            self.leaving(&site, false);
        }
        moved
    }

    /// What follows a placement when this node gives its part away. For `wait` those may serve it that this node took it from.
    fn after(
        &self,
        placement: &Placement,
        to: Option<&NodeName>,
        why: Why,
        wait: Duration,
    ) -> Option<Placement> {
        match to {
            Some(to) => placement.moved(&self.node, to.clone(), unix_ms(), why, whole_ms(wait)),
            None => placement.without(&self.node, unix_ms(), why),
        }
    }

    async fn release_and_place(
        &self,
        placement: Placement,
        to: Option<NodeName>,
        why: Why,
    ) -> Result<Placement, String> {
        let within_ms = u64::try_from(RELEASE_WITHIN.as_millis()).unwrap_or(u64::MAX);
        let released =
            self.context.node.instance(placement.site.to_string(), Act::Release { within_ms }).await;
        let released: Value =
            released.and_then(|text| serde_json::from_str(&text).ok()).ok_or("the keeper did not answer")?;
        if let Some(error) = released.get("error") {
            return Err(error.as_str().unwrap_or("the keeper did not say why").into());
        }
        let own = placement.part(&self.node).map(|part| part.epoch);
        let mut from = placement;
        let mut is_lately = false;
        for _ in 0..CHANGES_MAX {
            let (wait, basis) = self.may_serve_before(from.part(&self.node), is_lately);
            let next = self.after(&from, to.as_ref(), why, wait);
            let next = next.unwrap_or_else(|| self.somewhere(&from, why, wait));
            match self.place_released(&next, &from, basis).await {
                // It was written lately, perhaps because of another part: that of this node may be as new.
                Ok(Claim::Otherwise) => is_lately = true,
                Ok(Claim::Won) => {
                    tracing::info!(site = %next.site, node = %next.node, epoch = next.epoch, why = why.as_str(), "a site was given away");
                    return Ok(next);
                }
                // An attempt of which nothing was heard may have done it.
                Ok(Claim::Lost(Some(stored))) if stored == next => return Ok(next),
                // Something else about it has changed: what was given up here is still to be told.
                Ok(Claim::Lost(Some(stored))) if stored.part(&self.node).map(|part| part.epoch) == own => {
                    from = stored;
                }
                Ok(Claim::Lost(_) | Claim::Void) => {
                    return Err("it was placed elsewhere or removed meanwhile".into());
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        Err("others change where it runs all the time".into())
    }

    /// Nobody else has it any more, or who was to get it has it by now: under this epoch it would run nowhere.
    fn somewhere(&self, from: &Placement, why: Why, wait: Duration) -> Placement {
        let rest = from.without(&self.node, unix_ms(), why);
        rest.unwrap_or_else(|| {
            let chosen = self.choose(&from.site, Some(&self.node), why);
            let node = chosen.map_or_else(|_| self.node.clone(), |chosen| chosen.node);
            self.next(&from.site, node, Some(from.epoch), whole_ms(wait), why)
        })
    }

    /// A site that was given up does not run here again under its epoch, so a store that does not answer is asked again.
    async fn place_released(
        &self,
        next: &Placement,
        from: &Placement,
        basis: Basis,
    ) -> Result<Claim, ClusterError> {
        let place = || self.store.place_on(next.clone(), Some(from.epoch), Some(&self.node), basis.clone());
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
        if let Some(edge) = self.context.node.feed(Role::Edge) {
            edge.send(Down::Leaving { site: site.clone(), on });
        }
    }

    /// An operator moves a site: this node, or the one that has it.
    pub async fn relocate(self: &Rc<Self>, site: &str, to: Option<&str>) -> Result<Value, Box<Problem>> {
        let to = to.map(|to| self.named(to)).transpose()?;
        let placement = self.placed(site)?;
        if placement.part(&self.node).is_none() {
            return self.wish(&placement, to).await;
        }
        let to = to.as_ref().map(NodeName::as_str);
        let (node, epoch) = self.relocate_from_here(site, to, Why::Operator).await?;
        Ok(json!({ "site": site, "node": node, "epoch": epoch }))
    }

    /// An operator moves a site that runs here, or its load does. Where it is then, and under which epoch.
    pub(super) async fn relocate_from_here(
        self: &Rc<Self>,
        site: &str,
        to: Option<&str>,
        why: Why,
    ) -> Result<(NodeName, u64), Box<Problem>> {
        let to = to.map(|to| self.named(to)).transpose()?;
        let placement = self.placed(site)?;
        let own = placement.part(&self.node).map(|part| part.epoch);
        let own = own.ok_or_else(|| unfit("it does not run here any more".into()))?;
        if to.as_ref() == Some(&self.node) {
            return Ok((self.node.clone(), own));
        }
        let moved = self.give_away(placement, to, why).await.map_err(unfit)?;
        Ok((moved.node, moved.epoch))
    }

    fn placed(&self, site: &str) -> Result<Placement, Box<Problem>> {
        let name = SiteName::new(site).map_err(|error| unfit(error.to_string()))?;
        let placement = self.records().placement(site)?;
        placement.ok_or_else(|| unfit(format!("'{name}' runs nowhere: nobody has asked for it yet")))
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

fn unfit(detail: String) -> Box<Problem> {
    Problem::cluster(StatusCode::CONFLICT, NOWHERE, detail)
}
