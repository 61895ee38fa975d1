//! The scripts of a site that a PHP worker may be given, by its record and the files on disk.
//!
//! Not here: reading the request (`opening`), passing it on (`super`).

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_records::cell::RequestUsage;
use nagaya_records::record::{FileRoot, LinkPolicy};
use nagaya_records::{Backend, Site, SiteName, Tenant};
use parking_lot::{Mutex, RwLock};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::process::Pid;

use crate::cells::{CpuDemand, Leaf};
use crate::enclosure::{HiddenPath, ProgramView};
use crate::fault::Fault;
use crate::paths::roots;
use crate::paths::tenant_path::{PathOwner, real_path};
use crate::sys::UnixIdentity;

use super::opening::{CheckedOpening, RequestViolation};

/// Extension of the programs of a PHP site.
const EXTENSION: &[u8] = b".php";

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Time below which a request's use is not read from all counters. A program that a script starts
/// in this time can use little.
const QUICK_MAX: Duration = Duration::from_millis(2);

/// Maximum number of scripts of one worker that are not looked up again, and for how long.
const SEEN_MAX: usize = 16;
const SEEN_AGE_MAX: Duration = Duration::from_secs(1);

/// Maximum number of tries of a look-up that a rename elsewhere disturbs (`EAGAIN` of `openat2`).
const RESOLVE_TRIES: usize = 64;

/// The scripts that one worker may be given now, and its cell. Both change with the site it serves,
/// and with that site's record.
#[derive(Debug)]
pub struct ScriptRule {
    scripts: RwLock<(SiteName, Option<Arc<SiteScripts>>)>,
    cell: Mutex<WorkerDemand>,
}

/// The present cell of a worker, and the CPU demand that it has there.
#[derive(Debug)]
struct WorkerDemand {
    /// Its cell, and its number on this node.
    place: Option<(Arc<Leaf>, Pid)>,
    demand: CpuDemand,
    /// The gate reports the use of its requests.
    reports: bool,
}

impl ScriptRule {
    pub fn new(site: SiteName, scripts: SiteScripts) -> Arc<Self> {
        let scripts = RwLock::new((site, Some(Arc::new(scripts))));
        let cell = Mutex::new(WorkerDemand { place: None, demand: CpuDemand::Share, reports: false });
        Arc::new(Self { scripts, cell })
    }

    /// Sets the present cell of the worker, which keeps its CPU demand.
    pub fn set_cell(&self, leaf: Arc<Leaf>, pid: Pid) {
        let mut cell = self.cell.lock();
        leaf.claim(cell.demand);
        cell.place = Some((leaf, pid));
    }

    /// Sets whether the gate reports the use of the worker's requests.
    pub fn let_report(&self, reports: bool) {
        self.cell.lock().reports = reports;
    }

    /// Ends the count of the present request's use, and returns that. `took`: its time at the
    /// worker. `None` if the keeper has to be asked for it: the request left processes behind, or
    /// is watched.
    ///
    /// The kernel counts the CPU time of a running process when that pauses, and at timer ticks. A
    /// worker that still runs on another CPU may have used nothing by the counters. Then `None`,
    /// too: it has paused when the keeper is asked.
    pub fn settle(&self, took: Duration) -> Option<RequestUsage> {
        let cell = self.cell.lock();
        let (leaf, pid) = cell.place.as_ref().filter(|_| cell.reports)?;
        let quick = (took < QUICK_MAX).then(|| leaf.begin_next_quick(*pid)).flatten();
        quick.or_else(|| leaf.begin_next(*pid, |used| used.cpu_us > 0))
    }

    /// Sets the CPU demand of the worker, in its present cell and in later ones.
    pub fn claim(&self, demand: CpuDemand) {
        let mut cell = self.cell.lock();
        cell.demand = demand;
        if let Some((leaf, _)) = &cell.place {
            leaf.claim(demand);
        }
    }

    /// `None`: it may be given none.
    pub fn set(&self, site: SiteName, scripts: Option<SiteScripts>) {
        *self.scripts.write() = (site, scripts.map(Arc::new));
    }

    /// Returns the site it serves.
    pub fn site(&self) -> SiteName {
        self.scripts.read().0.clone()
    }

    pub fn get(&self) -> Option<Arc<SiteScripts>> {
        self.scripts.read().1.clone()
    }
}

/// The result of a look at a script.
#[derive(Debug, PartialEq, Eq)]
pub enum ScriptLookup {
    File,
    /// It is no regular file.
    Other,
    /// The worker does not see its site's root.
    Hidden(HiddenPath),
}

/// The scripts of one site.
#[derive(Debug, PartialEq, Eq)]
pub struct SiteScripts {
    root: PathBuf,
    /// The files that the worker sees.
    view: ProgramView,
    /// Owner with whose rights links out of the root are followed. `None`: the record allows none.
    link_owner: Option<PathOwner>,
    front_controller: Option<Vec<u8>>,
    /// Extensions of scripts besides `EXTENSION`.
    extensions: Vec<Vec<u8>>,
    /// Script that the operator's record sets instead.
    set_script: Option<Vec<u8>>,
    set_root: Option<Vec<u8>>,
}

impl SiteScripts {
    /// Returns `None` if the site is not of kind php.
    pub fn of(
        site: &Site,
        tenant: &Tenant,
        identity: Option<UnixIdentity>,
        view: impl FnOnce() -> ProgramView,
    ) -> Result<Option<Self>, Fault> {
        let Backend::Php(files) = &site.backend else { return Ok(None) };
        let link_owner = (files.links == LinkPolicy::Own).then(|| PathOwner::of(tenant, identity));
        Ok(Some(Self::new(roots::root_path(files, tenant)?, view(), link_owner, files)))
    }

    fn new(root: PathBuf, view: ProgramView, link_owner: Option<PathOwner>, files: &FileRoot) -> Self {
        let set = |name: &str| files.env.get(name).map(|value| value.clone().into_bytes());
        let front = files.front_controller.as_deref().map(|front| front.trim_start_matches('/'));
        Self {
            // In the edge's form: without `.` and repeated slashes.
            root: root.components().collect(),
            view,
            link_owner,
            extensions: files.extensions.iter().map(|ending| ending.clone().into_bytes()).collect(),
            front_controller: front.map(|front| front.as_bytes().to_vec()),
            set_script: set("SCRIPT_FILENAME"),
            set_root: set("DOCUMENT_ROOT"),
        }
    }

    /// Returns the path of the request's script below the root, if the request may be passed on by
    /// its parameters. `None`: the operator's record names another script.
    pub fn check<'o>(&self, opening: &'o CheckedOpening) -> Result<Option<&'o Path>, RequestViolation> {
        for name in ["PHP_VALUE", "PHP_ADMIN_VALUE", "ORIG_SCRIPT_FILENAME"] {
            if opening.param(name).is_some() {
                return Err(RequestViolation::Refused(name.into()));
            }
        }
        // With both, PHP runs the script that the first names.
        if opening.param("PATH_TRANSLATED").is_some() && opening.param("REDIRECT_URL").is_some() {
            return Err(RequestViolation::Refused("PATH_TRANSLATED with REDIRECT_URL".into()));
        }
        let root = self.set_root.as_deref().unwrap_or(self.root.as_os_str().as_bytes());
        if opening.param("DOCUMENT_ROOT").is_some_and(|said| said != root) {
            return Err(RequestViolation::Refused("another DOCUMENT_ROOT".into()));
        }
        let script = opening.param("SCRIPT_FILENAME").unwrap_or_default();
        if self.set_script.as_deref() == Some(script) {
            return Ok(None);
        }
        let refused = || RequestViolation::Script(script.escape_ascii().to_string());
        self.relative(script).map(Some).ok_or_else(refused)
    }

    fn relative<'s>(&self, script: &'s [u8]) -> Option<&'s Path> {
        let root = self.root.as_os_str().as_bytes();
        let root = root.strip_suffix(b"/").unwrap_or(root);
        let file = script.strip_prefix(root)?.strip_prefix(b"/")?;
        let is_plain = |part: &[u8]| !matches!(part, b"" | b"." | b"..") && !part.contains(&0);
        let is_named = |ending: &Vec<u8>| !ending.is_empty() && file.ends_with(ending);
        let is_script = file.ends_with(EXTENSION)
            || self.extensions.iter().any(is_named)
            || self.front_controller.as_deref() == Some(file);
        let is_ours = is_script && file.split(|byte| *byte == b'/').all(is_plain);
        is_ours.then(|| Path::new(OsStr::from_bytes(file)))
    }

    /// Checks that a worker sees the root, before one is started. It blocks. A root that cannot be
    /// opened is found out by the first look for a script.
    pub fn check_root(&self) -> Result<(), HiddenPath> {
        self.view.check(&self.root)?;
        let root = open(CWD, &self.root, DIRECTORY, ResolveFlags::NO_MAGICLINKS);
        root.map_or(Ok(()), |root| self.check_opened(&root))
    }

    /// `root`: the root, opened at its path.
    fn check_opened(&self, root: &OwnedFd) -> Result<(), HiddenPath> {
        if self.view == ProgramView::Whole {
            return Ok(());
        }
        self.view.check(&self.root)?;
        real_path(root).map_or(Ok(()), |target| self.view.check_target(&target))
    }

    /// Looks for the file, to which no link may lead out of the root. Links of the tenant's own to
    /// the tenant's files are allowed. Then the tenant's script runs, with the tenant's rights.
    ///
    /// `cached_only`: fails with `AGAIN` instead of reading a disk, so that it never blocks.
    pub fn find(&self, file: &Path, cached_only: bool) -> Result<ScriptLookup, Errno> {
        let cached = if cached_only { ResolveFlags::CACHED } else { ResolveFlags::empty() };
        let plain = ResolveFlags::NO_MAGICLINKS | cached;
        let root = open(CWD, &self.root, DIRECTORY, plain)?;
        let found = match open(&root, file, OFlags::PATH | OFlags::CLOEXEC, plain | ResolveFlags::BENEATH) {
            Err(Errno::XDEV) if self.link_owner.is_some() && cached_only => return Err(Errno::AGAIN),
            Err(Errno::XDEV) => self.open_by_own_links(file)?,
            found => found?,
        };
        if FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) != FileType::RegularFile {
            return Ok(ScriptLookup::Other);
        }
        if cached_only && real_path(&root).is_ok_and(|target| self.view.check(&target).is_err()) {
            // Whether that is the tenant's home is found out by reading the disk.
            return Err(Errno::AGAIN);
        }
        Ok(self.check_opened(&root).map_or_else(ScriptLookup::Hidden, |()| ScriptLookup::File))
    }

    fn open_by_own_links(&self, file: &Path) -> Result<OwnedFd, Errno> {
        let owner = self.link_owner.as_ref().ok_or(Errno::XDEV)?;
        let refuse = |error: std::io::Error| match Errno::from_io_error(&error) {
            Some(errno) => errno,
            None => {
                tracing::debug!(%error, file = %file.display(), "a script behind a link is refused");
                Errno::XDEV
            }
        };
        owner.open_by_own_links(&self.root, file).map_err(refuse)
    }
}

/// Scripts that one worker's passage found below the root a moment ago.
///
/// PHP opens the script by its path some time after each look, so a look never says more than that
/// it was there. An edge cannot change files; their owner could do so between look and opening
/// before, and gains nothing: the worker has the owner's rights.
#[derive(Debug, Default)]
pub struct SeenScripts {
    /// The scripts that the paths belong to. Another record of the site has another root.
    scripts: Option<Arc<SiteScripts>>,
    files: Vec<(PathBuf, Instant)>,
}

impl SeenScripts {
    pub fn contains(&self, scripts: &Arc<SiteScripts>, file: &Path) -> bool {
        self.scripts.as_ref().is_some_and(|own| Arc::ptr_eq(own, scripts))
            && self.files.iter().any(|(seen, at)| seen == file && at.elapsed() < SEEN_AGE_MAX)
    }

    /// Adds a script. The oldest one makes room.
    pub fn insert(&mut self, scripts: &Arc<SiteScripts>, file: &Path) {
        if !self.scripts.as_ref().is_some_and(|own| Arc::ptr_eq(own, scripts)) {
            *self = Self { scripts: Some(Arc::clone(scripts)), files: Vec::new() };
        }
        self.files.retain(|(seen, _)| seen != file);
        if self.files.len() == SEEN_MAX {
            self.files.remove(0);
        }
        self.files.push((file.to_path_buf(), Instant::now()));
    }
}

fn open(
    at: impl std::os::fd::AsFd,
    path: &Path,
    flags: OFlags,
    resolve: ResolveFlags,
) -> Result<OwnedFd, Errno> {
    let tries = if resolve.contains(ResolveFlags::CACHED) { 1 } else { RESOLVE_TRIES };
    let mut last = Errno::AGAIN;
    for _ in 0..tries {
        match rustix::fs::openat2(&at, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN) => last = Errno::AGAIN,
            opened => return opened,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scripts(root: &str) -> Arc<SiteScripts> {
        let files = serde_json::from_str(r#"{"root":"www"}"#).expect("a record");
        Arc::new(SiteScripts::new(root.into(), ProgramView::Whole, None, &files))
    }

    #[test]
    fn seen_script_counts_for_its_record_alone() {
        let (one, other) = (scripts("/home/a/www"), scripts("/home/a/other"));
        let mut seen = SeenScripts::default();
        seen.insert(&one, Path::new("index.php"));
        assert!(seen.contains(&one, Path::new("index.php")));
        assert!(
            !seen.contains(&one, Path::new("other.php")) && !seen.contains(&other, Path::new("index.php"))
        );
        seen.insert(&other, Path::new("a.php"));
        assert!(!seen.contains(&one, Path::new("index.php")), "one record at a time");
        for number in 0..SEEN_MAX {
            seen.insert(&other, Path::new(&format!("{number}.php")));
        }
        assert!(!seen.contains(&other, Path::new("a.php")), "the oldest has made room");
        assert!(seen.files.len() == SEEN_MAX && seen.contains(&other, Path::new("0.php")));
    }
}
