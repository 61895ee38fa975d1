//! `nagaya doctor`: prints what the checks found.
//!
//! Not here: the checks (`crate::doctor`).

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::output::{self, Access, CliError, Format, Intent, Place};
use crate::doctor::{Asked, Check, State, checks, gather, try_sandbox};

/// Exit status 0 in any case: what is off may not be needed here.
pub fn run(config: Option<&Path>, format: Format) -> Result<ExitCode, CliError> {
    // Before anything else: only a process with one thread can be forked into a sandbox.
    let sandbox = try_sandbox();
    let settings = super::settings(config)?;
    let place = super::place(config)?;
    let checks = checks(&gather(&settings, Asked { sandbox, ..ask(&place) }));
    if format.json {
        output::print_json(&serde_json::to_value(&checks).expect("a check is texts"))?;
    } else {
        output::print(&lines(&checks))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Asks the node, or the store where none runs. Without an answer the rest is still worth printing.
fn ask(place: &Place) -> Asked {
    let mut asked = Asked::default();
    if let Ok(access) = Access::open(place, Intent::Look) {
        let policy = place.ids.policy();
        // What was listed before an error is as good as without one.
        let _ = access.each("/v1/tenants", "tenants", None, |tenant| {
            asked.homes.extend(tenant["home"].as_str().map(PathBuf::from));
            if let Ok(tenant) = serde_json::from_value(tenant.clone()) {
                asked.tenants.add(&tenant, &policy);
            }
            Ok(())
        });
    }
    // Only a running node knows what it may.
    if let Ok(status) = output::ask_node(place, "/v1/status") {
        asked.node_sandbox = status["keeper"]["sandbox"].as_str().map(Into::into);
    }
    asked
}

fn lines(checks: &[Check]) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut lines = Vec::new();
    for check in checks {
        let state = match check.state {
            State::Ok => "ok  ",
            State::Off => "off ",
            State::Warn => "warn",
        };
        lines.push(format!("{state}  {:width$}  {}", check.name, check.value));
        if check.state != State::Ok {
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
        let check = |name, state| Check { name, state, value: "v".into(), why: "w", how: "h" };
        let text = lines(&[check("a", State::Ok), check("longer", State::Off)]);
        assert_eq!(text, "ok    a       v\noff   longer  v\n              why: w\n              how: h");
    }
}
