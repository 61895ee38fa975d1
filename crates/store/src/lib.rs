//! The store: it keeps tenants, sites, settings and rules across restarts. It is one trait, so that
//! a cluster's store can replace the embedded one.
//!
//! Not here: the embedded store (`redb`), the cluster's store (`etcd`), the result of a set of
//! changes (`plan`), JSON lines (`import`), permission and notification of changes (`nagaya`'s
//! admin interface).

mod contract;
mod error;
pub mod etcd;
#[doc(hidden)]
pub mod fuzzing;
mod guard;
pub mod import;
mod plan;
pub mod redb;
mod snapshot;

pub use self::contract::{
    ChangeMode, CommittedChanges, PAGE_LEN_MAX, RECORD_LEN_MAX, RecordCounts, RecordKind, SiteFilter, Store,
    UID_KEPT_MAX, Visitor,
};
pub use self::error::{StoreError, TransactionError};
pub use self::etcd::ClusterStore;
pub use self::redb::RedbStore;
pub use self::snapshot::snapshot_frames;

#[cfg(test)]
mod suite;
