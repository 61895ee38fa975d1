//! Images from node to node, as the edge requests them. These are the description of an image, its
//! bytes through a pipe, and another node's bytes through another pipe. Both pipes are made here.
//! The edge passes on bytes that are sealed for the other keeper. The caller has verified the
//! supervisor's order (`Verbs::verify_order`).
//!
//! Not here: the bytes (`image::archive`), their way between the nodes (`edge`), the decision about
//! a transfer (`nagaya`).

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;

use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::{Backend, SiteName};
use rustix::pipe::PipeFlags;
use tokio::sync::{oneshot, watch};
use tokio::task::spawn_local;

use crate::context::wrong_kind;
use crate::fault::{self, Fault};
use crate::image::{self, ArchiveOffer, Image, ImageError, ImageLookup, NodeImages, TransferOrder};
use crate::instances::decide::lifecycle::LifecycleEvent;
use crate::instances::images::collection::collect;
use crate::instances::lookup::instance_of;
use crate::instances::run::app_launch::AppLaunch;
use crate::instances::run::driver::dispatch;
use crate::instances::run::start;
use crate::instances::state::shared::NodeInstances;
use crate::instances::state::transfer_slots::FetchStatus;

/// Maximum number of images in transfer at once. Each is a thread and a pipe. More would only share
/// the node's bandwidth.
const TRANSFERS_MAX: usize = 8;

fn fault_of(error: &ImageError) -> Fault {
    let failure = match error {
        ImageError::Foreign { .. } => FailureKind::Invalid,
        ImageError::NoSpace { .. } => FailureKind::Busy,
        _ => FailureKind::Broken,
    };
    Fault::new(failure, error.code(), error.to_string())
}

fn pipe() -> Result<(OwnedFd, OwnedFd), Fault> {
    rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(|errno| {
        Fault::new(FailureKind::Busy, image::STORE, format!("cannot make a pipe for an image: {errno}"))
    })
}

fn packed(launch: &AppLaunch) -> Result<Vec<u8>, Fault> {
    launch.packed().map_err(|error| {
        Fault::new(FailureKind::Broken, image::STORE, format!("cannot read what an image expects: {error}"))
    })
}

pub async fn launch_of(instances: &NodeInstances, name: &SiteName) -> Result<Arc<AppLaunch>, Fault> {
    let instance = instance_of(instances, name)?;
    let site = instance.site();
    let Backend::App(app) = &site.backend else { return Err(wrong_kind(&site, "app")) };
    start::prepare_launch(&instances.context, &instance, app, std::path::Path::new("/")).await
}

/// Returns the image that a wake would use, and the files that it expects beside it.
async fn image_of(
    instances: &NodeInstances,
    name: &SiteName,
) -> Result<Option<(Arc<NodeImages>, Image, Vec<u8>)>, Fault> {
    let (images, launch) = (instances.images.require()?, launch_of(instances, name).await?);
    let tenant = launch.tenant.name.clone();
    let look = move || {
        let subject = launch.present_subject()?;
        match images.find(&subject) {
            // An image that no wake would use is useless elsewhere, too.
            ImageLookup::Image(image) if launch.find_change(&images, &image).is_some() => Ok(None),
            ImageLookup::Image(image) => {
                let beside = packed(&launch)?;
                Ok(Some((images, *image, beside)))
            }
            ImageLookup::Nothing | ImageLookup::ImageImpossible(_) => Ok(None),
        }
    };
    instances.context.on_worker_for(&tenant, look).await
}

/// Describes the site's image here for another node. `None` if it has none.
pub async fn offer_image(instances: &NodeInstances, name: &SiteName) -> Result<Option<ArchiveOffer>, Fault> {
    let Some((images, image, beside)) = image_of(instances, name).await? else { return Ok(None) };
    instances
        .context
        .on_worker(move || images.offer(&image, beside).map(Some).map_err(|error| fault_of(&error)))
        .await
}

/// Returns a pipe to read the sealed archive of the image with this digest, from byte `offset`
/// on.
pub async fn send_image(
    instances: &Rc<NodeInstances>,
    name: &SiteName,
    order: TransferOrder,
    (digest, offset): (&str, u64),
) -> Result<OwnedFd, Fault> {
    let digest = digest.parse().map_err(|why| Fault::new(FailureKind::Invalid, image::FOREIGN, why))?;
    let Some((images, image, beside)) = image_of(instances, name).await? else {
        let message = format!("there is no image of '{name}' here any more");
        return Err(Fault::new(FailureKind::NotFound, image::FOREIGN, message));
    };
    let offer = {
        let (images, image, beside) = (Arc::clone(&images), image.clone(), beside.clone());
        instances
            .context
            .on_worker(move || images.offer(&image, beside).map_err(|error| fault_of(&error)))
            .await?
    };
    if offer.digest != digest {
        let message = format!("there is another image of '{name}' here now");
        return Err(Fault::new(FailureKind::NotFound, image::FOREIGN, message));
    }
    let (read, write) = pipe()?;
    let (per_second, site) = (instances.context.options().instances.image_bandwidth, name.clone());
    let send = move || {
        let sent = images.send((&image, beside), (digest, offset), (&order, &write), per_second);
        if let Err(error) = sent {
            tracing::warn!(site = %site, "{}: its image does not go to another node: {error}", error.code());
        }
    };
    // Nobody needs its end: the reader has all bytes, or continues later.
    drop(transfer(instances, send)?);
    Ok(read)
}

/// Returns a pipe for the sealed archive of another node's image, its first byte, and the
/// number of bytes. An image that does not fit this node is refused before the first byte.
pub async fn fetch_image(
    instances: &Rc<NodeInstances>,
    name: &SiteName,
    order: TransferOrder,
    offer: &str,
) -> Result<(u64, u64, OwnedFd), Fault> {
    let invalid = |why: String| Fault::new(FailureKind::Invalid, image::FOREIGN, why);
    let offer: ArchiveOffer = serde_json::from_str(offer)
        .map_err(|error| invalid(format!("what another node offers cannot be read: {error}")))?;
    let (images, launch) = (instances.images.require()?, launch_of(instances, name).await?);
    let instance = instance_of(instances, name)?;
    if instance.life.borrow().tier().has_process() || instance.life.borrow().doing().is_some() {
        return Err(invalid(format!(
            "the application of '{name}' runs here: it needs no image of another node"
        )));
    }
    let under_way = |fetch: &FetchStatus| fetch.borrow().is_none();
    if instances.transfers.fetch_of(name).as_ref().is_some_and(under_way) {
        let message = format!("an image of '{name}' is on its way here already");
        return Err(Fault::new(FailureKind::Busy, fault::LIMIT, message));
    }
    let (ended, fetch) = watch::channel(None);
    instances.transfers.begin_fetch(name, fetch);
    let (images_now, launch_now, offered) = (Arc::clone(&images), Arc::clone(&launch), offer.clone());
    let agree = move || {
        let subject = launch_now.present_subject()?;
        let agreed = images_now.fits(&offered, &subject).and_then(|()| images_now.resume(&offered));
        agreed.map_err(|error| fault_of(&error))
    };
    let (offset, bytes) = match instances.context.on_worker(agree).await {
        Ok(agreed) => agreed,
        Err(fault) => {
            instances.transfers.drop_fetch(name);
            return Err(fault);
        }
    };
    let (read, write) = pipe()?;
    let per_second = instances.context.options().instances.image_bandwidth;
    let receive = move || {
        let received =
            images.receive(&offer, (&order, &read), per_second, |beside| launch.put_packed(beside));
        received.map(drop).map_err(|error| fault_of(&error))
    };
    let done = transfer(instances, receive)?;
    let (instances, name) = (Rc::clone(instances), name.clone());
    spawn_local(async move {
        let lost =
            || Err(Fault::new(FailureKind::Broken, image::STORE, "an image was lost inside the keeper"));
        let end = done.await.unwrap_or_else(|_| lost());
        match &end {
            Ok(()) => {
                tracing::info!(site = %name, "an image of it came from another node");
                dispatch(&instances, &instance, LifecycleEvent::ImageArrived);
                collect(&instances.context, &instances.images);
            }
            Err(fault) => tracing::warn!(site = %name, "no image of it comes from another node: {fault}"),
        }
        ended.send_replace(Some(end));
    });
    Ok((offset, bytes, write))
}

/// Returns once the image that is on its way here has arrived.
pub async fn image_fetched(instances: &NodeInstances, name: &SiteName) -> Result<(), Fault> {
    let fetch = instances.transfers.fetch_of(name);
    let none = || {
        Fault::new(FailureKind::NotFound, image::FOREIGN, format!("no image of '{name}' is on its way here"))
    };
    let mut fetch = fetch.ok_or_else(none)?;
    let end = fetch.wait_for(Option::is_some).await.ok().and_then(|end| end.clone());
    let end = end.ok_or_else(none)?;
    // Reported once. A caller that wants it again offers it again.
    instances.transfers.forget_ended(name);
    end
}

/// Runs on a thread of its own, because it takes as long as the network needs.
fn transfer<T: Send + 'static>(
    instances: &Rc<NodeInstances>,
    job: impl FnOnce() -> T + Send + 'static,
) -> Result<oneshot::Receiver<T>, Fault> {
    if instances.transfers.count() >= TRANSFERS_MAX {
        let message = format!("{TRANSFERS_MAX} images are on their way from or to this node already");
        return Err(Fault::new(FailureKind::Busy, fault::LIMIT, message));
    }
    let ((done, answer), (over, is_over)) = (oneshot::channel(), oneshot::channel());
    let run = move || {
        // The caller may have left.
        let _ = done.send(job());
        drop::<oneshot::Sender<()>>(over);
    };
    thread::Builder::new().name("keeper-image".into()).spawn(run).map_err(|error: io::Error| {
        Fault::new(FailureKind::Busy, fault::LIMIT, format!("no thread for an image: {error}"))
    })?;
    instances.transfers.add();
    let instances = Rc::clone(instances);
    spawn_local(async move {
        // Its sender is dropped at the end, also by a panic.
        let _ = is_over.await;
        instances.transfers.subtract();
    });
    Ok(answer)
}
