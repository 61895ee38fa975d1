//! Datagrams with file descriptors: one message in, one message out, and no descriptor left over.
//!
//! The peer may send anything: a message too large, more descriptors than announced, bytes after
//! the message. Each of these is an error, and descriptors that came with it are closed. Not here:
//! the meaning of messages (`protocol`), waiting for the socket (`server`, `client`).

use std::cell::RefCell;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::{Rc, Weak};

use nagaya_base::limits::{KEEPER_FDS_MAX, KEEPER_MESSAGE_MAX};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::sys;

#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// Nothing to read, or no room to write: wait for the socket and try again.
    #[error("the socket is not ready")]
    NotReady,
    #[error("the other end closed the connection")]
    Closed,
    #[error("the socket failed: {0}")]
    Socket(#[source] Errno),
    #[error("a message is larger than {KEEPER_MESSAGE_MAX} bytes")]
    TooLarge,
    #[error("a message came with more than {KEEPER_FDS_MAX} descriptors")]
    TooManyDescriptors,
    #[error("a message does not decode: {0}")]
    Malformed(#[source] postcard::Error),
    #[error("{0} bytes follow a message")]
    TrailingBytes(usize),
}

/// Reads one message. Descriptors of a message that cannot be decoded are closed.
pub fn receive<T: DeserializeOwned>(
    socket: impl AsFd,
    buffer: &mut Vec<u8>,
) -> Result<(T, Vec<OwnedFd>), CodecError> {
    // One byte more than allowed, so that a message of the maximum size is not taken for a
    // truncated one.
    buffer.resize(KEEPER_MESSAGE_MAX + 1, 0);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KEEPER_FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = loop {
        match recvmsg(socket.as_fd(), &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            Ok(received) => break received,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(of_errno(errno)),
        }
    };
    // Taken out first: from here on every return closes them.
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            fds.extend(passed);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > KEEPER_FDS_MAX {
        return Err(CodecError::TooManyDescriptors);
    }
    if received.flags.contains(ReturnFlags::TRUNC) || received.bytes > KEEPER_MESSAGE_MAX {
        return Err(CodecError::TooLarge);
    }
    // An empty datagram looks like the end of the connection, and has no other meaning here.
    if received.bytes == 0 {
        return Err(CodecError::Closed);
    }
    Ok((decode(&buffer[..received.bytes])?, fds))
}

/// Writes one message with its descriptors, entirely or not at all.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), CodecError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KEEPER_FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(CodecError::TooManyDescriptors);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    loop {
        match sendmsg(socket.as_fd(), &[IoSlice::new(bytes)], &mut control, flags) {
            // A datagram socket takes a message as a whole.
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(of_errno(errno)),
        }
    }
}

pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, CodecError> {
    let bytes = postcard::to_stdvec(message).map_err(CodecError::Malformed)?;
    if bytes.len() > KEEPER_MESSAGE_MAX { Err(CodecError::TooLarge) } else { Ok(bytes) }
}

/// Decodes a message from all of these bytes.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    let (message, rest) = postcard::take_from_bytes(bytes).map_err(CodecError::Malformed)?;
    if rest.is_empty() { Ok(message) } else { Err(CodecError::TrailingBytes(rest.len())) }
}

fn of_errno(errno: Errno) -> CodecError {
    match errno {
        Errno::AGAIN | Errno::NOBUFS => CodecError::NotReady,
        Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => CodecError::Closed,
        Errno::MSGSIZE => CodecError::TooLarge,
        errno => CodecError::Socket(errno),
    }
}

/// A socket for messages, on the runtime of one thread. It is watched for writing only while a
/// message waits for room (`quiet_stream` has the reason). It has one reader.
#[derive(Debug)]
pub struct MessageSocket {
    socket: AsyncFd<OwnedFd>,
    /// A copy of the descriptor, while messages wait for room.
    room: RefCell<Weak<AsyncFd<OwnedFd>>>,
}

impl MessageSocket {
    /// `socket` is non-blocking.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        Ok(Self { socket: sys::watch(socket, Interest::READABLE)?, room: RefCell::default() })
    }

    /// Receives the next message, without a time limit.
    pub async fn receive<T: DeserializeOwned>(
        &self,
        buffer: &mut Vec<u8>,
    ) -> Result<(T, Vec<OwnedFd>), CodecError> {
        loop {
            let mut ready = self.socket.readable().await.map_err(|_| CodecError::Closed)?;
            match receive(&self.socket, buffer) {
                Err(CodecError::NotReady) => ready.clear_ready(),
                received => return received,
            }
        }
    }

    /// Sends one message, without a time limit.
    pub async fn send(&self, bytes: &[u8], fds: &[OwnedFd]) -> Result<(), CodecError> {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        match send(&self.socket, bytes, &fds) {
            Err(CodecError::NotReady) => {}
            sent => return sent,
        }
        let room = self.watch_room().map_err(|_| CodecError::Closed)?;
        loop {
            let mut ready = room.writable().await.map_err(|_| CodecError::Closed)?;
            match send(&self.socket, bytes, &fds) {
                Err(CodecError::NotReady) => ready.clear_ready(),
                sent => return sent,
            }
        }
    }

    /// Watches for room while the returned value lives. All waiting messages share one watch.
    fn watch_room(&self) -> io::Result<Rc<AsyncFd<OwnedFd>>> {
        if let Some(room) = self.room.borrow().upgrade() {
            return Ok(room);
        }
        let copy = self.socket.get_ref().try_clone()?;
        let room = Rc::new(sys::watch(copy, Interest::WRITABLE)?);
        self.room.replace(Rc::downgrade(&room));
        Ok(room)
    }
}

impl AsFd for MessageSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests;
