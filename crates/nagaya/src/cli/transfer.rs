//! `nagaya site|tenant import` and `export`: all records as JSON lines. Both commands do the same,
//! because sites need their tenants.
//!
//! Not here: the form of the lines (`nagaya_store::import`).

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use nagaya_store::ChangeMode;

use super::output::{
    AccessIntent, CliError, OutputFormat, RecordAccess, RecordSource, print, print_json, say_unserved,
};
use crate::admin::ChangeSummary;

#[derive(Debug, clap::Args)]
pub struct ImportArgs {
    /// JSON lines, each {"tenant":{...}}, {"site":{...}}, {"setting":{...}} or {"rule":{...}}; '-'
    /// is standard input
    pub file: PathBuf,
    /// Remove every tenant, site, setting and rule that the file does not name
    #[arg(long)]
    pub replace: bool,
    #[command(flatten)]
    pub format: OutputFormat,
}

#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    /// Write to this file instead of standard output
    #[arg(long, short)]
    pub output: Option<PathBuf>,
    /// The form is JSON lines with or without this
    #[command(flatten)]
    pub format: OutputFormat,
}

pub fn import(command: &ImportArgs, place: &RecordSource) -> Result<(), CliError> {
    let source: Box<dyn Read + Send> = if command.file == Path::new("-") {
        Box::new(io::stdin())
    } else {
        Box::new(File::open(&command.file).map_err(|error| io_error(&command.file, error))?)
    };
    let mode = if command.replace { ChangeMode::Replace } else { ChangeMode::Merge };
    let summary = match RecordAccess::open(place, AccessIntent::Change)? {
        RecordAccess::Node(client) => client.import(source, mode)?,
        RecordAccess::File(api) => api.import(BufReader::new(source), mode).map_err(CliError::Refused)?,
    };
    say_unserved(summary.served);
    if command.format.json {
        return print_json(&serde_json::to_value(summary).expect("a summary has text keys"));
    }
    print(&describe(&summary))
}

/// Exports to a file. It gets its name only when it is complete, and never replaces a better one.
pub fn export(command: &ExportArgs, place: &RecordSource) -> Result<(), CliError> {
    let access = RecordAccess::open(place, AccessIntent::Look)?;
    let Some(path) = &command.output else {
        return write_all(&access, &mut BufWriter::new(io::stdout().lock()));
    };
    let mut draft = path.clone().into_os_string();
    draft.push(format!(".{}.new", std::process::id()));
    let draft = PathBuf::from(draft);
    let file = File::create_new(&draft).map_err(|error| io_error(&draft, error))?;
    let mut out = BufWriter::new(file);
    let done = write_all(&access, &mut out)
        .and_then(|()| out.get_ref().sync_all().map_err(|error| io_error(&draft, error)))
        .and_then(|()| std::fs::rename(&draft, path).map_err(|error| io_error(path, error)));
    if done.is_err() {
        // The first error is the one to report.
        let _ = std::fs::remove_file(&draft);
    }
    done
}

fn write_all(access: &RecordAccess, out: &mut impl Write) -> Result<(), CliError> {
    match access {
        RecordAccess::Node(client) => client.export(out)?,
        RecordAccess::File(api) => drop(api.export(out)?),
    }
    out.flush().map_err(CliError::Output)
}

fn describe(summary: &ChangeSummary) -> String {
    let ChangeSummary {
        revision,
        tenants_put,
        tenants_removed,
        sites_put,
        sites_removed,
        settings_put,
        settings_removed,
        rules_put,
        rules_removed,
        served: _,
    } = summary;
    format!(
        "added or changed {tenants_put} tenants, {sites_put} sites, {settings_put} settings and {rules_put} rules, removed \
         {tenants_removed} tenants, {sites_removed} sites, {settings_removed} settings and {rules_removed} rules; revision {revision}"
    )
}

fn io_error(path: &Path, error: io::Error) -> CliError {
    CliError::Io { path: path.into(), error }
}
