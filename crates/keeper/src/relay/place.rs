//! A place on a network that a record names: an address, or a name that is looked up at each connection.
//!
//! Not here: where no name leads (`forbidden`), which address it has inside (`plan`), what is common to connections there (`tcp`), passing on (`pass`).

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::record::{Endpoint, EndpointHost};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

use super::forbidden::ForbiddenPlaces;
use super::tcp::Target;

/// How long one of several addresses may take.
const ADDRESS_MAX: Duration = Duration::from_secs(3);

/// Addresses of one name that are tried.
const ADDRESSES_MAX: usize = 8;

/// A place, and where its name must not lead.
pub struct NamedPlace {
    pub endpoint: Endpoint,
    pub forbidden: Arc<ForbiddenPlaces>,
}

impl fmt::Display for NamedPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.endpoint.fmt(f)
    }
}

impl Target for NamedPlace {
    async fn connect(&self, _: &TcpStream) -> io::Result<TcpStream> {
        let port = self.endpoint.port;
        match &self.endpoint.host {
            EndpointHost::Address(address) => TcpStream::connect((*address, port)).await,
            EndpointHost::Name(name) => dial_name(name, port, &self.forbidden).await,
        }
    }
}

/// Whoever owns a name can let it lead anywhere, to the node's own services too: those must be named by their addresses.
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
