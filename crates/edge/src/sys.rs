//! Makes the edge's system calls for which no safe wrapper exists.
//!
//! Not here: all others; `rustix`, `tokio` and `std` are safe. This is the edge's only file with
//! unsafe code.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::ioctl;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// `SIOCOUTQ`, which Linux defines as `TIOCOUTQ` (asm-generic/ioctls.h).
const SIOCOUTQ: ioctl::Opcode = 0x5411;

/// Returns the bytes that were written to this socket and that the other side has not taken. For
/// TCP, they are not acknowledged.
pub fn queued(socket: impl AsFd) -> io::Result<u64> {
    // SAFETY: SIOCOUTQ writes one C int through its argument and reads nothing, as `Getter`
    // requires. On a descriptor that is no socket it fails without writing.
    let queued = unsafe {
        let getter = ioctl::Getter::<SIOCOUTQ, std::ffi::c_int>::new();
        ioctl::ioctl(socket, getter)?
    };
    Ok(u64::try_from(queued).unwrap_or(0))
}

/// Returns whether the other end of a Unix stream socket has read everything that was written to
/// this one.
pub fn all_read(socket: impl AsFd) -> io::Result<bool> {
    // While the kernel wakes the sender, it still counts one byte of the read data
    // (`sock_wfree`). Each piece in the queue costs hundreds.
    queued(socket).map(|queued| queued <= 1)
}

/// Registers a descriptor with this thread's runtime.
pub fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the returned value owns the descriptor and gives out only references to it. So it
    // stays open, and the same, until the registration has ended.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_single_unread_byte_counts() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        assert!(all_read(&ours).unwrap());
        ours.write_all(b"abc").unwrap();
        theirs.read_exact(&mut [0; 2]).unwrap();
        assert!(!all_read(&ours).unwrap());
        theirs.read_exact(&mut [0; 1]).unwrap();
        assert!(all_read(&ours).unwrap());
    }
}
