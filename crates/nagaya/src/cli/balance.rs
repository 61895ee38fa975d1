//! The part of `nagaya explain SITE` about load: how busy its application is here, and the
//! decisions that followed.
//!
//! Not here: its queues (`lanes`), deciding (`nagaya_placement::balance`).

use std::fmt::Write as _;
use std::time::Duration;

use nagaya_base::units::format_bytes;
use serde::Deserialize;
use serde_json::Value;

use super::output::{self, CliError, RecordSource, printable, short_time};

/// The node's reply.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct BalanceReply {
    now: Option<BalanceNow>,
    /// The latest first.
    decisions: Vec<BalanceDecision>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct BalanceNow {
    node: String,
    starved: f64,
    throttled: f64,
    cpus_used: f64,
    limit: f64,
    limit_base: f64,
    limit_max: f64,
    requests: u64,
    memory_bytes: u64,
    short_seconds: Option<u64>,
    held: Option<String>,
    nodes: Vec<String>,
    nodes_max: u32,
    others_used: Option<f64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct BalanceDecision {
    words: String,
    ago_seconds: u64,
    end: String,
}

pub fn fetch_balance(site: &str, place: &RecordSource) -> Result<Value, CliError> {
    output::ask_node(place, &format!("/v1/balance/{}", output::escape(site)))
}

/// Returns the text; empty if nothing is known.
pub fn render_balance(answer: &Value) -> Result<String, CliError> {
    let answer: BalanceReply = serde_json::from_value(answer.clone())
        .map_err(|error| CliError::Usage(format!("the balance is of another version of nagaya: {error}")))?;
    let mut out = String::new();
    if let Some(now) = &answer.now {
        load(now, &mut out);
    }
    if !answer.decisions.is_empty() {
        out.push_str("decided for its load on this node:\n");
    }
    for BalanceDecision { words, ago_seconds, end } in &answer.decisions {
        let ago = short_time(Duration::from_secs(*ago_seconds));
        let _ = write!(out, "  {ago} ago: {}", printable(words));
        out.push_str(&if end == "done" { "\n".into() } else { format!(" ({})\n", printable(end)) });
    }
    Ok(out)
}

fn load(now: &BalanceNow, out: &mut String) {
    let BalanceNow {
        node,
        starved,
        throttled,
        cpus_used,
        limit,
        limit_base,
        limit_max,
        requests,
        memory_bytes,
        ..
    } = now;
    let _ = writeln!(
        out,
        "its application on {}: short of CPU {:.0}% of the last second, {:.0}% for want of its limit; {cpus_used:.2} of {limit:.2} CPUs used (its record: {limit_base:.2}, \
         at most {limit_max:.2}), {} of memory, {requests} requests under way",
        printable(node),
        starved * 100.0,
        throttled * 100.0,
        format_bytes(*memory_bytes),
    );
    if now.nodes.len() > 1 {
        let others = now.others_used.map_or("unknown".into(), |used| format!("{used:.2} CPUs"));
        let nodes: Vec<_> = now.nodes.iter().map(|node| printable(node)).collect();
        let _ = writeln!(
            out,
            "  it runs on {} of the {} nodes that it may have: {}; the others use {others} for it",
            nodes.len(),
            now.nodes_max,
            nodes.join(", ")
        );
    }
    if let Some(seconds) = now.short_seconds {
        let _ = writeln!(out, "  short of CPU for {}", short_time(Duration::from_secs(seconds)));
    }
    if let Some(held) = &now.held {
        let _ = writeln!(out, "  nothing more is done yet: {}", printable(held));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_busy_application_is_shown_with_numbers_and_decisions() {
        let answer = json!({ "site": "shop", "now": {
            "node": "a", "starved": 0.4, "throttled": 0.3, "cpus_used": 0.98, "limit": 1.0, "limit_base": 0.5, "limit_max": 2.0, "requests": 7,
            "memory_bytes": 1 << 20, "short_seconds": 75, "held": "a is busy", "ago_seconds": 0,
            "nodes": ["a", "b"], "nodes_max": 3, "others_used": 0.5,
        }, "decisions": [
            { "step": "move", "words": "to b", "ago_seconds": 3, "at_ms": 1, "end": "not done: b is gone" },
            { "step": "raise", "words": "more", "ago_seconds": 90, "at_ms": 1, "end": "done" },
        ]});
        assert_eq!(
            render_balance(&answer).unwrap(),
            "its application on a: short of CPU 40% of the last second, 30% for want of its limit; 0.98 of 1.00 CPUs used (its record: 0.50, at most 2.00), 1MiB of memory, 7 requests under way\n\
             \x20 it runs on 2 of the 3 nodes that it may have: a, b; the others use 0.50 CPUs for it\n\
             \x20 short of CPU for 1m 15s\n\
             \x20 nothing more is done yet: a is busy\n\
             decided for its load on this node:\n\
             \x20 3s ago: to b (not done: b is gone)\n\
             \x20 1m 30s ago: more\n"
        );
        assert_eq!(render_balance(&json!({ "site": "calm", "now": null, "decisions": [] })).unwrap(), "");
    }
}
