//! Stopping everything in a leaf, all of it at one moment, and letting it go on: `cgroup.freeze` of v2 in the leaf's own
//! directory, or a directory in the `freezer` hierarchy of v1, where that is all there is.
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

use super::Shared;
use super::controllers::Version;
use super::ending;
use super::files::{self, FileError};
use super::leaf::Leaf;
use crate::sandbox::Freezing;

/// How long the kernel may take to stop a tree: a process in an uninterruptible call stops when that returns.
const FREEZE_TIMEOUT: Duration = Duration::from_millis(500);

/// Times the list of processes is gone through to move a tree: who is born meanwhile is found by the next.
const ROUNDS_MAX: usize = 8;

/// A tree that is stopped. It goes on by `thaw` alone.
#[derive(Debug)]
pub struct Freezer {
    dir: PathBuf,
    version: Version,
}

impl Freezer {
    fn write(&self, is_frozen: bool) -> Result<(), FileError> {
        match self.version {
            Version::V2 => files::write(&self.dir.join("cgroup.freeze"), if is_frozen { "1" } else { "0" }),
            Version::V1 => {
                files::write(&self.dir.join("freezer.state"), if is_frozen { "FROZEN" } else { "THAWED" })
            }
        }
    }

    fn is_frozen(&self) -> Result<bool, FileError> {
        Ok(match self.version {
            Version::V2 => {
                files::read(&self.dir.join("cgroup.events"))?.lines().any(|line| line == "frozen 1")
            }
            Version::V1 => files::read(&self.dir.join("freezer.state"))? == "FROZEN",
        })
    }

    /// Returns once nothing in it runs; if it does not stop, it goes on.
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

    /// Lets it go on.
    pub fn thaw(&self) -> io::Result<()> {
        match self.write(false) {
            // Nothing is in it any more, and the directory went with that.
            Err(error) if error.is_gone() => Ok(()),
            written => Ok(written?),
        }
    }
}

/// What stops a leaf from outside, whether or not it rests: see `Leaf::brake`.
#[derive(Debug)]
pub struct Brake {
    pub version: Freezing,
    /// Stops this leaf.
    pub own: OwnedFd,
    /// On v1: stops all leaves that have a brake.
    pub all: Option<OwnedFd>,
}

/// Name of the directory above all that are stopped by one write on v1.
const BRAKES: &str = "placed";

impl Shared {
    /// One level for all leaves: their names have slashes.
    fn freezer_of(&self, leaf: &Leaf) -> Option<PathBuf> {
        Some(self.freezer.as_ref()?.join(BRAKES).join(leaf.name().replace('/', ":")))
    }

    /// Removes the directories of the freezer that nothing is in.
    pub(super) fn close_freezer(&self) {
        let Some(own) = &self.freezer else { return };
        let _ = rustix::fs::rmdir(own.join(BRAKES));
        for dir in own.ancestors().take(2) {
            // It may never have been made, and other keepers may be in the one above.
            let _ = rustix::fs::rmdir(dir);
        }
    }
}

impl Leaf {
    /// Opens what stops it from outside. To be called before anything is born in it. On v2 that is the directory of its
    /// site, above what `freeze` writes to; on v1 its processes are born in its directory of the freezer from here on.
    pub fn brake(&self) -> io::Result<Brake> {
        let open = |path: PathBuf, flags| files::open(&path, flags);
        if let Some(dir) = self.freezable() {
            let above = dir.parent().filter(|above| {
                above.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"site-"))
            });
            let Some(above) = above else {
                let why = format!("{} is not beneath a site's directory", dir.display());
                return Err(io::Error::new(io::ErrorKind::Unsupported, why));
            };
            let own = open(above.join("cgroup.freeze"), OFlags::WRONLY)?;
            return Ok(Brake { version: Freezing::V2, own, all: None });
        }
        let dir = self.make_freezer()?;
        let all = dir.parent().expect("it has a directory above").join("freezer.state");
        let (own, all) = (open(dir.join("freezer.state"), OFlags::RDWR)?, open(all, OFlags::RDWR)?);
        self.enter_too(open(dir.join("tasks"), OFlags::WRONLY)?);
        Ok(Brake { version: Freezing::V1, own, all: Some(all) })
    }

    fn make_freezer(&self) -> io::Result<PathBuf> {
        let Some(dir) = self.shared().freezer_of(self) else {
            let why = "there is neither cgroup v2 nor the freezer of v1";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        };
        fs::create_dir_all(&dir).map_err(|error| FileError::new(&dir, error))?;
        self.may_be_in_freezer();
        Ok(dir)
    }

    /// What was killed while it was stopped on v1 dies only where nothing stops it. None of it runs a line more.
    pub(super) fn let_the_killed_go(&self) {
        let (Some(own), Some(dir)) = (&self.shared().freezer, self.shared().freezer_of(self)) else { return };
        // Who is gone meanwhile needs no way out.
        for pid in ending::members(&dir).unwrap_or_default() {
            let _ = files::write(&own.join("cgroup.procs"), &pid.as_raw_nonzero().to_string());
        }
    }

    /// Stops everything in it.
    pub fn freeze(&self) -> io::Result<Freezer> {
        if let Some(dir) = self.freezable() {
            return Freezer { dir, version: Version::V2 }.stop();
        }
        let dir = self.make_freezer()?;
        self.move_all_to(&dir)?;
        Freezer { dir, version: Version::V1 }.stop()
    }

    /// Moves all that is in the leaf to this directory of another hierarchy, and those they have started meanwhile.
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

    /// Removes what `freeze` made, once nothing is in it.
    pub fn forget_freezer(&self) {
        if let Some(dir) = self.shared().freezer_of(self) {
            // It may never have been made.
            let _ = rustix::fs::rmdir(dir);
        }
    }
}
