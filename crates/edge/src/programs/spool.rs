//! Gives a request body of unknown length a length, by taking it in completely before it is passed on.
//!
//! PHP reads exactly `CONTENT_LENGTH` bytes and nothing without it, so a chunked upload (or one over HTTP/2 that announces
//! no length) must be complete first. Small ones stay in memory, others go to a file that has no name. Not here:
//! the limit of a body (whoever made the `RequestBody` keeps it), CGI, which can read to the end.

use std::cell::Cell;
use std::fs::File;
use std::future::poll_fn;
use std::io::{self, Read, Seek, Write};
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use rustix::fs::{Mode, OFlags};

use super::answer::Failure;
use crate::message::{BodyError, RequestBody};

/// A body up to this length stays in memory, bytes.
const MEMORY_MAX: usize = 256 << 10;

/// Bodies in files at once, per edge thread: each may be as long as the node's limit for bodies.
const FILES_MAX: u32 = 64;

/// Read from the file at once, bytes.
const READ_LEN: usize = 64 << 10;

/// Counts the spool files of one edge thread.
#[derive(Debug, Clone, Default)]
pub(super) struct Spool {
    files: Rc<Cell<u32>>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum SpoolError {
    #[error(transparent)]
    Request(#[from] BodyError),
    #[error("too many uploads without a length are being taken in")]
    Full,
    #[error("cannot keep an upload in {directory}: {error}")]
    File { directory: String, error: io::Error },
}

impl From<SpoolError> for crate::refusal::Refusal {
    fn from(error: SpoolError) -> Self {
        match error {
            SpoolError::Request(error) => Failure::Request(error).refusal("the upload"),
            SpoolError::Full => Self::Overloaded("too many uploads without a length"),
            SpoolError::File { .. } => {
                tracing::error!("{error}: check that there is room and that the edge may write there");
                Self::Overloaded("an upload cannot be kept")
            }
        }
    }
}

impl Spool {
    /// Takes in all of `body`. The result has an exact length.
    pub async fn take_in(&self, mut body: RequestBody) -> Result<RequestBody, SpoolError> {
        if body.len().is_some() {
            return Ok(body);
        }
        let mut memory = BytesMut::new();
        let mut file: Option<(File, Counted)> = None;
        let directory = std::env::temp_dir();
        let failed = |error| SpoolError::File { directory: directory.display().to_string(), error };
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            // Trailers have no place in a program's input.
            let Ok(data) = frame?.into_data() else { continue };
            memory.extend_from_slice(&data);
            if memory.len() > MEMORY_MAX {
                let (file, _) = match &mut file {
                    Some(file) => file,
                    None => file.insert((nameless(&directory).map_err(failed)?, self.count()?)),
                };
                // Into the page cache: no more blocking than a log line is.
                file.write_all(&memory).map_err(failed)?;
                memory.clear();
            }
        }
        let Some((mut file, count)) = file else {
            let memory = memory.freeze();
            return Ok(if memory.is_empty() { RequestBody::empty() } else { RequestBody::new(Kept(memory)) });
        };
        file.write_all(&memory).map_err(failed)?;
        let left = file.stream_position().map_err(failed)?;
        file.rewind().map_err(failed)?;
        Ok(RequestBody::new(InFile { file, left, _count: count }))
    }

    fn count(&self) -> Result<Counted, SpoolError> {
        if self.files.get() >= FILES_MAX {
            return Err(SpoolError::Full);
        }
        self.files.set(self.files.get() + 1);
        Ok(Counted(self.files.clone()))
    }
}

struct Counted(Rc<Cell<u32>>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

fn nameless(directory: &Path) -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::EXCL;
    Ok(rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR)?.into())
}

struct Kept(Bytes);

impl Body for Kept {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let bytes = std::mem::take(&mut self.0);
        Poll::Ready((!bytes.is_empty()).then(|| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.len() as u64)
    }
}

struct InFile {
    file: File,
    left: u64,
    _count: Counted,
}

impl Body for InFile {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        let mut piece = BytesMut::zeroed(READ_LEN.min(usize::try_from(self.left).unwrap_or(READ_LEN)));
        match self.file.read(&mut piece) {
            Ok(0) => Poll::Ready(Some(Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()))),
            Ok(read) => {
                piece.truncate(read);
                self.left -= read as u64;
                Poll::Ready(Some(Ok(Frame::data(piece.freeze()))))
            }
            Err(error) => Poll::Ready(Some(Err(error.into()))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// Arrives in pieces and does not tell its length.
    struct Pieces(VecDeque<Bytes>);

    impl Body for Pieces {
        type Data = Bytes;
        type Error = BodyError;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
            Poll::Ready(self.0.pop_front().map(|piece| Ok(Frame::data(piece))))
        }
    }

    fn pieces(count: usize, len: usize) -> (RequestBody, Vec<u8>) {
        let pieces: VecDeque<Bytes> = (0..count).map(|n| Bytes::from(vec![n as u8; len])).collect();
        let all = pieces.iter().flatten().copied().collect();
        (RequestBody::new(Pieces(pieces)), all)
    }

    async fn read(mut body: RequestBody) -> Vec<u8> {
        let mut all = Vec::new();
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            all.extend_from_slice(&frame.unwrap().into_data().unwrap());
        }
        all
    }

    #[tokio::test]
    async fn a_body_gets_its_length_and_keeps_its_bytes() {
        let spool = Spool::default();
        for (count, len) in [(0, 0), (3, 10), (9, 100_000)] {
            let (body, all) = pieces(count, len);
            let body = spool.take_in(body).await.unwrap();
            assert_eq!(body.len(), Some(all.len() as u64));
            assert!(read(body).await == all, "{count} pieces of {len}");
        }
        assert_eq!(spool.files.get(), 0, "a file is given back with its body");
    }

    #[tokio::test]
    async fn only_so_many_bodies_lie_in_files_at_once() {
        let spool = Spool::default();
        spool.files.set(FILES_MAX);
        assert!(matches!(spool.take_in(pieces(3, MEMORY_MAX).0).await, Err(SpoolError::Full)));
        assert!(spool.take_in(pieces(1, 5).0).await.is_ok(), "one in memory needs no file");
        assert_eq!(spool.files.get(), FILES_MAX);
    }
}
