//! Splits a program's bytes into lines.
//!
//! Not here: which lines are kept (`meter`).

/// Maximum length of a line, in bytes. A longer line is cut into several.
pub const LINE_LEN_MAX: usize = 4096;

#[derive(Debug, Default)]
pub struct LineSplitter {
    /// Part of a line that has no end yet.
    rest: Vec<u8>,
    /// The beginning of this line was skipped.
    is_inside_skipped: bool,
}

impl LineSplitter {
    /// Passes on each line that ends in these bytes. Returns how many were not passed on: one, if
    /// its beginning was skipped.
    pub fn take(&mut self, bytes: &[u8], mut line: impl FnMut(&[u8])) -> u64 {
        let (mut left, mut skipped) = (bytes, 0);
        if self.is_inside_skipped {
            let Some(end) = left.iter().position(|byte| *byte == b'\n') else { return 0 };
            (self.is_inside_skipped, skipped) = (false, 1);
            left = &left[end + 1..];
        }
        while !left.is_empty() {
            let room = LINE_LEN_MAX - self.rest.len();
            let end = left.iter().take(room + 1).position(|byte| *byte == b'\n');
            let taken = end.unwrap_or(room).min(left.len());
            self.rest.extend_from_slice(&left[..taken]);
            left = &left[taken..];
            if end.is_some() {
                left = &left[1..];
            } else if left.is_empty() {
                break;
            }
            line(&self.rest);
            self.rest.clear();
        }
        skipped
    }

    /// Counts lines that are dropped.
    pub fn skip(&mut self, bytes: &[u8]) -> u64 {
        let ends = bytes.iter().filter(|byte| **byte == b'\n').count();
        self.is_inside_skipped =
            !bytes.ends_with(b"\n") && (!bytes.is_empty() || self.is_inside_skipped || !self.rest.is_empty());
        self.rest.clear();
        ends as u64
    }

    /// Ends the output. The last line needs no end.
    pub fn finish(&mut self, mut line: impl FnMut(&[u8])) -> u64 {
        if !self.rest.is_empty() {
            line(&self.rest);
            self.rest.clear();
        }
        u64::from(std::mem::take(&mut self.is_inside_skipped))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(chunks: &[&[u8]]) -> Vec<String> {
        let (mut lines, mut out) = (LineSplitter::default(), Vec::new());
        let mut keep = |line: &[u8]| out.push(String::from_utf8(line.to_vec()).unwrap());
        for chunk in chunks {
            assert_eq!(lines.take(chunk, &mut keep), 0);
        }
        assert_eq!(lines.finish(&mut keep), 0);
        out
    }

    #[test]
    fn lines_are_joined_across_reads_and_the_last_needs_no_end() {
        assert_eq!(cut(&[b"one\ntw", b"o\n\nthree"]), ["one", "two", "", "three"]);
    }

    #[test]
    fn a_long_line_is_cut() {
        let long = vec![b'x'; LINE_LEN_MAX * 2 + 1];
        let lengths = |chunks: &[&[u8]]| cut(chunks).iter().map(String::len).collect::<Vec<_>>();
        assert_eq!(lengths(&[&long]), [LINE_LEN_MAX, LINE_LEN_MAX, 1]);
        // One that is as long as it may be is one.
        assert_eq!(lengths(&[&long[..LINE_LEN_MAX], b"\ny\n"]), [LINE_LEN_MAX, 1]);
        assert_eq!(lengths(&[&long[..LINE_LEN_MAX], b"y\n"]), [LINE_LEN_MAX, 1]);
    }

    #[test]
    fn a_line_of_which_a_part_was_skipped_is_skipped() {
        let (mut lines, mut out) = (LineSplitter::default(), Vec::new());
        let mut take =
            |lines: &mut LineSplitter, bytes: &[u8]| lines.take(bytes, |line| out.push(line.to_vec()));
        assert_eq!(take(&mut lines, b"a\nbeg"), 0);
        assert_eq!(lines.skip(b"in\nc\nd"), 2);
        assert_eq!(lines.skip(b"d"), 0);
        assert_eq!(take(&mut lines, b"d"), 0);
        assert_eq!(take(&mut lines, b"d\ne\n"), 1);
        assert_eq!(lines.skip(b"f"), 0);
        assert_eq!(lines.finish(|_| panic!("it was skipped")), 1);
        assert_eq!(out, [b"a", b"e"]);
    }
}
