//! The thread that owns the log file.
//!
//! Not here: what a line looks like (`format`), who collects lines (`ThreadLog`).

use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nagaya_base::Code;

use super::{AccessLogError, CODE_CANNOT_OPEN};
use crate::metrics::Metrics;

/// Buffers on their way to the writer. With 64 KiB each, at most 4 MiB of lines wait for a slow disk.
const CHUNKS_WAITING_MAX: usize = 64;

/// When a thread ends or its log is replaced: how long it tries to hand over its last lines, and how often.
const LAST_CHUNK_PATIENCE: Duration = Duration::from_millis(200);
const LAST_CHUNK_STEP: Duration = Duration::from_millis(5);

/// A broken log is reported this often, not once per line.
const COMPLAIN_EVERY_SECONDS: u64 = 60;

const CODE_LINES_LOST: Code = Code(440);

#[derive(Debug, Default)]
pub(super) struct Chunk {
    pub(super) bytes: Vec<u8>,
    pub(super) lines: u64,
}

enum Message {
    Chunk(Chunk),
    /// Look at `Shared::reopen`.
    Wake,
}

#[derive(Debug)]
pub(super) struct Writer {
    /// None only while dropping.
    sender: Option<SyncSender<Message>>,
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    reopen: AtomicBool,
    began: Instant,
    /// Seconds after `began` before which nothing more is reported.
    quiet_until: AtomicU64,
    metrics: Arc<Metrics>,
}

impl Writer {
    pub(super) fn start(path: &Path, metrics: Arc<Metrics>) -> Result<Self, AccessLogError> {
        let shared = Arc::new(Shared {
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
    pub(super) fn offer(&self, chunk: Chunk) -> Result<(), Chunk> {
        let sender = self.sender.as_ref().expect("taken only by drop");
        sender.try_send(Message::Chunk(chunk)).map_err(|refused| match refused {
            TrySendError::Full(Message::Chunk(chunk)) | TrySendError::Disconnected(Message::Chunk(chunk)) => {
                chunk
            }
            TrySendError::Full(Message::Wake) | TrySendError::Disconnected(Message::Wake) => {
                unreachable!("a chunk was offered")
            }
        })
    }

    /// For the end of a thread only: tries again for a short while, and blocks meanwhile.
    pub(super) fn offer_patiently(&self, mut chunk: Chunk) -> Result<(), Chunk> {
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
        // If the queue is full the writer is awake anyway and sees the flag before its next chunk.
        let _ = self.sender.as_ref().expect("taken only by drop").try_send(Message::Wake);
    }

    pub(super) fn complain(&self, why: &dyn Display) {
        self.shared.complain(why);
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Without a sender the writer takes what still waits and ends.
        self.sender = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            self.shared.complain(&"its thread panicked");
        }
    }
}

impl Shared {
    fn complain(&self, why: &dyn Display) {
        let now = self.began.elapsed().as_secs();
        let until = self.quiet_until.load(Ordering::Relaxed);
        let next = now + COMPLAIN_EVERY_SECONDS;
        // Only the thread that moves the time on reports.
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

fn run(shared: &Shared, mut file: File, receiver: &Receiver<Message>) {
    // A write that failed half-way left part of a line; the next line must not continue it.
    let mut torn = false;
    while let Ok(message) = receiver.recv() {
        if let Message::Chunk(chunk) = message {
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

fn append(shared: &Shared, file: &mut File, chunk: &Chunk, torn: &mut bool) {
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

/// Like `write_all`, but says how much was written before an error.
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
