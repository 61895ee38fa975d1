//! A request's stay in its cell: where its programs are to run, where they did, and what they used there.
//!
//! Shared by the request's account and by whatever runs for it. What a program used is known only once it has ended, which is
//! after the response's body: whoever runs one holds a [`Due`], and the account is closed when the last of them is
//! paid. A `Due` that is dropped counts as paid with nothing known, so nothing can wait for ever.
//!
//! Not here: cells and their limits (`keeper`), how the use is told (`receipt`, `access_log`, `metrics`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_cmdb::cell::{Boost, Confinement, CpuQuota, Usage};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::access_log::{More, Used};

/// So long the end of a response is held back for what its programs used. It is there within a millisecond, unless the
/// keeper is gone.
pub const USAGE_WAIT: Duration = Duration::from_secs(2);

/// Where one request's programs run, and what they used. Only requests that a limit or a program concerns have one.
#[derive(Debug)]
pub struct Stay {
    confinement: Arc<Confinement>,
    /// The client gets the receipt, so its figures are worth waiting for.
    disclosed: bool,
    state: RefCell<State>,
    paced_us: Cell<u64>,
    paid: Notify,
}

/// Whose cell it is that a request to an application ran in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CellOf {
    /// Its own: its limits hold for it alone.
    Request,
    /// The instance's: it has the limits that all of the instance has, and its own hold for its bodies only.
    Instance,
}

impl CellOf {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Instance => "instance",
        }
    }
}

#[derive(Debug, Default)]
struct State {
    cell: Option<Box<str>>,
    /// For an application.
    cell_of: Option<CellOf>,
    /// How far limits of an application were raised for it.
    raised: Boost,
    /// When the first program began.
    since: Option<Instant>,
    /// Of all programs that have ended.
    used: Usage,
    /// Programs whose use is not known yet.
    due: u32,
    /// The use of a program was never told.
    unknown: bool,
    closing: Option<Closing>,
}

/// What is left to do once everything is paid.
struct Closing(Box<dyn FnOnce()>);

impl std::fmt::Debug for Closing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Closing")
    }
}

impl Stay {
    pub fn new(confinement: impl Into<Arc<Confinement>>) -> Rc<Self> {
        Self::of(confinement, false)
    }

    /// `disclosed`: the client is told what was used.
    pub fn of(confinement: impl Into<Arc<Confinement>>, disclosed: bool) -> Rc<Self> {
        Rc::new(Self {
            confinement: confinement.into(),
            disclosed,
            state: RefCell::default(),
            paced_us: Cell::new(0),
            paid: Notify::new(),
        })
    }

    pub fn confinement(&self) -> &Arc<Confinement> {
        &self.confinement
    }

    pub fn is_disclosed(&self) -> bool {
        self.disclosed
    }

    /// The quota of the request's own cell.
    pub fn quota(&self) -> Option<CpuQuota> {
        self.confinement.limits.cpu
    }

    /// Where it runs, as `nagaya cells` shows it.
    pub fn set_cell(&self, name: &str) {
        self.state.borrow_mut().cell = Some(name.into());
    }

    /// The same of a request to an application.
    pub fn set_cell_of(&self, name: &str, of: CellOf) {
        let mut state = self.state.borrow_mut();
        (state.cell, state.cell_of) = (Some(name.into()), Some(of));
    }

    pub fn cell_of(&self) -> Option<CellOf> {
        self.state.borrow().cell_of
    }

    /// Limits of the application were raised for it, so far.
    pub fn set_raised(&self, raised: Boost) {
        self.state.borrow_mut().raised = raised;
    }

    pub fn raised(&self) -> Boost {
        self.state.borrow().raised
    }

    pub fn cell(&self) -> Option<Box<str>> {
        self.state.borrow().cell.clone()
    }

    /// A program begins now. Its use is paid by what this returns.
    pub fn begin(self: &Rc<Self>) -> Due {
        let mut state = self.state.borrow_mut();
        state.since.get_or_insert_with(Instant::now);
        state.due += 1;
        Due { stay: Rc::clone(self), usage: None }
    }

    /// When its first program began; none if it had none.
    pub fn since(&self) -> Option<Instant> {
        self.state.borrow().since
    }

    /// What its programs used, as far as it is known. None: there was no program, or what it used was never told.
    pub fn usage(&self) -> Option<Usage> {
        let state = self.state.borrow();
        (state.since.is_some() && !state.unknown).then_some(state.used)
    }

    /// Everything its programs used is known.
    pub fn is_paid(&self) -> bool {
        self.state.borrow().due == 0
    }

    /// Waits until what its programs used is known, no longer than `USAGE_WAIT`.
    pub async fn paid(&self) {
        let all = async {
            while !self.is_paid() {
                self.paid.notified().await;
            }
        };
        // Later is as good as never: whoever waits goes on with what is known.
        let _ = timeout(USAGE_WAIT, all).await;
    }

    /// So much longer a body took because of limits.
    pub fn add_paced(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.paced_us.set(self.paced_us.get().saturating_add(us));
    }

    pub fn paced_us(&self) -> u64 {
        self.paced_us.get()
    }

    /// Runs `close` once everything is paid: now, or when the last `Due` goes.
    pub fn when_paid(&self, close: impl FnOnce() + 'static) {
        if self.is_paid() {
            return close();
        }
        self.state.borrow_mut().closing = Some(Closing(Box::new(close)));
    }

    /// Gives what it knows to the record of the request.
    pub fn hand_over(&self, more: &mut More) {
        self.tell(more);
        more.confinement = Some(Arc::clone(&self.confinement));
    }

    /// Says what was used so far.
    pub fn tell(&self, more: &mut More) {
        let state = self.state.borrow();
        more.cell.clone_from(&state.cell);
        (more.cell_of, more.raised) = (state.cell_of, state.raised);
        more.used = match state.since {
            None => Used::Nothing,
            Some(_) if state.unknown || state.due > 0 => Used::Unknown,
            Some(_) => Used::Known(state.used),
        };
        more.paced_us = self.paced_us.get();
    }

    fn pay(&self, usage: Option<Usage>) {
        let mut state = self.state.borrow_mut();
        match usage {
            Some(usage) => add(&mut state.used, usage),
            None => state.unknown = true,
        }
        state.due -= 1;
        if state.due > 0 {
            return;
        }
        let closing = state.closing.take();
        drop(state);
        self.paid.notify_one();
        if let Some(Closing(close)) = closing {
            close();
        }
    }
}

fn add(sum: &mut Usage, usage: Usage) {
    let Usage { cpu_us, read_bytes, write_bytes, throttled_us, demoted } = usage;
    sum.cpu_us = sum.cpu_us.saturating_add(cpu_us);
    sum.read_bytes = sum.read_bytes.saturating_add(read_bytes);
    sum.write_bytes = sum.write_bytes.saturating_add(write_bytes);
    sum.throttled_us = sum.throttled_us.saturating_add(throttled_us);
    sum.demoted = sum.demoted.saturating_add(demoted);
}

/// What a program used is still to be told.
#[derive(Debug)]
pub struct Due {
    stay: Rc<Stay>,
    usage: Option<Usage>,
}

impl Due {
    pub fn stay(&self) -> &Rc<Stay> {
        &self.stay
    }

    pub fn pay(mut self, usage: Usage) {
        self.usage = Some(usage);
    }
}

impl Drop for Due {
    fn drop(&mut self) {
        self.stay.pay(self.usage.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(cpu_us: u64) -> Usage {
        Usage { cpu_us, ..Usage::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn what_all_programs_used_is_waited_for_and_added_up() {
        let stay = Stay::new(Confinement::default());
        assert_eq!(stay.usage(), None, "no program, no use");
        let (first, second) = (stay.begin(), stay.begin());
        first.pay(cpu(3));
        assert!(!stay.is_paid());
        let (closed, seen) = (Rc::new(Cell::new(false)), Rc::clone(&stay));
        let note = Rc::clone(&closed);
        stay.when_paid(move || note.set(seen.usage() == Some(cpu(7))));
        let waiting = stay.paid();
        tokio::pin!(waiting);
        assert!(
            std::future::poll_fn(|cx| std::task::Poll::Ready(waiting.as_mut().poll(cx))).await.is_pending()
        );
        second.pay(cpu(4));
        waiting.await;
        assert!(closed.get());
    }

    #[tokio::test(start_paused = true)]
    async fn a_use_that_is_never_told_ends_the_wait_and_is_not_taken_for_none() {
        let stay = Stay::new(Confinement::default());
        let (lost, late) = (stay.begin(), stay.begin());
        drop(lost);
        let start = tokio::time::Instant::now();
        stay.paid().await;
        assert_eq!(start.elapsed(), USAGE_WAIT, "the second one is waited for within the bound");
        late.pay(cpu(1));
        stay.paid().await;
        assert_eq!(stay.usage(), None);
    }
}
