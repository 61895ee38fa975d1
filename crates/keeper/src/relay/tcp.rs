//! Ways out with TCP at both ends: they differ in where they lead, and in nothing else.
//!
//! Not here: where that is (`place`, `outside`, `names`), passing on (`pass`).

use std::fmt::{self, Display};
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};

use super::pass::Way;

/// How long nothing may come before it is asked whether the other end is still there.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// Where such a way leads. Its text is how it is named in a record.
pub trait Target: Display + 'static {
    /// Makes the connection outside that belongs to this one.
    async fn connect(&self, inside: &TcpStream) -> io::Result<TcpStream>;
}

/// The way to such a target.
pub struct Tcp<T>(pub T);

impl<T: Display> Display for Tcp<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<T: Target> Way for Tcp<T> {
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
        // What cannot be set closes as usual.
        let _ = inside.set_zero_linger();
    }
}
