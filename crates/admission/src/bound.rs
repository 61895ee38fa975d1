//! How many requests of a lane should run at once, found out by small paired trials.
//!
//! While there is a line, the bound goes a little up, back, up again (or a little down), and the service times of those that ran
//! meanwhile are compared. If service takes longer in proportion, more at once brings no throughput (elasticity 0: they wait
//! for each other inside instead of in line); if it takes as long as before, throughput grows in proportion (elasticity 1); if
//! it takes longer still, throughput falls. The bound goes where the elasticity shows it to. It never goes to a minimum to
//! learn what an idle server would do, and without a line it learns nothing and stays. Why so: decision 0011.
//!
//! Not here: who runs next, and in which lane (`machine`), service times for predictions (`predict`), the arithmetic of a
//! trial (`bound/trial.rs`).

mod pace;
mod trial;

use std::time::Duration;

use self::pace::{Levels, Pace};
use self::trial::{Arm, Expected, Look, Trial, Verdict};
use crate::{Moment, Pressure};

/// Bound to begin with: enough not to starve a small server, and trials find more soon.
const FIRST_BOUND: u32 = 4;

// A trial takes turns between the bound found so far (the base) and the other one.
/// Shortest and longest turn.
const TURN_SHORTEST: Duration = Duration::from_millis(20);
const TURN_LONGEST: Duration = Duration::from_secs(1);
/// A turn in usual service times, and the same when capacity has just changed.
const TURN_SERVICES: f64 = 4.0;
const URGENT_TURN_SERVICES: f64 = 2.0;
/// Requests that must end before a turn is over: as many as run at once, between these. After twice the longest turn it is over
/// without them.
const TURN_SAMPLES: (u32, u32) = (6, 48);
/// Begin of a turn that does not count, as what ends then ran under the other bound: a usual service time, up to this.
const SETTLING_LONGEST: Duration = Duration::from_millis(250);
/// Time in usual service times after which more than the bound run because others let them pass, not because they began before.
const DRAINING_SERVICES: f64 = 3.0;
/// Turns at the other bound before a trial ends with what is more likely.
const TURNS: u32 = 12;
/// A trial is given up when there has been no line for so long.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(10);

/// Pause between two trials upward. It is doubled up to the longest while they cost throughput.
const UP_PAUSE: Duration = Duration::from_millis(250);
const UP_PAUSE_LONGEST: Duration = Duration::from_secs(1);
/// Step up as a part of the bound. It is doubled while throughput grows in proportion, or nothing can be told of a smaller step.
const UP_STEP: f64 = 0.5;
const UP_STEP_LARGEST: f64 = 1.0;
/// Step up where throughput has been seen to fall with more at once.
const UP_STEP_SMALLEST: f64 = 0.125;
/// The first step up after capacity has changed, from a bound that is large already. From a small one it is the largest.
const URGENT_STEP: f64 = 0.25;
const LARGE_BOUND: u32 = 16;
/// Pause before a trial downward. It is doubled up to the longest while they show that the bound is needed.
const DOWN_PAUSE: Duration = Duration::from_millis(500);
const DOWN_PAUSE_LONGEST: Duration = Duration::from_secs(16);
/// Step down as a part of the bound, and the same when throughput has been seen to fall with more at once.
const DOWN_STEP: f64 = 0.2;
const DOWN_STEP_LARGEST: f64 = 0.4;
/// A bound is never tried that is a smaller part of the one found than this (as one is of two): it would starve the server.
const SMALLEST_PART: f64 = 0.6;

/// Above this elasticity throughput grows in proportion, and the next trial upward begins at once.
const GROWS: f64 = 0.5;
/// Below the first one throughput falls with more at once, below the second one so much that the next trial downward begins
/// at once.
const FALLS: f64 = -0.1;
const FALLS_FAST: f64 = -0.3;

/// A hint from outside holds for so long, and the newest one has this weight against those before.
const PRESSURE_LASTS: Duration = Duration::from_secs(3);
const PRESSURE_WEIGHT: f32 = 0.3;
/// Part of the time with work ready and no CPU for it from which on the CPU is what is short, and up to which it is not if no
/// more than this part of the node's CPU is used.
const STARVED: f32 = 0.4;
const NOT_STARVED: f32 = 0.1;
const NOT_BUSY: f32 = 0.7;
/// Weight of the newest in what is a usual service time.
const SERVICE_WEIGHT: f64 = 0.02;
/// A request tells of the pace if the bound was the base throughout, but for so much (as a logarithm).
const SAME_LEVEL: f64 = 0.01;

/// What was seen when a request that ran in the lane ended, or at a tick.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Observed {
    /// Requests that run in the lane, with the one that ends now.
    pub running: u32,
    /// Requests in line for this lane.
    pub waiting: u32,
    /// From its permit to its end; `None` at a tick.
    pub service: Option<Duration>,
    /// Expected service of this request's class against that of the average request here; 1.0 if unknown.
    pub work: f64,
}

/// Which of the two bounds of a trial is in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Base,
    Other,
}

/// The bound of a lane that adapts to what runs in it.
#[derive(Debug, Clone)]
pub struct Auto {
    min: u32,
    max: u32,
    /// The bound as found so far.
    base: u32,
    /// The bound in force: the base, or that of the trial.
    bound: u32,
    turn: Turn,
    /// Since when its bound has been in force, and since when as many run as it says.
    entered: Moment,
    turn_began: Moment,
    turn_samples: u32,
    /// Other turns of the trial so far.
    turns: u32,
    trial: Option<Trial>,
    /// What was seen at the base so far, for the next trial.
    at_base: Arm,
    levels: Levels,
    /// Since when as many ran as may, with a line behind them.
    full_since: Option<Moment>,
    last_full: Moment,
    /// When something was observed last.
    seen: Moment,
    waiting: u32,
    /// Sums of service times and of their squares, of the newest.
    services: (f64, f64),
    up_step: f64,
    up_pause: Duration,
    next_up: Moment,
    down_step: f64,
    down_pause: Duration,
    next_down: Moment,
    pace: Pace,
    /// Capacity has just changed, and turns are short.
    is_urgent: bool,
    pressure: Pressure,
    felt: Moment,
}

impl Auto {
    /// Between `min` (at least 1) and `max` (at least `min`).
    pub fn new(min: u32, max: u32) -> Self {
        let min = min.max(1);
        let max = max.max(min);
        let base = FIRST_BOUND.clamp(min, max);
        Self {
            min,
            max,
            base,
            bound: base,
            turn: Turn::Base,
            entered: Moment(0),
            turn_began: Moment(0),
            turn_samples: 0,
            turns: 0,
            trial: None,
            at_base: Arm::default(),
            levels: Levels::new(base),
            full_since: None,
            last_full: Moment(0),
            seen: Moment(0),
            waiting: 0,
            services: (0.0, 0.0),
            up_step: UP_STEP_LARGEST,
            up_pause: UP_PAUSE,
            next_up: Moment(0),
            down_step: DOWN_STEP,
            down_pause: DOWN_PAUSE,
            next_down: Moment(0),
            pace: Pace::default(),
            is_urgent: true,
            pressure: Pressure::default(),
            felt: Moment(0),
        }
    }

    /// How many may run now.
    pub fn run(&self) -> u32 {
        self.bound
    }

    /// Changes the limits; the bound is brought between them at once. The same limits again change nothing.
    pub fn set(&mut self, min: u32, max: u32) {
        let min = min.max(1);
        let max = max.max(min);
        if (min, max) == (self.min, self.max) {
            return;
        }
        (self.min, self.max) = (min, max);
        self.base = self.base.clamp(self.min, self.max);
        self.bound = self.base;
        self.trial = None;
        self.turn = Turn::Base;
        self.at_base = Arm::default();
        self.full_since = None;
    }

    /// Learns how hard it was for what ran in the lane since the last time. A hint: it decides what is thought likely until
    /// requests have shown it.
    pub fn feel(&mut self, now: Moment, pressure: Pressure) {
        if !(pressure.busy.is_finite() && pressure.starved.is_finite()) {
            return;
        }
        let weight = if since(now, self.felt) > PRESSURE_LASTS { 1.0 } else { PRESSURE_WEIGHT };
        self.felt = now;
        self.pressure.busy += (pressure.busy - self.pressure.busy) * weight;
        self.pressure.starved += (pressure.starved - self.pressure.starved) * weight;
    }

    fn feels(&self, now: Moment) -> bool {
        self.felt != Moment(0) && since(now, self.felt) <= PRESSURE_LASTS
    }

    fn is_starved(&self, now: Moment) -> bool {
        self.feels(now) && self.pressure.starved > STARVED
    }

    fn expected(&self, now: Moment) -> Expected {
        if !self.feels(now) {
            Expected::UNKNOWN
        } else if self.is_starved(now) {
            Expected::NO_GROWTH
        } else if self.pressure.starved < NOT_STARVED && self.pressure.busy < NOT_BUSY {
            Expected::GROWTH
        } else {
            Expected::UNKNOWN
        }
    }

    /// Learns from a request that ended, or from a tick. The new bound, if it changed.
    pub fn observe(&mut self, now: Moment, observed: Observed) -> Option<u32> {
        let was = self.bound;
        if let Some(service) = observed.service {
            let seconds = service.as_secs_f64();
            // What takes most of the time counts most.
            let part = (seconds / self.usual_service().max(1e-9)).min(1.0);
            let level = self.levels.mean(before(now, service), now);
            let is_telling =
                self.turn == Turn::Base && (level - f64::from(self.base).ln()).abs() < SAME_LEVEL;
            if is_telling && self.pace.has_changed(seconds / known_work(observed.work), part) {
                self.start_over(now, seconds);
            }
            self.services.0 += seconds - self.services.0 * SERVICE_WEIGHT;
            self.services.1 += seconds * seconds - self.services.1 * SERVICE_WEIGHT;
        }
        if self.full_since.is_some() && self.is_settled(now) {
            let seconds = since(now, self.seen).as_secs_f64();
            let level = self.levels.logarithm();
            self.arm().pass(seconds, level);
        }
        self.seen = now;
        self.look_at_line(now, observed);
        if self.full_since.is_some() {
            if let Some(service) = observed.service
                && self.is_settled(now)
            {
                self.note(now, service, observed.work);
            }
            self.go_on(now);
        } else if self.trial.is_some() {
            let without = since(now, self.last_full);
            if without > GIVEN_UP_AFTER {
                self.end_trial(now);
            } else if self.turn == Turn::Other && without > self.turn_length() {
                self.enter(now, Turn::Base, self.base);
            }
        }
        (self.bound != was).then_some(self.bound)
    }

    /// Only while the bound is what holds requests back does their service time say anything about the bound.
    fn look_at_line(&mut self, now: Moment, observed: Observed) {
        self.waiting = observed.waiting;
        let has_line = observed.waiting > 0 || self.turn == Turn::Other;
        let is_full = has_line && observed.running >= self.bound;
        if !is_full {
            self.full_since = None;
            return;
        }
        if self.full_since.is_none() {
            if since(now, self.last_full) > GIVEN_UP_AFTER {
                // What was seen then says nothing of now.
                self.end_trial(now);
            }
            self.full_since = Some(now);
            self.turn_began = now;
        }
        self.last_full = now;
        // After a step down, those that run already end first, and none begin.
        let draining = Duration::from_secs_f64(self.usual_service() * DRAINING_SERVICES);
        if observed.running > self.bound && since(now, self.entered) < draining {
            self.turn_began = now;
        } else {
            self.levels.enter(now, self.bound);
        }
    }

    fn note(&mut self, now: Moment, service: Duration, work: f64) {
        let work = known_work(work);
        self.turn_samples += 1;
        let begin = before(now, service);
        if self.full_since.is_none_or(|since| begin < since) {
            return;
        }
        let level = self.levels.mean(begin, now);
        self.arm().add(service, work, level);
    }

    fn is_settled(&self, now: Moment) -> bool {
        let settling = Duration::from_secs_f64(self.usual_service()).min(SETTLING_LONGEST);
        self.trial.is_none() || since(now, self.turn_began) >= settling
    }

    /// Where what is seen now belongs.
    fn arm(&mut self) -> &mut Arm {
        match (&mut self.trial, self.turn) {
            (Some(trial), Turn::Other) => &mut trial.other,
            (Some(trial), Turn::Base) => &mut trial.base,
            (None, _) => &mut self.at_base,
        }
    }

    /// Ends a turn that was long enough, and a trial that has said what it can.
    fn go_on(&mut self, now: Moment) {
        let lasted = since(now, self.turn_began);
        let samples = self.bound.clamp(TURN_SAMPLES.0, TURN_SAMPLES.1);
        let is_over =
            lasted >= self.turn_length() && self.turn_samples >= samples || lasted >= TURN_LONGEST * 2;
        let is_last = is_over && self.turns >= TURNS;
        let expected = self.expected(now);
        if let Some(trial) = &mut self.trial {
            let has_generation =
                self.turn == Turn::Other && self.turn_samples >= self.bound.max(TURN_SAMPLES.0);
            let verdict = match (is_last, is_over, has_generation) {
                (true, ..) => trial.verdict(Look::Last, expected),
                (_, true, _) => trial.verdict(Look::TurnOver, expected),
                (_, _, true) => trial.verdict(Look::WithinTurn, expected),
                _ => Verdict::Unclear,
            };
            match verdict {
                Verdict::Take { elasticity } => return self.take(now, elasticity),
                Verdict::Leave { elasticity } => return self.leave(now, Some(elasticity)),
                Verdict::Absurd => return self.end_trial(now),
                Verdict::Unclear => {}
            }
            if is_last {
                return self.leave(now, None);
            }
        }
        if is_over {
            match (&self.trial, self.turn) {
                (None, _) => self.begin_trial(now),
                (Some(trial), Turn::Base) => {
                    let other = trial.to;
                    self.turns += 1;
                    self.enter(now, Turn::Other, other);
                }
                (Some(_), Turn::Other) => self.enter(now, Turn::Base, self.base),
            }
        }
    }

    fn turn_length(&self) -> Duration {
        let services = if self.is_urgent { URGENT_TURN_SERVICES } else { TURN_SERVICES };
        Duration::from_secs_f64(self.usual_service() * services).clamp(TURN_SHORTEST, TURN_LONGEST)
    }

    /// Service time of the requests in which most time goes, in seconds.
    fn usual_service(&self) -> f64 {
        if self.services.0 > 0.0 { self.services.1 / self.services.0 } else { 0.0 }
    }

    fn begin_trial(&mut self, now: Moment) {
        let base = f64::from(self.base);
        let up = (base * (1.0 + self.up_step)).round().max(base + 1.0).min(f64::from(self.max)) as u32;
        // Some must stay in line, or nobody could tell any more that it is too many.
        let up = up.min(self.base.saturating_add((self.waiting / 2).max(1)));
        let down = (base * (1.0 - self.down_step)).round().min(base - 1.0).max(f64::from(self.min)) as u32;
        let to = if now >= self.next_up && up > self.base {
            up
        } else if now >= self.next_down && down < self.base && f64::from(down) >= base * SMALLEST_PART {
            down
        } else {
            // The newest counts more, so that a change is not averaged away before the next trial.
            self.at_base.fade();
            self.turn_samples = 0;
            self.turn_began = now;
            return;
        };
        let arm = std::mem::take(&mut self.at_base);
        self.trial = Some(Trial::new(self.base, to, arm));
        self.turns = 1;
        self.enter(now, Turn::Other, to);
    }

    fn enter(&mut self, now: Moment, turn: Turn, bound: u32) {
        self.turn = turn;
        (self.entered, self.turn_began) = (now, now);
        self.turn_samples = 0;
        self.bound = bound;
        if bound > self.levels.now() {
            self.levels.enter(now, bound);
        }
    }

    /// The other bound is better.
    fn take(&mut self, now: Moment, elasticity: f64) {
        let Some(trial) = self.trial.take() else { return };
        let went_up = trial.to > self.base;
        self.base = trial.to;
        self.at_base = trial.other;
        self.pace = Pace::default();
        self.enter(now, Turn::Base, self.base);
        if went_up {
            self.up_step =
                if elasticity > GROWS { (self.up_step * 2.0).min(UP_STEP_LARGEST) } else { UP_STEP };
            (self.up_pause, self.next_up) = (UP_PAUSE, now);
            (self.down_step, self.down_pause) = (DOWN_STEP, DOWN_PAUSE);
            self.next_down = later(now, self.down_pause);
            if elasticity > GROWS {
                self.begin_trial(now);
            }
        } else {
            self.down_step = if elasticity < FALLS_FAST { DOWN_STEP_LARGEST } else { DOWN_STEP };
            (self.down_pause, self.next_down) = (DOWN_PAUSE, now);
            (self.up_step, self.next_up) = (UP_STEP, later(now, self.up_pause));
            if elasticity < FALLS_FAST {
                self.begin_trial(now);
            }
        }
    }

    /// The other bound is not better, or nobody can tell.
    fn leave(&mut self, now: Moment, elasticity: Option<f64>) {
        let Some(trial) = self.trial.take() else { return };
        self.at_base = trial.base;
        self.at_base.fade();
        self.is_urgent = false;
        self.enter(now, Turn::Base, self.base);
        if trial.to > self.base {
            let falls = elasticity.is_some_and(|elasticity| elasticity < FALLS);
            self.up_pause = if falls { (self.up_pause * 2).min(UP_PAUSE_LONGEST) } else { UP_PAUSE };
            self.next_up = later(now, self.up_pause);
            self.up_step = match elasticity {
                // A larger step is easier to see, unless it is time that is short.
                None if self.turn_length() < TURN_LONGEST => (self.up_step * 2.0).min(UP_STEP_LARGEST),
                None => UP_STEP,
                Some(_) if falls => UP_STEP_SMALLEST,
                Some(_) => UP_STEP,
            };
            if elasticity.is_some_and(|elasticity| elasticity < FALLS_FAST) {
                (self.next_down, self.down_step) = (now, DOWN_STEP_LARGEST);
                self.begin_trial(now);
            } else if falls {
                self.next_down = self.next_down.min(later(now, DOWN_PAUSE));
            }
        } else {
            self.down_step = DOWN_STEP;
            self.down_pause = (self.down_pause * 2).min(DOWN_PAUSE_LONGEST);
            self.next_down = later(now, self.down_pause);
        }
    }

    /// Service times are others than before: nothing that was learned holds, and the bound may be far off.
    fn start_over(&mut self, now: Moment, seconds: f64) {
        let is_slower = seconds > self.usual_service();
        self.services = (seconds, seconds * seconds);
        self.trial = None;
        self.at_base = Arm::default();
        self.is_urgent = true;
        self.up_step = if self.base < LARGE_BOUND { UP_STEP_LARGEST } else { URGENT_STEP };
        (self.up_pause, self.next_up) = (UP_PAUSE, now);
        (self.down_pause, self.next_down) = (DOWN_PAUSE, now);
        if is_slower && self.base >= LARGE_BOUND && self.is_starved(now) {
            // More at once do not help what has become slow for want of CPU: fewer may, if it is memory that makes it so.
            // A small bound is up again as fast as this would be seen.
            self.next_up = later(now, self.up_pause);
            self.down_step = DOWN_STEP_LARGEST;
        }
        self.enter(now, Turn::Base, self.base);
    }

    /// Nothing can be learned from this trial: there is no line any more, or what was compared was not alike.
    fn end_trial(&mut self, now: Moment) {
        self.trial = None;
        self.at_base = Arm::default();
        self.enter(now, Turn::Base, self.base);
    }
}

fn known_work(work: f64) -> f64 {
    if work.is_finite() && work > 0.0 { work } else { 1.0 }
}

fn since(now: Moment, then: Moment) -> Duration {
    Duration::from_micros(now.0.saturating_sub(then.0))
}

fn before(now: Moment, time: Duration) -> Moment {
    Moment(now.0.saturating_sub(time.as_micros() as u64))
}

fn later(now: Moment, pause: Duration) -> Moment {
    Moment(now.0.saturating_add(pause.as_micros() as u64))
}

#[cfg(test)]
mod tests;
