//! The copy that requests change: which commits are complete, and who must have them.
//!
//! Invariants: a commit is complete once every copy of the known record **and** of a record that
//! was proposed has it. So the answer of the store may be late or lost. A primary that knows of
//! another epoch completes nothing any more. Not here: when a copy counts as silent, the store, and
//! the connections.

use std::collections::BTreeMap;

use crate::log::{LogPosition, VolumeLog};
use crate::record::{CopyIncarnation, RecordError, VolumeEpoch, VolumeRecord};
use crate::replica::{AppendMessage, AppendOutcome, AppendReply};

/// Most entries of one message.
const ENTRIES_MAX: usize = 1024;

/// The position of another copy, as far as it has said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CopyProgress {
    incarnation: CopyIncarnation,
    /// It has everything up to here.
    number: u64,
    /// Entries are sent after this number.
    sent_after: u64,
}

/// One volume on the node that is its primary. `N` names a node.
#[derive(Debug, Clone)]
pub struct PrimaryVolume<N> {
    node: N,
    record: VolumeRecord<N>,
    /// A change that was sent to the store, until it is known what became of it.
    proposed: Option<VolumeRecord<N>>,
    log: VolumeLog,
    progress: BTreeMap<N, CopyProgress>,
    is_fenced: bool,
}

impl<N: Ord + Clone> PrimaryVolume<N> {
    /// Begins the term of this record, whose primary is `node`. `log` is that of its copy.
    pub fn new(node: N, record: VolumeRecord<N>, log: VolumeLog) -> Self {
        let is_fenced = *record.primary() != node;
        Self { node, record, proposed: None, log, progress: BTreeMap::new(), is_fenced }
    }

    pub fn epoch(&self) -> VolumeEpoch {
        self.record.epoch()
    }

    pub fn record(&self) -> &VolumeRecord<N> {
        &self.record
    }

    pub fn log(&self) -> &VolumeLog {
        &self.log
    }

    /// Whether there is another primary. Then nothing more is written or complete.
    pub fn is_fenced(&self) -> bool {
        self.is_fenced
    }

    /// Adds an entry. It is complete once `log().complete()` has reached its number. `None` if
    /// there is another primary.
    pub fn write(&mut self) -> Option<LogPosition> {
        (!self.is_fenced).then(|| self.log.add(self.record.epoch()))
    }

    /// Returns the next message to a copy. It may have no entries: then it says how much is
    /// complete.
    pub fn message_to(&self, node: &N) -> Option<AppendMessage> {
        if self.is_fenced || *node == self.node || !self.record.copies().contains(node) {
            return None;
        }
        let last = self.log.last().number;
        let after = self.progress.get(node).map_or(last, |progress| progress.sent_after);
        // Entries that are not kept any more come as a whole copy.
        let before = self.log.at(after)?;
        let entries = self.log.after(after).iter().take(ENTRIES_MAX).copied().collect();
        Some(AppendMessage { epoch: self.epoch(), before, entries, complete: self.log.complete() })
    }

    /// Notes that its own log is on the disk up to this number.
    pub fn note_synced(&mut self, incarnation: CopyIncarnation, number: u64) {
        let node = self.node.clone();
        self.note_progress(&node, incarnation, number);
        self.complete();
    }

    /// Notes the reply of a copy.
    pub fn note_reply(&mut self, node: &N, reply: AppendReply) {
        let AppendReply { epoch, incarnation, outcome } = reply;
        self.is_fenced |= epoch > self.epoch();
        if epoch != self.epoch() {
            return;
        }
        match outcome {
            AppendOutcome::Kept { number } => self.note_progress(node, incarnation, number),
            AppendOutcome::Missing { after } => {
                let progress = CopyProgress { incarnation, number: 0, sent_after: after };
                self.progress.insert(node.clone(), progress);
            }
            // It is compared as a whole, and begins after that.
            AppendOutcome::Diverged => drop(self.progress.remove(node)),
            AppendOutcome::Refused => {}
        }
        self.complete();
    }

    fn note_progress(&mut self, node: &N, incarnation: CopyIncarnation, number: u64) {
        // A wrong answer claims what there is not.
        let number = number.min(self.log.last().number);
        let progress = CopyProgress { incarnation, number, sent_after: number };
        let known = self.progress.entry(node.clone()).or_insert(progress);
        // Answers may overtake each other.
        if incarnation > known.incarnation || incarnation == known.incarnation && number > known.number {
            *known = progress;
        }
    }

    /// Returns the change of the record without a copy that is silent. The store must compare with
    /// `record()`. `None` while another change is under way.
    pub fn propose_without(&mut self, node: &N) -> Option<Result<VolumeRecord<N>, RecordError>> {
        self.propose(|record| record.without(node))
    }

    /// Returns the change of the record with a copy that has everything. From now on commits wait
    /// for it. `None` while another change is under way, or as long as it lacks something.
    pub fn propose_with(&mut self, node: &N) -> Option<Result<VolumeRecord<N>, RecordError>> {
        let progress = *self.progress.get(node)?;
        if progress.number < self.log.last().number {
            return None;
        }
        self.propose(|record| record.with(node.clone(), progress.incarnation))
    }

    fn propose(
        &mut self,
        change: impl FnOnce(&VolumeRecord<N>) -> Result<VolumeRecord<N>, RecordError>,
    ) -> Option<Result<VolumeRecord<N>, RecordError>> {
        if self.is_fenced || self.proposed.is_some() {
            return None;
        }
        let changed = change(&self.record);
        self.proposed = changed.as_ref().ok().cloned();
        Some(changed)
    }

    /// Notes the record that the store has now.
    pub fn note_record(&mut self, record: VolumeRecord<N>) {
        if record.epoch() != self.epoch() || *record.primary() != self.node {
            self.is_fenced |= record.epoch() > self.epoch();
            return;
        }
        // Any other change of this epoch would be this primary's own. So nothing is under way.
        self.proposed = None;
        self.record = record;
        self.complete();
    }

    /// Completes what every copy has for which commits wait.
    fn complete(&mut self) {
        if self.is_fenced {
            return;
        }
        let of_proposed = self.proposed.iter().flat_map(|record| record.in_sync());
        let waited_for = self.record.in_sync().iter().chain(of_proposed);
        let number = |(node, incarnation): (&N, &CopyIncarnation)| match self.progress.get(node) {
            Some(progress) if progress.incarnation == *incarnation => progress.number,
            _ => 0,
        };
        let number = waited_for.map(number).min().unwrap_or(0);
        self.log.note_complete(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: CopyIncarnation = CopyIncarnation(1);

    /// A primary with one other copy in sync, and one that is not.
    fn primary() -> PrimaryVolume<char> {
        let record = VolumeRecord::new('a', FIRST, ['b', 'c']).with('b', FIRST).unwrap();
        PrimaryVolume::new('a', record, VolumeLog::default())
    }

    fn reply(incarnation: u64, outcome: AppendOutcome) -> AppendReply {
        AppendReply { epoch: VolumeEpoch(1), incarnation: CopyIncarnation(incarnation), outcome }
    }

    fn kept(number: u64) -> AppendReply {
        reply(1, AppendOutcome::Kept { number })
    }

    #[test]
    fn a_commit_is_complete_once_every_copy_in_sync_has_it() {
        let mut primary = primary();
        let position = primary.write().unwrap();
        primary.note_synced(FIRST, 1);
        primary.note_reply(&'c', kept(1));
        assert_eq!(primary.log().complete(), 0);
        primary.note_reply(&'b', reply(2, AppendOutcome::Kept { number: 1 }));
        assert_eq!(primary.log().complete(), 0, "another life of the copy is not in sync");
        primary.note_reply(&'b', reply(3, AppendOutcome::Kept { number: 9 }));
        assert_eq!(primary.log().complete(), 0);
        let mut primary = self::primary();
        assert_eq!(primary.write(), Some(position));
        primary.note_synced(FIRST, 1);
        primary.note_reply(&'b', kept(1));
        assert_eq!(primary.log().complete(), 1);
    }

    #[test]
    fn a_copy_is_waited_for_until_the_store_has_left_it_out() {
        let mut primary = primary();
        primary.write();
        primary.note_synced(FIRST, 1);
        let record = primary.propose_without(&'b').unwrap().unwrap();
        assert!(primary.propose_without(&'b').is_none(), "one at a time");
        assert_eq!(primary.log().complete(), 0);
        primary.note_record(record);
        assert_eq!(primary.log().complete(), 1);
    }

    #[test]
    fn a_copy_that_joins_is_waited_for_before_the_store_says_so() {
        let mut primary = primary();
        primary.write();
        primary.note_synced(FIRST, 1);
        primary.note_reply(&'b', kept(1));
        assert!(primary.propose_with(&'c').is_none(), "it has said nothing");
        primary.note_reply(&'c', kept(1));
        let record = primary.propose_with(&'c').unwrap().unwrap();
        primary.write();
        primary.note_synced(FIRST, 2);
        primary.note_reply(&'b', kept(2));
        assert_eq!(primary.log().complete(), 1);
        primary.note_record(record);
        assert_eq!(primary.log().complete(), 1);
        primary.note_reply(&'c', kept(2));
        assert_eq!(primary.log().complete(), 2);
    }

    #[test]
    fn a_primary_that_knows_of_another_completes_nothing() {
        for is_told_by_store in [false, true] {
            let mut primary = primary();
            primary.write();
            if is_told_by_store {
                primary.note_record(primary.record().promoted(&'b', FIRST).unwrap());
            } else {
                let later = AppendReply { epoch: VolumeEpoch(2), ..reply(1, AppendOutcome::Refused) };
                primary.note_reply(&'b', later);
            }
            primary.note_synced(FIRST, 1);
            primary.note_reply(&'b', kept(1));
            assert!(primary.is_fenced() && primary.log().complete() == 0 && primary.write().is_none());
            assert!(primary.message_to(&'b').is_none() && primary.propose_without(&'b').is_none());
        }
    }

    #[test]
    fn a_reply_to_an_earlier_primary_of_the_same_node_is_no_reply() {
        let record = primary().record().promoted(&'a', FIRST).unwrap();
        let mut primary = PrimaryVolume::new('a', record, VolumeLog::default());
        primary.write();
        primary.note_synced(FIRST, 1);
        primary.note_reply(&'b', kept(1));
        assert_eq!(primary.log().complete(), 0);
        primary.note_reply(&'b', AppendReply { epoch: VolumeEpoch(2), ..kept(1) });
        assert_eq!(primary.log().complete(), 1);
    }

    #[test]
    fn a_copy_gets_what_it_lacks() {
        let mut primary = primary();
        for _ in 0..3 {
            primary.write();
        }
        let message = primary.message_to(&'c').unwrap();
        assert!(message.entries.is_empty() && message.before.number == 3);
        primary.note_reply(&'c', reply(1, AppendOutcome::Missing { after: 1 }));
        let message = primary.message_to(&'c').unwrap();
        assert_eq!((message.before.number, message.entries.len()), (1, 2));
        assert!(primary.message_to(&'a').is_none() && primary.message_to(&'x').is_none());
        primary.note_reply(&'c', kept(99));
        assert_eq!(primary.message_to(&'c').unwrap().before.number, 3, "it has not more than there is");
    }
}
