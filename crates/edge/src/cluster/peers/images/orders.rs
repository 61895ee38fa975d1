//! Passes orders for images from the thread that reads the feed to the thread that fetches them.
//! The supervisor wants these images here.

use nagaya_records::{NodeName, SiteName};
use parking_lot::Mutex;
use tokio::sync::mpsc;

/// Maximum number of waiting orders. The supervisor gives one at a time. More are there only
/// after its timeout.
pub const ORDERS_MAX: usize = 16;

/// An order to fetch an image.
#[derive(Debug)]
pub struct ImageOrder {
    /// Tag of the question it answers.
    pub tag: u64,
    pub site: SiteName,
    pub from: NodeName,
    /// Authorises both nodes' keepers.
    pub order: String,
}

/// Queue of orders from the thread that reads the feed to the one that carries them out.
#[derive(Debug)]
pub struct ImageOrders {
    put: mpsc::Sender<ImageOrder>,
    taken: Mutex<Option<mpsc::Receiver<ImageOrder>>>,
}

impl Default for ImageOrders {
    fn default() -> Self {
        let (put, taken) = mpsc::channel(ORDERS_MAX);
        Self { put, taken: Mutex::new(Some(taken)) }
    }
}

impl ImageOrders {
    /// The end that carries them out. `None` if it has been taken.
    pub fn take_orders(&self) -> Option<mpsc::Receiver<ImageOrder>> {
        self.taken.lock().take()
    }

    /// Adds an order. Returns false if too many wait already.
    pub fn put(&self, order: ImageOrder) -> bool {
        self.put.try_send(order).is_ok()
    }
}
