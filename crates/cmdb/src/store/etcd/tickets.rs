//! The keys that sign tickets: one record, written by compare-and-set of its value, and replicated like all others, because a node
//! must know them also while etcd is down.
//!
//! Not here: what they are to be (`record::tickets`), who decides that it is time (`nagaya`'s supervisor).

use std::sync::Arc;
use std::time::Duration;

use super::client::TXN;
use super::error::ClusterError;
use super::keys::{self, TICKET_KEYS};
use super::wire::{Txn, TxnAnswer};
use super::{Inner, StoreError, VISIBLE_WAIT};
use crate::record::{Change, TicketKeys};
use crate::store::{Committed, Kind, Store};

const WAIT: Duration = Duration::from_secs(5);

pub(super) async fn put(
    inner: Arc<Inner>,
    new: TicketKeys,
    seen: Option<TicketKeys>,
) -> Result<Option<Committed>, StoreError> {
    let key = inner.keys.record(Kind::TicketKeys, TICKET_KEYS);
    let value = keys::json(&new);
    let stands = match &seen {
        Some(seen) => keys::is_value(&key, keys::json(seen)),
        None => keys::is_absent(&key),
    };
    let txn = Txn {
        compare: vec![keys::is_there(&inner.keys.revision()), keys::is_absent(&inner.keys.seeding()), stands],
        success: vec![keys::putting(&key, value.clone())],
        failure: vec![keys::getting(&key)],
    };
    let answer = inner.client.ask::<_, TxnAnswer>(TXN, txn, WAIT).await.map_err(ClusterError::from)?;
    let revision = keys::unsigned(answer.value.header.unwrap_or_default().revision);
    let found = super::watch::values(answer.value.responses).into_iter().next().flatten();
    // An earlier attempt whose answer was lost may have done it.
    if !(answer.value.succeeded || (answer.repeated && found == Some(value))) {
        return Ok(None);
    }
    let _late = inner.wait_applied(revision, VISIBLE_WAIT).await;
    let changes = if seen.as_ref() == Some(&new) { Vec::new() } else { vec![Change::PutTicketKeys(new)] };
    Ok(Some(Committed { revision: inner.replica.revision()?, changes }))
}
