//! Sees at once that a document root has become another directory: by a rename, or by a link that
//! was switched.
//!
//! Each name on the way from a tenant's home to its site's root is watched in its directory
//! (inotify(7)). A change of one counts as a change of the root, `root_changes`. The edge then
//! opens the root again before it serves the next request.
//!
//! A tenant can make any number of events. If its directories change too often, they are not
//! watched for a while. Then its roots have the age that any root may have. Ways that are not below
//! a home, and file systems of other machines, are not watched either. Invariant: a root that is
//! given with a mark was found by the watched way, after the mark was made.
//!
//! Not here: opening roots (`roots`, `root_mounts`), the path itself (`tenant_path`).

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_keeper_api::protocol::OpenedRoot;
use nagaya_keeper_api::root_changes::{RootChanges, RootMark};
use nagaya_records::{Site, SiteName, TenantName};
use parking_lot::Mutex;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::fault::Fault;
use crate::paths::tenant_path::{FileId, PathStep, PathSteps};

/// Maximum number of sites whose roots are watched. Others' roots have an age.
const SITES_MAX: usize = 16_384;

/// Time without a request after which a site's root is not watched any more. The edge requests it
/// once a second while it serves it.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// Maximum number of times that a root is opened until its path stays unchanged meanwhile.
const OPEN_TRIES: usize = 3;

/// Maximum number of events of one tenant in a second. More end its watches for `HELD_OFF`.
const EVENTS_PER_SECOND_MAX: u32 = 500;

const HELD_OFF: Duration = Duration::from_secs(10);

/// Number of bytes of events that are read at once.
const EVENTS_LEN: usize = 16 * 1024;

/// Events that may replace the target of a name.
const CHANGES: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::ONLYDIR);

/// The paths to all document roots in use.
pub struct RootWatch {
    /// `None`: the kernel gives no descriptor, and every root has an age.
    inotify: Option<Arc<OwnedFd>>,
    changes: Option<RootChanges>,
    state: Mutex<RootWatchState>,
}

#[derive(Default)]
struct RootWatchState {
    sites: HashMap<SiteName, WatchedRoot>,
    /// By the kernel's numbers.
    directories: HashMap<i32, WatchedDirectory>,
    tenants: HashMap<TenantName, EventBudget>,
}

/// The path to one site's root.
struct WatchedRoot {
    tenant: TenantName,
    way: Vec<(FileId, OsString)>,
    directories: Vec<i32>,
    used: Instant,
}

/// Sites that depend on each name in it.
#[derive(Default)]
struct WatchedDirectory(HashMap<OsString, HashSet<SiteName>>);

/// Events of one tenant's directories in the present second.
struct EventBudget {
    since: Instant,
    count: u32,
    held_off: bool,
}

/// Whether a path is watched.
enum WatchResult {
    Already,
    FromNow,
    Not,
}

impl RootWatch {
    pub fn new() -> Self {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK);
        let changes = RootChanges::new();
        if let Some(error) = inotify
            .as_ref()
            .err()
            .map(ToString::to_string)
            .or(changes.as_ref().err().map(ToString::to_string))
        {
            tracing::warn!(%error, "document roots cannot be watched: another directory in the place of one is seen within a second");
        }
        let inotify = inotify.ok().map(Arc::new);
        Self { inotify, changes: changes.ok(), state: Mutex::default() }
    }

    /// Returns the counts for the edge.
    pub fn reader(&self) -> Option<OwnedFd> {
        self.changes.as_ref()?.reader().ok()
    }

    /// Returns the site's root as `open` finds it, by the path that `trace` finds. The mark is of a
    /// moment before: a change since then is counted. Blocks.
    pub fn open(
        &self,
        site: &Site,
        open: impl Fn() -> Result<OpenedRoot, Fault>,
        trace: impl Fn() -> io::Result<Option<PathSteps>>,
    ) -> Result<(OpenedRoot, Option<RootMark>), Fault> {
        let (Some(inotify), Some(changes)) = (&self.inotify, &self.changes) else {
            return Ok((open()?, None));
        };
        for _ in 0..OPEN_TRIES {
            let mark = changes.mark(&site.name);
            let root = open()?;
            if root.is_remote {
                return Ok((root, None));
            }
            let Ok(Some(steps)) = trace() else { return Ok((root, None)) };
            if FileId::of(&root.dir).ok() != Some(steps.end) {
                continue;
            }
            match self.watch(inotify, site, &steps.steps) {
                WatchResult::Already => return Ok((root, Some(mark))),
                WatchResult::FromNow => {}
                WatchResult::Not => return Ok((root, None)),
            }
        }
        Ok((open()?, None))
    }

    fn watch(&self, inotify: &OwnedFd, site: &Site, steps: &[PathStep]) -> WatchResult {
        let now = Instant::now();
        let is_same = |(id, name): &(FileId, OsString), step: &PathStep| *id == step.id && *name == step.name;
        {
            let mut state = self.state.lock();
            if state.is_held_off(&site.tenant, now) {
                return WatchResult::Not;
            }
            let is_new = match state.sites.get_mut(&site.name) {
                Some(watched)
                    if watched.way.len() == steps.len()
                        && watched.way.iter().zip(steps).all(|(known, step)| is_same(known, step)) =>
                {
                    watched.used = now;
                    return WatchResult::Already;
                }
                Some(_) => false,
                None => true,
            };
            if is_new && state.sites.len() >= SITES_MAX {
                return WatchResult::Not;
            }
        }
        // Without the lock, because the tenant's file system is accessed. An event before its
        // directory is recorded is lost. Therefore the root is opened once more.
        let mut directories = Vec::with_capacity(steps.len());
        for step in steps {
            // The very directory that was checked. The path is the keeper's own.
            let path = format!("/proc/self/fd/{}", step.directory.as_raw_fd());
            match inotify::add_watch(inotify, path, CHANGES) {
                Ok(number) => directories.push(number),
                Err(_) => {
                    self.state.lock().end_unused(inotify, &directories);
                    return WatchResult::Not;
                }
            }
        }
        let mut state = self.state.lock();
        let before = state.sites.remove(&site.name);
        for (number, step) in directories.iter().zip(steps) {
            let names = &mut state.directories.entry(*number).or_default().0;
            names.entry(step.name.clone()).or_default().insert(site.name.clone());
        }
        let way: Vec<_> = steps.iter().map(|step| (step.id, step.name.clone())).collect();
        let kept: HashSet<_> =
            directories.iter().copied().zip(way.iter().map(|(_, name)| name.clone())).collect();
        let watched = WatchedRoot { tenant: site.tenant.clone(), way, directories, used: now };
        if let Some(before) = before {
            state.let_go(inotify, &site.name, &before, &kept);
        }
        state.sites.insert(site.name.clone(), watched);
        WatchResult::FromNow
    }

    /// Counts changes, and reports the sites whose roots may have changed. Never returns.
    pub async fn follow(&self, told: impl Fn(&SiteName)) {
        let Some(inotify) = &self.inotify else { return std::future::pending().await };
        let Ok(events) = nagaya_keeper_api::watch(Arc::clone(inotify), Interest::READABLE) else {
            return std::future::pending().await;
        };
        loop {
            match self.changed(&events).await {
                Ok(sites) => sites.iter().for_each(&told),
                Err(error) => {
                    tracing::warn!(%error, "document roots are not watched any more: another directory in the place of one is seen within a second");
                    return std::future::pending().await;
                }
            }
        }
    }

    async fn changed(&self, events: &AsyncFd<Arc<OwnedFd>>) -> io::Result<HashSet<SiteName>> {
        loop {
            let mut ready = events.readable().await?;
            if let Ok(taken) = ready.try_io(|inotify| self.take(inotify.get_ref())) {
                return taken;
            }
        }
    }

    /// Reads once.
    fn take(&self, inotify: &OwnedFd) -> io::Result<HashSet<SiteName>> {
        let mut buffer = [MaybeUninit::uninit(); EVENTS_LEN];
        let mut events = inotify::Reader::new(inotify, &mut buffer);
        let (mut changed, mut is_lost) = (HashSet::new(), false);
        let mut state = self.state.lock();
        loop {
            match events.next() {
                Ok(event) if event.events().contains(ReadFlags::QUEUE_OVERFLOW) => {
                    // Any event may have been lost.
                    is_lost = true;
                    changed.extend(state.sites.keys().cloned());
                }
                Ok(event) => {
                    let name = event.file_name().map(|name| OsString::from_vec(name.to_bytes().to_vec()));
                    let is_over = event.events().contains(ReadFlags::IGNORED);
                    changed.extend(state.changed(inotify, event.wd(), name, is_over));
                }
                Err(Errno::AGAIN) if changed.is_empty() => return Err(Errno::AGAIN.into()),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if events.is_buffer_empty() {
                break;
            }
        }
        if is_lost {
            self.count(RootChanges::add_to_all);
        } else {
            changed.iter().for_each(|site| self.count(|changes| changes.add(site)));
        }
        Ok(changed)
    }

    fn count(&self, add: impl Fn(&RootChanges) -> io::Result<()>) {
        if let Some(Err(error)) = self.changes.as_ref().map(add) {
            tracing::debug!(%error, "a change of a document root is not counted");
        }
    }

    /// Ends watches for roots without recent requests. Must be called now and then.
    pub fn drop_idle(&self, now: Instant) {
        let Some(inotify) = &self.inotify else { return };
        let mut state = self.state.lock();
        let is_idle = |watched: &WatchedRoot| now.saturating_duration_since(watched.used) > IDLE_MAX;
        let idle: Vec<_> = state.sites.extract_if(|_, watched| is_idle(watched)).collect();
        for (site, watched) in idle {
            state.let_go(inotify, &site, &watched, &HashSet::new());
        }
        state.tenants.retain(|_, events| events.since + HELD_OFF > now);
    }
}

impl RootWatchState {
    fn is_held_off(&mut self, tenant: &TenantName, now: Instant) -> bool {
        self.tenants.get(tenant).is_some_and(|events| events.held_off && now < events.since + HELD_OFF)
    }

    /// Returns the sites that an event is about. `is_over`: the kernel no longer watches this
    /// directory.
    fn changed(
        &mut self,
        inotify: &OwnedFd,
        directory: i32,
        name: Option<OsString>,
        is_over: bool,
    ) -> HashSet<SiteName> {
        if is_over {
            // Either it was released, or it is gone.
            let sites = self.directories.remove(&directory).unwrap_or_default();
            let sites: HashSet<_> = sites.0.into_values().flatten().collect();
            for site in &sites {
                self.forget(inotify, site);
            }
            return sites;
        }
        let Some(WatchedDirectory(names)) = self.directories.get(&directory) else { return HashSet::new() };
        let sites = name.and_then(|name| names.get(&name)).cloned().unwrap_or_default();
        let tenant = names.values().flatten().next().and_then(|site| self.sites.get(site));
        match tenant.map(|watched| watched.tenant.clone()) {
            Some(tenant) if self.is_too_much(&tenant) => self.hold_off(inotify, &tenant),
            _ => sites,
        }
    }

    fn is_too_much(&mut self, tenant: &TenantName) -> bool {
        let now = Instant::now();
        let fresh = || EventBudget { since: now, count: 0, held_off: false };
        let events = self.tenants.entry(tenant.clone()).or_insert_with(fresh);
        if now.saturating_duration_since(events.since) > Duration::from_secs(1) {
            *events = fresh();
        }
        events.count += 1;
        events.held_off = events.count > EVENTS_PER_SECOND_MAX;
        events.held_off
    }

    fn hold_off(&mut self, inotify: &OwnedFd, tenant: &TenantName) -> HashSet<SiteName> {
        tracing::debug!(%tenant, "its directories change too often to be watched");
        let of_tenant =
            |(site, watched): (&SiteName, &WatchedRoot)| (watched.tenant == *tenant).then(|| site.clone());
        let sites: HashSet<_> = self.sites.iter().filter_map(of_tenant).collect();
        for site in &sites {
            self.forget(inotify, site);
        }
        sites
    }

    /// Ends watches that were begun for a path which cannot be watched as a whole.
    fn end_unused(&mut self, inotify: &OwnedFd, begun: &[i32]) {
        for number in begun.iter().filter(|number| !self.directories.contains_key(number)) {
            // A number that occurs twice has ended already.
            let _ = inotify::remove_watch(inotify, *number);
        }
    }

    fn forget(&mut self, inotify: &OwnedFd, site: &SiteName) {
        if let Some(watched) = self.sites.remove(site) {
            self.let_go(inotify, site, &watched, &HashSet::new());
        }
    }

    /// Ends the watches for this site alone, except for names in directories that it continues
    /// with.
    fn let_go(
        &mut self,
        inotify: &OwnedFd,
        site: &SiteName,
        watched: &WatchedRoot,
        kept: &HashSet<(i32, OsString)>,
    ) {
        for (number, (_, name)) in watched.directories.iter().zip(&watched.way) {
            if kept.contains(&(*number, name.clone())) {
                continue;
            }
            let Some(WatchedDirectory(names)) = self.directories.get_mut(number) else { continue };
            if let Some(sites) = names.get_mut(name) {
                sites.remove(site);
                if sites.is_empty() {
                    names.remove(name);
                }
            }
            if names.is_empty() {
                self.directories.remove(number);
                // It fails for a directory that is gone, whose watch the kernel has ended itself.
                let _ = inotify::remove_watch(inotify, *number);
            }
        }
    }
}

#[cfg(test)]
mod tests;
