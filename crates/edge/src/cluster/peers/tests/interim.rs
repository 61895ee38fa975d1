//! Interim answers on their way from the application's node to the client's.

use std::pin::pin;

use super::*;
use crate::cluster::peers::pool::PeerPool;
use crate::http::serving;

#[test]
fn interim_answers_pass_between_nodes() {
    run(async {
        let ca = Ca::new();
        let remote = Remote::start(ca.options("b", "b"), |_| async {
            for number in 0..12 {
                let link = (http::header::LINK, HeaderValue::from(number));
                serving::send_interim(StatusCode::EARLY_HINTS, HeaderMap::from_iter([link]));
                yield_now().await;
            }
            text("final")
        });
        let pool = PeerPool::new(Arc::clone(&shared(ca.options("a", "a")).cluster));
        let record = record("b", remote.address);
        let mut sending = pin!(send(&pool, &record, get()));
        let mut links = Vec::new();
        let response = poll_fn(|cx| {
            let (polled, said) = serving::listen(|| sending.as_mut().poll(cx));
            links.extend(said.interim.into_iter().map(|mut interim| {
                assert_eq!(interim.status, StatusCode::EARLY_HINTS);
                interim.headers.remove(http::header::LINK).unwrap()
            }));
            polled
        });
        assert_eq!(response.await.unwrap().status, StatusCode::OK);
        assert_eq!(links, (0..12).map(HeaderValue::from).collect::<Vec<_>>());
    });
}
