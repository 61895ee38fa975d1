//! The unprivileged half of nagaya: sockets, TLS, HTTP, and the life of a request.
//!
//! Start reading at `request.rs`. Not here: cgroups, processes and tenants' rights (`keeper`), records of
//! sites (`cmdb`), the process around it (`nagaya`).

pub mod access_log;
pub mod authority;
pub mod date;
pub mod http1;
pub mod upstream;
pub mod message;
pub mod metrics;
pub mod options;
pub mod refusal;
