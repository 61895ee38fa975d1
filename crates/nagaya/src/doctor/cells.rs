//! Judges the facts for cells and rules: each controller with its place, or why it limits nothing.
//!
//! Pure. Not here: the facts (`cgroups`, `facts`), the rest of the machine (`checks`).

use nagaya_keeper::CellMechanism;

use super::cgroups::{CgroupHierarchy, CgroupVersion};
use super::checks::{CheckRow, CheckState};
use super::facts::{DiskFacts, NodeFacts};

/// Remedy for a missing controller.
const HOW: &str = "cgroup v2: mount it (mount -t cgroup2 none /sys/fs/cgroup) with the controller in \
                   cgroup.controllers, and Delegate=yes in the unit; v1: mount -t cgroup -o NAME none \
                   /sys/fs/cgroup/NAME; in a container give nagaya a writable cgroup of its own";

pub static ROWS: &[CheckRow] = &[
    CheckRow {
        name: "cell-cpu",
        why: "limits CPU time and weighs tenants, sites and requests against each other",
        how: HOW,
        judge: |facts| controller(facts, "cpu", "cpu"),
    },
    CheckRow {
        name: "cell-cpuacct",
        why: "counts the CPU time of each request",
        how: HOW,
        judge: |facts| controller(facts, "cpuacct", ""),
    },
    CheckRow {
        name: "cell-io",
        why: "limits and counts what is read from and written to disks",
        how: HOW,
        judge: |facts| controller(facts, "blkio", "io"),
    },
    CheckRow {
        name: "cell-memory",
        why: "limits memory of tenants; on v2, only with it written data is charged to its writer",
        how: HOW,
        judge: |facts| controller(facts, "memory", "memory"),
    },
    CheckRow {
        name: "cell-pids",
        why: "limits processes, and so a fork bomb",
        how: HOW,
        judge: |facts| controller(facts, "pids", "pids"),
    },
    CheckRow {
        name: "cell-cpuset",
        why: "binds cells to processors and memory nodes",
        how: HOW,
        judge: |facts| controller(facts, "cpuset", "cpuset"),
    },
    CheckRow {
        name: "cell-fence",
        why: "ends a program with all it started, whatever they made of themselves",
        how: "mount cgroup2 anywhere (it needs no controllers; Linux 5.14), or the v1 hierarchy of pids",
        judge: fence,
    },
    CheckRow {
        name: "cpu-bandwidth",
        why: "CPU limits in per cent",
        how: "a kernel with CONFIG_CFS_BANDWIDTH=y",
        judge: |facts| file(facts, &["cpu.max", "cpu.cfs_quota_us"]),
    },
    CheckRow {
        name: "cpu-burst",
        why: "a limited request that was idle may catch up, so that a short one is not throttled",
        how: "Linux 5.14 or newer",
        judge: |facts| file(facts, &["cpu.max.burst", "cpu.cfs_burst_us"]),
    },
    CheckRow {
        name: "io-throttling",
        why: "limits of bytes and operations per second for each disk",
        how: "a kernel with CONFIG_BLK_DEV_THROTTLING=y",
        judge: |facts| file(facts, &["io.max", "blkio.throttle.read_bps_device"]),
    },
    CheckRow {
        name: "pressure",
        why: "`nagaya cells` shows who waits for CPU, disk and memory",
        how: "a kernel with CONFIG_PSI=y, booted with psi=1",
        judge: |facts| match (
            facts.pressure,
            facts.cgroups.of(CgroupVersion::V2).any(CgroupHierarchy::is_usable),
        ) {
            (true, true) => (CheckState::Ok, "of the machine, and of each cell on v2".into()),
            (true, false) => (CheckState::Ok, "of the machine".into()),
            (false, _) => (CheckState::Off, "no /proc/pressure".into()),
        },
    },
    CheckRow {
        name: "favordynmods",
        why: "moving a PHP worker between cells of v2 does not wait for all processors",
        how: "mount -o remount,favordynmods /sys/fs/cgroup (Linux 6.0)",
        judge: |facts| {
            let used = facts.cgroups.of(CgroupVersion::V2).find(|v2| v2.is_usable() && has_ours(v2));
            match used {
                None => (CheckState::Ok, "not needed: v2 has no controllers here".into()),
                Some(v2) if v2.favors_moves => (CheckState::Ok, "yes".into()),
                Some(_) => (CheckState::Warn, "no".into()),
            }
        },
    },
    CheckRow {
        name: "sites-disk",
        why: "`:root` in a limit means the disk of a site's files, and a limit holds for a whole disk",
        how: "keep homes of tenants on a block device (not tmpfs, overlay or NFS), or name a disk by its number in limits",
        judge: disks,
    },
    CheckRow {
        name: "rules",
        why: "a rule that cannot be read or compiled decides about no request",
        how: "correct the file, or let the edge read it (chmod); a running node takes it as soon as it has changed",
        judge: |facts| match &facts.rule_troubles[..] {
            [] if facts.rule_files == 0 => (CheckState::Ok, "none configured".into()),
            [] => (CheckState::Ok, format!("{} in order", facts.rule_files)),
            [first] => (CheckState::Warn, first.clone()),
            [first, rest @ ..] => (CheckState::Warn, format!("{first}; and {} more", rest.len())),
        },
    },
    CheckRow {
        name: "mruby",
        why: "runs the rules; part of nagaya",
        how: "",
        judge: |_| (CheckState::Ok, nagaya_rules::MRUBY_VERSION.into()),
    },
];

/// Returns where a controller is, by its names on v1 and v2. An empty name means that v2 needs no
/// controller for it.
fn controller(facts: &NodeFacts, v1: &str, v2: &str) -> (CheckState, String) {
    let cgroups = &facts.cgroups;
    if facts.back_end == CellMechanism::ProcessGroup {
        return (CheckState::Off, "back_end in [cells] is process-group".into());
    }
    let mut why = Vec::new();
    for version in [CgroupVersion::V2, CgroupVersion::V1] {
        let (name, word, is_allowed) = match version {
            CgroupVersion::V2 => (v2, "v2", facts.back_end != CellMechanism::CgroupV1),
            CgroupVersion::V1 => (v1, "v1", facts.back_end != CellMechanism::CgroupV2),
        };
        for hierarchy in cgroups.of(version) {
            let base = hierarchy.base.display();
            // Every cgroup of v2 counts CPU time; that is useful only if requests have one.
            let has = if name.is_empty() { hierarchy.has("cpu") } else { hierarchy.has(name) };
            let withheld = hierarchy.withheld.iter().any(|other| other == name);
            match () {
                () if withheld => why.push(format!("v2 has it, but has not delegated it to {base}")),
                () if !has => {}
                () if !is_allowed => why.push(format!("{word} has it, and back_end in [cells] excludes that")),
                () if hierarchy.read_only => why.push(format!("{base} is mounted read-only")),
                () if !hierarchy.writable => why.push(format!("{base} cannot be written")),
                () if hierarchy.crowded => why.push(format!(
                    "other processes are in {base}, so its children get no controllers (no internal processes)"
                )),
                () => return (CheckState::Ok, format!("{word}, {base}")),
            }
        }
    }
    if why.is_empty() {
        let in_kernel = cgroups.in_kernel.iter().any(|name| name == v1);
        why.push(
            if in_kernel { "not mounted" } else { "not in this kernel, or switched off at boot" }.into(),
        );
    }
    (CheckState::Off, why.join("; "))
}

fn fence(facts: &NodeFacts) -> (CheckState, String) {
    let usable = |version| facts.cgroups.of(version).filter(|hierarchy| hierarchy.is_usable());
    let (v1, v2) = match facts.back_end {
        CellMechanism::Auto => (true, true),
        CellMechanism::CgroupV2 => (false, true),
        CellMechanism::CgroupV1 => (true, false),
        CellMechanism::ProcessGroup => (false, false),
    };
    if let Some(v2) = usable(CgroupVersion::V2).next().filter(|_| v2) {
        return (CheckState::Ok, format!("v2, {}", v2.base.display()));
    }
    match usable(CgroupVersion::V1).find(|hierarchy| v1 && hierarchy.has("pids")) {
        Some(v1) => (CheckState::Ok, format!("v1, {}", v1.base.display())),
        None => (
            CheckState::Off,
            "process groups only: a program that leaves its group outlives its request".into(),
        ),
    }
}

/// Returns whether a v2 hierarchy has anything that cells use.
fn has_ours(v2: &CgroupHierarchy) -> bool {
    ["cpu", "io", "memory", "pids", "cpuset"].into_iter().any(|name| v2.has(name))
}

/// Returns whether cells have one of these interface files.
fn file(facts: &NodeFacts, names: &[&str]) -> (CheckState, String) {
    let mut usable = facts.cgroups.hierarchies.iter().filter(|hierarchy| hierarchy.is_usable());
    let found = usable.find_map(|hierarchy| names.iter().find(|name| hierarchy.files.contains(**name)));
    if let Some(name) = found {
        return (CheckState::Ok, (*name).into());
    }
    // The root of v2 has none of these files: they are visible only if there is a cell.
    let v2 = facts.cgroups.of(CgroupVersion::V2).any(|v2| v2.is_usable() && has_ours(v2));
    let seen = facts
        .cgroups
        .of(CgroupVersion::V2)
        .any(|v2| v2.files.contains("cgroup.kill") && v2.files.contains("cpu.weight"));
    if v2 && !seen {
        (CheckState::Warn, "unknown until there is a cell: look again while a node runs".into())
    } else {
        (CheckState::Off, format!("no {}", names.join(", no ")))
    }
}

fn disks(facts: &NodeFacts) -> (CheckState, String) {
    if facts.disks.is_empty() {
        return (CheckState::Ok, "no tenants yet".into());
    }
    let told = facts.disks.iter().map(|DiskFacts { number: (major, minor), whole, example }| {
        let example = example.display();
        match whole {
            Some((whole, name)) if whole == &(*major, *minor) => {
                format!("{major}:{minor} ({name}), {example}")
            }
            Some(((a, b), name)) => format!("{major}:{minor} of {a}:{b} ({name}), {example}"),
            None => format!("{major}:{minor} is no disk, {example}"),
        }
    });
    let state =
        if facts.disks.iter().all(|disk| disk.whole.is_some()) { CheckState::Ok } else { CheckState::Warn };
    (state, told.collect::<Vec<_>>().join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::cgroups::{CgroupFacts, hierarchy};

    fn facts(hierarchies: Vec<CgroupHierarchy>) -> NodeFacts {
        let in_kernel = ["cpu", "memory"].map(String::from).into();
        NodeFacts { cgroups: CgroupFacts { hierarchies, in_kernel }, ..NodeFacts::default() }
    }

    fn judged(facts: &NodeFacts, name: &str) -> (CheckState, String) {
        (ROWS.iter().find(|row| row.name == name).expect("there is such a row").judge)(facts)
    }

    #[test]
    fn a_hybrid_machine_has_each_controller_where_it_is_mounted() {
        let facts = facts(vec![
            hierarchy(CgroupVersion::V2, &[]),
            hierarchy(CgroupVersion::V1, &["cpu", "cpuacct"]),
            hierarchy(CgroupVersion::V1, &["blkio"]),
        ]);
        assert_eq!(judged(&facts, "cell-cpu"), (CheckState::Ok, "v1, /sys/fs/cgroup/x".into()));
        assert_eq!(judged(&facts, "cell-io").0, CheckState::Ok);
        assert_eq!(judged(&facts, "cell-fence"), (CheckState::Ok, "v2, /sys/fs/cgroup/x".into()));
        assert_eq!(judged(&facts, "cell-memory"), (CheckState::Off, "not mounted".into()));
        let (state, why) = judged(&facts, "cell-pids");
        assert_eq!((state, why.contains("kernel")), (CheckState::Off, true), "{why}");
        assert_eq!(judged(&facts, "favordynmods").0, CheckState::Ok);
    }

    #[test]
    fn a_controller_that_cannot_be_used_says_why() {
        type Change = fn(&mut CgroupHierarchy);
        let why = |change: Change| {
            let mut v2 = hierarchy(CgroupVersion::V2, &["cpu", "io"]);
            change(&mut v2);
            judged(&facts(vec![v2]), "cell-cpu")
        };
        assert_eq!(why(|_| {}).0, CheckState::Ok);
        let cases: [(Change, &str); 4] = [
            (|v2| v2.read_only = true, "read-only"),
            (|v2| v2.writable = false, "cannot be written"),
            (|v2| v2.crowded = true, "no internal processes"),
            (|v2| std::mem::swap(&mut v2.controllers, &mut v2.withheld), "delegated"),
        ];
        for (change, said) in cases {
            let (state, text) = why(change);
            assert!(state == CheckState::Off && text.contains(said), "{text}");
        }
    }

    #[test]
    fn a_chosen_back_end_excludes_the_other() {
        let mut facts = facts(vec![hierarchy(CgroupVersion::V1, &["cpu", "pids"])]);
        facts.back_end = CellMechanism::CgroupV2;
        assert!(judged(&facts, "cell-cpu").1.contains("excludes"));
        assert_eq!(judged(&facts, "cell-fence").0, CheckState::Off);
        facts.back_end = CellMechanism::ProcessGroup;
        assert!(judged(&facts, "cell-cpu").1.contains("process-group"));
        facts.back_end = CellMechanism::CgroupV1;
        assert_eq!(judged(&facts, "cell-fence").0, CheckState::Ok);
    }

    #[test]
    fn interface_files_show_what_the_kernel_can() {
        let mut facts = facts(vec![hierarchy(CgroupVersion::V2, &["cpu"])]);
        assert_eq!(judged(&facts, "cpu-bandwidth"), (CheckState::Ok, "cpu.max".into()));
        assert_eq!(
            judged(&facts, "cpu-burst"),
            (CheckState::Off, "no cpu.max.burst, no cpu.cfs_burst_us".into())
        );
        facts.cgroups.hierarchies[0].files.clear();
        assert_eq!(judged(&facts, "cpu-bandwidth").0, CheckState::Warn);
    }

    #[test]
    fn disks_and_rules_name_what_is_off() {
        let mut facts = NodeFacts::default();
        assert_eq!(
            (judged(&facts, "sites-disk").0, judged(&facts, "rules").0),
            (CheckState::Ok, CheckState::Ok)
        );
        facts.disks = vec![
            DiskFacts { number: (8, 1), whole: Some(((8, 0), "sda".into())), example: "/home/a".into() },
            DiskFacts { number: (0, 40), whole: None, example: "/srv".into() },
        ];
        let expected = "8:1 of 8:0 (sda), /home/a; 0:40 is no disk, /srv";
        assert_eq!(judged(&facts, "sites-disk"), (CheckState::Warn, expected.into()));
        facts.rule_files = 3;
        facts.rule_troubles = vec!["/a.rb:3: syntax".into(), "/b.rb: missing".into()];
        assert_eq!(judged(&facts, "rules"), (CheckState::Warn, "/a.rb:3: syntax; and 1 more".into()));
    }
}
