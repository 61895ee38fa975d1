//! A backend's resources while it works for a request: permit, instance and boost. Also their
//! return.
//!
//! Invariant: a permit is given back once, when the backend's answer is complete or nobody wants it
//! any more.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_base::RequestId;

use crate::admission::lanes::EdgeLane;
use crate::admission::permit::Permit;
use crate::backends::exchange::HeldInstance;
use crate::backends::read_ahead::BackendWork;
use crate::record::execution::CellExecution;
use crate::record::turnaround::{Turnaround, TurnaroundSource};

/// Guards that a backend holds while it works for a request.
#[derive(Default)]
pub struct BackendHolds {
    /// The right to run.
    pub permit: Option<Permit>,
    pub instance: HeldInstance,
}

impl BackendHolds {
    /// Gives all of it back. Returns how long the backend ran, if the request has an execution,
    /// because its programs may have been slowed down. Programs that still run after the end of
    /// their request keep the permit.
    pub fn end(
        self,
        (begun, queued): (Instant, Duration),
        end: WorkEnd,
        execution: Option<&CellExecution>,
    ) -> Option<ServiceSample> {
        let mut permit = self.permit?;
        if execution.is_none() && !permit.is_timed() {
            return None;
        }
        let service = begun.elapsed().saturating_sub(queued);
        permit.ended(service, end == WorkEnd::Whole);
        let ended = execution.map(|_| ServiceSample { lane: Arc::clone(permit.lane()), service });
        if let Some(execution) = execution.filter(|_| end == WorkEnd::Broken) {
            execution.keep_permit(permit);
        }
        ended
    }
}

/// How the work of a backend for a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkEnd {
    Whole,
    /// The answer is complete and reports an error.
    Error,
    /// The answer is not complete: the client has left, or the backend has failed.
    Broken,
}

impl WorkEnd {
    pub fn of(is_whole: bool, is_error: bool) -> Self {
        match (is_whole, is_error) {
            (true, false) => Self::Whole,
            (true, true) => Self::Error,
            (false, _) => Self::Broken,
        }
    }
}

/// Service time of a request until its answer was complete, for its lane.
pub struct ServiceSample {
    pub lane: Arc<EdgeLane>,
    pub service: Duration,
}

/// Guards of a backend, owned by the code that takes in its answer.
pub struct LentHolds {
    working: RefCell<BackendHolds>,
    times: (Instant, Duration),
    execution: Option<Rc<CellExecution>>,
    is_error: bool,
    ended: RefCell<Option<ServiceSample>>,
    id: RequestId,
    /// The split of its time when the answer was complete.
    turnaround: Cell<Option<Turnaround>>,
}

impl LentHolds {
    /// `times` is when the request came, and how long it waited in line.
    pub fn new(
        id: RequestId,
        working: BackendHolds,
        times: (Instant, Duration),
        execution: Option<Rc<CellExecution>>,
        is_error: bool,
    ) -> Rc<Self> {
        Rc::new(Self {
            working: RefCell::new(working),
            times,
            execution,
            is_error,
            ended: RefCell::default(),
            id,
            turnaround: Cell::new(None),
        })
    }

    /// How long it ran, once it has ended.
    pub fn take_ended(&self) -> Option<ServiceSample> {
        self.ended.take()
    }

    /// Returns the split of its time when the answer was complete.
    pub fn take_turnaround(&self) -> Option<Turnaround> {
        self.turnaround.take()
    }
}

impl TurnaroundSource for LentHolds {
    /// Until now, or until its answer was complete.
    fn turnaround(&self) -> Option<Turnaround> {
        let working = self.working.borrow();
        self.turnaround.get().or_else(|| working.instance.lease.as_ref()?.turnaround(self.id))
    }
}

impl BackendWork for LentHolds {
    fn end(&self, is_whole: bool) {
        let working = self.working.take();
        if let Some(lease) = &working.instance.lease {
            self.turnaround.set(lease.turnaround(self.id));
        }
        let end = WorkEnd::of(is_whole, self.is_error);
        if let Some(ended) = working.end(self.times, end, self.execution.as_deref()) {
            *self.ended.borrow_mut() = Some(ended);
        }
    }
}
