//! A branch: the directories above the leaves of one place, and the leaves that are free there.
//!
//! Not here: which places there are (`place`), the leaves in use (`leaf`).

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::Shared;
use super::controllers::Controllers;
use super::dir::Dir;
use super::leaf::{Body, Leaf};
use super::place::Place;

/// Free leaves kept for one place. As many requests at once get a cell there without making a directory.
const FREE_PER_BRANCH_MAX: usize = 64;

/// Where a process goes in one hierarchy.
#[derive(Debug, Clone)]
pub enum Join {
    /// Into a leaf beneath this.
    Leaf(Arc<Dir>),
    /// Into a directory it shares with other requests.
    Dir(Arc<Dir>),
    /// Nowhere.
    Out,
}

#[derive(Debug)]
pub struct Branch {
    pub place: Place,
    path: String,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    free: Vec<Body>,
    /// False: a named cell of it was dropped, so what comes back is removed.
    is_kept: bool,
    live: HashMap<u64, Weak<Leaf>>,
    used: Instant,
    /// Where requests go that limit these controllers, as long as no limit above has changed.
    joins: Vec<(u64, Controllers, Arc<[Join]>)>,
}

impl Branch {
    pub fn new(place: Place) -> Self {
        let path = place.path();
        let state = State {
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

    /// A free leaf.
    pub fn take(&self, shared: &Shared) -> Option<Body> {
        let mut state = self.state.lock();
        (state.used, state.is_kept) = (Instant::now(), true);
        let body = state.free.pop();
        if body.is_some() {
            shared.free.fetch_sub(1, Ordering::Relaxed);
        }
        body
    }

    pub fn give_back(&self, mut body: Body, shared: &Shared) {
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

    /// Removes the free leaves; those in use are removed when they come back, unless one is taken before.
    pub fn discard(&self, shared: &Shared) {
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

    /// Since when nothing runs in it. None: something does.
    pub fn idle_since(self: &Arc<Self>) -> Option<Instant> {
        let state = self.state.lock();
        (state.live.is_empty() && Arc::strong_count(self) == 1).then_some(state.used)
    }

    pub fn joins(&self, generation: u64, leaf: Controllers) -> Option<Arc<[Join]>> {
        let state = self.state.lock();
        let found = state.joins.iter().find(|(of, limits, _)| (*of, *limits) == (generation, leaf));
        found.map(|(.., joins)| Arc::clone(joins))
    }

    pub fn keep_joins(&self, generation: u64, leaf: Controllers, joins: &Arc<[Join]>) {
        let mut state = self.state.lock();
        state.joins.retain(|(of, ..)| *of == generation);
        state.joins.push((generation, leaf, Arc::clone(joins)));
    }
}
