//! Stores tickets and their signing keys on a thread of its own, so that promises outlive the
//! process.
//!
//! Serving threads hand over records and wait for them without blocking. Records that arrive
//! while the disk works are stored as one transaction. So a crowd costs no more writes than a few
//! people. A promise is given only after [`TicketStore::keep`] has confirmed that it is stored.
//!
//! Serving goes on after any error of the file. While it cannot be written, `keep` fails and no
//! promises are given. That is logged once, retried, and logged once more when it works again. A
//! damaged file is set aside. If an older edge that drains has the file, the thread waits for it.
//!
//! Not here: the file itself (`file`), the meaning of records (`nagaya_admission`), responses
//! without a promise (`deferral`).

pub mod file;

use std::future::Future;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{io, thread};

use nagaya_admission::{LaneName, Moment, TicketKeyring, TicketRecord};
use nagaya_base::AnchoredClock;
use parking_lot::RwLock;
use tokio::sync::oneshot;

use crate::admission::store::file::{KeyRow, TicketFile, TicketFileError};

/// Maximum number of calls of [`TicketStore::keep`] that wait for the disk.
const QUEUE_MAX: usize = 8_192;

/// Maximum number of records in one transaction, not counting those of its last call.
const BATCH_RECORDS_MAX: usize = 16_384;

/// Intervals of the thread.
#[derive(Debug, Clone, Copy)]
struct StorePacing {
    /// Minimum time from one commit to the next.
    commit_every: Duration,
    /// Time from a failure to the next attempt.
    retry: Duration,
    /// The same while another process has the file, e.g. an edge that drains.
    retry_locked: Duration,
    /// Time for which a locked file is not reported. It is longer than an edge drains.
    locked_quiet: Duration,
    /// Interval for the check of keys and expired records if nothing is stored.
    tend_every: Duration,
}

const PACE: StorePacing = StorePacing {
    commit_every: Duration::from_millis(3),
    retry: Duration::from_secs(1),
    retry_locked: Duration::from_millis(100),
    locked_quiet: Duration::from_secs(90),
    tend_every: Duration::from_secs(600),
};

/// Reason why records were not stored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TicketStoreError {
    #[error("the disk is slower than tickets come: {QUEUE_MAX} writes wait for it")]
    Full,
    #[error("the store of tickets was closed, as this edge ends")]
    Closed,
    #[error("tickets cannot be stored: {0}")]
    Unavailable(Arc<str>),
}

/// Records that were stored before this start, in the order of the slots.
pub type StoredTickets = Vec<(LaneName, TicketRecord)>;

/// The store of tickets. Dropping it stores waiting records, and frees the file.
#[derive(Debug)]
pub struct TicketStore {
    /// `None` once the account is closed.
    sender: RwLock<Option<SyncSender<PendingWrite>>>,
    keys: Arc<RwLock<Option<Arc<TicketKeyring>>>>,
    /// An open file was lost. The new one has none of its records.
    has_lost: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Records to store, and the sender of the result.
#[derive(Debug)]
struct PendingWrite {
    records: Vec<TicketRecord>,
    done: oneshot::Sender<Result<(), TicketStoreError>>,
}

impl TicketStore {
    /// Opens the file in this directory, or creates it. The receiver delivers the stored records,
    /// usually at once. If the file cannot be opened now, it delivers them later, and until then
    /// `keep` fails.
    ///
    /// # Errors
    /// Fails if the thread cannot be started.
    pub fn open(
        directory: OwnedFd,
        anchored_clock: AnchoredClock,
    ) -> io::Result<(Self, oneshot::Receiver<StoredTickets>)> {
        Self::open_at_pace(directory, PACE, anchored_clock)
    }

    fn open_at_pace(
        directory: OwnedFd,
        pace: StorePacing,
        anchored_clock: AnchoredClock,
    ) -> io::Result<(Self, oneshot::Receiver<StoredTickets>)> {
        let (opened, stored) = oneshot::channel();
        let keys = Arc::new(RwLock::new(None));
        let mut keeper = StoreThread::new(directory, pace, Arc::clone(&keys), opened, anchored_clock);
        let has_lost = Arc::clone(&keeper.has_lost);
        // On the caller's thread, so that earlier promises are known before any request is
        // served.
        keeper.open();
        let (sender, receiver) = sync_channel(QUEUE_MAX);
        let thread = thread::Builder::new().name("tickets".into()).spawn(move || keeper.run(&receiver))?;
        Ok((Self { sender: RwLock::new(Some(sender)), keys, has_lost, thread: Some(thread) }, stored))
    }

    /// Stores records, after all earlier ones. Without any, waits for those. Nothing may be
    /// promised before it returns `Ok`.
    pub fn keep(
        &self,
        records: Vec<TicketRecord>,
    ) -> impl Future<Output = Result<(), TicketStoreError>> + Send + use<> {
        let (done, kept) = oneshot::channel();
        let sent = match &*self.sender.read() {
            None => Err(TicketStoreError::Closed),
            Some(sender) => {
                sender.try_send(PendingWrite { records, done }).map_err(|refused| match refused {
                    TrySendError::Full(_) => TicketStoreError::Full,
                    TrySendError::Disconnected(_) => TicketStoreError::Closed,
                })
            }
        };
        async move {
            sent?;
            kept.await.unwrap_or(Err(TicketStoreError::Closed))
        }
    }

    /// Returns the present keys. Ask each time, because there is a new key every month. `None` if
    /// the file has not been opened yet.
    pub fn keys(&self) -> Option<Arc<TicketKeyring>> {
        self.keys.read().clone()
    }

    /// Returns once whether stored records were lost. The caller must store them again.
    pub fn take_lost(&self) -> bool {
        self.has_lost.swap(false, Ordering::AcqRel)
    }

    /// Records that storing them again has failed.
    pub fn still_lost(&self) {
        self.has_lost.store(true, Ordering::Release);
    }

    /// Stores waiting records, then frees the file for the next edge. `keep` fails from now on.
    /// Does not wait.
    pub fn close(&self) {
        *self.sender.write() = None;
    }
}

impl Drop for TicketStore {
    fn drop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported already.
            let _ = thread.join();
        }
    }
}

/// State of the thread.
struct StoreThread {
    directory: OwnedFd,
    pace: StorePacing,
    anchored_clock: AnchoredClock,
    /// `None` while it is not open.
    file: Option<TicketFile>,
    /// The present signing and verifying keys. They are kept here too, for a new file.
    key_rows: Vec<KeyRow>,
    keys: Arc<RwLock<Option<Arc<TicketKeyring>>>>,
    has_lost: Arc<AtomicBool>,
    /// Set until the stored records have been delivered.
    opened: Option<oneshot::Sender<StoredTickets>>,
    trouble: Option<StoreFailure>,
    committed: Instant,
    next_try: Instant,
}

struct StoreFailure {
    text: Arc<str>,
    since: Instant,
    is_said: bool,
}

impl StoreThread {
    fn new(
        directory: OwnedFd,
        pace: StorePacing,
        keys: Arc<RwLock<Option<Arc<TicketKeyring>>>>,
        opened: oneshot::Sender<StoredTickets>,
        anchored_clock: AnchoredClock,
    ) -> Self {
        let now = Instant::now();
        Self {
            directory,
            pace,
            anchored_clock,
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

    fn run(mut self, receiver: &Receiver<PendingWrite>) {
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

    /// Returns this call and those that arrive until the next commit is due.
    fn gather(&self, first: PendingWrite, receiver: &Receiver<PendingWrite>) -> Vec<PendingWrite> {
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

    /// Stores a batch and notifies the waiters. An empty one checks the file.
    fn take(&mut self, batch: Vec<PendingWrite>) {
        if self.file.is_none() && Instant::now() >= self.next_try {
            self.open();
        }
        let now = Moment(self.anchored_clock.now_us());
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
            // A waiter may have stopped waiting.
            let _ = keep.done.send(answer.clone());
        }
    }

    fn open(&mut self) {
        let now = Moment(self.anchored_clock.now_us());
        let directory = self.directory.as_fd();
        let mut opened = guarded(|| TicketFile::open(directory, &mut self.key_rows, now));
        if let Err(TicketFileError::Damaged(detail)) = &opened {
            opened = match file::set_aside(directory, now) {
                Ok(name) => {
                    tracing::error!(
                        code = "NGY0455",
                        detail,
                        name,
                        "the file of tickets is damaged: it was set aside, and a new one begun"
                    );
                    // At the start the content of the lost file is not known.
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

    fn begin(&mut self, file: TicketFile, stored: StoredTickets) {
        self.file = Some(file);
        self.publish(true);
        if self.trouble.take().is_some_and(|trouble| trouble.is_said) {
            tracing::info!("tickets can be stored again");
        }
        if let Some(opened) = self.opened.take() {
            // After the end of the edge there is no receiver.
            let _ = opened.send(stored);
        }
    }

    fn publish(&self, are_new: bool) {
        if are_new {
            *self.keys.write() = file::keys(&self.key_rows).map(Arc::new);
        }
    }

    /// Closes the file. After a failed write the database is useless until it is opened again.
    fn fail(&mut self, error: &TicketFileError) {
        let now = Instant::now();
        self.close_file();
        let is_locked = matches!(error, TicketFileError::Locked);
        self.next_try = now + if is_locked { self.pace.retry_locked } else { self.pace.retry };
        let text = error.to_string().into();
        let trouble =
            self.trouble.get_or_insert(StoreFailure { text: Arc::clone(&text), since: now, is_said: false });
        trouble.text = text;
        let is_normal = is_locked && now < trouble.since + self.pace.locked_quiet;
        if !trouble.is_said && !is_normal {
            trouble.is_said = true;
            tracing::error!(code = "NGY0454", %error, "tickets cannot be stored, so none are given");
        }
    }

    fn unavailable(&self) -> TicketStoreError {
        let text = self.trouble.as_ref().map(|trouble| Arc::clone(&trouble.text));
        TicketStoreError::Unavailable(text.unwrap_or_else(|| "the file has not been opened yet".into()))
    }

    fn close_file(&mut self) {
        let file = self.file.take();
        // Closing writes, too. An error in it appears again, and is reported, at the next
        // opening.
        let _ = guarded(|| {
            drop(file);
            Ok(())
        });
    }
}

/// Runs a database operation. Corrupt pages trigger assertions of the database, which count as
/// its errors.
fn guarded<T>(run: impl FnOnce() -> Result<T, TicketFileError>) -> Result<T, TicketFileError> {
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    caught.unwrap_or_else(|_| Err(TicketFileError::Damaged("its pages do not fit together".into())))
}

#[cfg(test)]
mod tests;
