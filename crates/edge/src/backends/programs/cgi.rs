//! Runs a CGI program once (RFC 3875): the request's body into its standard input, its standard
//! output out.
//!
//! Not here: starting it, its uid and limits (`keeper`), its variables (`environment`), the
//! meaning of its output (`answer`).
//!
//! Dropping this ends the process tree: after the answer, or because it took too long. A program
//! that does not read its input is treated like any other.
//!
//! A program whose client has left goes on for a while, up to a bound of its site's record
//! (`patience::LingerTimes`). After a moment its output is closed, and the kernel ends it when it
//! writes (`SIGPIPE`). That holds from the moment of its request (`start`). Its request's permit is
//! kept as long (`execution`). So clients that come and go never have more programs running than
//! may run.

pub mod start;

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http_body::Body;
use nagaya_base::RequestId;
use nagaya_keeper_api::client::ProcessGuard;
use nagaya_keeper_api::protocol::ProcessExit;
use nagaya_records::SiteName;
use nagaya_records::cell::RequestUsage;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::time::{timeout, timeout_at};

use crate::backends::programs::after::BackgroundJobs;
use crate::backends::programs::answer::{FailureInquiry, OutputSource, ProgramFailure};
use crate::backends::programs::patience::LingerTimes;
use crate::backends::programs::responder::STILL_AT_WORK;
use crate::backends::programs::script::CgiRunningGuard;
use crate::http::message::RequestBody;
use crate::record::execution::PendingUsage;

pub(super) use start::StartingCgi;

/// Bytes read from standard output at once: the default capacity of a pipe.
const READ_LEN: usize = 64 << 10;

/// Maximum time until the keeper ends a program's tree and reports its usage.
const END_MAX: Duration = Duration::from_secs(2);

/// The process tree of one program. Dropping it ends the tree, and the request gets its usage.
pub(super) struct CgiTree {
    whose: ProgramLabel,
    held: Option<(ProcessGuard, PendingUsage)>,
    after: Rc<BackgroundJobs>,
    _running: CgiRunningGuard,
}

impl CgiTree {
    pub fn new(
        whose: ProgramLabel,
        guard: ProcessGuard,
        due: PendingUsage,
        after: Rc<BackgroundJobs>,
        running: CgiRunningGuard,
    ) -> Self {
        Self { whose, held: Some((guard, due)), after, _running: running }
    }

    /// Completes once the program has ended by itself.
    async fn ended(&self) {
        if let Some((guard, _)) = &self.held {
            // If the keeper has ended, it has ended the program, too.
            let _ = guard.ended().await;
        }
    }

    fn say_cut(&self) {
        let ProgramLabel { site, script, request } = &self.whose;
        tracing::warn!(
            code = %STILL_AT_WORK, %site, %request,
            "{script} is ended, which was still at work when its site's linger_seconds after its client had left were over"
        );
    }
}

/// Names the program for the log.
pub struct ProgramLabel {
    pub site: SiteName,
    pub script: String,
    pub request: RequestId,
}

async fn end(guard: ProcessGuard, due: PendingUsage) -> Option<ProcessExit> {
    let (exit, usage) = timeout(END_MAX, guard.end()).await.ok()?.ok()?;
    // Without cgroups the program's own count is the only one.
    due.report(RequestUsage { cpu_us: usage.cpu_us.max(exit.cpu_us), ..usage });
    Some(exit)
}

impl Drop for CgiTree {
    fn drop(&mut self) {
        let Some((guard, due)) = self.held.take() else { return };
        self.after.run(async move {
            end(guard, due).await;
        });
    }
}

/// A running program.
pub(super) struct CgiRun {
    /// `None` once all is written, or the program has closed it.
    stdin: Option<pipe::Sender>,
    body: RequestBody,
    /// Bytes of the body that are not written yet.
    piece: Bytes,
    fed: u64,
    stdout: pipe::Receiver,
    buffer: BytesMut,
    tree: CgiTree,
}

impl CgiRun {
    pub fn new(stdin: OwnedFd, stdout: OwnedFd, tree: CgiTree, body: RequestBody) -> io::Result<Self> {
        Ok(Self {
            stdin: Some(pipe::Sender::from_owned_fd(stdin)?),
            body,
            piece: Bytes::new(),
            fed: 0,
            stdout: pipe::Receiver::from_owned_fd(stdout)?,
            buffer: BytesMut::new(),
            tree,
        })
    }

    /// Writes as much of the body as the program accepts now.
    fn feed(&mut self, cx: &mut Context<'_>) -> Result<(), ProgramFailure> {
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

impl CgiRun {
    /// Waits until the time limit. Dropping this ends the rest.
    async fn linger(self, linger: LingerTimes) {
        let Self { stdin, mut stdout, mut buffer, tree, .. } = self;
        drop(stdin);
        let read = async {
            loop {
                buffer.clear();
                buffer.reserve(READ_LEN);
                if !stdout.read_buf(&mut buffer).await.is_ok_and(|read| read > 0) {
                    return;
                }
            }
        };
        if timeout_at(linger.read_until, read).await.is_ok() || linger.end <= linger.read_until {
            return;
        }
        drop(stdout);
        if timeout_at(linger.end, tree.ended()).await.is_err() {
            tree.say_cut();
        }
    }
}

impl OutputSource for CgiRun {
    fn poll_output(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, ProgramFailure>> {
        self.feed(cx)?;
        self.buffer.reserve(READ_LEN);
        let read = ready!(pin!(self.stdout.read_buf(&mut self.buffer)).poll(cx))?;
        Poll::Ready(Ok((read > 0).then(|| self.buffer.split().freeze())))
    }

    fn fed(&self) -> u64 {
        self.fed
    }

    fn let_finish(self, linger: LingerTimes) {
        // It waits for more input than will come.
        if self.stdin.is_none() || self.body.is_end_stream() && self.piece.is_empty() {
            let after = Rc::clone(&self.tree.after);
            after.run(self.linger(linger));
        }
    }

    fn autopsy(mut self) -> FailureInquiry {
        let held = self.tree.held.take();
        Box::pin(async move {
            let (guard, due) = held?;
            let exit = end(guard, due).await?;
            exit.out_of_memory.then_some(ProgramFailure::OutOfMemory)
        })
    }
}

#[cfg(test)]
mod tests;
