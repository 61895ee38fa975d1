//! Precedence: what is being woken for somebody who waits goes first on the processor, until its first answer has begun.
//!
//! A busy node would otherwise have a visitor wait for all that others compute. How much of it a tenant may have is bounded
//! (`Allowance`), so that one whose application crashes and is woken again and again has no more than the others in the end.
//! Not here: weights (`cells`), whose turn it is to be woken (`wakes`).

use std::rc::Rc;
use std::time::{Duration, Instant};

use super::{Instance, Instances, parts};
use crate::engine::Engine;
use crate::protocol::InstanceId;

/// The longest for one wake: what starts more slowly goes on as others do.
const ONCE_MAX: Duration = Duration::from_secs(2);

/// What a tenant may have at once, and the part of the time that it gets back.
const SAVED_MAX: Duration = Duration::from_secs(10);
const PART: u32 = 10;

/// Less than this is not worth two writes.
const LEAST: Duration = Duration::from_millis(20);

/// Tenants whose use is remembered at once; those who have all of theirs need not be.
const TENANTS_MAX: usize = 4096;

/// How long a tenant's wakes may go first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowance {
    left: Duration,
    at: Instant,
}

impl Allowance {
    pub fn new(now: Instant) -> Self {
        Self { left: SAVED_MAX, at: now }
    }

    fn grow(&mut self, now: Instant) {
        let grown = now.saturating_duration_since(self.at) / PART;
        (self.left, self.at) = ((self.left + grown).min(SAVED_MAX), now);
    }

    /// So much for one wake from now on. None: it has none left.
    fn take(&mut self, now: Instant) -> Option<Duration> {
        self.grow(now);
        let granted = self.left.min(ONCE_MAX);
        if granted < LEAST {
            return None;
        }
        self.left -= granted;
        Some(granted)
    }

    /// So much of it was not needed.
    fn give_back(&mut self, rest: Duration) {
        self.left = (self.left + rest).min(SAVED_MAX);
    }
}

impl Instances {
    /// It begins to be woken: where somebody waits for that, it goes first.
    pub(super) fn go_first(&self, engine: &Engine, instance: &Instance, now: Instant) {
        if instance.goes_first_until.get().is_some_and(|until| until > now)
            || instance.life.borrow().waiting() == 0
        {
            return;
        }
        let (site, tenant) = (instance.site().name.clone(), instance.tenant().name.clone());
        let mut allowances = self.allowances.borrow_mut();
        if allowances.len() >= TENANTS_MAX {
            allowances.retain(|_, allowance| {
                allowance.grow(now);
                allowance.left < SAVED_MAX
            });
        }
        let allowance = allowances.entry(tenant.clone()).or_insert(Allowance::new(now));
        let Some(granted) = allowance.take(now) else { return };
        instance.goes_first_until.set(Some(now + granted));
        engine.precede(&site, &tenant, now + granted);
    }

    /// It does so no more.
    pub(super) fn go_as_others(&self, engine: &Engine, instance: &Instance, now: Instant) {
        let Some(until) = instance.goes_first_until.take() else { return };
        engine.cells().end_preceding(&instance.site().name);
        if let Some(allowance) = self.allowances.borrow_mut().get_mut(&instance.tenant().name) {
            allowance.give_back(until.saturating_duration_since(now));
        }
    }

    /// The first answer since its wake has begun.
    pub fn answered(&self, engine: &Rc<Engine>, id: InstanceId) {
        let (key, run) = parts(id);
        let instance = self.all.borrow().get(&key).cloned();
        if let Some(instance) = instance.filter(|instance| instance.body_of(run).is_some()) {
            let now = Instant::now();
            self.go_as_others(engine, &instance, now);
            self.first_answer(engine, &instance, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_that_is_soon_over_takes_little() {
        let now = Instant::now();
        let mut allowance = Allowance::new(now);
        for _ in 0..100 {
            assert_eq!(allowance.take(now), Some(ONCE_MAX));
            allowance.give_back(ONCE_MAX - Duration::from_millis(50));
        }
        assert_eq!(allowance.left, SAVED_MAX - Duration::from_secs(5));
    }

    #[test]
    fn who_is_woken_again_and_again_goes_first_for_a_tenth_of_the_time_at_most() {
        let start = Instant::now();
        let (mut allowance, mut now, mut had) = (Allowance::new(start), start, Duration::ZERO);
        while now < start + Duration::from_secs(3600) {
            let granted = allowance.take(now).unwrap_or_default();
            had += granted;
            now += granted.max(Duration::from_millis(50));
        }
        assert!(had <= SAVED_MAX + (now - start) / PART, "{had:?}");
        assert!(had >= (now - start) / (PART + 1), "{had:?}");
    }

    #[test]
    fn what_was_not_used_is_not_saved_for_ever() {
        let now = Instant::now();
        let mut allowance = Allowance::new(now);
        allowance.take(now);
        allowance.grow(now + Duration::from_secs(3600));
        assert_eq!(allowance.left, SAVED_MAX);
        assert_eq!(allowance.take(now), Some(ONCE_MAX), "a clock that stands still is no harm");
    }
}
