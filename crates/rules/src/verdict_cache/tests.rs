//! Which runs are spared, and that a spared run says what a run would have said.

use proptest::prelude::*;

use super::*;
use crate::Engine;
use crate::phase::RulePhase;
use crate::testing::{TestRequest, TestRules};

fn ask(engine: &mut Engine, request: &TestRequest) -> Rc<Verdict> {
    let mut verdict = engine.blank();
    if !engine.recall(RulePhase::AccessChecker, request, &mut verdict) {
        engine.evaluate(RulePhase::AccessChecker, request, &mut verdict).unwrap();
    }
    verdict
}

/// What a run says, whatever is remembered.
fn run(engine: &mut Engine, request: &TestRequest) -> Verdict {
    let mut verdict = Rc::new(Verdict::default());
    engine.evaluate(RulePhase::AccessChecker, request, &mut verdict).unwrap();
    Rc::unwrap_or_clone(verdict)
}

/// Whether later ones of equal requests are spared a run: they share a verdict then.
#[track_caller]
fn is_remembered(source: &str) -> bool {
    let (set, mut engine) = TestRules::of(source).engine();
    let request = TestRequest { agent: Some("curl".into()), ..TestRequest::host("a.example") };
    let [first, second, third] = std::array::from_fn(|_| ask(&mut engine, &request));
    assert_eq!(set.status()[0].last_fault, None, "{source}");
    assert_eq!(set.status()[0].evaluations, 3, "a spared run counts too");
    let is_same = |a: &Rc<Verdict>, b: &Rc<Verdict>| Rc::ptr_eq(a, b);
    if is_same(&second, &third) {
        assert_eq!(first, second);
    }
    is_same(&second, &third)
}

#[test]
fn a_rule_that_asks_for_what_can_be_asked_again_is_spared_runs() {
    for source in [
        "limit cpu: \"10%\" if request.host == \"a.example\"",
        "r = Apache::Request.new\nif %w(a.example b.example).include? r.hostname\n  c = Cgroup::CPU.new \"x\"\n  c.shares = 25\n  \
         c.exist? ? c.modify : c.create\n  c.attach\nend",
        "answer 403 if request.header[\"User-Agent\"] =~ /curl/",
        "limit cpu: KVS.get(request.host) || \"50%\"",
        "answer 503 if site_rests? and request.user_agent =~ /bot/",
        "request.path.split(\"/\").each { |part| lane \"x\", run: 2 if part == \"slow\" }",
        "nil",
    ] {
        assert!(is_remembered(source), "{source}");
    }
}

#[test]
fn rule_with_varying_or_lasting_state_runs_each_time() {
    for source in [
        "limit cpu: \"10%\" if now.hour < 25",
        "limit cpu: \"10%\" if node.load < 1",
        "answer 200, request.id",
        "limit cpu: \"10%\" if rand < 2",
        "$count = ($count || 0) + 1",
        "@seen ||= request.host",
        "def slow; limit cpu: \"10%\"; end\nslow",
        "class String; def shout; upcase; end; end\nanswer 200, request.host.shout",
        "LIMIT = \"10%\" unless Object.const_defined?(:LIMIT)",
        "limit cpu: \"10%\" if request.elapsed_ms >= 0",
        "log \"seen\"",
    ] {
        assert!(!is_remembered(source), "{source}");
    }
}

#[test]
fn a_cached_verdict_asks_no_more_than_the_rule_did() {
    let (_set, mut engine) = TestRules::of("limit cpu: \"10%\" if request.host == \"a.example\"").engine();
    let request = TestRequest::host("a.example");
    ask(&mut engine, &request);
    request.questions.set(0);
    assert!(ask(&mut engine, &request).confinement.limits.cpu.is_some());
    assert_eq!(request.questions.get(), 1);
    assert!(ask(&mut engine, &TestRequest::host("b.example")).is_silent());
}

#[test]
fn a_changed_file_is_believed_at_once() {
    let rules = TestRules::of("limit cpu: \"10%\"");
    let (set, mut engine) = rules.engine();
    let request = TestRequest::host("a.example");
    assert_eq!(ask(&mut engine, &request), ask(&mut engine, &request));
    rules.write(0, "answer 403");
    set.refresh();
    assert!(ask(&mut engine, &request).answer.is_some());
}

#[test]
fn a_later_phase_is_told_what_an_earlier_one_decided() {
    let mut rules = TestRules::of("Apache::Request.new.notes[\"who\"] = request.host");
    rules.add("answer 200, Apache::Request.new.notes[\"who\"]").phase = RulePhase::Fixups;
    let (_set, mut engine) = rules.engine();
    for host in ["a.example", "b.example", "a.example", "b.example"] {
        let mut verdict = ask(&mut engine, &TestRequest::host(host));
        engine.evaluate(RulePhase::Fixups, &TestRequest::host("other"), &mut verdict).unwrap();
        assert_eq!(verdict.answer.as_ref().unwrap().body, host.as_bytes());
        assert!(ask(&mut engine, &TestRequest::host(host)).answer.is_none(), "the shared one is as it was");
    }
}

#[test]
fn a_cell_that_comes_or_goes_changes_the_verdict() {
    let source = "c = Cgroup::CPU.new \"x\"\nanswer(c.exist? ? 204 : 404)";
    let (_set, mut engine) = TestRules::of(source).engine();
    let request = TestRequest::host("a.example");
    let status = |engine: &mut Engine| ask(engine, &request).answer.as_ref().unwrap().status;
    assert_eq!([status(&mut engine), status(&mut engine)], [404, 404]);
    request.cells.borrow_mut().push("x".into());
    assert_eq!([status(&mut engine), status(&mut engine)], [204, 204]);
    request.cells.borrow_mut().clear();
    assert_eq!(status(&mut engine), 404);
}

#[test]
fn rules_that_contradict_themselves_are_not_remembered() {
    let mut remembered = VerdictCache::new(&Rc::default());
    let says = |status| {
        let mut verdict = Verdict::default();
        verdict.set_status(status).unwrap();
        Rc::new(verdict)
    };
    let trail = |host: &str| vec![(FactKey::Text(TextFact::Hostname), FactValue::Text(host.into()))];
    remembered.learn(trail("a"), &says(403), 1);
    assert!(remembered.find(&TestRequest::host("a")).is_some());
    remembered.learn(trail("a"), &says(404), 1);
    assert!(remembered.find(&TestRequest::host("a")).is_none() && !remembered.wants());
    let mut other = VerdictCache::new(&Rc::default());
    other.learn(trail("a"), &says(403), 1);
    other.learn(vec![(FactKey::Tls, FactValue::Number(0))], &says(403), 1);
    assert!(!other.wants(), "its first question was another one");
}

#[test]
fn the_verdict_cache_is_bounded_and_rests_without_hits() {
    let mut remembered = VerdictCache::new(&Rc::default());
    let blank = Rc::default();
    for n in 0..=ANSWERS_MAX {
        assert!(remembered.wants());
        let told = FactValue::Text(format!("h{n}").into());
        remembered.learn(vec![(FactKey::Text(TextFact::Hostname), told)], &blank, 1);
    }
    assert!(remembered.answers <= 1, "it was full, and forgot");
    assert!(!remembered.wants(), "nobody asked for any of it");
}

#[test]
fn long_values_are_asked_anew_and_others_kept_with_text() {
    let long = "answer 200, request.path * 2000";
    let (_set, mut engine) = TestRules::of(long).engine();
    let request = TestRequest::get("/0123456789");
    let [second, third] = std::array::from_fn(|_| ask(&mut engine, &request));
    assert_eq!(second, third);
    assert!(!Rc::ptr_eq(&second, &third), "more than {VERDICT_LEN_MAX} bytes");

    let mut remembered = VerdictCache::new(&Rc::default());
    for n in 0..3 * BYTES_MAX / VERDICT_LEN_MAX {
        let mut verdict = Verdict::default();
        verdict.write(n.to_string().repeat(VERDICT_LEN_MAX / 16).as_bytes()).unwrap();
        let told = FactValue::Text(n.to_string().into());
        remembered.learn(vec![(FactKey::Text(TextFact::Path), told)], &Rc::new(verdict), 1);
        assert!(remembered.bytes <= BYTES_MAX + VERDICT_LEN_MAX, "{}", remembered.bytes);
    }
}

const RULE: &str = "\
case request.host
when \"a\"
  limit cpu: \"10%\" if request.path.start_with?(\"/slow\")
when \"b\"
  answer 403 if request.header[\"User-Agent\"] == \"bot\"
else
  lane KVS.get(request.host).to_s + \"x\", run: 3
end
c = Cgroup::BLKIO.new \"g\"
c.attach if c.exist?
";

proptest! {
    #[test]
    fn a_spared_run_says_what_a_run_would_have_said(
        requests in prop::collection::vec(
            ("[abcd]", "(/slow|/x)", prop::option::of("(bot|man)"), any::<bool>(), prop::option::of(0..3_i64)),
            1..40,
        )
    ) {
        let (_set, mut engine) = TestRules::of(RULE).engine();
        for (host, path, agent, has_cell, setting) in requests {
            let request = TestRequest { host: host.clone(), path, agent, ..TestRequest::default() };
            request.cells.borrow_mut().extend(has_cell.then(|| "g".to_owned()));
            let settings = setting.map(|value| (host, value)).into_iter().collect();
            let request = TestRequest { settings, ..request };
            let said = ask(&mut engine, &request);
            prop_assert_eq!(&*said, &run(&mut engine, &request));
        }
    }
}

#[test]
fn whether_a_site_rests_is_asked_again_for_each_request() {
    let (_set, mut engine) =
        TestRules::of("answer 503 if site_rests? and request.user_agent =~ /bot/").engine();
    let crawler =
        |rests_for| TestRequest { agent: Some("a bot".into()), rests_for, ..TestRequest::host("a.example") };
    for _ in 0..3 {
        assert!(ask(&mut engine, &crawler(u32::MAX)).answer.is_some());
        assert!(ask(&mut engine, &crawler(0)).answer.is_none());
    }
    let visitor = TestRequest { agent: Some("curl".into()), ..crawler(u32::MAX) };
    assert!(ask(&mut engine, &visitor).answer.is_none());
}

#[test]
fn a_site_that_wakes_during_a_rule_rests_until_its_end() {
    let twice = "answer 503 if site_rests? && (1 + 1 == 2) && site_rests?";
    let (_set, mut engine) = TestRules::of(twice).engine();
    let resting = |rests_for| TestRequest { rests_for, ..TestRequest::host("a.example") };
    for _ in 0..3 {
        assert!(ask(&mut engine, &resting(1)).answer.is_some(), "it rested when it was asked for");
        assert!(ask(&mut engine, &resting(0)).answer.is_none());
    }
}
