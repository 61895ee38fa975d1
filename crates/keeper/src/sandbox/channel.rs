//! One message with its descriptors over a socket between the keeper, the launcher and an init.
//!
//! All three are this program, and none of them runs a tenant's code. Still an init lives among
//! tenants, so its messages are bounded and checked. Not here: their meaning (`order`), the edge's
//! connections (`nagaya_keeper_api::codec`).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nagaya_keeper_api::codec;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::kernel::timespec;

/// Maximum length of one message, bytes: a program's arguments and environment are the largest
/// part.
pub const MESSAGE_MAX: usize = nagaya_base::limits::KEEPER_MESSAGE_MAX;

/// Maximum number of descriptors of one message. An entrance has one for each hierarchy of cgroups,
/// a program six. A tool that restores an image also has those of its files of memory.
pub const FDS_MAX: usize = 64;

/// Returns both ends of a new connection.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Waits until the whole message is with the other end.
pub fn send(socket: impl AsFd, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = codec::encode(message).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if fds.len() > FDS_MAX || (!fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds))) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for one message"));
    }
    loop {
        match sendmsg(socket.as_fd(), &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL) {
            // A socket of this type takes a message as a whole.
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Receives the next message. `None`: the other end has closed.
pub fn receive<T: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut buffer = vec![0; MESSAGE_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut bytes = [IoSliceMut::new(&mut buffer)];
        match recvmsg(socket.as_fd(), &mut bytes, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => break received,
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            fds.extend(passed);
        }
    }
    if received.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message was cut"));
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    let message = codec::decode(&buffer[..received.bytes]);
    Ok(Some((message.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?, fds)))
}

/// Receives the next message, if it comes in time.
pub fn receive_within<T: DeserializeOwned>(
    socket: impl AsFd,
    within: Duration,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    wait_readable(&socket, within)?;
    receive(socket)
}

/// Returns once there is something to read, or nothing will ever come.
pub fn wait_readable(fd: impl AsFd, within: Duration) -> io::Result<()> {
    let until = Instant::now() + within;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timespec(left))) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
