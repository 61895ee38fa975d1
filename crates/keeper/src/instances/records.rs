//! Has instances follow changed records and settings.
//!
//! Not here: where a cluster places them (`placed`), what a lifecycle makes of it
//! (`decide::lifecycle`).

use std::rc::Rc;
use std::sync::Arc;

use nagaya_records::{Backend, Site, Tenant};

use crate::context::same_runner;
use crate::instances::decide::lifecycle::LifecycleEvent;
use crate::instances::limits::boost_ref::follow_boosts;
use crate::instances::lookup::{instance_of, journal_of, terms};
use crate::instances::placed::follow_placement;
use crate::instances::run::app_launch::what_runs;
use crate::instances::run::driver::{dispatch, rearm};
use crate::instances::state::instance::SiteInstance;
use crate::instances::state::shared::{NodeInstances, at_once};

/// Ends instances whose record differs from the one they run with. Starts sites that always
/// run.
pub fn follow_records(instances: &Rc<NodeInstances>) {
    instances.placement.changed.notify_waiters();
    for instance in instances.table.listed() {
        let name = instance.site().name.clone();
        let now = instances.context.site(&name).ok();
        match now.filter(|(site, _)| matches!(site.backend, Backend::App(_))) {
            Some((site, tenant)) => {
                follow_placement(instances, &instance);
                follow(instances, &instance, site, tenant);
            }
            None => {
                instances.table.remove_site(&name);
                dispatch(instances, &instance, LifecycleEvent::SiteRemoved);
            }
        }
    }
    for name in instances.table.always_on() {
        // Its record may be gone by the next change, which follows.
        if let Ok(instance) = instance_of(instances, &name) {
            rearm(instances, &instance);
        }
    }
}

fn follow(instances: &Rc<NodeInstances>, instance: &Rc<SiteInstance>, site: Arc<Site>, tenant: Arc<Tenant>) {
    let Backend::App(app) = &site.backend else { return };
    let terms = terms(instances, app);
    let (old_site, old_tenant) = (instance.site(), instance.tenant());
    let is_same = match &old_site.backend {
        Backend::App(old) => what_runs(old) == what_runs(app),
        _ => false,
    };
    let is_same_owner = site.tenant == old_site.tenant && same_runner(&tenant, &old_tenant);
    if site.tenant != old_site.tenant {
        instance.set_journal(journal_of(instances, &site));
    }
    instance.set_record(site, tenant);
    follow_boosts(&instances.context, instance);
    if is_same && is_same_owner {
        instance.follow_stop();
        dispatch(instances, instance, LifecycleEvent::PolicyChanged(terms));
    } else {
        tracing::info!(site = %old_site.name, "its record changed; ending what runs with the old one");
        instance.forget_troubles();
        let event = if is_same_owner {
            LifecycleEvent::RecordChangedBeside(terms)
        } else {
            LifecycleEvent::RecordChanged(terms)
        };
        dispatch(instances, instance, event);
    }
}

/// Takes changed settings over.
pub fn follow_options(instances: &Rc<NodeInstances>) {
    let options = instances.context.options();
    instances.wakes.borrow_mut().set_at_once(at_once(&options));
    instances.images.follow_options(&options);
    for instance in instances.table.listed() {
        if let Backend::App(app) = &instance.site().backend {
            dispatch(instances, &instance, LifecycleEvent::PolicyChanged(terms(instances, app)));
            follow_boosts(&instances.context, &instance);
        }
    }
}
