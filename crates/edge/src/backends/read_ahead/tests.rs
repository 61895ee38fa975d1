//! Answers of backends that a test sees through: what was taken of them, and when they are free.

use std::cell::Cell;

use http_body_util::BodyExt;
use tokio::sync::mpsc;
use tokio::task::{LocalSet, yield_now};

use super::*;
use crate::http::body_adapters::testing::received;
use crate::http::body_adapters::{FrameResult, PolledBody};
use crate::spool::testing::spool;

/// A backend that says so many pieces, and notes how many were taken and whether it is free.
struct Backend {
    pieces: u32,
    len: usize,
    taken: Rc<Cell<u32>>,
    is_free: Rc<Cell<bool>>,
    breaks: bool,
}

impl Backend {
    fn next(&mut self) -> Option<FrameResult> {
        let n = self.taken.get();
        if n == self.pieces {
            return std::mem::take(&mut self.breaks).then_some(Err(BodyError::Stalled));
        }
        self.taken.set(n + 1);
        Some(Ok(Frame::data(Bytes::from(vec![n as u8; self.len]))))
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.is_free.set(true);
    }
}

struct Answer {
    body: Option<BodyStream>,
    queue: Rc<RefCell<BufferQueue>>,
    taken: Rc<Cell<u32>>,
    is_free: Rc<Cell<bool>>,
}

fn answer(spool: &Arc<Spool>, pieces: u32, len: usize, breaks: bool) -> Answer {
    let (taken, is_free) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
    let mut backend = Backend { pieces, len, taken: Rc::clone(&taken), is_free: Rc::clone(&is_free), breaks };
    let tenant = TenantName::new("alice").unwrap();
    let body = PolledBody::new(move |_| Poll::Ready(backend.next()));
    let ahead = take_ahead(spool, &tenant, Rc::new(NoWork), Box::pin(body)).unwrap();
    let queue = Rc::clone(&ahead.queue);
    Answer { body: Some(Box::pin(ahead)), queue, taken, is_free }
}

async fn until(what: impl Fn() -> bool) {
    while !what() {
        yield_now().await;
    }
}

/// How many pieces were taken once there is no room for more: nobody reads.
async fn held_back(answer: &Answer) -> u32 {
    until(|| answer.queue.borrow().writer.is_some()).await;
    answer.taken.get()
}

#[tokio::test]
async fn a_backend_is_free_before_its_client_reads() {
    let (spool, _directory) = spool(64 << 20, 64 << 20);
    LocalSet::new()
        .run_until(async {
            for (pieces, len) in [(3, 10), (100, 8 << 10), (40, 1 << 20), (100_000, 7)] {
                let mut answer = answer(&spool, pieces, len, false);
                until(|| answer.is_free.get()).await;
                let body = answer.body.take().unwrap();
                let whole = body.collect().await.unwrap().to_bytes();
                assert_eq!(whole.len(), pieces as usize * len);
                let right =
                    whole.chunks(len).enumerate().all(|(n, piece)| piece.iter().all(|&b| b == n as u8));
                assert!(right, "{pieces} pieces of {len} come in their order");
                drop(answer);
                // Their room is given back; a file's by another thread.
                until(|| spool.usage() == (0, 0)).await;
            }
        })
        .await;
}

#[tokio::test]
async fn without_room_the_backend_goes_at_its_clients_pace() {
    for (bytes, most) in [(0, 3), (4 << 20, 80)] {
        let (spool, _directory) = spool(bytes, bytes);
        LocalSet::new()
            .run_until(async {
                let mut answer = answer(&spool, 1000, 64 << 10, false);
                let taken = held_back(&answer).await;
                assert!(taken <= most + 5, "{taken} pieces without a reader, in {bytes} bytes");
                let whole = answer.body.take().unwrap().collect().await.unwrap().to_bytes();
                assert_eq!(whole.len(), 1000 * (64 << 10));
                let right = whole.chunks(64 << 10).enumerate().all(|(n, piece)| piece[0] == n as u8);
                assert!(right, "in their order");
            })
            .await;
    }
}

#[tokio::test]
async fn an_answer_that_breaks_off_does_so_after_what_was_said() {
    let (spool, _directory) = spool(64 << 20, 64 << 20);
    LocalSet::new()
        .run_until(async {
            let mut answer = answer(&spool, 50, 64 << 10, true);
            until(|| answer.is_free.get()).await;
            let mut body = answer.body.take().unwrap();
            let mut got = 0;
            let end = loop {
                match body.frame().await {
                    Some(Ok(frame)) => got += frame.into_data().unwrap().len(),
                    end => break end,
                }
            };
            assert_eq!(got, 50 * (64 << 10));
            assert!(matches!(end, Some(Err(BodyError::Stalled))));
        })
        .await;
}

#[tokio::test]
async fn a_client_that_leaves_frees_the_backend() {
    let (spool, _directory) = spool(0, 0);
    LocalSet::new()
        .run_until(async {
            let mut answer = answer(&spool, 1000, 64 << 10, false);
            held_back(&answer).await;
            assert!(!answer.is_free.get());
            drop(answer.body.take());
            until(|| answer.is_free.get()).await;
        })
        .await;
    assert_eq!(spool.usage(), (0, 0));
}

#[tokio::test]
async fn each_piece_reaches_a_waiting_client_at_once() {
    let (spool, _directory) = spool(64 << 20, 64 << 20);
    LocalSet::new()
        .run_until(async {
            let (say, told) = mpsc::channel::<FrameResult>(1);
            let tenant = TenantName::new("alice").unwrap();
            let ahead = take_ahead(&spool, &tenant, Rc::new(NoWork), Box::pin(received(told))).unwrap();
            let mut body: BodyStream = Box::pin(ahead);
            for piece in [&b"one"[..], b"two"] {
                say.send(Ok(Frame::data(Bytes::from_static(piece)))).await.unwrap();
                assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), piece);
            }
            drop(say);
            assert!(body.frame().await.is_none());
        })
        .await;
}

#[test]
fn event_streams_and_what_asks_for_it_pass_as_they_come() {
    for (name, value, passes) in [
        ("content-type", "text/event-stream", true),
        ("content-type", "Text/Event-Stream; charset=utf-8", true),
        ("content-type", "text/html", false),
        ("x-accel-buffering", "no", true),
        ("x-accel-buffering", "yes", false),
    ] {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        assert_eq!(is_passed_as_it_comes(&headers), passes, "{name}: {value}");
    }
}

/// Of a backend that holds nothing.
struct NoWork;

impl BackendWork for NoWork {
    fn end(&self, _: bool) {}
}
