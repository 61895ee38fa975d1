//! Tests of what may be said again when an exchange fails, against servers that fail in each way.
//!
//! Not here: exchanges that succeed (`tests/e2e/proxy.rs`).

use std::cell::RefCell;
use std::sync::Arc;

use nagaya_keeper_api::quiet_stream::QuietStream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::{LocalSet, spawn_local};

use super::*;
use crate::backends::programs::testing::request;
use crate::backends::upstream::pool::UpstreamSocket;
use crate::metrics::EdgeMetrics;

/// How a server behind one connection behaves.
#[derive(Debug, Clone, Copy)]
enum Server {
    /// It closes before anything is sent to it.
    Gone,
    /// It reads the request and closes.
    Silent,
    /// It closes in the middle of its head.
    HalfHead,
    Answers,
    /// There is no connection.
    Refuses,
    /// Nobody says whether there is one.
    NeverThere,
}

/// Gives one connection after the other.
struct Servers(RefCell<Vec<Server>>);

impl Connector for Servers {
    async fn connect(&self, _: &UpstreamAddress) -> Result<UpstreamSocket, Refusal> {
        let server = self.0.borrow_mut().remove(0);
        let (ours, theirs) = UnixStream::pair().unwrap();
        match server {
            Server::Gone => drop(theirs),
            Server::Refuses => return Err(Refusal::BackendUnreachable("refused".into())),
            Server::NeverThere => std::future::pending().await,
            _ => drop(spawn_local(serve(theirs, server))),
        }
        Ok(UpstreamSocket::Unix(QuietStream::new(ours.into_std().unwrap().into()).unwrap()))
    }
}

async fn serve(mut stream: UnixStream, server: Server) {
    let mut buffer = [0; 4096];
    let _ = stream.read(&mut buffer).await.unwrap();
    let said: &[u8] = match server {
        Server::HalfHead => b"HTTP/1.1 200",
        Server::Answers => b"HTTP/1.1 204 No Content\r\n\r\n",
        _ => b"",
    };
    stream.write_all(said).await.unwrap();
    if matches!(server, Server::Answers) {
        // Kept open for the next request; the test ends it.
        let _ = stream.read(&mut buffer).await;
    }
}

/// The status, or whether the request may be sent again.
fn exchanged(method: &Method, servers: &[Server]) -> Result<u16, bool> {
    last(method, servers, 1, 1)
}

/// The same of the last of so many requests, which may be sent again so often together.
fn last(method: &Method, servers: &[Server], requests: u32, retries: u32) -> Result<u16, bool> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&runtime, async {
        let pool = Rc::new(UpstreamPool::new(Arc::new(EdgeMetrics::new())));
        let second = Duration::from_secs(20);
        let bounds = ExchangeTimeouts {
            connect: Duration::from_millis(50),
            head: second,
            idle: second,
            head_bytes: 4096,
        };
        let address = UpstreamAddress::Tcp("nowhere:80".into());
        let servers = Servers(RefCell::new(servers.to_vec()));
        let head = request(method.clone(), RequestBody::empty()).head;
        let outgoing = UpstreamHead { head: &head, fields: b"\r\nhost: demo", trailers: &[] };
        let retries = RetryBudget::new(Some(retries));
        let mut said = Err(false);
        for _ in 0..requests {
            let sent =
                exchange(&pool, &address, &servers, outgoing, RequestBody::empty(), bounds, &retries).await;
            said = sent.map(|response| response.status.as_u16()).map_err(|failed| failed.again.is_some());
        }
        said
    })
}

#[test]
fn unsent_or_harmless_request_may_be_sent_again() {
    let (get, post) = (Method::GET, Method::POST);
    assert_eq!(exchanged(&post, &[Server::Answers]), Ok(204));
    for (method, server, may_again) in [
        (&get, Server::Gone, true),
        (&get, Server::Silent, true),
        (&get, Server::Refuses, true),
        (&post, Server::Gone, true),
        (&post, Server::Refuses, true),
        // It may have been done.
        (&post, Server::Silent, false),
        // An answer had begun.
        (&get, Server::HalfHead, false),
        // The next attempt would wait as long.
        (&get, Server::NeverThere, false),
    ] {
        assert_eq!(exchanged(method, &[server]), Err(may_again), "{method} {server:?}");
    }
}

#[test]
fn stale_connection_costs_one_retry_or_fails_the_request() {
    // The first closes once it is asked a second time.
    let servers = [Server::Answers, Server::Answers];
    assert_eq!(last(&Method::GET, &servers, 2, 1), Ok(204));
    assert_eq!(last(&Method::GET, &servers, 2, 0), Err(true));
}
