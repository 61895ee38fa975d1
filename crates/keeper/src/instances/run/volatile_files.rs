//! Files that an image expects as they were when it was taken, and that its application may have
//! removed since. They are in `/run`, such as pid files and sockets' directories, and in `/tmp`.
//!
//! They are the tenant's, so they are read and written with the tenant's rights alone. Its
//! processes may change them meanwhile. So each directory is opened from its parent without
//! following a link, and its entries are named from there. Not here: the image itself (`image`).

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use serde::{Deserialize, Serialize};

/// Maximum number of entries kept of one directory. Pid files need a thousandth of that.
const ENTRIES_MAX: usize = 1000;
const BYTES_MAX: u64 = 16 << 20;

/// Maximum depth of nested directories.
const DEPTH_MAX: usize = 8;

/// The part of the limits that may still be copied.
struct CopyBudget {
    entries: usize,
    bytes: u64,
}

/// Treatment of entries that exist already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IfPresent {
    /// Removes them first: the copy is all there is.
    Replace,
    /// Keeps them: they are newer.
    Keep,
}

/// Copies files, directories and links. Other kinds, such as sockets, are not copied.
pub fn copy(from: &Path, to: &Path, present: IfPresent) -> io::Result<()> {
    if present == IfPresent::Replace {
        empty(to)?;
    }
    let mut budget = CopyBudget { entries: ENTRIES_MAX, bytes: BYTES_MAX };
    copy_below(from, to, &mut budget, DEPTH_MAX)
}

/// Empties a directory that itself stays, if there is one.
pub fn empty(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return fs::DirBuilder::new().mode(0o700).create(dir);
        }
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => fs::remove_dir_all(entry.path())?,
            false => fs::remove_file(entry.path())?,
        }
    }
    Ok(())
}

fn copy_below(from: &Path, to: &Path, budget: &mut CopyBudget, depth: usize) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        let stat = match fs::symlink_metadata(&source) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            stat => stat?,
        };
        budget.entries = budget.entries.checked_sub(1).ok_or_else(|| too_much(from))?;
        let kind = stat.file_type();
        let made = if kind.is_dir() {
            if depth == 0 {
                return Err(too_much(from));
            }
            fs::DirBuilder::new().mode(stat.permissions().mode() & 0o777).create(&target)
        } else if kind.is_file() {
            budget.bytes = budget.bytes.checked_sub(stat.len()).ok_or_else(|| too_much(from))?;
            copy_file(&source, &target, stat.permissions().mode())
        } else if kind.is_symlink() {
            symlink(fs::read_link(&source)?, &target)
        } else {
            Ok(())
        };
        match made {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made?,
        }
        if kind.is_dir() {
            let source = open_inner(&source)?;
            match open_inner(&target) {
                Ok(target) => copy_below(&in_proc(&source), &in_proc(&target), budget, depth - 1)?,
                // Something else was there, and stays.
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

/// Opens a directory. A link in its place is an error.
fn open_inner(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(CWD, path, flags, Mode::empty())?)
}

/// Returns a path from which entries of an open directory are named. Nobody can put a link in its
/// place.
fn in_proc(dir: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", dir.as_raw_fd()).into()
}

/// Writes a new file in place of anything with its name.
pub fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // `create_new` ensures that no link is followed.
    File::options().write(true).create_new(true).mode(0o644).open(path)?.write_all(bytes)
}

fn copy_file(from: &Path, to: &Path, mode: u32) -> io::Result<()> {
    let flags = |flags: OFlags| flags.bits().cast_signed();
    // The file may be replaced by a pipe, and the open must not wait for one.
    let mut source =
        File::options().read(true).custom_flags(flags(OFlags::NOFOLLOW | OFlags::NONBLOCK)).open(from)?;
    let mut target = File::options().write(true).create_new(true).mode(0o600).open(to)?;
    // Reads no more than was counted, even if the file grows.
    io::copy(&mut io::Read::take(&mut source, BYTES_MAX), &mut target)?;
    target.set_permissions(fs::Permissions::from_mode(mode & 0o777))
}

// === To and from another node ===

/// One file, directory or link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VolatileEntry {
    /// Index of its directory.
    pub place: u8,
    /// Path below it. The parent directory comes before the entry.
    pub path: Vec<u8>,
    what: VolatileKind,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum VolatileKind {
    Directory { mode: u32 },
    File { mode: u32, bytes: Vec<u8> },
    Link { to: Vec<u8> },
}

/// Packs all entries of these directories. The same entries give the same bytes.
pub fn pack(dirs: &[&Path]) -> io::Result<Vec<u8>> {
    let mut entries = Vec::new();
    for (place, dir) in (0..).zip(dirs) {
        let mut budget = CopyBudget { entries: ENTRIES_MAX, bytes: BYTES_MAX };
        pack_below(dir, (place, Path::new("")), &mut entries, &mut budget, DEPTH_MAX)?;
    }
    postcard::to_stdvec(&entries).map_err(io::Error::other)
}

fn pack_below(
    dir: &Path,
    (place, beneath): (u8, &Path),
    entries: &mut Vec<VolatileEntry>,
    budget: &mut CopyBudget,
    depth: usize,
) -> io::Result<()> {
    let mut names = fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
    names.sort_unstable();
    for name in names {
        let (source, path) = (dir.join(&name), beneath.join(&name));
        let stat = fs::symlink_metadata(&source)?;
        budget.entries = budget.entries.checked_sub(1).ok_or_else(|| too_much(dir))?;
        let (kind, mode) = (stat.file_type(), stat.permissions().mode() & 0o777);
        let what = if kind.is_dir() {
            VolatileKind::Directory { mode }
        } else if kind.is_file() {
            budget.bytes = budget.bytes.checked_sub(stat.len()).ok_or_else(|| too_much(dir))?;
            let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
            let mut bytes = Vec::new();
            let file = File::options().read(true).custom_flags(flags).open(&source)?;
            file.take(stat.len()).read_to_end(&mut bytes)?;
            VolatileKind::File { mode, bytes }
        } else if kind.is_symlink() {
            VolatileKind::Link { to: fs::read_link(&source)?.into_os_string().into_vec() }
        } else {
            continue;
        };
        entries.push(VolatileEntry { place, path: path.clone().into_os_string().into_vec(), what });
        if kind.is_dir() {
            let depth = depth.checked_sub(1).ok_or_else(|| too_much(dir))?;
            pack_below(&in_proc(&open_inner(&source)?), (place, &path), entries, budget, depth)?;
        }
    }
    Ok(())
}

/// Replaces the contents of these directories by those that `pack` packed. The bytes may come from
/// anybody: any other format is `InvalidData`, and nothing is written outside of them.
pub fn unpack(packed: &[u8], dirs: &[&Path]) -> io::Result<()> {
    let entries = check(packed, dirs.len())?;
    for dir in dirs {
        empty(dir)?;
    }
    for VolatileEntry { place, path, what } in entries {
        let target = dirs[usize::from(place)].join(OsStr::from_bytes(&path));
        match what {
            // Its owner can write to it while it is filled.
            VolatileKind::Directory { mode } => {
                fs::DirBuilder::new().mode((mode & 0o777) | 0o700).create(&target)?;
            }
            VolatileKind::File { mode, bytes } => {
                let mut file = File::options().write(true).create_new(true).mode(0o600).open(&target)?;
                file.write_all(&bytes)?;
                file.set_permissions(fs::Permissions::from_mode(mode & 0o777))?;
            }
            VolatileKind::Link { to } => symlink(OsStr::from_bytes(&to), &target)?,
        }
    }
    Ok(())
}

pub(crate) fn check(packed: &[u8], places: usize) -> io::Result<Vec<VolatileEntry>> {
    let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
    let entries: Vec<VolatileEntry> =
        postcard::from_bytes(packed).map_err(|_| invalid("it does not decode"))?;
    if entries.len() > ENTRIES_MAX * places {
        return Err(invalid("it has too many files"));
    }
    let mut directories: HashSet<(u8, &Path)> = HashSet::new();
    let mut bytes_max = BYTES_MAX * places as u64;
    for VolatileEntry { place, path, what } in &entries {
        let path = Path::new(OsStr::from_bytes(path));
        let is_plain = path.components().all(|part| matches!(part, Component::Normal(_)))
            && !path.as_os_str().as_bytes().contains(&0);
        let Some(above) = path.parent().filter(|_| is_plain) else {
            return Err(invalid("it has a path that leads elsewhere"));
        };
        // Through no link, because its parents were made here.
        let is_in = above == Path::new("") || directories.contains(&(*place, above));
        if usize::from(*place) >= places || !is_in || path.components().count() > DEPTH_MAX + 1 {
            return Err(invalid("it has a file in no directory of its own"));
        }
        match what {
            VolatileKind::Directory { .. } => drop(directories.insert((*place, path))),
            VolatileKind::File { bytes, .. } => {
                bytes_max =
                    bytes_max.checked_sub(bytes.len() as u64).ok_or_else(|| invalid("it has too much"))?;
            }
            VolatileKind::Link { .. } => {}
        }
    }
    Ok(entries)
}

fn too_much(dir: &Path) -> io::Error {
    let why = format!(
        "{} has more than {ENTRIES_MAX} files or {} MiB, or directories deeper than {DEPTH_MAX}",
        dir.display(),
        BYTES_MAX >> 20
    );
    io::Error::new(io::ErrorKind::FileTooLarge, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("from/apache2/deep")).unwrap();
        fs::create_dir(dir.path().join("to")).unwrap();
        fs::write(dir.path().join("from/apache2/pid"), "10\n").unwrap();
        fs::set_permissions(dir.path().join("from/apache2/pid"), fs::Permissions::from_mode(0o640)).unwrap();
        symlink("apache2/pid", dir.path().join("from/link")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("from/sock")).unwrap();
        dir
    }

    #[test]
    fn files_directories_and_links_are_carried_and_sockets_are_not() {
        let dir = world();
        let at = |path: &str| dir.path().join(path);
        fs::write(at("to/old"), "x").unwrap();
        copy(&at("from"), &at("to"), IfPresent::Replace).unwrap();
        assert_eq!(fs::read_to_string(at("to/apache2/pid")).unwrap(), "10\n");
        assert_eq!(fs::metadata(at("to/apache2/pid")).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(fs::read_link(at("to/link")).unwrap(), Path::new("apache2/pid"));
        assert!(at("to/apache2/deep").is_dir() && !at("to/sock").exists() && !at("to/old").exists());
    }

    #[test]
    fn newer_file_stays_when_files_are_copied() {
        let dir = world();
        let at = |path: &str| dir.path().join(path);
        fs::create_dir(at("to/apache2")).unwrap();
        fs::write(at("to/apache2/pid"), "new").unwrap();
        fs::write(at("to/session"), "kept").unwrap();
        copy(&at("from"), &at("to"), IfPresent::Keep).unwrap();
        assert_eq!(fs::read_to_string(at("to/apache2/pid")).unwrap(), "new");
        assert_eq!(fs::read_to_string(at("to/session")).unwrap(), "kept");
        assert!(at("to/apache2/deep").is_dir());
    }

    #[test]
    fn packed_files_unpack_the_same_elsewhere() {
        let dir = world();
        let at = |path: &str| dir.path().join(path);
        fs::create_dir(at("other")).unwrap();
        fs::write(at("other/x"), "of the other").unwrap();
        fs::write(at("to/old"), "x").unwrap();
        let packed = pack(&[&at("from"), &at("other")]).unwrap();
        assert_eq!(packed, pack(&[&at("from"), &at("other")]).unwrap(), "the same bytes");
        unpack(&packed, &[&at("to"), &at("new")]).unwrap();
        assert_eq!(fs::read_to_string(at("to/apache2/pid")).unwrap(), "10\n");
        assert_eq!(fs::metadata(at("to/apache2/pid")).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(fs::read_link(at("to/link")).unwrap(), Path::new("apache2/pid"));
        assert!(at("to/apache2/deep").is_dir() && !at("to/sock").exists() && !at("to/old").exists());
        assert_eq!(fs::read_to_string(at("new/x")).unwrap(), "of the other");
    }

    #[test]
    fn entry_that_leads_elsewhere_is_refused_before_any_write() {
        let dir = world();
        let to = dir.path().join("to");
        fs::write(to.join("old"), "x").unwrap();
        let entry = |place, path: &str, what| VolatileEntry { place, path: path.into(), what };
        let file = || VolatileKind::File { mode: 0o600, bytes: b"x".to_vec() };
        let link = VolatileKind::Link { to: b"/etc".to_vec() };
        for bad in [
            vec![entry(0, "../x", file())],
            vec![entry(0, "/x", file())],
            vec![entry(0, "", file())],
            vec![entry(0, "a/x", file())],
            vec![entry(0, "a", link), entry(0, "a/passwd", file())],
            vec![entry(1, "x", file())],
            vec![entry(0, "a\0b", file())],
        ] {
            let refused = unpack(&postcard::to_stdvec(&bad).unwrap(), &[&to]).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData, "{bad:?}");
        }
        assert_eq!(unpack(b"nonsense", &[&to]).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(to.join("old").exists());
    }

    #[test]
    fn too_much_is_refused() {
        let dir = world();
        let file = File::create(dir.path().join("from/large")).unwrap();
        file.set_len(BYTES_MAX + 1).unwrap();
        let refused = copy(&dir.path().join("from"), &dir.path().join("to"), IfPresent::Replace);
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn no_link_leads_a_copy_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["from/dir/deep", "to", "outside"] {
            fs::create_dir_all(at(name)).unwrap();
        }
        fs::write(at("from/dir/deep/file"), "text").unwrap();
        fs::write(at("from/last"), "text").unwrap();
        fs::write(at("outside/file"), "of somebody else").unwrap();
        symlink(at("outside"), at("to/dir")).unwrap();
        copy(&at("from"), &at("to"), IfPresent::Keep).unwrap();
        assert_eq!(fs::read_link(at("to/dir")).unwrap(), at("outside"), "what is there stays");
        assert_eq!(fs::read_dir(at("outside")).unwrap().count(), 1, "nothing was written through the link");
        assert_eq!(fs::read_to_string(at("to/last")).unwrap(), "text", "the rest is copied");
        symlink(at("outside/file"), at("to/wake")).unwrap();
        replace_file(&at("to/wake"), b"new").unwrap();
        replace_file(&at("to/wake"), b"newer").unwrap();
        assert_eq!(fs::read_to_string(at("to/wake")).unwrap(), "newer");
        assert_eq!(fs::read_to_string(at("outside/file")).unwrap(), "of somebody else");
    }
}
