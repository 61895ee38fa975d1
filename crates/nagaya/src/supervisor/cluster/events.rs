//! What has happened in the cluster lately, as this node saw it: nodes that fell silent, came, went or were drained, its own right to serve,
//! and the moves that it decided, each with what the planner said and what its steps took.
//!
//! It is kept in memory, so that a restart forgets it; where sites are now is in the records. Not here: what is done about any of
//! it (`placing`, `moves`, `authority`), what load called for (`balance::told`), the commands (`cli::events`).

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use nagaya_cmdb::instance::Act;
use nagaya_cmdb::{NodeName, Placement, Why};
use serde::Serialize;
use serde_json::{Value, json};

use super::membership::{Membership, unix_ms};
use super::placing::Known;
use crate::admin::{Node as _, Problem, list};

/// Kept of all but moves.
const EVENTS_MAX: usize = 512;

/// Kept of moves, by themselves: the sites of one dead node are not to push out that it died.
const MOVES_MAX: usize = 1_024;

/// Moves told of one site.
const MOVES_TOLD_MAX: usize = 10;

/// How often it is looked whether nodes have come or gone.
const LOOK_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum What {
    Joined {
        node: NodeName,
    },
    Removed {
        node: NodeName,
    },
    /// It tells nothing of itself any more.
    Gone {
        node: NodeName,
    },
    /// It does so again.
    Seen {
        node: NodeName,
    },
    Draining {
        node: NodeName,
    },
    Undrained {
        node: NodeName,
    },
    /// A request that came here had no answer from it, for this reason.
    Silent {
        node: NodeName,
        why: Why,
    },
    /// It answers after all.
    Answers {
        node: NodeName,
    },
    /// This node may run nothing that is placed on it.
    AuthorityLost,
    /// It may, by the word of the store or of the other members.
    AuthorityHeld {
        by: &'static str,
    },
    Moved(Move),
}

/// A site that got another place, by this node's decision.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Move {
    pub site: String,
    pub from: Option<NodeName>,
    pub to: String,
    pub epoch: u64,
    pub why: &'static str,
    /// Why there, in the planner's words.
    pub reason: String,
    /// Until the request that asked for it knew that it would not be answered.
    pub probe_us: u64,
    pub decide_us: u64,
    pub store_us: u64,
    /// For so long at most the first request waits until the node that had it can serve it no more.
    pub fence_ms: u32,
    /// For so long its image was on its way there, while requests went on where it was.
    pub fetch_us: u64,
    /// Until its node had let go of it, with its requests ended, and the store agreed. 0: it was not asked.
    pub release_us: u64,
}

impl Move {
    pub fn new(
        placement: &Placement,
        from: Option<NodeName>,
        to: &NodeName,
        why: Why,
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
struct Event {
    at_ms: u64,
    #[serde(flatten)]
    what: What,
}

/// The last of each, the oldest first.
#[derive(Debug, Default)]
pub struct Events {
    events: VecDeque<Event>,
    moves: VecDeque<Event>,
}

impl Events {
    pub fn note(&mut self, what: What) {
        let (kept, max) = match what {
            What::Moved(_) => (&mut self.moves, MOVES_MAX),
            _ => (&mut self.events, EVENTS_MAX),
        };
        if kept.len() >= max {
            kept.pop_front();
        }
        kept.push_back(Event { at_ms: unix_ms(), what });
    }

    /// The last so many of all, the latest first.
    fn last(&self, limit: usize) -> Vec<Value> {
        let mut all: Vec<&Event> = self.events.iter().chain(&self.moves).collect();
        // Of those of one millisecond each kind stays in its order.
        all.sort_by_key(|event| event.at_ms);
        all.into_iter().rev().take(limit).map(|event| json!(event)).collect()
    }

    /// The last moves of a site, the latest first.
    fn moves_of(&self, site: &str) -> Vec<Value> {
        let is_of = |event: &&Event| matches!(&event.what, What::Moved(moved) if moved.site == site);
        self.moves.iter().rev().filter(is_of).take(MOVES_TOLD_MAX).map(|event| json!(event)).collect()
    }
}

/// What was seen of one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sight {
    is_there: bool,
    is_draining: bool,
}

/// All members, as they were seen last. None: not yet.
type Sights = BTreeMap<NodeName, Sight>;

/// What has changed from one look to the next.
fn changes(before: &Sights, now: &Sights) -> Vec<What> {
    let mut changes = Vec::new();
    for (node, sight) in now {
        let node = || node.clone();
        let Some(before) = before.get(&node()) else {
            changes.push(What::Joined { node: node() });
            continue;
        };
        match (before.is_there, sight.is_there) {
            (true, false) => changes.push(What::Gone { node: node() }),
            (false, true) => changes.push(What::Seen { node: node() }),
            _ => {}
        }
        match (before.is_draining, sight.is_draining) {
            (false, true) => changes.push(What::Draining { node: node() }),
            (true, false) => changes.push(What::Undrained { node: node() }),
            _ => {}
        }
    }
    let gone = before.keys().filter(|node| !now.contains_key(*node));
    changes.extend(gone.map(|node| What::Removed { node: node.clone() }));
    changes
}

impl Membership {
    pub fn note(&self, what: What) {
        self.events.borrow_mut().note(what);
    }

    /// Looks who is there for as long as this node is a member.
    pub(super) async fn watch_nodes(self: Rc<Self>) {
        let mut before: Option<Sights> = None;
        loop {
            let known = self.known_nodes().unwrap_or_default();
            let sight = |node: Known| {
                let sight = Sight { is_there: node.load.is_some(), is_draining: node.record.draining };
                (node.record.name, sight)
            };
            let now: Sights = known.into_iter().map(sight).collect();
            // A node that cannot read its records sees nobody, which is no news; and its first look tells of nothing that happened.
            if !now.is_empty() {
                let changes = before.as_ref().map(|before| changes(before, &now)).unwrap_or_default();
                changes.into_iter().for_each(|change| self.note(change));
                before = Some(now);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// `nagaya events`.
    pub fn last_events(&self, limit: usize) -> Value {
        list("events", self.events.borrow().last(limit))
    }

    /// Why a site is where it is, for `nagaya explain`, and what its last wake here took. Its placement is null where it has none.
    pub async fn explain_placement(&self, site: &str) -> Result<Value, Box<Problem>> {
        let placement = self.records().placement(site)?;
        let placement = placement.filter(|_| self.records().site(site).is_ok_and(|site| site.is_some()));
        let (fallback, image_here) = match &placement {
            Some(placement) => self.fallbacks(std::slice::from_ref(placement)).swap_remove(0),
            None => (None, false),
        };
        let is_here = placement.as_ref().is_some_and(|placement| placement.part(&self.node).is_some());
        let wake = match is_here {
            true => self.last_wake(site).await,
            false => Value::Null,
        };
        Ok(json!({
            "site": site,
            "asked": self.node,
            "placement": placement,
            "fallback": fallback,
            "image_here": image_here,
            "last_wake": wake,
            "moves": self.events.borrow().moves_of(site),
        }))
    }

    async fn last_wake(&self, site: &str) -> Value {
        let told = self.context.node.instance(site.to_owned(), Act::Inspect).await;
        let told: Option<Value> = told.and_then(|text| serde_json::from_str(&text).ok());
        told.map_or(Value::Null, |mut told| told["last_wake"].take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    fn moved(site: &str, epoch: u64) -> What {
        What::Moved(Move { site: site.into(), epoch, to: "b".into(), why: "silent", ..Move::default() })
    }

    #[test]
    fn many_moves_do_not_push_out_why_there_were_so_many() {
        let mut events = Events::default();
        events.note(What::Silent { node: node("a"), why: Why::Silent });
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
            events.note(What::AuthorityLost);
        }
        assert_eq!(events.last(usize::MAX).len(), MOVES_MAX + EVENTS_MAX);
    }

    #[test]
    fn what_changes_of_nodes_from_one_look_to_the_next_is_told_once() {
        let sights = |nodes: &[(&str, bool, bool)]| -> Sights {
            let sight = |(name, is_there, is_draining): &(&str, _, _)| {
                (node(name), Sight { is_there: *is_there, is_draining: *is_draining })
            };
            nodes.iter().map(sight).collect()
        };
        let first = sights(&[("a", true, false), ("b", true, false), ("c", false, true)]);
        let second = sights(&[("a", false, true), ("c", true, false), ("d", true, false)]);
        assert_eq!(changes(&first, &first), []);
        assert_eq!(
            changes(&first, &second),
            [
                What::Gone { node: node("a") },
                What::Draining { node: node("a") },
                What::Seen { node: node("c") },
                What::Undrained { node: node("c") },
                What::Joined { node: node("d") },
                What::Removed { node: node("b") },
            ]
        );
    }
}
