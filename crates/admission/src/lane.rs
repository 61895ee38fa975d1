//! One lane: its limits, its running and waiting requests, and its part of the lanes around it.
//!
//! Not here: how lanes act together (`machine::tree`), and what a lane has learned (`predict`).

use std::collections::{BTreeSet, HashMap};

use slab::Slab;

use crate::bound::AdaptiveLimit;
use crate::fair::{FairShare, LaneFlow};
use crate::machine::wait_queue::WaitQueue;
use crate::predict::{ClassSlot, LaneStats};
use crate::{LaneCounts, LaneLimits, LaneName, Moment, RunLimit};

/// Weight of a lane's own queue against the lanes inside it. It equals their default.
pub(crate) const OWN_WEIGHT: u32 = 100;

/// Denotes a lane's own queue among its flows.
pub(crate) const OWN_LINE: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) generation: u32,
    pub(crate) name: LaneName,
    pub(crate) around: Option<u32>,
    pub(crate) inner: HashMap<LaneName, u32>,
    /// It was removed, and exists only until its running requests have ended.
    pub(crate) is_gone: bool,

    pub(crate) bounds: LaneLimits,
    /// Number of requests that may run now.
    pub(crate) run: u32,
    pub(crate) auto: Option<Box<AdaptiveLimit>>,

    /// Permits in use here and in the lanes inside, lent ones included.
    pub(crate) running: u32,
    /// Those of `running` that were offered to this lane itself, with their start times.
    pub(crate) own: Slab<(ClassSlot, Moment)>,
    pub(crate) lent: u32,
    /// The lanes inside, and this one, that have lent permits out and were not asked to return them
    /// yet.
    pub(crate) lending: BTreeSet<u32>,

    pub(crate) line: WaitQueue,
    /// Requests in the own queue that came with a ticket.
    pub(crate) holders: u32,
    /// Bytes held for requests in the own queue.
    pub(crate) bytes: u64,
    /// Requests in the queues of this lane and of those inside.
    pub(crate) waiting_within: u32,
    pub(crate) queued_since: Option<Moment>,

    /// Fair choice among the own queue and the lanes inside.
    pub(crate) fair: FairShare,
    pub(crate) own_flow: LaneFlow,
    /// This lane among those inside the lane around it.
    pub(crate) flow: LaneFlow,

    pub(crate) learned: LaneStats,
    pub(crate) counts: LaneCounts,
}

impl Lane {
    pub(crate) fn new(generation: u32, name: LaneName, around: Option<u32>, bounds: LaneLimits) -> Self {
        let mut lane = Self {
            generation,
            name,
            around,
            inner: HashMap::new(),
            is_gone: false,
            run: 0,
            auto: None,
            running: 0,
            own: Slab::new(),
            lent: 0,
            lending: BTreeSet::new(),
            line: WaitQueue::default(),
            holders: 0,
            bytes: 0,
            waiting_within: 0,
            queued_since: None,
            fair: FairShare::default(),
            own_flow: LaneFlow::default(),
            flow: LaneFlow::default(),
            learned: LaneStats::default(),
            counts: LaneCounts::default(),
            bounds,
        };
        lane.take_run();
        lane
    }

    /// Sets new limits. Waiting requests stay in the queue, and running ones continue, even if they
    /// are too many now.
    pub(crate) fn set(&mut self, bounds: LaneLimits) {
        self.bounds = bounds;
        self.take_run();
    }

    fn take_run(&mut self) {
        match self.bounds.run {
            RunLimit::Fixed(run) => {
                self.auto = None;
                self.run = run;
            }
            RunLimit::Auto { min, max } => {
                let auto = self.auto.get_or_insert_with(|| Box::new(AdaptiveLimit::new(min, max)));
                auto.set(min, max);
                self.run = auto.run();
            }
        }
    }

    /// Returns how many requests run that were offered to this lane itself.
    pub(crate) fn running_own(&self) -> u32 {
        u32::try_from(self.own.len()).unwrap_or(u32::MAX)
    }

    /// Accounts for the time in the queue. Must be called before a change to the queue, or to the
    /// running requests while there is a queue.
    pub(crate) fn pass_time_in_line(&mut self, now: Moment) {
        self.learned.pass_time_in_line(now, self.running_own());
    }

    pub(crate) fn is_full(&self) -> bool {
        self.running >= self.run
    }

    /// Returns whether a request in here can go, as far as this lane is concerned.
    pub(crate) fn is_ready(&self) -> bool {
        !self.is_gone && !self.is_full() && !self.fair.is_empty()
    }
}
