//! Tests of what requests are told that wait until their site has a place: how long that will be, in the answer and while they wait,
//! and when to come back where there is none.

use http::header::{ACCEPT, CONTENT_TYPE, RETRY_AFTER};
use nagaya_placement::outlook::WaitStages;
use serde_json::Value;

use super::*;
use crate::cluster::wait_estimate;

/// A node that has said where its time went.
fn served() -> Response {
    let stages = [("wake_us", 90_000), ("fence_us", 20_000), ("turn_us", 10_000)].into_iter();
    let mut response = text("awake");
    peer_fields::serve(&mut response.headers, "c", stages);
    response
}

/// The supervisor: no node can take the site.
fn nowhere(node: &ThreadContext, asked: &Questions) {
    for (tag, ..) in asked.try_iter() {
        let placed = PlaceReply::Nowhere { reason: "all are full".into(), code: "NGY0461".into() };
        node.shared.cluster.placement_client.answer(tag, &placed);
    }
}

#[test]
fn a_wait_for_a_place_is_predicted_from_those_before_it() {
    run(async {
        let ca = Ca::new();
        let (closed, _udp) = sockets();
        let nobody = record("b", closed.local_addr().unwrap());
        drop(closed);
        let c = Remote::start(ca.options("c", "c"), |_| async { served() });
        let (node, asked) = node_a(&ca, &[nobody, record("c", c.address)], placement("b", 1));
        let begin = || {
            let node = Rc::clone(&node);
            spawn_local(async move { serve(&node, get()).await })
        };
        let rows = || wait_estimate::rows(&node.shared.cluster);
        let first = begin();
        until(|| !rows().is_empty()).await;
        assert_eq!((&rows()[0]["site"], &rows()[0]["wait_seconds"]), (&"demo".into(), &Value::Null));
        answer(&node, &asked, placement("c", 2)).await;
        assert_eq!(first.await.unwrap().status, StatusCode::OK);
        assert!(rows().is_empty(), "nobody waits any more");
        // What the first has waited: for its place, 80 ms for the wake and 20 ms for the fence.
        let whole = node.shared.cluster.outlook.lock().predicted(boottime(), &site(), 1).unwrap();
        assert!(whole >= Duration::from_millis(100) && whole < PATIENCE, "{whole:?}");
        node.shared.apply([RecordChange::PutPlacement(placement("b", 3))]).unwrap();
        let second = begin();
        until(|| !rows().is_empty()).await;
        assert!(rows()[0]["wait_seconds"].is_number() || rows()[0]["since_seconds"].as_f64() > Some(0.1));
        answer(&node, &asked, placement("c", 4)).await;
        assert_eq!(second.await.unwrap().status, StatusCode::OK);
    });
}

/// What those are told who accept these, on a node that has seen this.
async fn refused<const N: usize>(
    seen: Option<WaitStages>,
    accept: [&'static str; N],
) -> [(StatusCode, HeaderMap, Vec<u8>); N] {
    let ca = Ca::new();
    let (closed, _udp) = sockets();
    let nobody = record("b", closed.local_addr().unwrap());
    drop(closed);
    let (node, asked) = node_a(&ca, &[nobody], placement("b", 1));
    seen.into_iter().for_each(|seen| node.shared.cluster.outlook.lock().learn(seen));
    let told = accept.map(|accept| {
        let (node, mut request) = (Rc::clone(&node), get());
        request.head.headers.insert(ACCEPT, HeaderValue::from_static(accept));
        spawn_local(async move {
            let response = serve(&node, request).await;
            let headers = HeaderMap::clone(&response.headers);
            let (status, body, _) = read(response).await;
            (status, headers, body)
        })
    });
    until(|| {
        nowhere(&node, &asked);
        told.iter().all(|told| told.is_finished())
    })
    .await;
    let mut all = Vec::new();
    for told in told {
        all.push(told.await.unwrap());
    }
    all.try_into().unwrap()
}

#[test]
fn refusal_after_a_wait_names_the_known_time_to_return() {
    run(async {
        let problem = |body: &[u8]| serde_json::from_slice::<Value>(body).unwrap();
        let [(status, headers, body)] = refused(None, ["application/json"]).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(headers[RETRY_AFTER], "1");
        assert_eq!(headers[CONTENT_TYPE], "application/problem+json");
        let told = problem(&body);
        assert_eq!((&told["code"], &told["predicted_wait_seconds"]), (&"NGY0461".into(), &Value::Null));

        // What is left of it is told, rounded up; it has hardly begun.
        let seen = WaitStages { place: PATIENCE * 3, ..WaitStages::default() };
        let [program, person] = refused(Some(seen), ["application/json", "text/html"]).await;
        let wait = problem(&program.2)["predicted_wait_seconds"].as_u64().unwrap();
        assert!((41..=60).contains(&wait), "{wait}");
        assert_eq!(program.1[RETRY_AFTER], wait.to_string());
        let again = person.1[RETRY_AFTER].to_str().unwrap().parse::<u64>().unwrap();
        assert!((41..=60).contains(&again), "{again}");
        assert!(String::from_utf8(person.2).unwrap().contains("NGY0461"));
    });
}
