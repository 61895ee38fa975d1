//! Reads a stream along which descriptors are passed: the feed from the supervisor.
//!
//! Plain reading would throw them away. Not here: datagrams with descriptors (`codec`), what the
//! frames mean (`feed`).

use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Maximum number of descriptors that come with one frame.
const FDS_MAX: usize = 1;

/// A stream and the descriptor that came last with it.
#[derive(Debug)]
pub struct FdStream {
    stream: UnixStream,
    passed: Option<OwnedFd>,
}

impl FdStream {
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, passed: None }
    }

    /// Takes the descriptor of the last frame. If nobody takes it, the next one closes it.
    pub fn take_passed(&mut self) -> Option<OwnedFd> {
        self.passed.take()
    }
}

impl Read for FdStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [IoSliceMut::new(buffer)];
        let received = loop {
            match recvmsg(&self.stream, &mut bytes, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => break received,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = message {
                self.passed = passed.last();
            }
        }
        Ok(received.bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Write};
    use std::os::fd::AsFd;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    #[test]
    fn a_descriptor_comes_with_the_bytes_it_was_sent_with() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let mut receiving = FdStream::new(theirs);
        let mut bytes = [0; 4];
        ours.write_all(b"none").unwrap();
        receiving.read_exact(&mut bytes).unwrap();
        assert!(receiving.take_passed().is_none());
        let (mut far, near) = UnixStream::pair().unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [near.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&ours, &[IoSlice::new(b"with")], &mut control, SendFlags::empty()).unwrap();
        drop(near);
        receiving.read_exact(&mut bytes).unwrap();
        let mut passed = UnixStream::from(receiving.take_passed().unwrap());
        far.write_all(b"x").unwrap();
        passed.read_exact(&mut bytes[..1]).unwrap();
        assert_eq!(&bytes, b"xith");
        assert!(receiving.take_passed().is_none());
    }
}
