//! Images to other nodes. An archive is sealed and written to a reader, from any byte on, no faster
//! than the node allows.
//!
//! Not here: the format (`archive`), the sealing (`sealed`), the right to read one
//! (`instances::transfer`).

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};

use crate::image::format::archive::ArchiveHead;
use crate::image::transfer::order::TransferOrder;
use crate::image::transfer::sealed::{StreamSealer, StreamTerms};
use crate::sandbox::timespec;

/// Time without a read or write of the other end after which a transfer is given up. It can
/// continue from there.
pub const STALL_MAX: Duration = Duration::from_secs(30);

/// Number of bytes read at once.
const PIECE_LEN: usize = 256 * 1024;

/// Limits the rate of all transfers from and to this node together.
#[derive(Debug)]
pub struct TransferPacer {
    /// When the next bytes may go.
    free: Mutex<Instant>,
}

impl Default for TransferPacer {
    fn default() -> Self {
        Self { free: Mutex::new(Instant::now()) }
    }
}

impl TransferPacer {
    /// Waits until this number of bytes may go. `per_second` 0: at once.
    pub fn take(&self, bytes: usize, per_second: u64) {
        if per_second == 0 {
            return;
        }
        let takes = Duration::from_secs_f64(bytes as f64 / per_second as f64);
        let until = {
            let mut free = self.free.lock();
            let from = (*free).max(Instant::now());
            *free = from + takes;
            from
        };
        thread::sleep(until.saturating_duration_since(Instant::now()));
    }
}

/// An archive that is ready to be sent.
#[derive(Debug)]
pub struct OutgoingArchive {
    pub head: ArchiveHead,
    /// In their order, with their length on disk.
    pub files: Vec<(PathBuf, u64)>,
}

impl OutgoingArchive {
    /// Seals it from this byte on, and writes that. The other end may close before its end, which
    /// is no failure.
    pub fn write(
        &self,
        (order, offset): (&TransferOrder, u64),
        to: &OwnedFd,
        pace: &TransferPacer,
        per_second: u64,
    ) -> io::Result<()> {
        rustix::io::ioctl_fionbio(to, true)?;
        let terms = StreamTerms { digest: self.head.digest(), bytes: self.head.bytes(), offset };
        let mut sealer = StreamSealer::new(order, &terms, |bytes: &[u8]| {
            pace.take(bytes.len(), per_second);
            write_all(to, bytes)
        })?;
        self.write_plain(offset, |bytes| sealer.push(bytes))?;
        sealer.finish()
    }

    fn write_plain(&self, offset: u64, mut send: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let head = self.head.encode();
        let skip = usize::try_from(offset).unwrap_or(usize::MAX).min(head.len());
        let mut left = offset - skip as u64;
        for piece in head[skip..].chunks(PIECE_LEN) {
            send(piece)?;
        }
        let mut buffer = vec![0; PIECE_LEN];
        for (path, bytes) in &self.files {
            let skip = left.min(*bytes);
            left -= skip;
            if skip == *bytes {
                continue;
            }
            let mut file = File::open(path)?;
            file.seek(SeekFrom::Start(skip))?;
            let mut file = file.take(bytes - skip);
            loop {
                let len = file.read(&mut buffer)?;
                if len == 0 {
                    break;
                }
                send(&buffer[..len])?;
            }
        }
        Ok(())
    }
}

fn write_all(to: &OwnedFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(to, bytes) {
            Ok(len) => bytes = &bytes[len..],
            Err(rustix::io::Errno::AGAIN) => wait(to, PollFlags::OUT)?,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Waits until the other end reads or writes.
pub fn wait(fd: &OwnedFd, flags: PollFlags) -> io::Result<()> {
    match poll(&mut [PollFd::new(&fd.as_fd(), flags)], Some(&timespec(STALL_MAX))) {
        Ok(0) => Err(io::Error::new(io::ErrorKind::TimedOut, format!("nothing was sent for {STALL_MAX:?}"))),
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::Digest;
    use crate::image::format::header::ImageFile;
    use crate::image::format::header::tests::header;

    fn archive() -> (tempfile::TempDir, OutgoingArchive) {
        let dir = tempfile::tempdir().unwrap();
        let mut header = header();
        header.files.clear();
        let mut files = Vec::new();
        for (name, len) in [("a", 3), ("b", 0), ("c", 2 * PIECE_LEN + 1)] {
            let path = dir.path().join(name);
            std::fs::write(&path, vec![name.as_bytes()[0]; len]).unwrap();
            header.files.insert(name.into(), ImageFile { bytes: len as u64, digest: Digest::of(&[b"x"]) });
            files.push((path, len as u64));
        }
        (dir, OutgoingArchive { head: ArchiveHead::new(header, vec![9; 10]).unwrap(), files })
    }

    fn sent(archive: &OutgoingArchive, offset: u64) -> Vec<u8> {
        let mut sent = Vec::new();
        let send = |bytes: &[u8]| {
            sent.extend_from_slice(bytes);
            Ok(())
        };
        archive.write_plain(offset, send).unwrap();
        sent
    }

    #[test]
    fn an_archive_goes_on_from_any_byte() {
        let (_dir, archive) = archive();
        let whole = sent(&archive, 0);
        assert_eq!(whole.len() as u64, archive.head.bytes());
        let head = archive.head.encode().len();
        for offset in
            [1, head - 1, head, head + 2, head + 3, head + 4, whole.len() - 1, whole.len(), whole.len() + 9]
        {
            let rest = whole.get(offset..).unwrap_or_default();
            assert!(sent(&archive, offset as u64) == rest, "from {offset}");
        }
    }

    #[test]
    fn bytes_go_no_faster_than_they_may() {
        let (pace, began) = (TransferPacer::default(), Instant::now());
        for _ in 0..5 {
            pace.take(1000, 20_000);
        }
        // The first go at once, each of the others waits for those before it.
        assert!(began.elapsed() >= Duration::from_millis(200), "{:?}", began.elapsed());
    }
}
