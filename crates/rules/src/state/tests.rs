//! State that rules keep, run by engines of several threads: sharing, locks, files of phase `Init`, and hostile rules.

use std::sync::Arc;
use std::sync::mpsc;
use std::thread;

use crate::phase::RulePhase;
use crate::testing::{TestRequest, TestRules, answer_of, evaluate, written};
use crate::{Engine, FaultKind, OnError, RuleFault, RuleSet, Verdict};

/// An own counter with an own lock, as limiters of concurrent requests have it.
const LIMITER: &str = "
class Limiter
  def initialize(key)
    @cache, @key = Userdata.new.counters, key
  end

  def add(by)
    count = [@cache[@key].to_i + by, 0].max
    @cache[@key] = count.to_s
    count
  end
end
u = Userdata.new
u.lock = Mutex.new :global => true
u.counters = Cache.new :namespace => 'limiter'
u.counters.clear
";

const ENTER: &str = "
count = nil
late = Userdata.new.lock.try_lock_loop(50000) do
  begin
    count = Limiter.new(request.host).add(1)
  ensure
    Userdata.new.lock.unlock
  end
end
Apache.rputs(late ? 'late' : count.to_s)
";

/// A file that runs behind one of phase `Init`.
fn with_init(init: &str, rule: &str) -> TestRules {
    let mut rules = TestRules::of(rule);
    rules.add(init).phase = RulePhase::Init;
    rules
}

fn engine(set: &Arc<RuleSet>) -> Engine {
    Engine::new(Arc::clone(set))
}

#[track_caller]
fn fault(source: &str) -> RuleFault {
    let (set, mut engine) = TestRules::of(source).engine();
    assert_eq!(answer_of(&mut engine), "");
    set.status().remove(0).last_fault.expect("it fails")
}

// === Caches ===

#[test]
fn a_cache_has_the_methods_of_localmemcache() {
    let source = "
      c = Cache.new :namespace => 'a', :size_mb => 1
      d = Cache.new :namespace => 'a'
      e = Cache.new :filename => 'a'
      said = [(c['k'] = 'v'), c.set('l', \"\\xff\\0\"), d['k'], d.get('l').bytes, d.get_by_no_lock('k'), e['k'], d.size]
      said += [d.delete('k'), c.delete('k'), c['k'], c.check_consistency, c.shm_status.keys.sort, c.clear, d.size]
      c.close
      said << begin; c['k']; rescue => error; error.message; end
      Apache.rputs said.inspect";
    let keys = ":free_bytes, :free_chunks, :largest_chunk, :total_bytes, :used_bytes";
    let told = format!(
        "[\"v\", nil, \"v\", [255, 0], \"v\", nil, 2, true, false, nil, true, [{keys}], nil, 0, \"Pool is closed\"]"
    );
    assert_eq!(written(source), told);
}

#[test]
fn wrong_use_of_a_cache_raises_with_the_reason() {
    for (source, why) in [
        ("Cache.new", "wrong number of arguments"),
        ("Cache.new 'a'", "expected a Hash"),
        ("Cache.new({})", "needs :namespace or :filename"),
        ("Cache.new :namespace => 5", ":namespace is an Integer"),
        ("Cache.new :namespace => 'n' * 1025", ":namespace is longer than 1024 bytes"),
        ("Cache.new(:namespace => 'a')['k'] = 1", "both key and value must be STRING"),
        ("Cache.new(:namespace => 'a')[nil]", "must be a String"),
        ("Cache.new(:namespace => 'a')['k' * 8193] = ''", "a key of a Cache is longer than 8192 bytes"),
        ("Cache.new(:namespace => 'a')['k'] = 'v' * 65537", "a value of a Cache is longer than 65536 bytes"),
        ("Cache.enable_test_crash", "rules cannot end the server"),
    ] {
        let fault = fault(source);
        assert_eq!(fault.kind, FaultKind::Exception, "{source}");
        assert!(fault.message.contains(why), "{source}: {fault}");
    }
}

#[test]
fn caches_and_values_are_shared_by_threads_of_one_rule_set() {
    let source = "
      cache, u = Cache.new(:namespace => 'a'), Userdata.new
      cache['n'] = (cache['n'].to_i + 1).to_s
      u.n = (u.n || 0) + 1
      Apache.rputs \"#{cache['n']} #{u.n}\"";
    let set = TestRules::of(source).set();
    let told: Vec<_> = (0..3)
        .map(|_| {
            let set = Arc::clone(&set);
            thread::spawn(move || answer_of(&mut engine(&set))).join().unwrap()
        })
        .collect();
    assert_eq!(told, ["1 1", "2 2", "3 3"]);
    assert_eq!(written(source), "1 1", "other rules have their own");
}

#[test]
fn nothing_that_is_kept_is_remembered_as_always_so() {
    for source in ["Cache.new(:namespace => 'a')", "Userdata.new.x", "Mutex.new"] {
        let (_set, mut engine) = TestRules::of(&format!("{source}\nanswer 403")).engine();
        let mut verdict = engine.blank();
        engine.evaluate(RulePhase::AccessChecker, &TestRequest::get("/"), &mut verdict).unwrap();
        let mut again = engine.blank();
        assert!(!engine.recall(RulePhase::AccessChecker, &TestRequest::get("/"), &mut again), "{source}");
    }
}

#[test]
fn a_rule_that_fills_a_cache_evicts_only_its_own_entries() {
    let mut rules = TestRules::of(
        "c = Cache.new(:namespace => 'a')\nn = 0\nloop { c[(n += 1).to_s * 100] = 'v' * 60000 }",
    );
    rules.add("Apache.rputs Cache.new(:namespace => 'a').shm_status[:used_bytes]");
    let (set, mut engine) = rules.engine();
    for _ in 0..5 {
        let used: usize = answer_of(&mut engine).parse().unwrap();
        assert!(used <= 8 << 20, "{used}");
    }
    assert!(matches!(
        set.status()[0].last_fault.as_ref().unwrap().kind,
        FaultKind::Instructions | FaultKind::Memory
    ));
}

// === Values ===

#[test]
fn userdata_keeps_copies_under_any_name() {
    let source = "
      u = Userdata.new
      u.hash = {:a => 1, 'b' => 2.5, 3 => nil}
      copy = u.hash
      copy[:a] = 9
      u.list = [true, :sym, 'text', -(1 << 62)]
      u.request, u.site, u.class, u.nothing = 'r', 's', 'c', nil
      other = Userdata.new 'other'
      Apache.rputs [u.hash, copy[:a], u.list, Userdata.new.request, u.site, u.class, u.nothing, other.site].inspect";
    let told = written(source);
    let expected = "[{a: 1, \"b\" => 2.5, 3 => nil}, 9, [true, :sym, \"text\", -4611686018427387904], \"r\", \"s\", \"c\", nil, nil]";
    let with_arrows = expected.replace("a: 1", ":a => 1");
    assert!(told == expected || told == with_arrows, "{told}");
}

#[test]
fn userdata_refuses_objects_and_what_is_too_much() {
    for (value, why) in [
        ("Object.new", "Userdata keeps nil, booleans"),
        ("[[1]]", "Userdata keeps nil, booleans"),
        ("(0..101).to_a", "Userdata keeps nil, booleans"),
        ("'v' * 65537", "a value of Userdata is longer than 65536 bytes"),
    ] {
        let fault = fault(&format!("Userdata.new.x = {value}"));
        assert!(fault.message.contains(why), "{value}: {fault}");
    }
    let many = fault("n = 0\nloop { Userdata.new((n += 1).to_s).x = n }");
    let told = many.message.contains("Userdata keeps 4096 values");
    assert!(told || many.kind == FaultKind::Instructions, "{many}");
}

// === Locks ===

#[test]
fn a_lock_has_the_methods_of_mruby_mutex() {
    let source = "
      a, b, c = Mutex.new(:global => true), Mutex.new, Mutex.new(:name => 'c')
      said = [a.lock, b.try_lock, c.try_lock, a.unlock, b.unlock, b.try_lock]
      said << a.try_lock_loop(1, 1) { said << 'not reached' }
      said << c.unlock << c.try_lock_loop { said << 'block' }
      said << begin; b.lock; rescue => error; error.message.include?('has the lock already'); end
      Apache.rputs said.inspect";
    assert_eq!(written(source), "[0, false, true, 0, 0, true, true, 0, \"block\", false, true]");
}

/// Has a lock on another thread until the guard is dropped.
struct Holder(Option<mpsc::Sender<()>>, Option<thread::JoinHandle<()>>);

impl Holder {
    fn of(set: &Arc<RuleSet>, name: &'static str) -> Self {
        let set = Arc::clone(set);
        let (end, ended) = mpsc::channel::<()>();
        let (begun, begins) = mpsc::channel();
        let thread = thread::spawn(move || {
            let patience = super::WaitAllowance::default();
            let asked = TestRequest::get("/");
            let run = super::StateRun::new(set.state(), &patience, &asked, RulePhase::Fixups);
            assert_eq!(run.lock(name, std::time::Duration::ZERO), super::LockResult::Yes);
            begun.send(()).unwrap();
            let _ = ended.recv();
        });
        begins.recv().unwrap();
        Self(Some(end), Some(thread))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.0.take());
        self.1.take().unwrap().join().unwrap();
    }
}

#[test]
fn a_lock_that_another_run_keeps_is_waited_for_within_bounds() {
    let source = "
      m = Mutex.new
      said = [m.try_lock, m.unlock]
      said << m.try_lock_loop { said << 'not reached' }
      said << begin; m.lock; rescue => error; error.message.include?('did not come free'); end
      Apache.rputs said.inspect";
    let set = TestRules::of(source).set();
    let holder = Holder::of(&set, "");
    let mut engine = engine(&set);
    // The run comes to its end though the lock is never given back, and takes nothing from who has it.
    assert_eq!(answer_of(&mut engine), "[false, 0, true, true]");
    assert_eq!(answer_of(&mut engine), "[false, 0, true, true]");
    drop(holder);
    assert!(answer_of(&mut engine).starts_with("[true, 0, "));
}

#[test]
fn a_lock_ends_with_its_run_however_that_ends() {
    for kept in [
        "Mutex.new.lock",
        "Mutex.new.lock; raise 'within'",
        "Mutex.new.lock; loop {}",
        "Mutex.new.lock; 'a' * (1 << 40)",
    ] {
        let mut rules = TestRules::of(kept);
        rules.add("Apache.rputs Mutex.new.try_lock");
        let (_set, mut engine) = rules.engine();
        for _ in 0..3 {
            assert_eq!(answer_of(&mut engine), "true", "{kept}");
        }
    }
}

#[test]
fn one_run_holds_few_locks() {
    let fault = fault("17.times { |n| Mutex.new(:name => n.to_s).lock }");
    assert!(fault.message.contains("holds 16 locks at most"), "{fault}");
}

#[test]
fn counts_under_a_lock_are_exact_in_all_threads() {
    const THREADS: usize = 4;
    const EACH: usize = 500;
    let set = with_init(LIMITER, ENTER).set();
    let threads: Vec<_> = (0..THREADS)
        .map(|_| {
            let set = Arc::clone(&set);
            thread::spawn(move || {
                let mut engine = engine(&set);
                (0..EACH).filter(|_| answer_of(&mut engine) != "late").count()
            })
        })
        .collect();
    let counted: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
    // The next one is told how many there were: none was lost, and none counted twice.
    assert_eq!(answer_of(&mut engine(&set)), (counted + 1).to_string());
    assert_eq!(set.status()[0].errors, 0);
}

// === Files of phase `Init` ===

#[test]
fn init_runs_in_each_vm_and_sets_what_is_shared_once() {
    let mut rules = with_init(LIMITER, ENTER);
    rules.add("loop {}").phase = RulePhase::Fixups;
    let set = rules.set();
    let mut engines: Vec<_> = (0..3).map(|_| engine(&set)).collect();
    let told: Vec<_> = engines.iter_mut().map(answer_of).collect();
    assert_eq!(told, ["1", "2", "3"], "a later VM's `clear` clears nothing");
    let killed = |engine: &mut Engine| {
        let mut verdict = engine.blank();
        engine.evaluate(RulePhase::Fixups, &TestRequest::get("/"), &mut verdict).unwrap();
    };
    killed(&mut engines[0]);
    assert_eq!(answer_of(&mut engines[0]), "4", "nor does that of a VM in the place of one that was ended");
    assert_eq!(set.status()[1].evaluations, 4);
}

#[test]
fn no_thread_goes_on_before_the_first_init_has_run() {
    // Long enough for the others to begin meanwhile.
    let init = "2_000.times { |n| n.to_s }\nUserdata.new.greeting = 'hello'\nGREETING = Userdata.new.greeting.upcase";
    let threads = 4;
    let rules = with_init(init, "Apache.rputs GREETING");
    for _ in 0..20 {
        let set = rules.set();
        let begin = Arc::new(std::sync::Barrier::new(threads));
        let run = |_| {
            let set = Arc::clone(&set);
            let begin = Arc::clone(&begin);
            thread::spawn(move || {
                let mut engine = engine(&set);
                begin.wait();
                answer_of(&mut engine)
            })
        };
        let running: Vec<_> = (0..threads).map(run).collect();
        let told: Vec<_> = running.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(told, ["HELLO"; 4]);
        assert_eq!(set.status()[1].errors, 0);
    }
}

#[test]
fn a_changed_init_holds_for_the_next_request_and_begins_anew() {
    let rules = with_init(LIMITER, ENTER);
    let (set, mut engine) = rules.engine();
    assert_eq!([answer_of(&mut engine), answer_of(&mut engine)], ["1", "2"]);
    rules.write(1, &LIMITER.replace("+ by", "+ by * 10"));
    set.refresh();
    assert_eq!([answer_of(&mut engine), answer_of(&mut engine)], ["10", "20"]);
    rules.write(0, &ENTER.replace("add(1)", "add(2)"));
    set.refresh();
    assert_eq!(answer_of(&mut engine), "40", "other files leave it as it is");
}

#[test]
fn init_has_no_request_and_decides_nothing() {
    let init = "HOST = request.host.inspect\nanswer 403\nlimit cpu: '5%'\nlog 'begun'";
    let (_set, mut engine) = with_init(init, "Apache.rputs HOST").engine();
    let (verdict, _) = evaluate(&mut engine);
    assert_eq!(verdict.answer.map(|answer| answer.body), Some(b"nil".to_vec()));
    assert_eq!(verdict.confinement, Default::default());
    let lines: Vec<_> = verdict.log.iter().map(|(_, line)| line.as_str()).collect();
    assert!(lines[0] == "begun" && lines[1].contains("decides nothing"), "{lines:?}");
    assert_eq!(evaluate(&mut engine).0.log, [], "it runs once");
}

#[test]
fn an_init_that_fails_is_what_on_error_says() {
    for source in ["raise 'no'", "loop {}", "if"] {
        let mut rules = with_init(source, "Apache.rputs 'rule'");
        let (set, mut engine) = rules.engine();
        for _ in 0..2 {
            assert_eq!(answer_of(&mut engine), "rule", "{source}");
        }
        let status = set.status().remove(1);
        assert!(status.errors > 0 || matches!(status.state, crate::RuleState::Broken(_)), "{status:?}");
        rules.second().on_error = OnError::Refuse;
        let (_set, mut engine) = rules.engine();
        for _ in 0..2 {
            let (verdict, outcome) = evaluate(&mut engine);
            assert!(outcome.is_err() && verdict == Verdict::default(), "{source}");
        }
        rules.write(1, "");
        let (_set, mut engine) = rules.engine();
        assert_eq!(answer_of(&mut engine), "rule");
    }
}

#[test]
fn beside_an_init_nothing_is_remembered() {
    // It gives a word of the known ones another meaning.
    let init = "module Kernel\n  def node\n    $n = ($n || 0) + 1\n  end\nend";
    let (_set, mut engine) = with_init(init, "Apache.rputs node").engine();
    assert_eq!([answer_of(&mut engine), answer_of(&mut engine)], ["1", "2"]);
}
