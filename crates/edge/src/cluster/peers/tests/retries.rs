//! Tests of how often the node that serves a request gives it to the application, by what came with the request. The application
//! reads each request and closes without a word; its keeper is made up.

use std::os::unix::net::UnixStream;

use nagaya_keeper_api::protocol::{InstanceId, Verb, VerbReply};

use super::*;
use crate::cluster::retry_budget::RETRIES_MAX;

/// An application that ends with every request, and how often it was given one.
fn application() -> (impl Fn(Verb) -> (VerbReply, Option<OwnedFd>), Arc<AtomicUsize>) {
    let (given, instances) = (Arc::new(AtomicUsize::new(0)), Cell::new(0));
    let count = Arc::clone(&given);
    let reply = move |verb| {
        let reply = match verb {
            Verb::UseInstance { .. } => {
                instances.set(instances.get() + 1);
                VerbReply::Using { instance: InstanceId(instances.get()), wake: None }
            }
            Verb::ConnectInstance { .. } => VerbReply::Connected,
            other => panic!("{other:?} is asked"),
        };
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let count = Arc::clone(&count);
        spawn_local(async move {
            let mut ours = tokio::net::UnixStream::from_std(ours).unwrap();
            let mut request = [0; 4096];
            if ours.read(&mut request).await.is_ok_and(|len| len > 0) {
                count.fetch_add(1, Ordering::SeqCst);
            }
        });
        (reply, Some(theirs.into()))
    };
    (reply, given)
}

/// How often a request that came with so many retries was given to the application.
async fn given_to_one_that_ends(retries: u32) -> usize {
    let ca = Ca::new();
    let (_, own) = sockets();
    let (reply, given) = application();
    let reply = Rc::new(reply);
    let (_dir, keeper) = made_up::keeper(move |verb| {
        let reply = Rc::clone(&reply);
        Box::pin(async move { reply(verb) })
    });
    let me = record("a", own.local_addr().unwrap());
    let (node, _asked) = node_with(ca.options("a", "a"), &[me], placement("a", 5), &keeper);
    node.shared.cluster.lease.extend(boottime().0 + 60_000_000_000);
    let (status, denied) = received_with(&node, 5, retries).await;
    assert_eq!((status, denied), (StatusCode::BAD_GATEWAY, None));
    given.load(Ordering::SeqCst)
}

#[test]
fn node_tries_no_more_often_than_its_request_allows() {
    run(async {
        assert_eq!(given_to_one_that_ends(0).await, 1);
        // Its own bound: an application that has ended is woken anew once.
        for retries in [1, RETRIES_MAX] {
            assert_eq!(given_to_one_that_ends(retries).await, 2);
        }
    });
}

#[test]
fn retries_over_all_nodes_never_exceed_the_limit() {
    run(async {
        let ca = Ca::new();
        let (told, heard) = mpsc::channel();
        let died = |node: &str| {
            let told = told.clone();
            Remote::start(ca.options(node, node), move |request: Request| {
                let retries = request.head.conn.carried.as_ref().unwrap().retries;
                told.send(retries).unwrap();
                // The application was given the request as often as it may have been, and the site has left.
                let refusal = Refusal::NotPlacedHere { epoch: 9, tries: 1 + retries };
                async move { refusal.into_response(RequestId(1)) }
            })
        };
        let remotes: Vec<_> = ["b", "c", "d", "e"].into_iter().map(|node| (node, died(node))).collect();
        let nodes: Vec<_> = remotes.iter().map(|(node, remote)| record(node, remote.address)).collect();
        let (node, asked) = node_a(&ca, &nodes, placement("b", 1));
        let serving = Rc::clone(&node);
        let waiting = spawn_local(async move { read(serve(&serving, get()).await).await });
        for (epoch, next) in [(2, "c"), (3, "d"), (4, "e")] {
            answer(&node, &asked, placement(next, epoch)).await;
        }
        assert_eq!(waiting.await.unwrap().0, StatusCode::SERVICE_UNAVAILABLE);
        let retries: Vec<_> = heard.try_iter().collect();
        let all = retries.iter().sum::<u32>() + u32::try_from(retries.len()).unwrap() - 1;
        assert_eq!(all, RETRIES_MAX, "{retries:?}");
    });
}
