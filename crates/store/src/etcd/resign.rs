//! Writes values again that the current key has not signed, and, for repair, values that do not
//! count.
//!
//! Each is written only if it was not changed since the check, in steps that etcd takes at once.
//! Nodes serve and change records meanwhile. Not here: which values count (`signed`), when it is
//! time (`nagaya`'s supervisor).

use std::sync::Arc;
use std::time::Duration;

use super::client::RANGE;
use super::error::ClusterError;
use super::keys::{self, KeyMeaning, RevisionCount};
use super::parts::OPERATIONS_MAX;
use super::wire::{Compare, KeyValue, RangeRequest, RangeResponse, RequestOp, TxnRequest};
use crate::etcd::inner::{ClusterStore, StoreInner, thread_lost};
use crate::{PAGE_LEN_MAX, RecordKind, Store, StoreError};

const WAIT: Duration = Duration::from_secs(10);

/// Keys checked in one step.
const PAGE_LEN: i64 = 100;

/// A transaction is sent when it has grown to this, bytes.
const STEP_LEN: usize = 512 << 10;

const _: () = assert!(PAGE_LEN as usize <= OPERATIONS_MAX);
const _: () = assert!(STEP_LEN + 2 * crate::RECORD_LEN_MAX < (3 << 20) / 2);

/// Result of one pass through all values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ResignResult {
    /// Written again.
    pub written: u64,
    /// Changed by another writer meanwhile: another pass is needed.
    pub overtaken: u64,
    /// They do not count, and were left as they are.
    pub refused: u64,
    /// They did not count. Now this node's known record is there, or nothing if it knows none.
    pub repaired: u64,
}

impl ResignResult {
    /// Returns whether everything that counts is signed with the current key.
    pub fn is_complete(&self) -> bool {
        self.written == 0 && self.overtaken == 0 && self.repaired == 0
    }
}

impl ClusterStore {
    /// Writes all values again that the current key has not signed. Nodes write their own loads all
    /// the time, so these are left out.
    pub async fn resign_all(&self) -> Result<ResignResult, ClusterError> {
        let inner = self.inner.clone();
        self.on_own(async move { inner.resign(false).await }).await
    }

    /// Does the same, and replaces each value that does not count with this node's known one.
    pub async fn repair(&self) -> Result<ResignResult, ClusterError> {
        let inner = self.inner.clone();
        self.on_own(async move {
            inner.wait_in_step(WAIT).await?;
            inner.resign(true).await
        })
        .await
    }
}

/// The rewrite of one value, if it was written at `revision`.
struct ValueRewrite {
    key: String,
    revision: u64,
    /// `None` deletes it.
    body: Option<Vec<u8>>,
    is_repair: bool,
}

impl ValueRewrite {
    fn len(&self) -> usize {
        self.key.len() + self.body.as_ref().map_or(0, Vec::len)
    }

    fn compare(&self) -> Compare {
        keys::is_of(&self.key, self.revision)
    }

    fn operation(&self) -> RequestOp {
        match &self.body {
            Some(body) => keys::putting(&self.key, body.clone()),
            None => keys::deleting(&self.key),
        }
    }
}

impl StoreInner {
    async fn resign(self: Arc<Self>, is_repair: bool) -> Result<ResignResult, ClusterError> {
        let all = self.keys.all();
        let range_end = keys::after_all(&all);
        let mut key = all.into_bytes();
        let mut done = ResignResult::default();
        loop {
            let page = RangeRequest {
                key,
                range_end: range_end.clone(),
                limit: PAGE_LEN,
                ..RangeRequest::default()
            };
            let page: RangeResponse = self.client.ask(RANGE, page, WAIT).await?.value;
            let last = page.kvs.last().map(|kv| kv.key.clone());
            let mut rewrites = Vec::new();
            for kv in page.kvs {
                rewrites.extend(self.clone().rewrite(kv, is_repair, &mut done).await?);
            }
            self.send_rewrites(rewrites, &mut done).await?;
            match last {
                Some(mut last) if page.more => {
                    last.push(0);
                    key = last;
                }
                _ => return Ok(done),
            }
        }
    }

    async fn rewrite(
        self: Arc<Self>,
        kv: KeyValue,
        is_repair: bool,
        done: &mut ResignResult,
    ) -> Result<Option<ValueRewrite>, ClusterError> {
        let revision = keys::unsigned(kv.mod_revision);
        let key = match String::from_utf8(kv.key) {
            Ok(key) if !matches!(self.keys.meaning(key.as_bytes()), KeyMeaning::Present(_)) => key,
            _ => return Ok(None),
        };
        match self.signer.open(key.as_bytes(), &kv.value, revision) {
            Ok(opened) if opened.is_current => Ok(None),
            Ok(opened) => Ok(Some(ValueRewrite { key, revision, body: Some(opened.body), is_repair: false })),
            Err(_) if is_repair => {
                let inner = self.clone();
                let looked = key.clone();
                let known = tokio::task::spawn_blocking(move || inner.known_body(looked.as_bytes()));
                let body = known.await.map_err(|error| thread_lost(&error))??;
                Ok(Some(ValueRewrite { key, revision, body, is_repair: true }))
            }
            Err(error) => {
                done.refused += 1;
                self.refused(&self.keys.label(key.as_bytes()), error.to_string());
                Ok(None)
            }
        }
    }

    /// Sends all of a step at once; one by one if another writer has changed any of them.
    async fn send_rewrites(
        &self,
        rewrites: Vec<ValueRewrite>,
        done: &mut ResignResult,
    ) -> Result<(), ClusterError> {
        let mut rest = &rewrites[..];
        while !rest.is_empty() {
            let mut len = 0;
            let fits = |rewrite: &&ValueRewrite| {
                len += rewrite.len();
                len <= STEP_LEN
            };
            let count = rest.iter().take_while(fits).count().max(1);
            let (step, after) = rest.split_at(count);
            if !self.send_step(step, done).await? {
                for one in step {
                    if !self.send_step(std::slice::from_ref(one), done).await? {
                        done.overtaken += 1;
                    }
                }
            }
            rest = after;
        }
        Ok(())
    }

    async fn send_step(&self, step: &[ValueRewrite], done: &mut ResignResult) -> Result<bool, ClusterError> {
        let mut compare: Vec<Compare> = step.iter().map(ValueRewrite::compare).collect();
        compare.push(keys::is_there(&self.keys.revision()));
        let success = step.iter().map(ValueRewrite::operation).collect();
        let is_done =
            self.change(TxnRequest { compare, success, failure: Vec::new() }, WAIT).await?.value.succeeded;
        if is_done {
            let repaired = step.iter().filter(|rewrite| rewrite.is_repair).count() as u64;
            done.repaired += repaired;
            done.written += step.len() as u64 - repaired;
        }
        Ok(is_done)
    }

    /// Returns the body that this node knows for the key. `None` if it should not exist.
    fn known_body(&self, key: &[u8]) -> Result<Option<Vec<u8>>, ClusterError> {
        let replica = &self.replica;
        Ok(match self.keys.meaning(key) {
            KeyMeaning::Record(kind, name) => match kind {
                RecordKind::Tenant => replica.tenant(name)?.map(|record| keys::json(&record)),
                RecordKind::Site => replica.site(name)?.map(|record| keys::json(&record)),
                RecordKind::Setting => replica.setting(name)?.map(|record| keys::json(&record)),
                RecordKind::Rule => replica.rule(name)?.map(|record| keys::json(&record)),
                RecordKind::Node => replica.node(name)?.map(|record| keys::json(&record)),
                RecordKind::Placement => {
                    replica.placement(name)?.map(|placement| keys::placement_value(&placement))
                }
                RecordKind::TicketKeys => replica.ticket_keys()?.map(|record| keys::json(&record)),
            },
            KeyMeaning::Revision => {
                let count = replica.reached()?.count;
                Some(keys::json(&RevisionCount { count, by: super::write::name()? }))
            }
            _ if key == self.keys.next_uid().as_bytes() => {
                Some(self.next_free_uid()?.to_string().into_bytes())
            }
            // It is then unknown how long a removed node may have served, which 0 means.
            _ if self.keys.label(key).starts_with("removed/") => Some(b"0".to_vec()),
            _ => None,
        })
    }

    /// Returns a uid above all present ones. Those of removed tenants are unknown.
    fn next_free_uid(&self) -> Result<u64, StoreError> {
        let mut next = u64::from(self.replica.next_uid()?);
        let mut after: Option<String> = None;
        loop {
            let page = self.replica.tenants(after.as_deref(), PAGE_LEN_MAX)?;
            let Some(last) = page.last() else { return Ok(next) };
            after = Some(last.name.to_string());
            next = page.iter().map(|tenant| u64::from(tenant.uid) + 1).fold(next, u64::max);
        }
    }
}
