//! Files an image expects where it was taken, and which its application may have removed since: those in `/run`, such as
//! pid files and sockets' directories, and those in `/tmp`.
//!
//! They are the tenant's, so they are read and written with the tenant's rights alone: no link it may put there leads
//! further than it could go by itself. Not here: the image itself (`image`).

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::OFlags;

/// Of one directory so much is kept; what pid files need is a thousandth.
const ENTRIES_MAX: usize = 1000;
const BYTES_MAX: u64 = 16 << 20;

/// Directories in each other.
const DEPTH_MAX: usize = 8;

/// What may still be copied.
struct Budget {
    entries: usize,
    bytes: u64,
}

/// What is done with what is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Present {
    /// It goes first: the copy is all there is.
    Replace,
    /// It stays: it is newer.
    Keep,
}

/// Copies files, directories and links. What is of another kind, such as a socket, is not carried.
pub fn copy(from: &Path, to: &Path, present: Present) -> io::Result<()> {
    if present == Present::Replace {
        empty(to)?;
    }
    let mut budget = Budget { entries: ENTRIES_MAX, bytes: BYTES_MAX };
    copy_below(from, to, &mut budget, DEPTH_MAX)
}

/// Removes what is in a directory that itself stays, if there is one.
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

fn copy_below(from: &Path, to: &Path, budget: &mut Budget, depth: usize) -> io::Result<()> {
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
            copy_below(&source, &target, budget, depth - 1)?;
        }
    }
    Ok(())
}

fn copy_file(from: &Path, to: &Path, mode: u32) -> io::Result<()> {
    let flags = |flags: OFlags| flags.bits().cast_signed();
    // What is a file now may be a pipe in a moment; nobody waits for one.
    let mut source =
        File::options().read(true).custom_flags(flags(OFlags::NOFOLLOW | OFlags::NONBLOCK)).open(from)?;
    let mut target = File::options().write(true).create_new(true).mode(0o600).open(to)?;
    // No more than was counted, should it grow.
    io::copy(&mut io::Read::take(&mut source, BYTES_MAX), &mut target)?;
    target.set_permissions(fs::Permissions::from_mode(mode & 0o777))
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
        copy(&at("from"), &at("to"), Present::Replace).unwrap();
        assert_eq!(fs::read_to_string(at("to/apache2/pid")).unwrap(), "10\n");
        assert_eq!(fs::metadata(at("to/apache2/pid")).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(fs::read_link(at("to/link")).unwrap(), Path::new("apache2/pid"));
        assert!(at("to/apache2/deep").is_dir() && !at("to/sock").exists() && !at("to/old").exists());
    }

    #[test]
    fn what_is_newer_stays() {
        let dir = world();
        let at = |path: &str| dir.path().join(path);
        fs::create_dir(at("to/apache2")).unwrap();
        fs::write(at("to/apache2/pid"), "new").unwrap();
        fs::write(at("to/session"), "kept").unwrap();
        copy(&at("from"), &at("to"), Present::Keep).unwrap();
        assert_eq!(fs::read_to_string(at("to/apache2/pid")).unwrap(), "new");
        assert_eq!(fs::read_to_string(at("to/session")).unwrap(), "kept");
        assert!(at("to/apache2/deep").is_dir());
    }

    #[test]
    fn too_much_is_refused() {
        let dir = world();
        let file = File::create(dir.path().join("from/large")).unwrap();
        file.set_len(BYTES_MAX + 1).unwrap();
        let refused = copy(&dir.path().join("from"), &dir.path().join("to"), Present::Replace);
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }
}
