//! An upgraded connection (RFC 9110 section 7.8): from the `101` on, the client and its backend are one.
//!
//! Not here: deciding that a request may upgrade (`upstream`).

use std::cell::Cell;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

use crate::http1::wire::{Stream, Wire};
use crate::http1::write;
use crate::message::{Response, ResponseBody};

/// A tunnel in which neither side says anything is given up after this.
const IDLE: Duration = Duration::from_secs(3600);

/// Held for each direction of each tunnel.
const BUFFER: usize = 16 << 10;

/// Sends the `101` and copies both ways until both sides have ended, one breaks, or both are silent too long.
pub async fn run<S: Stream>(wire: Rc<Wire<S>>, mut response: Response) {
    let ResponseBody::Tunnel(backend) = std::mem::replace(&mut response.body, ResponseBody::Empty) else {
        return;
    };
    let head = write::encode_switch(&response);
    if wire.write(&mut [IoSlice::new(&head)]).await.is_err() || wire.flush().await.is_err() {
        return;
    }
    let Ok(wire) = Rc::try_unwrap(wire) else { return };
    let (client, ahead) = wire.into_parts();
    let last = Rc::new(Cell::new(Instant::now()));
    let mut client = Watched { inner: client, last: Rc::clone(&last), wrote: 0 };
    let mut backend = Watched { inner: backend, last: Rc::clone(&last), wrote: 0 };
    if backend.write_all(&ahead).await.is_ok() {
        // However it ends, both are closed by being dropped below.
        let _ = until_idle(
            tokio::io::copy_bidirectional_with_sizes(&mut client, &mut backend, BUFFER, BUFFER),
            &last,
        )
        .await;
    }
    if let Some(receipt) = &mut response.receipt {
        receipt.sent(client.wrote, true);
    }
}

/// `work`, given up when nothing has moved for `IDLE`.
async fn until_idle<T>(work: impl Future<Output = T>, last: &Cell<Instant>) -> Option<T> {
    let mut work = pin!(work);
    let mut timer: Pin<Box<Sleep>> = Box::pin(sleep(IDLE));
    poll_fn(|cx| {
        if let Poll::Ready(done) = work.as_mut().poll(cx) {
            return Poll::Ready(Some(done));
        }
        while timer.as_mut().poll(cx).is_ready() {
            let until = last.get() + IDLE;
            if until <= Instant::now() {
                return Poll::Ready(None);
            }
            timer.as_mut().reset(until);
        }
        Poll::Pending
    })
    .await
}

/// Notes when bytes last moved.
struct Watched<T> {
    inner: T,
    last: Rc<Cell<Instant>>,
    wrote: u64,
}

impl<T: AsyncRead + Unpin> AsyncRead for Watched<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.inner).poll_read(cx, buf);
        if polled.is_ready() {
            self.last.set(Instant::now());
        }
        polled
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Watched<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write(cx, bytes);
        if let Poll::Ready(Ok(wrote)) = &polled {
            self.wrote += *wrote as u64;
            self.last.set(Instant::now());
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
