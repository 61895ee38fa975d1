//! Rules in Ruby: embedded mruby, its budgets, and the data and decisions of rules.
//!
//! An edge thread has one [`Engine`]. All of them share one [`RuleSet`], which follows the rule
//! files on disk. An evaluation reads [`FactSource`] and leaves a [`Verdict`]; a rule never acts.
//!
//! Not here: watching the files and carrying out the verdict (`edge`), cells (`keeper`), where
//! settings come from (`records`).
//!
//! Start reading at `engine`. `vm` is one Ruby VM as seen from Rust. `ffi` and `c/vm.c` are the
//! only unsafe part. `api` has the classes and methods of rules.

mod api;
mod budget;
mod engine;
mod facts;
mod fault;
mod ffi;
#[doc(hidden)]
pub mod fuzzing;
mod native;
mod phase;
mod regexp;
mod ruleset;
mod source;
mod state;
#[cfg(test)]
mod testing;
mod trial;
mod verdict;
mod verdict_cache;
mod vm;
mod vocabulary;

use std::path::Path;

use self::source::SourceRead;

/// `docs/rules-compatibility.md`: every method of mod_mruby and ngx_mruby, and whether it is here.
pub use api::compatibility::page as compatibility_page;
pub use budget::RuleBudget;
pub use engine::Engine;
pub use facts::{FactSource, NumberFact, ScalarValue, TextFact};
pub use fault::{FaultKind, RuleFault};
pub use phase::RulePhase;
pub use ruleset::{OnError, RULE_FILES_MAX, RuleFile, RuleSet, RuleState, RuleStatus};
pub use source::SOURCE_LEN_MAX;
pub use trial::{RuleTrial, dry_run};
pub use verdict::{
    CheckedAt, DecidedBy, HeaderAction, HeaderEdit, LaneRun, LogLevel, OverLimit, RequestRewrites, RuleLane,
    RuleResponse, TopicSet, Verdict, VerdictTopic,
};

/// Checks that this text compiles as a rule file. Messages call it `file`. Nothing of it is run.
pub fn check(text: &[u8], file: &str) -> Result<(), RuleFault> {
    vm::compile(text, &file.into()).map(drop)
}

/// Reads the text of a rule file, for `check`.
pub fn read(path: &Path) -> Result<Box<[u8]>, RuleFault> {
    let message = match source::read(path, &mut None) {
        SourceRead::Text(text) => return Ok(text),
        SourceRead::Unreadable(message) => message,
        // It was never seen before.
        SourceRead::Same => return Ok(Box::default()),
    };
    Err(RuleFault { kind: FaultKind::Unreadable, file: path.to_string_lossy().into(), line: None, message })
}

/// Version of the built-in mruby.
pub const MRUBY_VERSION: &str = env!("NAGAYA_MRUBY_VERSION");
