//! Tests of answers that have begun and pause: their node answers probes, or it does not.

use super::*;
use crate::cluster::peers::pool::PeerPool;
use crate::http::peer_meta::PeerRequestMeta;

/// More of an answer than is held back.
const LONG: usize = 100 << 10;

/// A node that sends a long beginning to whoever asks, and its end when told.
fn beginning(ca: &Ca, gate: &Arc<Notify>) -> Remote {
    let gate = Arc::clone(gate);
    Remote::start(ca.options("b", "b"), move |_| {
        let gate = Arc::clone(&gate);
        async move {
            let (sender, body) = arriving(None);
            sender.try_send(Ok(Bytes::from(vec![b'x'; LONG]))).unwrap();
            spawn_local(async move {
                gate.notified().await;
                let _ = sender.send(Ok(Bytes::from_static(b"end"))).await;
            });
            Response::new(StatusCode::OK).with_body(ResponseBody::stream(body))
        }
    })
}

/// Bytes of the answer, and whether it came to its end.
async fn drain(response: Response, mut came: impl FnMut(usize)) -> (usize, bool) {
    let ResponseBody::Stream(mut body) = response.body else { panic!("a stream") };
    let mut bytes = 0;
    loop {
        match poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            None => return (bytes, true),
            Some(Err(_)) => return (bytes, false),
            Some(Ok(frame)) => bytes += frame.data_ref().map_or(0, Bytes::len),
        }
        came(bytes);
    }
}

/// Connections of node a, and a record of `b` by which it answers requests and no probes: its thread for them would answer, so what
/// is asked for is a node that it is not.
fn pool_and_silent(ca: &Ca, b: &Remote) -> (PeerPool, NodeRecord) {
    let mut silent = record("b", b.address);
    silent.id = id("gone");
    let shared = shared(ca.options("a", "a"));
    let (_, own) = sockets();
    probe::start(Arc::clone(&shared.cluster), OwnedFd::from(own)).unwrap();
    (PeerPool::new(Arc::clone(&shared.cluster)), silent)
}

fn explained(node: &ThreadContext) -> serde_json::Value {
    let id = format!("{:032x}", 1);
    serde_json::from_str(&explain(node, &id)).unwrap()
}

#[test]
fn paused_answer_goes_on_while_its_node_answers_probes() {
    run(async {
        let (ca, gate) = (Ca::new(), Arc::new(Notify::new()));
        let b = beginning(&ca, &gate);
        let (node, _asked) = node_a(&ca, &[record("b", b.address)], placement("b", 1));
        let Response { body, receipt, .. } = serve(&node, get()).await;
        let response = Response::new(StatusCode::OK).with_body(body);
        let reading = spawn_local(drain(response, |_| {}));
        let tallies = &node.shared.cluster.peers.tallies;
        let answers = || tallies.status()[0]["probes"]["answers"].as_u64();
        // Each is a pause longer than a node may serve without a word from the store.
        let before = answers();
        until(|| answers() >= before.map(|before| before + 3)).await;
        assert!(!reading.is_finished());
        gate.notify_one();
        assert_eq!(reading.await.unwrap(), (LONG + 3, true));
        drop(receipt);
        assert!(explained(&node)["refusal"].is_null());
    });
}

#[test]
fn long_answer_of_a_silent_node_is_broken_off_with_a_reason() {
    run(async {
        let (ca, gate) = (Ca::new(), Arc::new(Notify::new()));
        let b = beginning(&ca, &gate);
        let (pool, silent) = pool_and_silent(&ca, &b);
        let Request { head, body } = get();
        let (seat, _) = pool.seat(&Arc::new(silent)).await.unwrap();
        let deadline = Instant::now() + PATIENCE;
        let carried = PeerRequestMeta { site: site(), epoch: 1, deadline, retries: 3 };
        let answer = peer_exchange::send(seat, &head, &carried, body, PATIENCE * 2, &Cell::new(false)).await;
        let Ok(PeerOutcome::Response { response, lost, .. }) = answer else { panic!("an answer") };
        assert_eq!(lost.why(), None);
        assert_eq!(drain(response, |_| {}).await, (LONG, false));
        assert!(lost.why().is_some_and(|why| why.contains("silent")), "{lost:?}");
    });
}

#[test]
fn answer_lost_with_its_node_is_reported_and_counted() {
    run(async {
        let (ca, gate) = (Ca::new(), Arc::new(Notify::new()));
        let mut b = beginning(&ca, &gate);
        let (node, _asked) = node_a(&ca, &[record("b", b.address)], placement("b", 1));
        let Response { body, receipt, .. } = serve(&node, get()).await;
        let response = Response::new(StatusCode::OK).with_body(body);
        let (sender, mut come) = tokio::sync::watch::channel(0);
        let reading = spawn_local(drain(response, move |bytes| sender.send(bytes).unwrap()));
        come.wait_for(|bytes| *bytes == LONG).await.unwrap();
        // Its connections end with it.
        b.kill();
        assert_eq!(reading.await.unwrap(), (LONG, false));
        drop(receipt);
        let told = &explained(&node)["refusal"];
        assert_eq!((&told["reason"], &told["code"]), (&"answer_lost".into(), &"NGY0470".into()), "{told}");
        let text = node.shared.metrics.encode();
        let counted = r#"nagaya_http_refusals_total{reason="answer_lost"} 1"#;
        assert!(text.lines().any(|line| line == counted), "{text}");
    });
}

#[test]
fn an_upgraded_connection_ends_with_its_node() {
    run(async {
        let ca = Ca::new();
        let b = Remote::start(ca.options("b", "b"), |request: Request| async move {
            let (near, far) = tokio::io::duplex(1024);
            spawn_local(async move {
                let _far = far;
                pending::<()>().await;
            });
            let mut response = Response::new(StatusCode::SWITCHING_PROTOCOLS);
            response.headers.insert(http::header::UPGRADE, request.head.upgrade.clone().unwrap());
            response.with_body(ResponseBody::Tunnel(Box::new(near)))
        });
        let (pool, silent) = pool_and_silent(&ca, &b);
        let mut asking = get();
        asking.head.upgrade = Some(HeaderValue::from_static("websocket"));
        let response = send(&pool, &silent, asking).await.unwrap();
        let ResponseBody::Tunnel(mut tunnel) = response.body else { panic!("a tunnel") };
        let error = tunnel.read_to_end(&mut Vec::new()).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    });
}
