//! The directories of a node: made at start, locked against a second node, cleared at the end.
//!
//! Not here: the sockets in them (`sockets`), the store (`store`).

use std::ffi::OsString;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags};

use crate::config::NodeSettings;
use crate::identity::ProcessIdentity;
use crate::supervisor::edge_root::close_off;
use crate::supervisor::error::ServeError;

/// A claimed runtime directory. Dropping it removes the node's files in it.
#[derive(Debug)]
pub struct RuntimeDir {
    runtime_dir: PathBuf,
    /// This node made the runtime directory, so it is removed with the node.
    made: bool,
    /// Their contents belong to one life of the node.
    dirs: [PathBuf; 2],
    sockets: [PathBuf; 2],
    lock_file: PathBuf,
    _lock: File,
}

impl RuntimeDir {
    /// Makes the directories and takes the lock. Another node's files are not touched before the
    /// lock is held.
    pub fn claim(settings: &NodeSettings) -> Result<Self, ServeError> {
        let made = !settings.runtime_dir.exists();
        // Tenants' programs reach their sockets through it.
        make_dir(&settings.runtime_dir, 0o755)?;
        let lock = lock(&settings.lock_file(), &settings.runtime_dir)?;
        // Records hold settings of applications, which may be secrets.
        make_dir(&settings.state_dir, 0o700)?;
        let place = Self {
            runtime_dir: settings.runtime_dir.clone(),
            made,
            dirs: [settings.keeper_dir(), settings.rules_dir()],
            sockets: [settings.admin_socket(), settings.keeper_socket()],
            lock_file: settings.lock_file(),
            _lock: lock,
        };
        // A killed node left its sockets; they are unused, since the lock was free.
        place.clear();
        make_dir(&settings.keeper_dir(), 0o755)?;
        Ok(place)
    }

    fn clear(&self) {
        for dir in &self.dirs {
            remove(std::fs::remove_dir_all(dir), dir);
        }
        for file in &self.sockets {
            remove(std::fs::remove_file(file), file);
        }
    }
}

impl Drop for RuntimeDir {
    fn drop(&mut self) {
        self.clear();
        // This comes last, and while the lock is held. A process that opened the file before finds
        // it locked or unlinked, and makes a new one.
        remove(std::fs::remove_file(&self.lock_file), &self.lock_file);
        if self.made {
            remove(std::fs::remove_dir(&self.runtime_dir), &self.runtime_dir);
        }
    }
}

fn remove(result: io::Result<()>, path: &Path) {
    if let Err(error) = result
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), "the file cannot be removed: {error}");
    }
}

fn make_dir(path: &Path, mode: u32) -> Result<(), ServeError> {
    let failed = |error| ServeError::Directory { path: path.into(), error };
    if path.is_dir() {
        return Ok(());
    }
    std::fs::DirBuilder::new().recursive(true).mode(mode).create(path).map_err(failed)?;
    // The umask may have removed bits that tenants' programs need.
    std::fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed)
}

fn lock(path: &Path, runtime_dir: &Path) -> Result<File, ServeError> {
    let failed = |error| ServeError::Directory { path: path.into(), error };
    loop {
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(failed)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(ServeError::Running { path: runtime_dir.into() });
            }
            Err(error) => return Err(failed(error.into())),
        }
        // A node that just ended may have removed the file between the two calls; its lock then
        // guards nothing.
        if is_same_file(&file, path) {
            return Ok(file);
        }
    }
}

fn is_same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(ours), Ok(there)) => (ours.dev(), ours.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

/// Directories that the service manager made for the logs of this service (systemd.exec(5)),
/// separated by `:`.
const LOGS_DIRECTORY: &str = "LOGS_DIRECTORY";

/// Mode of a directory of the access log. The edge passes through it by its group, and only root
/// lists it.
const LOG_DIR_MODE: u32 = 0o710;

/// Makes the access log for an edge that could not make it with its own rights. An existing file
/// stays as it is: it could belong to somebody else.
pub fn prepare_access_log(settings: &NodeSettings, identity: Option<ProcessIdentity>) {
    let Some(path) = settings.access_log() else { return };
    let directory = settings.access_log_dir();
    let directory =
        directory.map_or(Ok(()), |dir| prepare_log_dir(dir, identity, std::env::var_os(LOGS_DIRECTORY)));
    let made = directory.and_then(|()| {
        let file = OpenOptions::new().append(true).create_new(true).mode(0o640).open(path)?;
        match identity {
            Some(identity) => std::os::unix::fs::fchown(&file, Some(identity.uid), Some(identity.gid)),
            None => Ok(()),
        }
    });
    match made {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            tracing::error!(code = "NGY0506", path = %path.display(), "the access log cannot be made: {error}");
        }
        _ => {}
    }
}

/// Makes the directory of the access log, closed to tenants. An existing one keeps its mode, as it
/// may have other purposes. Those in `own` do not, because the service manager made them for this
/// service alone.
fn prepare_log_dir(dir: &Path, identity: Option<ProcessIdentity>, own: Option<OsString>) -> io::Result<()> {
    let is_new = !dir.exists();
    if is_new {
        std::fs::create_dir_all(dir)?;
    }
    let is_own = own.is_some_and(|own| std::env::split_paths(&own).any(|own| own == dir));
    if !is_new && !is_own {
        return Ok(());
    }
    if let Some(identity) = identity {
        std::os::unix::fs::chown(dir, None, Some(identity.gid))?;
    }
    std::fs::set_permissions(dir, Permissions::from_mode(LOG_DIR_MODE))
}

/// Makes and opens the directory for the edge's promises. Without one it serves and promises
/// nothing.
///
/// With `is_closed_off`, nothing above it is reachable by its descriptor.
pub fn prepare_tickets(
    settings: &NodeSettings,
    identity: Option<ProcessIdentity>,
    is_closed_off: bool,
) -> Option<OwnedFd> {
    let path = settings.state_dir.join("tickets");
    own_directory(settings, &path, identity)
        .and_then(|directory| if is_closed_off { close_off(&directory) } else { Ok(directory) })
        .inspect_err(|error| {
            tracing::error!(
                code = "NGY0513",
                path = %path.display(),
                "no tickets are given: their directory cannot be made: {error}"
            );
        })
        .ok()
}

/// Makes and opens the directory for the edge's large bodies. Without one it accepts bodies that
/// fit into memory.
///
/// With `is_closed_off`, nothing above it is reachable by its descriptor.
pub fn prepare_spool(
    settings: &NodeSettings,
    identity: Option<ProcessIdentity>,
    is_closed_off: bool,
) -> Option<OwnedFd> {
    let path = settings.spool_dir();
    let open = || {
        let directory = own_directory(settings, &path, identity)?;
        // This finds a file system without unnamed files now, and not at the first upload.
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        rustix::fs::openat(&directory, ".", flags, rustix::fs::Mode::RUSR)?;
        if is_closed_off { close_off(&directory) } else { Ok::<_, io::Error>(directory) }
    };
    open()
        .inspect_err(|error| {
            tracing::error!(
                code = "NGY0472",
                path = %path.display(),
                "large uploads are refused: the spool directory cannot be used: {error}"
            );
        })
        .ok()
}

/// Returns a directory that only the edge enters, made if it does not exist. One that others may
/// enter stays as it is, because it could belong to somebody else. If it is in the node's own
/// directory, for example a mounted disk, it is changed.
fn own_directory(
    settings: &NodeSettings,
    path: &Path,
    identity: Option<ProcessIdentity>,
) -> io::Result<OwnedFd> {
    let is_new = match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
        Err(error) => return Err(error),
    };
    let directory = OpenOptions::new()
        .read(true)
        .custom_flags((OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC).bits().cast_signed())
        .open(path)?;
    let found = directory.metadata()?;
    let is_ours = found.uid() == rustix::process::geteuid().as_raw()
        || identity.is_some_and(|identity| found.uid() == identity.uid);
    let is_ours_to_give = is_ours && found.mode() & 0o077 == 0;
    if !is_new && !is_ours_to_give && path.parent() != Some(&*settings.state_dir) {
        let what = "it is there and others may enter it: name a directory that nagaya may make";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
    if let Some(identity) = identity {
        std::os::unix::fs::fchown(&directory, Some(identity.uid), Some(identity.gid))?;
    }
    Ok(directory.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(dir: &Path) -> NodeSettings {
        NodeSettings { runtime_dir: dir.join("run"), state_dir: dir.join("state"), ..NodeSettings::default() }
    }

    #[test]
    fn one_runtime_directory_holds_one_node_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let settings = settings(dir.path());
        let first = RuntimeDir::claim(&settings).unwrap();
        assert!(matches!(RuntimeDir::claim(&settings), Err(ServeError::Running { .. })));
        assert!(settings.keeper_dir().is_dir(), "the second one must not clear the first one's directory");
        drop(first);
        drop(RuntimeDir::claim(&settings).unwrap());
    }

    #[test]
    fn nothing_is_left_behind_and_nothing_else_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let settings = settings(dir.path());
        drop(RuntimeDir::claim(&settings).unwrap());
        assert!(!settings.runtime_dir.exists());
        assert!(settings.state_dir.is_dir());

        std::fs::create_dir(&settings.runtime_dir).unwrap();
        std::fs::write(settings.runtime_dir.join("other"), "").unwrap();
        let place = RuntimeDir::claim(&settings).unwrap();
        std::fs::write(settings.keeper_dir().join("worker.sock"), "").unwrap();
        drop(place);
        let left: Vec<_> =
            std::fs::read_dir(&settings.runtime_dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["other"]);
    }

    #[test]
    fn an_access_log_that_exists_keeps_its_owner_and_content() {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = settings(dir.path());
        let log = dir.path().join("log/access.log");
        settings.edge.log.access = Some(log.clone());
        prepare_access_log(&settings, None);
        assert_eq!(std::fs::metadata(&log).unwrap().permissions().mode() & 0o777, 0o640);
        std::fs::write(&log, "kept").unwrap();
        prepare_access_log(&settings, None);
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "kept");
    }

    #[test]
    fn a_directory_of_logs_is_closed_if_it_is_the_nodes_own() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let mode = |name: &str| std::fs::metadata(at(name)).unwrap().permissions().mode() & 0o777;
        prepare_log_dir(&at("new/deep"), None, None).unwrap();
        assert_eq!((mode("new/deep"), mode("new") & 0o700), (LOG_DIR_MODE, 0o700));
        std::fs::create_dir(at("shared")).unwrap();
        std::fs::set_permissions(at("shared"), Permissions::from_mode(0o755)).unwrap();
        prepare_log_dir(&at("shared"), None, Some(at("other").into_os_string())).unwrap();
        assert_eq!(mode("shared"), 0o755, "it may be for more than these logs");
        let own = std::env::join_paths([at("other"), at("shared")]).unwrap();
        prepare_log_dir(&at("shared"), None, Some(own)).unwrap();
        assert_eq!(mode("shared"), LOG_DIR_MODE);
    }
}
