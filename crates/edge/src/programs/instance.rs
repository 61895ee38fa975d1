//! A script of an application that speaks FastCGI, run by the site's instance: each request over a connection of its own.
//!
//! The connection is not kept: while one is open, a process of php-fpm waits for its next request and serves nobody else, and
//! the edge's other threads are somebody else. Not here: waking the instance and connecting to it (`instances`), what goes
//! over the connection (`responder`).

use std::rc::Rc;
use std::time::Duration;

use bytes::BytesMut;
use http::Method;
use nagaya_cmdb::{Site, Tenant};
use nagaya_keeper::fastcgi::Connection;
use tokio::net::UnixStream;

use super::after::After;
use super::answer::{Failure, Timed};
use super::environment::Facts;
use super::patience::{Alarm, Patience};
use super::responder::{ErrorLines, Exchange, Link, Retry};
use super::{Outcome, Programs, Script, files_of, opening};
use crate::message::{Request, RequestBody};
use crate::receipt;
use crate::refusal::Refusal;
use crate::seat::Seat;

/// A request as an instance is to get it.
pub struct Call {
    opening: Vec<u8>,
    body: RequestBody,
    errors: ErrorLines,
    method: Method,
    /// Of the script.
    name: String,
    silence: Duration,
    after: Rc<After>,
}

/// Why a call came to no answer.
pub struct Unanswered {
    pub refusal: Refusal,
    /// The call, if it may be made again: nobody has read it, or its method does no harm when it is done twice (RFC 9110
    /// section 9.2.2).
    pub again: Option<Call>,
}

impl Programs {
    /// The body has a length. `silence` is the longest time in which the script says nothing and takes nothing of the body.
    pub async fn call(
        &self,
        site: &Site,
        tenant: &Tenant,
        script: Script,
        request: Request,
        silence: Duration,
    ) -> Result<Call, Refusal> {
        let Request { head, body } = request;
        let facts = Facts {
            head: &head,
            body_len: body.len(),
            site,
            tenant,
            files: files_of(site)?,
            script: &script,
        };
        let opening = opening(&facts, Connection::Closed)?;
        self.after.begin();
        Ok(Call {
            opening,
            body,
            errors: ErrorLines::new("FastCGI", site.name.clone(), head.id),
            method: head.method,
            name: script.file,
            silence,
            after: Rc::clone(&self.after),
        })
    }
}

impl Call {
    /// Makes the call over this connection, which carries nothing else. The seat is left when both have come to their end.
    pub async fn over(self, stream: UnixStream, seat: Option<Seat>) -> Result<Outcome, Unanswered> {
        let Self { opening, body, errors, method, name, silence, after } = self;
        let (buffer, is_repeatable) = (BytesMut::new(), method.is_idempotent());
        let line = Line { stream, buffer, is_repeatable, after, _seat: seat };
        let alarm = Alarm::new(Patience { silence, end: None }, None);
        let mut exchange = Timed::new(Exchange::new(line, opening, body, errors), alarm);
        let outcome = match exchange.head().await {
            Ok((head, rest)) => exchange.outcome(&method, head, rest).await,
            Err(Failure::Unread) => {
                let again = exchange.into_output().and_then(Exchange::into_retry).map(|retry| {
                    let Retry { link, opening, body, errors } = retry;
                    Self { opening, body, errors, method, name: name.clone(), silence, after: link.after }
                });
                return Err(Unanswered { refusal: Failure::Unread.refusal(&name), again });
            }
            Err(failure) => Err(failure),
        };
        match outcome {
            Ok(Outcome::Response(mut response)) => {
                // What a program calls a receipt is not the node's.
                response.headers.remove(&receipt::RECEIPT);
                Ok(Outcome::Response(response))
            }
            Ok(redirect) => Ok(redirect),
            Err(failure) => Err(Unanswered { refusal: failure.refusal(&name), again: None }),
        }
    }
}

/// A connection to an instance.
struct Line {
    stream: UnixStream,
    buffer: BytesMut,
    is_repeatable: bool,
    after: Rc<After>,
    _seat: Option<Seat>,
}

impl Link for Line {
    const ENDS_BODY: bool = true;

    fn line(&mut self) -> (&mut UnixStream, &mut BytesMut) {
        (&mut self.stream, &mut self.buffer)
    }

    fn may_repeat(&self) -> bool {
        self.is_repeatable
    }

    fn after(&self) -> &Rc<After> {
        &self.after
    }

    // A connection that is closed is how the program learns that its request has ended, or is not wanted any more.
    fn leave(self) {}

    fn abandon(self) {}
}

#[cfg(test)]
mod tests;
