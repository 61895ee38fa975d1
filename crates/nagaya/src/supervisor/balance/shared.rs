//! Sites that this node has and others, too, with the CPUs that they use here: what each node tells the others, so that the last one
//! to get a site knows when all of it would fit on the others.
//!
//! Not here: telling them (`cluster::membership`), what follows (`nagaya_placement::balance`).

use std::collections::BTreeMap;

use nagaya_cmdb::SiteName;
use parking_lot::Mutex;

use super::measure::Measured;

/// Sites that others are told of; of more, the first by name. What is not told of keeps its copies.
const TOLD_MAX: usize = 256;

/// None: it was not measured yet.
#[derive(Debug, Default)]
pub struct Shared(Mutex<BTreeMap<SiteName, Option<f32>>>);

impl Shared {
    /// These are all of them.
    pub fn keep(&self, sites: impl Iterator<Item = SiteName>) {
        let mut known = self.0.lock();
        let mut before = std::mem::take(&mut *known);
        *known = sites.map(|site| (site.clone(), before.remove(&site).flatten())).collect();
    }

    pub fn has(&self, site: &SiteName) -> bool {
        self.0.lock().contains_key(site)
    }

    /// What was just measured of all that run here. Returns those of them that do not, as they rest.
    pub fn used(&self, measured: &[Measured]) -> Vec<SiteName> {
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

    /// What others are told.
    pub fn told(&self) -> BTreeMap<SiteName, f32> {
        let known = self.0.lock();
        known.iter().filter_map(|(site, used)| Some((site.clone(), (*used)?))).take(TOLD_MAX).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_rests_uses_nothing_and_what_was_not_measured_is_not_told() {
        let site = |name: &str| SiteName::new(name).unwrap();
        let shared = Shared::default();
        let busy = Measured { cpus: 0.5, ..Measured::at_rest(site("busy")) };
        assert_eq!(shared.used(std::slice::from_ref(&busy)), [], "it is nobody else's");
        shared.keep([site("busy"), site("calm")].into_iter());
        assert_eq!(shared.told(), BTreeMap::new());
        assert_eq!(shared.used(&[busy, Measured::at_rest(site("alone"))]), [site("calm")]);
        assert_eq!(shared.told(), BTreeMap::from([(site("busy"), 0.5), (site("calm"), 0.0)]));
        shared.keep([site("busy"), site("new")].into_iter());
        assert_eq!(shared.told(), BTreeMap::from([(site("busy"), 0.5)]));
        assert!(shared.has(&site("new")) && !shared.has(&site("calm")));
    }
}
