//! The hierarchies this keeper can use: found, tested, and with a directory of its own in each.
//!
//! A controller is taken from v2 where that has it, else from its v1 hierarchy; CPU time is counted
//! by v2 without a controller. Not here: the directories beneath a keeper's own (`dir`), what dead
//! keepers left (`ending`).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nagaya_base::Code;
use nagaya_records::cell::CgroupController;
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::options::CellMechanism;
use crate::version;

use super::controllers::{CgroupVersion, ControllerSet, v2_name};
use super::files::{CgroupFileError, make, open, read, write};
use super::lines::IDLE;
use super::mounts::{self, CgroupMount, OWN, TREE, mounts};
use super::{birth, codes, ending};

/// First version of Linux in which directories are set idle. Tests were made on 6.1, where it does
/// harm, and on 6.18, where it does none. The line between them follows from changes in between
/// (kernel/sched/fair.c, `reweight_entity`), and was not tested.
const FAIR_AFTER_IDLE: (u32, u32) = (6, 7);

/// A controller that limits nothing here, or the missing mechanism to keep process trees together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingController {
    /// `None` for the mechanism.
    pub controller: Option<CgroupController>,
    pub code: Code,
    pub why: String,
}

/// One mounted hierarchy, as far as it is used.
#[derive(Debug)]
pub struct CgroupHierarchy {
    pub version: CgroupVersion,
    pub controllers: ControllerSet,
    /// It lists the processes of a tree and ends them.
    pub is_fence: bool,
    /// Its directories can be set idle, and are back to normal at once when that is undone.
    pub has_idle: bool,
    /// This keeper's directory.
    pub node: PathBuf,
    /// The cgroup the keeper was started in, two levels above `node`.
    base: PathBuf,
}

/// Why there is no mechanism.
const NO_FENCE: &str = "neither cgroup v2 (Linux 5.14 or later) nor pids of v1 can be used";

/// The result of the search.
#[derive(Debug, Default)]
pub struct FoundHierarchies {
    pub hierarchies: Vec<CgroupHierarchy>,
    pub missing: Vec<MissingController>,
    /// Number of removed directories of dead keepers.
    pub orphans: u64,
    /// This keeper's directory in the freezer of v1, if that is mounted and may be used. Not made
    /// yet.
    pub freezer: Option<PathBuf>,
}

/// Returns the tree of all keepers in each hierarchy. It includes those that are not chosen:
/// another keeper may have chosen differently.
fn trees(mounts: &[CgroupMount], freezer: Option<&PathBuf>, groups: &str) -> Vec<PathBuf> {
    let trees = mounts.iter().map(|mount| mount.own(groups).join(TREE));
    freezer.cloned().into_iter().chain(trees).collect()
}

/// Ends and removes the remains of keepers that have died since this one began, or were not gone
/// yet then.
pub fn clean() -> u64 {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let (mountinfo, groups) = (read("/proc/self/mountinfo"), read("/proc/self/cgroup"));
    let freezer = mounts::freezer(&mountinfo, &groups).map(|own| own.join(TREE));
    ending::clean(&trees(&mounts(&mountinfo), freezer.as_ref(), &groups))
}

/// Finds and tests all hierarchies, after removing the remains of dead keepers in any of them.
pub fn find(back_end: CellMechanism) -> FoundHierarchies {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let (mountinfo, groups) = (read("/proc/self/mountinfo"), read("/proc/self/cgroup"));
    let mounts = mounts(&mountinfo);
    let freezer = mounts::freezer(&mountinfo, &groups).map(|own| own.join(TREE));
    let orphans = ending::clean(&trees(&mounts, freezer.as_ref(), &groups));
    let name = match ending::own_name() {
        Ok(name) => name,
        Err(error) => {
            return FoundHierarchies::nothing(&format!("/proc says nothing about this process: {error}"));
        }
    };
    let wanted = |mount: &&CgroupMount| match back_end {
        CellMechanism::Auto => true,
        CellMechanism::CgroupV2 => mount.version == CgroupVersion::V2,
        CellMechanism::CgroupV1 => mount.version == CgroupVersion::V1,
        CellMechanism::ProcessGroup => false,
    };
    let freezer = freezer.filter(|_| matches!(back_end, CellMechanism::Auto | CellMechanism::CgroupV1));
    let freezer = freezer.map(|tree| tree.join(&name));
    let mut found = FoundHierarchies { orphans, freezer, ..FoundHierarchies::default() };
    let mut mounts: Vec<&CgroupMount> = mounts.iter().filter(wanted).collect();
    mounts.sort_by_key(|mount| mount.version == CgroupVersion::V1);
    for mount in mounts {
        let left = ControllerSet::ALL.minus(found.controllers());
        let base = mount.own(&groups);
        let opened = match mount.version {
            CgroupVersion::V2 => open_v2(&base, &name, &mut found.missing),
            CgroupVersion::V1 if mount.controllers.and(left).is_empty() => continue,
            CgroupVersion::V1 => open_v1(&base, &name, mount.controllers.and(left)),
        };
        match opened {
            Ok(hierarchy) => found.hierarchies.push(hierarchy),
            Err(error) => {
                let why = format!("{} cannot be used: {error}", base.display());
                found.missing.extend(
                    mount.controllers.and(left).iter().map(|one| MissingController::of(Some(one), &why)),
                );
                tracing::info!("{why}");
            }
        }
    }
    found.choose_fence();
    found.name_the_rest(back_end);
    for one in found.hierarchies.iter().filter(|one| one.is_fence && one.version == CgroupVersion::V2) {
        if let Err(error) = birth::work_around_fork_kill(&one.node) {
            tracing::warn!(%error, "it cannot be tried whether programs can be born in cells");
        }
    }
    found
}

impl MissingController {
    fn of(controller: Option<CgroupController>, why: &str) -> Self {
        Self { controller, code: codes::MISSING, why: why.to_owned() }
    }
}

impl FoundHierarchies {
    fn nothing(why: &str) -> Self {
        let mut found = Self::default();
        found.missing.extend(CgroupController::ALL.map(|one| MissingController::of(Some(one), why)));
        found.missing.push(MissingController::of(None, why));
        found
    }

    pub fn controllers(&self) -> ControllerSet {
        self.hierarchies.iter().fold(ControllerSet::NONE, |all, one| all.or(one.controllers))
    }

    fn choose_fence(&mut self) {
        let fits =
            |one: &CgroupHierarchy| one.version == CgroupVersion::V2 && one.node.join("cgroup.kill").exists();
        let v2 = self.hierarchies.iter().position(fits);
        // Any hierarchy can list the processes of a directory. The `pids` hierarchy can also forbid
        // forks.
        let v1 = || self.hierarchies.iter().position(|one| one.controllers.has(CgroupController::Pids));
        match v2.or_else(v1) {
            Some(index) => self.hierarchies[index].is_fence = true,
            None => self.missing.push(MissingController::of(None, NO_FENCE)),
        }
    }

    /// Explains each missing controller without a reason yet. A controller that was found after all
    /// is not missing.
    fn name_the_rest(&mut self, back_end: CellMechanism) {
        let have = self.controllers();
        self.missing.retain(|missing| missing.controller.is_none_or(|one| !have.has(one)));
        let why = match back_end {
            CellMechanism::Auto => "it is mounted nowhere, neither in cgroup v2 nor in v1",
            CellMechanism::CgroupV2 => {
                "cgroup v2 does not have it, and v1 is not to be used (cells.back_end)"
            }
            CellMechanism::CgroupV1 => {
                "it is not mounted in cgroup v1, and v2 is not to be used (cells.back_end)"
            }
            CellMechanism::ProcessGroup => "cgroups are not to be used (cells.back_end)",
        };
        for controller in ControllerSet::ALL.minus(have).iter() {
            if !self.missing.iter().any(|missing| missing.controller == Some(controller)) {
                self.missing.push(MissingController::of(Some(controller), why));
            }
        }
        let mut told = ControllerSet::NONE;
        self.missing.retain(|missing| {
            let is_told = missing.controller.is_some_and(|one| told.has(one));
            told = missing.controller.map_or(told, |one| told.with(one));
            !is_told
        });
    }
}

// === v1 ===

/// Returns the file by which each controller of v1 is used. Without it the kernel was built without
/// that part.
fn v1_file(controller: CgroupController) -> &'static str {
    match controller {
        CgroupController::Cpu => "cpu.cfs_quota_us",
        CgroupController::Cpuacct => "cpuacct.usage",
        CgroupController::Cpuset => "cpuset.cpus",
        CgroupController::Blkio => "blkio.throttle.read_bps_device",
        CgroupController::Memory => "memory.limit_in_bytes",
        CgroupController::Pids => "pids.max",
    }
}

fn open_v1(base: &Path, name: &str, controllers: ControllerSet) -> Result<CgroupHierarchy, CgroupFileError> {
    let tree = base.join(TREE);
    make(&tree)?;
    if controllers.has(CgroupController::Cpuset) {
        // A cpuset of v1 begins empty, and nothing can be in it or below it then.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if read(&tree.join(file))?.is_empty() {
                write(&tree.join(file), &read(&base.join(file))?)?;
            }
        }
    }
    let node = tree.join(name);
    make(&node)?;
    let has_idle = has_idle(&node);
    let hierarchy = CgroupHierarchy {
        version: CgroupVersion::V1,
        controllers,
        is_fence: false,
        has_idle,
        node,
        base: base.into(),
    };
    hierarchy.try_v1().inspect_err(|_| _ = hierarchy.close())?;
    Ok(hierarchy)
}

impl CgroupHierarchy {
    /// Tests whether a mounted hierarchy can be used, by making a directory and opening it for
    /// writing.
    fn try_v1(&self) -> Result<(), CgroupFileError> {
        if self.controllers.has(CgroupController::Memory) {
            let file = self.node.join("memory.use_hierarchy");
            // Until Linux 5.11 a limit includes what is below only if that is set, before there is
            // anything below.
            if fs::read_to_string(&file).is_ok_and(|text| text.trim() == "0") {
                write(&file, "1")?;
            }
        }
        for file in self.controllers.iter().map(v1_file).chain(["tasks"]) {
            open(&self.node.join(file), OFlags::WRONLY)?;
        }
        Ok(())
    }

    /// Removes this keeper's own directory. Returns false if cells still have processes, which keep
    /// theirs.
    pub fn close(&self) -> bool {
        let _ = rustix::fs::rmdir(self.node.join(birth::PROBE));
        let is_left = matches!(rustix::fs::rmdir(&self.node), Err(Errno::BUSY | Errno::NOTEMPTY));
        // Other keepers may be in it. Then it stays.
        let _ = rustix::fs::rmdir(self.base.join(TREE));
        !is_left
    }

    /// Enables this controller for v2 directories directly below `node`, all the way from the top.
    pub fn enable_above(&self, controller: CgroupController) -> Result<(), CgroupFileError> {
        for dir in [&self.base, &self.base.join(TREE), &self.node] {
            enable(dir, controller)?;
        }
        Ok(())
    }
}

// === v2 ===

/// Enables a controller for the children of a v2 directory.
pub fn enable(dir: &Path, controller: CgroupController) -> Result<(), CgroupFileError> {
    let Some(name) = v2_name(controller) else { return Ok(()) };
    let path = dir.join("cgroup.subtree_control");
    if read(&path)?.split(' ').any(|have| have == name) {
        return Ok(());
    }
    write(&path, &format!("+{name}"))
}

fn open_v2(
    base: &Path,
    name: &str,
    missing: &mut Vec<MissingController>,
) -> Result<CgroupHierarchy, CgroupFileError> {
    let (tree, available) = (base.join(TREE), read(&base.join("cgroup.controllers"))?);
    let has = |one: &CgroupController| {
        v2_name(*one).is_some_and(|name| available.split(' ').any(|have| have == name))
    };
    let available = CgroupController::ALL.into_iter().filter(has);
    make(&tree)?;
    let node = tree.join(name);
    make(&node)?;
    let mut controllers = ControllerSet::only(CgroupController::Cpuacct);
    let hierarchy = |controllers| CgroupHierarchy {
        version: CgroupVersion::V2,
        controllers,
        is_fence: false,
        has_idle: has_idle(&node),
        node: node.clone(),
        base: base.into(),
    };
    open(&node.join("cgroup.procs"), OFlags::WRONLY).inspect_err(|_| _ = hierarchy(controllers).close())?;
    let room = make_room(base);
    for controller in available {
        // Enabled only once a cell is bound to CPUs: until then it would cost each fork and move
        // something.
        let enabled = match (controller, &room) {
            (CgroupController::Cpuset, Ok(())) => Ok(()),
            (_, Ok(())) => hierarchy(controllers)
                .enable_above(controller)
                .map_err(|error| MissingController::of(Some(controller), &error.to_string())),
            (_, Err(why)) => {
                Err(MissingController { controller: Some(controller), code: codes::SHARED, why: why.clone() })
            }
        };
        match enabled {
            Ok(()) => controllers = controllers.with(controller),
            Err(why) => missing.push(why),
        }
    }
    Ok(hierarchy(controllers))
}

/// Ensures that this cgroup may have children with controllers. Only the root may while it has
/// processes of its own. Any other cgroup would refuse some controllers. With the others it would
/// become one whose children cannot have processes (cgroup-v2.rst, "No Internal Process Constraint"
/// and "Threads").
fn make_room(base: &Path) -> Result<(), String> {
    let is_root = !base.join("cgroup.type").exists();
    let moved = if is_root { Ok(()) } else { move_own(base) };
    moved.map_err(|error| {
        format!(
            "{} has processes of others, so cells below it get no controllers: give nagaya a cgroup of its \
             own (`Delegate=yes` in its systemd unit). {error}",
            base.display()
        )
    })
}

/// Moves the processes of this node from their first cgroup to one below it, if there are no
/// others.
fn move_own(base: &Path) -> io::Result<()> {
    let supervisor = rustix::process::getppid();
    let program = fs::read_link("/proc/self/exe")?;
    let pids = ending::members(base)?;
    if pids.is_empty() {
        return Ok(());
    }
    let is_ours = |pid: &rustix::process::Pid| {
        Some(*pid) == supervisor
            || fs::read_link(format!("/proc/{}/exe", pid.as_raw_nonzero())).is_ok_and(|exe| exe == program)
    };
    if let Some(other) = pids.iter().find(|pid| !is_ours(pid)) {
        let message = format!("Process {} is none of nagaya's", other.as_raw_nonzero());
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, message));
    }
    let own = base.join(TREE).join(OWN);
    make(&own)?;
    for pid in pids {
        match write(&own.join("cgroup.procs"), &pid.as_raw_nonzero().to_string()) {
            // It ended on the way.
            Err(error) if error.is(Errno::SRCH) => {}
            other => other?,
        }
    }
    Ok(())
}

/// Whether directories here can be idle for a while. An older kernel has the file, too. But on 6.1
/// an idle directory could not be frozen within half a second after it got its shares back. That
/// was while others computed.
fn has_idle(node: &Path) -> bool {
    node.join(IDLE).exists() && version::of_kernel().is_some_and(|version| version >= FAIR_AFTER_IDLE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hierarchy(version: CgroupVersion, controllers: ControllerSet) -> CgroupHierarchy {
        let (node, base) = ("/none".into(), "/none".into());
        CgroupHierarchy { version, controllers, is_fence: false, has_idle: false, node, base }
    }

    #[test]
    fn each_controller_is_there_or_missing_for_one_reason() {
        let mut found = FoundHierarchies::default();
        found.hierarchies.push(hierarchy(
            CgroupVersion::V1,
            ControllerSet::of(&[CgroupController::Cpu, CgroupController::Pids]),
        ));
        // Of v2, which has it not; v1 has it after all.
        found.missing.push(MissingController::of(Some(CgroupController::Cpu), "busy"));
        found.missing.push(MissingController::of(Some(CgroupController::Memory), "busy"));
        found.missing.push(MissingController::of(Some(CgroupController::Memory), "not writable"));
        found.choose_fence();
        found.name_the_rest(CellMechanism::Auto);
        let told: Vec<_> = found.missing.iter().map(|one| (one.controller, one.why.as_str())).collect();
        let nowhere = "it is mounted nowhere, neither in cgroup v2 nor in v1";
        assert_eq!(
            told,
            [
                (Some(CgroupController::Memory), "busy"),
                (Some(CgroupController::Cpuacct), nowhere),
                (Some(CgroupController::Cpuset), nowhere),
                (Some(CgroupController::Blkio), nowhere),
            ]
        );
        assert!(found.hierarchies[0].is_fence);
    }

    #[test]
    fn controller_excluded_by_configuration_names_the_setting() {
        let found = find(CellMechanism::ProcessGroup);
        assert!(found.hierarchies.is_empty());
        let because =
            |one: &MissingController| one.controller.is_none() || one.why.contains("cells.back_end");
        assert!(found.missing.iter().all(because), "{:?}", found.missing);
        assert_eq!(found.missing.len(), CgroupController::ALL.len() + 1);
    }
}
