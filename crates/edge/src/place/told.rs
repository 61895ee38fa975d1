//! What is remembered of a request's way to its node, and how it is told: in the log, to `nagaya explain`.
//!
//! Not here: its figures here (`receipt::Figures`), sums (`metrics`, `peers::tally`).

use std::fmt::Write as _;
use std::time::Duration;

use nagaya_cmdb::{NodeName, Why};
use serde_json::{Value, json};

use crate::access_log::More;

/// A move of its site that a request has asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relocated {
    pub why: Why,
    /// Where it was.
    pub from: Option<NodeName>,
    pub to: NodeName,
    pub epoch: u64,
    /// From sending the request there until it was found that it will not be answered.
    pub detect: Duration,
    /// Choosing a node, and having the store agree. Both nothing: it had moved already.
    pub decide: Duration,
    pub store: Duration,
    /// From the question to the supervisor until its answer was here.
    pub asked: Duration,
    /// How long the request was to wait from the question on, until the application answers at its new place, as was thought when it
    /// was asked. None: nothing was known.
    pub predicted: Option<Duration>,
}

/// A request that another node answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passed {
    pub node: NodeName,
    /// Until the head of its answer.
    pub took: Duration,
    /// Of that, waiting for a connection.
    pub connect: Duration,
    /// Where that node says its time went: `backend_us=120 cpu_us=15`.
    pub stages: Box<str>,
}

impl Relocated {
    fn stages(&self) -> [(&'static str, u64); 4] {
        [
            ("detect_us", us(self.detect)),
            ("decide_us", us(self.decide)),
            ("store_us", us(self.store)),
            ("asked_us", us(self.asked)),
        ]
    }

    /// `silent:from=b,to=c,epoch=2,detect_us=100000,...`: one word.
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

    /// For whoever asks why a request took so long.
    fn sentence(&self) -> String {
        let predicted = self.predicted.map_or_else(String::new, |predicted| {
            format!(" {} ms were predicted until it answers there.", predicted.as_millis())
        });
        self.what() + &predicted
    }

    fn what(&self) -> String {
        let from = self.from.as_ref().map_or("the node that had it", NodeName::as_str);
        match self.why {
            Why::First => format!("The application had run nowhere; {} was chosen.", self.to),
            Why::Silent => format!("{from} did not answer; the application was moved to {}.", self.to),
            Why::Refused => format!("{from} refused the request; the application was moved to {}.", self.to),
            Why::Fenced => {
                format!("{from} had no authority to run it; the application was moved to {}.", self.to)
            }
            Why::Draining => {
                format!("{from} is being emptied or has left; the application was moved to {}.", self.to)
            }
            Why::Load | Why::Operator => format!("The application was moved to {}.", self.to),
        }
    }
}

/// ` peer=b peer_us=1234 relocated=... held_us=...`, as far as there is anything.
pub fn words(more: &More) -> String {
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

/// The same as JSON. None: it was served where it came, and the site was there.
pub fn json(more: &More) -> Option<Value> {
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
        "relocated": more.relocated.iter().map(Relocated::json).collect::<Vec<_>>(),
        "held_us": us(more.held),
    }))
}

/// Time before another node answered or this one could, each with its reason.
pub fn spans(more: &More) -> Vec<(&'static str, u64, String)> {
    let mut spans: Vec<_> = more
        .relocated
        .iter()
        .map(|relocated| ("relocation", us(relocated.detect + relocated.asked), relocated.sentence()))
        .collect();
    if !more.held.is_zero() {
        let why =
            "This node waited for its authority, which lasts as long as it is in touch with its cluster.";
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

    #[test]
    fn a_request_that_followed_its_site_says_where_and_what_it_took() {
        let ms = Duration::from_millis;
        let node = |name| NodeName::new(name).unwrap();
        let more = More {
            relocated: vec![Relocated {
                why: Why::Silent,
                from: Some(node("b")),
                to: node("c"),
                epoch: 2,
                detect: ms(100),
                decide: Duration::from_micros(40),
                store: ms(3),
                asked: ms(4),
                predicted: Some(ms(25)),
            }],
            passed: Some(Passed {
                node: node("c"),
                took: ms(30),
                connect: ms(1),
                stages: "wake_us=20000 cpu_us=3".into(),
            }),
            ..More::default()
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
        assert!(json(&More::default()).is_none() && words(&More::default()).is_empty());
    }
}
