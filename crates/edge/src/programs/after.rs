//! What is still to be done for programs whose response has ended: asking what they used, giving workers back.
//!
//! It begins where things are dropped, perhaps after the thread's tasks are gone. So it is handed to a task that waits for such
//! jobs; where that is gone too, a job is dropped, and ends by dropping what it holds. Not here: the jobs (`cgi`, `php`).

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;

use tokio::sync::mpsc;
use tokio::task::spawn_local;

/// Jobs of one edge thread at once: one for each PHP worker there may be, and as many CGI programs.
const JOBS_MAX: usize = 4096;

type Job = Pin<Box<dyn Future<Output = ()>>>;

/// One edge thread's jobs.
#[derive(Debug, Default)]
pub struct After {
    jobs: RefCell<Option<mpsc::Sender<Job>>>,
    open: Rc<Cell<usize>>,
}

impl After {
    /// Makes sure that there is a task to take jobs. To be called on a `LocalSet`.
    pub fn begin(&self) {
        let mut jobs = self.jobs.borrow_mut();
        if jobs.as_ref().is_none_or(mpsc::Sender::is_closed) {
            let (sender, mut receiver) = mpsc::channel::<Job>(JOBS_MAX);
            spawn_local(async move {
                while let Some(job) = receiver.recv().await {
                    spawn_local(job);
                }
            });
            *jobs = Some(sender);
        }
    }

    /// Has the job done on this thread. It must bound its own time.
    pub fn run(&self, job: impl Future<Output = ()> + 'static) {
        let jobs = self.jobs.borrow();
        let (Some(jobs), true) = (jobs.as_ref(), self.open.get() < JOBS_MAX) else { return };
        let open = Open::new(&self.open);
        // There is room for as many as may be open. Without a task to take it the thread is ending.
        let _ = jobs.try_send(Box::pin(async move {
            job.await;
            drop(open);
        }));
    }
}

struct Open(Rc<Cell<usize>>);

impl Open {
    fn new(count: &Rc<Cell<usize>>) -> Self {
        count.set(count.get() + 1);
        Self(Rc::clone(count))
    }
}

impl Drop for Open {
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
    async fn a_job_is_done_while_there_is_a_thread_for_it_and_dropped_otherwise() {
        let (after, how) = (After::default(), Rc::new(Cell::new(None)));
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
