//! Gives an instance that wakes for a waiting request the processor first, until its first answer
//! has begun.
//!
//! Not here: how much of it a tenant may have (`decide::wake_priority`), weights (`cells`).

use std::time::Instant;

use crate::instances::state::instance::SiteInstance;
use crate::instances::state::shared::NodeInstances;

/// Raises its CPU priority at the begin of a wake that somebody waits for.
pub fn prioritize_wake(instances: &NodeInstances, instance: &SiteInstance, now: Instant) {
    if instance.wake.has_priority(now) || instance.life.borrow().waiting() == 0 {
        return;
    }
    let (site, tenant) = (instance.site().name.clone(), instance.tenant().name.clone());
    let Some(granted) = instances.priorities.take(&tenant, now) else { return };
    instance.wake.set_priority(now + granted);
    instances.context.prioritize_site(&site, &tenant, now + granted);
}

/// It goes as others do from now on.
pub fn end_priority(instances: &NodeInstances, instance: &SiteInstance, now: Instant) {
    let Some(until) = instance.wake.take_priority() else { return };
    instances.context.cells().end_site_priority(&instance.site().name);
    instances.priorities.give_back(&instance.tenant().name, until.saturating_duration_since(now));
}
