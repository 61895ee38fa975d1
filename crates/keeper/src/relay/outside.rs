//! All of the network except the node as a way out: each connection goes on to its own destination
//! address.
//!
//! Not here: which addresses are not outside (`forbidden`), how those connections come here
//! (`sandbox::capture`), names (`names`), passing on (`pass`).

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::net::TcpStream;

use crate::netlink::route;

use super::forbidden::ForbiddenPlaces;
use super::own_sites::OwnSites;
use super::tcp::TcpTarget;

/// Holds the capture: when it is dropped, no more connections come here.
pub struct OutsideRelay {
    _hold: OwnedFd,
    judge: DestinationFilter,
}

/// Decides which addresses are not outside: services on a node trust connections from there.
pub struct DestinationFilter {
    pub forbidden: Arc<ForbiddenPlaces>,
    /// The edge's ports on the node's own addresses are outside, too. `None`: nothing of the node
    /// is.
    pub own_sites: Option<OwnSites>,
    /// Ports of the cluster's other nodes that are outside, besides.
    pub shared_ports: Vec<u16>,
}

impl OutsideRelay {
    pub fn new(hold: OwnedFd, judge: DestinationFilter) -> Self {
        Self { _hold: hold, judge }
    }
}

impl fmt::Display for OutsideRelay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("outside")
    }
}

impl TcpTarget for OutsideRelay {
    async fn connect(&self, inside: &TcpStream) -> io::Result<TcpStream> {
        let asked = inside.local_addr()?;
        let to = SocketAddr::new(asked.ip().to_canonical(), asked.port());
        let because = |error: io::Error| io::Error::new(error.kind(), format!("{to}: {error}"));
        let DestinationFilter { forbidden, own_sites, shared_ports } = &self.judge;
        let own_ports = own_sites.as_ref().map(OwnSites::ports).unwrap_or_default();
        forbidden.judge(to, &own_ports, shared_ports).await.map_err(because)?;
        match own_sites {
            // The node itself: by a connection that shows the edge its caller.
            Some(sites) if own_ports.contains(&to.port()) && route::is_own(to.ip()).map_err(because)? => {
                sites.connect(to.port()).await.map_err(because)
            }
            _ => TcpStream::connect(to).await.map_err(because),
        }
    }
}
