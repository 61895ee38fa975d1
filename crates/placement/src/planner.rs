//! Chooses the node on which a site should run.
//!
//! Each site has its own order of all nodes, made by weighted rendezvous hashing. The weight is a
//! node's capacity. The order changes only where nodes come or go. The first node in it that can
//! take the site is its *fallback*. Its image is there before it is needed. When a site has to
//! move, several nodes are compared. They are the first two of its order, each node with the image,
//! and the least loaded node. So the sites of a dead node spread over all others by themselves.
//! This holds although many nodes plan at once with slightly old data.
//!
//! Not here: whether a node answers (`liveness`), moves because of load (`balance`), carrying a
//! move out (`relocation`).

#[cfg(test)]
mod tests;

use std::fmt;

use crate::liveness::ProbeResult;

/// Nodes in a choice: the second and third are used if the first does not answer.
pub const CHOICES_MAX: usize = 3;

/// Nodes that a refusal lists by name; the rest is a count.
const NAMED_MAX: usize = 8;

/// Memory that goes with one CPU, to weigh a node's capacity.
const MEMORY_PER_CPU: u64 = 2 << 30;

/// Cost of one more wake in progress or queued for each CPU. Costs are in parts of a node: 1.0 is a
/// full node. Each wake takes a CPU for as long as it lasts, and the site would wait behind them.
const WAKE_WEIGHT: f64 = 0.5;
/// Weight of memory in use, and the part from which on it matters.
const MEMORY_WEIGHT: f64 = 1.0;
const MEMORY_CALM: f64 = 0.5;
/// Requests per second for each CPU that count as a full node.
const HEAT_FULL: f64 = 500.0;
const HEAT_WEIGHT: f64 = 0.5;
/// Sites for each CPU that count as a full node, though most of them rest.
const SITES_FULL: f64 = 1000.0;
const SITES_WEIGHT: f64 = 0.25;
/// Cost without the image: it must be fetched, or the site starts cold. That takes a second instead
/// of a tenth of one.
const NO_IMAGE: f64 = 0.6;
/// Cost of a node that is not first in the site's order. Without it, planners that see the same
/// data would all pick the same node.
const SECOND: f64 = 0.1;
const ELSEWHERE: f64 = 0.4;

/// A node as the planner sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NodeCandidate<'a> {
    pub name: &'a str,
    /// The current finding against it, if any: [`crate::liveness::Peer::known`].
    pub against: Option<ProbeResult>,
    /// It is present as far as the store knows: its etcd lease is valid.
    pub present: bool,
    pub draining: bool,
    pub cpus: u32,
    pub memory_bytes: u64,
    pub memory_free: u64,
    /// Part of its CPUs in use, 0 to 1.
    pub cpu_used: f32,
    /// Sites placed on it.
    pub sites: u32,
    /// Requests per second to placed sites.
    pub heat: f32,
    pub has_image: bool,
    /// Wakes in progress and queued.
    pub wakes: u32,
}

/// Needs of a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SiteDemand<'a> {
    pub site: &'a str,
    /// Memory that its instance may use.
    pub memory_bytes: u64,
    /// The node that it leaves.
    pub from: Option<&'a str>,
}

/// Why a node cannot take a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ineligible {
    IsLeft,
    Draining,
    Absent,
    Silent,
    Refuses,
    /// Its total memory is too small.
    TooSmall,
    /// Its free memory is too small.
    Full,
}

/// Nodes in the order in which they are tried, the best first. Its `Display` is for `nagaya
/// explain`.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeChoice<'a> {
    pub order: Vec<ScoredNode<'a>>,
    site: &'a str,
    ruled_out: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoredNode<'a> {
    pub name: &'a str,
    /// Less is better; 1.0 is about a full node.
    pub cost: f64,
    /// Position in the site's own order, from 0.
    pub rank: usize,
    pub has_image: bool,
    pub wakes: u32,
}

/// No node can take the site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoNode {
    pub out: Vec<(String, Ineligible)>,
    memory_bytes: u64,
}

/// Returns the best nodes that can take the site, in order.
pub fn choose<'a>(need: &SiteDemand<'a>, candidates: &[NodeCandidate<'a>]) -> Result<NodeChoice<'a>, NoNode> {
    let site = hash(need.site.as_bytes());
    let look = |node: &'_ NodeCandidate<'a>| EligibleNode {
        key: rank_key(site, node),
        load: load(need, node),
        node: *node,
    };
    let (mut first, mut second, mut least): (
        Option<EligibleNode<'a>>,
        Option<EligibleNode<'a>>,
        Option<EligibleNode<'a>>,
    ) = (None, None, None);
    let mut with_image = Vec::new();
    let mut open = 0;
    for node in candidates.iter().filter(|node| ruled_out(need, node).is_none()) {
        let seen = look(node);
        open += 1;
        if node.has_image {
            with_image.push(seen);
        }
        if least.as_ref().is_none_or(|least| seen.has_less_to_do_than(least)) {
            least = Some(seen);
        }
        if first.as_ref().is_none_or(|first| seen.ranks_before(first)) {
            second = first.replace(seen);
        } else if second.as_ref().is_none_or(|second| seen.ranks_before(second)) {
            second = Some(seen);
        }
    }
    if open == 0 {
        let out = candidates.iter().filter_map(|node| Some((node.name.to_owned(), ruled_out(need, node)?)));
        return Err(NoNode { out: out.collect(), memory_bytes: need.memory_bytes });
    }
    let mut order: Vec<ScoredNode<'a>> = Vec::with_capacity(CHOICES_MAX + 1);
    let ranked = first.into_iter().map(|seen| (seen, 0)).chain(second.map(|seen| (seen, 1)));
    for (seen, rank) in ranked.chain(with_image.into_iter().chain(least).map(|seen| (seen, 2))) {
        if !order.iter().any(|scored| scored.name == seen.node.name) {
            order.push(seen.scored(rank));
        }
    }
    order.sort_by(|a, b| a.cost.total_cmp(&b.cost).then(a.rank.cmp(&b.rank)).then(a.name.cmp(b.name)));
    order.truncate(CHOICES_MAX);
    Ok(NodeChoice { order, site: need.site, ruled_out: candidates.len() - open })
}

/// Returns the node that should have the site's image in advance: the most likely target of its
/// next move. It depends only on the members, and on nothing that changes by the second.
pub fn fallback<'a>(need: &SiteDemand<'_>, candidates: &[NodeCandidate<'a>]) -> Option<&'a str> {
    let site = hash(need.site.as_bytes());
    let lasting = |node: &&NodeCandidate<'a>| {
        node.present
            && !node.draining
            && node.memory_bytes >= need.memory_bytes
            && need.from != Some(node.name)
    };
    let ranked = candidates.iter().filter(lasting).map(|node| (rank_key(site, node), node));
    ranked
        .max_by(|(a, one), (b, other)| a.total_cmp(b).then(other.name.cmp(one.name)))
        .map(|(_, node)| node.name)
}

impl<'a> NodeChoice<'a> {
    /// Returns the best node.
    pub fn best(&self) -> &'a str {
        self.order[0].name
    }
}

impl fmt::Display for NodeChoice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let best = &self.order[0];
        write!(f, "{} for {}: ", best.name, self.site)?;
        f.write_str(match best.rank {
            0 => "first in its order",
            1 => "second in its order, the first has more to do",
            _ if best.has_image => "outside its order, but it has the image",
            _ => "the least loaded of all",
        })?;
        f.write_str(if best.has_image { ", image there" } else { ", no image there" })?;
        if best.wakes > 0 {
            write!(f, ", {} wakes before it", best.wakes)?;
        }
        write!(f, " (cost {:.2}", best.cost)?;
        for other in &self.order[1..] {
            write!(f, "; {} {:.2}", other.name, other.cost)?;
        }
        write!(f, "; {} ruled out)", self.ruled_out)
    }
}

impl NoNode {
    /// Returns the nodes that could take it if they answered.
    pub fn if_they_answered(&self) -> impl Iterator<Item = &str> {
        let is_one = |out: &Ineligible| matches!(out, Ineligible::Silent | Ineligible::Refuses);
        self.out.iter().filter(move |(_, out)| is_one(out)).map(|(name, _)| name.as_str())
    }
}

impl fmt::Display for NoNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.out.is_empty() {
            return f.write_str("there is no node");
        }
        f.write_str("no node can take it: ")?;
        for (at, (name, out)) in self.out.iter().take(NAMED_MAX).enumerate() {
            let memory = self.memory_bytes >> 20;
            f.write_str(if at == 0 { "" } else { "; " })?;
            match out {
                Ineligible::IsLeft => write!(f, "{name} is the one it leaves")?,
                Ineligible::Draining => write!(f, "{name} is being drained")?,
                Ineligible::Absent => write!(f, "{name} is not there")?,
                Ineligible::Silent => write!(f, "{name} does not answer")?,
                Ineligible::Refuses => write!(f, "the host of {name} refuses connections")?,
                Ineligible::TooSmall => write!(f, "{name} has less than {memory} MiB of memory")?,
                Ineligible::Full => write!(f, "{name} has less than {memory} MiB of memory free")?,
            }
        }
        match self.out.len().saturating_sub(NAMED_MAX) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

fn ruled_out(need: &SiteDemand<'_>, node: &NodeCandidate<'_>) -> Option<Ineligible> {
    if need.from == Some(node.name) {
        Some(Ineligible::IsLeft)
    } else if node.draining {
        Some(Ineligible::Draining)
    } else if !node.present {
        Some(Ineligible::Absent)
    } else if node.memory_bytes < need.memory_bytes {
        Some(Ineligible::TooSmall)
    } else if node.memory_free < need.memory_bytes {
        Some(Ineligible::Full)
    } else {
        // This check is last, as the finding may be over in a moment. Nothing else is against the
        // node then.
        match node.against? {
            ProbeResult::Silent => Some(Ineligible::Silent),
            ProbeResult::Refuses => Some(Ineligible::Refuses),
            ProbeResult::Answers | ProbeResult::Pending => None,
        }
    }
}

/// A node that can take the site, with values that are computed once.
#[derive(Clone, Copy)]
struct EligibleNode<'a> {
    key: f64,
    load: f64,
    node: NodeCandidate<'a>,
}

impl<'a> EligibleNode<'a> {
    fn ranks_before(&self, other: &Self) -> bool {
        self.key > other.key || self.key == other.key && self.node.name < other.node.name
    }

    /// Returns whether this node has less load. If both are equal, the first in the site's order
    /// counts.
    fn has_less_to_do_than(&self, other: &Self) -> bool {
        self.load < other.load || self.load == other.load && self.ranks_before(other)
    }

    fn scored(&self, rank: usize) -> ScoredNode<'a> {
        let image = if self.node.has_image { 0.0 } else { NO_IMAGE };
        let order = [0.0, SECOND].get(rank).copied().unwrap_or(ELSEWHERE);
        let NodeCandidate { name, has_image, wakes, .. } = self.node;
        ScoredNode { name, cost: self.load + image + order, rank, has_image, wakes }
    }
}

/// Returns the load of a node with the site on it. 1.0 is about full.
pub(crate) fn load(need: &SiteDemand<'_>, node: &NodeCandidate<'_>) -> f64 {
    let cpus = f64::from(node.cpus.max(1));
    let free = node.memory_free.saturating_sub(need.memory_bytes) as f64;
    let memory = 1.0 - free / (node.memory_bytes.max(1) as f64);
    let memory = ((memory - MEMORY_CALM) / (1.0 - MEMORY_CALM)).max(0.0);
    f64::from(node.cpu_used)
        + WAKE_WEIGHT * f64::from(node.wakes) / cpus
        + MEMORY_WEIGHT * memory
        + HEAT_WEIGHT * f64::from(node.heat) / cpus / HEAT_FULL
        + SITES_WEIGHT * f64::from(node.sites) / cpus / SITES_FULL
}

/// Returns the key of weighted rendezvous hashing. The node with the highest key is first; each
/// node is first for its share of all sites.
fn rank_key(site: u64, node: &NodeCandidate<'_>) -> f64 {
    let hash = mix(site ^ hash(node.name.as_bytes()));
    // In (0, 1), never the ends.
    let unit = ((hash >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    capacity(node) / -unit.ln()
}

/// Returns a node's capacity, in CPUs with the memory that goes with them.
fn capacity(node: &NodeCandidate<'_>) -> f64 {
    let by_memory = node.memory_bytes as f64 / MEMORY_PER_CPU as f64;
    f64::from(node.cpus.max(1)).min(by_memory).max(0.01)
}

/// Returns the FNV-1a hash, mixed. It is the same on all nodes and in all versions, as nodes that
/// disagree would fetch images for nothing.
fn hash(bytes: &[u8]) -> u64 {
    mix(bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    }))
}

/// The last step of splitmix64.
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
