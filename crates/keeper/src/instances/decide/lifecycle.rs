//! The life of one instance: its waiters, its next operation, its rest and its failures. Pure:
//! `apply` takes the time and an event, and returns effects.
//!
//! Every operation has a number, and its end is reported with it. The end of an operation that was
//! given up meanwhile changes nothing. Not here: carrying effects out (`instances`), when an idle
//! instance goes deeper (`policy`), whose turn it is to wake (`wake_queue`).

mod at_rest;
mod beside;
mod events;
mod failures;
mod placed;
mod work;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use nagaya_records::instance::Tier;

use crate::instances::decide::costs::{KnownCosts, TierCosts};
use crate::instances::decide::policy::{ArrivalPattern, IdlePolicy, IdleSpan, PRESSED_AFTER};

use self::failures::{BACKOFF_FIRST, RecentFailures};

pub use self::events::{
    ActError, DiscardReason, FailureCause, LifecycleEffect, LifecycleEvent, OpId, OpOutcome, RunId,
    WaitError, WaiterId,
};

/// Maximum number of waiters of one instance.
pub const WAITERS_MAX: usize = 4096;

/// A run that ends so soon after its restore was not restored well.
const PROOF: Duration = Duration::from_secs(5);

/// Time for which a start or restore may be frozen with everything else before it is given up. Most
/// losses of the lease end sooner, and waiting costs less than another start.
const HELD_MAX: Duration = Duration::from_secs(2);

/// After this many bad images no further one is taken until something changes.
const BAD_IMAGES_MAX: u32 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LifecycleState {
    /// No process.
    Off,
    Queued,
    Booting(OpId),
    Restoring(OpId),
    /// It was started, and its image is taken before it answers its first request.
    Imaging(OpId),
    Up(UpState),
    Ending(OpId),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct UpState {
    since: Instant,
    is_restored: bool,
    tier: Tier,
    /// The deepest tier that was tried. It may not be there, because that tier is not possible
    /// here.
    tried: Tier,
    doing: Option<(OpId, OngoingOp)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OngoingOp {
    Down,
    Up,
    /// Its image is taken before it rests.
    Image,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ImageState {
    /// There may be one of an earlier time: a restore finds out.
    Unknown,
    None,
    Taken,
    /// There is an old one. It is usable, and is replaced before the instance rests on it again.
    Aged,
    /// It was tried, and is not tried again until something changes.
    Impossible,
}

pub struct Lifecycle {
    state: LifecycleState,
    policy: IdlePolicy,
    image: ImageProgress,
    waiters: BTreeSet<WaiterId>,
    users: u32,
    /// When the last user of the present or the last run released it.
    idle_since: Instant,
    arrivals: ArrivalPattern,
    costs: KnownCosts,
    failures: RecentFailures,
    /// Earliest time of a start that no request asked for.
    earliest_auto_start: Instant,
    run: RunId,
    last_op: u64,
    work: Option<work::IdleWork>,
    placement: LifecyclePlacement,
    effects: Vec<LifecycleEffect>,
}

/// Its image, as far as this knows.
struct ImageProgress {
    state: ImageState,
    /// Images in a row that turned out wrong.
    bad_count: u32,
    /// An image is to be taken at the next start, whether or not a request waits.
    retake: bool,
}

/// Whether it may run here now.
struct LifecyclePlacement {
    /// Since when all of it stands still. `None` if it does not.
    fenced_since: Option<Instant>,
    /// It is placed on this node. True without a cluster.
    is_here: bool,
    /// Its site was removed.
    is_closing: bool,
    /// It is handed over, and only a new placement brings it back.
    is_released: bool,
    /// The operation under way stood still for a while: its failure is not the program's doing.
    is_disturbed: bool,
}

impl Lifecycle {
    /// Makes the lifecycle of an instance without processes.
    pub fn new(now: Instant, policy: IdlePolicy) -> Self {
        Self {
            state: LifecycleState::Off,
            policy,
            image: ImageProgress { state: ImageState::Unknown, bad_count: 0, retake: false },
            waiters: BTreeSet::new(),
            users: 0,
            idle_since: now,
            arrivals: ArrivalPattern::default(),
            costs: KnownCosts::default(),
            failures: RecentFailures::default(),
            earliest_auto_start: now,
            run: RunId(0),
            last_op: 0,
            work: None,
            placement: LifecyclePlacement {
                fenced_since: None,
                is_here: true,
                is_closing: false,
                is_released: false,
                is_disturbed: false,
            },
            effects: Vec::new(),
        }
    }

    // === State ===

    /// Returns its tier, or its tier before the operation under way.
    pub fn tier(&self) -> Tier {
        match self.state {
            LifecycleState::Up(up) => up.tier,
            _ if self.has_image() => Tier::Image,
            _ => Tier::Cold,
        }
    }

    /// Names the operation under way. `None` without one.
    pub fn doing(&self) -> Option<&'static str> {
        match self.state {
            LifecycleState::Off | LifecycleState::Up(UpState { doing: None, .. }) => None,
            LifecycleState::Queued => Some("queued"),
            LifecycleState::Booting(_) => Some("starting"),
            LifecycleState::Restoring(_) => Some("restoring"),
            LifecycleState::Imaging(_) => Some("imaging"),
            LifecycleState::Up(UpState { doing: Some((_, OngoingOp::Down)), .. }) => Some("going to rest"),
            LifecycleState::Up(UpState { doing: Some((_, OngoingOp::Up)), .. }) => Some("rousing"),
            LifecycleState::Up(UpState { doing: Some((_, OngoingOp::Image)), .. }) => Some("imaging"),
            LifecycleState::Ending(_) => Some("ending"),
        }
    }

    /// Whether it gets no CPU time, and a request would be the first to wake it.
    pub fn rests(&self) -> bool {
        let is_down = match self.state {
            LifecycleState::Off | LifecycleState::Ending(_) => true,
            LifecycleState::Queued
            | LifecycleState::Booting(_)
            | LifecycleState::Restoring(_)
            | LifecycleState::Imaging(_) => false,
            LifecycleState::Up(up) => {
                up.tier <= Tier::Frozen && !matches!(up.doing, Some((_, OngoingOp::Up)))
            }
        };
        is_down && self.waiters.is_empty()
    }

    pub fn is_queued(&self) -> bool {
        self.state == LifecycleState::Queued
    }

    /// Returns the run that has processes or is about to.
    pub fn run(&self) -> RunId {
        self.run
    }

    pub fn users(&self) -> u32 {
        self.users
    }

    pub fn waiting(&self) -> usize {
        self.waiters.len()
    }

    /// Returns the number of recent failures, and how long the next start waits for them.
    pub fn failures(&self, now: Instant) -> (u32, Option<Duration>) {
        (self.failures.count, self.failures.left(now))
    }

    /// Returns since when nobody uses it, if it has processes.
    pub fn idle_since(&self) -> Option<Instant> {
        (matches!(self.state, LifecycleState::Up(_)) && self.is_idle()).then_some(self.idle_since)
    }

    pub fn has_image(&self) -> bool {
        self.policy.images && matches!(self.image.state, ImageState::Taken | ImageState::Aged)
    }

    /// Whether an image of it is to be taken, or is being taken.
    pub fn is_imaging(&self) -> bool {
        matches!(
            self.state,
            LifecycleState::Imaging(_)
                | LifecycleState::Up(UpState { doing: Some((_, OngoingOp::Image)), .. })
        )
    }

    /// Returns the known cost of each of its tiers.
    pub fn costs(&self) -> &KnownCosts {
        &self.costs
    }

    /// Sets the node's measurements, which replace missing ones of this instance.
    pub fn assume(&mut self, node: TierCosts) {
        self.costs.node = node;
    }

    /// Returns when `LifecycleEvent::Alarm` is due.
    pub fn deadline(&self) -> Option<Instant> {
        if let Some(since) = self.placement.fenced_since {
            return self.is_coming().then_some(since + HELD_MAX);
        }
        match self.state {
            LifecycleState::Off if self.is_kept() => {
                self.failures.not_before.max(Some(self.earliest_auto_start))
            }
            LifecycleState::Up(up) if up.doing.is_none() && self.is_idle() => {
                let idle = IdleSpan { since: self.idle_since, now: self.idle_since };
                let next =
                    self.policy.next(idle, up.tried, self.can_rest_as_image(), &self.arrivals, &self.costs);
                next.map(|(_, due)| self.work_look().map_or(due, |look| look.max(due)))
            }
            _ => None,
        }
    }

    /// Whether an operator's command makes sense now.
    pub fn fits(&self, wish: LifecycleEvent) -> Result<(), ActError> {
        match (wish, self.state) {
            (LifecycleEvent::Rest(_) | LifecycleEvent::Retake, _) if self.barred().is_some() => {
                Err(ActError::NotHere)
            }
            (LifecycleEvent::Rest(_) | LifecycleEvent::Retake, _) if !self.is_idle() => Err(ActError::InUse),
            (LifecycleEvent::Rest(_), LifecycleState::Off) => Err(ActError::NoProcess),
            (LifecycleEvent::Rest(to), LifecycleState::Up(UpState { doing: None, .. })) => {
                if to.has_process() || !self.policy.keep { Ok(()) } else { Err(ActError::Kept) }
            }
            (LifecycleEvent::Retake, _) if !self.policy.images => Err(ActError::NoImages),
            (
                LifecycleEvent::Retake,
                LifecycleState::Off | LifecycleState::Up(UpState { doing: None, .. }),
            ) => Ok(()),
            (LifecycleEvent::Rest(_) | LifecycleEvent::Retake, _) => Err(ActError::Occupied),
            (LifecycleEvent::Stop, LifecycleState::Off) => Err(ActError::NoProcess),
            _ => Ok(()),
        }
    }

    fn is_idle(&self) -> bool {
        self.users == 0 && self.waiters.is_empty()
    }

    /// Whether it may get processes, and its processes may run.
    fn may_run(&self) -> bool {
        self.placement.is_here && self.placement.fenced_since.is_none()
    }

    /// Whether it is placed here, as far as it was notified.
    pub fn is_here(&self) -> bool {
        self.placement.is_here
    }

    /// Whether the operation under way, or the last one, was frozen for a while.
    pub fn is_disturbed(&self) -> bool {
        self.placement.is_disturbed
    }

    /// Whether it is being started or restored, or its image taken, in its turn.
    fn is_coming(&self) -> bool {
        matches!(
            self.state,
            LifecycleState::Booting(_) | LifecycleState::Restoring(_) | LifecycleState::Imaging(_)
        )
    }

    fn is_kept(&self) -> bool {
        self.policy.keep
            && !self.placement.is_closing
            && self.placement.is_here
            && !self.placement.is_released
    }

    fn is_wanted(&self) -> bool {
        self.barred().is_none() && (!self.waiters.is_empty() || self.is_kept() || self.image.retake)
    }

    fn can_restore(&self) -> bool {
        self.policy.images
            && matches!(self.image.state, ImageState::Taken | ImageState::Aged | ImageState::Unknown)
    }

    // === Events ===

    /// Takes an event, and returns effects, to be carried out in this order.
    pub fn apply(&mut self, now: Instant, event: LifecycleEvent) -> Vec<LifecycleEffect> {
        match event {
            LifecycleEvent::Acquire(waiter) => self.ask(now, waiter),
            LifecycleEvent::Cancel(waiter) => self.cancel(waiter),
            LifecycleEvent::Release(run) => self.leave(now, run),
            LifecycleEvent::WakeSlot => self.turn(now),
            LifecycleEvent::WakeQueueFull => {
                debug_assert_eq!(self.state, LifecycleState::Queued, "turns are of those who wait");
                self.state = LifecycleState::Off;
                self.earliest_auto_start = now + BACKOFF_FIRST;
                self.answer_all(Err(WaitError::Full));
            }
            LifecycleEvent::Done(op, outcome) => self.done(now, op, outcome),
            LifecycleEvent::Returned(from, took) => self.costs.own.returned(from, took, now),
            LifecycleEvent::Holds(tier, bytes) => self.costs.own.holds(tier, bytes, now),
            LifecycleEvent::Died(run) => self.died(now, run),
            LifecycleEvent::Alarm => self.alarm(now),
            LifecycleEvent::Pressure => self.pressure(now),
            LifecycleEvent::Rest(to) => self.rest_as_asked(to),
            LifecycleEvent::Stop => self.stop(WaitError::Stopped),
            LifecycleEvent::Retake => self.take_anew(),
            LifecycleEvent::Restart => self.restart(),
            LifecycleEvent::RecordChanged(terms) => self.renew(terms),
            LifecycleEvent::RecordChangedBeside(terms) => self.renew_beside(terms),
            LifecycleEvent::PolicyChanged(terms) => self.set_terms(terms),
            LifecycleEvent::ImageMissing if self.can_restore() => self.image.state = ImageState::None,
            LifecycleEvent::ImageMissing => {}
            LifecycleEvent::ImageImpossible => self.image.state = ImageState::Impossible,
            LifecycleEvent::ImageArrived => self.image.state = ImageState::Unknown,
            LifecycleEvent::ImageStale if self.image.state == ImageState::Taken => {
                self.image.state = ImageState::Aged
            }
            LifecycleEvent::ImageStale => {}
            LifecycleEvent::Works => self.works(now),
            LifecycleEvent::Fenced => self.fence(now),
            LifecycleEvent::Unfenced => self.unfence(),
            LifecycleEvent::PlacedElsewhere => self.moved(),
            LifecycleEvent::PlacedHere => {
                (self.placement.is_here, self.placement.is_released) = (true, false)
            }
            LifecycleEvent::Drain => self.release(),
            LifecycleEvent::SiteRemoved => {
                self.placement.is_closing = true;
                self.image.retake = false;
                self.stop(WaitError::Gone);
                if self.state == LifecycleState::Off {
                    self.effect(LifecycleEffect::Closed);
                }
            }
        }
        std::mem::take(&mut self.effects)
    }

    fn effect(&mut self, effect: LifecycleEffect) {
        self.effects.push(effect);
    }

    fn op(&mut self) -> OpId {
        self.last_op += 1;
        OpId(self.last_op)
    }

    fn answer_all(&mut self, answer: Result<RunId, WaitError>) {
        for waiter in std::mem::take(&mut self.waiters) {
            self.effect(LifecycleEffect::Answer(waiter, answer));
            self.users += u32::from(answer.is_ok());
        }
    }

    // === Waiters and users ===

    fn ask(&mut self, now: Instant, waiter: WaiterId) {
        if self.placement.is_closing {
            return self.effect(LifecycleEffect::Answer(waiter, Err(WaitError::Gone)));
        }
        if let Some(why) = self.barred() {
            return self.effect(LifecycleEffect::Answer(waiter, Err(why)));
        }
        if self.waiters.len() >= WAITERS_MAX {
            return self.effect(LifecycleEffect::Answer(waiter, Err(WaitError::Full)));
        }
        let was_idle = self.is_idle();
        if was_idle && matches!(self.state, LifecycleState::Up(_) | LifecycleState::Off) && self.run.0 > 0 {
            self.arrivals.saw(now.saturating_duration_since(self.idle_since));
        }
        match self.state {
            LifecycleState::Off => {
                if let Some(left) = self.failures.left(now) {
                    let failures = self.failures.count;
                    return self
                        .effect(LifecycleEffect::Answer(waiter, Err(WaitError::Backoff { failures, left })));
                }
                self.waiters.insert(waiter);
                self.queue();
            }
            LifecycleState::Up(up) => {
                self.waiters.insert(waiter);
                self.needed(up);
            }
            LifecycleState::Queued
            | LifecycleState::Booting(_)
            | LifecycleState::Restoring(_)
            | LifecycleState::Imaging(_)
            | LifecycleState::Ending(_) => {
                self.waiters.insert(waiter);
            }
        }
    }

    /// It has processes, and somebody waits for it.
    fn needed(&mut self, mut up: UpState) {
        match up.doing {
            None if up.tier == Tier::Running => {
                up.tried = Tier::Running;
                self.state = LifecycleState::Up(up);
                self.answer_all(Ok(self.run));
            }
            Some((_, OngoingOp::Up | OngoingOp::Image)) => {}
            // Up at once, also from a step down that is half done.
            None | Some((_, OngoingOp::Down)) => {
                let op = self.op();
                let from = if up.doing.is_some() { up.tried } else { up.tier };
                (up.doing, up.tried) = (Some((op, OngoingOp::Up)), Tier::Running);
                self.state = LifecycleState::Up(up);
                self.effect(LifecycleEffect::Resume(op, from));
            }
        }
    }

    fn cancel(&mut self, waiter: WaiterId) {
        self.waiters.remove(&waiter);
        if self.state == LifecycleState::Queued && !self.is_wanted() {
            self.effect(LifecycleEffect::Unqueue);
            self.state = LifecycleState::Off;
        }
    }

    fn leave(&mut self, now: Instant, run: RunId) {
        if run != self.run || !matches!(self.state, LifecycleState::Up(_)) {
            return;
        }
        self.users = self.users.saturating_sub(1);
        if self.is_idle() {
            self.idle_since = now;
            if self.placement.is_released {
                self.end();
            }
        }
    }

    // === Waking ===

    fn queue(&mut self) {
        self.state = LifecycleState::Queued;
        self.effect(LifecycleEffect::Queue);
    }

    fn turn(&mut self, now: Instant) {
        debug_assert_eq!(self.state, LifecycleState::Queued, "turns are of those who wait");
        if !self.is_wanted() {
            self.state = LifecycleState::Off;
            return self.effect(LifecycleEffect::FreeWakeSlot(false));
        }
        self.begin(now);
    }

    /// Starts or restores it, in its turn.
    fn begin(&mut self, now: Instant) {
        let op = self.op();
        self.run = RunId(self.run.0.wrapping_add(1));
        self.users = 0;
        self.idle_since = now;
        self.placement.is_disturbed = false;
        // While there is an image, a waiter is not delayed by a newer one.
        let is_asked = self.image.state == ImageState::Aged && !self.waiters.is_empty();
        if self.can_restore() && (!self.image.retake || is_asked) {
            self.state = LifecycleState::Restoring(op);
            self.effect(LifecycleEffect::Restore(op, self.run));
        } else {
            self.state = LifecycleState::Booting(op);
            self.effect(LifecycleEffect::Boot(op, self.run));
        }
    }

    fn done(&mut self, now: Instant, op: OpId, outcome: OpOutcome) {
        match (self.state, outcome) {
            (LifecycleState::Booting(of), OpOutcome::Ready) if of == op => {
                // Includes images that nobody has looked for: there were none at the decision to
                // start.
                let has_none = !self.policy.image_at_rest
                    && matches!(self.image.state, ImageState::None | ImageState::Unknown | ImageState::Aged);
                if self.policy.images && has_none && self.may_run() {
                    let op = self.op();
                    self.state = LifecycleState::Imaging(op);
                    self.effect(LifecycleEffect::TakeImage(op));
                } else {
                    self.ready(now, false);
                }
            }
            (LifecycleState::Restoring(of), OpOutcome::Ready) if of == op => {
                self.image.state = ImageState::Taken;
                self.ready(now, true);
            }
            (LifecycleState::Booting(of), OpOutcome::Failed(blame)) if of == op => {
                self.not_started(now, blame)
            }
            (LifecycleState::Restoring(of), OpOutcome::Failed(blame)) if of == op => {
                self.not_restored(now, blame)
            }
            (LifecycleState::Imaging(of), OpOutcome::Imaged(is_taken)) if of == op => {
                self.image.state = match (is_taken, self.placement.is_disturbed) {
                    (true, _) => ImageState::Taken,
                    (false, true) => self.without_another(),
                    (false, false) => ImageState::Impossible,
                };
                self.ready(now, false);
            }
            (LifecycleState::Imaging(of), OpOutcome::NotImagedNow) if of == op => {
                self.image.state = self.without_another();
                self.ready(now, false);
            }
            (LifecycleState::Up(UpState { doing: Some((of, _)), .. }), OpOutcome::Stuck) if of == op => {
                self.end()
            }
            (LifecycleState::Up(up), OpOutcome::Imaged(_) | OpOutcome::NotImagedNow)
                if up.doing == Some((op, OngoingOp::Image)) =>
            {
                self.imaged_at_rest(now, up, outcome);
            }
            (LifecycleState::Up(mut up), OpOutcome::Rests(tier))
                if up.doing.is_some_and(|(of, _)| of == op) =>
            {
                let was_up = matches!(up.doing, Some((_, OngoingOp::Up)));
                (up.doing, up.tier) = (None, tier);
                self.state = LifecycleState::Up(up);
                match (was_up, tier) {
                    (true, Tier::Running) => self.answer_all(Ok(self.run)),
                    (true, _) => self.end(),
                    (false, _) => {}
                }
            }
            (LifecycleState::Ending(of), OpOutcome::Ended) if of == op => self.ended(),
            // Result of an operation that was given up.
            _ => {}
        }
    }

    fn ready(&mut self, now: Instant, is_restored: bool) {
        self.image.retake = false;
        self.idle_since = now;
        let tier = Tier::Running;
        self.state = LifecycleState::Up(UpState { since: now, is_restored, tier, tried: tier, doing: None });
        self.effect(LifecycleEffect::FreeWakeSlot(true));
        self.answer_all(Ok(self.run));
    }

    /// Returns the image state if no image was taken just now.
    fn without_another(&self) -> ImageState {
        if self.image.state == ImageState::Aged { ImageState::Taken } else { ImageState::None }
    }

    fn not_started(&mut self, now: Instant, blame: FailureCause) {
        if std::mem::take(&mut self.image.retake) && self.image.state == ImageState::Aged {
            return self.not_renewed(now);
        }
        if blame == FailureCause::Program && !self.placement.is_disturbed {
            self.failures.not_started(now);
        }
        self.earliest_auto_start = now + BACKOFF_FIRST;
        self.state = LifecycleState::Off;
        self.effect(LifecycleEffect::FreeWakeSlot(false));
        self.answer_all(Err(WaitError::Failed));
    }

    /// A start for a newer image failed: the instance still has the old one.
    fn not_renewed(&mut self, now: Instant) {
        if self.is_wanted() {
            return self.begin(now);
        }
        self.state = LifecycleState::Off;
        self.effect(LifecycleEffect::FreeWakeSlot(false));
    }

    /// The same waiters get a start instead, in the same turn.
    fn not_restored(&mut self, now: Instant, blame: FailureCause) {
        if blame == FailureCause::Program && !self.placement.is_disturbed {
            self.quarantine(DiscardReason::NotRestored);
        }
        if self.is_wanted() {
            let op = self.op();
            self.run = RunId(self.run.0.wrapping_add(1));
            self.idle_since = now;
            self.state = LifecycleState::Booting(op);
            self.effect(LifecycleEffect::Boot(op, self.run));
        } else {
            self.state = LifecycleState::Off;
            self.effect(LifecycleEffect::FreeWakeSlot(false));
        }
    }

    fn quarantine(&mut self, reason: DiscardReason) {
        if self.can_restore() {
            self.image.bad_count += u32::from(reason != DiscardReason::Asked);
            self.image.state = match self.image.bad_count >= BAD_IMAGES_MAX {
                true => ImageState::Impossible,
                false => ImageState::None,
            };
            self.effect(LifecycleEffect::Quarantine(reason));
        }
    }

    // === Resting ===

    fn alarm(&mut self, now: Instant) {
        match self.state {
            _ if self.placement.fenced_since.is_some() => self.give_up_if_held(now),
            LifecycleState::Off if self.is_kept() && self.deadline().is_some_and(|due| due <= now) => {
                self.queue()
            }
            LifecycleState::Up(up) if up.doing.is_none() && self.is_idle() => {
                let idle = IdleSpan { since: self.idle_since, now };
                let has_image = self.can_rest_as_image();
                let next = self.policy.next(idle, up.tried, has_image, &self.arrivals, &self.costs);
                if let Some((to, _)) = next.filter(|(_, due)| *due <= now) {
                    // Nobody waits for it now.
                    let is_aged = self.image.state == ImageState::Aged && !self.policy.image_at_rest;
                    self.image.retake = to == Tier::Image && is_aged && self.may_run();
                    self.go_down(up, to);
                }
            }
            _ => {}
        }
    }

    fn pressure(&mut self, now: Instant) {
        let LifecycleState::Up(up) = self.state else { return };
        let is_long = now.saturating_duration_since(self.idle_since) >= PRESSED_AFTER;
        if up.doing.is_none()
            && self.may_run()
            && self.is_idle()
            && is_long
            && let Some(to) = self.policy.pressed(up.tried, self.can_rest_as_image(), &self.costs, now)
        {
            self.go_down(up, to);
        }
    }

    fn rest_as_asked(&mut self, to: Tier) {
        if self.fits(LifecycleEvent::Rest(to)).is_err() {
            return;
        }
        let LifecycleState::Up(up) = self.state else { return };
        // Without an image there is no tier between memory and a cold start.
        let to = if to == Tier::Image && !self.can_rest_as_image() { Tier::Cold } else { to };
        if to < up.tier {
            self.go_down(up, to);
        }
    }

    fn go_down(&mut self, mut up: UpState, to: Tier) {
        if self.is_imaged_before(to) {
            return self.take_at_rest(up);
        }
        if !to.has_process() {
            return self.end();
        }
        let op = self.op();
        (up.doing, up.tried) = (Some((op, OngoingOp::Down)), to);
        self.state = LifecycleState::Up(up);
        self.effect(LifecycleEffect::Rest(op, up.tier, to));
    }

    // === Ending ===

    /// Ends its processes, whatever operation is under way.
    fn end(&mut self) {
        match self.state {
            LifecycleState::Off | LifecycleState::Ending(_) => {}
            LifecycleState::Queued => {
                self.effect(LifecycleEffect::Unqueue);
                self.state = LifecycleState::Off;
            }
            LifecycleState::Booting(_) | LifecycleState::Restoring(_) | LifecycleState::Imaging(_) => {
                self.effect(LifecycleEffect::FreeWakeSlot(false));
                self.end_processes();
            }
            LifecycleState::Up(_) => self.end_processes(),
        }
    }

    fn end_processes(&mut self) {
        let op = self.op();
        self.users = 0;
        self.state = LifecycleState::Ending(op);
        // Processes with notice run for a moment more.
        self.effect(if self.may_run() { LifecycleEffect::End(op) } else { LifecycleEffect::Kill(op) });
    }

    fn ended(&mut self) {
        self.state = LifecycleState::Off;
        if self.placement.is_closing {
            self.effect(LifecycleEffect::Closed);
        } else if !self.waiters.is_empty() || (self.image.retake && self.barred().is_none()) {
            self.queue();
        }
    }

    fn died(&mut self, now: Instant, run: RunId) {
        if run != self.run {
            return;
        }
        let ran = match self.state {
            LifecycleState::Up(up) => {
                let ran = now.saturating_duration_since(up.since);
                if up.is_restored && ran < PROOF {
                    self.quarantine(DiscardReason::DiedSoon(ran));
                }
                ran
            }
            // Taking its image may have killed it: its waiters get it without an image.
            LifecycleState::Imaging(_) => {
                self.image.state = ImageState::Impossible;
                self.effect(LifecycleEffect::FreeWakeSlot(false));
                Duration::ZERO
            }
            _ => return,
        };
        self.image.retake = false;
        self.failures.ended(now, ran);
        (self.users, self.state, self.idle_since) = (0, LifecycleState::Off, now);
        if self.waiters.is_empty() {
            return;
        }
        match self.failures.left(now) {
            Some(left) => {
                self.answer_all(Err(WaitError::Backoff { failures: self.failures.count, left }));
            }
            None => self.queue(),
        }
    }

    // === The operator ===

    fn stop(&mut self, why: WaitError) {
        self.answer_all(Err(why));
        self.image.retake = false;
        self.end();
    }

    fn take_anew(&mut self) {
        if self.fits(LifecycleEvent::Retake).is_err() {
            return;
        }
        self.quarantine(DiscardReason::Asked);
        (self.image.retake, self.image.bad_count, self.image.state) = (true, 0, ImageState::None);
        self.failures = RecentFailures::default();
        match self.state {
            LifecycleState::Off => self.queue(),
            _ => self.end(),
        }
    }

    fn restart(&mut self) {
        self.quarantine(DiscardReason::Asked);
        (self.image.bad_count, self.image.state) = (0, ImageState::None);
        self.failures = RecentFailures::default();
        if self.try_drain() {
            self.image.retake = self.barred().is_none();
            self.queue();
        } else if !matches!(
            self.state,
            LifecycleState::Off | LifecycleState::Queued | LifecycleState::Ending(_)
        ) {
            // A run starts again after this, whether or not somebody waits.
            self.image.retake = self.barred().is_none();
            self.end();
        }
    }

    fn renew(&mut self, terms: IdlePolicy) {
        self.policy = terms;
        self.image.state = ImageState::Unknown;
        (self.image.bad_count, self.failures, self.arrivals) =
            (0, RecentFailures::default(), ArrivalPattern::default());
        self.costs.own = TierCosts::default();
        // An instance that waits for its turn has begun nothing of the old record.
        if self.state != LifecycleState::Queued {
            self.end();
        }
    }

    fn set_terms(&mut self, terms: IdlePolicy) {
        self.policy = terms;
        if self.state == LifecycleState::Queued && !self.is_wanted() {
            self.end();
        }
    }
}

#[cfg(test)]
mod tests;
