//! All of the network but the node as a way out: each connection goes on to the address it was made to.
//!
//! Not here: which addresses are not outside (`forbidden`), how those connections come here (`sandbox::capture`), names (`names`), passing on (`pass`).

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::net::TcpStream;

use super::forbidden::ForbiddenPlaces;
use super::tcp::Target;

/// Holds the capture: with it ends that connections come here.
pub struct Outside {
    _hold: OwnedFd,
    judge: Judge,
}

/// Says what is not outside: what listens on a node trusts who comes from there.
pub struct Judge {
    pub forbidden: Arc<ForbiddenPlaces>,
    /// Of the node's own addresses, these ports are outside, too.
    pub own_ports: Vec<u16>,
    /// Of the cluster's other nodes, these besides.
    pub shared_ports: Vec<u16>,
}

impl Outside {
    pub fn new(hold: OwnedFd, judge: Judge) -> Self {
        Self { _hold: hold, judge }
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
        let Judge { forbidden, own_ports, shared_ports } = &self.judge;
        forbidden.judge(to, own_ports, shared_ports).await.map_err(because)?;
        TcpStream::connect(to).await.map_err(because)
    }
}
