//! Carries out the effects that lifecycles return, and dispatches the results to them.
//!
//! Not here: what is to be done (`lifecycle`), how (`start`, `rest`).

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use nagaya_records::SiteName;
use nagaya_records::instance::{Tier, WakeStage};
use tokio::sync::watch;
use tokio::task::spawn_local;

use crate::context::KeeperContext;
use crate::instances::decide::lifecycle::{
    DiscardReason, FailureCause, LifecycleEffect, LifecycleEvent, OpId, OpOutcome, RunId,
};
use crate::instances::decide::stop_mode::{EndRequest, StopMode};
use crate::instances::decide::wake_queue::InstanceKey;
use crate::instances::images::collection;
use crate::instances::limits::boost_ref::end_boosts;
use crate::instances::run::app_launch::NotRestored;
use crate::instances::run::priority::{end_priority, prioritize_wake};
use crate::instances::run::processes::{InstanceProcesses, StartMode};
use crate::instances::run::rest::{ReachedTier, ThawOrder};
use crate::instances::run::start::{self, StartError};
use crate::instances::run::watchdog::watch_family;
use crate::instances::run::work::follow_work;
use crate::instances::run::{draining, lateness, measured};
use crate::instances::state::instance::SiteInstance;
use crate::instances::state::shared::NodeInstances;
use crate::metrics::{ImageEvent, WakeEnd};
use crate::{fault, image};

/// Dispatches an event to an instance, and carries out its effects. Events that occur meanwhile
/// wait for the end of this.
pub fn dispatch(instances: &Rc<NodeInstances>, instance: &Rc<SiteInstance>, event: LifecycleEvent) {
    if !instances.events.add(instance, event) {
        return;
    }
    while let Some((instance, event)) = instances.events.take() {
        act(instances, &instance, event);
    }
}

fn act(instances: &Rc<NodeInstances>, instance: &Rc<SiteInstance>, event: LifecycleEvent) {
    let now = Instant::now();
    let (was_awake, from) = (instance.is_awake(), instance.life.borrow().tier());
    if matches!(event, LifecycleEvent::Acquire(_) | LifecycleEvent::Alarm | LifecycleEvent::Retake)
        && instance.life.borrow().waiting() == 0
    {
        // The event may be the first of a wake.
        instance.wake.begin(from, now);
    }
    instance.life.borrow_mut().assume(instances.costs.get());
    if let Some(mode) = draining::stop_mode_by(event) {
        instance.drains.end(mode);
    }
    let effects = instance.life.borrow_mut().apply(now, event);
    let is_awake = instance.is_awake();
    if is_awake && !was_awake {
        note_woken(instances, instance, now);
    } else if let LifecycleEvent::Done(_, OpOutcome::Failed(_)) = event
        && instance.life.borrow().doing().is_none()
    {
        count(&instances.context, instance, WakeEnd::Failed);
    }
    for effect in effects {
        perform(instances, instance, effect, now);
    }
    rearm(instances, instance);
    take_turns(instances, now);
}

fn next_to_wake(instances: &NodeInstances, now: Instant) -> Option<InstanceKey> {
    instances.wakes.borrow_mut().next(now)
}

/// Dispatches granted wake turns before any other event. An instance with a turn must still
/// wait for it then.
fn take_turns(instances: &NodeInstances, now: Instant) {
    while let Some(key) = next_to_wake(instances, now) {
        if let Some(next) = instances.table.get(key) {
            instances.events.add_first(&next, LifecycleEvent::WakeSlot);
        }
    }
}

/// Notifies instances whose turn it is, outside of any event of an instance.
pub fn wake_next(instances: &Rc<NodeInstances>) {
    while let Some(key) = next_to_wake(instances, Instant::now()) {
        if let Some(next) = instances.table.get(key) {
            dispatch(instances, &next, LifecycleEvent::WakeSlot);
        }
    }
}

/// Lets a start continue without its wake slot, so that the next one begins.
fn give_place_back(instances: &Rc<NodeInstances>, instance: &SiteInstance) {
    tracing::debug!(site = %instance.site().name, "it starts slowly: the next one begins beside it");
    instances.wakes.borrow_mut().give_back(instance.key, Instant::now());
    wake_next(instances);
}

/// Resets its alarm, and records changes.
pub fn rearm(instances: &NodeInstances, instance: &SiteInstance) {
    let (deadline, idle_since, tier) = {
        let life = instance.life.borrow();
        (life.deadline(), life.idle_since(), life.tier())
    };
    instances.deadlines.set(instance.key, deadline, idle_since);
    follow_work(instance);
    if idle_since.is_some() {
        // Nobody waits for an answer any more.
        instance.wake.set_unanswered(None);
    }
    {
        let mut status = instance.status.borrow_mut();
        if status.tier.0 != tier {
            status.tier = (tier, Instant::now());
        }
    }
    publish_awake(instances, &instance.site().name);
    instance.changed.notify_waiters();
}

/// Publishes to the edge whether this site's instance is awake. A site that was removed belongs
/// to nobody.
fn publish_awake(instances: &NodeInstances, name: &SiteName) {
    let listed = instances.table.of_site(name);
    let is_awake = listed.is_some_and(|listed| !listed.life.borrow().rests());
    instances.published.publish_awake(name, is_awake);
}

fn perform(
    instances: &Rc<NodeInstances>,
    instance: &Rc<SiteInstance>,
    effect: LifecycleEffect,
    now: Instant,
) {
    let key = instance.key;
    match effect {
        LifecycleEffect::Queue => {
            instance.mark(WakeStage::Queue, now);
            if !instances.wakes.borrow_mut().join(key, instance.tenant().name.clone()) {
                // Before any other event: it waits for nothing now.
                instances.events.add_first(instance, LifecycleEvent::WakeQueueFull);
            }
        }
        LifecycleEffect::Unqueue => instances.wakes.borrow_mut().leave(key),
        LifecycleEffect::FreeWakeSlot(woke) => {
            instances.wakes.borrow_mut().release(key, now, woke);
            if !woke {
                end_priority(instances, instance, now);
            }
        }
        LifecycleEffect::Boot(op, run) => begin(instances, instance, (op, run), StartMode::Boot, now),
        LifecycleEffect::Restore(op, run) => restore(instances, instance, (op, run), now),
        LifecycleEffect::TakeImage(op) => take_image(instances, instance, op),
        LifecycleEffect::Rest(op, from, to) => {
            tracing::debug!(site = %instance.site().name, %from, %to, "it goes to rest");
            change_tier(instances, instance, op, Some(to));
        }
        LifecycleEffect::Resume(op, from) => {
            tracing::debug!(site = %instance.site().name, %from, "it is needed again");
            instance.mark(WakeStage::Thaw, now);
            prioritize_wake(instances, instance, now);
            change_tier(instances, instance, op, None);
        }
        LifecycleEffect::End(op) => {
            instance.want_end(Some((op, StopMode::Graceful)));
        }
        LifecycleEffect::Kill(op) => {
            if let Some(processes) = instance.processes() {
                processes.kill();
            }
            instance.want_end(Some((op, StopMode::Kill)));
        }
        LifecycleEffect::Drain(users) => {
            end_boosts(&instances.context, instance);
            draining::begin_drain(instances, instance, users);
        }
        LifecycleEffect::Quarantine(reason) => quarantine(instances, instance, reason),
        LifecycleEffect::Answer(waiter, answer) => {
            let waiting = instance.waiters.remove(waiter);
            if let Some(Err(Ok(run))) = waiting.map(|waiting| waiting.send(answer)) {
                // The waiter was dropped between our send and its receive: its use is given back.
                dispatch(instances, instance, LifecycleEvent::Release(run));
            }
        }
        // Its alarm goes with the next `look_again`: it has none.
        LifecycleEffect::Closed => {
            instances.table.remove(key);
            collection::clear_away(instances, instance);
        }
    }
}

fn restore(
    instances: &Rc<NodeInstances>,
    instance: &Rc<SiteInstance>,
    (op, run): (OpId, RunId),
    now: Instant,
) {
    if let Some(images) = instances.images.get() {
        return begin(instances, instance, (op, run), StartMode::Restore(images), now);
    }
    // Settings have changed a moment ago.
    let failed = OpOutcome::Failed(FailureCause::Node);
    dispatch(instances, instance, LifecycleEvent::Done(op, failed));
}

fn begin(
    instances: &Rc<NodeInstances>,
    instance: &Rc<SiteInstance>,
    (op, run): (OpId, RunId),
    mode: StartMode,
    now: Instant,
) {
    let (end_wanted, wanted) = watch::channel(None);
    instance.replace_end_wanted(end_wanted);
    instance.mark(WakeStage::Sandbox, now);
    prioritize_wake(instances, instance, now);
    spawn_local(live(Rc::clone(instances), Rc::clone(instance), (op, run), mode, wanted));
}

fn take_image(instances: &Rc<NodeInstances>, instance: &Rc<SiteInstance>, op: OpId) {
    let (Some(processes), Some(images)) = (instance.processes(), instances.images.get()) else {
        return dispatch(instances, instance, LifecycleEvent::Done(op, OpOutcome::Imaged(false)));
    };
    let (instances, instance) = (Rc::clone(instances), Rc::clone(instance));
    spawn_local(async move {
        if let Err(error) = rouse_for_image(&instances.context, &processes, op).await {
            tracing::warn!(site = %instance.site().name, "{}: no image of it is taken: {error}", fault::REST);
            return dispatch(&instances, &instance, LifecycleEvent::Done(op, OpOutcome::NotImagedNow));
        }
        processes.request_cells.return_all().await;
        let taken = start::take_image(&instances.context, &instance, images, &processes).await;
        let site = instance.site();
        let event = match &taken {
            Ok(image) => {
                tracing::info!(site = %site.name, bytes = image.bytes(), "an image of it was taken");
                ImageEvent::Taken
            }
            Err(fault) => {
                tracing::warn!(site = %site.name, "no image of it is taken: {fault}");
                ImageEvent::NotTaken
            }
        };
        instances.context.metrics.images.add([event as usize], 1);
        let is_taken = taken.is_ok();
        let outcome = match &taken {
            Err(fault) if matches!(fault.code, image::STORE | image::UNSETTLED) => OpOutcome::NotImagedNow,
            taken => OpOutcome::Imaged(taken.is_ok()),
        };
        {
            let mut known = instance.image.borrow_mut();
            known.no_image = taken.as_ref().err().map(|fault| fault.message.clone());
            known.image = taken.ok();
        }
        if !is_taken && !instance.life.borrow().is_imaging() {
            // It was ended meanwhile, so the missing image says nothing about it.
            collection::forget_refusal(&instances, &instance).await;
        }
        dispatch(&instances, &instance, LifecycleEvent::Done(op, outcome));
        collection::collect(&instances.context, &instances.images);
    });
}

fn quarantine(instances: &NodeInstances, instance: &SiteInstance, reason: DiscardReason) {
    instances.context.metrics.images.add([ImageEvent::Quarantined as usize], 1);
    let image = instance.image.borrow_mut().image.take();
    let (Some(images), why) = (instances.images.get(), reason_of(reason)) else { return };
    // An image that could not be restored was put aside by the task that tried. One that is to
    // be taken again is replaced.
    if let (Some(image), Some(why)) = (image, why) {
        let job = move || {
            images.quarantine(&image, &why);
            Ok(())
        };
        let context = Rc::clone(&instances.context);
        spawn_local(async move { context.on_worker(job).await });
    }
}

/// Records a finished wake: its duration by stage.
fn note_woken(instances: &Rc<NodeInstances>, instance: &Rc<SiteInstance>, now: Instant) {
    instance.set_fault(None);
    instance.set_note(None);
    instance.wake.add();
    let Some(timeline) = instance.wake.timeline() else { return };
    let stages = timeline.stages(now);
    let fell_back =
        [WakeStage::Restore, WakeStage::Boot].iter().all(|one| stages.iter().any(|(of, _)| of == one));
    count(&instances.context, instance, if fell_back { WakeEnd::FellBack } else { WakeEnd::Woke });
    if let Some(event) = measured::note_wake(instances, instance, timeline.from(), &stages, now) {
        dispatch(instances, instance, event);
    }
    for (stage, took) in stages {
        instances.context.metrics.wake_stages.observe(stage as usize, took);
    }
    instance.wake.set_last(timeline.wake_whole(now));
}

/// Moves the instance down to a tier, or up to running.
fn change_tier(instances: &Rc<NodeInstances>, instance: &Rc<SiteInstance>, op: OpId, down_to: Option<Tier>) {
    // It has ended, and that event comes next.
    let Some(processes) = instance.processes() else { return };
    let resting = Arc::clone(&processes.resting);
    resting.begin(op.0);
    if down_to.is_some() {
        end_boosts(&instances.context, instance);
    }
    let (instances, instance) = (Rc::clone(instances), Rc::clone(instance));
    spawn_local(async move {
        if down_to.is_some() {
            // Everything in its cell rests.
            processes.request_cells.return_all().await;
        }
        let job = move || {
            Ok(match down_to {
                Some(to) => resting.down(op.0, to),
                None => match resting.up(op.0, ThawOrder::ParentsLast) {
                    Ok(()) => ReachedTier { tier: Tier::Running, why: None },
                    Err(error) => ReachedTier { tier: Tier::Frozen, why: Some(error.to_string()) },
                },
            })
        };
        let reached = instances.context.on_worker(job).await;
        if down_to.is_none() {
            watch_family(&instances.context, &instance, &processes);
        }
        let (site, code) = (instance.site(), fault::REST);
        let outcome = match reached {
            Ok(ReachedTier { tier, why }) => {
                if let Some(why) = why {
                    tracing::info!(site = %site.name, %tier, "{code}: it rests no deeper: {why}");
                    instance.set_note(Some(format!("it rests no deeper than {tier}: {why}")));
                }
                if down_to.is_none() && tier != Tier::Running {
                    OpOutcome::Stuck
                } else {
                    OpOutcome::Rests(tier)
                }
            }
            Err(fault) => {
                tracing::warn!(site = %site.name, "{code}: {fault}");
                // Nothing was begun. On the way down it stays, and the next user gets a new
                // one.
                if down_to.is_none() {
                    OpOutcome::Stuck
                } else {
                    OpOutcome::Rests(instance.life.borrow().tier())
                }
            }
        };
        dispatch(&instances, &instance, LifecycleEvent::Done(op, outcome));
        if let OpOutcome::Rests(tier) = outcome
            && down_to.is_some()
            && let Some(event) = measured::count_memory(&instances, &instance, tier).await
        {
            dispatch(&instances, &instance, event);
        }
    });
}

/// Thaws the instance for an image. An instance at rest is frozen, and so is the program that takes
/// images in its sandbox.
async fn rouse_for_image(
    context: &KeeperContext,
    processes: &InstanceProcesses,
    op: OpId,
) -> std::io::Result<()> {
    let resting = Arc::clone(&processes.resting);
    resting.begin(op.0);
    let roused = context.on_worker(move || Ok(resting.up(op.0, ThawOrder::AllAtOnce))).await;
    roused.map_err(|fault| std::io::Error::other(fault.message))?
}

/// Returns the reason that is written beside an image that is put aside here.
fn reason_of(reason: DiscardReason) -> Option<String> {
    match reason {
        DiscardReason::DiedSoon(after) => Some(format!("what came back from it ended after {after:?}")),
        DiscardReason::NotRestored | DiscardReason::Asked => None,
    }
}

fn count(context: &KeeperContext, instance: &SiteInstance, end: WakeEnd) {
    let from = instance.wake.from();
    context.metrics.wakes.add([from as usize, end as usize], 1);
}

/// Runs one run, from its start until nothing is left of it.
async fn live(
    instances: Rc<NodeInstances>,
    instance: Rc<SiteInstance>,
    (op, run): (OpId, RunId),
    mode: StartMode,
    mut end_wanted: watch::Receiver<EndRequest>,
) {
    let tell = |event| dispatch(&instances, &instance, event);
    let number = instance.id(run).0;
    let brought = {
        let mut coming =
            pin!(start::bring_up(&instances.context, &instance, &mode, number, end_wanted.clone()));
        tokio::select! {
            brought = &mut coming => brought,
            () = lateness::wait_until_late(&instances.context, &instance) => {
                give_place_back(&instances, &instance);
                coming.await
            }
        }
    };
    match draining::retry_alone(&instances, &instance, &mode, number, &end_wanted, brought).await {
        Ok(processes) => {
            let processes = Rc::new(processes);
            let ended = processes.ended();
            if let Some(image) = &processes.image {
                instance.mark_verified(image);
            }
            instance.set_processes(Rc::clone(&processes));
            tell(LifecycleEvent::Done(op, OpOutcome::Ready));
            let keeps = {
                let life = instance.life.borrow();
                life.is_imaging() || life.images_at_rest()
            };
            if !keeps {
                processes.needs_no_image();
            }
            let died = tokio::select! {
                exit = ended => Some(exit),
                _ = end_wanted.wait_for(Option::is_some) => None,
            };
            if instance.has_processes(&processes) {
                instance.take_processes();
                end_boosts(&instances.context, &instance);
            }
            match died {
                Some(_) if instances.context.processes.is_closing() => processes.discard(),
                Some(exit) => {
                    let why = format!("it ended by itself: {}", processes.why_ended(exit));
                    tracing::warn!(site = %instance.site().name, "of its application: {why}");
                    instance.set_last_end(why);
                    processes.discard();
                    tell(LifecycleEvent::Died(run));
                }
                None => {
                    if matches!(*end_wanted.borrow(), Some((_, StopMode::Drain))) {
                        draining::wait_until_drained(&instance, &processes, &mut end_wanted).await;
                    }
                    end(&instances.context, &instance, &processes, end_wanted.clone()).await;
                    draining::forget_drain(&instance, run);
                }
            }
        }
        Err(why) => failed(&instances, &instance, op, why).await,
    }
    let wanted = *end_wanted.borrow();
    if let Some((op, _)) = wanted {
        tell(LifecycleEvent::Done(op, OpOutcome::Ended));
    }
}

/// Tells why there are no processes.
async fn failed(instances: &Rc<NodeInstances>, instance: &Rc<SiteInstance>, op: OpId, why: StartError) {
    let tell = |event| dispatch(instances, instance, event);
    let site = instance.site();
    let over = |blame| LifecycleEvent::Done(op, OpOutcome::Failed(blame));
    match why {
        StartError::GivenUp => {}
        StartError::NotRestored(NotRestored::Nothing) => {
            tell(LifecycleEvent::ImageMissing);
            tell(over(FailureCause::Node));
        }
        StartError::NotRestored(NotRestored::Stale(why)) => {
            tracing::info!(site = %site.name, "its image is not used, it is started: {why}");
            instance.image.borrow_mut().image_end = Some(why);
            tell(LifecycleEvent::ImageMissing);
            tell(over(FailureCause::Node));
        }
        StartError::NotRestored(NotRestored::ImageImpossible(why, subject)) => {
            {
                let mut known = instance.image.borrow_mut();
                (known.refused, known.no_image) = (Some(*subject), Some(why));
            }
            tell(LifecycleEvent::ImageImpossible);
            tell(over(FailureCause::Node));
        }
        StartError::NotRestored(NotRestored::PutAside(fault)) => {
            tracing::warn!(site = %site.name, "{}: it is started instead: {fault}", fault::BAD_IMAGE);
            // Holds until another image is taken, which may not be tried.
            instance.image.borrow_mut().no_image = Some(fault.message.clone());
            tell(over(FailureCause::Program));
        }
        StartError::Mute(image, fault) => {
            tracing::warn!(site = %site.name, "{}: it is started instead: {fault}", fault::BAD_IMAGE);
            let is_to_blame = !instance.life.borrow().is_disturbed();
            let images = instances.images.get().filter(|_| is_to_blame);
            if let Some(images) = images {
                let why = format!("the restored application does not answer: {}", fault.message);
                let put_aside = move || {
                    images.quarantine(&image, &why);
                    Ok(())
                };
                // If no worker is free, the next wake tries the image again, and puts it aside
                // then.
                let _ = instances.context.on_worker(put_aside).await;
            }
            tell(over(FailureCause::Program));
        }
        StartError::Failed(fault) | StartError::NotRestored(NotRestored::Failed(fault)) => {
            tracing::warn!(site = %site.name, "{fault}");
            let blame = start::blame(&fault);
            instance.set_fault(Some(fault));
            tell(over(blame));
        }
    }
}

/// Ends it, after a moment's notice if it may have one.
async fn end(
    context: &KeeperContext,
    instance: &SiteInstance,
    processes: &InstanceProcesses,
    mut end_wanted: watch::Receiver<EndRequest>,
) {
    let is_kill = |wanted: &EndRequest| matches!(wanted, Some((_, StopMode::Kill)));
    if is_kill(&end_wanted.borrow_and_update()) {
        processes.kill();
        processes.end().await;
        return;
    }
    let ending = end_gracefully(context, instance, processes);
    tokio::pin!(ending);
    tokio::select! {
        () = &mut ending => return,
        _ = end_wanted.wait_for(is_kill) => processes.kill(),
    }
    ending.await;
}

/// Thaws frozen processes first: they end like others.
async fn end_gracefully(context: &KeeperContext, instance: &SiteInstance, processes: &InstanceProcesses) {
    let resting = Arc::clone(&processes.resting);
    resting.begin(u64::MAX);
    let up = context.on_worker(move || Ok(resting.up(u64::MAX, ThawOrder::AllAtOnce))).await;
    if let Ok(Err(error)) = up {
        tracing::warn!(%error, "{}: it cannot be thawed before its end", fault::REST);
    }
    if let Some(stop) = processes.end().await {
        let (site, code) = (instance.site(), fault::STOP_CUT);
        let why = format!("it was killed: it had not ended {} s after SIGTERM [{code}]", stop.as_secs_f32());
        tracing::warn!(site = %site.name, "{code}: {why}; stop_seconds of its record is the time that it has");
        instance.set_last_end(why);
    }
}
