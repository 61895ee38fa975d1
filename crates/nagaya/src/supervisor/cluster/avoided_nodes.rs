//! Nodes that did not answer a request here. No other site is sent to them for a while, or until
//! they are heard from.
//!
//! Not here: how a request finds out (`nagaya_edge::peers`), the planner's reaction
//! (`nagaya_placement::planner`).

use std::collections::HashMap;
use std::time::{Duration, Instant};

use nagaya_placement::liveness::ProbeResult;
use nagaya_records::{NodeName, PlacementReason};

/// Time for which a silent node gets no further sites, unless it is heard from.
const SUSPECT_FOR: Duration = Duration::from_secs(5);

/// Time within which a live node that did not answer in time usually answers again. A site without
/// another node waits for it this long.
const BACK_WITHIN: Duration = Duration::from_secs(2);

/// The edge finds silence and hears from a node on two threads. A finding within this time after
/// the node was heard from may be older than that.
const OVERTAKEN_BY: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub struct AvoidedNodes {
    nodes: HashMap<NodeName, AvoidedState>,
}

#[derive(Debug, Clone, Copy)]
enum AvoidedState {
    /// When the silence began, and when it was last found.
    Suspected { since: Instant, last: Instant, why: PlacementReason },
    /// It was heard from. This is kept for findings that are reported later but are older.
    Heard(Instant),
}

impl AvoidedNodes {
    /// Notes that a request got no reply from it. Returns true if the reason ends once the node is
    /// heard from.
    pub fn accuse(&mut self, now: Instant, node: &NodeName, why: PlacementReason) -> bool {
        let is_over_once_heard = match why {
            PlacementReason::Silent | PlacementReason::Refused => true,
            PlacementReason::Fenced => false,
            PlacementReason::First
            | PlacementReason::Draining
            | PlacementReason::Load
            | PlacementReason::Operator => return false,
        };
        let since = match self.nodes.get(node) {
            Some(AvoidedState::Heard(at)) if is_over_once_heard && now - *at < OVERTAKEN_BY => return true,
            Some(AvoidedState::Suspected { since, last, .. }) if now - *last < SUSPECT_FOR => *since,
            _ => now,
        };
        self.nodes.insert(node.clone(), AvoidedState::Suspected { since, last: now, why });
        is_over_once_heard
    }

    /// Notes that it answers after all. Returns true if that was held against it until now.
    pub fn note_heard(&mut self, now: Instant, node: &NodeName) -> bool {
        match self.nodes.get(node) {
            // It answers, and says that it has no lease.
            Some(AvoidedState::Suspected { why: PlacementReason::Fenced, .. }) => false,
            state => {
                let was_suspected = matches!(state, Some(AvoidedState::Suspected { .. }));
                self.nodes.insert(node.clone(), AvoidedState::Heard(now));
                was_suspected
            }
        }
    }

    /// Returns the present finding against it.
    pub fn finding_against(&self, now: Instant, node: &NodeName) -> Option<ProbeResult> {
        match *self.nodes.get(node)? {
            AvoidedState::Suspected { last, why, .. } if now - last < SUSPECT_FOR => Some(match why {
                PlacementReason::Refused => ProbeResult::Refuses,
                _ => ProbeResult::Silent,
            }),
            _ => None,
        }
    }

    /// Returns whether it has been silent so briefly that it may answer again in a moment.
    pub fn may_be_back(&self, now: Instant, node: &NodeName) -> bool {
        match self.nodes.get(node) {
            // Hearing from it does not end this.
            Some(AvoidedState::Suspected { why: PlacementReason::Fenced, .. }) => false,
            Some(AvoidedState::Suspected { since, .. }) => now - *since < BACK_WITHIN,
            Some(AvoidedState::Heard(_)) | None => false,
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
    fn a_silent_node_is_avoided_until_heard_from_or_for_a_while() {
        let mut suspects = AvoidedNodes::default();
        let begin = Instant::now();
        let b = node("b");
        let at = |ms| begin + Duration::from_millis(ms);
        assert_eq!(suspects.finding_against(at(0), &b), None);
        assert!(suspects.accuse(at(0), &b, PlacementReason::Silent));
        assert_eq!(suspects.finding_against(at(4_999), &b), Some(ProbeResult::Silent));
        assert_eq!(suspects.finding_against(at(5_000), &b), None);
        assert!(suspects.accuse(at(6_000), &b, PlacementReason::Refused));
        assert_eq!(suspects.finding_against(at(6_001), &b), Some(ProbeResult::Refuses));
        assert!(suspects.note_heard(at(6_002), &b));
        assert_eq!(suspects.finding_against(at(6_002), &b), None);
        assert!(!suspects.note_heard(at(6_003), &b), "that is said once");
        assert_eq!(suspects.finding_against(at(6_003), &node("c")), None);
    }

    #[test]
    fn a_node_that_may_not_serve_is_not_cleared_by_being_heard() {
        let mut suspects = AvoidedNodes::default();
        let begin = Instant::now();
        let b = node("b");
        assert!(!suspects.accuse(begin, &b, PlacementReason::Fenced));
        assert!(!suspects.may_be_back(begin, &b), "so nobody waits for that");
        assert!(!suspects.note_heard(begin, &b));
        assert_eq!(suspects.finding_against(begin, &b), Some(ProbeResult::Silent));
    }

    #[test]
    fn ordinary_move_raises_no_suspicion() {
        for why in [
            PlacementReason::First,
            PlacementReason::Draining,
            PlacementReason::Load,
            PlacementReason::Operator,
        ] {
            let mut suspects = AvoidedNodes::default();
            assert!(!suspects.accuse(Instant::now(), &node("b"), why));
            assert_eq!(suspects.finding_against(Instant::now(), &node("b")), None);
        }
    }

    #[test]
    fn an_accusation_found_before_a_sign_of_life_does_not_count() {
        let mut suspects = AvoidedNodes::default();
        let begin = Instant::now();
        let b = node("b");
        let at = |ms| begin + Duration::from_millis(ms);
        assert!(!suspects.note_heard(at(0), &b));
        assert!(suspects.accuse(at(10), &b, PlacementReason::Silent));
        assert_eq!(suspects.finding_against(at(10), &b), None);
        assert!(suspects.accuse(at(60), &b, PlacementReason::Silent));
        assert_eq!(suspects.finding_against(at(60), &b), Some(ProbeResult::Silent));
    }

    #[test]
    fn a_node_accused_repeatedly_is_not_waited_for_each_time() {
        let mut suspects = AvoidedNodes::default();
        let begin = Instant::now();
        let b = node("b");
        let at = |ms| begin + Duration::from_millis(ms);
        for ms in (0..8_000).step_by(500) {
            suspects.accuse(at(ms), &b, PlacementReason::Silent);
            assert_eq!(suspects.may_be_back(at(ms), &b), ms < 2_000, "{ms}");
            assert_eq!(suspects.finding_against(at(ms), &b), Some(ProbeResult::Silent));
        }
        suspects.note_heard(at(8_000), &b);
        assert!(!suspects.may_be_back(at(8_000), &b), "it is back");
        suspects.accuse(at(8_500), &b, PlacementReason::Silent);
        assert!(suspects.may_be_back(at(9_000), &b), "that is another time");
    }
}
