//! The streams of one connection: how many there are, since when there are none, and whether each moves.
//!
//! Not here: what a stream carries (`http2`).

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::guard::Budget;
use crate::body::Pace;
use crate::clients::crowd::Phase;
use crate::drain::PhaseHandle;
use crate::options::Limits;

/// Runs the streams of one connection, each a task of the thread it was accepted on.
#[derive(Clone)]
pub(super) struct Streams(Rc<State>);

struct State {
    open: Cell<usize>,
    /// Is told whether there are any.
    phases: PhaseHandle,
    /// When the last one ended.
    idle_since: Cell<Instant>,
    /// How long a client may take nothing of a response.
    patience: Duration,
    /// How many more may begin.
    left: Cell<u32>,
    used_up: Notify,
    /// How many more the client may cancel.
    cancels: RefCell<Budget>,
    is_over: Cell<bool>,
    over: Notify,
    /// What of the connection's bytes its client has not taken.
    queued: Queued,
}

/// Bytes that were written and that the client has not taken. `None`: the kernel does not tell.
pub(super) type Queued = Box<dyn Fn() -> Option<u64>>;

impl Streams {
    pub(super) fn new(limits: &Limits, phases: PhaseHandle, queued: Queued) -> Self {
        let cancels = limits.pace.h2_resets;
        Self(Rc::new(State {
            open: Cell::new(0),
            phases,
            idle_since: Cell::new(Instant::now()),
            patience: Duration::from_millis(limits.idle_body_ms),
            left: Cell::new(limits.keep_alive_requests),
            used_up: Notify::new(),
            cancels: RefCell::new(Budget::new(cancels, f64::from(cancels) / 60.0)),
            is_over: Cell::new(false),
            over: Notify::new(),
            queued,
        }))
    }

    /// Ends when as many streams have begun as may.
    pub(super) async fn used_up(&self) {
        while self.0.left.get() > 0 {
            self.0.used_up.notified().await;
        }
    }

    /// Ends when the client has cancelled more than it may.
    pub(super) async fn cancelled_too_often(&self) {
        while !self.is_over() {
            self.0.over.notified().await;
        }
    }

    /// The client has cancelled more than it may.
    pub(super) fn is_over(&self) -> bool {
        self.0.is_over.get()
    }

    /// A stream begins; its task follows.
    pub(super) fn begin(&self) -> Rc<Pace> {
        self.0.left.set(self.0.left.get().saturating_sub(1));
        if self.0.left.get() == 0 {
            self.0.used_up.notify_one();
        }
        Rc::new(Pace::default())
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

impl Streams {
    /// Runs a stream in a task of its own.
    pub(super) fn spawn(&self, stream: impl Future<Output = ()> + 'static, pace: Rc<Pace>) {
        let open = Open::new(Rc::clone(&self.0));
        let patience = self.0.patience;
        tokio::task::spawn_local(async move {
            let open = open;
            tokio::select! {
                biased;
                // The stream of a response that has not ended was reset by its client.
                () = stream => if !pace.is_ended() { open.0.count_cancel() },
                // Dropping the stream's future resets the stream and gives back all the response holds.
                () = pace.client_stalled(patience, || (open.0.queued)()) => {}
            }
            let receipt = pace.take_receipt();
            if receipt.is_some() {
                // The client does not wait for the account: the connection's task, which sends it the answer, goes first.
                behind_others().await;
            }
        });
    }
}

impl State {
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
struct Open(Rc<State>);

impl Open {
    fn new(state: Rc<State>) -> Self {
        if state.open.get() == 0 {
            state.phases.begin(Phase::Working);
        }
        state.open.set(state.open.get() + 1);
        Self(state)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.set(self.0.open.get() - 1);
        if self.0.open.get() == 0 {
            self.0.idle_since.set(Instant::now());
            self.0.phases.begin(Phase::Idle);
        }
    }
}
