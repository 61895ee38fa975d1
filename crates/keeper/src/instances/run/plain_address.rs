//! The address at which a plain application listens: chooses it, and connects to it and nothing
//! else.
//!
//! Not here: applications in sandboxes, whose sockets nobody else can reach (`sandbox`), starting
//! them (`start`).

use std::fs;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::record::AppListen;
use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::fault::{self, Fault};
use crate::spawn::{AppAddress, RunAs};

/// Maximum length of a Unix socket's path, `sun_path` less its NUL (unix(7)).
const SOCKET_PATH_MAX: usize = 107;

/// Queue of connections of a socket that the keeper listens on for an application. The kernel's own
/// default limit.
const BACKLOG: i32 = 4096;

/// The address at which an application is to listen, and the socket itself if the keeper has made
/// it.
pub struct AppListener {
    pub address: AppAddress,
    pub listener: Option<OwnedFd>,
}

/// Makes the address. `dir` does not exist yet, and its name is this application's alone.
pub fn give(listen: AppListen, dir: &Path, runner: &RunAs) -> Result<AppListener, Fault> {
    match listen {
        AppListen::Port => {
            // The port is free now. Whether it later belongs to the application is checked once it
            // listens.
            let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
            let given = |address: SocketAddr| AppListener {
                address: AppAddress::Port(address.port()),
                listener: None,
            };
            port.map(given).map_err(|error| {
                Fault::new(FailureKind::Busy, fault::APP, format!("no loopback port is free: {error}"))
            })
        }
        AppListen::Socket => {
            let path = socket_in(dir)?;
            let made = directory(dir).and_then(|()| match runner.identity {
                Some(identity) => std::os::unix::fs::chown(dir, Some(identity.uid), Some(identity.gid)),
                None => Ok(()),
            });
            made.map(|()| AppListener { address: AppAddress::Socket(path), listener: None })
                .map_err(|error| Fault::of_path(fault::APP, "cannot make", dir, error))
        }
        AppListen::Fd => {
            let path = socket_in(dir)?;
            let listening = || -> io::Result<OwnedFd> {
                directory(dir)?;
                let socket = unix_socket(SocketFlags::CLOEXEC)?;
                rustix::net::bind(&socket, &SocketAddrUnix::new(&path)?)?;
                rustix::net::listen(&socket, BACKLOG)?;
                Ok(socket)
            };
            let listener =
                listening().map_err(|error| Fault::of_path(fault::APP, "cannot listen on", &path, error))?;
            Ok(AppListener { address: AppAddress::Inherited(path), listener: Some(listener) })
        }
    }
}

fn directory(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o700).create(dir)
}

fn unix_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

fn socket_in(dir: &Path) -> Result<PathBuf, Fault> {
    let path = dir.join("app.sock");
    if path.as_os_str().len() <= SOCKET_PATH_MAX {
        return Ok(path);
    }
    let message = format!(
        "{} is longer than the {SOCKET_PATH_MAX} bytes a socket's path may have: choose a shorter runtime directory",
        path.display()
    );
    Err(Fault::new(FailureKind::Broken, fault::APP, message))
}

/// Makes a non-blocking connection. `WouldBlock`: the application's queue is full.
pub async fn connect(address: &AppAddress, owner: Option<u32>) -> io::Result<OwnedFd> {
    match address {
        AppAddress::Socket(path) => connect_socket(path, owner),
        // The keeper's own socket, in a directory that nobody else enters.
        AppAddress::Inherited(path) => connect_socket(path, None),
        AppAddress::Port(port) => {
            let v4 = SocketAddr::from((Ipv4Addr::LOCALHOST, *port));
            let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, *port));
            // Some runtimes listen only on the first address of `localhost`, of either family.
            let stream = match tokio::net::TcpStream::connect(v4).await {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    tokio::net::TcpStream::connect(v6).await?
                }
                connected => connected?,
            };
            Ok(stream.into_std()?.into())
        }
    }
}

/// Connects to the tenant's own socket and to nothing else. The tenant owns the directory, and
/// could put a link to another's socket there. That server would then take the keeper for its root
/// peer.
fn connect_socket(path: &Path, owner: Option<u32>) -> io::Result<OwnedFd> {
    let file =
        rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    let is_socket = FileType::from_raw_mode(stat.st_mode) == FileType::Socket;
    if !is_socket || owner.is_some_and(|owner| stat.st_uid != owner) {
        let why = "what is at the application's path is not a socket of its tenant";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    let socket = unix_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    // By descriptor, so that it is the file that was just checked.
    rustix::net::connect(&socket, &SocketAddrUnix::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?)?;
    Ok(socket)
}

/// Whether every listener on this port is the tenant: another could have taken it first.
pub fn is_owner(port: u16, owner: Option<u32>) -> Result<(), Fault> {
    let Some(owner) = owner else { return Ok(()) };
    let mut listeners = Vec::new();
    for path in ["/proc/net/tcp", "/proc/net/tcp6"] {
        // A kernel without IPv6 has no second file.
        let table = fs::read_to_string(path).unwrap_or_default();
        listeners.extend(table.lines().filter_map(|line| listener_uid(line, port)));
    }
    if !listeners.is_empty() && listeners.iter().all(|uid| *uid == owner) {
        return Ok(());
    }
    let message =
        format!("port {port} is listened on by uids {listeners:?}, not by its tenant {owner} alone");
    Err(Fault::new(FailureKind::Busy, fault::APP, message))
}

/// Returns the uid in a line of `/proc/net/tcp`, if it is a socket that listens on this port.
/// Format: `n: addr:port peer 0A queues timer retransmits uid ...`, with addresses and states in
/// hexadecimal (proc(5)).
fn listener_uid(line: &str, port: u16) -> Option<u32> {
    let mut fields = line.split_ascii_whitespace();
    let (_, local) = fields.nth(1)?.rsplit_once(':')?;
    let state = fields.nth(1)?;
    let listens = state == "0A" && u16::from_str_radix(local, 16) == Ok(port);
    if listens { fields.nth(3)?.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uid_of_a_listener_is_read_from_the_kernels_table() {
        let line =
            "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 5 1";
        assert_eq!(listener_uid(line, 8080), Some(1000));
        assert_eq!(listener_uid(line, 8081), None);
        assert_eq!(listener_uid(&line.replace(" 0A ", " 01 "), 8080), None);
        assert_eq!(listener_uid("  sl  local_address rem_address   st", 8080), None);
    }

    #[test]
    fn a_real_listener_is_its_own_users() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let uid = rustix::process::geteuid().as_raw();
        assert_eq!(is_owner(port, Some(uid)), Ok(()));
        assert!(is_owner(port, Some(uid + 1)).is_err());
    }
}
