//! Records a request's route to its node, and renders it for the log and `nagaya explain`.
//!
//! Not here: its figures here (`receipt::Figures`), sums (`metrics`, `peers::tally`).

use std::fmt::Write as _;
use std::time::Duration;

use nagaya_records::{NodeName, PlacementReason};
use serde_json::{Value, json};

use crate::record::access_record::{AccessDetails, Relocation};

impl Relocation {
    fn stages(&self) -> [(&'static str, u64); 4] {
        [
            ("detect_us", us(self.detect)),
            ("decide_us", us(self.decide)),
            ("store_us", us(self.store)),
            ("asked_us", us(self.asked)),
        ]
    }

    /// Writes one word: `silent:from=b,to=c,epoch=2,detect_us=100000,...`.
    fn word(&self, out: &mut String) {
        let from = self.from.as_ref().map_or("-", NodeName::as_str);
        let _ = write!(out, "{}:from={from},to={},epoch={}", self.why.as_str(), self.to, self.epoch);
        for (name, us) in self.stages() {
            let _ = write!(out, ",{name}={us}");
        }
        if let Some(predicted) = self.predicted {
            let _ = write!(out, ",predicted_us={}", us(predicted));
        }
    }

    fn json(&self) -> Value {
        let mut told = json!({ "why": self.why, "from": self.from, "to": self.to, "epoch": self.epoch });
        for (name, us) in self.stages() {
            told[name] = us.into();
        }
        told["predicted_us"] = self.predicted.map(us).into();
        told
    }

    /// Returns a sentence that explains the request's delay.
    fn sentence(&self) -> String {
        let predicted = self.predicted.map_or_else(String::new, |predicted| {
            format!(" {} ms were predicted until it answers there.", predicted.as_millis())
        });
        self.what() + &predicted
    }

    fn what(&self) -> String {
        let from = self.from.as_ref().map_or("the node that had it", NodeName::as_str);
        match self.why {
            PlacementReason::First => format!("The application had run nowhere; {} was chosen.", self.to),
            PlacementReason::Silent => {
                format!("{from} did not answer; the application was moved to {}.", self.to)
            }
            PlacementReason::Refused => {
                format!("{from} refused the request; the application was moved to {}.", self.to)
            }
            PlacementReason::Fenced => {
                format!("{from} had no authority to run it; the application was moved to {}.", self.to)
            }
            PlacementReason::Draining => {
                format!("{from} is being emptied or has left; the application was moved to {}.", self.to)
            }
            PlacementReason::Load | PlacementReason::Operator => {
                format!("The application was moved to {}.", self.to)
            }
        }
    }
}

/// Returns ` peer=b peer_us=1234 relocated=... held_us=...`, without absent parts.
pub fn words(more: &AccessDetails) -> String {
    let mut out = String::new();
    if let Some(passed) = &more.passed {
        let _ = write!(out, " peer={} peer_us={}", passed.node, us(passed.took));
    }
    for relocated in &more.relocated {
        out.push_str(" relocated=");
        relocated.word(&mut out);
    }
    if !more.held.is_zero() {
        let _ = write!(out, " held_us={}", us(more.held));
    }
    out
}

/// Returns the same as JSON. `None` if the request was served where it arrived, and the site was
/// there.
pub fn json(more: &AccessDetails) -> Option<Value> {
    if more.passed.is_none() && more.relocated.is_empty() && more.held.is_zero() {
        return None;
    }
    Some(json!({
        "peer": more.passed.as_ref().map(|passed| {
            let stages = passed.stages.split(' ').filter_map(|stage| stage.split_once('='));
            let stages = stages.filter_map(|(name, us)| Some((name.to_owned(), us.parse::<u64>().ok()?.into())));
            let stages: serde_json::Map<_, _> = stages.collect();
            json!({
                "node": passed.node,
                "us": us(passed.took),
                "connect_us": us(passed.connect),
                "stages": stages,
            })
        }),
        "relocated": more.relocated.iter().map(Relocation::json).collect::<Vec<_>>(),
        "held_us": us(more.held),
    }))
}

/// Returns the times before another node answered or this one could, each with its reason.
pub fn spans(more: &AccessDetails) -> Vec<(&'static str, u64, String)> {
    let mut spans: Vec<_> = more
        .relocated
        .iter()
        .map(|relocated| ("relocation", us(relocated.detect + relocated.asked), relocated.sentence()))
        .collect();
    if !more.held.is_zero() {
        let why = "This node waited for its lease, which it has only while it is in touch with its cluster.";
        spans.push(("held", us(more.held), why.into()));
    }
    if let Some(passed) = &more.passed {
        let why = format!(
            "{} has the application and answered. {} there tells the rest.",
            passed.node, "`nagaya explain` with the same id"
        );
        spans.push(("other node", us(passed.took), why));
    }
    spans
}

fn us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::access_record::ForwardedTo;

    #[test]
    fn a_request_that_followed_its_site_says_where_and_what_it_took() {
        let ms = Duration::from_millis;
        let node = |name| NodeName::new(name).unwrap();
        let more = AccessDetails {
            relocated: vec![Relocation {
                why: PlacementReason::Silent,
                from: Some(node("b")),
                to: node("c"),
                epoch: 2,
                detect: ms(100),
                decide: Duration::from_micros(40),
                store: ms(3),
                asked: ms(4),
                predicted: Some(ms(25)),
            }],
            passed: Some(ForwardedTo {
                node: node("c"),
                took: ms(30),
                connect: ms(1),
                stages: "wake_us=20000 cpu_us=3".into(),
            }),
            ..AccessDetails::default()
        };
        assert_eq!(
            words(&more),
            " peer=c peer_us=30000 relocated=silent:from=b,to=c,epoch=2,detect_us=100000,decide_us=40,store_us=3000,asked_us=4000,predicted_us=25000"
        );
        let told = json(&more).unwrap();
        assert_eq!(told["peer"]["stages"]["wake_us"], 20_000);
        assert_eq!(told["relocated"][0]["detect_us"], 100_000);
        let spans = spans(&more);
        assert_eq!((spans[0].0, spans[0].1), ("relocation", 104_000));
        assert_eq!(told["relocated"][0]["predicted_us"], 25_000);
        for part in ["b did not answer", "25 ms were predicted"] {
            assert!(spans[0].2.contains(part), "{}", spans[0].2);
        }
        assert!(json(&AccessDetails::default()).is_none() && words(&AccessDetails::default()).is_empty());
    }
}
