//! The positions of one volume in a copy's log: which entries it has, and up to where they are
//! complete.
//!
//! Two logs that have an entry at the same position have the same entries before it, because each
//! entry names the one before, and one primary alone makes the entries of an epoch. Invariant: an
//! entry that is complete is never removed. Not here: the entries' contents, and the disk.

use crate::record::VolumeEpoch;

/// The place of an entry: its number in the volume, and the epoch whose primary made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LogPosition {
    pub epoch: VolumeEpoch,
    pub number: u64,
}

/// The log. Entries before its first one are applied to the files, and not kept.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VolumeLog {
    /// The last entry that is not kept any more.
    before: LogPosition,
    kept: Vec<LogPosition>,
    /// Number up to which every entry is complete.
    complete: u64,
}

impl VolumeLog {
    /// Returns the log of a copy whose files are as they were after this entry.
    pub fn from(position: LogPosition) -> Self {
        Self { before: position, kept: Vec::new(), complete: position.number }
    }

    /// Returns the last entry.
    pub fn last(&self) -> LogPosition {
        self.kept.last().copied().unwrap_or(self.before)
    }

    /// Returns the number up to which all entries are complete. So far they may be applied.
    pub fn complete(&self) -> u64 {
        self.complete
    }

    /// Returns the entries after this number that are kept.
    pub fn after(&self, number: u64) -> &[LogPosition] {
        let skipped = usize::try_from(number.saturating_sub(self.before.number)).unwrap_or(usize::MAX);
        self.kept.get(skipped..).unwrap_or_default()
    }

    /// Whether it has this entry, kept or not.
    pub fn has(&self, position: LogPosition) -> bool {
        self.at(position.number) == Some(position)
    }

    /// Returns the entry with this number, unless it is older than those that are known.
    pub fn at(&self, number: u64) -> Option<LogPosition> {
        match number.checked_sub(self.before.number)? {
            0 => Some(self.before),
            kept => self.kept.get(usize::try_from(kept - 1).ok()?).copied(),
        }
    }

    /// Adds an entry of this epoch. Returns its place.
    pub fn add(&mut self, epoch: VolumeEpoch) -> LogPosition {
        let position = LogPosition { epoch, number: self.last().number + 1 };
        self.kept.push(position);
        position
    }

    /// Adds an entry of a primary after the last one.
    pub fn push(&mut self, position: LogPosition) {
        debug_assert_eq!(position.number, self.last().number + 1, "entries have no gaps");
        self.kept.push(position);
    }

    /// Removes all entries after this number, which a later primary does not have. Returns false if
    /// one of them is complete: then the files are not as that primary's.
    pub fn truncate(&mut self, number: u64) -> bool {
        if number < self.complete || number < self.before.number {
            return false;
        }
        let left = usize::try_from(number - self.before.number).unwrap_or(usize::MAX);
        self.kept.truncate(left);
        true
    }

    /// Notes that all entries up to this number are complete. It is never less than before.
    pub fn note_complete(&mut self, number: u64) {
        self.complete = self.complete.max(number.min(self.last().number));
    }

    /// Forgets entries that are complete and applied, up to this number.
    pub fn forget(&mut self, number: u64) {
        let number = number.min(self.complete);
        let Some(position) = self.at(number) else { return };
        let forgotten = usize::try_from(number - self.before.number).unwrap_or_default();
        self.kept.drain(..forgotten);
        self.before = position;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(entries: u64) -> VolumeLog {
        let mut log = VolumeLog::default();
        for _ in 0..entries {
            log.add(VolumeEpoch(1));
        }
        log
    }

    #[test]
    fn entries_are_found_by_number_kept_or_not() {
        let mut log = log(5);
        log.note_complete(3);
        log.forget(9);
        assert_eq!(log.at(2), None);
        assert_eq!(log.at(3), Some(LogPosition { epoch: VolumeEpoch(1), number: 3 }));
        assert_eq!(log.at(5), Some(log.last()));
        assert_eq!(log.at(6), None);
        assert_eq!(log.after(3).len(), 2);
        assert_eq!(log.after(4), [log.last()]);
        assert!(log.after(5).is_empty() && log.after(50).is_empty());
        assert!(!log.has(LogPosition { epoch: VolumeEpoch(2), number: 4 }));
    }

    #[test]
    fn complete_entries_stay_and_others_can_go() {
        let mut log = log(5);
        log.note_complete(3);
        log.note_complete(2);
        assert_eq!(log.complete(), 3);
        assert!(!log.truncate(2));
        assert!(log.truncate(4));
        assert_eq!(log.last().number, 4);
        assert_eq!(log.add(VolumeEpoch(2)), LogPosition { epoch: VolumeEpoch(2), number: 5 });
        log.note_complete(100);
        assert_eq!(log.complete(), 5);
    }
}
