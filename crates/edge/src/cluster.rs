//! The other nodes of the cluster: their identity, the placements, and the connections to them.
//!
//! In reading order: `membership`, `node_lease`, `placement_client`, `serving_epoch`,
//! `replica_picker`, `peers`.

pub mod member;
pub mod membership;
pub mod node_lease;
pub mod nonce_prefix;
pub mod peers;
pub mod placement_client;
pub mod replica_picker;
pub mod retry_budget;
pub mod serving_epoch;
pub mod wait_estimate;
