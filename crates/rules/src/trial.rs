//! What one text decides about one request: a dry run, with no rule set, no counters, and nothing that anybody carries out.
//!
//! Not here: evaluation for requests (`engine`), what the request is (`Facts`).

use std::sync::Arc;

use crate::facts::Facts;
use crate::fault::{FaultKind, RuleFault};
use crate::ffi::Scope;
use crate::ruleset::{Budget, Phase};
use crate::verdict::Verdict;
use crate::vm::{self, Failed, Vm};

/// What came of it.
#[derive(Debug)]
pub struct Trial {
    pub verdict: Verdict,
    /// Decisions that were refused.
    pub refused: Vec<RuleFault>,
}

/// Compiles and runs a text once, within the budget of an evaluation. Messages call it `file`.
///
/// # Errors
///
/// It does not compile, raises an exception, or uses up its budget.
pub fn dry_run(
    text: &[u8],
    file: &str,
    phase: Phase,
    facts: &dyn Facts,
    budget: Budget,
) -> Result<Trial, RuleFault> {
    let name: Arc<str> = file.into();
    let code = vm::compile(text, &name)?;
    let mut verdict = Verdict::default();
    let mut run = || -> Result<(), Failed> {
        let mut vm = Vm::open(budget)?;
        let loaded = vm.load(&code)?;
        vm.run(loaded, &mut Scope { facts, verdict: &mut verdict, phase }, file)
    };
    run().map_err(|failed| failed.fault(&name))?;
    let refused = verdict.take_refused().into_iter().map(|refused| RuleFault {
        kind: FaultKind::Decision,
        file: Arc::clone(&name),
        line: refused.line,
        message: refused.message,
    });
    let refused = refused.collect();
    verdict.spoken(phase, &name);
    Ok(Trial { verdict, refused })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Asked;

    fn trial(text: &str) -> Result<Trial, RuleFault> {
        dry_run(text.as_bytes(), "a.rb", Phase::AccessChecker, &Asked::get("/wiki"), Budget::default())
    }

    #[test]
    fn a_dry_run_tells_decisions_and_those_that_were_refused() {
        let Trial { verdict, refused } =
            trial("answer 403 if request.path == '/wiki'\nlimit cpu: 'x'").unwrap();
        assert_eq!(verdict.answer.unwrap().status, 403);
        assert_eq!((refused.len(), refused[0].line), (1, Some(2)));
    }

    #[test]
    fn a_dry_run_tells_what_ends_it() {
        for (text, kind) in [
            ("raise 'no'", FaultKind::Exception),
            ("if", FaultKind::Syntax),
            ("loop {}", FaultKind::Instructions),
        ] {
            assert_eq!(trial(text).map(|_| ()).unwrap_err().kind, kind, "{text}");
        }
    }
}
