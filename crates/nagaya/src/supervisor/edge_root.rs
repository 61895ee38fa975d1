//! The edge's own root directory: a mount namespace that has only what the edge opens by a path.
//!
//! The supervisor makes it once, and each edge enters it before it gives up its rights. It is a
//! read-only file system in memory with a few mounts. They are directories of rules, the access
//! log, the keeper's socket, and two files of `/proc`. Files for name resolution are copies
//! (`names`). The edge gets everything else as descriptors. No path leads up from these
//! directories: each is a mount of its own, attached nowhere.
//!
//! The file at a path may be replaced while the edge runs, and a changed configuration may name
//! other paths. So the supervisor checks all of them twice a second, and whenever it makes the edge
//! reopen something.
//!
//! Not here: the choice of paths (`plan`), entering (`rights`), document roots and servers' sockets
//! (the keeper's).

mod names;
mod plan;

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path};
use std::sync::Arc;
use std::time::Duration;

use nagaya_base::Code;
use nagaya_keeper::sandbox;
use nix::sched::{CloneFlags, setns, unshare};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, MoveMountFlags, UnmountFlags, mount_change, move_mount, unmount};

use self::names::FileCopies;
use self::plan::{RootPlace, RootPlan, WantedPath};
use crate::config::NodeSettings;

pub const CODE: Code = Code(518);

/// Interval of checks whether something at the paths was replaced.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Longest wait of the supervisor's loop for a check in progress. A directory of rules may be on a
/// network that does not answer.
const LOOK_WAIT_MAX: Duration = Duration::from_secs(2);

/// Bytes of the file system in memory: room for the copies, twice while one is replaced.
const MEMORY_BYTES_MAX: u64 = names::COPY_BYTES_MAX * (names::FILES.len() as u64 + 1) + (1 << 20);

const DIRECTORY: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The kernel's files about the machine's load (`nagaya_edge::admission`).
const LOAD_FILES: [&str; 2] = ["/proc/stat", "/proc/pressure/cpu"];

/// The namespace, which lives as long as the supervisor.
#[derive(Debug)]
pub struct EdgeRoot {
    namespace: OwnedFd,
    wishes: Mutex<Vec<WantedPath>>,
    state: Mutex<RootState>,
}

#[derive(Debug)]
struct RootState {
    /// The file system in memory, writable. The edge has it read-only.
    memory: OwnedFd,
    shown: RootPlan,
    copies: FileCopies,
    /// Fault of the last check, so that it is logged once.
    trouble: Option<String>,
}

impl EdgeRoot {
    /// Makes an empty one. Fails without the right to make mounts.
    pub fn make() -> io::Result<Self> {
        let memory = sandbox::memory(0, 0, "755", MEMORY_BYTES_MAX)?;
        let thread = std::thread::Builder::new().name("edge-root".into());
        let made = thread.spawn(move || make_namespace(&memory))?.join();
        let (namespace, memory) = made.map_err(|_| io::Error::other("its thread panicked"))??;
        let state =
            RootState { memory, shown: RootPlan::default(), copies: FileCopies::default(), trouble: None };
        Ok(Self { namespace, wishes: Mutex::default(), state: Mutex::new(state) })
    }

    /// Returns the namespace for the edge to enter.
    pub fn namespace(&self) -> BorrowedFd<'_> {
        self.namespace.as_fd()
    }

    /// Shows the edge the present files of these settings.
    pub fn configure(&self, settings: &NodeSettings) {
        *self.wishes.lock() = wishes(settings);
        self.refresh();
    }

    /// Shows the edge the present files at the paths.
    pub fn refresh(&self) {
        let Some(mut state) = self.state.try_lock_for(LOOK_WAIT_MAX) else {
            let seconds = LOOK_WAIT_MAX.as_secs();
            tracing::error!(code = %CODE, "the edge does not see all that it opens: a file system does not answer within {seconds} s");
            return;
        };
        let refreshed = self.try_refresh(&mut state);
        let trouble = refreshed.err().map(|error| error.to_string());
        if let Some(error) = &trouble
            && state.trouble != trouble
        {
            tracing::error!(code = %CODE, "the edge does not see all that it opens: {error}");
        }
        state.trouble = trouble;
    }

    /// Refreshes everything and returns the first fault; the rest is done.
    fn try_refresh(&self, state: &mut RootState) -> io::Result<()> {
        let etc = open_directory(&state.memory, Path::new("/etc"))?;
        let copied = state.copies.refresh(&etc);
        let wishes = self.wishes.lock().clone();
        let plan = RootPlan::resolve_paths(&wishes);
        if plan == state.shown {
            return copied;
        }
        let linked = plan.links.iter().try_for_each(|(path, target)| put_link(&state.memory, path, target));
        let (stale, new) = plan.differences(&state.shown);
        let mut made = Vec::new();
        let mut failed = Ok(());
        for place in new {
            match make_mount(&state.memory, &plan, place) {
                Ok(mount) => made.push((mount, place.clone())),
                Err(error) => failed = failed.and(Err(at_path(&place.path, &error))),
            }
        }
        let mut shown: Vec<RootPlace> = state.shown.places.clone();
        shown.retain(|place| !stale.contains(&place.path));
        let attached = self.inside(|| {
            for path in stale.iter().chain(made.iter().rev().map(|(_, place)| &place.path)) {
                take_away(path)?;
            }
            for (mount, place) in made {
                let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
                move_mount(&mount, "", CWD, &place.path, flags)
                    .map_err(|error| at_path(&place.path, &error.into()))?;
                shown.push(place);
            }
            Ok(())
        });
        shown.sort_by(|a, b| a.path.cmp(&b.path));
        let links = if linked.is_ok() { plan.links } else { std::mem::take(&mut state.shown.links) };
        state.shown = RootPlan { links, places: shown };
        copied.and(linked).and(failed).and(attached)
    }

    /// Acts in the namespace, on a separate thread.
    fn inside(&self, act: impl FnOnce() -> io::Result<()> + Send) -> io::Result<()> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("edge-root".into());
            let acting = thread.spawn_scoped(scope, || {
                unshare(CloneFlags::CLONE_FS)?;
                setns(&self.namespace, CloneFlags::CLONE_NEWNS)?;
                act()
            })?;
            acting.join().unwrap_or_else(|_| Err(io::Error::other("its thread panicked")))
        })
    }
}

/// Makes the mount for the edge at a place, and its target.
fn make_mount(memory: &OwnedFd, plan: &RootPlan, place: &RootPlace) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(&place.path, flags, Mode::empty())?;
    let mount = sandbox::detached_tree(&file, place.is_writable)?;
    if !plan.is_beneath_directory(&place.path) {
        put_target(memory, place)?;
    }
    Ok(mount)
}

/// Ends the mount at this path of this thread's namespace, if there is one. It may have gone with
/// its parent.
fn take_away(path: &Path) -> io::Result<()> {
    match unmount(path, UnmountFlags::DETACH) {
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(error) => Err(at_path(path, &error.into())),
    }
}

/// Tries to make one as for an edge, and returns why that fails.
pub fn try_edge_root() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("it needs root".into());
    }
    EdgeRoot::make().map(drop).map_err(|error| error.to_string())
}

/// Checks repeatedly. Never ends.
pub async fn keep(root: Arc<EdgeRoot>) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let root = Arc::clone(&root);
        // A directory of rules may be on a network. A panic there has been reported.
        let _ = tokio::task::spawn_blocking(move || root.refresh()).await;
    }
}

/// Returns a directory for the edge as a mount of its own, from which no path leads up.
pub fn close_off(directory: &OwnedFd) -> io::Result<OwnedFd> {
    let mount = sandbox::detached_tree(directory, true)?;
    // The mount stays valid while something in it is open, even after its own descriptor is closed.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(&mount, ".", flags, Mode::empty())?)
}

/// Returns the paths that the edge opens.
fn wishes(settings: &NodeSettings) -> Vec<WantedPath> {
    let options = settings.edge_options();
    let mut wishes = vec![WantedPath::Read(options.keeper)];
    wishes.extend(LOAD_FILES.map(|path| WantedPath::Read(path.into())));
    wishes.extend(options.rules.into_iter().map(|rule| WantedPath::Rule(rule.path)));
    wishes.extend(options.log.access.map(WantedPath::Write));
    wishes
}

/// Makes the namespace on this thread, with the file system in memory as its root. Returns that
/// root again, writable.
fn make_namespace(memory: &OwnedFd) -> io::Result<(OwnedFd, OwnedFd)> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let namespace = rustix::fs::open("/proc/thread-self/ns/mnt", flags, Mode::empty())?;
    move_mount(memory, "", CWD, "/", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    let writable = sandbox::detached_tree(memory, true)?;
    rustix::process::fchdir(memory)?;
    rustix::process::pivot_root(".", ".")?;
    // If both are at one place, the old one is on top.
    unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    sandbox::lock(memory)?;
    Ok((namespace, writable))
}

/// Enters it, with all of this process. The process must have one thread.
pub fn enter(namespace: &OwnedFd) -> io::Result<()> {
    Ok(setns(namespace, CloneFlags::CLONE_NEWNS)?)
}

/// Returns a directory of the file system in memory, made with its parents. No link is followed:
/// one could lead to the node's.
fn open_directory(memory: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let mut at = rustix::io::fcntl_dupfd_cloexec(memory, 0)?;
    for name in names_of(path) {
        at = match rustix::fs::openat(&at, &name, DIRECTORY, Mode::empty()) {
            Ok(found) => found,
            Err(error) => {
                if error != Errno::NOENT {
                    rustix::fs::unlinkat(&at, &name, AtFlags::empty())?;
                }
                rustix::fs::mkdirat(&at, &name, Mode::from_raw_mode(0o755))?;
                // The umask may have removed bits that the edge needs.
                rustix::fs::chmodat(&at, &name, Mode::from_raw_mode(0o755), AtFlags::empty())?;
                rustix::fs::openat(&at, &name, DIRECTORY, Mode::empty())?
            }
        };
    }
    Ok(at)
}

/// Makes the target of a mount: an empty directory or file.
fn put_target(memory: &OwnedFd, place: &RootPlace) -> io::Result<()> {
    if place.is_directory {
        return open_directory(memory, &place.path).map(drop);
    }
    let (directory, name) = split(memory, &place.path)?;
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o444);
    match rustix::fs::openat(&directory, &name, flags, mode) {
        Err(Errno::LOOP) => rustix::fs::unlinkat(&directory, &name, AtFlags::empty())?,
        Err(Errno::ISDIR) => rustix::fs::unlinkat(&directory, &name, AtFlags::REMOVEDIR)?,
        made => return Ok(made.map(drop)?),
    }
    Ok(rustix::fs::openat(&directory, &name, flags, mode).map(drop)?)
}

fn put_link(memory: &OwnedFd, path: &Path, target: &Path) -> io::Result<()> {
    let (directory, name) = split(memory, path)?;
    let there = rustix::fs::readlinkat(&directory, &name, Vec::new());
    if there.as_ref().is_ok_and(|there| there.to_bytes() == target.as_os_str().as_encoded_bytes()) {
        return Ok(());
    }
    match there {
        Err(Errno::NOENT) => {}
        // An empty directory or file that was a mount's target.
        Err(Errno::INVAL) if rustix::fs::openat(&directory, &name, DIRECTORY, Mode::empty()).is_ok() => {
            rustix::fs::unlinkat(&directory, &name, AtFlags::REMOVEDIR)?;
        }
        _ => rustix::fs::unlinkat(&directory, &name, AtFlags::empty())?,
    }
    Ok(rustix::fs::symlinkat(target, &directory, &name)?)
}

fn split(memory: &OwnedFd, path: &Path) -> io::Result<(OwnedFd, OsString)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    Ok((open_directory(memory, parent)?, name.to_owned()))
}

fn names_of(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        _ => None,
    })
}

fn at_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_in_memory_are_made_without_following_links() {
        let dir = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        let memory: OwnedFd = std::fs::File::open(dir.path()).unwrap().into();
        put_link(&memory, Path::new("/a/link"), outside.path()).unwrap();
        put_link(&memory, Path::new("/a/link"), outside.path()).unwrap();
        assert_eq!(std::fs::read_link(dir.path().join("a/link")).unwrap(), outside.path());
        let place = |path: &str, is_directory| RootPlace {
            path: path.into(),
            is_directory,
            is_writable: false,
            identity: plan::PlanIdentity::default(),
        };
        // A directory, a file and a link take each other's place.
        put_target(&memory, &place("/a/link/deep", true)).unwrap();
        assert!(dir.path().join("a/link/deep").is_dir());
        assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
        put_link(&memory, Path::new("/a/link/deep"), Path::new("x")).unwrap();
        put_target(&memory, &place("/a/link/deep", false)).unwrap();
        assert!(dir.path().join("a/link/deep").is_file());
        put_target(&memory, &place("/a/link/deep", true)).unwrap();
        put_target(&memory, &place("/a/link/deep", false)).unwrap();
        assert!(dir.path().join("a/link/deep").is_file());
    }
}
