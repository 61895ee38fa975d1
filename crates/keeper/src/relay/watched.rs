//! Listening to connections as they are passed on: when a question to a database begins, and when its answer does.
//!
//! Of several questions at once the time counts once: it is how long the instance had at least one open. Not here: what
//! a question is (`turns`).

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Counts;
use super::turns::Turns;
use crate::metrics::Metrics;
use crate::tally::{Tally, Totals};

/// The questions of one instance.
pub struct Questions {
    open: Cell<u32>,
    since: Cell<Instant>,
    counts: Arc<Counts>,
    tally: Arc<Tally>,
    metrics: Metrics,
}

impl Questions {
    pub fn new(counts: Arc<Counts>, tally: Arc<Tally>, metrics: Metrics) -> Self {
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
        let _ = self.tally.write(Totals { waited_us, queries });
    }
}

/// One conversation.
pub struct Conversation {
    turns: RefCell<Turns>,
    questions: Rc<Questions>,
}

impl Conversation {
    pub fn new(questions: Rc<Questions>) -> Rc<Self> {
        Rc::new(Self { turns: RefCell::default(), questions })
    }

    fn heard(&self, side: Side, said: &[u8]) {
        let mut turns = self.turns.borrow_mut();
        match side {
            Side::Application if turns.asks(said) => self.questions.begin(),
            Side::Server if turns.answers(said) => self.questions.end(),
            _ => {}
        }
    }
}

impl Drop for Conversation {
    fn drop(&mut self) {
        if self.turns.get_mut().end() {
            self.questions.end();
        }
    }
}

/// Who speaks at this end.
#[derive(Debug, Clone, Copy)]
pub enum Side {
    Application,
    Server,
}

/// A connection whose incoming bytes are listened to.
pub struct Watched<'a, S> {
    stream: &'a mut S,
    side: Side,
    conversation: Rc<Conversation>,
}

impl<'a, S> Watched<'a, S> {
    pub fn new(stream: &'a mut S, side: Side, conversation: Rc<Conversation>) -> Self {
        Self { stream, side, conversation }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<'_, S> {
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

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<'_, S> {
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
