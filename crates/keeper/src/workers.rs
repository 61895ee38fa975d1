//! Threads for what blocks: opening files under a tenant's rights, and starting programs.
//!
//! Two kinds, so that one cannot hold up the other: a program's start blocks its thread until the program runs, and in a
//! cell that is out of CPU time that is as long as it takes to get some. Document roots are opened there too, because a
//! tenant's file system may hang. All live as long as the keeper, because a
//! started program is killed when its thread ends (`PR_SET_PDEATHSIG` follows threads). Not here: what they do (`roots`, `spawn`).

use std::collections::{HashMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use nagaya_cmdb::TenantName;
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

use crate::fault::{self, Fault};
use crate::protocol::Failure;
use crate::slice;

/// Threads for everything but starts and document roots. A file system that does not answer blocks one until it does, and so many of them
/// before others have to wait.
const WORKERS: usize = 16;

/// Threads for starts, made as they are needed. Sixteen tenants can have all of theirs blocked before another waits.
const STARTERS_MAX: usize = 256;

/// Starts of one tenant at once. The others of a tenant whose cell is out of CPU time wait for it alone.
const STARTS_PER_TENANT_MAX: u32 = 16;

/// Jobs that may wait, of either kind. At a millisecond each on two cores, the last one waits two seconds.
const JOBS_MAX: usize = 4096;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Clone)]
pub struct Workers {
    queue: Arc<Queue>,
    starts: Arc<Starts>,
}

#[derive(Default)]
struct Queue {
    jobs: Mutex<VecDeque<Job>>,
    more: Condvar,
}

#[derive(Default)]
struct Starts {
    state: Mutex<StartsState>,
    more: Condvar,
}

#[derive(Default)]
struct StartsState {
    waiting: VecDeque<(TenantName, Job)>,
    running: HashMap<TenantName, u32>,
    threads: usize,
    /// Threads that have nothing to do, and are not yet called.
    idle: usize,
}

impl Workers {
    pub fn start() -> io::Result<Self> {
        let queue = Arc::new(Queue::default());
        for number in 0..WORKERS {
            let queue = Arc::clone(&queue);
            thread::Builder::new().name(format!("keeper-{number}")).spawn(move || serve(&queue))?;
        }
        let starts = Arc::new(Starts::default());
        Starts::add_thread(&starts, &mut starts.state.lock())?;
        Ok(Self { queue, starts })
    }

    /// Queues `job`, and answers with what it returned. It runs even if nobody waits any more.
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

    /// The same for the start of a program of this tenant, or for opening a document root of its.
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
            && let Err(error) = Starts::add_thread(&self.starts, &mut state)
        {
            // Those there are take it later.
            tracing::warn!(%error, "{} threads start programs, and there can be no more", state.threads);
        }
        Ok(result)
    }
}

fn answering<R: Send + 'static>(job: impl FnOnce() -> R + Send + 'static) -> (Job, oneshot::Receiver<R>) {
    let (done, result) = oneshot::channel();
    let job = Box::new(move || {
        // Who asked may have left; then the result is dropped, which closes what it holds.
        let _ = done.send(job());
    });
    (job, result)
}

fn full() -> Fault {
    let message = format!("{JOBS_MAX} file and process operations wait already; try again later");
    Fault::new(Failure::Busy, fault::LIMIT, message)
}

fn serve(queue: &Queue) {
    slice::shorten();
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

/// A job that panics must not take its thread along, and with it the programs the thread started.
fn run(job: Job) {
    if catch_unwind(AssertUnwindSafe(job)).is_err() {
        tracing::error!("an operation of the keeper panicked; the one who asked gets an error");
    }
}

impl Starts {
    fn add_thread(starts: &Arc<Self>, state: &mut StartsState) -> io::Result<()> {
        let (number, theirs) = (state.threads, Arc::clone(starts));
        thread::Builder::new().name(format!("starter-{number}")).spawn(move || theirs.serve())?;
        state.threads += 1;
        Ok(())
    }

    fn serve(&self) {
        slice::shorten();
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
    /// The first that may begin now, which then has begun.
    fn next(&mut self) -> Option<(TenantName, Job)> {
        let may = |(tenant, _): &(TenantName, Job)| {
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
        let workers = Workers::start().unwrap();
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
