//! `nagaya top`: a live table of sites: tiers of their applications, running and waiting requests,
//! CPU use.
//!
//! Not here: gathering it (the keeper's instances and cells, the edge's requests), cells below
//! sites (`cells`).

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use nagaya_base::units::format_bytes;
use nagaya_base::{Clock, Code, SystemClock};
use nagaya_records::instance::Tier;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::cells::{self, CLEAR, INTERVAL};
use super::instance::{self, InstanceView, absent};
use super::lanes::LaneView;
use super::output::{self, CliError, OutputFormat, RecordSource, TableColumns, printable, short_time};

#[derive(Debug, clap::Args)]
pub struct TopArgs {
    /// Print once and end
    #[arg(long)]
    pub once: bool,
    /// Show only sites of this tenant
    #[arg(long)]
    pub tenant: Option<String>,
    /// Show at most this many sites, the busiest
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub limit: usize,
    #[command(flatten)]
    pub format: OutputFormat,
}

/// The edge's reply.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RequestsView {
    /// Load of applications.
    instances: Vec<LoadView>,
    lanes: Vec<LaneView>,
}

#[derive(Debug, Deserialize)]
struct LoadView {
    site: String,
    running: u64,
    waiting: u64,
}

/// One sample of everything.
struct TopSample {
    at: Instant,
    instances: Vec<InstanceView>,
    requests: RequestsView,
    /// CPU time in microseconds and memory of each site's cell, by `TENANT/SITE`.
    used: HashMap<String, (u64, Option<u64>)>,
    /// The node's mean load of the last minute. `None` if it cannot be read.
    load_average: Option<f64>,
}

/// A site's row. Fields that do not go with its kind are absent.
#[derive(Debug, Default, PartialEq, Serialize)]
struct TopRow {
    site: String,
    tenant: String,
    tier: Option<Tier>,
    state: Option<String>,
    since_seconds: Option<u64>,
    running: u64,
    waiting: u64,
    /// Of one core, between the last two samples.
    cpu_percent: f64,
    memory_bytes: Option<u64>,
    note: Option<String>,
}

pub fn run(command: &TopArgs, place: &RecordSource) -> Result<ExitCode, CliError> {
    output::end(watch(command, place), command.format)
}

/// Prints tables. The first one comes after two samples, since CPU use is a difference.
fn watch(command: &TopArgs, place: &RecordSource) -> Result<(), CliError> {
    let clear = if !command.once && io::stdout().is_terminal() { CLEAR } else { "" };
    let mut before: Option<TopSample> = None;
    loop {
        let text = match TopSample::take(place) {
            Ok(look) => {
                let text = before.as_ref().map(|before| frame(command, before, &look));
                before = Some(look);
                text
            }
            // A process was restarted, so its counts start from zero.
            Err(CliError::Refused(problem)) if !command.once && problem.code == Code(510).to_string() => {
                before = None;
                (!command.format.json).then(|| format!("{problem}\n"))
            }
            Err(error) => return Err(error),
        };
        if let Some(text) = text {
            let mut out = io::stdout().lock();
            write!(out, "{clear}{text}").and_then(|()| out.flush()).map_err(CliError::Output)?;
            if command.once {
                return Ok(());
            }
        }
        thread::sleep(INTERVAL);
    }
}

impl TopSample {
    fn take(place: &RecordSource) -> Result<Self, CliError> {
        let instances = instance::parse_instances(instance::fetch_instances(place)?)?.instances;
        let requests = read(output::ask_node(place, "/v1/requests")?)?;
        let tree = cells::parse_cells(cells::fetch_cells(place)?)?;
        let is_site = |path: &str| path.matches('/').count() == 1;
        let used = tree.cells.into_iter().filter(|cell| is_site(&cell.path)).map(|cell| {
            let usage = cell.usage;
            (cell.path, (usage.cpu_us.unwrap_or(0), usage.memory_bytes))
        });
        let load_average = std::fs::read_to_string("/proc/loadavg")
            .ok()
            .and_then(|text| text.split(' ').next()?.parse().ok());
        Ok(Self { at: SystemClock.now(), instances, requests, used: used.collect(), load_average })
    }

    /// Returns the mean number of threads of instances at this tier that ran or waited for a CPU
    /// since an earlier sample.
    fn queued(&self, before: &Self, tier: Tier) -> f64 {
        let elapsed = self.at.duration_since(before.at);
        let earlier: HashMap<&str, Option<u64>> =
            before.instances.iter().map(|instance| (&*instance.site, instance.queued_us)).collect();
        let of_tier = self.instances.iter().filter(|instance| instance.tier == tier);
        let percents = of_tier.filter_map(|instance| {
            // Without an earlier sample, nothing is known of this time.
            let was = earlier.get(&*instance.site).copied().flatten()?;
            Some(percent(Some(was), instance.queued_us, elapsed))
        });
        percents.fold(0.0, |sum, one| sum + one) / 100.0
    }

    /// Returns the CPU time of a site in microseconds: its instance's, if the keeper reports it, or
    /// its cell's.
    fn cpu_us(&self, tenant: &str, site: &str) -> Option<u64> {
        let own = self.instances.iter().find(|instance| instance.site == site);
        let of_cell = || self.used.get(&format!("{tenant}/{site}")).map(|(cpu_us, _)| *cpu_us);
        own.and_then(|instance| instance.cpu_us).or_else(of_cell)
    }
}

fn read(answer: Value) -> Result<RequestsView, CliError> {
    serde_json::from_value(answer)
        .map_err(|error| CliError::Usage(format!("the requests are of another version of nagaya: {error}")))
}

fn frame(command: &TopArgs, before: &TopSample, now: &TopSample) -> String {
    let mut rows = rows(before, now);
    if let Some(tenant) = &command.tenant {
        rows.retain(|row| row.tenant == *tenant);
    }
    if command.format.json {
        return format!("{}\n", serde_json::to_string(&rows).unwrap_or_default());
    }
    screen(command, &rows, &run_queue(before, now), &now.requests.lanes)
}

/// Returns the lines about the run queue, beside the load average.
fn run_queue(before: &TopSample, now: &TopSample) -> String {
    let [running, quiet] = [Tier::Running, Tier::Quiet].map(|tier| now.queued(before, tier));
    let load = now.load_average.map_or_else(absent, |load| format!("{load:.2}"));
    format!(
        "run queue: {running:.2} threads of running instances, {quiet:.2} of quiet ones; load average {load}\n\
         The load average counts each thread that runs or waits, also one that waits politely. It is no measure of harm.\n"
    )
}

/// Returns every site that has an instance, runs something or uses something; the busiest first.
fn rows(before: &TopSample, now: &TopSample) -> Vec<TopRow> {
    let mut rows: BTreeMap<String, TopRow> = BTreeMap::new();
    for instance in &now.instances {
        let row = rows.entry(instance.site.clone()).or_default();
        row.tenant.clone_from(&instance.tenant);
        row.tier = Some(instance.tier);
        row.state = Some(instance.state());
        row.since_seconds = instance.since_seconds;
        row.memory_bytes = instance.memory_bytes;
        row.note.clone_from(&instance.note);
    }
    for (path, (_, memory)) in &now.used {
        let (tenant, site) = path.split_once('/').unwrap_or_default();
        let row = rows.entry(site.to_owned()).or_default();
        tenant.clone_into(&mut row.tenant);
        row.memory_bytes = row.memory_bytes.or(*memory);
    }
    // A site's requests are counted in its lane; an application's are those that need its instance.
    for lane in now.requests.lanes.iter().filter(|lane| lane.of == "site") {
        let row = rows.entry(lane.name.clone()).or_default();
        row.running = lane.running;
        row.waiting = lane.waiting;
    }
    for load in &now.requests.instances {
        let row = rows.entry(load.site.clone()).or_default();
        row.running = load.running;
        row.waiting = load.waiting;
    }
    let elapsed = now.at.duration_since(before.at);
    let mut rows: Vec<TopRow> = rows
        .into_iter()
        .map(|(site, row)| {
            let was = before.cpu_us(&row.tenant, &site);
            let cpu_percent = percent(was, now.cpu_us(&row.tenant, &site), elapsed);
            TopRow { site, cpu_percent, ..row }
        })
        .collect();
    rows.sort_by(|one, other| {
        other
            .cpu_percent
            .total_cmp(&one.cpu_percent)
            .then_with(|| (other.running + other.waiting).cmp(&(one.running + one.waiting)))
            .then_with(|| Reverse(one.tier).cmp(&Reverse(other.tier)))
            .then_with(|| one.site.cmp(&other.site))
    });
    rows
}

/// Returns percent of one core. A count that started, or restarted, between the samples counts from
/// zero.
#[expect(clippy::cast_precision_loss, reason = "nobody sees the last of 53 bits on a screen")]
fn percent(before: Option<u64>, now: Option<u64>, elapsed: Duration) -> f64 {
    let now = now.unwrap_or(0);
    let before = before.filter(|before| *before <= now).unwrap_or(0);
    // 10 ms of CPU time per second is one percent.
    (now - before) as f64 / 1e4 / elapsed.as_secs_f64().max(1e-6)
}

fn screen(command: &TopArgs, rows: &[TopRow], run_queue: &str, lanes: &[LaneView]) -> String {
    let mut out = String::new();
    let at = |tier: Tier| rows.iter().filter(|row| row.tier == Some(tier)).count();
    let tiers: Vec<_> = Tier::ALL.iter().rev().map(|tier| format!("{} {tier}", at(*tier))).collect();
    let sum = |number: fn(&TopRow) -> u64| rows.iter().map(number).sum::<u64>();
    let cpu: f64 = rows.iter().map(|row| row.cpu_percent).sum();
    let _ = writeln!(out, "instances: {}", tiers.join(", "));
    let _ = writeln!(
        out,
        "requests of these sites: {} run, {} wait; they use {cpu:.1}% of a core",
        sum(|row| row.running),
        sum(|row| row.waiting)
    );
    let _ = writeln!(out, "{run_queue}");
    out.push_str(&table(&rows[..rows.len().min(command.limit)]).text());
    if rows.len() > command.limit {
        let _ = writeln!(
            out,
            "\n{} sites that use less are not shown: see --limit and --tenant",
            rows.len() - command.limit
        );
    }
    for lane in lanes.iter().filter(|lane| lane.waiting > 0) {
        let LaneView { of, name, running, waiting, run, .. } = lane;
        let name = printable(name);
        let _ = writeln!(out, "\n{of} {name}: {waiting} requests wait, {running} of {run} run");
    }
    out
}

fn table(rows: &[TopRow]) -> TableColumns {
    let mut columns =
        TableColumns::new(&["SITE", "TENANT", "STATE", "FOR", "RUN", "WAIT", "CPU%", "MEMORY", "NOTE"]);
    for row in rows {
        let since = row.since_seconds.map(|seconds| short_time(Duration::from_secs(seconds)));
        columns.add([
            printable(&row.site),
            printable(&row.tenant),
            row.state.clone().unwrap_or_else(absent),
            since.unwrap_or_else(absent),
            row.running.to_string(),
            row.waiting.to_string(),
            format!("{:.1}", row.cpu_percent),
            row.memory_bytes.map_or_else(absent, |bytes| format_bytes(bytes / 1024 * 1024)),
            row.note.as_deref().map_or_else(String::new, printable),
        ]);
    }
    columns
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn look(at: Instant, cpu: [u64; 2], used: &[(&str, u64)]) -> TopSample {
        let instances = json!({ "instances": [
            { "site": "wiki", "tenant": "demo", "tier": "running", "since_seconds": 5, "cpu_us": cpu[0], "queued_us": cpu[0] * 2, "memory_bytes": 62_914_560 },
            { "site": "shop", "tenant": "demo", "tier": "frozen", "since_seconds": 90, "cpu_us": cpu[1], "queued_us": null, "note": "no image yet" },
        ]});
        let requests = json!({
            "instances": [{ "site": "wiki", "running": 2, "waiting": 1 }],
            "lanes": [
                { "of": "lane", "name": "wiki slow", "running": 4, "waiting": 7, "run": 4 },
                { "of": "site", "name": "old", "running": 1, "waiting": 0, "run": 9 },
            ],
        });
        let used = used.iter().map(|(path, us)| ((*path).to_owned(), (*us, Some(2_048))));
        TopSample {
            at,
            instances: instance::parse_instances(instances).unwrap().instances,
            requests: read(requests).unwrap(),
            used: used.collect(),
            load_average: Some(5.125),
        }
    }

    #[test]
    fn the_busiest_site_comes_first_and_each_says_how_deep_it_rests() {
        let begun = SystemClock.now();
        let before = look(begun, [1_000_000, 50], &[("demo/old", 0)]);
        let now = look(begun + Duration::from_secs(2), [1_500_000, 50], &[("demo/old", 2_000_000)]);
        let command = TopArgs { once: true, tenant: None, limit: 2, format: OutputFormat { json: false } };
        assert_eq!(
            frame(&command, &before, &now),
            "instances: 1 running, 0 quiet, 1 frozen, 0 reclaimed, 0 image, 0 cold\n\
             requests of these sites: 3 run, 1 wait; they use 125.0% of a core\n\
             run queue: 0.50 threads of running instances, 0.00 of quiet ones; load average 5.12\n\
             The load average counts each thread that runs or waits, also one that waits politely. It is no measure of harm.\n\n\
             SITE  TENANT  STATE    FOR  RUN  WAIT  CPU%   MEMORY  NOTE\n\
             old   demo    -        -    1    0     100.0  2KiB\n\
             wiki  demo    running  5s   2    1     25.0   60MiB\n\
             \n1 sites that use less are not shown: see --limit and --tenant\n\
             \nlane wiki slow: 7 requests wait, 4 of 4 run\n"
        );
        let command =
            TopArgs { tenant: Some("other".into()), format: OutputFormat { json: true }, ..command };
        assert_eq!(frame(&command, &before, &now), "[]\n");
    }

    #[test]
    fn restarted_counter_counts_from_zero() {
        let second = Duration::from_secs(1);
        assert_eq!(percent(Some(9_000_000), Some(10_000), second), 1.0);
        assert_eq!(percent(None, Some(10_000), second), 1.0);
        assert_eq!(percent(Some(10_000), None, second), 0.0);
    }
}
