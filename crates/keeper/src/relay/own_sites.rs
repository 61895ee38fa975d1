//! The node's own edge as a way out. A tenant's program connects to a site of the node by its
//! public name.
//!
//! Such a connection goes to an address at which the node listens for the public, and to nothing
//! else on the node. It comes from an address that tells the edge whose program it is
//! (`nagaya_base::OwnCaller`), so that it is no trusted proxy there. Not here: which names lead
//! here (`plan`), which sites may be asked (`nagaya_edge`'s `route`).

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use nagaya_base::OwnCaller;
use tokio::net::{TcpSocket, TcpStream};

use super::tcp::TcpTarget;

/// Addresses where this node listens for the public, and the identity of its caller.
#[derive(Debug, Clone)]
pub struct OwnSites {
    addresses: Arc<[SocketAddr]>,
    caller: OwnCaller,
}

impl OwnSites {
    pub fn new(addresses: &[SocketAddr], caller: OwnCaller) -> Self {
        Self { addresses: addresses.into(), caller }
    }

    /// Returns the ports, each once.
    pub fn ports(&self) -> Vec<u16> {
        let mut ports: Vec<u16> = self.addresses.iter().map(SocketAddr::port).collect();
        ports.sort_unstable();
        ports.dedup();
        ports
    }

    /// Connects to the edge at this port.
    ///
    /// # Errors
    /// `NotFound` if the node listens there by IPv6 alone: no address of that family shows the
    /// caller.
    pub async fn connect(&self, port: u16) -> io::Result<TcpStream> {
        let to = find_address(&self.addresses, port).ok_or_else(|| {
            let why = "the node does not listen there for sites by IPv4";
            io::Error::new(io::ErrorKind::NotFound, why)
        })?;
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::from((self.caller.address(), 0)))?;
        socket.connect(to).await
    }
}

/// Returns an IPv4 address at which a listener at one of `addresses` with this port is reached from
/// the node.
fn find_address(addresses: &[SocketAddr], port: u16) -> Option<SocketAddr> {
    let reached = |address: &SocketAddr| match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
        IpAddr::V4(ip) => Some(SocketAddr::from((ip, port))),
        // A listener of the edge at `[::]` takes IPv6 alone.
        IpAddr::V6(_) => None,
    };
    addresses.iter().filter(|address| address.port() == port).find_map(reached)
}

/// One port of the edge.
pub struct OwnSite {
    pub port: u16,
    pub sites: OwnSites,
}

impl fmt::Display for OwnSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the node's sites at port {}", self.port)
    }
}

impl TcpTarget for OwnSite {
    async fn connect(&self, _: &TcpStream) -> io::Result<TcpStream> {
        self.sites.connect(self.port).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edge_is_reached_where_it_listens_for_the_public() {
        let of = |texts: &[&str], port| {
            let addresses: Vec<SocketAddr> = texts.iter().map(|text| text.parse().unwrap()).collect();
            find_address(&addresses, port).map(|address| address.to_string())
        };
        assert_eq!(of(&["0.0.0.0:80", "0.0.0.0:443"], 443).as_deref(), Some("127.0.0.1:443"));
        assert_eq!(of(&["[::]:80", "0.0.0.0:80"], 80).as_deref(), Some("127.0.0.1:80"));
        assert_eq!(of(&["[::]:80"], 80), None);
        assert_eq!(of(&["203.0.113.5:80"], 80).as_deref(), Some("203.0.113.5:80"));
        assert_eq!(of(&["[2001:db8::1]:80", "127.0.0.1:80"], 80).as_deref(), Some("127.0.0.1:80"));
        assert_eq!(of(&["[2001:db8::1]:80"], 80), None);
        assert_eq!(of(&["0.0.0.0:80"], 8080), None);
    }
}
