//! Finds how many requests of a lane should run at once, by small paired trials.
//!
//! While there is a queue, the bound goes a little up, back, and up again (or a little down). The
//! service times of the requests that ran under each bound are compared. If service takes longer in
//! proportion, more requests at once bring no throughput: elasticity 0. They then wait for each
//! other inside instead of in the queue. If service takes as long as before, throughput grows in
//! proportion: elasticity 1. If service takes longer still, throughput falls. The bound goes where
//! the elasticity shows. It never goes to a minimum to learn how fast an idle server would be.
//! Without a queue it learns nothing and does not change. Decision 0011 has the reasons.
//!
//! Not here: which request runs next, and in which lane (`machine`), service times for predictions
//! (`predict`), the arithmetic of a trial (`bound/trial.rs`).

mod pace;
mod trial;

use std::time::Duration;

use self::pace::{RunLevels, StretchPace};
use self::trial::{LimitTrial, PriorElasticity, TestPoint, TrialArm, TrialResult};
use crate::{CpuPressure, Moment};

/// First bound: enough not to starve a small server. Trials find a larger one soon.
const FIRST_BOUND: u32 = 4;

// A trial alternates between the bound found so far (the base) and another one.
/// Shortest and longest turn.
const TURN_SHORTEST: Duration = Duration::from_millis(20);
const TURN_LONGEST: Duration = Duration::from_secs(1);
/// Length of a turn in usual service times, normally and right after a change of capacity.
const TURN_SERVICES: f64 = 4.0;
const URGENT_TURN_SERVICES: f64 = 2.0;
/// Requests that must end before a turn is over: as many as run at once, but within these limits.
/// After twice the longest turn it ends without them.
const TURN_SAMPLES: (u32, u32) = (6, 48);
/// Longest start of a turn that does not count; normally one usual service time. Requests that end
/// during it ran under the other bound.
const SETTLING_LONGEST: Duration = Duration::from_millis(250);
/// Time in usual service times for which running requests above the bound count as left over from
/// before. After it, others have let them pass.
const DRAINING_SERVICES: f64 = 3.0;
/// Turns at the other bound before a trial ends with the more likely result.
const TURNS: u32 = 12;
/// Time without a queue after which a trial is given up.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(10);

/// Pause between two trials upward. It doubles up to the longest pause while they cost throughput.
const UP_PAUSE: Duration = Duration::from_millis(250);
const UP_PAUSE_LONGEST: Duration = Duration::from_secs(1);
/// Step up as a part of the bound. It doubles while throughput grows in proportion, or while a
/// smaller step shows no difference.
const UP_STEP: f64 = 0.5;
const UP_STEP_LARGEST: f64 = 1.0;
/// Step up after throughput has fallen with more requests at once.
const UP_STEP_SMALLEST: f64 = 0.125;
/// First step up after a change of capacity, from a bound that is already large. A small bound
/// takes the largest step.
const URGENT_STEP: f64 = 0.25;
const LARGE_BOUND: u32 = 16;
/// Pause before a trial downward. It doubles up to the longest pause while trials show that the
/// bound is needed.
const DOWN_PAUSE: Duration = Duration::from_millis(500);
const DOWN_PAUSE_LONGEST: Duration = Duration::from_secs(16);
/// Step down as a part of the bound, normally and after throughput has fallen with more requests at
/// once.
const DOWN_STEP: f64 = 0.2;
const DOWN_STEP_LARGEST: f64 = 0.4;
/// Smallest part of the bound found that is ever tried. A smaller one (such as one of two) would
/// starve the server.
const SMALLEST_PART: f64 = 0.6;

/// Above this elasticity throughput grows in proportion, and the next trial upward begins at once.
const GROWS: f64 = 0.5;
/// Below the first value, throughput falls with more requests at once. Below the second, it falls
/// so much that the next trial downward begins at once.
const FALLS: f64 = -0.1;
const FALLS_FAST: f64 = -0.3;

/// How long a hint from outside holds, and the weight of the newest hint against earlier ones.
const PRESSURE_LASTS: Duration = Duration::from_secs(3);
const PRESSURE_WEIGHT: f32 = 0.3;
/// Part of the time with work ready and no CPU for it, from which on the CPU counts as short. Up to
/// the same part of the node's CPU in use, the CPU does not count as short.
const STARVED: f32 = 0.4;
const NOT_STARVED: f32 = 0.1;
const NOT_BUSY: f32 = 0.7;
/// Weight of the newest request in the usual service time.
const SERVICE_WEIGHT: f64 = 0.02;
/// Largest deviation from the base (as a logarithm) at which a request still counts for the pace.
const SAME_LEVEL: f64 = 0.01;

/// An observation: a request that ran in the lane ended, or a tick passed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LimitSample {
    /// Requests that run in the lane, including the one that ends now.
    pub running: u32,
    /// Requests in the queue of this lane.
    pub waiting: u32,
    /// Time from the permit to the end; `None` at a tick.
    pub service: Option<Duration>,
    /// Expected service of this request's class relative to the average request here; 1.0 if
    /// unknown.
    pub work: f64,
}

/// Which of the two bounds of a trial is in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TrialTurn {
    Base,
    Other,
}

/// The bound of a lane that adapts to its load.
#[derive(Debug, Clone)]
pub struct AdaptiveLimit {
    min: u32,
    max: u32,
    /// The bound found so far.
    base: u32,
    /// The bound in force: the base, or the trial's other bound.
    bound: u32,
    turn: TrialTurn,
    /// When the current bound came into force, and when as many requests ran as it allows.
    entered: Moment,
    turn_began: Moment,
    turn_samples: u32,
    /// Turns at the other bound in this trial so far.
    turns: u32,
    trial: Option<LimitTrial>,
    /// Observations at the base so far, for the next trial.
    at_base: TrialArm,
    levels: RunLevels,
    /// Since when as many requests run as may, with a queue behind them.
    full_since: Option<Moment>,
    last_full: Moment,
    /// Time of the last observation.
    seen: Moment,
    waiting: u32,
    /// Fading sums of service times and of their squares.
    services: (f64, f64),
    up_step: f64,
    up_pause: Duration,
    next_up: Moment,
    down_step: f64,
    down_pause: Duration,
    next_down: Moment,
    pace: StretchPace,
    /// Capacity has just changed, so turns are short.
    is_urgent: bool,
    pressure: CpuPressure,
    felt: Moment,
}

impl AdaptiveLimit {
    /// Creates a bound between `min` (at least 1) and `max` (at least `min`).
    pub fn new(min: u32, max: u32) -> Self {
        let min = min.max(1);
        let max = max.max(min);
        let base = FIRST_BOUND.clamp(min, max);
        Self {
            min,
            max,
            base,
            bound: base,
            turn: TrialTurn::Base,
            entered: Moment(0),
            turn_began: Moment(0),
            turn_samples: 0,
            turns: 0,
            trial: None,
            at_base: TrialArm::default(),
            levels: RunLevels::new(base),
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
            pace: StretchPace::default(),
            is_urgent: true,
            pressure: CpuPressure::default(),
            felt: Moment(0),
        }
    }

    /// Returns how many requests may run now.
    pub fn run(&self) -> u32 {
        self.bound
    }

    /// Changes the limits and brings the bound between them at once. The same limits again change
    /// nothing.
    pub fn set(&mut self, min: u32, max: u32) {
        let min = min.max(1);
        let max = max.max(min);
        if (min, max) == (self.min, self.max) {
            return;
        }
        self.min = min;
        self.max = max;
        self.base = self.base.clamp(self.min, self.max);
        self.bound = self.base;
        self.trial = None;
        self.turn = TrialTurn::Base;
        self.at_base = TrialArm::default();
        self.full_since = None;
    }

    /// Records the resource pressure on the lane's work since the last call. It is a hint about the
    /// likely elasticity, until requests have shown it.
    pub fn observe_pressure(&mut self, now: Moment, pressure: CpuPressure) {
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

    fn expected(&self, now: Moment) -> PriorElasticity {
        if !self.feels(now) {
            PriorElasticity::UNKNOWN
        } else if self.is_starved(now) {
            PriorElasticity::NO_GROWTH
        } else if self.pressure.starved < NOT_STARVED && self.pressure.busy < NOT_BUSY {
            PriorElasticity::GROWTH
        } else {
            PriorElasticity::UNKNOWN
        }
    }

    /// Learns from a request that ended, or from a tick. Returns the new bound if it changed.
    pub fn observe(&mut self, now: Moment, observed: LimitSample) -> Option<u32> {
        let was = self.bound;
        if let Some(service) = observed.service {
            let seconds = service.as_secs_f64();
            // Requests that take most of the time count most.
            let part = (seconds / self.usual_service().max(1e-9)).min(1.0);
            let level = self.levels.mean(before(now, service), now);
            let is_telling =
                self.turn == TrialTurn::Base && (level - f64::from(self.base).ln()).abs() < SAME_LEVEL;
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
            } else if self.turn == TrialTurn::Other && without > self.turn_length() {
                self.enter(now, TrialTurn::Base, self.base);
            }
        }
        (self.bound != was).then_some(self.bound)
    }

    /// Service times say something about the bound only while the bound holds requests back.
    fn look_at_line(&mut self, now: Moment, observed: LimitSample) {
        self.waiting = observed.waiting;
        let has_line = observed.waiting > 0 || self.turn == TrialTurn::Other;
        let is_full = has_line && observed.running >= self.bound;
        if !is_full {
            self.full_since = None;
            return;
        }
        if self.full_since.is_none() {
            if since(now, self.last_full) > GIVEN_UP_AFTER {
                // Earlier observations say nothing about the present.
                self.end_trial(now);
            }
            self.full_since = Some(now);
            self.turn_began = now;
        }
        self.last_full = now;
        // After a step down, running requests end first and none begin.
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

    /// Returns the arm to which current observations belong.
    fn arm(&mut self) -> &mut TrialArm {
        match (&mut self.trial, self.turn) {
            (Some(trial), TrialTurn::Other) => &mut trial.other,
            (Some(trial), TrialTurn::Base) => &mut trial.base,
            (None, _) => &mut self.at_base,
        }
    }

    /// Ends a turn that was long enough, and a trial that has a result.
    fn go_on(&mut self, now: Moment) {
        let lasted = since(now, self.turn_began);
        let samples = self.bound.clamp(TURN_SAMPLES.0, TURN_SAMPLES.1);
        let is_over =
            lasted >= self.turn_length() && self.turn_samples >= samples || lasted >= TURN_LONGEST * 2;
        let is_last = is_over && self.turns >= TURNS;
        let expected = self.expected(now);
        if let Some(trial) = &mut self.trial {
            let has_generation =
                self.turn == TrialTurn::Other && self.turn_samples >= self.bound.max(TURN_SAMPLES.0);
            let verdict = match (is_last, is_over, has_generation) {
                (true, ..) => trial.verdict(TestPoint::Last, expected),
                (_, true, _) => trial.verdict(TestPoint::TurnOver, expected),
                (_, _, true) => trial.verdict(TestPoint::WithinTurn, expected),
                _ => TrialResult::Unclear,
            };
            match verdict {
                TrialResult::Take { elasticity } => return self.take(now, elasticity),
                TrialResult::Leave { elasticity } => return self.leave(now, Some(elasticity)),
                TrialResult::Absurd => return self.end_trial(now),
                TrialResult::Unclear => {}
            }
            if is_last {
                return self.leave(now, None);
            }
        }
        if is_over {
            match (&self.trial, self.turn) {
                (None, _) => self.begin_trial(now),
                (Some(trial), TrialTurn::Base) => {
                    let other = trial.to;
                    self.turns += 1;
                    self.enter(now, TrialTurn::Other, other);
                }
                (Some(_), TrialTurn::Other) => self.enter(now, TrialTurn::Base, self.base),
            }
        }
    }

    fn turn_length(&self) -> Duration {
        let services = if self.is_urgent { URGENT_TURN_SERVICES } else { TURN_SERVICES };
        Duration::from_secs_f64(self.usual_service() * services).clamp(TURN_SHORTEST, TURN_LONGEST)
    }

    /// Returns the service time of the requests that take most of the time, in seconds.
    fn usual_service(&self) -> f64 {
        if self.services.0 > 0.0 { self.services.1 / self.services.0 } else { 0.0 }
    }

    fn begin_trial(&mut self, now: Moment) {
        let base = f64::from(self.base);
        let up = (base * (1.0 + self.up_step)).round().max(base + 1.0).min(f64::from(self.max)) as u32;
        // Some requests must stay in the queue. Otherwise nothing would show that the bound is too
        // large.
        let up = up.min(self.base.saturating_add((self.waiting / 2).max(1)));
        let down = (base * (1.0 - self.down_step)).round().min(base - 1.0).max(f64::from(self.min)) as u32;
        let to = if now >= self.next_up && up > self.base {
            up
        } else if now >= self.next_down && down < self.base && f64::from(down) >= base * SMALLEST_PART {
            down
        } else {
            // Newer observations count more, so that a change is not averaged away before the next
            // trial.
            self.at_base.fade();
            self.turn_samples = 0;
            self.turn_began = now;
            return;
        };
        let arm = std::mem::take(&mut self.at_base);
        self.trial = Some(LimitTrial::new(self.base, to, arm));
        self.turns = 1;
        self.enter(now, TrialTurn::Other, to);
    }

    fn enter(&mut self, now: Moment, turn: TrialTurn, bound: u32) {
        self.turn = turn;
        self.entered = now;
        self.turn_began = now;
        self.turn_samples = 0;
        self.bound = bound;
        if bound > self.levels.now() {
            self.levels.enter(now, bound);
        }
    }

    /// Takes the other bound because it is better.
    fn take(&mut self, now: Moment, elasticity: f64) {
        let Some(trial) = self.trial.take() else { return };
        let went_up = trial.to > self.base;
        self.base = trial.to;
        self.at_base = trial.other;
        self.pace = StretchPace::default();
        self.enter(now, TrialTurn::Base, self.base);
        if went_up {
            self.up_step =
                if elasticity > GROWS { (self.up_step * 2.0).min(UP_STEP_LARGEST) } else { UP_STEP };
            self.up_pause = UP_PAUSE;
            self.next_up = now;
            self.down_step = DOWN_STEP;
            self.down_pause = DOWN_PAUSE;
            self.next_down = later(now, self.down_pause);
            if elasticity > GROWS {
                self.begin_trial(now);
            }
        } else {
            self.down_step = if elasticity < FALLS_FAST { DOWN_STEP_LARGEST } else { DOWN_STEP };
            self.down_pause = DOWN_PAUSE;
            self.next_down = now;
            self.up_step = UP_STEP;
            self.next_up = later(now, self.up_pause);
            if elasticity < FALLS_FAST {
                self.begin_trial(now);
            }
        }
    }

    /// Leaves the other bound because it is not better, or because the trial is unclear.
    fn leave(&mut self, now: Moment, elasticity: Option<f64>) {
        let Some(trial) = self.trial.take() else { return };
        self.at_base = trial.base;
        self.at_base.fade();
        self.is_urgent = false;
        self.enter(now, TrialTurn::Base, self.base);
        if trial.to > self.base {
            let falls = elasticity.is_some_and(|elasticity| elasticity < FALLS);
            self.up_pause = if falls { (self.up_pause * 2).min(UP_PAUSE_LONGEST) } else { UP_PAUSE };
            self.next_up = later(now, self.up_pause);
            self.up_step = match elasticity {
                // A larger step is easier to see, unless time is short.
                None if self.turn_length() < TURN_LONGEST => (self.up_step * 2.0).min(UP_STEP_LARGEST),
                None => UP_STEP,
                Some(_) if falls => UP_STEP_SMALLEST,
                Some(_) => UP_STEP,
            };
            if elasticity.is_some_and(|elasticity| elasticity < FALLS_FAST) {
                self.next_down = now;
                self.down_step = DOWN_STEP_LARGEST;
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

    /// Starts over because service times changed: earlier results do not hold, and the bound may be
    /// far off.
    fn start_over(&mut self, now: Moment, seconds: f64) {
        let is_slower = seconds > self.usual_service();
        self.services = (seconds, seconds * seconds);
        self.trial = None;
        self.at_base = TrialArm::default();
        self.is_urgent = true;
        self.up_step = if self.base < LARGE_BOUND { UP_STEP_LARGEST } else { URGENT_STEP };
        self.up_pause = UP_PAUSE;
        self.next_up = now;
        self.down_pause = DOWN_PAUSE;
        self.next_down = now;
        if is_slower && self.base >= LARGE_BOUND && self.is_starved(now) {
            // More requests at once do not help if service is slow for lack of CPU. Fewer may help
            // if memory is the cause. A small bound rises again as fast as this would show.
            self.next_up = later(now, self.up_pause);
            self.down_step = DOWN_STEP_LARGEST;
        }
        self.enter(now, TrialTurn::Base, self.base);
    }

    /// Ends a trial without a result: the queue is gone, or the compared requests were not alike.
    fn end_trial(&mut self, now: Moment) {
        self.trial = None;
        self.at_base = TrialArm::default();
        self.enter(now, TrialTurn::Base, self.base);
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
