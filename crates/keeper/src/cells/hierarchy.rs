//! The hierarchies this keeper can use: found, tried, and with a directory of its own in each.
//!
//! A controller is taken from v2 where that has it, else from its v1 hierarchy; CPU time is counted by v2 without a
//! controller. Not here: the directories beneath a keeper's own (`dir`), what dead keepers left (`ending`).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nagaya_base::Code;
use nagaya_cmdb::cell::Controller;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::birth;
use super::codes;
use super::controllers::{Controllers, Version, v2_name};
use super::ending;
use super::files::{FileError, make, open, read, write};
use super::lines::IDLE;
use super::mounts::{self, Mount, OWN, TREE, mounts};
use crate::options::BackEnd;
use crate::version;

/// From this version of Linux on directories are told to be idle. Tried were 6.1, where it does harm, and 6.18, where it does none;
/// that the line is here is taken from what changed in between (kernel/sched/fair.c, `reweight_entity`), and was not tried.
const FAIR_AFTER_IDLE: (u32, u32) = (6, 7);

/// A controller that limits nothing here, or the fence where there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// None: the fence.
    pub controller: Option<Controller>,
    pub code: Code,
    pub why: String,
}

/// One mounted hierarchy, as far as it is used.
#[derive(Debug)]
pub struct Hierarchy {
    pub version: Version,
    pub controllers: Controllers,
    /// This one tells what belongs to a tree and ends it.
    pub is_fence: bool,
    /// A directory of it can be told to give way to all beside it, and is as it was at once when it is told not to.
    pub has_idle: bool,
    /// This keeper's directory.
    pub node: PathBuf,
    /// The cgroup the keeper was started in, above `node` by two.
    base: PathBuf,
}

/// Why there is none.
const NO_FENCE: &str = "neither cgroup v2 (Linux 5.14 or later) nor pids of v1 can be used";

/// What there is.
#[derive(Debug, Default)]
pub struct Found {
    pub hierarchies: Vec<Hierarchy>,
    pub missing: Vec<Missing>,
    /// Directories of dead keepers that were removed.
    pub orphans: u64,
    /// This keeper's directory in the freezer of v1, if that is mounted and may be used. Not made yet.
    pub freezer: Option<PathBuf>,
}

/// The tree of all keepers in each hierarchy, those that are not chosen too: another keeper may have chosen differently.
fn trees(mounts: &[Mount], freezer: Option<&PathBuf>, groups: &str) -> Vec<PathBuf> {
    let trees = mounts.iter().map(|mount| mount.own(groups).join(TREE));
    freezer.cloned().into_iter().chain(trees).collect()
}

/// Ends and removes what keepers have left that have died since this one began, or were not gone yet then.
pub fn clean() -> u64 {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let (mountinfo, groups) = (read("/proc/self/mountinfo"), read("/proc/self/cgroup"));
    let freezer = mounts::freezer(&mountinfo, &groups).map(|own| own.join(TREE));
    ending::clean(&trees(&mounts(&mountinfo), freezer.as_ref(), &groups))
}

/// Finds and tries all hierarchies, after removing what dead keepers left in any of them.
pub fn find(back_end: BackEnd) -> Found {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let (mountinfo, groups) = (read("/proc/self/mountinfo"), read("/proc/self/cgroup"));
    let mounts = mounts(&mountinfo);
    let freezer = mounts::freezer(&mountinfo, &groups).map(|own| own.join(TREE));
    let orphans = ending::clean(&trees(&mounts, freezer.as_ref(), &groups));
    let name = match ending::own_name() {
        Ok(name) => name,
        Err(error) => return Found::nothing(&format!("/proc says nothing about this process: {error}")),
    };
    let wanted = |mount: &&Mount| match back_end {
        BackEnd::Auto => true,
        BackEnd::CgroupV2 => mount.version == Version::V2,
        BackEnd::CgroupV1 => mount.version == Version::V1,
        BackEnd::ProcessGroup => false,
    };
    let freezer = freezer.filter(|_| matches!(back_end, BackEnd::Auto | BackEnd::CgroupV1));
    let freezer = freezer.map(|tree| tree.join(&name));
    let mut found = Found { orphans, freezer, ..Found::default() };
    let mut mounts: Vec<&Mount> = mounts.iter().filter(wanted).collect();
    mounts.sort_by_key(|mount| mount.version == Version::V1);
    for mount in mounts {
        let left = Controllers::ALL.minus(found.controllers());
        let base = mount.own(&groups);
        let opened = match mount.version {
            Version::V2 => open_v2(&base, &name, &mut found.missing),
            Version::V1 if mount.controllers.and(left).is_empty() => continue,
            Version::V1 => open_v1(&base, &name, mount.controllers.and(left)),
        };
        match opened {
            Ok(hierarchy) => found.hierarchies.push(hierarchy),
            Err(error) => {
                let why = format!("{} cannot be used: {error}", base.display());
                found
                    .missing
                    .extend(mount.controllers.and(left).iter().map(|one| Missing::of(Some(one), &why)));
                tracing::info!("{why}");
            }
        }
    }
    found.choose_fence();
    found.name_the_rest(back_end);
    for one in found.hierarchies.iter().filter(|one| one.is_fence && one.version == Version::V2) {
        if let Err(error) = birth::see_to_it(&one.node) {
            tracing::warn!(%error, "it cannot be tried whether programs can be born in cells");
        }
    }
    found
}

impl Missing {
    fn of(controller: Option<Controller>, why: &str) -> Self {
        Self { controller, code: codes::MISSING, why: why.to_owned() }
    }
}

impl Found {
    fn nothing(why: &str) -> Self {
        let mut found = Self::default();
        found.missing.extend(Controller::ALL.map(|one| Missing::of(Some(one), why)));
        found.missing.push(Missing::of(None, why));
        found
    }

    pub fn controllers(&self) -> Controllers {
        self.hierarchies.iter().fold(Controllers::NONE, |all, one| all.or(one.controllers))
    }

    fn choose_fence(&mut self) {
        let fits = |one: &Hierarchy| one.version == Version::V2 && one.node.join("cgroup.kill").exists();
        let v2 = self.hierarchies.iter().position(fits);
        // Any hierarchy can list who is in a directory; that of `pids` can also forbid them to fork.
        let v1 = || self.hierarchies.iter().position(|one| one.controllers.has(Controller::Pids));
        match v2.or_else(v1) {
            Some(index) => self.hierarchies[index].is_fence = true,
            None => self.missing.push(Missing::of(None, NO_FENCE)),
        }
    }

    /// Why there is not what has not been spoken of yet; what was found after all is not missing.
    fn name_the_rest(&mut self, back_end: BackEnd) {
        let have = self.controllers();
        self.missing.retain(|missing| missing.controller.is_none_or(|one| !have.has(one)));
        let why = match back_end {
            BackEnd::Auto => "it is mounted nowhere, neither in cgroup v2 nor in v1",
            BackEnd::CgroupV2 => "cgroup v2 does not have it, and v1 is not to be used (cells.back_end)",
            BackEnd::CgroupV1 => "it is not mounted in cgroup v1, and v2 is not to be used (cells.back_end)",
            BackEnd::ProcessGroup => "cgroups are not to be used (cells.back_end)",
        };
        for controller in Controllers::ALL.minus(have).iter() {
            if !self.missing.iter().any(|missing| missing.controller == Some(controller)) {
                self.missing.push(Missing::of(Some(controller), why));
            }
        }
        let mut told = Controllers::NONE;
        self.missing.retain(|missing| {
            let is_told = missing.controller.is_some_and(|one| told.has(one));
            told = missing.controller.map_or(told, |one| told.with(one));
            !is_told
        });
    }
}

// === v1 ===

/// The file each controller of v1 is used through; where it is not there, the kernel was built without that part.
fn v1_file(controller: Controller) -> &'static str {
    match controller {
        Controller::Cpu => "cpu.cfs_quota_us",
        Controller::Cpuacct => "cpuacct.usage",
        Controller::Cpuset => "cpuset.cpus",
        Controller::Blkio => "blkio.throttle.read_bps_device",
        Controller::Memory => "memory.limit_in_bytes",
        Controller::Pids => "pids.max",
    }
}

fn open_v1(base: &Path, name: &str, controllers: Controllers) -> Result<Hierarchy, FileError> {
    let tree = base.join(TREE);
    make(&tree)?;
    if controllers.has(Controller::Cpuset) {
        // A cpuset of v1 begins empty, and nothing can be in it or beneath it then.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if read(&tree.join(file))?.is_empty() {
                write(&tree.join(file), &read(&base.join(file))?)?;
            }
        }
    }
    let node = tree.join(name);
    make(&node)?;
    let has_idle = has_idle(&node);
    let hierarchy =
        Hierarchy { version: Version::V1, controllers, is_fence: false, has_idle, node, base: base.into() };
    hierarchy.try_v1().inspect_err(|_| _ = hierarchy.close())?;
    Ok(hierarchy)
}

impl Hierarchy {
    /// A hierarchy can be mounted and still not be ours to use: one directory, opened for writing, tells.
    fn try_v1(&self) -> Result<(), FileError> {
        if self.controllers.has(Controller::Memory) {
            let file = self.node.join("memory.use_hierarchy");
            // Until Linux 5.11 a limit holds for what is beneath only if asked for, and before there is anything.
            if fs::read_to_string(&file).is_ok_and(|text| text.trim() == "0") {
                write(&file, "1")?;
            }
        }
        for file in self.controllers.iter().map(v1_file).chain(["tasks"]) {
            open(&self.node.join(file), OFlags::WRONLY)?;
        }
        Ok(())
    }

    /// Removes this keeper's own directory. Cells that still have processes keep theirs: false.
    pub fn close(&self) -> bool {
        let _ = rustix::fs::rmdir(self.node.join(birth::PROBE));
        let is_left = matches!(rustix::fs::rmdir(&self.node), Err(Errno::BUSY | Errno::NOTEMPTY));
        // Other keepers may be in it; then it stays.
        let _ = rustix::fs::rmdir(self.base.join(TREE));
        !is_left
    }

    /// Lets v2 directories directly beneath `node` have this controller, all the way from the top.
    pub fn enable_above(&self, controller: Controller) -> Result<(), FileError> {
        for dir in [&self.base, &self.base.join(TREE), &self.node] {
            enable(dir, controller)?;
        }
        Ok(())
    }
}

// === v2 ===

/// Lets the children of a v2 directory have a controller.
pub fn enable(dir: &Path, controller: Controller) -> Result<(), FileError> {
    let Some(name) = v2_name(controller) else { return Ok(()) };
    let path = dir.join("cgroup.subtree_control");
    if read(&path)?.split(' ').any(|have| have == name) {
        return Ok(());
    }
    write(&path, &format!("+{name}"))
}

fn open_v2(base: &Path, name: &str, missing: &mut Vec<Missing>) -> Result<Hierarchy, FileError> {
    let (tree, available) = (base.join(TREE), read(&base.join("cgroup.controllers"))?);
    let has =
        |one: &Controller| v2_name(*one).is_some_and(|name| available.split(' ').any(|have| have == name));
    let available = Controller::ALL.into_iter().filter(has);
    make(&tree)?;
    let node = tree.join(name);
    make(&node)?;
    let mut controllers = Controllers::only(Controller::Cpuacct);
    let hierarchy = |controllers| Hierarchy {
        version: Version::V2,
        controllers,
        is_fence: false,
        has_idle: has_idle(&node),
        node: node.clone(),
        base: base.into(),
    };
    open(&node.join("cgroup.procs"), OFlags::WRONLY).inspect_err(|_| _ = hierarchy(controllers).close())?;
    let room = make_room(base);
    for controller in available {
        // Enabled only once a cell is bound to CPUs: until then it would cost each fork and move something.
        let enabled = match (controller, &room) {
            (Controller::Cpuset, Ok(())) => Ok(()),
            (_, Ok(())) => hierarchy(controllers)
                .enable_above(controller)
                .map_err(|error| Missing::of(Some(controller), &error.to_string())),
            (_, Err(why)) => {
                Err(Missing { controller: Some(controller), code: codes::SHARED, why: why.clone() })
            }
        };
        match enabled {
            Ok(()) => controllers = controllers.with(controller),
            Err(why) => missing.push(why),
        }
    }
    Ok(hierarchy(controllers))
}

/// Sees to it that this cgroup may have children with controllers. Only the root may while it has processes of its
/// own; any other would refuse some controllers, and with the others become one whose children cannot have processes
/// (cgroup-v2.rst, "No Internal Process Constraint" and "Threads").
fn make_room(base: &Path) -> Result<(), String> {
    let is_root = !base.join("cgroup.type").exists();
    let moved = if is_root { Ok(()) } else { move_own(base) };
    moved.map_err(|error| {
        format!(
            "{} has processes of others, so cells beneath it get no controllers: give nagaya a cgroup of its own \
             (`Delegate=yes` in its systemd unit). {error}",
            base.display()
        )
    })
}

/// Moves the processes of this node from the cgroup they were started in to one beneath it, if there are no others.
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

/// Whether directories here can be idle for a while. An older kernel has the file, too; but on 6.1 what was idle could not be frozen
/// within half a second of having its shares again, where others computed.
fn has_idle(node: &Path) -> bool {
    node.join(IDLE).exists() && version::of_kernel().is_some_and(|version| version >= FAIR_AFTER_IDLE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hierarchy(version: Version, controllers: Controllers) -> Hierarchy {
        let (node, base) = ("/none".into(), "/none".into());
        Hierarchy { version, controllers, is_fence: false, has_idle: false, node, base }
    }

    #[test]
    fn each_controller_is_there_or_missing_for_one_reason() {
        let mut found = Found::default();
        found.hierarchies.push(hierarchy(Version::V1, Controllers::of(&[Controller::Cpu, Controller::Pids])));
        // Of v2, which has it not; v1 has it after all.
        found.missing.push(Missing::of(Some(Controller::Cpu), "busy"));
        found.missing.push(Missing::of(Some(Controller::Memory), "busy"));
        found.missing.push(Missing::of(Some(Controller::Memory), "not writable"));
        found.choose_fence();
        found.name_the_rest(BackEnd::Auto);
        let told: Vec<_> = found.missing.iter().map(|one| (one.controller, one.why.as_str())).collect();
        let nowhere = "it is mounted nowhere, neither in cgroup v2 nor in v1";
        assert_eq!(
            told,
            [
                (Some(Controller::Memory), "busy"),
                (Some(Controller::Cpuacct), nowhere),
                (Some(Controller::Cpuset), nowhere),
                (Some(Controller::Blkio), nowhere),
            ]
        );
        assert!(found.hierarchies[0].is_fence);
    }

    #[test]
    fn what_is_not_to_be_used_is_missing_because_of_that() {
        let found = find(BackEnd::ProcessGroup);
        assert!(found.hierarchies.is_empty());
        let because = |one: &Missing| one.controller.is_none() || one.why.contains("cells.back_end");
        assert!(found.missing.iter().all(because), "{:?}", found.missing);
        assert_eq!(found.missing.len(), Controller::ALL.len() + 1);
    }
}
