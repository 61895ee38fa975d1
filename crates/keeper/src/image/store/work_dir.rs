//! A directory of work: what is under way, gone when it is over.
//!
//! Not here: what CRIU writes into it (`criu`).

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, chown};
use std::path::PathBuf;

use crate::sandbox::{Sandbox, root_id};

/// A directory that root of one sandbox may write to. It is removed when this is dropped.
#[derive(Debug)]
pub struct CriuWorkDir {
    pub path: PathBuf,
}

impl CriuWorkDir {
    pub fn new(path: PathBuf, sandbox: &Sandbox) -> io::Result<Self> {
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        let work = Self { path };
        let owner = sandbox.identity();
        chown(&work.path, Some(root_id(owner.uid)), Some(root_id(owner.gid)))?;
        Ok(work)
    }

    /// Makes one for root alone.
    pub fn closed(path: PathBuf) -> io::Result<Self> {
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self { path })
    }
}

impl Drop for CriuWorkDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, "{} cannot be removed", self.path.display());
        }
    }
}
