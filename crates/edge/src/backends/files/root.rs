//! Opens and caches document roots: the descriptors below which a site's files are looked up.
//!
//! Not here: opening the directory itself with the tenant's rights (`keeper`), links that lead
//! out of it (`links`).

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
use nagaya_keeper_api::protocol::OpenedRoot;
use nagaya_keeper_api::root_changes::RootStamp;
use nagaya_records::record::Site;
use nagaya_records::{SiteName, TenantName};
use rustix::fs::{AtFlags, FileType, Statx, StatxFlags};
use tokio::sync::Mutex;

use crate::backends::files::links::SiteLinks;
use crate::blocking::{BlockingDevice, DeviceShare};

/// Maximum number of open roots per edge thread. With two threads and `LARGE_FILES_MAX` it is far
/// below the usual hard limit of 524,288 descriptors. 4,096 busy sites at once are more than one
/// node serves.
pub const ROOTS_MAX: usize = 4096;

/// Age at which a root is opened again. So a root that was replaced by rename (a release) is seen
/// if the keeper cannot watch its path. If it can, the change is seen at once.
pub const ROOT_AGE_MAX: Duration = Duration::from_secs(1);

/// Maximum age of the old root that other requests use while one request opens it again.
pub(super) const ROOT_AGE_WHILE_REOPENING_MAX: Duration = Duration::from_secs(3);

/// An open document root. Cheap to clone. The directory stays open while a clone lives.
#[derive(Clone)]
pub struct DocumentRoot(Rc<OpenRoot>);

struct OpenRoot {
    base: Arc<OpenBase>,
    /// Reports that another directory is in its place. `None` if only its age counts.
    stamp: Option<RootStamp>,
    opened: Instant,
    links: Rc<SiteLinks>,
}

/// A base for look-ups: a document root, or the target of a link out of it. The target is a
/// directory or one file.
pub struct OpenBase {
    file: OwnedFd,
    id: DirectoryId,
    mount: u64,
    is_file: bool,
    /// Files are reached over a network or another process, so a look-up may hang.
    is_remote: bool,
}

impl OpenBase {
    /// Opens the base from a descriptor of the keeper.
    pub(super) fn new(file: OwnedFd, is_remote: bool) -> std::io::Result<Self> {
        // This needs no server that might not answer: the kernel always knows these values.
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = rustix::fs::statx(&file, c"", flags, IDENTITY | StatxFlags::MNT_ID | StatxFlags::TYPE)?;
        let (id, mount) = (DirectoryId::from(&stat), stat.stx_mnt_id);
        let is_file = FileType::from_raw_mode(stat.stx_mode.into()) == FileType::RegularFile;
        Ok(Self { file, id, mount, is_file, is_remote })
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the share of calls that hang together with those for this base.
    pub(super) fn share(&self) -> DeviceShare {
        let (major, minor) = self.id.device;
        DeviceShare::new(BlockingDevice::Files(major, minor), &self.id.inode)
    }

    pub(super) fn is_file(&self) -> bool {
        self.is_file
    }

    pub(super) fn is_remote(&self) -> bool {
        self.is_remote
    }

    pub(super) fn mount(&self) -> u64 {
        self.mount
    }

    pub(super) fn id(&self) -> DirectoryId {
        self.id
    }

    /// Returns the present target of a directory below it, only for comparison. It follows links
    /// anywhere. `None` if it is not known, or if the call might hang.
    pub(super) fn id_beneath(&self, directory: &str) -> Option<DirectoryId> {
        if self.is_remote {
            return None;
        }
        if directory.is_empty() {
            return Some(self.id);
        }
        let stat = rustix::fs::statx(&self.file, directory, AtFlags::STATX_DONT_SYNC, IDENTITY).ok()?;
        Some(DirectoryId::from(&stat))
    }
}

/// Identity of a directory, independent of its opener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(test, derive(Default))]
pub struct DirectoryId {
    device: (u32, u32),
    inode: u64,
    /// Time of its creation, because inode numbers are reused. Zero if the file system does not
    /// know it.
    made: (i64, u32),
}

#[cfg(test)]
impl DirectoryId {
    /// Returns the id of a directory that does not exist.
    pub fn made_at(seconds: i64) -> Self {
        Self { made: (seconds, 0), ..Self::default() }
    }
}

const IDENTITY: StatxFlags = StatxFlags::INO.union(StatxFlags::BTIME);

impl From<&Statx> for DirectoryId {
    fn from(stat: &Statx) -> Self {
        Self {
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            made: (stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec),
        }
    }
}

impl DocumentRoot {
    /// Opens the root from the keeper's directory, opened with `O_PATH` or for reading.
    pub(super) fn new(
        OpenedRoot { dir, is_remote, stamp }: OpenedRoot,
        opened: Instant,
        links: Rc<SiteLinks>,
    ) -> std::io::Result<Self> {
        let base = Arc::new(OpenBase::new(dir, is_remote)?);
        Ok(Self(Rc::new(OpenRoot { base, stamp, opened, links })))
    }

    pub(super) fn base(&self) -> &Arc<OpenBase> {
        &self.0.base
    }

    /// Returns the known links out of this site's root.
    pub(super) fn links(&self) -> &Rc<SiteLinks> {
        &self.0.links
    }

    pub fn id(&self) -> DirectoryId {
        self.0.base.id
    }

    /// Returns whether it is still the site's root, as far as is known.
    fn is_fresh(&self, now: Instant, age_max: Duration) -> bool {
        now.saturating_duration_since(self.0.opened) < age_max
            && self.0.stamp.as_ref().is_none_or(RootStamp::is_current)
    }
}

impl fmt::Debug for DocumentRoot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Root({:?})", self.id())
    }
}

/// One thread's open roots, by site.
pub(super) struct RootCache(RefCell<LruCache<SiteName, Rc<RootSlot>, RandomState>>);

struct RootSlot {
    /// Tenant and path of the root when it was opened. If the record has changed, the root is
    /// opened again at once.
    tenant: TenantName,
    path: PathBuf,
    root: RefCell<Option<DocumentRoot>>,
    links: Rc<SiteLinks>,
    /// Held by the one request that asks the keeper, so that simultaneous requests ask once.
    opening: Mutex<()>,
}

impl RootSlot {
    fn is_for(&self, site: &Site) -> bool {
        let path = site.backend.files().map(|files| files.root.as_os_str());
        self.tenant == site.tenant && Some(self.path.as_os_str()) == path
    }

    /// Returns the root, if it is not older than `age_max` and not known to be replaced.
    fn root(&self, now: Instant, age_max: Duration) -> Option<DocumentRoot> {
        self.root.borrow().as_ref().filter(|root| root.is_fresh(now, age_max)).cloned()
    }
}

impl RootCache {
    pub(super) fn new() -> Self {
        let capacity = NonZeroUsize::new(ROOTS_MAX).expect("not zero");
        Self(RefCell::new(LruCache::with_hasher(capacity, RandomState::default())))
    }

    /// Returns the site's root: the open one while it is fresh, else the result of `open`.
    pub(super) async fn get<E: From<std::io::Error>>(
        &self,
        site: &Site,
        clock: &dyn Clock,
        open: impl AsyncFnOnce() -> Result<OpenedRoot, E>,
    ) -> Result<DocumentRoot, E> {
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
        // The age counts from before the directory was looked up. A replacement after this
        // instant may be missed.
        let asked = clock.now();
        // The previous holder of the lock may have opened it.
        if let Some(root) = slot.root(asked, ROOT_AGE_MAX) {
            return Ok(root);
        }
        let opened =
            open().await.and_then(|root| Ok(DocumentRoot::new(root, asked, Rc::clone(&slot.links))?));
        // A failure drops the old root, too: a closed site must not be served any longer.
        *slot.root.borrow_mut() = opened.as_ref().ok().cloned();
        opened
    }

    fn slot(&self, site: &Site) -> Rc<RootSlot> {
        let mut slots = self.0.borrow_mut();
        if let Some(slot) = slots.get(&site.name)
            && slot.is_for(site)
        {
            return slot.clone();
        }
        let slot = Rc::new(RootSlot {
            tenant: site.tenant.clone(),
            path: site.backend.files().map(|files| files.root.clone()).unwrap_or_default(),
            root: RefCell::new(None),
            links: Rc::new(SiteLinks::new(site.name.clone())),
            opening: Mutex::new(()),
        });
        slots.put(site.name.clone(), slot.clone());
        slot
    }

    /// Closes roots that were opened longer than `idle_max` ago, because their site had no
    /// request since.
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
