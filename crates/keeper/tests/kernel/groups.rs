//! The cgroups of running programs, looked at from outside: where they are, and what the kernel holds them to.
//!
//! It knows the kernel's files of both versions and nothing of how the keeper makes them. Not here: what is tested
//! (`cells`, `limits`).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use nagaya_keeper::{CellMechanism, version};
use nagaya_records::feed::FeedQuery;
use serde_json::Value;

use crate::world::{BACK_END, World};

/// The version of each controller, or why there is none.
type Available = BTreeMap<String, Result<String, String>>;

/// What the keeper says it can limit on this machine with the back end of this thread.
pub fn available() -> &'static Available {
    static OF_ALL: OnceLock<Available> = OnceLock::new();
    static OF_V1: OnceLock<Available> = OnceLock::new();
    let of = if BACK_END.get() == CellMechanism::CgroupV1 { &OF_V1 } else { &OF_ALL };
    of.get_or_init(|| {
        let world = World::new().start();
        let shown: Value = serde_json::from_str(&world.ask(FeedQuery::Cells)).unwrap();
        let why = |name: &str| {
            let missing = shown["missing"].as_array().unwrap();
            let found = missing.iter().find(|entry| entry["controller"] == name);
            let found = found.unwrap_or_else(|| panic!("nothing says why there is no {name}: {shown}"));
            found["why"].as_str().filter(|why| !why.is_empty()).unwrap().to_owned()
        };
        let controllers = shown["controllers"].as_object().unwrap();
        assert_eq!(controllers.len(), 7, "six controllers and the fence: {shown}");
        controllers
            .iter()
            .map(|(name, version)| {
                (name.clone(), version.as_str().map(str::to_owned).ok_or_else(|| why(name)))
            })
            .collect()
    })
}

/// Why a test that needs these controllers cannot run here, if it cannot.
pub fn missing(needs: &[&str]) -> Option<String> {
    needs.iter().find_map(|name| {
        if *name == FAIR_AFTER_IDLE {
            return is_unfair_after_idle().then(|| "directories are idle from Linux 6.7 on".into());
        }
        available()[*name].as_ref().err().map(|why| format!("no controller {name} here: {why}"))
    })
}

/// What a fact needs beside controllers: a kernel on which a directory that was idle has its turns at once (`cells::hierarchy`).
pub const FAIR_AFTER_IDLE: &str = "fair after idle";

fn is_unfair_after_idle() -> bool {
    version::of_kernel().is_none_or(|version| version < (6, 7))
}

/// Whether a controller is one of cgroup v2.
pub fn is_v2(controller: &str) -> bool {
    available()[controller].as_deref() == Ok("v2")
}

/// The directory of the cgroup a process is in, for a controller by its v1 name, or for the fence.
pub fn of(pid: i32, controller: &str) -> PathBuf {
    let controller = hierarchy(controller);
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let wanted = |names: &str| match is_v2(controller) {
        true => names.is_empty(),
        false => names.split(',').any(|name| name == controller),
    };
    let path = groups.lines().find_map(|line| {
        let (names, path) = line.split_once(':')?.1.split_once(':')?;
        wanted(names).then(|| path.trim_start_matches('/').to_owned())
    });
    mount(controller).join(path.unwrap_or_else(|| panic!("{controller} in {groups}")))
}

/// The directory of this name above a process, or the part of a named cell's that is for some controllers.
pub fn above(pid: i32, controller: &str, name: &str) -> Option<PathBuf> {
    let fits = |dir: &&Path| {
        let rest = dir.file_name().and_then(|own| own.to_str()?.strip_prefix(name));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    of(pid, controller).ancestors().find(fits).map(Path::to_owned)
}

/// The fence of v1 is the controller of processes.
fn hierarchy(controller: &str) -> &str {
    if controller == "fence" && !is_v2("fence") { "pids" } else { controller }
}

/// Where the hierarchy of a controller is mounted.
pub fn mount(controller: &str) -> PathBuf {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let found = mounts.lines().find_map(|line| {
        let (mount, of) = line.split_once(" - ")?;
        let mut of = of.split(' ');
        let fits = match (of.next()?, is_v2(controller)) {
            ("cgroup2", true) => true,
            ("cgroup", false) => of.nth(1)?.split(',').any(|option| option == controller),
            _ => false,
        };
        fits.then(|| mount.split(' ').nth(4).map(PathBuf::from)).flatten()
    });
    found.unwrap_or_else(|| panic!("{controller} in {mounts}"))
}

/// The content of a file of a group; the name is of v1 or of v2, whichever the controller is.
pub fn read(group: &Path, controller: &str, v1: &str, v2: &str) -> String {
    let path = group.join(if is_v2(controller) { v2 } else { v1 });
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).trim().to_owned()
}

/// As `read`, if there is such a file.
pub fn peek(group: &Path, controller: &str, v1: &str, v2: &str) -> Option<String> {
    fs::read_to_string(group.join(if is_v2(controller) { v2 } else { v1 })).ok()
}

/// Quota and period, microseconds. None: no quota.
pub fn cpu_quota(group: &Path) -> Option<(u64, u64)> {
    if is_v2("cpu") {
        let text = read(group, "cpu", "", "cpu.max");
        let (quota, period) = text.split_once(' ').unwrap();
        return Some((quota.parse().ok()?, period.parse().unwrap()));
    }
    let number = |name| read(group, "cpu", name, "").parse::<i64>().unwrap();
    let quota = u64::try_from(number("cpu.cfs_quota_us")).ok()?;
    Some((quota, u64::try_from(number("cpu.cfs_period_us")).unwrap()))
}

pub fn cpu_shares(group: &Path) -> u64 {
    read(group, "cpu", "cpu.shares", "cpu.weight").parse().unwrap()
}

/// None: no limit.
pub fn processes(group: &Path) -> Option<u64> {
    read(group, "pids", "pids.max", "pids.max").parse().ok()
}

/// Bytes. What v1 shows where there is none is more than any machine has.
pub fn memory(group: &Path) -> Option<u64> {
    let text = read(group, "memory", "memory.limit_in_bytes", "memory.max");
    text.parse().ok().filter(|bytes| *bytes < 1 << 60)
}

/// Bytes read per second from a device `MAJOR:MINOR`. None: no limit.
pub fn read_bps(group: &Path, device: &str) -> Option<u64> {
    let text = read(group, "blkio", "blkio.throttle.read_bps_device", "io.max");
    let line = text.lines().find_map(|line| line.strip_prefix(device)?.strip_prefix(' '))?;
    line.trim_start_matches("rbps=").split(' ').next()?.parse().ok()
}

/// All directories in hierarchies of this machine that belong to this keeper.
pub fn of_keeper(pid: u32) -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let points =
        mounts.lines().filter(|line| line.contains(" - cgroup")).filter_map(|line| line.split(' ').nth(4));
    let mut found = Vec::new();
    for point in points {
        let entries = fs::read_dir(format!("{point}/nagaya")).into_iter().flatten().flatten();
        found.extend(entries.map(|entry| entry.path()).filter(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&format!("k{pid}-")))
        }));
    }
    found
}
