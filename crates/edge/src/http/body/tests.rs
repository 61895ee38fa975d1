//! Tests of outgoing bodies: content, lengths, what is held, and what the receipt says.

use std::cell::RefCell;
use std::io::Write;
use std::sync::Arc;

use http::StatusCode;
use http_body_util::BodyExt;
use nagaya_records::cell::Confinement;
use proptest::prelude::*;

use super::*;
use crate::record::execution::CellExecution;

/// A file with `content`, already without a name.
fn file(content: &[u8]) -> Arc<OwnedFd> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(content).unwrap();
    Arc::new(file.into())
}

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap()
        .block_on(future)
}

/// What receipts were told.
type Notes = Rc<RefCell<Vec<(u64, bool)>>>;

struct Noted(Notes);

impl SendObserver for Noted {
    fn sent(&mut self, bytes: u64, complete: bool) {
        self.0.borrow_mut().push((bytes, complete));
    }
}

/// A response with this body, and where its receipt is noted.
fn response(body: ResponseBody) -> (Response, Notes) {
    let noted = Notes::default();
    let mut response = Response::new(StatusCode::OK).with_body(body);
    response.receipt = Some(Box::new(Noted(Rc::clone(&noted))));
    (response, noted)
}

proptest! {
    #[test]
    fn parts_come_out_in_order_and_whole(
        parts in prop::collection::vec((any::<bool>(), 0usize..200_000, 0usize..50), 0..5),
    ) {
        let mut expected = Vec::new();
        let parts = parts.into_iter().enumerate().map(|(n, (in_file, len, offset))| {
            let content: Vec<u8> = (0..len + offset).map(|i| (i * 7 + n) as u8).collect();
            expected.extend_from_slice(&content[offset..]);
            if in_file {
                BodyPart::File { file: file(&content), offset: offset as u64, len: len as u64 }
            } else {
                BodyPart::Bytes(Bytes::from(content).slice(offset..))
            }
        }).collect();
        let (mut response, noted) = response(ResponseBody::Parts(parts));
        let body = OutgoingBody::take(&mut response, true);
        prop_assert_eq!(body.size_hint().exact(), Some(expected.len() as u64));
        let got = block_on(body.collect()).unwrap().to_bytes();
        prop_assert!(got == expected);
        prop_assert_eq!(noted.take(), vec![(expected.len() as u64, true)]);
    }
}

#[test]
fn a_file_that_shrinks_is_an_error_and_not_a_short_body() {
    let (mut response, noted) = response(ResponseBody::File { file: file(b"12345"), offset: 2, len: 10 });
    let error = block_on(OutgoingBody::take(&mut response, true).collect()).unwrap_err();
    assert!(matches!(error, BodyError::File(_)), "{error}");
    assert_eq!(noted.take(), [(3, false)]);
}

#[test]
fn a_body_given_up_before_a_byte_went_out_closes_its_account() {
    let (mut response, noted) = response(ResponseBody::Bytes(Bytes::from_static(b"abc")));
    let body = OutgoingBody::take(&mut response, true);
    drop(response);
    assert_eq!(noted.take(), []);
    drop(body);
    assert_eq!(noted.take(), [(0, false)]);
}

#[test]
fn without_a_body_nothing_is_missing() {
    let (mut response, noted) = response(ResponseBody::Bytes(Bytes::from_static(b"abc")));
    let body = OutgoingBody::take(&mut response, false);
    assert!(body.is_end_stream());
    drop(body);
    assert_eq!(noted.take(), [(0, true)]);
}

#[test]
fn only_the_client_can_stall() {
    block_on(async {
        let patience = Duration::from_secs(30);
        let pace = SendProgress::default();
        let begun = Instant::now();
        let backend = async {
            tokio::time::sleep(patience * 5).await;
            pace.clients_turn();
            tokio::time::sleep(patience / 2).await;
            pace.clients_turn();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = backend => {}
            () = pace.client_stalled(patience, || None) => {}
        }
        let took = begun.elapsed();
        assert!(took >= patience * 13 / 2 && took < patience * 8, "{took:?}");
    });
}

#[test]
fn a_client_that_empties_its_connection_slowly_has_not_stalled() {
    block_on(async {
        let patience = Duration::from_secs(30);
        for queued in [10u32, 1, 0] {
            let pace = SendProgress::default();
            pace.clients_turn();
            let (begun, left) = (Instant::now(), Cell::new(u64::from(queued)));
            // Each look finds less, until there is nothing.
            let look = || Some(left.replace(left.get().saturating_sub(1)));
            pace.client_stalled(patience, look).await;
            // Two looks in each period, and one period more in which nothing changes.
            assert_eq!(begun.elapsed(), patience * (queued.div_ceil(2) + 1), "{queued}");
        }
    });
}

#[test]
fn a_limited_body_comes_slowly_and_whole() {
    let content: Vec<u8> = (0..300_000u32).map(|n| (n >> 4) as u8).collect();
    let (mut response, noted) =
        response(ResponseBody::File { file: file(&content), offset: 0, len: content.len() as u64 });
    let execution = CellExecution::new(Confinement::default());
    response.flow = BodyPacer::limited(100_000, Rc::<CellExecution>::clone(&execution)).map(Box::new);
    block_on(async {
        let start = Instant::now();
        let body = OutgoingBody::take(&mut response, true);
        assert_eq!(body.size_hint().exact(), Some(300_000));
        assert!(body.collect().await.unwrap().to_bytes() == content);
        let took = start.elapsed();
        assert!((Duration::from_millis(2900)..=Duration::from_secs(3)).contains(&took), "{took:?}");
    });
    assert!(execution.paced_us() > 2_900_000);
    assert_eq!(noted.take(), [(300_000, true)]);
}
