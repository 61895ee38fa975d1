//! The images of this node, once it is known whether there can be any.
//!
//! Not here: the images themselves (`image`), removing those that nobody wants (`collection`).

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use nagaya_keeper_api::protocol::FailureKind;
use serde_json::{Value, json};

use crate::context::KeeperContext;
use crate::fault::Fault;
use crate::image::{self, Image, ImageLimits, NodeImages};
use crate::options::KeeperConfig;

/// Maximum number of images: one for each of the most sites there may be on a node.
const IMAGES_MAX: usize = 100_000;

#[derive(Default)]
pub struct ImageAccess {
    /// `None` if no image can be taken or restored here, or not yet.
    images: RefCell<Option<Arc<NodeImages>>>,
    /// Why `images` is `None`.
    why_none: RefCell<Option<String>>,
}

impl ImageAccess {
    /// Opens the images, if they can be used here.
    pub async fn open(&self, context: &KeeperContext) {
        let Ok(launcher) = context.launcher() else { return };
        let options = (*context.options()).clone();
        let opened = context.on_worker(move || {
            let own = &options.instances;
            NodeImages::open(&own.images, own.criu.as_deref(), &launcher, limits(&options))
                .map_err(|error| Fault::new(FailureKind::Broken, error.code(), error.to_string()))
        });
        match opened.await {
            Ok(images) => {
                tracing::info!(criu = %images.criu().path.display(), version = images.criu().version, "images can be used");
                self.images.replace(Some(Arc::new(images)));
            }
            Err(fault) => {
                tracing::warn!("{fault}; applications that rest for long start without images");
                self.why_none.replace(Some(fault.to_string()));
            }
        }
    }

    pub fn get(&self) -> Option<Arc<NodeImages>> {
        self.images.borrow().clone()
    }

    /// The same, or why there are none.
    pub fn require(&self) -> Result<Arc<NodeImages>, Fault> {
        self.get().ok_or_else(|| {
            let why = self.why_none.borrow().clone();
            let why = why.unwrap_or_else(|| "CRIU was not looked for yet".into());
            Fault::new(FailureKind::Busy, image::NO_CRIU, format!("there are no images on this node: {why}"))
        })
    }

    pub fn are_usable(&self) -> bool {
        self.images.borrow().is_some()
    }

    /// Takes changed settings over.
    pub fn follow_options(&self, options: &KeeperConfig) {
        if let Some(images) = &*self.images.borrow() {
            images.set_limits(limits(options));
        }
    }

    /// Returns the number of images that were put aside before a try, since the last call.
    pub fn take_found_wrong(&self) -> u64 {
        self.images.borrow().as_ref().map_or(0, |images| images.take_found_wrong())
    }

    /// Whether this image was taken so long ago that another one is wanted.
    pub fn is_old(&self, image: &Image) -> bool {
        self.images.borrow().as_ref().is_some_and(|images| images.is_old(image))
    }

    /// Says why no image can be taken here, for `nagaya status`. Null if one can.
    pub fn status(&self) -> Value {
        match (&*self.images.borrow(), &*self.why_none.borrow()) {
            (Some(images), _) => json!({"criu": images.criu().version}),
            (None, Some(why)) => json!({"none": why}),
            (None, None) => Value::Null,
        }
    }
}

fn limits(options: &KeeperConfig) -> ImageLimits {
    let options = &options.instances;
    ImageLimits {
        bytes_max: options.image_bytes_max,
        images_max: IMAGES_MAX,
        age_max: Duration::from_millis(options.image_age_max_ms),
    }
}
