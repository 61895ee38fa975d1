//! Stopping everything in a leaf, all of it at one moment, and letting it go on: `cgroup.freeze` of v2 in the leaf's own
//! directory, or a directory in the `freezer` hierarchy of v1, where that is all there is.
//!
//! Not here: when an instance is frozen (`instances::rest`).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::controllers::Version;
use super::ending;
use super::files::{self, FileError};
use super::leaf::Leaf;

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

impl Leaf {
    /// Stops everything in it.
    pub fn freeze(&self) -> io::Result<Freezer> {
        if let Some(dir) = self.freezable() {
            return Freezer { dir, version: Version::V2 }.stop();
        }
        let Some(tree) = &self.shared().freezer else {
            let why = "there is neither cgroup v2 nor the freezer of v1";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        };
        // One level for all leaves: their names have slashes.
        let dir = tree.join(self.name().replace('/', ":"));
        fs::create_dir_all(&dir).map_err(|error| FileError::new(&dir, error))?;
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
        if let Some(tree) = &self.shared().freezer {
            // It may never have been made.
            let _ = rustix::fs::rmdir(tree.join(self.name().replace('/', ":")));
        }
    }
}
