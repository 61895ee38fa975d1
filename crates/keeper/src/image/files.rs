//! The files of one image: closed to all but root, counted, and checked as often as it takes.
//!
//! What CRIU wrote is taken over by root, and readable for the one group that the sandbox' root is in: CRIU reads them
//! with no more rights than that. The directory above lets only root in. Each file is read and compared once after the
//! keeper's start; from then on it is enough that the file system says nothing has changed it. Not here: where images
//! are (`store`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use nagaya_cmdb::record::ImageMemory;
use rustix::fs::{CWD, Mode, OFlags};

use super::file_list::FileList;
use super::header::{Content, FILES_MAX, NAME};
use super::mapped::{self, Mapped};
use super::shared::{self, Shared};
use super::store::Room;
use super::{Digest, ImageError, at, holes, memory};

/// What changes with every write to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// Marks of all files of an image, from when their contents were compared.
pub type Marks = BTreeMap<String, Mark>;

/// `how`: for reading, or for writing too.
pub fn open(dir: &Path, name: &str, how: OFlags) -> io::Result<File> {
    // Not blocking and following nothing: it may have been put there by whoever broke out of CRIU.
    let flags = how | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::openat(CWD, dir.join(name), flags, Mode::empty())?))
}

/// All of a file. None: it is longer than that.
pub fn read(dir: &Path, name: &str, len_max: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    open(dir, name, OFlags::RDONLY)?.take(len_max + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= len_max).then_some(bytes))
}

/// Writes a file anew.
pub fn rewrite(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    open(dir, name, OFlags::WRONLY | OFlags::TRUNC)?.write_all(bytes)
}

/// Writes a file of the keeper's own to an image that has been taken over.
pub fn add(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<Content> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(CWD, dir.join(name), flags, Mode::from_raw_mode(0o600))?);
    file.write_all(bytes)?;
    Ok(Content { bytes: bytes.len() as u64, digest: Digest::of_file(&open(dir, name, OFlags::RDONLY)?)? })
}

/// What of an image's memory is not filled by CRIU.
pub struct SetApart {
    pub mapped: Mapped,
    pub shared: Vec<Shared>,
}

/// Takes over what CRIU has written to a directory that was its own: nobody can write it any more, and `group` can read
/// it. What can be left out of it is, and what need not be filled is set apart. One that would bring memory back wrongly is refused.
pub fn take_over(
    dir: &Path,
    group: u32,
    room: Room,
    memory: ImageMemory,
) -> Result<(BTreeMap<String, Content>, SetApart), ImageError> {
    let mut names = close(dir, group)?;
    memory::check(dir, names.iter())?;
    holes::leave_out(dir, names.iter())?;
    let apart = set_apart(dir, &mut names, group, memory).map_err(at("set memory apart in", dir))?;
    let (mut files, mut total) = (BTreeMap::new(), 0);
    for name in names {
        let path = dir.join(&name);
        let file = open(dir, &name, OFlags::RDONLY).map_err(at("open", &path))?;
        let bytes = file.metadata().map_err(at("look at", &path))?.len();
        total += bytes;
        room.holds(total)?;
        let digest = Digest::of_file(&file).map_err(at("read", &path))?;
        files.insert(name, Content { bytes, digest });
    }
    Ok((files, apart))
}

/// Writes an image's files anew so that CRIU has less to fill.
pub fn set_apart(
    dir: &Path,
    names: &mut BTreeSet<String>,
    group: u32,
    memory: ImageMemory,
) -> io::Result<SetApart> {
    let (mut mapped, mut shared) = (Mapped::default(), Vec::new());
    if let Some(mut list) = FileList::read(dir, names)? {
        if memory != ImageMemory::Copied {
            mapped = mapped::set_apart(dir, names, &mut list, group, memory)?;
        }
        shared = shared::set_apart(dir, names, &mut list)?;
        list.write(dir)?;
    }
    Ok(SetApart { mapped, shared })
}

/// The names of all files in the directory, which are root's from here on.
fn close(dir: &Path, group: u32) -> Result<BTreeSet<String>, ImageError> {
    let io = |error| at("take over", dir)(error);
    // First the directory: from here on nothing comes to it.
    let handle = File::open(dir).map_err(io)?;
    fchown(&handle, Some(0), Some(group)).map_err(io)?;
    handle.set_permissions(fs::Permissions::from_mode(0o750)).map_err(io)?;
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(dir).map_err(io)? {
        let entry = entry.map_err(io)?;
        let (name, path) = (entry.file_name().to_string_lossy().into_owned(), entry.path());
        let file = open(dir, &name, OFlags::RDONLY).map_err(at("open", &path))?;
        let stat = file.metadata().map_err(at("look at", &path))?;
        if !stat.is_file() || stat.nlink() != 1 || names.len() >= FILES_MAX || name == NAME {
            return Err(ImageError::Unfit { reason: format!("CRIU left {name}, which no image has") });
        }
        fchown(&file, Some(0), Some(group)).map_err(at("take over", &path))?;
        file.set_permissions(fs::Permissions::from_mode(0o640)).map_err(at("take over", &path))?;
        names.insert(name);
    }
    Ok(names)
}

/// Marks of the files as they are. The error is in words: what is wrong with them.
pub fn marks(dir: &Path, files: &BTreeMap<String, Content>) -> Result<Marks, String> {
    let mark = |(name, content): (&String, &Content)| {
        let stat = fs::symlink_metadata(dir.join(name)).map_err(|error| format!("{name}: {error}"))?;
        if !stat.is_file() || stat.uid() != 0 || stat.mode() & 0o027 != 0 {
            return Err(format!("{name} is not closed to all but root"));
        }
        if stat.len() != content.bytes {
            return Err(format!("{name} has {} bytes instead of {}", stat.len(), content.bytes));
        }
        let mark = Mark {
            inode: stat.ino(),
            bytes: stat.len(),
            modified: (stat.mtime(), stat.mtime_nsec()),
            changed: (stat.ctime(), stat.ctime_nsec()),
        };
        Ok((name.clone(), mark))
    };
    files.iter().map(mark).collect()
}

fn digest(dir: &Path, name: &str) -> io::Result<Digest> {
    Digest::of_file(&open(dir, name, OFlags::RDONLY)?)
}

/// Compares all contents. The error is in words.
pub fn compare(dir: &Path, files: &BTreeMap<String, Content>) -> Result<(), String> {
    for (name, content) in files {
        let digest = digest(dir, name).map_err(|error| format!("{name}: {error}"))?;
        if digest != content.digest {
            return Err(format!("the content of {name} was changed"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> (tempfile::TempDir, BTreeMap<String, Content>) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("pages-1.img"), "contents").unwrap();
        fs::set_permissions(dir.path().join("pages-1.img"), fs::Permissions::from_mode(0o640)).unwrap();
        let content = Content { bytes: 8, digest: digest(dir.path(), "pages-1.img").unwrap() };
        let files = BTreeMap::from([("pages-1.img".to_owned(), content)]);
        (dir, files)
    }

    #[test]
    fn contents_are_compared() {
        let (dir, files) = image();
        assert_eq!(compare(dir.path(), &files), Ok(()));
        fs::write(dir.path().join("pages-1.img"), "Contents").unwrap();
        assert!(compare(dir.path(), &files).unwrap_err().contains("pages-1.img was changed"));
        fs::remove_file(dir.path().join("pages-1.img")).unwrap();
        assert!(compare(dir.path(), &files).is_err());
    }

    #[test]
    fn a_link_in_place_of_a_file_is_no_file() {
        let (dir, files) = image();
        fs::rename(dir.path().join("pages-1.img"), dir.path().join("moved")).unwrap();
        std::os::unix::fs::symlink("moved", dir.path().join("pages-1.img")).unwrap();
        assert!(compare(dir.path(), &files).is_err());
        assert!(marks(dir.path(), &files).is_err());
    }
}
