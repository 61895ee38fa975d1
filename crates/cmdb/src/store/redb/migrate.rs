//! Bringing a store of an older format to this program's: one step for each format between, all of them in one transaction, so
//! that whatever interrupts it leaves the store as it was, and the next start begins anew.
//!
//! A step finds exactly what the format before it left and uses nothing that a later one may change: tables by the names they
//! had, records as JSON values. It stays here for as long as stores of that format may be met.
//!
//! Not here: refusing formats that are not known (`RedbStore::open`), the cluster's store (`etcd::raise`).

use redb::WriteTransaction;

use super::{FORMAT, Fallible, META, NODES, PLACEMENTS, RULES, SETTINGS, TICKET_KEYS};

/// The oldest format there is a way from.
pub(super) const OLDEST: u64 = 1;

/// The way from one format to the next.
pub(super) type Step = fn(&WriteTransaction) -> Fallible<()>;

/// In order, beginning at `OLDEST`.
pub(super) const STEPS: [Step; 1] = [to_2];

const _: () = assert!(FORMAT == OLDEST + STEPS.len() as u64);

/// Takes every step from the format that was found. Nothing is changed before the transaction is committed.
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

/// The store keeps rules, and the keys that sign tickets. Stores that were made early in format 1 have not got all of the other tables either.
fn to_2(write: &WriteTransaction) -> Fallible<()> {
    for table in [SETTINGS, NODES, PLACEMENTS, RULES, TICKET_KEYS] {
        write.open_table(table)?;
    }
    Ok(())
}
