//! Nodes and placements: who belongs to the cluster, and which node runs a site's application. Each is one compare-and-set
//! of its own key, apart from configuration, so that a failing node's sites move without waiting for one another.
//!
//! A site that is removed leaves its placement behind, because the node it names may be cut off and serve on: who adds a site of
//! the same name goes on from the same epoch, and takes it from that node as any other. When nothing can run under it any more,
//! the node itself takes it away ([`ClusterStore::forget`]); of a node that is not there somebody takes it over first
//! ([`ClusterStore::inherit`]).
//!
//! Not here: choosing a node and deciding that one is dead (`placement`, the supervisor).

use std::time::Duration;

use super::client::{RANGE, RAW_TXN};
use super::error::ClusterError;
use super::keys::{self, placement_value};
use super::wire::{Compare, RangeAnswer, Txn, TxnAnswer};
use super::{ClusterStore, Inner, PkiChange, VISIBLE_WAIT, lost};
use crate::names::{NodeName, SiteName};
use crate::record::{NodeRecord, Placement};
use crate::store::{Kind, PAGE_LEN_MAX, Store};

/// For a change of a node or placement. Longer than etcd needs to choose a new leader.
const CHANGE_WAIT: Duration = Duration::from_secs(5);

/// For a mark against a node: one that stands later is of no use to the request that waits.
const DOUBT_WAIT: Duration = Duration::from_secs(1);

/// Tries of a change that others overtake.
const TRIES_MAX: u32 = 8;

/// What became of a placement that was to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claim {
    Won,
    /// Another one stands there, or none where one was expected. If its epoch is later than ours, ours may have stood there
    /// before it, and nobody learned of it because a member failed with the answer.
    Lost(Option<Placement>),
    /// The site or the node is not in the cluster any more.
    Void,
    /// What stands there is as it was seen, but something else that was counted on is not so ([`Basis`]).
    Otherwise,
}

/// What a placement counts on beside the epoch that it follows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Basis {
    /// The node that loses the site is as it was seen.
    pub from: Option<Seen>,
    /// The mark of this revision stands against that node, and neither its record nor the placement was written since.
    pub mark: Option<u64>,
    /// The placement that is followed was not written after this revision.
    pub written_by: Option<u64>,
}

/// A node, as far as it matters to whoever takes a site from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    Member(Box<NodeRecord>),
    /// It was removed, and its record said this ([`NodeRecord::fence_ms`]).
    Removed {
        fence_ms: u32,
    },
}

impl Seen {
    pub fn fence_ms(&self) -> u32 {
        match self {
            Self::Member(record) => record.fence_ms,
            Self::Removed { fence_ms } => *fence_ms,
        }
    }
}

/// What became of a machine that asks to be a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    Joined,
    /// A value that it counted on is another one, or gone.
    Changed,
}

/// Whose a node's record is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confirmed {
    Ours {
        draining: bool,
        /// etcd's revision when a site was last taken from this node; who has applied it knows of all of them.
        left_at: u64,
        /// When it became a member.
        since: u64,
        /// Of the store as it was read.
        revision: u64,
    },
    Gone,
    Anothers,
}

impl ClusterStore {
    /// Writes where a site's application runs, if what stands there has the epoch `seen` (None: nothing stands there), and that
    /// `from` has lost a site. One round trip to etcd, and it does not wait for the watch. An error leaves open whether it was
    /// written.
    pub async fn place(
        &self,
        placement: Placement,
        seen: Option<u64>,
        from: Option<&NodeName>,
    ) -> Result<Claim, ClusterError> {
        self.place_on(placement, seen, from, Basis::default()).await
    }

    /// The same, if all is as `basis` says.
    pub async fn place_on(
        &self,
        placement: Placement,
        seen: Option<u64>,
        from: Option<&NodeName>,
        basis: Basis,
    ) -> Result<Claim, ClusterError> {
        let (inner, from) = (self.inner.clone(), from.cloned());
        self.on_own(async move { inner.place(&placement, seen, from.as_ref(), &basis).await }).await
    }

    /// Marks a node that may be dead: from then on it has no authority from the store before it has taken the mark away. Returns the
    /// revision at which the mark that stands now was made, by this call or before. None: its record is not the one that was looked
    /// at, and what it makes of a mark is not known.
    pub async fn doubt(&self, node: &NodeRecord, by: &NodeName) -> Result<Option<u64>, ClusterError> {
        let inner = self.inner.clone();
        let (key, record) = (inner.keys.doubt(&node.name), inner.keys.record(Kind::Node, node.name.as_str()));
        let (by, is_same) = (by.to_string(), keys::stands(&record, keys::json(node)));
        self.on_own(async move {
            let txn = Txn {
                compare: [&is_same[..], &[keys::is_absent(&key)]].concat(),
                success: vec![keys::putting(&key, by)],
                failure: vec![keys::getting(&key)],
            };
            let answer = inner.change(txn, DOUBT_WAIT).await?.value;
            if answer.succeeded {
                return Ok(Some(keys::unsigned(answer.header.unwrap_or_default().revision)));
            }
            // Whoever counts on it compares the record anew.
            let stands = super::watch::raw_pairs(answer.responses).into_iter().next().flatten();
            Ok(stands.map(|stands| keys::unsigned(stands.create_revision)))
        })
        .await
    }

    /// A node as of no earlier than this call. None: nothing is known of it.
    pub async fn seen(&self, node: &NodeName) -> Result<Option<Seen>, ClusterError> {
        let inner = self.inner.clone();
        let keys = [inner.keys.record(Kind::Node, node.as_str()), inner.keys.removed(node)];
        self.on_own(async move {
            let look = Txn { success: keys.iter().map(|key| keys::getting(key)).collect(), ..Txn::default() };
            let answer: TxnAnswer = inner.client.ask(RAW_TXN, look, CHANGE_WAIT).await?.value;
            let [record, removed] = inner.found(answer.responses)?.try_into().unwrap_or_default();
            if let Some(record) = record {
                return Ok(Some(Seen::Member(Box::new(read_node(&record.value)?))));
            }
            Ok(removed.map(|removed| Seen::Removed { fence_ms: read_fence(&removed.value) }))
        })
        .await
    }

    /// Where a site's application runs, as of no earlier than this call.
    pub async fn placement_now(&self, site: &SiteName) -> Result<Option<Placement>, ClusterError> {
        let inner = self.inner.clone();
        let key = inner.keys.record(Kind::Placement, site.as_str());
        self.on_own(async move {
            let answer: RangeAnswer = inner.client.ask(RANGE, keys::get(&key), CHANGE_WAIT).await?.value;
            let found = answer.kvs.into_iter().next().map(|kv| inner.opened(kv)).transpose()?;
            found.map(|kv| read_placement(&kv.value)).transpose()
        })
        .await
    }

    /// Takes away the placement that a removed site has left behind. Only for the node it names, once that has known for longer
    /// than any authority lasts that the site is gone: the next placement of the name begins anew, without a wait. False: there
    /// is a site of that name again, or the placement is another one.
    pub async fn forget(&self, placement: &Placement) -> Result<bool, ClusterError> {
        let inner = self.inner.clone();
        let (site, epoch) = (placement.site.clone(), placement.epoch);
        self.on_own(async move { inner.forget(&site, epoch).await }).await
    }

    /// The node `heir` writes the placement that a removed site has left behind under the next epoch, without `from`, with the same
    /// care as [`ClusterStore::place`]. False: as of [`ClusterStore::forget`], or `heir` is no member; an earlier attempt may still be on
    /// its way.
    pub async fn inherit(
        &self,
        placement: Placement,
        from: &NodeName,
        heir: &NodeName,
    ) -> Result<bool, ClusterError> {
        let inner = self.inner.clone();
        let (left, heir) = (inner.keys.left(from), inner.keys.record(Kind::Node, heir.as_str()));
        self.on_own(async move { inner.inherit(&placement, left, &heir).await }).await
    }

    /// etcd's revision up to which everything is in the replica, and was told to whom this store tells changes. 0: nothing
    /// since this process began.
    pub fn applied(&self) -> u64 {
        *self.inner.applied.borrow()
    }

    /// Whether this node's record is still the one with this id: one linearizable read, so that its answer is no older than
    /// this call. A mark against the node is taken away first ([`ClusterStore::doubt`]). Each question costs no more than `within`.
    pub async fn confirm(
        &self,
        node: &NodeName,
        id: &str,
        within: Duration,
    ) -> Result<Confirmed, ClusterError> {
        let (inner, id) = (self.inner.clone(), id.to_owned());
        let (key, left) = (inner.keys.record(Kind::Node, node.as_str()), inner.keys.left(node));
        let doubt = inner.keys.doubt(node);
        self.on_own(async move {
            let mut look = Txn {
                success: vec![keys::getting(&key), keys::getting(&left), keys::getting(&doubt)],
                ..Txn::default()
            };
            for _ in 0..TRIES_MAX {
                let answer: TxnAnswer = inner.client.ask_soon(RAW_TXN, look, within).await?;
                let revision = keys::unsigned(answer.header.unwrap_or_default().revision);
                let [record, left_by, mark] = inner.found(answer.responses)?.try_into().unwrap_or_default();
                let Some(record) = record else { return Ok(Confirmed::Gone) };
                let node = read_node(&record.value)?;
                if node.id != id {
                    return Ok(Confirmed::Anothers);
                }
                let Some(mark) = mark else {
                    let left_at = left_by.map_or(0, |left| keys::unsigned(left.mod_revision));
                    let since = keys::unsigned(record.create_revision);
                    return Ok(Confirmed::Ours { draining: node.draining, left_at, since, revision });
                };
                // Whoever has marked this node counts on it that nothing read before this is worth anything any more.
                look = Txn {
                    compare: vec![keys::is_made(&doubt, keys::unsigned(mark.create_revision))],
                    success: vec![keys::getting(&key), keys::getting(&left), keys::deleting(&doubt)],
                    failure: vec![keys::getting(&key), keys::getting(&left), keys::getting(&doubt)],
                };
            }
            Err(ClusterError::Contended { tries: TRIES_MAX })
        })
        .await
    }

    /// Makes this machine a member, or brings its record up to date where it is one already; whether it is being drained stays, and so
    /// does a fence that is longer, until [`ClusterStore::set_fence`]. Returns the record that stands then.
    pub async fn join(&self, node: NodeRecord) -> Result<NodeRecord, ClusterError> {
        let inner = self.inner.clone();
        self.on_own(async move { inner.join(node).await }).await
    }

    /// Makes this machine a member together with these changes, in one transaction.
    pub async fn admit(&self, node: NodeRecord, changes: Vec<PkiChange>) -> Result<Admission, ClusterError> {
        super::pki::check(&changes)?;
        let inner = self.inner.clone();
        self.on_own(async move { inner.admit(&node, &changes).await }).await
    }

    /// Brings the record of a member up to date, as [`ClusterStore::join`] does. One that was removed stays so.
    pub async fn refresh(&self, node: NodeRecord) -> Result<NodeRecord, ClusterError> {
        let inner = self.inner.clone();
        self.on_own(async move { inner.refresh(&node).await }).await
    }

    pub async fn set_draining(&self, node: &NodeName, draining: bool) -> Result<(), ClusterError> {
        let (inner, name) = (self.inner.clone(), node.clone());
        self.on_own(async move {
            inner.change_node(&name, |record| Ok(NodeRecord { draining, ..record.clone() })).await?;
            inner.show_written().await;
            Ok(())
        })
        .await
    }

    /// From now on the node serves no longer than this without a word from the store, nor does what it was before.
    pub async fn set_fence(&self, node: &NodeName, id: &str, fence_ms: u32) -> Result<(), ClusterError> {
        let (inner, name, id) = (self.inner.clone(), node.clone(), id.to_owned());
        self.on_own(async move {
            let set = |record: NodeRecord| NodeRecord { fence_ms, ..record };
            inner.change_node(&name, |record| its_own(record, &id).map(set)).await
        })
        .await
    }

    /// This node knows all members that there were at this revision.
    pub async fn knows(&self, node: &NodeName, id: &str, revision: u64) -> Result<(), ClusterError> {
        let (inner, name, id) = (self.inner.clone(), node.clone(), id.to_owned());
        self.on_own(async move {
            let set = |record: NodeRecord| NodeRecord { knows: revision.max(record.knows), ..record };
            inner.change_node(&name, |record| its_own(record, &id).map(set)).await
        })
        .await
    }

    /// Takes a node out of the cluster. Refused while placements name it, unless `forced`: then its sites move when somebody
    /// asks for them.
    pub async fn remove(&self, node: &NodeName, forced: bool) -> Result<(), ClusterError> {
        self.remove_with(node, forced, Vec::new()).await.map(drop)
    }

    /// The same together with these changes, in one transaction. False: a value that was counted on is another one, and nothing was
    /// done.
    pub async fn remove_with(
        &self,
        node: &NodeName,
        forced: bool,
        changes: Vec<PkiChange>,
    ) -> Result<bool, ClusterError> {
        super::pki::check(&changes)?;
        let (inner, name) = (self.inner.clone(), node.clone());
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

/// 0 is what is not known.
fn read_fence(value: &[u8]) -> u32 {
    str::from_utf8(value).ok().and_then(|value| value.parse().ok()).unwrap_or(0)
}

/// A record that only this machine changes.
fn its_own(record: &NodeRecord, id: &str) -> Result<NodeRecord, ClusterError> {
    if record.id == id {
        return Ok(record.clone());
    }
    Err(ClusterError::NameTaken { name: record.name.to_string(), peer: record.peer.clone() })
}

impl Inner {
    async fn place(
        &self,
        placement: &Placement,
        seen: Option<u64>,
        from: Option<&NodeName>,
        basis: &Basis,
    ) -> Result<Claim, ClusterError> {
        let site = self.keys.record(Kind::Site, placement.site.as_str());
        let node = self.keys.record(Kind::Node, placement.node.as_str());
        let key = self.keys.record(Kind::Placement, placement.site.as_str());
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
        let txn = Txn {
            compare,
            success,
            failure: vec![keys::getting(&key), keys::getting(&site), keys::getting(&node)],
        };
        let answer = self.change(txn, CHANGE_WAIT).await?;
        if answer.value.succeeded {
            return Ok(Claim::Won);
        }
        let [stored, site, node] =
            super::watch::raw_pairs(answer.value.responses).try_into().unwrap_or_default();
        let stored = stored.map(|kv| self.opened(kv)).transpose()?;
        let stored = stored.map(|kv| read_placement(&kv.value)).transpose()?;
        if answer.repeated && stored.as_ref() == Some(placement) {
            return Ok(Claim::Won);
        }
        if site.is_none() || node.is_none() {
            return Ok(Claim::Void);
        }
        let is_as_seen = stored.as_ref().map(|stored| stored.epoch) == seen;
        if is_as_seen && *basis != Basis::default() { Ok(Claim::Otherwise) } else { Ok(Claim::Lost(stored)) }
    }

    /// What is to be so of the node that loses the site of this placement.
    fn of_who_loses(&self, from: &NodeName, placement: &str, basis: &Basis) -> Vec<Compare> {
        let record = self.keys.record(Kind::Node, from.as_str());
        let mut compare = Vec::new();
        match &basis.from {
            Some(Seen::Member(seen)) => compare.extend(keys::stands(&record, keys::json(seen))),
            Some(Seen::Removed { fence_ms }) => {
                compare.push(keys::is_absent(&record));
                compare.extend(keys::stands(&self.keys.removed(from), fence_ms.to_string().into_bytes()));
            }
            None => {}
        }
        if let Some(mark) = basis.mark {
            compare.extend([
                keys::is_made(&self.keys.doubt(from), mark),
                keys::is_no_newer(&record, mark),
                keys::is_no_newer(placement, mark),
            ]);
        }
        compare
    }

    async fn forget(&self, site: &SiteName, epoch: u64) -> Result<bool, ClusterError> {
        let key = self.keys.record(Kind::Placement, site.as_str());
        let mut compare = vec![keys::is_absent(&self.keys.record(Kind::Site, site.as_str()))];
        compare.extend(keys::epoch_is(&key, epoch));
        let txn = Txn { compare, success: vec![keys::deleting(&key)], failure: vec![keys::getting(&key)] };
        let answer = self.change(txn, CHANGE_WAIT).await?;
        let stands = super::watch::raw_pairs(answer.value.responses).into_iter().next().flatten();
        // An earlier attempt whose answer was lost may have done it.
        Ok(answer.value.succeeded || (answer.repeated && stands.is_none()))
    }

    async fn inherit(&self, placement: &Placement, left: String, heir: &str) -> Result<bool, ClusterError> {
        let key = self.keys.record(Kind::Placement, placement.site.as_str());
        let mut compare = vec![
            keys::is_absent(&self.keys.record(Kind::Site, placement.site.as_str())),
            keys::is_there(heir),
        ];
        compare.extend(keys::epoch_is(&key, placement.epoch - 1));
        let txn = Txn {
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

    async fn admit(&self, node: &NodeRecord, changes: &[PkiChange]) -> Result<Admission, ClusterError> {
        let key = self.keys.record(Kind::Node, node.name.as_str());
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
        let txn = Txn { compare, success, failure };
        let answer = self.change(txn, CHANGE_WAIT).await?;
        if answer.value.succeeded {
            return Ok(Admission::Joined);
        }
        let [format, revision, seeding, found] =
            super::watch::raw_pairs(answer.value.responses).try_into().unwrap_or_default();
        let format = format.map(|kv| kv.value);
        super::watch::check_head(self, format.as_deref(), revision.is_some(), seeding.is_some())?;
        let Some(found) = found else { return Ok(Admission::Changed) };
        let found = read_node(&self.opened(found)?.value)?;
        // An earlier attempt whose answer was lost may have done it.
        if answer.repeated && found.id == node.id {
            return Ok(Admission::Joined);
        }
        Err(ClusterError::NameTaken { name: found.name.to_string(), peer: found.peer })
    }

    /// Also where that changes nothing: what this machine has asked for in an earlier life of it, and lies somewhere, is void then.
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

    /// So that a command that returned is visible here; if that takes too long, it is done all the same.
    async fn show_written(&self) {
        let _late = self.wait_in_step(VISIBLE_WAIT).await;
    }

    /// Returns what was written. None of `change`: nothing.
    async fn write_node(
        &self,
        name: &NodeName,
        change: impl Fn(&NodeRecord) -> Result<Option<NodeRecord>, ClusterError>,
    ) -> Result<Option<NodeRecord>, ClusterError> {
        let key = self.keys.record(Kind::Node, name.as_str());
        for _ in 0..TRIES_MAX {
            let answer = self.client.ask::<_, RangeAnswer>(RANGE, keys::get(&key), CHANGE_WAIT).await?;
            let Some(kv) = answer.value.kvs.into_iter().next() else {
                return Err(ClusterError::NoNode { name: name.to_string() });
            };
            let written_at = keys::unsigned(kv.mod_revision);
            let Some(after) = change(&read_node(&self.opened(kv)?.value)?)? else { return Ok(None) };
            let txn = Txn {
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

    /// Only if no placement was written since those that were looked through, so that none names a node that is gone.
    async fn remove(
        self: std::sync::Arc<Self>,
        name: &NodeName,
        forced: bool,
        changes: &[PkiChange],
    ) -> Result<bool, ClusterError> {
        let key = self.keys.record(Kind::Node, name.as_str());
        for _ in 0..TRIES_MAX {
            let head = self.client.ask::<_, RangeAnswer>(RANGE, keys::get(&key), CHANGE_WAIT).await?.value;
            let Some(kv) = head.kvs.first() else {
                return Err(ClusterError::NoNode { name: name.to_string() });
            };
            // One that cannot be read is removed all the same: what it said is not known then.
            let record = self.opened(kv.clone()).and_then(|kv| read_node(&kv.value));
            let fence_ms = record.map_or(0, |record| record.fence_ms);
            let mut compare = vec![keys::is_of(&key, keys::unsigned(kv.mod_revision))];
            if !forced {
                self.wait_in_step(CHANGE_WAIT).await?;
                let (inner, node) = (self.clone(), name.clone());
                let looked = tokio::task::spawn_blocking(move || inner.refuse_if_used(&node));
                looked.await.map_err(|error| lost(&error))??;
                let seen = keys::unsigned(head.header.clone().unwrap_or_default().revision);
                compare.push(keys::are_no_newer(&self.keys.records(Kind::Placement), seen));
            }
            compare.extend(changes.iter().filter_map(|change| change.compare(&self.keys)));
            let mut success = vec![
                keys::deleting(&key),
                keys::deleting(&self.keys.doubt(name)),
                keys::putting(&self.keys.removed(name), fence_ms.to_string()),
            ];
            success.extend(changes.iter().map(|change| change.operation(&self.keys)));
            let mut failure = vec![keys::getting(&key)];
            failure.extend(changes.iter().map(|change| change.getting(&self.keys)));
            let txn = Txn { compare, success, failure };
            let answer = self.change(txn, CHANGE_WAIT).await?;
            if answer.value.succeeded {
                return Ok(true);
            }
            let mut found = super::watch::raw_pairs(answer.value.responses).into_iter();
            let is_gone = found.next().flatten().is_none();
            let stands = |(change, found): (&PkiChange, Option<super::wire::KeyValue>)| {
                change.is_as_expected(found.map_or(0, |kv| keys::unsigned(kv.mod_revision)))
            };
            // An earlier attempt whose answer was lost may have done it.
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
                // What a removed site has left behind runs nowhere.
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
