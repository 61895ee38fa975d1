//! Which of the nodes that run a site's application a request goes to, where there are several: as few requests as elsewhere are to
//! be under way there, and a hop is to be worth it.
//!
//! Each node counts the requests that came to itself, so nobody tells anybody anything. Not here: which nodes there are
//! (`place`), that there are several (`nagaya_placement::balance`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_cmdb::{NodeName, SiteName};
use parking_lot::Mutex;

use crate::shared::Shared;

/// So many more requests may be under way here than there before one is passed on.
const HOP_WORTH: u32 = 1;

/// A node that did not answer gets none for so long, while others have the same site.
const SHUN_FOR: Duration = Duration::from_secs(1);

/// Nodes that are shunned at once: as many as a cluster has.
const SHUNNED_MAX: usize = 1024;

/// One of the nodes that could take the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    pub is_here: bool,
    /// Requests of this site that this node has there.
    pub under_way: u32,
}

/// The position of the node that gets it. `dice`: any number, another one for each request. There is at least one.
pub fn choose(loads: &[Load], dice: u64) -> usize {
    let own = loads.iter().position(|load| load.is_here);
    let others: Vec<usize> = (0..loads.len()).filter(|at| Some(*at) != own).collect();
    let Some(other) = less_of_two(loads, &others, dice) else { return own.unwrap_or(0) };
    match own {
        Some(own) if loads[own].under_way <= loads[other].under_way.saturating_add(HOP_WORTH) => own,
        _ => other,
    }
}

/// Of two at random the one with less to do: as good as to compare all, and not all nodes pick the same one.
fn less_of_two(loads: &[Load], others: &[usize], dice: u64) -> Option<usize> {
    let count = others.len() as u64;
    let first = dice.checked_rem(count)?;
    let step = (dice / count).checked_rem(count - 1).map_or(0, |step| step + 1);
    let [one, two] = [first, (first + step) % count].map(|at| others[at as usize]);
    Some(if loads[two].under_way < loads[one].under_way { two } else { one })
}

/// Requests of sites that several nodes have, and nodes that have just not answered.
#[derive(Debug, Default)]
pub struct Spread {
    under_way: Mutex<HashMap<SiteName, HashMap<NodeName, u32>>>,
    shunned: Mutex<HashMap<NodeName, Instant>>,
}

impl Spread {
    pub fn under_way(&self, site: &SiteName, node: &NodeName) -> u32 {
        self.under_way.lock().get(site).and_then(|nodes| nodes.get(node)).copied().unwrap_or(0)
    }

    pub fn shun(&self, node: &NodeName) {
        let mut shunned = self.shunned.lock();
        if shunned.len() >= SHUNNED_MAX {
            shunned.clear();
        }
        shunned.insert(node.clone(), Instant::now());
    }

    pub fn is_shunned(&self, node: &NodeName) -> bool {
        self.shunned.lock().get(node).is_some_and(|since| since.elapsed() < SHUN_FOR)
    }
}

/// A request that is on its way to one of several nodes, or there, until this is dropped.
pub struct Way {
    shared: Arc<Shared>,
    site: SiteName,
    node: NodeName,
}

impl Way {
    pub fn begin(shared: &Arc<Shared>, site: &SiteName, node: &NodeName) -> Self {
        let mut under_way = shared.cluster.spread.under_way.lock();
        *under_way.entry(site.clone()).or_default().entry(node.clone()).or_default() += 1;
        drop(under_way);
        Self { shared: Arc::clone(shared), site: site.clone(), node: node.clone() }
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        let mut under_way = self.shared.cluster.spread.under_way.lock();
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

    fn here(under_way: u32) -> Load {
        Load { is_here: true, under_way }
    }

    fn there(under_way: u32) -> Load {
        Load { is_here: false, under_way }
    }

    #[test]
    fn a_request_stays_where_it_came_until_there_is_clearly_less_to_do_elsewhere() {
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
    fn of_many_others_never_the_busiest_and_each_of_the_rest_now_and_then() {
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
