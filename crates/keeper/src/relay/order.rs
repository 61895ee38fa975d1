//! Orders to the relay: the places to open for one instance, and later requests about them.
//!
//! Not here: opening them (`pass`), the traffic (`counts`).

use std::os::fd::OwnedFd;
use std::sync::Arc;

use nagaya_keeper_api::database_waits::DatabaseWaits;
use nagaya_records::record::NetworkEndpoint;
use tokio::sync::watch;

use crate::mail::MailSender;
use crate::sandbox::NetworkCapture;

use super::counts::RelayCounts;
use super::own_sites::OwnSites;
use super::socket::SocketTarget;

/// The places that one instance may reach, and the sockets that listen for it there. Non-blocking.
#[derive(Default)]
pub struct EgressSockets {
    pub places: Vec<(OwnedFd, NetworkEndpoint)>,
    pub sockets: Vec<(OwnedFd, SocketTarget)>,
    /// Sockets that lead to the node's edge, with its ports.
    pub own_ports: Vec<(OwnedFd, u16)>,
    /// Sockets that accept mail, and its sender.
    pub mail: Vec<OwnedFd>,
    pub sender: Option<MailSender>,
    /// All other destinations.
    pub outside: Option<NetworkCapture>,
    /// The node's edge, which is outside, too. `None`: it is not.
    pub own_sites: Option<OwnSites>,
    /// Ports of the cluster's other nodes that are outside, besides those of the edge.
    pub shared_ports: Vec<u16>,
}

pub struct RelayOrder {
    pub ways: EgressSockets,
    pub counts: Arc<RelayCounts>,
    pub tally: Arc<DatabaseWaits>,
    /// Its sender goes with the instance.
    pub wanted: watch::Receiver<RelayMode>,
    /// Held until the thread has begun with it.
    pub busy: BusyGuard,
}

/// The keeper's mode for connections that no image carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayMode {
    Pass,
    /// Existing ones are closed, and no other is accepted: clients wait.
    Pause,
}

/// Guard of a task that may have such a connection open, or accept one. Each value counts.
#[derive(Debug)]
pub struct BusyGuard(BusyCounter);

/// The same, not counted.
#[derive(Debug, Clone)]
pub struct BusyCounter(pub Arc<watch::Sender<usize>>);

impl BusyCounter {
    pub fn begin(&self) -> BusyGuard {
        self.0.send_modify(|busy| *busy += 1);
        BusyGuard(self.clone())
    }
}

impl BusyGuard {
    pub fn rest(self) -> BusyCounter {
        self.0.clone()
    }
}

impl Clone for BusyGuard {
    fn clone(&self) -> Self {
        self.0.begin()
    }
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.0.0.send_modify(|busy| *busy -= 1);
    }
}
