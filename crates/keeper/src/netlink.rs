//! Messages of the kernel over netlink: addresses of the node, and both ends of connections.
//!
//! Not here: their use (`relay`, `instances::limits`).

pub mod route;
pub mod sock_diag;
