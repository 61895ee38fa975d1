//! Finding a site its next node, once for all requests that wait for it.
//!
//! Each site that needs a place goes through the same steps: choose a node, have the store agree under the next epoch, let the
//! requests go on there. Requests that come meanwhile join. Every step has a bound and every request an end: an answer, or a
//! refusal that says why. How many sites a node wakes at once is its own affair.
//!
//! A commit of which nothing was heard may still have happened, or happen later. It is looked at before it is tried again, and
//! tried again under the same epoch only, so that of all attempts one succeeds.
//!
//! Not here: the choice (`planner`), whether a commit may be sent (`fence`), the store and the records (`nagaya-cmdb`).

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::Moment;
use crate::fence::Held;

/// Longest that a request waits for a place: a promise to the old node, an election among the store's members and then a line of
/// many sites fit in, and it is less than edges wait for their supervisor, so that they are told the reason.
pub const WAIT_LONGEST: Duration = Duration::from_secs(8);

/// Requests that wait for one site. Admission lets fewer through; this is the backstop.
pub const WAITERS_MAX: usize = 4096;

/// Sites that are looked after at once.
pub const SITES_MAX: usize = 16_384;

/// Where no node can take a site for the moment, that is looked at again so often, unless [`Relocations::reconsider`] says sooner.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Commits for one site before it is given up. Conflicts with others end sooner, as they are answers.
pub const ATTEMPTS_MAX: u32 = 32;

/// Pause after the store did not answer; doubled up to the longest.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_LONGEST: Duration = Duration::from_millis(500);

/// After this a question to the store counts as not answered.
pub const ASK_LONGEST: Duration = Duration::from_secs(1);

/// Where a site is placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct At<N> {
    pub node: N,
    pub epoch: u64,
}

/// A request that waits, by the caller's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Waiter(pub u64);

/// A question to the store. Numbers are not used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AskId(pub u64);

/// What the caller is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect<S, N> {
    /// Choose a node, not `from`; answered by [`Relocations::planned`].
    Plan {
        site: S,
        from: Option<N>,
    },
    /// Commit `node` under the epoch after `expect` if the placement's epoch is `expect` (`None`: there is none). Before it is sent
    /// [`crate::fence::Voucher::begin`] must agree, if `from` is another node; if it does not: [`Relocations::held`]. Answered by
    /// [`Relocations::stored`].
    AskStore {
        site: S,
        ask: AskId,
        node: N,
        from: Option<N>,
        expect: Option<u64>,
    },
    /// Read the placement, linearizable; answered by [`Relocations::looked`].
    Look {
        site: S,
        ask: AskId,
    },
    /// The request goes on there. `committed` is there if this node has just committed it: when, and for how long others may serve it; how long ago
    /// that was can go with the request if it is forwarded ([`crate::fence::Arrivals::placed`]).
    Serve {
        waiter: Waiter,
        site: S,
        node: N,
        epoch: u64,
        committed: Option<(Moment, Duration)>,
    },
    Refuse {
        waiter: Waiter,
        site: S,
        why: Refused,
    },
}

/// What the planner says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan<N> {
    Node(N),
    /// The node that it was to leave is there after all: the site stays, under the epoch that it has.
    Stay,
    /// Nobody can take it now, and somebody may in a moment: requests wait for that.
    NotNow,
    Nowhere,
}

/// Why a request got no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refused {
    /// No node can take the site.
    Nowhere,
    /// The store did not agree or disagree in time, or the old node did not say that it knows this one.
    StoreSilent,
    /// A promise to the old node lasted longer than the request may wait.
    TooLate,
    /// More wait already than may.
    TooMany,
}

/// What the store said to a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome<N> {
    /// Done, and known since `at`. For `wait` others may serve it.
    Committed { at: Moment, wait: Duration },
    /// The epoch was another one: this is the placement.
    Conflict(Option<At<N>>),
    /// It has certainly not been done and will not be.
    NotDone,
    /// There is no such site or node any more.
    Void,
    /// Nobody knows.
    Unknown,
}

impl<S: Ord + Clone, N: Ord + Clone> Default for Relocations<S, N> {
    fn default() -> Self {
        Self::new()
    }
}

/// All sites that need a place, as seen by one node.
#[derive(Debug)]
pub struct Relocations<S, N> {
    sites: BTreeMap<S, Site<N>>,
    /// One for each of `sites`: when it next needs [`Self::tick`].
    alarms: BTreeSet<(Moment, S)>,
    next: u64,
}

#[derive(Debug)]
struct Site<N> {
    waiters: Vec<Waiting>,
    /// The placement that did not do.
    seen: Option<u64>,
    from: Option<N>,
    target: Option<N>,
    step: Step,
    attempts: u32,
    alarm: Moment,
}

#[derive(Debug, Clone, Copy)]
struct Waiting {
    waiter: Waiter,
    seen: Option<u64>,
    until: Moment,
    /// Questions from this one on were asked after it had seen what it has seen.
    since: AskId,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Planning,
    /// Until then a promise forbids the commit.
    Held(Moment),
    Asking(AskId, Moment),
    Looking(AskId, Moment),
    /// Until then the store is left alone; then it is read.
    Pausing(Moment),
    /// Until then no node can take it; then that is looked at again.
    Nobody(Moment),
}

impl<S: Ord + Clone, N: Ord + Clone> Relocations<S, N> {
    pub const fn new() -> Self {
        Self { sites: BTreeMap::new(), alarms: BTreeSet::new(), next: 1 }
    }

    /// A request needs a place for the site; under epoch `seen` it got no answer. `known` is the placement in this node's copy.
    pub fn need(
        &mut self,
        now: Moment,
        site: S,
        waiter: Waiter,
        seen: Option<u64>,
        known: Option<At<N>>,
        effects: &mut Vec<Effect<S, N>>,
    ) {
        if let Some(At { node, epoch }) = known.as_ref()
            && seen.is_none_or(|seen| *epoch > seen)
        {
            let (node, epoch) = (node.clone(), *epoch);
            effects.push(Effect::Serve { waiter, site, node, epoch, committed: None });
            return;
        }
        let waiting = Waiting { waiter, seen, until: now + WAIT_LONGEST, since: AskId(self.next) };
        if let Some(under_way) = self.sites.get_mut(&site) {
            if under_way.waiters.len() >= WAITERS_MAX {
                effects.push(Effect::Refuse { waiter, site, why: Refused::TooMany });
                return;
            }
            under_way.waiters.push(waiting);
            self.alarm(&site);
            return;
        }
        if self.sites.len() >= SITES_MAX {
            effects.push(Effect::Refuse { waiter, site, why: Refused::TooMany });
            return;
        }
        let is_known = known.as_ref().map(|known| known.epoch) == seen;
        let begun = Site {
            waiters: vec![waiting],
            seen,
            from: known.filter(|_| is_known).map(|known| known.node),
            target: None,
            step: Step::Planning,
            attempts: 0,
            alarm: waiting.until,
        };
        self.alarms.insert((begun.alarm, site.clone()));
        self.sites.insert(site.clone(), begun);
        if is_known {
            self.plan(&site, effects);
        } else {
            // The request knows more than this node's copy: who has the site now is looked up.
            self.look(now, &site, effects);
        }
    }

    /// The planner's choice.
    pub fn planned(&mut self, now: Moment, site: &S, plan: Plan<N>, effects: &mut Vec<Effect<S, N>>) {
        let Some(state) = self.sites.get_mut(site).filter(|state| state.step == Step::Planning) else {
            return;
        };
        match plan {
            Plan::Node(node) => {
                state.target = Some(node);
                self.commit(now, site, effects);
            }
            Plan::Stay => self.stay(now, site, effects),
            Plan::NotNow => {
                state.step = Step::Nobody(now + LOOK_AGAIN);
                self.alarm(site);
            }
            Plan::Nowhere => self.give_up(site, Refused::Nowhere, effects),
        }
    }

    /// A node that nobody was sent to may take sites again: those that wait for one are planned anew.
    pub fn reconsider(&mut self, effects: &mut Vec<Effect<S, N>>) {
        let waits =
            |(site, state): (&S, &Site<N>)| matches!(state.step, Step::Nobody(_)).then(|| site.clone());
        let waiting: Vec<S> = self.sites.iter().filter_map(waits).collect();
        waiting.iter().for_each(|site| self.plan(site, effects));
    }

    /// The commit was not sent, as this forbids it.
    pub fn held(&mut self, now: Moment, site: &S, ask: AskId, why: Held) {
        let Some(state) = self.asking(site, ask) else { return };
        match why {
            Held::Promised(until) => {
                state.step = Step::Held(until);
                self.alarm(site);
            }
            // It may have said so by now, and the word be on its way.
            Held::NotIntroduced => self.pause(now, site),
        }
    }

    /// What became of a commit.
    pub fn stored(
        &mut self,
        now: Moment,
        site: &S,
        ask: AskId,
        outcome: Outcome<N>,
        effects: &mut Vec<Effect<S, N>>,
    ) {
        let Some(state) = self.asking(site, ask) else { return };
        match outcome {
            Outcome::Committed { at, wait } => {
                let node = state.target.clone().expect("a commit has a target");
                let epoch = state.seen.map_or(1, |seen| seen + 1);
                self.found(now, site, ask, &At { node, epoch }, Some((at, wait)), effects);
            }
            Outcome::Conflict(placement) => self.settle(now, site, ask, placement, effects),
            Outcome::Void => self.give_up(site, Refused::Nowhere, effects),
            Outcome::NotDone | Outcome::Unknown => self.pause(now, site),
        }
    }

    /// The placement as the store has it; `Err`: the store did not answer.
    pub fn looked(
        &mut self,
        now: Moment,
        site: &S,
        ask: AskId,
        placement: Result<Option<At<N>>, ()>,
        effects: &mut Vec<Effect<S, N>>,
    ) {
        let Some(state) = self.sites.get(site) else { return };
        if !matches!(state.step, Step::Looking(under_way, _) if under_way == ask) {
            return;
        }
        match placement {
            Ok(placement) => self.settle(now, site, ask, placement, effects),
            Err(()) => self.pause(now, site),
        }
    }

    /// When [`Self::tick`] is next needed.
    pub fn next_at(&self) -> Option<Moment> {
        self.alarms.first().map(|(at, _)| *at)
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Moment, effects: &mut Vec<Effect<S, N>>) {
        let due = self.alarms.iter().take_while(|(at, _)| *at <= now);
        let due: Vec<S> = due.map(|(_, site)| site.clone()).collect();
        for site in due {
            self.due(now, &site, effects);
        }
    }

    /// Sites that are looked after now.
    pub fn len(&self) -> usize {
        self.sites.len()
    }

    pub fn is_empty(&self) -> bool {
        self.sites.is_empty()
    }

    fn due(&mut self, now: Moment, site: &S, effects: &mut Vec<Effect<S, N>>) {
        let Some(state) = self.sites.get_mut(site) else { return };
        let why = match state.step {
            Step::Planning | Step::Held(_) => Refused::TooLate,
            Step::Nobody(_) => Refused::Nowhere,
            Step::Asking(..) | Step::Looking(..) | Step::Pausing(_) => Refused::StoreSilent,
        };
        state.waiters.retain(|waiting| {
            let is_over = waiting.until <= now;
            if is_over {
                effects.push(Effect::Refuse { waiter: waiting.waiter, site: site.clone(), why });
            }
            !is_over
        });
        if state.waiters.is_empty() {
            self.drop_site(site);
            return;
        }
        match state.step {
            Step::Held(until) if until <= now => self.commit(now, site, effects),
            Step::Pausing(until) if until <= now => self.look(now, site, effects),
            Step::Nobody(until) if until <= now => self.plan(site, effects),
            Step::Asking(_, until) | Step::Looking(_, until) if until <= now => self.pause(now, site),
            _ => self.alarm(site),
        }
    }

    fn plan(&mut self, site: &S, effects: &mut Vec<Effect<S, N>>) {
        let Some(state) = self.sites.get_mut(site) else { return };
        state.step = Step::Planning;
        state.target = None;
        effects.push(Effect::Plan { site: site.clone(), from: state.from.clone() });
        self.alarm(site);
    }

    fn commit(&mut self, now: Moment, site: &S, effects: &mut Vec<Effect<S, N>>) {
        let ask = self.ask();
        let Some(state) = self.sites.get_mut(site) else { return };
        state.attempts += 1;
        if state.attempts > ATTEMPTS_MAX {
            self.give_up(site, Refused::StoreSilent, effects);
            return;
        }
        state.step = Step::Asking(ask, now + ASK_LONGEST);
        let node = state.target.clone().expect("it was planned");
        let (from, expect) = (state.from.clone(), state.seen);
        effects.push(Effect::AskStore { site: site.clone(), ask, node, from, expect });
        self.alarm(site);
    }

    fn look(&mut self, now: Moment, site: &S, effects: &mut Vec<Effect<S, N>>) {
        let ask = self.ask();
        let Some(state) = self.sites.get_mut(site) else { return };
        state.step = Step::Looking(ask, now + ASK_LONGEST);
        effects.push(Effect::Look { site: site.clone(), ask });
        self.alarm(site);
    }

    /// The store did not answer: it is left alone for a while, then read.
    fn pause(&mut self, now: Moment, site: &S) {
        let Some(state) = self.sites.get_mut(site) else { return };
        let pause = (PAUSE * 2u32.pow(state.attempts.min(8))).min(PAUSE_LONGEST);
        state.step = Step::Pausing(now + pause);
        self.alarm(site);
    }

    /// The store has said what the placement is.
    fn settle(
        &mut self,
        now: Moment,
        site: &S,
        ask: AskId,
        placement: Option<At<N>>,
        effects: &mut Vec<Effect<S, N>>,
    ) {
        let Some(state) = self.sites.get_mut(site) else { return };
        match placement {
            // A lower epoch is that of a site that was dropped and made anew.
            Some(at) if state.seen != Some(at.epoch) => self.found(now, site, ask, &at, None, effects),
            placement => {
                state.seen = placement.as_ref().map(|at| at.epoch);
                state.from = placement.map(|at| at.node);
                self.plan(site, effects);
            }
        }
    }

    /// Answers all that have not seen this placement; for the others it goes on from there.
    fn found(
        &mut self,
        now: Moment,
        site: &S,
        ask: AskId,
        at: &At<N>,
        committed: Option<(Moment, Duration)>,
        effects: &mut Vec<Effect<S, N>>,
    ) {
        let Some(state) = self.sites.get_mut(site) else { return };
        state.waiters.retain(|waiting| {
            let is_older = waiting.since <= ask;
            let is_answer = waiting.seen.is_none_or(|seen| seen < at.epoch || is_older && seen != at.epoch);
            if is_answer {
                effects.push(Effect::Serve {
                    waiter: waiting.waiter,
                    site: site.clone(),
                    node: at.node.clone(),
                    epoch: at.epoch,
                    committed,
                });
            }
            !is_answer
        });
        if state.waiters.is_empty() {
            self.drop_site(site);
            return;
        }
        state.seen = Some(at.epoch);
        state.from = Some(at.node.clone());
        if state.waiters.iter().any(|waiting| waiting.seen > state.seen) {
            self.pause(now, site);
        } else {
            self.plan(site, effects);
        }
    }

    /// Those who got no answer under this placement may ask it once more.
    fn stay(&mut self, now: Moment, site: &S, effects: &mut Vec<Effect<S, N>>) {
        let Some(state) = self.sites.get_mut(site) else { return };
        let (Some(node), Some(epoch)) = (state.from.clone(), state.seen) else {
            self.give_up(site, Refused::Nowhere, effects);
            return;
        };
        state.waiters.retain(|waiting| {
            let Waiting { waiter, seen, .. } = *waiting;
            let is_answer = seen <= Some(epoch);
            if is_answer {
                let (site, node) = (site.clone(), node.clone());
                effects.push(Effect::Serve { waiter, site, node, epoch, committed: None });
            }
            !is_answer
        });
        if state.waiters.is_empty() {
            self.drop_site(site);
        } else {
            self.pause(now, site);
        }
    }

    fn give_up(&mut self, site: &S, why: Refused, effects: &mut Vec<Effect<S, N>>) {
        if let Some(state) = self.drop_site(site) {
            let refused = state.waiters.iter().map(|waiting| waiting.waiter);
            effects.extend(refused.map(|waiter| Effect::Refuse { waiter, site: site.clone(), why }));
        }
    }

    fn drop_site(&mut self, site: &S) -> Option<Site<N>> {
        let state = self.sites.remove(site)?;
        self.alarms.remove(&(state.alarm, site.clone()));
        Some(state)
    }

    fn asking(&mut self, site: &S, ask: AskId) -> Option<&mut Site<N>> {
        self.sites
            .get_mut(site)
            .filter(|state| matches!(state.step, Step::Asking(under_way, _) if under_way == ask))
    }

    fn ask(&mut self) -> AskId {
        let ask = AskId(self.next);
        self.next += 1;
        ask
    }

    /// Sets the site's alarm anew: its step's end, or the end of the first that waits.
    fn alarm(&mut self, site: &S) {
        let Some(state) = self.sites.get_mut(site) else { return };
        let step = match state.step {
            Step::Planning => None,
            Step::Held(until) | Step::Pausing(until) | Step::Nobody(until) => Some(until),
            Step::Asking(_, until) | Step::Looking(_, until) => Some(until),
        };
        let waiters = state.waiters.iter().map(|waiting| waiting.until).min();
        let next = step.into_iter().chain(waiters).min().unwrap_or_default();
        if next != state.alarm {
            self.alarms.remove(&(state.alarm, site.clone()));
            state.alarm = next;
            self.alarms.insert((next, site.clone()));
        }
    }
}
