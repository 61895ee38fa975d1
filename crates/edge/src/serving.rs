//! What a request says to its connection while it is served: interim answers, and that it is given up without its client.
//!
//! A request is served by being polled on the task of its connection, so what is said during a poll is that request's. The
//! connection takes it when the poll returns. Outside of such a poll nobody listens, and what is said is dropped.
//! Not here: the bytes on the wire (`http1`, `http2`).

use std::cell::RefCell;

use http::{HeaderMap, StatusCode};

use crate::peers::fields;
use crate::receipt::RECEIPT;

thread_local! {
    /// Of the poll that goes on now.
    static SAID: RefCell<Option<Said>> = const { RefCell::new(None) };
}

/// What was said during one poll.
#[derive(Debug, Default)]
pub struct Said {
    pub interim: Vec<Interim>,
    /// The request is of no use without its client.
    pub needs_client: bool,
}

/// An interim answer of a backend (RFC 9110 section 15.2).
#[derive(Debug)]
pub struct Interim {
    pub status: StatusCode,
    pub headers: HeaderMap,
}

/// Polls a request by `poll`, and tells what it said.
pub fn listen<T>(poll: impl FnOnce() -> T) -> (T, Said) {
    let outer = SAID.replace(Some(Said::default()));
    let polled = poll();
    (polled, SAID.replace(outer).unwrap_or_default())
}

/// Sends the client an interim answer. What the backend calls a receipt, or a field between nodes, is none.
pub fn send_interim(status: StatusCode, mut headers: HeaderMap) {
    headers.remove(&RECEIPT);
    fields::strip(&mut headers);
    SAID.with_borrow_mut(|said| {
        if let Some(said) = said {
            said.interim.push(Interim { status, headers });
        }
    });
}

/// From here on a client that has finished sending counts as gone: a program, a server or a place in line is held for it, and
/// TCP does not tell a client that left from one that only says no more.
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
    fn what_is_said_in_a_poll_is_of_that_poll() {
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
