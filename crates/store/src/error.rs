//! Errors of a store, each with its page.
//!
//! Not here: mistakes in records (`nagaya_records::check`), the cluster's store (`etcd::error`).

use std::io;
use std::path::PathBuf;

use nagaya_base::Code;
use nagaya_records::check::RecordMistake;

use crate::etcd::ClusterError;

/// The store itself failed; the records are unchanged.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("{}: another process has the store open", path.display())]
    Locked { path: PathBuf },
    #[error("{}: the store is damaged: {detail}; it was left as it is: restore a copy, or move it away and import an export", path.display())]
    Damaged { path: PathBuf, detail: String },
    #[error("{}: the store has format {found}, this program reads formats up to {known}: use the nagaya that wrote it, or move it away and import an export", path.display())]
    Version { path: PathBuf, found: u64, known: u64 },
    #[error("no uid is free from {base} upwards: set a lower uid_base")]
    NoUid { base: u32 },
    #[error("the records were not read to the end: {0}")]
    Visitor(io::Error),
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

impl StoreError {
    pub fn code(&self) -> Code {
        match self {
            Self::Io { .. } | Self::Visitor(_) => Code(201),
            Self::Locked { .. } => Code(202),
            Self::Damaged { .. } => Code(203),
            Self::Version { .. } => Code(204),
            Self::NoUid { .. } => Code(205),
            Self::Cluster(error) => error.code(),
        }
    }
}

/// Why a transaction changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum TransactionError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{}", list(.0))]
    Refused(Vec<RecordMistake>),
}

impl TransactionError {
    pub fn code(&self) -> Code {
        match self {
            Self::Store(error) => error.code(),
            Self::Refused(_) => Code(210),
        }
    }
}

fn list(mistakes: &[RecordMistake]) -> String {
    mistakes.iter().map(RecordMistake::to_string).collect::<Vec<_>>().join("\n")
}

impl From<StoreError> for ClusterError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Cluster(error) => error,
            error => Self::Replica { detail: error.to_string(), code: error.code() },
        }
    }
}
