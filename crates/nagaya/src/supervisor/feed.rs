//! Feeds one process: its settings, every tenant and site, then each change, in order of revision.
//! It also takes the process's replies.
//!
//! It uses two threads per process, because both the store and the stream block. A slow process has
//! a bounded queue. Above it the feed is given up, and the supervisor restarts the process, which
//! then gets everything from the store. So no committer of a change ever waits for a process. Not
//! here: the frames (`records::feed`), the process (`child`).

use std::collections::{HashMap, VecDeque};
use std::io::{self, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nagaya_records::feed::{self, BATCH_MAX, FeedQuery, FromSupervisor, ToSupervisor};
use nagaya_records::{NodeName, PlacementReason, RecordChange, SiteName};
use nagaya_store::{Store, snapshot_frames};
use parking_lot::{Condvar, Mutex};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Serialize;
use tokio::sync::oneshot;

/// Changes that may wait for one process. At about 500 bytes each this is 64 MiB, shared by the
/// processes.
pub const QUEUE_CHANGES_MAX: usize = 1 << 17;

/// Other frames that may wait for one process. There is one per signal, reload or query.
pub const QUEUE_FRAMES_MAX: usize = 1024;

/// Queries to one process without a reply yet.
const ASKS_MAX: usize = 64;

/// Longest time of a process's reply to a query.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The changes of one transaction.
#[derive(Debug)]
pub struct CommittedBatch {
    pub revision: u64,
    pub changes: Vec<RecordChange>,
}

#[derive(Debug)]
enum FeedJob {
    Changes(Arc<CommittedBatch>),
    Frame(FromSupervisor),
    /// A frame with its descriptor.
    Passing(FromSupervisor, OwnedFd),
}

/// The frames still to be written. Pure: the threads do the waiting.
#[derive(Debug, Default)]
struct FeedQueue {
    jobs: VecDeque<FeedJob>,
    changes: usize,
    /// No frames are accepted or handed out any more.
    closed: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum PushResult {
    Taken,
    /// The process is too far behind.
    Full,
    Closed,
}

impl FeedQueue {
    fn push(&mut self, job: FeedJob) -> PushResult {
        if self.closed {
            return PushResult::Closed;
        }
        let changes = if let FeedJob::Changes(job) = &job { job.changes.len() } else { 0 };
        // A single transaction may be larger than the queue: an import's memory is in use already.
        let full = match job {
            FeedJob::Changes(_) => self.changes > 0 && self.changes + changes > QUEUE_CHANGES_MAX,
            FeedJob::Frame(_) | FeedJob::Passing(..) => self.jobs.len() >= QUEUE_FRAMES_MAX + self.changes,
        };
        if full {
            return PushResult::Full;
        }
        self.changes += changes;
        self.jobs.push_back(job);
        PushResult::Taken
    }

    fn pop(&mut self) -> Option<FeedJob> {
        let job = self.jobs.pop_front()?;
        if let FeedJob::Changes(job) = &job {
            self.changes -= job.changes.len();
        }
        Some(job)
    }

    fn closed() -> Self {
        Self { closed: true, ..Self::default() }
    }
}

/// A feed's message to its supervisor.
#[derive(Debug)]
pub enum FeedNews {
    /// The process serves, and knows everything up to this revision.
    Ready { revision: u64 },
    /// The edge asks where a site's application runs.
    Place {
        tag: u64,
        site: SiteName,
        seen: Option<u64>,
        why: PlacementReason,
        lost: Option<NodeName>,
        probe_us: u64,
    },
    /// The edge: this node answers after all.
    Heard { node: NodeName },
    /// The edge: this node's reply to a probe is late.
    Doubt { node: NodeName },
    /// The edge: a member asks this node to vouch for it.
    VouchAsked { tag: u64, id: String },
    /// The edge: a member vouches for this node.
    Vouched { round: u64, id: String, moved: u64 },
    /// The feed is over: the process must be restarted. Also sent when it has ended by itself.
    Over { reason: String },
}

/// The supervisor's end of one process's feed.
pub struct ProcessFeed {
    shared: Arc<FeedState>,
    tag: AtomicU64,
}

struct FeedState {
    queue: Mutex<FeedQueue>,
    filled: Condvar,
    stream: UnixStream,
    asks: Mutex<HashMap<u64, oneshot::Sender<String>>>,
    /// The first fault; later failures follow from it.
    over: Mutex<Option<String>>,
    news: Box<dyn Fn(FeedNews) + Send + Sync>,
}

impl ProcessFeed {
    /// Makes a feed that accepts changes but writes nothing yet. `news` is called from the feed's
    /// own threads and may block.
    pub fn new(stream: UnixStream, news: impl Fn(FeedNews) + Send + Sync + 'static) -> Self {
        let shared = Arc::new(FeedState {
            queue: Mutex::default(),
            filled: Condvar::new(),
            stream,
            asks: Mutex::default(),
            over: Mutex::default(),
            news: Box::new(news),
        });
        Self { shared, tag: AtomicU64::new(1) }
    }

    /// Starts writing: `options`, then the whole `store`, then all past and future calls of
    /// [`ProcessFeed::changes`]. A committer of changes must know of this feed before it starts.
    /// Then a change is in the store when it is read, or in the queue, or both.
    pub fn begin(&self, options: serde_json::Value, store: Arc<dyn Store>) -> io::Result<()> {
        let to = self.shared.stream.try_clone()?;
        let from = self.shared.stream.try_clone()?;
        let writer = Arc::clone(&self.shared);
        let reader = Arc::clone(&self.shared);
        std::thread::Builder::new().name("feed".into()).spawn(move || {
            if let Err(error) = writer.write_all(to, options, &*store) {
                writer.give_up(error.to_string());
            }
        })?;
        std::thread::Builder::new().name("answers".into()).spawn(move || {
            let reason = match reader.read_all(from) {
                Ok(()) => "the process closed its feed".into(),
                Err(error) => error.to_string(),
            };
            reader.give_up(reason);
            // Only this thread reports it: it may wait, while a committer of a change may not.
            let reason = reader.over.lock().take().unwrap_or_default();
            (reader.news)(FeedNews::Over { reason });
        })?;
        Ok(())
    }

    /// Hands on a committed transaction. Never blocks.
    pub fn changes(&self, changes: Arc<CommittedBatch>) {
        self.push(FeedJob::Changes(changes));
    }

    /// Hands on any other frame. Never blocks.
    pub fn send(&self, frame: FromSupervisor) {
        self.push(FeedJob::Frame(frame));
    }

    /// Hands on a frame and a descriptor with it. Never blocks.
    pub fn pass(&self, frame: FromSupervisor, descriptor: OwnedFd) {
        self.push(FeedJob::Passing(frame, descriptor));
    }

    /// Queries the process. `None` if it did not answer in time, or is gone.
    pub async fn query(&self, question: FeedQuery) -> Option<String> {
        self.query_within(ANSWER_TIMEOUT, question).await
    }

    /// Does the same for a query that takes longer than a look-up.
    pub async fn query_within(&self, patience: Duration, question: FeedQuery) -> Option<String> {
        let tag = self.tag.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        {
            let mut asks = self.shared.asks.lock();
            if asks.len() >= ASKS_MAX {
                return None;
            }
            asks.insert(tag, answer);
        }
        let _forget = ForgetQuery { shared: &self.shared, tag };
        self.send(FromSupervisor::Ask { tag, question });
        tokio::time::timeout(patience, answered).await.ok()?.ok()
    }

    fn push(&self, job: FeedJob) {
        let pushed = self.shared.queue.lock().push(job);
        match pushed {
            PushResult::Taken => {
                self.shared.filled.notify_one();
            }
            PushResult::Full => {
                let reason = format!("it is more than {QUEUE_CHANGES_MAX} changes behind");
                self.shared.give_up(reason);
            }
            PushResult::Closed => {}
        }
    }
}

impl Drop for ProcessFeed {
    fn drop(&mut self) {
        self.shared.close();
    }
}

/// Takes a query back whose caller no longer waits.
struct ForgetQuery<'a> {
    shared: &'a FeedState,
    tag: u64,
}

impl Drop for ForgetQuery<'_> {
    fn drop(&mut self) {
        self.shared.asks.lock().remove(&self.tag);
    }
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum ApplyFrame<'a> {
    Apply(&'a [RecordChange]),
}

impl FeedState {
    fn write_all(&self, mut to: UnixStream, options: serde_json::Value, store: &dyn Store) -> io::Result<()> {
        feed::write(&mut to, &FromSupervisor::Options(options))?;
        let fed = snapshot_frames(store, &mut |frame| to.write_all(frame)).map_err(io::Error::other)?;
        feed::write(&mut to, &FromSupervisor::Commit { revision: fed })?;
        while let Some(job) = self.next() {
            match job {
                // The store was read after the queue was opened, so it had some of these already.
                FeedJob::Changes(job) if job.revision <= fed => {}
                FeedJob::Changes(job) => {
                    for batch in job.changes.chunks(BATCH_MAX) {
                        feed::write(&mut to, &ApplyFrame::Apply(batch))?;
                    }
                    feed::write(&mut to, &FromSupervisor::Commit { revision: job.revision })?;
                }
                FeedJob::Frame(frame) => feed::write(&mut to, &frame)?,
                FeedJob::Passing(frame, descriptor) => write_with(&mut to, &frame, &descriptor)?,
            }
        }
        Ok(())
    }

    /// Returns the next job, or `None` once the feed is closed.
    fn next(&self) -> Option<FeedJob> {
        let mut queue = self.queue.lock();
        loop {
            if queue.closed {
                return None;
            }
            if let Some(job) = queue.pop() {
                return Some(job);
            }
            self.filled.wait(&mut queue);
        }
    }

    fn read_all(&self, from: UnixStream) -> io::Result<()> {
        let mut from = BufReader::new(from);
        while let Some(up) = feed::read(&mut from)? {
            match up {
                ToSupervisor::Ready { revision } => (self.news)(FeedNews::Ready { revision }),
                ToSupervisor::Answer { tag, text } => {
                    if let Some(answer) = self.asks.lock().remove(&tag) {
                        // The caller may have left meanwhile.
                        let _ = answer.send(text);
                    }
                }
                ToSupervisor::Place { tag, site, seen, why, lost, probe_us } => {
                    (self.news)(FeedNews::Place { tag, site, seen, why, lost, probe_us });
                }
                ToSupervisor::Heard { node } => (self.news)(FeedNews::Heard { node }),
                ToSupervisor::Doubt { node } => (self.news)(FeedNews::Doubt { node }),
                ToSupervisor::VouchAsked { tag, id } => (self.news)(FeedNews::VouchAsked { tag, id }),
                ToSupervisor::Vouched { round, id, moved } => {
                    (self.news)(FeedNews::Vouched { round, id, moved })
                }
            }
        }
        Ok(())
    }

    /// Ends both threads.
    fn close(&self) {
        *self.queue.lock() = FeedQueue::closed();
        self.filled.notify_one();
        self.asks.lock().clear();
        // Wakes a thread that is blocked in a write to a process that does not read, or in a read.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn give_up(&self, reason: String) {
        self.over.lock().get_or_insert(reason);
        self.close();
    }
}

/// Writes a frame; the descriptor goes with its first bytes.
fn write_with(to: &mut UnixStream, frame: &FromSupervisor, descriptor: &OwnedFd) -> io::Result<()> {
    let bytes = feed::encode(frame)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor.as_fd()];
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let sent = loop {
        match sendmsg(&*to, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL) {
            Ok(sent) => break sent,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    };
    to.write_all(&bytes[sent..])
}

#[cfg(test)]
mod tests;
