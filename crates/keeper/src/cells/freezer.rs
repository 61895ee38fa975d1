//! Freezes everything in a leaf at one moment, and thaws it. It uses `cgroup.freeze` of v2 in the
//! leaf's own directory. Without that, it uses a directory in the `freezer` hierarchy of v1.
//!
//! Not here: when an instance is frozen (`instances::rest`).

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::sandbox::FreezerVersion;

use super::controllers::CgroupVersion;
use super::ending;
use super::files::{self, CgroupFileError};
use super::leaf::Leaf;
use super::tree::CellTree;

/// Maximum time for the kernel to freeze a tree. A process in an uninterruptible call stops when
/// that returns.
const FREEZE_TIMEOUT: Duration = Duration::from_millis(500);

/// Maximum number of passes through the process list to move a tree. The next pass finds processes
/// that are born meanwhile.
const ROUNDS_MAX: usize = 8;

/// A frozen tree. Only `thaw` lets it continue.
#[derive(Debug)]
pub struct FrozenTree {
    dir: PathBuf,
    version: CgroupVersion,
}

impl FrozenTree {
    fn write(&self, is_frozen: bool) -> Result<(), CgroupFileError> {
        match self.version {
            CgroupVersion::V2 => {
                files::write(&self.dir.join("cgroup.freeze"), if is_frozen { "1" } else { "0" })
            }
            CgroupVersion::V1 => {
                files::write(&self.dir.join("freezer.state"), if is_frozen { "FROZEN" } else { "THAWED" })
            }
        }
    }

    fn is_frozen(&self) -> Result<bool, CgroupFileError> {
        Ok(match self.version {
            CgroupVersion::V2 => {
                files::read(&self.dir.join("cgroup.events"))?.lines().any(|line| line == "frozen 1")
            }
            CgroupVersion::V1 => files::read(&self.dir.join("freezer.state"))? == "FROZEN",
        })
    }

    /// Returns once nothing in it runs. If it does not freeze, it is thawed.
    fn stop(self) -> io::Result<Self> {
        self.write(true)?;
        let until = Instant::now() + FREEZE_TIMEOUT;
        let mut pause = Duration::from_micros(50);
        while !self.is_frozen()? {
            if Instant::now() >= until {
                self.write(false)?;
                let why = format!("{} does not stop within {FREEZE_TIMEOUT:?}", self.dir.display());
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(5));
        }
        Ok(self)
    }

    /// Thaws it.
    pub fn thaw(&self) -> io::Result<()> {
        match self.write(false) {
            // Nothing is in it any more, and the directory is gone with its processes.
            Err(error) if error.is_gone() => Ok(()),
            written => Ok(written?),
        }
    }
}

/// Files that freeze a leaf from outside, whether or not it rests: see `Leaf::brake`.
#[derive(Debug)]
pub struct FreezeFile {
    pub version: FreezerVersion,
    /// Freezes this leaf.
    pub own: OwnedFd,
    /// On v1: freezes all leaves that have such a file.
    pub all: Option<OwnedFd>,
}

/// Name of the directory above all leaves that one write freezes on v1.
const BRAKES: &str = "placed";

impl CellTree {
    /// One level for all leaves, because their names have slashes.
    fn freezer_of(&self, leaf: &Leaf) -> Option<PathBuf> {
        Some(self.freezer.as_ref()?.join(BRAKES).join(leaf.name().replace('/', ":")))
    }

    /// Removes empty directories of the freezer.
    pub(super) fn close_freezer(&self) {
        let Some(own) = &self.freezer else { return };
        let _ = rustix::fs::rmdir(own.join(BRAKES));
        for dir in own.ancestors().take(2) {
            // It may never have been made, and other keepers may be in the parent directory.
            let _ = rustix::fs::rmdir(dir);
        }
    }
}

impl Leaf {
    /// Opens the files that freeze it from outside. Must be called before anything is born in it.
    /// On v2 that is the directory of its site, above the file of `freeze`. On v1 its processes are
    /// born in its directory of the freezer from here on.
    pub fn brake(&self) -> io::Result<FreezeFile> {
        let open = |path: PathBuf, flags| files::open(&path, flags);
        if let Some(dir) = self.freezable() {
            let above = dir.parent().filter(|above| {
                above.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"site-"))
            });
            let Some(above) = above else {
                let why = format!("{} is not below a site's directory", dir.display());
                return Err(io::Error::new(io::ErrorKind::Unsupported, why));
            };
            let own = open(above.join("cgroup.freeze"), OFlags::WRONLY)?;
            return Ok(FreezeFile { version: FreezerVersion::V2, own, all: None });
        }
        let dir = self.make_freezer()?;
        let all = dir.parent().expect("it has a directory above").join("freezer.state");
        let (own, all) = (open(dir.join("freezer.state"), OFlags::RDWR)?, open(all, OFlags::RDWR)?);
        self.enter_too(open(dir.join("tasks"), OFlags::WRONLY)?);
        Ok(FreezeFile { version: FreezerVersion::V1, own, all: Some(all) })
    }

    fn make_freezer(&self) -> io::Result<PathBuf> {
        let Some(dir) = self.shared().freezer_of(self) else {
            let why = "there is neither cgroup v2 nor the freezer of v1";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        };
        fs::create_dir_all(&dir).map_err(|error| CgroupFileError::new(&dir, error))?;
        self.may_be_in_freezer();
        Ok(dir)
    }

    /// Lets killed processes die: on v1 they do so only where nothing freezes them. None of them
    /// runs user code any more.
    pub(super) fn let_the_killed_go(&self) {
        let (Some(own), Some(dir)) = (&self.shared().freezer, self.shared().freezer_of(self)) else { return };
        // A process that is gone meanwhile need not be moved.
        for pid in ending::members(&dir).unwrap_or_default() {
            let _ = files::write(&own.join("cgroup.procs"), &pid.as_raw_nonzero().to_string());
        }
    }

    /// Freezes everything in it.
    pub fn freeze(&self) -> io::Result<FrozenTree> {
        if let Some(dir) = self.freezable() {
            return FrozenTree { dir, version: CgroupVersion::V2 }.stop();
        }
        let dir = self.make_freezer()?;
        self.move_all_to(&dir)?;
        FrozenTree { dir, version: CgroupVersion::V1 }.stop()
    }

    /// Moves all processes of the leaf to this directory of another hierarchy, and those they have
    /// started meanwhile.
    fn move_all_to(&self, dir: &Path) -> io::Result<()> {
        for _ in 0..ROUNDS_MAX {
            let there = ending::members(dir)?;
            let left: Vec<_> = self.pids()?.into_iter().filter(|pid| !there.contains(pid)).collect();
            if left.is_empty() {
                return Ok(());
            }
            for pid in left {
                match files::write(&dir.join("cgroup.procs"), &pid.as_raw_nonzero().to_string()) {
                    Err(error) if !error.is(Errno::SRCH) => return Err(error.into()),
                    _ => {}
                }
            }
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, "it starts processes faster than they can be stopped"))
    }

    /// Removes the directory that `freeze` made, once it is empty.
    pub fn forget_freezer(&self) {
        if let Some(dir) = self.shared().freezer_of(self) {
            // It may never have been made.
            let _ = rustix::fs::rmdir(dir);
        }
    }
}
