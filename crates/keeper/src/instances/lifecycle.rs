//! The life of one instance: who waits for it, what is done about it next, how it rests and fails. Pure: `apply` takes the
//! time and what happened, and says what to do.
//!
//! Every operation has a number, and its end is told with it; the end of one that was given up meanwhile changes nothing.
//! Not here: doing it (`instances`), when an idle one goes deeper (`policy`), whose turn it is to wake (`wakes`).

mod at_rest;
mod placed;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use nagaya_cmdb::instance::Tier;

use super::costs::{Costs, Known};
use super::policy::{Habit, Idle, PRESSED_AFTER, Terms};

/// Those who may wait for one instance at once.
pub const WAITERS_MAX: usize = 4096;

/// Pause before one that failed is started again; doubled for each further failure.
const BACKOFF_FIRST: Duration = Duration::from_secs(1);
pub const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// What ran this long had a good start: its failures before are forgotten.
const GOOD_RUN: Duration = Duration::from_secs(60);

/// What ends so soon after it was restored was not restored well.
const PROOF: Duration = Duration::from_secs(5);

/// How long a start or restoration stands still with everything else before it is given up. Most fences are over sooner,
/// and what goes on costs less than another start.
const HELD_MAX: Duration = Duration::from_secs(2);

/// So many bad images, and none is taken any more until something changes.
const BAD_IMAGES_MAX: u32 = 2;

/// One operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Op(pub u64);

/// One tree of processes, from its start or restoration to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run(pub u32);

/// One who waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Waiter(pub u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A request needs it. Answered exactly once, unless it is cancelled before.
    Ask(Waiter),
    /// The one who asked has left.
    Cancel(Waiter),
    /// One whose answer was `Ok` with this run needs it no more.
    Leave(Run),
    /// Its turn to wake.
    Turn,
    /// As many wait for their turn as may.
    NoTurn,
    Done(Op, Outcome),
    /// To come back from there has taken so long, until somebody who waited was served.
    Returned(Tier, Duration),
    /// So many bytes of memory are held while it rests there, or runs.
    Holds(Tier, u64),
    /// The processes of this run have ended by themselves, and nothing of them is left.
    Died(Run),
    /// `deadline` has come.
    Alarm,
    /// The node is short of memory.
    Pressure,
    /// The operator wants it to rest this deep; `Tier::Cold`: as deep as it can.
    Rest(Tier),
    /// The operator wants its processes ended.
    Stop,
    /// The operator wants a new image.
    Retake,
    /// Its operator or tenant wants it started anew: what runs is ended, and its image is not used again.
    Restart,
    /// Its record is another: what runs is ended, and started anew if somebody waits.
    Renew(Terms),
    /// Only when it rests has changed.
    Terms(Terms),
    /// It has no image: there never was one, or it was collected, or its base has changed.
    Lost,
    /// It has no image, and none can be taken.
    Unfit,
    /// There is an image of it that this has not seen: it came from another node.
    Found,
    /// Its image was taken long ago.
    Aged,
    /// There is no such site any more.
    Close,
    /// The node has no authority: all its processes stand still.
    Fenced,
    /// The node has authority: they go on.
    Unfenced,
    /// It is placed on another node, or on none: whatever runs of it ends at once.
    Moved,
    /// It is placed on this node, under a new epoch.
    Placed,
    /// It is to be given up: nobody gets it any more, and it ends as soon as nobody uses it.
    Release,
}

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Of a start or a restoration: it can answer.
    Ready,
    /// Of a start or a restoration: nothing of it is left.
    Failed(Blame),
    /// Of an image: whether there is one.
    Imaged(bool),
    /// Of an image: there is none, for a reason that is not the application's and passes. The next start tries again.
    NotImagedNow,
    /// Of going down or up: where it is now.
    Rests(Tier),
    /// Of going up: it cannot be brought back.
    Stuck,
    /// Nothing of it is left.
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// The next try waits.
    Program,
    /// Not the program's doing, and over soon.
    Node,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// It waits for its turn.
    Queue,
    /// It does not wait any more.
    Unqueue,
    /// Its turn is over. The value: it came to the end of a wake.
    Release(bool),
    /// Starts the program.
    Boot(Op, Run),
    Restore(Op, Run),
    TakeImage(Op),
    /// From the first of these tiers down to the second.
    Rest(Op, Tier, Tier),
    /// From here up to running. What goes down is stopped on its way.
    Rouse(Op, Tier),
    /// Ends its processes, and what is being done to them.
    End(Op),
    /// The same, and none of them runs a line more. Also of an end that is under way.
    Kill(Op),
    /// Its image is not used again.
    Quarantine(Reason),
    Answer(Waiter, Result<Run, Refusal>),
    /// Nothing of it is left, and it is not wanted again.
    Closed,
}

/// Why an image is not used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The driver knows more.
    NotRestored,
    DiedSoon(Duration),
    Asked,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It could not be started; the driver knows why.
    Failed,
    /// It failed so often, and is tried again only in so long.
    Backoff { failures: u32, left: Duration },
    /// As many as may wait do.
    Full,
    /// The operator ended it.
    Stopped,
    /// Its site was removed.
    Gone,
    /// The node has no authority now.
    Fenced,
    /// It is placed elsewhere.
    Elsewhere,
}

/// Why an operator's wish cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    #[error("it is in use, or somebody waits for it")]
    InUse,
    #[error("it has no processes")]
    NoProcess,
    #[error("its record says that it always runs (min = 1)")]
    Kept,
    #[error("no image can be taken here, see `nagaya doctor`, or of this application, see its log")]
    NoImages,
    #[error("something is being done to it; try again in a moment")]
    Occupied,
    #[error("it is placed on another node, see `nagaya placements`, or this node has no authority now")]
    NotHere,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// No process.
    Off,
    Queued,
    Booting(Op),
    Restoring(Op),
    /// It was started and is about to answer its first request; its image is taken before.
    Imaging(Op),
    Up(Up),
    Ending(Op),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Up {
    since: Instant,
    is_restored: bool,
    tier: Tier,
    /// How deep it was tried to go; it may not be there, because that is not possible here.
    tried: Tier,
    doing: Option<(Op, Doing)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doing {
    Down,
    Up,
    /// Its image is taken before it rests.
    Image,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Picture {
    /// There may be one of an earlier time: a restoration finds out.
    Unknown,
    None,
    Taken,
    /// The same, long ago: it is of use, and another is taken before the instance rests on it again.
    Aged,
    /// It was tried, and is not again until something changes.
    Impossible,
}

pub struct Lifecycle {
    state: State,
    terms: Terms,
    picture: Picture,
    bad_images: u32,
    waiters: BTreeSet<Waiter>,
    users: u32,
    /// Of who used the present run, or the last.
    idle_since: Instant,
    habit: Habit,
    costs: Known,
    failures: Failures,
    /// What starts without being asked does not before this.
    not_unasked_before: Instant,
    run: Run,
    last_op: u64,
    /// An image is to be taken at the next start, whoever wants it.
    retake: bool,
    closing: bool,
    /// Since when all of it stands still.
    fenced_since: Option<Instant>,
    /// It is placed on this node. True outside of a cluster.
    is_here: bool,
    /// It is given up, and only a new placement brings it back.
    is_released: bool,
    /// What is under way stood still for a while: that it failed is not the program's doing.
    is_disturbed: bool,
    effects: Vec<Effect>,
}

/// How often it failed of late.
#[derive(Debug, Default)]
struct Failures {
    count: u32,
    not_before: Option<Instant>,
}

impl Failures {
    /// It did not become ready.
    fn not_started(&mut self, now: Instant) {
        self.count = self.count.saturating_add(1);
        self.pause(now, self.count);
    }

    /// It ended by itself after it had run for so long. The first time it may be started again at once.
    fn ended(&mut self, now: Instant, ran: Duration) {
        self.ran(ran);
        self.count = self.count.saturating_add(1);
        self.pause(now, self.count - 1);
    }

    fn ran(&mut self, ran: Duration) {
        if ran >= GOOD_RUN {
            *self = Self::default();
        }
    }

    fn pause(&mut self, now: Instant, times: u32) {
        let doubled = |times: u32| BACKOFF_FIRST.saturating_mul(1 << (times - 1).min(10)).min(BACKOFF_MAX);
        self.not_before = (times > 0).then(|| now + doubled(times));
    }

    fn left(&self, now: Instant) -> Option<Duration> {
        self.not_before.and_then(|then| then.checked_duration_since(now)).filter(|left| !left.is_zero())
    }
}

impl Lifecycle {
    /// One without processes.
    pub fn new(now: Instant, terms: Terms) -> Self {
        Self {
            state: State::Off,
            terms,
            picture: Picture::Unknown,
            bad_images: 0,
            waiters: BTreeSet::new(),
            users: 0,
            idle_since: now,
            habit: Habit::default(),
            costs: Known::default(),
            failures: Failures::default(),
            not_unasked_before: now,
            run: Run(0),
            last_op: 0,
            retake: false,
            closing: false,
            fenced_since: None,
            is_here: true,
            is_released: false,
            is_disturbed: false,
            effects: Vec::new(),
        }
    }

    // === What it says of itself ===

    /// Where it rests, or rested before what is being done to it.
    pub fn tier(&self) -> Tier {
        match self.state {
            State::Up(up) => up.tier,
            _ if self.has_image() => Tier::Image,
            _ => Tier::Cold,
        }
    }

    /// A word for what is done to it now; None: nothing.
    pub fn doing(&self) -> Option<&'static str> {
        match self.state {
            State::Off | State::Up(Up { doing: None, .. }) => None,
            State::Queued => Some("queued"),
            State::Booting(_) => Some("starting"),
            State::Restoring(_) => Some("restoring"),
            State::Imaging(_) => Some("imaging"),
            State::Up(Up { doing: Some((_, Doing::Down)), .. }) => Some("going to rest"),
            State::Up(Up { doing: Some((_, Doing::Up)), .. }) => Some("rousing"),
            State::Up(Up { doing: Some((_, Doing::Image)), .. }) => Some("imaging"),
            State::Ending(_) => Some("ending"),
        }
    }

    /// It gets no CPU time, and a request would be the first to wake it.
    pub fn rests(&self) -> bool {
        let is_down = match self.state {
            State::Off | State::Ending(_) => true,
            State::Queued | State::Booting(_) | State::Restoring(_) | State::Imaging(_) => false,
            State::Up(up) => up.tier <= Tier::Frozen && !matches!(up.doing, Some((_, Doing::Up))),
        };
        is_down && self.waiters.is_empty()
    }

    pub fn is_queued(&self) -> bool {
        self.state == State::Queued
    }

    /// The run that has processes or is about to.
    pub fn run(&self) -> Run {
        self.run
    }

    pub fn users(&self) -> u32 {
        self.users
    }

    pub fn waiting(&self) -> usize {
        self.waiters.len()
    }

    /// Failures of late, and how long the next start waits for them.
    pub fn failures(&self, now: Instant) -> (u32, Option<Duration>) {
        (self.failures.count, self.failures.left(now))
    }

    /// Since when nobody needs it, if it has processes.
    pub fn idle_since(&self) -> Option<Instant> {
        (matches!(self.state, State::Up(_)) && self.is_idle()).then_some(self.idle_since)
    }

    pub fn has_image(&self) -> bool {
        self.terms.images && matches!(self.picture, Picture::Taken | Picture::Aged)
    }

    /// An image of it is to be taken, or is being.
    pub fn is_imaging(&self) -> bool {
        matches!(self.state, State::Imaging(_) | State::Up(Up { doing: Some((_, Doing::Image)), .. }))
    }

    /// What each tier costs it, as far as that is known.
    pub fn costs(&self) -> &Known {
        &self.costs
    }

    /// What all instances of the node have measured, which stands in for what this one has not.
    pub fn assume(&mut self, node: Costs) {
        self.costs.node = node;
    }

    /// When `Event::Alarm` is due.
    pub fn deadline(&self) -> Option<Instant> {
        if let Some(since) = self.fenced_since {
            return self.is_coming().then_some(since + HELD_MAX);
        }
        match self.state {
            State::Off if self.is_kept() => self.failures.not_before.max(Some(self.not_unasked_before)),
            State::Up(up) if up.doing.is_none() && self.is_idle() => {
                let idle = Idle { since: self.idle_since, now: self.idle_since };
                self.terms
                    .next(idle, up.tried, self.can_rest_as_image(), &self.habit, &self.costs)
                    .map(|(_, due)| due)
            }
            _ => None,
        }
    }

    /// Whether an operator's wish makes sense now.
    pub fn fits(&self, wish: Event) -> Result<(), Unfit> {
        match (wish, self.state) {
            (Event::Rest(_) | Event::Retake, _) if self.barred().is_some() => Err(Unfit::NotHere),
            (Event::Rest(_) | Event::Retake, _) if !self.is_idle() => Err(Unfit::InUse),
            (Event::Rest(_), State::Off) => Err(Unfit::NoProcess),
            (Event::Rest(to), State::Up(Up { doing: None, .. })) => {
                if to.has_process() || !self.terms.keep {
                    Ok(())
                } else {
                    Err(Unfit::Kept)
                }
            }
            (Event::Retake, _) if !self.terms.images => Err(Unfit::NoImages),
            (Event::Retake, State::Off | State::Up(Up { doing: None, .. })) => Ok(()),
            (Event::Rest(_) | Event::Retake, _) => Err(Unfit::Occupied),
            (Event::Stop, State::Off) => Err(Unfit::NoProcess),
            _ => Ok(()),
        }
    }

    fn is_idle(&self) -> bool {
        self.users == 0 && self.waiters.is_empty()
    }

    /// Whether it may get processes, and those it has may run.
    fn may_run(&self) -> bool {
        self.is_here && self.fenced_since.is_none()
    }

    /// Whether it is placed here, as far as it was told.
    pub fn is_here(&self) -> bool {
        self.is_here
    }

    /// What is under way, or was last, stood still for a while.
    pub fn is_disturbed(&self) -> bool {
        self.is_disturbed
    }

    /// It is being started or restored, or its image taken, in its turn.
    fn is_coming(&self) -> bool {
        matches!(self.state, State::Booting(_) | State::Restoring(_) | State::Imaging(_))
    }

    fn is_kept(&self) -> bool {
        self.terms.keep && !self.closing && self.is_here && !self.is_released
    }

    fn is_wanted(&self) -> bool {
        self.barred().is_none() && (!self.waiters.is_empty() || self.is_kept() || self.retake)
    }

    fn can_restore(&self) -> bool {
        self.terms.images && matches!(self.picture, Picture::Taken | Picture::Aged | Picture::Unknown)
    }

    // === What happens ===

    /// Takes what happened, and says what to do, in this order.
    pub fn apply(&mut self, now: Instant, event: Event) -> Vec<Effect> {
        match event {
            Event::Ask(waiter) => self.ask(now, waiter),
            Event::Cancel(waiter) => self.cancel(waiter),
            Event::Leave(run) => self.leave(now, run),
            Event::Turn => self.turn(now),
            Event::NoTurn => {
                debug_assert_eq!(self.state, State::Queued, "turns are of those who wait");
                self.state = State::Off;
                self.not_unasked_before = now + BACKOFF_FIRST;
                self.answer_all(Err(Refusal::Full));
            }
            Event::Done(op, outcome) => self.done(now, op, outcome),
            Event::Returned(from, took) => self.costs.own.returned(from, took, now),
            Event::Holds(tier, bytes) => self.costs.own.holds(tier, bytes, now),
            Event::Died(run) => self.died(now, run),
            Event::Alarm => self.alarm(now),
            Event::Pressure => self.pressure(now),
            Event::Rest(to) => self.rest_as_asked(to),
            Event::Stop => self.stop(Refusal::Stopped),
            Event::Retake => self.take_anew(),
            Event::Restart => self.restart(),
            Event::Renew(terms) => self.renew(terms),
            Event::Terms(terms) => self.set_terms(terms),
            Event::Lost if self.can_restore() => self.picture = Picture::None,
            Event::Lost => {}
            Event::Unfit => self.picture = Picture::Impossible,
            Event::Found => self.picture = Picture::Unknown,
            Event::Aged if self.picture == Picture::Taken => self.picture = Picture::Aged,
            Event::Aged => {}
            Event::Fenced => self.fence(now),
            Event::Unfenced => self.unfence(),
            Event::Moved => self.moved(),
            Event::Placed => (self.is_here, self.is_released) = (true, false),
            Event::Release => self.release(),
            Event::Close => {
                self.closing = true;
                self.retake = false;
                self.stop(Refusal::Gone);
                if self.state == State::Off {
                    self.effect(Effect::Closed);
                }
            }
        }
        std::mem::take(&mut self.effects)
    }

    fn effect(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    fn op(&mut self) -> Op {
        self.last_op += 1;
        Op(self.last_op)
    }

    fn answer_all(&mut self, answer: Result<Run, Refusal>) {
        for waiter in std::mem::take(&mut self.waiters) {
            self.effect(Effect::Answer(waiter, answer));
            self.users += u32::from(answer.is_ok());
        }
    }

    // === Those who need it ===

    fn ask(&mut self, now: Instant, waiter: Waiter) {
        if self.closing {
            return self.effect(Effect::Answer(waiter, Err(Refusal::Gone)));
        }
        if let Some(why) = self.barred() {
            return self.effect(Effect::Answer(waiter, Err(why)));
        }
        if self.waiters.len() >= WAITERS_MAX {
            return self.effect(Effect::Answer(waiter, Err(Refusal::Full)));
        }
        let was_idle = self.is_idle();
        if was_idle && matches!(self.state, State::Up(_) | State::Off) && self.run.0 > 0 {
            self.habit.saw(now.saturating_duration_since(self.idle_since));
        }
        match self.state {
            State::Off => {
                if let Some(left) = self.failures.left(now) {
                    let failures = self.failures.count;
                    return self.effect(Effect::Answer(waiter, Err(Refusal::Backoff { failures, left })));
                }
                self.waiters.insert(waiter);
                self.queue();
            }
            State::Up(up) => {
                self.waiters.insert(waiter);
                self.needed(up);
            }
            State::Queued
            | State::Booting(_)
            | State::Restoring(_)
            | State::Imaging(_)
            | State::Ending(_) => {
                self.waiters.insert(waiter);
            }
        }
    }

    /// It has processes, and somebody waits for it.
    fn needed(&mut self, mut up: Up) {
        match up.doing {
            None if up.tier == Tier::Running => {
                up.tried = Tier::Running;
                self.state = State::Up(up);
                self.answer_all(Ok(self.run));
            }
            Some((_, Doing::Up | Doing::Image)) => {}
            // Up at once, also from half way down.
            None | Some((_, Doing::Down)) => {
                let op = self.op();
                let from = if up.doing.is_some() { up.tried } else { up.tier };
                (up.doing, up.tried) = (Some((op, Doing::Up)), Tier::Running);
                self.state = State::Up(up);
                self.effect(Effect::Rouse(op, from));
            }
        }
    }

    fn cancel(&mut self, waiter: Waiter) {
        self.waiters.remove(&waiter);
        if self.state == State::Queued && !self.is_wanted() {
            self.effect(Effect::Unqueue);
            self.state = State::Off;
        }
    }

    fn leave(&mut self, now: Instant, run: Run) {
        if run != self.run || !matches!(self.state, State::Up(_)) {
            return;
        }
        self.users = self.users.saturating_sub(1);
        if self.is_idle() {
            self.idle_since = now;
            if self.is_released {
                self.end();
            }
        }
    }

    // === Waking ===

    fn queue(&mut self) {
        self.state = State::Queued;
        self.effect(Effect::Queue);
    }

    fn turn(&mut self, now: Instant) {
        debug_assert_eq!(self.state, State::Queued, "turns are of those who wait");
        if !self.is_wanted() {
            self.state = State::Off;
            return self.effect(Effect::Release(false));
        }
        self.begin(now);
    }

    /// Starts or restores it, in its turn.
    fn begin(&mut self, now: Instant) {
        let op = self.op();
        self.run = Run(self.run.0.wrapping_add(1));
        self.users = 0;
        self.idle_since = now;
        self.is_disturbed = false;
        // Who waits is not kept waiting for another image while there is one.
        let is_asked = self.picture == Picture::Aged && !self.waiters.is_empty();
        if self.can_restore() && (!self.retake || is_asked) {
            self.state = State::Restoring(op);
            self.effect(Effect::Restore(op, self.run));
        } else {
            self.state = State::Booting(op);
            self.effect(Effect::Boot(op, self.run));
        }
    }

    fn done(&mut self, now: Instant, op: Op, outcome: Outcome) {
        match (self.state, outcome) {
            (State::Booting(of), Outcome::Ready) if of == op => {
                // Also where nobody has looked for one: images were not there when it was decided to start.
                let has_none = !self.terms.image_at_rest
                    && matches!(self.picture, Picture::None | Picture::Unknown | Picture::Aged);
                if self.terms.images && has_none && self.may_run() {
                    let op = self.op();
                    self.state = State::Imaging(op);
                    self.effect(Effect::TakeImage(op));
                } else {
                    self.ready(now, false);
                }
            }
            (State::Restoring(of), Outcome::Ready) if of == op => {
                self.picture = Picture::Taken;
                self.ready(now, true);
            }
            (State::Booting(of), Outcome::Failed(blame)) if of == op => self.not_started(now, blame),
            (State::Restoring(of), Outcome::Failed(blame)) if of == op => self.not_restored(now, blame),
            (State::Imaging(of), Outcome::Imaged(is_taken)) if of == op => {
                self.picture = match (is_taken, self.is_disturbed) {
                    (true, _) => Picture::Taken,
                    (false, true) => self.without_another(),
                    (false, false) => Picture::Impossible,
                };
                self.ready(now, false);
            }
            (State::Imaging(of), Outcome::NotImagedNow) if of == op => {
                self.picture = self.without_another();
                self.ready(now, false);
            }
            (State::Up(Up { doing: Some((of, _)), .. }), Outcome::Stuck) if of == op => self.end(),
            (State::Up(up), Outcome::Imaged(_) | Outcome::NotImagedNow)
                if up.doing == Some((op, Doing::Image)) =>
            {
                self.imaged_at_rest(now, up, outcome);
            }
            (State::Up(mut up), Outcome::Rests(tier)) if up.doing.is_some_and(|(of, _)| of == op) => {
                let was_up = matches!(up.doing, Some((_, Doing::Up)));
                (up.doing, up.tier) = (None, tier);
                self.state = State::Up(up);
                match (was_up, tier) {
                    (true, Tier::Running) => self.answer_all(Ok(self.run)),
                    (true, _) => self.end(),
                    (false, _) => {}
                }
            }
            (State::Ending(of), Outcome::Ended) if of == op => self.ended(),
            // Of what was given up.
            _ => {}
        }
    }

    fn ready(&mut self, now: Instant, is_restored: bool) {
        self.retake = false;
        self.idle_since = now;
        let tier = Tier::Running;
        self.state = State::Up(Up { since: now, is_restored, tier, tried: tier, doing: None });
        self.effect(Effect::Release(true));
        self.answer_all(Ok(self.run));
    }

    /// What there is where no image was taken just now.
    fn without_another(&self) -> Picture {
        if self.picture == Picture::Aged { Picture::Taken } else { Picture::None }
    }

    fn not_started(&mut self, now: Instant, blame: Blame) {
        if std::mem::take(&mut self.retake) && self.picture == Picture::Aged {
            return self.not_renewed(now);
        }
        if blame == Blame::Program && !self.is_disturbed {
            self.failures.not_started(now);
        }
        self.not_unasked_before = now + BACKOFF_FIRST;
        self.state = State::Off;
        self.effect(Effect::Release(false));
        self.answer_all(Err(Refusal::Failed));
    }

    /// What was to have another image taken of it did not start: it still has the one before.
    fn not_renewed(&mut self, now: Instant) {
        if self.is_wanted() {
            return self.begin(now);
        }
        self.state = State::Off;
        self.effect(Effect::Release(false));
    }

    /// The same ones get a start instead, in the same turn.
    fn not_restored(&mut self, now: Instant, blame: Blame) {
        if blame == Blame::Program && !self.is_disturbed {
            self.quarantine(Reason::NotRestored);
        }
        if self.is_wanted() {
            let op = self.op();
            self.run = Run(self.run.0.wrapping_add(1));
            self.idle_since = now;
            self.state = State::Booting(op);
            self.effect(Effect::Boot(op, self.run));
        } else {
            self.state = State::Off;
            self.effect(Effect::Release(false));
        }
    }

    fn quarantine(&mut self, reason: Reason) {
        if self.can_restore() {
            self.bad_images += u32::from(reason != Reason::Asked);
            self.picture = match self.bad_images >= BAD_IMAGES_MAX {
                true => Picture::Impossible,
                false => Picture::None,
            };
            self.effect(Effect::Quarantine(reason));
        }
    }

    // === Resting ===

    fn alarm(&mut self, now: Instant) {
        match self.state {
            _ if self.fenced_since.is_some() => self.give_up_if_held(now),
            State::Off if self.is_kept() && self.deadline().is_some_and(|due| due <= now) => self.queue(),
            State::Up(up) if up.doing.is_none() && self.is_idle() => {
                let idle = Idle { since: self.idle_since, now };
                let has_image = self.can_rest_as_image();
                let next = self.terms.next(idle, up.tried, has_image, &self.habit, &self.costs);
                if let Some((to, _)) = next.filter(|(_, due)| *due <= now) {
                    // Nobody waits for it now.
                    let is_aged = self.picture == Picture::Aged && !self.terms.image_at_rest;
                    self.retake = to == Tier::Image && is_aged && self.may_run();
                    self.go_down(up, to);
                }
            }
            _ => {}
        }
    }

    fn pressure(&mut self, now: Instant) {
        let State::Up(up) = self.state else { return };
        let is_long = now.saturating_duration_since(self.idle_since) >= PRESSED_AFTER;
        if up.doing.is_none()
            && self.may_run()
            && self.is_idle()
            && is_long
            && let Some(to) = self.terms.pressed(up.tried, self.can_rest_as_image(), &self.costs, now)
        {
            self.go_down(up, to);
        }
    }

    fn rest_as_asked(&mut self, to: Tier) {
        if self.fits(Event::Rest(to)).is_err() {
            return;
        }
        let State::Up(up) = self.state else { return };
        // Without an image there is nothing between memory and a cold start.
        let to = if to == Tier::Image && !self.can_rest_as_image() { Tier::Cold } else { to };
        if to < up.tier {
            self.go_down(up, to);
        }
    }

    fn go_down(&mut self, mut up: Up, to: Tier) {
        if self.is_imaged_before(to) {
            return self.take_at_rest(up);
        }
        if !to.has_process() {
            return self.end();
        }
        let op = self.op();
        (up.doing, up.tried) = (Some((op, Doing::Down)), to);
        self.state = State::Up(up);
        self.effect(Effect::Rest(op, up.tier, to));
    }

    // === Ending ===

    /// Ends its processes, whatever is being done to them.
    fn end(&mut self) {
        match self.state {
            State::Off | State::Ending(_) => {}
            State::Queued => {
                self.effect(Effect::Unqueue);
                self.state = State::Off;
            }
            State::Booting(_) | State::Restoring(_) | State::Imaging(_) => {
                self.effect(Effect::Release(false));
                self.end_processes();
            }
            State::Up(_) => self.end_processes(),
        }
    }

    fn end_processes(&mut self) {
        let op = self.op();
        self.users = 0;
        self.state = State::Ending(op);
        // Who is given notice runs for a moment more.
        self.effect(if self.may_run() { Effect::End(op) } else { Effect::Kill(op) });
    }

    fn ended(&mut self) {
        self.state = State::Off;
        if self.closing {
            self.effect(Effect::Closed);
        } else if !self.waiters.is_empty() || (self.retake && self.barred().is_none()) {
            self.queue();
        }
    }

    fn died(&mut self, now: Instant, run: Run) {
        if run != self.run {
            return;
        }
        let ran = match self.state {
            State::Up(up) => {
                let ran = now.saturating_duration_since(up.since);
                if up.is_restored && ran < PROOF {
                    self.quarantine(Reason::DiedSoon(ran));
                }
                ran
            }
            // Taking its image may be what it does not survive: those who wait get it without.
            State::Imaging(_) => {
                self.picture = Picture::Impossible;
                self.effect(Effect::Release(false));
                Duration::ZERO
            }
            _ => return,
        };
        self.retake = false;
        self.failures.ended(now, ran);
        (self.users, self.state, self.idle_since) = (0, State::Off, now);
        if self.waiters.is_empty() {
            return;
        }
        match self.failures.left(now) {
            Some(left) => {
                self.answer_all(Err(Refusal::Backoff { failures: self.failures.count, left }));
            }
            None => self.queue(),
        }
    }

    // === The operator ===

    fn stop(&mut self, why: Refusal) {
        self.answer_all(Err(why));
        self.retake = false;
        self.end();
    }

    fn take_anew(&mut self) {
        if self.fits(Event::Retake).is_err() {
            return;
        }
        self.quarantine(Reason::Asked);
        (self.retake, self.bad_images, self.picture) = (true, 0, Picture::None);
        self.failures = Failures::default();
        match self.state {
            State::Off => self.queue(),
            _ => self.end(),
        }
    }

    fn restart(&mut self) {
        self.quarantine(Reason::Asked);
        (self.bad_images, self.picture) = (0, Picture::None);
        self.failures = Failures::default();
        if !matches!(self.state, State::Off | State::Queued | State::Ending(_)) {
            // What ran runs again, whether or not somebody waits.
            self.retake = self.barred().is_none();
            self.end();
        }
    }

    fn renew(&mut self, terms: Terms) {
        self.terms = terms;
        self.picture = Picture::Unknown;
        (self.bad_images, self.failures, self.habit) = (0, Failures::default(), Habit::default());
        self.costs.own = Costs::default();
        // One that waits for its turn has begun nothing of the old record.
        if self.state != State::Queued {
            self.end();
        }
    }

    fn set_terms(&mut self, terms: Terms) {
        self.terms = terms;
        if self.state == State::Queued && !self.is_wanted() {
            self.end();
        }
    }
}

#[cfg(test)]
mod tests;
