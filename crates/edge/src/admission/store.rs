//! Where promises outlive the process: a thread of its own that stores tickets, and the keys they are signed with.
//!
//! Threads that serve hand over records and wait for them without blocking. What has come until the disk is ready is
//! stored as one transaction, so that a crowd costs no more writes than a few people do. A promise is given only after
//! [`Store::keep`] has said that it is stored.
//!
//! Whatever goes wrong with the file, serving goes on. While it cannot be written, `keep` fails and no promises are given;
//! that is said once, tried again, and said once more when it works again. A damaged file is set aside. The file of an edge
//! that still drains is waited for.
//!
//! Not here: the file itself (`file`), what records mean (`nagaya_admission`), what is done without a promise (`turned`).

mod file;

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nagaya_admission::{Keys, LaneName, Moment, Record};
use nagaya_base::Reckoning;
use parking_lot::RwLock;
use tokio::sync::oneshot;

use self::file::{FileError, KeyRow, TicketFile};

/// Calls of [`Store::keep`] that may wait for the disk.
const QUEUE_MAX: usize = 8_192;

/// Records of one transaction, not counting those of its last call.
const BATCH_RECORDS_MAX: usize = 16_384;

/// How patient the thread is.
#[derive(Debug, Clone, Copy)]
struct Pace {
    /// Shortest time from one commit to the next.
    commit_every: Duration,
    /// Time from a failure to the next attempt.
    retry: Duration,
    /// The same while another process has the file, as the edge that drains has.
    retry_locked: Duration,
    /// So long that is no trouble to speak of. Longer than an edge drains.
    locked_quiet: Duration,
    /// How often keys and what has expired are looked after if nothing is stored.
    tend_every: Duration,
}

const PACE: Pace = Pace {
    commit_every: Duration::from_millis(3),
    retry: Duration::from_secs(1),
    retry_locked: Duration::from_millis(100),
    locked_quiet: Duration::from_secs(90),
    tend_every: Duration::from_secs(600),
};

/// Why records were not stored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    #[error("the disk is slower than tickets come: {QUEUE_MAX} writes wait for it")]
    Full,
    #[error("the store of tickets was closed, as this edge ends")]
    Closed,
    #[error("tickets cannot be stored: {0}")]
    Unavailable(Arc<str>),
}

/// What was stored before this start, in the order of the slots.
pub type Stored = Vec<(LaneName, Record)>;

/// The store of tickets. Dropping it stores what waits, and frees the file.
#[derive(Debug)]
pub struct Store {
    /// None: closed.
    sender: RwLock<Option<SyncSender<Keep>>>,
    keys: Arc<RwLock<Option<Arc<Keys>>>>,
    /// A file was lost that had been open, and the new one knows none of what was stored.
    has_lost: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Records on their way, and who waits for them.
#[derive(Debug)]
struct Keep {
    records: Vec<Record>,
    done: oneshot::Sender<Result<(), StoreError>>,
}

impl Store {
    /// Opens the file in this directory, or makes it. What was stored comes by the receiver: at once, usually; if the file cannot
    /// be opened now, as soon as it can, and until then `keep` fails.
    ///
    /// # Errors
    /// If there can be no thread.
    pub fn open(directory: OwnedFd, reckoning: Reckoning) -> io::Result<(Self, oneshot::Receiver<Stored>)> {
        Self::open_at_pace(directory, PACE, reckoning)
    }

    fn open_at_pace(
        directory: OwnedFd,
        pace: Pace,
        reckoning: Reckoning,
    ) -> io::Result<(Self, oneshot::Receiver<Stored>)> {
        let (opened, stored) = oneshot::channel();
        let keys = Arc::new(RwLock::new(None));
        let mut keeper = Keeper::new(directory, pace, Arc::clone(&keys), opened, reckoning);
        let has_lost = Arc::clone(&keeper.has_lost);
        // On the caller's thread, so that nobody is served before what was promised is known.
        keeper.open();
        let (sender, receiver) = sync_channel(QUEUE_MAX);
        let thread = thread::Builder::new().name("tickets".into()).spawn(move || keeper.run(&receiver))?;
        Ok((Self { sender: RwLock::new(Some(sender)), keys, has_lost, thread: Some(thread) }, stored))
    }

    /// Stores records, after all that came before them. With none, waits for those. Nothing may be promised before it says `Ok`.
    pub fn keep(&self, records: Vec<Record>) -> impl Future<Output = Result<(), StoreError>> + Send + use<> {
        let (done, kept) = oneshot::channel();
        let sent = match &*self.sender.read() {
            None => Err(StoreError::Closed),
            Some(sender) => sender.try_send(Keep { records, done }).map_err(|refused| match refused {
                TrySendError::Full(_) => StoreError::Full,
                TrySendError::Disconnected(_) => StoreError::Closed,
            }),
        };
        async move {
            sent?;
            kept.await.unwrap_or(Err(StoreError::Closed))
        }
    }

    /// The keys of now: to be asked for each time, as a new one comes every month. `None`: the file has not been opened yet.
    pub fn keys(&self) -> Option<Arc<Keys>> {
        self.keys.read().clone()
    }

    /// Whether what was stored is lost, and has to be stored again by who knows it. Said once.
    pub fn take_lost(&self) -> bool {
        self.has_lost.swap(false, Ordering::AcqRel)
    }

    /// It was not stored again: it is still to be.
    pub fn still_lost(&self) {
        self.has_lost.store(true, Ordering::Release);
    }

    /// Stores what waits, then frees the file for the edge that comes after this one. `keep` fails from now on. Does not wait.
    pub fn close(&self) {
        *self.sender.write() = None;
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take() {
            // One that panicked has said so, and there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

/// What the thread has.
struct Keeper {
    directory: OwnedFd,
    pace: Pace,
    reckoning: Reckoning,
    /// None: not open now.
    file: Option<TicketFile>,
    /// The keys that sign and verify now, kept here too so that a file that begins anew has them.
    key_rows: Vec<KeyRow>,
    keys: Arc<RwLock<Option<Arc<Keys>>>>,
    has_lost: Arc<AtomicBool>,
    /// Until what was stored has been told.
    opened: Option<oneshot::Sender<Stored>>,
    trouble: Option<Trouble>,
    committed: Instant,
    next_try: Instant,
}

struct Trouble {
    text: Arc<str>,
    since: Instant,
    is_said: bool,
}

impl Keeper {
    fn new(
        directory: OwnedFd,
        pace: Pace,
        keys: Arc<RwLock<Option<Arc<Keys>>>>,
        opened: oneshot::Sender<Stored>,
        reckoning: Reckoning,
    ) -> Self {
        let now = Instant::now();
        Self {
            directory,
            pace,
            reckoning,
            file: None,
            key_rows: Vec::new(),
            keys,
            has_lost: Arc::default(),
            opened: Some(opened),
            trouble: None,
            committed: now,
            next_try: now,
        }
    }

    fn run(mut self, receiver: &Receiver<Keep>) {
        loop {
            let patience = match self.file {
                Some(_) => self.pace.tend_every,
                None => self.next_try.saturating_duration_since(Instant::now()),
            };
            match receiver.recv_timeout(patience) {
                Ok(first) => {
                    let batch = self.gather(first, receiver);
                    self.take(batch);
                }
                Err(RecvTimeoutError::Timeout) => self.take(Vec::new()),
                Err(RecvTimeoutError::Disconnected) => return self.close_file(),
            }
        }
    }

    /// What has come with this one, and comes until the next commit is due.
    fn gather(&self, first: Keep, receiver: &Receiver<Keep>) -> Vec<Keep> {
        let due = self.committed + self.pace.commit_every;
        let mut records = first.records.len();
        let mut batch = vec![first];
        while records < BATCH_RECORDS_MAX {
            match receiver.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Ok(keep) => {
                    records += keep.records.len();
                    batch.push(keep);
                }
                Err(_) => break,
            }
        }
        batch
    }

    /// Stores a batch and tells those who wait. An empty one: looks after the file.
    fn take(&mut self, batch: Vec<Keep>) {
        if self.file.is_none() && Instant::now() >= self.next_try {
            self.open();
        }
        let now = Moment(self.reckoning.now_us());
        let answer = match &mut self.file {
            None => Err(self.unavailable()),
            Some(file) => {
                let records = batch.iter().flat_map(|keep| &keep.records).copied();
                let stored = guarded(|| {
                    file.store(records, now)?;
                    file.tend(&mut self.key_rows, now)
                });
                self.committed = Instant::now();
                match stored {
                    Ok(are_new) => {
                        self.publish(are_new);
                        Ok(())
                    }
                    Err(error) => {
                        self.fail(&error);
                        Err(self.unavailable())
                    }
                }
            }
        };
        for keep in batch {
            // Who does not wait any more need not know.
            let _ = keep.done.send(answer.clone());
        }
    }

    fn open(&mut self) {
        let now = Moment(self.reckoning.now_us());
        let directory = self.directory.as_fd();
        let mut opened = guarded(|| TicketFile::open(directory, &mut self.key_rows, now));
        if let Err(FileError::Damaged(detail)) = &opened {
            opened = match file::set_aside(directory, now) {
                Ok(name) => {
                    tracing::error!(
                        code = "NGY0455",
                        detail,
                        name,
                        "the file of tickets is damaged: it was set aside, and a new one begun"
                    );
                    // At the start nobody knows what was in it.
                    self.has_lost.store(self.opened.is_none(), Ordering::Release);
                    guarded(|| TicketFile::open(directory, &mut self.key_rows, now))
                }
                Err(error) => Err(error.into()),
            };
        }
        match opened {
            Ok((file, stored)) => self.begin(file, stored),
            Err(error) => self.fail(&error),
        }
    }

    fn begin(&mut self, file: TicketFile, stored: Stored) {
        self.file = Some(file);
        self.publish(true);
        if self.trouble.take().is_some_and(|trouble| trouble.is_said) {
            tracing::info!("tickets can be stored again");
        }
        if let Some(opened) = self.opened.take() {
            // Nobody waits for it if the edge has ended.
            let _ = opened.send(stored);
        }
    }

    fn publish(&self, are_new: bool) {
        if are_new {
            *self.keys.write() = file::keys(&self.key_rows).map(Arc::new);
        }
    }

    /// After a failed write the database is of no use until it is opened anew.
    fn fail(&mut self, error: &FileError) {
        let now = Instant::now();
        self.close_file();
        let is_locked = matches!(error, FileError::Locked);
        self.next_try = now + if is_locked { self.pace.retry_locked } else { self.pace.retry };
        let text = error.to_string().into();
        let trouble =
            self.trouble.get_or_insert(Trouble { text: Arc::clone(&text), since: now, is_said: false });
        trouble.text = text;
        let is_normal = is_locked && now < trouble.since + self.pace.locked_quiet;
        if !trouble.is_said && !is_normal {
            trouble.is_said = true;
            tracing::error!(code = "NGY0454", %error, "tickets cannot be stored, so none are given");
        }
    }

    fn unavailable(&self) -> StoreError {
        let text = self.trouble.as_ref().map(|trouble| Arc::clone(&trouble.text));
        StoreError::Unavailable(text.unwrap_or_else(|| "the file has not been opened yet".into()))
    }

    fn close_file(&mut self) {
        let file = self.file.take();
        // Closing writes too, and what that runs into is met again, and told, when it is opened.
        let _ = guarded(|| {
            drop(file);
            Ok(())
        });
    }
}

/// Pages that are not what they were reach assertions of the database, which are as good as its errors.
fn guarded<T>(run: impl FnOnce() -> Result<T, FileError>) -> Result<T, FileError> {
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    caught.unwrap_or_else(|_| Err(FileError::Damaged("its pages do not fit together".into())))
}

#[cfg(test)]
mod tests;
