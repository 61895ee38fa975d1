//! Carries out an operator's commands on instances, and builds the JSON replies.
//!
//! Not here: the command's way here (`feed`, `server`), whether it makes sense now (`lifecycle`).

use std::rc::Rc;
use std::time::Duration;

use nagaya_keeper_api::limits::WAKE_MAX;
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::SiteName;
use nagaya_records::cell::CpuQuota;
use nagaya_records::instance::{InstanceCommand, Tier};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::cells::NoLimit;
use crate::context::KeeperContext;
use crate::fault::Fault;
use crate::image;
use crate::instances::admin::show::inspect;
use crate::instances::decide::lifecycle::{ActError, LifecycleEvent};
use crate::instances::images::collection::forget_refusal;
use crate::instances::images::transfer::launch_of;
use crate::instances::lookup::instance_of;
use crate::instances::placed::give_up;
use crate::instances::run::driver::dispatch;
use crate::instances::state::instance::SiteInstance;
use crate::instances::state::shared::NodeInstances;
use crate::instances::use_instance::use_site;

/// Maximum duration of a step of rest or an end before the reply says that it continues.
const STEP_MAX: Duration = Duration::from_secs(30);

/// Returns `null` if no application has this name.
pub async fn do_act(instances: &Rc<NodeInstances>, site: &str, act: InstanceCommand) -> Value {
    let Some(instance) = SiteName::new(site).ok().and_then(|name| instance_of(instances, &name).ok()) else {
        return Value::Null;
    };
    let done = match act {
        InstanceCommand::Wake => wake(instances, &instance).await,
        InstanceCommand::Rest { to } => rest(instances, &instance, to).await,
        InstanceCommand::Image => take_image(instances, &instance).await,
        InstanceCommand::Restart => restart(instances, &instance).await,
        InstanceCommand::Stop => request_event(instances, &instance, LifecycleEvent::Stop, STEP_MAX).await,
        InstanceCommand::Release { within_ms } => {
            match give_up(instances, &instance, Duration::from_millis(within_ms)).await {
                Ok((epoch, cut)) => return json!({"ok": true, "epoch": epoch, "cut": cut}),
                Err(fault) => Err(ActFailure::Fault(fault)),
            }
        }
        InstanceCommand::LimitCpu { thousandths } => {
            return limit_cpu(&instances.context, &instance, thousandths);
        }
        InstanceCommand::Inspect => Ok(()),
        InstanceCommand::Logs => {
            let journal = instance.journal();
            journal.recall().await;
            return json!({"ok": true, "lines": journal.lines()});
        }
    };
    match done {
        Ok(()) => {
            let mut row = inspect(instances, &instance).await;
            row["ok"] = json!(true);
            row
        }
        Err(ActFailure::Fault(fault)) => json!({"error": fault.message, "code": fault.code.to_string()}),
        Err(ActFailure::Impossible(unfit)) => json!({"error": unfit.to_string()}),
        Err(ActFailure::GoesOn) => {
            json!({"error": "it takes long; `nagaya instance show` shows its progress"})
        }
    }
}

/// Afterwards it rests again by itself as after a request.
async fn wake(instances: &Rc<NodeInstances>, instance: &SiteInstance) -> Result<(), ActFailure> {
    let name = instance.site().name.clone();
    use_site(instances, &name, None).await.map(drop).map_err(ActFailure::Fault)
}

async fn rest(
    instances: &Rc<NodeInstances>,
    instance: &Rc<SiteInstance>,
    to: Option<Tier>,
) -> Result<(), ActFailure> {
    let now = instance.life.borrow().tier();
    let next = Tier::ALL.into_iter().rev().find(|tier| *tier < now).unwrap_or(Tier::Cold);
    request_event(instances, instance, LifecycleEvent::Rest(to.unwrap_or(next)), STEP_MAX).await
}

async fn take_image(instances: &Rc<NodeInstances>, instance: &Rc<SiteInstance>) -> Result<(), ActFailure> {
    instance.life.borrow().fits(LifecycleEvent::Retake).map_err(ActFailure::Impossible)?;
    forget_refusal(instances, instance).await;
    request_event(instances, instance, LifecycleEvent::Retake, WAKE_MAX).await?;
    if instance.life.borrow().has_image() {
        return Ok(());
    }
    if let Some(fault) = instance.fault() {
        return Err(ActFailure::Fault(fault));
    }
    let note = instance.image.borrow().no_image.clone();
    Err(note.map_or(ActFailure::Impossible(ActError::NoImages), |note| {
        ActFailure::Fault(Fault::new(FailureKind::Broken, image::UNFIT, note))
    }))
}

/// Removes its image, whatever its subject: it is not used again.
async fn remove_image(instances: &Rc<NodeInstances>, instance: &SiteInstance) {
    let images = instances.images.get();
    let launch = launch_of(instances, &instance.site().name).await;
    let (Some(images), Ok(launch)) = (images, launch) else { return };
    let tenant = launch.tenant.name.clone();
    let remove = move || {
        images.remove(&launch.present_subject()?);
        Ok(())
    };
    if let Err(fault) = instances.context.on_worker_for(&tenant, remove).await {
        tracing::warn!(site = %instance.site().name, "its image cannot be removed: {fault}");
    }
}

async fn restart(instances: &Rc<NodeInstances>, instance: &Rc<SiteInstance>) -> Result<(), ActFailure> {
    // Before the restart: the new run soon has an image of its own.
    remove_image(instances, instance).await;
    instance.forget_troubles();
    request_event(instances, instance, LifecycleEvent::Restart, WAKE_MAX).await?;
    // Its next request would fail in the same way.
    match instance.fault() {
        Some(fault) => Err(ActFailure::Fault(fault)),
        None => Ok(()),
    }
}

/// Returns once the command is done.
async fn request_event(
    instances: &Rc<NodeInstances>,
    instance: &Rc<SiteInstance>,
    wish: LifecycleEvent,
    within: Duration,
) -> Result<(), ActFailure> {
    instance.life.borrow().fits(wish).map_err(ActFailure::Impossible)?;
    dispatch(instances, instance, wish);
    let done = async {
        loop {
            let changed = instance.changed.notified();
            if instance.life.borrow().doing().is_none() {
                return;
            }
            changed.await;
        }
    };
    timeout(within, done).await.map_err(|_| ActFailure::GoesOn)
}

fn limit_cpu(context: &KeeperContext, instance: &SiteInstance, thousandths: Option<u32>) -> Value {
    let site = instance.site();
    match context.cells().limit_cpu(&site.name, thousandths.map(CpuQuota::of_core)) {
        Ok(()) => json!({"ok": true}),
        Err(NoLimit) => {
            json!({"error": format!("the cell of '{}' has no CPU limit that could be changed", site.name)})
        }
    }
}

/// Why the command was not done.
enum ActFailure {
    Fault(Fault),
    Impossible(ActError),
    GoesOn,
}
