//! Observes connections as they are passed on: when a database query begins, and when its response
//! begins.
//!
//! The time of several queries at once counts once: it is how long the instance had at least one
//! open. Each question is written down, too, from its first byte to the last byte of its answer
//! before the client sends again. A log-in is a question, and no query. Not here: recognizing a
//! query (`turns`).

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use nagaya_keeper_api::database_waits::{DatabaseQuestion, DatabaseWaits, WaitTotals, now_us};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::metrics::KeeperMetrics;

use super::counts::RelayCounts;
use super::query_tag::find_tag;
use super::turns::QueryTracker;

/// The queries of one instance.
pub struct OpenQueries {
    open: Cell<u32>,
    since: Cell<Instant>,
    /// Number of questions so far.
    questions: Cell<u64>,
    counts: Arc<RelayCounts>,
    tally: Arc<DatabaseWaits>,
    metrics: KeeperMetrics,
}

impl OpenQueries {
    pub fn new(counts: Arc<RelayCounts>, tally: Arc<DatabaseWaits>, metrics: KeeperMetrics) -> Self {
        let (open, since, questions) = (Cell::new(0), Cell::new(Instant::now()), Cell::new(0));
        Self { open, since, questions, counts, tally, metrics }
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
        self.counts.waited_us.fetch_add(us, Ordering::Relaxed);
        self.counts.queries.fetch_add(1, Ordering::Relaxed);
        self.write_totals();
    }

    fn write_totals(&self) {
        let (waited_us, queries) =
            (self.counts.waited_us.load(Ordering::Relaxed), self.counts.queries.load(Ordering::Relaxed));
        // A file in memory: only a figure would be missing.
        let _ = self.tally.write(WaitTotals { waited_us, queries, questions: self.questions.get() });
    }

    /// Writes down a question that begins now. Returns its number.
    fn ask(&self, question: &DatabaseQuestion) -> u64 {
        let number = self.questions.replace(self.questions.get() + 1);
        self.note(number, question);
        self.write_totals();
        number
    }

    /// Writes down what is new about a question.
    fn note(&self, number: u64, question: &DatabaseQuestion) {
        let _ = self.tally.write_question(number, question);
    }
}

/// One conversation.
pub struct DatabaseConversation {
    turns: RefCell<QueryTracker>,
    /// The last question and its number, until the client sends something else.
    question: Cell<Option<(u64, DatabaseQuestion)>>,
    questions: Rc<OpenQueries>,
}

impl DatabaseConversation {
    pub fn new(questions: Rc<OpenQueries>) -> Rc<Self> {
        Rc::new(Self { turns: RefCell::default(), question: Cell::new(None), questions })
    }

    fn heard(&self, side: SpeakingSide, said: &[u8]) {
        match side {
            SpeakingSide::Application => self.heard_application(said),
            SpeakingSide::Server => self.heard_server(said),
        }
    }

    fn heard_application(&self, said: &[u8]) {
        let mut turns = self.turns.borrow_mut();
        let had_logged_in = turns.has_logged_in();
        let is_query = turns.asks(said);
        if is_query {
            self.questions.begin();
        }
        let unanswered = self.question.get().filter(|(_, asked)| asked.ended_us.is_none());
        match unanswered {
            // More of the same, such as the rest of a long query.
            Some((number, question)) if question.request.is_none() => {
                let question = DatabaseQuestion { request: find_tag(said), ..question };
                if question.request.is_some() {
                    self.questions.note(number, &question);
                    self.question.set(Some((number, question)));
                }
            }
            Some(_) => {}
            None if is_query || (!had_logged_in && turns.has_logged_in()) => {
                let question =
                    DatabaseQuestion { begun_us: now_us(), ended_us: None, request: find_tag(said) };
                self.question.set(Some((self.questions.ask(&question), question)));
            }
            None => self.question.set(None),
        }
    }

    fn heard_server(&self, said: &[u8]) {
        self.end_question();
        if self.turns.borrow_mut().answers(said) {
            self.questions.end();
        }
    }
}

impl DatabaseConversation {
    /// The answer to the last question goes on until now.
    fn end_question(&self) {
        if let Some((number, question)) = self.question.get() {
            let question = DatabaseQuestion { ended_us: Some(now_us()), ..question };
            self.questions.note(number, &question);
            self.question.set(Some((number, question)));
        }
    }

    /// One side sends no more. A server that ends without an answer has let the application wait
    /// until now. An application that leaves has waited for nothing: its last message was a
    /// farewell.
    fn heard_end(&self, side: SpeakingSide) {
        let Some((number, question)) = self.question.get() else { return };
        match side {
            _ if question.ended_us.is_some() => {}
            SpeakingSide::Application => self.questions.note(number, &DatabaseQuestion::default()),
            SpeakingSide::Server => self.end_question(),
        }
    }
}

impl Drop for DatabaseConversation {
    fn drop(&mut self) {
        self.heard_end(SpeakingSide::Application);
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
        let read = ready!(Pin::new(&mut *this.stream).poll_read(cx, buffer));
        match &buffer.filled()[before..] {
            [] => this.conversation.heard_end(this.side),
            said => this.conversation.heard(this.side, said),
        }
        Poll::Ready(read)
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

#[cfg(test)]
mod tests {
    use nagaya_keeper_api::database_waits::DatabaseWaitsReader;

    use super::*;

    const TAG: &str = "/*nagaya='4bf92f3577b34da6a3ce929d0e0e4736'*/";

    fn packet(number: u8, body: &[u8]) -> Vec<u8> {
        let len = u32::try_from(body.len()).unwrap().to_le_bytes();
        [&len[..3], &[number], body].concat()
    }

    /// A conversation with MySQL after its log-in, and what the edge sees of it.
    fn logged_in() -> (Rc<DatabaseConversation>, DatabaseWaitsReader) {
        let tally = Arc::new(DatabaseWaits::new().unwrap());
        let reader = DatabaseWaitsReader::new(tally.reader().unwrap());
        let questions = OpenQueries::new(Arc::default(), tally, KeeperMetrics::new());
        let conversation = DatabaseConversation::new(Rc::new(questions));
        conversation.heard(SpeakingSide::Server, &packet(0, b"\x0a8.0.36\0..."));
        conversation.heard(SpeakingSide::Application, &packet(1, &[0; 60]));
        conversation.heard(SpeakingSide::Server, &packet(2, b"\0\0\0"));
        (conversation, reader)
    }

    /// All questions so far, and the number of queries that are answered.
    fn seen(reader: &DatabaseWaitsReader) -> (Vec<DatabaseQuestion>, u64) {
        let totals = reader.read().unwrap();
        (reader.questions(0, totals.questions).unwrap(), totals.queries)
    }

    #[test]
    fn a_question_goes_to_the_last_byte_of_its_answer() {
        let (conversation, reader) = logged_in();
        let (log_in, queries) = seen(&reader);
        assert_eq!((log_in.len(), queries), (1, 0), "a log-in is a question, and no query");
        assert!(log_in[0].ended_us.is_some());
        conversation.heard(SpeakingSide::Application, &packet(0, b"\x03SELECT 1"));
        let begun = seen(&reader).0[1];
        assert_eq!((begun.ended_us, begun.request), (None, None));
        conversation.heard(SpeakingSide::Server, b"answer");
        let first = seen(&reader).0[1].ended_us.unwrap();
        while now_us() == first {}
        conversation.heard(SpeakingSide::Server, b"the rest of it");
        let (all, queries) = seen(&reader);
        let last = all[1].ended_us.unwrap();
        assert!(begun.begun_us <= first && first < last && queries == 1);
        // A command without an answer ends it, and begins nothing.
        conversation.heard(SpeakingSide::Application, &packet(0, b"\x19\x01\0\0\0"));
        while now_us() == last {}
        conversation.heard(SpeakingSide::Server, b"nothing that was asked for");
        assert_eq!(seen(&reader), (all, 1));
    }

    #[test]
    fn a_tag_is_found_in_each_part_of_a_long_query() {
        let (conversation, reader) = logged_in();
        let id = u128::from_str_radix(&TAG[10..42], 16).ok();
        let query = packet(0, &[b"\x03", &[b'x'; 300][..], TAG.as_bytes()].concat());
        for split in [1, 8, 300] {
            let (first, rest) = query.split_at(split);
            conversation.heard(SpeakingSide::Application, first);
            conversation.heard(SpeakingSide::Application, rest);
            assert_eq!(seen(&reader).0.last().unwrap().request, id, "split at {split}");
            conversation.heard(SpeakingSide::Server, b"answer");
        }
    }

    #[test]
    fn an_end_is_an_answer_of_a_server_and_a_farewell_of_a_client() {
        for (side, is_question) in [(SpeakingSide::Server, true), (SpeakingSide::Application, false)] {
            let (conversation, reader) = logged_in();
            conversation.heard(SpeakingSide::Application, &packet(0, b"\x03SELECT 1"));
            assert_eq!(seen(&reader).0[1].ended_us, None);
            conversation.heard_end(side);
            let last = seen(&reader).0[1];
            assert_eq!((last.ended_us.is_some(), last.begun_us > 0), (is_question, is_question), "{side:?}");
            drop(conversation);
            assert_eq!(seen(&reader).0[1], last, "{side:?}: the rest changes nothing");
        }
    }
}
