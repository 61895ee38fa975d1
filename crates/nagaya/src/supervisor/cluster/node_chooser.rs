//! Prepares the choice of a node for a site: the present nodes and their free capacity. It also
//! checks whether a site may be taken from its node now.
//!
//! Not here: the choice itself (`nagaya_placement`), the steps of a relocation (`relocator`), sites
//! that move although nothing failed (`mover`).

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Instant;

use nagaya_placement::liveness::ProbeResult;
use nagaya_placement::planner::{self, NodeCandidate, SiteDemand};
use nagaya_records::{Backend, NodeName, Placement, PlacementReason, SiteName};

use super::avoided_nodes::AvoidedNodes;
use super::clock::unix_ms;
use super::image_fetcher::ImageFetcher;
use super::known_node::{KnownNode, memory_of};
use super::view::ClusterView;

pub struct NodeChooser {
    view: Rc<ClusterView>,
    images: Rc<ImageFetcher>,
    avoided: RefCell<AvoidedNodes>,
}

impl NodeChooser {
    pub fn new(view: Rc<ClusterView>, images: Rc<ImageFetcher>) -> Self {
        Self { view, images, avoided: RefCell::default() }
    }

    /// Notes that a request got no answer from the node. Returns true if the reason is over once
    /// the node is heard from.
    pub fn accuse(&self, now: Instant, node: &NodeName, why: PlacementReason) -> bool {
        self.avoided.borrow_mut().accuse(now, node, why)
    }

    /// Takes back the reasons against a node that was heard from. Returns true if there were any.
    pub fn clear(&self, node: &NodeName) -> bool {
        self.avoided.borrow_mut().note_heard(Instant::now(), node)
    }

    pub fn may_be_back(&self, now: Instant, node: &NodeName) -> bool {
        self.avoided.borrow().may_be_back(now, node)
    }

    /// Returns the present finding against a node.
    pub fn find_suspicion(&self, name: &NodeName) -> Option<ProbeResult> {
        self.avoided.borrow().finding_against(Instant::now(), name).filter(|_| *name != self.view.node)
    }

    pub fn choose(
        &self,
        site: &SiteName,
        from: Option<&NodeName>,
        why: PlacementReason,
    ) -> Result<ChosenNode, NoNode> {
        let record = self.view.records().site(site.as_str()).map_err(|error| error.to_string())?;
        let Some(record) = record else { return Err(format!("there is no site '{site}'").into()) };
        if !matches!(record.backend, Backend::App(_)) {
            return Err(format!("'{site}' has no application: every node answers for it").into());
        }
        let mut known = self.view.known_nodes()?;
        let placement = self.view.records().placement(site.as_str()).map_err(|error| error.to_string())?;
        // A node never runs two of it.
        let has_one = |name: &NodeName| {
            let placement = placement.as_ref().filter(|placement| !placement.copies.is_empty());
            placement.is_some_and(|placement| placement.part(name).is_some() && from != Some(name))
        };
        known.retain(|node| !has_one(&node.record.name));
        let mut candidates: Vec<_> =
            known.iter().map(|node| node.as_candidate(self.find_suspicion(&node.record.name))).collect();
        let need = SiteDemand {
            site: site.as_str(),
            memory_bytes: memory_of(&record),
            // A node that is only being restarted may have it again.
            from: from.map(NodeName::as_str).filter(|_| why != PlacementReason::First),
        };
        self.mark_image(&need, site, &known, &mut candidates);
        let choice = planner::choose(&need, &candidates).map_err(|none| {
            let suspects = self.avoided.borrow();
            let now = Instant::now();
            let may_be_back = |name| NodeName::new(name).is_ok_and(|name| suspects.may_be_back(now, &name));
            NoNode { reason: none.to_string(), is_for_now: none.if_they_answered().any(may_be_back) }
        })?;
        let node = NodeName::new(choice.best()).expect("it is the name of a record");
        Ok(ChosenNode { node, reason: choice.to_string() })
    }

    /// Marks the nodes with the site's image: only the fallback has fetched it, if it reports so.
    /// This node knows its own images better than from its report.
    fn mark_image(
        &self,
        need: &SiteDemand<'_>,
        site: &SiteName,
        known: &[KnownNode],
        candidates: &mut [NodeCandidate<'_>],
    ) {
        let fallback = need.from.and_then(|_| planner::fallback(need, candidates));
        for (node, known) in candidates.iter_mut().zip(known) {
            node.has_image = fallback == Some(node.name)
                && if known.record.name == self.view.node {
                    self.images.has(site)
                } else {
                    known.says_it_has(site)
                };
        }
    }

    /// Returns whether another node is the fallback of a site and reports its image.
    pub fn has_image_of(&self, placement: &Placement, node: &NodeName) -> bool {
        let is_fallback = self.images.fallbacks(std::slice::from_ref(placement)).pop();
        let is_fallback = is_fallback.is_some_and(|(name, _)| name.as_deref() == Some(node.as_str()));
        let known = self.view.known_nodes().unwrap_or_default();
        let known = known.iter().find(|known| known.record.name == *node);
        is_fallback && known.is_some_and(|known| known.says_it_has(&placement.site))
    }
}

/// A node for a site, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChosenNode {
    pub node: NodeName,
    pub reason: String,
}

/// No node was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoNode {
    pub reason: String,
    /// A node that could take it does not answer, and may again in a moment.
    pub is_for_now: bool,
}

impl From<String> for NoNode {
    fn from(reason: String) -> Self {
        Self { reason, is_for_now: false }
    }
}

/// Returns the placement after the one that was seen. For `wait_ms`, nodes that had the site before
/// and have not given it up may serve it.
pub fn next_placement(
    site: &SiteName,
    node: NodeName,
    seen: Option<u64>,
    wait_ms: u32,
    why: PlacementReason,
) -> Placement {
    Placement {
        site: site.clone(),
        node,
        epoch: seen.map_or(1, |seen| seen + 1),
        since_ms: unix_ms(),
        why,
        wait_ms,
        node_epoch: 0,
        copies: Vec::new(),
    }
}
