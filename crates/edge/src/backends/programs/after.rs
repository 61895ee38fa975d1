//! Runs the remaining work for programs whose response has ended: getting their usage, giving
//! workers back.
//!
//! This work begins where guards are dropped, perhaps after the thread's tasks have ended. So it
//! is sent to a task that waits for such jobs. If that has ended, too, a job is dropped, and ends
//! by dropping its guards. Not here: the jobs (`cgi`, `php`).

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;

use tokio::sync::mpsc;
use tokio::task::spawn_local;

/// Maximum number of jobs of one edge thread at once: all possible PHP workers, and as many CGI
/// programs.
const JOBS_MAX: usize = 4096;

type BackgroundJob = Pin<Box<dyn Future<Output = ()>>>;

/// One edge thread's jobs.
#[derive(Debug, Default)]
pub struct BackgroundJobs {
    jobs: RefCell<Option<mpsc::Sender<BackgroundJob>>>,
    open: Rc<Cell<usize>>,
}

impl BackgroundJobs {
    /// Starts the task that runs jobs, unless it runs. Call it on a `LocalSet`.
    pub fn begin(&self) {
        let mut jobs = self.jobs.borrow_mut();
        if jobs.as_ref().is_none_or(mpsc::Sender::is_closed) {
            let (sender, mut receiver) = mpsc::channel::<BackgroundJob>(JOBS_MAX);
            spawn_local(async move {
                while let Some(job) = receiver.recv().await {
                    spawn_local(job);
                }
            });
            *jobs = Some(sender);
        }
    }

    /// Runs the job on this thread. The job must limit its own time.
    pub fn run(&self, job: impl Future<Output = ()> + 'static) {
        let jobs = self.jobs.borrow();
        let (Some(jobs), true) = (jobs.as_ref(), self.open.get() < JOBS_MAX) else { return };
        let open = AcceptGuard::new(&self.open);
        // The channel has space for the maximum number of jobs. Without a task to receive it, the
        // thread is ending.
        let _ = jobs.try_send(Box::pin(async move {
            job.await;
            drop(open);
        }));
    }
}

struct AcceptGuard(Rc<Cell<usize>>);

impl AcceptGuard {
    fn new(count: &Rc<Cell<usize>>) -> Self {
        count.set(count.get() + 1);
        Self(Rc::clone(count))
    }
}

impl Drop for AcceptGuard {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::LocalSet;

    use super::*;

    /// Notes in which state its job was dropped.
    struct Note(Rc<Cell<Option<bool>>>, bool);

    impl Note {
        fn finish(&mut self) {
            self.1 = true;
        }
    }

    impl Drop for Note {
        fn drop(&mut self) {
            self.0.set(Some(self.1));
        }
    }

    fn job(how: &Rc<Cell<Option<bool>>>) -> impl Future<Output = ()> + use<> {
        let mut note = Note(Rc::clone(how), false);
        async move {
            tokio::task::yield_now().await;
            note.finish();
        }
    }

    #[tokio::test]
    async fn job_runs_while_it_has_a_thread_and_is_dropped_otherwise() {
        let (after, how) = (BackgroundJobs::default(), Rc::new(Cell::new(None)));
        after.run(job(&how));
        assert_eq!(how.get(), Some(false), "nobody takes jobs yet");
        let local = LocalSet::new();
        local
            .run_until(async {
                after.begin();
                after.run(job(&how));
                while after.open.get() > 0 {
                    tokio::task::yield_now().await;
                }
            })
            .await;
        assert_eq!(how.get(), Some(true));
        drop(local);
        after.run(job(&how));
        assert_eq!((how.get(), after.open.get()), (Some(false), 0));
    }
}
