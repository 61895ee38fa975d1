//! An idle instance that computes: its next step of rest waits.
//!
//! Not here: whether it computes (`instances::work`).

use std::time::{Duration, Instant};

use nagaya_records::instance::Tier;

use crate::instances::decide::lifecycle::{IdleSpan, Lifecycle, LifecycleEvent, LifecycleState};

/// Time between two checks of an instance that computes.
pub(super) const WORK_LOOK: Duration = Duration::from_secs(2);

/// It computed at its last check.
#[derive(Debug, Clone, Copy)]
pub(super) struct IdleWork {
    /// The idle time for which this holds.
    idle_since: Instant,
    look_at: Instant,
}

impl Lifecycle {
    /// Returns how long it may compute after its last request.
    pub fn linger(&self) -> Duration {
        self.policy.linger
    }

    /// Whether it may still compute.
    pub fn may_work(&self, now: Instant) -> bool {
        now < self.idle_since + self.policy.linger
    }

    /// Returns the tier to which this event takes an idle instance that gets CPU time now. `None`
    /// if it still gets CPU time there.
    pub fn stops_by(&self, now: Instant, event: LifecycleEvent) -> Option<Tier> {
        let LifecycleState::Up(up) = self.state else { return None };
        if up.doing.is_some()
            || !self.is_idle()
            || up.tier <= Tier::Frozen
            || self.placement.fenced_since.is_some()
        {
            return None;
        }
        let idle = IdleSpan { since: self.idle_since, now };
        let has_image = self.can_rest_as_image();
        let to = match event {
            LifecycleEvent::Alarm => {
                let next = self.policy.next(idle, up.tried, has_image, &self.arrivals, &self.costs);
                next.filter(|(_, due)| *due <= now).map(|(to, _)| to)
            }
            LifecycleEvent::Pressure => self.policy.pressed(up.tried, has_image, &self.costs, now),
            _ => None,
        };
        to.filter(|to| *to <= Tier::Frozen)
    }

    pub(super) fn works(&mut self, now: Instant) {
        self.work = Some(IdleWork { idle_since: self.idle_since, look_at: now + WORK_LOOK });
    }

    /// Returns when it is checked again, if it computed in this idle time.
    pub(super) fn work_look(&self) -> Option<Instant> {
        self.work.filter(|work| work.idle_since == self.idle_since).map(|work| work.look_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instances::decide::lifecycle::{
        IdlePolicy, LifecycleEffect, OpId, OpOutcome, RunId, WaiterId,
    };

    #[test]
    fn one_that_computes_rests_later_and_at_once_when_it_has_done() {
        let seconds = Duration::from_secs;
        let after = [None, Some(seconds(1)), None, None, None];
        let linger = seconds(10);
        let terms = IdlePolicy {
            after,
            is_said: [true; 5],
            keep: false,
            images: false,
            image_at_rest: false,
            linger,
            beside: false,
        };
        let now = Instant::now();
        let mut life = Lifecycle::new(now, terms);
        life.apply(now, LifecycleEvent::Acquire(WaiterId(1)));
        life.apply(now, LifecycleEvent::WakeSlot);
        life.apply(now, LifecycleEvent::Done(OpId(1), OpOutcome::Ready));
        assert_eq!(life.stops_by(now + seconds(5), LifecycleEvent::Alarm), None, "it is in use");
        life.apply(now, LifecycleEvent::Release(RunId(1)));
        assert_eq!(life.stops_by(now, LifecycleEvent::Alarm), None, "not yet");
        let due = now + seconds(1);
        assert_eq!(
            (life.deadline(), life.stops_by(due, LifecycleEvent::Alarm)),
            (Some(due), Some(Tier::Frozen))
        );
        assert!(life.may_work(due));
        assert_eq!(life.apply(due, LifecycleEvent::Works), []);
        assert_eq!(life.deadline(), Some(due + WORK_LOOK));
        assert!(!life.may_work(now + seconds(10)));
        let rests = life.apply(due + WORK_LOOK, LifecycleEvent::Alarm);
        assert_eq!(rests, [LifecycleEffect::Rest(OpId(2), Tier::Running, Tier::Frozen)]);
        assert_eq!(life.stops_by(due + WORK_LOOK, LifecycleEvent::Alarm), None, "it goes already");
    }
}
