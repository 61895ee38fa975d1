//! Changed files of a file system: one fanotify group for all of it (fanotify(7)), read when
//! somebody asks.
//!
//! A change by a system call is in the group's queue before that call returns. So a reader that has
//! a program's message finds the changes that the program made before it. The queue has no bound of
//! its own; its memory is the node's. Stores to shared mappings and libaio are not seen at all.
//! Not here: reading the files.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::change_event::{ChangeEvents, EventError, FileHandle, NamedPlace, kinds};
use crate::file_handles::open_directory;

/// The group reports directory, name and file of each change (`FAN_REPORT_DFID_NAME_TARGET`,
/// Linux 5.17).
const REPORT: u32 = 0x200 | 0x400 | 0x800 | 0x1000;

/// Changes that are reported.
const REPORTED: u64 = kinds::MODIFIED
    | kinds::ATTRIBUTES
    | kinds::CLOSED_WRITTEN
    | kinds::CREATED
    | kinds::DELETED
    | kinds::RENAMED
    | kinds::OF_DIRECTORY;

/// Bytes of one read: some thousand events.
const READ_LEN: usize = 256 << 10;

#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    #[error("changes in {path} cannot be seen: {error}; that needs Linux 5.17 and CAP_SYS_ADMIN")]
    Open { path: PathBuf, error: io::Error },
    #[error("changes cannot be read: {0}")]
    Read(io::Error),
    #[error(transparent)]
    Event(#[from] EventError),
}

/// A change, with paths as they are now. The file may be gone again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PathChange {
    /// Content, attributes, or the entry itself have changed.
    At(PathBuf),
    /// The entry has another place, with everything beneath it.
    Renamed { from: PathBuf, to: PathBuf },
    /// The queue had no memory: anything may have changed.
    Unknown,
}

/// The group of one file system.
pub struct ChangeCapture {
    group: Fanotify,
    /// The root of what is watched.
    root: OwnedFd,
    path: PathBuf,
    buffer: Vec<u8>,
}

impl ChangeCapture {
    /// Begins to watch the file system that has this directory. Only paths beneath it are returned.
    /// Blocks.
    pub fn open(path: &Path) -> Result<Self, CaptureError> {
        let failed = |error: io::Error| CaptureError::Open { path: path.to_owned(), error };
        let path = path.canonicalize().map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let root = rustix::fs::open(&path, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
        let init = InitFlags::FAN_CLOEXEC | InitFlags::FAN_NONBLOCK | InitFlags::FAN_UNLIMITED_QUEUE;
        let init = init | InitFlags::from_bits_retain(REPORT);
        let group = Fanotify::init(init, EventFFlags::empty()).map_err(|errno| failed(errno.into()))?;
        let mask = MaskFlags::from_bits_retain(REPORTED);
        let mark = MarkFlags::FAN_MARK_ADD | MarkFlags::FAN_MARK_FILESYSTEM;
        group.mark(mark, mask, nix::fcntl::AT_FDCWD, Some(&path)).map_err(|errno| failed(errno.into()))?;
        Ok(Self { group, root, path, buffer: vec![0; READ_LEN] })
    }

    /// Returns every change since the last call. Does not wait. Nothing changed: one system call.
    pub fn drain(&mut self) -> Result<Vec<PathChange>, CaptureError> {
        let mut changes = Vec::new();
        let mut directory = KnownDirectory::default();
        loop {
            let len = match rustix::io::read(self.group.as_fd(), &mut self.buffer[..]) {
                Ok(0) | Err(Errno::AGAIN) => return Ok(changes),
                Err(Errno::INTR) => continue,
                read => read.map_err(|errno| CaptureError::Read(errno.into()))?,
            };
            for event in ChangeEvents::new(&self.buffer[..len]) {
                let event = event?;
                if event.kinds & kinds::OVERFLOW != 0 {
                    changes.push(PathChange::Unknown);
                    continue;
                }
                let place = self.path_of(&mut directory, event.place)?;
                let former = self.path_of(&mut directory, event.former)?;
                let change = match (former, place) {
                    (Some(from), Some(to)) => PathChange::Renamed { from, to },
                    (Some(path), None) | (None, Some(path)) => PathChange::At(path),
                    (None, None) => continue,
                };
                // A file that is written in pieces has many events.
                if changes.last() != Some(&change) {
                    changes.push(change);
                }
            }
        }
    }

    /// Returns the path of a place relative to the root. `None` if its directory is gone, which is
    /// a change of its own, or is elsewhere.
    fn path_of(
        &self,
        known: &mut KnownDirectory,
        place: Option<NamedPlace<'_>>,
    ) -> Result<Option<PathBuf>, CaptureError> {
        let Some(NamedPlace { directory, name }) = place else { return Ok(None) };
        if !known.is(directory) {
            let path = self.directory_path(directory).map_err(CaptureError::Read)?;
            *known = KnownDirectory { kind: directory.kind, bytes: directory.bytes.to_vec(), path };
        }
        let join = |path: &PathBuf| if name == OsStr::new(".") { path.clone() } else { path.join(name) };
        Ok(known.path.as_ref().map(join))
    }

    fn directory_path(&self, handle: FileHandle<'_>) -> io::Result<Option<PathBuf>> {
        let directory = match open_directory(self.root.as_fd(), handle) {
            Err(error) if error.raw_os_error() == Some(Errno::STALE.raw_os_error()) => return Ok(None),
            directory => directory?,
        };
        let path = rustix::fs::readlink(proc_link(&directory), Vec::new())?;
        // A directory that somebody still has open may have no place any more.
        let is_gone = rustix::fs::fstat(&directory)?.st_nlink == 0;
        let path = Path::new(OsStr::from_bytes(path.as_bytes()));
        Ok(path.strip_prefix(&self.path).ok().filter(|_| !is_gone).map(Path::to_owned))
    }
}

/// The directory of the last event: many events have the same.
#[derive(Default)]
struct KnownDirectory {
    kind: i32,
    bytes: Vec<u8>,
    path: Option<PathBuf>,
}

impl KnownDirectory {
    fn is(&self, handle: FileHandle<'_>) -> bool {
        !self.bytes.is_empty() && self.kind == handle.kind && self.bytes == handle.bytes
    }
}

fn proc_link(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}
