//! An imagined request for `nagaya rule test`: the facts that a rule can read, and the rule's
//! decisions in words.
//!
//! Not here: the process that runs the rule (`rule_check`), the command (`cli::rule`).

use std::borrow::Cow;
use std::collections::BTreeMap;

use nagaya_base::{Clock as _, SystemClock};
use nagaya_records::cell::{CellName, CgroupController, RequestUsage};
use nagaya_rules::{
    FactSource, HeaderAction, HeaderEdit, LaneRun, NumberFact, RuleBudget, RuleFault, RulePhase, ScalarValue,
    TextFact, Verdict,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TestCase {
    pub phase: Option<RulePhase>,
    pub method: String,
    pub scheme: String,
    pub host: String,
    /// Decoded, without the query.
    pub path: String,
    pub query: Option<String>,
    pub address: String,
    pub site: Option<String>,
    pub tenant: Option<String>,
    pub headers: Vec<(String, String)>,
    /// Settings of the store, by key.
    pub settings: BTreeMap<String, Value>,
}

/// Input of the process.
#[derive(Debug, Serialize, Deserialize)]
pub struct RuleQuestion {
    pub text: String,
    pub case: TestCase,
}

/// Output of the process.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaseOutcome {
    /// Decisions, a line each.
    pub decided: Vec<String>,
    /// Log lines of the rule.
    pub log: Vec<String>,
    /// Why the rule, or one of its decisions, does not hold.
    pub faults: Vec<RuleFault>,
}

/// Runs the rule. The process must have no rights that matter.
pub fn run(question: &RuleQuestion, file: &str) -> CaseOutcome {
    let phase = question.case.phase.unwrap_or(RulePhase::AccessChecker);
    let tried =
        nagaya_rules::dry_run(question.text.as_bytes(), file, phase, &question.case, RuleBudget::default());
    match tried {
        Err(fault) => CaseOutcome { faults: vec![fault], ..CaseOutcome::default() },
        Ok(trial) => CaseOutcome {
            decided: describe(&trial.verdict),
            log: trial.verdict.log.iter().map(|(_, line)| line.clone()).collect(),
            faults: trial.refused,
        },
    }
}

/// Returns each decision as a line.
fn describe(verdict: &Verdict) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(answer) = &verdict.answer {
        let status = if answer.status == 0 { 200 } else { answer.status };
        let to = answer.location.as_deref().map_or_else(String::new, |to| format!(", to {to}"));
        lines.push(format!("answer: {status}, {} bytes{to}", answer.body.len()));
    }
    let json = |name: &str, value: Result<Value, serde_json::Error>, lines: &mut Vec<String>| {
        let mut value = value.unwrap_or_default();
        prune(&mut value);
        if !is_empty(&value) {
            lines.push(format!("{name}: {value}"));
        }
    };
    let confinement = &*verdict.confinement;
    json("limits", serde_json::to_value(&confinement.limits), &mut lines);
    json("named cells", serde_json::to_value(&confinement.named), &mut lines);
    json("demotions", serde_json::to_value(&confinement.demotions), &mut lines);
    json("boost", serde_json::to_value(confinement.boost), &mut lines);
    json("changes of cells", serde_json::to_value(&verdict.changes), &mut lines);
    if let Some(lane) = &verdict.lane {
        let run = match lane.run {
            LaneRun::Fixed(count) => count.to_string(),
            LaneRun::Auto => "auto".into(),
        };
        let wait = lane.wait.map_or_else(String::new, |wait| format!(", wait {wait:?}"));
        lines.push(format!("lane: {}, run {run}{wait}", lane.name));
    }
    if verdict.priority != 0 {
        lines.push(format!("priority: {} s", verdict.priority));
    }
    if verdict.passes {
        lines.push("bypass: it is let in whatever runs".into());
    }
    rewritten(verdict, &mut lines);
    for (direction, edits) in
        [("request header", &verdict.headers_in), ("response header", &verdict.headers_out)]
    {
        lines.extend(edits.iter().map(|edit| format!("{direction}: {}", edited(edit))));
    }
    lines.extend(verdict.notes.iter().map(|(name, value)| format!("note: {name} = {value}")));
    lines.extend(verdict.env.iter().map(|(name, value)| match value {
        Some(value) => format!("variable: {name} = {value}"),
        None => format!("variable: {name} is taken away"),
    }));
    lines
}

fn rewritten(verdict: &Verdict, lines: &mut Vec<String>) {
    let rewrites = &verdict.rewrites;
    for (name, text) in [
        ("path", &rewrites.path),
        ("query", &rewrites.query),
        ("document root", &rewrites.document_root),
        ("file", &rewrites.filename),
        ("user", &rewrites.user),
        ("content type", &rewrites.content_type),
    ] {
        lines.extend(text.iter().map(|text| format!("{name}: {text}")));
    }
    lines.extend(rewrites.status.iter().map(|status| format!("status: {status}")));
}

fn edited(edit: &HeaderEdit) -> String {
    match &edit.action {
        HeaderAction::Set(value) => format!("{} = {value}", edit.name),
        HeaderAction::Add(value) => format!("{} = {value}, beside others", edit.name),
        HeaderAction::Remove => format!("{} is taken away", edit.name),
    }
}

/// Removes empty values.
fn prune(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.values_mut().for_each(prune);
            fields.retain(|_, value| !is_empty(value));
        }
        Value::Array(items) => items.iter_mut().for_each(prune),
        _ => {}
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

fn scalar(value: &Value) -> ScalarValue<'_> {
    match value {
        Value::Bool(value) => ScalarValue::Bool(*value),
        Value::Number(number) => match number.as_i64() {
            Some(int) => ScalarValue::Int(int),
            None => ScalarValue::Float(number.as_f64().unwrap_or_default()),
        },
        other => ScalarValue::Text(other.as_str().unwrap_or_default()),
    }
}

impl FactSource for TestCase {
    fn text(&self, text: TextFact) -> Option<Cow<'_, str>> {
        let given = |text: &'_ str| Some(Cow::Owned(text.to_owned()));
        match text {
            TextFact::Hostname | TextFact::Authority => given(&self.host),
            TextFact::Method => given(&self.method),
            TextFact::Path => given(&self.path),
            TextFact::RawTarget => Some(match &self.query {
                Some(query) => format!("{}?{query}", self.path).into(),
                None => Cow::Borrowed(self.path.as_str()),
            }),
            TextFact::Query => self.query.as_deref().map(Cow::Borrowed),
            TextFact::Protocol => given("HTTP/1.1"),
            TextFact::Scheme => given(&self.scheme),
            TextFact::ClientIp => given(&self.address),
            TextFact::LocalIp => given("127.0.0.1"),
            TextFact::Site => self.site.as_deref().map(Cow::Borrowed),
            TextFact::Tenant => self.tenant.as_deref().map(Cow::Borrowed),
            TextFact::RequestId => given(&"0".repeat(32)),
            TextFact::DocumentRoot
            | TextFact::Filename
            | TextFact::PathInfo
            | TextFact::User
            | TextFact::Node
            | TextFact::ContentType
            | TextFact::StatusLine => None,
        }
    }

    fn number(&self, number: NumberFact) -> Option<i64> {
        match number {
            NumberFact::ArrivedUs => {
                let since = SystemClock.wall().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
                i64::try_from(since.as_micros()).ok()
            }
            NumberFact::Running | NumberFact::Waiting | NumberFact::SiteRunning | NumberFact::SiteWaiting => {
                Some(0)
            }
            _ => None,
        }
    }

    fn header_in(&self, name: &str) -> Option<Cow<'_, str>> {
        if name.eq_ignore_ascii_case("host") {
            return Some(self.host.as_str().into());
        }
        let found = self.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str().into())
    }

    fn each_header_in(&self, each: &mut dyn FnMut(&str, &str)) {
        each("host", &self.host);
        self.headers.iter().for_each(|(name, value)| each(name, value));
    }

    fn header_out(&self, _: &str) -> Option<Cow<'_, str>> {
        None
    }

    fn each_header_out(&self, _: &mut dyn FnMut(&str, &str)) {}

    fn setting(&self, key: &str, each: &mut dyn FnMut(Option<&str>, ScalarValue<'_>)) -> bool {
        match self.settings.get(key) {
            None => return false,
            Some(Value::Object(fields)) => {
                fields.iter().for_each(|(name, value)| each(Some(name), scalar(value)))
            }
            Some(plain) => each(None, scalar(plain)),
        }
        true
    }

    fn cell_exists(&self, _: CgroupController, _: &CellName) -> bool {
        false
    }

    fn cell_value(&self, _: CgroupController, _: &CellName, _: &str) -> Option<String> {
        None
    }

    fn usage(&self) -> Option<RequestUsage> {
        None
    }

    fn elapsed_us(&self) -> u64 {
        0
    }

    fn load(&self) -> [f64; 3] {
        [0.0; 3]
    }

    fn env(&self, _: &str) -> Option<Cow<'_, str>> {
        None
    }

    fn each_env(&self, _: &mut dyn FnMut(&str, &str)) {}

    fn is_tls(&self) -> bool {
        self.scheme == "https"
    }

    fn site_rests(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn case() -> TestCase {
        TestCase {
            method: "GET".into(),
            scheme: "https".into(),
            host: "www.example.org".into(),
            path: "/wiki".into(),
            query: Some("a=1".into()),
            address: "192.0.2.1".into(),
            headers: vec![("User-Agent".into(), "bot".into())],
            settings: [
                ("www.example.org".to_owned(), json!("20%")),
                ("limits".to_owned(), json!({"cpu": "50%"})),
            ]
            .into(),
            ..TestCase::default()
        }
    }

    #[test]
    fn each_decision_is_a_line() {
        let text = "limit KVS['limits']\nlane 'slow', run: 2, wait: '5s'\npriority 3\nlog request.query\n\
                    answer 403, 'no' if request.header['User-Agent'] == 'bot' && request.scheme == 'https'\n";
        let outcome = run(&RuleQuestion { text: text.into(), case: case() }, "a.rb");
        assert_eq!(outcome.faults, []);
        assert_eq!(outcome.log, ["a=1"]);
        let lines: Vec<_> = outcome.decided.iter().map(String::as_str).collect();
        let ["answer: 403, 2 bytes", limits, "lane: slow, run 2, wait 5s", "priority: 3 s"] = lines[..]
        else {
            panic!("{lines:?}")
        };
        assert!(limits.starts_with("limits: {\"cpu\":"), "{limits}");
    }

    #[test]
    fn a_setting_of_the_wrong_kind_is_named_with_its_line() {
        let text = "answer 403\nlimit KVS[request.host]\n";
        let outcome = run(&RuleQuestion { text: text.into(), case: case() }, "a.rb");
        assert_eq!(outcome.decided, ["answer: 403, 0 bytes"]);
        let [fault] = &outcome.faults[..] else { panic!("{:?}", outcome.faults) };
        assert_eq!(fault.line, Some(2));
        assert!(fault.message.contains("takes words with amounts"), "{fault}");
    }
}
