//! The relay's thread: accepts connections inside, makes those outside, and passes bytes on.
//!
//! Not here: the keeper's end (`super`), the kinds of ways out (`tcp`, `socket`).

use std::cell::Cell;
use std::future::{Future, pending};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::io::copy_bidirectional_with_sizes;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

use crate::mail::{self, MailDesk, MailSender};
use crate::metrics::KeeperMetrics;
use crate::relay::endpoint::NamedPlace;
use crate::sandbox::NetworkCapture;

use super::counts::RelayCounts;
use super::forbidden::ForbiddenPlaces;
use super::names::{self, LongQuestions, NODE_QUESTIONS_MAX};
use super::order::{BusyGuard, EgressSockets, RelayMode, RelayOrder};
use super::outside::{DestinationFilter, OutsideRelay};
use super::own_sites::OwnSite;
use super::tcp::TcpTransport;
use super::transport::EgressTransport;
use super::watched::{DatabaseConversation, OpenQueries, SpeakingSide, WatchedStream};

/// Maximum number of connections: of one instance, and of the node. Each takes two descriptors and
/// two buffers.
pub const PER_INSTANCE_MAX: u64 = 256;
const CONNECTIONS_MAX: u64 = 4096;

/// Maximum time to make a connection outside, with all look-ups and tries.
const DIAL_MAX: Duration = Duration::from_secs(10);

/// Maximum number of bytes of one connection that wait to be passed on, in each direction.
const BUFFER_LEN: usize = 16 * 1024;

/// Pause after a connection was not accepted for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves instances until the keeper ends.
pub async fn serve(
    mut incoming: mpsc::Receiver<RelayOrder>,
    metrics: KeeperMetrics,
    forbidden: Arc<ForbiddenPlaces>,
    desk: Arc<MailDesk>,
) {
    let open = Rc::new(Cell::new(0));
    let questions_of_all = Arc::new(Semaphore::new(NODE_QUESTIONS_MAX));
    while let Some(RelayOrder { ways, counts, tally, wanted, busy }) = incoming.recv().await {
        let EgressSockets { places, sockets, own_ports, mail, sender, outside, own_sites, shared_ports } =
            ways;
        let questions = Rc::new(OpenQueries::new(Arc::clone(&counts), tally, metrics.clone()));
        let instance = EgressInstance { counts, questions, open: Rc::clone(&open), wanted };
        for (listener, endpoint) in places {
            let place = NamedPlace { endpoint, forbidden: Arc::clone(&forbidden) };
            begin(listener, TcpTransport(place), &instance, &busy);
        }
        sockets.into_iter().for_each(|(listener, socket)| begin(listener, socket, &instance, &busy));
        if let Some(sender) = sender.map(Rc::new) {
            for listener in mail {
                let take = take_mail(listener, Arc::clone(&desk), Rc::clone(&sender), instance.clone());
                spawn_local(instance.clone().run_until_gone(take));
            }
        }
        if let Some(sites) = &own_sites {
            for (listener, port) in own_ports {
                begin(listener, TcpTransport(OwnSite { port, sites: sites.clone() }), &instance, &busy);
            }
        }
        if let Some(NetworkCapture { listener, questions, long_questions, hold }) = outside {
            let judge = DestinationFilter { forbidden: Arc::clone(&forbidden), own_sites, shared_ports };
            begin(listener, TcpTransport(OutsideRelay::new(hold, judge)), &instance, &busy);
            begin(long_questions, TcpTransport(LongQuestions), &instance, &busy);
            let answer =
                names::answer(questions, Arc::clone(&instance.counts), Arc::clone(&questions_of_all));
            spawn_local(instance.clone().run_until_gone(answer));
        }
    }
}

/// Data that all connections of one instance share.
#[derive(Clone)]
struct EgressInstance {
    counts: Arc<RelayCounts>,
    questions: Rc<OpenQueries>,
    /// On the node.
    open: Rc<Cell<u64>>,
    wanted: watch::Receiver<RelayMode>,
}

impl EgressInstance {
    /// Does the work until the instance is gone.
    async fn run_until_gone(mut self, work: impl Future<Output = ()>) {
        tokio::select! {
            () = work => {}
            // No such value is ever sent: it ends with its sender.
            _ = self.wanted.wait_for(|_| false) => {}
        }
    }

    /// Resolves when the keeper wants this mode.
    async fn until(&mut self, wanted: RelayMode) {
        if self.wanted.wait_for(|now| *now == wanted).await.is_err() {
            // Gone: see `run_until_gone`.
            pending().await
        }
    }
}

/// One connection, while it counts.
struct CountedConnection(EgressInstance);

impl CountedConnection {
    fn take(instance: &EgressInstance) -> Result<Self, &'static str> {
        // Only this thread counts.
        if instance.counts.open.load(Ordering::Relaxed) >= PER_INSTANCE_MAX {
            return Err("as many connections as one instance may have are open");
        }
        if instance.open.get() >= CONNECTIONS_MAX {
            return Err("as many connections as the node may have are open");
        }
        instance.counts.open.fetch_add(1, Ordering::Relaxed);
        instance.open.set(instance.open.get() + 1);
        Ok(Self(instance.clone()))
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.0.counts.open.fetch_sub(1, Ordering::Relaxed);
        self.0.open.set(self.0.open.get() - 1);
    }
}

fn begin<W: EgressTransport>(listener: OwnedFd, way: W, instance: &EgressInstance, busy: &BusyGuard) {
    match W::listener(listener) {
        Ok(listener) => {
            let busy = (!W::GOES_WITH_IMAGES).then(|| busy.clone());
            let take = take(listener, Rc::new(way), instance.clone(), busy);
            spawn_local(instance.clone().run_until_gone(take));
        }
        Err(error) => instance.counts.failed(format!("{way}: {error}")),
    }
}

/// Accepts connections. `busy`: for connections that must be closed before an image is taken.
async fn take<W: EgressTransport>(
    listener: W::Listener,
    way: Rc<W>,
    mut instance: EgressInstance,
    mut busy: Option<BusyGuard>,
) {
    loop {
        let accepted = tokio::select! {
            accepted = W::accept(&listener) => accepted,
            () = instance.until(RelayMode::Pause), if busy.is_some() => {
                busy = resume(&mut instance, busy).await;
                continue;
            }
        };
        let inside = match accepted {
            Ok(inside) => inside,
            Err(error) => {
                instance.counts.failed(format!("{way}: {error}"));
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        instance.counts.taken.fetch_add(1, Ordering::Relaxed);
        match CountedConnection::take(&instance) {
            Ok(counted) => {
                let (way, busy, mut of) = (Rc::clone(&way), busy.clone(), instance.clone());
                spawn_local(instance.clone().run_until_gone(async move {
                    tokio::select! {
                        () = pass(inside, &*way, &counted) => {}
                        () = of.until(RelayMode::Pause), if busy.is_some() => {}
                    }
                    drop(busy);
                }));
            }
            Err(why) => {
                instance.counts.failed(format!("{way}: {why}"));
                W::reset(&inside);
            }
        }
    }
}

/// Accepts connections for mail. They end at the keeper's socket in the same network, so an image
/// may be taken with them open.
async fn take_mail(listener: OwnedFd, desk: Arc<MailDesk>, sender: Rc<MailSender>, instance: EgressInstance) {
    let listener = match TcpListener::from_std(listener.into()) {
        Ok(listener) => listener,
        Err(error) => return instance.counts.failed(format!("mail: {error}")),
    };
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                instance.counts.failed(format!("mail: {error}"));
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        instance.counts.taken.fetch_add(1, Ordering::Relaxed);
        let counted = match CountedConnection::take(&instance) {
            Ok(counted) => counted,
            Err(why) => {
                instance.counts.failed(format!("mail: {why}"));
                continue;
            }
        };
        let (desk, sender) = (Arc::clone(&desk), Rc::clone(&sender));
        spawn_local(instance.clone().run_until_gone(async move {
            if let Err(error) = mail::serve(stream, &desk, &sender).await {
                counted.0.counts.failed(format!("mail: {error}"));
            }
        }));
    }
}

/// Does not count as busy until the pause is over.
async fn resume(instance: &mut EgressInstance, busy: Option<BusyGuard>) -> Option<BusyGuard> {
    let idle = busy?.rest();
    loop {
        instance.until(RelayMode::Pass).await;
        let busy = idle.begin();
        // A pause that begins from here on counts this task.
        if *instance.wanted.borrow() == RelayMode::Pass {
            return Some(busy);
        }
    }
}

async fn pass<W: EgressTransport>(mut inside: W::Stream, way: &W, counted: &CountedConnection) {
    let CountedConnection(EgressInstance { counts, questions, .. }) = counted;
    let dialled = timeout(DIAL_MAX, way.dial(&inside)).await;
    let mut outside = match dialled.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
        Ok(outside) => outside,
        Err(error) => {
            tracing::debug!(%way, %error, "an application's connection is not made");
            counts.failed(format!("{way}: {error}"));
            // The nearest thing to a refusal: the connection inside exists already.
            return W::reset(&inside);
        }
    };
    W::set_up(&inside, &outside);
    // A close at one end becomes a close at the other, because both are dropped.
    let conversation = DatabaseConversation::new(Rc::clone(questions));
    let mut asking = WatchedStream::new(&mut inside, SpeakingSide::Application, Rc::clone(&conversation));
    let mut answering = WatchedStream::new(&mut outside, SpeakingSide::Server, conversation);
    if copy_bidirectional_with_sizes(&mut asking, &mut answering, BUFFER_LEN, BUFFER_LEN).await.is_err() {
        W::reset(&inside);
    }
}
