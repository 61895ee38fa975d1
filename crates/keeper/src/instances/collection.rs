//! The node's images as instances use them: opened at the start, kept within their limits, gone with their sites, as logs are.
//!
//! Not here: the images (`image`), when one is taken or used (`lifecycle`), lines of logs (`log`).

use std::path::PathBuf;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::{Backend, Table};
use serde_json::{Value, json};
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

use super::surroundings::Scratch;
use super::{Instance, Instances};
use crate::bases::BASE;
use crate::engine::Engine;
use crate::fault::Fault;
use crate::image::{Images, Limits, Subject};
use crate::log::{Bounds, Owner};
use crate::options::Options;
use crate::protocol::Failure;

/// Images at most: one for each of the most sites there may be on a node.
const IMAGES_MAX: usize = 100_000;

/// How long those who wake wait for it to be known whether images can be used. It takes a run of CRIU that says its version, some 50 ms.
const OPEN_MAX: Duration = Duration::from_secs(10);

/// How long lines of logs may take until they are written, where that is waited for.
const LOGS_SETTLE_MAX: Duration = Duration::from_secs(1);

/// Time between two looks for images nobody wants any more.
const COLLECT_INTERVAL: Duration = Duration::from_secs(3600);

pub fn limits(options: &Options) -> Limits {
    let options = &options.instances;
    Limits {
        bytes_max: options.image_bytes_max,
        images_max: IMAGES_MAX,
        age_max: Duration::from_millis(options.image_age_max_ms),
    }
}

impl Instances {
    /// Nobody wakes until it is known what images there are, or that takes too long: who has one comes back from it, and
    /// who has none and starts has one taken. To be called before there are records, by who has `keep_images` run, too.
    pub fn await_images(&self) {
        self.wakes.borrow_mut().hold(true);
    }

    /// Opens the images, if they can be used here, and removes those nobody wants from time to time, for ever.
    pub async fn keep_images(&self, engine: &Rc<Engine>) {
        {
            let mut opening = pin!(self.open_images(engine));
            let is_known = timeout(OPEN_MAX, &mut opening).await.is_ok();
            self.let_wake(engine);
            if !is_known {
                tracing::warn!(
                    "whether images can be used is not known after {OPEN_MAX:?}; until it is, applications start anew"
                );
                opening.await;
                self.options_changed(engine);
            }
        }
        loop {
            self.collect(engine);
            self.collect_bases(engine);
            self.collect_logs(engine);
            sleep(COLLECT_INTERVAL).await;
        }
    }

    async fn open_images(&self, engine: &Engine) {
        let Ok(launcher) = engine.launcher() else { return };
        let options = (*engine.options()).clone();
        let opened = engine.on_worker(move || {
            let own = &options.instances;
            Images::open(&own.images, own.criu.as_deref(), &launcher, limits(&options))
                .map_err(|error| Fault::new(Failure::Broken, error.code(), error.to_string()))
        });
        match opened.await {
            Ok(images) => {
                tracing::info!(criu = %images.criu().path.display(), version = images.criu().version, "images can be used");
                self.images.replace(Some(Arc::new(images)));
            }
            Err(fault) => {
                tracing::warn!("{fault}; applications that rest for long start anew");
                self.no_images.replace(Some(fault.to_string()));
            }
        }
    }

    /// Images that were put aside before anything was tried with them, since this was last asked.
    pub fn take_found_wrong(&self) -> u64 {
        self.images.borrow().as_ref().map_or(0, |images| images.take_found_wrong())
    }

    /// Those that wait for their turn learn first what has become known.
    fn let_wake(&self, engine: &Rc<Engine>) {
        self.options_changed(engine);
        self.wakes.borrow_mut().hold(false);
        self.wake_next(engine);
    }

    /// Removes images of sites that are gone or of another release now, and those beyond the limits.
    pub fn collect(&self, engine: &Rc<Engine>) {
        let Some(images) = self.images.borrow().clone() else { return };
        let table = Arc::clone(engine.table());
        let engine = Rc::clone(engine);
        spawn_local(async move {
            let collect = move || {
                images.collect(|subject| is_wanted(&table.read(), subject));
                Ok(())
            };
            // Otherwise the next look does it.
            let _ = engine.on_worker(collect).await;
        });
    }

    /// Removes bases that nobody uses any more.
    fn collect_bases(&self, engine: &Rc<Engine>) {
        let (bases, engine) = (Arc::clone(&self.bases), Rc::clone(engine));
        spawn_local(async move {
            if let Ok(Err(error)) = engine.on_worker(move || Ok(bases.collect())).await {
                tracing::warn!(%error, "{BASE}: not all bases that are not used any more can be removed");
            }
        });
    }

    /// Removes logs of sites that are gone, are another tenant's, or are no applications any more.
    pub fn collect_logs(&self, engine: &Rc<Engine>) {
        let (logs, table, engine) = (self.logs.clone(), Arc::clone(engine.table()), Rc::clone(engine));
        spawn_local(async move {
            let collect = move || {
                // What those that are gone have said last is to be there already.
                logs.settle(LOGS_SETTLE_MAX);
                Ok(logs.collect(|owner| is_of_application(&table.read(), owner)))
            };
            // Should no worker be free, the next look does it.
            if let Ok(Err(error)) = engine.on_worker(collect).await {
                tracing::warn!(%error, "not all logs of removed sites can be removed");
            }
        });
    }

    /// Has all that was said written, before the keeper ends.
    pub fn settle_logs(&self) {
        self.logs.settle(LOGS_SETTLE_MAX);
    }

    pub fn can_use_images(&self) -> bool {
        self.images.borrow().is_some()
    }

    /// Why no image can be taken here, for `nagaya status`; null: one can.
    pub(super) fn images_status(&self) -> Value {
        match (&*self.images.borrow(), &*self.no_images.borrow()) {
            (Some(images), _) => json!({"criu": images.criu().version}),
            (None, Some(why)) => json!({"none": why}),
            (None, None) => Value::Null,
        }
    }

    /// Whether its image was taken so long ago that another one is wanted.
    pub(super) fn has_old_image(&self, instance: &Instance) -> bool {
        let (images, image) = (self.images.borrow(), instance.image.borrow());
        images.as_ref().zip(image.as_ref()).is_some_and(|(images, image)| images.is_old(image))
    }

    /// The operator wants it tried again, whatever it was that did not work.
    pub(super) async fn forget_refusal(&self, engine: &Rc<Engine>, instance: &Instance) {
        let (images, refused) = (self.images.borrow().clone(), instance.refused.take());
        let (Some(images), Some(subject)) = (images, refused) else { return };
        let forget = move || {
            images.forget_refusal(&subject);
            Ok(())
        };
        // Should no worker be free, the refusal is found again and said.
        let _ = engine.on_worker(forget).await;
    }

    /// Removes what a site leaves on disk, once it is gone and nothing of it runs.
    pub(super) fn clear_away(&self, engine: &Rc<Engine>, instance: &Rc<Instance>) {
        let site = instance.site();
        // One of the same name may be there again, and use them.
        let is_there = engine.site(&site.name).is_ok_and(|(now, _)| matches!(now.backend, Backend::App(_)));
        if is_there {
            return;
        }
        let scratch = Scratch::of(&site, &engine.options());
        let engine = Rc::clone(engine);
        spawn_local(async move {
            let removed = engine.on_worker(move || Ok(scratch.remove())).await;
            if let Ok(Err(error)) = removed {
                tracing::warn!(site = %site.name, %error, "its files in the state directory cannot be removed");
            }
            engine.instances.collect(&engine);
            engine.instances.collect_logs(&engine);
        });
    }
}

/// Where logs of instances are. Beside the images, and hidden from applications as these are.
pub fn logs_dir(options: &Options) -> PathBuf {
    options.instances.images.with_file_name("instance-logs")
}

pub fn log_bounds(options: &Options) -> Bounds {
    let options = &options.instances;
    Bounds { bytes_max: options.log_bytes_max, files_max: options.log_files_max }
}

fn is_of_application(table: &Table, owner: &Owner) -> bool {
    let site = table.site(owner.site.as_str());
    site.is_some_and(|site| site.tenant == owner.tenant && matches!(site.backend, Backend::App(_)))
}

fn is_wanted(table: &Table, subject: &Subject) -> bool {
    let Some(site) = table.site(&subject.site) else { return false };
    let Backend::App(app) = &site.backend else { return false };
    app.release.as_deref().unwrap_or_default() == subject.release
}
