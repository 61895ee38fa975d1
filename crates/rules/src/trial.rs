//! Runs one text on one request as a trial: no rule set, no counters, and no action follows.
//!
//! Not here: evaluation for requests (`engine`), what the request is (`FactSource`).

use std::sync::Arc;

use crate::budget::RuleBudget;
use crate::facts::FactSource;
use crate::fault::{FaultKind, RuleFault};
use crate::ffi::RuleScope;
use crate::phase::RulePhase;
use crate::state::{SharedState, StateRun, WaitAllowance};
use crate::verdict::Verdict;
use crate::vm::{self, CompileFailure, RuleVm};

/// Result of a trial.
#[derive(Debug)]
pub struct RuleTrial {
    pub verdict: Verdict,
    /// Decisions that were refused.
    pub refused: Vec<RuleFault>,
}

/// Compiles and runs a text once, within the budget of an evaluation. Messages call it `file`.
///
/// # Errors
///
/// Fails if it does not compile, raises an exception, or uses up its budget.
pub fn dry_run(
    text: &[u8],
    file: &str,
    phase: RulePhase,
    facts: &dyn FactSource,
    budget: RuleBudget,
) -> Result<RuleTrial, RuleFault> {
    let name: Arc<str> = file.into();
    let code = vm::compile(text, &name)?;
    let mut verdict = Verdict::default();
    let mut run = || -> Result<(), CompileFailure> {
        let mut vm = RuleVm::open(budget)?;
        let loaded = vm.load(&code)?;
        let state = SharedState::default();
        let patience = WaitAllowance::default();
        let shared = StateRun::new(&state, &patience, facts, phase);
        vm.run(loaded, &mut RuleScope { facts, verdict: &mut verdict, phase, shared }, file)
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
    Ok(RuleTrial { verdict, refused })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestRequest;

    fn trial(text: &str) -> Result<RuleTrial, RuleFault> {
        dry_run(
            text.as_bytes(),
            "a.rb",
            RulePhase::AccessChecker,
            &TestRequest::get("/wiki"),
            RuleBudget::default(),
        )
    }

    #[test]
    fn a_dry_run_tells_decisions_and_those_that_were_refused() {
        let RuleTrial { verdict, refused } =
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
