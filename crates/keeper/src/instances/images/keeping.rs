//! Opens the node's images at the start, and looks from time to time for those that nobody wants.
//!
//! Not here: removing them (`collection`), when an image is taken or used (`decide::lifecycle`).

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use crate::instances::images::collection::{collect, collect_bases, collect_logs};
use crate::instances::records::follow_options;
use crate::instances::run::driver::wake_next;
use crate::instances::state::shared::NodeInstances;

/// Maximum time that wakes wait until it is known whether images can be used. That takes a run of
/// CRIU to read its version, some 50 ms.
const OPEN_MAX: Duration = Duration::from_secs(10);

/// Time between two searches for unwanted images.
const COLLECT_INTERVAL: Duration = Duration::from_secs(3600);

/// Holds all wakes until the images are known, or that takes too long. Instances with an image
/// are then restored from it, and those without one have one taken at their start. Must be
/// called before there are records, by a caller that also runs `keep_images`.
pub fn await_images(instances: &NodeInstances) {
    instances.wakes.borrow_mut().hold(true);
}

/// Opens the images, if they can be used here, and removes unwanted ones from time to time.
/// Never returns.
pub async fn keep_images(instances: &Rc<NodeInstances>) {
    {
        let mut opening = pin!(instances.images.open(&instances.context));
        let is_known = timeout(OPEN_MAX, &mut opening).await.is_ok();
        let_wake(instances);
        if !is_known {
            tracing::warn!(
                "the images were not checked within {OPEN_MAX:?}; until then, applications start without images"
            );
            opening.await;
            follow_options(instances);
        }
    }
    loop {
        collect(&instances.context, &instances.images);
        collect_bases(&instances.context);
        collect_logs(&instances.context);
        sleep(COLLECT_INTERVAL).await;
    }
}

/// Notifies instances in the queue of the new state first.
fn let_wake(instances: &Rc<NodeInstances>) {
    follow_options(instances);
    instances.wakes.borrow_mut().hold(false);
    wake_next(instances);
}
