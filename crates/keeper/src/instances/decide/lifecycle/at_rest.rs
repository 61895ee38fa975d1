//! Images of the moment at which an instance goes to rest, where its record wants that. They bring
//! back its memory.
//!
//! Its image is taken each time before its processes end, and then they are killed. Anything they
//! did after the image would be lost, and could spoil the files that the image has open. A request
//! that comes meanwhile waits for the image, and the instance stays up. Not here: taking it
//! (`driver`), images right after a start (`lifecycle`).

use std::time::Instant;

use nagaya_records::instance::Tier;

use crate::instances::decide::lifecycle::{
    ImageState, Lifecycle, LifecycleEffect, LifecycleState, OngoingOp, OpOutcome, UpState,
};

impl Lifecycle {
    /// Whether its image is taken when it goes to rest.
    pub fn images_at_rest(&self) -> bool {
        self.policy.images && self.policy.image_at_rest
    }

    /// Whether it has an image, or has one by the time it needs it.
    pub(super) fn can_rest_as_image(&self) -> bool {
        self.has_image() || (self.images_at_rest() && self.image.state != ImageState::Impossible)
    }

    /// Whether its image is to be taken before it goes down to this tier.
    pub(super) fn is_imaged_before(&self, to: Tier) -> bool {
        to == Tier::Image
            && self.images_at_rest()
            && self.image.state != ImageState::Impossible
            && self.may_run()
    }

    pub(super) fn take_at_rest(&mut self, mut up: UpState) {
        let op = self.op();
        (up.doing, up.tried) = (Some((op, OngoingOp::Image)), Tier::Image);
        self.state = LifecycleState::Up(up);
        self.effect(LifecycleEffect::TakeImage(op));
    }

    /// Continues with an instance that runs, with an image or without one.
    pub(super) fn imaged_at_rest(&mut self, now: Instant, mut up: UpState, outcome: OpOutcome) {
        (up.doing, up.tier, up.tried) = (None, Tier::Running, Tier::Running);
        self.state = LifecycleState::Up(up);
        self.image.state = match outcome {
            OpOutcome::Imaged(true) => ImageState::Taken,
            OpOutcome::Imaged(false) if !self.placement.is_disturbed => ImageState::Impossible,
            // The previous image is of a moment that is past.
            _ => ImageState::None,
        };
        if !self.waiters.is_empty() {
            self.answer_all(Ok(self.run));
        } else if self.image.state == ImageState::Taken {
            self.kill_processes();
        } else {
            // It is tried again at the next rest.
            self.idle_since = now;
        }
    }

    fn kill_processes(&mut self) {
        let op = self.op();
        self.users = 0;
        self.state = LifecycleState::Ending(op);
        self.effect(LifecycleEffect::Kill(op));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::instances::decide::lifecycle::{
        DiscardReason, FailureCause, IdlePolicy, LifecycleEvent, OpId, RunId, WaiterId,
    };

    fn terms(image_at_rest: bool) -> IdlePolicy {
        let after = [None, None, None, Some(Duration::from_secs(1)), None];
        IdlePolicy {
            after,
            is_said: [true; 5],
            keep: false,
            images: true,
            image_at_rest,
            linger: Duration::ZERO,
            beside: false,
        }
    }

    /// One that was asked for, answers, and is needed by nobody since.
    fn runs_idle() -> (Lifecycle, Instant) {
        let now = Instant::now();
        let mut life = Lifecycle::new(now, terms(true));
        life.apply(now, LifecycleEvent::ImageMissing);
        life.apply(now, LifecycleEvent::Acquire(WaiterId(1)));
        assert_eq!(life.apply(now, LifecycleEvent::WakeSlot), [LifecycleEffect::Boot(OpId(1), RunId(1))]);
        let answered =
            [LifecycleEffect::FreeWakeSlot(true), LifecycleEffect::Answer(WaiterId(1), Ok(RunId(1)))];
        assert_eq!(
            life.apply(now, LifecycleEvent::Done(OpId(1), OpOutcome::Ready)),
            answered,
            "no image of its start"
        );
        life.apply(now, LifecycleEvent::Release(RunId(1)));
        (life, now)
    }

    #[test]
    fn its_image_is_taken_before_it_rests_and_then_it_is_killed() {
        let (mut life, now) = runs_idle();
        let now = now + Duration::from_secs(1);
        assert_eq!(life.apply(now, LifecycleEvent::Alarm), [LifecycleEffect::TakeImage(OpId(2))]);
        assert!(life.is_imaging() && !life.has_image());
        assert_eq!(
            life.apply(now, LifecycleEvent::Done(OpId(2), OpOutcome::Imaged(true))),
            [LifecycleEffect::Kill(OpId(3))]
        );
        assert_eq!(life.apply(now, LifecycleEvent::Done(OpId(3), OpOutcome::Ended)), []);
        assert_eq!(life.tier(), Tier::Image);
        life.apply(now, LifecycleEvent::Acquire(WaiterId(2)));
        assert_eq!(life.apply(now, LifecycleEvent::WakeSlot), [LifecycleEffect::Restore(OpId(4), RunId(2))]);
        life.apply(now, LifecycleEvent::Done(OpId(4), OpOutcome::Ready));
        life.apply(now, LifecycleEvent::Release(RunId(2)));
        let now = now + Duration::from_secs(1);
        assert_eq!(
            life.apply(now, LifecycleEvent::Alarm),
            [LifecycleEffect::TakeImage(OpId(5))],
            "each time"
        );
    }

    #[test]
    fn request_during_an_image_gets_the_running_instance() {
        let (mut life, now) = runs_idle();
        let now = now + Duration::from_secs(1);
        life.apply(now, LifecycleEvent::Alarm);
        assert_eq!(life.apply(now, LifecycleEvent::Acquire(WaiterId(2))), []);
        let answered = [LifecycleEffect::Answer(WaiterId(2), Ok(RunId(1)))];
        assert_eq!(life.apply(now, LifecycleEvent::Done(OpId(2), OpOutcome::Imaged(true))), answered);
        assert_eq!((life.tier(), life.users()), (Tier::Running, 1));
    }

    #[test]
    fn failed_image_is_tried_again_at_the_next_rest() {
        let (mut life, now) = runs_idle();
        let now = now + Duration::from_secs(1);
        life.apply(now, LifecycleEvent::Alarm);
        assert_eq!(life.apply(now, LifecycleEvent::Done(OpId(2), OpOutcome::NotImagedNow)), []);
        assert_eq!(life.apply(now, LifecycleEvent::Alarm), [], "not at once");
        let now = now + Duration::from_secs(1);
        assert_eq!(life.apply(now, LifecycleEvent::Alarm), [LifecycleEffect::TakeImage(OpId(3))]);
        assert_eq!(life.apply(now, LifecycleEvent::Done(OpId(3), OpOutcome::Imaged(false))), []);
        let now = now + Duration::from_secs(5);
        assert_eq!(life.apply(now, LifecycleEvent::Alarm), [], "it is known that none can be taken");
        assert_eq!(life.tier(), Tier::Running);
    }

    #[test]
    fn a_restart_ends_what_runs_and_starts_it_without_its_image() {
        let (mut life, now) = runs_idle();
        let effects = life.apply(now, LifecycleEvent::Restart);
        assert_eq!(effects, [LifecycleEffect::End(OpId(2))]);
        assert_eq!(
            life.apply(now, LifecycleEvent::Done(OpId(2), OpOutcome::Ended)),
            [LifecycleEffect::Queue]
        );
        assert_eq!(life.apply(now, LifecycleEvent::WakeSlot), [LifecycleEffect::Boot(OpId(3), RunId(2))]);
        life.apply(now, LifecycleEvent::Done(OpId(3), OpOutcome::Ready));
        assert_eq!(life.tier(), Tier::Running);
    }

    #[test]
    fn a_restart_of_what_rests_drops_its_image_alone() {
        let now = Instant::now();
        let mut life = Lifecycle::new(now, terms(false));
        life.apply(now, LifecycleEvent::Acquire(WaiterId(1)));
        life.apply(now, LifecycleEvent::WakeSlot);
        life.apply(now, LifecycleEvent::Done(OpId(1), OpOutcome::Ready));
        life.apply(now, LifecycleEvent::Release(RunId(1)));
        life.apply(now, LifecycleEvent::Stop);
        life.apply(now, LifecycleEvent::Done(OpId(2), OpOutcome::Ended));
        assert_eq!(life.tier(), Tier::Image);
        assert_eq!(
            life.apply(now, LifecycleEvent::Restart),
            [LifecycleEffect::Quarantine(DiscardReason::Asked)]
        );
        assert_eq!(life.tier(), Tier::Cold);
        life.apply(now, LifecycleEvent::Acquire(WaiterId(2)));
        assert_eq!(life.apply(now, LifecycleEvent::WakeSlot), [LifecycleEffect::Boot(OpId(3), RunId(2))]);
        let failed = life.apply(now, LifecycleEvent::Done(OpId(3), OpOutcome::Failed(FailureCause::Node)));
        assert!(failed.contains(&LifecycleEffect::FreeWakeSlot(false)), "{failed:?}");
    }
}
