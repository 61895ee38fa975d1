//! Tracks the streams of one connection: how many there are, since when there are none, and
//! whether each moves.
//!
//! Not here: what a stream carries (`h2`).

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::http::body::SendProgress;
use crate::http::connections::PhaseHandle;
use crate::http::h2::guard::RefillBudget;
use crate::http::message::SendObserver;
use crate::metrics::ConnectionPhase;
use crate::options::EdgeLimits;

/// Runs the streams of one connection, on the thread that accepted it.
#[derive(Clone)]
pub(super) struct StreamSet(Rc<StreamTurns>);

struct StreamTurns {
    open: Cell<usize>,
    /// Gets the phase: with streams or without.
    phases: PhaseHandle,
    /// End of the last one.
    idle_since: Cell<Instant>,
    /// Maximum time in which a client may take nothing of a response.
    patience: Duration,
    /// Number of streams that may still begin.
    left: Cell<u32>,
    used_up: Notify,
    /// Number of streams that the client may still cancel.
    cancels: RefCell<RefillBudget>,
    is_over: Cell<bool>,
    over: Notify,
    /// Returns the bytes of the connection that its client has not taken.
    queued: QueuedBytes,
    /// Accounts of streams that were answered at once.
    accounts: RefCell<Vec<Box<dyn SendObserver>>>,
}

/// Returns the number of written bytes that the client has not taken. `None` if the kernel does
/// not report it.
pub(super) type QueuedBytes = Box<dyn Fn() -> Option<u64>>;

impl StreamSet {
    pub(super) fn new(limits: &EdgeLimits, phases: PhaseHandle, queued: QueuedBytes) -> Self {
        let cancels = limits.pace.h2_resets;
        Self(Rc::new(StreamTurns {
            open: Cell::new(0),
            phases,
            idle_since: Cell::new(Instant::now()),
            patience: Duration::from_millis(limits.idle_body_ms),
            left: Cell::new(limits.keep_alive_requests),
            used_up: Notify::new(),
            cancels: RefCell::new(RefillBudget::new(cancels, f64::from(cancels) / 60.0)),
            is_over: Cell::new(false),
            over: Notify::new(),
            queued,
            accounts: RefCell::default(),
        }))
    }

    /// Completes when the maximum number of streams has begun.
    pub(super) async fn used_up(&self) {
        while self.0.left.get() > 0 {
            self.0.used_up.notified().await;
        }
    }

    /// Completes when the client has cancelled too many streams.
    pub(super) async fn cancelled_too_often(&self) {
        while !self.is_over() {
            self.0.over.notified().await;
        }
    }

    /// Returns whether the client has cancelled too many streams.
    pub(super) fn is_over(&self) -> bool {
        self.0.is_over.get()
    }

    /// Counts a new stream. Its task follows.
    pub(super) fn begin(&self) -> Rc<SendProgress> {
        self.0.left.set(self.0.left.get().saturating_sub(1));
        if self.0.left.get() == 0 {
            self.0.used_up.notify_one();
        }
        Rc::new(SendProgress::default())
    }

    /// Completes when there has been no stream for `time`, beginning now. It checks when that can
    /// be the case, so that streams notify nobody.
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

    /// Counts as a stream while it is held.
    pub(super) fn hold(&self) -> impl Drop {
        StreamGuard::new(Rc::clone(&self.0))
    }

    /// Runs a stream: at once if possible, and the rest in a task of its own. Most responses from
    /// files need none.
    pub(super) fn run(&self, mut stream: Pin<Box<dyn Future<Output = ()>>>, pace: Rc<SendProgress>) {
        let open = StreamGuard::new(Rc::clone(&self.0));
        // This poll wakes nobody: the task polls it again.
        match stream.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(()) => {
                open.end_stream(&pace);
                self.0.accounts.borrow_mut().extend(pace.take_receipt());
            }
            Poll::Pending => self.spawn(stream, open, pace),
        }
    }

    fn spawn(&self, stream: Pin<Box<dyn Future<Output = ()>>>, open: StreamGuard, pace: Rc<SendProgress>) {
        let patience = self.0.patience;
        tokio::task::spawn_local(async move {
            let open = open;
            tokio::select! {
                biased;
                () = stream => open.end_stream(&pace),
                // Dropping the stream's future resets the stream and releases all guards of the
                // response.
                () = pace.client_stalled(patience, || (open.0.queued)()) => {}
            }
            let receipt = pace.take_receipt();
            if receipt.is_some() {
                // The client does not wait for the context. The connection's task sends it the
                // answer and goes first.
                behind_others().await;
            }
        });
    }

    /// Writes the accounts of streams that have ended. Called when their responses have been
    /// sent.
    pub(super) fn write_accounts(&self) {
        // Writing one may end others.
        while let Some(account) = self.0.accounts.borrow_mut().pop() {
            drop(account);
        }
    }
}

impl StreamTurns {
    fn count_cancel(&self) {
        if !self.cancels.borrow_mut().spend(1) {
            self.is_over.set(true);
            self.over.notify_one();
        }
    }
}

/// Lets all tasks run that were woken before.
pub(super) async fn behind_others() {
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
struct StreamGuard(Rc<StreamTurns>);

impl StreamGuard {
    fn new(state: Rc<StreamTurns>) -> Self {
        if state.open.get() == 0 {
            state.phases.begin(ConnectionPhase::Working);
        }
        state.open.set(state.open.get() + 1);
        Self(state)
    }

    /// Ends a stream. If its response has not ended, the client has reset it.
    fn end_stream(&self, pace: &SendProgress) {
        if !pace.is_ended() {
            self.0.count_cancel();
        }
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        self.0.open.set(self.0.open.get() - 1);
        if self.0.open.get() == 0 {
            self.0.idle_since.set(Instant::now());
            self.0.phases.begin(ConnectionPhase::Idle);
        }
    }
}
