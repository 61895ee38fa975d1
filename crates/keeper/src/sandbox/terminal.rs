//! A terminal in a sandbox: made of the sandbox' own, so that a program finds it by its name, and
//! so that no terminal of the node's is ever in there.
//!
//! Not here: its client (`instances::exec`, and the command line beyond).

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, unlockpt};

/// Path of the sandbox' own device, whatever its `/dev/ptmx` is.
const MULTIPLEXER: &str = "dev/pts/ptmx";

/// Opens its end for a client, and its end for a program.
pub fn open(root: BorrowedFd<'_>) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    let ours = openat2(root, MULTIPLEXER, flags, Mode::empty(), resolve)?;
    unlockpt(&ours)?;
    let theirs = ioctl_tiocgptpeer(&ours, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    Ok((ours, theirs))
}
