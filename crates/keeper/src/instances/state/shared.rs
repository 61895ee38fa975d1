//! All instances of this node, and what they share.
//!
//! It holds state and does nothing: each part has its own type, and the tasks that use it are in
//! the rooms beside this file. Not here: one instance (`instance`), what is done with them (`run`,
//! `limits`, `images`, `admin`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::context::KeeperContext;
use crate::instances::decide::costs::TierCosts;
use crate::instances::decide::wake_priority::WakePriorities;
use crate::instances::decide::wake_queue::WakeQueue;
use crate::instances::state::command_count::CommandCount;
use crate::instances::state::deadlines::Deadlines;
use crate::instances::state::events::EventQueue;
use crate::instances::state::limit_state::LimitState;
use crate::instances::state::node_images::ImageAccess;
use crate::instances::state::placement_state::PlacementState;
use crate::instances::state::published::PublishedState;
use crate::instances::state::restart_looks::RestartLooks;
use crate::instances::state::table::InstanceTable;
use crate::instances::state::transfer_slots::ImageTransfers;
use crate::options::KeeperConfig;

/// All instances of this node.
pub struct NodeInstances {
    pub context: Rc<KeeperContext>,
    pub table: InstanceTable,
    pub events: EventQueue,
    /// Instances that wake now, and those that wait for their turn.
    pub wakes: RefCell<WakeQueue>,
    pub deadlines: Deadlines,
    pub priorities: WakePriorities,
    /// Costs of tiers, as measured by all instances of the node.
    pub costs: Cell<TierCosts>,
    pub images: ImageAccess,
    pub transfers: ImageTransfers,
    pub placement: PlacementState,
    pub limits: LimitState,
    pub published: PublishedState,
    pub restarts: RestartLooks,
    /// Number of commands that run in instances.
    pub commands: CommandCount,
}

impl NodeInstances {
    pub fn new(context: Rc<KeeperContext>) -> Rc<Self> {
        let wakes = WakeQueue::new(at_once(&context.options()));
        Rc::new(Self {
            context,
            table: InstanceTable::default(),
            events: EventQueue::default(),
            wakes: RefCell::new(wakes),
            deadlines: Deadlines::default(),
            priorities: WakePriorities::default(),
            costs: Cell::default(),
            images: ImageAccess::default(),
            transfers: ImageTransfers::default(),
            placement: PlacementState::default(),
            limits: LimitState::default(),
            published: PublishedState::new(),
            restarts: RestartLooks::default(),
            commands: CommandCount::default(),
        })
    }
}

/// How many may wake at once.
pub fn at_once(options: &KeeperConfig) -> usize {
    match options.instances.wakes_at_once {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        number => number as usize,
    }
}
