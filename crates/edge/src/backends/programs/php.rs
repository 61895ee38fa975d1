//! Manages a PHP worker that serves a request, and decides when it serves the next one.
//!
//! Not here: the data on its connection (`responder`), the order of requests (`pool`).
//!
//! A worker serves another request only if this one left nothing behind. Everything was sent,
//! everything was read, the end record arrived and no byte after it. The keeper's gate is at the
//! other end of the connection. It prevents PHP from reading the unread body of one request as
//! the next request.
//!
//! A worker also serves others only after the keeper has reported this request's usage. The
//! report may come over another connection than the next request's. So going on at once would
//! charge one request for the next one's work. A tenant's other workers do not wait. The client
//! does not wait either, unless a CPU quota must be settled.
//!
//! A worker stays with a request whose client has left, up to a limit of its site's record
//! (`patience::Linger`). It keeps its place among the tenant's workers. So clients that come and
//! go never have more of them running than the tenant's limit.

use std::rc::Rc;
use std::time::Duration;

use bytes::BytesMut;
use nagaya_keeper_api::client::KeeperClient;
use nagaya_keeper_api::protocol::ProcessExit;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::backends::programs::after::BackgroundJobs;
use crate::backends::programs::answer::{FailureInquiry, ProgramFailure};
use crate::backends::programs::pool::{PoolWorker, WorkerGuard};
use crate::backends::programs::responder::ResponderLink;
use crate::record::execution::PendingUsage;

/// Maximum time until the keeper reports the usage of a request.
const LEAVE_MAX: Duration = Duration::from_secs(2);

/// A worker that serves a request, and the work that follows.
pub(super) struct ServingWorker {
    lease: WorkerGuard,
    due: PendingUsage,
    keeper: Rc<KeeperClient>,
    after: Rc<BackgroundJobs>,
}

impl ServingWorker {
    pub fn new(
        lease: WorkerGuard,
        due: PendingUsage,
        keeper: Rc<KeeperClient>,
        after: Rc<BackgroundJobs>,
    ) -> Self {
        Self { lease, due, keeper, after }
    }

    /// Returns the lease for another worker, after this one has read nothing.
    pub fn into_lease(self) -> (WorkerGuard, PendingUsage) {
        (self.lease, self.due)
    }
}

impl ResponderLink for ServingWorker {
    const ENDS_BODY: bool = false;
    const LINGERS: bool = true;

    fn line(&mut self) -> (&mut UnixStream, &mut BytesMut) {
        let PoolWorker { stream, buffer, .. } = self.lease.worker();
        (stream, buffer)
    }

    fn may_repeat(&self) -> bool {
        false
    }

    fn after(&self) -> &Rc<BackgroundJobs> {
        &self.after
    }

    /// Gives the worker to others, once the usage of this request is known.
    fn leave(self) {
        let Self { mut lease, due, keeper, after } = self;
        after.run(async move {
            match timeout(LEAVE_MAX, keeper.leave(lease.worker().id)).await {
                Ok(Ok(usage)) => {
                    due.report(usage);
                    lease.give_back();
                }
                _ => {
                    end(lease, due).await;
                }
            }
        });
    }

    /// Ends the worker.
    fn abandon(self) {
        let Self { lease, due, after, .. } = self;
        after.run(async move {
            end(lease, due).await;
        });
    }

    fn autopsy(self) -> FailureInquiry {
        let Self { lease, due, .. } = self;
        Box::pin(async move {
            let exit = end(lease, due).await?;
            exit.out_of_memory.then_some(ProgramFailure::OutOfMemory)
        })
    }
}

/// Ends the worker. Returns how it ended, if the keeper reports it in time.
async fn end(lease: WorkerGuard, due: PendingUsage) -> Option<ProcessExit> {
    let process = lease.into_process()?;
    let (exit, usage) = timeout(LEAVE_MAX, process.end()).await.ok().flatten()?;
    due.report(usage);
    Some(exit)
}

#[cfg(test)]
mod tests;
