//! Restarts an instance in use: the old run continues for its users, beside the new one.
//!
//! Not here: letting them finish (`instances::beside`).

use nagaya_records::instance::Tier;

use crate::instances::decide::lifecycle::{IdlePolicy, Lifecycle, LifecycleEffect, LifecycleState, UpState};

impl Lifecycle {
    /// Whether the present run continues for its users.
    fn drains(&self) -> bool {
        let is_up =
            matches!(self.state, LifecycleState::Up(UpState { doing: None, tier: Tier::Running, .. }));
        self.policy.beside && self.users > 0 && is_up && self.may_run() && !self.placement.is_closing
    }

    /// Gives the processes up, if they may continue beside others. Returns false if they may not.
    pub(super) fn try_drain(&mut self) -> bool {
        if !self.drains() {
            return false;
        }
        self.effect(LifecycleEffect::Drain(self.users));
        (self.users, self.state) = (0, LifecycleState::Off);
        true
    }

    /// Its record has changed, and its owner is the same.
    pub(super) fn renew_beside(&mut self, terms: IdlePolicy) {
        if self.try_drain() {
            self.renew(terms);
            if !self.waiters.is_empty() {
                self.queue();
            }
        } else {
            self.renew(terms);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::instances::decide::lifecycle::{LifecycleEvent, OpId, OpOutcome, RunId, WaiterId};

    fn in_use(beside: bool) -> (Lifecycle, Instant) {
        let now = Instant::now();
        let terms = IdlePolicy {
            after: [None; 5],
            is_said: [false; 5],
            keep: false,
            images: false,
            image_at_rest: false,
            linger: Duration::ZERO,
            beside,
        };
        let mut life = Lifecycle::new(now, terms);
        life.apply(now, LifecycleEvent::Acquire(WaiterId(1)));
        life.apply(now, LifecycleEvent::WakeSlot);
        life.apply(now, LifecycleEvent::Done(OpId(1), OpOutcome::Ready));
        (life, now)
    }

    #[test]
    fn one_in_use_is_started_anew_beside_the_old_one() {
        let (mut life, now) = in_use(true);
        assert_eq!(
            life.apply(now, LifecycleEvent::Restart),
            [LifecycleEffect::Drain(1), LifecycleEffect::Queue]
        );
        assert_eq!(life.apply(now, LifecycleEvent::WakeSlot), [LifecycleEffect::Boot(OpId(2), RunId(2))]);
        assert_eq!(life.apply(now, LifecycleEvent::Release(RunId(1))), [], "that is the old one's business");
        let ready = life.apply(now, LifecycleEvent::Done(OpId(2), OpOutcome::Ready));
        assert_eq!(ready, [LifecycleEffect::FreeWakeSlot(true)]);
        life.apply(now, LifecycleEvent::Acquire(WaiterId(2)));
        assert_eq!((life.run(), life.users()), (RunId(2), 1));
    }

    #[test]
    fn a_new_record_is_served_beside_the_old_one() {
        let (mut life, now) = in_use(true);
        let terms = life.policy;
        assert_eq!(life.apply(now, LifecycleEvent::RecordChangedBeside(terms)), [LifecycleEffect::Drain(1)]);
        assert_eq!(life.apply(now, LifecycleEvent::Acquire(WaiterId(2))), [LifecycleEffect::Queue]);
    }

    #[test]
    fn one_that_nobody_uses_or_that_may_not_ends_first() {
        let (mut life, now) = in_use(false);
        assert_eq!(life.apply(now, LifecycleEvent::Restart), [LifecycleEffect::End(OpId(2))]);
        let (mut life, now) = in_use(true);
        life.apply(now, LifecycleEvent::Release(RunId(1)));
        assert_eq!(life.apply(now, LifecycleEvent::Restart), [LifecycleEffect::End(OpId(2))]);
    }
}
