//! Threads for what blocks: opening files under a tenant's rights, and starting programs.
//!
//! They live as long as the keeper, because a started program is killed when its thread ends
//! (`PR_SET_PDEATHSIG` follows threads). Not here: what they do (`roots`, `spawn`).

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

use crate::fault::{self, Fault};
use crate::protocol::Failure;

/// Threads. A program's start blocks one for less than a millisecond, but in a cell that is out of CPU time for as long as
/// it takes to get that millisecond; a file system that does not answer blocks one until it does, and so many of them
/// before others have to wait.
const WORKERS: usize = 64;

/// Jobs that may wait. At a millisecond each on two cores, the last one waits two seconds.
const JOBS_MAX: usize = 4096;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Clone)]
pub struct Workers {
    queue: Arc<Queue>,
}

#[derive(Default)]
struct Queue {
    jobs: Mutex<VecDeque<Job>>,
    more: Condvar,
}

impl Workers {
    pub fn start() -> io::Result<Self> {
        let queue = Arc::new(Queue::default());
        for number in 0..WORKERS {
            let queue = Arc::clone(&queue);
            thread::Builder::new().name(format!("keeper-{number}")).spawn(move || serve(&queue))?;
        }
        Ok(Self { queue })
    }

    /// Queues `job`, and answers with what it returned. It runs even if nobody waits any more.
    pub fn run<R: Send + 'static>(
        &self,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> Result<oneshot::Receiver<R>, Fault> {
        let (done, result) = oneshot::channel();
        let mut jobs = self.queue.jobs.lock();
        if jobs.len() >= JOBS_MAX {
            let message = format!("{JOBS_MAX} file and process operations wait already; try again later");
            return Err(Fault::new(Failure::Busy, fault::LIMIT, message));
        }
        jobs.push_back(Box::new(move || {
            // Who asked may have left; then the result is dropped, which closes what it holds.
            let _ = done.send(job());
        }));
        drop(jobs);
        self.queue.more.notify_one();
        Ok(result)
    }
}

fn serve(queue: &Queue) {
    loop {
        let mut jobs = queue.jobs.lock();
        while jobs.is_empty() {
            queue.more.wait(&mut jobs);
        }
        let job = jobs.pop_front();
        drop(jobs);
        // A job that panics must not take its thread along, and with it the programs the thread started.
        if let Some(job) = job
            && catch_unwind(AssertUnwindSafe(job)).is_err()
        {
            tracing::error!("an operation of the keeper panicked; the one who asked gets an error");
        }
    }
}
