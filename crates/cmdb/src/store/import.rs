//! Records as JSON lines, each `{"tenant":{...}}`, `{"site":{...}}`, `{"setting":{...}}` or `{"rule":{...}}`: written in order of
//! name, tenants first and rules last, and read back as one transaction, of which either all lines count or none. After them a line
//! `{"uids":{"next":N}}` says which uids were given out, so that a store that takes this one's place gives none of them out again.
//!
//! Not here: files and standard input (`nagaya`), rules of records (`check`, `store::plan`).

use std::collections::HashMap;
use std::io::{self, BufRead, Read, Write};

use nagaya_base::Code;
use serde::{Deserialize, Serialize};

use super::{
    Committed, Kind, Mode, RECORD_LEN_MAX, Store, StoreError, TransactionError, UID_KEPT_MAX, WRAPPING_LEN,
};
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
    Uids(Uids),
}

/// Which uids were given out already.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Uids {
    /// The first that was not. At most one more than `UID_KEPT_MAX`.
    next: u32,
}

/// Checks of records by what only the caller knows.
pub struct Checks<'a> {
    /// Adds what is wrong with a tenant's ids on this machine.
    pub tenant: &'a dyn Fn(&Tenant, &mut Findings),
    /// Returns what is wrong with the text of a rule, if anything is.
    pub rule: &'a dyn Fn(&Rule) -> Option<String>,
}

/// Nothing that depends on the machine is checked.
const NO_CHECKS: Checks<'static> = Checks { tenant: &|_, _| {}, rule: &|_| None };

/// Stores all lines, or none and says what is wrong with which. Blank lines are passed over. Texts of rules, and ids that only this machine refuses,
/// are taken as they are.
pub fn import(store: &dyn Store, lines: impl BufRead, mode: Mode) -> Result<Committed, ImportError> {
    read(lines, &NO_CHECKS)?.store(store, mode)
}

/// Reads all lines and checks each for itself; what depends on other records is checked by `Batch::store`.
/// Apart, so that whoever serializes changes need not wait for a slow source.
pub fn read(lines: impl BufRead, checks: &Checks<'_>) -> Result<Batch, ImportError> {
    let (batch, bad) = read_lines(lines, checks)?;
    if bad.count > 0 { Err(bad.into_error()) } else { Ok(batch) }
}

/// The records of an import, each right in itself.
#[derive(Debug, Default)]
pub struct Batch {
    changes: Vec<Change>,
    /// The line of each change.
    lines: Vec<u64>,
    /// Uids below it were given out where the lines come from.
    next_uid: Option<u32>,
}

impl Batch {
    pub fn store(self, store: &dyn Store, mode: Mode) -> Result<Committed, ImportError> {
        // First: if the lines are refused, some uids stay unused, which nobody misses.
        if let Some(next) = self.next_uid {
            store.raise_next_uid(next)?;
        }
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

/// Writes all that people decided, and which uids were given out: nodes, placements and keys are the cluster's own, and another cluster has others. Returns the
/// revision it shows.
pub fn export(store: &dyn Store, to: &mut dyn Write) -> Result<u64, StoreError> {
    let next = store.next_uid()?;
    let revision = store.walk(&mut |kind, json| {
        let key = match kind {
            Kind::Tenant => "tenant",
            Kind::Site => "site",
            Kind::Setting => "setting",
            Kind::Rule => "rule",
            Kind::Node | Kind::Placement | Kind::TicketKeys => return Ok(()),
        };
        writeln!(to, "{{\"{key}\":{json}}}")
    })?;
    if next > 0 {
        let next = next.min(UID_KEPT_MAX + 1);
        writeln!(to, "{}", serde_json::json!({ "uids": Uids { next } })).map_err(StoreError::Visitor)?;
    }
    Ok(revision)
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

fn read_lines(mut from: impl BufRead, checks: &Checks<'_>) -> Result<(Batch, BadLines), ImportError> {
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
                match &record {
                    Line::Rule(rule) => {
                        (checks.rule)(rule).into_iter().for_each(|wrong| bad.add(Some(line), wrong));
                    }
                    Line::Tenant(tenant) => {
                        let mut to = Findings::of_tenant(&tenant.name, None);
                        (checks.tenant)(tenant, &mut to);
                        to.mistakes.iter().for_each(|wrong| bad.add(Some(line), wrong.to_string()));
                    }
                    Line::Site(_) | Line::Setting(_) | Line::Uids(_) => {}
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
        Line::Uids(Uids { next }) => {
            if next > UID_KEPT_MAX + 1 {
                bad.add(
                    Some(line),
                    format!("uids: next: '{next}' is too large: at most {}", UID_KEPT_MAX + 1),
                );
            }
            batch.next_uid = batch.next_uid.max(Some(next));
            return;
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
