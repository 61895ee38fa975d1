//! One run of a CGI program (RFC 3875): the request's body into its standard input, its standard output out.
//!
//! Not here: starting it, its uid and limits (`keeper`), its variables (`environment`), the meaning of its output
//! (`answer`).
//!
//! The process tree is ended when this is dropped: after the answer, or because the client left, or because it took
//! too long. A program that does not read its input is as good as one that does.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http_body::Body;
use nagaya_cmdb::cell::Usage;
use nagaya_keeper::client::ProcessGuard;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::time::{Instant, timeout};

use super::Running;
use super::after::After;
use super::answer::{Failure, Output};
use crate::message::RequestBody;
use crate::stay::Due;

/// Asked of standard output at once, bytes: what a pipe holds by default.
const READ_LEN: usize = 64 << 10;

/// So long the keeper may take to end a program's tree and say what it used.
const END_MAX: Duration = Duration::from_secs(2);

/// The process tree of one program. Dropping it ends the tree; the request learns what it used.
pub(super) struct Tree {
    held: Option<(ProcessGuard, Due)>,
    after: Rc<After>,
    _running: Running,
}

impl Tree {
    pub fn new(guard: ProcessGuard, due: Due, after: Rc<After>, running: Running) -> Self {
        Self { held: Some((guard, due)), after, _running: running }
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let Some((guard, due)) = self.held.take() else { return };
        self.after.run(async move {
            if let Ok(Ok((exit, usage))) = timeout(END_MAX, guard.end()).await {
                // Without cgroups the program's own count is all there is.
                due.pay(Usage { cpu_us: usage.cpu_us.max(exit.cpu_us), ..usage });
            }
        });
    }
}

/// A running program.
pub(super) struct Run<G> {
    /// `None` once all is given, or the program has closed it.
    stdin: Option<pipe::Sender>,
    body: RequestBody,
    /// Of the body, not written yet.
    piece: Bytes,
    fed: u64,
    stdout: pipe::Receiver,
    buffer: BytesMut,
    _process: G,
}

impl<G> Run<G> {
    /// `process` ends the process tree when it is dropped.
    pub fn new(stdin: OwnedFd, stdout: OwnedFd, process: G, body: RequestBody) -> io::Result<Self> {
        Ok(Self {
            stdin: Some(pipe::Sender::from_owned_fd(stdin)?),
            body,
            piece: Bytes::new(),
            fed: 0,
            stdout: pipe::Receiver::from_owned_fd(stdout)?,
            buffer: BytesMut::new(),
            _process: process,
        })
    }

    /// Gives the program what of the body it takes now.
    fn feed(&mut self, cx: &mut Context<'_>) -> Result<(), Failure> {
        while let Some(stdin) = &self.stdin {
            if self.piece.is_empty() {
                let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) else { return Ok(()) };
                match frame.transpose()? {
                    Some(frame) => self.piece = frame.into_data().unwrap_or_default(),
                    None => self.stdin = None,
                }
                continue;
            }
            let Poll::Ready(ready) = stdin.poll_write_ready(cx) else { return Ok(()) };
            match ready.and_then(|()| stdin.try_write(&self.piece)) {
                Ok(written) => {
                    self.piece.advance(written);
                    self.fed += written as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => self.stdin = None,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

impl<G: Unpin + 'static> Output for Run<G> {
    fn poll_output(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Failure>> {
        self.feed(cx)?;
        self.buffer.reserve(READ_LEN);
        let read = ready!(pin!(self.stdout.read_buf(&mut self.buffer)).poll(cx))?;
        Poll::Ready(Ok((read > 0).then(|| self.buffer.split().freeze())))
    }

    fn fed(&self) -> u64 {
        self.fed
    }

    // A run ends with its answer: what it has declared is what it had to say.
    fn let_finish(self, _: Instant) {}
}

#[cfg(test)]
mod tests;
