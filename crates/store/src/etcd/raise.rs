//! Raises the format of the cluster's records while the cluster serves. Nodes are updated one after
//! the other, and a newer program uses the cluster's present format. Each present node reports the
//! formats that its program knows (`presence`). The first node to see that every member knows the
//! next one raises the number. From then on, records of the new format may be written. A program
//! that does not know it is refused.
//!
//! An absent member does not report, and may come back with an older program. It holds the format
//! back until it is present, or is removed. Each format is raised in one transaction, which holds
//! only if no member has come or changed since the check. So one of the nodes that try does it
//! once, or none does, and a later one does it then.
//!
//! Format 2 has one more kind of record. The others stay as they are, so only the number is
//! written. From format 3 on, values are signed when written, and older ones are written again
//! (`resign`). Until that is done, both forms count. A node without signing keys does not raise to
//! it. Not here: the content of formats (`keys`), this node's own file (`redb::migrate`).

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::client::RAW_TXN;
use super::error::ClusterError;
use super::keys::{self, FORMAT, HAS_SIGNATURES};
use super::wire::{KeyValue, ResponseKind, ResponseOp, TxnRequest, TxnResponse};
use crate::RecordKind;
use crate::etcd::inner::{ClusterStore, StoreInner};
use nagaya_records::names::NodeName;

/// Interval of checks of the members while the format is an older one.
const LOOK_EVERY: Duration = Duration::from_secs(2);

const WAIT: Duration = Duration::from_secs(5);

/// A format, and the members that hold it back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FormatState {
    /// Format of the cluster's records. 0 if it is unknown since this process began.
    pub holds: u64,
    /// The newest format that this program knows.
    pub known: u64,
    /// Members that have not reported that they know the next one. It is a few seconds old, and
    /// only as complete as this node's checks.
    pub behind: Vec<String>,
}

impl ClusterStore {
    pub fn format(&self) -> FormatState {
        let holds = *self.inner.format.borrow();
        // Another node may have raised it, and this one does not know of its check.
        let behind = if holds < FORMAT { self.inner.state.lock().behind.clone() } else { Vec::new() };
        FormatState { holds, known: FORMAT, behind }
    }
}

impl StoreInner {
    pub(super) fn format_is(&self, format: u64) {
        self.format.send_if_modified(|known| std::mem::replace(known, format) != format);
    }
}

/// Never ends; the runtime's thread drops it.
pub(super) async fn keep(inner: Arc<StoreInner>) {
    let mut format = inner.format.subscribe();
    loop {
        // The sender lives as long as `inner`.
        let _ = format.wait_for(|format| (1..FORMAT).contains(format)).await;
        // A failed attempt is repeated; if the failure lasts, the watch has reported it.
        let _ = raise(&inner).await;
        sleep(LOOK_EVERY).await;
    }
}

/// Fails unless the cluster has this format, or can have it now.
pub(super) async fn require(inner: &StoreInner, needed: u64) -> Result<(), ClusterError> {
    let mut found = *inner.format.borrow();
    while found < needed {
        let raised = raise(inner).await?;
        if raised <= found {
            let cluster = inner.keys.cluster().to_owned();
            let behind = inner.state.lock().behind.join(", ");
            return Err(ClusterError::NotRaised { cluster, found, needed, behind });
        }
        found = raised;
    }
    Ok(())
}

/// Raises the format to the next one if allowed, and returns the resulting one.
async fn raise(inner: &StoreInner) -> Result<u64, ClusterError> {
    let looked = look(inner).await?;
    raise_upon(inner, looked).await
}

async fn raise_upon(inner: &StoreInner, looked: FormatLook) -> Result<u64, ClusterError> {
    let FormatLook { format, revision, members } = looked;
    let behind: Vec<String> =
        members.iter().filter(|member| member.knows <= format).map(|member| member.name.clone()).collect();
    let lacks_keys = format + 1 == HAS_SIGNATURES && !inner.signer.has_keys();
    let is_held_back = members.is_empty() || !behind.is_empty() || lacks_keys;
    inner.state.lock().behind = behind;
    inner.format_is(format);
    if format >= FORMAT || is_held_back {
        return Ok(format);
    }
    let keys = &inner.keys;
    let next = format + 1;
    let txn = TxnRequest {
        compare: vec![
            keys::is_value(&keys.format(), format.to_string()),
            keys::is_there(&keys.revision()),
            keys::is_absent(&keys.seeding()),
            keys::are_no_newer(&keys.records(RecordKind::Node), revision),
            keys::are_no_newer(&keys.knows(""), revision),
        ],
        success: vec![keys::putting(&keys.format(), next.to_string())],
        failure: vec![keys::getting(&keys.format())],
    };
    let answer = inner.change(txn, WAIT).await?.value;
    let format = match answer.succeeded {
        true => next,
        // Another node was faster, or an earlier attempt whose reply was lost has done it.
        false => {
            let found = crate::etcd::wire::raw_values(answer.responses).into_iter().next().flatten();
            found.map_or(Ok(format), |found| keys::known_format(keys.cluster(), &found))?
        }
    };
    inner.format_is(format);
    Ok(format)
}

struct FormatLook {
    format: u64,
    /// etcd's revision of the read.
    revision: u64,
    members: Vec<MemberFormat>,
}

struct MemberFormat {
    name: String,
    /// The newest format. 0 if it has not reported.
    knows: u64,
}

/// Reads all members as of one moment.
async fn look(inner: &StoreInner) -> Result<FormatLook, ClusterError> {
    let keys = &inner.keys;
    let nodes = keys.records(RecordKind::Node);
    let knows = keys.knows("");
    let success = vec![
        keys::getting(&keys.format()),
        keys::getting(&keys.revision()),
        keys::getting(&keys.seeding()),
        keys::getting_all(&nodes),
        keys::getting_all(&knows),
    ];
    let answer: TxnResponse =
        inner.client.ask(RAW_TXN, TxnRequest { success, ..TxnRequest::default() }, WAIT).await?.value;
    let revision = keys::unsigned(answer.header.unwrap_or_default().revision);
    let found: Vec<Vec<KeyValue>> = answer.responses.into_iter().map(all).collect();
    let [format, count, seeding, members, said] = found.try_into().unwrap_or_default();
    let first = format.first().map(|pair| &*pair.value);
    let format = super::watch::check_head(inner, first, !count.is_empty(), !seeding.is_empty())?;
    let below = |pair: &KeyValue, prefix: &str| -> Option<NodeName> {
        NodeName::new(str::from_utf8(&pair.key).ok()?.strip_prefix(prefix)?).ok()
    };
    let knows_of = |node: &NodeName| {
        let said = said.iter().find(|pair| below(pair, &knows).as_ref() == Some(node))?;
        str::from_utf8(&said.value).ok()?.parse().ok()
    };
    let member = |pair: &KeyValue| {
        let node = below(pair, &nodes)?;
        Some(MemberFormat { knows: knows_of(&node).unwrap_or(0), name: node.into() })
    };
    Ok(FormatLook { format, revision, members: members.iter().filter_map(member).collect() })
}

fn all(outcome: ResponseOp) -> Vec<KeyValue> {
    match outcome.response {
        Some(ResponseKind::Range(range)) => range.kvs,
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests;
