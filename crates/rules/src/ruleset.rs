//! The rule files of a node: their configuration, their text as bytecode, and their results.
//!
//! All engines share one `RuleSet`. A file is compiled once for each version of it, here and not
//! where requests run. It gets a generation number that engines compare. Not here: evaluation
//! (`engine`), the compiler (`vm`), detection of changes (`edge` watches `paths` and calls
//! `refresh`).

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard, RwLock};
use serde::{Deserialize, Serialize};

use crate::budget::RuleBudget;
use crate::fault::{FaultKind, RuleFault};
use crate::ffi::Bytecode;
use crate::phase::RulePhase;
use crate::source::{self, SourceRead, SourceStamp};
use crate::state::SharedState;
use crate::vm;

/// Most rule files of one node.
pub const RULE_FILES_MAX: usize = 64;

/// Evaluations in a row ended by their budget, from which on the log and the status report it.
const KILLS_IN_A_ROW_TOLD: u32 = 10;

/// Evaluations in a row that end because of their CPU time before a file is set aside. It is not
/// evaluated again until it changes. Each of them stopped a thread with all its requests for
/// `vm::RUN_TIME_MAX`.
const TIME_KILLS_MAX: u32 = 3;

/// Longest wait for another thread's first run of a file of phase `Init`. A run takes less. A
/// thread that had no CPU for longer does not block the requests of others.
const INIT_WAIT_MAX: Duration = vm::RUN_TIME_LONGEST;

/// Handling of a request whose rule failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnError {
    /// It continues without this file's verdict.
    #[default]
    Pass,
    /// It is refused.
    Refuse,
}

/// One rule file, as configuration names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RuleFile {
    pub phase: RulePhase,
    #[serde(rename = "file")]
    pub path: PathBuf,
    /// It is not checked again once it was compiled.
    #[serde(default)]
    pub cache: bool,
    #[serde(default)]
    pub on_error: OnError,
}

/// State and counts of one file.
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
    /// Number of latest evaluations that were all killed.
    pub killed_in_a_row: u32,
    /// The latest failure of an evaluation of this version of the file.
    pub last_fault: Option<RuleFault>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleState {
    InForce,
    /// The present file cannot be evaluated.
    Broken(RuleFault),
    /// Its evaluations took too much CPU time, the latest with this fault. It is not evaluated
    /// until it changes.
    SetAside(RuleFault),
}

/// The rule files of a process.
#[derive(Debug)]
pub struct RuleSet {
    /// Generation of `current`; engines check only this while nothing changes.
    generation: AtomicU64,
    /// Phases that have at least one file.
    phases: AtomicU8,
    current: RwLock<Arc<LoadedRules>>,
    /// Files as last seen on disk; the compiling thread holds the lock.
    entries: Mutex<Vec<FileEntry>>,
    /// State that rules keep between requests. It outlasts every version of a file.
    state: SharedState,
}

/// The rules that engines load.
#[derive(Debug)]
pub(crate) struct LoadedRules {
    pub generation: u64,
    pub budget: RuleBudget,
    /// In the order of the configuration.
    pub rules: Vec<Arc<RuleVersion>>,
}

/// One version of one file.
#[derive(Debug)]
pub(crate) struct RuleVersion {
    pub file: RuleFile,
    /// The path, as messages and verdicts name it.
    pub name: Arc<str>,
    /// Bytecode with the numbers of lines.
    pub program: Result<Bytecode, RuleFault>,
    /// The same for all versions of the file.
    pub counters: Arc<FileCounters>,
    /// Kinds of faults of this version that were logged, and the latest one.
    told: AtomicU16,
    last_fault: Mutex<Option<RuleFault>>,
    /// Evaluations of this version in a row that were ended because of their time.
    time_kills_in_a_row: AtomicU32,
    is_set_aside: AtomicBool,
    /// For phase `Init`: whether one VM's run has done the one-time work. That run holds it
    /// meanwhile.
    is_initialised: Mutex<bool>,
}

#[derive(Debug)]
struct FileEntry {
    file: RuleFile,
    name: Arc<str>,
    stamp: Option<SourceStamp>,
    rule: Arc<RuleVersion>,
}

/// Counts of one file.
#[derive(Debug, Default)]
pub(crate) struct FileCounters {
    /// One for each engine that ever loaded the file.
    tallies: Mutex<Vec<Arc<EngineCounts>>>,
    kills_in_a_row: AtomicU32,
}

/// Counts of one engine, in a cache line of its own, so that threads do not disturb each other.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct EngineCounts {
    evaluations: AtomicU64,
    errors: AtomicU64,
    killed: AtomicU64,
}

// === impl RuleSet ===

impl RuleSet {
    /// Reads and compiles all files; failures are logged.
    pub fn new(files: Vec<RuleFile>, budget: RuleBudget) -> Arc<Self> {
        let rules = LoadedRules { generation: 0, budget, rules: Vec::new() };
        let set = Self {
            generation: AtomicU64::new(0),
            phases: AtomicU8::new(0),
            current: RwLock::new(Arc::new(rules)),
            entries: Mutex::new(Vec::new()),
            state: SharedState::default(),
        };
        set.set_files(files);
        Arc::new(set)
    }

    /// Replaces the list of files. Files that stay keep their counters and are not compiled again.
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
        let mut had: Vec<FileEntry> = std::mem::take(&mut *entries);
        for file in files.into_iter().take(RULE_FILES_MAX) {
            let entry = match had.iter().position(|entry| entry.file == file) {
                Some(at) => had.swap_remove(at),
                None => FileEntry::new(file),
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
    pub fn set_budget(&self, budget: RuleBudget) {
        let entries = self.entries.lock();
        if self.current().budget != budget {
            self.publish(&entries, budget);
        }
    }

    /// Checks the files again, and compiles those that changed. Blocks on the disk: not for a
    /// thread that serves requests.
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

    /// Returns the files to watch: those that are checked again.
    pub fn paths(&self) -> Vec<PathBuf> {
        let entries = self.entries.lock();
        entries.iter().filter(|entry| entry.is_looked_at()).map(|entry| entry.file.path.clone()).collect()
    }

    /// Returns whether there is a file for this phase.
    pub fn has(&self, phase: RulePhase) -> bool {
        self.phases.load(Ordering::Acquire) & phase.bit() != 0
    }

    pub fn status(&self) -> Vec<RuleStatus> {
        self.current().rules.iter().map(|rule| rule.status()).collect()
    }

    pub(crate) fn state(&self) -> &SharedState {
        &self.state
    }

    /// Returns a number that changes whenever engines have to load again.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub(crate) fn current(&self) -> Arc<LoadedRules> {
        Arc::clone(&self.current.read())
    }

    fn publish(&self, entries: &[FileEntry], budget: RuleBudget) {
        let rules: Vec<_> = entries.iter().map(|entry| Arc::clone(&entry.rule)).collect();
        let phases = rules.iter().fold(0, |bits, rule| bits | rule.file.phase.bit());
        let generation = self.generation() + 1;
        *self.current.write() = Arc::new(LoadedRules { generation, budget, rules });
        self.phases.store(phases, Ordering::Release);
        self.generation.store(generation, Ordering::Release);
    }
}

// === impl Entry ===

impl FileEntry {
    fn new(file: RuleFile) -> Self {
        let name: Arc<str> = file.path.to_string_lossy().into();
        let unseen = RuleFault {
            kind: FaultKind::Unreadable,
            file: Arc::clone(&name),
            line: None,
            message: "not read yet".into(),
        };
        let rule = RuleVersion::new(&file, &name, Err(unseen), Arc::default());
        Self { file, name, stamp: None, rule: Arc::new(rule) }
    }

    fn is_looked_at(&self) -> bool {
        !self.file.cache || self.rule.program.is_err() || self.rule.is_set_aside()
    }

    /// Reads and compiles the file if it changed. Returns whether there is a new version of it.
    fn look(&mut self) -> bool {
        if !self.is_looked_at() {
            return false;
        }
        let fault = match source::read(&self.file.path, &mut self.stamp) {
            SourceRead::Same => return false,
            SourceRead::Text(text) => return self.replace(vm::compile(&text, &self.name)),
            SourceRead::Unreadable(message) => {
                let file = Arc::clone(&self.name);
                RuleFault { kind: FaultKind::Unreadable, file, line: None, message }
            }
        };
        // A file that stays missing is the same version all the time.
        self.rule.program.as_ref().err() != Some(&fault) && self.replace(Err(fault))
    }

    fn replace(&mut self, program: Result<Bytecode, RuleFault>) -> bool {
        let was_broken = self.rule.is_set_aside() || self.rule.program.is_err() && self.rule.has_told();
        self.rule =
            Arc::new(RuleVersion::new(&self.file, &self.name, program, Arc::clone(&self.rule.counters)));
        self.rule.counters.kills_in_a_row.store(0, Ordering::Relaxed);
        match &self.rule.program {
            Err(fault) => {
                self.rule.log_once(fault);
            }
            Ok(_) if was_broken => tracing::info!(file = %self.name, "the rule is in force again"),
            Ok(_) => {}
        }
        true
    }
}

// === impl Rule ===

impl RuleVersion {
    fn new(
        file: &RuleFile,
        name: &Arc<str>,
        program: Result<Bytecode, RuleFault>,
        counters: Arc<FileCounters>,
    ) -> Self {
        let file = file.clone();
        let name = Arc::clone(name);
        Self {
            file,
            name,
            program,
            counters,
            told: AtomicU16::new(0),
            last_fault: Mutex::new(None),
            time_kills_in_a_row: AtomicU32::new(0),
            is_set_aside: AtomicBool::new(false),
            is_initialised: Mutex::new(false),
        }
    }

    /// Returns whether it must not be evaluated any more.
    #[inline]
    pub fn is_set_aside(&self) -> bool {
        self.is_set_aside.load(Ordering::Relaxed)
    }

    /// Returns `Some` for one VM at a time, until a run has ended well. The settings of that run
    /// hold for all threads. It then sets the value to true. All others wait until it ends, and
    /// make only classes and constants of their own.
    pub fn claim_init(&self) -> Option<MutexGuard<'_, bool>> {
        let is_initialised = self.is_initialised.try_lock_for(INIT_WAIT_MAX)?;
        (!*is_initialised).then_some(is_initialised)
    }

    /// Returns the program to run, or an error if nothing may be run.
    pub fn runnable(&self) -> Result<&Bytecode, RuleFault> {
        // Both were logged when it was set aside.
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

    /// Counts an evaluation that was ended because of its time. Sets the file aside if it was one
    /// too many.
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

    /// Returns the effect of a rule's failure on requests.
    fn without_rule(&self) -> &'static str {
        match self.file.on_error {
            OnError::Pass => "requests go on without this rule",
            OnError::Refuse => "requests are refused",
        }
    }

    /// Logs a fault, once for each kind of each version of the file. Returns whether it logged it
    /// now.
    pub fn log_once(&self, fault: &RuleFault) -> bool {
        let bit = 1 << fault.kind as u8;
        if self.told.load(Ordering::Relaxed) & bit != 0
            || self.told.fetch_or(bit, Ordering::Relaxed) & bit != 0
        {
            return false;
        }
        let code = fault.kind.code();
        let phase = self.file.phase.as_str();
        let requests = self.without_rule();
        tracing::error!(%code, phase, "{fault}; {requests}");
        true
    }

    /// Counts an evaluation of which only a part holds. The log has it with the request.
    pub fn failed_in_part(&self, tally: &EngineCounts, fault: &RuleFault) {
        tally.add(&tally.errors);
        *self.last_fault.lock() = Some(fault.clone());
    }

    /// Counts an evaluation that failed, and logs it if it is the first of its kind.
    pub fn failed(&self, tally: &EngineCounts, fault: &RuleFault) {
        tally.add(&tally.errors);
        *self.last_fault.lock() = Some(fault.clone());
        self.log_once(fault);
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
        // It is only read, unless it has to change: the cache line stays shared between threads.
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
        let sum = |of: fn(&EngineCounts) -> &AtomicU64| {
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

impl FileCounters {
    /// Returns a tally for one more engine.
    pub fn tally(&self) -> Arc<EngineCounts> {
        let tally = Arc::default();
        self.tallies.lock().push(Arc::clone(&tally));
        tally
    }
}

impl EngineCounts {
    #[inline]
    pub fn evaluated(&self) {
        self.add(&self.evaluations);
    }

    /// Adds to a count. Only the engine that owns the tally writes to it, so no locked instruction
    /// is needed.
    #[inline]
    fn add(&self, count: &AtomicU64) {
        count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
