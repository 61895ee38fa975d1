//! Document roots: the descriptor a site's files are looked up beneath, and the cache of them.
//!
//! Not here: opening the directory itself, which takes the tenant's rights (`keeper`).

use std::cell::RefCell;
use std::fmt;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;
use lru::LruCache;
use nagaya_base::Clock;
use nagaya_cmdb::record::Site;
use nagaya_cmdb::{SiteName, TenantName};
use nagaya_keeper::protocol::OpenedRoot;
use rustix::fs::{AtFlags, StatxFlags};
use tokio::sync::Mutex;

use crate::blocking::{Device, Share};

/// Roots held open per edge thread. With two threads and `LARGE_FILES_MAX` this stays far below the usual hard
/// limit of 524,288 descriptors, and 4,096 sites busy at once is more than one node serves.
pub const ROOTS_MAX: usize = 4096;

/// A root is opened anew after this, so that a document root replaced by rename (a release) is seen.
pub const ROOT_AGE_MAX: Duration = Duration::from_secs(1);

/// While one request opens a root anew, others go on with the old one, but not beyond this.
const ROOT_AGE_WHILE_REOPENING_MAX: Duration = Duration::from_secs(3);

/// An open document root. Cheap to clone; the directory stays open as long as a clone lives.
#[derive(Clone)]
pub struct Root(Rc<OpenRoot>);

struct OpenRoot {
    dir: Arc<OwnedFd>,
    id: RootId,
    mount: u64,
    /// Files are reached over a network or another process, so no look is sure to return.
    is_remote: bool,
    opened: Instant,
}

/// Which directory it is, whoever opened it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct RootId {
    device: (u32, u32),
    inode: u64,
}

impl Root {
    /// As the keeper gives it: a directory, opened with `O_PATH` or for reading.
    pub fn new(OpenedRoot { dir, is_remote }: OpenedRoot, opened: Instant) -> std::io::Result<Self> {
        // Nobody is asked who might not answer: these two are always known.
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = rustix::fs::statx(&dir, c"", flags, StatxFlags::INO | StatxFlags::MNT_ID)?;
        let id = RootId { device: (stat.stx_dev_major, stat.stx_dev_minor), inode: stat.stx_ino };
        let mount = stat.stx_mnt_id;
        Ok(Self(Rc::new(OpenRoot { dir: Arc::new(dir), id, mount, is_remote, opened })))
    }

    pub(super) fn dir(&self) -> BorrowedFd<'_> {
        self.0.dir.as_fd()
    }

    /// For another thread.
    pub(super) fn shared_dir(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.0.dir)
    }

    /// Whose calls hang together with those for this root.
    pub(super) fn share(&self) -> Share {
        let (major, minor) = self.0.id.device;
        Share::new(Device::Files(major, minor), &self.0.id.inode)
    }

    pub(super) fn is_remote(&self) -> bool {
        self.0.is_remote
    }

    pub(super) fn mount(&self) -> u64 {
        self.0.mount
    }

    pub(super) fn id(&self) -> RootId {
        self.0.id
    }

    fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.0.opened)
    }
}

impl fmt::Debug for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Root({:?})", self.0.id)
    }
}

/// One thread's open roots, by site.
pub(super) struct Roots(RefCell<LruCache<SiteName, Rc<Slot>, RandomState>>);

struct Slot {
    /// What the root was opened for. A site whose record now says something else is opened anew at once.
    tenant: TenantName,
    path: PathBuf,
    root: RefCell<Option<Root>>,
    /// Held by the one request that asks the keeper, so that a crowd asks once.
    opening: Mutex<()>,
}

impl Slot {
    fn is_for(&self, site: &Site) -> bool {
        let path = site.backend.files().map(|files| files.root.as_os_str());
        self.tenant == site.tenant && Some(self.path.as_os_str()) == path
    }

    /// The root, if it is not older than `age_max`.
    fn root(&self, now: Instant, age_max: Duration) -> Option<Root> {
        self.root.borrow().as_ref().filter(|root| root.age(now) < age_max).cloned()
    }
}

impl Roots {
    pub(super) fn new() -> Self {
        let capacity = NonZeroUsize::new(ROOTS_MAX).expect("not zero");
        Self(RefCell::new(LruCache::with_hasher(capacity, RandomState::default())))
    }

    /// The site's root: the open one while it is fresh, else what `open` gives.
    pub(super) async fn get<E: From<std::io::Error>>(
        &self,
        site: &Site,
        clock: &dyn Clock,
        open: impl AsyncFnOnce() -> Result<OpenedRoot, E>,
    ) -> Result<Root, E> {
        let now = clock.now();
        let slot = self.slot(site);
        if let Some(root) = slot.root(now, ROOT_AGE_MAX) {
            return Ok(root);
        }
        let _opening = match slot.opening.try_lock() {
            Ok(guard) => guard,
            Err(_) => {
                if let Some(root) = slot.root(now, ROOT_AGE_WHILE_REOPENING_MAX) {
                    return Ok(root);
                }
                slot.opening.lock().await
            }
        };
        // The age counts from before the directory was looked up: a replacement after this instant may be missed.
        let asked = clock.now();
        // Whoever held the lock before may have opened it.
        if let Some(root) = slot.root(asked, ROOT_AGE_MAX) {
            return Ok(root);
        }
        let opened = open().await.and_then(|root| Ok(Root::new(root, asked)?));
        // A failure forgets the old root too: a site that was closed must not go on being served.
        *slot.root.borrow_mut() = opened.as_ref().ok().cloned();
        opened
    }

    fn slot(&self, site: &Site) -> Rc<Slot> {
        let mut slots = self.0.borrow_mut();
        if let Some(slot) = slots.get(&site.name)
            && slot.is_for(site)
        {
            return slot.clone();
        }
        let slot = Rc::new(Slot {
            tenant: site.tenant.clone(),
            path: site.backend.files().map(|files| files.root.clone()).unwrap_or_default(),
            root: RefCell::new(None),
            opening: Mutex::new(()),
        });
        slots.put(site.name.clone(), slot.clone());
        slot
    }

    /// Closes roots that were opened longer than `idle_max` ago: their site had no request since.
    pub(super) fn close_idle(&self, now: Instant, idle_max: Duration) {
        let mut slots = self.0.borrow_mut();
        while let Some((_, slot)) = slots.peek_lru()
            && slot.root(now, idle_max).is_none()
            && slot.opening.try_lock().is_ok()
        {
            slots.pop_lru();
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.borrow().len()
    }
}
