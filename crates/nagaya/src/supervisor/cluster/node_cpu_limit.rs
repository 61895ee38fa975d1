//! The control group that limits this node's CPU time, if there is one, as for a container. The
//! node's load is then relative to that limit, whatever else its machine does.
//!
//! Not here: the cells of tenants, which are below it (`nagaya_keeper`), machines without such a
//! limit (`load`).

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A directory of control groups, and its kind.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CpuGroup {
    mount: PathBuf,
    dir: PathBuf,
    is_v2: bool,
}

/// The node's CPU limit and its usage.
#[derive(Debug)]
pub struct CpuAllotment {
    cpus: f64,
    /// The usage file. It counts microseconds after a word (v2), or nanoseconds.
    usage: PathBuf,
    is_v2: bool,
    last: Option<(Instant, f64)>,
}

impl CpuAllotment {
    /// Finds the limit at the start of the node. `None` if it may use all of its `processors` CPUs.
    pub fn find(processors: u32) -> Option<Self> {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let mounts = read("/proc/self/mountinfo");
        let groups = read("/proc/self/cgroup");
        let group = group(&mounts, &groups, "cpu")?;
        let (cpus, tightest) = group.tightest().filter(|(cpus, _)| *cpus < f64::from(processors))?;
        let usage = if group.is_v2 {
            tightest.join("cpu.stat")
        } else {
            let below = tightest.strip_prefix(&group.mount).ok()?;
            self::group(&mounts, &groups, "cpuacct")?.mount.join(below).join("cpuacct.usage")
        };
        Some(Self { cpus, usage, is_v2: group.is_v2, last: None })
    }

    /// Returns the part of it that was used since the last call. `None` if it is not known yet, or
    /// no longer.
    pub fn used(&mut self) -> Option<f64> {
        let now = (Instant::now(), seconds(&fs::read_to_string(&self.usage).ok()?, self.is_v2)?);
        let last = self.last.replace(now)?;
        let took = now.0.duration_since(last.0).as_secs_f64();
        (took > 0.0).then(|| ((now.1 - last.1) / took / self.cpus).clamp(0.0, 1.0))
    }
}

/// Returns seconds of CPU time from `cpu.stat` (v2) or `cpuacct.usage` (v1).
fn seconds(text: &str, is_v2: bool) -> Option<f64> {
    if is_v2 {
        let line = text.lines().find_map(|line| line.strip_prefix("usage_usec "))?;
        Some(line.trim().parse::<f64>().ok()? / 1e6)
    } else {
        Some(text.trim().parse::<f64>().ok()? / 1e9)
    }
}

/// Returns this process's place in the hierarchy with the controller: one of v1, otherwise v2.
fn group(mountinfo: &str, groups: &str, controller: &str) -> Option<CpuGroup> {
    of_version(mountinfo, groups, Some(controller)).or_else(|| of_version(mountinfo, groups, None))
}

/// Does the same for one version; `None` means v2.
fn of_version(mountinfo: &str, groups: &str, controller: Option<&str>) -> Option<CpuGroup> {
    let own = groups.lines().find_map(|line| {
        let (names, path) = line.split_once(':')?.1.split_once(':')?;
        let fits = match controller {
            Some(controller) => names.split(',').any(|name| name == controller),
            None => names.is_empty(),
        };
        fits.then_some(path)
    })?;
    // Fields of proc_pid_mountinfo(5): the fourth is the mount's root in its file system, the fifth
    // its mount point.
    let (root, mount) = mountinfo.lines().find_map(|line| {
        let (of_mount, of_system) = line.split_once(" - ")?;
        let kind = of_system.split(' ').next()?;
        let options = of_system.rsplit(' ').next()?;
        let fits = match controller {
            Some(controller) => kind == "cgroup" && options.split(',').any(|option| option == controller),
            None => kind == "cgroup2",
        };
        let mut fields = of_mount.split(' ').skip(3);
        fits.then(|| Some((fields.next()?, fields.next()?))).flatten()
    })?;
    // In a container the mount may begin at a group of its own.
    let below = Path::new(own).strip_prefix(root).unwrap_or(Path::new(""));
    Some(CpuGroup { mount: mount.into(), dir: Path::new(mount).join(below), is_v2: controller.is_none() })
}

impl CpuGroup {
    /// Returns the least limit of it and the groups above, and the group that has it.
    fn tightest(&self) -> Option<(f64, &Path)> {
        let above = self.dir.ancestors().take_while(|dir| dir.starts_with(&self.mount));
        above.filter_map(|dir| Some((self.quota(dir)?, dir))).min_by(|one, other| one.0.total_cmp(&other.0))
    }

    fn quota(&self, dir: &Path) -> Option<f64> {
        let read = |file: &str| fs::read_to_string(dir.join(file)).ok();
        if self.is_v2 {
            return quota(read("cpu.max")?.trim().split_once(' ')?);
        }
        let quota_us = read("cpu.cfs_quota_us")?;
        let period_us = read("cpu.cfs_period_us")?;
        quota((quota_us.trim(), period_us.trim()))
    }
}

/// Returns the quota in CPUs. `max` and -1 are no quota.
fn quota((quota_us, period_us): (&str, &str)) -> Option<f64> {
    let quota_us = quota_us.parse::<f64>().ok()?;
    let period_us = period_us.parse::<f64>().ok()?;
    (quota_us > 0.0 && period_us > 0.0).then(|| quota_us / period_us)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
        32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
        39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids\n\
        41 31 0:38 /machine/c1 /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn the_group_of_a_process_is_found_in_either_version() {
        let groups = "7:pids:/x\n1:cpu,cpuacct:/system.slice/nagaya.service\n0::/machine/c1/sub\n";
        let v1 = group(MOUNTS, groups, "cpuacct").unwrap();
        assert_eq!(v1.dir, Path::new("/sys/fs/cgroup/cpu,cpuacct/system.slice/nagaya.service"));
        assert!(!v1.is_v2);
        let v2 = group(MOUNTS, "7:pids:/x\n0::/machine/c1/sub\n", "cpu").unwrap();
        assert_eq!((v2.dir.as_path(), v2.is_v2), (Path::new("/sys/fs/cgroup/unified/sub"), true));
        let elsewhere = group(MOUNTS, "0::/other\n", "cpu").unwrap();
        assert_eq!(elsewhere.dir, Path::new("/sys/fs/cgroup/unified"), "what is not seen is not looked for");
        assert_eq!(group("", groups, "cpu"), None);
    }

    #[test]
    fn the_tightest_of_all_groups_above_is_what_bounds_it() {
        let mount = tempfile::tempdir().unwrap();
        let dir = mount.path().join("a/b");
        fs::create_dir_all(&dir).unwrap();
        fs::write(mount.path().join("a/cpu.max"), "50000 100000\n").unwrap();
        fs::write(dir.join("cpu.max"), "max 100000\n").unwrap();
        let group = |is_v2| CpuGroup { mount: mount.path().into(), dir: dir.clone(), is_v2 };
        assert_eq!(group(true).tightest(), Some((0.5, mount.path().join("a").as_path())));
        assert_eq!(group(false).tightest(), None);
        for (file, text) in [("cpu.cfs_quota_us", "150000\n"), ("cpu.cfs_period_us", "100000\n")] {
            fs::write(dir.join(file), text).unwrap();
        }
        assert_eq!(group(false).tightest(), Some((1.5, dir.as_path())));
        fs::write(dir.join("cpu.cfs_quota_us"), "-1\n").unwrap();
        assert_eq!(group(false).tightest(), None);
    }

    #[test]
    fn used_share_is_a_part_of_the_allotted_cpu() {
        assert_eq!(seconds("usage_usec 1500000\nuser_usec 1\n", true), Some(1.5));
        assert_eq!(seconds("2500000000\n", false), Some(2.5));
        let dir = tempfile::tempdir().unwrap();
        let usage = dir.path().join("cpuacct.usage");
        fs::write(&usage, "0\n").unwrap();
        let mut own = CpuAllotment { cpus: 0.5, usage: usage.clone(), is_v2: false, last: None };
        assert_eq!(own.used(), None, "one look says nothing");
        fs::write(&usage, "999000000000\n").unwrap();
        assert_eq!(own.used(), Some(1.0), "never more than all of it");
        fs::remove_file(&usage).unwrap();
        assert_eq!(own.used(), None);
    }
}
