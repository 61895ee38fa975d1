//! Images go to where they are needed next: each node knows the sites that would most likely move to it (the planner's
//! fallback), and has their images brought here before.
//!
//! What this node is the fallback of is found once among all placements, and again when nodes come or go; in between only
//! what has changed is looked at. Each such site is asked for when its placement or its record has changed, then less and
//! less often while there is no image yet, and now and then afterwards, as an image may be collected or taken anew.
//!
//! Each node tells the others which of the images that it wants it has ([`Stock`]). A list of all would be larger than all else that a
//! node tells of itself each second; but nearly always it has nearly all of them, or none, as where nothing takes images. So it
//! tells which of the two, and the sites that are otherwise, as far as they fit. Of the rest, and of nodes of a version that does not tell, a
//! site's fallback is taken to have its image; where that is wrong the site begins cold on the node that would have been first anyway.
//!
//! Not here: the way of the bytes (`nagaya_edge`), what fits this node (`nagaya_keeper`), moving sites (`placing`, `moves`).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_cmdb::feed::{FETCH_MAX, Fetched, Question};
use nagaya_cmdb::store::{PAGE_LEN_MAX, Store, StoreError};
use nagaya_cmdb::{Backend, Change, NodeName, Placement, SiteName};
use nagaya_keeper::image::give_order;
use nagaya_placement::planner::{self, Candidate, Need};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::super::child::Role;
use super::membership::Membership;
use super::placing::{Known, candidate, memory_of};

/// How often it is looked whether anything is to be done.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Nodes come and go in groups; all placements are gone through at most this often.
const SEARCH_EVERY: Duration = Duration::from_secs(5);

/// Changed sites that are looked at one by one. Beyond it all placements are gone through: about as much work.
const TOUCHED_MAX: usize = 4096;

/// Sites asked for in one look: 40 a second, so that what has no image costs other nodes little.
const ASKED_AT_ONCE: usize = 20;

/// Between two questions for the same site, while there is no image: doubled from the first to the second.
const RETRY_FIRST: Duration = Duration::from_secs(2);
const RETRY_MAX: Duration = Duration::from_secs(3600);

/// After this the same is asked again although nothing has changed that the records tell.
const AGAIN_AFTER: Duration = Duration::from_secs(3600);

/// Names of sites that others are told of, in bytes as they are written: all nodes get them each second.
const OTHERWISE_BYTES_MAX: usize = 1024;

/// Beyond the time that the edge allows itself.
const PATIENCE: Duration = FETCH_MAX.saturating_add(Duration::from_secs(60));

/// Sites whose records or placements have changed, as the store's thread tells.
#[derive(Debug, Default)]
pub struct Touched(Mutex<Changed>);

#[derive(Debug, Default)]
pub struct Changed {
    pub sites: HashSet<SiteName>,
    /// There were more than are kept.
    pub is_all: bool,
}

impl Touched {
    pub fn by(&self, changes: &[Change]) {
        let mut changed = self.0.lock();
        for change in changes {
            let site = match change {
                Change::PutPlacement(placement) => &placement.site,
                Change::PutSite(site) => &site.name,
                Change::DropPlacement(site) | Change::DropSite(site) => site,
                _ => continue,
            };
            if changed.sites.len() >= TOUCHED_MAX {
                *changed = Changed { is_all: true, ..Changed::default() };
            }
            if !changed.is_all {
                changed.sites.insert(site.clone());
            }
        }
    }

    pub fn take(&self) -> Changed {
        std::mem::take(&mut *self.0.lock())
    }
}

/// Which images are on a node, of the sites that would move there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stock {
    /// All of them, or none; but for these sites.
    most: bool,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    but: BTreeSet<SiteName>,
}

impl Stock {
    pub fn has(&self, site: &SiteName) -> bool {
        self.most != self.but.contains(site)
    }
}

/// A site that would move here.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    /// The node that runs it.
    from: NodeName,
    epoch: u64,
    due: Instant,
    /// How long after the next try that brings nothing.
    wait: Duration,
    /// None: its image is not here.
    digest: Option<String>,
}

/// Sites that would move here, and when each is asked for next.
#[derive(Debug, Default)]
pub struct Images {
    wanted: HashMap<SiteName, Wanted>,
    due: BTreeSet<(Instant, SiteName)>,
}

impl Images {
    pub fn has(&self, site: &SiteName) -> bool {
        self.wanted.get(site).is_some_and(|wanted| wanted.digest.is_some())
    }

    /// How many are here, and how many should be.
    pub fn counts(&self) -> (usize, usize) {
        let here = self.wanted.values().filter(|wanted| wanted.digest.is_some()).count();
        (here, self.wanted.len())
    }

    /// What others are told. Where too many are otherwise than most, the first of them by name are told.
    pub fn stock(&self) -> Stock {
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
        Stock { most, but: others.iter().take_while(fits).map(|site| (*site).clone()).collect() }
    }

    fn forget(&mut self, site: &SiteName) {
        if let Some(wanted) = self.wanted.remove(site) {
            self.due.remove(&(wanted.due, site.clone()));
        }
    }

    /// The site's placement or record has changed, or is new here: it is asked for at once. What was known of its image holds
    /// until then.
    fn want(&mut self, placement: Placement, now: Instant) {
        let digest = self.wanted.get(&placement.site).and_then(|wanted| wanted.digest.clone());
        self.forget(&placement.site);
        self.due.insert((now, placement.site.clone()));
        let Placement { site, node: from, epoch, .. } = placement;
        self.wanted.insert(site, Wanted { from, epoch, due: now, wait: RETRY_FIRST, digest });
    }

    /// All that is wanted now. What was known already keeps its time.
    fn replace(&mut self, found: Vec<Placement>, now: Instant) {
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

    /// The next site that is due, with the node that has it and the epoch. It is not due again before it was told.
    fn next(&mut self, now: Instant) -> Option<(SiteName, NodeName, u64)> {
        let (due, site) = self.due.first()?.clone();
        if due > now {
            return None;
        }
        self.due.remove(&(due, site.clone()));
        let wanted = self.wanted.get(&site)?;
        Some((site, wanted.from.clone(), wanted.epoch))
    }

    /// What came of it. None: nobody has answered.
    fn told(&mut self, site: &SiteName, epoch: u64, fetched: Option<&Fetched>, now: Instant) {
        let Some(wanted) = self.wanted.get_mut(site).filter(|wanted| wanted.epoch == epoch) else { return };
        self.due.remove(&(wanted.due, site.clone()));
        match fetched {
            Some(Fetched::Here { digest, .. }) => {
                wanted.digest = Some(digest.clone());
                (wanted.wait, wanted.due) = (RETRY_FIRST, now + AGAIN_AFTER);
            }
            Some(Fetched::None | Fetched::Failed { .. }) | None => {
                wanted.digest = None;
                wanted.due = now + wanted.wait;
                wanted.wait = (wanted.wait * 2).min(RETRY_MAX);
            }
        }
        self.due.insert((wanted.due, site.clone()));
    }
}

/// What the choice of fallbacks depends on.
type Lasting = Vec<(NodeName, bool, u32, u64)>;

fn lasting(known: &[Known]) -> Lasting {
    let of = |node: &Known| {
        let record = &node.record;
        (record.name.clone(), node.load.is_some() && !record.draining, record.cpus, record.memory_bytes)
    };
    known.iter().map(of).collect()
}

/// The node that the site would most likely move to. None: nowhere, or it has no application.
fn fallback_of<'a>(
    records: &dyn Store,
    placement: &Placement,
    candidates: &[Candidate<'a>],
) -> Result<Option<&'a str>, StoreError> {
    let Some(site) = records.site(placement.site.as_str())? else { return Ok(None) };
    if !matches!(site.backend, Backend::App(_)) {
        return Ok(None);
    }
    let need = Need {
        site: placement.site.as_str(),
        memory_bytes: memory_of(&site),
        from: Some(placement.node.as_str()),
    };
    Ok(planner::fallback(&need, candidates))
}

/// All placements of which this node is the fallback.
fn search(records: &dyn Store, node: &NodeName, known: &[Known]) -> Result<Vec<Placement>, StoreError> {
    let candidates: Vec<_> = known.iter().map(|node| candidate(node, None)).collect();
    let (mut found, mut after) = (Vec::new(), None::<String>);
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

impl Membership {
    /// Where each of these would move to, and whether its image is here.
    pub fn fallbacks(&self, placements: &[Placement]) -> Vec<(Option<String>, bool)> {
        let known = self.known_nodes().unwrap_or_default();
        let candidates: Vec<_> = known.iter().map(|node| candidate(node, None)).collect();
        let images = self.images.borrow();
        let of = |placement: &Placement| {
            let fallback = fallback_of(self.records(), placement, &candidates).ok().flatten();
            (fallback.map(ToOwned::to_owned), images.has(&placement.site))
        };
        placements.iter().map(of).collect()
    }

    /// Brings images here for as long as this node is a member.
    pub(super) async fn fetch_images(self: Rc<Self>) {
        let (mut searched, mut last) = (None::<Instant>, Lasting::new());
        loop {
            let changed = self.touched.take();
            let known = self.known_nodes().unwrap_or_default();
            let now_lasting = lasting(&known);
            let is_time = searched.is_none_or(|searched| searched.elapsed() >= SEARCH_EVERY);
            if changed.is_all {
                last.clear();
            }
            self.look_at(&changed.sites, &known);
            if now_lasting != last && is_time {
                searched = Some(Instant::now());
                if self.search_images(known).await {
                    last = now_lasting;
                }
            }
            self.fetch_due().await;
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// False: the records could not be read.
    async fn search_images(&self, known: Vec<Known>) -> bool {
        let (records, node) = (Arc::clone(&self.context.records), self.node.clone());
        let found = tokio::task::spawn_blocking(move || search(&*records, &node, &known)).await;
        let Ok(Ok(found)) = found else { return false };
        self.images.borrow_mut().replace(found, Instant::now());
        true
    }

    fn look_at(&self, sites: &HashSet<SiteName>, known: &[Known]) {
        let candidates: Vec<_> = known.iter().map(|node| candidate(node, None)).collect();
        for site in sites {
            let placement = self.records().placement(site.as_str()).ok().flatten();
            let placement = placement.filter(|placement| {
                let fallback = fallback_of(self.records(), placement, &candidates);
                placement.node != self.node && fallback.is_ok_and(|it| it == Some(self.node.as_str()))
            });
            let mut images = self.images.borrow_mut();
            match placement {
                Some(placement) => images.want(placement, Instant::now()),
                None => images.forget(site),
            }
        }
    }

    /// One after the other, as the edge takes one at a time.
    async fn fetch_due(&self) {
        for _ in 0..ASKED_AT_ONCE {
            let next = self.images.borrow_mut().next(Instant::now());
            let Some((site, from, epoch)) = next else { return };
            let fetched = self.fetch(&site, &from).await;
            match &fetched {
                Some(Fetched::Here { bytes, .. }) if *bytes > 0 => {
                    tracing::info!(%site, %from, bytes, "its image is here, in case it moves here");
                }
                Some(Fetched::Failed { reason }) => {
                    tracing::info!(%site, %from, "its image does not come for now: {reason}");
                }
                _ => {}
            }
            self.images.borrow_mut().told(&site, epoch, fetched.as_ref(), Instant::now());
        }
    }

    /// What both nodes' keepers want to see before they let an image pass.
    fn order_image(&self, site: &SiteName, from: &NodeName) -> Result<String, String> {
        let member = self.member();
        let key = member.image_keys.first();
        let key = key.ok_or("this node has not seen the cluster's keys yet, as its store does not answer")?;
        give_order(key, site, from, &self.node).map_err(|error| format!("it cannot be ordered: {error}"))
    }

    pub(super) async fn fetch(&self, site: &SiteName, from: &NodeName) -> Option<Fetched> {
        let edge = self.context.node.feed(Role::Edge)?;
        let order = match self.order_image(site, from) {
            Ok(order) => order,
            Err(reason) => return Some(Fetched::Failed { reason }),
        };
        let question = Question::FetchImage { site: site.clone(), from: from.clone(), order };
        serde_json::from_str(&edge.ask_within(PATIENCE, question).await?).ok()
    }
}

#[cfg(test)]
mod tests;
