//! The mounted cgroup hierarchies, and the possibilities of the place in which a node would make
//! its cells.
//!
//! It only reads: nothing is made or moved. Not here: the conclusions (`cells`), using it
//! (`nagaya_keeper`).

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::Access;

/// Directories of a hierarchy whose files are read: all cells of a kind have the same abilities.
const CHILDREN_MAX: usize = 64;

/// Exists if systemd is process 1 (sd_booted(3)). It gives a unit with `Delegate=yes` all its
/// controllers. The cgroup of the operator's shell does not show that.
const SYSTEMD: &str = "/run/systemd/system";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupVersion {
    V1,
    V2,
}

/// One mounted hierarchy.
#[derive(Debug, Clone)]
pub struct CgroupHierarchy {
    pub version: CgroupVersion,
    /// v1: mounted here. v2: those that children of `base` can have.
    pub controllers: Vec<String>,
    /// v2: those of the hierarchy that `base` does not have.
    pub withheld: Vec<String>,
    /// Where cells would be made.
    pub base: PathBuf,
    pub read_only: bool,
    pub writable: bool,
    /// Moving a process does not wait for all CPUs (Linux 6.0).
    pub favors_moves: bool,
    /// v2: other processes are in `base`, and it is not the root. Then its children get no
    /// controllers.
    pub crowded: bool,
    /// Names of interface files seen in `base` and its children.
    pub files: BTreeSet<String>,
}

#[derive(Debug, Clone, Default)]
pub struct CgroupFacts {
    pub hierarchies: Vec<CgroupHierarchy>,
    /// Controllers in `/proc/cgroups` that are not disabled: the kernel could mount them.
    pub in_kernel: Vec<String>,
}

impl CgroupFacts {
    pub fn gather() -> Self {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let mounts = text("/proc/self/mounts");
        let own = text("/proc/self/cgroup");
        let own = if Path::new(SYSTEMD).is_dir() { "" } else { own.as_str() };
        Self { hierarchies: hierarchies(&mounts, own), in_kernel: in_kernel(&text("/proc/cgroups")) }
    }

    pub fn of(&self, version: CgroupVersion) -> impl Iterator<Item = &CgroupHierarchy> {
        self.hierarchies.iter().filter(move |hierarchy| hierarchy.version == version)
    }

    /// Returns whether groups can be made in any hierarchy.
    pub fn is_usable(&self) -> bool {
        self.hierarchies.iter().any(CgroupHierarchy::is_usable)
    }
}

impl CgroupHierarchy {
    pub fn is_usable(&self) -> bool {
        self.writable && !self.read_only
    }

    pub fn has(&self, controller: &str) -> bool {
        self.controllers.iter().any(|name| name == controller)
    }
}

/// Parses lines of `/proc/self/mounts`: device, place, type, options. `own` is `/proc/self/cgroup`;
/// if empty, the root of each is used.
fn hierarchies(mounts: &str, own: &str) -> Vec<CgroupHierarchy> {
    let mut found = Vec::new();
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let [_, place, kind, options, ..] = fields[..] else { continue };
        let options: Vec<&str> = options.split(',').collect();
        let place = Path::new(place);
        match kind {
            "cgroup2" => found.push(v2(place, &options, own)),
            "cgroup" => found.push(v1(place, &options, own)),
            _ => {}
        }
    }
    found
}

fn v1(place: &Path, options: &[&str], own: &str) -> CgroupHierarchy {
    let controllers: Vec<String> =
        V1_CONTROLLERS.into_iter().filter(|name| options.contains(name)).map(str::to_owned).collect();
    let group = own.lines().find_map(|line| {
        let (names, path) = line.split_once(':')?.1.split_once(':')?;
        names.split(',').any(|name| controllers.iter().any(|have| have == name)).then_some(path)
    });
    CgroupHierarchy { controllers, ..looked_at(CgroupVersion::V1, place, options, group) }
}

fn v2(place: &Path, options: &[&str], own: &str) -> CgroupHierarchy {
    let group = own.lines().find_map(|line| line.strip_prefix("0::"));
    let seen = looked_at(CgroupVersion::V2, place, options, group);
    let controllers = words(&seen.base.join("cgroup.controllers"));
    let withheld: Vec<_> = words(&place.join("cgroup.controllers"))
        .into_iter()
        .filter(|name| !controllers.contains(name))
        .collect();
    // Only cgroups that are not the root have this file; the root may have both processes and
    // children.
    let is_root = !seen.base.join("cgroup.type").exists();
    let given = words(&seen.base.join("cgroup.subtree_control"));
    let own_id = std::process::id().to_string();
    let others = words(&seen.base.join("cgroup.procs")).iter().any(|id| *id != own_id);
    let crowded = !is_root && others && given.is_empty() && !controllers.is_empty();
    CgroupHierarchy { controllers, withheld, crowded, ..seen }
}

/// Reads the values that both versions share.
fn looked_at(version: CgroupVersion, place: &Path, options: &[&str], group: Option<&str>) -> CgroupHierarchy {
    let below = group.unwrap_or("").trim_start_matches('/');
    // In a container the path may be one of the host, which is not visible.
    let own = Some(place.join(below)).filter(|own| !below.is_empty() && own.is_dir());
    let base = own.unwrap_or_else(|| place.to_path_buf());
    CgroupHierarchy {
        version,
        controllers: Vec::new(),
        withheld: Vec::new(),
        read_only: !options.contains(&"rw"),
        writable: rustix::fs::access(&base, Access::WRITE_OK).is_ok(),
        favors_moves: options.contains(&"favordynmods"),
        crowded: false,
        files: files(&base),
        base,
    }
}

/// The v1 controllers that nagaya uses. A mount's other options are not controllers, or not used.
const V1_CONTROLLERS: [&str; 7] = ["cpu", "cpuacct", "cpuset", "blkio", "memory", "pids", "freezer"];

fn words(file: &Path) -> Vec<String> {
    fs::read_to_string(file).unwrap_or_default().split_ascii_whitespace().map(str::to_owned).collect()
}

fn files(base: &Path) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut children = Vec::new();
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => children.push(entry.path()),
            _ => drop(names.insert(entry.file_name().to_string_lossy().into_owned())),
        }
    }
    for child in children.into_iter().take(CHILDREN_MAX) {
        let entries = fs::read_dir(child).into_iter().flatten().flatten();
        names.extend(entries.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    }
    names
}

/// Parses lines of `/proc/cgroups`: name, hierarchy, count, enabled.
fn in_kernel(text: &str) -> Vec<String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            let [name, _, _, enabled] = fields[..] else { return None };
            (enabled == "1").then(|| name.to_owned())
        })
        .collect()
}

/// Returns a usable one, with the files of a cell that most machines have.
#[cfg(test)]
pub(super) fn hierarchy(version: CgroupVersion, controllers: &[&str]) -> CgroupHierarchy {
    CgroupHierarchy {
        version,
        controllers: controllers.iter().map(|name| (*name).into()).collect(),
        withheld: Vec::new(),
        base: "/sys/fs/cgroup/x".into(),
        read_only: false,
        writable: true,
        favors_moves: false,
        crowded: false,
        files: ["cpu.max", "cpu.weight", "cgroup.kill"].map(String::from).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_both_versions_are_told_apart() {
        let mounts = "cgroup2 /proc/nonexistent/unified cgroup2 rw,nosuid,favordynmods 0 0\n\
                      cgroup /proc/nonexistent/cpu cgroup ro,nosuid,cpu,cpuacct 0 0\n\
                      cgroup /proc/nonexistent/systemd cgroup rw,xattr,name=systemd 0 0\n\
                      tmpfs /run tmpfs rw 0 0\n";
        let found = hierarchies(mounts, "");
        let told: Vec<_> = found.iter().map(|h| (h.version, h.read_only, h.writable)).collect();
        assert_eq!(
            told,
            [
                (CgroupVersion::V2, false, false),
                (CgroupVersion::V1, true, false),
                (CgroupVersion::V1, false, false)
            ]
        );
        assert_eq!(found[1].controllers, ["cpu", "cpuacct"]);
        assert!(found[0].favors_moves && !found[1].favors_moves);
    }

    #[test]
    fn controllers_of_a_delegated_cgroup_are_read_from_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("cgroup.controllers", "cpu io memory pids\n");
        write("a.service/cgroup.controllers", "cpu pids\n");
        write("a.service/cgroup.type", "domain\n");
        write("a.service/cgroup.subtree_control", "\n");
        write("a.service/cgroup.procs", "1\n");
        write("a.service/child/cpu.max", "max\n");
        let mounts = format!("cgroup2 {} cgroup2 rw 0 0\n", dir.path().display());
        let found = &hierarchies(&mounts, "0::/a.service\n")[0];
        assert_eq!(
            (&found.controllers[..], &found.withheld[..]),
            (&["cpu", "pids"].map(String::from)[..], &["io", "memory"].map(String::from)[..])
        );
        assert!(found.crowded && found.files.contains("cpu.max") && found.base.ends_with("a.service"));

        write("a.service/cgroup.subtree_control", "cpu pids\n");
        assert!(!hierarchies(&mounts, "0::/a.service\n")[0].crowded);
        let root = &hierarchies(&mounts, "")[0];
        assert!(!root.crowded && root.withheld.is_empty() && root.has("io"));
    }

    #[test]
    fn a_controller_that_was_switched_off_is_not_in_the_kernel() {
        let text = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t1\t1\t1\nmemory\t0\t1\t0\n";
        assert_eq!(in_kernel(text), ["cpu"]);
    }
}
