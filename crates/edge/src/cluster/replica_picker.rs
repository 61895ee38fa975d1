//! Chooses one of several nodes that run a site's application. The chosen node has few requests
//! under way, and forwarding must be worth it.
//!
//! Each node counts the requests that came to itself, so nodes exchange no counts. Not here: the
//! list of nodes (`placement`), the number of replicas (`nagaya_placement::balance`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_records::{NodeName, SiteName};
use parking_lot::Mutex;

/// Number of further requests under way here before one is forwarded.
const HOP_WORTH: u32 = 1;

/// Time for which a node that did not answer gets no requests, while others have the same site.
const EJECTED_FOR: Duration = Duration::from_secs(1);

/// Nodes that are ejected at once: as many as a cluster has.
const EJECTED_MAX: usize = 1024;

/// One of the nodes that could take the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaLoad {
    pub is_here: bool,
    /// Number of this node's requests for the site under way there.
    pub under_way: u32,
}

/// Returns the position of the chosen node. `dice` is any number, another one for each request.
/// `loads` has at least one entry.
pub fn choose(loads: &[ReplicaLoad], dice: u64) -> usize {
    let own = loads.iter().position(|load| load.is_here);
    let others: Vec<usize> = (0..loads.len()).filter(|at| Some(*at) != own).collect();
    let Some(other) = less_of_two(loads, &others, dice) else { return own.unwrap_or(0) };
    match own {
        Some(own) if loads[own].under_way <= loads[other].under_way.saturating_add(HOP_WORTH) => own,
        _ => other,
    }
}

/// Returns the one with less work of two at random. That is as good as a comparison of all, and
/// not all nodes pick the same one.
fn less_of_two(loads: &[ReplicaLoad], others: &[usize], dice: u64) -> Option<usize> {
    let count = others.len() as u64;
    let first = dice.checked_rem(count)?;
    let step = (dice / count).checked_rem(count - 1).map_or(0, |step| step + 1);
    let [one, two] = [first, (first + step) % count].map(|at| others[at as usize]);
    Some(if loads[two].under_way < loads[one].under_way { two } else { one })
}

/// Requests of sites that several nodes have, and nodes that have just not answered.
#[derive(Debug, Default)]
pub struct ReplicaPicker {
    under_way: Mutex<HashMap<SiteName, HashMap<NodeName, u32>>>,
    ejected: Mutex<HashMap<NodeName, Instant>>,
}

impl ReplicaPicker {
    pub fn under_way(&self, site: &SiteName, node: &NodeName) -> u32 {
        self.under_way.lock().get(site).and_then(|nodes| nodes.get(node)).copied().unwrap_or(0)
    }

    pub fn eject(&self, node: &NodeName) {
        let mut ejected = self.ejected.lock();
        if ejected.len() >= EJECTED_MAX {
            ejected.clear();
        }
        ejected.insert(node.clone(), Instant::now());
    }

    pub fn is_ejected(&self, node: &NodeName) -> bool {
        self.ejected.lock().get(node).is_some_and(|since| since.elapsed() < EJECTED_FOR)
    }
}

/// Counts a request to one of several nodes, until this is dropped.
pub struct InFlightGuard {
    replica_picker: Arc<ReplicaPicker>,
    site: SiteName,
    node: NodeName,
}

impl InFlightGuard {
    pub fn begin(replica_picker: &Arc<ReplicaPicker>, site: &SiteName, node: &NodeName) -> Self {
        let mut under_way = replica_picker.under_way.lock();
        *under_way.entry(site.clone()).or_default().entry(node.clone()).or_default() += 1;
        drop(under_way);
        Self { replica_picker: Arc::clone(replica_picker), site: site.clone(), node: node.clone() }
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        let mut under_way = self.replica_picker.under_way.lock();
        let Some(nodes) = under_way.get_mut(&self.site) else { return };
        if let Some(count) = nodes.get_mut(&self.node) {
            *count -= 1;
            if *count == 0 {
                nodes.remove(&self.node);
            }
        }
        if nodes.is_empty() {
            under_way.remove(&self.site);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here(under_way: u32) -> ReplicaLoad {
        ReplicaLoad { is_here: true, under_way }
    }

    fn there(under_way: u32) -> ReplicaLoad {
        ReplicaLoad { is_here: false, under_way }
    }

    #[test]
    fn request_stays_unless_another_node_has_clearly_less_to_do() {
        for (loads, chosen) in [
            (vec![here(9)], 0),
            (vec![there(9)], 0),
            (vec![here(0), there(0)], 0),
            (vec![there(0), here(1)], 1),
            (vec![there(0), here(2)], 0),
            (vec![there(3), here(4)], 1),
            (vec![there(u32::MAX), here(u32::MAX)], 1),
        ] {
            for dice in 0..20 {
                assert_eq!(choose(&loads, dice), chosen, "{loads:?} {dice}");
            }
        }
    }

    #[test]
    fn choice_among_many_nodes_avoids_only_the_busiest() {
        let loads = [there(5), there(0), there(9), there(0)];
        let mut counts = [0; 4];
        (0..1200).for_each(|dice| counts[choose(&loads, dice)] += 1);
        assert_eq!(counts[2], 0, "of any two another one has less to do");
        assert!(counts[1] > counts[0] && counts[3] > counts[0] && counts[0] > 0, "{counts:?}");
        let alike = [there(1), there(1), there(1)];
        let mut counts = [0; 3];
        (0..1200).for_each(|dice| counts[choose(&alike, dice)] += 1);
        assert!(counts.iter().all(|count| *count == 400), "{counts:?}");
    }
}
