//! Presence: each node keeps a key under an etcd lease, with its load as value. All nodes see all
//! of them. A node that is gone or cut off disappears when its etcd lease has run out. A second key
//! under the same lease says which formats its program knows.
//!
//! Not here: the content of the load, the effect of formats (`raise`), and whether an absent node
//! is dead (the supervisor).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;

use super::client::{EtcdFailure, LEASE_GRANT, LEASE_KEEP, LEASE_REVOKE};
use super::error::ClusterError;
use super::keys;
use super::wire::{
    EmptyResponse, LeaseGrant, LeaseGranted, LeaseId, PutRequest, RequestKind, RequestOp, TxnRequest,
};
use crate::etcd::inner::{ClusterStore, StoreInner};
use nagaya_records::names::NodeName;

/// Longest load, in bytes. Every node gets it from every other one each time it changes.
pub const PRESENCE_LEN_MAX: usize = 8 << 10;

/// Shortest interval between two reported changes of the load. More frequent ones are merged to the
/// latest.
const TOLD_EVERY: Duration = Duration::from_millis(200);

const WAIT: Duration = Duration::from_secs(5);

/// Pause after etcd was unreachable.
const PAUSE: Duration = Duration::from_millis(250);

/// A present node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePresence {
    pub node: NodeName,
    /// Load as given to [`ClusterStore::present`] there.
    pub json: String,
    /// When it became known here.
    pub seen: Instant,
}

/// The presence that this node wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WantedPresence {
    node: NodeName,
    json: String,
    ttl: Duration,
}

impl ClusterStore {
    /// Makes this node visible to the others, with this load. It ends when the node was not heard
    /// from for `ttl` (whole seconds; etcd's shortest is about its election timeout). Call it again
    /// when the load has changed. It returns at once.
    pub fn present(&self, node: &NodeName, json: String, ttl: Duration) -> Result<(), ClusterError> {
        if json.len() > PRESENCE_LEN_MAX {
            let detail = format!("a load of {} bytes: at most {PRESENCE_LEN_MAX}", json.len());
            return Err(ClusterError::Refused { detail });
        }
        let wanted = Some(WantedPresence { node: node.clone(), json, ttl });
        self.inner.present.send_if_modified(|known| {
            let changes = *known != wanted;
            *known = wanted;
            changes
        });
        Ok(())
    }

    /// Makes this node invisible again.
    pub fn absent(&self) {
        self.inner.present.send_replace(None);
    }

    /// Returns the present nodes, in order of name, as far as this node knows: see
    /// [`ClusterStore::age`].
    pub fn presences(&self) -> Vec<NodePresence> {
        self.inner.presences.lock().values().cloned().collect()
    }
}

impl StoreInner {
    pub(super) fn presence(&self, node: &str, value: Option<&[u8]>) {
        let Ok(name) = NodeName::new(node) else { return };
        let mut presences = self.presences.lock();
        match value {
            Some(value) => drop(presences.insert(name.clone(), presence(name, value))),
            None => drop(presences.remove(&name)),
        }
    }

    pub(super) fn replace_presences(&self, all: Vec<(String, Vec<u8>)>) {
        let there = all.into_iter().filter_map(|(node, value)| {
            let name = NodeName::new(&node).ok()?;
            Some((name.clone(), presence(name, &value)))
        });
        *self.presences.lock() = there.collect::<BTreeMap<_, _>>();
    }
}

fn presence(node: NodeName, value: &[u8]) -> NodePresence {
    NodePresence { node, json: String::from_utf8_lossy(value).into_owned(), seen: Instant::now() }
}

/// Never ends; the runtime's thread drops it.
pub(super) async fn keep(inner: Arc<StoreInner>) {
    let mut wanted = inner.present.subscribe();
    loop {
        let Some(now) = wanted.borrow_and_update().clone() else {
            // The sender lives as long as `inner`.
            let _ = wanted.changed().await;
            continue;
        };
        if stay(&inner, now, &mut wanted).await.is_err() {
            sleep(PAUSE).await;
        }
    }
}

/// Keeps the presence until it is no longer wanted, or until the lease is lost.
async fn stay(
    inner: &StoreInner,
    mut now: WantedPresence,
    wanted: &mut tokio::sync::watch::Receiver<Option<WantedPresence>>,
) -> Result<(), EtcdFailure> {
    let ttl = i64::try_from(now.ttl.as_secs()).unwrap_or(i64::MAX).max(1);
    let granted: LeaseGranted = inner.client.ask(LEASE_GRANT, LeaseGrant { ttl }, WAIT).await?.value;
    let lease = granted.id;
    let every = Duration::from_secs(keys::unsigned(granted.ttl).max(1)) / 3;
    put(inner, inner.keys.knows(now.node.as_str()), keys::FORMAT.to_string(), lease).await?;
    tell(inner, &now, lease).await?;
    let mut told = Instant::now();
    let mut renew_at = told + every;
    loop {
        tokio::select! {
            () = sleep_until(renew_at) => {
                renew(inner, lease, every).await?;
                renew_at = Instant::now() + every;
                // An unchanged load is written again, signed with the current key.
                if told.elapsed() >= every {
                    tell_if_room(inner, &now, lease).await?;
                    told = Instant::now();
                }
            }
            Ok(()) = wanted.changed() => {
                sleep_until(told + TOLD_EVERY).await;
                let next = wanted.borrow_and_update().clone();
                match next {
                    Some(next) if next.node == now.node && next.ttl == now.ttl => {
                        now = next;
                        tell_if_room(inner, &now, lease).await?;
                        told = Instant::now();
                    }
                    // Another name or term needs a new etcd lease.
                    _ => {
                        inner.client.ask::<_, EmptyResponse>(LEASE_REVOKE, LeaseId { id: lease }, WAIT).await?;
                        return Ok(());
                    }
                }
            }
        }
    }
}

/// Writes the load, unless etcd is full. Then others see an old load, but still see that this node
/// is present.
async fn tell_if_room(inner: &StoreInner, wanted: &WantedPresence, lease: i64) -> Result<(), EtcdFailure> {
    match tell(inner, wanted, lease).await {
        Err(EtcdFailure::Error(ClusterError::Full { .. })) => Ok(()),
        told => told,
    }
}

async fn tell(inner: &StoreInner, wanted: &WantedPresence, lease: i64) -> Result<(), EtcdFailure> {
    put(inner, inner.keys.present(&wanted.node), wanted.json.clone(), lease).await
}

async fn put(inner: &StoreInner, key: String, value: String, lease: i64) -> Result<(), EtcdFailure> {
    let put = PutRequest { key: key.into_bytes(), value: value.into_bytes(), lease };
    // No node is present in a cluster that does not exist.
    let txn = TxnRequest {
        compare: vec![keys::is_there(&inner.keys.revision())],
        success: vec![RequestOp { request: Some(RequestKind::Put(put)) }],
        failure: Vec::new(),
    };
    if inner.change(txn, WAIT).await?.value.succeeded {
        return Ok(());
    }
    let cluster = inner.keys.cluster().to_owned();
    Err(EtcdFailure::Error(ClusterError::NotInitialised { cluster }))
}

/// Renews once, on a stream of its own: renewals are so rare that none need be kept open.
async fn renew(inner: &StoreInner, lease: i64, within: Duration) -> Result<(), EtcdFailure> {
    let (to, requests) = mpsc::channel(1);
    let silent = || EtcdFailure::Error(inner.client.unreachable(within, "a lease was not renewed".into()));
    to.send(LeaseId { id: lease }).await.map_err(|_| silent())?;
    let (talk, mut answers) = inner
        .client
        .converse::<LeaseId, super::wire::LeaseKept>(LEASE_KEEP, ReceiverStream::new(requests), within)
        .await?;
    match timeout(within, answers.message()).await {
        Ok(Ok(Some(kept))) if kept.ttl > 0 => Ok(()),
        // It has run out; a new one is made.
        Ok(Ok(_)) => Err(silent()),
        Ok(Err(status)) => {
            inner.client.give_up(&talk);
            Err(inner.client.failure(&talk, &status))
        }
        Err(_) => {
            inner.client.give_up(&talk);
            Err(silent())
        }
    }
}
