//! One conversation with a database, within its bound, and why it has no answer.
//!
//! Not here: what is said (`mysql`, `postgresql`, `redis`).

use std::fmt::Display;
use std::io::{self, Read, Write};

/// Maximum length of one response, with everything before it, bytes.
pub const ANSWER_LEN_MAX: usize = 64 << 10;

/// Maximum length of a database's own words in a message, bytes.
const WORDS_LEN_MAX: usize = 200;

/// Why there is no response.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    #[error("it cannot be reached: {0}")]
    Io(#[from] io::Error),
    #[error("the database says: {0}")]
    Refused(String),
    #[error("{0}")]
    Wrong(&'static str),
}

impl AskError {
    pub fn refused(words: &[u8]) -> Self {
        let words = &words[..words.len().min(WORDS_LEN_MAX)];
        let is_plain = |letter: char| if letter.is_control() { ' ' } else { letter };
        Self::Refused(String::from_utf8_lossy(words).chars().map(is_plain).collect())
    }

    pub fn from_display(error: impl Display) -> Self {
        Self::Io(io::Error::other(error.to_string()))
    }
}

pub const TOO_LONG: AskError =
    AskError::Wrong("the answer is longer than 64 KiB: ask for less, such as a checksum");
pub const CUT: AskError = AskError::Wrong("the database ended the connection in its answer");
pub const WANTS_PASSWORD: AskError =
    AskError::Wrong("the database wants a password: it must know the tenant by its uid (unix_socket, peer)");
pub const NO_ROWS: AskError =
    AskError::Wrong("the question has no answer: ask for rows, with SELECT or SHOW");

/// One conversation, within its limit.
pub struct BoundedExchange<S> {
    stream: S,
    left: usize,
    /// The response, without the rest that was read.
    pub said: Vec<u8>,
}

impl<S: Read + Write> BoundedExchange<S> {
    pub fn new(stream: S) -> Self {
        Self { stream, left: ANSWER_LEN_MAX, said: Vec::new() }
    }

    pub fn read(&mut self, len: usize) -> Result<Vec<u8>, AskError> {
        if len > self.left {
            return Err(TOO_LONG);
        }
        self.left -= len;
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => CUT,
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                AskError::Wrong("the database has not answered in time")
            }
            _ => AskError::Io(error),
        })?;
        Ok(bytes)
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<(), AskError> {
        Ok(self.stream.write_all(bytes)?)
    }
}
