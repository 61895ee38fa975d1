//! Whether a process that is born in a cgroup v2 directory survives.
//!
//! Since Linux 6.14, and stable releases of that time, a fork that meets a write to `cgroup.kill`
//! is killed as well. The kernel counts the kills of each cgroup and compares the count before the
//! fork with that after it. With `clone3` into a cgroup it compares the count of the *parent's*
//! cgroup with that of the child's. So a process that was started in a cgroup once killed as a
//! whole can have no children in a fresh one. Not here: ending trees (`leaf`, `ending`).

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::OFlags;
use rustix::process::Signal;

use crate::sys::{self, CellEntrance, ExecPlan};

use super::files::{CgroupFileError, make, open, write};

/// Directory of the first child, and of the keeper if that child dies. Both are below the keeper's
/// own directory.
pub const PROBE: &str = "probe";
const OWN: &str = "keeper";

/// Program of the first child. Any program works. Without one, nothing is learnt.
const PROGRAM: &std::ffi::CStr = c"/bin/true";

/// Starts a child in a fresh directory below `node`. If it is killed, the keeper moves to a fresh
/// directory itself: then the counts are the same. The next keeper removes that directory, with all
/// the others.
pub fn work_around_fork_kill(node: &Path) -> Result<(), CgroupFileError> {
    let probe = node.join(PROBE);
    make(&probe)?;
    let lives = lives(&probe);
    // The kernel may still be busy with the dead child. Then the directory goes with the keeper.
    let _ = rustix::fs::rmdir(&probe);
    if lives? {
        return Ok(());
    }
    tracing::info!("the keeper's cgroup was killed as a whole before; it moves to {}/{OWN}", node.display());
    make(&node.join(OWN))?;
    write(&node.join(OWN).join("cgroup.procs"), "0")
}

fn lives(dir: &Path) -> Result<bool, CgroupFileError> {
    let born = Some(Arc::new(open(dir, OFlags::RDONLY | OFlags::DIRECTORY)?));
    let nothing = open(Path::new("/dev/null"), OFlags::RDWR)?;
    let nothing = std::os::fd::AsFd::as_fd(&nothing);
    let child = sys::spawn(&ExecPlan {
        programs: &[PROGRAM.to_owned()],
        args: &[PROGRAM.to_owned()],
        env: &[],
        directory: c"/",
        identity: None,
        stdio: [nothing; 3],
        listener: None,
        entrance: CellEntrance { born, tasks: Vec::new() },
        namespaces: &[],
        open_files_max: 64,
        filter: &[],
    });
    let child = match child {
        Ok(child) => child,
        // Everything up to the program went well.
        Err(error) if error.step == sys::SpawnStep::Program => return Ok(true),
        Err(error) => return Err(CgroupFileError::new(dir, error.error)),
    };
    let ended = || -> io::Result<_> {
        poll(&mut [PollFd::new(&child.pidfd, PollFlags::IN)], None)?;
        sys::try_reap(std::os::fd::AsFd::as_fd(&child.pidfd))
    };
    let exit = ended().map_err(|error| CgroupFileError::new(dir, error))?;
    Ok(exit.is_none_or(|exit| exit.signal != Some(Signal::KILL.as_raw())))
}
