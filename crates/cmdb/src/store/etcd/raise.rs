//! Going over to a newer format of the cluster's records while the cluster serves. Nodes are updated one after the other; one of a
//! newer version reads and writes the format that the cluster has. Each node that is there says which formats its program knows
//! (`presence`), and the first one to see that every member knows the next one raises the number. From then on what only the new format
//! has may be written, and a program that does not know it is refused.
//!
//! A member that is not there does not say what it knows, and may come back with an older program: it holds the format back until it
//! is there, or is removed. Each format is raised to in one transaction that holds only if no member has come or changed since they
//! were looked at, so it is done once, by one of those that try, or not at all; whoever comes next does it then.
//!
//! Format 2 has one kind of record more and leaves the others as they are, so the number is all that is written. From format 3 on values
//! are signed as they are written, and what was there before is written anew (`resign`); until that is done both forms count. No node
//! raises to it that has no keys to sign with.
//! Not here: what the formats have (`keys`), this node's own file (`redb::migrate`).

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::client::RAW_TXN;
use super::error::ClusterError;
use super::keys::{self, FORMAT, HAS_SIGNATURES};
use super::wire::{KeyValue, Outcome, Response, Txn, TxnAnswer};
use super::{ClusterStore, Inner};
use crate::names::NodeName;
use crate::store::Kind;

/// How often members are looked at while the format is an older one.
const LOOK_EVERY: Duration = Duration::from_secs(2);

const WAIT: Duration = Duration::from_secs(5);

/// A format, and what holds it back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Format {
    /// Of the cluster's records. 0: not known since this process began.
    pub holds: u64,
    /// The newest one that this program knows.
    pub known: u64,
    /// Members that have not said that they know the next one. As of a few seconds ago, and only as far as this node has looked.
    pub behind: Vec<String>,
}

impl ClusterStore {
    pub fn format(&self) -> Format {
        let holds = *self.inner.format.borrow();
        // Another node may have raised it, of whose look this one knows nothing.
        let behind = if holds < FORMAT { self.inner.state.lock().behind.clone() } else { Vec::new() };
        Format { holds, known: FORMAT, behind }
    }
}

impl Inner {
    pub(super) fn format_is(&self, format: u64) {
        self.format.send_if_modified(|known| std::mem::replace(known, format) != format);
    }
}

/// Never ends; the runtime's thread drops it.
pub(super) async fn keep(inner: Arc<Inner>) {
    let mut format = inner.format.subscribe();
    loop {
        // The sender lives as long as `inner`.
        let _ = format.wait_for(|format| (1..FORMAT).contains(format)).await;
        // What failed is tried again; if it lasts, the watch has said so.
        let _ = raise(&inner).await;
        sleep(LOOK_EVERY).await;
    }
}

/// Fails unless the cluster has this format, or can have it now.
pub(super) async fn require(inner: &Inner, needed: u64) -> Result<(), ClusterError> {
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

/// Raises the format to the next one if it may be, and returns the one there is then.
async fn raise(inner: &Inner) -> Result<u64, ClusterError> {
    let looked = look(inner).await?;
    raise_upon(inner, looked).await
}

async fn raise_upon(inner: &Inner, looked: Looked) -> Result<u64, ClusterError> {
    let Looked { format, revision, members } = looked;
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
    let txn = Txn {
        compare: vec![
            keys::is_value(&keys.format(), format.to_string()),
            keys::is_there(&keys.revision()),
            keys::is_absent(&keys.seeding()),
            keys::are_no_newer(&keys.records(Kind::Node), revision),
            keys::are_no_newer(&keys.knows(""), revision),
        ],
        success: vec![keys::putting(&keys.format(), next.to_string())],
        failure: vec![keys::getting(&keys.format())],
    };
    let answer = inner.change(txn, WAIT).await?.value;
    let format = match answer.succeeded {
        true => next,
        // Another node was faster, or an earlier attempt whose answer was lost has done it.
        false => {
            let found = super::watch::raw_values(answer.responses).into_iter().next().flatten();
            found.map_or(Ok(format), |found| keys::known_format(keys.cluster(), &found))?
        }
    };
    inner.format_is(format);
    Ok(format)
}

struct Looked {
    format: u64,
    /// etcd's, of what was seen.
    revision: u64,
    members: Vec<Member>,
}

struct Member {
    name: String,
    /// The newest format. 0: it has not said.
    knows: u64,
}

/// All as of one moment.
async fn look(inner: &Inner) -> Result<Looked, ClusterError> {
    let keys = &inner.keys;
    let (nodes, knows) = (keys.records(Kind::Node), keys.knows(""));
    let success = vec![
        keys::getting(&keys.format()),
        keys::getting(&keys.revision()),
        keys::getting(&keys.seeding()),
        keys::getting_all(&nodes),
        keys::getting_all(&knows),
    ];
    let answer: TxnAnswer = inner.client.ask(RAW_TXN, Txn { success, ..Txn::default() }, WAIT).await?.value;
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
        Some(Member { knows: knows_of(&node).unwrap_or(0), name: node.into() })
    };
    Ok(Looked { format, revision, members: members.iter().filter_map(member).collect() })
}

fn all(outcome: Outcome) -> Vec<KeyValue> {
    match outcome.response {
        Some(Response::Range(range)) => range.kvs,
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests;
