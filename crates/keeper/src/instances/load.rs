//! What instances use, for whoever balances load: asked for every second, so little is read, and only of those that run.
//!
//! Not here: what operators see (`show`), what is done about it (`nagaya::supervisor`).

use std::rc::Rc;
use std::sync::Arc;

use nagaya_cmdb::SiteName;
use nagaya_cmdb::cell::CpuQuota;
use nagaya_cmdb::instance::{Busy, Tier, Used};
use rustix::time::{ClockId, clock_gettime};

use super::show::resident;
use super::{Instance, Instances};
use crate::cells::{Cells, Leaf};
use crate::engine::Engine;

/// Instances told of at most, of all that run; more than a machine can have busy at once.
const TOLD_MAX: usize = 8_192;

/// One of them, as far as it is known without reading anything.
struct Looked {
    site: SiteName,
    run: u64,
    tier: Tier,
    limit: Option<CpuQuota>,
    is_limit_changed: bool,
    leaf: Arc<Leaf>,
    /// CPU time used outside of its cell, in those of its requests.
    seats_cpu_us: u64,
}

impl Instances {
    /// The JSON of what each has used that runs, or whose limit is not its record's. `null`: nobody is free to look.
    pub async fn load(&self, engine: &Rc<Engine>) -> String {
        let cells = Arc::clone(engine.cells());
        let changed = cells.changed_cpu_limits();
        // First what tells those apart that rest, which most do: thousands may.
        let is_told = |(site, instance): &(&SiteName, &Rc<Instance>)| {
            instance.life.borrow().tier() == Tier::Running || changed.contains(*site)
        };
        let looked: Vec<Looked> = self
            .sites
            .borrow()
            .iter()
            .filter(is_told)
            .filter_map(|(site, instance)| {
                let body = instance.body.borrow().clone()?;
                let (leaf, seats_cpu_us) = (Arc::clone(body.leaf()), body.seats.cpu_us());
                let (limit, is_limit_changed) = cells.cpu_limit(site);
                let (life, site) = (instance.life.borrow(), site.clone());
                let (tier, run) = (life.tier(), instance.id(life.run()).0);
                Some(Looked { site, run, tier, limit, is_limit_changed, leaf, seats_cpu_us })
            })
            .take(TOLD_MAX)
            .collect();
        let read = move || Ok(looked.into_iter().filter_map(|one| one.read(&cells)).collect::<Vec<_>>());
        let used = engine.on_worker(read).await.ok();
        serde_json::to_string(&used).expect("it is made of texts and numbers")
    }
}

impl Instances {
    /// The JSON of how many wake now or wait for their turn.
    pub fn busy(&self) -> String {
        let wakes = self.wakes.borrow();
        let wakes = u32::try_from(wakes.awake() + wakes.waiting()).unwrap_or(u32::MAX);
        serde_json::to_string(&Busy { wakes, ..Busy::default() }).expect("it is made of numbers")
    }
}

impl Looked {
    fn read(self, cells: &Cells) -> Option<Used> {
        let Self { site, run, tier, limit, is_limit_changed, leaf, seats_cpu_us } = self;
        let (cpu_us, throttled_us) = leaf.cpu_us()?;
        let cpu_us = cpu_us.saturating_add(seats_cpu_us);
        // Before Linux 6.6 a cell does not count for what the quota of the one above was used up.
        let throttled_us =
            if limit.is_some() { throttled_us.max(cells.throttled_us(&site)) } else { throttled_us };
        let pids = leaf.pids().unwrap_or_default();
        Some(Used {
            site,
            run,
            tier,
            at_us: now_us(),
            cpu_us,
            throttled_us,
            waited_us: leaf.waited_us(),
            memory_bytes: pids.iter().filter_map(|pid| resident(pid.as_raw_nonzero().get())).sum(),
            limit,
            is_limit_changed,
        })
    }
}

fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let micros = now.tv_sec * 1_000_000 + now.tv_nsec / 1_000;
    u64::try_from(micros).unwrap_or_default()
}
