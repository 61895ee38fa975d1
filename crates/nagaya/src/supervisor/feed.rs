//! Feeding one process: its settings, every tenant and site, then each change, in order of revision, and
//! taking its answers.
//!
//! Two threads per process, because both the store and the stream block. A process that does not keep up
//! has a bounded queue; beyond it the feed is given up, and the supervisor starts the process anew, which
//! then gets everything from the store. So nobody who commits a change ever waits for a process.
//! Not here: the frames (`cmdb::feed`), the process (`child`).

use std::collections::{HashMap, VecDeque};
use std::io::{self, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nagaya_cmdb::feed::{self, BATCH_MAX, Down, Question, Up};
use nagaya_cmdb::store::{Store, snapshot_frames};
use nagaya_cmdb::{Change, NodeName, SiteName, Why};
use parking_lot::{Condvar, Mutex};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Serialize;
use tokio::sync::oneshot;

/// Changes that may wait for one process. At about 500 bytes each this is 64 MiB, shared by the processes.
pub const QUEUE_CHANGES_MAX: usize = 1 << 17;

/// Other frames that may wait for one process. There is one per signal, reload or question.
pub const QUEUE_FRAMES_MAX: usize = 1024;

/// Questions to one process without an answer yet.
const ASKS_MAX: usize = 64;

/// How long a process has to answer a question.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// What one transaction changed.
#[derive(Debug)]
pub struct Changes {
    pub revision: u64,
    pub changes: Vec<Change>,
}

#[derive(Debug)]
enum Job {
    Changes(Arc<Changes>),
    Frame(Down),
    /// With the descriptor that goes along.
    Passing(Down, OwnedFd),
}

/// What is still to be written. Pure: the threads do the waiting.
#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    changes: usize,
    /// Nothing is taken in or handed out any more.
    closed: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Pushed {
    Taken,
    /// The process is too far behind.
    Full,
    Closed,
}

impl Queue {
    fn push(&mut self, job: Job) -> Pushed {
        if self.closed {
            return Pushed::Closed;
        }
        let changes = if let Job::Changes(job) = &job { job.changes.len() } else { 0 };
        // A single transaction may be larger than the queue: an import's memory is taken already.
        let full = match job {
            Job::Changes(_) => self.changes > 0 && self.changes + changes > QUEUE_CHANGES_MAX,
            Job::Frame(_) | Job::Passing(..) => self.jobs.len() >= QUEUE_FRAMES_MAX + self.changes,
        };
        if full {
            return Pushed::Full;
        }
        self.changes += changes;
        self.jobs.push_back(job);
        Pushed::Taken
    }

    fn pop(&mut self) -> Option<Job> {
        let job = self.jobs.pop_front()?;
        if let Job::Changes(job) = &job {
            self.changes -= job.changes.len();
        }
        Some(job)
    }

    fn closed() -> Self {
        Self { closed: true, ..Self::default() }
    }
}

/// What a feed tells its supervisor.
#[derive(Debug)]
pub enum News {
    /// The process serves, and knows everything up to this revision.
    Ready { revision: u64 },
    /// The edge asks where a site's application is to run.
    Place { tag: u64, site: SiteName, seen: Option<u64>, why: Why, lost: Option<NodeName>, probe_us: u64 },
    /// The edge: this node answers after all.
    Heard { node: NodeName },
    /// The edge: this node's answer to a probe is late.
    Doubt { node: NodeName },
    /// The edge: a member asks this node to vouch for it.
    VouchAsked { tag: u64, id: String },
    /// The edge: a member vouches for this node.
    Vouched { round: u64, id: String, moved: u64 },
    /// Nothing more is fed: the process must be started anew. Also said when it has ended by itself.
    Over { reason: String },
}

/// The supervisor's end of one process's feed.
pub struct Feed {
    shared: Arc<Shared>,
    tag: AtomicU64,
}

struct Shared {
    queue: Mutex<Queue>,
    filled: Condvar,
    stream: UnixStream,
    asks: Mutex<HashMap<u64, oneshot::Sender<String>>>,
    /// The first thing that went wrong; what fails after it follows from it.
    over: Mutex<Option<String>>,
    news: Box<dyn Fn(News) + Send + Sync>,
}

impl Feed {
    /// A feed that takes in changes but writes nothing yet. `news` is called from the feed's own threads and may
    /// block.
    pub fn new(stream: UnixStream, news: impl Fn(News) + Send + Sync + 'static) -> Self {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            filled: Condvar::new(),
            stream,
            asks: Mutex::default(),
            over: Mutex::default(),
            news: Box::new(news),
        });
        Self { shared, tag: AtomicU64::new(1) }
    }

    /// Begins to write: `options`, then all that `store` holds, then what was and will be handed to
    /// [`Feed::changes`]. Whoever commits changes must know of this feed before it begins: then a change is either
    /// in the store when it is read, or in the queue, or both.
    pub fn begin(&self, options: serde_json::Value, store: Arc<dyn Store>) -> io::Result<()> {
        let (to, from) = (self.shared.stream.try_clone()?, self.shared.stream.try_clone()?);
        let (writer, reader) = (Arc::clone(&self.shared), Arc::clone(&self.shared));
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
            // Only this thread says so: it may wait, while whoever commits a change may not.
            let reason = reader.over.lock().take().unwrap_or_default();
            (reader.news)(News::Over { reason });
        })?;
        Ok(())
    }

    /// Hands on a committed transaction. Never blocks.
    pub fn changes(&self, changes: Arc<Changes>) {
        self.push(Job::Changes(changes));
    }

    /// Hands on any other frame. Never blocks.
    pub fn send(&self, frame: Down) {
        self.push(Job::Frame(frame));
    }

    /// Hands on a frame and a descriptor with it. Never blocks.
    pub fn pass(&self, frame: Down, descriptor: OwnedFd) {
        self.push(Job::Passing(frame, descriptor));
    }

    /// Asks the process. None: it did not answer in time, or is gone.
    pub async fn ask(&self, question: Question) -> Option<String> {
        self.ask_within(ANSWER_TIMEOUT, question).await
    }

    /// Asks for what takes longer than to look something up.
    pub async fn ask_within(&self, patience: Duration, question: Question) -> Option<String> {
        let tag = self.tag.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        {
            let mut asks = self.shared.asks.lock();
            if asks.len() >= ASKS_MAX {
                return None;
            }
            asks.insert(tag, answer);
        }
        let _forget = Forget { shared: &self.shared, tag };
        self.send(Down::Ask { tag, question });
        tokio::time::timeout(patience, answered).await.ok()?.ok()
    }

    fn push(&self, job: Job) {
        let pushed = self.shared.queue.lock().push(job);
        match pushed {
            Pushed::Taken => {
                self.shared.filled.notify_one();
            }
            Pushed::Full => {
                let reason = format!("it is more than {QUEUE_CHANGES_MAX} changes behind");
                self.shared.give_up(reason);
            }
            Pushed::Closed => {}
        }
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.shared.close();
    }
}

/// Takes a question back whose asker no longer waits.
struct Forget<'a> {
    shared: &'a Shared,
    tag: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.shared.asks.lock().remove(&self.tag);
    }
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Apply<'a> {
    Apply(&'a [Change]),
}

impl Shared {
    fn write_all(&self, mut to: UnixStream, options: serde_json::Value, store: &dyn Store) -> io::Result<()> {
        feed::write(&mut to, &Down::Options(options))?;
        let fed = snapshot_frames(store, &mut |frame| to.write_all(frame)).map_err(io::Error::other)?;
        feed::write(&mut to, &Down::Commit { revision: fed })?;
        while let Some(job) = self.next() {
            match job {
                // The store was read after the queue was opened, so it held some of these already.
                Job::Changes(job) if job.revision <= fed => {}
                Job::Changes(job) => {
                    for batch in job.changes.chunks(BATCH_MAX) {
                        feed::write(&mut to, &Apply::Apply(batch))?;
                    }
                    feed::write(&mut to, &Down::Commit { revision: job.revision })?;
                }
                Job::Frame(frame) => feed::write(&mut to, &frame)?,
                Job::Passing(frame, descriptor) => write_with(&mut to, &frame, &descriptor)?,
            }
        }
        Ok(())
    }

    /// The next job, or None once the feed is closed.
    fn next(&self) -> Option<Job> {
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
                Up::Ready { revision } => (self.news)(News::Ready { revision }),
                Up::Answer { tag, text } => {
                    if let Some(answer) = self.asks.lock().remove(&tag) {
                        // Whoever asked may have left meanwhile.
                        let _ = answer.send(text);
                    }
                }
                Up::Place { tag, site, seen, why, lost, probe_us } => {
                    (self.news)(News::Place { tag, site, seen, why, lost, probe_us });
                }
                Up::Heard { node } => (self.news)(News::Heard { node }),
                Up::Doubt { node } => (self.news)(News::Doubt { node }),
                Up::VouchAsked { tag, id } => (self.news)(News::VouchAsked { tag, id }),
                Up::Vouched { round, id, moved } => (self.news)(News::Vouched { round, id, moved }),
            }
        }
        Ok(())
    }

    /// Ends both threads.
    fn close(&self) {
        *self.queue.lock() = Queue::closed();
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
fn write_with(to: &mut UnixStream, frame: &Down, descriptor: &OwnedFd) -> io::Result<()> {
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
