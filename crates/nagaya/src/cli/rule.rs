//! `nagaya rule`: rules that the store keeps, for every node whose configuration names them.
//!
//! Not here: Ruby (`nagaya_rules`), the process that checks it (`rule_check`), when a rule runs (`[[rules]]` in the configuration), where commands work (`output`).

use std::fs::File;
use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nagaya_cmdb::record::RULE_TEXT_LEN_MAX;
use serde_json::json;

use super::output::{self, Access, CliError, Columns, Format, Intent, Place, escape, plain};
use crate::admin::{Problem, place_and_message};
use crate::rule_check;

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Add a rule or replace it; in force with the next request
    Set(Set),
    /// List all rules
    List(Format),
    /// Print the text of a rule
    #[command(visible_alias = "get")]
    Show {
        name: String,
        #[command(flatten)]
        format: Format,
    },
    /// Remove a rule; where it is named, it is a missing file then
    #[command(visible_alias = "delete")]
    Remove {
        name: String,
        #[command(flatten)]
        format: Format,
    },
}

#[derive(Debug, clap::Args)]
pub struct Set {
    /// As configuration names it: file = "store:NAME"
    pub name: String,
    /// The file with its text; '-' is standard input
    pub file: PathBuf,
}

pub fn run(command: Command, place: &Place) -> Result<ExitCode, CliError> {
    let text = Format { json: false };
    let (result, format) = match &command {
        Command::Set(set) => (self::set(set, place), text),
        Command::List(format) => (list(*format, place), *format),
        Command::Show { name, format } => (show(name, *format, place), *format),
        Command::Remove { name, format } => (remove(name, *format, place), *format),
    };
    output::end(result, format)
}

/// An empty name would be the path of the listing.
fn path(name: &str) -> Result<String, CliError> {
    match name {
        "" => Err(CliError::Usage("a rule's name is not empty".into())),
        name => Ok(format!("/v1/rules/{}", escape(name))),
    }
}

fn set(command: &Set, place: &Place) -> Result<(), CliError> {
    let path = path(&command.name)?;
    let text = read(&command.file)?;
    // The node does so, too, but knows neither the file nor whether it was one.
    let file =
        if command.file == Path::new("-") { "standard input".into() } else { command.file.to_string_lossy() };
    rule_check::check(text.as_bytes(), &file).map_err(|fault| {
        CliError::Refused(Problem::broken_rule(fault.kind.code(), place_and_message(&fault)))
    })?;
    let reply = Access::open(place, Intent::Change)?.put(&path, &json!({ "text": text }))?;
    let what = if reply.0["changed"] == json!(true) { "was set" } else { "is as it was" };
    output::print(&format!("rule '{}' {what}; revision {}", command.name, reply.0["revision"]))
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

fn list(format: Format, place: &Place) -> Result<(), CliError> {
    let access = Access::open(place, Intent::Look)?;
    if format.json {
        return output::print_json_list(&access, "/v1/rules", "rules", None);
    }
    let mut columns = Columns::new(&["NAME", "LINES", "BYTES"]);
    access.each("/v1/rules", "rules", None, |rule| {
        columns.add([plain(&rule["name"]), plain(&rule["lines"]), plain(&rule["bytes"])]);
        Ok(())
    })?;
    columns.print()
}

/// Exactly the text, so that it can be changed and set again.
fn show(name: &str, format: Format, place: &Place) -> Result<(), CliError> {
    let path = path(name)?;
    let reply = Access::open(place, Intent::Look)?.get(&path)?;
    let rule = &reply.0["rule"];
    if format.json {
        return output::print_json(rule);
    }
    let mut out = io::stdout().lock();
    let text = rule["text"].as_str().unwrap_or_default();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(CliError::Output)
}

fn remove(name: &str, format: Format, place: &Place) -> Result<(), CliError> {
    let path = path(name)?;
    let reply = Access::open(place, Intent::Look)?.remove(&path)?;
    match format.json {
        true => output::print_json(&reply.0),
        false => output::print(&format!("rule '{name}' was removed")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(dir: &Path) -> Place {
        Place {
            admin_socket: dir.join("admin.sock"),
            store: dir.join("store.redb"),
            member: dir.join("member.json"),
            ids: crate::tenant_ids::IdSource::from_base(7000),
        }
    }

    fn put(dir: &Path, text: &[u8]) -> Result<(), CliError> {
        let file = dir.join("a.rb");
        std::fs::write(&file, text).unwrap();
        set(&Set { name: "a".into(), file }, &place(dir))
    }

    fn stored(dir: &Path) -> String {
        let reply = Access::open(&place(dir), Intent::Look).unwrap().get("/v1/rules/a").unwrap();
        plain(&reply.0["rule"]["text"])
    }

    #[test]
    fn a_rule_is_kept_as_it_was_written_and_a_broken_one_is_refused_with_its_line() {
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
        remove("a", Format { json: false }, &place(dir.path())).unwrap();
        let error = show("a", Format { json: true }, &place(dir.path())).unwrap_err();
        assert_eq!(error.code().as_deref(), Some("NGY0211"));
    }

    #[test]
    fn an_empty_name_is_no_listing() {
        let dir = tempfile::tempdir().unwrap();
        let error = remove("", Format { json: false }, &place(dir.path())).unwrap_err();
        assert!(matches!(error, CliError::Usage(_)), "{error}");
    }
}
