//! The relay's thread: taking connections inside, making those outside, and passing on what comes.
//!
//! Not here: the keeper's end of it (`super`).

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nagaya_cmdb::record::{Endpoint, EndpointHost};
use tokio::io::copy_bidirectional_with_sizes;
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

use super::watched::{Conversation, Questions, Side, Watched};
use super::{CONNECTIONS_MAX, Counts, Order, PER_INSTANCE_MAX};
use crate::metrics::Metrics;

/// How long a name may take to be looked up and one of its addresses to answer.
const DIAL_MAX: Duration = Duration::from_secs(10);

/// How long one of several addresses may take.
const ADDRESS_MAX: Duration = Duration::from_secs(3);

/// Addresses of one name that are tried.
const ADDRESSES_MAX: usize = 8;

/// Bytes of one connection that wait to be passed on, in each direction.
const BUFFER_LEN: usize = 16 * 1024;

/// How long nothing may come before it is asked whether the other end is still there.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// Pause after a connection was not taken for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Takes up instances until the keeper ends.
pub async fn serve(mut incoming: mpsc::Receiver<Order>, metrics: Metrics) {
    let open = Rc::new(Cell::new(0));
    while let Some(Order { listeners, counts, tally, gone }) = incoming.recv().await {
        let questions = Rc::new(Questions::new(Arc::clone(&counts), tally, metrics.clone()));
        for (listener, endpoint) in listeners {
            let listener = match TcpListener::from_std(listener.into()) {
                Ok(listener) => listener,
                Err(error) => {
                    counts.failed(format!("{endpoint}: {error}"));
                    continue;
                }
            };
            let shared = Shared {
                endpoint: Rc::new(endpoint),
                counts: Arc::clone(&counts),
                questions: Rc::clone(&questions),
                open: Rc::clone(&open),
            };
            spawn_local(until_gone(gone.clone(), take(listener, shared, gone.clone())));
        }
    }
}

/// What all connections to one place have.
#[derive(Clone)]
struct Shared {
    endpoint: Rc<Endpoint>,
    counts: Arc<Counts>,
    questions: Rc<Questions>,
    /// On the node.
    open: Rc<Cell<u64>>,
}

/// One connection, as long as it counts.
struct Place(Shared);

impl Place {
    fn take(shared: &Shared) -> Result<Self, &'static str> {
        // Only this thread counts.
        if shared.counts.open.load(Ordering::Relaxed) >= PER_INSTANCE_MAX {
            return Err("as many connections as one instance may have are open");
        }
        if shared.open.get() >= CONNECTIONS_MAX {
            return Err("as many connections as the node may have are open");
        }
        shared.counts.open.fetch_add(1, Ordering::Relaxed);
        shared.open.set(shared.open.get() + 1);
        Ok(Self(shared.clone()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.counts.open.fetch_sub(1, Ordering::Relaxed);
        self.0.open.set(self.0.open.get() - 1);
    }
}

/// Does this until its instance is gone.
async fn until_gone(mut gone: watch::Receiver<()>, work: impl Future<Output = ()>) {
    tokio::select! {
        () = work => {}
        // Nothing is ever sent: it ends with its sender.
        _ = gone.changed() => {}
    }
}

async fn take(listener: TcpListener, shared: Shared, gone: watch::Receiver<()>) {
    loop {
        let inside = match listener.accept().await {
            Ok((inside, _)) => inside,
            Err(error) => {
                shared.counts.failed(format!("{}: {error}", shared.endpoint));
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        shared.counts.taken.fetch_add(1, Ordering::Relaxed);
        match Place::take(&shared) {
            Ok(place) => drop(spawn_local(until_gone(gone.clone(), pass(inside, place)))),
            Err(why) => {
                shared.counts.failed(format!("{}: {why}", shared.endpoint));
                reset(&inside);
            }
        }
    }
}

async fn pass(mut inside: TcpStream, place: Place) {
    let Place(Shared { endpoint, counts, questions, .. }) = &place;
    let dialled = timeout(DIAL_MAX, dial(endpoint)).await;
    let mut outside = match dialled.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
        Ok(outside) => outside,
        Err(error) => {
            tracing::debug!(%endpoint, %error, "an application's connection is not made");
            counts.failed(format!("{endpoint}: {error}"));
            // As near to a refusal as it can be: the connection inside is there already.
            return reset(&inside);
        }
    };
    // Small messages, such as queries, are not held back for more to come.
    let _ = (inside.set_nodelay(true), outside.set_nodelay(true));
    // Who breaks off at one end is broken off at the other, by both being dropped.
    let conversation = Conversation::new(Rc::clone(questions));
    let mut asking = Watched::new(&mut inside, Side::Application, Rc::clone(&conversation));
    let mut answering = Watched::new(&mut outside, Side::Server, conversation);
    if copy_bidirectional_with_sizes(&mut asking, &mut answering, BUFFER_LEN, BUFFER_LEN).await.is_err() {
        reset(&inside);
    }
}

/// Closes so that the other end learns that not all is well.
fn reset(stream: &TcpStream) {
    // What cannot be set closes as usual.
    let _ = stream.set_zero_linger();
}

async fn dial(endpoint: &Endpoint) -> io::Result<TcpStream> {
    let stream = match &endpoint.host {
        EndpointHost::Address(address) => TcpStream::connect((*address, endpoint.port)).await?,
        EndpointHost::Name(name) => dial_name(name, endpoint.port).await?,
    };
    rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
    rustix::net::sockopt::set_tcp_keepidle(&stream, KEEPALIVE)?;
    Ok(stream)
}

async fn dial_name(name: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let found: Vec<SocketAddr> = lookup_host((name, port)).await?.take(ADDRESSES_MAX).collect();
    for address in found {
        if !is_elsewhere(address.ip()) {
            let why = format!("the name leads to {}, which may only be named itself", address.ip());
            last = io::Error::new(io::ErrorKind::PermissionDenied, why);
            continue;
        }
        match timeout(ADDRESS_MAX, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(last)
}

/// Whether a name may lead there. Whoever owns a name can let it lead anywhere, to the node's own services too: those must
/// be named by their addresses.
fn is_elsewhere(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => {
            let is_this = address.octets()[0] == 0;
            !(address.is_loopback()
                || address.is_link_local()
                || address.is_multicast()
                || address.is_broadcast()
                || is_this)
        }
        IpAddr::V6(address) => {
            !(address.is_loopback()
                || address.is_unicast_link_local()
                || address.is_multicast()
                || address.is_unspecified())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_to_no_service_of_the_node() {
        for bad in [
            "127.0.0.1",
            "127.77.0.9",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "ff02::1",
            "::ffff:127.0.0.1",
        ] {
            assert!(!is_elsewhere(bad.parse().unwrap()), "{bad}");
        }
        for good in ["203.0.113.7", "10.0.0.5", "192.168.1.9", "2001:db8::1", "fd00::1"] {
            assert!(is_elsewhere(good.parse().unwrap()), "{good}");
        }
    }
}
