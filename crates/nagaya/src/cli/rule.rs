//! `nagaya rule`: rules in the store, for every node whose configuration names them.
//!
//! Not here: Ruby (`nagaya_rules`), the process that checks it (`rule_check`), when a rule runs
//! (`[[rules]]` in the configuration), access to records (`output`).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nagaya_records::record::RULE_TEXT_LEN_MAX;
use nagaya_rules::RulePhase;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use super::output::{
    self, AccessIntent, CliError, OutputFormat, RecordAccess, RecordSource, TableColumns, escape, plain,
    printable,
};
use crate::admin::{ProblemReply, place_and_message};
use crate::rule_check;
use crate::rule_test::{CaseOutcome, RuleQuestion, TestCase};

/// Settings that a trial of a rule can see.
const SETTINGS_MAX: usize = 100_000;

#[derive(Debug, clap::Subcommand)]
pub enum RuleArgs {
    /// Add or replace a rule. It applies from the next request on
    Set(RuleSetArgs),
    /// Show how a rule would decide about a request; nothing changes
    Test(Box<RuleTestArgs>),
    /// List all rules
    List(OutputFormat),
    /// Print the text of a rule
    #[command(visible_alias = "get")]
    Show {
        name: String,
        #[command(flatten)]
        format: OutputFormat,
    },
    /// Remove a rule. Nodes that name it then miss its file
    #[command(visible_alias = "delete")]
    Remove {
        name: String,
        #[command(flatten)]
        format: OutputFormat,
    },
}

#[derive(Debug, clap::Args)]
pub struct RuleSetArgs {
    /// Name as in the configuration: file = "store:NAME"
    pub name: String,
    /// File with the text of the rule; '-' is standard input
    pub file: PathBuf,
}

#[derive(Debug, clap::Args)]
pub struct RuleTestArgs {
    /// File with the text of the rule; '-' is standard input
    pub file: PathBuf,
    /// Host name of the request
    #[arg(long)]
    pub host: String,
    /// Path of the request, with its query if it has one
    #[arg(long, default_value = "/")]
    pub path: String,
    /// Method of the request
    #[arg(long, default_value = "GET")]
    pub method: String,
    /// Scheme of the request
    #[arg(long, default_value = "https", value_parser = ["http", "https"])]
    pub scheme: String,
    /// Address of the client
    #[arg(long, default_value = "192.0.2.1")]
    pub address: std::net::IpAddr,
    /// A header field, like 'User-Agent: bot'; repeat for more
    #[arg(long = "header", value_name = "NAME: VALUE", value_parser = header)]
    pub headers: Vec<(String, String)>,
    /// Name of the requested site
    #[arg(long)]
    pub site: Option<String>,
    /// Name of the site's tenant
    #[arg(long)]
    pub tenant: Option<String>,
    /// Phase of the rule, as in the configuration
    #[arg(long, default_value = "access_checker", value_parser = phase)]
    pub phase: RulePhase,
    #[command(flatten)]
    pub format: OutputFormat,
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("write NAME: VALUE")?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

fn phase(word: &str) -> Result<RulePhase, String> {
    let known = RulePhase::ALL.map(RulePhase::as_str);
    RulePhase::ALL.into_iter().find(|phase| phase.as_str() == word).ok_or(format!("use {}", known.join(", ")))
}

pub fn run(command: RuleArgs, place: &RecordSource) -> Result<ExitCode, CliError> {
    let text = OutputFormat { json: false };
    let (result, format) = match &command {
        RuleArgs::Set(set) => (self::set(set, place), text),
        RuleArgs::Test(test) => return self::test(test, place),
        RuleArgs::List(format) => (list(*format, place), *format),
        RuleArgs::Show { name, format } => (show(name, *format, place), *format),
        RuleArgs::Remove { name, format } => (remove(name, *format, place), *format),
    };
    output::end(result, format)
}

/// Returns the path. An empty name would be the path of the listing.
fn path(name: &str) -> Result<String, CliError> {
    match name {
        "" => Err(CliError::Usage("a rule's name is not empty".into())),
        name => Ok(format!("/v1/rules/{}", escape(name))),
    }
}

fn set(command: &RuleSetArgs, place: &RecordSource) -> Result<(), CliError> {
    let path = path(&command.name)?;
    let text = read(&command.file)?;
    // The node checks it, too, but does not know the file.
    let file = name_of(&command.file);
    rule_check::check(text.as_bytes(), &file).map_err(|fault| {
        CliError::Refused(ProblemReply::broken_rule(fault.kind.code(), place_and_message(&fault)))
    })?;
    let reply = RecordAccess::open(place, AccessIntent::Change)?.put(&path, &json!({ "text": text }))?;
    let what = if reply.0["changed"] == json!(true) { "was set" } else { "is as it was" };
    output::print(&format!("rule '{}' {what}; revision {}", command.name, reply.0["revision"]))
}

/// Tries a rule. Exit status 1 if the rule fails or one of its decisions is refused.
fn test(command: &RuleTestArgs, place: &RecordSource) -> Result<ExitCode, CliError> {
    let file = name_of(&command.file);
    let text = read(&command.file)?;
    let (path, query) =
        command.path.split_once('?').map_or((&*command.path, None), |(path, query)| (path, Some(query)));
    let case = TestCase {
        phase: Some(command.phase),
        method: command.method.clone(),
        scheme: command.scheme.clone(),
        host: command.host.to_ascii_lowercase(),
        path: percent_decode_str(path).decode_utf8_lossy().into_owned(),
        query: query.map(ToOwned::to_owned),
        address: command.address.to_string(),
        site: command.site.clone(),
        tenant: command.tenant.clone(),
        headers: command.headers.clone(),
        settings: settings(place),
    };
    let outcome = rule_check::test(&RuleQuestion { text, case }, &file);
    if command.format.json {
        output::print_json(&json!(outcome))?;
    } else {
        output::print(&describe(&outcome))?;
    }
    Ok(if outcome.faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn describe(outcome: &CaseOutcome) -> String {
    let decided = outcome.decided.iter().map(|line| printable(line));
    let log = outcome.log.iter().map(|line| format!("log: {}", printable(line)));
    let faults = outcome.faults.iter().map(|fault| format!("REFUSED: {}", printable(&fault.to_string())));
    let lines: Vec<String> = decided.chain(log).chain(faults).collect();
    if lines.is_empty() { "it decides nothing".into() } else { lines.join("\n") }
}

/// Returns the settings of the store, if there is one: a rule can be tried on a machine without it.
fn settings(place: &RecordSource) -> BTreeMap<String, Value> {
    let mut settings = BTreeMap::new();
    let Ok(access) = RecordAccess::open(place, AccessIntent::Look) else { return settings };
    // The list up to an error is as valid as without one.
    let _ = access.each("/v1/settings", "settings", None, |setting| {
        if settings.len() < SETTINGS_MAX {
            settings.insert(plain(&setting["key"]), setting["value"].clone());
        }
        Ok(())
    });
    settings
}

fn name_of(file: &Path) -> Cow<'_, str> {
    if file == Path::new("-") { "standard input".into() } else { file.to_string_lossy() }
}

fn read(file: &Path) -> Result<String, CliError> {
    let failed = |error| CliError::Io { path: file.into(), error };
    let source: Box<dyn Read> = if file == Path::new("-") {
        Box::new(io::stdin())
    } else {
        Box::new(File::open(file).map_err(failed)?)
    };
    let mut text = Vec::new();
    source.take(RULE_TEXT_LEN_MAX as u64 + 1).read_to_end(&mut text).map_err(failed)?;
    if text.len() > RULE_TEXT_LEN_MAX {
        let why = format!("is longer than {RULE_TEXT_LEN_MAX} bytes; keep lists of hosts as settings");
        return Err(failed(io::Error::new(io::ErrorKind::FileTooLarge, why)));
    }
    String::from_utf8(text).map_err(|error| failed(io::Error::new(io::ErrorKind::InvalidData, error)))
}

fn list(format: OutputFormat, place: &RecordSource) -> Result<(), CliError> {
    let access = RecordAccess::open(place, AccessIntent::Look)?;
    if format.json {
        return output::print_json_list(&access, "/v1/rules", "rules", None);
    }
    let mut columns = TableColumns::new(&["NAME", "LINES", "BYTES"]);
    access.each("/v1/rules", "rules", None, |rule| {
        columns.add([plain(&rule["name"]), plain(&rule["lines"]), plain(&rule["bytes"])]);
        Ok(())
    })?;
    columns.print()
}

/// Prints exactly the text, so that it can be changed and set again.
fn show(name: &str, format: OutputFormat, place: &RecordSource) -> Result<(), CliError> {
    let path = path(name)?;
    let reply = RecordAccess::open(place, AccessIntent::Look)?.get(&path)?;
    let rule = &reply.0["rule"];
    if format.json {
        return output::print_json(rule);
    }
    let mut out = io::stdout().lock();
    let text = rule["text"].as_str().unwrap_or_default();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(CliError::Output)
}

fn remove(name: &str, format: OutputFormat, place: &RecordSource) -> Result<(), CliError> {
    let path = path(name)?;
    let reply = RecordAccess::open(place, AccessIntent::Look)?.remove(&path)?;
    if format.json {
        output::print_json(&reply.0)
    } else {
        output::print(&format!("rule '{name}' was removed"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(dir: &Path) -> RecordSource {
        RecordSource {
            admin_socket: dir.join("admin.sock"),
            store: dir.join("store.redb"),
            member: dir.join("member.json"),
            ids: crate::tenant_ids::IdSource::from_base(7000),
        }
    }

    fn put(dir: &Path, text: &[u8]) -> Result<(), CliError> {
        let file = dir.join("a.rb");
        std::fs::write(&file, text).unwrap();
        set(&RuleSetArgs { name: "a".into(), file }, &place(dir))
    }

    fn stored(dir: &Path) -> String {
        let reply = RecordAccess::open(&place(dir), AccessIntent::Look).unwrap().get("/v1/rules/a").unwrap();
        plain(&reply.0["rule"]["text"])
    }

    #[test]
    fn a_rule_is_kept_as_written_and_a_broken_one_names_its_line() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), b"x = \"\xc3\xbc\"\n\n").unwrap();
        assert_eq!(stored(dir.path()), "x = \"\u{fc}\"\n\n");
        let error = put(dir.path(), b"x = 1\nif x ==\nend\n").unwrap_err();
        let place_in_file = format!("{}:3: ", dir.path().join("a.rb").display());
        assert!(error.to_string().starts_with(&place_in_file), "{error}");
        assert_eq!(error.code().as_deref(), Some("NGY0602"));
        assert!(matches!(put(dir.path(), &vec![b'#'; RULE_TEXT_LEN_MAX + 1]), Err(CliError::Io { .. })));
        assert!(matches!(put(dir.path(), b"\xff"), Err(CliError::Io { .. })));
        assert_eq!(stored(dir.path()), "x = \"\u{fc}\"\n\n", "what was refused changed nothing");
        remove("a", OutputFormat { json: false }, &place(dir.path())).unwrap();
        let error = show("a", OutputFormat { json: true }, &place(dir.path())).unwrap_err();
        assert_eq!(error.code().as_deref(), Some("NGY0211"));
    }

    #[test]
    fn an_empty_name_is_no_listing() {
        let dir = tempfile::tempdir().unwrap();
        let error = remove("", OutputFormat { json: false }, &place(dir.path())).unwrap_err();
        assert!(matches!(error, CliError::Usage(_)), "{error}");
    }
}
