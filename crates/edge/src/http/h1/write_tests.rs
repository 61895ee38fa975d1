//! Facts about limited bodies on their way to an HTTP/1 client, over a real connection.

use std::io::Write as _;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use nagaya_records::cell::Confinement;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::record::execution::CellExecution;

const ASKED: ResponseContext = ResponseContext {
    version: Version::HTTP_11,
    is_head: false,
    keep_alive: true,
    trailers: false,
    needs_client: true,
};

/// Both ends of a connection.
async fn connection() -> (Http1Wire<TcpStream>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (server, _) = listener.accept().await.unwrap();
    (Http1Wire::new(server, BytesMut::new(), Duration::from_secs(10)), client)
}

fn file(content: &[u8]) -> ResponseBody {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(content).unwrap();
    ResponseBody::File { file: Arc::new(file.into()), offset: 0, len: content.len() as u64 }
}

/// `body` at `rate` bytes per second, as the client gets it; how it ended for the server; and how long it was held back.
async fn sent(body: ResponseBody, rate: u64) -> (Vec<u8>, SendResult, u64) {
    let (wire, mut client) = connection().await;
    let execution = CellExecution::new(Confinement::default());
    let mut response = Response::new(StatusCode::OK).with_body(body);
    response.flow = BodyPacer::limited(rate, Rc::<CellExecution>::clone(&execution)).map(Box::new);
    let sending = async {
        let sent = respond(&wire, ASKED, response).await;
        wire.shutdown().await.unwrap();
        sent
    };
    let mut got = Vec::new();
    let (sent, read) = tokio::join!(sending, client.read_to_end(&mut got));
    read.unwrap();
    let head = got.windows(4).position(|end| end == b"\r\n\r\n").expect("a head") + 4;
    (got.split_off(head), sent, execution.paced_us())
}

#[tokio::test]
async fn a_limited_body_is_sent_slowly_and_whole_however_it_is_made() {
    let content: Vec<u8> = (0..60_000u32).map(|n| (n >> 3) as u8).collect();
    let part = |from: usize, to: usize| BodyPart::Bytes(Bytes::copy_from_slice(&content[from..to]));
    let ResponseBody::File { file: of, .. } = file(&content) else { unreachable!("it was made one") };
    let parts = vec![part(0, 10_000), BodyPart::File { file: of, offset: 10_000, len: 50_000 }];
    for body in
        [file(&content), ResponseBody::Bytes(Bytes::copy_from_slice(&content)), ResponseBody::Parts(parts)]
    {
        let (got, sent, paced_us) = sent(body, 200_000).await;
        assert!(got == content);
        let whole = SendResult { bytes: 60_000, complete: true, keep_alive: true, is_visibly_short: false };
        assert_eq!(sent, whole);
        assert!(paced_us > 200_000, "{paced_us} us of 300 ms");
    }
}

#[tokio::test]
async fn an_empty_body_needs_no_turn() {
    let (got, sent, paced_us) = sent(ResponseBody::Bytes(Bytes::new()), 1).await;
    assert!(got.is_empty() && sent.complete);
    assert_eq!(paced_us, 0);
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_between_two_slices() {
    let (wire, client) = connection().await;
    let execution = CellExecution::new(Confinement::default());
    let mut response = Response::new(StatusCode::OK).with_body(file(&[7; 100]));
    // A byte each second: the second turn is far away, and nothing is written until then.
    response.flow = BodyPacer::limited(1, Rc::<CellExecution>::clone(&execution)).map(Box::new);
    let leaving = async {
        let mut first = [0; 1];
        let mut client = client;
        client.read_exact(&mut first).await.unwrap();
        drop(client);
    };
    let (sent, ()) = tokio::join!(respond(&wire, ASKED, response), leaving);
    assert!(!sent.complete && sent.bytes < 100, "{sent:?}");
}
