//! Looks at each instance at the moment its lifecycle named.
//!
//! Not here: which moment that is (`decide::lifecycle`), the order of all of them
//! (`decide::alarms`).

use std::future::pending;
use std::rc::Rc;
use std::time::Instant;

use tokio::time::sleep_until;

use crate::instances::decide::lifecycle::LifecycleEvent;
use crate::instances::run::driver::dispatch;
use crate::instances::run::work::unless_at_work;
use crate::instances::state::instance::SiteInstance;
use crate::instances::state::shared::NodeInstances;

/// Looks at each at its time, for ever.
pub async fn keep_time(instances: &Rc<NodeInstances>) {
    loop {
        let first = instances.deadlines.first();
        let due = async {
            match first {
                Some(first) => sleep_until(first.into()).await,
                None => pending().await,
            }
        };
        tokio::select! {
            () = due => {}
            () = instances.deadlines.first_changed.notified() => continue,
        }
        let now = Instant::now();
        while let Some(key) = instances.deadlines.take_due(now) {
            let Some(instance) = instances.table.get(key) else { continue };
            if has_old_image(instances, &instance) {
                dispatch(instances, &instance, LifecycleEvent::ImageStale);
            }
            dispatch(instances, &instance, unless_at_work(&instance, LifecycleEvent::Alarm));
        }
    }
}

/// Whether its image is old enough that another one is wanted.
fn has_old_image(instances: &NodeInstances, instance: &SiteInstance) -> bool {
    let known = instance.image.borrow();
    known.image.as_ref().is_some_and(|image| instances.images.is_old(image))
}
