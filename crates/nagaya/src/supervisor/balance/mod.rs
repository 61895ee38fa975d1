//! The balance of load on this node. It samples the load of applications every second, and carries
//! out decisions for those short of CPU. First comes a higher limit in place, at once. Then comes a
//! better node of the cluster, at a quiet moment. Then comes one more node, if the site allows
//! that.
//!
//! Not here: deciding (`nagaya_placement::balance`), the use of instances (`nagaya_keeper`), moving
//! without an error (`cluster::mover`), sites whose node does not answer (`cluster::relocator`).

mod measure;
mod shared;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_base::Code;
use nagaya_placement::Moment;
use nagaya_placement::balance::{self, BalanceConfig, BalanceStep};
use nagaya_records::feed::FeedQuery;
use nagaya_records::instance::{DemandReport, InstanceCommand, RunUsage};
use nagaya_records::{Placement, PlacementReason, SiteName};
use parking_lot::Mutex;
use serde_json::Value;

use self::measure::{NodeBounds, SiteMeasure, SiteMeter, quota, thousandths};
use self::shared::SharedUse;
use super::child::ProcessRole;
use super::cluster::{MemberLoad, RebalanceStep, load, now, unix_ms};
use super::node::SupervisedNode;
use crate::config::settings::BalanceSettings as Configured;
use crate::supervisor::balance::history::{BalanceHistory, Decision, SeenLoad, SiteLoad};

/// A decision for a site's load could not be carried out.
const NOT_DONE: Code = Code(521);

/// Samples for which a failed step is not decided again.
const FAILED_PAUSE_LOOKS: u32 = 10;

/// Weight of one sample of a node's CPU use against earlier ones: nothing moves because of one good
/// second.
const NEW_PART: f32 = 0.25;

type NodeLoad = balance::NodeLoad<String>;

/// The part that the rest of the supervisor uses.
#[derive(Debug, Default)]
pub struct BalanceState {
    configured: Mutex<Configured>,
    pub told: BalanceHistory,
    /// Sites that this node has together with others.
    pub shared: SharedUse,
}

impl BalanceState {
    pub fn configure(&self, configured: &Configured) {
        *self.configured.lock() = configured.clone();
    }
}

/// Takes one sample after the other while the node runs.
pub async fn keep(node: Arc<SupervisedNode>) {
    let mut cpu = load::CpuMeter::new();
    let mut keeping = BalanceLoop::new(node);
    loop {
        let configured = keeping.node.balance.configured.lock().clone();
        tokio::time::sleep(Duration::from_millis(configured.every_ms)).await;
        let own = NodeLoad {
            node: keeping.node.name.clone(),
            cpus: load::cpus(),
            // Covers the time since the last sample.
            cpu_used: cpu.cpu_used() as f32,
            memory_free: load::memory().1,
            is_open: true,
            arrivals: 0,
        };
        keeping.look(now(), own, &configured).await;
    }
}

struct BalanceLoop {
    node: Arc<SupervisedNode>,
    decides: balance::LoadBalance<SiteName, String>,
    meter: SiteMeter,
    /// Sites whose step is being carried out, or failed a moment ago: how many samples they still
    /// wait.
    under_way: Rc<RefCell<HashMap<SiteName, u32>>>,
    /// CPU use of nodes over the last samples.
    busy: HashMap<String, f32>,
}

/// Returns the values that hold while the file is unchanged.
fn terms(configured: &Configured) -> BalanceConfig {
    let part = |percent: u32| percent as f32 / 100.0;
    BalanceConfig {
        short: part(configured.short),
        busy: part(configured.busy),
        move_after: Duration::from_millis(configured.move_after_ms),
        move_anyway_after: Duration::from_millis(configured.move_anyway_after_ms),
        target: part(configured.target),
        better_by: part(configured.better_by),
        site_rests: Duration::from_millis(configured.site_rests_ms),
        moves_per_minute: configured.moves_per_minute,
        lower_after: Duration::from_millis(configured.lower_after_ms),
    }
}

impl BalanceLoop {
    fn new(node: Arc<SupervisedNode>) -> Self {
        Self {
            decides: balance::LoadBalance::default(),
            meter: SiteMeter::default(),
            under_way: Rc::default(),
            busy: HashMap::new(),
            node,
        }
    }

    async fn look(&mut self, now: Moment, own: NodeLoad, configured: &Configured) {
        let terms = terms(configured);
        self.decides.set_terms(terms);
        // A keeper that is being restarted does not reply; then its instances have ended.
        let Some(used) = self.ask::<Vec<RunUsage>>(ProcessRole::Keeper).await else { return };
        let (measured, gone) = self.meter.take(used);
        gone.iter().for_each(|site| self.decides.forget_site(site));
        self.let_wait();
        let resting = self.node.balance.shared.used(&measured);
        let mut looked: Vec<SiteMeasure> =
            measured.into_iter().filter(|one| self.matters(now, one, &terms)).collect();
        looked.extend(resting.into_iter().map(SiteMeasure::at_rest));
        let is_short = looked.iter().any(|one| one.starved >= terms.short);
        let is_asked = is_short || looked.iter().any(|one| self.node.balance.shared.has(&one.used.site));
        let neighbours = if is_asked { self.neighbours().await } else { Vec::new() };
        let nodes = self.smoothed(nodes(own, &neighbours));
        let requests = if is_short { self.requests().await } else { HashMap::new() };
        let mut seen = Vec::with_capacity(looked.len());
        for one in looked {
            let Some(mut load) = self.site_load(one, configured, &nodes[0], &requests) else { continue };
            load.others_used = others_used(&load, &neighbours);
            let waits = self.under_way.borrow().contains_key(&load.site);
            let decision = if waits { None } else { self.decides.decide_step(now, &load, &nodes) };
            let short = self.decides.short_for(now, &load.site);
            let held = short.filter(|_| decision.is_none() && !waits);
            let held = held.and_then(|_| self.held(now, &load, &nodes, &terms));
            seen.push(SeenLoad { short_seconds: short.map(|short| short.as_secs()), held, load });
            if let Some(decision) = decision {
                self.carry_out(decision).await;
            }
        }
        self.node.balance.told.saw(seen);
    }

    async fn ask<T: serde::de::DeserializeOwned>(&self, role: ProcessRole) -> Option<T> {
        let text = self.node.query_process(role, FeedQuery::Load).await?;
        serde_json::from_str(&text).ok()
    }

    /// Returns whether a site needs a decision. Most running ones do not, so their records need not
    /// be read.
    fn matters(&self, now: Moment, one: &SiteMeasure, terms: &BalanceConfig) -> bool {
        let SiteMeasure { used, starved, .. } = one;
        *starved >= terms.short
            || used.is_limit_changed
            || self.node.balance.shared.has(&used.site)
            || self.decides.short_for(now, &used.site).is_some()
    }

    fn let_wait(&self) {
        self.under_way.borrow_mut().retain(|_, looks| {
            *looks = looks.saturating_sub(1);
            *looks > 0
        });
    }

    /// Returns all members of its cluster, including this node.
    async fn neighbours(&self) -> Vec<MemberLoad> {
        match &self.node.cluster {
            Some(cluster) => cluster.loads().await,
            None => Vec::new(),
        }
    }

    /// Smooths the load. Nodes that were missing last time start from the new sample.
    fn smoothed(&mut self, mut nodes: Vec<NodeLoad>) -> Vec<NodeLoad> {
        let mut before = std::mem::take(&mut self.busy);
        for node in &mut nodes {
            let last = before.remove(&node.node).unwrap_or(node.cpu_used);
            node.cpu_used = last + (node.cpu_used - last) * NEW_PART;
            self.busy.insert(node.node.clone(), node.cpu_used);
        }
        nodes
    }

    async fn requests(&self) -> HashMap<SiteName, u32> {
        let needed = self.ask::<Vec<DemandReport>>(ProcessRole::Edge).await.unwrap_or_default();
        needed.into_iter().map(|one| (one.site, one.requests)).collect()
    }

    fn site_load(
        &self,
        one: SiteMeasure,
        configured: &Configured,
        own: &NodeLoad,
        requests: &HashMap<SiteName, u32>,
    ) -> Option<SiteLoad> {
        // A record that cannot be read now is tried again in a second.
        let site = self.node.store.site(one.used.site.as_str()).ok()??;
        let tenant = self.node.store.tenant(site.tenant.as_str()).ok()??;
        let bounds = NodeBounds::compute(&site, &tenant, configured.raise_max, own.cpus);
        let placement = self.node.store.placement(one.used.site.as_str()).ok()?;
        let parts: Vec<_> = placement.iter().flat_map(Placement::parts).collect();
        let came =
            parts.iter().find(|part| part.node.as_str() == own.node && part.why == PlacementReason::Load);
        let came = came.map(|part| unix_ms().saturating_sub(part.since_ms));
        let is_last = parts.len() > 1 && parts.last().is_some_and(|part| part.node.as_str() == own.node);
        let nodes = parts.iter().map(|part| part.node.to_string()).collect();
        let wants = bounds.wants(&one);
        let NodeBounds { base, max, .. } = bounds;
        let SiteMeasure { used, starved, throttled, cpus } = one;
        Some(SiteLoad {
            node: own.node.clone(),
            wants,
            starved,
            throttled,
            cpus_used: cpus,
            limit: quota(used.limit).map_or(base, |limit| if used.is_limit_changed { limit } else { base }),
            limit_base: base,
            limit_max: max,
            in_flight: requests.get(&used.site).copied().unwrap_or(0),
            memory_bytes: used.memory_bytes,
            came: came.map(Duration::from_millis),
            nodes,
            nodes_max: site.instances_max(),
            is_last,
            others_used: None,
            site: used.site,
        })
    }

    /// Returns why nothing more is done for a site that is short, for `nagaya explain`.
    fn held(
        &self,
        now: Moment,
        load: &SiteLoad,
        nodes: &[NodeLoad],
        terms: &BalanceConfig,
    ) -> Option<String> {
        let percent = |part: f32| (part * 100.0).round();
        let own = &nodes[0];
        let mut why = Vec::new();
        if load.limit >= load.limit_max {
            why.push(format!("{:.2} CPUs are all that it may have here", load.limit_max));
        } else if own.cpu_used > terms.busy {
            let used = percent(own.cpu_used);
            let busy = percent(terms.busy);
            why.push(format!("{} uses {used}% of its CPUs, and gives nobody more above {busy}%", own.node));
        } else if load.throttled < terms.short {
            why.push("its limit is not what it is short of".into());
        }
        if nodes.len() == 1 {
            why.push("there is no other node that it could be moved to".into());
        } else if let Some(left) = self.decides.rests_for(now, &load.site) {
            why.push(format!("it was moved not long ago, and is left here for {} s", left.as_secs()));
        } else {
            let after = terms.move_after.as_secs();
            let open = nodes[1..].iter().filter(|node| node.is_open);
            let least = open.map(|node| percent(node.cpu_used)).min_by(f32::total_cmp);
            let least = least
                .map_or("no other takes any".into(), |least| format!("the least busy other uses {least}%"));
            why.push(format!(
                "it is moved after {after} s of this, at a quiet moment, to a node that uses {}% at most with it, and {} less than this one; {least}",
                percent(terms.target),
                percent(terms.better_by)
            ));
        }
        if load.nodes_max > 1 && nodes.len() > 1 {
            let count = load.nodes.len();
            why.push(if count < load.nodes_max as usize {
format!("it has {count} of the {} nodes that it may have, and gets another one where no move does", load.nodes_max)
} else {
format!("it has all {count} nodes that its record allows")
});
        }
        Some(why.join("; "))
    }

    async fn carry_out(&self, decision: Decision) {
        let Decision { site, step, words } = decision.clone();
        let number = self.node.balance.told.decided(&decision);
        tracing::info!(%site, "load: {words}");
        match step {
            BalanceStep::Raise(cpus) | BalanceStep::Lower(cpus) => {
                let done = self.limit(&site, cpus).await;
                ended(&self.node, number, &decision, done, &self.under_way);
            }
            BalanceStep::Move(_) | BalanceStep::Copy(_) | BalanceStep::Uncopy => {
                let shift = match step {
                    BalanceStep::Move(to) => RebalanceStep::Move(to),
                    BalanceStep::Copy(to) => RebalanceStep::Copy(to),
                    _ => RebalanceStep::Uncopy,
                };
                self.under_way.borrow_mut().insert(site.clone(), u32::MAX);
                let node = Arc::clone(&self.node);
                let under_way = Rc::clone(&self.under_way);
                tokio::task::spawn_local(async move {
                    let moved = match &node.cluster {
                        Some(cluster) => cluster.shift(site.clone(), shift).await,
                        None => Err("this node is in no cluster".into()),
                    };
                    under_way.borrow_mut().remove(&site);
                    ended(&node, number, &decision, moved, &under_way);
                });
            }
        }
    }

    async fn limit(&self, site: &SiteName, cpus: f32) -> Result<(), String> {
        let act = InstanceCommand::LimitCpu { thousandths: Some(thousandths(cpus)) };
        let question = FeedQuery::Instance { site: site.to_string(), act };
        let said = self
            .node
            .query_process(ProcessRole::Keeper, question)
            .await
            .ok_or("the keeper did not answer")?;
        let said: Value = serde_json::from_str(&said).unwrap_or_default();
        if said["ok"] == true {
            Ok(())
        } else {
            Err(said["error"].as_str().unwrap_or("it does not run any more").into())
        }
    }
}

/// Returns this node first, then others of its cluster.
fn nodes(own: NodeLoad, known: &[MemberLoad]) -> Vec<NodeLoad> {
    let loads = || known.iter().map(|neighbour| &neighbour.load);
    let arrivals = loads().find(|node| node.node == own.node).map_or(0, |node| node.arrivals);
    let others: Vec<_> = loads().filter(|node| node.node != own.node).cloned().collect();
    [NodeLoad { arrivals, ..own }].into_iter().chain(others).collect()
}

/// Returns the CPUs that the other nodes use for a site. `None` if not all of them have reported
/// it.
fn others_used(load: &SiteLoad, known: &[MemberLoad]) -> Option<f32> {
    let others = load.nodes.iter().filter(|node| **node != load.node);
    let used = |node: &String| {
        known.iter().find(|neighbour| neighbour.load.node == *node)?.shared.get(&load.site).copied()
    };
    others.map(used).sum()
}

fn ended(
    node: &SupervisedNode,
    number: u64,
    decision: &Decision,
    end: Result<(), String>,
    under_way: &RefCell<HashMap<SiteName, u32>>,
) {
    if let Err(why) = &end {
        tracing::warn!(code = %NOT_DONE, site = %decision.site, "the change for its load was not done: {why}");
        under_way.borrow_mut().insert(decision.site.clone(), FAILED_PAUSE_LOOKS);
    }
    node.balance.told.finish_step(number, &decision.step, end);
}

mod history;
#[cfg(test)]
mod tests;
