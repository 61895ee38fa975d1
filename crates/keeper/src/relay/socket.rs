//! The Unix socket of a database on the node as a way out: connections to it are made as the instance's tenant.
//!
//! A database that asks the kernel who connects (`SO_PEERCRED`: MariaDB's `unix_socket`, PostgreSQL's `peer`) is told the
//! effective ids of the thread that calls `connect`, so that thread has the tenant's for that moment, and its rights on files.
//! The process it is told is the keeper. Not here: passing on (`pass`), where the sandbox shows it (`instances::surroundings`).

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Gid, Uid, getegid, geteuid, getgroups};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::sleep;

use super::pass::Way;
use crate::sys::Identity;
use crate::workers::Workers;

/// Connections that may wait to be accepted; the kernel's own bound (`net.core.somaxconn`) is this or less.
const BACKLOG: i32 = 4096;

/// Bytes of a Unix socket's path (unix(7)).
const PATH_LEN_MAX: usize = 107;

/// Links on the way to a socket, the kernel's own bound (path_resolution(7)).
const LINKS_MAX: usize = 40;

/// First and longest pause before a database whose queue is full is asked again.
const FULL_PAUSE: Duration = Duration::from_millis(1);
const FULL_PAUSE_MAX: Duration = Duration::from_millis(50);

/// The real uid and gid of the relay's thread: beyond tenants' and not of any sandbox, so nobody's. A server that asks for
/// the ids of who *wrote* a message (`SO_PASSCRED`) is told these, and takes no tenant for root.
const NOBODY: u32 = 1 << 31;

/// One of the three ids of a thread that stays as it is (setresuid(2)).
const SAME_UID: Option<Uid> = None;
const SAME_GID: Option<Gid> = None;

/// A database's socket, and whose connections to it are.
pub struct Socket {
    /// On the node, as the operator has named it.
    pub path: PathBuf,
    pub whose: Identity,
    pub workers: Workers,
}

impl fmt::Display for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.display().fmt(f)
    }
}

impl Way for Socket {
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
                // Its queue is full, and the kernel does not tell when it is not any more.
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

/// Listens at a path that only root can reach, for whoever gets the socket's file bound into its sandbox. Not blocking.
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

/// A connection of the tenant's, not blocking. `WouldBlock`: its queue is full.
fn connect(path: &Path, whose: Identity) -> io::Result<OwnedFd> {
    as_peer(whose, || {
        let file = find(path)?;
        if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::Socket {
            return Err(io::Error::other("it is no socket"));
        }
        let socket = unix_socket()?;
        // By descriptor, so that it is the file that was looked at, however long its path is.
        let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        rustix::net::connect(&socket, &address)?;
        Ok(socket)
    })?
}

fn unix_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Opens what the operator has named. Links count only where nobody but root can put one, `/var/run` for one: by a link of
/// its own a tenant would choose which of the node's sockets it is let into.
fn find(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = || rustix::fs::openat(CWD, "/", flags, Mode::empty());
    let mut at = root()?;
    let mut rest = names(path);
    let mut links = 0;
    while let Some(name) = rest.pop_front() {
        let found = rustix::fs::openat(&at, name.as_os_str(), flags, Mode::empty())?;
        if FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) != FileType::Symlink {
            at = found;
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(Errno::LOOP.into());
        }
        if !is_roots_alone(&rustix::fs::fstat(&at)?) {
            let why =
                format!("{} leads through a link that is not root's: name where it leads", path.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        let to = rustix::fs::readlinkat(&found, "", Vec::new())?;
        let to = PathBuf::from(OsString::from_vec(to.into_bytes()));
        if to.is_absolute() {
            at = root()?;
        }
        rest = names(&to).into_iter().chain(rest).collect();
    }
    Ok(at)
}

/// The parts of a path, `..` among them.
fn names(path: &Path) -> VecDeque<OsString> {
    let named = path.components().filter(|part| !matches!(part, Component::RootDir | Component::CurDir));
    named.map(|part| part.as_os_str().to_owned()).collect()
}

/// Whether nobody but root can put anything into this directory.
fn is_roots_alone(directory: &Stat) -> bool {
    directory.st_uid == 0 && directory.st_mode & (Mode::WGRP | Mode::WOTH).as_raw_mode() == 0
}

/// Runs `act` on this thread as this tenant: with its rights, and as its peer of whoever is connected to meanwhile.
///
/// A thread that cannot come back ends the process, for it would act with a tenant's rights for another tenant.
fn as_peer<R>(Identity { uid, gid }: Identity, act: impl FnOnce() -> R) -> io::Result<R> {
    let back = Back { uid: geteuid(), gid: getegid(), groups: getgroups()? };
    set_thread_groups(&[])?;
    // The saved ids stay root's, and lead back. These calls change this thread alone.
    set_thread_res_gid(SAME_GID, Gid::from_raw(gid), SAME_GID)?;
    set_thread_res_uid(SAME_UID, Uid::from_raw(uid), SAME_UID)?;
    let result = act();
    drop(back);
    Ok(result)
}

/// Puts the keeper's own rights back, also when `act` panics.
struct Back {
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
}

impl Drop for Back {
    fn drop(&mut self) {
        let back = set_thread_res_uid(SAME_UID, self.uid, SAME_UID)
            .and_then(|()| set_thread_res_gid(SAME_GID, self.gid, SAME_GID))
            .and_then(|()| set_thread_groups(&self.groups));
        if back.is_err() {
            std::process::abort();
        }
    }
}

/// Makes what this thread writes into Unix sockets nobody's. It keeps its rights.
pub fn write_as_nobody() -> io::Result<()> {
    set_thread_res_gid(Gid::from_raw(NOBODY), SAME_GID, SAME_GID)?;
    Ok(set_thread_res_uid(Uid::from_raw(NOBODY), SAME_UID, SAME_UID)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    fn inode(path: &str) -> io::Result<u64> {
        Ok(rustix::fs::fstat(find(Path::new(path))?)?.st_ino)
    }

    #[test]
    fn a_link_of_roots_is_followed_and_leads_where_it_says() {
        let expected = std::fs::metadata("/proc/self").unwrap().ino();
        for path in ["/proc/self", "/proc/self/", "/proc/./self/../self", "/../proc/self"] {
            assert_eq!(inode(path).unwrap(), expected, "{path}");
        }
        assert_eq!(inode("/proc/self/no-such-file").unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_link_that_anybody_may_have_put_there_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        symlink("file", dir.path().join("link")).unwrap();
        symlink(".", dir.path().join("here")).unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        assert!(inode(&path("file")).is_ok());
        for name in ["link", "here/file"] {
            let error = inode(&path(name)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{name}: {error}");
        }
    }

    #[test]
    fn links_without_end_are_given_up() {
        // As root the directory is root's alone; else the first link is refused already.
        let dir = tempfile::tempdir().unwrap();
        symlink("a", dir.path().join("a")).unwrap();
        assert!(find(&dir.path().join("a")).is_err());
    }
}
