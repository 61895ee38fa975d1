//! Document roots as detached mounts of their own: their holder reaches everything below them, and
//! nothing above.
//!
//! A directory's descriptor leads out of the mount namespace of the process that holds it. `..`
//! goes up to the root of the tree that the directory was opened in. A detached mount has nothing
//! above it. It is read-only, so that a compromised edge writes into no document root, whatever its
//! modes.
//!
//! To make and to end a mount costs the kernel a lock that all mounts of the node share. So one is
//! kept for each directory while it is requested. Each edge thread gets a copy of its descriptor.
//! All of it may block: call it from `workers`.
//!
//! Directories at the end of tenants' links out of their roots are given in the same way. A tenant
//! has as many of those as it likes. So they are limited, and a tenant with too many ends its own.
//! A file at the end of a link is given open for reading.
//!
//! Not here: opening a root with its tenant's rights (`roots`), which links are followed
//! (`tenant_path`).

mod mount_list;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_keeper_api::protocol::OpenedRoot;
use nagaya_records::TenantName;
use parking_lot::Mutex;
use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::paths::tenant_path::real_path;
use crate::root_mounts::mount_list::MountList;
use crate::sandbox;

/// Maximum number of mounts that are kept. Each is a descriptor of the keeper's, of which they may
/// be a quarter.
const KEPT_MAX: usize = 16_384;

/// The same for ends of links, which may be a sixteenth.
const KEPT_LINKS_MAX: usize = 4096;

/// The same for ends of one tenant's links.
const KEPT_LINKS_PER_TENANT_MAX: usize = 256;

/// Maximum number of look-ups for one tenant's links at once. A tenant's file system may hang, and
/// its roots are opened on the same share of threads (`workers`). This is half of that share.
const LINK_LOOKS_PER_TENANT_MAX: usize = 8;

/// Maximum number of look-ups that wait for one of these, and how long.
const LINK_LOOKS_WAITING_MAX: usize = 128;
const LINK_LOOK_WAIT_MAX: Duration = Duration::from_secs(10);

/// Time without a request after which a mount is released. It is longer than an edge thread keeps
/// an idle root. So the keeper ends it, and no thread of the edge.
const IDLE_MAX: Duration = Duration::from_secs(60);

const KNOWN: AtFlags = AtFlags::EMPTY_PATH.union(AtFlags::STATX_DONT_SYNC);

/// Identity of a directory, as found by which mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct RootKey {
    device: (u32, u32),
    inode: u64,
    mount: u64,
}

#[derive(Debug)]
struct KeptMount {
    mount: OwnedFd,
    /// The mounts below it when it was made, or when the list of mounts was last read.
    beneath: Vec<u64>,
    generation: u64,
    used: Instant,
    /// Tenant whose link leads to it. `None` for a document root.
    whose: Option<TenantName>,
}

/// The mounts of all document roots in use, and of the ends of links.
#[derive(Debug)]
pub struct RootMounts {
    roots: Mutex<RootMountsState>,
    links: Mutex<RootMountsState>,
    looks: Mutex<HashMap<TenantName, Arc<Semaphore>>>,
}

#[derive(Debug)]
struct RootMountsState {
    list: MountList,
    kept: HashMap<RootKey, KeptMount>,
    kept_max: usize,
    /// The kernel gives none: then the opened descriptors are used.
    is_off: bool,
}

impl RootMounts {
    /// Without root no mounts can be made.
    pub fn new(is_root: bool) -> Self {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let part = |of: u64, max| usize::try_from(descriptors / of).unwrap_or(usize::MAX).clamp(1, max);
        Self {
            roots: Mutex::new(RootMountsState::new(is_root, part(4, KEPT_MAX))),
            links: Mutex::new(RootMountsState::new(is_root, part(16, KEPT_LINKS_MAX))),
            looks: Mutex::default(),
        }
    }

    /// Returns the document root as the edge gets it.
    pub fn give(&self, root: OwnedFd) -> io::Result<OpenedRoot> {
        give(&self.roots, root, None)
    }

    /// Returns the directory at the end of this tenant's link, as the edge gets it.
    pub fn give_link(&self, found: OwnedFd, whose: &TenantName) -> io::Result<OpenedRoot> {
        give(&self.links, found, Some(whose))
    }

    /// Whether a network or another process serves the file system of this file.
    pub fn is_remote(&self, file: impl AsFd) -> io::Result<bool> {
        let mount = rustix::fs::statx(file, c"", KNOWN, StatxFlags::MNT_ID)?.stx_mnt_id;
        let mut state = self.links.lock();
        let _ = state.list.refresh();
        Ok(state.list.is_remote(mount))
    }

    /// Returns a permit to hold during a look-up for this tenant's link. `None` if too many wait
    /// for one.
    pub async fn begin_link_look(&self, whose: &TenantName) -> Option<OwnedSemaphorePermit> {
        self.begin_link_look_within(whose, LINK_LOOK_WAIT_MAX).await
    }

    async fn begin_link_look_within(
        &self,
        whose: &TenantName,
        wait_max: Duration,
    ) -> Option<OwnedSemaphorePermit> {
        let looks = {
            let mut all = self.looks.lock();
            let new = || Arc::new(Semaphore::new(LINK_LOOKS_PER_TENANT_MAX));
            let looks = all.entry(whose.clone()).or_insert_with(new);
            // Each look-up that is under way or waits holds it.
            if Arc::strong_count(looks) > LINK_LOOKS_PER_TENANT_MAX + LINK_LOOKS_WAITING_MAX {
                return None;
            }
            Arc::clone(looks)
        };
        timeout(wait_max, looks.acquire_owned()).await.ok()?.ok()
    }

    /// Ends mounts without recent requests. Must be called now and then.
    pub fn drop_idle(&self, now: Instant) {
        let is_idle = |kept: &KeptMount| now.saturating_duration_since(kept.used) > IDLE_MAX;
        for state in [&self.roots, &self.links] {
            let idle: Vec<_> = state.lock().kept.extract_if(|_, kept| is_idle(kept)).collect();
            drop(idle);
        }
        self.looks.lock().retain(|_, looks| Arc::strong_count(looks) > 1);
    }
}

fn give(
    state: &Mutex<RootMountsState>,
    found: OwnedFd,
    whose: Option<&TenantName>,
) -> io::Result<OpenedRoot> {
    // This queries no file system that may hang: these values are always known.
    let stat = rustix::fs::statx(&found, c"", KNOWN, StatxFlags::INO | StatxFlags::MNT_ID)?;
    let key = RootKey {
        device: (stat.stx_dev_major, stat.stx_dev_minor),
        inode: stat.stx_ino,
        mount: stat.stx_mnt_id,
    };
    let mut locked = state.lock();
    // Without /proc nothing is known of the mounts, and each of them counts as local.
    let generation = locked.list.refresh().unwrap_or_default();
    let is_remote = locked.list.is_remote(key.mount);
    if locked.is_off {
        return Ok(OpenedRoot { dir: found, is_remote, stamp: None });
    }
    if let Some(dir) = locked.copy_kept(key, generation, &found)? {
        return Ok(OpenedRoot { dir, is_remote, stamp: None });
    }
    let beneath = locked.list.beneath(&real_path(&found).unwrap_or_default());
    drop(locked);
    let mount = match sandbox::detached_tree(&found, false) {
        Err(error) if is_unsupported(&error) => {
            state.lock().is_off = true;
            tracing::warn!(%error, "document roots are given to the edge without mounts of their own");
            return Ok(OpenedRoot { dir: found, is_remote, stamp: None });
        }
        made => made?,
    };
    let dir = copy(&mount)?;
    let kept = KeptMount { mount, beneath, generation, used: Instant::now(), whose: whose.cloned() };
    // Ended without the lock, because ending a mount may take long.
    let out = state.lock().keep(key, kept);
    drop(out);
    Ok(OpenedRoot { dir, is_remote, stamp: None })
}

impl RootMountsState {
    fn new(is_root: bool, kept_max: usize) -> Self {
        Self { list: MountList::default(), kept: HashMap::new(), kept_max, is_off: !is_root }
    }

    /// Keeps a mount. Returns those that make room for it.
    fn keep(&mut self, key: RootKey, kept: KeptMount) -> Vec<KeptMount> {
        let mut out = Vec::new();
        if let Some(whose) = &kept.whose {
            let is_theirs = |other: &KeptMount| other.whose.as_ref() == Some(whose);
            if self.kept.values().filter(|other| is_theirs(other)).count() >= KEPT_LINKS_PER_TENANT_MAX {
                out.extend(self.take_oldest(is_theirs));
            }
            if self.kept.len() >= self.kept_max {
                out.extend(self.take_oldest(|_| true));
            }
        } else if self.kept.len() >= self.kept_max {
            out.extend(self.kept.drain().map(|(_, kept)| kept));
        }
        out.extend(self.kept.insert(key, kept));
        out
    }

    fn take_oldest(&mut self, is_meant: impl Fn(&KeptMount) -> bool) -> Option<KeptMount> {
        let meant = self.kept.iter().filter(|(_, kept)| is_meant(kept));
        let oldest = meant.min_by_key(|(_, kept)| kept.used).map(|(key, _)| *key)?;
        self.kept.remove(&oldest)
    }

    /// Returns a descriptor of the mount that is kept for this directory, if the mounts below it
    /// are unchanged.
    fn copy_kept(&mut self, key: RootKey, generation: u64, root: &OwnedFd) -> io::Result<Option<OwnedFd>> {
        let Some(kept) = self.kept.get_mut(&key) else { return Ok(None) };
        if kept.generation != generation {
            if kept.beneath != self.list.beneath(&real_path(root).unwrap_or_default()) {
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

/// Whether mounts cannot be made: before Linux 5.12, or without the right to mount.
fn is_unsupported(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::PERM | Errno::NOSYS))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> TenantName {
        TenantName::new(name).unwrap()
    }

    fn keep(state: &mut RootMountsState, inode: u64, whose: Option<&str>) -> usize {
        let mount = std::fs::File::open("/dev/null").unwrap().into();
        let kept = KeptMount {
            mount,
            beneath: Vec::new(),
            generation: 0,
            used: Instant::now(),
            whose: whose.map(tenant),
        };
        state.keep(RootKey { device: (0, 1), inode, mount: 1 }, kept).len()
    }

    #[test]
    fn links_of_one_tenant_push_out_its_own_alone() {
        let mut state = RootMountsState::new(true, KEPT_LINKS_PER_TENANT_MAX + 2);
        keep(&mut state, 1_000_000, Some("calm"));
        for n in 0..3 * KEPT_LINKS_PER_TENANT_MAX as u64 {
            keep(&mut state, n, Some("busy"));
        }
        let of = |state: &RootMountsState, name| {
            state.kept.values().filter(|kept| kept.whose.as_ref() == Some(&tenant(name))).count()
        };
        assert_eq!((of(&state, "calm"), of(&state, "busy")), (1, KEPT_LINKS_PER_TENANT_MAX));
        // The oldest of its own went first.
        assert!(state.kept.keys().filter(|key| key.inode < 1_000_000).all(|key| key.inode >= 512));
        for n in 0..10 {
            keep(&mut state, 2_000_000 + n, Some("third"));
        }
        assert_eq!(state.kept.len(), KEPT_LINKS_PER_TENANT_MAX + 2);
    }

    #[tokio::test]
    async fn looks_of_one_tenant_have_a_bound_and_others_none_of_it() {
        let mounts = Arc::new(RootMounts::new(false));
        let begin = |name: &'static str| {
            let mounts = Arc::clone(&mounts);
            tokio::spawn(async move { mounts.begin_link_look(&tenant(name)).await })
        };
        let mut running = Vec::new();
        for _ in 0..LINK_LOOKS_PER_TENANT_MAX {
            running.push(begin("busy").await.unwrap().expect("there is room"));
        }
        let waiting: Vec<_> = (0..LINK_LOOKS_WAITING_MAX).map(|_| begin("busy")).collect();
        let holders = || mounts.looks.lock().get(&tenant("busy")).map_or(0, Arc::strong_count);
        while holders() < 1 + LINK_LOOKS_PER_TENANT_MAX + LINK_LOOKS_WAITING_MAX {
            tokio::task::yield_now().await;
        }
        assert!(begin("busy").await.unwrap().is_none(), "too many wait");
        assert!(begin("calm").await.unwrap().is_some());
        running.pop();
        let mut served = 0;
        for waiting in waiting {
            // A turn is passed on; nothing that hangs is waited for longer than this.
            served += usize::from(waiting.await.unwrap().is_some());
        }
        assert_eq!(served, LINK_LOOKS_WAITING_MAX);
        assert!(begin("busy").await.unwrap().is_some());
        let hanging = begin("busy").await.unwrap();
        assert!(hanging.is_some());
        let in_vain = mounts.begin_link_look_within(&tenant("busy"), Duration::ZERO).await;
        assert!(in_vain.is_none(), "nobody waits for ever");
        drop((running, hanging));
        mounts.drop_idle(Instant::now());
        assert!(mounts.looks.lock().is_empty());
    }
}
