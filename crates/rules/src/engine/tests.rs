//! Rules that run, fail, are ended, and change.

use std::fs;
use std::thread;

use super::*;
use crate::testing::{TestRules, answer_of, evaluate, written};
use crate::{FaultKind, RuleState, RuleStatus};

// === What is asked of a rule ===

fn status(set: &RuleSet) -> RuleStatus {
    set.status().remove(0)
}

/// Why a rule failed, which must leave nothing in the verdict.
#[track_caller]
fn fault_of(source: &str) -> RuleFault {
    let (set, mut engine) = TestRules::of(source).engine();
    let (mut verdict, outcome) = evaluate(&mut engine);
    assert_eq!(outcome, Ok(()), "without `refuse` the request goes on");
    verdict.log.clear();
    assert_eq!(verdict, Verdict::default());
    let status = status(&set);
    assert_eq!((status.state, status.errors), (RuleState::InForce, 1), "{source}");
    status.last_fault.expect("an error is counted")
}

/// The same for one that is ended; its engine must go on.
#[track_caller]
fn killed(source: &str) -> RuleFault {
    let mut rules = TestRules::of(&format!("Apache.rputs 'begun'\n{source}"));
    rules.add("Apache.rputs 'next'");
    let (set, mut engine) = rules.engine();
    for _ in 0..3 {
        assert_eq!(answer_of(&mut engine), "next", "{source}");
    }
    let status = status(&set);
    assert_eq!((status.evaluations, status.errors, status.killed, status.killed_in_a_row), (3, 3, 3, 3));
    status.last_fault.expect("an error is counted")
}

// === One decision ===

#[test]
fn one_refused_decision_leaves_the_others() {
    let source = "limit cpu: 'half'\nanswer 403, 'bot'\nlane 'x', run: 0\npriority 'high'\ndemote after: 5\n";
    let (set, mut engine) = TestRules::of(source).engine();
    for _ in 0..2 {
        let (verdict, outcome) = evaluate(&mut engine);
        assert_eq!((outcome, verdict.answer.map(|answer| answer.status)), (Ok(()), Some(403)));
        assert_eq!((verdict.confinement, verdict.lane), (Default::default(), None));
    }
    let told = status(&set);
    assert_eq!((told.evaluations, told.errors), (2, 8), "none of it is remembered");
    let fault = told.last_fault.expect("it is said");
    assert_eq!((fault.kind, fault.line), (FaultKind::Decision, Some(5)), "{fault}");
    assert!(fault.to_string().starts_with("NGY0613: "), "{fault}");
}

#[test]
fn a_refused_decision_is_said_once_with_its_line() {
    let (_set, mut engine) = TestRules::of("x = 1\nlimit cpu: 'half-said'\n").engine();
    let (verdict, _) = evaluate(&mut engine);
    let [(level, line)] = &verdict.log[..] else { panic!("{:?}", verdict.log) };
    assert_eq!(*level, crate::LogLevel::Warning);
    assert!(line.contains(".rb:2: limit: cpu: 'half-said'"), "{line}");
    assert!(line.ends_with("; the request goes on without this decision"), "{line}");
    assert_eq!(evaluate(&mut engine).0.log, [], "not with every request");
}

#[test]
fn a_refused_decision_refuses_the_request_where_rules_must() {
    let mut rules = TestRules::of("answer 403\nlimit cpu: 'half'\n");
    rules.first().on_error = OnError::Refuse;
    let (set, mut engine) = rules.engine();
    let (verdict, outcome) = evaluate(&mut engine);
    assert_eq!((outcome.unwrap_err().kind, verdict.answer), (FaultKind::Decision, None));
    assert_eq!(status(&set).errors, 1);
}

// === Ruby ===

#[test]
fn a_rule_reads_and_decides() {
    let rules = TestRules::of("Apache.rputs Apache::Request.new.hostname");
    let (set, mut engine) = rules.engine();
    let (verdict, outcome) = evaluate(&mut engine);
    assert_eq!((outcome, verdict.answer.unwrap().body), (Ok(()), b"www.example.com".to_vec()));
    let spoke = &verdict.spoke[0];
    assert_eq!((&*spoke.file, spoke.phase), (rules.path(0).to_str().unwrap(), RulePhase::AccessChecker));
    assert_eq!(spoke.decided.topics().map(crate::VerdictTopic::as_str).collect::<Vec<_>>(), ["answer"]);
    assert_eq!((status(&set).evaluations, status(&set).errors), (1, 0));
}

#[test]
fn the_ruby_that_rules_are_written_in_works() {
    let source = r##"
        class Limits
          include Comparable
          attr_reader :share
          def initialize(share:, name: "cell") = (@share, @name = share, name)
          def <=>(other) = share <=> other.share
          def to_s = "#{@name}:#{share}"
        end
        def twice
          yield + yield
        end
        words = %w(b a c).sort.each_with_index.map { |word, at| "#{word}#{at}" }
        begin
          raise ArgumentError, "told"
        rescue => error
          words << error.message
        ensure
          words << "ensured"
        end
        words << [Limits.new(share: 2), Limits.new(share: 1, name: "low")].min.to_s
        words << format("%05.1f", twice { 1.25 }) << (1..4).select(&:even?).sum.to_s
        words << case 7 when 1..5 then "low" when Integer then "int" end
        words << { "k" => 1, sym: nil }.inspect << Set.new([1, 1, 2]).size.to_s
        words << catch(:done) { throw :done, "thrown" } << "héé".size.to_s << Time.at(0).utc.hour.to_s
        Apache.rputs words.join(" ")
    "##;
    assert_eq!(
        written(source),
        r#"a0 b1 c2 told ensured low:1 002.5 6 int {"k" => 1, sym: nil} 2 thrown 3 0"#
    );
}

#[test]
fn nothing_of_the_machine_can_be_reached() {
    for call in [
        "File.open('/etc/passwd')",
        "`id`",
        "system('id')",
        "IO.popen('id')",
        "Dir.entries('/')",
        "eval('1')",
        "sleep 1",
        "exit",
        "require 'socket'",
        "ObjectSpace.each_object {}",
        "TCPSocket.open('127.0.0.1', 80)",
    ] {
        let fault = fault_of(call);
        assert_eq!(fault.kind, FaultKind::Exception, "{call}");
        let classes = ["(NoMethodError)", "(NameError)", "(NotImplementedError)"];
        assert!(classes.iter().any(|class| fault.message.ends_with(class)), "{fault}");
    }
}

#[test]
fn lists_are_searched_by_value() {
    let source = r"
        list = ['a', 1, :s, nil, [1, 'x'], 2.0]
        found = ['a', 1, :s, nil, [1, 'x'], 2].map { |value| list.include?(value) }
        missed = ['b', 3, :t, [1], 's'].map { |value| list.member?(value) }
        Apache.rputs [found.all?, missed.any?, list.index('a'), list.index([1, 'x'])].inspect
    ";
    assert_eq!(written(source), "[true, false, 0, 4]");
}

// === Failures ===

#[test]
fn an_exception_is_told_with_its_line_in_the_rule() {
    for (source, line, message) in [
        ("a = 1\n\nraise 'no'", 3, "no (RuntimeError)"),
        ("def f\n  [1].each { |x| x.nope }\nend\nf", 2, "undefined method 'nope'"),
        ("a = 1\nCgroup::CPU.new\n", 2, "ArgumentError"),
        ("# é\nCgroup::CPU.new(7)", 2, "TypeError"),
        ("x = 1\nraise Class.new(StandardError) { def message = loop {} }", 2, ""),
        ("def f(n) = f(n + 1)\nf(0)", 1, "SystemStackError"),
        ("f = ->(n) { [n].each { |m| f.(m) } }\nf.(0)", 1, "SystemStackError"),
        ("def f(n) = [3, 1, 2].sort { |a, b| f(n) }\nf(0)", 1, "SystemStackError"),
        ("x = []\nx[1 << 40] = 1", 2, "too big"),
        ("def message = 1\nFiber.yield", 2, "FiberError"),
    ] {
        let fault = fault_of(source);
        assert!(fault.message.contains(message), "{source}: {fault}");
        assert_eq!(fault.line, Some(line), "{source}: {fault}");
        assert!(fault.to_string().starts_with("NGY060"), "{fault}");
        assert!(fault.to_string().contains(&format!("0.rb:{line}: ")), "{fault}");
    }
}

#[test]
fn a_failed_rules_decisions_are_dropped_and_others_stay() {
    let mut rules = TestRules::of("Apache::Request.new.notes['first'] = '1'");
    rules.add("r = Apache::Request.new\nr.notes['first'] = '2'\nr.notes['second'] = '2'\nraise 'half-way'");
    rules.add("Apache::Request.new.notes['third'] = '3'");
    let (_, mut engine) = rules.engine();
    let (verdict, outcome) = evaluate(&mut engine);
    assert_eq!(outcome, Ok(()));
    let notes: Vec<_> = verdict.notes.iter().map(|(name, value)| (&**name, &**value)).collect();
    assert_eq!(notes, [("first", "1"), ("third", "3")]);
    assert_eq!(verdict.spoke.len(), 2);
}

#[test]
fn a_rule_that_must_not_fail_refuses() {
    for source in ["raise 'no'", "loop {}", "if"] {
        let mut rules = TestRules::of("Apache::Request.new.notes['a'] = 'b'");
        rules.add(source).on_error = OnError::Refuse;
        let (_, mut engine) = rules.engine();
        let (verdict, outcome) = evaluate(&mut engine);
        let fault = outcome.expect_err(source);
        assert!(fault.file.ends_with("1.rb"), "{fault}");
        assert_eq!(verdict.notes.len(), 1, "what the first rule said stays");
    }
}

#[test]
fn files_after_one_that_answers_do_not_run() {
    let mut rules = TestRules::of("Apache.return 403");
    rules.add("raise 'not reached'");
    let (set, mut engine) = rules.engine();
    let (verdict, _) = evaluate(&mut engine);
    assert_eq!(verdict.answer.unwrap().status, 403);
    assert_eq!(set.status()[1].evaluations, 0);
}

#[test]
fn log_of_a_failed_rule_is_kept() {
    let (_, mut engine) = TestRules::of("Apache.log Apache::APLOG_ERR, 'so far'\nraise 'no'").engine();
    let (verdict, _) = evaluate(&mut engine);
    assert_eq!(verdict.log.len(), 1);
    assert!(verdict.log[0].1.contains("so far"));
    assert!(verdict.spoke.is_empty());
}

// === Budgets ===

#[test]
fn rule_that_runs_for_ever_is_ended() {
    for (source, line) in [
        ("loop {}", 2),
        ("a = 1\nwhile true\n  a += 1\nend", 4),
        ("begin\n  loop {}\nrescue Exception\n  retry\nend", 3),
        ("while true\n  begin\n    raise 'x'\n  rescue Exception\n  end\nend", 0),
        ("begin\n  loop {}\nensure\n  loop {}\nend", 3),
        ("(10**12).times { }", 2),
        ("(1..Float::INFINITY).each { |x| x }", 2),
        ("[3, 1, 2].sort { |a, b| loop {} }", 2),
        ("Fiber.new { loop {} }.resume", 2),
        ("def method_missing(*) = loop {}\nnope", 2),
        ("class X < StandardError\n  def message\n    loop {}\n  end\nend\nraise X", 0),
    ] {
        let fault = killed(source);
        assert_eq!(fault.kind, FaultKind::Instructions, "{source}: {fault}");
        assert!(line == 0 || fault.line.is_some_and(|at| at.abs_diff(line) <= 1), "{source}: {fault}");
    }
}

#[test]
fn rule_that_takes_all_memory_is_ended() {
    for source in [
        "'a' * (1 << 30)",
        "a = []\nloop { a << 'x' * 100_000 }",
        "a = []\nbegin\n  loop { a << 'x' * 1_000_000 }\nrescue Exception\n  retry\nend",
        "a = ['x' * 1_000_000]\nloop { a << a[-1] + '' }",
        "h = {}\ni = 0\nwhile true\n  h[i] = 'x' * 10_000\n  i += 1\nend",
    ] {
        let fault = killed(source);
        assert_eq!(fault.kind, FaultKind::Memory, "{source}: {fault}");
        assert!(fault.line.is_some(), "{source}: {fault}");
    }
}

#[test]
fn memory_that_is_only_copied_counts_as_work() {
    let fault = killed("loop { 'x' * 1_000_000 }");
    // A slow machine needs about the time of an evaluation for as many bytes.
    assert!(matches!(fault.kind, FaultKind::Instructions | FaultKind::Time), "{fault}");
}

#[test]
fn a_flood_of_symbols_is_ended() {
    let fault = killed("i = 0\nwhile true\n  \"name#{i}\".to_sym\n  i += 1\nend");
    assert_eq!(fault.kind, FaultKind::Memory, "{fault}");
    assert!(fault.message.contains("symbols"), "{fault}");
}

#[test]
fn symbols_that_trickle_in_wear_a_vm_out() {
    let source = "$n = ($n || 0) + 1\n500.times { |i| \"n#{$n}x#{i}\".to_sym }\nApache.rputs $n.to_s";
    let (set, mut engine) = TestRules::of(source).engine();
    let counts: Vec<u32> = (0..40).map(|_| answer_of(&mut engine).parse().unwrap()).collect();
    assert_eq!(status(&set).errors, 0);
    // A global variable is gone with its VM.
    assert!(counts.iter().filter(|count| **count == 1).count() >= 2, "{counts:?}");
    assert!(*counts.iter().max().unwrap() >= 10, "{counts:?}");
}

#[test]
fn memory_that_is_kept_wears_a_vm_out() {
    let source = "$kept ||= []\n$kept << 'x' * 1_000_000\nApache.rputs $kept.size.to_s";
    let (set, mut engine) = TestRules::of(source).engine();
    let sizes: Vec<usize> = (0..40).map(|_| answer_of(&mut engine).parse().unwrap()).collect();
    assert_eq!(status(&set).errors, 0, "it is never ended by its budget");
    assert!(*sizes.iter().max().unwrap() <= 12, "{sizes:?}");
}

#[test]
fn large_programs_leave_evaluations_their_memory() {
    // Some 20 KiB of text each, more than 1 MiB when loaded.
    let text = |round| (0..1000).map(|n| format!("a{n} = '{round}text {n}'\n")).collect::<String>();
    let mut rules = TestRules::of("");
    for _ in 0..crate::RULE_FILES_MAX - 2 {
        rules.add(&text(0));
    }
    rules.add("$n = ($n || 0) + 1\n$kept ||= 'x' * 300_000\nApache.rputs $n.to_s");
    let (set, mut engine) = rules.engine();
    set.set_budget(RuleBudget { memory: crate::vm::MEMORY_MIN, ..RuleBudget::default() });
    for n in 1..=5 {
        assert_eq!(answer_of(&mut engine), n.to_string(), "the VM stays");
        (1..crate::RULE_FILES_MAX - 1).for_each(|at| rules.write(at, &text(n)));
        set.refresh();
    }
    assert!(set.status().iter().all(|status| status.errors == 0));
}

#[test]
fn a_budget_can_be_changed() {
    let (set, mut engine) = TestRules::of("50_000.times { }\nApache.rputs 'done'").engine();
    assert_eq!(answer_of(&mut engine), "");
    set.set_budget(RuleBudget { instructions: 10_000_000, ..RuleBudget::default() });
    assert_eq!(answer_of(&mut engine), "done");
}

#[test]
fn a_rule_that_is_ended_time_and_again_says_so_and_still_runs() {
    let rules = TestRules::of("loop {}");
    let (set, mut engine) = rules.engine();
    for _ in 0..20 {
        evaluate(&mut engine).1.unwrap();
    }
    assert_eq!((status(&set).killed, status(&set).killed_in_a_row), (20, 20));
    rules.write(0, "Apache.rputs 'mended'");
    set.refresh();
    assert_eq!(answer_of(&mut engine), "mended");
    let status = status(&set);
    assert_eq!((status.killed, status.killed_in_a_row, status.last_fault), (20, 0, None));
}

// === Natives ===

#[test]
fn objects_that_were_made_in_no_ordinary_way_are_refused() {
    for source in [
        "Cgroup::CPU.allocate.shares = 1",
        "c = Cgroup::CPU.new('a').dup\nc.shares = 1",
        "Regexp.allocate.match?('a')",
        "class T < Time\nend\nRegexp.instance_method(:match?).bind(Time.now)",
    ] {
        let fault = fault_of(source);
        assert_eq!(fault.kind, FaultKind::Exception, "{source}: {fault}");
        assert!(fault.message.contains("TypeError") || fault.message.contains("NoMethodError"), "{fault}");
    }
    assert_eq!(written("c = Cgroup::CPU.new('a')\nc.send(:initialize, 'b')\nApache.rputs c.group_name"), "b");
}

#[test]
fn an_exception_of_a_native_can_be_rescued() {
    let source = "begin\n  Cgroup::CPU.new(1)\nrescue TypeError => e\n  Apache.rputs e.class.to_s\nend";
    assert_eq!(written(source), "TypeError");
}

#[test]
fn strings_that_are_not_utf8_do_no_harm() {
    let fault = fault_of("Apache::Request.new.notes[\"a\\xff\"] = 'b'");
    assert!(fault.message.contains("UTF-8"), "{fault}");
    assert_eq!(written("Apache.rputs(\"\\xffab\" =~ /b/)").as_str(), "2");
}

// === Time ===

#[test]
fn a_hundred_thousand_evaluations_leave_nothing_behind() {
    let source = "
        r = Apache::Request.new
        c = Cgroup::CPU.new 'cell'
        c.shares = 25
        raise 'now and then' if r.uri =~ /Main/ && ($n = ($n || 0) + 1) % 100 == 0
    ";
    let (set, mut engine) = TestRules::of(source).engine();
    let mut evaluate_many = |count: u32| {
        for _ in 0..count {
            evaluate(&mut engine).1.unwrap();
        }
        engine.vm.as_mut().unwrap().footprint()
    };
    let early = evaluate_many(10_000);
    let late = evaluate_many(90_000);
    assert_eq!((status(&set).evaluations, status(&set).errors), (100_000, 1_000));
    assert_eq!(early.symbols, late.symbols);
    assert!(late.memory <= early.memory + 64 * 1024, "{early:?} {late:?}");
    assert!(late.objects <= early.objects + 100, "{early:?} {late:?}");
}

#[test]
fn threads_have_vms_of_their_own() {
    let rules = TestRules::of("$n = ($n || 0) + 1\nApache.rputs $n.to_s");
    let set = rules.set();
    let threads: Vec<_> = (0..2)
        .map(|_| {
            let set = Arc::clone(&set);
            thread::spawn(move || {
                let mut engine = Engine::new(set);
                (1..=5_000).for_each(|n| assert_eq!(answer_of(&mut engine), n.to_string()));
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(status(&set).evaluations, 10_000);
}

#[test]
fn rules_change_under_evaluations_of_other_threads() {
    let rules = TestRules::of("Apache.rputs '0'");
    let set = rules.set();
    let thread = thread::spawn({
        let set = Arc::clone(&set);
        move || {
            let mut engine = Engine::new(set);
            let mut last = 0;
            while last < 200 {
                let now: u32 = answer_of(&mut engine).parse().unwrap();
                assert!(now >= last, "an older version came back");
                last = now;
            }
        }
    });
    for version in 1..=200 {
        // As editors do: a new file takes the name of the old.
        let new = rules.path(99);
        fs::write(&new, format!("Apache.rputs '{version}'")).unwrap();
        fs::rename(new, rules.path(0)).unwrap();
        set.refresh();
    }
    thread.join().unwrap();
    assert_eq!(status(&set).errors, 0);
}

// === Time ===

/// One call of C, of seconds.
const LONG_CALL: &str = "('a' * 800_000).index('a' * 400_000 + 'b')";

#[test]
fn one_call_that_takes_long_is_ended() {
    let fault = killed(LONG_CALL);
    assert_eq!((fault.kind, fault.line), (FaultKind::Time, Some(2)), "{fault}");
    assert!(fault.to_string().starts_with("NGY0609: "), "{fault}");
    // An exception's own method is asked for its message.
    let fault =
        killed(&format!("class X < StandardError\n  def message\n    {LONG_CALL}\n  end\nend\nraise X"));
    assert_eq!((fault.kind, fault.line), (FaultKind::Time, Some(4)), "{fault}");
}

#[test]
fn a_slow_file_is_set_aside_until_it_changes() {
    for cache in [false, true] {
        let mut rules = TestRules::of(LONG_CALL);
        rules.add("Apache.rputs 'next'");
        rules.first().cache = cache;
        let (set, mut engine) = rules.engine();
        for _ in 0..5 {
            assert_eq!(answer_of(&mut engine), "next");
        }
        let now = status(&set);
        assert_eq!((now.evaluations, now.killed), (3, 3), "two more would have stopped the thread");
        let RuleState::SetAside(fault) = now.state else { panic!("{:?}", now.state) };
        assert_eq!(fault.kind, FaultKind::Time);
        assert_eq!(answer_of(&mut Engine::new(Arc::clone(&set))), "next", "another thread knows it too");
        rules.write(0, "Apache.rputs 'mended'");
        set.refresh();
        assert_eq!(answer_of(&mut engine), "mended");
        assert_eq!(status(&set).state, RuleState::InForce);
    }
}

#[test]
fn a_file_that_takes_long_for_some_requests_stays() {
    let source =
        format!("$n = 0 unless $n\n{LONG_CALL} if Apache::Request.new.uri == '/long'\nApache.rputs 'fine'");
    let (set, mut engine) = TestRules::of(&source).engine();
    let ask = |engine: &mut Engine, path: &str| {
        let mut verdict = engine.blank();
        engine
            .evaluate(RulePhase::AccessChecker, &crate::testing::TestRequest::get(path), &mut verdict)
            .unwrap();
        verdict.answer.is_some()
    };
    for _ in 0..2 {
        assert!(!ask(&mut engine, "/long"));
        assert!(!ask(&mut engine, "/long"));
        assert!(ask(&mut engine, "/"));
    }
    assert_eq!((status(&set).state, status(&set).killed), (RuleState::InForce, 4));
}

#[test]
fn a_set_aside_file_that_must_not_fail_refuses() {
    let mut rules = TestRules::of(LONG_CALL);
    rules.first().on_error = OnError::Refuse;
    let (_set, mut engine) = rules.engine();
    for _ in 0..4 {
        assert_eq!(evaluate(&mut engine).1.unwrap_err().kind, FaultKind::Time);
    }
}

#[test]
fn a_text_that_takes_long_to_compile_is_refused() {
    let fault = crate::check(format!("f({}1)", "1,".repeat(24_000)).as_bytes(), "store:a").unwrap_err();
    assert_eq!(fault.kind, FaultKind::Compile, "{fault}");
    assert!(fault.to_string().starts_with("NGY0610: store:a: "), "{fault}");
    let fault = crate::check(&vec![b'#'; crate::SOURCE_LEN_MAX + 1], "store:a").unwrap_err();
    assert_eq!(fault.kind, FaultKind::Unreadable, "{fault}");
    let usual = "answer 403 if request.path =~ /wiki/ && [1, 2].map { |n| n.to_s }.include?(request.host)\n";
    assert_eq!(crate::check(usual.repeat(200).as_bytes(), "store:a"), Ok(()), "far from the limit");
}

#[test]
fn a_list_that_shrinks_while_it_is_sorted_is_noticed() {
    let source = |list: &str| {
        format!(
            "begin\n  a = {list}\n  a.sort! {{ a.pop; 1 }}\nrescue => error\n  Apache.rputs error.message\nend"
        )
    };
    for list in ["[3, 2, 1]", "(0..99).to_a"] {
        assert_eq!(written(&source(list)), "array modified during sort", "{list}");
    }
    assert_eq!(written("Apache.rputs [3, 1, 2].sort { |a, b| b <=> a }.inspect"), "[3, 2, 1]");
}

#[test]
fn the_built_in_mruby_is_the_one_with_listed_faults() {
    let list = include_str!("../../../../docs/bundled-c.md");
    let row = format!("| mruby | {} | `libnghttp2-sys` ", crate::MRUBY_VERSION);
    assert!(
        list.contains(&row),
        "look for advisories of this version, then list it in docs/bundled-c.md: {row}"
    );
}
