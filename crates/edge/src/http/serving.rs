//! Passes signals from a request to its connection while it is served. A signal is an interim
//! response, or that the request is useless without its client.
//!
//! A request is served by being polled on the task of its connection. So a signal during a poll
//! belongs to that request. The connection takes it when the poll returns. Outside of such a poll
//! nobody listens, and a signal is dropped. Not here: the bytes on the wire (`h1`, `h2`).

use std::cell::RefCell;

use http::{HeaderMap, StatusCode};

use crate::http::peer_fields;
use crate::http::receipt_field::RECEIPT;

thread_local! {
    /// Signals of the running poll.
    static SAID: RefCell<Option<PollSignals>> = const { RefCell::new(None) };
}

/// Signals of one poll.
#[derive(Debug, Default)]
pub struct PollSignals {
    pub interim: Vec<InterimResponse>,
    /// The request is useless without its client.
    pub needs_client: bool,
}

/// An interim response of a backend (RFC 9110 section 15.2).
#[derive(Debug)]
pub struct InterimResponse {
    pub status: StatusCode,
    pub headers: HeaderMap,
}

/// Polls a request by `poll`, and returns its signals.
pub fn listen<T>(poll: impl FnOnce() -> T) -> (T, PollSignals) {
    let outer = SAID.replace(Some(PollSignals::default()));
    let polled = poll();
    (polled, SAID.replace(outer).unwrap_or_default())
}

/// Sends the client an interim response. A backend's receipt fields and fields between nodes are
/// removed.
pub fn send_interim(status: StatusCode, mut headers: HeaderMap) {
    headers.remove(&RECEIPT);
    peer_fields::strip(&mut headers);
    SAID.with_borrow_mut(|said| {
        if let Some(said) = said {
            said.interim.push(InterimResponse { status, headers });
        }
    });
}

/// From here on a client that has finished sending counts as gone. The request holds a program, a
/// server or a place in line. TCP does not distinguish a client that left from one that only
/// sends no more.
pub fn need_client() {
    SAID.with_borrow_mut(|said| {
        if let Some(said) = said {
            said.needs_client = true;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interim_answer_belongs_to_the_poll_that_sent_it() {
        send_interim(StatusCode::EARLY_HINTS, HeaderMap::new());
        let (inner, said) = listen(|| {
            let ((), inner) = listen(need_client);
            send_interim(StatusCode::PROCESSING, HeaderMap::from_iter([(RECEIPT, "x".parse().unwrap())]));
            inner
        });
        assert!(inner.needs_client && inner.interim.is_empty());
        assert!(!said.needs_client);
        let [interim] = &said.interim[..] else { panic!("{said:?}") };
        assert!(interim.status == StatusCode::PROCESSING && interim.headers.is_empty());
        assert!(listen(|| ()).1.interim.is_empty());
    }
}
