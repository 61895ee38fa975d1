//! Tests of connections to other nodes as such: which are kept, and which are not.
//!
//! Not here: what goes over them (`tests`).

use tokio::io::{AsyncReadExt as _, copy_bidirectional};
use tokio::net::TcpStream;

use super::*;
use crate::cluster::peers::pool::{NoPeer, PeerPool};

/// Passes on one connection until either end closes it.
async fn carry(mut from: TcpStream, to: SocketAddr) {
    let mut to = TcpStream::connect(to).await.unwrap();
    let _ = copy_bidirectional(&mut from, &mut to).await;
}

#[test]
fn a_connection_that_is_made_to_a_forgotten_node_is_closed() {
    run(async {
        let ca = Ca::new();
        let there = Remote::start(ca.options("b", "b"), |_| async { text("b") });
        let shared = shared(ca.options("a", "a"));
        let pool = Rc::new(PeerPool::new(Arc::clone(&shared.cluster)));
        let slow = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let record = Arc::new(record("b", slow.local_addr().unwrap()));
        let seat = {
            let (pool, record) = (Rc::clone(&pool), Arc::clone(&record));
            spawn_local(async move { pool.seat(&record).await.map(|(seat, _)| seat) })
        };
        let (first, _) = slow.accept().await.unwrap();
        pool.forget(&record.name);
        // Whoever waits begins anew.
        let (second, _) = slow.accept().await.unwrap();
        let second = spawn_local(carry(second, there.address));
        let seat = seat.await.unwrap().unwrap();
        // The first one is made only now.
        carry(first, there.address).await;
        assert!(!second.is_finished(), "the other one is in use");
        assert_eq!(shared.cluster.peers.tallies.status()[0]["connections"], 1);
        drop(seat);
    });
}

#[test]
fn broken_handshake_does_not_count_as_distrust() {
    run(async {
        let shared = shared(Ca::new().options("a", "a"));
        let pool = PeerPool::new(Arc::clone(&shared.cluster));
        let ending = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let record = Arc::new(record("b", ending.local_addr().unwrap()));
        for is_reset in [false, true] {
            let accept = async {
                let (mut stream, _) = ending.accept().await.unwrap();
                let mut hello = [0; 4096];
                // With bytes that nobody has read the kernel sends a reset, without any an end.
                let came =
                    if is_reset { stream.peek(&mut hello).await } else { stream.read(&mut hello).await };
                assert!(came.unwrap() > 0);
            };
            let (seat, ()) = tokio::join!(pool.seat(&record), accept);
            let error = seat.map(drop).unwrap_err();
            assert!(matches!(error, NoPeer::Broken(_)), "{error}");
        }
    });
}
