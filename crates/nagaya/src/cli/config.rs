//! `nagaya check-config` and `nagaya config`.
//!
//! Not here: the keys and their checks (`crate::config`).

use std::path::Path;
use std::process::ExitCode;

use clap::Subcommand;

use super::output::{self, CliError, Format};
use crate::config;

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print every key with what it takes, its default and its meaning (Markdown)
    Reference,
    /// Print the settings that hold, defaults included, as a configuration file
    Dump,
}

pub fn run(command: &Command, file: Option<&Path>) -> Result<ExitCode, CliError> {
    let text = match command {
        Command::Reference => config::reference(),
        Command::Dump => config::dump(&super::settings(file)?),
    };
    output::print(text.trim_end())?;
    Ok(ExitCode::SUCCESS)
}

/// Exit status 1 if there is any mistake.
pub fn check(file: Option<&Path>, format: Format) -> Result<ExitCode, CliError> {
    let loaded = config::load(file);
    let mistakes = loaded.as_ref().err().map_or(&[][..], Vec::as_slice);
    if format.json {
        let list = serde_json::to_value(mistakes).expect("a mistake is texts and numbers");
        output::print_json(&list)?;
    } else if let Ok(loaded) = &loaded {
        match &loaded.file {
            Some(file) => output::print(&format!("{}: no mistakes", file.display()))?,
            None => output::print("there is no configuration file; the defaults hold")?,
        }
    } else {
        for mistake in mistakes {
            output::print(&mistake.to_string())?;
        }
        let plural = if mistakes.len() == 1 { "mistake" } else { "mistakes" };
        output::print(&format!("{} {plural}", mistakes.len()))?;
    }
    Ok(if mistakes.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
