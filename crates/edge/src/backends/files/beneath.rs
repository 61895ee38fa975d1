//! Opens files and directories below a document root, and nothing else.
//!
//! The kernel enforces the confinement. `openat2` with `RESOLVE_BENEATH` refuses every path,
//! symbolic link and `..` that leaves the root. Renames during the call do not change that. A
//! link out of the root leads to another base directory, which the keeper has opened. Not here:
//! which text may be looked up (`path`), the use of an open file (`load`), where links lead
//! (`links`).

use std::ffi::CStr;
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags};
use rustix::io::Errno;

use crate::backends::files::links::RootLink;
use crate::backends::files::root::OpenBase;
use crate::http::refusal::Refusal;

/// Maximum number of attempts to open a path. `openat2` fails with `EAGAIN` if a rename or mount
/// anywhere raced with a `..` in a symbolic link. openat2(2) advises to try again. A tenant that
/// renames in a loop gets a refusal, and does not occupy this thread.
const OPEN_ATTEMPTS_MAX: usize = 8;

/// The one failure that is certainly the node's fault. Any other failure to open a file may be a
/// tenant's doing.
pub(super) const OUT_OF_DESCRIPTORS: Refusal = Refusal::Overloaded("too many open files");

/// Identity and state of a file. Any write, truncation, chmod or replacement changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileVersion {
    device: (u32, u32),
    /// Id of the mount. 0 if the kernel does not report it (before 5.8).
    pub(super) mount: u64,
    pub(super) inode: u64,
    pub(super) size: u64,
    /// Seconds and nanoseconds.
    pub(super) mtime: (i64, u32),
    pub(super) ctime: (i64, u32),
}

impl From<&Statx> for FileVersion {
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

/// Result of opening a path.
pub(super) enum OpenedPath {
    File(OwnedFd, FileVersion),
    Directory(OwnedFd),
    Missing,
}

/// States whether a look-up may wait for a disk or a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LookupAccess {
    /// Uses only data that the kernel has in memory. For edge threads.
    Cached,
    /// For threads of the blocking pool.
    Blocking,
}

/// Reason why a look-up failed.
#[derive(Debug)]
pub(super) enum LookupError {
    /// It has to be done on another thread.
    WouldBlock,
    /// This path below the root is a link that leads out of it.
    LeadsOut(Box<str>),
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

/// A document root, and the way to look it up.
#[derive(Clone, Copy)]
pub(super) struct LookupBase<'a> {
    pub base: &'a OpenBase,
    pub access: LookupAccess,
    /// The known links out of the root.
    pub links: &'a [RootLink],
}

impl<'a> LookupBase<'a> {
    /// Returns the base directory of a path, and the rest of the path below it.
    fn place<'p>(self, path: &'p [u8]) -> Option<(&'a OpenBase, &'p [u8])> {
        match through(self.links, path) {
            Some((link, rest)) => Some((link.base.as_deref()?, rest)),
            None => Some((self.base, path)),
        }
    }

    /// Returns whether the path is a link out of the root to one file.
    pub fn is_linked_file(self, path: &[u8]) -> bool {
        self.place(path).is_some_and(|(base, _)| base.is_file())
    }
}

/// Returns the longest of these links on a path, and the rest of the path.
pub(super) fn through<'l, 'p>(links: &'l [RootLink], path: &'p [u8]) -> Option<(&'l RootLink, &'p [u8])> {
    let through = links.iter().filter_map(|link| Some((link, link.rest(path)?)));
    through.min_by_key(|(_, rest)| rest.len())
}

/// Opens a regular file for reading, or a directory.
///
/// It uses `O_NONBLOCK`, because the type is known only afterwards. Opening a FIFO for reading
/// would otherwise block the thread and all its connections. So would a file on which its owner
/// holds a lease.
pub(super) fn open(look: LookupBase<'_>, path: &[u8]) -> Result<OpenedPath, LookupError> {
    open_with(look, path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)
}

/// Opens a path without permission to read. So it also finds programs that only their owner may
/// read.
pub(super) fn find(look: LookupBase<'_>, path: &[u8]) -> Result<OpenedPath, LookupError> {
    open_with(look, path, OFlags::PATH)
}

fn open_with(look: LookupBase<'_>, path: &[u8], flags: OFlags) -> Result<OpenedPath, LookupError> {
    let Some((base, rest)) = look.place(path) else { return Ok(OpenedPath::Missing) };
    // The root itself is not remote here. A link may lead from a local root to a remote base.
    if look.access == LookupAccess::Cached && base.is_remote() {
        return Err(LookupError::WouldBlock);
    }
    let fd = match (base.is_file(), rest) {
        (false, []) => open_beneath(base, b".", flags, look.access),
        (false, rest) => open_beneath(base, rest, flags, look.access),
        (true, []) => rustix::io::fcntl_dupfd_cloexec(base.file(), 0),
        (true, _) => return Ok(OpenedPath::Missing),
    };
    let fd = match fd {
        Ok(fd) => fd,
        // Kernels that do not know the flag return the last one (before 5.12).
        Err(Errno::AGAIN | Errno::XDEV | Errno::INVAL) if look.access == LookupAccess::Cached => {
            return Err(LookupError::WouldBlock);
        }
        Err(Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG) => return Ok(OpenedPath::Missing),
        Err(Errno::XDEV) => return Err(find_way_out(base, path, rest)),
        Err(errno) => return Err(errno.into()),
    };
    let stat = rustix::fs::statx(&fd, c"", AtFlags::EMPTY_PATH, MASK)?;
    match file_type(&stat) {
        FileType::RegularFile => Ok(OpenedPath::File(fd, FileVersion::from(&stat))),
        FileType::Directory => Ok(OpenedPath::Directory(fd)),
        _ => Err(Refusal::Forbidden("it is neither a file nor a directory").into()),
    }
}

fn open_beneath(base: &OpenBase, path: &[u8], flags: OFlags, access: LookupAccess) -> Result<OwnedFd, Errno> {
    let mut resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    if access == LookupAccess::Cached {
        // Another mount may be a network's: its names are in memory, its files are not.
        resolve |= ResolveFlags::CACHED | ResolveFlags::NO_XDEV;
    }
    let mut attempts = 0;
    loop {
        attempts += 1;
        match rustix::fs::openat2(base.file(), path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
            Err(Errno::AGAIN) if access == LookupAccess::Cached => return Err(Errno::AGAIN),
            Err(Errno::AGAIN | Errno::INTR) if attempts < OPEN_ATTEMPTS_MAX => {}
            opened => return opened,
        }
    }
}

/// Finds the link in a path that leads out. It is the shortest part that cannot be opened for
/// that reason, as the kernel goes from name to name. `rest` is the end of `path` that was looked
/// up below `base`.
fn find_way_out(base: &OpenBase, path: &[u8], rest: &[u8]) -> LookupError {
    let ends: Vec<usize> = memchr::memchr_iter(b'/', rest).chain([rest.len()]).collect();
    let mut other = None;
    let number = ends.partition_point(|end| {
        match open_beneath(base, &rest[..*end], OFlags::PATH, LookupAccess::Blocking) {
            Err(Errno::XDEV) => false,
            Ok(_) => true,
            // The obstacle on the whole path has gone.
            Err(errno) => {
                other = Some(errno);
                true
            }
        }
    });
    let out = ends.get(number).map(|end| &path[..path.len() - rest.len() + end]);
    match (out.and_then(|out| std::str::from_utf8(out).ok()), other) {
        (Some(out), _) => LookupError::LeadsOut(out.into()),
        (None, other) => LookupError::Refused(refusal(other.unwrap_or(Errno::XDEV))),
    }
}

/// Returns the present version of `path`, in one system call. It follows symbolic links *without*
/// staying below the root. `load::Entry::is_current` explains why that is safe there. Use it for
/// nothing else.
pub(super) fn stamp_anywhere(base: &OpenBase, path: &CStr) -> Option<FileVersion> {
    // Only the target of a link is a file itself.
    let of_itself = if path.is_empty() { AtFlags::EMPTY_PATH } else { AtFlags::empty() };
    let stat = rustix::fs::statx(base.file(), path, AtFlags::NO_AUTOMOUNT | of_itself, MASK).ok()?;
    (file_type(&stat) == FileType::RegularFile).then(|| FileVersion::from(&stat))
}

pub(super) fn stamp_of(fd: &OwnedFd) -> Result<FileVersion, LookupError> {
    Ok(FileVersion::from(&rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, MASK)?))
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

/// Returns the refusal for a failed look-up.
pub(super) fn refusal(errno: Errno) -> Refusal {
    match errno {
        Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG => Refusal::NotFound,
        Errno::XDEV | Errno::LOOP => Refusal::Forbidden("it leads out of the document root"),
        // It is a Unix socket, or a device without a driver.
        Errno::NXIO | Errno::NODEV => Refusal::Forbidden("it is neither a file nor a directory"),
        Errno::ACCESS | Errno::PERM => Refusal::Forbidden("its permissions do not allow it"),
        Errno::MFILE | Errno::NFILE => OUT_OF_DESCRIPTORS,
        Errno::NOMEM | Errno::AGAIN | Errno::INTR => Refusal::Overloaded("a file cannot be opened just now"),
        other => Refusal::SiteBroken(format!("a file below the document root cannot be read: {other}")),
    }
}
