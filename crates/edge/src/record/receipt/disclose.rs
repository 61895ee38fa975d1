//! Sends the receipt to the client, if the operator allows it. `Server-Timing` is for browsers'
//! developer tools and `Nagaya-Receipt` for programs.
//!
//! Not here: which clients are allowed (`request::context`), the source of the figures
//! (`execution`, `access_log`).

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::header::TRAILER;
use http::{HeaderMap, HeaderName, HeaderValue};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Empty};
use nagaya_base::RequestId;
use nagaya_records::NodeName;
use nagaya_records::instance::WakeReport;
use tokio::time::timeout_at;

use crate::http::body_adapters::{FrameResult, PrefixedBody, data_len};
use crate::http::message::{BodyError, Response, ResponseBody};
use crate::http::peer_fields::once;
use crate::http::receipt_field::RECEIPT;
use crate::record::access_log::format::stages;
use crate::record::access_record::{AccessDetails, Relocation};
use crate::record::execution::CellExecution;
use crate::record::receipt::figures::ReceiptFigures;
use crate::record::turnaround::TurnaroundSource;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// Usual maximum length of the durations, bytes.
const TIMING_LEN: usize = 128;

/// Maximum length of an answer that is awaited, so that its head can have the last figures.
/// `GATHER_TIME` is the maximum wait.
const GATHER_MAX: usize = 64 << 10;
const GATHER_TIME: Duration = Duration::from_secs(1);

/// Maximum integer of structured fields: 15 digits (RFC 9651 section 3.3.1). A quadrillion
/// microseconds are 31 years.
const INTEGER_MAX: u64 = 999_999_999_999_999;

/// Writes the fields.
pub struct ReceiptDisclosure {
    pub id: RequestId,
    pub node: Rc<str>,
    pub begun: Instant,
    /// Figures at the time of the head.
    pub figures: ReceiptFigures,
    /// The wake it waited for.
    pub wake: Option<Arc<WakeReport>>,
    pub execution: Option<Rc<CellExecution>>,
    /// Knows how its time is split, until the end.
    pub split: Option<Rc<dyn TurnaroundSource>>,
}

/// Adds the time that the client waited in line, and the predicted wait.
pub fn write_queued(response: &mut Response, queued: Duration, predicted: Option<Duration>) {
    let ms = |span: Duration| span.as_secs_f64() * 1000.0;
    let mut value = format!("queue;dur={:.1}", ms(queued));
    if let Some(predicted) = predicted {
        let _ = write!(value, ", predicted;dur={:.1}", ms(predicted));
    }
    let value = HeaderValue::try_from(value).expect("digits and plain characters");
    response.headers.append(SERVER_TIMING, value);
}

/// Adds the node that answered, and the time until its response arrived here.
pub fn write_hop(response: &mut Response, node: &NodeName, took: Duration) {
    let mut value = String::with_capacity(TIMING_LEN);
    for part in ["peer;desc=\"", node.as_str(), "\";dur="] {
        value.push_str(part);
    }
    push_ms(&mut value, u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
    // A node's name is plain.
    if let Ok(value) = HeaderValue::try_from(value) {
        response.headers.append(SERVER_TIMING, once(value));
    }
}

/// Adds the moves of the site that the request caused, and the duration of each step.
pub fn write_moves<'a>(response: &mut Response, moves: impl Iterator<Item = &'a Relocation>) {
    let ms = |span: Duration| span.as_secs_f64() * 1000.0;
    for moved in moves {
        let value = format!(
            "relocate-detect;desc=\"{}\";dur={:.3}, relocate-decide;dur={:.3}, relocate-store;dur={:.3}",
            moved.why.as_str(),
            ms(moved.detect),
            ms(moved.decide),
            ms(moved.store)
        );
        let predicted = moved
            .predicted
            .map_or_else(String::new, |predicted| format!(", relocate-predicted;dur={:.3}", ms(predicted)));
        let value = HeaderValue::try_from(value + &predicted).expect("digits and plain words");
        response.headers.append(SERVER_TIMING, value);
    }
}

impl ReceiptDisclosure {
    /// Puts the known figures into the head. A trailer field has the last figures, if the body is
    /// still being made and the client's protocol allows it.
    pub fn put(self, response: &mut Response) {
        let is_final = !matches!(&response.body, ResponseBody::Stream(body) if !body.is_end_stream());
        response.headers.append(SERVER_TIMING, once(self.timing()));
        response.headers.insert(RECEIPT, once(self.receipt(is_final)));
        let id = HeaderValue::try_from(self.id.to_string()).expect("hexadecimal digits");
        response.headers.insert(REQUEST_ID, once(id));
        if is_final {
            return;
        }
        let body = std::mem::replace(&mut response.body, ResponseBody::Empty);
        if let ResponseBody::Stream(body) = body {
            response.headers.append(TRAILER, HeaderValue::from_static("nagaya-receipt"));
            response.body = ResponseBody::stream(FollowedBody {
                body,
                disclosure: Some(self),
                step: DisclosureStep::Body,
            });
        }
    }

    /// Returns Server-Timing (W3C): durations in milliseconds. Zero durations are left out.
    fn timing(&self) -> HeaderValue {
        let figures = &self.figures;
        let split = figures.turnaround.unwrap_or_default();
        let mut out = String::with_capacity(TIMING_LEN);
        let mut put = |name: &str, us: u64| {
            out.push_str(if out.is_empty() { "" } else { ", " });
            out.push_str(name);
            out.push_str(";dur=");
            push_ms(&mut out, us);
        };
        put("total", figures.took_us);
        let rest = [
            ("queue", figures.queue_us),
            ("rules", figures.rules_us),
            ("wake", figures.wake_us),
            ("fence", figures.fence_us),
            ("backend", figures.backend_us),
            ("app-before", split.before_us),
            ("db", split.db_us),
            ("app-between", split.between_us),
            ("app-after", split.after_us),
            ("cpu", figures.cpu_us.unwrap_or(0)),
            ("throttled", figures.throttled_us),
            ("paced", figures.paced_us),
        ];
        rest.into_iter().filter(|(_, us)| *us > 0).for_each(|(name, us)| put(name, us));
        if let Some(wake) = &self.wake {
            stages(wake, figures.backend_us).for_each(|(stage, us)| put(&format!("wake-{stage}"), us));
        }
        HeaderValue::try_from(out).expect("names and numbers")
    }

    /// Returns a dictionary of structured fields (RFC 9651 section 3.2). It contains `partial` if
    /// not all was known yet.
    fn receipt(&self, is_final: bool) -> HeaderValue {
        let mut out = String::with_capacity(256);
        write!(out, "id=\"{}\", node=", self.id).expect("a String takes everything");
        push_string(&mut out, &self.node);
        if let Some(cell) = self.execution.as_ref().and_then(|execution| execution.cell()) {
            out.push_str(", cell=");
            push_string(&mut out, &cell);
        }
        if let Some(of) = self.execution.as_ref().and_then(|execution| execution.cell_of()) {
            write!(out, ";of={}", of.as_str()).expect("a String takes everything");
        }
        if let Some(raised) =
            self.execution.as_ref().map(|execution| execution.raised()).filter(|raised| !raised.is_empty())
        {
            write!(out, ", raised=\"{raised}\"").expect("a String takes everything");
        }
        for (name, number) in self.figures.named() {
            let name = name.strip_suffix("_us").or_else(|| name.strip_suffix("_bytes")).unwrap_or(name);
            out.push_str(", ");
            out.push_str(name);
            out.push('=');
            out.push_str(itoa::Buffer::new().format(number.min(INTEGER_MAX)));
            if let ("wake", Some(wake)) = (name, &self.wake) {
                self.push_stages(&mut out, wake);
            }
        }
        if !is_final {
            out.push_str(", partial");
        }
        HeaderValue::try_from(out).expect("only printable ASCII was put in")
    }

    /// Appends parameters of the item: the tier, each stage in microseconds, and the predicted
    /// wait for its wake slot.
    fn push_stages(&self, out: &mut String, wake: &WakeReport) {
        write!(out, ";from={}", wake.from).expect("a String takes everything");
        for (stage, us) in stages(wake, self.figures.backend_us) {
            write!(out, ";{stage}={}", us.min(INTEGER_MAX)).expect("a String takes everything");
        }
        if let Some(us) = wake.predicted_us {
            write!(out, ";predicted={}", us.min(INTEGER_MAX)).expect("a String takes everything");
        }
    }

    /// Returns the receipt once the body has ended.
    fn last(&mut self) -> HeaderValue {
        let mut more = AccessDetails::default();
        if let Some(execution) = &self.execution {
            execution.tell(&mut more);
        }
        more.turnaround = self.split.as_ref().and_then(|split| split.turnaround());
        self.figures.update(&more, self.begun.elapsed());
        self.receipt(true)
    }
}

/// Appends milliseconds. These fields are written for every response, and `fmt` takes longer for
/// numbers than for all the rest of them.
fn push_ms(out: &mut String, us: u64) {
    out.push_str(itoa::Buffer::new().format(us / 1000));
    let rest = us % 1000;
    out.push_str(if rest < 10 {
        ".00"
    } else if rest < 100 {
        ".0"
    } else {
        "."
    });
    out.push_str(itoa::Buffer::new().format(rest));
}

/// Appends a string of structured fields (RFC 9651 section 3.3.3): printable ASCII, all else is
/// left out.
fn push_string(out: &mut String, text: &str) {
    out.push('"');
    for letter in text.chars().filter(|letter| matches!(letter, ' '..='~')) {
        if matches!(letter, '"' | '\\') {
            out.push('\\');
        }
        out.push(letter);
    }
    out.push('"');
}

type DynBody = Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>;

/// A body followed by its receipt.
struct FollowedBody {
    body: DynBody,
    disclosure: Option<ReceiptDisclosure>,
    step: DisclosureStep,
}

enum DisclosureStep {
    Body,
    /// The usage of the programs is not known yet. Holds the body's own trailers.
    Paying(HeaderMap, Pin<Box<dyn Future<Output = ReceiptDisclosure>>>),
    Ended,
}

impl FollowedBody {
    fn pay(&mut self, trailers: HeaderMap) {
        let Some(disclosure) = self.disclosure.take() else { return self.step = DisclosureStep::Ended };
        self.step = DisclosureStep::Paying(
            trailers,
            Box::pin(async move {
                if let Some(execution) = &disclosure.execution {
                    execution.wait_all_reported().await;
                }
                disclosure
            }),
        );
    }
}

impl Body for FollowedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        loop {
            match &mut this.step {
                DisclosureStep::Body => match ready!(this.body.as_mut().poll_frame(cx)) {
                    Some(Ok(frame)) => match frame.into_trailers() {
                        Ok(trailers) => this.pay(trailers),
                        Err(frame) => return Poll::Ready(Some(Ok(frame))),
                    },
                    Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                    None => {
                        // Ends the program, if it still runs.
                        this.body = Box::pin(Empty::new().map_err(|never| match never {}));
                        this.pay(HeaderMap::new());
                    }
                },
                DisclosureStep::Paying(trailers, paid) => {
                    let mut disclosure = ready!(paid.as_mut().poll(cx));
                    let mut trailers = std::mem::take(trailers);
                    trailers.insert(RECEIPT, disclosure.last());
                    this.step = DisclosureStep::Ended;
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
                DisclosureStep::Ended => return Poll::Ready(None),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.step, DisclosureStep::Ended)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Collects a small answer that ends soon, so that its head can contain the final usage.
pub async fn gather(body: ResponseBody) -> ResponseBody {
    let ResponseBody::Stream(mut body) = body else { return body };
    if body.is_end_stream() {
        return ResponseBody::Stream(body);
    }
    let deadline = Instant::now() + GATHER_TIME;
    let (mut frames, mut len) = (VecDeque::new(), 0);
    loop {
        let Ok(next) = timeout_at(deadline.into(), poll_fn(|cx| body.as_mut().poll_frame(cx))).await else {
            break;
        };
        match next {
            None => return ResponseBody::Bytes(joined(frames)),
            Some(frame) => {
                len += data_len(&frame);
                let goes_on = len <= GATHER_MAX && frame.as_ref().is_ok_and(Frame::is_data);
                frames.push_back(frame);
                if !goes_on {
                    break;
                }
            }
        }
    }
    ResponseBody::stream(PrefixedBody::new(frames, body))
}

fn joined(frames: VecDeque<FrameResult>) -> Bytes {
    let mut pieces = frames.into_iter().filter_map(|frame| frame.ok()?.into_data().ok());
    let Some(first) = pieces.next() else { return Bytes::new() };
    let mut whole = BytesMut::from(first);
    pieces.for_each(|piece| whole.extend_from_slice(&piece));
    whole.freeze()
}

#[cfg(test)]
mod tests;
