//! The Unix socket of a database on the node as a way out. Connections to it are made as the
//! instance's tenant.
//!
//! A database may read its peer's ids from the kernel (`SO_PEERCRED`: MariaDB's `unix_socket`,
//! PostgreSQL's `peer`). It gets the effective ids of the thread that calls `connect`. So that
//! thread has the tenant's ids for that moment, and its rights on files. The reported process is
//! the keeper. Not here: passing on (`pass`), its path in the sandbox
//! (`instances::run::sandbox_spec`).

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, Mode};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Gid, Uid, getegid, geteuid, getgroups};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::sleep;

use crate::paths::tenant_path::open_socket;
use crate::sys::UnixIdentity;
use crate::workers::ThreadPool;

use super::transport::EgressTransport;

/// Maximum number of connections that wait to be accepted. The kernel's own limit
/// (`net.core.somaxconn`) is this or less.
const BACKLOG: i32 = 4096;

/// Maximum length of a Unix socket's path (unix(7)).
const PATH_LEN_MAX: usize = 107;

/// First and longest pause before another try at a database whose queue is full.
const FULL_PAUSE: Duration = Duration::from_millis(1);
const FULL_PAUSE_MAX: Duration = Duration::from_millis(50);

/// The real uid and gid of the relay's thread: above tenants' and not of any sandbox, so nobody's.
/// A server that reads the ids of a message's *writer* (`SO_PASSCRED`) gets these, and takes no
/// tenant for root.
const NOBODY: u32 = 1 << 31;

/// One of the three ids of a thread that stays as it is (setresuid(2)).
const SAME_UID: Option<Uid> = None;
const SAME_GID: Option<Gid> = None;

/// A database's socket, and the owner of connections to it.
pub struct SocketTarget {
    /// Path on the node, as the operator has named it.
    pub path: PathBuf,
    pub whose: UnixIdentity,
    pub workers: ThreadPool,
}

impl fmt::Display for SocketTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.display().fmt(f)
    }
}

impl EgressTransport for SocketTarget {
    type Listener = UnixListener;
    type Stream = UnixStream;

    /// CRIU refuses a Unix connection whose other end is outside of the sandbox.
    const GOES_WITH_IMAGES: bool = false;

    fn listener(socket: OwnedFd) -> io::Result<UnixListener> {
        UnixListener::from_std(socket.into())
    }

    async fn accept(listener: &UnixListener) -> io::Result<UnixStream> {
        Ok(listener.accept().await?.0)
    }

    async fn dial(&self, _: &UnixStream) -> io::Result<UnixStream> {
        let mut pause = FULL_PAUSE;
        loop {
            let (path, whose) = (self.path.clone(), self.whose);
            let connected = self.workers.run(move || connect(&path, whose)).map_err(io::Error::other)?;
            match connected.await.map_err(io::Error::other)? {
                // Its queue is full, and the kernel does not report when it has room again.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    sleep(pause).await;
                    pause = (pause * 2).min(FULL_PAUSE_MAX);
                }
                connected => return UnixStream::from_std(connected?.into()),
            }
        }
    }

    fn set_up(_: &UnixStream, _: &UnixStream) {}

    /// There is no other way to close it.
    fn reset(_: &UnixStream) {}
}

/// Listens at a path that only root can reach, for sandboxes into which the socket's file is bound.
/// Non-blocking.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path).map_err(|_| {
        let why = format!("{} is longer than the {PATH_LEN_MAX} bytes of a socket's path", path.display());
        io::Error::new(io::ErrorKind::InvalidInput, why)
    })?;
    let socket = unix_socket()?;
    rustix::net::bind(&socket, &address)?;
    rustix::fs::chmodat(CWD, path, Mode::from_raw_mode(0o666), AtFlags::empty())?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Makes a connection of the tenant's, non-blocking. `WouldBlock`: its queue is full.
pub fn connect(path: &Path, whose: UnixIdentity) -> io::Result<OwnedFd> {
    as_peer(whose, || connect_file(&open_socket(path)?))?
}

/// Connects to an open Unix socket (`O_PATH`), non-blocking, with the present rights of this
/// thread. `WouldBlock`: its queue is full.
pub fn connect_file(file: &OwnedFd) -> io::Result<OwnedFd> {
    let socket = unix_socket()?;
    // By descriptor, so that it is the file that was checked, however long its path is.
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

fn unix_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Runs `act` on this thread as this user: with its rights, and as the peer in connections made
/// meanwhile.
///
/// A thread that cannot return to the keeper's rights ends the process. It would act with one
/// tenant's rights for another.
pub fn as_peer<R>(UnixIdentity { uid, gid }: UnixIdentity, act: impl FnOnce() -> R) -> io::Result<R> {
    let back = RightsGuard { uid: geteuid(), gid: getegid(), groups: getgroups()? };
    set_thread_groups(&[])?;
    // The saved ids stay root's, and lead back. These calls change this thread alone.
    set_thread_res_gid(SAME_GID, Gid::from_raw(gid), SAME_GID)?;
    set_thread_res_uid(SAME_UID, Uid::from_raw(uid), SAME_UID)?;
    let result = act();
    drop(back);
    Ok(result)
}

/// Restores the keeper's own rights, also when `act` panics.
struct RightsGuard {
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
}

impl Drop for RightsGuard {
    fn drop(&mut self) {
        let back = set_thread_res_uid(SAME_UID, self.uid, SAME_UID)
            .and_then(|()| set_thread_res_gid(SAME_GID, self.gid, SAME_GID))
            .and_then(|()| set_thread_groups(&self.groups));
        if back.is_err() {
            std::process::abort();
        }
    }
}

/// Makes this thread's messages in Unix sockets nobody's. It keeps its rights.
pub fn write_as_nobody() -> io::Result<()> {
    set_thread_res_gid(Gid::from_raw(NOBODY), SAME_GID, SAME_GID)?;
    Ok(set_thread_res_uid(Uid::from_raw(NOBODY), SAME_UID, SAME_UID)?)
}
