//! A volume in the cluster's store: its epoch, its primary, and the copies that are in sync.
//!
//! Every change is one compare-and-set on the record that it was made from. Invariants: the primary
//! is in sync; an epoch has one primary; a copy leaves or joins the in-sync copies by such a change
//! only. Not here: reading and writing the store.

use std::collections::{BTreeMap, BTreeSet};

/// Number of a primary's term. It fences off all earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct VolumeEpoch(pub u64);

/// Number of a copy's life. A node that restarts without a clean stop gets another one, because it
/// may have lost what it had not written to its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct CopyIncarnation(pub u64);

/// The record. `N` names a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeRecord<N> {
    epoch: VolumeEpoch,
    primary: N,
    in_sync: BTreeMap<N, CopyIncarnation>,
    copies: BTreeSet<N>,
}

/// Why a record cannot be changed like that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordError {
    /// The node has no copy.
    NoCopy,
    /// The copy is not in sync in this life, so it may lack complete commits.
    NotInSync,
    /// The primary itself cannot leave. Another one is promoted instead.
    IsPrimary,
}

impl<N: Ord + Clone> VolumeRecord<N> {
    /// Returns the record of a new volume. Its other copies are empty, and so not in sync.
    pub fn new(primary: N, incarnation: CopyIncarnation, others: impl IntoIterator<Item = N>) -> Self {
        let copies = others.into_iter().chain([primary.clone()]).collect();
        let in_sync = BTreeMap::from([(primary.clone(), incarnation)]);
        Self { epoch: VolumeEpoch(1), primary, in_sync, copies }
    }

    pub fn epoch(&self) -> VolumeEpoch {
        self.epoch
    }

    pub fn primary(&self) -> &N {
        &self.primary
    }

    pub fn copies(&self) -> &BTreeSet<N> {
        &self.copies
    }

    /// Returns the copies that have every complete commit, in these lives.
    pub fn in_sync(&self) -> &BTreeMap<N, CopyIncarnation> {
        &self.in_sync
    }

    /// Whether this copy has every complete commit.
    pub fn is_in_sync(&self, node: &N, incarnation: CopyIncarnation) -> bool {
        self.in_sync.get(node) == Some(&incarnation)
    }

    /// Returns the record without this copy among those in sync.
    pub fn without(&self, node: &N) -> Result<Self, RecordError> {
        if *node == self.primary {
            return Err(RecordError::IsPrimary);
        }
        let mut changed = self.clone();
        changed.in_sync.remove(node).ok_or(RecordError::NotInSync)?;
        Ok(changed)
    }

    /// Returns the record with this copy in sync. The primary must wait for it before it asks the
    /// store.
    pub fn with(&self, node: N, incarnation: CopyIncarnation) -> Result<Self, RecordError> {
        if !self.copies.contains(&node) {
            return Err(RecordError::NoCopy);
        }
        let mut changed = self.clone();
        changed.in_sync.insert(node, incarnation);
        Ok(changed)
    }

    /// Returns the record with this copy as the primary of the next epoch.
    ///
    /// The former primary is not in sync any more. Its files may have changes that were never
    /// complete, so it has to be compared with the new one first.
    pub fn promoted(&self, node: &N, incarnation: CopyIncarnation) -> Result<Self, RecordError> {
        if !self.is_in_sync(node, incarnation) {
            return Err(RecordError::NotInSync);
        }
        let mut changed = self.clone();
        changed.epoch = VolumeEpoch(self.epoch.0 + 1);
        if *node != self.primary {
            changed.in_sync.remove(&self.primary);
        }
        changed.primary = node.clone();
        Ok(changed)
    }

    /// Returns the record after the only copy in sync has begun another life on the same disk. Its
    /// own log is all that there is.
    pub fn revived(&self, node: &N, incarnation: CopyIncarnation) -> Result<Self, RecordError> {
        if *node != self.primary || self.in_sync.len() > 1 {
            return Err(RecordError::NotInSync);
        }
        let mut changed = self.clone();
        changed.epoch = VolumeEpoch(self.epoch.0 + 1);
        changed.in_sync.insert(node.clone(), incarnation);
        Ok(changed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: CopyIncarnation = CopyIncarnation(1);

    fn record() -> VolumeRecord<char> {
        VolumeRecord::new('a', FIRST, ['b', 'c']).with('b', FIRST).unwrap()
    }

    #[test]
    fn a_new_volume_has_one_copy_in_sync() {
        let record = VolumeRecord::new('a', FIRST, ['b']);
        assert!(record.is_in_sync(&'a', FIRST) && !record.is_in_sync(&'b', FIRST));
        assert_eq!((record.epoch(), record.primary()), (VolumeEpoch(1), &'a'));
    }

    #[test]
    fn only_a_copy_in_sync_is_promoted() {
        let promoted = record().promoted(&'b', FIRST).unwrap();
        assert_eq!((promoted.epoch(), promoted.primary()), (VolumeEpoch(2), &'b'));
        assert!(!promoted.is_in_sync(&'a', FIRST) && promoted.copies().contains(&'a'));
        assert_eq!(record().promoted(&'c', FIRST), Err(RecordError::NotInSync));
        assert_eq!(record().promoted(&'b', CopyIncarnation(2)), Err(RecordError::NotInSync));
        // The same one again: another epoch, and all others stay.
        assert!(record().promoted(&'a', FIRST).unwrap().is_in_sync(&'b', FIRST));
    }

    #[test]
    fn copies_leave_and_join_and_the_primary_stays() {
        assert!(!record().without(&'b').unwrap().is_in_sync(&'b', FIRST));
        assert_eq!(record().without(&'a'), Err(RecordError::IsPrimary));
        assert_eq!(record().without(&'c'), Err(RecordError::NotInSync));
        assert_eq!(record().with('x', FIRST), Err(RecordError::NoCopy));
        let again = record().with('b', CopyIncarnation(2)).unwrap();
        assert!(again.is_in_sync(&'b', CopyIncarnation(2)) && !again.is_in_sync(&'b', FIRST));
    }

    #[test]
    fn only_the_last_copy_continues_alone_in_another_life() {
        let alone = record().without(&'b').unwrap();
        let revived = alone.revived(&'a', CopyIncarnation(2)).unwrap();
        assert_eq!(revived.epoch(), VolumeEpoch(2));
        assert!(revived.is_in_sync(&'a', CopyIncarnation(2)));
        assert_eq!(record().revived(&'a', CopyIncarnation(2)), Err(RecordError::NotInSync));
        assert_eq!(alone.revived(&'b', CopyIncarnation(2)), Err(RecordError::NotInSync));
    }
}
