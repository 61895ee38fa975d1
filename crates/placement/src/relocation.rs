//! Finding a site its next node, once for all requests that wait for it.
//!
//! Each site that needs a place goes through the same steps: choose a node, have the store agree under the next epoch, wake there,
//! let the requests go on. Requests that come meanwhile join. Every step has a bound and every request an end: an answer, or a
//! refusal that says why. A node is given only so many sites at once; further ones stand in line for it.
//!
//! A commit of which nothing was heard may still have happened, or happen later. It is looked at before it is tried again, and
//! tried again under the same epoch only, so that of all attempts one succeeds.
//!
//! Not here: the choice (`planner`), whether a commit may be sent (`fence`), the store and the records (`nagaya-cmdb`).

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::Moment;
use crate::fence::{self, Before, Held};

/// Longest that a request waits for a place.
pub const WAIT_LONGEST: Duration = Duration::from_secs(10);

/// Requests that wait for one site. Admission lets fewer through; this is the backstop.
pub const WAITERS_MAX: usize = 4096;

/// Sites that are looked after at once.
pub const SITES_MAX: usize = 16_384;

/// Commits for one site before it is given up. Conflicts with others end sooner, as they are answers.
pub const ATTEMPTS_MAX: u32 = 32;

/// Pause after the store did not answer; doubled up to the longest.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_LONGEST: Duration = Duration::from_millis(500);

/// After this a question to the store counts as not answered.
pub const ASK_LONGEST: Duration = Duration::from_secs(2);

/// Sites that may be on their way to one node, and how long one counts if nobody says that it is awake there.
pub const AT_ONCE: usize = 16;
const ON_ITS_WAY_LONGEST: Duration = Duration::from_secs(2);

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
    /// [`fence::Voucher::begin`] must agree, if `from` is another node; if it does not: [`Relocations::held`]. Answered by
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
    /// It may begin to wake there; no request goes into it before its [`Effect::Serve`] says so.
    Wake {
        site: S,
        node: N,
        epoch: u64,
    },
    /// The request goes on there. `committed` is there if this node has just committed it: when, and who had it before; how long ago
    /// that was goes with the request if it is forwarded ([`fence::Arrivals::placed`]). `not_before` follows from it.
    Serve {
        waiter: Waiter,
        site: S,
        node: N,
        epoch: u64,
        committed: Option<(Moment, Before)>,
        not_before: Option<Moment>,
    },
    Refuse {
        waiter: Waiter,
        site: S,
        why: Refused,
    },
}

/// Why a request got no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refused {
    /// No node can take the site.
    Nowhere,
    /// This node may not take sites from the old one ([`Held::NotIntroduced`]); another one may.
    Stranger,
    /// The store did not agree or disagree in time.
    StoreSilent,
    /// A promise to the old node, or the line for the new one, lasted longer than the request may wait.
    TooLate,
    /// More wait already than may.
    TooMany,
}

/// What the store said to a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome<N> {
    /// Done, and known since `at`.
    Committed { at: Moment, before: Before },
    /// The epoch was another one: this is the placement.
    Conflict(Option<At<N>>),
    /// It has certainly not been done and will not be.
    NotDone,
    /// Nobody knows.
    Unknown,
}

/// All sites that need a place, as seen by one node.
#[derive(Debug)]
pub struct Relocations<S, N> {
    term: Duration,
    sites: BTreeMap<S, Site<N>>,
    /// One for each of `sites`: when it next needs [`Self::tick`].
    alarms: BTreeSet<(Moment, S)>,
    /// Sites on their way to each node, until when they count.
    arriving: BTreeMap<N, BTreeMap<S, Moment>>,
    lines: BTreeMap<N, VecDeque<S>>,
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
    InLine,
    /// Until then a promise forbids the commit.
    Held(Moment),
    Asking(AskId, Moment),
    Looking(AskId, Moment),
    /// Until then the store is left alone; then it is read.
    Pausing(Moment),
}

impl<S: Ord + Clone, N: Ord + Clone> Relocations<S, N> {
    pub const fn new(term: Duration) -> Self {
        Self {
            term,
            sites: BTreeMap::new(),
            alarms: BTreeSet::new(),
            arriving: BTreeMap::new(),
            lines: BTreeMap::new(),
            next: 1,
        }
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
            effects.push(Effect::Serve { waiter, site, node, epoch, committed: None, not_before: None });
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

    /// The planner's choice; `None`: no node can take it.
    pub fn planned(&mut self, now: Moment, site: &S, node: Option<N>, effects: &mut Vec<Effect<S, N>>) {
        let Some(state) = self.sites.get_mut(site).filter(|state| state.step == Step::Planning) else {
            return;
        };
        let Some(node) = node else {
            self.give_up(site, Refused::Nowhere, effects);
            return;
        };
        state.target = Some(node.clone());
        let arriving = self.arriving.get(&node).map_or(0, BTreeMap::len);
        if arriving >= AT_ONCE {
            state.step = Step::InLine;
            self.lines.entry(node).or_default().push_back(site.clone());
            self.alarm(site);
        } else {
            self.commit(now, site, effects);
        }
    }

    /// The commit was not sent, as this forbids it.
    pub fn held(&mut self, now: Moment, site: &S, ask: AskId, why: Held, effects: &mut Vec<Effect<S, N>>) {
        let Some(state) = self.asking(site, ask) else { return };
        match why {
            Held::Promised(until) => {
                state.step = Step::Held(until);
                self.leave_way(now, site, effects);
                self.alarm(site);
            }
            Held::NotIntroduced => {
                let node = state.target.clone().expect("a commit has a target");
                self.give_up(site, Refused::Stranger, effects);
                self.woken(now, site, &node, effects);
            }
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
            Outcome::Committed { at, before } => {
                let node = state.target.clone().expect("a commit has a target");
                let epoch = state.seen.map_or(1, |seen| seen + 1);
                effects.push(Effect::Wake { site: site.clone(), node: node.clone(), epoch });
                self.found(now, site, ask, &At { node, epoch }, Some((at, before)), effects);
            }
            Outcome::Conflict(placement) => {
                self.leave_way(now, site, effects);
                self.settle(now, site, ask, placement, effects);
            }
            Outcome::NotDone | Outcome::Unknown => {
                self.leave_way(now, site, effects);
                self.pause(now, site, effects);
            }
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
            Err(()) => self.pause(now, site, effects),
        }
    }

    /// The site is awake on the node, or will not be: another one may be on its way there. Whoever does not learn of it may call this
    /// after the commit; without a call it counts for a while.
    pub fn woken(&mut self, now: Moment, site: &S, node: &N, effects: &mut Vec<Effect<S, N>>) {
        if let Some(arriving) = self.arriving.get_mut(node) {
            arriving.remove(site);
        }
        self.next_in_line(now, node, effects);
    }

    /// The request has ended by itself, e.g. because its client left.
    pub fn cancel(&mut self, site: &S, waiter: Waiter) {
        if let Some(state) = self.sites.get_mut(site) {
            state.waiters.retain(|waiting| waiting.waiter != waiter);
        }
    }

    /// When [`Self::tick`] is next needed.
    pub fn next_at(&self) -> Option<Moment> {
        let arrivals = self.lines.keys().filter_map(|node| self.arriving.get(node)?.values().min());
        let site = self.alarms.first().map(|(at, _)| *at);
        site.into_iter().chain(arrivals.copied()).min()
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Moment, effects: &mut Vec<Effect<S, N>>) {
        let due = self.alarms.iter().take_while(|(at, _)| *at <= now);
        let due: Vec<S> = due.map(|(_, site)| site.clone()).collect();
        for site in due {
            self.due(now, &site, effects);
        }
        let lines: Vec<N> = self.lines.keys().cloned().collect();
        for node in lines {
            if let Some(arriving) = self.arriving.get_mut(&node) {
                arriving.retain(|_, until| *until > now);
            }
            self.next_in_line(now, &node, effects);
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
            Step::Planning | Step::InLine | Step::Held(_) => Refused::TooLate,
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
            self.forget(now, site, effects);
            return;
        }
        match state.step {
            Step::Held(until) if until <= now => self.commit(now, site, effects),
            Step::Pausing(until) if until <= now => self.look(now, site, effects),
            Step::Asking(_, until) if until <= now => {
                self.leave_way(now, site, effects);
                self.pause(now, site, effects);
            }
            Step::Looking(_, until) if until <= now => self.pause(now, site, effects),
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
        self.arriving.entry(node.clone()).or_default().insert(site.clone(), now + ON_ITS_WAY_LONGEST);
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
    fn pause(&mut self, now: Moment, site: &S, effects: &mut Vec<Effect<S, N>>) {
        let Some(state) = self.sites.get_mut(site) else { return };
        if state.waiters.is_empty() {
            self.forget(now, site, effects);
            return;
        }
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
        committed: Option<(Moment, Before)>,
        effects: &mut Vec<Effect<S, N>>,
    ) {
        let term = self.term;
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
                    not_before: committed.map(|(at, before)| fence::serve_from(at, before, term)),
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
            self.pause(now, site, effects);
        } else {
            self.plan(site, effects);
        }
    }

    fn give_up(&mut self, site: &S, why: Refused, effects: &mut Vec<Effect<S, N>>) {
        if let Some(state) = self.drop_site(site) {
            let refused = state.waiters.iter().map(|waiting| waiting.waiter);
            effects.extend(refused.map(|waiter| Effect::Refuse { waiter, site: site.clone(), why }));
        }
    }

    fn forget(&mut self, now: Moment, site: &S, effects: &mut Vec<Effect<S, N>>) {
        if let Some(node) = self.drop_site(site).and_then(|state| state.target) {
            self.woken(now, site, &node, effects);
        }
    }

    fn drop_site(&mut self, site: &S) -> Option<Site<N>> {
        let state = self.sites.remove(site)?;
        self.alarms.remove(&(state.alarm, site.clone()));
        if let Some(line) = state.target.as_ref().and_then(|node| self.lines.get_mut(node)) {
            line.retain(|other| other != site);
        }
        Some(state)
    }

    /// The site is not on its way to its target any more.
    fn leave_way(&mut self, now: Moment, site: &S, effects: &mut Vec<Effect<S, N>>) {
        let Some(node) = self.sites.get(site).and_then(|state| state.target.clone()) else { return };
        self.woken(now, site, &node, effects);
    }

    fn next_in_line(&mut self, now: Moment, node: &N, effects: &mut Vec<Effect<S, N>>) {
        while self.arriving.get(node).map_or(0, BTreeMap::len) < AT_ONCE {
            let Some(site) = self.lines.get_mut(node).and_then(VecDeque::pop_front) else { break };
            self.commit(now, &site, effects);
        }
        if self.lines.get(node).is_some_and(VecDeque::is_empty) {
            self.lines.remove(node);
        }
        if self.arriving.get(node).is_some_and(BTreeMap::is_empty) {
            self.arriving.remove(node);
        }
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
            Step::Planning | Step::InLine => None,
            Step::Held(until) | Step::Pausing(until) => Some(until),
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
