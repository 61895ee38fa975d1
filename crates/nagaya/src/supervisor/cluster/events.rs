//! Recent cluster events, as this node saw them. They are nodes that fell silent, came, went or
//! drained, changes of its own lease, and its moves. Each move has the planner's reason and the
//! time of its steps.
//!
//! They are kept in memory, so a restart forgets them. The records have the present places of
//! sites.
//!
//! Not here: the reactions (`relocator`, `mover`, `lease_renewer`), events of load
//! (`balance::history`), the commands (`cli::events`).

use std::cell::RefCell;
use std::collections::VecDeque;

use nagaya_records::{NodeName, Placement, PlacementReason};
use serde::Serialize;
use serde_json::{Value, json};

use super::clock::unix_ms;

/// Events that are kept, apart from moves.
const EVENTS_MAX: usize = 512;

/// Moves that are kept separately: the moves after a node's death must not displace the event of
/// its death.
const MOVES_MAX: usize = 1_024;

/// Moves shown for one site.
const MOVES_TOLD_MAX: usize = 10;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ClusterEvent {
    Joined {
        node: NodeName,
    },
    Removed {
        node: NodeName,
    },
    /// It no longer reports its load.
    Gone {
        node: NodeName,
    },
    /// It reports its load again.
    Seen {
        node: NodeName,
    },
    Draining {
        node: NodeName,
    },
    Undrained {
        node: NodeName,
    },
    /// A request that came here had no reply from it, for this reason.
    Silent {
        node: NodeName,
        why: PlacementReason,
    },
    /// It answers after all.
    Answers {
        node: NodeName,
    },
    /// This node has no lease.
    AuthorityLost,
    /// It has a lease, from the store or from the other members.
    AuthorityHeld {
        by: &'static str,
    },
    Moved(SiteMove),
}

/// A site that got another placement by this node's decision.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SiteMove {
    pub site: String,
    pub from: Option<NodeName>,
    pub to: String,
    pub epoch: u64,
    pub why: &'static str,
    /// The reason for that node, in the planner's words.
    pub reason: String,
    /// Time until the request that caused it knew that no reply would come.
    pub probe_us: u64,
    pub decide_us: u64,
    pub store_us: u64,
    /// Longest wait of the first request for the end of the old lease.
    pub fence_ms: u32,
    /// Time to transfer its image, while requests continued at the former node.
    pub fetch_us: u64,
    /// Time until the former node had given it up, with its requests ended, and the store agreed.
    /// Zero if it was not asked.
    pub release_us: u64,
}

impl SiteMove {
    pub fn new(
        placement: &Placement,
        from: Option<NodeName>,
        to: &NodeName,
        why: PlacementReason,
        reason: String,
    ) -> Self {
        Self {
            site: placement.site.to_string(),
            from,
            to: to.to_string(),
            epoch: placement.epoch,
            why: why.as_str(),
            reason,
            fence_ms: placement.wait_ms,
            ..Self::default()
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct TimedEvent {
    at_ms: u64,
    #[serde(flatten)]
    what: ClusterEvent,
}

/// The latest of each, the oldest first.
#[derive(Debug, Default)]
pub struct KeptEvents {
    events: VecDeque<TimedEvent>,
    moves: VecDeque<TimedEvent>,
}

impl KeptEvents {
    pub fn note(&mut self, what: ClusterEvent) {
        let (kept, max) = match what {
            ClusterEvent::Moved(_) => (&mut self.moves, MOVES_MAX),
            _ => (&mut self.events, EVENTS_MAX),
        };
        if kept.len() >= max {
            kept.pop_front();
        }
        kept.push_back(TimedEvent { at_ms: unix_ms(), what });
    }

    /// Returns the latest of all events, the latest first.
    fn last(&self, limit: usize) -> Vec<Value> {
        let mut all: Vec<&TimedEvent> = self.events.iter().chain(&self.moves).collect();
        // Within one millisecond each kind keeps its order.
        all.sort_by_key(|event| event.at_ms);
        all.into_iter().rev().take(limit).map(|event| json!(event)).collect()
    }

    /// Returns the last moves of a site, the latest first.
    fn moves_of(&self, site: &str) -> Vec<Value> {
        let is_of =
            |event: &&TimedEvent| matches!(&event.what, ClusterEvent::Moved(moved) if moved.site == site);
        self.moves.iter().rev().filter(is_of).take(MOVES_TOLD_MAX).map(|event| json!(event)).collect()
    }
}

/// The events as the tasks of a member share them.
#[derive(Debug, Default)]
pub struct EventLog {
    kept: RefCell<KeptEvents>,
}

impl EventLog {
    pub fn note(&self, what: ClusterEvent) {
        self.kept.borrow_mut().note(what);
    }

    pub fn last(&self, limit: usize) -> Vec<Value> {
        self.kept.borrow().last(limit)
    }

    pub fn moves_of(&self, site: &str) -> Vec<Value> {
        self.kept.borrow().moves_of(site)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    fn moved(site: &str, epoch: u64) -> ClusterEvent {
        ClusterEvent::Moved(SiteMove {
            site: site.into(),
            epoch,
            to: "b".into(),
            why: "silent",
            ..SiteMove::default()
        })
    }

    #[test]
    fn many_moves_do_not_push_out_why_there_were_so_many() {
        let mut events = KeptEvents::default();
        events.note(ClusterEvent::Silent { node: node("a"), why: PlacementReason::Silent });
        for n in 0..MOVES_MAX as u64 + 5 {
            events.note(moved(if n % 2 == 0 { "wiki" } else { "blog" }, n));
        }
        let all = events.last(usize::MAX);
        assert_eq!((all.len(), events.last(3).len()), (MOVES_MAX + 1, 3));
        let silent = all.iter().find(|event| event["event"] == "silent").unwrap();
        assert_eq!((&silent["node"], &silent["why"]), (&json!("a"), &json!("silent")));
        let told = events.moves_of("blog");
        assert_eq!((told.len(), &told[0]["epoch"]), (MOVES_TOLD_MAX, &json!(MOVES_MAX + 3)));
        assert!(told.windows(2).all(|pair| pair[0]["epoch"].as_u64() > pair[1]["epoch"].as_u64()));
        assert!(events.moves_of("other").is_empty());
        for _ in 0..=EVENTS_MAX {
            events.note(ClusterEvent::AuthorityLost);
        }
        assert_eq!(events.last(usize::MAX).len(), MOVES_MAX + EVENTS_MAX);
    }
}
