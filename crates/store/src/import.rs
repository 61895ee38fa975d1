//! Records as JSON lines, each `{"tenant":{...}}`, `{"site":{...}}`, `{"setting":{...}}` or
//! `{"rule":{...}}`. They are written in order of name, tenants first and rules last. They are read
//! back as one transaction, of which either all lines count or none. After them a line
//! `{"uids":{"next":N}}` says which uids were allocated. So a store that replaces this one
//! allocates none of them again.
//!
//! Not here: files and standard input (`nagaya`), rules of records (`check`, `store::plan`).

use std::collections::HashMap;
use std::io::{self, BufRead, Read, Write};

use nagaya_base::Code;
use serde::{Deserialize, Serialize};

use super::contract::WRAPPING_LEN;
use super::{
    ChangeMode, CommittedChanges, RECORD_LEN_MAX, RecordKind, Store, StoreError, TransactionError,
    UID_KEPT_MAX,
};
use nagaya_records::check::{self, RecordFindings};
use nagaya_records::record::{RecordChange, RuleRecord, SETTINGS_MAX, Setting, Site, Tenant};

/// Most lines of one import; all of them are in memory until they are stored. It covers a full
/// store of settings, and a million tenants and sites.
pub const LINES_MAX: usize = 2_000_000;

const _: () = assert!(LINES_MAX as u64 >= 2 * SETTINGS_MAX);

/// Longest line, in bytes: a record and its wrapping, with room for added spaces.
pub const LINE_LEN_MAX: usize = 2 * (RECORD_LEN_MAX + WRAPPING_LEN);

/// Most bad lines that are listed; the others are counted.
pub const BAD_LINES_NAMED_MAX: usize = 20;

/// Error in one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadLine {
    /// Counted from 1. `None` for a record that the file does not name.
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
enum ImportLine {
    Tenant(Box<Tenant>),
    Site(Box<Site>),
    Setting(Setting),
    Rule(RuleRecord),
    Uids(UidTable),
}

/// The uids that were allocated already.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UidTable {
    /// The first uid that was not allocated. At most one more than `UID_KEPT_MAX`.
    next: u32,
}

/// Checks of records that need the caller's knowledge.
pub struct RecordChecks<'a> {
    /// Adds mistakes in a tenant's ids on this machine.
    pub tenant: &'a dyn Fn(&Tenant, &mut RecordFindings),
    /// Returns the mistake in the text of a rule, if any.
    pub rule: &'a dyn Fn(&RuleRecord) -> Option<String>,
}

/// Checks nothing that depends on the machine.
const NO_CHECKS: RecordChecks<'static> = RecordChecks { tenant: &|_, _| {}, rule: &|_| None };

/// Stores all lines, or stores none and reports the bad lines. Blank lines are skipped. Texts of
/// rules, and ids that only this machine refuses, are accepted as they are.
pub fn import(
    store: &dyn Store,
    lines: impl BufRead,
    mode: ChangeMode,
) -> Result<CommittedChanges, ImportError> {
    read_batch(lines, &NO_CHECKS)?.store(store, mode)
}

/// Reads all lines and checks each for itself; `ImportBatch::store` checks dependencies on other
/// records. It is a separate step, so that the serializer of changes need not wait for a slow
/// source.
pub fn read_batch(lines: impl BufRead, checks: &RecordChecks<'_>) -> Result<ImportBatch, ImportError> {
    let (batch, bad) = read_lines(lines, checks)?;
    if bad.count > 0 { Err(bad.into_error()) } else { Ok(batch) }
}

/// The records of an import, each valid in itself.
#[derive(Debug, Default)]
pub struct ImportBatch {
    changes: Vec<RecordChange>,
    /// The line of each change.
    lines: Vec<u64>,
    /// Uids below it were allocated at the source of the lines.
    next_uid: Option<u32>,
}

impl ImportBatch {
    pub fn store(self, store: &dyn Store, mode: ChangeMode) -> Result<CommittedChanges, ImportError> {
        // This comes first: if the lines are refused, some uids stay unused, which does no harm.
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

/// Writes all records that people decide, and which uids were allocated. Nodes, placements and keys
/// belong to the cluster, and another cluster has its own. Returns the revision of the written
/// state.
pub fn export(store: &dyn Store, to: &mut dyn Write) -> Result<u64, StoreError> {
    let next = store.next_uid()?;
    let revision = store.walk(&mut |kind, json| {
        let key = match kind {
            RecordKind::Tenant => "tenant",
            RecordKind::Site => "site",
            RecordKind::Setting => "setting",
            RecordKind::Rule => "rule",
            RecordKind::Node | RecordKind::Placement | RecordKind::TicketKeys => return Ok(()),
        };
        writeln!(to, "{{\"{key}\":{json}}}")
    })?;
    if next > 0 {
        let next = next.min(UID_KEPT_MAX + 1);
        writeln!(to, "{}", serde_json::json!({ "uids": UidTable { next } })).map_err(StoreError::Visitor)?;
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

fn read_lines(
    mut from: impl BufRead,
    checks: &RecordChecks<'_>,
) -> Result<(ImportBatch, BadLines), ImportError> {
    let mut batch = ImportBatch::default();
    let mut bad = BadLines::default();
    // First line of each name, so that a second record of one name does not win silently.
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
                    ImportLine::Rule(rule) => {
                        (checks.rule)(rule).into_iter().for_each(|wrong| bad.add(Some(line), wrong));
                    }
                    ImportLine::Tenant(tenant) => {
                        let mut to = RecordFindings::of_tenant(&tenant.name, None);
                        (checks.tenant)(tenant, &mut to);
                        to.mistakes.iter().for_each(|wrong| bad.add(Some(line), wrong.to_string()));
                    }
                    ImportLine::Site(_) | ImportLine::Setting(_) | ImportLine::Uids(_) => {}
                }
                take(record, line, &mut batch, &mut bad, &mut seen);
            }
            Err(error) => bad.add(Some(line), what_is_wrong(&error)),
        }
    }
    Ok((batch, bad))
}

fn take(
    record: ImportLine,
    line: u64,
    batch: &mut ImportBatch,
    bad: &mut BadLines,
    seen: &mut HashMap<(&'static str, String), u64>,
) {
    let (key, to, change) = match record {
        ImportLine::Tenant(tenant) => {
            let mut to = RecordFindings::of_tenant(&tenant.name, None);
            check::tenant(&tenant, &mut to);
            (("tenant", tenant.name.to_string()), to, RecordChange::PutTenant(tenant))
        }
        ImportLine::Site(site) => {
            let mut to = RecordFindings::of_site(&site.name, None);
            check::site(&site, &mut to);
            (("site", site.name.to_string()), to, RecordChange::PutSite(site))
        }
        ImportLine::Setting(setting) => {
            let mut to = RecordFindings::of_setting(&setting.key, None);
            check::setting(&setting, &mut to);
            (("setting", setting.key.to_string()), to, RecordChange::PutSetting(setting))
        }
        ImportLine::Uids(UidTable { next }) => {
            if next > UID_KEPT_MAX + 1 {
                bad.add(
                    Some(line),
                    format!("uids: next: '{next}' is too large: at most {}", UID_KEPT_MAX + 1),
                );
            }
            batch.next_uid = batch.next_uid.max(Some(next));
            return;
        }
        ImportLine::Rule(rule) => {
            let mut to = RecordFindings::of_rule(&rule.name, None);
            check::rule(&rule, &mut to);
            (("rule", rule.name.to_string()), to, RecordChange::PutRule(rule))
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

/// Serde counts lines, too, and each of ours is its first.
fn what_is_wrong(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or(&text);
    let hint = if text.contains("missing field `uid`") {
        ": an import does not choose uids; `nagaya tenant add` does"
    } else {
        ""
    };
    format!("{text} (column {}){hint}", error.column())
}

/// Skips the rest of a line that is too long.
fn skip_line(from: &mut impl BufRead, begun: &[u8]) -> io::Result<()> {
    if begun.ends_with(b"\n") {
        return Ok(());
    }
    from.skip_until(b'\n').map(|_| ())
}
