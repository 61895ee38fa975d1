//! An enclosure's own files: opened in the node's mounts, and attached in a copy of them.
//!
//! Changes of the node's mounts reach the copy, and changes of the copy do not reach the node. Not
//! here: the set of namespaces (`super`).

use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, mount_change};

use crate::sys::UnixIdentity;
use crate::{mail, sandbox};

/// Directories that all users of a machine share, and that each tenant has for itself here. The
/// first two are one.
pub const SCRATCH: [&str; 2] = ["/tmp", "/var/tmp"];

pub const SHARED_MEMORY: &str = "/dev/shm";
const PROC: &str = "/proc";
const RESOLVER: &str = "/etc/resolv.conf";

/// Size of a tenant's `/dev/shm`, bytes.
const SHM_BYTES_MAX: u64 = 64 << 20;

/// Detached mounts with their paths, attached in this order.
pub struct EnclosureMounts {
    mounts: Vec<(OwnedFd, PathBuf)>,
    /// The tenant's home, if it is in a directory that becomes its own.
    home: Option<(OwnedFd, PathBuf)>,
}

/// `directory`: of the tenant's, made if it is missing. `resolver`: a file of the keeper's that
/// replaces the node's.
pub fn open(
    owner: UnixIdentity,
    home: Option<&Path>,
    directory: Option<&Path>,
    resolver: Option<&Path>,
) -> io::Result<EnclosureMounts> {
    let mut mounts = Vec::new();
    let is_there = |path: &str| Path::new(path).is_dir();
    if let Some(directory) = directory {
        let scratch = directory.join("tmp");
        make_scratch(&scratch, owner)?;
        for place in SCRATCH.into_iter().filter(|place| is_there(place)) {
            mounts.push((sandbox::detached(&scratch, true)?, place.into()));
        }
    }
    let UnixIdentity { uid, gid } = owner;
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
    Ok(EnclosureMounts { mounts, home })
}

/// Returns the path of nagaya's own `sendmail` for programs, whatever the node has.
fn sendmail_place(runtime: &Path) -> PathBuf {
    runtime.join("sendmail")
}

const USUAL_SENDMAIL: &str = "/usr/sbin/sendmail";

/// Makes the file over which it is mounted.
pub fn make_sendmail_place(runtime: &Path) -> io::Result<()> {
    let path = sendmail_place(runtime);
    fs::write(&path, "#!/bin/sh\necho nagaya relays no mail here >&2; exit 69\n")?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
}

impl EnclosureMounts {
    /// Replaces a mail server's `sendmail`, or adds it at the keeper's path if there is none.
    /// Returns its path. `None` if no path is possible, and programs have to speak SMTP.
    pub fn add_sendmail(&mut self, runtime: &Path) -> io::Result<Option<PathBuf>> {
        let Some(program) = mail::program() else { return Ok(None) };
        let usual = Path::new(USUAL_SENDMAIL);
        // A mail server's may be a link (Debian's `alternatives` and Exim).
        let (place, found_at) = match fs::canonicalize(usual) {
            Ok(place) if place.is_file() => (place, usual.to_owned()),
            // The keeper's path is in a directory that this tenant has for itself.
            _ if super::is_in_scratch(runtime) => return Ok(None),
            _ => (sendmail_place(runtime), sendmail_place(runtime)),
        };
        self.mounts.push((sandbox::detached(program, false)?, place));
        Ok(Some(found_at))
    }
}

/// Makes a directory that survives restarts, as `/tmp` does. Only root reaches it by its path.
fn make_scratch(path: &Path, owner: UnixIdentity) -> io::Result<()> {
    if let Some(above) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(above)?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    chown(path, Some(owner.uid), Some(owner.gid))
}

/// Attaches them in this thread's mount namespace, which must be a copy of its own.
pub fn put(sources: &EnclosureMounts) -> io::Result<()> {
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

/// Opens the directory at this path, made if it is missing. No link of the tenant's is followed on
/// the way.
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
