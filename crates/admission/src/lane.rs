//! One lane: its bounds, who runs and waits in it, and what it has had of what is around it.
//!
//! Not here: how lanes act together (`machine::tree`), and what a lane has learned (`predict`).

use std::collections::{BTreeSet, HashMap};

use slab::Slab;

use crate::bound::Auto;
use crate::fair::{Fair, Flow};
use crate::machine::line::Line;
use crate::predict::{Learned, Slot};
use crate::{Bounds, Counts, LaneName, Moment, Run};

/// The weight of a lane's own line against the lanes inside it: what those have unless it is set otherwise.
pub(crate) const OWN_WEIGHT: u32 = 100;

/// Stands for a lane's own line among its flows.
pub(crate) const OWN_LINE: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) generation: u32,
    pub(crate) name: LaneName,
    pub(crate) around: Option<u32>,
    pub(crate) inner: HashMap<LaneName, u32>,
    /// It was removed, and stays only until what runs in it has ended.
    pub(crate) is_gone: bool,

    pub(crate) bounds: Bounds,
    /// What may run now.
    pub(crate) run: u32,
    pub(crate) auto: Option<Box<Auto>>,

    /// Permits in use here and in the lanes inside, lent ones too.
    pub(crate) running: u32,
    /// Of them, the requests that were offered to this lane itself, with their beginnings.
    pub(crate) own: Slab<(Slot, Moment)>,
    pub(crate) lent: u32,
    /// The lanes inside, and this one, that have lent permits out and were not asked for them yet.
    pub(crate) lending: BTreeSet<u32>,

    pub(crate) line: Line,
    /// Of those in the own line, those who came on a ticket.
    pub(crate) holders: u32,
    /// Held for those in the own line.
    pub(crate) bytes: u64,
    /// In the lines of this lane and of those inside.
    pub(crate) waiting_within: u32,
    pub(crate) queued_since: Option<Moment>,

    /// Among the own line and the lanes inside.
    pub(crate) fair: Fair,
    pub(crate) own_flow: Flow,
    /// This lane among those inside the one around it.
    pub(crate) flow: Flow,

    pub(crate) learned: Learned,
    pub(crate) counts: Counts,
}

impl Lane {
    pub(crate) fn new(generation: u32, name: LaneName, around: Option<u32>, bounds: Bounds) -> Self {
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
            line: Line::default(),
            holders: 0,
            bytes: 0,
            waiting_within: 0,
            queued_since: None,
            fair: Fair::default(),
            own_flow: Flow::default(),
            flow: Flow::default(),
            learned: Learned::default(),
            counts: Counts::default(),
            bounds,
        };
        lane.take_run();
        lane
    }

    /// New bounds. Who waits stays in line, and who runs runs on, even if there are now too many.
    pub(crate) fn set(&mut self, bounds: Bounds) {
        self.bounds = bounds;
        self.take_run();
    }

    fn take_run(&mut self) {
        match self.bounds.run {
            Run::Fixed(run) => {
                self.auto = None;
                self.run = run;
            }
            Run::Auto { min, max } => {
                let auto = self.auto.get_or_insert_with(|| Box::new(Auto::new(min, max)));
                auto.set(min, max);
                self.run = auto.run();
            }
        }
    }

    /// How many requests run that were offered to this lane itself.
    pub(crate) fn running_own(&self) -> u32 {
        u32::try_from(self.own.len()).unwrap_or(u32::MAX)
    }

    /// To be called before anything changes in a line, or in what runs while there is one.
    pub(crate) fn pass_time_in_line(&mut self, now: Moment) {
        self.learned.pass_time_in_line(now, self.running_own());
    }

    pub(crate) fn is_full(&self) -> bool {
        self.running >= self.run
    }

    /// Somebody in here can go, as far as this lane is concerned.
    pub(crate) fn is_ready(&self) -> bool {
        !self.is_gone && !self.is_full() && !self.fair.is_empty()
    }
}
