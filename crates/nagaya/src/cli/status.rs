//! `nagaya status`: the running node on one screen.
//!
//! Not here: gathering it (`supervisor::node`).

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use nagaya_base::units::format_bytes;
use serde_json::{Value, json};

use super::output::{self, CliError, OutputFormat, RecordSource, plain, short_time};
use crate::doctor::tenants::TenantFinding;

/// Tenants whose ids and homes are checked.
const TENANTS_LOOKED_AT_MAX: usize = 500;

/// Prints the status. Exit status 1 if the node does not serve.
pub fn run(place: &RecordSource, format: OutputFormat) -> Result<ExitCode, CliError> {
    let mut status = output::ask_node(place, "/v1/status")?;
    status["tenant_warnings"] = json!(tenant_warnings(place, &status));
    if format.json {
        output::print_json(&status)?;
    } else {
        output::print(screen(&status).trim_end())?;
    }
    Ok(if status["healthy"] == Value::Bool(true) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns warnings about tenants' ids and homes. The command checks a bounded number and stays
/// quick; `nagaya doctor` checks all.
fn tenant_warnings(place: &RecordSource, status: &Value) -> Vec<String> {
    let Ok(page) = output::ask_node(place, &format!("/v1/tenants?limit={TENANTS_LOOKED_AT_MAX}")) else {
        return Vec::new();
    };
    let policy = place.ids.policy();
    let mut found = TenantFinding::default();
    for tenant in page["tenants"].as_array().into_iter().flatten() {
        if let Ok(tenant) = serde_json::from_value(tenant.clone()) {
            found.add(&tenant, &policy);
        }
    }
    let mut warnings = found.warnings;
    if found.more > 0 {
        warnings.push(format!("and {} more: see `nagaya doctor`", found.more));
    }
    let all = status["tenants"].as_u64().unwrap_or(0);
    if all > found.looked_at as u64 {
        warnings
            .push(format!("{} of {all} tenants were checked: `nagaya doctor` checks all", found.looked_at));
    }
    warnings
}

fn screen(status: &Value) -> String {
    let mut out = String::new();
    let health = match status["reason"].as_str() {
        None => "serves".to_owned(),
        Some(reason) => format!("does not serve: {reason}"),
    };
    let up = Duration::from_secs(status["uptime_seconds"].as_u64().unwrap_or(0));
    let _ = writeln!(
        out,
        "{} {}, nagaya {}, up {}",
        plain(&status["node"]),
        health,
        plain(&status["version"]),
        short_time(up)
    );
    let _ = writeln!(
        out,
        "{} tenants, {} sites, {} settings, revision {}",
        plain(&status["tenants"]),
        plain(&status["sites"]),
        plain(&status["settings"]),
        plain(&status["revision"])
    );
    if let Some(error) = status["store_error"].as_str() {
        let _ = writeln!(out, "store: {error}");
    }
    cluster_store(&mut out, &status["cluster_store"]);
    section(&mut out, "listening", &status["listen"], |at| {
        let tls = if at["tls"] == Value::Bool(true) { "https" } else { "http" };
        format!("{tls:5}  {}", plain(&at["address"]))
    });
    section(&mut out, "processes", &status["processes"], process);
    section(&mut out, "protections", &status["protections"], |row| {
        let on = row["on"] == Value::Bool(true);
        let name = plain(&row["name"]);
        let why = plain(&row["why"]);
        let how = if on { String::new() } else { format!("; {}", plain(&row["how"])) };
        format!("{}  {name:18} {why}{how}", if on { "on " } else { "OFF" })
    });
    if let Some(why) = status["keeper"]["images"]["none"].as_str() {
        let _ =
            writeln!(out, "\napplications do not rest as images: {why} (`nagaya doctor` says what to do)");
    }
    section(&mut out, "certificates that end soon", &status["certificates"]["ending"], plain);
    section(&mut out, "files that are no certificates", &status["certificates"]["broken"], plain);
    section(&mut out, "tenants to be looked after", &status["tenant_warnings"], plain);
    section(&mut out, "changed in the file, and in force after a restart", &status["needs_restart"], plain);
    for name in ["edge", "keeper"] {
        if status[name].is_object() {
            let _ = writeln!(out, "\n{name}");
            for (key, value) in output::fields(&status[name]) {
                let _ = writeln!(out, "  {key}: {value}");
            }
        }
    }
    out
}

/// Writes the fault of the cluster's store, if any.
fn cluster_store(out: &mut String, store: &Value) {
    if let Some(insecure) = store["insecure"].as_str() {
        let _ = writeln!(out, "INSECURE: {insecure}");
    }
    if let Some(refused @ 1..) = store["refused"].as_u64() {
        let _ = writeln!(out, "REFUSED: {refused} values in the cluster's store do not count (NGY0238)");
        for value in store["refused_values"].as_array().into_iter().flatten() {
            let _ = writeln!(out, "  {}", plain(value));
        }
    }
}

fn section(out: &mut String, title: &str, rows: &Value, line: impl Fn(&Value) -> String) {
    let rows = rows.as_array().map_or(&[][..], Vec::as_slice);
    if !rows.is_empty() {
        let _ = writeln!(out, "\n{title}");
    }
    for row in rows {
        let _ = writeln!(out, "  {}", line(row));
    }
}

fn process(row: &Value) -> String {
    let name = plain(&row["name"]);
    let pid = row["pid"].as_i64().map_or("not running".into(), |pid| format!("pid {pid}"));
    // To the KiB: pages are never smaller.
    let rss = row["rss_bytes"].as_u64().map_or(String::new(), |bytes| format_bytes(bytes / 1024 * 1024));
    let restarts = match row["restarts"].as_u64() {
        Some(0) | None => String::new(),
        Some(times) => format!("  {times} restarts, the last after {}", plain(&row["last_end"])),
    };
    format!("{name:10}  {pid:14}  {rss:>10}{restarts}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_shows_protections_that_are_off_and_restarts() {
        let text = screen(&json!({
            "node": "n1", "version": "0.1.0", "healthy": false, "reason": "the edge process is being started",
            "uptime_seconds": 93_784, "tenants": 2, "sites": 3, "settings": 4, "revision": 9,
            "listen": [{"address": "127.0.0.1:8080", "tls": false}],
            "processes": [{"name": "edge", "pid": null, "rss_bytes": null, "restarts": 2, "last_end": "signal 9 (SIGKILL)"}],
            "protections": [{"name": "tenant-uids", "on": false, "why": "one uid for all", "how": "start as root"}],
            "cluster_store": {"insecure": "it is in clear text", "refused": 2, "refused_values": ["sites/bob: it is not signed"]},
            "needs_restart": ["listen"], "edge": null,
            "keeper": {"fence": "cgroup-v1", "kinds": {"cgi": {"running": 1}}, "images": {"none": "no CRIU"}},
        }));
        assert!(
            text.starts_with(
                "n1 does not serve: the edge process is being started, nagaya 0.1.0, up 1d 2h\n"
            ),
            "{text}"
        );
        for part in [
            "OFF  tenant-uids",
            "\nINSECURE: it is in clear text\n",
            "\nREFUSED: 2 values in the cluster's store do not count (NGY0238)\n  sites/bob: it is not signed\n",
            "; start as root",
            "2 restarts, the last after signal 9",
            "http   127.0.0.1:8080",
            "fence: cgroup-v1",
            "\n  kinds.cgi.running: 1\n",
            "\napplications do not rest as images: no CRIU (`nagaya doctor` says what to do)\n",
        ] {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
        assert!(!text.contains(['{', '"']), "no JSON is for people: {text}");
    }
}
