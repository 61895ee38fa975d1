//! Nodes that did not answer a request here, so that no other site is sent to them for a while: until they were heard from, or that
//! is long ago.
//!
//! Not here: how a request finds out (`nagaya_edge::peers`), what a planner makes of it (`nagaya_placement::planner`).

use std::collections::HashMap;
use std::time::{Duration, Instant};

use nagaya_cmdb::{NodeName, Why};
use nagaya_placement::liveness::Verdict;

/// A node that did not answer gets no further sites for so long, unless it is heard from.
const SUSPECT_FOR: Duration = Duration::from_secs(5);

/// A node that lives and did not answer in time mostly answers again within this: so long a site without another node waits for it.
const BACK_WITHIN: Duration = Duration::from_secs(2);

/// Who finds a node silent and who hears from it are two threads of the edge: what the first says this short a time after the second
/// did, it may have found before.
const OVERTAKEN_BY: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub struct Suspects {
    nodes: HashMap<NodeName, State>,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// Since when without a word from it, and when that was found the last time.
    Suspected { since: Instant, last: Instant, why: Why },
    /// It was heard from, which is kept for those that say later what they found before.
    Heard(Instant),
}

impl Suspects {
    /// A request got no answer from it. True: for a reason that is over once it is heard from.
    pub fn accuse(&mut self, now: Instant, node: &NodeName, why: Why) -> bool {
        let is_over_once_heard = match why {
            Why::Silent | Why::Refused => true,
            Why::Fenced => false,
            Why::First | Why::Draining | Why::Load | Why::Operator => return false,
        };
        let since = match self.nodes.get(node) {
            Some(State::Heard(at)) if is_over_once_heard && now - *at < OVERTAKEN_BY => return true,
            Some(State::Suspected { since, last, .. }) if now - *last < SUSPECT_FOR => *since,
            _ => now,
        };
        self.nodes.insert(node.clone(), State::Suspected { since, last: now, why });
        is_over_once_heard
    }

    /// It answers after all. True: that was held against it until now.
    pub fn heard(&mut self, now: Instant, node: &NodeName) -> bool {
        match self.nodes.get(node) {
            // It answers, and says that it may not serve.
            Some(State::Suspected { why: Why::Fenced, .. }) => false,
            state => {
                let was_suspected = matches!(state, Some(State::Suspected { .. }));
                self.nodes.insert(node.clone(), State::Heard(now));
                was_suspected
            }
        }
    }

    /// What is held against it now.
    pub fn against(&self, now: Instant, node: &NodeName) -> Option<Verdict> {
        match *self.nodes.get(node)? {
            State::Suspected { last, why, .. } if now - last < SUSPECT_FOR => Some(match why {
                Why::Refused => Verdict::Refuses,
                _ => Verdict::Silent,
            }),
            _ => None,
        }
    }

    /// It does not answer, and so lately that it may again in a moment.
    pub fn may_be_back(&self, now: Instant, node: &NodeName) -> bool {
        match self.nodes.get(node) {
            // Nothing that is heard from it ends this.
            Some(State::Suspected { why: Why::Fenced, .. }) => false,
            Some(State::Suspected { since, .. }) => now - *since < BACK_WITHIN,
            Some(State::Heard(_)) | None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    #[test]
    fn who_does_not_answer_is_suspected_until_heard_from_or_for_a_while() {
        let (mut suspects, begin, b) = (Suspects::default(), Instant::now(), node("b"));
        let at = |ms| begin + Duration::from_millis(ms);
        assert_eq!(suspects.against(at(0), &b), None);
        assert!(suspects.accuse(at(0), &b, Why::Silent));
        assert_eq!(suspects.against(at(4_999), &b), Some(Verdict::Silent));
        assert_eq!(suspects.against(at(5_000), &b), None);
        assert!(suspects.accuse(at(6_000), &b, Why::Refused));
        assert_eq!(suspects.against(at(6_001), &b), Some(Verdict::Refuses));
        assert!(suspects.heard(at(6_002), &b));
        assert_eq!(suspects.against(at(6_002), &b), None);
        assert!(!suspects.heard(at(6_003), &b), "that is said once");
        assert_eq!(suspects.against(at(6_003), &node("c")), None);
    }

    #[test]
    fn a_node_that_may_not_serve_is_not_cleared_by_being_heard() {
        let (mut suspects, begin, b) = (Suspects::default(), Instant::now(), node("b"));
        assert!(!suspects.accuse(begin, &b, Why::Fenced));
        assert!(!suspects.may_be_back(begin, &b), "so nobody waits for that");
        assert!(!suspects.heard(begin, &b));
        assert_eq!(suspects.against(begin, &b), Some(Verdict::Silent));
    }

    #[test]
    fn what_did_not_fail_is_held_against_nobody() {
        for why in [Why::First, Why::Draining, Why::Load, Why::Operator] {
            let mut suspects = Suspects::default();
            assert!(!suspects.accuse(Instant::now(), &node("b"), why));
            assert_eq!(suspects.against(Instant::now(), &node("b")), None);
        }
    }

    #[test]
    fn what_was_found_before_and_is_said_after_it_was_heard_does_not_count() {
        let (mut suspects, begin, b) = (Suspects::default(), Instant::now(), node("b"));
        let at = |ms| begin + Duration::from_millis(ms);
        assert!(!suspects.heard(at(0), &b));
        assert!(suspects.accuse(at(10), &b, Why::Silent));
        assert_eq!(suspects.against(at(10), &b), None);
        assert!(suspects.accuse(at(60), &b, Why::Silent));
        assert_eq!(suspects.against(at(60), &b), Some(Verdict::Silent));
    }

    #[test]
    fn one_that_is_accused_again_and_again_is_not_waited_for_each_time() {
        let (mut suspects, begin, b) = (Suspects::default(), Instant::now(), node("b"));
        let at = |ms| begin + Duration::from_millis(ms);
        for ms in (0..8_000).step_by(500) {
            suspects.accuse(at(ms), &b, Why::Silent);
            assert_eq!(suspects.may_be_back(at(ms), &b), ms < 2_000, "{ms}");
            assert_eq!(suspects.against(at(ms), &b), Some(Verdict::Silent));
        }
        suspects.heard(at(8_000), &b);
        assert!(!suspects.may_be_back(at(8_000), &b), "it is back");
        suspects.accuse(at(8_500), &b, Why::Silent);
        assert!(suspects.may_be_back(at(9_000), &b), "that is another time");
    }
}
