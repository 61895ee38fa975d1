//! What a lane has learned of the requests it runs: how long each kind takes, how many run at once while there is a line, and how
//! good the predictions were.
//!
//! The unit of work is a microsecond of a permit's time. That makes the rate at which work drains simple: each permit drains
//! one microsecond in a microsecond. So nothing has to be measured of the rate but how many permits the lane's own line has,
//! which for a lane held back by its own bound is that bound, without any noise.
//!
//! Requests take longer while all permits are in use than in a quiet hour: how much longer is learned too, so that a line that
//! begins after a quiet hour is reckoned with the pace of the last one. A kind of which nothing is known counts as an average one
//! where a number is needed to decide; nobody is told a wait that rests on that.
//!
//! A step in the speed of the whole machine is seen in those kinds that come often, and applied to the others (`predict::speed`).
//!
//! Not here: who is ahead of whom (`machine::line`), and the wait that follows from both (`machine::waits`).

mod calibration;
mod expected;
mod lent;
mod outlook;
mod pace;
mod replay;
mod speed;

use self::expected::Expected;
use self::lent::Lent;
use self::outlook::{Outlook, Part};
pub(crate) use self::replay::REPLAY_MAX;
use self::replay::Replay;
use self::speed::{Follower, Speed};
pub(crate) use calibration::{Outcome, Record};
pub(crate) use pace::Pace;

use crate::{Class, Moment, Sketch};

/// Kinds of requests that a lane tells apart. All further ones share one more.
const CLASSES: usize = 32;
/// A kind that was not seen for so long gives its place to a new one.
const CLASS_IDLE_US: u64 = 600_000_000;
/// Samples after which one weighs half as much in the service times that people are shown.
const SERVICE_HALF_LIFE: u32 = 500;
/// Time constant of the number that run, and of the rate at which they end, while there is a line.
const SMOOTH_US: f64 = 5e6;

/// A kind of request within one lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot(u8);

#[derive(Debug)]
pub(crate) struct Learned {
    kinds: Vec<Kind>,
    /// All kinds together.
    all: Paces,
    /// What one more request of a kind weighs in its share: more and more, so that earlier ones fade.
    tide: f32,
    /// How much longer requests take while there is a line than their kind does in calm, in thousandths.
    stretch: Pace,
    service: Sketch,
    /// Requests that ended in lanes inside.
    inner: u32,
    line: LineTime,
    lent: Lent,
    speed: Speed,
    pub(crate) record: Record,
    /// Counts changes of pace: what was predicted before the last one says nothing about those after it.
    pub(crate) changes: u32,
}

#[derive(Debug)]
struct Kind {
    class: Class,
    paces: Paces,
    waiting: u32,
    running: u32,
    /// Sum of the moments when the running ones started.
    started: u128,
    /// Requests so far, the late ones weighing more.
    share: f32,
    seen: Moment,
    follower: Follower,
}

/// The pace while somebody waits, when all permits are in use, is not the one of a quiet hour.
#[derive(Debug, Default, Clone, Copy)]
struct Paces {
    calm: Pace,
    queued: Pace,
}

/// In what times a request ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Times {
    Calm,
    /// It began in a line's time and ended after it: in neither pace.
    Between,
    Queued,
}

/// What is averaged over the time in which there is a line.
#[derive(Debug, Default)]
struct LineTime {
    last: Moment,
    running: f64,
    /// Ends, each weighted by how long ago it was, and the same of time itself.
    ends: f64,
    span: f64,
}
/// Of requests in lanes inside this one, one of so many is learned from while nobody waits: they are many.
const CALM_INNER: u32 = 8;

/// Spread up to which requests of a kind take about equally long.
const EVEN_SPREAD: f32 = 0.5;

/// Of requests that run and wait, so many (one in this number) may be of kinds of which nothing is known for a wait to be told.
const UNKNOWN_PART: u32 = 10;

/// Requests after which one weighs half as much in the share of its kind: 2 to the power of 1/200.
const TIDE_GROWTH: f32 = 1.003_472;
/// Weights are scaled down before they lose precision.
const TIDE_MOST: f32 = 1e12;

/// Ratios are kept in thousandths, as a pace tells times apart from a microsecond on.
const STRETCH_SCALE: f64 = 1_000.0;
/// One request that was stuck says nothing about all others.
const STRETCH_MOST: f64 = 100.0;

impl From<u8> for Slot {
    fn from(at: u8) -> Self {
        Self(at)
    }
}

impl Default for Learned {
    fn default() -> Self {
        Self {
            kinds: Vec::new(),
            all: Paces::default(),
            tide: 1.0,
            stretch: Pace::default(),
            service: Sketch::new(SERVICE_HALF_LIFE),
            inner: 0,
            line: LineTime::default(),
            lent: Lent::default(),
            speed: Speed::default(),
            record: Record::default(),
            changes: 0,
        }
    }
}

impl Paces {
    fn add(&mut self, now: Moment, service: f32, times: Times) -> bool {
        match times {
            Times::Queued => self.queued.add(now, service),
            // Better than nothing.
            Times::Between if self.queued.is_known() || self.calm.is_known() => false,
            Times::Calm | Times::Between => self.calm.add(now, service),
        }
    }
}

impl Learned {
    /// The slot of a kind, made if there is room.
    pub(crate) fn slot(&mut self, now: Moment, class: Class) -> Slot {
        let found = self.kinds.iter().position(|kind| kind.class == class);
        let at = match found {
            Some(at) => at,
            None if self.kinds.len() <= CLASSES => {
                self.kinds.push(Kind::new(class));
                self.kinds.len() - 1
            }
            // The last one is shared by all for which there is no room.
            None => self.idle(now).inspect(|at| self.kinds[*at] = Kind::new(class)).unwrap_or(CLASSES),
        };
        self.kinds[at].seen = now;
        self.count(at);
        Slot(u8::try_from(at).expect("there are fewer than 256 kinds"))
    }

    /// One more of this kind.
    fn count(&mut self, at: usize) {
        self.kinds[at].share += self.tide;
        self.tide *= TIDE_GROWTH;
        if self.tide > TIDE_MOST {
            for kind in &mut self.kinds {
                kind.share /= self.tide;
            }
            self.tide = 1.0;
        }
    }

    /// A kind that was not seen for long. Never the shared one.
    fn idle(&self, now: Moment) -> Option<usize> {
        self.kinds[..CLASSES].iter().position(|kind| {
            kind.waiting == 0 && kind.running == 0 && now.0.saturating_sub(kind.seen.0) > CLASS_IDLE_US
        })
    }

    /// Expected service of a kind while there is a line, in microseconds; of all kinds if nothing is known of this one.
    pub(crate) fn expected(&self, slot: Slot) -> Option<f64> {
        Some(self.in_line(slot)?.service())
    }

    /// Expected service of any request here.
    pub(crate) fn expected_of_any(&self) -> Option<f64> {
        Some(self.any_in_line()?.service())
    }

    pub(crate) fn waits(&mut self, slot: Slot) {
        self.kinds[slot.0 as usize].waiting += 1;
    }

    pub(crate) fn waits_no_more(&mut self, slot: Slot) {
        self.kinds[slot.0 as usize].waiting -= 1;
    }

    pub(crate) fn starts(&mut self, now: Moment, slot: Slot) {
        let kind = &mut self.kinds[slot.0 as usize];
        kind.running += 1;
        kind.started += u128::from(now.0);
    }

    pub(crate) fn ends(&mut self, slot: Slot, started: Moment) {
        let kind = &mut self.kinds[slot.0 as usize];
        kind.running -= 1;
        kind.started -= u128::from(started.0);
    }

    /// In what times one ran that began then and ends now. `is_queued`: somebody waits, or would.
    pub(crate) fn times(&self, began: Moment, is_queued: bool) -> Times {
        match (is_queued, began <= self.line.last) {
            (true, _) => Times::Queued,
            (false, true) => Times::Between,
            (false, false) => Times::Calm,
        }
    }

    /// What an earlier start had learned of any request while there was a line: until this one has seen one end.
    pub(crate) fn recall(&mut self, now: Moment, service_us: f64) {
        if self.any_in_line().is_none() {
            self.all.add(now, service_us as f32, Times::Queued);
        }
    }

    /// Learns from a request of this lane that ended as it should.
    pub(crate) fn learn(&mut self, now: Moment, slot: Slot, service_us: f64, times: Times) {
        self.service.add(service_us);
        let kind = &mut self.kinds[slot.0 as usize];
        if times == Times::Queued {
            kind.paces.queued.scale(self.speed.scale(&kind.follower) as f32);
            kind.follower.catches_up(&self.speed);
        }
        let (calm, before) = (kind.paces.calm, kind.paces.queued);
        let has_changed = kind.paces.add(now, service_us as f32, times);
        let moved = before.moved_to(&kind.paces.queued);
        if times == Times::Queued && calm.is_fair() {
            let calm = f64::from(calm.expected().unwrap_or(1.0)).max(1.0);
            let stretch = (service_us / calm).min(STRETCH_MOST) * STRETCH_SCALE;
            self.stretch.add(now, stretch as f32);
        }
        self.all.add(now, service_us as f32, times);
        let have_moved = times == Times::Queued && self.has_moved(now, slot, moved);
        self.changes = self.changes.wrapping_add(u32::from(has_changed || have_moved));
    }

    /// Learns from a request of a lane inside this one: only what any request takes.
    pub(crate) fn learn_of_inner(&mut self, now: Moment, service_us: f64, times: Times) {
        self.inner = self.inner.wrapping_add(1);
        if times == Times::Queued || self.inner.is_multiple_of(CALM_INNER) || !self.all.calm.is_sure() {
            self.all.add(now, service_us as f32, times);
        }
    }

    /// Expected service of all in line: `None` if nothing at all is known.
    pub(crate) fn work_in_line(&self) -> Option<f64> {
        let any = self.any_in_line();
        let waiting = self.kinds.iter().filter(|kind| kind.waiting > 0);
        waiting.map(|kind| Some(f64::from(kind.waiting) * self.of_kind(kind, any)?.service())).sum()
    }

    /// When it is the turn of one behind this part of the line (1: the whole), if so many permits are its lane's own. `None`:
    /// nothing at all is known.
    pub(crate) fn turn(&self, now: Moment, part: f64, permits: f64, lent: u32) -> Option<f64> {
        let any = self.any_in_line();
        let mut outlook = Outlook::new(permits);
        let lent = self.lent_kinds(now, lent);
        for (at, kind) in self.kinds.iter().enumerate() {
            let (own, lent) = (f64::from(kind.running), lent.of(at));
            if own + lent + f64::from(kind.waiting) <= 0.0 {
                continue;
            }
            let expected = self.of_kind(kind, any)?;
            let rest =
                own * kind.rest(now, expected) + lent * expected.rest(self.lent.age(now, expected, 0.5));
            outlook.add(Part {
                running: own + lent,
                rest: rest / (own + lent).max(f64::MIN_POSITIVE),
                waiting: f64::from(kind.waiting) * part,
                service: expected.service(),
                spread: expected.spread(),
            });
        }
        outlook.turn()
    }

    /// Enough is known of those who run and wait for a wait to be told.
    pub(crate) fn is_known(&self) -> bool {
        let (mut all, mut unknown) = (0, 0);
        for kind in self.present() {
            let count = kind.running + kind.waiting;
            all += count;
            if !self.of_kind(kind, None).is_some_and(|expected| expected.is_known) {
                unknown += count;
            }
        }
        unknown * UNKNOWN_PART <= all || self.kinds_are_alike()
    }

    /// Kinds with requests that run or wait.
    fn present(&self) -> impl Iterator<Item = &Kind> {
        self.kinds.iter().filter(|kind| kind.running > 0 || kind.waiting > 0)
    }

    /// All kinds in line are well known, as they are when there is a line. What is predicted then and turns out wrong has other
    /// reasons than not having known better.
    pub(crate) fn is_sure(&self) -> bool {
        self.kinds.iter().all(|kind| kind.waiting == 0 || kind.paces.queued.is_sure())
    }

    /// Several kinds run or wait, each of which takes about equally long: who they are says more than how many.
    pub(crate) fn is_mixed(&self) -> bool {
        let is_even = |kind: &Kind| {
            self.of_kind(kind, None).is_some_and(|expected| expected.spread() <= f64::from(EVEN_SPREAD))
        };
        self.kinds.len() > 1 && self.present().all(is_even)
    }

    /// The same for a short line: played through with each that runs, with its beginning, and each in line ahead.
    pub(crate) fn turn_played(
        &self,
        now: Moment,
        running: impl Iterator<Item = (Slot, Moment)>,
        lent: u32,
        surplus: usize,
        line: impl Iterator<Item = Slot>,
    ) -> Option<f64> {
        let mut replay = Replay::new();
        for (slot, since) in running {
            let has_run = now.0.saturating_sub(since.0) as f64;
            replay.runs(self.in_line(slot)?.rest(has_run));
        }
        self.play_lent(now, lent, &mut replay)?;
        replay.take_away(surplus);
        for slot in line {
            replay.waits(self.in_line(slot)?.service());
        }
        replay.turn()
    }

    /// So many have run since this was last called or the line began.
    pub(crate) fn pass_time_in_line(&mut self, now: Moment, running: u32) {
        self.line.advance(now, f64::from(running));
    }

    /// A line begins.
    pub(crate) fn line_begins(&mut self, now: Moment, running: u32) {
        let away = now.0.saturating_sub(self.line.last.0) as f64;
        if away > SMOOTH_US {
            self.line = LineTime { running: f64::from(running), ..LineTime::default() };
        }
        self.line.last = now;
    }

    /// There was a line at this moment, or later.
    pub(crate) fn had_line_since(&self, moment: Moment) -> bool {
        self.line.last > moment
    }

    /// One that ran has ended while there was a line.
    pub(crate) fn ended_in_line(&mut self) {
        self.line.ends += 1.0;
    }

    /// How many of this lane's own ran at once lately, while there was a line.
    pub(crate) fn running_in_line(&self) -> f64 {
        self.line.running
    }

    /// How many ended in a second lately, while there was a line.
    pub(crate) fn ends_per_second(&self) -> Option<f64> {
        // A fifth of the time constant is the least from which a rate can be told.
        (self.line.span > SMOOTH_US / 5.0).then(|| self.line.ends / self.line.span * 1e6)
    }

    /// A quantile of the service times, in microseconds.
    pub(crate) fn service(&self, q: f64) -> Option<f64> {
        self.service.quantile(q)
    }
}

impl Kind {
    fn new(class: Class) -> Self {
        Self {
            class,
            paces: Paces::default(),
            waiting: 0,
            running: 0,
            started: 0,
            share: 0.0,
            seen: Moment::default(),
            follower: Follower::default(),
        }
    }

    /// What is left, on average, of each of the running ones.
    fn rest(&self, now: Moment, expected: Expected<'_>) -> f64 {
        let has_run = (u128::from(now.0) * u128::from(self.running)).saturating_sub(self.started) as f64;
        expected.rest(has_run / f64::from(self.running.max(1)))
    }
}

impl LineTime {
    fn advance(&mut self, now: Moment, running: f64) {
        let passed = now.0.saturating_sub(self.last.0) as f64;
        if passed <= 0.0 {
            return;
        }
        let keep = (-passed / SMOOTH_US).exp();
        self.running = running + (self.running - running) * keep;
        self.ends *= keep;
        self.span = self.span * keep + SMOOTH_US * (1.0 - keep);
        self.last = now;
    }
}

#[cfg(test)]
mod tests;
