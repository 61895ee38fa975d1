//! How many requests need each site's instance now, over all threads of the edge: for `nagaya top`.
//!
//! Not here: one thread's use of an instance (`instances`), lines of sites and tenants (`gate`).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nagaya_cmdb::SiteName;
use parking_lot::Mutex;

/// Sites whose instance some thread uses, and no others.
#[derive(Debug, Default)]
pub struct Needs(Mutex<HashMap<SiteName, Arc<Need>>>);

/// Requests of one site. They are counted for a table on a screen, and to know which of them were alone.
#[derive(Debug, Default)]
pub struct Need {
    /// That ever needed it.
    come: AtomicU64,
    /// Have its instance, or wait for it.
    all: AtomicU32,
    /// Wait until it is awake.
    waiting: AtomicU32,
}

/// One thread's part in a site's count.
#[derive(Debug)]
pub struct Share {
    needs: Arc<Needs>,
    site: SiteName,
    need: Arc<Need>,
}

/// One request that waits.
#[derive(Debug)]
pub struct Waiting<'a>(&'a Need);

impl Needs {
    pub fn share(self: &Arc<Self>, site: &SiteName) -> Share {
        let need = Arc::clone(self.0.lock().entry(site.clone()).or_default());
        Share { needs: Arc::clone(self), site: site.clone(), need }
    }

    /// Each site with its requests that run and that wait for its instance.
    pub fn each(&self) -> Vec<(SiteName, u32, u32)> {
        let needs = self.0.lock();
        let row = |(site, need): (&SiteName, &Arc<Need>)| {
            let waiting = need.waiting.load(Ordering::Relaxed);
            (site.clone(), need.all.load(Ordering::Relaxed).saturating_sub(waiting), waiting)
        };
        needs.iter().map(row).collect()
    }
}

impl Share {
    pub fn begin(&self) {
        // In this order: who sees that one is there sees that it has come.
        self.need.come.fetch_add(1, Ordering::AcqRel);
        self.need.all.fetch_add(1, Ordering::AcqRel);
    }

    /// For one request that needs it: a number that stays the same as long as no other does. None: another does now.
    pub fn alone(&self) -> Option<u64> {
        let come = self.need.come.load(Ordering::Acquire);
        (self.need.all.load(Ordering::Acquire) == 1).then_some(come)
    }

    pub fn end(&self) {
        self.need.all.fetch_sub(1, Ordering::AcqRel);
    }

    pub fn wait(&self) -> Waiting<'_> {
        self.need.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(&self.need)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut needs = self.needs.0.lock();
        // This one's and the table's: no other thread has a part. Nobody can take one while the table is locked.
        if Arc::strong_count(&self.need) <= 2 {
            needs.remove(&self.site);
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_is_counted_over_all_threads_for_as_long_as_one_uses_it() {
        let needs = Arc::new(Needs::default());
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
    fn who_was_alone_is_known_also_of_those_who_came_and_went() {
        let needs = Arc::new(Needs::default());
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
