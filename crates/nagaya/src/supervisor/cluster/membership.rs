//! The cluster while this node is in it: what is known, what goes on beside, and what operators ask of it.
//!
//! Not here: the right to serve (`authority`), finding sites a place (`relocating`, `placing`), moving sites without an error (`moves`).

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::StatusCode;
use nagaya_cmdb::store::etcd::{ClusterError, EtcdOptions};
use nagaya_cmdb::store::{ClusterStore, Store, StoreError};
use nagaya_cmdb::{NodeName, NodeRecord, Placement, SiteName, Why};
use nagaya_placement::balance::NodeLoad;
use nagaya_placement::doubt::Doubts;
use nagaya_placement::fence::{Ages, outlasting, term_of};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::asks::etcd_options;
use super::certificates::Renewal;
use super::events::Events;
use super::images::{Images, Touched};
use super::load::{self, Load, Meter};
use super::member::Member;
use super::pki::PkiError;
use super::pulse::Pulse;
use super::relocating::Relocating;
use super::suspects::Suspects;
use super::trust::{By, Trust};
use super::wishes::Wishes;
use super::{Context, NO_AUTHORITY, NOT_JOINED, NOWHERE, Neighbour, authority};
use crate::admin::{Problem, list};

/// How often a node tells the others how busy it is, and after how long without that it counts as gone.
const PRESENT_EVERY: Duration = Duration::from_secs(1);
const PRESENT_FOR: Duration = Duration::from_secs(5);

/// Until its record is written, it is tried so often.
const LIST_AGAIN: Duration = Duration::from_millis(200);

/// The same for a node that is no member any more.
const REMOVED_AGAIN: Duration = Duration::from_secs(5);

/// How often placements are counted, if there were changes.
const COUNT_EVERY: Duration = Duration::from_secs(2);

/// The minute in which a node takes part in few moves because of load.
const ARRIVED_LATELY_MS: u64 = 60_000;

/// How long a node that joins waits for the cluster's records.
const IN_STEP_WAIT: Duration = Duration::from_secs(60);

pub struct Membership {
    pub context: Rc<Context>,
    pub node: NodeName,
    /// As in its record.
    pub id: String,
    pub store: Arc<ClusterStore>,
    pub member: RefCell<Member>,
    /// How far it is with the keys of members.
    pub renewal: Renewal,
    /// Sites that are looked for a place for.
    pub relocating: Relocating,
    pub suspects: RefCell<Suspects>,
    pub doubts: RefCell<Doubts<NodeName>>,
    /// How old the store's revisions are.
    pub ages: RefCell<Ages>,
    /// Its record is written: it says what this node does.
    pub listed: Notify,
    /// Placements of each node, a little while ago.
    pub counted: RefCell<HashMap<NodeName, u32>>,
    /// Of these, how many came within the last minute because of their load.
    arrivals: RefCell<HashMap<NodeName, u32>>,
    /// Until when this node may serve what is placed on it, CLOCK_BOOTTIME in nanoseconds.
    pub authority_until: Cell<u64>,
    /// What it is owed and owes.
    pub trust: RefCell<Trust>,
    /// It is saying in its record that it knows all members.
    pub introducing: Cell<bool>,
    /// Sites that would move here, with what is known of their images.
    pub images: RefCell<Images>,
    /// What applications have this node do.
    pub pulse: RefCell<Pulse>,
    /// Sites that others have, too, and of which something is being done about that.
    pub shifting: RefCell<HashSet<SiteName>>,
    /// What nodes have each other do.
    pub wishes: RefCell<Wishes>,
    /// What has happened lately.
    pub events: RefCell<Events>,
    /// There is more to tell beside the load.
    pub told: Notify,
    /// Sites that have changed, for who fetches images and for who sees to what removed ones have left behind.
    pub touched: Arc<Touched>,
    pub removed: Arc<Touched>,
    /// How its store was opened.
    pub options: EtcdOptions,
    tasks: RefCell<Vec<AbortHandle>>,
}

impl Membership {
    /// Starts all that goes on while this node is a member.
    pub fn begin(
        context: Rc<Context>,
        member: Member,
        record: NodeRecord,
        store: Arc<ClusterStore>,
        [touched, removed]: [Arc<Touched>; 2],
    ) -> Rc<Self> {
        let options = etcd_options(&member.cluster, &member.etcd);
        let trust = Trust::new(authority::now(), member.node.clone(), context.fence());
        let membership = Rc::new(Self {
            context,
            node: member.node.clone(),
            id: member.id.clone(),
            store,
            member: RefCell::new(member),
            renewal: Renewal::default(),
            relocating: Relocating::default(),
            suspects: RefCell::default(),
            doubts: RefCell::default(),
            ages: RefCell::default(),
            listed: Notify::new(),
            counted: RefCell::default(),
            arrivals: RefCell::default(),
            authority_until: Cell::new(0),
            trust: RefCell::new(trust),
            introducing: Cell::new(false),
            images: RefCell::default(),
            pulse: RefCell::default(),
            shifting: RefCell::default(),
            wishes: RefCell::default(),
            events: RefCell::default(),
            told: Notify::new(),
            touched,
            removed,
            options,
            tasks: RefCell::default(),
        });
        let tasks = [
            tokio::task::spawn_local(Rc::clone(&membership).keep_authority()),
            tokio::task::spawn_local(Rc::clone(&membership).be_listed(record)),
            tokio::task::spawn_local(Rc::clone(&membership).be_present()),
            tokio::task::spawn_local(Rc::clone(&membership).follow_keys()),
            tokio::task::spawn_local(Rc::clone(&membership).count()),
            tokio::task::spawn_local(Rc::clone(&membership).find_places()),
            tokio::task::spawn_local(Rc::clone(&membership).empty_when_draining()),
            tokio::task::spawn_local(Rc::clone(&membership).fetch_images()),
            tokio::task::spawn_local(Rc::clone(&membership).feel_pulse()),
            tokio::task::spawn_local(Rc::clone(&membership).watch_nodes()),
            tokio::task::spawn_local(Rc::clone(&membership).clear_leftovers()),
            tokio::task::spawn_local(Rc::clone(&membership).grant_wishes()),
            tokio::task::spawn_local(Rc::clone(&membership).keep_ticket_keys()),
            tokio::task::spawn_local(Rc::clone(&membership).keep_records_signed()),
        ];
        membership.tasks.borrow_mut().extend(tasks.iter().map(tokio::task::JoinHandle::abort_handle));
        membership
    }

    pub fn member(&self) -> Member {
        self.member.borrow().clone()
    }

    pub fn set_member(&self, member: Member) {
        *self.member.borrow_mut() = member;
    }

    pub fn records(&self) -> &dyn Store {
        &*self.context.records
    }

    pub async fn in_step(&self) -> Result<(), ClusterError> {
        self.store.in_step(IN_STEP_WAIT).await
    }

    // === What goes on beside ===

    /// Has its record say what this node is started with. Before that it asks for no authority: others go by what stands there.
    async fn be_listed(self: Rc<Self>, record: NodeRecord) {
        let mut said = String::new();
        // Whether it is drained is not asked of this node's copy of the records: one that was removed meanwhile begins anew.
        let stands = loop {
            match self.store.refresh(record.clone()).await {
                Ok(stands) => break stands,
                // Only a join token lets it in again.
                Err(ClusterError::NoNode { .. }) => {
                    let text = PkiError::NotForUs.to_string();
                    if said != text {
                        tracing::error!(code = %NOT_JOINED, "{text}; this node serves no application");
                    }
                    said = text;
                    tokio::time::sleep(REMOVED_AGAIN).await;
                }
                Err(error) => {
                    let text = error.to_string();
                    match &error {
                        _ if text == said => {}
                        ClusterError::NameTaken { .. } => {
                            tracing::error!(code = %error.code(), "{text}; this node serves no application");
                        }
                        _ => tracing::warn!(code = %error.code(), "{text}"),
                    }
                    said = text;
                }
            }
            tokio::time::sleep(LIST_AGAIN).await;
        };
        self.listed.notify_one();
        // What was served before this start, by the fence that stood there before, is over by then.
        if stands.fence_ms == record.fence_ms {
            return;
        }
        loop {
            tokio::time::sleep(outlasting(term_of(stands.fence_ms))).await;
            match self.store.set_fence(&self.node, &self.id, record.fence_ms).await {
                Ok(()) => break,
                Err(error) => {
                    tracing::warn!(code = %error.code(), "others go on to wait for the fence that this node had before: {error}");
                }
            }
        }
    }

    /// Tells the others how busy this node is; they know by it that it is there.
    async fn be_present(self: Rc<Self>) {
        let mut meter = Meter::new();
        loop {
            let mut load = self.load(&mut meter);
            let mut again = std::pin::pin!(tokio::time::sleep(PRESENT_EVERY));
            loop {
                self.wishes.borrow().tell(&mut load);
                if let Err(error) = self.store.present(&self.node, json!(load).to_string(), PRESENT_FOR) {
                    tracing::warn!(code = %error.code(), "{error}");
                }
                tokio::select! {
                    () = &mut again => break,
                    () = self.told.notified() => {}
                }
            }
        }
    }

    fn load(&self, meter: &mut Meter) -> Load {
        let (memory_bytes, memory_available) = load::memory();
        Load {
            cpu_used: meter.cpu_used(),
            memory_bytes,
            memory_available,
            authority: self.member.borrow().credentials.serial,
            believes: self.renewal.believes.get(),
            serves: self.has_authority(),
            heat: self.pulse.borrow().heat(),
            wakes: self.pulse.borrow().wakes(),
            images: Some(self.images.borrow().stock()),
            shared: self.context.node.balance.shared.told(),
            ..Load::default()
        }
    }

    /// Counts placements whenever there were changes.
    async fn count(self: Rc<Self>) {
        let (mut counted, mut shared_now) = (None, Vec::new());
        loop {
            let revision = self.context.records.revision().ok();
            // Who came lately did not do so for ever.
            let is_due = revision != counted || !self.arrivals.borrow().is_empty();
            if is_due && let Some(Tally { all, arrivals, shared }) = self.tally().await {
                *self.counted.borrow_mut() = all;
                *self.arrivals.borrow_mut() = arrivals;
                (counted, shared_now) = (revision, shared);
            }
            // Also of those that have not changed: what was begun for one of them may have failed.
            self.look_after(&shared_now);
            tokio::time::sleep(COUNT_EVERY).await;
        }
    }

    /// Counts placements, on a thread that may block.
    async fn tally(&self) -> Option<Tally> {
        let (records, node) = (Arc::clone(&self.context.records), self.node.clone());
        tokio::task::spawn_blocking(move || count_placements(&*records, node)).await.ok()?.ok()
    }

    // === What operators ask ===

    /// There is a record of it. Nobody has removed it, as far as this node's copy of the records knows.
    pub fn is_member(&self) -> bool {
        let record = self.records().node(self.node.as_str());
        record.is_ok_and(|record| record.is_some_and(|record| record.id == self.id))
    }

    pub fn status(&self) -> Value {
        let member = self.member.borrow();
        let counts = self.records().counts().unwrap_or_default();
        let (images_here, images_wanted) = self.images.borrow().counts();
        let format = self.store.format();
        let refusals = self.store.refusals();
        let ticket_key = self.store.ticket_keys().ok().flatten().map(|keys| keys.signs);
        json!({
            "cluster": member.cluster,
            "node": member.node,
            "id": member.id,
            "member": self.is_member(),
            "peer": self.context.peer.to_string(),
            "etcd": member.etcd.endpoints,
            "in_step": self.store.age().is_some_and(|age| age < PRESENT_FOR),
            "age_seconds": self.store.age().map(|age| age.as_secs_f64()),
            "format": format.holds,
            "format_known": format.known,
            "format_waits_for": format.behind,
            "insecure": self.options.weakness(),
            "records_signed": true,
            "record_key": member.records.current.0,
            "record_keys_before": member.records.older.len(),
            "records_refused": refusals.standing,
            "records_refused_total": refusals.total,
            "records_refused_values": refusals.shown,
            "authority": self.trust.borrow().by(authority::now()).as_str(),
            "vouches": self.trust.borrow().can_vouch(),
            "fence_ms": self.context.configured.fence_ms,
            "certificate_authority": member.credentials.serial,
            "certificate_authorities": member.authorities.matches("-----BEGIN CERTIFICATE-----").count(),
            "certificate_renewed_at": member.credentials.renew_at,
            "ticket_key": ticket_key,
            "sites": counts.sites,
            "images_here": images_here,
            "images_wanted": images_wanted,
            "placements": self.counted.borrow().values().sum::<u32>(),
            "placements_here": self.counted.borrow().get(&self.node).copied().unwrap_or(0),
        })
    }

    /// Whether one is drained is not said by a count that is a moment old.
    pub async fn nodes(&self) -> Result<Value, Box<Problem>> {
        let tally = self.tally().await;
        let known = self
            .known_nodes()
            .map_err(|error| Problem::cluster(StatusCode::INTERNAL_SERVER_ERROR, NOWHERE, error))?;
        let trust = self.trust.borrow();
        let row = |node: &super::placing::Known| {
            let load = node.load.clone().unwrap_or_default();
            let counted = tally.as_ref().map(|tally| tally.all.get(&node.record.name).copied());
            let placements = counted.map_or(node.placements, Option::unwrap_or_default);
            let state = match (&node.load, node.record.draining) {
                (None, _) => "gone",
                (Some(_), true) if placements > 0 => "draining",
                (Some(_), true) => "drained",
                (Some(load), false) if !load.serves => "fenced",
                (Some(_), false) if node.record.name != self.node && !trust.is_known_by(&node.record) => {
                    "new"
                }
                (Some(_), false) => "up",
            };
            json!({
                "name": node.record.name,
                "state": state,
                "peer": node.record.peer,
                "placements": placements,
                "cpus": node.record.cpus,
                "cpu_used": node.load.as_ref().map(|load| load.cpu_used),
                "memory_bytes": node.record.memory_bytes,
                "memory_free": node.load.as_ref().map(|load| load.memory_available as f64 / load.memory_bytes.max(1) as f64),
                "requests_per_second": node.load.as_ref().map(|load| load.heat),
                "wakes": node.load.as_ref().map(|load| load.wakes),
                "authority": load.authority,
                "version": node.record.version,
            })
        };
        Ok(list("nodes", known.iter().map(row).collect()))
    }

    /// The store has just answered that this node may serve, so it is there.
    pub fn is_confirmed(&self) -> bool {
        matches!(self.trust.borrow().by(authority::now()), By::Store)
    }

    /// How busy each member is, for the balance of load.
    pub fn loads(&self) -> Vec<Neighbour> {
        let known = self.known_nodes().unwrap_or_default();
        // What others said of themselves is old otherwise, and a site that was ended here could not be placed there.
        let is_confirmed = self.is_confirmed();
        let is_suspect = |name: &NodeName| self.suspected(name).is_some();
        let told = |node: super::placing::Known| {
            let name = &node.record.name;
            let is_there = node.load.as_ref().is_some_and(|load| load.serves);
            let load = node.load.unwrap_or_default();
            let shared = load.shared;
            let load = NodeLoad {
                node: name.to_string(),
                cpus: node.record.cpus,
                cpu_used: load.cpu_used as f32,
                memory_free: load.memory_available,
                is_open: is_confirmed && is_there && !node.record.draining && !is_suspect(name),
                arrivals: self.arrivals.borrow().get(name).copied().unwrap_or(0),
            };
            Neighbour { load, shared }
        };
        known.into_iter().map(told).collect()
    }

    pub fn placements(
        &self,
        after: Option<&str>,
        limit: usize,
        node: Option<&str>,
    ) -> Result<Value, Box<Problem>> {
        let mut rows = Vec::new();
        let mut after = after.map(ToOwned::to_owned);
        loop {
            let page = self.records().placements(after.as_deref(), nagaya_cmdb::store::PAGE_LEN_MAX)?;
            let Some(last) = page.last() else { break };
            after = Some(last.site.to_string());
            let is_on =
                |placement: &Placement, node| placement.parts().any(|part| part.node.as_str() == node);
            let fits = page.iter().filter(|placement| node.is_none_or(|node| is_on(placement, node)));
            // What a removed site has left behind runs nowhere.
            let runs = fits.filter(|placement| {
                self.records().site(placement.site.as_str()).is_ok_and(|site| site.is_some())
            });
            rows.extend(runs.take(limit - rows.len()).cloned());
            if rows.len() == limit {
                break;
            }
        }
        let row = |(placement, (fallback, image_here)): (&nagaya_cmdb::Placement, _)| {
            let mut row = json!(placement);
            (row["fallback"], row["image_here"]) = (json!(fallback), json!(image_here));
            row
        };
        let fallbacks: Vec<(Option<String>, bool)> = self.fallbacks(&rows);
        Ok(list("placements", rows.iter().zip(fallbacks).map(row).collect()))
    }

    pub async fn set_draining(&self, node: &str, on: bool) -> Result<Value, Box<Problem>> {
        let name = self.named(node)?;
        self.store.set_draining(&name, on).await?;
        let placements = self.counted.borrow().get(&name).copied().unwrap_or(0);
        Ok(json!({ "node": name, "draining": on, "placements": placements }))
    }

    pub fn named(&self, node: &str) -> Result<NodeName, Box<Problem>> {
        let known = self.records().node(node)?;
        known.map(|record| record.name).ok_or_else(|| ClusterError::NoNode { name: node.into() }.into())
    }
}

impl Membership {
    /// Ends what goes on beside: it holds the membership, too.
    pub fn end(&self) {
        self.tasks.borrow().iter().for_each(AbortHandle::abort);
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.end();
    }
}

/// How many placements each node has, and how many of them came lately because of their load.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    all: HashMap<NodeName, u32>,
    arrivals: HashMap<NodeName, u32>,
    /// Those that this node has and others, too.
    shared: Vec<Placement>,
}

impl Tally {
    fn add(&mut self, placement: Placement, now_ms: u64, own: &NodeName) {
        for part in placement.parts() {
            // A clock that is ahead of this one's wrote it just now.
            let age_ms = now_ms.saturating_sub(part.since_ms);
            if part.why == Why::Load && age_ms < ARRIVED_LATELY_MS {
                *self.arrivals.entry(part.node.clone()).or_default() += 1;
            }
            *self.all.entry(part.node.clone()).or_default() += 1;
        }
        if !placement.copies.is_empty() && placement.part(own).is_some() {
            self.shared.push(placement);
        }
    }
}

fn count_placements(records: &dyn Store, own: NodeName) -> Result<Tally, StoreError> {
    let (mut tally, now_ms) = (Tally::default(), unix_ms());
    let mut after: Option<String> = None;
    loop {
        let page = records.placements(after.as_deref(), nagaya_cmdb::store::PAGE_LEN_MAX)?;
        let Some(last) = page.last() else { return Ok(tally) };
        after = Some(last.site.to_string());
        page.into_iter().for_each(|placement| tally.add(placement, now_ms, &own));
    }
}

/// Unix time, milliseconds.
pub fn unix_ms() -> u64 {
    u64::try_from(SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}

/// Said where a node finds that it may serve nothing.
pub fn log_no_authority(why: &str) {
    tracing::warn!(code = %NO_AUTHORITY, "applications placed on this node are frozen, and their requests wait: {why}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_came_lately_because_of_its_load_is_counted_beside_all() {
        let mut tally = Tally::default();
        for (node, why, since) in [
            ("a", Why::Load, 600_000),
            ("a", Why::Load, 599_999),
            ("a", Why::Load, 540_000),
            ("a", Why::Load, 700_000),
            ("b", Why::First, 600_000),
        ] {
            let placement = json!({ "site": "s", "node": node, "epoch": 1, "since_ms": since, "why": why });
            tally.add(serde_json::from_value(placement).unwrap(), 600_000, &NodeName::new("a").unwrap());
        }
        assert_eq!(tally.shared, []);
        let shared = json!({ "site": "s", "node": "a", "epoch": 2, "since_ms": 1, "why": "first", "node_epoch": 1,
            "copies": [{ "node": "b", "epoch": 2, "since_ms": 599_000 }] });
        tally.add(serde_json::from_value(shared).unwrap(), 600_000, &NodeName::new("a").unwrap());
        assert_eq!(tally.shared.len(), 1);
        let named = |count: &HashMap<NodeName, u32>| -> Vec<u32> {
            ["a", "b"].iter().map(|name| count.get(*name).copied().unwrap_or(0)).collect()
        };
        assert_eq!((named(&tally.all), named(&tally.arrivals)), (vec![5, 2], vec![3, 1]));
    }
}
