//! Writes the access log: one line per request. It runs on a thread of its own, so that no
//! request ever waits for a disk.
//!
//! Each edge thread collects lines in a buffer. It hands the buffer over when it is full, or a
//! second after its first line. If the writer falls behind, or the disk is full, lines are
//! dropped and counted. A log must not stop a server. The file is opened with the edge's own
//! rights.
//!
//! Not here: the format of a line (`format`), the writing thread (`writer`), diagnostics of the
//! node (`tracing`).

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use nagaya_base::Code;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::metrics::EdgeMetrics;
use crate::options::AccessLogFormat;
use crate::record::access_log::format::LineFormatter;
use crate::record::access_log::writer::{AccessLogWriter, LogChunk};
use crate::record::access_record::AccessRecord;

pub mod format;
pub mod writer;

/// Bytes of lines that one edge thread collects before it hands them over. About 300 lines.
const BUFFER_BYTES: usize = 64 << 10;

/// Maximum time of a line in its thread's buffer.
const FLUSH_AFTER: Duration = Duration::from_secs(1);

const CODE_CANNOT_OPEN: Code = Code(441);

#[derive(Debug, thiserror::Error)]
pub enum AccessLogError {
    #[error(
        "{CODE_CANNOT_OPEN}: cannot open access log '{path}': {error}. Its directory must exist and be writable for the edge's user"
    )]
    Open { path: PathBuf, error: std::io::Error },
    #[error("cannot start the thread that writes access log '{path}': {error}")]
    Thread { path: PathBuf, error: std::io::Error },
}

/// The log of one process. Dropping the last reference writes the chunks that were handed over,
/// then ends the writer.
#[derive(Debug)]
pub struct AccessLog {
    writer: AccessLogWriter,
    format: AccessLogFormat,
    metrics: Arc<EdgeMetrics>,
}

impl AccessLog {
    /// Opens or creates the file (mode 0640) for appending.
    pub fn open(
        path: &Path,
        format: AccessLogFormat,
        metrics: Arc<EdgeMetrics>,
    ) -> Result<Arc<Self>, AccessLogError> {
        let writer = AccessLogWriter::start(path, Arc::clone(&metrics))?;
        Ok(Arc::new(Self { writer, format, metrics }))
    }

    /// Closes the file and opens its path again, after it was moved away. Returns at once. Lines
    /// handed over before still go to the old file.
    pub fn reopen(&self) {
        self.writer.reopen();
    }

    /// Returns the calling thread's end of the log. Call it inside a `LocalSet`: a task there
    /// hands lines over in time.
    pub fn for_thread(self: &Arc<Self>, node: &str) -> Rc<ThreadLog> {
        Rc::new_cyclic(|this| {
            let first_line = Rc::new(Notify::new());
            ThreadLog {
                log: Arc::clone(self),
                pending: RefCell::new(PendingChunk {
                    chunk: LogChunk::default(),
                    formatter: LineFormatter::new(self.format, node),
                }),
                flusher: tokio::task::spawn_local(flush_in_time(Weak::clone(this), Rc::clone(&first_line))),
                first_line,
            }
        })
    }
}

/// One edge thread's buffer. Dropping it hands over its lines.
#[derive(Debug)]
pub struct ThreadLog {
    log: Arc<AccessLog>,
    pending: RefCell<PendingChunk>,
    first_line: Rc<Notify>,
    flusher: JoinHandle<()>,
}

#[derive(Debug)]
struct PendingChunk {
    chunk: LogChunk,
    formatter: LineFormatter,
}

impl ThreadLog {
    /// Adds the line of a request that is over. Never blocks.
    pub fn write(&self, record: &AccessRecord) {
        let mut pending = self.pending.borrow_mut();
        let PendingChunk { chunk, formatter } = &mut *pending;
        if chunk.lines == 0 {
            chunk.bytes.reserve(BUFFER_BYTES);
            self.first_line.notify_one();
        }
        formatter.line(record, &mut chunk.bytes);
        chunk.lines += 1;
        // The limit of the head bounds a line. The buffer exceeds its size by at most one line.
        if chunk.bytes.len() >= BUFFER_BYTES {
            let chunk = std::mem::take(chunk);
            self.hand_over(chunk);
        }
    }

    /// Hands over the collected lines at once.
    pub fn flush(&self) {
        let chunk = std::mem::take(&mut self.pending.borrow_mut().chunk);
        self.hand_over(chunk);
    }

    fn hand_over(&self, chunk: LogChunk) {
        if chunk.lines == 0 {
            return;
        }
        if let Err(chunk) = self.log.writer.offer(chunk) {
            self.log.metrics.log_lines_dropped(chunk.lines);
            self.log.writer.complain(&"the disk is slower than the log grows");
        }
    }
}

impl Drop for ThreadLog {
    fn drop(&mut self) {
        self.flusher.abort();
        let chunk = std::mem::take(&mut self.pending.get_mut().chunk);
        if chunk.lines > 0
            && let Err(chunk) = self.log.writer.offer_patiently(chunk)
        {
            self.log.metrics.log_lines_dropped(chunk.lines);
            self.log.writer.complain(&"the disk did not take the last lines in time");
        }
    }
}

async fn flush_in_time(log: Weak<ThreadLog>, first_line: Rc<Notify>) {
    loop {
        first_line.notified().await;
        tokio::time::sleep(FLUSH_AFTER).await;
        let Some(log) = log.upgrade() else { return };
        log.flush();
    }
}

#[cfg(test)]
pub(crate) mod tests;
