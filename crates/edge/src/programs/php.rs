//! A PHP worker that serves a request, and when it serves the next.
//!
//! Not here: what goes over its connection (`responder`), whose turn it is (`pool`).
//!
//! A worker serves another request only if this one left nothing behind: everything was sent, everything was read, the end
//! record came and no byte after it. The keeper's gate is at the other end of the connection; it sees to it that PHP takes
//! nothing of a body that a script left unread for the next request.
//!
//! It also serves others only after the keeper has said what this request used: the answer may come over another
//! connection than the next request's, so asking and going on would charge one request for the next one's work. A tenant's
//! other workers do not wait, and neither does the client, unless a CPU quota is to be settled.

use std::rc::Rc;
use std::time::Duration;

use bytes::BytesMut;
use nagaya_keeper::client::Keeper;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::after::After;
use super::pool::{Lease, Worker};
use super::responder::Link;
use crate::stay::Due;

/// So long the keeper may take to say what a request used.
const LEAVE_MAX: Duration = Duration::from_secs(2);

/// A worker that serves a request, and what is to be done when it has.
pub(super) struct Serving {
    lease: Lease,
    due: Due,
    keeper: Rc<Keeper>,
    after: Rc<After>,
}

impl Serving {
    pub fn new(lease: Lease, due: Due, keeper: Rc<Keeper>, after: Rc<After>) -> Self {
        Self { lease, due, keeper, after }
    }

    /// For asking another worker in the place of one that has read nothing.
    pub fn into_lease(self) -> (Lease, Due) {
        (self.lease, self.due)
    }
}

impl Link for Serving {
    const ENDS_BODY: bool = false;

    fn line(&mut self) -> (&mut UnixStream, &mut BytesMut) {
        let Worker { stream, buffer, .. } = self.lease.worker();
        (stream, buffer)
    }

    fn may_repeat(&self) -> bool {
        false
    }

    fn after(&self) -> &Rc<After> {
        &self.after
    }

    /// The worker serves others, once it is known what this request used.
    fn leave(self) {
        let Self { mut lease, due, keeper, after } = self;
        after.run(async move {
            match timeout(LEAVE_MAX, keeper.leave(lease.worker().id)).await {
                Ok(Ok(usage)) => {
                    due.pay(usage);
                    lease.give_back();
                }
                _ => end(lease, due).await,
            }
        });
    }

    /// Ends the worker.
    fn abandon(self) {
        let Self { lease, due, after, .. } = self;
        after.run(end(lease, due));
    }
}

async fn end(lease: Lease, due: Due) {
    let Some(process) = lease.into_process() else { return };
    if let Ok(Some(usage)) = timeout(LEAVE_MAX, process.end()).await {
        due.pay(usage);
    }
}

#[cfg(test)]
mod tests;
