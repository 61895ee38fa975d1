//! `nagaya doctor`: prints the results of the checks.
//!
//! Not here: the checks (`crate::doctor`).

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nagaya_keeper::machines;

use super::output::{self, AccessIntent, CliError, OutputFormat, RecordAccess, RecordSource};
use crate::doctor::{CheckState, DoctorCheck, FactSources, checks, gather, try_sandbox};

/// Runs the checks. Exit status 0 in any case: a failed check may not matter here.
pub fn run(config: Option<&Path>, format: OutputFormat) -> Result<ExitCode, CliError> {
    // This comes first: only a process with one thread can be forked into a sandbox.
    let (launcher, sandbox) = try_sandbox();
    let settings = super::settings(config)?;
    let place = super::place(config)?;
    let machines = launcher.map(|launcher| machines::probe(&launcher, &settings.keeper));
    let checks = checks(&gather(&settings, FactSources { sandbox, machines, ..ask(&place) }));
    if format.json {
        output::print_json(&serde_json::to_value(&checks).expect("a check is texts"))?;
    } else {
        output::print(&lines(&checks))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Queries the node, or the store if no node runs. Without a reply the rest is still worth
/// printing.
fn ask(place: &RecordSource) -> FactSources {
    let mut asked = FactSources::default();
    if let Ok(access) = RecordAccess::open(place, AccessIntent::Look) {
        let policy = place.ids.policy();
        // The list up to an error is as valid as without one.
        let _ = access.each("/v1/tenants", "tenants", None, |tenant| {
            asked.homes.extend(tenant["home"].as_str().map(PathBuf::from));
            if let Ok(tenant) = serde_json::from_value(tenant.clone()) {
                asked.tenants.add(&tenant, &policy);
            }
            Ok(())
        });
    }
    // Only a running node knows its own rights.
    if let Ok(status) = output::ask_node(place, "/v1/status") {
        asked.node_sandbox = status["keeper"]["sandbox"].as_str().map(Into::into);
    }
    asked
}

fn lines(checks: &[DoctorCheck]) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut lines = Vec::new();
    for check in checks {
        let state = match check.state {
            CheckState::Ok => "ok  ",
            CheckState::Off => "off ",
            CheckState::Warn => "warn",
        };
        lines.push(format!("{state}  {:width$}  {}", check.name, check.value));
        if check.state != CheckState::Ok {
            lines.push(format!("      {:width$}  why: {}", "", check.why));
            lines.push(format!("      {:width$}  how: {}", "", check.how));
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_not_fine_is_explained() {
        let check = |name, state| DoctorCheck { name, state, value: "v".into(), why: "w", how: "h" };
        let text = lines(&[check("a", CheckState::Ok), check("longer", CheckState::Off)]);
        assert_eq!(text, "ok    a       v\noff   longer  v\n              why: w\n              how: h");
    }
}
