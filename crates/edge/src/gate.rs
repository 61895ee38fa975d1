//! How many requests of a tenant, of a site and of a lane that a rule names run at once, and who waits: first come,
//! first served.
//!
//! Shared by all threads of the edge, so a limit is one limit. Passing a gate nobody waits at is one atomic
//! operation, and leaving it another: it stands on the way of every request, a file's too. Not here: what a
//! predicted wait or a promised time would be; this bound knows only counts.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nagaya_cmdb::{Site, Tenant, TenantName};
use nagaya_telemetry::Gauge;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::refusal::Refusal;
use crate::route::Route;

/// Gates remembered although nobody runs or waits there. Beyond it they are forgotten, which costs the next
/// request of such a site one allocation.
const GATES_MAX: usize = 16_384;

/// What a refused client is told: the shortest wait that is worth a new attempt.
const RETRY_AFTER_SECONDS: u32 = 1;

/// How many may wait, and how long.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    pub waiting_max: u32,
    pub wait: Duration,
}

/// The bound of one tenant, one site or one lane.
///
/// A slot is counted in `running` from `enter` to `leave`. Who finds none waits in `line`; who leaves looks
/// whether somebody waits, after giving back its slot, and who waits looks whether there is a slot, after having
/// got in line. Both in this order (`SeqCst`), so one of the two always sees the other.
#[derive(Debug)]
pub struct Gate {
    running: AtomicU32,
    limit: AtomicU32,
    /// Length of `line`, to be read without its lock.
    waiting: AtomicU32,
    line: Mutex<Line>,
    /// Waiting at any gate.
    all_waiting: Gauge,
}

/// Who waits, in order of arrival. Told through the channel that a slot is theirs.
#[derive(Debug, Default)]
struct Line {
    next: u64,
    places: BTreeMap<u64, oneshot::Sender<()>>,
}

impl Gate {
    fn new(limit: u32, all_waiting: Gauge) -> Self {
        Self {
            running: AtomicU32::new(0),
            limit: AtomicU32::new(limit),
            waiting: AtomicU32::new(0),
            line: Mutex::default(),
            all_waiting,
        }
    }

    /// Makes `limit` hold from now on. What runs beyond a lowered limit ends by itself.
    fn set_limit(&self, limit: u32) {
        if self.limit.swap(limit, Ordering::SeqCst) < limit {
            self.call();
        }
    }

    /// A slot, if one is free and nobody waits for it.
    fn enter_now(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) == 0 && self.take_slot()
    }

    fn take_slot(&self) -> bool {
        let limit = self.limit.load(Ordering::SeqCst);
        let take = |running| (running < limit).then_some(running + 1);
        self.running.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok()
    }

    /// A slot, after waiting in line for it.
    async fn enter(&self, patience: Patience) -> Result<(), Refusal> {
        if self.enter_now() {
            return Ok(());
        }
        let Some(mut place) = self.line_up(patience.waiting_max) else {
            return Err(Refusal::QueueFull { retry_after_seconds: RETRY_AFTER_SECONDS });
        };
        self.call();
        // The sender is dropped only with the place or after it has spoken.
        if timeout(patience.wait, &mut place.called).await.is_err() {
            return Err(Refusal::QueueTimeout { retry_after_seconds: RETRY_AFTER_SECONDS });
        }
        place.taken = true;
        Ok(())
    }

    fn line_up(&self, max: u32) -> Option<Place<'_>> {
        let mut line = self.line.lock();
        if line.places.len() >= max as usize {
            return None;
        }
        let ticket = line.next;
        line.next += 1;
        let (call, called) = oneshot::channel();
        line.places.insert(ticket, call);
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.all_waiting.inc();
        Some(Place { gate: self, ticket, called, taken: false })
    }

    fn leave(&self) {
        self.running.fetch_sub(1, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.call();
        }
    }

    /// Gives free slots to the first in line.
    fn call(&self) {
        let mut line = self.line.lock();
        while !line.places.is_empty() && self.take_slot() {
            let Some((_, call)) = line.places.pop_first() else { break };
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            self.all_waiting.dec();
            // A place that is being given up has not been told yet that it was called; it hands the slot on.
            let _ = call.send(());
        }
    }

    pub fn waiting(&self) -> u32 {
        self.waiting.load(Ordering::Relaxed)
    }
}

/// A place in line, given up when dropped: also when the client leaves.
struct Place<'a> {
    gate: &'a Gate,
    ticket: u64,
    called: oneshot::Receiver<()>,
    taken: bool,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        if self.gate.line.lock().places.remove(&self.ticket).is_some() {
            self.gate.waiting.fetch_sub(1, Ordering::SeqCst);
            self.gate.all_waiting.dec();
        } else {
            // It was called and did not come.
            self.gate.leave();
        }
    }
}

/// The gates a request passes: its site's, if it has a limit, and its tenant's.
#[derive(Debug, Clone)]
pub struct Gates {
    pub site: Option<Arc<Gate>>,
    pub tenant: Arc<Gate>,
}

/// The right to run at a site, given back when dropped.
pub struct Permits {
    /// There was a line.
    pub waited: bool,
    route: Rc<Route>,
    lane: Option<Arc<Gate>>,
}

impl Drop for Permits {
    fn drop(&mut self) {
        let Gates { site, tenant } = &self.route.gates;
        tenant.leave();
        if let Some(site) = site {
            site.leave();
        }
        if let Some(lane) = &self.lane {
            lane.leave();
        }
    }
}

/// Passes the lane, where a rule chose one, and the gates of `route`. The narrower line comes first: who waits for one
/// slow script or site does not hold its tenant's slots meanwhile.
pub async fn admit(
    route: &Rc<Route>,
    lane: Option<Arc<Gate>>,
    patience: Patience,
) -> Result<Permits, Refusal> {
    let Gates { site, tenant } = &route.gates;
    let mut waited = false;
    if let Some(lane) = &lane {
        waited |= pass(lane, patience).await?;
    }
    // What was passed is given back if the client leaves now, or the next line is too long.
    let held_lane = Held(lane.as_deref());
    if let Some(site) = site {
        waited |= pass(site, patience).await?;
    }
    let held_site = Held(site.as_deref());
    waited |= pass(tenant, patience).await?;
    std::mem::forget((held_lane, held_site));
    Ok(Permits { waited, route: Rc::clone(route), lane })
}

/// Enters, and says whether there was a line.
async fn pass(gate: &Gate, patience: Patience) -> Result<bool, Refusal> {
    if gate.enter_now() {
        return Ok(false);
    }
    gate.enter(patience).await.map(|()| true)
}

/// A slot that is given back unless the next one is got too.
struct Held<'a>(Option<&'a Gate>);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Some(gate) = self.0 {
            gate.leave();
        }
    }
}

/// All gates of this edge, by name.
#[derive(Debug)]
pub struct GateTable {
    gates: Mutex<HashMap<String, Arc<Gate>>>,
    waiting: Gauge,
}

impl GateTable {
    /// `waiting` is kept at the number of requests that wait.
    pub fn new(waiting: Gauge) -> Self {
        Self { gates: Mutex::default(), waiting }
    }

    /// The gates of a site as its records have them now.
    pub fn of(&self, site: &Site, tenant: &Tenant, tenant_default: u32) -> Gates {
        let tenant_limit = tenant.max_concurrent.unwrap_or(tenant_default);
        Gates {
            site: site.max_concurrent.map(|limit| self.get(&format!("site {}", site.name), limit)),
            tenant: self.get(&format!("tenant {}", tenant.name), tenant_limit),
        }
    }

    /// The lane a rule calls `name`, of which each tenant has its own: no tenant fills another's.
    pub fn lane(&self, tenant: &TenantName, name: &str, run: u32) -> Arc<Gate> {
        self.get(&format!("lane {tenant} {name}"), run)
    }

    /// Requests that run now, of all tenants.
    pub fn running(&self) -> u64 {
        let gates = self.gates.lock();
        let tenants = gates.iter().filter(|(key, _)| key.starts_with("tenant "));
        tenants.map(|(_, gate)| u64::from(gate.running.load(Ordering::Relaxed))).sum()
    }

    /// Each gate at which requests run or wait: of what (`tenant`, `site` or `lane`), its name, how many run, how many
    /// wait, and how many may run.
    pub fn busy(&self) -> Vec<(String, u32, u32, u32)> {
        let gates = self.gates.lock();
        let row = |(key, gate): (&String, &Arc<Gate>)| {
            let (running, limit) = (gate.running.load(Ordering::Relaxed), gate.limit.load(Ordering::Relaxed));
            (key.clone(), running, gate.waiting(), limit)
        };
        gates.iter().map(row).filter(|(_, running, waiting, _)| running + waiting > 0).collect()
    }

    fn get(&self, key: &str, limit: u32) -> Arc<Gate> {
        let mut gates = self.gates.lock();
        if let Some(gate) = gates.get(key) {
            gate.set_limit(limit);
            return Arc::clone(gate);
        }
        if gates.len() >= GATES_MAX {
            gates.retain(|_, gate| Arc::strong_count(gate) > 1);
        }
        let gate = Arc::new(Gate::new(limit, self.waiting.clone()));
        gates.insert(key.into(), Arc::clone(&gate));
        gate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENT: Patience = Patience { waiting_max: 2, wait: Duration::from_secs(3600) };
    const HASTY: Patience = Patience { waiting_max: 0, wait: Duration::ZERO };

    fn gate(limit: u32) -> Arc<Gate> {
        Arc::new(Gate::new(limit, Gauge::default()))
    }

    fn full(result: &Result<(), Refusal>) -> bool {
        matches!(result, Err(Refusal::QueueFull { .. }))
    }

    fn wait_at(gate: &Arc<Gate>, patience: Patience) -> tokio::task::JoinHandle<Result<(), Refusal>> {
        let gate = Arc::clone(gate);
        tokio::spawn(async move { gate.enter(patience).await })
    }

    async fn until_waiting(gate: &Gate, count: u32) {
        while gate.waiting() < count {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn never_more_run_than_the_limit_and_the_line_is_bounded() {
        let gate = gate(1);
        gate.enter(PATIENT).await.unwrap();
        let line = [wait_at(&gate, PATIENT), wait_at(&gate, PATIENT)];
        until_waiting(&gate, 2).await;
        assert!(full(&gate.enter(PATIENT).await));
        for waiter in line {
            gate.leave();
            waiter.await.unwrap().unwrap();
        }
        assert_eq!((gate.waiting(), gate.running.load(Ordering::SeqCst)), (0, 1));
    }

    #[tokio::test]
    async fn a_waiter_that_leaves_frees_its_place_and_hands_a_slot_on() {
        let gate = gate(1);
        gate.enter(PATIENT).await.unwrap();
        let leaving = wait_at(&gate, PATIENT);
        until_waiting(&gate, 1).await;
        leaving.abort();
        assert!(leaving.await.is_err());
        assert_eq!(gate.waiting(), 0);
        // Called, and gone before it came.
        let called = wait_at(&gate, PATIENT);
        until_waiting(&gate, 1).await;
        gate.leave();
        called.abort();
        let _ = called.await;
        let left = gate.running.load(Ordering::SeqCst);
        assert!(left == 0 || (left == 1 && gate.waiting() == 0), "the slot is nobody's or was taken: {left}");
    }

    #[tokio::test]
    async fn a_limit_changes_while_requests_run() {
        let gate = gate(2);
        gate.enter(HASTY).await.unwrap();
        gate.enter(HASTY).await.unwrap();
        gate.set_limit(1);
        gate.leave();
        assert!(full(&gate.enter(HASTY).await), "the lowered limit holds once one has ended");
        gate.leave();
        gate.enter(HASTY).await.unwrap();
        let waiter = wait_at(&gate, PATIENT);
        until_waiting(&gate, 1).await;
        gate.set_limit(2);
        waiter.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_longer_than_allowed() {
        let gate = gate(1);
        gate.enter(PATIENT).await.unwrap();
        let refused = gate.enter(Patience { waiting_max: 1, wait: Duration::from_secs(5) }).await;
        assert!(matches!(refused, Err(Refusal::QueueTimeout { .. })));
        assert_eq!(gate.waiting(), 0);
    }

    fn route(table: &GateTable) -> Rc<Route> {
        let tenant: Tenant = serde_json::from_str(r#"{"name":"demo","uid":1000,"gid":1000}"#).unwrap();
        let site = r#"{"name":"s","tenant":"demo","hosts":["s"],"backend":{"kind":"static","root":"s"}}"#;
        let site: Site = serde_json::from_str(site).unwrap();
        let gates = table.of(&site, &tenant, 10);
        Rc::new(Route::new(Arc::new(site), Arc::new(tenant), gates))
    }

    #[tokio::test(start_paused = true)]
    async fn a_lane_is_one_bound_for_its_tenant_and_is_left_with_the_permit() {
        let table = GateTable::new(Gauge::default());
        let route = route(&table);
        let lane = || Some(table.lane(&route.tenant.name, "slow", 1));
        let patience = Patience { waiting_max: 1, wait: Duration::from_secs(5) };
        let first = admit(&route, lane(), patience).await.unwrap();
        assert!(matches!(admit(&route, lane(), patience).await, Err(Refusal::QueueTimeout { .. })));
        assert!(!admit(&route, None, patience).await.unwrap().waited, "requests outside the lane go on");
        let other = Some(table.lane(&TenantName::new("other").unwrap(), "slow", 1));
        assert!(!admit(&route, other, patience).await.unwrap().waited, "each tenant has its own");
        assert_eq!(table.running(), 1);
        drop(first);
        assert!(!admit(&route, lane(), patience).await.unwrap().waited);
    }

    #[tokio::test(start_paused = true)]
    async fn who_gives_up_in_a_wider_line_gives_the_lane_back() {
        let table = GateTable::new(Gauge::default());
        let route = route(&table);
        route.gates.tenant.set_limit(0);
        let lane = table.lane(&route.tenant.name, "slow", 1);
        let patience = Patience { waiting_max: 1, wait: Duration::from_secs(5) };
        assert!(admit(&route, Some(Arc::clone(&lane)), patience).await.is_err());
        assert_eq!(lane.running.load(Ordering::SeqCst), 0);
    }

    /// Threads that enter, sometimes give up, and leave: the limit holds at every moment, nobody is forgotten in
    /// line, and all slots come back.
    #[test]
    fn slots_are_neither_lost_nor_given_twice_between_threads() {
        const LIMIT: u32 = 3;
        let gate = gate(LIMIT);
        let inside = Arc::new(AtomicU32::new(0));
        let run = |seed: u64| {
            let (gate, inside) = (Arc::clone(&gate), Arc::clone(&inside));
            move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
                let patience = Patience { waiting_max: 100, wait: Duration::from_secs(60) };
                let mut random = seed;
                for _ in 0..3000 {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let gives_up = random >> 61 == 0;
                    runtime.block_on(async {
                        let mut entering = std::pin::pin!(gate.enter(patience));
                        if gives_up {
                            // Polled once and dropped, wherever it is.
                            let once =
                                std::future::poll_fn(|cx| std::task::Poll::Ready(entering.as_mut().poll(cx)));
                            if once.await.is_ready() {
                                gate.leave();
                            }
                            return;
                        }
                        entering.await.unwrap();
                        assert!(inside.fetch_add(1, Ordering::SeqCst) < LIMIT);
                        tokio::task::yield_now().await;
                        inside.fetch_sub(1, Ordering::SeqCst);
                        gate.leave();
                    });
                }
            }
        };
        let threads: Vec<_> = (1..=8).map(|seed| std::thread::spawn(run(seed))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!((gate.running.load(Ordering::SeqCst), gate.waiting()), (0, 0));
    }
}
