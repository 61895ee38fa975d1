//! The cluster's store: etcd holds all records, and this node keeps a complete replica in its own
//! file. Everything is read from the replica. With all of etcd down, reads continue;
//! [`ClusterStore::age`] says how old their data may be.
//!
//! One separate thread does all communication with etcd. So the calls here may be made from any
//! runtime, or from none. A call that its caller gives up is still carried out.
//!
//! | file | content |
//! |---|---|
//! | `client` | choice of the member, and time limits |
//! | `keys` | layout of keys, and formats |
//! | `watch` | updates of the replica |
//! | `write` | transactions of configuration; `parts` splits those that are too long |
//! | `members` | nodes, placements, and whether this node is still a member |
//! | `presence` | present nodes, under a lease, and the formats that they know |
//! | `raise` | change to a newer format while nodes of older versions are updated |
//! | `signed` | valid values: signatures and sealing |
//! | `resign` | signing values again with the current key, and repair of invalid ones |
//! | `refusals` | values that are invalid or unreadable |
//! | `pki` | small values that the cluster's nodes share |
//! | `tickets` | the keys that sign tickets |
//! | `seed` | filling an empty cluster from an embedded store |
//!
//! Not here: consensus (etcd), decisions based on it (`nagaya`'s supervisor).

mod client;
mod error;
pub(crate) mod fuzzing;
mod inner;
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

use std::sync::Arc;
use std::time::Duration;

use nagaya_base::Code;
use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{Notify, oneshot, watch as channel};
use tokio::time::Instant;

use self::client::EtcdClient;
pub use self::client::{ENDPOINTS_MAX, EtcdOptions};
pub use self::error::ClusterError;
pub use self::inner::{ClusterStore, OnChange};
use self::inner::{FollowState, StoreInner};
use self::keys::KeySpace;
pub use self::members::{JoinResult, PlacementBasis, PlacementOutcome, RecordOwner, SeenNode};
pub use self::pki::{PKI_CHANGES_MAX, PKI_VALUE_LEN_MAX, PkiChange, VersionedValue};
pub use self::presence::{NodePresence, PRESENCE_LEN_MAX};
pub use self::refusals::RefusedValues;
pub use self::resign::ResignResult;
pub use self::seed::{is_initialised, seed};
use self::signed::ValueSigner;
pub use self::signed::{RECORD_SECRET_LEN, RecordKeys, RecordSigning};
use super::redb::RedbStore;
use super::{
    ChangeMode, CommittedChanges, RecordCounts, SiteFilter, Store, StoreError, TransactionError, Visitor,
};
use nagaya_records::names::NodeName;
use nagaya_records::record::{
    NodeRecord, Placement, RecordChange, RuleRecord, Setting, Site, Tenant, TicketKeys,
};

impl ClusterStore {
    /// Opens the store. It returns at once, even while etcd is unreachable: then the replica shows
    /// the last known state. `on_change` is called after each change, from a thread that may block.
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
            EtcdClient::new(options)
        };
        let client = match client {
            Ok(client) => client,
            Err(error) => {
                // The caller may be within another runtime, where this one must not be waited for.
                runtime.shutdown_background();
                return Err(error.into());
            }
        };
        let inner = Arc::new(StoreInner {
            client,
            keys: KeySpace::new(&options.cluster),
            signer: ValueSigner::new(KeySpace::new(&options.cluster), signing),
            replica,
            on_change,
            applied: channel::Sender::new(0),
            in_step: channel::Sender::new(None),
            nudge: Notify::new(),
            reload: Notify::new(),
            state: Mutex::new(FollowState {
                trouble: None,
                refused: refusals::StandingRefusals::default(),
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

    /// Returns how long ago the replica was known to be complete. `None` if never since this
    /// process began.
    pub fn age(&self) -> Option<Duration> {
        self.inner.in_step.borrow().map(|since| since.elapsed())
    }

    /// Waits until everything that was committed before this call is in the replica.
    pub async fn in_step(&self, within: Duration) -> Result<(), ClusterError> {
        let inner = self.inner.clone();
        self.on_own(async move { inner.wait_in_step(within).await }).await
    }

    /// Returns the trouble that keeps this node from following, if any. `None`, too, while it is
    /// not known yet.
    pub fn trouble(&self) -> Option<ClusterError> {
        self.inner.state.lock().trouble.clone()
    }

    /// Sets the keys that sign values; all of them verify. Everything is compared again.
    pub fn set_record_keys(&self, keys: &RecordKeys) {
        self.inner.signer.set_keys(keys);
        self.inner.reload.notify_one();
    }

    /// From now on, unsigned values do not count while this process runs.
    pub fn require_signatures(&self) {
        if self.inner.signer.require() {
            self.inner.reload.notify_one();
        }
    }
}

impl Drop for ClusterStore {
    fn drop(&mut self) {
        drop(self.stop.take());
        let Some(thread) = self.thread.take() else { return };
        // The receiver of changes may have held the last handle; then the thread ends without being
        // waited for.
        if Handle::try_current().is_ok_and(|current| current.id() == self.handle.id()) {
            return;
        }
        // A panic there has been reported, and no caller can receive it.
        let _ = thread.join();
    }
}

/// The replica answers reads, so they continue whatever happens to etcd.
impl Store for ClusterStore {
    fn revision(&self) -> Result<u64, StoreError> {
        self.inner.replica.revision()
    }

    fn counts(&self) -> Result<RecordCounts, StoreError> {
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

    fn sites(&self, select: &SiteFilter) -> Result<Vec<Site>, StoreError> {
        self.inner.replica.sites(select)
    }

    fn setting(&self, key: &str) -> Result<Option<Setting>, StoreError> {
        self.inner.replica.setting(key)
    }

    fn settings(&self, after: Option<&str>, limit: usize) -> Result<Vec<Setting>, StoreError> {
        self.inner.replica.settings(after, limit)
    }

    fn rule(&self, name: &str) -> Result<Option<RuleRecord>, StoreError> {
        self.inner.replica.rule(name)
    }

    fn rules(&self) -> Result<Vec<RuleRecord>, StoreError> {
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
    ) -> Result<Option<CommittedChanges>, StoreError> {
        self.block_on_own(tickets::put(self.inner.clone(), keys, seen.cloned()), StoreError::from)
    }

    fn walk(&self, visit: &mut Visitor<'_>) -> Result<u64, StoreError> {
        self.inner.replica.walk(visit)
    }

    fn transaction(
        &self,
        changes: Vec<RecordChange>,
        mode: ChangeMode,
    ) -> Result<CommittedChanges, TransactionError> {
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
