//! Usage of instances, for the balancer of load. It is requested every second, so little is read,
//! and only of instances that run.
//!
//! Not here: the operators' view (`show`), the decisions (`nagaya::supervisor`).

use std::sync::Arc;

use nagaya_records::SiteName;
use nagaya_records::cell::CpuQuota;
use nagaya_records::instance::{AppLoad, RunUsage, Tier};
use rustix::time::{ClockId, clock_gettime};

use crate::cells::{KeeperCells, Leaf};
use crate::instances::run::usage::resident;
use crate::instances::state::instance::SiteInstance;
use crate::instances::state::shared::NodeInstances;

/// Maximum number of running instances that are reported. More than a machine can have busy at
/// once.
const TOLD_MAX: usize = 8_192;

/// One instance, with all that is known without reading anything.
struct LoadSample {
    site: SiteName,
    run: u64,
    tier: Tier,
    limit: Option<CpuQuota>,
    is_limit_changed: bool,
    leaf: Arc<Leaf>,
    /// CPU time used outside of its cell, in its request cells.
    cells_cpu_us: u64,
}

/// Reports as JSON the use of each instance that runs, or whose limit is not its record's.
/// `null` if no worker is free.
pub async fn load(instances: &NodeInstances) -> String {
    let cells = Arc::clone(instances.context.cells());
    let changed = cells.changed_cpu_limits();
    // First separates those at rest, which are most: there may be thousands.
    let is_told = |site: &SiteName, instance: &SiteInstance| {
        instance.life.borrow().tier() == Tier::Running || changed.contains(site)
    };
    let looked: Vec<LoadSample> = instances
        .table
        .filtered(is_told)
        .iter()
        .filter_map(|instance| {
            let processes = instance.processes()?;
            let (leaf, cells_cpu_us) = (Arc::clone(processes.leaf()), processes.request_cells.cpu_us());
            let site = instance.site().name.clone();
            let (limit, is_limit_changed) = cells.cpu_limit(&site);
            let life = instance.life.borrow();
            let (tier, run) = (life.tier(), instance.id(life.run()).0);
            Some(LoadSample { site, run, tier, limit, is_limit_changed, leaf, cells_cpu_us })
        })
        .take(TOLD_MAX)
        .collect();
    let read = move || Ok(looked.into_iter().filter_map(|one| one.read(&cells)).collect::<Vec<_>>());
    let used = instances.context.on_worker(read).await.ok();
    serde_json::to_string(&used).expect("it is made of texts and numbers")
}

/// Reports as JSON how many wake now or wait for their turn.
pub fn busy(instances: &NodeInstances) -> String {
    let wakes = instances.wakes.borrow();
    let wakes = u32::try_from(wakes.awake() + wakes.waiting()).unwrap_or(u32::MAX);
    serde_json::to_string(&AppLoad { wakes, ..AppLoad::default() }).expect("it is made of numbers")
}

impl LoadSample {
    fn read(self, cells: &KeeperCells) -> Option<RunUsage> {
        let Self { site, run, tier, limit, is_limit_changed, leaf, cells_cpu_us } = self;
        let (cpu_us, throttled_us) = leaf.cpu_us()?;
        let cpu_us = cpu_us.saturating_add(cells_cpu_us);
        // Before Linux 6.6 a cell does not count throttling by the quota of its parent.
        let throttled_us =
            if limit.is_some() { throttled_us.max(cells.throttled_us(&site)) } else { throttled_us };
        let pids = leaf.pids().unwrap_or_default();
        Some(RunUsage {
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
