//! What is done for an instance that is short of CPU, and taken back when it is not any more.
//!
//! In this order, each step only if the one before does not do: its limit is raised where it is, at once, while its node has CPU left;
//! it is moved to a node with clearly more left, at a quiet moment; it gets another copy, if the site allows. Back down the same
//! way, much later than up. A site that was moved rests, and a node takes part in only so many moves a minute: a balance that
//! swings does more harm than one that is a little off.
//!
//! Not here: measuring (`nagaya-keeper`), where a site goes when its node is gone (`planner`), carrying it out (`relocation`).

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::fmt::{Debug, Display};
use std::time::Duration;

use crate::Moment;

/// Part of the time with work ready and no CPU for it from which on an instance is short of it, and up to which it is not.
const SHORT: f32 = 0.25;
const NOT_SHORT: f32 = 0.05;
/// Part of its CPU limit below which that is more than it needs.
const HALF_USED: f32 = 0.4;

/// One raise, as a factor, and the pause after which the next one may follow: what it did must have been measured.
const RAISE: f32 = 2.0;
const RAISE_PAUSE: Duration = Duration::from_secs(1);
/// Part of a node's CPU in use from which on nobody is given more there.
const NODE_BUSY: f32 = 0.85;

/// Short of CPU for so long before it is moved, and before that is done without waiting for a quiet moment.
const MOVE_AFTER: Duration = Duration::from_secs(15);
const MOVE_ANYWAY_AFTER: Duration = Duration::from_secs(60);
/// Requests under way at a quiet moment.
const QUIET: u32 = 1;
/// A better node: with the site on it no more than this in use, and so much less than where it is.
const TARGET_BUSY: f32 = 0.65;
const BETTER_BY: f32 = 0.2;

/// A site that was moved or copied is left where it is for this long; twice as long each time it needs it again soon after, up to
/// sixteen times: load that comes and goes is not followed around.
pub const SITE_RESTS: Duration = Duration::from_secs(600);
const RESTS_DOUBLED_MAX: u32 = 4;
/// Moves and copies that a node takes part in.
pub const NODE_MOVES_PER_MINUTE: usize = 4;
const MINUTE: Duration = Duration::from_secs(60);

/// Another copy after so long of being short.
const COPY_AFTER: Duration = Duration::from_secs(45);
/// With more than enough for so long, a limit is lowered, and a copy ended.
const LOWER_AFTER: Duration = Duration::from_secs(60);
const MERGE_AFTER: Duration = Duration::from_secs(300);

/// Sites that are remembered, more than a node runs at once; of more, the one longest not seen is forgotten.
const SITES_MAX: usize = 65_536;

/// What the instances of a site did lately, on the node that runs the first of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SiteLoad<S, N> {
    pub site: S,
    pub node: N,
    /// Part of the time with work ready and no CPU for it, 0 to 1.
    pub starved: f32,
    /// CPUs in use by one instance, on average.
    pub cpus_used: f32,
    /// Its limit now, what its record says, and how far it may be raised.
    pub limit: f32,
    pub limit_base: f32,
    pub limit_max: f32,
    pub instances: u32,
    pub instances_max: u32,
    /// Requests under way.
    pub in_flight: u32,
    pub memory_bytes: u64,
}

/// What a node has left.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NodeLoad<N> {
    pub node: N,
    pub cpus: u32,
    /// Part of its CPUs in use, 0 to 1.
    pub cpu_used: f32,
    pub memory_free: u64,
    /// It answers, is not drained, and so on: it may be given sites.
    pub is_open: bool,
    /// It runs a copy of the site already. Only copies ask for it.
    pub has_copy: bool,
}

/// One step for one site.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Step<N> {
    /// Its CPU limit becomes this, where it is.
    Raise(f32),
    Lower(f32),
    /// To this node, under the next epoch, without an error: new requests wait, old ones finish.
    Move(N),
    /// One more instance, on this node.
    Copy(N),
    /// One instance less.
    Merge,
}

/// A step, and why, in words for `nagaya explain`.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision<S, N> {
    pub site: S,
    pub step: Step<N>,
    pub words: String,
}

/// What is remembered of sites and nodes. Each node decides for the sites that are placed on it.
#[derive(Debug, Clone)]
pub struct Balance<S, N> {
    sites: BTreeMap<S, Memory>,
    moves: BTreeMap<N, VecDeque<Moment>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Memory {
    short_since: Option<Moment>,
    calm_since: Option<Moment>,
    changed: Option<Moment>,
    moved: Option<Moment>,
    /// Times that it was moved soon after it had rested.
    restless: u32,
    seen: Moment,
}

impl Memory {
    fn rests(&self) -> Duration {
        SITE_RESTS * 2u32.pow(self.restless.min(RESTS_DOUBLED_MAX))
    }
}

impl<S: Ord + Clone, N: Ord + Clone> Default for Balance<S, N> {
    fn default() -> Self {
        Self { sites: BTreeMap::new(), moves: BTreeMap::new() }
    }
}

impl<S: Ord + Clone + Debug, N: Ord + Clone + Display> Balance<S, N> {
    /// What has just been measured of a site; called about every second for those that have done anything. `nodes` holds its own node,
    /// too. At most one step for it.
    pub fn look(
        &mut self,
        now: Moment,
        load: &SiteLoad<S, N>,
        nodes: &[NodeLoad<N>],
    ) -> Option<Decision<S, N>> {
        let memory = self.remember(now, load);
        let here = nodes.iter().find(|node| node.node == load.node)?;
        let short = memory.short_since.map(|since| now.since(since));
        let calm = memory.calm_since.map(|since| now.since(since));
        let decision = match (short, calm) {
            (Some(short), _) => self
                .raise(now, load, here, &memory)
                .or_else(|| self.relocate(now, load, here, nodes, &memory, short))
                .or_else(|| self.copy(now, load, nodes, &memory, short)),
            (None, Some(calm)) => Self::give_back(load, calm),
            (None, None) => None,
        }?;
        self.done(now, load, &decision.step);
        Some(decision)
    }

    /// The site is not this node's any more.
    pub fn left(&mut self, site: &S) {
        if let Some(memory) = self.sites.get_mut(site) {
            // That it was moved is remembered, as it may come back.
            let Memory { moved, restless, seen, .. } = *memory;
            *memory = Memory { moved, restless, seen, ..Memory::default() };
        }
    }

    fn remember(&mut self, now: Moment, load: &SiteLoad<S, N>) -> Memory {
        if self.sites.len() >= SITES_MAX && !self.sites.contains_key(&load.site) {
            let oldest = self.sites.iter().min_by_key(|(_, memory)| memory.seen);
            if let Some(oldest) = oldest.map(|(site, _)| site.clone()) {
                self.sites.remove(&oldest);
            }
        }
        let memory = self.sites.entry(load.site.clone()).or_default();
        memory.seen = now;
        // Between the two nothing begins, but what has begun goes on.
        if load.starved >= SHORT {
            memory.short_since.get_or_insert(now);
        } else if load.starved <= NOT_SHORT {
            memory.short_since = None;
        }
        if load.starved <= NOT_SHORT && load.cpus_used < load.limit * HALF_USED {
            memory.calm_since.get_or_insert(now);
        } else {
            memory.calm_since = None;
        }
        *memory
    }

    fn raise(
        &self,
        now: Moment,
        load: &SiteLoad<S, N>,
        here: &NodeLoad<N>,
        memory: &Memory,
    ) -> Option<Decision<S, N>> {
        let paused = memory.changed.is_none_or(|changed| now.since(changed) >= RAISE_PAUSE);
        // A limit that it does not reach is not what it is short of.
        let is_reached = load.cpus_used >= load.limit * 0.5;
        if load.limit >= load.limit_max || here.cpu_used >= NODE_BUSY || !paused || !is_reached {
            return None;
        }
        let cpus = (load.limit * RAISE).min(load.limit_max);
        let words = format!(
            "short of CPU {}% of the time at a limit of {:.2}, and {} uses {}% of its own: the limit is raised to {cpus:.2}",
            percent(load.starved),
            load.limit,
            here.node,
            percent(here.cpu_used),
        );
        Some(Decision { site: load.site.clone(), step: Step::Raise(cpus), words })
    }

    fn relocate(
        &self,
        now: Moment,
        load: &SiteLoad<S, N>,
        here: &NodeLoad<N>,
        nodes: &[NodeLoad<N>],
        memory: &Memory,
        short: Duration,
    ) -> Option<Decision<S, N>> {
        let is_quiet = load.in_flight <= QUIET || short >= MOVE_ANYWAY_AFTER;
        // Several copies are balanced among themselves, by who gets the next request.
        // What was short and is only a little so by now stays.
        let is_short = load.starved >= SHORT && short >= MOVE_AFTER;
        if !is_short || !is_quiet || load.instances > 1 || !self.may_move(now, memory, &here.node) {
            return None;
        }
        let (to, busy) = self.best(now, load, nodes)?;
        if busy + BETTER_BY > here.cpu_used {
            return None;
        }
        let words = format!(
            "short of CPU for {} s on {}, which uses {}% of its own: moved to {}, which uses {}%{}",
            short.as_secs(),
            here.node,
            percent(here.cpu_used),
            to.node,
            percent(to.cpu_used),
            if load.in_flight <= QUIET { ", at a quiet moment" } else { ", as no moment was quiet" },
        );
        Some(Decision { site: load.site.clone(), step: Step::Move(to.node.clone()), words })
    }

    fn copy(
        &self,
        now: Moment,
        load: &SiteLoad<S, N>,
        nodes: &[NodeLoad<N>],
        memory: &Memory,
        short: Duration,
    ) -> Option<Decision<S, N>> {
        let waited = memory.changed.is_none_or(|changed| now.since(changed) >= COPY_AFTER);
        if load.starved < SHORT || short < COPY_AFTER || !waited || load.instances >= load.instances_max {
            return None;
        }
        let (to, _) = self.best(now, load, nodes)?;
        let words = format!(
            "short of CPU for {} s with {} of {} instances, and no node is better for one alone: one more on {}",
            short.as_secs(),
            load.instances,
            load.instances_max,
            to.node,
        );
        Some(Decision { site: load.site.clone(), step: Step::Copy(to.node.clone()), words })
    }

    fn give_back(load: &SiteLoad<S, N>, calm: Duration) -> Option<Decision<S, N>> {
        let seconds = calm.as_secs();
        let (step, words) = if load.instances > 1 {
            if calm < MERGE_AFTER {
                return None;
            }
            let words =
                format!("less than half used for {seconds} s: one of {} instances ends", load.instances);
            (Step::Merge, words)
        } else {
            if calm < LOWER_AFTER || load.limit <= load.limit_base {
                return None;
            }
            let cpus = (load.limit / RAISE).max(load.limit_base);
            (
                Step::Lower(cpus),
                format!("less than half used for {seconds} s: the limit is lowered to {cpus:.2}"),
            )
        };
        Some(Decision { site: load.site.clone(), step, words })
    }

    /// The node with the least in use once the site is there, if that is little enough.
    fn best<'n>(
        &self,
        now: Moment,
        load: &SiteLoad<S, N>,
        nodes: &'n [NodeLoad<N>],
    ) -> Option<(&'n NodeLoad<N>, f32)> {
        let with_it = |node: &NodeLoad<N>| {
            node.cpu_used + load.cpus_used.max(load.limit_base) / node.cpus.max(1) as f32
        };
        let open = nodes.iter().filter(|node| {
            node.is_open
                && !node.has_copy
                && node.node != load.node
                && node.memory_free >= load.memory_bytes
                && self.has_budget(now, &node.node)
        });
        let best = open.map(|node| (node, with_it(node))).min_by(|a, b| a.1.total_cmp(&b.1))?;
        (best.1 <= TARGET_BUSY).then_some(best)
    }

    fn may_move(&self, now: Moment, memory: &Memory, from: &N) -> bool {
        memory.moved.is_none_or(|moved| now.since(moved) >= memory.rests()) && self.has_budget(now, from)
    }

    fn has_budget(&self, now: Moment, node: &N) -> bool {
        let recent = self
            .moves
            .get(node)
            .map_or(0, |moves| moves.iter().filter(|at| now.since(**at) < MINUTE).count());
        recent < NODE_MOVES_PER_MINUTE
    }

    fn done(&mut self, now: Moment, load: &SiteLoad<S, N>, step: &Step<N>) {
        let memory = self.sites.entry(load.site.clone()).or_default();
        memory.changed = Some(now);
        memory.calm_since = None;
        if let Step::Move(to) | Step::Copy(to) = step {
            let is_soon = memory.moved.is_some_and(|moved| now.since(moved) < memory.rests() * 3);
            memory.restless = if is_soon { memory.restless + 1 } else { 0 };
            memory.moved = Some(now);
            memory.short_since = None;
            for node in [to, &load.node] {
                let moves = self.moves.entry(node.clone()).or_default();
                moves.retain(|at| now.since(*at) < MINUTE);
                moves.push_back(now);
            }
        }
    }
}

fn percent(part: f32) -> u32 {
    (part * 100.0).round().clamp(0.0, 100.0) as u32
}
