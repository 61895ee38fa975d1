//! Judges the facts for instances of applications: the tiers that this machine has, and the parts
//! of a sandbox.
//!
//! Pure. Not here: the facts (`facts`, `cgroups`), the rest of the machine (`checks`).

use nagaya_base::units::format_bytes;

use super::cgroups::{CgroupHierarchy, CgroupVersion};
use super::checks::{CheckRow, CheckState};
use super::facts::NodeFacts;

/// Each sandbox has one; this is more than a node can host.
const USER_NAMESPACES_WANTED: u64 = 4_096;

pub static ROWS: &[CheckRow] = &[
    CheckRow {
        name: "sandbox",
        why: "each application runs in one; this is one that was made, with a program that ran in it",
        how: "run `nagaya doctor` as root; where it fails as root, the step that failed and its code say what is missing",
        judge: |facts| match &facts.sandbox {
            Some(Ok(())) => (CheckState::Ok, "made".into()),
            Some(Err(why)) => (CheckState::Off, why.clone()),
            None => (CheckState::Off, "not tried without root".into()),
        },
    },
    CheckRow {
        name: "node-sandbox",
        why: "the running node makes sandboxes with the rights that its unit or container leaves it, not with root's here",
        how: "start nagaya by packaging/nagaya.service, or give it the capabilities that are named",
        judge: |facts| match facts.node_sandbox.as_deref() {
            Some("ok") => (CheckState::Ok, "made".into()),
            Some(why) => (CheckState::Off, why.to_owned()),
            None => (CheckState::Ok, "no node that could be asked".into()),
        },
    },
    CheckRow {
        name: "criu",
        why: "applications can rest as images on disk, and come back in milliseconds instead of starting again",
        how: "install CRIU 4.1 or newer (Debian 13 has it), or name one as criu in [instances] (NGY0334)",
        judge: criu,
    },
    CheckRow {
        name: "machines",
        why: "a site can have a kernel of its own (--kernel), in a virtual machine; without KVM its code is translated, and runs some ten times slower",
        how: "install qemu-system-x86 and linux-image-cloud-amd64, or name a tree with that kernel as kernels in [instances] (NGY0372); KVM needs a /dev/kvm on which a kernel starts",
        judge: machines,
    },
    CheckRow {
        name: "user-namespaces",
        why: "each application has one, so that nothing in its sandbox has rights outside of it",
        how: "sysctl -w user.max_user_namespaces=65536 (and kernel.unprivileged_userns_clone=1 on Debian, without root)",
        judge: user_namespaces,
    },
    CheckRow {
        name: "freezer",
        why: "an application that rests frozen uses no CPU time at all",
        how: "mount cgroup2 anywhere (it needs no controllers; Linux 5.2), or the v1 hierarchy of freezer",
        judge: freezer,
    },
    CheckRow {
        name: "swap",
        why: "memory of an application that rests reclaimed goes there; without it, it stays until the application has an image",
        how: "compressed swap costs no disk: modprobe zram, and zramctl, mkswap and swapon it (package zram-tools does it)",
        judge: swap,
    },
    CheckRow {
        name: "unix-diag",
        why: "a rule's limits can hold for one request to an application that listens on a Unix socket",
        how: "modprobe unix_diag, or a kernel with CONFIG_UNIX_DIAG (NGY0351)",
        judge: |facts| match &facts.no_unix_diag {
            None => (CheckState::Ok, "yes".into()),
            Some(why) => (CheckState::Off, why.clone()),
        },
    },
    CheckRow {
        name: "huge-pages",
        why: "in pages of 64 KiB the memory of some applications is filled faster when they come back from their images",
        how: "huge_pages = \"64KiB\" in [instances]; it holds for all programs of the machine and needs Linux 6.8",
        judge: huge_pages,
    },
];

fn criu(facts: &NodeFacts) -> (CheckState, String) {
    match &facts.criu.path {
        Some(path) => (CheckState::Ok, format!("{}: {}", path.display(), facts.criu.reason)),
        None => (CheckState::Off, facts.criu.reason.clone()),
    }
}

fn machines(facts: &NodeFacts) -> (CheckState, String) {
    match &facts.machines {
        None => (CheckState::Off, "not tried without a sandbox".into()),
        Some(Err(why)) => (CheckState::Off, why.clone()),
        Some(Ok(probe)) if probe.reason.is_empty() => {
            (CheckState::Ok, format!("KVM, {}", probe.kernel.display()))
        }
        Some(Ok(probe)) => {
            (CheckState::Warn, format!("no KVM: {}; translated, {}", probe.reason, probe.kernel.display()))
        }
    }
}

fn user_namespaces(facts: &NodeFacts) -> (CheckState, String) {
    match facts.user_namespaces {
        Some(0) | None => (CheckState::Off, "0".into()),
        Some(max) if max < USER_NAMESPACES_WANTED => {
            (CheckState::Warn, format!("{max}, {USER_NAMESPACES_WANTED} wanted"))
        }
        Some(max) => (CheckState::Ok, max.to_string()),
    }
}

/// Judges the freezer. Cgroup v2 freezes without any controller.
fn freezer(facts: &NodeFacts) -> (CheckState, String) {
    let usable = |version| facts.cgroups.of(version).filter(|hierarchy| hierarchy.is_usable());
    let v1 = usable(CgroupVersion::V1).find(|hierarchy| hierarchy.has("freezer"));
    let v2 = usable(CgroupVersion::V2).next();
    let at = |hierarchy: &CgroupHierarchy, how: &str| {
        (CheckState::Ok, format!("{how} ({})", hierarchy.base.display()))
    };
    match (v2, v1) {
        (Some(v2), _) => at(v2, "v2"),
        (None, Some(v1)) => at(v1, "v1"),
        (None, None) => (CheckState::Off, "no usable hierarchy".into()),
    }
}

fn swap(facts: &NodeFacts) -> (CheckState, String) {
    match &facts.swaps[..] {
        [] => (CheckState::Warn, "none".into()),
        swaps => {
            let shown = swaps.iter().map(|swap| {
                let compressed = if swap.name.contains("zram") { ", compressed" } else { "" };
                format!("{} ({}{compressed})", swap.name, format_bytes(swap.bytes))
            });
            (CheckState::Ok, shown.collect::<Vec<_>>().join(", "))
        }
    }
}

/// Reports huge pages without advice: some applications gain by them, others lose.
fn huge_pages(facts: &NodeFacts) -> (CheckState, String) {
    match facts.huge_pages {
        Some(true) => (CheckState::Ok, "64 KiB".into()),
        Some(false) => (CheckState::Ok, "4 KiB".into()),
        None => (CheckState::Ok, "4 KiB: this kernel has none of 64 KiB for all programs".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::cgroups::hierarchy;
    use super::super::facts::{CriuFacts, SwapFacts};
    use super::*;

    #[test]
    fn which_criu_runs_and_why_is_said() {
        let with = |path: Option<&str>, reason: &str| NodeFacts {
            criu: CriuFacts { path: path.map(Into::into), reason: reason.into() },
            ..NodeFacts::default()
        };
        let shown = (CheckState::Ok, "/opt/criu: the configured one, version 4.2".to_owned());
        assert_eq!(criu(&with(Some("/opt/criu"), "the configured one, version 4.2")), shown);
        assert_eq!(criu(&with(None, "none is installed")), (CheckState::Off, "none is installed".into()));
    }

    #[test]
    fn either_freezer_is_enough_and_v2_needs_no_controller() {
        let mut facts = NodeFacts::default();
        assert_eq!(freezer(&facts).0, CheckState::Off);
        facts.cgroups.hierarchies = vec![hierarchy(CgroupVersion::V1, &["cpu"])];
        assert_eq!(freezer(&facts).0, CheckState::Off);
        facts.cgroups.hierarchies.push(hierarchy(CgroupVersion::V1, &["freezer"]));
        assert_eq!(freezer(&facts), (CheckState::Ok, "v1 (/sys/fs/cgroup/x)".into()));
        facts.cgroups.hierarchies.push(hierarchy(CgroupVersion::V2, &[]));
        assert_eq!(freezer(&facts), (CheckState::Ok, "v2 (/sys/fs/cgroup/x)".into()));
    }

    #[test]
    fn a_kernel_without_unix_diag_is_told() {
        let row = ROWS.iter().find(|row| row.name == "unix-diag").expect("there is such a row");
        let why = "the kernel has no unix_diag".to_owned();
        let facts = NodeFacts { no_unix_diag: Some(why.clone()), ..NodeFacts::default() };
        assert_eq!((row.judge)(&facts), (CheckState::Off, why));
        assert_eq!((row.judge)(&NodeFacts::default()).0, CheckState::Ok);
    }

    #[test]
    fn compressed_swap_is_told_from_a_disk() {
        let swap_of = |name: &str| SwapFacts { name: name.into(), bytes: 2 << 30 };
        let facts =
            NodeFacts { swaps: vec![swap_of("/dev/zram0"), swap_of("/swap")], ..NodeFacts::default() };
        let shown = "/dev/zram0 (2GiB, compressed), /swap (2GiB)";
        assert_eq!(swap(&facts), (CheckState::Ok, shown.into()));
        assert_eq!(swap(&NodeFacts::default()).0, CheckState::Warn);
    }
}
