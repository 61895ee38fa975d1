//! Removes what nobody wants any more: images, bases, logs and files of sites that are gone.
//!
//! Not here: when that is looked for (`keeping`), the images (`image`), lines of logs (`log`).

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_records::{Backend, RecordIndex};
use tokio::task::spawn_local;

use crate::bases::BASE;
use crate::context::KeeperContext;
use crate::image::ImageSubject;
use crate::instances::run::sandbox_spec::ScratchDirs;
use crate::instances::state::instance::SiteInstance;
use crate::instances::state::node_images::ImageAccess;
use crate::instances::state::shared::NodeInstances;
use crate::log::LogOwner;

/// Maximum time to write lines of logs, where a caller waits for that.
const LOGS_SETTLE_MAX: Duration = Duration::from_secs(1);

/// Removes images of sites that are gone or of another release now, and those beyond the
/// limits.
pub fn collect(context: &Rc<KeeperContext>, images: &ImageAccess) {
    let Some(images) = images.get() else { return };
    let table = Arc::clone(context.table());
    let context = Rc::clone(context);
    spawn_local(async move {
        let collect = move || {
            images.collect(|subject| is_wanted(&table.read(), subject));
            Ok(())
        };
        // On failure the next round does it.
        let _ = context.on_worker(collect).await;
    });
}

/// Removes bases that nobody uses any more.
pub fn collect_bases(context: &Rc<KeeperContext>) {
    let (bases, context) = (Arc::clone(&context.bases), Rc::clone(context));
    spawn_local(async move {
        if let Ok(Err(error)) = context.on_worker(move || Ok(bases.collect())).await {
            tracing::warn!(%error, "{BASE}: not all bases that are not used any more can be removed");
        }
    });
}

/// Removes logs of sites that are gone, are another tenant's, or are no applications any more.
pub fn collect_logs(context: &Rc<KeeperContext>) {
    let (logs, table) = (context.logs.clone(), Arc::clone(context.table()));
    let context = Rc::clone(context);
    spawn_local(async move {
        let collect = move || {
            // The last lines of the sites that are gone must be written before.
            logs.settle(LOGS_SETTLE_MAX);
            Ok(logs.collect(|owner| is_of_application(&table.read(), owner)))
        };
        // If no worker is free, the next round does it.
        if let Ok(Err(error)) = context.on_worker(collect).await {
            tracing::warn!(%error, "not all logs of removed sites can be removed");
        }
    });
}

/// Waits until all lines are written, before the keeper ends.
pub fn settle_logs(context: &KeeperContext) {
    context.logs.settle(LOGS_SETTLE_MAX);
}

/// The operator wants another try, whatever failed before.
pub async fn forget_refusal(instances: &NodeInstances, instance: &SiteInstance) {
    let refused = instance.image.borrow_mut().refused.take();
    let (Some(images), Some(subject)) = (instances.images.get(), refused) else { return };
    let forget = move || {
        images.forget_refusal(&subject);
        Ok(())
    };
    // If no worker is free, the refusal is found again and reported.
    let _ = instances.context.on_worker(forget).await;
}

/// Removes the files of a site, once it is gone and nothing of it runs.
pub fn clear_away(instances: &Rc<NodeInstances>, instance: &SiteInstance) {
    let site = instance.site();
    // A new site of the same name may exist, and use them.
    let is_there =
        instances.context.site(&site.name).is_ok_and(|(now, _)| matches!(now.backend, Backend::App(_)));
    if is_there {
        return;
    }
    let scratch = ScratchDirs::of(&site, &instances.context.options());
    let instances = Rc::clone(instances);
    spawn_local(async move {
        let removed = instances.context.on_worker(move || Ok(scratch.remove())).await;
        if let Ok(Err(error)) = removed {
            tracing::warn!(site = %site.name, %error, "its files in the state directory cannot be removed");
        }
        collect(&instances.context, &instances.images);
        collect_logs(&instances.context);
    });
}

fn is_of_application(table: &RecordIndex, owner: &LogOwner) -> bool {
    let site = table.site(owner.site.as_str());
    site.is_some_and(|site| site.tenant == owner.tenant && matches!(site.backend, Backend::App(_)))
}

fn is_wanted(table: &RecordIndex, subject: &ImageSubject) -> bool {
    let Some(site) = table.site(&subject.site) else { return false };
    let Backend::App(app) = &site.backend else { return false };
    app.release.as_deref().unwrap_or_default() == subject.release
}
