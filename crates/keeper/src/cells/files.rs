//! Files and directories of cgroups, with errors that say where.
//!
//! Not here: what is written (`lines`), what is read (`usage`).

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

#[derive(Debug, thiserror::Error)]
#[error("{path}: {error}")]
pub struct FileError {
    pub path: PathBuf,
    #[source]
    pub error: io::Error,
}

impl FileError {
    pub fn new(path: &Path, error: impl Into<io::Error>) -> Self {
        Self { path: path.into(), error: error.into() }
    }

    pub fn is(&self, errno: Errno) -> bool {
        self.error.raw_os_error() == Some(errno.raw_os_error())
    }

    /// Somebody removed the directory: its path leads nowhere, and files of it that are open have no device.
    pub fn is_gone(&self) -> bool {
        self.is(Errno::NODEV) || self.is(Errno::NOENT)
    }
}

impl From<FileError> for io::Error {
    fn from(error: FileError) -> Self {
        Self::new(error.error.kind(), error.to_string())
    }
}

/// True: it was not there before.
pub fn make(dir: &Path) -> Result<bool, FileError> {
    match rustix::fs::mkdir(dir, Mode::from_raw_mode(0o755)) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(errno) => Err(FileError::new(dir, errno)),
    }
}

/// Without the line's end.
pub fn read(path: &Path) -> Result<String, FileError> {
    let text = fs::read_to_string(path).map_err(|error| FileError::new(path, error))?;
    Ok(text.trim_end().to_owned())
}

pub fn write(path: &Path, text: &str) -> Result<(), FileError> {
    let file = open(path, OFlags::WRONLY)?;
    write_to(&file, text).map_err(|error| FileError::new(path, error))
}

/// One call for the whole text, as files of cgroups want it. An empty one is a line's end: a write of nothing would
/// not reach them.
pub fn write_to(file: &OwnedFd, text: &str) -> io::Result<()> {
    let text = if text.is_empty() { "\n" } else { text };
    match rustix::io::write(file, text.as_bytes())? {
        len if len == text.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

pub fn open(path: &Path, flags: OFlags) -> Result<OwnedFd, FileError> {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| FileError::new(path, errno))
}
