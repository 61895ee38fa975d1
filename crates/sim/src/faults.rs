//! What goes wrong, and for how long.
//!
//! Not here: what it does to messages and nodes (`world`).

use std::time::Duration;

use crate::dice::Dice;
use crate::wire::NodeId;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Which kinds of faults a world has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Faults {
    /// Between two of them: on average.
    pub every: Duration,
    /// Messages lost, in a hundred.
    pub loss: u64,
    /// The store goes away for everybody now and then.
    pub store: bool,
    /// Nodes stop, and begin anew with an old copy.
    pub crashes: bool,
    /// Operators remove sites and add others under their names.
    pub removals: bool,
}

impl Faults {
    pub const NONE: Self =
        Self { every: Duration::MAX, loss: 0, store: false, crashes: false, removals: false };
    pub const ALL: Self = Self { every: ms(150), loss: 1, store: true, crashes: true, removals: true };
}

/// One thing that goes wrong. All but a crash end by themselves.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    /// Nothing gets from the first to the second.
    CutOneWay(NodeId, NodeId),
    Cut(NodeId, NodeId),
    /// Nothing of this node's gets to other nodes, or theirs to it.
    CutOff {
        node: NodeId,
        to: bool,
        from: bool,
    },
    /// Nothing of this node's gets to the store, or the store's to it.
    CutStore {
        node: NodeId,
        to: bool,
        from: bool,
    },
    /// It does nothing; what comes for it waits.
    Pause(NodeId),
    Crash(NodeId),
    /// Its watch brings nothing, though all else works.
    Watch(NodeId),
    /// The store elects a leader, or has no quorum.
    StoreAway,
    /// Every answer of the store takes so much longer.
    SlowDisk(Duration),
}

impl Fault {
    /// A random one, and how long it lasts.
    pub fn random(dice: &mut Dice, faults: &Faults, nodes: NodeId) -> (Self, Duration) {
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
