//! The log of a node on its disk: files of a fixed length, to which entries of all volumes are
//! added. One sync puts all that was added on the disk.
//!
//! Files are allocated as a whole, so that adding an entry changes no metadata, and a full disk is
//! found when a file is made. Invariants: an entry is durable once `sync` has returned; the reader
//! returns all durable entries in order, or an error that says which is damaged. Entries that were
//! never durable may be missing after a power cut, from some entry on. Not here: the meaning of
//! entries, who waits for a sync.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;

use crate::frame::{ALIGNMENT, ENTRY_LEN_MAX, LogFrame};

/// Length of a file, bytes.
pub const SEGMENT_LEN: u64 = 64 << 20;

/// End of the files' names.
const SUFFIX: &str = ".log";

#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    #[error("{path}: {error}")]
    File { path: PathBuf, error: io::Error },
    #[error("{path}: entry {number} of the log is damaged at byte {at}, though it was on the disk")]
    Damaged { path: PathBuf, at: u64, number: u64 },
    #[error("an entry of {len} bytes is longer than {ENTRY_LEN_MAX}")]
    TooLong { len: usize },
}

/// The log, to which entries are added.
#[derive(Debug)]
pub struct SegmentLog {
    dir: PathBuf,
    segment_len: u64,
    current: File,
    path: PathBuf,
    /// Bytes of the current file that are used.
    used: u64,
    /// Number of the last frame, and of the last one that is on the disk.
    written: u64,
    synced: u64,
}

impl SegmentLog {
    /// Opens the log in this directory, and calls `each` with every entry that it has. Blocks.
    pub fn open(
        dir: &Path,
        segment_len: u64,
        mut each: impl FnMut(u64, &[u8]),
    ) -> Result<Self, SegmentError> {
        let mut reader = SegmentReader::default();
        for path in segments(dir)? {
            reader.read(&path, &mut each)?;
        }
        // Nothing is written after a torn tail: the next entries have a file of their own.
        let written = reader.last;
        let (current, path) = make_segment(dir, written + 1, segment_len)?;
        Ok(Self { dir: dir.to_owned(), segment_len, current, path, used: 0, written, synced: written })
    }

    /// Returns the number of the last entry that is on the disk.
    pub fn synced(&self) -> u64 {
        self.synced
    }

    /// Adds entries. Returns the number of the last one. They are durable after the next `sync`.
    pub fn add(&mut self, entries: &[&[u8]]) -> Result<u64, SegmentError> {
        let mut bytes = Vec::new();
        for entry in entries {
            if entry.len() > ENTRY_LEN_MAX {
                return Err(SegmentError::TooLong { len: entry.len() });
            }
            let len = (bytes.len() + LogFrame::len_for(entry.len())) as u64;
            if self.used + len > self.segment_len && self.used + bytes.len() as u64 > 0 {
                self.write(&bytes)?;
                bytes.clear();
                self.begin_segment()?;
            }
            self.written += 1;
            LogFrame { number: self.written, synced: self.synced, entry }.write(&mut bytes);
        }
        self.write(&bytes)?;
        Ok(self.written)
    }

    /// Puts all entries on the disk (fdatasync(2)). Blocks. After an error nothing more is added:
    /// the kernel may have dropped what it could not write.
    pub fn sync(&mut self) -> Result<u64, SegmentError> {
        rustix::fs::fdatasync(&self.current).map_err(|errno| file_error(&self.path, errno.into()))?;
        self.synced = self.written;
        Ok(self.synced)
    }

    /// Removes files all of whose entries are up to this number.
    pub fn remove_until(&mut self, number: u64) -> Result<(), SegmentError> {
        let segments = segments(&self.dir)?;
        for (path, next) in segments.iter().zip(segments.iter().skip(1)) {
            if first_of(next).is_some_and(|first| first <= number + 1) {
                fs::remove_file(path).map_err(|error| file_error(path, error))?;
            }
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), SegmentError> {
        self.current.write_all_at(bytes, self.used).map_err(|error| file_error(&self.path, error))?;
        self.used += bytes.len() as u64;
        Ok(())
    }

    /// Goes on in another file. The former one is on the disk then.
    fn begin_segment(&mut self) -> Result<(), SegmentError> {
        self.sync()?;
        (self.current, self.path) = make_segment(&self.dir, self.written + 1, self.segment_len)?;
        self.used = 0;
        Ok(())
    }
}

/// Makes a file for the entries from this number on. Its name and its room are on the disk then.
fn make_segment(dir: &Path, first: u64, len: u64) -> Result<(File, PathBuf), SegmentError> {
    let path = dir.join(format!("{first:020}{SUFFIX}"));
    let make = || -> io::Result<File> {
        // One that has no durable entry may be there.
        let file =
            File::options().read(true).write(true).create(true).truncate(true).mode(0o600).open(&path)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, len)?;
        file.sync_all()?;
        File::open(dir)?.sync_all()?;
        Ok(file)
    };
    let file = make().map_err(|error| file_error(&path, error))?;
    Ok((file, path))
}

/// Returns the files in the order of their entries.
fn segments(dir: &Path) -> Result<Vec<PathBuf>, SegmentError> {
    let entries = fs::read_dir(dir).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let entries = entries.map_err(|error| file_error(dir, error))?;
    let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    paths.retain(|path| first_of(path).is_some());
    paths.sort();
    Ok(paths)
}

/// Returns the number of a file's first entry, from its name.
fn first_of(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_suffix(SUFFIX)?.parse().ok()
}

fn file_error(path: &Path, error: io::Error) -> SegmentError {
    SegmentError::File { path: path.to_owned(), error }
}

/// Reads files one after another.
#[derive(Debug, Default)]
struct SegmentReader {
    /// Number of the last entry.
    last: u64,
    is_first_file: bool,
}

impl SegmentReader {
    fn read(&mut self, path: &Path, each: &mut impl FnMut(u64, &[u8])) -> Result<(), SegmentError> {
        let bytes = fs::read(path).map_err(|error| file_error(path, error))?;
        let first = first_of(path).unwrap_or(1);
        if !self.is_first_file {
            // Earlier files were removed.
            (self.last, self.is_first_file) = (first - 1, true);
        }
        // A file begins once the one before is on the disk, or after its torn tail.
        let damaged =
            |at: usize, number: u64| SegmentError::Damaged { path: path.into(), at: at as u64, number };
        if first != self.last + 1 {
            return Err(damaged(0, self.last + 1));
        }
        let mut at = 0;
        while let Some(frame) = bytes.get(at..).and_then(LogFrame::read) {
            if frame.number != self.last + 1 {
                break;
            }
            each(frame.number, frame.entry);
            self.last = frame.number;
            at += LogFrame::len_for(frame.entry.len());
        }
        // A later frame of this file may say that this one was on the disk.
        let later = (at..bytes.len()).step_by(ALIGNMENT).skip(1);
        let synced = later.filter_map(|at| LogFrame::read(&bytes[at..])).map(|frame| frame.synced).max();
        match synced {
            Some(synced) if synced > self.last => Err(damaged(at, self.last + 1)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SHORT: u64 = 4096;

    fn entries(dir: &Path) -> Result<Vec<Vec<u8>>, SegmentError> {
        let mut all = Vec::new();
        SegmentLog::open(dir, SHORT, |_, entry| all.push(entry.to_vec()))?;
        Ok(all)
    }

    /// Adds entries in groups, each with one sync. Returns all of them.
    fn fill(dir: &Path, groups: &[Vec<usize>]) -> Vec<Vec<u8>> {
        let mut log = SegmentLog::open(dir, SHORT, |_, _| {}).unwrap();
        let mut all = Vec::new();
        for group in groups {
            let new: Vec<Vec<u8>> =
                group.iter().enumerate().map(|(at, len)| vec![(all.len() + at + 1) as u8; *len]).collect();
            let new_bytes: Vec<&[u8]> = new.iter().map(Vec::as_slice).collect();
            log.add(&new_bytes).unwrap();
            log.sync().unwrap();
            all.extend(new);
            assert_eq!(log.synced(), all.len() as u64);
        }
        all
    }

    #[test]
    fn entries_of_many_files_are_read_in_order_and_go_on() {
        let dir = tempfile::tempdir().unwrap();
        let mut all = fill(dir.path(), &vec![vec![1_000, 10, 500]; 20]);
        assert!(segments(dir.path()).unwrap().len() > 5);
        assert_eq!(entries(dir.path()).unwrap(), all);
        let mut log = SegmentLog::open(dir.path(), SHORT, |_, _| {}).unwrap();
        assert_eq!(log.add(&[b"more"]).unwrap(), 61);
        all.push(b"more".to_vec());
        drop(log);
        assert_eq!(entries(dir.path()).unwrap(), all);
    }

    #[test]
    fn files_are_removed_once_all_of_their_entries_may_go() {
        let dir = tempfile::tempdir().unwrap();
        let all = fill(dir.path(), &vec![vec![1_500]; 20]);
        let mut log = SegmentLog::open(dir.path(), SHORT, |_, _| {}).unwrap();
        log.remove_until(9).unwrap();
        let left = entries(dir.path()).unwrap();
        assert!(left.len() >= 11 && left.len() < 14 && all.ends_with(&left), "{}", left.len());
        log.remove_until(20).unwrap();
        assert!(entries(dir.path()).unwrap().is_empty());
        assert_eq!(SegmentLog::open(dir.path(), SHORT, |_, _| {}).unwrap().add(&[b"x"]).unwrap(), 21);
    }

    #[test]
    fn an_entry_may_be_longer_than_a_file_and_has_a_maximum() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = SegmentLog::open(dir.path(), SHORT, |_, _| {}).unwrap();
        let long = vec![7; ENTRY_LEN_MAX + 1];
        assert!(matches!(log.add(&[&long]), Err(SegmentError::TooLong { .. })));
        log.add(&[&long[..10_000], b"next"]).unwrap();
        drop(log);
        assert_eq!(entries(dir.path()).unwrap(), [long[..10_000].to_vec(), b"next".to_vec()]);
    }

    #[test]
    fn a_missing_file_is_damage() {
        let dir = tempfile::tempdir().unwrap();
        fill(dir.path(), &vec![vec![1_500]; 10]);
        fs::remove_file(&segments(dir.path()).unwrap()[2]).unwrap();
        let error = entries(dir.path()).unwrap_err();
        assert!(matches!(error, SegmentError::Damaged { .. }), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// A power cut leaves any part of what was written after the last sync.
        #[test]
        fn a_torn_tail_loses_nothing_that_was_on_the_disk(
            groups in proptest::collection::vec(proptest::collection::vec(0_usize..200, 1..4), 1..5),
            unsynced in proptest::collection::vec(0_usize..900, 1..4),
            kept in proptest::collection::vec(any::<bool>(), 16),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let all = fill(dir.path(), &groups);
            let mut log = SegmentLog::open(dir.path(), SHORT * 8, |_, _| {}).unwrap();
            let before = fs::read(&log.path).unwrap();
            let new: Vec<Vec<u8>> = unsynced.iter().map(|len| vec![255; *len]).collect();
            log.add(&new.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap();
            let after = fs::read(&log.path).unwrap();
            // Blocks of 512 bytes reach the disk in any order, or not at all.
            let mut torn = before;
            for ((at, block), is_kept) in torn.chunks_mut(512).enumerate().zip(kept.iter().cycle()) {
                if *is_kept {
                    block.copy_from_slice(&after[at * 512..at * 512 + block.len()]);
                }
            }
            fs::write(&log.path, torn).unwrap();
            drop(log);
            let read = entries(dir.path()).unwrap();
            prop_assert!(read.starts_with(&all));
            prop_assert!(read[all.len()..].iter().zip(&new).all(|(one, other)| one == other));
        }

        /// Damage is found, unless nothing after it says that the entry was on the disk.
        #[test]
        fn a_wrong_bit_is_found_or_cuts_the_tail(at in any::<prop::sample::Index>(), bit in 0_u8..8) {
            let dir = tempfile::tempdir().unwrap();
            let all = fill(dir.path(), &vec![vec![100]; 12]);
            let path = segments(dir.path()).unwrap()[0].clone();
            let mut bytes = fs::read(&path).unwrap();
            let used = 12 * LogFrame::len_for(100);
            bytes[at.index(used)] ^= 1_u8 << bit;
            fs::write(&path, bytes).unwrap();
            match entries(dir.path()) {
                Err(SegmentError::Damaged { .. }) => {}
                Ok(read) => prop_assert!(all.starts_with(&read) && read.len() >= 11),
                Err(error) => prop_assert!(false, "{error}"),
            }
        }
    }
}
