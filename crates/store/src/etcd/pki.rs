//! Small values that the nodes of a cluster share, such as the CA certificate. They are read from
//! etcd itself, because they are needed before there is a replica. Besides, secrets must not be in
//! every node's file. They are not signed, because a machine reads them before it has the keys:
//! each proves itself.
//!
//! Not here: their meaning (`nagaya`'s cluster commands).

use std::time::Duration;

use tokio::sync::watch::Receiver;

use super::client::{LEASE_GRANT, RANGE};
use super::error::ClusterError;
use super::keys::{self, KeySpace};
use super::wire::{
    Compare, LeaseGrant, LeaseGranted, PutRequest, RangeRequest, RangeResponse, RequestKind, RequestOp,
    TxnRequest,
};
use crate::etcd::inner::ClusterStore;

/// Longest value, in bytes.
pub const PKI_VALUE_LEN_MAX: usize = 256 << 10;

/// Most values that one transaction changes: etcd takes 128 operations in one.
pub const PKI_CHANGES_MAX: usize = 64;

/// Most values in one listing.
const LISTED_MAX: i64 = 1_000;

const WAIT: Duration = Duration::from_secs(5);

/// A value and its version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VersionedValue {
    pub value: Vec<u8>,
    /// etcd's revision at which it was written.
    pub revision: u64,
}

/// Change of one value within a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PkiChange {
    /// Writes it if the present value was written at the revision `at`; 0 means that there is none.
    Put { key: String, value: Vec<u8>, at: u64 },
    /// Deletes it if it was written at the revision `at`.
    Take { key: String, at: u64 },
    /// Deletes it if it exists.
    Drop { key: String },
}

impl PkiChange {
    fn key(&self) -> &str {
        match self {
            Self::Put { key, .. } | Self::Take { key, .. } | Self::Drop { key } => key,
        }
    }

    pub(super) fn compare(&self, keys: &KeySpace) -> Option<Compare> {
        match self {
            Self::Put { key, at, .. } | Self::Take { key, at } => Some(keys::is_of(&keys.pki(key), *at)),
            Self::Drop { .. } => None,
        }
    }

    pub(super) fn operation(&self, keys: &KeySpace) -> RequestOp {
        match self {
            Self::Put { key, value, .. } => keys::putting(&keys.pki(key), value.clone()),
            Self::Take { key, .. } | Self::Drop { key } => keys::deleting(&keys.pki(key)),
        }
    }

    /// Returns the read that shows afterwards whether it was done.
    pub(super) fn getting(&self, keys: &KeySpace) -> RequestOp {
        keys::getting(&keys.pki(self.key()))
    }

    /// Returns whether the precondition holds. `found_at` is the revision of the present value, or
    /// 0 if there is none.
    pub(super) fn is_as_expected(&self, found_at: u64) -> bool {
        match self {
            Self::Put { at, .. } | Self::Take { at, .. } => *at == found_at,
            Self::Drop { .. } => true,
        }
    }

    fn is_done(&self, found: Option<&Vec<u8>>) -> bool {
        match self {
            Self::Put { value, .. } => found == Some(value),
            Self::Take { .. } | Self::Drop { .. } => found.is_none(),
        }
    }

    fn check(&self) -> Result<(), ClusterError> {
        match self {
            Self::Put { key, value, .. } if value.len() > PKI_VALUE_LEN_MAX => {
                let detail = format!("{key}: {} bytes are more than {PKI_VALUE_LEN_MAX}", value.len());
                Err(ClusterError::Refused { detail })
            }
            _ => Ok(()),
        }
    }
}

/// Refuses locally whatever etcd would refuse as well.
pub(super) fn check(changes: &[PkiChange]) -> Result<(), ClusterError> {
    if changes.len() > PKI_CHANGES_MAX {
        let detail = format!("{} changes at once are more than {PKI_CHANGES_MAX}", changes.len());
        return Err(ClusterError::Refused { detail });
    }
    changes.iter().try_for_each(PkiChange::check)
}

impl ClusterStore {
    /// Returns the present value, if any. `key` is a name, or several with `/` between them.
    pub async fn get(&self, key: &str) -> Result<Option<VersionedValue>, ClusterError> {
        let inner = self.inner.clone();
        let key = inner.keys.pki(key);
        self.on_own(async move {
            let answer = inner.client.ask::<_, RangeResponse>(RANGE, keys::get(&key), WAIT).await?.value;
            Ok(answer
                .kvs
                .into_iter()
                .next()
                .map(|kv| VersionedValue { value: kv.value, revision: keys::unsigned(kv.mod_revision) }))
        })
        .await
    }

    /// Returns all values whose keys begin with `prefix`, each with the rest of its key.
    pub async fn list(&self, prefix: &str) -> Result<Vec<(String, VersionedValue)>, ClusterError> {
        let inner = self.inner.clone();
        let prefix = inner.keys.pki(prefix);
        self.on_own(async move {
            let range =
                RangeRequest { range_end: keys::after_all(&prefix), limit: LISTED_MAX, ..keys::get(&prefix) };
            let answer = inner.client.ask::<_, RangeResponse>(RANGE, range, WAIT).await?.value;
            let named = |kv: super::wire::KeyValue| {
                let name = str::from_utf8(kv.key.get(prefix.len()..)?).ok()?.to_owned();
                let revision = keys::unsigned(kv.mod_revision);
                Some((name, VersionedValue { value: kv.value, revision }))
            };
            Ok(answer.kvs.into_iter().filter_map(named).collect())
        })
        .await
    }

    /// Writes the value if the present one was written at the revision `expected` (`None` if there
    /// must be none). Returns whether it did.
    pub async fn put_if(
        &self,
        key: &str,
        value: Vec<u8>,
        expected: Option<u64>,
    ) -> Result<bool, ClusterError> {
        self.change_pki(vec![PkiChange::Put { key: key.into(), value, at: expected.unwrap_or(0) }]).await
    }

    /// Makes all of these changes, or none. Returns which.
    pub async fn change_pki(&self, changes: Vec<PkiChange>) -> Result<bool, ClusterError> {
        check(&changes)?;
        let inner = self.inner.clone();
        self.on_own(async move {
            let keys = &inner.keys;
            let txn = TxnRequest {
                compare: changes.iter().filter_map(|change| change.compare(keys)).collect(),
                success: changes.iter().map(|change| change.operation(keys)).collect(),
                failure: changes.iter().map(|change| change.getting(keys)).collect(),
            };
            let answer = inner.change(txn, WAIT).await?;
            if answer.value.succeeded {
                return Ok(true);
            }
            let found = crate::etcd::wire::raw_values(answer.value.responses);
            let are_done = changes.iter().zip(&found).all(|(change, found)| change.is_done(found.as_ref()));
            // An earlier attempt whose reply was lost may have done it.
            Ok(answer.repeated && are_done)
        })
        .await
    }

    /// Writes a value that does not exist yet; the store deletes it after this time.
    pub async fn put_for(&self, key: &str, value: Vec<u8>, ttl: Duration) -> Result<(), ClusterError> {
        check(&[PkiChange::Put { key: key.into(), value: value.clone(), at: 0 }])?;
        let inner = self.inner.clone();
        let key = inner.keys.pki(key);
        self.on_own(async move {
            let ttl = i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX).max(1);
            let granted: LeaseGranted = inner.client.ask(LEASE_GRANT, LeaseGrant { ttl }, WAIT).await?.value;
            let put = PutRequest { key: key.clone().into_bytes(), value: value.clone(), lease: granted.id };
            let txn = TxnRequest {
                compare: vec![keys::is_there(&inner.keys.revision()), keys::is_absent(&key)],
                success: vec![RequestOp { request: Some(RequestKind::Put(put)) }],
                failure: vec![keys::getting(&key)],
            };
            let answer = inner.change(txn, WAIT).await?;
            let found = crate::etcd::wire::raw_values(answer.value.responses).into_iter().next().flatten();
            if answer.value.succeeded || (answer.repeated && found == Some(value)) {
                return Ok(());
            }
            let cluster = inner.keys.cluster().to_owned();
            Err(ClusterError::NotInitialised { cluster })
        })
        .await
    }

    /// Changes whenever one of these values has changed, or may have while this node was cut off.
    /// The reader then reads its values again.
    pub fn pki_changes(&self) -> Receiver<u64> {
        self.inner.pki_revision.subscribe()
    }
}

impl crate::etcd::inner::StoreInner {
    pub(super) fn pki_changed(&self, revision: u64) {
        self.pki_revision.send_replace(revision);
    }
}
