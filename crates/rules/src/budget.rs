//! The budget of one evaluation of a rule.
//!
//! Not here: counting it (`ffi`), the consequence for a file whose evaluation exceeds it
//! (`ruleset`).

use serde::{Deserialize, Serialize};

/// Limits of one evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RuleBudget {
    /// Instructions of the VM.
    pub instructions: u64,
    /// Bytes of a thread's VM, with all its state between evaluations; the rule files themselves
    /// are not counted.
    pub memory: u64,
}

impl Default for RuleBudget {
    fn default() -> Self {
        Self { instructions: 100_000, memory: 16 << 20 }
    }
}
