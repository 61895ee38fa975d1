//! Which scripts of which site a PHP worker may be given, by its record and by what is on disk.
//!
//! Not here: reading the request (`opening`), passing it on (`super`).

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nagaya_cmdb::record::Files;
use nagaya_cmdb::{Backend, Site, SiteName, Tenant};
use parking_lot::RwLock;
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::opening::{Opening, Violation};
use crate::fault::Fault;
use crate::roots;

/// Ending of the programs of a PHP site.
const EXTENSION: &[u8] = b".php";

/// Tries of a look-up that a rename elsewhere disturbs (`EAGAIN` of `openat2`).
const RESOLVE_TRIES: usize = 64;

/// What one worker may be given now. It changes with the site it serves, and with that site's record.
#[derive(Debug)]
pub struct ScriptRule(RwLock<(SiteName, Option<Arc<SiteScripts>>)>);

impl ScriptRule {
    pub fn new(site: SiteName, scripts: SiteScripts) -> Arc<Self> {
        Arc::new(Self(RwLock::new((site, Some(Arc::new(scripts))))))
    }

    /// `None`: it may be given none.
    pub fn set(&self, site: SiteName, scripts: Option<SiteScripts>) {
        *self.0.write() = (site, scripts.map(Arc::new));
    }

    /// The site it serves.
    pub fn site(&self) -> SiteName {
        self.0.read().0.clone()
    }

    pub fn get(&self) -> Option<Arc<SiteScripts>> {
        self.0.read().1.clone()
    }
}

/// The scripts of one site.
#[derive(Debug, PartialEq, Eq)]
pub struct SiteScripts {
    root: PathBuf,
    front_controller: Option<Vec<u8>>,
    /// Endings of scripts beside `EXTENSION`.
    extensions: Vec<Vec<u8>>,
    /// What the operator's record sets in their place.
    set_script: Option<Vec<u8>>,
    set_root: Option<Vec<u8>>,
}

impl SiteScripts {
    /// `None`: the site is not of kind php.
    pub fn of(site: &Site, tenant: &Tenant) -> Result<Option<Self>, Fault> {
        let Backend::Php(files) = &site.backend else { return Ok(None) };
        Ok(Some(Self::new(roots::root_path(files, tenant)?, files)))
    }

    fn new(root: PathBuf, files: &Files) -> Self {
        let set = |name: &str| files.env.get(name).map(|value| value.clone().into_bytes());
        let front = files.front_controller.as_deref().map(|front| front.trim_start_matches('/'));
        Self {
            // As the edge writes it: without `.` and repeated slashes.
            root: root.components().collect(),
            extensions: files.extensions.iter().map(|ending| ending.clone().into_bytes()).collect(),
            front_controller: front.map(|front| front.as_bytes().to_vec()),
            set_script: set("SCRIPT_FILENAME"),
            set_root: set("DOCUMENT_ROOT"),
        }
    }

    /// The path of the request's script beneath the root, if the request may be passed on by what it says. `None`: the
    /// operator's record names another script.
    pub fn check<'o>(&self, opening: &'o Opening) -> Result<Option<&'o Path>, Violation> {
        for name in ["PHP_VALUE", "PHP_ADMIN_VALUE", "ORIG_SCRIPT_FILENAME"] {
            if opening.param(name).is_some() {
                return Err(Violation::Refused(name.into()));
            }
        }
        // With both, PHP runs what the first names.
        if opening.param("PATH_TRANSLATED").is_some() && opening.param("REDIRECT_URL").is_some() {
            return Err(Violation::Refused("PATH_TRANSLATED with REDIRECT_URL".into()));
        }
        let root = self.set_root.as_deref().unwrap_or(self.root.as_os_str().as_bytes());
        if opening.param("DOCUMENT_ROOT").is_some_and(|said| said != root) {
            return Err(Violation::Refused("another DOCUMENT_ROOT".into()));
        }
        let script = opening.param("SCRIPT_FILENAME").unwrap_or_default();
        if self.set_script.as_deref() == Some(script) {
            return Ok(None);
        }
        let refused = || Violation::Script(script.escape_ascii().to_string());
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

    /// Whether the file is there, and no link leads out of the root on the way to it.
    ///
    /// `cached_only`: fails with `AGAIN` where a disk would have to be asked, so that it never blocks.
    pub fn is_beneath(&self, file: &Path, cached_only: bool) -> Result<bool, Errno> {
        let cached = if cached_only { ResolveFlags::CACHED } else { ResolveFlags::empty() };
        let plain = ResolveFlags::NO_MAGICLINKS | cached;
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = open(CWD, &self.root, directory, plain)?;
        let found = open(&root, file, OFlags::PATH | OFlags::CLOEXEC, plain | ResolveFlags::BENEATH)?;
        Ok(FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) == FileType::RegularFile)
    }
}

fn open(
    at: impl std::os::fd::AsFd,
    path: &Path,
    flags: OFlags,
    resolve: ResolveFlags,
) -> Result<std::os::fd::OwnedFd, Errno> {
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
