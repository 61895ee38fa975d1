//! What is wrong with the rule files that a configuration names, found before a request meets it.
//!
//! Not here: compiling them (`nagaya_rules`), the keys that name them (`schema`).

use std::path::PathBuf;

use nagaya_rules::{FaultKind, RuleFault, RuleSet, RuleState};

use super::mistake::{Mistake, Severity};
use super::settings::Settings;

/// Compiles every rule file, with the rights of the caller. A missing one is a warning: it may come later, and is in
/// force then.
pub fn check_rules(settings: &Settings) -> Vec<Mistake> {
    let rules = RuleSet::new(settings.edge.rules.clone(), settings.edge.rule_limits);
    let broken = rules.status().into_iter().filter_map(|status| match status.state {
        RuleState::Broken(fault) => Some(mistake(fault)),
        RuleState::InForce => None,
    });
    broken.collect()
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
