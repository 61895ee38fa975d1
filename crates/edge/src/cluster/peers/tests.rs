//! Tests of nodes that pass requests on to each other: real connections, certificates and datagrams on the loopback. Each other
//! node is a thread with a runtime of its own, as an edge thread is one; what answers there is made up.

use std::cell::Cell;
use std::future::{pending, poll_fn};
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener, UdpSocket as StdUdp};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::HeaderValue;
use http::{HeaderMap, Method, StatusCode, Version};
use http_body_util::{BodyExt, Full};
use nagaya_base::{AnchoredClock, RequestId};
use nagaya_keeper_api::client::KeeperClient;
use nagaya_placement::liveness::ProbeResult;
use nagaya_records::cell::LimitSet as CellLimits;
use nagaya_records::feed::{PlaceReply, ToSupervisor};
use nagaya_records::record::RecordChange;
use nagaya_records::{NodeName, NodeRecord, Placement, PlacementReason, SiteName};
use nagaya_telemetry::MetricPage;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::{Notify, oneshot};
use tokio::task::{LocalSet, spawn_local, yield_now};
use tokio::time::timeout;

use super::*;
use crate::backends::programs::testing::{arriving, known, request};
use crate::cluster::node_lease::boottime;
use crate::cluster::peers::acceptor::PeerAcceptor;
use crate::cluster::peers::peer_exchange;
use crate::cluster::peers::peer_exchange::PeerOutcome;
use crate::cluster::peers::pool::PeerPool;
use crate::cluster::peers::probe::vouch::VouchOrder;
use crate::http::connections::{ConnectionGuard, OpenConnections};
use crate::http::handler::ConnectionHost;
use crate::http::message::{ConnInfo, Request, RequestBody, RequestHead, Response, ResponseBody};
use crate::http::peer_fields;
use crate::http::peer_meta::{PeerDenial, PeerRequestMeta};
use crate::http::refusal::Refusal;
use crate::metrics::EdgeMetrics;
use crate::options::{ClusterOptions, EdgeConfig, EdgeLimits, ProbeKind};
use crate::server::node::ThreadContext;
use crate::server::shared::SharedContext;
use crate::{record, request as request_steps};

pub mod authority;
pub mod certificates;
pub mod connections;
pub mod images;
pub mod interim;
pub mod lulls;
pub mod made_up;
pub mod probing;
pub mod retries;
pub mod several;
pub mod waits;

/// Longest that anything here may take before the test has failed.
const PATIENCE: Duration = Duration::from_secs(20);

/// Where nobody needs one.
const NO_KEEPER: &str = "/proc/nonexistent/keeper.sock";

// === A cluster ===

struct Ca(CertifiedIssuer<'static, KeyPair>);

impl Ca {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// The settings of node `node`, with a certificate for `name`.
    fn options(&self, node: &str, name: &str) -> ClusterOptions {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![format!("{name}.nagaya.internal")]).unwrap();
        ClusterOptions {
            node: node.into(),
            id: id(node),
            authorities: self.0.pem(),
            certificate: params.signed_by(&key, &self.0).unwrap().pem(),
            key: key.serialize_pem(),
            probe_key: "5a".repeat(32),
            probe_keys_also: Vec::new(),
            probe: ProbeKind::Udp,
            probe_ms: 100,
        }
    }
}

fn id(node: &str) -> String {
    format!("{:032x}", node.bytes().fold(7u128, |sum, byte| sum * 31 + u128::from(byte)))
}

fn name(node: &str) -> NodeName {
    NodeName::new(node).unwrap()
}

fn site() -> SiteName {
    SiteName::new("demo").unwrap()
}

fn record(node: &str, peer: SocketAddr) -> NodeRecord {
    NodeRecord {
        name: name(node),
        id: id(node),
        peer: peer.to_string(),
        draining: false,
        cpus: 2,
        memory_bytes: 1 << 30,
        version: "test".into(),
        knows: 0,
        fence_ms: 100,
        heeds_marks: true,
    }
}

fn placement(node: &str, epoch: u64) -> Placement {
    Placement {
        site: site(),
        node: name(node),
        epoch,
        since_ms: 0,
        why: PlacementReason::First,
        wait_ms: 0,
        node_epoch: 0,
        copies: Vec::new(),
    }
}

fn shared(cluster: ClusterOptions) -> Arc<SharedContext> {
    let options = EdgeConfig { node: cluster.node.clone(), cluster: Some(cluster), ..EdgeConfig::default() };
    let shared = Arc::new(SharedContext::new(
        options,
        None,
        Arc::new(EdgeMetrics::new()),
        AnchoredClock::of_wall(),
        None,
    ));
    let tenant = r#"{"name":"t","uid":2000,"gid":2000,"home":"/srv/t"}"#;
    let demo = r#"{"name":"demo","tenant":"t","hosts":["demo"],"backend":{"kind":"app","command":["serve"],"directory":"app"}}"#;
    let changes = [
        RecordChange::PutTenant(serde_json::from_str(tenant).unwrap()),
        RecordChange::PutSite(serde_json::from_str(demo).unwrap()),
    ];
    shared.apply(changes).unwrap();
    shared
}

// === Another node ===

type Answering = Pin<Box<dyn Future<Output = Response>>>;

/// Answers as the test says.
struct World {
    limits: Rc<EdgeLimits>,
    answer: Box<dyn Fn(Request) -> Answering>,
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
        refusal.into_response(id)
    }

    fn enter(&self) -> ConnectionGuard {
        self.connections.enter()
    }

    fn measures(&self) -> bool {
        false
    }
}

/// A node in a thread; it ends, with all its connections, when this is dropped.
struct Remote {
    address: SocketAddr,
    shared: Weak<SharedContext>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

fn sockets() -> (StdListener, StdUdp) {
    loop {
        let stream = StdListener::bind("127.0.0.1:0").unwrap();
        // Both have one number; another test may have taken it.
        if let Ok(probes) = StdUdp::bind(stream.local_addr().unwrap()) {
            return (stream, probes);
        }
    }
}

impl Remote {
    fn start<A: Future<Output = Response> + 'static>(
        options: ClusterOptions,
        answer: impl Fn(Request) -> A + Send + 'static,
    ) -> Self {
        Self::start_with(options, Path::new(NO_KEEPER), answer)
    }

    fn start_with<A: Future<Output = Response> + 'static>(
        options: ClusterOptions,
        keeper: &Path,
        answer: impl Fn(Request) -> A + Send + 'static,
    ) -> Self {
        let keeper = keeper.to_owned();
        let (listener, probes) = sockets();
        let address = listener.local_addr().unwrap();
        let shared = shared(options);
        shared.apply([RecordChange::PutNode(Box::new(record("a", address)))]).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let (its, weak) = (Arc::clone(&shared), Arc::downgrade(&shared));
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            LocalSet::new().block_on(&runtime, async move {
                let host = Rc::new(World {
                    limits: Rc::default(),
                    answer: Box::new(move |request| Box::pin(answer(request))),
                    connections: Rc::default(),
                });
                listener.set_nonblocking(true).unwrap();
                let listener = TcpListener::from_std(listener).unwrap();
                let keeper = KeeperClient::later(&keeper);
                spawn_local(
                    PeerAcceptor::new(Arc::clone(&its.cluster), Arc::clone(&its.metrics), host, keeper)
                        .run(listener),
                );
                let _ = stopped.await;
            });
        });
        probe::start(Arc::clone(&shared.cluster), OwnedFd::from(probes)).unwrap();
        Self { address, shared: weak, stop: Some(stop), thread: Some(thread) }
    }

    fn kill(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.kill();
    }
}

fn run<F: Future>(test: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&runtime, async { timeout(PATIENCE, test).await.expect("the test hangs") })
}

async fn until(mut done: impl FnMut() -> bool) {
    while !done() {
        yield_now().await;
    }
}

// === This node ===

/// Sends one request straight to a node.
async fn send(pool: &PeerPool, record: &NodeRecord, request: Request) -> Result<Response, String> {
    let Request { head, body } = request;
    let (seat, _) = pool.seat(&Arc::new(record.clone())).await.map_err(|error| error.to_string())?;
    let carried = PeerRequestMeta { site: site(), epoch: 1, deadline: Instant::now() + PATIENCE, retries: 3 };
    match peer_exchange::send(seat, &head, &carried, body, PATIENCE, &Cell::new(false)).await {
        Ok(PeerOutcome::Response { response, .. }) => Ok(response),
        Ok(PeerOutcome::Denied(denied)) => Err(format!("{denied:?}")),
        Err(broken) => Err(broken.why.to_string()),
    }
}

/// A request that comes to this node.
async fn serve(node: &ThreadContext, request: Request) -> Response {
    request_steps::serve(&node.services, request).await
}

/// What `nagaya explain` says of a request, as text.
fn explain(node: &ThreadContext, id: &str) -> String {
    let name = &node.shared.options.get().node;
    record::receipt::explain::explain(&node.shared.receipts, name, id, |_, _| CellLimits::default())
}

fn get() -> Request {
    request(Method::GET, RequestBody::empty())
}

fn text(body: &'static str) -> Response {
    Response::new(StatusCode::OK).with_body(ResponseBody::Bytes(Bytes::from_static(body.as_bytes())))
}

async fn read(response: Response) -> (StatusCode, Vec<u8>, Option<HeaderMap>) {
    let status = response.status;
    let body = match response.body {
        ResponseBody::Stream(body) => body.collect().await.expect("the body comes to its end"),
        ResponseBody::Bytes(bytes) => {
            Full::new(bytes).map_err(|never| match never {}).collect().await.unwrap()
        }
        _ => return (status, Vec::new(), None),
    };
    let trailers = body.trailers().cloned();
    (status, body.to_bytes().to_vec(), trailers)
}

/// Tag, the epoch that did not do, and why.
type Questions = mpsc::Receiver<(u64, Option<u64>, PlacementReason)>;

/// Node `a` as a whole, and what it asks its supervisor.
fn node_a(ca: &Ca, nodes: &[NodeRecord], at: Placement) -> (Rc<ThreadContext>, Questions) {
    node_with(ca.options("a", "a"), nodes, at, Path::new(NO_KEEPER))
}

fn node_with(
    options: ClusterOptions,
    nodes: &[NodeRecord],
    at: Placement,
    keeper: &Path,
) -> (Rc<ThreadContext>, Questions) {
    let shared = shared(options);
    let (_, own) = sockets();
    probe::start(Arc::clone(&shared.cluster), OwnedFd::from(own)).unwrap();
    let changes = nodes.iter().map(|node| RecordChange::PutNode(Box::new(node.clone())));
    shared.apply(changes.chain([RecordChange::PutPlacement(at)])).unwrap();
    let (sender, asked) = mpsc::channel();
    shared
        .cluster
        .placement_client
        .open(move |question| match question {
            ToSupervisor::Place { tag, seen, why, .. } => {
                sender.send((*tag, *seen, *why)).map_err(io::Error::other)
            }
            _ => Ok(()),
        })
        .unwrap();
    let keeper = KeeperClient::later(keeper);
    (Rc::new(ThreadContext::new(shared, keeper)), asked)
}

/// The supervisor: answers the next question so.
async fn answer(node: &ThreadContext, asked: &Questions, to: Placement) -> (Option<u64>, PlacementReason) {
    let mut question = None;
    until(|| {
        question = asked.try_recv().ok();
        question.is_some()
    })
    .await;
    let (tag, seen, why) = question.unwrap();
    let placed = PlaceReply::At { placement: to, decide_us: 5, store_us: 7 };
    if let PlaceReply::At { placement, .. } = &placed {
        node.shared.cluster.placed(placement.clone());
    }
    node.shared.cluster.placement_client.answer(tag, &placed);
    (seen, why)
}

// === Passing on ===

#[test]
fn forwarding_keeps_bodies_trailers_and_client_address() {
    run(async {
        let ca = Ca::new();
        let remote = Remote::start(ca.options("b", "b"), |request: Request| async move {
            let head = &request.head;
            assert_eq!((head.version, &*head.host, head.id), (Version::HTTP_11, "demo", RequestId(1)));
            assert_eq!(head.conn.peer, "127.0.0.1:80".parse().unwrap());
            assert_eq!(head.conn.carried.as_ref().map(|carried| carried.epoch), Some(1));
            assert!(!head.headers.keys().any(|name| name.as_str().starts_with("nagaya-peer")));
            let all = request.body.collect().await.unwrap();
            let mut trailers = HeaderMap::new();
            trailers.insert("seen", HeaderValue::from(all.to_bytes().len()));
            let body = Full::new(Bytes::from(vec![b'y'; 700_000])).map_err(|never| match never {});
            Response::new(StatusCode::CREATED)
                .with_body(ResponseBody::stream(body.with_trailers(std::future::ready(Some(Ok(trailers))))))
        });
        let pool = PeerPool::new(Arc::clone(&shared(ca.options("a", "a")).cluster));
        let (sender, body) = arriving(None);
        let sending = spawn_local(async move {
            for _ in 0..50 {
                sender.send(Ok(Bytes::from(vec![b'x'; 20_000]))).await.unwrap();
            }
        });
        let sent = request(Method::POST, body);
        let response = send(&pool, &record("b", remote.address), sent).await.unwrap();
        let (status, body, trailers) = read(response).await;
        sending.await.unwrap();
        assert_eq!((status, body.len()), (StatusCode::CREATED, 700_000));
        assert_eq!(trailers.unwrap()["seen"], "1000000");
    });
}

#[test]
fn two_hundred_requests_share_a_few_connections() {
    run(async {
        let ca = Ca::new();
        let (come, all) = (Rc::new(Cell::new(0)), Arc::new(AtomicUsize::new(0)));
        let seen = Arc::clone(&all);
        let remote = Remote::start(ca.options("b", "b"), move |_| {
            seen.fetch_add(1, Ordering::SeqCst);
            let seen = Arc::clone(&seen);
            async move {
                until(|| seen.load(Ordering::SeqCst) >= 200).await;
                text("together")
            }
        });
        let shared = shared(ca.options("a", "a"));
        let pool = Rc::new(PeerPool::new(Arc::clone(&shared.cluster)));
        let record = record("b", remote.address);
        let requests: Vec<_> = (0..200)
            .map(|_| {
                let (pool, record, come) = (Rc::clone(&pool), record.clone(), Rc::clone(&come));
                spawn_local(async move {
                    let (status, body, _) = read(send(&pool, &record, get()).await.unwrap()).await;
                    assert_eq!((status, body.as_slice()), (StatusCode::OK, b"together".as_slice()));
                    come.set(come.get() + 1);
                })
            })
            .collect();
        for request in requests {
            request.await.unwrap();
        }
        assert_eq!(come.get(), 200);
        let connections = shared.cluster.peers.tallies.status()[0]["connections"].as_i64().unwrap();
        assert!((2..=8).contains(&connections), "{connections}");
    });
}

#[test]
fn stranger_to_the_cluster_is_not_served() {
    run(async {
        let (ca, other) = (Ca::new(), Ca::new());
        let remote = Remote::start(ca.options("b", "b"), |_| async { text("served") });
        let record_b = record("b", remote.address);
        let try_as = async |options: ClusterOptions, record: &NodeRecord| {
            let pool = PeerPool::new(Arc::clone(&shared(options).cluster));
            send(&pool, record, get()).await.map(|response| response.status)
        };
        assert_eq!(try_as(ca.options("a", "a"), &record_b).await, Ok(StatusCode::OK));
        // A certificate of another authority; neither side takes the other's.
        assert!(try_as(other.options("a", "a"), &record_b).await.is_err());
        let mut half = other.options("a", "a");
        half.authorities = ca.options("a", "a").authorities;
        assert!(
            try_as(half, &record_b).await.is_err(),
            "the server asks for a certificate of its own authority"
        );
        // A node the records do not know.
        assert!(try_as(ca.options("stranger", "stranger"), &record_b).await.is_err());
        // Another node than the one that was wanted.
        let error = try_as(ca.options("a", "a"), &record("c", remote.address)).await.unwrap_err();
        assert!(error.contains("not trusted"), "{error}");
        // A node that shows another's certificate is none.
        assert!(!shared(ca.options("a", "c")).cluster.is_member());
    });
}

/// Tells when it is dropped.
struct Told(mpsc::Sender<()>);

impl Drop for Told {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

#[test]
fn a_client_that_leaves_ends_the_request_at_the_other_node() {
    run(async {
        let ca = Ca::new();
        let (come, came) = mpsc::channel();
        let (gone, went) = mpsc::channel();
        let remote = Remote::start(ca.options("b", "b"), move |_| {
            let told = Told(gone.clone());
            come.send(()).unwrap();
            async move {
                let _told = told;
                pending().await
            }
        });
        let pool = Rc::new(PeerPool::new(Arc::clone(&shared(ca.options("a", "a")).cluster)));
        let record = record("b", remote.address);
        let waiting = spawn_local(async move { send(&pool, &record, get()).await.map(|_| ()) });
        until(|| came.try_recv().is_ok()).await;
        waiting.abort();
        until(|| went.try_recv().is_ok()).await;
    });
}

#[test]
fn peer_connection_survives_abandoned_requests_during_a_stall() {
    run(async {
        let ca = Ca::new();
        let (come, came) = mpsc::channel();
        let (go, gone_on) = mpsc::channel::<()>();
        let gone_on = std::sync::Mutex::new(gone_on);
        let remote = Remote::start(ca.options("b", "b"), move |request: Request| {
            if request.head.method == Method::POST {
                come.send(()).unwrap();
                // The whole thread stands still.
                let _ = gone_on.lock().unwrap().recv();
            }
            async { text("served") }
        });
        let pool = Rc::new(PeerPool::new(Arc::clone(&shared(ca.options("a", "a")).cluster)));
        let record = record("b", remote.address);
        let begin = |request: Request| {
            let (pool, record) = (Rc::clone(&pool), record.clone());
            spawn_local(async move { send(&pool, &record, request).await.map(|response| response.status) })
        };
        let kept = begin(request(Method::POST, RequestBody::empty()));
        until(|| came.try_recv().is_ok()).await;
        let given_up: Vec<_> = (0..100).map(|_| begin(get())).collect();
        // They are written, and then that nobody wants them.
        for _ in 0..100 {
            yield_now().await;
        }
        given_up.iter().for_each(tokio::task::JoinHandle::abort);
        for _ in 0..100 {
            yield_now().await;
        }
        let later = begin(get());
        drop(go);
        assert_eq!(kept.await.unwrap(), Ok(StatusCode::OK));
        assert_eq!(later.await.unwrap(), Ok(StatusCode::OK));
    });
}

#[test]
fn a_body_that_is_broken_off_there_is_broken_off_here() {
    run(async {
        let ca = Ca::new();
        let remote = Remote::start(ca.options("b", "b"), |_| async {
            let (sender, body) = arriving(None);
            sender.try_send(Ok(Bytes::from_static(b"part"))).unwrap();
            spawn_local(async move {
                let _ = sender.send(Err(crate::http::message::BodyError::Backend("it ended".into()))).await;
            });
            Response::new(StatusCode::OK).with_body(ResponseBody::stream(body))
        });
        let pool = PeerPool::new(Arc::clone(&shared(ca.options("a", "a")).cluster));
        let response = send(&pool, &record("b", remote.address), get()).await.unwrap();
        let ResponseBody::Stream(mut body) = response.body else { panic!("a stream") };
        let mut failed = false;
        while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            failed |= frame.is_err();
        }
        assert!(failed, "it must not look complete");
    });
}

#[test]
fn an_upgraded_connection_goes_on_through_both_nodes() {
    run(async {
        let ca = Ca::new();
        let remote = Remote::start(ca.options("b", "b"), |request: Request| async move {
            let Some(protocol) = request.head.upgrade.clone().filter(|_| &*request.head.path == "/") else {
                return text("not switched");
            };
            let (near, mut far) = tokio::io::duplex(1024);
            spawn_local(async move {
                let mut word = [0; 5];
                far.read_exact(&mut word).await.unwrap();
                word.reverse();
                far.write_all(&word).await.unwrap();
            });
            let mut response = Response::new(StatusCode::SWITCHING_PROTOCOLS);
            response.headers.insert(http::header::UPGRADE, protocol);
            response.with_body(ResponseBody::Tunnel(Box::new(near)))
        });
        let pool = PeerPool::new(Arc::clone(&shared(ca.options("a", "a")).cluster));
        let record = record("b", remote.address);
        let mut asking = get();
        asking.head.upgrade = Some(HeaderValue::from_static("websocket"));
        let response = send(&pool, &record, asking).await.unwrap();
        assert_eq!(response.status, StatusCode::SWITCHING_PROTOCOLS);
        assert_eq!(response.headers["upgrade"], "websocket");
        let ResponseBody::Tunnel(mut tunnel) = response.body else { panic!("a tunnel") };
        tunnel.write_all(b"hello").await.unwrap();
        let mut said = Vec::new();
        tunnel.read_to_end(&mut said).await.unwrap();
        assert_eq!(said, b"olleh");
        // An application that does not switch has answered.
        let mut asking = get();
        (asking.head.upgrade, asking.head.path) = (Some(HeaderValue::from_static("h2c")), "/x".into());
        let (status, body, _) = read(send(&pool, &record, asking).await.unwrap()).await;
        assert_eq!((status, body.as_slice()), (StatusCode::OK, b"not switched".as_slice()));
    });
}

// === Following a site ===

#[test]
fn request_goes_to_its_sites_node_and_the_receipt_names_it() {
    run(async {
        let ca = Ca::new();
        let remote = Remote::start(ca.options("b", "b"), |_| async { text("from b") });
        let (node, _asked) = node_a(&ca, &[record("b", remote.address)], placement("b", 1));
        let (status, body, _) = read(serve(&node, get()).await).await;
        assert_eq!((status, body.as_slice()), (StatusCode::OK, b"from b".as_slice()));
        let id = format!("{:032x}", 1);
        let told: serde_json::Value = serde_json::from_str(&explain(&node, &id)).unwrap();
        assert_eq!(told["place"]["peer"]["node"], "b");
        let mut page = MetricPage::default();
        node.shared.cluster.peers.tallies.expose(&mut page);
        let text = page.encode();
        assert!(text.contains(r#"nagaya_peer_requests_total{node="b",outcome="answered"} 1"#), "{text}");
    });
}

#[test]
fn only_safe_requests_to_a_dying_node_go_to_the_next_one() {
    run(async {
        let ca = Ca::new();
        let (come, came) = mpsc::channel();
        let mut b = Remote::start(ca.options("b", "b"), move |_| {
            come.send(()).unwrap();
            pending()
        });
        let c = Remote::start(ca.options("c", "c"), |request: Request| async move {
            let body = request.body.collect().await.unwrap().to_bytes();
            Response::new(StatusCode::OK).with_body(ResponseBody::Bytes(body))
        });
        let nodes = [record("b", b.address), record("c", c.address)];
        let (node, asked) = node_a(&ca, &nodes, placement("b", 1));
        let begin = |request: Request| {
            let node = Rc::clone(&node);
            spawn_local(async move { read(serve(&node, request).await).await })
        };
        let put = begin(request(Method::PUT, known("kept")));
        let post = begin(request(Method::POST, known("once")));
        let mut arrived = 0;
        until(|| {
            arrived += came.try_iter().count();
            arrived == 2
        })
        .await;
        b.kill();
        let (seen, why) = answer(&node, &asked, placement("c", 2)).await;
        assert_eq!(seen, Some(1));
        assert!(matches!(why, PlacementReason::Refused | PlacementReason::Silent), "{why:?}");
        let (status, body, _) = put.await.unwrap();
        assert_eq!((status, body.as_slice()), (StatusCode::OK, b"kept".as_slice()));
        let (status, body, _) = post.await.unwrap();
        let page = String::from_utf8(body).unwrap();
        assert_eq!(status, StatusCode::BAD_GATEWAY);
        assert!(page.contains("NGY0463") && page.contains("may have been carried out"), "{page}");
        // Whoever comes later goes to c without a question.
        assert_eq!(read(serve(&node, get()).await).await.0, StatusCode::OK);
        assert!(asked.try_recv().is_err());
    });
}

#[test]
fn a_post_of_which_nothing_was_sent_follows_its_site() {
    run(async {
        let ca = Ca::new();
        let (closed, _udp) = sockets();
        let nobody = closed.local_addr().unwrap();
        drop(closed);
        let c = Remote::start(ca.options("c", "c"), |request: Request| async move {
            let body = request.body.collect().await.unwrap().to_bytes();
            Response::new(StatusCode::OK).with_body(ResponseBody::Bytes(body))
        });
        let nodes = [record("b", nobody), record("c", c.address)];
        let (node, asked) = node_a(&ca, &nodes, placement("b", 1));
        let serving = Rc::clone(&node);
        let post =
            spawn_local(
                async move { read(serve(&serving, request(Method::POST, known("form"))).await).await },
            );
        assert_eq!(answer(&node, &asked, placement("c", 2)).await, (Some(1), PlacementReason::Refused));
        let (status, body, _) = post.await.unwrap();
        assert_eq!((status, body.as_slice()), (StatusCode::OK, b"form".as_slice()));
    });
}

#[test]
fn hung_node_with_open_sockets_is_silent_within_the_bound() {
    run(async {
        let ca = Ca::new();
        let (listener, probes) = sockets();
        let record_b = record("b", listener.local_addr().unwrap());
        let c = Remote::start(ca.options("c", "c"), |_| async { text("from c") });
        let nodes = [record_b.clone(), record("c", c.address)];
        let (node, asked) = node_a(&ca, &nodes, placement("b", 1));
        let began = Instant::now();
        let verdict = node.services.placer.peers.against(&Arc::new(record_b)).await;
        // The bound is 100 ms; the rest is this machine's, which does other things too.
        assert_eq!(verdict, ProbeResult::Silent);
        let took = began.elapsed();
        assert!(took >= Duration::from_millis(90) && took < Duration::from_millis(400), "{took:?}");
        let serving = Rc::clone(&node);
        let waiting = spawn_local(async move { read(serve(&serving, get()).await).await });
        assert_eq!(answer(&node, &asked, placement("c", 2)).await, (Some(1), PlacementReason::Silent));
        assert_eq!(waiting.await.unwrap().1, b"from c");
        drop((listener, probes));
    });
}

#[test]
fn requests_at_a_silent_node_are_retried_or_fail_as_in_doubt() {
    run(async {
        let ca = Ca::new();
        let (come, came) = mpsc::channel();
        // Its connections stay open, and nothing comes from it any more.
        let (stuck, free) = mpsc::channel::<()>();
        let free = std::sync::Mutex::new(free);
        let b = Remote::start(ca.options("b", "b"), move |request: Request| {
            come.send(()).unwrap();
            let is_last = request.head.method == Method::POST;
            if is_last {
                let _ = free.lock().unwrap().recv();
            }
            pending()
        });
        let c = Remote::start(ca.options("c", "c"), |_| async { text("from c") });
        let mut record_b = record("b", b.address);
        // Its thread for probes would answer, so what is asked for is a node that it is not.
        record_b.id = id("gone");
        let (node, asked) = node_a(&ca, &[record_b, record("c", c.address)], placement("b", 1));
        let begin = |request: Request| {
            let node = Rc::clone(&node);
            spawn_local(async move { read(serve(&node, request).await).await })
        };
        let began = Instant::now();
        let get = begin(get());
        let post = begin(request(Method::POST, known("once")));
        assert_eq!(answer(&node, &asked, placement("c", 2)).await, (Some(1), PlacementReason::Silent));
        assert_eq!(get.await.unwrap().1, b"from c");
        let (status, page, _) = post.await.unwrap();
        assert_eq!(status, StatusCode::BAD_GATEWAY, "{}", String::from_utf8_lossy(&page));
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
        assert_eq!(came.try_iter().count(), 2, "each was sent there once");
        drop(stuck);
    });
}

/// A node that answers probes, and what its supervisor is told.
fn vouching(ca: &Ca, node: &str) -> (Arc<SharedContext>, NodeRecord, mpsc::Receiver<ToSupervisor>) {
    let shared = shared(ca.options(node, node));
    let (stream, probes) = sockets();
    let record = record(node, stream.local_addr().unwrap());
    probe::start(Arc::clone(&shared.cluster), OwnedFd::from(probes)).unwrap();
    let (sender, told) = mpsc::channel();
    shared
        .cluster
        .placement_client
        .open(move |up| sender.send(up.clone()).map_err(io::Error::other))
        .unwrap();
    (shared, record, told)
}

/// The tag of the next question for a vouch, which must be `from`'s.
fn vouch_asked(told: &mpsc::Receiver<ToSupervisor>, from: &str) -> u64 {
    match told.recv_timeout(PATIENCE).unwrap() {
        ToSupervisor::VouchAsked { tag, id: asked } if asked == id(from) => tag,
        other => panic!("{other:?}"),
    }
}

#[test]
fn vouch_counts_once_per_round_from_the_asked_member_only() {
    let ca = Ca::new();
    let (a, _, a_told) = vouching(&ca, "a");
    let (b, b_record, b_told) = vouching(&ca, "b");
    let (c, c_record, c_told) = vouching(&ca, "c");
    let ask = |round, record: &NodeRecord| {
        a.cluster.peers.probes.vouch(VouchOrder::Ask { round, members: vec![record.clone()] });
    };
    let vouch =
        |node: &SharedContext, tag, moved| node.cluster.peers.probes.vouch(VouchOrder::Vouch { tag, moved });
    // Another machine has the address now.
    ask(1, &NodeRecord { id: id("gone"), ..b_record.clone() });
    ask(2, &b_record);
    let late = vouch_asked(&b_told, "a");
    assert_eq!(late, 0, "it was the first that was meant for it");
    ask(3, &c_record);
    let asked = vouch_asked(&c_told, "a");
    vouch(&c, asked, 77);
    vouch(&c, asked, 78);
    vouch(&b, late, 1);
    let told = a_told.recv_timeout(PATIENCE).unwrap();
    assert_eq!(told, ToSupervisor::Vouched { round: 3, id: id("c"), moved: 77 });
    // Whatever it was asked, in this round or the one before.
    ask(4, &b_record);
    let told = loop {
        if let Ok(ToSupervisor::VouchAsked { tag, .. }) = b_told.recv_timeout(Duration::from_millis(1)) {
            vouch(&b, tag, 5);
        }
        if let Ok(told) = a_told.try_recv() {
            break told;
        }
    };
    assert_eq!(told, ToSupervisor::Vouched { round: 4, id: id("b"), moved: 5 });
    while let Ok(ToSupervisor::VouchAsked { tag, .. }) = b_told.recv_timeout(Duration::from_millis(100)) {
        vouch(&b, tag, 5);
    }
    assert!(a_told.try_recv().is_err(), "each vouches once");
}

#[test]
fn silent_member_is_asked_again_a_few_times() {
    let ca = Ca::new();
    let (a, _, _a_told) = vouching(&ca, "a");
    let mute = StdUdp::bind("127.0.0.1:0").unwrap();
    let members = vec![record("b", mute.local_addr().unwrap())];
    a.cluster.peers.probes.vouch(VouchOrder::Ask { round: 1, members });
    mute.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut seen = Vec::new();
    let mut buffer = [0; 512];
    for _ in 0..3 {
        let len = mute.recv(&mut buffer).unwrap();
        seen.push(buffer[..len].to_vec());
    }
    assert!(seen.iter().all(|bytes| *bytes == seen[0]), "it is one question");
    mute.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert!(mute.recv(&mut buffer).is_err(), "three times are enough");
}

#[test]
fn new_credentials_hold_from_the_next_request_on() {
    run(async {
        let (old, new) = (Ca::new(), Ca::new());
        let both = |ca: &Ca, node: &str| {
            let authorities = old.0.pem() + &new.0.pem();
            ClusterOptions { authorities, ..ca.options(node, node) }
        };
        let remote = Remote::start(both(&old, "b"), |_| async { text("b") });
        let shared = shared(both(&old, "a"));
        let pool = PeerPool::new(Arc::clone(&shared.cluster));
        let record = record("b", remote.address);
        assert!(send(&pool, &record, get()).await.is_ok());
        let cluster = both(&new, "a");
        shared.set_options(EdgeConfig { cluster: Some(cluster), ..EdgeConfig::default() });
        assert!(send(&pool, &record, get()).await.is_ok());
        let connections = || shared.cluster.peers.tallies.status()[0]["connections"].as_i64();
        until(|| connections() == Some(1)).await;
        // What cannot be used changes nothing.
        let broken = ClusterOptions { key: String::new(), ..both(&new, "a") };
        shared.set_options(EdgeConfig { cluster: Some(broken), ..EdgeConfig::default() });
        assert!(send(&pool, &record, get()).await.is_ok());
        // Whoever leaves the cluster asks nobody any more.
        shared.set_options(EdgeConfig::default());
        assert!(send(&pool, &record, get()).await.is_err());
    });
}

/// A request to a node that answers it when told, and three probes meanwhile. False: this machine had no time for the node's thread for
/// probes, and the node was taken for silent.
async fn waits_for_a_slow_node() -> bool {
    let ca = Ca::new();
    let go = Arc::new(Notify::new());
    let gate = Arc::clone(&go);
    let remote = Remote::start(ca.options("b", "b"), move |_| {
        let gate = Arc::clone(&gate);
        async move {
            gate.notified().await;
            text("late")
        }
    });
    let (node, asked) = node_a(&ca, &[record("b", remote.address)], placement("b", 1));
    let serving = Rc::clone(&node);
    let waiting = spawn_local(async move { read(serve(&serving, get()).await).await });
    let tallies = &node.shared.cluster.peers.tallies;
    let found = |what: &str| {
        tallies.status().first().and_then(|row| row["probes"][what].as_u64()).unwrap_or_default()
    };
    // Three answers are more time than any silence would be given.
    until(|| found("answers") >= 3 || found("silent") > 0).await;
    if found("silent") > 0 {
        waiting.abort();
        return false;
    }
    assert!(!waiting.is_finished());
    go.notify_one();
    assert_eq!(waiting.await.unwrap().1, b"late");
    assert!(asked.try_recv().is_err());
    true
}

#[test]
fn a_node_that_is_slow_and_answers_probes_is_waited_for() {
    run(async { while !waits_for_a_slow_node().await {} });
}

// === At the node that was asked ===

/// What node `a` says to a request that `b` has sent it under `epoch`, as the other side reads it.
async fn received(node: &ThreadContext, epoch: u64) -> (StatusCode, Option<PeerDenial>) {
    received_with(node, epoch, 3).await
}

async fn received_with(node: &ThreadContext, epoch: u64, retries: u32) -> (StatusCode, Option<PeerDenial>) {
    let mut request = get();
    let RequestHead { conn, .. } = &*request.head;
    let carried = PeerRequestMeta { site: site(), epoch, deadline: Instant::now() + PATIENCE, retries };
    let conn = ConnInfo {
        peer: conn.peer,
        local: conn.local,
        tls: None,
        carried: Some(Box::new(carried)),
        network: None,
    };
    request.head.conn = Rc::new(conn);
    let response = serve(node, request).await;
    (response.status, peer_fields::denied(&response.headers))
}

#[test]
fn request_makes_one_hop_and_is_refused_without_its_site() {
    run(async {
        let ca = Ca::new();
        let c = Remote::start(ca.options("c", "c"), |_| async { panic!("a second hop") });
        let (node, asked) = node_a(&ca, &[record("c", c.address)], placement("c", 5));
        let not_here = Some(PeerDenial::NotPlacedHere { epoch: 5, tries: 0 });
        assert_eq!(received(&node, 5).await.1, not_here);
        assert_eq!(received(&node, 4).await.1, not_here);
        // One that knows more is waited for, for a while.
        let began = Instant::now();
        assert_eq!(received(&node, 6).await.1, not_here);
        assert!(began.elapsed() >= crate::request::placement::CATCH_UP_MAX);
        assert!(asked.try_recv().is_err(), "it asks nobody either");
    });
}
