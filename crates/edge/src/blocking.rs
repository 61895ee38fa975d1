//! Runs calls that may block on threads of their own. These are reads of files that are not in
//! memory, and the spool.
//!
//! An edge thread serves thousands of connections and must never wait for a disk or for a network
//! file system. Such a call runs here instead. Each device has a share of the threads, and each
//! owner a share of its device's. So a file system that hangs takes its own share and no other's.
//! Not here: the files (`files`), the spool's content (`spool`).
//!
//! Invariant: no device runs more than `DEVICE_THREADS_MAX` jobs, and no share more than
//! `SHARE_THREADS_MAX`. No share queues more than `LOOKS_QUEUE_MAX` or `SPOOL_QUEUE_MAX`.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hash};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::FixedState;
use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::oneshot;

/// Maximum number of threads of one edge process. They are made when needed.
const THREADS_MAX: usize = 192;

/// Maximum number of threads of one device. Six devices must hang before a seventh one is
/// affected.
const DEVICE_THREADS_MAX: usize = 32;

/// Maximum number of threads of one owner on one device.
const SHARE_THREADS_MAX: usize = 8;

/// Maximum number of look-ups of one share that wait for a thread. One more is refused. A look-up
/// is some 200 bytes, and its request holds far more. So a burst of files that are not in memory
/// is not refused.
const LOOKS_QUEUE_MAX: usize = 16 << 10;

/// The same for jobs of the spool, which hold bytes of bodies.
const SPOOL_QUEUE_MAX: usize = 512;

/// Time without work after which a thread ends.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// Stack of one thread, bytes. The calls are shallow.
const STACK_BYTES: usize = 256 << 10;

/// A unit that hangs as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockingDevice {
    /// A file system, by the numbers of its device (major, minor).
    Files(u32, u32),
    Spool,
}

/// Owner of jobs on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceShare {
    device: BlockingDevice,
    /// A hash. Two owners with the same hash share the threads.
    owner: u64,
}

impl DeviceShare {
    pub fn new(device: BlockingDevice, owner: &impl Hash) -> Self {
        Self { device, owner: FixedState::default().hash_one(owner) }
    }

    fn queue_max(self) -> usize {
        match self.device {
            BlockingDevice::Files(..) => LOOKS_QUEUE_MAX,
            BlockingDevice::Spool => SPOOL_QUEUE_MAX,
        }
    }
}

/// The share's queue is full, or no thread could be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a file system does not keep up")]
pub struct PoolBusy;

type BlockingJob = Box<dyn FnOnce() + Send>;

/// The threads of one process.
#[derive(Default)]
pub struct BlockingPool {
    state: Mutex<PoolState>,
    work: Condvar,
}

#[derive(Default)]
struct PoolState {
    shares: HashMap<DeviceShare, ShareQueue>,
    /// Shares that have a job and may run one more, in the order of their turn. Each is listed
    /// once.
    ready: VecDeque<DeviceShare>,
    /// Number of running jobs by device.
    devices: HashMap<BlockingDevice, usize>,
    /// Shares that would be ready if their device had a thread left.
    held: Vec<DeviceShare>,
    threads: usize,
    idle: usize,
}

#[derive(Default)]
struct ShareQueue {
    jobs: VecDeque<BlockingJob>,
    running: usize,
    is_ready: bool,
}

impl PoolState {
    /// Queues the share if it has a job and may run one more.
    fn enqueue(&mut self, share: DeviceShare) {
        let Some(queue) = self.shares.get_mut(&share) else { return };
        if !queue.is_ready && !queue.jobs.is_empty() && queue.running < SHARE_THREADS_MAX {
            queue.is_ready = true;
            self.ready.push_back(share);
        }
    }

    /// Returns the next job whose device may run one more.
    fn take_job(&mut self) -> Option<(DeviceShare, BlockingJob)> {
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

    fn finish_job(&mut self, share: DeviceShare) {
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
    /// Runs `call` on a thread of its own and returns its result. If the caller is cancelled
    /// first, a call that has not begun is dropped. One that has begun continues, and its result
    /// is dropped.
    ///
    /// # Errors
    /// Fails if too many calls of the share wait, or if the machine gives no thread.
    pub async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        share: DeviceShare,
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

    fn submit(self: &Arc<Self>, share: DeviceShare, job: BlockingJob) -> Result<(), PoolBusy> {
        let mut state = self.state.lock();
        let queue = state.shares.entry(share).or_default();
        if queue.jobs.len() >= share.queue_max() {
            return Err(PoolBusy);
        }
        queue.jobs.push_back(job);
        state.enqueue(share);
        self.staff(&mut state)
    }

    /// Ensures that a thread takes the next job that may run. The code that takes one calls this
    /// again for the next.
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
            // Other threads take it when they have time.
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

    /// Runs one thread: job after job, until there was none for `IDLE_MAX`.
    fn work(self: Arc<Self>) {
        let mut state = self.state.lock();
        loop {
            if let Some((share, job)) = state.take_job() {
                // It fails only if there is no thread at all, and here is one.
                let _ = self.staff(&mut state);
                MutexGuard::unlocked(&mut state, || {
                    // A panic ends one request, not the thread that others rely on.
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

    fn spool() -> DeviceShare {
        DeviceShare::new(BlockingDevice::Spool, &"alice")
    }

    fn hanging(owner: usize) -> DeviceShare {
        DeviceShare::new(BlockingDevice::Files(0, 50), &owner)
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
            let job: BlockingJob = Box::new(move || {
                let _ = hang.lock().expect("nobody panics").recv();
            });
            pool.submit(hanging(n % 50), job).unwrap();
        }
        assert_eq!(pool.run(DeviceShare::new(BlockingDevice::Files(8, 1), &0), || 7).await, Ok(7));
        assert!(pool.state.lock().devices[&BlockingDevice::Files(0, 50)] <= DEVICE_THREADS_MAX);
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
            let job: BlockingJob = Box::new(move || {
                let _ = hang.lock().expect("nobody panics").recv();
            });
            pool.submit(hanging(1), job).unwrap();
        }
        assert_eq!(pool.run(hanging(2), || 7).await, Ok(7));
        drop(release);
    }

    #[test]
    fn a_full_queue_is_refused() {
        for (share, max) in [(spool(), SPOOL_QUEUE_MAX), (hanging(1), LOOKS_QUEUE_MAX)] {
            let pool = Arc::new(BlockingPool::default());
            let (release, hang) = mpsc::channel::<()>();
            let hang = Arc::new(std::sync::Mutex::new(hang));
            let job = || -> BlockingJob {
                let hang = Arc::clone(&hang);
                Box::new(move || {
                    let _ = hang.lock().expect("nobody panics").recv();
                })
            };
            let submitted = SHARE_THREADS_MAX + max + 1;
            let taken = (0..submitted).filter(|_| pool.submit(share, job()).is_ok()).count();
            assert!((max..=SHARE_THREADS_MAX + max).contains(&taken), "{taken}");
            assert_eq!(pool.submit(share, job()), Err(PoolBusy));
            drop(release);
        }
    }

    #[tokio::test]
    async fn a_call_that_panics_ends_nothing_else() {
        let pool = Arc::new(BlockingPool::default());
        assert_eq!(pool.run(spool(), || panic!("as a test")).await, Err::<(), _>(PoolBusy));
        assert_eq!(pool.run(spool(), || 1).await, Ok(1));
    }
}
