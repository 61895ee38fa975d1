//! A request that waits until its site has a place and is awake there: how long that will be, for whoever asks, and for those who
//! are told to come back.
//!
//! Not here: the prediction (`nagaya_placement::outlook`), the lines of sites and tenants (`admission`), how those who wait there
//! are told (`admission::turned`).

use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::SiteName;
use nagaya_placement::outlook::{Stages, Waiting};
use serde_json::{Value, json};

use super::{Passed, Relocated};
use crate::access_log::More;
use crate::admission;
use crate::cluster::boottime;
use crate::message::Head;
use crate::refusal::{Later, Refusal};
use crate::shared::Shared;

/// Of one request, until its answer is here or it is given up.
pub struct Wait {
    shared: Arc<Shared>,
    site: SiteName,
    /// When it began.
    pub predicted: Option<Duration>,
}

impl Wait {
    pub fn begin(shared: &Arc<Shared>, site: &SiteName) -> Self {
        shared.cluster.outlook.lock().begin(boottime(), site);
        let predicted = predicted(shared, site);
        Self { shared: Arc::clone(shared), site: site.clone(), predicted }
    }

    /// It is over: the application answers.
    pub fn answered(self, more: &More) {
        if let Some(seen) = stages(more) {
            self.shared.cluster.outlook.lock().learn(seen);
        }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.shared.cluster.outlook.lock().end(&self.site);
    }
}

/// What the wait was made of. None: there was none, or it had more than one place.
fn stages(more: &More) -> Option<Stages> {
    let [Relocated { asked, .. }] = &more.relocated[..] else { return None };
    let (wake, turn, fence) = match &more.passed {
        Some(Passed { stages, .. }) => {
            let took = |name: &str| {
                let us = stages.split(' ').find_map(|stage| stage.strip_prefix(name)?.strip_prefix('='));
                Duration::from_micros(us.and_then(|us| us.parse().ok()).unwrap_or(0))
            };
            (took("wake_us"), took(TURN), took("fence_us"))
        }
        None => (more.woken.as_ref().map_or(Duration::ZERO, |woken| woken.waited), turn(more), more.fence),
    };
    Some(Stages { place: *asked, wake: wake.saturating_sub(turn), fence })
}

/// How a node tells another one what a request has waited for its turn to be woken for.
pub const TURN: &str = "turn_us";

/// The same of a request here.
pub fn turn(more: &More) -> Duration {
    use nagaya_cmdb::instance::Stage::Queue;
    let Some(woken) = &more.woken else { return Duration::ZERO };
    let queued = woken.wake.stages.iter().filter(|(stage, _)| *stage == Queue).map(|(_, us)| us).sum();
    Duration::from_micros(queued).min(woken.waited)
}

fn predicted(shared: &Shared, site: &SiteName) -> Option<Duration> {
    let (now, at_once) = (boottime(), at_once(shared));
    shared.cluster.outlook.lock().predicted(now, site, at_once)
}

/// So many applications the other nodes wake at the same time: each as many as it has processors.
fn at_once(shared: &Shared) -> usize {
    let me = shared.cluster.own_name();
    let nodes = shared.with_table(|table| table.nodes());
    let others = nodes.iter().filter(|node| node.name != me && !node.draining);
    others.map(|node| node.cpus as usize).sum()
}

/// Sites whose requests wait now, for `nagaya explain SITE`.
pub fn rows(shared: &Shared) -> Vec<Value> {
    let (now, at_once) = (boottime(), at_once(shared));
    let outlook = shared.cluster.outlook.lock();
    let row = |(site, waiting): (&SiteName, &Waiting)| {
        json!({
            "site": site,
            "requests": waiting.requests,
            "since_seconds": now.since(waiting.since).as_secs_f64(),
            "wait_seconds": outlook.predicted(now, site, at_once).map(|wait| wait.as_secs_f64()),
        })
    };
    outlook.waiting().map(row).collect()
}

/// The same refusal, and when to come back, if it is one of a place.
pub fn come_back(mut refusal: Refusal, shared: &Shared, site: &SiteName, head: &Head) -> Refusal {
    let code = refusal.row().code;
    if let Refusal::Nowhere { later, .. } | Refusal::Unplaced { later, .. } = &mut refusal {
        let predicted = predicted(shared, site);
        let retry_after_seconds = admission::seconds(predicted);
        let notice = admission::unplaced(head, code, retry_after_seconds, predicted).map(Box::new);
        *later = Later { retry_after_seconds, notice };
    }
    refusal
}

#[cfg(test)]
mod tests {
    use nagaya_cmdb::{NodeName, Why};

    use super::*;

    #[test]
    fn what_a_wait_was_made_of_is_known_wherever_it_was_answered() {
        let ms = Duration::from_millis;
        let node = |name| NodeName::new(name).unwrap();
        let relocated = Relocated {
            why: Why::Silent,
            from: Some(node("b")),
            to: node("c"),
            epoch: 2,
            detect: ms(30),
            decide: ms(1),
            store: ms(3),
            asked: ms(5),
            predicted: None,
        };
        let stages_there = "wake_us=90000 fence_us=20000 backend_us=7000 turn_us=10000".into();
        let passed = Passed { node: node("c"), took: ms(120), connect: ms(1), stages: stages_there };
        let mut more = More { relocated: vec![relocated.clone()], passed: Some(passed), ..More::default() };
        assert_eq!(stages(&more), Some(Stages { place: ms(5), wake: ms(80), fence: ms(20) }));
        (more.passed, more.fence) = (None, ms(9));
        assert_eq!(stages(&more), Some(Stages { place: ms(5), wake: ms(0), fence: ms(9) }));
        more.relocated.push(relocated);
        assert_eq!(stages(&more), None);
    }
}
