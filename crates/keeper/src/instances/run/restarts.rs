//! Restarts an application because its tenant has deployed. The tenant touches `tmp/restart.txt` in
//! its directory, as for Passenger. Or it replaces the application's directory or its document root
//! by another directory (a link to a release that was switched).
//!
//! Both are checked once a second while the application runs, and when its document root changes.
//! They are also checked before an application at rest is needed again. An image depends on the
//! file, too. Not here: the restart itself (`lifecycle`), an operator's command (`acts`).

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_records::instance::Tier;
use nagaya_records::{SiteName, TenantName};
use tokio::task::spawn_local;
use tokio::time::sleep;

use crate::instances::decide::lifecycle::LifecycleEvent;
use crate::instances::run::driver::dispatch;
use crate::instances::run::restart_file::RestartFile;
use crate::instances::state::instance::SiteInstance;
use crate::instances::state::shared::NodeInstances;

/// How often the files are looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Restarts applications whose file is touched while they run. Never returns. Each tenant's
/// files are checked separately, because its file system may hang. The next check of a tenant
/// waits for the end of the last.
pub async fn watch_restarts(instances: &Rc<NodeInstances>) {
    loop {
        sleep(LOOK_INTERVAL).await;
        let mut running: HashMap<TenantName, Vec<Rc<SiteInstance>>> = HashMap::new();
        for instance in instances.table.filtered(|_, instance| is_watched(instance)) {
            let tenant = instance.site().tenant.clone();
            if !instances.restarts.is_under_way(&tenant) {
                running.entry(tenant).or_default().push(instance);
            }
        }
        for (tenant, of_tenant) in running {
            begin_look(instances, tenant, of_tenant);
        }
    }
}

/// Checks whether this site's application needs a restart, if it runs.
pub fn look_at_site(instances: &Rc<NodeInstances>, site: &SiteName) {
    let Some(instance) = instances.table.of_site(site) else { return };
    let tenant = instance.site().tenant.clone();
    // The next check is within a second.
    if is_watched(&instance) && !instances.restarts.is_under_way(&tenant) {
        begin_look(instances, tenant, vec![instance]);
    }
}

fn begin_look(instances: &Rc<NodeInstances>, tenant: TenantName, of_tenant: Vec<Rc<SiteInstance>>) {
    instances.restarts.begin(tenant.clone());
    let instances = Rc::clone(instances);
    spawn_local(async move {
        look_for_restarts(&instances, &tenant, of_tenant).await;
        instances.restarts.end(&tenant);
    });
}

/// Restarts this one if its file was touched while it rested.
pub async fn restart_if_touched(instances: &Rc<NodeInstances>, instance: &Rc<SiteInstance>) {
    if instance.processes().is_some() && !instance.is_awake() {
        let tenant = instance.site().tenant.clone();
        look_for_restarts(instances, &tenant, vec![Rc::clone(instance)]).await;
    }
}

async fn look_for_restarts(
    instances: &Rc<NodeInstances>,
    tenant: &TenantName,
    of_tenant: Vec<Rc<SiteInstance>>,
) {
    let file = |instance: &Rc<SiteInstance>| {
        let processes = instance.processes()?;
        Some((Rc::clone(instance), instance.life.borrow().run(), processes.restart_file.clone()?))
    };
    let found: Vec<_> = of_tenant.iter().filter_map(file).collect();
    if found.is_empty() {
        return;
    }
    let files: Vec<Arc<RestartFile>> = found.iter().map(|(_, _, file)| Arc::clone(file)).collect();
    let look = move || Ok(files.iter().map(|file| file.find_cause()).collect::<Vec<_>>());
    // If no worker is free, the next check does it.
    let Ok(causes) = instances.context.on_worker_for(tenant, look).await else { return };
    for ((instance, run, _), cause) in found.into_iter().zip(causes) {
        if let Some(cause) = cause
            && instance.life.borrow().run() == run
        {
            tracing::info!(site = %instance.site().name, "{cause}: it is restarted");
            dispatch(instances, &instance, LifecycleEvent::Restart);
        }
    }
}

/// Whether its file is checked while it runs. An application at rest is checked when it is
/// needed.
fn is_watched(instance: &SiteInstance) -> bool {
    let life = instance.life.borrow();
    life.tier() >= Tier::Quiet && life.doing().is_none()
}
