//! Lines that tenants' programs write to their standard error, and applications to their output,
//! too. They go, within limits, to the keeper's log, and lines of applications to a log of their
//! own.
//!
//! Only a program that writes too much is slowed down: its lines are then only counted, and read
//! with pauses. Not here: the destination of the keeper's log, which the binary sets up.

mod files;
mod journal;
pub(crate) mod lines;
mod meter;
mod tail;
mod writer;

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::net::unix::pipe::Receiver;
use tokio::task::yield_now;
use tokio::time::sleep;

use lines::LineSplitter;
use meter::{LogMeter, MeterResult};

pub use files::{LogBounds, LogOwner};
pub use journal::SiteLog;
pub use writer::LogWriter;

/// Number of bytes of one read. They are processed before anything else happens in the keeper: a
/// millisecond at most.
const READ_LEN: usize = 8 * 1024;

/// The same where lines are only counted: the capacity of a pipe.
const READ_LEN_MAX: usize = 64 * 1024;

/// Pause after each of these. So a program that writes as fast as it can costs the keeper less than
/// a hundredth of a CPU.
const DROPPING_PAUSE: Duration = Duration::from_millis(5);

thread_local! {
    /// For all programs: between two reads it is empty.
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; READ_LEN_MAX]);
}

/// Limit of a program's output in the keeper's log.
#[derive(Debug, Clone, Copy)]
pub struct LogBudget {
    /// Bytes, once or per `meter::RENEWED_AFTER`.
    pub bytes_max: usize,
    /// The program is kept, and its budget renewed.
    pub refills: bool,
}

/// Logs all lines until every writer is gone. Output beyond the budget is read and dropped.
pub async fn follow(log: OwnedFd, who: String, budget: LogBudget, journal: Option<Rc<SiteLog>>) {
    let from = match Receiver::from_owned_fd(log) {
        Ok(from) => from,
        Err(error) => {
            tracing::error!(program = who, %error, "its standard error cannot be read");
            return;
        }
    };
    if let Some(journal) = &journal {
        journal.recall().await;
    }
    let mut output = ProgramOutput::new(who, budget, journal);
    while from.readable().await.is_ok() {
        match output.read(&from) {
            Ok(0) => break,
            Ok(_) if output.is_dropping(Instant::now()) => sleep(DROPPING_PAUSE).await,
            // It may have more at once, but others' turn comes first.
            Ok(_) => yield_now().await,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
    }
    output.end(Instant::now());
}

/// The output of one program.
struct ProgramOutput {
    who: String,
    lines: LineSplitter,
    budget: LogBudget,
    meter: LogMeter,
    journal: Option<Rc<SiteLog>>,
}

impl ProgramOutput {
    fn new(who: String, budget: LogBudget, journal: Option<Rc<SiteLog>>) -> Self {
        let meter = LogMeter::new(budget.bytes_max, Instant::now());
        Self { who, lines: LineSplitter::default(), budget, meter, journal }
    }

    fn read(&mut self, from: &Receiver) -> io::Result<usize> {
        BUFFER.with_borrow_mut(|buffer| {
            let now = Instant::now();
            let most = if self.is_dropping(now) { READ_LEN_MAX } else { READ_LEN };
            let len = from.try_read(&mut buffer[..most])?;
            self.take(&buffer[..len], now);
            Ok(len)
        })
    }

    /// Whether the next lines are dropped.
    fn is_dropping(&self, now: Instant) -> bool {
        let is_spent = self.meter.is_spent() && !self.is_renewed(now);
        is_spent && self.journal.as_ref().is_none_or(|journal| journal.is_spent(now))
    }

    fn is_renewed(&self, now: Instant) -> bool {
        self.budget.refills && self.meter.is_due(now)
    }

    fn take(&mut self, bytes: &[u8], now: Instant) {
        if self.is_renewed(now) {
            let suppressed = self.meter.renew(self.budget.bytes_max, now);
            self.say_suppressed(suppressed);
        }
        if self.is_dropping(now) {
            let lines = self.lines.skip(bytes);
            return self.drop_lines(lines);
        }
        let Self { who, lines, meter, journal, .. } = self;
        let skipped = lines.take(bytes, |line| emit(who, &printable(line), meter, journal.as_deref(), now));
        self.drop_lines(skipped);
    }

    fn end(mut self, now: Instant) {
        let Self { who, lines, meter, journal, .. } = &mut self;
        let skipped = lines.finish(|line| emit(who, &printable(line), meter, journal.as_deref(), now));
        self.drop_lines(skipped);
        let suppressed = self.meter.take_dropped();
        self.say_suppressed(suppressed);
        if let Some(journal) = &self.journal {
            journal.end();
        }
    }

    fn drop_lines(&mut self, lines: u64) {
        self.meter.drop_lines(lines);
        if let Some(journal) = &self.journal {
            journal.drop_lines(lines);
        }
    }

    fn say_suppressed(&self, lines: u64) {
        if lines > 0 {
            let who = &self.who;
            tracing::warn!(target: "nagaya::program", program = who, "lines of it that were suppressed: {lines}");
        }
    }
}

fn emit(who: &str, line: &str, meter: &mut LogMeter, journal: Option<&SiteLog>, now: Instant) {
    // An empty line costs a byte, too: a program that writes nothing else is limited as well.
    match meter.pay(line.len() + 1) {
        MeterResult::Yes => tracing::info!(target: "nagaya::program", program = who, "{line}"),
        MeterResult::NoMore => {
            tracing::warn!(
                target: "nagaya::program",
                program = who,
                "it writes too much; further lines are suppressed"
            );
        }
        MeterResult::No => {}
    }
    if let Some(journal) = journal {
        journal.add(line, now);
    }
}

/// Escapes control characters, so that a program cannot fake a line of another, or of nagaya.
fn printable(text: &[u8]) -> String {
    let mut line = String::with_capacity(text.len());
    for c in String::from_utf8_lossy(text).chars() {
        if c.is_control() && c != '\t' {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_cannot_fake_a_line() {
        assert_eq!(printable(b"a\x1b[2Jb\rc\xff"), "a\\u{1b}[2Jb\\rc\u{fffd}");
    }

    #[test]
    fn lines_over_the_budget_are_only_counted_until_renewal() {
        let mut output = ProgramOutput::new("x".into(), LogBudget { bytes_max: 4, refills: true }, None);
        let now = Instant::now();
        output.take(b"a\nb\n", now);
        assert!(!output.is_dropping(now));
        output.take(b"c\n", now);
        assert!(output.is_dropping(now));
        output.take(b"d\ne\nf", now);
        let later = now + meter::RENEWED_AFTER;
        assert!(!output.is_dropping(later));
        // The end of a line that was dropped is none.
        output.take(b"f\ng\n", later);
        assert_eq!((output.meter.take_dropped(), output.is_dropping(later)), (1, false));
        let once = ProgramOutput::new("x".into(), LogBudget { bytes_max: 0, refills: false }, None);
        assert!(!once.is_renewed(later));
    }
}
