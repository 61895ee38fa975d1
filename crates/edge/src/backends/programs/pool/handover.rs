//! Passes a worker directly from one request to the next one of the same thread.
//!
//! Requests that wait for a tenant's workers form one queue over all threads (`TenantPool::turns`).
//! A strict order would send nearly every worker to another thread. That thread then has to be
//! woken while the worker idles. So each waiting request is also in its thread's own queue. A
//! returned worker goes to the first one there, for at most `IN_ROW_MAX`. Then the common queue has
//! its turn. Not here: which requests may wait (`pool`).

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::backends::programs::pool::{TenantPool, WorkerGuard};

/// Maximum time for which a worker may pass over requests on other threads. They wait that much
/// longer than their place in the queue implies, plus one request. It is long against the 0.1 ms
/// of a trivial script. Waking another thread costs as much as such a request. It is short
/// against the page of an application.
pub(super) const IN_ROW_MAX: Duration = Duration::from_millis(1);

/// One thread's queues, by pool. Each waiting request holds the pool, so no address appears
/// twice.
type HandoverQueues = HashMap<*const TenantPool, VecDeque<oneshot::Sender<WorkerGuard>>>;

thread_local! {
    static LINES: RefCell<HandoverQueues> = RefCell::default();
}

/// Enters this thread's queue. Dropping the receiver leaves it.
pub(super) fn line_up(pool: &Arc<TenantPool>) -> oneshot::Receiver<WorkerGuard> {
    let (give, given) = oneshot::channel();
    LINES.with_borrow_mut(|lines| {
        let line = lines.entry(Arc::as_ptr(pool)).or_default();
        // Requests that got their turn otherwise are still listed here. They are removed each
        // time the queue has doubled.
        if line.len().is_power_of_two() {
            line.retain(|waiting| !waiting.is_closed());
        }
        line.push_back(give);
    });
    given
}

/// Gives the lease, with its worker, to the first in this thread's queue. Returns it if the queue
/// is empty, or if others have waited long enough.
pub(super) fn pass_on(mut lease: WorkerGuard) -> Option<WorkerGuard> {
    if lease.turn_since.elapsed() >= IN_ROW_MAX {
        return Some(lease);
    }
    let pool = Arc::as_ptr(&lease.pool);
    let next = || {
        LINES.with_borrow_mut(|lines| {
            let line = lines.get_mut(&pool)?;
            let next = line.pop_front();
            if line.is_empty() {
                lines.remove(&pool);
            }
            next
        })
    };
    while let Some(waiting) = next() {
        // Sent outside the borrow: dropping an unclaimed lease searches for other waiting
        // requests.
        match waiting.send(lease) {
            Ok(()) => return None,
            Err(back) => lease = back,
        }
    }
    Some(lease)
}
