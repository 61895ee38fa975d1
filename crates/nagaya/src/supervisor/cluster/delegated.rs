//! Tasks that one node delegates to another. An operator moves a site at a node that does not have
//! it. The node that has it gets the task with this node's load report. It does it as its own, and
//! reports the outcome with its own load. Also, a node that gives a site away first has the next
//! one fetch its image.
//!
//! A task ends with the node that asked for it: nothing of it stays in the store.
//!
//! Not here: doing the tasks of others (`task_runner`), moving a site (`mover`), how a node reports
//! its load (`nagaya_store::etcd`).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

use http::StatusCode;
use nagaya_records::{NodeName, Placement, SiteName};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::codes::NOWHERE;
use super::delegated_task::{DelegatedTask, TaskOutcome};
use super::load::NodeReport;
use super::pki;
use super::view::ClusterView;
use crate::admin::ProblemReply;

/// Tasks of one node at once: an operator waits for each.
const OWN_MAX: usize = 8;

/// Tasks of others that a node handles at once. The rest waits.
const OTHERS_MAX: usize = 16;

/// Bytes of a reported reason why a site was not moved: all nodes get each report.
const REASON_LEN_MAX: usize = 200;

/// Interval of checks of the others' reports.
pub const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Time for which the node may be absent: the store, or this machine, has slow moments.
const UNSEEN_MAX: Duration = Duration::from_secs(5);

/// Longest wait for a task. Running requests have 20 s to end, and the store may be slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// Longest time to fetch an image to the next node of a site. Without it, the site starts cold
/// there.
pub const IMAGE_WITHIN: Duration = Duration::from_secs(20);

/// A node's own tasks, and the outcomes of others'.
#[derive(Debug, Default)]
pub struct TaskBoard {
    own: BTreeMap<String, DelegatedTask>,
    /// `None` while it is being carried out.
    others: BTreeMap<String, Option<TaskOutcome>>,
}

impl TaskBoard {
    /// Adds them to the load report.
    pub fn fill_report(&self, load: &mut NodeReport) {
        load.wishes = self.own.values().cloned().collect();
        let done = self.others.iter().filter_map(|(id, outcome)| Some((id.clone(), outcome.clone()?)));
        load.outcomes = done.collect();
    }

    /// Takes the others' tasks for this node. Returns new ones, which must be carried out. Tasks
    /// that are no longer reported are forgotten.
    fn take(&mut self, wished: Vec<DelegatedTask>) -> Vec<DelegatedTask> {
        let ids: BTreeSet<_> = wished.iter().map(|wish| wish.id.as_str()).collect();
        // A task in progress is not started again, even if its report is missing for a moment.
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

pub struct DelegatedTasks {
    view: Rc<ClusterView>,
    wishes: RefCell<TaskBoard>,
    /// There is more to report than the load.
    told: Notify,
}

impl DelegatedTasks {
    pub fn new(view: Rc<ClusterView>) -> Self {
        Self { view, wishes: RefCell::default(), told: Notify::new() }
    }

    /// Adds what this node asks, and what it has done, to what it tells of itself.
    pub fn add_to(&self, load: &mut NodeReport) {
        self.wishes.borrow().fill_report(load);
    }

    /// Returns when there is more to add.
    pub async fn changed(&self) {
        self.told.notified().await;
    }

    /// Takes what others ask of this node. Returns what is new and has to be done now.
    pub fn accept(&self, wished: Vec<DelegatedTask>) -> Vec<DelegatedTask> {
        self.wishes.borrow_mut().take(wished)
    }

    /// Notes that another node's task is done, or has failed.
    pub fn finish(&self, id: String, outcome: TaskOutcome) {
        self.wishes.borrow_mut().others.insert(id, Some(outcome));
        self.told.notify_one();
    }

    /// Has the node that has the site move it; of several, the first.
    pub async fn have_moved(
        &self,
        placement: &Placement,
        to: Option<NodeName>,
    ) -> Result<Value, Box<ProblemReply>> {
        let unfit = |detail: String| ProblemReply::cluster(StatusCode::CONFLICT, NOWHERE, detail);
        if self.wishes.borrow().own.len() >= OWN_MAX {
            return Err(unfit(format!("{OWN_MAX} sites are being moved from here already")));
        }
        let site = placement.site.clone();
        let at = placement.node.clone();
        let id = pki::node_id()?;
        let to = to.map(|to| to.to_string());
        let wish = DelegatedTask { id, at: at.clone(), site: site.clone(), to, image_from: None };
        match self.wait_for(wish, PATIENCE).await {
            Some(TaskOutcome::Moved { node, epoch }) => {
                Ok(json!({ "site": site, "node": node, "epoch": epoch }))
            }
            Some(TaskOutcome::Failed(reason)) => Err(unfit(format!("'{at}' has '{site}': {reason}"))),
            Some(TaskOutcome::Brought) | None => Err(unfit(format!(
                "'{at}', which has '{site}', has not confirmed the move within {} s: `nagaya placements` shows where it is",
                PATIENCE.as_secs()
            ))),
        }
    }

    /// Has another node fetch the image of a site from here. Returns false if it does not, or not
    /// in time.
    pub async fn bring_image(&self, site: &SiteName, to: &NodeName) -> bool {
        let is_full = self.wishes.borrow().own.len() >= OWN_MAX;
        let Some(id) = pki::node_id().ok().filter(|_| !is_full) else { return false };
        let image_from = Some(self.view.node.clone());
        let wish = DelegatedTask { id, at: to.clone(), site: site.clone(), to: None, image_from };
        let outcome = self.wait_for(wish, IMAGE_WITHIN).await;
        if let Some(TaskOutcome::Failed(reason)) = &outcome {
            tracing::info!(%site, %to, "its image is not brought there: {reason}");
        }
        outcome == Some(TaskOutcome::Brought)
    }

    /// Reports a task until it has an outcome. `None` if there is none in time.
    async fn wait_for(&self, wish: DelegatedTask, patience: Duration) -> Option<TaskOutcome> {
        let id = wish.id.clone();
        let at = wish.at.clone();
        self.wishes.borrow_mut().own.insert(id.clone(), wish);
        self.told.notify_one();
        let outcome = timeout(patience, self.outcome(&id, &at)).await;
        self.wishes.borrow_mut().own.remove(&id);
        self.told.notify_one();
        outcome.ok()
    }

    async fn outcome(&self, id: &str, at: &NodeName) -> TaskOutcome {
        let mut seen = Instant::now();
        loop {
            sleep(LOOK_EVERY).await;
            let there = self.view.store.presences().into_iter().find(|presence| presence.node == *at);
            let is_confirmed = self.view.lease().is_confirmed();
            if let Some(presence) = there.filter(|_| is_confirmed) {
                seen = Instant::now();
                let mut load: NodeReport = serde_json::from_str(&presence.json).unwrap_or_default();
                if let Some(outcome) = load.outcomes.remove(id) {
                    return outcome;
                }
            } else if seen.elapsed() >= UNSEEN_MAX {
                let reason = if is_confirmed {
                    "it is not there; its applications move when somebody asks for them"
                } else {
                    "the cluster's store does not answer now"
                };
                return TaskOutcome::Failed(reason.into());
            }
        }
    }
}

pub fn shortened(reason: &str) -> String {
    let end = (0..=REASON_LEN_MAX.min(reason.len())).rev().find(|at| reason.is_char_boundary(*at));
    reason[..end.unwrap_or(0)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(id: &str) -> DelegatedTask {
        let at = NodeName::new("b").unwrap();
        let site = SiteName::new("wiki").unwrap();
        DelegatedTask { id: id.into(), at, site, to: None, image_from: None }
    }

    fn ids(wishes: &[DelegatedTask]) -> Vec<&str> {
        wishes.iter().map(|wish| wish.id.as_str()).collect()
    }

    #[test]
    fn a_task_runs_once_and_is_kept_until_nobody_asks_for_it() {
        let mut wishes = TaskBoard::default();
        assert_eq!(ids(&wishes.take(vec![wish("1"), wish("2")])), ["1", "2"]);
        assert_eq!(ids(&wishes.take(vec![wish("1"), wish("2"), wish("3")])), ["3"]);
        wishes.others.insert("1".into(), Some(TaskOutcome::Failed("no".into())));
        let mut load = NodeReport::default();
        wishes.fill_report(&mut load);
        assert_eq!(load.outcomes.keys().collect::<Vec<_>>(), ["1"]);
        assert!(wishes.take(vec![wish("1"), wish("2"), wish("3")]).is_empty());
        // Lost from sight: what runs stays known, what has ended does not.
        assert!(wishes.take(vec![]).is_empty());
        assert_eq!(wishes.others.keys().collect::<Vec<_>>(), ["2", "3"]);
        assert!(wishes.take(vec![wish("2"), wish("3")]).is_empty());
    }

    #[test]
    fn more_wishes_than_are_seen_to_at_once_wait() {
        let mut wishes = TaskBoard::default();
        let many: Vec<_> = (0..=OTHERS_MAX).map(|n| wish(&format!("{n:02}"))).collect();
        assert_eq!(wishes.take(many.clone()).len(), OTHERS_MAX);
        wishes.others.insert("00".into(), Some(TaskOutcome::Failed(String::new())));
        assert_eq!(ids(&wishes.take(many[1..].to_vec())), [many[OTHERS_MAX].id.as_str()]);
    }

    #[test]
    fn reported_wishes_read_back_unchanged_and_are_short() {
        let mut wishes = TaskBoard::default();
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
                wishes.own.insert(id.clone(), DelegatedTask { id: id.clone(), at, site, to, image_from });
            }
            wishes.others.insert(id, Some(TaskOutcome::Failed(shortened(&"é".repeat(REASON_LEN_MAX)))));
        }
        let mut load = NodeReport::default();
        wishes.fill_report(&mut load);
        let text = json!(load).to_string();
        assert!(text.len() < 8 << 10, "{} bytes", text.len());
        assert_eq!(serde_json::from_str::<NodeReport>(&text).unwrap(), load);
        assert!(!json!(NodeReport::default()).to_string().contains("wishes"));
    }
}
