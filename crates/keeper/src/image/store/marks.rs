//! Whether the files of an image are as they were: each is read and compared once after the
//! keeper's start. From then on it is enough that the file system says nothing has changed it.
//!
//! Not here: reading one (`files`), where images are (`image_store`).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::OFlags;

use crate::image::files::open;
use crate::image::format::digest::Digest;
use crate::image::format::header::ImageFile;

/// Metadata that changes with every write to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStamp {
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// Stamps of all files of an image, from when their contents were compared.
pub type FileStamps = BTreeMap<String, FileStamp>;

/// Returns the present stamps of the files. The error describes the problem.
pub fn marks(dir: &Path, files: &BTreeMap<String, ImageFile>) -> Result<FileStamps, String> {
    let mark = |(name, content): (&String, &ImageFile)| {
        let stat = fs::symlink_metadata(dir.join(name)).map_err(|error| format!("{name}: {error}"))?;
        if !stat.is_file() || stat.uid() != 0 || stat.mode() & 0o027 != 0 {
            return Err(format!("{name} is not closed to all but root"));
        }
        if stat.len() != content.bytes {
            return Err(format!("{name} has {} bytes instead of {}", stat.len(), content.bytes));
        }
        let mark = FileStamp {
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

/// Compares all contents. The error describes the problem.
pub fn compare(dir: &Path, files: &BTreeMap<String, ImageFile>) -> Result<(), String> {
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
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn image() -> (tempfile::TempDir, BTreeMap<String, ImageFile>) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("pages-1.img"), "contents").unwrap();
        fs::set_permissions(dir.path().join("pages-1.img"), fs::Permissions::from_mode(0o640)).unwrap();
        let content = ImageFile { bytes: 8, digest: digest(dir.path(), "pages-1.img").unwrap() };
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
