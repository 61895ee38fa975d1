//! Watches parent processes of an application after a thaw. They go on when the others have run.
//! Workers that are killed then are named.
//!
//! Not here: the choice of these processes (`rest::family`), the thaw (`driver`).

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, timeout};

use crate::context::KeeperContext;
use crate::fault;
use crate::instances::run::processes::InstanceProcesses;
use crate::instances::run::rest::HeldParents;
use crate::instances::state::instance::SiteInstance;

/// Maximum time that parents wait for the others. Parents are needed for work that workers do not
/// do.
const HOLD_MAX: Duration = Duration::from_secs(1);

/// Minimum time for renewing signs of life, even if all other time has passed.
const RENEW_MIN: Duration = Duration::from_millis(200);

/// First and longest pause between two checks whether the others have run.
const LOOK_FIRST: Duration = Duration::from_millis(2);
const LOOK_MAX: Duration = Duration::from_millis(100);

/// Time after its parent has continued in which the end of a worker means a kill for its silence.
/// It must have a successor by then.
const KILL_WINDOW: Duration = Duration::from_secs(2);

/// Watches over the stopped parents while the others run.
pub fn watch_family(
    context: &Rc<KeeperContext>,
    instance: &Rc<SiteInstance>,
    processes: &Rc<InstanceProcesses>,
) {
    let Some(held) = processes.resting.held() else { return };
    let (context, instance, processes) = (Rc::clone(context), Rc::clone(instance), Rc::clone(processes));
    spawn_local(async move {
        release_after_children(&context, &instance, &processes, &held).await;
        name_killed(&context, &instance, &processes, &held).await;
    });
}

async fn release_after_children(
    context: &KeeperContext,
    instance: &SiteInstance,
    processes: &Rc<InstanceProcesses>,
    held: &Arc<HeldParents>,
) {
    let (until, tenant) = (Instant::now() + HOLD_MAX, instance.site().tenant.clone());
    let mut pause = LOOK_FIRST;
    while Instant::now() < until && !held.is_released() {
        sleep(pause).await;
        pause = (pause * 2).min(LOOK_MAX);
        let looked = Arc::clone(held);
        // If no worker is free, the time limit does it.
        let run = context.on_worker_for(&tenant, move || Ok(looked.have_children_run())).await;
        if run.unwrap_or(false) {
            break;
        }
    }
    if !held.is_released() {
        let (renewed, leaf) = (Arc::clone(held), Arc::clone(processes.leaf()));
        // A worker that sleeps until its next sign of life continues to sleep for the rest of its
        // time.
        let renew = context.on_worker_for(&tenant, move || {
            renewed.renew_signs(&|| leaf.pids().unwrap_or_default());
            Ok(())
        });
        let left = until.saturating_duration_since(Instant::now()).max(RENEW_MIN);
        let _ = timeout(left, renew).await;
    }
    held.release();
}

async fn name_killed(
    context: &KeeperContext,
    instance: &SiteInstance,
    processes: &Rc<InstanceProcesses>,
    held: &HeldParents,
) {
    sleep(KILL_WINDOW).await;
    if !instance.has_processes(processes) {
        return;
    }
    let (leaf, tenant) = (Arc::clone(processes.leaf()), instance.site().tenant.clone());
    let Ok(pids) = context.on_worker_for(&tenant, move || Ok(leaf.pids().unwrap_or_default())).await else {
        return;
    };
    let (ended, born) = held.compare(&pids);
    let killed = ended.min(born);
    if killed > 0 {
        let (site, code) = (instance.site(), fault::WATCHDOG);
        let why = format!(
            "{killed} of its processes ended right after a rest and have successors: a watchdog takes a rest for a hang; \
             give its workers no time limit, or a longer one [{code}]"
        );
        tracing::warn!(site = %site.name, "{code}: {why}");
        instance.set_note(Some(why));
    }
}
