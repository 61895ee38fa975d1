//! Rules in Ruby: mruby embedded, its budgets, and what a rule can see and decide.
//!
//! An edge thread has one [`Engine`]; all of them share one [`RuleSet`], which follows the rule files on disk. An
//! evaluation reads [`Facts`] and leaves a [`Verdict`]; a rule never acts. Not here: who watches the files and honours the
//! verdict (`edge`), cells (`keeper`), where settings come from (`cmdb`).
//!
//! Start reading at `engine`; `vm` is what one Ruby VM is to Rust, `ffi` and `c/vm.c` the only unsafe part, `api` the
//! classes and methods rules use.

mod api;
mod engine;
mod facts;
mod fault;
mod ffi;
#[doc(hidden)]
pub mod fuzzing;
mod native;
mod regexp;
mod remembered;
mod ruleset;
mod source;
#[cfg(test)]
mod testing;
mod trial;
mod verdict;
mod vm;
mod vocabulary;

use std::path::Path;

use self::source::Source;

/// `docs/rules-compatibility.md`: every method of mod_mruby and ngx_mruby, and whether it is here.
pub use api::compatibility::page as compatibility_page;
pub use engine::Engine;
pub use facts::{Facts, Number, Scalar, Text};
pub use fault::{FaultKind, RuleFault};
pub use ruleset::{Budget, OnError, Phase, RULE_FILES_MAX, RuleFile, RuleSet, RuleState, RuleStatus};
pub use source::SOURCE_LEN_MAX;
pub use trial::{Trial, dry_run};
pub use verdict::{
    Answer, Decided, Full, HeaderAction, HeaderEdit, Lane, LaneRun, Level, Mark, Rewrites, Spoke, Topic,
    Verdict,
};

/// Whether this text can be a rule file, which messages call `file`: it compiles. Nothing of it is run.
pub fn check(text: &[u8], file: &str) -> Result<(), RuleFault> {
    vm::compile(text, &file.into()).map(drop)
}

/// The text of a rule file, for `check`.
pub fn read(path: &Path) -> Result<Box<[u8]>, RuleFault> {
    let message = match source::read(path, &mut None) {
        Source::Text(text) => return Ok(text),
        Source::Unreadable(message) => message,
        // It was never seen before.
        Source::Same => return Ok(Box::default()),
    };
    Err(RuleFault { kind: FaultKind::Unreadable, file: path.to_string_lossy().into(), line: None, message })
}

/// Of the mruby that is built in.
pub const MRUBY_VERSION: &str = env!("NAGAYA_MRUBY_VERSION");
