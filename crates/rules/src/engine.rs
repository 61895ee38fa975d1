//! Evaluation of rules on one thread: its VM, what is loaded into it, and what happens when a rule fails.
//!
//! Not here: what a VM is (`vm`), the files and their logging (`ruleset`), which runs can be spared (`remembered`).

use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

use crate::Phase;
use crate::api::complain;
use crate::facts::Facts;
use crate::fault::{FaultKind, RuleFault};
use crate::ffi::{Code, Scope};
use crate::remembered::{Noted, Remembered};
use crate::ruleset::{Budget, OnError, Rule, RuleSet, Tally};
use crate::verdict::{Refused, Verdict};
use crate::vm::{self, Failed, Vm};

/// One per thread that serves requests.
pub struct Engine {
    set: Arc<RuleSet>,
    /// Of the rules in `loaded`.
    generation: u64,
    budget: Budget,
    loaded: Vec<Loaded>,
    /// Opened when the first rule runs, and again after one was dropped.
    vm: Option<Vm>,
    /// What the files of each phase said before.
    remembered: [Remembered; Phase::ALL.len()],
    /// Of a request for which no rule has decided anything.
    blank: Rc<Verdict>,
    /// A VM belongs to its thread.
    not_send: PhantomData<*mut ()>,
}

/// How much of a file's evaluation holds.
enum Outcome {
    Whole,
    /// Some decisions were refused.
    InPart,
}

/// One rule file on this thread.
struct Loaded {
    rule: Arc<Rule>,
    /// The file's name, of this thread alone: each verdict holds it, and threads would contend for one counter.
    name: Arc<str>,
    tally: Arc<Tally>,
    /// In the VM that is open now.
    program: Option<vm::Loaded>,
}

impl Engine {
    /// Costs nothing until a rule runs.
    pub fn new(set: Arc<RuleSet>) -> Self {
        let budget = Budget::default();
        let blank = Rc::default();
        let remembered = std::array::from_fn(|_| Remembered::new(&blank));
        Self {
            set,
            generation: 0,
            budget,
            loaded: Vec::new(),
            vm: None,
            remembered,
            blank,
            not_send: PhantomData,
        }
    }

    /// What each request begins with.
    pub fn blank(&self) -> Rc<Verdict> {
        Rc::clone(&self.blank)
    }

    /// What the files of the phase said when they were told the same, if that is remembered. The verdict is shared with
    /// other requests then. False: `evaluate` is to find it.
    pub fn recall(&mut self, phase: Phase, facts: &dyn Facts, verdict: &mut Rc<Verdict>) -> bool {
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

    /// What the files of the phase say, in order, until one of them answers. An error is one of a file with
    /// `OnError::Refuse`; all others are logged and counted, and leave nothing in the verdict. It may be remembered.
    pub fn evaluate(
        &mut self,
        phase: Phase,
        facts: &dyn Facts,
        verdict: &mut Rc<Verdict>,
    ) -> Result<(), RuleFault> {
        if !self.set.has(phase) {
            return Ok(());
        }
        if self.set.generation() != self.generation {
            self.take_over();
        }
        // What earlier files decided is told to later ones too, and is none of the facts.
        if !Rc::ptr_eq(verdict, &self.blank) {
            return self.run(phase, facts, Rc::make_mut(verdict)).map(drop);
        }
        let may_repeat = |loaded: &Loaded| loaded.program.is_none_or(|program| program.repeats);
        if !self.of(phase).all(may_repeat) || !self.remembered[phase as usize].wants() {
            return self.run(phase, facts, Rc::make_mut(verdict)).map(drop);
        }
        let noted = Noted::new(facts);
        let ran = self.run(phase, &noted, Rc::make_mut(verdict))?;
        let repeats = |loaded: &Loaded| loaded.program.is_some_and(|program| program.repeats);
        if let Some(files) = ran
            && verdict.log.is_empty()
            && self.of(phase).take(files).all(repeats)
        {
            noted.into_memory(&mut self.remembered[phase as usize], verdict, files);
        }
        Ok(())
    }

    fn of(&self, phase: Phase) -> impl Iterator<Item = &Loaded> {
        self.loaded.iter().filter(move |loaded| loaded.rule.file.phase == phase)
    }

    /// Runs the files of the phase. Returns how many there were until one answered; none if one of them failed.
    fn run(
        &mut self,
        phase: Phase,
        facts: &dyn Facts,
        verdict: &mut Verdict,
    ) -> Result<Option<usize>, RuleFault> {
        let had_answer = verdict.answer.is_some();
        let (mut files, mut failed) = (0, false);
        for at in 0..self.loaded.len() {
            if self.loaded[at].rule.file.phase != phase {
                continue;
            }
            files += 1;
            match self.evaluate_one(at, facts, verdict) {
                Ok(Outcome::Whole) => {}
                Ok(Outcome::InPart) => failed = true,
                Err(fault) if self.loaded[at].rule.file.on_error == OnError::Refuse => return Err(fault),
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
        facts: &dyn Facts,
        verdict: &mut Verdict,
    ) -> Result<Outcome, RuleFault> {
        let loaded = &mut self.loaded[at];
        let code = loaded.rule.runnable()?;
        loaded.tally.evaluated();
        let phase = loaded.rule.file.phase;
        let checkpoint = verdict.checkpoint();
        let outcome = prepare(&mut self.vm, self.budget, &mut loaded.program, code)
            .and_then(|(vm, program)| vm.run(program, &mut Scope { facts, verdict, phase }, &loaded.name));
        let outcome = match outcome {
            Ok(()) => {
                loaded.rule.survived();
                match verdict.take_refused() {
                    refused if refused.is_empty() => {
                        verdict.spoken(phase, &loaded.name);
                        Ok(Outcome::Whole)
                    }
                    refused => loaded.settle(refused, facts, verdict, checkpoint),
                }
            }
            Err(failed) => {
                verdict.roll_back(checkpoint);
                Err(self.failed(at, failed))
            }
        };
        if self.vm.as_mut().is_some_and(Vm::is_worn) {
            self.drop_vm();
        }
        outcome
    }

    fn failed(&mut self, at: usize, failed: Failed) -> RuleFault {
        if failed.kind.leaves_vm_unusable() {
            self.drop_vm();
        }
        let Loaded { rule, tally, .. } = &self.loaded[at];
        let fault = failed.fault(&rule.name);
        rule.failed(tally, &fault);
        fault
    }

    /// Takes the rules as they are now. What has not changed keeps its program.
    fn take_over(&mut self) {
        let rules = self.set.current();
        if self.budget != rules.budget {
            self.budget = rules.budget;
            self.drop_vm();
        }
        self.remembered = std::array::from_fn(|_| Remembered::new(&self.blank));
        let mut had = std::mem::take(&mut self.loaded);
        for rule in &rules.rules {
            let same = had.iter().position(|loaded| Arc::ptr_eq(&loaded.rule, rule));
            self.loaded.push(match same {
                Some(at) => had.swap_remove(at),
                None => Loaded::new(rule, &had),
            });
        }
        if let Some(vm) = &mut self.vm {
            had.iter().filter_map(|loaded| loaded.program).for_each(|program| vm.unload(program));
        }
        self.generation = rules.generation;
    }

    fn drop_vm(&mut self) {
        self.vm = None;
        for loaded in &mut self.loaded {
            loaded.program = None;
        }
    }
}

impl Loaded {
    /// Some of its decisions were refused: that is said, and the others hold, unless nothing may be missing.
    fn settle(
        &self,
        refused: Vec<Refused>,
        facts: &dyn Facts,
        verdict: &mut Verdict,
        checkpoint: Option<Box<Verdict>>,
    ) -> Result<Outcome, RuleFault> {
        let mut faults = refused.into_iter().map(|Refused { line, message }| RuleFault {
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
        Ok(Outcome::InPart)
    }

    /// Counts go on in the tally of the file's earlier version.
    fn new(rule: &Arc<Rule>, had: &[Self]) -> Self {
        let earlier = had.iter().find(|loaded| Arc::ptr_eq(&loaded.rule.counters, &rule.counters));
        let tally = earlier.map_or_else(|| rule.counters.tally(), |loaded| Arc::clone(&loaded.tally));
        Self { rule: Arc::clone(rule), name: Arc::from(&*rule.name), tally, program: None }
    }
}

/// The VM, open and with the program loaded.
fn prepare<'a>(
    vm: &'a mut Option<Vm>,
    budget: Budget,
    program: &mut Option<vm::Loaded>,
    code: &Code,
) -> Result<(&'a mut Vm, vm::Loaded), Failed> {
    let vm = match vm {
        Some(vm) => vm,
        none => none.insert(Vm::open(budget)?),
    };
    let program = match *program {
        Some(program) => program,
        None => *program.insert(vm.load(code)?),
    };
    Ok((vm, program))
}

#[cfg(test)]
mod tests;
