//! Holds one thread's means to find the node that serves a request.
//!
//! Not here: the search (`search`), the request's way there (`peer_forward`).

use std::rc::Rc;
use std::sync::Arc;

use crate::cluster::membership::EdgeCluster;
use crate::cluster::peers::pool::PeerPool;
use crate::metrics::EdgeMetrics;
use crate::options::{CurrentOptions, ThreadLimits};

/// The cluster as one thread uses it.
pub struct Placer {
    pub cluster: Arc<EdgeCluster>,
    /// Connections to other nodes.
    pub peers: Rc<PeerPool>,
    pub metrics: Arc<EdgeMetrics>,
    pub options: Arc<CurrentOptions>,
    pub limits: Rc<ThreadLimits>,
}
