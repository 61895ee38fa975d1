//! The life of an instance's processes: start or restore, readiness, rest, measurements, and their
//! end.
//!
//! Invariant: only `driver` applies events to lifecycles. Not here: what is to be done (`decide`).

pub mod after_wake;
pub mod app_launch;
pub mod app_machine;
pub mod clock;
pub mod draining;
pub mod driver;
pub mod endpoint;
pub mod internal_requests;
pub mod lateness;
pub mod machine_state;
pub mod measured;
pub mod plain_address;
pub mod pressure;
pub mod priority;
pub mod processes;
pub mod rest;
pub mod restart_file;
pub mod restarts;
pub mod sandbox_spec;
pub mod start;
pub mod usage;
pub mod volatile_files;
pub mod watchdog;
pub mod work;
