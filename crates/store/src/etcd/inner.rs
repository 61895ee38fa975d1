//! State that the thread of the cluster's store shares with its callers: client, replica and
//! progress.
//!
//! Not here: opening it (`etcd`), what runs in its thread (`watch`, `presence`, `raise`).

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use nagaya_base::Code;
use nagaya_records::names::NodeName;
use nagaya_records::record::RecordChange;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch as channel};
use tokio::time::{Instant, timeout_at};

use super::client::{EtcdClient, EtcdFailure, EtcdReply, RAW_TXN};
use super::error::ClusterError;
use super::keys::{self, KeySpace};
use super::presence::{NodePresence, WantedPresence};
use super::refusals::StandingRefusals;
use super::signed::ValueSigner;
use super::wire::{KeyValue, RequestKind, RequestOp, ResponseOp, TxnRequest, TxnResponse, raw_pairs};
use crate::StoreError;
use crate::redb::{RedbStore, ReplicaPosition};

/// Receives the changes, in an order in which `Table::apply` takes them, and the replica's revision
/// after them.
pub type OnChange = Arc<dyn Fn(Vec<RecordChange>, u64) + Send + Sync>;

/// Time for a write to become visible here.
pub(super) const VISIBLE_WAIT: Duration = Duration::from_secs(2);

/// A node's view of the cluster's store. Dropping it ends the watch and closes the replica's file.
pub struct ClusterStore {
    pub(super) inner: Arc<StoreInner>,
    pub(super) handle: Handle,
    /// Dropped to end the thread.
    pub(super) stop: Option<oneshot::Sender<()>>,
    pub(super) thread: Option<JoinHandle<()>>,
}

/// State that the store's own thread shares with its callers.
pub(super) struct StoreInner {
    pub(super) client: EtcdClient,
    pub(super) keys: KeySpace,
    pub(super) signer: ValueSigner,
    pub(super) replica: Arc<RedbStore>,
    pub(super) on_change: OnChange,
    /// etcd's revision up to which the replica is complete. 0 if nothing was loaded since this
    /// process began.
    pub(super) applied: channel::Sender<u64>,
    /// All that was committed before this moment is in the replica.
    pub(super) in_step: channel::Sender<Option<Instant>>,
    /// Makes the watch find out now whether it is up to date.
    pub(super) nudge: Notify,
    /// Makes the watch compare everything again.
    pub(super) reload: Notify,
    pub(super) state: Mutex<FollowState>,
    pub(super) presences: Mutex<BTreeMap<NodeName, NodePresence>>,
    pub(super) present: channel::Sender<Option<WantedPresence>>,
    pub(super) pki_revision: channel::Sender<u64>,
    /// Format of the cluster's records. 0 if it is unknown since this process began.
    pub(super) format: channel::Sender<u64>,
}

pub(super) struct FollowState {
    pub(super) trouble: Option<ClusterError>,
    pub(super) refused: StandingRefusals,
    pub(super) synced: Instant,
    pub(super) dirty: bool,
    /// Members that do not report that they know the next format.
    pub(super) behind: Vec<String>,
}

impl ClusterStore {
    /// Runs on the store's own thread.
    pub(super) async fn on_own<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, ClusterError>> + Send + 'static,
    ) -> Result<T, ClusterError> {
        match self.handle.spawn(work).await {
            Ok(done) => done,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(closing()),
        }
    }

    /// Runs on the store's own thread, and blocks this one until it is done. The work bounds its
    /// own time.
    pub(super) fn block_on_own<T: Send + 'static, E: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, E>> + Send + 'static,
        closed: impl FnOnce(ClusterError) -> E,
    ) -> Result<T, E> {
        let (done, result) = std::sync::mpsc::sync_channel(1);
        self.handle.spawn(async move { done.send(work.await) });
        result.recv().unwrap_or_else(|_| Err(closed(closing())))
    }
}

pub(super) fn closing() -> ClusterError {
    ClusterError::Behind { detail: "the store is being closed".into() }
}

/// Returns the error for a lost thread of ours.
pub(super) fn thread_lost(error: &tokio::task::JoinError) -> ClusterError {
    ClusterError::Replica { detail: format!("work on it ended early: {error}"), code: Code(201) }
}

impl StoreInner {
    pub(super) fn trouble(&self, error: Option<ClusterError>) {
        self.state.lock().trouble = error;
    }

    pub(super) fn loaded(&self, revision: u64, began: Instant) {
        self.applied(revision);
        // Everything from before the load is here; the watch reports the rest.
        if self.in_step.borrow().is_none() {
            self.in_step_since(began);
        }
    }

    pub(super) fn applied(&self, revision: u64) {
        self.applied.send_if_modified(|known| std::mem::replace(known, revision) != revision);
    }

    pub(super) fn in_step_since(&self, moment: Instant) {
        self.trouble(None);
        self.in_step.send_replace(Some(moment));
    }

    pub(super) async fn wait_in_step(&self, within: Duration) -> Result<(), ClusterError> {
        let began = Instant::now();
        let mut known = self.in_step.subscribe();
        self.nudge.notify_one();
        // The reply may belong to an earlier query, so another one is sent then.
        loop {
            match timeout_at(began + within, known.changed()).await {
                Ok(_) if known.borrow_and_update().is_some_and(|since| since >= began) => return Ok(()),
                Ok(_) => self.nudge.notify_one(),
                Err(_) => return Err(self.behind(within)),
            }
        }
    }

    /// Waits until the commit of this revision of etcd is in the replica.
    pub(super) async fn wait_applied(&self, revision: u64, within: Duration) -> Result<(), ClusterError> {
        let mut known = self.applied.subscribe();
        let waiting = known.wait_for(|applied| *applied >= revision);
        match tokio::time::timeout(within, waiting).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(self.behind(within)),
        }
    }

    /// Returns the known trouble, which is a better reply than a mere timeout.
    pub(super) fn behind(&self, waited: Duration) -> ClusterError {
        let known = self.state.lock().trouble.clone();
        let late = || match self.client.latest() {
            Some(detail) => self.client.unreachable(waited, detail),
            None => ClusterError::Behind {
                detail: format!("it did not catch up within {} ms", waited.as_millis()),
            },
        };
        known.unwrap_or_else(late)
    }

    /// Sends a change. Its values are signed, if the cluster's format has that.
    pub(super) async fn change(
        &self,
        mut txn: TxnRequest,
        within: Duration,
    ) -> Result<EtcdReply<TxnResponse>, EtcdFailure> {
        let is_signed = |operation: &RequestOp| match &operation.request {
            Some(RequestKind::Put(put)) => self.keys.is_signed(&put.key),
            _ => false,
        };
        if txn.success.iter().any(is_signed) && self.is_signing(within).await.map_err(EtcdFailure::Error)? {
            for operation in &mut txn.success {
                self.signer.sign_put(operation, self.client.newest()).map_err(EtcdFailure::Error)?;
            }
        }
        self.client.ask(RAW_TXN, txn, within).await
    }

    /// Returns whether this node signs its values. Fails if it should and has no keys yet.
    pub(super) async fn is_signing(&self, within: Duration) -> Result<bool, ClusterError> {
        if self.signer.is_required() {
            return Ok(true);
        }
        let mut known = self.format.subscribe();
        let format = match tokio::time::timeout(within, known.wait_for(|format| *format > 0)).await {
            Ok(Ok(format)) => *format,
            Ok(Err(_)) | Err(_) => return Err(self.behind(within)),
        };
        match format >= keys::HAS_SIGNATURES {
            true if !self.signer.has_keys() => Err(ClusterError::Behind {
                detail: "the cluster's records are signed, and it has not got their key yet".into(),
            }),
            is_signing => Ok(is_signing),
        }
    }

    /// Returns a read value with its body. Fails if it does not count.
    pub(super) fn opened(&self, mut kv: KeyValue) -> Result<KeyValue, ClusterError> {
        match self.signer.open(&kv.key, &kv.value, keys::unsigned(kv.mod_revision)) {
            Ok(opened) => {
                kv.value = opened.body;
                Ok(kv)
            }
            Err(error) => {
                let place = self.keys.label(&kv.key);
                self.refused(&place, error.to_string());
                Err(ClusterError::Forged { place, why: error.to_string() })
            }
        }
    }

    /// Returns the result of each of these reads, as [`StoreInner::opened`] does.
    pub(super) fn open_found(
        &self,
        outcomes: Vec<ResponseOp>,
    ) -> Result<Vec<Option<KeyValue>>, ClusterError> {
        raw_pairs(outcomes).into_iter().map(|pair| pair.map(|kv| self.opened(kv)).transpose()).collect()
    }

    /// Returns the result of the first of these reads.
    pub(super) fn found_first(&self, outcomes: Vec<ResponseOp>) -> Result<Option<Vec<u8>>, ClusterError> {
        Ok(self.open_found(outcomes)?.into_iter().next().flatten().map(|kv| kv.value))
    }

    pub(super) fn is_sync_due(&self, every: Duration) -> bool {
        self.state.lock().synced.elapsed() >= every
    }

    pub(super) fn note_synced(&self, durable: bool) {
        let mut state = self.state.lock();
        state.dirty = !durable;
        if durable {
            state.synced = Instant::now();
        }
    }

    /// Writes pending changes to the disk.
    pub(super) async fn sync(self: &Arc<Self>) -> Result<(), ClusterError> {
        if !self.state.lock().dirty {
            return Ok(());
        }
        let inner = self.clone();
        let synced = tokio::task::spawn_blocking(move || {
            let reached: ReplicaPosition = inner.replica.reached()?;
            inner.replica.replicate(Vec::new(), reached, true)?;
            inner.note_synced(true);
            Ok::<_, StoreError>(())
        });
        Ok(synced.await.map_err(|error| thread_lost(&error))??)
    }
}
