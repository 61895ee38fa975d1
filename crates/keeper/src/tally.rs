//! Two numbers of an instance that the keeper counts and the edge reads, without a question: how long it waited for
//! databases, and how often.
//!
//! They are in a file in memory that has no name. The edge gets it for reading only, and reads it before and after a request.
//! Not here: what counts as such a wait (`relay`), what is told of it (`nagaya_edge`).

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{CWD, MemfdFlags, Mode, OFlags};

/// Bytes of the file: both numbers, little endian.
const LEN: usize = 16;

/// Since the instance's present processes began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// With at least one question open, microseconds.
    pub waited_us: u64,
    /// Questions that were answered.
    pub queries: u64,
}

/// The keeper's end.
#[derive(Debug)]
pub struct Tally(File);

impl Tally {
    pub fn new() -> io::Result<Self> {
        let file = File::from(rustix::fs::memfd_create("nagaya-tally", MemfdFlags::CLOEXEC)?);
        // Nobody but its owner can open it anew, and so write it.
        rustix::fs::fchmod(&file, Mode::RUSR)?;
        file.write_all_at(&[0; LEN], 0)?;
        Ok(Self(file))
    }

    pub fn write(&self, totals: Totals) -> io::Result<()> {
        let mut bytes = [0; LEN];
        bytes[..8].copy_from_slice(&totals.waited_us.to_le_bytes());
        bytes[8..].copy_from_slice(&totals.queries.to_le_bytes());
        self.0.write_all_at(&bytes, 0)
    }

    /// Another descriptor of it, for reading.
    pub fn reader(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.0.as_raw_fd());
        Ok(rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }
}

/// The edge's end.
#[derive(Debug)]
pub struct TallyReader(File);

impl TallyReader {
    pub fn new(descriptor: OwnedFd) -> Self {
        Self(descriptor.into())
    }

    /// None: what came is no tally.
    pub fn read(&self) -> Option<Totals> {
        let mut bytes = [0; LEN];
        self.0.read_exact_at(&mut bytes, 0).ok()?;
        let (waited, queries) = bytes.split_first_chunk::<8>()?;
        let queries = queries.first_chunk::<8>()?;
        Some(Totals { waited_us: u64::from_le_bytes(*waited), queries: u64::from_le_bytes(*queries) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_readers_cannot_write() {
        let tally = Tally::new().unwrap();
        let descriptor = tally.reader().unwrap();
        assert!(rustix::io::write(&descriptor, b"x").is_err());
        let reader = TallyReader::new(descriptor);
        assert_eq!(reader.read(), Some(Totals::default()));
        let totals = Totals { waited_us: 1 << 40, queries: 7 };
        tally.write(totals).unwrap();
        assert_eq!(reader.read(), Some(totals));
        let none = TallyReader::new(File::open("/dev/null").unwrap().into());
        assert_eq!(none.read(), None);
    }
}
