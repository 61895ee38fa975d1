//! The simulated cluster as a whole: real time, the network, the schedule, and failed nodes.
//!
//! Not here: the work of a node (`node`) and of the store (`store`), the invariants (`observer`).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

use nagaya_placement::Moment;
use nagaya_placement::lease::DRIFT_PPM;

use crate::dice::Dice;
use crate::faults::{FaultKinds, InjectedFault};
use crate::node::SimNode;
use crate::observer::{SafetyViolation, WorldObserver};
use crate::store::SimStore;
use crate::wire::{NodeEvent, NodeId, RequestId, SiteId, SiteParts, StoreAsk};

/// Longest time of a request: then the node to which it came refuses it.
pub(crate) const REQUEST_LONGEST: Duration = Duration::from_secs(15);
/// Time after which a store gives up what it could not do, as etcd does.
const STORE_GIVES_UP: Duration = Duration::from_millis(1500);
/// Interval at which a connection repeats unacknowledged data, and the number of repeats before it
/// counts as gone.
const SENT_AGAIN: Duration = Duration::from_millis(200);
const SENDS: u32 = 15;
/// Step from a node that is down to the next for clients. It divides no number of nodes: neighbours
/// may die together.
const ENTRY_STEP: u32 = 37;
/// Average time between two removals of a site.
const REMOVED_EVERY: Duration = Duration::from_millis(700);
/// Interval at which an unavailable store gets a change of a site again.
const TOLD_AGAIN: Duration = Duration::from_millis(50);
/// Longest downtime of a node whose program is exchanged: it still has most of its sites then.
const EXCHANGED_WITHIN: Duration = Duration::from_millis(60);
/// Slack for all that a machine may still do when its time is over.
const END_SLACK: Duration = Duration::from_secs(1);

/// Parameters of a world.
#[derive(Debug, Clone, Copy)]
pub struct WorldShape {
    pub seed: u64,
    pub nodes: u32,
    pub sites: u32,
    pub faults: FaultKinds,
    /// Most nodes of one site.
    pub copies_max: u32,
    /// Interval of the watch.
    pub watch_every: Duration,
    pub flaws: PlantedFlaws,
}

/// Deliberate mistakes: the simulation has to find each of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PlantedFlaws {
    /// A lease is counted from the reply to a read instead of from its sending.
    pub authority_from_receipt: bool,
    /// A site is served as soon as its placement is known.
    pub no_wait: bool,
    /// Sites are taken from a node despite a promise not to.
    pub promises_ignored: bool,
    /// A read gives a lease to a node whose copy is older than the read.
    pub copy_may_lag: bool,
    /// Half of the other members are enough to vouch.
    pub half_may_vouch: bool,
    /// A restarted member does not wait for the end of its possible earlier promises.
    pub promises_forgotten: bool,
    /// The placement of a removed site is deleted at once.
    pub placements_go_with_sites: bool,
    /// A read that finds a mark against the node renews its lease.
    pub marks_ignored: bool,
    /// A mark also counts for a site that the node got after it was marked.
    pub placements_newer_than_marks: bool,
    /// A node that takes a site waits for its own lease term.
    pub own_fence_waited: bool,
    /// The wait of the node that loses a site is forgotten.
    pub earlier_ones_forgotten: bool,
    /// Not a mistake as long as it is checked. Nodes restart as an older build that does not know
    /// of marks, and say so.
    pub older_builds: bool,
    /// It is not checked whether a node has rewritten its record since it was marked.
    pub records_newer_than_marks: bool,
}

/// Result of a run.
#[derive(Debug)]
pub struct WorldReport {
    pub violations: Vec<SafetyViolation>,
    pub answers: u64,
    /// By reason.
    pub refusals: BTreeMap<String, u64>,
    /// Requests whose own node ended.
    pub abandoned: u64,
    pub vouched: u64,
    pub latest: Duration,
    pub slowest: Duration,
    pub relocations: u64,
    /// Changes that added a node to a site, and those that removed one.
    pub copied: u64,
    /// Placements of removed sites that were deleted.
    pub forgotten: u64,
    /// Relocations that waited less because of a mark.
    pub marked: u64,
    pub events: u64,
}

/// State of a node. If its host is down, too, nothing refuses for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NodeLife {
    Up,
    ProcessDown,
    HostDown,
}

/// Offset and drift of a node's clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NodeClock {
    offset: u64,
    ppm: i64,
}

impl NodeClock {
    pub fn at(self, real: u64) -> Moment {
        let drift = i128::from(real) * i128::from(self.ppm) / 1_000_000;
        Moment((i128::from(self.offset) + i128::from(real) + drift) as u64)
    }

    /// Returns the first real time at which this clock shows `local`.
    pub fn real(self, local: Moment) -> u64 {
        let shown = i128::from(local.0) - i128::from(self.offset);
        (shown.max(0) * 1_000_000 / (1_000_000 + i128::from(self.ppm))) as u64 + 2
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct ClientRequest {
    pub site: SiteId,
    pub entry: NodeId,
    pub began: u64,
    pub attempts: u32,
    pub is_open: bool,
}

#[derive(Debug)]
enum WorldEvent {
    Node {
        node: NodeId,
        life: u32,
        what: NodeEvent,
    },
    Sends {
        from: NodeId,
        life: u32,
        to: NodeId,
        what: NodeEvent,
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
    Ends(InjectedFault),
    /// An operator removes some site.
    Removes,
    Adds(SiteId),
    Watch,
}

#[derive(Debug)]
struct ScheduledEvent {
    at: u64,
    order: u64,
    event: WorldEvent,
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}
impl Eq for ScheduledEvent {}
impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for ScheduledEvent {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// Number of present faults of each kind at one place.
#[derive(Debug, Default, Clone)]
struct ActiveCuts {
    to: u32,
    from: u32,
    store_to: u32,
    store_from: u32,
    watch: u32,
    paused: u32,
}

/// The environment of the nodes.
#[derive(Debug)]
pub(crate) struct Environment {
    pub now: u64,
    pub dice: Dice,
    pub shape: WorldShape,
    pub store: SimStore,
    pub observer: WorldObserver,
    pub requests: Vec<ClientRequest>,
    pub clocks: Vec<NodeClock>,
    pub names: Vec<String>,
    lives: Vec<(NodeLife, u32)>,
    cuts: Vec<ActiveCuts>,
    links: BTreeMap<(NodeId, NodeId), u32>,
    store_away: u32,
    slow_disk: Duration,
    /// Messages for nodes that pause.
    held: Vec<Vec<ScheduledEvent>>,
    queue: BinaryHeap<Reverse<ScheduledEvent>>,
    order: u64,
    events: u64,
}

impl Environment {
    fn schedule(&mut self, at: u64, event: WorldEvent) {
        self.order += 1;
        self.queue.push(Reverse(ScheduledEvent { at: at.max(self.now), order: self.order, event }));
    }

    /// Schedules an event of the node itself at this real time, unless it restarts before.
    pub fn later(&mut self, node: NodeId, at: u64, what: NodeEvent) {
        let life = self.lives[node as usize].1;
        self.schedule(at, WorldEvent::Node { node, life, what });
    }

    /// Sends a message to another node. Datagrams are lost occasionally; data over a connection is
    /// repeated for a while.
    pub fn send(&mut self, from: NodeId, to: NodeId, what: NodeEvent) {
        self.send_tries(from, to, what, SENDS);
    }

    /// Returns how often the node has been started.
    pub fn life(&self, node: NodeId) -> u32 {
        self.lives[node as usize].1
    }

    fn send_tries(&mut self, from: NodeId, to: NodeId, what: NodeEvent, tries: u32) {
        let is_datagram = matches!(what, NodeEvent::Probe { .. } | NodeEvent::ProbeAnswer { .. });
        let is_lost = is_datagram && self.dice.chance(self.shape.faults.loss);
        let is_cut = self.cuts[from as usize].to > 0
            || self.cuts[to as usize].from > 0
            || self.links.contains_key(&(from, to));
        let is_down = self.lives[to as usize].0 != NodeLife::Up;
        if (is_cut || is_down) && !is_datagram && tries > 0 {
            let life = self.lives[from as usize].1;
            let again = self.now + SENT_AGAIN.as_nanos() as u64;
            self.schedule(again, WorldEvent::Sends { from, life, to, what, tries: tries - 1 });
            return;
        }
        if is_lost || is_cut {
            return;
        }
        let at = self.now + self.latency();
        let (state, life) = self.lives[to as usize];
        match (state, what) {
            (NodeLife::Up, what) => self.schedule(at, WorldEvent::Node { node: to, life, what }),
            (NodeLife::ProcessDown, NodeEvent::Probe { probe, .. }) => {
                let what = NodeEvent::ProbeRefused { from: to, probe };
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
        let life = self.lives[node as usize].1;
        let sent = self.now;
        self.schedule(at, WorldEvent::StoreArrives { node, life, ask, sent });
    }

    pub fn local(&self, node: NodeId) -> Moment {
        self.clocks[node as usize].at(self.now)
    }

    pub fn real(&self, node: NodeId, local: Moment) -> u64 {
        self.clocks[node as usize].real(local)
    }

    /// Notes that the client has its response.
    pub fn answer(&mut self, request: RequestId) {
        if let Some(waited) = self.close(request) {
            self.observer.answered(waited);
        }
    }

    /// Notes that the client gets a refusal, and why.
    pub fn refuse(&mut self, request: RequestId, why: &str) {
        if self.close(request).is_some() {
            self.observer.refused(why);
        }
    }

    /// Notes that the client requests a site that was removed.
    pub fn gone(&mut self, request: RequestId) {
        self.close(request);
    }

    fn close(&mut self, request: RequestId) -> Option<Duration> {
        let request = &mut self.requests[request as usize];
        let was_open = std::mem::replace(&mut request.is_open, false);
        was_open.then(|| Duration::from_nanos(self.now - request.began))
    }

    fn latency(&mut self) -> u64 {
        let least = Duration::from_micros(100);
        let most = Duration::from_micros(900);
        // Occasionally a packet is slow.
        let most = if self.dice.chance(1) { most * 30 } else { most };
        self.dice.between(least, most).as_nanos() as u64
    }

    fn store_arrives(&mut self, node: NodeId, life: u32, ask: StoreAsk, sent: u64) {
        let waited = Duration::from_nanos(self.now - sent);
        if self.store_away > 0 {
            // Some requests are kept until there is a leader again.
            if self.dice.chance(40) && waited < STORE_GIVES_UP {
                let pause = self.dice.between(Duration::from_millis(5), Duration::from_millis(200));
                self.schedule(
                    self.now + pause.as_nanos() as u64,
                    WorldEvent::StoreArrives { node, life, ask, sent },
                );
            }
            return;
        }
        let disk = self.dice.between(Duration::from_micros(300), Duration::from_millis(3)) + self.slow_disk;
        self.schedule(self.now + disk.as_nanos() as u64, WorldEvent::StoreDoes { node, life, ask });
    }

    fn store_does(&mut self, node: NodeId, life: u32, ask: StoreAsk) {
        let says = self.store.apply(self.now, node, ask, self.shape.flaws);
        // It has been done, and possibly no node learns of it.
        let is_lost = self.cuts[node as usize].store_from > 0 || self.dice.chance(self.shape.faults.loss);
        if !is_lost && self.lives[node as usize] == (NodeLife::Up, life) {
            let at = self.now + self.latency();
            self.schedule(at, WorldEvent::Node { node, life, what: NodeEvent::Stored(says) });
        }
    }

    fn apply(&mut self, fault: InjectedFault, sign: i32) {
        let add = |count: &mut u32| *count = count.saturating_add_signed(sign);
        match fault {
            InjectedFault::CutOneWay(one, other) => self.link(one, other, sign),
            InjectedFault::Cut(one, other) => {
                self.link(one, other, sign);
                self.link(other, one, sign);
            }
            InjectedFault::CutOff { node, to, from } => {
                let cuts = &mut self.cuts[node as usize];
                [(to, &mut cuts.to), (from, &mut cuts.from)]
                    .into_iter()
                    .filter(|cut| cut.0)
                    .for_each(|cut| add(cut.1));
            }
            InjectedFault::CutStore { node, to, from } => {
                let cuts = &mut self.cuts[node as usize];
                let both = [(to, &mut cuts.store_to), (from, &mut cuts.store_from)];
                both.into_iter().filter(|cut| cut.0).for_each(|cut| add(cut.1));
                if from {
                    add(&mut self.cuts[node as usize].watch);
                }
            }
            InjectedFault::Pause(node) => add(&mut self.cuts[node as usize].paused),
            InjectedFault::Watch(node) => add(&mut self.cuts[node as usize].watch),
            InjectedFault::StoreAway => add(&mut self.store_away),
            InjectedFault::SlowDisk(by) if sign > 0 => self.slow_disk += by,
            InjectedFault::SlowDisk(by) => self.slow_disk -= by,
            InjectedFault::Crash(_) => {}
        }
    }

    fn remove_some(&mut self) {
        let site = self.dice.roll(u64::from(self.shape.sites)) as SiteId;
        if self.store_away == 0 && !self.store.removed.contains(&site) {
            self.store.set_present(self.now, site, false);
            if self.shape.flaws.placements_go_with_sites {
                self.store.forget(self.now, site);
            }
            // Usually at once; occasionally when nothing is left of it.
            let longest = Duration::from_secs(if self.dice.chance(20) { 12 } else { 1 });
            let away = self.dice.between(Duration::from_millis(5), longest);
            self.schedule(self.now + away.as_nanos() as u64, WorldEvent::Adds(site));
        }
        let pause = self.dice.between(Duration::ZERO, REMOVED_EVERY * 2);
        self.schedule(self.now + pause.as_nanos() as u64, WorldEvent::Removes);
    }

    fn add(&mut self, site: SiteId) {
        if self.store_away == 0 {
            self.store.set_present(self.now, site, true);
        } else {
            self.schedule(self.now + TOLD_AGAIN.as_nanos() as u64, WorldEvent::Adds(site));
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

/// A cluster and everything around it.
#[derive(Debug)]
pub struct SimWorld {
    nodes: Vec<SimNode>,
    sky: Environment,
    /// Latest end of each request, in order.
    deadlines: VecDeque<(u64, RequestId)>,
    has_faults: bool,
}

impl SimWorld {
    /// Makes a cluster in which every site is placed, and every node has just been started.
    pub fn new(shape: WorldShape) -> Self {
        let mut dice = Dice(shape.seed ^ 0x6e61_6761_7961);
        let clocks = (0..shape.nodes).map(|_| {
            let most = i64::from(DRIFT_PPM);
            // Usually at the allowed limit: values in between find nothing.
            let ppm = [-most, most, dice.roll(most as u64) as i64][dice.index(3)];
            NodeClock { offset: 1_000_000_000_000 + dice.roll(1 << 50), ppm }
        });
        let clocks: Vec<NodeClock> = clocks.collect();
        let mut store = SimStore::new(shape.sites as usize, shape.nodes as usize, shape.copies_max);
        for site in 0..shape.sites {
            store.put(
                0,
                site,
                SiteParts::one(dice.roll(u64::from(shape.nodes)) as NodeId, 1),
                Duration::ZERO,
            );
        }
        let sky = Environment {
            now: 0,
            dice,
            shape,
            store,
            observer: WorldObserver::new(shape.sites as usize, shape.copies_max),
            requests: Vec::new(),
            clocks,
            names: (0..shape.nodes).map(|node| format!("n{node}")).collect(),
            lives: vec![(NodeLife::Up, 0); shape.nodes as usize],
            cuts: vec![ActiveCuts::default(); shape.nodes as usize],
            links: BTreeMap::new(),
            store_away: 0,
            slow_disk: Duration::ZERO,
            held: (0..shape.nodes).map(|_| Vec::new()).collect(),
            queue: BinaryHeap::new(),
            order: 0,
            events: 0,
        };
        let nodes = (0..shape.nodes).map(|id| SimNode::new(id, shape.nodes, sky.store.head())).collect();
        let mut world = Self { nodes, sky, deadlines: VecDeque::new(), has_faults: false };
        for node in 0..shape.nodes {
            let at = world.sky.dice.roll(75_000_000);
            world.sky.later(node, at, NodeEvent::Start);
        }
        world.sky.schedule(0, WorldEvent::Watch);
        world
    }

    /// Returns the real time since the beginning.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.sky.now)
    }

    /// Enables or disables random faults; present ones end by themselves.
    pub fn faults(&mut self, on: bool) {
        if on && !self.has_faults {
            self.sky.schedule(self.sky.now, WorldEvent::Fault);
            self.sky.schedule(self.sky.now, WorldEvent::Removes);
        }
        self.has_faults = on;
    }

    /// Sends a client's request for the site to a node, or to another one if that is down.
    pub fn request(&mut self, site: u32, entry: u32) {
        let count = self.sky.shape.nodes;
        let up = (0..count).map(|step| (entry + step * ENTRY_STEP) % count);
        let Some(entry) = { up }.find(|node| self.sky.lives[*node as usize].0 == NodeLife::Up) else {
            return;
        };
        let id = self.sky.requests.len() as RequestId;
        let began = self.sky.now;
        self.sky.requests.push(ClientRequest { site, entry, began, attempts: 0, is_open: true });
        self.sky.later(entry, began, NodeEvent::Request(id));
        self.deadlines.push_back((began + REQUEST_LONGEST.as_nanos() as u64, id));
    }

    /// Requests a random site, at a random node.
    pub fn request_any(&mut self) {
        let site = self.sky.dice.roll(u64::from(self.sky.shape.sites)) as SiteId;
        let entry = self.sky.dice.roll(u64::from(self.sky.shape.nodes)) as NodeId;
        self.request(site, entry);
    }

    /// Ends the node at once, and restarts it after this time. Its copy of the records is as it was
    /// or older.
    pub fn kill(&mut self, node: u32, lasts: Duration) {
        let (life, number) = self.sky.lives[node as usize];
        if life != NodeLife::Up {
            return;
        }
        let state = if self.sky.dice.chance(30) { NodeLife::ProcessDown } else { NodeLife::HostDown };
        self.sky.lives[node as usize] = (state, number + 1);
        for request in self.sky.requests.iter_mut().filter(|request| request.is_open && request.entry == node)
        {
            // Its client sees a closed connection.
            request.is_open = false;
            self.sky.observer.abandoned += 1;
        }
        let at = self.sky.now + lasts.as_nanos() as u64;
        self.sky.schedule(at, WorldEvent::Ends(InjectedFault::Crash(node)));
    }

    /// Returns the sites that the store has on a node now.
    pub fn placed_on(&self, node: u32) -> Vec<u32> {
        let head = self.sky.store.head();
        let sites = 0..self.sky.shape.sites;
        sites.filter(|site| self.sky.store.at(*site, head).is_some_and(|at| at.of(node).is_some())).collect()
    }

    /// Runs for this time.
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

    /// Ends all faults. Every site is requested and has to be served, and no request may stay open.
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
            self.sky.observer.wrong(SafetyViolation::NotServed { site });
        }
    }

    pub fn violations(&self) -> &[SafetyViolation] {
        &self.sky.observer.violations
    }

    pub fn report(&self) -> WorldReport {
        let observer = &self.sky.observer;
        WorldReport {
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

    fn happens(&mut self, next: ScheduledEvent) {
        match next.event {
            WorldEvent::Node { node, life, what } => {
                if self.sky.lives[node as usize] != (NodeLife::Up, life) {
                    return;
                }
                if self.sky.cuts[node as usize].paused > 0 {
                    let event = WorldEvent::Node { node, life, what };
                    self.sky.held[node as usize].push(ScheduledEvent { event, ..next });
                    return;
                }
                self.nodes[node as usize].happens(what, &mut self.sky);
            }
            WorldEvent::StoreArrives { node, life, ask, sent } => {
                self.sky.store_arrives(node, life, ask, sent)
            }
            WorldEvent::StoreDoes { node, life, ask } => self.sky.store_does(node, life, ask),
            WorldEvent::Sends { from, life, to, what, tries } => {
                if self.sky.lives[from as usize] == (NodeLife::Up, life) {
                    self.sky.send_tries(from, to, what, tries);
                }
            }
            WorldEvent::Fault if self.has_faults => self.fault(),
            WorldEvent::Fault => {}
            WorldEvent::Ends(InjectedFault::Crash(node)) => {
                self.sky.lives[node as usize].0 = NodeLife::Up;
                self.sky.later(node, self.sky.now, NodeEvent::Start);
            }
            WorldEvent::Ends(fault) => {
                self.sky.apply(fault, -1);
                if let InjectedFault::Pause(node) = fault {
                    self.goes_on(node);
                }
            }
            WorldEvent::Removes if self.has_faults && self.sky.shape.faults.removals => {
                self.sky.remove_some()
            }
            WorldEvent::Removes => {}
            WorldEvent::Adds(site) => self.sky.add(site),
            WorldEvent::Watch => self.watch(),
        }
    }

    /// Ends a pause: waiting messages are handled now, in the order in which they came.
    fn goes_on(&mut self, node: NodeId) {
        if self.sky.cuts[node as usize].paused == 0 {
            let now = self.sky.now;
            let held = std::mem::take(&mut self.sky.held[node as usize]);
            self.sky.queue.extend(held.into_iter().map(|held| Reverse(ScheduledEvent { at: now, ..held })));
        }
    }

    fn fault(&mut self) {
        let faults = self.sky.shape.faults;
        let (fault, lasts) = InjectedFault::random(&mut self.sky.dice, &faults, self.sky.shape.nodes);
        if let InjectedFault::Crash(node) = fault {
            let is_exchanged = self.sky.shape.flaws.older_builds;
            self.kill(node, if is_exchanged { lasts.min(EXCHANGED_WITHIN) } else { lasts });
        } else {
            self.sky.apply(fault, 1);
            self.sky.schedule(self.sky.now + lasts.as_nanos() as u64, WorldEvent::Ends(fault));
        }
        let pause = self.sky.dice.between(Duration::ZERO, faults.every * 2);
        self.sky.schedule(self.sky.now + pause.as_nanos() as u64, WorldEvent::Fault);
    }

    fn watch(&mut self) {
        let head = self.sky.store.head();
        for node in 0..self.sky.shape.nodes {
            let is_cut = self.sky.cuts[node as usize].watch > 0 || self.sky.store_away > 0;
            if self.nodes[node as usize].applied() < head && !is_cut {
                let at = self.sky.now + self.sky.latency();
                self.sky.later(node, at, NodeEvent::Watch(head));
            }
        }
        let every = self.sky.shape.watch_every.as_nanos() as u64;
        self.sky.schedule(self.sky.now + every, WorldEvent::Watch);
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
