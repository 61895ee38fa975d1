//! All lanes of this edge, and the machine behind them: one for all threads, so a bound is one bound.
//!
//! A lane that is all but empty is lent permits (`lent`), and its requests do not come here. The others ask the machine under its
//! lock, which holds for a microsecond or so; what it decides about others is told to them after that. Not here: what is
//! decided (`nagaya_admission`), what a request does with the answer (`admission`).

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use foldhash::fast::RandomState;
use nagaya_admission::{
    Admission, Ask, Bounds, Class, Crowd, Effect, Explained, LaneId, LaneName, Moment, Next, Nonce, Offer,
    Pass, Prediction, Pressure, Record, Refused, Run, Standing, Used,
};
use nagaya_base::Reckoning;
use nagaya_cmdb::{Site, SiteName, Tenant, TenantName};
use nagaya_rules::{Lane as RuleLane, LaneRun};
use nagaya_telemetry::Gauge;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, oneshot};

use super::lent::Lent;
use super::pressure::Throttled;
use super::tickets;
use super::{Of, Permit};
use crate::options::Options;
use crate::recent::Recent;

/// Lanes kept although no thread has a route to them. Beyond it they are forgotten with what was learned in them.
const LANES_MAX: usize = 16_384;

/// Permits a calm lane is lent at once: as many as one thread's requests are likely to be at work on there together.
const LENT: u32 = 16;

/// Tickets whose pages are told by a stream when it is their turn. Others come back by themselves at the time they were told.
const LISTENED_MAX: usize = 20_000;

/// Of the connections and of the descriptors this process may have, one in so many may be such a stream: however many wait outside,
/// there is room for those whose turn it is.
const LISTENED_PART: usize = 4;

/// Pages of one ticket that are told. Browsers open six connections to a site over HTTP/1.1, for all tabs together: with each held
/// by a stream, no tab could load anything.
const LISTENERS_MAX: usize = 2;

/// Records of tickets that may wait to be taken to the store.
const RECORDS_MAX: usize = 65_536;

/// Of a tenant or a site whose record gives no weight.
const WEIGHT: u32 = 100;

/// Most that run at once in a site whose bound adapts and whose record gives no other.
const AUTO_MAX: u32 = 256;

/// Part of a lane's capacity that is promised by tickets; the rest takes up what a node does slower than foreseen.
const PROMISED_SHARE: f32 = 0.9;

/// Rules may ask about a lane for each request, and counting goes through all lanes.
const CROWDED_AGE_MAX: Duration = Duration::from_millis(10);

type Map<K, V> = HashMap<K, V, RandomState>;

/// One lane.
#[derive(Debug)]
pub struct Lane {
    pub id: LaneId,
    pub name: LaneName,
    /// `site blog`, `tenant acme`, `lane blog checkout`.
    pub label: Box<str>,
    /// The lane around it.
    inside: LaneId,
    /// Longest predicted wait, milliseconds.
    wait_ms: AtomicU64,
    /// Since when its tenant gives way on the processor, as a [`Moment`]; 0: it does not. One for all of a tenant's lanes.
    gives_way: Arc<AtomicU64>,
    lent: Lent,
    throttled: Throttled,
    /// What rules are told of it.
    crowded: Recent<Crowded>,
    lanes: Weak<Lanes>,
}

/// How full a lane is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Crowded {
    pub running: u32,
    pub waiting: u32,
    /// So many more may run at once, here and in all lanes around it.
    pub free: u32,
    /// The wait a newcomer would have; `None`: not known.
    pub wait: Option<Duration>,
}

/// What whoever waits is told.
pub type Told = Result<(), Refused>;

/// A stream of a waiting page, told once: come, and until when.
pub type Called = oneshot::Sender<Moment>;

#[derive(Debug)]
pub struct Lanes {
    state: Mutex<State>,
    reckoning: Reckoning,
    /// Threads that serve.
    threads: usize,
    /// Tickets whose pages are told, at most.
    listened_max: AtomicUsize,
    /// The machine may want another tick than the one it was promised.
    pub(super) stirred: Notify,
    /// Somebody has got in line.
    pub(super) lined: Notify,
    me: Weak<Self>,
}

#[derive(Debug)]
struct State {
    machine: Admission,
    by_label: Map<Box<str>, Arc<Lane>>,
    by_id: Map<LaneId, Arc<Lane>>,
    /// What each lane was last told to be.
    bounds: Map<LaneId, Bounds>,
    waiting: Map<Pass, oneshot::Sender<Told>>,
    listening: Map<Nonce, Vec<Called>>,
    records: Vec<Record>,
    /// What an earlier start left of lanes that have not been made yet.
    left: Map<LaneName, Vec<Record>>,
    all_waiting: Gauge,
}

/// Why a page is not told when its holder may come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Untold {
    /// Other pages of the same ticket are.
    Others,
    TooMany,
}

/// What became of a request at the gate.
pub enum Entered {
    Runs(Pass),
    Waits(Pass, Prediction, oneshot::Receiver<Told>),
    /// Turned away, in one way or another; with what is to be stored before anybody is told.
    Turned(Offer, Vec<Record>),
}

impl Lanes {
    /// `all_waiting` is kept at the number of requests in line.
    pub fn new(options: &Options, all_waiting: Gauge, reckoning: Reckoning) -> Arc<Self> {
        Arc::new_cyclic(|me| {
            let machine = Admission::new(Moment(reckoning.now_us()), node_bounds(options));
            let state = State {
                machine,
                by_label: Map::default(),
                by_id: Map::default(),
                bounds: Map::default(),
                waiting: Map::default(),
                listening: Map::default(),
                records: Vec::new(),
                left: Map::default(),
                all_waiting,
            };
            let cores = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
            let threads = if options.threads == 0 { cores() } else { options.threads };
            Self {
                state: Mutex::new(state),
                reckoning,
                threads,
                listened_max: AtomicUsize::new(listened_max(options, threads)),
                stirred: Notify::new(),
                lined: Notify::new(),
                me: Weak::clone(me),
            }
        })
    }

    pub fn now(&self) -> Moment {
        Moment(self.reckoning.now_us())
    }

    pub fn reckoning(&self) -> Reckoning {
        self.reckoning
    }

    /// What the wall clock, as it is set now, will show at this moment, in microseconds since 1970.
    pub fn on_wall(&self, moment: Moment) -> Moment {
        Moment(self.reckoning.on_wall_us(moment.0))
    }

    /// The lane of a site as its records have it now, in its tenant's.
    pub fn of_site(&self, site: &Site, tenant: &Tenant, options: &Options) -> Arc<Lane> {
        let mut state = self.state.lock();
        let now = self.now();
        let root = state.machine.root();
        let bounds = tenant_bounds(tenant, options);
        let around = self.lane(&mut state, now, root, &format!("tenant {}", tenant.name), bounds);
        self.lane(&mut state, now, around.id, &format!("site {}", site.name), site_bounds(site, options))
    }

    /// The lane that a rule names, within a site's: bounded as the site is, but for what the rule says.
    pub fn of_rule(&self, site: &Lane, rule: &RuleLane) -> Arc<Lane> {
        let mut state = self.state.lock();
        let now = self.now();
        let around = state.bounds.get(&site.id).cloned();
        let label = format!("lane {} {}", site.label.strip_prefix("site ").unwrap_or(&site.label), rule.name);
        let mut bounds = around.unwrap_or_else(|| unbounded(WEIGHT));
        bounds.run = match (rule.run, &bounds.run) {
            (LaneRun::Fixed(run), _) => Run::Fixed(run),
            // Its site's bound holds for it in any case.
            (LaneRun::Auto, Run::Fixed(max) | Run::Auto { max, .. }) => {
                Run::Auto { min: 1, max: (*max).clamp(1, AUTO_MAX) }
            }
        };
        bounds.wait = rule.wait.unwrap_or(bounds.wait);
        bounds.weight = WEIGHT;
        if !rule.tickets {
            bounds.next = None;
        }
        self.lane(&mut state, now, site.id, &label, bounds)
    }

    /// Sets what holds for the whole node.
    pub fn set_options(&self, options: &Options) {
        self.listened_max.store(listened_max(options, self.threads), Ordering::Relaxed);
        let mut state = self.state.lock();
        let (now, root) = (self.now(), state.machine.root());
        state.machine.set(now, root, node_bounds(options));
        self.carry_out(state, now);
    }

    fn lane(
        &self,
        state: &mut MutexGuard<'_, State>,
        now: Moment,
        inside: LaneId,
        label: &str,
        bounds: Bounds,
    ) -> Arc<Lane> {
        let found = state.by_label.get(label).map(Arc::clone);
        if let Some(moved) = found.as_ref().filter(|lane| lane.inside != inside) {
            // Its site has another tenant now.
            self.drop_lane(state, now, moved);
        } else if let Some(lane) = found {
            self.set_bounds(state, now, &lane, bounds);
            tell(self.effects(state, now));
            return lane;
        }
        if state.by_label.len() >= LANES_MAX {
            self.forget_unused(state, now);
        }
        let name = name_of(label);
        let id = state.machine.lane(now, inside, name, bounds.clone());
        for record in state.left.remove(&name).unwrap_or_default() {
            state.machine.restore(now, id, record);
        }
        let lanes = Weak::clone(&self.me);
        let wait_ms = AtomicU64::new(millis(bounds.wait));
        let lent = Lent::new(self.threads);
        let gives_way =
            state.by_id.get(&inside).map_or_else(Arc::default, |tenants| Arc::clone(&tenants.gives_way));
        let lane = Arc::new(Lane {
            id,
            name,
            label: label.into(),
            inside,
            wait_ms,
            gives_way,
            lent,
            throttled: Throttled::default(),
            crowded: Recent::new(CROWDED_AGE_MAX),
            lanes,
        });
        state.by_label.insert(label.into(), Arc::clone(&lane));
        state.by_id.insert(id, Arc::clone(&lane));
        state.bounds.insert(id, bounds);
        tell(self.effects(state, now));
        lane
    }

    /// Forgets lanes that no route has and in which nothing is promised.
    fn forget_unused(&self, state: &mut MutexGuard<'_, State>, now: Moment) {
        let is_unused = |lane: &Arc<Lane>| {
            let explained = state.machine.explain(now, lane.id);
            // Twice here, and nowhere else.
            Arc::strong_count(lane) <= 2
                && !lane.label.starts_with("tenant ")
                && explained.is_none_or(|lane| lane.running == 0 && lane.waiting == 0 && lane.promised == 0)
        };
        let unused: Vec<_> = state.by_label.values().filter(|lane| is_unused(lane)).map(Arc::clone).collect();
        for lane in unused {
            self.drop_lane(state, now, &lane);
        }
    }

    /// Forgets a lane. Who waits in it is turned away.
    fn drop_lane(&self, state: &mut State, now: Moment, lane: &Arc<Lane>) {
        state.by_label.remove(&lane.label);
        state.by_id.remove(&lane.id);
        state.bounds.remove(&lane.id);
        // What is in use comes back as its requests end; the machine takes it from a lane that is gone, too.
        state.machine.give_back(now, lane.id, lane.lent.recall());
        state.machine.remove(now, lane.id);
    }

    /// A site's record has changed: its bounds hold from now on, also for those who wait.
    pub fn site_changed(&self, site: &Site, options: &Options) {
        self.rebound(&format!("site {}", site.name), site_bounds(site, options));
    }

    /// A tenant's record has changed.
    pub fn tenant_changed(&self, tenant: &Tenant, options: &Options) {
        self.rebound(&format!("tenant {}", tenant.name), tenant_bounds(tenant, options));
    }

    fn rebound(&self, label: &str, bounds: Bounds) {
        let mut state = self.state.lock();
        let now = self.now();
        let Some(lane) = state.by_label.get(label).map(Arc::clone) else { return };
        self.set_bounds(&mut state, now, &lane, bounds);
        self.carry_out(state, now);
    }

    fn set_bounds(&self, state: &mut State, now: Moment, lane: &Lane, bounds: Bounds) {
        if state.bounds.get(&lane.id) != Some(&bounds) {
            state.machine.set(now, lane.id, bounds.clone());
            lane.wait_ms.store(millis(bounds.wait), Ordering::Relaxed);
            state.bounds.insert(lane.id, bounds);
        }
    }

    /// A site's records are gone, and with them its lanes.
    pub fn drop_site(&self, site: &SiteName) {
        let mut state = self.state.lock();
        let now = self.now();
        let own = format!("site {site}");
        let inner = format!("lane {site} ");
        let is_its = |lane: &&Arc<Lane>| *lane.label == *own || lane.label.starts_with(&inner);
        let gone: Vec<_> = state.by_label.values().filter(is_its).map(Arc::clone).collect();
        for lane in gone {
            self.drop_lane(&mut state, now, &lane);
        }
        self.carry_out(state, now);
    }

    /// What an earlier start has left in the store, before anybody is served.
    pub fn restore(&self, records: Vec<(LaneName, Record)>) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let now = self.now();
        let known: Map<LaneName, LaneId> = state.by_id.values().map(|lane| (lane.name, lane.id)).collect();
        for (name, record) in records {
            match known.get(&name) {
                Some(lane) => state.machine.restore(now, *lane, record),
                None => state.left.entry(name).or_default().push(record),
            }
        }
    }

    /// Asks for the right to run.
    pub fn enter(&self, lane: &Lane, ask: Ask) -> Entered {
        let mut state = self.state.lock();
        let now = self.now();
        let entered = match state.machine.offer(now, lane.id, ask) {
            Offer::Run(pass) => Entered::Runs(pass),
            Offer::Wait(pass, prediction) => {
                let (tell, told) = oneshot::channel();
                state.waiting.insert(pass, tell);
                state.all_waiting.inc();
                self.lined.notify_one();
                Entered::Waits(pass, prediction, told)
            }
            turned => {
                let told = self.effects(&mut state, now);
                // Only who is promised something waits for the store; what is left is taken there in passing.
                let is_new = matches!(&turned, Offer::Next(promise) if promise.is_new);
                let records = if is_new { std::mem::take(&mut state.records) } else { Vec::new() };
                drop(state);
                tell(told);
                return Entered::Turned(turned, records);
            }
        };
        self.carry_out(state, now);
        entered
    }

    /// A permit of a calm lane; none if somebody waits there.
    pub fn enter_calm(&self, lane: &Arc<Lane>) -> Option<Permit> {
        let is_in = lane.enter() || {
            let mut state = self.state.lock();
            let count = state.machine.lend(self.now(), lane.id, LENT);
            if count > 0 {
                lane.lent.own().grant(count);
            }
            count > 0
        };
        is_in.then(|| Permit::lent(Of::Lane(Arc::clone(lane))))
    }

    /// The client left while it waited, or was called and did not come.
    pub fn cancel(&self, pass: Pass) {
        let mut state = self.state.lock();
        let now = self.now();
        if state.waiting.remove(&pass).is_some() {
            state.all_waiting.dec();
        }
        state.machine.cancel(now, pass);
        self.carry_out(state, now);
    }

    /// What ran has ended.
    pub fn release(&self, pass: Pass, used: Used) {
        let mut state = self.state.lock();
        let now = self.now();
        state.machine.release(now, pass, used);
        self.carry_out(state, now);
    }

    /// The wait of one in line, as it is now.
    pub fn prediction(&self, pass: Pass) -> Option<Prediction> {
        self.state.lock().machine.prediction(self.now(), pass)
    }

    pub fn standing(&self, nonce: Nonce) -> Standing {
        self.state.lock().machine.standing(self.now(), nonce)
    }

    /// Whoever holds this ticket is told when it may come.
    ///
    /// # Errors
    /// If enough are told already: pages of this ticket, or pages at all.
    pub fn listen(&self, nonce: Nonce) -> Result<oneshot::Receiver<Moment>, Untold> {
        let mut state = self.state.lock();
        let most = self.listened_max.load(Ordering::Relaxed);
        if state.listening.len() >= most {
            state.listening.retain(|_, pages| pages.iter().any(|page| !page.is_closed()));
            if state.listening.len() >= most {
                return Err(Untold::TooMany);
            }
        }
        let pages = state.listening.entry(nonce).or_default();
        pages.retain(|page| !page.is_closed());
        if pages.len() >= LISTENERS_MAX {
            return Err(Untold::Others);
        }
        let (call, called) = oneshot::channel();
        pages.push(call);
        let now = self.now();
        state.machine.listen(now, nonce, true);
        self.carry_out(state, now);
        Ok(called)
    }

    /// A page of this ticket listens no more. With the last one its holder cannot be called.
    pub fn hang_up(&self, nonce: Nonce) {
        let mut state = self.state.lock();
        let Some(pages) = state.listening.get_mut(&nonce) else { return };
        pages.retain(|page| !page.is_closed());
        if pages.is_empty() {
            state.listening.remove(&nonce);
            let now = self.now();
            state.machine.listen(now, nonce, false);
            self.carry_out(state, now);
        }
    }

    /// A ticket that could not be stored is none.
    pub fn withdraw(&self, nonce: Nonce) {
        let mut state = self.state.lock();
        let now = self.now();
        state.machine.forget(now, nonce);
        self.carry_out(state, now);
    }

    /// The lane that is called so in paths: a site's own, or one in it.
    pub fn by_short(&self, site: &Arc<Lane>, short: &str) -> Option<Arc<Lane>> {
        let state = self.state.lock();
        let is_it = |lane: &&Arc<Lane>| {
            (lane.id == site.id || lane.inside == site.id) && tickets::short(lane) == short
        };
        if is_it(&site) { Some(Arc::clone(site)) } else { state.by_id.values().find(is_it).cloned() }
    }

    /// All promises that are out.
    pub fn promises(&self) -> Vec<Record> {
        self.state.lock().machine.promises()
    }

    /// Takes what is to be stored.
    pub fn take_records(&self) -> Vec<Record> {
        std::mem::take(&mut self.state.lock().records)
    }

    /// What time alone changes. Says when to come again.
    pub fn tick(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        let now = self.now();
        let next = state.machine.tick(now);
        self.carry_out(state, now);
        next.map(|next| Duration::from_micros(next.0.saturating_sub(now.0)))
    }

    /// How hard it is for what runs, in each lane whose bound adapts: on the whole node, and by the lane's own limits.
    pub fn feel(&self, pressure: Pressure) {
        let mut state = self.state.lock();
        let now = self.now();
        let state = &mut *state;
        for (id, bounds) in &state.bounds {
            if matches!(bounds.run, Run::Auto { .. }) {
                let throttled = state.by_id.get(id).map_or(0.0, |lane| lane.throttled.read());
                let starved = pressure.starved.max(throttled);
                state.machine.feel(now, *id, Pressure { starved, ..pressure });
            }
        }
    }

    /// Some lane's bound adapts.
    pub fn any_adapts(&self) -> bool {
        self.state.lock().bounds.values().any(|bounds| matches!(bounds.run, Run::Auto { .. }))
    }

    /// Each lane with what is known of it. Permits that are lent and not in use do not count as running.
    pub fn explain(&self) -> Vec<(Arc<Lane>, Explained)> {
        let state = self.state.lock();
        let now = self.now();
        let spare = state.spare();
        let explain = |lane: &Arc<Lane>| {
            let mut explained = state.machine.explain(now, lane.id)?;
            explained.running = explained.running.saturating_sub(*spare.get(&lane.id).unwrap_or(&0));
            Some((Arc::clone(lane), explained))
        };
        state.by_id.values().filter_map(explain).collect()
    }

    /// How full a lane is.
    pub(super) fn crowded(&self, lane: &Lane) -> Crowded {
        let state = self.state.lock();
        let (now, root) = (self.now(), state.machine.root());
        let mut spare = state.spare();
        spare.insert(root, state.by_id.values().map(|lane| lane.lent.spare()).sum());
        let explain = |id: LaneId| {
            let explained = state.machine.explain(now, id)?;
            let running = explained.running.saturating_sub(*spare.get(&id).unwrap_or(&0));
            Some((running, explained))
        };
        let free = |id: LaneId| explain(id).map_or(0, |(running, lane)| lane.run.saturating_sub(running));
        let Some((running, explained)) = explain(lane.id) else { return Crowded::default() };
        let mut crowded = Crowded {
            running,
            waiting: explained.waiting,
            free: free(lane.id).min(free(lane.inside)),
            wait: explained.wait,
        };
        let mut around = state.by_id.get(&lane.inside);
        while let Some(lane) = around {
            crowded.free = crowded.free.min(free(lane.inside));
            around = state.by_id.get(&lane.inside);
        }
        if crowded.free > 0 && crowded.waiting == 0 {
            // The machine takes what is lent for what runs.
            crowded.wait = Some(Duration::ZERO);
        }
        crowded
    }

    /// What runs and waits of each tenant. Permits that are lent and not in use do not count as running.
    pub fn crowds(&self) -> Vec<(Arc<Lane>, Crowd)> {
        let state = self.state.lock();
        let spare = state.spare();
        let crowd = |crowd: Crowd| {
            let lane = state.by_id.get(&crowd.lane)?;
            let running = crowd.running.saturating_sub(*spare.get(&crowd.lane).unwrap_or(&0));
            Some((Arc::clone(lane), Crowd { running, ..crowd }))
        };
        state.machine.crowds().filter_map(crowd).collect()
    }

    /// Requests of all tenants that run now.
    pub fn running(&self) -> u32 {
        let state = self.state.lock();
        let root = state.machine.root();
        let all = state.machine.explain(self.now(), root).map_or(0, |root| root.running);
        all.saturating_sub(state.by_id.values().map(|lane| lane.lent.spare()).sum())
    }

    /// Lent permits that were recalled come back one by one.
    fn settle(&self, lane: &Lane) {
        let mut state = self.state.lock();
        let now = self.now();
        if lane.lent.own().settle() {
            state.machine.give_back(now, lane.id, 1);
            self.carry_out(state, now);
        }
    }

    fn learn(&self, lane: &Lane, class: Class, used: Used) {
        self.state.lock().machine.learn(self.now(), lane.id, class, used);
    }

    /// Does what the machine decided; says whom to tell what. Recalled permits that nobody uses go back at once, which may decide
    /// more.
    fn effects(&self, state: &mut State, now: Moment) -> Vec<(oneshot::Sender<Told>, Told)> {
        let mut told = Vec::new();
        loop {
            let effects: Vec<_> = state.machine.drain_effects().collect();
            if effects.is_empty() {
                return told;
            }
            for effect in effects {
                match effect {
                    Effect::Run(pass) => told.extend(state.end_of_wait(pass).map(|tell| (tell, Ok(())))),
                    Effect::Dismiss(pass, why) => {
                        told.extend(state.end_of_wait(pass).map(|tell| (tell, Err(why))));
                    }
                    Effect::Recall(id) => {
                        let spare = state.by_id.get(&id).map_or(0, |lane| lane.lent.recall());
                        if spare > 0 {
                            state.machine.give_back(now, id, spare);
                        }
                    }
                    Effect::Call { nonce, until } => {
                        // Nobody listens: its holder comes at the time it was told.
                        for page in state.listening.remove(&nonce).into_iter().flatten() {
                            let _ = page.send(until);
                        }
                    }
                    Effect::Store(record) if state.records.len() < RECORDS_MAX => {
                        state.records.push(record);
                        self.stirred.notify_one();
                    }
                    // The next start will not know that this ticket was used. Its promise is not touched.
                    Effect::Store(_) => {}
                }
            }
        }
    }

    /// Does what the machine decided, and tells those whom it concerns once the lock is free.
    fn carry_out(&self, mut state: MutexGuard<'_, State>, now: Moment) {
        let told = self.effects(&mut state, now);
        drop(state);
        tell(told);
    }
}

/// Whoever does not listen any more gives its permit back itself (`cancel`).
fn tell(told: Vec<(oneshot::Sender<Told>, Told)>) {
    for (tell, what) in told {
        let _ = tell.send(what);
    }
}

impl State {
    /// Lent permits that are not in use, for each lane and all lanes in it.
    fn spare(&self) -> Map<LaneId, u32> {
        let mut spare = Map::default();
        for lane in self.by_id.values() {
            let count = lane.lent.spare();
            let mut at = Some(lane);
            while let Some(lane) = at.filter(|_| count > 0) {
                *spare.entry(lane.id).or_default() += count;
                at = self.by_id.get(&lane.inside);
            }
        }
        spare
    }

    fn end_of_wait(&mut self, pass: Pass) -> Option<oneshot::Sender<Told>> {
        let tell = self.waiting.remove(&pass)?;
        self.all_waiting.dec();
        Some(tell)
    }
}

impl Lane {
    /// The right to run, if permits are lent and one is not in use.
    pub fn enter(&self) -> bool {
        self.lent.own().enter()
    }

    /// Gives back a lent permit. `sample`: what is to be learned from its request.
    pub fn leave(&self, sample: Option<(Class, Used)>) {
        let is_back = self.lent.own().leave();
        if is_back && sample.is_none() {
            return;
        }
        let Some(lanes) = self.lanes.upgrade() else { return };
        if let Some((class, used)) = sample {
            lanes.learn(self, class, used);
        }
        if !is_back {
            lanes.settle(self);
        }
    }

    /// For so much of its time the programs of a request that ran here stood still, as a CPU quota was used up.
    pub fn throttled(&self, still_us: u64, service: Duration) {
        self.throttled.add(still_us, service);
    }

    /// Longest that anybody waits here: predictions may be wrong by as much again as they may say.
    pub fn patience(&self) -> Duration {
        Duration::from_millis(self.wait_ms.load(Ordering::Relaxed).saturating_mul(2))
    }

    /// How full it is, or was a moment ago.
    pub fn crowded(&self) -> Crowded {
        self.crowded.get(|| self.lanes.upgrade().map(|lanes| lanes.crowded(self)).unwrap_or_default())
    }

    /// Whose lane it is, if it is a tenant's.
    pub fn tenant(&self) -> Option<TenantName> {
        TenantName::new(self.label.strip_prefix("tenant ")?).ok()
    }

    /// Since when its tenant gives way on the processor.
    pub fn gives_way_since(&self) -> Option<Moment> {
        Some(Moment(self.gives_way.load(Ordering::Relaxed))).filter(|since| since.0 > 0)
    }

    pub(super) fn set_giving_way(&self, since: Option<Moment>) {
        self.gives_way.store(since.map_or(0, |since| since.0), Ordering::Relaxed);
    }

    /// All lanes of the edge.
    pub fn lanes(&self) -> Option<Arc<Lanes>> {
        self.lanes.upgrade()
    }
}

/// The first half of a hash that nobody can aim at: two lanes never have the same name.
fn name_of(label: &str) -> LaneName {
    let digest = ring::digest::digest(&ring::digest::SHA256, label.as_bytes());
    let mut name = [0; 16];
    name.copy_from_slice(&digest.as_ref()[..16]);
    LaneName(name)
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

/// Without a bound of its own.
fn unbounded(weight: u32) -> Bounds {
    Bounds {
        run: Run::Fixed(u32::MAX),
        wait: Duration::MAX,
        wait_count: u32::MAX,
        wait_bytes: u64::MAX,
        next: None,
        weight,
    }
}

/// Each page holds a connection, and with it a descriptor. Of one ticket there may be two.
fn listened_max(options: &Options, threads: usize) -> usize {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let files = files.and_then(|files| usize::try_from(files).ok()).unwrap_or(usize::MAX);
    let connections = options.limits.connections.saturating_mul(threads);
    (connections.min(files) / LISTENED_PART).clamp(1, LISTENED_MAX)
}

fn node_bounds(options: &Options) -> Bounds {
    let run = match options.admission.node_max_concurrent {
        0 => u32::MAX,
        some => some,
    };
    Bounds { run: Run::Fixed(run), ..unbounded(1) }
}

fn tenant_bounds(tenant: &Tenant, options: &Options) -> Bounds {
    let run = tenant.max_concurrent.unwrap_or(options.tenant_max_concurrent);
    Bounds { run: Run::Fixed(run), ..unbounded(tenant.weight.unwrap_or(WEIGHT)) }
}

fn site_bounds(site: &Site, options: &Options) -> Bounds {
    let (own, node) = (&site.admission, &options.admission);
    let run = match (own.auto, site.max_concurrent) {
        (true, max) => Run::Auto { min: 1, max: max.unwrap_or(AUTO_MAX) },
        (false, max) => Run::Fixed(max.unwrap_or(u32::MAX)),
    };
    let window = own.slot_seconds.map_or(node.slot_ms, |seconds| u64::from(seconds) * 1000);
    let next = own.tickets.unwrap_or(node.tickets).then(|| Next {
        window: Duration::from_millis(window),
        horizon: Duration::from_millis(node.horizon_ms),
        tickets: node.tickets_max,
        share: PROMISED_SHARE,
    });
    let wait = own.wait_seconds.map_or(options.wait_ms, |seconds| u64::from(seconds) * 1000);
    Bounds {
        run,
        wait: Duration::from_millis(wait),
        wait_count: own.waiting.unwrap_or(options.max_waiting),
        wait_bytes: node.body_bytes,
        next,
        weight: own.weight.unwrap_or(WEIGHT),
    }
}
