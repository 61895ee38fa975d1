//! How connections of one kind are made on both ends of the relay.
//!
//! Not here: passing on (`pass`), kinds (`tcp`, `socket`).

use std::fmt::Display;
use std::io;
use std::os::fd::OwnedFd;

use tokio::io::{AsyncRead, AsyncWrite};

/// One way out of a sandbox. Its text is its name in a record.
pub trait EgressTransport: Display + 'static {
    type Listener;
    type Stream: AsyncRead + AsyncWrite + Unpin;

    /// Whether an image can be taken while a connection of this kind is open.
    const GOES_WITH_IMAGES: bool;

    fn listener(socket: OwnedFd) -> io::Result<Self::Listener>;
    async fn accept(listener: &Self::Listener) -> io::Result<Self::Stream>;
    /// Makes the matching connection outside.
    async fn dial(&self, inside: &Self::Stream) -> io::Result<Self::Stream>;
    fn set_up(inside: &Self::Stream, outside: &Self::Stream);
    /// Prepares a close that the other end notices as a failure.
    fn reset(inside: &Self::Stream);
}
