//! The files in a sandbox' `/dev/shm`, on their way into an image and back.
//!
//! They are memory that no image of processes contains. The sandbox' init writes them while all
//! processes are stopped (`checkpoint`). So they are of the same moment as the processes' memory.
//! The process that becomes CRIU makes them again in a fresh sandbox (`program`). So the sandbox'
//! cell is charged for them. Both run inside of the sandbox, with the rights of its root: no link
//! in it leads out. The file of an image with them:
//!
//! ```text
//! <bytes of the list, 8 of them, little-endian> <list> <parts of all files, one after the other>
//! ```
//!
//! Not here: making `/dev/shm` (`tree`), files of `/run` and `/tmp`, which are on disk
//! (`instances::run::volatile_files`), unlinked files, which CRIU carries.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, SeekFrom, Stat, Uid};
use rustix::io::Errno;

/// Name of the file in the directory of an image.
pub const FILE: &str = "dev-shm.img";

/// Maximum number of files, directories and links.
pub const ENTRIES_MAX: usize = 1000;

/// Maximum depth of nested directories.
pub const DEPTH_MAX: usize = 8;

/// Maximum length of the list, bytes. Longer ones only come from names and links of maximum length.
const LIST_LEN_MAX: usize = 8 << 20;

const TOP: &str = "/dev/shm";

const PERMISSIONS: u32 = 0o777;

#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct ShmEntry {
    /// Path from the top. The parent directory comes before the entry.
    path: Vec<u8>,
    what: ShmEntryKind,
}

#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum ShmEntryKind {
    Directory {
        mode: u32,
    },
    File {
        mode: u32,
        len: u64,
        /// Ranges with contents, from the first byte to the one behind the last. The rest is a
        /// hole.
        parts: Vec<(u64, u64)>,
    },
    Link {
        to: Vec<u8>,
    },
    /// One more name of a file that came before.
    Same {
        path: Vec<u8>,
    },
}

fn top() -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(CWD, TOP, flags, Mode::empty())?)
}

fn too_much() -> io::Error {
    Errno::FBIG.into()
}

fn invalid() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

// === Into an image ===

/// Writes all files of this device to a new file in the directory of an image. Without any, there
/// is no file: something else may be bound over the whole of it, or below it.
pub fn keep(image: &OwnedFd, device: u64) -> io::Result<()> {
    keep_beneath(&top()?, device, image)
}

fn keep_beneath(top: &OwnedFd, device: u64, image: &OwnedFd) -> io::Result<()> {
    // Left by a call that was not the end of the checkpoint after all.
    match rustix::fs::unlinkat(image, FILE, AtFlags::empty()) {
        Err(errno) if errno != Errno::NOENT => return Err(errno.into()),
        _ => {}
    }
    let entries = look(top, device)?;
    if entries.is_empty() {
        return Ok(());
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(image, FILE, flags, Mode::RUSR | Mode::WUSR)?;
    write(top, &entries, &mut File::from(file))
}

fn write(top: &OwnedFd, entries: &[ShmEntry], to: &mut File) -> io::Result<()> {
    let list = postcard::to_stdvec(entries).map_err(io::Error::other)?;
    if list.len() > LIST_LEN_MAX {
        return Err(too_much());
    }
    to.write_all(&(list.len() as u64).to_le_bytes())?;
    to.write_all(&list)?;
    for ShmEntry { path, what } in entries {
        let ShmEntryKind::File { parts, .. } = what else { continue };
        let (above, name) = above(top, path)?;
        let source = open(&above, name)?;
        for (start, end) in parts {
            rustix::fs::seek(&source, SeekFrom::Start(*start))?;
            pass_on(source.as_fd(), to.as_fd(), end - start)?;
        }
    }
    Ok(())
}

/// Returns everything below a directory that is of this device.
fn look(top: &OwnedFd, device: u64) -> io::Result<Vec<ShmEntry>> {
    let mut found = ShmScan { device, entries: Vec::new(), names: HashMap::new() };
    found.add_beneath(top, Path::new(""), DEPTH_MAX)?;
    Ok(found.entries)
}

struct ShmScan {
    device: u64,
    entries: Vec<ShmEntry>,
    /// The first names of files that have several, by their inode numbers.
    names: HashMap<u64, Vec<u8>>,
}

impl ShmScan {
    fn add_beneath(&mut self, dir: &OwnedFd, beneath: &Path, depth: usize) -> io::Result<()> {
        for entry in Dir::read_from(dir)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let stat = match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                // A command beside the application is not stopped.
                Err(Errno::NOENT) => continue,
                stat => stat?,
            };
            let path = beneath.join(name);
            let Some(what) = self.what(dir, &path, &stat)? else { continue };
            if self.entries.len() == ENTRIES_MAX {
                return Err(too_much());
            }
            let is_directory = matches!(what, ShmEntryKind::Directory { .. });
            self.entries.push(ShmEntry { path: path.as_os_str().as_bytes().to_vec(), what });
            if is_directory {
                let depth = depth.checked_sub(1).ok_or_else(too_much)?;
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let inner = rustix::fs::openat(dir, name, flags, Mode::empty())?;
                self.add_beneath(&inner, &path, depth)?;
            }
        }
        Ok(())
    }

    /// Returns `None` if it is bound there from elsewhere, or of another kind, such as a socket.
    fn what(&mut self, dir: &OwnedFd, path: &Path, stat: &Stat) -> io::Result<Option<ShmEntryKind>> {
        if stat.st_dev != self.device {
            return Ok(None);
        }
        let (mode, name) = (stat.st_mode & PERMISSIONS, path.file_name().unwrap_or_default());
        Ok(Some(match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => ShmEntryKind::Directory { mode },
            FileType::RegularFile => {
                if stat.st_nlink > 1 {
                    if let Some(path) = self.names.get(&stat.st_ino) {
                        return Ok(Some(ShmEntryKind::Same { path: path.clone() }));
                    }
                    self.names.insert(stat.st_ino, path.as_os_str().as_bytes().to_vec());
                }
                let len = u64::try_from(stat.st_size).unwrap_or(0);
                ShmEntryKind::File { mode, len, parts: parts(&open(dir, name)?, len)? }
            }
            FileType::Symlink => {
                ShmEntryKind::Link { to: rustix::fs::readlinkat(dir, name, Vec::new())?.into_bytes() }
            }
            _ => return Ok(None),
        }))
    }
}

/// Returns the ranges of a file with contents.
fn parts(file: &OwnedFd, len: u64) -> io::Result<Vec<(u64, u64)>> {
    let (mut parts, mut at) = (Vec::new(), 0);
    while at < len {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            // Only holes from here on.
            Err(Errno::NXIO) => break,
            start => start?,
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start))?.min(len);
        if start < end {
            parts.push((start, end));
        }
        at = end.max(start);
    }
    Ok(parts)
}

fn open(dir: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
    // The file may have become a pipe or a link by now.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, name, flags, Mode::empty())?)
}

/// Copies this many bytes, from both positions on.
fn pass_on(from: BorrowedFd<'_>, to: BorrowedFd<'_>, mut len: u64) -> io::Result<()> {
    while len > 0 {
        let most = usize::try_from(len).unwrap_or(usize::MAX);
        match rustix::fs::sendfile(to, from, None, most)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            passed => len -= passed as u64,
        }
    }
    Ok(())
}

// === And back ===

/// Makes everything in this file, for this user and group.
pub fn put_back(from: BorrowedFd<'_>, uid: u32, gid: u32) -> io::Result<()> {
    put_beneath(&top()?, from, uid, gid)
}

fn put_beneath(top: &OwnedFd, from: BorrowedFd<'_>, uid: u32, gid: u32) -> io::Result<()> {
    let mut file = File::from(from.try_clone_to_owned()?);
    let mut len = [0; 8];
    file.read_exact(&mut len)?;
    let len = usize::try_from(u64::from_le_bytes(len)).ok().filter(|len| *len <= LIST_LEN_MAX);
    let mut list = vec![0; len.ok_or_else(invalid)?];
    file.read_exact(&mut list)?;
    let entries = read_list(&list)?;
    entries.iter().try_for_each(|entry| make(entry, &file, top, (Uid::from_raw(uid), Gid::from_raw(gid))))
}

pub(crate) fn read_list(list: &[u8]) -> io::Result<Vec<ShmEntry>> {
    let entries: Vec<ShmEntry> = postcard::from_bytes(list).map_err(|_| invalid())?;
    if entries.len() > ENTRIES_MAX { Err(invalid()) } else { Ok(entries) }
}

/// Makes one entry. The contents of a file come next in `from`.
fn make(
    ShmEntry { path, what }: &ShmEntry,
    from: &File,
    top: &OwnedFd,
    (uid, gid): (Uid, Gid),
) -> io::Result<()> {
    let (dir, name) = above(top, path)?;
    let permissions = |mode: u32| Mode::from_raw_mode(mode & PERMISSIONS);
    match what {
        ShmEntryKind::Directory { mode } => {
            match rustix::fs::mkdirat(&dir, name, Mode::RWXU) {
                // Something is bound below it.
                Err(Errno::EXIST) => return Ok(()),
                made => made?,
            }
            rustix::fs::chmodat(&dir, name, permissions(*mode), AtFlags::empty())?;
        }
        ShmEntryKind::File { mode, len, parts } => {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let file = rustix::fs::openat(&dir, name, flags, Mode::RUSR | Mode::WUSR)?;
            rustix::fs::ftruncate(&file, *len)?;
            for (start, end) in parts {
                let part = end.checked_sub(*start).filter(|_| end <= len).ok_or_else(invalid)?;
                rustix::fs::seek(&file, SeekFrom::Start(*start))?;
                pass_on(from.as_fd(), file.as_fd(), part)?;
            }
            rustix::fs::fchmod(&file, permissions(*mode))?;
        }
        ShmEntryKind::Link { to } => rustix::fs::symlinkat(to.as_slice(), &dir, name)?,
        ShmEntryKind::Same { path } => {
            let (other, its_name) = above(top, path)?;
            return Ok(rustix::fs::linkat(other, its_name, dir, name, AtFlags::empty())?);
        }
    }
    Ok(rustix::fs::chownat(dir, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Returns the parent directory of a path's last name. It leads neither out of the top, nor through
/// a link.
fn above<'a>(top: &OwnedFd, path: &'a [u8]) -> io::Result<(OwnedFd, &'a OsStr)> {
    let path = Path::new(OsStr::from_bytes(path));
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else { return Err(invalid()) };
    let above = if above == Path::new("") { Path::new(".") } else { above };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok((rustix::fs::openat2(top, above, flags, Mode::empty(), resolve)?, name))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    struct World(tempfile::TempDir);

    impl World {
        /// Empty directories that files come from and go to, and one of an image.
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            for name in ["from", "to", "image"] {
                fs::create_dir(dir.path().join(name)).unwrap();
            }
            Self(dir)
        }

        fn at(&self, path: &str) -> std::path::PathBuf {
            self.0.path().join(path)
        }

        fn open(&self, path: &str) -> OwnedFd {
            File::open(self.at(path)).unwrap().into()
        }

        fn keep(&self) -> io::Result<()> {
            let top = self.open("from");
            keep_beneath(&top, rustix::fs::fstat(&top)?.st_dev, &self.open("image"))
        }

        fn put_back(&self) -> io::Result<()> {
            let image = File::open(self.at("image").join(FILE))?;
            let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
            put_beneath(&self.open("to"), image.as_fd(), uid.as_raw(), gid.as_raw())
        }

        fn write_image(&self, entries: &[ShmEntry], contents: &[u8]) {
            let list = postcard::to_stdvec(entries).unwrap();
            let bytes = [&(list.len() as u64).to_le_bytes()[..], &list, contents].concat();
            fs::write(self.at("image").join(FILE), bytes).unwrap();
        }
    }

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & PERMISSIONS
    }

    #[test]
    fn files_directories_links_and_holes_come_back() {
        let world = World::new();
        fs::create_dir_all(world.at("from/dir/deep")).unwrap();
        fs::write(world.at("from/dir/deep/file"), "deep").unwrap();
        fs::write(world.at("from/large"), vec![7; 100_000]).unwrap();
        fs::set_permissions(world.at("from/large"), fs::Permissions::from_mode(0o604)).unwrap();
        fs::hard_link(world.at("from/large"), world.at("from/dir/again")).unwrap();
        let holes = File::create(world.at("from/holes")).unwrap();
        holes.set_len(3 << 20).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&holes, b"x", 1 << 20).unwrap();
        symlink("dir/deep/file", world.at("from/link")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(world.at("from/sock")).unwrap();
        // A checkpoint may turn out to have ended later.
        world.keep().unwrap();
        world.keep().unwrap();
        world.put_back().unwrap();
        assert_eq!(fs::read_to_string(world.at("to/link")).unwrap(), "deep");
        assert_eq!(fs::read_link(world.at("to/link")).unwrap(), Path::new("dir/deep/file"));
        assert_eq!(fs::read(world.at("to/large")).unwrap(), vec![7; 100_000]);
        assert_eq!(mode(&world.at("to/large")), 0o604);
        let inode = |path: &str| fs::metadata(world.at(path)).unwrap().ino();
        assert_eq!(inode("to/large"), inode("to/dir/again"));
        let came = fs::read(world.at("to/holes")).unwrap();
        assert!(came == fs::read(world.at("from/holes")).unwrap() && came.len() == 3 << 20);
        let archive = fs::metadata(world.at("image").join(FILE)).unwrap();
        assert!(archive.len() < 1 << 20, "holes are not in it: {} bytes", archive.len());
        assert!(!world.at("to/sock").exists());
    }

    #[test]
    fn where_there_is_nothing_there_is_no_file() {
        let world = World::new();
        fs::write(world.at("from/x"), "x").unwrap();
        world.keep().unwrap();
        assert!(world.at("image").join(FILE).exists());
        keep_beneath(&world.open("from"), 0, &world.open("image")).unwrap();
        assert!(!world.at("image").join(FILE).exists(), "nothing of that device");
        fs::remove_file(world.at("from/x")).unwrap();
        world.keep().unwrap();
        assert!(!world.at("image").join(FILE).exists());
    }

    #[test]
    fn links_are_not_followed() {
        let world = World::new();
        fs::create_dir(world.at("outside")).unwrap();
        fs::write(world.at("outside/secret"), "a secret").unwrap();
        symlink(world.at("outside/secret"), world.at("from/file")).unwrap();
        symlink(world.at("outside"), world.at("from/dir")).unwrap();
        world.keep().unwrap();
        let archive = fs::read(world.at("image").join(FILE)).unwrap();
        assert!(!archive.windows(8).any(|bytes| bytes == b"a secret"));
        world.put_back().unwrap();
        assert_eq!(fs::read_link(world.at("to/dir")).unwrap(), world.at("outside"));
    }

    #[test]
    fn entry_that_leads_elsewhere_or_is_incomplete_is_refused() {
        let entry = |path: &str, what: ShmEntryKind| ShmEntry { path: path.into(), what };
        let file = || ShmEntryKind::File { mode: 0o600, len: 1, parts: vec![(0, 1)] };
        let parts = |parts: &[(u64, u64)]| ShmEntryKind::File { mode: 0o600, len: 8, parts: parts.to_vec() };
        let link = || ShmEntryKind::Link { to: b"../outside".to_vec() };
        let same = |path: &str| ShmEntryKind::Same { path: path.into() };
        for bad in [
            vec![entry("../x", file())],
            vec![entry("/tmp/x", file())],
            vec![entry("", file())],
            vec![entry("..", file())],
            vec![entry("a/x", file())],
            vec![entry("a", link()), entry("a/x", file())],
            vec![entry("a", link()), entry("a/x", ShmEntryKind::Directory { mode: 0o700 })],
            vec![entry("a", link()), entry("a/x", link())],
            vec![entry("a", link()), entry("x", same("a/secret"))],
            vec![entry("x", same("../outside/secret"))],
            vec![entry("x\0", file())],
            vec![entry("x", file()), entry("x", file())],
            vec![entry("x", parts(&[(4, 9)]))],
            vec![entry("x", parts(&[(4, 2)]))],
            vec![entry("x", parts(&[(0, 8)])), entry("y", file())],
            vec![entry("x", ShmEntryKind::Directory { mode: 0o700 }); ENTRIES_MAX + 1],
        ] {
            let world = World::new();
            fs::create_dir(world.at("outside")).unwrap();
            fs::write(world.at("outside/secret"), "a secret").unwrap();
            world.write_image(&bad, b"contents");
            assert!(world.put_back().is_err(), "{bad:?}");
            assert_eq!(fs::read_dir(world.at("outside")).unwrap().count(), 1, "{bad:?}");
            assert_eq!(fs::metadata(world.at("outside/secret")).unwrap().nlink(), 1, "{bad:?}");
            assert!(!world.at("x").exists(), "{bad:?}");
        }
        for bad in [&b"short"[..], &u64::MAX.to_le_bytes(), b"\x04\0\0\0\0\0\0\0nons"] {
            let world = World::new();
            fs::write(world.at("image").join(FILE), bad).unwrap();
            assert!(world.put_back().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn too_much_is_refused_and_a_full_disk_is_one() {
        let world = World::new();
        let deep: Vec<String> = (0..=DEPTH_MAX).map(|at| at.to_string()).collect();
        fs::create_dir_all(world.at("from").join(deep.join("/"))).unwrap();
        assert_eq!(world.keep().unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        fs::remove_dir_all(world.at("from/0")).unwrap();
        for at in 0..ENTRIES_MAX {
            fs::write(world.at("from").join(at.to_string()), "x").unwrap();
        }
        world.keep().unwrap();
        let top = world.open("from");
        let mut full = File::options().write(true).open("/dev/full").unwrap();
        let refused = write(&top, &look(&top, rustix::fs::fstat(&top).unwrap().st_dev).unwrap(), &mut full)
            .unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
        fs::write(world.at("from/more"), "x").unwrap();
        assert_eq!(world.keep().unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }
}
