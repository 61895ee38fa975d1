//! The thread that writes applications' logs to their files, so that nothing else ever waits for a
//! disk.
//!
//! Its queue is limited, for each log and for all. Lines without room, or that cannot be written,
//! are missing in the file. Their number is written in their place as soon as the disk accepts
//! lines again. Not here: which lines come here (`journal`).

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Condvar, Mutex};

use crate::fault;
use crate::metrics::{KeeperMetrics, LogLine};

use super::files::{FREE_BYTES_MIN, LogBounds, LogFiles, LogOwner, dated};

/// Maximum number of bytes of one log that wait.
const WAITING_OF_ONE_MAX: usize = 256 << 10;

/// Maximum number of bytes of all logs that wait.
const WAITING_MAX: usize = 16 << 20;

/// Minimum time between two messages that logs cannot be written.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);

/// Maximum number of logs whose missing lines are remembered: that of all sites of a node.
const GAPS_MAX: usize = 100_000;

/// The keeper's end of it.
#[derive(Clone)]
pub struct LogWriter(Arc<WriterShared>);

struct WriterShared {
    files: LogFiles,
    metrics: KeeperMetrics,
    queue: Mutex<WriterQueue>,
    more: Condvar,
    settled: Condvar,
}

struct WriterQueue {
    bounds: LogBounds,
    /// Logs that have something in `waiting`, in the order of their turns.
    line: VecDeque<LogOwner>,
    waiting: HashMap<LogOwner, PendingLines>,
    /// Number of bytes of all waiting lines.
    bytes: usize,
    is_writing: bool,
}

/// Waiting lines of one log.
#[derive(Default)]
struct PendingLines {
    lines: Vec<u8>,
    /// Lines that had no room after these.
    refused: u64,
}

impl LogWriter {
    pub fn start(dir: PathBuf, bounds: LogBounds, metrics: KeeperMetrics) -> io::Result<Self> {
        Self::over(LogFiles::new(dir, FREE_BYTES_MIN), bounds, metrics)
    }

    /// As `start`, over these files.
    pub(super) fn over(files: LogFiles, bounds: LogBounds, metrics: KeeperMetrics) -> io::Result<Self> {
        let queue = WriterQueue {
            bounds,
            line: VecDeque::new(),
            waiting: HashMap::new(),
            bytes: 0,
            is_writing: false,
        };
        let (more, settled) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(WriterShared { files, metrics, queue: Mutex::new(queue), more, settled });
        let theirs = Arc::clone(&shared);
        thread::Builder::new()
            .name("keeper-logs".into())
            .spawn(move || WriterThread::default().run(&theirs))?;
        Ok(Self(shared))
    }

    pub fn bounds(&self) -> LogBounds {
        self.0.queue.lock().bounds
    }

    pub fn set_bounds(&self, bounds: LogBounds) {
        self.0.queue.lock().bounds = bounds;
    }

    /// Queues a line, in its final form. Returns at once.
    pub fn add(&self, owner: &LogOwner, line: &[u8]) {
        if self.0.queue.lock().add(owner, line) {
            self.0.more.notify_one();
        }
    }

    /// Counts lines that the application wrote too fast.
    pub fn dropped(&self, lines: u64) {
        self.0.metrics.log_lines.add([LogLine::Dropped as usize], lines);
    }

    /// Returns the last lines of a log. Blocks.
    pub fn last(&self, owner: &LogOwner, bytes_max: u64) -> io::Result<Vec<String>> {
        self.0.files.last(owner, bytes_max)
    }

    /// Waits until all queued lines are written, at most for `within`. Blocks.
    pub fn settle(&self, within: Duration) {
        let mut queue = self.0.queue.lock();
        self.0.settled.wait_while_for(&mut queue, |queue| queue.is_writing || !queue.line.is_empty(), within);
    }

    /// Removes unwanted logs. Blocks.
    pub fn collect(&self, wanted: impl Fn(&LogOwner) -> bool) -> io::Result<()> {
        let LogBounds { files_max, .. } = self.bounds();
        self.0.files.collect(files_max, wanted)
    }
}

impl WriterQueue {
    /// Returns true if there is something to write.
    fn add(&mut self, owner: &LogOwner, line: &[u8]) -> bool {
        if self.bounds.files_max == 0 {
            return false;
        }
        if !self.waiting.contains_key(owner) {
            self.line.push_back(owner.clone());
        }
        let one = self.waiting.entry(owner.clone()).or_default();
        let has_room =
            self.bytes + line.len() <= WAITING_MAX && one.lines.len() + line.len() <= WAITING_OF_ONE_MAX;
        // A log without room waits for its turn, so that all its missing lines are in one place.
        if has_room && one.refused == 0 {
            one.lines.extend_from_slice(line);
            self.bytes += line.len();
        } else {
            one.refused += 1;
        }
        true
    }

    fn next(&mut self) -> Option<(LogOwner, PendingLines)> {
        let owner = self.line.pop_front()?;
        let waiting = self.waiting.remove(&owner).unwrap_or_default();
        self.bytes -= waiting.lines.len();
        Some((owner, waiting))
    }
}

impl WriterShared {
    fn next(&self) -> (LogOwner, PendingLines, LogBounds) {
        let mut queue = self.queue.lock();
        queue.is_writing = false;
        loop {
            if let Some((owner, waiting)) = queue.next() {
                queue.is_writing = true;
                return (owner, waiting, queue.bounds);
            }
            self.settled.notify_all();
            self.more.wait(&mut queue);
        }
    }
}

/// State of the thread.
#[derive(Default)]
struct WriterThread {
    /// Lines that are missing at the end of each log.
    gaps: HashMap<LogOwner, u64>,
    complained: Option<Instant>,
}

impl WriterThread {
    fn run(mut self, shared: &WriterShared) {
        loop {
            let (owner, waiting, bounds) = shared.next();
            let (written, missing) = self.write(&shared.files, &owner, &waiting, bounds);
            for (what, lines) in [(LogLine::Written, written), (LogLine::Lost, missing)] {
                shared.metrics.log_lines.add([what as usize], lines);
            }
        }
    }

    /// Returns how many lines were written, and how many are missing since.
    fn write(
        &mut self,
        files: &LogFiles,
        owner: &LogOwner,
        waiting: &PendingLines,
        bounds: LogBounds,
    ) -> (u64, u64) {
        let gap = self.gaps.remove(owner).unwrap_or(0);
        let note = match gap {
            0 => String::new(),
            gap => dated(SystemTime::now(), &format!("nagaya: lines that could not be written here: {gap}")),
        };
        let text = [note.as_bytes(), &waiting.lines].concat();
        let (len, result) = files.append(owner, &text, bounds);
        let (there, lost) = (count(&text[note.len().min(len)..len]), count(&text[note.len().max(len)..]));
        let missing = lost + waiting.refused;
        let gap_left = if len < note.len() { gap } else { 0 };
        if gap_left + missing > 0 && self.gaps.len() < GAPS_MAX {
            self.gaps.insert(owner.clone(), gap_left + missing);
        }
        if missing > 0 {
            let slow = || "the disk is slower than they are written".to_owned();
            self.complain(owner, &result.err().map_or_else(slow, |error| error.to_string()));
        }
        (there, missing)
    }

    fn complain(&mut self, owner: &LogOwner, why: &str) {
        if self.complained.is_none_or(|last| last.elapsed() >= COMPLAIN_EVERY) {
            self.complained = Some(Instant::now());
            let (code, site) = (fault::LOG, &owner.site);
            tracing::warn!(%site, "{code}: lines are missing in its log, and may be in others': {why}");
        }
    }
}

fn count(lines: &[u8]) -> u64 {
    lines.iter().filter(|byte| **byte == b'\n').count() as u64
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nagaya_records::{SiteName, TenantName};

    use super::*;

    const BOUNDS: LogBounds = LogBounds { bytes_max: 1 << 20, files_max: 2 };

    fn owner(site: &str) -> LogOwner {
        LogOwner { tenant: TenantName::new("alice").unwrap(), site: SiteName::new(site).unwrap() }
    }

    fn queue() -> WriterQueue {
        let waiting = HashMap::new();
        WriterQueue { bounds: BOUNDS, line: VecDeque::new(), waiting, bytes: 0, is_writing: false }
    }

    #[test]
    fn waiting_lines_are_bounded_and_each_site_has_its_turn() {
        let (mut queue, line) = (queue(), vec![b'x'; WAITING_OF_ONE_MAX / 2]);
        for site in ["a", "b", "a", "a"] {
            assert!(queue.add(&owner(site), &line));
        }
        // It would fit, but after what did not.
        queue.add(&owner("a"), b"");
        let (of, waiting) = queue.next().unwrap();
        assert_eq!((of, waiting.lines.len(), waiting.refused), (owner("a"), WAITING_OF_ONE_MAX, 2));
        let (of, waiting) = queue.next().unwrap();
        assert_eq!((of, waiting.lines.len(), waiting.refused), (owner("b"), line.len(), 0));
        assert!(queue.next().is_none() && queue.bytes == 0);
        for number in 0..=WAITING_MAX / line.len() {
            queue.add(&owner(&number.to_string()), &line);
        }
        assert_eq!(queue.bytes, WAITING_MAX);
        queue.bounds.files_max = 0;
        assert!(!queue.add(&owner("c"), b"x"), "no files are wanted");
    }

    #[test]
    fn lines_come_to_their_files() {
        let dir = tempfile::tempdir().unwrap();
        let files = LogFiles::new(dir.path().join("logs"), 0);
        let writer = LogWriter::over(files, BOUNDS, KeeperMetrics::new()).unwrap();
        for line in ["one", "two"] {
            writer.add(&owner("a"), dated(SystemTime::now(), line).as_bytes());
        }
        writer.add(&owner("b"), b"other\n");
        writer.settle(Duration::from_secs(60));
        assert_eq!(writer.last(&owner("a"), 1_000).unwrap(), ["one", "two"]);
        assert_eq!(writer.last(&owner("b"), 1_000).unwrap(), ["other"]);
        writer.collect(|owner| owner.site.as_str() == "a").unwrap();
        assert_eq!(fs::read_dir(dir.path().join("logs/alice")).unwrap().count(), 1);
        assert_eq!(writer.0.metrics.log_lines.get([LogLine::Written as usize]), 3);
    }

    #[test]
    fn unwritten_lines_are_counted_and_noted_where_they_miss() {
        let dir = tempfile::tempdir().unwrap();
        let (mut writing, full) = (WriterThread::default(), LogFiles::new(dir.path().into(), u64::MAX));
        let wait = |lines: &str, refused| PendingLines { lines: lines.into(), refused };
        let write = |writing: &mut WriterThread, files: &LogFiles, waiting: PendingLines| {
            writing.write(files, &owner("a"), &waiting, BOUNDS)
        };
        assert_eq!(write(&mut writing, &full, wait("1\n2\n", 3)), (0, 5));
        let complained = writing.complained;
        assert!(complained.is_some());
        assert_eq!(write(&mut writing, &full, wait("3\n", 0)), (0, 1), "those of before are counted once");
        assert_eq!(writing.complained, complained, "once a minute");
        let files = LogFiles::new(dir.path().into(), 0);
        assert_eq!(write(&mut writing, &files, wait("4\n", 0)), (1, 0));
        assert_eq!(write(&mut writing, &files, wait("5\n", 0)), (1, 0));
        let said = files.last(&owner("a"), 1_000).unwrap();
        assert_eq!(said, ["nagaya: lines that could not be written here: 6", "4", "5"]);
        assert!(writing.gaps.is_empty());
    }
}
