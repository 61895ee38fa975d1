//! One machine, with natives of the test's own.

use super::*;
use crate::state::{SharedState, WaitAllowance};
use crate::testing::TestRequest;

const NATIVES: &[NativeMethod] = &[
    NativeMethod::singleton("Probe", "show", |call| {
        let text = call.args().iter().map(|arg| format!("{arg:?}")).collect::<Vec<_>>().join(" ");
        call.verdict.write(text.as_bytes())?;
        Ok(NativeValue::This)
    }),
    NativeMethod::singleton("Probe", "give", |call| {
        let inner = NativeValue::List(vec![
            NativeValue::Int(1),
            NativeValue::Float(0.5),
            NativeValue::from("borrowed"),
        ]);
        let owned = NativeValue::from(call.facts.text(crate::TextFact::Path).map(Cow::into_owned));
        Ok(NativeValue::Map(vec![
            ("list".into(), inner),
            ("owned".to_owned().into(), owned),
            ("nil".into(), NativeValue::Nil),
        ]))
    }),
    NativeMethod::singleton("Probe", "fail", |call| {
        Err(match call.int(0)? {
            0 => NativeError::wrong_type("type"),
            1 => NativeError::argument(format!("argument {}", "ä".repeat(2000))),
            _ => NativeError::runtime("runtime"),
        })
    }),
    NativeMethod::singleton("Probe", "panic", |_| panic!("a defect of a native")),
    NativeMethod::singleton("Probe", "work", |_| {
        let before = deferred();
        while deferred() == before {}
        WORKED.set(WORKED.get() + 1);
        Ok(NativeValue::Nil)
    }),
    NativeMethod::singleton("Probe", "wait", |_| {
        let (_sender, nothing) = std::sync::mpsc::channel::<()>();
        let waited = nothing.recv_timeout(20 * TIME);
        assert_eq!(waited, Err(std::sync::mpsc::RecvTimeoutError::Timeout));
        Ok(NativeValue::Nil)
    }),
    NativeMethod::method("Probe", "initialize", |call| {
        let guard = Guard::new(call.text(0)?);
        call.keep(guard);
        Ok(NativeValue::Nil)
    }),
    NativeMethod::method("Probe", "name", |call| Ok(call.this::<Guard>()?.0.clone().into())),
];

/// Processor time of a run in the tests of the watchdog.
const TIME: std::time::Duration = std::time::Duration::from_millis(10);

thread_local! {
    static GUARDS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
    /// Calls of `Probe.work` that came to their end.
    static WORKED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// The state of a Ruby object, counted.
struct Guard(String);

impl Guard {
    fn new(name: &str) -> Self {
        GUARDS.set(GUARDS.get() + 1);
        Self(name.to_owned())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        GUARDS.set(GUARDS.get() - 1);
    }
}

/// A machine with mruby's library and the natives above.
fn machine() -> RubyVm {
    let mut machine = RubyVm::open(NATIVES).unwrap();
    for unit in RubyVm::units() {
        machine.init_unit(&unit).unwrap();
        let code = machine.compile(unit.source, unit.name, false).unwrap();
        let program = machine.load(&code).unwrap();
        machine.run(program, None).unwrap();
        machine.unload(program);
    }
    machine.finish().unwrap();
    for (at, native) in NATIVES.iter().enumerate() {
        machine.define(at, native, false).unwrap();
    }
    machine
}

fn limits() -> RunLimits {
    RunLimits { instructions: 100_000, memory: 16 << 20, symbols: 100, nanoseconds: u64::MAX }
}

fn load(machine: &mut RubyVm, source: &str) -> LoadedProgram {
    let code = machine.compile(source.as_bytes(), c"probe.rb", true).unwrap();
    machine.load(&code).unwrap()
}

/// Runs it within a request, and gives what `Probe.show` wrote.
fn run(machine: &mut RubyVm, source: &str) -> Result<String, VmFailure> {
    let program = load(machine, source);
    let mut verdict = Verdict::default();
    let asked = TestRequest::get("/path");
    let state = SharedState::default();
    let patience = WaitAllowance::default();
    let shared = StateRun::new(&state, &patience, &asked, RulePhase::Fixups);
    let mut scope = RuleScope { facts: &asked, verdict: &mut verdict, phase: RulePhase::Fixups, shared };
    let outcome = machine.run(program, Some(&mut scope));
    drop(scope);
    let shown = verdict.answer.map_or_else(Vec::new, |answer| answer.body);
    outcome.map(|()| String::from_utf8(shown).unwrap())
}

#[test]
fn arguments_arrive_as_they_were_given() {
    let mut machine = machine();
    for (ruby, rust) in [
        ("nil, true, false, -7, 2.5", "Nil Bool(true) Bool(false) Int(-7) Float(2.5)"),
        ("'ä', \"\\xff\", ''", "Text([195, 164]) Text([255]) Text([])"),
        // Short names share one buffer inside the VM.
        (":a, :b, :a_long_name, :[]=", r#"Symbol("a") Symbol("b") Symbol("a_long_name") Symbol("[]=")"#),
        ("[1, [2], :c]", r#"List([Int(1), Other, Symbol("c")])"#),
        ("cpu: '5', 'k' => :v", r#"Map([(Symbol("cpu"), Text([53])), (Text([107]), Symbol("v"))])"#),
        ("[], {}", "List([]) Map([])"),
        ("1, *[2, 3]", "Int(1) Int(2) Int(3)"),
        ("Object.new, 1..2", "Other Other"),
        ("[0] * 1000, 1", "Other Int(1)"),
        ("9223372036854775807", "Int(9223372036854775807)"),
    ] {
        assert_eq!(run(&mut machine, &format!("Probe.show({ruby})")).unwrap(), rust, "{ruby}");
    }
    let failure = run(&mut machine, "Probe.show(*(1..17))").unwrap_err();
    assert_eq!((&*failure.class, failure.status), ("ArgumentError", VmStatus::Exception));
}

#[test]
fn results_arrive_as_they_were_given() {
    let mut machine = machine();
    let shown = run(&mut machine, "Probe.show(Probe.give.inspect.bytes.size, Probe.give['owned'])").unwrap();
    assert_eq!(shown, "Int(66) Text([47, 112, 97, 116, 104])");
    let shown = run(&mut machine, "Probe.show.show(Probe.give['list'])").unwrap();
    assert!(shown.starts_with("List([Int(1), Float(0.5), Text("), "{shown}");
}

#[test]
fn refusal_of_a_native_is_raised_where_it_was_called() {
    let mut machine = machine();
    for (number, class) in [(0, "TypeError"), (1, "ArgumentError"), (2, "RuntimeError")] {
        let failure = run(&mut machine, &format!("\n\nProbe.fail({number})")).unwrap_err();
        assert_eq!((&*failure.class, failure.status), (class, VmStatus::Exception));
        assert_eq!(failure.backtrace[0].split(":in").next(), Some("probe.rb:3"));
        assert!(failure.message.len() < MESSAGE_LEN);
    }
}

#[test]
fn a_native_that_panics_raises() {
    let mut machine = machine();
    let failure = run(&mut machine, "Probe.panic").unwrap_err();
    assert_eq!((&*failure.class, failure.status), ("RuntimeError", VmStatus::Exception));
    assert!(failure.message.contains("defect"), "{}", failure.message);
    assert_eq!(run(&mut machine, "begin; Probe.panic; rescue; Probe.show(1); end").unwrap(), "Int(1)");
}

#[test]
fn natives_raise_where_there_is_no_request() {
    let mut machine = machine();
    let program = load(&mut machine, "Probe.show(1)");
    assert_eq!(machine.run(program, None).unwrap_err().class, "RuntimeError");
}

#[test]
fn states_go_with_their_objects() {
    let mut machine = machine();
    let source =
        "50.times { |i| Probe.new(i.to_s) }\na = Probe.new('a')\na.send(:initialize, 'b')\n$kept = a";
    run(&mut machine, source).unwrap();
    machine.collect();
    assert_eq!((GUARDS.get(), machine.objects()), (1, 1));
    assert_eq!(run(&mut machine, "Probe.show($kept.name)").unwrap(), "Text([98])");
    drop(machine);
    assert_eq!(GUARDS.get(), 0);
}

#[test]
fn classes_of_ruby_can_build_on_those_of_natives() {
    let mut machine = machine();
    let source = "
        class Named < Probe
          def initialize(name, times: 1, &block)
            super(block.call(name) * times)
          end
        end
        class Plain < Probe
        end
        Probe.show(Named.new('a', times: 2) { |name| name + 'b' }.name, Plain.new('c').name)
    ";
    assert_eq!(run(&mut machine, source).unwrap(), "Text([97, 98, 97, 98]) Text([99])");
    let failure = run(&mut machine, "\nProbe.new(1)").unwrap_err();
    assert_eq!((&*failure.class, &*failure.backtrace[0]), ("TypeError", "probe.rb:2:in new"));
}

#[test]
fn states_go_with_a_machine_whose_run_was_ended() {
    let mut machine = machine();
    machine.limit(limits());
    let failure = run(&mut machine, "loop { Probe.new('x') }").unwrap_err();
    assert_eq!((failure.status, failure.line), (VmStatus::Instructions, Some(1)));
    assert!(GUARDS.get() > 0);
    assert_eq!(run_again(&mut machine).status, VmStatus::Failed);
    drop(machine);
    assert_eq!(GUARDS.get(), 0);
}

/// After a run was ended nothing runs any more.
fn run_again(machine: &mut RubyVm) -> VmFailure {
    machine.run(LoadedProgram(0), None).unwrap_err()
}

#[test]
fn no_call_of_a_native_outlives_a_deep_stack() {
    let mut machine = machine();
    machine.limit(limits());
    let source = "class Deep\n  def to_s = [Deep.new].map { |d| d.to_s }.join\nend\nDeep.new.to_s";
    assert_eq!(run(&mut machine, source).unwrap_err().class, "SystemStackError");
    // The VM has one such exception, made before there was a rule: its lines must be those of the last time.
    let failure = run(&mut machine, "\n\n\ndef f(n) = f(n)\nf(1)").unwrap_err();
    assert_eq!(&*failure.backtrace[0], "probe.rb:4:in f");
    let source = "a = []\n100.times { a = [a] }\nProbe.show(a.inspect.size, a == a.dup, a.flatten.size, a.hash.class.to_s.size)";
    assert_eq!(run(&mut machine, source).unwrap(), "Int(202) Bool(true) Int(0) Int(7)");
}

#[test]
fn text_that_does_not_parse_says_where() {
    let mut machine = RubyVm::open(&[]).unwrap();
    for (source, line) in
        [("x = 1\nif x\n", 3), ("a = (1\nb", 2), ("'open", 1), ("$1 = 2", 1), ("def f\n  @@ = 1\nend", 2)]
    {
        let failure = machine.compile(source.as_bytes(), c"a.rb", true).unwrap_err();
        assert_eq!(failure.status, VmStatus::Syntax, "{source}");
        assert!(failure.line.is_some_and(|at| at.abs_diff(line) <= 1), "{source}: {failure:?}");
        assert!(!failure.message.is_empty(), "{source}");
    }
    let nested = "(".repeat(30_000);
    let wide = format!("a = {}", vec!["1"; 30_000].join(" + "));
    let binary: Vec<u8> = (1..=255).cycle().take(60_000).collect();
    for source in [nested.as_bytes(), wide.as_bytes(), &binary] {
        assert_eq!(machine.compile(source, c"a.rb", true).unwrap_err().status, VmStatus::Syntax);
    }
}

#[test]
fn programs_are_replaced_without_end() {
    let mut machine = machine();
    for n in 0..1_000 {
        let program = load(&mut machine, &format!("$n = {n}"));
        machine.run(program, None).unwrap();
        machine.unload(program);
        machine.unload(program);
    }
    machine.collect();
    let early = machine.memory();
    for n in 0..1_000 {
        let program = load(&mut machine, &format!("$n = {n}"));
        machine.unload(program);
    }
    machine.collect();
    assert!(machine.memory() <= early + 4096, "{early} {}", machine.memory());
}

/// Runs it with `TIME` and any number of instructions, in a machine of its own.
fn run_watched(source: &str) -> Result<String, VmFailure> {
    let mut machine = machine();
    machine.limit(RunLimits { instructions: u64::MAX, nanoseconds: TIME.as_nanos() as u64, ..limits() });
    run(&mut machine, source)
}

#[test]
fn one_call_of_c_is_ended_where_the_rule_was() {
    let search = "a = 'a'\nb = a * 400_000 + 'b'\n\n(a * 800_000).index(b)\nProbe.show(1)";
    let failure = run_watched(search).unwrap_err();
    assert_eq!((failure.status, failure.line), (VmStatus::Time, Some(4)));
    assert_eq!((&*failure.class, &*failure.message), ("", ""));
    // Within a block that the library calls.
    let failure = run_watched(&format!("[1].each do\n{search}\nend")).unwrap_err();
    assert_eq!((failure.status, failure.line), (VmStatus::Time, Some(5)));
    assert_eq!(run_watched("Probe.show(2)").unwrap(), "Int(2)");
}

#[test]
fn a_machine_that_was_ended_runs_nothing_more() {
    let mut machine = machine();
    machine.limit(RunLimits { instructions: u64::MAX, nanoseconds: TIME.as_nanos() as u64, ..limits() });
    assert_eq!(run(&mut machine, "loop {}").unwrap_err().status, VmStatus::Time);
    let program = LoadedProgram(0);
    assert_eq!(machine.run(program, None).unwrap_err().status, VmStatus::Failed);
    let compiled = machine.compile(b"1", c"probe.rb", true);
    assert_eq!(compiled.unwrap_err().status, VmStatus::Failed);
}

#[test]
fn rust_is_never_left_in_the_middle() {
    let failure = run_watched("Probe.work\nProbe.work").unwrap_err();
    assert_eq!((failure.status, failure.line), (VmStatus::Time, Some(1)));
    assert_eq!(WORKED.get(), 1, "the first call came to its end, and the second one never began");
    let program = "made = Probe.new('kept')\nProbe.work";
    assert_eq!(run_watched(program).unwrap_err().status, VmStatus::Time);
    assert_eq!(GUARDS.get(), 0, "what the machine kept is dropped with it");
}

#[test]
fn the_allocator_is_never_left_in_the_middle() {
    let before = deferred();
    // Each round the signal comes at some other place; many of them are in the allocator.
    for _ in 0..200 {
        let failure = run_watched("while true\n  'x' * 1_000_000\nend").unwrap_err();
        assert_eq!(failure.status, VmStatus::Time);
        assert_eq!(run_watched("Probe.show('x' * 3)").unwrap(), "Text([120, 120, 120])");
        if deferred() > before {
            return;
        }
    }
    panic!("no signal came while memory was allocated");
}

#[test]
fn a_run_that_only_waits_keeps_its_time() {
    assert_eq!(run_watched("Probe.wait\nProbe.show(1)").unwrap(), "Int(1)");
}

#[test]
fn threads_are_watched_each_by_itself() {
    let ends = || assert_eq!(run_watched("loop {}").unwrap_err().status, VmStatus::Time);
    let lives = || assert_eq!(run_watched("Probe.wait\nProbe.show(1)").unwrap(), "Int(1)");
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(ends);
            scope.spawn(lives);
        }
    });
}

#[test]
fn a_text_that_takes_long_to_compile_is_ended() {
    let text = format!("f({}1)", "1,".repeat(24_000));
    let mut machine = RubyVm::open(NATIVES).unwrap();
    machine.limit(RunLimits { nanoseconds: TIME.as_nanos() as u64, ..limits() });
    assert_eq!(machine.compile(text.as_bytes(), c"probe.rb", true).unwrap_err().status, VmStatus::Time);
    let mut machine = RubyVm::open(NATIVES).unwrap();
    machine.limit(RunLimits { memory: 1 << 20, ..limits() });
    assert_eq!(machine.compile(text.as_bytes(), c"probe.rb", true).unwrap_err().status, VmStatus::Memory);
}

/// Functions of the C library that mruby calls: none takes a lock or allocates, so that a run may be ended in any of them.
/// Those that do have a guarded form (`build.rs`).
const CALLED_BY_MRUBY: &[&str] = &[
    "__ctype_tolower_loc",
    "__ctype_toupper_loc",
    "__errno_location",
    "_setjmp",
    "abort",
    "acos",
    "acosh",
    "asctime_r",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "cbrt",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exit",
    "exp",
    "floor",
    "fmod",
    "frexp",
    "hypot",
    "ldexp",
    "log",
    "log10",
    "log2",
    "longjmp",
    "memchr",
    "memcmp",
    "memcpy",
    "memmove",
    "memset",
    "pow",
    "round",
    "sin",
    "sinh",
    "sqrt",
    "strchr",
    "strcmp",
    "strlen",
    "strncat",
    "strncmp",
    "strncpy",
    "tan",
    "tanh",
    "time",
    "timespec_get",
];

#[test]
fn mruby_calls_nothing_that_keeps_a_lock() {
    let library = concat!(env!("OUT_DIR"), "/libnagaya_mruby.a");
    let names = |option: &str| {
        let out = std::process::Command::new("nm").args(["-P", option, library]).output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        let names: std::collections::BTreeSet<String> =
            text.lines().filter_map(|line| line.split_once(' ')).map(|(name, _)| name.to_owned()).collect();
        names
    };
    let used = names("-u");
    let defined = names("--defined-only");
    assert!(used.contains("ng_guarded_mktime"));
    // The linker's own, and our side of the shim.
    let is_ours = |name: &str| {
        name.starts_with("ng_")
            || name.starts_with("_GLOBAL_")
            || ["mrb_basic_alloc_func", "mrb_init_mrblib", "edata", "etext"].contains(&name)
    };
    // Another compiler may call the same functions in their checked forms.
    let plain = |name: &str| name.trim_start_matches("__").trim_end_matches("_chk").to_owned();
    let known =
        |name: &String| CALLED_BY_MRUBY.iter().any(|known| known == name || plain(known) == plain(name));
    let others: Vec<_> = used.difference(&defined).filter(|name| !is_ours(name) && !known(name)).collect();
    assert!(others.is_empty(), "guard it, or list it here if it takes no lock: {others:?}");
}
