//! Bodies that flow between a thread that blocks (the store, a file) and a connection that must
//! not. They go through a channel of few pieces. A sender that disappears is an error at the other
//! end, never the end of the body. Half an import must not count.
//!
//! Not here: the content of the bodies (`nagaya_store::import`).

use std::io::{self, Read, Write};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Most pieces between the two ends; with `PIECE_LEN` half a megabyte.
const PIECES_MAX: usize = 8;

/// Bytes that a writer collects before it sends them on.
const PIECE_LEN: usize = 64 << 10;

/// Longest wait for the next piece of a body that is passed on: a slower source counts as dead.
const PIECE_WAIT_MAX: Duration = Duration::from_secs(60);

#[derive(Debug)]
enum StreamPiece {
    Data(Bytes),
    End,
}

pub fn channel() -> (StreamSender, StreamReceiver) {
    let (to, from) = mpsc::channel(PIECES_MAX);
    (StreamSender { to, piece: Vec::new() }, StreamReceiver { from, piece: Bytes::new(), ended: false })
}

/// The end of a thread that writes, or of a connection whose body is passed on.
#[derive(Debug)]
pub struct StreamSender {
    to: mpsc::Sender<StreamPiece>,
    piece: Vec<u8>,
}

impl StreamSender {
    /// Ends the body: all was written. For a thread that may block.
    pub fn finish(mut self) -> io::Result<()> {
        self.flush()?;
        self.to.blocking_send(StreamPiece::End).map_err(|_| gone())
    }

    /// Passes on a whole body of at most `limit` bytes. On an error the receiver sees the body cut
    /// off.
    pub async fn pass_on<B>(self, mut body: B, limit: u64) -> Result<(), PassError>
    where
        B: Body<Data = Bytes> + Unpin,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let mut left = limit;
        while let Some(frame) = timeout(PIECE_WAIT_MAX, body.frame()).await.map_err(|_| PassError::Silent)? {
            let frame = frame.map_err(|error| PassError::Body(io::Error::other(error)))?;
            let Ok(data) = frame.into_data() else { continue };
            left = left.checked_sub(data.len() as u64).ok_or(PassError::TooLong { limit })?;
            // The receiver stopped early because it knows enough; it does not want the rest.
            if self.to.send(StreamPiece::Data(data)).await.is_err() {
                return Ok(());
            }
        }
        let _ = self.to.send(StreamPiece::End).await;
        Ok(())
    }
}

#[derive(Debug, thiserror::Error)]
pub enum PassError {
    #[error("the body was cut off: {0}")]
    Body(io::Error),
    #[error("no data arrived for {} s", PIECE_WAIT_MAX.as_secs())]
    Silent,
    #[error("the body is longer than {limit} bytes")]
    TooLong { limit: u64 },
}

impl Write for StreamSender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.piece.extend_from_slice(bytes);
        if self.piece.len() >= PIECE_LEN {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        let piece = std::mem::take(&mut self.piece);
        self.to.blocking_send(StreamPiece::Data(piece.into())).map_err(|_| gone())
    }
}

/// The end of a thread that reads (`Read`), or of a connection that sends (`Body`).
#[derive(Debug)]
pub struct StreamReceiver {
    from: mpsc::Receiver<StreamPiece>,
    piece: Bytes,
    ended: bool,
}

impl Read for StreamReceiver {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.ended {
            match self.from.blocking_recv() {
                Some(StreamPiece::Data(data)) => self.piece = data,
                Some(StreamPiece::End) => self.ended = true,
                None => return Err(cut_off()),
            }
        }
        let len = self.piece.len().min(out.len());
        self.piece.copy_to_slice(&mut out[..len]);
        Ok(len)
    }
}

impl Body for StreamReceiver {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let piece = ready!(self.from.poll_recv(context));
        self.ended = !matches!(piece, Some(StreamPiece::Data(_)));
        Poll::Ready(match piece {
            Some(StreamPiece::Data(data)) => Some(Ok(Frame::data(data))),
            Some(StreamPiece::End) => None,
            None => Some(Err(cut_off())),
        })
    }
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the other end closed the connection")
}

fn cut_off() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the other end stopped in the middle")
}
