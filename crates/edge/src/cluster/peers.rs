//! Connects the edge with the other nodes of the cluster: requests in both directions, and
//! probes.
//!
//! In reading order:
//! - `fields`: the facts of a request that nodes exchange
//! - `acceptor`: connections of other nodes to this one
//! - `pool`: our connections to them
//! - `peer_exchange`: one request on its way
//! - `stalled_responses`: answers that pause
//! - `images`: the transfers beside requests
//! - `watch`: whether a node is there, for one thread
//! - `probe`: whether a node is there, for all threads
//! - `tally`: the counters of other nodes
//! - `credentials`: certificates and keys
//!
//! Not here: the node that runs a site (`cluster`), a request whose node is lost (`placement`).

use crate::cluster::peers::images::orders::ImageOrders;
use crate::cluster::peers::probes::PeerProbes;
use crate::cluster::peers::tally::PeerCounterTable;

pub mod acceptor;
pub mod credentials;
pub mod images;
pub mod pool;
pub mod probe;
pub mod splice;
pub mod tally;
pub mod upload;
pub mod watch;

/// State about other nodes that all threads share.
#[derive(Debug, Default)]
pub struct SharedPeers {
    pub probes: PeerProbes,
    pub tallies: PeerCounterTable,
    /// Images to fetch.
    pub images: ImageOrders,
}

pub mod peer_exchange;
pub mod probes;
pub mod stalled_responses;
#[cfg(test)]
mod tests;
