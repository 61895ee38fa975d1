//! A simulated node: the real state machines, and between them the work of supervisor and edge
//! without sockets and timers.
//!
//! Not here: when messages arrive (`world`), the invariants (`observer`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nagaya_placement::Moment;
use nagaya_placement::lease::{
    LeaseHolder, RevisionAges, ServeFrom, TERM, VOUCH_TERM, VouchPromises, max_elapsed,
};
use nagaya_placement::liveness::{FRESH, PeerState, ProbePlan, ProbeResult};
use nagaya_placement::planner::{self, NodeCandidate, SiteDemand};
use nagaya_placement::relocation::{
    CommitOutcome, PlacedAt, PlanResult, RelocationEffect, RelocationMachine, WaiterId,
};
use nagaya_placement::suspect_marks::{self, SuspectMarks};

use crate::observer::Served;
use crate::store::{ChangeResult, StoreChange};
use crate::wire::{
    ForwardedRequest, FoundInstead, NodeEvent, NodeId, RequestId, SiteId, SiteParts, StoreAsk, StoreSays,
};
use crate::world::Environment;

/// Places to which a request is sent before it is refused.
const ATTEMPTS_MAX: u32 = 12;
/// Longest time for which a request is held without a lease, or with a copy that lags. Then it is
/// given back.
const HELD_LONGEST: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// From an image.
const WAKE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(150));
/// Time from learning of a removal until the node deletes the site's placement: longer than any
/// lease.
const LET_GO_AFTER: Duration = Duration::from_secs(4);
const LET_GO_AGAIN: Duration = Duration::from_secs(1);
/// Lease terms of the first nodes, in turn; in large clusters all others have the usual one.
const TERMS: [Duration; 3] = [TERM, Duration::from_millis(150), Duration::from_millis(900)];
const TERM_LONGEST: Duration = TERMS[2];
const DIFFERENT: NodeId = 6;
/// Interval at which a record is written again if it is unknown whether it was written.
const LIST_AGAIN: Duration = Duration::from_millis(50);
/// Percentage of restarting nodes that are an older build, if there are such.
const OLDER: u64 = 60;
const GIB: u64 = 1 << 30;
/// Percentage of reads of the store that are followed by a change of a site's nodes, if several are
/// allowed.
const SHIFTS: u64 = 40;
/// From this number on, no request waits for the outcome of a relocation: requests have lower ones.
const NOBODY: u64 = 1 << 40;

const fn nanos(time: Duration) -> u64 {
    time.as_nanos() as u64
}

/// Returns the lease term of a node.
pub(crate) const fn term(node: NodeId) -> Duration {
    if node < DIFFERENT { TERMS[node as usize % TERMS.len()] } else { TERM }
}

/// Preconditions of a commit: how long others may serve the site, the mark, and the placement's
/// latest allowed revision.
type Counted = (Duration, Option<u64>, Option<u64>);

type Effects = Vec<RelocationEffect<SiteId, NodeId>>;

#[derive(Debug)]
pub(crate) struct SimNode {
    id: NodeId,
    others: BTreeSet<NodeId>,
    holder: LeaseHolder<NodeId>,
    voucher: VouchPromises<NodeId>,
    arrivals: ServeFrom<SiteId>,
    relocations: RelocationMachine<SiteId, NodeId>,
    peers: BTreeMap<NodeId, PeerState>,
    doubts: SuspectMarks<NodeId>,
    ages: RevisionAges,
    /// Sites whose commit has failed because of a precondition: the next has none.
    otherwise: BTreeSet<SiteId>,
    /// Its record is written, and whether it honors marks.
    is_listed: bool,
    heeds_marks: bool,
    /// Revision of the copy of the records. It is on disk.
    applied: u64,
    /// Sites that it has given up itself, with the last epoch. On disk, too. Older records that
    /// repeat this epoch or an earlier one do not undo it.
    given_up: BTreeMap<SiteId, Served>,
    /// Instances: their epoch, and the real time from which on they answer.
    instances: BTreeMap<SiteId, (u64, u64)>,
    /// Requests that were forwarded and not answered.
    flights: BTreeMap<NodeId, Vec<ForwardedRequest>>,
    /// How often each peer had been started when it was last heard from.
    lives: BTreeMap<NodeId, u32>,
    /// The one valid timer of each peer.
    probe_times: BTreeMap<NodeId, u64>,
    next_tick: u64,
    unsettled: Vec<UnsettledCommit>,
    /// Of several nodes that have a site, the one that did not serve it last.
    lost: BTreeMap<SiteId, NodeId>,
    nobodies: u64,
}

/// A commit with an unknown outcome: the epoch that it replaces, and the node that loses the site.
#[derive(Debug)]
struct UnsettledCommit {
    site: SiteId,
    /// How often the site's placement was forgotten before.
    life: u32,
    expect: Option<u64>,
    from: NodeId,
}

impl SimNode {
    pub fn new(id: NodeId, nodes: NodeId, applied: u64) -> Self {
        Self {
            id,
            others: (0..nodes).filter(|other| *other != id).collect(),
            holder: LeaseHolder::new(term(id), VOUCH_TERM, applied),
            voucher: VouchPromises::new(Moment::default(), term(id), VOUCH_TERM),
            arrivals: ServeFrom::default(),
            relocations: RelocationMachine::new(),
            peers: BTreeMap::new(),
            doubts: SuspectMarks::default(),
            ages: RevisionAges::default(),
            otherwise: BTreeSet::new(),
            is_listed: false,
            heeds_marks: true,
            applied,
            given_up: BTreeMap::new(),
            instances: BTreeMap::new(),
            flights: BTreeMap::new(),
            lives: BTreeMap::new(),
            probe_times: BTreeMap::new(),
            next_tick: u64::MAX,
            unsettled: Vec::new(),
            lost: BTreeMap::new(),
            nobodies: NOBODY,
        }
    }

    pub fn applied(&self) -> u64 {
        self.applied
    }

    pub fn happens(&mut self, what: NodeEvent, sky: &mut Environment) {
        let now = sky.local(self.id);
        match what {
            NodeEvent::Start => self.start(sky),
            NodeEvent::Request(request) => self.route(request, sky),
            NodeEvent::Work(work) => self.work(work, sky),
            NodeEvent::Renew => self.renew(sky),
            NodeEvent::List => self.list(sky),
            NodeEvent::LetGo { site, removed_at } => self.let_go(site, removed_at, sky),
            NodeEvent::Tick => {
                self.next_tick = u64::MAX;
                let mut effects = Vec::new();
                self.relocations.tick(now, &mut effects);
                self.carry_out(effects, sky);
            }
            NodeEvent::ProbeTime(peer) => self.probe_time(peer, sky),
            NodeEvent::Probe { from, probe, sent_at } => {
                let life = sky.life(self.id);
                sky.send(self.id, from, NodeEvent::ProbeAnswer { from: self.id, probe, sent_at, life });
            }
            NodeEvent::ProbeAnswer { from, probe, sent_at, life } => {
                self.peer(from).answered(now, probe, sent_at);
                if self.lives.insert(from, life).is_some_and(|before| before != life) {
                    self.flights_failed(from, sky);
                }
            }
            NodeEvent::ProbeRefused { from, probe } => {
                self.peer(from).refused(now, probe);
                if self.peer(from).known(now).is_some() {
                    self.flights_failed(from, sky);
                }
            }
            NodeEvent::Forward { work, committed } => {
                if let Some((ago, wait)) = committed {
                    self.arrivals.placed(now, work.site, work.epoch, wait, ago);
                }
                self.work(ForwardedRequest { since: sky.now, ..work }, sky);
            }
            NodeEvent::Answer { from, work, is_served } => self.answered(from, work, is_served, sky),
            NodeEvent::VouchAsk { from, round } => {
                if let Some(vouch) = self.voucher.vouch(now, from, self.holder.until_by_store()) {
                    sky.send(self.id, from, NodeEvent::VouchAnswer { from: self.id, round, vouch });
                }
            }
            NodeEvent::VouchAnswer { from, round, vouch } => self.holder.add_vouch(round, &from, vouch),
            NodeEvent::Watch(revision) => self.apply(revision, sky),
            NodeEvent::Stored(says) => self.stored(says, sky),
        }
    }

    // === Authority ===

    /// Starts the node. Everything in memory is new; data on disk may be older than it was.
    fn start(&mut self, sky: &mut Environment) {
        let now = sky.local(self.id);
        let flaws = sky.shape.flaws;
        if sky.now > nanos(TERM) && sky.dice.chance(50) {
            self.applied -= sky.dice.roll(20).min(self.applied);
        }
        let kept = std::mem::take(&mut self.given_up);
        let fresh = Self::new(self.id, sky.shape.nodes, self.applied);
        *self = Self { given_up: kept, ..fresh };
        let started = if flaws.promises_forgotten { Moment::default() } else { now };
        self.voucher = VouchPromises::new(started, term(self.id), VOUCH_TERM);
        let half = (self.others.len() / 2).max(1);
        let asked = if flaws.half_may_vouch { half } else { self.others.len() };
        self.holder.members(self.others.iter().copied().take(asked).collect());
        for other in self.others.clone() {
            self.voucher.note_introduced(other);
        }
        for site in sky.store.removed.clone() {
            self.let_go_later(site, LET_GO_AFTER, sky);
        }
        let is_back = sky.now > nanos(TERM);
        self.heeds_marks = !(is_back && flaws.older_builds && sky.dice.chance(OLDER));
        self.list(sky);
    }

    /// Writes its record. Before that, it asks for no lease.
    fn list(&mut self, sky: &mut Environment) {
        if !self.is_listed {
            let life = sky.life(self.id);
            sky.ask_store(self.id, StoreAsk::List { life, heeds_marks: self.heeds_marks });
            sky.later(self.id, sky.now + nanos(LIST_AGAIN), NodeEvent::List);
        }
    }

    fn renew(&mut self, sky: &mut Environment) {
        let now = sky.local(self.id);
        let read = self.holder.begin_read(now);
        sky.ask_store(self.id, StoreAsk::Renew { id: read, mark: None });
        if self.holder.wants_vouches(now) {
            let (round, members) = self.holder.begin_round(now);
            for member in members {
                sky.send(self.id, member, NodeEvent::VouchAsk { from: self.id, round });
            }
        }
        if sky.shape.copies_max > 1 && sky.dice.chance(SHIFTS) {
            self.shift(sky);
        }
        let next = sky.real(self.id, self.holder.renew_at(now));
        sky.later(self.id, next, NodeEvent::Renew);
    }

    /// Simulates load: one more node gets some site of this one, or this one gives it up to the
    /// others.
    fn shift(&mut self, sky: &mut Environment) {
        let site = sky.dice.roll(u64::from(sky.shape.sites)) as SiteId;
        let Some(parts) = self.placement(site, sky) else { return };
        let Some(own) = parts.of(self.id).filter(|_| self.has(site, sky)) else { return };
        let expect = parts.epoch;
        let is_last = parts.all.len() > 1 && parts.all.last().is_some_and(|part| part.node == self.id);
        if is_last && sky.dice.chance(50) {
            let life = sky.store.life(site, self.applied);
            self.given_up.insert(site, (life, own));
            self.instances.remove(&site);
            sky.ask_store(self.id, StoreAsk::Leave { site, node: self.id, expect, is_removed: false });
        } else {
            let node = sky.dice.roll(u64::from(sky.shape.nodes)) as NodeId;
            // The first placement of a name took it from no node.
            let earlier = if expect == 1 { Duration::ZERO } else { max_elapsed(TERM_LONGEST) };
            let (wait, written_by) = self.ages.remaining_wait(sky.local(self.id), None, earlier);
            sky.ask_store(self.id, StoreAsk::Copy { site, node, expect, wait, written_by });
        }
    }

    fn apply(&mut self, revision: u64, sky: &mut Environment) {
        if revision <= self.applied {
            return;
        }
        while self.applied < revision {
            let change = sky.store.change(self.applied + 1).clone();
            self.applied += 1;
            self.take(change, sky);
        }
        let Self { unsettled, voucher, .. } = self;
        unsettled.retain(|open| {
            let now = sky.store.at(open.site, revision).map(|at| at.epoch);
            let is_open = sky.store.life(open.site, revision) == open.life && now <= open.expect;
            if !is_open {
                voucher.note_settled(&open.from, Some(revision));
            }
            is_open
        });
        self.holder.applied(revision);
    }

    fn take(&mut self, StoreChange { site, what, .. }: StoreChange, sky: &mut Environment) {
        match what {
            ChangeResult::Placed { before, after } => {
                let had = before.as_ref().and_then(|parts| parts.of(self.id));
                match after.of(self.id) {
                    Some(epoch) if had != Some(epoch) => {
                        let wait = sky.store.wait(site, sky.store.life(site, self.applied), epoch);
                        self.arrivals.placed(sky.local(self.id), site, epoch, wait, Duration::ZERO);
                    }
                    None if had.is_some() => self.lose(site),
                    _ => {}
                }
            }
            ChangeResult::Added => {}
            ChangeResult::Removed => {
                self.instances.remove(&site);
                self.let_go_later(site, LET_GO_AFTER, sky);
            }
            ChangeResult::Forgotten => self.lose(site),
        }
    }

    fn lose(&mut self, site: SiteId) {
        self.arrivals.left(&site);
        self.instances.remove(&site);
    }

    // === Removed sites ===

    fn has(&self, site: SiteId, sky: &Environment) -> bool {
        sky.store.removed_at(site, self.applied).is_none()
    }

    /// Acts later if the removed site is placed here.
    fn let_go_later(&self, site: SiteId, after: Duration, sky: &mut Environment) {
        let is_here = self.placement(site, sky).is_some_and(|parts| parts.of(self.id).is_some());
        if let (true, Some(removed_at)) = (is_here, sky.store.removed_at(site, self.applied)) {
            let at = sky.real(self.id, sky.local(self.id) + after);
            sky.later(self.id, at, NodeEvent::LetGo { site, removed_at });
        }
    }

    /// Gives the site up, unless it was added again meanwhile.
    fn let_go(&mut self, site: SiteId, removed_at: u64, sky: &mut Environment) {
        let placed = self.placement(site, sky).filter(|parts| parts.of(self.id).is_some());
        let is_still = sky.store.removed_at(site, self.applied) == Some(removed_at);
        if let Some((epoch, count)) = placed.filter(|_| is_still).map(|parts| (parts.epoch, parts.all.len()))
        {
            // Others had it, too: each reports for itself.
            sky.ask_store(
                self.id,
                match count {
                    1 => StoreAsk::Forget { site, epoch },
                    _ => StoreAsk::Leave { site, node: self.id, expect: epoch, is_removed: true },
                },
            );
            self.let_go_later(site, LET_GO_AGAIN, sky);
        }
    }

    // === Requests ===

    fn placement<'s>(&self, site: SiteId, sky: &'s Environment) -> Option<&'s SiteParts> {
        sky.store.at(site, self.applied)
    }

    /// Returns a placement as a relocation sees it: the part that it concerns.
    fn part(&self, site: SiteId, parts: &SiteParts) -> PlacedAt<NodeId> {
        let lost = self.lost.get(&site).filter(|lost| parts.of(**lost).is_some());
        PlacedAt { node: *lost.unwrap_or(&parts.all[0].node), epoch: parts.epoch }
    }

    fn route(&mut self, request: RequestId, sky: &mut Environment) {
        let site = sky.requests[request as usize].site;
        if !self.has(site, sky) {
            sky.gone(request);
            return;
        }
        match self.placement(site, sky) {
            None => self.need(request, None, sky),
            Some(parts) => {
                let parts = parts.clone();
                self.spread(request, &parts, None, sky);
            }
        }
    }

    /// Sends the request to some node that has the site, not to the one that did not serve it.
    /// Returns false if that is the only one.
    fn spread(
        &mut self,
        request: RequestId,
        parts: &SiteParts,
        lost: Option<NodeId>,
        sky: &mut Environment,
    ) -> bool {
        let others: Vec<_> = parts.all.iter().filter(|part| Some(part.node) != lost).collect();
        if others.is_empty() {
            return false;
        }
        let part = *others[if others.len() == 1 { 0 } else { sky.dice.index(others.len()) }];
        self.go(request, part, parts.epoch, None, sky);
        true
    }

    /// Sends the request to where the site is placed. `seen` is the epoch of the whole placement.
    fn go(
        &mut self,
        request: RequestId,
        at: PlacedAt<NodeId>,
        seen: u64,
        committed: Option<(Moment, Duration)>,
        sky: &mut Environment,
    ) {
        let now = sky.local(self.id);
        let site = sky.requests[request as usize].site;
        let work = ForwardedRequest { request, site, epoch: at.epoch, seen, entry: self.id, since: sky.now };
        if at.node == self.id {
            if let Some((when, wait)) = committed {
                self.arrivals.placed(when, site, at.epoch, wait, Duration::ZERO);
            }
            self.work(work, sky);
            return;
        }
        let committed = committed.map(|(when, wait)| (now.since(when), wait));
        self.flights.entry(at.node).or_default().push(work);
        sky.send(self.id, at.node, NodeEvent::Forward { work, committed });
        self.watch_peer(at.node, sky);
    }

    /// Handles a request here, under this epoch: it is served, waits, or is given back.
    fn work(&mut self, work: ForwardedRequest, sky: &mut Environment) {
        if !sky.requests[work.request as usize].is_open {
            return;
        }
        let now = sky.local(self.id);
        let held = Duration::from_nanos(sky.now - work.since);
        let placement = self.placement(work.site, sky);
        let lags = placement.is_none_or(|parts| parts.epoch < work.epoch);
        let is_here = self.has(work.site, sky)
            && placement.and_then(|parts| parts.of(self.id)) == Some(work.epoch)
            && self
                .given_up
                .get(&work.site)
                .is_none_or(|last| *last < (sky.store.life(work.site, self.applied), work.epoch));
        if !lags && !is_here || held > HELD_LONGEST {
            self.give(work, false, sky);
            return;
        }
        if lags || !self.holder.may_serve(now) {
            sky.later(self.id, sky.now + nanos(LOOK_AGAIN), NodeEvent::Work(work));
            return;
        }
        if self.arrivals.from(&work.site, work.epoch).is_none() {
            // It was placed here before this process began.
            let wait = sky.store.wait(work.site, sky.store.life(work.site, self.applied), work.epoch);
            self.arrivals.placed(now, work.site, work.epoch, wait, Duration::ZERO);
        }
        let from = self.arrivals.from(&work.site, work.epoch).unwrap_or(now);
        let wait = if from > now && !sky.shape.flaws.no_wait { sky.real(self.id, from) } else { 0 };
        let ready = self.wake(work.site, work.epoch, sky).max(wait);
        if ready > sky.now {
            // That wait has an end of its own.
            let work = ForwardedRequest { since: ready, ..work };
            sky.later(self.id, ready, NodeEvent::Work(work));
            return;
        }
        let life = sky.store.life(work.site, self.applied);
        sky.observer.serves(sky.now, &sky.store, work.site, (life, work.epoch), self.id);
        sky.observer.vouched += u64::from(self.holder.until_by_store() <= now);
        self.give(work, true, sky);
    }

    /// Returns the real time from which on the instance answers.
    fn wake(&mut self, site: SiteId, epoch: u64, sky: &mut Environment) -> u64 {
        let instance = self.instances.entry(site).or_default();
        if instance.0 != epoch {
            *instance = (epoch, sky.now + nanos(sky.dice.between(WAKE.0, WAKE.1)));
        }
        instance.1
    }

    /// Gives the request back to where it came in.
    fn give(&mut self, work: ForwardedRequest, is_served: bool, sky: &mut Environment) {
        if work.entry == self.id {
            self.answered(self.id, work, is_served, sky);
        } else {
            sky.send(self.id, work.entry, NodeEvent::Answer { from: self.id, work, is_served });
        }
    }

    fn answered(&mut self, from: NodeId, work: ForwardedRequest, is_served: bool, sky: &mut Environment) {
        let now = sky.local(self.id);
        if from != self.id {
            self.peer(from).heard(now);
            if let Some(flights) = self.flights.get_mut(&from) {
                flights.retain(|flight| flight.request != work.request);
            }
        }
        if is_served {
            sky.answer(work.request);
        } else {
            self.lost(from, work, sky);
        }
    }

    // === Liveness ===

    fn peer(&mut self, node: NodeId) -> &mut PeerState {
        self.peers.entry(node).or_default()
    }

    /// Probes this peer if requests wait for its reply.
    fn watch_peer(&mut self, node: NodeId, sky: &mut Environment) {
        let now = sky.local(self.id);
        match self.peer(node).ask(now) {
            ProbePlan::Fresh => self.probe_at(node, now + FRESH, sky),
            ProbePlan::Send { probe, until } => {
                sky.send(self.id, node, NodeEvent::Probe { from: self.id, probe, sent_at: now });
                let next = self.peer(node).resend_at().unwrap_or(until);
                self.probe_at(node, next, sky);
            }
            ProbePlan::Shared { probe, until } => match self.peer(node).verdict(probe) {
                ProbeResult::Silent | ProbeResult::Refuses => self.flights_failed(node, sky),
                ProbeResult::Pending | ProbeResult::Answers => self.probe_at(node, until, sky),
            },
        }
    }

    fn probe_time(&mut self, node: NodeId, sky: &mut Environment) {
        if self.probe_times.get(&node).is_none_or(|at| *at > sky.now) {
            return;
        }
        self.probe_times.remove(&node);
        let now = sky.local(self.id);
        if self.peer(node).expired(now).is_some() {
            self.flights_failed(node, sky);
        } else if let Some(until) = self.peer(node).until() {
            if self.peer(node).resend_at().is_some_and(|at| at <= now) {
                self.peer(node).resent(now);
                if self.doubts.raise(now, &node) {
                    sky.ask_store(self.id, StoreAsk::Doubt(node));
                }
                // The number of the present probe is the one whose verdict is open.
                if let ProbePlan::Shared { probe, .. } = self.peer(node).ask(now) {
                    sky.send(self.id, node, NodeEvent::Probe { from: self.id, probe, sent_at: now });
                }
            }
            let next = self.peer(node).resend_at().unwrap_or(until).min(until);
            self.probe_at(node, next, sky);
        } else if self.flights.get(&node).is_some_and(|flights| !flights.is_empty()) {
            let again = self.peer(node).again(now);
            let is_quiet = self.peer(node).last_heard().is_none_or(|heard| now.since(heard) >= again);
            if is_quiet {
                self.watch_peer(node, sky);
            } else {
                self.probe_at(node, now + again, sky);
            }
        }
    }

    fn probe_at(&mut self, node: NodeId, at: Moment, sky: &mut Environment) {
        let at = sky.real(self.id, at);
        if self.probe_times.get(&node).is_none_or(|known| at < *known) {
            self.probe_times.insert(node, at);
            sky.later(self.id, at, NodeEvent::ProbeTime(node));
        }
    }

    fn flights_failed(&mut self, node: NodeId, sky: &mut Environment) {
        for work in self.flights.remove(&node).unwrap_or_default() {
            self.lost(node, work, sky);
        }
    }

    /// Handles a node that did not serve a request. Another node that has the site serves it, and
    /// the first is removed meanwhile. Otherwise the site is relocated, and the request waits.
    fn lost(&mut self, node: NodeId, work: ForwardedRequest, sky: &mut Environment) {
        self.lost.insert(work.site, node);
        let open = &sky.requests[work.request as usize];
        let may_try = open.is_open && open.attempts < ATTEMPTS_MAX && self.has(work.site, sky);
        let parts = self.placement(work.site, sky).filter(|parts| parts.all.len() > 1 && may_try);
        let Some(parts) = parts.cloned() else {
            self.need(work.request, Some(work.seen), sky);
            return;
        };
        sky.requests[work.request as usize].attempts += 1;
        if parts.of(node) == Some(work.epoch) {
            self.nobodies += 1;
            self.relocate(work.site, WaiterId(self.nobodies), Some(work.seen), sky);
        }
        self.spread(work.request, &parts, Some(node), sky);
    }

    // === Relocation ===

    fn need(&mut self, request: RequestId, seen: Option<u64>, sky: &mut Environment) {
        let open = &mut sky.requests[request as usize];
        if !open.is_open {
            return;
        }
        let site = open.site;
        open.attempts += 1;
        let attempts = open.attempts;
        if !self.has(site, sky) {
            sky.gone(request);
            return;
        }
        if attempts > ATTEMPTS_MAX {
            sky.refuse(request, "attempts");
            return;
        }
        self.relocate(site, WaiterId(u64::from(request)), seen, sky);
    }

    fn relocate(&mut self, site: SiteId, waiter: WaiterId, seen: Option<u64>, sky: &mut Environment) {
        let known = self.placement(site, sky).map(|parts| self.part(site, parts));
        let mut effects = Vec::new();
        let now = sky.local(self.id);
        self.relocations.add_waiter(now, site, waiter, seen, known, &mut effects);
        self.carry_out(effects, sky);
    }

    fn carry_out(&mut self, mut effects: Effects, sky: &mut Environment) {
        let now = sky.local(self.id);
        while let Some(effect) = effects.pop() {
            match effect {
                RelocationEffect::Plan { site, from } => {
                    let plan = self.plan(site, from, sky);
                    self.relocations.note_plan(now, &site, plan, &mut effects);
                }
                RelocationEffect::AskStore { site, ask, node, from, expect } => {
                    match self.begin(site, from, expect, now, sky) {
                        Ok((wait, mark, written_by)) => {
                            let ask =
                                StoreAsk::Commit { site, ask, node, from, expect, wait, mark, written_by };
                            sky.ask_store(self.id, ask);
                        }
                        Err(why) => self.relocations.note_blocked(now, &site, ask, why),
                    }
                }
                RelocationEffect::Look { site, ask } => sky.ask_store(self.id, StoreAsk::Look { site, ask }),
                RelocationEffect::Serve { waiter, .. } | RelocationEffect::Refuse { waiter, .. }
                    if waiter.0 >= NOBODY => {}
                RelocationEffect::Serve { waiter, site, node, epoch, committed } => {
                    self.serve(waiter.0 as RequestId, site, PlacedAt { node, epoch }, committed, sky);
                }
                RelocationEffect::Refuse { waiter, why, .. } => {
                    sky.refuse(waiter.0 as RequestId, &format!("{why:?}"))
                }
            }
        }
        if let Some(next) = self.relocations.next_at() {
            let next = sky.real(self.id, next);
            if next < self.next_tick {
                self.next_tick = next;
                sky.later(self.id, next, NodeEvent::Tick);
            }
        }
    }

    /// Handles a found placement. A supervisor's reply has the whole placement. Parts that this
    /// node's copy does not have yet are looked up.
    fn serve(
        &mut self,
        request: RequestId,
        site: SiteId,
        at: PlacedAt<NodeId>,
        committed: Option<(Moment, Duration)>,
        sky: &mut Environment,
    ) {
        match sky.store.whole(site, at.epoch).cloned() {
            Some(parts) if parts.all.len() > 1 => _ = self.spread(request, &parts, None, sky),
            // Its part may be older than the whole.
            Some(parts) => self.go(request, parts.all[0], parts.epoch, committed, sky),
            None => self.go(request, at, at.epoch, committed, sky),
        }
    }

    /// Returns whether a commit may be sent, and its preconditions.
    fn begin(
        &mut self,
        site: SiteId,
        from: Option<NodeId>,
        expect: Option<u64>,
        now: Moment,
        sky: &Environment,
    ) -> Result<Counted, nagaya_placement::lease::MoveBlocked> {
        let Some(from) = from else { return Ok((Duration::ZERO, None, None)) };
        let flaws = sky.shape.flaws;
        let owed = expect.map_or(Duration::ZERO, |expect| sky.store.owed_to(site, expect, from));
        let earlier = if flaws.earlier_ones_forgotten { Duration::ZERO } else { owed };
        let is_otherwise = self.otherwise.remove(&site);
        let ages = if is_otherwise { &RevisionAges::default() } else { &self.ages };
        if from == self.id {
            let own = self.placement(site, sky).and_then(|parts| parts.of(self.id));
            let life = sky.store.life(site, self.applied);
            self.given_up.insert(site, (life, own.or(expect).unwrap_or_default()));
            self.instances.remove(&site);
            let (wait, written_by) = ages.remaining_wait(now, None, earlier);
            return Ok((wait, None, written_by));
        }
        if !flaws.promises_ignored {
            self.voucher.begin(&from, now)?;
            let life = sky.store.life(site, self.applied);
            self.unsettled.push(UnsettledCommit { site, life, expect, from });
        }
        let whose = if flaws.own_fence_waited { self.id } else { from };
        let (owed, written_by) = ages.remaining_wait(now, Some(term(whose)), earlier);
        let mark = self.doubts.mark_against(now, &from).filter(|_| !is_otherwise);
        Ok((suspect_marks::remaining_wait(mark, now, owed), mark.map(|mark| mark.revision), written_by))
    }

    fn plan(&mut self, site: SiteId, from: Option<NodeId>, sky: &Environment) -> PlanResult<NodeId> {
        let now = sky.local(self.id);
        let others = self.placement(site, sky).into_iter().flat_map(|parts| &parts.all);
        let others: Vec<_> = others.map(|part| part.node).filter(|node| Some(*node) != from).collect();
        let is_there = |node: &NodeId| self.peers.get(node).is_none_or(|peer| peer.known(now).is_none());
        if let Some(stands_in) = others.iter().find(|node| is_there(node)) {
            return PlanResult::Node(*stands_in);
        }
        let name = format!("site{site}");
        let mut candidates: Vec<NodeCandidate> =
            sky.names.iter().zip(&sky.store.counts).map(candidate).collect();
        for (node, peer) in &self.peers {
            candidates[*node as usize].against = peer.known(now);
        }
        let from = from.map(|node| sky.names[node as usize].as_str());
        let need = SiteDemand { site: &name, memory_bytes: GIB / 4, from };
        match planner::choose(&need, &candidates) {
            Ok(choice) => {
                let number = choice.best().strip_prefix('n').and_then(|number| number.parse().ok());
                number.map_or(PlanResult::Nowhere, PlanResult::Node)
            }
            Err(none) if none.if_they_answered().next().is_some() => PlanResult::NotNow,
            Err(_) => PlanResult::Nowhere,
        }
    }

    fn stored(&mut self, says: StoreSays, sky: &mut Environment) {
        let now = sky.local(self.id);
        let mut effects = Vec::new();
        match says {
            // It is cleared first, which is a read, too.
            StoreSays::Renewed { mark: mark @ Some(_), id, .. }
                if self.heeds_marks && !sky.shape.flaws.marks_ignored =>
            {
                sky.ask_store(self.id, StoreAsk::Renew { id, mark });
            }
            StoreSays::Renewed { id, revision, .. } => {
                let flaws = sky.shape.flaws;
                let id = if flaws.authority_from_receipt { self.holder.begin_read(now) } else { id };
                self.holder.note_confirmed(id, if flaws.copy_may_lag { 0 } else { revision });
                self.voucher.note_synced(revision);
                self.ages.note_revision(now, revision);
            }
            StoreSays::Listed if !self.is_listed => {
                self.is_listed = true;
                self.renew(sky);
            }
            StoreSays::Found { site, ask, placement } => {
                let placement = placement.map(|parts| self.part(site, &parts));
                self.relocations.note_found(now, &site, ask, Ok(placement), &mut effects);
            }
            StoreSays::Committed { site, ask, from, wait, done } => {
                self.settled(site, from, done.as_ref().ok().copied());
                let outcome = match done {
                    Ok(revision) => {
                        let parts = sky.store.at(site, revision).expect("it was committed");
                        let life = sky.store.life(site, revision);
                        for part in &parts.all {
                            sky.observer.committed(&sky.store, site, (life, part.epoch), part.node);
                        }
                        CommitOutcome::Committed { at: now, wait }
                    }
                    Err(FoundInstead::Placement(placement)) => {
                        CommitOutcome::Conflict(placement.map(|parts| self.part(site, &parts)))
                    }
                    Err(FoundInstead::Otherwise) => {
                        self.otherwise.insert(site);
                        if let Some(from) = from {
                            self.doubts.forget(&from);
                        }
                        CommitOutcome::NotDone
                    }
                    Err(FoundInstead::NoSite) => CommitOutcome::Void,
                };
                self.relocations.note_outcome(now, &site, ask, outcome, &mut effects);
            }
            StoreSays::Marked { node, revision } => self.doubts.marked(now, &node, revision),
            StoreSays::Heard | StoreSays::Listed => {}
        }
        self.carry_out(effects, sky);
    }

    fn settled(&mut self, site: SiteId, from: Option<NodeId>, committed: Option<u64>) {
        let Some(from) = from else { return };
        let open = self.unsettled.iter().position(|open| open.site == site && open.from == from);
        if let Some(open) = open {
            self.unsettled.swap_remove(open);
            self.voucher.note_settled(&from, committed);
        }
    }
}

/// Returns a candidate. All are alike, except for the number of their sites.
fn candidate<'a>((name, sites): (&'a String, &u32)) -> NodeCandidate<'a> {
    NodeCandidate {
        name,
        against: None,
        present: true,
        draining: false,
        cpus: 8,
        memory_bytes: 64 * GIB,
        memory_free: 32 * GIB,
        cpu_used: 0.2,
        sites: *sites,
        heat: 10.0,
        has_image: false,
        wakes: 0,
    }
}
