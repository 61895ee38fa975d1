//! What is done for an instance that is short of CPU, and taken back when it is not any more.
//!
//! In this order, each step only if the one before does not do: its limit is raised where it is, at once, while its node has CPU left;
//! it is moved to a node with clearly more left, at a quiet moment; one more node gets it, too, if it may run on several. Back down the
//! same way, much later than up. What was moved or copied rests, and a node takes part in only so many moves a minute: a balance that
//! swings does more harm than one that is a little off.
//!
//! Not here: measuring (`nagaya-keeper`), where a site goes when its node is gone (`planner`), carrying it out (`nagaya`).

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::fmt::{Debug, Display};
use std::time::Duration;

use crate::Moment;

/// Who was short is not any more when it is so for less than this part of the time that made it short.
const NOT_SHORT: f32 = 0.2;
/// Part of its CPU limit below which that is more than it needs.
const LITTLE_USED: f32 = 0.4;

/// One raise, as a factor, and the pause after which the next one may follow: what it did must have been measured.
const RAISE: f32 = 2.0;
const RAISE_PAUSE: Duration = Duration::from_secs(1);

/// Requests under way at a quiet moment.
const QUIET: u32 = 1;

/// How often the rest of a site that is moved again and again doubles.
const RESTS_DOUBLED_MAX: u32 = 4;
const MINUTE: Duration = Duration::from_secs(60);

/// Sites that are remembered, more than a node runs at once; of more, the one longest not seen is forgotten.
const SITES_MAX: usize = 65_536;

/// From when on something is done, and how often. What an operator can set; parts are of 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Terms {
    /// Part of the time with work ready and no CPU for it from which on an instance is short of it.
    pub short: f32,
    /// Part of a node's CPU above which nobody is given more there.
    pub busy: f32,
    /// Short of CPU for so long before it is moved, and before that is done without waiting for a quiet moment.
    pub move_after: Duration,
    pub move_anyway_after: Duration,
    /// A better node: with the site on it no more than this in use, and so much less than where it is.
    pub target: f32,
    pub better_by: f32,
    /// A site that was moved is left where it is for this long; twice as long each time it needs it again soon after, up to sixteen
    /// times: load that comes and goes is not followed around.
    pub site_rests: Duration,
    /// Moves that a node takes part in.
    pub moves_per_minute: u32,
    /// With more than enough for so long, a limit is lowered by one step.
    pub lower_after: Duration,
}

impl Default for Terms {
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

/// What the instance of a site did lately, on the node that runs it.
#[derive(Debug, Clone, PartialEq)]
pub struct SiteLoad<S, N> {
    pub site: S,
    pub node: N,
    /// Part of the time with work ready and no CPU for it, 0 to 1.
    pub starved: f32,
    /// Part of the time in which that was for want of its limit, or one above.
    pub throttled: f32,
    /// CPUs in use, on average.
    pub cpus_used: f32,
    /// CPUs that it would use on a node that has them, as far as can be known.
    pub wants: f32,
    /// Its limit now, what its record says, and how far it may be raised.
    pub limit: f32,
    pub limit_base: f32,
    pub limit_max: f32,
    /// Requests under way.
    pub in_flight: u32,
    pub memory_bytes: u64,
    /// How long ago another node gave it to this one for its load.
    pub came: Option<Duration>,
    /// All nodes that have it. Of one that is not known to have any, its own counts.
    pub nodes: Vec<N>,
    /// How many may.
    pub nodes_max: u32,
    /// This node is the last that got it, and goes first.
    pub is_last: bool,
    /// CPUs that the others use for it. None: that is not known now, or there are none.
    pub others_used: Option<f32>,
}

impl<S: Clone, N> SiteLoad<S, N> {
    fn decide(&self, step: Step<N>, words: String) -> Decision<S, N> {
        Decision { site: self.site.clone(), step, words }
    }

    /// All that is used of it would be little for one node fewer, by the limit that its record gives it on each.
    fn is_spare(&self) -> bool {
        let rest = self.nodes.len().saturating_sub(1) as f32;
        let used = self.others_used.map(|others| others + self.cpus_used);
        self.is_last && rest > 0.0 && used.is_some_and(|used| used < rest * self.limit_base * LITTLE_USED)
    }
}

/// What a node has left.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeLoad<N> {
    pub node: N,
    pub cpus: u32,
    /// Part of its CPUs in use, 0 to 1.
    pub cpu_used: f32,
    pub memory_free: u64,
    /// It answers, is not drained, and so on: it may be given sites.
    pub is_open: bool,
    /// Sites that it was given for their load within the last minute, whoever gave them.
    pub arrivals: u32,
}

impl<N: Display> NodeLoad<N> {
    fn in_words(&self) -> String {
        format!("{}, which uses {}%", self.node, percent(self.cpu_used))
    }
}

/// One step for one site.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Step<N> {
    /// Its CPU limit becomes this, where it is.
    Raise(f32),
    Lower(f32),
    /// To this node, under the next epoch, without an error: new requests wait, old ones finish.
    Move(N),
    /// This node gets it, too.
    Copy(N),
    /// This node gives it up to the others that have it.
    Uncopy,
}

/// A step, and why, in words for `nagaya explain`.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision<S, N> {
    pub site: S,
    pub step: Step<N>,
    pub words: String,
}

/// What is remembered of sites and nodes. Each node decides for the sites that run on it.
#[derive(Debug, Clone)]
pub struct Balance<S, N> {
    terms: Terms,
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
    /// One node fewer would do.
    spare_since: Option<Moment>,
    /// When this node last gave it to one more, and how many had it before.
    copied: Option<(Moment, usize)>,
    seen: Moment,
}

impl Memory {
    fn rests(&self, terms: &Terms) -> Duration {
        terms.site_rests * 2u32.pow(self.restless.min(RESTS_DOUBLED_MAX))
    }
}

impl<S: Ord + Clone, N: Ord + Clone> Default for Balance<S, N> {
    fn default() -> Self {
        Self { terms: Terms::default(), sites: BTreeMap::new(), moves: BTreeMap::new() }
    }
}

impl<S: Ord + Clone + Debug, N: Ord + Clone + Display> Balance<S, N> {
    pub fn set_terms(&mut self, terms: Terms) {
        self.terms = terms;
    }

    /// What has just been measured of a site; called about every second for those that run. `nodes` holds its own node, too. At most
    /// one step for it.
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

    /// How long the site has been short of CPU by now.
    pub fn short_for(&self, now: Moment, site: &S) -> Option<Duration> {
        self.sites.get(site)?.short_since.map(|since| now.since(since))
    }

    /// How long it is still left where it is.
    pub fn rests_for(&self, now: Moment, site: &S) -> Option<Duration> {
        let memory = self.sites.get(site)?;
        memory.rests(&self.terms).checked_sub(now.since(memory.moved?)).filter(|left| !left.is_zero())
    }

    /// The site does not run on this node any more.
    pub fn left(&mut self, site: &S) {
        if let Some(memory) = self.sites.get_mut(site) {
            // That it was moved or copied is remembered, as it may come back.
            let Memory { moved, restless, copied, seen, .. } = *memory;
            *memory = Memory { moved, restless, copied, seen, ..Memory::default() };
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
        let not_short = self.terms.short * NOT_SHORT;
        // Between the two nothing begins, but what has begun goes on.
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
        match load.is_spare() {
            true => _ = memory.spare_since.get_or_insert(now),
            false => memory.spare_since = None,
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
        memory: &Memory,
    ) -> Option<Decision<S, N>> {
        let paused = memory.changed.is_none_or(|changed| now.since(changed) >= RAISE_PAUSE);
        // Else it is short of what others use, and a higher limit would give it nothing.
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
        Some(load.decide(Step::Raise(cpus), words))
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
        Some(load.decide(Step::Move(to.node.clone()), words))
    }

    /// For long, and still: what was short and is only a little so by now stays.
    fn is_short(&self, load: &SiteLoad<S, N>, short: Duration) -> bool {
        load.starved >= self.terms.short && short >= self.terms.move_after
    }

    /// The node that it should rather be on.
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
        memory: &Memory,
        short: Duration,
    ) -> Option<Decision<S, N>> {
        let count = load.nodes.len().max(1);
        let is_limited = load.throttled >= self.terms.short && load.limit < load.limit_max;
        if is_limited && here.cpu_used <= self.terms.busy {
            // It gets more here in a moment.
            return None;
        }
        if !self.is_short(load, short) || count >= load.nodes_max as usize || !self.has_budget(now, here) {
            return None;
        }
        // What the last one has changed must have been measured; one that came to nothing is not tried again soon.
        let pause = match memory.copied {
            Some((_, before)) if count <= before => self.terms.site_rests,
            _ => self.terms.move_after,
        };
        if memory.copied.is_some_and(|(at, _)| now.since(at) < pause) {
            return None;
        }
        // One that may be moved there at a quiet moment costs less than two.
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
        Some(load.decide(Step::Copy(to.node.clone()), words))
    }

    fn uncopy(&self, now: Moment, load: &SiteLoad<S, N>, memory: &Memory) -> Option<Decision<S, N>> {
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
        Some(load.decide(Step::Uncopy, words))
    }

    /// It has more than it may, since a record or setting was changed.
    fn bound(load: &SiteLoad<S, N>) -> Decision<S, N> {
        let cpus = load.limit_max;
        let words = format!(
            "its limit of {:.2} CPUs is more than it may be raised to now: lowered to {cpus:.2}",
            load.limit
        );
        load.decide(Step::Lower(cpus), words)
    }

    fn give_back(&self, load: &SiteLoad<S, N>, calm: Duration) -> Option<Decision<S, N>> {
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
        Some(load.decide(Step::Lower(cpus), words))
    }

    /// The node with the least in use once so much of the site is there, if that is little enough.
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

    fn may_move(&self, now: Moment, memory: &Memory, from: &NodeLoad<N>) -> bool {
        let has_rested = memory.moved.is_none_or(|moved| now.since(moved) >= memory.rests(&self.terms));
        has_rested && self.has_budget(now, from)
    }

    fn has_budget(&self, now: Moment, node: &NodeLoad<N>) -> bool {
        let recent = |moves: &VecDeque<Moment>| moves.iter().filter(|at| now.since(**at) < MINUTE).count();
        let own = self.moves.get(&node.node).map_or(0, recent);
        // What this node gave to it may be among the arrivals.
        own.max(node.arrivals as usize) < self.terms.moves_per_minute as usize
    }

    fn done(&mut self, now: Moment, load: &SiteLoad<S, N>, step: &Step<N>) {
        let memory = self.sites.entry(load.site.clone()).or_default();
        memory.changed = Some(now);
        (memory.calm_since, memory.spare_since) = (None, None);
        if let Step::Copy(_) = step {
            memory.copied = Some((now, load.nodes.len().max(1)));
        }
        if let Step::Move(_) = step {
            let soon = memory.rests(&self.terms) * 3;
            let is_soon = memory.moved.is_some_and(|moved| now.since(moved) < soon);
            memory.restless = if is_soon { memory.restless + 1 } else { 0 };
            memory.moved = Some(now);
            memory.short_since = None;
        }
        let (Step::Move(to) | Step::Copy(to)) = step else { return };
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
