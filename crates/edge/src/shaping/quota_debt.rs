//! Enforces CPU quotas for programs that are too short for the kernel.
//!
//! The kernel grants a quota in periods and checks it at ticks. A program of one millisecond has
//! ended before that. A thousand of them in a row use a whole core. A program can end earlier
//! than its quota allows for its usage. Then the end of its response is held back. Its client,
//! which would send the next request, waits, too. Over any time longer than one request the share
//! is then the configured one. A limit slows: the held part is always sent in the end.
//!
//! Not here: quotas while a program runs (the kernel, set by `keeper`), the sum of a named cell's
//! time (`shared_buckets`).

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Empty};
use nagaya_records::TenantName;
use tokio::time::{Instant, timeout};

use crate::http::message::{BodyError, Response, ResponseBody};
use crate::http::throttle::flow::PacedTime;
use crate::record::execution::CellExecution;
use crate::shaping::alarm::sleep_precisely;
use crate::shaping::shared_buckets::{CellCharge, SharedBuckets};

/// Maximum time for which the end of one response is held back. The rest of the debt is dropped
/// then.
pub const HOLD_MAX: Duration = Duration::from_secs(10);

/// Maximum wait for a program that continues after its declared length, before the last of its
/// body is sent.
const LINGER_MAX: Duration = Duration::from_secs(2);

/// The future debt of a program to its CPU quotas.
#[derive(Debug)]
pub struct QuotaDebt {
    execution: Rc<CellExecution>,
    since: Instant,
    /// Usage of the request's earlier programs.
    paid_before_us: u64,
    shared: Vec<CellCharge>,
}

impl QuotaDebt {
    /// Returns the debt of a program that begins now. `None` if no quota concerns it, so nothing
    /// has to be awaited.
    pub fn of(
        ledger: &Arc<SharedBuckets>,
        tenant: &TenantName,
        execution: &Rc<CellExecution>,
    ) -> Option<Self> {
        let confinement = execution.confinement();
        let shared = match confinement.named.as_slice() {
            [] => Vec::new(),
            named => ledger.enter(named, tenant),
        };
        if shared.is_empty() && confinement.limits.cpu.is_none() {
            return None;
        }
        let paid_before_us = execution.usage().unwrap_or_default().cpu_us;
        Some(Self { execution: Rc::clone(execution), since: Instant::now(), paid_before_us, shared })
    }

    /// Returns the debt of a request to an application. Only its own limits count: named cells do
    /// not.
    pub fn own(execution: &Rc<CellExecution>) -> Option<Self> {
        execution.quota()?;
        let paid_before_us = execution.usage().unwrap_or_default().cpu_us;
        Some(Self {
            execution: Rc::clone(execution),
            since: Instant::now(),
            paid_before_us,
            shared: Vec::new(),
        })
    }

    /// Waits until the program's usage is known, and then until its quotas have paid for it.
    pub async fn settle(self) {
        self.execution.wait_all_reported().await;
        let Some(usage) = self.execution.usage() else { return };
        let cpu_us = usage.cpu_us.saturating_sub(self.paid_before_us);
        let own = self.execution.confinement().limits.cpu;
        let own = own.map(|quota| self.since + Duration::from_micros(quota.wall_us(cpu_us)));
        let shared = self.shared.iter().filter_map(|cell| cell.charge(cpu_us));
        let now = Instant::now();
        let until = shared.chain(own).max().unwrap_or(now).min(now + HOLD_MAX);
        if until > now {
            sleep_precisely(until).await;
            self.execution.add_paced(now.elapsed());
        }
    }

    /// Holds back the end of a program's answer until its debt is settled.
    pub async fn hold(self, mut response: Response) -> Response {
        response.body = match response.body {
            ResponseBody::Stream(body) if !body.is_end_stream() => {
                ResponseBody::stream(SettlingBody { body, held: None, debt: Some(self), step: Step::Passing })
            }
            // The program has ended, and all of its answer is here.
            complete => {
                self.settle().await;
                complete
            }
        };
        response
    }
}

/// A body whose end is held back.
struct SettlingBody {
    body: Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>,
    /// The last piece of a body of known length.
    held: Option<Bytes>,
    debt: Option<QuotaDebt>,
    step: Step,
}

enum Step {
    Passing,
    /// The last piece is here. The program may not have ended.
    Lingering(Pin<Box<dyn Future<Output = ()>>>),
    Settling(Pin<Box<dyn Future<Output = ()>>>),
    Ended,
}

fn nothing() -> Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>> {
    Box::pin(Empty::new().map_err(|never| match never {}))
}

impl SettlingBody {
    /// Starts to settle: the program's output has ended, or the wait for it is over.
    fn settle(&mut self) {
        // Ends a program that still runs, because its usage is known only then.
        self.body = nothing();
        self.step = match self.debt.take() {
            Some(debt) => Step::Settling(Box::pin(debt.settle())),
            None => Step::Ended,
        };
    }

    fn linger(&mut self, last: Bytes) {
        self.held = Some(last);
        let mut body = std::mem::replace(&mut self.body, nothing());
        self.step = Step::Lingering(Box::pin(async move {
            let end = async { while let Some(Ok(_)) = body.frame().await {} };
            // A program may run on. Its client need not wait for that.
            let _ = timeout(LINGER_MAX, end).await;
        }));
    }
}

impl Body for SettlingBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        loop {
            match &mut this.step {
                Step::Passing => match ready!(this.body.as_mut().poll_frame(cx)) {
                    Some(Ok(frame)) => match frame.into_data() {
                        Ok(last) if this.body.size_hint().exact() == Some(0) => this.linger(last),
                        Ok(data) => return Poll::Ready(Some(Ok(Frame::data(data)))),
                        Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                    },
                    Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                    None => this.settle(),
                },
                Step::Lingering(end) => {
                    ready!(end.as_mut().poll(cx));
                    this.settle();
                }
                Step::Settling(settled) => {
                    ready!(settled.as_mut().poll(cx));
                    this.step = Step::Ended;
                }
                Step::Ended => return Poll::Ready(this.held.take().map(|last| Ok(Frame::data(last)))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.step, Step::Ended) && self.held.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.held, self.body.size_hint().exact()) {
            (Some(last), _) => SizeHint::with_exact(last.len() as u64),
            (None, Some(left)) => SizeHint::with_exact(left),
            (None, None) => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests;
