//! A Unix stream that is watched for writing only while a write waits for room.
//!
//! A Unix socket reports that it can be written each time its other end reads (`unix_write_space`
//! of net/unix/af_unix.c). A watcher of that wakes once for each message that it sent, and has
//! nothing to do. Such a wake-up also interrupts the other end, which has just begun its work. So a
//! write is tried first. Only one that finds no room registers a copy of the descriptor.
//!
//! Not here: datagrams with descriptors (`codec`).

use std::cell::OnceCell;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

use crate::sys;

/// One end of a connected Unix stream, on the runtime of one thread. It has one reader and one
/// writer.
#[derive(Debug)]
pub struct QuietStream {
    reads: AsyncFd<OwnedFd>,
    /// A copy of the descriptor, since a write found no room.
    writes: OnceCell<AsyncFd<OwnedFd>>,
}

/// Which directions of a stream are ready.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamReadiness {
    pub reads: bool,
    pub writes: bool,
}

impl QuietStream {
    /// Watches this socket, and makes it non-blocking. Fails if the runtime cannot watch it.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self { reads: sys::watch(socket, Interest::READABLE)?, writes: OnceCell::new() })
    }

    /// Ends the watch.
    pub fn into_socket(self) -> OwnedFd {
        self.reads.into_inner()
    }

    /// Stops watching it for writing, until a write finds no room again. Call it when nothing waits
    /// to be written.
    pub fn forget_writes(&mut self) {
        self.writes.take();
    }

    /// Reads available bytes. Error `WouldBlock`: there are none. After a short read the next one
    /// waits for more, without a useless call to the kernel.
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let room = buffer.len();
        self.read_with(room, |socket| Ok(rustix::net::recv(socket, buffer, RecvFlags::DONTWAIT)?.1))
    }

    /// Reads by `read` into a buffer of this length.
    fn read_with(&self, room: usize, read: impl FnOnce(&OwnedFd) -> io::Result<usize>) -> io::Result<usize> {
        let mut short = None;
        let full = self.reads.try_io(Interest::READABLE, |socket| {
            let read = read(socket)?;
            if read == 0 || read == room {
                return Ok(read);
            }
            short = Some(read);
            // So that the runtime takes the socket for empty.
            Err(io::ErrorKind::WouldBlock.into())
        });
        short.map_or(full, Ok)
    }

    /// Writes as many of these bytes as there is room for. Error `WouldBlock`: there is none, and
    /// from now on it is watched.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.try_write_vectored(&[IoSlice::new(bytes)])
    }

    /// As `try_write`, for these parts, one after the other.
    pub fn try_write_vectored(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.try_with_room(|socket| {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            Ok(rustix::net::sendmsg(socket, parts, &mut SendAncillaryBuffer::default(), flags)?)
        })
    }

    /// Does something that may have to wait for the other end to read. If it returns `WouldBlock`,
    /// the stream is watched from now on, and is ready for writing once the other end has read
    /// something.
    pub fn try_with_room<R>(&self, run: impl FnOnce(BorrowedFd<'_>) -> io::Result<R>) -> io::Result<R> {
        if let Some(writes) = self.writes.get() {
            return writes.try_io(Interest::WRITABLE, |socket| run(socket.as_fd()));
        }
        let result = run(self.reads.as_fd());
        if result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            // Its first event comes at once if there is room by now. So nothing is missed.
            self.watch_writes()?;
        }
        result
    }

    fn watch_writes(&self) -> io::Result<&AsyncFd<OwnedFd>> {
        if let Some(writes) = self.writes.get() {
            return Ok(writes);
        }
        let copy = sys::watch(self.reads.get_ref().try_clone()?, Interest::WRITABLE)?;
        Ok(self.writes.get_or_init(|| copy))
    }

    /// Ready once there is something to read, or the end.
    pub fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.reads.poll_read_ready(cx).map_ok(drop)
    }

    /// Ready once there may be room. Call it after a write that returned `WouldBlock`.
    pub fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.watch_writes()?.poll_write_ready(cx).map_ok(drop)
    }

    /// Waits until there is something to read, or the end.
    pub async fn readable(&self) -> io::Result<()> {
        poll_fn(|cx| self.poll_read_ready(cx)).await
    }

    /// Waits until there may be room. Call it after a write that returned `WouldBlock`.
    pub async fn writable(&self) -> io::Result<()> {
        poll_fn(|cx| self.poll_write_ready(cx)).await
    }

    /// Waits until one of the wanted directions is ready. For ever, if none is wanted.
    pub async fn ready(&self, wanted: StreamReadiness) -> io::Result<StreamReadiness> {
        poll_fn(|cx| {
            let reads = wanted.reads && is_ready(self.poll_read_ready(cx))?;
            let writes = wanted.writes && is_ready(self.poll_write_ready(cx))?;
            let ready = StreamReadiness { reads, writes };
            if ready == StreamReadiness::default() { Poll::Pending } else { Poll::Ready(Ok(ready)) }
        })
        .await
    }

    /// Takes the error that the kernel noted for it.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        let noted = rustix::net::sockopt::socket_error(&self.reads)?;
        Ok(noted.err().map(io::Error::from))
    }
}

fn is_ready(poll: Poll<io::Result<()>>) -> io::Result<bool> {
    match poll {
        Poll::Ready(ready) => ready.map(|()| true),
        Poll::Pending => Ok(false),
    }
}

impl AsFd for QuietStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reads.as_fd()
    }
}

impl AsyncRead for QuietStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.poll_read_ready(cx))?;
            match self.read_with(into.remaining(), |socket| sys::receive_into(socket, into)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read.map(drop)),
            }
        }
    }
}

impl AsyncWrite for QuietStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            match self.try_write_vectored(parts) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
            ready!(self.poll_write_ready(cx))?;
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(rustix::net::shutdown(&self.reads, Shutdown::Write)?))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::time::timeout;

    use super::*;

    /// Long enough for an event that is due, on any machine.
    const LONG: Duration = Duration::from_secs(20);

    fn pair() -> (QuietStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (QuietStream::new(ours.into()).unwrap(), theirs)
    }

    /// Writes until there is no room. Returns the number of bytes.
    fn fill(stream: &QuietStream) -> usize {
        let mut filled = 0;
        loop {
            match stream.try_write(&[b'x'; 4096]) {
                Ok(len) => filled += len,
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                    return filled;
                }
            }
        }
    }

    #[tokio::test]
    async fn only_a_write_without_room_watches_for_writing() {
        let (mut ours, mut theirs) = pair();
        assert_eq!(ours.try_write_vectored(&[IoSlice::new(b"a"), IoSlice::new(b"bc")]).unwrap(), 3);
        theirs.read_exact(&mut [0; 3]).unwrap();
        assert!(ours.writes.get().is_none());
        let filled = fill(&ours);
        assert!(ours.writes.get().is_some());
        let reader = std::thread::spawn(move || {
            theirs.read_exact(&mut vec![0; filled]).unwrap();
            theirs
        });
        timeout(LONG, async {
            while ours.try_write(b"y").is_err() {
                ours.writable().await.unwrap();
            }
        })
        .await
        .expect("the other end has read all");
        ours.forget_writes();
        assert!(ours.writes.get().is_none());
        let mut theirs = reader.join().unwrap();
        theirs.read_exact(&mut [0; 1]).unwrap();
    }

    #[tokio::test]
    async fn a_reader_sees_bytes_and_the_end_however_they_come() {
        let (mut ours, mut theirs) = pair();
        assert_eq!(ours.try_read(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        theirs.write_all(b"abc").unwrap();
        let mut got = [0; 8];
        assert_eq!(timeout(LONG, ours.read(&mut got)).await.unwrap().unwrap(), 3);
        // The end comes together with the last bytes.
        theirs.write_all(b"de").unwrap();
        drop(theirs);
        assert_eq!(timeout(LONG, ours.read(&mut got)).await.unwrap().unwrap(), 2);
        assert_eq!(timeout(LONG, ours.read(&mut got)).await.unwrap().unwrap(), 0);
        assert_eq!(ours.try_write(b"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[tokio::test]
    async fn both_directions_are_waited_for_at_once() {
        let (mut ours, mut theirs) = pair();
        let wanted = StreamReadiness { reads: true, writes: true };
        let filled = fill(&ours);
        theirs.write_all(b"z").unwrap();
        timeout(LONG, async { while !ours.ready(wanted).await.unwrap().reads {} }).await.unwrap();
        assert_eq!(ours.read(&mut [0; 4]).await.unwrap(), 1);
        let reader = std::thread::spawn(move || {
            let mut got = Vec::new();
            theirs.read_to_end(&mut got).unwrap();
            got.len()
        });
        timeout(LONG, ours.write_all(b"last")).await.unwrap().unwrap();
        ours.shutdown().await.unwrap();
        assert_eq!(reader.join().unwrap(), filled + 4);
    }
}
