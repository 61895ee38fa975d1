//! The keys that sign tickets: one record, written by compare-and-set. It is replicated like all
//! others, because a node must know them even while etcd is down.
//!
//! Not here: the choice of keys (`record::tickets`), when it is time (`nagaya`'s supervisor).

use std::sync::Arc;
use std::time::Duration;

use super::client::RANGE;
use super::error::ClusterError;
use super::keys::{self, TICKET_KEYS};
use super::wire::{RangeResponse, TxnRequest};
use crate::StoreError;
use crate::etcd::inner::{StoreInner, VISIBLE_WAIT};
use crate::{CommittedChanges, RecordKind, Store};
use nagaya_records::record::{RecordChange, TicketKeys};

const WAIT: Duration = Duration::from_secs(5);

pub(super) async fn put(
    inner: Arc<StoreInner>,
    new: TicketKeys,
    seen: Option<TicketKeys>,
) -> Result<Option<CommittedChanges>, StoreError> {
    let key = inner.keys.record(RecordKind::TicketKeys, TICKET_KEYS);
    let value = keys::json(&new);
    let looked = inner.client.ask::<_, RangeResponse>(RANGE, keys::get(&key), WAIT).await;
    let found = looked.map_err(ClusterError::from)?.value.kvs.into_iter().next();
    // A value that does not count is overwritten.
    let stands_at = found.as_ref().map_or(0, |kv| keys::unsigned(kv.mod_revision));
    let stands = found.and_then(|kv| inner.opened(kv).ok());
    if stands.as_ref().map(|kv| &*kv.value) != seen.as_ref().map(keys::json).as_deref() {
        return Ok(None);
    }
    let txn = TxnRequest {
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
    // An earlier attempt whose reply was lost may have done it.
    if !(answer.value.succeeded || (answer.repeated && found == Some(value))) {
        return Ok(None);
    }
    let _late = inner.wait_applied(revision, VISIBLE_WAIT).await;
    let changes =
        if seen.as_ref() == Some(&new) { Vec::new() } else { vec![RecordChange::PutTicketKeys(new)] };
    Ok(Some(CommittedChanges { revision: inner.replica.revision()?, changes }))
}
