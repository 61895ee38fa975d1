//! The privileged half of nagaya: starts tenants' processes, opens their files and certificates.
//!
//! It speaks a closed set of verbs (`keeper_api::protocol`) over a Unix seqpacket socket. It treats
//! the other end as hostile: ids and names, never paths from outside. Not here: HTTP (`edge`), the
//! messages and the edge's client (`keeper-api`).
//!
//! `run` is the keeper's process.

#[doc(hidden)]
pub mod fuzzing;
pub mod image;
pub mod machines;
pub mod sandbox;
pub mod version;

mod authority;
mod bases;
mod cells;
mod cgi;
mod confinement;
mod connection;
mod context;
mod enclosure;
mod fault;
mod fd_stream;
mod feed;
mod gate;
mod huge_pages;
mod instances;
mod log;
mod mail;
mod metrics;
mod netlink;
mod options;
mod paths;
mod php_parent;
mod process;
mod relay;
mod root_mounts;
mod sched_slice;
mod server;
mod server_socket;
mod spawn;
mod sys;
mod verbs;
mod workers;

pub use enclosure::{hiding_directory, try_enclosure};
pub use huge_pages::{SWITCH as HUGE_PAGES_SWITCH, is_always as are_huge_pages_always};
pub use instances::unix_diag;
pub use options::{
    CellMechanism, HugePages, IdleOptions, InstanceOptions, KeeperConfig, ProgramCalls, ProgramNetwork,
    ProgramOptions,
};
pub use server::{KeeperStart, run};
