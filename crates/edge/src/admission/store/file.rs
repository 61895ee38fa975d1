//! Reads and writes the file of tickets: one redb file in a directory of the edge's own.
//!
//! | table | key | value |
//! |---|---|---|
//! | `meta` | `format` | number |
//! | `promised` | nonce | lane, begin and end of the slot (us), epoch, client |
//! | `called` | nonce of a promised one | nothing |
//! | `spent` | nonce | lane, until when to remember it |
//! | `over` | from when on it is not needed, nonce | nothing |
//! | `paced` | lane | time a request takes in a line (us), when that was stored |
//! | `keys` | id | its 32 bytes in two halves, when it was made, its end (0: it signs) |
//!
//! A format is never changed in place. A new one gets a new number and a migration when it is
//! opened. A file without `called` or `paced` has the same format, also for a program that knows
//! neither. Calls only bring a holder in before the slot, and a pace is learned again. Not here:
//! when to write, and the handling of errors (`store`).

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use nagaya_admission::{ClientKey, LaneName, Moment, Nonce, Ticket, TicketKeyring, TicketRecord};
use redb::{
    Builder, Database, ReadTransaction, ReadableDatabase, ReadableTable, ReadableTableMetadata, Table,
    TableDefinition, TableError, WriteTransaction,
};
use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;

use crate::admission::store::StoredTickets;

/// The format this program writes and reads.
const FORMAT: u64 = 1;

const NAME: &str = "tickets.redb";

/// Markers in the names of files that were set aside, and of files under construction.
const DAMAGED: &str = ".damaged-";
const DRAFT: &str = ".new";

/// Maximum number of damaged files kept for inspection. The oldest ones are deleted.
const DAMAGED_MAX: usize = 3;

/// Memory for cached pages of the database: 10,000 tickets take about 2 MB.
const CACHE_BYTES: usize = 4 << 20;

/// Time for which a key signs.
pub(super) const KEY_FOR: Duration = Duration::from_secs(30 * 86_400);

/// Additional time for which an old key is kept after the last known ticket. It covers tickets
/// that were being signed at the change.
const KEY_MARGIN: Duration = Duration::from_secs(3_600);

/// Number of expired records removed with each transaction, in addition to twice the number it
/// adds.
const OVER_MAX: usize = 256;

/// Maximum number of lanes whose pace is kept. Those stored longest ago are deleted.
const PACED_MAX: u64 = 16_384;

type PromisedTuple = (u128, u64, u64, u32, u64);
type SpentTuple = (u128, u64);
type PacedTuple = (u64, u64);
type KeyTuple = (u128, u128, u64, u64);

const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const PROMISED: TableDefinition<'_, u128, PromisedTuple> = TableDefinition::new("promised");
const CALLED: TableDefinition<'_, u128, ()> = TableDefinition::new("called");
const SPENT: TableDefinition<'_, u128, SpentTuple> = TableDefinition::new("spent");
const PACED: TableDefinition<'_, u128, PacedTuple> = TableDefinition::new("paced");
const OVER: TableDefinition<'_, (u64, u128), ()> = TableDefinition::new("over");
const KEYS: TableDefinition<'_, u32, KeyTuple> = TableDefinition::new("keys");

#[derive(Debug, thiserror::Error)]
pub(super) enum TicketFileError {
    #[error("file '{NAME}' in the directory of tickets: {0}")]
    Io(#[from] io::Error),
    #[error("another process has file '{NAME}' open")]
    Locked,
    #[error("file '{NAME}' is damaged: {0}")]
    Damaged(String),
    #[error("file '{NAME}' is of format {0}, and this program knows format {FORMAT}")]
    Format(u64),
}

type RedbResult<T> = Result<T, redb::Error>;

impl From<redb::Error> for TicketFileError {
    fn from(error: redb::Error) -> Self {
        match error {
            redb::Error::DatabaseAlreadyOpen => Self::Locked,
            redb::Error::Io(error)
                if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData) =>
            {
                Self::Damaged(error.to_string())
            }
            redb::Error::Io(error) => Self::Io(error),
            redb::Error::PreviousIo => Self::Io(io::Error::other("an earlier write failed")),
            error => Self::Damaged(error.to_string()),
        }
    }
}

/// A key as it is stored.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct KeyRow {
    pub id: u32,
    pub bytes: [u8; 32],
    pub made: Moment,
    /// `None` while it signs.
    pub needed_until: Option<Moment>,
}

/// The file, open and locked.
#[derive(Debug)]
pub(super) struct TicketFile {
    database: Database,
    tended: Moment,
}

impl TicketFile {
    /// Opens the file, or creates it with the given keys if there is none. `keys` then holds
    /// those of the file. Also returns the stored records.
    pub(super) fn open(
        directory: BorrowedFd<'_>,
        keys: &mut Vec<KeyRow>,
        now: Moment,
    ) -> Result<(Self, StoredTickets), TicketFileError> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let database = match rustix::fs::openat(directory, NAME, flags, Mode::empty()) {
            Ok(file) => open_existing(File::from(file))?,
            Err(Errno::NOENT) => create(directory)?,
            Err(error) => return Err(TicketFileError::Io(error.into())),
        };
        let mut file = Self { database, tended: Moment(0) };
        file.load_keys(keys, now)?;
        let stored = file.load(now)?;
        Ok((file, stored))
    }

    /// Stores records as one transaction. They are on disk when this returns.
    pub(super) fn store(
        &mut self,
        records: impl IntoIterator<Item = TicketRecord>,
        now: Moment,
    ) -> Result<(), TicketFileError> {
        let mut records = records.into_iter().peekable();
        if records.peek().is_none() {
            return Ok(());
        }
        let write = || {
            let write = self.database.begin_write()?;
            let mut tables = TicketTables::open(&write)?;
            let mut count = 0;
            for record in records {
                tables.put(&record, now)?;
                count += 1;
            }
            tables.remove_over(now, 2 * count + OVER_MAX)?;
            drop(tables);
            Ok(write.commit()?)
        };
        write().map_err(|error: redb::Error| error.into())
    }

    /// Makes a new key when it is due, and deletes keys and records that are not needed. Returns
    /// true if the keys changed.
    pub(super) fn tend(&mut self, keys: &mut Vec<KeyRow>, now: Moment) -> Result<bool, TicketFileError> {
        const EVERY: Duration = Duration::from_secs(60);
        if now < after(self.tended, EVERY) {
            return Ok(false);
        }
        self.tended = now;
        let signs = keys.iter().filter(|key| key.needed_until.is_none()).max_by_key(|key| key.made);
        let is_old = signs.is_none_or(|key| after(key.made, KEY_FOR) <= now);
        let is_over = |key: &KeyRow| key.needed_until.is_some_and(|until| until <= now);
        let write = || {
            let write = self.database.begin_write()?;
            let mut tables = TicketTables::open(&write)?;
            let mut next: Vec<KeyRow> = keys.iter().filter(|key| !is_over(key)).cloned().collect();
            if is_old {
                let last = tables.over.last()?.map_or(now, |(over, _)| Moment(over.value().0).max(now));
                for key in next.iter_mut().filter(|key| key.needed_until.is_none()) {
                    key.needed_until = Some(after(last, KEY_MARGIN));
                }
                next.push(new_key(now));
            }
            let are_new = next != *keys;
            if are_new {
                tables.put_keys(&next)?;
            }
            let removed = tables.remove_over(now, OVER_MAX)?;
            drop(tables);
            if are_new || removed > 0 {
                write.commit()?;
            }
            Ok((next, are_new))
        };
        let (next, are_new) = write().map_err(|error: redb::Error| TicketFileError::from(error))?;
        *keys = next;
        Ok(are_new)
    }

    /// Loads the file's keys. A file without keys gets those in use before it, or a first one.
    fn load_keys(&mut self, keys: &mut Vec<KeyRow>, now: Moment) -> Result<(), TicketFileError> {
        let read = || {
            let read = self.database.begin_read()?;
            let mut rows = Vec::new();
            for row in read.open_table(KEYS)?.iter()? {
                let (id, key) = row?;
                rows.push(key_row(id.value(), key.value()));
            }
            Ok(rows)
        };
        let found = read().map_err(|error: redb::Error| TicketFileError::from(error))?;
        if !found.is_empty() {
            *keys = found;
        } else if !keys.is_empty() {
            let write = || {
                let write = self.database.begin_write()?;
                TicketTables::open(&write)?.put_keys(keys)?;
                Ok(write.commit()?)
            };
            write().map_err(|error: redb::Error| TicketFileError::from(error))?;
        }
        self.tend(keys, now).map(drop)
    }

    /// Returns the valid stored records, in the order of the slots.
    fn load(&self, now: Moment) -> Result<StoredTickets, TicketFileError> {
        let read = || {
            let read = self.database.begin_read()?;
            let mut stored = StoredTickets::new();
            for row in read.open_table(PROMISED)?.iter()? {
                let (nonce, promised) = row?;
                stored.push(promised_record(nonce.value(), promised.value()));
            }
            stored.sort_unstable_by_key(|(_, record)| match record {
                TicketRecord::Promised { ticket, .. } => (ticket.begins, ticket.nonce),
                TicketRecord::Called { nonce }
                | TicketRecord::Spent { nonce, .. }
                | TicketRecord::Forgotten { nonce } => (Moment(0), *nonce),
                TicketRecord::Paced { .. } => (Moment(0), Nonce(0)),
            });
            stored.retain(|(_, record)| record.over_at().is_some_and(|over| over > now));
            let called = load_called(&read, &stored)?;
            for row in read.open_table(SPENT)?.iter()? {
                let (nonce, spent) = row?;
                let (lane, until) = spent.value();
                let record = TicketRecord::Spent { nonce: Nonce(nonce.value()), until: Moment(until) };
                stored.push((LaneName(lane.to_be_bytes()), record));
            }
            stored.retain(|(_, record)| record.over_at().is_some_and(|over| over > now));
            stored.extend(called);
            stored.extend(load_paced(&read)?);
            Ok(stored)
        };
        read().map_err(|error: redb::Error| error.into())
    }
}

/// Renames a damaged file. Returns its new name.
pub(super) fn set_aside(directory: BorrowedFd<'_>, now: Moment) -> io::Result<String> {
    let name = format!("{NAME}{DAMAGED}{}", now.0);
    rustix::fs::renameat(directory, NAME, directory, &name)?;
    let mut aside = names(directory, |name| name.contains(DAMAGED))?;
    // The time in the name has the same number of digits for centuries.
    aside.sort_unstable();
    for oldest in aside.iter().take(aside.len().saturating_sub(DAMAGED_MAX)) {
        rustix::fs::unlinkat(directory, oldest, AtFlags::empty())?;
    }
    Ok(name)
}

/// Returns the keys that sign and verify. `None` if there are none.
pub(super) fn keys(rows: &[KeyRow]) -> Option<TicketKeyring> {
    let mut rows: Vec<&KeyRow> = rows.iter().collect();
    rows.sort_unstable_by_key(|row| (row.needed_until.is_none(), row.made));
    let mut keys: Option<TicketKeyring> = None;
    for row in rows {
        match &mut keys {
            Some(keys) => keys.rotate(row.id, &row.bytes),
            None => keys = Some(TicketKeyring::new(row.id, &row.bytes)),
        }
    }
    keys
}

fn builder() -> Builder {
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE_BYTES);
    builder
}

fn open_existing(file: File) -> Result<Database, TicketFileError> {
    if file.metadata()?.len() == 0 {
        return Err(TicketFileError::Damaged("it is empty".into()));
    }
    let mut database = builder().create_file(file).map_err(redb::Error::from)?;
    if !database.check_integrity().map_err(redb::Error::from)? {
        return Err(TicketFileError::Damaged("a page does not match its checksum".into()));
    }
    let format = || {
        let format = database.begin_read()?.open_table(META)?.get("format")?.map(|format| format.value());
        Ok(format)
    };
    match format().map_err(|error: redb::Error| TicketFileError::from(error))? {
        Some(FORMAT) => Ok(database),
        Some(other) => Err(TicketFileError::Format(other)),
        None => Err(TicketFileError::Damaged("it does not name its format".into())),
    }
}

/// Creates a file. It appears under its name only once it is complete, so a crash now leaves none
/// that looks damaged.
fn create(directory: BorrowedFd<'_>) -> Result<Database, TicketFileError> {
    let io = |error: Errno| TicketFileError::Io(error.into());
    for stale in names(directory, |name| name.ends_with(DRAFT))? {
        rustix::fs::unlinkat(directory, &stale, AtFlags::empty()).map_err(io)?;
    }
    let draft = format!("{NAME}.{}{DRAFT}", std::process::id());
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(directory, &draft, flags, Mode::RUSR | Mode::WUSR).map_err(io)?;
    let make = || {
        let database = builder().create_file(File::from(file))?;
        let write = database.begin_write()?;
        TicketTables::open(&write)?;
        write.open_table(META)?.insert("format", FORMAT)?;
        write.commit()?;
        Ok(database)
    };
    let made = make().map_err(|error: redb::Error| TicketFileError::from(error)).and_then(|database| {
        // A link, unlike a rename, fails if another process was faster. Then this one waits for
        // its file.
        match rustix::fs::linkat(directory, &draft, directory, NAME, AtFlags::empty()) {
            Ok(()) => Ok(database),
            Err(Errno::EXIST) => Err(TicketFileError::Locked),
            Err(error) => Err(io(error)),
        }
    });
    let removed = rustix::fs::unlinkat(directory, &draft, AtFlags::empty());
    let database = made?;
    removed.map_err(io)?;
    // The name must be on the disk as well.
    rustix::fs::fsync(directory).map_err(io)?;
    Ok(database)
}

/// Returns the names in the directory that belong to this store and are wanted.
fn names(directory: BorrowedFd<'_>, wanted: impl Fn(&str) -> bool) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = CStr::to_str(entry.file_name()).unwrap_or_default();
        if name.starts_with(NAME) && wanted(name) {
            found.push(name.to_owned());
        }
    }
    Ok(found)
}

fn new_key(now: Moment) -> KeyRow {
    let (mut id, mut bytes) = ([0; 4], [0; 32]);
    for random in [&mut id[..], &mut bytes[..]] {
        getrandom::fill(random).expect("the kernel gives random bytes once it has booted");
    }
    // A random number, so that a key of a lost file differs from one of the next file.
    KeyRow { id: u32::from_be_bytes(id), bytes, made: now, needed_until: None }
}

fn key_row(id: u32, (high, low, made, needed_until): KeyTuple) -> KeyRow {
    let mut bytes = [0; 32];
    bytes[..16].copy_from_slice(&high.to_be_bytes());
    bytes[16..].copy_from_slice(&low.to_be_bytes());
    KeyRow { id, bytes, made: Moment(made), needed_until: (needed_until > 0).then_some(Moment(needed_until)) }
}

fn promised_record(
    nonce: u128,
    (lane, begins, ends, epoch, client): PromisedTuple,
) -> (LaneName, TicketRecord) {
    let lane = LaneName(lane.to_be_bytes());
    let (begins, ends) = (Moment(begins), Moment(ends));
    let ticket = Ticket { lane, begins, ends, epoch, nonce: Nonce(nonce) };
    (lane, TicketRecord::Promised { ticket, client: ClientKey(client) })
}

/// Returns the promised ones that were called.
fn load_called(read: &ReadTransaction, promised: &StoredTickets) -> RedbResult<StoredTickets> {
    let called = match read.open_table(CALLED) {
        Ok(table) => table,
        Err(TableError::TableDoesNotExist(_)) => return Ok(StoredTickets::new()),
        Err(error) => return Err(error.into()),
    };
    let mut found = StoredTickets::new();
    for (lane, record) in promised {
        let TicketRecord::Promised { ticket, .. } = record else { continue };
        if called.get(ticket.nonce.0)?.is_some() {
            found.push((*lane, TicketRecord::Called { nonce: ticket.nonce }));
        }
    }
    Ok(found)
}

/// Returns the pace of each lane.
fn load_paced(read: &ReadTransaction) -> RedbResult<StoredTickets> {
    let paced = match read.open_table(PACED) {
        Ok(table) => table,
        Err(TableError::TableDoesNotExist(_)) => return Ok(StoredTickets::new()),
        Err(error) => return Err(error.into()),
    };
    let mut found = StoredTickets::new();
    for row in paced.iter()? {
        let (lane, paced) = row?;
        let (lane, (service_us, _)) = (LaneName(lane.value().to_be_bytes()), paced.value());
        found.push((lane, TicketRecord::Paced { lane, service_us }));
    }
    Ok(found)
}

/// All tables of one write transaction.
struct TicketTables<'txn> {
    promised: Table<'txn, u128, PromisedTuple>,
    called: Table<'txn, u128, ()>,
    spent: Table<'txn, u128, SpentTuple>,
    paced: Table<'txn, u128, PacedTuple>,
    over: Table<'txn, (u64, u128), ()>,
    keys: Table<'txn, u32, KeyTuple>,
}

impl<'txn> TicketTables<'txn> {
    fn open(write: &'txn WriteTransaction) -> RedbResult<Self> {
        Ok(Self {
            promised: write.open_table(PROMISED)?,
            called: write.open_table(CALLED)?,
            spent: write.open_table(SPENT)?,
            paced: write.open_table(PACED)?,
            over: write.open_table(OVER)?,
            keys: write.open_table(KEYS)?,
        })
    }

    fn put(&mut self, record: &TicketRecord, now: Moment) -> RedbResult<()> {
        match *record {
            TicketRecord::Promised { ticket, client } => {
                let Ticket { lane, begins, ends, epoch, nonce } = ticket;
                let row = (u128::from_be_bytes(lane.0), begins.0, ends.0, epoch, client.0);
                self.promised.insert(nonce.0, row)?;
                self.remember(record, nonce)?;
            }
            // If the ticket is not known, none could be presented after a restart.
            TicketRecord::Called { nonce } => {
                if self.promised.get(nonce.0)?.is_some() {
                    self.called.insert(nonce.0, ())?;
                }
            }
            TicketRecord::Spent { nonce, until } => {
                if let Some(lane) = self.forget(nonce)? {
                    self.spent.insert(nonce.0, (lane, until.0))?;
                    self.remember(record, nonce)?;
                }
            }
            TicketRecord::Forgotten { nonce } => drop(self.forget(nonce)?),
            TicketRecord::Paced { lane, service_us } => {
                self.paced.insert(u128::from_be_bytes(lane.0), (service_us, now.0))?;
                if self.paced.len()? > PACED_MAX {
                    self.drop_old_paces()?;
                }
            }
        }
        Ok(())
    }

    /// Deletes the older half, which happens very rarely.
    fn drop_old_paces(&mut self) -> RedbResult<()> {
        let rows: RedbResult<Vec<u64>> = self.paced.iter()?.map(|row| Ok(row?.1.value().1)).collect();
        let mut stored = rows?;
        stored.sort_unstable();
        let middle = stored.get(stored.len() / 2).copied().unwrap_or(0);
        Ok(self.paced.retain(|_, (_, at)| at > middle)?)
    }

    fn remember(&mut self, record: &TicketRecord, nonce: Nonce) -> RedbResult<()> {
        if let Some(over) = record.over_at() {
            self.over.insert((over.0, nonce.0), ())?;
        }
        Ok(())
    }

    /// Removes a promise. Returns its lane.
    fn forget(&mut self, nonce: Nonce) -> RedbResult<Option<u128>> {
        let Some(row) = self.promised.remove(nonce.0)?.map(|row| row.value()) else { return Ok(None) };
        self.called.remove(nonce.0)?;
        if let Some(over) = promised_record(nonce.0, row).1.over_at() {
            self.over.remove((over.0, nonce.0))?;
        }
        Ok(Some(row.0))
    }

    /// Returns the number of removed records.
    fn remove_over(&mut self, now: Moment, count_max: usize) -> RedbResult<usize> {
        for removed in 0..count_max {
            let first = self.over.first()?.map(|(key, _)| key.value());
            let Some((over, nonce)) = first.filter(|(over, _)| *over <= now.0) else { return Ok(removed) };
            self.over.remove((over, nonce))?;
            self.promised.remove(nonce)?;
            self.called.remove(nonce)?;
            self.spent.remove(nonce)?;
        }
        Ok(count_max)
    }

    /// Replaces all keys by these.
    fn put_keys(&mut self, rows: &[KeyRow]) -> RedbResult<()> {
        self.keys.retain(|id, _| rows.iter().any(|row| row.id == id))?;
        for row in rows {
            let (high, low) = row.bytes.split_at(16);
            let half = |bytes: &[u8]| u128::from_be_bytes(bytes.try_into().expect("half of 32 bytes"));
            let needed_until = row.needed_until.map_or(0, |until| until.0);
            self.keys.insert(row.id, (half(high), half(low), row.made.0, needed_until))?;
        }
        debug_assert_eq!(self.keys.len().ok(), Some(rows.len() as u64), "each key has its own number");
        Ok(())
    }
}

fn after(moment: Moment, duration: Duration) -> Moment {
    let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
    Moment(moment.0.saturating_add(micros))
}

#[cfg(test)]
mod tests;
