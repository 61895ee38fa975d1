//! The streams of one connection: how many there are, since when there are none, and whether each moves.
//!
//! Not here: what a stream carries (`http2`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

use crate::body::Pace;

/// Runs the streams of one connection, each a task of the thread it was accepted on.
#[derive(Debug, Clone)]
pub(super) struct Streams(Rc<State>);

#[derive(Debug)]
struct State {
    open: Cell<usize>,
    /// Told when the first stream opens and when the last one ends.
    changed: Notify,
    /// Pace of the stream that hyper is just making: it calls the service, then at once the executor.
    next: RefCell<Option<Rc<Pace>>>,
    /// How long a client may take nothing of a response.
    patience: Duration,
}

impl Streams {
    pub(super) fn new(patience: Duration) -> Self {
        let (open, changed, next) = (Cell::new(0), Notify::new(), RefCell::new(None));
        Self(Rc::new(State { open, changed, next, patience }))
    }

    /// A stream begins; its task follows.
    pub(super) fn begin(&self) -> Rc<Pace> {
        let pace = Rc::new(Pace::default());
        self.0.next.replace(Some(Rc::clone(&pace)));
        pace
    }

    /// Ends when there has been no stream for `time`.
    pub(super) async fn idle_for(&self, time: Duration) {
        loop {
            if self.0.open.get() > 0 {
                self.0.changed.notified().await;
            } else if timeout(time, self.0.changed.notified()).await.is_err() {
                return;
            }
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
        });
    }
}

/// Counts a stream while it lives.
struct Open(Rc<State>);

impl Open {
    fn new(state: Rc<State>) -> Self {
        state.open.set(state.open.get() + 1);
        if state.open.get() == 1 {
            state.changed.notify_one();
        }
        Self(state)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.set(self.0.open.get() - 1);
        if self.0.open.get() == 0 {
            self.0.changed.notify_one();
        }
    }
}
