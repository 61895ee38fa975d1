//! The relay's thread: taking connections inside, making those outside, and passing on what comes.
//!
//! Not here: the keeper's end of it (`super`), what kinds of ways out there are (`tcp`, `socket`).

use std::cell::Cell;
use std::fmt::Display;
use std::future::{Future, pending};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional_with_sizes};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

use super::forbidden::ForbiddenPlaces;
use super::names::{self, LongQuestions, NODE_QUESTIONS_MAX};
use super::outside::{Judge, Outside};
use super::place::NamedPlace;
use super::tcp::Tcp;
use super::watched::{Conversation, Questions, Side, Watched};
use super::{Busy, CONNECTIONS_MAX, Counts, Order, PER_INSTANCE_MAX, Wanted, Ways};
use crate::metrics::Metrics;
use crate::sandbox::Capture;

/// How long a connection outside may take to be made, with all that is looked up and tried for it.
const DIAL_MAX: Duration = Duration::from_secs(10);

/// Bytes of one connection that wait to be passed on, in each direction.
const BUFFER_LEN: usize = 16 * 1024;

/// Pause after a connection was not taken for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// One way out of a sandbox. Its text is how it is named in a record.
pub trait Way: Display + 'static {
    type Listener;
    type Stream: AsyncRead + AsyncWrite + Unpin;

    /// Whether an image can be taken while a connection of this kind is open.
    const GOES_WITH_IMAGES: bool;

    fn listener(socket: OwnedFd) -> io::Result<Self::Listener>;
    async fn accept(listener: &Self::Listener) -> io::Result<Self::Stream>;
    /// Makes the connection outside that belongs to this one.
    async fn dial(&self, inside: &Self::Stream) -> io::Result<Self::Stream>;
    fn set_up(inside: &Self::Stream, outside: &Self::Stream);
    /// To be closed so that the other end learns that not all is well.
    fn reset(inside: &Self::Stream);
}

/// Takes up instances until the keeper ends.
pub async fn serve(mut incoming: mpsc::Receiver<Order>, metrics: Metrics, forbidden: Arc<ForbiddenPlaces>) {
    let open = Rc::new(Cell::new(0));
    let questions_of_all = Arc::new(Semaphore::new(NODE_QUESTIONS_MAX));
    while let Some(Order { ways, counts, tally, wanted, busy }) = incoming.recv().await {
        let Ways { places, sockets, outside, own_ports, shared_ports } = ways;
        let questions = Rc::new(Questions::new(Arc::clone(&counts), tally, metrics.clone()));
        let instance = Instance { counts, questions, open: Rc::clone(&open), wanted };
        for (listener, endpoint) in places {
            let place = NamedPlace { endpoint, forbidden: Arc::clone(&forbidden) };
            begin(listener, Tcp(place), &instance, &busy);
        }
        sockets.into_iter().for_each(|(listener, socket)| begin(listener, socket, &instance, &busy));
        if let Some(Capture { listener, questions, long_questions, hold }) = outside {
            let judge = Judge { forbidden: Arc::clone(&forbidden), own_ports, shared_ports };
            begin(listener, Tcp(Outside::new(hold, judge)), &instance, &busy);
            begin(long_questions, Tcp(LongQuestions), &instance, &busy);
            let answer =
                names::answer(questions, Arc::clone(&instance.counts), Arc::clone(&questions_of_all));
            spawn_local(instance.clone().until_gone(answer));
        }
    }
}

/// What all connections of one instance have.
#[derive(Clone)]
struct Instance {
    counts: Arc<Counts>,
    questions: Rc<Questions>,
    /// On the node.
    open: Rc<Cell<u64>>,
    wanted: watch::Receiver<Wanted>,
}

impl Instance {
    /// Does this until the instance is gone.
    async fn until_gone(mut self, work: impl Future<Output = ()>) {
        tokio::select! {
            () = work => {}
            // Nothing of the kind is ever sent: it ends with its sender.
            _ = self.wanted.wait_for(|_| false) => {}
        }
    }

    /// Resolves when the keeper wants this.
    async fn until(&mut self, wanted: Wanted) {
        if self.wanted.wait_for(|now| *now == wanted).await.is_err() {
            // Gone: see `until_gone`.
            pending().await
        }
    }
}

/// One connection, as long as it counts.
struct Counted(Instance);

impl Counted {
    fn take(instance: &Instance) -> Result<Self, &'static str> {
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

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.counts.open.fetch_sub(1, Ordering::Relaxed);
        self.0.open.set(self.0.open.get() - 1);
    }
}

fn begin<W: Way>(listener: OwnedFd, way: W, instance: &Instance, busy: &Busy) {
    match W::listener(listener) {
        Ok(listener) => {
            let busy = (!W::GOES_WITH_IMAGES).then(|| busy.clone());
            let take = take(listener, Rc::new(way), instance.clone(), busy);
            spawn_local(instance.clone().until_gone(take));
        }
        Err(error) => instance.counts.failed(format!("{way}: {error}")),
    }
}

/// `busy`: of what must be closed before an image is taken.
async fn take<W: Way>(listener: W::Listener, way: Rc<W>, mut instance: Instance, mut busy: Option<Busy>) {
    loop {
        let accepted = tokio::select! {
            accepted = W::accept(&listener) => accepted,
            () = instance.until(Wanted::Pause), if busy.is_some() => {
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
        match Counted::take(&instance) {
            Ok(counted) => {
                let (way, busy, mut of) = (Rc::clone(&way), busy.clone(), instance.clone());
                spawn_local(instance.clone().until_gone(async move {
                    tokio::select! {
                        () = pass(inside, &*way, &counted) => {}
                        () = of.until(Wanted::Pause), if busy.is_some() => {}
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

/// Counts as not busy until the pause is over.
async fn resume(instance: &mut Instance, busy: Option<Busy>) -> Option<Busy> {
    let idle = busy?.rest();
    loop {
        instance.until(Wanted::Pass).await;
        let busy = idle.begin();
        // Whoever pauses it again from here on counts this one.
        if *instance.wanted.borrow() == Wanted::Pass {
            return Some(busy);
        }
    }
}

async fn pass<W: Way>(mut inside: W::Stream, way: &W, counted: &Counted) {
    let Counted(Instance { counts, questions, .. }) = counted;
    let dialled = timeout(DIAL_MAX, way.dial(&inside)).await;
    let mut outside = match dialled.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
        Ok(outside) => outside,
        Err(error) => {
            tracing::debug!(%way, %error, "an application's connection is not made");
            counts.failed(format!("{way}: {error}"));
            // As near to a refusal as it can be: the connection inside is there already.
            return W::reset(&inside);
        }
    };
    W::set_up(&inside, &outside);
    // Who breaks off at one end is broken off at the other, by both being dropped.
    let conversation = Conversation::new(Rc::clone(questions));
    let mut asking = Watched::new(&mut inside, Side::Application, Rc::clone(&conversation));
    let mut answering = Watched::new(&mut outside, Side::Server, conversation);
    if copy_bidirectional_with_sizes(&mut asking, &mut answering, BUFFER_LEN, BUFFER_LEN).await.is_err() {
        W::reset(&inside);
    }
}
