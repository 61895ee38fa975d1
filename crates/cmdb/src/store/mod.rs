//! The store: where tenants, sites, settings and rules are kept across restarts, behind one trait, so that a cluster's
//! store can take the place of the embedded one.
//!
//! Not here: the embedded store (`redb`), the cluster's store (`etcd`), what a set of changes comes to (`plan`), JSON lines (`import`),
//! who may change it and who is told (`nagaya`'s admin interface).

pub mod etcd;
mod guard;
pub mod import;
mod plan;
pub mod redb;

use std::io;
use std::path::PathBuf;

use nagaya_base::Code;
use serde::{Deserialize, Serialize};

use crate::check::Mistake;
use crate::feed::BATCH_MAX;
use crate::record::{Change, NodeRecord, Placement, Rule, Setting, Site, Tenant, TicketKeys};

pub use self::etcd::ClusterStore;
pub use self::redb::RedbStore;

/// Longest record as JSON, in bytes: the 64 KiB that `feed::FRAME_LEN_MAX` counts on, less its wrapping.
pub const RECORD_LEN_MAX: usize = (64 << 10) - WRAPPING_LEN;

/// Largest uid of which it is remembered that a tenant had it: sandboxes have the tenants of smaller ones only.
pub const UID_KEPT_MAX: u32 = (1 << 31) - 1;

/// Room for `{"put_setting":`, `}` and a comma around a record.
const WRAPPING_LEN: usize = 64;

/// A frame of a snapshot is closed when it has grown to this, so that neither end holds much at once.
const SNAPSHOT_FRAME_LEN: usize = 1 << 20;

/// Most records one page of a listing holds.
pub const PAGE_LEN_MAX: usize = 1000;

const _: () = assert!(BATCH_MAX * (RECORD_LEN_MAX + WRAPPING_LEN) <= crate::feed::FRAME_LEN_MAX);

/// The store itself failed; the records are as they were.
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
    #[error("reading the records was given up: {0}")]
    Visitor(io::Error),
    #[error(transparent)]
    Cluster(#[from] etcd::ClusterError),
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
    Refused(Vec<Mistake>),
}

impl TransactionError {
    pub fn code(&self) -> Code {
        match self {
            Self::Store(error) => error.code(),
            Self::Refused(_) => Code(210),
        }
    }
}

fn list(mistakes: &[Mistake]) -> String {
    mistakes.iter().map(Mistake::to_string).collect::<Vec<_>>().join("\n")
}

/// What a transaction came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    pub revision: u64,
    /// What really changed, in an order in which `Table::apply` takes it. Empty: nothing differed, and the
    /// revision is the old one.
    pub changes: Vec<Change>,
}

/// What the records not named by a transaction become.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// They stay.
    #[default]
    Merge,
    /// They go: the changes are the whole truth.
    Replace,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Tenant,
    Site,
    Setting,
    Rule,
    Node,
    Placement,
    /// There is one at most.
    TicketKeys,
}

/// Which sites a page shows. All given conditions hold together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Select {
    pub tenant: Option<String>,
    /// A host pattern exactly as a site has it.
    pub host: Option<String>,
    /// Only names after this one.
    pub after: Option<String>,
    /// At most this many; `PAGE_LEN_MAX` bounds it.
    pub limit: usize,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    pub tenants: u64,
    pub sites: u64,
    pub settings: u64,
}

/// Gets each record's kind and JSON; an error ends the walk.
pub type Visitor<'a> = dyn FnMut(Kind, &str) -> io::Result<()> + 'a;

/// Every call sees the state of one moment. Calls block on the disk.
pub trait Store: Send + Sync {
    /// Grows with each transaction that changed something: by one, unless the store takes so many changes only in parts.
    fn revision(&self) -> Result<u64, StoreError>;
    fn counts(&self) -> Result<Counts, StoreError>;
    fn tenant(&self, name: &str) -> Result<Option<Tenant>, StoreError>;
    fn site(&self, name: &str) -> Result<Option<Site>, StoreError>;
    /// In order of name, after the given one, at most `limit`; `PAGE_LEN_MAX` bounds it.
    fn tenants(&self, after: Option<&str>, limit: usize) -> Result<Vec<Tenant>, StoreError>;
    fn sites(&self, select: &Select) -> Result<Vec<Site>, StoreError>;
    fn setting(&self, key: &str) -> Result<Option<Setting>, StoreError>;
    /// Like [`Store::tenants`], in order of key.
    fn settings(&self, after: Option<&str>, limit: usize) -> Result<Vec<Setting>, StoreError>;
    fn rule(&self, name: &str) -> Result<Option<Rule>, StoreError>;
    /// All of them, in order of name: there are `RULES_MAX` at most.
    fn rules(&self) -> Result<Vec<Rule>, StoreError>;
    /// The cluster's nodes, in order of name. They are few.
    fn nodes(&self) -> Result<Vec<NodeRecord>, StoreError>;
    fn node(&self, name: &str) -> Result<Option<NodeRecord>, StoreError>;
    /// Where this site's application runs. Nothing in a store without a cluster.
    fn placement(&self, site: &str) -> Result<Option<Placement>, StoreError>;
    /// Like [`Store::tenants`], in order of site.
    fn placements(&self, after: Option<&str>, limit: usize) -> Result<Vec<Placement>, StoreError>;
    /// The keys that sign tickets. Nothing in a store without a cluster, unless they are put there.
    fn ticket_keys(&self) -> Result<Option<TicketKeys>, StoreError>;
    /// Writes these if `seen` are those that stand there now (None: none do). None: others do, and nothing was changed. They are no
    /// configuration: no transaction changes them, and no export shows them.
    fn put_ticket_keys(
        &self,
        keys: TicketKeys,
        seen: Option<&TicketKeys>,
    ) -> Result<Option<Committed>, StoreError>;
    /// All tenants, then all sites, settings, rules, nodes, placements and the keys of tickets, each in order of name, one in memory
    /// at a time. Returns the revision they belong to.
    fn walk(&self, visit: &mut Visitor<'_>) -> Result<u64, StoreError>;
    /// All changes or none. Checked is the state they lead to, not each step, so that two sites can
    /// swap hosts in one transaction. A refusal names every mistake.
    fn transaction(&self, changes: Vec<Change>, mode: Mode) -> Result<Committed, TransactionError>;
    /// A uid from `base` upwards that no tenant has and that was never allocated before: files that a
    /// removed tenant left behind must not become another's.
    fn allocate_uid(&self, base: u32) -> Result<u32, StoreError>;
    /// Below this, no uid is allocated any more: each uid that was allocated, and each that a tenant had and gave up, is below it.
    /// A store that takes this one's place must go on from there.
    fn next_uid(&self) -> Result<u32, StoreError>;
    /// Sees to it that no uid below `next` is allocated any more. Never lets one be allocated that could not be before.
    fn raise_next_uid(&self, next: u32) -> Result<(), StoreError>;
    /// Whether this store tells what changed itself, to what it was opened with: then whoever made a transaction must not hand
    /// its changes on too.
    fn tells_changes(&self) -> bool {
        false
    }
}

/// Gives the store as encoded `feed::Down::Apply` frames, without decoding the records; without rules, which whoever runs them
/// has as files. The caller sends `Down::Commit` with the returned revision after the last frame.
pub fn snapshot_frames(
    store: &dyn Store,
    send: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> Result<u64, StoreError> {
    let mut frame = Vec::new();
    let mut records = 0;
    let revision = store.walk(&mut |kind, json| {
        let begin: &[u8] = match kind {
            Kind::Tenant => b"{\"put_tenant\":",
            Kind::Site => b"{\"put_site\":",
            Kind::Setting => b"{\"put_setting\":",
            Kind::Rule => return Ok(()),
            Kind::Node => b"{\"put_node\":",
            Kind::Placement => b"{\"put_placement\":",
            Kind::TicketKeys => b"{\"put_ticket_keys\":",
        };
        if records == BATCH_MAX || frame.len() >= SNAPSHOT_FRAME_LEN {
            close_frame(&mut frame, send)?;
            records = 0;
        }
        frame.extend_from_slice(if records == 0 { b"\0\0\0\0{\"apply\":[" } else { b"," });
        frame.extend_from_slice(begin);
        frame.extend_from_slice(json.as_bytes());
        frame.push(b'}');
        records += 1;
        Ok(())
    })?;
    if records > 0 {
        close_frame(&mut frame, send).map_err(StoreError::Visitor)?;
    }
    Ok(revision)
}

fn close_frame(frame: &mut Vec<u8>, send: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    frame.extend_from_slice(b"]}");
    let len = u32::try_from(frame.len() - 4).expect("BATCH_MAX records fit a frame");
    frame[..4].copy_from_slice(&len.to_le_bytes());
    send(frame)?;
    frame.clear();
    Ok(())
}

#[cfg(test)]
mod suite;
