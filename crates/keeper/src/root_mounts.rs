//! Document roots as mounts of their own, attached nowhere: who holds one reaches what is beneath it, and nothing above.
//!
//! A directory's descriptor leads out of the mount namespace of the process that holds it: `..` goes up to the root of the
//! tree that the directory was opened in. A mount that is attached nowhere has nothing above it. It is read-only, so that an
//! edge that was taken over writes into no document root, whatever its modes.
//!
//! To make and to end a mount costs the kernel a lock that all mounts of the node share. So one is kept for each directory as
//! long as it is asked for, and each edge thread gets a copy of its descriptor. All of it may block: call it from `workers`.
//!
//! Not here: opening a root with its tenant's rights (`roots`).

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::mount_list::MountList;
use crate::protocol::OpenedRoot;
use crate::sandbox;

/// Mounts that are kept at once. Each is a descriptor of the keeper's, of which they may be a quarter.
const KEPT_MAX: usize = 16_384;

/// A mount that nobody asked for since is let go of. Longer than an edge thread keeps a root that is idle, so that the keeper
/// and no thread of the edge ends it.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// Which directory it is, as found by which mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    device: (u32, u32),
    inode: u64,
    mount: u64,
}

#[derive(Debug)]
struct Kept {
    mount: OwnedFd,
    /// The mounts beneath it when it was made, or when the list of mounts was last read.
    beneath: Vec<u64>,
    generation: u64,
    used: Instant,
}

/// The mounts of all document roots in use.
#[derive(Debug)]
pub struct RootMounts(Mutex<State>);

#[derive(Debug)]
struct State {
    list: MountList,
    kept: HashMap<Key, Kept>,
    kept_max: usize,
    /// The kernel gives none: then the descriptors are those that were opened.
    is_off: bool,
}

impl RootMounts {
    /// Without root no mounts can be made.
    pub fn new(is_root: bool) -> Self {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let kept_max = usize::try_from(descriptors / 4).unwrap_or(usize::MAX).clamp(1, KEPT_MAX);
        let (list, kept) = (MountList::default(), HashMap::new());
        Self(Mutex::new(State { list, kept, kept_max, is_off: !is_root }))
    }

    /// The document root as the edge gets it.
    pub fn give(&self, root: OwnedFd) -> io::Result<OpenedRoot> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        // Nobody is asked who might not answer: these are always known.
        let stat = rustix::fs::statx(&root, c"", flags, StatxFlags::INO | StatxFlags::MNT_ID)?;
        let key = Key {
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            mount: stat.stx_mnt_id,
        };
        let mut state = self.0.lock();
        // Without /proc nothing is known of the mounts, and each of them is as good as local.
        let generation = state.list.refresh().unwrap_or_default();
        let is_remote = state.list.is_remote(key.mount);
        if state.is_off {
            return Ok(OpenedRoot { dir: root, is_remote });
        }
        if let Some(dir) = state.copy_kept(key, generation, &root)? {
            return Ok(OpenedRoot { dir, is_remote });
        }
        let beneath = state.list.beneath(&real_path(&root));
        drop(state);
        let mount = match sandbox::detached_tree(&root, false) {
            Err(error) if is_unsupported(&error) => {
                self.0.lock().is_off = true;
                tracing::warn!(%error, "document roots are given to the edge without mounts of their own");
                return Ok(OpenedRoot { dir: root, is_remote });
            }
            made => made?,
        };
        let dir = copy(&mount)?;
        let kept = Kept { mount, beneath, generation, used: Instant::now() };
        // Ended without the lock, as to end a mount may take long.
        drop(self.keep(key, kept));
        Ok(OpenedRoot { dir, is_remote })
    }

    /// Returns what makes room for it.
    fn keep(&self, key: Key, kept: Kept) -> Vec<Kept> {
        let mut state = self.0.lock();
        let mut out = Vec::new();
        if state.kept.len() >= state.kept_max {
            out.extend(state.kept.drain().map(|(_, kept)| kept));
        }
        out.extend(state.kept.insert(key, kept));
        out
    }

    /// Ends mounts that nobody asked for lately. To be called now and then.
    pub fn drop_idle(&self, now: Instant) {
        let is_idle = |kept: &Kept| now.saturating_duration_since(kept.used) > IDLE_MAX;
        let idle: Vec<_> = self.0.lock().kept.extract_if(|_, kept| is_idle(kept)).collect();
        drop(idle);
    }
}

impl State {
    /// A descriptor of the mount that is kept for this directory, if what is mounted beneath it is as it was.
    fn copy_kept(&mut self, key: Key, generation: u64, root: &OwnedFd) -> io::Result<Option<OwnedFd>> {
        let Some(kept) = self.kept.get_mut(&key) else { return Ok(None) };
        if kept.generation != generation {
            if kept.beneath != self.list.beneath(&real_path(root)) {
                return Ok(None);
            }
            kept.generation = generation;
        }
        kept.used = Instant::now();
        copy(&kept.mount).map(Some)
    }
}

fn copy(mount: &OwnedFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(mount, 0)?)
}

/// Where an open directory is now. One that cannot be found has nothing mounted beneath it.
fn real_path(dir: &OwnedFd) -> PathBuf {
    let link = Path::new("/proc/self/fd").join(dir.as_raw_fd().to_string());
    std::fs::read_link(link).unwrap_or_default()
}

/// Before Linux 5.12, or without the right to mount.
fn is_unsupported(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::PERM | Errno::NOSYS))
}
