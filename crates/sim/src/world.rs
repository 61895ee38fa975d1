//! The simulated cluster as a whole: real time, the network, what is scheduled, who is down.
//!
//! Not here: what a node does (`node`), what the store does (`store`), what is wrong with it (`observer`).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

use nagaya_placement::Moment;
use nagaya_placement::fence::DRIFT_PPM;

use crate::dice::Dice;
use crate::faults::{Fault, Faults};
use crate::node::Node;
use crate::observer::{Observer, Violation};
use crate::store::Store;
use crate::wire::{NodeId, Parts, RequestId, SiteId, StoreAsk, What};

/// A request that has no end by then is refused by the node it came to.
pub(crate) const REQUEST_LONGEST: Duration = Duration::from_secs(15);
/// A store gives up what it could not do by then, as etcd does.
const STORE_GIVES_UP: Duration = Duration::from_millis(1500);
/// A connection sends what was not acknowledged again, so often before it counts as gone.
const SENT_AGAIN: Duration = Duration::from_millis(200);
const SENDS: u32 = 15;
/// From a node that is down, clients go on to others in steps of this, which divides no number of nodes: neighbours may die together.
const ENTRY_STEP: u32 = 37;
/// Between two removals of a site, on average.
const REMOVED_EVERY: Duration = Duration::from_millis(700);
/// A store that is away is told of a change of a site again.
const TOLD_AGAIN: Duration = Duration::from_millis(50);
/// A node whose program is exchanged is down for no longer: it still has most of its sites then.
const EXCHANGED_WITHIN: Duration = Duration::from_millis(60);
/// Sum of all that a machine may still do when its time is over.
const END_SLACK: Duration = Duration::from_secs(1);

/// What a world is made of.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub seed: u64,
    pub nodes: u32,
    pub sites: u32,
    pub faults: Faults,
    /// How many nodes may have one site.
    pub copies_max: u32,
    /// Between two looks of the watch.
    pub watch_every: Duration,
    pub flaws: Flaws,
}

/// Mistakes on purpose: the simulation has to find each of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flaws {
    /// Authority is counted from the answer to a read instead of from its sending.
    pub authority_from_receipt: bool,
    /// A site is served as soon as its placement is known.
    pub no_wait: bool,
    /// Sites are moved from a node that was promised they would not be.
    pub promises_ignored: bool,
    /// A read gives authority to a node whose copy is older than what the read saw.
    pub copy_may_lag: bool,
    /// Half of the other members are enough to vouch.
    pub half_may_vouch: bool,
    /// A member that was started anew does not wait for what it may have promised before.
    pub promises_forgotten: bool,
    /// With a site that is removed goes its placement, at once.
    pub placements_go_with_sites: bool,
    /// A read that finds a mark against the node gives it authority all the same.
    pub marks_ignored: bool,
    /// A mark counts for a site, too, that the node has got after it was marked.
    pub placements_newer_than_marks: bool,
    /// Whoever takes a site from a node waits for its own fence.
    pub own_fence_waited: bool,
    /// What the node that loses a site had to wait for itself is forgotten.
    pub earlier_ones_forgotten: bool,
    /// No mistake, as long as it is looked at: nodes come back as an older build that does not know of marks, and say so.
    pub older_builds: bool,
    /// It is not looked at whether a node has written its record anew since it was marked.
    pub records_newer_than_marks: bool,
}

/// What a run has come to.
#[derive(Debug)]
pub struct Report {
    pub violations: Vec<Violation>,
    pub answers: u64,
    /// By reason.
    pub refusals: BTreeMap<String, u64>,
    /// Requests whose own node ended.
    pub abandoned: u64,
    pub vouched: u64,
    pub latest: Duration,
    pub slowest: Duration,
    pub relocations: u64,
    /// Changes of who has a site beside others, and of those that gave it up.
    pub copied: u64,
    /// Placements of removed sites that were taken away.
    pub forgotten: u64,
    /// Relocations that waited less because of a mark.
    pub marked: u64,
    pub events: u64,
}

/// A node that is down, and whether its host is, too: then nobody refuses for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    Up,
    ProcessDown,
    HostDown,
}

/// How a node's clock runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    offset: u64,
    ppm: i64,
}

impl Clock {
    pub fn at(self, real: u64) -> Moment {
        let drift = i128::from(real) * i128::from(self.ppm) / 1_000_000;
        Moment((i128::from(self.offset) + i128::from(real) + drift) as u64)
    }

    /// The first real time at which this clock shows `local`.
    pub fn real(self, local: Moment) -> u64 {
        let shown = i128::from(local.0) - i128::from(self.offset);
        (shown.max(0) * 1_000_000 / (1_000_000 + i128::from(self.ppm))) as u64 + 2
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    pub site: SiteId,
    pub entry: NodeId,
    pub began: u64,
    pub attempts: u32,
    pub is_open: bool,
}

#[derive(Debug)]
enum Event {
    Node {
        node: NodeId,
        life: u32,
        what: What,
    },
    Sends {
        from: NodeId,
        life: u32,
        to: NodeId,
        what: What,
        tries: u32,
    },
    StoreArrives {
        node: NodeId,
        life: u32,
        ask: StoreAsk,
        sent: u64,
    },
    StoreDoes {
        node: NodeId,
        life: u32,
        ask: StoreAsk,
    },
    Fault,
    Ends(Fault),
    /// An operator removes some site.
    Removes,
    Adds(SiteId),
    Watch,
}

#[derive(Debug)]
struct Scheduled {
    at: u64,
    order: u64,
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// How many faults of each kind hold a place now.
#[derive(Debug, Default, Clone)]
struct Cuts {
    to: u32,
    from: u32,
    store_to: u32,
    store_from: u32,
    watch: u32,
    paused: u32,
}

/// All that is around the nodes.
#[derive(Debug)]
pub(crate) struct Sky {
    pub now: u64,
    pub dice: Dice,
    pub shape: Shape,
    pub store: Store,
    pub observer: Observer,
    pub requests: Vec<Request>,
    pub clocks: Vec<Clock>,
    pub names: Vec<String>,
    lives: Vec<(Life, u32)>,
    cuts: Vec<Cuts>,
    links: BTreeMap<(NodeId, NodeId), u32>,
    store_away: u32,
    slow_disk: Duration,
    /// What has come for nodes that stand still.
    held: Vec<Vec<Scheduled>>,
    queue: BinaryHeap<Reverse<Scheduled>>,
    order: u64,
    events: u64,
}

impl Sky {
    fn schedule(&mut self, at: u64, event: Event) {
        self.order += 1;
        self.queue.push(Reverse(Scheduled { at: at.max(self.now), order: self.order, event }));
    }

    /// Something happens to the node itself at this real time, unless it is started anew before.
    pub fn later(&mut self, node: NodeId, at: u64, what: What) {
        let life = self.lives[node as usize].1;
        self.schedule(at, Event::Node { node, life, what });
    }

    /// A message to another node. Datagrams are lost now and then; what goes over a connection is sent again for a while.
    pub fn send(&mut self, from: NodeId, to: NodeId, what: What) {
        self.send_tries(from, to, what, SENDS);
    }

    /// How often the node has been started.
    pub fn life(&self, node: NodeId) -> u32 {
        self.lives[node as usize].1
    }

    fn send_tries(&mut self, from: NodeId, to: NodeId, what: What, tries: u32) {
        let is_datagram = matches!(what, What::Probe { .. } | What::ProbeAnswer { .. });
        let is_lost = is_datagram && self.dice.chance(self.shape.faults.loss);
        let is_cut = self.cuts[from as usize].to > 0
            || self.cuts[to as usize].from > 0
            || self.links.contains_key(&(from, to));
        let is_down = self.lives[to as usize].0 != Life::Up;
        if (is_cut || is_down) && !is_datagram && tries > 0 {
            let life = self.lives[from as usize].1;
            let again = self.now + SENT_AGAIN.as_nanos() as u64;
            self.schedule(again, Event::Sends { from, life, to, what, tries: tries - 1 });
            return;
        }
        if is_lost || is_cut {
            return;
        }
        let at = self.now + self.latency();
        let (state, life) = self.lives[to as usize];
        match (state, what) {
            (Life::Up, what) => self.schedule(at, Event::Node { node: to, life, what }),
            (Life::ProcessDown, What::Probe { probe, .. }) => {
                let what = What::ProbeRefused { from: to, probe };
                let again = at + self.latency();
                self.later(from, again, what);
            }
            _ => {}
        }
    }

    pub fn ask_store(&mut self, node: NodeId, ask: StoreAsk) {
        if self.cuts[node as usize].store_to > 0 {
            return;
        }
        let at = self.now + self.latency();
        let (life, sent) = (self.lives[node as usize].1, self.now);
        self.schedule(at, Event::StoreArrives { node, life, ask, sent });
    }

    pub fn local(&self, node: NodeId) -> Moment {
        self.clocks[node as usize].at(self.now)
    }

    pub fn real(&self, node: NodeId, local: Moment) -> u64 {
        self.clocks[node as usize].real(local)
    }

    /// The client has its answer.
    pub fn answer(&mut self, request: RequestId) {
        if let Some(waited) = self.close(request) {
            self.observer.answered(waited);
        }
    }

    /// The client is told that it gets none, and why.
    pub fn refuse(&mut self, request: RequestId, why: &str) {
        if self.close(request).is_some() {
            self.observer.refused(why);
        }
    }

    /// The client asks for a site that was removed.
    pub fn gone(&mut self, request: RequestId) {
        self.close(request);
    }

    fn close(&mut self, request: RequestId) -> Option<Duration> {
        let request = &mut self.requests[request as usize];
        let was_open = std::mem::replace(&mut request.is_open, false);
        was_open.then(|| Duration::from_nanos(self.now - request.began))
    }

    fn latency(&mut self) -> u64 {
        let (least, most) = (Duration::from_micros(100), Duration::from_micros(900));
        // Now and then a packet takes its time.
        let most = if self.dice.chance(1) { most * 30 } else { most };
        self.dice.between(least, most).as_nanos() as u64
    }

    fn store_arrives(&mut self, node: NodeId, life: u32, ask: StoreAsk, sent: u64) {
        let waited = Duration::from_nanos(self.now - sent);
        if self.store_away > 0 {
            // Some questions are kept until there is a leader again.
            if self.dice.chance(40) && waited < STORE_GIVES_UP {
                let pause = self.dice.between(Duration::from_millis(5), Duration::from_millis(200));
                self.schedule(
                    self.now + pause.as_nanos() as u64,
                    Event::StoreArrives { node, life, ask, sent },
                );
            }
            return;
        }
        let disk = self.dice.between(Duration::from_micros(300), Duration::from_millis(3)) + self.slow_disk;
        self.schedule(self.now + disk.as_nanos() as u64, Event::StoreDoes { node, life, ask });
    }

    fn store_does(&mut self, node: NodeId, life: u32, ask: StoreAsk) {
        let says = self.store.apply(self.now, node, ask, self.shape.flaws);
        // It has been done, and nobody may ever hear of it.
        let is_lost = self.cuts[node as usize].store_from > 0 || self.dice.chance(self.shape.faults.loss);
        if !is_lost && self.lives[node as usize] == (Life::Up, life) {
            let at = self.now + self.latency();
            self.schedule(at, Event::Node { node, life, what: What::Stored(says) });
        }
    }

    fn apply(&mut self, fault: Fault, sign: i32) {
        let add = |count: &mut u32| *count = count.saturating_add_signed(sign);
        match fault {
            Fault::CutOneWay(one, other) => self.link(one, other, sign),
            Fault::Cut(one, other) => {
                self.link(one, other, sign);
                self.link(other, one, sign);
            }
            Fault::CutOff { node, to, from } => {
                let cuts = &mut self.cuts[node as usize];
                [(to, &mut cuts.to), (from, &mut cuts.from)]
                    .into_iter()
                    .filter(|cut| cut.0)
                    .for_each(|cut| add(cut.1));
            }
            Fault::CutStore { node, to, from } => {
                let cuts = &mut self.cuts[node as usize];
                let both = [(to, &mut cuts.store_to), (from, &mut cuts.store_from)];
                both.into_iter().filter(|cut| cut.0).for_each(|cut| add(cut.1));
                if from {
                    add(&mut self.cuts[node as usize].watch);
                }
            }
            Fault::Pause(node) => add(&mut self.cuts[node as usize].paused),
            Fault::Watch(node) => add(&mut self.cuts[node as usize].watch),
            Fault::StoreAway => add(&mut self.store_away),
            Fault::SlowDisk(by) if sign > 0 => self.slow_disk += by,
            Fault::SlowDisk(by) => self.slow_disk -= by,
            Fault::Crash(_) => {}
        }
    }

    fn remove_some(&mut self) {
        let site = self.dice.roll(u64::from(self.shape.sites)) as SiteId;
        if self.store_away == 0 && !self.store.removed.contains(&site) {
            self.store.set_present(self.now, site, false);
            if self.shape.flaws.placements_go_with_sites {
                self.store.forget(self.now, site);
            }
            // Mostly at once; now and then when nothing is left of it.
            let longest = Duration::from_secs(if self.dice.chance(20) { 12 } else { 1 });
            let away = self.dice.between(Duration::from_millis(5), longest);
            self.schedule(self.now + away.as_nanos() as u64, Event::Adds(site));
        }
        let pause = self.dice.between(Duration::ZERO, REMOVED_EVERY * 2);
        self.schedule(self.now + pause.as_nanos() as u64, Event::Removes);
    }

    fn add(&mut self, site: SiteId) {
        if self.store_away == 0 {
            self.store.set_present(self.now, site, true);
        } else {
            self.schedule(self.now + TOLD_AGAIN.as_nanos() as u64, Event::Adds(site));
        }
    }

    fn link(&mut self, from: NodeId, to: NodeId, sign: i32) {
        let count = self.links.entry((from, to)).or_default();
        *count = count.saturating_add_signed(sign);
        if *count == 0 {
            self.links.remove(&(from, to));
        }
    }
}

/// A cluster and all that goes on around it.
#[derive(Debug)]
pub struct World {
    nodes: Vec<Node>,
    sky: Sky,
    /// When requests end at the latest, in order.
    deadlines: VecDeque<(u64, RequestId)>,
    has_faults: bool,
}

impl World {
    /// A cluster in which every site is placed, and every node has just been started.
    pub fn new(shape: Shape) -> Self {
        let mut dice = Dice(shape.seed ^ 0x6e61_6761_7961);
        let clocks = (0..shape.nodes).map(|_| {
            let most = i64::from(DRIFT_PPM);
            // Mostly as far off as is allowed: in the middle nothing is found.
            let ppm = [-most, most, dice.roll(most as u64) as i64][dice.index(3)];
            Clock { offset: 1_000_000_000_000 + dice.roll(1 << 50), ppm }
        });
        let clocks: Vec<Clock> = clocks.collect();
        let mut store = Store::new(shape.sites as usize, shape.nodes as usize, shape.copies_max);
        for site in 0..shape.sites {
            store.put(0, site, Parts::one(dice.roll(u64::from(shape.nodes)) as NodeId, 1), Duration::ZERO);
        }
        let sky = Sky {
            now: 0,
            dice,
            shape,
            store,
            observer: Observer::new(shape.sites as usize, shape.copies_max),
            requests: Vec::new(),
            clocks,
            names: (0..shape.nodes).map(|node| format!("n{node}")).collect(),
            lives: vec![(Life::Up, 0); shape.nodes as usize],
            cuts: vec![Cuts::default(); shape.nodes as usize],
            links: BTreeMap::new(),
            store_away: 0,
            slow_disk: Duration::ZERO,
            held: (0..shape.nodes).map(|_| Vec::new()).collect(),
            queue: BinaryHeap::new(),
            order: 0,
            events: 0,
        };
        let nodes = (0..shape.nodes).map(|id| Node::new(id, shape.nodes, sky.store.head())).collect();
        let mut world = Self { nodes, sky, deadlines: VecDeque::new(), has_faults: false };
        for node in 0..shape.nodes {
            let at = world.sky.dice.roll(75_000_000);
            world.sky.later(node, at, What::Start);
        }
        world.sky.schedule(0, Event::Watch);
        world
    }

    /// Real time since the beginning.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.sky.now)
    }

    /// Random faults from now on, or none any more; those that are under way end by themselves.
    pub fn faults(&mut self, on: bool) {
        if on && !self.has_faults {
            self.sky.schedule(self.sky.now, Event::Fault);
            self.sky.schedule(self.sky.now, Event::Removes);
        }
        self.has_faults = on;
    }

    /// A client sends a request for the site to a node; to another one if that is down.
    pub fn request(&mut self, site: u32, entry: u32) {
        let count = self.sky.shape.nodes;
        let up = (0..count).map(|step| (entry + step * ENTRY_STEP) % count);
        let Some(entry) = { up }.find(|node| self.sky.lives[*node as usize].0 == Life::Up) else { return };
        let id = self.sky.requests.len() as RequestId;
        let began = self.sky.now;
        self.sky.requests.push(Request { site, entry, began, attempts: 0, is_open: true });
        self.sky.later(entry, began, What::Request(id));
        self.deadlines.push_back((began + REQUEST_LONGEST.as_nanos() as u64, id));
    }

    /// A random site, at a random node.
    pub fn request_any(&mut self) {
        let site = self.sky.dice.roll(u64::from(self.sky.shape.sites)) as SiteId;
        let entry = self.sky.dice.roll(u64::from(self.sky.shape.nodes)) as NodeId;
        self.request(site, entry);
    }

    /// The node ends at once, and begins anew after so long, with its copy of the records as it was or older.
    pub fn kill(&mut self, node: u32, lasts: Duration) {
        let (life, number) = self.sky.lives[node as usize];
        if life != Life::Up {
            return;
        }
        let state = if self.sky.dice.chance(30) { Life::ProcessDown } else { Life::HostDown };
        self.sky.lives[node as usize] = (state, number + 1);
        for request in self.sky.requests.iter_mut().filter(|request| request.is_open && request.entry == node)
        {
            // Its client sees a connection that ended.
            request.is_open = false;
            self.sky.observer.abandoned += 1;
        }
        let at = self.sky.now + lasts.as_nanos() as u64;
        self.sky.schedule(at, Event::Ends(Fault::Crash(node)));
    }

    /// The sites that the store has on a node now.
    pub fn placed_on(&self, node: u32) -> Vec<u32> {
        let head = self.sky.store.head();
        let sites = 0..self.sky.shape.sites;
        sites.filter(|site| self.sky.store.at(*site, head).is_some_and(|at| at.of(node).is_some())).collect()
    }

    /// Goes on for so long.
    pub fn run(&mut self, lasts: Duration) {
        let until = self.sky.now + lasts.as_nanos() as u64;
        while self.sky.queue.peek().is_some_and(|Reverse(next)| next.at <= until) {
            let Some(Reverse(next)) = self.sky.queue.pop() else { break };
            self.sky.now = next.at;
            self.sky.events += 1;
            self.refuse_late_ones();
            self.happens(next);
        }
        self.sky.now = until;
        self.refuse_late_ones();
    }

    /// All faults are over: every site is asked for and has to be served, and no request is still open.
    pub fn heal_and_check(&mut self) {
        self.faults(false);
        self.run(Duration::from_secs(25));
        self.check_all_ended();
        let first = self.sky.requests.len();
        for site in 0..self.sky.shape.sites {
            let entry = self.sky.dice.roll(u64::from(self.sky.shape.nodes)) as NodeId;
            self.request(site, entry);
        }
        let before = self.sky.observer.answers;
        self.run(Duration::from_secs(8));
        let served = self.sky.observer.answers - before;
        if served < u64::from(self.sky.shape.sites) {
            let open = self.sky.requests[first..].iter().find(|request| request.is_open);
            let site = open.map_or(u32::MAX, |request| request.site);
            self.sky.observer.wrong(Violation::NotServed { site });
        }
    }

    pub fn violations(&self) -> &[Violation] {
        &self.sky.observer.violations
    }

    pub fn report(&self) -> Report {
        let observer = &self.sky.observer;
        Report {
            violations: observer.violations.clone(),
            answers: observer.answers,
            refusals: observer.refusals.clone(),
            abandoned: observer.abandoned,
            vouched: observer.vouched,
            latest: observer.latest,
            slowest: observer.slowest,
            relocations: self.sky.store.placed - u64::from(self.sky.shape.sites),
            copied: self.sky.store.copied,
            forgotten: self.sky.store.forgotten,
            marked: self.sky.store.marked,
            events: self.sky.events,
        }
    }

    fn refuse_late_ones(&mut self) {
        while let Some((_, request)) = self.deadlines.pop_front_if(|(at, _)| *at <= self.sky.now) {
            self.sky.refuse(request, "deadline");
        }
    }

    fn happens(&mut self, next: Scheduled) {
        match next.event {
            Event::Node { node, life, what } => {
                if self.sky.lives[node as usize] != (Life::Up, life) {
                    return;
                }
                if self.sky.cuts[node as usize].paused > 0 {
                    let event = Event::Node { node, life, what };
                    self.sky.held[node as usize].push(Scheduled { event, ..next });
                    return;
                }
                self.nodes[node as usize].happens(what, &mut self.sky);
            }
            Event::StoreArrives { node, life, ask, sent } => self.sky.store_arrives(node, life, ask, sent),
            Event::StoreDoes { node, life, ask } => self.sky.store_does(node, life, ask),
            Event::Sends { from, life, to, what, tries } => {
                if self.sky.lives[from as usize] == (Life::Up, life) {
                    self.sky.send_tries(from, to, what, tries);
                }
            }
            Event::Fault if self.has_faults => self.fault(),
            Event::Fault => {}
            Event::Ends(Fault::Crash(node)) => {
                self.sky.lives[node as usize].0 = Life::Up;
                self.sky.later(node, self.sky.now, What::Start);
            }
            Event::Ends(fault) => {
                self.sky.apply(fault, -1);
                if let Fault::Pause(node) = fault {
                    self.goes_on(node);
                }
            }
            Event::Removes if self.has_faults && self.sky.shape.faults.removals => self.sky.remove_some(),
            Event::Removes => {}
            Event::Adds(site) => self.sky.add(site),
            Event::Watch => self.watch(),
        }
    }

    /// After a pause: what came meanwhile is seen now, in the order in which it came.
    fn goes_on(&mut self, node: NodeId) {
        if self.sky.cuts[node as usize].paused == 0 {
            let now = self.sky.now;
            let held = std::mem::take(&mut self.sky.held[node as usize]);
            self.sky.queue.extend(held.into_iter().map(|held| Reverse(Scheduled { at: now, ..held })));
        }
    }

    fn fault(&mut self) {
        let faults = self.sky.shape.faults;
        let (fault, lasts) = Fault::random(&mut self.sky.dice, &faults, self.sky.shape.nodes);
        if let Fault::Crash(node) = fault {
            let is_exchanged = self.sky.shape.flaws.older_builds;
            self.kill(node, if is_exchanged { lasts.min(EXCHANGED_WITHIN) } else { lasts });
        } else {
            self.sky.apply(fault, 1);
            self.sky.schedule(self.sky.now + lasts.as_nanos() as u64, Event::Ends(fault));
        }
        let pause = self.sky.dice.between(Duration::ZERO, faults.every * 2);
        self.sky.schedule(self.sky.now + pause.as_nanos() as u64, Event::Fault);
    }

    fn watch(&mut self) {
        let head = self.sky.store.head();
        for node in 0..self.sky.shape.nodes {
            let is_cut = self.sky.cuts[node as usize].watch > 0 || self.sky.store_away > 0;
            if self.nodes[node as usize].applied() < head && !is_cut {
                let at = self.sky.now + self.sky.latency();
                self.sky.later(node, at, What::Watch(head));
            }
        }
        let every = self.sky.shape.watch_every.as_nanos() as u64;
        self.sky.schedule(self.sky.now + every, Event::Watch);
    }

    fn check_all_ended(&mut self) {
        for (id, request) in self.sky.requests.iter().enumerate().filter(|(_, request)| request.is_open) {
            let waited = Duration::from_nanos(self.sky.now - request.began);
            if waited > REQUEST_LONGEST + END_SLACK {
                self.sky.observer.no_end(id as RequestId, waited);
            }
        }
    }
}
