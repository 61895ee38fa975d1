//! Ways out with TCP at both ends. They differ only in their destination.
//!
//! Not here: where that is (`endpoint`, `outside`, `names`), passing on (`pass`).

use std::fmt::{self, Display};
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};

use super::transport::EgressTransport;

/// Time without bytes after which the connection is checked (TCP keepalive).
const KEEPALIVE: Duration = Duration::from_secs(60);

/// Destination of such a way. Its text is its name in a record.
pub trait TcpTarget: Display + 'static {
    /// Makes the matching connection outside.
    async fn connect(&self, inside: &TcpStream) -> io::Result<TcpStream>;
}

/// The way to such a target.
pub struct TcpTransport<T>(pub T);

impl<T: Display> Display for TcpTransport<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<T: TcpTarget> EgressTransport for TcpTransport<T> {
    type Listener = TcpListener;
    type Stream = TcpStream;

    /// It ends at the keeper's socket in the same network: CRIU closes it in the image alone.
    const GOES_WITH_IMAGES: bool = true;

    fn listener(socket: OwnedFd) -> io::Result<TcpListener> {
        TcpListener::from_std(socket.into())
    }

    async fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
        Ok(listener.accept().await?.0)
    }

    async fn dial(&self, inside: &TcpStream) -> io::Result<TcpStream> {
        let outside = self.0.connect(inside).await?;
        rustix::net::sockopt::set_socket_keepalive(&outside, true)?;
        rustix::net::sockopt::set_tcp_keepidle(&outside, KEEPALIVE)?;
        Ok(outside)
    }

    fn set_up(inside: &TcpStream, outside: &TcpStream) {
        // Small messages, such as queries, are not held back for more to come.
        let _ = (inside.set_nodelay(true), outside.set_nodelay(true));
    }

    fn reset(inside: &TcpStream) {
        // If this cannot be set, the connection closes as usual.
        let _ = inside.set_zero_linger();
    }
}
