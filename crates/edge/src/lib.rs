//! The unprivileged half of nagaya: sockets, TLS, HTTP, and the life of a request.
//!
//! Start reading at `request.rs`. Not here: cgroups, processes and tenants' rights (`keeper`), records of
//! sites (`cmdb`), the process around it (`nagaya`).

pub mod message;
pub mod refusal;
pub mod request;

pub mod admission;
pub mod boost;
pub mod exchange;
pub mod files;
pub mod instances;
mod named_file;
pub mod place;

pub mod programs;
pub mod route;
pub mod rules;
pub mod seat;
pub mod upstream;

mod arrival;
pub mod authority;
mod blocking;
pub mod body;
mod buffer;
pub mod clients;
pub mod cluster;
mod crypto;
pub mod date;
pub mod drain;
pub mod forward;
#[doc(hidden)]
pub mod fuzzing;
pub mod http1;
pub mod http2;
mod intake;
pub mod path;
pub mod peers;
pub mod proxy_header;
pub mod recent;
pub mod silence;
mod spool;
pub mod target;
pub mod tls;

pub mod access_log;
pub mod account;
pub mod metrics;
pub mod pace;
pub mod receipt;
pub mod stay;
mod tenants;

pub mod listen;
pub mod node;
pub mod options;
pub mod serving;
pub mod shared;
mod sys;
pub mod turns;

mod process;

pub use options::{HEADER_FIELDS_MAX, Options};
pub use process::{Listener, PeerSockets, Start, run};
