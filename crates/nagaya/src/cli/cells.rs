//! `nagaya cells`: the tree of cells with their limits and use, once or every second with rates.
//!
//! Not here: measuring (`nagaya_keeper::cells`), the order and shape of the rows (`rows`).

mod rows;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use nagaya_base::{Clock, Code, SystemClock};
use nagaya_records::cell::LimitSet;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::output::{self, CliError, OutputFormat, RecordSource, printable};

/// Interval of `--watch`.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);

/// Puts the cursor into the upper left corner and clears everything below it (ECMA-48).
pub(super) const CLEAR: &str = "\x1b[H\x1b[J";

#[derive(Debug, clap::Args)]
pub struct CellsCommand {
    /// Refresh every second and show rates, until Ctrl-C
    #[arg(long)]
    pub watch: bool,
    /// Show only cells of this tenant
    #[arg(long)]
    pub tenant: Option<String>,
    /// Show at most this many cells, those that use most
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub limit: usize,
    #[command(flatten)]
    pub format: OutputFormat,
}

/// The keeper's reply.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct CellTree {
    missing: Vec<MissingCell>,
    pub(super) cells: Vec<CellView>,
    /// Cells that it did not list.
    left_out: usize,
}

#[derive(Debug, Deserialize)]
struct MissingCell {
    controller: Option<String>,
    why: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct CellView {
    pub(super) path: String,
    tenant: Option<String>,
    #[serde(default)]
    limits: LimitSet,
    #[serde(default)]
    pub(super) usage: UsageView,
    pressure: Option<PressureView>,
    /// Requests that run in it now.
    #[serde(default)]
    requests: u64,
}

/// Usage since the cell was made. `None` if its controller is missing.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(super) struct UsageView {
    pub(super) cpu_us: Option<u64>,
    throttled_us: Option<u64>,
    read_bytes: Option<u64>,
    write_bytes: Option<u64>,
    processes: Option<u64>,
    pub(super) memory_bytes: Option<u64>,
}

/// Share of the last ten seconds in which something waited, in percent.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
struct PressureView {
    cpu: Option<f64>,
    io: Option<f64>,
    memory: Option<f64>,
}

/// Rates between two samples, each per second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
struct CellRates {
    /// Of one core.
    cpu_percent: f64,
    throttled_percent: f64,
    read_bytes: f64,
    write_bytes: f64,
}

impl CellRates {
    /// Computes the rates. A cell that was made again between the samples has less than before:
    /// that counts as none.
    #[expect(clippy::cast_precision_loss, reason = "nobody sees the last of 53 bits on a screen")]
    fn between(before: UsageView, now: UsageView, elapsed: Duration) -> Self {
        let seconds = elapsed.as_secs_f64().max(1e-6);
        let rate = |before: Option<u64>, now: Option<u64>| {
            now.unwrap_or(0).saturating_sub(before.unwrap_or(0)) as f64 / seconds
        };
        // 10 ms of CPU time per second is one percent.
        Self {
            cpu_percent: rate(before.cpu_us, now.cpu_us) / 1e4,
            throttled_percent: rate(before.throttled_us, now.throttled_us) / 1e4,
            read_bytes: rate(before.read_bytes, now.read_bytes),
            write_bytes: rate(before.write_bytes, now.write_bytes),
        }
    }
}

pub fn run(command: &CellsCommand, place: &RecordSource) -> Result<ExitCode, CliError> {
    let result = if command.watch { watch(command, place) } else { once(command, place) };
    output::end(result, command.format)
}

fn once(command: &CellsCommand, place: &RecordSource) -> Result<(), CliError> {
    let mut answer = fetch_cells(place)?;
    if command.format.json {
        keep_tenant(&mut answer, command.tenant.as_deref());
        return output::print_json(&answer);
    }
    let tree = parse_cells(answer)?;
    output::print(screen(command, &tree, None).trim_end())
}

fn watch(command: &CellsCommand, place: &RecordSource) -> Result<(), CliError> {
    let clear = if io::stdout().is_terminal() { CLEAR } else { "" };
    let mut before: Option<(Instant, HashMap<String, UsageView>)> = None;
    loop {
        let text = match fetch_cells(place) {
            Ok(answer) => {
                let now = SystemClock.now();
                let tree = parse_cells(answer.clone())?;
                let last = before.replace((now, usages(&tree)));
                let rates = last.map(|(then, usages)| rates(&tree, &usages, now.duration_since(then)));
                match rates {
                    None => None,
                    Some(rates) if command.format.json => Some(with_rates(answer, command, &rates)),
                    Some(rates) => Some(screen(command, &tree, Some(&rates))),
                }
            }
            // The keeper was restarted, so its cells start from zero.
            Err(CliError::Refused(problem)) if problem.code == Code(510).to_string() => {
                before = None;
                (!command.format.json).then(|| format!("{problem}\n"))
            }
            Err(error) => return Err(error),
        };
        if let Some(text) = text {
            let mut out = io::stdout().lock();
            write!(out, "{clear}{text}").and_then(|()| out.flush()).map_err(CliError::Output)?;
        }
        thread::sleep(INTERVAL);
    }
}

pub(super) fn fetch_cells(place: &RecordSource) -> Result<Value, CliError> {
    output::ask_node(place, "/v1/cells")
}

pub(super) fn parse_cells(answer: Value) -> Result<CellTree, CliError> {
    serde_json::from_value(answer)
        .map_err(|error| CliError::Usage(format!("the tree is of another version of nagaya: {error}")))
}

fn usages(tree: &CellTree) -> HashMap<String, UsageView> {
    tree.cells.iter().map(|cell| (cell.path.clone(), cell.usage)).collect()
}

/// Returns the rates by path, only for cells of both samples.
fn rates(
    tree: &CellTree,
    before: &HashMap<String, UsageView>,
    elapsed: Duration,
) -> HashMap<String, CellRates> {
    let rate = |cell: &CellView| {
        let rates = CellRates::between(*before.get(&cell.path)?, cell.usage, elapsed);
        Some((cell.path.clone(), rates))
    };
    tree.cells.iter().filter_map(rate).collect()
}

fn keep_tenant(answer: &mut Value, tenant: Option<&str>) {
    if let (Some(tenant), Some(cells)) = (tenant, listed(answer)) {
        cells.retain(|cell| cell["tenant"] == tenant);
    }
}

fn listed(answer: &mut Value) -> Option<&mut Vec<Value>> {
    answer.get_mut("cells").and_then(Value::as_array_mut)
}

/// Returns the keeper's reply in one line, each cell with its rates.
fn with_rates(mut answer: Value, command: &CellsCommand, rates: &HashMap<String, CellRates>) -> String {
    keep_tenant(&mut answer, command.tenant.as_deref());
    for cell in listed(&mut answer).into_iter().flatten() {
        let rates = cell["path"].as_str().and_then(|path| rates.get(path));
        cell["rates"] = serde_json::to_value(rates).unwrap_or_default();
    }
    format!("{answer}\n")
}

fn screen(command: &CellsCommand, tree: &CellTree, rates: Option<&HashMap<String, CellRates>>) -> String {
    let (rows, hidden) = rows::of(tree, command.tenant.as_deref(), command.limit, rates);
    let mut out = rows::table(&rows, rates.is_some()).text();
    if rows.is_empty() {
        let whose =
            command.tenant.as_deref().map_or_else(String::new, |tenant| format!(" of tenant '{tenant}'"));
        out = format!("there is no cell{whose} now: cells come with the first request\n");
    }
    if hidden > 0 {
        let _ = writeln!(out, "\n{hidden} cells that use less are not shown: see --limit and --tenant");
    }
    if tree.left_out > 0 {
        let _ = writeln!(out, "\n{} more cells were not looked at", tree.left_out);
    }
    for missing in &tree.missing {
        let what = missing.controller.as_deref().unwrap_or("fence");
        let _ = writeln!(out, "\n{} does nothing here: {}", what.to_lowercase(), printable(&missing.why));
    }
    out
}

#[cfg(test)]
mod tests;
