//! nagaya's own words for rules: `limit`, `boost`, `cell`, `lane`, `demote`, `answer`, and their
//! queries of the request, the node and the time.
//!
//! An unknown word or an unreadable amount refuses one decision and reports it; the other decisions
//! of the file stay. Settings are data, and a mistake for one host must not disable the rules of
//! all. A file whose limits must not be missing has `on_error = "refuse"`. Not here: `request`,
//! `node` and `now` as objects, which are Ruby (`prelude/words.rb`).

use std::ops::RangeInclusive;
use std::thread;
use std::time::Duration;

use nagaya_records::cell::{
    Boost, CellName, CellScope, CgroupController, CpuQuota, Demotion, Device, IoLimit, LimitSet, NamedCell,
};
use nagaya_records::record::WrittenAmount;

use crate::facts::{NumberFact, TextFact};
use crate::native::{NativeArg, NativeCall, NativeError, NativeMethod, NativeValue};
use crate::phase::RulePhase;
use crate::verdict::{LaneRun, LogLevel};

use super::request::{self, Given, HeaderDirection};
use super::{compatibility, nginx, units};

const WORDS: &str = "Kernel";
const REQUEST: &str = "Nagaya::Request";
const HEADER: &str = "Nagaya::Header";
const NODE: &str = "Nagaya::Node";
const SITE: &str = "Nagaya::Site";
const NAGAYA: &str = "Nagaya";

/// Seconds by which a request may go before or behind its time.
const PRIORITIES: RangeInclusive<i8> = -100..=100;

const RUN_MISSING: &str = "run: is how many run at once, such as lane \"reports\", run: 5, or \"auto\"";

pub const NATIVES: &[NativeMethod] = &[
    NativeMethod::decision(WORDS, "limit", limit),
    NativeMethod::decision(WORDS, "boost", boost),
    NativeMethod::decision(WORDS, "cell", cell),
    NativeMethod::decision(WORDS, "lane", lane),
    NativeMethod::decision(WORDS, "priority", priority),
    NativeMethod::decision(WORDS, "bypass", bypass),
    NativeMethod::decision(WORDS, "demote", demote),
    NativeMethod::decision(WORDS, "answer", answer),
    NativeMethod::decision(WORDS, "redirect", redirect),
    NativeMethod::decision(WORDS, "log", log),
    NativeMethod::method(WORDS, "site_rests?", |call| {
        call.expect(0, 0)?;
        Ok(NativeValue::Bool(call.facts.site_rests()))
    }),
    NativeMethod::method(REQUEST, "host", |call| request::text(call, TextFact::Hostname)),
    NativeMethod::method(REQUEST, "path", |call| request::text(call, TextFact::Path)),
    NativeMethod::method(REQUEST, "query", |call| request::text(call, TextFact::Query)),
    NativeMethod::method(REQUEST, "method", |call| request::text(call, TextFact::Method)),
    NativeMethod::method(REQUEST, "scheme", |call| request::text(call, TextFact::Scheme)),
    NativeMethod::method(REQUEST, "user", |call| request::text(call, TextFact::User)),
    NativeMethod::method(REQUEST, "address", |call| request::text(call, TextFact::ClientIp)),
    NativeMethod::method(REQUEST, "tenant", |call| request::text(call, TextFact::Tenant)),
    NativeMethod::method(REQUEST, "site", |call| request::text(call, TextFact::Site)),
    NativeMethod::method(REQUEST, "id", |call| request::text(call, TextFact::RequestId)),
    NativeMethod::method(REQUEST, "length", |call| Ok(call.facts.number(NumberFact::ContentLength).into())),
    NativeMethod::method(REQUEST, "status", |call| Ok(call.facts.number(NumberFact::Status).into())),
    NativeMethod::method(REQUEST, "cpu_ms", |call| {
        Ok(call.facts.usage().and_then(|usage| i64::try_from(usage.cpu_us / 1000).ok()).into())
    }),
    NativeMethod::method(REQUEST, "elapsed_ms", |call| {
        Ok(NativeValue::Int(i64::try_from(call.facts.elapsed_us() / 1000).unwrap_or(i64::MAX)))
    }),
    NativeMethod::method(HEADER, "[]", |call| request::header(call, HeaderDirection::In)),
    NativeMethod::method(NODE, "name", |call| request::text(call, TextFact::Node)),
    NativeMethod::method(NODE, "load", |call| Ok(call.facts.load()[0].into())),
    NativeMethod::method(NODE, "load5", |call| Ok(call.facts.load()[1].into())),
    NativeMethod::method(NODE, "load15", |call| Ok(call.facts.load()[2].into())),
    NativeMethod::method(NODE, "cores", |_| Ok(NativeValue::Int(cores()))),
    NativeMethod::method(NODE, "running", |call| request::number(call, NumberFact::Running, 0)),
    NativeMethod::method(NODE, "waiting", |call| request::number(call, NumberFact::Waiting, 0)),
    NativeMethod::method(SITE, "running", |call| request::number(call, NumberFact::SiteRunning, 0)),
    NativeMethod::method(SITE, "waiting", |call| request::number(call, NumberFact::SiteWaiting, 0)),
    NativeMethod::method(SITE, "free", |call| request::number(call, NumberFact::SiteFree, 0)),
    NativeMethod::method(SITE, "wait_ms", |call| Ok(call.facts.number(NumberFact::SiteWaitMs).into())),
    NativeMethod::singleton(NAGAYA, "seconds", seconds),
    NativeMethod::singleton(NAGAYA, "in_span?", in_span),
    NativeMethod::singleton(NAGAYA, "gap", gap),
    NativeMethod::singleton(NAGAYA, "write", write),
];

// === Limits ===

/// `limit cpu: "20%", write: "5M"`: limits of the request's own cell.
fn limit<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    in_time(call, "limit")?;
    if call.args().is_empty() {
        return Err(NativeError::argument("limit takes words with amounts, such as limit cpu: \"20%\""));
    }
    let mut limits = LimitSet::default();
    for arg in call.args() {
        let words = match arg {
            // The result of a look-up for a host without settings.
            NativeArg::Nil => continue,
            NativeArg::Map(words) => words,
            other => return Err(not_words("limit", other)),
        };
        let words = AmountWords::read("limit", words, &[])?;
        if words.limits.memory.is_some() {
            return Err(NativeError::argument(
                "limit: memory is a limit of cells and tenants: write it with cell, or in the tenant's \
                    record",
            ));
        }
        limits = limits.overlaid(&words.limits);
    }
    if !limits.is_empty() {
        call.verdict.limit(&limits);
    }
    Ok(NativeValue::Nil)
}

/// `boost cpu: "200%"`: limits of the site's application while the request runs.
fn boost<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    in_time(call, "boost")?;
    if call.args().is_empty() {
        return Err(NativeError::argument("boost takes words with amounts, such as boost cpu: \"200%\""));
    }
    for arg in call.args() {
        let words = match arg {
            NativeArg::Nil => continue,
            NativeArg::Map(words) => words,
            other => return Err(not_words("boost", other)),
        };
        let LimitSet { cpu, cpu_shares, .. } = boosted(words)?;
        if cpu.is_some() || cpu_shares.is_some() {
            call.verdict.boost(Boost { cpu, cpu_shares });
        }
    }
    Ok(NativeValue::Nil)
}

/// Checks a boost. Other limits are not raised, and none without end: a mistake must not count as a
/// boost.
fn boosted(words: &[(NativeArg<'_>, NativeArg<'_>)]) -> Result<LimitSet, NativeError> {
    let AmountWords { limits, .. } = AmountWords::read("boost", words, &[])?;
    if (LimitSet { cpu: None, cpu_shares: None, ..limits.clone() }) != LimitSet::default() {
        return Err(NativeError::argument("boost: there are cpu and cpu_shares, and no others"));
    }
    let is_cpu =
        |(key, value): &(NativeArg<'_>, NativeArg<'_>)| word(key) == Some("cpu") && *value != NativeArg::Nil;
    if limits.cpu.is_none() && words.iter().any(is_cpu) {
        return Err(NativeError::argument("boost: cpu: say how far, such as \"200%\""));
    }
    Ok(limits)
}

/// `cell "batch", cpu: "50%"`: shared by the tenant's requests that name it; with `of: :node`, by
/// all tenants'.
fn cell<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    in_time(call, "cell")?;
    let name =
        CellName::parse(call.word(0)?).map_err(|error| NativeError::argument(format!("cell: {error}")))?;
    let words = AmountWords::after_name(call, "cell", &["of"])?;
    let scope = match words.taken("of") {
        None => CellScope::Tenant,
        Some(NativeArg::Symbol("tenant") | NativeArg::Text(b"tenant")) => CellScope::Tenant,
        Some(NativeArg::Symbol("node") | NativeArg::Text(b"node")) => CellScope::Node,
        Some(_) => return Err(NativeError::argument("cell: of: is :tenant or :node")),
    };
    let limits = (!words.limits.is_empty()).then_some(words.limits);
    call.verdict.attach(NamedCell { name, scope, controllers: CgroupController::ALL.to_vec(), limits })?;
    Ok(NativeValue::Nil)
}

/// `demote after: "500ms", cpu: "10%"`.
fn demote<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    in_time(call, "demote")?;
    call.expect(1, 1)?;
    let words = match call.any(0) {
        NativeArg::Map(words) => AmountWords::read("demote", words, &["after"])?,
        other => return Err(not_words("demote", other)),
    };
    let after = match words.taken("after") {
        Some(NativeArg::Text(text)) => units::time_us(&String::from_utf8_lossy(text)),
        Some(other) => Err(format!("it is {}: write a time such as \"500ms\"", other.kind())),
        None => Err("is missing: write for example demote after: \"500ms\", cpu: \"10%\"".to_owned()),
    };
    let after_cpu_us = after.map_err(|why| NativeError::argument(format!("demote: after: {why}")))?;
    if words.limits.is_empty() {
        return Err(NativeError::argument("demote: no limit is named, such as cpu: \"10%\""));
    }
    call.verdict.demote(Demotion { after_cpu_us, limits: words.limits })?;
    Ok(NativeValue::Nil)
}

/// `lane "reports", run: 5, wait: "10s", tickets: false`.
fn lane<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    in_time(call, "lane")?;
    let wrong = |why: String| NativeError::argument(format!("lane: {why}"));
    let name = call.word(0)?;
    call.expect(1, 2)?;
    let mut run = None;
    let mut wait = None;
    let mut tickets = true;
    let NativeArg::Map(words) = call.any(1) else {
        return Err(wrong(RUN_MISSING.into()));
    };
    for (key, value) in words {
        match (word(key), value) {
            (Some("run"), NativeArg::Int(count)) => {
                run = u32::try_from(*count).ok().filter(|run| *run > 0).map(LaneRun::Fixed);
            }
            (Some("run"), auto) if word(auto) == Some("auto") => run = Some(LaneRun::Auto),
            (Some("wait"), NativeArg::Text(text)) => {
                let us = units::time_us(&String::from_utf8_lossy(text));
                wait = Some(Duration::from_micros(us.map_err(|why| wrong(format!("wait: {why}")))?));
            }
            (Some("tickets"), NativeArg::Bool(given)) => tickets = *given,
            (Some("wait"), _) => return Err(wrong("wait: write a time such as \"10s\"".into())),
            (Some("tickets"), _) => return Err(wrong("tickets: is true or false".into())),
            (Some("run"), _) => return Err(wrong(RUN_MISSING.into())),
            (other, _) => {
                let other = other.unwrap_or("that");
                return Err(wrong(format!("{other} is no word here: there are run:, wait: and tickets:")));
            }
        }
    }
    let run = run.ok_or_else(|| wrong(RUN_MISSING.into()))?;
    call.verdict.set_lane(name, run, wait, tickets)?;
    Ok(NativeValue::Nil)
}

/// `priority 10`.
fn priority<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    in_time(call, "priority")?;
    call.expect(1, 1)?;
    let NativeArg::Int(seconds) = call.any(0) else {
        return Err(NativeError::argument("priority: give a number of seconds from -100 to 100"));
    };
    let seconds = i8::try_from(*seconds).ok().filter(|seconds| PRIORITIES.contains(seconds));
    let seconds =
        seconds.ok_or_else(|| NativeError::argument("priority: is out of range: use -100 to 100"))?;
    call.verdict.set_priority(seconds);
    Ok(NativeValue::Nil)
}

/// `bypass`.
fn bypass<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    in_time(call, "bypass")?;
    call.expect(0, 0)?;
    call.verdict.let_pass();
    Ok(NativeValue::Nil)
}

/// Parsed words with amounts.
struct AmountWords<'a> {
    limits: LimitSet,
    /// Words that the caller requested.
    taken: Vec<(&'static str, &'a NativeArg<'a>)>,
}

/// One word of the four that mean a disk, in the order of `IoLimit`.
type Rates = [Option<u64>; 4];

impl<'a> AmountWords<'a> {
    /// Reads the words after a name.
    fn after_name(call: &NativeCall<'a>, of: &str, take: &[&'static str]) -> Result<Self, NativeError> {
        call.expect(1, 2)?;
        match call.any(1) {
            NativeArg::Nil => Self::read(of, &[], take),
            NativeArg::Map(words) => Self::read(of, words, take),
            other => Err(not_words(of, other)),
        }
    }

    fn read(
        of: &str,
        words: &'a [(NativeArg<'a>, NativeArg<'a>)],
        take: &[&'static str],
    ) -> Result<Self, NativeError> {
        let mut read = Self { limits: LimitSet::default(), taken: Vec::new() };
        let mut rates: Rates = [None; 4];
        let mut device = Device::Root;
        for (key, value) in words {
            let key =
                word(key).ok_or_else(|| NativeError::argument(format!("{of}: a word is {}", key.kind())))?;
            if let Some(taken) = take.iter().find(|taken| **taken == key) {
                read.taken.push((taken, value));
            } else if *value != NativeArg::Nil {
                let wrong = |why: String| NativeError::argument(format!("{of}: {key}: {why}"));
                if key == "device" {
                    device = text(value).and_then(|text| text.parse().map_err(show)).map_err(wrong)?;
                } else if !rate(&mut rates, key, value).map_err(wrong)? {
                    amount(&mut read.limits, key, value).map_err(wrong)?;
                }
            }
        }
        let [read_bps, write_bps, read_iops, write_iops] = rates;
        if rates != [None; 4] {
            read.limits.io.push(IoLimit { device, read_bps, write_bps, read_iops, write_iops });
        }
        Ok(read)
    }

    fn taken(&self, key: &str) -> Option<&'a NativeArg<'a>> {
        self.taken.iter().find(|(taken, _)| *taken == key).map(|(_, value)| *value)
    }
}

fn rate(rates: &mut Rates, key: &str, value: &NativeArg<'_>) -> Result<bool, String> {
    let at = match key {
        "read" => 0,
        "write" => 1,
        "read_iops" => 2,
        "write_iops" => 3,
        _ => return Ok(false),
    };
    let read = if at < 2 { WrittenAmount::rate } else { WrittenAmount::iops };
    rates[at] = measure(value, read)?;
    Ok(true)
}

fn amount(limits: &mut LimitSet, key: &str, value: &NativeArg<'_>) -> Result<(), String> {
    match key {
        "cpu" => limits.cpu = measure(value, WrittenAmount::cpu)?.map(CpuQuota::of_core),
        "cpu_shares" => limits.cpu_shares = Some(shares(value)?),
        "processes" => limits.processes = measure(value, WrittenAmount::processes)?,
        "memory" => limits.memory = measure(value, WrittenAmount::memory)?,
        "cpus" => {
            let list = text(value)?;
            if !units::is_cpu_list(list) {
                return Err(format!("'{}' is not a list such as \"0-1,3\"", list.escape_debug()));
            }
            limits.cpus = Some(list.into());
        }
        other => {
            return Err(format!("there is no limit '{}'; there are {LIMITS}", other.escape_debug()));
        }
    }
    Ok(())
}

const LIMITS: &str =
    "cpu, cpu_shares, read, write, read_iops, write_iops, device, processes, memory and cpus";

fn shares(value: &NativeArg<'_>) -> Result<u32, String> {
    use nagaya_records::cell::{CPU_SHARES_MAX, CPU_SHARES_MIN};
    let shares = match value {
        NativeArg::Int(shares) => u32::try_from(*shares).ok(),
        other => text(other)?.parse().ok(),
    };
    let shares = shares.filter(|shares| (CPU_SHARES_MIN..=CPU_SHARES_MAX).contains(shares));
    shares.ok_or_else(|| format!("it is a number from {CPU_SHARES_MIN} to {CPU_SHARES_MAX}"))
}

/// Reads an amount as in records.
fn measure<T>(
    value: &NativeArg<'_>,
    read: fn(&WrittenAmount) -> Result<Option<T>, String>,
) -> Result<Option<T>, String> {
    let amount = match value {
        // A product such as `1.5 * 1024` that is whole.
        NativeArg::Float(number) if number.fract() == 0.0 => WrittenAmount::new(&number.to_string()),
        NativeArg::Int(number) => {
            WrittenAmount::from(u64::try_from(*number).map_err(|_| format!("{number} is below 0"))?)
        }
        other => WrittenAmount::new(text(other)?),
    };
    read(&amount).map_err(|why| format!("'{}' {why}", amount.as_str().escape_debug()))
}

fn text<'a>(value: &NativeArg<'a>) -> Result<&'a str, String> {
    match value {
        NativeArg::Text(bytes) => std::str::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned()),
        other => Err(format!("it is {}, and must be a String", other.kind())),
    }
}

fn word<'a>(key: &NativeArg<'a>) -> Option<&'a str> {
    match key {
        NativeArg::Symbol(name) => Some(name),
        NativeArg::Text(bytes) => std::str::from_utf8(bytes).ok(),
        _ => None,
    }
}

fn show(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn not_words(of: &str, given: &NativeArg<'_>) -> NativeError {
    NativeError::wrong_type(format!(
        "{of} takes words with amounts, such as cpu: \"20%\", and not {}",
        given.kind()
    ))
}

/// Checks that the decision is in time. When the body has ended, there is nothing left to limit or
/// to answer.
fn in_time(call: &NativeCall<'_>, what: &str) -> Result<(), NativeError> {
    if call.phase == RulePhase::LogTransaction {
        return Err(NativeError::runtime(format!(
            "{what} comes too late: the request has ended; put it into a file of an earlier phase"
        )));
    }
    Ok(())
}

// === Answers ===

/// `answer 403, "Not here.\n"`.
fn answer<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    in_time(call, "answer")?;
    call.expect(1, 2)?;
    let status = call.int(0)?;
    let body = if call.args().len() == 2 { call.bytes(1)? } else { b"" };
    request::answer_with(call, status)?;
    call.verdict.answer_mut().body.clear();
    call.verdict.write(body)?;
    Ok(NativeValue::Nil)
}

/// `redirect "https://www.example.com/"` or `redirect "/new"`; optionally followed by 301, 303, 307
/// or 308.
fn redirect<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    in_time(call, "redirect")?;
    call.expect(1, 2)?;
    let status = if call.args().len() == 2 { call.int(1)? } else { 302 };
    let to = call.text(0)?;
    if !["/", "http://", "https://"].iter().any(|beginning| to.starts_with(beginning)) {
        return Err(NativeError::argument(format!(
            "redirect: '{to}' does not begin with '/', http:// or https://"
        )));
    }
    nginx::redirect_to(call, to, status)?;
    Ok(NativeValue::Nil)
}

/// `Nagaya.write(text)`: for `rputs` and `echo`, which are Ruby because they take any object.
fn write<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    call.verdict.write(call.bytes(0)?)?;
    Ok(NativeValue::Nil)
}

fn log<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(1, 1)?;
    call.verdict.say(LogLevel::Notice, call.text(0)?);
    Ok(NativeValue::Nil)
}

// === The node, the time, and what is missing ===

/// Returns the CPUs that this process may use. They do not change while it runs, and a query costs
/// more than a rule.
fn cores() -> i64 {
    static CORES: std::sync::OnceLock<i64> = std::sync::OnceLock::new();
    *CORES.get_or_init(|| {
        thread::available_parallelism().map_or(1, |cores| i64::try_from(cores.get()).unwrap_or(1))
    })
}

/// Returns when the request arrived, in whole seconds since 1970.
fn seconds<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    Ok(NativeValue::Int(call.facts.number(NumberFact::ArrivedUs).unwrap_or(0).div_euclid(1_000_000)))
}

/// `Nagaya.in_span?(minute, "22:00", "06:00")`.
fn in_span<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(3, 3)?;
    let minute = u16::try_from(call.int(0)?).unwrap_or(0);
    let bound = |at| {
        let text = call
            .text(at)
            .map_err(|_| NativeError::argument("between takes times such as \"22:00\"..\"06:00\""))?;
        units::minute_of_day(text).map_err(|why| NativeError::argument(format!("between: {why}")))
    };
    Ok(units::in_span(minute, bound(1)?, bound(2)?).into())
}

/// `Nagaya.gap("Apache::Request", "run_handler")`: why upstream's method is not here, or nil if
/// upstream has none.
fn gap<'a>(call: &mut NativeCall<'a>) -> Given<'a> {
    call.expect(2, 2)?;
    Ok(compatibility::reason(call.text(0)?, call.word(1)?).into())
}
