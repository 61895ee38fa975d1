//! Tests of a node that is asked for what it has no authority for, not yet or not any more.

use super::*;
use crate::cluster::serving_epoch::ServingEpoch;
use crate::http::peer_meta::PeerDenial;

/// Long after every test's end.
fn lasting() -> u64 {
    boottime().0 + 60_000_000_000
}

#[test]
fn node_whose_records_catch_up_serves_only_with_authority() {
    run(async {
        let ca = Ca::new();
        let (_, own) = sockets();
        let me = record("a", own.local_addr().unwrap());
        let (node, _asked) = node_a(&ca, &[me], placement("c", 5));
        let node_here = Rc::clone(&node);
        let waiting = spawn_local(async move { received(&node_here, 6).await });
        yield_now().await;
        node.shared.apply([RecordChange::PutPlacement(placement("a", 6))]).unwrap();
        assert_eq!(waiting.await.unwrap().1, Some(PeerDenial::Fenced { tries: 0 }));
        node.shared.cluster.lease.extend(lasting());
        // There is no keeper here: it went as far as the instance.
        let (status, denied) = received(&node, 6).await;
        assert_eq!((status, denied), (StatusCode::SERVICE_UNAVAILABLE, None));
    });
}

#[test]
fn taken_site_is_served_once_the_old_node_lost_authority() {
    run(async {
        let ca = Ca::new();
        let (_, own) = sockets();
        let me = record("a", own.local_addr().unwrap());
        let (node, _asked) = node_a(&ca, &[me], placement("c", 5));
        let shared = &node.shared;
        shared.cluster.lease.extend(lasting());
        let taken = Placement { wait_ms: 300, ..placement("a", 6) };
        shared.apply([RecordChange::PutPlacement(taken.clone())]).unwrap();
        let began = Instant::now();
        // Said again, it does not begin anew.
        shared.cluster.placed(taken);
        let serving = ServingEpoch::new(&shared.cluster, &site(), 6, None);
        serving.begin(PATIENCE).await.unwrap();
        assert!(began.elapsed() + Duration::from_millis(5) >= Duration::from_millis(300));
        assert!(serving.was_handed());
        assert!(serving.confirmed(PATIENCE).await.unwrap());
        shared.apply([RecordChange::PutPlacement(placement("c", 7))]).unwrap();
        assert!(!serving.confirmed(PATIENCE).await.unwrap(), "what it says now is nobody's answer");
        assert_eq!(serving.begin(PATIENCE).await, Err(Refusal::Moved));
    });
}

#[test]
fn requests_in_progress_end_after_authority_is_lost_for_long() {
    run(async {
        let ca = Ca::new();
        let (node, _asked) = node_a(&ca, &[], placement("a", 6));
        let (lease, serving) =
            (&node.shared.cluster.lease, ServingEpoch::new(&node.shared.cluster, &site(), 6, None));
        let (held, patience) = (Duration::from_millis(60), Duration::from_millis(40));
        let began = Instant::now();
        lease.extend(boottime().0 + 60_000_000);
        serving.barred(patience).await;
        assert!(began.elapsed() >= held + patience);
        assert!(matches!(serving.confirmed(patience).await, Err(Refusal::Fenced)));

        let waiting = serving.clone();
        let waiting = spawn_local(async move { waiting.barred(PATIENCE).await });
        yield_now().await;
        assert!(!lease.holds());
        lease.extend(lasting());
        for _ in 0..10 {
            yield_now().await;
        }
        assert!(!waiting.is_finished(), "it came back in time");
        waiting.abort();
    });
}
