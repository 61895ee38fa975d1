//! The privileged half of nagaya: starts tenants' processes, opens their files and certificates.
//!
//! It speaks a closed set of verbs (`protocol`) over a Unix seqpacket socket and treats whoever is at the
//! other end as hostile: ids and names, never paths from outside. Not here: HTTP; that is `edge`.
//!
//! `run` is the keeper's process, `client` what the edge asks it with.

pub mod client;
pub mod codec;
pub mod fastcgi;
#[doc(hidden)]
pub mod fuzzing;
pub mod huge_pages;
pub mod image;
pub mod protocol;
pub mod roll;
pub mod sandbox;
pub mod tally;
pub mod variables;
pub mod version;

mod authority;
mod bases;
mod cells;
mod cgi;
mod confinement;
mod enclosure;
mod engine;
mod fault;
mod feed;
mod gate;
mod instances;
mod log;
mod metrics;
mod mount_list;
mod netlink;
mod options;
mod passed;
mod process;
mod relay;
mod root_mounts;
mod roots;
mod server;
mod server_socket;
mod slice;
mod spawn;
mod sys;
mod tenant_path;
mod workers;

pub use cells::GIVE_WAY_FOR;
pub use confinement::TENANTS_MAX;
pub use enclosure::try_enclosure;
pub use instances::unix_diag;
pub use options::{
    BackEnd, HugePages, IdleOptions, InstanceOptions, Options, ProgramCalls, ProgramNetwork, ProgramOptions,
};
pub use server::{Start, run};
