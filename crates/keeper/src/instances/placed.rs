//! The cluster's view of instances: whether each is placed here, and whether this node may run them
//! now.
//!
//! Not here: stopping them in time (`authority`), what an instance makes of it (`lifecycle`), who
//! places them.

use std::rc::Rc;
use std::time::Duration;

use nagaya_keeper_api::codes::ELSEWHERE;
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::SiteName;
use tokio::time::{Instant, timeout, timeout_at};

use crate::authority::{FENCED, NOT_RELEASED};
use crate::context::KeeperContext;
use crate::fault::Fault;
use crate::instances::decide::lifecycle::LifecycleEvent;
use crate::instances::run::driver::dispatch;
use crate::instances::state::instance::SiteInstance;
use crate::instances::state::shared::NodeInstances;

/// Time for which a caller may know more than this keeper. It may have been notified of a placement
/// directly, or a lease may be on its way here.
const CATCH_UP_MAX: Duration = Duration::from_millis(500);

/// Maximum time for the users of an instance that is handed over, whatever is requested.
const RELEASE_MAX: Duration = Duration::from_secs(3600);

/// Time for running requests when their node joins a cluster.
const JOIN_RELEASE: Duration = Duration::from_secs(30);

/// Maximum duration of the end of an instance that is handed over: its notice, and a busy kernel.
const END_MAX: Duration = Duration::from_secs(30);

/// Result of comparing a site's placement with the epoch of a caller.
#[derive(Debug, PartialEq, Eq)]
enum PlacementCheck {
    Here,
    /// There may be something newer in a moment.
    NotYet(NotServable),
    Elsewhere,
}

#[derive(Debug, PartialEq, Eq)]
enum NotServable {
    Fenced,
    Elsewhere,
}

/// `placed`: whether the known placement names this node, and its epoch.
fn standing(placed: Option<(bool, u64)>, asked: Option<u64>, is_fenced: bool) -> PlacementCheck {
    let is_behind = asked.is_some_and(|asked| placed.is_none_or(|(_, known)| known < asked));
    match placed {
        _ if is_behind => PlacementCheck::NotYet(NotServable::Elsewhere),
        Some((true, _)) if is_fenced => PlacementCheck::NotYet(NotServable::Fenced),
        Some((true, _)) => PlacementCheck::Here,
        Some((false, _)) | None => PlacementCheck::Elsewhere,
    }
}

pub fn fenced(name: &SiteName) -> Fault {
    let message = format!("this node has no authority to run the application of '{name}' now");
    Fault::new(FailureKind::Fenced, FENCED, message)
}

pub fn elsewhere(name: &SiteName) -> Fault {
    Fault::new(
        FailureKind::Elsewhere,
        ELSEWHERE,
        format!("the application of '{name}' is not placed on this node"),
    )
}

/// Returns `None` without a cluster. Otherwise whether the placement names this node, and the epoch
/// of that or of another placement.
fn placed(context: &KeeperContext, name: &SiteName) -> Option<Option<(bool, u64)>> {
    let node = context.authority.node()?;
    let placement = context.table().read().placement(name.as_str());
    let is_removed = context.authority.is_removed();
    Some(placement.map(|placement| match placement.part(&node) {
        Some(part) => (!is_removed, part.epoch),
        None => (false, placement.epoch),
    }))
}

/// Returns the first events of a new instance.
pub fn events_at_birth(instances: &NodeInstances, name: &SiteName) -> Vec<LifecycleEvent> {
    let Some(placed) = placed(&instances.context, name) else { return Vec::new() };
    let is_here = placed.is_some_and(|(is_here, _)| is_here);
    let moved = (!is_here).then_some(LifecycleEvent::PlacedElsewhere);
    let fenced = instances.placement.is_fenced().then_some(LifecycleEvent::Fenced);
    [moved, fenced].into_iter().flatten().collect()
}

/// Returns once the site's instance may run here, as far as this epoch is concerned.
pub async fn wait_until_placed(
    instances: &NodeInstances,
    name: &SiteName,
    epoch: Option<u64>,
) -> Result<(), Fault> {
    let until = Instant::now() + CATCH_UP_MAX;
    loop {
        let changed = instances.placement.changed.notified();
        let Some(placed) = placed(&instances.context, name) else { return Ok(()) };
        let bar = match standing(placed, epoch, instances.placement.is_fenced()) {
            PlacementCheck::Here => return Ok(()),
            PlacementCheck::Elsewhere => return Err(elsewhere(name)),
            PlacementCheck::NotYet(bar) => bar,
        };
        if timeout_at(until, changed).await.is_err() {
            return Err(match bar {
                NotServable::Fenced => fenced(name),
                NotServable::Elsewhere => elsewhere(name),
            });
        }
    }
}

/// Notifies an instance if it is placed here now and was not before, or the other way round.
pub fn follow_placement(instances: &Rc<NodeInstances>, instance: &Rc<SiteInstance>) {
    let site = instance.site();
    let Some(placed) = placed(&instances.context, &site.name) else { return };
    let is_here = placed.is_some_and(|(is_here, _)| is_here);
    // An instance that was handed over under one epoch may come back under another.
    let epoch = placed.map(|(_, epoch)| epoch);
    let is_new = instance.released().is_some_and(|released| epoch > released);
    if is_new || !is_here {
        instance.set_released(None);
    }
    let was_here = instance.life.borrow().is_here();
    match (was_here, is_here) {
        (true, false) => {
            tracing::info!(site = %site.name, "its application is placed elsewhere; its processes here are killed");
            dispatch(instances, instance, LifecycleEvent::PlacedElsewhere);
        }
        (false, true) => dispatch(instances, instance, LifecycleEvent::PlacedHere),
        (true, true) if is_new => dispatch(instances, instance, LifecycleEvent::PlacedHere),
        _ => {}
    }
}

/// Hands an instance over. Returns once nothing of it is left, with the epoch under which it
/// does not run here again. Also returns how many uses were cut short.
pub async fn give_up(
    instances: &Rc<NodeInstances>,
    instance: &Rc<SiteInstance>,
    within: Duration,
) -> Result<(Option<u64>, u32), Fault> {
    let site = instance.site();
    let Some(placed) = placed(&instances.context, &site.name) else {
        let message = "this node is in no cluster: there is no node to give an instance to";
        return Err(Fault::new(FailureKind::Invalid, NOT_RELEASED, message));
    };
    let epoch = placed.map(|(_, epoch)| epoch);
    instance.set_released(Some(epoch));
    dispatch(instances, instance, LifecycleEvent::Drain);
    if timeout(within.min(RELEASE_MAX), instance.wait_until_gone()).await.is_ok() {
        return Ok((epoch, 0));
    }
    let cut = instance.life.borrow().users();
    tracing::info!(site = %site.name, uses = cut, "its application is handed over; requests that still use it are cut off");
    dispatch(instances, instance, LifecycleEvent::Stop);
    timeout(END_MAX, instance.wait_until_gone()).await.map_err(|_| {
        let message =
            format!("processes of the application of '{}' are still there after {END_MAX:?}", site.name);
        Fault::new(FailureKind::Busy, NOT_RELEASED, message)
    })?;
    Ok((epoch, cut))
}

/// Hands over all running instances: they were started outside of the cluster that the node is
/// in now.
pub async fn release_all(instances: &Rc<NodeInstances>) {
    let running =
        instances.table.all().into_iter().filter(|instance| instance.life.borrow().tier().has_process());
    let mut released = Vec::new();
    for instance in running {
        let instances = Rc::clone(instances);
        released.push(tokio::task::spawn_local(async move {
            let done = give_up(&instances, &instance, JOIN_RELEASE).await;
            if let Err(fault) = done {
                tracing::warn!(code = %fault.code, "{}", fault.message);
            }
        }));
    }
    for one in released {
        // A task that panicked has reported it.
        let _ = one.await;
    }
}

/// Notifies all instances when the node loses its lease and when it has one again. Returns when
/// it cannot have one any more.
pub async fn follow_authority(instances: &Rc<NodeInstances>) {
    instances.context.authority.wait_until_joined().await;
    let mut fenced = instances.context.authority.fenced();
    loop {
        let is_fenced = *fenced.borrow_and_update();
        if is_fenced == instances.placement.is_fenced() {
            tokio::select! {
                _ = fenced.changed() => {}
                () = instances.context.authority.wait_until_lost() => return,
            }
            continue;
        }
        instances.placement.set_fenced(is_fenced);
        let event = if is_fenced { LifecycleEvent::Fenced } else { LifecycleEvent::Unfenced };
        for instance in instances.table.all() {
            dispatch(instances, &instance, event);
        }
        instances.placement.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_with_a_later_epoch_is_waited_for() {
        use PlacementCheck::*;
        assert_eq!(standing(Some((true, 3)), None, false), Here);
        assert_eq!(standing(Some((true, 3)), Some(3), false), Here);
        assert_eq!(standing(Some((true, 3)), Some(2), false), Here, "what is known here is newer");
        assert_eq!(standing(Some((false, 3)), Some(4), false), NotYet(NotServable::Elsewhere));
        assert_eq!(standing(None, Some(1), false), NotYet(NotServable::Elsewhere));
        assert_eq!(standing(Some((false, 3)), Some(3), false), Elsewhere);
        assert_eq!(standing(Some((false, 3)), None, false), Elsewhere);
        assert_eq!(standing(None, None, false), Elsewhere);
        assert_eq!(standing(Some((true, 3)), None, true), NotYet(NotServable::Fenced));
    }
}
