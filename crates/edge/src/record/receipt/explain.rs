//! Explains one request in full for `nagaya explain`: its times, its limits and who set them.
//!
//! Not here: keeping records (`ring`), the screen (`nagaya::cli::explain`), the transport (the
//! admin interface).

use std::sync::Arc;
use std::time::SystemTime;

use nagaya_base::units::{format_bytes, format_duration};
use nagaya_base::{RequestId, date};
use nagaya_records::TenantName;
use nagaya_records::cell::{Boost, CellScope, Confinement, Device, LimitSet, NamedCell};
use nagaya_records::instance::Tier;
use serde_json::{Value, json};

use crate::record::access_log::format::stages;
use crate::record::access_record::{AccessDetails, AccessRecord, ProgramUsage, UsageScope, WakeWait};
use crate::record::receipt::figures::ReceiptFigures;
use crate::record::receipt::ring::ReceiptRings;
use crate::record::route_trace;
use crate::record::turnaround::{PARTS, Turnaround};

/// Returns the receipt of the request with this id as JSON. `null` if it is not kept (any more).
///
/// `limits_of` gives the limits that a named cell has now, as the requests of a tenant share it.
pub fn explain(
    receipts: &ReceiptRings,
    node: &str,
    id: &str,
    limits_of: impl Fn(&NamedCell, &TenantName) -> LimitSet,
) -> String {
    let is_id = id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let id = u128::from_str_radix(id, 16).ok().filter(|_| is_id).map(RequestId);
    let record = id.and_then(|id| {
        receipts.find(id, |record| {
            let mut record = record.clone();
            complete(&mut record, &limits_of);
            record
        })
    });
    let told = record.map(|record| tell(&record, node));
    told.unwrap_or(Value::Null).to_string()
}

/// Adds the limits of named cells that the request joined without limits. They are the present
/// ones.
fn complete(record: &mut AccessRecord, limits_of: &impl Fn(&NamedCell, &TenantName) -> LimitSet) {
    let (Some(more), Some(site)) = (&mut record.more, &record.site) else { return };
    let Some(confinement) = &mut more.confinement else { return };
    let named = &mut Arc::make_mut(confinement).named;
    for cell in named.iter_mut().filter(|cell| cell.limits.is_none()) {
        cell.limits = Some(limits_of(cell, &site.tenant)).filter(|limits| !limits.is_empty());
    }
}

fn tell(record: &AccessRecord, node: &str) -> Value {
    let nothing = AccessDetails::default();
    let more = record.more.as_deref().unwrap_or(&nothing);
    let figures = ReceiptFigures::of(record);
    let site = record.site.as_deref();
    let is_known = more.used != ProgramUsage::Unknown;
    json!({
        "id": record.id.to_string(),
        "time": date::utc(SystemTime::now() - record.begun.elapsed()),
        "client": record.client.to_string(),
        "method": record.method.as_ref().map(http::Method::as_str),
        "host": record.host(),
        "target": record.target(),
        "status": record.status.as_u16(),
        "site": site.map(|site| site.name.as_str()),
        "tenant": site.map(|site| site.tenant.as_str()),
        "backend": site.map(|site| site.backend.kind()),
        "node": node,
        "cell": more.cell.as_deref(),
        "cell_of": more.cell_of.map(UsageScope::as_str),
        "limits": limits(record, more),
        "named": more.confinement().named.iter().map(named).collect::<Vec<_>>(),
        "rules": more.ruled_by.as_slice(),
        "lane": more.lane,
        "demoted": figures.demoted,
        "wake": more.woken.as_ref().map(|woken| {
            let told = stages(&woken.wake, figures.backend_us);
            let told: Vec<_> = told.map(|(stage, us)| json!({ "stage": stage, "us": us })).collect();
            json!({ "from": woken.wake.from, "stages": told, "predicted_us": woken.wake.predicted_us })
        }),
        "place": route_trace::json(more),
        "refusal": record.refusal.map(|reason| {
            let code = record.code.map(|code| code.to_string());
            json!({ "reason": reason, "code": code, "detail": more.fault })
        }),
        "spans": spans(record, more, &figures),
        "turnaround": figures.turnaround.map(|split| turnaround(&split, more.usual.as_ref())),
        "usage": {
            "cpu_us": figures.cpu_us,
            "read_bytes": is_known.then_some(figures.read_bytes),
            "write_bytes": is_known.then_some(figures.write_bytes),
            "throttled_us": is_known.then_some(figures.throttled_us),
        },
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
        "paced_us": figures.paced_us,
        "fence_us": figures.fence_us,
        "took_us": figures.took_us,
    })
}

// === Turnaround ===

/// Increase of a part above the usual that is named: this time, and this part of the whole usual
/// time, in percent.
const GREW_MIN_US: u64 = 1_000;
const GREW_MIN_PERCENT: u64 = 20;

/// Returns the parts of the time in the application, the usual ones, and the part that grew most.
fn turnaround(split: &Turnaround, usual: Option<&Turnaround>) -> Value {
    let parts = |split: &Turnaround| {
        let named = PARTS.iter().zip(split.parts());
        named.map(|(part, us)| (format!("{part}_us"), us.into())).collect::<serde_json::Map<_, Value>>()
    };
    let mut told = parts(split);
    told.insert("questions".into(), split.questions.into());
    told.insert("usual".into(), usual.map_or(Value::Null, |usual| parts(usual).into()));
    told.insert("grew".into(), usual.and_then(|usual| grown_part(split, usual)).into());
    told.into()
}

/// Returns the part that is longest above its usual time, if that is much.
fn grown_part(split: &Turnaround, usual: &Turnaround) -> Option<&'static str> {
    let growth = split.parts().into_iter().zip(usual.parts()).map(|(us, usual)| us.saturating_sub(usual));
    let (most_us, part) = growth.zip(PARTS).max_by_key(|(us, _)| *us)?;
    let whole_us: u64 = usual.parts().iter().sum();
    (most_us >= GREW_MIN_US.max(whole_us * GREW_MIN_PERCENT / 100)).then_some(part)
}

// === Limits ===

/// Returns every limit that held for the request, with its origin.
fn limits(record: &AccessRecord, more: &AccessDetails) -> Vec<Value> {
    let Confinement { limits, demotions, .. } = more.confinement();
    let mut told = Vec::new();
    let mut put = |what: String, value: String, from: &str, holds: bool| {
        // The edge holds back bodies in any case, wherever the rest runs.
        let holds = holds || what == "read" || what == "write";
        let mut limit = json!({ "what": what, "value": value, "from": from });
        if !holds {
            limit["holds"] = json!(false);
        }
        told.push(limit);
    };
    // Several requests in one process have no CPU of their own. No request to an application is
    // in a named cell.
    let (own_hold, named_hold) = (more.cell_of != Some(UsageScope::Instance), more.cell_of.is_none());
    let by_rules = match more.ruled_by.as_slice() {
        [] => "a rule".to_owned(),
        [file] => format!("rule {file}"),
        files => format!("rules {}", files.join(", ")),
    };
    let site = record.site.as_deref();
    let of_site = site.map(|site| format!("the record of site {}", site.name)).unwrap_or_default();
    let requests = site.map(|site| written(&site.request_limits.limits())).unwrap_or_default();
    for limit in written(limits) {
        // A rule's limits override the site's, so a value equal to the record's comes from there.
        let from = if requests.contains(&limit) { &of_site } else { &by_rules };
        put(limit.0, limit.1, from, own_hold);
    }
    let steps: Vec<_> =
        site.into_iter().flat_map(|site| &site.demotions).filter_map(|step| step.demotion()).collect();
    let from = if steps == *demotions { &of_site } else { &by_rules };
    for step in demotions {
        let after = format_duration(std::time::Duration::from_micros(step.after_cpu_us));
        for (what, value) in written(&step.limits) {
            put(format!("{what} after {after} of CPU time"), value, from, own_hold);
        }
    }
    for cell in &more.confinement().named {
        for (what, value) in cell.limits.iter().flat_map(written) {
            put(format!("{what} of cell {}", cell.name), value, &by_rules, named_hold);
        }
    }
    for (what, value) in site.map(|site| written(&site.limits.limits())).unwrap_or_default() {
        put(format!("{what} of the site"), value, &of_site, true);
    }
    told.extend(boosts(more, &by_rules));
    let mut put = |what: String, value: String, from: &str| {
        told.push(json!({ "what": what, "value": value, "from": from }));
    };
    if let Some(tenant) = &more.tenant {
        for (what, value) in written(&tenant.limits.limits()) {
            put(format!("{what} of the tenant"), value, &format!("the record of tenant {}", tenant.name));
        }
    }
    told
}

/// Returns the raised limits of the site, also if they were not granted.
fn boosts(more: &AccessDetails, by_rules: &str) -> Vec<Value> {
    let of = |boost: Boost| {
        written(&LimitSet { cpu: boost.cpu, cpu_shares: boost.cpu_shares, ..LimitSet::default() })
    };
    let raised = of(more.raised);
    let told = |(what, asked): (String, String)| {
        let granted = raised.iter().find(|(raised, _)| *raised == what).map(|(_, value)| value);
        let value = granted.unwrap_or(&asked);
        let mut limit =
            json!({ "what": format!("{what} of the site, raised"), "value": value, "from": by_rules });
        if granted.is_none() {
            limit["holds"] = json!(false);
            limit["note"] = json!("was not raised: the site has no such limit, or may have no more");
        } else if *value != asked {
            limit["note"] = json!(format!("{asked} was asked for"));
        }
        limit
    };
    of(more.confinement().boost).into_iter().map(told).collect()
}

/// Returns each limit as a name and a value, in the form of an operator.
fn written(limits: &LimitSet) -> Vec<(String, String)> {
    let mut all = Vec::new();
    let mut put = |what: &str, value: Option<String>| all.extend(value.map(|value| (what.to_owned(), value)));
    put("cpu", limits.cpu.map(|cpu| cpu.to_string()));
    put("cpu_shares", limits.cpu_shares.map(|shares| shares.to_string()));
    for limit in &limits.io {
        let of = |what: &str| match limit.device {
            Device::Root => what.to_owned(),
            device @ Device::Number { .. } => format!("{what} from {device}"),
        };
        put(&of("read"), limit.read_bps.map(rate));
        put(&of("write"), limit.write_bps.map(rate));
        put(&of("read_iops"), limit.read_iops.map(|n| n.to_string()));
        put(&of("write_iops"), limit.write_iops.map(|n| n.to_string()));
    }
    put("processes", limits.processes.map(|n| n.to_string()));
    put("memory", limits.memory.map(format_bytes));
    put("cpus", limits.cpus.as_deref().map(str::to_owned));
    put("mems", limits.mems.as_deref().map(str::to_owned));
    all
}

fn rate(bytes: u64) -> String {
    format!("{}/s", format_bytes(bytes))
}

fn named(cell: &NamedCell) -> String {
    let controllers: Vec<_> = cell.controllers.iter().map(|controller| controller.as_str()).collect();
    let scope = match cell.scope {
        CellScope::Node => "",
        CellScope::Tenant => " of the tenant",
    };
    format!("{}{scope} ({})", cell.name, controllers.join(", "))
}

// === Time ===

/// Reason why a request waits for an application that is ready.
const FENCE: &str = "The application was ready; until then the node that had it before, and did not answer, could have served it.";

fn spans(record: &AccessRecord, more: &AccessDetails, figures: &ReceiptFigures) -> Vec<Value> {
    let kind = record.site.as_ref().map_or("", |site| site.backend.kind());
    let ran = more.used != ProgramUsage::Nothing;
    // Processes that run at once are throttled at once: their sum can be more than the time that
    // passed.
    let throttled = figures.throttled_us.min(figures.backend_us);
    // Earlier waits, and the time of another node, are spans of their own.
    let placing: u64 = route_trace::spans(more).iter().map(|(_, us, _)| us).sum();
    let backend = figures.backend_us.saturating_sub(placing);
    let answering = match kind {
        "cgi" | "php" if ran => "program",
        "http" | "app" => "application",
        _ => "answer",
    };
    let known = figures.queue_us
        + figures.rules_us
        + figures.wake_us
        + figures.fence_us
        + figures.backend_us.max(placing)
        + figures.paced_us;
    let spans = [
        ("in line", figures.queue_us, Some(queued(more))),
        ("rules", figures.rules_us, None),
        ("waking", figures.wake_us, more.woken.as_ref().map(waking)),
        ("fence", figures.fence_us, Some(FENCE.to_owned())),
        ("throttled", throttled, Some(throttling(more))),
        (answering, backend.saturating_sub(throttled), ran.then(|| running(figures))),
        ("held back", figures.paced_us, Some(pacing(record, more, ran))),
        ("sending", figures.took_us.saturating_sub(known), None),
    ];
    let told = spans.into_iter().filter(|(_, us, _)| *us > 0);
    let placing = route_trace::spans(more).into_iter().map(|(name, us, why)| (name, us, Some(why)));
    let all = placing.chain(told);
    all.map(|(name, us, why)| json!({ "name": name, "us": us, "why": why })).collect()
}

fn queued(more: &AccessDetails) -> String {
    match &more.lane {
        Some(lane) => format!(
            "It waited for its turn: lane {lane}, its site or its tenant had reached the limit of running requests."
        ),
        None => {
            "It waited for its turn: its site or its tenant had reached the limit of running requests.".into()
        }
    }
}

fn waking(woken: &WakeWait) -> String {
    match woken.wake.from {
        Tier::Cold => "Its application did not run, and there was no image of it: it was started.".into(),
        Tier::Image => "Its application did not run: its image was restored.".into(),
        Tier::Reclaimed => "Its application was frozen, and its memory was in swap.".into(),
        Tier::Frozen => "Its application was frozen.".into(),
        Tier::Quiet | Tier::Running => {
            "Its application ran only when no other program needed the CPU.".into()
        }
    }
}

/// Returns the CPU quotas that held for the request, the narrowest cell first.
fn quotas(more: &AccessDetails) -> String {
    let own = more.confinement().limits.cpu.map(|quota| format!("its CPU quota of {quota}"));
    let of_cell = |cell: &NamedCell| {
        let quota = cell.limits.as_ref()?.cpu?;
        Some(format!("the CPU quota of {quota} of cell {}", cell.name))
    };
    let all: Vec<_> = own.into_iter().chain(more.confinement().named.iter().filter_map(of_cell)).collect();
    if all.is_empty() {
        "a CPU quota of its site, its tenant or a named cell".into()
    } else {
        all.join(" and ")
    }
}

fn throttling(more: &AccessDetails) -> String {
    format!("Its processes were throttled because {} was used up.", quotas(more))
}

fn running(figures: &ReceiptFigures) -> String {
    match figures.cpu_us {
        Some(us) => format!("It used {us} us of CPU time; the rest it waited, or others ran."),
        None => "Its resource use is not known: the keeper did not report it.".into(),
    }
}

fn pacing(record: &AccessRecord, more: &AccessDetails, ran: bool) -> String {
    if ran {
        return format!(
            "The end of the answer was held back: the program had ended before {} had paid for what it used.",
            quotas(more)
        );
    }
    let Confinement { limits, named, .. } = more.confinement();
    let own = |limits: &LimitSet| {
        let rates = limits.io.iter().flat_map(|limit| {
            let read = limit.read_bps.map(|bps| format!("read limit {}", rate(bps)));
            read.into_iter().chain(limit.write_bps.map(|bps| format!("write limit {}", rate(bps))))
        });
        rates.collect::<Vec<_>>()
    };
    let mut all = own(limits);
    for cell in named {
        all.extend(cell.limits.iter().flat_map(own).map(|rate| format!("{rate} of cell {}", cell.name)));
    }
    if let Some(site) = &record.site {
        all.extend(own(&site.limits.limits()).into_iter().map(|rate| format!("{rate} of the site")));
    }
    if let Some(tenant) = &more.tenant {
        all.extend(own(&tenant.limits.limits()).into_iter().map(|rate| format!("{rate} of the tenant")));
    }
    format!("Its bytes went as fast as they may: {}.", all.join(", "))
}

#[cfg(test)]
mod tests;
