//! Opening what lies beneath a document root, and nothing else.
//!
//! The kernel does the confining: `openat2` with `RESOLVE_BENEATH` refuses every path, symbolic link and `..` that
//! leaves the root, however it is renamed meanwhile. Not here: what text may be looked up at all (`path`), what is
//! done with an open file (`load`).

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags};
use rustix::io::Errno;
use rustix::path::Arg;

use crate::refusal::Refusal;

/// `openat2` gives up with `EAGAIN` if a rename or mount anywhere raced with a `..` in a symbolic link. Trying
/// again is what openat2(2) advises; a tenant that renames in a loop gets a refusal, not this thread.
const OPEN_ATTEMPTS_MAX: usize = 8;

/// What only the node can be blamed for; any other failure to open a file may be a tenant's doing.
pub(super) const OUT_OF_DESCRIPTORS: Refusal = Refusal::Overloaded("too many open files");

/// Which file it is, and in which state. Any write, truncation, chmod or replacement changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    device: (u32, u32),
    /// Which mount it was found in. 0 where the kernel does not say (before 5.8).
    pub(super) mount: u64,
    pub(super) inode: u64,
    pub(super) size: u64,
    /// Seconds and nanoseconds.
    pub(super) mtime: (i64, u32),
    pub(super) ctime: (i64, u32),
}

impl From<&Statx> for Stamp {
    fn from(stat: &Statx) -> Self {
        Self {
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            mount: stat.stx_mnt_id,
            inode: stat.stx_ino,
            size: stat.stx_size,
            mtime: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec),
            ctime: (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec),
        }
    }
}

/// What a path turned out to be.
pub(super) enum Opened {
    File(OwnedFd, Stamp),
    Directory(OwnedFd),
    Missing,
}

/// Whether a look-up may wait for a disk or a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Only what the kernel has in memory. For edge threads.
    Cached,
    /// For threads of the blocking pool.
    Blocking,
}

/// Why a look-up did not succeed.
#[derive(Debug)]
pub(super) enum LookupError {
    /// It has to be done on another thread.
    WouldBlock,
    Refused(Refusal),
}

impl From<Refusal> for LookupError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<Errno> for LookupError {
    fn from(errno: Errno) -> Self {
        Self::Refused(refusal(errno))
    }
}

/// A document root, and how it may be looked into.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look<'a> {
    pub dir: BorrowedFd<'a>,
    pub access: Access,
}

/// Opens a regular file for reading, or a directory.
///
/// `O_NONBLOCK` because the type is only known afterwards: opening a FIFO for reading, or a file on which its owner
/// holds a lease, would otherwise block the thread and every connection on it.
pub(super) fn open(look: Look<'_>, path: impl Arg + Copy) -> Result<Opened, LookupError> {
    open_with(look, path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)
}

/// The same without opening it for reading, so it also finds programs that only their owner may read.
pub(super) fn find(look: Look<'_>, path: impl Arg + Copy) -> Result<Opened, LookupError> {
    open_with(look, path, OFlags::PATH)
}

fn open_with(look: Look<'_>, path: impl Arg + Copy, flags: OFlags) -> Result<Opened, LookupError> {
    let mut resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    if look.access == Access::Cached {
        // Another mount may be a network's, whose names are in memory and whose files are not.
        resolve |= ResolveFlags::CACHED | ResolveFlags::NO_XDEV;
    }
    let mut attempts = 0;
    let fd = loop {
        attempts += 1;
        match rustix::fs::openat2(look.dir, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
            Ok(fd) => break fd,
            // The last is said by kernels that do not know the flag (before 5.12).
            Err(Errno::AGAIN | Errno::XDEV | Errno::INVAL) if look.access == Access::Cached => {
                return Err(LookupError::WouldBlock);
            }
            Err(Errno::AGAIN | Errno::INTR) if attempts < OPEN_ATTEMPTS_MAX => {}
            Err(Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG) => return Ok(Opened::Missing),
            Err(errno) => return Err(errno.into()),
        }
    };
    let stat = rustix::fs::statx(&fd, c"", AtFlags::EMPTY_PATH, MASK)?;
    match file_type(&stat) {
        FileType::RegularFile => Ok(Opened::File(fd, Stamp::from(&stat))),
        FileType::Directory => Ok(Opened::Directory(fd)),
        _ => Err(Refusal::Forbidden("it is neither a file nor a directory").into()),
    }
}

/// What is at `path` now, in one system call. It follows symbolic links *without* staying beneath the root: see
/// `load::Entry::is_current` for why that is safe there, and use it for nothing else.
pub(super) fn stamp_anywhere(root: BorrowedFd<'_>, path: impl Arg) -> Option<Stamp> {
    let stat = rustix::fs::statx(root, path, AtFlags::NO_AUTOMOUNT, MASK).ok()?;
    (file_type(&stat) == FileType::RegularFile).then(|| Stamp::from(&stat))
}

pub(super) fn stamp_of(fd: &OwnedFd) -> Result<Stamp, LookupError> {
    Ok(Stamp::from(&rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, MASK)?))
}

const MASK: StatxFlags = StatxFlags::TYPE
    .union(StatxFlags::INO)
    .union(StatxFlags::MNT_ID)
    .union(StatxFlags::SIZE)
    .union(StatxFlags::MTIME)
    .union(StatxFlags::CTIME);

pub(super) fn file_type(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

/// What the client may know about a failed look-up.
pub(super) fn refusal(errno: Errno) -> Refusal {
    match errno {
        Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG => Refusal::NotFound,
        Errno::XDEV | Errno::LOOP => Refusal::Forbidden("it leads out of the document root"),
        // A Unix socket, or a device without a driver.
        Errno::NXIO | Errno::NODEV => Refusal::Forbidden("it is neither a file nor a directory"),
        Errno::ACCESS | Errno::PERM => Refusal::Forbidden("its permissions do not allow it"),
        Errno::MFILE | Errno::NFILE => OUT_OF_DESCRIPTORS,
        Errno::NOMEM | Errno::AGAIN | Errno::INTR => Refusal::Overloaded("a file cannot be opened just now"),
        other => Refusal::SiteBroken(format!("a file beneath the document root cannot be read: {other}")),
    }
}
