//! The rule files of a node: what configuration says of them, their text as bytecode, and how they fare.
//!
//! All engines share one `RuleSet`. A file is compiled once for each version of it, here and not where requests run,
//! and handed out with a generation number that engines compare. Not here: evaluation (`engine`), the compiler (`vm`), who
//! notices that a file changed (`edge` watches `paths` and calls `refresh`).

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};

use crate::fault::{FaultKind, RuleFault};
use crate::ffi::Code;
use crate::source::{self, Source, Stamp};
use crate::vm;

/// Most rule files of one node.
pub const RULE_FILES_MAX: usize = 64;

/// Evaluations ended by their budget, one after another, from which on the log and the status say so.
const KILLS_IN_A_ROW_TOLD: u32 = 10;

/// Evaluations ended because of their processor time, one after another, after which a file is not evaluated again until it
/// changes. Each of them stopped a thread with all its requests for `vm::RUN_TIME_MAX`.
const TIME_KILLS_MAX: u32 = 3;

/// When in the life of a request a rule runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The head of the request was read.
    PostReadRequest,
    /// The site is known; who may have it, and where it runs, is being decided.
    AccessChecker,
    /// Just before the response is made.
    Fixups,
    /// The response has ended.
    LogTransaction,
}

impl Phase {
    pub const ALL: [Self; 4] =
        [Self::PostReadRequest, Self::AccessChecker, Self::Fixups, Self::LogTransaction];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::PostReadRequest => "post_read_request",
            Self::AccessChecker => "access_checker",
            Self::Fixups => "fixups",
            Self::LogTransaction => "log_transaction",
        }
    }

    fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// What happens to a request whose rule failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnError {
    /// It goes on without this file's verdict.
    #[default]
    Pass,
    /// It is refused.
    Refuse,
}

/// One rule file, as configuration names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleFile {
    pub phase: Phase,
    #[serde(rename = "file")]
    pub path: PathBuf,
    /// Not looked at again once it was compiled.
    #[serde(default)]
    pub cache: bool,
    #[serde(default)]
    pub on_error: OnError,
}

/// What one evaluation may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Budget {
    /// Instructions of the VM.
    pub instructions: u64,
    /// Bytes of a thread's VM, with all it keeps between evaluations; the rule files themselves are not counted.
    pub memory: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Self { instructions: 100_000, memory: 16 << 20 }
    }
}

/// How one file fares.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleStatus {
    #[serde(flatten)]
    pub rule: RuleFile,
    pub state: RuleState,
    /// Since the process started.
    pub evaluations: u64,
    /// Evaluations that gave no verdict, with those in `killed`.
    pub errors: u64,
    /// Evaluations ended because of their budget.
    pub killed: u64,
    /// How many of the latest evaluations were, without one that was not.
    pub killed_in_a_row: u32,
    /// The latest failure of an evaluation of this version of the file.
    pub last_fault: Option<RuleFault>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleState {
    InForce,
    /// The file as it is now cannot be evaluated.
    Broken(RuleFault),
    /// Its evaluations took too much processor time, the latest with this fault. It is not evaluated until it changes.
    SetAside(RuleFault),
}

/// The rule files of a process.
#[derive(Debug)]
pub struct RuleSet {
    /// Of `current`; engines look only at this while nothing changes.
    generation: AtomicU64,
    /// Phases that have at least one file.
    phases: AtomicU8,
    current: RwLock<Arc<Rules>>,
    /// Files as they were last seen on disk; whoever compiles holds it.
    entries: Mutex<Vec<Entry>>,
}

/// What engines load.
#[derive(Debug)]
pub(crate) struct Rules {
    pub generation: u64,
    pub budget: Budget,
    /// In the order of the configuration.
    pub rules: Vec<Arc<Rule>>,
}

/// One version of one file.
#[derive(Debug)]
pub(crate) struct Rule {
    pub file: RuleFile,
    /// The path, as messages and verdicts name it.
    pub name: Arc<str>,
    /// Bytecode with the numbers of lines.
    pub program: Result<Code, RuleFault>,
    /// The same for all versions of the file.
    pub counters: Arc<Counters>,
    /// Kinds of faults of this version that were logged, and the latest one.
    told: AtomicU16,
    last_fault: Mutex<Option<RuleFault>>,
    /// Evaluations of this version that were ended because of their time, without one between that was not.
    time_kills_in_a_row: AtomicU32,
    is_set_aside: AtomicBool,
}

#[derive(Debug)]
struct Entry {
    file: RuleFile,
    name: Arc<str>,
    stamp: Option<Stamp>,
    rule: Arc<Rule>,
}

/// What is counted of one file.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// One for each engine that ever loaded the file.
    tallies: Mutex<Vec<Arc<Tally>>>,
    kills_in_a_row: AtomicU32,
}

/// Counts of one engine, in a cache line of its own: threads do not disturb each other.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Tally {
    evaluations: AtomicU64,
    errors: AtomicU64,
    killed: AtomicU64,
}

// === impl RuleSet ===

impl RuleSet {
    /// Reads and compiles all files; those that cannot be are logged.
    pub fn new(files: Vec<RuleFile>, budget: Budget) -> Arc<Self> {
        let rules = Rules { generation: 0, budget, rules: Vec::new() };
        let set = Self {
            generation: AtomicU64::new(0),
            phases: AtomicU8::new(0),
            current: RwLock::new(Arc::new(rules)),
            entries: Mutex::new(Vec::new()),
        };
        set.set_files(files);
        Arc::new(set)
    }

    /// Replaces the list of files. What stays in it keeps its counters and is not compiled again.
    /// Files beyond `RULE_FILES_MAX` are left out, and logged.
    pub fn set_files(&self, files: Vec<RuleFile>) {
        let mut entries = self.entries.lock();
        if files.len() > RULE_FILES_MAX {
            let left_out = files.len() - RULE_FILES_MAX;
            tracing::error!(
                code = "NGY0607",
                left_out,
                "only the first {RULE_FILES_MAX} rule files are in force: put rules of one phase into one file"
            );
        }
        let mut had: Vec<Entry> = std::mem::take(&mut *entries);
        for file in files.into_iter().take(RULE_FILES_MAX) {
            let entry = match had.iter().position(|entry| entry.file == file) {
                Some(at) => had.swap_remove(at),
                None => Entry::new(file),
            };
            entries.push(entry);
        }
        for entry in &mut *entries {
            entry.look();
        }
        let budget = self.current().budget;
        self.publish(&entries, budget);
    }

    /// Replaces the budget of later evaluations.
    pub fn set_budget(&self, budget: Budget) {
        let entries = self.entries.lock();
        if self.current().budget != budget {
            self.publish(&entries, budget);
        }
    }

    /// Looks at the files again, and compiles those that changed. Blocks on the disk: not for a thread that serves requests.
    pub fn refresh(&self) {
        let mut entries = self.entries.lock();
        let mut changed = false;
        for entry in &mut *entries {
            changed |= entry.look();
        }
        if changed {
            let budget = self.current().budget;
            self.publish(&entries, budget);
        }
    }

    /// The files to watch: those that are looked at again.
    pub fn paths(&self) -> Vec<PathBuf> {
        let entries = self.entries.lock();
        entries.iter().filter(|entry| entry.is_looked_at()).map(|entry| entry.file.path.clone()).collect()
    }

    /// Whether there is a file for this phase.
    pub fn has(&self, phase: Phase) -> bool {
        self.phases.load(Ordering::Acquire) & phase.bit() != 0
    }

    pub fn status(&self) -> Vec<RuleStatus> {
        self.current().rules.iter().map(|rule| rule.status()).collect()
    }

    /// Changes whenever engines have to load anew.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub(crate) fn current(&self) -> Arc<Rules> {
        Arc::clone(&self.current.read())
    }

    fn publish(&self, entries: &[Entry], budget: Budget) {
        let rules: Vec<_> = entries.iter().map(|entry| Arc::clone(&entry.rule)).collect();
        let phases = rules.iter().fold(0, |bits, rule| bits | rule.file.phase.bit());
        let generation = self.generation() + 1;
        *self.current.write() = Arc::new(Rules { generation, budget, rules });
        self.phases.store(phases, Ordering::Release);
        self.generation.store(generation, Ordering::Release);
    }
}

// === impl Entry ===

impl Entry {
    fn new(file: RuleFile) -> Self {
        let name: Arc<str> = file.path.to_string_lossy().into();
        let unseen = RuleFault {
            kind: FaultKind::Unreadable,
            file: Arc::clone(&name),
            line: None,
            message: "not read yet".into(),
        };
        let rule = Rule::new(&file, &name, Err(unseen), Arc::default());
        Self { file, name, stamp: None, rule: Arc::new(rule) }
    }

    fn is_looked_at(&self) -> bool {
        !self.file.cache || self.rule.program.is_err() || self.rule.is_set_aside()
    }

    /// Reads and compiles the file if it changed; whether there is a new version of it.
    fn look(&mut self) -> bool {
        if !self.is_looked_at() {
            return false;
        }
        let fault = match source::read(&self.file.path, &mut self.stamp) {
            Source::Same => return false,
            Source::Text(text) => return self.replace(vm::compile(&text, &self.name)),
            Source::Unreadable(message) => {
                let file = Arc::clone(&self.name);
                RuleFault { kind: FaultKind::Unreadable, file, line: None, message }
            }
        };
        // A file that stays missing is the same version all the time.
        self.rule.program.as_ref().err() != Some(&fault) && self.replace(Err(fault))
    }

    fn replace(&mut self, program: Result<Code, RuleFault>) -> bool {
        let was_broken = self.rule.is_set_aside() || self.rule.program.is_err() && self.rule.has_told();
        self.rule = Arc::new(Rule::new(&self.file, &self.name, program, Arc::clone(&self.rule.counters)));
        self.rule.counters.kills_in_a_row.store(0, Ordering::Relaxed);
        match &self.rule.program {
            Err(fault) => {
                self.rule.tell(fault);
            }
            Ok(_) if was_broken => tracing::info!(file = %self.name, "the rule is in force again"),
            Ok(_) => {}
        }
        true
    }
}

// === impl Rule ===

impl Rule {
    fn new(
        file: &RuleFile,
        name: &Arc<str>,
        program: Result<Code, RuleFault>,
        counters: Arc<Counters>,
    ) -> Self {
        let (file, name) = (file.clone(), Arc::clone(name));
        Self {
            file,
            name,
            program,
            counters,
            told: AtomicU16::new(0),
            last_fault: Mutex::new(None),
            time_kills_in_a_row: AtomicU32::new(0),
            is_set_aside: AtomicBool::new(false),
        }
    }

    /// Whether it is not to be evaluated any more.
    #[inline]
    pub fn is_set_aside(&self) -> bool {
        self.is_set_aside.load(Ordering::Relaxed)
    }

    /// What to run; an error if there is nothing that may be run.
    pub fn runnable(&self) -> Result<&Code, RuleFault> {
        // Both were logged when it came so far.
        if self.is_set_aside() {
            return Err(self.fault_of_time());
        }
        self.program.as_ref().map_err(RuleFault::clone)
    }

    fn fault_of_time(&self) -> RuleFault {
        self.last_fault.lock().clone().unwrap_or_else(|| RuleFault {
            kind: FaultKind::Time,
            file: Arc::clone(&self.name),
            line: None,
            message: "set aside".into(),
        })
    }

    /// Counts an evaluation that was ended because of its time, and sets the file aside if it was one too many.
    fn count_time_kill(&self) {
        let in_a_row = self.time_kills_in_a_row.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if in_a_row < TIME_KILLS_MAX || self.is_set_aside.swap(true, Ordering::Relaxed) {
            return;
        }
        let requests = self.without_rule();
        tracing::error!(
            code = "NGY0612",
            file = %self.name,
            "the rule is set aside until the file changes: it was ended {in_a_row} times in a row because of its processor time; {requests}"
        );
    }

    /// What a failure of the rule means for requests.
    fn without_rule(&self) -> &'static str {
        match self.file.on_error {
            OnError::Pass => "requests go on without this rule",
            OnError::Refuse => "requests are refused",
        }
    }

    /// Logs a fault, once for each kind of each version of the file; whether this was the time.
    pub fn tell(&self, fault: &RuleFault) -> bool {
        let bit = 1 << fault.kind as u8;
        if self.told.load(Ordering::Relaxed) & bit != 0
            || self.told.fetch_or(bit, Ordering::Relaxed) & bit != 0
        {
            return false;
        }
        let (code, phase) = (fault.kind.code(), self.file.phase.as_str());
        let requests = self.without_rule();
        tracing::error!(%code, phase, "{fault}; {requests}");
        true
    }

    /// Counts an evaluation of which only a part holds. The log has it with the request.
    pub fn failed_in_part(&self, tally: &Tally, fault: &RuleFault) {
        tally.add(&tally.errors);
        *self.last_fault.lock() = Some(fault.clone());
    }

    /// Counts an evaluation that failed, and logs it if it is the first of its kind.
    pub fn failed(&self, tally: &Tally, fault: &RuleFault) {
        tally.add(&tally.errors);
        *self.last_fault.lock() = Some(fault.clone());
        self.tell(fault);
        if !fault.kind.is_kill() {
            return;
        }
        tally.add(&tally.killed);
        if fault.kind == FaultKind::Time {
            self.count_time_kill();
        }
        let in_a_row = self.counters.kills_in_a_row.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if in_a_row == KILLS_IN_A_ROW_TOLD {
            tracing::error!(
                code = "NGY0608",
                file = %self.name,
                "the last {in_a_row} evaluations were ended by their budget; each still costs its request that much: mend the rule or take it out"
            );
        }
    }

    /// Counts an evaluation that ended by itself.
    #[inline]
    pub fn survived(&self) {
        // Only read, unless it has to change: the line stays shared between threads.
        if self.counters.kills_in_a_row.load(Ordering::Relaxed) != 0 {
            self.counters.kills_in_a_row.store(0, Ordering::Relaxed);
            self.time_kills_in_a_row.store(0, Ordering::Relaxed);
        }
    }

    fn has_told(&self) -> bool {
        self.told.load(Ordering::Relaxed) != 0
    }

    fn status(&self) -> RuleStatus {
        let state = match &self.program {
            Err(fault) => RuleState::Broken(fault.clone()),
            Ok(_) if self.is_set_aside() => RuleState::SetAside(self.fault_of_time()),
            Ok(_) => RuleState::InForce,
        };
        let tallies = self.counters.tallies.lock();
        let sum = |of: fn(&Tally) -> &AtomicU64| {
            tallies.iter().map(|tally| of(tally).load(Ordering::Relaxed)).fold(0, u64::wrapping_add)
        };
        RuleStatus {
            rule: self.file.clone(),
            state,
            evaluations: sum(|tally| &tally.evaluations),
            errors: sum(|tally| &tally.errors),
            killed: sum(|tally| &tally.killed),
            killed_in_a_row: self.counters.kills_in_a_row.load(Ordering::Relaxed),
            last_fault: self.last_fault.lock().clone(),
        }
    }
}

// === impl Tally ===

impl Counters {
    /// A tally for one more engine.
    pub fn tally(&self) -> Arc<Tally> {
        let tally = Arc::default();
        self.tallies.lock().push(Arc::clone(&tally));
        tally
    }
}

impl Tally {
    #[inline]
    pub fn evaluated(&self) {
        self.add(&self.evaluations);
    }

    /// Only the engine that owns the tally writes to it, so that no locked instruction is needed.
    #[inline]
    fn add(&self, count: &AtomicU64) {
        count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
