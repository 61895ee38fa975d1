//! `nagaya explain ID`: one request's receipt, for a person to read.
//!
//! Not here: why a site's requests wait (`lanes`), the content of receipts and how long they are
//! kept (`nagaya_edge`).

use std::fmt::Write as _;
use std::process::ExitCode;

use nagaya_base::units::format_bytes;
use serde::Deserialize;
use serde_json::Value;

use super::lanes;
use super::output::{self, CliError, OutputFormat, RecordSource, escape, printable, short_us};

/// Length of the longest bar, in characters.
const BAR_LEN: usize = 40;

/// Length of a request's id, in hexadecimal digits. Any other argument is a site.
const ID_LEN: usize = 32;

pub fn run(id: &str, format: OutputFormat, place: &RecordSource) -> Result<ExitCode, CliError> {
    if id.len() != ID_LEN || !id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return lanes::explain(id, format, place);
    }
    let explained = output::ask_node(place, &format!("/v1/requests/{}", escape(id)));
    output::end(explained.and_then(|receipt| print(receipt, format)), format)
}

fn print(receipt: Value, format: OutputFormat) -> Result<(), CliError> {
    if format.json {
        return output::print_json(&receipt);
    }
    let receipt: ReceiptView = serde_json::from_value(receipt)
        .map_err(|error| CliError::Usage(format!("the receipt is of another version of nagaya: {error}")))?;
    output::print(screen(&receipt).trim_end())
}

/// The edge's JSON. Fields that a request does not have are absent or null.
#[derive(Debug, Deserialize)]
struct ReceiptView {
    id: String,
    time: Option<String>,
    method: Option<String>,
    host: Option<String>,
    target: Option<String>,
    status: Option<u16>,
    site: Option<String>,
    tenant: Option<String>,
    node: Option<String>,
    cell: Option<String>,
    /// For an application: `request` or `instance`.
    cell_of: Option<String>,
    /// Rule files that decided something.
    #[serde(default)]
    rules: Vec<String>,
    #[serde(default)]
    limits: Vec<LimitView>,
    #[serde(default)]
    named: Vec<Value>,
    lane: Option<String>,
    demoted: Option<u64>,
    wake: Option<WakeView>,
    refusal: Option<RefusalView>,
    #[serde(default)]
    spans: Vec<SpanView>,
    #[serde(default)]
    usage: UsedView,
    /// `None` if unknown, or if it has no database outside.
    turnaround: Option<TurnaroundView>,
    took_us: u64,
}

/// The wake of its site's instance for which it waited.
#[derive(Debug, Deserialize)]
struct WakeView {
    from: String,
    #[serde(default)]
    stages: Vec<StageView>,
    /// Wait for its turn.
    predicted_us: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct StageView {
    stage: String,
    us: u64,
}

/// The time in its application, split by the questions that it asked databases.
#[derive(Debug, Deserialize)]
struct TurnaroundView {
    #[serde(flatten)]
    parts: PartsView,
    questions: u64,
    /// Medians of its site's requests before it. `None` if they were too few.
    usual: Option<PartsView>,
    /// The part that is longest above its usual time.
    grew: Option<String>,
}

#[derive(Debug, Deserialize)]
struct PartsView {
    before_us: u64,
    db_us: u64,
    between_us: u64,
    after_us: u64,
}

/// One limit that was in effect, and its origin.
#[derive(Debug, Deserialize)]
struct LimitView {
    what: String,
    value: Value,
    from: Option<String>,
    /// `None` if it was in effect.
    holds: Option<bool>,
    /// An additional note.
    note: Option<String>,
}

#[derive(Debug, Deserialize)]
struct RefusalView {
    reason: String,
    code: Option<String>,
    /// The exact fault.
    detail: Option<String>,
}

/// A part of the request's time.
#[derive(Debug, Deserialize)]
struct SpanView {
    name: String,
    us: u64,
    why: Option<String>,
}

/// `None` if unknown, for example because a controller is missing.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct UsedView {
    cpu_us: Option<u64>,
    read_bytes: Option<u64>,
    write_bytes: Option<u64>,
    throttled_us: Option<u64>,
}

fn screen(receipt: &ReceiptView) -> String {
    let mut out = String::new();
    head(receipt, &mut out);
    times(receipt, &mut out);
    if let Some(wake) = &receipt.wake {
        stages(wake, &mut out);
    }
    limits(receipt, &mut out);
    used(&receipt.usage, &mut out);
    if let Some(turnaround) = &receipt.turnaround {
        in_application(turnaround, &mut out);
    }
    out
}

fn in_application(turnaround: &TurnaroundView, out: &mut String) {
    let TurnaroundView { parts, questions, usual, grew } = turnaround;
    let asked = if *questions == 1 { "1 question".into() } else { format!("{questions} questions") };
    let _ = writeln!(out, "\nIn its application ({asked} to databases)");
    let meanings = [
        "before its first question",
        "in databases",
        "between questions",
        "after the last answer, such as building the page",
    ];
    let usual = usual.as_ref().map(PartsView::named);
    for (at, ((name, us), meaning)) in parts.named().into_iter().zip(meanings).enumerate() {
        let usual = usual.map_or_else(String::new, |usual| format!("; usually {}", short_us(usual[at].1)));
        let mark = if grew.as_deref() == Some(name) { "; this part grew most" } else { "" };
        let _ = writeln!(out, "  {name:7}  {:>10}  {meaning}{usual}{mark}", short_us(us));
    }
}

impl PartsView {
    fn named(&self) -> [(&'static str, u64); 4] {
        [
            ("before", self.before_us),
            ("db", self.db_us),
            ("between", self.between_us),
            ("after", self.after_us),
        ]
    }
}

fn head(receipt: &ReceiptView, out: &mut String) {
    let text = |text: &Option<String>, absent: &str| text.as_deref().map_or(absent.into(), printable);
    let status = receipt.status.map_or("no answer".into(), |status| status.to_string());
    let method = text(&receipt.method, "(no method)");
    let host = text(&receipt.host, "");
    let target = text(&receipt.target, "");
    let _ = writeln!(out, "{method} {host}{target}: {status} in {}", short_us(receipt.took_us));
    let mut field = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            let _ = writeln!(out, "  {name:7} {}", printable(&value));
        }
    };
    field("id", Some(receipt.id.clone()));
    field("time", receipt.time.clone());
    field("node", receipt.node.clone());
    let tenant = receipt.tenant.as_ref().map_or_else(String::new, |tenant| format!(" of tenant {tenant}"));
    field("site", receipt.site.as_ref().map(|site| format!("{site}{tenant}")));
    let of = receipt.cell_of.as_deref().map_or_else(String::new, |of| format!(" of the {of}"));
    field("cell", receipt.cell.as_ref().map(|cell| format!("{cell}{of}")));
    field("rules", (!receipt.rules.is_empty()).then(|| receipt.rules.join(" ")));
    field("lane", receipt.lane.clone());
    field(
        "refused",
        receipt.refusal.as_ref().map(|refusal| match &refusal.code {
            Some(code) => format!("{}: see `nagaya error {code}`", refusal.reason),
            None => refusal.reason.clone(),
        }),
    );
    field("because", receipt.refusal.as_ref().and_then(|refusal| refusal.detail.clone()));
}

fn times(receipt: &ReceiptView, out: &mut String) {
    let _ = writeln!(out, "\nWhere the time went");
    let known: u64 = receipt.spans.iter().map(|span| span.us).sum();
    let rest = receipt.took_us.saturating_sub(known);
    let rest = (rest > 0).then(|| SpanView { name: "the rest".into(), us: rest, why: None });
    let spans: Vec<&SpanView> = receipt.spans.iter().chain(&rest).filter(|span| span.us > 0).collect();
    let whole = receipt.took_us.max(known).max(1);
    let width = spans.iter().map(|span| span.name.chars().count()).max().unwrap_or(0);
    for span in &spans {
        // Thousandths, rounded.
        let share = (u128::from(span.us) * 1000 + u128::from(whole) / 2) / u128::from(whole);
        let bar = usize::try_from(share).map_or(BAR_LEN, |share| (share * BAR_LEN).div_ceil(1000));
        let why = span.why.as_deref().map_or_else(String::new, printable);
        let line = format!(
            "  {:width$}  {:>10}  {:>3}.{}%  {:BAR_LEN$}  {why}",
            printable(&span.name),
            short_us(span.us),
            share / 10,
            share % 10,
            "#".repeat(bar),
        );
        let _ = writeln!(out, "{}", line.trim_end());
    }
    if spans.is_empty() {
        let _ = writeln!(out, "  it took no time that can be measured");
    }
}

fn stages(wake: &WakeView, out: &mut String) {
    let _ = writeln!(out, "\nWaking its application (it was {})", printable(&wake.from));
    let width = wake.stages.iter().map(|stage| stage.stage.chars().count()).max().unwrap_or(0);
    for StageView { stage, us } in &wake.stages {
        let predicted = wake.predicted_us.filter(|_| stage == "queue");
        let told = predicted
            .map_or_else(String::new, |us| format!("  for its turn; {} were predicted", short_us(us)));
        let _ = writeln!(out, "  {:width$}  {:>10}{told}", printable(stage), short_us(*us));
    }
}

fn limits(receipt: &ReceiptView, out: &mut String) {
    let _ = writeln!(out, "\nWhat limited it");
    let text = |value: &Value| printable(&output::plain(value));
    let value_width = receipt.limits.iter().map(|limit| text(&limit.value).chars().count()).max();
    let what_width = receipt.limits.iter().map(|limit| limit.what.chars().count()).max();
    let value_width = value_width.unwrap_or(0);
    let what_width = what_width.unwrap_or(0);
    for limit in &receipt.limits {
        let from =
            limit.from.as_deref().map_or_else(String::new, |from| format!("set by {}", printable(from)));
        let what = printable(&limit.what);
        let value = text(&limit.value);
        let note = match (&limit.note, limit.holds) {
            (Some(note), _) => format!("; {}", printable(note)),
            (None, Some(false)) => "; did not hold: the application serves others beside it".into(),
            (None, _) => String::new(),
        };
        let line = format!("  {what:what_width$}  {value:value_width$}  {from}{note}");
        let _ = writeln!(out, "{}", line.trim_end());
    }
    for named in &receipt.named {
        let _ = writeln!(out, "  in named cell {}", text(named));
    }
    if let Some(times) = receipt.demoted.filter(|times| *times > 0) {
        let steps = if times == 1 { "one step".into() } else { format!("{times} steps") };
        let _ = writeln!(out, "  slowed down by {steps} while it ran, for the CPU time it had used");
    }
    let none = receipt.limits.is_empty() && receipt.named.is_empty() && receipt.demoted.unwrap_or(0) == 0;
    if none {
        let _ = writeln!(out, "  nothing");
    }
}

fn used(usage: &UsedView, out: &mut String) {
    let UsedView { cpu_us, read_bytes, write_bytes, throttled_us } = usage;
    let _ = writeln!(out, "\nWhat it used");
    let known = |number: &Option<u64>, text: fn(u64) -> String| number.map_or("not known".into(), text);
    let _ = writeln!(out, "  CPU time   {}", known(cpu_us, short_us));
    let _ = writeln!(out, "  read       {}", known(read_bytes, format_bytes));
    let _ = writeln!(out, "  written    {}", known(write_bytes, format_bytes));
    if let Some(us) = throttled_us.filter(|us| *us > 0) {
        let _ = writeln!(out, "  throttled  {}: its CPU quota was used up", short_us(us));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn shown(receipt: Value) -> String {
        screen(&serde_json::from_value(receipt).unwrap())
    }

    #[test]
    fn a_slow_request_says_where_its_time_went_and_who_limited_it() {
        let text = shown(json!({
            "id": "0123456789abcdef0123456789abcdef", "time": "2026-11-20T12:00:00Z", "method": "GET",
            "host": "wiki.test", "target": "/cpu.cgi?n=1", "status": 200, "site": "wiki", "tenant": "demo", "node": "n1",
            "cell": "demo/wiki/r3", "rules": ["cpu.rb", "b.rb"], "lane": "slow", "demoted": 2, "refusal": null,
            "limits": [
                {"what": "cpu", "value": "10%", "from": "rule /etc/nagaya/rules/cpu.rb"},
                {"what": "processes", "value": 64, "from": "the record of tenant demo"},
            ],
            "named": ["httpd-limited (blkio)"],
            "spans": [
                {"name": "in line", "us": 250_000, "why": "20 requests ran in lane slow"},
                {"name": "program", "us": 700_000, "why": null},
            ],
            "usage": {"cpu_us": 70_000, "read_bytes": 4096, "write_bytes": 0, "throttled_us": 600_000},
            "turnaround": {
                "before_us": 100_000, "db_us": 20_000, "between_us": 0, "after_us": 570_000, "questions": 1, "grew": "after",
                "usual": {"before_us": 90_000, "db_us": 24_000, "between_us": 0, "after_us": 140_000},
            },
            "took_us": 1_000_000, "kept": 8000,
        }));
        let expected = "\
GET wiki.test/cpu.cgi?n=1: 200 in 1.0 s
  id      0123456789abcdef0123456789abcdef
  time    2026-11-20T12:00:00Z
  node    n1
  site    wiki of tenant demo
  cell    demo/wiki/r3
  rules   cpu.rb b.rb
  lane    slow

Where the time went
  in line     250.0 ms   25.0%  ##########                                20 requests ran in lane slow
  program     700.0 ms   70.0%  ############################
  the rest     50.0 ms    5.0%  ##

What limited it
  cpu        10%  set by rule /etc/nagaya/rules/cpu.rb
  processes  64   set by the record of tenant demo
  in named cell httpd-limited (blkio)
  slowed down by 2 steps while it ran, for the CPU time it had used

What it used
  CPU time   70.0 ms
  read       4KiB
  written    0B
  throttled  600.0 ms: its CPU quota was used up

In its application (1 question to databases)
  before     100.0 ms  before its first question; usually 90.0 ms
  db          20.0 ms  in databases; usually 24.0 ms
  between        0 us  between questions; usually 0 us
  after      570.0 ms  after the last answer, such as building the page; usually 140.0 ms; this part grew most
";
        assert_eq!(text, expected, "{text}");
    }

    #[test]
    fn a_request_refused_before_parsing_has_little_to_explain() {
        let text = shown(json!({
            "id": "ab", "status": 400, "took_us": 0, "refusal": {"reason": "bad \u{1b}[31m head", "code": "NGY0401", "detail": "a \u{1b}[31m fault"},
        }));
        for part in [
            "(no method) : 400 in 0 us\n",
            "  refused bad \\u{1b}[31m head: see `nagaya error NGY0401`\n  because a \\u{1b}[31m fault\n",
            "it took no time that can be measured",
            "What limited it\n  nothing\n",
            "  CPU time   not known\n",
        ] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }

    #[test]
    fn a_limit_that_could_not_hold_for_one_request_alone_is_said_so() {
        let limit = json!({"what": "cpu", "value": "10%", "from": "rule a.rb", "holds": false});
        let text = shown(json!({
            "id": "ab", "took_us": 1, "cell": "demo/blog/r2", "cell_of": "instance", "limits": [limit],
        }));
        assert!(text.contains("  cell    demo/blog/r2 of the instance\n"), "{text}");
        let told = "  cpu  10%  set by rule a.rb; did not hold: the application serves others beside it\n";
        assert!(text.contains(told), "{text}");
    }

    #[test]
    fn a_limit_that_was_raised_says_what_was_asked_for() {
        let limit = json!({"what": "cpu of the site, raised", "value": "200%", "from": "rule a.rb", "note": "400% was asked for"});
        let text = shown(json!({ "id": "ab", "took_us": 1, "limits": [limit] }));
        let told = "  cpu of the site, raised  200%  set by rule a.rb; 400% was asked for\n";
        assert!(text.contains(told), "{text}");
    }

    #[test]
    fn a_request_that_woke_its_application_shows_each_stage() {
        let stage = |stage: &str, us: u64| json!({ "stage": stage, "us": us });
        let text = shown(json!({
            "id": "ab", "took_us": 41_500, "spans": [{ "name": "waking", "us": 39_000 }],
            "wake": {
                "from": "image", "predicted_us": 400,
                "stages": [stage("decide", 90), stage("queue", 510), stage("restore", 38_000)],
            },
        }));
        let expected = "\nWaking its application (it was image)\n  decide        90 us\n  \
            queue        510 us  for its turn; 400 us were predicted\n  restore     38.0 ms\n";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn spans_that_overlap_are_never_more_than_the_whole() {
        let span = |us: u64| json!({"name": "x", "us": us});
        let text = shown(json!({"id": "ab", "took_us": 100, "spans": [span(100), span(100), span(0)]}));
        assert_eq!(text.matches(" 50.0%").count(), 2, "{text}");
        assert!(!text.contains("the rest"), "{text}");
    }
}
