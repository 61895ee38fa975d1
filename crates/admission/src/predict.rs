//! Learns about the requests of a lane: service times by kind, concurrency during a queue, and
//! quality of predictions.
//!
//! The unit of work is a microsecond of a permit's time. So the drain rate is simple: each permit
//! drains one microsecond in a microsecond. Only the number of permits of the lane's own queue must
//! be measured. For a lane held back by its own limit, that is the limit, without any noise.
//!
//! Requests take longer while all permits are in use than in a quiet hour. How much longer is
//! learned, too. So a queue after a quiet hour is predicted with the pace of the last queue. An
//! unknown kind counts as average where a decision needs a number. A wait that rests on that is
//! never shown.
//!
//! A step in the speed of the whole machine shows in frequent kinds and is applied to the others
//! (`predict::speed`).
//!
//! Not here: who is ahead of whom (`machine::wait_queue`), and the wait that follows from both
//! (`machine::waits`).

mod calibration;
mod expected;
mod lent;
mod outlook;
mod pace;
mod replay;
mod speed;

use self::expected::ExpectedService;
use self::lent::LentAge;
use self::outlook::{ClassWork, WaitOutlook};
use self::replay::PermitReplay;
pub(crate) use self::replay::REPLAY_MAX;
use self::speed::{ClassDrift, CommonDrift};
pub(crate) use calibration::{PredictionRecord, WaitOutcome};
pub(crate) use pace::ServicePace;

use crate::{CostClass, Moment, QuantileSketch};

/// Kinds of requests that a lane distinguishes. All further ones share one more.
const CLASSES: usize = 32;
/// Idle time after which a kind gives its place to a new one.
const CLASS_IDLE_US: u64 = 600_000_000;
/// Samples after which one weighs half as much in the service times shown to people.
const SERVICE_HALF_LIFE: u32 = 500;
/// Time constant of the number that run, and of the rate at which they end, while there is a queue.
const SMOOTH_US: f64 = 5e6;

/// A kind of request within one lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClassSlot(u8);

#[derive(Debug)]
pub(crate) struct LaneStats {
    kinds: Vec<ClassStats>,
    /// All kinds together.
    all: PacePair,
    /// Weight of one more request of a kind in its share. It grows, so that earlier requests fade.
    tide: f32,
    /// How much longer requests take while there is a queue than their kind does in calm, in
    /// thousandths.
    stretch: ServicePace,
    service: QuantileSketch,
    /// Requests that ended in lanes inside.
    inner: u32,
    line: LineTime,
    lent: LentAge,
    speed: CommonDrift,
    pub(crate) record: PredictionRecord,
    /// Counts changes of pace. A prediction from before the last change says nothing about later
    /// ones.
    pub(crate) changes: u32,
}

#[derive(Debug)]
struct ClassStats {
    class: CostClass,
    paces: PacePair,
    waiting: u32,
    running: u32,
    /// Sum of the moments when the running ones started.
    started: u128,
    /// Requests so far, the late ones weighing more.
    share: f32,
    seen: Moment,
    follower: ClassDrift,
}

/// Paces of a kind. The pace with a queue, when all permits are in use, differs from that of a
/// quiet hour.
#[derive(Debug, Default, Clone, Copy)]
struct PacePair {
    calm: ServicePace,
    queued: ServicePace,
}

/// The period in which a request ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LoadPeriod {
    Calm,
    /// It began during a queue and ended after it. It counts for neither pace.
    Between,
    Queued,
}

/// Averages over the time in which there is a queue.
#[derive(Debug, Default)]
struct LineTime {
    last: Moment,
    running: f64,
    /// Ends, each weighted by its age, and the same sum of time itself.
    ends: f64,
    span: f64,
}
/// Sampling rate for requests in lanes inside this one while nothing waits, as they are frequent.
const CALM_INNER: u32 = 8;

/// Spread up to which requests of a kind take about equally long.
const EVEN_SPREAD: f32 = 0.5;

/// Largest part of requests with unknown kinds for which a wait is still shown: one in this number.
const UNKNOWN_PART: u32 = 10;

/// Growth of the weight per request: 2 to the power of 1/200. After 200 requests, one weighs half
/// as much in the share of its kind.
const TIDE_GROWTH: f32 = 1.003_472;
/// Weights are scaled down before they lose precision.
const TIDE_MOST: f32 = 1e12;

/// Ratios are stored in thousandths, because a pace resolves times of one microsecond and more.
const STRETCH_SCALE: f64 = 1_000.0;
/// Largest ratio that counts: one stuck request says nothing about all others.
const STRETCH_MOST: f64 = 100.0;

impl From<u8> for ClassSlot {
    fn from(at: u8) -> Self {
        Self(at)
    }
}

impl Default for LaneStats {
    fn default() -> Self {
        Self {
            kinds: Vec::new(),
            all: PacePair::default(),
            tide: 1.0,
            stretch: ServicePace::default(),
            service: QuantileSketch::new(SERVICE_HALF_LIFE),
            inner: 0,
            line: LineTime::default(),
            lent: LentAge::default(),
            speed: CommonDrift::default(),
            record: PredictionRecord::default(),
            changes: 0,
        }
    }
}

impl PacePair {
    fn add(&mut self, now: Moment, service: f32, times: LoadPeriod) -> bool {
        match times {
            LoadPeriod::Queued => self.queued.add(now, service),
            // Better than no estimate.
            LoadPeriod::Between if self.queued.is_known() || self.calm.is_known() => false,
            LoadPeriod::Calm | LoadPeriod::Between => self.calm.add(now, service),
        }
    }
}

impl LaneStats {
    /// Returns the slot of a kind, made if there is room.
    pub(crate) fn slot(&mut self, now: Moment, class: CostClass) -> ClassSlot {
        let found = self.kinds.iter().position(|kind| kind.class == class);
        let at = match found {
            Some(at) => at,
            None if self.kinds.len() <= CLASSES => {
                self.kinds.push(ClassStats::new(class));
                self.kinds.len() - 1
            }
            // The last one is shared by all kinds for which there is no room.
            None => self.idle(now).inspect(|at| self.kinds[*at] = ClassStats::new(class)).unwrap_or(CLASSES),
        };
        self.kinds[at].seen = now;
        self.count(at);
        ClassSlot(u8::try_from(at).expect("there are fewer than 256 kinds"))
    }

    /// Counts one more request of this kind.
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

    /// Returns a kind that was not seen for long. Never the shared one.
    fn idle(&self, now: Moment) -> Option<usize> {
        self.kinds[..CLASSES].iter().position(|kind| {
            kind.waiting == 0 && kind.running == 0 && now.0.saturating_sub(kind.seen.0) > CLASS_IDLE_US
        })
    }

    /// Returns the expected service of a kind while there is a queue, in microseconds. If this kind
    /// is unknown, it is that of all kinds.
    pub(crate) fn expected(&self, slot: ClassSlot) -> Option<f64> {
        Some(self.in_line(slot)?.service())
    }

    /// Returns the expected service of any request here.
    pub(crate) fn expected_of_any(&self) -> Option<f64> {
        Some(self.any_in_line()?.service())
    }

    pub(crate) fn waits(&mut self, slot: ClassSlot) {
        self.kinds[slot.0 as usize].waiting += 1;
    }

    pub(crate) fn waits_no_more(&mut self, slot: ClassSlot) {
        self.kinds[slot.0 as usize].waiting -= 1;
    }

    pub(crate) fn starts(&mut self, now: Moment, slot: ClassSlot) {
        let kind = &mut self.kinds[slot.0 as usize];
        kind.running += 1;
        kind.started += u128::from(now.0);
    }

    pub(crate) fn ends(&mut self, slot: ClassSlot, started: Moment) {
        let kind = &mut self.kinds[slot.0 as usize];
        kind.running -= 1;
        kind.started -= u128::from(started.0);
    }

    /// Returns the period of a request that began then and ends now. `is_queued` is set if a
    /// request waits, or would.
    pub(crate) fn times(&self, began: Moment, is_queued: bool) -> LoadPeriod {
        match (is_queued, began <= self.line.last) {
            (true, _) => LoadPeriod::Queued,
            (false, true) => LoadPeriod::Between,
            (false, false) => LoadPeriod::Calm,
        }
    }

    /// Restores the service time with a queue that an earlier process had learned. It counts until
    /// this process has seen a request end.
    pub(crate) fn recall(&mut self, now: Moment, service_us: f64) {
        if self.any_in_line().is_none() {
            self.all.add(now, service_us as f32, LoadPeriod::Queued);
        }
    }

    /// Learns from a request of this lane that ended normally.
    pub(crate) fn learn(&mut self, now: Moment, slot: ClassSlot, service_us: f64, times: LoadPeriod) {
        self.service.add(service_us);
        let kind = &mut self.kinds[slot.0 as usize];
        if times == LoadPeriod::Queued {
            kind.paces.queued.scale(self.speed.scale(&kind.follower) as f32);
            kind.follower.catches_up(&self.speed);
        }
        let calm = kind.paces.calm;
        let before = kind.paces.queued;
        let has_changed = kind.paces.add(now, service_us as f32, times);
        let moved = before.moved_to(&kind.paces.queued);
        if times == LoadPeriod::Queued && calm.is_fair() {
            let calm = f64::from(calm.expected().unwrap_or(1.0)).max(1.0);
            let stretch = (service_us / calm).min(STRETCH_MOST) * STRETCH_SCALE;
            self.stretch.add(now, stretch as f32);
        }
        self.all.add(now, service_us as f32, times);
        let have_moved = times == LoadPeriod::Queued && self.has_moved(now, slot, moved);
        self.changes = self.changes.wrapping_add(u32::from(has_changed || have_moved));
    }

    /// Learns from a request of a lane inside this one: only the service time of any request.
    pub(crate) fn learn_of_inner(&mut self, now: Moment, service_us: f64, times: LoadPeriod) {
        self.inner = self.inner.wrapping_add(1);
        if times == LoadPeriod::Queued || self.inner.is_multiple_of(CALM_INNER) || !self.all.calm.is_sure() {
            self.all.add(now, service_us as f32, times);
        }
    }

    /// Returns the expected service of all queued requests. `None` if nothing at all is known.
    pub(crate) fn work_in_line(&self) -> Option<f64> {
        let any = self.any_in_line();
        let waiting = self.kinds.iter().filter(|kind| kind.waiting > 0);
        waiting.map(|kind| Some(f64::from(kind.waiting) * self.of_kind(kind, any)?.service())).sum()
    }

    /// Returns when a request behind this part of the queue (1 is the whole) runs. `permits` are
    /// the lane's own. `None` if nothing at all is known.
    pub(crate) fn turn(&self, now: Moment, part: f64, permits: f64, lent: u32) -> Option<f64> {
        let any = self.any_in_line();
        let mut outlook = WaitOutlook::new(permits);
        let lent = self.lent_kinds(now, lent);
        for (at, kind) in self.kinds.iter().enumerate() {
            let own = f64::from(kind.running);
            let lent = lent.of(at);
            if own + lent + f64::from(kind.waiting) <= 0.0 {
                continue;
            }
            let expected = self.of_kind(kind, any)?;
            let rest =
                own * kind.rest(now, expected) + lent * expected.rest(self.lent.age(now, expected, 0.5));
            outlook.add(ClassWork {
                running: own + lent,
                rest: rest / (own + lent).max(f64::MIN_POSITIVE),
                waiting: f64::from(kind.waiting) * part,
                service: expected.service(),
                spread: expected.spread(),
            });
        }
        outlook.turn()
    }

    /// Returns whether enough is known of running and waiting requests to show a wait.
    pub(crate) fn is_known(&self) -> bool {
        let mut all = 0;
        let mut unknown = 0;
        for kind in self.present() {
            let count = kind.running + kind.waiting;
            all += count;
            if !self.of_kind(kind, None).is_some_and(|expected| expected.is_known) {
                unknown += count;
            }
        }
        unknown * UNKNOWN_PART <= all || self.kinds_are_alike()
    }

    /// Returns the kinds with requests that run or wait.
    fn present(&self) -> impl Iterator<Item = &ClassStats> {
        self.kinds.iter().filter(|kind| kind.running > 0 || kind.waiting > 0)
    }

    /// Returns whether all kinds in the queue are well known, as is normal when there is a queue. A
    /// wrong prediction then has other reasons than missing knowledge.
    pub(crate) fn is_sure(&self) -> bool {
        self.kinds.iter().all(|kind| kind.waiting == 0 || kind.paces.queued.is_sure())
    }

    /// Returns whether several kinds run or wait, each with even service times. Then the kinds say
    /// more than the count.
    pub(crate) fn is_mixed(&self) -> bool {
        let is_even = |kind: &ClassStats| {
            self.of_kind(kind, None).is_some_and(|expected| expected.spread() <= f64::from(EVEN_SPREAD))
        };
        self.kinds.len() > 1 && self.present().all(is_even)
    }

    /// Returns the same for a short queue. It simulates each running request with its start, and
    /// each queued request ahead.
    pub(crate) fn turn_played(
        &self,
        now: Moment,
        running: impl Iterator<Item = (ClassSlot, Moment)>,
        lent: u32,
        surplus: usize,
        line: impl Iterator<Item = ClassSlot>,
    ) -> Option<f64> {
        let mut replay = PermitReplay::new();
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

    /// Accounts for `running` requests since the last call or since the queue began.
    pub(crate) fn pass_time_in_line(&mut self, now: Moment, running: u32) {
        self.line.advance(now, f64::from(running));
    }

    /// Notes that a queue begins.
    pub(crate) fn line_begins(&mut self, now: Moment, running: u32) {
        let away = now.0.saturating_sub(self.line.last.0) as f64;
        if away > SMOOTH_US {
            self.line = LineTime { running: f64::from(running), ..LineTime::default() };
        }
        self.line.last = now;
    }

    /// Returns whether there was a queue at this moment, or later.
    pub(crate) fn had_line_since(&self, moment: Moment) -> bool {
        self.line.last > moment
    }

    /// Notes that a running request has ended while there was a queue.
    pub(crate) fn ended_in_line(&mut self) {
        self.line.ends += 1.0;
    }

    /// Returns how many of this lane's own requests ran at once recently, while there was a queue.
    pub(crate) fn running_in_line(&self) -> f64 {
        self.line.running
    }

    /// Returns how many requests ended per second recently, while there was a queue.
    pub(crate) fn ends_per_second(&self) -> Option<f64> {
        // A fifth of the time constant is the least from which a rate can be derived.
        (self.line.span > SMOOTH_US / 5.0).then(|| self.line.ends / self.line.span * 1e6)
    }

    /// Returns a quantile of the service times, in microseconds.
    pub(crate) fn service(&self, q: f64) -> Option<f64> {
        self.service.quantile(q)
    }
}

impl ClassStats {
    fn new(class: CostClass) -> Self {
        Self {
            class,
            paces: PacePair::default(),
            waiting: 0,
            running: 0,
            started: 0,
            share: 0.0,
            seen: Moment::default(),
            follower: ClassDrift::default(),
        }
    }

    /// Returns the average remaining service of each running request.
    fn rest(&self, now: Moment, expected: ExpectedService<'_>) -> f64 {
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
