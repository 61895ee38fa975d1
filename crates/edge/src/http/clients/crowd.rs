//! Groups the open connections of one thread by client network, and chooses which one is closed
//! for a newcomer.
//!
//! The network with the most connections gives up one first. Of its connections an idle one goes
//! first, the longest idle before others. Next is one whose client is slow to send. Last is one at
//! work, from a network that holds far more than the newcomer's. A pure data structure. Not here:
//! closing a connection (`connections`), limits that span threads (`clients`).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::BuildHasher as _;

use foldhash::quality::RandomState;
use tokio::time::Instant;

use crate::http::clients::network::ClientPrefix;
use crate::metrics::ConnectionPhase;

/// Maximum number of connections examined for one newcomer. The choice is exact while no network
/// has more on one thread.
const CANDIDATES_MAX: usize = 1024;

/// Factor for closing a working connection: its network must hold this many times more than the
/// newcomer's would.
const WORKING_RATIO: usize = 8;

/// The group of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConnectionGroup {
    Network(ClientPrefix),
    /// A trusted proxy's connection carries requests of many clients, so it counts by itself. The
    /// number is its own.
    Alone(u64),
}

/// Connections by number, grouped.
#[derive(Debug, Default)]
pub struct GroupedConnections {
    groups: HashMap<ConnectionGroup, HashSet<usize, RandomState>, RandomState>,
    /// Groups by size. Among those of one size the order is random, so that no address has an
    /// advantage.
    sizes: BTreeSet<(usize, u64, ConnectionGroup)>,
    order: RandomState,
}

impl GroupedConnections {
    pub fn join(&mut self, group: ConnectionGroup, connection: usize) {
        let members = self.groups.entry(group).or_default();
        let before = members.len();
        members.insert(connection);
        let after = members.len();
        self.resize(group, before, after);
    }

    pub fn leave(&mut self, group: ConnectionGroup, connection: usize) {
        let Some(members) = self.groups.get_mut(&group) else { return };
        let before = members.len();
        members.remove(&connection);
        let after = members.len();
        if after == 0 {
            self.groups.remove(&group);
        }
        self.resize(group, before, after);
    }

    fn resize(&mut self, group: ConnectionGroup, before: usize, after: usize) {
        let place = self.order.hash_one(group);
        self.sizes.remove(&(before, place, group));
        if after > 0 {
            self.sizes.insert((after, place, group));
        }
    }

    pub fn size(&self, group: ConnectionGroup) -> usize {
        self.groups.get(&group).map_or(0, HashSet::len)
    }

    /// Returns the connection to close for a newcomer of `group`, if there is one. `look` returns
    /// the phase of a connection and its start.
    pub fn choose(
        &self,
        group: ConnectionGroup,
        look: impl Fn(usize) -> (ConnectionPhase, Instant),
    ) -> Option<usize> {
        let would_hold = self.size(group) + 1;
        let mut looked = 0;
        let mut best = EvictionChoice { size: usize::MAX, chosen: None };
        let not_smaller = self.sizes.iter().rev().take_while(|(size, ..)| *size >= would_hold);
        for (size, _, other) in not_smaller {
            if best.is_found_above(*size) || looked >= CANDIDATES_MAX {
                break;
            }
            let Some(members) = self.groups.get(other) else { continue };
            for connection in members.iter().take(CANDIDATES_MAX - looked) {
                looked += 1;
                let (phase, since) = look(*connection);
                if may_close(phase, *size, would_hold) {
                    best.offer(*size, (phase, since, *connection));
                }
            }
        }
        best.chosen.map(|(_, _, connection)| connection).or_else(|| self.choose_own(group, look))
    }

    /// Handles the case that nobody holds more than the newcomer's network. Its own longest idle
    /// connection makes room.
    fn choose_own(
        &self,
        group: ConnectionGroup,
        look: impl Fn(usize) -> (ConnectionPhase, Instant),
    ) -> Option<usize> {
        let members = self.groups.get(&group)?.iter().take(CANDIDATES_MAX);
        let idle = members.filter_map(|connection| match look(*connection) {
            (ConnectionPhase::Idle, since) => Some((since, *connection)),
            _ => None,
        });
        idle.min().map(|(_, connection)| connection)
    }
}

struct EvictionChoice {
    size: usize,
    chosen: Option<(ConnectionPhase, Instant, usize)>,
}

impl EvictionChoice {
    fn offer(&mut self, size: usize, offered: (ConnectionPhase, Instant, usize)) {
        if self.chosen.is_none_or(|chosen| offered < chosen) {
            (self.size, self.chosen) = (size, Some(offered));
        }
    }

    /// Returns whether a larger network gives one up, so that smaller ones need not be examined.
    fn is_found_above(&self, size: usize) -> bool {
        self.chosen.is_some() && self.size > size
    }
}

/// Returns whether a connection of a network with `size` of them may be closed for a newcomer.
/// Its network would then hold `would_hold`.
fn may_close(phase: ConnectionPhase, size: usize, would_hold: usize) -> bool {
    match phase {
        ConnectionPhase::Idle => size >= would_hold,
        ConnectionPhase::Arriving => size > would_hold,
        ConnectionPhase::Working => size >= WORKING_RATIO * would_hold,
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn network(n: u8) -> ConnectionGroup {
        ConnectionGroup::Network(ClientPrefix::new(IpAddr::from([192, 0, 2, n]), 32, 64))
    }

    /// Connections of networks, each with what it does and for how many seconds.
    struct Scene {
        crowd: GroupedConnections,
        doing: Vec<(ConnectionPhase, Instant)>,
    }

    fn scene(connections: &[(u8, ConnectionPhase, u64)]) -> Scene {
        let now = Instant::now() + Duration::from_secs(1_000_000);
        let mut scene = Scene { crowd: GroupedConnections::default(), doing: Vec::new() };
        for (n, phase, seconds) in connections {
            scene.crowd.join(network(*n), scene.doing.len());
            scene.doing.push((*phase, now - Duration::from_secs(*seconds)));
        }
        scene
    }

    fn choose(scene: &Scene, newcomer: u8) -> Option<usize> {
        scene.crowd.choose(network(newcomer), |connection| scene.doing[connection])
    }

    use ConnectionPhase::{Arriving, Idle, Working};

    #[test]
    fn the_largest_network_gives_up_its_longest_idle() {
        let scene = scene(&[(1, Idle, 90), (2, Idle, 5), (2, Idle, 7), (2, Working, 80), (2, Arriving, 60)]);
        assert_eq!(choose(&scene, 3), Some(2));
    }

    #[test]
    fn without_idle_ones_the_slowest_sender_goes() {
        let scene = scene(&[(1, Idle, 90), (2, Arriving, 5), (2, Arriving, 7), (2, Working, 80)]);
        assert_eq!(choose(&scene, 3), Some(2));
    }

    #[test]
    fn work_is_ended_only_for_networks_that_hold_far_less() {
        let hoard = |count: usize| vec![(1, Working, 10); count];
        assert_eq!(choose(&scene(&hoard(WORKING_RATIO - 1)), 2), None);
        assert!(choose(&scene(&hoard(WORKING_RATIO)), 2).is_some());
        // The newcomer's would hold two: twice as many are needed.
        let mut with_one = hoard(2 * WORKING_RATIO - 1);
        with_one.push((2, Working, 1));
        assert_eq!(choose(&scene(&with_one), 2), None);
    }

    #[test]
    fn smaller_network_gives_up_an_idle_one_if_the_largest_works() {
        let scene = scene(&[(1, Working, 9), (1, Working, 9), (1, Working, 9), (2, Idle, 1), (2, Idle, 2)]);
        assert_eq!(choose(&scene, 3), Some(4));
    }

    #[test]
    fn largest_network_takes_from_itself() {
        let scene = scene(&[(1, Idle, 3), (1, Idle, 9), (1, Working, 90), (2, Idle, 100)]);
        assert_eq!(choose(&scene, 1), Some(1));
        let busy = [(1, Working, 3), (1, Arriving, 9), (2, Working, 5)];
        assert_eq!(choose(&self::scene(&busy), 1), None);
    }

    #[test]
    fn among_equals_only_idle_ones_go() {
        assert_eq!(choose(&scene(&[(1, Idle, 3), (2, Idle, 4), (3, Arriving, 99)]), 4), Some(1));
        assert_eq!(choose(&scene(&[(1, Arriving, 3), (2, Working, 4)]), 4), None);
    }

    #[test]
    fn a_proxys_connections_count_one_by_one() {
        let mut crowd = GroupedConnections::default();
        for n in 0..100 {
            crowd.join(ConnectionGroup::Alone(n), usize::try_from(n).unwrap());
        }
        crowd.join(network(1), 100);
        crowd.join(network(1), 101);
        let now = Instant::now();
        assert!(crowd.choose(network(2), |_| (Idle, now)).is_some_and(|chosen| chosen >= 100));
        assert_eq!(crowd.choose(ConnectionGroup::Alone(100), |_| (Working, now)), None);
    }

    proptest! {
        /// No newcomer costs a network a connection that holds fewer than the newcomer's would.
        #[test]
        fn nobody_small_pays_for_somebody_large(
            connections in proptest::collection::vec((0..6_u8, 0..3_u8, 0..100_u64), 0..60),
            newcomer in 0..6_u8,
        ) {
            let phases = [Idle, Arriving, Working];
            let connections: Vec<_> =
                connections.iter().map(|(n, phase, s)| (*n, phases[usize::from(*phase)], *s)).collect();
            let scene = scene(&connections);
            let size = |n| connections.iter().filter(|(of, ..)| *of == n).count();
            if let Some(chosen) = choose(&scene, newcomer) {
                let (of, phase, seconds) = connections[chosen];
                prop_assert!(of == newcomer || size(of) > size(newcomer));
                prop_assert!(of != newcomer || phase == Idle);
                let longer = |(n, p, s): &(u8, ConnectionPhase, u64)| *n == of && *p == phase && *s > seconds;
                prop_assert!(!connections.iter().any(longer), "a longer idle one of it stayed");
            } else {
                // There is nobody larger with an idle connection.
                let idle = |(n, p, _): &(u8, ConnectionPhase, u64)| *p == Idle && size(*n) > size(newcomer);
                prop_assert!(!connections.iter().any(idle));
            }
        }

        /// Sizes stay true however connections come and go.
        #[test]
        fn sizes_are_what_is_there(steps in proptest::collection::vec((any::<bool>(), 0..4_u8, 0..8_usize), 0..100)) {
            let mut crowd = GroupedConnections::default();
            let mut there: HashSet<(u8, usize)> = HashSet::new();
            for (joins, n, connection) in steps {
                if joins {
                    crowd.join(network(n), connection);
                    there.insert((n, connection));
                } else {
                    crowd.leave(network(n), connection);
                    there.remove(&(n, connection));
                }
                let count = |n| there.iter().filter(|(of, _)| *of == n).count();
                prop_assert!((0..4).all(|n| crowd.size(network(n)) == count(n)));
                prop_assert_eq!(crowd.sizes.len(), (0..4).filter(|n| count(*n) > 0).count());
            }
        }
    }
}
