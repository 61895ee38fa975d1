//! What applications placed on this node have it do, measured so that planners of all nodes know it: requests a second, and wakes that
//! stand before the next one.
//!
//! A planner reads it up to a second later. Wakes that are over by then would mislead it, so only those count that a whole
//! second had: what is told is the least of several looks. What others told of theirs, this node's edge hears for its predictions. Not here: counting (`nagaya_edge`, `nagaya_keeper`), telling (`membership`),
//! what follows from it (`nagaya_placement::planner`).

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nagaya_cmdb::feed::{Down, Question};
use nagaya_cmdb::instance::Busy;

use super::super::child::Role;
use super::load::Load;
use super::membership::Membership;

const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Looks that are kept: from the first to the last of them is the second that is told of.
const LOOKS: usize = 5;

/// The last looks, the oldest first.
#[derive(Debug, Default)]
pub struct Pulse(VecDeque<(Instant, Busy)>);

impl Pulse {
    fn saw(&mut self, now: Instant, busy: Busy) {
        // With less than before an edge has begun anew, and counts from nothing.
        if self.0.back().is_some_and(|(_, last)| last.requests > busy.requests) {
            self.0.clear();
        }
        if self.0.len() >= LOOKS {
            self.0.pop_front();
        }
        self.0.push_back((now, busy));
    }

    /// Requests a second, in tenths: more is not worth telling.
    pub fn heat(&self) -> f32 {
        let Some(((from, first), (to, last))) = self.0.front().zip(self.0.back()) else { return 0.0 };
        let seconds = (*to - *from).as_secs_f64();
        // Requests of a second are far below where a double loses whole numbers.
        let rate = (last.requests - first.requests) as f64 / seconds;
        if seconds > 0.0 { ((rate * 10.0).round() / 10.0) as f32 } else { 0.0 }
    }

    /// Wakes that were under way or in line all the time.
    pub fn wakes(&self) -> u32 {
        self.0.iter().map(|(_, busy)| busy.wakes).min().unwrap_or(0)
    }
}

impl Membership {
    /// Looks for as long as this node is a member.
    pub(super) async fn feel_pulse(self: Rc<Self>) {
        let mut told = 0;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let elsewhere = self.wakes_elsewhere();
            // An edge that has begun anew knows of none, and hears of those there are with the next look.
            if (elsewhere, told) != (0, 0)
                && let Some(edge) = self.context.node.feed(Role::Edge)
            {
                edge.send(Down::Wakes { elsewhere });
            }
            told = elsewhere;
            let (edge, keeper) = tokio::join!(self.busy(Role::Edge), self.busy(Role::Keeper));
            let mut pulse = self.pulse.borrow_mut();
            match edge {
                // One that is being started anew wakes nothing.
                Some(edge) => {
                    let wakes = keeper.map_or(0, |keeper| keeper.wakes);
                    pulse.saw(Instant::now(), Busy { requests: edge.requests, wakes });
                }
                None => *pulse = Pulse::default(),
            }
        }
    }

    /// Those of the nodes that may serve, as they told last.
    fn wakes_elsewhere(&self) -> u32 {
        let others =
            self.store.presences().into_iter().filter(|one| one.node.as_str() != self.context.node.name);
        let loads = others.filter_map(|presence| serde_json::from_str::<Load>(&presence.json).ok());
        loads.filter(|load| load.serves).fold(0, |all, load| all.saturating_add(load.wakes))
    }

    async fn busy(&self, role: Role) -> Option<Busy> {
        serde_json::from_str(&self.context.node.ask(role, Question::Busy).await?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pulse(looks: &[(u64, u32)]) -> (f32, u32) {
        let (mut pulse, mut now) = (Pulse::default(), Instant::now());
        for (requests, wakes) in looks {
            pulse.saw(now, Busy { requests: *requests, wakes: *wakes });
            now += LOOK_EVERY;
        }
        (pulse.heat(), pulse.wakes())
    }

    #[test]
    fn requests_of_the_last_second_and_wakes_that_lasted_through_it_are_told() {
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
