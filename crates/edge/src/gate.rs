//! How many requests of a tenant and of a site run at once, and who waits: first come, first served.
//!
//! Shared by all threads of the edge, so a limit is one limit. A permit is given back when the response's body
//! ends. Not here: what a predicted wait or a promised time would be; this bound knows only counts.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nagaya_cmdb::{Site, Tenant};
use nagaya_telemetry::Gauge;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::refusal::Refusal;

/// Gates remembered although nobody runs or waits there. Beyond it they are forgotten, which costs the next
/// request of such a site one allocation.
const GATES_MAX: usize = 16_384;

/// What a refused client is told: the shortest wait that is worth a new attempt.
const RETRY_AFTER_SECONDS: u32 = 1;

/// The bound of one tenant or one site.
#[derive(Debug)]
pub struct Gate {
    permits: Arc<Semaphore>,
    limit: Mutex<u32>,
    waiting: AtomicU32,
    /// Waiting at any gate.
    all_waiting: Gauge,
}

/// The right to run. Giving it back is dropping it.
pub type Permit = OwnedSemaphorePermit;

/// How many may wait, and how long.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    pub waiting_max: u32,
    pub wait: Duration,
}

impl Gate {
    fn new(limit: u32, all_waiting: Gauge) -> Self {
        Self {
            all_waiting,
            permits: Arc::new(Semaphore::new(limit as usize)),
            limit: Mutex::new(limit),
            waiting: AtomicU32::new(0),
        }
    }

    /// Makes `limit` hold from now on. What runs beyond a lowered limit ends by itself.
    fn set_limit(&self, limit: u32) {
        let mut current = self.limit.lock();
        if limit > *current {
            self.permits.add_permits((limit - *current) as usize);
        } else if limit < *current {
            let surplus = (*current - limit) as usize;
            let free = self.permits.forget_permits(surplus);
            let in_use = u32::try_from(surplus - free).expect("a part of a difference of two u32");
            if in_use > 0 {
                // The first to come back are not given out again: this waits in the queue like a request.
                let permits = Arc::clone(&self.permits);
                tokio::spawn(async move {
                    if let Ok(surplus) = permits.acquire_many_owned(in_use).await {
                        surplus.forget();
                    }
                });
            }
        }
        *current = limit;
    }

    /// Runs now if there is room, else waits in line.
    pub async fn admit(&self, patience: Patience) -> Result<Permit, Refusal> {
        if let Some(permit) = self.try_admit() {
            return Ok(permit);
        }
        let Some(_place) = Place::take(&self.waiting, &self.all_waiting, patience.waiting_max) else {
            return Err(Refusal::QueueFull { retry_after_seconds: RETRY_AFTER_SECONDS });
        };
        match timeout(patience.wait, Arc::clone(&self.permits).acquire_owned()).await {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(_)) => unreachable!("gates are never closed"),
            Err(_) => Err(Refusal::QueueTimeout { retry_after_seconds: RETRY_AFTER_SECONDS }),
        }
    }

    /// A permit if one is free; those who wait come first, for theirs are never free.
    fn try_admit(&self) -> Option<Permit> {
        Arc::clone(&self.permits).try_acquire_owned().ok()
    }

    pub fn waiting(&self) -> u32 {
        self.waiting.load(Ordering::Relaxed)
    }
}

/// A place in the line, left when dropped: also when the client goes.
struct Place<'a> {
    waiting: &'a AtomicU32,
    all_waiting: &'a Gauge,
}

impl<'a> Place<'a> {
    fn take(waiting: &'a AtomicU32, all_waiting: &'a Gauge, max: u32) -> Option<Self> {
        waiting
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| (now < max).then_some(now + 1))
            .ok()?;
        all_waiting.inc();
        Some(Self { waiting, all_waiting })
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        self.all_waiting.dec();
    }
}

/// The gates a request passes: its site's, if it has a limit, and its tenant's.
#[derive(Debug, Clone)]
pub struct Gates {
    pub site: Option<Arc<Gate>>,
    pub tenant: Arc<Gate>,
}

/// What passing them gave.
pub struct Permits {
    /// There was a line.
    pub waited: bool,
    _site: Option<Permit>,
    _tenant: Permit,
}

impl Gates {
    /// The site's line first: who waits for one slow site does not hold its tenant's permits meanwhile.
    pub async fn admit(&self, patience: Patience) -> Result<Permits, Refusal> {
        if let Some(permits) = self.admit_now() {
            return Ok(permits);
        }
        let site = match &self.site {
            Some(gate) => Some(gate.admit(patience).await?),
            None => None,
        };
        Ok(Permits { waited: true, _site: site, _tenant: self.tenant.admit(patience).await? })
    }

    fn admit_now(&self) -> Option<Permits> {
        let site = match &self.site {
            Some(gate) => Some(gate.try_admit()?),
            None => None,
        };
        Some(Permits { waited: false, _site: site, _tenant: self.tenant.try_admit()? })
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

    fn gate(limit: u32) -> Gate {
        Gate::new(limit, Gauge::default())
    }

    const PATIENT: Patience = Patience { waiting_max: 2, wait: Duration::from_secs(3600) };

    fn full(result: &Result<Permit, Refusal>) -> bool {
        matches!(result, Err(Refusal::QueueFull { .. }))
    }

    #[tokio::test]
    async fn never_more_run_than_the_limit_and_the_line_is_bounded() {
        let gate = Arc::new(gate(1));
        let running = gate.admit(PATIENT).await.unwrap();
        let line: Vec<_> = (0..2)
            .map(|_| {
                let gate = Arc::clone(&gate);
                tokio::spawn(async move { gate.admit(PATIENT).await })
            })
            .collect();
        while gate.waiting() < 2 {
            tokio::task::yield_now().await;
        }
        assert!(full(&gate.admit(PATIENT).await));
        drop(running);
        for waiter in line {
            drop(waiter.await.unwrap().unwrap());
        }
        assert_eq!(gate.waiting(), 0);
    }

    #[tokio::test]
    async fn a_waiter_that_leaves_frees_its_place() {
        let gate = Arc::new(gate(1));
        let _running = gate.admit(PATIENT).await.unwrap();
        let leaving = tokio::spawn({
            let gate = Arc::clone(&gate);
            async move { gate.admit(PATIENT).await.map(drop) }
        });
        while gate.waiting() < 1 {
            tokio::task::yield_now().await;
        }
        leaving.abort();
        assert!(leaving.await.is_err());
        assert_eq!(gate.waiting(), 0);
    }

    #[tokio::test]
    async fn a_limit_changes_while_requests_run() {
        let gate = gate(2);
        let hasty = Patience { waiting_max: 0, wait: Duration::ZERO };
        let (one, two) = (gate.admit(hasty).await.unwrap(), gate.admit(hasty).await.unwrap());
        gate.set_limit(1);
        tokio::task::yield_now().await;
        drop(one);
        tokio::task::yield_now().await;
        assert!(full(&gate.admit(hasty).await), "the lowered limit holds once one has ended");
        drop(two);
        tokio::task::yield_now().await;
        let only = gate.admit(hasty).await.unwrap();
        assert!(full(&gate.admit(hasty).await));
        gate.set_limit(2);
        assert!(gate.admit(hasty).await.is_ok());
        drop(only);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_longer_than_allowed() {
        let gate = gate(1);
        let _running = gate.admit(PATIENT).await.unwrap();
        let refused = gate.admit(Patience { waiting_max: 1, wait: Duration::from_secs(5) }).await;
        assert!(matches!(refused, Err(Refusal::QueueTimeout { .. })));
    }
}
