//! `nagaya check-config` and `nagaya config`.
//!
//! Not here: the keys and their checks (`crate::config`).

use std::path::Path;
use std::process::ExitCode;

use clap::Subcommand;

use super::output::{self, CliError, OutputFormat};
use crate::config::{self, MistakeSeverity};

#[derive(Debug, Subcommand)]
pub enum ConfigArgs {
    /// Print every key with its values, its default and its meaning (Markdown)
    Reference,
    /// Print the settings in effect, defaults included, as a configuration file
    Dump,
}

pub fn run(command: &ConfigArgs, file: Option<&Path>) -> Result<ExitCode, CliError> {
    let text = match command {
        ConfigArgs::Reference => config::reference(),
        ConfigArgs::Dump => config::dump(&super::settings(file)?),
    };
    output::print(text.trim_end())?;
    Ok(ExitCode::SUCCESS)
}

/// Checks the configuration, including rule files. Exit status 1 if there is any mistake; warnings
/// do not count.
pub fn check(file: Option<&Path>, format: OutputFormat) -> Result<ExitCode, CliError> {
    let (from, mistakes) = match config::load(file) {
        Ok(loaded) => (loaded.file, config::check_rules(&loaded.settings)),
        Err(mistakes) => (None, mistakes),
    };
    let errors = mistakes.iter().filter(|mistake| mistake.severity == MistakeSeverity::Error).count();
    if format.json {
        let list = serde_json::to_value(&mistakes).expect("a mistake is texts and numbers");
        output::print_json(&list)?;
    } else {
        for mistake in &mistakes {
            output::print(&mistake.to_string())?;
        }
        let plural = if errors == 1 { "mistake" } else { "mistakes" };
        output::print(&match from {
            _ if errors > 0 => format!("{errors} {plural}"),
            Some(file) => format!("{}: no mistakes", file.display()),
            None => "there is no configuration file; the defaults apply".into(),
        })?;
    }
    Ok(if errors == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
