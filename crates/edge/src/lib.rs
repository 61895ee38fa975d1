//! The unprivileged half of nagaya: sockets, TLS, HTTP, and the life of a request.
//!
//! Start reading at `request.rs`. Not here: cgroups, processes and tenants' rights (`keeper`), records of
//! sites (`cmdb`), the process around it (`nagaya`).

pub mod refusal;
pub mod message;

pub mod gate;
pub mod files;
pub mod upstream;

pub mod http1;
pub mod http2;
pub mod authority;
pub mod body;
pub mod date;
pub mod drain;
pub mod path;

pub mod access_log;
pub mod metrics;

pub mod options;
mod sys;


