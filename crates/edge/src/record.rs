//! Records of a request and their output: access log, receipt, counters.
//!
//! In reading order: `access_record` (the figures), `execution` (its cell and what its programs
//! used), `access_log`, `receipt`, `counting`.

pub mod access_log;
pub mod access_record;
pub mod counting;
pub mod execution;
pub mod receipt;
pub mod recorder;
pub mod route_trace;
pub mod site_turnarounds;
pub mod turnaround;
