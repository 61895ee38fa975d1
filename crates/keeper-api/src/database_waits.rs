//! The questions that an instance asks databases: how long it waited, and when. The keeper writes
//! them and the edge reads them, without a verb.
//!
//! They are in an unnamed file in memory. The edge gets it for reading only. The file has the
//! totals, and a ring of the last questions. Each question has a check sum: the two ends share no
//! lock, so the edge may read one while it is written. Not here: which waits count (`relay`), their
//! use (`nagaya_edge`).

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{CWD, MemfdFlags, Mode, OFlags};
use rustix::time::{ClockId, clock_gettime};

/// Numbers of the totals.
const TOTALS: usize = 3;

/// Numbers of one question: its own number, its begin, its end, its two halves of a tag, and the
/// check sum.
const WORDS: usize = 6;

const WORD_LEN: usize = size_of::<u64>();
const TOTALS_LEN: usize = TOTALS * WORD_LEN;
const QUESTION_LEN: usize = WORDS * WORD_LEN;

/// Number of questions that are kept. A request that asks more has no split of its time.
pub const QUESTIONS_MAX: u64 = 1024;

/// Tries to read questions while they are written.
const READS_MAX: u32 = 8;

/// Part of each check sum. A file of zeroes has no valid question.
const CHECK: u64 = 0x6e61_6761_7961_6462;

/// Since the instance's present processes began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WaitTotals {
    /// Time with at least one open query, microseconds.
    pub waited_us: u64,
    /// Number of answered queries.
    pub queries: u64,
    /// Number of questions that have begun: queries, and log-ins.
    pub questions: u64,
}

/// One question: from its first byte to the last byte of its answer so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DatabaseQuestion {
    /// Times by `now_us`. 0: it was no question.
    pub begun_us: u64,
    /// `None` while nothing of the answer has come.
    pub ended_us: Option<u64>,
    /// The request that it names in a comment.
    pub request: Option<u128>,
}

/// Returns the time of the clock that both ends share (`CLOCK_MONOTONIC`), microseconds.
pub fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0) / 1_000
}

/// The keeper's end.
#[derive(Debug)]
pub struct DatabaseWaits(File);

impl DatabaseWaits {
    pub fn new() -> io::Result<Self> {
        let file = File::from(rustix::fs::memfd_create("nagaya-database-waits", MemfdFlags::CLOEXEC)?);
        // Only its owner can open it again, and so write it.
        rustix::fs::fchmod(&file, Mode::RUSR)?;
        file.write_all_at(&[0; TOTALS_LEN], 0)?;
        Ok(Self(file))
    }

    pub fn write(&self, totals: WaitTotals) -> io::Result<()> {
        let WaitTotals { waited_us, queries, questions } = totals;
        self.0.write_all_at(&bytes_of::<TOTALS_LEN>(&[waited_us, queries, questions]), 0)
    }

    /// Writes the question of this number, counted from 0, over one that is too old. The totals
    /// count it only after that.
    pub fn write_question(&self, number: u64, question: &DatabaseQuestion) -> io::Result<()> {
        let tag = question.request.unwrap_or(0);
        let words = [
            number,
            question.begun_us,
            question.ended_us.unwrap_or(0),
            // Its halves.
            (tag >> 64) as u64,
            tag as u64,
        ];
        let words = [words[0], words[1], words[2], words[3], words[4], check(&words)];
        self.0.write_all_at(&bytes_of::<QUESTION_LEN>(&words), place(number))
    }

    /// Returns another descriptor of it, for reading.
    pub fn reader(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.0.as_raw_fd());
        Ok(rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }
}

/// The edge's end.
#[derive(Debug)]
pub struct DatabaseWaitsReader(File);

impl DatabaseWaitsReader {
    pub fn new(descriptor: OwnedFd) -> Self {
        Self(descriptor.into())
    }

    /// Returns the totals. `None` if the descriptor is no such file.
    pub fn read(&self) -> Option<WaitTotals> {
        let mut bytes = [0; TOTALS_LEN];
        self.0.read_exact_at(&mut bytes, 0).ok()?;
        let [waited_us, queries, questions] = words_of::<TOTALS>(&bytes);
        Some(WaitTotals { waited_us, queries, questions })
    }

    /// Returns the questions from this number on, up to the one before `end`. `None` if they are
    /// too many, or were overwritten meanwhile.
    pub fn questions(&self, begin: u64, end: u64) -> Option<Vec<DatabaseQuestion>> {
        let count = end.checked_sub(begin)?;
        if count > QUESTIONS_MAX {
            return None;
        }
        (0..READS_MAX).find_map(|_| (begin..end).map(|number| self.question(number)).collect())
    }

    fn question(&self, number: u64) -> Option<DatabaseQuestion> {
        let mut bytes = [0; QUESTION_LEN];
        self.0.read_exact_at(&mut bytes, place(number)).ok()?;
        let words = words_of::<WORDS>(&bytes);
        let [own, begun_us, ended_us, high, low, sum] = words;
        let tag = u128::from(high) << 64 | u128::from(low);
        (own == number && sum == check(&words[..WORDS - 1])).then_some(DatabaseQuestion {
            begun_us,
            ended_us: (ended_us > 0).then_some(ended_us),
            request: (tag > 0).then_some(tag),
        })
    }
}

/// Returns the place of a question in the file.
fn place(number: u64) -> u64 {
    (TOTALS_LEN as u64) + number % QUESTIONS_MAX * (QUESTION_LEN as u64)
}

fn check(words: &[u64]) -> u64 {
    words.iter().fold(CHECK, |sum, word| sum.rotate_left(7) ^ word)
}

fn bytes_of<const LEN: usize>(words: &[u64]) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    for (part, word) in bytes.chunks_exact_mut(WORD_LEN).zip(words) {
        part.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn words_of<const COUNT: usize>(bytes: &[u8]) -> [u64; COUNT] {
    let (parts, _) = bytes.as_chunks::<WORD_LEN>();
    std::array::from_fn(|at| parts.get(at).copied().map_or(0, u64::from_le_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both_ends() -> (DatabaseWaits, DatabaseWaitsReader) {
        let waits = DatabaseWaits::new().unwrap();
        let reader = DatabaseWaitsReader::new(waits.reader().unwrap());
        (waits, reader)
    }

    #[test]
    fn written_totals_are_readable_and_readers_cannot_write() {
        let (waits, reader) = both_ends();
        assert!(rustix::io::write(waits.reader().unwrap(), b"x").is_err());
        assert_eq!(reader.read(), Some(WaitTotals::default()));
        let totals = WaitTotals { waited_us: 1 << 40, queries: 7, questions: 9 };
        waits.write(totals).unwrap();
        assert_eq!(reader.read(), Some(totals));
        let none = DatabaseWaitsReader::new(File::open("/dev/null").unwrap().into());
        assert_eq!((none.read(), none.questions(0, 1)), (None, None));
    }

    #[test]
    fn questions_are_read_until_newer_ones_take_their_place() {
        let (waits, reader) = both_ends();
        assert_eq!(reader.questions(0, 0), Some(Vec::new()));
        assert_eq!(reader.questions(0, 1), None, "it has not begun");
        let question = |number: u64| DatabaseQuestion {
            begun_us: 1_000 + number,
            ended_us: number.is_multiple_of(2).then_some(2_000 + number),
            request: number.is_multiple_of(3).then_some(u128::MAX - u128::from(number)),
        };
        for number in 0..QUESTIONS_MAX + 5 {
            waits.write_question(number, &question(number)).unwrap();
        }
        let all: Vec<_> = (5..QUESTIONS_MAX + 5).map(question).collect();
        assert_eq!(reader.questions(5, QUESTIONS_MAX + 5), Some(all));
        assert_eq!(reader.questions(4, 6), None, "another one has its place");
        assert_eq!(reader.questions(4, QUESTIONS_MAX + 5), None, "too many");
        assert_eq!(reader.questions(6, 5), None);
        waits.write_question(7, &DatabaseQuestion { ended_us: Some(9), ..question(7) }).unwrap();
        assert_eq!(reader.questions(7, 8).unwrap()[0].ended_us, Some(9), "its answer goes on");
    }

    #[test]
    fn a_question_that_is_half_written_is_none() {
        let (waits, reader) = both_ends();
        let question = DatabaseQuestion { begun_us: 5, ended_us: Some(6), request: None };
        waits.write_question(0, &question).unwrap();
        for at in 0..QUESTION_LEN as u64 {
            let mut byte = [0];
            waits.0.read_exact_at(&mut byte, place(0) + at).unwrap();
            waits.0.write_all_at(&[byte[0] ^ 1], place(0) + at).unwrap();
            assert_eq!(reader.questions(0, 1), None, "byte {at}");
            waits.0.write_all_at(&byte, place(0) + at).unwrap();
        }
        assert_eq!(reader.questions(0, 1), Some(vec![question]));
    }
}
