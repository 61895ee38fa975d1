//! The open connections of one thread by their clients' networks, and which one is closed for a newcomer.
//!
//! The network that holds the most gives up one first. Of its connections an idle one goes first, the longest idle before
//! others; then one whose client is slow to send; then, from a network that holds far more than the newcomer's, one at work.
//! A pure data structure. Not here: closing a connection (`drain`), limits that span threads (`clients`).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::BuildHasher as _;

use foldhash::quality::RandomState;
use tokio::time::Instant;

use super::Prefix;

/// Connections that are looked at for one newcomer. The choice is exact while no network has more on one thread.
const CANDIDATES_MAX: usize = 1024;

/// A connection at work is closed only if its network holds so many times what the newcomer's would.
const WORKING_RATIO: usize = 8;

/// Whose a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Group {
    Network(Prefix),
    /// A trusted proxy's connection carries anybody's requests, so it counts by itself. The number is its own.
    Alone(u64),
}

/// What a connection is doing. The first ones are closed first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Between two requests, or before the first.
    Idle,
    /// A handshake, a head or a body has begun to arrive and has not ended.
    Arriving,
    /// A request runs or is answered.
    Working,
}

impl Phase {
    pub const LABELS: &[&str] = &["idle", "arriving", "working"];
}

/// Connections by number, grouped.
#[derive(Debug, Default)]
pub struct Crowd {
    groups: HashMap<Group, HashSet<usize, RandomState>, RandomState>,
    /// Groups by size. Among those of one size the order is random, so that no address is better off.
    sizes: BTreeSet<(usize, u64, Group)>,
    order: RandomState,
}

impl Crowd {
    pub fn join(&mut self, group: Group, connection: usize) {
        let members = self.groups.entry(group).or_default();
        let before = members.len();
        members.insert(connection);
        let after = members.len();
        self.resize(group, before, after);
    }

    pub fn leave(&mut self, group: Group, connection: usize) {
        let Some(members) = self.groups.get_mut(&group) else { return };
        let before = members.len();
        members.remove(&connection);
        let after = members.len();
        if after == 0 {
            self.groups.remove(&group);
        }
        self.resize(group, before, after);
    }

    fn resize(&mut self, group: Group, before: usize, after: usize) {
        let place = self.order.hash_one(group);
        self.sizes.remove(&(before, place, group));
        if after > 0 {
            self.sizes.insert((after, place, group));
        }
    }

    pub fn size(&self, group: Group) -> usize {
        self.groups.get(&group).map_or(0, HashSet::len)
    }

    /// The connection that is closed for a newcomer of `group`, if one is. `look` says what a connection does, and since when.
    pub fn choose(&self, group: Group, look: impl Fn(usize) -> (Phase, Instant)) -> Option<usize> {
        let would_hold = self.size(group) + 1;
        let mut looked = 0;
        let mut best = Best { size: usize::MAX, chosen: None };
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

    /// Nobody holds more than the newcomer's network: its own longest idle connection makes room.
    fn choose_own(&self, group: Group, look: impl Fn(usize) -> (Phase, Instant)) -> Option<usize> {
        let members = self.groups.get(&group)?.iter().take(CANDIDATES_MAX);
        let idle = members.filter_map(|connection| match look(*connection) {
            (Phase::Idle, since) => Some((since, *connection)),
            _ => None,
        });
        idle.min().map(|(_, connection)| connection)
    }
}

struct Best {
    size: usize,
    chosen: Option<(Phase, Instant, usize)>,
}

impl Best {
    fn offer(&mut self, size: usize, offered: (Phase, Instant, usize)) {
        if self.chosen.is_none_or(|chosen| offered < chosen) {
            (self.size, self.chosen) = (size, Some(offered));
        }
    }

    /// A larger network gives one up, so that smaller ones need not be asked.
    fn is_found_above(&self, size: usize) -> bool {
        self.chosen.is_some() && self.size > size
    }
}

/// Whether a connection of a network with `size` of them may be closed for one whose network would then hold `would_hold`.
fn may_close(phase: Phase, size: usize, would_hold: usize) -> bool {
    match phase {
        Phase::Idle => size >= would_hold,
        Phase::Arriving => size > would_hold,
        Phase::Working => size >= WORKING_RATIO * would_hold,
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn network(n: u8) -> Group {
        Group::Network(Prefix::new(IpAddr::from([192, 0, 2, n]), 32, 64))
    }

    /// Connections of networks, each with what it does and for how many seconds.
    struct Scene {
        crowd: Crowd,
        doing: Vec<(Phase, Instant)>,
    }

    fn scene(connections: &[(u8, Phase, u64)]) -> Scene {
        let now = Instant::now() + Duration::from_secs(1_000_000);
        let mut scene = Scene { crowd: Crowd::default(), doing: Vec::new() };
        for (n, phase, seconds) in connections {
            scene.crowd.join(network(*n), scene.doing.len());
            scene.doing.push((*phase, now - Duration::from_secs(*seconds)));
        }
        scene
    }

    fn choose(scene: &Scene, newcomer: u8) -> Option<usize> {
        scene.crowd.choose(network(newcomer), |connection| scene.doing[connection])
    }

    use Phase::{Arriving, Idle, Working};

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
    fn a_smaller_network_gives_up_an_idle_one_where_the_largest_has_only_work() {
        let scene = scene(&[(1, Working, 9), (1, Working, 9), (1, Working, 9), (2, Idle, 1), (2, Idle, 2)]);
        assert_eq!(choose(&scene, 3), Some(4));
    }

    #[test]
    fn who_holds_the_most_takes_from_itself() {
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
        let mut crowd = Crowd::default();
        for n in 0..100 {
            crowd.join(Group::Alone(n), usize::try_from(n).unwrap());
        }
        crowd.join(network(1), 100);
        crowd.join(network(1), 101);
        let now = Instant::now();
        assert!(crowd.choose(network(2), |_| (Idle, now)).is_some_and(|chosen| chosen >= 100));
        assert_eq!(crowd.choose(Group::Alone(100), |_| (Working, now)), None);
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
                let longer = |(n, p, s): &(u8, Phase, u64)| *n == of && *p == phase && *s > seconds;
                prop_assert!(!connections.iter().any(longer), "a longer idle one of it stayed");
            } else {
                // There is nobody larger with an idle connection.
                let idle = |(n, p, _): &(u8, Phase, u64)| *p == Idle && size(*n) > size(newcomer);
                prop_assert!(!connections.iter().any(idle));
            }
        }

        /// Sizes stay true however connections come and go.
        #[test]
        fn sizes_are_what_is_there(steps in proptest::collection::vec((any::<bool>(), 0..4_u8, 0..8_usize), 0..100)) {
            let mut crowd = Crowd::default();
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
