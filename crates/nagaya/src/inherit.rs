//! Raw numbers from outside: inherited descriptors, the groups of a socket's peer, and the kernel's
//! clock state. The supervisor's descriptors are described, passed and taken over. This is the only
//! file of the crate that may use `unsafe`.
//!
//! Not here: making the sockets (`supervisor::sockets`), starting the process
//! (`supervisor::child`).

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use rustix::io::FdFlags;
use serde::{Deserialize, Serialize};

/// The environment variable that holds [`InheritedFds`] as JSON.
pub const VARIABLE: &str = "NAGAYA_INHERIT";

/// First number of an inherited descriptor; below are the standard streams.
const FIRST: RawFd = 3;

/// Data for a process from the supervisor that started it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InheritedFds {
    /// The supervisor's pid. A process with another parent was orphaned before it could register
    /// for its parent's end.
    pub supervisor: i32,
    /// The stream socket of `records::feed`.
    pub feed: RawFd,
    /// The edge's sockets.
    pub listeners: Vec<InheritedListener>,
    /// The keeper's listening socket.
    pub keeper: Option<RawFd>,
    /// The edge's directory for tickets.
    pub tickets: Option<RawFd>,
    /// The edge's directory for bodies.
    pub spool: Option<RawFd>,
    /// The edge's mount namespace.
    pub root: Option<RawFd>,
    /// The node's own time, in microseconds since 1970.
    pub now_us: u64,
    /// Where other nodes reach the edge.
    pub peers: Option<InheritedPeers>,
    /// Uid and gid to take. `None` keeps those of the start.
    pub identity: Option<(u32, u32)>,
    /// It starts without transparent huge pages, which this process may have (prctl(2),
    /// `PR_SET_THP_DISABLE`).
    pub small_pages: bool,
    pub log_level: String,
    pub log_json: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InheritedListener {
    pub address: String,
    pub tls: bool,
    /// Peers whose PROXY headers are accepted there. `None` if there are none.
    pub proxies: Option<Vec<String>>,
    /// One per edge thread.
    pub sockets: Vec<RawFd>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InheritedPeers {
    /// One per edge thread.
    pub streams: Vec<RawFd>,
    pub probes: RawFd,
}

#[derive(Debug, thiserror::Error)]
pub enum InheritError {
    #[error("this command is started by `nagaya serve` and not by hand")]
    NotInherited,
    #[error("{VARIABLE} does not describe descriptors: {0}")]
    Malformed(#[from] serde_json::Error),
    #[error("descriptor {fd} was not inherited: {error}")]
    Missing { fd: RawFd, error: io::Error },
    #[error("descriptor {0} is described twice or is a standard stream")]
    Reused(RawFd),
}

/// Reads the supervisor's description.
pub fn described() -> Result<InheritedFds, InheritError> {
    let text = std::env::var(VARIABLE).map_err(|_| InheritError::NotInherited)?;
    Ok(serde_json::from_str(&text)?)
}

/// Takes over inherited descriptors, each once.
#[derive(Debug, Default)]
pub struct FdTaker {
    taken: Vec<RawFd>,
}

impl FdTaker {
    pub fn take(&mut self, fd: RawFd) -> Result<OwnedFd, InheritError> {
        if fd < FIRST || self.taken.contains(&fd) {
            return Err(InheritError::Reused(fd));
        }
        if let Err(error) = std::fs::symlink_metadata(format!("/proc/self/fd/{fd}")) {
            return Err(InheritError::Missing { fd, error });
        }
        // SAFETY: it is open, as was just seen, and nothing closes it meanwhile. Processes take
        // over their inheritance first of all, with one thread. It is borrowed for the next call
        // only.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        // Children of this process must not inherit it in turn.
        rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC)
            .map_err(|error| InheritError::Missing { fd, error: error.into() })?;
        self.taken.push(fd);
        // SAFETY: it is open (the call above succeeded), and nothing else in this process owns it.
        // `taken` makes sure that it gets one owner.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// Lets the descriptors survive `exec` while it lives. The supervisor starts processes one after
/// the other from one thread, so no other process inherits them by accident.
#[derive(Debug)]
pub struct PassedFds<'a> {
    descriptors: Vec<BorrowedFd<'a>>,
}

impl<'a> PassedFds<'a> {
    pub fn new(descriptors: Vec<BorrowedFd<'a>>) -> io::Result<Self> {
        let passing = Self { descriptors };
        for descriptor in &passing.descriptors {
            rustix::io::fcntl_setfd(descriptor, FdFlags::empty())?;
        }
        Ok(passing)
    }
}

impl Drop for PassedFds<'_> {
    fn drop(&mut self) {
        for descriptor in &self.descriptors {
            if let Err(error) = rustix::io::fcntl_setfd(descriptor, FdFlags::CLOEXEC) {
                tracing::error!("descriptor {} stays inheritable: {error}", descriptor.as_raw_fd());
            }
        }
    }
}

/// Closes all descriptors but the standard streams. For a process that inherits none, before it has
/// opened any.
pub fn close_all_but_standard() -> io::Result<()> {
    // SAFETY: no `OwnedFd` of this process owns one of them. It has just started, and only the
    // standard streams are used.
    match unsafe { nix::libc::close_range(FIRST.unsigned_abs(), u32::MAX, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the number under which a process that inherits the descriptor finds it.
pub fn number(descriptor: &impl AsFd) -> RawFd {
    descriptor.as_fd().as_raw_fd()
}

/// Groups in the first query; if there are more, it is repeated.
const GROUPS_EXPECTED: usize = 64;

/// Returns the supplementary groups of the process at the other end of a Unix socket
/// (`SO_PEERGROUPS`, Linux 4.13).
pub fn peer_groups(socket: impl AsFd) -> io::Result<Vec<u32>> {
    let fd = socket.as_fd().as_raw_fd();
    let mut groups = vec![0_u32; GROUPS_EXPECTED];
    loop {
        let size = size_of_val(&groups[..]);
        let mut len = nix::libc::socklen_t::try_from(size).map_err(io::Error::other)?;
        // SAFETY: `groups` has `len` bytes, of which any are valid integers. Both live and are not
        // borrowed elsewhere during the call. `fd` is open, as it is borrowed.
        let result = unsafe {
            nix::libc::getsockopt(
                fd,
                nix::libc::SOL_SOCKET,
                nix::libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        let found = usize::try_from(len).map_err(io::Error::other)? / size_of::<u32>();
        if result == 0 {
            groups.truncate(found);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        // The kernel then says how many bytes it needs; the number of groups has a limit
        // (`NGROUPS_MAX`).
        if error.raw_os_error() != Some(nix::libc::ERANGE) || found <= groups.len() {
            return Err(error);
        }
        groups.resize(found, 0);
    }
}

/// Returns whether the machine's clock is synchronised (adjtimex(2)).
pub fn clock_is_synchronised() -> io::Result<bool> {
    // SAFETY: `timex` is a plain C structure of integers, for which all zeroes is a value; `modes`
    // 0 only reads.
    let mut timex: nix::libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a whole `timex` that lives and is not borrowed elsewhere during the
    // call.
    let state = unsafe { nix::libc::adjtimex(&raw mut timex) };
    if state < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(timex.status & nix::libc::STA_UNSYNC == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_taken_once_and_is_closed_on_exec_again() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let fd = std::os::fd::IntoRawFd::into_raw_fd(theirs);
        let mut taker = FdTaker::default();
        let taken = taker.take(fd).unwrap();
        assert_eq!(rustix::io::fcntl_getfd(&taken).unwrap(), FdFlags::CLOEXEC);
        assert!(matches!(taker.take(fd), Err(InheritError::Reused(_))));
        drop((taken, ours));
    }

    #[test]
    fn closed_descriptor_or_standard_stream_is_refused() {
        let mut taker = FdTaker::default();
        assert!(matches!(taker.take(1), Err(InheritError::Reused(1))));
        assert!(matches!(taker.take(1_000_000), Err(InheritError::Missing { .. })));
    }

    #[test]
    fn passing_ends_with_its_guard() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let passing = PassedFds::new(vec![ours.as_fd()]).unwrap();
        assert_eq!(rustix::io::fcntl_getfd(&ours).unwrap(), FdFlags::empty());
        drop(passing);
        assert_eq!(rustix::io::fcntl_getfd(&ours).unwrap(), FdFlags::CLOEXEC);
    }
}
