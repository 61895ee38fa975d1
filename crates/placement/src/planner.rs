//! Which node a site should run on.
//!
//! Each site has an order of all nodes of its own, made by hashing (rendezvous hashing, weighted by what a node has), which changes
//! only where nodes come or go. The first of it that can take the site is its *fallback*: its image is there before it is needed. When
//! a site has to move, the first two of its order, whoever has the image, and the least loaded node of all are compared; so the sites of
//! a dead node spread over all others by themselves, although many nodes plan at once and know little of each other's last second.
//!
//! Not here: whether a node answers (`liveness`), moves that load asks for (`balance`), carrying it out (`relocation`).

#[cfg(test)]
mod tests;

use std::fmt;

use crate::liveness::Verdict;

/// Nodes in a choice: the second and third are there for when the first turns out not to answer.
pub const CHOICES_MAX: usize = 3;

/// Nodes that a refusal names one by one; of the others it says how many.
const NAMED_MAX: usize = 8;

/// Memory that goes with one CPU, for how much of each a node has to offer.
const MEMORY_PER_CPU: u64 = 2 << 30;

/// What is compared, in parts of a node: 1.0 is a node that is full.
/// One more wake under way or in line for each CPU: each takes a CPU for as long as it lasts, and the site would stand behind them.
const WAKE_WEIGHT: f64 = 0.5;
/// Memory in use, from the part on at which it begins to matter.
const MEMORY_WEIGHT: f64 = 1.0;
const MEMORY_CALM: f64 = 0.5;
/// Requests a second for each CPU that count as a full node.
const HEAT_FULL: f64 = 500.0;
const HEAT_WEIGHT: f64 = 0.5;
/// Sites for each CPU that count as a full node, though most of them rest.
const SITES_FULL: f64 = 1000.0;
const SITES_WEIGHT: f64 = 0.25;
/// Without the image it has to be fetched, or the site begins cold: a second instead of a tenth of one.
const NO_IMAGE: f64 = 0.6;
/// Not the first of the site's order: so much less loaded it has to be, or planners that all see the same would all pick it.
const SECOND: f64 = 0.1;
const ELSEWHERE: f64 = 0.4;

/// A node as the planner sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate<'a> {
    pub name: &'a str,
    /// What is held against it now, if anything is: [`crate::liveness::Peer::known`].
    pub against: Option<Verdict>,
    /// It is there as far as the store knows: its lease holds.
    pub present: bool,
    pub draining: bool,
    pub cpus: u32,
    pub memory_bytes: u64,
    pub memory_free: u64,
    /// Part of its CPUs in use, 0 to 1.
    pub cpu_used: f32,
    /// Sites placed on it.
    pub sites: u32,
    /// Requests a second to placed sites.
    pub heat: f32,
    pub has_image: bool,
    /// Wakes under way and in line.
    pub wakes: u32,
}

/// What a site needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need<'a> {
    pub site: &'a str,
    /// Memory that its instance may use.
    pub memory_bytes: u64,
    /// The node that it leaves.
    pub from: Option<&'a str>,
}

/// Why a node cannot take a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Out {
    IsLeft,
    Draining,
    Absent,
    Silent,
    Refuses,
    /// It has not so much memory at all.
    TooSmall,
    /// It has not so much memory left.
    Full,
}

/// Nodes in the order in which they are to be tried, the best first. Its `Display` is for `nagaya explain`.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice<'a> {
    pub order: Vec<Scored<'a>>,
    site: &'a str,
    ruled_out: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scored<'a> {
    pub name: &'a str,
    /// Less is better; 1.0 is about a full node.
    pub cost: f64,
    /// Place in the site's own order, from 0.
    pub rank: usize,
    pub has_image: bool,
    pub wakes: u32,
}

/// No node can take the site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoNode {
    pub out: Vec<(String, Out)>,
    memory_bytes: u64,
}

/// The nodes that can take the site, the best ones in order.
pub fn choose<'a>(need: &Need<'a>, candidates: &[Candidate<'a>]) -> Result<Choice<'a>, NoNode> {
    let site = hash(need.site.as_bytes());
    let look =
        |node: &'_ Candidate<'a>| Seen { key: rank_key(site, node), load: load(need, node), node: *node };
    let (mut first, mut second, mut least): (Option<Seen<'a>>, Option<Seen<'a>>, Option<Seen<'a>>) =
        (None, None, None);
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
    let mut order: Vec<Scored<'a>> = Vec::with_capacity(CHOICES_MAX + 1);
    let ranked = first.into_iter().map(|seen| (seen, 0)).chain(second.map(|seen| (seen, 1)));
    for (seen, rank) in ranked.chain(with_image.into_iter().chain(least).map(|seen| (seen, 2))) {
        if !order.iter().any(|scored| scored.name == seen.node.name) {
            order.push(seen.scored(rank));
        }
    }
    order.sort_by(|a, b| a.cost.total_cmp(&b.cost).then(a.rank.cmp(&b.rank)).then(a.name.cmp(b.name)));
    order.truncate(CHOICES_MAX);
    Ok(Choice { order, site: need.site, ruled_out: candidates.len() - open })
}

/// Where the site's image should be before it is needed: the node that its next move most likely goes to. It depends on who is in the
/// cluster and on nothing that changes by the second.
pub fn fallback<'a>(need: &Need<'_>, candidates: &[Candidate<'a>]) -> Option<&'a str> {
    let site = hash(need.site.as_bytes());
    let lasting = |node: &&Candidate<'a>| {
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

impl<'a> Choice<'a> {
    /// The best node.
    pub fn best(&self) -> &'a str {
        self.order[0].name
    }
}

impl fmt::Display for Choice<'_> {
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
    /// Nodes that could take it if they answered.
    pub fn if_they_answered(&self) -> impl Iterator<Item = &str> {
        let is_one = |out: &Out| matches!(out, Out::Silent | Out::Refuses);
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
                Out::IsLeft => write!(f, "{name} is the one it leaves")?,
                Out::Draining => write!(f, "{name} is being drained")?,
                Out::Absent => write!(f, "{name} is not there")?,
                Out::Silent => write!(f, "{name} does not answer")?,
                Out::Refuses => write!(f, "the host of {name} refuses connections")?,
                Out::TooSmall => write!(f, "{name} has less than {memory} MiB of memory")?,
                Out::Full => write!(f, "{name} has less than {memory} MiB of memory free")?,
            }
        }
        match self.out.len().saturating_sub(NAMED_MAX) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

fn ruled_out(need: &Need<'_>, node: &Candidate<'_>) -> Option<Out> {
    if need.from == Some(node.name) {
        Some(Out::IsLeft)
    } else if node.draining {
        Some(Out::Draining)
    } else if !node.present {
        Some(Out::Absent)
    } else if node.memory_bytes < need.memory_bytes {
        Some(Out::TooSmall)
    } else if node.memory_free < need.memory_bytes {
        Some(Out::Full)
    } else {
        // Last, as this may be over in a moment, and nothing else is against it then.
        match node.against? {
            Verdict::Silent => Some(Out::Silent),
            Verdict::Refuses => Some(Out::Refuses),
            Verdict::Answers | Verdict::Pending => None,
        }
    }
}

/// A node that can take the site, with what is computed once.
#[derive(Clone, Copy)]
struct Seen<'a> {
    key: f64,
    load: f64,
    node: Candidate<'a>,
}

impl<'a> Seen<'a> {
    fn ranks_before(&self, other: &Self) -> bool {
        self.key > other.key || self.key == other.key && self.node.name < other.node.name
    }

    /// Of two that have as little to do, the first in the site's order.
    fn has_less_to_do_than(&self, other: &Self) -> bool {
        self.load < other.load || self.load == other.load && self.ranks_before(other)
    }

    fn scored(&self, rank: usize) -> Scored<'a> {
        let image = if self.node.has_image { 0.0 } else { NO_IMAGE };
        let order = [0.0, SECOND].get(rank).copied().unwrap_or(ELSEWHERE);
        let Candidate { name, has_image, wakes, .. } = self.node;
        Scored { name, cost: self.load + image + order, rank, has_image, wakes }
    }
}

/// How loaded a node would be with the site on it. 1.0 is about full.
pub(crate) fn load(need: &Need<'_>, node: &Candidate<'_>) -> f64 {
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

/// Weighted rendezvous hashing: the node with the highest key comes first, and each does so for its share of all sites.
fn rank_key(site: u64, node: &Candidate<'_>) -> f64 {
    let hash = mix(site ^ hash(node.name.as_bytes()));
    // In (0, 1), never the ends.
    let unit = ((hash >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    capacity(node) / -unit.ln()
}

/// What a node has to offer, in CPUs with the memory that goes with them.
fn capacity(node: &Candidate<'_>) -> f64 {
    let by_memory = node.memory_bytes as f64 / MEMORY_PER_CPU as f64;
    f64::from(node.cpus.max(1)).min(by_memory).max(0.01)
}

/// FNV-1a, mixed: the same on all nodes and in all versions, as nodes that disagree would fetch images for nothing.
fn hash(bytes: &[u8]) -> u64 {
    mix(bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    }))
}

/// The end of splitmix64.
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
