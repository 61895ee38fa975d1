//! The time of the next check of each instance: exact, and no other instance is checked. Pure.
//!
//! Not here: waiting for the time (`instances`), the effects of a check (`lifecycle`).

use std::collections::{BTreeSet, HashMap};
use std::time::Instant;

use crate::instances::decide::wake_queue::InstanceKey;

#[derive(Debug, Default)]
pub struct AlarmQueue {
    order: BTreeSet<(Instant, InstanceKey)>,
    of: HashMap<InstanceKey, Instant>,
}

impl AlarmQueue {
    /// Sets the one time of this instance, or removes it. Returns true if the first of all alarms
    /// has changed.
    pub fn set(&mut self, key: InstanceKey, at: Option<Instant>) -> bool {
        let before = self.first();
        let old = match at {
            Some(at) => self.of.insert(key, at),
            None => self.of.remove(&key),
        };
        if let Some(old) = old {
            self.order.remove(&(old, key));
        }
        self.order.extend(at.map(|at| (at, key)));
        self.first() != before
    }

    pub fn first(&self) -> Option<Instant> {
        self.order.first().map(|(at, _)| *at)
    }

    /// Returns the first `count` instances.
    pub fn earliest(&self, count: usize) -> Vec<InstanceKey> {
        self.order.iter().take(count).map(|(_, key)| *key).collect()
    }

    /// Removes and returns the first one, if its time has come.
    pub fn due(&mut self, now: Instant) -> Option<InstanceKey> {
        let (at, key) = *self.order.first()?;
        if at > now {
            return None;
        }
        self.order.pop_first();
        self.of.remove(&key);
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_has_one_time_and_the_earliest_is_first() {
        let now = Instant::now();
        let at = |ms| Some(now + Duration::from_millis(ms));
        let mut alarms = AlarmQueue::default();
        assert!(alarms.set(1, at(50)));
        assert!(!alarms.set(2, at(70)));
        assert!(alarms.set(3, at(20)));
        assert_eq!(alarms.due(now), None);
        assert!(alarms.set(3, at(90)), "later now");
        assert_eq!((alarms.earliest(2), alarms.earliest(9)), (vec![1, 2], vec![1, 2, 3]));
        assert!(!alarms.set(2, None));
        let late = now + Duration::from_millis(100);
        assert_eq!((alarms.due(late), alarms.due(late), alarms.due(late)), (Some(1), Some(3), None));
        assert_eq!((alarms.first(), alarms.of.len()), (None, 0));
    }
}
