//! Images from node to node, as the edge asks for them: what there is, its bytes through a pipe, and another node's bytes
//! through another. Both pipes are made here; what the edge passes on is sealed for the other keeper. Who calls has verified the
//! supervisor's order (`Engine::verify_order`).
//!
//! Not here: the bytes (`image::archive`), their way between the nodes (`edge`), who decides that an image is to go (`nagaya`).

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;

use nagaya_cmdb::{Backend, SiteName};
use rustix::pipe::PipeFlags;
use tokio::sync::{oneshot, watch};
use tokio::task::spawn_local;

use super::housing::Housing;
use super::lifecycle::Event;
use super::{Instances, start};
use crate::engine::{Engine, wrong_kind};
use crate::fault::{self, Fault};
use crate::image::{self, Found, Image, ImageError, Images, Offer, TransferOrder};
use crate::protocol::Failure;

/// Images that go or come at once. Each is a thread and a pipe; more would only share what the node's bandwidth allows.
const TRANSFERS_MAX: usize = 8;

/// How one that comes has ended. None: it has not.
pub type Fetch = watch::Receiver<Option<Result<(), Fault>>>;

fn fault_of(error: &ImageError) -> Fault {
    let failure = match error {
        ImageError::Foreign { .. } => Failure::Invalid,
        ImageError::NoSpace { .. } => Failure::Busy,
        _ => Failure::Broken,
    };
    Fault::new(failure, error.code(), error.to_string())
}

fn pipe() -> Result<(OwnedFd, OwnedFd), Fault> {
    rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(|errno| {
        Fault::new(Failure::Busy, image::STORE, format!("cannot make a pipe for an image: {errno}"))
    })
}

fn packed(housing: &Housing) -> Result<Vec<u8>, Fault> {
    housing.packed().map_err(|error| {
        Fault::new(Failure::Broken, image::STORE, format!("cannot read what an image expects: {error}"))
    })
}

impl Instances {
    fn images(&self) -> Result<Arc<Images>, Fault> {
        self.images.borrow().clone().ok_or_else(|| {
            let why = self.no_images.borrow().clone();
            let why = why.unwrap_or_else(|| "nobody has looked for CRIU yet".into());
            Fault::new(Failure::Busy, image::NO_CRIU, format!("there are no images on this node: {why}"))
        })
    }

    pub(super) async fn housing(&self, engine: &Rc<Engine>, name: &SiteName) -> Result<Arc<Housing>, Fault> {
        let instance = self.of_site(engine, name)?;
        let site = instance.site();
        let Backend::App(app) = &site.backend else { return Err(wrong_kind(&site, "app")) };
        start::housing(engine, &instance, app, std::path::Path::new("/")).await
    }

    /// The image a wake would use, and what it expects beside it.
    async fn image_of(
        &self,
        engine: &Rc<Engine>,
        name: &SiteName,
    ) -> Result<Option<(Arc<Images>, Image, Vec<u8>)>, Fault> {
        let (images, housing) = (self.images()?, self.housing(engine, name).await?);
        let tenant = housing.tenant.name.clone();
        let look = move || {
            let subject = housing.present_subject()?;
            match images.find(&subject) {
                // One that no wake would use is of no use elsewhere.
                Found::Image(image) if images.find_change(&image, &housing.owner()).is_some() => Ok(None),
                Found::Image(image) => {
                    let beside = packed(&housing)?;
                    Ok(Some((images, *image, beside)))
                }
                Found::Nothing | Found::Unfit(_) => Ok(None),
            }
        };
        engine.on_worker_for(&tenant, look).await
    }

    /// What another node is to be told of the image a site has here. None: it has none.
    pub async fn offer_image(&self, engine: &Rc<Engine>, name: &SiteName) -> Result<Option<Offer>, Fault> {
        let Some((images, image, beside)) = self.image_of(engine, name).await? else { return Ok(None) };
        engine
            .on_worker(move || images.offer(&image, beside).map(Some).map_err(|error| fault_of(&error)))
            .await
    }

    /// A pipe from which the archive of the image that was offered with this digest is read, sealed, from this byte on.
    pub async fn send_image(
        &self,
        engine: &Rc<Engine>,
        name: &SiteName,
        order: TransferOrder,
        (digest, offset): (&str, u64),
    ) -> Result<OwnedFd, Fault> {
        let digest = digest.parse().map_err(|why| Fault::new(Failure::Invalid, image::FOREIGN, why))?;
        let Some((images, image, beside)) = self.image_of(engine, name).await? else {
            let message = format!("there is no image of '{name}' here any more");
            return Err(Fault::new(Failure::NotFound, image::FOREIGN, message));
        };
        let offer = {
            let (images, image, beside) = (Arc::clone(&images), image.clone(), beside.clone());
            engine.on_worker(move || images.offer(&image, beside).map_err(|error| fault_of(&error))).await?
        };
        if offer.digest != digest {
            let message = format!("there is another image of '{name}' here now");
            return Err(Fault::new(Failure::NotFound, image::FOREIGN, message));
        }
        let (read, write) = pipe()?;
        let (per_second, site) = (engine.options().instances.image_bandwidth, name.clone());
        let send = move || {
            let sent = images.send((&image, beside), (digest, offset), (&order, &write), per_second);
            if let Err(error) = sent {
                tracing::warn!(site = %site, "{}: its image does not go to another node: {error}", error.code());
            }
        };
        // Its end is for nobody: whoever reads has all bytes, or goes on later.
        drop(self.transfer(engine, send)?);
        Ok(read)
    }

    /// A pipe to which the sealed archive of this image of another node is to be written, from which byte on, and how many bytes
    /// that are. What does not fit this node is refused before the first.
    pub async fn fetch_image(
        &self,
        engine: &Rc<Engine>,
        name: &SiteName,
        order: TransferOrder,
        offer: &str,
    ) -> Result<(u64, u64, OwnedFd), Fault> {
        let invalid = |why: String| Fault::new(Failure::Invalid, image::FOREIGN, why);
        let offer: Offer = serde_json::from_str(offer)
            .map_err(|error| invalid(format!("what another node offers cannot be read: {error}")))?;
        let (images, housing) = (self.images()?, self.housing(engine, name).await?);
        let instance = self.of_site(engine, name)?;
        if instance.life.borrow().tier().has_process() || instance.life.borrow().doing().is_some() {
            return Err(invalid(format!(
                "the application of '{name}' runs here: it needs no image of another node"
            )));
        }
        let under_way = |fetch: &Fetch| fetch.borrow().is_none();
        if self.fetches.borrow().get(name).is_some_and(under_way) {
            let message = format!("an image of '{name}' is on its way here already");
            return Err(Fault::new(Failure::Busy, fault::LIMIT, message));
        }
        let (ended, fetch) = watch::channel(None);
        self.fetches.borrow_mut().insert(name.clone(), fetch);
        let (images_now, housing_now, offered) = (Arc::clone(&images), Arc::clone(&housing), offer.clone());
        let agree = move || {
            let subject = housing_now.present_subject()?;
            let agreed = images_now.fits(&offered, &subject).and_then(|()| images_now.resume(&offered));
            agreed.map_err(|error| fault_of(&error))
        };
        let (offset, bytes) = match engine.on_worker(agree).await {
            Ok(agreed) => agreed,
            Err(fault) => {
                self.fetches.borrow_mut().remove(name);
                return Err(fault);
            }
        };
        let (read, write) = pipe()?;
        let per_second = engine.options().instances.image_bandwidth;
        let receive = move || {
            let received =
                images.receive(&offer, (&order, &read), per_second, |beside| housing.put_packed(beside));
            received.map(drop).map_err(|error| fault_of(&error))
        };
        let done = self.transfer(engine, receive)?;
        let (engine, name) = (Rc::clone(engine), name.clone());
        spawn_local(async move {
            let lost =
                || Err(Fault::new(Failure::Broken, image::STORE, "an image was lost inside the keeper"));
            let end = done.await.unwrap_or_else(|_| lost());
            match &end {
                Ok(()) => {
                    tracing::info!(site = %name, "an image of it came from another node");
                    engine.instances.tell(&engine, &instance, Event::Found);
                    engine.instances.collect(&engine);
                }
                Err(fault) => tracing::warn!(site = %name, "no image of it comes from another node: {fault}"),
            }
            ended.send_replace(Some(end));
        });
        Ok((offset, bytes, write))
    }

    /// Returns once the image that is on its way here is there.
    pub async fn image_fetched(&self, name: &SiteName) -> Result<(), Fault> {
        let fetch = self.fetches.borrow().get(name).cloned();
        let none = || {
            Fault::new(Failure::NotFound, image::FOREIGN, format!("no image of '{name}' is on its way here"))
        };
        let mut fetch = fetch.ok_or_else(none)?;
        let end = fetch.wait_for(Option::is_some).await.ok().and_then(|end| end.clone());
        let end = end.ok_or_else(none)?;
        // Told once; whoever wants it again offers it again.
        self.fetches.borrow_mut().retain(|of, fetch| of != name || fetch.borrow().is_none());
        end
    }

    /// Runs on a thread of its own, because it lasts as long as the network takes.
    fn transfer<T: Send + 'static>(
        &self,
        engine: &Rc<Engine>,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, Fault> {
        if engine.instances.transfers.get() >= TRANSFERS_MAX {
            let message = format!("{TRANSFERS_MAX} images are on their way from or to this node already");
            return Err(Fault::new(Failure::Busy, fault::LIMIT, message));
        }
        let ((done, answer), (over, is_over)) = (oneshot::channel(), oneshot::channel());
        let run = move || {
            // Who waits for it may have left.
            let _ = done.send(job());
            drop::<oneshot::Sender<()>>(over);
        };
        thread::Builder::new().name("keeper-image".into()).spawn(run).map_err(|error: io::Error| {
            Fault::new(Failure::Busy, fault::LIMIT, format!("no thread for an image: {error}"))
        })?;
        self.transfers.set(self.transfers.get() + 1);
        let engine = Rc::clone(engine);
        spawn_local(async move {
            // Its sender is dropped at the end, also by a panic.
            let _ = is_over.await;
            engine.instances.transfers.set(engine.instances.transfers.get() - 1);
        });
        Ok(answer)
    }
}
