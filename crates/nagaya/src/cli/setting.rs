//! `nagaya setting`: what rules look up by key, such as the limits of a host by its name.
//!
//! Not here: what a setting must be (`nagaya_cmdb::check`), rules (`nagaya_rules`), where commands work (`output`).

use std::process::ExitCode;

use serde_json::{Value, json};

use super::output::{self, Access, CliError, Columns, Format, Intent, Place, escape, plain, printable};

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Add a setting or replace it
    Set(Set),
    /// Print the value of one setting
    #[command(visible_alias = "show")]
    Get {
        key: String,
        #[command(flatten)]
        format: Format,
    },
    /// List all settings
    List {
        /// Only keys after this one, in order of bytes
        #[arg(long, value_name = "KEY")]
        after: Option<String>,
        #[command(flatten)]
        format: Format,
    },
    /// Remove a setting
    #[command(visible_alias = "remove")]
    Delete {
        key: String,
        #[command(flatten)]
        format: Format,
    },
}

#[derive(Debug, clap::Args)]
pub struct Set {
    pub key: String,
    /// A text
    #[arg(required_unless_present = "json", conflicts_with = "json", allow_hyphen_values = true)]
    pub value: Option<String>,
    /// An object of texts, numbers and booleans in the place of a text, like '{"cpu":50}'
    #[arg(long, value_name = "OBJECT")]
    pub json: Option<String>,
}

pub fn run(command: Command, place: &Place) -> Result<ExitCode, CliError> {
    let text = Format { json: false };
    let (result, format) = match &command {
        Command::Set(set) => (self::set(set, place), text),
        Command::Get { key, format } => (get(key, *format, place), *format),
        Command::List { after, format } => (list(after.as_deref(), *format, place), *format),
        Command::Delete { key, format } => (delete(key, *format, place), *format),
    };
    output::end(result, format)
}

/// An empty key would be the path of the listing.
fn path(key: &str) -> Result<String, CliError> {
    match key {
        "" => Err(CliError::Usage("a setting's key is not empty".into())),
        key => Ok(format!("/v1/settings/{}", escape(key))),
    }
}

fn set(command: &Set, place: &Place) -> Result<(), CliError> {
    let value = match (&command.value, &command.json) {
        (Some(text), _) => json!(text),
        (None, json) => serde_json::from_str(json.as_deref().unwrap_or_default())
            .map_err(|error| CliError::Usage(format!("--json is not JSON: {error}")))?,
    };
    let access = Access::open(place, Intent::Change)?;
    let reply = access.put(&path(&command.key)?, &json!({ "value": value }))?;
    let what = if reply.0["changed"] == json!(true) { "was set" } else { "is as it was" };
    output::print(&format!("setting '{}' {what}; revision {}", command.key, reply.0["revision"]))
}

fn get(key: &str, format: Format, place: &Place) -> Result<(), CliError> {
    let reply = Access::open(place, Intent::Look)?.get(&path(key)?)?;
    let setting = &reply.0["setting"];
    match (format.json, &setting["value"]) {
        (true, _) => output::print_json(setting),
        (false, Value::Object(_)) => output::print_fields(&setting["value"]),
        (false, value) => output::print(&plain(value)),
    }
}

fn list(after: Option<&str>, format: Format, place: &Place) -> Result<(), CliError> {
    let access = Access::open(place, Intent::Look)?;
    if format.json {
        return output::print_json_list(&access, "/v1/settings", "settings", after);
    }
    let mut columns = Columns::new(&["KEY", "VALUE"]);
    access.each("/v1/settings", "settings", after, |setting| {
        columns.add([plain(&setting["key"]), printable(&plain(&setting["value"]))]);
        Ok(())
    })?;
    columns.print()
}

fn delete(key: &str, format: Format, place: &Place) -> Result<(), CliError> {
    let reply = Access::open(place, Intent::Look)?.remove(&path(key)?)?;
    match format.json {
        true => output::print_json(&reply.0),
        false => output::print(&format!("setting '{key}' was removed")),
    }
}
