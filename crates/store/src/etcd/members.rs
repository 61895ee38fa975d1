//! Nodes and placements: the members of the cluster, and which node runs a site's application. Each
//! is one compare-and-set of its own key, apart from configuration. So a failing node's sites move
//! without waiting for one another.
//!
//! A removed site leaves its placement behind as a tombstone, because its node may be cut off and
//! still serve. A new site of the same name continues from that epoch. It takes over from that node
//! with the usual wait. When nothing can run under it any more, the node itself deletes it
//! ([`ClusterStore::forget`]). If the node is not present, another member takes the tombstone over
//! first ([`ClusterStore::inherit`]).
//!
//! Not here: choosing a node and deciding that one is dead (`placement`, the supervisor).

use std::time::Duration;

use super::PkiChange;
use super::client::{RANGE, RAW_TXN};
use super::error::ClusterError;
use super::keys::{self, placement_value};
use super::wire::{Compare, RangeResponse, TxnRequest, TxnResponse};
use crate::etcd::inner::{ClusterStore, StoreInner, VISIBLE_WAIT, thread_lost};
use crate::{PAGE_LEN_MAX, RecordKind, Store};
use nagaya_records::names::{NodeName, SiteName};
use nagaya_records::record::{NodeRecord, Placement};

/// Time for a change of a node or placement. Longer than etcd needs to choose a new leader.
const CHANGE_WAIT: Duration = Duration::from_secs(5);

/// Time for a suspect mark: a later one is of no use to the waiting request.
const DOUBT_WAIT: Duration = Duration::from_secs(1);

/// Tries of a change that others overtake.
const TRIES_MAX: u32 = 8;

/// Outcome of writing a placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlacementOutcome {
    Won,
    /// Another placement is there, or none where one was expected. If its epoch is later than ours,
    /// ours may have been there before it. Then a member failed before it replied.
    Lost(Option<Placement>),
    /// The site or the node is no longer in the cluster.
    Void,
    /// The placement is as expected, but another precondition does not hold ([`PlacementBasis`]).
    Otherwise,
}

/// Preconditions of a placement in addition to the previous epoch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlacementBasis {
    /// The node that loses the site is as it was seen.
    pub from: Option<SeenNode>,
    /// The mark of this revision exists against that node. Neither its record nor the placement was
    /// written since.
    pub mark: Option<u64>,
    /// The previous placement was not written after this revision.
    pub written_by: Option<u64>,
}

/// State of a node that matters for taking a site from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SeenNode {
    Member(Box<NodeRecord>),
    /// It was removed, and its record said this ([`NodeRecord::fence_ms`]).
    Removed {
        fence_ms: u32,
    },
}

impl SeenNode {
    pub fn fence_ms(&self) -> u32 {
        match self {
            Self::Member(record) => record.fence_ms,
            Self::Removed { fence_ms } => *fence_ms,
        }
    }
}

/// Outcome for a machine that asks to be a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinResult {
    Joined,
    /// An expected value is different, or gone.
    Changed,
}

/// Owner of a node's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordOwner {
    Ours {
        draining: bool,
        /// etcd's revision when a site was last taken from this node. A node that has applied it
        /// knows of all such moves.
        left_at: u64,
        /// When it became a member.
        since: u64,
        /// Revision of the store at the read.
        revision: u64,
    },
    Gone,
    Anothers,
}

impl ClusterStore {
    /// Writes where a site's application runs, and that `from` has lost a site. It succeeds if the
    /// present placement has the epoch `seen` (`None` if there must be none). It takes one round
    /// trip to etcd, and does not wait for the watch. After an error it is unknown whether it was
    /// written.
    pub async fn place(
        &self,
        placement: Placement,
        seen: Option<u64>,
        from: Option<&NodeName>,
    ) -> Result<PlacementOutcome, ClusterError> {
        self.place_on(placement, seen, from, PlacementBasis::default()).await
    }

    /// Does the same, if all is as `basis` says.
    pub async fn place_on(
        &self,
        placement: Placement,
        seen: Option<u64>,
        from: Option<&NodeName>,
        basis: PlacementBasis,
    ) -> Result<PlacementOutcome, ClusterError> {
        let inner = self.inner.clone();
        let from = from.cloned();
        self.on_own(async move { inner.place(&placement, seen, from.as_ref(), &basis).await }).await
    }

    /// Marks a node that may be dead. From then on, the store gives it no lease before it has
    /// cleared the mark. Returns the revision at which the present mark was made, by this call or
    /// earlier. `None` if its record has changed, as it is then unknown whether it honors marks.
    pub async fn mark_suspect(&self, node: &NodeRecord, by: &NodeName) -> Result<Option<u64>, ClusterError> {
        let inner = self.inner.clone();
        let key = inner.keys.suspect_key(&node.name);
        let record = inner.keys.record(RecordKind::Node, node.name.as_str());
        let by = by.to_string();
        let is_same = keys::stands(&record, keys::json(node));
        self.on_own(async move {
            let txn = TxnRequest {
                compare: [&is_same[..], &[keys::is_absent(&key)]].concat(),
                success: vec![keys::putting(&key, by)],
                failure: vec![keys::getting(&key)],
            };
            let answer = inner.change(txn, DOUBT_WAIT).await?.value;
            if answer.succeeded {
                return Ok(Some(keys::unsigned(answer.header.unwrap_or_default().revision)));
            }
            // A caller that relies on it compares the record again.
            let stands = crate::etcd::wire::raw_pairs(answer.responses).into_iter().next().flatten();
            Ok(stands.map(|stands| keys::unsigned(stands.create_revision)))
        })
        .await
    }

    /// Returns a node's state, no older than this call. `None` if nothing is known of it.
    pub async fn read_node(&self, node: &NodeName) -> Result<Option<SeenNode>, ClusterError> {
        let inner = self.inner.clone();
        let keys = [inner.keys.record(RecordKind::Node, node.as_str()), inner.keys.removed(node)];
        self.on_own(async move {
            let look = TxnRequest {
                success: keys.iter().map(|key| keys::getting(key)).collect(),
                ..TxnRequest::default()
            };
            let answer: TxnResponse = inner.client.ask(RAW_TXN, look, CHANGE_WAIT).await?.value;
            let [record, removed] = inner.open_found(answer.responses)?.try_into().unwrap_or_default();
            if let Some(record) = record {
                return Ok(Some(SeenNode::Member(Box::new(read_node(&record.value)?))));
            }
            Ok(removed.map(|removed| SeenNode::Removed { fence_ms: read_fence(&removed.value) }))
        })
        .await
    }

    /// Returns where a site's application runs, no older than this call.
    pub async fn placement_now(&self, site: &SiteName) -> Result<Option<Placement>, ClusterError> {
        let inner = self.inner.clone();
        let key = inner.keys.record(RecordKind::Placement, site.as_str());
        self.on_own(async move {
            let answer: RangeResponse = inner.client.ask(RANGE, keys::get(&key), CHANGE_WAIT).await?.value;
            let found = answer.kvs.into_iter().next().map(|kv| inner.opened(kv)).transpose()?;
            found.map(|kv| read_placement(&kv.value)).transpose()
        })
        .await
    }

    /// Deletes the tombstone of a removed site. Only its node may do this, once it has known of the
    /// removal for longer than any lease lasts. The next placement of the name then starts without
    /// a wait. Returns false if a site of that name exists again, or if the placement is different.
    pub async fn forget(&self, placement: &Placement) -> Result<bool, ClusterError> {
        let inner = self.inner.clone();
        let site = placement.site.clone();
        let epoch = placement.epoch;
        self.on_own(async move { inner.forget(&site, epoch).await }).await
    }

    /// Makes the node `heir` take over the tombstone of a removed site under the next epoch,
    /// without `from`. It takes the same care as [`ClusterStore::place`]. Returns false as
    /// [`ClusterStore::forget`] does, or if `heir` is not a member. An earlier attempt may still be
    /// on its way.
    pub async fn inherit(
        &self,
        placement: Placement,
        from: &NodeName,
        heir: &NodeName,
    ) -> Result<bool, ClusterError> {
        let inner = self.inner.clone();
        let left = inner.keys.left(from);
        let heir = inner.keys.record(RecordKind::Node, heir.as_str());
        self.on_own(async move { inner.inherit(&placement, left, &heir).await }).await
    }

    /// Returns etcd's revision up to which the replica is complete and all changes were reported.
    /// Returns 0 if nothing was since this process began.
    pub fn applied(&self) -> u64 {
        *self.inner.applied.borrow()
    }

    /// Returns whether this node's record still has this id. It is one linearizable read, so the
    /// reply is no older than this call. A mark against the node is cleared first
    /// ([`ClusterStore::mark_suspect`]). Each query takes at most `within`.
    pub async fn confirm(
        &self,
        node: &NodeName,
        id: &str,
        within: Duration,
    ) -> Result<RecordOwner, ClusterError> {
        let inner = self.inner.clone();
        let id = id.to_owned();
        let key = inner.keys.record(RecordKind::Node, node.as_str());
        let left = inner.keys.left(node);
        let doubt = inner.keys.suspect_key(node);
        self.on_own(async move {
            let mut look = TxnRequest {
                success: vec![keys::getting(&key), keys::getting(&left), keys::getting(&doubt)],
                ..TxnRequest::default()
            };
            for _ in 0..TRIES_MAX {
                let answer: TxnResponse = inner.client.ask_soon(RAW_TXN, look, within).await?;
                let revision = keys::unsigned(answer.header.unwrap_or_default().revision);
                let [record, left_by, mark] =
                    inner.open_found(answer.responses)?.try_into().unwrap_or_default();
                let Some(record) = record else { return Ok(RecordOwner::Gone) };
                let node = read_node(&record.value)?;
                if node.id != id {
                    return Ok(RecordOwner::Anothers);
                }
                let Some(mark) = mark else {
                    let left_at = left_by.map_or(0, |left| keys::unsigned(left.mod_revision));
                    let since = keys::unsigned(record.create_revision);
                    return Ok(RecordOwner::Ours { draining: node.draining, left_at, since, revision });
                };
                // The node that wrote the mark relies on this: no earlier read counts any more.
                look = TxnRequest {
                    compare: vec![keys::is_made(&doubt, keys::unsigned(mark.create_revision))],
                    success: vec![keys::getting(&key), keys::getting(&left), keys::deleting(&doubt)],
                    failure: vec![keys::getting(&key), keys::getting(&left), keys::getting(&doubt)],
                };
            }
            Err(ClusterError::Contended { tries: TRIES_MAX })
        })
        .await
    }

    /// Makes this machine a member, or updates its record if it is one already. Its draining state
    /// stays, and so does a longer lease, until [`ClusterStore::set_fence`]. Returns the resulting
    /// record.
    pub async fn join(&self, node: NodeRecord) -> Result<NodeRecord, ClusterError> {
        let inner = self.inner.clone();
        self.on_own(async move { inner.join(node).await }).await
    }

    /// Makes this machine a member together with these changes, in one transaction.
    pub async fn admit(&self, node: NodeRecord, changes: Vec<PkiChange>) -> Result<JoinResult, ClusterError> {
        super::pki::check(&changes)?;
        let inner = self.inner.clone();
        self.on_own(async move { inner.admit(&node, &changes).await }).await
    }

    /// Updates the record of a member, as [`ClusterStore::join`] does. A removed member stays
    /// removed.
    pub async fn refresh(&self, node: NodeRecord) -> Result<NodeRecord, ClusterError> {
        let inner = self.inner.clone();
        self.on_own(async move { inner.refresh(&node).await }).await
    }

    pub async fn set_draining(&self, node: &NodeName, draining: bool) -> Result<(), ClusterError> {
        let inner = self.inner.clone();
        let name = node.clone();
        self.on_own(async move {
            inner.change_node(&name, |record| Ok(NodeRecord { draining, ..record.clone() })).await?;
            inner.show_written().await;
            Ok(())
        })
        .await
    }

    /// Sets the lease length: from now on the node serves no longer than this without the store.
    /// This holds for its earlier life, too.
    pub async fn set_fence(&self, node: &NodeName, id: &str, fence_ms: u32) -> Result<(), ClusterError> {
        let inner = self.inner.clone();
        let name = node.clone();
        let id = id.to_owned();
        self.on_own(async move {
            let set = |record: NodeRecord| NodeRecord { fence_ms, ..record };
            inner.change_node(&name, |record| its_own(record, &id).map(set)).await
        })
        .await
    }

    /// Notes that this node knows all members of this revision.
    pub async fn knows(&self, node: &NodeName, id: &str, revision: u64) -> Result<(), ClusterError> {
        let inner = self.inner.clone();
        let name = node.clone();
        let id = id.to_owned();
        self.on_own(async move {
            let set = |record: NodeRecord| NodeRecord { knows: revision.max(record.knows), ..record };
            inner.change_node(&name, |record| its_own(record, &id).map(set)).await
        })
        .await
    }

    /// Removes a node from the cluster. Refused while placements name it, unless `forced`: then its
    /// sites move when they are requested.
    pub async fn remove(&self, node: &NodeName, forced: bool) -> Result<(), ClusterError> {
        self.remove_with(node, forced, Vec::new()).await.map(drop)
    }

    /// Does the same together with these changes, in one transaction. Returns false if an expected
    /// value is different, in which case nothing was done.
    pub async fn remove_with(
        &self,
        node: &NodeName,
        forced: bool,
        changes: Vec<PkiChange>,
    ) -> Result<bool, ClusterError> {
        super::pki::check(&changes)?;
        let inner = self.inner.clone();
        let name = node.clone();
        self.on_own(async move {
            let is_done = inner.clone().remove(&name, forced, &changes).await?;
            inner.show_written().await;
            Ok(is_done)
        })
        .await
    }
}

fn read_placement(value: &[u8]) -> Result<Placement, ClusterError> {
    serde_json::from_slice(value)
        .map_err(|error| ClusterError::Refused { detail: format!("a placement cannot be read: {error}") })
}

fn read_node(value: &[u8]) -> Result<NodeRecord, ClusterError> {
    serde_json::from_slice(value)
        .map_err(|error| ClusterError::Refused { detail: format!("a node's record cannot be read: {error}") })
}

/// Reads a lease length; 0 if it is unknown.
fn read_fence(value: &[u8]) -> u32 {
    str::from_utf8(value).ok().and_then(|value| value.parse().ok()).unwrap_or(0)
}

/// Returns a record that only this machine changes.
fn its_own(record: &NodeRecord, id: &str) -> Result<NodeRecord, ClusterError> {
    if record.id == id {
        return Ok(record.clone());
    }
    Err(ClusterError::NameTaken { name: record.name.to_string(), peer: record.peer.clone() })
}

impl StoreInner {
    async fn place(
        &self,
        placement: &Placement,
        seen: Option<u64>,
        from: Option<&NodeName>,
        basis: &PlacementBasis,
    ) -> Result<PlacementOutcome, ClusterError> {
        let site = self.keys.record(RecordKind::Site, placement.site.as_str());
        let node = self.keys.record(RecordKind::Node, placement.node.as_str());
        let key = self.keys.record(RecordKind::Placement, placement.site.as_str());
        let mut compare = vec![keys::is_there(&site), keys::is_there(&node)];
        match seen {
            Some(epoch) => compare.extend(keys::epoch_is(&key, epoch)),
            None => compare.push(keys::is_absent(&key)),
        }
        if let Some(from) = from {
            compare.extend(self.of_who_loses(from, &key, basis));
        }
        compare.extend(basis.written_by.map(|revision| keys::is_no_newer(&key, revision)));
        let mut success = vec![keys::putting(&key, placement_value(placement))];
        success.extend(from.map(|from| keys::putting(&self.keys.left(from), placement.site.as_str())));
        let txn = TxnRequest {
            compare,
            success,
            failure: vec![keys::getting(&key), keys::getting(&site), keys::getting(&node)],
        };
        let answer = self.change(txn, CHANGE_WAIT).await?;
        if answer.value.succeeded {
            return Ok(PlacementOutcome::Won);
        }
        let [stored, site, node] =
            crate::etcd::wire::raw_pairs(answer.value.responses).try_into().unwrap_or_default();
        let stored = stored.map(|kv| self.opened(kv)).transpose()?;
        let stored = stored.map(|kv| read_placement(&kv.value)).transpose()?;
        if answer.repeated && stored.as_ref() == Some(placement) {
            return Ok(PlacementOutcome::Won);
        }
        if site.is_none() || node.is_none() {
            return Ok(PlacementOutcome::Void);
        }
        let is_as_seen = stored.as_ref().map(|stored| stored.epoch) == seen;
        if is_as_seen && *basis != PlacementBasis::default() {
            Ok(PlacementOutcome::Otherwise)
        } else {
            Ok(PlacementOutcome::Lost(stored))
        }
    }

    /// Returns the conditions on the node that loses the site of this placement.
    fn of_who_loses(&self, from: &NodeName, placement: &str, basis: &PlacementBasis) -> Vec<Compare> {
        let record = self.keys.record(RecordKind::Node, from.as_str());
        let mut compare = Vec::new();
        match &basis.from {
            Some(SeenNode::Member(seen)) => compare.extend(keys::stands(&record, keys::json(seen))),
            Some(SeenNode::Removed { fence_ms }) => {
                compare.push(keys::is_absent(&record));
                compare.extend(keys::stands(&self.keys.removed(from), fence_ms.to_string().into_bytes()));
            }
            None => {}
        }
        if let Some(mark) = basis.mark {
            compare.extend([
                keys::is_made(&self.keys.suspect_key(from), mark),
                keys::is_no_newer(&record, mark),
                keys::is_no_newer(placement, mark),
            ]);
        }
        compare
    }

    async fn forget(&self, site: &SiteName, epoch: u64) -> Result<bool, ClusterError> {
        let key = self.keys.record(RecordKind::Placement, site.as_str());
        let mut compare = vec![keys::is_absent(&self.keys.record(RecordKind::Site, site.as_str()))];
        compare.extend(keys::epoch_is(&key, epoch));
        let txn =
            TxnRequest { compare, success: vec![keys::deleting(&key)], failure: vec![keys::getting(&key)] };
        let answer = self.change(txn, CHANGE_WAIT).await?;
        let stands = crate::etcd::wire::raw_pairs(answer.value.responses).into_iter().next().flatten();
        // An earlier attempt whose reply was lost may have done it.
        Ok(answer.value.succeeded || (answer.repeated && stands.is_none()))
    }

    async fn inherit(&self, placement: &Placement, left: String, heir: &str) -> Result<bool, ClusterError> {
        let key = self.keys.record(RecordKind::Placement, placement.site.as_str());
        let mut compare = vec![
            keys::is_absent(&self.keys.record(RecordKind::Site, placement.site.as_str())),
            keys::is_there(heir),
        ];
        compare.extend(keys::epoch_is(&key, placement.epoch - 1));
        let txn = TxnRequest {
            compare,
            success: vec![
                keys::putting(&key, placement_value(placement)),
                keys::putting(&left, placement.site.as_str()),
            ],
            failure: vec![keys::getting(&key)],
        };
        let answer = self.change(txn, CHANGE_WAIT).await?;
        let stands = self.found_first(answer.value.responses)?;
        let is_ours = || stands.is_some_and(|stands| stands == placement_value(placement));
        Ok(answer.value.succeeded || (answer.repeated && is_ours()))
    }

    async fn join(&self, node: NodeRecord) -> Result<NodeRecord, ClusterError> {
        match self.admit(&node, &[]).await {
            Ok(_) => Ok(node),
            Err(ClusterError::NameTaken { .. }) => self.refresh(&node).await,
            Err(error) => Err(error),
        }
    }

    async fn admit(&self, node: &NodeRecord, changes: &[PkiChange]) -> Result<JoinResult, ClusterError> {
        let key = self.keys.record(RecordKind::Node, node.name.as_str());
        let mut compare = vec![
            keys::is_there(&self.keys.revision()),
            keys::is_absent(&self.keys.seeding()),
            keys::is_absent(&key),
        ];
        compare.extend(changes.iter().filter_map(|change| change.compare(&self.keys)));
        let mut success =
            vec![keys::putting(&key, keys::json(node)), keys::deleting(&self.keys.removed(&node.name))];
        success.extend(changes.iter().map(|change| change.operation(&self.keys)));
        let failure = vec![
            keys::getting(&self.keys.format()),
            keys::getting(&self.keys.revision()),
            keys::getting(&self.keys.seeding()),
            keys::getting(&key),
        ];
        let txn = TxnRequest { compare, success, failure };
        let answer = self.change(txn, CHANGE_WAIT).await?;
        if answer.value.succeeded {
            return Ok(JoinResult::Joined);
        }
        let [format, revision, seeding, found] =
            crate::etcd::wire::raw_pairs(answer.value.responses).try_into().unwrap_or_default();
        let format = format.map(|kv| kv.value);
        super::watch::check_head(self, format.as_deref(), revision.is_some(), seeding.is_some())?;
        let Some(found) = found else { return Ok(JoinResult::Changed) };
        let found = read_node(&self.opened(found)?.value)?;
        // An earlier attempt whose reply was lost may have done it.
        if answer.repeated && found.id == node.id {
            return Ok(JoinResult::Joined);
        }
        Err(ClusterError::NameTaken { name: found.name.to_string(), peer: found.peer })
    }

    /// It is written even if nothing changes, which voids pending requests of this machine's
    /// earlier life.
    async fn refresh(&self, node: &NodeRecord) -> Result<NodeRecord, ClusterError> {
        self.write_node(&node.name, |found| {
            let found = its_own(found, &node.id)?;
            let next = NodeRecord { draining: found.draining, knows: found.knows, ..node.clone() };
            Ok(Some(next.with_fence_of(&found)))
        })
        .await
        .map(|written| written.expect("it is written in any case"))
    }

    async fn change_node(
        &self,
        name: &NodeName,
        change: impl Fn(&NodeRecord) -> Result<NodeRecord, ClusterError>,
    ) -> Result<(), ClusterError> {
        self.write_node(name, |before| {
            change(before).map(|after| Some(after).filter(|after| after != before))
        })
        .await
        .map(drop)
    }

    /// Waits so that a completed command is visible here. If that takes too long, the command is
    /// done all the same.
    async fn show_written(&self) {
        let _late = self.wait_in_step(VISIBLE_WAIT).await;
    }

    /// Returns the written record. If `change` returns `None`, nothing is written.
    async fn write_node(
        &self,
        name: &NodeName,
        change: impl Fn(&NodeRecord) -> Result<Option<NodeRecord>, ClusterError>,
    ) -> Result<Option<NodeRecord>, ClusterError> {
        let key = self.keys.record(RecordKind::Node, name.as_str());
        for _ in 0..TRIES_MAX {
            let answer = self.client.ask::<_, RangeResponse>(RANGE, keys::get(&key), CHANGE_WAIT).await?;
            let Some(kv) = answer.value.kvs.into_iter().next() else {
                return Err(ClusterError::NoNode { name: name.to_string() });
            };
            let written_at = keys::unsigned(kv.mod_revision);
            let Some(after) = change(&read_node(&self.opened(kv)?.value)?)? else { return Ok(None) };
            let txn = TxnRequest {
                compare: vec![keys::is_of(&key, written_at)],
                success: vec![keys::putting(&key, keys::json(&after))],
                failure: Vec::new(),
            };
            if self.change(txn, CHANGE_WAIT).await?.value.succeeded {
                return Ok(Some(after));
            }
        }
        Err(ClusterError::Contended { tries: TRIES_MAX })
    }

    /// It applies only if no placement was written since the check, so that none names a removed
    /// node.
    async fn remove(
        self: std::sync::Arc<Self>,
        name: &NodeName,
        forced: bool,
        changes: &[PkiChange],
    ) -> Result<bool, ClusterError> {
        let key = self.keys.record(RecordKind::Node, name.as_str());
        for _ in 0..TRIES_MAX {
            let head = self.client.ask::<_, RangeResponse>(RANGE, keys::get(&key), CHANGE_WAIT).await?.value;
            let Some(kv) = head.kvs.first() else {
                return Err(ClusterError::NoNode { name: name.to_string() });
            };
            // An unreadable record is removed all the same: its lease length is then unknown.
            let record = self.opened(kv.clone()).and_then(|kv| read_node(&kv.value));
            let fence_ms = record.map_or(0, |record| record.fence_ms);
            let mut compare = vec![keys::is_of(&key, keys::unsigned(kv.mod_revision))];
            if !forced {
                self.wait_in_step(CHANGE_WAIT).await?;
                let inner = self.clone();
                let node = name.clone();
                let looked = tokio::task::spawn_blocking(move || inner.refuse_if_used(&node));
                looked.await.map_err(|error| thread_lost(&error))??;
                let seen = keys::unsigned(head.header.clone().unwrap_or_default().revision);
                compare.push(keys::are_no_newer(&self.keys.records(RecordKind::Placement), seen));
            }
            compare.extend(changes.iter().filter_map(|change| change.compare(&self.keys)));
            let mut success = vec![
                keys::deleting(&key),
                keys::deleting(&self.keys.suspect_key(name)),
                keys::putting(&self.keys.removed(name), fence_ms.to_string()),
            ];
            success.extend(changes.iter().map(|change| change.operation(&self.keys)));
            let mut failure = vec![keys::getting(&key)];
            failure.extend(changes.iter().map(|change| change.getting(&self.keys)));
            let txn = TxnRequest { compare, success, failure };
            let answer = self.change(txn, CHANGE_WAIT).await?;
            if answer.value.succeeded {
                return Ok(true);
            }
            let mut found = crate::etcd::wire::raw_pairs(answer.value.responses).into_iter();
            let is_gone = found.next().flatten().is_none();
            let stands = |(change, found): (&PkiChange, Option<super::wire::KeyValue>)| {
                change.is_as_expected(found.map_or(0, |kv| keys::unsigned(kv.mod_revision)))
            };
            // An earlier attempt whose reply was lost may have done it.
            if answer.repeated && is_gone {
                return Ok(true);
            }
            if !changes.iter().zip(found).all(stands) {
                return Ok(false);
            }
        }
        Err(ClusterError::Contended { tries: TRIES_MAX })
    }

    fn refuse_if_used(&self, node: &NodeName) -> Result<(), ClusterError> {
        let mut on_it = Vec::new();
        let mut after: Option<String> = None;
        loop {
            let page = self.replica.placements(after.as_deref(), PAGE_LEN_MAX)?;
            let Some(last) = page.last() else { break };
            after = Some(last.site.to_string());
            for placement in page.into_iter().filter(|placement| placement.part(node).is_some()) {
                // A tombstone runs nowhere.
                if self.replica.site(placement.site.as_str())?.is_some() {
                    on_it.push(placement);
                }
            }
        }
        match on_it.first() {
            None => Ok(()),
            Some(first) => Err(ClusterError::NodeInUse {
                name: node.to_string(),
                count: on_it.len(),
                first: first.site.to_string(),
            }),
        }
    }
}
