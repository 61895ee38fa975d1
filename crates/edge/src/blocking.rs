//! Threads for calls that may block: reads of files that are not in memory, and the spool.
//!
//! An edge thread serves thousands of connections and must never wait for a disk or for a network file system. Such a call
//! runs here instead. Each device has a share of the threads, and each owner a share of its device's, so a file system that
//! hangs takes its own share and no other's.
//! Not here: what is read (`files`), what is spooled (`spool`).
//!
//! Invariant: no device runs more than `DEVICE_THREADS_MAX` jobs, no share more than `SHARE_THREADS_MAX`, and no share queues
//! more than `SHARE_QUEUE_MAX`.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hash};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::FixedState;
use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::oneshot;

/// Threads of one edge process at once. They are made when needed.
const THREADS_MAX: usize = 192;

/// Threads that one device may occupy. Six devices must hang before a seventh one is held up.
const DEVICE_THREADS_MAX: usize = 32;

/// Threads that one owner may occupy on one device.
const SHARE_THREADS_MAX: usize = 8;

/// Jobs of one share that wait for a thread. One more is refused.
const SHARE_QUEUE_MAX: usize = 512;

/// A thread without work ends after this.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// Stack of one thread, bytes. The calls are shallow.
const STACK_BYTES: usize = 256 << 10;

/// What hangs as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// A file system, by its device's numbers (major, minor).
    Files(u32, u32),
    Spool,
}

/// Whose jobs they are, on which device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Share {
    device: Device,
    /// A hash. Two owners of the same one have one share.
    owner: u64,
}

impl Share {
    pub fn new(device: Device, owner: &impl Hash) -> Self {
        Self { device, owner: FixedState::default().hash_one(owner) }
    }
}

/// The share's queue is full, or no thread could be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a file system does not keep up")]
pub struct PoolBusy;

type Job = Box<dyn FnOnce() + Send>;

/// The threads of one process.
#[derive(Default)]
pub struct BlockingPool {
    state: Mutex<PoolState>,
    work: Condvar,
}

#[derive(Default)]
struct PoolState {
    shares: HashMap<Share, ShareQueue>,
    /// Shares that have a job and may run one more, in the order of their turn. Each stands here once.
    ready: VecDeque<Share>,
    /// Jobs that run on each device.
    devices: HashMap<Device, usize>,
    /// Shares that would be ready if their device had a thread left.
    held: Vec<Share>,
    threads: usize,
    idle: usize,
}

#[derive(Default)]
struct ShareQueue {
    jobs: VecDeque<Job>,
    running: usize,
    is_ready: bool,
}

impl PoolState {
    /// Puts the share in line if it has a job and may run one more.
    fn enqueue(&mut self, share: Share) {
        let Some(queue) = self.shares.get_mut(&share) else { return };
        if !queue.is_ready && !queue.jobs.is_empty() && queue.running < SHARE_THREADS_MAX {
            queue.is_ready = true;
            self.ready.push_back(share);
        }
    }

    /// The next job whose device may run one more.
    fn take_job(&mut self) -> Option<(Share, Job)> {
        loop {
            let share = self.ready.pop_front()?;
            let on_device = self.devices.entry(share.device).or_default();
            if *on_device >= DEVICE_THREADS_MAX {
                self.held.push(share);
                continue;
            }
            let queue = self.shares.get_mut(&share)?;
            queue.is_ready = false;
            let job = queue.jobs.pop_front()?;
            queue.running += 1;
            *on_device += 1;
            self.enqueue(share);
            return Some((share, job));
        }
    }

    fn finish_job(&mut self, share: Share) {
        if let Some(on_device) = self.devices.get_mut(&share.device) {
            *on_device -= 1;
            if *on_device == 0 {
                self.devices.remove(&share.device);
            }
        }
        let released = self.held.extract_if(.., |held| held.device == share.device);
        self.ready.extend(released);
        if let Some(queue) = self.shares.get_mut(&share) {
            queue.running -= 1;
            if queue.running == 0 && queue.jobs.is_empty() {
                self.shares.remove(&share);
                return;
            }
        }
        self.enqueue(share);
    }
}

impl BlockingPool {
    /// Runs `call` on a thread of its own and returns what it returns. If the caller goes away first, a call that has not
    /// begun is left out; one that has begun goes on, and its result is dropped.
    ///
    /// # Errors
    /// If the share has too many calls that wait, or the machine gives no thread.
    pub async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        share: Share,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, PoolBusy> {
        let (sender, receiver) = oneshot::channel();
        self.submit(
            share,
            Box::new(move || {
                if !sender.is_closed() {
                    let _ = sender.send(call());
                }
            }),
        )?;
        receiver.await.map_err(|_| PoolBusy)
    }

    fn submit(self: &Arc<Self>, share: Share, job: Job) -> Result<(), PoolBusy> {
        let mut state = self.state.lock();
        let queue = state.shares.entry(share).or_default();
        if queue.jobs.len() >= SHARE_QUEUE_MAX {
            return Err(PoolBusy);
        }
        queue.jobs.push_back(job);
        state.enqueue(share);
        self.staff(&mut state)
    }

    /// Sees to it that a thread takes the next job that may run. Whoever takes one calls this again for the one after.
    fn staff(self: &Arc<Self>, state: &mut PoolState) -> Result<(), PoolBusy> {
        if state.ready.is_empty() {
            return Ok(());
        }
        if state.idle > 0 {
            self.work.notify_one();
            return Ok(());
        }
        if state.threads >= THREADS_MAX {
            return Ok(());
        }
        let pool = Arc::clone(self);
        let builder = std::thread::Builder::new().name("edge-blocking".into()).stack_size(STACK_BYTES);
        match builder.spawn(move || pool.work()) {
            Ok(_) => state.threads += 1,
            // Others take it when they have time.
            Err(_) if state.threads > 0 => {}
            Err(error) => {
                tracing::error!("no thread for calls that may block: {error}");
                state.shares.clear();
                state.ready.clear();
                return Err(PoolBusy);
            }
        }
        Ok(())
    }

    /// One thread: job after job, until there was none for `IDLE_MAX`.
    fn work(self: Arc<Self>) {
        let mut state = self.state.lock();
        loop {
            if let Some((share, job)) = state.take_job() {
                // It fails only where there is no thread at all, and here is one.
                let _ = self.staff(&mut state);
                MutexGuard::unlocked(&mut state, || {
                    // A panic ends one request, not the thread that others count on.
                    let _ = catch_unwind(AssertUnwindSafe(job));
                });
                state.finish_job(share);
                continue;
            }
            state.idle += 1;
            let is_over = self.work.wait_for(&mut state, IDLE_MAX).timed_out();
            state.idle -= 1;
            if is_over && state.ready.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

impl std::fmt::Debug for BlockingPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockingPool").field("threads", &self.state.lock().threads).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Until a pool without work holds nothing of what it has done.
    const CLEAR_MAX: Duration = Duration::from_secs(60);

    fn spool() -> Share {
        Share::new(Device::Spool, &"alice")
    }

    fn hanging(owner: usize) -> Share {
        Share::new(Device::Files(0, 50), &owner)
    }

    #[tokio::test]
    async fn a_call_returns_its_result() {
        let pool = Arc::new(BlockingPool::default());
        for n in 0..100 {
            assert_eq!(pool.run(spool(), move || n * 2).await, Ok(n * 2));
        }
        // A thread says that it is done after its caller has the result.
        let is_clear = async {
            while !pool.state.lock().shares.is_empty() {
                tokio::task::yield_now().await;
            }
        };
        assert!(tokio::time::timeout(CLEAR_MAX, is_clear).await.is_ok(), "something is left behind");
    }

    #[tokio::test]
    async fn a_device_that_hangs_leaves_the_others_alone() {
        let pool = Arc::new(BlockingPool::default());
        let (release, hang) = mpsc::channel::<()>();
        let hang = Arc::new(std::sync::Mutex::new(hang));
        for n in 0..1000 {
            let hang = Arc::clone(&hang);
            let job: Job = Box::new(move || {
                let _ = hang.lock().expect("nobody panics").recv();
            });
            pool.submit(hanging(n % 50), job).unwrap();
        }
        assert_eq!(pool.run(Share::new(Device::Files(8, 1), &0), || 7).await, Ok(7));
        assert!(pool.state.lock().devices[&Device::Files(0, 50)] <= DEVICE_THREADS_MAX);
        drop(release);
        for owner in 0..50 {
            assert_eq!(pool.run(hanging(owner), || 8).await, Ok(8), "it goes on when it goes on");
        }
    }

    #[tokio::test]
    async fn an_owner_that_hangs_leaves_the_others_of_its_device_alone() {
        let pool = Arc::new(BlockingPool::default());
        let (release, hang) = mpsc::channel::<()>();
        let hang = Arc::new(std::sync::Mutex::new(hang));
        for _ in 0..SHARE_THREADS_MAX + 5 {
            let hang = Arc::clone(&hang);
            let job: Job = Box::new(move || {
                let _ = hang.lock().expect("nobody panics").recv();
            });
            pool.submit(hanging(1), job).unwrap();
        }
        assert_eq!(pool.run(hanging(2), || 7).await, Ok(7));
        drop(release);
    }

    #[test]
    fn a_full_queue_is_refused() {
        let pool = Arc::new(BlockingPool::default());
        let (release, hang) = mpsc::channel::<()>();
        let hang = Arc::new(std::sync::Mutex::new(hang));
        let job = || -> Job {
            let hang = Arc::clone(&hang);
            Box::new(move || {
                let _ = hang.lock().expect("nobody panics").recv();
            })
        };
        let taken = (0..SHARE_THREADS_MAX + SHARE_QUEUE_MAX + 1)
            .filter(|_| pool.submit(spool(), job()).is_ok())
            .count();
        assert!(taken <= SHARE_THREADS_MAX + SHARE_QUEUE_MAX, "{taken}");
        assert_eq!(pool.submit(spool(), job()), Err(PoolBusy));
        drop(release);
    }

    #[tokio::test]
    async fn a_call_that_panics_ends_nothing_else() {
        let pool = Arc::new(BlockingPool::default());
        assert_eq!(pool.run(spool(), || panic!("as a test")).await, Err::<(), _>(PoolBusy));
        assert_eq!(pool.run(spool(), || 1).await, Ok(1));
    }
}
