//! `nagaya doctor`: prints what the checks found.
//!
//! Not here: the checks (`crate::doctor`).

use std::path::Path;
use std::process::ExitCode;

use super::output::{self, CliError, Format};
use crate::doctor::{Check, State, checks, gather};

/// Exit status 0 in any case: what is off may not be needed here.
pub fn run(config: Option<&Path>, format: Format) -> Result<ExitCode, CliError> {
    let checks = checks(&gather(&super::settings(config)?));
    if format.json {
        output::print_json(&serde_json::to_value(&checks).expect("a check is texts"))?;
    } else {
        output::print(&lines(&checks))?;
    }
    Ok(ExitCode::SUCCESS)
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
