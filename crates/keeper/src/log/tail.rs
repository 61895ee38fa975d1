//! The last lines of an application, in memory.
//!
//! Not here: those on disk (`files`).

use std::collections::VecDeque;

/// Its maximum: lines, and bytes of all of them.
pub const LINES_MAX: usize = 500;
pub const BYTES_MAX: usize = 64 * 1024;

/// The oldest first.
#[derive(Debug, Default)]
pub struct LogTail {
    lines: VecDeque<Box<str>>,
    bytes: usize,
}

impl LogTail {
    pub fn add(&mut self, line: &str) {
        self.bytes += line.len();
        self.lines.push_back(line.into());
        while self.lines.len() > LINES_MAX || self.bytes > BYTES_MAX {
            let gone = self.lines.pop_front().map_or(0, |line| line.len());
            self.bytes -= gone;
        }
    }

    pub fn lines(&self) -> Vec<Box<str>> {
        self.lines.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_forgets_the_oldest_lines() {
        let mut tail = LogTail::default();
        for number in 0..LINES_MAX + 3 {
            tail.add(&number.to_string());
        }
        let lines = tail.lines();
        assert_eq!((lines.len(), &*lines[0]), (LINES_MAX, "3"));
        tail.add(&"x".repeat(BYTES_MAX - 1));
        assert_eq!(tail.lines().len(), 1, "bytes are bounded too");
        tail.add(&"x".repeat(BYTES_MAX + 1));
        assert_eq!((tail.lines().len(), tail.bytes), (0, 0));
    }
}
