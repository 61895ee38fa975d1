//! Holds one thread's means to decide which requests may run.
//!
//! Not here: the step of a request (`admit`).

use std::rc::Rc;
use std::sync::Arc;

use crate::admission::lanes::LaneSet;
use crate::admission::tickets::CurrentTickets;
use crate::cluster::membership::EdgeCluster;
use crate::cluster::nonce_prefix::NoncePrefix;
use crate::http::proxy_headers::ForwardingRules;
use crate::options::CurrentOptions;

/// Lanes and tickets, as one thread uses them.
pub struct Gate {
    /// Running and waiting requests.
    pub lanes: Arc<LaneSet>,
    pub tickets: Arc<CurrentTickets>,
    pub cluster: Arc<EdgeCluster>,
    /// Identifies the client behind trusted proxies.
    pub forwarding: Rc<ForwardingRules>,
    pub options: Arc<CurrentOptions>,
}

impl Gate {
    /// Returns the mark of this node's tickets. `None` if the node is in no cluster.
    pub fn mark(&self) -> Option<NoncePrefix> {
        self.cluster.ticket_mark()
    }
}
