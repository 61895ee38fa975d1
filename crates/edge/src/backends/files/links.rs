//! Keeps the links that lead out of a document root to other files of the tenant. The keeper
//! decides whether a link is followed, and opens its target. An open target is kept as long as a
//! root.
//!
//! A look-up finds such a link by failing at it (`beneath`). Then the look-up is repeated with
//! the target, for a few links. A path without links costs one check of a number.
//!
//! A thread keeps `LINKS_MAX` links, `LINKS_PER_SITE_MAX` of them for one site. So a site with
//! more cannot displace those of others. A site asks the keeper at most `ASKS_PER_SECOND_MAX`
//! times a second. Requests for the same link ask once. Invariant: a target is used only for the
//! root where its link was found, and no longer than a root.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::hash::BuildHasher;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;
use lru::LruCache;
use nagaya_base::Clock;
use nagaya_keeper_api::client::{CALL_TIMEOUT, KeeperCallError, KeeperClient};
use nagaya_keeper_api::protocol::{FailureKind, OpenedRoot};
use nagaya_records::SiteName;
use nagaya_records::record::LinkPolicy;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::timeout;

use crate::backends::files::beneath::{LookupAccess, LookupBase};
use crate::backends::files::root::{
    DirectoryId, DocumentRoot, OpenBase, ROOT_AGE_MAX, ROOT_AGE_WHILE_REOPENING_MAX,
};
use crate::http::refusal::Refusal;

/// Maximum number of links kept by one edge thread. Each is a descriptor.
const LINKS_MAX: usize = 4096;

/// Maximum number of links kept for one site. Further ones are requested with each request.
pub(super) const LINKS_PER_SITE_MAX: usize = 256;

/// Maximum number of one site's questions to the keeper in a second.
pub(super) const ASKS_PER_SECOND_MAX: u32 = 512;

/// Maximum number of one site's questions to the keeper at once. Others wait.
const ASKS_AT_ONCE_MAX: usize = 4;

/// Maximum wait for a turn to ask: the keeper's own timeout.
const ASK_WAIT_MAX: Duration = CALL_TIMEOUT;

/// Maximum number of links out of the root on one path.
pub(super) const LINKS_PER_LOOK_MAX: usize = 8;

pub type OpeningLink<'a> = Pin<Box<dyn Future<Output = Result<OpenedRoot, KeeperCallError>> + 'a>>;

/// Opens the target of a link.
pub trait LinkOpener {
    /// `path` is relative to the site's document root.
    fn open_link<'a>(&'a self, site: &'a SiteName, path: &'a str) -> OpeningLink<'a>;
}

impl LinkOpener for KeeperClient {
    fn open_link<'a>(&'a self, site: &'a SiteName, path: &'a str) -> OpeningLink<'a> {
        Box::pin(Self::open_link(self, site, path))
    }
}

/// A path below a document root that is a link out of it, and its target.
#[derive(Clone)]
pub(super) struct RootLink {
    pub path: Arc<str>,
    /// `None` if the target does not exist.
    pub base: Option<Arc<OpenBase>>,
}

impl RootLink {
    /// Returns the rest of a path that leads through this link.
    pub fn rest<'p>(&self, path: &'p [u8]) -> Option<&'p [u8]> {
        match path.strip_prefix(self.path.as_bytes())? {
            [] => Some(&[]),
            [b'/', rest @ ..] => Some(rest),
            _ => None,
        }
    }
}

/// A document root with its known links on a path.
pub(super) struct LinkedRoot<'r> {
    root: &'r DocumentRoot,
    links: Vec<RootLink>,
}

impl<'r> LinkedRoot<'r> {
    /// Returns the base directory of this path, and the number of its bytes that lead there.
    /// `None` if the link has no target.
    pub fn base(&self, path: &str) -> Option<(&Arc<OpenBase>, usize)> {
        match super::beneath::through(&self.links, path.as_bytes()) {
            Some((link, rest)) => Some((link.base.as_ref()?, path.len() - rest.len())),
            None => Some((self.root.base(), 0)),
        }
    }

    pub fn look(&self, access: LookupAccess) -> LookupBase<'_> {
        LookupBase { base: self.root.base(), access, links: &self.links }
    }

    /// Returns all data for a look-up on another thread.
    pub fn share_with_thread(&self) -> (Arc<OpenBase>, Vec<RootLink>) {
        (Arc::clone(self.root.base()), self.links.clone())
    }

    /// Returns the base where the next look-up may hang.
    pub fn last_base(&self) -> &OpenBase {
        self.links.last().and_then(|link| link.base.as_ref()).unwrap_or(self.root.base())
    }
}

/// The links of one site, as one edge thread knows them.
pub(super) struct SiteLinks {
    site: SiteName,
    kept: Cell<usize>,
    /// Number of questions since this time.
    asked: Cell<(Option<Instant>, u32)>,
    turns: Semaphore,
}

impl SiteLinks {
    pub fn new(site: SiteName) -> Self {
        let turns = Semaphore::new(ASKS_AT_ONCE_MAX);
        Self { site, kept: Cell::new(0), asked: Cell::default(), turns }
    }

    /// Counts a question. Returns false if there were too many in this second.
    fn may_ask(&self, now: Instant) -> bool {
        let (since, count) = match self.asked.get() {
            (Some(since), count) if now.saturating_duration_since(since) < Duration::from_secs(1) => {
                (since, count)
            }
            _ => (now, 0),
        };
        self.asked.set((Some(since), count.saturating_add(1)));
        count < ASKS_PER_SECOND_MAX
    }
}

/// One thread's links.
pub(super) struct LinkCache {
    opener: Rc<dyn LinkOpener>,
    /// Key: a hash of site and path. A slot knows both: two with the same hash only displace each
    /// other.
    slots: RefCell<LruCache<u64, Rc<LinkSlot>, RandomState>>,
    hasher: RandomState,
}

struct LinkSlot {
    links: Rc<SiteLinks>,
    path: Arc<str>,
    found: RefCell<Option<FoundLink>>,
    /// Held by the one request that asks the keeper.
    opening: Mutex<()>,
    is_kept: Cell<bool>,
}

/// The answer of the keeper.
#[derive(Clone)]
struct FoundLink {
    /// The root below which it was found.
    root: DirectoryId,
    asked: Instant,
    /// `Ok(None)` if the link has no target.
    end: Result<Option<Arc<OpenBase>>, Refusal>,
}

impl LinkSlot {
    fn is_for(&self, links: &Rc<SiteLinks>, path: &str) -> bool {
        Rc::ptr_eq(&self.links, links) && *self.path == *path
    }

    fn found(&self, root: &DocumentRoot, now: Instant, age_max: Duration) -> Option<FoundLink> {
        let found = self.found.borrow();
        let is_fresh = |found: &&FoundLink| {
            found.root == root.id() && now.saturating_duration_since(found.asked) < age_max
        };
        found.as_ref().filter(is_fresh).cloned()
    }
}

impl Drop for LinkSlot {
    fn drop(&mut self) {
        if self.is_kept.get() {
            self.links.kept.set(self.links.kept.get() - 1);
        }
    }
}

impl LinkCache {
    pub fn new(opener: Rc<dyn LinkOpener>) -> Self {
        let capacity = NonZeroUsize::new(LINKS_MAX).expect("not zero");
        let slots = RefCell::new(LruCache::with_hasher(capacity, RandomState::default()));
        Self { opener, slots, hasher: RandomState::default() }
    }

    /// Returns the root with the longest known link on this path.
    pub fn known<'r>(
        &self,
        root: &'r DocumentRoot,
        policy: LinkPolicy,
        path: &str,
        clock: &dyn Clock,
    ) -> LinkedRoot<'r> {
        let mut links = Vec::new();
        if root.links().kept.get() > 0 && policy == LinkPolicy::Own {
            links.extend(self.find(root, path, clock.now()));
        }
        LinkedRoot { root, links }
    }

    fn find(&self, root: &DocumentRoot, path: &str, now: Instant) -> Option<RootLink> {
        let ends = memchr::memrchr_iter(b'/', path.as_bytes());
        let mut slots = self.slots.borrow_mut();
        [path.len()].into_iter().chain(ends).find_map(|end| {
            let slot = slots.get(&self.key(root.links(), &path[..end]))?;
            if !slot.is_for(root.links(), &path[..end]) {
                return None;
            }
            let base = slot.found(root, now, ROOT_AGE_MAX)?.end.ok()?;
            Some(RootLink { path: Arc::clone(&slot.path), base })
        })
    }

    fn key(&self, links: &Rc<SiteLinks>, path: &str) -> u64 {
        self.hasher.hash_one((links.site.as_str(), path))
    }

    /// Adds the target of the link at which a look-up failed.
    pub async fn open(
        &self,
        linked: &mut LinkedRoot<'_>,
        policy: LinkPolicy,
        path: &str,
        clock: &dyn Clock,
    ) -> Result<(), Refusal> {
        if policy == LinkPolicy::None {
            return Err(Refusal::Forbidden("it leads out of the document root"));
        }
        let is_known = |link: &RootLink| *link.path == *path;
        if linked.links.len() >= LINKS_PER_LOOK_MAX || linked.links.iter().any(is_known) {
            return Err(Refusal::Forbidden("it leads through too many links out of the document root"));
        }
        let slot = self.slot(linked.root.links(), path);
        let base = self.found(&slot, linked.root, clock).await.end?;
        linked.links.push(RootLink { path: Arc::clone(&slot.path), base });
        Ok(())
    }

    /// As in `Roots::get`, simultaneous requests ask once.
    async fn found(&self, slot: &LinkSlot, root: &DocumentRoot, clock: &dyn Clock) -> FoundLink {
        let now = clock.now();
        if let Some(found) = slot.found(root, now, ROOT_AGE_MAX) {
            return found;
        }
        let _opening = match slot.opening.try_lock() {
            Ok(guard) => guard,
            Err(_) => {
                if let Some(found) = slot.found(root, now, ROOT_AGE_WHILE_REOPENING_MAX) {
                    return found;
                }
                slot.opening.lock().await
            }
        };
        let asked = clock.now();
        if let Some(found) = slot.found(root, asked, ROOT_AGE_MAX) {
            return found;
        }
        let end = self.ask(slot, clock).await;
        // Requests that wait for a file system that hangs must not wait one after the other.
        let asked = if end.is_ok() { asked } else { clock.now() };
        if matches!(end, Err(Refusal::Overloaded(_))) {
            // Some of many simultaneous requests go on with the existing data.
            let former = slot.found(root, asked, ROOT_AGE_WHILE_REOPENING_MAX);
            return former.unwrap_or(FoundLink { root: root.id(), asked, end });
        }
        let found = FoundLink { root: root.id(), asked, end };
        *slot.found.borrow_mut() = Some(found.clone());
        found
    }

    async fn ask(&self, slot: &LinkSlot, clock: &dyn Clock) -> Result<Option<Arc<OpenBase>>, Refusal> {
        let Ok(Ok(_turn)) = timeout(ASK_WAIT_MAX, slot.links.turns.acquire()).await else {
            return Err(Refusal::FilesHang);
        };
        if !slot.links.may_ask(clock.now()) {
            return Err(Refusal::Overloaded("too many links lead out of the document root"));
        }
        match self.opener.open_link(&slot.links.site, &slot.path).await {
            Ok(OpenedRoot { dir, is_remote, .. }) => OpenBase::new(dir, is_remote)
                .map(|base| Some(Arc::new(base)))
                .map_err(|error| Refusal::SiteBroken(error.to_string())),
            Err(error) => refuse(error),
        }
    }

    /// Returns the slot of a link. A slot beyond the site's maximum serves only the present
    /// request.
    fn slot(&self, links: &Rc<SiteLinks>, path: &str) -> Rc<LinkSlot> {
        let key = self.key(links, path);
        let mut slots = self.slots.borrow_mut();
        if let Some(slot) = slots.get(&key)
            && slot.is_for(links, path)
        {
            return Rc::clone(slot);
        }
        let slot = Rc::new(LinkSlot {
            links: Rc::clone(links),
            path: path.into(),
            found: RefCell::default(),
            opening: Mutex::new(()),
            is_kept: Cell::new(false),
        });
        if links.kept.get() < LINKS_PER_SITE_MAX {
            links.kept.set(links.kept.get() + 1);
            slot.is_kept.set(true);
            slots.push(key, Rc::clone(&slot));
        }
        slot
    }

    /// Closes links that were requested longer than `idle_max` ago, and are not being requested.
    pub fn close_idle(&self, now: Instant, idle_max: Duration) {
        let mut slots = self.slots.borrow_mut();
        while let Some((_, slot)) = slots.peek_lru() {
            let is_idle = |found: &FoundLink| now.saturating_duration_since(found.asked) >= idle_max;
            if !slot.found.borrow().as_ref().is_none_or(is_idle) || slot.opening.try_lock().is_err() {
                return;
            }
            slots.pop_lru();
        }
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.slots.borrow().len()
    }
}

/// Returns the refusal for a link that the keeper does not open.
fn refuse(error: KeeperCallError) -> Result<Option<Arc<OpenBase>>, Refusal> {
    Err(match error {
        KeeperCallError::Refused { failure: FailureKind::NotFound, .. } => return Ok(None),
        KeeperCallError::Gone => Refusal::Overloaded("the keeper restarts"),
        KeeperCallError::TimedOut => Refusal::FilesHang,
        KeeperCallError::Refused { failure: FailureKind::Busy, .. } => {
            Refusal::Overloaded("too many links are looked up")
        }
        error @ KeeperCallError::Refused { failure: FailureKind::Forbidden, .. } => {
            Refusal::LinkRefused(error.to_string())
        }
        error @ (KeeperCallError::Refused { .. } | KeeperCallError::Elsewhere { .. }) => {
            Refusal::SiteBroken(error.to_string())
        }
    })
}
