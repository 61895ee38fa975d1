//! One Ruby VM for rules: mruby's library, the natives, the prelude, and programs that run within a
//! budget.
//!
//! Its Ruby parts are compiled once for each process, in VMs without limits and without requests.
//! The VMs that run rules load bytecode. A VM whose run was ended, or that has grown old, is
//! dropped whole. Not here: which programs, and when (`engine`); the calls into C (`ffi`).
//!
//! Instructions, memory and symbols are bounded, and with them all loops and recursion in Ruby. The
//! watchdog (`c/watch.c`) ends a single slow method of mruby that is written in C, such as a text
//! search. It counts the thread's own CPU time, so a thread that waits for a CPU loses nothing.

use std::ffi::CString;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::api;
use crate::budget::RuleBudget;
use crate::fault::{FaultKind, RuleFault};
use crate::ffi::{Bytecode, LibraryUnit, LoadedProgram, RubyVm, RuleScope, RunLimits, VmFailure, VmStatus};
use crate::native::NativeMethod;
use crate::regexp;
use crate::source::{self, SOURCE_LEN_MAX};
use crate::vocabulary;

/// New symbols of one evaluation. Ruby never forgets a symbol, and each one slows every look-up.
const SYMBOLS_PER_RUN: u32 = 1024;

/// Symbols that a VM may have made since it was opened before a new one replaces it.
const SYMBOLS_KEPT_MAX: u32 = 8 * SYMBOLS_PER_RUN;

/// Smallest memory of a VM, in bytes: its library alone takes a third of it.
pub const MEMORY_MIN: u64 = 1 << 20;

/// CPU time of one evaluation, unless its budget of instructions calls for more. The default budget
/// takes a hundredth of it.
pub const RUN_TIME_MAX: Duration = Duration::from_millis(100);

/// Average CPU time for each instruction of a larger budget, and the most that a budget can give.
const INSTRUCTION_TIME: Duration = Duration::from_nanos(200);
pub const RUN_TIME_LONGEST: Duration = Duration::from_secs(2);

/// CPU time and memory for compiling one text. Usual texts take some milliseconds and less than 1
/// MiB.
pub const COMPILE_TIME_MAX: Duration = Duration::from_millis(500);
pub const COMPILE_MEMORY_MAX: usize = 128 << 20;

pub struct RuleVm {
    machine: RubyVm,
    limits: RunLimits,
    /// Symbols it had when it was opened.
    symbols: u32,
    /// Bytes it had then.
    memory: usize,
    /// Bytes of the loaded programs. The files bound them, and they do not count for evaluations.
    programs: usize,
}

/// A rule file that is loaded into a VM.
#[derive(Debug, Clone, Copy)]
pub struct VmFile {
    program: LoadedProgram,
    bytes: usize,
    /// Each run does the same with the same facts.
    pub repeats: bool,
}

/// The parts of every VM, as bytecode.
struct VmLibrary {
    units: Vec<(LibraryUnit, Bytecode)>,
    prelude: Vec<Bytecode>,
}

impl RuleVm {
    pub fn open(budget: RuleBudget) -> Result<Self, CompileFailure> {
        let library = library()?;
        let mut machine =
            RubyVm::open(natives()).ok_or_else(|| CompileFailure::vm("there is no memory for it"))?;
        library
            .fill(&mut machine)
            .map_err(|failure| CompileFailure::vm(&format!("{} ({})", failure.message, failure.class)))?;
        machine.collect();
        let memory = usize::try_from(budget.memory.max(MEMORY_MIN)).unwrap_or(usize::MAX);
        let limits = RunLimits {
            instructions: budget.instructions.max(1),
            memory,
            symbols: SYMBOLS_PER_RUN,
            nanoseconds: nanoseconds(run_time(budget)),
        };
        machine.limit(limits);
        let symbols = machine.symbols();
        let memory = machine.memory();
        Ok(Self { machine, limits, symbols, memory, programs: 0 })
    }

    pub fn load(&mut self, code: &Bytecode) -> Result<VmFile, CompileFailure> {
        let before = self.machine.memory();
        let program = self.machine.load(code)?;
        let bytes = self.machine.memory().saturating_sub(before);
        self.programs += bytes;
        self.limit();
        let mut knows_all = true;
        let keeps_nothing = self.machine.names(program, |name| knows_all &= vocabulary::has(name));
        Ok(VmFile { program, bytes, repeats: knows_all && keeps_nothing })
    }

    pub fn unload(&mut self, loaded: VmFile) {
        self.machine.unload(loaded.program);
        self.programs -= loaded.bytes;
        self.limit();
    }

    fn limit(&mut self) {
        let memory = self.limits.memory.saturating_add(self.programs);
        self.machine.limit(RunLimits { memory, ..self.limits });
    }

    /// Runs a rule. If the failure is a kill, the VM can only be dropped.
    pub fn run(
        &mut self,
        loaded: VmFile,
        scope: &mut RuleScope<'_>,
        file: &str,
    ) -> Result<(), CompileFailure> {
        self.machine
            .run(loaded.program, Some(scope))
            .map_err(|failure| CompileFailure::of_rule(failure, file))
    }

    /// Returns whether a new VM should replace it: its state has grown, and collecting garbage did
    /// not help.
    pub fn is_worn(&mut self) -> bool {
        if self.machine.symbols() - self.symbols > SYMBOLS_KEPT_MAX {
            return true;
        }
        let open = self.memory + self.programs;
        let worn = open + self.limits.memory.saturating_sub(self.memory) / 2;
        if self.machine.memory() <= worn {
            return false;
        }
        self.machine.collect();
        self.machine.memory() > worn
    }

    /// Returns its size after all garbage is collected.
    #[cfg(test)]
    pub fn footprint(&mut self) -> VmFootprint {
        self.machine.collect();
        VmFootprint {
            memory: self.machine.memory(),
            symbols: self.machine.symbols(),
            objects: self.machine.objects(),
        }
    }
}

#[cfg(test)]
#[derive(Debug)]
pub struct VmFootprint {
    pub memory: usize,
    pub symbols: u32,
    pub objects: usize,
}

/// Compiles a rule file to bytecode.
pub fn compile(text: &[u8], file: &Arc<str>) -> Result<Bytecode, RuleFault> {
    let compiled = check_text(text).and_then(|()| {
        let name = CString::new(&**file)
            .map_err(|_| CompileFailure::syntax(None, "the path of the file holds NUL"))?;
        // It uses a new VM each time, so that the rest of one text does not affect the next.
        let mut machine = compiler()?;
        machine.limit(RunLimits {
            instructions: u64::MAX,
            memory: COMPILE_MEMORY_MAX,
            symbols: u32::MAX,
            nanoseconds: nanoseconds(COMPILE_TIME_MAX),
        });
        machine.compile(text, &name, true).map_err(CompileFailure::of_compiler)
    });
    compiled.map_err(|failed| failed.fault(file))
}

/// Returns the CPU time of one evaluation within this budget.
fn run_time(budget: RuleBudget) -> Duration {
    let instructions = u32::try_from(budget.instructions).unwrap_or(u32::MAX);
    INSTRUCTION_TIME.saturating_mul(instructions).clamp(RUN_TIME_MAX, RUN_TIME_LONGEST)
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Checks a text. mruby takes any byte above 127 as a letter. It takes NUL, which a file has after
/// a crash, as the end of the text.
fn check_text(text: &[u8]) -> Result<(), CompileFailure> {
    if text.len() > SOURCE_LEN_MAX {
        return Err(CompileFailure { kind: FaultKind::Unreadable, line: None, message: source::too_long() });
    }
    let (at, what) = match (text.iter().position(|b| *b == 0), std::str::from_utf8(text)) {
        (Some(at), _) => (at, "the file holds NUL: it is damaged or no text"),
        (None, Err(error)) => (error.valid_up_to(), "the file is not UTF-8"),
        (None, Ok(_)) => return Ok(()),
    };
    let lines = text[..at].iter().filter(|b| **b == b'\n').count();
    Err(CompileFailure::syntax(u32::try_from(lines + 1).ok(), what))
}

/// The error, without the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompileFailure {
    pub kind: FaultKind,
    pub line: Option<u32>,
    pub message: String,
}

impl CompileFailure {
    pub fn fault(self, file: &Arc<str>) -> RuleFault {
        RuleFault { kind: self.kind, file: Arc::clone(file), line: self.line, message: self.message }
    }

    fn syntax(line: Option<u32>, message: &str) -> Self {
        Self { kind: FaultKind::Syntax, line, message: message.to_owned() }
    }

    pub fn vm(message: &str) -> Self {
        Self { kind: FaultKind::Vm, line: None, message: format!("no Ruby VM can be made: {message}") }
    }

    /// Makes an error of the compiler. A text that takes too much is the text's fault, not that of
    /// a budget of evaluations.
    fn of_compiler(failure: VmFailure) -> Self {
        let message = match failure.status {
            VmStatus::Time => {
                format!("compiling it takes more than {} ms of processor time", COMPILE_TIME_MAX.as_millis())
            }
            VmStatus::Memory => {
                format!("compiling it takes more than {} MiB of memory", COMPILE_MEMORY_MAX >> 20)
            }
            _ => return Self::from(failure),
        };
        let message = format!("{message}: split long lists of arguments and deeply nested expressions");
        Self { kind: FaultKind::Compile, line: failure.line, message }
    }

    /// Makes an error of a rule. The line is that of the rule itself, if one of its frames is in
    /// the backtrace.
    fn of_rule(failure: VmFailure, file: &str) -> Self {
        let line_in_file = |frame: &String| {
            let rest = frame.strip_prefix(file)?.strip_prefix(':')?;
            rest.split(':').next()?.parse().ok()
        };
        let line = failure.backtrace.iter().find_map(line_in_file).or(failure.line);
        Self { line, ..Self::from(failure) }
    }
}

impl From<VmFailure> for CompileFailure {
    fn from(failure: VmFailure) -> Self {
        let VmFailure { status, line, class, message, .. } = failure;
        let (kind, message) = match status {
            VmStatus::Syntax => (FaultKind::Syntax, message),
            VmStatus::Exception if message.is_empty() || message == class => (FaultKind::Exception, class),
            VmStatus::Exception => (FaultKind::Exception, format!("{message} ({class})")),
            VmStatus::Instructions => (
                FaultKind::Instructions,
                "stopped: it ran for more instructions than rule_limits.instructions".into(),
            ),
            VmStatus::Memory => {
                (FaultKind::Memory, "stopped: it needed more memory than rule_limits.memory".into())
            }
            VmStatus::Symbols => (
                FaultKind::Memory,
                format!(
                    "stopped: it made more than {SYMBOLS_PER_RUN} new symbols; use strings for what requests bring"
                ),
            ),
            VmStatus::Time => (
                FaultKind::Time,
                "stopped: it used more processor time than one evaluation may; look for a search in a long text".into(),
            ),
            VmStatus::Failed => (FaultKind::Vm, format!("the Ruby VM failed: {message}")),
        };
        Self { kind, line, message }
    }
}

/// Returns all natives, in the order of their numbers.
fn natives() -> &'static [NativeMethod] {
    static NATIVES: OnceLock<Box<[NativeMethod]>> = OnceLock::new();
    let all = || api::NATIVES.iter().copied().chain([regexp::NATIVES]).flatten().copied().collect();
    NATIVES.get_or_init(all)
}

fn library() -> Result<&'static VmLibrary, CompileFailure> {
    static LIBRARY: OnceLock<Result<VmLibrary, CompileFailure>> = OnceLock::new();
    LIBRARY.get_or_init(VmLibrary::compile).as_ref().map_err(Clone::clone)
}

impl VmLibrary {
    /// Compiles the library without lines: an error then names a line of the rule, not of the
    /// library.
    fn compile() -> Result<Self, CompileFailure> {
        let mut machine = compiler()?;
        let mut units = Vec::new();
        for unit in RubyVm::units() {
            let code = machine
                .compile(unit.source, unit.name, false)
                .map_err(|failure| in_library(failure, unit.name))?;
            units.push((unit, code));
        }
        let mut prelude = Vec::new();
        for part in [regexp::PRELUDE].iter().chain(api::PRELUDE) {
            let name =
                CString::new(part.file).map_err(|_| CompileFailure::vm("the name of a prelude holds NUL"))?;
            let code = machine.compile(part.source.as_bytes(), &name, false);
            prelude.push(code.map_err(|failure| in_library(failure, &name))?);
        }
        Ok(Self { units, prelude })
    }

    /// Makes rules able to run in an empty machine.
    fn fill(&self, machine: &mut RubyVm) -> Result<(), VmFailure> {
        for (unit, code) in &self.units {
            machine.init_unit(unit)?;
            run_once(machine, code)?;
        }
        machine.finish()?;
        let is_module = |class: &str| api::MODULES.contains(&class);
        for (at, native) in natives().iter().enumerate() {
            machine.define(at, native, is_module(native.class))?;
        }
        for (class, name, value) in api::CONSTANTS {
            machine.constant(class, name, is_module(class), *value)?;
        }
        self.prelude.iter().try_for_each(|code| run_once(machine, code))
    }
}

fn in_library(failure: VmFailure, file: &std::ffi::CStr) -> CompileFailure {
    let line = failure.line.unwrap_or(0);
    let file = file.to_string_lossy();
    CompileFailure::vm(&format!("{file}:{line}: {}", failure.message))
}

/// Returns a machine for compiling: mruby's core is enough.
fn compiler() -> Result<RubyVm, CompileFailure> {
    RubyVm::open(&[]).ok_or_else(|| CompileFailure::vm("there is no memory for it"))
}

/// Runs a part of the library, which is not kept.
fn run_once(machine: &mut RubyVm, code: &Bytecode) -> Result<(), VmFailure> {
    let program = machine.load(code)?;
    let outcome = machine.run(program, None);
    machine.unload(program);
    outcome
}
