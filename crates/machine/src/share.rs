//! The files of a guest: the sandbox's own, over the protocol of FUSE
//! (Documentation/filesystems/fuse.rst, `include/uapi/linux/fuse.h`). Debian's kernel for virtual
//! machines has no 9P, and FUSE needs no memory that is shared with the guest.
//!
//! Paths are looked up beneath the sandbox's root, and no link is followed: the guest follows links
//! itself. Its own directories (`OWN`) look empty. Invariant: a hostile guest reaches with it what
//! any program in the sandbox reaches, without `/proc`, `/dev` and `/run`. Not here: the way to the
//! guest (`pump`).

mod inodes;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow,
    WriteFlags,
};
use rustix::fs::{
    AtFlags, Gid, Mode, OFlags, RawMode, ResolveFlags, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid,
};

use inodes::{InodeTable, SharedNode};

/// Directories of the root that each guest has of its own.
pub const OWN: [&str; 4] = ["dev", "proc", "sys", "run"];

/// nagaya's own files in the sandbox. The guest makes, moves and removes none.
const KEPT: &str = "run/nagaya";

/// Time for which the guest may use what it knows of a file: of the tenant's, and of anybody
/// else's, such as programs of the base.
const OWN_KNOWN_FOR: Duration = Duration::from_secs(1);
const OTHERS_KNOWN_FOR: Duration = Duration::from_secs(60);

/// Maximum length of one read or write, bytes. It fits the socket's buffer.
pub const TRANSFER_LEN_MAX: u32 = 128 << 10;

/// Maximum number of open files and directories.
const HANDLES_MAX: usize = 16_384;

/// The guest keeps a file's contents when it opens it again, as long as its time and size are the
/// same.
const KEPT_CONTENTS: FopenFlags = FopenFlags::FOPEN_KEEP_CACHE;

const BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// Flags of an `open` in the guest that are passed on.
const OPEN_FLAGS: OFlags = OFlags::ACCMODE.union(OFlags::TRUNC).union(OFlags::EXCL).union(OFlags::SYNC);

/// The files beneath one directory.
pub struct SharedFiles {
    root: OwnedFd,
    inodes: Mutex<InodeTable>,
    handles: Mutex<HandleTable>,
}

#[derive(Default)]
struct HandleTable {
    next: u64,
    open: HashMap<u64, OpenHandle>,
}

#[derive(Clone)]
enum OpenHandle {
    File(Arc<File>, u64),
    Directory(Arc<[ListedEntry]>),
}

struct ListedEntry {
    inode: u64,
    kind: FileType,
    name: Vec<u8>,
}

/// A failed operation, for the guest.
type Failure = rustix::io::Errno;

impl SharedFiles {
    /// Shares everything beneath this directory.
    pub fn open(root: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(root, flags, Mode::empty())?;
        Ok(Self { root, inodes: Mutex::default(), handles: Mutex::default() })
    }

    fn inodes(&self) -> std::sync::MutexGuard<'_, InodeTable> {
        self.inodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handles(&self) -> std::sync::MutexGuard<'_, HandleTable> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // === Paths ===

    fn node(&self, inode: INodeNo) -> Result<SharedNode, Failure> {
        self.inodes().get(inode.0).ok_or(Failure::STALE)
    }

    /// Returns the path of a name in a directory. The guest's names are checked: the kernel of a
    /// guest may be hostile.
    fn child(&self, parent: INodeNo, name: &OsStr) -> Result<PathBuf, Failure> {
        let bytes = name.as_bytes();
        if bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.contains(&b'/') || bytes.contains(&0)
        {
            return Err(Failure::INVAL);
        }
        match self.node(parent)? {
            SharedNode::Path(path) => Ok(path.join(name)),
            SharedNode::Gone => Err(Failure::NOENT),
        }
    }

    /// As `child`, of something that is changed: not of a directory that the guest has of its own.
    fn changed_child(&self, parent: INodeNo, name: &OsStr) -> Result<PathBuf, Failure> {
        let path = self.child(parent, name)?;
        let is_kept = path.starts_with(KEPT);
        if is_kept || view_of(&path) != PathView::Shared { Err(Failure::PERM) } else { Ok(path) }
    }

    fn open_path(&self, path: &Path, flags: OFlags, mode: Mode) -> Result<OwnedFd, Failure> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        rustix::fs::openat2(&self.root, path, flags | OFlags::CLOEXEC, mode, BENEATH)
    }

    /// Opens the directory of a path, for operations on the name in it.
    fn open_parent<'p>(&self, path: &'p Path) -> Result<(OwnedFd, &'p OsStr), Failure> {
        let name = path.file_name().ok_or(Failure::INVAL)?;
        let parent = path.parent().unwrap_or(Path::new(""));
        Ok((self.open_path(parent, OFlags::PATH | OFlags::DIRECTORY, Mode::empty())?, name))
    }

    fn stat(&self, path: &Path) -> Result<Stat, Failure> {
        if path.as_os_str().is_empty() {
            return rustix::fs::fstat(&self.root);
        }
        let (directory, name) = self.open_parent(path)?;
        rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
    }

    // === Attributes ===

    fn attributes(&self, inode: INodeNo) -> Result<FileAttr, Failure> {
        match self.node(inode)? {
            SharedNode::Path(path) if view_of(&path) == PathView::Empty => Ok(empty_directory(inode)),
            SharedNode::Path(path) => self.stat(&path).map(|stat| attributes_of(inode, &stat)),
            SharedNode::Gone => {
                let file = self.handles().of_inode(inode.0).ok_or(Failure::NOENT)?;
                rustix::fs::fstat(&file).map(|stat| attributes_of(inode, &stat))
            }
        }
    }

    /// Looks a path up, and counts that for its inode.
    fn enter(&self, path: PathBuf) -> Result<FileAttr, Failure> {
        let stat = match view_of(&path) {
            PathView::Shared => self.stat(&path)?,
            PathView::Hidden => return Err(Failure::NOENT),
            PathView::Empty => {
                let inode = self.inodes().enter(path).ok_or(Failure::NFILE)?;
                return Ok(empty_directory(INodeNo(inode)));
            }
        };
        let inode = self.inodes().enter(path).ok_or(Failure::NFILE)?;
        Ok(attributes_of(INodeNo(inode), &stat))
    }

    fn change(&self, inode: INodeNo, change: &AttributeChange) -> Result<FileAttr, Failure> {
        let AttributeChange { mode, uid, gid, size, times, handle } = change;
        let path = match self.node(inode)? {
            SharedNode::Path(path) if view_of(&path) == PathView::Empty => return Err(Failure::PERM),
            SharedNode::Path(path) => Some(path),
            SharedNode::Gone => None,
        };
        let file = handle.and_then(|handle| self.handles().file(handle));
        if let Some(size) = size {
            match (&file, &path) {
                (Some(file), _) => rustix::fs::ftruncate(file, *size)?,
                (None, Some(path)) => {
                    rustix::fs::ftruncate(self.open_path(path, OFlags::WRONLY, Mode::empty())?, *size)?;
                }
                (None, None) => return Err(Failure::NOENT),
            }
        }
        let Some(path) = path else { return self.attributes(inode) };
        if let Some(mode) = mode {
            let opened = self.open_path(&path, OFlags::PATH, Mode::empty())?;
            // Linux has no `fchmod` for a descriptor of a place before 6.6.
            let link = format!("/proc/self/fd/{}", opened.as_raw_fd());
            rustix::fs::chmod(link, Mode::from_raw_mode(mode & 0o7777))?;
        }
        let (directory, name) = self.open_parent(&path)?;
        if uid.is_some() || gid.is_some() {
            let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
            rustix::fs::chownat(&directory, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        if let Some(times) = times {
            rustix::fs::utimensat(&directory, name, times, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        self.attributes(inode)
    }

    // === Open files ===

    fn open_file(&self, inode: INodeNo, flags: OFlags) -> Result<u64, Failure> {
        let SharedNode::Path(path) = self.node(inode)? else { return Err(Failure::NOENT) };
        let file = self.open_path(&path, flags & OPEN_FLAGS | OFlags::NONBLOCK, Mode::empty())?;
        self.handles().add(OpenHandle::File(Arc::new(file.into()), inode.0))
    }

    fn create_file(&self, path: PathBuf, flags: OFlags, mode: u32) -> Result<(FileAttr, u64), Failure> {
        let flags = flags & OPEN_FLAGS | OFlags::CREATE | OFlags::NONBLOCK;
        let file = self.open_path(&path, flags, Mode::from_raw_mode(mode & 0o7777))?;
        let attributes = self.enter(path)?;
        let handle = self.handles().add(OpenHandle::File(Arc::new(file.into()), attributes.ino.0))?;
        Ok((attributes, handle))
    }

    fn list(&self, inode: INodeNo) -> Result<u64, Failure> {
        let SharedNode::Path(path) = self.node(inode)? else { return Err(Failure::NOENT) };
        let mut entries = Vec::new();
        if view_of(&path) == PathView::Shared {
            let directory = self.open_path(&path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
            for entry in rustix::fs::Dir::read_from(directory)? {
                let entry = entry?;
                entries.push(ListedEntry {
                    inode: entry.ino(),
                    kind: kind_of_entry(entry.file_type()),
                    name: entry.file_name().to_bytes().to_vec(),
                });
            }
        }
        self.handles().add(OpenHandle::Directory(entries.into()))
    }
}

/// A change by `setattr`.
struct AttributeChange {
    mode: Option<u32>,
    uid: Option<u32>,
    gid: Option<u32>,
    size: Option<u64>,
    times: Option<Timestamps>,
    handle: Option<u64>,
}

impl HandleTable {
    fn add(&mut self, handle: OpenHandle) -> Result<u64, Failure> {
        if self.open.len() >= HANDLES_MAX {
            return Err(Failure::NFILE);
        }
        self.next += 1;
        self.open.insert(self.next, handle);
        Ok(self.next)
    }

    fn file(&self, handle: u64) -> Option<Arc<File>> {
        match self.open.get(&handle)? {
            OpenHandle::File(file, _) => Some(Arc::clone(file)),
            OpenHandle::Directory(_) => None,
        }
    }

    /// Returns a file of this inode that is open.
    fn of_inode(&self, inode: u64) -> Option<Arc<File>> {
        self.open.values().find_map(|handle| match handle {
            OpenHandle::File(file, of) if *of == inode => Some(Arc::clone(file)),
            _ => None,
        })
    }
}

/// How the guest sees a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PathView {
    Shared,
    /// A directory that the guest has of its own.
    Empty,
    Hidden,
}

/// Returns how the guest sees this path. Of its own directories only nagaya's files are the
/// sandbox's.
fn view_of(path: &Path) -> PathView {
    let mut parts = path.components().map(|part| part.as_os_str().as_bytes());
    let Some(first) = parts.next() else { return PathView::Shared };
    match (OWN.iter().any(|own| own.as_bytes() == first), parts.next()) {
        (true, None) => PathView::Empty,
        (true, Some(b"nagaya")) if first == b"run" => PathView::Shared,
        (true, Some(_)) => PathView::Hidden,
        (false, _) if first.first() == Some(&b'.') => PathView::Hidden,
        (false, _) => PathView::Shared,
    }
}

fn empty_directory(inode: INodeNo) -> FileAttr {
    FileAttr {
        ino: inode,
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: FileType::Directory,
        perm: 0o755,
        nlink: 2,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn attributes_of(inode: INodeNo, stat: &Stat) -> FileAttr {
    let time = |seconds: i64, nanos: u64| {
        let since = Duration::new(seconds.unsigned_abs(), u32::try_from(nanos).unwrap_or(0));
        if seconds >= 0 { UNIX_EPOCH + since } else { UNIX_EPOCH - since }
    };
    let nanos = |nanos: i64| u64::try_from(nanos).unwrap_or(0);
    FileAttr {
        ino: inode,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        blocks: u64::try_from(stat.st_blocks).unwrap_or(0),
        atime: time(stat.st_atime, nanos(stat.st_atime_nsec as i64)),
        mtime: time(stat.st_mtime, nanos(stat.st_mtime_nsec as i64)),
        ctime: time(stat.st_ctime, nanos(stat.st_ctime_nsec as i64)),
        crtime: UNIX_EPOCH,
        kind: kind_of_mode(stat.st_mode),
        perm: u16::try_from(stat.st_mode & 0o7777).unwrap_or(0),
        nlink: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: 0,
        blksize: u32::try_from(stat.st_blksize).unwrap_or(4096),
        flags: 0,
    }
}

fn kind_of_mode(mode: RawMode) -> FileType {
    kind_of_entry(rustix::fs::FileType::from_raw_mode(mode))
}

fn kind_of_entry(kind: rustix::fs::FileType) -> FileType {
    match kind {
        rustix::fs::FileType::Directory => FileType::Directory,
        rustix::fs::FileType::Symlink => FileType::Symlink,
        rustix::fs::FileType::Fifo => FileType::NamedPipe,
        rustix::fs::FileType::Socket => FileType::Socket,
        rustix::fs::FileType::CharacterDevice => FileType::CharDevice,
        rustix::fs::FileType::BlockDevice => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

fn timestamps(accessed: Option<TimeOrNow>, modified: Option<TimeOrNow>) -> Option<Timestamps> {
    if accessed.is_none() && modified.is_none() {
        return None;
    }
    let spec = |time: Option<TimeOrNow>| match time {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(TimeOrNow::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(TimeOrNow::SpecificTime(time)) => {
            let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
            Timespec {
                tv_sec: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: since.subsec_nanos().into(),
            }
        }
    };
    Some(Timestamps { last_access: spec(accessed), last_modification: spec(modified) })
}

fn known_for(attributes: &FileAttr) -> Duration {
    let is_own = attributes.uid == rustix::process::geteuid().as_raw();
    if is_own { OWN_KNOWN_FOR } else { OTHERS_KNOWN_FOR }
}

fn errno(failure: Failure) -> Errno {
    Errno::from_i32(failure.raw_os_error())
}

/// Replies with the value, or with the failure.
macro_rules! reply {
    ($reply:expr, $result:expr, |$value:pat_param| $use:expr) => {
        match $result {
            Ok($value) => $use,
            Err(failure) => $reply.error(errno(failure)),
        }
    };
}

/// Replies with an entry that was looked up or made.
fn reply_entry(reply: ReplyEntry, entered: Result<FileAttr, Failure>) {
    reply!(reply, entered, |attributes| reply.entry(&known_for(&attributes), &attributes, Generation(0)));
}

impl Filesystem for SharedFiles {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // The guest's kernel may have less.
        let _ = config.set_max_write(TRANSFER_LEN_MAX);
        let _ = config.set_max_readahead(TRANSFER_LEN_MAX);
        for flag in
            [InitFlags::FUSE_AUTO_INVAL_DATA, InitFlags::FUSE_CACHE_SYMLINKS, InitFlags::FUSE_PARALLEL_DIROPS]
        {
            let _ = config.add_capabilities(flag);
        }
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.child(parent, name).and_then(|path| self.enter(path));
        if found == Err(Failure::NOENT) {
            // The guest may know that for a while, too.
            return reply.entry(&OWN_KNOWN_FOR, &empty_directory(INodeNo(0)), Generation(0));
        }
        reply_entry(reply, found);
    }

    fn forget(&self, _: &Request, inode: INodeNo, count: u64) {
        self.inodes().forget(inode.0, count);
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply!(reply, self.attributes(inode), |attributes| reply.attr(&known_for(&attributes), &attributes));
    }

    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        accessed: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _: Option<SystemTime>,
        handle: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let times = timestamps(accessed, modified);
        let change = AttributeChange { mode, uid, gid, size, times, handle: handle.map(|handle| handle.0) };
        reply!(reply, self.change(inode, &change), |attributes| reply
            .attr(&known_for(&attributes), &attributes));
    }

    fn readlink(&self, _: &Request, inode: INodeNo, reply: ReplyData) {
        let read = || {
            let SharedNode::Path(path) = self.node(inode)? else { return Err(Failure::NOENT) };
            let (directory, name) = self.open_parent(&path)?;
            rustix::fs::readlinkat(directory, name, Vec::new())
        };
        reply!(reply, read(), |target| reply.data(target.as_bytes()));
    }

    fn mknod(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _: u32,
        reply: ReplyEntry,
    ) {
        let make = || {
            let path = self.changed_child(parent, name)?;
            let (directory, name) = self.open_parent(&path)?;
            let kind = rustix::fs::FileType::from_raw_mode(mode);
            // No devices.
            if !matches!(
                kind,
                rustix::fs::FileType::RegularFile | rustix::fs::FileType::Fifo | rustix::fs::FileType::Socket
            ) {
                return Err(Failure::PERM);
            }
            rustix::fs::mknodat(directory, name, kind, Mode::from_raw_mode(mode & 0o7777 & !umask), 0)?;
            self.enter(path)
        };
        reply_entry(reply, make());
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let make = || {
            let path = self.changed_child(parent, name)?;
            let (directory, name) = self.open_parent(&path)?;
            rustix::fs::mkdirat(directory, name, Mode::from_raw_mode(mode & 0o7777 & !umask))?;
            self.enter(path)
        };
        reply_entry(reply, make());
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        reply!(reply, self.remove(parent, name, AtFlags::empty()), |()| reply.ok());
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        reply!(reply, self.remove(parent, name, AtFlags::REMOVEDIR), |()| reply.ok());
    }

    fn symlink(&self, _: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let make = || {
            let path = self.changed_child(parent, name)?;
            let (directory, name) = self.open_parent(&path)?;
            rustix::fs::symlinkat(target, directory, name)?;
            self.enter(path)
        };
        reply_entry(reply, make());
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        to_parent: INodeNo,
        to_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let rename = || {
            let (from, to) = (self.changed_child(parent, name)?, self.changed_child(to_parent, to_name)?);
            let ((from_dir, from_name), (to_dir, to_name)) =
                (self.open_parent(&from)?, self.open_parent(&to)?);
            let flags = rustix::fs::RenameFlags::from_bits_retain(flags.bits());
            rustix::fs::renameat_with(from_dir, from_name, to_dir, to_name, flags)?;
            self.inodes().rename(&from, &to, flags.contains(rustix::fs::RenameFlags::EXCHANGE));
            Ok(())
        };
        reply!(reply, rename(), |()| reply.ok());
    }

    fn link(&self, _: &Request, inode: INodeNo, to_parent: INodeNo, to_name: &OsStr, reply: ReplyEntry) {
        let link = || {
            let SharedNode::Path(from) = self.node(inode)? else { return Err(Failure::NOENT) };
            let to = self.changed_child(to_parent, to_name)?;
            let ((from_dir, from_name), (to_dir, to_name)) =
                (self.open_parent(&from)?, self.open_parent(&to)?);
            rustix::fs::linkat(from_dir, from_name, to_dir, to_name, AtFlags::empty())?;
            self.enter(to)
        };
        reply_entry(reply, link());
    }

    fn open(&self, _: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let flags = OFlags::from_bits_retain(flags.0.cast_unsigned());
        let opened = self.open_file(inode, flags);
        reply!(reply, opened, |handle| reply.opened(FileHandle(handle), KEPT_CONTENTS));
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let flags = OFlags::from_bits_retain(flags.cast_unsigned());
        let made =
            self.changed_child(parent, name).and_then(|path| self.create_file(path, flags, mode & !umask));
        reply!(reply, made, |(attributes, handle)| {
            let known = known_for(&attributes);
            reply.created(&known, &attributes, Generation(0), FileHandle(handle), KEPT_CONTENTS);
        });
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(file) = self.handles().file(handle.0) else { return reply.error(errno(Failure::BADF)) };
        let mut bytes = vec![0; size.min(TRANSFER_LEN_MAX) as usize];
        let mut len = 0;
        while len < bytes.len() {
            match file.read_at(&mut bytes[len..], offset + len as u64) {
                Ok(0) => break,
                Ok(more) => len += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return reply.error(error.into()),
            }
        }
        reply.data(&bytes[..len]);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let Some(file) = self.handles().file(handle.0) else { return reply.error(errno(Failure::BADF)) };
        match file.write_all_at(data, offset) {
            Ok(()) => reply.written(u32::try_from(data.len()).unwrap_or(0)),
            Err(error) => reply.error(error.into()),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // Writes are done at once. The guest's kernel does not ask again.
        reply.error(errno(Failure::NOSYS));
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.handles().open.remove(&handle.0);
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, data_only: bool, reply: ReplyEmpty) {
        let Some(file) = self.handles().file(handle.0) else { return reply.error(errno(Failure::BADF)) };
        let synced = if data_only { file.sync_data() } else { file.sync_all() };
        match synced {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error.into()),
        }
    }

    fn opendir(&self, _: &Request, inode: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply!(reply, self.list(inode), |handle| reply.opened(FileHandle(handle), FopenFlags::empty()));
    }

    fn readdir(&self, _: &Request, _: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let Some(OpenHandle::Directory(entries)) = self.handles().open.get(&handle.0).cloned() else {
            return reply.error(errno(Failure::BADF));
        };
        let first = usize::try_from(offset).unwrap_or(usize::MAX);
        for (at, entry) in entries.iter().enumerate().skip(first) {
            let name = OsStr::from_bytes(&entry.name);
            if reply.add(INodeNo(entry.inode), at as u64 + 1, entry.kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.handles().open.remove(&handle.0);
        reply.ok();
    }

    fn statfs(&self, _: &Request, inode: INodeNo, reply: ReplyStatfs) {
        let stat = || {
            let SharedNode::Path(path) = self.node(inode)? else { return Err(Failure::NOENT) };
            rustix::fs::fstatvfs(self.open_path(&path, OFlags::PATH, Mode::empty())?)
        };
        reply!(reply, stat(), |stat| reply.statfs(
            stat.f_blocks,
            stat.f_bfree,
            stat.f_bavail,
            stat.f_files,
            stat.f_ffree,
            u32::try_from(stat.f_bsize).unwrap_or(4096),
            u32::try_from(stat.f_namemax).unwrap_or(255),
            u32::try_from(stat.f_frsize).unwrap_or(4096),
        ));
    }
}

impl SharedFiles {
    fn remove(&self, parent: INodeNo, name: &OsStr, flags: AtFlags) -> Result<(), Failure> {
        let path = self.changed_child(parent, name)?;
        let (directory, name) = self.open_parent(&path)?;
        rustix::fs::unlinkat(directory.as_fd(), name, flags)?;
        self.inodes().remove(&path);
        Ok(())
    }
}
