//! The records of a cluster: its nodes, and which of them runs a site's application.
//!
//! Not here: choosing a node (`placement`), whether one answers (`placement`, `edge`), their store
//! (`store`).

use serde::{Deserialize, Serialize};

use crate::names::{NodeName, SiteName};

/// A machine of the cluster. It writes its own record when it joins; others change only `draining`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeRecord {
    pub name: NodeName,
    /// Random, made when it joined, 32 hexadecimal digits. Two machines that claim one name differ
    /// in it.
    pub id: String,
    /// `address:port` at which other nodes reach its edge: TCP for requests, UDP for probes.
    pub peer: String,
    /// It gets no more applications, and gives away those it has.
    #[serde(default, skip_serializing_if = "super::is_false")]
    pub draining: bool,
    /// CPUs, for placement. At least 1.
    pub cpus: u32,
    /// Memory, bytes, for placement.
    pub memory_bytes: u64,
    /// Version of nagaya on it.
    pub version: String,
    /// Store revision up to which it knows all other members. Members of that time are asked before
    /// it serves without the store, in any later life of it, too. Value 0 means that it has not
    /// said.
    #[serde(default, skip_serializing_if = "is_none")]
    pub knows: u64,
    /// Longest time that it may serve without the store, milliseconds. While this is here, no read
    /// gives it a longer lease. Value 0 means that it has not said, so its lease may have the
    /// longest allowed time.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub fence_ms: u32,
    /// No read renews its lease while a mark exists against it. A program that does not know this
    /// field rejects a record that has it. So it gets no lease from such a record.
    #[serde(default, skip_serializing_if = "super::is_false")]
    pub heeds_marks: bool,
}

impl NodeRecord {
    /// Returns it with the longer of both leases.
    pub fn with_fence_of(self, other: &Self) -> Self {
        let is_unknown = self.fence_ms == 0 || other.fence_ms == 0;
        let fence_ms = if is_unknown { 0 } else { self.fence_ms.max(other.fence_ms) };
        Self { fence_ms, ..self }
    }
}

fn is_none(revision: &u64) -> bool {
    *revision == 0
}

/// The nodes that run a site's application: one, or more if its record allows that. Each such site
/// that was ever requested has a placement. A removed site has one until nothing of it can run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    pub site: SiteName,
    pub node: NodeName,
    /// The fencing number: it grows by one with each change. A program that was started under an
    /// epoch no longer listed here may not serve or write. The first is 1, even for a name of which
    /// nothing is left.
    pub epoch: u64,
    /// When `node` got it, Unix time, milliseconds, by the clock of the node that wrote it. It is
    /// for people, and for how long load leaves it there. Correctness does not depend on it.
    pub since_ms: u64,
    pub why: PlacementReason,
    /// Time for which the former node may still serve, milliseconds. It counts from when the new
    /// node learns of this. No request goes into the application before it has passed. Value 0
    /// means that the former node gave it up, or that there was none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub wait_ms: u32,
    /// The epoch under which `node` has it. 0 means `epoch`, as nothing changed since. Otherwise
    /// only replicas changed since.
    #[serde(default, skip_serializing_if = "is_none")]
    pub node_epoch: u64,
    /// Other nodes that run it, too, the oldest first. None of them is `node`, and no two are the
    /// same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<ReplicaRecord>,
}

/// One more node that runs a site's application.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplicaRecord {
    pub node: NodeName,
    /// The placement's epoch when this replica was added.
    pub epoch: u64,
    pub since_ms: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub wait_ms: u32,
    /// It is awake there: requests may be sent to it.
    #[serde(default, skip_serializing_if = "super::is_false")]
    pub ready: bool,
}

/// A node's replica in a placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replica<'a> {
    pub node: &'a NodeName,
    pub epoch: u64,
    pub since_ms: u64,
    pub why: PlacementReason,
    pub wait_ms: u32,
    /// Requests may be sent to it.
    pub ready: bool,
}

/// A node's view of a placement, for checks in each request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacementView {
    /// The placement's own epoch.
    pub newest: u64,
    /// The epoch under which the node has the site, if it does.
    pub epoch: Option<u64>,
    /// Several nodes have the site.
    pub has_copies: bool,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Placement {
    /// Returns the epoch under which `node` has it.
    pub fn first_epoch(&self) -> u64 {
        if self.node_epoch == 0 { self.epoch } else { self.node_epoch }
    }

    /// Returns all nodes that have it, `node` first.
    pub fn parts(&self) -> impl Iterator<Item = Replica<'_>> {
        let Self { node, since_ms, why, wait_ms, .. } = self;
        let first = Replica {
            node,
            epoch: self.first_epoch(),
            since_ms: *since_ms,
            why: *why,
            wait_ms: *wait_ms,
            ready: true,
        };
        std::iter::once(first).chain(self.copies.iter().map(|copy| Replica {
            node: &copy.node,
            epoch: copy.epoch,
            since_ms: copy.since_ms,
            why: PlacementReason::Load,
            wait_ms: copy.wait_ms,
            ready: copy.ready,
        }))
    }

    pub fn part(&self, node: &NodeName) -> Option<Replica<'_>> {
        self.parts().find(|part| part.node == node)
    }

    pub fn standing(&self, node: &NodeName) -> PlacementView {
        PlacementView {
            newest: self.epoch,
            epoch: self.part(node).map(|part| part.epoch),
            has_copies: !self.copies.is_empty(),
        }
    }

    /// Returns it without surplus replicas, for a site that may have at most `max`.
    pub fn at_most(mut self, max: u32) -> Self {
        self.copies.truncate(max.max(1) as usize - 1);
        self
    }

    // === Successors of a placement. Each has the next epoch, and keeps all other replicas ===

    /// Returns it with one more node.
    pub fn with_copy(&self, node: NodeName, since_ms: u64, wait_ms: u32) -> Self {
        let mut next = self.next();
        next.copies.push(ReplicaRecord { node, epoch: next.epoch, since_ms, wait_ms, ready: false });
        next
    }

    /// Returns it with the replica on this node awake. `None` if there is none, or if that is
    /// known.
    pub fn with_ready(&self, node: &NodeName) -> Option<Self> {
        let mut next = self.next();
        let copy = next.copies.iter_mut().find(|copy| copy.node == *node && !copy.ready)?;
        copy.ready = true;
        Some(next)
    }

    /// Returns it without this node, if other nodes have it. `None` if the node has no replica or
    /// the only one.
    pub fn without(&self, node: &NodeName, since_ms: u64, why: PlacementReason) -> Option<Self> {
        let mut next = self.next();
        if let Some(at) = next.copies.iter().position(|copy| copy.node == *node) {
            next.copies.remove(at);
            return Some(next);
        }
        if next.node != *node || next.copies.is_empty() {
            return None;
        }
        // An awake replica needs the least work to serve.
        let heir = next.copies.iter().position(|copy| copy.ready).unwrap_or(0);
        let ReplicaRecord { node, epoch, wait_ms, .. } = next.copies.remove(heir);
        Some(Self { node, node_epoch: epoch, wait_ms, since_ms, why, ..next })
    }

    /// Returns it with `to` in the place of `node`. `None` if `node` has no replica, or `to` has
    /// one.
    pub fn moved(
        &self,
        node: &NodeName,
        to: NodeName,
        since_ms: u64,
        why: PlacementReason,
        wait_ms: u32,
    ) -> Option<Self> {
        if self.part(&to).is_some() {
            return None;
        }
        let next = self.next();
        if next.node == *node {
            return Some(Self { node: to, node_epoch: 0, since_ms, why, wait_ms, ..next });
        }
        let mut next = next;
        let epoch = next.epoch;
        let copy = next.copies.iter_mut().find(|copy| copy.node == *node)?;
        *copy = ReplicaRecord { node: to, epoch, since_ms, wait_ms, ready: false };
        Some(next)
    }

    fn next(&self) -> Self {
        Self { epoch: self.epoch + 1, node_epoch: self.first_epoch(), ..self.clone() }
    }
}

/// Why a placement was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlacementReason {
    /// The site had not been requested before.
    First,
    /// The node that had it did not answer in time.
    Silent,
    /// Its host answered, its edge did not.
    Refused,
    /// The node that had it replied that it may not serve.
    Fenced,
    /// The node that had it is draining, or has left the cluster.
    Draining,
    /// It is short of a resource that another node has.
    Load,
    /// An operator ordered it.
    Operator,
}

impl PlacementReason {
    pub const ALL: [Self; 7] =
        [Self::First, Self::Silent, Self::Refused, Self::Fenced, Self::Draining, Self::Load, Self::Operator];

    /// Returns its word in records, commands, logs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Silent => "silent",
            Self::Refused => "refused",
            Self::Fenced => "fenced",
            Self::Draining => "draining",
            Self::Load => "load",
            Self::Operator => "operator",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_are_those_of_the_records() {
        for why in PlacementReason::ALL {
            assert_eq!(serde_json::to_value(why).unwrap(), why.as_str());
        }
    }

    #[test]
    fn a_node_record_without_these_fields_is_read() {
        let text = format!(
            r#"{{"name":"a","id":"{}","peer":"127.0.0.1:1","cpus":2,"memory_bytes":1,"version":"0.1.0"}}"#,
            "0".repeat(32)
        );
        let older: NodeRecord = serde_json::from_str(&text).unwrap();
        assert_eq!((older.fence_ms, older.heeds_marks), (0, false));
        assert_eq!(serde_json::to_string(&older).unwrap(), text);
        let with = |fence_ms| NodeRecord { fence_ms, heeds_marks: true, ..older.clone() };
        let longer = |one, other| with(one).with_fence_of(&with(other));
        assert_eq!(longer(100, 300), with(300));
        assert_eq!(longer(300, 100), with(300));
        assert_eq!((longer(300, 0), longer(0, 300)), (with(0), with(0)), "what is not known may be longer");
    }

    #[test]
    fn a_placement_reads_and_writes_the_same_json() {
        let text = r#"{"site":"wiki","node":"a","epoch":3,"since_ms":1700000000000,"why":"silent"}"#;
        let placement: Placement = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&placement).unwrap(), text);
        assert_eq!((placement.first_epoch(), placement.parts().count()), (3, 1));
        let text = r#"{"site":"wiki","node":"a","epoch":5,"since_ms":1,"why":"silent","node_epoch":3,"copies":[{"node":"b","epoch":4,"since_ms":2,"wait_ms":303,"ready":true}]}"#;
        let placement: Placement = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&placement).unwrap(), text);
    }

    fn node(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    /// `a=3 b=4` with a star for what is not ready, and the epoch of the whole.
    fn words(placement: &Placement) -> String {
        let parts: Vec<String> = placement
            .parts()
            .map(|part| format!("{}{}={}", part.node, if part.ready { "" } else { "*" }, part.epoch))
            .collect();
        format!("{} of {}", parts.join(" "), placement.epoch)
    }

    #[test]
    fn a_changed_part_leaves_others_their_epochs_and_none_repeats() {
        let text = r#"{"site":"wiki","node":"a","epoch":3,"since_ms":1,"why":"first"}"#;
        let alone: Placement = serde_json::from_str(text).unwrap();
        let two = alone.with_copy(node("b"), 9, 303);
        assert_eq!(words(&two), "a=3 b*=4 of 4");
        assert_eq!(two.part(&node("b")).unwrap().wait_ms, 303);
        let ready = two.with_ready(&node("b")).unwrap();
        assert_eq!(words(&ready), "a=3 b=4 of 5");
        assert_eq!((ready.with_ready(&node("b")), ready.with_ready(&node("a"))), (None, None));
        let three = ready.with_copy(node("c"), 9, 0);
        assert_eq!(words(&three), "a=3 b=4 c*=6 of 6");
        // The first goes: who is awake takes its place, under the epoch it has.
        let promoted = three.without(&node("a"), 20, PlacementReason::Silent).unwrap();
        assert_eq!(words(&promoted), "b=4 c*=6 of 7");
        assert_eq!((promoted.why, promoted.since_ms, promoted.wait_ms), (PlacementReason::Silent, 20, 303));
        assert_eq!(words(&promoted.without(&node("c"), 20, PlacementReason::Load).unwrap()), "b=4 of 8");
        assert_eq!(words(&promoted.without(&node("b"), 20, PlacementReason::Load).unwrap()), "c=6 of 8");
        assert_eq!(promoted.without(&node("a"), 20, PlacementReason::Load), None);
        assert_eq!(alone.without(&node("a"), 20, PlacementReason::Load), None, "it is the only one");
        // What moves gets a new epoch there, and no node gets two parts.
        let moved = |from: &str, to: &str| three.moved(&node(from), node(to), 20, PlacementReason::Load, 1);
        assert_eq!(words(&moved("a", "d").unwrap()), "d=7 b=4 c*=6 of 7");
        assert_eq!(words(&moved("b", "d").unwrap()), "a=3 d*=7 c*=6 of 7");
        assert_eq!((moved("a", "b"), moved("d", "e")), (None, None));
        let moved = alone.moved(&node("a"), node("b"), 20, PlacementReason::Load, 1).unwrap();
        assert_eq!(words(&moved), "b=4 of 4");
    }

    #[test]
    fn copies_beyond_what_a_site_may_have_are_not_there() {
        let text = r#"{"site":"wiki","node":"a","epoch":3,"since_ms":1,"why":"first"}"#;
        let alone: Placement = serde_json::from_str(text).unwrap();
        let three = alone.with_copy(node("b"), 9, 0).with_copy(node("c"), 9, 0);
        let at_most = |max| three.clone().at_most(max).parts().count();
        assert_eq!([0, 1, 2, 3, 4].map(at_most), [1, 1, 2, 3, 3]);
    }
}
