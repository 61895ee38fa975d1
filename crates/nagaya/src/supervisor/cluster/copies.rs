//! A site's application on several nodes: one more node gets it, is woken before requests are sent to it, and gives it up again.
//!
//! A node adds others to what it has, and takes out nobody but itself, or who is no member any more. Not here: that load asks for it
//! (`nagaya_placement::balance`), one that does not answer (`relocating`), sending requests there (`nagaya_edge`).

use std::rc::Rc;
use std::time::Duration;

use nagaya_cmdb::instance::Act;
use nagaya_cmdb::store::etcd::{Basis, Claim};
use nagaya_cmdb::{Placement, SiteName, Why};
use nagaya_placement::fence::{TERM_MAX, outlasting};
use serde_json::Value;

use super::NOWHERE;
use super::doubting::whole_ms;
use super::membership::{Membership, unix_ms};
use super::wishes::IMAGE_WITHIN;
use crate::admin::Node as _;

/// How often it is written that a copy is awake, while others change what else is said of its site.
const CHANGES_MAX: u32 = 16;

/// Sites of which one change is made at a time, of all that this node shares with others.
const AT_ONCE: usize = 16;

impl Membership {
    /// That node gets the site, too. This one has it.
    pub async fn copy(&self, site: &SiteName, to: &str) -> Result<(), String> {
        let to = self.named(to).map_err(|problem| problem.detail.clone())?;
        let (placement, max) = self.shared_now(site)?;
        if placement.part(&self.node).is_none() {
            return Err("it does not run here any more".into());
        }
        if placement.part(&to).is_some() {
            return Err(format!("'{to}' has it already"));
        }
        if placement.parts().count() >= max as usize {
            return Err(format!("its record allows {max} of it"));
        }
        // Of those that had it a moment ago and did not say that they gave it up, some may serve it still: with the wait, never more
        // than its record allows.
        let (wait, basis) = match placement.epoch {
            1 => (Duration::ZERO, Basis::default()),
            _ => self.may_serve_at_all(),
        };
        let mut next = placement.with_copy(to, unix_ms(), whole_ms(wait));
        let mut claim = self.store.place_on(next.clone(), Some(placement.epoch), None, basis).await;
        if matches!(claim, Ok(Claim::Otherwise)) {
            next.copies.last_mut().expect("it was just added").wait_ms = whole_ms(outlasting(TERM_MAX));
            claim = self.store.place(next.clone(), Some(placement.epoch), None).await;
        }
        match claim {
            Ok(Claim::Won) => {
                tracing::info!(%site, node = %next.copies.last().expect("it was just added").node, epoch = next.epoch, "a site runs on one more node");
                Ok(())
            }
            Ok(Claim::Lost(Some(stored))) if stored == next => Ok(()),
            Ok(Claim::Lost(_) | Claim::Void | Claim::Otherwise) => {
                Err("others have changed where it runs meanwhile".into())
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// This node has the site no more; others do.
    pub async fn uncopy(self: &Rc<Self>, site: &SiteName, why: Why) -> Result<(), String> {
        let (placement, _) = self.shared_now(site)?;
        self.leave(placement, None, why).await.map(drop)
    }

    fn shared_now(&self, site: &SiteName) -> Result<(Placement, u32), String> {
        let record = self.records().site(site.as_str()).map_err(|error| error.to_string())?;
        let placement = self.records().placement(site.as_str()).map_err(|error| error.to_string())?;
        let both = record.zip(placement).ok_or("it is gone, or runs nowhere")?;
        Ok((both.1, both.0.instances_max()))
    }

    /// Looks after all sites that this node has and others, too.
    pub(super) fn look_after(self: &Rc<Self>, shared: &[Placement]) {
        let sites = shared.iter().map(|placement| placement.site.clone());
        self.context.node.balance.shared.keep(sites);
        for placement in shared {
            if self.shifting.borrow().len() >= AT_ONCE || self.shifting.borrow().contains(&placement.site) {
                continue;
            }
            let Some(due) = self.due(placement) else { continue };
            self.shifting.borrow_mut().insert(placement.site.clone());
            let (membership, placement) = (Rc::clone(self), placement.clone());
            tokio::task::spawn_local(async move {
                membership.carry_out_due(&placement, due).await;
                membership.shifting.borrow_mut().remove(&placement.site);
            });
        }
    }

    fn due(&self, placement: &Placement) -> Option<Due> {
        let is_member = |node| matches!(self.records().node(node), Ok(Some(_)));
        let mut members = placement.parts().filter(|part| is_member(part.node.as_str()));
        let is_first = members.next().is_some_and(|part| *part.node == self.node);
        let max = self.records().site(placement.site.as_str()).ok()??.instances_max();
        let own = placement.parts().position(|part| *part.node == self.node)?;
        if own >= max as usize {
            return Some(Due::Leave);
        }
        if own > 0 && !placement.copies[own - 1].ready {
            return Some(Due::Begin);
        }
        // Read as no member, and not for want of the records.
        let is_gone = |node: &str| matches!(self.records().node(node), Ok(None));
        let gone = placement.parts().find(|part| is_gone(part.node.as_str()));
        gone.filter(|_| is_first).map(|part| Due::TakeOut(part.node.clone()))
    }

    async fn carry_out_due(self: &Rc<Self>, placement: &Placement, due: Due) {
        let site = &placement.site;
        match due {
            Due::Leave => {
                if let Err(reason) = self.uncopy(site, Why::Operator).await {
                    tracing::warn!(code = %NOWHERE, %site, "its record allows fewer, and it stays here for now: {reason}");
                }
            }
            Due::TakeOut(node) => {
                self.place(site, Some(placement.epoch), Why::Draining, Some(node), 0).await;
            }
            Due::Begin => {
                if let Err(reason) = self.begin_copy(placement).await {
                    tracing::warn!(code = %NOWHERE, %site, "it was to run here, too, and does not: {reason}");
                    if let Err(reason) = self.uncopy(site, Why::Load).await {
                        tracing::debug!(%site, "it is not given up: {reason}");
                    }
                }
            }
        }
    }

    /// Wakes what is new here, and says that it is awake.
    async fn begin_copy(self: &Rc<Self>, placement: &Placement) -> Result<(), String> {
        let site = &placement.site;
        let own = placement.part(&self.node).map(|part| part.epoch);
        // Until that has passed no request goes into it, so none is to be sent to it.
        let wait = placement.part(&self.node).map_or(0, |part| part.wait_ms);
        let may_serve = tokio::time::Instant::now() + Duration::from_millis(wait.into());
        // One that fails says so; it is only slower then, and no request waits for either.
        let _ = tokio::time::timeout(IMAGE_WITHIN, self.fetch(site, &placement.node)).await;
        let woken = self.context.node.instance(site.to_string(), Act::Wake).await;
        let woken: Value =
            woken.and_then(|text| serde_json::from_str(&text).ok()).ok_or("the keeper did not answer")?;
        if woken["ok"] != true {
            return Err(woken["error"].as_str().unwrap_or("it was not woken").into());
        }
        tokio::time::sleep_until(may_serve).await;
        let (mut newest, _) = self.shared_now(site)?;
        for _ in 0..CHANGES_MAX {
            if newest.part(&self.node).map(|part| part.epoch) != own {
                return Ok(());
            }
            let Some(next) = newest.with_ready(&self.node) else { return Ok(()) };
            match self.store.place(next.clone(), Some(newest.epoch), None).await {
                Ok(Claim::Won) => {
                    tracing::info!(%site, epoch = next.epoch, "it is awake here, too, and gets requests");
                    return Ok(());
                }
                // Perhaps this node's own doing, and its copy of the records comes after.
                Ok(Claim::Lost(Some(stored))) => newest = stored,
                Ok(Claim::Lost(None) | Claim::Void | Claim::Otherwise) => {
                    return Err("it was removed meanwhile".into());
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        Err("others change where it runs all the time".into())
    }
}

/// What is to be done about a site that several nodes have.
enum Due {
    /// Its record allows fewer.
    Leave,
    /// It is new here.
    Begin,
    /// That node is no member any more.
    TakeOut(nagaya_cmdb::NodeName),
}
