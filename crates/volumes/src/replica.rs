//! A copy that follows the primary: takes its entries, and refuses those of an earlier one.
//!
//! Invariants: a copy that has seen an epoch takes nothing of an earlier one. Its log is always the
//! begin of a primary's log. Its caller writes entries to the disk before the reply leaves. Only
//! complete entries are applied to files. Not here: contents, the disk, and the connection.

use crate::log::{LogPosition, VolumeLog};
use crate::record::{CopyIncarnation, VolumeEpoch};

/// Entries of a primary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppendMessage {
    pub epoch: VolumeEpoch,
    /// The entry before the first of `entries`.
    pub before: LogPosition,
    pub entries: Vec<LogPosition>,
    /// Number up to which all entries are complete.
    pub complete: u64,
}

/// The reply of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AppendReply {
    /// The newest epoch that it has seen. A reply to an earlier primary says nothing to a later
    /// one, even on the same node.
    pub epoch: VolumeEpoch,
    pub incarnation: CopyIncarnation,
    pub outcome: AppendOutcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AppendOutcome {
    /// It has everything up to this number on its disk.
    Kept { number: u64 },
    /// There is a later primary.
    Refused,
    /// It lacks what comes before. The primary goes on after this number.
    Missing { after: u64 },
    /// Its files have what the primary does not have, so all of it must be compared.
    Diverged,
}

/// One volume on a node that is not its primary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaVolume {
    incarnation: CopyIncarnation,
    epoch: VolumeEpoch,
    log: VolumeLog,
}

impl ReplicaVolume {
    /// `epoch`: the newest that this copy has seen, from its disk.
    pub fn new(incarnation: CopyIncarnation, epoch: VolumeEpoch, log: VolumeLog) -> Self {
        Self { incarnation, epoch, log }
    }

    pub fn incarnation(&self) -> CopyIncarnation {
        self.incarnation
    }

    /// Returns the newest epoch that it has seen.
    pub fn epoch(&self) -> VolumeEpoch {
        self.epoch
    }

    pub fn log(&self) -> &VolumeLog {
        &self.log
    }

    /// Notes that this epoch exists, as the store says. Entries of earlier ones are refused.
    pub fn note_epoch(&mut self, epoch: VolumeEpoch) {
        self.epoch = self.epoch.max(epoch);
    }

    /// Takes entries. `Kept` must not be sent before they and the epoch are on the disk.
    pub fn append(&mut self, message: &AppendMessage) -> AppendReply {
        let outcome = self.take(message);
        AppendReply { epoch: self.epoch, incarnation: self.incarnation, outcome }
    }

    fn take(&mut self, message: &AppendMessage) -> AppendOutcome {
        if message.epoch < self.epoch {
            return AppendOutcome::Refused;
        }
        self.epoch = message.epoch;
        if !self.log.has(message.before) {
            return self.missing(message.before);
        }
        let mut number = message.before.number;
        for entry in &message.entries {
            // A primary whose numbers have gaps is wrong.
            if entry.number != number + 1 {
                return AppendOutcome::Missing { after: number };
            }
            if !self.log.has(*entry) {
                // Entries of a former primary that were never complete.
                if !self.log.truncate(number) {
                    return AppendOutcome::Diverged;
                }
                self.log.push(*entry);
            }
            number = entry.number;
        }
        self.log.note_complete(message.complete.min(number));
        AppendOutcome::Kept { number }
    }

    /// Returns the answer to entries whose predecessor it does not have.
    fn missing(&self, before: LogPosition) -> AppendOutcome {
        let has_other = self.log.at(before.number).is_some();
        if has_other && before.number <= self.log.complete() {
            return AppendOutcome::Diverged;
        }
        // Everything that is complete is the same on all copies.
        let after = if has_other { self.log.complete() } else { self.log.last().number };
        AppendOutcome::Missing { after: after.min(before.number.saturating_sub(1)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: CopyIncarnation = CopyIncarnation(1);

    fn position(epoch: u64, number: u64) -> LogPosition {
        LogPosition { epoch: VolumeEpoch(epoch), number }
    }

    fn message(epoch: u64, before: LogPosition, entries: &[LogPosition], complete: u64) -> AppendMessage {
        AppendMessage { epoch: VolumeEpoch(epoch), before, entries: entries.to_vec(), complete }
    }

    /// A copy with three entries of the first epoch, of which this many are complete.
    fn replica(complete: u64) -> ReplicaVolume {
        let mut replica = ReplicaVolume::new(FIRST, VolumeEpoch(1), VolumeLog::default());
        let entries = [position(1, 1), position(1, 2), position(1, 3)];
        let reply = replica.append(&message(1, LogPosition::default(), &entries, complete));
        assert_eq!(reply.outcome, AppendOutcome::Kept { number: 3 });
        replica
    }

    #[test]
    fn entries_that_it_has_are_kept_once() {
        let mut replica = replica(1);
        let again = message(1, position(1, 1), &[position(1, 2)], 9);
        assert_eq!(replica.append(&again).outcome, AppendOutcome::Kept { number: 2 });
        // The third may be another's: nothing says that it is complete.
        assert_eq!((replica.log().last(), replica.log().complete()), (position(1, 3), 2));
    }

    #[test]
    fn an_earlier_primary_is_refused() {
        let mut replica = replica(1);
        replica.note_epoch(VolumeEpoch(3));
        let reply = replica.append(&message(2, position(1, 3), &[position(2, 4)], 4));
        assert_eq!((reply.epoch, reply.outcome), (VolumeEpoch(3), AppendOutcome::Refused));
        assert_eq!(replica.log().last(), position(1, 3));
    }

    #[test]
    fn entries_of_a_former_primary_make_way_for_the_new_ones() {
        let mut replica = replica(1);
        let reply = replica.append(&message(2, position(1, 1), &[position(2, 2)], 1));
        assert_eq!(reply.outcome, AppendOutcome::Kept { number: 2 });
        assert_eq!(replica.log().last(), position(2, 2));
    }

    #[test]
    fn complete_entries_never_make_way() {
        let mut replica = replica(3);
        let reply = replica.append(&message(2, position(1, 1), &[position(2, 2)], 2));
        assert_eq!(reply.outcome, AppendOutcome::Diverged);
        let reply = replica.append(&message(2, position(2, 3), &[position(2, 4)], 2));
        assert_eq!(reply.outcome, AppendOutcome::Diverged);
        assert_eq!(replica.log().last(), position(1, 3));
    }

    #[test]
    fn it_says_from_where_it_needs_entries() {
        let mut replica = replica(1);
        let reply = replica.append(&message(1, position(1, 7), &[position(1, 8)], 1));
        assert_eq!(reply.outcome, AppendOutcome::Missing { after: 3 });
        let reply = replica.append(&message(2, position(2, 3), &[position(2, 4)], 1));
        assert_eq!(reply.outcome, AppendOutcome::Missing { after: 1 });
    }
}
