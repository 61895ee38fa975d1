//! Answers to operators and the balance of load about the cluster: state, nodes, placements and
//! events.
//!
//! Not here: changing any of it (`mover`, `member_keys`), the admin paths (`admin::cluster`).

use std::rc::Rc;

use http::StatusCode;
use nagaya_placement::balance::NodeLoad;
use nagaya_records::instance::InstanceCommand;
use nagaya_records::{NodeName, Placement};
use nagaya_store::etcd::EtcdOptions;
use nagaya_store::{PAGE_LEN_MAX, Store as _};
use serde_json::{Value, json};

use super::codes::NOWHERE;
use super::events::EventLog;
use super::image_fetcher::ImageFetcher;
use super::known_node::KnownNode;
use super::load_publisher::PRESENT_FOR;
use super::node_chooser::NodeChooser;
use super::orders::MemberLoad;
use super::placement_counts::count_placements;
use super::view::ClusterView;
use crate::admin::{AdminNode as _, ProblemReply, list};

pub struct ClusterReport {
    pub view: Rc<ClusterView>,
    pub images: Rc<ImageFetcher>,
    pub chooser: Rc<NodeChooser>,
    pub events: Rc<EventLog>,
    /// The options with which its store was opened.
    pub options: EtcdOptions,
}

impl ClusterReport {
    pub fn status(&self) -> Value {
        let member = self.view.borrow_member();
        let counts = self.view.records().counts().unwrap_or_default();
        let (images_here, images_wanted) = self.images.counts();
        let format = self.view.store.format();
        let refusals = self.view.store.refusals();
        let ticket_key = self.view.store.ticket_keys().ok().flatten().map(|keys| keys.signs);
        json!({
            "cluster": member.cluster,
            "node": member.node,
            "id": member.id,
            "member": self.view.is_member(),
            "peer": self.view.context.peer.to_string(),
            "etcd": member.etcd.endpoints,
            "in_step": self.view.store.age().is_some_and(|age| age < PRESENT_FOR),
            "age_seconds": self.view.store.age().map(|age| age.as_secs_f64()),
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
            "authority": self.view.lease().granted_by().as_str(),
            "vouches": self.view.lease().can_vouch(),
            "fence_ms": self.view.context.configured.fence_ms,
            "certificate_authority": member.credentials.serial,
            "certificate_authorities": member.authorities.matches("-----BEGIN CERTIFICATE-----").count(),
            "certificate_renewed_at": member.credentials.renew_at,
            "ticket_key": ticket_key,
            "sites": counts.sites,
            "images_here": images_here,
            "images_wanted": images_wanted,
            "placements": self.view.counts().total(),
            "placements_here": self.view.counts().placements_on(&self.view.node),
        })
    }

    /// Returns the nodes. The draining state is not read from an older count.
    pub async fn nodes(&self) -> Result<Value, Box<ProblemReply>> {
        let counted = count_placements(&self.view.context.records, &self.view.node).await;
        let known = self
            .view
            .known_nodes()
            .map_err(|error| ProblemReply::cluster(StatusCode::INTERNAL_SERVER_ERROR, NOWHERE, error))?;
        let is_new = |node: &KnownNode| {
            node.record.name != self.view.node && !self.view.lease().is_known_by(&node.record)
        };
        let row = |node: &KnownNode| {
            let load = node.load.clone().unwrap_or_default();
            let counted_now =
                counted.as_ref().map(|counted| counted.totals.all.get(&node.record.name).copied());
            let placements = counted_now.map_or(node.placements, Option::unwrap_or_default);
            let state = match (&node.load, node.record.draining) {
                (None, _) => "gone",
                (Some(_), true) if placements > 0 => "draining",
                (Some(_), true) => "drained",
                (Some(load), false) if !load.serves => "fenced",
                (Some(_), false) if is_new(node) => "new",
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

    /// Returns the load of each member, for the balance of load.
    pub fn loads(&self) -> Vec<MemberLoad> {
        let known = self.view.known_nodes().unwrap_or_default();
        // Otherwise the others' reports are old, and a site that ended here could not be placed
        // there.
        let is_confirmed = self.view.lease().is_confirmed();
        let is_suspect = |name: &NodeName| self.chooser.find_suspicion(name).is_some();
        let told = |node: KnownNode| {
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
                arrivals: self.view.counts().arrivals_on(name),
            };
            MemberLoad { load, shared }
        };
        known.into_iter().map(told).collect()
    }

    pub fn placements(
        &self,
        after: Option<&str>,
        limit: usize,
        node: Option<&str>,
    ) -> Result<Value, Box<ProblemReply>> {
        let mut rows = Vec::new();
        let mut after = after.map(ToOwned::to_owned);
        loop {
            let page = self.view.records().placements(after.as_deref(), PAGE_LEN_MAX)?;
            let Some(last) = page.last() else { break };
            after = Some(last.site.to_string());
            let is_on =
                |placement: &Placement, node| placement.parts().any(|part| part.node.as_str() == node);
            let fits = page.iter().filter(|placement| node.is_none_or(|node| is_on(placement, node)));
            // A tombstone runs nowhere.
            let runs = fits.filter(|placement| {
                self.view.records().site(placement.site.as_str()).is_ok_and(|site| site.is_some())
            });
            rows.extend(runs.take(limit - rows.len()).cloned());
            if rows.len() == limit {
                break;
            }
        }
        let row = |(placement, (fallback, image_here)): (&Placement, _)| {
            let mut row = json!(placement);
            row["fallback"] = json!(fallback);
            row["image_here"] = json!(image_here);
            row
        };
        let fallbacks: Vec<(Option<String>, bool)> = self.images.fallbacks(&rows);
        Ok(list("placements", rows.iter().zip(fallbacks).map(row).collect()))
    }

    pub async fn set_draining(&self, node: &str, on: bool) -> Result<Value, Box<ProblemReply>> {
        let name = self.view.find_member(node)?;
        self.view.store.set_draining(&name, on).await?;
        let placements = self.view.counts().placements_on(&name);
        Ok(json!({ "node": name, "draining": on, "placements": placements }))
    }

    /// Returns the result of `nagaya events`.
    pub fn last_events(&self, limit: usize) -> Value {
        list("events", self.events.last(limit))
    }

    /// Returns why a site is on its node, for `nagaya explain`, and the stages of its last wake
    /// here. Its placement is null if it has none.
    pub async fn explain_placement(&self, site: &str) -> Result<Value, Box<ProblemReply>> {
        let placement = self.view.records().placement(site)?;
        let placement = placement.filter(|_| self.view.records().site(site).is_ok_and(|site| site.is_some()));
        let (fallback, image_here) = match &placement {
            Some(placement) => self.images.fallbacks(std::slice::from_ref(placement)).swap_remove(0),
            None => (None, false),
        };
        let is_here = placement.as_ref().is_some_and(|placement| placement.part(&self.view.node).is_some());
        let wake = if is_here { self.last_wake(site).await } else { Value::Null };
        Ok(json!({
            "site": site,
            "asked": self.view.node,
            "placement": placement,
            "fallback": fallback,
            "image_here": image_here,
            "last_wake": wake,
            "moves": self.events.moves_of(site),
        }))
    }

    async fn last_wake(&self, site: &str) -> Value {
        let told = self.view.context.node.instance(site.to_owned(), InstanceCommand::Inspect).await;
        let told: Option<Value> = told.and_then(|text| serde_json::from_str(&text).ok());
        told.map_or(Value::Null, |mut told| told["last_wake"].take())
    }
}
