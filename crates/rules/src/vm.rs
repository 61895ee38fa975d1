//! One Ruby VM as rules need it: mruby's library, the natives, the prelude, and programs that run within a budget.
//!
//! What is Ruby in it is compiled once for each process, in VMs without limits and without requests; those that run rules
//! load bytecode. A VM whose run was ended, or that has grown old, is dropped whole. Not here: which programs, and
//! when (`engine`); the calls into C (`ffi`).
//!
//! Bounded are instructions, memory and symbols, and with them whatever Ruby does in loops or recursion. One single method of
//! mruby written in C, such as a search in a string, is ended by the watchdog (`c/watch.c`). It counts the thread's own
//! processor time, so a thread that waits for a processor loses nothing.

use std::ffi::CString;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::api;
use crate::fault::{FaultKind, RuleFault};
use crate::ffi::{Code, Failure, Limits, Machine, Program, Scope, Status, Unit};
use crate::native::Native;
use crate::regexp;
use crate::ruleset::Budget;
use crate::source::{self, SOURCE_LEN_MAX};
use crate::vocabulary;

/// New symbols of one evaluation. Ruby never forgets a symbol, and finds each more slowly.
const SYMBOLS_PER_RUN: u32 = 1024;

/// Symbols a VM may have made since it was opened before a new one takes its place.
const SYMBOLS_KEPT_MAX: u32 = 8 * SYMBOLS_PER_RUN;

/// Smallest memory a VM is given, in bytes: its library alone takes a third of it.
pub const MEMORY_MIN: u64 = 1 << 20;

/// Processor time of one evaluation, if its budget of instructions does not call for more. The default budget takes a
/// hundredth of it.
pub const RUN_TIME_MAX: Duration = Duration::from_millis(100);

/// Processor time each instruction of a larger budget may take on average, and the most that a budget can give.
const INSTRUCTION_TIME: Duration = Duration::from_nanos(200);
const RUN_TIME_LONGEST: Duration = Duration::from_secs(2);

/// Processor time and memory for compiling one text. Usual texts take some milliseconds and less than 1 MiB.
pub const COMPILE_TIME_MAX: Duration = Duration::from_millis(500);
pub const COMPILE_MEMORY_MAX: usize = 128 << 20;

pub struct Vm {
    machine: Machine,
    limits: Limits,
    /// Symbols it had when it was opened.
    symbols: u32,
    /// Bytes it had then.
    memory: usize,
    /// Bytes of the loaded programs. They are bounded by the files, and do not take from what evaluations may use.
    programs: usize,
}

/// A rule file that is loaded into a VM.
#[derive(Debug, Clone, Copy)]
pub struct Loaded {
    program: Program,
    bytes: usize,
    /// Each run does the same when it is told the same.
    pub repeats: bool,
}

/// The parts every VM is made of, as bytecode.
struct Library {
    units: Vec<(Unit, Code)>,
    prelude: Vec<Code>,
}

impl Vm {
    pub fn open(budget: Budget) -> Result<Self, Failed> {
        let library = library()?;
        let mut machine = Machine::open(natives()).ok_or_else(|| Failed::vm("there is no memory for it"))?;
        library
            .fill(&mut machine)
            .map_err(|failure| Failed::vm(&format!("{} ({})", failure.message, failure.class)))?;
        machine.collect();
        let memory = usize::try_from(budget.memory.max(MEMORY_MIN)).unwrap_or(usize::MAX);
        let limits = Limits {
            instructions: budget.instructions.max(1),
            memory,
            symbols: SYMBOLS_PER_RUN,
            nanoseconds: nanoseconds(run_time(budget)),
        };
        machine.limit(limits);
        let (symbols, memory) = (machine.symbols(), machine.memory());
        Ok(Self { machine, limits, symbols, memory, programs: 0 })
    }

    pub fn load(&mut self, code: &Code) -> Result<Loaded, Failed> {
        let before = self.machine.memory();
        let program = self.machine.load(code)?;
        let bytes = self.machine.memory().saturating_sub(before);
        self.programs += bytes;
        self.limit();
        let mut knows_all = true;
        let keeps_nothing = self.machine.names(program, |name| knows_all &= vocabulary::has(name));
        Ok(Loaded { program, bytes, repeats: knows_all && keeps_nothing })
    }

    pub fn unload(&mut self, loaded: Loaded) {
        self.machine.unload(loaded.program);
        self.programs -= loaded.bytes;
        self.limit();
    }

    fn limit(&mut self) {
        let memory = self.limits.memory.saturating_add(self.programs);
        self.machine.limit(Limits { memory, ..self.limits });
    }

    /// Runs a rule. If the failure is a kill, the VM is good for nothing but being dropped.
    pub fn run(&mut self, loaded: Loaded, scope: &mut Scope<'_>, file: &str) -> Result<(), Failed> {
        self.machine.run(loaded.program, Some(scope)).map_err(|failure| Failed::of_rule(failure, file))
    }

    /// Whether it should give way to a new one: what it keeps has grown, and collecting garbage did not help.
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

    /// What it holds after all garbage is collected.
    #[cfg(test)]
    pub fn footprint(&mut self) -> Footprint {
        self.machine.collect();
        Footprint {
            memory: self.machine.memory(),
            symbols: self.machine.symbols(),
            objects: self.machine.objects(),
        }
    }
}

#[cfg(test)]
#[derive(Debug)]
pub struct Footprint {
    pub memory: usize,
    pub symbols: u32,
    pub objects: usize,
}

/// Bytecode of a rule file.
pub fn compile(text: &[u8], file: &Arc<str>) -> Result<Code, RuleFault> {
    let compiled = check_text(text).and_then(|()| {
        let name =
            CString::new(&**file).map_err(|_| Failed::syntax(None, "the path of the file holds NUL"))?;
        // A VM of its own each time: what one text leaves behind is no matter to the next.
        let mut machine = compiler()?;
        machine.limit(Limits {
            instructions: u64::MAX,
            memory: COMPILE_MEMORY_MAX,
            symbols: u32::MAX,
            nanoseconds: nanoseconds(COMPILE_TIME_MAX),
        });
        machine.compile(text, &name, true).map_err(Failed::of_compiler)
    });
    compiled.map_err(|failed| failed.fault(file))
}

/// Processor time of one evaluation within this budget.
fn run_time(budget: Budget) -> Duration {
    let instructions = u32::try_from(budget.instructions).unwrap_or(u32::MAX);
    INSTRUCTION_TIME.saturating_mul(instructions).clamp(RUN_TIME_MAX, RUN_TIME_LONGEST)
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// mruby takes any byte above 127 as a letter, and NUL, which a file has after a crash, as the end of the text.
fn check_text(text: &[u8]) -> Result<(), Failed> {
    if text.len() > SOURCE_LEN_MAX {
        return Err(Failed { kind: FaultKind::Unreadable, line: None, message: source::too_long() });
    }
    let (at, what) = match (text.iter().position(|b| *b == 0), std::str::from_utf8(text)) {
        (Some(at), _) => (at, "the file holds NUL: it is damaged or no text"),
        (None, Err(error)) => (error.valid_up_to(), "the file is not UTF-8"),
        (None, Ok(_)) => return Ok(()),
    };
    let lines = text[..at].iter().filter(|b| **b == b'\n').count();
    Err(Failed::syntax(u32::try_from(lines + 1).ok(), what))
}

/// What went wrong, without the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    pub kind: FaultKind,
    pub line: Option<u32>,
    pub message: String,
}

impl Failed {
    pub fn fault(self, file: &Arc<str>) -> RuleFault {
        RuleFault { kind: self.kind, file: Arc::clone(file), line: self.line, message: self.message }
    }

    fn syntax(line: Option<u32>, message: &str) -> Self {
        Self { kind: FaultKind::Syntax, line, message: message.to_owned() }
    }

    fn vm(message: &str) -> Self {
        Self { kind: FaultKind::Vm, line: None, message: format!("no Ruby VM can be made: {message}") }
    }

    /// A text that takes too much is the text's fault, not that of a budget of evaluations.
    fn of_compiler(failure: Failure) -> Self {
        let message = match failure.status {
            Status::Time => {
                format!("compiling it takes more than {} ms of processor time", COMPILE_TIME_MAX.as_millis())
            }
            Status::Memory => {
                format!("compiling it takes more than {} MiB of memory", COMPILE_MEMORY_MAX >> 20)
            }
            _ => return Self::from(failure),
        };
        let message = format!("{message}: split long lists of arguments and deeply nested expressions");
        Self { kind: FaultKind::Compile, line: failure.line, message }
    }

    /// The line is that of the rule itself, if one of its frames is in the backtrace.
    fn of_rule(failure: Failure, file: &str) -> Self {
        let line_in_file = |frame: &String| {
            let rest = frame.strip_prefix(file)?.strip_prefix(':')?;
            rest.split(':').next()?.parse().ok()
        };
        let line = failure.backtrace.iter().find_map(line_in_file).or(failure.line);
        Self { line, ..Self::from(failure) }
    }
}

impl From<Failure> for Failed {
    fn from(failure: Failure) -> Self {
        let Failure { status, line, class, message, .. } = failure;
        let (kind, message) = match status {
            Status::Syntax => (FaultKind::Syntax, message),
            Status::Exception if message.is_empty() || message == class => (FaultKind::Exception, class),
            Status::Exception => (FaultKind::Exception, format!("{message} ({class})")),
            Status::Instructions => (
                FaultKind::Instructions,
                "stopped: it ran for more instructions than rule_limits.instructions".into(),
            ),
            Status::Memory => {
                (FaultKind::Memory, "stopped: it needed more memory than rule_limits.memory".into())
            }
            Status::Symbols => (
                FaultKind::Memory,
                format!(
                    "stopped: it made more than {SYMBOLS_PER_RUN} new symbols; use strings for what requests bring"
                ),
            ),
            Status::Time => (
                FaultKind::Time,
                "stopped: it used more processor time than one evaluation may; look for a search in a long text".into(),
            ),
            Status::Failed => (FaultKind::Vm, format!("the Ruby VM failed: {message}")),
        };
        Self { kind, line, message }
    }
}

/// All natives, in the order of their numbers.
fn natives() -> &'static [Native] {
    static NATIVES: OnceLock<Box<[Native]>> = OnceLock::new();
    let all = || api::NATIVES.iter().copied().chain([regexp::NATIVES]).flatten().copied().collect();
    NATIVES.get_or_init(all)
}

fn library() -> Result<&'static Library, Failed> {
    static LIBRARY: OnceLock<Result<Library, Failed>> = OnceLock::new();
    LIBRARY.get_or_init(Library::compile).as_ref().map_err(Clone::clone)
}

impl Library {
    /// Without lines: what a rule does wrong is then told with a line of the rule, not of the library.
    fn compile() -> Result<Self, Failed> {
        let mut machine = compiler()?;
        let mut units = Vec::new();
        for unit in Machine::units() {
            let code = machine
                .compile(unit.source, unit.name, false)
                .map_err(|failure| in_library(failure, unit.name))?;
            units.push((unit, code));
        }
        let mut prelude = Vec::new();
        for part in [regexp::PRELUDE].iter().chain(api::PRELUDE) {
            let name = CString::new(part.file).map_err(|_| Failed::vm("the name of a prelude holds NUL"))?;
            let code = machine.compile(part.source.as_bytes(), &name, false);
            prelude.push(code.map_err(|failure| in_library(failure, &name))?);
        }
        Ok(Self { units, prelude })
    }

    /// Makes an empty machine one that rules can run in.
    fn fill(&self, machine: &mut Machine) -> Result<(), Failure> {
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

fn in_library(failure: Failure, file: &std::ffi::CStr) -> Failed {
    let (line, file) = (failure.line.unwrap_or(0), file.to_string_lossy());
    Failed::vm(&format!("{file}:{line}: {}", failure.message))
}

/// A machine for compiling: mruby's core is enough.
fn compiler() -> Result<Machine, Failed> {
    Machine::open(&[]).ok_or_else(|| Failed::vm("there is no memory for it"))
}

/// Runs a part of the library, which is not kept.
fn run_once(machine: &mut Machine, code: &Code) -> Result<(), Failure> {
    let program = machine.load(code)?;
    let outcome = machine.run(program, None);
    machine.unload(program);
    outcome
}
