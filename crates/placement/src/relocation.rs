//! Finds the next node of a site, once for all requests that wait for it.
//!
//! Each site that needs a placement goes through the same steps. A node is chosen, the store agrees
//! under the next epoch, and the requests continue there. Requests that come meanwhile join. Every
//! step is bounded, and every request ends with a response, or with a refusal that has a reason.
//! Each node decides itself how many sites it wakes at once.
//!
//! A commit without a reply may have happened, or may happen later. The placement is read before
//! another attempt. A new attempt uses the same epoch only, so that one of all attempts succeeds.
//!
//! Not here: the choice (`planner`), whether a commit may be sent (`fence`), the store and the
//! records (`nagaya-records`).

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::Moment;
use crate::lease::MoveBlocked;

/// Longest time that a request waits for a placement. It covers a promise to the old node, an
/// election in the store, and then a queue of many sites. It is less than the edges' wait for their
/// supervisor, so that they learn the reason.
pub const WAIT_LONGEST: Duration = Duration::from_secs(8);

/// Requests that wait for one site. Admission lets fewer through; this is a safety limit.
pub const WAITERS_MAX: usize = 4096;

/// Sites that are relocated at once.
pub const SITES_MAX: usize = 16_384;

/// Interval at which a site without a possible node is planned again, unless
/// [`RelocationMachine::reconsider`] comes sooner.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Commits for one site before it is given up. Conflicts with others end sooner, as they are
/// replies.
pub const ATTEMPTS_MAX: u32 = 32;

/// Pause after the store did not reply; it doubles up to the longest.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_LONGEST: Duration = Duration::from_millis(500);

/// Time after which a query to the store counts as not answered.
pub const ASK_LONGEST: Duration = Duration::from_secs(1);

/// Where a site is placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PlacedAt<N> {
    pub node: N,
    pub epoch: u64,
}

/// A request that waits, by the caller's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaiterId(pub u64);

/// A query to the store. Numbers are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AskId(pub u64);

/// An action for the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RelocationEffect<S, N> {
    /// Choose a node other than `from`; the result goes to [`RelocationMachine::note_plan`].
    Plan {
        site: S,
        from: Option<N>,
    },
    /// Commit `node` under the epoch after `expect` if the placement's epoch is `expect` (`None` if
    /// there is none). If `from` is another node, [`crate::lease::VouchPromises::begin`] must agree
    /// before the commit is sent. If it does not, [`RelocationMachine::note_blocked`] is called.
    /// The result goes to [`RelocationMachine::note_outcome`].
    AskStore {
        site: S,
        ask: AskId,
        node: N,
        from: Option<N>,
        expect: Option<u64>,
    },
    /// Read the placement, linearizable; the result goes to [`RelocationMachine::note_found`].
    Look {
        site: S,
        ask: AskId,
    },
    /// The request continues there. `committed` is set if this node has just committed it: when,
    /// and how long others may serve it. A forwarded request can carry how long ago that was
    /// ([`crate::lease::Arrivals::placed`]).
    Serve {
        waiter: WaiterId,
        site: S,
        node: N,
        epoch: u64,
        committed: Option<(Moment, Duration)>,
    },
    Refuse {
        waiter: WaiterId,
        site: S,
        why: PlacementRefusal,
    },
}

/// The planner's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanResult<N> {
    Node(N),
    /// The node to be left is alive after all: the site stays, under its present epoch.
    Stay,
    /// No node can take it now, but one may soon: requests wait for that.
    NotNow,
    Nowhere,
}

/// Why a request got no placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PlacementRefusal {
    /// No node can take the site.
    Nowhere,
    /// The store did not agree or disagree in time. Or the old node did not say that it knows this
    /// one.
    StoreSilent,
    /// A promise to the old node lasted longer than the request may wait.
    TooLate,
    /// Too many requests wait already.
    TooMany,
}

/// The store's reply to a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommitOutcome<N> {
    /// It is done, and known since `at`. Others may serve the site for `wait`.
    Committed { at: Moment, wait: Duration },
    /// The epoch was different: this is the placement.
    Conflict(Option<PlacedAt<N>>),
    /// It was certainly not done and never will be.
    NotDone,
    /// The site or node no longer exists.
    Void,
    /// The outcome is unknown.
    Unknown,
}

impl<S: Ord + Clone, N: Ord + Clone> Default for RelocationMachine<S, N> {
    fn default() -> Self {
        Self::new()
    }
}

/// All sites that need a placement, as seen by one node.
#[derive(Debug)]
pub struct RelocationMachine<S, N> {
    sites: BTreeMap<S, PendingSite<N>>,
    /// One for each of `sites`: when it next needs [`Self::tick`].
    alarms: BTreeSet<(Moment, S)>,
    next: u64,
}

#[derive(Debug)]
struct PendingSite<N> {
    waiters: Vec<WaitingRequest>,
    /// The placement that did not work.
    seen: Option<u64>,
    from: Option<N>,
    target: Option<N>,
    step: RelocationStep,
    attempts: u32,
    alarm: Moment,
}

#[derive(Debug, Clone, Copy)]
struct WaitingRequest {
    waiter: WaiterId,
    seen: Option<u64>,
    until: Moment,
    /// Queries from this one on were sent after it had seen that placement.
    since: AskId,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RelocationStep {
    Planning,
    /// A promise forbids the commit until then.
    Held(Moment),
    Asking(AskId, Moment),
    Looking(AskId, Moment),
    /// The store is left alone until then; then it is read.
    Pausing(Moment),
    /// No node can take it until then; then it is planned again.
    Nobody(Moment),
}

impl<S: Ord + Clone, N: Ord + Clone> RelocationMachine<S, N> {
    pub const fn new() -> Self {
        Self { sites: BTreeMap::new(), alarms: BTreeSet::new(), next: 1 }
    }

    /// Adds a request that needs a placement for the site, as epoch `seen` gave no response.
    /// `known` is the placement in this node's copy.
    pub fn add_waiter(
        &mut self,
        now: Moment,
        site: S,
        waiter: WaiterId,
        seen: Option<u64>,
        known: Option<PlacedAt<N>>,
        effects: &mut Vec<RelocationEffect<S, N>>,
    ) {
        if let Some(PlacedAt { node, epoch }) = known.as_ref()
            && seen.is_none_or(|seen| *epoch > seen)
        {
            let node = node.clone();
            let epoch = *epoch;
            effects.push(RelocationEffect::Serve { waiter, site, node, epoch, committed: None });
            return;
        }
        let waiting = WaitingRequest { waiter, seen, until: now + WAIT_LONGEST, since: AskId(self.next) };
        if let Some(under_way) = self.sites.get_mut(&site) {
            if under_way.waiters.len() >= WAITERS_MAX {
                effects.push(RelocationEffect::Refuse { waiter, site, why: PlacementRefusal::TooMany });
                return;
            }
            under_way.waiters.push(waiting);
            self.alarm(&site);
            return;
        }
        if self.sites.len() >= SITES_MAX {
            effects.push(RelocationEffect::Refuse { waiter, site, why: PlacementRefusal::TooMany });
            return;
        }
        let is_known = known.as_ref().map(|known| known.epoch) == seen;
        let begun = PendingSite {
            waiters: vec![waiting],
            seen,
            from: known.filter(|_| is_known).map(|known| known.node),
            target: None,
            step: RelocationStep::Planning,
            attempts: 0,
            alarm: waiting.until,
        };
        self.alarms.insert((begun.alarm, site.clone()));
        self.sites.insert(site.clone(), begun);
        if is_known {
            self.plan(&site, effects);
        } else {
            // The request knows more than this node's copy, so the placement is read from the
            // store.
            self.look(now, &site, effects);
        }
    }

    /// Handles the planner's choice.
    pub fn note_plan(
        &mut self,
        now: Moment,
        site: &S,
        plan: PlanResult<N>,
        effects: &mut Vec<RelocationEffect<S, N>>,
    ) {
        let Some(state) = self.sites.get_mut(site).filter(|state| state.step == RelocationStep::Planning)
        else {
            return;
        };
        match plan {
            PlanResult::Node(node) => {
                state.target = Some(node);
                self.commit(now, site, effects);
            }
            PlanResult::Stay => self.stay(now, site, effects),
            PlanResult::NotNow => {
                state.step = RelocationStep::Nobody(now + LOOK_AGAIN);
                self.alarm(site);
            }
            PlanResult::Nowhere => self.give_up(site, PlacementRefusal::Nowhere, effects),
        }
    }

    /// Plans waiting sites again, because a node that got no requests may take sites again.
    pub fn reconsider(&mut self, effects: &mut Vec<RelocationEffect<S, N>>) {
        let waits = |(site, state): (&S, &PendingSite<N>)| {
            matches!(state.step, RelocationStep::Nobody(_)).then(|| site.clone())
        };
        let waiting: Vec<S> = self.sites.iter().filter_map(waits).collect();
        waiting.iter().for_each(|site| self.plan(site, effects));
    }

    /// Handles a commit that was not sent, for this reason.
    pub fn note_blocked(&mut self, now: Moment, site: &S, ask: AskId, why: MoveBlocked) {
        let Some(state) = self.asking(site, ask) else { return };
        match why {
            MoveBlocked::Promised(until) => {
                state.step = RelocationStep::Held(until);
                self.alarm(site);
            }
            // It may have said so by now, and the message may be on its way.
            MoveBlocked::NotIntroduced => self.pause(now, site),
        }
    }

    /// Handles the outcome of a commit.
    pub fn note_outcome(
        &mut self,
        now: Moment,
        site: &S,
        ask: AskId,
        outcome: CommitOutcome<N>,
        effects: &mut Vec<RelocationEffect<S, N>>,
    ) {
        let Some(state) = self.asking(site, ask) else { return };
        match outcome {
            CommitOutcome::Committed { at, wait } => {
                let node = state.target.clone().expect("a commit has a target");
                let epoch = state.seen.map_or(1, |seen| seen + 1);
                self.found(now, site, ask, &PlacedAt { node, epoch }, Some((at, wait)), effects);
            }
            CommitOutcome::Conflict(placement) => self.settle(now, site, ask, placement, effects),
            CommitOutcome::Void => self.give_up(site, PlacementRefusal::Nowhere, effects),
            CommitOutcome::NotDone | CommitOutcome::Unknown => self.pause(now, site),
        }
    }

    /// Handles the placement as read from the store; `Err` if the store did not reply.
    pub fn note_found(
        &mut self,
        now: Moment,
        site: &S,
        ask: AskId,
        placement: Result<Option<PlacedAt<N>>, ()>,
        effects: &mut Vec<RelocationEffect<S, N>>,
    ) {
        let Some(state) = self.sites.get(site) else { return };
        if !matches!(state.step, RelocationStep::Looking(under_way, _) if under_way == ask) {
            return;
        }
        match placement {
            Ok(placement) => self.settle(now, site, ask, placement, effects),
            Err(()) => self.pause(now, site),
        }
    }

    /// Returns when [`Self::tick`] is next needed.
    pub fn next_at(&self) -> Option<Moment> {
        self.alarms.first().map(|(at, _)| *at)
    }

    /// Handles the passing of time.
    pub fn tick(&mut self, now: Moment, effects: &mut Vec<RelocationEffect<S, N>>) {
        let due = self.alarms.iter().take_while(|(at, _)| *at <= now);
        let due: Vec<S> = due.map(|(_, site)| site.clone()).collect();
        for site in due {
            self.due(now, &site, effects);
        }
    }

    /// Returns the number of sites in relocation.
    pub fn len(&self) -> usize {
        self.sites.len()
    }

    pub fn is_empty(&self) -> bool {
        self.sites.is_empty()
    }

    fn due(&mut self, now: Moment, site: &S, effects: &mut Vec<RelocationEffect<S, N>>) {
        let Some(state) = self.sites.get_mut(site) else { return };
        let why = match state.step {
            RelocationStep::Planning | RelocationStep::Held(_) => PlacementRefusal::TooLate,
            RelocationStep::Nobody(_) => PlacementRefusal::Nowhere,
            RelocationStep::Asking(..) | RelocationStep::Looking(..) | RelocationStep::Pausing(_) => {
                PlacementRefusal::StoreSilent
            }
        };
        state.waiters.retain(|waiting| {
            let is_over = waiting.until <= now;
            if is_over {
                effects.push(RelocationEffect::Refuse { waiter: waiting.waiter, site: site.clone(), why });
            }
            !is_over
        });
        if state.waiters.is_empty() {
            self.drop_site(site);
            return;
        }
        match state.step {
            RelocationStep::Held(until) if until <= now => self.commit(now, site, effects),
            RelocationStep::Pausing(until) if until <= now => self.look(now, site, effects),
            RelocationStep::Nobody(until) if until <= now => self.plan(site, effects),
            RelocationStep::Asking(_, until) | RelocationStep::Looking(_, until) if until <= now => {
                self.pause(now, site)
            }
            _ => self.alarm(site),
        }
    }

    fn plan(&mut self, site: &S, effects: &mut Vec<RelocationEffect<S, N>>) {
        let Some(state) = self.sites.get_mut(site) else { return };
        state.step = RelocationStep::Planning;
        state.target = None;
        effects.push(RelocationEffect::Plan { site: site.clone(), from: state.from.clone() });
        self.alarm(site);
    }

    fn commit(&mut self, now: Moment, site: &S, effects: &mut Vec<RelocationEffect<S, N>>) {
        let ask = self.ask();
        let Some(state) = self.sites.get_mut(site) else { return };
        state.attempts += 1;
        if state.attempts > ATTEMPTS_MAX {
            self.give_up(site, PlacementRefusal::StoreSilent, effects);
            return;
        }
        state.step = RelocationStep::Asking(ask, now + ASK_LONGEST);
        let node = state.target.clone().expect("it was planned");
        let from = state.from.clone();
        let expect = state.seen;
        effects.push(RelocationEffect::AskStore { site: site.clone(), ask, node, from, expect });
        self.alarm(site);
    }

    fn look(&mut self, now: Moment, site: &S, effects: &mut Vec<RelocationEffect<S, N>>) {
        let ask = self.ask();
        let Some(state) = self.sites.get_mut(site) else { return };
        state.step = RelocationStep::Looking(ask, now + ASK_LONGEST);
        effects.push(RelocationEffect::Look { site: site.clone(), ask });
        self.alarm(site);
    }

    /// Leaves the store alone for a while because it did not reply, then reads it.
    fn pause(&mut self, now: Moment, site: &S) {
        let Some(state) = self.sites.get_mut(site) else { return };
        let pause = (PAUSE * 2u32.pow(state.attempts.min(8))).min(PAUSE_LONGEST);
        state.step = RelocationStep::Pausing(now + pause);
        self.alarm(site);
    }

    /// Handles the placement that the store reported.
    fn settle(
        &mut self,
        now: Moment,
        site: &S,
        ask: AskId,
        placement: Option<PlacedAt<N>>,
        effects: &mut Vec<RelocationEffect<S, N>>,
    ) {
        let Some(state) = self.sites.get_mut(site) else { return };
        match placement {
            // A lower epoch is that of a site that was removed and created again.
            Some(at) if state.seen != Some(at.epoch) => self.found(now, site, ask, &at, None, effects),
            placement => {
                state.seen = placement.as_ref().map(|at| at.epoch);
                state.from = placement.map(|at| at.node);
                self.plan(site, effects);
            }
        }
    }

    /// Answers all requests that have not seen this placement. For the others, relocation continues
    /// from there.
    fn found(
        &mut self,
        now: Moment,
        site: &S,
        ask: AskId,
        at: &PlacedAt<N>,
        committed: Option<(Moment, Duration)>,
        effects: &mut Vec<RelocationEffect<S, N>>,
    ) {
        let Some(state) = self.sites.get_mut(site) else { return };
        state.waiters.retain(|waiting| {
            let is_older = waiting.since <= ask;
            let is_answer = waiting.seen.is_none_or(|seen| seen < at.epoch || is_older && seen != at.epoch);
            if is_answer {
                effects.push(RelocationEffect::Serve {
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

    /// Lets the requests that got no response under this placement try it once more.
    fn stay(&mut self, now: Moment, site: &S, effects: &mut Vec<RelocationEffect<S, N>>) {
        let Some(state) = self.sites.get_mut(site) else { return };
        let (Some(node), Some(epoch)) = (state.from.clone(), state.seen) else {
            self.give_up(site, PlacementRefusal::Nowhere, effects);
            return;
        };
        state.waiters.retain(|waiting| {
            let WaitingRequest { waiter, seen, .. } = *waiting;
            let is_answer = seen <= Some(epoch);
            if is_answer {
                let site = site.clone();
                let node = node.clone();
                effects.push(RelocationEffect::Serve { waiter, site, node, epoch, committed: None });
            }
            !is_answer
        });
        if state.waiters.is_empty() {
            self.drop_site(site);
        } else {
            self.pause(now, site);
        }
    }

    fn give_up(&mut self, site: &S, why: PlacementRefusal, effects: &mut Vec<RelocationEffect<S, N>>) {
        if let Some(state) = self.drop_site(site) {
            let refused = state.waiters.iter().map(|waiting| waiting.waiter);
            effects.extend(refused.map(|waiter| RelocationEffect::Refuse {
                waiter,
                site: site.clone(),
                why,
            }));
        }
    }

    fn drop_site(&mut self, site: &S) -> Option<PendingSite<N>> {
        let state = self.sites.remove(site)?;
        self.alarms.remove(&(state.alarm, site.clone()));
        Some(state)
    }

    fn asking(&mut self, site: &S, ask: AskId) -> Option<&mut PendingSite<N>> {
        self.sites
            .get_mut(site)
            .filter(|state| matches!(state.step, RelocationStep::Asking(under_way, _) if under_way == ask))
    }

    fn ask(&mut self) -> AskId {
        let ask = AskId(self.next);
        self.next += 1;
        ask
    }

    /// Sets the site's alarm: the end of its step, or of its first waiting request.
    fn alarm(&mut self, site: &S) {
        let Some(state) = self.sites.get_mut(site) else { return };
        let step = match state.step {
            RelocationStep::Planning => None,
            RelocationStep::Held(until) | RelocationStep::Pausing(until) | RelocationStep::Nobody(until) => {
                Some(until)
            }
            RelocationStep::Asking(_, until) | RelocationStep::Looking(_, until) => Some(until),
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
