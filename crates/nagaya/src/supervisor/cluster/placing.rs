//! Choosing a node for a site: who is there, what each has left, and whether a site may be taken from its node now.
//!
//! Not here: the choice itself (`nagaya_placement`), the steps of a relocation (`relocating`), sites that move although nothing
//! failed (`moves`).

use std::rc::Rc;
use std::time::Instant;

use nagaya_cmdb::{Backend, NodeName, NodeRecord, Placement, Site, SiteName, Why};
use nagaya_placement::liveness::Verdict;
use nagaya_placement::planner::{self, Candidate, Need};
use nagaya_placement::relocation;

use super::authority::now;
use super::events::What;
use super::load::Load;
use super::membership::Membership;
use super::trust::{NotNow, TakingId};

/// A node with what it told of itself last.
pub struct Known {
    pub record: NodeRecord,
    /// None: its lease is over.
    pub load: Option<Load>,
    pub placements: u32,
}

impl Known {
    /// It has the image of a site of which it is the fallback. One that does not tell is taken to have it.
    fn says_it_has(&self, site: &SiteName) -> bool {
        self.load.as_ref().and_then(|load| load.images.as_ref()).is_none_or(|images| images.has(site))
    }
}

impl Membership {
    /// Looks whether a site may be taken from a node that has not given it up. The change has to be made then.
    pub async fn may_take(&self, from: &NodeName) -> Result<TakingId, NotNow> {
        if self.records().node(from.as_str()).map_err(|_| NotNow::NoStore)?.is_none() {
            // Removed, or so new that this node's copy does not have it.
            self.store.in_step(relocation::ASK_LONGEST).await.map_err(|_| NotNow::NoStore)?;
        }
        let record = self.records().node(from.as_str()).map_err(|_| NotNow::NoStore)?;
        self.trust.borrow_mut().begin(now(), from, record.as_ref())
    }

    /// The placement after the one that was seen. For `wait_ms` those may serve the site that had it before and have not given it up.
    pub fn next(
        &self,
        site: &SiteName,
        node: NodeName,
        seen: Option<u64>,
        wait_ms: u32,
        why: Why,
    ) -> Placement {
        Placement {
            site: site.clone(),
            node,
            epoch: seen.map_or(1, |seen| seen + 1),
            since_ms: super::membership::unix_ms(),
            why,
            wait_ms,
            node_epoch: 0,
            copies: Vec::new(),
        }
    }

    /// What is held against a node now.
    pub fn suspected(&self, name: &NodeName) -> Option<Verdict> {
        self.suspects.borrow().against(Instant::now(), name).filter(|_| *name != self.node)
    }

    pub fn choose(&self, site: &SiteName, from: Option<&NodeName>, why: Why) -> Result<Chosen, Nobody> {
        let record = self.records().site(site.as_str()).map_err(|error| error.to_string())?;
        let Some(record) = record else { return Err(format!("there is no site '{site}'").into()) };
        if !matches!(record.backend, Backend::App(_)) {
            return Err(format!("'{site}' has no application: every node answers for it").into());
        }
        let mut known = self.known_nodes()?;
        let placement = self.records().placement(site.as_str()).map_err(|error| error.to_string())?;
        // A node never runs two of it.
        let has_one = |name: &NodeName| {
            let placement = placement.as_ref().filter(|placement| !placement.copies.is_empty());
            placement.is_some_and(|placement| placement.part(name).is_some() && from != Some(name))
        };
        known.retain(|node| !has_one(&node.record.name));
        let of = |node| candidate(node, self.suspected(&node.record.name));
        let mut candidates: Vec<_> = known.iter().map(of).collect();
        let need = Need {
            site: site.as_str(),
            memory_bytes: memory_of(&record),
            // A node that is only being started anew may have it again.
            from: from.map(NodeName::as_str).filter(|_| why != Why::First),
        };
        self.mark_image(&need, site, &known, &mut candidates);
        let choice = planner::choose(&need, &candidates).map_err(|none| {
            let (suspects, now) = (self.suspects.borrow(), Instant::now());
            let may_be_back = |name| NodeName::new(name).is_ok_and(|name| suspects.may_be_back(now, &name));
            Nobody { reason: none.to_string(), is_for_now: none.if_they_answered().any(may_be_back) }
        })?;
        let node = NodeName::new(choice.best()).expect("it is the name of a record");
        Ok(Chosen { node, reason: choice.to_string() })
    }

    /// Only the fallback has fetched the site's image, if it says so. This node knows its own better than from what it told.
    fn mark_image(
        &self,
        need: &Need<'_>,
        site: &SiteName,
        known: &[Known],
        candidates: &mut [Candidate<'_>],
    ) {
        let fallback = need.from.and_then(|_| planner::fallback(need, candidates));
        for (node, known) in candidates.iter_mut().zip(known) {
            node.has_image = fallback == Some(node.name)
                && match known.record.name == self.node {
                    true => self.images.borrow().has(site),
                    false => known.says_it_has(site),
                };
        }
    }

    /// Another node is the fallback of a site and says that its image is there.
    pub fn has_image_of(&self, placement: &Placement, node: &NodeName) -> bool {
        let is_fallback = self.fallbacks(std::slice::from_ref(placement)).pop();
        let is_fallback = is_fallback.is_some_and(|(name, _)| name.as_deref() == Some(node.as_str()));
        let known = self.known_nodes().unwrap_or_default();
        let known = known.iter().find(|known| known.record.name == *node);
        is_fallback && known.is_some_and(|known| known.says_it_has(&placement.site))
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

    /// A member was heard from. Of what is held against it, it may have been the only node for some.
    pub fn heard(self: &Rc<Self>, node: &NodeName) {
        let is_member = matches!(self.records().node(node.as_str()), Ok(Some(_)));
        self.doubts.borrow_mut().forget(node);
        if is_member && self.suspects.borrow_mut().heard(Instant::now(), node) {
            self.note(What::Answers { node: node.clone() });
            self.reconsider();
        }
    }
}

/// A node for a site, and why that one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    pub node: NodeName,
    pub reason: String,
}

/// No node was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nobody {
    pub reason: String,
    /// One that could take it does not answer, and may again in a moment.
    pub is_for_now: bool,
}

impl From<String> for Nobody {
    fn from(reason: String) -> Self {
        Self { reason, is_for_now: false }
    }
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
        heat: load.heat,
        has_image: false,
        wakes: load.wakes,
    }
}
