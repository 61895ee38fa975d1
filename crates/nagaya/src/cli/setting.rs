//! `nagaya setting`: values that rules look up by key, such as the limits of a host by its name.
//!
//! Not here: the check of a setting (`nagaya_records::check`), rules (`nagaya_rules`), access to
//! records (`output`).

use std::process::ExitCode;

use serde_json::{Value, json};

use super::output::{
    self, AccessIntent, CliError, OutputFormat, RecordAccess, RecordSource, TableColumns, escape, plain,
    printable,
};

#[derive(Debug, clap::Subcommand)]
pub enum SettingArgs {
    /// Add or replace a setting
    Set(SettingSetArgs),
    /// Print the value of one setting
    #[command(visible_alias = "show")]
    Get {
        key: String,
        #[command(flatten)]
        format: OutputFormat,
    },
    /// List all settings
    List {
        /// Show only keys after this one, ordered by bytes
        #[arg(long, value_name = "KEY")]
        after: Option<String>,
        #[command(flatten)]
        format: OutputFormat,
    },
    /// Remove a setting
    #[command(visible_alias = "remove")]
    Delete {
        key: String,
        #[command(flatten)]
        format: OutputFormat,
    },
}

#[derive(Debug, clap::Args)]
pub struct SettingSetArgs {
    pub key: String,
    /// Value: a text
    #[arg(required_unless_present = "json", conflicts_with = "json", allow_hyphen_values = true)]
    pub value: Option<String>,
    /// Value: an object of texts, numbers and booleans instead of a text, like '{"cpu":50}'
    #[arg(long, value_name = "OBJECT")]
    pub json: Option<String>,
}

pub fn run(command: SettingArgs, place: &RecordSource) -> Result<ExitCode, CliError> {
    let text = OutputFormat { json: false };
    let (result, format) = match &command {
        SettingArgs::Set(set) => (self::set(set, place), text),
        SettingArgs::Get { key, format } => (get(key, *format, place), *format),
        SettingArgs::List { after, format } => (list(after.as_deref(), *format, place), *format),
        SettingArgs::Delete { key, format } => (delete(key, *format, place), *format),
    };
    output::end(result, format)
}

/// Returns the path. An empty key would be the path of the listing.
fn path(key: &str) -> Result<String, CliError> {
    match key {
        "" => Err(CliError::Usage("a setting's key is not empty".into())),
        key => Ok(format!("/v1/settings/{}", escape(key))),
    }
}

fn set(command: &SettingSetArgs, place: &RecordSource) -> Result<(), CliError> {
    let value = match (&command.value, &command.json) {
        (Some(text), _) => json!(text),
        (None, json) => serde_json::from_str(json.as_deref().unwrap_or_default())
            .map_err(|error| CliError::Usage(format!("--json is not JSON: {error}")))?,
    };
    let access = RecordAccess::open(place, AccessIntent::Change)?;
    let reply = access.put(&path(&command.key)?, &json!({ "value": value }))?;
    let what = if reply.0["changed"] == json!(true) { "was set" } else { "is as it was" };
    output::print(&format!("setting '{}' {what}; revision {}", command.key, reply.0["revision"]))
}

fn get(key: &str, format: OutputFormat, place: &RecordSource) -> Result<(), CliError> {
    let reply = RecordAccess::open(place, AccessIntent::Look)?.get(&path(key)?)?;
    let setting = &reply.0["setting"];
    match (format.json, &setting["value"]) {
        (true, _) => output::print_json(setting),
        (false, Value::Object(_)) => output::print_fields(&setting["value"]),
        (false, value) => output::print(&plain(value)),
    }
}

fn list(after: Option<&str>, format: OutputFormat, place: &RecordSource) -> Result<(), CliError> {
    let access = RecordAccess::open(place, AccessIntent::Look)?;
    if format.json {
        return output::print_json_list(&access, "/v1/settings", "settings", after);
    }
    let mut columns = TableColumns::new(&["KEY", "VALUE"]);
    access.each("/v1/settings", "settings", after, |setting| {
        columns.add([plain(&setting["key"]), printable(&plain(&setting["value"]))]);
        Ok(())
    })?;
    columns.print()
}

fn delete(key: &str, format: OutputFormat, place: &RecordSource) -> Result<(), CliError> {
    let reply = RecordAccess::open(place, AccessIntent::Look)?.remove(&path(key)?)?;
    if format.json {
        output::print_json(&reply.0)
    } else {
        output::print(&format!("setting '{key}' was removed"))
    }
}
