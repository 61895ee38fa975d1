//! Two numbers of an instance: how long it waited for databases, and how often. The keeper counts
//! them and the edge reads them, without a verb.
//!
//! They are in an unnamed file in memory. The edge gets it for reading only, and reads it before
//! and after a request. Not here: which waits count (`relay`), their use (`nagaya_edge`).

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{CWD, MemfdFlags, Mode, OFlags};

/// Length of the file: both numbers, little endian.
const LEN: usize = 16;

/// Since the instance's present processes began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WaitTotals {
    /// Time with at least one open query, microseconds.
    pub waited_us: u64,
    /// Number of answered queries.
    pub queries: u64,
}

/// The keeper's end.
#[derive(Debug)]
pub struct DatabaseWaits(File);

impl DatabaseWaits {
    pub fn new() -> io::Result<Self> {
        let file = File::from(rustix::fs::memfd_create("nagaya-database-waits", MemfdFlags::CLOEXEC)?);
        // Only its owner can open it again, and so write it.
        rustix::fs::fchmod(&file, Mode::RUSR)?;
        file.write_all_at(&[0; LEN], 0)?;
        Ok(Self(file))
    }

    pub fn write(&self, totals: WaitTotals) -> io::Result<()> {
        let mut bytes = [0; LEN];
        bytes[..8].copy_from_slice(&totals.waited_us.to_le_bytes());
        bytes[8..].copy_from_slice(&totals.queries.to_le_bytes());
        self.0.write_all_at(&bytes, 0)
    }

    /// Returns another descriptor of it, for reading.
    pub fn reader(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.0.as_raw_fd());
        Ok(rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }
}

/// The edge's end.
#[derive(Debug)]
pub struct DatabaseWaitsReader(File);

impl DatabaseWaitsReader {
    pub fn new(descriptor: OwnedFd) -> Self {
        Self(descriptor.into())
    }

    /// None: what came is no such file.
    pub fn read(&self) -> Option<WaitTotals> {
        let mut bytes = [0; LEN];
        self.0.read_exact_at(&mut bytes, 0).ok()?;
        let (waited, queries) = bytes.split_first_chunk::<8>()?;
        let queries = queries.first_chunk::<8>()?;
        Some(WaitTotals { waited_us: u64::from_le_bytes(*waited), queries: u64::from_le_bytes(*queries) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_totals_are_readable_and_readers_cannot_write() {
        let waits = DatabaseWaits::new().unwrap();
        let descriptor = waits.reader().unwrap();
        assert!(rustix::io::write(&descriptor, b"x").is_err());
        let reader = DatabaseWaitsReader::new(descriptor);
        assert_eq!(reader.read(), Some(WaitTotals::default()));
        let totals = WaitTotals { waited_us: 1 << 40, queries: 7 };
        waits.write(totals).unwrap();
        assert_eq!(reader.read(), Some(totals));
        let none = DatabaseWaitsReader::new(File::open("/dev/null").unwrap().into());
        assert_eq!(none.read(), None);
    }
}
