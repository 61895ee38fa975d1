//! Finding a site a node: who is there, what each has left, the choice, and the store's word that it is so.
//!
//! Requests that look for the same site at once join one attempt. Not here: the choice itself (`nagaya_placement`), sites that
//! move although nothing failed (`moves`), waking it there (`nagaya_edge`).

use std::rc::Rc;
use std::time::{Duration, Instant};

use nagaya_cmdb::feed::Placed;
use nagaya_cmdb::store::etcd::{Claim, ClusterError};
use nagaya_cmdb::{Backend, NodeName, NodeRecord, Placement, Site, SiteName, Why};
use nagaya_placement::fence::outlasting;
use nagaya_placement::liveness::Verdict;
use nagaya_placement::planner::{self, Candidate, Need};
use tokio::sync::watch;

use super::asks::nowhere;
use super::authority::now;
use super::load::Load;
use super::membership::{Membership, SUSPECT_FOR};
use super::trust::{NotNow, TakingId};

/// How often one attempt may find that others were faster.
const TRIES_MAX: u32 = 8;

/// How long a site that may not be taken from its node yet is waited for, and how often it is tried: longer than a promise, and less
/// than a request waits.
const HELD_MAX: Duration = Duration::from_secs(3);
const HELD_AGAIN: Duration = Duration::from_millis(20);

/// A node with what it told of itself last.
pub struct Known {
    pub record: NodeRecord,
    /// None: its lease is over.
    pub load: Option<Load>,
    pub placements: u32,
}

impl Membership {
    /// Where the site's application runs from now on. `seen`: the epoch that did not do.
    pub async fn place(self: &Rc<Self>, site: &SiteName, seen: Option<u64>, why: Why) -> Placed {
        if let Ok(Some(current)) = self.records().placement(site.as_str())
            && seen.is_none_or(|seen| current.epoch > seen)
        {
            return Placed::At { placement: current, decide_us: 0, store_us: 0 };
        }
        let under_way = self.placing.borrow().get(site).cloned();
        let mut done = match under_way {
            Some(done) => done,
            None => {
                let (tell, done) = watch::channel(None);
                self.placing.borrow_mut().insert(site.clone(), done.clone());
                let (membership, site) = (Rc::clone(self), site.clone());
                tokio::task::spawn_local(async move {
                    let placed = membership.find(&site, seen, why).await;
                    membership.placing.borrow_mut().remove(&site);
                    // Everybody who asked may have left.
                    let _ = tell.send(Some(placed));
                });
                done
            }
        };
        match done.wait_for(Option::is_some).await {
            Ok(placed) => placed.clone().expect("it was waited for until it is there"),
            Err(_) => nowhere("the attempt to place it was given up"),
        }
    }

    async fn find(&self, site: &SiteName, seen: Option<u64>, why: Why) -> Placed {
        let mut seen = seen;
        for _ in 0..TRIES_MAX {
            let begun = Instant::now();
            let from = match self.seen(site, seen).await {
                Ok(from) => from,
                Err(placed) => return placed,
            };
            if let Some(from) = &from {
                self.suspect(&from.node, why);
            }
            let chosen = match self.choose(site, from.as_ref().map(|from| &from.node), why) {
                Ok(chosen) => chosen,
                Err(reason) => return nowhere(reason),
            };
            let decide_us = micros(begun);
            let placement = self.next(site, chosen, seen, from.is_some(), why);
            let taking = match &from {
                Some(from) => match self.take_from(&from.node).await {
                    Ok(taking) => Some(taking),
                    Err(reason) => return nowhere(reason.to_string()),
                },
                None => None,
            };
            let begun = Instant::now();
            let placed =
                self.store.place(placement.clone(), seen, from.as_ref().map(|from| &from.node)).await;
            if let Some(taking) = taking {
                // Of a claim that is void it is not known whether an earlier attempt at it lies somewhere.
                let is_answered = matches!(placed, Ok(Claim::Won | Claim::Lost(_)));
                self.trust.borrow_mut().ended(now(), taking, is_answered);
            }
            match placed {
                Ok(Claim::Won) => {
                    tracing::info!(%site, node = %placement.node, epoch = placement.epoch, why = why.as_str(), "a site is placed");
                    return Placed::At { placement, decide_us, store_us: micros(begun) };
                }
                Ok(Claim::Lost(Some(theirs))) if seen.is_none_or(|seen| theirs.epoch > seen) => {
                    return Placed::At { placement: theirs, decide_us, store_us: micros(begun) };
                }
                // The placement is gone, or is an earlier one than was told: the next attempt begins with what there is.
                Ok(Claim::Lost(theirs)) => seen = theirs.map(|theirs| theirs.epoch),
                Ok(Claim::Void) => {
                    return nowhere(format!("site '{site}' or node '{}' is gone", placement.node));
                }
                Err(error) => return failed(&error),
            }
        }
        nowhere(format!("others placed it {TRIES_MAX} times meanwhile"))
    }

    /// Waits until a site may be taken from a node that has not given it up. The change has to be made then.
    async fn take_from(&self, from: &NodeName) -> Result<TakingId, NotNow> {
        let begun = Instant::now();
        if self.records().node(from.as_str()).map_err(|_| NotNow::NoStore)?.is_none() {
            // Removed, or so new that this node's copy does not have it.
            self.store.in_step(HELD_MAX).await.map_err(|_| NotNow::NoStore)?;
        }
        loop {
            let record = self.records().node(from.as_str()).map_err(|_| NotNow::NoStore)?;
            let taking = self.trust.borrow_mut().begin(now(), from, record.as_ref());
            match taking {
                Err(_) if begun.elapsed() < HELD_MAX => tokio::time::sleep(HELD_AGAIN).await,
                taking => return taking,
            }
        }
    }

    /// The placement with the epoch that was seen: of this node's copy, or of the store where that is not as far.
    async fn seen(&self, site: &SiteName, seen: Option<u64>) -> Result<Option<Placement>, Placed> {
        let Some(seen) = seen else { return Ok(None) };
        let known = self.records().placement(site.as_str()).map_err(|error| nowhere(error.to_string()))?;
        if known.as_ref().is_some_and(|known| known.epoch == seen) {
            return Ok(known);
        }
        match self.store.placement_now(site).await {
            Ok(Some(now)) if now.epoch > seen => {
                Err(Placed::At { placement: now, decide_us: 0, store_us: 0 })
            }
            Ok(now) => Ok(now.filter(|now| now.epoch == seen)),
            Err(error) => Err(failed(&error)),
        }
    }

    /// The placement after the one that was seen.
    pub fn next(
        &self,
        site: &SiteName,
        node: NodeName,
        seen: Option<u64>,
        had_node: bool,
        why: Why,
    ) -> Placement {
        // A node that was asked and gave the site up is done with it. One that did not answer may serve it still.
        let wait = if had_node { outlasting(self.context.fence()) } else { Default::default() };
        Placement {
            site: site.clone(),
            node,
            epoch: seen.map_or(1, |seen| seen + 1),
            since_ms: super::membership::unix_ms(),
            why,
            wait_ms: u32::try_from(wait.as_millis()).unwrap_or(u32::MAX),
        }
    }

    pub fn choose(&self, site: &SiteName, from: Option<&NodeName>, why: Why) -> Result<NodeName, String> {
        let record = self.records().site(site.as_str()).map_err(|error| error.to_string())?;
        let Some(record) = record else { return Err(format!("there is no site '{site}'")) };
        if !matches!(record.backend, Backend::App(_)) {
            return Err(format!("'{site}' has no application: every node answers for it"));
        }
        let known = self.known_nodes()?;
        let suspects = self.suspects.borrow();
        let against = |name: &NodeName| {
            let (since, verdict) = suspects.get(name)?;
            (since.elapsed() < SUSPECT_FOR && *name != self.node).then_some(*verdict)
        };
        let mut candidates: Vec<_> =
            known.iter().map(|node| candidate(node, against(&node.record.name))).collect();
        let need = Need {
            site: site.as_str(),
            memory_bytes: memory_of(&record),
            // A node that is only being started anew may have it again.
            from: from.map(NodeName::as_str).filter(|_| why != Why::First),
        };
        self.mark_image(&need, site, &mut candidates);
        let choice = planner::choose(&need, &candidates).map_err(|none| none.to_string())?;
        tracing::debug!("{choice}");
        Ok(NodeName::new(choice.best()).expect("it is the name of a record"))
    }

    /// The node that the site moves to has its image, where there is one: of this node it is known whether it has come.
    fn mark_image(&self, need: &Need<'_>, site: &SiteName, candidates: &mut [Candidate<'_>]) {
        let fallback = need.from.and_then(|_| planner::fallback(need, candidates));
        for node in candidates {
            let is_here = node.name != self.node.as_str() || self.images.borrow().has(site);
            node.has_image = fallback == Some(node.name) && is_here;
        }
    }

    /// All members, with what they tell of themselves.
    pub fn known_nodes(&self) -> Result<Vec<Known>, String> {
        let nodes = self.records().nodes().map_err(|error| error.to_string())?;
        let present = self.store.presences();
        Ok(nodes
            .into_iter()
            .map(|record| {
                let told = present.iter().find(|presence| presence.node == record.name);
                let load = told.map(|presence| serde_json::from_str(&presence.json).unwrap_or_default());
                let placements = self.counted.borrow().get(&record.name).copied().unwrap_or(0);
                Known { record, load, placements }
            })
            .collect())
    }

    /// Other sites of a node that did not answer must not be sent to it for a while.
    fn suspect(&self, node: &NodeName, why: Why) {
        let verdict = match why {
            Why::Silent | Why::Fenced => Verdict::Silent,
            Why::Refused => Verdict::Refuses,
            Why::First | Why::Draining | Why::Load | Why::Operator => return,
        };
        self.suspects.borrow_mut().insert(node.clone(), (Instant::now(), verdict));
    }
}

fn failed(error: &ClusterError) -> Placed {
    Placed::Nowhere { code: error.code().to_string(), reason: error.to_string() }
}

/// Memory that the site's instance may use.
pub fn memory_of(site: &Site) -> u64 {
    site.limits.memory.as_ref().and_then(|memory| memory.memory().ok().flatten()).unwrap_or(0)
}

pub fn candidate(node: &Known, against: Option<Verdict>) -> Candidate<'_> {
    let load = node.load.clone().unwrap_or_default();
    Candidate {
        name: node.record.name.as_str(),
        against,
        present: node.load.is_some(),
        draining: node.record.draining,
        cpus: node.record.cpus,
        memory_bytes: node.record.memory_bytes,
        memory_free: load.memory_available,
        cpu_used: load.cpu_used as f32,
        sites: node.placements,
        heat: 0.0,
        has_image: false,
        wakes: 0,
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
