//! CPU quotas for programs that are too short for the kernel to hold.
//!
//! The kernel gives out a quota in periods and looks at ticks: a program of one millisecond has ended before anybody could stop
//! it, and a thousand of them in a row have a whole core. So when a program ended in less time than its quota
//! gives for what it used, the end of its response is held back for the rest, and its client, which would send the
//! next one, with it. Over any time longer than one request the share is then the one that was set. A limit slows: what
//! is held back is sent in the end.
//!
//! Not here: quotas while a program runs (the kernel, told by `keeper`), how a named cell's time adds up (`ledger`).

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Empty};
use nagaya_cmdb::TenantName;
use tokio::time::{Instant, timeout};

use super::alarm::sleep_precisely;
use super::ledger::{Entered, Ledger};
use crate::message::{BodyError, Response, ResponseBody};
use crate::stay::Stay;

/// Longest time the end of one response is held back. What a quota still wants then is forgiven.
pub const HOLD_MAX: Duration = Duration::from_secs(10);

/// A program that goes on after the length it declared is waited for so long before the last of its body is sent.
const LINGER_MAX: Duration = Duration::from_secs(2);

/// What a program will owe to the CPU quotas it runs under.
#[derive(Debug)]
pub struct Debt {
    stay: Rc<Stay>,
    since: Instant,
    /// Of the request's earlier programs.
    paid_before_us: u64,
    shared: Vec<Entered>,
}

impl Debt {
    /// Of a program that begins now. None: no quota concerns it, and nothing has to be waited for.
    pub fn of(ledger: &Arc<Ledger>, tenant: &TenantName, stay: &Rc<Stay>) -> Option<Self> {
        let confinement = stay.confinement();
        let shared = match confinement.named.as_slice() {
            [] => Vec::new(),
            named => ledger.enter(named, tenant),
        };
        if shared.is_empty() && confinement.limits.cpu.is_none() {
            return None;
        }
        let paid_before_us = stay.usage().unwrap_or_default().cpu_us;
        Some(Self { stay: Rc::clone(stay), since: Instant::now(), paid_before_us, shared })
    }

    /// Of a request to an application, whose limits hold for it alone: named cells do not.
    pub fn own(stay: &Rc<Stay>) -> Option<Self> {
        stay.quota()?;
        let paid_before_us = stay.usage().unwrap_or_default().cpu_us;
        Some(Self { stay: Rc::clone(stay), since: Instant::now(), paid_before_us, shared: Vec::new() })
    }

    /// Waits until what the program used is known, and then until its quotas have paid for it.
    pub async fn settle(self) {
        self.stay.paid().await;
        let Some(usage) = self.stay.usage() else { return };
        let cpu_us = usage.cpu_us.saturating_sub(self.paid_before_us);
        let own = self.stay.confinement().limits.cpu;
        let own = own.map(|quota| self.since + Duration::from_micros(quota.wall_us(cpu_us)));
        let shared = self.shared.iter().filter_map(|cell| cell.charge(cpu_us));
        let now = Instant::now();
        let until = shared.chain(own).max().unwrap_or(now).min(now + HOLD_MAX);
        if until > now {
            sleep_precisely(until).await;
            self.stay.add_paced(now.elapsed());
        }
    }

    /// Holds back the end of a program's answer until its debt is settled.
    pub async fn hold(self, mut response: Response) -> Response {
        response.body = match response.body {
            ResponseBody::Stream(body) if !body.is_end_stream() => {
                ResponseBody::stream(Settling { body, held: None, debt: Some(self), step: Step::Passing })
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
struct Settling {
    body: Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>,
    /// The last of a body of known length.
    held: Option<Bytes>,
    debt: Option<Debt>,
    step: Step,
}

enum Step {
    Passing,
    /// The last piece is here; the program may not have ended.
    Lingering(Pin<Box<dyn Future<Output = ()>>>),
    Settling(Pin<Box<dyn Future<Output = ()>>>),
    Ended,
}

fn nothing() -> Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>> {
    Box::pin(Empty::new().map_err(|never| match never {}))
}

impl Settling {
    /// The program's output has ended, or is not waited for any longer.
    fn settle(&mut self) {
        // Ends a program that still runs: what it used is known only then.
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
            // A program may go on for as long as it likes; its client need not wait for that.
            let _ = timeout(LINGER_MAX, end).await;
        }));
    }
}

impl Body for Settling {
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
