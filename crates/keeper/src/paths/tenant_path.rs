//! Opens paths that a tenant can change. It is the only place of the keeper that does.
//!
//! A path beneath the tenant's home never leaves it. Any other path follows a link only where
//! nobody but root could have put that link. No magic link of `/proc` is followed, no file system
//! of the kernel's own is opened, and the tenant itself must have the right on what was found. Each
//! path is opened without reading it (`O_PATH`), looked at, and only then opened for reading: a
//! pipe or a device in its place does nothing.
//!
//! All of it blocks: call it from `workers`. Invariant: no other file of the keeper opens a path
//! that a tenant can change with the node's `/proc` in reach; `tests/tests/tidy.rs` lists the files
//! that open paths at all, each with the reason. Not here: programs that are started by their path
//! (`sys`), which run in a process that is the tenant's already.

mod links;
mod steps;

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use nagaya_records::Tenant;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::sys::{AccessRight, UnixIdentity, as_tenant, check_access};

pub use self::steps::{FileId, PathStep, PathSteps};

const PATH: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// With `RESOLVE_NO_MAGICLINKS`, because links of `/proc` lead out of any directory.
const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);
const IN_ROOT: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);

/// Maximum number of tries of a look-up that a rename elsewhere disturbs (`EAGAIN` of openat2(2)).
const RESOLVE_TRIES: usize = 64;

/// Maximum number of links on the path to a file: the kernel's own limit (path_resolution(7)).
const LINKS_MAX: usize = 40;

/// Bit of a directory's mode: only its owner, and an entry's own, may rename or remove the entry
/// (`S_ISVTX`, inode(7)).
const STICKY: u32 = 0o1000;

/// File systems through which the kernel shows itself, by their magic numbers (statfs(2),
/// linux/magic.h).
const KERNEL_FILE_SYSTEMS: [(u64, &str); 21] = [
    (0x9fa0, "proc"),
    (0x6265_6572, "sysfs"),
    (0x0027_e0eb, "cgroup"),
    (0x6367_7270, "cgroup2"),
    (0x6462_6720, "debugfs"),
    (0x7472_6163, "tracefs"),
    (0x7363_6673, "securityfs"),
    (0x1cd1, "devpts"),
    (0xcafe_4a11, "bpf"),
    (0x6265_6570, "configfs"),
    (0xde5e_81e4, "efivarfs"),
    (0x6165_676c, "pstore"),
    (0xf97c_ff8c, "selinuxfs"),
    (0x4341_5d53, "smackfs"),
    (0x4249_4e4d, "binfmt_misc"),
    (0x6e73_6673, "nsfs"),
    (0x1980_0202, "mqueue"),
    (0x6573_5543, "fusectl"),
    (0x0765_5821, "resctrl"),
    (0xabba_1974, "xenfs"),
    (0x0904_1934, "anon_inode"),
];

/// The user for whom paths are opened: its rights, and its home.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PathOwner {
    /// `None` if the keeper is not root: all is done with its own rights then.
    identity: Option<UnixIdentity>,
    /// `None` if the tenant has no home, or the whole node as its home.
    home: Option<PathBuf>,
}

impl PathOwner {
    pub fn new(home: Option<&Path>, identity: Option<UnixIdentity>) -> Self {
        let home = home.filter(|home| home.parent().is_some()).map(Path::to_path_buf);
        Self { identity, home }
    }

    pub fn of(tenant: &Tenant, identity: Option<UnixIdentity>) -> Self {
        Self::new(tenant.home.as_deref(), identity)
    }

    /// Opens a directory (`O_PATH`) on which the tenant has this right. A relative path is below
    /// the home.
    pub fn open_directory(&self, path: &Path, right: AccessRight) -> io::Result<OwnedFd> {
        self.act(|| {
            let found = self.look_up(path)?;
            expect(&found, FileType::Directory)?;
            check_access(found.as_fd(), right)?;
            Ok(found)
        })
    }

    /// Opens a file for reading, which the tenant may read. A relative path is below the home.
    pub fn open_file(&self, path: &Path) -> io::Result<File> {
        self.act(|| open_for_reading(&self.look_up(path)?))
    }

    /// Opens a directory or a file (`O_PATH`) to be shown to the tenant elsewhere. Returns whether
    /// it is a directory.
    pub fn open_source(&self, path: &Path) -> io::Result<(OwnedFd, bool)> {
        self.act(|| {
            let found = self.look_up(path)?;
            match kind(&found)? {
                FileType::Directory => check_access(found.as_fd(), AccessRight::Search)?,
                FileType::RegularFile => check_access(found.as_fd(), AccessRight::Read)?,
                FileType::Socket => return Err(denied("it is a socket: name it in the record's databases")),
                _ => return Err(denied("it is neither a directory nor a file")),
            }
            let is_directory = kind(&found)? == FileType::Directory;
            Ok((found, is_directory))
        })
    }

    /// Opens a file for reading below a directory, which the tenant may read.
    pub fn open_file_beneath(&self, dir: &OwnedFd, path: &Path) -> io::Result<File> {
        self.act(|| open_for_reading(&look_up_beneath(dir, path)?))
    }

    /// Opens a program (`O_PATH`) below a directory, which the tenant may execute.
    pub fn open_program_beneath(&self, dir: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
        self.act(|| {
            let found = look_up_beneath(dir, path)?;
            expect(&found, FileType::RegularFile)?;
            check_access(found.as_fd(), AccessRight::Search)?;
            Ok(found)
        })
    }

    /// Opens a found file (`O_PATH`) for reading. It must be a file that this owner may read.
    pub fn open_found(&self, found: &OwnedFd) -> io::Result<File> {
        self.act(|| open_for_reading(found))
    }

    /// Reads the metadata of each path without following a final link. A relative path is below the
    /// home. Sorted paths cost least: their directory is looked up once. The outer error: the
    /// tenant's rights cannot be taken.
    pub fn stat_each(&self, paths: &[PathBuf]) -> io::Result<Vec<io::Result<Stat>>> {
        self.act(|| {
            let mut last: Option<(&Path, io::Result<OwnedFd>)> = None;
            let mut stats = Vec::with_capacity(paths.len());
            for path in paths {
                let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
                    stats.push(self.look_up(path).and_then(|found| Ok(rustix::fs::fstat(found)?)));
                    continue;
                };
                let dir = match last.take() {
                    Some((dir, found)) if dir == above => found,
                    _ => self.look_up(above),
                };
                stats.push(match &dir {
                    Ok(dir) => rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).map_err(Into::into),
                    Err(error) => Err(copy_error(error)),
                });
                last = Some((above, dir));
            }
            Ok(stats)
        })
    }

    /// Lists the names in a directory and the type of each, `max` at most.
    pub fn list_directory(&self, path: &Path, max: usize) -> io::Result<Vec<(OsString, FileType)>> {
        self.act(|| {
            let found = self.look_up(path)?;
            expect(&found, FileType::Directory)?;
            // The very directory that was checked. The path is the keeper's own.
            let path = format!("/proc/self/fd/{}", found.as_raw_fd());
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let dir = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
            let mut names = Vec::new();
            for entry in rustix::fs::Dir::read_from(dir)? {
                let entry = entry?;
                let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
                if name == "." || name == ".." {
                    continue;
                }
                if names.len() == max {
                    break;
                }
                names.push((name, entry.file_type()));
            }
            Ok(names)
        })
    }

    fn act<R>(&self, look: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
        as_tenant(self.identity, look)?
    }

    fn look_up(&self, path: &Path) -> io::Result<OwnedFd> {
        // Without root all of the node is one user's, whose own links count as root's.
        let trusted = if self.identity.is_none() { geteuid().as_raw() } else { 0 };
        self.look_up_trusting(path, trusted)
    }

    fn look_up_trusting(&self, path: &Path, trusted: u32) -> io::Result<OwnedFd> {
        let path = self.home.as_deref().unwrap_or(Path::new("/")).join(path);
        let beneath = self.home.as_ref().and_then(|home| Some((home, path.strip_prefix(home).ok()?)));
        match beneath {
            Some((home, rest)) => match look_up_beneath(&walk(home, trusted)?, rest) {
                // An absolute link counts if it leads into the home.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::XDEV) => {
                    links::look_up_in_home(home, trusted, rest)
                }
                found => found,
            },
            None => walk(&path, trusted),
        }
    }
}

/// Opens the Unix socket (`O_PATH`) of a tenant's own server, with the present rights of this
/// thread. `trusted`: links of this user count as root's do.
pub fn open_server_socket(home: Option<&Path>, path: &Path, trusted: u32) -> io::Result<OwnedFd> {
    expect_socket(PathOwner::new(home, None).look_up_trusting(path, trusted)?)
}

/// Opens a Unix socket (`O_PATH`) that an operator has named, with the present rights of this
/// thread.
pub fn open_socket(path: &Path) -> io::Result<OwnedFd> {
    expect_socket(walk(path, 0)?)
}

fn expect_socket(found: OwnedFd) -> io::Result<OwnedFd> {
    match kind(&found)? {
        FileType::Socket => Ok(found),
        _ => Err(io::Error::other("it is no socket")),
    }
}

/// Opens a file for reading below a directory, with the present rights of this thread.
pub fn open_file_beneath(dir: &OwnedFd, path: &Path) -> io::Result<File> {
    open_for_reading(&look_up_beneath(dir, path)?)
}

/// Reads the metadata of a file in a tree as if the tree were the whole file system. Its links lead
/// to nothing else.
pub fn stat_in_tree(tree: &OwnedFd, path: &Path) -> io::Result<Stat> {
    Ok(rustix::fs::fstat(resolve(tree, path, IN_ROOT)?)?)
}

/// Opens an entry of a tree (`O_PATH`) as if the tree were the whole file system.
pub fn open_in_tree(tree: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    resolve(tree, path, IN_ROOT)
}

fn copy_error(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(number) => io::Error::from_raw_os_error(number),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

fn look_up_beneath(dir: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    // An empty path is the directory itself, which `openat2` requires to be called `.`.
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let found = resolve(dir, path, BENEATH)?;
    refuse_kernel_files(&found, &rustix::fs::fstat(&found)?)?;
    Ok(found)
}

fn resolve(dir: &OwnedFd, path: &Path, how: ResolveFlags) -> io::Result<OwnedFd> {
    for _ in 1..RESOLVE_TRIES {
        match rustix::fs::openat2(dir, path, PATH, Mode::empty(), how) {
            Err(Errno::AGAIN) => {}
            opened => return Ok(opened?),
        }
    }
    Ok(rustix::fs::openat2(dir, path, PATH, Mode::empty(), how)?)
}

/// Opens an absolute path name by name. A link counts only where nobody but root, or this user, can
/// put one, for example `/var/run`. By a link of its own a tenant would choose the file that is
/// opened for it.
fn walk(path: &Path, trusted: u32) -> io::Result<OwnedFd> {
    let flags = PATH | OFlags::NOFOLLOW;
    let root = || -> io::Result<_> {
        let root = rustix::fs::openat(CWD, "/", flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&root)?;
        Ok((root, stat))
    };
    let (mut at, mut stat) = root()?;
    // Whether nobody else could have put the earlier entries here.
    let mut is_fixed = true;
    let mut rest = names(path);
    let mut links = 0;
    while let Some(name) = rest.pop_front() {
        let found = open_name(&at, &name)?;
        let found_stat = rustix::fs::fstat(&found)?;
        if found_stat.st_dev != stat.st_dev {
            refuse_kernel_files(&found, &found_stat)?;
        }
        is_fixed &= is_fixed_entry(&stat, &found_stat, trusted);
        if FileType::from_raw_mode(found_stat.st_mode) != FileType::Symlink {
            (at, stat) = (found, found_stat);
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(Errno::LOOP.into());
        }
        if !is_fixed {
            let why =
                format!("{} leads through a link that is not root's: name where it leads", path.display());
            return Err(denied(&why));
        }
        let to = rustix::fs::readlinkat(&found, "", Vec::new())?;
        let to = PathBuf::from(OsString::from_vec(to.into_bytes()));
        if to.is_absolute() {
            (at, stat) = root()?;
        }
        rest = names(&to).into_iter().chain(rest).collect();
    }
    Ok(at)
}

/// Opens an entry of a directory (`O_PATH`), a link as itself.
fn open_name(directory: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(directory, name, PATH | OFlags::NOFOLLOW, Mode::empty())?)
}

/// Splits a path into its parts, `..` among them.
fn names(path: &Path) -> VecDeque<OsString> {
    let named = path.components().filter(|part| !matches!(part, Component::RootDir | Component::CurDir));
    named.map(|part| part.as_os_str().to_owned()).collect()
}

/// Whether nobody but root, or this user, can replace this entry of a directory.
fn is_fixed_entry(directory: &Stat, entry: &Stat, trusted: u32) -> bool {
    let is_ours = |stat: &Stat| stat.st_uid == 0 || stat.st_uid == trusted;
    let is_closed = directory.st_mode & (Mode::WGRP | Mode::WOTH).as_raw_mode() == 0;
    let is_sticky = directory.st_mode & STICKY != 0;
    is_ours(directory) && (is_closed || (is_sticky && is_ours(entry)))
}

/// Refuses files of the kernel itself and its devices.
fn refuse_kernel_files(found: &OwnedFd, stat: &Stat) -> io::Result<()> {
    // It has 32 bits, of which the kernel's type may take the first for a sign.
    let magic = rustix::fs::fstatfs(found)?.f_type.cast_unsigned() & 0xffff_ffff;
    if let Some((_, name)) = KERNEL_FILE_SYSTEMS.iter().find(|(number, _)| *number == magic) {
        return Err(denied(&format!("it is in a file system of the kernel's ({name})")));
    }
    // The file system of the node's devices looks like any file system in memory.
    let device_of = |path: &str| rustix::fs::stat(path).map(|stat| stat.st_dev);
    match (device_of("/dev"), device_of("/")) {
        (Ok(devices), Ok(root)) if devices == stat.st_dev && devices != root => {
            Err(denied("it is among the node's devices"))
        }
        _ => Ok(()),
    }
}

/// Whether the found file is a directory.
pub fn is_directory(found: &OwnedFd) -> io::Result<bool> {
    Ok(kind(found)? == FileType::Directory)
}

/// Returns the present path of an open file.
pub fn real_path(found: impl AsFd) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", found.as_fd().as_raw_fd()))
}

fn open_for_reading(found: &OwnedFd) -> io::Result<File> {
    expect(found, FileType::RegularFile)?;
    // The very file that was checked. The path is the keeper's own.
    let path = format!("/proc/self/fd/{}", found.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(CWD, path, flags, Mode::empty())?.into())
}

fn kind(found: &OwnedFd) -> io::Result<FileType> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(found)?.st_mode))
}

fn expect(found: &OwnedFd, wanted: FileType) -> io::Result<()> {
    match (kind(found)?, wanted) {
        (kind, wanted) if kind == wanted => Ok(()),
        (_, FileType::Directory) => Err(Errno::NOTDIR.into()),
        _ => Err(denied("it is not a regular file")),
    }
}

fn denied(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

#[cfg(test)]
#[path = "tenant_path/tests.rs"]
mod tests;
