//! The cluster's store: etcd holds all records, and this node keeps a complete replica of them in its own file, from which
//! everything is read. With all of etcd down, reads go on; [`ClusterStore::age`] says how old what they show may be.
//!
//! All that speaks to etcd runs in one thread of its own, so that the calls here may be made from any runtime, or from none.
//! A call that is given up by its caller is still carried out.
//!
//! | file | has |
//! |---|---|
//! | `client` | which member is asked, and how long |
//! | `keys` | where things lie, and formats |
//! | `watch` | keeping the replica up to date |
//! | `write` | transactions of configuration; `parts` splits those that are too long |
//! | `members` | nodes, placements, and whether we are still a member |
//! | `presence` | who is there, under a lease, and which formats it knows |
//! | `raise` | going over to a newer format while nodes of older versions are updated |
//! | `signed` | which values count: signatures, and what is sealed |
//! | `resign` | writing values anew with the current key, and repairing those that do not count |
//! | `refusals` | values that do not count or cannot be read |
//! | `pki` | small values that the cluster's nodes share |
//! | `tickets` | the keys that sign tickets |
//! | `seed` | filling an empty cluster from an embedded store |
//!
//! Not here: consensus (etcd), what is decided with all this (`nagaya`'s supervisor).

mod client;
mod error;
pub(crate) mod fuzzing;
mod keys;
mod members;
mod parts;
mod pki;
mod presence;
mod raise;
mod refusals;
mod resign;
mod seed;
mod signed;
mod tickets;
mod watch;
mod wire;
mod write;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use nagaya_base::Code;
use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{Notify, oneshot, watch as channel};
use tokio::time::{Instant, timeout_at};

use self::client::{Answer, Client, Failure, RAW_TXN};
pub use self::client::{ENDPOINTS_MAX, EtcdOptions};
pub use self::error::ClusterError;
use self::keys::Keys;
pub use self::members::{Admission, Basis, Claim, Confirmed, Seen};
pub use self::pki::{PKI_CHANGES_MAX, PKI_VALUE_LEN_MAX, PkiChange, Versioned};
use self::presence::Wanted;
pub use self::presence::{PRESENCE_LEN_MAX, Presence};
pub use self::refusals::Refusals;
pub use self::resign::Resigned;
pub use self::seed::{is_initialised, seed};
use self::signed::Signer;
pub use self::signed::{RECORD_SECRET_LEN, RecordKeys, RecordSigning};
use self::wire::{KeyValue, Operation, Request, Txn, TxnAnswer};
use super::redb::{Reached, RedbStore};
use super::{Committed, Counts, Mode, Select, Store, StoreError, TransactionError, Visitor};
use crate::names::NodeName;
use crate::record::{Change, NodeRecord, Placement, Rule, Setting, Site, Tenant, TicketKeys};

/// Told what changed, in an order in which `Table::apply` takes it, and the replica's revision after it.
pub type OnChange = Arc<dyn Fn(Vec<Change>, u64) + Send + Sync>;

/// For what was written to be visible here.
const VISIBLE_WAIT: Duration = Duration::from_secs(2);

/// A node's view of the cluster's store. Dropping it ends the watch and lets go of the replica's file.
pub struct ClusterStore {
    inner: Arc<Inner>,
    handle: Handle,
    /// Dropped to end the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What the store's own thread shares with whoever calls.
pub(super) struct Inner {
    client: Client,
    keys: Keys,
    signer: Signer,
    replica: Arc<RedbStore>,
    on_change: OnChange,
    /// etcd's revision up to which everything is in the replica. 0: nothing was loaded since this process began.
    applied: channel::Sender<u64>,
    /// All that was committed before this moment is in the replica.
    in_step: channel::Sender<Option<Instant>>,
    /// Asks the watch to find out now whether it is in step.
    nudge: Notify,
    /// Asks the watch to compare everything anew.
    reload: Notify,
    state: Mutex<State>,
    presences: Mutex<BTreeMap<NodeName, Presence>>,
    present: channel::Sender<Option<Wanted>>,
    pki_revision: channel::Sender<u64>,
    /// Of the cluster's records. 0: not known since this process began.
    format: channel::Sender<u64>,
}

struct State {
    trouble: Option<ClusterError>,
    refused: refusals::Standing,
    synced: Instant,
    dirty: bool,
    /// Members that do not say that they know the next format.
    behind: Vec<String>,
}

impl ClusterStore {
    /// Returns at once, also while etcd is out of reach: then the replica shows what was known last. Each time something
    /// changes, `on_change` is called from a thread that may block.
    pub fn open(
        options: &EtcdOptions,
        signing: RecordSigning,
        replica: Arc<RedbStore>,
        on_change: OnChange,
    ) -> Result<Arc<Self>, StoreError> {
        NodeName::new(&options.cluster)
            .map_err(|error| ClusterError::Options { option: "cluster", detail: error.to_string() })?;
        let thread_failed = |error: std::io::Error| ClusterError::Replica {
            detail: format!("starting its thread: {error}"),
            code: Code(201),
        };
        let runtime = Builder::new_current_thread().enable_all().build().map_err(thread_failed)?;
        let handle = runtime.handle().clone();
        let client = {
            let _entered = handle.enter();
            Client::new(options)
        };
        let client = match client {
            Ok(client) => client,
            Err(error) => {
                // Whoever asks may be within another runtime, where this one must not be waited for.
                runtime.shutdown_background();
                return Err(error.into());
            }
        };
        let inner = Arc::new(Inner {
            client,
            keys: Keys::new(&options.cluster),
            signer: Signer::new(Keys::new(&options.cluster), signing),
            replica,
            on_change,
            applied: channel::Sender::new(0),
            in_step: channel::Sender::new(None),
            nudge: Notify::new(),
            reload: Notify::new(),
            state: Mutex::new(State {
                trouble: None,
                refused: refusals::Standing::default(),
                synced: Instant::now(),
                dirty: false,
                behind: Vec::new(),
            }),
            presences: Mutex::default(),
            present: channel::Sender::new(None),
            pki_revision: channel::Sender::new(0),
            format: channel::Sender::new(0),
        });
        let (stop, stopped) = oneshot::channel::<()>();
        let following = inner.clone();
        let run = move || {
            runtime.block_on(async move {
                tokio::select! {
                    () = watch::follow(following.clone()) => {}
                    () = presence::keep(following.clone()) => {}
                    () = raise::keep(following.clone()) => {}
                    _ = stopped => {}
                }
            });
        };
        let thread =
            std::thread::Builder::new().name("cluster-store".into()).spawn(run).map_err(thread_failed)?;
        Ok(Arc::new(Self { inner, handle, stop: Some(stop), thread: Some(thread) }))
    }

    /// How long ago everything committed was known to be in the replica. None: not since this process began.
    pub fn age(&self) -> Option<Duration> {
        self.inner.in_step.borrow().map(|since| since.elapsed())
    }

    /// Waits until everything that was committed before this call is in the replica.
    pub async fn in_step(&self, within: Duration) -> Result<(), ClusterError> {
        let inner = self.inner.clone();
        self.on_own(async move { inner.wait_in_step(within).await }).await
    }

    /// What keeps this node from following, if anything does. None also while it is not yet known.
    pub fn trouble(&self) -> Option<ClusterError> {
        self.inner.state.lock().trouble.clone()
    }

    /// From now on values are signed with these keys, and those of all of them count. Everything is compared anew.
    pub fn set_record_keys(&self, keys: &RecordKeys) {
        self.inner.signer.set_keys(keys);
        self.inner.reload.notify_one();
    }

    /// From now on nothing counts that is not signed, while this process runs.
    pub fn require_signatures(&self) {
        if self.inner.signer.require() {
            self.inner.reload.notify_one();
        }
    }

    /// Runs on the store's own thread.
    async fn on_own<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, ClusterError>> + Send + 'static,
    ) -> Result<T, ClusterError> {
        match self.handle.spawn(work).await {
            Ok(done) => done,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(closing()),
        }
    }

    /// Runs on the store's own thread, and blocks this one until it is done. The work bounds its own time.
    fn block_on_own<T: Send + 'static, E: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, E>> + Send + 'static,
        closed: impl FnOnce(ClusterError) -> E,
    ) -> Result<T, E> {
        let (done, result) = std::sync::mpsc::sync_channel(1);
        self.handle.spawn(async move { done.send(work.await) });
        result.recv().unwrap_or_else(|_| Err(closed(closing())))
    }
}

impl Drop for ClusterStore {
    fn drop(&mut self) {
        drop(self.stop.take());
        let Some(thread) = self.thread.take() else { return };
        // Whoever was told of a change may have held the last handle; then the thread ends without being waited for.
        if Handle::try_current().is_ok_and(|current| current.id() == self.handle.id()) {
            return;
        }
        // A panic there has been reported, and there is nobody to pass it on to.
        let _ = thread.join();
    }
}

fn closing() -> ClusterError {
    ClusterError::Behind { detail: "the store is being closed".into() }
}

/// A thread of ours that did not come back.
fn lost(error: &tokio::task::JoinError) -> ClusterError {
    ClusterError::Replica { detail: format!("work on it ended early: {error}"), code: Code(201) }
}

impl Inner {
    fn trouble(&self, error: Option<ClusterError>) {
        self.state.lock().trouble = error;
    }

    fn loaded(&self, revision: u64, began: Instant) {
        self.applied(revision);
        // What was there when the load began is here; the watch says the rest.
        if self.in_step.borrow().is_none() {
            self.in_step_since(began);
        }
    }

    fn applied(&self, revision: u64) {
        self.applied.send_if_modified(|known| std::mem::replace(known, revision) != revision);
    }

    fn in_step_since(&self, moment: Instant) {
        self.trouble(None);
        self.in_step.send_replace(Some(moment));
    }

    async fn wait_in_step(&self, within: Duration) -> Result<(), ClusterError> {
        let began = Instant::now();
        let mut known = self.in_step.subscribe();
        self.nudge.notify_one();
        // Answered may be a question that was asked before we came, so another one is asked then.
        loop {
            match timeout_at(began + within, known.changed()).await {
                Ok(_) if known.borrow_and_update().is_some_and(|since| since >= began) => return Ok(()),
                Ok(_) => self.nudge.notify_one(),
                Err(_) => return Err(self.behind(within)),
            }
        }
    }

    /// Waits until what was committed at this revision of etcd is in the replica.
    async fn wait_applied(&self, revision: u64, within: Duration) -> Result<(), ClusterError> {
        let mut known = self.applied.subscribe();
        let waiting = known.wait_for(|applied| *applied >= revision);
        match tokio::time::timeout(within, waiting).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(self.behind(within)),
        }
    }

    /// The trouble that is known is a better answer than that there is some.
    fn behind(&self, waited: Duration) -> ClusterError {
        let known = self.state.lock().trouble.clone();
        let late = || match self.client.latest() {
            Some(detail) => self.client.unreachable(waited, detail),
            None => ClusterError::Behind {
                detail: format!("it did not catch up within {} ms", waited.as_millis()),
            },
        };
        known.unwrap_or_else(late)
    }

    /// Sends a change. The values that it puts are signed, if the cluster's format has that.
    async fn change(&self, mut txn: Txn, within: Duration) -> Result<Answer<TxnAnswer>, Failure> {
        let is_signed = |operation: &Operation| match &operation.request {
            Some(Request::Put(put)) => self.keys.is_signed(&put.key),
            _ => false,
        };
        if txn.success.iter().any(is_signed) && self.is_signing(within).await.map_err(Failure::Error)? {
            for operation in &mut txn.success {
                self.signer.sign_put(operation, self.client.newest()).map_err(Failure::Error)?;
            }
        }
        self.client.ask(RAW_TXN, txn, within).await
    }

    /// Whether this node signs what it writes. Fails if it should and has no keys yet.
    async fn is_signing(&self, within: Duration) -> Result<bool, ClusterError> {
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

    /// What was read, with the body as value. Fails if it does not count.
    fn opened(&self, mut kv: KeyValue) -> Result<KeyValue, ClusterError> {
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

    /// What each of these reads has found, as [`Inner::opened`].
    fn found(&self, outcomes: Vec<wire::Outcome>) -> Result<Vec<Option<KeyValue>>, ClusterError> {
        watch::raw_pairs(outcomes)
            .into_iter()
            .map(|pair| pair.map(|kv| self.opened(kv)).transpose())
            .collect()
    }

    /// What the first of these reads has found.
    fn found_first(&self, outcomes: Vec<wire::Outcome>) -> Result<Option<Vec<u8>>, ClusterError> {
        Ok(self.found(outcomes)?.into_iter().next().flatten().map(|kv| kv.value))
    }

    fn is_sync_due(&self, every: Duration) -> bool {
        self.state.lock().synced.elapsed() >= every
    }

    fn synced(&self, durable: bool) {
        let mut state = self.state.lock();
        state.dirty = !durable;
        if durable {
            state.synced = Instant::now();
        }
    }

    /// Brings to the disk what is not yet there.
    async fn sync(self: &Arc<Self>) -> Result<(), ClusterError> {
        if !self.state.lock().dirty {
            return Ok(());
        }
        let inner = self.clone();
        let synced = tokio::task::spawn_blocking(move || {
            let reached: Reached = inner.replica.reached()?;
            inner.replica.replicate(Vec::new(), reached, true)?;
            inner.synced(true);
            Ok::<_, StoreError>(())
        });
        Ok(synced.await.map_err(|error| lost(&error))??)
    }
}

/// Reads are answered by the replica, so they go on whatever becomes of etcd.
impl Store for ClusterStore {
    fn revision(&self) -> Result<u64, StoreError> {
        self.inner.replica.revision()
    }

    fn counts(&self) -> Result<Counts, StoreError> {
        self.inner.replica.counts()
    }

    fn tenant(&self, name: &str) -> Result<Option<Tenant>, StoreError> {
        self.inner.replica.tenant(name)
    }

    fn site(&self, name: &str) -> Result<Option<Site>, StoreError> {
        self.inner.replica.site(name)
    }

    fn tenants(&self, after: Option<&str>, limit: usize) -> Result<Vec<Tenant>, StoreError> {
        self.inner.replica.tenants(after, limit)
    }

    fn sites(&self, select: &Select) -> Result<Vec<Site>, StoreError> {
        self.inner.replica.sites(select)
    }

    fn setting(&self, key: &str) -> Result<Option<Setting>, StoreError> {
        self.inner.replica.setting(key)
    }

    fn settings(&self, after: Option<&str>, limit: usize) -> Result<Vec<Setting>, StoreError> {
        self.inner.replica.settings(after, limit)
    }

    fn rule(&self, name: &str) -> Result<Option<Rule>, StoreError> {
        self.inner.replica.rule(name)
    }

    fn rules(&self) -> Result<Vec<Rule>, StoreError> {
        self.inner.replica.rules()
    }

    fn nodes(&self) -> Result<Vec<NodeRecord>, StoreError> {
        self.inner.replica.nodes()
    }

    fn node(&self, name: &str) -> Result<Option<NodeRecord>, StoreError> {
        self.inner.replica.node(name)
    }

    fn placement(&self, site: &str) -> Result<Option<Placement>, StoreError> {
        self.inner.replica.placement(site)
    }

    fn placements(&self, after: Option<&str>, limit: usize) -> Result<Vec<Placement>, StoreError> {
        self.inner.replica.placements(after, limit)
    }

    fn ticket_keys(&self) -> Result<Option<TicketKeys>, StoreError> {
        self.inner.replica.ticket_keys()
    }

    fn put_ticket_keys(
        &self,
        keys: TicketKeys,
        seen: Option<&TicketKeys>,
    ) -> Result<Option<Committed>, StoreError> {
        self.block_on_own(tickets::put(self.inner.clone(), keys, seen.cloned()), StoreError::from)
    }

    fn walk(&self, visit: &mut Visitor<'_>) -> Result<u64, StoreError> {
        self.inner.replica.walk(visit)
    }

    fn transaction(&self, changes: Vec<Change>, mode: Mode) -> Result<Committed, TransactionError> {
        let work = write::transaction(self.inner.clone(), changes, mode);
        self.block_on_own(work, |error| StoreError::from(error).into())
    }

    fn allocate_uid(&self, base: u32) -> Result<u32, StoreError> {
        self.block_on_own(write::allocate_uid(self.inner.clone(), base), StoreError::from)
    }

    fn next_uid(&self) -> Result<u32, StoreError> {
        self.block_on_own(write::next_uid(self.inner.clone()), StoreError::from)
    }

    fn raise_next_uid(&self, next: u32) -> Result<(), StoreError> {
        let inner = self.inner.clone();
        self.block_on_own(async move { write::raise_next_uid(&inner, next).await }, StoreError::from)
    }

    fn tells_changes(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests;
