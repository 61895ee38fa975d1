//! Tests of whether another node is there, found out by those who need it.
//!
//! Not here: what is made of answers and silence (`nagaya_placement::liveness`), what follows from a verdict (`tests`).

use super::*;
use crate::cluster::peers::pool::PeerPool;

/// Asks whether `record`'s node is there, with this kind of probe; none: nothing was held against it in half a second.
async fn probed(ca: &Ca, kind: ProbeKind, record: NodeRecord) -> (Option<ProbeResult>, serde_json::Value) {
    probed_as(ClusterOptions { probe: kind, ..ca.options("a", "a") }, record).await
}

/// The same for a node with these settings.
async fn probed_as(options: ClusterOptions, record: NodeRecord) -> (Option<ProbeResult>, serde_json::Value) {
    let shared = shared(options);
    let (_, own) = sockets();
    probe::start(Arc::clone(&shared.cluster), OwnedFd::from(own)).unwrap();
    let record = Arc::new(record);
    let pool = PeerPool::new(Arc::clone(&shared.cluster));
    let verdict = timeout(Duration::from_millis(500), pool.against(&record)).await;
    (verdict.ok(), shared.cluster.peers.tallies.status()[0]["probes"].clone())
}

#[test]
fn probe_tells_refusing_silent_and_answering_hosts_apart() {
    run(async {
        let ca = Ca::new();
        let there = Remote::start(ca.options("b", "b"), |_| async { text("b") });
        let (stream, probes) = sockets();
        let mute = stream.local_addr().unwrap();
        let (gone, _) = sockets();
        let closed = gone.local_addr().unwrap();
        drop(gone);
        for kind in [ProbeKind::Udp, ProbeKind::Connect] {
            let (verdict, counts) = probed(&ca, kind, record("b", there.address)).await;
            assert_eq!(verdict, None, "{kind:?}");
            assert!(counts["answers"].as_u64() >= Some(2), "{kind:?} {counts}");
            assert_eq!(
                probed(&ca, kind, record("b", closed)).await.0,
                Some(ProbeResult::Refuses),
                "{kind:?}"
            );
        }
        assert_eq!(probed(&ca, ProbeKind::Udp, record("b", mute)).await.0, Some(ProbeResult::Silent));
        // Another machine that claims the name, or has another key, is not it.
        let mut other = record("b", there.address);
        other.id = id("other");
        assert_eq!(probed(&ca, ProbeKind::Udp, other).await.0, Some(ProbeResult::Silent));
        drop((stream, probes));
    });
}

/// Node `node` signs probes with the first of these keys, and believes the others, too.
fn signing(ca: &Ca, node: &str, keys: &[&str]) -> ClusterOptions {
    let mut keys = keys.iter().map(|key| key.repeat(32));
    let probe_key = keys.next().unwrap();
    ClusterOptions { probe_key, probe_keys_also: keys.collect(), ..ca.options(node, node) }
}

#[test]
fn probes_of_both_keys_are_answered_during_an_exchange_alone() {
    run(async {
        let ca = Ca::new();
        for (a, b, expected) in [
            (&["01", "02"][..], &["02", "01"][..], None),
            (&["02", "01"], &["01", "02"], None),
            (&["01"], &["02", "01"], None),
            (&["01"], &["02"], Some(ProbeResult::Silent)),
            (&["02"], &["01"], Some(ProbeResult::Silent)),
        ] {
            let there = Remote::start(signing(&ca, "b", b), |_| async { text("b") });
            let (verdict, counts) = probed_as(signing(&ca, "a", a), record("b", there.address)).await;
            assert_eq!(verdict, expected, "{a:?} asks {b:?}");
            assert_eq!(
                counts["answers"].as_u64() >= Some(1),
                expected.is_none(),
                "{a:?} asks {b:?}: {counts}"
            );
        }
    });
}

#[test]
fn waiters_share_one_probe_and_later_requests_probe_anew() {
    run(async {
        let shared = shared(Ca::new().options("a", "a"));
        let (_, own) = sockets();
        probe::start(Arc::clone(&shared.cluster), OwnedFd::from(own)).unwrap();
        let mute = sockets();
        let record = Arc::new(record("b", mute.0.local_addr().unwrap()));
        let pool = Rc::new(PeerPool::new(Arc::clone(&shared.cluster)));
        let ask = || {
            let (pool, record) = (Rc::clone(&pool), Arc::clone(&record));
            spawn_local(async move { pool.against(&record).await })
        };
        // Whoever does not wait for the verdict changes nothing for the others.
        ask().abort();
        let waiting: Vec<_> = (0..20).map(|_| ask()).collect();
        for told in waiting {
            assert_eq!(told.await.unwrap(), ProbeResult::Silent);
        }
        let found = || shared.cluster.peers.tallies.status()[0]["probes"]["silent"].as_u64();
        until(|| found() > Some(0)).await;
        assert_eq!(found(), Some(1), "it was one probe");
        drop(mute);
        while ask().await.unwrap() != ProbeResult::Refuses {}
    });
}

#[test]
fn an_answer_that_was_recorded_and_is_sent_again_says_nothing() {
    run(async {
        let ca = Ca::new();
        let there = Remote::start(ca.options("b", "b"), |_| async { text("b") });
        // Between the two: passes the first question on, and answers all others with that one's answer.
        let (stream, between) = sockets();
        let address = between.local_addr().unwrap();
        let its = there.address;
        let repeating = std::thread::spawn(move || {
            between.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
            let out = StdUdp::bind("127.0.0.1:0").unwrap();
            out.set_read_timeout(Some(PATIENCE)).unwrap();
            let (mut question, mut recorded) = ([0; 512], None::<Vec<u8>>);
            while let Ok((len, from)) = between.recv_from(&mut question) {
                let answer = recorded.get_or_insert_with(|| {
                    let mut answer = [0; 512];
                    out.send_to(&question[..len], its).unwrap();
                    let len = out.recv(&mut answer).unwrap();
                    answer[..len].to_vec()
                });
                between.send_to(answer, from).unwrap();
            }
        });
        let (verdict, counts) = probed(&ca, ProbeKind::Udp, record("b", address)).await;
        assert_eq!(verdict, Some(ProbeResult::Silent));
        assert_eq!(counts["answers"], 1, "the one that was its answer");
        drop(stream);
        repeating.join().unwrap();
    });
}
