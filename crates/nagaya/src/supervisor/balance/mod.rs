//! The balance of load on this node: looks every second at what applications use, and carries out what is decided for those that
//! are short of CPU. More where they are, at once; then a better node of the cluster, at a quiet moment; then one more node, where the
//! site allows that.
//!
//! Not here: deciding (`nagaya_placement::balance`), what instances use (`nagaya_keeper`), moving without an error
//! (`cluster::moves`), sites whose node does not answer (`cluster::placing`).

mod measure;
mod shared;
mod told;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_base::Code;
use nagaya_cmdb::feed::Question;
use nagaya_cmdb::instance::{Act, Needed, Used};
use nagaya_cmdb::{Placement, SiteName, Why};
use nagaya_placement::Moment;
use nagaya_placement::balance::{self, Step, Terms};
use parking_lot::Mutex;
use serde_json::Value;

use self::measure::{Bounds, Measured, Meter, quota, thousandths};
use self::shared::Shared;
use self::told::{Decision, Seen, SiteLoad, Told};
use super::child::Role;
use super::cluster::{Neighbour, Shift, load, now, unix_ms};
use super::node::Node;
use crate::config::settings::Balance as Configured;

/// What was decided for a site's load could not be done.
const NOT_DONE: Code = Code(521);

/// A step that failed is not decided again at once: so many looks go by.
const FAILED_PAUSE_LOOKS: u32 = 10;

/// How much of a node's CPU use one look tells, against those before: nothing is moved for one good second.
const NEW_PART: f32 = 0.25;

type NodeLoad = balance::NodeLoad<String>;

/// What the rest of the supervisor has of it.
#[derive(Debug, Default)]
pub struct Balance {
    configured: Mutex<Configured>,
    pub told: Told,
    /// Sites that this node has and others, too.
    pub shared: Shared,
}

impl Balance {
    pub fn configure(&self, configured: &Configured) {
        *self.configured.lock() = configured.clone();
    }
}

/// One look after the other, for as long as the node runs.
pub async fn keep(node: Arc<Node>) {
    let (mut cpu, mut keeping) = (load::Meter::new(), Keeping::new(node));
    loop {
        let configured = keeping.node.balance.configured.lock().clone();
        tokio::time::sleep(Duration::from_millis(configured.every_ms)).await;
        let own = NodeLoad {
            node: keeping.node.name.clone(),
            cpus: load::cpus(),
            // Tells of the time since the last look.
            cpu_used: cpu.cpu_used() as f32,
            memory_free: load::memory().1,
            is_open: true,
            arrivals: 0,
        };
        keeping.look(now(), own, &configured).await;
    }
}

struct Keeping {
    node: Arc<Node>,
    decides: balance::Balance<SiteName, String>,
    meter: Meter,
    /// Sites for which a step is being carried out, or failed a moment ago: how many looks they still wait.
    under_way: Rc<RefCell<HashMap<SiteName, u32>>>,
    /// How busy nodes were over the last looks.
    busy: HashMap<String, f32>,
}

/// What holds while nothing is changed in the file.
fn terms(configured: &Configured) -> Terms {
    let part = |percent: u32| percent as f32 / 100.0;
    Terms {
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

impl Keeping {
    fn new(node: Arc<Node>) -> Self {
        Self {
            decides: balance::Balance::default(),
            meter: Meter::default(),
            under_way: Rc::default(),
            busy: HashMap::new(),
            node,
        }
    }

    async fn look(&mut self, now: Moment, own: NodeLoad, configured: &Configured) {
        let terms = terms(configured);
        self.decides.set_terms(terms);
        // A keeper that is being started anew says nothing; then what ran has ended.
        let Some(used) = self.ask::<Vec<Used>>(Role::Keeper).await else { return };
        let (measured, gone) = self.meter.take(used);
        gone.iter().for_each(|site| self.decides.left(site));
        self.let_wait();
        let resting = self.node.balance.shared.used(&measured);
        let mut looked: Vec<Measured> =
            measured.into_iter().filter(|one| self.matters(now, one, &terms)).collect();
        looked.extend(resting.into_iter().map(Measured::at_rest));
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
            let decision = if waits { None } else { self.decides.look(now, &load, &nodes) };
            let short = self.decides.short_for(now, &load.site);
            let held = short.filter(|_| decision.is_none() && !waits);
            let held = held.and_then(|_| self.held(now, &load, &nodes, &terms));
            seen.push(Seen { short_seconds: short.map(|short| short.as_secs()), held, load });
            if let Some(decision) = decision {
                self.carry_out(decision).await;
            }
        }
        self.node.balance.told.saw(seen);
    }

    async fn ask<T: serde::de::DeserializeOwned>(&self, role: Role) -> Option<T> {
        let text = self.node.ask(role, Question::Load).await?;
        serde_json::from_str(&text).ok()
    }

    /// Of most that run there is nothing to be decided, so their records need not be read.
    fn matters(&self, now: Moment, one: &Measured, terms: &Terms) -> bool {
        let Measured { used, starved, .. } = one;
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

    /// All of its cluster, with this node.
    async fn neighbours(&self) -> Vec<Neighbour> {
        match &self.node.cluster {
            Some(cluster) => cluster.loads().await,
            None => Vec::new(),
        }
    }

    /// Nodes that were not asked for the last time begin anew.
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
        let needed = self.ask::<Vec<Needed>>(Role::Edge).await.unwrap_or_default();
        needed.into_iter().map(|one| (one.site, one.requests)).collect()
    }

    fn site_load(
        &self,
        one: Measured,
        configured: &Configured,
        own: &NodeLoad,
        requests: &HashMap<SiteName, u32>,
    ) -> Option<SiteLoad> {
        // What cannot be read now is looked at again in a second.
        let site = self.node.store.site(one.used.site.as_str()).ok()??;
        let tenant = self.node.store.tenant(site.tenant.as_str()).ok()??;
        let bounds = Bounds::of(&site, &tenant, configured.raise_max, own.cpus);
        let placement = self.node.store.placement(one.used.site.as_str()).ok()?;
        let parts: Vec<_> = placement.iter().flat_map(Placement::parts).collect();
        let came = parts.iter().find(|part| part.node.as_str() == own.node && part.why == Why::Load);
        let came = came.map(|part| unix_ms().saturating_sub(part.since_ms));
        let is_last = parts.len() > 1 && parts.last().is_some_and(|part| part.node.as_str() == own.node);
        let nodes = parts.iter().map(|part| part.node.to_string()).collect();
        let (wants, Bounds { base, max, .. }) = (bounds.wants(&one), bounds);
        let Measured { used, starved, throttled, cpus } = one;
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

    /// Why nothing more is done for a site that is short, for who asks.
    fn held(&self, now: Moment, load: &SiteLoad, nodes: &[NodeLoad], terms: &Terms) -> Option<String> {
        let percent = |part: f32| (part * 100.0).round();
        let own = &nodes[0];
        let mut why = Vec::new();
        if load.limit >= load.limit_max {
            why.push(format!("{:.2} CPUs are all that it may have here", load.limit_max));
        } else if own.cpu_used > terms.busy {
            let (used, busy) = (percent(own.cpu_used), percent(terms.busy));
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
            why.push(match count < load.nodes_max as usize {
                true => format!("it has {count} of the {} nodes that it may have, and gets another one where no move does", load.nodes_max),
                false => format!("it has all {count} nodes that its record allows"),
            });
        }
        Some(why.join("; "))
    }

    async fn carry_out(&self, decision: Decision) {
        let Decision { site, step, words } = decision.clone();
        let number = self.node.balance.told.decided(&decision);
        tracing::info!(%site, "load: {words}");
        match step {
            Step::Raise(cpus) | Step::Lower(cpus) => {
                let done = self.limit(&site, cpus).await;
                ended(&self.node, number, &decision, done, &self.under_way);
            }
            Step::Move(_) | Step::Copy(_) | Step::Uncopy => {
                let shift = match step {
                    Step::Move(to) => Shift::Move(to),
                    Step::Copy(to) => Shift::Copy(to),
                    _ => Shift::Uncopy,
                };
                self.under_way.borrow_mut().insert(site.clone(), u32::MAX);
                let (node, under_way) = (Arc::clone(&self.node), Rc::clone(&self.under_way));
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
        let act = Act::LimitCpu { thousandths: Some(thousandths(cpus)) };
        let question = Question::Instance { site: site.to_string(), act };
        let said = self.node.ask(Role::Keeper, question).await.ok_or("the keeper did not answer")?;
        let said: Value = serde_json::from_str(&said).unwrap_or_default();
        match said["ok"] == true {
            true => Ok(()),
            false => Err(said["error"].as_str().unwrap_or("it does not run any more").into()),
        }
    }
}

/// This node first, and others of its cluster.
fn nodes(own: NodeLoad, known: &[Neighbour]) -> Vec<NodeLoad> {
    let loads = || known.iter().map(|neighbour| &neighbour.load);
    let arrivals = loads().find(|node| node.node == own.node).map_or(0, |node| node.arrivals);
    let others: Vec<_> = loads().filter(|node| node.node != own.node).cloned().collect();
    [NodeLoad { arrivals, ..own }].into_iter().chain(others).collect()
}

/// CPUs that the other nodes use for a site. None: not all of them have told that.
fn others_used(load: &SiteLoad, known: &[Neighbour]) -> Option<f32> {
    let others = load.nodes.iter().filter(|node| **node != load.node);
    let used = |node: &String| {
        known.iter().find(|neighbour| neighbour.load.node == *node)?.shared.get(&load.site).copied()
    };
    others.map(used).sum()
}

fn ended(
    node: &Node,
    number: u64,
    decision: &Decision,
    end: Result<(), String>,
    under_way: &RefCell<HashMap<SiteName, u32>>,
) {
    if let Err(why) = &end {
        tracing::warn!(code = %NOT_DONE, site = %decision.site, "what its load asks for is not done: {why}");
        under_way.borrow_mut().insert(decision.site.clone(), FAILED_PAUSE_LOOKS);
    }
    node.balance.told.ended(number, &decision.step, end);
}

#[cfg(test)]
mod tests;
