//! Ends the streams of a site's requests at the site's deadline (`stream_seconds`). It holds for
//! the incoming body, the response with the wait for its head, and a tunnel. It holds for any
//! version of HTTP and any kind of backend.
//!
//! A body passes unchanged before the deadline. At the deadline it breaks off like any body that
//! breaks. Not here: silence (`idle_timer`, `arrival`, `h1::tunnel`), rates (`shaping`).

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use nagaya_records::Site;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

use crate::http::body;
use crate::http::message::{BodyError, Request, RequestBody, Response, ResponseBody};
use crate::http::refusal::Refusal;

/// Returns the deadline of a stream that begins now. `None` if the site sets none.
pub fn of_site(site: &Site) -> Option<Instant> {
    let seconds = site.stream_seconds?;
    Instant::now().checked_add(Duration::from_secs(seconds.into()))
}

/// Ends the body of the request at the deadline.
pub fn limit_body(request: &mut Request, site: &Site) {
    if request.body.is_empty() {
        return;
    }
    if let Some(end) = of_site(site) {
        let body = std::mem::replace(&mut request.body, RequestBody::empty());
        let why = || BodyError::Stalled;
        request.body = RequestBody::new(WithDeadline { inner: body, sleep: Box::pin(sleep_until(end)), why });
    }
}

/// Waits for the head of the response until `end`, and ends its body then.
///
/// # Errors
/// Fails if there is no head by then, or if it is a refusal.
pub async fn limit_until(
    end: Instant,
    answer: impl Future<Output = Result<Response, Refusal>>,
) -> Result<Response, Refusal> {
    let mut response = timeout_at(end, answer).await.map_err(|_| Refusal::BackendTimeout)??;
    let sleep = Box::pin(sleep_until(end));
    let why = || BodyError::Backend("it took longer than stream_seconds of the site".into());
    response.body = match response.body {
        ResponseBody::Empty => ResponseBody::Empty,
        ResponseBody::Tunnel(inner) => ResponseBody::Tunnel(Box::new(WithDeadline { inner, sleep, why })),
        ResponseBody::Stream(inner) => ResponseBody::stream(WithDeadline { inner, sleep, why }),
        other => ResponseBody::stream(WithDeadline { inner: body::BodyContent::new(other), sleep, why }),
    };
    Ok(response)
}

/// A body or a connection with a deadline.
struct WithDeadline<T> {
    inner: T,
    sleep: Pin<Box<Sleep>>,
    why: fn() -> BodyError,
}

impl<T> WithDeadline<T> {
    fn is_over(&mut self, cx: &mut Context<'_>) -> bool {
        self.sleep.as_mut().poll(cx).is_ready()
    }

    fn poll_in_time(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.is_over(cx) {
            return Err(io::Error::new(io::ErrorKind::TimedOut, (self.why)()));
        }
        Ok(())
    }
}

impl<T: Body<Data = Bytes, Error = BodyError> + Unpin> Body for WithDeadline<T> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.is_over(cx) {
            return Poll::Ready(Some(Err((self.why)())));
        }
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for WithDeadline<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_in_time(cx)?;
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for WithDeadline<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_in_time(cx)?;
        Pin::new(&mut self.inner).poll_write(cx, bytes)
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
    use std::future::{pending, poll_fn};
    use std::sync::Arc;

    use http::StatusCode;
    use tokio::io::{AsyncReadExt, duplex};

    use super::*;
    use crate::http::body_adapters::PolledBody;

    const SECOND: Duration = Duration::from_secs(1);

    /// A body that says something each second, without end.
    fn endless() -> impl Body<Data = Bytes, Error = BodyError> {
        let mut second = Box::pin(sleep_until(Instant::now() + SECOND));
        PolledBody::new(move |cx| {
            std::task::ready!(second.as_mut().poll(cx));
            second.as_mut().reset(Instant::now() + SECOND);
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"x")))))
        })
    }

    async fn next(
        body: &mut Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>,
    ) -> Result<usize, BodyError> {
        let frame = poll_fn(|cx| body.as_mut().poll_frame(cx)).await;
        Ok(frame.transpose()?.and_then(|frame| frame.into_data().ok()).map_or(0, |data| data.len()))
    }

    async fn answer(body: ResponseBody) -> Result<Response, Refusal> {
        limit_until(Instant::now() + 5 * SECOND, async { Ok(Response::new(StatusCode::OK).with_body(body)) })
            .await
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_for_a_head_ends() {
        let begin = Instant::now();
        let refused = limit_until(begin + 5 * SECOND, pending()).await;
        assert!(matches!(refused, Err(Refusal::BackendTimeout)));
        assert_eq!(begin.elapsed(), 5 * SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_ends_however_it_is_sent() {
        let begin = Instant::now();
        let ResponseBody::Stream(mut body) = answer(ResponseBody::stream(endless())).await.unwrap().body
        else {
            panic!("a stream")
        };
        let mut bytes = 0;
        let error = loop {
            match next(&mut body).await {
                Ok(len) => bytes += len,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, BodyError::Backend(_)) && (4..=5).contains(&bytes), "{error} after {bytes}");
        assert_eq!(begin.elapsed(), 5 * SECOND);

        let file = Arc::new(std::os::fd::OwnedFd::from(std::fs::File::open("/proc/self/exe").unwrap()));
        for kept in
            [ResponseBody::Bytes(Bytes::from_static(b"abc")), ResponseBody::File { file, offset: 0, len: 3 }]
        {
            let response = answer(kept).await.unwrap();
            assert_eq!(response.body.len(), Some(3));
            let ResponseBody::Stream(mut body) = response.body else { panic!("a stream") };
            assert_eq!(next(&mut body).await.unwrap(), 3);
        }
        let ResponseBody::Tunnel(mut tunnel) =
            answer(ResponseBody::Tunnel(Box::new(duplex(8).0))).await.unwrap().body
        else {
            panic!("a tunnel")
        };
        let begin = Instant::now();
        let read = tunnel.read_u8().await;
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "its other side is gone");
        let (near, _far) = duplex(8);
        let ResponseBody::Tunnel(mut tunnel) =
            answer(ResponseBody::Tunnel(Box::new(near))).await.unwrap().body
        else {
            panic!("a tunnel")
        };
        assert_eq!(tunnel.read_u8().await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(begin.elapsed(), 5 * SECOND);
    }
}
