//! The keys that sign the tickets of all nodes: that there are some, and new ones in time. Every node looks, and the store takes
//! one's.
//!
//! Not here: when it is time (`nagaya_cmdb`), how an edge uses them (`nagaya_edge`); it gets them with all other records.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::TicketKeys;
use nagaya_cmdb::record::{TicketKey, TicketSecret};
use nagaya_cmdb::store::{Store, StoreError};

use super::membership::{Membership, unix_ms};

/// How often it is looked, and how soon again where there are none yet or the store was out of reach.
const LOOK_EVERY: Duration = Duration::from_secs(600);
const AGAIN_AFTER: Duration = Duration::from_secs(2);

/// The store says by itself that it is out of reach.
const IN_STEP_WAIT: Duration = Duration::from_secs(10);

impl Membership {
    pub(super) async fn keep_ticket_keys(self: Rc<Self>) {
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

    /// False: it is to be looked again soon.
    async fn look_after_ticket_keys(&self) -> Result<bool, StoreError> {
        if self.store.in_step(IN_STEP_WAIT).await.is_err() {
            return Ok(false);
        }
        let known = self.store.ticket_keys()?;
        let Some(next) = TicketKeys::next(known.as_ref(), unix_ms(), fresh()) else { return Ok(true) };
        let (store, signs) = (Arc::clone(&self.store), next.signs);
        let put = tokio::task::spawn_blocking(move || store.put_ticket_keys(next, known.as_ref()));
        // Of two nodes that wrote at once one has; the other looks at what stands there.
        let Ok(put) = put.await else { return Ok(false) };
        if put?.is_none() {
            return Ok(false);
        }
        tracing::info!(signs, "the keys of tickets have changed");
        Ok(true)
    }
}

fn fresh() -> TicketKey {
    let (mut id, mut secret) = ([0; 4], [0; 32]);
    for random in [&mut id[..], &mut secret[..]] {
        getrandom::fill(random).expect("the kernel gives random bytes once it has booted");
    }
    TicketKey { id: u32::from_be_bytes(id), secret: TicketSecret(secret), made_ms: unix_ms(), ended_ms: None }
}
