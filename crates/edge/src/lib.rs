//! The unprivileged half of nagaya: sockets, TLS, HTTP, and the life of a request.
//!
//! Start reading at `request.rs`. Nine rooms lie on floors. A room uses only those below it:
//!
//! ```text
//!   server                  the process, its threads, and what they share
//!   request                 one request, step by step
//!   rules                   the operator's Ruby
//!   admission   backends    the right to run; what answers
//!   cluster     shaping     other nodes; rates and quotas
//!   record                  what is remembered of a request
//!   http                    messages and protocols
//!   options, metrics, ...   files that use no room
//! ```
//!
//! Not here: cgroups, processes and tenants' rights (`keeper`), records of sites (`records`), the
//! process around it (`nagaya`).

mod admission;
mod backends;
mod cluster;
mod http;
mod record;
mod request;
mod rules;
mod server;
mod shaping;

#[doc(hidden)]
pub mod fuzzing;

mod blocking;
mod crypto;
mod idle_timer;
mod loop_ticks;
mod metrics;
pub mod options;
mod record_table;
mod spool;
mod sys;
mod tenants;
mod ttl_value;

pub use admission::lanes::LaneSet;
pub use admission::permit::Permit;
pub use admission::site_lane::SiteLane;
pub use cluster::peers::probe::THREAD as PROBE_THREAD;
pub use options::EdgeConfig;
pub use server::process::{EdgeStart, Listener, PeerSockets, run};
