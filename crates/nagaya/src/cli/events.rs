//! `nagaya events`, and the part of `nagaya explain SITE` about where its application runs. It
//! shows recent cluster events, as seen by the queried node.
//!
//! Not here: keeping them (`supervisor::cluster::events`), the other parts of `nagaya explain SITE`
//! (`lanes`, `balance`).

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use nagaya_records::instance::WakeReport;
use serde::Deserialize;
use serde_json::Value;

use super::output::{self, CliError, OutputFormat, RecordSource, plain, printable, short_time, short_us};

/// Default number of printed events.
const EVENTS_SHOWN: usize = 50;

/// Codes of a node that is in no cluster, or cannot be in one.
const NO_CLUSTER: [&str; 2] = ["NGY0240", "NGY0241"];

#[derive(Debug, clap::Args)]
pub struct EventsArgs {
    /// Show at most this many events, the latest first
    #[arg(long, value_name = "N", default_value_t = EVENTS_SHOWN)]
    pub limit: usize,
    #[command(flatten)]
    pub format: OutputFormat,
}

/// One event, as in the node's reply. Unknown fields are absent.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ShownEvent {
    at_ms: u64,
    event: String,
    node: String,
    by: String,
    site: String,
    from: Option<String>,
    to: String,
    epoch: u64,
    why: String,
    reason: String,
    probe_us: u64,
    decide_us: u64,
    store_us: u64,
    fetch_us: u64,
    release_us: u64,
    fence_ms: u64,
}

/// Why a site is on its node.
#[derive(Debug, Deserialize)]
struct PlacementReply {
    /// The node that replied.
    asked: String,
    placement: Option<Value>,
    fallback: Option<String>,
    /// On that node, if it runs there.
    last_wake: Option<WakeReport>,
    #[serde(default)]
    moves: Vec<ShownEvent>,
}

pub fn run(command: &EventsArgs, place: &RecordSource) -> Result<ExitCode, CliError> {
    output::end(show(command, place), command.format)
}

fn show(command: &EventsArgs, place: &RecordSource) -> Result<(), CliError> {
    let answer = output::ask_node(place, &format!("/v1/events?limit={}", command.limit))?;
    if command.format.json {
        return output::print_json(&answer["events"]);
    }
    let events: Vec<ShownEvent> = read(answer["events"].clone())?;
    output::print(screen(&events, now_ms()).trim_end())
}

fn read<T: serde::de::DeserializeOwned>(answer: Value) -> Result<T, CliError> {
    serde_json::from_value(answer)
        .map_err(|error| CliError::Usage(format!("the node is of another version of nagaya: {error}")))
}

fn now_ms() -> u64 {
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

fn screen(events: &[ShownEvent], now_ms: u64) -> String {
    if events.is_empty() {
        return "nothing has happened since this node was started\n".into();
    }
    let mut out = String::new();
    for event in events {
        let _ = writeln!(out, "{:>8} ago  {}", ago(event.at_ms, now_ms), sentence(event));
    }
    out
}

fn ago(at_ms: u64, now_ms: u64) -> String {
    short_time(Duration::from_millis(now_ms.saturating_sub(at_ms)))
}

fn sentence(event: &ShownEvent) -> String {
    let node = printable(&event.node);
    match event.event.as_str() {
        "joined" => format!("{node} is a member"),
        "removed" => format!("{node} is no member any more"),
        "gone" => format!("{node} has sent no report for some seconds"),
        "seen" => format!("{node} tells of itself again"),
        "draining" => format!("{node} is to be emptied"),
        "undrained" => format!("{node} may have applications again"),
        "silent" => match event.why.as_str() {
            "refused" => format!("the host of {node} refused a request"),
            "fenced" => format!("{node} had no authority for a request"),
            _ => format!("{node} did not answer a request"),
        },
        "answers" => format!("{node} answers again"),
        "authority_lost" => "this node may run no applications: it has no lease".into(),
        "authority_held" if event.by == "members" => {
            "this node may run applications by the word of all other members, as the store does not answer"
                .into()
        }
        "authority_held" => "this node may run applications".into(),
        "moved" => moved(event),
        other => printable(other),
    }
}

fn moved(event: &ShownEvent) -> String {
    let from = event.from.as_ref().map_or_else(String::new, |from| format!(" from {}", printable(from)));
    let mut out = format!(
        "{}{from} to {}, epoch {}: {}",
        printable(&event.site),
        printable(&event.to),
        event.epoch,
        because(&event.why)
    );
    let steps = [
        ("probe", event.probe_us),
        ("decide", event.decide_us),
        ("fetch", event.fetch_us),
        ("release", event.release_us),
        ("store", event.store_us),
        ("fence at most", event.fence_ms.saturating_mul(1000)),
    ];
    for (step, us) in steps.into_iter().filter(|(_, us)| *us > 0) {
        let _ = write!(out, "; {step} {}", short_us(us));
    }
    if !event.reason.is_empty() {
        let _ = write!(out, "\n{:14}chosen: {}", "", printable(&event.reason));
    }
    out
}

/// Returns the text for a placement's `why`.
fn because(why: &str) -> String {
    match why {
        "first" => "it had run nowhere".into(),
        "silent" => "its node did not answer".into(),
        "refused" => "its node refused".into(),
        "fenced" => "its node had no authority to run it".into(),
        "draining" => "its node was to be emptied, or has left".into(),
        "load" => "its load required it".into(),
        "operator" => "an operator moved it".into(),
        other => printable(other),
    }
}

/// Queries a site. `None` if the node is in no cluster.
pub fn fetch_placement(site: &str, place: &RecordSource) -> Result<Option<Value>, CliError> {
    match output::ask_node(place, &format!("/v1/placements/{}", output::escape(site))) {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.code().is_some_and(|code| NO_CLUSTER.contains(&&*code.to_string())) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the text; empty if it runs nowhere and never did.
pub fn render_placement(answer: Option<&Value>) -> Result<String, CliError> {
    let Some(answer) = answer else { return Ok(String::new()) };
    Ok(placed(&read(answer.clone())?, now_ms()))
}

fn placed(explained: &PlacementReply, now_ms: u64) -> String {
    let mut out = String::new();
    let asked = printable(&explained.asked);
    if let Some(placement) = &explained.placement {
        let node = printable(&plain(&placement["node"]));
        let epoch = placement["epoch"].as_u64().unwrap_or(0);
        let since = ago(placement["since_ms"].as_u64().unwrap_or(now_ms), now_ms);
        let why = because(placement["why"].as_str().unwrap_or_default());
        let _ = writeln!(out, "its application is on {node} since {since}, epoch {epoch}: {why}");
        if !explained.moves.iter().any(|moved| moved.epoch == epoch) {
            let _ = writeln!(
                out,
                "  another node than {asked} has chosen it, or {asked} was started since: `nagaya events` on each tells"
            );
        }
        if let Some(fallback) = &explained.fallback {
            let _ = writeln!(out, "  its fallback is {}", printable(fallback));
        }
    }
    if let Some(WakeReport { from, stages, .. }) = &explained.last_wake {
        let _ = write!(out, "  its last wake on {asked} was from {from}");
        for (at, (stage, us)) in stages.iter().filter(|(_, us)| *us > 0).enumerate() {
            let _ = write!(out, "{} {} {}", if at == 0 { ":" } else { "," }, stage.as_str(), short_us(*us));
        }
        out.push('\n');
    }
    if !explained.moves.is_empty() {
        let _ = writeln!(out, "moves that {asked} has decided:");
    }
    for event in &explained.moves {
        let _ = writeln!(out, "  {} ago: {}", ago(event.at_ms, now_ms), moved(event));
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told_moves() -> Value {
        json!([
            { "at_ms": 97_000, "event": "moved", "site": "wiki", "from": "a", "to": "b", "epoch": 4, "why": "silent", "reason": "b for wiki: first",
              "probe_us": 35_000, "decide_us": 120, "store_us": 4_000, "release_us": 0, "fence_ms": 300 },
            { "at_ms": 10_000, "event": "moved", "site": "wiki", "from": null, "to": "a", "epoch": 3, "why": "first", "reason": "" },
        ])
    }

    #[test]
    fn events_are_told_in_words_with_what_a_move_took() {
        let mut events: Vec<ShownEvent> = read(told_moves()).unwrap();
        let more = json!([
            { "at_ms": 9_000, "event": "silent", "node": "a", "why": "fenced" },
            { "at_ms": 8_000, "event": "authority_held", "by": "members" },
            { "at_ms": 8_000, "event": "draining", "node": "c\u{1b}[31m" },
        ]);
        events.extend(read::<Vec<ShownEvent>>(more).unwrap());
        assert_eq!(
            screen(&events, 100_000),
            "      3s ago  wiki from a to b, epoch 4: its node did not answer; probe 35.0 ms; decide 120 us; store 4.0 ms; fence at most 300.0 ms\n\
             \x20             chosen: b for wiki: first\n\
             \x20 1m 30s ago  wiki to a, epoch 3: it had run nowhere\n\
             \x20 1m 31s ago  a had no authority for a request\n\
             \x20 1m 32s ago  this node may run applications by the word of all other members, as the store does not answer\n\
             \x20 1m 32s ago  c\\u{1b}[31m is to be emptied\n"
        );
        assert_eq!(screen(&[], 1), "nothing has happened since this node was started\n");
    }

    #[test]
    fn a_site_is_told_why_it_is_where_it_is() {
        let explained = |epoch: u64, moves: Value| {
            let placement =
                json!({ "site": "wiki", "node": "b", "epoch": epoch, "since_ms": 97_000, "why": "silent" });
            let wake =
                json!({ "from": "image", "stages": [["decide", 0], ["restore", 38_000], ["connect", 40]] });
            let answer = json!({ "site": "wiki", "asked": "c", "placement": placement, "fallback": "a", "last_wake": wake, "moves": moves });
            placed(&read(answer).unwrap(), 100_000)
        };
        let text = explained(4, told_moves());
        assert!(text.starts_with("its application is on b since 3s, epoch 4: its node did not answer\n  its fallback is a\n  its last wake on c was from image: restore 38.0 ms, connect 40 us\nmoves that c has decided:\n  3s ago: wiki from a"), "{text}");
        let text = explained(5, json!([]));
        assert!(text.contains("another node than c has chosen it") && !text.contains("moves that"), "{text}");
        let nowhere =
            json!({ "site": "wiki", "asked": "c", "placement": null, "fallback": null, "moves": [] });
        assert_eq!(
            (render_placement(Some(&nowhere)).unwrap(), render_placement(None).unwrap()),
            (String::new(), String::new())
        );
    }
}
