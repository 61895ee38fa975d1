//! Inspects a store file before it is opened for writing. The embedded database repairs a file
//! while it opens it. A damaged store must instead stay as it is until an operator judges it. So
//! the file is first opened and verified, every page against its checksum. All writes of that go to
//! memory and are then discarded. Full verification of 100,000 sites takes a fraction of a second.
//!
//! Not here: the content of the tables (`redb`).

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use redb::{Builder, Database, DatabaseError, StorageBackend, StorageError};

use super::StoreError;

/// Returns `Ok` if the file may be opened for writing. It must be intact, or interrupted so that
/// the database recovers, and `look` must find nothing against it.
pub(super) fn verify(
    path: &Path,
    cache_bytes: usize,
    look: impl FnOnce(&Database) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let io = |error| StoreError::Io { path: path.into(), error };
    let damaged = |detail: String| StoreError::Damaged { path: path.into(), detail };
    let file = File::open(path).map_err(io)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(StoreError::Locked { path: path.into() }),
        Err(TryLockError::Error(error)) => return Err(io(error)),
    }
    let len = file.metadata().map_err(io)?.len();
    if len == 0 {
        return Err(damaged("the file is empty".into()));
    }
    let overlay = Overlay { file, written: Mutex::new(WrittenPieces { len, pieces: Vec::new() }) };
    // Arbitrary bytes in place of pages hit assertions of the database. They count as errors.
    let verdict = catch_unwind(AssertUnwindSafe(|| {
        let mut database = Builder::new().set_cache_size(cache_bytes).create_with_backend(overlay)?;
        let intact = database.check_integrity()?;
        Ok(intact.then(|| look(&database)))
    }));
    match verdict {
        Ok(Ok(Some(looked))) => looked,
        Ok(Ok(None)) => Err(damaged("a page does not match its checksum".into())),
        Ok(Err(DatabaseError::Storage(StorageError::Io(error))))
            if !matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData) =>
        {
            Err(io(error))
        }
        Ok(Err(error)) => Err(damaged(error.to_string())),
        Err(_) => Err(damaged("its pages do not fit together".into())),
    }
}

/// Reads come from the file, except where something was written since.
#[derive(Debug)]
struct Overlay {
    file: File,
    written: Mutex<WrittenPieces>,
}

/// Opening writes a few header fields, and after a crash the free space map, so a list is short
/// enough.
#[derive(Debug)]
struct WrittenPieces {
    len: u64,
    pieces: Vec<(u64, Vec<u8>)>,
}

impl StorageBackend for Overlay {
    fn len(&self) -> io::Result<u64> {
        Ok(self.written.lock().unwrap_or_else(PoisonError::into_inner).len)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let end = offset.saturating_add(out.len() as u64);
        if end > written.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut read = 0;
        // Bytes past the file's own end were added by `set_len` and are zero.
        while read < out.len() {
            match self.file.read_at(&mut out[read..], offset + read as u64)? {
                0 => break,
                n => read += n,
            }
        }
        out[read..].fill(0);
        for (at, piece) in &written.pieces {
            let from = offset.max(*at);
            let to = end.min(at + piece.len() as u64);
            if from < to {
                let here = index(from - offset);
                let there = index(from - at);
                let len = index(to - from);
                out[here..here + len].copy_from_slice(&piece[there..there + len]);
            }
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner).len = len;
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        match written.pieces.iter_mut().find(|(at, piece)| *at == offset && piece.len() == data.len()) {
            Some((_, piece)) => piece.copy_from_slice(data),
            None => written.pieces.push((offset, data.to_vec())),
        }
        Ok(())
    }
}

fn index(difference: u64) -> usize {
    usize::try_from(difference).expect("it lies within a buffer in memory")
}
