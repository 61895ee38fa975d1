//! Predicts how long a request waits whose site needs a placement. It uses the stages of recent
//! waits, and the sites that wait here and at the other nodes.
//!
//! A wait has four parts. The first is the placement: the choice of a node and the store's reply.
//! The second is the turn there, since each node wakes a limited number at once. The third is the
//! wake. The last is the time until the former node can serve no more. Nothing is predicted before
//! one such wait was seen whole, or once a wait lasts longer than predicted. Not here: the steps
//! meanwhile (`relocation`), the queue of one node's wakes (the keeper), which measures the same.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::Moment;

/// Each wait moves the expectation of the next by an eighth.
const LEARN: u32 = 8;

/// The parts of one wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WaitStages {
    /// From the query for a placement to its reply.
    pub place: Duration,
    /// Time of the wake, once its turn had come.
    pub wake: Duration,
    /// Time waited for the old lease while the application was ready.
    pub fence: Duration,
}

impl WaitStages {
    fn learn(self, seen: Self) -> Self {
        let moved = |known: Duration, seen: Duration| known * (LEARN - 1) / LEARN + seen / LEARN;
        Self {
            place: moved(self.place, seen.place),
            wake: moved(self.wake, seen.wake),
            fence: moved(self.fence, seen.fence),
        }
    }
}

/// A site whose requests wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitingSite {
    pub requests: u32,
    pub since: Moment,
    /// Sites that were before it when its first request came.
    ahead: usize,
}

/// All sites for which one node's requests wait.
#[derive(Debug)]
pub struct WakeOutlook<S> {
    waiting: BTreeMap<S, WaitingSite>,
    typical: Option<WaitStages>,
    /// Wakes that the other nodes report as before them, whichever node asked for them.
    before: usize,
}

impl<S: Ord + Clone> WakeOutlook<S> {
    pub const fn new() -> Self {
        Self { waiting: BTreeMap::new(), typical: None, before: 0 }
    }

    /// Notes one more request that waits for this site's placement.
    pub fn begin(&mut self, now: Moment, site: &S) {
        let ahead = self.ahead();
        let first = || WaitingSite { requests: 0, since: now, ahead };
        self.waiting.entry(site.clone()).or_insert_with(first).requests += 1;
    }

    /// Notes one such request fewer.
    pub fn end(&mut self, site: &S) {
        let Some(waiting) = self.waiting.get_mut(site) else { return };
        waiting.requests -= 1;
        if waiting.requests == 0 {
            self.waiting.remove(site);
        }
    }

    /// Notes the number of wakes at the other nodes, in progress and queued, all together.
    pub fn told(&mut self, before: usize) {
        self.before = before;
    }

    /// Returns how many wakes go before a site that comes now. The sites waiting here are among the
    /// wakes of the other nodes, or soon will be.
    fn ahead(&self) -> usize {
        self.waiting.len().max(self.before)
    }

    /// Learns from the wait of a request that was served.
    pub fn learn(&mut self, seen: WaitStages) {
        self.typical = Some(self.typical.map_or(seen, |typical| typical.learn(seen)));
    }

    /// Returns how much longer requests for this site wait, or would if they came now. `at_once` is
    /// how many sites the other nodes wake at the same time. `None` if too little is known.
    pub fn predicted(&self, now: Moment, site: &S, at_once: usize) -> Option<Duration> {
        let WaitStages { place, wake, fence } = self.typical?;
        let own = self.waiting.get(site);
        let ahead = own.map_or(self.ahead(), |own| own.ahead);
        let turns = u32::try_from(ahead / at_once.max(1)).unwrap_or(u32::MAX);
        let whole =
            [wake.saturating_mul(turns), wake, fence].into_iter().fold(place, Duration::saturating_add);
        whole.checked_sub(own.map_or(Duration::ZERO, |own| now.since(own.since)))
    }

    /// Returns the waiting sites.
    pub fn waiting(&self) -> impl Iterator<Item = (&S, &WaitingSite)> {
        self.waiting.iter()
    }
}

impl<S: Ord + Clone> Default for WakeOutlook<S> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    const SEEN: WaitStages = WaitStages { place: ms(20), wake: ms(80), fence: ms(100) };

    #[test]
    fn nothing_is_predicted_before_one_wait_was_seen() {
        let mut outlook = WakeOutlook::new();
        outlook.begin(Moment(0), &"wiki");
        assert_eq!(outlook.predicted(Moment(0), &"wiki", 2), None);
        outlook.learn(SEEN);
        assert_eq!(outlook.predicted(Moment(0), &"wiki", 2), Some(ms(200)));
    }

    #[test]
    fn passed_time_is_subtracted_and_longer_waits_are_unknown() {
        let mut outlook = WakeOutlook::new();
        outlook.learn(SEEN);
        let begun = Moment(0) + ms(5000);
        outlook.begin(begun, &"wiki");
        // Who joins later waits no longer than the first.
        outlook.begin(begun + ms(60), &"wiki");
        assert_eq!(outlook.predicted(begun + ms(60), &"wiki", 2), Some(ms(140)));
        assert_eq!(outlook.predicted(begun + ms(200), &"wiki", 2), Some(Duration::ZERO));
        assert_eq!(outlook.predicted(begun + ms(201), &"wiki", 2), None);
        outlook.end(&"wiki");
        assert_eq!(outlook.waiting().next().map(|(_, waiting)| waiting.requests), Some(1));
        outlook.end(&"wiki");
        assert_eq!(outlook.waiting().next(), None);
        assert_eq!(outlook.predicted(begun + ms(201), &"wiki", 2), Some(ms(200)), "whoever comes now");
    }

    #[test]
    fn of_many_sites_those_that_come_later_wait_for_their_turn() {
        let mut outlook = WakeOutlook::new();
        outlook.learn(SEEN);
        for site in 0..10 {
            outlook.begin(Moment(0), &site);
        }
        let predicted = |site, at_once| outlook.predicted(Moment(0), &site, at_once);
        assert_eq!(predicted(3, 4), Some(ms(200)));
        assert_eq!(predicted(4, 4), Some(ms(280)));
        assert_eq!(predicted(9, 4), Some(ms(360)));
        assert_eq!(predicted(99, 4), Some(ms(360)), "one that would come now");
        assert_eq!(predicted(9, 0), Some(ms(200 + 9 * 80)), "one node wakes one at least");
    }

    #[test]
    fn wakes_that_others_asked_for_come_before() {
        let mut outlook = WakeOutlook::new();
        outlook.learn(SEEN);
        outlook.told(6);
        outlook.begin(Moment(0), &"wiki");
        assert_eq!(outlook.predicted(Moment(0), &"wiki", 2), Some(ms(200 + 3 * 80)));
        // What was before it goes on while it waits, and is not counted twice.
        outlook.told(2);
        assert_eq!(outlook.predicted(Moment(0) + ms(80), &"wiki", 2), Some(ms(200 + 2 * 80)));
        assert_eq!(outlook.predicted(Moment(0), &"blog", 2), Some(ms(280)), "one that would come now");
    }

    #[test]
    fn each_wait_moves_what_is_expected_of_the_next() {
        let mut outlook = WakeOutlook::new();
        outlook.learn(SEEN);
        outlook.learn(WaitStages { place: ms(100), ..SEEN });
        assert_eq!(outlook.predicted(Moment(0), &"wiki", 1), Some(ms(210)));
        for _ in 0..200 {
            outlook.learn(WaitStages::default());
        }
        assert!(outlook.predicted(Moment(0), &"wiki", 1).unwrap() < ms(1));
    }
}
