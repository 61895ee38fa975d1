//! Cells: where each request runs, how much it may use there, what it used, and how everything in it is ended.
//!
//! One `Cells` for each keeper process, used on its one thread; each call takes microseconds. A tree of cgroups for
//! each hierarchy that can be used (`hierarchy`), with directories for tenants, sites and named cells made on demand
//! (`dir`, `place`, `desired`), and leaves that are used again (`branch`, `leaf`). `docs/cells.md` tells all of it to
//! operators. Not here: what a request asks for (`cmdb::cell`), whether it may (`confinement`), the life of a process
//! (`process`).

mod birth;
mod branch;
mod claims;
pub mod codes;
mod complaints;
mod controllers;
mod desired;
mod device;
mod dir;
mod ending;
mod files;
mod freezer;
mod hierarchy;
mod leaf;
mod lines;
mod memory;
mod mounts;
mod place;
mod show;
mod usage;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use nagaya_base::Code;
use nagaya_cmdb::cell::{Boost, CellChange, Confinement, Controller, CpuQuota, Limits};
use nagaya_cmdb::{Site, SiteName, Table, Tenant, TenantName};
use parking_lot::Mutex;
use rustix::process::Pid;

use crate::options::BackEnd;
use branch::{Branch, Join};
use complaints::Complaints;
use controllers::{Controllers, Version, only};
use desired::{Changed, Desired};
use device::{Disks, Number};
use dir::Dir;
use files::FileError;
use hierarchy::Missing;
use leaf::Body;
use place::{Depth, Level, Place, Wants, What};
use usage::{Counters, Meter, Source};

pub use claims::Claim;
pub use desired::NoLimit;
pub use ending::LOOK_AGAIN_MAX;
pub use freezer::{Brake, Freezer};
pub use leaf::Leaf;
pub use memory::Kills;
pub use show::Numbers;

/// Free leaves kept on the whole node, unless the limit on open files allows fewer.
const FREE_MAX: usize = 4096;

/// Files that are open of one leaf, at most: about ten of v1's hierarchies, or seven of v2, and limits that were set.
const FILES_PER_LEAF: usize = 16;

/// How long directories stay when nothing runs in them any more.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// So long a tenant gives way unless it is said again: an edge that has ended, or is lost, holds nobody back.
pub const GIVE_WAY_FOR: Duration = Duration::from_secs(3);

/// Longest wait for what is ending when all is closed, and the pause between two looks.
const CLOSE_MAX: Duration = Duration::from_secs(2);
const CLOSE_PAUSE: Duration = Duration::from_millis(10);

/// Places with directories, at most, apart from those in which something runs.
const BRANCHES_MAX: usize = 4096;

/// How far work has come, since its cells were made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// CPU time of the site's cells, microseconds. None: nobody counts it.
    pub cpu_us: Option<u64>,
    /// For how long it stood still by the site's own limit or the tenant's, microseconds.
    pub throttled_us: u64,
}

/// For whom a request runs.
#[derive(Debug, Clone)]
pub struct Home {
    pub tenant: Arc<Tenant>,
    /// None: beneath the tenant alone, as a worker that has served nobody yet.
    pub site: Option<Arc<Site>>,
    /// `st_dev` of the site's files as major and minor number, for `Device::Root`. None: nobody has asked yet.
    pub device: Option<Number>,
}

/// Why a request has no cell.
#[derive(Debug, thiserror::Error)]
#[error("{code}: {message}")]
pub struct CellError {
    pub code: Code,
    pub message: String,
}

impl From<FileError> for CellError {
    fn from(error: FileError) -> Self {
        Self { code: codes::MAKE, message: format!("cannot make a cell: {error}") }
    }
}

/// What keeps a process tree together, so that it can be ended as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    CgroupV2,
    CgroupV1,
    ProcessGroup,
}

impl Kind {
    /// The word for it in status and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CgroupV2 => "cgroup-v2",
            Self::CgroupV1 => "cgroup-v1",
            Self::ProcessGroup => "process-group",
        }
    }
}

/// All cells of this keeper.
#[derive(Debug)]
pub struct Cells {
    shared: Arc<Shared>,
    missing: Vec<Missing>,
    orphans: u64,
    state: Mutex<State>,
}

/// What leaves need too, on whichever thread they are.
#[derive(Debug)]
pub struct Shared {
    /// The keeper's own directory in each hierarchy.
    trees: Vec<Arc<Dir>>,
    /// Its directory in the freezer of v1, made when it is needed.
    freezer: Option<PathBuf>,
    disks: Disks,
    complaints: Arc<Complaints>,
    /// Free leaves of all branches.
    free: AtomicUsize,
    free_max: usize,
}

impl Shared {
    fn resolve(&self, limits: &Limits, roots: &[Number]) -> Limits {
        self.disks.resolve(limits, roots, &self.complaints)
    }
}

#[derive(Debug)]
struct State {
    desired: Desired,
    branches: HashMap<Place, Arc<Branch>>,
    /// The directories of each level, by hierarchy.
    dirs: HashMap<What, Vec<Holding>>,
    /// Raised when a limit above leaves changes.
    generation: u64,
    leaves_made: u64,
    leaves_reused: u64,
}

#[derive(Debug)]
struct Holding {
    hierarchy: usize,
    controllers: Controllers,
    dir: Weak<Dir>,
}

/// Where a request goes, and with what.
struct Placed {
    branch: Arc<Branch>,
    joins: Arc<[Join]>,
    roots: Vec<Number>,
}

impl Cells {
    /// Finds out what can be used here, after removing what dead keepers left behind. `processes_per_tenant` holds for
    /// tenants whose record gives no number.
    pub fn open(back_end: BackEnd, processes_per_tenant: u32) -> Self {
        let found = hierarchy::find(back_end);
        for Missing { controller, code, why } in &found.missing {
            let what = controller.map_or("fence", Controller::as_str);
            tracing::warn!("{code}: no {what} for cells: {why}");
        }
        let complaints = Arc::new(Complaints::default());
        let trees =
            found.hierarchies.into_iter().map(|one| Dir::node(Arc::new(one), Arc::clone(&complaints)));
        let files_max = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        // A quarter for what is free; the other files are of leaves in use, pipes and connections.
        let files_max =
            files_max.map_or(usize::MAX, |files| usize::try_from(files).unwrap_or(usize::MAX)) / 4;
        let shared = Shared {
            trees: trees.collect(),
            freezer: found.freezer,
            disks: Disks::new(),
            complaints,
            free: AtomicUsize::new(0),
            free_max: FREE_MAX.min(files_max / FILES_PER_LEAF),
        };
        shared.count_disks();
        let state = State {
            desired: Desired::new(processes_per_tenant),
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

    /// What keeps a tree together.
    pub fn fence(&self) -> Kind {
        let fence = self.shared.trees.iter().find(|tree| tree.hierarchy.is_fence);
        fence.map_or(Kind::ProcessGroup, |tree| match tree.hierarchy.version {
            Version::V1 => Kind::CgroupV1,
            Version::V2 => Kind::CgroupV2,
        })
    }

    /// Directories of dead keepers that were removed at the start.
    pub fn orphans(&self) -> u64 {
        self.orphans
    }

    /// Ends and removes what keepers have left that were about to die when this one began. Waits for the kernel.
    pub fn clean_up_after_others() -> u64 {
        hierarchy::clean()
    }

    /// How often a limit could not be set as it was asked for.
    pub fn complaints(&self) -> u64 {
        self.shared.complaints.total()
    }

    /// A leaf of its own for one request (or one worker), with the limits of `confinement`. `usage` counts from here.
    pub fn leaf(&self, home: &Home, confinement: &Confinement) -> Result<Arc<Leaf>, CellError> {
        let mut state = self.state.lock();
        let placed = state.place(&self.shared, home, confinement)?;
        loop {
            let free = placed.branch.take(&self.shared);
            let is_new = free.is_none();
            state.leaves_reused += u64::from(!is_new);
            let body = free.unwrap_or_else(|| {
                state.leaves_made += 1;
                Body::new(state.leaves_made, self.shared.trees.len())
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
        mut body: Body,
        is_new: bool,
        placed: &Placed,
        limits: &Limits,
    ) -> Result<Arc<Leaf>, FileError> {
        let read =
            |body: &Body| body.read().map_err(|error| FileError::new(placed.branch.path().as_ref(), error));
        // Of a leaf that was removed, this fails.
        let mut began = if is_new { None } else { Some(read(&body)?) };
        let resolved = self.shared.resolve(limits, &placed.roots);
        let mut joined = Vec::with_capacity(placed.joins.len());
        for (index, join) in placed.joins.iter().enumerate() {
            joined.push(match join {
                Join::Out => None,
                Join::Dir(dir) => dir.see_to().map(|()| Some(Arc::clone(dir)))?,
                Join::Leaf(above) => Some(body.dir(index, above, leaf::of_leaf(&resolved, above))?),
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

    /// Gives a leaf that a worker is in the limits of its next request, if that is to run in the same place. False:
    /// take another `leaf`, and `adopt` the worker there.
    pub fn refit(&self, leaf: &Leaf, home: &Home, confinement: &Confinement) -> Result<bool, CellError> {
        let placed = self.state.lock().place(&self.shared, home, confinement)?;
        if !Arc::ptr_eq(leaf.branch(), &placed.branch) || !leaf.is_joined(&placed.joins) {
            return Ok(false);
        }
        leaf.refit(&confinement.limits, placed.roots);
        Ok(true)
    }

    /// To be called when records or `processes_per_tenant` have changed: existing cells follow.
    pub fn apply_records(&self, table: &Table, processes_per_tenant: u32) {
        let mut state = self.state.lock();
        let changed = state.desired.apply_records(table, processes_per_tenant);
        state.follow(&self.shared, &changed);
        state.desired.drop_of_absent(table);
    }

    /// Puts this CPU limit in the place of the one of a site's record, while work runs there. None: the record's again.
    pub fn limit_cpu(&self, site: &SiteName, cpu: Option<CpuQuota>) -> Result<(), NoLimit> {
        let mut state = self.state.lock();
        let changed = state.desired.limit_cpu(site, cpu)?;
        state.follow(&self.shared, &changed);
        Ok(())
    }

    /// A site's CPU limit apart from boosts, and whether it is another than its record's.
    pub fn cpu_limit(&self, site: &SiteName) -> (Option<CpuQuota>, bool) {
        self.state.lock().desired.cpu_limit(site)
    }

    /// The sites whose CPU limit is another than their record's.
    pub fn changed_cpu_limits(&self) -> HashSet<SiteName> {
        self.state.lock().desired.changed_cpu_limits().cloned().collect()
    }

    /// From now on a site has at least so much, where it has a limit. The empty one: only its own again.
    pub fn boost(&self, site: &SiteName, boost: Boost) {
        let mut state = self.state.lock();
        let changed = state.desired.boost(site, boost);
        state.follow(&self.shared, &changed);
    }

    /// For how long work of a site stood still because its own quota was used up, in all its cells together. Blocks, a little.
    pub fn throttled_us(&self, site: &SiteName) -> u64 {
        self.counters_of(&What::Site(site.clone()), Controller::Cpu, |_| Source::CpuStatThrottled)
            .unwrap_or_default()
            .throttled_us
    }

    /// How far work of a site and of its tenant has come. Blocks, a little.
    pub fn progress(&self, site: &SiteName, tenant: &TenantName) -> Progress {
        let usage = |version| match version {
            Version::V1 => Source::CpuacctUsage,
            Version::V2 => Source::CpuStatUsage,
        };
        let of_site = self.counters_of(&What::Site(site.clone()), Controller::Cpuacct, usage);
        let of_tenant =
            self.counters_of(&What::Tenant(tenant.clone()), Controller::Cpu, |_| Source::CpuStatThrottled);
        Progress {
            cpu_us: of_site.map(|counters| counters.cpu_us),
            throttled_us: self.throttled_us(site) + of_tenant.unwrap_or_default().throttled_us,
        }
    }

    /// Processes that run for a site. Blocks, a little.
    pub fn pids_of(&self, site: &SiteName) -> Vec<Pid> {
        let leaves: Vec<Arc<Leaf>> = {
            let state = self.state.lock();
            let of_site = state.branches.iter().filter(|(place, _)| place.site.as_ref() == Some(site));
            of_site.flat_map(|(_, branch)| branch.live()).collect()
        };
        leaves.iter().flat_map(|leaf| leaf.pids().unwrap_or_default()).collect()
    }

    /// What the cells for this count, of which there may be several. None: there is none with this controller.
    fn counters_of(
        &self,
        what: &What,
        controller: Controller,
        source: impl Fn(Version) -> Source,
    ) -> Option<Counters> {
        let held: Vec<Arc<Dir>> = {
            let state = self.state.lock();
            let held = state.dirs.get(what).into_iter().flatten();
            held.filter_map(|one| one.dir.upgrade()).collect()
        };
        let mut meter = Meter::default();
        let mut is_counted = false;
        for dir in held.iter().filter(|dir| dir.hierarchy.controllers.has(controller)) {
            // One that is going away tells nothing any more.
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
            let State { desired, branches, .. } = &*state;
            let dropped = |branch: &&Arc<Branch>| !desired.has(&branch.place.tenant, &branch.place.attached);
            branches.values().filter(dropped).for_each(|branch| branch.discard(&self.shared));
        }
        Ok(())
    }

    /// What runs for some tenants gives way to others from now on, what runs for others no more.
    pub fn give_way(&self, give_way: &[TenantName], resume: &[TenantName], now: Instant) {
        let mut state = self.state.lock();
        let until = now + GIVE_WAY_FOR;
        let give_way = give_way.iter().map(|tenant| (tenant, Some(until)));
        for (tenant, until) in give_way.chain(resume.iter().map(|tenant| (tenant, None))) {
            let changed = state.desired.give_way(tenant, until);
            state.follow(&self.shared, &changed);
        }
    }

    /// What runs for this site goes first on the processor until then. Of those that are told to, all go first alike.
    pub fn precede(&self, site: &SiteName, tenant: &TenantName, until: Instant) {
        let mut state = self.state.lock();
        let changed = state.desired.precede(site, tenant, until);
        state.follow(&self.shared, &changed);
    }

    /// It does so no more.
    pub fn end_preceding(&self, site: &SiteName) {
        let mut state = self.state.lock();
        let changed = state.desired.end_preceding(site);
        state.follow(&self.shared, &changed);
    }

    /// Ends what was to give way, or to go first, until now. Says when to come again; `None`: nobody does either.
    pub fn end_in_time(&self, now: Instant) -> Option<Instant> {
        let mut state = self.state.lock();
        let (changed, gives_way) = state.desired.end_giving_way(now);
        state.follow(&self.shared, &changed);
        let (changed, precedes) = state.desired.end_overdue_precedence(now);
        state.follow(&self.shared, &changed);
        gives_way.into_iter().chain(precedes).min()
    }

    /// Removes cells nobody has used for a while. To be called every few seconds.
    pub fn sweep(&self) {
        self.shared.disks.forget();
        self.state.lock().sweep(&self.shared, IDLE_MAX);
    }

    /// Removes everything that nothing lives in. Blocks for `CLOSE_MAX` at most: a process that was killed a moment ago keeps its
    /// directory until the kernel is done with it.
    pub fn close(&self) {
        let until = Instant::now() + CLOSE_MAX;
        loop {
            self.state.lock().sweep(&self.shared, Duration::ZERO);
            let left = self.shared.trees.iter().filter(|tree| !tree.hierarchy.close()).count();
            if left == 0 || Instant::now() >= until {
                break;
            }
            std::thread::sleep(CLOSE_PAUSE);
        }
        self.shared.close_freezer();
    }
}

impl Shared {
    /// v1 counts bytes only of disks for which somebody, some time, set a limit. One that limits nothing does it too.
    fn count_disks(&self) {
        let v1 = |tree: &&Arc<Dir>| {
            tree.hierarchy.version == Version::V1 && tree.hierarchy.controllers.has(Controller::Blkio)
        };
        for tree in self.trees.iter().filter(v1) {
            for (major, minor) in device::physical() {
                let file = tree.file("blkio.throttle.read_bps_device");
                if let Err(error) = files::write(&file, &format!("{major}:{minor} 0")) {
                    tracing::info!(%error, "bytes of disk {major}:{minor} may not be counted");
                }
            }
        }
    }
}

impl State {
    fn place(
        &mut self,
        shared: &Shared,
        home: &Home,
        confinement: &Confinement,
    ) -> Result<Placed, CellError> {
        let mut changed = self.desired.meet(home);
        let (attached, of_named) = self.desired.attach(&home.tenant.name, confinement)?;
        changed.extend(of_named);
        self.follow(shared, &changed);
        let site = home.site.as_ref().map(|site| site.name.clone());
        let place = Place { tenant: home.tenant.name.clone(), site, attached };
        let branch = match self.branches.get(&place) {
            Some(branch) => Arc::clone(branch),
            None => {
                if self.branches.len() >= BRANCHES_MAX {
                    self.sweep(shared, Duration::ZERO);
                    // Who this is for may have had no other place.
                    self.desired.meet(home);
                }
                let branch = Arc::new(Branch::new(place.clone()));
                self.branches.insert(place, Arc::clone(&branch));
                branch
            }
        };
        // What may be limited later goes as deep from the beginning: nothing has to be moved then.
        let leaf =
            confinement.demotions.iter().fold(Controllers::limited_by(&confinement.limits), |all, step| {
                all.or(Controllers::limited_by(&step.limits))
            });
        let joins = match branch.joins(self.generation, leaf) {
            Some(joins) => joins,
            None => {
                let joins = self.join(shared, &branch.place, leaf)?;
                branch.keep_joins(self.generation, leaf, &joins);
                joins
            }
        };
        Ok(Placed { branch, joins, roots: self.desired.roots(home) })
    }

    /// The directories of a place in all hierarchies, and where a request goes in each.
    fn join(&mut self, shared: &Shared, place: &Place, leaf: Controllers) -> Result<Arc<[Join]>, FileError> {
        let mut joins = Vec::with_capacity(shared.trees.len());
        for (index, tree) in shared.trees.iter().enumerate() {
            let hierarchy = &tree.hierarchy;
            let levels = place.levels(hierarchy.version, hierarchy.controllers);
            let limited = |level: &Level| {
                let limits = Controllers::limited_by(&self.desired.of(&level.what).0);
                (limits.and(level.controllers), matches!(level.what, What::Named { .. }))
            };
            let limited: Vec<_> = levels.iter().map(limited).collect();
            let wants = Wants {
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
            joins.push(match place::depth(wants) {
                Depth::Out => Join::Out,
                Depth::Leaf => Join::Leaf(self.dir(shared, index, &levels)?),
                Depth::Level(level) => Join::Dir(self.dir(shared, index, &levels[..=level])?),
            });
        }
        Ok(joins.into())
    }

    /// The directory at the end of these levels; made, with those above it, if it is not there.
    fn dir(&mut self, shared: &Shared, hierarchy: usize, levels: &[Level]) -> Result<Arc<Dir>, FileError> {
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

    fn hold(&mut self, shared: &Shared, hierarchy: usize, level: &Level, dir: &Arc<Dir>) {
        let held = self.dirs.entry(level.what.clone()).or_default();
        held.retain(|one| one.dir.strong_count() > 0);
        if held.iter().any(|one| std::ptr::eq(one.dir.as_ptr(), Arc::as_ptr(dir))) {
            return;
        }
        let controllers = level.controllers;
        let shares =
            |one: &Holding| one.hierarchy == hierarchy && !one.controllers.and(controllers).is_empty();
        if let What::Named { name, .. } = &level.what
            && held.iter().any(shares)
        {
            shared.complaints.add(codes::SEVERAL, name.as_str(), || {
                format!(
                    "named cell '{name}' is used together with several others, or with other controllers. On cgroup v2 \
                     it has a directory for each: its limits hold in each of them, not for all together"
                )
            });
        }
        held.push(Holding { hierarchy, controllers, dir: Arc::downgrade(dir) });
    }

    /// Gives the directories of these levels their limits.
    fn follow(&mut self, shared: &Shared, changed: &Changed) {
        for what in changed {
            // Where nothing is, nobody has gone by its limits.
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

    fn sweep(&mut self, shared: &Shared, idle: Duration) {
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
