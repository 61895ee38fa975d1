//! A worker that goes straight from one request to the next one of the same thread.
//!
//! Those who wait for a tenant's workers stand in one line over all threads (`Pool::turns`). Keeping strictly to it
//! would send nearly every worker to another thread, which then has to be woken while the worker idles. So whoever
//! waits also stands in its thread's own line, and a worker given back goes to the first one there, but no longer
//! than for `IN_ROW_MAX`: then the line of all has its turn. Not here: who may wait at all (`pool`).

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::{Lease, Pool};

/// So long a worker may pass over those who wait on other threads; they wait that much longer than their place in
/// line says, and one request. Long against the 0.1 ms of a trivial script, where waking another thread
/// would cost as much as the request; short against the page of an application.
pub(super) const IN_ROW_MAX: Duration = Duration::from_millis(5);

/// One thread's lines, by pool. Whoever stands there holds the pool, so no address comes twice.
type Lines = HashMap<*const Pool, VecDeque<oneshot::Sender<Lease>>>;

thread_local! {
    static LINES: RefCell<Lines> = RefCell::default();
}

/// Gets in this thread's line. Giving up the receiver is leaving it.
pub(super) fn line_up(pool: &Arc<Pool>) -> oneshot::Receiver<Lease> {
    let (give, given) = oneshot::channel();
    LINES.with_borrow_mut(|lines| {
        let line = lines.entry(Arc::as_ptr(pool)).or_default();
        // Who had its turn otherwise is still noted here. Looked through each time the line has doubled.
        if line.len().is_power_of_two() {
            line.retain(|waiting| !waiting.is_closed());
        }
        line.push_back(give);
    });
    given
}

/// Gives the lease, with its worker, to the first in this thread's line. It comes back if nobody is there, or others
/// have waited long enough.
pub(super) fn pass_on(mut lease: Lease) -> Option<Lease> {
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
        // Sent outside the borrow: a lease that nobody takes is dropped, and that looks for others who wait.
        match waiting.send(lease) {
            Ok(()) => return None,
            Err(back) => lease = back,
        }
    }
    Some(lease)
}
