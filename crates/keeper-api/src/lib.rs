//! The interface between edge and keeper: the closed set of verbs, the messages that carry them,
//! and the edge's client.
//!
//! Both ends read this crate, and nothing in it has a privilege. Invariant: an edge names sites and
//! ids, never paths. Not here: the work behind a verb (`keeper`), the use of what comes back
//! (`edge`).

pub mod awake_set;
pub mod client;
pub mod codec;
pub mod codes;
pub mod database_waits;
pub mod fastcgi;
pub mod limits;
pub mod protocol;
pub mod quiet_stream;
pub mod root_changes;
mod sys;
pub mod variables;

pub use sys::{MappedCounts, StableFd, watch};
