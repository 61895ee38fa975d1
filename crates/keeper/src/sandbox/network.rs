//! Sockets in a sandbox' network, made from outside by a thread of the keeper's that enters it for
//! a moment.
//!
//! Nothing in the sandbox takes part: it may be frozen, or out of CPU time. Not here: who connects
//! when (`instances`).

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::thread::{
    LinkNameSpaceType, ThreadNameSpaceType, move_into_link_name_space, move_into_thread_name_spaces,
};

use super::capture::{self, NetworkCapture};
use super::kernel::timespec;
use super::outlet::{self, BACKLOG};

/// Maximum length of a Unix socket's path (unix(7)).
const PATH_LEN_MAX: usize = 107;

/// Maximum time for a port to respond.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_millis(50);

/// The address at which a program in a sandbox listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SandboxAddress {
    /// A Unix socket of the tenant's, by its path in the sandbox.
    Socket(PathBuf),
    /// A port of its loopback.
    Port(u16),
    /// A socket made by `Sandbox::listener`, by its path on the node.
    Listener(PathBuf),
}

/// See `Sandbox::listener`.
pub fn listener(init: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    // By its path, not through a descriptor as elsewhere. CRIU searches that path in the sandbox,
    // and it must find nothing.
    let address = SocketAddrUnix::new(path).map_err(|_| {
        let why = format!("{} is longer than the {PATH_LEN_MAX} bytes of a socket's path", path.display());
        io::Error::new(io::ErrorKind::InvalidInput, why)
    })?;
    let socket = inside(init, || unix_socket(SocketFlags::CLOEXEC))?;
    match rustix::fs::unlinkat(CWD, path, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(errno) => return Err(errno.into()),
    }
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// See `Sandbox::port_listener`.
pub fn port_listener(init: BorrowedFd<'_>, port: u16) -> io::Result<OwnedFd> {
    let kind = SocketType::STREAM;
    let socket = inside(init, || {
        Ok(rustix::net::socket_with(AddressFamily::INET, kind, SocketFlags::CLOEXEC, None)?)
    })?;
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// See `Sandbox::outlets`.
pub fn outlets(init: BorrowedFd<'_>, addresses: &[SocketAddr]) -> io::Result<Vec<OwnedFd>> {
    let at = |address: &SocketAddr| {
        outlet::listen(*address)
            .map_err(|error| io::Error::new(error.kind(), format!("listening at {address} inside: {error}")))
    };
    inside(init, || addresses.iter().map(at).collect())
}

/// See `Sandbox::capture`.
pub fn capture(init: BorrowedFd<'_>) -> io::Result<NetworkCapture> {
    inside(init, capture::capture)
}

/// See `Sandbox::connect`.
pub fn connect(
    init: BorrowedFd<'_>,
    root: BorrowedFd<'_>,
    uid: u32,
    address: &SandboxAddress,
) -> io::Result<OwnedFd> {
    match address {
        SandboxAddress::Listener(path) => {
            let file = rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
            connect_socket(&file)
        }
        SandboxAddress::Socket(path) => connect_socket(&find_socket(root, uid, path)?),
        SandboxAddress::Port(port) => {
            let v4 = SocketAddr::from((Ipv4Addr::LOCALHOST, *port));
            let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, *port));
            // Some runtimes listen only on the first address of `localhost`, of either family.
            match connect_port(init, v4) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => connect_port(init, v6),
                connected => connected,
            }
        }
    }
}

/// Finds the tenant's own socket and nothing else. The tenant could put a link to a database's
/// socket there, which would take the keeper for its peer.
fn find_socket(root: BorrowedFd<'_>, uid: u32, path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let file = rustix::fs::openat2(root, path, flags, Mode::empty(), resolve)?;
    let stat = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket || stat.st_uid != uid {
        let why = "what is at the application's path is not a socket of its tenant";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    Ok(file)
}

fn connect_socket(file: &OwnedFd) -> io::Result<OwnedFd> {
    let socket = unix_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    rustix::net::connect(&socket, &by_descriptor(file)?)?;
    Ok(socket)
}

fn connect_port(init: BorrowedFd<'_>, address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = inside(init, || Ok(rustix::net::socket_with(family, SocketType::STREAM, flags, None)?))?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => Ok(socket),
        Err(Errno::INPROGRESS) => {
            // On loopback the other end responds at once. Otherwise its queue is full, without a
            // known end.
            let mut answered = [PollFd::new(&socket, PollFlags::OUT)];
            if poll(&mut answered, Some(&timespec(HANDSHAKE_TIMEOUT)))? == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            rustix::net::sockopt::socket_error(&socket)??;
            Ok(socket)
        }
        Err(errno) => Err(errno.into()),
    }
}

fn unix_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Returns a socket's address by its descriptor. The path may be longer than an address can be, and
/// may change.
fn by_descriptor(file: &OwnedFd) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?)
}

/// Runs `work` on this thread in the network namespace of another process, and returns to its own.
fn inside<R>(process: BorrowedFd<'_>, work: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let own = rustix::fs::open("/proc/thread-self/ns/net", flags, Mode::empty())?;
    move_into_thread_name_spaces(process, ThreadNameSpaceType::NETWORK)?;
    let _back = NamespaceGuard { own };
    work()
}

/// Returns the thread to its own namespace, also when `work` panics.
struct NamespaceGuard {
    own: OwnedFd,
}

impl Drop for NamespaceGuard {
    fn drop(&mut self) {
        // A thread that cannot return would serve other tenants in this one's network.
        if move_into_link_name_space(self.own.as_fd(), Some(LinkNameSpaceType::Network)).is_err() {
            std::process::abort();
        }
    }
}
