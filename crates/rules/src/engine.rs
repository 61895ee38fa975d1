//! Evaluation of rules on one thread: its VM, what is loaded into it, and what happens when a rule fails.
//!
//! Not here: what a VM is (`vm`), the files (`ruleset`).

use std::marker::PhantomData;
use std::sync::Arc;

use crate::Phase;
use crate::facts::Facts;
use crate::fault::RuleFault;
use crate::ruleset::RuleSet;
use crate::verdict::Verdict;

/// One per thread that serves requests.
pub struct Engine {
    set: Arc<RuleSet>,
    /// A VM belongs to its thread.
    not_send: PhantomData<*mut ()>,
}

impl Engine {
    pub fn new(set: Arc<RuleSet>) -> Self {
        Self { set, not_send: PhantomData }
    }

    /// Runs the files of the phase in order, until one of them answers. An error is one of a file with
    /// `OnError::Refuse`; all others are logged and counted, and leave nothing in the verdict.
    pub fn evaluate(
        &mut self,
        phase: Phase,
        _facts: &dyn Facts,
        _verdict: &mut Verdict,
    ) -> Result<(), RuleFault> {
        if !self.set.has(phase) {
            return Ok(());
        }
        Ok(())
    }
}
