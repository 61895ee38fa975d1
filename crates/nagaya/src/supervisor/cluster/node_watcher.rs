//! Notes nodes that join, leave, fall silent, come back or are drained.
//!
//! Not here: keeping the events (`events`).

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use nagaya_records::NodeName;

use super::events::{ClusterEvent, EventLog};
use super::known_node::KnownNode;
use super::view::ClusterView;

/// Interval of checks whether nodes have come or gone.
const LOOK_EVERY: Duration = Duration::from_secs(1);

pub struct NodeWatcher {
    pub view: Rc<ClusterView>,
    pub events: Rc<EventLog>,
}

/// Observed state of one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NodePresence {
    is_there: bool,
    is_draining: bool,
}

/// All members, as last observed. `None` before the first observation.
type Sights = BTreeMap<NodeName, NodePresence>;

/// Returns the changes between two observations.
fn changes(before: &Sights, now: &Sights) -> Vec<ClusterEvent> {
    let mut changes = Vec::new();
    for (node, sight) in now {
        let node = || node.clone();
        let Some(before) = before.get(&node()) else {
            changes.push(ClusterEvent::Joined { node: node() });
            continue;
        };
        match (before.is_there, sight.is_there) {
            (true, false) => changes.push(ClusterEvent::Gone { node: node() }),
            (false, true) => changes.push(ClusterEvent::Seen { node: node() }),
            _ => {}
        }
        match (before.is_draining, sight.is_draining) {
            (false, true) => changes.push(ClusterEvent::Draining { node: node() }),
            (true, false) => changes.push(ClusterEvent::Undrained { node: node() }),
            _ => {}
        }
    }
    let gone = before.keys().filter(|node| !now.contains_key(*node));
    changes.extend(gone.map(|node| ClusterEvent::Removed { node: node.clone() }));
    changes
}

impl NodeWatcher {
    /// Watches which nodes are present while this node is a member.
    pub async fn run(self) {
        let mut before: Option<Sights> = None;
        loop {
            let known = self.view.known_nodes().unwrap_or_default();
            let sight = |node: KnownNode| {
                let sight = NodePresence { is_there: node.load.is_some(), is_draining: node.record.draining };
                (node.record.name, sight)
            };
            let now: Sights = known.into_iter().map(sight).collect();
            // A node that cannot read its records sees no member, which is no news. Its first
            // observation reports nothing that happened.
            if !now.is_empty() {
                let changes = before.as_ref().map(|before| changes(before, &now)).unwrap_or_default();
                changes.into_iter().for_each(|change| self.events.note(change));
                before = Some(now);
            }
            tokio::time::sleep(LOOK_EVERY).await;
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
    fn changes_of_nodes_between_two_looks_are_reported_once() {
        let sights = |nodes: &[(&str, bool, bool)]| -> Sights {
            let sight = |(name, is_there, is_draining): &(&str, _, _)| {
                (node(name), NodePresence { is_there: *is_there, is_draining: *is_draining })
            };
            nodes.iter().map(sight).collect()
        };
        let first = sights(&[("a", true, false), ("b", true, false), ("c", false, true)]);
        let second = sights(&[("a", false, true), ("c", true, false), ("d", true, false)]);
        assert_eq!(changes(&first, &first), []);
        assert_eq!(
            changes(&first, &second),
            [
                ClusterEvent::Gone { node: node("a") },
                ClusterEvent::Draining { node: node("a") },
                ClusterEvent::Seen { node: node("c") },
                ClusterEvent::Undrained { node: node("c") },
                ClusterEvent::Joined { node: node("d") },
                ClusterEvent::Removed { node: node("b") },
            ]
        );
    }
}
