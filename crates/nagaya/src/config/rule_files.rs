//! Checks the rule files that a configuration names, before a request needs them.
//!
//! Not here: compiling them (`rule_check`), the keys that name them (`schema`).

use std::path::PathBuf;

use nagaya_rules::{FaultKind, RULE_FILES_MAX, RuleFault, RuleFile};

use super::mistake::{ConfigMistake, MistakeSeverity};
use super::settings::NodeSettings;
use crate::rule_check;

/// Reads every rule file with the rights of the caller. A process without any rights compiles it. A
/// missing file is a warning: it may come later, and takes effect then. A rule of the store was
/// compiled before it was stored. Only the running node knows whether it exists.
pub fn check_rules(settings: &NodeSettings) -> Vec<ConfigMistake> {
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

/// Returns the warning for a rule of the store that the running node does not have.
fn missing(settings: &NodeSettings, rule: &RuleFile) -> Option<ConfigMistake> {
    let is_there = settings.stored_rule(rule)?.try_exists();
    let is_missing = settings.rules_dir().is_dir() && matches!(is_there, Ok(false));
    is_missing.then(|| ConfigMistake {
        severity: MistakeSeverity::Warning,
        code: FaultKind::Unreadable.code().to_string(),
        file: rule.path.clone(),
        line: 0,
        column: 0,
        what: "the store has no rule of this name".into(),
        hint: "requests meet no rule here until `nagaya rule set NAME FILE` has put it there".into(),
    })
}

fn mistake(fault: RuleFault) -> ConfigMistake {
    let (severity, hint) = match fault.kind {
        FaultKind::Unreadable => {
            (MistakeSeverity::Warning, "requests meet no rule of this file until it is there and can be read")
        }
        _ => (
            MistakeSeverity::Error,
            "correct the rule; a running node takes the file as soon as it has changed",
        ),
    };
    ConfigMistake {
        severity,
        code: fault.kind.code().to_string(),
        file: PathBuf::from(&*fault.file),
        line: fault.line.map_or(0, |line| usize::try_from(line).unwrap_or(usize::MAX)),
        column: 0,
        what: fault.message,
        hint: hint.into(),
    }
}
