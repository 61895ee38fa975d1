//! The receipt as the client gets it, if the operator allows: `Server-Timing` for browsers' developer tools and
//! `Nagaya-Receipt` for programs.
//!
//! Not here: who is allowed (`account`), what the figures are made of (`stay`, `access_log`).

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
use nagaya_cmdb::NodeName;
use nagaya_cmdb::instance::Wake;
use tokio::time::timeout_at;

use super::Figures;
use crate::access_log::{More, stages};
use crate::message::{BodyError, Response, ResponseBody};
use crate::peers::fields::once;
use crate::place::Relocated;
use crate::stay::Stay;

/// Of the node alone: a site's own field of this name is dropped.
pub const RECEIPT: HeaderName = HeaderName::from_static("nagaya-receipt");

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// What durations mostly take, in bytes.
const TIMING_LEN: usize = 128;

/// An answer up to this length is waited for, so that its head can have the last figures, but not for longer than this.
const GATHER_MAX: usize = 64 << 10;
const GATHER_TIME: Duration = Duration::from_secs(1);

/// An integer of structured fields has at most 15 digits (RFC 9651 section 3.3.1); a quadrillion microseconds are 31 years.
const INTEGER_MAX: u64 = 999_999_999_999_999;

/// Writes the fields.
#[derive(Debug)]
pub struct Disclosure {
    pub id: RequestId,
    pub node: Rc<str>,
    pub begun: Instant,
    /// As they were when the head was made.
    pub figures: Figures,
    /// The wake it waited for.
    pub wake: Option<Arc<Wake>>,
    pub stay: Option<Rc<Stay>>,
}

/// Tells a client that was held in line for how long, and what had been predicted.
pub fn tell_queued(response: &mut Response, queued: Duration, predicted: Option<Duration>) {
    let ms = |span: Duration| span.as_secs_f64() * 1000.0;
    let mut value = format!("queue;dur={:.1}", ms(queued));
    if let Some(predicted) = predicted {
        let _ = write!(value, ", predicted;dur={:.1}", ms(predicted));
    }
    let value = HeaderValue::try_from(value).expect("digits and plain characters");
    response.headers.append(SERVER_TIMING, value);
}

/// Tells a client that another node answered, and how long its answer took from here.
pub fn tell_hop(response: &mut Response, node: &NodeName, took: Duration) {
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

/// Tells a client that its request had the site moved, and what each step took.
pub fn tell_moves<'a>(response: &mut Response, moves: impl Iterator<Item = &'a Relocated>) {
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

impl Disclosure {
    /// Puts into the head what is known so far. If the body is still being made, the last figures follow in a trailer field,
    /// for clients whose protocol has one.
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
            response.body = ResponseBody::stream(Followed { body, disclosure: Some(self), step: Step::Body });
        }
    }

    /// Server-Timing (W3C): durations in milliseconds. What took no time is left out.
    fn timing(&self) -> HeaderValue {
        let figures = &self.figures;
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
            ("db", figures.db_us.unwrap_or(0)),
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

    /// A dictionary of structured fields (RFC 9651 section 3.2). `partial`: not all was known yet.
    fn receipt(&self, is_final: bool) -> HeaderValue {
        let mut out = String::with_capacity(256);
        write!(out, "id=\"{}\", node=", self.id).expect("a String takes everything");
        push_string(&mut out, &self.node);
        if let Some(cell) = self.stay.as_ref().and_then(|stay| stay.cell()) {
            out.push_str(", cell=");
            push_string(&mut out, &cell);
        }
        if let Some(of) = self.stay.as_ref().and_then(|stay| stay.cell_of()) {
            write!(out, ";of={}", of.as_str()).expect("a String takes everything");
        }
        if let Some(raised) = self.stay.as_ref().map(|stay| stay.raised()).filter(|raised| !raised.is_empty())
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

    /// Parameters of the item: where it rested, each stage in microseconds, and how long the one for its turn was to be.
    fn push_stages(&self, out: &mut String, wake: &Wake) {
        write!(out, ";from={}", wake.from).expect("a String takes everything");
        for (stage, us) in stages(wake, self.figures.backend_us) {
            write!(out, ";{stage}={}", us.min(INTEGER_MAX)).expect("a String takes everything");
        }
        if let Some(us) = wake.predicted_us {
            write!(out, ";predicted={}", us.min(INTEGER_MAX)).expect("a String takes everything");
        }
    }

    /// The receipt once the body has ended.
    fn last(&mut self) -> HeaderValue {
        let mut more = More::default();
        if let Some(stay) = &self.stay {
            stay.tell(&mut more);
        }
        self.figures.update(&more, self.begun.elapsed());
        self.receipt(true)
    }
}

/// Milliseconds. These fields are written for every answer, and `fmt` takes longer for numbers than for all the rest of them.
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

/// A string of structured fields (RFC 9651 section 3.3.3): printable ASCII, what is not is left out.
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

/// A body that its receipt follows.
struct Followed {
    body: DynBody,
    disclosure: Option<Disclosure>,
    step: Step,
}

enum Step {
    Body,
    /// What the programs used is not told yet. With the trailers the body had itself.
    Paying(HeaderMap, Pin<Box<dyn Future<Output = Disclosure>>>),
    Ended,
}

impl Followed {
    fn pay(&mut self, trailers: HeaderMap) {
        let Some(disclosure) = self.disclosure.take() else { return self.step = Step::Ended };
        self.step = Step::Paying(
            trailers,
            Box::pin(async move {
                if let Some(stay) = &disclosure.stay {
                    stay.paid().await;
                }
                disclosure
            }),
        );
    }
}

impl Body for Followed {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        loop {
            match &mut this.step {
                Step::Body => match ready!(this.body.as_mut().poll_frame(cx)) {
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
                Step::Paying(trailers, paid) => {
                    let mut disclosure = ready!(paid.as_mut().poll(cx));
                    let mut trailers = std::mem::take(trailers);
                    trailers.insert(RECEIPT, disclosure.last());
                    this.step = Step::Ended;
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
                Step::Ended => return Poll::Ready(None),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.step, Step::Ended)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Takes in an answer that ends soon and is small, so that its head can say what all of it used.
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
                len += frame.as_ref().ok().and_then(Frame::data_ref).map_or(0, Bytes::len);
                let goes_on = len <= GATHER_MAX && frame.as_ref().is_ok_and(Frame::is_data);
                frames.push_back(frame);
                if !goes_on {
                    break;
                }
            }
        }
    }
    ResponseBody::stream(Gathered { frames, body })
}

fn joined(frames: VecDeque<Result<Frame<Bytes>, BodyError>>) -> Bytes {
    let mut pieces = frames.into_iter().filter_map(|frame| frame.ok()?.into_data().ok());
    let Some(first) = pieces.next() else { return Bytes::new() };
    let mut whole = BytesMut::from(first);
    pieces.for_each(|piece| whole.extend_from_slice(&piece));
    whole.freeze()
}

/// A body of which the beginning was taken in.
struct Gathered {
    frames: VecDeque<Result<Frame<Bytes>, BodyError>>,
    body: DynBody,
}

impl Body for Gathered {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.frames.pop_front() {
            Some(frame) => Poll::Ready(Some(frame)),
            None => self.body.as_mut().poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let data = |frame: &Result<Frame<Bytes>, _>| Some(frame.as_ref().ok()?.data_ref()?.len() as u64);
        let gathered: u64 = self.frames.iter().filter_map(data).sum();
        self.body
            .size_hint()
            .exact()
            .map_or_else(SizeHint::default, |left| SizeHint::with_exact(left + gathered))
    }
}

#[cfg(test)]
mod tests;
