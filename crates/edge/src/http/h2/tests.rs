//! Tests of HTTP/2 connections: h2's client for honest ones, raw frames for the others. Time is simulated.

use std::cell::{Cell, RefCell};
use std::future::pending;
use std::io;
use std::io::Write;
use std::sync::Arc;
use std::task::Context;

use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, Request as HttpRequest};
use http_body::Frame;
use http_body_util::{BodyExt, Full};
use nagaya_base::RequestId;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf, duplex};
use tokio::task::{JoinHandle, LocalSet, spawn_local, yield_now};
use tokio::time::Instant;

use super::*;
use crate::http::connections::OpenConnections;
use crate::http::handler::PENDING_RESETS_MAX;
use crate::http::message::{BodyError, SendObserver};

/// An account that shows whether it is closed.
struct Held(#[expect(dead_code, reason = "it is counted")] Rc<()>);

impl SendObserver for Held {
    fn sent(&mut self, _: u64, _: bool) {}
}

type Answer = Pin<Box<dyn Future<Output = Response>>>;

/// A thread of the edge with one way to answer.
struct World {
    limits: Rc<EdgeLimits>,
    answer: Box<dyn Fn(Request) -> Answer>,
    refused: RefCell<Vec<&'static str>>,
    connections: Rc<OpenConnections>,
}

impl ConnectionHost for World {
    fn limits(&self) -> Rc<EdgeLimits> {
        Rc::clone(&self.limits)
    }

    fn request_id(&self) -> RequestId {
        RequestId(7)
    }

    async fn serve(&self, request: Request) -> Response {
        (self.answer)(request).await
    }

    fn refuse(&self, _: &ConnInfo, refusal: Refusal, id: RequestId) -> Response {
        self.refused.borrow_mut().push(refusal.row().reason);
        refusal.into_response(id)
    }

    fn enter(&self) -> ConnectionGuard {
        self.connections.enter()
    }

    fn measures(&self) -> bool {
        true
    }
}

fn world<A: Future<Output = Response> + 'static>(answer: impl Fn(Request) -> A + 'static) -> Rc<World> {
    limited_world(EdgeLimits::default(), answer)
}

fn limited_world<A: Future<Output = Response> + 'static>(
    limits: EdgeLimits,
    answer: impl Fn(Request) -> A + 'static,
) -> Rc<World> {
    Rc::new(World {
        limits: Rc::new(limits),
        answer: Box::new(move |request| Box::pin(answer(request))),
        refused: RefCell::default(),
        connections: Rc::default(),
    })
}

fn run<F: Future>(test: F) -> F::Output {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    LocalSet::new().block_on(&runtime, test)
}

/// Begins to serve `world`; the client's end, and the server's task.
fn listen(world: &Rc<World>) -> (DuplexStream, JoinHandle<Result<(), h2::Error>>) {
    let (near, far) = duplex(1 << 20);
    let conn = Rc::new(ConnInfo {
        peer: "192.0.2.7:5000".parse().unwrap(),
        local: "192.0.2.1:443".parse().unwrap(),
        tls: None,
        carried: None,
        network: None,
    });
    (near, spawn_local(serve(far, BytesMut::new(), conn, world.enter(), Rc::clone(world))))
}

async fn connect(io: DuplexStream) -> (SendRequest<Bytes>, JoinHandle<Result<(), h2::Error>>) {
    let (client, connection) = h2::client::handshake(io).await.unwrap();
    (client, spawn_local(connection))
}

fn get(path: &str) -> HttpRequest<()> {
    HttpRequest::get(format!("https://example.org{path}")).body(()).unwrap()
}

fn bytes(body: &'static str) -> Response {
    Response::new(StatusCode::OK).with_body(ResponseBody::Bytes(Bytes::from_static(body.as_bytes())))
}

async fn read_all(body: &mut h2::RecvStream) -> Result<Vec<u8>, h2::Error> {
    let mut all = Vec::new();
    while let Some(data) = body.data().await {
        let data = data?;
        body.flow_control().release_capacity(data.len())?;
        all.extend_from_slice(&data);
    }
    Ok(all)
}

/// Lets every task run until `done` holds.
async fn until(mut done: impl FnMut() -> bool) {
    while !done() {
        yield_now().await;
    }
}

#[test]
fn a_crowd_of_streams_lets_others_run() {
    run(async {
        let served = Rc::new(Cell::new(0));
        let counted = Rc::clone(&served);
        let world = world(move |_| {
            counted.set(counted.get() + 1);
            async { bytes("here") }
        });
        let (near, _server) = listen(&world);
        let (client, _connection) = connect(near).await;
        let mut client = client.ready().await.unwrap();
        // The server's settings have come with its answer.
        client.send_request(get("/"), true).unwrap().0.await.unwrap();
        let longest = Rc::new(Cell::new(0));
        let (seen, most) = (Rc::clone(&served), Rc::clone(&longest));
        let _other = spawn_local(async move {
            let mut before = seen.get();
            loop {
                most.set(most.get().max(seen.get() - before));
                before = seen.get();
                super::streams::behind_others().await;
            }
        });
        let mut answers = Vec::new();
        for _ in 0..TOGETHER_MAX + 30 {
            client = client.ready().await.unwrap();
            answers.push(client.send_request(get("/"), true).unwrap().0);
        }
        for answer in answers {
            assert_eq!(answer.await.unwrap().status(), StatusCode::OK);
        }
        assert_eq!(served.get(), TOGETHER_MAX + 31);
        // Together, and not all of them.
        assert_eq!(longest.get(), TOGETHER_MAX);
    });
}

#[test]
fn bodies_and_trailers_go_both_ways() {
    run(async {
        let world = world(|request: Request| async move {
            assert_eq!((&*request.head.host, &*request.head.path), ("example.org", "/echo"));
            let all = request.body.collect().await.unwrap();
            let mut trailers = HeaderMap::new();
            trailers.insert("seen", all.trailers().unwrap()["sum"].clone());
            let data = all.to_bytes();
            let trailed = Full::new(data).map_err(|never| match never {});
            let trailed = trailed.with_trailers(std::future::ready(Some(Ok(trailers))));
            Response::new(StatusCode::OK).with_body(ResponseBody::stream(trailed))
        });
        let (io, _server) = listen(&world);
        let (mut client, _connection) = connect(io).await;
        let request = HttpRequest::post("https://example.org/echo").body(()).unwrap();
        let (response, mut body) = client.send_request(request, false).unwrap();
        body.send_data(Bytes::from_static(b"hello"), false).unwrap();
        let mut trailers = HeaderMap::new();
        trailers.insert("sum", HeaderValue::from_static("42"));
        body.send_trailers(trailers).unwrap();
        let mut response = response.await.unwrap();
        assert!(response.headers().contains_key("date") && response.headers()["server"] == "nagaya");
        assert_eq!(read_all(response.body_mut()).await.unwrap(), b"hello");
        assert_eq!(response.body_mut().trailers().await.unwrap().unwrap()["seen"], "42");
    });
}

#[test]
fn files_are_sent_whole_and_heads_alone() {
    run(async {
        let content: Vec<u8> = (0..300_000u32).map(|n| n as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&content).unwrap();
        let file: Arc<std::os::fd::OwnedFd> = Arc::new(file.into());
        let world = world(move |request: Request| {
            let body = ResponseBody::File { file: Arc::clone(&file), offset: 0, len: 300_000 };
            let status = if &*request.head.path == "/none" { 204 } else { 200 };
            let response = Response::new(StatusCode::from_u16(status).unwrap()).with_body(body);
            async move { response }
        });
        let (io, _server) = listen(&world);
        let (mut client, _connection) = connect(io).await;
        let mut response = client.send_request(get("/"), true).unwrap().0.await.unwrap();
        assert_eq!(response.headers()["content-length"], "300000");
        assert!(read_all(response.body_mut()).await.unwrap() == content);

        let head = HttpRequest::head("https://example.org/").body(()).unwrap();
        let mut response = client.send_request(head, true).unwrap().0.await.unwrap();
        assert_eq!(response.headers()["content-length"], "300000");
        assert!(response.body_mut().data().await.is_none());

        let response = client.send_request(get("/none"), true).unwrap().0.await.unwrap();
        assert_eq!(response.status(), 204);
        assert!(!response.headers().contains_key("content-length") && response.body().is_end_stream());
    });
}

/// A handler that never answers `/wait`, and answers everything else with a body that never comes.
fn endless(guard: &Rc<()>) -> Rc<World> {
    let guard = Rc::clone(guard);
    world(move |request: Request| {
        let guard = Rc::clone(&guard);
        async move {
            if &*request.head.path == "/wait" {
                pending::<()>().await;
            }
            let mut response = bytes("");
            response.receipt = Some(Box::new(Held(guard)));
            response.body = ResponseBody::stream(Never);
            response
        }
    })
}

struct Never;

impl http_body::Body for Never {
    type Data = Bytes;
    type Error = BodyError;
    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        Poll::Pending
    }
}

#[test]
fn a_reset_gives_back_what_the_request_holds() {
    for path in ["/wait", "/body"] {
        run(async {
            let guard = Rc::new(());
            let world = endless(&guard);
            let kept = Rc::strong_count(&guard);
            let (io, _server) = listen(&world);
            let (mut client, _connection) = connect(io).await;
            let (response, mut stream) = client.send_request(get(path), true).unwrap();
            until(|| Rc::strong_count(&guard) > kept).await;
            let response = if path == "/body" { Some(response.await.unwrap()) } else { None };
            stream.send_reset(h2::Reason::CANCEL);
            until(|| Rc::strong_count(&guard) == kept).await;
            drop(response);
        });
    }
}

#[test]
fn a_client_that_leaves_gives_back_what_its_requests_hold() {
    run(async {
        let guard = Rc::new(());
        let world = endless(&guard);
        let kept = Rc::strong_count(&guard);
        let (io, server) = listen(&world);
        let (mut client, connection) = connect(io).await;
        let _waiting: Vec<_> =
            ["/wait", "/body"].map(|path| client.send_request(get(path), true).unwrap()).into();
        until(|| Rc::strong_count(&guard) == kept + 2).await;
        connection.abort();
        until(|| Rc::strong_count(&guard) == kept).await;
        let _ = server.await.unwrap();
    });
}

#[test]
fn draining_answers_what_was_begun_and_then_ends() {
    run(async {
        let gate = Rc::new(tokio::sync::Notify::new());
        let opened = Rc::clone(&gate);
        let world = world(move |_| {
            let gate = Rc::clone(&opened);
            async move {
                gate.notified().await;
                bytes("done")
            }
        });
        let (io, server) = listen(&world);
        let (mut client, connection) = connect(io).await;
        let (response, _) = client.send_request(get("/"), true).unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
        world.connections.drain();
        // GOAWAY makes the client's end of the connection refuse new requests.
        tokio::time::sleep(Duration::from_millis(1)).await;
        gate.notify_one();
        let mut response = response.await.unwrap();
        assert_eq!(read_all(response.body_mut()).await.unwrap(), b"done");
        assert!(client.ready().await.is_err(), "no further request is taken");
        server.await.unwrap().unwrap();
        connection.await.unwrap().unwrap();
    });
}

#[test]
fn an_idle_connection_ends_and_a_busy_one_does_not() {
    run(async {
        let limits = EdgeLimits::default();
        let keep_alive = Duration::from_millis(limits.keep_alive_ms);
        let world = world(move |_| async move {
            tokio::time::sleep(keep_alive * 3).await;
            bytes("late")
        });
        let (io, server) = listen(&world);
        let (mut client, _connection) = connect(io).await;
        let begun = Instant::now();
        let response = client.send_request(get("/"), true).unwrap().0.await.unwrap();
        assert_eq!(response.status(), 200);
        drop(response);
        // h2's client closes as soon as it sees GOAWAY, which may cut the server's last frame off.
        let _ = server.await.unwrap();
        let took = begun.elapsed();
        assert!(took >= keep_alive * 4 && took < keep_alive * 5, "{took:?}");
    });
}

#[test]
fn bodies_larger_than_the_limit_are_not_taken() {
    run(async {
        let limits = EdgeLimits { body_bytes: 10, ..EdgeLimits::default() };
        let world = limited_world(limits, |request: Request| async move {
            let error = request.body.collect().await.unwrap_err();
            assert!(matches!(error, BodyError::TooLarge(10)), "{error}");
            bytes("seen")
        });
        let (io, _server) = listen(&world);
        let (mut client, _connection) = connect(io).await;
        let request = HttpRequest::post("https://a/").body(()).unwrap();
        let (response, mut body) = client.send_request(request, false).unwrap();
        body.send_data(Bytes::from_static(b"0123456789a"), true).unwrap();
        assert_eq!(response.await.unwrap().status(), 200);

        let request = HttpRequest::post("https://a/").header("content-length", "11").body(()).unwrap();
        let (response, _body) = client.send_request(request, false).unwrap();
        assert_eq!(response.await.unwrap().status(), 413);
        assert_eq!(*world.refused.borrow(), ["body_too_large"]);
    });
}

#[test]
fn a_body_that_stops_arriving_is_an_error_in_time() {
    run(async {
        let patience = Duration::from_millis(EdgeLimits::default().pace.body_ms);
        let world = world(move |request: Request| async move {
            let begun = Instant::now();
            let error = request.body.collect().await.unwrap_err();
            assert!(matches!(error, BodyError::Stalled), "{error}");
            assert!(begun.elapsed() >= patience);
            bytes("stalled")
        });
        let (io, _server) = listen(&world);
        let (mut client, _connection) = connect(io).await;
        let request = HttpRequest::post("https://a/").body(()).unwrap();
        let (response, mut body) = client.send_request(request, false).unwrap();
        body.send_data(Bytes::from_static(b"x"), false).unwrap();
        let mut response = response.await.unwrap();
        assert_eq!(read_all(response.body_mut()).await.unwrap(), b"stalled");
    });
}

#[test]
fn a_client_that_takes_nothing_loses_its_stream() {
    run(async {
        let guard = Rc::new(());
        let held = Rc::clone(&guard);
        let world = world(move |_| {
            let held = Rc::clone(&held);
            async move {
                let body = ResponseBody::Bytes(Bytes::from(vec![0; 1 << 20]));
                let mut response = Response::new(StatusCode::OK).with_body(body);
                response.receipt = Some(Box::new(Held(held)));
                response
            }
        });
        let kept = Rc::strong_count(&guard);
        let (io, _server) = listen(&world);
        let (mut client, _connection) = connect(io).await;
        let mut response = client.send_request(get("/"), true).unwrap().0.await.unwrap();
        assert!(Rc::strong_count(&guard) > kept);
        // The window of 64 KiB fills up and is never opened again.
        let error = loop {
            match response.body_mut().data().await.unwrap() {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert!(error.is_reset(), "{error}");
        until(|| Rc::strong_count(&guard) == kept).await;
    });
}

#[test]
fn ambiguous_request_gets_400_and_reaches_no_site() {
    run(async {
        let world = world(|_| async { unreachable!("a refused request was served") });
        let (io, _server) = listen(&world);
        let (mut client, _connection) = connect(io).await;
        let request = HttpRequest::get("https://a/").header("host", "b").body(()).unwrap();
        let response = client.send_request(request, true).unwrap().0.await.unwrap();
        assert_eq!(response.status(), 400);
        let many = "x".repeat(EdgeLimits::default().head_bytes);
        let request = HttpRequest::get("https://a/").header("x", many).body(()).unwrap();
        let response = client.send_request(request, true).unwrap().0.await.unwrap();
        assert_eq!(response.status(), 431);
        assert_eq!(*world.refused.borrow(), ["bad_request"]);
    });
}

#[test]
fn an_applications_server_and_date_stay_its_own() {
    run(async {
        let world = world(|_| async {
            let then = HeaderValue::from_static("Sun, 06 Nov 1994 08:49:37 GMT");
            bytes("")
                .with_header(SERVER, HeaderValue::from_static("app"))
                .with_header(http::header::DATE, then)
        });
        let (io, _server) = listen(&world);
        let (mut client, _connection) = connect(io).await;
        let response = client.send_request(get("/"), true).unwrap().0.await.unwrap();
        assert_eq!(response.headers()["server"], "app");
        assert_eq!(response.headers()["date"], "Sun, 06 Nov 1994 08:49:37 GMT");
    });
}

#[test]
fn interim_answers_go_before_the_final_one() {
    run(async {
        let world = world(|_| async {
            for status in [100, 103, 103, 102] {
                let link = (http::header::LINK, HeaderValue::from(status));
                let status = StatusCode::from_u16(status).unwrap();
                serving::send_interim(status, HeaderMap::from_iter([link]));
                yield_now().await;
            }
            bytes("final")
        });
        let (io, _server) = listen(&world);
        let (mut client, _connection) = connect(io).await;
        for (expects, interim) in [(false, &[103, 103, 102][..]), (true, &[100, 103, 103, 102])] {
            let mut request = get("/");
            if expects {
                request.headers_mut().insert(EXPECT, HeaderValue::from_static("100-continue"));
            }
            let (mut response, _) = client.send_request(request, true).unwrap();
            let mut seen = Vec::new();
            let response = poll_fn(|cx| {
                while let Poll::Ready(Some(interim)) = response.poll_informational(cx) {
                    let interim = interim.unwrap();
                    assert_eq!(interim.headers()["link"], interim.status().as_str());
                    seen.push(interim.status().as_u16());
                }
                Pin::new(&mut response).poll(cx)
            });
            assert_eq!(response.await.unwrap().status(), 200);
            assert_eq!(seen, interim, "expects: {expects}");
        }
    });
}

/// A piece, and then its backend breaks off.
struct Breaking(bool);

impl http_body::Body for Breaking {
    type Data = Bytes;
    type Error = BodyError;
    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        Poll::Ready(Some(if std::mem::replace(&mut self.0, true) {
            Err(BodyError::Backend("it ended".into()))
        } else {
            Ok(Frame::data(Bytes::from_static(b"part")))
        }))
    }
}

#[test]
fn bytes_already_given_arrive_before_a_reset() {
    run(async {
        let world = world(|_| async {
            Response::new(StatusCode::OK).with_body(ResponseBody::stream(Breaking(false)))
        });
        let (io, _server) = listen(&world);
        let (mut client, _connection) = connect(io).await;
        let mut response = client.send_request(get("/"), true).unwrap().0.await.unwrap();
        assert_eq!(response.body_mut().data().await.unwrap().unwrap(), "part");
        assert!(response.body_mut().data().await.unwrap().unwrap_err().is_reset());
    });
}

#[test]
fn a_tunnel_cannot_be_had() {
    run(async {
        let world = world(|_| async { Response::new(StatusCode::SWITCHING_PROTOCOLS) });
        let (io, _server) = listen(&world);
        let (mut client, _connection) = connect(io).await;
        let response = client.send_request(get("/"), true).unwrap().0.await.unwrap();
        assert_eq!(response.status(), 502);
    });
}

// === Raw frames ===

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// `GET https://a/` in HPACK: three entries of the static table, and a literal `:authority`.
const GET_A: &[u8] = &[0x82, 0x87, 0x84, 0x41, 1, b'a'];

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(payload);
    out
}

/// The client's preface with empty settings.
fn preface() -> Vec<u8> {
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(4, 0, 0, &[])].concat()
}

/// Sends `bytes`, and reads until a frame of this kind; its payload.
async fn answer(io: &mut DuplexStream, bytes: &[u8], kind: u8) -> Vec<u8> {
    // The server may close before it has taken everything.
    let _ = io.write_all(bytes).await;
    loop {
        let mut head = [0; 9];
        io.read_exact(&mut head).await.unwrap();
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        io.read_exact(&mut payload).await.unwrap();
        if head[3] == kind {
            return payload;
        }
    }
}

fn error_code(payload: &[u8]) -> h2::Reason {
    u32::from_be_bytes(payload[payload.len().min(8) - 4..][..4].try_into().unwrap()).into()
}

#[test]
fn rapid_resets_end_the_connection() {
    run(async {
        let served = Rc::new(Cell::new(0));
        let count = Rc::clone(&served);
        let world = world(move |_| {
            count.set(count.get() + 1);
            async { bytes("") }
        });
        let (mut io, server) = listen(&world);
        let mut flood = preface();
        for n in 0..1000u32 {
            flood.extend(frame(HEADERS, END_STREAM | END_HEADERS, 2 * n + 1, GET_A));
            flood.extend(frame(RST_STREAM, 0, 2 * n + 1, &8u32.to_be_bytes()));
        }
        let goaway = answer(&mut io, &flood, GOAWAY).await;
        assert_eq!(error_code(&goaway), h2::Reason::ENHANCE_YOUR_CALM);
        assert!(server.await.unwrap().is_err());
        assert!(served.get() <= PENDING_RESETS_MAX, "{} were served", served.get());
    });
}

#[test]
fn responses_that_are_cancelled_are_bounded() {
    run(async {
        let mut limits = EdgeLimits::default();
        limits.pace.h2_resets = 30;
        let served = Rc::new(Cell::new(0));
        let count = Rc::clone(&served);
        let world = limited_world(limits, move |_| {
            count.set(count.get() + 1);
            pending()
        });
        let (mut io, server) = listen(&world);
        io.write_all(&preface()).await.unwrap();
        for n in 0..31u32 {
            io.write_all(&frame(HEADERS, END_STREAM | END_HEADERS, 2 * n + 1, GET_A)).await.unwrap();
            until(|| served.get() == n + 1).await;
            io.write_all(&frame(RST_STREAM, 0, 2 * n + 1, &8u32.to_be_bytes())).await.unwrap();
        }
        let goaway = answer(&mut io, &[], GOAWAY).await;
        assert_eq!(error_code(&goaway), h2::Reason::ENHANCE_YOUR_CALM);
        server.await.unwrap().unwrap();
    });
}

#[test]
fn responses_that_end_may_be_reset_without_end() {
    run(async {
        let mut limits = EdgeLimits::default();
        limits.pace.h2_resets = 3;
        let world = limited_world(limits, |_| async { bytes("done") });
        let (io, _server) = listen(&world);
        let (mut client, _connection) = connect(io).await;
        for _ in 0..50 {
            let mut response = client.send_request(get("/"), true).unwrap().0.await.unwrap();
            assert_eq!(read_all(response.body_mut()).await.unwrap(), b"done");
        }
    });
}

#[test]
fn a_connection_has_so_many_requests() {
    run(async {
        let limits = EdgeLimits { keep_alive_requests: 3, ..EdgeLimits::default() };
        let world = limited_world(limits, |_| async { bytes("one") });
        let (io, server) = listen(&world);
        let (mut client, connection) = connect(io).await;
        for _ in 0..3 {
            client.send_request(get("/"), true).unwrap().0.await.unwrap();
        }
        // The client still wants the connection, and no time passes: it is not closed for being idle.
        let begun = Instant::now();
        connection.await.unwrap().unwrap();
        assert!(client.ready().await.is_err(), "a connection takes another request");
        // The client closes at once, which may cut the server's last frame.
        let _ = server.await.unwrap();
        assert_eq!(begun.elapsed(), Duration::ZERO);
    });
}

#[test]
fn floods_of_control_frames_end_the_connection() {
    const PING: u8 = 6;
    const WINDOW_UPDATE: u8 = 8;
    for (kind, payload) in
        [(4, &[][..]), (PING, &[0; 8]), (2, &[0; 5]), (WINDOW_UPDATE, &[0, 0, 0, 1]), (0x42, b"?")]
    {
        run(async {
            let world = world(|_| async { unreachable!("there is no request") });
            let (io, server) = listen(&world);
            let (mut from, mut to) = tokio::io::split(io);
            let flood = spawn_local(async move {
                to.write_all(&preface()).await?;
                let (mut sent, frame) = (0, frame(kind, 0, if kind == 2 { 1 } else { 0 }, payload));
                while sent < 50_000 {
                    to.write_all(&frame).await?;
                    sent += 1;
                }
                io::Result::Ok(())
            });
            let mut all = Vec::new();
            from.read_to_end(&mut all).await.unwrap();
            let goaway = &all[all.len() - 17..];
            assert_eq!(
                (goaway[3], error_code(&goaway[9..])),
                (GOAWAY, h2::Reason::ENHANCE_YOUR_CALM),
                "{kind}"
            );
            assert!(server.await.unwrap().is_err());
            assert!(flood.await.unwrap().is_err(), "all were taken of type {kind}");
        });
    }
}

#[test]
fn endless_continuations_end_the_connection() {
    run(async {
        let world = world(|_| async { unreachable!("its head never ends") });
        let (mut io, server) = listen(&world);
        let mut flood = preface();
        flood.extend(frame(HEADERS, END_STREAM, 1, GET_A));
        for _ in 0..1000 {
            flood.extend(frame(CONTINUATION, 0, 1, &[]));
        }
        let goaway = answer(&mut io, &flood, GOAWAY).await;
        assert_eq!(error_code(&goaway), h2::Reason::ENHANCE_YOUR_CALM);
        assert!(server.await.unwrap().is_err());
    });
}

#[test]
fn connection_fields_are_malformed_in_http2() {
    for (name, value) in
        [("connection", "close"), ("transfer-encoding", "chunked"), ("te", "gzip"), ("upgrade", "x")]
    {
        run(async {
            let world = world(|_| async { unreachable!("a malformed request was served") });
            let (mut io, _server) = listen(&world);
            let mut block = GET_A.to_vec();
            block.extend([0, name.len() as u8]);
            block.extend(name.as_bytes());
            block.push(value.len() as u8);
            block.extend(value.as_bytes());
            let bytes = [preface(), frame(HEADERS, END_STREAM | END_HEADERS, 1, &block)].concat();
            let reset = answer(&mut io, &bytes, RST_STREAM).await;
            assert_eq!(error_code(&reset), h2::Reason::PROTOCOL_ERROR, "{name}");
        });
    }
}

#[test]
fn bytes_already_read_are_part_of_the_connection() {
    run(async {
        let world = world(|_| async { bytes("") });
        let (mut near, far) = duplex(1 << 16);
        let conn = Rc::new(ConnInfo {
            peer: "192.0.2.7:5000".parse().unwrap(),
            local: "192.0.2.1:80".parse().unwrap(),
            tls: None,
            carried: None,
            network: None,
        });
        let all = [preface(), frame(HEADERS, END_STREAM | END_HEADERS, 1, GET_A)].concat();
        let (before, after) = all.split_at(14);
        spawn_local(serve(far, BytesMut::from(before), conn, world.enter(), world));
        let head = answer(&mut near, after, HEADERS).await;
        // 0x88 is `:status: 200` of the static table.
        assert_eq!(head[0], 0x88);
    });
}

impl ClientStream for DuplexStream {
    fn reset_on_close(&self) {}
}

impl ClientStream for Counting {
    fn reset_on_close(&self) {}
}

/// Counts what is written to it.
struct Counting {
    io: DuplexStream,
    written: Rc<Cell<usize>>,
}

impl AsyncRead for Counting {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, into)
    }
}

impl AsyncWrite for Counting {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write(cx, buf);
        if let Poll::Ready(Ok(len)) = polled {
            self.written.set(self.written.get() + len);
        }
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// An account that shows how much had been written when it was closed, and that all had been taken.
struct Closing {
    written: Rc<Cell<usize>>,
    closed: Rc<Cell<Option<(usize, bool)>>>,
    complete: bool,
}

impl SendObserver for Closing {
    fn sent(&mut self, _: u64, complete: bool) {
        self.complete = complete;
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        self.closed.set(Some((self.written.get(), self.complete)));
    }
}

#[test]
fn an_account_is_closed_after_its_answer_is_on_its_way() {
    run(async {
        let (written, closed) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(None)));
        let before = Rc::new(Cell::new(usize::MAX));
        let world = world({
            let (written, closed, before) = (Rc::clone(&written), Rc::clone(&closed), Rc::clone(&before));
            move |_| {
                before.set(written.get());
                let (written, closed) = (Rc::clone(&written), Rc::clone(&closed));
                let mut response = bytes("all of it");
                response.receipt = Some(Box::new(Closing { written, closed, complete: false }));
                std::future::ready(response)
            }
        });
        let (near, io) = duplex(1 << 20);
        let conn = Rc::new(ConnInfo {
            peer: "192.0.2.7:5000".parse().unwrap(),
            local: "192.0.2.1:443".parse().unwrap(),
            tls: None,
            carried: None,
            network: None,
        });
        let io = Counting { io, written: Rc::clone(&written) };
        spawn_local(serve(io, BytesMut::new(), conn, world.enter(), world));
        let (mut client, _connection) = connect(near).await;
        let (response, _) = client.send_request(get("/"), true).unwrap();
        assert_eq!(read_all(response.await.unwrap().body_mut()).await.unwrap(), b"all of it");
        until(|| closed.get().is_some()).await;
        let (at_close, complete) = closed.get().unwrap();
        assert!(complete);
        assert!(at_close >= before.get() + b"all of it".len(), "{at_close} bytes, {} before", before.get());
    });
}
