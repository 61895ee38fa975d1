//! The path from a tenant's home to a file: which names were looked up in which directories.
//!
//! It is for watching, not for opening. The parent module opens the file at the end. All of it
//! blocks.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use crate::paths::tenant_path::{LINKS_MAX, PATH, PathOwner, links, names, walk};

/// Maximum number of names that are followed. A longer path is not watched.
const STEPS_MAX: usize = 64;

/// Identity of a file, the same for everybody who opens it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    device: (u32, u32),
    inode: u64,
    /// When it was made, because inode numbers are reused. Zero where the file system does not
    /// know.
    made: (i64, u32),
}

impl FileId {
    /// Queries no file system that may hang.
    pub fn of(file: impl AsFd) -> io::Result<Self> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = rustix::fs::statx(file, c"", flags, StatxFlags::INO | StatxFlags::BTIME)?;
        Ok(Self {
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            made: (stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec),
        })
    }
}

/// A name on the path, and the directory it was looked up in.
#[derive(Debug)]
pub struct PathStep {
    /// Opened with `O_PATH`.
    pub directory: Rc<OwnedFd>,
    pub id: FileId,
    pub name: OsString,
}

/// All names that a tenant could replace.
#[derive(Debug)]
pub struct PathSteps {
    pub steps: Vec<PathStep>,
    /// The file at the end of the path.
    pub end: FileId,
}

impl PathOwner {
    /// Returns the steps to a path below the home. `Ok(None)`: the path is not below it, or is too
    /// long.
    pub fn trace(&self, path: &Path) -> io::Result<Option<PathSteps>> {
        let Some(home) = self.home.clone() else { return Ok(None) };
        let path = home.join(path);
        let Ok(beneath) = path.strip_prefix(&home) else { return Ok(None) };
        self.act(|| follow(&home, names(beneath).into()))
    }
}

fn follow(home: &Path, mut rest: Vec<OsString>) -> io::Result<Option<PathSteps>> {
    rest.reverse();
    // The directories of the present position, from the home down.
    let mut above = vec![Rc::new(walk(home, 0)?)];
    let mut steps = Vec::new();
    let mut links = 0;
    while let Some(name) = rest.pop() {
        let directory = Rc::clone(above.last().ok_or(Errno::XDEV)?);
        if name == ".." {
            above.pop();
            continue;
        }
        if steps.len() == STEPS_MAX {
            return Ok(None);
        }
        let found = rustix::fs::openat(&*directory, &name, PATH | OFlags::NOFOLLOW, Mode::empty())?;
        let id = FileId::of(&*directory)?;
        steps.push(PathStep { directory, id, name });
        if super::kind(&found)? != FileType::Symlink {
            above.push(Rc::new(found));
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(Errno::LOOP.into());
        }
        let to = rustix::fs::readlinkat(&found, "", Vec::new())?;
        let to = PathBuf::from(OsString::from_vec(to.into_bytes()));
        let to = if to.is_absolute() {
            above.truncate(1);
            links::beneath_home(home, &above[0], &to)?.ok_or(Errno::XDEV)?
        } else {
            to
        };
        rest.extend(names(&to).into_iter().rev());
    }
    let end = above.last().ok_or(Errno::XDEV)?;
    Ok(Some(PathSteps { end: FileId::of(&**end)?, steps }))
}
