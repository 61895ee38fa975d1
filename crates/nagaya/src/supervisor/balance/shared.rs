//! Sites that this node has together with others, and the CPUs that they use here. Each node
//! reports these to the others. So the last node to get a site knows when the others alone would be
//! enough.
//!
//! Not here: telling them (`cluster::load_publisher`), what follows (`nagaya_placement::balance`).

use std::collections::BTreeMap;

use nagaya_records::SiteName;
use parking_lot::Mutex;

use super::measure::SiteMeasure;

/// Sites that are reported to others: the first by name if there are more. A site that is not
/// reported keeps its replicas.
const TOLD_MAX: usize = 256;

/// `None` if it was not measured yet.
#[derive(Debug, Default)]
pub struct SharedUse(Mutex<BTreeMap<SiteName, Option<f32>>>);

impl SharedUse {
    /// Sets the complete list of sites.
    pub fn keep(&self, sites: impl Iterator<Item = SiteName>) {
        let mut known = self.0.lock();
        let mut before = std::mem::take(&mut *known);
        *known = sites.map(|site| (site.clone(), before.remove(&site).flatten())).collect();
    }

    pub fn has(&self, site: &SiteName) -> bool {
        self.0.lock().contains_key(site)
    }

    /// Notes new measurements of all running sites. Returns those of the list that do not run, as
    /// they rest.
    pub fn used(&self, measured: &[SiteMeasure]) -> Vec<SiteName> {
        let mut known = self.0.lock();
        if known.is_empty() {
            return Vec::new();
        }
        known.values_mut().for_each(|used| *used = Some(0.0));
        let mut resting: Vec<SiteName> = known.keys().cloned().collect();
        for one in measured {
            if let Some(used) = known.get_mut(&one.used.site) {
                *used = Some(one.cpus);
                resting.retain(|site| *site != one.used.site);
            }
        }
        resting
    }

    /// Returns the report for others.
    pub fn snapshot(&self) -> BTreeMap<SiteName, f32> {
        let known = self.0.lock();
        known.iter().filter_map(|(site, used)| Some((site.clone(), (*used)?))).take(TOLD_MAX).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resting_sites_use_nothing_and_unmeasured_ones_are_absent() {
        let site = |name: &str| SiteName::new(name).unwrap();
        let shared = SharedUse::default();
        let busy = SiteMeasure { cpus: 0.5, ..SiteMeasure::at_rest(site("busy")) };
        assert_eq!(shared.used(std::slice::from_ref(&busy)), [], "it is nobody else's");
        shared.keep([site("busy"), site("calm")].into_iter());
        assert_eq!(shared.snapshot(), BTreeMap::new());
        assert_eq!(shared.used(&[busy, SiteMeasure::at_rest(site("alone"))]), [site("calm")]);
        assert_eq!(shared.snapshot(), BTreeMap::from([(site("busy"), 0.5), (site("calm"), 0.0)]));
        shared.keep([site("busy"), site("new")].into_iter());
        assert_eq!(shared.snapshot(), BTreeMap::from([(site("busy"), 0.5)]));
        assert!(shared.has(&site("new")) && !shared.has(&site("calm")));
    }
}
