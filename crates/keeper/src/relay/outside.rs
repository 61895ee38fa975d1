//! All of the network but the node as a way out: each connection goes on to the address it was made to.
//!
//! Not here: how those connections come here (`sandbox::capture`), names (`names`), passing on (`pass`).

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use tokio::net::TcpStream;

use super::place::is_elsewhere;
use super::tcp::Target;
use crate::netlink;

/// Holds the capture: with it ends that connections come here.
pub struct Outside {
    _hold: OwnedFd,
    /// Of the node's own addresses, these ports are outside, too.
    own_ports: Vec<u16>,
}

impl Outside {
    pub fn new(hold: OwnedFd, own_ports: Vec<u16>) -> Self {
        Self { _hold: hold, own_ports }
    }
}

impl fmt::Display for Outside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("outside")
    }
}

impl Target for Outside {
    async fn connect(&self, inside: &TcpStream) -> io::Result<TcpStream> {
        let asked = inside.local_addr()?;
        let to = SocketAddr::new(asked.ip().to_canonical(), asked.port());
        let because = |error: io::Error| io::Error::new(error.kind(), format!("{to}: {error}"));
        may_go_to(to, &self.own_ports).map_err(because)?;
        TcpStream::connect(to).await.map_err(because)
    }
}

/// Not to the node, by whichever of its addresses: what listens there trusts who comes from there. Nor to link-local
/// addresses, where clouds keep what only the node is to know.
fn may_go_to(to: SocketAddr, own_ports: &[u16]) -> io::Result<()> {
    let address = to.ip();
    let refuse = |why| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    if !is_elsewhere(address) {
        return refuse("such an address may only be reached by its name in `outbound`");
    }
    if !own_ports.contains(&to.port()) && netlink::is_own(address)? {
        return refuse("that is the node itself, which may only be reached by its name in `outbound`");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_and_what_is_beside_it_are_not_outside() {
        for bad in
            ["127.0.0.1", "127.1.2.3", "0.0.0.0", "169.254.169.254", "::1", "fe80::1", "255.255.255.255"]
        {
            let error = may_go_to(SocketAddr::new(bad.parse().unwrap(), 80), &[80]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{bad}: {error}");
        }
    }
}
