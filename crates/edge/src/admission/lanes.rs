//! Holds all lanes of this edge, and the machine behind them. There is one for all threads, so a
//! limit counts once.
//!
//! A lane that is almost empty lends permits (`lent_permits`), and its requests do not come here.
//! The others ask the machine under its lock, which is held for about a microsecond. Requests about
//! which it decides meanwhile learn that after the lock. Not here: the decisions
//! (`nagaya_admission`), the use of the answer by a request (`admission`).

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use foldhash::fast::RandomState;
use nagaya_admission::{
    Admission, AdmissionEffect, AdmissionRefusal, AdmissionRequest, CostClass, CpuPressure, Decision, LaneId,
    LaneLimits, LaneLoad, LaneName, LaneReport, Moment, Nonce, Prediction, RequestKey, RunLimit, ServiceUse,
    TicketPolicy, TicketRecord, TicketStatus,
};
use nagaya_base::AnchoredClock;
use nagaya_records::{Site, SiteName, Tenant, TenantName};
use nagaya_rules::{LaneRun, RuleLane};
use nagaya_telemetry::Gauge;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, oneshot};

use crate::admission::guests::GuestCounts;
use crate::admission::lent_permits::LentPermits;
use crate::admission::origins::SiteOrigins;
use crate::admission::permit::{Permit, PermitLane};
use crate::admission::pressure::ThrottleShare;
use crate::options::EdgeConfig;
use crate::ttl_value::TtlValue;

/// Maximum number of lanes kept without a route of any thread. Beyond it such lanes and their
/// learned data are dropped.
const LANES_MAX: usize = 16_384;

/// Permits that a calm lane is lent at once. One thread is likely to run that many requests there
/// together.
const LENT: u32 = 16;

/// Maximum number of tickets whose pages have a stream. Other pages come back at the time they
/// were given.
const LISTENED_MAX: usize = 20_000;

/// One in this many of the process's connections and descriptors may be such a stream. So there
/// is room for requests whose turn it is, however many wait outside.
const LISTENED_PART: usize = 4;

/// Maximum number of pages of one ticket with a stream. Browsers open six connections to a site
/// over HTTP/1.1, for all tabs together. If streams held all of them, no tab could load anything.
const LISTENERS_MAX: usize = 2;

/// Maximum number of ticket records that wait for the store.
const RECORDS_MAX: usize = 65_536;

/// Weight of a tenant or a site whose record gives none.
const WEIGHT: u32 = 100;

/// Maximum adaptive limit of a site whose record gives no other.
const AUTO_MAX: u32 = 256;

/// Part of a lane's capacity that tickets may promise. The rest covers work that is slower than
/// predicted.
const PROMISED_SHARE: f32 = 0.9;

/// Maximum age of a lane's status. Rules may ask for it in each request, and counting visits all
/// lanes.
const CROWDED_AGE_MAX: Duration = Duration::from_millis(10);

type SeededMap<K, V> = HashMap<K, V, RandomState>;

/// One lane.
#[derive(Debug)]
pub struct EdgeLane {
    pub id: LaneId,
    pub name: LaneName,
    /// Label, e.g. `site blog`, `tenant acme`, `lane blog checkout`.
    pub label: Box<str>,
    /// The parent lane.
    inside: LaneId,
    /// Maximum predicted wait, milliseconds.
    wait_ms: AtomicU64,
    /// Time since when its tenant has lowered CPU priority, as a [`Moment`]. 0 if it has not. All
    /// lanes of a tenant share it.
    gives_way: Arc<AtomicU64>,
    lent: LentPermits,
    throttled: ThrottleShare,
    /// Status for rules.
    crowded: TtlValue<LaneStatus>,
    /// Origins whose scripts may read responses of this site's lane.
    pub origins: SiteOrigins,
    lanes: Weak<LaneSet>,
}

/// Load of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LaneStatus {
    pub running: u32,
    pub waiting: u32,
    /// Number of further requests that may run at once, here and in all parent lanes.
    pub free: u32,
    /// Wait of a newcomer. `None` if it is not known.
    pub wait: Option<Duration>,
}

/// Result of a wait.
pub type TurnResult = Result<(), AdmissionRefusal>;

/// Sender to the stream of a waiting page. It carries one message: the time until which the
/// holder may come.
pub type TicketCallSender = oneshot::Sender<Moment>;

#[derive(Debug)]
pub struct LaneSet {
    state: Mutex<LaneTable>,
    pub(super) guests: Arc<GuestCounts>,
    anchored_clock: AnchoredClock,
    /// Number of serving threads.
    threads: usize,
    /// Maximum number of tickets whose pages have a stream.
    listened_max: AtomicUsize,
    /// Wakes the ticker: the machine may want an earlier tick than planned.
    pub(super) stirred: Notify,
    /// Signals that a request has begun to wait.
    pub(super) lined: Notify,
    me: Weak<Self>,
}

#[derive(Debug)]
struct LaneTable {
    machine: Admission,
    by_label: SeededMap<Box<str>, Arc<EdgeLane>>,
    by_id: SeededMap<LaneId, Arc<EdgeLane>>,
    /// Limits last given to each lane.
    bounds: SeededMap<LaneId, LaneLimits>,
    waiting: SeededMap<RequestKey, oneshot::Sender<TurnResult>>,
    listening: SeededMap<Nonce, Vec<TicketCallSender>>,
    records: Vec<TicketRecord>,
    /// Records of an earlier start for lanes that do not exist yet.
    left: SeededMap<LaneName, Vec<TicketRecord>>,
    all_waiting: Gauge,
}

/// Reason why a page gets no stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TicketListenError {
    /// Other pages of the same ticket have one.
    Others,
    TooMany,
}

/// Result of a request for admission.
pub enum AdmitResult {
    Runs(RequestKey),
    Waits(RequestKey, Prediction, oneshot::Receiver<TurnResult>),
    /// Turned away with this offer. The records must be stored before the client gets it.
    Turned(Decision, Vec<TicketRecord>),
}

impl LaneSet {
    /// Keeps `all_waiting` at the number of requests in line.
    pub fn new(options: &EdgeConfig, all_waiting: Gauge, anchored_clock: AnchoredClock) -> Arc<Self> {
        Arc::new_cyclic(|me| {
            let machine = Admission::new(Moment(anchored_clock.now_us()), node_bounds(options));
            let state = LaneTable {
                machine,
                by_label: SeededMap::default(),
                by_id: SeededMap::default(),
                bounds: SeededMap::default(),
                waiting: SeededMap::default(),
                listening: SeededMap::default(),
                records: Vec::new(),
                left: SeededMap::default(),
                all_waiting,
            };
            let cores = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
            let threads = if options.threads == 0 { cores() } else { options.threads };
            Self {
                state: Mutex::new(state),
                guests: Arc::default(),
                anchored_clock,
                threads,
                listened_max: AtomicUsize::new(listened_max(options, threads)),
                stirred: Notify::new(),
                lined: Notify::new(),
                me: Weak::clone(me),
            }
        })
    }

    pub fn now(&self) -> Moment {
        Moment(self.anchored_clock.now_us())
    }

    pub fn anchored_clock(&self) -> AnchoredClock {
        self.anchored_clock
    }

    /// Returns the reading of the present wall clock at this moment, microseconds since 1970.
    pub fn on_wall(&self, moment: Moment) -> Moment {
        Moment(self.anchored_clock.on_wall_us(moment.0))
    }

    /// Returns the lane of a site by its present record, in its tenant's lane.
    pub fn of_site(&self, site: &Site, tenant: &Tenant, options: &EdgeConfig) -> Arc<EdgeLane> {
        let mut state = self.state.lock();
        let now = self.now();
        let root = state.machine.root();
        let bounds = tenant_bounds(tenant, options);
        let around = self.lane(&mut state, now, root, &format!("tenant {}", tenant.name), bounds);
        self.lane(&mut state, now, around.id, &format!("site {}", site.name), site_bounds(site, options))
    }

    /// Returns the lane that a rule names, within a site's lane. It has the limits of the site,
    /// unless the rule gives others.
    pub fn of_rule(&self, site: &EdgeLane, rule: &RuleLane) -> Arc<EdgeLane> {
        let mut state = self.state.lock();
        let now = self.now();
        let around = state.bounds.get(&site.id).cloned();
        let label = format!("lane {} {}", site.label.strip_prefix("site ").unwrap_or(&site.label), rule.name);
        let mut bounds = around.unwrap_or_else(|| unbounded(WEIGHT));
        bounds.run = match (rule.run, &bounds.run) {
            (LaneRun::Fixed(run), _) => RunLimit::Fixed(run),
            // The limit of its site holds for it in any case.
            (LaneRun::Auto, RunLimit::Fixed(max) | RunLimit::Auto { max, .. }) => {
                RunLimit::Auto { min: 1, max: (*max).clamp(1, AUTO_MAX) }
            }
        };
        bounds.wait = rule.wait.unwrap_or(bounds.wait);
        bounds.weight = WEIGHT;
        if !rule.tickets {
            bounds.next = None;
        }
        self.lane(&mut state, now, site.id, &label, bounds)
    }

    /// Sets the limits of the whole node.
    pub fn set_options(&self, options: &EdgeConfig) {
        self.listened_max.store(listened_max(options, self.threads), Ordering::Relaxed);
        let mut state = self.state.lock();
        let (now, root) = (self.now(), state.machine.root());
        state.machine.set(now, root, node_bounds(options));
        self.carry_out(state, now);
    }

    fn lane(
        &self,
        state: &mut MutexGuard<'_, LaneTable>,
        now: Moment,
        inside: LaneId,
        label: &str,
        bounds: LaneLimits,
    ) -> Arc<EdgeLane> {
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
        let lent = LentPermits::new(self.threads);
        let gives_way =
            state.by_id.get(&inside).map_or_else(Arc::default, |tenants| Arc::clone(&tenants.gives_way));
        let lane = Arc::new(EdgeLane {
            id,
            name,
            label: label.into(),
            inside,
            wait_ms,
            gives_way,
            lent,
            throttled: ThrottleShare::default(),
            crowded: TtlValue::new(CROWDED_AGE_MAX),
            origins: SiteOrigins::default(),
            lanes,
        });
        state.by_label.insert(label.into(), Arc::clone(&lane));
        state.by_id.insert(id, Arc::clone(&lane));
        state.bounds.insert(id, bounds);
        tell(self.effects(state, now));
        lane
    }

    /// Drops lanes without a route and without promises.
    fn forget_unused(&self, state: &mut MutexGuard<'_, LaneTable>, now: Moment) {
        let is_unused = |lane: &Arc<EdgeLane>| {
            let explained = state.machine.explain(now, lane.id);
            // Two references are here, and none elsewhere.
            Arc::strong_count(lane) <= 2
                && !lane.label.starts_with("tenant ")
                && explained.is_none_or(|lane| lane.running == 0 && lane.waiting == 0 && lane.promised == 0)
        };
        let unused: Vec<_> = state.by_label.values().filter(|lane| is_unused(lane)).map(Arc::clone).collect();
        for lane in unused {
            self.drop_lane(state, now, &lane);
        }
    }

    /// Drops a lane. Requests that wait in it are turned away.
    fn drop_lane(&self, state: &mut LaneTable, now: Moment, lane: &Arc<EdgeLane>) {
        state.by_label.remove(&lane.label);
        state.by_id.remove(&lane.id);
        state.bounds.remove(&lane.id);
        // Permits in use come back as their requests end. The machine accepts them for a dropped
        // lane, too.
        state.machine.give_back(now, lane.id, lane.lent.recall());
        state.machine.remove(now, lane.id);
    }

    /// Applies a changed site record. The new limits also hold for waiting requests.
    pub fn site_changed(&self, site: &Site, options: &EdgeConfig) {
        self.rebound(&format!("site {}", site.name), site_bounds(site, options));
    }

    /// Applies a changed tenant record.
    pub fn tenant_changed(&self, tenant: &Tenant, options: &EdgeConfig) {
        self.rebound(&format!("tenant {}", tenant.name), tenant_bounds(tenant, options));
    }

    fn rebound(&self, label: &str, bounds: LaneLimits) {
        let mut state = self.state.lock();
        let now = self.now();
        let Some(lane) = state.by_label.get(label).map(Arc::clone) else { return };
        self.set_bounds(&mut state, now, &lane, bounds);
        self.carry_out(state, now);
    }

    fn set_bounds(&self, state: &mut LaneTable, now: Moment, lane: &EdgeLane, bounds: LaneLimits) {
        if state.bounds.get(&lane.id) != Some(&bounds) {
            state.machine.set(now, lane.id, bounds.clone());
            lane.wait_ms.store(millis(bounds.wait), Ordering::Relaxed);
            state.bounds.insert(lane.id, bounds);
        }
    }

    /// Drops the lanes of a removed site.
    pub fn drop_site(&self, site: &SiteName) {
        let mut state = self.state.lock();
        let now = self.now();
        let own = format!("site {site}");
        let inner = format!("lane {site} ");
        let is_its = |lane: &&Arc<EdgeLane>| *lane.label == *own || lane.label.starts_with(&inner);
        let gone: Vec<_> = state.by_label.values().filter(is_its).map(Arc::clone).collect();
        for lane in gone {
            self.drop_lane(&mut state, now, &lane);
        }
        self.carry_out(state, now);
    }

    /// Restores the records of an earlier start, before any request is served.
    pub fn restore(&self, records: Vec<(LaneName, TicketRecord)>) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let now = self.now();
        let known: SeededMap<LaneName, LaneId> =
            state.by_id.values().map(|lane| (lane.name, lane.id)).collect();
        for (name, record) in records {
            match known.get(&name) {
                Some(lane) => state.machine.restore(now, *lane, record),
                None => state.left.entry(name).or_default().push(record),
            }
        }
    }

    /// Asks for the right to run.
    pub fn enter(&self, lane: &EdgeLane, ask: AdmissionRequest) -> AdmitResult {
        let mut state = self.state.lock();
        let now = self.now();
        let entered = match state.machine.offer(now, lane.id, ask) {
            Decision::Run(pass) => AdmitResult::Runs(pass),
            Decision::Wait(pass, prediction) => {
                let (tell, told) = oneshot::channel();
                state.waiting.insert(pass, tell);
                state.all_waiting.inc();
                self.lined.notify_one();
                AdmitResult::Waits(pass, prediction, told)
            }
            turned => {
                let told = self.effects(&mut state, now);
                // Only a new promise waits for the store. Other records are stored later.
                let is_new = matches!(&turned, Decision::Next(promise) if promise.is_new);
                let records = if is_new { std::mem::take(&mut state.records) } else { Vec::new() };
                drop(state);
                tell(told);
                return AdmitResult::Turned(turned, records);
            }
        };
        self.carry_out(state, now);
        entered
    }

    /// Returns a permit of a calm lane. `None` if requests wait there.
    pub fn enter_calm(&self, lane: &Arc<EdgeLane>) -> Option<Permit> {
        let is_in = lane.enter() || {
            let mut state = self.state.lock();
            let count = state.machine.lend(self.now(), lane.id, LENT);
            if count > 0 {
                lane.lent.own().grant(count);
            }
            count > 0
        };
        is_in.then(|| Permit::lent(PermitLane::Lane(Arc::clone(lane))))
    }

    /// Cancels a request: the client left while it waited, or was called and did not come.
    pub fn cancel(&self, pass: RequestKey) {
        let mut state = self.state.lock();
        let now = self.now();
        if state.waiting.remove(&pass).is_some() {
            state.all_waiting.dec();
        }
        state.machine.cancel(now, pass);
        self.carry_out(state, now);
    }

    /// Ends a running request.
    pub fn release(&self, pass: RequestKey, used: ServiceUse) {
        let mut state = self.state.lock();
        let now = self.now();
        state.machine.release(now, pass, used);
        self.carry_out(state, now);
    }

    /// Returns the present prediction for a waiting request.
    pub fn prediction(&self, pass: RequestKey) -> Option<Prediction> {
        self.state.lock().machine.prediction(self.now(), pass)
    }

    pub fn standing(&self, nonce: Nonce) -> TicketStatus {
        self.state.lock().machine.standing(self.now(), nonce)
    }

    /// Registers a stream for the call of this ticket's holder.
    ///
    /// # Errors
    /// Fails if there are too many streams, for this ticket or in total.
    pub fn listen(&self, nonce: Nonce) -> Result<oneshot::Receiver<Moment>, TicketListenError> {
        let mut state = self.state.lock();
        let most = self.listened_max.load(Ordering::Relaxed);
        if state.listening.len() >= most {
            state.listening.retain(|_, pages| pages.iter().any(|page| !page.is_closed()));
            if state.listening.len() >= most {
                return Err(TicketListenError::TooMany);
            }
        }
        let pages = state.listening.entry(nonce).or_default();
        pages.retain(|page| !page.is_closed());
        if pages.len() >= LISTENERS_MAX {
            return Err(TicketListenError::Others);
        }
        let (call, called) = oneshot::channel();
        pages.push(call);
        let now = self.now();
        state.machine.listen(now, nonce, true);
        self.carry_out(state, now);
        Ok(called)
    }

    /// Removes a stream of this ticket. After the last one its holder cannot be called.
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

    /// Withdraws a ticket that could not be stored.
    pub fn withdraw(&self, nonce: Nonce) {
        let mut state = self.state.lock();
        let now = self.now();
        state.machine.forget(now, nonce);
        self.carry_out(state, now);
    }

    /// Returns the lane with this short name in paths: a site's own, or one in it.
    pub fn by_short(&self, site: &Arc<EdgeLane>, short: &str) -> Option<Arc<EdgeLane>> {
        let state = self.state.lock();
        let is_it = |lane: &&Arc<EdgeLane>| {
            (lane.id == site.id || lane.inside == site.id) && self::short(lane) == short
        };
        if is_it(&site) { Some(Arc::clone(site)) } else { state.by_id.values().find(is_it).cloned() }
    }

    /// Returns all open promises.
    pub fn promises(&self) -> Vec<TicketRecord> {
        self.state.lock().machine.promises()
    }

    /// Takes the records to store.
    pub fn take_records(&self) -> Vec<TicketRecord> {
        std::mem::take(&mut self.state.lock().records)
    }

    /// Applies changes that depend on time alone. Returns the time until the next tick.
    pub fn tick(&self) -> Option<Duration> {
        let mut state = self.state.lock();
        let now = self.now();
        let next = state.machine.tick(now);
        self.carry_out(state, now);
        next.map(|next| Duration::from_micros(next.0.saturating_sub(now.0)))
    }

    /// Observes the pressure in each lane with an adaptive limit: of the whole node, and by the
    /// lane's own limits.
    pub fn observe_pressure(&self, pressure: CpuPressure) {
        let mut state = self.state.lock();
        let now = self.now();
        let state = &mut *state;
        for (id, bounds) in &state.bounds {
            if matches!(bounds.run, RunLimit::Auto { .. }) {
                let throttled = state.by_id.get(id).map_or(0.0, |lane| lane.throttled.read());
                let starved = pressure.starved.max(throttled);
                state.machine.observe_pressure(now, *id, CpuPressure { starved, ..pressure });
            }
        }
    }

    /// Returns whether any lane has an adaptive limit.
    pub fn any_adapts(&self) -> bool {
        self.state.lock().bounds.values().any(|bounds| matches!(bounds.run, RunLimit::Auto { .. }))
    }

    /// Returns each lane with its data. Lent permits that are not in use do not count as running.
    pub fn explain(&self) -> Vec<(Arc<EdgeLane>, LaneReport)> {
        let state = self.state.lock();
        let now = self.now();
        let spare = state.spare();
        let explain = |lane: &Arc<EdgeLane>| {
            let mut explained = state.machine.explain(now, lane.id)?;
            explained.running = explained.running.saturating_sub(*spare.get(&lane.id).unwrap_or(&0));
            Some((Arc::clone(lane), explained))
        };
        state.by_id.values().filter_map(explain).collect()
    }

    /// Returns the load of a lane.
    pub(super) fn crowded(&self, lane: &EdgeLane) -> LaneStatus {
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
        let Some((running, explained)) = explain(lane.id) else { return LaneStatus::default() };
        let mut crowded = LaneStatus {
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
            // The machine counts lent permits as running.
            crowded.wait = Some(Duration::ZERO);
        }
        crowded
    }

    /// Returns the running and waiting requests of each tenant. Lent permits that are not in use
    /// do not count as running.
    pub fn crowds(&self) -> Vec<(Arc<EdgeLane>, LaneLoad)> {
        let state = self.state.lock();
        let spare = state.spare();
        let crowd = |crowd: LaneLoad| {
            let lane = state.by_id.get(&crowd.lane)?;
            let running = crowd.running.saturating_sub(*spare.get(&crowd.lane).unwrap_or(&0));
            Some((Arc::clone(lane), LaneLoad { running, ..crowd }))
        };
        state.machine.crowds().filter_map(crowd).collect()
    }

    /// Returns the number of running requests of all tenants.
    pub fn running(&self) -> u32 {
        let state = self.state.lock();
        let root = state.machine.root();
        let all = state.machine.explain(self.now(), root).map_or(0, |root| root.running);
        all.saturating_sub(state.by_id.values().map(|lane| lane.lent.spare()).sum())
    }

    /// Returns recalled permits to the machine, one by one.
    fn settle(&self, lane: &EdgeLane) {
        let mut state = self.state.lock();
        let now = self.now();
        if lane.lent.own().settle() {
            state.machine.give_back(now, lane.id, 1);
            self.carry_out(state, now);
        }
    }

    fn learn(&self, lane: &EdgeLane, class: CostClass, used: ServiceUse) {
        self.state.lock().machine.learn(self.now(), lane.id, class, used);
    }

    /// Applies the machine's effects, and returns the waiters to notify. Recalled permits that
    /// are not in use go back at once, which may cause further effects.
    fn effects(&self, state: &mut LaneTable, now: Moment) -> Vec<(oneshot::Sender<TurnResult>, TurnResult)> {
        let mut told = Vec::new();
        loop {
            let effects: Vec<_> = state.machine.drain_effects().collect();
            if effects.is_empty() {
                return told;
            }
            for effect in effects {
                match effect {
                    AdmissionEffect::Run(pass) => {
                        told.extend(state.end_of_wait(pass).map(|tell| (tell, Ok(()))))
                    }
                    AdmissionEffect::Dismiss(pass, why) => {
                        told.extend(state.end_of_wait(pass).map(|tell| (tell, Err(why))));
                    }
                    AdmissionEffect::Recall(id) => {
                        let spare = state.by_id.get(&id).map_or(0, |lane| lane.lent.recall());
                        if spare > 0 {
                            state.machine.give_back(now, id, spare);
                        }
                    }
                    AdmissionEffect::Call { nonce, until } => {
                        // If no page has a stream, the holder comes at the time it was given.
                        for page in state.listening.remove(&nonce).into_iter().flatten() {
                            let _ = page.send(until);
                        }
                    }
                    AdmissionEffect::Store(record) if state.records.len() < RECORDS_MAX => {
                        state.records.push(record);
                        self.stirred.notify_one();
                    }
                    // The next start will not know that this ticket was used. Its promise is
                    // unchanged.
                    AdmissionEffect::Store(_) => {}
                }
            }
        }
    }

    /// Applies the machine's effects, and notifies the waiters once the lock is free.
    fn carry_out(&self, mut state: MutexGuard<'_, LaneTable>, now: Moment) {
        let told = self.effects(&mut state, now);
        drop(state);
        tell(told);
    }
}

/// Notifies waiters. One that has stopped waiting gives its permit back itself (`cancel`).
fn tell(told: Vec<(oneshot::Sender<TurnResult>, TurnResult)>) {
    for (tell, what) in told {
        let _ = tell.send(what);
    }
}

impl LaneTable {
    /// Returns the lent permits that are not in use, for each lane and all lanes in it.
    fn spare(&self) -> SeededMap<LaneId, u32> {
        let mut spare = SeededMap::default();
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

    fn end_of_wait(&mut self, pass: RequestKey) -> Option<oneshot::Sender<TurnResult>> {
        let tell = self.waiting.remove(&pass)?;
        self.all_waiting.dec();
        Some(tell)
    }
}

impl EdgeLane {
    /// Takes a lent permit. Returns false if there is none that is not in use.
    pub fn enter(&self) -> bool {
        self.lent.own().enter()
    }

    /// Gives back a lent permit. `sample` is the request's class and usage, if it is a sample.
    pub fn leave(&self, sample: Option<(CostClass, ServiceUse)>) {
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

    /// Adds the time for which a used-up CPU quota stopped the programs of a request.
    pub fn throttled(&self, still_us: u64, service: Duration) {
        self.throttled.add(still_us, service);
    }

    /// Returns the maximum wait here. A prediction may be wrong by as much again as its own
    /// length.
    pub fn patience(&self) -> Duration {
        Duration::from_millis(self.wait_ms.load(Ordering::Relaxed).saturating_mul(2))
    }

    /// Returns its load, at most a moment old.
    pub fn crowded(&self) -> LaneStatus {
        self.crowded.get(|| self.lanes.upgrade().map(|lanes| lanes.crowded(self)).unwrap_or_default())
    }

    /// Returns its tenant, if it is a tenant's lane.
    pub fn tenant(&self) -> Option<TenantName> {
        TenantName::new(self.label.strip_prefix("tenant ")?).ok()
    }

    /// Returns the time since when its tenant has lowered CPU priority.
    pub fn gives_way_since(&self) -> Option<Moment> {
        Some(Moment(self.gives_way.load(Ordering::Relaxed))).filter(|since| since.0 > 0)
    }

    pub(super) fn set_giving_way(&self, since: Option<Moment>) {
        self.gives_way.store(since.map_or(0, |since| since.0), Ordering::Relaxed);
    }

    /// Returns all lanes of the edge.
    pub fn lanes(&self) -> Option<Arc<LaneSet>> {
        self.lanes.upgrade()
    }
}

/// Returns the first half of a hash. Nobody can choose it, so two lanes never have the same name.
fn name_of(label: &str) -> LaneName {
    let digest = ring::digest::digest(&ring::digest::SHA256, label.as_bytes());
    let mut name = [0; 16];
    name.copy_from_slice(&digest.as_ref()[..16]);
    LaneName(name)
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

/// Returns limits without a bound.
fn unbounded(weight: u32) -> LaneLimits {
    LaneLimits {
        run: RunLimit::Fixed(u32::MAX),
        wait: Duration::MAX,
        wait_count: u32::MAX,
        wait_bytes: u64::MAX,
        next: None,
        weight,
    }
}

/// Returns the maximum number of streams. Each holds a connection, and with it a descriptor. One
/// ticket may have two.
fn listened_max(options: &EdgeConfig, threads: usize) -> usize {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let files = files.and_then(|files| usize::try_from(files).ok()).unwrap_or(usize::MAX);
    let connections = options.limits.connections.saturating_mul(threads);
    (connections.min(files) / LISTENED_PART).clamp(1, LISTENED_MAX)
}

fn node_bounds(options: &EdgeConfig) -> LaneLimits {
    let run = match options.admission.node_max_concurrent {
        0 => u32::MAX,
        some => some,
    };
    LaneLimits { run: RunLimit::Fixed(run), ..unbounded(1) }
}

fn tenant_bounds(tenant: &Tenant, options: &EdgeConfig) -> LaneLimits {
    let run = tenant.max_concurrent.unwrap_or(options.tenant_max_concurrent);
    LaneLimits { run: RunLimit::Fixed(run), ..unbounded(tenant.weight.unwrap_or(WEIGHT)) }
}

fn site_bounds(site: &Site, options: &EdgeConfig) -> LaneLimits {
    let (own, node) = (&site.admission, &options.admission);
    let run = match (own.auto, site.max_concurrent) {
        (true, max) => RunLimit::Auto { min: 1, max: max.unwrap_or(AUTO_MAX) },
        (false, max) => RunLimit::Fixed(max.unwrap_or(u32::MAX)),
    };
    let window = own.slot_seconds.map_or(node.slot_ms, |seconds| u64::from(seconds) * 1000);
    let next = own.tickets.unwrap_or(node.tickets).then(|| TicketPolicy {
        window: Duration::from_millis(window),
        horizon: Duration::from_millis(node.horizon_ms),
        tickets: node.tickets_max,
        share: PROMISED_SHARE,
    });
    let wait = own.wait_seconds.map_or(options.wait_ms, |seconds| u64::from(seconds) * 1000);
    LaneLimits {
        run,
        wait: Duration::from_millis(wait),
        wait_count: own.waiting.unwrap_or(options.max_waiting),
        wait_bytes: node.body_bytes,
        next,
        weight: own.weight.unwrap_or(WEIGHT),
    }
}

/// Returns the short form of a lane in paths and names of cookies: the beginning of its name.
pub fn short(lane: &EdgeLane) -> String {
    lane.name.0[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}
