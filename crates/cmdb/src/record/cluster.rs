//! The records of a cluster: its nodes, and which of them runs a site's application.
//!
//! Not here: choosing a node (`placement`), whether one answers (`placement`, `edge`), the store they are kept in (`store`).

use serde::{Deserialize, Serialize};

use crate::names::{NodeName, SiteName};

/// A machine of the cluster. It writes its own record when it joins; only `draining` is changed by others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeRecord {
    pub name: NodeName,
    /// Random, made when it joined, 32 hexadecimal digits: two machines that claim one name differ in it.
    pub id: String,
    /// `address:port` at which other nodes reach its edge: TCP for requests, UDP for probes.
    pub peer: String,
    /// Gets no application any more, and gives away those it has.
    #[serde(default, skip_serializing_if = "super::is_false")]
    pub draining: bool,
    /// Processors, for placement. At least 1.
    pub cpus: u32,
    /// Memory, bytes, for placement.
    pub memory_bytes: u64,
    /// Of nagaya on it.
    pub version: String,
    /// The store's revision up to which it knows all other members: those that were there by then are asked before it serves
    /// without the store, in any later life of it too. 0: it has not said.
    #[serde(default, skip_serializing_if = "is_none")]
    pub knows: u64,
}

fn is_none(revision: &u64) -> bool {
    *revision == 0
}

/// Which node runs a site's application. There is one for each such site that was ever asked for, and for one that was removed until
/// nothing of it can run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    pub site: SiteName,
    pub node: NodeName,
    /// The fencing number: one more with each move, never less. What was started under a lower one may serve and write
    /// nothing any more. The first is 1, also of a name that nothing is left of.
    pub epoch: u64,
    /// When it was written, Unix time, milliseconds, by the clock of the node that wrote it. For people, and for how long load leaves
    /// it where it is: nothing that must hold rests on it.
    pub since_ms: u64,
    pub why: Why,
    /// The node that had it may still serve for so long, milliseconds: from when the new one learns of this, no request goes
    /// into the application until that has passed. 0: the other has given it up, or there was none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub wait_ms: u32,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Why a placement was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// Nobody had asked for the site before.
    First,
    /// The node that had it did not answer in time.
    Silent,
    /// Its host answered, its edge did not.
    Refused,
    /// The node that had it answered that it may not serve.
    Fenced,
    /// The node that had it is being emptied, or has left the cluster.
    Draining,
    /// It is short of what another node has.
    Load,
    /// An operator said so.
    Operator,
}

impl Why {
    pub const ALL: [Self; 7] =
        [Self::First, Self::Silent, Self::Refused, Self::Fenced, Self::Draining, Self::Load, Self::Operator];

    /// The word for it in records, commands, logs and metrics.
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
        for why in Why::ALL {
            assert_eq!(serde_json::to_value(why).unwrap(), why.as_str());
        }
    }

    #[test]
    fn a_placement_reads_and_writes_the_same_json() {
        let text = r#"{"site":"wiki","node":"a","epoch":3,"since_ms":1700000000000,"why":"silent"}"#;
        let placement: Placement = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&placement).unwrap(), text);
    }
}
