//! One machine, with natives of the test's own.

use super::*;
use crate::testing::Asked;

const NATIVES: &[Native] = &[
    Native::singleton("Probe", "show", |call| {
        let text = call.args().iter().map(|arg| format!("{arg:?}")).collect::<Vec<_>>().join(" ");
        call.verdict.write(text.as_bytes())?;
        Ok(Value::This)
    }),
    Native::singleton("Probe", "give", |call| {
        let inner = Value::List(vec![Value::Int(1), Value::Float(0.5), Value::from("borrowed")]);
        let owned = Value::from(call.facts.text(crate::Text::Path).map(Cow::into_owned));
        Ok(Value::Map(vec![
            ("list".into(), inner),
            ("owned".to_owned().into(), owned),
            ("nil".into(), Value::Nil),
        ]))
    }),
    Native::singleton("Probe", "fail", |call| {
        Err(match call.int(0)? {
            0 => NativeError::wrong_type("type"),
            1 => NativeError::argument(format!("argument {}", "ä".repeat(2000))),
            _ => NativeError::runtime("runtime"),
        })
    }),
    Native::singleton("Probe", "panic", |_| panic!("a defect of a native")),
    Native::method("Probe", "initialize", |call| {
        let guard = Guard::new(call.text(0)?);
        call.keep(guard);
        Ok(Value::Nil)
    }),
    Native::method("Probe", "name", |call| Ok(call.this::<Guard>()?.0.clone().into())),
];

thread_local! {
    static GUARDS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
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
fn machine() -> Machine {
    let mut machine = Machine::open(NATIVES).unwrap();
    for unit in Machine::units() {
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

fn limits() -> Limits {
    Limits { instructions: 100_000, memory: 16 << 20, symbols: 100 }
}

fn load(machine: &mut Machine, source: &str) -> Program {
    let code = machine.compile(source.as_bytes(), c"probe.rb", true).unwrap();
    machine.load(&code).unwrap()
}

/// Runs it within a request, and gives what `Probe.show` wrote.
fn run(machine: &mut Machine, source: &str) -> Result<String, Failure> {
    let program = load(machine, source);
    let mut verdict = Verdict::default();
    let mut scope = Scope { facts: &Asked::get("/path"), verdict: &mut verdict, phase: Phase::Fixups };
    let outcome = machine.run(program, Some(&mut scope));
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
    assert_eq!((&*failure.class, failure.status), ("ArgumentError", Status::Exception));
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
fn what_a_native_refuses_is_raised_where_it_was_called() {
    let mut machine = machine();
    for (number, class) in [(0, "TypeError"), (1, "ArgumentError"), (2, "RuntimeError")] {
        let failure = run(&mut machine, &format!("\n\nProbe.fail({number})")).unwrap_err();
        assert_eq!((&*failure.class, failure.status), (class, Status::Exception));
        assert_eq!(failure.backtrace[0].split(":in").next(), Some("probe.rb:3"));
        assert!(failure.message.len() < MESSAGE_LEN);
    }
}

#[test]
fn a_native_that_panics_raises() {
    let mut machine = machine();
    let failure = run(&mut machine, "Probe.panic").unwrap_err();
    assert_eq!((&*failure.class, failure.status), ("RuntimeError", Status::Exception));
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
    assert_eq!((failure.status, failure.line), (Status::Instructions, Some(1)));
    assert!(GUARDS.get() > 0);
    assert_eq!(run_again(&mut machine).status, Status::Failed);
    drop(machine);
    assert_eq!(GUARDS.get(), 0);
}

/// After a run was ended nothing runs any more.
fn run_again(machine: &mut Machine) -> Failure {
    machine.run(Program(0), None).unwrap_err()
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
    let mut machine = Machine::open(&[]).unwrap();
    for (source, line) in
        [("x = 1\nif x\n", 3), ("a = (1\nb", 2), ("'open", 1), ("$1 = 2", 1), ("def f\n  @@ = 1\nend", 2)]
    {
        let failure = machine.compile(source.as_bytes(), c"a.rb", true).unwrap_err();
        assert_eq!(failure.status, Status::Syntax, "{source}");
        assert!(failure.line.is_some_and(|at| at.abs_diff(line) <= 1), "{source}: {failure:?}");
        assert!(!failure.message.is_empty(), "{source}");
    }
    let nested = "(".repeat(30_000);
    let wide = format!("a = {}", vec!["1"; 30_000].join(" + "));
    let binary: Vec<u8> = (1..=255).cycle().take(60_000).collect();
    for source in [nested.as_bytes(), wide.as_bytes(), &binary] {
        assert_eq!(machine.compile(source, c"a.rb", true).unwrap_err().status, Status::Syntax);
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
