//! Evaluates rules on one thread: its VM, the loaded programs, and the handling of failures.
//!
//! Files of phase `Init` run once in each VM, before anything else does (`init`).
//!
//! Not here: what a VM is (`vm`), the files and their logging (`ruleset`), runs that can be spared
//! (`verdict_cache`).

mod init;

use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

use crate::api::complain;
use crate::budget::RuleBudget;
use crate::facts::FactSource;
use crate::fault::{FaultKind, RuleFault};
use crate::ffi::{Bytecode, RuleScope};
use crate::phase::RulePhase;
use crate::ruleset::{EngineCounts, OnError, RuleSet, RuleVersion};
use crate::state::{StateRun, WaitAllowance};
use crate::verdict::{RefusedDecision, Verdict};
use crate::verdict_cache::{NotedFacts, VerdictCache};
use crate::vm::{self, CompileFailure, RuleVm};

/// The rule engine of one thread that serves requests.
pub struct Engine {
    set: Arc<RuleSet>,
    /// Generation of the rules in `loaded`.
    generation: u64,
    budget: RuleBudget,
    loaded: Vec<LoadedFile>,
    /// Opened when the first rule runs, and again after one was dropped.
    vm: Option<RuleVm>,
    /// Failure in this VM of a file of phase `Init` without which no request may continue.
    init_fault: Option<RuleFault>,
    /// Time that this thread may still wait for locks.
    patience: WaitAllowance,
    /// Earlier verdicts of the files of each phase.
    remembered: [VerdictCache; RulePhase::ALL.len()],
    /// Verdict of a request for which no rule has decided anything.
    blank: Rc<Verdict>,
    /// A VM belongs to its thread.
    not_send: PhantomData<*mut ()>,
}

/// How much of a file's evaluation holds.
enum FileOutcome {
    Whole,
    /// Some decisions were refused.
    InPart,
}

/// One rule file on this thread.
struct LoadedFile {
    rule: Arc<RuleVersion>,
    /// The file's name, of this thread alone: each verdict holds it, and threads would contend for
    /// one counter.
    name: Arc<str>,
    tally: Arc<EngineCounts>,
    /// Program in the VM that is open now.
    program: Option<vm::VmFile>,
}

impl Engine {
    /// Creates an engine. It costs nothing until a rule runs.
    pub fn new(set: Arc<RuleSet>) -> Self {
        let budget = RuleBudget::default();
        let blank = Rc::default();
        let remembered = std::array::from_fn(|_| VerdictCache::new(&blank));
        Self {
            set,
            generation: 0,
            budget,
            loaded: Vec::new(),
            vm: None,
            init_fault: None,
            patience: WaitAllowance::default(),
            remembered,
            blank,
            not_send: PhantomData,
        }
    }

    /// Returns the verdict with which each request begins.
    pub fn blank(&self) -> Rc<Verdict> {
        Rc::clone(&self.blank)
    }

    /// Looks up the verdict of the phase's files for these facts, if it is remembered. The verdict
    /// is then shared with other requests. Returns false if `evaluate` must find it.
    pub fn recall(&mut self, phase: RulePhase, facts: &dyn FactSource, verdict: &mut Rc<Verdict>) -> bool {
        if !self.set.has(phase) {
            return true;
        }
        if self.set.generation() != self.generation || !Rc::ptr_eq(verdict, &self.blank) {
            return false;
        }
        let Some((found, files)) = self.remembered[phase as usize].find(facts) else { return false };
        for loaded in self.of(phase).take(files) {
            loaded.tally.evaluated();
            loaded.rule.survived();
        }
        *verdict = found;
        true
    }

    /// Runs the files of the phase in order until one of them answers. An error is from a file with
    /// `OnError::Refuse`. All other errors are logged and counted, and leave nothing in the
    /// verdict. The verdict may be remembered.
    pub fn evaluate(
        &mut self,
        phase: RulePhase,
        facts: &dyn FactSource,
        verdict: &mut Rc<Verdict>,
    ) -> Result<(), RuleFault> {
        if !self.set.has(phase) {
            return Ok(());
        }
        if self.set.generation() != self.generation {
            self.take_over();
        }
        // Later files also see decisions of earlier files, and those are not facts.
        if !Rc::ptr_eq(verdict, &self.blank) {
            return self.run(phase, facts, Rc::make_mut(verdict)).map(drop);
        }
        let may_repeat = |loaded: &LoadedFile| loaded.program.is_none_or(|program| program.repeats);
        if self.has_init() || !self.of(phase).all(may_repeat) || !self.remembered[phase as usize].wants() {
            return self.run(phase, facts, Rc::make_mut(verdict)).map(drop);
        }
        let noted = NotedFacts::new(facts);
        let ran = self.run(phase, &noted, Rc::make_mut(verdict))?;
        let repeats = |loaded: &LoadedFile| loaded.program.is_some_and(|program| program.repeats);
        if let Some(files) = ran
            && verdict.log.is_empty()
            && self.of(phase).take(files).all(repeats)
        {
            noted.into_memory(&mut self.remembered[phase as usize], verdict, files);
        }
        Ok(())
    }

    fn of(&self, phase: RulePhase) -> impl Iterator<Item = &LoadedFile> {
        self.loaded.iter().filter(move |loaded| loaded.rule.file.phase == phase)
    }

    /// Runs the files of the phase. Returns how many ran until one answered; `None` if one of them
    /// failed.
    fn run(
        &mut self,
        phase: RulePhase,
        facts: &dyn FactSource,
        verdict: &mut Verdict,
    ) -> Result<Option<usize>, RuleFault> {
        let had_answer = verdict.answer.is_some();
        let mut files = 0;
        let mut failed = false;
        for at in 0..self.loaded.len() {
            if self.loaded[at].rule.file.phase != phase {
                continue;
            }
            files += 1;
            match self.evaluate_one(at, facts, verdict) {
                Ok(FileOutcome::Whole) => {}
                Ok(FileOutcome::InPart) => failed = true,
                Err(fault) if self.must_refuse(at) => return Err(fault),
                Err(_) => failed = true,
            }
            if verdict.answer.is_some() && !had_answer {
                break;
            }
        }
        Ok((!failed).then_some(files))
    }

    fn evaluate_one(
        &mut self,
        at: usize,
        facts: &dyn FactSource,
        verdict: &mut Verdict,
    ) -> Result<FileOutcome, RuleFault> {
        self.loaded[at].rule.runnable()?;
        let opened = if self.vm.is_none() { self.open(facts, verdict) } else { Ok(()) };
        if let Some(fault) = &self.init_fault {
            return Err(fault.clone());
        }
        let loaded = &mut self.loaded[at];
        let code = loaded.rule.runnable()?;
        loaded.tally.evaluated();
        let phase = loaded.rule.file.phase;
        let checkpoint = verdict.checkpoint();
        let outcome = opened
            .and_then(|()| LoadedFile::prepare(&mut loaded.program, &mut self.vm, code))
            .and_then(|(vm, program)| {
                let shared = StateRun::new(self.set.state(), &self.patience, facts, phase);
                vm.run(program, &mut RuleScope { facts, verdict, phase, shared }, &loaded.name)
            });
        let outcome = match outcome {
            Ok(()) => {
                loaded.rule.survived();
                match verdict.take_refused() {
                    refused if refused.is_empty() => {
                        verdict.spoken(phase, &loaded.name);
                        Ok(FileOutcome::Whole)
                    }
                    refused => loaded.settle(refused, facts, verdict, checkpoint),
                }
            }
            Err(failed) => {
                verdict.roll_back(checkpoint);
                Err(self.failed(at, failed))
            }
        };
        if self.vm.as_mut().is_some_and(RuleVm::is_worn) {
            self.drop_vm();
        }
        outcome
    }

    fn failed(&mut self, at: usize, failed: CompileFailure) -> RuleFault {
        if failed.kind.leaves_vm_unusable() {
            self.drop_vm();
        }
        let LoadedFile { rule, tally, .. } = &self.loaded[at];
        let fault = failed.fault(&rule.name);
        rule.failed(tally, &fault);
        fault
    }

    /// Takes over the present rules. Unchanged files keep their program.
    fn take_over(&mut self) {
        let rules = self.set.current();
        if self.budget != rules.budget {
            self.budget = rules.budget;
            self.drop_vm();
        }
        self.remembered = std::array::from_fn(|_| VerdictCache::new(&self.blank));
        if self.has_other_init(&rules.rules) {
            // Classes and constants of the former version are in the VM.
            self.drop_vm();
        }
        let mut had = std::mem::take(&mut self.loaded);
        for rule in &rules.rules {
            let same = had.iter().position(|loaded| Arc::ptr_eq(&loaded.rule, rule));
            self.loaded.push(match same {
                Some(at) => had.swap_remove(at),
                None => LoadedFile::new(rule, &had),
            });
        }
        if let Some(vm) = &mut self.vm {
            had.iter().filter_map(|loaded| loaded.program).for_each(|program| vm.unload(program));
        }
        self.generation = rules.generation;
    }

    fn drop_vm(&mut self) {
        self.vm = None;
        self.init_fault = None;
        for loaded in &mut self.loaded {
            loaded.program = None;
        }
    }
}

impl LoadedFile {
    /// Handles a file some of whose decisions were refused. That is reported, and the others hold,
    /// unless none may be missing.
    fn settle(
        &self,
        refused: Vec<RefusedDecision>,
        facts: &dyn FactSource,
        verdict: &mut Verdict,
        checkpoint: Option<Box<Verdict>>,
    ) -> Result<FileOutcome, RuleFault> {
        let mut faults = refused.into_iter().map(|RefusedDecision { line, message }| RuleFault {
            kind: FaultKind::Decision,
            file: Arc::clone(&self.rule.name),
            line,
            message,
        });
        if self.rule.file.on_error == OnError::Refuse {
            let fault = faults.next_back().expect("one decision at least was refused");
            verdict.roll_back(checkpoint);
            self.rule.failed(&self.tally, &fault);
            return Err(fault);
        }
        for fault in faults {
            complain(facts, verdict, &format!("{fault}; the request goes on without this decision"));
            self.rule.failed_in_part(&self.tally, &fault);
        }
        verdict.spoken(self.rule.file.phase, &self.name);
        Ok(FileOutcome::InPart)
    }

    /// Loads the program into the open VM.
    fn prepare<'a>(
        program: &mut Option<vm::VmFile>,
        vm: &'a mut Option<RuleVm>,
        code: &Bytecode,
    ) -> Result<(&'a mut RuleVm, vm::VmFile), CompileFailure> {
        let vm = vm.as_mut().ok_or_else(|| CompileFailure::vm("it was not opened"))?;
        let program = match *program {
            Some(program) => program,
            None => *program.insert(vm.load(code)?),
        };
        Ok((vm, program))
    }

    /// Loads a rule. Counts continue in the tally of the file's earlier version.
    fn new(rule: &Arc<RuleVersion>, had: &[Self]) -> Self {
        let earlier = had.iter().find(|loaded| Arc::ptr_eq(&loaded.rule.counters, &rule.counters));
        let tally = earlier.map_or_else(|| rule.counters.tally(), |loaded| Arc::clone(&loaded.tally));
        Self { rule: Arc::clone(rule), name: Arc::from(&*rule.name), tally, program: None }
    }
}

#[cfg(test)]
mod tests;
