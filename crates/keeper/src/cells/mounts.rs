//! The mounted hierarchies of cgroups, and this process's directory in each.
//!
//! Pure: the texts of `/proc/self/mountinfo` and `/proc/self/cgroup` come from outside. Not here:
//! whether a hierarchy can be used (`hierarchy`).

use std::path::{Path, PathBuf};

use nagaya_records::cell::CgroupController;

use super::controllers::{CgroupVersion, ControllerSet};

/// Directory of all keepers below the cgroup they are in.
pub const TREE: &str = "nagaya";

/// Directory of a node's own processes on v2. They are moved there so that the cgroup they were
/// started in may have children with controllers (the rule of no internal processes,
/// Documentation/admin-guide/cgroup-v2.rst).
pub const OWN: &str = "main";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupMount {
    pub version: CgroupVersion,
    /// Those mounted here, for v1. v2 lists them in files.
    pub controllers: ControllerSet,
    /// The mounted part of the hierarchy: not all of it in a container.
    root: PathBuf,
    point: PathBuf,
}

/// Returns all mounted hierarchies that are v2 or have a controller of ours, each once.
pub fn mounts(mountinfo: &str) -> Vec<CgroupMount> {
    let mut found: Vec<CgroupMount> = Vec::new();
    for mount in mountinfo.lines().filter_map(mount) {
        if !found.iter().any(|have| have.version == mount.version && have.controllers == mount.controllers) {
            found.push(mount);
        }
    }
    found
}

/// Parses `36 35 0:30 / /sys/fs/cgroup/pids rw shared:3 - cgroup cgroup rw,pids`.
fn mount(line: &str) -> Option<CgroupMount> {
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let (root, point) = (path(place.next()?), path(place.next()?));
    let mut kind = kind.split(' ');
    let (version, controllers) = match kind.next()? {
        "cgroup2" => (CgroupVersion::V2, ControllerSet::NONE),
        "cgroup" => (CgroupVersion::V1, named(kind.nth(1)?)),
        _ => return None,
    };
    if version == CgroupVersion::V1 && controllers.is_empty() {
        return None;
    }
    Some(CgroupMount { version, controllers, root, point })
}

/// Returns this process's directory in the hierarchy of v1's `freezer`, which limits nothing and so
/// is none of the above.
pub fn freezer(mountinfo: &str, groups: &str) -> Option<PathBuf> {
    let has_it = |list: &str| list.split(',').any(|word| word == "freezer");
    let point = mountinfo.lines().find_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let is_it = kind.next()? == "cgroup" && has_it(kind.nth(1)?);
        let mut place = place.split(' ').skip(3);
        let (root, point) = (path(place.next()?), path(place.next()?));
        is_it.then_some((root, point))
    });
    let (root, point) = point?;
    let group = groups.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        has_it(controllers).then_some(Path::new(path))
    });
    Some(point.join(group?.strip_prefix(root).unwrap_or(Path::new(""))))
}

fn named(list: &str) -> ControllerSet {
    let words: Vec<&str> = list.split(',').collect();
    CgroupController::ALL
        .into_iter()
        .filter(|controller| words.contains(&controller.as_str()))
        .fold(ControllerSet::NONE, ControllerSet::with)
}

/// Decodes a path. White space and backslashes are octal in `mountinfo` (proc_pid_mountinfo(5)).
fn path(text: &str) -> PathBuf {
    let plain = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    plain.into_iter().fold(text.to_owned(), |text, (octal, one)| text.replace(octal, one)).into()
}

impl CgroupMount {
    /// Returns the directory of this process's cgroup, from lines of `/proc/self/cgroup`:
    /// `8:cpu,cpuacct:/x`, `0::/x`. An earlier keeper may have moved a node's own processes below
    /// it.
    pub fn own(&self, cgroup: &str) -> PathBuf {
        let group = cgroup.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let fits = match self.version {
                CgroupVersion::V1 => !named(controllers).and(self.controllers).is_empty(),
                CgroupVersion::V2 => controllers.is_empty(),
            };
            fits.then_some(Path::new(path))
        });
        let group = group.unwrap_or(Path::new("/"));
        // In a container the path may be one of the host. A part of it, or another part, is mounted
        // here.
        let beneath = group.strip_prefix(&self.root).unwrap_or(Path::new(""));
        let dir = self.point.join(beneath);
        let own = Path::new(TREE).join(OWN);
        match dir.ends_with(&own) {
            true => dir.ancestors().nth(2).map_or(dir.clone(), Path::to_path_buf),
            false => dir,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 master:2 - cgroup cgroup rw,cpu,cpuacct
36 31 0:33 / /sys/fs/cgroup/devices rw,relatime - cgroup cgroup rw,devices
37 31 0:34 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
39 31 0:36 /docker/ab /mnt/a\\040b rw,relatime - cgroup cgroup rw,pids
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate
42 31 0:38 / /elsewhere rw,relatime - cgroup2 cgroup2 rw
broken line - cgroup";

    #[test]
    fn hierarchies_of_both_versions_are_found_once() {
        let found = mounts(HYBRID);
        let told: Vec<_> =
            found.iter().map(|m| (m.version, m.controllers.to_string(), m.point.to_str().unwrap())).collect();
        assert_eq!(
            told,
            [
                (CgroupVersion::V1, "cpu+cpuacct".into(), "/sys/fs/cgroup/cpu,cpuacct"),
                (CgroupVersion::V1, "pids".into(), "/mnt/a b"),
                (CgroupVersion::V2, String::new(), "/sys/fs/cgroup/unified"),
            ]
        );
    }

    #[test]
    fn the_freezer_is_found_where_it_is_mounted() {
        let mounts =
            format!("{HYBRID}\n38 31 0:35 / /sys/fs/cgroup/freezer rw shared:14 - cgroup cgroup rw,freezer");
        let own = |groups: &str| freezer(&mounts, groups);
        assert_eq!(own("3:freezer:/a/b\n0::/u"), Some("/sys/fs/cgroup/freezer/a/b".into()));
        assert_eq!((own("0::/u"), freezer(HYBRID, "3:freezer:/a")), (None, None));
    }

    #[test]
    fn the_own_cgroup_is_found_in_each() {
        let found = mounts(HYBRID);
        let own = |groups: &str| found.iter().map(|m| m.own(groups)).collect::<Vec<_>>();
        let expect = |paths: [&str; 3]| paths.map(PathBuf::from).to_vec();
        let cpu = "/sys/fs/cgroup/cpu,cpuacct";
        assert_eq!(
            own("9:name=systemd:/s\n8:pids:/docker/ab/x\n2:cpu,cpuacct:/a:b\n0::/u"),
            expect([&format!("{cpu}/a:b"), "/mnt/a b/x", "/sys/fs/cgroup/unified/u"])
        );
        // Of the host, not to be seen here; and nothing said at all.
        assert_eq!(own("8:pids:/elsewhere\n"), expect([cpu, "/mnt/a b", "/sys/fs/cgroup/unified"]));
        assert_eq!(own("0::/x.service/nagaya/main\n")[2], Path::new("/sys/fs/cgroup/unified/x.service"));
        assert_eq!(own("0::/nagaya/main\n")[2], Path::new("/sys/fs/cgroup/unified"));
    }
}
