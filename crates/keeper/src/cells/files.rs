//! Files and directories of cgroups, with errors that name the path.
//!
//! Not here: the written values (`lines`), the values read (`usage`).

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

#[derive(Debug, thiserror::Error)]
#[error("{path}: {error}")]
pub struct CgroupFileError {
    pub path: PathBuf,
    #[source]
    pub error: io::Error,
}

impl CgroupFileError {
    pub fn new(path: &Path, error: impl Into<io::Error>) -> Self {
        Self { path: path.into(), error: error.into() }
    }

    pub fn is(&self, errno: Errno) -> bool {
        self.error.raw_os_error() == Some(errno.raw_os_error())
    }

    /// Whether somebody removed the directory. Then its path leads nowhere, and open files of it
    /// report no device.
    pub fn is_gone(&self) -> bool {
        self.is(Errno::NODEV) || self.is(Errno::NOENT)
    }
}

impl From<CgroupFileError> for io::Error {
    fn from(error: CgroupFileError) -> Self {
        Self::new(error.error.kind(), error.to_string())
    }
}

/// Makes a directory. Returns true if it is new.
pub fn make(dir: &Path) -> Result<bool, CgroupFileError> {
    match rustix::fs::mkdir(dir, Mode::from_raw_mode(0o755)) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(errno) => Err(CgroupFileError::new(dir, errno)),
    }
}

/// Reads a file without its final line break.
pub fn read(path: &Path) -> Result<String, CgroupFileError> {
    let text = fs::read_to_string(path).map_err(|error| CgroupFileError::new(path, error))?;
    Ok(text.trim_end().to_owned())
}

pub fn write(path: &Path, text: &str) -> Result<(), CgroupFileError> {
    let file = open(path, OFlags::WRONLY)?;
    write_to(&file, text).map_err(|error| CgroupFileError::new(path, error))
}

/// Writes the whole text in one call, as files of cgroups need it. An empty text becomes a line
/// break: a write of no bytes would not reach them.
pub fn write_to(file: &OwnedFd, text: &str) -> io::Result<()> {
    let text = if text.is_empty() { "\n" } else { text };
    match rustix::io::write(file, text.as_bytes())? {
        len if len == text.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

pub fn open(path: &Path, flags: OFlags) -> Result<OwnedFd, CgroupFileError> {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| CgroupFileError::new(path, errno))
}
