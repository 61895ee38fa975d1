//! Maintains the keys that sign the tickets of all nodes: their existence, and timely new ones.
//! Every node checks, and the store accepts the keys of one.
//!
//! Not here: when it is time (`nagaya_records`), their use by an edge (`nagaya_edge`), which gets
//! them with all other records.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_records::TicketKeys;
use nagaya_records::record::{TicketKey, TicketSecret};
use nagaya_store::{Store, StoreError};

use super::clock::unix_ms;
use super::view::ClusterView;

/// Interval of checks, and the shorter one if there are none yet or the store was unreachable.
const LOOK_EVERY: Duration = Duration::from_secs(600);
const AGAIN_AFTER: Duration = Duration::from_secs(2);

/// The store itself reports that it is unreachable.
const IN_STEP_WAIT: Duration = Duration::from_secs(10);

pub struct TicketKeyMaker {
    pub view: Rc<ClusterView>,
}

impl TicketKeyMaker {
    pub async fn run(self) {
        let mut has_failed = false;
        loop {
            let looked = self.look_after_ticket_keys().await;
            if let Err(error) = &looked
                && !has_failed
            {
                tracing::warn!(code = %error.code(), "tickets of one node are not known to the others yet: {error}");
            }
            has_failed = looked.is_err();
            tokio::time::sleep(if looked.unwrap_or(false) { LOOK_EVERY } else { AGAIN_AFTER }).await;
        }
    }

    /// Returns false if the next check must come soon.
    async fn look_after_ticket_keys(&self) -> Result<bool, StoreError> {
        if self.view.store.in_step(IN_STEP_WAIT).await.is_err() {
            return Ok(false);
        }
        let known = self.view.store.ticket_keys()?;
        let Some(next) = TicketKeys::next(known.as_ref(), unix_ms(), fresh()) else { return Ok(true) };
        let store = Arc::clone(&self.view.store);
        let signs = next.signs;
        let put = tokio::task::spawn_blocking(move || store.put_ticket_keys(next, known.as_ref()));
        // If two nodes wrote at once, one succeeded; the other reads its result.
        let Ok(put) = put.await else { return Ok(false) };
        if put?.is_none() {
            return Ok(false);
        }
        tracing::info!(signs, "the keys of tickets have changed");
        Ok(true)
    }
}

fn fresh() -> TicketKey {
    let mut id = [0; 4];
    let mut secret = [0; 32];
    for random in [&mut id[..], &mut secret[..]] {
        getrandom::fill(random).expect("the kernel gives random bytes once it has booted");
    }
    TicketKey { id: u32::from_be_bytes(id), secret: TicketSecret(secret), made_ms: unix_ms(), ended_ms: None }
}
