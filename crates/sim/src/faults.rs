//! The simulated faults and their durations.
//!
//! Not here: their effect on messages and nodes (`world`).

use std::time::Duration;

use crate::dice::Dice;
use crate::wire::NodeId;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// The kinds of faults of a world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultKinds {
    /// Average time between two faults.
    pub every: Duration,
    /// Lost messages, in a hundred.
    pub loss: u64,
    /// The store fails for all occasionally.
    pub store: bool,
    /// Nodes crash, and restart with an old copy.
    pub crashes: bool,
    /// Operators remove sites and add others under their names.
    pub removals: bool,
}

impl FaultKinds {
    pub const NONE: Self =
        Self { every: Duration::MAX, loss: 0, store: false, crashes: false, removals: false };
    pub const ALL: Self = Self { every: ms(150), loss: 1, store: true, crashes: true, removals: true };
}

/// One fault. All but a crash end by themselves.
#[derive(Debug, Clone, Copy)]
pub(crate) enum InjectedFault {
    /// No message reaches the second from the first.
    CutOneWay(NodeId, NodeId),
    Cut(NodeId, NodeId),
    /// No message passes between this node and other nodes.
    CutOff {
        node: NodeId,
        to: bool,
        from: bool,
    },
    /// No message passes between this node and the store.
    CutStore {
        node: NodeId,
        to: bool,
        from: bool,
    },
    /// The node pauses; its messages wait.
    Pause(NodeId),
    Crash(NodeId),
    /// Its watch brings nothing, though all else works.
    Watch(NodeId),
    /// The store elects a leader, or has no quorum.
    StoreAway,
    /// Every reply of the store takes this much longer.
    SlowDisk(Duration),
}

impl InjectedFault {
    /// Returns a random fault and its duration.
    pub fn random(dice: &mut Dice, faults: &FaultKinds, nodes: NodeId) -> (Self, Duration) {
        let one = dice.roll(u64::from(nodes)) as NodeId;
        let other = (one + 1 + dice.roll(u64::from(nodes) - 1) as NodeId) % nodes;
        let (to, from) = [(true, true), (true, false), (false, true)][dice.index(3)];
        let fault = match dice.roll(12) {
            0 => Self::CutOneWay(one, other),
            1 => Self::Cut(one, other),
            2 => Self::CutOff { node: one, to, from },
            3 | 4 => Self::CutStore { node: one, to, from },
            5 | 6 => Self::Pause(one),
            7 if faults.crashes => Self::Crash(one),
            8 => Self::Watch(one),
            9 | 10 if faults.store => Self::StoreAway,
            _ => Self::SlowDisk(dice.between(ms(1), ms(400))),
        };
        let longest = if dice.chance(20) { ms(6000) } else { ms(900) };
        (fault, dice.between(ms(30), longest))
    }
}
