//! Measures the load of placed applications for the planners of all nodes. It is requests per
//! second, and the wakes before the next one.
//!
//! A planner reads it up to a second later. Wakes that are over by then would mislead it. So only
//! wakes count that lasted a whole second: the report has the least of several samples. This node's
//! edge gets the reports of other nodes for its predictions.
//!
//! Not here: counting (`nagaya_edge`, `nagaya_keeper`), reporting (`load_publisher`), the
//! consequences (`nagaya_placement::planner`).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nagaya_records::feed::{FeedQuery, FromSupervisor};
use nagaya_records::instance::AppLoad;

use super::super::child::ProcessRole;
use super::load::NodeReport;
use super::view::ClusterView;

const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Samples that are kept: the reported second is from the first to the last of them.
const LOOKS: usize = 5;

/// The last samples, the oldest first.
#[derive(Debug, Default)]
pub struct AppLoadMeter(VecDeque<(Instant, AppLoad)>);

impl AppLoadMeter {
    fn saw(&mut self, now: Instant, busy: AppLoad) {
        // A lower count means that the edge was restarted and counts from zero.
        if self.0.back().is_some_and(|(_, last)| last.requests > busy.requests) {
            self.0.clear();
        }
        if self.0.len() >= LOOKS {
            self.0.pop_front();
        }
        self.0.push_back((now, busy));
    }

    /// Returns requests per second, in tenths: more precision is not useful.
    pub fn heat(&self) -> f32 {
        let Some(((from, first), (to, last))) = self.0.front().zip(self.0.back()) else { return 0.0 };
        let seconds = (*to - *from).as_secs_f64();
        // Requests of a second are far below where a double loses whole numbers.
        let rate = (last.requests - first.requests) as f64 / seconds;
        if seconds > 0.0 { ((rate * 10.0).round() / 10.0) as f32 } else { 0.0 }
    }

    /// Returns the wakes that were in progress or queued all the time.
    pub fn wakes(&self) -> u32 {
        self.0.iter().map(|(_, busy)| busy.wakes).min().unwrap_or(0)
    }
}

pub struct AppLoadSampler {
    view: Rc<ClusterView>,
    pulse: RefCell<AppLoadMeter>,
}

impl AppLoadSampler {
    pub fn new(view: Rc<ClusterView>) -> Self {
        Self { view, pulse: RefCell::default() }
    }

    pub fn heat(&self) -> f32 {
        self.pulse.borrow().heat()
    }

    pub fn wakes(&self) -> u32 {
        self.pulse.borrow().wakes()
    }

    /// Looks for as long as this node is a member.
    pub async fn run(self: Rc<Self>) {
        let mut told = 0;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let elsewhere = self.wakes_elsewhere();
            // A restarted edge knows of none, and gets the present ones with the next sample.
            if (elsewhere, told) != (0, 0)
                && let Some(edge) = self.view.context.node.feed(ProcessRole::Edge)
            {
                edge.send(FromSupervisor::Wakes { elsewhere });
            }
            told = elsewhere;
            let (edge, keeper) = tokio::join!(self.busy(ProcessRole::Edge), self.busy(ProcessRole::Keeper));
            let mut pulse = self.pulse.borrow_mut();
            match edge {
                // A keeper that is being restarted wakes nothing.
                Some(edge) => {
                    let wakes = keeper.map_or(0, |keeper| keeper.wakes);
                    pulse.saw(Instant::now(), AppLoad { requests: edge.requests, wakes });
                }
                None => *pulse = AppLoadMeter::default(),
            }
        }
    }

    /// Returns the wakes of nodes with a lease, as last reported.
    fn wakes_elsewhere(&self) -> u32 {
        let others = self
            .view
            .store
            .presences()
            .into_iter()
            .filter(|one| one.node.as_str() != self.view.context.node.name);
        let loads = others.filter_map(|presence| serde_json::from_str::<NodeReport>(&presence.json).ok());
        loads.filter(|load| load.serves).fold(0, |all, load| all.saturating_add(load.wakes))
    }

    async fn busy(&self, role: ProcessRole) -> Option<AppLoad> {
        serde_json::from_str(&self.view.context.node.query_process(role, FeedQuery::Busy).await?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pulse(looks: &[(u64, u32)]) -> (f32, u32) {
        let mut pulse = AppLoadMeter::default();
        let mut now = Instant::now();
        for (requests, wakes) in looks {
            pulse.saw(now, AppLoad { requests: *requests, wakes: *wakes });
            now += LOOK_EVERY;
        }
        (pulse.heat(), pulse.wakes())
    }

    #[test]
    fn requests_of_a_second_and_lasting_wakes_are_measured() {
        for (looks, told) in [
            (&[][..], (0.0, 0)),
            (&[(900, 3)], (0.0, 3)),
            (&[(0, 0), (10, 0)], (40.0, 0)),
            (&[(0, 9), (10, 9), (20, 2), (30, 7), (41, 9)], (41.0, 2)),
            // What was before that second is forgotten.
            (&[(0, 0), (500, 4), (500, 4), (500, 5), (501, 4), (502, 4)], (2.0, 4)),
            // An edge has begun anew.
            (&[(5000, 1), (5100, 1), (0, 1), (5, 2)], (20.0, 1)),
        ] {
            assert_eq!(pulse(looks), told, "{looks:?}");
        }
    }
}
