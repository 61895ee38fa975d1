//! A simulated node: the real state machines, and between them what supervisor and edge do with sockets and timers.
//!
//! Not here: when messages arrive (`world`), what is right (`observer`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nagaya_placement::Moment;
use nagaya_placement::doubt::{self, Doubts};
use nagaya_placement::fence::{Ages, Arrivals, Holder, TERM, VOUCH_TERM, Voucher, outlasting};
use nagaya_placement::liveness::{Ask, FRESH, Peer, Verdict};
use nagaya_placement::planner::{self, Candidate, Need};
use nagaya_placement::relocation::{At, Effect, Outcome, Plan, Relocations, Waiter};

use crate::observer::Served;
use crate::store::{Change, Happened};
use crate::wire::{Instead, NodeId, Parts, RequestId, SiteId, StoreAsk, StoreSays, What, Work};
use crate::world::Sky;

/// A request is sent to so many places before it is refused.
const ATTEMPTS_MAX: u32 = 12;
/// Without authority, or with a copy that lags, a request is held for so long before it is given back.
const HELD_LONGEST: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// From an image.
const WAKE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(150));
/// A removed site's placement is taken away by its node when it has known of the removal for so long: more than any authority lasts.
const LET_GO_AFTER: Duration = Duration::from_secs(4);
const LET_GO_AGAIN: Duration = Duration::from_secs(1);
/// The first nodes have one of these, in turn; in large clusters all others have the usual one.
const TERMS: [Duration; 3] = [TERM, Duration::from_millis(150), Duration::from_millis(900)];
const TERM_LONGEST: Duration = TERMS[2];
const DIFFERENT: NodeId = 6;
/// A record of which it is not known whether it is written is written again.
const LIST_AGAIN: Duration = Duration::from_millis(50);
/// Of a hundred nodes that come back so many are an older build, where there are such.
const OLDER: u64 = 60;
const GIB: u64 = 1 << 30;
/// Of a hundred reads of the store so many are followed by a change of who has some site, where several may.
const SHIFTS: u64 = 40;
/// From this number on nobody waits for what a relocation comes to: requests have lower ones.
const NOBODY: u64 = 1 << 40;

const fn nanos(time: Duration) -> u64 {
    time.as_nanos() as u64
}

/// How long a node serves by one read of the store.
pub(crate) const fn term(node: NodeId) -> Duration {
    if node < DIFFERENT { TERMS[node as usize % TERMS.len()] } else { TERM }
}

/// What a commit counts on: for how long others may serve the site, by which mark, and by which revision the placement was written.
type Counted = (Duration, Option<u64>, Option<u64>);

type Effects = Vec<Effect<SiteId, NodeId>>;

#[derive(Debug)]
pub(crate) struct Node {
    id: NodeId,
    others: BTreeSet<NodeId>,
    holder: Holder<NodeId>,
    voucher: Voucher<NodeId>,
    arrivals: Arrivals<SiteId>,
    relocations: Relocations<SiteId, NodeId>,
    peers: BTreeMap<NodeId, Peer>,
    doubts: Doubts<NodeId>,
    ages: Ages,
    /// Sites of which a commit has failed because something was otherwise than counted on: the next counts on nothing.
    otherwise: BTreeSet<SiteId>,
    /// Its record is written, and what it says.
    is_listed: bool,
    heeds_marks: bool,
    /// The copy of the records is as of this revision. It is on disk.
    applied: u64,
    /// Sites that it has given up itself, under which epoch last. On disk, too; what older records say once more, also of an epoch
    /// before that one, does not undo it.
    given_up: BTreeMap<SiteId, Served>,
    /// Instances: of which epoch, and from which real time on they answer.
    instances: BTreeMap<SiteId, (u64, u64)>,
    /// Requests that were forwarded and not answered.
    flights: BTreeMap<NodeId, Vec<Work>>,
    /// How often each peer had been started when it was last heard from.
    lives: BTreeMap<NodeId, u32>,
    /// The one timer of each peer that counts.
    probe_times: BTreeMap<NodeId, u64>,
    next_tick: u64,
    unsettled: Vec<Unsettled>,
    /// Of several nodes that have a site, the one that did not serve it last.
    lost: BTreeMap<SiteId, NodeId>,
    nobodies: u64,
}

/// A commit whose fate is not known: the epoch that it replaces, and the node that it takes the site from.
#[derive(Debug)]
struct Unsettled {
    site: SiteId,
    /// How often the site's placement was forgotten before.
    life: u32,
    expect: Option<u64>,
    from: NodeId,
}

impl Node {
    pub fn new(id: NodeId, nodes: NodeId, applied: u64) -> Self {
        Self {
            id,
            others: (0..nodes).filter(|other| *other != id).collect(),
            holder: Holder::new(term(id), VOUCH_TERM, applied),
            voucher: Voucher::new(Moment::default(), term(id), VOUCH_TERM),
            arrivals: Arrivals::default(),
            relocations: Relocations::new(),
            peers: BTreeMap::new(),
            doubts: Doubts::default(),
            ages: Ages::default(),
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

    pub fn happens(&mut self, what: What, sky: &mut Sky) {
        let now = sky.local(self.id);
        match what {
            What::Start => self.start(sky),
            What::Request(request) => self.route(request, sky),
            What::Work(work) => self.work(work, sky),
            What::Renew => self.renew(sky),
            What::List => self.list(sky),
            What::LetGo { site, removed_at } => self.let_go(site, removed_at, sky),
            What::Tick => {
                self.next_tick = u64::MAX;
                let mut effects = Vec::new();
                self.relocations.tick(now, &mut effects);
                self.carry_out(effects, sky);
            }
            What::ProbeTime(peer) => self.probe_time(peer, sky),
            What::Probe { from, probe, sent_at } => {
                let life = sky.life(self.id);
                sky.send(self.id, from, What::ProbeAnswer { from: self.id, probe, sent_at, life });
            }
            What::ProbeAnswer { from, probe, sent_at, life } => {
                self.peer(from).answered(now, probe, sent_at);
                if self.lives.insert(from, life).is_some_and(|before| before != life) {
                    self.flights_failed(from, sky);
                }
            }
            What::ProbeRefused { from, probe } => {
                self.peer(from).refused(now, probe);
                if self.peer(from).known(now).is_some() {
                    self.flights_failed(from, sky);
                }
            }
            What::Forward { work, committed } => {
                if let Some((ago, wait)) = committed {
                    self.arrivals.placed(now, work.site, work.epoch, wait, ago);
                }
                self.work(Work { since: sky.now, ..work }, sky);
            }
            What::Answer { from, work, is_served } => self.answered(from, work, is_served, sky),
            What::VouchAsk { from, round } => {
                if let Some(vouch) = self.voucher.vouch(now, from, self.holder.until_by_store()) {
                    sky.send(self.id, from, What::VouchAnswer { from: self.id, round, vouch });
                }
            }
            What::VouchAnswer { from, round, vouch } => self.holder.vouched(round, &from, vouch),
            What::Watch(revision) => self.apply(revision, sky),
            What::Stored(says) => self.stored(says, sky),
        }
    }

    // === Authority ===

    /// Everything in memory is new; what is on disk may be older than it was.
    fn start(&mut self, sky: &mut Sky) {
        let now = sky.local(self.id);
        let flaws = sky.shape.flaws;
        if sky.now > nanos(TERM) && sky.dice.chance(50) {
            self.applied -= sky.dice.roll(20).min(self.applied);
        }
        let kept = std::mem::take(&mut self.given_up);
        let fresh = Self::new(self.id, sky.shape.nodes, self.applied);
        *self = Self { given_up: kept, ..fresh };
        let started = if flaws.promises_forgotten { Moment::default() } else { now };
        self.voucher = Voucher::new(started, term(self.id), VOUCH_TERM);
        let half = (self.others.len() / 2).max(1);
        let asked = if flaws.half_may_vouch { half } else { self.others.len() };
        self.holder.members(self.others.iter().copied().take(asked).collect());
        for other in self.others.clone() {
            self.voucher.introduced(other);
        }
        for site in sky.store.removed.clone() {
            self.let_go_later(site, LET_GO_AFTER, sky);
        }
        let is_back = sky.now > nanos(TERM);
        self.heeds_marks = !(is_back && flaws.older_builds && sky.dice.chance(OLDER));
        self.list(sky);
    }

    /// Before its record says what it does, it asks for nothing.
    fn list(&mut self, sky: &mut Sky) {
        if !self.is_listed {
            let life = sky.life(self.id);
            sky.ask_store(self.id, StoreAsk::List { life, heeds_marks: self.heeds_marks });
            sky.later(self.id, sky.now + nanos(LIST_AGAIN), What::List);
        }
    }

    fn renew(&mut self, sky: &mut Sky) {
        let now = sky.local(self.id);
        let read = self.holder.sending(now);
        sky.ask_store(self.id, StoreAsk::Renew { id: read, mark: None });
        if self.holder.wants_vouches(now) {
            let (round, members) = self.holder.asking(now);
            for member in members {
                sky.send(self.id, member, What::VouchAsk { from: self.id, round });
            }
        }
        if sky.shape.copies_max > 1 && sky.dice.chance(SHIFTS) {
            self.shift(sky);
        }
        let next = sky.real(self.id, self.holder.renew_at(now));
        sky.later(self.id, next, What::Renew);
    }

    /// Load comes or goes: one more node gets some site of this one, or this one gives it up to the others.
    fn shift(&mut self, sky: &mut Sky) {
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
            // The first placement of a name took it from nobody.
            let earlier = if expect == 1 { Duration::ZERO } else { outlasting(TERM_LONGEST) };
            let (wait, written_by) = self.ages.owed(sky.local(self.id), None, earlier);
            sky.ask_store(self.id, StoreAsk::Copy { site, node, expect, wait, written_by });
        }
    }

    fn apply(&mut self, revision: u64, sky: &mut Sky) {
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
                voucher.settled(&open.from, Some(revision));
            }
            is_open
        });
        self.holder.applied(revision);
    }

    fn take(&mut self, Change { site, what, .. }: Change, sky: &mut Sky) {
        match what {
            Happened::Placed { before, after } => {
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
            Happened::Added => {}
            Happened::Removed => {
                self.instances.remove(&site);
                self.let_go_later(site, LET_GO_AFTER, sky);
            }
            Happened::Forgotten => self.lose(site),
        }
    }

    fn lose(&mut self, site: SiteId) {
        self.arrivals.left(&site);
        self.instances.remove(&site);
    }

    // === Removed sites ===

    fn has(&self, site: SiteId, sky: &Sky) -> bool {
        sky.store.removed_at(site, self.applied).is_none()
    }

    /// If the removed site is placed here.
    fn let_go_later(&self, site: SiteId, after: Duration, sky: &mut Sky) {
        let is_here = self.placement(site, sky).is_some_and(|parts| parts.of(self.id).is_some());
        if let (true, Some(removed_at)) = (is_here, sky.store.removed_at(site, self.applied)) {
            let at = sky.real(self.id, sky.local(self.id) + after);
            sky.later(self.id, at, What::LetGo { site, removed_at });
        }
    }

    /// Unless it was added again meanwhile.
    fn let_go(&mut self, site: SiteId, removed_at: u64, sky: &mut Sky) {
        let placed = self.placement(site, sky).filter(|parts| parts.of(self.id).is_some());
        let is_still = sky.store.removed_at(site, self.applied) == Some(removed_at);
        if let Some((epoch, count)) = placed.filter(|_| is_still).map(|parts| (parts.epoch, parts.all.len()))
        {
            // Others had it, too: each says so for itself.
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

    fn placement<'s>(&self, site: SiteId, sky: &'s Sky) -> Option<&'s Parts> {
        sky.store.at(site, self.applied)
    }

    /// A placement as a relocation sees it: the part that it is about.
    fn part(&self, site: SiteId, parts: &Parts) -> At<NodeId> {
        let lost = self.lost.get(&site).filter(|lost| parts.of(**lost).is_some());
        At { node: *lost.unwrap_or(&parts.all[0].node), epoch: parts.epoch }
    }

    fn route(&mut self, request: RequestId, sky: &mut Sky) {
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

    /// The request goes to some node that has the site, not to the one that did not serve it. False: that is the only one.
    fn spread(&mut self, request: RequestId, parts: &Parts, lost: Option<NodeId>, sky: &mut Sky) -> bool {
        let others: Vec<_> = parts.all.iter().filter(|part| Some(part.node) != lost).collect();
        if others.is_empty() {
            return false;
        }
        let part = *others[if others.len() == 1 { 0 } else { sky.dice.index(others.len()) }];
        self.go(request, part, parts.epoch, None, sky);
        true
    }

    /// The request goes to where the site is placed. `seen`: the epoch of the whole placement.
    fn go(
        &mut self,
        request: RequestId,
        at: At<NodeId>,
        seen: u64,
        committed: Option<(Moment, Duration)>,
        sky: &mut Sky,
    ) {
        let now = sky.local(self.id);
        let site = sky.requests[request as usize].site;
        let work = Work { request, site, epoch: at.epoch, seen, entry: self.id, since: sky.now };
        if at.node == self.id {
            if let Some((when, wait)) = committed {
                self.arrivals.placed(when, site, at.epoch, wait, Duration::ZERO);
            }
            self.work(work, sky);
            return;
        }
        let committed = committed.map(|(when, wait)| (now.since(when), wait));
        self.flights.entry(at.node).or_default().push(work);
        sky.send(self.id, at.node, What::Forward { work, committed });
        self.watch_peer(at.node, sky);
    }

    /// A request is here, under this epoch: it is served, waits, or is given back.
    fn work(&mut self, work: Work, sky: &mut Sky) {
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
            sky.later(self.id, sky.now + nanos(LOOK_AGAIN), What::Work(work));
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
            let work = Work { since: ready, ..work };
            sky.later(self.id, ready, What::Work(work));
            return;
        }
        let life = sky.store.life(work.site, self.applied);
        sky.observer.serves(sky.now, &sky.store, work.site, (life, work.epoch), self.id);
        sky.observer.vouched += u64::from(self.holder.until_by_store() <= now);
        self.give(work, true, sky);
    }

    /// Real time from which on the instance answers.
    fn wake(&mut self, site: SiteId, epoch: u64, sky: &mut Sky) -> u64 {
        let instance = self.instances.entry(site).or_default();
        if instance.0 != epoch {
            *instance = (epoch, sky.now + nanos(sky.dice.between(WAKE.0, WAKE.1)));
        }
        instance.1
    }

    /// The request goes back to where it came in.
    fn give(&mut self, work: Work, is_served: bool, sky: &mut Sky) {
        if work.entry == self.id {
            self.answered(self.id, work, is_served, sky);
        } else {
            sky.send(self.id, work.entry, What::Answer { from: self.id, work, is_served });
        }
    }

    fn answered(&mut self, from: NodeId, work: Work, is_served: bool, sky: &mut Sky) {
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

    fn peer(&mut self, node: NodeId) -> &mut Peer {
        self.peers.entry(node).or_default()
    }

    /// Requests wait for this peer's answer: it is asked whether it is there.
    fn watch_peer(&mut self, node: NodeId, sky: &mut Sky) {
        let now = sky.local(self.id);
        match self.peer(node).ask(now) {
            Ask::Fresh => self.probe_at(node, now + FRESH, sky),
            Ask::Send { probe, until } => {
                sky.send(self.id, node, What::Probe { from: self.id, probe, sent_at: now });
                let next = self.peer(node).resend_at().unwrap_or(until);
                self.probe_at(node, next, sky);
            }
            Ask::Shared { probe, until } => match self.peer(node).verdict(probe) {
                Verdict::Silent | Verdict::Refuses => self.flights_failed(node, sky),
                Verdict::Pending | Verdict::Answers => self.probe_at(node, until, sky),
            },
        }
    }

    fn probe_time(&mut self, node: NodeId, sky: &mut Sky) {
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
                // The number of the probe under way is the one whose verdict is open.
                if let Ask::Shared { probe, .. } = self.peer(node).ask(now) {
                    sky.send(self.id, node, What::Probe { from: self.id, probe, sent_at: now });
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

    fn probe_at(&mut self, node: NodeId, at: Moment, sky: &mut Sky) {
        let at = sky.real(self.id, at);
        if self.probe_times.get(&node).is_none_or(|known| at < *known) {
            self.probe_times.insert(node, at);
            sky.later(self.id, at, What::ProbeTime(node));
        }
    }

    fn flights_failed(&mut self, node: NodeId, sky: &mut Sky) {
        for work in self.flights.remove(&node).unwrap_or_default() {
            self.lost(node, work, sky);
        }
    }

    /// A node did not serve a request. Another one that has the site does, and that one is taken out meanwhile; else a place is
    /// looked for, and waited for.
    fn lost(&mut self, node: NodeId, work: Work, sky: &mut Sky) {
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
            self.relocate(work.site, Waiter(self.nobodies), Some(work.seen), sky);
        }
        self.spread(work.request, &parts, Some(node), sky);
    }

    // === Relocation ===

    fn need(&mut self, request: RequestId, seen: Option<u64>, sky: &mut Sky) {
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
        self.relocate(site, Waiter(u64::from(request)), seen, sky);
    }

    fn relocate(&mut self, site: SiteId, waiter: Waiter, seen: Option<u64>, sky: &mut Sky) {
        let known = self.placement(site, sky).map(|parts| self.part(site, parts));
        let mut effects = Vec::new();
        let now = sky.local(self.id);
        self.relocations.need(now, site, waiter, seen, known, &mut effects);
        self.carry_out(effects, sky);
    }

    fn carry_out(&mut self, mut effects: Effects, sky: &mut Sky) {
        let now = sky.local(self.id);
        while let Some(effect) = effects.pop() {
            match effect {
                Effect::Plan { site, from } => {
                    let plan = self.plan(site, from, sky);
                    self.relocations.planned(now, &site, plan, &mut effects);
                }
                Effect::AskStore { site, ask, node, from, expect } => {
                    match self.begin(site, from, expect, now, sky) {
                        Ok((wait, mark, written_by)) => {
                            let ask =
                                StoreAsk::Commit { site, ask, node, from, expect, wait, mark, written_by };
                            sky.ask_store(self.id, ask);
                        }
                        Err(why) => self.relocations.held(now, &site, ask, why),
                    }
                }
                Effect::Look { site, ask } => sky.ask_store(self.id, StoreAsk::Look { site, ask }),
                Effect::Serve { waiter, .. } | Effect::Refuse { waiter, .. } if waiter.0 >= NOBODY => {}
                Effect::Serve { waiter, site, node, epoch, committed } => {
                    self.serve(waiter.0 as RequestId, site, At { node, epoch }, committed, sky);
                }
                Effect::Refuse { waiter, why, .. } => sky.refuse(waiter.0 as RequestId, &format!("{why:?}")),
            }
        }
        if let Some(next) = self.relocations.next_at() {
            let next = sky.real(self.id, next);
            if next < self.next_tick {
                self.next_tick = next;
                sky.later(self.id, next, What::Tick);
            }
        }
    }

    /// A place was found. The answer of a supervisor has the whole placement: what this node's copy does not have yet is looked up.
    fn serve(
        &mut self,
        request: RequestId,
        site: SiteId,
        at: At<NodeId>,
        committed: Option<(Moment, Duration)>,
        sky: &mut Sky,
    ) {
        match sky.store.whole(site, at.epoch).cloned() {
            Some(parts) if parts.all.len() > 1 => _ = self.spread(request, &parts, None, sky),
            // Its part may be older than the whole.
            Some(parts) => self.go(request, parts.all[0], parts.epoch, committed, sky),
            None => self.go(request, at, at.epoch, committed, sky),
        }
    }

    /// Whether a commit may leave, and what it counts on.
    fn begin(
        &mut self,
        site: SiteId,
        from: Option<NodeId>,
        expect: Option<u64>,
        now: Moment,
        sky: &Sky,
    ) -> Result<Counted, nagaya_placement::fence::Held> {
        let Some(from) = from else { return Ok((Duration::ZERO, None, None)) };
        let flaws = sky.shape.flaws;
        let owed = expect.map_or(Duration::ZERO, |expect| sky.store.owed_to(site, expect, from));
        let earlier = if flaws.earlier_ones_forgotten { Duration::ZERO } else { owed };
        let is_otherwise = self.otherwise.remove(&site);
        let ages = if is_otherwise { &Ages::default() } else { &self.ages };
        if from == self.id {
            let own = self.placement(site, sky).and_then(|parts| parts.of(self.id));
            let life = sky.store.life(site, self.applied);
            self.given_up.insert(site, (life, own.or(expect).unwrap_or_default()));
            self.instances.remove(&site);
            let (wait, written_by) = ages.owed(now, None, earlier);
            return Ok((wait, None, written_by));
        }
        if !flaws.promises_ignored {
            self.voucher.begin(&from, now)?;
            let life = sky.store.life(site, self.applied);
            self.unsettled.push(Unsettled { site, life, expect, from });
        }
        let whose = if flaws.own_fence_waited { self.id } else { from };
        let (owed, written_by) = ages.owed(now, Some(term(whose)), earlier);
        let mark = self.doubts.against(now, &from).filter(|_| !is_otherwise);
        Ok((doubt::left(mark, now, owed), mark.map(|mark| mark.revision), written_by))
    }

    fn plan(&mut self, site: SiteId, from: Option<NodeId>, sky: &Sky) -> Plan<NodeId> {
        let now = sky.local(self.id);
        let others = self.placement(site, sky).into_iter().flat_map(|parts| &parts.all);
        let others: Vec<_> = others.map(|part| part.node).filter(|node| Some(*node) != from).collect();
        let is_there = |node: &NodeId| self.peers.get(node).is_none_or(|peer| peer.known(now).is_none());
        if let Some(stands_in) = others.iter().find(|node| is_there(node)) {
            return Plan::Node(*stands_in);
        }
        let name = format!("site{site}");
        let mut candidates: Vec<Candidate> = sky.names.iter().zip(&sky.store.counts).map(candidate).collect();
        for (node, peer) in &self.peers {
            candidates[*node as usize].against = peer.known(now);
        }
        let from = from.map(|node| sky.names[node as usize].as_str());
        let need = Need { site: &name, memory_bytes: GIB / 4, from };
        match planner::choose(&need, &candidates) {
            Ok(choice) => {
                let number = choice.best().strip_prefix('n').and_then(|number| number.parse().ok());
                number.map_or(Plan::Nowhere, Plan::Node)
            }
            Err(none) if none.if_they_answered().next().is_some() => Plan::NotNow,
            Err(_) => Plan::Nowhere,
        }
    }

    fn stored(&mut self, says: StoreSays, sky: &mut Sky) {
        let now = sky.local(self.id);
        let mut effects = Vec::new();
        match says {
            // It is taken away first, which is a read, too.
            StoreSays::Renewed { mark: mark @ Some(_), id, .. }
                if self.heeds_marks && !sky.shape.flaws.marks_ignored =>
            {
                sky.ask_store(self.id, StoreAsk::Renew { id, mark });
            }
            StoreSays::Renewed { id, revision, .. } => {
                let flaws = sky.shape.flaws;
                let id = if flaws.authority_from_receipt { self.holder.sending(now) } else { id };
                self.holder.confirmed(id, if flaws.copy_may_lag { 0 } else { revision });
                self.voucher.synced(revision);
                self.ages.read(now, revision);
            }
            StoreSays::Listed if !self.is_listed => {
                self.is_listed = true;
                self.renew(sky);
            }
            StoreSays::Found { site, ask, placement } => {
                let placement = placement.map(|parts| self.part(site, &parts));
                self.relocations.looked(now, &site, ask, Ok(placement), &mut effects);
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
                        Outcome::Committed { at: now, wait }
                    }
                    Err(Instead::Placement(placement)) => {
                        Outcome::Conflict(placement.map(|parts| self.part(site, &parts)))
                    }
                    Err(Instead::Otherwise) => {
                        self.otherwise.insert(site);
                        if let Some(from) = from {
                            self.doubts.forget(&from);
                        }
                        Outcome::NotDone
                    }
                    Err(Instead::NoSite) => Outcome::Void,
                };
                self.relocations.stored(now, &site, ask, outcome, &mut effects);
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
            self.voucher.settled(&from, committed);
        }
    }
}

/// All alike, but for how many sites each has.
fn candidate<'a>((name, sites): (&'a String, &u32)) -> Candidate<'a> {
    Candidate {
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
