//! Volumes: directories of a tenant whose changes are on several nodes before a response leaves.
//!
//! The protocol between the copies is pure state machines: each call says what has happened, and
//! returns what is to be done. `nagaya-sim` drives the same code through lost messages, power cuts
//! and partitions from a seed. No process uses any of this yet.
//!
//! - `record`: the volume in the cluster's store, and the changes that it may make
//! - `log`: the positions of a copy's log
//! - `primary`: the copy that requests change: when a commit is complete
//! - `replica`: a copy that follows
//! - `capture`, `change_event`, `file_handles`: changed files, as the kernel tells of them
//! - `segment_log`, `frame`: the log of a node on its disk
//!
//! Invariants: a commit is complete once every in-sync copy has it on its disk. Only an in-sync
//! copy becomes the primary. A copy that has seen an epoch takes nothing of an earlier one. None of
//! this depends on a clock. Not here: leases, by which a primary may answer reads
//! (`nagaya_placement::lease`).

pub mod capture;
pub mod change_event;
mod file_handles;
mod frame;
mod log;
mod primary;
mod record;
mod replica;
pub mod segment_log;

pub use log::{LogPosition, VolumeLog};
pub use primary::PrimaryVolume;
pub use record::{CopyIncarnation, RecordError, VolumeEpoch, VolumeRecord};
pub use replica::{AppendMessage, AppendOutcome, AppendReply, ReplicaVolume};
