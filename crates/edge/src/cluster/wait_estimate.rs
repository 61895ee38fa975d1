//! Predicts how long a request waits for placement and wake-up. `explain` and `Retry-After` use
//! it.
//!
//! Not here: the prediction (`nagaya_placement::outlook`), the lines of sites and tenants
//! (`admission`), the notice to requests that wait there (`gate::turned`).

use std::sync::Arc;
use std::time::Duration;

use nagaya_placement::outlook::{WaitStages, WaitingSite};
use nagaya_records::SiteName;
use serde_json::{Value, json};

use crate::cluster::membership::EdgeCluster;
use crate::cluster::node_lease::boottime;
use crate::record::access_record::{AccessDetails, ForwardedTo, Relocation};

/// Wait of one request, until its answer is here or it is given up.
pub struct PlacementWait {
    cluster: Arc<EdgeCluster>,
    site: SiteName,
    /// Prediction at its beginning.
    pub predicted: Option<Duration>,
}

impl PlacementWait {
    pub fn begin(cluster: &Arc<EdgeCluster>, site: &SiteName) -> Self {
        cluster.outlook.lock().begin(boottime(), site);
        let predicted = predicted(cluster, site);
        Self { cluster: Arc::clone(cluster), site: site.clone(), predicted }
    }

    /// Records that it is over: the application answers.
    pub fn answered(self, more: &AccessDetails) {
        if let Some(seen) = stages(more) {
            self.cluster.outlook.lock().learn(seen);
        }
    }
}

impl Drop for PlacementWait {
    fn drop(&mut self) {
        self.cluster.outlook.lock().end(&self.site);
    }
}

/// Returns the parts of the wait. `None` if there was none, or if it had more than one place.
fn stages(more: &AccessDetails) -> Option<WaitStages> {
    let [Relocation { asked, .. }] = &more.relocated[..] else { return None };
    let (wake, turn, fence) = match &more.passed {
        Some(ForwardedTo { stages, .. }) => {
            let took = |name: &str| {
                let us = stages.split(' ').find_map(|stage| stage.strip_prefix(name)?.strip_prefix('='));
                Duration::from_micros(us.and_then(|us| us.parse().ok()).unwrap_or(0))
            };
            (took("wake_us"), took(TURN), took("fence_us"))
        }
        None => (more.woken.as_ref().map_or(Duration::ZERO, |woken| woken.waited), turn(more), more.fence),
    };
    Some(WaitStages { place: *asked, wake: wake.saturating_sub(turn), fence })
}

/// Name of the field in which a node reports how long a request waited for its wake slot.
pub const TURN: &str = "turn_us";

/// Returns that wait of a request here.
pub fn turn(more: &AccessDetails) -> Duration {
    use nagaya_records::instance::WakeStage::Queue;
    let Some(woken) = &more.woken else { return Duration::ZERO };
    let queued = woken.wake.stages.iter().filter(|(stage, _)| *stage == Queue).map(|(_, us)| us).sum();
    Duration::from_micros(queued).min(woken.waited)
}

/// How long a request of this site waits from now on, as far as is known.
pub fn predicted(cluster: &EdgeCluster, site: &SiteName) -> Option<Duration> {
    let (now, at_once) = (boottime(), at_once(cluster));
    cluster.outlook.lock().predicted(now, site, at_once)
}

/// Returns the number of applications that the other nodes wake at the same time: one for each
/// CPU.
fn at_once(cluster: &EdgeCluster) -> usize {
    let me = cluster.own_name();
    let nodes = cluster.table.read(|table| table.nodes());
    let others = nodes.iter().filter(|node| node.name != me && !node.draining);
    others.map(|node| node.cpus as usize).sum()
}

/// Returns the sites whose requests wait now, for `nagaya explain SITE`.
pub fn rows(cluster: &EdgeCluster) -> Vec<Value> {
    let (now, at_once) = (boottime(), at_once(cluster));
    let outlook = cluster.outlook.lock();
    let row = |(site, waiting): (&SiteName, &WaitingSite)| {
        json!({
            "site": site,
            "requests": waiting.requests,
            "since_seconds": now.since(waiting.since).as_secs_f64(),
            "wait_seconds": outlook.predicted(now, site, at_once).map(|wait| wait.as_secs_f64()),
        })
    };
    outlook.waiting().map(row).collect()
}

#[cfg(test)]
mod tests {
    use nagaya_records::{NodeName, PlacementReason};

    use super::*;

    #[test]
    fn stages_of_a_wait_are_known_wherever_it_was_answered() {
        let ms = Duration::from_millis;
        let node = |name| NodeName::new(name).unwrap();
        let relocated = Relocation {
            why: PlacementReason::Silent,
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
        let passed = ForwardedTo { node: node("c"), took: ms(120), connect: ms(1), stages: stages_there };
        let mut more = AccessDetails {
            relocated: vec![relocated.clone()],
            passed: Some(passed),
            ..AccessDetails::default()
        };
        assert_eq!(stages(&more), Some(WaitStages { place: ms(5), wake: ms(80), fence: ms(20) }));
        (more.passed, more.fence) = (None, ms(9));
        assert_eq!(stages(&more), Some(WaitStages { place: ms(5), wake: ms(0), fence: ms(9) }));
        more.relocated.push(relocated);
        assert_eq!(stages(&more), None);
    }
}
