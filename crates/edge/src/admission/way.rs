//! Who gives way on the processor: a tenant whose requests stand in line for its own bound, while others are at work.
//!
//! Permits are shared fairly, and the processors beneath them are not: what a flood may run takes its part of each, and a request of
//! somebody else that comes alone is at best as fast as one of many. So as long as a tenant has a line, what runs for it gets less of
//! the processor than what runs for tenants that have none. It has to wait anyway, and gets all that the others leave.
//!
//! It must not lose what is its own by that. As long as those without a line keep less than half of the processors busy, they take less
//! than their fair part, whatever the weights are, and so does nobody lose any: only who is served *first* is decided. It ends when they
//! keep more than three quarters busy, so that it does not begin and end at one mark again and again: then all weigh the same.
//!
//! Not here: weights and how long they hold without being asked for again (`nagaya_keeper`), lines (`lanes`).

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nagaya_admission::{Crowd, LaneId};
use nagaya_cmdb::TenantName;
use nagaya_keeper::{GIVE_WAY_FOR, TENANTS_MAX};
use tokio::time::sleep;

use super::lanes::Lane;
use crate::node::Node;

/// While there is a line, this often it is looked at who has one.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// A line that is shorter-lived is none, and one that is gone for less is not gone.
const LINE_FOR: Duration = Duration::from_millis(500);
const GONE_FOR: Duration = Duration::from_secs(1);

/// It is asked for again in good time.
const ASK_EVERY: Duration = Duration::from_secs(1);
const _: () = assert!(ASK_EVERY.as_millis() * 2 < GIVE_WAY_FOR.as_millis());

/// Over this time it is averaged what the others have running.
const SMOOTH: Duration = Duration::from_secs(2);

/// Parts of the processors that those without a line may keep busy for others to begin, and to go on, giving way to them.
const BUSY_BEGIN: f64 = 0.5;
const BUSY_END: f64 = 0.75;

/// Who has a line, and who gives way.
#[derive(Debug, Default)]
struct Way {
    lines: HashMap<LaneId, Line>,
    /// Requests of tenants without a line that run, lately.
    others: f64,
    looked: Option<Instant>,
}

#[derive(Debug)]
struct Line {
    since: Instant,
    /// When it was last there.
    seen: Instant,
    /// When it was last asked for; `None`: it does not give way.
    asked: Option<Instant>,
}

/// What follows from a look.
#[derive(Debug, Default, PartialEq, Eq)]
struct Orders {
    give_way: Vec<LaneId>,
    resume: Vec<LaneId>,
}

impl Way {
    fn look(&mut self, now: Instant, crowds: &[Crowd], processors: f64) -> Orders {
        for crowd in crowds.iter().filter(|crowd| crowd.holds_itself) {
            self.lines.entry(crowd.lane).or_insert(Line { since: now, seen: now, asked: None }).seen = now;
        }
        let others = crowds.iter().filter(|crowd| !self.lines.contains_key(&crowd.lane));
        let running: u32 = others.map(|crowd| crowd.running).sum();
        self.average(now, f64::from(running));
        let gives_way = self.lines.values().any(|line| line.asked.is_some());
        let busy_most = if gives_way { BUSY_END } else { BUSY_BEGIN } * processors;
        // To nobody, or to those who have a line as well, there is no need to.
        let is_fair = self.others <= busy_most && crowds.len() > self.lines.len();
        self.orders(now, is_fair)
    }

    fn average(&mut self, now: Instant, running: f64) {
        let passed = self.looked.map_or(f64::INFINITY, |looked| (now - looked).as_secs_f64());
        self.others = running + (self.others - running) * (-passed / SMOOTH.as_secs_f64()).exp();
        self.looked = Some(now);
    }

    fn orders(&mut self, now: Instant, is_fair: bool) -> Orders {
        let mut orders = Orders::default();
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

/// Looks, as long as there is a line, and tells the keeper. Of one thread, for all.
pub async fn keep(node: Rc<Node>) {
    let processors = std::thread::available_parallelism().map_or(1, NonZeroUsize::get) as f64;
    let lanes = Arc::clone(&node.shared.lanes);
    let mut way = Way::default();
    let mut has_failed = false;
    loop {
        if way.lines.is_empty() {
            lanes.lined.notified().await;
        }
        let (of, crowds): (Vec<Arc<Lane>>, Vec<Crowd>) = lanes.crowds().into_iter().unzip();
        let orders = way.look(Instant::now(), &crowds, processors);
        if orders != Orders::default() {
            let names = |ids: &[LaneId]| -> Vec<TenantName> {
                of.iter().filter(|lane| ids.contains(&lane.id)).filter_map(|lane| lane.tenant()).collect()
            };
            let told = node.keeper().give_way(names(&orders.give_way), names(&orders.resume)).await;
            let now = lanes.now();
            for lane in &of {
                if orders.resume.contains(&lane.id) || told.is_err() {
                    lane.set_giving_way(None);
                } else if orders.give_way.contains(&lane.id) && lane.gives_way_since().is_none() {
                    lane.set_giving_way(Some(now));
                }
            }
            // It is tried again; without it all weigh the same.
            if let Err(error) = &told
                && !has_failed
            {
                tracing::warn!(%error, "tenants with a line do not give way to others on the processor");
            }
            has_failed = told.is_err();
        }
        sleep(LOOK_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use nagaya_admission::{Admission, Bounds, LaneName, Moment, Run};

    use super::*;

    /// Lanes of three tenants: one that floods, one that does not, and one more.
    fn lanes() -> [LaneId; 3] {
        let bounds = Bounds {
            run: Run::Fixed(1),
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
        way: Way,
        now: Instant,
        crowds: [Crowd; 3],
    }

    impl Scene {
        fn new() -> Self {
            let crowd = |lane| Crowd { lane, running: 0, waiting: 0, holds_itself: false };
            Self { way: Way::default(), now: Instant::now(), crowds: lanes().map(crowd) }
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
    fn who_has_a_line_gives_way_until_it_is_gone() {
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
