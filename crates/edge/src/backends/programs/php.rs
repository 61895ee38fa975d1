//! Manages a PHP worker that serves a request, and decides when it serves the next one.
//!
//! Not here: the data on its connection (`responder`), the order of requests (`pool`).
//!
//! A worker serves another request only if this one left nothing behind. Everything was sent,
//! everything was read, the end record arrived and no byte after it. The keeper's gate is at the
//! other end of the connection. It prevents PHP from reading the unread body of one request as
//! the next request.
//!
//! A worker also serves others only after this request's usage is known. The gate reports it behind
//! the answer, or has the keeper asked for it. That comes over another connection than the next
//! request, so going on at once would charge one request for the next one's work. A tenant's other
//! workers do not wait. The client does not wait either, unless a CPU quota must be settled.
//!
//! A worker stays with a request whose client has left, up to a limit of its site's record
//! (`patience::Linger`). It keeps its place among the tenant's workers. So clients that come and
//! go never have more of them running than the tenant's limit.

use std::rc::Rc;
use std::time::Duration;

use bytes::BytesMut;
use nagaya_keeper_api::client::KeeperClient;
use nagaya_keeper_api::fastcgi::{ProtocolError, UsageReport};
use nagaya_keeper_api::protocol::ProcessExit;
use nagaya_keeper_api::quiet_stream::QuietStream;
use nagaya_records::cell::RequestUsage;
use tokio::io::AsyncReadExt;
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
    const REPORTS: bool = true;

    fn line(&mut self) -> (&mut QuietStream, &mut BytesMut) {
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
        let PoolWorker { stream, buffer, .. } = lease.worker();
        stream.forget_writes();
        match UsageReport::take(buffer) {
            // Nothing may follow it.
            Ok(Some(UsageReport::Known(usage))) if buffer.is_empty() => {
                due.report(usage);
                lease.give_back();
            }
            reported => after.run(async move {
                match timeout(LEAVE_MAX, learn_usage(reported, &mut lease, &keeper)).await {
                    Ok(Some(usage)) => {
                        due.report(usage);
                        lease.give_back();
                    }
                    _ => {
                        end(lease, due).await;
                    }
                }
            }),
        }
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

/// Waits for the usage of the worker's request. `None` if it is never known.
async fn learn_usage(
    mut reported: Result<Option<UsageReport>, ProtocolError>,
    lease: &mut WorkerGuard,
    keeper: &KeeperClient,
) -> Option<RequestUsage> {
    let PoolWorker { id, stream, buffer, .. } = lease.worker();
    loop {
        match reported.ok()? {
            None => {}
            Some(_) if !buffer.is_empty() => return None,
            Some(UsageReport::Known(usage)) => return Some(usage),
            Some(UsageReport::Ask) => return keeper.leave(*id).await.ok(),
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
        reported = UsageReport::take(buffer);
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
