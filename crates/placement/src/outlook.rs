//! How long a request will wait whose site needs a place: from what such waits were made of lately, and from how many sites wait
//! here and at the other nodes.
//!
//! A wait is for the place (another node chosen, the store's word), for the turn there, since each node wakes so many at once, for the
//! wake, and until the node before can serve no more. Nothing is predicted before one such wait was seen whole, and nothing of one
//! that lasts longer than was predicted. Not here: what is done meanwhile (`relocation`), the line of one node's wakes (the
//! keeper), which measures the same.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::Moment;

/// Each wait moves what is expected of the next by an eighth.
const LEARN: u32 = 8;

/// What one wait was made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stages {
    /// From the question for a place to its answer.
    pub place: Duration,
    /// Once its turn had come.
    pub wake: Duration,
    /// Beside an application that was ready.
    pub fence: Duration,
}

impl Stages {
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
pub struct Waiting {
    pub requests: u32,
    pub since: Moment,
    /// Sites whose turn came before when its first request came.
    ahead: usize,
}

/// All sites that one node's requests wait for.
#[derive(Debug)]
pub struct Outlook<S> {
    waiting: BTreeMap<S, Waiting>,
    typical: Option<Stages>,
    /// Wakes that the other nodes say they have before them, whoever asked for them.
    before: usize,
}

impl<S: Ord + Clone> Outlook<S> {
    pub const fn new() -> Self {
        Self { waiting: BTreeMap::new(), typical: None, before: 0 }
    }

    /// One request more waits for this site's place.
    pub fn begin(&mut self, now: Moment, site: &S) {
        let ahead = self.ahead();
        let first = || Waiting { requests: 0, since: now, ahead };
        self.waiting.entry(site.clone()).or_insert_with(first).requests += 1;
    }

    /// One fewer does.
    pub fn end(&mut self, site: &S) {
        let Some(waiting) = self.waiting.get_mut(site) else { return };
        waiting.requests -= 1;
        if waiting.requests == 0 {
            self.waiting.remove(site);
        }
    }

    /// So many wakes the other nodes have before them, under way and in line, all together.
    pub fn told(&mut self, before: usize) {
        self.before = before;
    }

    /// Whose turn comes before that of a site which would come now. Those that wait here are among the wakes of the other nodes, or
    /// about to be.
    fn ahead(&self) -> usize {
        self.waiting.len().max(self.before)
    }

    /// So long one waited that was answered.
    pub fn learn(&mut self, seen: Stages) {
        self.typical = Some(self.typical.map_or(seen, |typical| typical.learn(seen)));
    }

    /// How much longer requests for this site wait, or would that come now. `at_once`: so many sites the other nodes wake at the same
    /// time. None: nothing is known that says so.
    pub fn predicted(&self, now: Moment, site: &S, at_once: usize) -> Option<Duration> {
        let Stages { place, wake, fence } = self.typical?;
        let own = self.waiting.get(site);
        let ahead = own.map_or(self.ahead(), |own| own.ahead);
        let turns = u32::try_from(ahead / at_once.max(1)).unwrap_or(u32::MAX);
        let whole =
            [wake.saturating_mul(turns), wake, fence].into_iter().fold(place, Duration::saturating_add);
        whole.checked_sub(own.map_or(Duration::ZERO, |own| now.since(own.since)))
    }

    /// Who waits.
    pub fn waiting(&self) -> impl Iterator<Item = (&S, &Waiting)> {
        self.waiting.iter()
    }
}

impl<S: Ord + Clone> Default for Outlook<S> {
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

    const SEEN: Stages = Stages { place: ms(20), wake: ms(80), fence: ms(100) };

    #[test]
    fn nothing_is_predicted_before_one_wait_was_seen() {
        let mut outlook = Outlook::new();
        outlook.begin(Moment(0), &"wiki");
        assert_eq!(outlook.predicted(Moment(0), &"wiki", 2), None);
        outlook.learn(SEEN);
        assert_eq!(outlook.predicted(Moment(0), &"wiki", 2), Some(ms(200)));
    }

    #[test]
    fn what_has_passed_is_taken_off_and_what_lasts_longer_is_not_known() {
        let mut outlook = Outlook::new();
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
        let mut outlook = Outlook::new();
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
        let mut outlook = Outlook::new();
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
        let mut outlook = Outlook::new();
        outlook.learn(SEEN);
        outlook.learn(Stages { place: ms(100), ..SEEN });
        assert_eq!(outlook.predicted(Moment(0), &"wiki", 1), Some(ms(210)));
        for _ in 0..200 {
            outlook.learn(Stages::default());
        }
        assert!(outlook.predicted(Moment(0), &"wiki", 1).unwrap() < ms(1));
    }
}
