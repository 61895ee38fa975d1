//! Runs an upgraded connection (RFC 9110 section 7.8): from the `101` on, client and backend are
//! joined.
//!
//! Not here: deciding that a request may upgrade (`upstream`).

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::io::IoSlice;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::http::h1::wire::{ClientStream, Http1Wire};
use crate::http::h1::write;
use crate::http::message::{Response, ResponseBody};

/// Maximum time without bytes from either side before a tunnel ends.
const IDLE_MAX: Duration = Duration::from_secs(3600);

/// The same after one side has ended. TCP does not distinguish a side that only sends no more
/// from one that has left. So the other side may continue while it sends.
const HALF_CLOSED_IDLE_MAX: Duration = Duration::from_secs(5);

/// Buffer size for each direction of each tunnel.
const BUFFER: usize = 16 << 10;

/// Sends the `101` and copies both ways. Ends when both sides have ended, one fails, or they are
/// silent too long.
pub async fn run<S: ClientStream>(wire: Rc<Http1Wire<S>>, mut response: Response) {
    let ResponseBody::Tunnel(backend) = std::mem::replace(&mut response.body, ResponseBody::Empty) else {
        return;
    };
    let head = write::encode_switch(&response);
    if wire.write(&mut [IoSlice::new(&head)]).await.is_err() || wire.flush().await.is_err() {
        return;
    }
    let Ok(wire) = Rc::try_unwrap(wire) else { return };
    let (client, ahead) = wire.into_parts();
    let moves = Rc::new(TunnelActivity { last: Cell::new(Instant::now()), is_half_closed: Cell::new(false) });
    let mut client = TunnelStream { inner: client, moves: Rc::clone(&moves), wrote: 0 };
    let mut backend = TunnelStream { inner: backend, moves: Rc::clone(&moves), wrote: 0 };
    if backend.write_all(&ahead).await.is_ok() {
        // In every case both are closed by being dropped below.
        let _ = until_idle(
            tokio::io::copy_bidirectional_with_sizes(&mut client, &mut backend, BUFFER, BUFFER),
            &moves,
        )
        .await;
    }
    if let Some(receipt) = &mut response.receipt {
        receipt.sent(client.wrote, true);
    }
}

/// Activity in both directions of a tunnel.
struct TunnelActivity {
    /// Time when bytes last moved.
    last: Cell<Instant>,
    /// One side has ended.
    is_half_closed: Cell<bool>,
}

impl TunnelActivity {
    /// Returns the time when it ends, if nothing moves until then.
    fn end(&self) -> Instant {
        self.last.get() + if self.is_half_closed.get() { HALF_CLOSED_IDLE_MAX } else { IDLE_MAX }
    }
}

/// Runs `work`, and ends it when nothing has moved for too long.
async fn until_idle<T>(work: impl Future<Output = T>, moves: &TunnelActivity) -> Option<T> {
    let mut work = pin!(work);
    let mut timer: Pin<Box<Sleep>> = Box::pin(sleep_until(moves.end()));
    poll_fn(|cx| {
        if let Poll::Ready(done) = work.as_mut().poll(cx) {
            return Poll::Ready(Some(done));
        }
        if timer.deadline() > moves.end() {
            timer.as_mut().reset(moves.end());
        }
        while timer.as_mut().poll(cx).is_ready() {
            let until = moves.end();
            if until <= Instant::now() {
                return Poll::Ready(None);
            }
            timer.as_mut().reset(until);
        }
        Poll::Pending
    })
    .await
}

/// Records moving bytes and the end of the stream.
struct TunnelStream<T> {
    inner: T,
    moves: Rc<TunnelActivity>,
    wrote: u64,
}

impl<T: AsyncRead + Unpin> AsyncRead for TunnelStream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.inner).poll_read(cx, buf);
        if polled.is_ready() {
            self.moves.last.set(Instant::now());
            if buf.filled().len() == before {
                self.moves.is_half_closed.set(true);
            }
        }
        polled
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for TunnelStream<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write(cx, bytes);
        if let Poll::Ready(Ok(wrote)) = &polled {
            self.wrote += *wrote as u64;
            self.moves.last.set(Instant::now());
        }
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, DuplexStream, copy_bidirectional, duplex};
    use tokio::time::sleep;

    use super::*;

    /// A tunnel, with what the client and the backend hold of it.
    fn tunnel() -> (impl Future<Output = Option<io::Result<(u64, u64)>>>, DuplexStream, DuplexStream) {
        let ((client, near), (backend, far)) = (duplex(1024), duplex(1024));
        let work = async move {
            let moves =
                Rc::new(TunnelActivity { last: Cell::new(Instant::now()), is_half_closed: Cell::new(false) });
            let mut near = TunnelStream { inner: near, moves: Rc::clone(&moves), wrote: 0 };
            let mut far = TunnelStream { inner: far, moves: Rc::clone(&moves), wrote: 0 };
            until_idle(copy_bidirectional(&mut near, &mut far), &moves).await
        };
        (work, client, backend)
    }

    #[tokio::test(start_paused = true)]
    async fn it_ends_soon_after_one_side_has_ended() {
        for who in ["client", "backend"] {
            let begin = Instant::now();
            let (work, mut client, mut backend) = tunnel();
            let ended = if who == "client" { client.shutdown() } else { backend.shutdown() };
            ended.await.unwrap();
            assert!(work.await.is_none(), "{who}");
            assert_eq!(begin.elapsed(), HALF_CLOSED_IDLE_MAX, "{who}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_other_side_may_go_on_while_it_says_something() {
        let (work, mut client, mut backend) = tunnel();
        client.shutdown().await.unwrap();
        let says = async {
            for _ in 0..10 {
                sleep(HALF_CLOSED_IDLE_MAX / 2).await;
                backend.write_u8(1).await.unwrap();
            }
            drop(backend);
        };
        let (ended, ()) = tokio::join!(work, says);
        assert_eq!(ended.unwrap().unwrap(), (0, 10));
        let mut taken = Vec::new();
        client.read_to_end(&mut taken).await.unwrap();
        assert_eq!(taken.len(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn silence_of_both_sides_ends_it_late() {
        let begin = Instant::now();
        let (work, _client, _backend) = tunnel();
        assert!(work.await.is_none());
        assert_eq!(begin.elapsed(), IDLE_MAX);
    }
}
