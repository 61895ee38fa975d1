//! The files of a node as they come, change and go.

use std::fs;

use super::*;
use crate::testing::{TestRules, answer_of, evaluate};
use crate::{Engine, FaultKind};

fn kind(set: &RuleSet) -> Option<FaultKind> {
    match set.status().remove(0).state {
        RuleState::InForce => None,
        RuleState::Broken(fault) | RuleState::SetAside(fault) => Some(fault.kind),
    }
}

#[test]
fn a_change_is_in_force_for_the_next_request() {
    let rules = TestRules::of("Apache.rputs 'old'");
    let (set, mut engine) = rules.engine();
    assert_eq!(answer_of(&mut engine), "old");
    rules.write(0, "Apache.rputs 'new'");
    assert_eq!(answer_of(&mut engine), "old", "nobody looked yet");
    set.refresh();
    assert_eq!(answer_of(&mut engine), "new");
    let generation = set.generation();
    set.refresh();
    assert_eq!(set.generation(), generation, "nothing changed, nothing is loaded anew");
}

#[test]
fn a_file_that_is_cached_is_not_looked_at_again() {
    let mut rules = TestRules::of("if");
    rules.add("").cache = true;
    rules.write(1, "if");
    let (set, _) = rules.engine();
    assert_eq!(
        set.paths(),
        [rules.path(0), rules.path(1)],
        "one that is broken is looked at until it is good"
    );
    rules.write(1, "Apache.rputs 'good'");
    set.refresh();
    assert_eq!(set.paths(), [rules.path(0)]);
    rules.write(1, "Apache.rputs 'changed'");
    set.refresh();
    assert_eq!(answer_of(&mut Engine::new(set)), "good");
}

#[test]
fn a_file_is_out_of_force_while_it_is_broken() {
    let rules = TestRules::of("Apache.rputs '1'");
    let (set, mut engine) = rules.engine();
    assert_eq!(answer_of(&mut engine), "1");

    rules.write(0, "Apache.rputs '2'\nif tru");
    set.refresh();
    assert_eq!((kind(&set), answer_of(&mut engine)), (Some(FaultKind::Syntax), String::new()));
    let RuleState::Broken(fault) = set.status().remove(0).state else { panic!("in force") };
    assert!(fault.to_string().contains("0.rb:2: syntax error"), "{fault}");

    fs::remove_file(rules.path(0)).unwrap();
    set.refresh();
    assert_eq!((kind(&set), answer_of(&mut engine)), (Some(FaultKind::Unreadable), String::new()));
    let generation = set.generation();
    set.refresh();
    assert_eq!(set.generation(), generation, "still missing");

    rules.write(0, "Apache.rputs '3'");
    set.refresh();
    assert_eq!((kind(&set), answer_of(&mut engine)), (None, "3".to_owned()));
    assert_eq!(set.status()[0].evaluations, 2, "only those of a rule that was in force");
}

#[test]
fn a_file_that_is_being_written_ends_up_as_it_was_written() {
    let source = format!("# {}\nApache.rputs 'whole'\n", "x".repeat(1000));
    let rules = TestRules::of("");
    let (set, mut engine) = rules.engine();
    for end in (0..=source.len()).step_by(13).chain([source.len()]) {
        rules.write(0, &source[..end]);
        set.refresh();
        evaluate(&mut engine).1.unwrap();
    }
    assert_eq!(answer_of(&mut engine), "whole");
}

#[test]
fn an_empty_file_is_a_rule_that_says_nothing() {
    for source in ["", "\n", "# only a comment", "__END__\nraise"] {
        let (set, mut engine) = TestRules::of(source).engine();
        assert!(evaluate(&mut engine).0.is_silent());
        assert_eq!((kind(&set), set.status()[0].errors), (None, 0), "{source}");
    }
}

#[test]
fn file_that_cannot_be_rule_text_is_reported() {
    let long = [b'#'; 100_000];
    for (source, expected) in [
        (&b"a = 1\n\xFF\xFE"[..], FaultKind::Syntax),
        (b"a = 1\n\0\0\0", FaultKind::Syntax),
        (&long, FaultKind::Unreadable),
    ] {
        let rules = TestRules::of("");
        fs::write(rules.path(0), source).unwrap();
        let RuleState::Broken(fault) = rules.set().status().remove(0).state else { panic!("{expected:?}") };
        assert_eq!(fault.kind, expected);
        assert!(fault.line == Some(2) || expected == FaultKind::Unreadable, "{fault}");
    }
}

#[test]
fn the_list_of_files_can_change() {
    let mut rules = TestRules::of("Apache::Request.new.notes['a'] = '1'");
    rules.add("Apache::Request.new.notes['b'] = '2'").phase = RulePhase::LogTransaction;
    let (set, mut engine) = rules.engine();
    assert!(
        set.has(RulePhase::AccessChecker)
            && set.has(RulePhase::LogTransaction)
            && !set.has(RulePhase::Fixups)
    );
    evaluate(&mut engine).1.unwrap();

    let first = RuleFile {
        phase: RulePhase::AccessChecker,
        path: rules.path(0),
        cache: false,
        on_error: OnError::Pass,
    };
    set.set_files(vec![first.clone()]);
    assert!(set.has(RulePhase::AccessChecker) && !set.has(RulePhase::LogTransaction));
    evaluate(&mut engine).1.unwrap();
    assert_eq!(set.status()[0].evaluations, 2, "what stays keeps its counters");

    set.set_files(vec![RuleFile { on_error: OnError::Refuse, ..first.clone() }]);
    assert_eq!(set.status()[0].evaluations, 0);
    set.set_files(vec![first; RULE_FILES_MAX + 1]);
    assert_eq!(set.status().len(), RULE_FILES_MAX);
    set.set_files(Vec::new());
    assert!(!set.has(RulePhase::AccessChecker));
    assert!(evaluate(&mut engine).0.is_silent());
}

#[test]
fn every_engine_loads_the_largest_set_of_rules() {
    let mut rules = TestRules::of("");
    for _ in 1..RULE_FILES_MAX {
        rules.add("$n = ($n || 0) + 1");
    }
    let (set, mut engine) = rules.engine();
    for round in 0..5 {
        (0..RULE_FILES_MAX).for_each(|at| rules.write(at, &format!("$n = ($n || 0) + 1 # {round}")));
        set.refresh();
        evaluate(&mut engine).1.unwrap();
    }
    assert!(set.status().iter().all(|status| status.errors == 0 && status.evaluations == 5));
}

#[test]
fn files_are_written_as_configuration_has_them() {
    let json = r#"{"phase":"post_read_request","file":"/etc/nagaya/a.rb","cache":true,"on_error":"refuse"}"#;
    let file: RuleFile = serde_json::from_str(json).unwrap();
    let expected = RuleFile {
        phase: RulePhase::PostReadRequest,
        path: "/etc/nagaya/a.rb".into(),
        cache: true,
        on_error: OnError::Refuse,
    };
    assert_eq!(file, expected);
    assert_eq!(serde_json::to_string(&file).unwrap(), json);
    for phase in RulePhase::ALL {
        let json = format!(r#"{{"phase":"{}","file":"a.rb"}}"#, phase.as_str());
        let file: RuleFile = serde_json::from_str(&json).unwrap();
        assert_eq!((file.phase, file.cache, file.on_error), (phase, false, OnError::Pass));
    }
}

#[test]
fn each_kind_of_fault_is_logged_once_for_each_version() {
    let rules = TestRules::of("raise 'no'");
    let (set, mut engine) = rules.engine();
    let rule = || Arc::clone(&set.current().rules[0]);
    let fault = |kind| RuleFault { kind, file: "a.rb".into(), line: None, message: String::new() };
    evaluate(&mut engine).1.unwrap();
    assert!(!rule().log_once(&fault(FaultKind::Exception)), "the evaluation did");
    assert!(rule().log_once(&fault(FaultKind::Memory)));
    assert!(!rule().log_once(&fault(FaultKind::Memory)));
    rules.write(0, "if");
    set.refresh();
    assert!(!rule().log_once(&fault(FaultKind::Syntax)), "whoever read it did");
    assert!(rule().log_once(&fault(FaultKind::Memory)));
}

#[test]
fn the_status_says_how_a_file_fares() {
    let rules = TestRules::of("raise 'no' if Apache::Request.new.uri =~ /wiki/");
    let (set, mut engine) = rules.engine();
    evaluate(&mut engine).1.unwrap();
    let status = set.status();
    let fault = status[0].last_fault.as_ref().unwrap();
    assert_eq!(
        (fault.kind, fault.line, &*fault.message),
        (FaultKind::Exception, Some(1), "no (RuntimeError)")
    );
    assert_eq!((status[0].evaluations, status[0].errors, status[0].killed), (1, 1, 0));
    let json = serde_json::to_string(&status).unwrap();
    assert_eq!(serde_json::from_str::<Vec<RuleStatus>>(&json).unwrap(), status);
}
