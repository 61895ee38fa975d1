//! Runs files of phase `Init`: they define things for the files of other phases, and set shared
//! state once.
//!
//! They run when a VM was opened, before any other file, and again in each VM that replaces
//! another. They have no request. Only the first run of each version of a file changes the state of
//! all threads. A new VM must not reset the counters of all. Other threads wait for that run, as
//! they need its results. These files can change the meaning of any word, so no verdict is
//! remembered if there is one.

use std::borrow::Cow;
use std::sync::Arc;

use nagaya_records::cell::{CellName, CgroupController, RequestUsage};

use super::{Engine, LoadedFile};
use crate::api::complain;
use crate::facts::{FactSource, NumberFact, ScalarValue, TextFact};
use crate::fault::RuleFault;
use crate::ffi::RuleScope;
use crate::phase::RulePhase;
use crate::ruleset::{OnError, RuleVersion};
use crate::state::StateRun;
use crate::verdict::Verdict;
use crate::vm::{CompileFailure, RuleVm};

impl Engine {
    pub(super) fn has_init(&self) -> bool {
        self.of(RulePhase::Init).next().is_some()
    }

    /// Returns whether these rules have other files of phase `Init` than the loaded ones.
    pub(super) fn has_other_init(&self, rules: &[Arc<RuleVersion>]) -> bool {
        let new = rules.iter().filter(|rule| rule.file.phase == RulePhase::Init);
        !new.map(Arc::as_ptr).eq(self.of(RulePhase::Init).map(|loaded| Arc::as_ptr(&loaded.rule)))
    }

    /// Returns whether a failure of this file, or of one that it needs, refuses the request.
    pub(super) fn must_refuse(&self, at: usize) -> bool {
        self.init_fault.is_some() || self.loaded[at].rule.file.on_error == OnError::Refuse
    }

    /// Opens a VM and runs the files of phase `Init` in it. A file that is ended leaves no VM: the
    /// others run in a new one.
    pub(super) fn open(
        &mut self,
        facts: &dyn FactSource,
        verdict: &mut Verdict,
    ) -> Result<(), CompileFailure> {
        let mut files: Vec<_> = (0..self.loaded.len()).filter(|at| self.is_init(*at)).collect();
        let mut fault = None;
        'vm: loop {
            self.vm = Some(RuleVm::open(self.budget)?);
            for (place, &at) in files.iter().enumerate() {
                let failed = self.initialise(at, facts, verdict).err();
                if failed.is_some() && self.loaded[at].rule.file.on_error == OnError::Refuse {
                    fault = failed;
                }
                if self.vm.is_none() {
                    files.remove(place);
                    continue 'vm;
                }
            }
            self.init_fault = fault;
            return Ok(());
        }
    }

    fn is_init(&self, at: usize) -> bool {
        self.loaded[at].rule.file.phase == RulePhase::Init
    }

    fn initialise(
        &mut self,
        at: usize,
        facts: &dyn FactSource,
        verdict: &mut Verdict,
    ) -> Result<(), RuleFault> {
        let loaded = &mut self.loaded[at];
        let code = loaded.rule.runnable()?;
        loaded.tally.evaluated();
        let mut first_run = loaded.rule.claim_init();
        let facts = NoRequest(facts);
        let mut own = Verdict::default();
        let outcome =
            LoadedFile::prepare(&mut loaded.program, &mut self.vm, code).and_then(|(vm, program)| {
                let shared = StateRun::new(self.set.state(), &self.patience, &facts, RulePhase::Init);
                let shared = if first_run.is_some() { shared } else { shared.without_changes() };
                let mut scope =
                    RuleScope { facts: &facts, verdict: &mut own, phase: RulePhase::Init, shared };
                vm.run(program, &mut scope, &loaded.name)
            });
        if let (Some(is_initialised), Ok(())) = (&mut first_run, &outcome) {
            **is_initialised = true;
        }
        drop(first_run);
        for (level, line) in own.log.drain(..) {
            verdict.say(level, &line);
        }
        match outcome {
            Ok(()) => {
                loaded.rule.survived();
                if !own.is_silent() || !own.take_refused().is_empty() {
                    let text =
                        format!("{}: a file of phase init has no request, and decides nothing", loaded.name);
                    complain(facts.0, verdict, &text);
                }
                Ok(())
            }
            Err(failed) => Err(self.failed(at, failed)),
        }
    }
}

/// Facts that are known without a request: of the node, and settings.
struct NoRequest<'a>(&'a dyn FactSource);

impl FactSource for NoRequest<'_> {
    fn text(&self, text: TextFact) -> Option<Cow<'_, str>> {
        if text == TextFact::Node { self.0.text(text) } else { None }
    }

    fn number(&self, number: NumberFact) -> Option<i64> {
        // The clock, which times the repetition of complaints.
        if number == NumberFact::ArrivedUs { self.0.number(number) } else { None }
    }

    fn header_in(&self, _: &str) -> Option<Cow<'_, str>> {
        None
    }

    fn each_header_in(&self, _: &mut dyn FnMut(&str, &str)) {}

    fn header_out(&self, _: &str) -> Option<Cow<'_, str>> {
        None
    }

    fn each_header_out(&self, _: &mut dyn FnMut(&str, &str)) {}

    fn setting(&self, key: &str, each: &mut dyn FnMut(Option<&str>, ScalarValue<'_>)) -> bool {
        self.0.setting(key, each)
    }

    fn cell_exists(&self, controller: CgroupController, name: &CellName) -> bool {
        self.0.cell_exists(controller, name)
    }

    fn cell_value(&self, controller: CgroupController, name: &CellName, key: &str) -> Option<String> {
        self.0.cell_value(controller, name, key)
    }

    fn usage(&self) -> Option<RequestUsage> {
        None
    }

    fn elapsed_us(&self) -> u64 {
        0
    }

    fn load(&self) -> [f64; 3] {
        self.0.load()
    }

    fn env(&self, _: &str) -> Option<Cow<'_, str>> {
        None
    }

    fn each_env(&self, _: &mut dyn FnMut(&str, &str)) {}

    fn is_tls(&self) -> bool {
        false
    }

    fn site_rests(&self) -> bool {
        false
    }
}
