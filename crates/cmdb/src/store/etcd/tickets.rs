//! The keys that sign tickets: one record, written by compare-and-set, and replicated like all others, because a node
//! must know them also while etcd is down.
//!
//! Not here: what they are to be (`record::tickets`), who decides that it is time (`nagaya`'s supervisor).

use std::sync::Arc;
use std::time::Duration;

use super::client::RANGE;
use super::error::ClusterError;
use super::keys::{self, TICKET_KEYS};
use super::wire::{RangeAnswer, Txn};
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
    let looked = inner.client.ask::<_, RangeAnswer>(RANGE, keys::get(&key), WAIT).await;
    let found = looked.map_err(ClusterError::from)?.value.kvs.into_iter().next();
    // What does not count is written over.
    let stands_at = found.as_ref().map_or(0, |kv| keys::unsigned(kv.mod_revision));
    let stands = found.and_then(|kv| inner.opened(kv).ok());
    if stands.as_ref().map(|kv| &*kv.value) != seen.as_ref().map(keys::json).as_deref() {
        return Ok(None);
    }
    let txn = Txn {
        compare: vec![
            keys::is_there(&inner.keys.revision()),
            keys::is_absent(&inner.keys.seeding()),
            keys::is_of(&key, stands_at),
        ],
        success: vec![keys::putting(&key, value.clone())],
        failure: vec![keys::getting(&key)],
    };
    let answer = inner.change(txn, WAIT).await.map_err(ClusterError::from)?;
    let revision = keys::unsigned(answer.value.header.unwrap_or_default().revision);
    let found = inner.found_first(answer.value.responses)?;
    // An earlier attempt whose answer was lost may have done it.
    if !(answer.value.succeeded || (answer.repeated && found == Some(value))) {
        return Ok(None);
    }
    let _late = inner.wait_applied(revision, VISIBLE_WAIT).await;
    let changes = if seen.as_ref() == Some(&new) { Vec::new() } else { vec![Change::PutTicketKeys(new)] };
    Ok(Some(Committed { revision: inner.replica.revision()?, changes }))
}
