//! Runs the thread that owns the log file.
//!
//! Not here: the format of a line (`format`), collecting lines (`ThreadLog`).

use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{io, thread};

use nagaya_base::Code;

use crate::metrics::EdgeMetrics;
use crate::record::access_log::{AccessLogError, CODE_CANNOT_OPEN};

/// Maximum number of buffers on their way to the writer. With 64 KiB each, at most 4 MiB of lines
/// wait for a slow disk.
const CHUNKS_WAITING_MAX: usize = 64;

/// Time for which a thread tries to hand over its last lines, when it ends or its log is
/// replaced. `LAST_CHUNK_STEP` is the interval.
const LAST_CHUNK_PATIENCE: Duration = Duration::from_millis(200);
const LAST_CHUNK_STEP: Duration = Duration::from_millis(5);

/// Interval at which a broken log is reported, instead of once per line.
const COMPLAIN_EVERY_SECONDS: u64 = 60;

const CODE_LINES_LOST: Code = Code(440);

#[derive(Debug, Default)]
pub(super) struct LogChunk {
    pub(super) bytes: Vec<u8>,
    pub(super) lines: u64,
}

enum WriterMessage {
    Chunk(LogChunk),
    /// Check `WriterState::reopen`.
    Wake,
}

#[derive(Debug)]
pub(super) struct AccessLogWriter {
    /// `None` only while dropping.
    sender: Option<SyncSender<WriterMessage>>,
    thread: Option<JoinHandle<()>>,
    shared: Arc<WriterState>,
}

#[derive(Debug)]
struct WriterState {
    path: PathBuf,
    reopen: AtomicBool,
    began: Instant,
    /// Seconds after `began` before which nothing more is reported.
    quiet_until: AtomicU64,
    metrics: Arc<EdgeMetrics>,
}

impl AccessLogWriter {
    pub(super) fn start(path: &Path, metrics: Arc<EdgeMetrics>) -> Result<Self, AccessLogError> {
        let shared = Arc::new(WriterState {
            path: path.to_owned(),
            reopen: AtomicBool::new(false),
            began: Instant::now(),
            quiet_until: AtomicU64::new(0),
            metrics,
        });
        let file = open(path).map_err(|error| AccessLogError::Open { path: path.into(), error })?;
        let (sender, receiver) = sync_channel(CHUNKS_WAITING_MAX);
        let state = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("access-log".into())
            .spawn(move || run(&state, file, &receiver))
            .map_err(|error| AccessLogError::Thread { path: path.into(), error })?;
        Ok(Self { sender: Some(sender), thread: Some(thread), shared })
    }

    /// Gives the chunk back if the queue is full.
    pub(super) fn offer(&self, chunk: LogChunk) -> Result<(), LogChunk> {
        let sender = self.sender.as_ref().expect("taken only by drop");
        sender.try_send(WriterMessage::Chunk(chunk)).map_err(|refused| match refused {
            TrySendError::Full(WriterMessage::Chunk(chunk))
            | TrySendError::Disconnected(WriterMessage::Chunk(chunk)) => chunk,
            TrySendError::Full(WriterMessage::Wake) | TrySendError::Disconnected(WriterMessage::Wake) => {
                unreachable!("a chunk was offered")
            }
        })
    }

    /// Only for the end of a thread: retries for a short while, and blocks meanwhile.
    pub(super) fn offer_patiently(&self, mut chunk: LogChunk) -> Result<(), LogChunk> {
        let deadline = Instant::now() + LAST_CHUNK_PATIENCE;
        loop {
            match self.offer(chunk) {
                Ok(()) => return Ok(()),
                Err(refused) if Instant::now() >= deadline => return Err(refused),
                Err(refused) => chunk = refused,
            }
            thread::sleep(LAST_CHUNK_STEP);
        }
    }

    pub(super) fn reopen(&self) {
        self.shared.reopen.store(true, Ordering::Release);
        // If the queue is full, the writer is awake anyway and sees the flag before its next
        // chunk.
        let _ = self.sender.as_ref().expect("taken only by drop").try_send(WriterMessage::Wake);
    }

    pub(super) fn complain(&self, why: &dyn Display) {
        self.shared.complain(why);
    }
}

impl Drop for AccessLogWriter {
    fn drop(&mut self) {
        // Without a sender the writer processes the remaining chunks and ends.
        self.sender = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            self.shared.complain(&"its thread panicked");
        }
    }
}

impl WriterState {
    fn complain(&self, why: &dyn Display) {
        let now = self.began.elapsed().as_secs();
        let until = self.quiet_until.load(Ordering::Relaxed);
        let next = now + COMPLAIN_EVERY_SECONDS;
        // Only the thread that advances the time reports.
        if now >= until
            && self.quiet_until.compare_exchange(until, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            let (_, dropped) = self.metrics.log_lines();
            tracing::error!(
                "{CODE_LINES_LOST}: access log '{}' loses lines, {dropped} so far: {why}",
                self.path.display()
            );
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o640).open(path)
}

fn run(shared: &WriterState, mut file: File, receiver: &Receiver<WriterMessage>) {
    // A write that failed half-way left part of a line. The next line must not continue it.
    let mut torn = false;
    while let Ok(message) = receiver.recv() {
        if let WriterMessage::Chunk(chunk) = message {
            append(shared, &mut file, &chunk, &mut torn);
        }
        if shared.reopen.swap(false, Ordering::AcqRel) {
            match open(&shared.path) {
                Ok(new) => (file, torn) = (new, false),
                Err(error) => tracing::error!(
                    "{CODE_CANNOT_OPEN}: cannot reopen access log '{}': {error}. The file opened before is used on",
                    shared.path.display()
                ),
            }
        }
    }
}

fn append(shared: &WriterState, file: &mut File, chunk: &LogChunk, torn: &mut bool) {
    if *torn {
        match file.write_all(b"\n") {
            Ok(()) => *torn = false,
            Err(error) => {
                shared.metrics.log_lines_dropped(chunk.lines);
                return shared.complain(&error);
            }
        }
    }
    let (written, result) = write_counted(file, &chunk.bytes);
    let lines = match result {
        Ok(()) => chunk.lines,
        Err(_) => memchr::memchr_iter(b'\n', &chunk.bytes[..written]).count() as u64,
    };
    shared.metrics.log_lines_written(lines);
    if let Err(error) = result {
        *torn = written > 0 && chunk.bytes[written - 1] != b'\n';
        shared.metrics.log_lines_dropped(chunk.lines - lines);
        shared.complain(&error);
    }
}

/// Works like `write_all`, but returns the number of bytes written before an error.
fn write_counted(file: &mut File, bytes: &[u8]) -> (usize, io::Result<()>) {
    let mut written = 0;
    while written < bytes.len() {
        match file.write(&bytes[written..]) {
            Ok(0) => return (written, Err(io::ErrorKind::WriteZero.into())),
            Ok(n) => written += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (written, Err(error)),
        }
    }
    (written, Ok(()))
}
