//! What a lane has learned of the requests it runs: how long each kind takes, how many run at once while there is a line, and how
//! good the predictions were.
//!
//! The unit of work is a microsecond of a permit's time. That makes the rate at which work drains simple: each permit drains
//! one microsecond in a microsecond. So nothing has to be measured of the rate but how many permits the lane's own line has,
//! which for a lane held back by its own bound is that bound, without any noise.
//!
//! Not here: who is ahead of whom (`machine::line`), and the wait that follows from both (`machine::waits`).

mod calibration;
mod outlook;
mod pace;
mod replay;

use self::outlook::{Outlook, Part};
pub(crate) use self::replay::REPLAY_MAX;
use self::replay::Replay;
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
    service: Sketch,
    /// Requests that ended in lanes inside.
    inner: u32,
    line: LineTime,
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
    seen: Moment,
}

/// The pace while somebody waits, when all permits are in use, is not the one of a quiet hour.
#[derive(Debug, Default, Clone, Copy)]
struct Paces {
    calm: Pace,
    queued: Pace,
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
            service: Sketch::new(SERVICE_HALF_LIFE),
            inner: 0,
            line: LineTime::default(),
            record: Record::default(),
            changes: 0,
        }
    }
}

impl Paces {
    fn add(&mut self, now: Moment, service: f32, is_queued: bool) -> bool {
        if is_queued { self.queued.add(now, service) } else { self.calm.add(now, service) }
    }

    /// The one with a line if it is known, as it is for lines that this is asked.
    fn best(&self) -> Option<&Pace> {
        [&self.queued, &self.calm].into_iter().find(|pace| pace.is_known())
    }

    fn expected(&self) -> Option<f64> {
        self.best()?.expected().map(f64::from)
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
        Slot(u8::try_from(at).expect("there are fewer than 256 kinds"))
    }

    /// A kind that was not seen for long. Never the shared one.
    fn idle(&self, now: Moment) -> Option<usize> {
        self.kinds[..CLASSES].iter().position(|kind| {
            kind.waiting == 0 && kind.running == 0 && now.0.saturating_sub(kind.seen.0) > CLASS_IDLE_US
        })
    }

    /// Expected service of a kind, in microseconds; of all kinds if nothing is known of this one.
    pub(crate) fn expected(&self, slot: Slot) -> Option<f64> {
        self.kinds
            .get(slot.0 as usize)
            .and_then(|kind| kind.paces.expected())
            .or_else(|| self.expected_of_any())
    }

    /// Expected service of any request here.
    pub(crate) fn expected_of_any(&self) -> Option<f64> {
        self.all.expected()
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

    /// Learns from a request of this lane that ended as it should.
    pub(crate) fn learn(&mut self, now: Moment, slot: Slot, service_us: f64, is_queued: bool) {
        self.service.add(service_us);
        let has_changed = self.kinds[slot.0 as usize].paces.add(now, service_us as f32, is_queued);
        self.all.add(now, service_us as f32, is_queued);
        self.changes = self.changes.wrapping_add(u32::from(has_changed));
    }

    /// Learns from a request of a lane inside this one: only what any request takes.
    pub(crate) fn learn_of_inner(&mut self, now: Moment, service_us: f64, is_queued: bool) {
        self.inner = self.inner.wrapping_add(1);
        if is_queued || self.inner.is_multiple_of(CALM_INNER) || !self.all.calm.is_sure() {
            self.all.add(now, service_us as f32, is_queued);
        }
    }

    /// Expected service of all in line: `None` if nothing is known of some of them.
    pub(crate) fn work_in_line(&self) -> Option<f64> {
        let any = self.expected_of_any();
        let waiting = self.kinds.iter().filter(|kind| kind.waiting > 0);
        waiting.map(|kind| Some(f64::from(kind.waiting) * kind.paces.expected().or(any)?)).sum()
    }

    /// When it is the turn of one behind this part of the line (1: the whole), if so many permits are its lane's own. `None`:
    /// nothing is known of some request that runs or waits.
    pub(crate) fn turn(&self, now: Moment, part: f64, permits: f64, lent: u32) -> Option<f64> {
        let any = self.all.best();
        let mut outlook = Outlook::new(permits);
        for kind in self.kinds.iter().filter(|kind| kind.running > 0 || kind.waiting > 0) {
            let pace = kind.paces.best().or(any)?;
            outlook.add(Part {
                running: f64::from(kind.running),
                rest: kind.rest(now, pace)?,
                waiting: f64::from(kind.waiting) * part,
                service: f64::from(pace.expected()?),
                spread: f64::from(pace.spread()),
            });
        }
        if lent > 0 {
            let (service, spread) = (f64::from(any?.expected()?), f64::from(any?.spread()));
            let rest = service * (1.0 + spread) / 2.0;
            outlook.add(Part { running: f64::from(lent), rest, waiting: 0.0, service, spread });
        }
        outlook.turn()
    }

    /// All kinds in line are well known, as they are when there is a line. What is predicted then and turns out wrong has other
    /// reasons than not having known better.
    pub(crate) fn is_sure(&self) -> bool {
        self.kinds.iter().all(|kind| kind.waiting == 0 || kind.paces.queued.is_sure())
    }

    /// Several kinds run or wait, each of which takes about equally long: who they are says more than how many.
    pub(crate) fn is_mixed(&self) -> bool {
        let present = self.kinds.iter().filter(|kind| kind.running > 0 || kind.waiting > 0);
        let mut paces = present.map(|kind| kind.paces.best());
        let is_even = |pace: Option<&Pace>| pace.is_some_and(|pace| pace.spread() <= EVEN_SPREAD);
        self.kinds.len() > 1 && paces.all(is_even)
    }

    /// The same for a short line: played through with each that runs, with its beginning, and each in line ahead.
    pub(crate) fn turn_played(
        &self,
        now: Moment,
        running: impl Iterator<Item = (Slot, Moment)>,
        surplus: usize,
        line: impl Iterator<Item = Slot>,
    ) -> Option<f64> {
        let any = self.all.best();
        let pace = |slot: Slot| self.kinds[slot.0 as usize].paces.best().or(any);
        let mut replay = Replay::new();
        for (slot, since) in running {
            let pace = pace(slot)?;
            let has_run = now.0.saturating_sub(since.0) as f64;
            replay.runs(pace.rest(has_run)?);
        }
        replay.take_away(surplus);
        for slot in line {
            let pace = pace(slot)?;
            replay.waits(f64::from(pace.expected()?));
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
        let paces = Paces::default();
        Self { class, paces, waiting: 0, running: 0, started: 0, seen: Moment::default() }
    }

    /// What is left, on average, of each of the running ones.
    fn rest(&self, now: Moment, pace: &Pace) -> Option<f64> {
        let has_run = (u128::from(now.0) * u128::from(self.running)).saturating_sub(self.started) as f64;
        pace.rest(has_run / f64::from(self.running.max(1)))
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
