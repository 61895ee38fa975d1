//! Brings the images here that this node may need next.
//!
//! Not here: which these are, and when to ask for each (`wanted_images`), the way of the bytes
//! (`nagaya_edge`).

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_keeper::image::give_order;
use nagaya_records::feed::{FETCH_MAX, FeedQuery, FetchResult};
use nagaya_records::{NodeName, Placement, SiteName};

use super::super::child::ProcessRole;
use super::image_inventory::ImageInventory;
use super::known_node::KnownNode;
use super::view::ClusterView;
use super::wanted_images::{Lasting, SiteChanges, WantedImages, fallback_of, lasting, search};

/// Interval of checks for work.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Shortest interval between searches of all placements, as nodes come and go in groups.
const SEARCH_EVERY: Duration = Duration::from_secs(5);

/// Sites requested in one check: 40 a second, so that sites without an image cost other nodes
/// little.
const ASKED_AT_ONCE: usize = 20;

/// Added to the edge's own time limit.
const PATIENCE: Duration = FETCH_MAX.saturating_add(Duration::from_secs(60));

pub struct ImageFetcher {
    view: Rc<ClusterView>,
    wanted: RefCell<WantedImages>,
    /// Sites whose records or placements have changed.
    touched: Arc<SiteChanges>,
}

impl ImageFetcher {
    pub fn new(view: Rc<ClusterView>, touched: Arc<SiteChanges>) -> Self {
        Self { view, wanted: RefCell::default(), touched }
    }

    /// Returns where each of these would move, and whether its image is there.
    pub fn fallbacks(&self, placements: &[Placement]) -> Vec<(Option<String>, bool)> {
        let known = self.view.known_nodes().unwrap_or_default();
        let candidates: Vec<_> = known.iter().map(|node| node.as_candidate(None)).collect();
        let images = self.wanted.borrow();
        let of = |placement: &Placement| {
            let fallback = fallback_of(self.view.records(), placement, &candidates).ok().flatten();
            (fallback.map(ToOwned::to_owned), images.has(&placement.site))
        };
        placements.iter().map(of).collect()
    }

    /// Fetches images while this node is a member.
    pub async fn run(self: Rc<Self>) {
        let mut searched = None::<Instant>;
        let mut last = Lasting::new();
        loop {
            let changed = self.touched.take();
            let known = self.view.known_nodes().unwrap_or_default();
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

    pub fn has(&self, site: &SiteName) -> bool {
        self.wanted.borrow().has(site)
    }

    /// Returns how many of the wanted images are here, and how many are wanted.
    pub fn counts(&self) -> (usize, usize) {
        self.wanted.borrow().counts()
    }

    pub fn inventory(&self) -> ImageInventory {
        self.wanted.borrow().stock()
    }

    /// Returns false if the records could not be read.
    async fn search_images(&self, known: Vec<KnownNode>) -> bool {
        let records = Arc::clone(&self.view.context.records);
        let node = self.view.node.clone();
        let found = tokio::task::spawn_blocking(move || search(&*records, &node, &known)).await;
        let Ok(Ok(found)) = found else { return false };
        self.wanted.borrow_mut().replace(found, Instant::now());
        true
    }

    fn look_at(&self, sites: &HashSet<SiteName>, known: &[KnownNode]) {
        let candidates: Vec<_> = known.iter().map(|node| node.as_candidate(None)).collect();
        for site in sites {
            let placement = self.view.records().placement(site.as_str()).ok().flatten();
            let placement = placement.filter(|placement| {
                let fallback = fallback_of(self.view.records(), placement, &candidates);
                placement.node != self.view.node
                    && fallback.is_ok_and(|it| it == Some(self.view.node.as_str()))
            });
            let mut images = self.wanted.borrow_mut();
            match placement {
                Some(placement) => images.want(placement, Instant::now()),
                None => images.forget(site),
            }
        }
    }

    /// Fetches due images one after the other, as the edge takes one at a time.
    async fn fetch_due(&self) {
        for _ in 0..ASKED_AT_ONCE {
            let next = self.wanted.borrow_mut().next(Instant::now());
            let Some((site, from, epoch)) = next else { return };
            let fetched = self.fetch(&site, &from).await;
            match &fetched {
                Some(FetchResult::Here { bytes, .. }) if *bytes > 0 => {
                    tracing::info!(%site, %from, bytes, "its image is here, in case it moves here");
                }
                Some(FetchResult::Failed { reason }) => {
                    tracing::info!(%site, %from, "its image does not come for now: {reason}");
                }
                _ => {}
            }
            self.wanted.borrow_mut().note_fetched(&site, epoch, fetched.as_ref(), Instant::now());
        }
    }

    /// Returns the signed order that both nodes' keepers require for the transfer of an image.
    fn order_image(&self, site: &SiteName, from: &NodeName) -> Result<String, String> {
        let member = self.view.member();
        let key = member.image_keys.first();
        let key = key.ok_or("this node has not seen the cluster's keys yet, as its store does not answer")?;
        give_order(key, site, from, &self.view.node).map_err(|error| format!("it cannot be ordered: {error}"))
    }

    pub async fn fetch(&self, site: &SiteName, from: &NodeName) -> Option<FetchResult> {
        let edge = self.view.context.node.feed(ProcessRole::Edge)?;
        let order = match self.order_image(site, from) {
            Ok(order) => order,
            Err(reason) => return Some(FetchResult::Failed { reason }),
        };
        let question = FeedQuery::FetchImage { site: site.clone(), from: from.clone(), order };
        serde_json::from_str(&edge.query_within(PATIENCE, question).await?).ok()
    }
}
