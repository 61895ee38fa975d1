//! What one node has another do. An operator moves a site at a node that does not have it: the node that has it is told beside this
//! one's load, does it as if it were asked itself, and tells beside its own load what came of it. And a node that gives a site away
//! has the one that gets it bring its image there first.
//!
//! So what was asked ends with who asked: nothing of it stays in the store. Not here: moving a site (`moves`), how a node tells its
//! load (`nagaya_cmdb::store::etcd`).

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

use http::StatusCode;
use nagaya_cmdb::feed::Fetched;
use nagaya_cmdb::{NodeName, Placement, SiteName, Why};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::NOWHERE;
use super::load::Load;
use super::membership::Membership;
use super::pki;
use crate::admin::Problem;

/// Wishes of one node at once: an operator waits for each.
const OWN_MAX: usize = 8;

/// Wishes of others that a node sees to at once. The rest wait.
const OTHERS_MAX: usize = 16;

/// Of a reason why a site was not moved, so many bytes are told: all nodes get what one tells.
const REASON_LEN_MAX: usize = 200;

/// How often what others tell is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The node may be out of sight for so long: the store, or this machine, has slow moments.
const UNSEEN_MAX: Duration = Duration::from_secs(5);

/// Longest that a wish is waited for. Requests that run have 20 s to end, and the store may be slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long bringing an image to the node that gets a site may take. Without it, the site begins cold there.
pub const IMAGE_WITHIN: Duration = Duration::from_secs(20);

/// A site is to be moved away from `at`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wish {
    /// Random.
    pub id: String,
    pub at: NodeName,
    pub site: SiteName,
    /// None: to the best one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// Instead, its image is to be brought to `at` from this node. A version that does not know this moves nothing either, as the site
    /// does not run there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_from: Option<NodeName>,
}

/// What became of a wish.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Moved {
        node: NodeName,
        epoch: u64,
    },
    /// The image is there.
    Brought,
    Failed(String),
}

/// A node's own wishes, and what it has done about others'.
#[derive(Debug, Default)]
pub struct Wishes {
    own: BTreeMap<String, Wish>,
    /// None: it is being carried out.
    others: BTreeMap<String, Option<Outcome>>,
}

impl Wishes {
    /// Beside the load.
    pub fn tell(&self, load: &mut Load) {
        load.wishes = self.own.values().cloned().collect();
        let done = self.others.iter().filter_map(|(id, outcome)| Some((id.clone(), outcome.clone()?)));
        load.outcomes = done.collect();
    }

    /// Takes what others wish of this node: those that are new are to be carried out. What nobody wishes any more is forgotten.
    fn take(&mut self, wished: Vec<Wish>) -> Vec<Wish> {
        let ids: BTreeSet<_> = wished.iter().map(|wish| wish.id.as_str()).collect();
        // What runs is not begun a second time, should its wish be lost from sight for a moment.
        self.others.retain(|id, outcome| outcome.is_none() || ids.contains(id.as_str()));
        let mut new = Vec::new();
        for wish in wished {
            if self.others.len() < OTHERS_MAX && !self.others.contains_key(&wish.id) {
                self.others.insert(wish.id.clone(), None);
                new.push(wish);
            }
        }
        new
    }
}

impl Membership {
    /// Has the node that has the site move it; of several, the first.
    pub(super) async fn wish(
        &self,
        placement: &Placement,
        to: Option<NodeName>,
    ) -> Result<Value, Box<Problem>> {
        let unfit = |detail: String| Problem::cluster(StatusCode::CONFLICT, NOWHERE, detail);
        if self.wishes.borrow().own.len() >= OWN_MAX {
            return Err(unfit(format!("{OWN_MAX} sites are being moved from here already")));
        }
        let (site, at) = (placement.site.clone(), placement.node.clone());
        let id = pki::node_id()?;
        let to = to.map(|to| to.to_string());
        let wish = Wish { id, at: at.clone(), site: site.clone(), to, image_from: None };
        match self.wait_for(wish, PATIENCE).await {
            Some(Outcome::Moved { node, epoch }) => Ok(json!({ "site": site, "node": node, "epoch": epoch })),
            Some(Outcome::Failed(reason)) => Err(unfit(format!("'{at}' has '{site}': {reason}"))),
            Some(Outcome::Brought) | None => Err(unfit(format!(
                "'{at}', which has '{site}', has not said within {} s that it is moved: `nagaya placements` shows where it is",
                PATIENCE.as_secs()
            ))),
        }
    }

    /// Has the image of a site, which is here, brought to another node. False: it does not come, or not in time.
    pub(super) async fn bring_image(&self, site: &SiteName, to: &NodeName) -> bool {
        let is_full = self.wishes.borrow().own.len() >= OWN_MAX;
        let Some(id) = pki::node_id().ok().filter(|_| !is_full) else { return false };
        let image_from = Some(self.node.clone());
        let wish = Wish { id, at: to.clone(), site: site.clone(), to: None, image_from };
        let outcome = self.wait_for(wish, IMAGE_WITHIN).await;
        if let Some(Outcome::Failed(reason)) = &outcome {
            tracing::info!(%site, %to, "its image is not brought there: {reason}");
        }
        outcome == Some(Outcome::Brought)
    }

    /// Tells a wish until something has come of it. None: nothing, for so long.
    async fn wait_for(&self, wish: Wish, patience: Duration) -> Option<Outcome> {
        let (id, at) = (wish.id.clone(), wish.at.clone());
        self.wishes.borrow_mut().own.insert(id.clone(), wish);
        self.told.notify_one();
        let outcome = timeout(patience, self.outcome(&id, &at)).await;
        self.wishes.borrow_mut().own.remove(&id);
        self.told.notify_one();
        outcome.ok()
    }

    async fn outcome(&self, id: &str, at: &NodeName) -> Outcome {
        let mut seen = Instant::now();
        loop {
            sleep(LOOK_EVERY).await;
            let there = self.store.presences().into_iter().find(|presence| presence.node == *at);
            let is_confirmed = self.is_confirmed();
            if let Some(presence) = there.filter(|_| is_confirmed) {
                seen = Instant::now();
                let mut load: Load = serde_json::from_str(&presence.json).unwrap_or_default();
                if let Some(outcome) = load.outcomes.remove(id) {
                    return outcome;
                }
            } else if seen.elapsed() >= UNSEEN_MAX {
                let reason = match is_confirmed {
                    true => "it is not there; its applications move when somebody asks for them",
                    false => "the cluster's store does not answer now",
                };
                return Outcome::Failed(reason.into());
            }
        }
    }

    /// Does what other nodes wish, for as long as this node is a member.
    pub(super) async fn grant_wishes(self: Rc<Self>) {
        loop {
            sleep(LOOK_EVERY).await;
            let wished = self.store.presences().into_iter().filter(|told| told.node != self.node);
            // Mostly there is none.
            let wished = wished.filter(|told| told.json.contains("\"wishes\""));
            let wished = wished.filter_map(|told| serde_json::from_str::<Load>(&told.json).ok());
            let wished = wished.flat_map(|load| load.wishes).filter(|wish| wish.at == self.node).collect();
            for wish in self.wishes.borrow_mut().take(wished) {
                tokio::task::spawn_local(Rc::clone(&self).grant(wish));
            }
        }
    }

    async fn grant(self: Rc<Self>, wish: Wish) {
        let Wish { id, site, to, image_from, .. } = wish;
        let outcome = match image_from {
            Some(from) => match self.fetch(&site, &from).await {
                Some(Fetched::Here { .. }) => Outcome::Brought,
                Some(Fetched::None) => Outcome::Failed(format!("'{from}' has none")),
                Some(Fetched::Failed { reason }) => Outcome::Failed(shortened(&reason)),
                None => Outcome::Failed("its edge did not answer".into()),
            },
            None => match self.relocate_from_here(site.as_str(), to.as_deref(), Why::Operator).await {
                Ok(moved) => Outcome::Moved { node: moved.0, epoch: moved.1 },
                Err(problem) => Outcome::Failed(shortened(&problem.detail)),
            },
        };
        self.wishes.borrow_mut().others.insert(id, Some(outcome));
        self.told.notify_one();
    }
}

fn shortened(reason: &str) -> String {
    let end = (0..=REASON_LEN_MAX.min(reason.len())).rev().find(|at| reason.is_char_boundary(*at));
    reason[..end.unwrap_or(0)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(id: &str) -> Wish {
        let (at, site) = (NodeName::new("b").unwrap(), SiteName::new("wiki").unwrap());
        Wish { id: id.into(), at, site, to: None, image_from: None }
    }

    fn ids(wishes: &[Wish]) -> Vec<&str> {
        wishes.iter().map(|wish| wish.id.as_str()).collect()
    }

    #[test]
    fn a_wish_is_carried_out_once_and_told_until_nobody_has_it_any_more() {
        let mut wishes = Wishes::default();
        assert_eq!(ids(&wishes.take(vec![wish("1"), wish("2")])), ["1", "2"]);
        assert_eq!(ids(&wishes.take(vec![wish("1"), wish("2"), wish("3")])), ["3"]);
        wishes.others.insert("1".into(), Some(Outcome::Failed("no".into())));
        let mut load = Load::default();
        wishes.tell(&mut load);
        assert_eq!(load.outcomes.keys().collect::<Vec<_>>(), ["1"]);
        assert!(wishes.take(vec![wish("1"), wish("2"), wish("3")]).is_empty());
        // Lost from sight: what runs stays known, what has ended does not.
        assert!(wishes.take(vec![]).is_empty());
        assert_eq!(wishes.others.keys().collect::<Vec<_>>(), ["2", "3"]);
        assert!(wishes.take(vec![wish("2"), wish("3")]).is_empty());
    }

    #[test]
    fn more_wishes_than_are_seen_to_at_once_wait() {
        let mut wishes = Wishes::default();
        let many: Vec<_> = (0..=OTHERS_MAX).map(|n| wish(&format!("{n:02}"))).collect();
        assert_eq!(wishes.take(many.clone()).len(), OTHERS_MAX);
        wishes.others.insert("00".into(), Some(Outcome::Failed(String::new())));
        assert_eq!(ids(&wishes.take(many[1..].to_vec())), [many[OTHERS_MAX].id.as_str()]);
    }

    #[test]
    fn what_is_told_is_read_as_it_was_and_is_short() {
        let mut wishes = Wishes::default();
        let longest = |byte: &str| byte.repeat(nagaya_base::limits::NAME_LEN_MAX);
        for n in 0..OTHERS_MAX {
            let id = format!("{n:032}");
            let at = NodeName::new(&longest("n")).unwrap();
            let site = SiteName::new(&longest("s")).unwrap();
            if n < OWN_MAX {
                // One has either.
                let (to, image_from) = match n % 2 {
                    0 => (Some(longest("t")), None),
                    _ => (None, NodeName::new(&longest("f")).ok()),
                };
                wishes.own.insert(id.clone(), Wish { id: id.clone(), at, site, to, image_from });
            }
            wishes.others.insert(id, Some(Outcome::Failed(shortened(&"é".repeat(REASON_LEN_MAX)))));
        }
        let mut load = Load::default();
        wishes.tell(&mut load);
        let text = json!(load).to_string();
        assert!(text.len() < 8 << 10, "{} bytes", text.len());
        assert_eq!(serde_json::from_str::<Load>(&text).unwrap(), load);
        assert!(!json!(Load::default()).to_string().contains("wishes"));
    }
}
