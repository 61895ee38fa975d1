//! Small values that the nodes of a cluster share, such as the certificate of its authority: read from etcd itself, because
//! they are needed before there is a replica, and secrets are not to lie in every node's file. They are not signed, because a machine
//! reads them before it has the keys: each proves itself.
//!
//! Not here: what they are (`nagaya`'s cluster commands).

use std::time::Duration;

use tokio::sync::watch::Receiver;

use super::client::RANGE;
use super::error::ClusterError;
use super::wire::{RangeAnswer, Txn};
use super::{ClusterStore, keys};

/// Longest value, in bytes.
pub const PKI_VALUE_LEN_MAX: usize = 64 << 10;

const WAIT: Duration = Duration::from_secs(5);

/// A value, and how it is told from those before and after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versioned {
    pub value: Vec<u8>,
    /// etcd's revision at which it was written.
    pub revision: u64,
}

impl ClusterStore {
    /// The value now, or none. `key` is a name, or some with `/` between them.
    pub async fn get(&self, key: &str) -> Result<Option<Versioned>, ClusterError> {
        let inner = self.inner.clone();
        let key = inner.keys.pki(key);
        self.on_own(async move {
            let answer = inner.client.ask::<_, RangeAnswer>(RANGE, keys::get(&key), WAIT).await?.value;
            Ok(answer
                .kvs
                .into_iter()
                .next()
                .map(|kv| Versioned { value: kv.value, revision: keys::unsigned(kv.mod_revision) }))
        })
        .await
    }

    /// Writes the value if what stands there was written at the revision `expected` (None: nothing stands there). Says
    /// whether it did.
    pub async fn put_if(
        &self,
        key: &str,
        value: Vec<u8>,
        expected: Option<u64>,
    ) -> Result<bool, ClusterError> {
        if value.len() > PKI_VALUE_LEN_MAX {
            let detail = format!("{key}: {} bytes are more than {PKI_VALUE_LEN_MAX}", value.len());
            return Err(ClusterError::Refused { detail });
        }
        let inner = self.inner.clone();
        let key = inner.keys.pki(key);
        self.on_own(async move {
            let txn = Txn {
                compare: vec![keys::is_of(&key, expected.unwrap_or(0))],
                success: vec![keys::putting(&key, value.clone())],
                failure: vec![keys::getting(&key)],
            };
            let answer = inner.change(txn, WAIT).await?;
            let found = inner.found_first(answer.value.responses)?;
            // An earlier attempt whose answer was lost may have done it.
            Ok(answer.value.succeeded || (answer.repeated && found == Some(value)))
        })
        .await
    }

    /// Changes whenever one of these values has changed, or may have while this node was cut off: then read what you need anew.
    pub fn pki_changes(&self) -> Receiver<u64> {
        self.inner.pki_revision.subscribe()
    }
}

impl super::Inner {
    pub(super) fn pki_changed(&self, revision: u64) {
        self.pki_revision.send_replace(revision);
    }
}
