//! Counts the requests that need each site's instance now, over all threads of the edge.
//! `nagaya top` shows the counts.
//!
//! Not here: one thread's use of an instance (`instances`), lanes of sites and tenants
//! (`admission`).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nagaya_records::SiteName;
use parking_lot::Mutex;

/// Sites whose instance some thread uses, and no others.
#[derive(Debug, Default)]
pub struct DemandTable(Mutex<HashMap<SiteName, Arc<SiteDemand>>>);

/// Requests of one site. They are counted for a table on a screen, and to find requests that were
/// alone.
#[derive(Debug, Default)]
pub struct SiteDemand {
    /// Number of requests that ever needed it.
    come: AtomicU64,
    /// Number of requests that have its instance, or wait for it.
    all: AtomicU32,
    /// Number of requests that wait until it is awake.
    waiting: AtomicU32,
}

/// One thread's part in a site's count.
#[derive(Debug)]
pub struct ThreadDemand {
    needs: Arc<DemandTable>,
    site: SiteName,
    need: Arc<SiteDemand>,
}

/// One request that waits.
#[derive(Debug)]
pub struct WakeWaitGuard<'a>(&'a SiteDemand);

impl DemandTable {
    pub fn share(self: &Arc<Self>, site: &SiteName) -> ThreadDemand {
        let need = Arc::clone(self.0.lock().entry(site.clone()).or_default());
        ThreadDemand { needs: Arc::clone(self), site: site.clone(), need }
    }

    /// Returns each site with its requests that run and that wait for its instance.
    pub fn each(&self) -> Vec<(SiteName, u32, u32)> {
        let needs = self.0.lock();
        let row = |(site, need): (&SiteName, &Arc<SiteDemand>)| {
            let waiting = need.waiting.load(Ordering::Relaxed);
            (site.clone(), need.all.load(Ordering::Relaxed).saturating_sub(waiting), waiting)
        };
        needs.iter().map(row).collect()
    }
}

impl ThreadDemand {
    pub fn begin(&self) {
        // Counted in this order: a thread that sees the request in `all` also sees it in `come`.
        self.need.come.fetch_add(1, Ordering::AcqRel);
        self.need.all.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns a number for one request that needs it. It stays the same while no other request
    /// needs it. `None` if another does now.
    pub fn alone(&self) -> Option<u64> {
        let come = self.need.come.load(Ordering::Acquire);
        (self.need.all.load(Ordering::Acquire) == 1).then_some(come)
    }

    pub fn end(&self) {
        self.need.all.fetch_sub(1, Ordering::AcqRel);
    }

    pub fn wait(&self) -> WakeWaitGuard<'_> {
        self.need.waiting.fetch_add(1, Ordering::Relaxed);
        WakeWaitGuard(&self.need)
    }
}

impl Drop for ThreadDemand {
    fn drop(&mut self) {
        let mut needs = self.needs.0.lock();
        // These two are this one and the table's, so no other thread has a part. Nobody can take
        // one while the table is locked.
        if Arc::strong_count(&self.need) <= 2 {
            needs.remove(&self.site);
        }
    }
}

impl Drop for WakeWaitGuard<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn site_is_counted_over_all_threads_while_one_uses_it() {
        let needs = Arc::new(DemandTable::default());
        let site = SiteName::new("wiki").unwrap();
        let (one, other) = (needs.share(&site), needs.share(&site));
        one.begin();
        other.begin();
        let waiting = other.wait();
        assert_eq!(needs.each(), [(site.clone(), 1, 1)]);
        drop(waiting);
        other.end();
        drop(other);
        assert_eq!(needs.each(), [(site, 1, 0)]);
        one.end();
        drop(one);
        assert_eq!(needs.each(), []);
    }

    #[test]
    fn use_that_came_and_went_changes_the_mark_of_being_alone() {
        let needs = Arc::new(DemandTable::default());
        let site = SiteName::new("wiki").unwrap();
        let (one, other) = (needs.share(&site), needs.share(&site));
        one.begin();
        let alone = one.alone();
        assert!(alone.is_some());
        assert_eq!(one.alone(), alone);
        other.begin();
        assert_eq!((one.alone(), other.alone()), (None, None));
        other.end();
        assert_ne!(one.alone(), alone, "another was here meanwhile");
        one.end();
    }
}
