//! What tenants' programs write to their standard error, as lines in the keeper's log, within bounds.
//!
//! Not here: where the log goes; the binary sets that up.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;

/// Longest line, in bytes; what is longer is cut into several.
const LINE_LEN_MAX: usize = 4096;

/// After this, a program that is kept may write as much again.
const REFILL_AFTER: Duration = Duration::from_secs(60);

/// What a tail holds at most: lines, and bytes of all of them.
const TAIL_LINES_MAX: usize = 500;
const TAIL_BYTES_MAX: usize = 64 * 1024;

/// The last lines of a program, the oldest first. What was not logged is not here either.
#[derive(Debug, Default)]
pub struct Tail(RefCell<TailLines>);

#[derive(Debug, Default)]
struct TailLines {
    lines: VecDeque<Box<str>>,
    bytes: usize,
}

impl Tail {
    pub fn add(&self, line: &str) {
        let mut tail = self.0.borrow_mut();
        tail.bytes += line.len();
        tail.lines.push_back(line.into());
        while tail.lines.len() > TAIL_LINES_MAX || tail.bytes > TAIL_BYTES_MAX {
            let gone = tail.lines.pop_front().map_or(0, |line| line.len());
            tail.bytes -= gone;
        }
    }

    pub fn lines(&self) -> Vec<Box<str>> {
        self.0.borrow().lines.iter().cloned().collect()
    }
}

/// How much of a program's output is logged.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// Bytes, once or per `REFILL_AFTER`.
    pub bytes_max: usize,
    /// The program is kept, and its budget renewed.
    pub refills: bool,
}

/// Logs all lines until every writer is gone. What is beyond the budget is read and dropped, so that the
/// program never waits for its log.
pub async fn follow(log: OwnedFd, who: String, budget: Budget, tail: Option<Rc<Tail>>) {
    let mut from = match Receiver::from_owned_fd(log) {
        Ok(from) => from,
        Err(error) => {
            tracing::error!(program = who, %error, "its standard error cannot be read");
            return;
        }
    };
    let mut lines = Lines::new(budget, Instant::now());
    let mut buffer = vec![0; LINE_LEN_MAX];
    let emit = |line: Line<'_>| emit(&who, line, tail.as_deref());
    while let Ok(len @ 1..) = from.read(&mut buffer).await {
        lines.take(&buffer[..len], Instant::now(), emit);
    }
    lines.finish(emit);
}

fn emit(who: &str, line: Line<'_>, tail: Option<&Tail>) {
    let text = match line {
        Line::Text(text) => {
            let text = printable(text);
            tracing::info!(target: "nagaya::program", program = who, "{text}");
            text
        }
        Line::Suppressed => {
            let text = "it writes too much; further lines are suppressed";
            tracing::warn!(target: "nagaya::program", program = who, "{text}");
            text.to_owned()
        }
    };
    if let Some(tail) = tail {
        tail.add(&text);
    }
}

/// Control characters are escaped: a program must not be able to fake a line of another, or of nagaya.
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

#[derive(Debug, PartialEq, Eq)]
enum Line<'a> {
    Text(&'a [u8]),
    Suppressed,
}

/// Cuts bytes into lines and counts them.
struct Lines {
    budget: Budget,
    left: usize,
    began: Instant,
    suppressed: bool,
    rest: Vec<u8>,
}

impl Lines {
    fn new(budget: Budget, now: Instant) -> Self {
        Self { budget, left: budget.bytes_max, began: now, suppressed: false, rest: Vec::new() }
    }

    fn take(&mut self, bytes: &[u8], now: Instant, mut emit: impl FnMut(Line<'_>)) {
        if self.budget.refills && now.duration_since(self.began) >= REFILL_AFTER {
            (self.began, self.left, self.suppressed) = (now, self.budget.bytes_max, false);
        }
        for &byte in bytes {
            if byte == b'\n' || self.rest.len() == LINE_LEN_MAX {
                self.end_line(&mut emit);
            }
            if byte != b'\n' {
                self.rest.push(byte);
            }
        }
    }

    fn finish(mut self, mut emit: impl FnMut(Line<'_>)) {
        if !self.rest.is_empty() {
            self.end_line(&mut emit);
        }
    }

    fn end_line(&mut self, emit: &mut impl FnMut(Line<'_>)) {
        // An empty line costs a byte too: a program that writes nothing else is bounded as well.
        let cost = self.rest.len() + 1;
        if cost <= self.left && !self.suppressed {
            self.left -= cost;
            emit(Line::Text(&self.rest));
        } else if !self.suppressed {
            self.suppressed = true;
            emit(Line::Suppressed);
        }
        self.rest.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(budget: usize, chunks: &[&[u8]]) -> Vec<String> {
        let mut out = Vec::new();
        let now = Instant::now();
        let mut emit = |line: Line<'_>| match line {
            Line::Text(text) => out.push(printable(text)),
            Line::Suppressed => out.push("SUPPRESSED".into()),
        };
        let mut lines = Lines::new(Budget { bytes_max: budget, refills: false }, now);
        for chunk in chunks {
            lines.take(chunk, now, &mut emit);
        }
        lines.finish(&mut emit);
        out
    }

    #[test]
    fn lines_are_joined_across_reads_and_the_last_needs_no_end() {
        assert_eq!(lines(100, &[b"one\ntw", b"o\n\nthree"]), ["one", "two", "", "three"]);
    }

    #[test]
    fn a_long_line_is_cut() {
        let long = vec![b'x'; LINE_LEN_MAX * 2 + 1];
        let cut: Vec<usize> = lines(1 << 20, &[&long]).iter().map(String::len).collect();
        assert_eq!(cut, [LINE_LEN_MAX, LINE_LEN_MAX, 1]);
    }

    #[test]
    fn beyond_the_budget_it_says_so_once() {
        assert_eq!(lines(8, &[b"1234\n5678\n9\n\n"]), ["1234", "SUPPRESSED"]);
        assert_eq!(lines(3, &[b"\n\n\n\n\n"]), ["", "", "", "SUPPRESSED"]);
    }

    #[test]
    fn a_kept_program_may_write_again_after_a_while() {
        let now = Instant::now();
        let mut out = 0;
        let mut lines = Lines::new(Budget { bytes_max: 2, refills: true }, now);
        lines.take(b"a\nb\nc\n", now, |_| out += 1);
        assert_eq!(out, 2);
        lines.take(b"d\n", now + REFILL_AFTER, |_| out += 1);
        assert_eq!(out, 3);
    }

    #[test]
    fn a_tail_forgets_the_oldest_lines() {
        let tail = Tail::default();
        for number in 0..TAIL_LINES_MAX + 3 {
            tail.add(&number.to_string());
        }
        let lines = tail.lines();
        assert_eq!((lines.len(), &*lines[0]), (TAIL_LINES_MAX, "3"));
        tail.add(&"x".repeat(TAIL_BYTES_MAX - 1));
        assert_eq!(tail.lines().len(), 1, "bytes are bounded too");
        tail.add(&"x".repeat(TAIL_BYTES_MAX + 1));
        assert_eq!((tail.lines().len(), tail.0.borrow().bytes), (0, 0));
    }

    #[test]
    fn control_characters_cannot_fake_a_line() {
        assert_eq!(printable(b"a\x1b[2Jb\rc\xff"), "a\\u{1b}[2Jb\\rc\u{fffd}");
    }
}
