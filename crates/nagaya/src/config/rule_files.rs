//! What is wrong with the rule files that a configuration names, found before a request meets it.
//!
//! Not here: compiling them (`rule_check`), the keys that name them (`schema`).

use std::path::PathBuf;

use nagaya_rules::{FaultKind, RULE_FILES_MAX, RuleFault, RuleFile};

use super::mistake::{Mistake, Severity};
use super::settings::Settings;
use crate::rule_check;

/// Reads every rule file with the rights of the caller, and has it compiled by a process without any. A missing one is a warning: it may come later, and is in
/// force then. A rule of the store was compiled before it was stored; whether it is there is known where the node runs.
pub fn check_rules(settings: &Settings) -> Vec<Mistake> {
    let is_file = |rule: &&RuleFile| settings.stored_rule(rule).is_none();
    let files = settings.edge.rules.iter().take(RULE_FILES_MAX).filter(is_file);
    let broken = files.filter_map(|rule| check_file(rule).err()).map(mistake);
    let missing = settings.edge.rules.iter().filter_map(|rule| missing(settings, rule));
    broken.chain(missing).collect()
}

fn check_file(rule: &RuleFile) -> Result<(), RuleFault> {
    let text = nagaya_rules::read(&rule.path)?;
    rule_check::check(&text, &rule.path.to_string_lossy())
}

/// A rule of the store that the running node has not got.
fn missing(settings: &Settings, rule: &RuleFile) -> Option<Mistake> {
    let is_there = settings.stored_rule(rule)?.try_exists();
    let is_missing = settings.rules_dir().is_dir() && matches!(is_there, Ok(false));
    is_missing.then(|| Mistake {
        severity: Severity::Warning,
        code: FaultKind::Unreadable.code().to_string(),
        file: rule.path.clone(),
        line: 0,
        column: 0,
        what: "the store has no rule of this name".into(),
        hint: "requests meet no rule here until `nagaya rule set NAME FILE` has put it there".into(),
    })
}

fn mistake(fault: RuleFault) -> Mistake {
    let (severity, hint) = match fault.kind {
        FaultKind::Unreadable => {
            (Severity::Warning, "requests meet no rule of this file until it is there and can be read")
        }
        _ => (Severity::Error, "correct the rule; a running node takes the file as soon as it has changed"),
    };
    Mistake {
        severity,
        code: fault.kind.code().to_string(),
        file: PathBuf::from(&*fault.file),
        line: fault.line.map_or(0, |line| usize::try_from(line).unwrap_or(usize::MAX)),
        column: 0,
        what: fault.message,
        hint: hint.into(),
    }
}
