//! Records as JSON lines, each `{"tenant":{...}}`, `{"site":{...}}`, `{"setting":{...}}` or `{"rule":{...}}`: written in order of
//! name, tenants first and rules last, and read back as one transaction, of which either all lines count or none.
//!
//! Not here: files and standard input (`nagaya`), rules of records (`check`, `store::plan`).

use std::collections::HashMap;
use std::io::{self, BufRead, Read, Write};

use nagaya_base::Code;
use serde::{Deserialize, Serialize};

use super::{Committed, Kind, Mode, RECORD_LEN_MAX, Store, StoreError, TransactionError, WRAPPING_LEN};
use crate::check::{self, Findings};
use crate::record::{Change, Rule, SETTINGS_MAX, Setting, Site, Tenant};

/// Most lines of one import; all of them are in memory until they are stored. As many settings as a store holds, and
/// a million tenants and sites.
pub const LINES_MAX: usize = 2_000_000;

const _: () = assert!(LINES_MAX as u64 >= 2 * SETTINGS_MAX);

/// Longest line, in bytes: a record and its wrapping, with room for spaces that people put there.
pub const LINE_LEN_MAX: usize = 2 * (RECORD_LEN_MAX + WRAPPING_LEN);

/// Most bad lines that are named; the others are counted.
pub const BAD_LINES_NAMED_MAX: usize = 20;

/// What is wrong with one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadLine {
    /// Counted from 1. None: a record the file does not name.
    pub line: Option<u64>,
    pub message: String,
}

/// Why an import changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("reading the lines: {0}")]
    Read(io::Error),
    #[error("line {line}: more than {LINES_MAX} lines: import in parts (without --replace)")]
    TooLong { line: u64 },
    #[error("{}", refused(.named, *.count))]
    Refused {
        /// The first `BAD_LINES_NAMED_MAX`, in order of line.
        named: Vec<BadLine>,
        count: u64,
    },
}

impl ImportError {
    pub fn code(&self) -> Code {
        match self {
            Self::Store(error) => error.code(),
            Self::Read(_) => Code(213),
            Self::TooLong { .. } => Code(214),
            Self::Refused { .. } => Code(212),
        }
    }
}

fn refused(named: &[BadLine], count: u64) -> String {
    let mut text = String::from("nothing was changed:");
    for bad in named {
        match bad.line {
            Some(line) => text.push_str(&format!("\nline {line}: {}", bad.message)),
            None => text.push_str(&format!("\n{}", bad.message)),
        }
    }
    let rest = count - named.len() as u64;
    if rest > 0 {
        text.push_str(&format!("\nand {rest} more"));
    }
    text
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Tenant(Box<Tenant>),
    Site(Box<Site>),
    Setting(Setting),
    Rule(Rule),
}

/// What is wrong with the text of a rule, if anything is. Whoever compiles rules knows.
pub type CheckRule<'a> = &'a dyn Fn(&Rule) -> Option<String>;

/// Stores all lines, or none and says what is wrong with which. Blank lines are passed over. Texts of rules are taken as they are.
pub fn import(store: &dyn Store, lines: impl BufRead, mode: Mode) -> Result<Committed, ImportError> {
    read(lines, &|_| None)?.store(store, mode)
}

/// Reads all lines and checks each for itself; what depends on other records is checked by `Batch::store`.
/// Apart, so that whoever serializes changes need not wait for a slow source.
pub fn read(lines: impl BufRead, check_rule: CheckRule<'_>) -> Result<Batch, ImportError> {
    let (batch, bad) = read_lines(lines, check_rule)?;
    if bad.count > 0 { Err(bad.into_error()) } else { Ok(batch) }
}

/// The records of an import, each right in itself.
#[derive(Debug, Default)]
pub struct Batch {
    changes: Vec<Change>,
    /// The line of each change.
    lines: Vec<u64>,
}

impl Batch {
    pub fn store(self, store: &dyn Store, mode: Mode) -> Result<Committed, ImportError> {
        match store.transaction(self.changes, mode) {
            Ok(committed) => Ok(committed),
            Err(TransactionError::Store(error)) => Err(error.into()),
            Err(TransactionError::Refused(mistakes)) => {
                let mut bad = BadLines::default();
                for mistake in mistakes {
                    bad.add(mistake.index.map(|index| self.lines[index]), mistake.to_string());
                }
                Err(bad.into_error())
            }
        }
    }
}

/// Writes all that people decided: nodes, placements and keys are the cluster's own, and another cluster has others. Returns the
/// revision it shows.
pub fn export(store: &dyn Store, to: &mut dyn Write) -> Result<u64, StoreError> {
    store.walk(&mut |kind, json| {
        let key = match kind {
            Kind::Tenant => "tenant",
            Kind::Site => "site",
            Kind::Setting => "setting",
            Kind::Rule => "rule",
            Kind::Node | Kind::Placement | Kind::TicketKeys => return Ok(()),
        };
        writeln!(to, "{{\"{key}\":{json}}}")
    })
}

#[derive(Debug, Default)]
struct BadLines {
    named: Vec<BadLine>,
    count: u64,
}

impl BadLines {
    fn add(&mut self, line: Option<u64>, message: String) {
        self.count += 1;
        if self.named.len() < BAD_LINES_NAMED_MAX {
            self.named.push(BadLine { line, message });
        }
    }

    fn into_error(self) -> ImportError {
        ImportError::Refused { named: self.named, count: self.count }
    }
}

fn read_lines(mut from: impl BufRead, check_rule: CheckRule<'_>) -> Result<(Batch, BadLines), ImportError> {
    let (mut batch, mut bad) = (Batch::default(), BadLines::default());
    // Where each name was first seen, so that a second record of one name is not silently the winner.
    let mut seen: HashMap<(&'static str, String), u64> = HashMap::new();
    let mut text = Vec::new();
    for line in 1.. {
        text.clear();
        let len = from
            .by_ref()
            .take(LINE_LEN_MAX as u64 + 1)
            .read_until(b'\n', &mut text)
            .map_err(ImportError::Read)?;
        if len == 0 {
            break;
        }
        if len > LINE_LEN_MAX {
            bad.add(Some(line), format!("is longer than {LINE_LEN_MAX} bytes"));
            skip_line(&mut from, &text).map_err(ImportError::Read)?;
            continue;
        }
        if text.trim_ascii().is_empty() {
            continue;
        }
        if batch.changes.len() == LINES_MAX {
            return Err(ImportError::TooLong { line });
        }
        match serde_json::from_slice(&text) {
            Ok(record) => {
                if let Line::Rule(rule) = &record
                    && let Some(wrong) = check_rule(rule)
                {
                    bad.add(Some(line), wrong);
                }
                take(record, line, &mut batch, &mut bad, &mut seen);
            }
            Err(error) => bad.add(Some(line), what_is_wrong(&error)),
        }
    }
    Ok((batch, bad))
}

fn take(
    record: Line,
    line: u64,
    batch: &mut Batch,
    bad: &mut BadLines,
    seen: &mut HashMap<(&'static str, String), u64>,
) {
    let (key, to, change) = match record {
        Line::Tenant(tenant) => {
            let mut to = Findings::of_tenant(&tenant.name, None);
            check::tenant(&tenant, &mut to);
            (("tenant", tenant.name.to_string()), to, Change::PutTenant(tenant))
        }
        Line::Site(site) => {
            let mut to = Findings::of_site(&site.name, None);
            check::site(&site, &mut to);
            (("site", site.name.to_string()), to, Change::PutSite(site))
        }
        Line::Setting(setting) => {
            let mut to = Findings::of_setting(&setting.key, None);
            check::setting(&setting, &mut to);
            (("setting", setting.key.to_string()), to, Change::PutSetting(setting))
        }
        Line::Rule(rule) => {
            let mut to = Findings::of_rule(&rule.name, None);
            check::rule(&rule, &mut to);
            (("rule", rule.name.to_string()), to, Change::PutRule(rule))
        }
    };
    for mistake in to.mistakes {
        bad.add(Some(line), mistake.to_string());
    }
    let (kind, name) = key.clone();
    let first = *seen.entry(key).or_insert(line);
    if first != line {
        bad.add(Some(line), format!("{kind} '{name}' already stands in line {first}"));
    }
    batch.changes.push(change);
    batch.lines.push(line);
}

/// Serde counts lines too, and each of ours is its first.
fn what_is_wrong(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or(&text);
    let hint = match text.contains("missing field `uid`") {
        true => ": an import does not choose uids; `nagaya tenant add` does",
        false => "",
    };
    format!("{text} (column {}){hint}", error.column())
}

/// Passes over the rest of a line that was too long to keep.
fn skip_line(from: &mut impl BufRead, begun: &[u8]) -> io::Result<()> {
    if begun.ends_with(b"\n") {
        return Ok(());
    }
    from.skip_until(b'\n').map(|_| ())
}
