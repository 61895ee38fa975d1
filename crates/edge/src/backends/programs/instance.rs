//! Runs a script of a FastCGI application in the site's instance, each request over a connection
//! of its own.
//!
//! The connection is not kept. While one is open, a process of php-fpm waits for its next request
//! and serves nobody else. Other threads of the edge could not use it. Not here: waking the
//! instance and connecting to it (`instances`), the data on the connection (`responder`).

use std::rc::Rc;
use std::time::Duration;

use bytes::BytesMut;
use http::Method;
use nagaya_keeper_api::fastcgi::ConnectionReuse;
use nagaya_keeper_api::quiet_stream::QuietStream;
use nagaya_records::{Site, Tenant};

use crate::backends::cell_lease::RequestCell;
use crate::backends::programs::ProgramRunner;
use crate::backends::programs::after::BackgroundJobs;
use crate::backends::programs::answer::{FailureInquiry, ProgramFailure, TimedOutput};
use crate::backends::programs::environment::{EnvironmentFacts, opening};
use crate::backends::programs::patience::{ProgramAlarm, ProgramTimeouts};
use crate::backends::programs::responder::{ErrorLines, FastCgiExchange, ResponderLink, UnreadRequest};
use crate::backends::programs::script::{ProgramOutcome, ProgramScript, files_of};
use crate::http::message::{RequestBody, RequestHead};
use crate::http::receipt_field;
use crate::http::refusal::Refusal;

/// A request in the form for an instance.
pub struct InstanceCall {
    opening: Vec<u8>,
    body: RequestBody,
    errors: ErrorLines,
    method: Method,
    /// Name of the script.
    name: String,
    silence: Duration,
    after: Rc<BackgroundJobs>,
}

/// Failure of a call without an answer.
pub struct UnansweredCall {
    pub refusal: Refusal,
    /// The call, if it may be repeated. Nobody has read it, or its method is idempotent (RFC 9110
    /// section 9.2.2).
    pub again: Option<InstanceCall>,
}

impl ProgramRunner {
    /// The body has a length. `silence` is the longest time in which the script sends nothing and
    /// takes nothing of the body.
    pub async fn call(
        &self,
        site: &Site,
        tenant: &Tenant,
        script: ProgramScript,
        (head, body): (&RequestHead, RequestBody),
        silence: Duration,
    ) -> Result<InstanceCall, Refusal> {
        let facts = EnvironmentFacts {
            head,
            body_len: body.len(),
            site,
            tenant,
            files: files_of(site)?,
            script: &script,
        };
        let opening = opening(&facts, ConnectionReuse::Closed)?;
        self.after.begin();
        Ok(InstanceCall {
            opening,
            body,
            errors: ErrorLines::new("FastCGI", site.name.clone(), head.id),
            method: head.method.clone(),
            name: script.file,
            silence,
            after: Rc::clone(&self.after),
        })
    }
}

impl InstanceCall {
    /// Makes the call over this connection, which carries nothing else. The request cell is left
    /// when both have ended.
    pub async fn over(
        self,
        stream: QuietStream,
        seat: Option<RequestCell>,
    ) -> Result<ProgramOutcome, UnansweredCall> {
        let Self { opening, body, errors, method, name, silence, after } = self;
        let (buffer, is_repeatable) = (BytesMut::new(), method.is_idempotent());
        let line = InstanceConnection { stream, buffer, is_repeatable, after, _seat: seat };
        let alarm = ProgramAlarm::new(ProgramTimeouts { silence, end: None, linger: Duration::ZERO }, None);
        let mut exchange = TimedOutput::new(FastCgiExchange::new(line, opening, body, errors), alarm);
        let outcome = match exchange.head().await {
            Ok((head, rest)) => exchange.outcome(&method, head, rest).await,
            Err(ProgramFailure::Unread) => {
                let again = exchange.into_output().and_then(FastCgiExchange::into_retry).map(|retry| {
                    let UnreadRequest { link, opening, body, errors } = retry;
                    Self { opening, body, errors, method, name: name.clone(), silence, after: link.after }
                });
                return Err(UnansweredCall { refusal: ProgramFailure::Unread.refusal(&name), again });
            }
            Err(failure) => Err(failure),
        };
        match outcome {
            Ok(ProgramOutcome::Response(mut response)) => {
                // A program must not send the node's receipt fields.
                response.headers.remove(&receipt_field::RECEIPT);
                Ok(ProgramOutcome::Response(response))
            }
            Ok(redirect) => Ok(redirect),
            Err(failure) => Err(UnansweredCall { refusal: failure.refusal(&name), again: None }),
        }
    }
}

/// A connection to an instance.
struct InstanceConnection {
    stream: QuietStream,
    buffer: BytesMut,
    is_repeatable: bool,
    after: Rc<BackgroundJobs>,
    _seat: Option<RequestCell>,
}

impl ResponderLink for InstanceConnection {
    const ENDS_BODY: bool = true;
    // It runs on by itself: an instance that computes does not rest.
    const LINGERS: bool = false;
    const REPORTS: bool = false;

    fn line(&mut self) -> (&mut QuietStream, &mut BytesMut) {
        (&mut self.stream, &mut self.buffer)
    }

    fn may_repeat(&self) -> bool {
        self.is_repeatable
    }

    fn after(&self) -> &Rc<BackgroundJobs> {
        &self.after
    }

    // A closed connection tells the program that its request has ended, or is not needed any
    // more.
    fn leave(self) {}

    fn abandon(self) {}

    fn autopsy(self) -> FailureInquiry {
        Box::pin(async { None })
    }
}

#[cfg(test)]
mod tests;
