//! Rules that run, fail, are ended, and change.

use super::*;
use crate::testing::{Rules, evaluate};
use crate::{FaultKind, RuleState};

/// What a rule that ends in an exception raised.
#[track_caller]
fn fault_of(source: &str) -> RuleFault {
    let (set, mut engine) = Rules::of(source).engine();
    let (verdict, outcome) = evaluate(&mut engine);
    assert_eq!(outcome, Ok(()), "without `refuse` the request goes on");
    assert!(verdict.spoke.is_empty(), "{verdict:?}");
    let status = set.status().remove(0);
    assert_eq!(status.state, RuleState::InForce);
    status.last_fault.unwrap_or_else(|| panic!("no fault of {source}"))
}

/// What a rule wrote, which must not fail.
#[track_caller]
fn written(source: &str) -> String {
    let (set, mut engine) = Rules::of(source).engine();
    let (verdict, _) = evaluate(&mut engine);
    let status = set.status().remove(0);
    assert_eq!((status.last_fault, status.state), (None, RuleState::InForce));
    String::from_utf8(verdict.answer.expect("the rule wrote").body).unwrap()
}

#[test]
fn a_rule_reads_and_decides() {
    assert_eq!(written("Apache.rputs Apache::Request.new.hostname"), "www.example.com");
}
