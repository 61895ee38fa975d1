//! The experiments of a cluster: a node dies, pauses or drains under load, and the cost of one hop.
//! Each has its own lab: nodes, etcd and clients in networks of their own on this machine.
//!
//! Not here: the lab (`lab`), the applications (`content`).

pub mod cmdb_scale;
pub mod drain;
pub mod false_alarm;
pub mod forward_cost;
mod ledger;
pub mod relocation;
mod small;
pub mod storm;

use std::io::Write as _;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::{Value, json};

use super::admission::crowd::{SeenAnswer, SentPost, open};
use crate::clients::to_float;
use crate::experiment::harness::ExperimentSetting;
use crate::lab::{Lab, LabPlan, PROBE};
use crate::{http, interrupt};

/// Members of etcd: a cluster that must survive the loss of one has three.
const STORES: usize = 3;

/// Lease length of a node, milliseconds. It is half the default: the store is on this very machine.
const FENCE_MS: u32 = 150;

/// The least that a cluster accepts. It is for runs in which one application moves and nothing else
/// happens: etcd is then never that slow.
const SHORT_FENCE_MS: u32 = 100;

/// Concurrency above any load here, as in the experiments of one node.
const WIDE: &str = "[tenants]\nmax_concurrent = 4096\nmax_waiting = 4096\n";

/// Longest wait until all nodes know of a change.
const HEARD_MAX: Duration = Duration::from_secs(60);

/// Interval of checks for that.
const ASK_EVERY: Duration = Duration::from_millis(20);

fn lab(setting: &ExperimentSetting, name: &str, nodes: usize, tables: &str) -> Result<Lab> {
    lab_with_fence(setting, name, nodes, tables, FENCE_MS)
}

fn lab_with_fence(
    setting: &ExperimentSetting,
    name: &str,
    nodes: usize,
    tables: &str,
    fence_ms: u32,
) -> Result<Lab> {
    eprintln!("starting {nodes} nodes and {STORES} members of etcd");
    let lab = Lab::up(&LabPlan {
        nodes,
        stores: STORES,
        fence_ms,
        probe: PROBE.into(),
        tag: format!("{name}-{}", std::process::id()),
        dir: setting.dir().join(format!("lab-{name}")),
        program: setting.program.clone(),
        is_joined: true,
        tables: format!("{WIDE}{tables}"),
    })?;
    Ok(lab)
}

/// Imports these records into the cluster, and waits until every node has the last of its sites.
fn import(lab: &Lab, records: &[Value]) -> Result<()> {
    let names = lab.node_names();
    let (path, mut writer) = lab.node(&names[0])?.records("sites.jsonl")?;
    for record in records {
        writeln!(writer, "{record}").context("writing records")?;
    }
    writer.flush().context("writing records")?;
    drop(writer);
    lab.node(&names[0])?.import(&path)?;
    let sites = records.iter().rev().find_map(|record| record["site"]["name"].as_str());
    let last = sites.context("records without a site")?;
    for name in &names {
        let node = lab.node(name)?;
        until(&format!("{name} knows the site {last}"), || {
            Ok(node.run(&["site", "show", last, "--json"]).is_ok())
        })?;
    }
    Ok(())
}

/// Waits for a condition that nothing announces.
fn until(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !is_so()? {
        interrupt::check()?;
        ensure!(begun.elapsed() < HEARD_MAX, "waited {HEARD_MAX:?} in vain until {what}");
        std::thread::sleep(ASK_EVERY);
    }
    Ok(())
}

/// Makes a site run on this node.
fn place_on(lab: &Lab, site: &str, node: &str) -> Result<()> {
    let by = another(lab, node)?;
    if lab.placement(&by, site)?.is_none() {
        // A site runs, and can be moved, only after its first request.
        let address = lab.address(node)?;
        lab.as_client(|| http::get(address, &host(site), "/"))??;
    }
    // A node that has just been started may not accept anything yet.
    let mut told = Err(anyhow!("nobody asked for it"));
    let placed = until(&format!("{site} is placed on {node}"), || {
        let at = lab.placement(&by, site)?.map(|(at, _)| at);
        if at.as_deref() == Some(node) {
            return Ok(true);
        }
        if let (Some(at), true) = (at, told.is_err()) {
            // The node that has it gives it away.
            told = lab.node(&at)?.run(&["cluster", "move", site, "--to", node]);
        }
        Ok(false)
    });
    placed.with_context(|| format!("the cluster said: {told:?}"))
}

/// Returns the placement as an unconcerned node knows it.
fn is_on(lab: &Lab, site: &str, node: &str) -> Result<bool> {
    Ok(lab.placement(&another(lab, node)?, site)?.is_some_and(|(at, _)| at == node))
}

fn another(lab: &Lab, node: &str) -> Result<String> {
    lab.node_names().into_iter().find(|name| name != node).context("a lab of one node")
}

/// Returns the sum of all placements' epochs, which each move increases by one.
fn epochs(lab: &Lab, by: &str) -> Result<f64> {
    Ok(lab.placements(by)?.iter().filter_map(|one| one["epoch"].as_f64()).sum())
}

/// Requests each site once, a few at a time. A site without earlier requests is started.
fn ask_each(lab: &Lab, hosts: &[String]) -> Result<()> {
    const AT_ONCE: usize = 4;
    let address = lab.address(&lab.node_names()[1])?;
    let part = hosts.len().div_ceil(AT_ONCE);
    let ask = |some: &[String]| -> Result<()> {
        some.iter()
            .try_for_each(|host| interrupt::check().and_then(|()| http::get_ok(address, host, "/").map(drop)))
    };
    lab.as_client(|| {
        std::thread::scope(|scope| {
            let clients: Vec<_> = hosts.chunks(part).map(|some| scope.spawn(move || ask(some))).collect();
            clients
                .into_iter()
                .try_for_each(|client| client.join().map_err(|_| anyhow!("a client panicked"))?)
        })
    })?
    .context("before anything happens")
}

/// Requests at a steady rate, each for the next site at the next edge, whatever happens to earlier
/// ones.
struct OpenLoad<'l> {
    lab: &'l Lab,
    /// Nodes whose edges get the requests.
    edges: Vec<String>,
    hosts: Vec<String>,
    per_second: u32,
    lasts: Duration,
}

/// Result of one of its requests.
#[derive(Debug, Clone)]
struct TimedAnswer {
    site: usize,
    /// When it was sent, from the load's start.
    at: Duration,
    took_ms: f64,
    is_right: bool,
}

impl TimedAnswer {
    fn ended(&self) -> Duration {
        self.at + Duration::from_secs_f64(self.took_ms / 1e3)
    }
}

impl OpenLoad<'_> {
    /// Sends the requests while `beside` runs, which gets the start time of the load.
    fn run<T: Send>(
        &self,
        beside: impl FnOnce(Instant) -> Result<T> + Send,
    ) -> Result<(Vec<TimedAnswer>, T)> {
        let mut addresses = Vec::new();
        for edge in &self.edges {
            addresses.push(self.lab.address(edge)?);
        }
        let count = u64::from(self.per_second) * self.lasts.as_secs();
        let gap = Duration::from_secs(1) / self.per_second;
        let number = |index: u64| usize::try_from(index).context("number of requests");
        // The edge changes one slower than the site, so that each site is requested at each edge.
        let mut plan = Vec::new();
        for index in 0..count {
            let (site, turn) = (number(index)? % self.hosts.len(), number(index)? / self.hosts.len());
            let edge = (site + turn) % addresses.len();
            plan.push((gap * u32::try_from(index).context("number of requests")?, site, edge));
        }
        let (seen, outcome) = std::thread::scope(|scope| -> Result<_> {
            let begun = Instant::now();
            let beside = scope.spawn(move || beside(begun));
            let asked = self.lab.as_client(|| {
                let post = |&(at, site, edge): &(Duration, usize, usize)| {
                    let (address, host) = (addresses[edge], self.hosts[site].clone());
                    (at, SentPost { address, host, path: "/".into(), body: None })
                };
                open(plan.iter().map(post).collect())
            });
            let outcome = beside.join().map_err(|_| anyhow!("what was done beside the load panicked"))?;
            Ok((asked??, outcome?))
        })?;
        let answers = seen.iter().map(|seen| self.answer(seen, &plan)).collect();
        Ok((answers, outcome))
    }

    fn answer(&self, seen: &SeenAnswer, plan: &[(Duration, usize, usize)]) -> TimedAnswer {
        let (at, site, edge) = plan[seen.arrival];
        let is_right = seen.status == 200;
        if !is_right {
            let why = seen.code.as_deref().or(seen.why.as_deref()).unwrap_or_default();
            let (host, edge) = (&self.hosts[site], &self.edges[edge]);
            eprintln!(
                "{host} at {edge}, sent at {:.3} s, failed after {:.0} ms: {} {why}",
                at.as_secs_f64(),
                seen.took_ms,
                seen.status
            );
        }
        TimedAnswer { site, at, took_ms: seen.took_ms, is_right }
    }
}

fn errors(answers: &[TimedAnswer]) -> f64 {
    to_float(answers.iter().filter(|answer| !answer.is_right).count())
}

/// Returns milliseconds of the correct responses among requests sent from `from` on, for this time.
fn times_ms(answers: &[TimedAnswer], from: Duration, lasts: Duration) -> Vec<f64> {
    let wanted = |answer: &&TimedAnswer| answer.is_right && answer.at >= from && answer.at < from + lasts;
    answers.iter().filter(wanted).map(|answer| answer.took_ms).collect()
}

/// Returns seconds since 1970: the common clock of programs in sandboxes and this one.
fn now_s() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64()
}

fn host(site: &str) -> String {
    format!("{site}.example")
}

/// Returns the lab's description for the result file.
fn setting_note(lab: &Lab) -> Result<Value> {
    let all = lab.describe()?;
    Ok(json!({
        "nodes": lab.node_names().len(), "etcd members": STORES, "fence_ms": all["fence_ms"],
        "network": "a namespace for each machine, one bridge, no added delay",
    }))
}
