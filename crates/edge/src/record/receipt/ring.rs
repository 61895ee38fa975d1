//! Keeps the last requests of each edge thread, so that `nagaya explain` can show one after its
//! end.
//!
//! A thread writes to its own ring under a lock that others take only for a question. Records are
//! moved there and come back as blanks for later requests. So keeping them costs no allocation
//! and no copy. Not here: the explanation of a record (`explain`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::thread::ThreadId;

use nagaya_base::RequestId;
use parking_lot::Mutex;

use crate::record::access_record::AccessRecord;
use crate::record::site_turnarounds::SiteTurnarounds;

/// Number of noteworthy requests per kept plain one. Noteworthy ones waited, were limited,
/// refused or served by a program. Plain ones are mostly files.
const NOTED_FOR_ONE_PLAIN: usize = 8;

/// The rings of all edge threads.
#[derive(Debug, Default)]
pub struct ReceiptRings {
    rings: Mutex<Vec<(ThreadId, Arc<ReceiptRing>)>>,
    turnarounds: Arc<SiteTurnarounds>,
}

impl ReceiptRings {
    /// Returns the calling thread's ring.
    pub fn for_thread(&self) -> Arc<ReceiptRing> {
        let here = thread::current().id();
        let mut rings = self.rings.lock();
        if let Some((_, ring)) = rings.iter().find(|(thread, _)| *thread == here) {
            return Arc::clone(ring);
        }
        let ring = Arc::new(ReceiptRing::default());
        rings.push((here, Arc::clone(&ring)));
        ring
    }

    /// Returns what is usual for each site.
    pub fn turnarounds(&self) -> &Arc<SiteTurnarounds> {
        &self.turnarounds
    }

    /// Calls `look` with the record of this request, if it is still kept.
    pub fn find<T>(&self, id: RequestId, look: impl FnOnce(&AccessRecord) -> T) -> Option<T> {
        let rings: Vec<_> = self.rings.lock().iter().map(|(_, ring)| Arc::clone(ring)).collect();
        for ring in rings {
            let kept = ring.0.lock();
            let mut all = kept.noted.iter().rev().chain(kept.plain.iter().rev());
            if let Some(record) = all.find(|record| record.id == id) {
                return Some(look(record));
            }
        }
        None
    }
}

/// One thread's last requests.
#[derive(Debug, Default)]
pub struct ReceiptRing(Mutex<KeptRecords>);

#[derive(Debug, Default)]
struct KeptRecords {
    plain: VecDeque<Box<AccessRecord>>,
    noted: VecDeque<Box<AccessRecord>>,
}

impl ReceiptRing {
    /// Keeps the record. `keep` is the number of noteworthy ones to keep. Returns one that is no
    /// longer kept.
    pub fn push(&self, record: Box<AccessRecord>, keep: usize) -> Option<Box<AccessRecord>> {
        let mut kept = self.0.lock();
        let (ring, max) = if record.is_noteworthy() {
            (&mut kept.noted, keep)
        } else {
            (&mut kept.plain, keep.div_ceil(NOTED_FOR_ONE_PLAIN))
        };
        if max == 0 {
            return Some(record);
        }
        // After a change to fewer, one more leaves with each new one.
        let oldest = if ring.len() >= max { ring.pop_front() } else { None };
        if ring.len() >= max {
            ring.pop_front();
        }
        ring.push_back(record);
        oldest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::access_log::tests::record;

    fn numbered(id: u128, refusal: Option<&'static str>) -> Box<AccessRecord> {
        let mut record = Box::new(record("/", None));
        (record.id, record.refusal) = (RequestId(id), refusal);
        record
    }

    #[test]
    fn files_push_out_files_and_nothing_that_can_be_explained() {
        let rings = ReceiptRings::default();
        let ring = rings.for_thread();
        assert!(ring.push(numbered(0, Some("queue_full")), 80).is_none());
        for id in 1..=10 {
            assert!(ring.push(numbered(id, None), 80).is_none());
        }
        let oldest = rings.for_thread().push(numbered(9999, None), 80).expect("it is full");
        assert_eq!(oldest.id, RequestId(1));
        assert!(rings.find(RequestId(0), |record| record.refusal).is_some());
        assert!(rings.find(RequestId(1), |_| ()).is_none());
        let other = std::thread::scope(|scope| scope.spawn(|| rings.find(RequestId(2), |_| ())).join());
        assert_eq!(other.unwrap(), Some(()), "any thread can ask");
    }

    #[test]
    fn fewer_are_kept_once_fewer_are_wanted_and_none_if_none_is() {
        let ring = ReceiptRing::default();
        for id in 0..100 {
            ring.push(numbered(id, Some("queue_full")), 100);
        }
        for id in 100..200 {
            assert!(ring.push(numbered(id, Some("queue_full")), 10).is_some());
        }
        assert_eq!(ring.0.lock().noted.len(), 10);
        let back = ring.push(numbered(7777, Some("queue_full")), 0).expect("none is kept");
        assert_eq!(back.id, RequestId(7777));
    }
}
