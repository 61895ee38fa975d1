//! A run that continues beside the run that replaced it. It was restarted while requests used it,
//! and lets them finish.
//!
//! Later requests get the new run at once, and the edges are notified to use it. At most one old
//! run of an instance drains, up to a time limit. A restart meanwhile kills it. So a tenant who
//! restarts without end has two runs, in the cell and within the limits of its site. This is not
//! done on a node of a cluster. There an instance that is placed elsewhere has to end at once. Not
//! here: when it happens (`lifecycle::beside`).

use std::rc::Rc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use crate::instances::decide::lifecycle::{LifecycleEvent, RunId};
use crate::instances::decide::stop_mode::{EndRequest, StopMode};
use crate::instances::run::processes::{InstanceProcesses, StartMode};
use crate::instances::run::start::{self, StartError};
use crate::instances::state::instance::SiteInstance;
use crate::instances::state::shared::NodeInstances;

/// Maximum time for requests of the old run to finish.
const DRAIN_MAX: Duration = Duration::from_secs(30);

/// Drains the present run, which has this many users, beside the run that replaces it.
pub fn begin_drain(instances: &NodeInstances, instance: &SiteInstance, users: u32) {
    // A run that drains already has had its time.
    instance.drains.end(StopMode::Kill);
    let run = instance.life.borrow().run();
    instance.take_processes();
    let end_wanted = instance.replace_end_wanted(watch::Sender::new(None));
    instance.drains.begin(run, users, end_wanted);
    instances.published.tell_drained(instance.id(run));
    tracing::info!(site = %instance.site().name, users, "a new run starts; the old one finishes its requests");
}

/// Returns when nobody uses this run any more, or it must end now.
pub async fn wait_until_drained(
    instance: &SiteInstance,
    processes: &InstanceProcesses,
    end_wanted: &mut watch::Receiver<EndRequest>,
) {
    let Some(drain) = instance.drains.current() else { return };
    tokio::select! {
        () = drain.wait_until_unused() => {}
        () = sleep(DRAIN_MAX) => {
            let (site, users) = (instance.site(), drain.users());
            tracing::info!(site = %site.name, users, "the old one is ended although it is in use: {DRAIN_MAX:?} are over");
        }
        _ = processes.ended() => {}
        _ = end_wanted.wait_for(|wanted| !matches!(wanted, Some((_, StopMode::Drain)))) => {}
    }
}

/// Forgets a draining run that has ended.
pub fn forget_drain(instance: &SiteInstance, run: RunId) {
    instance.drains.forget(run);
}

/// Repeats a start that failed beside a draining run, when that has ended. Possibly only one run
/// can exist at a time.
pub async fn retry_alone(
    instances: &Rc<NodeInstances>,
    instance: &SiteInstance,
    mode: &StartMode,
    number: u64,
    end_wanted: &watch::Receiver<EndRequest>,
    brought: Result<InstanceProcesses, StartError>,
) -> Result<InstanceProcesses, StartError> {
    let Err(StartError::Failed(fault)) = &brought else { return brought };
    if instance.drains.users().is_none() {
        return brought;
    }
    tracing::info!(site = %instance.site().name, "it does not start beside the old one, which is ended first: {fault}");
    instance.drains.end(StopMode::Graceful);
    instance.drains.wait_until_gone().await;
    start::bring_up(&instances.context, instance, mode, number, end_wanted.clone()).await
}

/// Returns how this event ends a draining run.
pub fn stop_mode_by(event: LifecycleEvent) -> Option<StopMode> {
    match event {
        LifecycleEvent::Stop => Some(StopMode::Graceful),
        LifecycleEvent::SiteRemoved
        | LifecycleEvent::PlacedElsewhere
        | LifecycleEvent::Fenced
        | LifecycleEvent::Drain => Some(StopMode::Kill),
        _ => None,
    }
}
