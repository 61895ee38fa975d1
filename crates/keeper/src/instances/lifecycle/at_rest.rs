//! Images of the moment at which an instance goes to rest, where its record wants that: what it has in memory comes back.
//!
//! Its image is taken each time before its processes end, and then they are killed: what they did after it would be lost, and may
//! spoil the files that the image has open. Who comes meanwhile waits for the image, and the instance stays up. Not here: taking
//! it (`driver`), images right after a start (`lifecycle`).

use std::time::Instant;

use nagaya_cmdb::instance::Tier;

use super::{Doing, Effect, Lifecycle, Outcome, Picture, State, Up};

impl Lifecycle {
    /// Its image is taken when it goes to rest.
    pub fn images_at_rest(&self) -> bool {
        self.terms.images && self.terms.image_at_rest
    }

    /// Whether it has an image, or has one by the time it needs it.
    pub(super) fn can_rest_as_image(&self) -> bool {
        self.has_image() || (self.images_at_rest() && self.picture != Picture::Impossible)
    }

    /// Whether its image is to be taken before it goes down to this tier.
    pub(super) fn is_imaged_before(&self, to: Tier) -> bool {
        to == Tier::Image && self.images_at_rest() && self.picture != Picture::Impossible && self.may_run()
    }

    pub(super) fn take_at_rest(&mut self, mut up: Up) {
        let op = self.op();
        (up.doing, up.tried) = (Some((op, Doing::Image)), Tier::Image);
        self.state = State::Up(up);
        self.effect(Effect::TakeImage(op));
    }

    /// It runs, with an image or without one.
    pub(super) fn imaged_at_rest(&mut self, now: Instant, mut up: Up, outcome: Outcome) {
        (up.doing, up.tier, up.tried) = (None, Tier::Running, Tier::Running);
        self.state = State::Up(up);
        self.picture = match outcome {
            Outcome::Imaged(true) => Picture::Taken,
            Outcome::Imaged(false) if !self.is_disturbed => Picture::Impossible,
            // The one before is of a moment that is past.
            _ => Picture::None,
        };
        if !self.waiters.is_empty() {
            self.answer_all(Ok(self.run));
        } else if self.picture == Picture::Taken {
            self.kill_processes();
        } else {
            // It is tried again when it would rest again.
            self.idle_since = now;
        }
    }

    fn kill_processes(&mut self) {
        let op = self.op();
        self.users = 0;
        self.state = State::Ending(op);
        self.effect(Effect::Kill(op));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::{Blame, Event, Op, Reason, Run, Terms, Waiter};
    use super::*;

    fn terms(image_at_rest: bool) -> Terms {
        let after = [None, None, None, Some(Duration::from_secs(1)), None];
        Terms { after, is_said: [true; 5], keep: false, images: true, image_at_rest }
    }

    /// One that was asked for, answers, and is needed by nobody since.
    fn runs_idle() -> (Lifecycle, Instant) {
        let now = Instant::now();
        let mut life = Lifecycle::new(now, terms(true));
        life.apply(now, Event::Lost);
        life.apply(now, Event::Ask(Waiter(1)));
        assert_eq!(life.apply(now, Event::Turn), [Effect::Boot(Op(1), Run(1))]);
        let answered = [Effect::Release(true), Effect::Answer(Waiter(1), Ok(Run(1)))];
        assert_eq!(life.apply(now, Event::Done(Op(1), Outcome::Ready)), answered, "no image of its start");
        life.apply(now, Event::Leave(Run(1)));
        (life, now)
    }

    #[test]
    fn its_image_is_taken_before_it_rests_and_then_it_is_killed() {
        let (mut life, now) = runs_idle();
        let now = now + Duration::from_secs(1);
        assert_eq!(life.apply(now, Event::Alarm), [Effect::TakeImage(Op(2))]);
        assert!(life.is_imaging() && !life.has_image());
        assert_eq!(life.apply(now, Event::Done(Op(2), Outcome::Imaged(true))), [Effect::Kill(Op(3))]);
        assert_eq!(life.apply(now, Event::Done(Op(3), Outcome::Ended)), []);
        assert_eq!(life.tier(), Tier::Image);
        life.apply(now, Event::Ask(Waiter(2)));
        assert_eq!(life.apply(now, Event::Turn), [Effect::Restore(Op(4), Run(2))]);
        life.apply(now, Event::Done(Op(4), Outcome::Ready));
        life.apply(now, Event::Leave(Run(2)));
        let now = now + Duration::from_secs(1);
        assert_eq!(life.apply(now, Event::Alarm), [Effect::TakeImage(Op(5))], "each time");
    }

    #[test]
    fn who_comes_while_its_image_is_taken_gets_it_as_it_is() {
        let (mut life, now) = runs_idle();
        let now = now + Duration::from_secs(1);
        life.apply(now, Event::Alarm);
        assert_eq!(life.apply(now, Event::Ask(Waiter(2))), []);
        let answered = [Effect::Answer(Waiter(2), Ok(Run(1)))];
        assert_eq!(life.apply(now, Event::Done(Op(2), Outcome::Imaged(true))), answered);
        assert_eq!((life.tier(), life.users()), (Tier::Running, 1));
    }

    #[test]
    fn one_that_cannot_be_imaged_now_goes_on_and_is_tried_when_it_would_rest_again() {
        let (mut life, now) = runs_idle();
        let now = now + Duration::from_secs(1);
        life.apply(now, Event::Alarm);
        assert_eq!(life.apply(now, Event::Done(Op(2), Outcome::NotImagedNow)), []);
        assert_eq!(life.apply(now, Event::Alarm), [], "not at once");
        let now = now + Duration::from_secs(1);
        assert_eq!(life.apply(now, Event::Alarm), [Effect::TakeImage(Op(3))]);
        assert_eq!(life.apply(now, Event::Done(Op(3), Outcome::Imaged(false))), []);
        let now = now + Duration::from_secs(5);
        assert_eq!(life.apply(now, Event::Alarm), [], "it is known that none can be taken");
        assert_eq!(life.tier(), Tier::Running);
    }

    #[test]
    fn a_restart_ends_what_runs_and_starts_it_without_its_image() {
        let (mut life, now) = runs_idle();
        let effects = life.apply(now, Event::Restart);
        assert_eq!(effects, [Effect::End(Op(2))]);
        assert_eq!(life.apply(now, Event::Done(Op(2), Outcome::Ended)), [Effect::Queue]);
        assert_eq!(life.apply(now, Event::Turn), [Effect::Boot(Op(3), Run(2))]);
        life.apply(now, Event::Done(Op(3), Outcome::Ready));
        assert_eq!(life.tier(), Tier::Running);
    }

    #[test]
    fn a_restart_of_what_rests_drops_its_image_alone() {
        let now = Instant::now();
        let mut life = Lifecycle::new(now, terms(false));
        life.apply(now, Event::Ask(Waiter(1)));
        life.apply(now, Event::Turn);
        life.apply(now, Event::Done(Op(1), Outcome::Ready));
        life.apply(now, Event::Leave(Run(1)));
        life.apply(now, Event::Stop);
        life.apply(now, Event::Done(Op(2), Outcome::Ended));
        assert_eq!(life.tier(), Tier::Image);
        assert_eq!(life.apply(now, Event::Restart), [Effect::Quarantine(Reason::Asked)]);
        assert_eq!(life.tier(), Tier::Cold);
        life.apply(now, Event::Ask(Waiter(2)));
        assert_eq!(life.apply(now, Event::Turn), [Effect::Boot(Op(3), Run(2))]);
        let failed = life.apply(now, Event::Done(Op(3), Outcome::Failed(Blame::Node)));
        assert!(failed.contains(&Effect::Release(false)), "{failed:?}");
    }
}
