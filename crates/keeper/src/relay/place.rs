//! A place on a network that a record names: an address, or a name that is looked up at each connection.
//!
//! Not here: which address it has inside (`plan`), what is common to connections there (`tcp`), passing on (`pass`).

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use nagaya_cmdb::record::{Endpoint, EndpointHost};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

use super::tcp::Target;

/// How long one of several addresses may take.
const ADDRESS_MAX: Duration = Duration::from_secs(3);

/// Addresses of one name that are tried.
const ADDRESSES_MAX: usize = 8;

impl Target for Endpoint {
    async fn connect(&self, _: &TcpStream) -> io::Result<TcpStream> {
        match &self.host {
            EndpointHost::Address(address) => TcpStream::connect((*address, self.port)).await,
            EndpointHost::Name(name) => dial_name(name, self.port).await,
        }
    }
}

async fn dial_name(name: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let found: Vec<SocketAddr> = lookup_host((name, port)).await?.take(ADDRESSES_MAX).collect();
    for address in found {
        if !is_elsewhere(address.ip()) {
            let why = format!("the name leads to {}, which may only be named itself", address.ip());
            last = io::Error::new(io::ErrorKind::PermissionDenied, why);
            continue;
        }
        match timeout(ADDRESS_MAX, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(last)
}

/// Whether a name may lead there. Whoever owns a name can let it lead anywhere, to the node's own services too: those must
/// be named by their addresses.
pub fn is_elsewhere(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => {
            let is_this = address.octets()[0] == 0;
            !(address.is_loopback()
                || address.is_link_local()
                || address.is_multicast()
                || address.is_broadcast()
                || is_this)
        }
        IpAddr::V6(address) => {
            !(address.is_loopback()
                || address.is_unicast_link_local()
                || address.is_multicast()
                || address.is_unspecified())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_to_no_service_of_the_node() {
        for bad in [
            "127.0.0.1",
            "127.77.0.9",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "ff02::1",
            "::ffff:127.0.0.1",
        ] {
            assert!(!is_elsewhere(bad.parse().unwrap()), "{bad}");
        }
        for good in ["203.0.113.7", "10.0.0.5", "192.168.1.9", "2001:db8::1", "fd00::1"] {
            assert!(is_elsewhere(good.parse().unwrap()), "{good}");
        }
    }
}
