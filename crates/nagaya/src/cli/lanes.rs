//! `nagaya lanes` and `nagaya explain SITE`: running and waiting requests, their waits, and the
//! quality of predictions.
//!
//! Not here: deciding (`nagaya_admission`), one request's receipt (`explain`).

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::balance;
use super::cells::{CLEAR, INTERVAL};
use super::events;
use super::output::{self, CliError, OutputFormat, RecordSource, TableColumns, printable, short_time};

#[derive(Debug, clap::Args)]
pub struct LanesArgs {
    /// Refresh every second, until Ctrl-C
    #[arg(long)]
    pub watch: bool,
    /// Show at most this many lanes, the fullest
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub limit: usize,
    #[command(flatten)]
    pub format: OutputFormat,
}

/// One lane, as in the edge's reply. Times are seconds.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct LaneView {
    /// `tenant`, `site` or `lane`.
    pub(super) of: String,
    pub(super) name: String,
    pub(super) running: u64,
    /// Number that may run now.
    pub(super) run: u64,
    pub(super) waiting: u64,
    waiting_bytes: u64,
    promised: u64,
    /// Wait of a newcomer; `None` if unknown.
    wait_seconds: Option<f64>,
    queued_for_seconds: Option<f64>,
    held_by: String,
    /// Its tenant has had lower CPU priority for this time; `None` if it has not.
    gives_way_for_seconds: Option<f64>,
    drain_per_second: Option<f64>,
    service_p50_seconds: Option<f64>,
    service_p90_seconds: Option<f64>,
    counts: CountsView,
    calibration: QualityView,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
struct CountsView {
    admitted: u64,
    waited: u64,
    left: u64,
    refused: u64,
    promised: u64,
    adopted: u64,
    kept: u64,
    broken: u64,
    late: u64,
    never_came: u64,
    called_early: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
struct QualityView {
    predictions: u64,
    untold: u64,
    error_p50_pct: Option<f64>,
    error_p90_pct: Option<f64>,
    bias_pct: Option<f64>,
}

#[derive(Debug, Deserialize)]
struct LanesReply {
    lanes: Vec<LaneView>,
    #[serde(default)]
    placing: Vec<PlacingView>,
}

/// A site whose requests on this node wait until it has a placement and is awake there. Times are
/// seconds.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
struct PlacingView {
    site: String,
    requests: u64,
    since_seconds: f64,
    /// Remaining wait; `None` if unknown.
    wait_seconds: Option<f64>,
}

pub fn run(command: &LanesArgs, place: &RecordSource) -> Result<ExitCode, CliError> {
    output::end(show(command, place), command.format)
}

fn show(command: &LanesArgs, place: &RecordSource) -> Result<(), CliError> {
    let clear = if command.watch && io::stdout().is_terminal() { CLEAR } else { "" };
    loop {
        let lanes = ask(place)?.lanes;
        let text = if command.format.json {
            format!("{}\n", serde_json::to_string(&lanes).unwrap_or_default())
        } else {
            screen(&lanes, command.limit)
        };
        let mut out = io::stdout().lock();
        write!(out, "{clear}{text}").and_then(|()| out.flush()).map_err(CliError::Output)?;
        if !command.watch {
            return Ok(());
        }
        drop(out);
        thread::sleep(INTERVAL);
    }
}

fn ask(place: &RecordSource) -> Result<LanesReply, CliError> {
    read(output::ask_node(place, "/v1/requests")?)
}

fn read(answer: Value) -> Result<LanesReply, CliError> {
    let mut answer: LanesReply = serde_json::from_value(answer)
        .map_err(|error| CliError::Usage(format!("the lanes are of another version of nagaya: {error}")))?;
    answer.lanes.sort_by(|one, other| {
        let fullness = |lane: &LaneView| (lane.waiting, lane.promised, lane.running);
        fullness(other).cmp(&fullness(one)).then_with(|| one.name.cmp(&other.name))
    });
    Ok(answer)
}

fn screen(lanes: &[LaneView], limit: usize) -> String {
    if lanes.is_empty() {
        return "no lane is in use\n".into();
    }
    let mut columns = TableColumns::new(&[
        "LANE",
        "RUN",
        "OF",
        "WAIT",
        "NEXT",
        "PREDICTED",
        "DRAIN/S",
        "ERR P50",
        "ERR P90",
        "KEPT",
        "REFUSED",
    ]);
    for lane in &lanes[..lanes.len().min(limit)] {
        let percent = |value: Option<f64>| value.map_or_else(|| "-".into(), |value| format!("{value:.0}%"));
        columns.add([
            format!("{} {}", lane.of, printable(&lane.name)),
            lane.running.to_string(),
            bound(lane.run),
            lane.waiting.to_string(),
            lane.promised.to_string(),
            lane.wait_seconds.map_or_else(|| "unknown".into(), seconds),
            lane.drain_per_second.map_or_else(|| "-".into(), |rate| format!("{rate:.1}")),
            percent(lane.calibration.error_p50_pct),
            percent(lane.calibration.error_p90_pct),
            kept(&lane.counts),
            lane.counts.refused.to_string(),
        ]);
    }
    let mut out = columns.text();
    if lanes.len() > limit {
        let _ = writeln!(out, "\n{} lanes are not shown: see --limit", lanes.len() - limit);
    }
    out
}

fn bound(run: u64) -> String {
    if run >= u64::from(u32::MAX) { "-".into() } else { run.to_string() }
}

fn kept(counts: &CountsView) -> String {
    let due = counts.kept + counts.broken;
    if due == 0 { "-".into() } else { format!("{}/{due}", counts.kept) }
}

fn seconds(seconds: f64) -> String {
    if seconds < 10.0 {
        format!("{seconds:.1}s")
    } else {
        short_time(Duration::from_secs_f64(seconds.min(1e9)))
    }
}

/// Explains why requests of a site wait, since when, and what would help. It also shows why its
/// application is on its node, and the effects of its load.
pub fn explain(site: &str, format: OutputFormat, place: &RecordSource) -> Result<ExitCode, CliError> {
    let explained = (|| {
        output::ask_node(place, &format!("/v1/sites/{}", output::escape(site)))?;
        let LanesReply { lanes, placing } = ask(place)?;
        let own: Vec<_> = lanes.into_iter().filter(|lane| is_of(lane, site)).collect();
        let placing = placing.into_iter().find(|placing| placing.site == site);
        let load = balance::fetch_balance(site, place)?;
        let placed = events::fetch_placement(site, place)?;
        if format.json {
            return output::print_json(
                &json!({ "lanes": own, "placing": placing, "balance": load, "placement": placed }),
            );
        }
        let placed = events::render_placement(placed.as_ref())?;
        let waits = placing.as_ref().map_or_else(String::new, placing_told);
        output::print((told(site, &own) + &waits + &placed + &balance::render_balance(&load)?).trim_end())
    })();
    output::end(explained, format)
}

fn placing_told(placing: &PlacingView) -> String {
    let PlacingView { requests, since_seconds, wait_seconds, .. } = placing;
    let rest = wait_seconds.map_or_else(
        || "how much longer is not known".to_owned(),
        |wait| format!("about {} more", seconds(wait)),
    );
    format!(
        "{requests} wait since {} until it has a place and is awake there; {rest}\n",
        seconds(*since_seconds)
    )
}

fn is_of(lane: &LaneView, site: &str) -> bool {
    match lane.of.as_str() {
        "site" => lane.name == site,
        "lane" => lane.name.split_once(' ').is_some_and(|(of, _)| of == site),
        _ => false,
    }
}

fn told(site: &str, lanes: &[LaneView]) -> String {
    let mut out = String::new();
    if lanes.iter().all(|lane| lane.waiting == 0) {
        let running: u64 = lanes.iter().filter(|lane| lane.of == "site").map(|lane| lane.running).sum();
        let _ = writeln!(out, "site {}: nobody waits; {running} requests run", printable(site));
    }
    for lane in lanes.iter().filter(|lane| lane.waiting > 0 || lane.promised > 0) {
        line(lane, &mut out);
    }
    for lane in lanes.iter().filter(|lane| lane.calibration.predictions > 0) {
        let QualityView { predictions, untold, error_p50_pct, error_p90_pct, bias_pct } = &lane.calibration;
        let percent = |value: &Option<f64>| value.map_or_else(|| "-".into(), |value| format!("{value:.0}%"));
        let _ = writeln!(
            out,
            "{} {}: of {predictions} predicted waits half were within {}, nine of ten within {}; bias {}{}",
            lane.of,
            printable(&lane.name),
            percent(error_p50_pct),
            percent(error_p90_pct),
            percent(bias_pct),
            if *untold == 0 { String::new() } else { format!("; {untold} were unknown and not told") },
        );
    }
    out
}

fn line(lane: &LaneView, out: &mut String) {
    let _ = write!(
        out,
        "{} {}: {} wait, {} of {} run",
        lane.of,
        printable(&lane.name),
        lane.waiting,
        lane.running,
        bound(lane.run)
    );
    if let Some(since) = lane.queued_for_seconds {
        let _ = write!(out, ", a line since {}", seconds(since));
    }
    match lane.wait_seconds {
        Some(wait) => {
            let _ = writeln!(out, "; whoever comes now waits about {}", seconds(wait));
        }
        None => out.push_str("; how long is not known yet\n"),
    }
    if lane.promised > 0 {
        let _ = writeln!(out, "  {} hold tickets for later", lane.promised);
    }
    let help = match (lane.held_by.as_str(), lane.of.as_str()) {
        ("own", "lane") => "its own bound, which the rule's run: sets",
        ("own", _) => "its own bound: see --max-concurrent and --auto of `nagaya site set`",
        ("around", _) => {
            "a lane around it: its tenant's limit, see --max-concurrent of `nagaya tenant set`, or the \
             node's, node_max_concurrent in [admission]"
        }
        _ => "",
    };
    if !help.is_empty() {
        let _ = writeln!(out, "  held by {help}");
    }
    if let Some(since) = lane.gives_way_for_seconds {
        let _ = writeln!(
            out,
            "  since {} what runs for its tenant gives way to tenants without a line on the processor",
            seconds(since)
        );
    }
    if let (Some(p50), Some(p90)) = (lane.service_p50_seconds, lane.service_p90_seconds) {
        let _ = writeln!(
            out,
            "  its requests take {:.0} ms, one in ten more than {:.0} ms: `nagaya explain ID` of a slow one says where",
            p50 * 1000.0,
            p90 * 1000.0
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer() -> LanesReply {
        let placing = json!([
            { "site": "shop", "requests": 3, "since_seconds": 0.21, "wait_seconds": 0.4 },
            { "site": "blog", "requests": 1, "since_seconds": 12.0, "wait_seconds": null },
        ]);
        let answer = json!({ "instances": [], "placing": placing, "lanes": [
            { "of": "tenant", "name": "demo", "running": 4, "run": 4_294_967_295_u64, "waiting": 0 },
            { "of": "site", "name": "shop", "running": 4, "run": 4, "waiting": 9, "promised": 2, "wait_seconds": 12.4,
              "queued_for_seconds": 75.0, "held_by": "own", "drain_per_second": 0.7, "service_p50_seconds": 1.2,
              "service_p90_seconds": 4.0, "counts": { "kept": 3, "broken": 1, "refused": 5 },
              "calibration": { "predictions": 20, "untold": 3, "error_p50_pct": 4.2, "error_p90_pct": 11.0, "bias_pct": -1.0 } },
            { "of": "lane", "name": "shop checkout", "running": 1, "run": 2, "waiting": 0 },
        ]});
        read(answer).unwrap()
    }

    fn lanes() -> Vec<LaneView> {
        answer().lanes
    }

    #[test]
    fn a_wait_for_placement_shows_the_rest_or_that_it_is_unknown() {
        let told: Vec<_> = answer().placing.iter().map(placing_told).collect();
        assert_eq!(
            told,
            [
                "3 wait since 0.2s until it has a place and is awake there; about 0.4s more\n",
                "1 wait since 12s until it has a place and is awake there; how much longer is not known\n",
            ]
        );
    }

    #[test]
    fn the_fullest_lane_comes_first() {
        assert_eq!(
            screen(&lanes(), 2),
            "LANE         RUN  OF  WAIT  NEXT  PREDICTED  DRAIN/S  ERR P50  ERR P90  KEPT  REFUSED\n\
             site shop    4    4   9     2     12s        0.7      4%       11%      3/4   5\n\
             tenant demo  4    -   0     0     unknown    -        -        -        -     0\n\
             \n1 lanes are not shown: see --limit\n"
        );
        assert_eq!(screen(&[], 2), "no lane is in use\n");
    }

    #[test]
    fn a_site_is_told_why_its_requests_wait_and_what_would_help() {
        let own: Vec<_> = lanes().into_iter().filter(|lane| is_of(lane, "shop")).collect();
        assert_eq!(own.len(), 2);
        assert_eq!(
            told("shop", &own),
            "site shop: 9 wait, 4 of 4 run, a line since 1m 15s; whoever comes now waits about 12s\n\
             \x20 2 hold tickets for later\n\
             \x20 held by its own bound: see --max-concurrent and --auto of `nagaya site set`\n\
             \x20 its requests take 1200 ms, one in ten more than 4000 ms: `nagaya explain ID` of a slow one says where\n\
             site shop: of 20 predicted waits half were within 4%, nine of ten within 11%; bias -1%; 3 were unknown and not told\n"
        );
        assert_eq!(told("calm", &[]), "site calm: nobody waits; 0 requests run\n");
    }
}
