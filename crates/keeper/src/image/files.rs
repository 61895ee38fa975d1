//! Opening, reading and writing one file of an image, without following what anybody may have put
//! in its place.
//!
//! Not here: which files there are (`format`), closing them to all but root (`seal`).

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags};

use crate::image::format::digest::Digest;
use crate::image::format::header::ImageFile;

/// Opens a file. `how`: for reading, or for writing too.
pub fn open(dir: &Path, name: &str, how: OFlags) -> io::Result<File> {
    // Non-blocking and without following links: an attacker that broke out of CRIU may have put it
    // there.
    let flags = how | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::openat(CWD, dir.join(name), flags, Mode::empty())?))
}

/// Reads all of a file. `None` if it is longer than the limit.
pub fn read(dir: &Path, name: &str, len_max: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    open(dir, name, OFlags::RDONLY)?.take(len_max + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= len_max).then_some(bytes))
}

/// Rewrites a file.
pub fn rewrite(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    open(dir, name, OFlags::WRONLY | OFlags::TRUNC)?.write_all(bytes)
}

/// Writes a file of the keeper's own to an image that has been taken over.
pub fn add(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<ImageFile> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(CWD, dir.join(name), flags, Mode::from_raw_mode(0o600))?);
    file.write_all(bytes)?;
    Ok(ImageFile { bytes: bytes.len() as u64, digest: Digest::of_file(&open(dir, name, OFlags::RDONLY)?)? })
}
