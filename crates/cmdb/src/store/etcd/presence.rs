//! Who is there: each node keeps a key under a lease, with its load as value, and all nodes see all of them. A node that is
//! gone or cut off disappears when its lease has run out. Beside it, and as long, stands which formats its program knows.
//!
//! Not here: what the load says, what follows from the formats (`raise`), and whether a node that is not there is dead (the supervisor).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;

use super::client::{Failure, LEASE_GRANT, LEASE_KEEP, LEASE_REVOKE};
use super::error::ClusterError;
use super::wire::{Done, LeaseGrant, LeaseGranted, LeaseId, Operation, Put, Request, Txn};
use super::{ClusterStore, Inner, keys};
use crate::names::NodeName;

/// Longest load, in bytes. Every node gets it from every other one each time it changes.
pub const PRESENCE_LEN_MAX: usize = 8 << 10;

/// Between two changes of the load that are told. What comes more often is told as its latest.
const TOLD_EVERY: Duration = Duration::from_millis(200);

const WAIT: Duration = Duration::from_secs(5);

/// After etcd was out of reach.
const PAUSE: Duration = Duration::from_millis(250);

/// A node that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Presence {
    pub node: NodeName,
    /// As it was given to [`ClusterStore::present`] there.
    pub json: String,
    /// When it came to be known here.
    pub seen: Instant,
}

/// What this node is to be seen as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wanted {
    node: NodeName,
    json: String,
    ttl: Duration,
}

impl ClusterStore {
    /// From now on this node is seen by the others, with this load, until it has not been heard of for `ttl` (whole seconds;
    /// etcd's shortest is about its election timeout). Call it again when the load has changed. It returns at once.
    pub fn present(&self, node: &NodeName, json: String, ttl: Duration) -> Result<(), ClusterError> {
        if json.len() > PRESENCE_LEN_MAX {
            let detail = format!("a load of {} bytes: at most {PRESENCE_LEN_MAX}", json.len());
            return Err(ClusterError::Refused { detail });
        }
        let wanted = Some(Wanted { node: node.clone(), json, ttl });
        self.inner.present.send_if_modified(|known| {
            let changes = *known != wanted;
            *known = wanted;
            changes
        });
        Ok(())
    }

    /// This node is not to be seen any more.
    pub fn absent(&self) {
        self.inner.present.send_replace(None);
    }

    /// The nodes that are there, in order of name, as far as this node has heard: see [`ClusterStore::age`].
    pub fn presences(&self) -> Vec<Presence> {
        self.inner.presences.lock().values().cloned().collect()
    }
}

impl Inner {
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

fn presence(node: NodeName, value: &[u8]) -> Presence {
    Presence { node, json: String::from_utf8_lossy(value).into_owned(), seen: Instant::now() }
}

/// Never ends; the runtime's thread drops it.
pub(super) async fn keep(inner: Arc<Inner>) {
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

/// Until it is wanted no more, or the lease is lost.
async fn stay(
    inner: &Inner,
    mut now: Wanted,
    wanted: &mut tokio::sync::watch::Receiver<Option<Wanted>>,
) -> Result<(), Failure> {
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
                // What has not changed is told anew, signed with the key that counts now.
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
                    // Another name or term begins with a lease of its own.
                    _ => {
                        inner.client.ask::<_, Done>(LEASE_REVOKE, LeaseId { id: lease }, WAIT).await?;
                        return Ok(());
                    }
                }
            }
        }
    }
}

/// A full etcd takes none: what others see is old then, and that this node is there is still seen.
async fn tell_if_room(inner: &Inner, wanted: &Wanted, lease: i64) -> Result<(), Failure> {
    match tell(inner, wanted, lease).await {
        Err(Failure::Error(ClusterError::Full { .. })) => Ok(()),
        told => told,
    }
}

async fn tell(inner: &Inner, wanted: &Wanted, lease: i64) -> Result<(), Failure> {
    put(inner, inner.keys.present(&wanted.node), wanted.json.clone(), lease).await
}

async fn put(inner: &Inner, key: String, value: String, lease: i64) -> Result<(), Failure> {
    let put = Put { key: key.into_bytes(), value: value.into_bytes(), lease };
    // Nobody is present in a cluster that is not there.
    let txn = Txn {
        compare: vec![keys::is_there(&inner.keys.revision())],
        success: vec![Operation { request: Some(Request::Put(put)) }],
        failure: Vec::new(),
    };
    if inner.change(txn, WAIT).await?.value.succeeded {
        return Ok(());
    }
    let cluster = inner.keys.cluster().to_owned();
    Err(Failure::Error(ClusterError::NotInitialised { cluster }))
}

/// One renewal, on a stream of its own: they are so few that none need be kept open.
async fn renew(inner: &Inner, lease: i64, within: Duration) -> Result<(), Failure> {
    let (to, requests) = mpsc::channel(1);
    let silent = || Failure::Error(inner.client.unreachable(within, "a lease was not renewed".into()));
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
