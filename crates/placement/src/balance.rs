//! Decides how to help an instance that is short of CPU, and when to undo that.
//!
//! The steps come in this order, each only if the one before is not enough. First, its limit is
//! raised in place, at once, while its node has CPU left. Then it moves to a node with clearly more
//! left, at a quiet moment. Then one more node gets it, too, if several may run it. The same steps
//! are undone in reverse, much later. A site that was moved or copied is left alone for a while. A
//! node takes part in only a few moves per minute. A balance that swings does more harm than one
//! that is slightly off.
//!
//! Not here: measuring (`nagaya-keeper`), the next node after a node was lost (`planner`), carrying
//! a step out (`nagaya`).

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::fmt::{Debug, Display};
use std::time::Duration;

use crate::Moment;

/// Part of the `short` threshold below which an instance is no longer short of CPU.
const NOT_SHORT: f32 = 0.2;
/// Part of its CPU limit below which the limit is more than the instance needs.
const LITTLE_USED: f32 = 0.4;

/// One raise as a factor, and the pause before the next one: the effect must be measured first.
const RAISE: f32 = 2.0;
const RAISE_PAUSE: Duration = Duration::from_secs(1);

/// Requests in flight at a quiet moment.
const QUIET: u32 = 1;

/// How often the rest of a site that is moved again and again doubles.
const RESTS_DOUBLED_MAX: u32 = 4;
const MINUTE: Duration = Duration::from_secs(60);

/// Sites that are remembered, more than a node runs at once. Beyond that, the one longest not seen
/// is forgotten.
const SITES_MAX: usize = 65_536;

/// Thresholds and intervals of balancing, set by the operator. Parts are of 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BalanceConfig {
    /// Part of the time with work ready and no CPU for it, at which an instance becomes short of
    /// CPU.
    pub short: f32,
    /// Part of a node's CPU in use above which no limit is raised there.
    pub busy: f32,
    /// Time short of CPU before a site moves, and before it moves without a quiet moment.
    pub move_after: Duration,
    pub move_anyway_after: Duration,
    /// Conditions for a better node. It has at most this part in use with the site on it. It also
    /// has this much less in use than the present node.
    pub target: f32,
    pub better_by: f32,
    /// Time for which a moved site is left alone. It doubles each time the site needs a move again
    /// soon after, up to sixteen times. So load that comes and goes is not followed around.
    pub site_rests: Duration,
    /// Moves per minute in which a node takes part.
    pub moves_per_minute: u32,
    /// Time with more than enough CPU after which a limit is lowered by one step.
    pub lower_after: Duration,
}

impl Default for BalanceConfig {
    fn default() -> Self {
        Self {
            short: 0.25,
            busy: 0.85,
            move_after: Duration::from_secs(15),
            move_anyway_after: MINUTE,
            target: 0.65,
            better_by: 0.2,
            site_rests: Duration::from_secs(600),
            moves_per_minute: 4,
            lower_after: MINUTE,
        }
    }
}

/// Recent load of a site's instance on the node that runs it.
#[derive(Debug, Clone, PartialEq)]
pub struct SiteLoad<S, N> {
    pub site: S,
    pub node: N,
    /// Part of the time with work ready and no CPU for it, 0 to 1.
    pub starved: f32,
    /// Part of the time in which its own limit, or one above it, caused that.
    pub throttled: f32,
    /// CPUs in use, on average.
    pub cpus_used: f32,
    /// CPUs that it would use on a node that has them, as far as can be known.
    pub wants: f32,
    /// Its limit now, the limit of its record, and the highest limit.
    pub limit: f32,
    pub limit_base: f32,
    pub limit_max: f32,
    /// Requests in flight.
    pub in_flight: u32,
    pub memory_bytes: u64,
    /// How long ago another node handed it to this one because of its load.
    pub came: Option<Duration>,
    /// All nodes that have it. A node that is not known to have any counts as its own.
    pub nodes: Vec<N>,
    /// Most nodes that may have it.
    pub nodes_max: u32,
    /// This node got it last, and gives it up first.
    pub is_last: bool,
    /// CPUs that the other nodes use for it. `None` if that is unknown now, or if there are none.
    pub others_used: Option<f32>,
}

impl<S: Clone, N> SiteLoad<S, N> {
    fn decide(&self, step: BalanceStep<N>, words: String) -> BalanceDecision<S, N> {
        BalanceDecision { site: self.site.clone(), step, words }
    }

    /// Returns whether its total use would be little on one node fewer, with the record's limit on
    /// each node.
    fn is_spare(&self) -> bool {
        let rest = self.nodes.len().saturating_sub(1) as f32;
        let used = self.others_used.map(|others| others + self.cpus_used);
        self.is_last && rest > 0.0 && used.is_some_and(|used| used < rest * self.limit_base * LITTLE_USED)
    }
}

/// Free capacity of a node.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeLoad<N> {
    pub node: N,
    pub cpus: u32,
    /// Part of its CPUs in use, 0 to 1.
    pub cpu_used: f32,
    pub memory_free: u64,
    /// It may be given sites: it answers, is not drained, and so on.
    pub is_open: bool,
    /// Sites that any node handed to it for their load within the last minute.
    pub arrivals: u32,
}

impl<N: Display> NodeLoad<N> {
    fn in_words(&self) -> String {
        format!("{}, which uses {}%", self.node, percent(self.cpu_used))
    }
}

/// One step for one site.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BalanceStep<N> {
    /// Changes its CPU limit to this, in place.
    Raise(f32),
    Lower(f32),
    /// Moves it to this node, under the next epoch, without an error: new requests wait, old ones
    /// finish.
    Move(N),
    /// Adds this node as a replica.
    Copy(N),
    /// Removes this node's replica; the other nodes keep theirs.
    Uncopy,
}

/// A step and its reason, in words for `nagaya explain`.
#[derive(Debug, Clone, PartialEq)]
pub struct BalanceDecision<S, N> {
    pub site: S,
    pub step: BalanceStep<N>,
    pub words: String,
}

/// Memory of sites and nodes. Each node decides for the sites that run on it.
#[derive(Debug, Clone)]
pub struct LoadBalance<S, N> {
    terms: BalanceConfig,
    sites: BTreeMap<S, BalanceMemory>,
    moves: BTreeMap<N, VecDeque<Moment>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct BalanceMemory {
    short_since: Option<Moment>,
    calm_since: Option<Moment>,
    changed: Option<Moment>,
    moved: Option<Moment>,
    /// How often it was moved again soon after its rest.
    restless: u32,
    /// Since when one node fewer would be enough.
    spare_since: Option<Moment>,
    /// When this node last added a replica, and how many nodes had it before.
    copied: Option<(Moment, usize)>,
    seen: Moment,
}

impl BalanceMemory {
    fn rests(&self, terms: &BalanceConfig) -> Duration {
        terms.site_rests * 2u32.pow(self.restless.min(RESTS_DOUBLED_MAX))
    }
}

impl<S: Ord + Clone, N: Ord + Clone> Default for LoadBalance<S, N> {
    fn default() -> Self {
        Self { terms: BalanceConfig::default(), sites: BTreeMap::new(), moves: BTreeMap::new() }
    }
}

impl<S: Ord + Clone + Debug, N: Ord + Clone + Display> LoadBalance<S, N> {
    pub fn set_terms(&mut self, terms: BalanceConfig) {
        self.terms = terms;
    }

    /// Evaluates new measurements of a site, about once a second for each running site. `nodes`
    /// includes its own node. Returns at most one step for it.
    pub fn decide_step(
        &mut self,
        now: Moment,
        load: &SiteLoad<S, N>,
        nodes: &[NodeLoad<N>],
    ) -> Option<BalanceDecision<S, N>> {
        let memory = self.remember(now, load);
        let here = nodes.iter().find(|node| node.node == load.node)?;
        let short = memory.short_since.map(|since| now.since(since));
        let calm = memory.calm_since.map(|since| now.since(since));
        let decision = match (short, calm) {
            _ if load.limit > load.limit_max => Some(Self::bound(load)),
            (Some(short), _) => self
                .raise(now, load, here, &memory)
                .or_else(|| self.relocate(now, load, here, nodes, &memory, short))
                .or_else(|| self.copy(now, load, here, nodes, &memory, short)),
            (None, calm) => {
                self.uncopy(now, load, &memory).or_else(|| calm.and_then(|calm| self.give_back(load, calm)))
            }
        }?;
        self.done(now, load, &decision.step);
        Some(decision)
    }

    /// Returns how long the site has been short of CPU.
    pub fn short_for(&self, now: Moment, site: &S) -> Option<Duration> {
        self.sites.get(site)?.short_since.map(|since| now.since(since))
    }

    /// Returns how long the site is still left alone.
    pub fn rests_for(&self, now: Moment, site: &S) -> Option<Duration> {
        let memory = self.sites.get(site)?;
        memory.rests(&self.terms).checked_sub(now.since(memory.moved?)).filter(|left| !left.is_zero())
    }

    /// Notes that the site no longer runs on this node.
    pub fn forget_site(&mut self, site: &S) {
        if let Some(memory) = self.sites.get_mut(site) {
            // Its move or replica stays remembered, as the site may come back.
            let BalanceMemory { moved, restless, copied, seen, .. } = *memory;
            *memory = BalanceMemory { moved, restless, copied, seen, ..BalanceMemory::default() };
        }
    }

    fn remember(&mut self, now: Moment, load: &SiteLoad<S, N>) -> BalanceMemory {
        if self.sites.len() >= SITES_MAX && !self.sites.contains_key(&load.site) {
            let oldest = self.sites.iter().min_by_key(|(_, memory)| memory.seen);
            if let Some(oldest) = oldest.map(|(site, _)| site.clone()) {
                self.sites.remove(&oldest);
            }
        }
        let memory = self.sites.entry(load.site.clone()).or_default();
        memory.seen = now;
        let not_short = self.terms.short * NOT_SHORT;
        // Between the two thresholds nothing begins, but an ongoing shortage continues.
        if load.starved >= self.terms.short {
            memory.short_since.get_or_insert(now);
        } else if load.starved <= not_short {
            memory.short_since = None;
        }
        if load.starved <= not_short && load.cpus_used < load.limit * LITTLE_USED {
            memory.calm_since.get_or_insert(now);
        } else {
            memory.calm_since = None;
        }
        if load.is_spare() {
            _ = memory.spare_since.get_or_insert(now)
        } else {
            memory.spare_since = None
        }
        let came = load.came.map(|ago| now.before(ago));
        memory.moved = memory.moved.max(came);
        *memory
    }

    fn raise(
        &self,
        now: Moment,
        load: &SiteLoad<S, N>,
        here: &NodeLoad<N>,
        memory: &BalanceMemory,
    ) -> Option<BalanceDecision<S, N>> {
        let paused = memory.changed.is_none_or(|changed| now.since(changed) >= RAISE_PAUSE);
        // Otherwise other load causes the shortage, and a higher limit would not help.
        let is_limited = load.throttled >= self.terms.short;
        let is_busy = here.cpu_used > self.terms.busy;
        if !is_limited || load.limit >= load.limit_max || is_busy || !paused {
            return None;
        }
        let cpus = (load.limit * RAISE).min(load.limit_max);
        let words = format!(
            "short of CPU {}% of the time at a limit of {:.2} CPUs, and {} uses {}% of its own: the limit is raised to {cpus:.2}",
            percent(load.starved),
            load.limit,
            here.node,
            percent(here.cpu_used),
        );
        Some(load.decide(BalanceStep::Raise(cpus), words))
    }

    fn relocate(
        &self,
        now: Moment,
        load: &SiteLoad<S, N>,
        here: &NodeLoad<N>,
        nodes: &[NodeLoad<N>],
        memory: &BalanceMemory,
        short: Duration,
    ) -> Option<BalanceDecision<S, N>> {
        let is_quiet = load.in_flight <= QUIET || short >= self.terms.move_anyway_after;
        if !self.is_short(load, short) || !is_quiet || !self.may_move(now, memory, here) {
            return None;
        }
        let (to, _) = self.better(now, load, here, nodes)?;
        let words = format!(
            "short of CPU for {} s on {} of its own: moved to {}{}",
            short.as_secs(),
            here.in_words(),
            to.in_words(),
            if load.in_flight <= QUIET { ", at a quiet moment" } else { ", as no moment was quiet" },
        );
        Some(load.decide(BalanceStep::Move(to.node.clone()), words))
    }

    /// Returns whether it was short for long and still is. An instance that is only slightly short
    /// by now stays.
    fn is_short(&self, load: &SiteLoad<S, N>, short: Duration) -> bool {
        load.starved >= self.terms.short && short >= self.terms.move_after
    }

    /// Returns a better node for the site.
    fn better<'n>(
        &self,
        now: Moment,
        load: &SiteLoad<S, N>,
        here: &NodeLoad<N>,
        nodes: &'n [NodeLoad<N>],
    ) -> Option<(&'n NodeLoad<N>, f32)> {
        let best = self.best(now, load, nodes, load.wants)?;
        (best.1 + self.terms.better_by <= here.cpu_used).then_some(best)
    }

    fn copy(
        &self,
        now: Moment,
        load: &SiteLoad<S, N>,
        here: &NodeLoad<N>,
        nodes: &[NodeLoad<N>],
        memory: &BalanceMemory,
        short: Duration,
    ) -> Option<BalanceDecision<S, N>> {
        let count = load.nodes.len().max(1);
        let is_limited = load.throttled >= self.terms.short && load.limit < load.limit_max;
        if is_limited && here.cpu_used <= self.terms.busy {
            // Its limit can be raised here in a moment.
            return None;
        }
        if !self.is_short(load, short) || count >= load.nodes_max as usize || !self.has_budget(now, here) {
            return None;
        }
        // The effect of the last replica must have been measured. A replica that had no effect is
        // not tried again soon.
        let pause = match memory.copied {
            Some((_, before)) if count <= before => self.terms.site_rests,
            _ => self.terms.move_after,
        };
        if memory.copied.is_some_and(|(at, _)| now.since(at) < pause) {
            return None;
        }
        // One instance that may move there at a quiet moment costs less than two.
        if self.may_move(now, memory, here) && self.better(now, load, here, nodes).is_some() {
            return None;
        }
        let (to, _) = self.best(now, load, nodes, load.wants / (count + 1) as f32)?;
        let words = format!(
            "short of CPU for {} s at {:.2} CPUs on {} of its own, and no node is better for all of it: {}, gets one, too ({} of {})",
            short.as_secs(),
            load.limit,
            here.in_words(),
            to.in_words(),
            count + 1,
            load.nodes_max,
        );
        Some(load.decide(BalanceStep::Copy(to.node.clone()), words))
    }

    fn uncopy(
        &self,
        now: Moment,
        load: &SiteLoad<S, N>,
        memory: &BalanceMemory,
    ) -> Option<BalanceDecision<S, N>> {
        let spare = now.since(memory.spare_since?);
        let has_rested = load.came.is_none_or(|came| came >= self.terms.site_rests);
        if spare < self.terms.lower_after || !has_rested {
            return None;
        }
        let count = load.nodes.len();
        let words = format!(
            "its {count} nodes used {:.2} CPUs together for {} s, little for {}: {} gives it up",
            load.cpus_used + load.others_used.unwrap_or(0.0),
            spare.as_secs(),
            count - 1,
            load.node,
        );
        Some(load.decide(BalanceStep::Uncopy, words))
    }

    /// Lowers its limit to the maximum, because a record or setting was changed.
    fn bound(load: &SiteLoad<S, N>) -> BalanceDecision<S, N> {
        let cpus = load.limit_max;
        let words = format!(
            "its limit of {:.2} CPUs is more than it may be raised to now: lowered to {cpus:.2}",
            load.limit
        );
        load.decide(BalanceStep::Lower(cpus), words)
    }

    fn give_back(&self, load: &SiteLoad<S, N>, calm: Duration) -> Option<BalanceDecision<S, N>> {
        if calm < self.terms.lower_after || load.limit <= load.limit_base {
            return None;
        }
        let cpus = (load.limit / RAISE).max(load.limit_base);
        let words = format!(
            "used {:.2} of {:.2} CPUs, and so little for {} s: the limit is lowered to {cpus:.2}",
            load.cpus_used,
            load.limit,
            calm.as_secs()
        );
        Some(load.decide(BalanceStep::Lower(cpus), words))
    }

    /// Returns the node with the least in use once the site is there, if that is little enough.
    fn best<'n>(
        &self,
        now: Moment,
        load: &SiteLoad<S, N>,
        nodes: &'n [NodeLoad<N>],
        wants: f32,
    ) -> Option<(&'n NodeLoad<N>, f32)> {
        let with_it = |node: &NodeLoad<N>| node.cpu_used + wants / node.cpus.max(1) as f32;
        let open = nodes.iter().filter(|node| {
            node.is_open
                && node.node != load.node
                && !load.nodes.contains(&node.node)
                && node.memory_free >= load.memory_bytes
                && self.has_budget(now, node)
        });
        let best = open.map(|node| (node, with_it(node))).min_by(|a, b| a.1.total_cmp(&b.1))?;
        (best.1 <= self.terms.target).then_some(best)
    }

    fn may_move(&self, now: Moment, memory: &BalanceMemory, from: &NodeLoad<N>) -> bool {
        let has_rested = memory.moved.is_none_or(|moved| now.since(moved) >= memory.rests(&self.terms));
        has_rested && self.has_budget(now, from)
    }

    fn has_budget(&self, now: Moment, node: &NodeLoad<N>) -> bool {
        let recent = |moves: &VecDeque<Moment>| moves.iter().filter(|at| now.since(**at) < MINUTE).count();
        let own = self.moves.get(&node.node).map_or(0, recent);
        // The arrivals may include sites that this node handed over.
        own.max(node.arrivals as usize) < self.terms.moves_per_minute as usize
    }

    fn done(&mut self, now: Moment, load: &SiteLoad<S, N>, step: &BalanceStep<N>) {
        let memory = self.sites.entry(load.site.clone()).or_default();
        memory.changed = Some(now);
        memory.calm_since = None;
        memory.spare_since = None;
        if let BalanceStep::Copy(_) = step {
            memory.copied = Some((now, load.nodes.len().max(1)));
        }
        if let BalanceStep::Move(_) = step {
            let soon = memory.rests(&self.terms) * 3;
            let is_soon = memory.moved.is_some_and(|moved| now.since(moved) < soon);
            memory.restless = if is_soon { memory.restless + 1 } else { 0 };
            memory.moved = Some(now);
            memory.short_since = None;
        }
        let (BalanceStep::Move(to) | BalanceStep::Copy(to)) = step else { return };
        for node in [to, &load.node] {
            let moves = self.moves.entry(node.clone()).or_default();
            moves.retain(|at| now.since(*at) < MINUTE);
            moves.push_back(now);
        }
    }
}

fn percent(part: f32) -> u32 {
    (part * 100.0).round().clamp(0.0, 100.0) as u32
}
