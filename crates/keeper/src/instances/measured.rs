//! Measuring what each tier costs: how long wakes take until whoever waited is served, and how much memory is held.
//!
//! From quiet and frozen nothing is missing once it runs again. What comes back from swap, from its image or by a start reads
//! memory and files as it touches them, so there the time until the first answer begins counts too. Not here: the means
//! (`costs`), what follows from them (`policy`), stages of one wake (`ledger`).

use std::rc::Rc;
use std::time::{Duration, Instant};

use nagaya_cmdb::instance::{Stage, Tier};

use super::costs::{Costs, Known};
use super::lifecycle::Event;
use super::show::used_exactly;
use super::{Instance, Instances};
use crate::engine::Engine;

/// What an answer takes longer is the request's own work.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// The kernel goes through all memory to count it, so it is asked no more often than this for one instance at one tier.
const COUNT_INTERVAL: Duration = Duration::from_secs(600);

/// A wake that is over but for its first answer.
#[derive(Debug, Clone, Copy)]
pub struct Back {
    from: Tier,
    took: Duration,
    since: Instant,
}

impl Instances {
    /// What has been measured of all instances.
    pub fn costs(&self) -> Costs {
        self.costs.get()
    }

    /// It runs again, after these stages of a wake from this tier.
    pub(super) fn came_back(
        &self,
        engine: &Rc<Engine>,
        instance: &Rc<Instance>,
        from: Tier,
        stages: &[(Stage, Duration)],
        now: Instant,
    ) {
        // That of a run that has ended.
        instance.back.take();
        let Some(from) = really_from(from, stages) else { return };
        // Neither others' wakes nor an image that is taken once are costs of coming back.
        let own = stages.iter().filter(|(stage, _)| !matches!(stage, Stage::Queue | Stage::Image));
        let took = own.map(|(_, took)| *took).sum();
        if from >= Tier::Frozen {
            self.returned(engine, instance, from, took, now);
        } else if instance.life.borrow().users() > 0 {
            instance.back.set(Some(Back { from, took, since: now }));
        }
    }

    /// Its first answer since then has begun.
    pub(super) fn first_answer(&self, engine: &Rc<Engine>, instance: &Rc<Instance>, now: Instant) {
        if let Some(Back { from, took, since }) = instance.back.take() {
            let answer = now.saturating_duration_since(since).min(ANSWER_MAX);
            self.returned(engine, instance, from, took + answer, now);
        }
    }

    fn returned(
        &self,
        engine: &Rc<Engine>,
        instance: &Rc<Instance>,
        from: Tier,
        took: Duration,
        now: Instant,
    ) {
        let mut costs = self.costs.get();
        costs.returned(from, took, now);
        self.costs.set(costs);
        self.tell(engine, instance, Event::Returned(from, took));
    }

    /// It has come down to a tier: counts the memory it holds there, if that is not known.
    pub(super) async fn count_memory(&self, engine: &Rc<Engine>, instance: &Rc<Instance>, tier: Tier) {
        let is_known = instance.life.borrow().costs().own.is_counted(tier, Instant::now(), COUNT_INTERVAL);
        let Some(leaf) = instance.leaf().filter(|_| !is_known && instance.is_at(tier)) else { return };
        // Too much to do just now: another time.
        if let Ok(used) = engine.on_worker(move || Ok(used_exactly(&leaf))).await {
            self.holds(engine, instance, tier, used.memory_bytes);
        }
    }

    /// So much was counted while it was at this tier, where it should still be.
    pub(super) fn holds(&self, engine: &Rc<Engine>, instance: &Rc<Instance>, tier: Tier, bytes: u64) {
        if bytes == 0 || !instance.is_at(tier) {
            return;
        }
        let mut costs = self.costs.get();
        costs.holds(tier, bytes, Instant::now());
        self.costs.set(costs);
        self.tell(engine, instance, Event::Holds(tier, bytes));
    }
}

impl Instance {
    /// It is there, and nothing is being done to it.
    fn is_at(&self, tier: Tier) -> bool {
        let life = self.life.borrow();
        life.tier() == tier && life.doing().is_none()
    }
}

/// What the node knows, as one that has measured nothing itself would see it.
pub fn of_node(costs: Costs) -> Known {
    Known { own: Costs::default(), node: costs }
}

/// Where it came back from: nobody may have known that it had an image. None: from its image, and then it was started
/// after all.
fn really_from(from: Tier, stages: &[(Stage, Duration)]) -> Option<Tier> {
    let has = |wanted| stages.iter().any(|(stage, _)| *stage == wanted);
    match (has(Stage::Restore), has(Stage::Boot)) {
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
        let of = |from, stages: &[Stage]| {
            let stages: Vec<_> = stages.iter().map(|stage| (*stage, Duration::ZERO)).collect();
            really_from(from, &stages)
        };
        assert_eq!(of(Tier::Cold, &[Stage::Sandbox, Stage::Restore]), Some(Tier::Image));
        assert_eq!(of(Tier::Cold, &[Stage::Sandbox, Stage::Boot, Stage::Image]), Some(Tier::Cold));
        assert_eq!(of(Tier::Image, &[Stage::Sandbox, Stage::Restore, Stage::Boot]), None);
        assert_eq!(of(Tier::Reclaimed, &[Stage::Decide, Stage::Thaw]), Some(Tier::Reclaimed));
        assert_eq!(of(Tier::Cold, &[Stage::Decide]), None);
    }
}
