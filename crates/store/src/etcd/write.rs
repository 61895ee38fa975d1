//! Changes configuration. A transaction is planned upon the replica and committed only if
//! configuration was not changed since then. All writers compare and set the key `revision`. If two
//! come together, one plans again.
//!
//! A transaction that is too long for etcd goes in parts, each of which leads to a valid state
//! (`parts`). If one fails, the parts before it stay, and the error says so. The same transaction
//! again does the rest.
//!
//! Not here: which changes are mistakes (`plan`), applying committed changes (`watch`).

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::client::RANGE;
use super::error::ClusterError;
use super::keys::{self, RevisionCount};
use super::parts::{self, TransactionPart};
use super::raise;
use super::wire::{RangeResponse, TxnRequest};
use crate::etcd::inner::{StoreInner, VISIBLE_WAIT, thread_lost};
use crate::redb::ReplicaPosition;
use crate::{ChangeMode, CommittedChanges, Store, StoreError, TransactionError};
use nagaya_records::record::RecordChange;

/// Time for the replica to be known up to date before planning, and for each reply of etcd.
const WRITE_WAIT: Duration = Duration::from_secs(5);

/// Plans of one transaction, each overtaken by another writer.
const TRIES_MAX: u32 = 16;

pub(super) async fn transaction(
    inner: Arc<StoreInner>,
    changes: Vec<RecordChange>,
    mode: ChangeMode,
) -> Result<CommittedChanges, TransactionError> {
    let mut done = WriteProgress::default();
    for _ in 0..TRIES_MAX {
        // A refusal, or the result that nothing differs, must not rest on an old state.
        inner.wait_in_step(WRITE_WAIT).await.map_err(StoreError::from)?;
        let PlannedTransaction { parts, reached, left_uid, has_rules } =
            plan(&inner, done.left_of(&changes), mode).await?;
        if has_rules {
            raise::require(&inner, keys::HAS_RULES).await.map_err(StoreError::from)?;
        }
        if parts.is_empty() {
            return done.committed(&inner).await;
        }
        // This comes before the uid can be given again. If the transaction fails after this, a few
        // uids stay unused.
        if let Some(uid) = left_uid {
            raise_next_uid(&inner, uid + 1).await?;
        }
        match commit(&inner, parts, reached, &mut done).await {
            Ok(true) => return done.committed(&inner).await,
            Ok(false) => {}
            Err(error) => return Err(StoreError::from(done.with(error)).into()),
        }
    }
    Err(StoreError::from(done.with(ClusterError::Contended { tries: TRIES_MAX })).into())
}

struct PlannedTransaction {
    parts: Vec<TransactionPart>,
    reached: ReplicaPosition,
    /// The largest uid that a tenant gives up.
    left_uid: Option<u32>,
    /// Some change is of a rule.
    has_rules: bool,
}

async fn plan(
    inner: &Arc<StoreInner>,
    changes: Vec<RecordChange>,
    mode: ChangeMode,
) -> Result<PlannedTransaction, TransactionError> {
    let inner = inner.clone();
    let planned = tokio::task::spawn_blocking(move || {
        let (plan, reached) = inner.replica.plan(changes, mode)?;
        let has_rules = !plan.rules.is_empty();
        let left_uid = plan.left_uid();
        let parts = parts::split(&inner.keys, plan).map_err(StoreError::from)?;
        Ok(PlannedTransaction { parts, reached, left_uid, has_rules })
    });
    planned.await.map_err(|error| StoreError::from(thread_lost(&error)))?
}

/// Sends the parts one after the other. Returns false if another writer changed configuration, so
/// that the rest must be planned again.
async fn commit(
    inner: &StoreInner,
    parts: Vec<TransactionPart>,
    mut reached: ReplicaPosition,
    done: &mut WriteProgress,
) -> Result<bool, ClusterError> {
    done.parts = done.done + parts.len();
    let revision_key = inner.keys.revision();
    for part in parts {
        let by = name()?;
        let count = RevisionCount { count: reached.count + 1, by: by.clone() };
        let mut success = part.operations;
        success.push(keys::putting(&revision_key, keys::json(&count)));
        let txn = TxnRequest {
            compare: vec![
                keys::is_there(&revision_key),
                keys::is_absent(&inner.keys.seeding()),
                keys::is_no_newer(&revision_key, reached.revision),
            ],
            success,
            failure: vec![keys::getting(&revision_key)],
        };
        let answer = inner.change(txn, WRITE_WAIT).await?;
        let header = answer.value.header.unwrap_or_default();
        if !answer.value.succeeded {
            let found = inner.found_first(answer.value.responses)?;
            let found: Option<RevisionCount> = found.and_then(|value| serde_json::from_slice(&value).ok());
            // An earlier attempt whose reply was lost has done it.
            if !(answer.repeated && found.is_some_and(|found| found.by == by)) {
                return Ok(false);
            }
        }
        reached = ReplicaPosition { revision: keys::unsigned(header.revision), count: count.count };
        done.did(part.changes, reached.revision);
    }
    Ok(true)
}

/// The present state of a transaction.
#[derive(Default)]
struct WriteProgress {
    changes: Vec<RecordChange>,
    done: usize,
    parts: usize,
    revision: u64,
}

impl WriteProgress {
    fn did(&mut self, changes: Vec<RecordChange>, revision: u64) {
        self.done += 1;
        self.changes.extend(changes);
        self.revision = revision;
    }

    /// Returns the changes without deletions that are done already: repeating one would be a
    /// mistake.
    fn left_of(&self, changes: &[RecordChange]) -> Vec<RecordChange> {
        let dropped: HashSet<(u8, &str)> = self
            .changes
            .iter()
            .filter_map(|change| match change {
                RecordChange::DropTenant(name) => Some((0, name.as_str())),
                RecordChange::DropSite(name) => Some((1, name.as_str())),
                RecordChange::DropSetting(key) => Some((2, key.as_str())),
                RecordChange::DropRule(name) => Some((3, name.as_str())),
                _ => None,
            })
            .collect();
        let is_left = |change: &&RecordChange| match change {
            RecordChange::DropTenant(name) => !dropped.contains(&(0, name.as_str())),
            RecordChange::PutTenant(tenant) => !dropped.contains(&(0, tenant.name.as_str())),
            RecordChange::DropSite(name) => !dropped.contains(&(1, name.as_str())),
            RecordChange::PutSite(site) => !dropped.contains(&(1, site.name.as_str())),
            RecordChange::DropSetting(key) => !dropped.contains(&(2, key.as_str())),
            RecordChange::PutSetting(setting) => !dropped.contains(&(2, &*setting.key)),
            RecordChange::DropRule(name) => !dropped.contains(&(3, name.as_str())),
            RecordChange::PutRule(rule) => !dropped.contains(&(3, rule.name.as_str())),
            _ => true,
        };
        changes.iter().filter(is_left).cloned().collect()
    }

    /// Waits so that a completed command is visible here. If that takes too long, it is committed
    /// all the same.
    async fn committed(self, inner: &StoreInner) -> Result<CommittedChanges, TransactionError> {
        let _late = inner.wait_applied(self.revision, VISIBLE_WAIT).await;
        Ok(CommittedChanges { revision: inner.replica.revision()?, changes: self.changes })
    }

    fn with(&self, error: ClusterError) -> ClusterError {
        match self.done {
            0 => error,
            done => ClusterError::Partly { done, parts: self.parts.max(done + 1), cause: Box::new(error) },
        }
    }
}

/// Returns a unique name.
pub(super) fn name() -> Result<String, ClusterError> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| ClusterError::Behind {
        detail: format!("the system gives no random numbers: {error}"),
    })?;
    Ok(format!("{:016x}", u64::from_le_bytes(bytes)))
}

// === Uids ===

pub(super) async fn allocate_uid(inner: Arc<StoreInner>, base: u32) -> Result<u32, StoreError> {
    inner.wait_in_step(WRITE_WAIT).await?;
    for _ in 0..TRIES_MAX {
        let (next, revision) = read_next_uid(&inner).await?;
        let first = next.max(base).max(1);
        let planned = {
            let inner = inner.clone();
            tokio::task::spawn_blocking(move || inner.replica.free_uid(first))
        };
        let uid = planned.await.map_err(|error| thread_lost(&error))??.ok_or(StoreError::NoUid { base })?;
        let key = inner.keys.next_uid();
        let txn = TxnRequest {
            compare: vec![keys::is_there(&inner.keys.revision()), keys::is_of(&key, revision)],
            success: vec![keys::putting(&key, (u64::from(uid) + 1).to_string())],
            failure: Vec::new(),
        };
        // If it was done without a reply, one uid stays unused.
        let answer = inner.change(txn, WRITE_WAIT).await;
        if answer.map_err(ClusterError::from)?.value.succeeded {
            return Ok(uid);
        }
    }
    Err(ClusterError::Contended { tries: TRIES_MAX }.into())
}

/// Makes sure that no uid below `to` is allocated any more.
pub(super) async fn raise_next_uid(inner: &StoreInner, to: u32) -> Result<(), StoreError> {
    for _ in 0..TRIES_MAX {
        let (next, revision) = read_next_uid(inner).await?;
        if next >= to {
            return Ok(());
        }
        let key = inner.keys.next_uid();
        let txn = TxnRequest {
            compare: vec![keys::is_there(&inner.keys.revision()), keys::is_of(&key, revision)],
            success: vec![keys::putting(&key, to.to_string())],
            failure: Vec::new(),
        };
        let answer = inner.change(txn, WRITE_WAIT).await;
        if answer.map_err(ClusterError::from)?.value.succeeded {
            return Ok(());
        }
    }
    Err(ClusterError::Contended { tries: TRIES_MAX }.into())
}

pub(super) async fn next_uid(inner: Arc<StoreInner>) -> Result<u32, StoreError> {
    Ok(read_next_uid(&inner).await?.0)
}

/// Returns it with the revision at which it was last changed.
async fn read_next_uid(inner: &StoreInner) -> Result<(u32, u64), ClusterError> {
    let answer = inner.client.ask::<_, RangeResponse>(RANGE, keys::get(&inner.keys.next_uid()), WRITE_WAIT);
    let Some(kv) = answer.await?.value.kvs.into_iter().next() else { return Ok((0, 0)) };
    let kv = inner.opened(kv)?;
    let next = str::from_utf8(&kv.value).ok().and_then(|text| text.parse::<u64>().ok()).ok_or_else(|| {
        ClusterError::Refused { detail: "its next_uid is not a number: somebody else wrote there".into() }
    })?;
    Ok((u32::try_from(next).unwrap_or(u32::MAX), keys::unsigned(kv.mod_revision)))
}
