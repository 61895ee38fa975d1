//! The log of one application: its last lines in memory, and the same and more in files, which outlast the keeper.
//!
//! Not here: the files (`files`), who writes them (`writer`), what is in the keeper's own log (`follow`).

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use nagaya_base::units::format_bytes;
use tokio::sync::OnceCell;
use tokio::time::timeout;

use super::files::{DATE_LEN, Owner, dated};
use super::meter::{Meter, Paid, RENEWED_AFTER};
use super::tail::{BYTES_MAX, LINES_MAX, Tail};
use super::writer::Writer;
use crate::workers::Workers;

/// How long its output waits until it is known what was written under an earlier keeper.
const RECALL_MAX: Duration = Duration::from_secs(2);

pub struct Journal {
    owner: Owner,
    writer: Writer,
    workers: Workers,
    tail: RefCell<Tail>,
    meter: RefCell<Meter>,
    recalled: OnceCell<()>,
}

impl Journal {
    pub fn new(owner: Owner, writer: &Writer, workers: &Workers) -> Rc<Self> {
        let meter = Meter::new(per_while(writer), Instant::now());
        Rc::new(Self {
            owner,
            writer: writer.clone(),
            workers: workers.clone(),
            tail: RefCell::default(),
            meter: RefCell::new(meter),
            recalled: OnceCell::new(),
        })
    }

    /// Looks once what was written under an earlier keeper. Before anything is added.
    pub async fn recall(&self) {
        self.recalled
            .get_or_init(|| async {
                let (writer, owner) = (self.writer.clone(), self.owner.clone());
                // With their dates they are more bytes than in memory.
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
                    // They stay where they are, and are not shown.
                    Ok(Err(_)) | Err(_) => {}
                }
            })
            .await;
    }

    /// The last lines, the oldest first.
    pub fn lines(&self) -> Vec<Box<str>> {
        self.tail.borrow().lines()
    }

    pub fn add(&self, line: &str, now: Instant) {
        self.renew(now);
        let paid = self.meter.borrow_mut().pay(line.len() + DATE_LEN);
        match paid {
            Paid::Yes => self.put(line),
            Paid::NoMore => {
                let (most, seconds) = (format_bytes(per_while(&self.writer) as u64), RENEWED_AFTER.as_secs());
                self.put(&format!("nagaya: more than {most} in {seconds} s; lines are dropped from here on"));
            }
            Paid::No => {}
        }
    }

    /// It is as good as certain that a line is dropped.
    pub fn is_spent(&self, now: Instant) -> bool {
        let meter = self.meter.borrow();
        meter.is_spent() && !meter.is_due(now)
    }

    pub fn drop_lines(&self, lines: u64) {
        self.meter.borrow_mut().drop_lines(lines);
    }

    /// Nothing more comes for now.
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

fn per_while(writer: &Writer) -> usize {
    usize::try_from(writer.bounds().bytes_per_while()).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use nagaya_cmdb::{SiteName, TenantName};

    use super::*;
    use crate::log::files::{Bounds, Files};
    use crate::metrics::Metrics;

    const BOUNDS: Bounds = Bounds { bytes_max: 2_000, files_max: 2 };

    fn owner() -> Owner {
        Owner { tenant: TenantName::new("alice").unwrap(), site: SiteName::new("blog").unwrap() }
    }

    fn journal(dir: &std::path::Path) -> Rc<Journal> {
        let writer = Writer::over(Files::new(dir.into(), 0), BOUNDS, Metrics::new()).unwrap();
        Journal::new(owner(), &writer, &Workers::start().unwrap())
    }

    fn recall(journal: &Journal) {
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
