//! `nagaya site|tenant import` and `export`: all records as JSON lines. Both words do the same, because
//! sites cannot come or go without their tenants.
//!
//! Not here: the form of the lines (`nagaya_cmdb::store::import`).

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use nagaya_cmdb::store::Mode;

use super::output::{Access, CliError, Format, Intent, Place, print, print_json, say_unserved};
use crate::admin::Summary;

#[derive(Debug, clap::Args)]
pub struct Import {
    /// JSON lines, each {"tenant":{...}}, {"site":{...}}, {"setting":{...}} or {"rule":{...}}; '-' is standard input
    pub file: PathBuf,
    /// Remove every tenant, site, setting and rule that the file does not name
    #[arg(long)]
    pub replace: bool,
    #[command(flatten)]
    pub format: Format,
}

#[derive(Debug, clap::Args)]
pub struct Export {
    /// Write to this file instead of standard output
    #[arg(long, short)]
    pub output: Option<PathBuf>,
    /// The form is JSON lines with or without this
    #[command(flatten)]
    pub format: Format,
}

pub fn import(command: &Import, place: &Place) -> Result<(), CliError> {
    let source: Box<dyn Read + Send> = if command.file == Path::new("-") {
        Box::new(io::stdin())
    } else {
        Box::new(File::open(&command.file).map_err(|error| io_error(&command.file, error))?)
    };
    let mode = if command.replace { Mode::Replace } else { Mode::Merge };
    let summary = match Access::open(place, Intent::Change)? {
        Access::Node(client) => client.import(source, mode)?,
        Access::File(api) => api.import(BufReader::new(source), mode).map_err(CliError::Refused)?,
    };
    say_unserved(summary.served);
    if command.format.json {
        return print_json(&serde_json::to_value(summary).expect("a summary has text keys"));
    }
    print(&describe(&summary))
}

/// A file appears under its name only when it is whole, and never in place of a better one.
pub fn export(command: &Export, place: &Place) -> Result<(), CliError> {
    let access = Access::open(place, Intent::Look)?;
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
        // The first error is the one to tell.
        let _ = std::fs::remove_file(&draft);
    }
    done
}

fn write_all(access: &Access, out: &mut impl Write) -> Result<(), CliError> {
    match access {
        Access::Node(client) => client.export(out)?,
        Access::File(api) => drop(api.export(out)?),
    }
    out.flush().map_err(CliError::Output)
}

fn describe(summary: &Summary) -> String {
    let Summary {
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
