//! How long a tenant's wakes may go first on the processor. Pure.
//!
//! A busy node would otherwise have a visitor wait for all that others compute. Each tenant has a
//! budget, so that one whose application crashes and is woken again and again has no more than the
//! others in the end. Not here: weights (`cells`), whose turn it is to be woken (`wake_queue`), who
//! gets it (`run::priority`).

use std::cell::RefCell;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use nagaya_records::TenantName;

/// Maximum time for one wake: a slower start continues without priority.
const ONCE_MAX: Duration = Duration::from_secs(2);

/// Maximum budget of a tenant, and the part of the time that it gets back.
const SAVED_MAX: Duration = Duration::from_secs(10);
const PART: u32 = 10;

/// Less than this is not worth two writes.
const LEAST: Duration = Duration::from_millis(20);

/// Maximum number of tenants whose budgets are kept. A full budget need not be kept.
const TENANTS_MAX: usize = 4096;

/// The remaining time of CPU priority for a tenant's wakes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PriorityBudget {
    left: Duration,
    at: Instant,
}

impl PriorityBudget {
    fn new(now: Instant) -> Self {
        Self { left: SAVED_MAX, at: now }
    }

    fn grow(&mut self, now: Instant) {
        let grown = now.saturating_duration_since(self.at) / PART;
        (self.left, self.at) = ((self.left + grown).min(SAVED_MAX), now);
    }

    /// Returns the time for one wake from now on. `None` if nothing is left.
    fn take(&mut self, now: Instant) -> Option<Duration> {
        self.grow(now);
        let granted = self.left.min(ONCE_MAX);
        if granted < LEAST {
            return None;
        }
        self.left -= granted;
        Some(granted)
    }

    /// Returns unused time to the budget.
    fn give_back(&mut self, rest: Duration) {
        self.left = (self.left + rest).min(SAVED_MAX);
    }
}

/// The budgets of all tenants.
#[derive(Debug, Default)]
pub struct WakePriorities {
    budgets: RefCell<HashMap<TenantName, PriorityBudget>>,
}

impl WakePriorities {
    /// Takes time for one wake of this tenant. `None` if it has none left.
    pub fn take(&self, tenant: &TenantName, now: Instant) -> Option<Duration> {
        let mut budgets = self.budgets.borrow_mut();
        if budgets.len() >= TENANTS_MAX {
            budgets.retain(|_, budget| {
                budget.grow(now);
                budget.left < SAVED_MAX
            });
        }
        budgets.entry(tenant.clone()).or_insert(PriorityBudget::new(now)).take(now)
    }

    /// Returns the time that a wake of this tenant has not needed.
    pub fn give_back(&self, tenant: &TenantName, rest: Duration) {
        if let Some(budget) = self.budgets.borrow_mut().get_mut(tenant) {
            budget.give_back(rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_that_is_soon_over_takes_little() {
        let now = Instant::now();
        let mut allowance = PriorityBudget::new(now);
        for _ in 0..100 {
            assert_eq!(allowance.take(now), Some(ONCE_MAX));
            allowance.give_back(ONCE_MAX - Duration::from_millis(50));
        }
        assert_eq!(allowance.left, SAVED_MAX - Duration::from_secs(5));
    }

    #[test]
    fn repeated_wakes_go_first_for_at_most_a_tenth_of_the_time() {
        let start = Instant::now();
        let (mut allowance, mut now, mut had) = (PriorityBudget::new(start), start, Duration::ZERO);
        while now < start + Duration::from_secs(3600) {
            let granted = allowance.take(now).unwrap_or_default();
            had += granted;
            now += granted.max(Duration::from_millis(50));
        }
        assert!(had <= SAVED_MAX + (now - start) / PART, "{had:?}");
        assert!(had >= (now - start) / (PART + 1), "{had:?}");
    }

    #[test]
    fn unused_precedence_is_saved_up_only_to_a_bound() {
        let now = Instant::now();
        let mut allowance = PriorityBudget::new(now);
        allowance.take(now);
        allowance.grow(now + Duration::from_secs(3600));
        assert_eq!(allowance.left, SAVED_MAX);
        assert_eq!(allowance.take(now), Some(ONCE_MAX), "a clock that stands still is no harm");
    }
}
