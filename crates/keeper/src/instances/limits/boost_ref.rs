//! Giving a running instance higher limits for one request.
//!
//! Not here: how far they are raised (`decide::boosts`), files of cgroups (`cells`).

use std::rc::Rc;

use nagaya_keeper_api::protocol::{BoostId, FailureKind, InstanceId};
use nagaya_records::cell::Boost;

use crate::confinement;
use crate::context::KeeperContext;
use crate::fault::{self, Fault};
use crate::instances::decide::boosts::BoostRange;
use crate::instances::state::instance::{SiteInstance, parts};
use crate::instances::state::shared::NodeInstances;

/// One request's boost of an instance, until it is dropped.
pub struct BoostRef {
    context: Rc<KeeperContext>,
    instance: Rc<SiteInstance>,
    of: InstanceId,
    id: BoostId,
    granted: Boost,
}

impl BoostRef {
    pub fn id(&self) -> BoostId {
        self.id
    }

    /// Returns the run it belongs to.
    pub fn instance(&self) -> InstanceId {
        self.of
    }

    /// Returns what it had when it began.
    pub fn granted(&self) -> Boost {
        self.granted
    }
}

impl Drop for BoostRef {
    fn drop(&mut self) {
        if self.instance.boosts.end(self.id) {
            follow_boosts(&self.context, &self.instance);
        }
    }
}

/// Boosts this run of an instance, as far as allowed, while the returned value lives.
pub fn begin_boost(instances: &NodeInstances, of: InstanceId, asked: Boost) -> Result<BoostRef, Fault> {
    confinement::check_boost(asked)?;
    let context = &instances.context;
    let (key, run) = parts(of);
    let instance = instances.table.get(key);
    let instance = instance.filter(|instance| instance.processes_of(run).is_some()).ok_or_else(|| {
        Fault::new(FailureKind::NotFound, fault::UNKNOWN, format!("instance {} has ended", of.0))
    })?;
    let granted = range(context, &instance).grants(asked);
    let id = instances.limits.take_boost_id();
    // Includes a boost that grants nothing now: its record may allow more while it runs.
    instance.boosts.begin(id, asked);
    follow_boosts(context, &instance);
    context.metrics.boosts.add(u64::from(!granted.is_empty()));
    Ok(BoostRef { context: Rc::clone(context), instance, of, id, granted })
}

fn range(context: &KeeperContext, instance: &SiteInstance) -> BoostRange {
    BoostRange::of(&instance.site(), &instance.tenant(), context.options().raise_max)
}

/// Sets its limits to those of its records and running requests.
pub fn follow_boosts(context: &KeeperContext, instance: &SiteInstance) {
    let site = instance.site();
    let (before, now) = instance.boosts.update(&range(context, instance));
    if before != now {
        let to = if now.is_empty() { "its own".to_owned() } else { now.to_string() };
        tracing::debug!(site = %site.name, %to, "limits of an application for requests");
    }
    // A new site of the same name may have an instance already, with boosts of its own.
    if !before.is_empty() || !now.is_empty() {
        context.cells().boost(&site.name, now);
    }
}

/// The run is over, or rests: nobody gets more for it any longer.
pub fn end_boosts(context: &KeeperContext, instance: &SiteInstance) {
    instance.boosts.end_all();
    follow_boosts(context, instance);
}
