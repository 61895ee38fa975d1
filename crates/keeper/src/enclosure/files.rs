//! The files that are an enclosure's own: opened in the node's mounts, and put in place in a copy of them.
//!
//! Changes of the node's mounts reach the copy, none of the copy reaches the node. Not here: which namespaces there are
//! (`super`).

use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, chown};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, mount_change};

use crate::sandbox;
use crate::sys::Identity;

/// Directories that all users of a machine share, and here each tenant has for itself. The first two are one.
pub const SCRATCH: [&str; 2] = ["/tmp", "/var/tmp"];

const SHARED_MEMORY: &str = "/dev/shm";
const PROC: &str = "/proc";
const RESOLVER: &str = "/etc/resolv.conf";

/// Bytes of a tenant's `/dev/shm`.
const SHM_BYTES_MAX: u64 = 64 << 20;

/// Mounts that are attached nowhere yet, with their places. They are put there in this order.
pub struct Sources {
    mounts: Vec<(OwnedFd, PathBuf)>,
    /// The tenant's home, where it lies in a directory that becomes its own.
    home: Option<(OwnedFd, PathBuf)>,
}

/// `directory`: of the tenant's, made if it is missing. `resolver`: a file of the keeper's in the place of the node's.
pub fn open(
    owner: Identity,
    home: Option<&Path>,
    directory: Option<&Path>,
    resolver: Option<&Path>,
) -> io::Result<Sources> {
    let mut mounts = Vec::new();
    let is_there = |path: &str| Path::new(path).is_dir();
    if let Some(directory) = directory {
        let scratch = directory.join("tmp");
        make_scratch(&scratch, owner)?;
        for place in SCRATCH.into_iter().filter(|place| is_there(place)) {
            mounts.push((sandbox::detached(&scratch, true)?, place.into()));
        }
    }
    let Identity { uid, gid } = owner;
    if is_there(SHARED_MEMORY) {
        mounts.push((sandbox::memory(uid, gid, "1777", SHM_BYTES_MAX)?, SHARED_MEMORY.into()));
    }
    mounts.push((sandbox::own_proc()?, PROC.into()));
    // A service of the node may keep it elsewhere.
    if let (Some(resolver), Ok(place)) = (resolver, fs::canonicalize(RESOLVER)) {
        mounts.push((sandbox::detached(resolver, false)?, place));
    }
    let home = match home.filter(|home| super::is_in_scratch(home)) {
        Some(home) if directory.is_some() => Some((sandbox::detached(home, true)?, home.to_owned())),
        _ => None,
    };
    Ok(Sources { mounts, home })
}

/// It stays what it is over restarts, as `/tmp` does. Only root comes to it by its path.
fn make_scratch(path: &Path, owner: Identity) -> io::Result<()> {
    if let Some(above) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(above)?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    chown(path, Some(owner.uid), Some(owner.gid))
}

/// Puts them in place in the mount namespace of this thread, which must be a copy of its own.
pub fn put(sources: &Sources) -> io::Result<()> {
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    for (mount, place) in &sources.mounts {
        let failed =
            |error: io::Error| io::Error::new(error.kind(), format!("mounting {}: {error}", place.display()));
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let target =
            rustix::fs::open(place, flags, Mode::empty()).map_err(io::Error::from).map_err(failed)?;
        sandbox::attach_to(mount, &target).map_err(failed)?;
    }
    let Some((mount, place)) = &sources.home else { return Ok(()) };
    let target = make_place(place)?;
    sandbox::attach_to(mount, &target)
}

/// The directory at this path, made if it is missing. No link of the tenant's is followed on the way.
fn make_place(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let scratch =
        SCRATCH.iter().map(Path::new).find(|scratch| path.starts_with(scratch)).unwrap_or(Path::new("/"));
    let mut at = rustix::fs::openat(CWD, scratch, flags, Mode::empty())?;
    for part in path.strip_prefix(scratch).unwrap_or(path).components() {
        let Component::Normal(name) = part else { continue };
        match rustix::fs::mkdirat(&at, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
        at = rustix::fs::openat2(at.as_fd(), name, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    }
    Ok(at)
}
