//! A rule file's failure to give a verdict. It has the kind with its error code, the place in the
//! file, and the message.
//!
//! Not here: the reaction to it (`engine`, `ruleset`).

use std::fmt;
use std::sync::Arc;

use nagaya_base::Code;
use serde::{Deserialize, Serialize};

/// One failure of one rule file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{}: {}: {message}", kind.code(), FaultPlace(file, *line))]
pub struct RuleFault {
    pub kind: FaultKind,
    pub file: Arc<str>,
    /// The innermost running line of a rule, from 1; `None` if there is no such line.
    pub line: Option<u32>,
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// The file is missing, too large, or not readable.
    Unreadable,
    /// It does not parse or compile.
    Syntax,
    /// It raised an exception.
    Exception,
    /// One of its decisions was refused; the others were taken.
    Decision,
    /// It ran more instructions than an evaluation may.
    Instructions,
    /// It needed more memory than a VM may.
    Memory,
    /// It used more CPU time than an evaluation may.
    Time,
    /// It takes too much time or memory to compile.
    Compile,
    /// The process that checked it ended without a verdict.
    Check,
    /// The VM itself could not be made.
    Vm,
}

impl FaultKind {
    pub fn code(self) -> Code {
        match self {
            Self::Unreadable => Code(601),
            Self::Syntax => Code(602),
            Self::Exception => Code(603),
            Self::Instructions => Code(604),
            Self::Memory => Code(605),
            Self::Vm => Code(606),
            Self::Time => Code(609),
            Self::Compile => Code(610),
            Self::Check => Code(611),
            Self::Decision => Code(613),
        }
    }

    /// Returns whether the VM that ran the rule can only be dropped.
    pub(crate) fn leaves_vm_unusable(self) -> bool {
        self.is_kill() || self == Self::Vm
    }

    /// Returns whether the evaluation was ended from outside because of its budget.
    pub fn is_kill(self) -> bool {
        matches!(self, Self::Instructions | Self::Memory | Self::Time)
    }
}

struct FaultPlace<'a>(&'a str, Option<u32>);

impl fmt::Display for FaultPlace<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)?;
        self.1.map_or(Ok(()), |line| write!(f, ":{line}"))
    }
}
