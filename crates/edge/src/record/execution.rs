//! A request's execution in its cell: where its programs are to run, where they ran, and what they
//! used there.
//!
//! The request's context and everything that runs for the request share it. The usage of a program
//! is known only once it has ended. That is after the response's body. So each runner of a program
//! holds a [`PendingUsage`], and the context is closed when the last of them is reported. A dropped
//! `PendingUsage` counts as reported with nothing known, so nothing can wait for ever.
//!
//! Not here: cells and their limits (`keeper`), the output of the usage (`receipt`, `access_log`,
//! `metrics`).

use std::any::Any;
use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_records::cell::{Boost, Confinement, CpuQuota, RequestUsage};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::http::throttle::flow::PacedTime;
use crate::record::access_record::{AccessDetails, ProgramUsage, UsageScope};

/// Maximum time for which the end of a response is held back for the usage of its programs. It
/// arrives within a millisecond, unless the keeper has ended.
pub const USAGE_WAIT: Duration = Duration::from_secs(2);

thread_local! {
    /// The confinement of requests without limits of their own: one for all of them.
    static UNCONFINED: Arc<Confinement> = Arc::default();
}

/// Where the programs of one request run, and their usage. Only requests with a limit or a
/// program have one.
#[derive(Debug)]
pub struct CellExecution {
    confinement: Arc<Confinement>,
    /// The client gets the receipt, so its figures are worth waiting for.
    disclosed: bool,
    state: RefCell<ExecutionState>,
    paced_us: Cell<u64>,
    all_reported: Notify,
}

#[derive(Debug, Default)]
struct ExecutionState {
    cell: Option<Arc<str>>,
    /// For an application: whose cell it is.
    cell_of: Option<UsageScope>,
    /// Factor by which limits of an application were raised for it.
    raised: Boost,
    /// Start of the first program.
    since: Option<Instant>,
    /// Usage of all programs that have ended.
    used: RequestUsage,
    /// Number of programs whose usage is not known yet.
    due: u32,
    /// The usage of a program was never reported.
    unknown: bool,
    closing: Option<ClosingAction>,
    /// Permit of a request that is over while its programs still run.
    permit: Option<KeptPermit>,
}

/// The right to run, of whatever kind: it is only kept here.
struct KeptPermit(#[expect(dead_code, reason = "it is given back when it is dropped")] Box<dyn Any>);

impl std::fmt::Debug for KeptPermit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeptPermit")
    }
}

/// Action to take once everything is reported.
struct ClosingAction(Box<dyn FnOnce()>);

impl std::fmt::Debug for ClosingAction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Closing")
    }
}

impl CellExecution {
    #[cfg(test)]
    pub fn new(confinement: impl Into<Arc<Confinement>>) -> Rc<Self> {
        Self::of(confinement, false)
    }

    /// `disclosed` is true if the client gets the receipt.
    pub fn of(confinement: impl Into<Arc<Confinement>>, disclosed: bool) -> Rc<Self> {
        Rc::new(Self {
            confinement: confinement.into(),
            disclosed,
            state: RefCell::default(),
            paced_us: Cell::new(0),
            all_reported: Notify::new(),
        })
    }

    pub fn confinement(&self) -> &Arc<Confinement> {
        &self.confinement
    }

    pub fn is_disclosed(&self) -> bool {
        self.disclosed
    }

    /// Returns the quota of the request's own cell.
    pub fn quota(&self) -> Option<CpuQuota> {
        self.confinement.limits.cpu
    }

    /// Sets the name of its cell, as `nagaya cells` shows it.
    pub fn set_cell(&self, name: Arc<str>) {
        self.state.borrow_mut().cell = Some(name);
    }

    /// Sets the cell of a request to an application.
    pub fn set_cell_of(&self, name: &str, of: UsageScope) {
        let mut state = self.state.borrow_mut();
        (state.cell, state.cell_of) = (Some(name.into()), Some(of));
    }

    pub fn cell_of(&self) -> Option<UsageScope> {
        self.state.borrow().cell_of
    }

    /// Records that limits of the application were raised for it.
    pub fn set_raised(&self, raised: Boost) {
        self.state.borrow_mut().raised = raised;
    }

    pub fn raised(&self) -> Boost {
        self.state.borrow().raised
    }

    pub fn cell(&self) -> Option<Arc<str>> {
        self.state.borrow().cell.clone()
    }

    /// A program begins now. Its use is reported by what this returns.
    pub fn begin(self: &Rc<Self>) -> PendingUsage {
        let mut state = self.state.borrow_mut();
        state.since.get_or_insert_with(Instant::now);
        state.due += 1;
        PendingUsage { execution: Rc::clone(self), usage: None }
    }

    /// Returns the start of its first program. `None` if it had none.
    pub fn since(&self) -> Option<Instant> {
        self.state.borrow().since
    }

    /// Returns the usage of its programs, as far as it is known. `None` if there was no program,
    /// or if its usage was never reported.
    pub fn usage(&self) -> Option<RequestUsage> {
        let state = self.state.borrow();
        (state.since.is_some() && !state.unknown).then_some(state.used)
    }

    /// Returns whether the usage of all its programs is known.
    pub fn is_all_reported(&self) -> bool {
        self.state.borrow().due == 0
    }

    /// Waits until the usage of its programs is known, at most `USAGE_WAIT`.
    pub async fn wait_all_reported(&self) {
        let all = async {
            while !self.is_all_reported() {
                self.all_reported.notified().await;
            }
        };
        // After the limit the response goes on with the known figures.
        let _ = timeout(USAGE_WAIT, all).await;
    }

    pub fn paced_us(&self) -> u64 {
        self.paced_us.get()
    }

    /// Runs `close` once everything is reported: now, or when the last `PendingUsage` goes.
    pub fn on_complete(&self, close: impl FnOnce() + 'static) {
        if self.is_all_reported() {
            return close();
        }
        self.state.borrow_mut().closing = Some(ClosingAction(Box::new(close)));
    }

    /// Keeps the right to run until all programs of the request have ended.
    pub fn keep_permit(&self, permit: impl Any) {
        if !self.is_all_reported() {
            self.state.borrow_mut().permit = Some(KeptPermit(Box::new(permit)));
        }
    }

    /// Writes its data to the record of the request.
    pub fn hand_over(&self, more: &mut AccessDetails) {
        self.tell(more);
        more.confinement = Some(Arc::clone(&self.confinement));
    }

    /// Writes the usage so far.
    pub fn tell(&self, more: &mut AccessDetails) {
        let state = self.state.borrow();
        more.cell.clone_from(&state.cell);
        (more.cell_of, more.raised) = (state.cell_of, state.raised);
        more.used = match state.since {
            None => ProgramUsage::Nothing,
            Some(_) if state.unknown || state.due > 0 => ProgramUsage::Unknown,
            Some(_) => ProgramUsage::Known(state.used),
        };
        more.paced_us = self.paced_us.get();
    }

    fn take_report(&self, usage: Option<RequestUsage>) {
        let mut state = self.state.borrow_mut();
        match usage {
            Some(usage) => add(&mut state.used, usage),
            None => state.unknown = true,
        }
        state.due -= 1;
        if state.due > 0 {
            return;
        }
        let (closing, permit) = (state.closing.take(), state.permit.take());
        drop(state);
        drop(permit);
        self.all_reported.notify_one();
        if let Some(ClosingAction(close)) = closing {
            close();
        }
    }
}

impl PacedTime for CellExecution {
    fn add_paced(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.paced_us.set(self.paced_us.get().saturating_add(us));
    }
}

/// A request's execution, made when a rule, a limit or a program concerns the request.
#[derive(Debug, Default)]
pub struct ExecutionSlot {
    execution: OnceCell<Rc<CellExecution>>,
    /// True if the client gets the receipt.
    is_disclosed: bool,
}

impl ExecutionSlot {
    /// `is_disclosed` is true if the client gets the receipt.
    pub fn new(is_disclosed: bool) -> Self {
        Self { execution: OnceCell::new(), is_disclosed }
    }

    pub fn is_disclosed(&self) -> bool {
        self.is_disclosed
    }

    /// Sets where its programs run and under which limits. Call it before the request runs.
    pub fn confine(&mut self, confinement: Arc<Confinement>) {
        let execution = CellExecution::of(confinement, self.is_disclosed);
        // The body may have been held back before.
        if let Some(before) = self.execution.get() {
            execution.add_paced(Duration::from_micros(before.paced_us()));
        }
        self.execution = OnceCell::from(execution);
    }

    /// As it was confined, or else in a cell of its own without limits of its own.
    pub fn get_or_make(&self) -> Rc<CellExecution> {
        let make = || CellExecution::of(UNCONFINED.with(Arc::clone), self.is_disclosed);
        Rc::clone(self.execution.get_or_init(make))
    }

    /// `None` if no rule, limit or program made one.
    pub fn get(&self) -> Option<&Rc<CellExecution>> {
        self.execution.get()
    }

    pub fn take(&mut self) -> Option<Rc<CellExecution>> {
        self.execution.take()
    }

    /// How much longer its bodies took because of limits.
    pub fn paced(&self) -> Duration {
        Duration::from_micros(self.execution.get().map_or(0, |execution| execution.paced_us()))
    }
}

fn add(sum: &mut RequestUsage, usage: RequestUsage) {
    let RequestUsage { cpu_us, read_bytes, write_bytes, throttled_us, demoted } = usage;
    sum.cpu_us = sum.cpu_us.saturating_add(cpu_us);
    sum.read_bytes = sum.read_bytes.saturating_add(read_bytes);
    sum.write_bytes = sum.write_bytes.saturating_add(write_bytes);
    sum.throttled_us = sum.throttled_us.saturating_add(throttled_us);
    sum.demoted = sum.demoted.saturating_add(demoted);
}

/// A program's usage that is still to be reported.
#[derive(Debug)]
pub struct PendingUsage {
    execution: Rc<CellExecution>,
    usage: Option<RequestUsage>,
}

impl PendingUsage {
    pub fn report(mut self, usage: RequestUsage) {
        self.usage = Some(usage);
    }
}

impl Drop for PendingUsage {
    fn drop(&mut self) {
        self.execution.take_report(self.usage.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(cpu_us: u64) -> RequestUsage {
        RequestUsage { cpu_us, ..RequestUsage::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn usage_of_all_programs_is_waited_for_and_added_up() {
        let execution = CellExecution::new(Confinement::default());
        assert_eq!(execution.usage(), None, "no program, no use");
        let (first, second) = (execution.begin(), execution.begin());
        first.report(cpu(3));
        assert!(!execution.is_all_reported());
        let (closed, seen) = (Rc::new(Cell::new(false)), Rc::clone(&execution));
        let note = Rc::clone(&closed);
        execution.on_complete(move || note.set(seen.usage() == Some(cpu(7))));
        let waiting = execution.wait_all_reported();
        tokio::pin!(waiting);
        assert!(
            std::future::poll_fn(|cx| std::task::Poll::Ready(waiting.as_mut().poll(cx))).await.is_pending()
        );
        second.report(cpu(4));
        waiting.await;
        assert!(closed.get());
    }

    #[tokio::test(start_paused = true)]
    async fn usage_that_is_never_reported_ends_the_wait_as_unknown() {
        let execution = CellExecution::new(Confinement::default());
        let (lost, late) = (execution.begin(), execution.begin());
        drop(lost);
        let start = tokio::time::Instant::now();
        execution.wait_all_reported().await;
        assert_eq!(start.elapsed(), USAGE_WAIT, "the second one is waited for within the bound");
        late.report(cpu(1));
        execution.wait_all_reported().await;
        assert_eq!(execution.usage(), None);
    }
}
