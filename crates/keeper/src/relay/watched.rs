//! Observes connections as they are passed on: when a database query begins, and when its response
//! begins.
//!
//! The time of several queries at once counts once: it is how long the instance had at least one
//! open. Not here: recognizing a query (`turns`).

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use nagaya_keeper_api::database_waits::{DatabaseWaits, WaitTotals};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::metrics::KeeperMetrics;

use super::counts::RelayCounts;
use super::turns::QueryTracker;

/// The queries of one instance.
pub struct OpenQueries {
    open: Cell<u32>,
    since: Cell<Instant>,
    counts: Arc<RelayCounts>,
    tally: Arc<DatabaseWaits>,
    metrics: KeeperMetrics,
}

impl OpenQueries {
    pub fn new(counts: Arc<RelayCounts>, tally: Arc<DatabaseWaits>, metrics: KeeperMetrics) -> Self {
        Self { open: Cell::new(0), since: Cell::new(Instant::now()), counts, tally, metrics }
    }

    fn begin(&self) {
        if self.open.replace(self.open.get() + 1) == 0 {
            self.since.set(Instant::now());
        }
    }

    fn end(&self) {
        self.open.set(self.open.get() - 1);
        let us = match self.open.get() {
            0 => u64::try_from(self.since.get().elapsed().as_micros()).unwrap_or(u64::MAX),
            _ => 0,
        };
        self.metrics.database_time.add([], us);
        self.metrics.database_queries.inc();
        let waited_us = self.counts.waited_us.fetch_add(us, Ordering::Relaxed) + us;
        let queries = self.counts.queries.fetch_add(1, Ordering::Relaxed) + 1;
        // A file in memory that has its length already: only a figure would be missing.
        let _ = self.tally.write(WaitTotals { waited_us, queries });
    }
}

/// One conversation.
pub struct DatabaseConversation {
    turns: RefCell<QueryTracker>,
    questions: Rc<OpenQueries>,
}

impl DatabaseConversation {
    pub fn new(questions: Rc<OpenQueries>) -> Rc<Self> {
        Rc::new(Self { turns: RefCell::default(), questions })
    }

    fn heard(&self, side: SpeakingSide, said: &[u8]) {
        let mut turns = self.turns.borrow_mut();
        match side {
            SpeakingSide::Application if turns.asks(said) => self.questions.begin(),
            SpeakingSide::Server if turns.answers(said) => self.questions.end(),
            _ => {}
        }
    }
}

impl Drop for DatabaseConversation {
    fn drop(&mut self) {
        if self.turns.get_mut().end() {
            self.questions.end();
        }
    }
}

/// The side that sends at this end.
#[derive(Debug, Clone, Copy)]
pub enum SpeakingSide {
    Application,
    Server,
}

/// A connection whose incoming bytes are observed.
pub struct WatchedStream<'a, S> {
    stream: &'a mut S,
    side: SpeakingSide,
    conversation: Rc<DatabaseConversation>,
}

impl<'a, S> WatchedStream<'a, S> {
    pub fn new(stream: &'a mut S, side: SpeakingSide, conversation: Rc<DatabaseConversation>) -> Self {
        Self { stream, side, conversation }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WatchedStream<'_, S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        ready!(Pin::new(&mut *this.stream).poll_read(cx, buffer))?;
        this.conversation.heard(this.side, &buffer.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WatchedStream<'_, S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.get_mut().stream).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.get_mut().stream).poll_shutdown(cx)
    }
}
