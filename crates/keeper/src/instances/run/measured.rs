//! Measures the cost of each tier: the time of wakes until a waiter is served, and the memory held.
//!
//! After a wake from quiet and frozen, nothing is missing. A wake from swap, from an image or by a
//! start is different. There the instance reads memory and files as it touches them. So there the
//! time until the first response begins counts, too. Not here: the means (`costs`), the decisions
//! (`policy`), stages of one wake (`wake_timeline`).

use std::time::{Duration, Instant};

use nagaya_records::instance::{Tier, WakeStage};

use crate::instances::decide::lifecycle::LifecycleEvent;
use crate::instances::run::usage::measure_exactly;
use crate::instances::state::instance::SiteInstance;
use crate::instances::state::shared::NodeInstances;
use crate::instances::state::wake_stats::UnansweredWake;

/// A response that takes longer is due to the request's own work.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// Minimum time between two counts of one instance at one tier. The kernel walks through all memory
/// to count it.
const COUNT_INTERVAL: Duration = Duration::from_secs(600);

/// It runs again, after these stages of a wake from this tier. Returns what its lifecycle is to be
/// told.
pub fn note_wake(
    instances: &NodeInstances,
    instance: &SiteInstance,
    from: Tier,
    stages: &[(WakeStage, Duration)],
    now: Instant,
) -> Option<LifecycleEvent> {
    // Belongs to a run that has ended.
    instance.wake.set_unanswered(None);
    let from = really_from(from, stages)?;
    // Neither others' wakes nor an image that is taken once are costs of a wake.
    let own = stages.iter().filter(|(stage, _)| !matches!(stage, WakeStage::Queue | WakeStage::Image));
    let took = own.map(|(_, took)| *took).sum();
    if from >= Tier::Frozen {
        return Some(note_return(instances, from, took, now));
    }
    if instance.life.borrow().users() > 0 {
        instance.wake.set_unanswered(Some(UnansweredWake { from, took, since: now }));
    }
    None
}

/// Its first answer since its wake has begun. Returns what its lifecycle is to be told.
pub fn note_first_answer(
    instances: &NodeInstances,
    instance: &SiteInstance,
    now: Instant,
) -> Option<LifecycleEvent> {
    let UnansweredWake { from, took, since } = instance.wake.take_unanswered()?;
    let answer = now.saturating_duration_since(since).min(ANSWER_MAX);
    Some(note_return(instances, from, took + answer, now))
}

fn note_return(instances: &NodeInstances, from: Tier, took: Duration, now: Instant) -> LifecycleEvent {
    let mut costs = instances.costs.get();
    costs.returned(from, took, now);
    instances.costs.set(costs);
    LifecycleEvent::Returned(from, took)
}

/// It has come down to a tier: counts the memory it holds there, if that is not known. Returns what
/// its lifecycle is to be told.
pub async fn count_memory(
    instances: &NodeInstances,
    instance: &SiteInstance,
    tier: Tier,
) -> Option<LifecycleEvent> {
    let is_known = instance.life.borrow().costs().own.is_counted(tier, Instant::now(), COUNT_INTERVAL);
    let leaf = instance.leaf().filter(|_| !is_known && instance.is_at(tier))?;
    // If there is too much work now, another step counts it.
    let used = instances.context.on_worker(move || Ok(measure_exactly(&leaf))).await.ok()?;
    note_memory(instances, instance, tier, used.memory_bytes)
}

/// So much was counted while it was at this tier, where it should still be. Returns what its
/// lifecycle is to be told.
pub fn note_memory(
    instances: &NodeInstances,
    instance: &SiteInstance,
    tier: Tier,
    bytes: u64,
) -> Option<LifecycleEvent> {
    if bytes == 0 || !instance.is_at(tier) {
        return None;
    }
    let mut costs = instances.costs.get();
    costs.holds(tier, bytes, Instant::now());
    instances.costs.set(costs);
    Some(LifecycleEvent::Holds(tier, bytes))
}

/// Returns the tier that it really woke from: its image may have been unknown. `None` if the
/// restore failed and it was started after all.
fn really_from(from: Tier, stages: &[(WakeStage, Duration)]) -> Option<Tier> {
    let has = |wanted| stages.iter().any(|(stage, _)| *stage == wanted);
    match (has(WakeStage::Restore), has(WakeStage::Boot)) {
        (true, true) => None,
        (true, false) => Some(Tier::Image),
        (false, true) => Some(Tier::Cold),
        (false, false) => Some(from).filter(|from| from.has_process()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_is_from_where_its_stages_say() {
        let of = |from, stages: &[WakeStage]| {
            let stages: Vec<_> = stages.iter().map(|stage| (*stage, Duration::ZERO)).collect();
            really_from(from, &stages)
        };
        assert_eq!(of(Tier::Cold, &[WakeStage::Sandbox, WakeStage::Restore]), Some(Tier::Image));
        assert_eq!(
            of(Tier::Cold, &[WakeStage::Sandbox, WakeStage::Boot, WakeStage::Image]),
            Some(Tier::Cold)
        );
        assert_eq!(of(Tier::Image, &[WakeStage::Sandbox, WakeStage::Restore, WakeStage::Boot]), None);
        assert_eq!(of(Tier::Reclaimed, &[WakeStage::Decide, WakeStage::Thaw]), Some(Tier::Reclaimed));
        assert_eq!(of(Tier::Cold, &[WakeStage::Decide]), None);
    }
}
