//! Converts a store of an older format to this program's: one step for each format between, all in
//! one transaction. So an interruption leaves the store as it was, and the next start tries again.
//!
//! A step finds exactly the result of the format before it, and uses nothing that a later one may
//! change. It uses tables by their old names, and records as JSON values. It stays here while
//! stores of that format may exist.
//!
//! Not here: refusing unknown formats (`RedbStore::open`), the cluster's store (`etcd::raise`).

use redb::WriteTransaction;

use super::{FORMAT, Fallible, META, NODES, PLACEMENTS, RULES, SETTINGS, TICKET_KEYS};

/// The oldest format that can be converted.
pub(super) const OLDEST: u64 = 1;

/// The conversion from one format to the next.
pub(super) type Step = fn(&WriteTransaction) -> Fallible<()>;

/// In order, beginning at `OLDEST`.
pub(super) const STEPS: [Step; 1] = [to_2];

const _: () = assert!(FORMAT == OLDEST + STEPS.len() as u64);

/// Takes every step from the found format. Nothing changes before the transaction is committed.
pub(super) fn run(write: &WriteTransaction, found: u64, steps: &[Step]) -> Fallible<()> {
    let mut format = OLDEST;
    for step in steps {
        if format >= found {
            step(write)?;
        }
        format += 1;
    }
    write.open_table(META)?.insert("format", format)?;
    Ok(())
}

/// Adds rules, and the keys that sign tickets. Stores from early in format 1 lack some other
/// tables, too.
fn to_2(write: &WriteTransaction) -> Fallible<()> {
    for table in [SETTINGS, NODES, PLACEMENTS, RULES, TICKET_KEYS] {
        write.open_table(table)?;
    }
    Ok(())
}
