//! Threads for blocking work: opening files under a tenant's rights, and starting programs.
//!
//! Two kinds, so that one cannot hold up the other: a program's start blocks its thread until the
//! program runs, and in a cell that is out of CPU time that is as long as it takes to get some.
//! Document roots are opened there too, because a tenant's file system may hang. All live as long
//! as the keeper, because a started program is killed when its thread ends (`PR_SET_PDEATHSIG`
//! follows threads). Not here: what they do (`roots`, `spawn`).

use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::TenantName;
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

use crate::fault::{self, Fault};
use crate::sched_slice;

/// Threads for everything but starts and document roots. A file system that does not respond blocks
/// one thread until it does. Only when it blocks all of them do others have to wait.
const WORKERS: usize = 16;

/// Maximum number of threads for starts, made as they are needed. Sixteen tenants can have all of
/// theirs blocked before another waits.
const STARTERS_MAX: usize = 256;

/// Maximum number of starts of one tenant at once. If a tenant's cell has no CPU time, only its own
/// further starts wait for it.
const STARTS_PER_TENANT_MAX: u32 = 16;

/// Maximum number of waiting jobs, of either kind. At a millisecond each on two cores, the last one
/// waits two seconds.
const JOBS_MAX: usize = 4096;

type PoolJob = Box<dyn FnOnce() + Send>;

#[derive(Clone)]
pub struct ThreadPool {
    queue: Arc<JobQueue>,
    starts: Arc<StartQueue>,
}

#[derive(Default)]
struct JobQueue {
    jobs: Mutex<VecDeque<PoolJob>>,
    more: Condvar,
}

#[derive(Default)]
struct StartQueue {
    state: Mutex<StartsState>,
    more: Condvar,
}

#[derive(Default)]
struct StartsState {
    waiting: VecDeque<(TenantName, PoolJob)>,
    running: HashMap<TenantName, u32>,
    threads: usize,
    /// Threads without work that are not yet called.
    idle: usize,
}

impl ThreadPool {
    pub fn start() -> io::Result<Self> {
        let queue = Arc::new(JobQueue::default());
        for number in 0..WORKERS {
            let queue = Arc::clone(&queue);
            thread::Builder::new().name(format!("keeper-{number}")).spawn(move || serve(&queue))?;
        }
        let starts = Arc::new(StartQueue::default());
        StartQueue::add_thread(&starts, &mut starts.state.lock())?;
        Ok(Self { queue, starts })
    }

    /// Queues `job`, and returns a receiver of its result. It runs even if nobody waits any more.
    pub fn run<R: Send + 'static>(
        &self,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> Result<oneshot::Receiver<R>, Fault> {
        let (job, result) = answering(job);
        let mut jobs = self.queue.jobs.lock();
        if jobs.len() >= JOBS_MAX {
            return Err(full());
        }
        jobs.push_back(job);
        drop(jobs);
        self.queue.more.notify_one();
        Ok(result)
    }

    /// As `run`, for the start of a program of this tenant, or for opening one of its document
    /// roots.
    pub fn start_for<R: Send + 'static>(
        &self,
        tenant: &TenantName,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> Result<oneshot::Receiver<R>, Fault> {
        let (job, result) = answering(job);
        let mut state = self.starts.state.lock();
        if state.waiting.len() >= JOBS_MAX {
            return Err(full());
        }
        state.waiting.push_back((tenant.clone(), job));
        if state.idle > 0 {
            state.idle -= 1;
            self.starts.more.notify_one();
        } else if state.threads < STARTERS_MAX
            && let Err(error) = StartQueue::add_thread(&self.starts, &mut state)
        {
            // The existing threads take it later.
            tracing::warn!(%error, "{} threads start programs, and no more can be started", state.threads);
        }
        Ok(result)
    }
}

fn answering<R: Send + 'static>(job: impl FnOnce() -> R + Send + 'static) -> (PoolJob, oneshot::Receiver<R>) {
    let (done, result) = oneshot::channel();
    let job = Box::new(move || {
        // The caller may have left. Then the result is dropped, which closes what it holds.
        let _ = done.send(job());
    });
    (job, result)
}

fn full() -> Fault {
    let message = format!("{JOBS_MAX} file and process operations wait already; try again later");
    Fault::new(FailureKind::Busy, fault::LIMIT, message)
}

fn serve(queue: &JobQueue) {
    sched_slice::request_short_slice();
    loop {
        let mut jobs = queue.jobs.lock();
        while jobs.is_empty() {
            queue.more.wait(&mut jobs);
        }
        let job = jobs.pop_front();
        drop(jobs);
        job.into_iter().for_each(run);
    }
}

/// Runs a job. A panic in it must not end its thread, and with it the programs the thread started.
fn run(job: PoolJob) {
    if catch_unwind(AssertUnwindSafe(job)).is_err() {
        tracing::error!("an operation of the keeper panicked; its caller gets an error");
    }
}

impl StartQueue {
    fn add_thread(starts: &Arc<Self>, state: &mut StartsState) -> io::Result<()> {
        let (number, theirs) = (state.threads, Arc::clone(starts));
        thread::Builder::new().name(format!("starter-{number}")).spawn(move || theirs.serve())?;
        state.threads += 1;
        Ok(())
    }

    fn serve(&self) {
        sched_slice::request_short_slice();
        let mut state = self.state.lock();
        loop {
            let Some((tenant, job)) = state.next() else {
                state.idle += 1;
                self.more.wait(&mut state);
                continue;
            };
            drop(state);
            run(job);
            state = self.state.lock();
            state.ended(&tenant);
        }
    }
}

impl StartsState {
    /// Returns the first job that may begin now, and marks it as begun.
    fn next(&mut self) -> Option<(TenantName, PoolJob)> {
        let may = |(tenant, _): &(TenantName, PoolJob)| {
            self.running.get(tenant).is_none_or(|count| *count < STARTS_PER_TENANT_MAX)
        };
        let at = self.waiting.iter().position(may)?;
        let (tenant, job) = self.waiting.remove(at)?;
        *self.running.entry(tenant.clone()).or_default() += 1;
        Some((tenant, job))
    }

    fn ended(&mut self, tenant: &TenantName) {
        if let Some(count) = self.running.get_mut(tenant) {
            *count -= 1;
            if *count == 0 {
                self.running.remove(tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_tenant_whose_starts_hang_holds_up_no_other() {
        let workers = ThreadPool::start().unwrap();
        let tenant = |name: &str| TenantName::new(name).unwrap();
        let (begun, begins) = mpsc::channel();
        let gates: Vec<_> = (0..=STARTS_PER_TENANT_MAX)
            .map(|number| {
                let (open, gate) = mpsc::channel::<()>();
                let begun = begun.clone();
                let hangs = move || {
                    begun.send(number).unwrap();
                    gate.recv().unwrap();
                };
                workers.start_for(&tenant("slow"), hangs).unwrap();
                open
            })
            .collect();
        let mut running: Vec<_> = (0..STARTS_PER_TENANT_MAX).map(|_| begins.recv().unwrap()).collect();
        running.sort_unstable();
        assert!(running.iter().copied().eq(0..STARTS_PER_TENANT_MAX), "the last one waits");
        let other = workers.start_for(&tenant("other"), || 7).unwrap();
        assert_eq!(other.blocking_recv().unwrap(), 7);
        assert_eq!(workers.run(|| 8).unwrap().blocking_recv().unwrap(), 8);
        gates[3].send(()).unwrap();
        assert_eq!(begins.recv().unwrap(), STARTS_PER_TENANT_MAX, "one ended, so the last one begins");
        for gate in gates {
            // One has been let go already.
            let _ = gate.send(());
        }
    }
}
