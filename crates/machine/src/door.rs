//! The way of the node's device to a machine that was saved: `nagaya vm-wake` hands its standard
//! input to `vm-run`.
//!
//! CRIU carries no descriptor of `/dev/kvm`. So `vm-run` holds none while QEMU does not start, and
//! the keeper hands it another at each wake. The socket has a name in the network of the sandbox,
//! where nobody but the tenant is. Not here: what happens then (`run`).

use std::io::{self, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Abstract name of the socket (unix(7)).
const NAME: &[u8] = b"nagaya-machine";

/// Maximum time of a caller for its message.
const MESSAGE_MAX: Duration = Duration::from_secs(1);

/// Maximum time until the machine goes on.
const RESUME_MAX: Duration = Duration::from_secs(60);

/// The message of a wake, and the reply once the machine goes on.
const WAKE: &[u8] = b"w";
const RESUMED: &[u8] = b"r";

/// The socket of `vm-run`.
#[derive(Debug)]
pub struct WakeDoor(UnixListener);

/// A caller that has handed over a device, and waits for the machine.
#[derive(Debug)]
pub struct WakeCall {
    stream: UnixStream,
    pub device: OwnedFd,
}

impl WakeDoor {
    pub fn open() -> io::Result<Self> {
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(NAME)?)?;
        listener.set_nonblocking(true)?;
        Ok(Self(listener))
    }

    pub const fn listener(&self) -> &UnixListener {
        &self.0
    }

    /// Returns a caller, if there is one. One without a device is sent away.
    pub fn take(&self) -> io::Result<WakeCall> {
        let (stream, _) = self.0.accept()?;
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(MESSAGE_MAX))?;
        stream.set_write_timeout(Some(MESSAGE_MAX))?;
        let mut byte = [0; WAKE.len()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let parts = &mut [io::IoSliceMut::new(&mut byte)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        recvmsg(&stream, parts, &mut control, flags).map_err(io::Error::from)?;
        let mut device = None;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                device = device.or(fds.last());
            }
        }
        let device = device.ok_or(io::ErrorKind::InvalidData)?;
        Ok(WakeCall { stream, device })
    }
}

impl WakeCall {
    /// Tells a caller that the machine goes on. It may have left.
    pub fn finish(mut self) {
        let _ = self.stream.write_all(RESUMED);
    }
}

/// Hands standard input to the machine of this sandbox. Returns when that goes on.
pub fn hand_over() -> io::Result<()> {
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(NAME)?)?;
    stream.set_read_timeout(Some(RESUME_MAX))?;
    let input = io::stdin();
    let fds = [input.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let parts = [io::IoSlice::new(WAKE)];
    sendmsg(&stream, &parts, &mut control, SendFlags::NOSIGNAL).map_err(io::Error::from)?;
    let mut reply = [0; RESUMED.len()];
    stream.read_exact(&mut reply)
}
