//! Recent observations and decisions of the balance of load, for `nagaya explain SITE`, the log and
//! `/metrics`.
//!
//! Not here: deciding (`nagaya_placement::balance`), the command (`cli::balance`).

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use nagaya_base::{Clock as _, SystemClock};
use nagaya_placement::balance::{self, BalanceStep};
use nagaya_records::SiteName;
use nagaya_telemetry::MetricPage;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::supervisor::cluster::unix_ms;

/// Decisions that are kept, of all sites.
const DECISIONS_MAX: usize = 1_024;

/// Decisions shown for one site.
const TOLD_MAX: usize = 10;

pub type SiteLoad = balance::SiteLoad<SiteName, String>;
pub type Decision = balance::BalanceDecision<SiteName, String>;

/// Written by the balance, read by queries.
#[derive(Debug, Default)]
pub struct BalanceHistory(Mutex<HistoryState>);

#[derive(Debug, Default)]
struct HistoryState {
    /// Sites of the last sample.
    now: HashMap<SiteName, SeenLoad>,
    looked: Option<Instant>,
    decisions: VecDeque<HistoryEntry>,
    next: u64,
    /// By `KINDS`: carried out, and not.
    counts: [[u64; 2]; KINDS.len()],
}

/// Last observation of a site.
#[derive(Debug, Clone)]
pub struct SeenLoad {
    pub load: SiteLoad,
    pub short_seconds: Option<u64>,
    /// Why nothing more is done for it, although it is short.
    pub held: Option<String>,
}

#[derive(Debug)]
struct HistoryEntry {
    number: u64,
    at: Instant,
    at_ms: u64,
    decision: Decision,
    /// `None` while it is being carried out.
    end: Option<Result<(), String>>,
}

const KINDS: [&str; 5] = ["raise", "lower", "move", "copy", "uncopy"];

fn kind(step: &BalanceStep<String>) -> usize {
    match step {
        BalanceStep::Raise(_) => 0,
        BalanceStep::Lower(_) => 1,
        BalanceStep::Move(_) => 2,
        BalanceStep::Copy(_) => 3,
        BalanceStep::Uncopy => 4,
    }
}

impl BalanceHistory {
    /// Notes all observations of one sample.
    pub fn saw(&self, seen: Vec<SeenLoad>) {
        let mut state = self.0.lock();
        state.now = seen.into_iter().map(|seen| (seen.load.site.clone(), seen)).collect();
        state.looked = Some(SystemClock.now());
    }

    /// Notes a decision. Returns the number with which its outcome is noted.
    pub fn decided(&self, decision: &Decision) -> u64 {
        let mut state = self.0.lock();
        if state.decisions.len() >= DECISIONS_MAX {
            state.decisions.pop_front();
        }
        let number = state.next;
        state.next += 1;
        let at = SystemClock.now();
        let at_ms = unix_ms();
        state.decisions.push_back(HistoryEntry { number, at, at_ms, decision: decision.clone(), end: None });
        number
    }

    pub fn finish_step(&self, number: u64, step: &BalanceStep<String>, end: Result<(), String>) {
        let mut state = self.0.lock();
        state.counts[kind(step)][usize::from(end.is_err())] += 1;
        // After a thousand others it may be forgotten.
        if let Some(entry) = state.decisions.iter_mut().find(|entry| entry.number == number) {
            entry.end = Some(end);
        }
    }

    /// Returns all that is known of one site.
    pub fn describe_site(&self, site: &str) -> Value {
        let state = self.0.lock();
        let ago = |at: Instant| SystemClock.now().duration_since(at).as_secs();
        let now = state.now.get(site).map(|seen| {
            let SiteLoad {
                node,
                starved,
                throttled,
                cpus_used,
                limit,
                limit_base,
                limit_max,
                in_flight,
                memory_bytes,
                nodes,
                nodes_max,
                others_used,
                ..
            } = &seen.load;
            json!({
                "node": node,
                "starved": starved,
                "throttled": throttled,
                "cpus_used": cpus_used,
                "limit": limit,
                "limit_base": limit_base,
                "limit_max": limit_max,
                "requests": in_flight,
                "memory_bytes": memory_bytes,
                "nodes": nodes,
                "nodes_max": nodes_max,
                "others_used": others_used.filter(|_| nodes.len() > 1),
                "short_seconds": seen.short_seconds,
                "held": seen.held,
                "ago_seconds": state.looked.map(ago),
            })
        });
        let own = state.decisions.iter().rev().filter(|entry| entry.decision.site.as_str() == site);
        let decisions: Vec<Value> = own
            .take(TOLD_MAX)
            .map(|entry| {
                let end = match &entry.end {
                    None => "under way".into(),
                    Some(Ok(())) => "done".into(),
                    Some(Err(why)) => format!("not done: {why}"),
                };
                json!({
                    "step": KINDS[kind(&entry.decision.step)],
                    "words": entry.decision.words,
                    "at_ms": entry.at_ms,
                    "ago_seconds": ago(entry.at),
                    "end": end,
                })
            })
            .collect();
        json!({ "site": site, "now": now, "decisions": decisions })
    }

    pub fn expose(&self, page: &mut MetricPage) {
        let state = self.0.lock();
        let ends = ["done", "failed"];
        let decisions = page.counters(
            "nagaya_balance_decisions_total",
            "Steps that were decided for applications because of their load, and how they ended.",
        );
        for (step, ended) in KINDS.iter().zip(state.counts) {
            for (end, count) in ends.iter().zip(ended) {
                decisions.add([("step", step), ("end", end)], count);
            }
        }
        let short = state.now.values().filter(|seen| seen.short_seconds.is_some()).count() as u64;
        page.gauges("nagaya_balance_short", "Applications that are short of CPU now.").add([], short);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(name: &str) -> SiteName {
        SiteName::new(name).unwrap()
    }

    fn decision(name: &str, step: BalanceStep<String>) -> Decision {
        let words = format!("because of {}", KINDS[kind(&step)]);
        Decision { site: site(name), step, words }
    }

    fn seen(name: &str) -> SeenLoad {
        let load = SiteLoad {
            site: site(name),
            node: "a".into(),
            starved: 0.5,
            throttled: 0.4,
            cpus_used: 0.25,
            wants: 0.25,
            limit: 0.25,
            limit_base: 0.25,
            limit_max: 1.0,
            in_flight: 3,
            memory_bytes: 7,
            came: None,
            nodes: vec!["a".into()],
            nodes_max: 1,
            is_last: false,
            others_used: None,
        };
        SeenLoad { load, short_seconds: Some(4), held: Some("the node is busy".into()) }
    }

    #[test]
    fn the_last_decisions_of_a_site_come_first_with_how_they_ended() {
        let told = BalanceHistory::default();
        let steps = [BalanceStep::Raise(0.5), BalanceStep::Move("b".into()), BalanceStep::Lower(0.25)];
        for step in &steps {
            let number = told.decided(&decision("wiki", step.clone()));
            match step {
                BalanceStep::Move(_) => told.finish_step(number, step, Err("b is gone".into())),
                BalanceStep::Raise(_) => told.finish_step(number, step, Ok(())),
                BalanceStep::Lower(_) | BalanceStep::Copy(_) | BalanceStep::Uncopy => {}
            }
        }
        told.decided(&decision("blog", BalanceStep::Raise(1.0)));
        told.saw(vec![seen("wiki")]);
        let wiki = told.describe_site("wiki");
        let ends: Vec<_> = wiki["decisions"].as_array().unwrap().iter().map(|one| &one["end"]).collect();
        assert_eq!(ends, ["under way", "not done: b is gone", "done"]);
        assert_eq!(wiki["now"]["held"], "the node is busy");
        assert_eq!(
            (&told.describe_site("blog")["now"], told.describe_site("blog")["decisions"][0]["step"].as_str()),
            (&Value::Null, Some("raise"))
        );
        let mut page = MetricPage::default();
        told.expose(&mut page);
        let page = page.encode();
        for line in [
            "nagaya_balance_decisions_total{step=\"raise\",end=\"done\"} 1\n",
            "nagaya_balance_decisions_total{step=\"move\",end=\"failed\"} 1\n",
            "nagaya_balance_decisions_total{step=\"lower\",end=\"done\"} 0\n",
            "nagaya_balance_short 1\n",
        ] {
            assert!(page.contains(line), "{line} in {page}");
        }
    }

    #[test]
    fn no_more_is_kept_than_anybody_reads() {
        let told = BalanceHistory::default();
        let first = told.decided(&decision("wiki", BalanceStep::Raise(0.5)));
        for _ in 0..DECISIONS_MAX {
            told.decided(&decision("blog", BalanceStep::Raise(0.5)));
        }
        told.finish_step(first, &BalanceStep::Raise(0.5), Ok(()));
        assert_eq!(told.describe_site("wiki")["decisions"], json!([]));
        assert_eq!(told.describe_site("blog")["decisions"].as_array().unwrap().len(), TOLD_MAX);
        assert_eq!(told.0.lock().decisions.len(), DECISIONS_MAX);
    }
}
