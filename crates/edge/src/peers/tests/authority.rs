//! Tests of a node that is asked for what it has no authority for, not yet or not any more.

use super::*;
use crate::place::Stint;

/// Long after every test's end.
fn lasting() -> u64 {
    boottime().0 + 60_000_000_000
}

#[test]
fn a_node_without_authority_says_so_and_one_whose_records_catch_up_goes_on() {
    run(async {
        let ca = Ca::new();
        let (_, own) = sockets();
        let me = record("a", own.local_addr().unwrap());
        let (node, _asked) = node_a(&ca, &[me], placement("c", 5));
        let node_here = Rc::clone(&node);
        let waiting = spawn_local(async move { received(&node_here, 6).await });
        yield_now().await;
        node.shared.apply([Change::PutPlacement(placement("a", 6))]).unwrap();
        assert_eq!(waiting.await.unwrap().1, Some(Denied::Fenced { tries: 0 }));
        node.shared.cluster.tenure.extend(lasting());
        // There is no keeper here: it went as far as the instance.
        let (status, denied) = received(&node, 6).await;
        assert_eq!((status, denied), (StatusCode::SERVICE_UNAVAILABLE, None));
    });
}

#[test]
fn a_site_that_was_taken_from_another_node_is_served_once_that_can_have_no_authority() {
    run(async {
        let ca = Ca::new();
        let (_, own) = sockets();
        let me = record("a", own.local_addr().unwrap());
        let (node, _asked) = node_a(&ca, &[me], placement("c", 5));
        let shared = &node.shared;
        shared.cluster.tenure.extend(lasting());
        let taken = Placement { wait_ms: 300, ..placement("a", 6) };
        shared.apply([Change::PutPlacement(taken.clone())]).unwrap();
        let began = Instant::now();
        // Said again, it does not begin anew.
        shared.cluster.placed(taken);
        let stint = Stint::new(shared, &site(), 6, None);
        stint.begin(PATIENCE).await.unwrap();
        assert!(began.elapsed() + Duration::from_millis(5) >= Duration::from_millis(300));
        assert!(stint.was_handed());
        assert!(stint.confirmed(PATIENCE).await.unwrap());
        shared.apply([Change::PutPlacement(placement("c", 7))]).unwrap();
        assert!(!stint.confirmed(PATIENCE).await.unwrap(), "what it says now is nobody's answer");
        assert_eq!(stint.begin(PATIENCE).await, Err(Refusal::Moved));
    });
}

#[test]
fn what_is_in_an_application_is_barred_after_its_node_had_no_authority_for_as_long_as_it_may() {
    run(async {
        let ca = Ca::new();
        let (node, _asked) = node_a(&ca, &[], placement("a", 6));
        let (tenure, stint) = (&node.shared.cluster.tenure, Stint::new(&node.shared, &site(), 6, None));
        let (held, patience) = (Duration::from_millis(60), Duration::from_millis(40));
        let began = Instant::now();
        tenure.extend(boottime().0 + 60_000_000);
        stint.barred(patience).await;
        assert!(began.elapsed() >= held + patience);
        assert!(matches!(stint.confirmed(patience).await, Err(Refusal::Fenced)));

        let waiting = stint.clone();
        let waiting = spawn_local(async move { waiting.barred(PATIENCE).await });
        yield_now().await;
        assert!(!tenure.holds());
        tenure.extend(lasting());
        for _ in 0..10 {
            yield_now().await;
        }
        assert!(!waiting.is_finished(), "it came back in time");
        waiting.abort();
    });
}
