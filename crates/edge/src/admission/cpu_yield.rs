//! Lowers the CPU priority of a tenant whose requests wait for its own limit while other tenants
//! work.
//!
//! Permits are shared fairly between tenants, CPUs are not. The running requests of a flood take
//! part of each CPU. A single request of somebody else is then at best as fast as one of many. So
//! while a tenant has a queue, its programs get less CPU time than those of tenants without one.
//! Its requests have to wait anyway, and get all the CPU time that others leave.
//!
//! The tenant must not lose its own share by that. While tenants without a queue keep less than
//! half of the CPUs busy, they take less than their fair part. So nobody loses any time: only the
//! order changes. The measure ends when they keep more than three quarters busy. Then all have
//! the same weight. The two limits differ, so that it does not begin and end again and again.
//!
//! Not here: weights and how long they hold without a renewal (`nagaya_keeper`), queues
//! (`lanes`).

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_admission::{LaneId, LaneLoad};
use nagaya_keeper_api::client::KeeperClient;
use nagaya_keeper_api::limits::{GIVE_WAY_FOR, TENANTS_MAX};
use nagaya_records::TenantName;
use tokio::time::sleep;

use crate::admission::lanes::{EdgeLane, LaneSet};

/// Interval of the check for queues, while there is one.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// A shorter queue does not count, and a shorter gap does not end one.
const LINE_FOR: Duration = Duration::from_millis(500);
const GONE_FOR: Duration = Duration::from_secs(1);

/// Interval of renewals, well before the keeper's limit.
const ASK_EVERY: Duration = Duration::from_secs(1);
const _: () = assert!(ASK_EVERY.as_millis() * 2 < GIVE_WAY_FOR.as_millis());

/// Period over which the running requests of other tenants are averaged.
const SMOOTH: Duration = Duration::from_secs(2);

/// Part of the CPUs that tenants without a queue may keep busy for the measure to begin.
/// `BUSY_END` is the part for it to go on.
const BUSY_BEGIN: f64 = 0.5;
const BUSY_END: f64 = 0.75;

/// Tenants with a queue, and those with lowered priority.
#[derive(Debug, Default)]
struct CpuYield {
    lines: HashMap<LaneId, QueueSpell>,
    /// Recent average of running requests of tenants without a queue.
    others: f64,
    looked: Option<Instant>,
}

#[derive(Debug)]
struct QueueSpell {
    since: Instant,
    /// Last time the queue existed.
    seen: Instant,
    /// Last time the measure was requested. `None` if it does not hold.
    asked: Option<Instant>,
}

/// Commands that follow from a check.
#[derive(Debug, Default, PartialEq, Eq)]
struct YieldOrders {
    give_way: Vec<LaneId>,
    resume: Vec<LaneId>,
}

impl CpuYield {
    fn look(&mut self, now: Instant, crowds: &[LaneLoad], processors: f64) -> YieldOrders {
        for crowd in crowds.iter().filter(|crowd| crowd.holds_itself) {
            self.lines.entry(crowd.lane).or_insert(QueueSpell { since: now, seen: now, asked: None }).seen =
                now;
        }
        let others = crowds.iter().filter(|crowd| !self.lines.contains_key(&crowd.lane));
        let running: u32 = others.map(|crowd| crowd.running).sum();
        self.average(now, f64::from(running));
        let gives_way = self.lines.values().any(|line| line.asked.is_some());
        let busy_most = if gives_way { BUSY_END } else { BUSY_BEGIN } * processors;
        // The measure helps only tenants without a queue. If there are none, it is not used.
        let is_fair = self.others <= busy_most && crowds.len() > self.lines.len();
        self.orders(now, is_fair)
    }

    fn average(&mut self, now: Instant, running: f64) {
        let passed = self.looked.map_or(f64::INFINITY, |looked| (now - looked).as_secs_f64());
        self.others = running + (self.others - running) * (-passed / SMOOTH.as_secs_f64()).exp();
        self.looked = Some(now);
    }

    fn orders(&mut self, now: Instant, is_fair: bool) -> YieldOrders {
        let mut orders = YieldOrders::default();
        self.lines.retain(|lane, line| {
            let is_gone = now - line.seen >= GONE_FOR;
            if line.asked.is_some() && (is_gone || !is_fair) {
                line.asked = None;
                orders.resume.push(*lane);
            }
            !is_gone
        });
        let mut room = TENANTS_MAX - self.lines.values().filter(|line| line.asked.is_some()).count();
        for (lane, line) in &mut self.lines {
            let is_due = line.asked.map_or(now - line.since >= LINE_FOR, |asked| now - asked >= ASK_EVERY);
            if is_fair && is_due && (line.asked.is_some() || room > 0) {
                room -= usize::from(line.asked.is_none());
                line.asked = Some(now);
                orders.give_way.push(*lane);
            }
        }
        orders
    }
}

/// Checks while there is a queue, and sends commands to the keeper. Runs on one thread, for all.
pub async fn keep(lanes: Arc<LaneSet>, keeper: Rc<KeeperClient>) {
    let processors = std::thread::available_parallelism().map_or(1, NonZeroUsize::get) as f64;
    let mut way = CpuYield::default();
    let mut has_failed = false;
    loop {
        if way.lines.is_empty() {
            lanes.lined.notified().await;
        }
        let (of, crowds): (Vec<Arc<EdgeLane>>, Vec<LaneLoad>) = lanes.crowds().into_iter().unzip();
        let orders = way.look(Instant::now(), &crowds, processors);
        if orders != YieldOrders::default() {
            let names = |ids: &[LaneId]| -> Vec<TenantName> {
                of.iter().filter(|lane| ids.contains(&lane.id)).filter_map(|lane| lane.tenant()).collect()
            };
            let told = keeper.give_way(names(&orders.give_way), names(&orders.resume)).await;
            let now = lanes.now();
            for lane in &of {
                if orders.resume.contains(&lane.id) || told.is_err() {
                    lane.set_giving_way(None);
                } else if orders.give_way.contains(&lane.id) && lane.gives_way_since().is_none() {
                    lane.set_giving_way(Some(now));
                }
            }
            // The next check tries again. Without the measure all have the same weight.
            if let Err(error) = &told
                && !has_failed
            {
                tracing::warn!(%error, "the CPU priority of tenants with a queue cannot be lowered");
            }
            has_failed = told.is_err();
        }
        sleep(LOOK_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use nagaya_admission::{Admission, LaneLimits, LaneName, Moment, RunLimit};

    use super::*;

    /// Lanes of three tenants: one that floods, one that does not, and one more.
    fn lanes() -> [LaneId; 3] {
        let bounds = LaneLimits {
            run: RunLimit::Fixed(1),
            wait: Duration::ZERO,
            wait_count: 0,
            wait_bytes: 0,
            next: None,
            weight: 100,
        };
        let mut machine = Admission::new(Moment(1), bounds.clone());
        let root = machine.root();
        [1, 2, 3].map(|name| machine.lane(Moment(1), root, LaneName([name; 16]), bounds.clone()))
    }

    struct Scene {
        way: CpuYield,
        now: Instant,
        crowds: [LaneLoad; 3],
    }

    impl Scene {
        fn new() -> Self {
            let crowd = |lane| LaneLoad { lane, running: 0, waiting: 0, holds_itself: false };
            Self { way: CpuYield::default(), now: Instant::now(), crowds: lanes().map(crowd) }
        }

        /// This tenant has so many running, and a line or none.
        fn set(&mut self, which: usize, running: u32, line: bool) -> &mut Self {
            let crowd = &mut self.crowds[which];
            (crowd.running, crowd.waiting, crowd.holds_itself) = (running, u32::from(line), line);
            self
        }

        /// Looks for so many milliseconds: which tenants were asked to give way, and which to resume, with when.
        fn pass(&mut self, milliseconds: u64) -> Vec<(u64, char, usize)> {
            let mut told = Vec::new();
            for at in (250..=milliseconds).step_by(250) {
                self.now += LOOK_EVERY;
                let orders = self.way.look(self.now, &self.crowds, 2.0);
                let of = |lane| self.crowds.iter().position(|crowd| crowd.lane == lane).unwrap();
                told.extend(orders.give_way.into_iter().map(|lane| (at, '-', of(lane))));
                told.extend(orders.resume.into_iter().map(|lane| (at, '+', of(lane))));
            }
            told
        }
    }

    #[test]
    fn tenant_with_a_line_gives_way_until_the_line_is_gone() {
        let mut scene = Scene::new();
        scene.set(0, 2, true).set(1, 1, false);
        let asked: Vec<_> = [750, 1_750, 2_750].map(|at| (at, '-', 0)).to_vec();
        assert_eq!(scene.pass(3_000), asked, "a line that lasts, and again each second");
        scene.set(0, 2, false);
        assert_eq!(scene.pass(500), []);
        scene.set(0, 2, true);
        assert_eq!(scene.pass(500), [(250, '-', 0)], "it had not been gone for long");
        scene.set(0, 0, false);
        assert_eq!(scene.pass(2_000), [(750, '-', 0), (1_000, '+', 0)]);
        assert!(scene.way.lines.is_empty());
    }

    #[test]
    fn nobody_gives_way_to_those_who_have_the_processors() {
        let mut scene = Scene::new();
        // Who has few permits and waits for them, because another one's hundred slow everybody down, is no flood.
        scene.set(0, 2, true).set(1, 100, false);
        assert_eq!(scene.pass(3_000), []);
        scene.set(1, 0, false);
        assert!(!scene.pass(15_000).is_empty(), "until those leave half of them");
        scene.set(1, 2, false);
        let told = scene.pass(5_000);
        assert_eq!(told.last().map(|(_, what, tenant)| (*what, *tenant)), Some(('+', 0)), "{told:?}");
    }

    #[test]
    fn where_all_have_a_line_nobody_gives_way() {
        let mut scene = Scene::new();
        scene.set(0, 2, true).set(1, 2, true).set(2, 2, true);
        assert_eq!(scene.pass(2_000), []);
        scene.set(2, 1, false);
        let asked = scene.pass(3_000);
        assert!(asked.iter().all(|(_, what, tenant)| (*what, *tenant < 2) == ('-', true)), "{asked:?}");
        assert!(asked.len() >= 4, "{asked:?}");
    }
}
