//! Transfers images to where they are needed next. Each node knows the sites of which it is the
//! fallback: those that would most likely move to it. It fetches their images in advance.
//!
//! A node searches all placements for such sites once, and again when nodes come or go. In between
//! it checks only changes. It requests the image of each such site when its placement or its record
//! has changed. While there is no image, the interval of requests grows. Later it requests it
//! occasionally, as an image may be collected or taken again.
//!
//! Each node reports to the others which of its wanted images it has ([`ImageInventory`]). A list
//! of all would be larger than the rest of its report of each second. But nearly always it has
//! nearly all of them, or none, as where nothing takes images. So it reports which of the two, and
//! the sites that are otherwise, as far as they fit. For all other sites, the fallback is taken to
//! have the image. A node of a version that does not report is taken to have all of them. Where
//! that is wrong, the site begins cold on the node that would have been first anyway.
//!
//! Not here: asking for them (`image_fetcher`), the way of the bytes (`nagaya_edge`), the images
//! that fit this node (`nagaya_keeper`), moving sites (`node_chooser`, `mover`).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

use nagaya_placement::planner::{self, NodeCandidate, SiteDemand};
use nagaya_records::feed::FetchResult;
use nagaya_records::{Backend, NodeName, Placement, RecordChange, SiteName};
use nagaya_store::{PAGE_LEN_MAX, Store, StoreError};
use parking_lot::Mutex;

use super::image_inventory::ImageInventory;
use super::known_node::{KnownNode, memory_of};

/// Changed sites that are checked one by one. Above it all placements are searched, which is about
/// as much work.
const TOUCHED_MAX: usize = 4096;

/// Interval between two requests for the same site while there is no image: doubled from the first
/// to the second.
const RETRY_FIRST: Duration = Duration::from_secs(2);
const RETRY_MAX: Duration = Duration::from_secs(3600);

/// Time after which a site is requested again although the records show no change.
const AGAIN_AFTER: Duration = Duration::from_secs(3600);

/// Bytes of written site names in a report: all nodes get them each second.
const OTHERWISE_BYTES_MAX: usize = 1024;

/// Sites whose records or placements have changed, as reported by the store's thread.
#[derive(Debug, Default)]
pub struct SiteChanges(Mutex<TouchedSites>);

#[derive(Debug, Default)]
pub struct TouchedSites {
    pub sites: HashSet<SiteName>,
    /// There were more than are kept.
    pub is_all: bool,
}

impl SiteChanges {
    pub fn note_changes(&self, changes: &[RecordChange]) {
        let mut changed = self.0.lock();
        for change in changes {
            let site = match change {
                RecordChange::PutPlacement(placement) => &placement.site,
                RecordChange::PutSite(site) => &site.name,
                RecordChange::DropPlacement(site) | RecordChange::DropSite(site) => site,
                _ => continue,
            };
            if changed.sites.len() >= TOUCHED_MAX {
                *changed = TouchedSites { is_all: true, ..TouchedSites::default() };
            }
            if !changed.is_all {
                changed.sites.insert(site.clone());
            }
        }
    }

    pub fn take(&self) -> TouchedSites {
        std::mem::take(&mut *self.0.lock())
    }
}

/// A site that would move here.
#[derive(Debug, Clone, PartialEq, Eq)]
struct WantedImage {
    /// The node that runs it.
    from: NodeName,
    epoch: u64,
    due: Instant,
    /// Time from the next fruitless try to the one after.
    wait: Duration,
    /// `None` if its image is not here.
    digest: Option<String>,
}

/// Sites that would move here, and when each is requested next.
#[derive(Debug, Default)]
pub struct WantedImages {
    wanted: HashMap<SiteName, WantedImage>,
    due: BTreeSet<(Instant, SiteName)>,
}

impl WantedImages {
    pub fn has(&self, site: &SiteName) -> bool {
        self.wanted.get(site).is_some_and(|wanted| wanted.digest.is_some())
    }

    /// Returns how many images are here, and how many should be.
    pub fn counts(&self) -> (usize, usize) {
        let here = self.wanted.values().filter(|wanted| wanted.digest.is_some()).count();
        (here, self.wanted.len())
    }

    /// Returns the report for others. If there are too many exceptions, the first by name are
    /// reported.
    pub fn stock(&self) -> ImageInventory {
        let (here, wanted) = self.counts();
        let most = here * 2 > wanted;
        let others = self.wanted.iter().filter(|(_, wanted)| wanted.digest.is_some() != most);
        let others: BTreeSet<&SiteName> = others.map(|(site, _)| site).collect();
        let mut left = OTHERWISE_BYTES_MAX;
        let fits = |site: &&&SiteName| {
            let fits = left.checked_sub(site.as_str().len() + r#""","#.len());
            left = fits.unwrap_or(0);
            fits.is_some()
        };
        ImageInventory { most, but: others.iter().take_while(fits).map(|site| (*site).clone()).collect() }
    }

    pub fn forget(&mut self, site: &SiteName) {
        if let Some(wanted) = self.wanted.remove(site) {
            self.due.remove(&(wanted.due, site.clone()));
        }
    }

    /// Requests a site at once, as its placement or record is new or changed. Earlier knowledge of
    /// its image holds until then.
    pub fn want(&mut self, placement: Placement, now: Instant) {
        let digest = self.wanted.get(&placement.site).and_then(|wanted| wanted.digest.clone());
        self.forget(&placement.site);
        self.due.insert((now, placement.site.clone()));
        let Placement { site, node: from, epoch, .. } = placement;
        self.wanted.insert(site, WantedImage { from, epoch, due: now, wait: RETRY_FIRST, digest });
    }

    /// Sets all wanted sites. Known ones keep their time.
    pub fn replace(&mut self, found: Vec<Placement>, now: Instant) {
        let names: HashSet<_> = found.iter().map(|placement| &placement.site).collect();
        let gone: Vec<_> = self.wanted.keys().filter(|site| !names.contains(site)).cloned().collect();
        gone.iter().for_each(|site| self.forget(site));
        for placement in found {
            let is_known = self
                .wanted
                .get(&placement.site)
                .is_some_and(|known| (known.epoch, &known.from) == (placement.epoch, &placement.node));
            if !is_known {
                self.want(placement, now);
            }
        }
    }

    /// Returns the next due site, its node and the epoch. It is not due again before its result is
    /// noted.
    pub fn next(&mut self, now: Instant) -> Option<(SiteName, NodeName, u64)> {
        let (due, site) = self.due.first()?.clone();
        if due > now {
            return None;
        }
        self.due.remove(&(due, site.clone()));
        let wanted = self.wanted.get(&site)?;
        Some((site, wanted.from.clone(), wanted.epoch))
    }

    /// Notes the result. `None` if there was no reply.
    pub fn note_fetched(&mut self, site: &SiteName, epoch: u64, fetched: Option<&FetchResult>, now: Instant) {
        let Some(wanted) = self.wanted.get_mut(site).filter(|wanted| wanted.epoch == epoch) else { return };
        self.due.remove(&(wanted.due, site.clone()));
        match fetched {
            Some(FetchResult::Here { digest, .. }) => {
                wanted.digest = Some(digest.clone());
                wanted.wait = RETRY_FIRST;
                wanted.due = now + AGAIN_AFTER;
            }
            Some(FetchResult::None | FetchResult::Failed { .. }) | None => {
                wanted.digest = None;
                wanted.due = now + wanted.wait;
                wanted.wait = (wanted.wait * 2).min(RETRY_MAX);
            }
        }
        self.due.insert((wanted.due, site.clone()));
    }
}

/// Data on which the choice of fallbacks depends.
pub type Lasting = Vec<(NodeName, bool, u32, u64)>;

pub fn lasting(known: &[KnownNode]) -> Lasting {
    let of = |node: &KnownNode| {
        let record = &node.record;
        (record.name.clone(), node.load.is_some() && !record.draining, record.cpus, record.memory_bytes)
    };
    known.iter().map(of).collect()
}

/// Returns the node to which the site would most likely move. `None` if there is none, or if it has
/// no application.
pub fn fallback_of<'a>(
    records: &dyn Store,
    placement: &Placement,
    candidates: &[NodeCandidate<'a>],
) -> Result<Option<&'a str>, StoreError> {
    let Some(site) = records.site(placement.site.as_str())? else { return Ok(None) };
    if !matches!(site.backend, Backend::App(_)) {
        return Ok(None);
    }
    let need = SiteDemand {
        site: placement.site.as_str(),
        memory_bytes: memory_of(&site),
        from: Some(placement.node.as_str()),
    };
    Ok(planner::fallback(&need, candidates))
}

/// Returns all placements of which this node is the fallback.
pub fn search(
    records: &dyn Store,
    node: &NodeName,
    known: &[KnownNode],
) -> Result<Vec<Placement>, StoreError> {
    let candidates: Vec<_> = known.iter().map(|node| node.as_candidate(None)).collect();
    let mut found = Vec::new();
    let mut after = None::<String>;
    loop {
        let page = records.placements(after.as_deref(), PAGE_LEN_MAX)?;
        let Some(last) = page.last() else { return Ok(found) };
        after = Some(last.site.to_string());
        for placement in page {
            if placement.node != *node
                && fallback_of(records, &placement, &candidates)? == Some(node.as_str())
            {
                found.push(placement);
            }
        }
    }
}

#[cfg(test)]
mod tests;
