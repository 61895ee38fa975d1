//! Mistakes in a configuration file, and their positions.
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
/// A path without the needed file or directory.
pub const PATH: Code = Code(106);
/// Two settings that contradict each other.
pub const CONFLICT: Code = Code(107);
/// A user or group that this machine does not know.
pub const ACCOUNT: Code = Code(108);

/// Largest configuration file that is read, in bytes. Sites are in the store, so a real one has a
/// few KiB.
pub const FILE_LEN_MAX: u64 = 1 << 20;

/// Most edits between a misspelt word and the one that is suggested for it.
const EDITS_MAX: usize = 3;

/// A mistake without its position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigProblem {
    pub code: Code,
    pub what: String,
    pub hint: String,
}

impl ConfigProblem {
    pub fn new(code: Code, what: String, hint: String) -> Self {
        Self { code, what, hint }
    }
}

/// Whether a node starts in spite of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MistakeSeverity {
    Error,
    Warning,
}

/// A mistake for an operator: what, where, what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ConfigMistake {
    pub severity: MistakeSeverity,
    pub code: String,
    pub file: PathBuf,
    /// From 1; 0 if it concerns the whole file.
    pub line: usize,
    /// In characters, from 1; 0 if it concerns the whole line.
    pub column: usize,
    pub what: String,
    pub hint: String,
}

impl ConfigMistake {
    /// Makes a mistake at `offset`, the byte in `text` where it begins.
    pub fn at(file: &std::path::Path, text: &str, offset: usize, problem: ConfigProblem) -> Self {
        let before = text.get(..offset).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        Self {
            severity: MistakeSeverity::Error,
            code: problem.code.to_string(),
            file: file.into(),
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            what: problem.what,
            hint: problem.hint,
        }
    }

    /// Makes a mistake of the whole file.
    pub fn whole(file: &std::path::Path, problem: ConfigProblem) -> Self {
        Self {
            severity: MistakeSeverity::Error,
            code: problem.code.to_string(),
            file: file.into(),
            line: 0,
            column: 0,
            what: problem.what,
            hint: problem.hint,
        }
    }
}

impl fmt::Display for ConfigMistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        for place in [self.line, self.column] {
            if place > 0 {
                write!(f, ":{place}")?;
            }
        }
        let warning = if self.severity == MistakeSeverity::Warning { "warning: " } else { "" };
        write!(f, ": {warning}{} [{}]", self.what, self.code)?;
        if !self.hint.is_empty() {
            write!(f, "\n    {}", self.hint)?;
        }
        Ok(())
    }
}

/// Returns the known word that was probably meant.
pub fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known
        .map(|candidate| (strsim::damerau_levenshtein(word, candidate), candidate))
        // A suggestion that shares less than half of its letters with the word is a guess, not a
        // hint.
        .filter(|(edits, candidate)| *edits <= EDITS_MAX && *edits * 2 <= candidate.len())
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, candidate)| candidate)
}
