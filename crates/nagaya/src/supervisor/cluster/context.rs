//! Facts of the cluster's thread that do not change while the node runs.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::records::NodeRecords;
use crate::config::settings::ClusterSettings as Configured;
use crate::supervisor::node::SupervisedNode;

pub struct ClusterContext {
    pub node: Arc<SupervisedNode>,
    pub records: Arc<NodeRecords>,
    /// The directory in which the member's file is kept.
    pub dir: PathBuf,
    /// The address at which other nodes reach this one.
    pub peer: SocketAddr,
    pub configured: Configured,
}

impl ClusterContext {
    /// Returns the length of this node's lease.
    pub fn fence(&self) -> Duration {
        Duration::from_millis(self.configured.fence_ms)
    }
}
