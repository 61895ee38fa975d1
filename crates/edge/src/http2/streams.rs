//! The streams of one connection: how many there are, since when there are none, and whether each moves.
//!
//! Not here: what a stream carries (`http2`).

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::body::Pace;

/// Runs the streams of one connection, each a task of the thread it was accepted on.
#[derive(Debug, Clone)]
pub(super) struct Streams(Rc<State>);

#[derive(Debug)]
struct State {
    open: Cell<usize>,
    /// When the last one ended.
    idle_since: Cell<Instant>,
    /// Pace of the stream that hyper is just making: it calls the service, then at once the executor.
    next: RefCell<Option<Rc<Pace>>>,
    /// How long a client may take nothing of a response.
    patience: Duration,
}

impl Streams {
    pub(super) fn new(patience: Duration) -> Self {
        let (open, idle_since, next) = (Cell::new(0), Cell::new(Instant::now()), RefCell::new(None));
        Self(Rc::new(State { open, idle_since, next, patience }))
    }

    /// A stream begins; its task follows.
    pub(super) fn begin(&self) -> Rc<Pace> {
        let pace = Rc::new(Pace::default());
        self.0.next.replace(Some(Rc::clone(&pace)));
        pace
    }

    /// Ends when there has been no stream for `time`, beginning now. Looks when that could be, so that streams that come and go
    /// need to tell nobody.
    pub(super) async fn idle_for(&self, time: Duration) {
        let begun = Instant::now();
        loop {
            let since =
                if self.0.open.get() > 0 { Instant::now() } else { self.0.idle_since.get().max(begun) };
            let over = since + time;
            if over <= Instant::now() {
                return;
            }
            sleep_until(over).await;
        }
    }
}

impl<F> hyper::rt::Executor<F> for Streams
where
    F: Future<Output = ()> + 'static,
{
    fn execute(&self, stream: F) {
        let open = Open::new(Rc::clone(&self.0));
        let pace = self.0.next.take().unwrap_or_default();
        let patience = self.0.patience;
        tokio::task::spawn_local(async move {
            let _open = open;
            tokio::select! {
                biased;
                () = stream => {}
                // Dropping the stream's future resets the stream and gives back all the response holds.
                () = pace.client_stalled(patience) => {}
            }
            let receipt = pace.take_receipt();
            if receipt.is_some() {
                // The client does not wait for the account: the connection's task, which sends it the answer, goes first.
                behind_others().await;
            }
        });
    }
}

/// Lets all tasks run that were woken before.
async fn behind_others() {
    let mut is_behind = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut is_behind, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Counts a stream while it lives.
struct Open(Rc<State>);

impl Open {
    fn new(state: Rc<State>) -> Self {
        state.open.set(state.open.get() + 1);
        Self(state)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.set(self.0.open.get() - 1);
        if self.0.open.get() == 0 {
            self.0.idle_since.set(Instant::now());
        }
    }
}
