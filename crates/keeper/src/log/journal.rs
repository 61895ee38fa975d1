//! The log of one application: its last lines in memory, and these and more in files, which outlast
//! the keeper.
//!
//! Not here: the files (`files`), writing them (`writer`), lines in the keeper's own log
//! (`follow`).

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use nagaya_base::units::format_bytes;
use tokio::sync::OnceCell;
use tokio::time::timeout;

use crate::workers::ThreadPool;

use super::files::{DATE_LEN, LogOwner, dated};
use super::meter::{LogMeter, MeterResult, RENEWED_AFTER};
use super::tail::{BYTES_MAX, LINES_MAX, LogTail};
use super::writer::LogWriter;

/// Maximum time that its output waits for the lines written under an earlier keeper.
const RECALL_MAX: Duration = Duration::from_secs(2);

pub struct SiteLog {
    owner: LogOwner,
    writer: LogWriter,
    workers: ThreadPool,
    tail: RefCell<LogTail>,
    meter: RefCell<LogMeter>,
    recalled: OnceCell<()>,
}

impl SiteLog {
    pub fn new(owner: LogOwner, writer: &LogWriter, workers: &ThreadPool) -> Rc<Self> {
        let meter = LogMeter::new(per_while(writer), Instant::now());
        Rc::new(Self {
            owner,
            writer: writer.clone(),
            workers: workers.clone(),
            tail: RefCell::default(),
            meter: RefCell::new(meter),
            recalled: OnceCell::new(),
        })
    }

    /// Reads once the lines that were written under an earlier keeper. Called before any line is
    /// added.
    pub async fn recall(&self) {
        self.recalled
            .get_or_init(|| async {
                let (writer, owner) = (self.writer.clone(), self.owner.clone());
                // With their dates they have more bytes than in memory.
                let bytes_max = (BYTES_MAX + LINES_MAX * DATE_LEN) as u64;
                let Ok(reading) = self.workers.run(move || writer.last(&owner, bytes_max)) else { return };
                match timeout(RECALL_MAX, reading).await {
                    Ok(Ok(Ok(lines))) => {
                        let mut tail = self.tail.borrow_mut();
                        lines.iter().for_each(|line| tail.add(line));
                    }
                    Ok(Ok(Err(error))) => {
                        tracing::warn!(site = %self.owner.site, %error, "its log of before cannot be read");
                    }
                    // They stay in the file, and are not shown.
                    Ok(Err(_)) | Err(_) => {}
                }
            })
            .await;
    }

    /// Returns the last lines, the oldest first.
    pub fn lines(&self) -> Vec<Box<str>> {
        self.tail.borrow().lines()
    }

    pub fn add(&self, line: &str, now: Instant) {
        self.renew(now);
        let paid = self.meter.borrow_mut().pay(line.len() + DATE_LEN);
        match paid {
            MeterResult::Yes => self.put(line),
            MeterResult::NoMore => {
                let (most, seconds) = (format_bytes(per_while(&self.writer) as u64), RENEWED_AFTER.as_secs());
                self.put(&format!("nagaya: more than {most} in {seconds} s; lines are dropped from here on"));
            }
            MeterResult::No => {}
        }
    }

    /// Whether a line would almost certainly be dropped.
    pub fn is_spent(&self, now: Instant) -> bool {
        let meter = self.meter.borrow();
        meter.is_spent() && !meter.is_due(now)
    }

    pub fn drop_lines(&self, lines: u64) {
        self.meter.borrow_mut().drop_lines(lines);
    }

    /// Ends the output for now.
    pub fn end(&self) {
        let dropped = self.meter.borrow_mut().take_dropped();
        self.say_dropped(dropped);
    }

    fn renew(&self, now: Instant) {
        if self.meter.borrow().is_due(now) {
            let dropped = self.meter.borrow_mut().renew(per_while(&self.writer), now);
            self.say_dropped(dropped);
        }
    }

    fn say_dropped(&self, lines: u64) {
        if lines > 0 {
            self.writer.dropped(lines);
            self.put(&format!("nagaya: lines that were dropped here: {lines}"));
        }
    }

    fn put(&self, line: &str) {
        self.tail.borrow_mut().add(line);
        self.writer.add(&self.owner, dated(SystemTime::now(), line).as_bytes());
    }
}

fn per_while(writer: &LogWriter) -> usize {
    usize::try_from(writer.bounds().bytes_per_while()).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use nagaya_records::{SiteName, TenantName};

    use super::*;
    use crate::log::files::{LogBounds, LogFiles};
    use crate::metrics::KeeperMetrics;

    const BOUNDS: LogBounds = LogBounds { bytes_max: 2_000, files_max: 2 };

    fn owner() -> LogOwner {
        LogOwner { tenant: TenantName::new("alice").unwrap(), site: SiteName::new("blog").unwrap() }
    }

    fn journal(dir: &std::path::Path) -> Rc<SiteLog> {
        let writer = LogWriter::over(LogFiles::new(dir.into(), 0), BOUNDS, KeeperMetrics::new()).unwrap();
        SiteLog::new(owner(), &writer, &ThreadPool::start().unwrap())
    }

    fn recall(journal: &SiteLog) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(journal.recall());
    }

    #[test]
    fn the_last_lines_outlast_who_wrote_them() {
        let dir = tempfile::tempdir().unwrap();
        let first = journal(dir.path());
        recall(&first);
        first.add("one", Instant::now());
        first.add("two", Instant::now());
        first.writer.settle(Duration::from_secs(60));
        let second = journal(dir.path());
        recall(&second);
        second.add("three", Instant::now());
        recall(&second);
        assert_eq!(second.lines(), ["one", "two", "three"].map(Into::into));
    }

    #[test]
    fn a_flood_is_cut_and_says_how_much_of_it_is_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let (journal, now) = (journal(dir.path()), Instant::now());
        (0..100).for_each(|number| journal.add(&format!("line {number:03}"), now));
        assert!(journal.is_spent(now) && !journal.is_spent(now + RENEWED_AFTER));
        journal.drop_lines(1_000);
        journal.add("later", now + RENEWED_AFTER);
        // 2,000 bytes hold 58 lines of 34.
        let lines = journal.lines();
        assert_eq!((&*lines[57], lines.len()), ("line 057", 61));
        assert_eq!(&*lines[58], "nagaya: more than 2000B in 60 s; lines are dropped from here on");
        assert_eq!(&*lines[59], "nagaya: lines that were dropped here: 1042");
        assert_eq!(&*lines[60], "later");
        (0..100).for_each(|number| journal.add(&format!("line {number:03}"), now + RENEWED_AFTER));
        journal.end();
        assert!(journal.lines().last().unwrap().ends_with("dropped here: 43"));
        assert!(journal.is_spent(now + RENEWED_AFTER), "a new run is no new budget");
        journal.end();
        assert!(journal.lines().last().unwrap().ends_with("dropped here: 43"));
    }
}
