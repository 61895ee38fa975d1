//! Cells: the cgroups of requests, with their limits, their counters and their end.
//!
//! Each keeper process has one `KeeperCells`, used on its one thread. Each call takes microseconds.
//! Each usable hierarchy has a tree of cgroups (`hierarchy`). Directories for tenants, sites and
//! named cells are made on demand (`dir`, `cell_path`, `desired`). Leaves are reused (`branch`,
//! `leaf`). `docs/cells.md` describes all of it for operators. Not here: a request's confinement
//! (`records::cell`), whether it is allowed (`confinement`), the life of a process (`process`).

mod account;
mod birth;
mod branch;
mod cell_path;
pub mod codes;
mod complaints;
mod controllers;
mod cpu_demand;
mod desired;
mod device;
mod dir;
mod ending;
mod error;
mod files;
mod freezer;
mod hierarchy;
mod home;
mod leaf;
mod leaf_dirs;
mod lines;
mod memory;
mod mounts;
mod show;
mod tree;
mod usage;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use nagaya_keeper_api::limits::GIVE_WAY_FOR;
use nagaya_records::cell::{Boost, CellChange, CgroupController, Confinement, CpuQuota, LimitSet};
use nagaya_records::{RecordIndex, SiteName, TenantName};
use parking_lot::Mutex;
use rustix::process::Pid;

use crate::cells::cell_path::{CellDepth, CellLevel, CellPath, DepthFactors, LevelKind};
use crate::options::CellMechanism;

use branch::{CellBranch, JoinTarget};
use complaints::CellWarnings;
use controllers::{CgroupVersion, ControllerSet, only};
use desired::{ChangedLevels, DesiredLimits};
use device::{DeviceNumber, DiskResolver};
use dir::CgroupDir;
use files::CgroupFileError;
use hierarchy::MissingController;
use leaf_dirs::LeafDirs;
use tree::CellTree;
use usage::{CellCounters, CellMeter, CounterSource};

pub use crate::cells::cpu_demand::CpuDemand;
pub use desired::NoLimit;
pub use ending::LOOK_AGAIN_MAX;
pub use error::CellError;
pub use freezer::{FreezeFile, FrozenTree};
pub use home::CellParent;
pub use leaf::{KeptGuard, Leaf};
pub use memory::OomKills;
pub use show::CellCounts;
pub use tree::ProcessTracking;

/// Maximum number of free leaves on the whole node, unless the limit on open files allows fewer.
const FREE_MAX: usize = 4096;

/// Maximum number of open files of one leaf: about ten of v1's hierarchies or seven of v2, and set
/// limits.
const FILES_PER_LEAF: usize = 16;

/// Time that directories stay when nothing runs in them any more.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// Maximum wait for ending processes when all cells are closed, and the pause between two checks.
const CLOSE_MAX: Duration = Duration::from_secs(2);
const CLOSE_PAUSE: Duration = Duration::from_millis(10);

/// Maximum number of cell paths with directories, apart from those in which something runs.
const BRANCHES_MAX: usize = 4096;

/// Progress of work since its cells were made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuProgress {
    /// CPU time of the site's cells, microseconds. `None` if nobody counts it.
    pub cpu_us: Option<u64>,
    /// Time for which the site's own limit or the tenant's throttled it, microseconds.
    pub throttled_us: u64,
}

/// All cells of this keeper.
#[derive(Debug)]
pub struct KeeperCells {
    shared: Arc<CellTree>,
    missing: Vec<MissingController>,
    orphans: u64,
    state: Mutex<CellsState>,
}

#[derive(Debug)]
struct CellsState {
    desired: DesiredLimits,
    branches: HashMap<CellPath, Arc<CellBranch>>,
    /// The directories of each level, by hierarchy.
    dirs: HashMap<LevelKind, Vec<LevelDir>>,
    /// Raised when a limit above leaves changes.
    generation: u64,
    leaves_made: u64,
    leaves_reused: u64,
}

#[derive(Debug)]
struct LevelDir {
    hierarchy: usize,
    controllers: ControllerSet,
    dir: Weak<CgroupDir>,
}

/// The cell for a request, and its inputs.
struct CellTarget {
    branch: Arc<CellBranch>,
    joins: Arc<[JoinTarget]>,
    roots: Vec<DeviceNumber>,
}

impl KeeperCells {
    /// Determines the usable hierarchies, after removing directories of dead keepers.
    /// `processes_per_tenant` applies to tenants whose record gives no number.
    pub fn open(back_end: CellMechanism, processes_per_tenant: u32) -> Self {
        let found = hierarchy::find(back_end);
        for MissingController { controller, code, why } in &found.missing {
            let what = controller.map_or("fence", CgroupController::as_str);
            tracing::warn!("{code}: no {what} for cells: {why}");
        }
        let complaints = Arc::new(CellWarnings::default());
        let trees =
            found.hierarchies.into_iter().map(|one| CgroupDir::node(Arc::new(one), Arc::clone(&complaints)));
        let files_max = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        // A quarter for free leaves. The other files belong to leaves in use, pipes and
        // connections.
        let files_max =
            files_max.map_or(usize::MAX, |files| usize::try_from(files).unwrap_or(usize::MAX)) / 4;
        let shared = CellTree {
            trees: trees.collect(),
            freezer: found.freezer,
            disks: DiskResolver::new(),
            complaints,
            free: AtomicUsize::new(0),
            free_max: FREE_MAX.min(files_max / FILES_PER_LEAF),
        };
        shared.count_disks();
        let state = CellsState {
            desired: DesiredLimits::new(processes_per_tenant),
            branches: HashMap::new(),
            dirs: HashMap::new(),
            generation: 0,
            leaves_made: 0,
            leaves_reused: 0,
        };
        Self {
            shared: Arc::new(shared),
            missing: found.missing,
            orphans: found.orphans,
            state: Mutex::new(state),
        }
    }

    /// Returns the mechanism that keeps a tree together.
    pub fn fence(&self) -> ProcessTracking {
        let fence = self.shared.trees.iter().find(|tree| tree.hierarchy.is_fence);
        fence.map_or(ProcessTracking::ProcessGroup, |tree| match tree.hierarchy.version {
            CgroupVersion::V1 => ProcessTracking::CgroupV1,
            CgroupVersion::V2 => ProcessTracking::CgroupV2,
        })
    }

    /// Returns how many directories of dead keepers were removed at the start.
    pub fn orphans(&self) -> u64 {
        self.orphans
    }

    /// Ends and removes the cells of keepers that were about to die when this one began. Waits for
    /// the kernel.
    pub fn clean_up_after_others() -> u64 {
        hierarchy::clean()
    }

    /// Returns how often a limit could not be set as requested.
    pub fn complaints(&self) -> u64 {
        self.shared.complaints.total()
    }

    /// Returns a leaf for one request (or one worker), with the limits of `confinement`. `usage`
    /// counts from here.
    pub fn leaf(&self, home: &CellParent, confinement: &Confinement) -> Result<Arc<Leaf>, CellError> {
        let mut state = self.state.lock();
        let placed = state.place(&self.shared, home, confinement)?;
        loop {
            let free = placed.branch.take(&self.shared);
            let is_new = free.is_none();
            state.leaves_reused += u64::from(!is_new);
            let body = free.unwrap_or_else(|| {
                state.leaves_made += 1;
                LeafDirs::new(state.leaves_made, self.shared.trees.len())
            });
            match self.fill(body, is_new, &placed, &confinement.limits) {
                Ok(leaf) => return Ok(leaf),
                // Somebody removed it while it was free. There may be more like it.
                Err(error) if !is_new && error.is_gone() => {
                    tracing::info!(%error, "a free cell is gone; taking another one");
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn fill(
        &self,
        mut body: LeafDirs,
        is_new: bool,
        placed: &CellTarget,
        limits: &LimitSet,
    ) -> Result<Arc<Leaf>, CgroupFileError> {
        let read = |body: &LeafDirs| {
            body.read().map_err(|error| CgroupFileError::new(placed.branch.path().as_ref(), error))
        };
        // Fails for a leaf that was removed.
        let mut began = if is_new { None } else { Some(read(&body)?) };
        let resolved = self.shared.resolve(limits, &placed.roots);
        let mut joined = Vec::with_capacity(placed.joins.len());
        for (index, join) in placed.joins.iter().enumerate() {
            joined.push(match join {
                JoinTarget::Out => None,
                JoinTarget::Dir(dir) => dir.ensure_exists().map(|()| Some(Arc::clone(dir)))?,
                JoinTarget::Leaf(above) => {
                    Some(body.dir(index, above, leaf_dirs::of_leaf(&resolved, above))?)
                }
            });
        }
        if began.is_none() {
            began = Some(read(&body)?);
        }
        let (branch, number) = (Arc::clone(&placed.branch), body.number);
        let limits = (limits.clone(), placed.roots.clone());
        let leaf = Arc::new(Leaf::new(Arc::clone(&self.shared), branch, body, joined, limits)?);
        leaf.began_at(began.unwrap_or_default());
        placed.branch.lives(number, &leaf);
        Ok(leaf)
    }

    /// Gives a worker's leaf the limits of its next request, if that is to run in the same place.
    /// Returns false if the worker needs another `leaf` and must be moved there with `adopt`.
    pub fn refit(
        &self,
        leaf: &Leaf,
        home: &CellParent,
        confinement: &Confinement,
    ) -> Result<bool, CellError> {
        let placed = self.state.lock().place(&self.shared, home, confinement)?;
        if !Arc::ptr_eq(leaf.branch(), &placed.branch) || !leaf.is_joined(&placed.joins) {
            return Ok(false);
        }
        leaf.refit(&confinement.limits, placed.roots);
        Ok(true)
    }

    /// Applies changed records to existing cells. Must be called when records or
    /// `processes_per_tenant` have changed.
    pub fn apply_records(&self, table: &RecordIndex, processes_per_tenant: u32) {
        let mut state = self.state.lock();
        let changed = state.desired.apply_records(table, processes_per_tenant);
        state.follow(&self.shared, &changed);
        state.desired.drop_of_absent(table);
    }

    /// Replaces the CPU limit of a site's record, while work runs there. `None` restores the
    /// record's.
    pub fn limit_cpu(&self, site: &SiteName, cpu: Option<CpuQuota>) -> Result<(), NoLimit> {
        let mut state = self.state.lock();
        let changed = state.desired.limit_cpu(site, cpu)?;
        state.follow(&self.shared, &changed);
        Ok(())
    }

    /// Returns a site's CPU limit apart from boosts, and whether it differs from its record's.
    pub fn cpu_limit(&self, site: &SiteName) -> (Option<CpuQuota>, bool) {
        self.state.lock().desired.cpu_limit(site)
    }

    /// Returns the sites whose CPU limit differs from their record's.
    pub fn changed_cpu_limits(&self) -> HashSet<SiteName> {
        self.state.lock().desired.changed_cpu_limits().cloned().collect()
    }

    /// Sets a site's boost: the least that it gets, where it has a limit. An empty one ends the
    /// boost.
    pub fn boost(&self, site: &SiteName, boost: Boost) {
        let mut state = self.state.lock();
        let changed = state.desired.boost(site, boost);
        state.follow(&self.shared, &changed);
    }

    /// Returns how long a site's work was throttled by its own quota, in all its cells together.
    /// Blocks, a little.
    pub fn throttled_us(&self, site: &SiteName) -> u64 {
        self.counters_of(&LevelKind::Site(site.clone()), CgroupController::Cpu, |_| {
            CounterSource::CpuStatThrottled
        })
        .unwrap_or_default()
        .throttled_us
    }

    /// Returns the progress of a site's and its tenant's work. Blocks, a little.
    pub fn progress(&self, site: &SiteName, tenant: &TenantName) -> CpuProgress {
        let usage = |version| match version {
            CgroupVersion::V1 => CounterSource::CpuacctUsage,
            CgroupVersion::V2 => CounterSource::CpuStatUsage,
        };
        let of_site = self.counters_of(&LevelKind::Site(site.clone()), CgroupController::Cpuacct, usage);
        let of_tenant = self.counters_of(&LevelKind::Tenant(tenant.clone()), CgroupController::Cpu, |_| {
            CounterSource::CpuStatThrottled
        });
        CpuProgress {
            cpu_us: of_site.map(|counters| counters.cpu_us),
            throttled_us: self.throttled_us(site) + of_tenant.unwrap_or_default().throttled_us,
        }
    }

    /// Returns the processes of a site. Blocks, a little.
    pub fn pids_of(&self, site: &SiteName) -> Vec<Pid> {
        let leaves: Vec<Arc<Leaf>> = {
            let state = self.state.lock();
            let of_site = state.branches.iter().filter(|(place, _)| place.site.as_ref() == Some(site));
            of_site.flat_map(|(_, branch)| branch.live()).collect()
        };
        leaves.iter().flat_map(|leaf| leaf.pids().unwrap_or_default()).collect()
    }

    /// Sums the counters of all its cells. `None` if none has this controller.
    fn counters_of(
        &self,
        what: &LevelKind,
        controller: CgroupController,
        source: impl Fn(CgroupVersion) -> CounterSource,
    ) -> Option<CellCounters> {
        let held: Vec<Arc<CgroupDir>> = {
            let state = self.state.lock();
            let held = state.dirs.get(what).into_iter().flatten();
            held.filter_map(|one| one.dir.upgrade()).collect()
        };
        let mut meter = CellMeter::default();
        let mut is_counted = false;
        for dir in held.iter().filter(|dir| dir.hierarchy.controllers.has(controller)) {
            // A cell that is going away reports nothing any more.
            is_counted |= meter.add(source(dir.hierarchy.version), &dir.path).unwrap_or(false);
        }
        is_counted.then(|| meter.read().unwrap_or_default())
    }

    /// Sets or drops a named cell of the node.
    pub fn change(&self, change: &CellChange) -> Result<(), CellError> {
        let mut state = self.state.lock();
        let changed = state.desired.change(change)?;
        state.follow(&self.shared, &changed);
        if matches!(change, CellChange::Drop { .. }) {
            let CellsState { desired, branches, .. } = &*state;
            let dropped =
                |branch: &&Arc<CellBranch>| !desired.has(&branch.place.tenant, &branch.place.attached);
            branches.values().filter(dropped).for_each(|branch| branch.discard(&self.shared));
        }
        Ok(())
    }

    /// Lowers the CPU priority of some tenants, and restores that of others.
    pub fn deprioritize(&self, give_way: &[TenantName], resume: &[TenantName], now: Instant) {
        let mut state = self.state.lock();
        let until = now + GIVE_WAY_FOR;
        let give_way = give_way.iter().map(|tenant| (tenant, Some(until)));
        for (tenant, until) in give_way.chain(resume.iter().map(|tenant| (tenant, None))) {
            let changed = state.desired.deprioritize(tenant, until);
            state.follow(&self.shared, &changed);
        }
    }

    /// Raises the CPU priority of a site's processes until `until`. All sites with raised priority
    /// are equal.
    pub fn prioritize_site(&self, site: &SiteName, tenant: &TenantName, until: Instant) {
        let mut state = self.state.lock();
        let changed = state.desired.prioritize_site(site, tenant, until);
        state.follow(&self.shared, &changed);
    }

    /// Ends the raised CPU priority of a site.
    pub fn end_site_priority(&self, site: &SiteName) {
        let mut state = self.state.lock();
        let changed = state.desired.end_site_priority(site);
        state.follow(&self.shared, &changed);
    }

    /// Ends CPU priorities whose time is over. Returns when to call again; `None` if nothing is
    /// raised or lowered.
    pub fn end_overdue(&self, now: Instant) -> Option<Instant> {
        let mut state = self.state.lock();
        let (changed, gives_way) = state.desired.end_giving_way(now);
        state.follow(&self.shared, &changed);
        let (changed, precedes) = state.desired.end_overdue_precedence(now);
        state.follow(&self.shared, &changed);
        gives_way.into_iter().chain(precedes).min()
    }

    /// Removes cells that nobody has used for a while. Must be called every few seconds.
    pub fn sweep(&self) {
        self.shared.disks.forget();
        self.state.lock().sweep(&self.shared, IDLE_MAX);
    }

    /// Removes all empty cells. Waits `CLOSE_MAX` at most: a killed process keeps its directory
    /// until the kernel is done with it. Tasks of this thread go on meanwhile: those of instances
    /// still hold leaves, and give them back.
    pub async fn close(&self) {
        let until = Instant::now() + CLOSE_MAX;
        loop {
            self.state.lock().sweep(&self.shared, Duration::ZERO);
            let left = self.shared.trees.iter().filter(|tree| !tree.hierarchy.close()).count();
            if left == 0 || Instant::now() >= until {
                break;
            }
            tokio::time::sleep(CLOSE_PAUSE).await;
        }
        self.shared.close_freezer();
    }
}

impl CellsState {
    fn place(
        &mut self,
        shared: &CellTree,
        home: &CellParent,
        confinement: &Confinement,
    ) -> Result<CellTarget, CellError> {
        let mut changed = self.desired.meet(home);
        let (attached, of_named) = self.desired.attach(&home.tenant.name, confinement)?;
        changed.extend(of_named);
        self.follow(shared, &changed);
        let site = home.site.as_ref().map(|site| site.name.clone());
        let place = CellPath { tenant: home.tenant.name.clone(), site, attached };
        let branch = match self.branches.get(&place) {
            Some(branch) => Arc::clone(branch),
            None => {
                if self.branches.len() >= BRANCHES_MAX {
                    self.sweep(shared, Duration::ZERO);
                    // The cell's owner may have had no other cell.
                    self.desired.meet(home);
                }
                let branch = Arc::new(CellBranch::new(place.clone()));
                self.branches.insert(place, Arc::clone(&branch));
                branch
            }
        };
        // Limits that may be set later go as deep from the beginning: nothing has to be moved then.
        let leaf =
            confinement.demotions.iter().fold(ControllerSet::limited_by(&confinement.limits), |all, step| {
                all.or(ControllerSet::limited_by(&step.limits))
            });
        let joins = match branch.joins(self.generation, leaf) {
            Some(joins) => joins,
            None => {
                let joins = self.join(shared, &branch.place, leaf)?;
                branch.keep_joins(self.generation, leaf, &joins);
                joins
            }
        };
        Ok(CellTarget { branch, joins, roots: self.desired.roots(home) })
    }

    /// Returns where a request's processes go in each hierarchy, and makes the directories.
    fn join(
        &mut self,
        shared: &CellTree,
        place: &CellPath,
        leaf: ControllerSet,
    ) -> Result<Arc<[JoinTarget]>, CgroupFileError> {
        let mut joins = Vec::with_capacity(shared.trees.len());
        for (index, tree) in shared.trees.iter().enumerate() {
            let hierarchy = &tree.hierarchy;
            let levels = place.levels(hierarchy.version, hierarchy.controllers);
            let limited = |level: &CellLevel| {
                let limits = ControllerSet::limited_by(&self.desired.of(&level.what).0);
                (limits.and(level.controllers), matches!(level.what, LevelKind::Named { .. }))
            };
            let limited: Vec<_> = levels.iter().map(limited).collect();
            let wants = DepthFactors {
                version: hierarchy.version,
                controllers: hierarchy.controllers,
                is_fence: hierarchy.is_fence,
                levels: &limited,
                leaf,
            };
            if wants.is_flat_twice() {
                shared.complaints.add(codes::FLAT, place.tenant.as_str(), || {
                    format!(
                        "cell {} has limits of disks at several levels. On cgroup v1 they hold for one process at one \
                         level: each request keeps to the smallest, but several together may pass those above",
                        place.path()
                    )
                });
            }
            joins.push(match cell_path::depth(wants) {
                CellDepth::Out => JoinTarget::Out,
                CellDepth::Leaf => JoinTarget::Leaf(self.dir(shared, index, &levels)?),
                CellDepth::Level(level) => JoinTarget::Dir(self.dir(shared, index, &levels[..=level])?),
            });
        }
        Ok(joins.into())
    }

    /// Returns the directory at the end of these levels. Makes it, and those above it, if they are
    /// missing.
    fn dir(
        &mut self,
        shared: &CellTree,
        hierarchy: usize,
        levels: &[CellLevel],
    ) -> Result<Arc<CgroupDir>, CgroupFileError> {
        let mut dir = Arc::clone(&shared.trees[hierarchy]);
        let all = dir.hierarchy.controllers;
        for level in levels {
            let (limits, roots) = self.desired.of(&level.what);
            let own = || only(&shared.resolve(&limits, roots), level.controllers);
            dir = dir.below(&level.name(all), false, own)?;
            self.hold(shared, hierarchy, level, &dir);
        }
        Ok(dir)
    }

    fn hold(&mut self, shared: &CellTree, hierarchy: usize, level: &CellLevel, dir: &Arc<CgroupDir>) {
        let held = self.dirs.entry(level.what.clone()).or_default();
        held.retain(|one| one.dir.strong_count() > 0);
        if held.iter().any(|one| std::ptr::eq(one.dir.as_ptr(), Arc::as_ptr(dir))) {
            return;
        }
        let controllers = level.controllers;
        let shares =
            |one: &LevelDir| one.hierarchy == hierarchy && !one.controllers.and(controllers).is_empty();
        if let LevelKind::Named { name, .. } = &level.what
            && held.iter().any(shares)
        {
            shared.complaints.add(codes::SEVERAL, name.as_str(), || {
                format!(
                    "named cell '{name}' is used together with several others, or with other controllers. On cgroup v2 \
                     it has a directory for each: its limits hold in each of them, not for all together"
                )
            });
        }
        held.push(LevelDir { hierarchy, controllers, dir: Arc::downgrade(dir) });
    }

    /// Gives the directories of these levels their limits.
    fn follow(&mut self, shared: &CellTree, changed: &ChangedLevels) {
        for what in changed {
            // Without directories, nobody has used its limits.
            let Some(held) = self.dirs.get(what) else { continue };
            self.generation += 1;
            let (limits, roots) = self.desired.of(what);
            let resolved = shared.resolve(&limits, roots);
            for held in held {
                if let Some(dir) = held.dir.upgrade() {
                    dir.set(only(&resolved, held.controllers));
                }
            }
        }
    }

    fn sweep(&mut self, shared: &CellTree, idle: Duration) {
        let now = Instant::now();
        self.branches.retain(|_, branch| {
            let is_idle = branch.idle_since().is_some_and(|since| now.duration_since(since) >= idle);
            if is_idle {
                branch.discard(shared);
            }
            !is_idle
        });
        self.dirs.retain(|_, held| {
            held.retain(|one| one.dir.strong_count() > 0);
            !held.is_empty()
        });
        let (mut tenants, mut sites) = (HashSet::new(), HashSet::new());
        for place in self.branches.keys() {
            tenants.insert(&place.tenant);
            sites.extend(&place.site);
        }
        self.desired.keep_only(&tenants, &sites);
    }
}

#[cfg(test)]
mod tests;
