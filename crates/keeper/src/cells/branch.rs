//! A branch: the directories above the leaves of one cell path, and the free leaves there.
//!
//! Not here: which places there are (`cell_path`), the leaves in use (`leaf`).

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use crate::cells::cell_path::CellPath;

use super::controllers::ControllerSet;
use super::dir::CgroupDir;
use super::leaf::Leaf;
use super::leaf_dirs::LeafDirs;
use super::tree::CellTree;

/// Maximum number of free leaves for one cell path. As many requests at once get a cell there
/// without making a directory.
const FREE_PER_BRANCH_MAX: usize = 64;

/// Where a process goes in one hierarchy.
#[derive(Debug, Clone)]
pub enum JoinTarget {
    /// Into a leaf below this.
    Leaf(Arc<CgroupDir>),
    /// Into a directory it shares with other requests.
    Dir(Arc<CgroupDir>),
    /// Nowhere.
    Out,
}

#[derive(Debug)]
pub struct CellBranch {
    pub place: CellPath,
    path: String,
    state: Mutex<BranchState>,
}

#[derive(Debug)]
struct BranchState {
    free: Vec<LeafDirs>,
    /// False if a named cell of it was dropped: returned leaves are removed.
    is_kept: bool,
    live: HashMap<u64, Weak<Leaf>>,
    used: Instant,
    /// Directories for requests that limit these controllers, while no limit above has changed.
    joins: Vec<(u64, ControllerSet, Arc<[JoinTarget]>)>,
}

impl CellBranch {
    pub fn new(place: CellPath) -> Self {
        let path = place.path();
        let state = BranchState {
            free: Vec::new(),
            is_kept: true,
            live: HashMap::new(),
            used: Instant::now(),
            joins: Vec::new(),
        };
        Self { place, path, state: Mutex::new(state) }
    }

    pub fn path(&self) -> &str {
        &self.path
    }

    /// Takes a free leaf.
    pub fn take(&self, shared: &CellTree) -> Option<LeafDirs> {
        let mut state = self.state.lock();
        (state.used, state.is_kept) = (Instant::now(), true);
        let body = state.free.pop();
        if body.is_some() {
            shared.free.fetch_sub(1, Ordering::Relaxed);
        }
        body
    }

    pub fn give_back(&self, mut body: LeafDirs, shared: &CellTree) {
        let mut state = self.state.lock();
        state.live.remove(&body.number);
        state.used = Instant::now();
        let has_room =
            state.free.len() < FREE_PER_BRANCH_MAX && shared.free.load(Ordering::Relaxed) < shared.free_max;
        if has_room && state.is_kept && body.renew() {
            state.free.push(body);
            shared.free.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Removes the free leaves. Those in use are removed when they come back, unless one is taken
    /// before.
    pub fn discard(&self, shared: &CellTree) {
        let mut state = self.state.lock();
        state.is_kept = false;
        shared.free.fetch_sub(state.free.len(), Ordering::Relaxed);
        state.free.clear();
    }

    pub fn lives(&self, number: u64, leaf: &Arc<Leaf>) {
        self.state.lock().live.insert(number, Arc::downgrade(leaf));
    }

    pub fn live(&self) -> Vec<Arc<Leaf>> {
        self.state.lock().live.values().filter_map(Weak::upgrade).collect()
    }

    /// Returns since when nothing runs in it. `None` if something does.
    pub fn idle_since(self: &Arc<Self>) -> Option<Instant> {
        let state = self.state.lock();
        (state.live.is_empty() && Arc::strong_count(self) == 1).then_some(state.used)
    }

    pub fn joins(&self, generation: u64, leaf: ControllerSet) -> Option<Arc<[JoinTarget]>> {
        let state = self.state.lock();
        let found = state.joins.iter().find(|(of, limits, _)| (*of, *limits) == (generation, leaf));
        found.map(|(.., joins)| Arc::clone(joins))
    }

    pub fn keep_joins(&self, generation: u64, leaf: ControllerSet, joins: &Arc<[JoinTarget]>) {
        let mut state = self.state.lock();
        state.joins.retain(|(of, ..)| *of == generation);
        state.joins.push((generation, leaf, Arc::clone(joins)));
    }
}
