//! An endpoint on a network that a record names. It is an address, or a name that is looked up at
//! each connection.
//!
//! Not here: forbidden destinations of a name (`forbidden`), its address inside (`plan`), what
//! these connections share (`tcp`), passing on (`pass`).

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nagaya_records::record::{EndpointHost, NetworkEndpoint};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

use crate::relay::forbidden::ForbiddenPlaces;
use crate::relay::tcp::TcpTarget;

/// Maximum time for one of several addresses.
const ADDRESS_MAX: Duration = Duration::from_secs(3);

/// Maximum number of addresses of one name that are tried.
const ADDRESSES_MAX: usize = 8;

/// An endpoint, and the forbidden destinations of its name.
pub struct NamedPlace {
    pub endpoint: NetworkEndpoint,
    pub forbidden: Arc<ForbiddenPlaces>,
}

impl fmt::Display for NamedPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.endpoint.fmt(f)
    }
}

impl TcpTarget for NamedPlace {
    async fn connect(&self, _: &TcpStream) -> io::Result<TcpStream> {
        let port = self.endpoint.port;
        match &self.endpoint.host {
            EndpointHost::Address(address) => TcpStream::connect((*address, port)).await,
            EndpointHost::Name(name) => dial_name(name, port, &self.forbidden).await,
        }
    }
}

/// Connects by name. The owner of a name can let it lead anywhere, to the node's own services, too.
/// Those must be named by their addresses.
async fn dial_name(name: &str, port: u16, forbidden: &ForbiddenPlaces) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let found: Vec<SocketAddr> = lookup_host((name, port)).await?.take(ADDRESSES_MAX).collect();
    for address in found {
        if let Err(error) = forbidden.judge(address, &[], &[]).await {
            last = io::Error::new(error.kind(), format!("the name leads to {}: {error}", address.ip()));
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
