//! What can be wrong with a configuration file, and where in it.
//!
//! Not here: finding the mistakes (`read`, `value`).

use std::fmt;
use std::path::PathBuf;

use nagaya_base::Code;
use serde::Serialize;

/// The file cannot be read.
pub const UNREADABLE: Code = Code(101);
/// The file is not TOML.
pub const SYNTAX: Code = Code(102);
/// A key or section that does not exist.
pub const UNKNOWN: Code = Code(103);
/// A value of the wrong type.
pub const WRONG_TYPE: Code = Code(104);
/// A value of the right type that is not acceptable.
pub const INVALID: Code = Code(105);
/// A path at which the needed file or directory is not.
pub const PATH: Code = Code(106);
/// Two settings that contradict each other.
pub const CONFLICT: Code = Code(107);
/// A user or group that this machine does not know.
pub const ACCOUNT: Code = Code(108);

/// Largest configuration file that is read, in bytes. Sites are in the store, so a real one has a few KiB.
pub const FILE_LEN_MAX: u64 = 1 << 20;

/// Most edits between a misspelt word and the one that is suggested for it.
const EDITS_MAX: usize = 3;

/// A mistake without its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub code: Code,
    pub what: String,
    pub hint: String,
}

impl Problem {
    pub fn new(code: Code, what: String, hint: String) -> Self {
        Self { code, what, hint }
    }
}

/// Whether a node starts in spite of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    Error,
    Warning,
}

/// A mistake an operator can find: what, where, what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Mistake {
    pub severity: Severity,
    pub code: String,
    pub file: PathBuf,
    /// From 1; 0 where the file as a whole is meant.
    pub line: usize,
    /// In characters, from 1; 0 where the line as a whole is meant.
    pub column: usize,
    pub what: String,
    pub hint: String,
}

impl Mistake {
    /// `offset`: the byte in `text` where the mistake begins.
    pub fn at(file: &std::path::Path, text: &str, offset: usize, problem: Problem) -> Self {
        let before = text.get(..offset).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        Self {
            severity: Severity::Error,
            code: problem.code.to_string(),
            file: file.into(),
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            what: problem.what,
            hint: problem.hint,
        }
    }

    /// A mistake of the file as a whole.
    pub fn whole(file: &std::path::Path, problem: Problem) -> Self {
        Self {
            severity: Severity::Error,
            code: problem.code.to_string(),
            file: file.into(),
            line: 0,
            column: 0,
            what: problem.what,
            hint: problem.hint,
        }
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        for place in [self.line, self.column] {
            if place > 0 {
                write!(f, ":{place}")?;
            }
        }
        let warning = if self.severity == Severity::Warning { "warning: " } else { "" };
        write!(f, ": {warning}{} [{}]", self.what, self.code)?;
        if !self.hint.is_empty() {
            write!(f, "\n    {}", self.hint)?;
        }
        Ok(())
    }
}

/// The known word that was probably meant.
pub fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known
        .map(|candidate| (strsim::damerau_levenshtein(word, candidate), candidate))
        // A suggestion that shares less than half of its letters with the word is a guess, not a hint.
        .filter(|(edits, candidate)| *edits <= EDITS_MAX && *edits * 2 <= candidate.len())
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, candidate)| candidate)
}
