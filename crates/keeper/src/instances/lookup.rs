//! The instance of a site, which may never have run.
//!
//! Not here: which there are (`table`), using one (`use_instance`).

use std::rc::Rc;
use std::time::Instant;

use nagaya_records::record::App;
use nagaya_records::{Backend, Site, SiteName};

use crate::context::wrong_kind;
use crate::fault::Fault;
use crate::instances::decide::lifecycle::Lifecycle;
use crate::instances::decide::policy::IdlePolicy;
use crate::instances::placed;
use crate::instances::state::instance::SiteInstance;
use crate::instances::state::shared::NodeInstances;
use crate::log::{LogOwner, SiteLog};

/// Returns the site's instance, made if there is none yet.
pub fn instance_of(instances: &NodeInstances, name: &SiteName) -> Result<Rc<SiteInstance>, Fault> {
    if let Some(instance) = instances.table.of_site(name) {
        return Ok(instance);
    }
    let (site, tenant) = instances.context.site(name)?;
    let Backend::App(app) = &site.backend else { return Err(wrong_kind(&site, "app")) };
    let now = Instant::now();
    let mut life = Lifecycle::new(now, terms(instances, app));
    // An instance without processes has nothing to do for that.
    for event in placed::events_at_birth(instances, name) {
        life.apply(now, event);
    }
    let journal = journal_of(instances, &site);
    let instance = Rc::new(SiteInstance::new(instances.table.take_key(), (site, tenant), journal, life));
    instances.table.insert(name.clone(), &instance);
    Ok(instance)
}

/// The log of a site's application.
pub fn journal_of(instances: &NodeInstances, site: &Site) -> Rc<SiteLog> {
    let owner = LogOwner { tenant: site.tenant.clone(), site: site.name.clone() };
    SiteLog::new(owner, &instances.context.logs, &instances.context.workers)
}

/// When an application rests, by its record and the node's settings.
pub fn terms(instances: &NodeInstances, app: &App) -> IdlePolicy {
    let context = &instances.context;
    let node = &context.options().instances;
    let images = instances.images.are_usable() && node.image_bytes_max > 0;
    let beside = context.is_root() && context.authority.node().is_none();
    IdlePolicy { beside, ..IdlePolicy::new(app, &node.idle, images) }
}
